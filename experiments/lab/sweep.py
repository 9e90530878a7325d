"""The fair rule of every comparison: the same seeds for every method, each at its best rate.

The rate is chosen on the validation part of the data, by the mean over CHOOSING seeds, out of three
or more rates of which the best is neither the smallest nor the largest that was tried.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .results import Row

CHOOSING = 2  # seeds
LADDER = tuple(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 3))


class Run(NamedTuple):
    """One training of a method."""

    method: str
    rate: float
    seed: int


def stages(
    methods: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    rows: Sequence[Row],
) -> Iterator[list[Run]]:
    """Every rate on the first seeds; rates beyond while one at the edge is best; all other seeds.

    rates  where to begin, from LADDER
    rows   the results, to which the caller adds those of a stage before asking for the next

    >>> next(stages(["a"], [1e-3, 3e-3], [0], []))
    [Run(method='a', rate=0.001, seed=0), Run(method='a', rate=0.003, seed=0)]
    """
    first = seeds[:CHOOSING]
    tried = {method: sorted({*rates, *validation(rows, method)}) for method in methods}
    yield [Run(name, rate, seed) for seed in first for name in methods for rate in tried[name]]
    while further := {name: rate for name in methods if (rate := beyond(rows, name)) is not None}:
        yield [Run(name, rate, seed) for seed in first for name, rate in further.items()]
    best = {method: best_rate(rows, method) for method in methods if seeds[CHOOSING:]}
    yield [Run(method, best[method], seed) for seed in seeds[CHOOSING:] for method in methods]


def runs(
    methods: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    rows: Sequence[Row],
) -> Iterator[Run]:
    """The runs of all stages, one after the other.

    `rows` are the results, to which the caller adds those of each run before asking for the next.
    """
    for stage in stages(methods, rates, seeds, rows):
        yield from stage


def validation(rows: Sequence[Row], method: str) -> dict[float, float]:
    """Learning rate, ascending -> validation bits at the end, the mean over the choosing seeds.

    A run that diverged has no bits at the end: inf. Rows without validation bits are judged by
    those that are reported.
    """
    own = [row for row in rows if row["run"]["method"] == method]
    name, seeds = "validation" if has_validation(own) else "bits", choosing(own, method)
    found: dict[float, dict[int, float]] = {}
    for row in own:
        recipe = row["run"]["recipe"]
        found.setdefault(float(recipe["learning_rate"]), {})[recipe["seed"]] = end_bits(row, name)
    return {rate: mean([found[rate][seed] for seed in seeds]) for rate in sorted(found)}


def choosing(rows: Sequence[Row], method: str) -> list[int]:
    """The seeds that a method has at every rate that was tried, in order."""
    found: dict[float, set[int]] = {}
    for row in rows:
        recipe = row["run"]["recipe"]
        if row["run"]["method"] == method:
            found.setdefault(recipe["learning_rate"], set()).add(recipe["seed"])
    return sorted(set.intersection(*found.values())) if found else []


def has_validation(rows: Sequence[Row]) -> bool:
    """Whether every run was also judged on data that are kept to choose by."""
    return all("diverged" in row or "validation" in row["looks"][-1] for row in rows)


def mean(values: Sequence[float]) -> float:
    """The mean; inf of nothing, so that it is never the least."""
    return float(np.mean(values)) if len(values) else math.inf


def best_rate(rows: Sequence[Row], method: str) -> float:
    """The learning rate with the fewest validation bits at the end; of equal ones the smallest."""
    found = validation(rows, method)
    return min(found, key=lambda rate: (found[rate], rate))


def beyond(rows: Sequence[Row], method: str) -> float | None:
    """The rate to try next: on LADDER, beyond the best where that is the smallest or the largest.

    None where the best is between two others, and at the end of the ladder.
    """
    tried, best = list(validation(rows, method)), best_rate(rows, method)
    at = LADDER.index(best)
    if best == tried[-1] and best < LADDER[-1]:
        return LADDER[at + 1]
    if best == tried[0] and best > LADDER[0]:
        return LADDER[at - 1]
    return None


def end_bits(row: Row, name: str = "bits") -> float:
    """Bits on held-out or validation data at the end of a run; inf if its row has `diverged`.

    >>> end_bits({"looks": [], "diverged": 20})
    inf
    """
    return math.inf if "diverged" in row else float(row["looks"][-1][name])


def chosen(rows: Sequence[Row], method: str) -> dict[int, Row]:
    """The row of every seed, in order, at the best rate of a method."""
    rate = best_rate(rows, method)
    found = {}
    for row in rows:
        recipe = row["run"]["recipe"]
        if row["run"]["method"] == method and recipe["learning_rate"] == rate:
            found[recipe["seed"]] = row
    return dict(sorted(found.items()))
