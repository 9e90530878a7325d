"""A fused call on the host as jobs of the compiled loops, for NumPy arrays and torch tensors."""

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np

if numba.config.DISABLE_JIT:  # then the plain formula is used
    raise ImportError("Numba compiles nothing while NUMBA_DISABLE_JIT is set")

from ..layouts import pair_slices
from . import Numbers as Array
from . import fused_loops, loops, threads
from .fused_llvm import STREAMING
from .geometry import Geometry
from .jobs import _LINE, _TILE_BYTES, STREAM_BYTES, _is_aligned, _merged
from .llvm import MODES
from .memory import SIZES, Block, is_contiguous_last, is_injective
from .numpy import address


class Piece(NamedTuple):
    """The form of one tensor of a fused call.

    x, out     what is read and written; where it is scattered, `out` is a cache
    geometry   None for a tensor that is not rotated
    head_axis  of x, None where it has no heads
    weights    rows of weights, 1 or one for each head; 0 where it is not normalised
    is_full    the mean is over all heads of a token
    """

    x: Block
    out: Block
    geometry: Geometry | None
    head_axis: int | None
    weights: int
    is_full: bool
    is_scattered: bool
    is_in_place: bool


class Form(NamedTuple):
    """The record of a piece, its address, how pairs are read and written, and whether past caches.

    `mode` is that of stores into the caches.
    """

    record: Array
    at: int
    mode: int
    can_stream: bool


class Memory(NamedTuple):
    """Where the memory of a piece is: addresses, and arrays that are made for the call."""

    x: int
    out: int
    gain: Array | None
    offsets: Array | None  # of each token's slot in bytes, negative where it is skipped


def run(
    pieces: Sequence[Piece],
    memories: Sequence[Memory],
    eps: float,
    table: Block | None,
    rows: Block | None,
    places: tuple[int, int, int],
) -> bool:
    """Do it; False, and nothing written, where the loops cannot take these.

    `places` are the addresses of cos, sin and row numbers, or 0.
    """
    name = pieces[0].x.dtype
    if name not in loops.TAGS or not all([math.prod(piece.x.shape) for piece in pieces]):
        return False
    forms = [_form(piece, table, rows, eps) for piece in pieces if _is_ready(piece)]
    if None in forms or len(forms) < len(pieces):
        return False
    size = sum(math.prod(piece.x.shape) * SIZES[name] for piece in pieces)
    alive: list[object] = [forms]
    jobs = []
    for piece, memory, form in zip(pieces, memories, forms, strict=True):
        assert form is not None
        gain = _ones(piece.x.shape[-1], name) if memory.gain is None else memory.gain
        roots = _roots(piece, memory.x, eps, size) if piece.is_full else None
        alive += [gain, roots]
        jobs.append({
            "form": form.at, "x": memory.x, "out": memory.out, "gain": address(gain),
            "roots": _address(roots), "slots": _address(memory.offsets),
            "mode": _mode(form, memory.out, size),
        })  # fmt: skip
    _do("fused", name, size, places, jobs)
    del alive
    return True


def _do(
    kind: str, name: str, size: int, tables: tuple[int, int, int], places: Sequence[dict[str, int]]
) -> None:
    """A loop over records of PLACE, of which what is not given is 0."""
    numbers = [1, 1, 0, *tables, len(places)]
    for place in (*places, *[{}] * (3 - len(places))):
        numbers += [place.get(field, 0) for field in _FIELDS]
    threads.run(fused_loops.loop(kind, name), size, array("q", [*numbers, 0]))


_FIELDS = fused_loops.PLACE.names or ()


def _address(values: Array | None) -> int:
    return 0 if values is None else address(values)


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
    )


def _mode(form: Form, out: int, size: int) -> int:
    return form.mode + STREAMING * (form.can_stream and size >= STREAM_BYTES and out % _LINE == 0)


