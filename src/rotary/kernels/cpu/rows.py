"""The rotation of rows of a tensor by rows of the tables, as LLVM vector instructions.

LLVM's auto-vectorizer is not used: it would have to prove that six streams do not overlap, and
cannot when the rotation is in place. Here every pair is loaded before it is stored, so the same
code serves both cases. The rotation never uses a fused multiply-add: products and sums are rounded
one by one, as in the formula, so the bits do not depend on the machine or on where a chunk ends.
"""

# mypy: ignore-errors
# written with llvmlite, which has no types

import functools
from collections.abc import Callable

from llvmlite import ir
from numba import types

from . import short_floats
from . import vectors as vec
from .instructions import (
    INT,
    POINTER,
    RECORD,
    TAG,
    copy_bytes,
    emitted,
    member_at,
    members,
    tuple_of,
)
from .vectors import ELEMENTS, F32, F64, I64, NONE

# (layout, out_layout, whether stores bypass the caches)
MODES = (
    ("half", "half", False),
    ("interleaved", "interleaved", False),
    ("half", "interleaved", False),
    ("interleaved", "half", False),
    ("half", "half", True),
    ("interleaved", "interleaved", True),
)
STREAMING = MODES.index(("half", "half", True))  # the first mode whose stores bypass the caches
PLAIN = "interleaved", "half"  # layouts for which every dtype reads lines in order


def reader(b: ir.IRBuilder, *records: tuple[types.Type, ir.Value]) -> Callable[[str], ir.Value]:
    """Return a function that loads a whole number from the first record with a field of a name."""

    def field(name: str) -> ir.Value:
        kind, record = next(each for each in records if name in each[0].fields)
        return b.load(member_at(b, record, kind.offset(name), I64))

    return field


# by name, and by tag as in `vectors.py`
_DOUBLED = {
    *("float16", "int8", "float8_e4m3fn", "float8_e5m2"),
    *(types.int16, types.int8, types.uint8, types.boolean),
}


def is_doubled(dtype: str | types.Type, layout: str, out_layout: str) -> bool:
    """Return whether pairs are rotated where they lie: x times (c, c) plus swapped x times (-s, s).

    Taking pairs apart costs as much as rotating them, but the tables are twice as long. That does
    not pay for float32, which waits for memory, nor for bfloat16: of a pair, a word of 32 bits,
    each half becomes a float32 in one instruction.
    """
    return layout == out_layout == "interleaved" and dtype in _DOUBLED


def line_size(dtype: str, pairs: int, layout: str, out_layout: str) -> int:
    """Return the bytes of a row that `table_rows` writes."""
    lines = 4 if is_doubled(dtype, layout, out_layout) else 2
    return lines * pairs * (8 if dtype == "float64" else 4)


@emitted(TAG, INT, RECORD, RECORD, tuple_of(4), INT, INT)
def table_rows(b, tag, mode, form, steps, tables, count, target):
    """Write rows of the tables to `target`, in the form in which `rotate_rows` reads them.

    tables  the addresses of cos, sin and row numbers (or 0), and the offset in bytes of the first
            table row, or of the first row number
    target  cos and then sin of each row, in the type of the arithmetic; sin has the sign of the
            rotation

    It writes `count` rows, or a single one if the rows of x share it.
    """
    fill_lines(b, tag, mode, reader(b, form, steps), tables, count, target)


