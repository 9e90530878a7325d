"""float8_e4m3fn and float8_e5m2 as LLVM vector instructions, from float32 and back.

A type is told by the bits of its mantissa, 3 or 2. Where the processor looks up bytes in a table
within a register (VBMI of x86), codes are looked up, and so is what rounds them; the bits are the
same.
"""

# mypy: ignore-errors
# written with llvmlite, which has no types

import functools

import numba
from llvmlite import binding, ir

from .instructions import (
    F16,
    F32,
    I8,
    I16,
    I32,
    at_most,
    constant,
    function_of,
    lanes_of,
    pick,
    vector,
)  # fmt: skip

_LARGEST = {3: 448.0, 2: 57344.0}
_AS_NAN = {3: 0x43F00000, 2: 0x47E00000}  # 480 and 114688: what 0x7F would be as a number
_FIRST = {3: 121, 2: 113}  # the exponent, in float32, of the smallest number that has all bits
_LAST = {3: 135, 2: 143}  # and that of 0x7F
_BYTES, _WORDS = 64, 16  # in a register of VBMI


@functools.cache
def _has_lookup() -> bool:
    """Whether Numba compiles for VBMI: this processor has it, and Numba was told no other."""
    config = numba.config
    is_own = config.CPU_NAME is None and config.CPU_FEATURES is None and config.ENABLE_AVX
    return bool(is_own and binding.get_host_cpu_features().get("avx512vbmi"))


def decoded(b: ir.IRBuilder, codes: ir.Value, mantissa: int) -> ir.Value:
    """Codes as float32, exactly."""
    lanes = lanes_of(codes)
    if lanes >= _WORDS and _has_lookup():
        return _looked_up(b, codes, mantissa)
    # float8_e5m2 is the upper half of a float16
    bits = b.shl(b.zext(codes, vector(I16, lanes)), constant(I16, lanes, 8))
    if mantissa == 3:  # its exponent by one bit longer, so 2^8 below; all ones is NaN
        bits = b.and_(b.ashr(bits, constant(I16, lanes, 1)), constant(I16, lanes, 0xBFFF))
        above = b.add(bits, constant(I16, lanes, 0x80))
        bits = b.or_(bits, b.and_(above, constant(I16, lanes, 0x4000)))
    number = b.fpext(b.bitcast(bits, vector(F16, lanes)), vector(F32, lanes))
    return number if mantissa == 2 else b.fmul(number, constant(F32, lanes, 2.0**8))


def encoded(b: ir.IRBuilder, value: ir.Value, mantissa: int) -> ir.Value:
    """Rounded to the nearest, ties to even; the largest numbers saturate, and NaN is 0x7F.

    To the size a number is added, the counter: its last bit is as much as that of the code, so the
    sum is rounded there, also below the first exponent. The last byte of the sum is the code, as
    the counter begins at that of the smallest number of its exponent.
    """
    lanes, whole = lanes_of(value), 23 - mantissa

    def bits(number: int) -> ir.Constant:
        return constant(I32, lanes, number)

    given = b.bitcast(value, vector(I32, lanes))
    size = b.bitcast(b.and_(given, bits(0x7FFFFFFF)), value.type)
    size = b.bitcast(at_most(b, size, _LARGEST[mantissa]), given.type)
    as_nan = bits(_AS_NAN[mantissa])
    size = b.select(b.icmp_unsigned("<", size, as_nan), size, as_nan)
    lowest = bits(_FIRST[mantissa] << 23)
    if lanes >= _WORDS and _has_lookup():
        floor = b.select(b.icmp_unsigned(">", size, lowest), size, lowest)
        counter = _counters(b, b.lshr(floor, bits(23)), mantissa)
        counted = b.bitcast(b.fadd(b.bitcast(size, value.type), counter), given.type)
        code, sign = _byte(b, counted, 0), _byte(b, given, 3)
    else:
        exponent = b.and_(size, bits(0x7F800000))
        exponent = b.select(b.icmp_unsigned(">", exponent, lowest), exponent, lowest)
        counter = b.add(exponent, bits((whole << 23) - (_FIRST[mantissa] << mantissa)))
        counter = b.add(counter, b.lshr(exponent, bits(whole)))
        counted = b.fadd(b.bitcast(size, value.type), b.bitcast(counter, value.type))
        code = b.trunc(b.bitcast(counted, given.type), vector(I8, lanes))
        sign = b.trunc(b.lshr(given, bits(24)), vector(I8, lanes))
    return b.or_(b.and_(code, constant(I8, lanes, 0x7F)), b.and_(sign, constant(I8, lanes, 0x80)))


# --- with tables in registers ---


