"""The compiled loops of `rotary.fused`: tiles of rows, normalized while they are in the caches."""

# compiled by Numba, from types that mypy does not know

import functools
from collections.abc import Callable

import numpy as np
from numpy import empty

from .compiled import inlined
from .fused_back import back_rows, dot_rows
from .fused_rows import (
    add_rows,
    fused_rows,
    root_rows,
    spread_rows,
    square_rows,
    weight_row,
    weighted_table_rows,
)
from .llvm import fence, load_double, load_int, record, store_double
from .loops import (
    TAGS,
    Loop,
    are_apart,
    are_inside,
    as_loop,
    whole_numbers,
)
from .parts import next_part, own_number, share_of
from .rows import MODES, PLAIN, STREAMING, table_rows
from .tiles import ahead_of, aligned, table_memory, tile_at, tiles_of
from .vectors import CACHE_LINE

# `size` and the strides of arrays, each on three axes: `gain` is that of the weights, `root` of
# 1 / sqrt(mean + eps), `grad` of the gradient of the output, `dot` of the sums d in `fused_back.py`
AXES = ("size", "x", "out", "table", "slot", "gain", "root", "grad", "dot")
_AXES = tuple(f"{name}_{axis}" for name in AXES for axis in range(3))
# How the rows of one tensor lie in memory, as in `loops.STEPS`. Strides are in bytes; `width`,
# `start` and `tail` count channels. The mean is over `mean` channels. There are `weights` rows of
# weights, of `weight_size` bytes each; their dtype has index `kind` in TAGS. `order` is the address
# of the index of each weight, or 0 if their order is unchanged. The loops convert them to numbers
# of `real` bytes. Slots are `slot_step` bytes apart. Blocks of `block` slots are `block_step` bytes
# apart; `block` is 0 if there are no blocks
PIECE = np.dtype(
    [(name, np.int64) for name in (*_AXES, "row_size", "line", "width", "pairs", "start", "tail")]
    + [(name, np.int64) for name in ("tile", "sign", "mean", "is_plain", "computes_roots")]
    + [(name, np.int64) for name in ("weights", "weight_size", "kind", "order", "add_one", "real")]
    + [(name, np.int64) for name in ("block", "block_step", "slot_step")]
    + [("eps", np.float64)]
)
# The addresses of the form and the arrays of one piece, 0 for an absent array, and its mode. Each
# part adds to its own gradients of the weights: the first at `gains`, others `gains_size` bytes on
OPERANDS = whole_numbers(
    *("form", "mode", "x", "out", "weight", "slots", "roots"),
    *("grad", "dots", "gains", "gains_size", "phase"),
)
PLAIN_MODE = MODES.index((*PLAIN, False))
BOTH, DOTS, BACK = 0, 1, 2  # phases of a gradient: both, one after the other, or only one of them
# A job begins and ends with the fields of `loops.ROTATION`. Row numbers must be below `row_limit`,
# slots below `slot_limit`. `reach` is 0, or the address of what `are_apart` reads: where three x,
# cos, sin, rows, slots, three weights and three out begin and end
JOB = np.dtype(
    [(name, np.int64) for name in ("threads", "parts", "number", "cos", "sin", "rows", "pieces")]
    + [(name, np.int64) for name in ("row_count", "row_limit", "slot_count", "slot_limit", "reach")]
    + [("operands", OPERANDS, (3,)), ("taken", np.int64)]
)
_piece, _operands, _job = map(record, (PIECE, OPERANDS, JOB))
_FIRST, _TAKEN = (int(JOB.fields[name][1]) for name in ("operands", "taken"))  # type: ignore[index]
_SIZE = OPERANDS.itemsize


