"""Decides from the numbers alone whether one array is a rotation of another, and by which angles.

Both arrays are (tokens, heads, channels): the heads of a model before and after their rotation.
Every token has several heads, which hold different numbers and are rotated alike, so a rotation
that fits all of them is no coincidence.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..kernels import Numbers as Array
from ..layouts import LAYOUTS, pair_slices
from ..spec import Rotary
from .fit import Measured, fit
from .pairs import unwrapped_frequencies, wrapped

TOLERANCES = {"float64": 2e-6, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2.5e-2}
_SAMPLE = 12  # heads that are compared
_LEAST = 1e-3  # rad: a smaller turn is noise
_UNLIKE = 9.0  # an amplitude below 3 on a part of the head changes squares by less
_ALIKE = 1e-3  # an amplitude this close to 1 counts as 1


class Turned(NamedTuple):
    """y is x rotated: which channels, and the angle of each pair at each token.

    angles     (tokens, pairs) rad
    noise      rad, how far an angle may be off
    amplitude  by which x is multiplied as well
    """

    head_dim: int
    rotary_dim: int
    start: int
    layout: str
    out_layout: str
    angles: Array
    noise: float
    amplitude: float


def turned(x: Array, y: Array, dtype: str) -> Turned | None:
    """Return the rotation of pairs that makes y from x; None if there is none, or if y is x.

    x, y   (tokens, heads, channels) with two heads or more
    dtype  the coarsest type that the numbers were rounded to

    >>> x = np.random.default_rng(0).normal(size=(3, 2, 4))
    >>> cos, sin = np.cos([[0.0], [1.0], [2.0]]), np.sin([[0.0], [1.0], [2.0]])
    >>> a, b = x[..., 0], x[..., 1]
    >>> y = np.stack([a * cos - b * sin, b * cos + a * sin, x[..., 2], x[..., 3]], axis=-1)
    >>> found = turned(x, y, "float64")
    >>> found[:5], abs(found.angles).round(6).tolist()
    ((4, 2, 0, 'half', 'half'), [[0.0], [1.0], [2.0]])
    """
    x, y = x[:, :_SAMPLE], y[:, :_SAMPLE]
    growth = (y**2).sum(axis=-1) / np.maximum((x**2).sum(axis=-1), 1e-30)
    if growth.max() > _UNLIKE * growth.min():  # rules out most unrelated arrays quickly
        return None
    moved = np.flatnonzero((x != y).any(axis=(0, 1)))
    if x.shape[1] < 2 or not len(moved) or not _is_varied(x):
        return None
    tolerance = TOLERANCES[dtype]
    scale = float(np.sqrt((y**2).mean()))
    allowed = 8 * tolerance * scale
    few = np.linspace(0, len(x) - 1, 6).astype(int)  # tokens, which rule out most guesses quickly
    for layout, out_layout, start, rotary_dim in _guesses(x[few], y[few], moved, allowed):
        read = pair_slices(rotary_dim, layout, start)
        written = pair_slices(rotary_dim, out_layout, start)
        if _factors(_pairs(x[few], read), _pairs(y[few], written))[1].max() > allowed:
            continue
        ratio, error = _factors(_pairs(x, read), _pairs(y, written))
        amplitude = float(np.median(np.abs(ratio)))
        if (
            error.max() <= allowed
            and np.sqrt((error**2).mean()) <= tolerance / 4 * scale  # a norm is off everywhere
            and np.abs(np.abs(ratio) - amplitude).max() <= 8 * tolerance * amplitude
            and amplitude > tolerance
            and np.abs(wrapped(np.angle(ratio / ratio[0]))).max() > max(2 * tolerance, _LEAST)
        ):
            if abs(amplitude - 1) < _ALIKE * max(1, tolerance * 1e3):
                amplitude = 1.0
            channels = rotary_dim, start, layout, out_layout
            return Turned(x.shape[-1], *channels, np.angle(ratio), tolerance / 4, amplitude)
    return None


def _pairs(x: Array, members: tuple[slice, slice]) -> Array:
    """Return each pair of channels as one complex number."""
    return x[..., members[0]] + 1j * x[..., members[1]]


def _factors(z: Array, w: Array) -> tuple[Array, Array]:
    """Return by which complex number all heads of a token are multiplied, and the error of each."""
    size = (np.abs(z) ** 2).sum(axis=1)
    ratio = (w * z.conj()).sum(axis=1) / np.where(size, size, 1)
    return ratio, np.abs(w - ratio[:, None] * z)


def _is_varied(x: Array) -> bool:
    """Whether the heads of a token hold different numbers: equal heads prove no more than one."""
    first, others = x[:, :1], x[:, 1:]
    across = (first * others).sum(axis=-1) ** 2
    sizes = (first**2).sum(axis=-1) * (others**2).sum(axis=-1)
    return bool((across < 0.98 * sizes).any(axis=1).mean() > 0.5)


def _guesses(
    x: Array, y: Array, moved: Array, allowed: float
) -> Iterator[tuple[str, str, int, int]]:
    """Yield (layout, out_layout, start, rotary_dim) that the partner of one channel allows."""
    head_dim, start = x.shape[-1], int(moved[0])
    span = int(moved[-1]) + 1 - start
    span += span % 2
    first = slice(start, start + 1)
    _, error = _factors(_pairs(x, (first, slice(None))), _pairs(y, (first, slice(None))))
    worst = error.max(axis=(0, 1))
    partners = [int(c) for c in np.flatnonzero(worst <= allowed) if c > start]
    for other in partners:
        if start + 2 * (other - start) <= head_dim and 2 * (other - start) >= span:
            yield "half", "half", start, 2 * (other - start)
        if other == start + 1 and start + span <= head_dim:
            yield "interleaved", "interleaved", start, span
    if start + span <= head_dim:
        for layout, out_layout in itertools.permutations(LAYOUTS):
            yield layout, out_layout, start, span


def spec_of(rotation: Turned, positions: Array, frequencies: Array) -> Rotary:
    """Return the spec that rotates by these angles at positions (tokens, axes).

    frequencies  all numbers in the model that may be frequencies; if they agree with the measured
                 frequencies they replace them, because they are more precise
    Raises ValueError if the angles do not follow from the positions.

    >>> at = np.arange(9.0)[:, None]
    >>> spec_of(Turned(2, 2, 0, "half", "half", wrapped(at * 0.5), 1e-6, 1.0), at, np.zeros(0))
    Rotary(head_dim=2, schedule='linear', params={'factor': 2.0})
    """
    by_axis, farthest = _slopes(rotation, positions)
    reference = int(np.abs(positions).sum(axis=1).argmin())
    if len(by_axis) > 1:
        visible = np.abs(by_axis) * farthest[:, None] > 8 * rotation.noise
        if (visible.sum(axis=0) > 1).any():
            raise ValueError("a pair uses more than one position axis")
        by_axis = np.where(visible, by_axis, 0)
    axes = np.abs(by_axis).argmax(axis=0)
    rates = by_axis.sum(axis=0)
    phase = wrapped(rotation.angles[reference] - positions[reference] @ by_axis)
    error = np.abs(wrapped(rotation.angles - positions @ by_axis - phase))
    limit = 40 * rotation.noise + 3e-6 * np.abs(positions @ by_axis).max()
    if error.max() > max(limit, 1e-3):
        raise ValueError(f"its angles do not grow evenly with the positions: {error.max():.2g} off")
    if np.abs(phase).max() > max(limit, 1e-3):
        raise ValueError(
            "a token at position 0 is already rotated, so the model counts positions from another "
            "number; pass its own positions as positions="
        )
    sign = -1 if (rates < 0).any() and not (rates > 0).any() else 1
    # 1e-6: the relative error of float32 formulas
    noise = 4 * rotation.noise / farthest[axes] + 1e-6 * np.abs(rates)
    inv_freq = sign * rates
    if (exact := _in_model(inv_freq, noise, frequencies)) is not None:
        inv_freq, noise = exact, 1e-9 * exact
    measured = Measured(
        inv_freq, noise, rotation.rotary_dim, rotation.amplitude, 4 * rotation.noise, len(by_axis)
    )
    return fit(measured).spec(rotation[:5], axes, sign)


def _slopes(rotation: Turned, positions: Array) -> tuple[Array, Array]:
    """Return rad per position, (axes, pairs), and the largest distance on each axis, (axes,)."""
    rows, farthest = [], []
    for axis in range(positions.shape[1]):
        rest = np.delete(positions, axis, axis=1)
        _, group = np.unique(rest, axis=0, return_inverse=True)
        group = group.reshape(-1)
        alone = np.flatnonzero(group == np.bincount(group).argmax())  # differ in this axis alone
        reference = alone[np.abs(positions[alone, axis]).argmin()]
        away = positions - positions[reference]
        tokens = alone[away[alone, axis] != 0]
        tokens = tokens[np.argsort(np.abs(away[tokens, axis]))]
        if not len(tokens):
            raise ValueError(
                f"no two tokens of the example differ only in position axis {axis}, so its "
                "frequencies cannot be measured: pass an example that has two such tokens"
            )
        turned = rotation.angles[tokens] - rotation.angles[reference]
        rate, fitting = unwrapped_frequencies(turned, away[tokens, axis])
        if fitting < len(tokens):
            raise ValueError("its angles do not grow evenly with the positions")
        rows.append(rate)
        farthest.append(np.abs(away[tokens, axis]).max())
    return np.array(rows), np.array(farthest)


def _in_model(rates: Array, noise: Array, frequencies: Array) -> Array | None:
    """Return the model's frequencies nearest to the measured rates; None if a rate has none."""
    if not len(frequencies):
        return None
    nearest = frequencies[np.abs(rates[:, None] - frequencies).argmin(axis=1)]
    nearest = np.where(np.abs(rates) <= noise, 0.0, nearest)
    return nearest if (np.abs(nearest - rates) <= noise).all() else None