def _looked_up(b: ir.IRBuilder, codes: ir.Value, mantissa: int) -> ir.Value:
    """Each code as a bfloat16, which holds it exactly, and two bytes of 0 behind that."""
    lanes = lanes_of(codes)
    numbers = [_bfloat16(code, mantissa) for code in range(128)]
    padding = [min(lane, lanes - 1) for lane in range(_BYTES)]
    index = pick(b, codes, codes, padding)
    low, high = (
        _lookup(b, index, *_halves(I8, [number >> shift & 0xFF for number in numbers]))
        for shift in (0, 8)
    )
    high = b.or_(high, b.and_(index, constant(I8, _BYTES, 0x80)))  # with the sign
    parts = []
    for start in range(0, lanes, _WORDS):
        order = [
            each for lane in range(start, start + _WORDS) for each in (0, 0, lane, _BYTES + lane)
        ]
        words = _lookup(b, _kept(b, ir.Constant(index.type, order)), low, high)
        words = b.and_(b.bitcast(words, vector(I32, _WORDS)), constant(I32, _WORDS, 0xFFFF0000))
        parts.append(b.bitcast(words, vector(F32, _WORDS)))
    return _joined(b, parts)


def _bfloat16(code: int, mantissa: int) -> int:
    """The bits of a code of 7 bits as a bfloat16."""
    exponent, rest = code >> mantissa, code & ((1 << mantissa) - 1)
    largest_exponent = (1 << (7 - mantissa)) - 1
    if code == 0x7F or (mantissa == 2 and exponent == largest_exponent):
        return 0x7FC0 if rest else 0x7F80
    if exponent:
        return (exponent + _FIRST[mantissa] - 1) << 7 | rest << (7 - mantissa)
    if not rest:
        return 0
    length = rest.bit_length()  # a number below the first exponent
    return (_FIRST[mantissa] - mantissa + length - 1) << 7 | (rest << (8 - length)) & 0x7F


def _counters(b: ir.IRBuilder, exponents: ir.Value, mantissa: int) -> ir.Value:
    """Of each exponent, 32 of them, the counter of `encoded`."""
    counters = [0] * 32
    for exponent in range(_FIRST[mantissa], _LAST[mantissa] + 1):
        code = (exponent - _FIRST[mantissa]) << mantissa
        counters[exponent % 32] = (exponent + 23 - mantissa) << 23 | code
    table = _halves(I32, counters)
    found = [_lookup(b, part, *table) for part in _parts(b, exponents, _WORDS)]
    return b.bitcast(_joined(b, found), vector(F32, lanes_of(exponents)))


def _byte(b: ir.IRBuilder, words: ir.Value, number: int) -> ir.Value:
    """One byte of each word of 32 bits."""
    parts = [b.bitcast(part, vector(I8, _BYTES)) for part in _parts(b, words, _WORDS)]
    if len(parts) == 1:
        return pick(b, parts[0], parts[0], range(number, _BYTES, 4))
    order = [4 * (lane % 32) + number for lane in range(_BYTES)]
    index = _kept(b, ir.Constant(vector(I8, _BYTES), order))
    found = [_lookup(b, index, *both) for both in zip(parts[::2], parts[1::2], strict=True)]
    return _joined(b, [pick(b, each, each, range(2 * _WORDS)) for each in found])


def _kept(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The same numbers in a register; from constants LLVM makes several slower instructions."""
    return b.asm(ir.FunctionType(value.type, [value.type]), "", "=v,0", [value], side_effect=False)


def _halves(element: ir.Type, table: list[int]) -> list[ir.Constant]:
    lanes = len(table) // 2
    return [ir.Constant(vector(element, lanes), table[at : at + lanes]) for at in (0, lanes)]


def _lookup(b: ir.IRBuilder, index: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """What a table, in two registers, holds at each index, of which the lowest bits count."""
    suffix = "qi" if low.type.element is I8 else "d"
    name = f"llvm.x86.avx512.vpermi2var.{suffix}.512"
    function = function_of(b.module, ir.FunctionType(low.type, [low.type] * 3), name)
    return b.call(function, [low, index, high])


def _parts(b: ir.IRBuilder, value: ir.Value, lanes: int) -> list[ir.Value]:
    starts = range(0, lanes_of(value), lanes)
    stop = min(lanes, lanes_of(value))
    return [pick(b, value, value, range(start, start + stop)) for start in starts]


def _joined(b: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """Vectors behind each other: 1, 2 or 4 of them."""
    while len(parts) > 1:
        parts = [
            pick(b, one, other, range(2 * lanes_of(one)))
            for one, other in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]
