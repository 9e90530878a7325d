"""Arguments of the compiled loops for a fused call on NumPy arrays and CPU tensors."""

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...layouts import pair_slices
from .. import Numbers as Array
from ..geometry import Geometry
from ..memory import SIZES, Block, dense_strides, extent, is_contiguous_last, is_injective
from ..numpy import address
from . import fused_loops, loops, short_floats, threads
from .jobs import STREAM_BYTES, TILE_BYTES, axes_in_order, is_aligned
from .rows import MODES, STREAMING, is_doubled
from .vectors import CACHE_LINE


class Weight(NamedTuple):
    """The weights of a norm: their dtype, rows (1, or one for each head), whether 1 is added.

    If `is_full`, the mean is over all heads of a token.
    """

    dtype: str
    rows: int
    is_full: bool
    add_one: bool


class Slots(NamedTuple):
    """The first two strides of a cache, in bytes, and the slots per block, None without blocks."""

    strides: tuple[int, ...]
    block: int | None


class Piece(NamedTuple):
    """The form of one tensor of a fused call.

    x, out     the array that is read, and the one that is written: with `slots`, a cache
    geometry   None for a tensor that is not rotated
    head_axis  of x, None where it has no heads
    """

    x: Block
    out: Block
    geometry: Geometry | None
    head_axis: int | None
    weight: Weight | None
    slots: Slots | None
    is_in_place: bool


class Form(NamedTuple):
    """The form of a piece as the loops take it.

    record      a `fused_loops.PIECE`
    at          the address of the record
    mode        index in MODES, of stores into the processor's caches
    can_stream  whether stores may bypass the caches
    order       the array at the address `order` of the record, None if there is none
    """

    record: Array
    at: int
    mode: int
    can_stream: bool
    order: Array | None


class Memory(NamedTuple):
    """The addresses of the arrays of a piece; 0 for weights or slots that it does not have."""

    x: int
    out: int
    weight: int = 0
    slots: int = 0


class Call(NamedTuple):
    """A prepared fused call: all but the addresses."""

    pieces: tuple[Piece, ...]
    forms: tuple[Form, ...]
    eps: float
    size: int  # bytes of all x
    limits: tuple[int, int, int, int]  # count and limit of row numbers, then of slots
    reach: Array  # where arrays begin and end, as `fused_loops.is_safe` takes it


@lru_cache(maxsize=1024)
def call_of(pieces: tuple[Piece, ...], table: Block, rows: Block | None, eps: float) -> Call | None:
    """Prepare the call of pieces, tables and row numbers; None if the loops cannot take them."""
    name = pieces[0].x.dtype
    if name not in loops.TAGS or not all([math.prod(piece.x.shape) for piece in pieces]):
        return None
    forms = [_form(piece, table, rows, eps) for piece in pieces if _is_ready(piece)]
    ready = [form for form in forms if form is not None]
    if len(ready) < len(pieces):
        return None
    size = sum([math.prod(piece.x.shape) * SIZES[name] for piece in pieces])
    row_count = 0 if rows is None else math.prod(rows.shape)
    slots, reached = (0, 0), [(0, 0)] * 13
    reached[3:5] = [extent(table)] * 2
    reached[5] = (0, 0) if rows is None else extent(rows)
    for index, piece in enumerate(pieces):
        reached[index], reached[10 + index] = extent(piece.x), extent(piece.out)
        if piece.weight is not None:
            numbers = piece.weight.rows * piece.x.shape[-1]
            reached[7 + index] = 0, numbers * SIZES[piece.weight.dtype]
        if piece.slots is not None:
            count = math.prod(piece.x.shape[:-1]) // _heads(piece)
            slots = count, piece.out.shape[0] * (piece.slots.block or 1)
            reached[6] = 0, 8 * count
    limits = row_count, table.shape[0], *slots
    return Call(pieces, tuple(ready), eps, size, limits, np.array(reached, np.int64))


def run(
    call: Call, memories: Sequence[Sequence[int]], tables: tuple[int, int, int], is_checked: bool
) -> bool:
    """Run a call; return False and write nothing if a row number or a slot is out of range.

    `tables` are the addresses of cos, sin and row numbers (or 0). With `is_checked`, also return
    False if an output overlaps another output, or an input other than its own x.
    """
    alive, jobs = [], []
    name = call.pieces[0].x.dtype
    for piece, memory, form in zip(call.pieces, memories, call.forms, strict=True):
        roots = None
        if piece.weight is not None and piece.weight.is_full:
            roots = _roots(piece, memory[0], call.eps, call.size)
            alive.append(roots)
        jobs += [
            form.at, _mode(form, memory[1], call.size), *memory,
            0 if roots is None else address(roots), 0, 0, 0, 0, 0,
        ]  # fmt: skip
    reach = address(call.reach) if is_checked else 0
    head = 1, 1, 0, *tables, len(memories), *call.limits, reach
    record = array("q", (*head, *jobs, *_ABSENT[len(memories)], 0))
    needs_check = is_checked or call.limits[0] or call.limits[2]
    if needs_check and not loops.as_check(fused_loops.is_safe)(record.buffer_info()[0]):
        return False
    threads.run(fused_loops.loop("fused", name), call.size, record)
    return True


