"""One row of a tensor and one row of a table, as LLVM vector instructions.

They are not left to the auto-vectoriser. It would have to prove that six streams do not overlap,
and cannot when the rotation is in place; here every load of a pair comes before its stores by
construction, so the same code serves both. A fused multiply-add is never used in the rotation:
products and sums are rounded one by one, as in the plain formula, so the bits do not depend on the
machine or on where a chunk ends.

The element type is told by a tag, a NumPy scalar of the type that holds the bits: float32, float64,
uint16 for bfloat16, int16 for float16.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_BYTES = {_I16: 2, _F16: 2, _I32: 4, _F32: 4, _F64: 8}
# tag -> (type in memory, bytes, type of the arithmetic, lanes of the vectors): the widest fills a
# cache line of 64 bytes with each store
_ELEMENTS = {
    types.float32: (_F32, 4, _F32, (64, 32, 16)),
    types.float64: (_F64, 8, _F64, (16, 8)),
    types.uint16: (_I16, 2, _F32, (64, 32, 16)),
    types.int16: (_F16, 2, _F32, (64, 32, 16)),
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
        if lanes > 1:
            order = [number for lane in range(lanes) for number in (lanes, lane)]
            value = _pick(b, value, _constant(_I16, lanes, 0), order)
        else:
            value = b.shl(b.zext(value, _I32), _constant(_I32, 1, 16))
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
    if tag is types.int16:
        return b.fptrunc(value, _vector(_F16, lanes))
    return _bfloat16(b, value, value, range(lanes)) if tag is types.uint16 else value


def _bfloat16(b: ir.IRBuilder, one: ir.Value, other: ir.Value, order: Sequence[int]) -> ir.Value:
    """Two vectors of float32, of which `order` picks the lanes, rounded to nearest even.

    The halves of the words are parted by one shuffle each and rounded 16 bits wide. Results of
    arithmetic: a NaN is quiet, and the next number above it, which does not wrap, is one too.
    """
    lanes = len(order)
    if lanes == 1:
        bits = b.bitcast(one, _I32)
        low, high = b.trunc(bits, _I16), b.trunc(b.lshr(bits, _constant(_I32, 1, 16)), _I16)
    else:
        halves = [b.bitcast(value, _vector(_I16, 2 * value.type.count)) for value in (one, other)]
        low, high = (_pick(b, *halves, [2 * lane + side for lane in order]) for side in (0, 1))

    def constant(number: int) -> ir.Constant:
        return _constant(_I16, lanes, number)

    middle = b.sub(constant(0x8000), b.and_(high, constant(1)))
    below_last = b.select(b.icmp_unsigned("<", high, constant(0xFFFE)), high, constant(0xFFFE))
    above = _saturating_add(b, below_last, constant(1))
    return b.select(b.icmp_unsigned(">", low, middle), above, high)


def _store(b: ir.IRBuilder, value: ir.Value, size: int, address: ir.Value, streaming: bool) -> None:
    pointer = b.inttoptr(address, value.type.as_pointer())
    if not streaming or not isinstance(value.type, ir.VectorType):
        b.store(value, pointer, align=size)
        return
    hint = b.module.add_metadata([_constant(_I32, 1, 1)])
    whole = value.type.count * _BYTES[value.type.element]
    b.store(value, pointer, align=min(whole, 64)).set_metadata("nontemporal", hint)


def _saturating_add(b: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """The sum of signed numbers, or the largest one."""
    kind = one.type
    lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(kind, [kind, kind]), f"llvm.sadd.sat.{lanes}i16"
    )
    return b.call(function, [one, other])


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
    """`body(index, lanes)` in the widest vectors that fit, then in narrower ones."""
    done: ir.Value = _constant(_I64, 1, 0)
    for lanes in (*widths, 1):
        whole = b.and_(count, _constant(_I64, 1, -lanes))
        with _loop(b, done, whole, lanes) as index:
            body(index, lanes)
        done = whole


def _prefetch(b: ir.IRBuilder, address: ir.Value, ahead: ir.Value, size: int) -> None:
    """Ask for the cache lines of so many bytes, to be read in the next run of rows."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    for_reading, keep, data = (_constant(_I32, 1, number) for number in (0, 3, 1))
    for line in range(0, size, 64):
        pointer = b.add(b.add(address, ahead), _constant(_I64, 1, line))
        b.call(prefetch, [b.inttoptr(pointer, cgutils.voidptr_t), for_reading, keep, data])


