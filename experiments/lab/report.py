"""What was run, as the rows tell it: models, recipe, seeds, and how learning rates were chosen."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .results import Row, table
from .sweep import best_rate, choosing, has_validation, validation

HIDDEN = ("seed", "learning_rate")  # of a recipe: told of all runs together
ONLY_DATA = "sha256"


def recipe(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """What was run, and a table of the choice of the learning rate of each method."""
    own = [row for row in rows if row["run"]["method"] in methods]
    is_validated = has_validation(own)
    seeds = sorted({row["run"]["recipe"]["seed"] for row in own})
    first = choosing(own, methods[0])
    judged = (
        "the validation part, which is neither learned from nor reported"
        if is_validated
        else "the very data that are reported, which favours every method a little"
    )
    at_edge = [name for name in methods if is_at_edge(own, name)]
    minutes = sum(row.get("seconds", 0.0) for row in own) / 60
    lines = [
        f"{len(own)} runs, {minutes:.0f} minutes in all on one thread of a busy machine.",
        f"Each run: {told(common(own))}.",
        f"Seeds: {listed(seeds)}. Learning rates are chosen by the mean of the bits at the end over "
        f"seeds {listed(first)} on {judged}:"
        if len(first) > 1
        else f"Seeds: {listed(seeds)}. Learning rates are chosen by the bits at the end of seed "
        f"{listed(first)} alone, on {judged}:",
    ]
    edge = (
        f"\n\nThe best rate is the smallest or the largest that was tried for: {', '.join(at_edge)}."
        if at_edge
        else ""
    )
    return "\n\n".join(lines) + f"\n\n{choice(own, methods)}{edge}"


def choice(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """A table of the bits that the learning rate of each method is chosen by."""
    found = {name: validation(rows, name) for name in methods}
    rates = sorted(set().union(*found.values()))
    lines = [
        [name, *(cell(found[name].get(rate)) for rate in rates), f"{best_rate(rows, name):g}"]
        for name in methods
    ]
    return table(["bits by learning rate", *(f"{rate:g}" for rate in rates), "chosen"], lines)


def cell(bits: float | None) -> str:
    """Bits in a table of rates; empty where a rate was not tried."""
    if bits is None:
        return ""
    return f"{bits:.3f}" if math.isfinite(bits) else "diverged"


def is_at_edge(rows: Sequence[Row], method: str) -> bool:
    """Whether the best rate of a method is the smallest or the largest that was tried."""
    tried = list(validation(rows, method))
    return best_rate(rows, method) in (tried[0], tried[-1])


def common(rows: Sequence[Row]) -> dict[str, Any]:
    """The settings that all runs share, those of the model and of the recipe beside the others."""
    flat = [flattened(row["run"]) for row in rows]
    return {
        name: value
        for name, value in flat[0].items()
        if name not in HIDDEN and all(one.get(name) == value for one in flat)
    }


def flattened(run: Row) -> dict[str, Any]:
    """The settings of a run without its method, in one level."""
    found = {name: value for name, value in run.items() if not isinstance(value, dict)}
    for name in ("model", "recipe"):
        found |= run.get(name, {})
    return {name: value for name, value in found.items() if name not in ("method", ONLY_DATA)}


def told(settings: dict[str, Any]) -> str:
    """Settings as `name value`, numbers without needless digits.

    >>> told({"steps": 400, "base": 10000.0, "split": "a, b"})
    'steps 400, base 10000, split (a, b)'
    """
    shown = {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in settings.items()
    }
    return ", ".join(
        f"{name} {f'({value})' if ', ' in value else value}" for name, value in shown.items()
    )


def listed(numbers: Iterable[int]) -> str:
    """Numbers as they are read: 0, 1 and 2.

    >>> listed([0, 1, 2]), listed([0])
    ('0, 1 and 2', '0')
    """
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
