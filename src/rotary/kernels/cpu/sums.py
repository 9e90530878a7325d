"""Sums of the numbers in rows, as LLVM vector instructions; their order is fixed."""

# mypy: ignore-errors
# written with llvmlite, which has no types

from llvmlite import ir

from .instructions import constant, lanes_of, on_stack, pick, vector
from .short_floats import reordered
from .vectors import NONE, load, store

EIGHT = 8  # sums that are left of a row before eight rows are added together


class Sum:
    """A running sum of vectors, whose lengths are multiples of `lanes`, and of single numbers.

    Twice `lanes` numbers each have a sum of their own; all single numbers share one. `flags` of the
    additions may be ("contract",) where only exact products are added: LLVM for ARM then fuses
    every product with its addition, also those without the flag.
    """

    def __init__(
        self, b: ir.IRBuilder, real: ir.Type, lanes: int, flags: tuple[str, ...] = ()
    ) -> None:
        self.b, self.real, self.lanes, self.flags = b, real, lanes, flags
        self.parts = [on_stack(b, vector(real, lanes)) for _ in range(2)]
        self.single = on_stack(b, real)

    def reset(self) -> None:
        self.b.store(constant(self.real, 1, 0.0), self.single)
        for part in self.parts:
            self.b.store(constant(self.real, self.lanes, 0.0), part)

    def add(self, value: ir.Value, before: ir.Constant = NONE) -> None:
        """Add to the sums of the lanes from `before` on."""
        if lanes_of(value) == 1:
            self._add(self.single, value)
            return
        for start in range(0, lanes_of(value), self.lanes):
            part = pick(self.b, value, value, range(start, start + self.lanes))
            number = (before.constant + start) // self.lanes
            self._add(self.parts[number % 2], part)

    def _add(self, sum_: ir.Value, value: ir.Value) -> None:
        self.b.store(self.b.fadd(self.b.load(sum_), value, flags=self.flags), sum_)

    def store_eight(self, place: ir.Value, has_rest: ir.Value, is_reordered: bool = False) -> None:
        """Store eight sums, with that of single numbers if there are any (`has_rest`)."""
        b = self.b
        value = b.fadd(*map(b.load, self.parts))
        value = reordered(b, value) if is_reordered else value
        store(b, halved(b, value, EIGHT), place)
        with b.if_then(has_rest):
            store(b, b.fadd(load(b, self.real, place), b.load(self.single)), place)


def halved(b: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """Return `lanes` sums of the numbers in a vector: upper halves are added to lower halves."""
    while (half := lanes_of(value) // 2) >= lanes:
        value = b.fadd(*(pick(b, value, value, range(at, at + half)) for at in (0, half)))
    return value


def sums_of(b: ir.IRBuilder, rows: list[ir.Value]) -> ir.Value:
    """Return the sums of 8 vectors of 8 numbers, in the order in which `halved` adds.

    Two vectors are halved together, so there are as many additions as vectors.
    """
    rows = [rows[index] for index in (0, 4, 2, 6, 1, 5, 3, 7)]
    for half in (4, 2, 1):
        starts = [start + 8 * side for start in range(0, 8, 2 * half) for side in (0, 1)]
        lower = [lane for start in starts for lane in range(start, start + half)]
        upper = [lane + half for lane in lower]
        if half < 4:  # within each half of a register: shuffles take fewer instructions there
            lower, upper = (sorted(each, key=lambda lane: lane % 8 // 4) for each in (lower, upper))
        rows = [
            b.fadd(pick(b, one, other, lower), pick(b, one, other, upper))
            for one, other in zip(rows[::2], rows[1::2], strict=True)
        ]
    return rows[0]
