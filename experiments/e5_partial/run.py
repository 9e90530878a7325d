"""How many frequencies of RoPE have to turn: p-RoPE and partial rotation, on a causal byte model.

    python -m experiments.e5_partial.run [--quick]
    torchrun --nproc-per-node 2 -m experiments.e5_partial.run      # on two cores

Killed, it goes on where it was. The learning rate of each method is chosen on validation text.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import rotary

from ..lab import data, report, results
from ..lab.intervals import difference
from ..lab.job import Job, Sweep, carry_out
from ..lab.model import Config, Tables, Tensor, bits, build
from ..lab.sweep import Run, best_rate, chosen, end_bits
from ..lab.train import Recipe

FOLDER = Path(__file__).parent
WHOLE = "p 1"
SHARES = ("p 0", "p 0.25", "p 0.5", "p 0.75", WHOLE)
PARTS = ("part 0.25", "part 0.5")
METHODS = SHARES + PARTS
PAIRS = (  # of methods whose difference is taken seed by seed
    *((method, WHOLE) for method in METHODS if method != WHOLE),
    *(("part 0.25", "p 0.25"), ("part 0.5", "p 0.5")),
)


class Plan(NamedTuple):
    """The size of every run."""

    model: Config
    steps: int
    rows: int
    length: int
    looked_at: int  # rows of held-out text, and of validation text
    rates: tuple[float, ...]


FULL = Plan(Config(length=128, layers=2, width=64, heads=2), 400, 4, 128, 64, (3e-3, 1e-2, 3e-2))
QUICK = Plan(Config(length=32, layers=1, width=32), 5, 8, 32, 8, (1e-2, 3e-2, 1e-1))


def spec_of(method: str, head_dim: int, base: float) -> rotary.Rotary:
    """The RoPE of a method: "p <share>" or "part <share>"; every head has head_dim / 2 pairs.

    p     the fastest share of the pairs turns as in full RoPE, the rest stands still
          (Barbero et al., arXiv 2410.06205, section 6)
    part  the ladder of rotary_dim = share of head_dim, and the rest stands still: GPT-NeoX. Its
          pairs are here the first of the full width: other channels, the same frequencies.

    >>> rotary.inv_freq(spec_of("p 0.5", 8, 1e4))[0]
    array([1. , 0.1, 0. , 0. ])
    >>> rotary.inv_freq(spec_of("part 0.5", 8, 1e4))[0]
    array([1.  , 0.01, 0.  , 0.  ])
    """
    kind, share = method.split()[0], float(method.split()[1])
    if kind == "p" and share > 0:
        return rotary.Rotary(
            head_dim=head_dim, base=base, schedule="proportional",
            params={"partial_rotary_factor": share},
        )  # fmt: skip
    turning: list[float] = []
    if kind == "part":
        part = rotary.Rotary(head_dim=head_dim, rotary_dim=int(share * head_dim), base=base)
        turning = rotary.inv_freq(part)[0].tolist()
    still = [0.0] * (head_dim // 2 - len(turning))
    return rotary.Rotary(head_dim=head_dim, schedule="custom", params={"inv_freq": turning + still})


class Turned(nn.Module):
    """The common model with the frequencies of a method; weights and all else are the same."""

    def __init__(self, config: Config, method: str, seed: int) -> None:
        super().__init__()
        self.spec = spec_of(method, config.width // config.heads, config.base)
        self.config = (config, self.spec)  # what a checkpoint must agree with
        self.model = build(config, seed)

    def tables(self, seq: int) -> Tables:
        """cos and sin of the positions 0 .. seq - 1, exact, on the device of the model."""
        positions = torch.arange(seq, device=self.model.head.weight.device)
        return rotary.cos_sin(self.spec, positions)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seq, vocabulary) from (batch, seq)."""
        return self.model(tokens, self.tables(tokens.shape[1]))


