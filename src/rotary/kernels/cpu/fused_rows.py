"""Normalize and rotate rows, with LLVM vector instructions made by `vectors.py`.

A row is processed in the order of its weights: first and second members of the pairs, then the
channels before and after the pairs, which are not rotated. Every sum has a fixed order, so the bits
depend neither on the machine nor on the number of threads.
"""

# compiled by Numba, from types that mypy does not know

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vectors as vec
from .instructions import POINTER, copy_bytes, function_of, members
from .rows import MODES, STREAMING, Tables, by_mode, reader, turned
from .vectors import ELEMENTS, F64, I32, I64, NONE

_WEIGHTS = types.float32, types.float64, types.uint16, types.int16  # in the order of `loops.TAGS`


def width_of(real: ir.Type) -> int:
    """Return the bytes of a number in the type of the arithmetic."""
    return 8 if real is F64 else 4


@intrinsic
def weight_row(context, tag, kind, weight, order, add_one, count, gain):
    """Write `count` weights to `gain`, in the type of the arithmetic.

    `kind` is the index of their dtype in `loops.TAGS`. `order` is the address of the index of each
    weight, or 0 if their order is unchanged.
    """

    def generate(context, b, signature, arguments):
        _, kind, weight, order, add_one, count, gain = arguments
        real = ELEMENTS[tag].real
        kept = b.icmp_signed("==", add_one, NONE)  # -0 keeps the sign of a weight that is 0
        added = b.select(kept, vec.constant(real, 1, -0.0), vec.constant(real, 1, 1.0))

        def fill(of, index, lanes):
            source = index
            if lanes == 1:
                before = b.block
                with b.if_then(b.icmp_signed("!=", order, NONE)):
                    picked = vec.load(b, I64, vec.at(b, order, index, 8))
                    after = b.block
                source = b.phi(I64)
                source.add_incoming(index, before)
                source.add_incoming(picked, after)
            size = ELEMENTS[of].size
            value = vec.load_wide(b, of, vec.at(b, weight, source, size), lanes)
            value = vec.as_real(b, tag, vec.as_double(b, value))
            value = b.fadd(value, vec.splat(b, added, lanes))
            vec.store(b, value, vec.at(b, gain, index, width_of(real)))

        for number, of in enumerate(_WEIGHTS):
            with (
                b.if_then(b.icmp_signed("==", kind, vec.constant(I64, 1, number))),
                b.if_else(b.icmp_signed("==", order, NONE)) as (plain, picked),
            ):
                for branch, widths in ((plain, (8,)), (picked, ())):
                    with branch:
                        vec.each(b, count, widths, functools.partial(fill, of))
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 6), generate


@intrinsic
def square_rows(context, tag, x, step, width, count, sums, sums_step):
    """Write the sum of the squares of each of `count` rows to `sums`, as float64."""

    def generate(context, b, signature, arguments):
        _, x, step, width, count, target, target_step = arguments
        _, size, real, widths = ELEMENTS[tag]
        total = vec.Sum(b, real, widths[-1])
        with vec.loop(b, NONE, count, 1) as at:
            total.reset()
            row = vec.opaque(b, vec.stepped(b, x, at, step))

            def body(index, lanes):
                for before, count_ in vec.pieces(tag, lanes):
                    place = vec.at(b, row, b.add(index, before), size)
                    order = vec.is_reordered(tag, count_)
                    value = vec.load_wide(b, tag, place, count_, order)
                    total.add(b.fmul(value, value), before)

            vec.each(b, width, widths, body)
            sum_ = vec.as_double(b, total.total(vec.is_reordered(tag, total.lanes)))
            vec.store(b, sum_, vec.stepped(b, target, at, target_step))
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 6), generate


@intrinsic
def root_rows(context, tag, width, eps, count, sums):
    """Replace each of `count` sums of `width` squares by 1 / sqrt(mean + eps)."""

    def generate(context, b, signature, arguments):
        _, width, eps, count, sums = arguments
        real = ELEMENTS[tag].real

        def body(index, lanes):
            place = vec.at(b, sums, index, 8)
            kind = vec.vector(real, lanes)
            total = vec.as_real(b, tag, vec.load(b, F64, place, lanes))
            number = vec.splat(b, b.sitofp(width, real), lanes)
            added = vec.splat(b, vec.as_real(b, tag, eps), lanes)
            mean = b.fadd(b.fdiv(total, number), added)
            name = f"llvm.sqrt.{f'v{lanes}' if lanes > 1 else ''}f{8 * width_of(real)}"
            root = function_of(b.module, ir.FunctionType(kind, [kind]), name)
            value = b.fdiv(vec.constant(real, lanes, 1.0), b.call(root, [mean]))
            vec.store(b, vec.as_double(b, value), place)

        vec.each(b, count, (8,), body)
        return context.get_dummy_value()

    return types.void(tag, types.int64, types.float64, types.int64, types.int64), generate


