"""Compiled loops of the CPU kernel: rows of a tensor, and rows of a table, as vector instructions.

The inner loops are written as LLVM vector code and not left to the auto-vectoriser. It would have
to prove that six streams do not overlap, and cannot when the rotation is in place; here every load
of a pair comes before its stores by construction, so the same code serves both. A fused
multiply-add is never used in the rotation: products and sums are rounded one by one, as in the
plain formula, so the bits do not depend on the machine or on where a chunk ends.

Tensors come in as addresses and strides in bytes. The element type is told by a tag, a NumPy
scalar of the type that holds the bits: float32, float64, uint16 for bfloat16, int16 for float16.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import c_function, compiled

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

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_BYTES = {_I16: 2, _F16: 2, _I32: 4, _F32: 4, _F64: 8}
# tag -> (type in memory, bytes, type of the arithmetic, lanes of the vectors): the widest fills a
# cache line of 64 bytes with each store
_ELEMENTS = {
    types.float32: (_F32, 4, _F32, (16,)),
    types.float64: (_F64, 8, _F64, (8,)),
    types.uint16: (_I16, 2, _F32, (32, 16)),
    types.int16: (_F16, 2, _F32, (32, 16)),
}


def _vector(element: ir.Type, lanes: int) -> ir.Type:
    return ir.VectorType(element, lanes) if lanes > 1 else element


def _constant(element: ir.Type, lanes: int, value: float) -> ir.Constant:
    return ir.Constant(_vector(element, lanes), [value] * lanes if lanes > 1 else value)


def _splat(b: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    if lanes == 1:
        return value
    blank = ir.Constant(_vector(value.type, lanes), ir.Undefined)
    first = b.insert_element(blank, value, _constant(_I32, 1, 0))
    return b.shuffle_vector(first, blank, _constant(_I32, lanes, 0))


def _pick(b: ir.IRBuilder, one: ir.Value, other: ir.Value, lanes: list[int]) -> ir.Value:
    return b.shuffle_vector(one, other, ir.Constant(_vector(_I32, len(lanes)), lanes))


def _address(b: ir.IRBuilder, start: ir.Value, index: ir.Value, size: int) -> ir.Value:
    return b.add(start, b.mul(index, _constant(_I64, 1, size)))


def _load(b: ir.IRBuilder, element: ir.Type, size: int, address: ir.Value, lanes: int) -> ir.Value:
    pointer = b.inttoptr(address, _vector(element, lanes).as_pointer())
    return b.load(pointer, align=size)


def _load_wide(b: ir.IRBuilder, tag: types.Type, address: ir.Value, lanes: int) -> ir.Value:
    """`lanes` elements in the type of the arithmetic."""
    element, size, _, _ = _ELEMENTS[tag]
    return _widened(b, tag, _load(b, element, size, address, lanes), lanes)


def _widened(b: ir.IRBuilder, tag: types.Type, value: ir.Value, lanes: int) -> ir.Value:
    if tag is types.uint16:  # bfloat16 is the upper half of a float32
        value = b.shl(b.zext(value, _vector(_I32, lanes)), _constant(_I32, lanes, 16))
        return b.bitcast(value, _vector(_F32, lanes))
    return b.fpext(value, _vector(_F32, lanes)) if tag is types.int16 else value


def _store_wide(
    b: ir.IRBuilder, tag: types.Type, address: ir.Value, value: ir.Value, streaming: bool = False
) -> None:
    """Store, rounded to nearest even; a NaN stays a NaN.

    `streaming` goes past the caches, and needs an address that is a multiple of the vector's size.
    """
    lanes = value.type.count if isinstance(value.type, ir.VectorType) else 1
    _store(b, _narrowed(b, tag, value, lanes), _ELEMENTS[tag][1], address, streaming)


def _narrowed(b: ir.IRBuilder, tag: types.Type, value: ir.Value, lanes: int) -> ir.Value:
    element = _ELEMENTS[tag][0]
    if tag is types.int16:
        return b.fptrunc(value, _vector(element, lanes))
    if tag is not types.uint16:
        return value
    bits = _bfloat16_above(b, value, lanes)
    if lanes == 1:
        return b.trunc(b.lshr(bits, _constant(_I32, 1, 16)), element)
    # one shuffle of two vectors takes the upper halves of both
    halves = b.bitcast(bits, _vector(element, 2 * lanes))
    return _pick(b, halves, halves, list(range(1, 2 * lanes, 2)))


def _store(b: ir.IRBuilder, value: ir.Value, size: int, address: ir.Value, streaming: bool) -> None:
    pointer = b.inttoptr(address, value.type.as_pointer())
    if not streaming or not isinstance(value.type, ir.VectorType):
        b.store(value, pointer, align=size)
        return
    hint = b.module.add_metadata([_constant(_I32, 1, 1)])
    whole = value.type.count * _BYTES[value.type.element]
    b.store(value, pointer, align=min(whole, 64)).set_metadata("nontemporal", hint)


def _bfloat16_above(b: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """The bits of a float32, rounded so that the upper half is a bfloat16; the lower half is lost."""

    def constant(number: int) -> ir.Constant:
        return _constant(_I32, lanes, number)

    bits = b.bitcast(value, _vector(_I32, lanes))
    is_even = b.icmp_unsigned("==", b.and_(bits, constant(0x10000)), constant(0))
    rounded = b.add(bits, b.select(is_even, constant(0x7FFF), constant(0x8000)))
    quiet = b.or_(bits, constant(0x400000))
    return b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)


@contextmanager
def _loop(b: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int) -> Iterator[ir.Value]:
    """`for index in range(start, stop, step)`: the body is built inside the with block."""
    before = b.block
    head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(_I64)
    index.add_incoming(start, before)
    b.cbranch(b.icmp_signed("<", index, stop), body, after)
    b.position_at_end(body)
    yield index
    index.add_incoming(b.add(index, _constant(_I64, 1, step)), b.block)
    b.branch(head)
    b.position_at_end(after)


def _each(
    b: ir.IRBuilder, count: ir.Value, widths: tuple[int, ...], body: Callable[[ir.Value, int], None]
) -> None:
    """`body(index, lanes)` in the widest vectors that fit, then in narrower ones, then one by one."""
    done: ir.Value = _constant(_I64, 1, 0)
    for lanes in (*widths, 1):
        whole = b.and_(count, _constant(_I64, 1, -lanes))
        with _loop(b, done, whole, lanes) as index:
            body(index, lanes)
        done = whole


def _prefetch(b: ir.IRBuilder, address: ir.Value, ahead: ir.Value, lanes: int) -> None:
    """Ask for a cache line that is read a few rows later."""
    if lanes == 1:
        return
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    pointer = b.inttoptr(b.add(address, ahead), cgutils.voidptr_t)
    for_reading, keep, data = (_constant(_I32, 1, number) for number in (0, 3, 1))
    b.call(prefetch, [pointer, for_reading, keep, data])


def _load_pairs(
    b: ir.IRBuilder, tag: types.Type, row: ir.Value, index: ir.Value, pairs: ir.Value, lanes: int,
    ahead: ir.Value, *, interleaved: bool,
) -> tuple[ir.Value, ir.Value]:  # fmt: skip
    size = _ELEMENTS[tag][1]
    if not interleaved:
        first = _address(b, row, index, size)
        _prefetch(b, first, ahead, lanes)
        _prefetch(b, _address(b, first, pairs, size), ahead, lanes)
        return _load_wide(b, tag, first, lanes), _load_wide(
            b, tag, _address(b, first, pairs, size), lanes
        )
    both = _address(b, row, index, 2 * size)
    _prefetch(b, both, ahead, lanes)
    _prefetch(b, b.add(both, _constant(_I64, 1, 64)), ahead, lanes)
    if tag is types.uint16:  # a pair is a word of 32 bits
        words = _load(b, _I32, size, both, lanes)
        lower, upper = b.shl(words, _constant(_I32, lanes, 16)), _upper(b, words, lanes)
        return b.bitcast(lower, _vector(_F32, lanes)), b.bitcast(upper, _vector(_F32, lanes))
    if lanes == 1:
        second = _address(b, both, _constant(_I64, 1, 1), size)
        return _load_wide(b, tag, both, 1), _load_wide(b, tag, second, 1)
    block = _load(b, _ELEMENTS[tag][0], size, both, 2 * lanes)
    first, second = (
        _widened(b, tag, _pick(b, block, block, list(range(side, 2 * lanes, 2))), lanes)
        for side in (0, 1)
    )
    return first, second


def _store_pairs(
    b: ir.IRBuilder, tag: types.Type, row: ir.Value, index: ir.Value, pairs: ir.Value, lanes: int,
    one: ir.Value, other: ir.Value, *, interleaved: bool, streaming: bool,
) -> None:  # fmt: skip
    size = _ELEMENTS[tag][1]
    if not interleaved:
        first = _address(b, row, index, size)
        _store_wide(b, tag, first, one, streaming)
        _store_wide(b, tag, _address(b, first, pairs, size), other, streaming)
        return
    both = _address(b, row, index, 2 * size)
    if tag is types.uint16:
        lower = b.lshr(_bfloat16_above(b, one, lanes), _constant(_I32, lanes, 16))
        upper = _upper(b, _bfloat16_above(b, other, lanes), lanes)
        _store(b, b.or_(lower, upper), size, both, streaming)
        return
    if lanes == 1:
        _store_wide(b, tag, both, one)
        _store_wide(b, tag, _address(b, both, _constant(_I64, 1, 1), size), other)
        return
    order = [lane + side * lanes for lane in range(lanes) for side in (0, 1)]
    one, other = (_narrowed(b, tag, value, lanes) for value in (one, other))
    _store(b, _pick(b, one, other, order), size, both, streaming)


def _upper(b: ir.IRBuilder, words: ir.Value, lanes: int) -> ir.Value:
    return b.and_(words, _constant(_I32, lanes, 0xFFFF0000))


def _rotation(read_interleaved: bool, write_interleaved: bool, streaming: bool = False) -> Any:
    """The rotation of one row: (tag, x, out, cos, sin, pairs, sign, ahead) -> None.

    The row so many bytes `ahead` is asked for from memory.
    """

    @intrinsic
    def rotate_row(context, tag, x, out, cos, sin, pairs, sign, ahead):
        def generate(context, b, signature, arguments):
            _, x, out, cos, sin, pairs, sign, ahead = arguments
            _, _, wide, widths = _ELEMENTS[tag]
            sign = b.sitofp(sign, wide)

            def rotate(index: ir.Value, lanes: int) -> None:
                offset = _address(b, cos, index, 4), _address(b, sin, index, 4)
                c, s = (_load(b, _F32, 4, address, lanes) for address in offset)
                if wide is _F64:
                    c, s = (b.fpext(value, _vector(_F64, lanes)) for value in (c, s))
                s = b.fmul(s, _splat(b, sign, lanes))
                u, v = _load_pairs(
                    b, tag, x, index, pairs, lanes, ahead, interleaved=read_interleaved
                )
                one = b.fsub(b.fmul(u, c), b.fmul(v, s))
                other = b.fadd(b.fmul(v, c), b.fmul(u, s))
                _store_pairs(
                    b,
                    tag,
                    out,
                    index,
                    pairs,
                    lanes,
                    one,
                    other,
                    interleaved=write_interleaved,
                    streaming=streaming,
                )

            _each(b, pairs, widths, rotate)
            return context.get_dummy_value()

        return types.void(tag, *(types.int64,) * 7), generate

    return rotate_row


_row_half = _rotation(False, False)
_row_half_streaming = _rotation(False, False, streaming=True)
_row_interleaved_streaming = _rotation(True, True, streaming=True)
_row_interleaved = _rotation(True, True)
_row_half_to_interleaved = _rotation(False, True)
_row_interleaved_to_half = _rotation(True, False)


@intrinsic
def _copy(context, target, source, size):
    def generate(context, b, signature, arguments):
        target, source, size = arguments
        pointers = (b.inttoptr(address, cgutils.voidptr_t) for address in (target, source))
        cgutils.raw_memcpy(b, *pointers, size, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _at(context, address, index):
    """The int64 with this index behind an address."""

    def generate(context, b, signature, arguments):
        address, index = arguments
        return _load(b, _I64, 8, _address(b, address, index, 8), 1)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _fence(context):
    """Make streaming stores visible before anything that follows."""

    def generate(context, b, signature, arguments):
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _take(context, address):
    """The int64 at an address, which then is one more: atomic, so every thread takes another."""

    def generate(context, b, signature, arguments):
        pointer = b.inttoptr(arguments[0], _I64.as_pointer())
        return b.atomic_rmw("add", pointer, _constant(_I64, 1, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def _load_double(context, address):
    def generate(context, b, signature, arguments):
        return _load(b, _F64, 8, arguments[0], 1)

    return types.float64(types.int64), generate


# The strides of one tensor, filled in by cpu.py: index -> meaning, all in bytes but the sizes
# 0-2 sizes, 3-5 strides of x, 6-8 of out, 9-11 of the table or of the row numbers, 12 of a row
# number's table row, 13 offset of the first rotated channel, 14 bytes copied before it,
# 15 offset and 16 size of what is copied after the slice, 17 how far ahead memory is asked for,
# 18 how many indices of the last axis make a tile. Rows run through a tile for every index of the
# other axes before the next tile, so that the table rows of one stay in a cache
PLAN = 19


@compiled()
def _rotate_range(tag, plan, x, out, cos, sin, rows, pairs, mode, sign, first, last):
    size_1, size_2 = _at(plan, 1), _at(plan, 2)
    x_0, x_1, x_2 = _at(plan, 3), _at(plan, 4), _at(plan, 5)
    out_0, out_1, out_2 = _at(plan, 6), _at(plan, 7), _at(plan, 8)
    table_0, table_1, table_2 = _at(plan, 9), _at(plan, 10), _at(plan, 11)
    row_size, start, head = _at(plan, 12), _at(plan, 13), _at(plan, 14)
    tail, tail_size, ahead = _at(plan, 15), _at(plan, 16), _at(plan, 17)
    tile, outer = _at(plan, 18), _at(plan, 0) * size_1
    at = first
    while at < last:
        number, inside = at // (outer * tile), at % (outer * tile)
        height = min(tile, size_2 - number * tile)
        i, j, k = inside // height // size_1, inside // height % size_1, inside % height
        stop = min(last, at + height - k)
        k += number * tile
        source = x + i * x_0 + j * x_1 + k * x_2
        target = out + i * out_0 + j * out_1 + k * out_2
        step = i * table_0 + j * table_1 + k * table_2
        while at < stop:
            offset = _at(rows + step, 0) * row_size if rows else step
            c, s = cos + offset, sin + offset
            if mode == 0:
                _row_half(tag, source + start, target + start, c, s, pairs, sign, ahead)
            elif mode == 1:
                _row_interleaved(tag, source + start, target + start, c, s, pairs, sign, ahead)
            elif mode == STREAMING:
                _row_half_streaming(tag, source + start, target + start, c, s, pairs, sign, ahead)
            elif mode == STREAMING + 1:
                _row_interleaved_streaming(
                    tag, source + start, target + start, c, s, pairs, sign, ahead
                )
            elif mode == 2:
                _row_half_to_interleaved(
                    tag, source + start, target + start, c, s, pairs, sign, ahead
                )
            else:
                _row_interleaved_to_half(
                    tag, source + start, target + start, c, s, pairs, sign, ahead
                )
            if head:
                _copy(target, source, head)
            if tail_size:
                _copy(target + tail, source + tail, tail_size)
            source += x_2
            target += out_2
            step += table_2
            at += 1
    if mode >= STREAMING:
        _fence()


@compiled()
def _rotate_share(tag, q_plan, q, q_out, k_plan, k, k_out, cos, sin, rows, pairs, mode, sign, part, parts):  # fmt: skip
    q_rows = _at(q_plan, 0) * _at(q_plan, 1) * _at(q_plan, 2)
    total = q_rows + _at(k_plan, 0) * _at(k_plan, 1) * _at(k_plan, 2)
    first, last = total * part // parts, total * (part + 1) // parts
    for side in range(2):  # one call in a loop, or the compiler inlines the rotation twice
        plan, x, out, low, high = (q_plan, q, q_out, 0, q_rows) if side == 0 else (k_plan, k, k_out, q_rows, total)  # fmt: skip
        start, stop = max(first, low) - low, min(last, high) - low
        if start < stop:
            _rotate_range(tag, plan, x, out, cos, sin, rows, pairs, mode, sign, start, stop)


@compiled()
def rotate_serial(tag, q_plan, q, q_out, k_plan, k, k_out, cos, sin, rows, pairs, mode, sign, parts):  # fmt: skip
    """Rotate every row of two tensors, on the calling thread."""
    _rotate_share(tag, q_plan, q, q_out, k_plan, k, k_out, cos, sin, rows, pairs, mode, sign, 0, 1)


@compiled(parallel=True)
def rotate_parallel(tag, q_plan, q, q_out, k_plan, k, k_out, cos, sin, rows, pairs, mode, sign, parts):  # fmt: skip
    """The same in `parts` shares on Numba's threads; the bits do not depend on `parts`."""
    for part in prange(parts):
        _rotate_share(tag, q_plan, q, q_out, k_plan, k, k_out, cos, sin, rows, pairs, mode, sign, part, parts)  # fmt: skip