@inlined
def _gain(tag, piece, weight):
    """Return the rows of weights as the loops read them, and a cache line of ones after them."""
    size = piece.weights * piece.width * piece.real
    gain = empty(size // 8 + 9, np.float64)
    gain[size // 8 :] = 1.0
    if piece.real == 4:
        gain.view(np.float32)[size // 4 :] = 1.0
    for at in range(piece.weights):
        from_ = weight + at * piece.weight_size
        to = gain.ctypes.data + at * piece.width * piece.real
        weight_row(tag, piece.kind, from_, piece.order, piece.add_one, piece.width, to)
    return gain


@inlined
def _offsets(piece, slots, step, count, offsets):
    """Write to `offsets` the bytes from the start of a cache to each slot, -1 if it is negative."""
    for at in range(count):
        slot = load_int(slots + at * step)
        if slot < 0:
            offsets[at] = -1
        elif piece.block:
            block = slot // piece.block
            offsets[at] = block * piece.block_step + (slot - block * piece.block) * piece.slot_step
        else:
            offsets[at] = slot * piece.slot_step


@inlined
def _fused_tiles(tag, job, address, part):
    operands = _operands(address)
    piece = _piece(operands.form)
    first, last = share_of(job.threads * job.parts, tiles_of(piece), part)
    weights = _gain(tag, piece, operands.weight)
    ones = piece.weights * piece.width * piece.real
    roots = np.ones(piece.tile + 1, np.float64)  # the last one stays 1
    spread, partial = empty(8 * piece.tile + 8, np.float64), empty(8 * piece.tile + 8, np.float64)
    offsets = empty(piece.tile if operands.slots else 0, np.int64)
    table, last_key = table_memory(piece, piece.pairs), (0, 0, 0)
    for at in range(first, last):
        i, j, k, count = tile_at(piece, at)
        x = operands.x + i * piece.x_0 + j * piece.x_1 + k * piece.x_2
        out = operands.out + i * piece.out_0 + j * piece.out_1 + k * piece.out_2
        row = i * piece.table_0 + j * piece.table_1 + k * piece.table_2
        gain = weights.ctypes.data + i * piece.gain_0 + j * piece.gain_1 + k * piece.gain_2
        ahead = ahead_of(piece, i, j, (piece.x_0, piece.x_1, piece.x_2))
        # rows of x are multiplied by `factors`, the table by all that rows share
        one, same = roots.ctypes.data + 8 * piece.tile, weights.ctypes.data + ones
        roots_of_rows, roots_of_table, factors, shared = (one, 0), (one, 0), (same, 0, 0), (same, 0)
        if piece.computes_roots:
            root = roots.ctypes.data
            square_rows(tag, x, piece.x_2, piece.width, count, aligned(partial))
            add_rows(tag, aligned(partial), count, root, 8)
            root_rows(tag, piece.mean, piece.eps, count, root)
            spread_rows(tag, root, count, aligned(spread))
            roots_of_rows, factors, shared = (root, 8), (aligned(spread), CACHE_LINE, 0), (gain, -1)
        elif operands.roots:  # of tokens: all heads share them, but not the weights
            root = operands.roots + i * piece.root_0 + j * piece.root_1 + k * piece.root_2
            roots_of_rows = roots_of_table = root, piece.root_2
            factors = gain, 0, -1
        key = row, shared[0], roots_of_table[0]
        if piece.pairs and (at == first or key != last_key):
            tables, last_key = (job.cos, job.sin, job.rows, row), key
            weighted_table_rows(
                tag, operands.mode, piece, tables, shared, roots_of_table, count, aligned(table)
            )
        slots, slot_step = 0, 0
        if operands.slots:
            from_ = operands.slots + i * piece.slot_0 + j * piece.slot_1 + k * piece.slot_2
            _offsets(piece, from_, piece.slot_2, count if piece.slot_2 else 1, offsets)
            slots, slot_step = offsets.ctypes.data, 8 if piece.slot_2 else 0
        fused_rows(
            tag, operands.mode, piece, x, out, aligned(table), factors, gain, roots_of_rows,
            (slots, slot_step), count, ahead,
        )  # fmt: skip
    if operands.mode >= STREAMING:
        fence()


@inlined
def _square_tiles(tag, job, address, part):
    operands = _operands(address)
    piece = _piece(operands.form)
    first, last = share_of(job.threads * job.parts, tiles_of(piece), part)
    partial = empty(8 * piece.tile + 8, np.float64)
    for at in range(first, last):
        i, j, k, count = tile_at(piece, at)
        x = operands.x + i * piece.x_0 + j * piece.x_1 + k * piece.x_2
        sums = operands.out + i * piece.out_0 + j * piece.out_1 + k * piece.out_2
        square_rows(tag, x, piece.x_2, piece.width, count, aligned(partial))
        add_rows(tag, aligned(partial), count, sums, piece.out_2)


@inlined
def _back_tiles(tag, job, address, part):
    operands = _operands(address)
    piece = _piece(operands.form)
    first, last = share_of(job.threads * job.parts, tiles_of(piece), part)
    weights = _gain(tag, piece, operands.weight)
    turned = empty(piece.tile * piece.width, np.float64)
    own = empty((2, piece.tile), np.float64)
    squares, parts = empty(8 * piece.tile + 8, np.float64), empty(8 * piece.tile + 8, np.float64)
    table, last_row = table_memory(piece, piece.pairs), 0
    roots, dots = own[0], own[1]
    read = operands.mode - STREAMING if operands.mode >= STREAMING else operands.mode
    for at in range(first, last):
        i, j, k, count = tile_at(piece, at)
        # inside the loop, since Numba frees an array after the last line that names it
        to_roots, to_dots, to_turned = roots.ctypes.data, dots.ctypes.data, turned.ctypes.data
        x = operands.x + i * piece.x_0 + j * piece.x_1 + k * piece.x_2
        out = operands.out + i * piece.out_0 + j * piece.out_1 + k * piece.out_2
        grad = operands.grad + i * piece.grad_0 + j * piece.grad_1 + k * piece.grad_2
        row = i * piece.table_0 + j * piece.table_1 + k * piece.table_2
        of_weights = i * piece.gain_0 + j * piece.gain_1 + k * piece.gain_2
        gain = weights.ctypes.data + of_weights
        gains = operands.gains + part * operands.gains_size + of_weights
        if at == first or row != last_row:
            tables, last_row = (job.cos, job.sin, job.rows, row), row
            table_rows(tag, PLAIN_MODE, piece, piece, tables, count, aligned(table))
        ahead = (
            ahead_of(piece, i, j, (piece.x_0, piece.x_1, piece.x_2)),
            ahead_of(piece, i, j, (piece.grad_0, piece.grad_1, piece.grad_2)),
        )
        dot_rows(
            tag, read, piece, x, grad, aligned(table), gain, to_turned, aligned(squares),
            aligned(parts), count, ahead,
        )  # fmt: skip
        add_rows(tag, aligned(squares), count, to_roots, 8)
        add_rows(tag, aligned(parts), count, to_dots, 8)
        if operands.phase == BOTH:
            root_rows(tag, piece.mean, piece.eps, count, to_roots)
        else:
            root = operands.roots + i * piece.root_0 + j * piece.root_1 + k * piece.root_2
            dot = operands.dots + i * piece.dot_0 + j * piece.dot_1 + k * piece.dot_2
            if operands.phase == DOTS:
                for index in range(count):
                    store_double(dot + index * piece.dot_2, dots[index])
                continue
            for index in range(count):
                roots[index] = load_double(root + index * piece.root_2)
                dots[index] = load_double(dot + index * piece.dot_2)
        for index in range(count):
            dots[index] *= roots[index] / piece.mean
        back_rows(
            tag, operands.mode, piece, x, out, gain, to_turned, to_roots, to_dots, gains, count
        )  # fmt: skip
    if operands.mode >= STREAMING:
        fence()


_KINDS = {"fused": 0, "squares": 1, "back": 2}


def _run(kind: int, tag: np.generic) -> Callable[[int], None]:
    def run(address):
        job, taken = _job(address), address + _TAKEN
        own = own_number(job, taken)
        part = next_part(job, taken, own)
        while part >= 0:
            for side in range(job.pieces):
                at = address + _FIRST + side * _SIZE
                if kind == 0:  # a constant when this is compiled
                    _fused_tiles(tag, job, at, part)
                elif kind == 1:
                    _square_tiles(tag, job, at, part)
                else:
                    _back_tiles(tag, job, at, part)
            part = next_part(job, taken, own)

    return run


@functools.cache
def loop(kind: str, name: str) -> Loop:
    """Return the loop of a kind for a key of TAGS, which runs parts of a JOB until none is left.

    fused     normalizes and rotates each piece, and writes it to `out` or to its slots
    back      writes the gradient of x to `out`, and those of the weights to `gains`
    squares   writes the sum of the squares of each row to `out`, as float64
    """
    return as_loop(_run(_KINDS[kind], TAGS[name]))


def is_safe(address):
    """Return 1 if the memory that a JOB reads and writes is right.

    Every row number is inside of the table, every slot below its limit and, if the JOB has a
    `reach`, no output overlaps another one or an operand other than its own x.
    """
    job, first = _job(address), address + _FIRST
    one, two, three = _operands(first), _operands(first + _SIZE), _operands(first + 2 * _SIZE)
    slots = max(one.slots, two.slots, three.slots)  # k and v have the same; 0 for an array without
    if not are_inside(job.rows, job.row_count, job.row_limit):
        return 0
    if not are_inside(slots, job.slot_count, job.slot_limit, -(2**63)):
        return 0
    addresses = (
        one.x, two.x, three.x, job.cos, job.sin, job.rows, slots,
        one.weight, two.weight, three.weight, one.out, two.out, three.out,
    )  # fmt: skip
    return int(job.reach == 0 or are_apart(addresses, 10, 3, job.reach))
