"""The reference of `rotary.fused`: the plain formula, in NumPy. Every other kernel agrees with it.

    n = x / sqrt(mean(x^2) + eps) * weight     float32; over a head, or over all heads of a token
    y = n rotated                              the formula of `kernels/numpy.py`
    z = round(y / scale)                       to the type of x, or of `dtype`, or of the cache

Each stage that is not asked for is left out, and nothing is rounded between them.
"""

from collections.abc import Sequence

import numpy as np

from . import Numbers as Array
from .geometry import Geometry, Options
from .numpy import check_operands, check_rows, name_of, rotate
from .stages import (
    LARGEST,
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
    fit,
    scale_form,
    slot_shape,
    weight_form,
)

Result = Array | tuple[Array, Array] | None  # with its scales where they were computed


def fused(
    q: Array,
    k: Array | None,
    v: Array | None,
    cos: Array,
    sin: Array,
    positions: object,
    options: Options,
    stages: Stages,
    out: Sequence[Array] | None,
) -> tuple[Result, Result, Result]:
    """q, k and v through all stages; None for what was not given, or went into the cache.

    Arguments and errors are those of `rotary.fused`.
    """
    xs = [x for x in (q, k, v) if x is not None]
    check_operands(xs, cos, sin, None)
    rows = None if positions is None else check_rows(positions, cos)
    shapes = [None if x is None else x.shape for x in (q, k, v)]
    fitted = fit(shapes, cos.shape, None if rows is None else rows.shape, options, stages)
    turned = [
        turn(x, name, cos, sin, rows, stages.norm, fitted, geometry)
        for (name, x), geometry in zip((("q", q), ("k", k)), fitted.geometries, strict=False)
        if x is not None
    ]
    ys: list[Array | None] = [*turned, *[None] * (2 - len(turned))]
    is_changed = stages.changes_v or stages.cache is not None
    v_axis = None if isinstance(stages.cache, LatentCache) else fitted.head_axis
    ys.append(None if v is None or not is_changed else normed(v, "v", stages.norm, v_axis))
    if stages.cache is not None:
        assert ys[1] is not None
        store(ys[1], ys[2], stages.cache, fitted)
        ys[1] = ys[2] = None
    kind = name_of(q.dtype) if stages.dtype is None else stages.dtype
    results = [
        None if y is None else cast(y, kind, scale, name, fitted.head_axis)
        for y, name, scale in zip(ys, "qkv", stages.scales, strict=True)
    ]
    if out is not None:
        results = written(results, out)
    return results[0], results[1], results[2] if is_changed else v


def turn(
    x: Array, name: str, cos: Array, sin: Array, rows: Array | None,
    norm: Norm | None, fitted: Fit, geometry: Geometry,
) -> Array:  # fmt: skip
    """x normalised and rotated, not yet rounded."""
    start, pairs, layout, out_layout, _, conjugate = geometry
    options = Options(layout, out_layout, 2 * pairs, start, fitted.seq_axis, None, conjugate)
    return rotate((normed(x, name, norm, fitted.head_axis),), cos, sin, rows, options, None)[0]


def norm_weight(norm: Norm | None, name: str) -> Array | None:
    """The weight that an array is normalised with; None if it is not."""
    return None if norm is None else getattr(norm, name)


def normed(x: Array, name: str, norm: Norm | None, head_axis: int | None) -> Array:
    """x in float32 (float64 if it is that), after its RMS norm if it has one."""
    wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    weight = norm_weight(norm, name)
    if norm is None or weight is None:
        return wide
    heads = 1 if head_axis is None else x.shape[head_axis]
    form, is_full = weight_form(name, weight.shape, heads, x.shape[-1])
    gain = weight.astype(wide.dtype).reshape(form) + wide.dtype.type(norm.add_one)
    over = (head_axis, -1) if is_full and head_axis is not None else -1
    mean = np.mean(np.square(wide), axis=over, keepdims=True, dtype=wide.dtype)
    return wide / np.sqrt(mean + wide.dtype.type(norm.eps)) * along_heads(gain, x.ndim, head_axis)


def cast(
    y: Array, kind: str, scale: object, name: str, head_axis: int | None
) -> Array | tuple[Array, Array]:
    """round(y / scale) in the type of that name; with the scales if they are computed here."""
    if isinstance(scale, str):
        scales = token_scales(y, kind, scale)
        return rounded(y / scales, kind), scales[..., 0]
    heads = 1 if head_axis is None else y.shape[head_axis]
    number = np.asarray(scale, y.dtype)
    number = number.reshape(scale_form(name, number.shape, heads))
    number = along_heads(number, y.ndim, head_axis)
    return rounded(y if np.all(number == 1) else y / number, kind)


