"""Linear attention with and without RoPE: how a causal byte model learns, and what its weights are.

    python -m experiments.e2_linear.run [--quick]
    torchrun --nproc-per-node 2 -m experiments.e2_linear.run      # on two cores

Killed, it goes on where it was. The learning rate of each method is chosen on validation text. A
run whose loss is no longer finite is a result.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from ..lab import data, report, results
from ..lab.intervals import difference
from ..lab.job import Job, Sweep, carry_out
from ..lab.model import FEATURES, Config, Model, Tensor, Turn, bits, build, linear_weights
from ..lab.sweep import Run, best_rate, chosen, end_bits
from ..lab.train import Looks, Recipe

FOLDER = Path(__file__).parent


class Method(NamedTuple):
    """What a row of the table is: its name there, two fields of the model, its line."""

    title: str
    encoding: str
    attention: str
    color: str
    dash: str = "-"


METHODS = {
    "none": Method("no positions", "none", "linear", "#000000"),
    "sinusoidal": Method("sinusoidal, added", "sinusoidal", "linear", "#d55e00"),
    "rope": Method("RoPE, denominator not rotated", "rope", "linear", "#0072b2"),
    "rope both": Method("RoPE, denominator rotated too", "rope", "linear both", "#cc79a7"),
    "none normed": Method("no positions, normed", "none", "linear normed", "#000000", "--"),
    "rope normed": Method("RoPE, normed", "rope", "linear normed", "#0072b2", "--"),
    "none favor": Method("no positions, FAVOR+", "none", "linear favor", "#000000", ":"),
    "rope favor": Method("RoPE, FAVOR+", "rope", "linear favor", "#0072b2", ":"),
}
PAIRS = (  # of methods whose difference is taken seed by seed
    *(("sinusoidal", "none"), ("rope", "none"), ("rope", "sinusoidal"), ("rope both", "rope")),
    *(("none normed", "none"), ("rope normed", "none normed"), ("rope normed", "rope")),
    *(("rope favor", "none favor"), ("none favor", "none"), ("rope favor", "rope")),
)


class Plan(NamedTuple):
    """The size of every run."""

    model: Config
    steps: int
    rows: int
    length: int
    looked_at: int  # rows of held-out text, and of validation text
    weighed: int  # of them, whose weights are counted
    rates: tuple[float, ...]


FULL = Plan(
    Config(length=128, layers=2, width=64, heads=2), 400, 4, 128, 64, 32, (3e-3, 1e-2, 3e-2)
)
QUICK = Plan(Config(length=32, layers=2, width=32), 5, 8, 32, 8, 4, (1e-2, 3e-2, 1e-1))


def settings_of(plan: Plan, text: data.Text, run: Run) -> results.Row:
    """Everything that a run follows from."""
    method = METHODS[run.method]
    model = dataclasses.replace(
        plan.model, encoding=method.encoding, attention=method.attention, causal=True
    )
    recipe = Recipe(
        steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed,
        warmup=plan.steps // 10, look_every=plan.steps // 5,
    )  # fmt: skip
    return {
        "method": run.method, "model": dataclasses.asdict(model), "length": plan.length,
        "looked_at": plan.looked_at, "split": data.SPLIT,
        "recipe": dataclasses.asdict(recipe), "text": text.name, "sha256": text.sha256,
    }  # fmt: skip


def trained(plan: Plan, text: data.Text, job: Job) -> results.Row:
    """The row of one run, which the first process also writes.

    `weights` is what `weighed` finds at the end; a run that diverged has the step in its place.
    """
    recipe = job.recipe
    held_out, validation = (
        data.fixed_batch(part, "causal", plan.length, plan.looked_at)
        for part in (text.held_out, text.validation)
    )

    def batches(step: int) -> data.Batch:
        return data.training_batch(text, "causal", plan.length, plan.rows, recipe.seed, step)

    def look(model: Model) -> dict[str, float]:
        return {"bits": bits(model, held_out), "validation": bits(model, validation)}

    model = build(Config(**job.settings["model"]), recipe.seed)
    done = job.train("E2", model, batches, look)
    step = diverged(done.losses, done.looks)
    found: results.Row = {"seconds": round(done.seconds, 1)}
    if step is None:
        worst = max(done.losses[recipe.steps // 2 :]) / math.log(2)
        sizes = weighed(model, held_out.tokens[: plan.weighed])
        found |= {"looks": done.looks, "worst": worst, "weights": sizes}
    else:
        found |= {"looks": [one for one in done.looks if one["step"] < step], "diverged": step}
    return job.written(found)


def diverged(losses: Sequence[float], looks: Looks) -> int | None:
    """The first step, counted from 1, whose loss or whose look is not finite; None if all are.

    >>> diverged([2.0, math.nan, math.nan], [{"step": 3, "bits": math.nan}])
    2
    """
    of_losses = [step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)]
    of_looks = [int(look["step"]) for look in looks if not math.isfinite(look["bits"])]
    return min(of_losses + of_looks, default=None)


@torch.no_grad()
def weighed(model: Model, tokens: Tensor) -> dict[str, list[float]]:
    """What the weights of linear attention are, by layer, over rows, heads and tokens.

    negative         share of the pairs, a token and one that it sees, whose rotated product is < 0
    least, greatest  sum of the rotated products of a token over the sum of those not rotated
    nearest          the least size of that ratio

    The ratio is what the weights of equation 19 sum to, and what a rotated denominator is of one
    that is not rotated. Without rotation no product is negative and every ratio is 1.
    """
    model = copy.deepcopy(model).eval()
    attention, features = model.blocks[0].attention, FEATURES[model.config.attention]
    found: dict[str, list[float]] = {}

    def watched(q: Tensor, k: Tensor, v: Tensor, turn: Turn, causal: bool) -> Tensor:
        for name, value in sizes(*linear_weights(q, k, turn, causal, features)).items():
            found.setdefault(name, []).append(value)
        return attention(q, k, v, turn, causal)

    for block in model.blocks:
        block.attention = watched
    model(tokens.to(model.head.weight.device))
    return found


def sizes(rotated: Tensor, kept: Tensor) -> dict[str, float]:
    """The numbers of `weighed` for one layer, from its products, (..., seq, seq), 0 where not seen.

    >>> sizes(torch.tensor([[1.0, 0.0], [-3.0, 1.0]]), torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
    {'negative': 0.3333333333333333, 'least': -0.5, 'greatest': 1.0, 'nearest': 0.5}
    """
    ratio = rotated.sum(-1) / kept.sum(-1)
    return {
        "negative": (rotated < 0).sum().item() / (kept > 0).sum().item(),
        "least": ratio.min().item(),
        "greatest": ratio.max().item(),
        "nearest": ratio.abs().min().item(),
    }


def table(rows: Sequence[results.Row]) -> str:
    """Bits at the end and what the weights are; then the differences, seed by seed."""
    lines, run = [], [name for name in METHODS if any(row["run"]["method"] == name for row in rows)]
    for name in run:
        method = METHODS[name]
        of = list(chosen(rows, name).values())
        every = [row for row in rows if row["run"]["method"] == name]
        steps = sorted(row["diverged"] for row in every if "diverged" in row)
        lines.append([
            method.title, f"{best_rate(rows, name):g}", spread_or_diverged(of),
            f"{len(steps)} of {len(every)}" + (f", step {steps}" if steps else ""),
            *weight_cells([row for row in of if "weights" in row]),
        ])  # fmt: skip
    heads = ["method", "learning rate", "bits per byte", "diverged", "worst step, bits",
             "negative products", "sums, rotated / not", "nearest to 0"]  # fmt: skip
    apart = [
        [f"{METHODS[name].title} minus {METHODS[other].title}", compared(rows, name, other)]
        for name, other in PAIRS
        if name in run and other in run
    ]
    return "\n\n".join([
        results.table(heads, lines), results.table(["difference", "bits per byte"], apart),
        report.recipe(rows, run),
    ])  # fmt: skip


def spread_or_diverged(of: Sequence[results.Row]) -> str:
    """Mean and spread of the bits at the end, unless a run has none."""
    if any("diverged" in row for row in of):
        return "diverged"
    return results.mean_spread([end_bits(row) for row in of])


def weight_cells(of: Sequence[results.Row]) -> list[str]:
    """The worst step of the second half, the share of negative products, the range of the ratio.

    The share is a mean over layers and seeds; the rest are extremes over them.
    """
    if not of:
        return ["-"] * 4
    shares = [sum(row["weights"]["negative"]) / len(row["weights"]["negative"]) for row in of]
    least, greatest, nearest = (
        [value for row in of for value in row["weights"][name]]
        for name in ("least", "greatest", "nearest")
    )
    return [
        f"{max(row['worst'] for row in of):.2f}", f"{100 * sum(shares) / len(shares):.1f} %",
        f"{min(least):.2f} to {max(greatest):.2f}", f"{min(nearest):.1e}",
    ]  # fmt: skip


def compared(rows: Sequence[results.Row], name: str, other: str) -> str:
    """Bits of one method minus those of another, seed by seed."""
    own, its = (
        {seed: end_bits(row) for seed, row in chosen(rows, method).items()}
        for method in (name, other)
    )
    return difference(own, its).told()


def figure(rows: Sequence[results.Row]) -> Figure:
    """Bits against step, and the share of negative products by layer; every seed is a thin line."""
    picture = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = picture.subplots(1, 2)
    for name, method in METHODS.items():
        own = [row for row in rows if row["run"]["method"] == name]
        for index, row in enumerate(chosen(own, name).values() if own else ()):
            line = {"color": method.color, "linestyle": method.dash, "linewidth": 1.0}
            label = method.title if index == 0 else None
            at = [look["step"] for look in row["looks"]]
            left.plot(at, [look["bits"] for look in row["looks"]], label=label, **line)
            if method.encoding == "rope" and "weights" in row:
                shares = row["weights"]["negative"]
                right.plot(range(1, len(shares) + 1), shares, marker=".", **line)
    left.set_xlabel("step")
    left.set_ylabel("held-out text, bits per byte")
    right.set_xlabel("layer")
    right.set_xticks(range(1, rows[0]["run"]["model"]["layers"] + 1))
    right.set_ylabel("share of rotated products below zero")
    left.set_title("Loss in training; a line for each seed", fontsize=10)
    right.set_title("Weights that are negative, by layer", fontsize=10)
    picture.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return picture


SWEEP = Sweep(
    __doc__, FOLDER, FULL, QUICK, tuple(METHODS), data.text, settings_of, trained,
    table, figure, "linear.png",
)  # fmt: skip


def main() -> None:
    """Train what is not trained yet, compare, write the results."""
    carry_out(SWEEP)


if __name__ == "__main__":
    main()
