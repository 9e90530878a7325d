"""The gradients of rows that were normalised and rotated, as LLVM vector instructions."""

# compiled by Numba, from types that mypy does not know

import functools
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .fused_llvm import _NONE, STREAMING, _as_real, _reader, _total, _widened
from .llvm import (
    _ELEMENTS,
    _F64,
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
    _splat,
    _store_pairs,
    _store_wide,
    _vector,
)


def _back_rows(writes: bool) -> Callable[..., object]:
    """One of the two passes over the rows of x and of the gradient of what was made of them.

    The first adds to the gradients of the weights, and sums weight * n' * x over each row, where n'
    is the gradient turned back; the second writes the gradient of x. The roots are `r`.
    """

    @intrinsic
    def rows_(context, tag, mode, piece, x, grad, out, tables, gain, roots, dots, gains, count):
        def generate(context, b, signature, arguments):
            _, mode, record, x, grad, out, tables, gain, roots, dots, gains, count = arguments
            cos, sin, rows, row = cgutils.unpack_tuple(b, tables)
            (roots, roots_step), (dots, dots_step) = (
                cgutils.unpack_tuple(b, pair) for pair in (roots, dots)
            )
            field = _reader(b, piece, record)
            _, size, real, widths = _ELEMENTS[tag]
            width = 8 if real is _F64 else 4
            narrow = tuple(lanes for lanes in widths if lanes <= 32)  # more are not in registers
            pairs, start, row_size = map(field, ("pairs", "start", "row_size"))
            x_step, out_step, table_step, grad_step = map(
                field, ("x_2", "out_2", "table_2", "grad_2")
            )
            sign, mean = (b.sitofp(field(name), real) for name in ("sign", "mean"))
            apart = b.sub(sin, cos)

            def number(at: ir.Value, start: ir.Value, step: ir.Value) -> ir.Value:
                place = b.add(start, b.mul(at, step))
                return _as_real(b, tag, _load(b, _F64, 8, place, 1))

            def weights_at(place: ir.Value, lanes: int) -> tuple[ir.Value, ir.Value]:
                """Weights, and what their gradients add up to in this run of rows."""
                total = cgutils.alloca_once(b, _vector(real, lanes))
                b.store(_constant(real, lanes, 0.0), total)
                return _load(b, real, width, b.add(gain, place), lanes), total

            def add_gains(place: ir.Value, total: ir.Value, lanes: int) -> None:
                if not writes:
                    to = b.add(gains, place)
                    value = b.fadd(_load(b, real, width, to, lanes), b.load(total))
                    b.store(value, b.inttoptr(to, value.type.as_pointer()), align=width)

            def step_back(
                at: ir.Value, x_: ir.Value, dn: ir.Value, weights: tuple[ir.Value, ir.Value],
                lanes: int,
            ) -> ir.Value:  # fmt: skip
                """The first pass: the sum of the row; the second: the gradient of x."""
                root = number(at, roots, roots_step)
                g, total = weights
                if writes:
                    cube = b.fmul(b.fmul(root, root), root)
                    factor = b.fdiv(b.fmul(cube, number(at, dots, dots_step)), mean)
                    left = b.fmul(b.fmul(g, dn), _splat(b, root, lanes))
                    return b.fsub(left, b.fmul(x_, _splat(b, factor, lanes)))
                p = b.fmul(dn, x_)
                b.store(b.fadd(b.load(total), b.fmul(p, _splat(b, root, lanes))), total)
                return b.fmul(g, p)

            def add_dot(at: ir.Value, value: ir.Value) -> None:
                place = b.add(dots, b.mul(at, dots_step))
                pointer = b.inttoptr(place, _F64.as_pointer())
                b.store(b.fadd(b.load(pointer), _widened(b, value)), pointer)

            def table_at(at: ir.Value, index: ir.Value) -> ir.Value:
                offset = b.add(row, b.mul(at, table_step))
                before = b.block
                with b.if_then(b.icmp_signed("!=", rows, _NONE)):
                    picked = b.mul(_load(b, _I64, 8, b.add(rows, offset), 1), row_size)
                    after = b.block
                result = b.phi(_I64)
                result.add_incoming(offset, before)
                result.add_incoming(picked, after)
                return b.add(b.add(cos, _address(b, _NONE, index, 4)), result)

            offset = b.mul(start, _constant(_I64, 1, size))

            def rotate(form: tuple[str, str, bool], index: ir.Value, lanes: int) -> None:
                layout, out_layout, streaming = form
                place = b.mul(index, _constant(_I64, 1, width))
                places = place, _address(b, place, pairs, width)
                weights = [weights_at(each, lanes) for each in places]
                with _loop(b, _NONE, count, 1) as at:
                    source = _opaque(b, b.add(b.add(x, offset), b.mul(at, x_step)))
                    given = _opaque(b, b.add(b.add(grad, offset), b.mul(at, grad_step)))
                    table = _opaque(b, table_at(at, index))
                    c, s = (
                        _load(b, ir.FloatType(), 4, each, lanes)
                        for each in (table, b.add(table, apart))
                    )
                    if real is _F64:
                        c, s = (b.fpext(value, _vector(_F64, lanes)) for value in (c, s))
                    s = b.fmul(s, _splat(b, sign, lanes))
                    u, v = _load_pairs(
                        b, tag, source, index, pairs, lanes, _NONE,
                        interleaved=layout == "interleaved",
                    )  # fmt: skip
                    one, other = _load_pairs(
                        b, tag, given, index, pairs, lanes, _NONE,
                        interleaved=out_layout == "interleaved",
                    )  # fmt: skip
                    du = b.fadd(b.fmul(one, c), b.fmul(other, s))
                    dv = b.fsub(b.fmul(other, c), b.fmul(one, s))
                    du = step_back(at, u, du, weights[0], lanes)
                    dv = step_back(at, v, dv, weights[1], lanes)
                    if writes:
                        target = _opaque(b, b.add(b.add(out, offset), b.mul(at, out_step)))
                        _store_pairs(
                            b, tag, target, index, pairs, lanes, du, dv,
                            interleaved=layout == "interleaved", streaming=streaming,
                        )  # fmt: skip
                    else:
                        add_dot(at, _total(b, b.fadd(du, dv)))
                for each, (_, total) in zip(places, weights, strict=True):
                    add_gains(each, total, lanes)

            def rest(first: ir.Value, channel: ir.Value, index: ir.Value, lanes: int) -> None:
                gain_place = _address(b, b.mul(first, _constant(_I64, 1, width)), index, width)
                weights = weights_at(gain_place, lanes)
                with _loop(b, _NONE, count, 1) as at:
                    place = _address(b, b.mul(channel, _constant(_I64, 1, size)), index, size)
                    x_, dn = (
                        _load_wide(b, tag, b.add(b.add(each, place), b.mul(at, step)), lanes)
                        for each, step in ((x, x_step), (grad, grad_step))
                    )
                    value = step_back(at, x_, dn, weights, lanes)
                    if writes:
                        target = b.add(b.add(out, place), b.mul(at, out_step))
                        _store_wide(b, tag, target, value)
                    else:
                        add_dot(at, _total(b, value))
                add_gains(gain_place, weights[1], lanes)

            for number_, form in enumerate(MODES if writes else MODES[:STREAMING]):
                with b.if_then(b.icmp_signed("==", mode, _constant(_I64, 1, number_))):
                    _each(b, pairs, narrow, functools.partial(rotate, form))
            both = b.add(pairs, pairs)
            stop, tail = b.add(start, both), field("tail")
            for first, channel, length in ((both, _NONE, start), (b.add(both, start), stop, tail)):
                _each(b, length, widths[-1:], functools.partial(rest, first, channel))
            return context.get_dummy_value()

        number, pair = types.int64, types.UniTuple(types.int64, 2)
        return types.void(
            tag, number, piece, number, number, number, types.UniTuple(number, 4), number, pair,
            pair, number, number,
        ), generate  # fmt: skip

    return rows_


dot_rows = _back_rows(writes=False)
back_rows = _back_rows(writes=True)
