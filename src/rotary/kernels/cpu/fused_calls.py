"""A fused call by the compiled loops, on arrays of any library that lie in the host's memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .. import Numbers
from ..memory import Block
from ..stages import (
    Fit,
    KVCache,
    LatentCache,
    Norm,
    Stages,
    check_cache,
    check_slot_shape,
    check_slots,
    weight_form,
)
from . import fused_jobs as jobs

Array = Any  # of NumPy or torch; one call has arrays of one of them


class Access(NamedTuple):
    """How the loops see the arrays of a library."""

    form: Callable[[Array], Block]
    address: Callable[[Array], int]
    numbers: Callable[[Array], Numbers]  # of whole numbers, as NumPy has them
    weight: Callable[[Array], Array]  # one that the loops can read: a float, without gaps


class Call(NamedTuple):
    """A fused call on q and perhaps k, without the arrays that get gradients.

    Row numbers are int64 without gaps and inside of the tables.
    """

    access: Access
    cos: Array
    sin: Array
    rows: Array | None
    fitted: Fit
    norm: Norm | None

    def weight(self, index: int) -> Array | None:
        """The weight of q or k."""
        return None if self.norm is None else getattr(self.norm, "qkv"[index])

    def of(self, weights: Sequence[Array | None]) -> "Call":
        """The same call with these weights of q and k."""
        q, k = (*weights, None)[:2]
        return self._replace(norm=None if self.norm is None else replace(self.norm, q=q, k=k))

    def table(self) -> tuple[Block, Block | None, tuple[int, int, int]]:
        """The forms of the tables and row numbers, and where they are."""
        (form, address, *_), cos, sin, rows = self.access, self.cos, self.sin, self.rows
        places = address(cos), address(sin), 0 if rows is None else address(rows)
        return form(cos), None if rows is None else form(rows), places


def casts_nothing(stages: Stages, kind: str) -> bool:
    """Whether results have the dtype of q, `kind`, and no scale, which is all that the loops do."""
    scales: list[object] = [stages.scales[0]]
    match stages.cache:
        case KVCache(_, _, _, k_scale, v_scale):
            scales += [k_scale, v_scale]
        case LatentCache(_, _, scale):
            scales.append(scale)
        case None:
            scales += stages.scales[1:]
    is_plain = all([type(scale) in (int, float) and scale == 1 for scale in scales])
    return is_plain and stages.dtype in (None, kind)


def caches_of(cache: KVCache | LatentCache | None) -> list[Array]:
    """The arrays of a cache that are written."""
    match cache:
        case KVCache(k, v):
            return [each for each in (k, v) if each is not None]
        case LatentCache(rows):
            return [rows]
        case None:
            return []


def rotated(call: Call, xs: Sequence[Array], outs: Sequence[Array]) -> bool:
    """q and k to `outs`; False, and nothing written, where the loops cannot take them."""
    return _run(call, pieces_of(call, (*xs, None)[:2], outs, None))


def stored(
    call: Call, q: Array, k: Array, v: Array | None, out: Array, cache: KVCache | LatentCache
) -> bool:
    """q to `out`, k and v to their slots, int64 without gaps; False as in `rotated`."""
    return _run(call, pieces_of(call, (q, k, v), (out,), cache))


Made = tuple[jobs.Piece, jobs.Memory, object]  # and what has to live until it is done


def pieces_of(
    call: Call, xs: Sequence[Array | None], outs: Sequence[Array],
    cache: KVCache | LatentCache | None,
) -> list[Made] | None:  # fmt: skip
    """The work of the loops on q, k and perhaps v: all to `outs`, or k and v to a cache.

    ValueError for a cache or slots, contiguous int64, that do not fit.
    """
    pieces = [
        piece_of(call, index, x, y)
        for index, (x, y) in enumerate(zip(xs, outs, strict=False)) if x is not None
    ]  # fmt: skip
    if cache is None:
        return pieces
    _, k, v = xs
    slots = cache.slots
    check_slot_shape(tuple(slots.shape), call.fitted.tokens)
    numbers = call.access.numbers(slots)
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (-1, -1)
    assert k is not None
    for index, (name, x, target, row) in enumerate(_targets(call, k, v, cache)):
        shape = tuple(target.shape)
        block = check_cache(name, shape, row)
        check_slots(low, high, shape, block)
        if target.dtype != x.dtype:
            return None
        pieces.append(piece_of(call, index + 1, x, target, (slots, block)))
    return pieces


def _targets(
    call: Call, k: Array, v: Array | None, cache: KVCache | LatentCache
) -> list[tuple[str, Array, Array, tuple[int, ...]]]:
    """The writes to a cache, each as (name, values, target, shape of a token in the target)."""
    if isinstance(cache, LatentCache):
        assert v is not None
        latent = v.shape[-1]
        values, keys = cache.rows[..., :latent], cache.rows[..., latent:]
        return [("k", k, keys, (k.shape[-1],)), ("v", v, values, (latent,))]
    axis = call.fitted.head_axis
    heads = 1 if axis is None else k.shape[axis]
    pairs = [("k", k, cache.k)] if v is None else [("k", k, cache.k), ("v", v, cache.v)]
    return [(name, x, target, (heads, x.shape[-1])) for name, x, target in pairs]


def _run(call: Call, made: list[Made] | None) -> bool:
    if made is None:
        return False
    pieces, memories, alive = zip(*made, strict=True)
    table, rows, places = call.table()
    eps = 0.0 if call.norm is None else call.norm.eps
    plan = jobs.call_of(pieces, table, rows, eps)
    is_done = plan is not None and jobs.run(plan, memories, places, False)
    del alive
    return is_done


def piece_of(
    call: Call, index: int, x: Array, out: Array, to: tuple[Array, int | None] | None = None
) -> Made:
    (form, address, *_), fitted = call.access, call.fitted
    weight, name = call.weight(index), "qkv"[index]
    geometry = fitted.geometries[index] if index < 2 else None
    is_latent = index == 2 and x.ndim == len(fitted.tokens) + 1
    head_axis = None if is_latent else fitted.head_axis
    gains, slots, taken = None, None, None
    if weight is not None and call.norm is not None:
        heads = 1 if head_axis is None else x.shape[head_axis]
        rows, is_full = weight_form(name, tuple(weight.shape), heads, x.shape[-1])
        weight = call.access.weight(weight)
        is_full = is_full and heads > 1
        gains = jobs.Weight(form(weight).dtype, rows[0], is_full, call.norm.add_one)
    if to is not None:
        slots, block = to
        taken = jobs.Slots(form(out).strides[:2], block)
    is_in_place = address(x) == address(out)
    piece = jobs.Piece(form(x), form(out), geometry, head_axis, gains, taken, is_in_place)
    places = [0 if each is None else address(each) for each in (x, out, weight, slots)]
    return piece, jobs.Memory(*places), (weight, slots)
