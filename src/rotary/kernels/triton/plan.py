"""Computes the arguments of a launch of the GPU kernel from shapes and strides.

A program is one of (batch, tokens, heads), so the axes of every array are mapped to these. Heads
are an axis along which all entries share one row of angles, tokens an axis along which angles vary.
The other axes are merged into one batch axis; those that cannot be merged take one launch for each
entry.
"""

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..geometry import Geometry
from ..memory import corners, merged_axes

_THREADS = 64  # of a program, if there are many programs
_VECTOR = 16  # bytes of the widest load
_GRID = 65535  # programs along the second and the third axis of a grid, at most
ALIGNED = _VECTOR - 1  # the bits of an address that are 0 if so many can be read at a time


class Angles(NamedTuple):
    """The form of the array that angles come from: tables, row numbers, positions, or nothing.

    strides  of that array along every axis of x but the last; 0 if one number serves the axis
    step     the stride between rows of an indexed table, or between the axes of a position
    seq      the axis of x along which positions grow by one, or None
    axes     the number of axes of a position
    column   the stride between the columns of a table;  itemsize  bytes of one of its numbers
    """

    is_exact: bool
    has_rows: bool
    strides: tuple[int, ...]
    step: int = 0
    seq: int | None = None
    axes: int = 1
    column: int = 1
    itemsize: int = 4


class Plan(NamedTuple):
    """The arguments of a launch, except memory."""

    grid: tuple[int, int, int]
    numbers: tuple[int, ...]  # the arguments of the kernel from `q_batch` to `outer_shift`
    constants: dict[str, int]
    warps: int
    corners: tuple[tuple[int, ...], ...]  # offsets of q, k, outputs and angles, for each launch

    @property
    def programs(self) -> int:
        """How many programs the grid has."""
        return math.prod(self.grid)