@lru_cache(maxsize=1024)
def _form(
    piece: Piece, table: Block | None, rows: Block | None, eps: float, grad: Block | None = None
) -> Form | None:
    """None where tables or gradient have gaps, or the rows lie along more than three axes."""
    if not all([is_contiguous_last(block) for block in (table, grad) if block is not None]):
        return None
    x, out, geometry, head_axis, weights, is_full, is_scattered, _ = piece
    width, size = x.shape[-1], SIZES[x.dtype]
    real = 8 if x.dtype == "float64" else 4
    along = table if rows is None else rows
    token_steps, dot_steps = (_row_steps(x, head_axis, heads) for heads in (False, True))
    axes = []
    for axis, count in enumerate(x.shape[:-1]):
        is_head = axis == head_axis
        dim = None if geometry is None else geometry.dims[axis]
        step = 0 if dim is None or along is None or along.shape[dim] == 1 else along.strides[dim]
        to = out.strides[-2] * is_head if is_scattered else out.strides[axis]
        token = token_steps[axis]
        axes.append((
            count, x.strides[axis], to, step, token * is_scattered,
            width * real * (is_head and weights > 1), token * is_full,
            0 if grad is None else grad.strides[axis], dot_steps[axis] * (grad is not None),
        ))  # fmt: skip
    merged: list[tuple[int, ...]] = [*_merged(axes)]  # type: ignore[arg-type]
    if len(merged) > 3:
        return None
    if len(merged) > 1 and merged[-1][5]:  # a run of rows has the same weights
        merged[-2:] = merged[:-3:-1]
    pairs, start = (0, 0) if geometry is None else (geometry.pairs, geometry.start)
    if geometry is None and not weights:
        while merged and merged[-1] == (merged[-1][0], *(width * size,) * 2, *(0,) * 6):
            width *= merged.pop()[0]
    inner = [(1, *(0,) * 8)] * (3 - len(merged)) + merged
    form = np.zeros((), fused_loops.PIECE)
    for axis, steps in enumerate(inner):
        for name, number in zip(fused_loops.AXES, steps, strict=True):
            form[f"{name}_{axis}"] = number
    form["row_size"] = 0 if rows is None or table is None else table.strides[0]
    form["width"], form["pairs"] = width, pairs
    form["start"] = start if pairs else width
    form["tail"] = width - start - 2 * pairs if pairs else 0
    tile = max(1, _TILE_BYTES // (2 * max(pairs, 32) * SIZES["float32"]))
    form["tile"] = 1 if inner[-1][5] else tile if inner[-1][3] else 4 * tile
    form["sign"] = -1 if geometry is not None and geometry.conjugate else 1
    form["mean"], form["eps"] = width * _heads(piece) ** is_full, eps
    form["is_plain"], form["computes_roots"] = weights == 0, weights > 0 and not is_full
    whole = Geometry(0, piece.x.shape[-1], "half", "half", ()) if geometry is None else geometry
    read, written = whole.layout, whole.out_layout
    can_stream = read == written and not piece.is_in_place and _is_aligned(out, whole)
    return Form(form, address(form), MODES.index((read, written, False)), can_stream)


def _heads(piece: Piece) -> int:
    return 1 if piece.head_axis is None else piece.x.shape[piece.head_axis]


def _row_steps(x: Block, head_axis: int | None, has_heads: bool) -> tuple[int, ...]:
    """Strides of 8-byte numbers without gaps, one for each token, or for each head of a token.

    >>> _row_steps(Block((2, 3, 5, 64), (), "float32"), 1, True)
    (120, 8, 24)
    """
    order = [axis for axis in range(len(x.shape) - 1) if axis != head_axis]
    if has_heads and head_axis is not None:
        order.append(head_axis)
    steps, step = [0] * (len(x.shape) - 1), 8
    for axis in reversed(order):
        steps[axis] = step
        step *= x.shape[axis]
    return tuple(steps)


def _roots(piece: Piece, x: int, eps: float, size: int) -> Array:
    """1 / sqrt(mean + eps) of the tokens, over all heads of each, (tokens,) float64."""
    kind = np.float64 if piece.x.dtype == "float64" else np.float32
    sums = np.empty((math.prod(piece.x.shape[:-1]) // _heads(piece), _heads(piece)))
    out = Block(piece.x.shape, (*_row_steps(piece.x, piece.head_axis, True), 8), "float64")
    plain = piece._replace(out=out, geometry=None, weights=1, is_full=False, is_scattered=False)
    form = _form(plain, None, None, eps)
    assert form is not None
    place = {"form": form.at, "x": x, "out": address(sums)}
    _do("squares", piece.x.dtype, size, (0, 0, 0), [place])
    mean = sums.sum(-1).astype(kind) / kind(_heads(piece) * piece.x.shape[-1])
    return (kind(1) / np.sqrt(mean + kind(eps))).astype(np.float64)


def run_back(
    piece: Piece, memory: Memory, grad: tuple[Block, int], eps: float, table: Block,
    rows: Block | None, places: tuple[int, int, int],
) -> Array | None:  # fmt: skip
    """The gradient of x to memory.out; returns that of the weights, as `gain_of` orders them.

    `grad` is that of what was made of x. None, and nothing written, where the loops cannot take it.
    The order of the sums over tokens depends on the number of threads.
    """
    x, name, gain = piece.x, piece.x.dtype, memory.gain
    if gain is None or name not in loops.TAGS or not math.prod(x.shape):
        return None
    form = _form(piece, table, rows, eps, grad[0]) if _is_ready(piece) else None
    if form is None:
        return None
    size = math.prod(x.shape) * SIZES[name]
    gains = np.zeros((threads.count() * threads.PARTS, *gain.shape), gain.dtype)
    place = {
        "form": form.at, "x": memory.x, "out": memory.out, "gain": address(gain),
        "mode": _mode(form, memory.out, size), "grad": grad[1], "gains": address(gains),
        "gains_size": gains.strides[0],
    }  # fmt: skip
    if not piece.is_full:
        _do("back", name, size, places, [place])
        return gains.sum(0)
    roots = _roots(piece, memory.x, eps, size)
    dots = np.zeros((math.prod(x.shape[:-1]) // _heads(piece), _heads(piece)))
    place |= {"roots": address(roots), "dots": address(dots), "phase": fused_loops.DOTS}
    _do("back", name, size, places, [place])
    dots[:] = dots.sum(-1, keepdims=True)
    _do("back", name, size, places, [place | {"phase": fused_loops.BACK}])
    return gains.sum(0)


def gain_of(weight: Array, add_one: bool, geometry: Geometry | None, name: str) -> Array:
    """Weights (rows, channels) in the order in which the loops read them, as `fused_llvm` says.

    >>> gain_of(np.array([[1.0, 2, 3, 4]]), True, None, "float32")
    array([[2., 3., 4., 5.]], dtype=float32)
    """
    gain: Array = weight.astype(np.float64 if name == "float64" else np.float32)
    if add_one:
        gain += 1
    if geometry is not None and (geometry.layout != "half" or geometry.start):
        gain = gain[:, order(gain.shape[-1], geometry.start, geometry.pairs, geometry.layout)]
    return np.ascontiguousarray(gain)


@lru_cache(maxsize=64)
def order(width: int, start: int, pairs: int, layout: str) -> Array:
    """Channels in the order of the weights: first of each pair, second, before, after."""
    channels = np.arange(width)
    first, second = pair_slices(2 * pairs, layout, start)
    rest = channels[:start], channels[start + 2 * pairs :]
    return np.concatenate([channels[first], channels[second], *rest])


@lru_cache(maxsize=64)
def _ones(width: int, name: str) -> Array:
    return np.ones((1, width), np.float64 if name == "float64" else np.float32)


def offsets_of(slots: Array, strides: Sequence[int], block: int | None) -> Array | None:
    """Bytes from the start of a cache to each slot, -1 where it is negative; None if unsuited."""
    if any(step < 0 for step in strides):
        return None
    if block is None:
        offsets = slots * strides[0]
    else:
        offsets = (slots // block) * strides[0] + (slots % block) * strides[1]
    offsets[slots < 0] = -1
    return np.ascontiguousarray(offsets)
