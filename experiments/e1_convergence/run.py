"""RoPE, sinusoidal, learned and no positions: how fast a masked and a causal byte model learn.

    python -m experiments.e1_convergence.run [--quick]
    torchrun --nproc-per-node 2 -m experiments.e1_convergence.run      # on two cores

Killed, it goes on where it was. The learning rate of each encoding is the best of the same sweep
on the first seed, and is then used for all seeds.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ..lab import data, results
from ..lab.job import Job, Sweep, carry_out
from ..lab.model import ENCODINGS, Config, Model, bits, build
from ..lab.sweep import Run, best_rate, chosen
from ..lab.train import Recipe

FOLDER = Path(__file__).parent
TASKS = ("masked", "causal")
METHODS = tuple(f"{task} {encoding}" for task in TASKS for encoding in ENCODINGS)
REFERENCE = "sinusoidal"
COLORS = {"rope": "#0072b2", "sinusoidal": "#d55e00", "learned": "#009e73", "none": "#000000"}


class Plan(NamedTuple):
    """The size of every run."""

    model: Config
    steps: int
    rows: int
    length: int
    looked_at: int  # rows of held-out text
    rates: tuple[float, ...]


FULL = Plan(Config(length=128), 1000, 16, 128, 256, (1e-3, 3e-3))
QUICK = Plan(Config(length=32, layers=2, width=32), 20, 8, 32, 8, (1e-3, 3e-3))


def settings_of(plan: Plan, text: data.Text, run: Run) -> results.Row:
    """Everything that a run follows from."""
    task, encoding = run.method.split()
    model = dataclasses.replace(plan.model, encoding=encoding, causal=task == "causal")
    recipe = Recipe(
        steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed, final=1.0,
        warmup=plan.steps // 10, save_every=200, look_every=plan.steps // 20,
    )  # fmt: skip
    return {
        "method": run.method, "model": dataclasses.asdict(model), "length": plan.length,
        "recipe": dataclasses.asdict(recipe), "text": text.name, "sha256": text.sha256,
    }  # fmt: skip


def trained(plan: Plan, text: data.Text, job: Job) -> results.Row:
    """The row of one run, which the first process also writes."""
    seed, task = job.recipe.seed, job.settings["method"].split()[0]
    held_out = data.held_out_batch(text, task, plan.length, plan.looked_at)

    def batches(step: int) -> data.Batch:
        return data.training_batch(text, task, plan.length, plan.rows, seed, step)

    def look(model: Model) -> dict[str, float]:
        return {"bits": bits(model, held_out)}

    model = build(Config(**job.settings["model"]), seed)
    done = job.train("E1", model, batches, look)
    return job.written({"looks": done.looks, "seconds": round(done.seconds, 1)})


def curves(rows: Sequence[results.Row], method: str) -> dict[int, np.ndarray]:
    """(looks, 2) steps and bits of every seed, at the best rate."""
    return {
        seed: np.array([[look["step"], look["bits"]] for look in row["looks"]])
        for seed, row in chosen(rows, method).items()
    }


def steps_to(curve: np.ndarray, level: float) -> float:
    """The step at which a curve first is at a level, between looks by a straight line, or inf.

    >>> steps_to(np.array([[10, 3.0], [20, 2.0]]), 2.5)
    15.0
    """
    below = np.flatnonzero(curve[:, 1] <= level)
    if not len(below):
        return float("inf")
    at = below[0]
    if at == 0:
        return float(curve[0, 0])
    (x0, y0), (x1, y1) = curve[at - 1 : at + 1]
    return float(x0 + (x1 - x0) * (y0 - level) / (y0 - y1))


def table(rows: Sequence[results.Row]) -> str:
    """Bits at the end, the paired difference to sinusoidal, the steps to its last bits."""
    lines = []
    for task in TASKS:
        reference = curves(rows, f"{task} {REFERENCE}")
        for encoding in ENCODINGS:
            method = f"{task} {encoding}"
            own = curves(rows, method)
            seeds = sorted(own)
            last = [own[seed][-1, 1] for seed in seeds]
            apart = [own[seed][-1, 1] - reference[seed][-1, 1] for seed in seeds]
            steps = [steps_to(own[seed], reference[seed][-1, 1]) for seed in seeds]
            lines.append([
                task, encoding, f"{best_rate(rows, method):g}",
                results.mean_spread(last), results.mean_spread(apart, "+.3f"),
                ", ".join("never" if np.isinf(step) else f"{step:.0f}" for step in steps),
            ])  # fmt: skip
    heads = ["task", "positions", "learning rate", "bits per byte", "minus sinusoidal",
             "steps to the last bits of sinusoidal"]  # fmt: skip
    return results.table(heads, lines)


def figure(rows: Sequence[results.Row]) -> Figure:
    """Bits per byte against step, a panel for each task; every seed is a thin line."""
    picture = Figure(figsize=(9, 4), layout="tight")
    for axes, task in zip(picture.subplots(1, len(TASKS)), TASKS, strict=True):
        for encoding in ENCODINGS:
            for index, curve in enumerate(curves(rows, f"{task} {encoding}").values()):
                label = encoding if index == 0 else None
                axes.plot(*curve.T, color=COLORS[encoding], linewidth=0.9, label=label)
        axes.set_title(f"{task} bytes, held-out text")
        axes.set_xlabel("step")
        axes.set_ylabel("bits per byte")
        axes.legend(frameon=False)
    return picture


SWEEP = Sweep(
    __doc__, FOLDER, FULL, QUICK, METHODS, data.text, settings_of, trained,
    table, figure, "convergence.png",
)  # fmt: skip


def main() -> None:
    """Train what is not trained yet, compare, write the results."""
    carry_out(SWEEP)


if __name__ == "__main__":
    main()
