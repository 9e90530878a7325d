"""The base of RoPE against the distance at which a trained model retrieves, and against perplexity.

    python -m experiments.e4_base.run [--quick]
    torchrun --nproc-per-node 2 -m experiments.e4_base.run      # on two cores

Killed, it goes on where it was. The learning rate of each base is chosen on validation text.
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

from ..lab import data, report, results
from ..lab.intervals import difference, mean
from ..lab.job import Job, Sweep, carry_out
from ..lab.model import Config, Model, build
from ..lab.sweep import Run, best_rate, chosen
from ..lab.train import Recipe
from .recall import VOCABULARY, Recall, fixed, make_similar, training

FOLDER = Path(__file__).parent
BASES = ("10", "100", "1000", "10000")
REFERENCE = "10000"
COLORS = ("#d55e00", "#e69f00", "#009e73", "#0072b2")
FEWEST = 4  # marks before a query, so that its value is not guessed
BINS = (1, 4, 8, 16, 32, 64, 128, 256, 512)  # of distances, tokens


class Plan(NamedTuple):
    """The size of every run."""

    model: Config
    steps: int
    rows: int
    length: int
    marks: int
    queries: int
    looked_at: int  # rows of held-out text, and of validation text
    rates: tuple[float, ...]


MODEL = Config(layers=1, width=64, heads=1, vocabulary=VOCABULARY)
FULL = Plan(MODEL, 800, 8, 128, 8, 32, 64, (3e-3, 1e-2, 3e-2))
QUICK = Plan(dataclasses.replace(MODEL, width=32), 5, 8, 64, 5, 24, 16, (1e-2, 3e-2, 1e-1))


def settings_of(plan: Plan, text: data.Text, run: Run) -> results.Row:
    """Everything that a run follows from."""
    model = dataclasses.replace(plan.model, base=float(run.method))
    recipe = Recipe(
        steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed,
        warmup=plan.steps // 10, save_every=200, look_every=plan.steps // 5,
    )  # fmt: skip
    return {
        "method": run.method, "model": dataclasses.asdict(model), "length": plan.length,
        "marks": plan.marks, "queries": plan.queries, "looked_at": plan.looked_at,
        "recipe": dataclasses.asdict(recipe), "split": data.SPLIT, "text": text.name,
        "sha256": text.sha256,
    }  # fmt: skip


def trained(plan: Plan, text: data.Text, job: Job) -> results.Row:
    """The row of one run, which the first process also writes."""
    seed = job.recipe.seed
    sizes = (plan.length, plan.marks, plan.queries, plan.looked_at)
    asked, validation = fixed(text.held_out, *sizes), fixed(text.validation, *sizes)

    def batches(step: int) -> data.Batch:
        return training(text, plan.length, plan.marks, plan.queries, plan.rows, seed, step).batch

    model = build(Config(**job.settings["model"]), seed)
    with torch.no_grad():
        make_similar(model.tokens.weight)

    def look(model: Model) -> dict[str, float]:
        return {**seen(model, asked), "validation": seen(model, validation)["bits"]}

    done = job.train("E4 base", model, batches, look)
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


def ends(rows: Sequence[results.Row], base: str) -> dict[int, dict[str, float]]:
    """Seed -> the last look at the chosen rate of a base."""
    return {seed: row["looks"][-1] for seed, row in chosen(rows, base).items()}


def of(rows: Sequence[results.Row], base: str, name: str) -> dict[int, float]:
    """Seed -> a number of the last look; empty where nothing was asked."""
    return {seed: end[name] for seed, end in ends(rows, base).items() if name in end}


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
    spans = [pair for pair in itertools.pairwise(BINS) if of(rows, REFERENCE, f"recall {pair[0]}")]
    rivals = rows[0]["run"]["marks"] - 1
    guess = next(iter(of(rows, REFERENCE, "guess").values()))
    lines, by_distance, alone = [], [], []
    for base in BASES:
        spec = spec_of(rows, base)
        lines.append([
            base, f"{best_rate(rows, base):g}", spread(rows, base, "text", ".3f"),
            spread(rows, base, "recall"), first_failure(spec), spread(rows, base, "before"),
            spread(rows, base, "beyond"),
        ])  # fmt: skip
        by_distance.append([base, *(spread(rows, base, f"recall {low}") for low, _ in spans)])
        alone.append([base, *(f"{untrained(spec, *span, rivals):.2f}" for span in spans)])
    names = {"text": ".3f", "recall": ".2f", **{f"recall {low}": ".2f" for low, _ in spans}}
    apart = [
        [f"{base} minus {REFERENCE}", *(
            difference(of(rows, base, name), of(rows, REFERENCE, name)).told(form)
            for name, form in names.items()
        )]
        for base in BASES if base != REFERENCE
    ]  # fmt: skip
    heads = ["base", "learning rate", "text, bits per byte", "recall", "first m with B_m < 0",
             "recall before it", "recall from it on"]  # fmt: skip
    columns = [f"{low} to {high - 1}" for low, high in spans]
    return "\n\n".join([
        results.table(heads, lines),
        "Share of values that are right, by distance in tokens; a guess without the key is right "
        f"{guess:.2f} of the time:", results.table(["base", *columns], by_distance),
        "Differences; recall of all, then by distance:",
        results.table(["base", "text, bits per byte", "recall", *columns], apart),
        "How often a random query finds its mark without any training, from the frequencies of one "
        f"head alone, among {rivals + 1} marks:", results.table(["base", *columns], alone),
        f"Rank correlation, over the {len(BASES)} bases, of bits of the text and recall, by seed: "
        f"{', '.join(f'{value:+.2f}' for value in orders(rows).values())}. -1: perplexity orders "
        f"the bases as recall does. Mean: {mean(orders(rows)).told('.2f')}.",
        report.recipe(rows, BASES),
    ])  # fmt: skip


def spread(rows: Sequence[results.Row], base: str, name: str, form: str = ".2f") -> str:
    """Mean and spread of a number of the last look."""
    found = [*of(rows, base, name).values()]
    return results.mean_spread(found, form) if found else "none asked"


def orders(rows: Sequence[results.Row]) -> dict[int, float]:
    """Seed -> the rank correlation, over the bases, of bits of the text and recall."""
    return {
        seed: rank_correlation(
            [of(rows, base, "text")[seed] for base in BASES],
            [of(rows, base, "recall")[seed] for base in BASES],
        )
        for seed in ends(rows, REFERENCE)
    }


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