def fill_lines(
    b: ir.IRBuilder, tag: types.Type, mode: ir.Value, field: Callable[[str], ir.Value],
    tables: ir.Value, count: ir.Value, target: ir.Value,
    weights_at: Callable[..., tuple[ir.Value, ir.Value]] | None = None,
) -> None:  # fmt: skip
    """Build `table_rows`. With `weights_at(row, index, lanes, order)`, multiply by two weights.

    Those are the weights of the first and of the second members of the pairs, and a line then has
    c * first, s * second, c * second, s * first.
    """
    cos, sin, rows, start = members(b, tables)
    pairs, row_size, step, line = map(field, ("pairs", "row_size", "table_2", "line"))
    real, width = ELEMENTS[tag].real, vec.width_of(tag)
    sign = b.sitofp(field("sign"), real)
    count = b.select(b.icmp_signed("==", line, NONE), vec.constant(I64, 1, 1), count)
    # the layouts for which rows of this dtype are not read in order
    special = "interleaved" if is_doubled(tag, "interleaved", "interleaved") else "half"
    special_mode = MODES.index((special, special, False))
    with vec.loop(b, NONE, count, 1) as at:
        offset = vec.stepped(b, start, at, step)
        before = b.block
        with b.if_then(b.icmp_signed("!=", rows, NONE)):
            picked = b.mul(vec.load(b, I64, b.add(rows, offset)), row_size)
            after = b.block
        place = b.phi(I64)
        place.add_incoming(offset, before)
        place.add_incoming(picked, after)
        to = vec.opaque(b, vec.stepped(b, target, at, line))

        def fill(layouts, index, lanes):
            order = vec.is_reordered(tag, lanes, *layouts)
            addresses = (vec.at(b, b.add(table, place), index, 4) for table in (cos, sin))
            loaded = (vec.load(b, F32, address, lanes) for address in addresses)
            c, s = (short_floats.reordered(b, each) if order else each for each in loaded)
            if real is F64:
                c, s = vec.as_double(b, c), vec.as_double(b, s)
            s = b.fmul(s, vec.splat(b, sign, lanes))
            parts = [c, s]
            if weights_at is not None:
                first, second = weights_at(at, index, lanes, order)
                parts = [b.fmul(c, first), b.fmul(s, second)]
                parts += [b.fmul(c, second), b.fmul(s, first)]
            if tag is types.uint16:
                parts = [short_floats.plain(b, part) for part in parts]
            if not is_doubled(tag, *layouts):
                for number, part in enumerate(parts):
                    after = b.mul(pairs, vec.constant(I64, 1, number))
                    vec.store(b, part, vec.at(b, to, b.add(index, after), width))
                return
            first = vec.at(b, to, b.add(index, index), width)
            second = vec.at(b, first, b.add(pairs, pairs), width)
            vec.store(b, vec.mixed(b, parts[0], parts[-2]), first)
            vec.store(b, vec.mixed(b, b.fneg(parts[1]), parts[-1]), second)

        last = b.and_(mode, vec.constant(I64, 1, STREAMING - 1))  # the mode that does not stream
        is_special = b.icmp_signed("==", last, vec.constant(I64, 1, special_mode))
        with b.if_else(is_special) as branches:
            for layouts, branch in zip(((special, special), PLAIN), branches, strict=True):
                with branch:
                    vec.each(b, pairs, (32, 16), functools.partial(fill, layouts))


def rotate_pairs(
    b: ir.IRBuilder, tag: types.Type, ends: tuple[ir.Value, ir.Value], line: ir.Value,
    pairs: ir.Value, lanes: int, form: tuple[str, str, bool],
    scaled: Callable[[ir.Value, ir.Value], ir.Value] | None = None,
) -> None:  # fmt: skip
    """Rotate `lanes` pairs from the first address in `ends` to the second.

    `line` is the address of their first number in a row that `table_rows` wrote, or, if there is
    `scaled(x, channel)`, one with weights. That multiplies x by factors before the rotation;
    `channel` counts as the factors lie in memory.
    """
    layout, out_layout, streaming = form
    source, target = ends
    size, real, width = ELEMENTS[tag].size, ELEMENTS[tag].real, vec.width_of(tag)
    doubled = is_doubled(tag, layout, out_layout)

    def numbers(index, part, count):
        step = b.add(pairs, pairs) if doubled else pairs
        index = b.add(index, b.mul(step, vec.constant(I64, 1, part)))
        return vec.load(b, real, vec.at(b, line, index, width), count)

    def factored(x, index):
        return x if scaled is None else scaled(x, index)

    for first, count in vec.pieces(tag, lanes):
        if doubled:
            channel = b.add(first, first)
            source_, target_ = (vec.at(b, end, channel, size) for end in ends)
            x = factored(vec.load_wide(b, tag, source_, 2 * count), channel)
            c, s = (numbers(channel, part, 2 * count) for part in (0, 1))
            y = b.fadd(b.fmul(x, c), b.fmul(vec.swapped(b, x), s))
            vec.store_wide(b, tag, target_, y, streaming and count > 1)
            continue
        order = vec.is_reordered(tag, count, layout, out_layout)
        c, s = numbers(first, 0, count), numbers(first, 1, count)
        other_c, other_s = c, s
        if scaled is not None:
            other_c, other_s = numbers(first, 2, count), numbers(first, 3, count)
        u, v = vec.load_pairs(b, tag, source, first, pairs, count, layout, order)
        u, v = factored(u, first), factored(v, b.add(pairs, first))
        one = b.fsub(b.fmul(u, c), b.fmul(v, s))
        other = b.fadd(b.fmul(v, other_c), b.fmul(u, other_s))
        vec.store_pairs(b, tag, target, first, pairs, one, other, out_layout, streaming, order)


