"""Compiled loops that re-rotate the keys in some blocks of a cache, in place.

One call is one job over the rows of all blocks, as in `loops.py`. 8-bit keys are rotated in float32
and rounded once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# mypy: disable-error-code="arg-type"
# compiled by Numba, from types mypy does not know

import functools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .. import Numbers as Array
from ..geometry import Geometry, Options, geometry_of
from ..memory import SIZES, Block, is_contiguous_last, is_injective
from ..numpy import address
from . import threads
from .compiled import compiled, inlined
from .jobs import tables, walk
from .llvm import load_int, record, take
from .loops import FORM, STEPS, TAGS, Loop, as_loop, whole_numbers
from .parts import share_of
from .rows import MODES, rotate_rows, table_rows
from .tiles import aligned, table_memory, tile_at, tiles_of

# the tags of 8-bit keys, as in `vectors.py`
_CODES = {"int8": np.int8(0), "float8_e4m3fn": np.uint8(0), "float8_e5m2": np.bool_(False)}
# `step` is the distance of two blocks in bytes, `table_step` that of their tables. `blocks` is the
# address of `count` block numbers in rising order, in which memory is read fastest; `rows` is the
# address of the number of each block's table
_MOVE = whole_numbers(
    *("threads", "parts", "number", "form", "mode", "x", "step"),
    *("cos", "sin", "table_step", "blocks", "rows", "count", "taken"),
)
_job, _form, _steps = map(record, (_MOVE, FORM, STEPS))
_TAKEN = _MOVE.itemsize - 8


@inlined
def _run(job, steps, at):
    """Return where run `at` begins: its first row and the offset of that row's table row.

    The third number is how many rows the run has.
    """
    runs = tiles_of(steps)
    block = at if runs == 1 else at // runs
    source = job.x + load_int(job.blocks + 8 * block) * job.step
    row = load_int(job.rows + 8 * block) * job.table_step
    if runs == 1:
        return source, row, steps.size_2
    i, j, k, count = tile_at(steps, at - block * runs)
    source += i * steps.x_0 + j * steps.x_1 + k * steps.x_2
    row += i * steps.table_0 + j * steps.table_1 + k * steps.table_2
    return source, row, count


def _move(tag: np.generic) -> Callable[[int], None]:
    def move(address):
        job = _job(address)
        form, steps = _form(job.form), _steps(job.form)
        part = take(address + _TAKEN)
        table, last_row = table_memory(steps, form.pairs), -1
        parts, runs = job.threads * job.parts, job.count * tiles_of(steps)
        while part < parts:
            first, last = share_of(parts, runs, part)
            following = _run(job, steps, first) if first < last else (0, 0, 0)
            for at in range(first, last):
                x, row, count = following
                following = _run(job, steps, min(at + 1, last - 1))
                if row != last_row:
                    tables, last_row = (job.cos, job.sin, 0, row), row
                    table_rows(tag, job.mode, form, steps, tables, count, aligned(table))
                ahead = following[0] - x
                rotate_rows(tag, job.mode, form, steps, x, x, aligned(table), count, ahead)
            part = take(address + _TAKEN)

    return move


@functools.cache
def _loop(dtype: str) -> Loop:
    return as_loop(_move((TAGS | _CODES)[dtype]))


class _BlockForm(NamedTuple):
    """How the rows of blocks of one form lie in memory; `form` is a record of FORM."""

    form: Array
    mode: int
    offsets: tuple[tuple[int, ...], ...]  # of x, of x as the output, and of the table
    size: int  # bytes of a block


def run(
    x: Block, place: int, table: Block, cos: int, sin: int, blocks: Array | None, options: Options
) -> bool:
    """Rotate blocks of a cache in place, as `numpy.move` does; return False if the loops cannot.

    `x` is the form of the cache at address `place`, `table` that of the tables at `cos` and `sin`.
    """
    if not (_is_moved(x) and table.dtype == "float32" and is_contiguous_last(table)):
        return False
    if blocks is None:  # all of x is one block
        geometry = geometry_of((x.shape,), table.shape, None, options)
        one, along, chosen, order = x, table, np.zeros(1, np.int64), np.zeros(1, np.int64)
    else:
        geometry = geometry_of(((len(blocks), *x.shape[1:]),), table.shape, None, options)
        geometry = geometry._replace(dims=tuple(range(len(x.shape) - 2)))
        one, along = _one_block(x), _one_block(table)
        is_rising = (blocks[1:] > blocks[:-1]).all()
        order = np.arange(len(blocks)) if is_rising else np.argsort(blocks)
        chosen = blocks[order]
    block_form = _form_of(one, along, geometry)
    _rotate_blocks(block_form, x, place, cos, sin, table.strides[0], chosen, order)
    return True


def run_shifted(
    x: Block, places: Sequence[int], blocks: Array, shift: Array, turns: Callable[[], Array],
    backwards: bool, options: Options,
) -> bool:  # fmt: skip
    """Rotate blocks of caches of form `x`, at the addresses `places`, by whole numbers of tokens.

    Blocks that move by the same number share a row of the tables. Returns False if the loops
    cannot, if `blocks` or `shift` are not signed integers, or if a block is not in the caches or
    given twice.
    """
    count = len(blocks) if blocks.ndim == 1 else 0
    if not (count and _is_moved(x) and is_injective(x) and shift.shape in ((), (count,))):
        return False
    if blocks.dtype.kind != "i" or shift.dtype.kind != "i":
        return False
    shifts = _writable(shift if shift.shape else np.full(count, shift))
    chosen, rows, distinct = np.empty((3, count), np.int64)
    number = _order(_writable(blocks), shifts, x.shape[0], chosen, rows, distinct)
    if number < 0:
        return False
    cos, sin = tables(distinct[None, :number], turns()[None], np.ones(1), (), backwards)
    block_form = _form_of_one_row(x._replace(shape=(1, *x.shape[1:])), cos.shape[-1], options)
    for place in places:
        _rotate_blocks(
            block_form, x, place, address(cos), address(sin), cos.strides[1], chosen, rows
        )
    return True


def _writable(numbers: Array) -> Array:
    """Return contiguous writable int64; Numba would compile `_order` again for other arrays."""
    numbers = np.ascontiguousarray(numbers, np.int64)
    return numbers if numbers.flags.writeable else numbers.copy()


@compiled()
def _order(blocks, shifts, size, chosen, rows, distinct):
    """Write blocks in rising order to `chosen`, and the shifts as `_number_shifts` does.

    Returns the number of `distinct` shifts, or -1 if a block is not one of `size` or given twice.
    """
    last, is_rising = -1, True
    for block in blocks:
        if block < 0 or block >= size:
            return -1
        is_rising &= block > last
        last = block
    if is_rising:
        for at in range(len(blocks)):
            chosen[at], rows[at] = blocks[at], shifts[at]
    else:
        place = np.full(size, -1, np.int32)
        for at in range(len(blocks)):
            if place[blocks[at]] >= 0:
                return -1
            place[blocks[at]] = at
        count = 0
        for block in range(size):
            if place[block] >= 0:
                chosen[count], rows[count] = block, shifts[place[block]]
                count += 1
    return _number_shifts(rows, distinct)


@inlined
def _number_shifts(rows, distinct):
    """Replace the shifts in `rows` by their index in `distinct`; return how many those are.

    Shifts over a wide range are all copied to `distinct`, also equal ones.
    """
    low = high = rows[0]
    for shift in rows:
        low, high = min(low, shift), max(high, shift)
    if high - low < 0 or high - low >= 4 * len(rows):  # below 0 after an overflow
        for at in range(len(rows)):
            distinct[at], rows[at] = rows[at], at
        return len(rows)
    number = np.full(high - low + 1, -1, np.int32)
    count = 0
    for at in range(len(rows)):
        shift = rows[at]
        if number[shift - low] < 0:
            number[shift - low], distinct[count] = count, shift
            count += 1
        rows[at] = number[shift - low]
    return count


def _is_moved(x: Block) -> bool:
    return (x.dtype in TAGS or x.dtype in _CODES) and is_contiguous_last(x)


@functools.lru_cache(maxsize=64)
def _form_of_one_row(x: Block, pairs: int, options: Options) -> _BlockForm:
    """Return the form of caches whose blocks, such as the one of x, each use one table row."""
    lead = len(x.shape) - 1
    table = Block((*[1] * lead, pairs), (*[0] * lead, SIZES["float32"]), "float32")
    geometry = geometry_of((x.shape,), table.shape, None, options)
    return _form_of(
        _one_block(x), _one_block(table), geometry._replace(dims=tuple(range(lead - 1)))
    )


def _one_block(blocks: Block) -> Block:
    """Return the form of each of these blocks."""
    return Block(blocks.shape[1:], blocks.strides[1:], blocks.dtype)


def _form_of(one: Block, along: Block, geometry: Geometry) -> _BlockForm:
    offsets, steps = walk(one, one, True, along, 0, geometry)
    form = np.zeros((), FORM)
    form["q"], form["pairs"], form["sign"] = steps, geometry.pairs, 1
    mode = MODES.index((geometry.layout, geometry.out_layout, False))
    return _BlockForm(form, mode, offsets, math.prod(one.shape) * SIZES[one.dtype])


def _rotate_blocks(
    block_form: _BlockForm,
    x: Block,
    place: int,
    cos: int,
    sin: int,
    table_step: int,
    chosen: Array,
    rows: Array,
) -> None:
    form, size = address(block_form.form), len(chosen) * block_form.size // len(block_form.offsets)
    for source, _, row in block_form.offsets:
        job = array("q", (
            1, 1, 0, form, block_form.mode, place + source, x.strides[0],
            cos + row, sin + row, table_step, address(chosen), address(rows), len(chosen), 0,
        ))  # fmt: skip
        threads.run(_loop(x.dtype), size, job)
