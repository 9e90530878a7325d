"""Small parts of the compiled loops as LLVM instructions, and one row of a table of cos and sin."""

from collections.abc import Callable

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import vectors as vec
from .instructions import INT, REAL, compiles_for, emitted, members
from .vectors import F32, F64, I32, I64


@emitted()
def fence(b):
    """Make streaming stores visible before anything that follows."""
    b.fence("seq_cst")


@emitted(INT, result=INT)
def take(b, address):
    """Return the int64 at an address and add 1 to it, atomically: no two threads get the same."""
    pointer = b.inttoptr(address, I64.as_pointer())
    return b.atomic_rmw("add", pointer, vec.constant(I64, 1, 1), "monotonic")


@emitted(INT, result=INT)
def load_int(b, address):
    return vec.load(b, I64, address)


def record(fields: np.dtype[np.void]) -> Callable[..., object]:
    """Return a function for compiled code that takes an address, and returns the record there."""
    kind = numba.from_dtype(fields)

    @intrinsic
    def at(context, address):
        def generate(context, b, signature, arguments):
            return b.inttoptr(arguments[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return at


@intrinsic
def call_address(context, function, numbers):
    """Call a C function `void (int64_t, ...)` by its address, on a tuple of numbers."""

    def generate(context, b, signature, arguments):
        values = members(b, arguments[1])
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(values)).as_pointer()
        b.call(b.inttoptr(arguments[0], kind), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(numbers))), generate


@emitted(INT, result=INT)
def call_number(b, function):
    """Call a C function `int (void)` by its address, and return its result."""
    kind = ir.FunctionType(I32, []).as_pointer()
    return b.sext(b.call(b.inttoptr(function, kind), []), I64)


@emitted(INT, result=REAL)
def load_double(b, address):
    return vec.load(b, F64, address)


@emitted(INT, REAL)
def store_double(b, address, value):
    vec.store(b, value, address)


# coefficients of sin(x) / x and cos(x) in x^2, interpolated at Chebyshev nodes of [0, (pi/4)^2];
# errors 3e-9 and 5e-11
_SIN = (0.9999999969177036, -0.16666650673996775, 0.00833203578559731, -0.000195039042508408)
_COS = (
    0.9999999999524894, -0.4999999961485761, 0.041666616692532826, -0.0013886617999647076,
    2.4379831251175367e-05,
)  # fmt: skip
# the same for x in units of 2^-64 quarter turns
_UNIT = np.pi / 2 / 2**64
SIN = tuple(each * _UNIT ** (2 * power + 1) for power, each in enumerate(_SIN))
COS = tuple(each * _UNIT ** (2 * power) for power, each in enumerate(_COS))


def _polynomial(b: ir.IRBuilder, x: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    lanes = vec.lanes_of(x)
    total: ir.Value = vec.constant(F64, lanes, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        product = b.fmul(total, x, flags=("contract",))  # a fused multiply-add where there is one
        total = b.fadd(product, vec.constant(F64, lanes, coefficient), flags=("contract",))
    return total


def _as_double(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Convert signed 64-bit integers to float64, for which AVX2 has no instruction."""
    lanes = vec.lanes_of(x)
    double = vec.vector(F64, lanes)
    if compiles_for("avx512dq", elsewhere=True):
        return b.sitofp(x, double)
    # the bits of each half are those of a float64: 2^84 + 2^63 + upper * 2^32, and 2^52 + lower
    upper = b.lshr(x, vec.constant(I64, lanes, 32))
    upper = b.xor(upper, vec.constant(I64, lanes, 0x4530000080000000))
    lower = b.and_(x, vec.constant(I64, lanes, 2**32 - 1))
    lower = b.or_(lower, vec.constant(I64, lanes, 0x4330000000000000))
    upper = b.fsub(b.bitcast(upper, double), vec.constant(F64, lanes, 2.0**84 + 2.0**63 + 2.0**52))
    return b.fadd(upper, b.bitcast(lower, double))


def _table_filler(per_pair: bool) -> Callable[..., object]:
    """Return what fills a table row: (positions, turns, pairs, scale, backwards, cos, sin) -> None.

    `positions` is the position of the row, or with `per_pair` the address of one position per pair;
    `backwards` is 1 for minus the angles.
    """

    @emitted(INT, INT, INT, REAL, INT, INT, INT)
    def table_row(b, positions, turns, pairs, scale, backwards, cos, sin):
        backwards = b.shl(backwards, vec.constant(I64, 1, 63))

        def fill(index: ir.Value, lanes: int) -> None:
            def bits(value: int) -> ir.Constant:
                return vec.constant(I64, lanes, value)

            position = (
                vec.load(b, I64, vec.at(b, positions, index, 8), lanes)
                if per_pair
                else vec.splat(b, positions, lanes)
            )
            step = vec.load(b, I64, vec.at(b, turns, index, 8), lanes)
            angle = b.mul(position, step)  # wraps modulo one turn: exact
            x = _as_double(b, b.shl(angle, bits(2)))  # from the nearest quarter turn
            square = b.fmul(x, x)
            a = vec.splat(b, scale, lanes)
            s = b.fmul(b.fmul(x, a), _polynomial(b, square, SIN))
            c = b.fmul(a, _polynomial(b, square, COS))

            quadrant = b.add(angle, bits(2**61))  # number of that quarter, in the upper 2 bits
            lower_bit = b.shl(quadrant, bits(1))
            is_odd = b.icmp_signed("<", lower_bit, bits(0))
            flip_cos = b.xor(quadrant, lower_bit)
            flip_sin = b.xor(quadrant, vec.splat(b, backwards, lanes))
            for address, one, other, flip in ((cos, c, s, flip_cos), (sin, s, c, flip_sin)):
                value = b.bitcast(b.select(is_odd, other, one), vec.vector(I64, lanes))
                sign = b.and_(flip, bits(-(2**63)))
                value = b.bitcast(b.xor(value, sign), vec.vector(F64, lanes))
                value = b.fptrunc(value, vec.vector(F32, lanes))
                vec.store(b, value, vec.at(b, address, index, 4))

        vec.each(b, pairs, (16,), fill)

    return table_row


table_row = _table_filler(per_pair=False)
table_row_axes = _table_filler(per_pair=True)
