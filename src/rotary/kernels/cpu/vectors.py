"""Load, convert and store vectors of tensor elements, and loop over them, as LLVM instructions.

A tag, the type of a NumPy scalar, stands for the dtype: float32, float64, uint16 for bfloat16,
int16 for float16, int8, uint8 for float8_e4m3fn, bool for float8_e5m2. The arithmetic on float64 is
float64, on all others float32.
"""

# mypy: ignore-errors
# written with llvmlite, which has no types

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llvmlite import ir
from numba import types

from . import short_floats
from .instructions import (
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    POINTER,
    at_most,
    compiles_for,
    constant,
    function_of,
    lanes_of,
    pick,
    vector,
)  # fmt: skip

_BYTES = {I8: 1, I16: 2, I32: 4, F32: 4, F64: 8}


class Element(NamedTuple):
    """A dtype: the type in memory, its bytes, the type of the arithmetic, and lanes of vectors.

    Stores of the widest vectors fill whole cache lines of 64 bytes.
    """

    memory: ir.Type
    size: int
    real: ir.Type
    lanes: tuple[int, ...]


_LANES = 64, 32, 16
_SHORT = {types.int16: 10, types.uint8: 3, types.boolean: 2}  # bits of the mantissa
ELEMENTS = {
    types.float32: Element(F32, 4, F32, _LANES),
    types.float64: Element(F64, 8, F64, (16, 8)),
    types.uint16: Element(I16, 2, F32, _LANES),
    types.int16: Element(I16, 2, F32, _LANES),
    types.int8: Element(I8, 1, F32, _LANES),
    types.uint8: Element(I8, 1, F32, _LANES),
    types.boolean: Element(I8, 1, F32, _LANES),
}


def width_of(tag: types.Type) -> int:
    """Return the bytes of a number in the type of the arithmetic."""
    return _BYTES[ELEMENTS[tag].real]


NONE = constant(I64, 1, 0)
CACHE_LINE = 64  # bytes, as many as the widest registers have
# the registers, 32 of 64 bytes or 16 of 32 bytes, hold four vectors of this many bytes
_HELD = 256 if compiles_for("avx512f", False) else 64


