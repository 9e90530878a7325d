"""Normalize and rotate rows, with LLVM vector instructions made by `vectors.py`.

A row is processed in the order of its weights: first and second members of the pairs, then the
channels before and after the pairs, which are not rotated. Every sum has a fixed order, so the bits
depend neither on the machine nor on the number of threads.
"""

# compiled by Numba, from types that mypy does not know

import functools

from llvmlite import ir
from numba import types

from . import short_floats
from . import vectors as vec
from .instructions import (
    INT,
    POINTER,
    REAL,
    RECORD,
    TAG,
    copy_bytes,
    emitted,
    function_of,
    joined,
    members,
    tuple_of,
)
from .rows import STREAMING, by_mode, fill_lines, line_at, numbers_per_pair, reader, rotate_pairs
from .sums import EIGHT, Sum, halved, sums_of
from .vectors import CACHE_LINE, ELEMENTS, F64, I32, I64, NONE

_WEIGHTS = types.float32, types.float64, types.uint16, types.int16  # in the order of `loops.TAGS`


@emitted(TAG, *[INT] * 6)
def weight_row(b, tag, kind, weight, order, add_one, count, gain):
    """Write `count` weights to `gain`, in the type of the arithmetic.

    `kind` is the index of their dtype in `loops.TAGS`. `order` is the address of the index of each
    weight, or 0 if their order is unchanged.
    """
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
        value = short_floats.plain(b, value) if tag is types.uint16 else value
        vec.store(b, value, vec.at(b, gain, index, vec.width_of(tag)))

    for number, of in enumerate(_WEIGHTS):
        with (
            b.if_then(b.icmp_signed("==", kind, vec.constant(I64, 1, number))),
            b.if_else(b.icmp_signed("==", order, NONE)) as (plain, picked),
        ):
            for branch, widths in ((plain, (8,)), (picked, ())):
                with branch:
                    vec.each(b, count, widths, functools.partial(fill, of))


@emitted(TAG, *[INT] * 5)
def square_rows(b, tag, x, step, width, count, partial):
    """Write eight sums of the squares of each of `count` rows to `partial`, for `add_rows`."""
    _, size, real, widths = ELEMENTS[tag]
    flags = ("contract",) if size == 2 else ()  # squares of 16 bits are exact
    total = Sum(b, real, widths[-1], flags)
    # not in blocks of more numbers than there are sums
    is_reordered = vec.is_reordered(tag, total.lanes)
    has_rest = b.icmp_signed("!=", b.and_(width, vec.constant(I64, 1, widths[-1] - 1)), NONE)
    with vec.loop(b, NONE, count, 1) as at:
        total.reset()
        row = vec.opaque(b, vec.stepped(b, x, at, step))

        def body(index, lanes):
            for before, count_ in vec.pieces(tag, lanes):
                place = vec.at(b, row, b.add(index, before), size)
                value = vec.load_wide(b, tag, place, count_, is_reordered and count_ > 1)
                total.add(b.fmul(value, value, flags=flags), before)

        vec.each(b, width, widths, body)
        place = vec.at(b, partial, at, EIGHT * vec.width_of(tag))
        total.store_eight(place, has_rest, is_reordered)


@emitted(TAG, *[INT] * 4)
def add_rows(b, tag, partial, count, sums, step):
    """Add the eight sums of each row at `partial`, and write one number per row, as float64."""
    real, size = ELEMENTS[tag].real, EIGHT * vec.width_of(tag)

    def body(index, lanes):
        places = [b.add(index, vec.constant(I64, 1, lane)) for lane in range(lanes)]
        rows = [vec.load(b, real, vec.at(b, partial, at, size), EIGHT) for at in places]
        if lanes == 1:
            totals = [halved(b, rows[0], 1)]
        else:
            total = sums_of(b, rows)
            totals = [vec.pick(b, total, total, [lane]) for lane in range(lanes)]
        for at, total in zip(places, totals, strict=True):
            vec.store(b, vec.as_double(b, total), vec.stepped(b, sums, at, step))

    vec.each(b, count, (EIGHT,), body)


