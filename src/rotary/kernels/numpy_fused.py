"""The reference implementation of `rotary.fused`: the plain formula, in NumPy.

    n = x / sqrt(mean(x^2) + eps) * weight     float32; over a head, or over all heads of a token
    y = n rotated                              the formula of `kernels/numpy.py`
    z = round(y / scale)                       to the dtype of x, or `dtype`, or that of the cache

Steps that the call does not ask for are left out. Nothing is rounded between steps. Every other
kernel agrees with it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import Numbers as Array
from . import Operand
from .fused_steps import Cache, Library, cache_writes, finished, normed, slot_indices, stored
from .geometry import Options
from .memory import check_overlap
from .numpy import (
    address,
    block,
    check_like,
    check_operands,
    check_rows,
    name_of,
    of_list,
    takes,
    turned,
)
from .stages import Fit, Stages, changes_v, check_arrays, check_scales, fit

Result = Array | tuple[Array, Array] | None  # with its scales if they were computed


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
    """Return q, k, v after all steps; None for one not passed, or written to the cache.

    Arguments and errors are those of `rotary.fused`.
    """
    check_arrays("NumPy arrays", takes, stages, out)
    check_scales(stages, (q, k, v), np.asarray)
    xs = [x for x in (q, k, v) if x is not None]
    check_operands(xs, cos, sin, None)
    rows = None if positions is None else check_rows(positions, cos)
    fitted = fit((q, k, v), cos, rows, options, stages)
    ys: list[Array] = []
    for x, name, geometry in zip((q, k), "qk", fitted.geometries, strict=False):
        if x is not None:
            wide = normed(LIBRARY, x, name, stages.norm, fitted.head_axis)
            ys += turned((wide,), cos, sin, rows, geometry)
    is_changed = changes_v(stages) or stages.cache is not None
    of_v = v if is_changed else None
    updates: list[Update] = []

    def store(k: Array, v: Array | None, cache: Cache, fitted: Fit) -> None:
        updates.extend(into_cache(k, v, cache, fitted))

    if v is not None and not is_changed and out is not None:
        # v is returned as it is, so no output may be it
        of_outs = [(address(y), block(y)) for y in out]
        check_overlap([(address(v), block(v))], of_outs, in_place=False)
    results = finished(LIBRARY, of_v, ys, name_of(q.dtype), fitted, stages, store)
    if out is not None:
        updates += into_outputs(results, out)
        arrays = iter(out)
        results = [None if result is None else next(arrays) for result in results]
    write(updates)
    return results[0], results[1], results[2] if is_changed else v


def dtype_of(kind: str) -> np.dtype[np.generic]:
    """Return the dtype of a name, from ml_dtypes if NumPy lacks it."""
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
    as_like=lambda numbers, y: np.asarray(numbers, y.dtype),
    over_root=lambda x, y: x / np.sqrt(y),
)


class Update(NamedTuple):
    """New values for a part of an array."""

    array: Array
    where: Operand
    values: Array


def into_cache(k: Array, v: Array | None, cache: Cache, fitted: Fit) -> list[Update]:
    """Return the updates that write k and v of each token to its slot, if it is not negative."""
    slots = of_list(cache.slots)
    if slots.dtype.kind not in "iu":
        raise TypeError(f"slots must be whole numbers, got {slots.dtype}")
    made = cache_writes(LIBRARY, k, v, slots, cache, fitted)
    slots = slots.reshape(-1).astype(np.int64)
    kept, highest = slots >= 0, int(slots.max(initial=-1))
    updates = []
    for each in made:
        where = slot_indices(each, slots[kept], highest)
        values, scales = stored(LIBRARY, each._replace(values=each.values[kept]))
        updates.append(Update(each.cache, where, values))
        if scales is not None:
            updates.append(Update(each.scale, where, scales))
    return updates


def into_outputs(results: Sequence[Result], out: Sequence[Array]) -> list[Update]:
    """Return the updates that write each result, if it is not None, to its array of `out`."""
    returned = [result for result in results if result is not None]
    if len(out) != len(returned):
        raise ValueError(
            f"out must hold {len(returned)} arrays, one for each result, got {len(out)}"
        )
    updates = []
    for result, y in zip(returned, out, strict=True):
        if not isinstance(result, np.ndarray):
            raise ValueError("out= cannot be used with computed scales: call without out=")
        check_like("result", result, y)
        updates.append(Update(y, ..., result))
    return updates


def write(updates: Sequence[Update]) -> None:
    """Write all updates; ValueError, with nothing written, if arrays overlap or are read-only."""
    check_overlap((), [(address(array), block(array)) for array, *_ in updates])
    if not all([array.flags.writeable for array, *_ in updates]):
        raise ValueError("out, or an array of the cache, is read-only")
    for array, where, values in updates:
        array[where] = values
