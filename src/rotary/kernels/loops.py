"""The compiled loops of the CPU kernel: over the rows of tensors, and over the rows of tables.

A call is one record of whole numbers: addresses, and strides in bytes. It is cut into parts, and
any number of threads may take parts of it until none is left; the bits do not depend on how many.
"""

import functools
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64, c_void_p
from typing import NamedTuple

import numpy as np
from numba import prange, types

from .compiled import c_function, compiled
from .llvm import (
    call_address,
    copy,
    fence,
    load_double,
    load_int,
    record,
    row_half,
    row_half_streaming,
    row_half_to_interleaved,
    row_interleaved,
    row_interleaved_streaming,
    row_interleaved_to_half,
    table_row,
    table_row_axes,
    take,
)

# the bits of an element are held by
TAGS = {
    "float32": np.float32(0),
    "float64": np.float64(0),
    "bfloat16": np.uint16(0),
    "float16": np.int16(0),
}
MODES = {
    ("half", "half"): 0,
    ("interleaved", "interleaved"): 1,
    ("half", "interleaved"): 2,
    ("interleaved", "half"): 3,
}
STREAMING = 4  # added to the modes 0 and 1: stores that go past the caches


def _whole_numbers(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


# How the rows of one tensor lie in memory; all in bytes but the sizes and the tile. Rows run
# through a tile of the last axis for every index of the other axes before the next tile, so that
# the table rows of one stay in a cache
STEPS = _whole_numbers(
    *("size_0", "size_1", "size_2", "x_0", "x_1", "x_2", "out_0", "out_1", "out_2"),
    *("table_0", "table_1", "table_2"),  # of the table, or of the row numbers
    "row_size",  # of the table, where there are row numbers
    *("start", "head"),  # where the rotated channels begin, and how much is copied before them
    *("tail", "tail_size"),  # what is copied after them
    "ahead",  # how far ahead memory is asked for
    "tile",
)
# Every record begins with the part that is taken next, 0, and the number of parts, 1
ROTATION = _whole_numbers(
    *("next", "parts", "q_steps", "q", "q_out", "k_steps", "k", "k_out"),
    *("cos", "sin", "rows", "pairs", "mode", "sign"),
    # for `is_safe`: how many row numbers there are, what they are below, and where the reach of
    # q, k, cos, sin, rows, q_out, k_out is: the first byte and the one after the last, from each
    *("row_count", "row_limit", "reach"),
)
TABLE = _whole_numbers(
    *("next", "parts", "positions", "batch", "seq", "num_axes", "axes", "turns", "turns_step"),
    *("scales", "scales_step", "backwards", "pairs", "cos", "sin"),
)
_steps, _rotation, _table = (record(fields) for fields in (STEPS, ROTATION, TABLE))


@compiled()
def _rotate_rows(tag, job, steps, x, out, first, last):
    # the compiler would read a record again after every store
    mode, pairs, sign, ahead = job.mode, job.pairs, job.sign, steps.ahead
    cos, sin, rows, row_size = job.cos, job.sin, job.rows, steps.row_size
    start, head, tail, tail_size = steps.start, steps.head, steps.tail, steps.tail_size
    x_step, out_step, table_step = steps.x_2, steps.out_2, steps.table_2
    outer = steps.size_0 * steps.size_1
    at = first
    while at < last:
        number, inside = at // (outer * steps.tile), at % (outer * steps.tile)
        height = min(steps.tile, steps.size_2 - number * steps.tile)
        i, j = inside // height // steps.size_1, inside // height % steps.size_1
        k = inside % height
        stop = min(last, at + height - k)
        k += number * steps.tile
        source = x + i * steps.x_0 + j * steps.x_1 + k * x_step
        target = out + i * steps.out_0 + j * steps.out_1 + k * out_step
        row = i * steps.table_0 + j * steps.table_1 + k * table_step
        while at < stop:
            offset = load_int(rows + row) * row_size if rows else row
            u, v, c, s = source + start, target + start, cos + offset, sin + offset
            if mode == 0:
                row_half(tag, u, v, c, s, pairs, sign, ahead)
            elif mode == 1:
                row_interleaved(tag, u, v, c, s, pairs, sign, ahead)
            elif mode == STREAMING:
                row_half_streaming(tag, u, v, c, s, pairs, sign, ahead)
            elif mode == STREAMING + 1:
                row_interleaved_streaming(tag, u, v, c, s, pairs, sign, ahead)
            elif mode == 2:
                row_half_to_interleaved(tag, u, v, c, s, pairs, sign, ahead)
            else:
                row_interleaved_to_half(tag, u, v, c, s, pairs, sign, ahead)
            if head:
                copy(target, source, head)
            if tail_size:
                copy(target + tail, source + tail, tail_size)
            source += x_step
            target += out_step
            row += table_step
            at += 1
    if mode >= STREAMING:
        fence()


@compiled()
def _rotate_part(tag, job, part):
    q, k = _steps(job.q_steps), _steps(job.k_steps)
    q_rows = q.size_0 * q.size_1 * q.size_2
    total = q_rows + k.size_0 * k.size_1 * k.size_2
    first, last = total * part // job.parts, total * (part + 1) // job.parts
    for side in range(2):  # one call in a loop, or the compiler inlines the rotation twice
        steps, x, out, low, high = (
            (q, job.q, job.q_out, 0, q_rows) if side == 0 else (k, job.k, job.k_out, q_rows, total)
        )
        start, stop = max(first, low) - low, min(last, high) - low
        if start < stop:
            _rotate_rows(tag, job, steps, x, out, start, stop)


def _rotate(tag: np.generic) -> Callable[[int], None]:
    def rotate(address):
        job = _rotation(address)
        part = take(address)
        while part < job.parts:
            _rotate_part(tag, job, part)
            part = take(address)

    return rotate


def _is_safe(address):
    job = _rotation(address)
    for at in range(job.row_count):
        row = load_int(job.rows + 8 * at)
        if row < 0 or row >= job.row_limit:
            return 0
    if job.reach:
        operands = (job.q, job.k, job.cos, job.sin, job.rows, job.q_out, job.k_out)
        for side in range(2):
            out, own = operands[5 + side], job.reach + 16 * (5 + side)
            low, high = out + load_int(own), out + load_int(own + 8)
            for other in range(5 + side):
                at, reach = operands[other], job.reach + 16 * other
                is_apart = at + load_int(reach) >= high or low >= at + load_int(reach + 8)
                if not is_apart and not (other == side and at == out):
                    return 0
    return 1


@compiled()
def _table_part(job, part):
    total, pairs = job.batch * job.seq, job.pairs
    spread = np.empty(pairs if job.axes else 0, np.int64)
    for row in range(total * part // job.parts, total * (part + 1) // job.parts):
        batch = row // job.seq
        turns = job.turns + batch * job.turns_step
        scale = load_double(job.scales + batch * job.scales_step)
        cos, sin = job.cos + row * pairs * 4, job.sin + row * pairs * 4
        if job.axes:
            for pair in range(pairs):
                axis = load_int(job.axes + 8 * pair)
                spread[pair] = load_int(job.positions + 8 * (row * job.num_axes + axis))
            table_row_axes(spread.ctypes.data, turns, pairs, scale, job.backwards, cos, sin)
        else:
            position = load_int(job.positions + 8 * row)
            table_row(position, turns, pairs, scale, job.backwards, cos, sin)


def _fill_table(address):
    job = _table(address)
    part = take(address)
    while part < job.parts:
        _table_part(job, part)
        part = take(address)


@compiled(parallel=True)
def on_numba_threads(function, job, threads):
    """Call a C function on one job from every thread of Numba's pool."""
    for _ in prange(threads):
        call_address(function, job)


class Loop(NamedTuple):
    """A compiled loop, `void (int64_t *job)`: called from Python, or by its address."""

    call: Callable[[int], None]
    address: int


@functools.cache
def loop(name: str) -> Loop:
    """The loop that does the parts of a job until none is left: "table", or a key of TAGS.

    Several threads may do one job together; each part is done once.
    """
    function = _fill_table if name == "table" else _rotate(TAGS[name])
    compiled_ = c_function(function, types.void(types.int64))
    _alive.append(compiled_)
    return Loop(CFUNCTYPE(None, c_void_p)(compiled_.address), compiled_.address)


@functools.cache
def is_safe() -> Callable[[int], int]:
    """The check of a rotation's record: 1 where every row number is inside of the table, and no
    output reaches into an operand other than its own x, nor into the output before."""
    compiled_ = c_function(_is_safe, types.int64(types.int64))
    _alive.append(compiled_)
    return CFUNCTYPE(c_int64, c_void_p)(compiled_.address)


_alive: list[object] = []
