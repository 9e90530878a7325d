"""Do designed frequencies help a small model: its loss, what it retrieves, and from how far?

    python -m experiments.e9_design.run [--quick] [--seeds 5]

Killed, it goes on where it was. The learning rate of each method is chosen on validation text.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn import functional

import rotary
from rotary.analysis import certify, similarity

from ..e4_base.recall import VOCABULARY, Recall, make_similar, recall
from ..lab import data, intervals, results
from ..lab.job import Job, Sweep, carry_out
from ..lab.model import Config, Model, build
from ..lab.sweep import Run, best_rate, chosen
from ..lab.train import Recipe

FOLDER = Path(__file__).parent
LADDERS = json.loads((FOLDER / "ladders.json").read_text())
METHODS = ("base 10000", "base 58153.2", "reach", "level")
REFERENCE = METHODS[0]
YARN = "base 10000, YaRN x 8"  # of the weights of the reference, at the longer lengths
LENGTHS = (128, 512, 1024)  # the first is that of the training
BINS = (1, 16, 32, 64, 128, 256, 512, 1024)  # of distances, tokens
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
FEWEST = 4  # marks before a query, so that its value is not guessed
STREAMS = {"training": 0, "validation": 1, "test": 2}  # of random numbers that must not meet


@dataclasses.dataclass(frozen=True)
class Ladder(Config):
    """A model whose frequencies are given, or those of a base if there are none."""

    inv_freq: tuple[float, ...] = ()

    @property
    def spec(self) -> rotary.Rotary:
        """The RoPE of one head."""
        if not self.inv_freq:
            return super().spec
        params = {"inv_freq": self.inv_freq}
        return rotary.Rotary(head_dim=self.width // self.heads, schedule="custom", params=params)


class Plan(NamedTuple):
    """The size of every run; a row has `marks`, and a quarter of it are queries."""

    model: Ladder
    steps: int
    rows: int
    marks: int
    tested: int  # tokens of each length that are looked at
    rates: tuple[float, ...]


class Split(NamedTuple):
    """The parts of a text: 90 % to learn from, 5 % to choose rates by, 5 % to report."""

    name: str
    sha256: str
    training: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor


MODEL = Ladder(layers=1, width=64, heads=2, vocabulary=VOCABULARY)
FULL = Plan(MODEL, 600, 8, 8, 2**15, (3e-3, 1e-2, 3e-2))
QUICK = Plan(MODEL, 5, 4, 8, 2**10, (3e-3, 1e-2, 3e-2))


def split(name: str) -> Split:
    """A text of the lab in three."""
    text = data.text(name)
    whole = torch.cat([part for part in text if isinstance(part, torch.Tensor)])
    part = len(whole) // 20
    return Split(name, text.sha256, *whole.split((len(whole) - 2 * part, part, part)))


def settings_of(plan: Plan, text: Split, run: Run) -> results.Row:
    """Everything that a run follows from."""
    is_base = run.method.startswith("base ")
    of_method: dict[str, Any] = (
        {"base": float(run.method[5:])} if is_base else {"inv_freq": tuple(LADDERS[run.method])}
    )
    model = dataclasses.replace(plan.model, **of_method)
    recipe = Recipe(
        steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed,
        warmup=plan.steps // 10, save_every=200, look_every=plan.steps,
    )  # fmt: skip
    return {
        "method": run.method, "model": dataclasses.asdict(model), "lengths": LENGTHS,
        "marks": plan.marks, "tested": plan.tested, "recipe": dataclasses.asdict(recipe),
        "text": text.name, "sha256": text.sha256,
    }  # fmt: skip


def drawn(content: torch.Tensor, length: int, marks: int, rows: int, *seed: int) -> Recall:
    """Rows of marks and queries in a part of the text, by the seed alone."""
    return recall(content, length, marks, length // 4, rows, np.random.default_rng([9, *seed]))


def trained(plan: Plan, text: Split, job: Job) -> results.Row:
    """The row of one run, which the first process also writes."""
    seed, length = job.recipe.seed, LENGTHS[0]
    checked = drawn(text.validation, length, plan.marks, plan.tested // length,
                    STREAMS["validation"])  # fmt: skip
    tests = [
        drawn(text.test, each, plan.marks, plan.tested // each, STREAMS["test"], each)
        for each in LENGTHS
    ]

    def batches(step: int) -> data.Batch:
        stream = STREAMS["training"]
        return drawn(text.training, length, plan.marks, plan.rows, stream, seed, step).batch

    def look(model: Model) -> dict[str, float]:
        bits = seen(model, checked, None)["bits"]
        found = {"bits": bits, "validation": bits}  # what the rate is chosen by
        for each, test in zip(LENGTHS, tests, strict=True):
            own = seen(model, test, None)
            found |= {f"{name} of {each}": value for name, value in own.items()}
            if job.settings["method"] == REFERENCE and each > length:
                stretched = seen(model, test, yarn(model.config.spec, length))
                found |= {f"yarn {name} of {each}": value for name, value in stretched.items()}
        return found

    settings = dict(job.settings["model"])
    model = build(Ladder(**{**settings, "inv_freq": tuple(settings["inv_freq"])}), seed)
    with torch.no_grad():
        make_similar(model.tokens.weight)
    done = job.train("E9 design", model, batches, look)
    return job.written({"looks": done.looks, "seconds": round(done.seconds, 1)})


def yarn(spec: rotary.Rotary, trained: int) -> rotary.Rotary:
    """The same RoPE stretched by YaRN to the longest of LENGTHS."""
    params = {"factor": LENGTHS[-1] / trained, "original_max_position_embeddings": trained}
    return dataclasses.replace(spec, schedule="yarn", params=params)


def seen(model: Model, asked: Recall, other: rotary.Rotary | None) -> dict[str, float]:
    """Bits of all that is asked for and of the text, and the share of values that are right.

    other  a RoPE in place of the model's own
    Shares are of the queries with FEWEST marks before them or more: `recall` of all of them,
    `recall 16` of distances from 16 to the next of BINS.
    """
    tokens, targets = asked.batch
    tables = rotary.cos_sin(other or model.config.spec, torch.arange(tokens.shape[1]))
    nats, right = [], []
    for rows, wanted in zip(tokens.split(8), targets.split(8), strict=True):
        logits = model(rows, tables)
        nats.append(
            functional.cross_entropy(
                logits.transpose(1, 2), wanted, ignore_index=data.IGNORED, reduction="none"
            )
        )
        right.append((logits.argmax(-1) == wanted).double())
    is_value, is_judged = asked.distances > 0, asked.marks_before >= FEWEST
    is_text = (targets != data.IGNORED) & ~is_value
    bits, correct = torch.cat(nats) / math.log(2), torch.cat(right)
    found = {"bits": bits[is_value | is_text].mean().item(), "text": bits[is_text].mean().item()}
    spans = [("recall", 1, tokens.shape[1])]
    spans += [(f"recall {low}", low, high) for low, high in itertools.pairwise(BINS)]
    for name, low, high in spans:
        inside = is_judged & (low <= asked.distances) & (asked.distances < high)
        if inside.any():
            found[name] = correct[inside].mean().item()
    return found


def ends(rows: Sequence[results.Row], method: str) -> dict[int, dict[str, float]]:
    """Seed -> the numbers at the end of a run at the best rate of a method, or with YaRN."""
    of = REFERENCE if method == YARN else method
    found = {seed: row["looks"][-1] for seed, row in chosen(rows, of).items()}
    if method != YARN:
        return found
    return {seed: {name.removeprefix("yarn "): value for name, value in end.items()
                   if name.startswith("yarn ")} for seed, end in found.items()}  # fmt: skip


def difference(rows: Sequence[results.Row], method: str, name: str) -> intervals.Difference:
    """A number of a method minus that of the reference, paired by seed."""
    own, other = ends(rows, method), ends(rows, REFERENCE)
    return intervals.difference(
        {seed: end[name] for seed, end in own.items()},
        {seed: end[name] for seed, end in other.items()},
    )


@functools.cache
def spec_of(method: str) -> rotary.Rotary:
    """The RoPE of the heads of a method, at the longest length."""
    if method == YARN:
        return yarn(spec_of(REFERENCE), LENGTHS[0])
    given = {"base": float(method[5:])} if method.startswith("base ") else {
        "schedule": "custom", "params": {"inv_freq": LADDERS[method]}}  # fmt: skip
    return rotary.Rotary(head_dim=MODEL.width // MODEL.heads, **given)


def table(rows: Sequence[results.Row]) -> str:
    """Loss and recall at every length against the reference, and recall by distance."""
    lines, long_lines, by_distance = [], [], []
    longest = LENGTHS[-1]
    for method in (*METHODS, YARN):
        failing = certify(spec_of(method), longest, seq_len=longest).first_failure
        first = "none" if failing is None else str(failing)
        of = list(ends(rows, method).values())
        rate = f"{best_rate(rows, REFERENCE if method == YARN else method):g}"
        for length in LENGTHS:
            if f"text of {length}" not in of[0]:
                continue
            line: list[object] = [method, *([rate, first] if length == LENGTHS[0] else [length])]
            for name, form in (("text", ".3f"), ("recall", ".3f")):
                line.append(results.mean_spread([end[f"{name} of {length}"] for end in of], form))
                of_both = difference(rows, method, f"{name} of {length}")
                line.append("" if method == REFERENCE else of_both.told(form))
            (lines if length == LENGTHS[0] else long_lines).append(line)
        spans = [name for name in (f"recall {low} of {longest}" for low in BINS) if name in of[0]]
        by_distance.append(
            [method, *(results.mean_spread([end[name] for end in of], ".2f") for name in spans)]
        )
    minus = f"minus {REFERENCE} [95 %]"
    measured = ["text, bits per byte", minus, "recall", minus]
    near = ["method", "learning rate", f"first m to {longest} with B_m < 0", *measured]
    asked = [f"{name.split()[1]} to {BINS[BINS.index(int(name.split()[1])) + 1] - 1}"
             for name in spans]  # fmt: skip
    return (
        f"Rows of {LENGTHS[0]} tokens, as in training:\n\n{results.table(near, lines)}\n\n"
        f"Longer rows, without tuning:\n\n"
        f"{results.table(['method', 'tokens', *measured], long_lines)}\n\n"
        f"Share of values that are right in rows of {longest} tokens, by distance:\n\n"
        f"{results.table(['method', *asked], by_distance)}"
    )


def figure(rows: Sequence[results.Row]) -> Figure:
    """B_m / B_0 of every method, and what its models retrieve in the longest rows."""
    picture = Figure(figsize=(10, 4.6), layout="constrained")
    alike, found = picture.subplots(1, 2)
    longest = LENGTHS[-1]
    at = np.unique(np.geomspace(1, longest, 300).astype(int))
    for method, color in zip((*METHODS, YARN), COLORS, strict=True):
        spec = spec_of(method)
        curve = similarity(spec, at, seq_len=longest) / (spec.head_dim / 2)
        alike.plot(at, curve, color=color, linewidth=1.2, label=method)
        for end in ends(rows, method).values():
            spans = [(low, high) for low, high in itertools.pairwise(BINS)
                     if f"recall {low} of {longest}" in end]  # fmt: skip
            found.plot(
                [math.sqrt(low * high) for low, high in spans],
                [end[f"recall {low} of {longest}"] for low, _ in spans],
                color=color, linewidth=1,
            )  # fmt: skip
    for panel, y in ((alike, "B_m / B_0"), (found, "share of values that are right")):
        panel.set_xscale("log", base=2)
        panel.axvline(LENGTHS[0], color="0.6", linewidth=0.8, linestyle=":")
        panel.set_xlabel("distance, tokens")
        panel.set_ylabel(y)
    alike.axhline(0, color="0.6", linewidth=0.8)
    alike.set_title("Favour of a similar key", fontsize=10)
    found.set_title(f"Found in rows of {longest} tokens; a line is a seed", fontsize=10)
    picture.legend(*alike.get_legend_handles_labels(), frameon=False, ncols=3,
                   loc="outside lower center")  # fmt: skip
    return picture


SWEEP = Sweep(
    __doc__, FOLDER, FULL, QUICK, METHODS, split, settings_of, trained,
    table, figure, "design.png",
)  # fmt: skip


def main() -> None:
    """Train what is not trained yet, compare, write the results."""
    carry_out(SWEEP)


if __name__ == "__main__":
    main()
