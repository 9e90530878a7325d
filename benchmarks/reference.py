"""The rotation in float64, from base and positions alone: it shares nothing with what it judges."""

import numpy as np


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
