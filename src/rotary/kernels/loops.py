"""The compiled loops of the CPU kernel: over the rows of tensors, and over the rows of tables.

A call is one record of whole numbers: addresses, and strides in bytes. It is cut into parts, and
any number of threads may take parts of it until none is left; the bits do not depend on how many.
"""

import functools
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64, c_void_p
from typing import Any, NamedTuple

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
# What calls of one form share. `angles` is the address of ANGLES, where there are no tables, and
# `reach` where q, k, cos, sin, rows, q_out and k_out begin and end, counted from their addresses
FORM = np.dtype(
    [("q", STEPS), ("k", STEPS)]
    + [(name, np.int64) for name in ("pairs", "sign", "row_count", "row_limit", "angles")]
    + [("reach", np.int64, (7, 2))]
)
# A job begins with the part that is taken next, 0, and the number of parts, 1. `checks` is a sum of
ROWS, OVERLAP = 1, 2  # every row number is inside of the table; no output shares memory
ROTATION = _whole_numbers(
    *("next", "parts", "form", "mode", "q", "q_out", "k", "k_out", "cos", "sin", "rows", "checks")
)
# What tables of one form share; `lowest` is the first position that is not refused
ANGLES = _whole_numbers(
    *("batch", "seq", "num_axes", "axes", "turns", "turns_step", "scales", "scales_step"),
    *("backwards", "pairs", "lowest"),
)
TABLE = _whole_numbers("next", "parts", "angles", "positions", "cos", "sin")
_steps, _form, _rotation, _angles, _table = map(record, (STEPS, FORM, ROTATION, ANGLES, TABLE))
_K, _REACH = (FORM.fields[name][1] for name in ("k", "reach"))  # type: ignore[index]


@compiled()
def _rotate_rows(tag, form, mode, cos, sin, rows, steps, x, out, first, last):
    # the compiler would read a record again after every store
    pairs, sign, ahead, row_size = form.pairs, form.sign, steps.ahead, steps.row_size
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
def _rotate_part(tag, job, cos, sin, rows, part):
    form, q, k = _form(job.form), _steps(job.form), _steps(job.form + _K)
    q_rows = q.size_0 * q.size_1 * q.size_2
    total = q_rows + k.size_0 * k.size_1 * k.size_2
    first, last = total * part // job.parts, total * (part + 1) // job.parts
    for side in range(2):  # one call in a loop, or the compiler inlines the rotation twice
        steps, x, out, low, high = (
            (q, job.q, job.q_out, 0, q_rows) if side == 0 else (k, job.k, job.k_out, q_rows, total)
        )
        start, stop = max(first, low) - low, min(last, high) - low
        if start < stop:
            _rotate_rows(tag, form, job.mode, cos, sin, rows, steps, x, out, start, stop)


def _rotate(tag: np.generic) -> Callable[[int], None]:
    def rotate(address):
        job = _rotation(address)
        part = take(address)
        while part < job.parts:
            _rotate_part(tag, job, job.cos, job.sin, job.rows, part)
            part = take(address)

    return rotate


@compiled()
def _is_safe(job):
    form = _form(job.form)
    if job.checks & ROWS:
        for at in range(form.row_count):
            row = load_int(job.rows + 8 * at)
            if row < 0 or row >= form.row_limit:
                return False
    if job.checks & OVERLAP:
        operands = (job.q, job.k, job.cos, job.sin, job.rows, job.q_out, job.k_out)
        reach = job.form + _REACH
        for side in range(2):
            out, own = operands[5 + side], reach + 16 * (5 + side)
            low, high = out + load_int(own), out + load_int(own + 8)
            for other in range(5 + side):
                at, extent = operands[other], reach + 16 * other
                is_apart = at + load_int(extent) >= high or low >= at + load_int(extent + 8)
                if not is_apart and not (other == side and at == out):
                    return False
    return True


def _check(address):
    return int(_is_safe(_rotation(address)))


def _rotate_once(tag: np.generic) -> Callable[[int], int]:
    def rotate_once(address):
        job = _rotation(address)
        if not _is_safe(job):
            return 0
        _rotate_part(tag, job, job.cos, job.sin, job.rows, 0)
        return 1

    return rotate_once


def _turn_once(tag: np.generic) -> Callable[[int], int]:
    def turn_once(address):
        job = _rotation(address)
        angles = _angles(_form(job.form).angles)
        tokens = angles.batch * angles.seq
        for at in range(tokens * angles.num_axes):
            if load_int(job.cos + 8 * at) < angles.lowest:
                return 0
        if not _is_safe(job):
            return 0
        both = np.empty((2, tokens * angles.pairs), np.float32)
        cos, sin = both[0].ctypes.data, both[1].ctypes.data
        _table_rows(angles, job.cos, cos, sin, 0, tokens)
        _rotate_part(tag, job, cos, sin, 0, 0)
        return 1

    return turn_once


@compiled()
def _table_rows(form, positions, cos, sin, first, last):
    pairs = form.pairs
    spread = np.empty(pairs if form.axes else 0, np.int64)
    for row in range(first, last):
        batch = row // form.seq
        turns = form.turns + batch * form.turns_step
        scale = load_double(form.scales + batch * form.scales_step)
        at = row * pairs * 4
        if form.axes:
            for pair in range(pairs):
                axis = load_int(form.axes + 8 * pair)
                spread[pair] = load_int(positions + 8 * (row * form.num_axes + axis))
            table_row_axes(
                spread.ctypes.data, turns, pairs, scale, form.backwards, cos + at, sin + at
            )
        else:
            position = load_int(positions + 8 * row)
            table_row(position, turns, pairs, scale, form.backwards, cos + at, sin + at)


def _fill_table(address):
    job = _table(address)
    angles = _angles(job.angles)
    total = angles.batch * angles.seq
    part = take(address)
    while part < job.parts:
        first, last = total * part // job.parts, total * (part + 1) // job.parts
        _table_rows(angles, job.positions, job.cos, job.sin, first, last)
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
    """The checks of a ROTATION: 1 where every row number is inside of the table, and no output
    reaches into an operand other than its own x, nor into the output before."""
    return _whole_job(_check)


@functools.cache
def rotate_once(name: str) -> Callable[[bytes], int]:
    """A ROTATION of one part, for a key of TAGS; 0, and nothing written, where a check fails."""
    return _whole_job(_rotate_once(TAGS[name]))


@functools.cache
def turn_once(name: str) -> Callable[[bytes], int]:
    """The same from positions, whose address stands in the place of that of cos."""
    return _whole_job(_turn_once(TAGS[name]))


def _whole_job(function: Callable[[int], int]) -> Callable[[Any], int]:
    compiled_ = c_function(function, types.int64(types.int64))
    _alive.append(compiled_)
    return CFUNCTYPE(c_int64, c_void_p)(compiled_.address)


_alive: list[object] = []
