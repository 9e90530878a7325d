"""Tiles of rows: where each begins on the three axes, and memory for its rows of the tables.

`steps` is a record with `size_0`, `size_1`, `size_2` and `tile`: the last axis is cut into tiles,
and those that begin at one place of it, for every index of the first two axes, come one after the
other.
"""

# compiled by Numba, from types that mypy does not know

import numpy as np
from numpy import empty

from .compiled import inlined
from .vectors import CACHE_LINE


@inlined
def tiles_of(steps):
    """Return the number of tiles."""
    return steps.size_0 * steps.size_1 * ((steps.size_2 + steps.tile - 1) // steps.tile)


@inlined
def place_of(steps, at):
    """Return the indices on the three axes where tile `at` begins."""
    others = max(1, steps.size_0 * steps.size_1)  # indices of the first two axes
    other, width = at % others, max(1, steps.size_1)
    return other // width, other % width, at // others * steps.tile


@inlined
def tile_at(steps, at):
    """Return the indices on the three axes where tile `at` begins, and its number of rows."""
    i, j, k = place_of(steps, at)
    return i, j, k, min(steps.tile, steps.size_2 - k)


@inlined
def ahead_of(steps, i, j, strides):
    """Return the bytes from a row of a tile to the one at its place in the next tile."""
    if i + 1 == steps.size_0 and j + 1 == steps.size_1:
        return steps.tile * strides[2] - i * strides[0] - j * strides[1]
    return strides[1] if j + 1 < steps.size_1 else strides[0] - j * strides[1]


@inlined
def table_memory(steps, pairs):
    """Return memory for the rows of the tables that the rows of one tile use."""
    count = min(steps.tile, steps.size_2) * steps.line + 32 * pairs + CACHE_LINE
    return empty(count // 8, np.float64)


@inlined
def aligned(array):
    """Return the first address in an array at which a cache line begins."""
    return (array.ctypes.data + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
