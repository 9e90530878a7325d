"""Repeats a fused call on tensors of known shapes: `ready.py` with weights and a cache."""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor, float32, view_as_real

from .. import Operand
from ..geometry import Options
from ..stages import TOKEN, KVCache, LatentCache, Norm, Stages, changes_v
from . import fused_ready_gpu as on_gpu
from . import ready
from .fused_kind import ABSENT, Kind
from .gpu import Views, halves_of
from .ready import Run, Tables
from .state import is_on_gpu, is_recorded_by_dynamo

code_on_cpu: Callable[..., Run | None] | None
try:
    from .fused_ready_cpu import code_of as code_on_cpu
except ImportError:  # without Numba
    code_on_cpu = None

_NOTHING, _ONES = (None, None, None), (1.0, 1.0, 1.0)
_SHARED = 6  # the place of the first operand that is only read, so that one may serve two
_WRITTEN = 2  # axes of scales, one for each token and head, that a call writes
Result = Tensor | tuple[Tensor, Tensor] | None


def quick(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    tables: tuple[Tensor, Tensor],
    rows: object,
    options: Options,
    stages: Stages,
    out: Sequence[Tensor] | None,
) -> tuple[Result, Result, Result] | None:
    """Compute `fused.fused` by code that is cached for calls of this form; None if it cannot."""
    norm, cache, dtype, scales = stages
    weights, eps, add_one = _NOTHING, 0.0, False
    if norm is not None:
        weights, eps, add_one = (norm.q, norm.k, norm.v), norm.eps, norm.add_one
    memory: tuple[Tensor | None, Tensor | None, Tensor | None] = _NOTHING
    if type(cache) is KVCache:
        memory, scales = (cache.k, cache.v, cache.slots), (scales[0], cache.k_scale, cache.v_scale)
    elif type(cache) is LatentCache:
        if type(cache.scale) is not float:
            return None
        memory, scales = (cache.rows, None, cache.slots), (scales[0], cache.scale, 1.0)
    if is_recorded_by_dynamo():
        return None
    in_memory: tuple[Tensor | None, ...] = _NOTHING
    is_plain = type(scales[0]) is type(scales[1]) is type(scales[2]) is float
    if not (is_plain and scales == _ONES):
        parted = _parted(scales, (q, k, v if cache is None else memory[1]))
        if parted is None:
            return None
        scales, in_memory = parted
    every = (q, k, v, *memory, *weights, *in_memory)
    xs, places = _present(every)
    kind_of_cache = None if cache is None else type(cache)
    kind = Kind(options, eps, add_one, dtype, scales, kind_of_cache, places)
    read: Tables = tables
    if rows is not None:
        if not isinstance(rows, Tensor):
            return None
        read = *tables, rows
    results = ready.run((kind,), xs, read, out, _code, ready.identity)
    if results is None:
        return None
    returned = iter(results)

    def taken(scale: object) -> Result:
        y = next(returned)
        return (y, next(returned)) if scale == TOKEN else y

    of_q = taken(scales[0])
    if cache is not None:
        return of_q, None, None
    of_k = None if k is None else taken(scales[1])
    return of_q, of_k, taken(scales[2]) if v is not None and changes_v(stages) else v


def by_views(
    xs: Sequence[Tensor],
    norm: Norm,
    tables: Tables,
    views: Views,
    form: tuple[Hashable, ...],
) -> tuple[Tensor, ...] | None:
    """Normalize and rotate q, or q and k, on a GPU, by parts of tables as in `gpu.by_views`."""
    if not is_on_gpu(xs[0]) or is_recorded_by_dynamo():
        return None
    q, k = (*xs, None)[:2]
    operands, places = _present((q, k, None, *_NOTHING, norm.q, norm.k, norm.v, *_NOTHING))
    caller_options = norm.eps, norm.add_one, places, views, form
    return ready.run(caller_options, operands, tables, None, _code_by_views, _NormByViews)


class _NormByViews(NamedTuple):
    """All that such a call depends on besides its tensors; `places` as of a `Kind`."""

    eps: float
    add_one: bool
    places: tuple[int, ...]
    views: Views
    form: tuple[Hashable, ...]


def _code_by_views(
    kind: _NormByViews,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor] | None,
) -> Run | None:
    found = halves_of(xs, tables, kind.views, kind.form)
    if found is None or found[2].conjugate:
        return None
    cos, sin, options = found
    of_call = Kind(options, kind.eps, kind.add_one, None, _ONES, None, kind.places)
    real = tuple([view_as_real(x) if x.is_complex() else x for x in tables])  # the same memory
    return on_gpu.code_of(of_call, xs, real, None, (cos, sin))


def _parted(
    scales: tuple[object, ...], scaled: tuple[object, ...]
) -> tuple[tuple[Operand, Operand, Operand], tuple[Tensor | None, ...]] | None:
    """Return scales that are no tensors, and those that are; None if the kernel takes another."""
    fixed: list[float | str | None] = []
    in_memory: list[Tensor | None] = []
    for x, scale in zip(scaled, scales, strict=True):
        if isinstance(scale, Tensor) and x is not None:
            if scale.ndim < _WRITTEN and scale.dtype != float32:
                return None  # the kernel would get a copy
            fixed.append(None)
            in_memory.append(scale)
        elif x is None or type(scale) in (float, int, str):
            fixed.append(1.0 if x is None else scale)  # type: ignore[arg-type]  # one of these types
            in_memory.append(None)
        else:
            return None
    of_q, of_k, of_v = fixed
    return (of_q, of_k, of_v), tuple(in_memory)


def _present(every: tuple[Tensor | None, ...]) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return the operands that a call has, and the `Kind.places` of all.

    Guards take no tensor twice, so one that is only read has one place for all its uses.
    """
    xs = [x for x in every if x is not None]
    if len({*map(id, xs)}) == len(xs):
        return xs, _places(tuple([x is None for x in every]))
    xs, places, shared = [], [], dict[int, int]()
    for index, x in enumerate(every):
        if x is None:
            places.append(ABSENT)
            continue
        place = len(xs) if index < _SHARED else shared.setdefault(id(x), len(xs))
        if place == len(xs):
            xs.append(x)
        places.append(place)
    return xs, tuple(places)


@functools.lru_cache
def _places(are_absent: tuple[bool, ...]) -> tuple[int, ...]:
    numbers = itertools.count()
    return tuple([ABSENT if is_absent else next(numbers) for is_absent in are_absent])


def _code(
    kind: Kind, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> Run | None:
    """Return code for operands of these forms; None if there is none.

    Raises ValueError for shapes that do not fit. `is_watched` must be False.
    """
    if is_on_gpu(xs[0]):
        return on_gpu.code_of(kind, xs, tables, out)
    return None if code_on_cpu is None else code_on_cpu(kind, xs, tables, out)
