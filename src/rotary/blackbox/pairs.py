"""Finds pairs and angles from what a function does to each channel, and how it computes angles."""

import itertools
import math
from typing import NamedTuple

import numpy as np

from ..analysis.precision import round_to
from ..kernels import Numbers as Array
from ..layouts import pair_indices
from .probe import Finding

FLOATS = ("float32", "float16", "bfloat16")
LOST = 0.3  # rad: an angle this far from the expected one no longer tells the number of turns
FAST = 1e5  # rad: float32 angles beyond this depend on how exactly inv_freq was rounded


class Pairs(NamedTuple):
    """Where the pairs are: rotary_dim channels from `start`, and the layouts read and written.

    `blocks` are the matrices of the pairs, (..., pairs, 2, 2); their rows are written channels.
    """

    layout: str
    out_layout: str
    start: int
    rotary_dim: int
    blocks: Array

    @property
    def cos(self) -> Array:
        """(..., pairs), times the amplitude."""
        return (self.blocks[..., 0, 0] + self.blocks[..., 1, 1]) / 2

    @property
    def sin(self) -> Array:
        """(..., pairs), times the amplitude; positive where the first member goes to the second."""
        return (self.blocks[..., 1, 0] - self.blocks[..., 0, 1]) / 2

    @property
    def skew(self) -> float:
        """How far the blocks are from a rotation times a number, as a share of that number."""
        b = self.blocks
        skews = np.abs([b[..., 0, 0] - b[..., 1, 1], b[..., 0, 1] + b[..., 1, 0]])
        size = np.abs(b).max(axis=(-1, -2))
        return float((skews / np.where(size, size, 1)).max())

    @property
    def angles(self) -> Array:
        """(..., pairs) in [-pi, pi]."""
        return np.arctan2(self.sin, self.cos)

    @property
    def channels(self) -> tuple[Array, Array]:
        """The index of the blocks in a matrix (head_dim, head_dim)."""
        read = pair_indices(self.rotary_dim, self.layout, self.start)
        written = pair_indices(self.rotary_dim, self.out_layout, self.start)
        return written[:, :, None], read[:, None, :]

    def of(self, matrices: Array) -> "Pairs":
        """Return these pairs with the blocks of other matrices (..., head_dim, head_dim)."""
        return self._replace(blocks=matrices[(..., *self.channels)].astype(np.float64))


def find_pairs(matrices: Array, tolerance: float) -> Pairs | Finding:
    """Return the pairs of matrices (runs, tokens, head_dim, head_dim), or why there are none.

    >>> quarter = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]])
    >>> find_pairs(quarter[None, None], 0.0)[:4]
    ('half', 'half', 0, 2)
    """
    head_dim = matrices.shape[-1]
    reach = np.abs(matrices).max(axis=(0, 1)) > tolerance
    moved = np.abs(matrices - np.eye(head_dim)).max(axis=(0, 1)) > tolerance
    channels = np.flatnonzero(moved.any(axis=0) | moved.any(axis=1))
    if not len(channels):
        return Finding("no_rotation", "it changes nothing at any position")
    start, size = int(channels[0]), int(channels[-1] - channels[0]) + 1
    size += size % 2  # the second member of a mixed layout's last pair may hardly move
    gaps = {abs(int(i - j)) for i, j in zip(*np.nonzero(reach), strict=True) if i != j}
    guesses = [("half", "half", 2 * gap) for gap in sorted(gaps, reverse=True)[:1]]
    guesses += [("half", "half", size), ("interleaved", "interleaved", size)]
    guesses += [("interleaved", "half", size), ("half", "interleaved", size)]
    for layout, out_layout, rotary_dim in guesses:
        before = int(channels[-1]) + 1 - rotary_dim  # where the first pair turns by whole turns
        if out_layout == layout == "half" and start % 2 and 0 <= before < start:
            start = before
        if start + rotary_dim > head_dim:
            continue
        pairs = Pairs(layout, out_layout, start, rotary_dim, matrices)
        allowed = np.eye(head_dim, dtype=bool)
        allowed[start : start + rotary_dim, start : start + rotary_dim] = False
        allowed[pairs.channels] = True
        if not (reach & ~allowed).any():
            return pairs.of(matrices)
    return Finding("mixes_channels", "its channels do not form pairs")


def tables_in_other_layout(pairs: Pairs) -> bool:
    """Whether every written channel has its own angle, ordered as in the layout not used.

    The commonest copy error: cat(f, f) where pairs are adjacent, or repeat_interleave(f, 2) where
    they are half a head apart.

    >>> angles = np.array([1, 0.1])  # of channels 0, 2 and of channels 1, 3, tiled
    >>> c, s = np.cos(angles), np.sin(angles)
    >>> block = np.array([[c[0], -s[0]], [s[1], c[1]]])
    >>> tables_in_other_layout(Pairs("interleaved", "interleaved", 0, 4, np.stack([block, block])))
    True
    """
    b = pairs.blocks
    first, second = np.arctan2(-b[..., 0, 1], b[..., 0, 0]), np.arctan2(b[..., 1, 0], b[..., 1, 1])
    channels = np.empty((*first.shape[:-1], pairs.rotary_dim))
    written = pair_indices(pairs.rotary_dim, pairs.out_layout)
    channels[..., written[:, 0]], channels[..., written[:, 1]] = first, second
    half = pairs.rotary_dim // 2
    if pairs.out_layout == "interleaved":
        one, two = channels[..., :half], channels[..., half:]
    else:
        one, two = channels[..., 0::2], channels[..., 1::2]
    return bool(np.abs(wrapped(one - two)).max() < 0.02)  # 0.02: bfloat16 tables


