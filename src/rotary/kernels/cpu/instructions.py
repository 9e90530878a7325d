"""LLVM instructions for vectors, and those that Numba offers only in its internals."""

# mypy: ignore-errors
# written with llvmlite, which has no types

import functools
from collections.abc import Callable, Sequence

import numba
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

POINTER = ir.IntType(8).as_pointer()
I8, I16, I32, I64 = map(ir.IntType, (8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

# the arguments of an `emitted` function: a whole number, a float64, an argument of which only the
# type matters, and one of which the function gets the type and the value
INT, REAL, TAG, RECORD = types.int64, types.float64, "tag", "record"


def tuple_of(count: int) -> types.Type:
    """Return the type of a tuple of whole numbers."""
    return types.UniTuple(INT, count)


def emitted(
    *kinds: types.Type | str, result: types.Type = types.void
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Decorate `function(b, *arguments)`, which emits instructions: compiled code can call it.

    `kinds` are those of the arguments. The function gets their values, and returns that of the
    result, None for `types.void`.
    """

    def decorate(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)  # Numba reads the names of the arguments
        def typed(context, *given):
            own = [
                each if kind in (TAG, RECORD) else kind
                for kind, each in zip(kinds, given, strict=True)
            ]

            def generate(context, b, signature, values):
                arguments = [
                    each if kind is TAG else (each, value) if kind is RECORD else value
                    for kind, each, value in zip(kinds, given, values, strict=True)
                ]
                value = function(b, *arguments)
                return context.get_dummy_value() if result is types.void else value

            return result(*own), generate

        return intrinsic(typed)

    return decorate


def compiles_for(feature: str, elsewhere: bool) -> bool:
    """Return whether Numba compiles for a feature of x86; on other processors, `elsewhere`."""
    features = numba.config.CPU_FEATURES
    if features is not None:
        return f"+{feature}" in features.split(",")
    return bool(numba.config.ENABLE_AVX and binding.get_host_cpu_features().get(feature, elsewhere))


def on_stack(b: ir.IRBuilder, kind: ir.Type) -> ir.Value:
    """Return the address of a value on the stack, set to zero once at the start of the function."""
    with b.goto_entry_block():
        address = b.alloca(kind)
        b.store(kind(None), address)
    return address


def function_of(module: ir.Module, kind: ir.FunctionType, name: str) -> ir.Function:
    """Return a function of a module, which is declared if it is not there yet."""
    existing = module.globals.get(name)
    return ir.Function(module, kind, name) if existing is None else existing


def members(b: ir.IRBuilder, value: ir.Value) -> list[ir.Value]:
    """Return the members of a tuple."""
    return [b.extract_value(value, i) for i in range(len(value.type.elements))]


def member_at(b: ir.IRBuilder, record: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    """Return the address of the member of a record at `offset` bytes from its start."""
    places = [ir.Constant(ir.IntType(32), at) for at in (0, offset)]
    return b.bitcast(b.gep(record, places, inbounds=True), kind.as_pointer())


def copy_bytes(b: ir.IRBuilder, target: ir.Value, source: ir.Value, count: ir.Value) -> None:
    """Copy memory that does not overlap."""
    copy = b.module.declare_intrinsic("llvm.memcpy", [POINTER, POINTER, count.type])
    b.call(copy, [target, source, count, ir.Constant(ir.IntType(1), 0)])


# --- vectors ---


def vector(element: ir.Type, lanes: int) -> ir.Type:
    return ir.VectorType(element, lanes) if lanes > 1 else element


def lanes_of(value: ir.Value) -> int:
    return value.type.count if isinstance(value.type, ir.VectorType) else 1


def constant(element: ir.Type, lanes: int, value: float) -> ir.Constant:
    return ir.Constant(vector(element, lanes), [value] * lanes if lanes > 1 else value)


def pick(b: ir.IRBuilder, one: ir.Value, other: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Return the given lanes of two vectors, numbered through both; a single lane is a scalar."""
    if len(lanes) == 1:
        return b.extract_element(one, constant(I32, 1, lanes[0]))
    return b.shuffle_vector(one, other, ir.Constant(vector(I32, len(lanes)), list(lanes)))


def at_most(b: ir.IRBuilder, value: ir.Value, most: float) -> ir.Value:
    """Return the lesser of `value` and `most`; a NaN stays a NaN."""
    largest = constant(F32, lanes_of(value), most)
    return b.select(b.fcmp_ordered(">", value, largest), largest, value)


def joined(b: ir.IRBuilder, parts: Sequence[ir.Value]) -> ir.Value:
    """Return vectors, as many as a power of two, joined to one."""
    while len(parts) > 1:
        parts = [
            pick(b, one, other, range(2 * lanes_of(one)))
            for one, other in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]
