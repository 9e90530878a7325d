"""At which distances a RoPE can tell a similar token from a random one: B_m of Men et al.

B_m = sum_i cos(m theta_i) is proportional to how much higher a key that is similar to the query
scores than a random key, at distance m (arXiv 2405.14591, Theorem 1). Where it is negative the
similar key scores lower. Channels without rotation count as pairs of frequency 0, in `still`.
Distances are computed in rows of `_ROW`. Over a row, cos((m0 + j) theta) is the product of a fixed
table and e^{i m0 theta}, so one matrix product gives all rows, right to 1e-11 at distance 2**24.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..spec import Rotary
from .spectrum import (
    MAX_LENGTH,
    Array,
    Axes,
    frequencies,
    still_pairs,
    whole_number,
    whole_numbers,
)

Complex = npt.NDArray[np.complex128]
_ROW = 512  # distances that share one start
_BLOCK = 2**16  # distances computed at a time
_ROUNDING = 1e-13  # upper bound of the float64 error of B_m, per pair


class Certificate(NamedTuple):
    """Whether B_m / B_0 keeps a floor; see `certify`."""

    length: int
    holds: bool
    first_failure: int | None
    undecided: int
    lowest: float
    lowest_at: int
    tolerance: float


def similarity(
    spec: Rotary, distances: npt.ArrayLike, *, weights: npt.ArrayLike | None = None,
    still: float | None = None, seq_len: int | None = None, axes: Axes = None,
) -> Array:  # fmt: skip
    """(len,) float64: B_m = Re sum_i w_i e^{i m theta_i} + still, of every distance m.

    distances  (len,) whole numbers in -2**24 .. 2**24
    weights    (pairs,) w_i, real or complex; default 1. For measured q and k: the mean of
               q_i conj(k_i) over similar tokens minus its mean over random tokens
    still      what the channels that are not rotated add; default: half their number
    seq_len    length of the sequence, for the schedules that depend on it
    axes       which axes of the position change with the distance; None: all, as in text
    Raises ValueError for other distances, and weights that are not finite or not one per pair.
    Source: Men et al., arXiv 2405.14591, Eq. 9 and 10, where w_i = 1 and still = 0.

    >>> similarity(Rotary(head_dim=128), [0, 1, 1707]).round(3)
    array([64.   , 62.094, -0.499])
    """
    whole = whole_numbers("distances", distances, -MAX_LENGTH)
    theta, weight, constant = _terms(spec, weights, still, seq_len, axes)
    sums = np.empty(len(whole))
    within = _phases(theta, np.arange(_ROW)) * weight
    size = max(2**19 // len(theta), _ROW)
    for first in range(0, len(whole), size):
        part = whole[first : first + size]
        starts, row = np.unique(part // _ROW, return_inverse=True)
        rows, inside = _phases(theta, starts * _ROW), part % _ROW
        if len(starts) * _ROW <= 2 * len(part):  # close together: whole rows at once
            sums[first : first + size] = _product(within, rows)[row, inside]
        else:
            terms = np.einsum("np,np->n", rows[row], within[inside])
            sums[first : first + size] = terms.real
    return sums + constant


def first_failure(
    spec: Rotary, limit: int = 2**20, *, weights: npt.ArrayLike | None = None,
    still: float | None = None, seq_len: int | None = None, axes: Axes = None,
) -> int | None:  # fmt: skip
    """Return the first distance m in 1 .. limit with B_m < 0; None if there is none.

    The options are those of `similarity`; limit <= 2**24. Raises ValueError for another limit.
    It is a diagnostic, not a limit of a model: Llama 2 works at 4096 tokens.
    Source: Men et al., arXiv 2405.14591, Eq. 11.

    >>> first_failure(Rotary(head_dim=128))
    1707
    >>> first_failure(Rotary(head_dim=128, rotary_dim=32)) is None
    True
    """
    terms = _terms(spec, weights, still, seq_len, axes)
    blocks = _blocks(*terms, whole_number("limit", limit))
    failing = (first + np.flatnonzero(values < 0) for first, values in blocks)
    return next((int(each[0]) for each in failing if len(each)), None)


def failures(
    spec: Rotary, length: int, *, weights: npt.ArrayLike | None = None,
    still: float | None = None, seq_len: int | None = None, axes: Axes = None,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """All distances m in 1 .. length with B_m < 0, int64, rising.

    The options are those of `similarity`; length <= 2**24. Raises ValueError for another length.
    Source: Men et al., arXiv 2405.14591, Table 4.

    >>> failures(Rotary(head_dim=128), 1970)
    array([1707, 1969, 1970])
    """
    terms = _terms(spec, weights, still, seq_len, axes)
    blocks = _blocks(*terms, whole_number("length", length))
    return np.concatenate([first + np.flatnonzero(values < 0) for first, values in blocks])


def lowest(
    spec: Rotary, length: int, *, weights: npt.ArrayLike | None = None,
    still: float | None = None, seq_len: int | None = None, axes: Axes = None,
) -> tuple[int, float]:  # fmt: skip
    """(m, B_m / n): the distance in 1 .. length with the smallest B_m, relative to the largest.

    n = sum |w_i| + |still| is the largest possible B_m: head_dim / 2 without weights. Of several
    equal values, the first counts. The options are those of `similarity`; length <= 2**24. Raises
    ValueError for another length, and where all weights and `still` are 0.

    >>> m, share = lowest(Rotary(head_dim=128), 4096)
    >>> m, round(share, 4)
    (4060, -0.1307)
    """
    length = whole_number("length", length)
    theta, weight, constant = _terms(spec, weights, still, seq_len, axes)
    most = float(np.abs(weight).sum()) + abs(constant)
    if most == 0:
        raise ValueError("weights and still are all 0, so there is no similarity to compare")
    blocks = _blocks(theta, weight, constant, length)
    least, at = min((float(values.min()), first + int(values.argmin())) for first, values in blocks)
    return at, least / most


def survey(
    spec: Rotary, length: int, *, seq_len: int | None = None
) -> tuple[npt.NDArray[np.int64], int, float]:
    """(all distances with B_m < 0, m, B_m / n): `failures` and `lowest` in one pass.

    Arguments and errors are those of these two functions.

    >>> failing, m, share = survey(Rotary(head_dim=128), 4096)
    >>> int(failing[0]), m, round(share, 4)
    (1707, 4060, -0.1307)
    """
    theta, weight, constant = _terms(spec, None, None, seq_len, None)
    failing, best = [], (math.inf, 0)
    for first, values in _blocks(theta, weight, constant, whole_number("length", length)):
        failing.append(first + np.flatnonzero(values < 0))
        at = int(values.argmin())
        best = min(best, (float(values[at]), first + at))
    return np.concatenate(failing), best[1], best[0] / (len(theta) + constant)


def certify(
    spec: Rotary, length: int, floor: npt.ArrayLike = 0.0, *, seq_len: int | None = None,
    axes: Axes = None,
) -> Certificate:  # fmt: skip
    """Prove whether B_m / B_0 >= floor at every whole distance m in 1 .. length.

    floor  one share of B_0 = head_dim / 2, or (length,) shares; -inf where there is no floor
    Each B_m is computed as an interval that contains its true value, rounding included.
    holds          all of these intervals are above the floor
    first_failure  the first distance whose interval is below the floor; None if there is none
    undecided      how many intervals contain the floor
    lowest, lowest_at  the smallest B_m / B_0 - floor, and its distance
    tolerance      `holds` stays true if each frequency changes by less than this share of itself,
                   because |dB_m| <= m sum |dtheta_i|; 0 if `holds` is false. Rounding to float32
                   changes a frequency by 6e-8 of itself.
    seq_len and axes as in `similarity`; length <= 2**24. Raises ValueError for other lengths and
    for a floor that does not fit.

    >>> certify(Rotary(head_dim=128), 2000)[:4]
    (2000, False, 1707, 0)
    >>> proof = certify(Rotary(head_dim=128), 1706)
    >>> proof.holds, 1e-7 < proof.tolerance < 1e-4
    (True, True)
    """
    length = whole_number("length", length)
    floors = np.asarray(floor, np.float64)
    if floors.shape not in ((), (length,)) or np.isnan(floors).any():
        raise ValueError(f"floor must be a number or {length:,} of them, got {floors.shape}")
    theta, weight, constant = _terms(spec, None, None, seq_len, axes)
    most = len(theta) + constant
    rounding = _ROUNDING * most
    first, undecided, tolerance, lowest = None, 0, math.inf, (math.inf, 1)
    for start, values in _blocks(theta, weight, constant, length):
        at = slice(start - 1, start - 1 + len(values))
        above = values - most * (floors[at] if floors.ndim else floors)
        below = np.flatnonzero(above < -rounding)
        if first is None and len(below):
            first = start + int(below[0])
        undecided += int(np.count_nonzero(np.abs(above) <= rounding))
        least = int(above.argmin())
        lowest = min(lowest, (float(above[least]) / most, start + least))
        reach = np.arange(start, start + len(values)) * theta.sum()
        tolerance = min(tolerance, float(((above - rounding) / np.maximum(reach, 1e-300)).min()))
    holds = first is None and undecided == 0
    return Certificate(
        length, holds, first, undecided, lowest[0], lowest[1], tolerance if holds else 0.0
    )


def _blocks(
    theta: Array, weight: Complex | Array, constant: float, length: int
) -> Iterator[tuple[int, Array]]:
    """Yield (m, [B_m, B_{m+1}, ...]) over 1 .. length; blocks grow, as most failures are early."""
    within = _phases(theta, np.arange(_ROW)) * weight
    first, size = 1, 8 * _ROW
    while first <= length:
        count = min(size, length + 1 - first)
        starts = first + _ROW * np.arange(-(-count // _ROW))
        yield first, _product(within, _phases(theta, starts)).ravel()[:count] + constant
        first, size = first + count, min(2 * size, _BLOCK)


def _product(within: Complex, rows: Complex) -> Array:
    """(rows, _ROW): Re sum_i rows_i within_i, for every row and every distance in it."""
    real = np.concatenate([rows.real, -rows.imag], axis=1)
    return real @ np.concatenate([within.real, within.imag], axis=1).T


def _phases(theta: Array, distances: npt.NDArray[np.int64]) -> Complex:
    """(distances, pairs) complex128: e^{i m theta}, right to 1e-15 for m < 2**25."""
    scale = 2.0 ** (27 - np.frexp(theta)[1])
    upper = np.rint(theta * scale) / scale  # 28 bits, so that the product is exact
    column = distances[:, None].astype(np.float64)
    return np.exp(1j * (column * upper)) * np.exp(1j * (column * (theta - upper)))


def _terms(
    spec: Rotary,
    weights: npt.ArrayLike | None,
    still: float | None,
    seq_len: int | None,
    axes: Axes,
) -> tuple[Array, Complex | Array, float]:
    """Return the frequencies, the weights and what the unrotated channels add, all checked."""
    theta = frequencies(spec, seq_len, axes=axes)
    if still is None:
        still = still_pairs(spec)
    if isinstance(still, bool) or not isinstance(still, int | float) or not math.isfinite(still):
        raise ValueError(f"still must be a finite number, got {still!r}")
    if weights is None:
        return theta, np.ones(len(theta)), float(still)
    weight = np.asarray(weights)
    if weight.shape != theta.shape or weight.dtype.kind not in "iufc":
        raise ValueError(
            f"weights must be ({len(theta)},) numbers, one per pair, got {weight.dtype} "
            f"of shape {weight.shape}"
        )
    if not np.isfinite(weight).all():
        raise ValueError("weights must be finite")
    return theta, weight, float(still)
