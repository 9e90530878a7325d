"""The compiled loops of `rotary.fused`: tiles of rows, normalised while they are in the caches."""

# compiled by Numba, from types that mypy does not know

import functools
from collections.abc import Callable

import numpy as np
from numpy import empty

from .compiled import compiled
from .fused_back import back_rows, dot_rows
from .fused_rows import fused_rows, root_rows, square_rows, weight_row
from .llvm import fence, load_double, load_int, record, store_double
from .loops import (
    TAGS,
    Loop,
    are_apart,
    are_inside,
    as_check,
    as_loop,
    next_part,
    own_number,
    share_of,
    whole_numbers,
)
from .rows import STREAMING

# strides of each, on three axes: `gain` of the weights, `root` of 1 / sqrt(mean + eps), `grad` of
# the gradient of the output, `dot` of the sums over the gradients of a row
AXES = ("size", "x", "out", "table", "slot", "gain", "root", "grad", "dot")
_AXES = tuple(
    f"{name}_{axis}" for name in AXES
    for axis in range(3)
)  # fmt: skip
# How the rows of one tensor lie in memory, as `loops.STEPS`: bytes, but for the sizes, and for
# `width`, `start` and `tail`, which are channels. The mean is over `mean` channels. There are
# `weights` rows of weights, of `weight_size` bytes, of the type that is number `kind` among TAGS,
# in the order of the numbers at `order`, or as they are; the loops read them as numbers of `real`
# bytes. A slot is `slot_step` bytes from the next, in blocks of `block` slots, or 0 where there are
# none, which are `block_step` bytes apart
PIECE = np.dtype(
    [(name, np.int64) for name in (*_AXES, "row_size", "width", "pairs", "start", "tail")]
    + [(name, np.int64) for name in ("tile", "sign", "mean", "is_plain", "computes_roots")]
    + [(name, np.int64) for name in ("weights", "weight_size", "kind", "order", "add_one", "real")]
    + [(name, np.int64) for name in ("block", "block_step", "slot_step")]
    + [("eps", np.float64)]
)
# The addresses of arrays, 0 for an absent one, and how pairs are read and written. Each part adds
# to its own gradients of the weights: the first at `gains`, each `gains_size` bytes behind the last
PLACE = whole_numbers(
    *("form", "mode", "x", "out", "weight", "slots", "roots"),
    *("grad", "dots", "gains", "gains_size", "phase"),
)
BOTH, DOTS, BACK = 0, 1, 2  # phases of a gradient: one after the other, or one of them
# A job begins and ends as those of `loops.py`. Row numbers are below `row_limit`, and slots below
# `slot_limit`; `reach` is 0, or the address of the first and last byte of x, cos, sin, rows, slots
# and out, counted from their addresses
JOB = np.dtype(
    [(name, np.int64) for name in ("threads", "parts", "number", "cos", "sin", "rows", "pieces")]
    + [(name, np.int64) for name in ("row_count", "row_limit", "slot_count", "slot_limit", "reach")]
    + [("places", PLACE, (3,)), ("taken", np.int64)]
)
_piece, _place, _job = map(record, (PIECE, PLACE, JOB))
_PLACES, _TAKEN = (int(JOB.fields[name][1]) for name in ("places", "taken"))  # type: ignore[index]
_PLACE_SIZE = PLACE.itemsize


@compiled()
def _tile(piece, at):
    """Where a tile begins, on the three axes, and how many rows it has."""
    places = piece.size_0 * piece.size_1
    k, other = at // places * piece.tile, at % places
    return other // piece.size_1, other % piece.size_1, k, min(piece.tile, piece.size_2 - k)