@compiled()
def _rotate_parts(tag, job):
    parts = _at(job, 1)
    part = _take(job)
    while part < parts:
        _rotate_share(tag, _at(job, 2), _at(job, 3), _at(job, 4), _at(job, 5), _at(job, 6), _at(job, 7), _at(job, 8), _at(job, 9), _at(job, 10), _at(job, 11), _at(job, 12), _at(job, 13), part, parts)  # fmt: skip
        part = _take(job)


def _rotate_float32(job):
    _rotate_parts(np.float32(0), job)


def _rotate_float64(job):
    _rotate_parts(np.float64(0), job)


def _rotate_bfloat16(job):
    _rotate_parts(np.uint16(0), job)


def _rotate_float16(job):
    _rotate_parts(np.int16(0), job)


# sin(x)/x and cos(x) in x^2, interpolated at Chebyshev nodes of [0, (pi/4)^2]; errors 3e-9, 5e-11
SIN = (0.9999999969177036, -0.16666650673996775, 0.00833203578559731, -0.000195039042508408)
COS = (
    0.9999999999524894, -0.4999999961485761, 0.041666616692532826, -0.0013886617999647076,
    2.4379831251175367e-05,
)  # fmt: skip
_TURN = 2 * np.pi / 2**32


def _polynomial(b: ir.IRBuilder, x: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    lanes = x.type.count if isinstance(x.type, ir.VectorType) else 1
    total: ir.Value = _constant(_F64, lanes, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        product = b.fmul(total, x, flags=("contract",))  # a fused multiply-add where there is one
        total = b.fadd(product, _constant(_F64, lanes, coefficient), flags=("contract",))
    return total


def _table_filler(per_pair: bool) -> Any:
    """One row of a table: (positions, turns, pairs, scale, backwards, cos, sin) -> None.

    `positions` is the one position of the row, or the address of one position per pair;
    `backwards` is 1 where pairs turn the other way.
    """

    @intrinsic
    def table_row(context, positions, turns, pairs, scale, backwards, cos, sin):
        def generate(context, b, signature, arguments):
            positions, turns, pairs, scale, backwards, cos, sin = arguments
            backwards = b.trunc(backwards, _I32)

            def fill(index: ir.Value, lanes: int) -> None:
                def bits(value: int) -> ir.Constant:
                    return _constant(_I32, lanes, value)

                position = (
                    _load(b, _I64, 8, _address(b, positions, index, 8), lanes)
                    if per_pair
                    else _splat(b, positions, lanes)
                )
                step = _load(b, _I64, 8, _address(b, turns, index, 8), lanes)
                angle = b.mul(position, step)  # wraps modulo one turn: exact
                upper = b.trunc(b.lshr(angle, _constant(_I64, lanes, 32)), _vector(_I32, lanes))
                lower = b.trunc(angle, _vector(_I32, lanes))
                quadrant = b.lshr(b.add(upper, bits(2**29)), bits(30))
                rest = b.sub(upper, b.shl(quadrant, bits(30)))  # in [-1/8, 1/8) turn
                x = b.fmul(b.uitofp(lower, _vector(_F64, lanes)), _constant(_F64, lanes, 2.0**-32))
                x = b.fadd(b.sitofp(rest, _vector(_F64, lanes)), x)
                x = b.fmul(x, _constant(_F64, lanes, _TURN))
                square = b.fmul(x, x)
                a = _splat(b, scale, lanes)
                s = b.fmul(b.fmul(x, a), _polynomial(b, square, SIN))
                c = b.fmul(a, _polynomial(b, square, COS))
                c, s = (b.fptrunc(value, _vector(_F32, lanes)) for value in (c, s))

                is_odd = b.trunc(quadrant, _vector(ir.IntType(1), lanes))
                flip_cos = b.add(quadrant, bits(1))
                flip_sin = b.xor(
                    quadrant, _splat(b, b.shl(backwards, _constant(_I32, 1, 1)), lanes)
                )
                for address, one, other, flip in ((cos, c, s, flip_cos), (sin, s, c, flip_sin)):
                    value = b.bitcast(b.select(is_odd, other, one), _vector(_I32, lanes))
                    sign = b.and_(b.shl(flip, bits(30)), bits(-(2**31)))
                    value = b.bitcast(b.xor(value, sign), _vector(_F32, lanes))
                    _store_wide(b, types.float32, _address(b, address, index, 4), value)

            _each(b, pairs, (16,), fill)
            return context.get_dummy_value()

        integer, real = types.int64, types.float64
        return types.void(integer, integer, integer, real, integer, integer, integer), generate

    return table_row


_table_row = _table_filler(per_pair=False)
_table_row_axes = _table_filler(per_pair=True)


@compiled()
def _table_share(positions, seq, num_axes, axes, turns, turns_stride, scales, scales_stride, backwards, pairs, cos, sin, first, last):  # fmt: skip
    spread = np.empty(pairs if axes else 0, np.int64)
    for row in range(first, last):
        batch = row // seq
        step = turns + batch * turns_stride
        scale = _load_double(scales + batch * scales_stride)
        offset = row * pairs * 4
        if axes:
            for pair in range(pairs):
                axis = _at(axes, pair)
                spread[pair] = _at(positions, row * num_axes + axis)
            _table_row_axes(spread.ctypes.data, step, pairs, scale, backwards, cos + offset, sin + offset)  # fmt: skip
        else:
            position = _at(positions, row)
            _table_row(position, step, pairs, scale, backwards, cos + offset, sin + offset)


@compiled()
def table_serial(positions, batch, seq, num_axes, axes, turns, turns_stride, scales, scales_stride, backwards, pairs, cos, sin, parts):  # fmt: skip
    """Fill cos and sin, (batch, seq, pairs) float32, from positions and turns; one thread."""
    _table_share(positions, seq, num_axes, axes, turns, turns_stride, scales, scales_stride, backwards, pairs, cos, sin, 0, batch * seq)  # fmt: skip


@compiled(parallel=True)
def table_parallel(positions, batch, seq, num_axes, axes, turns, turns_stride, scales, scales_stride, backwards, pairs, cos, sin, parts):  # fmt: skip
    """The same in `parts` shares on Numba's threads."""
    total = batch * seq
    for part in prange(parts):
        _table_share(positions, seq, num_axes, axes, turns, turns_stride, scales, scales_stride, backwards, pairs, cos, sin, total * part // parts, total * (part + 1) // parts)  # fmt: skip


@compiled()
def _table_parts(job):
    parts, total = _at(job, 1), _at(job, 3) * _at(job, 4)
    part = _take(job)
    while part < parts:
        _table_share(_at(job, 2), _at(job, 4), _at(job, 5), _at(job, 6), _at(job, 7), _at(job, 8), _at(job, 9), _at(job, 10), _at(job, 11), _at(job, 12), _at(job, 13), _at(job, 14), total * part // parts, total * (part + 1) // parts)  # fmt: skip
        part = _take(job)


def _table(job):
    _table_parts(job)


_WORKERS = {
    "float32": _rotate_float32,
    "float64": _rotate_float64,
    "bfloat16": _rotate_bfloat16,
    "float16": _rotate_float16,
    "table": _table,
}


@functools.cache
def worker(name: str) -> int:
    """Address of a C function `void (int64_t *job)` that does shares of a job until none is left.

    A job is a counter, the number of shares, and the arguments of the serial function in their
    order. Any number of threads may call the worker on one job; each share is done once.
    """
    function = c_function(_WORKERS[name], types.void(types.int64))
    _alive.append(function)
    return int(function.address)


_alive: list[Any] = []
