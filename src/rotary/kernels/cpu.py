"""The CPU kernel: hands memory to the compiled loops of `loops.py`, serially or on all threads.

Works on addresses with shapes, strides and types, so that NumPy arrays and torch tensors take the
same way and nothing is wrapped or copied.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np

if numba.config.DISABLE_JIT:  # then the plain formula rotates; `rotary doctor` says so
    raise ImportError("Numba compiles nothing while NUMBA_DISABLE_JIT is set")

from . import Numbers as Array
from . import loops, threads
from . import numpy as reference
from .geometry import Geometry, Options, geometry_of
from .memory import (
    SIZES,
    Block,
    contiguous,
    extent,
    is_contiguous,
    is_contiguous_last,
    is_gapless,
    is_injective,
)
from .numpy import address

# what a prepared call depends on: of each array its type, shape, strides, dtype and alignment
Signature = tuple[type, tuple[int, ...], tuple[int, ...], np.dtype[np.generic], bool]

STREAM_BYTES = 1 << 25  # from here on no cache keeps the output until it is read
_LINE = 64
_TILE_BYTES = 1 << 21  # of both tables; smaller tiles gain nothing and break the runs of rows
_AHEAD = 1 << 13  # bytes; 4 to 16 KiB are alike
_NOTHING = np.zeros((), loops.STEPS)  # the steps of no rows


class Call(NamedTuple):
    """All that is known of a rotation before the addresses are."""

    loop: loops.Loop
    steps: tuple[Array, ...]  # of each block, see loops.STEPS; of nothing, where a second would be
    # where blocks run one after the other: of x, out and table, for every index of the axes beyond
    # three; empty if one or two blocks can go in one parallel region
    offsets: tuple[tuple[tuple[int, int, int], ...], ...]
    pairs: int
    mode: int
    sign: int
    size: int  # bytes of all blocks
    addresses: tuple[int, ...]  # of steps
    can_stream: bool  # whether every store is aligned, once the addresses are
    row_count: int  # of row numbers, which are contiguous; 0 where there are none
    row_limit: int  # the rows of the table that they may pick
    reach: Array  # (7, 2) int64, see loops.ROTATION
    reach_address: int


def rotate(
    xs: Sequence[Array],
    cos: Array,
    sin: Array,
    positions: object,
    options: Options,
    out: Sequence[Array] | None,
) -> tuple[Array, ...]:
    """Rotate NumPy arrays, as `kernels/numpy.py` does."""
    rows = positions if isinstance(positions, np.ndarray) else None
    if positions is None or rows is not None:
        arrays = [*xs, cos, sin] if rows is None else [*xs, cos, sin, rows]
        call = _ready_call(
            tuple([_signature(array) for array in (*arrays, *(out or ()))]),
            len(xs),
            rows is not None,
            None if out is None else _in_place(xs, out),
            options,
        )
        if call is not None and (out is None or all([y.flags.writeable for y in out])):
            outs = [np.empty(x.shape, x.dtype) for x in xs] if out is None else out
            index = 0 if rows is None else address(rows)
            is_checked = out is not None or rows is not None
            if run(call, [address(x) for x in xs], [address(y) for y in outs],
                   address(cos), address(sin), index, is_checked=is_checked):  # fmt: skip
                return tuple(outs)
    reference.check_operands(xs, cos, sin, out)
    rows = None if positions is None else reference.check_rows(positions, cos)
    if out is not None and rows is not None:
        reference.check_out((*xs, cos, sin, rows), out)
    if cos.dtype != np.float32:
        return reference.rotate(xs, cos, sin, positions, options, out)
    shapes = tuple(x.shape for x in xs)
    geometry = geometry_of(shapes, cos.shape, None if rows is None else rows.shape, options)
    if cos.strides != sin.strides or not _is_ready(cos):
        cos, sin = np.ascontiguousarray(cos), np.ascontiguousarray(sin)
    results = tuple(np.empty(x.shape, x.dtype) for x in xs) if out is None else tuple(out)
    is_mixed = geometry.layout != geometry.out_layout
    sources = [x if _is_ready(x) else np.ascontiguousarray(x) for x in xs]
    targets = [
        y
        if _is_ready(y) and not (is_mixed and address(x) == address(y))
        else np.empty(y.shape, y.dtype)
        for x, y in zip(xs, results, strict=True)
    ]
    call = prepare(
        tuple(map(reference.block, sources)),
        tuple(map(reference.block, targets)),
        _in_place(sources, targets),
        reference.block(cos),
        None if rows is None else reference.block(rows),
        geometry,
    )
    run(
        call,
        [address(x) for x in sources],
        [address(y) for y in targets],
        address(cos),
        address(sin),
        0 if rows is None else address(rows),
    )
    for result, target in zip(results, targets, strict=True):
        if target is not result:
            result[...] = target
    return results


def _signature(array: Array) -> Signature:
    return type(array), array.shape, array.strides, array.dtype, array.flags.aligned


def _in_place(xs: Sequence[Array], outs: Sequence[Array]) -> tuple[bool, ...]:
    return tuple([address(x) == address(y) for x, y in zip(xs, outs, strict=True)])


@lru_cache(maxsize=1024)
def _ready_call(
    signature: tuple[Signature, ...],
    count: int,
    has_rows: bool,
    is_in_place: tuple[bool, ...] | None,
    options: Options,
) -> Call | None:
    """The call for operands the loops can take as they are; None if one has to be copied first."""
    if not all(kind is np.ndarray and is_aligned for kind, *_, is_aligned in signature):
        return None
    blocks = [
        Block(shape, strides, reference.name_of(dtype)) for _, shape, strides, dtype, _ in signature
    ]
    xs, (cos, sin, *more) = blocks[:count], blocks[count:]
    rows = more.pop(0) if has_rows else None
    return ready_call(xs, cos, sin, rows, more, is_in_place, options)


def ready_call(
    xs: Sequence[Block],
    cos: Block,
    sin: Block,
    rows: Block | None,
    outs: Sequence[Block],
    is_in_place: tuple[bool, ...] | None,
    options: Options,
) -> Call | None:
    """The call for blocks that need no copy; None if there are others.

    Where `is_in_place` is None the outputs will be new and contiguous, and `outs` is empty.
    """
    index = () if rows is None else (rows,)
    if not all(block.shape and block.dtype in SIZES for block in (*xs, cos, sin, *index, *outs)):
        return None
    if is_in_place is None:
        is_in_place, outs = (False,) * len(xs), [contiguous(x) for x in xs]
    if cos != sin or cos.dtype != "float32" or xs[0].dtype not in loops.TAGS or len(xs) > 2:
        return None
    if not all(map(is_contiguous_last, (*xs, cos, *outs))) or len({x.dtype for x in xs}) > 1:
        return None
    if not all(map(is_injective, outs)):
        return None
    for x, y, same in zip(xs, outs, is_in_place, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype or (same and x.strides != y.strides):
            return None
    if rows is not None and (rows.dtype != "int64" or not is_contiguous(rows)):
        return None
    shape = None if rows is None else rows.shape
    geometry = geometry_of(tuple(x.shape for x in xs), cos.shape, shape, options)
    if geometry.layout != geometry.out_layout and any(is_in_place):
        return None
    call = prepare(tuple(xs), tuple(outs), is_in_place, cos, rows, geometry)
    return None if call.offsets else call


@lru_cache(maxsize=1024)
def prepare(
    xs: tuple[Block, ...],
    outs: tuple[Block, ...],
    is_in_place: tuple[bool, ...],
    table: Block,
    rows: Block | None,
    geometry: Geometry,
) -> Call:
    """Work out the loops for blocks of these forms; `is_in_place` where x and out are one address.

    With `rows`, they are walked along with x and say which row of `table` is read.
    """
    along, row_size = (table, 0) if rows is None else (rows, table.strides[0])
    offsets, steps = [], []
    for x, out, same in zip(xs, outs, is_in_place, strict=True):
        outer, plan = _walk(x, out, same, along, row_size, geometry)
        offsets.append(outer)
        steps.append(plan)
    if len(steps) == 1:
        steps.append(_NOTHING)
    reach = _reach(xs, outs, table, rows)
    return Call(
        loops.loop(xs[0].dtype),
        tuple(steps),
        tuple(offsets) if any(len(each) > 1 for each in offsets) or len(xs) > 2 else (),
        geometry.pairs,
        loops.MODES[geometry.layout, geometry.out_layout],
        -1 if geometry.conjugate else 1,
        sum(math.prod(x.shape) * SIZES[x.dtype] for x in xs),
        tuple(map(address, steps)),
        geometry.layout == geometry.out_layout
        and not any(is_in_place)
        and all(_is_aligned(out, geometry) for out in outs)
        and sum(math.prod(x.shape) * SIZES[x.dtype] for x in xs) >= STREAM_BYTES,
        0 if rows is None else math.prod(rows.shape),
        table.shape[0],
        reach,
        address(reach),
    )


def _reach(xs: Sequence[Block], outs: Sequence[Block], table: Block, rows: Block | None) -> Array:
    """Of q, k, cos, sin, rows, q_out, k_out, as `loops.is_safe` takes it."""
    absent = [(0, 0)]
    q_and_k, written = ([*map(extent, each[:2]), *absent][:2] for each in (xs, outs))
    index = absent if rows is None else [extent(rows)]
    return np.array([*q_and_k, extent(table), extent(table), *index, *written], np.int64)


def _is_aligned(out: Block, geometry: Geometry) -> bool:
    """Whether every vector that is stored starts on a cache line, if the block does."""
    offsets = (geometry.start * SIZES[out.dtype], geometry.pairs * SIZES[out.dtype])
    steps = (step for step, size in zip(out.strides, out.shape, strict=True) if size > 1)
    *rows, _ = steps if out.shape[-1] > 1 else (*steps, 0)
    return all(number % _LINE == 0 for number in (*offsets, *rows))


def run(
    call: Call,
    xs: Sequence[int],
    outs: Sequence[int],
    cos: int,
    sin: int,
    rows: int,
    *,
    is_checked: bool = False,
    is_apart: bool = False,
) -> bool:
    """Rotate the blocks at these addresses; what is there must outlive the call.

    Where it is checked, and a row number is outside of the table or an output may share memory with
    another operand, nothing is written and the answer is False. Such a call has no `offsets`.
    `is_apart` where it is known that no memory is shared.
    """
    mode = call.mode
    if call.can_stream and all([out % _LINE == 0 for out in outs]):
        mode += loops.STREAMING
    if not call.offsets:
        q, k = call.addresses
        job = array("q", (
            0, 1, q, xs[0], outs[0], k, xs[-1], outs[-1],
            cos, sin, rows, call.pairs, mode, call.sign,
            call.row_count, call.row_limit, 0 if is_apart else call.reach_address,
        ))  # fmt: skip
        if is_checked and not loops.is_safe()(job.buffer_info()[0]):
            return False
        threads.run(call.loop, call.size, job)
        return True
    blocks = zip(xs, outs, call.addresses[: len(xs)], call.offsets, strict=True)
    for x, out, steps, offsets in blocks:
        for source, target, row in offsets:
            table = (cos, sin, rows + row) if rows else (cos + row, sin + row, 0)
            threads.run(call.loop, call.size // len(offsets), array("q", (
                0, 1, steps, x + source, out + target, address(_NOTHING), 0, 0,
                *table, call.pairs, mode, call.sign, 0, 0, 0,
            )))  # fmt: skip
    return True


def _walk(
    x: Block, out: Block, is_in_place: bool, along: Block, row_size: int, geometry: Geometry
) -> tuple[tuple[tuple[int, int, int], ...], Array]:
    """Offsets of the axes beyond three, and the steps of the loops over the others."""
    head_dim, itemsize = x.shape[-1], SIZES[x.dtype]
    table = [
        0 if dim is None or along.shape[dim] == 1 else along.strides[dim] for dim in geometry.dims
    ]
    axes = _merged(list(zip(x.shape[:-1], x.strides[:-1], out.strides[:-1], table, strict=True)))
    inner = [(1, 0, 0, 0)] * (3 - len(axes)) + axes[-3:]
    offsets: tuple[tuple[int, int, int], ...] = ((0, 0, 0),)
    for size, *step in axes[:-3]:
        offsets = tuple(
            (o[0] + i * step[0], o[1] + i * step[1], o[2] + i * step[2])
            for o in offsets
            for i in range(size)
        )
    steps = np.zeros((), loops.STEPS)
    for axis, (size, *strides) in enumerate(inner):
        steps[f"size_{axis}"] = size
        for name, stride in zip(("x", "out", "table"), strides, strict=True):
            steps[f"{name}_{axis}"] = stride
    stop = geometry.start + 2 * geometry.pairs
    steps["row_size"], steps["start"] = row_size, geometry.start * itemsize
    if not (is_in_place and x.strides == out.strides):
        steps["head"] = geometry.start * itemsize
        steps["tail"], steps["tail_size"] = stop * itemsize, (head_dim - stop) * itemsize
    steps["ahead"] = _AHEAD if is_gapless(x) else 0
    steps["tile"] = max(1, _TILE_BYTES // (2 * geometry.pairs * SIZES["float32"]))
    return offsets, steps


def _merged(axes: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """The axes in the order of memory, those of size 1 dropped, those that continue one another
    joined: rows are then walked in long runs, and a table row serves all heads while it is hot."""
    if any(size == 0 for size, *_ in axes):
        return [(0, 0, 0, 0)]
    ordered = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -abs(axis[1]))
    merged: list[tuple[int, int, int, int]] = []
    for axis in ordered:
        size, *steps = axis
        if merged and all(a == size * b for a, b in zip(merged[-1][1:], steps, strict=True)):
            axis = (merged.pop()[0] * size, *axis[1:])
        merged.append(axis)
    return merged


def tables(
    positions: Array, turns: Array, scales: Array, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """cos and sin from turns, as `kernels/numpy.py` has them, in one pass and float64 inside."""
    positions = np.ascontiguousarray(positions, np.int64)
    turns = np.ascontiguousarray(turns, np.uint64)
    scales = np.ascontiguousarray(scales, np.float64)
    batch, seq = positions.shape[:2]
    pairs = turns.shape[-1]
    both = np.empty((2, batch, seq, pairs), np.float32)
    cos, sin = both
    per_pair = np.array(axes, np.int64)
    threads.run(loops.loop("table"), both.nbytes, array("q", (
        0, 1, address(positions), batch, seq, positions.shape[-1], address(per_pair) if axes else 0,
        address(turns), turns.strides[0] if len(turns) > 1 else 0,
        address(scales), scales.strides[0] if len(scales) > 1 else 0,
        int(backwards), pairs, address(cos), address(sin),
    )))  # fmt: skip
    return cos, sin


def _is_ready(array: Array) -> bool:
    return array.flags.aligned and is_contiguous_last(reference.block(array))


# positions are NumPy's, and what is rare is left to the reference
KERNEL = replace(reference.KERNEL, name="compiled loops", rotate=rotate, tables=tables)
