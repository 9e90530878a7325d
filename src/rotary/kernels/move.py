"""The compiled loops of moved keys: over some blocks of a cache, in place.

One call is one job over the rows of all blocks, as in `loops.py`. 8-bit keys are widened a few rows
at a time, into memory that stays in the first cache, rotated there in float32, and rounded once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# mypy: disable-error-code="arg-type"
# compiled by Numba, from types mypy does not know

import functools
import math
from array import array
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_void_p

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy import empty

from . import Numbers as Array
from . import threads
from .compiled import c_function, compiled
from .geometry import Options, geometry_of
from .jobs import walk
from .llvm import MODES, load_int, record, rotate_rows, take
from .loops import FORM, STEPS, TAGS, Loop
from .memory import SIZES, Block
from .numpy import CODES, address

_ROWS = 32  # of 8-bit keys that are float32 at one time
# `step` is the distance of two blocks, `table_step` that of their tables; `blocks` are `count`
# numbers in rising order, as memory is read fastest, and `rows` say which table is that of each;
# `kind` is the place of the type among CODES
_MOVE = np.dtype([
    (name, np.int64)
    for name in ("threads", "parts", "number", "form", "mode", "kind", "x", "step", "cos", "sin",
                 "table_step", "blocks", "rows", "count", "taken")
])  # fmt: skip
_job, _form, _steps = map(record, (_MOVE, FORM, STEPS))
_TAKEN = _MOVE.itemsize - 8
_KEYS = STEPS.itemsize  # where a FORM has the steps of float32 keys


@intrinsic
def _pointer(context, place, tag):
    """The memory at an address, of numbers of the type of the tag."""

    def generate(context, b, signature, arguments):
        return b.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(tag)(types.int64, tag), generate


@intrinsic
def _bits(context, number):
    """The bits of a float32 as a whole number."""

    def generate(context, b, signature, arguments):
        return b.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@compiled()
def _run(job, steps, at):
    """Where a run of rows begins, its row of the table, and how many rows there are."""
    places = steps.size_0 * steps.size_1
    runs = places * ((steps.size_2 + steps.tile - 1) // steps.tile)
    block = at if runs == 1 else at // runs
    source = job.x + load_int(job.blocks + 8 * block) * job.step
    row = load_int(job.rows + 8 * block) * job.table_step
    if runs == 1:
        return source, row, steps.size_2
    run = at - block * runs
    i, j, k = run % places // steps.size_1, run % steps.size_1, run // places * steps.tile
    source += i * steps.x_0 + j * steps.x_1 + k * steps.x_2
    row += i * steps.table_0 + j * steps.table_1 + k * steps.table_2
    return source, row, min(steps.tile, steps.size_2 - k)


@compiled()
def _share(job, steps, part):
    """The first run of a part, and the one after its last."""
    tiles = (steps.size_2 + steps.tile - 1) // steps.tile
    total, parts = job.count * steps.size_0 * steps.size_1 * tiles, job.threads * job.parts
    return total * part // parts, total * (part + 1) // parts


def _move_floats(tag: np.generic) -> Callable[[int], None]:
    def move(address):
        job = _job(address)
        form, steps = _form(job.form), _steps(job.form)
        part = take(address + _TAKEN)
        while part < job.threads * job.parts:
            first, last = _share(job, steps, part)
            following = _run(job, steps, first) if first < last else (0, 0, 0)
            for at in range(first, last):
                x, row, count = following
                following = _run(job, steps, min(at + 1, last - 1))
                tables, ahead = (job.cos, job.sin, 0, row), following[0] - x
                rotate_rows(tag, job.mode, form, steps, x, x, tables, count, ahead)
            part = take(address + _TAKEN)

    return move


def _move_codes(address):
    job = _job(address)
    form, steps, keys_steps = _form(job.form), _steps(job.form), _steps(job.form + _KEYS)
    keys = empty(steps.tile * 2 * form.pairs, np.float32)
    place = keys.ctypes.data
    part = take(address + _TAKEN)
    while part < job.threads * job.parts:
        first, last = _share(job, steps, part)
        for at in range(first, last):
            x, row, count = _run(job, steps, at)
            _convert(job.kind, x + steps.start, steps.x_2, place, 2 * form.pairs, count, True)
            tables = job.cos, job.sin, 0, row
            rotate_rows(np.float32(0), job.mode, form, keys_steps, place, place, tables, count, 0)
            _convert(job.kind, x + steps.start, steps.x_2, place, 2 * form.pairs, count, False)
        part = take(address + _TAKEN)


@compiled()
def _convert(kind, codes, step, keys, width, rows, is_widening):
    """Rows of codes to rows of keys, or back."""
    for row in range(rows):
        code, key = codes + row * step, keys + 4 * width * row
        if kind == 0:
            if is_widening:
                _widen_int8(code, key, width)
            else:
                _narrow_int8(code, key, width)
        elif kind == 1:
            if is_widening:
                _widen_float8(code, key, width, np.int32(3), np.float32(2**-9), np.int32(0x7F))
            else:
                _narrow_float8(code, key, width, np.int32(3), np.float32(2**9), np.float32(448))
        elif is_widening:
            _widen_float8(code, key, width, np.int32(2), np.float32(2**-16), np.int32(0x7C))
        else:
            _narrow_float8(code, key, width, np.int32(2), np.float32(2**16), np.float32(57344))


@compiled()
def _widen_int8(codes, keys, count):
    narrow, wide = (
        carray(_pointer(codes, np.int8(0)), count),
        carray(_pointer(keys, np.float32(0)), count),
    )
    for at in range(count):
        wide[at] = narrow[at]


@compiled()
def _narrow_int8(codes, keys, count):
    narrow, wide = (
        carray(_pointer(codes, np.int8(0)), count),
        carray(_pointer(keys, np.float32(0)), count),
    )
    low, high = np.float32(-128), np.float32(127)
    for at in range(count):
        number = wide[at]
        number = low if number < low else number
        number = high if number > high else number
        narrow[at] = np.int8(np.int32(np.rint(number)))


@compiled()
def _widen_float8(codes, keys, count, mantissa, smallest, special):
    """A code is a sign, an exponent and so many bits of a mantissa; from `special` on NaN or inf.

    `smallest` is the smallest number above zero: codes below the first exponent count it.
    """
    narrow, wide = (
        carray(_pointer(codes, np.uint8(0)), count),
        carray(_pointer(keys, np.int32(0)), count),
    )
    shift = np.int32(23) - mantissa
    bias = (np.int32(127) - np.int32(1 << (6 - mantissa)) + np.int32(1)) << np.int32(23)
    for at in range(count):
        code = np.int32(narrow[at])
        size = np.int32(code & np.int32(0x7F))
        bits = np.int32((size << shift) + bias)
        counted = _bits(np.float32(size) * smallest)
        bits = counted if size < np.int32(1 << mantissa) else bits
        bits = np.int32((size << shift) | np.int32(0x7F800000)) if size >= special else bits
        wide[at] = np.int32(bits | np.int32((code & np.int32(0x80)) << np.int32(24)))


@compiled()
def _narrow_float8(codes, keys, count, mantissa, per_smallest, largest):
    """The nearest code, of two the even one, and the largest code beyond it; NaN stays NaN."""
    narrow, wide, numbers = (
        carray(_pointer(codes, np.uint8(0)), count),
        carray(_pointer(keys, np.int32(0)), count),
        carray(_pointer(keys, np.float32(0)), count),
    )
    shift = np.int32(23) - mantissa
    bias = (np.int32(127) - np.int32(1 << (6 - mantissa)) + np.int32(1)) << mantissa
    half, one = np.int32((1 << (shift - 1)) - 1), np.int32(1)
    for at in range(count):
        number = abs(numbers[at])
        number = largest if number > largest else number
        bits = _bits(number)
        nearest = np.int32(((bits + half + ((bits >> shift) & one)) >> shift) - bias)
        counted = np.int32(np.rint(number * per_smallest))
        size = counted if number * per_smallest < np.float32(1 << mantissa) else nearest
        size = np.int32(0x7F) if number != number else size
        narrow[at] = np.uint8(size | ((wide[at] >> np.int32(24)) & np.int32(0x80)))


@functools.cache
def _loop(dtype: str) -> Loop:
    function = _move_codes if dtype in CODES else _move_floats(TAGS[dtype])
    compiled_ = c_function(function, types.void(types.int64))
    _alive.append(compiled_)
    return Loop(CFUNCTYPE(None, c_void_p)(compiled_.address), compiled_.address)


_alive: list[object] = []


def run(
    x: Block, place: int, table: Block, cos: int, sin: int, blocks: Array | None, options: Options
) -> bool:
    """Turn blocks of a cache in place, as `numpy.move` does; False where it has to.

    `x` and `table` are the forms of the cache and of both tables, which lie at these addresses.
    """
    is_dense = all(
        block.shape[-1] == 1 or block.strides[-1] == SIZES.get(block.dtype) for block in (x, table)
    )
    if not (is_dense and (x.dtype in TAGS or x.dtype in CODES) and table.dtype == "float32"):
        return False
    if blocks is None:  # all of x is one block
        geometry = geometry_of((x.shape,), table.shape, None, options)
        one, along, chosen, order = x, table, np.zeros(1, np.int64), np.zeros(1, np.int64)
    else:
        geometry = geometry_of(((len(blocks), *x.shape[1:]),), table.shape, None, options)
        geometry = geometry._replace(dims=tuple(range(len(x.shape) - 2)))
        one, along = (Block(b.shape[1:], b.strides[1:], b.dtype) for b in (x, table))
        order = np.argsort(blocks)
        chosen = blocks[order]
    offsets, steps = walk(one, one, True, along, 0, geometry)
    form = np.zeros((), FORM)
    form["q"], form["pairs"], form["sign"] = steps, geometry.pairs, 1
    if x.dtype in CODES:
        form["q"]["tile"] = min(int(steps["tile"]), _ROWS)
        form["k"]["x_2"] = form["k"]["out_2"] = 2 * geometry.pairs * SIZES["float32"]
        form["k"]["table_2"] = steps["table_2"]
    size = len(chosen) * math.prod(one.shape) * SIZES[x.dtype]
    mode = MODES.index((geometry.layout, geometry.out_layout, False))
    kind = list(CODES).index(x.dtype) if x.dtype in CODES else 0
    for source, _, row in offsets:
        job = array("q", (
            1, 1, 0, address(form), mode, kind, place + source, x.strides[0],
            cos + row, sin + row, table.strides[0], address(chosen), address(order), len(chosen), 0,
        ))  # fmt: skip
        threads.run(_loop(x.dtype), size // len(offsets), job)
    return True
