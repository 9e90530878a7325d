"""`rotary.fused` for torch: the formula of `kernels/numpy_fused.py` in torch's own operators.

It has gradients, and runs on every device and under torch.compile. For plain tensors there is
faster code: on the host, without a cast, the compiled loops of `fused_cpu.py`, which have gradients
too; on a GPU one launch, `fused_gpu.py`, without gradients.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import Operand
from ..fused_steps import (
    Cache,
    Library,
    Write,
    cache_writes,
    finished,
    normed,
    slot_indices,
    stored,
)
from ..geometry import Options
from ..stages import (
    LARGEST,
    Fit,
    Norm,
    Stages,
    arrays_of,
    changes_v,
    check_arrays,
    check_scales,
    fit,
    read_by,
    written_to,
)
from . import fused_ready as ready
from .angles import takes
from .checks import (
    check_operands,
    check_outputs,
    check_rows,
    check_separate,
    check_writable,
    slots_of,
)
from .launch import check_row_range, empty_like, formula, is_for_gpu, mark_written
from .state import (
    FLOATS,
    are_plain,
    as_tensor,
    host_values,
    is_in_vmap,
    is_on_gpu,
    is_recording,
    is_watched,
    wants_grad,
)

loops: ModuleType | None
try:
    from ..cpu import fused_calls as calls
    from . import fused_cpu as loops
except ImportError:  # without Numba: the formula computes everything
    loops = None

Result = Tensor | tuple[Tensor, Tensor] | None
_DTYPES = {name: getattr(torch, name) for name in LARGEST}


def fused(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: object,
    options: Options,
    stages: Stages,
    out: Sequence[Tensor] | None,
) -> tuple[Result, Result, Result]:
    """Return q, k, v after all steps; None for one not passed, or written to the cache.

    Arguments and errors are those of `rotary.fused`.
    """
    written = ready.quick(q, k, v, (cos, sin), positions, options, stages, out)
    if written is not None:
        return written
    check_arrays("torch tensors", takes, stages, out)
    check_scales(stages, (q, k, v), _numbers)
    norm, cache = stages.norm, stages.cache
    xs = [x for x in (q, k, v) if x is not None]
    weights = [] if norm is None else [w for w in (norm.q, norm.k, norm.v) if w is not None]
    check_operands(xs, cos, sin, None)
    rows = None if positions is None else check_rows(positions, q)
    fitted = fit((q, k, v), cos, rows, options, stages)
    operands = [*xs, *weights, cos, sin, *([] if rows is None else [rows])]
    scales = [*stages.scales, getattr(cache, "k_scale", 1.0), getattr(cache, "v_scale", 1.0)]
    has_grad = wants_grad(*operands, *[scale for scale in scales if isinstance(scale, Tensor)])
    if (out is not None or cache is not None) and (has_grad or wants_grad(*(out or ()))):
        raise RuntimeError(
            "out= and cache= do not take part in autograd: call fused under torch.no_grad(), or "
            "without them"
        )
    if cache is not None and is_in_vmap([*operands, *written_to(cache)]):
        raise RuntimeError(
            "cache= cannot be used inside vmap, which has no order in which to write: call fused "
            "with the batch axes of q, k, v and slots"
        )
    if is_for_loops(operands, stages, q, out):
        done = by_loops(q, k, v, cos, sin, rows, fitted, stages, out)
        if done is not None:
            return done
    if is_for_gpu(operands) and not has_grad:
        from . import fused_gpu

        done = fused_gpu.fused(q, k, v, cos, sin, rows, fitted, stages, out)
        if done is not None:
            return done
    turned = formula_of_both([q] if k is None else [q, k], norm, cos, sin, rows, fitted)
    is_changed = changes_v(stages) or cache is not None
    of_v = v if is_changed else None
    updates: list[Update] = []

    results = finished(
        LIBRARY, of_v, turned, FLOATS[q.dtype], fitted, stages,
        lambda *given: updates.extend(into_cache(*given)),  # Dynamo of torch 2.8 takes no `| None`
    )  # fmt: skip
    results = _written(results, updates, [*xs, cos, sin, rows, *read_by(stages)], cache, out)
    return results[0], results[1], results[2] if is_changed else v


def is_for_loops(
    operands: Sequence[Tensor], stages: Stages, q: Tensor, out: Sequence[Tensor] | None
) -> bool:
    """Whether to try the compiled loops: plain tensors on the host, and no cast."""
    if loops is None or is_watched() or (changes_v(stages) and stages.cache is None):
        return False
    tensors = [*operands, *(out or ()), *arrays_of(stages.cache)]
    return calls.casts_nothing(stages, FLOATS[q.dtype]) and are_plain(tensors) and not is_on_gpu(q)


def by_loops(
    q: Tensor, k: Tensor | None, v: Tensor | None, cos: Tensor, sin: Tensor, rows: Tensor | None,
    fitted: Fit, stages: Stages, out: Sequence[Tensor] | None,
) -> tuple[Result, Result, Result] | None:  # fmt: skip
    """Compute `fused` by the compiled loops; None, with nothing written, if they cannot."""
    assert loops is not None  # `is_for_loops` has checked it
    norm, cache = stages.norm, stages.cache
    if cos.dtype != torch.float32 or cos.stride() != sin.stride() or wants_grad(cos, sin):
        return None
    if rows is not None:
        check_row_range(rows, cos)
    indices = None if rows is None else rows.contiguous()
    call = calls.Call(loops.ACCESS, cos, sin, indices, fitted, norm)
    xs = [q] if k is None or cache is not None else [q, k]
    weights = [None if norm is None else getattr(norm, name) for name in "qk"[: len(xs)]]
    if norm is not None and wants_grad(*xs, *[w for w in weights if w is not None]):
        ys = loops.Differentiable.apply(call, formula_of_both, *xs, *weights)
        return ys[0], None if k is None else ys[1], v
    if wants_grad(*xs):
        return None
    read = [x for x in (q, k, v, cos, sin, rows, *read_by(stages)) if isinstance(x, Tensor)]
    if out is not None:
        check_outputs(xs, read, out)
    outs = [empty_like(x) for x in xs] if out is None else list(out)
    if cache is None:
        if not calls.rotated(call, xs, outs):
            return None
        mark_written(out or ())
        return outs[0], None if k is None else outs[1], v
    memory = arrays_of(cache)
    slots = slots_of(cache.slots, q).long().contiguous()
    check_separate([*read, *(out or ())], memory, in_place=False)
    assert k is not None  # `fit` has checked it
    if not calls.stored(call, q, k, v, outs[0], replace(cache, slots=slots)):
        return None
    mark_written([*memory, *(out or ())])
    return outs[0], None, None


def formula_of_both(
    xs: Sequence[Tensor], norm: Norm | None, cos: Tensor, sin: Tensor, rows: Tensor | None,
    fitted: Fit,
) -> list[Tensor]:  # fmt: skip
    """Return q and k normalized and rotated, not yet rounded."""
    return [
        formula((normed(LIBRARY, x, name, norm, fitted.head_axis),), cos, sin, rows, geometry)[0]
        for x, name, geometry in zip(xs, "qk", fitted.geometries, strict=False)
    ]


LIBRARY = Library(
    torch,
    convert=lambda x, kind: x.to(_DTYPES[kind]),
    as_like=lambda numbers, y: as_tensor("scale", numbers, y, y.dtype),
    over_root=lambda x, y: x * torch.rsqrt(y),
)


def _numbers(scale: object) -> Operand | None:
    """Return the numbers of a scale, if they can be read without waiting for a device."""
    if isinstance(scale, Tensor):
        return host_values(scale)
    return None if is_recording() else np.asarray(scale)


class Update(NamedTuple):
    """New values for the slots of a cache, and their scales if these are written too.

    If no token has a slot, `where` is the first slot, which keeps what it holds.
    """

    to: Write
    where: tuple[Tensor, ...]
    has_slots: Tensor
    values: Tensor
    scales: Tensor | None


def into_cache(k: Tensor, v: Tensor | None, cache: Cache, fitted: Fit) -> list[Update]:
    """Return the updates that write k and v of each token to its slot, if it is not negative.

    A token without a slot repeats the last that has one, which does not change what is written: how
    many have one is not known to a compiler, nor without a wait for a GPU.
    """
    slots = slots_of(cache.slots, k)
    made = cache_writes(LIBRARY, k, v, slots, cache, fitted)
    slots = slots.reshape(-1).long()
    numbers = host_values(slots)
    highest = int(numbers.max()) if numbers is not None and len(numbers) else None
    has_slot, tokens = slots >= 0, torch.arange(len(slots), device=slots.device)
    last = (tokens * has_slot).max() if len(slots) else 0
    tokens = torch.where(has_slot, tokens, last)
    slots = slots[tokens].clamp(min=0)
    updates = []
    for each in made:
        where = slot_indices(each, slots, highest)
        values, scales = stored(LIBRARY, each._replace(values=each.values[tokens]))
        updates.append(Update(each, where, has_slot.any(), values, scales))
    return updates


def _written(
    results: Sequence[Result], updates: Sequence[Update], operands: Sequence[object],
    cache: Cache | None, out: Sequence[Tensor] | None,
) -> list[Result]:  # fmt: skip
    """Write cache and `out`, or nothing; return the results, those of `out` if it is given."""
    tensors = [result for result in results if isinstance(result, Tensor)]
    read = [x for x in operands if isinstance(x, Tensor)]
    if out is not None:
        if any([isinstance(result, tuple) for result in results]):
            raise ValueError("out= cannot be used with computed scales: call without out=")
        check_outputs(tensors, read, out)
    if not is_watched():
        check_writable([*read, *(out or ())], written_to(cache), in_place=False)
    for to, where, has_slots, values, scales in updates:
        if scales is not None:
            _write(to.scale, where, has_slots, scales.to(to.scale.dtype))
        if to.cache.itemsize == 1:  # torch can index bytes, but not float8
            _write(to.cache.view(torch.uint8), where, has_slots, values.view(torch.uint8))
        else:
            _write(to.cache, where, has_slots, values)
    if out is None:
        return list(results)
    for y, result in zip(out, tensors, strict=True):
        y.copy_(result)
    done = iter(out)
    return [None if result is None else next(done) for result in results]


def _write(to: Tensor, where: tuple[Tensor, ...], has_slots: Tensor, values: Tensor) -> None:
    if 0 not in to.shape:  # else there is no slot to repeat
        first = to[tuple([index[:1] for index in where])]
        to[where] = torch.where(has_slots, values, first)