_FIELDS = fused_loops.OPERANDS.names or ()
_ABSENT = [(0,) * len(_FIELDS) * (3 - count) for count in range(4)]  # zeros, up to three pieces


def _run_one(
    kind: str, name: str, size: int, tables: tuple[int, int, int], operands: dict[str, int]
) -> None:
    """Run a loop over one piece; the fields of OPERANDS that are not given are 0."""
    numbers = [1, 1, 0, *tables, 1, 0, 0, 0, 0, 0, *[operands.get(field, 0) for field in _FIELDS]]
    threads.run(fused_loops.loop(kind, name), size, array("q", (*numbers, *_ABSENT[1], 0)))


@lru_cache(maxsize=1024)
def _is_ready(piece: Piece) -> bool:
    geometry = piece.geometry
    is_mixed = geometry is not None and geometry.layout != geometry.out_layout
    return (
        piece.x.dtype == piece.out.dtype
        and is_contiguous_last(piece.x)
        and is_contiguous_last(piece.out)
        and is_injective(piece.out)
        and not (piece.is_in_place and (is_mixed or piece.x.strides != piece.out.strides))
        and not (piece.is_in_place and piece.slots is not None)  # a token goes to another row
    )


def _mode(form: Form, out: int, size: int) -> int:
    return form.mode + STREAMING * (
        form.can_stream and size >= STREAM_BYTES and out % CACHE_LINE == 0
    )


