"""`rotary.fused` for NumPy arrays: one pass of the compiled loops, or the formula."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .. import Numbers as Array
from .. import numpy_fused as formula
from ..geometry import Options
from ..memory import check_overlap
from ..numpy import FLOATS, block, check_operands, check_rows, name_of, of_list
from ..numpy_fused import Result
from ..stages import Stages, arrays_of, changes_v, fit
from .built_in import address
from .fused_calls import Access, Call, casts_nothing, rotated, stored


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
    """Return q, k and v after all steps, as `kernels/numpy_fused.py` computes them.

    Arguments and errors are those of `rotary.fused`. The formula takes the calls whose arrays the
    loops cannot read as they are, and raises the errors that the loops do not.
    """
    operands = q, k, v, cos, sin, positions, options, stages
    done = _by_loops(*operands, out)
    return formula.fused(*operands, out) if done is None else done


def _by_loops(
    q: Array, k: Array | None, v: Array | None, cos: Array, sin: Array, positions: object,
    options: Options, stages: Stages, out: Sequence[Array] | None,
) -> tuple[Result, Result, Result] | None:  # fmt: skip
    """Run `fused` in the compiled loops; return None and write nothing if they cannot."""
    norm, cache = stages.norm, stages.cache
    check_operands([x for x in (q, k, v) if x is not None], cos, sin, None)
    if not casts_nothing(stages, name_of(q.dtype)) or cos.dtype != np.float32:
        return None
    if cache is None and changes_v(stages):
        return None
    rotating = [q] if k is None or cache is not None else [q, k]
    outs = [np.empty(x.shape, x.dtype) for x in rotating] if out is None else list(out)
    weights = [] if norm is None else [w for w in (norm.q, norm.k, norm.v) if w is not None]
    read = [*(x for x in (q, k, v) if x is not None), cos, sin, *weights]
    written = [*outs, *(caches := arrays_of(cache))]
    if not all([type(array) is np.ndarray and array.flags.aligned for array in (*read, *written)]):
        return None
    if [(y.shape, y.dtype) for y in outs] != [(x.shape, x.dtype) for x in rotating]:
        return None
    if any([y.dtype != q.dtype for y in caches]):
        return None
    if cos.strides != sin.strides or not all([y.flags.writeable for y in written]):
        return None
    rows = None if positions is None else np.ascontiguousarray(check_rows(positions, cos))
    slots = None if cache is None else of_list(cache.slots)
    if slots is not None:
        if slots.dtype.kind not in "iu":
            return None
        slots = np.ascontiguousarray(slots, np.int64)
    read += [each for each in (rows, slots) if each is not None]
    if out is not None and not _are_apart(read, outs):
        return None
    if caches and not _are_apart([*read, *outs], caches, in_place=False):
        return None
    fitted = fit((q, k, v), cos, rows, options, stages)
    call = Call(_ACCESS, cos, sin, rows, fitted, norm)
    if cache is None:
        if not rotated(call, rotating, outs):
            return None
        return outs[0], None if k is None else outs[1], v
    cache = replace(cache, slots=slots)
    return (outs[0], None, None) if stored(call, q, k, v, outs[0], cache) else None


def _are_apart(read: Sequence[Array], written: Sequence[Array], in_place: bool = True) -> bool:
    """Return whether no written array overlaps another, as `check_overlap` says."""
    both = [[(address(x), block(x)) for x in group] for group in (read, written)]
    try:
        check_overlap(both[0], both[1], in_place)
    except ValueError:
        return False
    return True


def _weight(weight: Array) -> Array:
    kind = weight.dtype if name_of(weight.dtype) in FLOATS else np.float32
    return np.ascontiguousarray(weight, kind)


_ACCESS = Access(block, address, np.asarray, _weight)
