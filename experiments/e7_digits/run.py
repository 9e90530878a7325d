"""Learned, axial, mixed and no positions on 8 x 8 digits, which are then shown at 16 x 16.

    python -m experiments.e7_digits.run [--quick]
    torchrun --nproc-per-node 2 -m experiments.e7_digits.run      # on two cores

Killed, it goes on where it was. The learning rate of each encoding is chosen on validation images.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from torch.nn import functional

from ..lab import report, results
from ..lab.data import Batch
from ..lab.intervals import difference
from ..lab.job import Job, Sweep, carry_out
from ..lab.sweep import Run, best_rate, chosen
from ..lab.train import Recipe
from .images import HELD_OUT, VALIDATION, Digits, digits, drawn, enlarged
from .model import ENCODINGS, Config, Model, build

FOLDER = Path(__file__).parent
PAIRS = (("axial", "learned"), ("mixed", "learned"), ("mixed", "axial"), ("none", "learned"))
TIMES = 2  # the side of an enlarged image over that of a trained one
MEASURES = {
    "8": "8 x 8",
    "scaled": "16 x 16, positions 0, 0.5 .. 7.5",
    "extrapolated": "16 x 16, positions 0 .. 15",
}
COLORS = {"learned": "#009e73", "axial": "#0072b2", "mixed": "#d55e00", "none": "#000000"}


class Plan(NamedTuple):
    """The size of every run."""

    layers: int
    width: int
    steps: int
    rows: int
    looked_at: int  # images of each of the two other parts, at most
    rates: tuple[float, ...]


FULL = Plan(2, 64, 500, 16, 600, (1e-3, 3e-3, 1e-2))
QUICK = Plan(2, 32, 5, 8, 20, (1e-2, 3e-2, 1e-1))


def settings_of(plan: Plan, images: Digits, run: Run) -> results.Row:
    """Everything that a run follows from."""
    recipe = Recipe(
        steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed,
        warmup=plan.steps // 10, save_every=200, look_every=plan.steps,
    )  # fmt: skip
    return {
        "method": run.method, "recipe": dataclasses.asdict(recipe), "looked_at": plan.looked_at,
        "model": dataclasses.asdict(Config(run.method, layers=plan.layers, width=plan.width)),
        "times": TIMES, "validation": VALIDATION, "held_out": HELD_OUT, "sha256": images.sha256,
    }  # fmt: skip


def trained(plan: Plan, images: Digits, job: Job) -> results.Row:
    """The row of one run, which the first process also writes."""
    seed = job.recipe.seed
    held_out, validation = (
        Batch(*(part[: plan.looked_at] for part in images_of))
        for images_of in (images.held_out, images.validation)
    )

    def batches(step: int) -> Batch:
        return drawn(images.training, plan.rows, seed, step)

    def look(model: Model) -> dict[str, float]:
        return {**seen(model, held_out), "validation": judged(model, validation, 1.0)[0]}

    model = build(Config(**job.settings["model"]), seed)
    done = job.train("E7", model, batches, look)
    return job.written({"looks": done.looks, "seconds": round(done.seconds, 1)})


def seen(model: Model, images: Batch) -> dict[str, float]:
    """Bits and the share that is right at 8 x 8, and the share at 16 x 16 by positions.

    Learned places have no positions beyond those trained, so no "extrapolated".
    """
    larger = enlarged(images, TIMES)
    bits, right = judged(model, images, 1.0)
    found = {"bits": bits, "8": right, "scaled": judged(model, larger, 1 / TIMES)[1]}
    if model.config.encoding != "learned":
        found["extrapolated"] = judged(model, larger, 1.0)[1]
    return found


def judged(model: Model, images: Batch, spacing: float) -> tuple[float, float]:
    """Cross-entropy in bits per image, and the share whose digit is named right."""
    device = model.head.weight.device
    nats, right = 0.0, 0
    for pixels, names in zip(images.tokens.split(50), images.targets.split(50), strict=True):
        logits = model(pixels.to(device), spacing).flatten(0, 1).float()
        wanted = names.to(device).flatten()
        nats += functional.cross_entropy(logits, wanted, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
    count = len(images.targets)
    return nats / count / math.log(2), right / count


def shares(rows: Sequence[results.Row], encoding: str, measure: str) -> dict[int, float]:
    """Seed -> percent right at the chosen rate; empty where an encoding has no such measure.

    "change" is what the larger size of the same span costs: "scaled" minus "8".
    """
    ends = {seed: row["looks"][-1] for seed, row in chosen(rows, encoding).items()}
    if measure == "change":
        return {seed: 100 * (end["scaled"] - end["8"]) for seed, end in ends.items()}
    return {seed: 100 * end[measure] for seed, end in ends.items() if measure in end}


def table(rows: Sequence[results.Row]) -> str:
    """Percent right by size and positions; the differences seed by seed; what was run."""
    columns = {**MEASURES, "change": "16 x 16, 0, 0.5 .. 7.5, minus 8 x 8"}
    lines = []
    for encoding in ENCODINGS:
        own = [shares(rows, encoding, measure) for measure in columns]
        lines.append([
            encoding, f"{best_rate(rows, encoding):g}",
            *(results.mean_spread([*seen.values()], ".1f") if seen else "-" for seen in own),
        ])  # fmt: skip
    apart = [
        [f"{one} minus {other}", *(compared(rows, one, other, measure) for measure in columns)]
        for one, other in PAIRS
    ]
    return "\n\n".join([
        results.table(["% right", "learning rate", *columns.values()], lines),
        results.table(["difference, points", *columns.values()], apart),
        report.recipe(rows, ENCODINGS),
    ])  # fmt: skip


def compared(rows: Sequence[results.Row], one: str, other: str, measure: str) -> str:
    """Points between two encodings; "-" where one of them has no such measure."""
    own, its = shares(rows, one, measure), shares(rows, other, measure)
    return difference(own, its).told(".1f") if own and its else "-"


def figure(rows: Sequence[results.Row]) -> Figure:
    """Percent right by size and positions; every seed is a dot."""
    picture = Figure(figsize=(7.5, 4), layout="constrained")
    axes = picture.subplots()
    for index, encoding in enumerate(ENCODINGS):
        for place, measure in enumerate(MEASURES):
            own = [*shares(rows, encoding, measure).values()]
            at = np.full(len(own), place + 0.15 * (index - 1.5))
            label = encoding if place == 0 else None
            axes.plot(at, own, "o", color=COLORS[encoding], label=label)
    axes.set_xticks(range(len(MEASURES)), list(MEASURES.values()))
    axes.set_ylabel("held-out digits named right, %")
    axes.set_title("Trained at 8 x 8, one token for each pixel")
    axes.legend(frameon=False)
    return picture


SWEEP = Sweep(
    __doc__, FOLDER, FULL, QUICK, ENCODINGS, lambda text: digits(), settings_of, trained,
    table, figure, "digits.png",
)  # fmt: skip


def main() -> None:
    """Train what is not trained yet, compare, write the results."""
    carry_out(SWEEP)


if __name__ == "__main__":
    main()
