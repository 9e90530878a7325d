"""The steps of a fused call before and after the rotation, written once for NumPy, torch and JAX.

They call functions that have the same name in all three; `Library` has those that differ. Each
library writes to a cache in its own way: in place, as bytes, or into a new array.
"""

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

from . import Array, Operand
from .stages import (
    LARGEST,
    TINY,
    TOKEN,
    Fit,
    KVCache,
    LatentCache,
    Norm,
    Stages,
    along_heads,
    check_cache,
    check_slot_shape,
    check_slots,
    dtype_name,
    is_written,
    scale_form,
    weight_form,
)


class Library(NamedTuple):
    """The functions of an array library that the steps use.

    xp         the module with abs, where, mean, ...
    convert    (array, dtype name of `LARGEST`) -> the array in that dtype
    as_like    (numbers, array) -> the numbers in the dtype and on the device of the array
    over_root  (x, y) -> x / sqrt(y)
    """

    xp: ModuleType
    convert: Callable[[Operand, str], Operand]
    as_like: Callable[[object, Operand], Operand]
    over_root: Callable[[Operand, Operand], Operand]


Cache = KVCache | LatentCache
Store = Callable[[Operand, Operand, Cache, Fit], Sequence[Operand] | None]


class Write(NamedTuple):
    """Values for a cache, (tokens, heads, channels) or (tokens, channels), and their scale."""

    name: str
    values: Operand
    cache: Operand
    scale: Operand


def normed(
    library: Library, x: Array, name: str, norm: Norm | None, head_axis: int | None
) -> Array:
    """Return x in float32 (float64 if x is float64), after its RMS norm if it has one."""
    work = "float64" if dtype_name(x.dtype) == "float64" else "float32"
    wide = library.convert(x, work)
    weight = None if norm is None else getattr(norm, name)
    if norm is None or weight is None:
        return wide
    heads = 1 if head_axis is None else x.shape[head_axis]
    form, is_full = weight_form(name, tuple(weight.shape), heads, x.shape[-1])
    gain = library.convert(weight, work).reshape(form)
    gain = gain + 1 if norm.add_one else gain  # jit.trace does not add a bool
    over = (head_axis, -1) if is_full and head_axis is not None else -1
    mean = library.xp.mean(wide * wide, axis=over, keepdims=True)
    gain = along_heads(gain, x.ndim, head_axis)
    result: Array = library.over_root(wide, mean + float(norm.eps)) * gain
    return result


def cast(
    library: Library, y: Array, kind: str, scale: Operand, name: str, head_axis: int | None
) -> Array | tuple[Array, Array]:
    """Return round(y / scale) in dtype `kind`, with the scales if they are computed here."""
    if isinstance(scale, str):
        return quantized(library, y, kind, scale)
    if isinstance(scale, (int, float)):
        return rounded(library, y if scale == 1 else y / float(scale), kind)
    heads = 1 if head_axis is None else y.shape[head_axis]
    number = library.as_like(scale, y)
    number = number.reshape(scale_form(name, tuple(number.shape), heads))
    return rounded(library, y / along_heads(number, y.ndim, head_axis), kind)


def quantized(library: Library, y: Array, kind: str, scale: str = TOKEN) -> tuple[Array, Array]:
    """Return y / scales rounded to dtype `kind`, and the scales, one for each token and head.

    A scale is the largest absolute channel divided by the largest number of the dtype. If that is
    below the normal float32 numbers, the scale is 1 and the codes are 0.
    """
    largest = LARGEST[kind]
    if scale != TOKEN or largest is None:
        raise ValueError(
            f"scale={scale!r} with {kind}: pass numbers, or 'token' for int8 and float8"
        )
    xp = library.xp
    most = xp.amax(xp.abs(y), axis=-1, keepdims=True)
    scales = most / largest
    scales = xp.where(scales < TINY, 1, scales)
    return rounded(library, y / scales, kind), scales[..., 0]


