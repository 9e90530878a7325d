"""One trained model at up to eight times its length, by the way its positions are stretched.

    python -m experiments.e3_length.run [--quick]
    torchrun --nproc-per-node 2 -m experiments.e3_length.run      # on two cores

Killed, it goes on where it was. Learning rates, of training and of tuning, are chosen on validation
text.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from ..lab import data, report, results, staged
from ..lab.intervals import difference
from ..lab.model import Config, Model, bits, build
from ..lab.staged import TRAINED, Job
from ..lab.sweep import Run, chosen
from ..lab.train import Recipe, train
from .methods import METHODS, read_by

FOLDER = Path(__file__).parent
MULTIPLES = (1, 2, 4, 8)
UNTUNED = "untuned"  # the method of reading without tuning, beside "tuned PI" and the like
TUNED = ("direct", "PI", "YaRN")
PAIRS = (  # of methods whose difference is taken seed by seed
    *((name, "direct") for name in METHODS if name != "direct"),
    *(("NTK-mixed", "NTK"), ("NTK-fixed", "NTK"), ("NTK", "PI"), ("YaRN", "NTK-mixed")),
    *(("YaRN", "NTK-by-parts"), ("ReRoPE, window 1/2", "YaRN")),
    *(("ReRoPE, window 1/4", "ReRoPE, window 1/2"), ("NTK-mixed, log n", "NTK-mixed")),
    ("self-extend, window 1/2", "ReRoPE, window 1/2"),
    ("ReRoPE, window 1/2, log n", "ReRoPE, window 1/2"),
)
TUNED_TO = 4  # times the trained length
ASKED = 64  # bytes at the end of a row
COLORS = {
    "direct": "#000000", "PI": "#d55e00", "NTK": "#e69f00", "NTK-mixed": "#cc79a7",
    "YaRN": "#56b4e9", "ReRoPE, window 1/2": "#0072b2", "self-extend, window 1/2": "#009e73",
}  # fmt: skip


class Plan(NamedTuple):
    """The size of every run."""

    model: Config
    steps: int
    rows: int
    length: int
    looked_at: int  # rows of held-out text, and of validation text
    rates: tuple[float, ...]
    tuning_steps: tuple[int, int]  # few and many
    tuning_rows: int
    tuning_rates: tuple[float, ...]


FULL = Plan(
    Config(length=128, layers=2, width=64, heads=2), 600, 8, 128, 16, (3e-3, 1e-2, 3e-2),
    (50, 150), 2, (3e-4, 1e-3, 3e-3),
)  # fmt: skip
QUICK = Plan(
    Config(length=64, layers=2, width=32), 4, 8, 64, 2, (1e-2, 3e-2, 1e-1),
    (2, 4), 2, (1e-3, 3e-3, 1e-2),
)  # fmt: skip


def settings_of(plan: Plan, text: data.Text, run: Run, start: float) -> results.Row:
    """Everything that a run follows from; `trained` is the recipe of the model it starts from."""
    trained_by = dataclasses.asdict(recipe_of(plan, Run(TRAINED, start, run.seed)))
    settings = {
        "method": run.method, "model": dataclasses.asdict(plan.model), "length": plan.length,
        "looked_at": plan.looked_at, "asked": ASKED, "split": data.SPLIT, "text": text.name,
        "sha256": text.sha256, "recipe": trained_by,
    }  # fmt: skip
    if run.method.startswith("tuned"):
        settings |= {"recipe": dataclasses.asdict(recipe_of(plan, run)), "trained": trained_by}
    return settings


def recipe_of(plan: Plan, run: Run) -> Recipe:
    """The recipe of a training, or of the tuning that follows it, at a constant rate."""
    if run.method == TRAINED:
        return Recipe(
            steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed,
            warmup=plan.steps // 10, save_every=100, look_every=plan.steps // 2,
        )  # fmt: skip
    few, many = plan.tuning_steps
    return Recipe(
        steps=many, rows=plan.tuning_rows, learning_rate=run.rate, seed=run.seed,
        warmup=few // 5, final=1.0, save_every=50, look_every=few,
    )  # fmt: skip


def trained(job: Job, run: Run) -> results.Row:
    """What was seen of a training."""
    return learned(job, run)[1]


def learned(job: Job, run: Run) -> tuple[Model, results.Row]:
    """The trained model, from its checkpoint as far as that goes, and what was seen on the way."""
    plan = job.plan

    def batches(step: int) -> data.Batch:
        return data.training_batch(job.text, "causal", plan.length, plan.rows, run.seed, step)

    model = build(plan.model, run.seed)
    title = f"E3 {run.method} {run.rate:g} seed {run.seed}"
    done = train(
        model, batches, recipe_of(plan, run), job.checkpoint(run),
        lambda model: looked_at(model, job, 1), job.these, title,
    )  # fmt: skip
    return model, {"looks": done.looks, "seconds": round(done.seconds, 1)}


def lengthen(job: Job, seeds: Sequence[int]) -> None:
    """Read longer rows in every way without and after tuning, where that is not done yet."""
    for seed in seeds:
        run = Run(UNTUNED, job.start, seed)
        if not job.is_done(run):
            model = learned(job, run._replace(method=TRAINED))[0].eval()
            job.write(run, {"bits": untuned(job, model)})
    job.sweep([f"tuned {name}" for name in TUNED], job.plan.tuning_rates, seeds, tuned)


@torch.no_grad()
def untuned(job: Job, model: Model) -> dict[str, list[float]]:
    """Bits per byte by method, a list with one entry per multiple of the trained length."""
    length, held_out = job.plan.length, job.text.held_out
    return {
        name: [
            at_end(read_by(model, name, length, multiple * length), job, held_out, multiple)
            for multiple in MULTIPLES
        ]
        for name in METHODS
    }


def tuned(job: Job, run: Run) -> results.Row:
    """Bits per byte at the tuned length, at every look of a short training there."""
    plan, target = job.plan, TUNED_TO * job.plan.length
    model = learned(job, Run(TRAINED, job.start, run.seed))[0]
    read_by(model, run.method.partition(" ")[2], plan.length, target)

    def batches(step: int) -> data.Batch:
        after = plan.steps + step  # random places that the training has not drawn
        return data.training_batch(job.text, "causal", target, plan.tuning_rows, run.seed, after)

    title = f"E3 {run.method} {run.rate:g} seed {run.seed}"
    done = train(
        model, batches, recipe_of(plan, run), job.checkpoint(run),
        lambda model: looked_at(model, job, TUNED_TO), job.these, title,
    )  # fmt: skip
    return {"looks": done.looks, "seconds": round(done.seconds, 1)}


def looked_at(model: Model, job: Job, multiple: int) -> dict[str, float]:
    """Bits per byte at the end of rows of a multiple of the trained length, of both parts."""
    parts = {"bits": job.text.held_out, "validation": job.text.validation}
    return {name: at_end(model, job, part, multiple) for name, part in parts.items()}


def at_end(model: Model, job: Job, content: torch.Tensor, multiple: int) -> float:
    """Bits per byte at the end of rows of a multiple of the trained length."""
    length = job.plan.length
    longest = data.spread_windows(content, MULTIPLES[-1] * length + 1, job.plan.looked_at)
    parts = (part.split(1) for part in ending(longest, multiple * length, ASKED))
    rows = [data.Batch(*part) for part in zip(*parts, strict=True)]
    return sum(bits(model, row) for row in rows) / len(rows)  # scores of one row fit the cache


def ending(pieces: torch.Tensor, length: int, asked: int) -> data.Batch:
    """The last `length` tokens of each piece; only the last `asked` targets are asked for.

    Rows of another length end with the same bytes, so what is asked for stays the same.

    >>> ending(torch.arange(9)[None], 4, 2)
    Batch(tokens=tensor([[4, 5, 6, 7]]), targets=tensor([[-100, -100,    7,    8]]))
    """
    tokens, targets = data.causal(pieces[:, -(length + 1) :])
    is_asked = torch.arange(length) >= length - asked
    return data.Batch(tokens, torch.where(is_asked, targets, data.IGNORED))


def before(rows: Sequence[results.Row], name: str, at: int) -> dict[int, float]:
    """Seed -> bits without tuning, at one of MULTIPLES."""
    own = [row for row in rows if row["run"]["method"] == UNTUNED]
    return {row["run"]["recipe"]["seed"]: row["bits"][name][at] for row in own}


def after(rows: Sequence[results.Row], name: str, look: int) -> dict[int, float]:
    """Seed -> bits at a look of the tuning, at its chosen rate."""
    return {seed: row["looks"][look]["bits"] for seed, row in chosen(rows, f"tuned {name}").items()}


def table(rows: Sequence[results.Row]) -> str:
    """Bits without tuning by length, and after it; the differences seed by seed; what was run."""
    length = rows[0]["run"]["length"]
    lengths = [f"{multiple * length} bytes" for multiple in MULTIPLES]
    seen = {name: [before(rows, name, at) for at in range(len(MULTIPLES))] for name in METHODS}
    looks = next(row for row in rows if row["run"]["method"].startswith("tuned"))["looks"]
    at, ends = MULTIPLES.index(TUNED_TO), (0, len(looks) - 1)
    tuned_to = {
        name: [before(rows, name, at), *(after(rows, name, look) for look in ends)]
        for name in TUNED
    }
    steps = ["no tuning", *(f"{looks[look]['step']} steps" for look in ends)]
    pairs = [("PI", "direct"), ("YaRN", "direct"), ("YaRN", "PI")]
    return "\n\n".join([
        "Bits per byte without tuning, by length of the row:", levels(seen, lengths),
        "Differences without tuning:", differences(seen, PAIRS, lengths, skipped=1),
        f"Bits per byte of rows of {lengths[at]}, by steps of tuning there:",
        levels(tuned_to, steps),
        "Differences after tuning:", differences(tuned_to, pairs, steps, skipped=1),
        f"Training. {report.recipe(rows, [TRAINED])}",
        f"Tuning. {report.recipe(rows, [f'tuned {name}' for name in TUNED])}",
    ])  # fmt: skip


def levels(bits_of: dict[str, list[dict[int, float]]], heads: Sequence[str]) -> str:
    """A line for each method: mean and spread of the seeds in every column."""
    return results.table(["", *heads], [
        [name, *(results.mean_spread([*column.values()]) for column in columns)]
        for name, columns in bits_of.items()
    ])  # fmt: skip


def differences(
    bits_of: dict[str, list[dict[int, float]]],
    pairs: Sequence[tuple[str, str]],
    heads: Sequence[str],
    skipped: int,
) -> str:
    """A line for each pair of methods, without the first columns, where they hardly differ."""
    return results.table(["difference", *heads[skipped:]], [
        [f"{one} minus {other}", *(
            difference(own, its).told()
            for own, its in zip(bits_of[one][skipped:], bits_of[other][skipped:], strict=True)
        )]
        for one, other in pairs
    ])  # fmt: skip


def figure(rows: Sequence[results.Row]) -> Figure:
    """Bits against length without tuning, for the methods of COLORS: mean and range of seeds."""
    picture = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = picture.subplots()
    lengths = [multiple * rows[0]["run"]["length"] for multiple in MULTIPLES]
    for name, color in COLORS.items():
        width = 5.0 if name.startswith("ReRoPE") else 1.2  # that of self-extend lies on it
        found = [[*before(rows, name, at).values()] for at in range(len(MULTIPLES))]
        seen = np.array(found).T
        axes.plot(lengths, seen.mean(0), "o-", color=color, label=name,
                  linewidth=width, markersize=3 + width)  # fmt: skip
        axes.fill_between(lengths, seen.min(0), seen.max(0), color=color, alpha=0.15, lw=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_title(f"A model trained at {lengths[0]} bytes reads longer rows; band: range of seeds")
    axes.set_xlabel("length of a row, bytes")
    axes.set_ylabel(f"held-out text, bits per byte of the last {ASKED}")
    picture.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return picture


EXPERIMENT = staged.Experiment(
    __doc__, FOLDER, FULL, QUICK, settings_of, trained, lengthen, table, figure, "length.png"
)


def main() -> None:
    """Train what is not trained yet, read longer rows in every way, write the results."""
    staged.carry_out(EXPERIMENT)


if __name__ == "__main__":
    main()
