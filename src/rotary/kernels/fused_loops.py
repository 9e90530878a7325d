"""The compiled loops of `rotary.fused`: tiles of rows, normalised while they are in the caches."""

# compiled by Numba, from types that mypy does not know

import functools
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_void_p

import numpy as np
from numba import types
from numpy import empty

from .compiled import c_function, compiled
from .fused_back import back_rows, dot_rows
from .fused_llvm import STREAMING, fused_rows, root_rows, square_rows
from .llvm import fence, record
from .loops import TAGS, Loop, _next_part, _own, _share, _whole_numbers

# strides of each, on three axes: `gain` of the weights, `root` of 1 / sqrt(mean + eps), `grad` of
# the gradient of what was made of x, `dot` of what the gradients of a row sum to
AXES = ("size", "x", "out", "table", "slot", "gain", "root", "grad", "dot")
_AXES = tuple(
    f"{name}_{axis}" for name in AXES
    for axis in range(3)
)  # fmt: skip
# How the rows of one tensor lie in memory, as `loops.STEPS`: bytes, but for the sizes, and for
# `width`, `start` and `tail`, which are channels. The mean is over `mean` channels
PIECE = np.dtype(
    [(name, np.int64) for name in (*_AXES, "row_size", "width", "pairs", "start", "tail")]
    + [(name, np.int64) for name in ("tile", "sign", "mean", "is_plain", "computes_roots")]
    + [("eps", np.float64)]
)
# Where they are: addresses, 0 for what there is not; and how pairs are read and written. `gains` is
# where each part adds to the gradients of the weights, `gains_size` bytes after the part before
PLACE = _whole_numbers(
    *("form", "x", "out", "gain", "roots", "slots", "mode"),
    *("grad", "dots", "gains", "gains_size", "phase"),
)
BOTH, DOTS, BACK = 0, 1, 2  # phases of a gradient: one after the other, or one of them
# A job begins and ends as those of `loops.py`
JOB = np.dtype(
    [(name, np.int64) for name in ("threads", "parts", "number", "cos", "sin", "rows", "pieces")]
    + [("places", PLACE, (3,)), ("taken", np.int64)]
)
_piece, _place, _job = map(record, (PIECE, PLACE, JOB))
_PLACES, _TAKEN = (int(JOB.fields[name][1]) for name in ("places", "taken"))  # type: ignore[index]
_PLACE_SIZE = PLACE.itemsize


