"""The gradients of rows that were normalized and rotated, as LLVM vector instructions.

Let n be the gradient of an output row, rotated back, with its channels in the order of the weights.
With r = 1 / sqrt(mean + eps), and d the sum of weight * n * x over the m channels of the mean, the
gradient of x is r * (weight * n - x * r * (r * d / m)). A row adds n * x * r to the gradient of the
weights.
"""

# compiled by Numba, from types that mypy does not know

import functools

from . import vectors as vec
from .fused_rows import rests
from .instructions import INT, RECORD, TAG, emitted, members, on_stack, tuple_of
from .rows import MODES, STREAMING, by_mode, reader
from .sums import EIGHT, Sum
from .vectors import ELEMENTS, F64, I64, NONE

_LANES = 32  # of the widest vectors: registers hold no more


@emitted(TAG, INT, RECORD, *[INT] * 8, tuple_of(2))
def dot_rows(b, tag, mode, piece, x, grad, table, gain, turned, squares, dots, count, ahead):
    """Write n of `count` rows to `turned`, and two sums over each row, for `add_rows`.

    The squares of x are added at `squares`, the row's part of d at `dots`. `ahead` has the bytes
    from each row of x and of grad to the one to prefetch.
    """
    aheads = members(b, ahead)
    field = reader(b, piece)
    _, size, real, widths = ELEMENTS[tag]
    width, narrow = vec.width_of(tag), tuple(lanes for lanes in widths if lanes <= _LANES)
    names = "pairs", "start", "width", "x_2", "grad_2", "line"
    pairs, start, channels, x_step, grad_step, step = map(field, names)
    square, dot = (Sum(b, real, narrow[-1]) for _ in range(2))
    lengths = b.or_(b.or_(pairs, start), field("tail"))
    has_rest = b.icmp_signed("!=", b.and_(lengths, vec.constant(I64, 1, narrow[-1] - 1)), NONE)

    def row(layout, out_layout):
        with vec.loop(b, NONE, count, 1) as at:
            square.reset()
            dot.reset()
            source, gradient = (
                vec.opaque(b, vec.stepped(b, start_, at, step))
                for start_, step in ((x, x_step), (grad, grad_step))
            )
            line = vec.opaque(b, vec.at(b, turned, b.mul(at, channels), width))
            angles = vec.opaque(b, vec.stepped(b, table, at, step))

            def add(x_, n, index, before=NONE):
                vec.store(b, n, vec.at(b, line, index, width))
                weight = vec.load(b, real, vec.at(b, gain, index, width), vec.lanes_of(x_))
                square.add(b.fmul(x_, x_), before)
                dot.add(b.fmul(b.fmul(weight, n), x_), before)

            def turn(index, lanes):
                for each, order, bytes_ in zip(
                    (source, gradient), (layout, out_layout), aheads, strict=True
                ):
                    vec.prefetch_pairs(b, tag, of(each), index, pairs, lanes, order, bytes_)
                for before, lanes_ in vec.pieces(tag, lanes):
                    first = b.add(index, before)
                    c, s = (
                        vec.load(b, real, vec.at(b, angles, each, width), lanes_)
                        for each in (first, b.add(pairs, first))
                    )
                    u, v = vec.load_pairs(b, tag, of(source), first, pairs, lanes_, layout)
                    du, dv = vec.load_pairs(b, tag, of(gradient), first, pairs, lanes_, out_layout)
                    back = b.fadd(b.fmul(du, c), b.fmul(dv, s))
                    add(u, back, first, before)
                    back = b.fsub(b.fmul(dv, c), b.fmul(du, s))
                    add(v, back, b.add(pairs, first), before)

            def of(address):
                return vec.at(b, address, start, size)

            def rest(first, channel, index, lanes):
                x_, n = (
                    vec.load_wide(b, tag, vec.at(b, each, b.add(channel, index), size), lanes)
                    for each in (source, gradient)
                )
                add(x_, n, b.add(first, index))

            vec.each(b, pairs, narrow, turn)
            for first, channel, length in rests(b, pairs, start, field("tail")):
                vec.each(b, length, widths[-1:], functools.partial(rest, first, channel))
            for sum_, target in ((square, squares), (dot, dots)):
                sum_.store_eight(vec.at(b, target, at, EIGHT * width), has_rest)

    for number, (layout, out_layout, _) in enumerate(MODES[:STREAMING]):
        with b.if_then(b.icmp_signed("==", mode, vec.constant(I64, 1, number))):
            row(layout, out_layout)


