"""Rows that are normalised and rotated, as LLVM vector instructions; the parts are of `llvm.py`.

A row is parted as its weights are: first and second members of the pairs, then the channels before
and after them that are not rotated. The order of every sum is written out, so the bits depend
neither on the machine nor on the number of threads.
"""

# compiled by Numba, from types that mypy does not know

import functools
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .llvm import (
    _ELEMENTS,
    _F64,
    _I32,
    _I64,
    MODES,
    _address,
    _constant,
    _each,
    _load,
    _load_pairs,
    _load_wide,
    _loop,
    _opaque,
    _pick,
    _splat,
    _store,
    _store_pairs,
    _store_wide,
    _vector,
)

STREAMING = MODES.index(("half", "half", True))
_NONE = _constant(_I64, 1, 0)


def _reader(b: ir.IRBuilder, form: types.Type, record: ir.Value) -> Callable[[str], ir.Value]:
    """Reads fields of a record that are whole numbers."""

    def field(name: str) -> ir.Value:
        return b.load(cgutils.get_record_member(b, record, form.offset(name), _I64))

    return field


def _total(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The sum of the lanes, halves on halves."""
    lanes = value.type.count if isinstance(value.type, ir.VectorType) else 1
    while lanes > 2:
        lanes //= 2
        low, high = (_pick(b, value, value, list(range(at, at + lanes))) for at in (0, lanes))
        value = b.fadd(low, high)
    if lanes == 1:
        return value
    one, other = (b.extract_element(value, _constant(_I32, 1, lane)) for lane in (0, 1))
    return b.fadd(one, other)


def _sums(b: ir.IRBuilder, tag: types.Type) -> dict[int, ir.Value]:
    """A running sum for each number of lanes, 0 at first."""
    real, widths = _ELEMENTS[tag][2], (*_ELEMENTS[tag][3], 1)
    return {lanes: cgutils.alloca_once(b, _vector(real, lanes)) for lanes in widths}


def _add(b: ir.IRBuilder, sums: dict[int, ir.Value], value: ir.Value, lanes: int) -> None:
    b.store(b.fadd(b.load(sums[lanes]), value), sums[lanes])


def _reset(b: ir.IRBuilder, tag: types.Type, sums: dict[int, ir.Value]) -> None:
    for lanes, total in sums.items():
        b.store(_constant(_ELEMENTS[tag][2], lanes, 0.0), total)


def _sum_of(b: ir.IRBuilder, sums: dict[int, ir.Value]) -> ir.Value:
    first, *rest = (_total(b, b.load(total)) for total in sums.values())
    return functools.reduce(b.fadd, rest, first)


def _widened(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return value if value.type is _F64 else b.fpext(value, _F64)


def _as_real(b: ir.IRBuilder, tag: types.Type, value: ir.Value) -> ir.Value:
    return value if _ELEMENTS[tag][2] is _F64 else b.fptrunc(value, _ELEMENTS[tag][2])


@intrinsic
def square_rows(context, tag, x, step, width, count, sums, sums_step):
    """The sum of the squares of each of `count` rows, as float64 to `sums`."""

    def generate(context, b, signature, arguments):
        _, x, step, width, count, target, target_step = arguments
        sums = _sums(b, tag)
        size = _ELEMENTS[tag][1]
        with _loop(b, _NONE, count, 1) as at:
            _reset(b, tag, sums)
            row = _opaque(b, b.add(x, b.mul(at, step)))

            def body(index: ir.Value, lanes: int) -> None:
                value = _load_wide(b, tag, _address(b, row, index, size), lanes)
                _add(b, sums, b.fmul(value, value), lanes)

            _each(b, width, _ELEMENTS[tag][3], body)
            place = b.add(target, b.mul(at, target_step))
            b.store(_widened(b, _sum_of(b, sums)), b.inttoptr(place, _F64.as_pointer()))
        return context.get_dummy_value()

    numbers = [types.int64] * 6
    return types.void(tag, *numbers), generate


@intrinsic
def root_rows(context, tag, width, eps, count, sums):
    """Each of `count` sums of squares of so many numbers, as 1 / sqrt(mean + eps)."""

    def generate(context, b, signature, arguments):
        _, width, eps, count, sums = arguments
        real = _ELEMENTS[tag][2]

        def body(index: ir.Value, lanes: int) -> None:
            place = _address(b, sums, index, 8)
            kind = _vector(real, lanes)
            total = _load(b, _F64, 8, place, lanes)
            total = total if real is _F64 else b.fptrunc(total, kind)
            number = _splat(b, b.sitofp(width, real), lanes)
            mean = b.fadd(b.fdiv(total, number), _splat(b, _as_real(b, tag, eps), lanes))
            name = f"llvm.sqrt.{f'v{lanes}' if lanes > 1 else ''}f{64 if real is _F64 else 32}"
            root = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind]), name)
            value = b.fdiv(_constant(real, lanes, 1.0), b.call(root, [mean]))
            value = value if real is _F64 else b.fpext(value, _vector(_F64, lanes))
            b.store(value, b.inttoptr(place, value.type.as_pointer()), align=8)

        _each(b, count, (8,), body)
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.float64, types.int64, types.int64), generate


@intrinsic
def fused_rows(context, tag, mode, piece, x, out, tables, gain, roots, slots, count, ahead):
    """Normalise and rotate `count` rows of one tensor, each to its row of out, or to its slot.

    x and out are the addresses of the first row. `tables`: those of cos, sin and row numbers, or 0,
    and the offset of its row of the table, or of its row number. `gain` is the address of the
    weights, the same for all of them; `roots`: of what the mean makes of a row. `slots`: of the
    offset of its row in out, negative for a row that is left out, and how far the next is; or 0.
    """

    def generate(context, b, signature, arguments):
        _, mode, record, x, out, tables, gain, roots, slots, count, ahead = arguments
        cos, sin, rows, row = cgutils.unpack_tuple(b, tables)
        (roots, roots_step), (slots, slots_step) = (
            cgutils.unpack_tuple(b, pair) for pair in (roots, slots)
        )
        field = _reader(b, piece, record)
        _, size, real, widths = _ELEMENTS[tag]
        width = 8 if real is _F64 else 4
        pairs, start, row_size = map(field, ("pairs", "start", "row_size"))
        x_step, out_step, table_step = map(field, ("x_2", "out_2", "table_2"))
        sign = b.sitofp(field("sign"), real)
        apart = b.sub(sin, cos)
        offset = b.mul(start, _constant(_I64, 1, size))
        is_streamed = b.and_(  # the channels that are copied fill cache lines
            b.icmp_signed(">=", mode, _constant(_I64, 1, STREAMING)),
            b.icmp_signed("==", pairs, _NONE),
        )
        is_scattered = b.icmp_signed("!=", slots, _NONE)

        def table_offset(at: ir.Value) -> ir.Value:
            offset = b.add(row, b.mul(at, table_step))
            before = b.block
            with b.if_then(b.icmp_signed("!=", rows, _NONE)):
                picked = b.mul(_load(b, _I64, 8, b.add(rows, offset), 1), row_size)
                after = b.block
            result = b.phi(_I64)
            result.add_incoming(offset, before)
            result.add_incoming(picked, after)
            return result

        def target_offset(at: ir.Value) -> ir.Value:
            plain = b.mul(at, out_step)
            before = b.block
            with b.if_then(is_scattered):
                slot = _load(b, _I64, 8, b.add(slots, b.mul(at, slots_step)), 1)
                slot = b.select(b.icmp_signed("<", slot, _NONE), slot, b.add(slot, plain))
                after = b.block
            result = b.phi(_I64)
            result.add_incoming(plain, before)
            result.add_incoming(slot, after)
            return result

        def weighted(value: ir.Value, weights: ir.Value, at: ir.Value, lanes: int) -> ir.Value:
            root = _load(b, _F64, 8, b.add(roots, b.mul(at, roots_step)), 1)
            value = b.fmul(value, _splat(b, _as_real(b, tag, root), lanes))
            return b.fmul(value, weights)

        def rotate(form: tuple[str, str, bool], index: ir.Value, lanes: int) -> None:
            layout, out_layout, streaming = form
            place = _address(b, gain, index, width)
            first, second = (
                _load(b, real, width, each, lanes)
                for each in (place, _address(b, place, pairs, width))
            )
            with _loop(b, _NONE, count, 1) as at:
                to = target_offset(at)
                with b.if_then(b.icmp_signed(">=", to, _NONE), likely=True):
                    source = _opaque(b, b.add(b.add(x, offset), b.mul(at, x_step)))
                    target = _opaque(b, b.add(b.add(out, offset), to))
                    table = b.add(b.add(cos, _address(b, _NONE, index, 4)), table_offset(at))
                    table = _opaque(b, table)
                    c, s = (
                        _load(b, ir.FloatType(), 4, each, lanes)
                        for each in (table, b.add(table, apart))
                    )
                    if real is _F64:
                        c, s = (b.fpext(value, _vector(_F64, lanes)) for value in (c, s))
                    s = b.fmul(s, _splat(b, sign, lanes))
                    u, v = _load_pairs(
                        b, tag, source, index, pairs, lanes, ahead,
                        interleaved=layout == "interleaved",
                    )  # fmt: skip
                    u, v = weighted(u, first, at, lanes), weighted(v, second, at, lanes)
                    one = b.fsub(b.fmul(u, c), b.fmul(v, s))
                    other = b.fadd(b.fmul(v, c), b.fmul(u, s))
                    _store_pairs(
                        b, tag, target, index, pairs, lanes, one, other,
                        interleaved=out_layout == "interleaved", streaming=streaming,
                    )  # fmt: skip

        def scale(first: ir.Value, channel: ir.Value, index: ir.Value, lanes: int) -> None:
            weights = _address(b, _address(b, gain, first, width), index, width)
            weights = _load(b, real, width, weights, lanes)
            with _loop(b, _NONE, count, 1) as at:
                to = target_offset(at)
                with b.if_then(b.icmp_signed(">=", to, _NONE), likely=True):
                    place = _address(b, b.mul(channel, _constant(_I64, 1, size)), index, size)
                    value = _load_wide(b, tag, b.add(b.add(x, place), b.mul(at, x_step)), lanes)
                    value = weighted(value, weights, at, lanes)
                    _store_wide(b, tag, b.add(b.add(out, place), to), value)

        def copy(channel: ir.Value, length: ir.Value) -> None:
            with _loop(b, _NONE, count, 1) as at:
                to = target_offset(at)
                with b.if_then(b.icmp_signed(">=", to, _NONE), likely=True):
                    skipped = b.mul(channel, _constant(_I64, 1, size))
                    end = b.add(b.add(out, skipped), to)
                    come = b.add(b.add(x, skipped), b.mul(at, x_step))
                    length_ = b.mul(length, _constant(_I64, 1, size))
                    with b.if_else(is_streamed) as (streamed, cached):
                        with streamed, _loop(b, _NONE, length_, 64) as at_byte:
                            line = _load(b, _I32, 1, b.add(come, at_byte), 16)
                            _store(b, line, 4, b.add(end, at_byte), True)
                        with cached:
                            pointers = (b.inttoptr(each, cgutils.voidptr_t) for each in (end, come))
                            cgutils.raw_memcpy(b, *pointers, length_, 1)

        for number, form in enumerate(MODES):
            with b.if_then(b.icmp_signed("==", mode, _constant(_I64, 1, number))):
                _each(b, pairs, widths, functools.partial(rotate, form))
        both = b.add(pairs, pairs)
        stop, tail, is_plain = b.add(start, both), field("tail"), field("is_plain")
        rests = ((both, _NONE, start), (b.add(both, start), stop, tail))
        with b.if_else(b.icmp_signed("!=", is_plain, _NONE)) as (plain, scaled):
            with plain:
                for _, channel, length in rests:
                    with b.if_then(b.icmp_signed("!=", length, _NONE)):
                        copy(channel, length)
            with scaled:
                for first, channel, length in rests:
                    _each(b, length, widths[-1:], functools.partial(scale, first, channel))
        return context.get_dummy_value()

    number, pair = types.int64, types.UniTuple(types.int64, 2)
    return types.void(
        tag, number, piece, number, number, types.UniTuple(number, 4), number, pair, pair,
        number, number,
    ), generate  # fmt: skip
