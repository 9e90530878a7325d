"""The base of RoPE against the distance at which a trained model retrieves, and against perplexity.

    python -m experiments.e4_base.run [--quick]
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
import torch
from matplotlib.figure import Figure
from torch.nn import functional

import rotary
from rotary.analysis.bounds import first_failure
from rotary.analysis.simulate import retrieval

from ..lab import data, results
from ..lab.job import Job, Sweep, carry_out
from ..lab.model import Config, Model, build
from ..lab.sweep import Run, best_rate, chosen
from ..lab.train import Recipe
from .recall import VOCABULARY, Recall, held_out, make_similar, training

FOLDER = Path(__file__).parent
BASES = ("10", "100", "1000", "10000", "100000")
REFERENCE = "10000"
COLORS = ("#d55e00", "#e69f00", "#009e73", "#0072b2", "#000000")
FEWEST = 4  # marks before a query, so that its value is not guessed
BINS = (1, 4, 8, 16, 32, 64, 128, 256)  # of distances, tokens


class Plan(NamedTuple):
    """The size of every run."""

    model: Config
    steps: int
    rows: int
    length: int
    marks: int
    queries: int
    looked_at: int  # rows of held-out text
    rates: tuple[float, ...]


MODEL = Config(layers=1, width=128, heads=2, vocabulary=VOCABULARY)
FULL = Plan(MODEL, 1300, 8, 256, 8, 64, 128, (3e-3, 6e-3))
QUICK = Plan(dataclasses.replace(MODEL, width=32), 20, 8, 64, 5, 24, 16, (3e-3, 6e-3))


def settings_of(plan: Plan, text: data.Text, run: Run) -> results.Row:
    """Everything that a run follows from."""
    model = dataclasses.replace(plan.model, base=float(run.method))
    recipe = Recipe(
        steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed,
        warmup=plan.steps // 10, save_every=200, look_every=plan.steps // 10,
    )  # fmt: skip
    return {
        "method": run.method, "model": dataclasses.asdict(model), "length": plan.length,
        "marks": plan.marks, "queries": plan.queries, "recipe": dataclasses.asdict(recipe),
        "text": text.name, "sha256": text.sha256,
    }  # fmt: skip


def trained(plan: Plan, text: data.Text, job: Job) -> results.Row:
    """The row of one run, which the first process also writes."""
    seed = job.recipe.seed
    asked = held_out(text, plan.length, plan.marks, plan.queries, plan.looked_at)

    def batches(step: int) -> data.Batch:
        return training(text, plan.length, plan.marks, plan.queries, plan.rows, seed, step).batch

    model = build(Config(**job.settings["model"]), seed)
    with torch.no_grad():
        make_similar(model.tokens.weight)
    done = job.train("E4 base", model, batches, lambda model: seen(model, asked))
    return job.written({"looks": done.looks, "seconds": round(done.seconds, 1)})


def seen(model: Model, asked: Recall) -> dict[str, float]:
    """Bits of everything asked for, `text` and `value` bits, the share of values that are right.

    Shares are of the queries with FEWEST marks before them or more. `recall` is over all distances,
    `recall 8` over those from 8 to the next of BINS; `before` and `beyond` are over those below the
    first distance with B_m < 0, and from there on; `guess` is what knowing no key would give.
    """
    device = model.head.weight.device
    tokens, targets = (part.to(device) for part in asked.batch)
    distances, marks_before = asked.distances.to(device), asked.marks_before.to(device)
    logits = model(tokens)
    nats = functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=data.IGNORED, reduction="none"
    )
    right = (logits.argmax(-1) == targets).double()
    is_value, is_judged = distances > 0, marks_before >= FEWEST
    is_text = (targets != data.IGNORED) & ~is_value
    found = {
        "bits": nats[is_value | is_text].mean().item() / math.log(2),
        "text": nats[is_text].mean().item() / math.log(2),
        "value": nats[is_value].mean().item() / math.log(2),
        "guess": (1 / marks_before[is_judged]).mean().item(),
    }
    reach = first_failure(model.config.spec) or tokens.shape[1]
    spans = {"recall": (1, tokens.shape[1]), "before": (1, reach), "beyond": (reach, math.inf)}
    spans |= {f"recall {low}": (low, high) for low, high in itertools.pairwise(BINS)}
    for name, (low, high) in spans.items():
        inside = is_judged & (low <= distances) & (distances < high)
        if inside.any():
            found[name] = right[inside].mean().item()
    return found


def ends(rows: Sequence[results.Row], base: str) -> list[dict[str, float]]:
    """The last look of every seed at the best rate of a base."""
    return [row["looks"][-1] for row in chosen(rows, base).values()]


def spec_of(rows: Sequence[results.Row], base: str) -> rotary.Rotary:
    """The RoPE of the heads of the models with a base."""
    return Config(**next(iter(chosen(rows, base).values()))["run"]["model"]).spec


def untrained(spec: rotary.Rotary, low: int, high: int, rivals: int) -> float:
    """How often a random query finds its own mark at distances low .. high - 1, without training.

    A mark is like its query as `make_similar` makes it: query + 1.0 eps; the rivals are the others.
    """
    return float(retrieval(spec, np.arange(low, high), noise=1.0, rivals=rivals).mean())


def table(rows: Sequence[results.Row]) -> str:
    """Bits and recall of every base, recall by distance, and whether the two order the bases."""
    reference = ends(rows, REFERENCE)
    spans = [pair for pair in itertools.pairwise(BINS) if f"recall {pair[0]}" in reference[0]]
    rivals = rows[0]["run"]["marks"] - 1
    lines, trained_lines, untrained_lines = [], [], []
    for base in BASES:
        of, spec = ends(rows, base), spec_of(rows, base)
        measured = []
        for name, form in (("text", ".3f"), ("recall", ".2f")):
            apart = [end[name] - other[name] for end, other in zip(of, reference, strict=True)]
            measured.append(results.mean_spread([end[name] for end in of], form))
            measured.append(results.mean_spread(apart, f"+{form}"))
        shares = [
            results.mean_spread([end[name] for end in of], ".2f") if name in of[0] else "none asked"
            for name in ("before", "beyond")
        ]
        lines.append([
            base, f"{best_rate(rows, base):g}", *measured, first_failure(spec), *shares,
        ])  # fmt: skip
        names = [f"recall {low}" for low, _ in spans]
        trained_lines.append(
            [base, *(results.mean_spread([end[name] for end in of], ".2f") for name in names)]
        )
        untrained_lines.append([base, *(f"{untrained(spec, *span, rivals):.2f}" for span in spans)])
    apart_from = f"minus base {REFERENCE}"
    heads = ["base", "learning rate", "text, bits per byte", apart_from, "recall", apart_from,
             "first m with B_m < 0", "recall before it", "recall from it on"]  # fmt: skip
    by_distance = ["base", *(f"{low} to {high - 1}" for low, high in spans)]
    return (
        f"{results.table(heads, lines)}\n\nShare of values that are right, by distance in tokens; "
        f"a guess without the key is right {reference[0]['guess']:.2f} of the time:\n\n"
        f"{results.table(by_distance, trained_lines)}\n\n"
        "How often a random query finds its mark without any training, from the frequencies of one "
        f"head alone, among {rivals + 1} marks:\n\n"
        f"{results.table(by_distance, untrained_lines)}\n\nRank correlation, over the "
        f"{len(BASES)} bases, of bits of the text and recall: "
        f"{results.mean_spread(orders(rows), '+.2f')}. -1: perplexity orders the bases as recall "
        "does."
    )


def orders(rows: Sequence[results.Row]) -> list[float]:
    """For every seed the rank correlation, over the bases, of bits of the text and recall."""
    return [
        rank_correlation(
            [ends(rows, base)[index]["text"] for base in BASES],
            [ends(rows, base)[index]["recall"] for base in BASES],
        )
        for index in range(len(ends(rows, REFERENCE)))
    ]


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
    """Recall against distance, against the steps of training, and against the bits of the text.

    Dashes are what the frequencies do without training, ticks the first distance with B_m < 0.
    """
    picture = Figure(figsize=(12, 4.4), layout="constrained")
    by_distance, by_step, by_bits = picture.subplots(1, 3, sharey=True)
    rivals = rows[0]["run"]["marks"] - 1
    for base, color in zip(BASES, COLORS, strict=True):
        spec = spec_of(rows, base)
        for index, row in enumerate(chosen(rows, base).values()):
            end, name = row["looks"][-1], f"base {base}" if index == 0 else None
            spans = [pair for pair in itertools.pairwise(BINS) if f"recall {pair[0]}" in end]
            middles = [math.sqrt(low * high) for low, high in spans]
            by_distance.plot(
                middles, [end[f"recall {low}"] for low, _ in spans], color=color, label=name
            )
            if index == 0:
                alone = [untrained(spec, *span, rivals) for span in spans]
                by_distance.plot(middles, alone, color=color, linestyle="--", linewidth=0.9)
            steps = [look["step"] for look in row["looks"]]
            by_step.plot(steps, [look["recall"] for look in row["looks"]], color=color)
            by_bits.plot(end["text"], end["recall"], "o", color=color)
        reach = first_failure(spec)
        if reach is not None and reach < BINS[-1]:
            by_distance.axvline(reach, ymax=0.05, color=color, linewidth=2)
    by_distance.set_xscale("log", base=2)
    by_distance.set_ylim(0, 1.03)
    by_distance.set_xlabel("distance to the mark, tokens")
    by_distance.set_ylabel("share of values that are right")
    by_distance.plot([], [], "k--", linewidth=0.9, label="frequencies alone, no training")
    by_distance.plot([], [], "k|", markeredgewidth=2, label="first distance with B_m < 0")
    picture.legend(*by_distance.get_legend_handles_labels(), frameon=False, ncols=4,
                   loc="outside lower center")  # fmt: skip
    by_step.set_xlabel("step")
    by_bits.set_xlabel("text, bits per byte")
    for panel, title in (
        (by_distance, "What is found, by distance; a line is a seed"),
        (by_step, "What is found, by step of training"),
        (by_bits, "What is found, and loss on text; a dot is a seed"),
    ):
        panel.set_title(title, fontsize=10)
    return picture


SWEEP = Sweep(
    __doc__, FOLDER, FULL, QUICK, BASES, data.text, settings_of, trained,
    table, figure, "base.png",
)  # fmt: skip


def main() -> None:
    """Train what is not trained yet, compare, write the results."""
    carry_out(SWEEP)


if __name__ == "__main__":
    main()
