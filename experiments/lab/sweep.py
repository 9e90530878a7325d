"""The fair rule of every comparison: the same learning rates, the same seeds, for every method."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .results import Row


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
    """Every rate on the first seed; then every other seed at the rate that is best by then.

    `rows` are the results, to which the caller adds those of a stage before asking for the next.

    >>> [[run.rate for run in stage] for stage in stages(["a"], [1.0, 2.0], [0], [])]
    [[1.0, 2.0], []]
    """
    yield [Run(method, rate, seeds[0]) for method in methods for rate in rates]
    best = {method: best_rate(rows, method) for method in methods if seeds[1:]}
    yield [Run(method, best[method], seed) for seed in seeds[1:] for method in methods]


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


def best_rate(rows: Sequence[Row], method: str) -> float:
    """The learning rate with the fewest bits on held-out data at the end, on the first seed.

    A run that diverged has no bits at the end: it is the worst. Of equal ones the smaller rate.
    """
    swept = [row for row in rows if row["run"]["method"] == method]
    first = min(row["run"]["recipe"]["seed"] for row in swept)
    swept = [row for row in swept if row["run"]["recipe"]["seed"] == first]
    return min((end_bits(row), float(row["run"]["recipe"]["learning_rate"])) for row in swept)[1]


def end_bits(row: Row) -> float:
    """Bits on held-out data at the end of a run; inf if its row has `diverged`, the step of it.

    >>> end_bits({"looks": [], "diverged": 20})
    inf
    """
    return math.inf if "diverged" in row else float(row["looks"][-1]["bits"])


def chosen(rows: Sequence[Row], method: str) -> dict[int, Row]:
    """The row of every seed, in order, at the best rate of a method."""
    rate = best_rate(rows, method)
    found = {}
    for row in rows:
        recipe = row["run"]["recipe"]
        if row["run"]["method"] == method and recipe["learning_rate"] == rate:
            found[recipe["seed"]] = row
    return dict(sorted(found.items()))