def splat(b: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    if lanes == 1:
        return value
    blank = ir.Constant(vector(value.type, lanes), ir.Undefined)
    first = b.insert_element(blank, value, constant(I32, 1, 0))
    return b.shuffle_vector(first, blank, constant(I32, lanes, 0))


def at(b: ir.IRBuilder, start: ir.Value, index: ir.Value, size: int) -> ir.Value:
    """Return the address of element `index`, of `size` bytes each."""
    return b.add(start, b.mul(index, constant(I64, 1, size)))


def stepped(b: ir.IRBuilder, start: ir.Value, index: ir.Value, step: ir.Value) -> ir.Value:
    """Return the address `index` steps from `start`."""
    return b.add(start, b.mul(index, step))


def opaque(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the same number, in a way that hides from LLVM how it was computed.

    From the terms of an address LLVM makes a counter for each load and store, more than there are
    registers, and counting takes as long as rotating.
    """
    return b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], side_effect=False)


# --- conversions ---


def as_double(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    double = vector(F64, lanes_of(value))
    return value if value.type == double else b.fpext(value, double)


def as_real(b: ir.IRBuilder, tag: types.Type, value: ir.Value) -> ir.Value:
    """Return float64 in the type of the arithmetic."""
    real = ELEMENTS[tag].real
    return value if real is F64 else b.fptrunc(value, vector(real, lanes_of(value)))


def widened(b: ir.IRBuilder, tag: types.Type, value: ir.Value, lanes: int) -> ir.Value:
    """Return elements in the type of the arithmetic."""
    wide = vector(F32, lanes)
    if tag is types.uint16:  # bfloat16 is the upper half of a float32
        if lanes > 1 and _HELD > 64:  # one shuffle for 32 lanes
            order = [number for lane in range(lanes) for number in (lanes, lane)]
            value = pick(b, value, constant(I16, lanes, 0), order)
        else:
            value = b.shl(b.zext(value, vector(I32, lanes)), constant(I32, lanes, 16))
        return b.bitcast(value, wide)
    if tag is types.int8:
        return b.sitofp(value, wide)
    return short_floats.decoded(b, value, _SHORT[tag]) if tag in _SHORT else value


def narrowed(b: ir.IRBuilder, tag: types.Type, value: ir.Value) -> ir.Value:
    """Return results as elements, rounded to nearest even; a NaN stays a NaN, 8 bits saturate."""
    lanes = lanes_of(value)
    if tag is types.int8:
        value = at_most(b, value, 127.0)
        lowest = constant(F32, lanes, -128.0)
        value = b.select(b.fcmp_ordered("<", value, lowest), lowest, value)
        counted = b.fadd(value, constant(F32, lanes, 1.5 * 2**23))  # the last bit is then worth 1
        return b.trunc(b.bitcast(counted, vector(I32, lanes)), vector(I8, lanes))
    if tag in _SHORT:
        return short_floats.encoded(b, value, _SHORT[tag])
    return short_floats.bfloat16_of(b, value) if tag is types.uint16 else value


# --- memory ---


def load(b: ir.IRBuilder, element: ir.Type, address: ir.Value, lanes: int = 1) -> ir.Value:
    pointer = b.inttoptr(address, vector(element, lanes).as_pointer())
    return b.load(pointer, align=8 if element is I64 else _BYTES[element])


def load_wide(
    b: ir.IRBuilder, tag: types.Type, address: ir.Value, lanes: int, reordered: bool = False
) -> ir.Value:
    """Load `lanes` elements, in the type of the arithmetic."""
    value = load(b, ELEMENTS[tag].memory, address, lanes)
    return short_floats.unpacked(b, value) if reordered else widened(b, tag, value, lanes)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, streaming: bool = False) -> None:
    """Store a vector or a number.

    `streaming` bypasses the caches, and needs an address that is a multiple of the vector's size,
    or of 64 bytes if the vector is larger.
    """
    pointer = b.inttoptr(address, value.type.as_pointer())
    if not isinstance(value.type, ir.VectorType):
        b.store(value, pointer, align=_BYTES[value.type])
        return
    size = _BYTES[value.type.element]
    if not streaming:
        b.store(value, pointer, align=size)
        return
    if value.type.element is I16:
        value = short_floats.in_registers(b, value)
    hint = b.module.add_metadata([constant(I32, 1, 1)])
    stored = b.store(value, pointer, align=min(value.type.count * size, CACHE_LINE))
    stored.set_metadata("nontemporal", hint)


def store_wide(
    b: ir.IRBuilder, tag: types.Type, address: ir.Value, value: ir.Value, streaming: bool = False
) -> None:
    store(b, narrowed(b, tag, value), address, streaming)


def prefetch(b: ir.IRBuilder, address: ir.Value, ahead: ir.Value, size: int) -> None:
    """Prefetch the cache lines of `size` bytes, `ahead` bytes after `address`."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
    function = function_of(b.module, kind, "llvm.prefetch.p0i8")
    for_reading, keep, data = (constant(I32, 1, number) for number in (0, 3, 1))
    for line in range(0, size, CACHE_LINE):
        pointer = b.add(b.add(address, ahead), constant(I64, 1, line))
        b.call(function, [b.inttoptr(pointer, POINTER), for_reading, keep, data])


def prefetch_pairs(
    b: ir.IRBuilder, tag: types.Type, row: ir.Value, index: ir.Value, pairs: ir.Value, lanes: int,
    layout: str, ahead: ir.Value,
) -> None:  # fmt: skip
    """Prefetch `lanes` pairs of the row that is `ahead` bytes after this one; not a single pair."""
    size = ELEMENTS[tag].size
    if lanes == 1:
        return
    if layout == "half":
        first = at(b, row, index, size)
        for end in (first, at(b, first, pairs, size)):
            prefetch(b, end, ahead, lanes * size)
    else:
        prefetch(b, at(b, row, index, 2 * size), ahead, 2 * lanes * size)


def is_reordered(tag: types.Type, lanes: int, *layouts: str) -> bool:
    """Return whether the order `short_floats.order` is faster: for blocks of bfloat16."""
    size = len(short_floats.order())
    return tag is types.uint16 and size > 0 and lanes % size == 0 and set(layouts) <= {"half"}


def load_pairs(
    b: ir.IRBuilder, tag: types.Type, row: ir.Value, index: ir.Value, pairs: ir.Value, lanes: int,
    layout: str, reordered: bool = False,
) -> tuple[ir.Value, ir.Value]:  # fmt: skip
    """Load the first and the second members of `lanes` pairs from `index` on."""
    size = ELEMENTS[tag].size
    if layout == "half":
        first = at(b, row, index, size)
        ends = first, at(b, first, pairs, size)
        one, other = (load_wide(b, tag, end, lanes, reordered) for end in ends)
        return one, other
    both = at(b, row, index, 2 * size)
    if tag is types.uint16:  # a pair is a word of 32 bits
        pointer = b.inttoptr(both, vector(I32, lanes).as_pointer())
        return short_floats.halves_of(b, b.load(pointer, align=size))
    if lanes == 1:
        second = at(b, both, constant(I64, 1, 1), size)
        return load_wide(b, tag, both, 1), load_wide(b, tag, second, 1)
    block = load(b, ELEMENTS[tag].memory, both, 2 * lanes)
    first, second = (
        widened(b, tag, pick(b, block, block, range(side, 2 * lanes, 2)), lanes) for side in (0, 1)
    )
    return first, second


def store_pairs(
    b: ir.IRBuilder, tag: types.Type, row: ir.Value, index: ir.Value, pairs: ir.Value,
    one: ir.Value, other: ir.Value, layout: str, streaming: bool, reordered: bool = False,
) -> None:  # fmt: skip
    size, lanes = ELEMENTS[tag].size, lanes_of(one)
    if layout == "half":
        first = at(b, row, index, size)
        if reordered:
            store(b, short_floats.packed(b, one), first, streaming)
            store(b, short_floats.packed(b, other), at(b, first, pairs, size), streaming)
            return
        store_wide(b, tag, first, one, streaming)
        store_wide(b, tag, at(b, first, pairs, size), other, streaming)
        return
    both = at(b, row, index, 2 * size)
    if tag is types.uint16 and lanes > 1:
        packed = short_floats.bfloat16_pairs(b, one, other)
    else:
        packed = mixed(b, *(narrowed(b, tag, value) for value in (one, other)))
    store(b, packed, both, streaming and lanes > 1)


def swapped(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the numbers of each pair in the other order."""
    return pick(b, value, value, [lane ^ 1 for lane in range(lanes_of(value))])


def mixed(b: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    """Return two vectors, or two numbers, interleaved."""
    lanes = lanes_of(one)
    if lanes > 1:
        order = [lane + side * lanes for lane in range(lanes) for side in (0, 1)]
        return pick(b, one, other, order)
    pair = splat(b, one, 2)
    return b.insert_element(pair, other, constant(I32, 1, 1))


# --- loops ---


@contextmanager
def loop(b: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int) -> Iterator[ir.Value]:
    """`for index in range(start, stop, step)`: the body is built inside the with block."""
    before = b.block
    head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(start, before)
    b.cbranch(b.icmp_signed("<", index, stop), body, after)
    b.position_at_end(body)
    yield index
    index.add_incoming(b.add(index, constant(I64, 1, step)), b.block)
    b.branch(head)
    b.position_at_end(after)


def each(
    b: ir.IRBuilder, count: ir.Value, widths: tuple[int, ...], body: Callable[[ir.Value, int], None]
) -> None:
    """Build loops of `body(index, lanes)` over `count` elements, in ever narrower vectors."""
    done: ir.Value = NONE
    for lanes in (*widths, 1):
        whole = b.and_(count, constant(I64, 1, -lanes))
        with loop(b, done, whole, lanes) as index:
            body(index, lanes)
        done = whole


def held(tag: types.Type) -> int:
    """Return the lanes of a vector, in the type of the arithmetic, of which registers hold four."""
    return _HELD // width_of(tag)


def pieces(tag: types.Type, lanes: int) -> Iterator[tuple[ir.Value, int]]:
    """Split a vector into what registers can hold: yield (lanes before, lanes) of each piece."""
    size = min(lanes, held(tag))
    for before in range(0, lanes, size):
        yield constant(I64, 1, before), size


def channel_of(b: ir.IRBuilder, index: ir.Value, layout: str) -> ir.Value:
    """Return the channel of the first member of pair `index`."""
    return index if layout == "half" else b.add(index, index)