@compiled()
def _fused_tiles(tag, job, address, part):
    place = _place(address)
    piece = _piece(place.form)
    places = piece.size_0 * piece.size_1
    first, last = _share(job, places * ((piece.size_2 + piece.tile - 1) // piece.tile), part)
    roots = empty(piece.tile if place.roots == 0 else 0, np.float64)
    roots[:] = 1.0
    for at in range(first, last):
        k, other = at // places * piece.tile, at % places
        i, j = other // piece.size_1, other % piece.size_1
        x = place.x + i * piece.x_0 + j * piece.x_1 + k * piece.x_2
        out = place.out + i * piece.out_0 + j * piece.out_1 + k * piece.out_2
        row = i * piece.table_0 + j * piece.table_1 + k * piece.table_2
        gain = place.gain + i * piece.gain_0 + j * piece.gain_1 + k * piece.gain_2
        ahead = piece.x_1 if j + 1 < piece.size_1 else piece.x_0 - j * piece.x_1
        if other + 1 == places:  # the next tile
            ahead = piece.tile * piece.x_2 - i * piece.x_0 - j * piece.x_1
        count = min(piece.tile, piece.size_2 - k)
        root, root_step = roots.ctypes.data, 8
        if piece.computes_roots:
            square_rows(tag, x, piece.x_2, piece.width, count, root, 8)
            root_rows(tag, piece.mean, piece.eps, count, root)
        elif place.roots:
            root = place.roots + i * piece.root_0 + j * piece.root_1 + k * piece.root_2
            root_step = piece.root_2
        slots, slot_step = 0, 0
        if place.slots:
            slots = place.slots + i * piece.slot_0 + j * piece.slot_1 + k * piece.slot_2
            slot_step = piece.slot_2
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
    first, last = _share(job, piece.size_0 * piece.size_1, part)
    for at in range(first, last):
        i, j = at // piece.size_1, at % piece.size_1
        x = place.x + i * piece.x_0 + j * piece.x_1
        sums = place.out + i * piece.out_0 + j * piece.out_1
        square_rows(tag, x, piece.x_2, piece.width, piece.size_2, sums, piece.out_2)


def _fused(tag: np.generic) -> Callable[[int], None]:
    def fused(address):
        job, taken = _job(address), address + _TAKEN
        own = _own(job, taken)
        part = _next_part(job, taken, own)
        while part >= 0:
            for side in range(job.pieces):
                _fused_tiles(tag, job, address + _PLACES + side * _PLACE_SIZE, part)
            part = _next_part(job, taken, own)

    return fused


def _squares(tag: np.generic) -> Callable[[int], None]:
    def squares(address):
        job, taken = _job(address), address + _TAKEN
        own = _own(job, taken)
        part = _next_part(job, taken, own)
        while part >= 0:
            for side in range(job.pieces):
                _square_tiles(tag, job, address + _PLACES + side * _PLACE_SIZE, part)
            part = _next_part(job, taken, own)

    return squares


@compiled()
def _back_tiles(tag, job, address, part):
    place = _place(address)
    piece = _piece(place.form)
    places = piece.size_0 * piece.size_1
    first, last = _share(job, places * ((piece.size_2 + piece.tile - 1) // piece.tile), part)
    own = empty((2, piece.tile), np.float64)
    roots, sums = own[0], own[1]
    for at in range(first, last):
        k, other = at // places * piece.tile, at % places
        i, j = other // piece.size_1, other % piece.size_1
        x = place.x + i * piece.x_0 + j * piece.x_1 + k * piece.x_2
        out = place.out + i * piece.out_0 + j * piece.out_1 + k * piece.out_2
        grad = place.grad + i * piece.grad_0 + j * piece.grad_1 + k * piece.grad_2
        row = i * piece.table_0 + j * piece.table_1 + k * piece.table_2
        weights = i * piece.gain_0 + j * piece.gain_1 + k * piece.gain_2
        gain = place.gain + weights
        gains = place.gains + part * place.gains_size + weights
        count = min(piece.tile, piece.size_2 - k)
        tables = job.cos, job.sin, job.rows, row
        mode = place.mode
        root, dot = (roots.ctypes.data, 8), (sums.ctypes.data, 8)
        if place.phase == BOTH:
            square_rows(tag, x, piece.x_2, piece.width, count, root[0], 8)
            root_rows(tag, piece.mean, piece.eps, count, root[0])
            sums[:] = 0.0
        else:
            at_roots = i * piece.root_0 + j * piece.root_1 + k * piece.root_2
            root = place.roots + at_roots, piece.root_2
            at_dots = i * piece.dot_0 + j * piece.dot_1 + k * piece.dot_2
            dot = place.dots + at_dots, piece.dot_2
        if place.phase != BACK:
            read = mode - STREAMING if mode >= STREAMING else mode
            dot_rows(tag, read, piece, x, grad, out, tables, gain, root, dot, gains, count)
        if place.phase != DOTS:
            back_rows(tag, mode, piece, x, grad, out, tables, gain, root, dot, gains, count)
    if place.mode >= STREAMING:
        fence()


def _back(tag: np.generic) -> Callable[[int], None]:
    def back(address):
        job, taken = _job(address), address + _TAKEN
        own = _own(job, taken)
        part = _next_part(job, taken, own)
        while part >= 0:
            for side in range(job.pieces):
                _back_tiles(tag, job, address + _PLACES + side * _PLACE_SIZE, part)
            part = _next_part(job, taken, own)

    return back


KINDS = {"back": _back, "fused": _fused, "squares": _squares}


@functools.cache
def loop(kind: str, name: str) -> Loop:
    """The loop of a kind for a key of TAGS, that does the parts of a JOB until none is left.

    fused     each piece normalised and rotated, to `out` or to its slots
    back      the gradient of x, to `out`, and those of the weights, to `gains`
    squares   the sums of the squares of its rows, as float64 to `out`
    """
    function = c_function(KINDS[kind](TAGS[name]), types.void(types.int64))
    _alive.append(function)
    return Loop(CFUNCTYPE(None, c_void_p)(function.address), function.address)


_alive: list[object] = []