@lru_cache(maxsize=1024)
def plan(
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    angles: Angles,
    geometry: Geometry,
    is_in_place: bool,
    itemsize: int,
    processors: int,
    lanes: int = 32,
) -> Plan:
    """Return the launch for q, or q and k, of these shapes.

    strides     of q, k, and their outputs, in elements; 1 along the last axis
    itemsize    bytes of one element
    processors  the number of multiprocessors of the device;  lanes  the threads of a warp

    >>> geometry = Geometry(0, 64, "half", "half", (None, None, 0))
    >>> angles, steps = Angles(False, False, (0, 0, 64)), (2**21, 2**20, 128, 1)
    >>> plan(((1, 2, 8192, 128),), (steps,) * 2, angles, geometry, True, 2, 132).programs
    2048
    """
    q, k = shapes[0], shapes[-1]
    count = len(shapes)
    walked = (
        *(_steps(q, strides[0]), _steps(k, strides[count - 1])),
        *(_steps(q, strides[count]), _steps(k, strides[-1]), angles.strides),
    )
    every = list(zip(*walked, strict=True))
    sizes = [max(pair) for pair in zip(q[:-1], k[:-1], strict=True)]
    head = _head_axis(q, k, angles)
    rest = [axis for axis, size in enumerate(sizes) if axis != head and size > 1]
    token = _token_axis(rest, angles)
    merged = merged_axes([(sizes[axis], *every[axis]) for axis in rest if axis != token])
    batches, *batch = merged.pop() if merged else (1, *(0,) * 5)
    token_count, token_steps = (1, (0,) * 5) if token is None else (sizes[token], every[token])
    q_heads, k_heads, head_steps = (1, 1, (0,) * 5)
    if head is not None:
        q_heads, k_heads, head_steps = q[head], k[head], every[head]
    q_heads = 0 if 0 in q else q_heads  # an array without elements is not read
    k_heads = 0 if 0 in k or count == 1 else k_heads

    steps = [batch, token_steps, head_steps, *(step for _, *step in merged)]
    vector = _VECTOR // itemsize
    align = math.gcd(vector, *(number for step in steps for number in step[:4]))
    is_indexed = angles.has_rows and not angles.is_exact
    table_steps = [angles.step] if is_indexed else [step[4] for step in steps]
    table_align = 1 if angles.is_exact else math.gcd(_VECTOR // angles.itemsize, *table_steps)
    row_align = 1 if angles.has_rows else table_align

    width = 1 << (geometry.pairs - 1).bit_length()
    # A vector of 16 bytes for each thread, half of one where programs are few. Never fewer pairs
    # than threads: two of them would load the same number, which one might already have rotated.
    tile, pairs = _THREADS * vector, batches * token_count * (q_heads + k_heads) * width
    is_by_token = head_steps[0] < token_steps[0]
    tokens, heads = _tile(token_count, (q_heads, k_heads), max(1, tile // width), is_by_token)
    groups = -(-q_heads // heads) - (-k_heads // heads)
    blocks = -(-token_count // tokens)
    inner, outer = (groups, blocks) if is_by_token else (blocks, groups)
    order = (batch, token_steps, head_steps)
    last = geometry.start + 2 * geometry.pairs
    grid = grid_of(inner, outer, batches)
    counts = batches - 1, token_count - 1, max(q_heads, k_heads, 1) - 1
    farthest = max(sum(map(operator.mul, counts, steps)) for steps in zip(*order, strict=True))
    return Plan(
        grid,
        (
            *(step[array] // align for array in range(4) for step in order),
            *(batch[4] // row_align, token_steps[4] // row_align),
            *(token_count, q_heads, k_heads),
            angles.step // table_align if is_indexed else angles.step,
            int(token is not None and token == angles.seq),
            *(inner, *inverse_of(inner), outer, *inverse_of(outer)),
        ),
        {
            "HEAD_DIM": q[-1],
            "START": geometry.start,
            "PAIRS": geometry.pairs,
            "WIDTH": width,
            "TOKENS": tokens,
            "HEADS": heads,
            "ALIGN": align,
            "TABLE_ALIGN": table_align,
            "COLUMN": angles.column,
            "READ_HALF": geometry.layout == "half",
            "WRITE_HALF": geometry.out_layout == "half",
            "NEGATE": geometry.conjugate,
            "BEFORE": 0 if is_in_place else _copied_at_once(geometry.start, width),
            "AFTER": 0 if is_in_place else _copied_at_once(q[-1] - last, width),
            "HAS_ROWS": angles.has_rows,
            "EXACT": angles.is_exact,
            "AXES": angles.axes,
            "ROUNDED": False,
            "TOKENS_FIRST": not is_by_token,
            "GRID_3D": grid == (inner, outer, batches),
            "WIDE": farthest + q[-1] >= 2**31,
        },
        (2 if pairs < 4 * processors * tile else 1) * _THREADS // lanes,
        corners(merged, 5),
    )


def grid_of(inner: int, outer: int, batches: int) -> tuple[int, int, int]:
    """Return the grid of so many programs along each axis; of one axis if it is too long for three.

    >>> grid_of(5, 2, 3), grid_of(5, 131072, 1)
    ((5, 2, 3), (655360, 1, 1))
    """
    grid = inner, outer, batches
    return grid if max(grid[1:]) <= _GRID else (math.prod(grid), 1, 1)


def inverse_of(divisor: int) -> tuple[int, int]:
    """Return what the kernels multiply and shift by instead of dividing, exact below 2^31.

    The first is 2^31 to 2^32 - 1, as the 32-bit number of the same bits.
    Source: T. Granlund, P. L. Montgomery, Division by invariant integers using multiplication,
    PLDI 1994.

    >>> inverse_of(1), inverse_of(3)
    ((-2147483648, 0), (-1431655765, 2))
    """
    shift = max(0, divisor - 1).bit_length()
    return -(-(1 << 31 + shift) // max(1, divisor)) - 2**32, shift


def _copied_at_once(channels: int, width: int) -> int:
    """Return how many unrotated channels are copied at once: at most 16 vectors a thread."""
    return min(1 << (channels - 1).bit_length(), 8 * width) if channels else 0


def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides except the last; 0 for an axis of size 1, as everything divides 0."""
    steps = zip(shape[:-1], strides, strict=False)
    return tuple([0 if size == 1 else step for size, step in steps])


def _head_axis(q: tuple[int, ...], k: tuple[int, ...], angles: Angles) -> int | None:
    """Return an axis that shares angles: one on which q and k differ, or else the last."""
    shared = [
        axis
        for axis, step in enumerate(angles.strides)
        if step == 0 and axis != angles.seq and max(q[axis], k[axis]) > 1
    ]
    different = [axis for axis in shared if q[axis] != k[axis]]
    axes = different or shared
    return axes[-1] if axes else None


def _token_axis(rest: Sequence[int], angles: Angles) -> int | None:
    """Return the axis on which positions grow, else the last on which angles vary, or the last."""
    if angles.seq in rest:
        return angles.seq
    varying = [axis for axis in rest if angles.strides[axis]]
    axes = varying or rest
    return axes[-1] if axes else None


def _tile(tokens: int, heads: tuple[int, int], rows: int, is_by_token: bool) -> tuple[int, int]:
    """Return how many tokens and heads make the rows of a tile, powers of two."""
    common = math.gcd(*heads) or 1
    together = min(8, common & -common, rows) if is_by_token else 1
    block = min(rows // together, 1 << (tokens - 1).bit_length() if tokens else 1)
    return block, rows // block