def _load_pairs(
    b: ir.IRBuilder, tag: types.Type, row: ir.Value, index: ir.Value, pairs: ir.Value, lanes: int,
    ahead: ir.Value, *, interleaved: bool,
) -> tuple[ir.Value, ir.Value]:  # fmt: skip
    size = _ELEMENTS[tag][1]
    if not interleaved:
        first = _address(b, row, index, size)
        ends = first, _address(b, first, pairs, size)
        for end in ends if lanes > 1 else ():
            _prefetch(b, end, ahead, lanes * size)
        return _load_wide(b, tag, ends[0], lanes), _load_wide(b, tag, ends[1], lanes)
    both = _address(b, row, index, 2 * size)
    if lanes > 1:
        _prefetch(b, both, ahead, 2 * lanes * size)
    if tag is types.uint16:  # a pair is a word of 32 bits
        words = _load(b, _I32, size, both, lanes)
        lower = b.shl(words, _constant(_I32, lanes, 16))
        upper = b.and_(words, _constant(_I32, lanes, 0xFFFF0000))
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
    if lanes == 1:
        _store_wide(b, tag, both, one)
        _store_wide(b, tag, _address(b, both, _constant(_I64, 1, 1), size), other)
        return
    order = [lane + side * lanes for lane in range(lanes) for side in (0, 1)]
    if tag is types.uint16:
        pairs_ = _bfloat16(b, one, other, order)
    else:
        pairs_ = _pick(b, *(_narrowed(b, tag, value, lanes) for value in (one, other)), order)
    _store(b, pairs_, size, both, streaming)


# how a rotation reads and writes pairs, and whether its stores go past the caches
MODES = (
    ("half", "half", False),
    ("interleaved", "interleaved", False),
    ("half", "interleaved", False),
    ("interleaved", "half", False),
    ("half", "half", True),
    ("interleaved", "interleaved", True),
)


@intrinsic
def rotate_rows(context, tag, mode, form, steps, x, out, tables, count, ahead):
    """Rotate `count` rows of one tensor.

    x and out are the addresses of the first row; `tables` those of cos, sin and row numbers, or 0,
    and the offset of its row of the table, or of its row number. The memory so many bytes `ahead`
    of each row of x is asked for.
    """

    def generate(context, b, signature, arguments):
        _, job_mode, *records, x, out, tables, count, ahead = arguments
        cos, sin, rows, row = cgutils.unpack_tuple(b, tables)

        def field(name: str) -> ir.Value:
            side = name not in form.fields
            kind = (form, steps)[side]
            return b.load(cgutils.get_record_member(b, records[side], kind.offset(name), _I64))

        pairs, row_size = field("pairs"), field("row_size")
        x_step, out_step, table_step = map(field, ("x_2", "out_2", "table_2"))
        start, head, tail, tail_size = map(field, ("start", "head", "tail", "tail_size"))
        sign = b.sitofp(field("sign"), _ELEMENTS[tag][2])
        none, apart = _constant(_I64, 1, 0), b.sub(sin, cos)

        def table_offset(at: ir.Value) -> ir.Value:
            offset = b.add(row, b.mul(at, table_step))
            before = b.block
            with b.if_then(b.icmp_signed("!=", rows, none)):
                picked = b.mul(_load(b, _I64, 8, b.add(rows, offset), 1), row_size)
                after = b.block
            result = b.phi(_I64)
            result.add_incoming(offset, before)
            result.add_incoming(picked, after)
            return result

        def rotate(mode: tuple[str, str, bool], index: ir.Value, lanes: int) -> None:
            with _loop(b, none, count, 1) as at:
                source = _opaque(b, b.add(b.add(x, start), b.mul(at, x_step)))
                target = _opaque(b, b.add(b.add(out, start), b.mul(at, out_step)))
                table = _opaque(b, b.add(b.add(cos, _address(b, none, index, 4)), table_offset(at)))
                c, s = (_load(b, _F32, 4, each, lanes) for each in (table, b.add(table, apart)))
                _rotate(b, tag, source, target, c, s, index, pairs, sign, ahead, *mode)

        for number, mode in enumerate(MODES):
            with b.if_then(b.icmp_signed("==", job_mode, _constant(_I64, 1, number))):
                _each(b, pairs, _ELEMENTS[tag][3], functools.partial(rotate, mode))
        with (
            b.if_then(b.icmp_signed("!=", b.or_(head, tail_size), none)),
            _loop(b, none, count, 1) as at,
        ):
            ends = b.add(out, b.mul(at, out_step)), b.add(x, b.mul(at, x_step))
            for skipped, size in ((none, head), (tail, tail_size)):
                to, come = (b.inttoptr(b.add(end, skipped), cgutils.voidptr_t) for end in ends)
                cgutils.raw_memcpy(b, to, come, size, 1)
        return context.get_dummy_value()

    numbers = types.int64, types.int64, types.UniTuple(types.int64, 4), types.int64, types.int64
    return types.void(tag, types.int64, form, steps, *numbers), generate


