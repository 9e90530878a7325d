"""LLVM instructions that Numba has in its internals alone: on the stack, of records, of memory."""

# mypy: ignore-errors
# written with llvmlite, which has no types

from llvmlite import ir

POINTER = ir.IntType(8).as_pointer()


def on_stack(b: ir.IRBuilder, kind: ir.Type) -> ir.Value:
    """The address of a value on the stack, zero at first; one for all turns of a loop."""
    with b.goto_entry_block():
        address = b.alloca(kind)
        b.store(kind(None), address)
    return address


def function_of(module: ir.Module, kind: ir.FunctionType, name: str) -> ir.Function:
    """A function that a module declares, once."""
    known = module.globals.get(name)
    return ir.Function(module, kind, name) if known is None else known


def members(b: ir.IRBuilder, value: ir.Value) -> list[ir.Value]:
    """The members of a tuple."""
    return [b.extract_value(value, i) for i in range(len(value.type.elements))]


def member_at(b: ir.IRBuilder, record: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    """The address of the member of a record at `offset` bytes from its start."""
    places = [ir.Constant(ir.IntType(32), at) for at in (0, offset)]
    return b.bitcast(b.gep(record, places, inbounds=True), kind.as_pointer())


def copy_bytes(b: ir.IRBuilder, target: ir.Value, source: ir.Value, count: ir.Value) -> None:
    """Copy memory that does not overlap."""
    copy = b.module.declare_intrinsic("llvm.memcpy", [POINTER, POINTER, count.type])
    b.call(copy, [target, source, count, ir.Constant(ir.IntType(1), 0)])
