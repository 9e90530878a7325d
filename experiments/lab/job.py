"""What every sweep does: each run that is not done yet, then the report."""

import importlib
import json
import os
import platform
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn

from rotary.cli.cluster import cluster
from rotary.fanout import fan_out

from . import command, results
from .data import Batch
from .sweep import Run, stages
from .train import Processes, Recipe, Trained, processes, progress, train


class Job(NamedTuple):
    """One run that is to be done.

    settings  everything that it follows from, by which the results know it
    out       the folder of results and checkpoints
    is_told   whether a bar is shown and the row is written here; of a worker another process does
    """

    settings: results.Row
    out: Path
    these: Processes
    is_told: bool = True

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
        name = f"{title} {self.name}" if self.is_told else ""
        return train(model, batches, self.recipe, self.checkpoint, look, self.these, name)

    def written(self, found: results.Row) -> results.Row:
        """The row of the finished run; the first process keeps it."""
        row = {"run": self.settings, **found}
        if self.is_told and self.these.rank == 0:
            self.keep(row)
        return row

    def keep(self, row: results.Row) -> None:
        """Write the row down and drop the checkpoint."""
        results.append(self.out / "results.jsonl", row)
        self.checkpoint.unlink()


class Sweep(NamedTuple):
    """An experiment whose methods are all trained alike.

    full, quick  its plans, which have `rates`; the command line says which
    subject      what is learned from, given the name of a text
    settings_of  (plan, subject, run) -> everything that a run follows from
    trained      (plan, subject, job) -> the row that `Job.written` gives
    table, figure  of all rows; the figure goes into the file `picture`
    """

    doc: str | None
    folder: Path
    full: Any
    quick: Any
    methods: Sequence[str]
    subject: Callable[[str], Any]
    settings_of: Callable[[Any, Any, Run], results.Row]
    trained: Callable[[Any, Any, Job], results.Row]
    table: Callable[[Sequence[results.Row]], str]
    figure: Callable[[Sequence[results.Row]], Figure]
    picture: str


class Task(NamedTuple):
    """A run for a worker: what leads to the same `Job` in another process."""

    experiment: str
    quick: bool
    text: str
    run: Run
    settings: results.Row
    out: str
    device: str
    threads: int


def carry_out(sweep: Sweep, executor: Executor | None = None) -> None:
    """Train what is not trained yet, compare, write the results.

    With an executor, or `--dask` on the command line, its workers train the runs of a stage side
    by side, and this process alone writes the rows, as the runs end.
    """
    with command.options(sweep.doc, sweep.folder, fans_out=True) as options:
        plan = sweep.quick if options.quick else sweep.full
        subject = sweep.subject(options.text)
        with (
            processes(options.device) as these,
            cluster(options.dask, packages=("torch",), modules=(_module(sweep.folder.name),),
                    folder=options.out) as workers,
        ):  # fmt: skip
            executor = workers or executor
            if executor is not None and these.size > 1:
                raise ValueError("torchrun and --dask both deal out the work; take one of them")
            rows = results.rows(options.out / "results.jsonl")
            of_this_recipe(rows, lambda run: sweep.settings_of(plan, subject, run))
            for stage in stages(sweep.methods, plan.rates, options.seeds, rows):
                asked = ((run, sweep.settings_of(plan, subject, run)) for run in stage)
                new = [pair for pair in asked if not results.is_done(rows, pair[1])]
                if executor is not None:
                    _fan_out(sweep, options, these, new, rows, executor)
                    continue
                for _, settings in new:
                    rows.append(sweep.trained(plan, subject, Job(settings, options.out, these)))
        if these.rank == 0:
            results.report(options.out, sweep.table, sweep.figure, sweep.picture)


def of_this_recipe(rows: Sequence[results.Row], settings_of: Callable[[Run], results.Row]) -> None:
    """Raise ValueError where a row is of a run that today's code would do otherwise.

    Rows of two recipes in one file would be compared as if they were of one.
    """
    for row in rows:
        recipe = row["run"]["recipe"]
        run = Run(row["run"]["method"], recipe["learning_rate"], recipe["seed"])
        if not results.is_done([row], settings_of(run)):
            raise ValueError(
                f"results.jsonl has a run of another recipe, {run.method} {run.rate:g} seed "
                f"{run.seed}; move the file away, or take another folder by --out"
            )


def _fan_out(
    sweep: Sweep,
    options: command.Options,
    these: Processes,
    asked: Sequence[tuple[Run, results.Row]],
    rows: list[results.Row],
    executor: Executor,
) -> None:
    """Have workers train the runs of a stage; keep their rows as they come."""
    tasks = [
        Task(
            sweep.folder.name, options.quick, options.text, run, settings,
            os.path.abspath(options.out), options.device, options.threads,
        )
        for run, settings in asked
    ]  # fmt: skip
    with progress(f"{sweep.folder.name}: runs", len(tasks), 0, bool(tasks)) as advance:

        def finished(found: list[tuple[Task, results.Row]]) -> None:
            for task, row in found:
                Job(task.settings, options.out, these).keep(row)
                rows.append(row)
                advance()

        fan_out(trained_elsewhere, tasks, executor, finished)


_ALONE = threading.Lock()  # torch has one random state for all threads of a process


def trained_elsewhere(task: Task) -> results.Row:
    """The row of one run, trained in this process for another one, which keeps it.

    A run that another worker has begun goes on from its checkpoint. Raises ValueError where the
    run would follow from something else than it does there.
    """
    sweep = importlib.import_module(_module(task.experiment)).SWEEP
    plan = sweep.quick if task.quick else sweep.full
    with _ALONE, processes(task.device) as these:
        torch.set_num_threads(task.threads)
        subject = sweep.subject(task.text)
        settings = sweep.settings_of(plan, subject, task.run)
        if json.dumps(settings) != json.dumps(task.settings):
            raise ValueError(
                f"{task.run} follows from other settings on {platform.node()}; workers need the "
                "same code and the same text"
            )
        return sweep.trained(plan, subject, Job(settings, Path(task.out), these, False))


def _module(experiment: str) -> str:
    return f"experiments.{experiment}.run"
