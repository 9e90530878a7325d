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
from numba.extending import intrinsic

from . import vectors as vec
from .instructions import POINTER, copy_bytes, member_at, members
from .vectors import ELEMENTS, F32, I64, NONE

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


def reader(b: ir.IRBuilder, *records: tuple[types.Type, ir.Value]) -> Callable[[str], ir.Value]:
    """Return a function that loads a whole number from the first record with a field of a name."""

    def field(name: str) -> ir.Value:
        kind, record = next(each for each in records if name in each[0].fields)
        return b.load(member_at(b, record, kind.offset(name), I64))

    return field


class Tables:
    """The table rows by which a run of rows is rotated, in the type of the arithmetic.

    `tables` are the addresses of cos, sin and row numbers (or 0), and the offset in bytes of the
    first table row, or of the first row number.
    """

    def __init__(
        self, b: ir.IRBuilder, tag: types.Type, field: Callable[[str], ir.Value], tables: ir.Value
    ) -> None:
        self.b, self.tag = b, tag
        self.cos, sin, self.rows, self.row = members(b, tables)
        self.row_size, self.step = field("row_size"), field("table_2")
        self.sign = b.sitofp(field("sign"), ELEMENTS[tag].real)
        self.apart = b.sub(sin, self.cos)

    def row_at(self, at: ir.Value, index: ir.Value) -> ir.Value:
        """Return the address of the cosines of row `at`, from pair `index` on."""
        b = self.b
        offset = vec.stepped(b, self.row, at, self.step)
        before = b.block
        with b.if_then(b.icmp_signed("!=", self.rows, NONE)):
            picked = b.mul(vec.load(b, I64, b.add(self.rows, offset)), self.row_size)
            after = b.block
        place = b.phi(I64)
        place.add_incoming(offset, before)
        place.add_incoming(picked, after)
        return vec.opaque(b, b.add(vec.at(b, self.cos, index, 4), place))

    def cos_sin(
        self, row: ir.Value, index: ir.Value, lanes: int, reordered: bool = False
    ) -> tuple[ir.Value, ir.Value]:
        """Return cos and sin of `lanes` pairs from `index` on; sin has the sign of the rotation."""
        b, cos = self.b, vec.at(self.b, row, index, 4)
        both = cos, b.add(cos, self.apart)
        c, s = (vec.load_reals(b, F32, each, lanes, reordered) for each in both)
        if ELEMENTS[self.tag].real is vec.F64:
            c, s = (vec.as_double(b, value) for value in (c, s))
        return c, b.fmul(s, vec.splat(b, self.sign, lanes))


def turned(
    b: ir.IRBuilder, u: ir.Value, v: ir.Value, c: ir.Value, s: ir.Value
) -> tuple[ir.Value, ir.Value]:
    return b.fsub(b.fmul(u, c), b.fmul(v, s)), b.fadd(b.fmul(v, c), b.fmul(u, s))


def turned_back(
    b: ir.IRBuilder, u: ir.Value, v: ir.Value, c: ir.Value, s: ir.Value
) -> tuple[ir.Value, ir.Value]:
    return b.fadd(b.fmul(u, c), b.fmul(v, s)), b.fsub(b.fmul(v, c), b.fmul(u, s))


def by_mode(
    b: ir.IRBuilder, mode: ir.Value, modes: tuple[tuple[str, str, bool], ...], pairs: ir.Value,
    widths: tuple[int, ...], body: Callable[..., None],
) -> None:  # fmt: skip
    """Build `body(layout, out_layout, streaming, index, lanes)` over all pairs, in each mode.

    `mode` selects one of them when the loop runs.
    """
    for number, form in enumerate(modes):
        with b.if_then(b.icmp_signed("==", mode, vec.constant(I64, 1, number))):
            vec.each(b, pairs, widths, functools.partial(body, *form))


@intrinsic
def rotate_rows(context, tag, mode, form, steps, x, out, tables, count, ahead):
    """Rotate `count` rows of one tensor.

    x and out are the addresses of the first row; `tables` is as in `Tables`. The row `ahead` bytes
    after each row of x is prefetched.
    """

    def generate(context, b, signature, arguments):
        _, mode, *records, x, out, tables, count, ahead = arguments
        field = reader(b, *zip((form, steps), records, strict=True))
        tables = Tables(b, tag, field, tables)
        pairs, x_step, out_step = map(field, ("pairs", "x_2", "out_2"))
        start, head, tail, tail_size = map(field, ("start", "head", "tail", "tail_size"))

        def rotate(layout, out_layout, streaming, index, lanes):
            ends = (x, layout, x_step), (out, out_layout, out_step)
            with vec.loop(b, NONE, count, 1) as at:
                source, target = (
                    vec.opaque(b, vec.stepped(b, vec.at(
                        b, b.add(end, start), vec.channel_of(b, index, order), ELEMENTS[tag].size
                    ), at, step))
                    for end, order, step in ends
                )  # fmt: skip
                table = tables.row_at(at, index)
                vec.prefetch_pairs(b, tag, source, NONE, pairs, lanes, layout, ahead)
                for first, count_ in vec.pieces(tag, lanes):
                    order = vec.is_reordered(tag, count_, layout, out_layout)
                    c, s = tables.cos_sin(table, first, count_, order)
                    u, v = vec.load_pairs(b, tag, source, first, pairs, count_, layout, order)
                    both = turned(b, u, v, c, s)
                    vec.store_pairs(
                        b, tag, target, first, pairs, *both, out_layout, streaming, order
                    )

        by_mode(b, mode, MODES, pairs, ELEMENTS[tag].lanes, rotate)
        with (
            b.if_then(b.icmp_signed("!=", b.or_(head, tail_size), NONE)),
            vec.loop(b, NONE, count, 1) as at,
        ):
            ends = vec.stepped(b, out, at, out_step), vec.stepped(b, x, at, x_step)
            for skipped, size in ((NONE, head), (tail, tail_size)):
                to, origin = (b.inttoptr(b.add(end, skipped), POINTER) for end in ends)
                copy_bytes(b, to, origin, size)
        return context.get_dummy_value()

    numbers = types.int64, types.int64, types.UniTuple(types.int64, 4), types.int64, types.int64
    return types.void(tag, types.int64, form, steps, *numbers), generate
