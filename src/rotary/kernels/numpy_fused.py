"""The reference of `rotary.fused`: the plain formula, in NumPy. Every other kernel agrees with it.

    n = x / sqrt(mean(x^2) + eps) * weight     float32; over a head, or over all heads of a token
    y = n rotated                              the formula of `kernels/numpy.py`
    z = round(y / scale)                       to the type of x, or of `dtype`, or of the cache

Each stage that is not asked for is left out, and nothing is rounded between them.
"""

from collections.abc import Sequence

import numpy as np

from . import Numbers as Array
from .fused_steps import Library, cast, normed, places, stored, writes
from .geometry import Geometry, Options
from .numpy import check_operands, check_rows, name_of, rotate
from .stages import Fit, KVCache, LatentCache, Norm, Stages, fit

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
    ys.append(None if v is None or not is_changed else normed(LIBRARY, v, "v", stages.norm, v_axis))
    if stages.cache is not None:
        assert ys[1] is not None
        store(ys[1], ys[2], stages.cache, fitted)
        ys[1] = ys[2] = None
    kind = name_of(q.dtype) if stages.dtype is None else stages.dtype
    results = [
        None if y is None else cast(LIBRARY, y, kind, scale, name, fitted.head_axis)
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
    wide = normed(LIBRARY, x, name, norm, fitted.head_axis)
    return rotate((wide,), cos, sin, rows, options, None)[0]


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


LIBRARY = Library(
    np,
    convert=lambda x, kind: x.astype(dtype_of(kind)),
    beside=lambda numbers, y: np.asarray(numbers, y.dtype),
    over_root=lambda x, y: x / np.sqrt(y),
)


def store(k: Array, v: Array | None, cache: KVCache | LatentCache, fitted: Fit) -> None:
    """Write each token's k and v to its slot; a negative one is skipped."""
    slots = np.asarray(cache.slots)
    if slots.dtype.kind not in "iu":
        raise TypeError(f"slots must be whole numbers, got {slots.dtype}")
    made = writes(LIBRARY, k, v, slots, cache, fitted)
    slots = slots.reshape(-1).astype(np.int64)
    kept, bounds = slots >= 0, (slots.min(initial=-1), slots.max(initial=-1))
    for write in made:
        where = places(write, slots[kept], bounds)
        values, scales = stored(LIBRARY, write._replace(values=write.values[kept]))
        write.cache[where] = values
        if scales is not None:
            write.scale[where] = scales


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