@emitted(TAG, INT, REAL, INT, INT)
def root_rows(b, tag, width, eps, count, sums):
    """Replace each of `count` sums of `width` squares by 1 / sqrt(mean + eps)."""
    real = ELEMENTS[tag].real

    def body(index, lanes):
        place = vec.at(b, sums, index, 8)
        kind = vec.vector(real, lanes)
        total = vec.as_real(b, tag, vec.load(b, F64, place, lanes))
        number = vec.splat(b, b.sitofp(width, real), lanes)
        added = vec.splat(b, vec.as_real(b, tag, eps), lanes)
        mean = b.fadd(b.fdiv(total, number), added)
        name = f"llvm.sqrt.{f'v{lanes}' if lanes > 1 else ''}f{8 * vec.width_of(tag)}"
        root = function_of(b.module, ir.FunctionType(kind, [kind]), name)
        value = b.fdiv(vec.constant(real, lanes, 1.0), b.call(root, [mean]))
        vec.store(b, vec.as_double(b, value), place)

    vec.each(b, count, (8,), body)


@emitted(TAG, INT, INT, INT)
def spread_rows(b, tag, roots, count, target):
    """Fill a cache line with each of `count` float64 numbers, in the type of the arithmetic.

    As the factors of a row, they can be read like weights.
    """
    with vec.loop(b, NONE, count, 1) as at:
        root = vec.as_real(b, tag, vec.load(b, F64, vec.at(b, roots, at, 8)))
        root = vec.splat(b, root, CACHE_LINE // vec.width_of(tag))
        vec.store(b, root, vec.at(b, target, at, CACHE_LINE))


def numbers_at(
    b: ir.IRBuilder, tag: types.Type, start: ir.Value, mask: ir.Value, index: ir.Value, lanes: int,
    reordered: bool = False,
) -> ir.Value:  # fmt: skip
    """Return numbers from `index` on, or the first ones, which are all equal, if `mask` is 0."""
    real, width = ELEMENTS[tag].real, vec.width_of(tag)
    parts = []
    for before in range(0, lanes, CACHE_LINE // width):
        place = b.mul(b.add(index, vec.constant(I64, 1, before)), vec.constant(I64, 1, width))
        count = min(lanes, CACHE_LINE // width)
        parts.append(vec.load(b, real, b.add(start, b.and_(place, mask)), count))
    return short_floats.reordered(b, joined(b, parts)) if reordered else joined(b, parts)


@emitted(TAG, INT, RECORD, tuple_of(4), tuple_of(2), tuple_of(2), INT, INT)
def weighted_table_rows(b, tag, mode, piece, tables, weights, roots, count, target):
    """Write rows of the tables as `table_rows` does, times weights and times a root.

    weights  the address of the weights, in the order of the pairs, and the mask of `numbers_at`
    roots    the address of the root of the first row, and the stride to the next
    """
    (start, mask), (roots, step) = members(b, weights), members(b, roots)
    field = reader(b, piece)
    pairs = field("pairs")

    def weights_at(at, index, lanes, order):
        root = vec.as_real(b, tag, vec.load(b, F64, vec.stepped(b, roots, at, step)))
        root = vec.splat(b, root, lanes)
        both = (
            numbers_at(b, tag, start, mask, each, lanes, order)
            for each in (index, b.add(pairs, index))
        )
        return tuple(b.fmul(each, root) for each in both)

    fill_lines(b, tag, mode, field, tables, count, target, weights_at)


@emitted(TAG, INT, RECORD, INT, INT, INT, tuple_of(3), INT, tuple_of(2), tuple_of(2), INT, INT)
def fused_rows(b, tag, mode, piece, x, out, table, factors, gain, roots, slots, count, ahead):
    """Normalize and rotate `count` rows of one tensor, each to its row of `out` or to its slot.

    x, out   the addresses of the first row
    table    the address of the first row that `weighted_table_rows` wrote
    factors  of pairs: the address of those of the first row, the stride to the next, and the mask
             of `numbers_at`; their order is that in which the pairs are read
    gain     the address of the weights, which all rows share, for channels that are not rotated
    roots    the address of 1 / sqrt(mean + eps) of the first row, and the stride to the next
    slots    the address of the offset in `out` of the first row, negative if the row is not
             written, and the stride to the next; or (0, 0)
    ahead    bytes from each row of x to the one to prefetch
    """
    factors, factors_step, mask = members(b, factors)
    (roots, roots_step), (slots, slots_step) = (members(b, pair) for pair in (roots, slots))
    field = reader(b, piece)
    _, size, real, widths = ELEMENTS[tag]
    width = vec.width_of(tag)
    names = "pairs", "start", "x_2", "out_2", "line"
    pairs, start, x_step, out_step, line = map(field, names)
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

    def rotate(form, index, lanes):
        layout, out_layout, _ = form
        firsts = [vec.channel_of(b, index, each) for each in (layout, out_layout)]

        def row(at, source, target):
            own = line_at(b, tag, table, index, at, line, form)
            own_factors = vec.opaque(b, vec.stepped(b, factors, at, factors_step))

            def scaled(x, channel):
                before = vec.at(b, NONE, index, numbers_per_pair(tag, form))
                channel = b.add(before, channel)
                lanes = vec.lanes_of(x)
                return b.fmul(x, numbers_at(b, tag, own_factors, mask, channel, lanes))

            vec.prefetch_pairs(b, tag, source, NONE, pairs, lanes, layout, ahead)
            rotate_pairs(b, tag, (source, target), own, pairs, lanes, form, scaled)

        rows_from([b.add(start, first) for first in firsts], row)

    def scale(first, channel, index, lanes):
        weights = vec.at(b, vec.at(b, gain, first, width), index, width)
        weights = vec.load(b, real, weights, lanes)

        def row(at, source, target):
            root = vec.load(b, F64, vec.stepped(b, roots, at, roots_step))
            root = vec.splat(b, vec.as_real(b, tag, root), lanes)
            value = b.fmul(vec.load_wide(b, tag, source, lanes), root)
            vec.store_wide(b, tag, target, b.fmul(value, weights))

        rows_from([b.add(channel, index)] * 2, row)

    def copy(channel, length):
        bytes_ = b.mul(length, vec.constant(I64, 1, size))

        def row(at, source, target):
            with b.if_else(is_streamed) as (streamed, cached):
                with streamed, vec.loop(b, NONE, bytes_, CACHE_LINE) as byte:
                    line = b.inttoptr(b.add(source, byte), vec.vector(I32, 16).as_pointer())
                    vec.store(b, b.load(line, align=1), b.add(target, byte), True)
                with cached:
                    ends = (b.inttoptr(each, POINTER) for each in (target, source))
                    copy_bytes(b, *ends, bytes_)

        rows_from([channel] * 2, row)

    by_mode(b, mode, pairs, widths, rotate)
    is_plain = b.icmp_signed("!=", field("is_plain"), NONE)
    with b.if_else(is_plain) as (plain, scaled):
        with plain:
            for _, channel, length in rests(b, pairs, start, field("tail")):
                with b.if_then(b.icmp_signed("!=", length, NONE)):
                    copy(channel, length)
        with scaled:
            for first, channel, length in rests(b, pairs, start, field("tail")):
                vec.each(b, length, widths[-1:], functools.partial(scale, first, channel))


def rests(b: ir.IRBuilder, pairs: ir.Value, start: ir.Value, tail: ir.Value):
    """Return (first weight, first channel, count) of the channels before and after the pairs."""
    both = b.add(pairs, pairs)
    return (both, NONE, start), (b.add(both, start), b.add(start, both), tail)