def _opaque(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The same number, which the compiler cannot see through.

    From what it sees of an address it makes a counter for each load and store, more than there are
    registers, and counting takes as long as rotating.
    """
    return b.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [value], side_effect=False)


def _rotate(
    b: ir.IRBuilder, tag: types.Type, x: ir.Value, out: ir.Value, c: ir.Value, s: ir.Value,
    index: ir.Value, pairs: ir.Value, sign: ir.Value, ahead: ir.Value,
    layout: str, out_layout: str, streaming: bool,
) -> None:  # fmt: skip
    lanes = c.type.count if isinstance(c.type, ir.VectorType) else 1
    if _ELEMENTS[tag][2] is _F64:
        c, s = (b.fpext(value, _vector(_F64, lanes)) for value in (c, s))
    s = b.fmul(s, _splat(b, sign, lanes))
    u, v = _load_pairs(b, tag, x, index, pairs, lanes, ahead, interleaved=layout == "interleaved")
    one = b.fsub(b.fmul(u, c), b.fmul(v, s))
    other = b.fadd(b.fmul(v, c), b.fmul(u, s))
    _store_pairs(
        b, tag, out, index, pairs, lanes, one, other,
        interleaved=out_layout == "interleaved", streaming=streaming,
    )  # fmt: skip


@intrinsic
def fence(context):
    """Make streaming stores visible before anything that follows."""

    def generate(context, b, signature, arguments):
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def take(context, address):
    """The int64 at an address, which then is one more: atomic, so every thread takes another."""

    def generate(context, b, signature, arguments):
        pointer = b.inttoptr(arguments[0], _I64.as_pointer())
        return b.atomic_rmw("add", pointer, _constant(_I64, 1, 1), "monotonic")

    return types.int64(types.int64), generate


@intrinsic
def load_int(context, address):
    def generate(context, b, signature, arguments):
        return _load(b, _I64, 8, arguments[0], 1)

    return types.int64(types.int64), generate


def record(fields: np.dtype[np.void]) -> Callable[..., object]:
    """The reader of a record: from its address to a value with these fields, in compiled code."""
    kind = numba.from_dtype(fields)

    @intrinsic
    def at(context, address):
        def generate(context, b, signature, arguments):
            return b.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return at


@intrinsic
def call_address(context, function, argument):
    """Call a C function `void (int64_t)` by its address."""

    def generate(context, b, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_I64]).as_pointer()
        b.call(b.inttoptr(arguments[0], kind), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def call_number(context, function):
    """What a C function `int (void)` returns, called by its address."""

    def generate(context, b, signature, arguments):
        kind = ir.FunctionType(_I32, []).as_pointer()
        return b.sext(b.call(b.inttoptr(arguments[0], kind), []), _I64)

    return types.int64(types.int64), generate


@intrinsic
def load_double(context, address):
    def generate(context, b, signature, arguments):
        return _load(b, _F64, 8, arguments[0], 1)

    return types.float64(types.int64), generate


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


def _table_filler(per_pair: bool) -> Callable[..., object]:
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


table_row = _table_filler(per_pair=False)
table_row_axes = _table_filler(per_pair=True)
