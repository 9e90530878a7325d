"""One trained model at up to eight times its length, by the way its positions are stretched.

    python -m experiments.e3_length.run [--quick]
    torchrun --nproc-per-node 2 -m experiments.e3_length.run      # on two cores

Killed, it goes on where it was. The learning rate is the best of a sweep on the first seed.
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from ..lab import command, data, results
from ..lab.model import Config, Model, bits, build
from ..lab.sweep import Run, chosen, runs
from ..lab.train import Looks, Processes, Recipe, processes, train
from .methods import METHODS, read_by

FOLDER = Path(__file__).parent
MULTIPLES = (1, 2, 4, 8)
TRAINED, UNTUNED = "trained", "untuned"  # methods of runs, beside "tuned PI" and the like
TUNED = ("direct", "PI", "YaRN")
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
    looked_at: int  # rows of held-out text
    rates: tuple[float, ...]
    tuning_steps: tuple[int, int]  # few and many
    tuning_rows: int
    tuning_rate: float


FULL = Plan(Config(length=128), 600, 16, 128, 16, (1e-3, 3e-3), (50, 200), 2, 1e-3)
QUICK = Plan(Config(length=64, layers=2, width=32), 20, 8, 64, 2, (1e-3, 3e-3), (2, 4), 2, 1e-3)


@dataclasses.dataclass
class Job:
    """What all runs share, and the rows of those that are finished."""

    plan: Plan
    text: data.Text
    out: Path
    these: Processes
    rows: list[results.Row]

    def is_done(self, run: Run) -> bool:
        """Whether a run is among the rows."""
        return results.is_done(self.rows, settings_of(self.plan, self.text, run))

    def write(self, run: Run, found: results.Row) -> None:
        """Add a finished run to the rows; the first process writes it down."""
        row = {"run": settings_of(self.plan, self.text, run), **found}
        self.rows.append(row)
        if self.these.rank == 0:
            results.append(self.out / "results.jsonl", row)

    def checkpoint(self, run: Run) -> Path:
        """Where a run keeps its state until all runs are done."""
        return self.out / "checkpoints" / f"{run.method} {run.rate:g} {run.seed}.pt"


def main() -> None:
    """Train what is not trained yet, read longer rows in every way, write the results."""
    with command.options(__doc__, FOLDER) as options:
        plan = QUICK if options.quick else FULL
        text = data.text(options.text)
        with processes(options.device) as these:
            job = Job(plan, text, options.out, these, results.rows(options.out / "results.jsonl"))
            for run in runs((TRAINED,), plan.rates, options.seeds, job.rows):
                if not job.is_done(run):
                    job.write(run, trained(job, run)[1])
            for seed, row in chosen(job.rows, TRAINED).items():
                lengthen(job, Run(TRAINED, row["run"]["recipe"]["learning_rate"], seed))
        if these.rank == 0:
            for checkpoint in (options.out / "checkpoints").glob("*.pt"):
                checkpoint.unlink()
            results.report(options.out, table, figure, "length.png")


def settings_of(plan: Plan, text: data.Text, run: Run) -> results.Row:
    """Everything that a run follows from; `recipe` is that of the model it starts from."""
    settings = {
        "method": run.method, "model": dataclasses.asdict(plan.model), "length": plan.length,
        "looked_at": plan.looked_at, "asked": ASKED, "text": text.name, "sha256": text.sha256,
        "recipe": dataclasses.asdict(recipe_of(plan, run._replace(method=TRAINED))),
    }  # fmt: skip
    if run.method.startswith("tuned"):
        settings["tuning"] = dataclasses.asdict(recipe_of(plan, run))
    return settings


def recipe_of(plan: Plan, run: Run) -> Recipe:
    """The recipe of a training, or of the tuning that follows it, at a constant rate."""
    if run.method == TRAINED:
        return Recipe(
            steps=plan.steps, rows=plan.rows, learning_rate=run.rate, seed=run.seed,
            warmup=plan.steps // 10, save_every=100, look_every=plan.steps // 5,
        )  # fmt: skip
    few, many = plan.tuning_steps
    return Recipe(
        steps=many, rows=plan.tuning_rows, learning_rate=plan.tuning_rate, seed=run.seed,
        warmup=few // 5, final=1.0, save_every=50, look_every=few,
    )  # fmt: skip


def trained(job: Job, run: Run) -> tuple[Model, results.Row]:
    """The trained model, from its checkpoint as far as that goes, and what was seen on the way."""
    plan = job.plan

    def batches(step: int) -> data.Batch:
        return data.training_batch(job.text, "causal", plan.length, plan.rows, run.seed, step)

    def look(model: Model) -> dict[str, float]:
        return {"bits": at_end(model, job, 1)}

    model = build(plan.model, run.seed)
    title = f"E3 {run.method} {run.rate:g} seed {run.seed}"
    recipe = recipe_of(plan, run)
    done = train(model, batches, recipe, job.checkpoint(run), look, job.these, title)
    return model, {"looks": done.looks, "seconds": round(done.seconds, 1)}


def lengthen(job: Job, run: Run) -> None:
    """Read longer rows in every way without and after tuning, where that is not done yet."""
    wanted = [run._replace(method=name) for name in (UNTUNED, *(f"tuned {of}" for of in TUNED))]
    wanted = [one for one in wanted if not job.is_done(one)]
    if not wanted:
        return
    model = trained(job, run)[0].eval()
    for one in wanted:
        if one.method == UNTUNED:
            job.write(one, {"bits": untuned(job, model)})
        else:
            job.write(one, {"looks": tuned(job, copy.deepcopy(model), one)})


@torch.no_grad()
def untuned(job: Job, model: Model) -> dict[str, list[float]]:
    """Bits per byte by method, a list with one entry per multiple of the trained length."""
    length = job.plan.length
    return {
        name: [
            at_end(read_by(model, name, length, multiple * length), job, multiple)
            for multiple in MULTIPLES
        ]
        for name in METHODS
    }


def tuned(job: Job, model: Model, run: Run) -> Looks:
    """Bits per byte at the tuned length, at every look of a short training there."""
    plan, target = job.plan, TUNED_TO * job.plan.length
    read_by(model, run.method.partition(" ")[2], plan.length, target)

    def batches(step: int) -> data.Batch:
        after = plan.steps + step  # random places that the training has not drawn
        return data.training_batch(job.text, "causal", target, plan.tuning_rows, run.seed, after)

    def look(model: Model) -> dict[str, float]:
        return {"bits": at_end(model, job, TUNED_TO)}

    title = f"E3 {run.method} seed {run.seed}"
    recipe = recipe_of(plan, run)
    return train(model, batches, recipe, job.checkpoint(run), look, job.these, title).looks


def at_end(model: Model, job: Job, multiple: int) -> float:
    """Bits per byte at the end of held-out rows of a multiple of the trained length."""
    length = job.plan.length
    longest = data.spread_windows(job.text.held_out, MULTIPLES[-1] * length + 1, job.plan.looked_at)
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


def of_seeds(rows: Sequence[results.Row], method: str) -> list[results.Row]:
    """The row of every seed, in order, whose runs have a method."""
    found = {row["run"]["recipe"]["seed"]: row for row in rows if row["run"]["method"] == method}
    return [found[seed] for seed in sorted(found)]


def table(rows: Sequence[results.Row]) -> str:
    """Bits without tuning by length, and at one length by steps of tuning: mean and spread."""
    length = rows[0]["run"]["length"]
    lengths = [f"{multiple * length} bytes" for multiple in MULTIPLES]
    before = {
        name: np.array([row["bits"][name] for row in of_seeds(rows, UNTUNED)]) for name in METHODS
    }
    after, at = {}, MULTIPLES.index(TUNED_TO)
    for name in TUNED:
        looks = [row["looks"] for row in of_seeds(rows, f"tuned {name}")]
        ends = [[seen[0]["bits"], seen[-1]["bits"]] for seen in looks]
        after[name] = np.column_stack([before[name][:, at], ends])
    steps = ["no tuning", *(f"{looks[0][which]['step']} steps" for which in (0, -1))]
    return "\n\n".join([
        "Bits per byte without tuning, by length of the row:", compared(before, lengths),
        f"Bits per byte of rows of {lengths[at]}, by steps of tuning there:",
        compared(after, steps),
    ])  # fmt: skip


def compared(bits_of: dict[str, np.ndarray], heads: Sequence[str]) -> str:
    """A line for each method of (seeds, columns) bits; then what is left less that of direct."""
    lines = []
    for name, seen in bits_of.items():
        apart = seen - bits_of["direct"]
        lines.append([
            name, *(results.mean_spread(column) for column in seen.T.tolist()),
            *(results.mean_spread(column, "+.3f") for column in apart.T[1:].tolist()),
        ])  # fmt: skip
    return results.table(["", *heads, *(f"{head}, minus direct" for head in heads[1:])], lines)


def figure(rows: Sequence[results.Row]) -> Figure:
    """Bits against length without tuning, for the methods of COLORS: mean and range of seeds."""
    picture = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = picture.subplots()
    lengths = [multiple * rows[0]["run"]["length"] for multiple in MULTIPLES]
    for name, color in COLORS.items():
        width = 5.0 if name.startswith("ReRoPE") else 1.2  # that of self-extend lies on it
        seen = np.array([row["bits"][name] for row in of_seeds(rows, UNTUNED)])
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


if __name__ == "__main__":
    main()
