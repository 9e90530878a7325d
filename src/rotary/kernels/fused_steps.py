"""The steps of a fused call around its rotation: one formula for NumPy, torch and JAX.

It calls functions that have one name in all three; `Library` has those that differ. Each library
writes to a cache in its own way: in place, as bytes, or into a new array.
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
    check_slots,
    dtype_name,
    is_written,
    scale_form,
    slot_shape,
    weight_form,
)


class Library(NamedTuple):
    """What the steps need of an array library.

    xp         the module with abs, where, mean, ...
    convert    an array in the type of a name, as in `LARGEST`
    beside     numbers in the type, and on the device, of an array
    over_root  x / sqrt(y)
    """

    xp: ModuleType
    convert: Callable[[Operand, str], Operand]
    beside: Callable[[object, Operand], Operand]
    over_root: Callable[[Operand, Operand], Operand]


Cache = KVCache | LatentCache
Store = Callable[[Operand, Operand, Cache, Fit], Sequence[Operand] | None]


class Write(NamedTuple):
    """What is written to a cache: values (tokens, heads, channels) or (tokens, channels)."""

    name: str
    values: Operand
    cache: Operand
    scale: Operand


def normed(
    library: Library, x: Array, name: str, norm: Norm | None, head_axis: int | None
) -> Array:
    """x in float32 (float64 if it is that), after its RMS norm if it has one."""
    work = "float64" if dtype_name(x.dtype) == "float64" else "float32"
    wide = library.convert(x, work)
    weight = None if norm is None else getattr(norm, name)
    if norm is None or weight is None:
        return wide
    heads = 1 if head_axis is None else x.shape[head_axis]
    form, is_full = weight_form(name, tuple(weight.shape), heads, x.shape[-1])
    gain = library.convert(weight, work).reshape(form) + norm.add_one
    over = (head_axis, -1) if is_full and head_axis is not None else -1
    mean = library.xp.mean(wide * wide, axis=over, keepdims=True)
    gain = along_heads(gain, x.ndim, head_axis)
    result: Array = library.over_root(wide, mean + float(norm.eps)) * gain
    return result


def cast(
    library: Library, y: Array, kind: str, scale: Operand, name: str, head_axis: int | None
) -> Array | tuple[Array, Array]:
    """round(y / scale) in the type of that name; with the scales if they are computed here."""
    if isinstance(scale, str):
        return coded(library, y, kind, scale)
    if isinstance(scale, (int, float)):
        return rounded(library, y if scale == 1 else y / float(scale), kind)
    heads = 1 if head_axis is None else y.shape[head_axis]
    number = library.beside(scale, y)
    number = number.reshape(scale_form(name, tuple(number.shape), heads))
    return rounded(library, y / along_heads(number, y.ndim, head_axis), kind)


def coded(library: Library, y: Array, kind: str, scale: str = TOKEN) -> tuple[Array, Array]:
    """y / scales rounded, and the scales (...): the largest channel over that of the type.

    The scale is 1 where all channels are 0, or so small that it would lose bits: codes are 0.
    """
    largest = LARGEST[kind]
    if scale != TOKEN or largest is None:
        raise ValueError(
            f"scale={scale!r} with {kind}: scales are computed by 'token', for int8 and float8"
        )
    xp = library.xp
    most = xp.amax(xp.abs(y), axis=-1, keepdims=True)
    scales = most / largest
    scales = xp.where(scales < TINY, 1, scales)
    return rounded(library, y / scales, kind), scales[..., 0]


def rounded(library: Library, y: Array, kind: str) -> Array:
    """y in the type of that name, to nearest even; int8 and float8 saturate, NaN is 0 in int8."""
    xp, largest = library.xp, LARGEST[kind]
    if largest is not None:
        y = xp.clip(y, -largest, largest)
    if kind == "int8":
        y = xp.round(xp.nan_to_num(y))
    return library.convert(y, kind)


def writes(
    library: Library,
    k: Array,
    v: Array | None,
    slots: Operand,
    cache: Cache,
    fitted: Fit,
) -> list[Write]:
    """What a call writes to its cache, in the order of the cache; ValueError if it does not fit."""
    slot_shape(tuple(slots.shape), fitted.tokens)
    keys = per_token(library, k, fitted)
    if isinstance(cache, LatentCache):
        assert v is not None  # as `fit` has seen
        latent = v.reshape(math.prod(fitted.tokens), -1)
        work = dtype_name(latent.dtype)
        parts = (latent, library.convert(keys[:, 0], work))
        row = library.xp.concatenate(parts, axis=-1)
        return [Write("the rows", row, cache.rows, cache.scale)]
    result = [Write("k", keys, cache.k, cache.k_scale)]
    if v is not None:
        if cache.v is None:
            raise ValueError("v was given, and the cache has none: pass KVCache(k, v, slots)")
        result.append(Write("v", per_token(library, v, fitted), cache.v, cache.v_scale))
    return result


def finished(
    library: Library, v: Array | None, turned: Sequence[Array], own: str, fitted: Fit,
    stages: Stages, store: Store,
) -> list[Operand]:  # fmt: skip
    """What is returned for q, k and v: all steps of a fused call after the rotation.

    v       None where it is returned as it came, or was not given
    turned  q and perhaps k, normalised and rotated, not yet rounded
    own     the name of the type of q, to which results are rounded unless `stages` says another
    store   writes k and v to the cache, and gives what is returned for them, if anything is
    """
    ys: list[Operand] = [*turned, *[None] * (3 - len(turned))]
    if v is not None:
        v_axis = None if isinstance(stages.cache, LatentCache) else fitted.head_axis
        ys[2] = normed(library, v, "v", stages.norm, v_axis)
    new: Sequence[Operand] = ()
    if stages.cache is not None:
        assert ys[1] is not None  # as `fit` has seen
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
    """(tokens, heads, head_dim)"""
    if fitted.head_axis is None:
        return x[:, None]
    moved = library.xp.moveaxis(x, fitted.head_axis, -2)
    return moved.reshape(math.prod(fitted.tokens), *moved.shape[-2:])


def stored(library: Library, write: Write) -> tuple[Operand, Operand]:
    """The values in the type of their cache, and their scales where the cache has them too."""
    name, values, cache, scale = write
    kind = dtype_name(cache.dtype)
    if is_written(scale, cache):
        return coded(library, values, kind)
    codes = cast(library, values, kind, scale, name, 1 if values.ndim == 3 else None)
    assert not isinstance(codes, tuple)
    return codes, None


def places(write: Write, slots: Operand, bounds: tuple[int, int] | None) -> tuple[Operand, ...]:
    """The indices of slots in a cache: flat, or of the block and in it.

    bounds   lowest and highest of the slots where they are known: ValueError if the cache has fewer
    """
    shape = tuple(write.cache.shape)
    block = check_cache(write.name, shape, tuple(write.values.shape[1:]))
    if bounds is not None:
        check_slots(*bounds, shape, block)
    return (slots,) if block is None else (slots // block, slots % block)
