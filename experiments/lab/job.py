"""What every sweep does: each run that is not done yet, then the report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from torch import nn

from . import command, results
from .data import Batch
from .sweep import Run, runs
from .train import Processes, Recipe, Trained, processes, train


class Job(NamedTuple):
    """One run that is to be done.

    settings  everything that it follows from, by which the results know it
    out       the folder of results and checkpoints
    """

    settings: results.Row
    out: Path
    these: Processes

    @property
    def recipe(self) -> Recipe:
        """How the model is trained."""
        return Recipe(**self.settings["recipe"])

    @property
    def name(self) -> str:
        """Method, learning rate and seed."""
        recipe = self.recipe
        return f"{self.settings['method']} {recipe.learning_rate:g} seed {recipe.seed}"

    @property
    def checkpoint(self) -> Path:
        """Where the run keeps its state until it is done."""
        return self.out / "checkpoints" / f"{self.name}.pt"

    def train(
        self,
        title: str,
        model: nn.Module,
        batches: Callable[[int], Batch],
        look: Callable[[Any], dict[str, float]],
    ) -> Trained:
        """Train a model by the recipe, from its checkpoint as far as that goes."""
        name = f"{title} {self.name}"
        return train(model, batches, self.recipe, self.checkpoint, look, self.these, name)

    def written(self, found: results.Row) -> results.Row:
        """The row of the finished run; the first process writes it and drops the checkpoint."""
        row = {"run": self.settings, **found}
        if self.these.rank == 0:
            results.append(self.out / "results.jsonl", row)
            self.checkpoint.unlink()
        return row


class Sweep(NamedTuple):
    """An experiment whose methods are all trained alike.

    full, smoke  its plans, which have `rates`; the command line says which
    subject      what is learned from, given the name of a text
    settings_of  (plan, subject, run) -> everything that a run follows from
    trained      (plan, subject, job) -> the row that `Job.written` gives
    table, figure  of all rows; the figure goes into the file `picture`
    """

    doc: str | None
    folder: Path
    full: Any
    smoke: Any
    methods: Sequence[str]
    seeds: Sequence[int]
    subject: Callable[[str], Any]
    settings_of: Callable[[Any, Any, Run], results.Row]
    trained: Callable[[Any, Any, Job], results.Row]
    table: Callable[[Sequence[results.Row]], str]
    figure: Callable[[Sequence[results.Row]], Figure]
    picture: str


def carry_out(sweep: Sweep) -> None:
    """Train what is not trained yet, compare, write the results."""
    with command.options(sweep.doc, sweep.folder) as options:
        plan = sweep.smoke if options.smoke else sweep.full
        subject = sweep.subject(options.text)
        with processes(options.device) as these:
            rows = results.rows(options.out / "results.jsonl")
            for run in runs(sweep.methods, plan.rates, sweep.seeds, rows):
                settings = sweep.settings_of(plan, subject, run)
                if not results.is_done(rows, settings):
                    rows.append(sweep.trained(plan, subject, Job(settings, options.out, these)))
        if these.rank == 0:
            results.report(options.out, sweep.table, sweep.figure, sweep.picture)
