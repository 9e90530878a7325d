"""Convert floats of 16 and 8 bits to float32 and back, as LLVM vector instructions.

Formats are named by the bits of their mantissas: 10 for float16, 3 for float8_e4m3fn, 2 for
float8_e5m2. On a processor without instructions for float16, integer arithmetic converts it. On one
that looks up bytes in a table within registers (VBMI of x86), 8-bit codes are looked up, and so are
the counters that round them. One that adds products of 16-bit numbers (VNNI) rounds to bfloat16 in
two instructions. The results are the same.
"""

# mypy: ignore-errors
# written with llvmlite, which has no types

import math

from llvmlite import ir

from .instructions import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    at_most,
    compiles_for,
    constant,
    function_of,
    joined,
    lanes_of,
    pick,
    vector,
)  # fmt: skip

_ABOVE = {10: 2.0**16, 3: 448.0, 2: 57344.0}  # rounds to infinity in float16, the largest float8
_AS_NAN = {10: 0x47C00000, 3: 0x43F00000, 2: 0x47E00000}  # the float32 that rounds to NaN's code
_FIRST = {10: 113, 3: 121, 2: 113}  # the exponent bits, in float32, of the smallest normal number
_LAST = {3: 135, 2: 143}  # and those of the code 0x7F
_BYTES, _WORDS = 64, 16  # in a register of VBMI
_PACKED = (*range(4), *range(8, 12), *range(4, 8), *range(12, 16))  # how AVX2 packs 16 numbers
_HALVES = (*range(0, 32, 2), *range(1, 32, 2))  # of 16 words of 32 bits, the lower halves first


def _has_lookup() -> bool:
    return compiles_for("avx512vbmi", False)


def _has_float16() -> bool:
    return compiles_for("f16c", True)


def has_packing() -> bool:
    """Return whether numbers are packed within the halves of a register: AVX2 without AVX-512BW."""
    return compiles_for("avx2", False) and not compiles_for("avx512bw", False)


def _has_products() -> bool:
    """Return whether an instruction adds the products of two halves to a word: VNNI of AVX-512."""
    return compiles_for("avx512bw", False) and compiles_for("avx512vnni", False)


def order() -> tuple[int, ...]:
    """Return the order in which a block of bfloat16 is fastest converted; () if it is their own."""
    if _has_products():
        return _HALVES
    return _PACKED if has_packing() else ()


def decoded(b: ir.IRBuilder, codes: ir.Value, mantissa: int) -> ir.Value:
    """Return the numbers that codes stand for as float32, exactly."""
    lanes = lanes_of(codes)
    if mantissa == 10:
        return _float16(b, codes)
    if lanes >= _WORDS and _has_lookup():
        parts = _parts(b, codes, _BYTES)  # as many as a register holds
        return joined(b, [_looked_up(b, part, mantissa) for part in parts])
    # float8_e5m2 is the upper half of a float16
    bits = b.shl(b.zext(codes, vector(I16, lanes)), constant(I16, lanes, 8))
    if mantissa == 3:  # with an exponent one bit longer, 2^8 times too small; all ones is NaN
        bits = b.and_(b.ashr(bits, constant(I16, lanes, 1)), constant(I16, lanes, 0xBFFF))
        above = b.add(bits, constant(I16, lanes, 0x80))
        bits = b.or_(bits, b.and_(above, constant(I16, lanes, 0x4000)))
    number = _float16(b, bits)
    return number if mantissa == 2 else b.fmul(number, constant(F32, lanes, 2.0**8))