def settings_of(plan: Plan, text: data.Text, run: Run) -> results.Row:
    """Everything that a run follows from."""
    config = plan.model
    recipe = Recipe(
        steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed,
        warmup=plan.steps // 10, look_every=plan.steps // 5,
    )  # fmt: skip
    spec = spec_of(run.method, config.width // config.heads, config.base)
    return {
        "method": run.method, "spec": spec.to_dict(), "model": dataclasses.asdict(config),
        "length": plan.length, "looked_at": plan.looked_at, "split": data.SPLIT,
        "recipe": dataclasses.asdict(recipe), "text": text.name, "sha256": text.sha256,
    }  # fmt: skip


def trained(plan: Plan, text: data.Text, job: Job) -> results.Row:
    """The row of one run, which the first process also writes."""
    seed = job.recipe.seed
    held_out, validation = (
        data.fixed_batch(part, "causal", plan.length, plan.looked_at)
        for part in (text.held_out, text.validation)
    )

    def batches(step: int) -> data.Batch:
        return data.training_batch(text, "causal", plan.length, plan.rows, seed, step)

    def look(turned: Turned) -> dict[str, float]:
        tables = turned.tables(plan.length)
        looked_at = {"bits": held_out, "validation": validation}
        return {name: bits(turned.model, batch, tables) for name, batch in looked_at.items()}

    model = Turned(Config(**job.settings["model"]), job.settings["method"], seed)
    done = job.train("E5", model, batches, look)
    return job.written({"looks": done.looks, "seconds": round(done.seconds, 1)})


def ends(rows: Sequence[results.Row], method: str) -> dict[int, float]:
    """Seed -> bits at the end, at the chosen rate of a method."""
    return {seed: end_bits(row) for seed, row in chosen(rows, method).items()}


def slowest(row: results.Row) -> tuple[int, float]:
    """How many pairs turn, and the wavelength of the slowest of them in tokens, inf if none.

    >>> slowest({"run": {"spec": {"head_dim": 4, "rotary_dim": 2}}})
    (1, 6.283185307179586)
    """
    inv_freq = rotary.inv_freq(rotary.Rotary.from_dict(row["run"]["spec"]))[0]
    turning = inv_freq[inv_freq > 0]
    return len(turning), 2 * math.pi / float(turning.min()) if len(turning) else math.inf


def table(rows: Sequence[results.Row]) -> str:
    """Bits at the end; the differences seed by seed; what was run."""
    lines = []
    for method in METHODS:
        pairs, wavelength = slowest(next(iter(chosen(rows, method).values())))
        lines.append([
            method, pairs, f"{wavelength:.0f}" if pairs else "-", f"{best_rate(rows, method):g}",
            results.mean_spread([*ends(rows, method).values()]),
        ])  # fmt: skip
    heads = ["method", "pairs that turn", "slowest wavelength, tokens", "learning rate",
             "bits per byte"]  # fmt: skip
    apart = [
        [f"{one} minus {other}", difference(ends(rows, one), ends(rows, other)).told()]
        for one, other in PAIRS
    ]
    return "\n\n".join([
        results.table(heads, lines), results.table(["difference", "bits per byte"], apart),
        report.recipe(rows, METHODS),
    ])  # fmt: skip


def figure(rows: Sequence[results.Row]) -> Figure:
    """Bits above the whole RoPE against the share of pairs that turn; every seed is a point."""
    picture = Figure(figsize=(6, 4), layout="constrained")
    axes = picture.subplots()
    for methods, color, name in (
        (SHARES, "#0072b2", "p-RoPE: the fastest pairs of the full ladder"),
        ((*PARTS, WHOLE), "#d55e00", "partial: a ladder of fewer pairs"),
    ):
        shares = [float(method.split()[1]) for method in methods]
        whole = ends(rows, WHOLE)
        found = np.array(
            [[bits - whole[seed] for seed, bits in ends(rows, name).items()] for name in methods]
        )
        axes.plot(shares, found, "o", color=color, markersize=4)
        axes.plot(shares, found.mean(1), color=color, label=name)
    axes.axhline(0, color="#000000", linewidth=0.6)
    axes.set_xlabel("share of the pairs that turn")
    axes.set_ylabel(f"bits per byte minus those of {WHOLE}")
    axes.set_title("Loss with fewer rotated pairs; line: mean, dot: a seed", fontsize=10)
    axes.legend(frameon=False)
    return picture


SWEEP = Sweep(
    __doc__, FOLDER, FULL, QUICK, METHODS, data.text, settings_of, trained,
    table, figure, "partial.png",
)  # fmt: skip


def main() -> None:
    """Train what is not trained yet, compare, write the results."""
    carry_out(SWEEP)


if __name__ == "__main__":
    main()
