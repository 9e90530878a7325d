"""The rotation in float64, from base and positions alone: it shares nothing with what it judges."""

from collections.abc import Iterable
from typing import Any

import numpy as np

# The largest error of a result, over the largest number of it. float32: the tables, two products
# and a sum are rounded; the others: the result is, once
LIMITS = {"float32": 2.0**-21, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def rotated(
    x: np.ndarray, layout: str, base: float, positions: np.ndarray | None = None
) -> np.ndarray:
    """x of shape (..., seq, head_dim) rotated at positions 0 .. seq - 1, in float64.

    positions   others, whole numbers of a shape that fits that of x without its last axis

    >>> rotated(np.array([[1.0, 0.0], [1.0, 0.0]]), "half", 10_000.0).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """
    seq, pairs = x.shape[-2], x.shape[-1] // 2
    inv_freq = base ** -(np.arange(pairs) / pairs)
    members = (slice(pairs), slice(pairs, None))
    if layout == "interleaved":
        members = (slice(0, None, 2), slice(1, None, 2))
    first, second = (x[..., member].astype(np.float64) for member in members)
    positions = np.arange(seq) if positions is None else positions
    z = (first + 1j * second) * np.exp(1j * positions[..., None] * inv_freq)
    y = np.empty(x.shape)
    y[..., members[0]], y[..., members[1]] = z.real, z.imag
    return y


def error(got: Iterable[Any], wanted: Iterable[np.ndarray]) -> float:
    """The largest error of results of any library, each over the largest number of the right one.

    >>> round(error([np.array([2.0, 1.1])], [np.array([2.0, 1.0])]), 3)
    0.05
    """
    wide = [np.asarray(y.double() if hasattr(y, "double") else y, np.float64) for y in got]
    pairs = zip(wide, wanted, strict=True)
    return float(np.max([np.abs(y - exact).max() / np.abs(exact).max() for y, exact in pairs]))
