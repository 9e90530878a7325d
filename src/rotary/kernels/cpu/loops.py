"""The compiled loops of the CPU kernel: over the rows of tensors, and over the rows of tables.

A call is one record of whole numbers: addresses, and strides in bytes. It is cut into parts, a few
for each thread; a thread that has finished its own takes parts of others. The bits of the result do
not depend on the number of threads.
"""

import functools
from collections import namedtuple
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64, c_void_p
from typing import NamedTuple

import numpy as np
from numba import prange, types
from numpy import empty

from .built_in import acquire_gil, new_bool, release_gil, tuple_item, whole_number
from .compiled import c_function, compiled, inlined
from .llvm import (
    call_address,
    fence,
    load_double,
    load_int,
    record,
    table_row,
    table_row_axes,
)
from .parts import next_part, own_number, share_of
from .rows import STREAMING, rotate_rows, table_rows
from .tiles import ahead_of, aligned, place_of, table_memory
from .vectors import CACHE_LINE

# a NumPy scalar for each dtype: in compiled code, its type stands for the dtype
TAGS = {
    "float32": np.float32(0),
    "float64": np.float64(0),
    "bfloat16": np.uint16(0),
    "float16": np.int16(0),
}


def whole_numbers(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


# How the rows of one tensor lie in memory; all in bytes but the sizes and the tile. The last axis
# is cut into tiles of rows. A tile is rotated for every index of the other axes before the next
# one, so that its rows of the table stay in the first cache: of all these tiles, each of `groups`
# has `members` that use the same rows of the table
STEPS = whole_numbers(
    *("size_0", "size_1", "size_2", "x_0", "x_1", "x_2", "out_0", "out_1", "out_2"),
    *("table_0", "table_1", "table_2"),  # of the table, or of the row numbers
    "row_size",  # of the table, where there are row numbers
    "line",  # of a table row as the loops read it, 0 if the rows of the last axis share one
    *("start", "head"),  # where the rotated channels begin, and how much is copied before them
    *("tail", "tail_size"),  # what is copied after them
    *("tile", "groups", "members"),
)
# What calls of one form share. `angles` is the address of a record ANGLES if there are no tables,
# `rotation` that of the code for the dtype. q and k that `share_rows` are walked together, a group
# of q and then that of k, and rows of the table that both use are read once. A job that `is_long`
# releases the GIL. `aligned_mode` is the mode for outputs that begin on cache lines. A job on all
# threads of OpenMP has the addresses of its `loop`, of GOMP_parallel and of the function that
# numbers threads, and the parts for each thread. `reach` is where q, k, cos, sin, rows, q_out and
# k_out begin and end, counted from their addresses
FORM = np.dtype(
    [("q", STEPS), ("k", STEPS)]
    + [(name, np.int64) for name in ("pairs", "sign", "row_count", "row_limit")]
    + [(name, np.int64) for name in ("angles", "rotation")]
    + [(name, np.int64) for name in ("share_rows", "is_long", "mode", "aligned_mode")]
    + [(name, np.int64) for name in ("loop", "parallel", "number", "parts")]
    + [("reach", np.int64, (7, 2))]
)
# A job begins with the number of threads, the number of parts for each thread, and the address of
# the C function that numbers threads, or 0. `threads.run` sets these three; before, they are 1, 1
# and 0. A job ends with counters that start at 0: the taken parts of each thread and, if there are
# several threads, the threads that have started. `checks` is a sum of
ROWS, OVERLAP = 1, 2  # every row number is inside of the table; no output overlaps another array
ROTATION = whole_numbers(
    *("threads", "parts", "number", "form", "mode", "q", "q_out", "k", "k_out"),
    *("cos", "sin", "rows", "checks", "taken"),
)
# What tables of one form share; `lowest` is the lowest position that is accepted
ANGLES = whole_numbers(
    *("batch", "seq", "num_axes", "axes", "turns", "turns_step", "scales", "scales_step"),
    *("backwards", "pairs", "lowest"),
)
TABLE = whole_numbers("threads", "parts", "number", "angles", "positions", "cos", "sin", "taken")
_steps, _form, _rotation, _angles, _table = map(record, (STEPS, FORM, ROTATION, ANGLES, TABLE))


def _offset(fields: np.dtype[np.void], name: str) -> int:
    return int(fields.fields[name][1])  # type: ignore[index]


_K, _REACH = _offset(FORM, "k"), _offset(FORM, "reach")
_ROTATION_TAKEN, _TABLE_TAKEN = _offset(ROTATION, "taken"), _offset(TABLE, "taken")


@inlined
def _rotate_tiles(tag, mode, form, steps, x, out, table, place, count, tiles):
    """Rotate tiles of `count` rows that use one table, the first at `place`; return the next."""
    i, j, k = place
    for _ in range(tiles):
        source = x + i * steps.x_0 + j * steps.x_1 + k * steps.x_2
        target = out + i * steps.out_0 + j * steps.out_1 + k * steps.out_2
        ahead = ahead_of(steps, i, j, (steps.x_0, steps.x_1, steps.x_2))
        rotate_rows(tag, mode, form, steps, source, target, table, count, ahead)
        i, j = (i, j + 1) if j + 1 < steps.size_1 else (i + 1, 0)
    return (i, j, k) if i < steps.size_0 else (0, 0, k + steps.tile)


def _rotation_of(tag: np.generic) -> Callable[..., None]:
    def rotate_part(form, mode, q, q_out, k, k_out, cos, sin, rows, parts, part):
        shared, of_q, of_k = _form(form), _steps(form), _steps(form + _K)
        for turn in range(1 if shared.share_rows else 2):  # q and k together, or first q, then k
            q_members = 0 if turn else of_q.members
            members = q_members + (of_k.members if turn or shared.share_rows else 0)
            at, last = share_of(parts, members * (of_k.groups if turn else of_q.groups), part)
            group, member = at // max(1, members), at % max(1, members)
            q_place = place_of(of_q, group * of_q.members + min(member, q_members))
            k_place = place_of(of_k, group * of_k.members + max(member - q_members, 0))
            table, last_row = table_memory(of_k if turn else of_q, shared.pairs), -1
            while at < last:
                is_q = member < q_members
                steps, x, out = (of_q, q, q_out) if is_q else (of_k, k, k_out)
                place = q_place if is_q else k_place
                row = place[0] * steps.table_0 + place[1] * steps.table_1 + place[2] * steps.table_2
                count = min(steps.tile, steps.size_2 - place[2])
                if row != last_row:  # -1 is no row: a number has four bytes
                    tables, last_row = (cos, sin, rows, row), row
                    table_rows(tag, mode, shared, steps, tables, count, aligned(table))
                tiles = min((q_members if is_q else members) - member, last - at)
                place = _rotate_tiles(
                    tag, mode, shared, steps, x, out, aligned(table), place, count, tiles
                )
                q_place, k_place = (place, k_place) if is_q else (q_place, place)
                at, member = at + tiles, member + tiles if member + tiles < members else 0
        if mode >= STREAMING:
            fence()

    return rotate_part


@inlined
def _rotate_part(job, cos, sin, rows, part):
    operands = (
        job.form, job.mode, job.q, job.q_out, job.k, job.k_out, cos, sin, rows,
        job.threads * job.parts, part,
    )  # fmt: skip
    call_address(_form(job.form).rotation, operands)


def rotate(address):
    """Rotate parts of a ROTATION until none is left, also together with other threads."""
    job, taken = _rotation(address), address + _ROTATION_TAKEN
    own = own_number(job, taken)
    part = next_part(job, taken, own)
    while part >= 0:
        _rotate_part(job, job.cos, job.sin, job.rows, part)
        part = next_part(job, taken, own)


@inlined
def are_inside(numbers, count, limit, lowest=0):
    """Return whether `count` whole numbers are all below `limit`, and none below `lowest`."""
    for at in range(count):
        number = load_int(numbers + 8 * at)
        if number < lowest or number >= limit:
            return False
    return True


@inlined
def are_apart(operands, first, count, reach):
    """Return whether no output overlaps another output, or an operand other than its own x.

    `operands` are addresses: first of `count` arrays x, from index `first` on of their outputs.
    `reach` is the address of two numbers for each: where it begins and ends, in bytes from its
    address.
    """
    for side in range(count):
        out, own = operands[first + side], reach + 16 * (first + side)
        low, high = out + load_int(own), out + load_int(own + 8)
        for other in range(first + side):
            at, extent = operands[other], reach + 16 * other
            is_apart = at + load_int(extent) >= high or low >= at + load_int(extent + 8)
            if not is_apart and not (other == side and at == out):
                return False
    return True


@inlined
def _is_safe(job):
    form = _form(job.form)
    if job.checks & ROWS and not are_inside(job.rows, form.row_count, form.row_limit):
        return False
    operands = (job.q, job.k, job.cos, job.sin, job.rows, job.q_out, job.k_out)
    return not job.checks & OVERLAP or are_apart(operands, 5, 2, job.form + _REACH)


def is_safe(address):
    """Return 1 if a ROTATION passes its `checks`.

    These are that every row number is inside of the table, and that no output overlaps another one
    or an operand other than its own x.
    """
    return int(_is_safe(_rotation(address)))


_Rotation = namedtuple("_Rotation", ROTATION.names)  # type: ignore[misc,arg-type]


@inlined
def _argument(arguments, index):
    """Return an argument of a call, a whole number."""
    return whole_number(load_int(arguments + 8 * index))


@inlined
def _job_of(own, arguments):
    """Return the ROTATION of a call (q, q_out, k, k_out, cos, sin, rows, checks), as one part.

    The called function is bound to `own`, a tuple (address of FORM, ...).
    """
    at = whole_number(tuple_item(own, 0))
    return _Rotation(
        1, 1, 0, at, _form(at).mode, _argument(arguments, 0), _argument(arguments, 1),
        _argument(arguments, 2), _argument(arguments, 3), _argument(arguments, 4),
        _argument(arguments, 5), _argument(arguments, 6), _argument(arguments, 7), 0,
    )  # fmt: skip


@inlined
def _rotate_alone(job, cos, sin, rows):
    """Run a whole job on this thread; release the GIL meanwhile if the job is long."""
    is_long, thread = _form(job.form).is_long, 0
    if is_long:
        thread = release_gil()
    _rotate_part(job, cos, sin, rows, 0)
    if is_long:
        acquire_gil(thread)


def rotate_once(own, arguments, count):
    """Rotate on the calling thread: a `jobs.Job`, bound to (address of its FORM, ...)."""
    job = _job_of(own, arguments)
    if not _is_safe(job):
        return new_bool(0)
    _rotate_alone(job, job.cos, job.sin, job.rows)
    return new_bool(1)


def rotate_together(own, arguments, count):
    """Rotate as `rotate_once`, on as many threads of OpenMP as the ninth argument says."""
    job, threads = _job_of(own, arguments), _argument(arguments, 8)
    if not _is_safe(job):
        return new_bool(0)
    form = _form(job.form)
    is_aligned = (job.q_out | job.k_out) % CACHE_LINE == 0
    memory = empty(len(job) + threads, np.int64)
    for index in range(len(memory)):
        memory[index] = job[index] if index < len(job) else 0
    shared = _rotation(memory.ctypes.data)
    shared.threads, shared.parts, shared.number = threads, form.parts, form.number
    shared.mode = form.aligned_mode if is_aligned else form.mode
    thread = release_gil()
    if threads == 1:
        call_address(form.loop, (memory.ctypes.data,))
    else:
        call_address(form.parallel, (form.loop, memory.ctypes.data, threads, 0))
    acquire_gil(thread)
    return new_bool(len(memory) >= 0)  # Numba frees an array after the last line that names it


def rotate_once_at(own, arguments, count):
    """Rotate as `rotate_once` at positions, whose address is passed in place of cos."""
    job = _job_of(own, arguments)
    angles = _angles(_form(job.form).angles)
    tokens = angles.batch * angles.seq
    for at in range(tokens * angles.num_axes):
        if load_int(job.cos + 8 * at) < angles.lowest:
            return new_bool(0)
    if not _is_safe(job):
        return new_bool(0)
    tables = empty(2 * tokens * angles.pairs, np.float32)
    cos = tables.ctypes.data
    sin = cos + tables.nbytes // 2
    _table_rows(angles, job.cos, cos, sin, 0, tokens)
    _rotate_alone(job, cos, sin, 0)
    return new_bool(len(tables) >= 0)


@inlined
def _table_rows(form, positions, cos, sin, first, last):
    pairs = form.pairs
    spread = empty(pairs if form.axes else 0, np.int64)
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


def fill_table(address):
    """Fill parts of a TABLE until none is left, also together with other threads."""
    job, taken = _table(address), address + _TABLE_TAKEN
    angles = _angles(job.angles)
    own = own_number(job, taken)
    part = next_part(job, taken, own)
    while part >= 0:
        first, last = share_of(job.threads * job.parts, angles.batch * angles.seq, part)
        _table_rows(angles, job.positions, job.cos, job.sin, first, last)
        part = next_part(job, taken, own)


@compiled(parallel=True)
def on_numba_threads(function, job, threads):
    """Call a C function on one job from every thread of Numba's pool."""
    for _ in prange(threads):
        call_address(function, (job,))


class Loop(NamedTuple):
    """A compiled loop, `void (int64_t *job)`: called from Python, or by its address."""

    call: Callable[[int], None]
    address: int


@functools.cache
def as_loop(function: Callable[[int], None]) -> Loop:
    """Compile a loop now, once in a process."""
    address = c_function(function, types.void(types.int64))
    return Loop(CFUNCTYPE(None, c_void_p)(address), address)


@functools.cache
def as_check(function: Callable[[int], int]) -> Callable[[int], int]:
    """Compile a function that returns a whole number, once in a process."""
    return CFUNCTYPE(c_int64, c_void_p)(c_function(function, types.int64(types.int64)))


@functools.cache
def rotation(name: str) -> int:
    """Return the address of the code that rotates, for a key of TAGS: the `rotation` of a FORM."""
    return c_function(_rotation_of(TAGS[name]), types.void(*[types.int64] * 11))