def token_scales(y: Array, kind: str, scale: str = TOKEN) -> Array:
    """(..., 1): the largest channel over the largest number of a type, 1 where all are 0."""
    largest = LARGEST[kind]
    if scale != TOKEN or largest is None:
        raise ValueError(
            f"scale={scale!r} with {kind}: scales are computed by 'token', for int8 and float8"
        )
    most = np.max(np.abs(y), axis=-1, keepdims=True)
    return np.where(most == 0, most.dtype.type(1), most / most.dtype.type(largest))


def rounded(y: Array, kind: str) -> Array:
    """y in the type of that name, to nearest even; int8 and float8 saturate, NaN is 0 in int8."""
    largest = LARGEST[kind]
    if largest is not None:
        y = np.clip(y, -largest, largest)
    if kind == "int8":
        y = np.rint(np.nan_to_num(y))
    return y.astype(dtype_of(kind))


def dtype_of(kind: str) -> np.dtype[np.generic]:
    """The NumPy dtype of a name; those that NumPy lacks are of ml_dtypes."""
    try:
        return np.dtype(kind)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"NumPy has no {kind}: pip install ml_dtypes, or pass torch tensors"
        ) from None
    return np.dtype(getattr(ml_dtypes, kind))


def store(k: Array, v: Array | None, cache: KVCache | LatentCache, fitted: Fit) -> None:
    """Write each token's k and v to its slot."""
    slots = np.asarray(cache.slots)
    if slots.dtype.kind not in "iu":
        raise TypeError(f"slots must be whole numbers, got {slots.dtype}")
    slot_shape(slots.shape, fitted.tokens)
    slots = slots.reshape(-1).astype(np.int64)
    if isinstance(cache, LatentCache):
        assert v is not None
        latent = v.reshape(len(slots), -1)
        row = np.concatenate([latent, per_token(k, fitted)[:, 0].astype(latent.dtype)], axis=-1)
        scatter("the rows", row, cache.rows, slots, cache.scale)
        return
    scatter("k", per_token(k, fitted), cache.k, slots, cache.k_scale)
    if v is not None:
        if cache.v is None:
            raise ValueError("v was given, and the cache has none: pass KVCache(k, v, slots)")
        scatter("v", per_token(v, fitted), cache.v, slots, cache.v_scale)


def per_token(x: Array, fitted: Fit) -> Array:
    """(tokens, heads, head_dim)"""
    if fitted.head_axis is None:
        return x[:, None]
    moved = np.moveaxis(x, fitted.head_axis, -2)
    return moved.reshape(-1, *moved.shape[-2:])


def scatter(name: str, values: Array, cache: Array, slots: Array, scale: object) -> None:
    """Write values (tokens, ...) / scale to their slots; negative ones are skipped."""
    kind = dtype_name(name_of(cache.dtype))
    block = check_cache(name, cache.shape, values.shape[1:])
    check_slots(slots.min(initial=-1), slots.max(initial=-1), cache.shape, block)
    kept = slots >= 0
    values, slots = values[kept], slots[kept]
    where = (slots,) if block is None else (slots // block, slots % block)
    if values.dtype not in (np.float32, np.float64):
        values = values.astype(np.float32)
    if getattr(scale, "shape", ()) == cache.shape[:-1] and len(cache.shape) > 2:
        scales = token_scales(values, kind)
        scale[where] = scales[..., 0]  # type: ignore[index]
        cache[where] = rounded(values / scales, kind)
        return
    head_axis = 1 if values.ndim == 3 else None
    cache[where] = cast(values, kind, scale, name, head_axis)


def written(results: Sequence[Result], out: Sequence[Array]) -> list[Result]:
    """The results in the arrays of `out`, which are those of the results that are not None."""
    returned = [index for index, result in enumerate(results) if result is not None]
    if len(out) != len(returned):
        raise ValueError(f"out must hold {len(returned)} arrays, one for each that is returned")
    done: list[Result] = list(results)
    for index, y in zip(returned, out, strict=True):
        result = results[index]
        if not isinstance(result, np.ndarray):
            raise ValueError("out= takes no scales that are computed: call without out=")
        if y.shape != result.shape or y.dtype != result.dtype:
            raise ValueError(
                f"out must be {result.dtype} {result.shape} like the result, "
                f"got {y.dtype} {y.shape}"
            )
        y[...] = result
        done[index] = y
    return done