@compiled()
def _tiles(piece):
    return piece.size_0 * piece.size_1 * ((piece.size_2 + piece.tile - 1) // piece.tile)


@compiled()
def _gain(tag, piece, weight):
    """Rows of weights as the loops read them: ones where there are none."""
    gain = empty(max(piece.weights * piece.width, 2 * piece.pairs), np.float64)
    if piece.weights == 0:
        if piece.real == 8:
            gain[:] = 1.0
        else:
            gain.view(np.float32)[:] = 1.0
    for at in range(piece.weights):
        from_ = weight + at * piece.weight_size
        to = gain.ctypes.data + at * piece.width * piece.real
        weight_row(tag, piece.kind, from_, piece.order, piece.add_one, piece.width, to)
    return gain


@compiled()
def _offsets(piece, slots, step, count, offsets):
    """Bytes from the start of a cache to each slot, -1 where it is negative."""
    for at in range(count):
        slot = load_int(slots + at * step)
        if slot < 0:
            offsets[at] = -1
        elif piece.block:
            place = slot // piece.block
            offsets[at] = place * piece.block_step + (slot - place * piece.block) * piece.slot_step
        else:
            offsets[at] = slot * piece.slot_step


@compiled()
def _fused_tiles(tag, job, address, part):
    place = _place(address)
    piece = _piece(place.form)
    first, last = share_of(job, _tiles(piece), part)
    weights = _gain(tag, piece, place.weight)
    roots = empty(piece.tile if place.roots == 0 else 0, np.float64)
    roots[:] = 1.0
    offsets = empty(piece.tile if place.slots else 0, np.int64)
    for at in range(first, last):
        i, j, k, count = _tile(piece, at)
        x = place.x + i * piece.x_0 + j * piece.x_1 + k * piece.x_2
        out = place.out + i * piece.out_0 + j * piece.out_1 + k * piece.out_2
        row = i * piece.table_0 + j * piece.table_1 + k * piece.table_2
        gain = weights.ctypes.data + i * piece.gain_0 + j * piece.gain_1 + k * piece.gain_2
        ahead = piece.x_1 if j + 1 < piece.size_1 else piece.x_0 - j * piece.x_1
        if i + 1 == piece.size_0 and j + 1 == piece.size_1:  # the next tile
            ahead = piece.tile * piece.x_2 - i * piece.x_0 - j * piece.x_1
        root, root_step = roots.ctypes.data, 8
        if piece.computes_roots:
            square_rows(tag, x, piece.x_2, piece.width, count, root, 8)
            root_rows(tag, piece.mean, piece.eps, count, root)
        elif place.roots:
            root = place.roots + i * piece.root_0 + j * piece.root_1 + k * piece.root_2
            root_step = piece.root_2
        slots, slot_step = 0, 0
        if place.slots:
            from_ = place.slots + i * piece.slot_0 + j * piece.slot_1 + k * piece.slot_2
            _offsets(piece, from_, piece.slot_2, count if piece.slot_2 else 1, offsets)
            slots, slot_step = offsets.ctypes.data, 8 if piece.slot_2 else 0
        tables = job.cos, job.sin, job.rows, row
        fused_rows(
            tag, place.mode, piece, x, out, tables, gain, (root, root_step), (slots, slot_step),
            count, ahead,
        )  # fmt: skip
    if place.mode >= STREAMING:
        fence()


@compiled()
def _square_tiles(tag, job, address, part):
    place = _place(address)
    piece = _piece(place.form)
    first, last = share_of(job, piece.size_0 * piece.size_1, part)
    for at in range(first, last):
        i, j = at // piece.size_1, at % piece.size_1
        x = place.x + i * piece.x_0 + j * piece.x_1
        sums = place.out + i * piece.out_0 + j * piece.out_1
        square_rows(tag, x, piece.x_2, piece.width, piece.size_2, sums, piece.out_2)


@compiled()
def _back_tiles(tag, job, address, part):
    place = _place(address)
    piece = _piece(place.form)
    first, last = share_of(job, _tiles(piece), part)
    weights = _gain(tag, piece, place.weight)
    turned = empty(piece.tile * piece.width, np.float64)
    own = empty((2, piece.tile), np.float64)
    roots, dots = own[0], own[1]
    read = place.mode - STREAMING if place.mode >= STREAMING else place.mode
    for at in range(first, last):
        i, j, k, count = _tile(piece, at)
        # here, and not before the loop: Numba frees an array behind the last line that names it
        to_roots, to_dots, to_turned = roots.ctypes.data, dots.ctypes.data, turned.ctypes.data
        x = place.x + i * piece.x_0 + j * piece.x_1 + k * piece.x_2
        out = place.out + i * piece.out_0 + j * piece.out_1 + k * piece.out_2
        grad = place.grad + i * piece.grad_0 + j * piece.grad_1 + k * piece.grad_2
        row = i * piece.table_0 + j * piece.table_1 + k * piece.table_2
        of_weights = i * piece.gain_0 + j * piece.gain_1 + k * piece.gain_2
        gain = weights.ctypes.data + of_weights
        gains = place.gains + part * place.gains_size + of_weights
        tables = job.cos, job.sin, job.rows, row
        dot_rows(
            tag, read, piece, x, grad, tables, gain, to_turned, to_roots, to_dots, count
        )  # fmt: skip
        if place.phase == BOTH:
            root_rows(tag, piece.mean, piece.eps, count, to_roots)
        else:
            root = place.roots + i * piece.root_0 + j * piece.root_1 + k * piece.root_2
            dot = place.dots + i * piece.dot_0 + j * piece.dot_1 + k * piece.dot_2
            if place.phase == DOTS:
                for index in range(count):
                    store_double(dot + index * piece.dot_2, dots[index])
                continue
            for index in range(count):
                roots[index] = load_double(root + index * piece.root_2)
                dots[index] = load_double(dot + index * piece.dot_2)
        for index in range(count):
            dots[index] *= roots[index] / piece.mean
        back_rows(
            tag, place.mode, piece, x, out, gain, to_turned, to_roots, to_dots, gains, count
        )  # fmt: skip
    if place.mode >= STREAMING:
        fence()


_KINDS = {"fused": 0, "squares": 1, "back": 2}


def _run(kind: int, tag: np.generic) -> Callable[[int], None]:
    def run(address):
        job, taken = _job(address), address + _TAKEN
        own = own_number(job, taken)
        part = next_part(job, taken, own)
        while part >= 0:
            for side in range(job.pieces):
                place = address + _PLACES + side * _PLACE_SIZE
                if kind == 0:  # which is known when it is compiled
                    _fused_tiles(tag, job, place, part)
                elif kind == 1:
                    _square_tiles(tag, job, place, part)
                else:
                    _back_tiles(tag, job, place, part)
            part = next_part(job, taken, own)

    return run


@functools.cache
def loop(kind: str, name: str) -> Loop:
    """The loop of a kind for a key of TAGS, that does the parts of a JOB until none is left.

    fused     each piece normalised and rotated, to `out` or to its slots
    back      the gradient of x, to `out`, and those of the weights, to `gains`
    squares   the sums of the squares of its rows, as float64 to `out`
    """
    return as_loop(_run(_KINDS[kind], TAGS[name]))


def _check(address):
    job, places = _job(address), address + _PLACES
    one, two, three = _place(places), _place(places + _PLACE_SIZE), _place(places + 2 * _PLACE_SIZE)
    slots = max(one.slots, two.slots, three.slots)  # all have the same
    if not are_inside(job.rows, job.row_count, job.row_limit):
        return 0
    if not are_inside(slots, job.slot_count, job.slot_limit, -(2**63)):
        return 0
    operands = (
        one.x, two.x, three.x, job.cos, job.sin, job.rows, slots, one.out, two.out, three.out
    )  # fmt: skip
    return int(job.reach == 0 or are_apart(operands, 7, 3, job.reach))


@functools.cache
def is_safe() -> Callable[[int], int]:
    """The checks of a JOB: 1 where every row number is inside of the table, every slot below its
    limit, and, if it has a `reach`, no output reaches into an operand other than its own x, nor
    into the output before."""
    return as_check(_check)
