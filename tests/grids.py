"""A few rows of a large grid, in which any two values of different axes still meet."""

import itertools
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any


def pairwise(*axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Rows with one value of each axis, such that every two values of two axes share a row.

    What one value breaks, or two together, is in some row; `itertools.product` has every row.
    The rows are the same in every run; where any value would do, they hold all of them.

    >>> list(pairwise("ab", "xy", (1, 2)))
    [('a', 'x', 2), ('a', 'y', 1), ('b', 'x', 1), ('b', 'y', 2)]
    """
    values = [tuple(axis) for axis in axes]
    places = [[(axis, at) for at in range(len(each))] for axis, each in enumerate(values)]
    missing = dict.fromkeys(
        pair
        for one, other in itertools.combinations(places, 2)
        for pair in itertools.product(one, other)
    )
    random = Random(1)
    while missing:
        row = dict(next(iter(missing)))

        def gain(place: tuple[int, int], row: dict[int, int] = row) -> tuple[int, float]:
            """How many of the missing pairs a value would add to the row; of equal ones any."""
            added = sum(tuple(sorted((place, other))) in missing for other in row.items())
            return added, random.random()

        for axis, choices in enumerate(places):
            if axis not in row:
                row[axis] = max(choices, key=gain)[1]
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        yield tuple(values[axis][at] for axis, at in sorted(row.items()))
