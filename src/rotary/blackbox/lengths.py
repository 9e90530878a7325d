"""Finds changes at far positions: frequencies that depend on the length, tables that end.

Both are measured at single positions beyond the last one that a schedule explains. They are
reported only if a formula gives every measured angle there.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..kernels import Numbers as Array
from ..schedules import SCHEDULES
from .fit import Fit, dynamic, nearest_length
from .pairs import Pairs, wrapped
from .probe import Box, Finding

CLOSE = 0.02  # rad: allowed error, in addition to that of float32 angles
FLOAT32_ANGLE = 5e-6  # rad per rad: error of float32 angles from float32 formulas


class Far(NamedTuple):
    """The angles of a box at far positions, from those at position 0 on and times `sign`."""

    box: Box
    pairs: Pairs
    sign: int
    start: Array

    def angles(self, positions: Sequence[int], token: int = 0) -> tuple[Array, float]:
        """Return angles (pairs,) and amplitude of one token of a row at these positions."""
        there = self.pairs.of(self.box.matrices(positions))
        turned = wrapped(self.sign * (there.angles[token] - self.start))
        return turned, float(np.median(np.hypot(there.sin[token], there.cos[token])))


def shared_positions(box: Box) -> int:
    """Return how many positions from 0 on are rotated alike, before a clear step; 1 without a step.

    Usually even a slow pair moves a little at every position. If positions are divided by 4 and
    rounded down, it stands still for three positions and then moves.
    """
    if box.by_index:
        return 1
    try:
        matrices = box.matrices(range(33))
    except ValueError:  # a short table
        return 1
    moved = np.abs(matrices - matrices[0]).max(axis=(1, 2))
    first = int((moved > 1e-6).argmax())
    is_step = first > 1 and moved[first] > 1e-2
    held = matrices[first : min(2 * first, len(matrices))]
    return first if is_step and np.abs(held - held[0]).max() <= 1e-6 else 1


def with_length(
    far: Far, ladder: Fit, last: int, limit: int, amplitude: float | None
) -> tuple[Fit, Finding] | None:
    """Return the schedule and the finding if frequencies follow the length of the row; else None.

    ladder     the schedule of short rows, up to position `last`
    amplitude  of short rows

    The slowest pair has not yet made a turn, so its angle shows by how much frequencies have
    shrunk. The formula with that factor must then give the angle of every pair.
    """
    middles = [p for p in (4 * last, 8 * last, 16 * last) if p < limit]
    if len(middles) < 2:
        return None
    try:
        alone, _ = far.angles(middles[:1])
        followed, _ = far.angles(range(middles[0], middles[0] + 64))
        far.angles([0])  # a short row, after which a box forgets the longest one it has seen
        measured = [far.angles([p - 1, p, p + 1], 1) for p in middles]
    except ValueError:
        return None
    # if a token keeps its angle when others follow it, the length is counted to that token
    by_token = bool(np.abs(wrapped(alone - followed)).max() < 1e-4)
    lengths = [p + (1 if by_token else 2) for p in middles]
    angles, sizes = zip(*measured, strict=True)
    rotary_dim = far.pairs.rotary_dim

    def explains(inv_freq: Callable[[int], Array]) -> bool:
        for measured, position, length in zip(angles, middles, lengths, strict=True):
            exact = position * inv_freq(length)
            allowed = CLOSE + FLOAT32_ANGLE * np.abs(exact)
            if (np.abs(wrapped(measured - exact)) >= allowed).any():
                return False
        return True

    if explains(lambda length: ladder.inv_freq):
        if amplitude and max(abs(size / amplitude - 1) for size in sizes) > 1e-3:
            text = f"long rows are times {sizes[0]:.6g}, short ones times {amplitude:.6g}, and "
            text += "frequencies do not change (Phi-3.5-MoE in transformers: the long factor only)"
            return ladder, Finding("amplitude_depends_on_length", text)
        return None
    slow = int(np.argmin(ladder.inv_freq))
    if min(each[slow] for each in angles) <= 0 or ladder.schedule != "default":
        return None
    growth = [
        float(position * ladder.inv_freq[slow] / each[slow])
        for position, each in zip(middles, angles, strict=True)
    ]
    trained = lengths[0] / growth[0]
    if not by_token and explains(lambda length: ladder.inv_freq * trained / length):
        rounded = nearest_length(trained)
        params = {"factor": 1.0, "original_max_position_embeddings": rounded}
        text = f"all frequencies are divided by length / {rounded:,}: dynamic linear scaling "
        finding = Finding("dynamic_linear", text + "(TransformerEngine)")
        return ladder._replace(schedule="dynamic_linear", params=params), finding
    grown = dynamic(ladder.base, rotary_dim, *zip(lengths[:2], growth[:2], strict=True))
    if grown is None:
        return None
    ntk = partial(SCHEDULES["dynamic"], rotary_dim, grown.base, **grown.params)
    if not explains(lambda length: ntk(seq_len=length)[0]):
        return None
    text = f"dynamic NTK by {grown.params['factor']:g} from "
    text += f"{grown.params['original_max_position_embeddings']:,} tokens on, base {grown.base:g}: "
    if by_token:
        text += "the frequencies of a token follow its own position, as when a decoder rotates "
        text += "each token at the length so far: cached keys no longer match later queries"
        return grown, Finding("depends_on_position", text)
    text += "frequencies follow the length of each call, so keys that are cached keep those of "
    return grown, Finding("depends_on_length", text + "the call that rotated them")


# code, text, and as which position p is rotated, if E is the first wrong one
ENDS: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
    (
        "positions_clamped",
        "positions from {edge:,} on are all rotated as {before:,}: a table of {edge:,} rows whose "
        "index is clamped",
        lambda edge, p: edge - 1,
    ),
    (
        "positions_restart",
        "position {edge:,} is rotated as 0 again, and so on: positions are taken modulo {edge:,}",
        lambda edge, p: p % edge,
    ),
    (
        "not_rotated_far",
        "positions from {edge:,} on are not rotated at all",
        lambda edge, p: 0,
    ),
    (
        "positions_overflow",
        "position {edge:,} is rotated as -{edge:,}: positions are whole numbers of too few bits",
        lambda edge, p: (p + edge) % (2 * edge) - edge,
    ),
)  # fmt: skip


def end_of_table(far: Far, inv_freq: Array, last: int, limit: int) -> Finding | None:
    """Explain the first position that is rotated wrongly, between `last` and twice that.

    None if the box refuses a position, or none of `ENDS` explains it, or it is rotated differently
    in a longer row: frequencies that follow the length, as L / n, look like a clamped index too.
    """
    allowed = min(0.25, float(np.abs(inv_freq).max()) / 4)

    def is_turned_as(position: int, other: int) -> bool:
        error = wrapped(far.angles([position])[0] - other * inv_freq)
        return bool(np.abs(error).max() < allowed)

    right, wrong = last, min(2 * last, limit)
    try:
        if not is_turned_as(right, right) or is_turned_as(wrong, wrong):
            return None
        wrong = right + 1 + bisect(range(right + 1, wrong), 0, key=lambda p: not is_turned_as(p, p))
        longer = far.angles(range(wrong, wrong + 6))[0]
        if np.abs(wrapped(longer - far.angles([wrong])[0])).max() >= allowed:
            return None
        later = [p for p in (2 * wrong, 3 * wrong + 7, limit) if wrong + 5 < p <= limit]
        for code, text, turned_as in ENDS:
            if all([is_turned_as(p, turned_as(wrong, p)) for p in (wrong, wrong + 5, *later)]):
                return Finding(code, text.format(edge=wrong, before=wrong - 1))
    except ValueError:
        return None
    return None
