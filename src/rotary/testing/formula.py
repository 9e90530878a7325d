"""The rotation by its formula, in float64 NumPy: the reference of `rotary.testing`.

    first  of a pair:  x cos - y sin
    second of a pair:  y cos + x sin

It shares only the frequencies with the rest of the library: neither tables nor kernels.
"""

import math

import numpy as np

from ..angles import inv_freq, turns
from ..kernels import Numbers as Array
from ..layouts import pair_indices
from ..spec import Rotary


def row_length(spec: Rotary, positions: Array, seq_len: int | None = None) -> int | None:
    """Return the length for which one row is scaled: `seq_len`, or its largest position plus one.

    >>> spec = Rotary(head_dim=4, schedule="dynamic",
    ...               params={"factor": 2.0, "original_max_position_embeddings": 8})
    >>> row_length(spec, np.arange(10)), row_length(Rotary(head_dim=4), np.arange(10))
    (10, None)
    """
    if not spec.depends_on_length:
        return None
    return int(positions.max(initial=-1)) + 1 if seq_len is None else seq_len


def tables(spec: Rotary, positions: Array, seq_len: int | None = None) -> tuple[Array, Array]:
    """Return cos and sin of one row, times the attention factor; sin times the sign of the spec.

    positions  (seq,) or (seq, axes), int64
    Returns (cos, sin), each (seq, rotary_dim / 2) float64, right to 1e-15.

    >>> tables(Rotary(head_dim=2), np.array([1]))[0].round(7).tolist()
    [[0.5403023]]
    """
    length = row_length(spec, positions, seq_len)
    per_pair = positions[:, list(spec.axes)] if spec.axes else positions[:, None]
    phases = per_pair.astype(np.uint64) * turns(spec, length)  # of a turn, in units of 2^-64
    radians = phases.astype(np.int64) * (math.tau / 2**64)
    factor = inv_freq(spec, length)[1]
    return np.cos(radians) * factor, np.sin(radians) * factor * spec.sign


def rotated(spec: Rotary, x: Array, cos: Array, sin: Array) -> Array:
    """Return x (..., seq, head_dim) rotated by tables (seq, rotary_dim / 2), float64.

    >>> rotated(Rotary(head_dim=2), np.array([[3.0, 4.0]]), np.zeros((1, 1)), np.ones((1, 1)))
    array([[-4.,  3.]])
    """
    read = pair_indices(spec.rotary_dim, spec.layout, spec.start)
    written = pair_indices(spec.rotary_dim, spec.out_layout, spec.start)
    first, second = x[..., read[:, 0]], x[..., read[:, 1]]
    y = x.astype(np.float64)
    y[..., written[:, 0]] = first * cos - second * sin
    y[..., written[:, 1]] = second * cos + first * sin
    return y