def wrapped(angles: Array) -> Array:
    """Return angles modulo a turn, in [-pi, pi).

    >>> wrapped(np.array([6.283185307179586 + 0.5]))
    array([0.5])
    """
    return (angles + math.pi) % math.tau - math.pi


def unwrapped_frequencies(angles: Array, numbers: Array) -> tuple[Array, int]:
    """Return frequencies from angles (runs, pairs) at positions `numbers` (runs,): 1, 2, 4, ...

    Each run makes them more precise, enough to count the whole turns of the next one. Returns rad
    per position, up to half a turn in the first run, and how many runs fit them.

    >>> w = np.array([1.0, 0.01])
    >>> numbers = 2 ** np.arange(21)
    >>> inv_freq, fitting = unwrapped_frequencies(wrapped(numbers[:, None] * w), numbers)
    >>> bool(np.abs(inv_freq - w).max() < 1e-14), fitting
    (True, 21)
    """
    frequencies = np.zeros(angles.shape[1])
    for run, (measured, number) in enumerate(zip(angles, numbers, strict=True)):
        correction = wrapped(measured - number * frequencies)
        if run and np.abs(correction).max() > LOST:
            return frequencies, run
        frequencies = frequencies + correction / number
    return frequencies, len(numbers)


def arithmetic(
    numbers: Array, angles: Array, inv_freq: Array, unit: Array | float
) -> tuple[str, ...]:
    """Which roundings explain the measured angles: ("exact",), ("float32 angles",), ...

    numbers, angles  (tokens, pairs): the position that drives a pair, and the angle measured there
    inv_freq         (pairs,) of the schedule, before any rounding
    unit             how far off an angle may be because of the tables, x, and the schedule found
    Returns () if no combination of rounded positions, frequencies and angles explains them.

    >>> numbers = np.array([[255.0], [256.0], [257.0]])
    >>> arithmetic(numbers, np.array([[255.0], [256.0], [256.0]]) * 0.3, np.array([0.3]), 1e-5)
    ('bfloat16 positions',)
    """
    exact = numbers * inv_freq
    if (np.abs(wrapped(angles - exact)) <= unit).all():
        return ("exact",)
    usable = (numbers > 0) & (inv_freq != 0) & (np.abs(exact) < FAST)
    if not usable.any():
        return ()
    limit = (unit + 1e-6 * np.abs(exact))[usable]  # 1e-6: base^x of float32 formulas
    # fewest roundings first; of two that explain it, positions are the likelier cause
    choices = sorted(itertools.product(FLOATS, repeat=3), key=lambda c: 3 - c.count("float32"))
    for angle_type, frequency_type, position_type in choices:
        rates = round_to(round_to(inv_freq, "float32"), frequency_type)
        with np.errstate(invalid="ignore", over="ignore"):
            product = round_to(numbers, position_type).astype(np.float32) * rates.astype(np.float32)
            guess = round_to(product.astype(np.float64), angle_type)
            error = np.abs(wrapped(angles - guess))[usable]
        if (error <= limit).mean() >= 0.97:  # values near a tie may round the other way
            kinds = zip((position_type, frequency_type, angle_type),
                        ("positions", "frequencies", "angles"), strict=True)  # fmt: skip
            rounded = tuple(f"{kind} {what}" for kind, what in kinds if kind != "float32")
            return rounded or ("float32 angles",)
    return ()


def is_running_product(
    numbers: Array, angles: Array, inv_freq: Array, measured: Array, base: float
) -> bool:
    """Whether the angle of a pair is that of the pair before it times one ratio, in float32.

    numbers, angles  as for `arithmetic`
    inv_freq         (pairs,) of the schedule
    measured         (pairs,) measured frequencies
    base             the base of the frequencies before scaling

    llama.cpp computes angles this way, and scales them afterwards. Each product is rounded; angles
    with these roundings must be 4 times nearer to the measured ones than position times frequency.
    """
    count, usable = len(inv_freq), (numbers > 0) & (np.abs(numbers * inv_freq) < FAST)
    if count < 4 or not inv_freq.all() or not usable.any():
        return False
    ratio = (inv_freq[-1] / inv_freq[0]) ** (1 / (count - 1))
    if not np.allclose(inv_freq, inv_freq[0] * ratio ** np.arange(count), atol=0):
        ratio = base ** (-1 / count)
    scale = (inv_freq / ratio ** np.arange(count)).astype(np.float32)
    first = numbers[:, :1].astype(np.float32)

    def error(guess: Array) -> float:
        return float(np.abs(wrapped(angles - guess.astype(np.float64)))[usable].mean())

    def running(step: object) -> Array:
        steps = np.full((len(first), count - 1), step, np.float32)
        products = np.multiply.accumulate(np.concatenate([first, steps], axis=1), axis=1)
        return products * scale

    middle = np.float32(ratio)
    steps = (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(2)))
    plain = first * measured.astype(np.float32)
    return min(error(running(step)) for step in steps) < error(plain) / 4
