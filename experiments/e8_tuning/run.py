"""A model trained on short rows, tuned to longer ones with its base changed or kept: what it finds.

    python -m experiments.e8_tuning.run [--quick]
    torchrun --nproc-per-node 2 -m experiments.e8_tuning.run      # on two cores

Killed, it goes on where it was. Learning rates, of training and of tuning, are chosen on validation
text.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from rotary.analysis.bounds import first_failure

from ..e4_base.recall import VOCABULARY, Recall, fixed, make_similar, training
from ..e4_base.run import BINS, seen
from ..lab import data, report, results, staged
from ..lab.intervals import difference
from ..lab.model import Config, Model, build
from ..lab.staged import TRAINED, Job
from ..lab.sweep import Run, chosen
from ..lab.train import Recipe, train

FOLDER = Path(__file__).parent
UNTUNED = "untuned"  # reading without tuning, beside "256 1000": tuned to 256 tokens at base 1000
BASES = (100, 1000, 10_000)
KEPT = 1000  # the base that is trained with
MULTIPLES = (2, 4, 8)  # contexts, by the trained length
COLORS = {100: "#e69f00", 1000: "#009e73", 10_000: "#0072b2"}


class Plan(NamedTuple):
    """The size of every run."""

    model: Config
    steps: int
    tokens: int  # of a step
    length: int
    marks: int
    looked_at: int  # tokens of held-out text, and of validation text
    rates: tuple[float, ...]
    tuning_steps: int
    tuning_rates: tuple[float, ...]


MODEL = Config(layers=1, width=64, heads=1, vocabulary=VOCABULARY, base=float(KEPT))
FULL = Plan(MODEL, 600, 1024, 64, 8, 8192, (3e-3, 1e-2, 3e-2), 100, (1e-3, 3e-3, 1e-2))
QUICK = Plan(
    dataclasses.replace(MODEL, width=32), 4, 256, 32, 5, 512, (1e-2, 3e-2, 1e-1), 4,
    (1e-3, 3e-3, 1e-2),
)  # fmt: skip


def settings_of(plan: Plan, text: data.Text, run: Run, start: float) -> results.Row:
    """Everything that a run follows from; `trained` is the recipe of the model it starts from."""
    trained_by = dataclasses.asdict(recipe_of(plan, Run(TRAINED, start, run.seed)))
    settings = {
        "method": run.method, "model": dataclasses.asdict(plan.model), "length": plan.length,
        "tokens": plan.tokens, "marks": plan.marks, "looked_at": plan.looked_at,
        "split": data.SPLIT, "text": text.name, "sha256": text.sha256, "recipe": trained_by,
    }  # fmt: skip
    if run.method not in (TRAINED, UNTUNED):
        settings |= {"recipe": dataclasses.asdict(recipe_of(plan, run)), "trained": trained_by}
    return settings


def recipe_of(plan: Plan, run: Run) -> Recipe:
    """The recipe of a training, or of the tuning that follows it."""
    length = plan.length if run.method in (TRAINED, UNTUNED) else context_of(run.method)
    steps = plan.steps if run.method in (TRAINED, UNTUNED) else plan.tuning_steps
    return Recipe(
        steps=steps, rows=plan.tokens // length, learning_rate=run.rate, seed=run.seed,
        warmup=steps // 10, look_every=steps // 2,
    )  # fmt: skip


def context_of(method: str) -> int:
    """The tokens of a row that a method tunes to.

    >>> context_of("256 1000")
    256
    """
    return int(method.split()[0])


def methods(plan: Plan) -> list[str]:
    """What is tuned: every context at every base."""
    return [f"{times * plan.length} {base}" for times in MULTIPLES for base in BASES]


def queries(length: int) -> int:
    """How many of the tokens of a row ask."""
    return length // 4


def with_base(model: Model, base: float, seed: int) -> Model:
    """The same weights in a model of another base."""
    made = build(dataclasses.replace(model.config, base=base), seed)
    made.load_state_dict(model.state_dict())
    return made


def trained(job: Job, run: Run) -> results.Row:
    """What was seen of a training."""
    return learned(job, run)[1]


def learned(job: Job, run: Run) -> tuple[Model, results.Row]:
    """The trained model, from its checkpoint as far as that goes, and what was seen on the way."""
    model = build(job.plan.model, run.seed)
    with torch.no_grad():
        make_similar(model.tokens.weight)
    return model, taught(job, model, run, job.plan.length, 0)


def tuned(job: Job, run: Run) -> results.Row:
    """What was seen of a short training at another context and base."""
    model = learned(job, Run(TRAINED, job.start, run.seed))[0]
    model = with_base(model, float(run.method.split()[1]), run.seed)
    return taught(job, model, run, context_of(run.method), job.plan.steps)


def taught(job: Job, model: Model, run: Run, length: int, first: int) -> results.Row:
    """What was seen while a model is trained on rows of a length, from the batch `first` on."""
    plan, recipe = job.plan, recipe_of(job.plan, run)

    def batches(step: int) -> data.Batch:
        sizes = (length, plan.marks, queries(length), recipe.rows)
        return training(job.text, *sizes, run.seed, first + step).batch

    title = f"E8 {run.method} {run.rate:g} seed {run.seed}"
    done = train(
        model, batches, recipe, job.checkpoint(run),
        lambda model: looked_at(model, job, length), job.these, title,
    )  # fmt: skip
    return {"looks": done.looks, "seconds": round(done.seconds, 1)}


def looked_at(model: Model, job: Job, length: int) -> dict[str, float]:
    """What is found in held-out rows of a length, and the bits of validation rows."""
    held_out, validation = (
        asked(job, part, length) for part in (job.text.held_out, job.text.validation)
    )
    return {**seen(model, held_out), "validation": seen(model, validation)["bits"]}


def asked(job: Job, content: torch.Tensor, length: int) -> Recall:
    """The rows that are looked at."""
    plan = job.plan
    return fixed(content, length, plan.marks, queries(length), plan.looked_at // length)


def lengthen(job: Job, seeds: Sequence[int]) -> None:
    """Read longer rows without and after tuning, where that is not done yet."""
    for seed in seeds:
        run = Run(UNTUNED, job.start, seed)
        if not job.is_done(run):
            model = learned(job, run._replace(method=TRAINED))[0].eval()
            job.write(run, {"found": untuned(job, model, seed)})
    job.sweep(methods(job.plan), job.plan.tuning_rates, seeds, tuned)


@torch.no_grad()
def untuned(job: Job, model: Model, seed: int) -> dict[str, dict[str, float]]:
    """What the trained model finds by context and base, before any tuning."""
    return {
        method: seen(
            with_base(model, float(method.split()[1]), seed).eval(),
            asked(job, job.text.held_out, context_of(method)),
        )
        for method in [f"{job.plan.length} {KEPT}", *methods(job.plan)]
    }


def before(rows: Sequence[results.Row], method: str, name: str) -> dict[int, float]:
    """Seed -> a number of `seen` before any tuning; empty where nothing was asked."""
    own = {row["run"]["recipe"]["seed"]: row for row in rows if row["run"]["method"] == UNTUNED}
    found = {seed: row["found"][method] for seed, row in own.items()}
    return {seed: of[name] for seed, of in sorted(found.items()) if name in of}


def after(rows: Sequence[results.Row], method: str, name: str) -> dict[int, float]:
    """Seed -> a number of `seen` at the end of the tuning; empty where nothing was asked."""
    ends = {seed: row["looks"][-1] for seed, row in chosen(rows, method).items()}
    return {seed: end[name] for seed, end in ends.items() if name in end}


def tuned_methods(rows: Sequence[results.Row]) -> list[str]:
    """The methods of the tuned runs, in the order of contexts and bases."""
    length = rows[0]["run"]["length"]
    return [f"{times * length} {base}" for times in MULTIPLES for base in BASES]


def table(rows: Sequence[results.Row]) -> str:
    """Recall before and after tuning, by distance; the differences seed by seed; what was run."""
    length, names = rows[0]["run"]["length"], tuned_methods(rows)
    spans = [f"recall {low}" for low in BINS if after(rows, names[-1], f"recall {low}")]
    columns = [f"{low} to {high - 1}" for low, high in itertools.pairwise(BINS)][: len(spans)]
    start = f"{length} {KEPT}"
    lines = [[
        length, KEPT, "before", reach(KEPT, rows), spread(before(rows, start, "text"), ".3f"),
        *(spread(before(rows, start, name)) for name in ("recall", "before", "beyond")),
    ]]  # fmt: skip
    by_distance, apart = [], []
    for name in names:
        context, base = name.split()
        for when, of in (("before", before), ("after", after)):
            lines.append([
                context, base, when, reach(int(base), rows), spread(of(rows, name, "text"), ".3f"),
                *(spread(of(rows, name, part)) for part in ("recall", "before", "beyond")),
            ])  # fmt: skip
        by_distance.append([context, base, *(spread(after(rows, name, span)) for span in spans)])
        if int(base) != KEPT:
            apart.append([context, f"{base} minus {KEPT}", *(
                compared(rows, name, f"{context} {KEPT}", part)
                for part in ("text", "recall", *spans)
            )])  # fmt: skip
    heads = ["context", "base", "tuning", "first m with B_m < 0", "text, bits per byte",
             "recall", "recall before it", "recall from it on"]  # fmt: skip
    return "\n\n".join([
        results.table(heads, lines),
        "Share of values that are right after tuning, by distance in tokens:",
        results.table(["context", "base", *columns], by_distance),
        "Differences after tuning; recall of all, then by distance:",
        results.table(["context", "bases", "text, bits per byte", "recall", *columns], apart),
        f"Training. {report.recipe(rows, [TRAINED])}",
        f"Tuning. {report.recipe(rows, names)}",
    ])  # fmt: skip


def reach(base: int, rows: Sequence[results.Row]) -> int | None:
    """The first distance with B_m < 0."""
    config = Config(**rows[0]["run"]["model"])
    return first_failure(dataclasses.replace(config, base=float(base)).spec)


def spread(found: dict[int, float], form: str = ".2f") -> str:
    """Mean and spread of the seeds."""
    return results.mean_spread([*found.values()], form) if found else "none asked"


def compared(rows: Sequence[results.Row], name: str, other: str, part: str) -> str:
    """The difference of two tunings; "-" where nothing was asked."""
    own, its = after(rows, name, part), after(rows, other, part)
    return difference(own, its).told(".3f" if part == "text" else ".2f") if own else "-"


def figure(rows: Sequence[results.Row]) -> Figure:
    """Recall against distance, a panel for each context: dashes before tuning, lines after."""
    length = rows[0]["run"]["length"]
    picture = Figure(figsize=(11, 4.4), layout="constrained")
    panels = picture.subplots(1, len(MULTIPLES), sharey=True)
    for axes, times in zip(panels, MULTIPLES, strict=True):
        for base in BASES:
            method, color = f"{times * length} {base}", COLORS[base]
            for of, dash in ((before, "--"), (after, "-")):
                spans = [pair for pair in itertools.pairwise(BINS)
                         if of(rows, method, f"recall {pair[0]}")]  # fmt: skip
                middles = [math.sqrt(low * high) for low, high in spans]
                shares = [[*of(rows, method, f"recall {low}").values()] for low, _ in spans]
                for index, curve in enumerate(zip(*shares, strict=True)):
                    label = f"base {base:,}" if dash == "-" and index == 0 else None
                    axes.plot(
                        middles, curve, color=color, linestyle=dash, linewidth=0.9, label=label
                    )
            first = reach(base, rows)
            if first is not None and first < times * length:
                axes.axvline(first, ymax=0.05, color=color, linewidth=2)
        axes.axvline(length, color="#999999", linewidth=0.7, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("distance to the mark, tokens")
        axes.set_title(f"tuned to {times * length} tokens, a line is a seed", fontsize=10)
    panels[0].set_ylabel("share of values that are right")
    panels[0].plot([], [], "k--", linewidth=0.9, label="before tuning")
    panels[0].plot([], [], "k|", markeredgewidth=2, label="first distance with B_m < 0")
    panels[0].plot([], [], color="#999999", linestyle=":", label="trained length")
    picture.suptitle(f"Trained on {length} tokens at base {KEPT:,}, then tuned to longer rows")
    picture.legend(*panels[0].get_legend_handles_labels(), frameon=False, ncols=6,
                   loc="outside lower center")  # fmt: skip
    return picture


EXPERIMENT = staged.Experiment(
    __doc__, FOLDER, FULL, QUICK, settings_of, trained, lengthen, table, figure, "tuning.png"
)


def main() -> None:
    """Train, tune to longer rows, write the results."""
    staged.carry_out(EXPERIMENT)


if __name__ == "__main__":
    main()