@lru_cache(maxsize=1024)
def _form(
    piece: Piece, table: Block | None, rows: Block | None, eps: float, grad: Block | None = None
) -> Form | None:
    """Return the form; None if tables or gradient have gaps, or rows need more than three axes."""
    if not all([is_contiguous_last(block) for block in (table, grad) if block is not None]):
        return None
    x, out, geometry, head_axis, weight, slots, _ = piece
    is_full, is_many = (False, False) if weight is None else (weight.is_full, weight.rows > 1)
    width, size = x.shape[-1], SIZES[x.dtype]
    real = 8 if x.dtype == "float64" else 4
    along = table if rows is None else rows
    token_steps, dot_steps = (_row_steps(x, head_axis, heads) for heads in (False, True))
    axes = []
    for axis, count in enumerate(x.shape[:-1]):
        is_head = axis == head_axis
        dim = None if geometry is None else geometry.dims[axis]
        step = 0 if dim is None or along is None or along.shape[dim] == 1 else along.strides[dim]
        to = out.strides[axis] if slots is None else out.strides[-2] * is_head
        token = token_steps[axis]
        axes.append((
            count, x.strides[axis], to, step, token * (slots is not None),
            width * real * (is_head and is_many), token * is_full,
            0 if grad is None else grad.strides[axis], dot_steps[axis] * (grad is not None),
        ))  # fmt: skip
    merged = axes_in_order(axes)
    if len(merged) > 3:
        return None
    if len(merged) > 1 and merged[-1][5]:  # the rows of the last axis must share their weights
        merged[-2:] = merged[:-3:-1]
    pairs, start = (0, 0) if geometry is None else (geometry.pairs, geometry.start)
    if geometry is None and weight is None:
        while merged and merged[-1] == (merged[-1][0], *(width * size,) * 2, *(0,) * 6):
            width *= merged.pop()[0]
    inner = [(1, *(0,) * 8)] * (3 - len(merged)) + merged
    form = np.zeros((), fused_loops.PIECE)
    for axis, steps in enumerate(inner):
        for name, number in zip(fused_loops.AXES, steps, strict=True):
            form[f"{name}_{axis}"] = number
    form["row_size"] = 0 if rows is None or table is None else table.strides[0]
    form["width"], form["pairs"] = width, pairs
    if inner[-1][3] or (is_full and inner[-1][6]):
        form["line"] = (4 if grad is None else 2) * pairs * real
    form["start"] = start if pairs else width
    form["tail"] = width - start - 2 * pairs if pairs else 0
    tile = max(1, TILE_BYTES // (2 * max(pairs, 32) * SIZES["float32"]))
    form["tile"] = 1 if inner[-1][5] else tile if inner[-1][3] else 4 * tile
    form["sign"] = -1 if geometry is not None and geometry.conjugate else 1
    form["mean"], form["eps"] = width * _heads(piece) ** is_full, eps
    form["is_plain"], form["real"] = weight is None, real
    channels = None
    if weight is not None:
        form["computes_roots"], form["add_one"] = not is_full, weight.add_one
        form["weights"], form["weight_size"] = weight.rows, width * SIZES[weight.dtype]
        form["kind"] = list(loops.TAGS).index(weight.dtype)
        if geometry is not None:
            # the loops multiply rows by the weights of one head, or a table by those of pairs
            how = "rows" if is_full and grad is None else "pairs"
            layouts = geometry.layout, geometry.out_layout
            channels = order(x.dtype, width, start, pairs, layouts, how)
            form["order"] = 0 if channels is None else address(channels)
    if slots is not None:
        form["block"], form["slot_step"] = slots.block or 0, slots.strides[slots.block is not None]
        form["block_step"] = slots.strides[0]
    whole = Geometry(0, piece.x.shape[-1], "half", "half", ()) if geometry is None else geometry
    read, written = whole.layout, whole.out_layout
    can_stream = read == written and not piece.is_in_place and is_aligned(out, whole)
    return Form(form, address(form), MODES.index((read, written, False)), can_stream, channels)


def _heads(piece: Piece) -> int:
    return 1 if piece.head_axis is None else piece.x.shape[piece.head_axis]


def _row_steps(x: Block, head_axis: int | None, has_heads: bool) -> tuple[int, ...]:
    """Return strides of contiguous 8-byte numbers, one per token, or per head of a token.

    >>> _row_steps(Block((2, 3, 5, 64), (), "float32"), 1, True)
    (120, 8, 24)
    """
    order = [axis for axis in range(len(x.shape) - 1) if axis != head_axis]
    if has_heads and head_axis is not None:
        order.append(head_axis)
    return dense_strides(x.shape[:-1], order, 8)


def _roots(piece: Piece, x: int, eps: float, size: int) -> Array:
    """Return 1 / sqrt(mean + eps) over all heads of each token, (tokens,) float64."""
    kind = np.float64 if piece.x.dtype == "float64" else np.float32
    sums = np.empty((math.prod(piece.x.shape[:-1]) // _heads(piece), _heads(piece)))
    out = Block(piece.x.shape, (*_row_steps(piece.x, piece.head_axis, True), 8), "float64")
    assert piece.weight is not None
    alone = piece.weight._replace(rows=1, is_full=False)
    plain = piece._replace(out=out, geometry=None, weight=alone, slots=None)
    form = _form(plain, None, None, eps)
    assert form is not None
    operands = {"form": form.at, "x": x, "out": address(sums)}
    _run_one("squares", piece.x.dtype, size, (0, 0, 0), operands)
    mean = sums.sum(-1).astype(kind) / kind(_heads(piece) * piece.x.shape[-1])
    return (kind(1) / np.sqrt(mean + kind(eps))).astype(np.float64)


def run_back(
    piece: Piece, memory: Memory, grad: tuple[Block, int], eps: float, table: Block,
    rows: Block | None, tables: tuple[int, int, int],
) -> Array | None:  # fmt: skip
    """Write the gradient of x to memory.out; return that of the weights, (rows, channels).

    `grad` is the gradient of the output and its address; `tables` are the addresses of cos, sin and
    row numbers (or 0). Returns None and writes nothing if the loops cannot take the piece. The
    order of the sums over tokens depends on the number of threads.
    """
    x, name, weight = piece.x, piece.x.dtype, piece.weight
    if weight is None or name not in loops.TAGS or not math.prod(x.shape):
        return None
    form = _form(piece, table, rows, eps, grad[0]) if _is_ready(piece) else None
    if form is None:
        return None
    size, width = math.prod(x.shape) * SIZES[name], x.shape[-1]
    real = np.float64 if name == "float64" else np.float32
    gains = np.zeros((threads.count() * threads.PARTS, weight.rows, width), real)
    operands = {
        "form": form.at, "x": memory.x, "out": memory.out, "weight": memory.weight,
        "mode": _mode(form, memory.out, size), "grad": grad[1], "gains": address(gains),
        "gains_size": gains.strides[0],
    }  # fmt: skip
    if weight.is_full:
        roots = _roots(piece, memory.x, eps, size)
        dots = np.zeros((math.prod(x.shape[:-1]) // _heads(piece), _heads(piece)))
        operands |= {"roots": address(roots), "dots": address(dots), "phase": fused_loops.DOTS}
        _run_one("back", name, size, tables, operands)
        dots[:] = dots.sum(-1, keepdims=True)
        operands["phase"] = fused_loops.BACK
    _run_one("back", name, size, tables, operands)
    total = gains.sum(0)
    if form.order is not None:
        total[:, form.order] = total.copy()
    return total


@lru_cache(maxsize=64)
def order(
    dtype: str, width: int, start: int, pairs: int, layouts: tuple[str, str], how: str
) -> Array | None:
    """Return the channels in the order in which the loops hold weights; None if it is unchanged.

    First the rotated channels: in "pairs", the first members of the pairs and then the second ones;
    in "rows", as the loops read a row of x. Then the channels before the pairs, and those after.
    """
    channels = np.arange(width)
    both = [channels[each] for each in pair_slices(2 * pairs, layouts[0], start)]
    rotated, block = np.concatenate(both), short_floats.order()
    if how == "rows" and is_doubled(dtype, *layouts):
        rotated = channels[start : start + 2 * pairs]
    elif (how, dtype, layouts) == ("rows", "bfloat16", ("half", "half")) and block:
        for half in both:
            blocks = half[: pairs // len(block) * len(block)].reshape(-1, len(block))
            blocks[:] = blocks[:, block]
        rotated = np.concatenate(both)
    result = np.concatenate([rotated, channels[:start], channels[start + 2 * pairs :]])
    return None if (result == np.arange(width)).all() else result
