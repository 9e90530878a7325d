"""What was run, as the rows tell it: models, recipe, seeds, and how learning rates were chosen."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .results import Row, table
from .sweep import best_rate, choosing, has_validation, validation

# told elsewhere: of all runs together, or beside the results
HIDDEN = ("method", "seed", "learning_rate", "sha256", "vocabulary", "save_every", "look_every")


def recipe(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """What was run, and a table of the choice of the learning rate of each method."""
    own = [row for row in rows if row["run"]["method"] in methods]
    seeds = sorted({row["run"]["recipe"]["seed"] for row in own})
    first = choosing(own, methods[0])
    by = f"the mean of seeds {listed(first)}" if len(first) > 1 else f"seed {listed(first)} alone"
    judged = (
        "on the validation part, which is neither learned from nor reported"
        if has_validation(own)
        else "on the very data that are reported, which favours every method a little"
    )
    minutes = sum(row.get("seconds", 0.0) for row in own) / 60
    time = f", {minutes:.0f} minutes in all on one thread of a busy machine" if minutes else ""
    parts = [f"{len(own)} runs{time}. Each run: {told(common(own))}. Seeds: {listed(seeds)}."]
    rates = {rate for name in methods for rate in validation(own, name)}
    if len(rates) == 1:
        parts.append(f"The learning rate is {rates.pop():g}; no other was tried.")
        return "\n\n".join(parts)
    parts.append(f"Learning rates are chosen by the bits at the end, {by}, {judged}:")
    parts.append(choice(own, methods))
    if at_edge := [name for name in methods if is_at_edge(own, name)]:
        parts.append(f"The best rate is the least or the greatest tried for: {', '.join(at_edge)}.")
    return "\n\n".join(parts)


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
        if all(one.get(name) == value for one in flat)
    }


def flattened(run: Row) -> dict[str, Any]:
    """The settings of a run, without those of HIDDEN, in one level."""
    found = {**run.get("model", {}), **run["recipe"]}
    found |= {name: value for name, value in run.items() if not isinstance(value, dict)}
    return {name: value for name, value in found.items() if name not in HIDDEN}


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
