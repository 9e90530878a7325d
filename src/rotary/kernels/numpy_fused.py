"""The reference of `rotary.fused`: the plain formula, in NumPy. Every other kernel agrees with it.

    n = x / sqrt(mean(x^2) + eps) * weight     float32; over a head, or over all heads of a token
    y = n rotated                              the formula of `kernels/numpy.py`
    z = round(y / scale)                       to the type of x, or of `dtype`, or of the cache

Each stage that is not asked for is left out, and nothing is rounded between them.
"""

from collections.abc import Sequence

import numpy as np

from . import Numbers as Array
from .fused_steps import Cache, Library, finished, normed, places, stored, writes
from .geometry import Geometry, Options
from .numpy import check_like, check_operands, check_rows, name_of, rotate
from .stages import Fit, Norm, Stages, changes_v, fit

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
    """q, k and v after all stages; None for one that was not passed, or went into the cache.

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
    is_changed = changes_v(stages) or stages.cache is not None
    of_v = v if is_changed else None
    results = finished(LIBRARY, of_v, turned, name_of(q.dtype), fitted, stages, store)
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


def store(k: Array, v: Array | None, cache: Cache, fitted: Fit) -> None:
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
        check_like("result", result, y)
        y[...] = result
        done[index] = y
    return done
