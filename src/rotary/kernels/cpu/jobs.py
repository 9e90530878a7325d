"""Arguments of the compiled loops, from the shapes, strides and types of arrays.

What depends on shapes, strides and types is computed once; each call then only adds addresses. So
NumPy arrays and torch tensors use the same code, and nothing is wrapped or copied.
"""

import math
import sysconfig
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np

if numba.config.DISABLE_JIT:  # then the plain formula rotates; `rotary doctor` says so
    raise ImportError("Numba compiles nothing while NUMBA_DISABLE_JIT is set")
if sysconfig.get_config_var("Py_GIL_DISABLED"):  # not tested there, so the formula rotates too
    raise ImportError("the compiled loops need a Python with a global lock")

from .. import Numbers as Array
from ..geometry import AngleOptions, Angles, Geometry, Options, geometry_of, geometry_of_arrays
from ..memory import (
    SIZES,
    Block,
    contiguous,
    corners,
    extent,
    is_contiguous,
    is_contiguous_last,
    is_injective,
    merged_axes,
)
from ..numpy import address
from . import built_in, caches, loops, threads
from .rows import MODES, STREAMING, line_size
from .vectors import CACHE_LINE

STREAM_BYTES = caches.size(3) // 2  # from this size on no cache holds both input and output
# of cos and sin in a tile, at least and at most; x, out and the next x also need the caches. L2 is
# slow where it is large, so a tile of the tables stays in L1. Where L2 is small, larger tiles are
# faster, since the processor fetches long runs ahead, but each part should have a few
TILE_BYTES, _TILES = 1 << (caches.size(1) // 4).bit_length() - 1, 4
MOST_TILE_BYTES = caches.size(2) // 16 if caches.size(2) < 1 << 20 else TILE_BYTES
CHECK_ROWS, CHECK_OVERLAP = loops.ROWS, loops.OVERLAP
_LONG_BYTES = 1 << 16  # a smaller job ends before another thread could get the GIL

# (q, q_out, k, k_out, cos, sin, rows, checks): addresses, and a sum of CHECK_... flags. A single x
# is passed as q and as k; other missing arrays are 0. Returns False, and writes nothing, if a check
# fails
Job = Callable[[int, int, int, int, int, int, int, int], bool]
# a record of whole numbers, and the arrays whose addresses it holds
AnglesRecord = tuple["array[int]", tuple[Array, ...]]


class Call(NamedTuple):
    """A prepared rotation: all but the addresses, whose memory must live until a job is done."""

    job: Job  # rotates all blocks, or only the first one if `blocks` is not empty
    size: int  # bytes of all blocks
    # if one job cannot rotate all: the job of each block, and the offsets in bytes of x, out and
    # table for every index of the axes beyond three
    blocks: tuple[tuple[Job, tuple[tuple[int, ...], ...]], ...] = ()


def ready_call(
    xs: Sequence[Block],
    tables: Sequence[Block],
    outs: Sequence[Block],
    is_in_place: tuple[bool, ...] | None,
    options: Options,
) -> Call | None:
    """Return the call for arrays of these forms; None if one of them would have to be copied.

    `tables` are cos, sin and perhaps row numbers. If `is_in_place` is None, the outputs will be new
    and contiguous, and `outs` is empty.
    """
    cos, sin, *index = tables
    if not all(block.shape for block in tables) or not _are_ready(xs, outs, is_in_place):
        return None
    if cos != sin or cos.dtype != "float32" or not is_contiguous_last(cos):
        return None
    if not all(rows.dtype == "int64" and is_contiguous(rows) for rows in index):
        return None
    rows = index[0] if index else None
    geometry = geometry_of_arrays(xs, cos, rows, options)
    return _one_job(xs, outs, is_in_place, cos, rows, geometry)


def ready_call_at(
    xs: Sequence[Block],
    tables: Sequence[Block],
    outs: Sequence[Block],
    is_in_place: tuple[bool, ...] | None,
    options: AngleOptions,
) -> Call | None:
    """Return the call that rotates few tokens at positions; None if it needs tables in memory.

    `tables` holds only the positions. The job returns False for one below `Angles.lowest`.
    """
    (positions,), angles = tables, options.angles_of(options.form)
    tokens = positions.shape[: len(positions.shape) - bool(angles.axes)]
    if len(tokens) not in (1, 2) or (len(tokens) == 2 and len(xs[0].shape) < 4):
        return None
    if angles.axes and positions.shape[-1] != max(angles.axes) + 1:
        return None
    if positions.dtype != "int64" or not is_contiguous(positions):
        return None
    size = sum(math.prod(x.shape) * SIZES.get(x.dtype, 0) for x in xs)
    if size >= threads.SERIAL_BYTES or not _are_ready(xs, outs, is_in_place):
        return None
    table = contiguous(Block((*tokens, len(angles.turns)), (), "float32"))
    shapes = tuple(x.shape for x in xs)
    fitted = geometry_of(shapes, table.shape[-2:], tokens, options.options)
    return _one_job(xs, outs, is_in_place, table, positions, fitted, angles)


def _are_ready(
    xs: Sequence[Block], outs: Sequence[Block], is_in_place: tuple[bool, ...] | None
) -> bool:
    """Return whether the loops can read and write arrays of these forms without copies."""
    blocks = *xs, *outs
    if len(xs) > 2 or len({block.dtype for block in blocks}) > 1 or xs[0].dtype not in loops.TAGS:
        return False
    if not all(block.shape and is_contiguous_last(block) for block in blocks):
        return False
    return is_in_place is None or all(
        is_injective(y) and x.shape == y.shape and (not same or x.strides == y.strides)
        for x, y, same in zip(xs, outs, is_in_place, strict=True)
    )


def _one_job(
    xs: Sequence[Block],
    outs: Sequence[Block],
    is_in_place: tuple[bool, ...] | None,
    table: Block,
    index: Block | None,
    geometry: Geometry,
    angles: Angles | None = None,
) -> Call | None:
    if is_in_place is None:
        is_in_place, outs = (False,) * len(xs), [contiguous(x) for x in xs]
    if geometry.layout != geometry.out_layout and any(is_in_place):
        return None
    call = call_of(tuple(xs), tuple(outs), is_in_place, table, index, geometry, angles)
    return None if call.blocks else call


@lru_cache(maxsize=1024)
def call_of(
    xs: tuple[Block, ...],
    outs: tuple[Block, ...],
    is_in_place: tuple[bool, ...],
    table: Block,
    index: Block | None,
    geometry: Geometry,
    angles: Angles | None = None,
) -> Call:
    """Prepare the loops for arrays of these forms; `is_in_place`: x and out have the same address.

    `index` holds the row of `table` for each token of x. With `angles` it holds the positions of a
    small call, and `table` is the form of the tables that the loop computes from them.
    """
    rows = None if angles else index
    along, row_size = (table, 0) if rows is None else (rows, table.strides[0])
    size = sum(math.prod(x.shape) * SIZES[x.dtype] for x in xs)
    walks = [
        walk(x, out, same, along, row_size, geometry)
        for x, out, same in zip(xs, outs, is_in_place, strict=True)
    ]
    can_stream = (
        geometry.layout == geometry.out_layout
        and not any(is_in_place)
        and all(is_aligned(out, geometry) for out in outs)
        and size >= STREAM_BYTES
    )

    def job_of(steps: Sequence[Array], size: int, reach: Array | int) -> Job:
        form = np.zeros((), loops.FORM)
        form["k"]["tile"] = 1
        form["share_rows"] = len(steps) == 2 and _can_share_rows(*steps)
        for name, each in zip(("q", "k"), steps, strict=False):
            form[name] = each
        form["pairs"], form["sign"] = geometry.pairs, -1 if geometry.conjugate else 1
        form["row_count"] = 0 if rows is None else math.prod(rows.shape)
        form["row_limit"], form["reach"] = table.shape[0], reach
        form["rotation"] = loops.rotation(xs[0].dtype)
        form["mode"] = MODES.index((geometry.layout, geometry.out_layout, False))
        form["aligned_mode"] = form["mode"] + STREAMING * can_stream
        if angles is not None:
            assert index is not None
            tokens = index.shape[: len(index.shape) - bool(angles.axes)]
            shape = *((1, *tokens)[-2:]), *index.shape[len(tokens) :]
            record = angles_record(
                shape, angles.turns[None], np.array([angles.scale]), angles.axes, False,
                angles.lowest,
            )  # fmt: skip
            return _small_job(loops.rotate_once_at, size, form, record)
        if size < threads.SERIAL_BYTES:
            return _small_job(loops.rotate_once, size, form)
        return _large_job(size, form)

    read = index if angles and index else table  # what lies at the addresses of cos and sin
    if len(xs) <= 2 and all(len(offsets) == 1 for offsets, _ in walks):
        return Call(job_of([steps for _, steps in walks], size, _reach(xs, outs, read, rows)), size)
    blocks = [(job_of([steps], size // len(offsets), 0), offsets) for offsets, steps in walks]
    return Call(blocks[0][0], size, tuple(blocks))


def _small_job(
    loop: Callable[..., int], size: int, form: Array, angles: AnglesRecord | None = None
) -> Job:
    """Return a job that is one call of a C function."""
    if angles is not None:
        form["angles"] = angles[0].buffer_info()[0]
    form["is_long"] = size >= _LONG_BYTES
    own = address(form), form, angles  # the job keeps the last two alive
    return built_in.built_in(loop)(own)


def _large_job(size: int, form: Array) -> Job:
    """Return a job on all threads; its stores bypass the caches if all of them are aligned."""
    loop, openmp = loops.as_loop(loops.rotate), threads.openmp()
    at, modes = address(form), (int(form["mode"]), int(form["aligned_mode"]))
    if openmp is not None:
        form["loop"], form["parallel"], form["number"] = loop.address, *openmp[1:]
        form["parts"] = threads.PARTS
        together = built_in.built_in(loops.rotate_together)((at, form))  # which keeps `form` alive
        return lambda *operands: together(*operands, threads.count())

    def job(
        q: int, q_out: int, k: int, k_out: int, cos: int, sin: int, rows: int, checks: int
    ) -> bool:
        mode = modes[q_out % CACHE_LINE == k_out % CACHE_LINE == 0]
        record = array("q", (1, 1, 0, at, mode, q, q_out, k, k_out, cos, sin, rows, checks, 0))
        if checks and not loops.as_check(loops.is_safe)(record.buffer_info()[0]):
            return False
        threads.run(loop, size, record)
        return True

    job.alive = form  # type: ignore[attr-defined]  # `at` is its address
    return job


def _reach(xs: Sequence[Block], outs: Sequence[Block], table: Block, rows: Block | None) -> Array:
    """Return where q, k, cos, sin, rows, q_out and k_out begin and end, for `loops.is_safe`."""
    absent = [(0, 0)]
    q_and_k, written = ([*map(extent, each[:2]), *absent][:2] for each in (xs, outs))
    index = absent if rows is None else [extent(rows)]
    return np.array([*q_and_k, extent(table), extent(table), *index, *written], np.int64)


def is_aligned(out: Block, geometry: Geometry) -> bool:
    """Return whether every stored vector starts on a cache line, provided that `out` does."""
    offsets = (geometry.start * SIZES[out.dtype], geometry.pairs * SIZES[out.dtype])
    steps = (step for step, size in zip(out.strides, out.shape, strict=True) if size > 1)
    *rows, _ = steps if out.shape[-1] > 1 else (*steps, 0)
    return all(number % CACHE_LINE == 0 for number in (*offsets, *rows))


def run(call: Call, places: Sequence[tuple[int, int]], cos: int, sin: int, rows: int) -> None:
    """Run a call without checks; `places` are the addresses (x, out) of each array."""
    if not call.blocks:
        call.job(*places[0], *places[-1], cos, sin, rows, 0)
        return
    for (x, out), (job, offsets) in zip(places, call.blocks, strict=True):
        for source, target, row in offsets:
            table = (cos, sin, rows + row) if rows else (cos + row, sin + row, 0)
            job(x + source, out + target, 0, 0, *table, 0)


def walk(
    x: Block, out: Block, is_in_place: bool, along: Block, row_size: int, geometry: Geometry
) -> tuple[tuple[tuple[int, ...], ...], Array]:
    """Return the offsets of the axes beyond three, and the loops.STEPS of the other axes."""
    head_dim, itemsize = x.shape[-1], SIZES[x.dtype]
    table = [
        0 if dim is None or along.shape[dim] == 1 else along.strides[dim] for dim in geometry.dims
    ]
    steps_ = x.strides[:-1], out.strides[:-1], table
    axes = axes_in_order(list(zip(x.shape[:-1], *steps_, strict=True)))
    inner = [(1, 0, 0, 0)] * (3 - len(axes)) + axes[-3:]
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
    *_, table_step = inner[-1]
    layouts = geometry.layout, geometry.out_layout
    steps["line"] = line_size(x.dtype, geometry.pairs, *layouts) if table_step else 0
    least, most = (
        max(1, size // (2 * geometry.pairs * SIZES["float32"]))
        for size in (TILE_BYTES, MOST_TILE_BYTES)
    )
    share = math.prod([size for size, *_ in inner]) // (_TILES * threads.PARTS * threads.count())
    # larger if all rows share one table row
    steps["tile"] = max(least, min(most, share)) if table_step else 4 * least
    tiles = -(-int(steps["size_2"]) // int(steps["tile"]))
    outer = 2 if steps["table_1"] else 1 if steps["table_0"] else 0  # axes along the table
    sizes = [int(steps[f"size_{axis}"]) for axis in range(2)]
    steps["groups"], steps["members"] = tiles * math.prod(sizes[:outer]), math.prod(sizes[outer:])
    return corners(axes[:-3], 3), steps


def _can_share_rows(q: Array, k: Array) -> bool:
    """Return whether q and k, both loops.STEPS, can be walked together, group by group.

    Then a group has as many rows of the table in both. If they begin elsewhere, which no usual
    memory order leads to, the loop reads them again.
    """
    along_rows = ("size_2", "tile") if q["table_2"] else ()
    return all([q[name] == k[name] for name in ("groups", "table_2", *along_rows)])


def axes_in_order(axes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return axes (size, strides ...) in memory order, contiguous ones merged, without size 1.

    Then runs of rows are long, and a table row serves all heads while it is in the cache.
    """
    if any(size == 0 for size, *_ in axes):
        return [(0,) * len(axes[0])]
    longer = [axis for axis in axes if axis[0] > 1]
    return merged_axes(sorted(longer, key=lambda axis: -abs(axis[1])))


def tables(
    positions: Array, turns: Array, scales: Array, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """Return cos and sin from turns, as `kernels/numpy.py` does, in one pass and in float64."""
    positions = np.ascontiguousarray(positions, np.int64)
    batch, seq = positions.shape[:2]
    cos, sin = both = np.empty((2, batch, seq, turns.shape[-1]), np.float32)
    angles, alive = angles_record(positions.shape, turns, scales, axes, backwards)
    addresses = angles.buffer_info()[0], *map(built_in.address, (positions, cos, sin))
    job = array("q", (1, 1, 0, *addresses, 0))
    threads.run(loops.as_loop(loops.fill_table), both.nbytes, job)
    del alive
    return cos, sin


def angles_record(
    shape: tuple[int, ...], turns: Array, scales: Array, axes: Sequence[int], backwards: bool,
    lowest: int = -(2**63),
) -> AnglesRecord:  # fmt: skip
    """Return loops.ANGLES for positions of this shape, and the arrays whose addresses it holds."""
    turns = np.ascontiguousarray(turns, np.uint64)
    scales = np.ascontiguousarray(scales, np.float64)
    per_pair = np.array(axes, np.int64)
    batch, seq, *num_axes = shape
    record = array("q", (
        batch, seq, *(num_axes or [1]), built_in.address(per_pair) if axes else 0,
        built_in.address(turns), turns.strides[0] if len(turns) > 1 else 0,
        built_in.address(scales), scales.strides[0] if len(scales) > 1 else 0,
        backwards, turns.shape[-1], lowest,
    ))  # fmt: skip
    return record, (turns, scales, per_pair)