@intrinsic
def fused_rows(context, tag, mode, piece, x, out, tables, gain, roots, slots, count, ahead):
    """Normalize and rotate `count` rows of one tensor, each to its row of `out` or to its slot.

    x, out   the addresses of the first row
    tables   as `rows.Tables` takes them
    gain     the address of the weights, which all rows share
    roots    the address of 1 / sqrt(mean + eps) of the first row, and the stride to the next
    slots    the address of the offset in `out` of the first row, negative if the row is not
             written, and the stride to the next; or (0, 0)
    ahead    bytes from each row of x to the one to prefetch
    """

    def generate(context, b, signature, arguments):
        _, mode, record, x, out, tables, gain, roots, slots, count, ahead = arguments
        (roots, roots_step), (slots, slots_step) = (members(b, pair) for pair in (roots, slots))
        field = reader(b, (piece, record))
        tables = Tables(b, tag, field, tables)
        _, size, real, widths = ELEMENTS[tag]
        width = width_of(real)
        pairs, start, x_step, out_step = map(field, ("pairs", "start", "x_2", "out_2"))
        is_streamed = b.and_(  # the channels that are copied fill cache lines
            b.icmp_signed(">=", mode, vec.constant(I64, 1, STREAMING)),
            b.icmp_signed("==", pairs, NONE),
        )
        is_scattered = b.icmp_signed("!=", slots, NONE)

        def rows_from(channels, body):
            """Build a loop of `body(row, source, target)` over the rows that are written.

            `source` and `target` are addresses, from `channels` of x and of out on.
            """
            starts = [vec.at(b, *each, size) for each in zip((x, out), channels, strict=True)]
            with vec.loop(b, NONE, count, 1) as at:
                plain = b.mul(at, out_step)
                before = b.block
                with b.if_then(is_scattered):
                    slot = vec.load(b, I64, vec.stepped(b, slots, at, slots_step))
                    slot = b.select(b.icmp_signed("<", slot, NONE), slot, b.add(slot, plain))
                    after = b.block
                to = b.phi(I64)
                to.add_incoming(plain, before)
                to.add_incoming(slot, after)
                with b.if_then(b.icmp_signed(">=", to, NONE), likely=True):
                    source = vec.opaque(b, vec.stepped(b, starts[0], at, x_step))
                    body(at, source, vec.opaque(b, b.add(starts[1], to)))

        def root_at(at):
            return vec.as_real(b, tag, vec.load(b, F64, vec.stepped(b, roots, at, roots_step)))

        def weighted(value, weights, root):
            return b.fmul(b.fmul(value, vec.splat(b, root, vec.lanes_of(value))), weights)

        def rotate(layout, out_layout, streaming, index, lanes):
            parts = []
            for first, count_ in vec.pieces(tag, lanes):
                place = vec.at(b, gain, b.add(index, first), width)
                places = place, vec.at(b, place, pairs, width)
                order = vec.is_reordered(tag, count_, layout, out_layout)
                weights = [vec.load_reals(b, real, each, count_, order) for each in places]
                parts.append((first, weights, order))

            def row(at, source, target):
                table, root = tables.row_at(at, index), root_at(at)
                vec.prefetch_pairs(b, tag, source, NONE, pairs, lanes, layout, ahead)
                for first, weights, order in parts:
                    count_ = vec.lanes_of(weights[0])
                    c, s = tables.cos_sin(table, first, count_, order)
                    both = vec.load_pairs(b, tag, source, first, pairs, count_, layout, order)
                    u, v = (weighted(x_, w, root) for x_, w in zip(both, weights, strict=True))
                    both = turned(b, u, v, c, s)
                    vec.store_pairs(
                        b, tag, target, first, pairs, *both, out_layout, streaming, order
                    )

            firsts = (vec.channel_of(b, index, each) for each in (layout, out_layout))
            rows_from([b.add(start, first) for first in firsts], row)

        def scale(first, channel, index, lanes):
            weights = vec.at(b, vec.at(b, gain, first, width), index, width)
            weights = vec.load(b, real, weights, lanes)

            def row(at, source, target):
                value = weighted(vec.load_wide(b, tag, source, lanes), weights, root_at(at))
                vec.store_wide(b, tag, target, value)

            rows_from([b.add(channel, index)] * 2, row)

        def copy(channel, length):
            bytes_ = b.mul(length, vec.constant(I64, 1, size))

            def row(at, source, target):
                with b.if_else(is_streamed) as (streamed, cached):
                    with streamed, vec.loop(b, NONE, bytes_, 64) as byte:
                        line = b.inttoptr(b.add(source, byte), vec.vector(I32, 16).as_pointer())
                        vec.store(b, b.load(line, align=1), b.add(target, byte), True)
                    with cached:
                        ends = (b.inttoptr(each, POINTER) for each in (target, source))
                        copy_bytes(b, *ends, bytes_)

            rows_from([channel] * 2, row)

        by_mode(b, mode, MODES, pairs, widths, rotate)
        is_plain = b.icmp_signed("!=", field("is_plain"), NONE)
        with b.if_else(is_plain) as (plain, scaled):
            with plain:
                for _, channel, length in rests(b, pairs, start, field("tail")):
                    with b.if_then(b.icmp_signed("!=", length, NONE)):
                        copy(channel, length)
            with scaled:
                for first, channel, length in rests(b, pairs, start, field("tail")):
                    vec.each(b, length, widths[-1:], functools.partial(scale, first, channel))
        return context.get_dummy_value()

    number, pair = types.int64, types.UniTuple(types.int64, 2)
    return types.void(
        tag, number, piece, number, number, types.UniTuple(number, 4), number, pair, pair,
        number, number,
    ), generate  # fmt: skip


def rests(b: ir.IRBuilder, pairs: ir.Value, start: ir.Value, tail: ir.Value):
    """Return (first weight, first channel, count) of the channels before and after the pairs."""
    both = b.add(pairs, pairs)
    return (both, NONE, start), (b.add(both, start), b.add(start, both), tail)
