"""Run fused calls in the compiled loops, on arrays of any library that are in host memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import Numbers
from ..memory import Block
from ..stages import (
    Fit,
    KVCache,
    LatentCache,
    Norm,
    Stages,
    cache_scales,
    check_cache,
    check_slot_shape,
    check_slots,
    weight_form,
)
from . import fused_jobs as jobs

Array = Any  # of NumPy or torch; one call has arrays of one of them


class Access(NamedTuple):
    """How the loops access the arrays of a library."""

    form: Callable[[Array], Block]
    address: Callable[[Array], int]
    numbers: Callable[[Array], Numbers]  # from whole numbers, to a NumPy array
    weight: Callable[[Array], Array]  # to weights that the loops can read: contiguous floats


class Call(NamedTuple):
    """What a fused call has besides q, k and v.

    `rows` are contiguous int64 inside of the tables. For gradients, `with_weights` replaces the
    weights in `norm`.
    """

    access: Access
    cos: Array
    sin: Array
    rows: Array | None
    fitted: Fit
    norm: Norm | None

    def weight(self, index: int) -> Array | None:
        """Return the norm weight of q, k or v, by its index."""
        return None if self.norm is None else getattr(self.norm, "qkv"[index])

    def with_weights(self, weights: Sequence[Array | None]) -> "Call":
        """Return the call with these norm weights of q and perhaps k."""
        q, k = (*weights, None)[:2]
        return self._replace(norm=None if self.norm is None else replace(self.norm, q=q, k=k))

    def table(self) -> tuple[Block, Block | None, tuple[int, int, int]]:
        """Return the forms of the tables and of the row numbers, and the addresses of all three."""
        (form, address, *_), cos, sin, rows = self.access, self.cos, self.sin, self.rows
        addresses = address(cos), address(sin), 0 if rows is None else address(rows)
        return form(cos), None if rows is None else form(rows), addresses


def casts_nothing(stages: Stages, kind: str) -> bool:
    """Return whether results are not scaled and keep `kind`, the dtype of q, as the loops need."""
    scales = [*stages.scales, *[scale for *_, scale in cache_scales(stages.cache)]]
    is_plain = all([type(scale) in (int, float) and scale == 1 for scale in scales])
    return is_plain and stages.dtype in (None, kind)


def rotated(call: Call, xs: Sequence[Array], outs: Sequence[Array]) -> bool:
    """Write q and k to `outs`; return False and write nothing if the loops cannot."""
    return _run(call, pieces_of(call, (*xs, None)[:2], outs, None))


def stored(
    call: Call, q: Array, k: Array, v: Array | None, out: Array, cache: KVCache | LatentCache
) -> bool:
    """Write q to `out`, k and v to their slots (contiguous int64).

    Returns False and writes nothing if the loops cannot.
    """
    return _run(call, pieces_of(call, (q, k, v), (out,), cache))


# form, addresses, and the arrays that must live until the piece is done
PreparedPiece = tuple[jobs.Piece, jobs.Memory, object]


def pieces_of(
    call: Call, xs: Sequence[Array | None], outs: Sequence[Array],
    cache: KVCache | LatentCache | None,
) -> list[PreparedPiece] | None:  # fmt: skip
    """Return the pieces of q, k and perhaps v: all written to `outs`, or k and v to a cache.

    None if the dtype of the cache is another one. Raises ValueError if the cache or its slots
    (contiguous int64) do not fit.
    """
    pieces = [
        piece_of(call, index, x, y)
        for index, (x, y) in enumerate(zip(xs, outs, strict=False)) if x is not None
    ]  # fmt: skip
    if cache is None:
        return pieces
    _, k, v = xs
    slots = cache.slots
    check_slot_shape(tuple(slots.shape), call.fitted.by_batch)
    numbers = call.access.numbers(slots).reshape(call.fitted.by_batch)
    numbers = np.ascontiguousarray(np.moveaxis(numbers, -1, call.fitted.place))
    highest = int(numbers.max(initial=-1))
    assert k is not None
    for index, (name, x, target, row) in enumerate(_targets(call, k, v, cache)):
        shape = tuple(target.shape)
        block = check_cache(name, shape, row)
        check_slots(highest, shape, block)
        if target.dtype != x.dtype:
            return None
        pieces.append(piece_of(call, index + 1, x, target, (numbers, block)))
    return pieces


def _targets(
    call: Call, k: Array, v: Array | None, cache: KVCache | LatentCache
) -> list[tuple[str, Array, Array, tuple[int, ...]]]:
    """Return the writes to a cache as (name, values, target, shape of a token in the target)."""
    if isinstance(cache, LatentCache):
        assert v is not None
        latent = v.shape[-1]
        values, keys = cache.rows[..., :latent], cache.rows[..., latent:]
        return [("k", k, keys, (k.shape[-1],)), ("v", v, values, (latent,))]
    axis = call.fitted.head_axis
    heads = 1 if axis is None else k.shape[axis]
    pairs = [("k", k, cache.k)] if v is None else [("k", k, cache.k), ("v", v, cache.v)]
    return [(name, x, target, (heads, x.shape[-1])) for name, x, target in pairs]


def _run(call: Call, prepared: list[PreparedPiece] | None) -> bool:
    if prepared is None:
        return False
    pieces, memories, alive = zip(*prepared, strict=True)
    table, rows, addresses = call.table()
    eps = 0.0 if call.norm is None else call.norm.eps
    plan = jobs.call_of(pieces, table, rows, eps)
    is_done = plan is not None and jobs.run(plan, memories, addresses, False)
    del alive
    return is_done


def piece_of(
    call: Call, index: int, x: Array, out: Array, to: tuple[Numbers, int | None] | None = None
) -> PreparedPiece:
    """Return the piece that writes x, array `index` of (q, k, v), to `out`.

    With `to`, `out` is a cache, and `to` the slots of the tokens of x in order, and the block size
    (None without blocks).
    """
    (form, address, *_), fitted = call.access, call.fitted
    weight, name = call.weight(index), "qkv"[index]
    geometry = fitted.geometries[index] if index < 2 else None
    is_latent = index == 2 and x.ndim == len(fitted.tokens) + 1
    head_axis = None if is_latent else fitted.head_axis
    gains, slots, slot_form = None, None, None
    if weight is not None and call.norm is not None:
        heads = 1 if head_axis is None else x.shape[head_axis]
        rows, is_full = weight_form(name, tuple(weight.shape), heads, x.shape[-1])
        weight = call.access.weight(weight)
        is_full = is_full and heads > 1
        gains = jobs.Weight(form(weight).dtype, rows[0], is_full, call.norm.add_one)
    if to is not None:
        slots, block = to
        slot_form = jobs.Slots(form(out).strides[:2], block)
    is_in_place = address(x) == address(out)
    piece = jobs.Piece(form(x), form(out), geometry, head_axis, gains, slot_form, is_in_place)
    of_weight = 0 if weight is None else address(weight)
    of_slots = 0 if slots is None else slots.ctypes.data
    memory = jobs.Memory(address(x), address(out), of_weight, of_slots)
    return piece, memory, (weight, slots)
