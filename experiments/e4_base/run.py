"""The base of RoPE against the distance at which a trained model retrieves, and against perplexity.

    python -m experiments.e4_base.run [--smoke]
    torchrun --nproc-per-node 2 -m experiments.e4_base.run      # on two cores

Killed, it goes on where it was. The learning rate of each base is the best of the same sweep on the
first seed, and is then used for all seeds.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from torch.nn import functional

from rotary import plots
from rotary.analysis.bounds import first_failure

from ..lab import command, data, results
from ..lab.model import Config, Model, build
from ..lab.sweep import Run, best_rate, chosen, runs
from ..lab.train import Processes, Recipe, processes, train
from .recall import VOCABULARY, Recall, held_out, training

FOLDER = Path(__file__).parent
SEEDS = (0, 1, 2)
BASES = ("10", "100", "1000", "10000", "100000")
COLORS = ("#d55e00", "#e69f00", "#009e73", "#0072b2", "#000000")
BINS = (1, 8, 16, 32, 64, 128, 256)  # of distances, tokens


class Plan(NamedTuple):
    """The size of every run."""

    model: Config
    steps: int
    rows: int
    length: int
    pairs: int
    looked_at: int  # rows of held-out text
    rates: tuple[float, ...]


MODEL = Config(layers=2, width=128, heads=2, vocabulary=VOCABULARY)
FULL = Plan(MODEL, 3000, 32, 256, 16, 256, (1e-3, 3e-3))
SMOKE = Plan(dataclasses.replace(MODEL, width=32), 30, 8, 64, 6, 32, (1e-3, 3e-3))


def main() -> None:
    """Train what is not trained yet, compare, write the results."""
    with command.options(__doc__, FOLDER) as options:
        plan = SMOKE if options.smoke else FULL
        text = data.text(options.text)
        with processes(options.device) as these:
            rows = results.rows(options.out / "results.jsonl")
            for run in runs(BASES, plan.rates, SEEDS, rows):
                settings = settings_of(plan, text, run)
                if not results.is_done(rows, settings):
                    rows.append(trained(plan, text, run, settings, options.out, these))
        if these.rank == 0:
            report(options.out)


def settings_of(plan: Plan, text: data.Text, run: Run) -> results.Row:
    """Everything that a run follows from."""
    model = dataclasses.replace(plan.model, base=float(run.method))
    recipe = Recipe(
        steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed,
        warmup=plan.steps // 10, save_every=200, look_every=plan.steps // 10,
    )  # fmt: skip
    return {
        "method": run.method, "model": dataclasses.asdict(model), "length": plan.length,
        "pairs": plan.pairs, "recipe": dataclasses.asdict(recipe), "text": text.name,
        "sha256": text.sha256,
    }  # fmt: skip


def trained(
    plan: Plan, text: data.Text, run: Run, settings: results.Row, out: Path, these: Processes
) -> results.Row:
    """The row of one run, which the first process also writes."""
    recipe = Recipe(**settings["recipe"])
    asked = held_out(text, plan.length, plan.pairs, plan.looked_at)
    checkpoint = out / "checkpoints" / f"{run.method} {run.rate:g} {run.seed}.pt"

    def batches(step: int) -> data.Batch:
        return training(text, plan.length, plan.pairs, plan.rows, run.seed, step).batch

    model = build(Config(**settings["model"]), run.seed)
    title = f"E4 base {run.method} {run.rate:g} seed {run.seed}"
    done = train(model, batches, recipe, checkpoint, lambda model: seen(model, asked), these, title)
    row = {"run": settings, "looks": done.looks, "seconds": round(done.seconds, 1)}
    if these.rank == 0:
        results.append(out / "results.jsonl", row)
        checkpoint.unlink()
    return row


def seen(model: Model, asked: Recall) -> dict[str, float]:
    """Bits of everything asked for, `text` and `value` bits, the share of values that are right.

    `recall` is over all distances, `recall 8` over those from 8 to the next of BINS.
    """
    device = model.head.weight.device
    tokens, targets = (part.to(device) for part in asked.batch)
    logits, distances = model(tokens), asked.distances.to(device)
    nats = functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=data.IGNORED, reduction="none"
    )
    right = (logits.argmax(-1) == targets).double()
    is_value = distances > 0
    is_text = (targets != data.IGNORED) & ~is_value
    found = {
        "bits": nats[is_value | is_text].mean().item() / math.log(2),
        "text": nats[is_text].mean().item() / math.log(2),
        "value": nats[is_value].mean().item() / math.log(2),
        "recall": right[is_value].mean().item(),
    }
    for low, high in itertools.pairwise(BINS):
        inside = is_value & (low <= distances) & (distances < high)
        if inside.any():
            found[f"recall {low}"] = right[inside].mean().item()
    return found


def report(out: Path) -> None:
    """The table on the screen and in the README of the folder, and the figure beside it."""
    rows = results.rows(out / "results.jsonl")
    plots.save(figure(rows), out / "base.png")
    results.tell(out, table(rows))


def ends(rows: Sequence[results.Row], base: str) -> list[dict[str, float]]:
    """The last look of every seed at the best rate of a base."""
    return [row["looks"][-1] for row in chosen(rows, base, SEEDS).values()]


def table(rows: Sequence[results.Row]) -> str:
    """Recall by distance, bits of the text, and whether the two order the bases alike."""
    names = [f"recall {low}" for low in BINS if f"recall {low}" in ends(rows, BASES[0])[0]]
    lines = []
    for base in BASES:
        of = ends(rows, base)
        cells = [results.mean_spread([end[name] for end in of], ".2f") for name in names]
        model = Config(**chosen(rows, base, SEEDS)[SEEDS[0]]["run"]["model"])
        lines.append([
            base, first_failure(model.spec), f"{best_rate(rows, base, SEEDS[0]):g}",
            results.mean_spread([end["text"] for end in of]), *cells,
        ])  # fmt: skip
    heads = ["base", "first B_m < 0", "learning rate", "text, bits per byte"]
    orders = [
        rank_correlation(
            [ends(rows, base)[index]["text"] for base in BASES],
            [ends(rows, base)[index]["recall"] for base in BASES],
        )
        for index in range(len(SEEDS))
    ]
    shown = results.table([*heads, *(f"recall from {name.split()[1]}" for name in names)], lines)
    return (
        f"{shown}\n\nRank correlation, over the bases, of bits of the text and recall: "
        f"{results.mean_spread(orders, '+.2f')}. -1: perplexity orders the bases as recall does."
    )


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's, equal numbers sharing their rank; nan where all are equal.

    >>> rank_correlation([1.0, 2.0, 4.0], [9.0, 5.0, 3.0])
    -1.0
    """
    ranks = []
    for values in (np.array(x), np.array(y)):
        if (values == values[0]).all():
            return math.nan
        above = values[:, None] - values
        ranks.append((above > 0).sum(1) + (above >= 0).sum(1))
    return float(np.corrcoef(*ranks)[0, 1].round(12))


def figure(rows: Sequence[results.Row]) -> Figure:
    """Recall against distance for each base, and recall against the bits of the text."""
    picture = Figure(figsize=(9, 4), layout="constrained")
    left, right = picture.subplots(1, 2)
    for base, color in zip(BASES, COLORS, strict=True):
        for index, end in enumerate(ends(rows, base)):
            name = f"base {base}" if index == 0 else None
            at = [low for low in BINS if f"recall {low}" in end]
            left.plot(at, [end[f"recall {low}"] for low in at], color=color, label=name)
            right.plot(end["text"], end["recall"], "o", color=color)
    left.set_xscale("log", base=2)
    left.set_xlabel("distance to the value, tokens (from, to the next mark)")
    left.set_ylabel("share of values that are right")
    left.legend(frameon=False)
    right.set_xlabel("text, bits per byte")
    right.set_ylabel("share of values that are right")
    return picture


if __name__ == "__main__":
    main()
