"""What an experiment does that trains one model by each seed, and then reads or tunes it."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from . import command, data, results
from .job import of_this_recipe
from .sweep import Run, best_rate, runs
from .train import Processes, processes

TRAINED = "trained"  # the method of the runs that all others start from


class Experiment(NamedTuple):
    """An experiment whose other methods start from the weights of its method TRAINED.

    full, quick  its plans, which have `rates` and `tuning_rates`
    settings_of  (plan, text, run, rate that TRAINED is chosen at) -> all that a run follows from
    trained      (job, run) -> the row of a run of TRAINED
    work         (job, seeds): everything that comes after
    table, figure  of all rows; the figure goes into the file `picture`
    """

    doc: str | None
    folder: Path
    full: Any
    quick: Any
    settings_of: Callable[[Any, data.Text, Run, float], results.Row]
    trained: Callable[["Job", Run], results.Row]
    work: Callable[["Job", Sequence[int]], None]
    table: Callable[[Sequence[results.Row]], str]
    figure: Callable[[Sequence[results.Row]], Figure]
    picture: str


@dataclasses.dataclass
class Job:
    """What all runs share, and the rows of those that are finished."""

    experiment: Experiment
    plan: Any
    text: data.Text
    out: Path
    these: Processes
    rows: list[results.Row]

    @property
    def start(self) -> float:
        """The learning rate that the common weights are trained at."""
        return best_rate(self.rows, TRAINED)

    def settings(self, run: Run) -> results.Row:
        """All that a run follows from."""
        rate = run.rate if run.method == TRAINED else self.start
        return self.experiment.settings_of(self.plan, self.text, run, rate)

    def is_done(self, run: Run) -> bool:
        """Whether a run is among the rows."""
        return results.is_done(self.rows, self.settings(run))

    def write(self, run: Run, found: results.Row) -> None:
        """Add a finished run to the rows; the first process writes it down."""
        row = {"run": self.settings(run), **found}
        self.rows.append(row)
        if self.these.rank == 0:
            results.append(self.out / "results.jsonl", row)

    def checkpoint(self, run: Run) -> Path:
        """Where a run keeps its state until all runs are done."""
        return self.out / "checkpoints" / f"{run.method} {run.rate:g} {run.seed}.pt"

    def sweep(
        self,
        methods: Sequence[str],
        rates: Sequence[float],
        seeds: Sequence[int],
        trained: Callable[["Job", Run], results.Row],
    ) -> None:
        """Do every run of some methods that is not done yet."""
        for run in runs(methods, rates, seeds, self.rows):
            if not self.is_done(run):
                self.write(run, trained(self, run))


def carry_out(experiment: Experiment) -> None:
    """Train what is not trained yet, do the rest, write the results."""
    with command.options(experiment.doc, experiment.folder) as options:
        plan = experiment.quick if options.quick else experiment.full
        with processes(options.device) as these:
            rows = results.rows(options.out / "results.jsonl")
            job = Job(experiment, plan, data.text(options.text), options.out, these, rows)
            of_this_recipe(rows, job.settings)
            job.sweep((TRAINED,), plan.rates, options.seeds, experiment.trained)
            experiment.work(job, options.seeds)
        if these.rank == 0:
            for checkpoint in (options.out / "checkpoints").glob("*.pt"):
                checkpoint.unlink()
            results.report(options.out, experiment.table, experiment.figure, experiment.picture)