def rounded(library: Library, y: Array, kind: str) -> Array:
    """Return y rounded to dtype `kind`, ties to even; 8 bits saturate, and NaN is 0 in int8."""
    xp, largest = library.xp, LARGEST[kind]
    if largest is not None:
        y = xp.clip(y, -largest, largest)
    if kind == "int8":
        y = xp.round(xp.nan_to_num(y))
    return library.convert(y, kind)


def cache_writes(
    library: Library,
    k: Array,
    v: Array | None,
    slots: Operand,
    cache: Cache,
    fitted: Fit,
) -> list[Write]:
    """Return what a call writes to its cache, k before v; ValueError if it does not fit."""
    check_slot_shape(tuple(slots.shape), fitted.by_batch)
    keys = per_token(library, k, fitted)
    if isinstance(cache, LatentCache):
        assert v is not None  # `fit` has checked it
        by_batch = library.xp.moveaxis(v, fitted.place, -2)
        latent = by_batch.reshape(math.prod(fitted.tokens), v.shape[-1])
        work = dtype_name(latent.dtype)
        parts = (latent, library.convert(keys[:, 0], work))
        row = library.xp.concatenate(parts, axis=-1)
        return [Write("the rows", row, cache.rows, cache.scale)]
    result = [Write("k", keys, cache.k, cache.k_scale)]
    if v is not None:
        result.append(Write("v", per_token(library, v, fitted), cache.v, cache.v_scale))
    return result


def finished(
    library: Library, v: Array | None, turned: Sequence[Array], own: str, fitted: Fit,
    stages: Stages, store: Store,
) -> list[Operand]:  # fmt: skip
    """Take all steps of a fused call after the rotation; return the results for q, k and v.

    v       None if it was not given, or is returned unchanged
    turned  q and perhaps k, normalized and rotated, not yet rounded
    own     the dtype name of q, to which results are rounded unless `stages` has another dtype
    store   writes k and v to the cache; returns what the call returns for them, or None
    """
    ys: list[Operand] = [*turned, *[None] * (3 - len(turned))]
    if v is not None:
        v_axis = None if isinstance(stages.cache, LatentCache) else fitted.head_axis
        ys[2] = normed(library, v, "v", stages.norm, v_axis)
    new: Sequence[Operand] = ()
    if stages.cache is not None:
        assert ys[1] is not None  # `fit` has checked it
        new = store(ys[1], ys[2], stages.cache, fitted) or ()
        ys[1:] = None, None
    kind = own if stages.dtype is None else stages.dtype
    results = [
        None if y is None else cast(library, y, kind, scale, name, fitted.head_axis)
        for y, name, scale in zip(ys, "qkv", stages.scales, strict=True)
    ]
    results[1 : 1 + len(new)] = new
    return results


def per_token(library: Library, x: Array, fitted: Fit) -> Array:
    """Return x as (tokens, heads, head_dim), the tokens of a sequence together."""
    if fitted.head_axis is None:
        return x[:, None]
    moved = library.xp.moveaxis(x, (fitted.seq_axis, fitted.head_axis), (-3, -2))
    return moved.reshape(math.prod(fitted.tokens), *moved.shape[-2:])


def stored(library: Library, write: Write) -> tuple[Operand, Operand]:
    """Return the values in the dtype of their cache, and the scales to write, or None."""
    name, values, cache, scale = write
    kind = dtype_name(cache.dtype)
    if is_written(scale, cache):
        return quantized(library, values, kind)
    codes = cast(library, values, kind, scale, name, 1 if values.ndim == 3 else None)
    assert not isinstance(codes, tuple)
    return codes, None


def slot_indices(write: Write, slots: Operand, highest: int | None) -> tuple[Operand, ...]:
    """Return the indices of slots in a cache: (slot,), or (block, slot in the block).

    highest   the highest slot, None if not known; ValueError if it is beyond the cache
    """
    shape = tuple(write.cache.shape)
    block = check_cache(write.name, shape, tuple(write.values.shape[1:]))
    if highest is not None:
        check_slots(highest, shape, block)
    return (slots,) if block is None else (slots // block, slots % block)
