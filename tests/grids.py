"""A few rows of a large grid, in which any two values of different axes still meet."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any


def pairwise(*axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Rows with one value of each axis, such that every two values of two axes share a row.

    What one value breaks, or two together, is in some row; `itertools.product` has every row.
    The rows are the same in every run.

    >>> list(pairwise("ab", "xy", (1, 2)))
    [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    values = [tuple(axis) for axis in axes]
    places = [[(axis, at) for at in range(len(each))] for axis, each in enumerate(values)]
    missing = dict.fromkeys(
        pair
        for one, other in itertools.combinations(places, 2)
        for pair in itertools.product(one, other)
    )
    while missing:
        row = dict(next(iter(missing)))

        def gain(place: tuple[int, int], row: dict[int, int] = row) -> int:
            """How many of the missing pairs a value would add to the row."""
            return sum(tuple(sorted((place, other))) in missing for other in row.items())

        for axis, choices in enumerate(places):
            if axis not in row:
                row[axis] = max(choices, key=gain)[1]
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        yield tuple(values[axis][at] for axis, at in sorted(row.items()))