def line_at(
    b: ir.IRBuilder, tag: types.Type, table: ir.Value, index: ir.Value, at: ir.Value,
    step: ir.Value, form: tuple[str, str, bool],
) -> ir.Value:  # fmt: skip
    """Return the address of pair `index` in row `at` of those that `table_rows` wrote."""
    size = numbers_per_pair(tag, form) * vec.width_of(tag)
    return vec.opaque(b, vec.stepped(b, vec.at(b, table, index, size), at, step))


def numbers_per_pair(tag: types.Type, form: tuple[str, str, bool]) -> int:
    """Return how many numbers of a row are from one pair to the next, where a line is read."""
    return 2 if is_doubled(tag, *form[:2]) else 1


def by_mode(
    b: ir.IRBuilder, mode: ir.Value, pairs: ir.Value, widths: tuple[int, ...],
    body: Callable[..., None],
) -> None:  # fmt: skip
    """Build `body(form, index, lanes)` over all pairs, for each form in MODES.

    `mode` selects one of them when the loop runs.
    """
    for number, form in enumerate(MODES):
        with b.if_then(b.icmp_signed("==", mode, vec.constant(I64, 1, number))):
            vec.each(b, pairs, widths, functools.partial(body, form))


@emitted(TAG, INT, RECORD, RECORD, *[INT] * 5)
def rotate_rows(b, tag, mode, form, steps, x, out, table, count, ahead):
    """Rotate `count` rows of one tensor.

    x, out and table are the addresses of the first row; `table_rows` wrote those of the table. The
    row `ahead` bytes after each row of x is prefetched.
    """
    field = reader(b, form, steps)
    pairs, x_step, out_step, line = map(field, ("pairs", "x_2", "out_2", "line"))
    start, head, tail, tail_size = map(field, ("start", "head", "tail", "tail_size"))

    def rotate(form, index, lanes):
        layout, out_layout, _ = form
        ends = (x, layout, x_step), (out, out_layout, out_step)
        with vec.loop(b, NONE, count, 1) as at:
            source, target = (
                vec.opaque(b, vec.stepped(b, vec.at(
                    b, b.add(end, start), vec.channel_of(b, index, order), ELEMENTS[tag].size
                ), at, step))
                for end, order, step in ends
            )  # fmt: skip
            row = line_at(b, tag, table, index, at, line, form)
            vec.prefetch_pairs(b, tag, source, NONE, pairs, lanes, layout, ahead)
            rotate_pairs(b, tag, (source, target), row, pairs, lanes, form)

    by_mode(b, mode, pairs, ELEMENTS[tag].lanes, rotate)
    with (
        b.if_then(b.icmp_signed("!=", b.or_(head, tail_size), NONE)),
        vec.loop(b, NONE, count, 1) as at,
    ):
        ends = vec.stepped(b, out, at, out_step), vec.stepped(b, x, at, x_step)
        for skipped, size in ((NONE, head), (tail, tail_size)):
            to, origin = (b.inttoptr(b.add(end, skipped), POINTER) for end in ends)
            copy_bytes(b, to, origin, size)