def _float16(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Return float16 as float32."""
    lanes = lanes_of(bits)
    if _has_float16():
        return b.fpext(b.bitcast(bits, vector(F16, lanes)), vector(F32, lanes))

    def number(value: int) -> ir.Constant:
        return constant(I32, lanes, value)

    longer = b.zext(bits, vector(I32, lanes))
    size = b.shl(b.and_(longer, number(0x7FFF)), number(13))
    exponents = number((127 - 15) << 23)  # the exponent bias of float32 less that of float16
    above = b.icmp_unsigned(">=", size, number(0x7C00 << 13))  # infinity and NaN
    large = b.add(size, b.select(above, number(2 * (127 - 15) << 23), exponents))
    counted = b.bitcast(b.add(size, number(_FIRST[10] << 23)), vector(F32, lanes))
    small = b.bitcast(b.fsub(counted, constant(F32, lanes, 2.0**-14)), large.type)
    size = b.select(b.icmp_unsigned("<", size, number(1 << 23)), small, large)
    sign = b.shl(b.and_(longer, number(0x8000)), number(16))
    return b.bitcast(b.or_(size, sign), vector(F32, lanes))


def encoded(b: ir.IRBuilder, value: ir.Value, mantissa: int) -> ir.Value:
    """Return float32 as codes, rounded to nearest even; NaN is all ones, or 0x7E00 in float16.

    float8 saturates. A number, the counter, is added to the absolute value. The last bit of the
    counter is worth as much as that of the code, so the addition rounds at that bit, for subnormal
    numbers too. The low bits of the counter, (exponent - first exponent) << mantissa, make the low
    bits of the sum equal to the code.
    """
    lanes, whole = lanes_of(value), 23 - mantissa
    if mantissa == 10 and _has_float16():
        return b.bitcast(b.fptrunc(value, vector(F16, lanes)), vector(I16, lanes))

    def bits(number: int) -> ir.Constant:
        return constant(I32, lanes, number)

    whole_bits = b.bitcast(value, vector(I32, lanes))
    size = b.bitcast(b.and_(whole_bits, bits(0x7FFFFFFF)), value.type)
    size = b.bitcast(at_most(b, size, _ABOVE[mantissa]), whole_bits.type)
    as_nan = bits(_AS_NAN[mantissa])
    size = b.select(b.icmp_unsigned("<", size, as_nan), size, as_nan)
    lowest = bits(_FIRST[mantissa] << 23)
    code_type, top = (I16, 0x8000) if mantissa == 10 else (I8, 0x80)
    if code_type is I8 and lanes >= _WORDS and _has_lookup():
        floor = b.select(b.icmp_unsigned(">", size, lowest), size, lowest)
        counter = _counters(b, b.lshr(floor, bits(23)), mantissa)
        counted = b.bitcast(b.fadd(b.bitcast(size, value.type), counter), whole_bits.type)
        code, sign = _byte(b, counted, 0), _byte(b, whole_bits, 3)
    else:
        exponent = b.and_(size, bits(0x7F800000))
        exponent = b.select(b.icmp_unsigned(">", exponent, lowest), exponent, lowest)
        counter = b.add(exponent, bits((whole << 23) - (_FIRST[mantissa] << mantissa)))
        counter = b.add(counter, b.lshr(exponent, bits(whole)))
        counted = b.fadd(b.bitcast(size, value.type), b.bitcast(counter, value.type))
        code = b.trunc(b.bitcast(counted, whole_bits.type), vector(code_type, lanes))
        upper = b.lshr(whole_bits, bits(32 - code_type.width))
        sign = b.trunc(upper, vector(code_type, lanes))
    code = b.and_(code, constant(code_type, lanes, top - 1))
    return b.or_(code, b.and_(sign, constant(code_type, lanes, top)))


def bfloat16_of(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return float32 as bfloat16, rounded to nearest even."""
    lanes = lanes_of(value)
    if lanes == 1:
        bits = b.bitcast(value, I32)
        low, high = b.trunc(bits, I16), b.trunc(b.lshr(bits, constant(I32, 1, 16)), I16)
    elif has_packing() and lanes % len(_PACKED) == 0:
        parts = [_packed(b, part) for part in _parts(b, value, len(_PACKED))]
        return joined(b, [pick(b, part, part, _PACKED) for part in parts])
    else:
        halves = b.bitcast(value, vector(I16, 2 * lanes))
        low, high = (pick(b, halves, halves, range(side, 2 * lanes, 2)) for side in (0, 1))
    return _rounded(b, low, high)


def bfloat16_pairs(b: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """Return two vectors of float32 as one of bfloat16, rounded to nearest even, interleaved.

    A NaN must be one that `plain` returns, or have a lower half of 0.
    """
    lanes = lanes_of(one)
    lower, upper = (constant(I32, lanes, bits) for bits in (0xFFFF, 0xFFFF0000))
    half = constant(I32, lanes, 16)
    if _has_products() and lanes % _WORDS == 0:
        first, second = (_rounded_words(b, each) for each in (one, other))
        words = b.or_(b.lshr(first, half), b.and_(second, upper))
        return b.bitcast(words, vector(I16, 2 * lanes))
    if has_packing():
        first, second = (b.bitcast(each, vector(I32, lanes)) for each in (one, other))
        low = b.or_(b.and_(first, lower), b.shl(second, half))
        high = b.or_(b.lshr(first, half), b.and_(second, upper))
        low, high = (b.bitcast(each, vector(I16, 2 * lanes)) for each in (low, high))
    else:
        halves = [b.bitcast(value, vector(I16, 2 * lanes)) for value in (one, other)]
        order = [2 * (lane + side) for lane in range(lanes) for side in (0, lanes)]
        low, high = (pick(b, *halves, [lane + side for lane in order]) for side in (0, 1))
    return _rounded(b, low, high)


def _rounded_words(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return float32 whose upper halves are rounded to nearest even, as words; not all NaN.

    0x7FFF is added, and the last bit of the upper half: both are products with 1 of the halves of
    one word, which one instruction adds.
    """
    kind, words = vector(I32, _WORDS), []
    name = "llvm.x86.avx512.vpdpwssd.512"
    function = function_of(b.module, ir.FunctionType(kind, [kind] * 3), name)
    last, below, ones = (constant(I32, _WORDS, bits) for bits in (0x10000, 0x7FFF, 0x10001))
    for part in _parts(b, b.bitcast(value, vector(I32, lanes_of(value))), _WORDS):
        words.append(b.call(function, [part, b.or_(b.and_(part, last), below), ones]))
    return joined(b, words)


def plain(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return float32, with one NaN for all: the next number above another may be no NaN."""
    nan = constant(F32, lanes_of(value), math.nan)
    return b.select(b.fcmp_unordered("uno", value, value), nan, value)


def reordered(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return whole blocks of numbers in the order `order()`."""
    parts = _parts(b, value, len(order()))
    return joined(b, [pick(b, part, part, order()) for part in parts])


def packed(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return float32 in the order `order()`, of whole blocks, as bfloat16 in their own order."""
    size = len(order())
    if size == len(_PACKED):
        return joined(b, [_packed(b, part) for part in _parts(b, value, size)])
    halves = _parts(b, value, size // 2)
    both = zip(halves[::2], halves[1::2], strict=True)
    return joined(b, [bfloat16_pairs(b, *each) for each in both])


def _packed(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return 16 float32 as bfloat16, in the order `_PACKED`."""
    kind, words = vector(I8, 32), vector(I16, 16)
    order = [lane + byte for half in (0, 2) for lane in range(half, 16, 4) for byte in (0, 1)]
    function = function_of(b.module, ir.FunctionType(kind, [kind, kind]), "llvm.x86.avx2.pshuf.b")
    ends = []  # four lower halves, then four upper halves, in each half of a register
    for part in _parts(b, value, 8):
        grouped = b.call(function, [b.bitcast(part, kind), ir.Constant(kind, order * 2)])
        ends.append(b.bitcast(_in_register(b, grouped), vector(I64, 4)))
    low, high = (
        b.bitcast(pick(b, *ends, [side, side + 4, side + 2, side + 6]), words) for side in (0, 1)
    )
    return _rounded(b, low, high)


def unpacked(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Return bfloat16, whole blocks, as float32 in the order `order()`."""
    size, parts = len(order()), []
    for part in _parts(b, bits, size):
        if size == len(_PACKED):
            lanes = [number for lane in _PACKED for number in (size, lane)]  # 16 zero bits below
            value = pick(b, part, constant(I16, size, 0), lanes)
            parts.append(b.bitcast(value, vector(F32, size)))
        else:
            parts += halves_of(b, b.bitcast(part, vector(I32, size // 2)))
    return joined(b, parts)


def halves_of(b: ir.IRBuilder, words: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the bfloat16 in the lower halves of words, and those in the upper, as float32."""
    lanes = lanes_of(words)
    lower = b.shl(words, constant(I32, lanes, 16))
    upper = b.and_(words, constant(I32, lanes, 0xFFFF0000))
    return b.bitcast(lower, vector(F32, lanes)), b.bitcast(upper, vector(F32, lanes))


def in_registers(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Return 16-bit numbers in registers: one instruction converts to float16 and stores.

    LLVM takes it also for a store that is to bypass the caches, and then the store does not.
    """
    lanes = 32 if compiles_for("avx512bw", False) else 16
    if lanes_of(bits) < lanes or not compiles_for("f16c", False):
        return bits
    return joined(b, [_in_register(b, part) for part in _parts(b, bits, lanes)])


def _rounded(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Return the upper halves of 32-bit words, rounded to nearest even by the lower halves.

    The lower half is above the middle, 0x8000, or equal to it below an odd number, if its highest
    bit is set after 1 is taken from it below an even number. The words are results of arithmetic,
    so a NaN is quiet; the next number above it is a NaN too, since the addition does not wrap.
    """
    lanes = lanes_of(low)

    def number(value: int) -> ir.Constant:
        return constant(I16, lanes, value)

    is_even = b.and_(b.not_(high), number(1))
    carry = b.lshr(_saturating(b, "usub", low, is_even), number(15))
    below_last = b.select(b.icmp_unsigned("<", high, number(0xFFFE)), high, number(0xFFFE))
    return _saturating(b, "sadd", below_last, carry)


def _saturating(b: ir.IRBuilder, name: str, one: ir.Value, other: ir.Value) -> ir.Value:
    """Return the sum or difference of 16-bit numbers, or the nearest number if it is outside."""
    kind = one.type
    lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    function = function_of(
        b.module, ir.FunctionType(kind, [kind, kind]), f"llvm.{name}.sat.{lanes}i16"
    )
    return b.call(function, [one, other])


# --- with tables in registers ---


def _looked_up(b: ir.IRBuilder, codes: ir.Value, mantissa: int) -> ir.Value:
    """Return up to 64 8-bit codes as float32: the bits of a bfloat16, exact, and 16 zero bits."""
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
        words = _lookup(b, _in_register(b, ir.Constant(index.type, order)), low, high)
        words = b.and_(b.bitcast(words, vector(I32, _WORDS)), constant(I32, _WORDS, 0xFFFF0000))
        parts.append(b.bitcast(words, vector(F32, _WORDS)))
    return joined(b, parts)


def _bfloat16(code: int, mantissa: int) -> int:
    """Return a 7-bit code as the bits of a bfloat16."""
    exponent, rest = code >> mantissa, code & ((1 << mantissa) - 1)
    largest_exponent = (1 << (7 - mantissa)) - 1
    if code == 0x7F or (mantissa == 2 and exponent == largest_exponent):
        return 0x7FC0 if rest else 0x7F80
    if exponent:
        return (exponent + _FIRST[mantissa] - 1) << 7 | rest << (7 - mantissa)
    if not rest:
        return 0
    length = rest.bit_length()  # a subnormal number
    return (_FIRST[mantissa] - mantissa + length - 1) << 7 | (rest << (8 - length)) & 0x7F


def _counters(b: ir.IRBuilder, exponents: ir.Value, mantissa: int) -> ir.Value:
    """Return the counter of `encoded` for each exponent, from a table of 32."""
    counters = [0] * 32
    for exponent in range(_FIRST[mantissa], _LAST[mantissa] + 1):
        code = (exponent - _FIRST[mantissa]) << mantissa
        counters[exponent % 32] = (exponent + 23 - mantissa) << 23 | code
    table = _halves(I32, counters)
    parts = [_lookup(b, part, *table) for part in _parts(b, exponents, _WORDS)]
    return b.bitcast(joined(b, parts), vector(F32, lanes_of(exponents)))


def _byte(b: ir.IRBuilder, words: ir.Value, number: int) -> ir.Value:
    """Return byte `number` of each 32-bit word."""
    parts = [b.bitcast(part, vector(I8, _BYTES)) for part in _parts(b, words, _WORDS)]
    if len(parts) == 1:
        return pick(b, parts[0], parts[0], range(number, _BYTES, 4))
    order = [4 * (lane % 32) + number for lane in range(_BYTES)]
    index = _in_register(b, ir.Constant(vector(I8, _BYTES), order))
    found = [_lookup(b, index, *both) for both in zip(parts[::2], parts[1::2], strict=True)]
    return joined(b, [pick(b, each, each, range(2 * _WORDS)) for each in found])


def _in_register(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the same numbers, in a way that hides from LLVM how they were computed.

    It would replace the instructions that follow by slower ones.
    """
    return b.asm(ir.FunctionType(value.type, [value.type]), "", "=v,0", [value], side_effect=False)


def _halves(element: ir.Type, table: list[int]) -> list[ir.Constant]:
    lanes = len(table) // 2
    return [ir.Constant(vector(element, lanes), table[at : at + lanes]) for at in (0, lanes)]


def _lookup(b: ir.IRBuilder, index: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """Return what a table in two registers has at each index, of which the lowest bits count."""
    suffix = "qi" if low.type.element is I8 else "d"
    name = f"llvm.x86.avx512.vpermi2var.{suffix}.512"
    function = function_of(b.module, ir.FunctionType(low.type, [low.type] * 3), name)
    return b.call(function, [low, index, high])


def _parts(b: ir.IRBuilder, value: ir.Value, lanes: int) -> list[ir.Value]:
    starts = range(0, lanes_of(value), lanes)
    stop = min(lanes, lanes_of(value))
    return [pick(b, value, value, range(start, start + stop)) for start in starts]
