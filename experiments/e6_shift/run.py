"""Logits of a trained model when the whole text moves to far positions, by arithmetic.

    python -m experiments.e6_shift.run [--quick]

Killed, it goes on where it was. Without --quick it takes 17 minutes on one busy core.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

import rotary

from ..lab import command, data, report, results
from ..lab.intervals import difference
from ..lab.model import Config, Model, Tables, bits, build
from ..lab.train import Processes, Recipe, processes, train

FOLDER = Path(__file__).parent
FAR = 2**39  # where the 64-bit turns of rotary are right to 1e-7


class Plan(NamedTuple):
    """What is trained, and where the text is moved to."""

    model: Config
    steps: int
    length: int
    looked_at: int  # rows of held-out text
    offsets: tuple[int, ...]


FULL = Plan(Config(), 400, 256, 16, tuple(2**k for k in range(12, 25)))
QUICK = Plan(Config(layers=2, width=64), 30, 64, 4, (2**12, 2**18, 2**24))


class Scheme(NamedTuple):
    """How cos and sin are made of positions, and the type that the model computes in."""

    tables: Callable[[rotary.Rotary, torch.Tensor], Tables]
    dtype: torch.dtype = torch.float32


def exact(spec: rotary.Rotary, positions: torch.Tensor) -> Tables:
    """The tables of rotary: angles without error, rounded to float32 at the end."""
    return rotary.cos_sin(spec, positions)


def float32_angles(spec: rotary.Rotary, positions: torch.Tensor) -> Tables:
    """The tables of transformers, bit for bit: position times inv_freq, rounded to float32."""
    return rotary.cos_sin(spec, positions, precision="float32")


def bfloat16_tables(spec: rotary.Rotary, positions: torch.Tensor) -> Tables:
    """Exact angles, but cos and sin kept in bfloat16."""
    cos, sin = rotary.cos_sin(spec, positions)
    return cos.bfloat16().float(), sin.bfloat16().float()


def bfloat16_positions(spec: rotary.Rotary, positions: torch.Tensor) -> Tables:
    """Positions that went through bfloat16, which holds 8 bits: 256 and 257 become one."""
    return rotary.cos_sin(spec, positions.bfloat16().long())


SCHEMES = {
    "exact angles": Scheme(exact),
    "float32 angles": Scheme(float32_angles),
    "bfloat16 tables": Scheme(bfloat16_tables),
    "bfloat16 positions": Scheme(bfloat16_positions),
    "bfloat16 model, exact angles": Scheme(exact, torch.bfloat16),
    "bfloat16 model, float32 angles": Scheme(float32_angles, torch.bfloat16),
}


BLUE, VERMILLION, GREEN, BLACK = "#0072b2", "#d55e00", "#009e73", "#000000"
STYLES = (
    *((color, "-") for color in (BLUE, VERMILLION, GREEN, BLACK)),
    *((color, "--") for color in (BLUE, VERMILLION)),  # of the model in bfloat16
)
MEASURES = {  # key in the results -> what the table says, how numbers are written
    "largest": ("Largest change of a logit", ".1e"),
    "changed": ("Share of places where another byte became the likeliest", ".4f"),
    "bits": ("Bits per byte", ".4f"),
}


def main() -> None:
    """Train what is not trained yet, move the held-out text, write the results."""
    with command.options(__doc__, FOLDER) as options:
        plan = QUICK if options.quick else FULL
        text = data.text(options.text)
        with processes(options.device) as these:
            for seed in options.seeds:
                one_seed(plan, text, seed, options.out, these)
        if these.rank == 0:
            results.report(options.out, table, figure, "shift.png")


def one_seed(plan: Plan, text: data.Text, seed: int, out: Path, these: Processes) -> None:
    """One line of the results: a model trained at positions from 0 on, looked at everywhere."""
    recipe = Recipe(
        steps=plan.steps, rows=16, learning_rate=2e-3, seed=seed, warmup=plan.steps // 8,
        save_every=50, look_every=plan.steps // 4,
    )  # fmt: skip
    run = {
        "model": dataclasses.asdict(plan.model), "recipe": dataclasses.asdict(recipe),
        "length": plan.length, "text": text.name, "sha256": text.sha256,
    }  # fmt: skip
    if results.is_done(results.rows(out / "results.jsonl"), run):
        return
    held_out = data.fixed_batch(text.held_out, "causal", plan.length, plan.looked_at)
    # nothing is chosen, so that no text is kept for it
    learned = text._replace(training=torch.cat([text.training, text.validation]))

    def batches(step: int) -> data.Batch:
        return data.training_batch(learned, "causal", plan.length, recipe.rows, seed, step)

    def look(model: Model) -> dict[str, float]:
        return {"bits": bits(model, held_out)}

    model = build(plan.model, seed)
    checkpoint = out / "checkpoints" / f"{seed}.pt"
    trained = train(
        model, batches, recipe, checkpoint, look, these,
        f"E6 seed {seed}",
    )  # fmt: skip
    if these.rank == 0:
        offsets = (*plan.offsets, FAR)
        schemes = {name: moved(model, held_out, offsets, SCHEMES[name]) for name in SCHEMES}
        row = {
            "run": run, "offsets": offsets, "schemes": schemes,
            "looks": trained.looks, "seconds": round(trained.seconds, 1),
        }  # fmt: skip
        results.append(out / "results.jsonl", row)
        checkpoint.unlink()


@torch.no_grad()
def moved(
    model: Model, batch: data.Batch, offsets: Sequence[int], scheme: Scheme
) -> dict[str, Any]:
    """What moving does, against the same arithmetic at offset 0; lists with one entry per offset.

    largest, rms  of the change of a logit
    bits          cross-entropy per byte; `bits_at_0` where nothing is moved
    changed       share of places where another byte became the likeliest
    """
    model = copy.deepcopy(model).to(scheme.dtype).eval()
    tokens = batch.tokens.to(model.head.weight.device)
    places = torch.arange(tokens.shape[1], device=tokens.device)

    def tables(offset: int) -> Tables:
        return scheme.tables(model.config.spec, places + offset)

    start = model(tokens, tables(0)).float()
    found: dict[str, Any] = {name: [] for name in ("largest", "rms", "bits", "changed")}
    for offset in offsets:
        there = model(tokens, tables(offset)).float()
        found["largest"].append((there - start).abs().max().item())
        found["rms"].append((there - start).square().mean().sqrt().item())
        found["bits"].append(bits(model, batch, tables(offset)))
        found["changed"].append((there.argmax(-1) != start.argmax(-1)).double().mean().item())
    return {"bits_at_0": bits(model, batch, tables(0)), **found}


def table(rows: Sequence[results.Row]) -> str:
    """What moving by a few offsets does, a table by measure; the differences; what was run."""
    offsets = rows[0]["offsets"]
    shown = [at for at in (2**12, 2**16, 2**20, 2**24, FAR) if at in offsets]
    names = [f"2^{at.bit_length() - 1}" for at in shown]
    parts = []
    for measure, (title, form) in MEASURES.items():
        lines = [
            [name, *(
                results.mean_spread([*seen(rows, name, measure, at).values()], form)
                for at in shown
            )]
            for name in SCHEMES
        ]  # fmt: skip
        parts.append(f"{title}, by offset:\n\n{results.table(['', *names], lines)}")
    moved_lines = [
        [name, *(
            difference(seen(rows, name, "bits", at), seen(rows, name, "bits", 0)).told(".4f")
            for at in shown
        )]
        for name in SCHEMES
    ]  # fmt: skip
    parts.append(
        "Bits per byte, moved minus not moved, by offset:\n\n"
        + results.table(["", *names], moved_lines)
    )
    seconds = sum(row["seconds"] for row in rows) / 60
    seeds = report.listed(row["run"]["recipe"]["seed"] for row in rows)
    parts.append(
        f"{len(rows)} runs, seeds {seeds}, {seconds:.0f} minutes in all on one thread of a busy "
        f"machine. Each run: {report.told(report.common(rows))}, learning rate "
        f"{rows[0]['run']['recipe']['learning_rate']:g}, not chosen, for nothing is compared "
        "across models."
    )
    return "\n\n".join(parts)


def seen(rows: Sequence[results.Row], scheme: str, measure: str, offset: int) -> dict[int, float]:
    """Seed -> a measure of a scheme at an offset; bits at 0 too."""
    found = {}
    for row in rows:
        of, at = row["schemes"][scheme], row["offsets"]
        value = of["bits_at_0"] if offset == 0 else of[measure][at.index(offset)]
        found[row["run"]["recipe"]["seed"]] = value
    return found


def figure(rows: Sequence[results.Row]) -> Figure:
    """Change of logits, and bits per byte, against offset; every seed is a thin line."""
    picture = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = picture.subplots(1, 2)
    far = rows[0]["offsets"].index(FAR)
    at = rows[0]["offsets"][:far]
    for name, (color, dash) in zip(SCHEMES, STYLES, strict=True):
        for index, row in enumerate(rows):
            seen = row["schemes"][name]
            style = {"color": color, "linestyle": dash, "linewidth": 1.0}
            left.plot(at, seen["largest"][:far], label=name if index == 0 else None, **style)
            right.plot(at, seen["bits"][:far], **style)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("position of the first byte, tokens")
    left.set_yscale("log")
    left.set_ylabel("largest change of a logit")
    right.set_ylabel("held-out text, bits per byte")
    picture.suptitle("A trained model, its whole text moved away")
    picture.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return picture


if __name__ == "__main__":
    main()
