"""`rotary.fused` for JAX: the formula of `kernels/numpy_fused.py`, in one compiled call.

XLA on a CPU computes norm and rotation in two steps: the mean of the squares, then one loop that
normalizes, rotates and rounds. Only 16-bit arrays, which are converted for the mean, need memory of
the size of x between them.

Arrays are immutable, so new caches are returned in the place of k and v. If the call is part of a
compiled function to which the cache is donated, XLA writes into the memory of the old cache.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import Operand
from ..fused_steps import Cache, Library, cache_writes, finished, normed, slot_indices, stored
from ..geometry import Options
from ..numpy import of_list
from ..numpy_fused import dtype_of
from ..stages import (
    Fit,
    KVCache,
    LatentCache,
    Norm,
    Stages,
    arrays_of,
    changes_v,
    check_arrays,
    check_scales,
    check_slots,
    dtype_name,
    fit,
)
from . import angles
from .kernel import check_operands, check_rows, check_types, turned

Array = jax.Array
Result = Array | tuple[Array, Array] | None  # with its scales if they are computed
Operands = tuple[Operand, ...]


def _barrier() -> Callable[[Array], Array]:
    """Return a barrier to loop fusion; the identity if it has no derivative, as in JAX 0.4.34."""
    try:
        jax.eval_shape(jax.vmap(jax.grad(lax.optimization_barrier)), np.ones(1, np.float32))
    except NotImplementedError:
        return lambda x: x
    return lax.optimization_barrier  # type: ignore[no-any-return, unused-ignore]


barrier = _barrier()
LIBRARY = Library(
    jnp,
    convert=lambda x, kind: x.astype(dtype_of(kind)),
    as_like=lambda numbers, y: jnp.asarray(numbers, y.dtype),
    # without the barrier XLA on a CPU normalizes into memory, and reads it again to rotate
    over_root=lambda x, y: x * barrier(lax.rsqrt(y)),
)


class Form(NamedTuple):
    """Everything in a call that is not an array; each form is compiled once."""

    options: Options
    eps: float | None  # None: no norm
    add_one: bool
    cache: type[KVCache] | type[LatentCache] | None
    dtype: str | None
    words: tuple[str | None, ...]  # each scale that is a word, None for numbers
    changes_v: bool


def fused(
    q: Array,
    k: Array | None,
    v: Array | None,
    cos: Array,
    sin: Array,
    positions: object,
    options: Options,
    stages: Stages,
    out: object,
) -> tuple[Result, Result, Result]:
    """Return q, k and v after all steps, or the new caches in the place of k and v.

    Arguments and errors are those of `rotary.fused`.
    """
    check_types([x for x in (q, k, v) if x is not None], cos, sin, out)
    check_arrays("JAX arrays", angles.takes, stages, None)
    check_scales(stages, (q, k, v), _numbers)
    rows = None if positions is None else check_rows(positions, cos)
    norm, cache, scales = stages.norm, stages.cache, stages.scales
    weights: Operands = () if norm is None else (norm.q, norm.k, norm.v)
    form = Form(
        options,
        None if norm is None else float(norm.eps),
        norm is not None and norm.add_one,
        None if cache is None else type(cache),
        stages.dtype,
        tuple(scale if isinstance(scale, str) else None for scale in scales),
        changes_v(stages) or cache is not None,
    )
    numbers = tuple(None if isinstance(scale, str) else scale for scale in scales)
    memory = () if cache is None else _memory(cache)
    results = _fused((q, k, v), cos, sin, rows, weights, memory, numbers, form)
    return results[0], results[1], results[2] if form.changes_v else v


def _memory(cache: KVCache | LatentCache) -> Operands:
    """Return the fields of a cache, with its slots checked if they can be read."""
    slots = cache.slots if angles.takes(cache.slots) else of_list(cache.slots)
    if slots.dtype.kind not in "iu":
        raise TypeError(f"slots must be whole numbers, got {slots.dtype}")
    if angles.is_at_hand(slots) and slots.size:
        highest = int(np.max(slots))
        for shape in (array.shape for array in arrays_of(cache)):
            has_blocks = len(shape) == (3 if isinstance(cache, LatentCache) else 4)
            check_slots(highest, shape, shape[1] if has_blocks else None)
    numbers = slots if slots.dtype.itemsize == 8 else slots.astype(np.int32)
    return tuple({**vars(cache), "slots": numbers}.values())


def _numbers(array: object) -> np.ndarray | None:
    """Return the numbers of a scale, if they can be read without waiting for a device."""
    is_here = not angles.takes(array) or angles.is_at_hand(array)
    return np.asarray(array) if is_here else None


@partial(jax.jit, static_argnames="form")
def _fused(
    xs: Operands, cos: Array, sin: Array, rows: Array | None, weights: Operands,
    memory: Operands, scales: Operands, form: Form,
) -> tuple[Result, Result, Result]:  # fmt: skip
    """Check shapes and dtypes and compute the geometry, once for each form that JAX traces."""
    check_operands([x for x in xs if x is not None], cos, sin, None)
    norm = cache = None
    if form.eps is not None:
        norm = Norm(weights[0], weights[1], form.eps, weights[2], form.add_one)
    if form.cache is not None:
        cache = form.cache(*memory)
    words = zip(form.words, scales, strict=True)
    asked = [number if word is None else word for word, number in words]
    stages = Stages(norm, cache, form.dtype, (asked[0], asked[1], asked[2]))
    fitted = fit(xs, cos, rows, form.options, stages)
    ys: list[Array] = []
    for x, name, geometry in zip(xs, "qk", fitted.geometries, strict=False):
        wide = normed(LIBRARY, x, name, norm, fitted.head_axis)
        ys += turned((wide,), cos, sin, rows, geometry, xs[0].dtype.itemsize <= 2)
    of_v = xs[2] if form.changes_v else None
    done = finished(LIBRARY, of_v, ys, dtype_name(xs[0].dtype), fitted, stages, written)
    return done[0], done[1], done[2]


def written(k: Array, v: Array | None, cache: Cache, fitted: Fit) -> Sequence[Result]:
    """Return the caches with k and v in their slots; (cache, scales) if scales are computed."""
    results: list[Result] = []
    slots = cache.slots.reshape(-1)
    for write in cache_writes(LIBRARY, k, v, cache.slots, cache, fitted):
        first, *inside = slot_indices(write, slots, None)
        # JAX counts a negative index from the end, and drops one beyond the end
        where = (jnp.where(slots < 0, write.cache.shape[0], first), *inside)
        values, scales = stored(LIBRARY, write)
        new = jnp.asarray(write.cache).at[where].set(values, mode="drop")
        if scales is None:
            results.append(new)
        else:
            results.append((new, jnp.asarray(write.scale).at[where].set(scales, mode="drop")))
    return results
