"""RoPE, sinusoidal, learned and no positions: how fast a masked and a causal byte model learn.

    python -m experiments.e1_convergence.run [--quick]
    torchrun --nproc-per-node 2 -m experiments.e1_convergence.run      # on two cores

Killed, it goes on where it was. The learning rate of each encoding is chosen on validation text.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ..lab import data, report, results
from ..lab.intervals import difference
from ..lab.job import Job, Sweep, carry_out
from ..lab.model import ENCODINGS, Config, Model, bits, build
from ..lab.sweep import Run, best_rate, chosen
from ..lab.train import Recipe

FOLDER = Path(__file__).parent
TASKS = ("masked", "causal")
METHODS = tuple(f"{task} {encoding}" for task in TASKS for encoding in ENCODINGS)
LEVELS = {"masked": 4.0, "causal": 3.0}  # bits below those of single bytes: order is being seen
PAIRS = (("rope", "sinusoidal"), ("rope", "learned"), ("learned", "sinusoidal"),
         ("none", "sinusoidal"))  # fmt: skip
COLORS = {"rope": "#0072b2", "sinusoidal": "#d55e00", "learned": "#009e73", "none": "#000000"}


class Plan(NamedTuple):
    """The size of every run."""

    model: Config
    steps: int
    rows: int
    length: int
    looked_at: int  # rows of held-out text, and of validation text
    rates: tuple[float, ...]


FULL = Plan(Config(length=128, layers=2, width=64, heads=2), 1000, 8, 128, 64, (1e-3, 3e-3, 1e-2))
QUICK = Plan(Config(length=32, layers=1, width=32), 5, 8, 32, 8, (1e-2, 3e-2, 1e-1))


def settings_of(plan: Plan, text: data.Text, run: Run) -> results.Row:
    """Everything that a run follows from."""
    task, encoding = run.method.split()
    model = dataclasses.replace(plan.model, encoding=encoding, causal=task == "causal")
    recipe = Recipe(
        steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed, final=1.0,
        warmup=plan.steps // 10, save_every=200, look_every=math.ceil(plan.steps / 20),
    )  # fmt: skip
    return {
        "method": run.method, "model": dataclasses.asdict(model), "length": plan.length,
        "looked_at": plan.looked_at, "split": data.SPLIT,
        "recipe": dataclasses.asdict(recipe), "text": text.name, "sha256": text.sha256,
    }  # fmt: skip


def trained(plan: Plan, text: data.Text, job: Job) -> results.Row:
    """The row of one run, which the first process also writes."""
    seed, task = job.recipe.seed, job.settings["method"].split()[0]
    held_out, validation = (
        data.fixed_batch(part, task, plan.length, plan.looked_at)
        for part in (text.held_out, text.validation)
    )

    def batches(step: int) -> data.Batch:
        return data.training_batch(text, task, plan.length, plan.rows, seed, step)

    def look(model: Model) -> dict[str, float]:
        return {"bits": bits(model, held_out), "validation": bits(model, validation)}

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


def last(rows: Sequence[results.Row], method: str) -> dict[int, float]:
    """Seed -> bits at the end."""
    return {seed: curve[-1, 1] for seed, curve in curves(rows, method).items()}


def steps_until(rows: Sequence[results.Row], method: str, level: float) -> dict[int, float]:
    """Seed -> the step at which its curve first is at a level, inf where it never is."""
    return {seed: steps_to(curve, level) for seed, curve in curves(rows, method).items()}


def table(rows: Sequence[results.Row]) -> str:
    """Bits at the end, the steps to a level of bits, the differences seed by seed; what was run."""
    lines, apart = [], []
    for task in TASKS:
        for encoding in ENCODINGS:
            method = f"{task} {encoding}"
            steps = [*steps_until(rows, method, LEVELS[task]).values()]
            lines.append([
                task, encoding, f"{best_rate(rows, method):g}",
                results.mean_spread([*last(rows, method).values()]),
                f"{LEVELS[task]} bits: " + until(steps),
            ])  # fmt: skip
        for one, other in PAIRS:
            own, its = f"{task} {one}", f"{task} {other}"
            in_steps = difference(
                *(steps_until(rows, method, LEVELS[task]) for method in (own, its))
            )
            apart.append([
                task, f"{one} minus {other}", difference(last(rows, own), last(rows, its)).told(),
                in_steps.told(".0f") if math.isfinite(in_steps.mean) else "-",
            ])  # fmt: skip
    heads = ["task", "positions", "learning rate", "bits per byte at the end", "steps until"]
    return "\n\n".join([
        results.table(heads, lines),
        results.table(["task", "difference", "bits per byte at the end", "steps until"], apart),
        report.recipe(rows, METHODS),
    ])  # fmt: skip


def until(steps: Sequence[float]) -> str:
    """The mean of steps, and how many runs did not come so far.

    >>> until([100.0, 110.0]), until([100.0, math.inf])
    ('105 ± 7', 'not reached by 1 of 2')
    """
    missing = sum(math.isinf(step) for step in steps)
    return (
        f"not reached by {missing} of {len(steps)}"
        if missing
        else results.mean_spread(steps, ".0f")
    )


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