@emitted(TAG, INT, RECORD, *[INT] * 8)
def back_rows(b, tag, mode, piece, x, out, gain, turned, roots, factors, gains, count):
    """Write the gradient of x of `count` rows to `out`, and add that of the weights to `gains`.

    `turned` holds n, `roots` r and `factors` r * d / m, the last two as float64.
    """
    field = reader(b, piece)
    _, size, real, widths = ELEMENTS[tag]
    width, narrow = vec.width_of(tag), tuple(lanes for lanes in widths if lanes <= _LANES)
    names = "pairs", "start", "width", "x_2", "out_2"
    pairs, start, channels, x_step, out_step = map(field, names)

    def rows_from(indices, lanes, body):
        """Build a loop of `body(source, target, change)` over the rows.

        `change(number, x)` is the gradient of the channels x whose weights begin at
        `indices[number]`.
        """
        places = [b.mul(index, vec.constant(I64, 1, width)) for index in indices]
        weights = [vec.load(b, real, b.add(gain, place), lanes) for place in places]
        totals = [on_stack(b, vec.vector(real, lanes)) for _ in places]
        for total in totals:
            b.store(vec.constant(real, lanes, 0.0), total)
        with vec.loop(b, NONE, count, 1) as at:
            line = vec.opaque(b, vec.at(b, turned, b.mul(at, channels), width))
            root, factor = (
                vec.as_real(b, tag, vec.load(b, F64, vec.at(b, each, at, 8)))
                for each in (roots, factors)
            )
            root, factor = (vec.splat(b, each, lanes) for each in (root, factor))

            def change(number, x_):
                n = vec.load(b, real, b.add(line, places[number]), lanes)
                normal = b.fmul(x_, root)
                total = totals[number]
                b.store(b.fadd(b.load(total), b.fmul(n, normal)), total)
                left = b.fsub(b.fmul(weights[number], n), b.fmul(normal, factor))
                return b.fmul(left, root)

            source, target = (
                vec.opaque(b, vec.stepped(b, each, at, step))
                for each, step in ((x, x_step), (out, out_step))
            )
            body(source, target, change)
        for place, total in zip(places, totals, strict=True):
            to = b.add(gains, place)
            vec.store(b, b.fadd(vec.load(b, real, to, lanes), b.load(total)), to)

    def turn(form, index, lanes):
        layout, _, streaming = form
        # a row's whole cache lines: half of one, stored past the caches, takes far longer
        held = min(lanes, vec.held(tag))
        firsts = [b.add(index, before) for before, _ in vec.pieces(tag, lanes)]

        def row(source, target, change):
            source, target = (vec.at(b, each, start, size) for each in (source, target))
            for number, first in enumerate(firsts):
                both = vec.load_pairs(b, tag, source, first, pairs, held, layout)
                both = [change(2 * number + side, x_) for side, x_ in enumerate(both)]
                vec.store_pairs(b, tag, target, first, pairs, *both, layout, streaming)

        indices = [each for first in firsts for each in (first, b.add(pairs, first))]
        rows_from(indices, held, row)

    def rest(first, channel, index, lanes):
        def row(source, target, change):
            source, target = (
                vec.at(b, each, b.add(channel, index), size) for each in (source, target)
            )
            value = change(0, vec.load_wide(b, tag, source, lanes))
            vec.store_wide(b, tag, target, value)

        rows_from((b.add(first, index),), lanes, row)

    by_mode(b, mode, pairs, narrow, turn)
    for first, channel, length in rests(b, pairs, start, field("tail")):
        vec.each(b, length, widths[-1:], functools.partial(rest, first, channel))
