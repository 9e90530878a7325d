"""Repeats a fused call on CPU tensors of known shapes: `ready.py` with weights and a cache.

Computing how eight tensors fit together takes 70 us, the rotation of one token 2 us.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpu import fused_jobs as jobs
from ..cpu.fused_calls import Call, pieces_of
from ..geometry import Options
from ..stages import KVCache, LatentCache, Norm, Stages, fit
from . import ready
from .checks import check_memory, check_no_inference, check_operands
from .fused_cpu import ACCESS
from .private import increment_version
from .ready import Run, Tables, data_ptr, maker_of_outputs
from .state import FLOATS, has_memory, is_on_gpu, is_recorded_by_dynamo, wants_grad

_NOTHING = None, None, None
_SPACINGS = 64  # kept at most: distances of operands whose memory was compared byte by byte
Triple = tuple[Tensor | None, Tensor | None, Tensor | None]


class Kind(NamedTuple):
    """All that the code of a call depends on besides its tensors.

    `given` says which of q, k, v, three weights, two caches and slots the call has.
    """

    options: Options
    eps: float
    add_one: bool
    cache: type | None
    given: tuple[bool, ...]


def quick(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    tables: tuple[Tensor, Tensor],
    rows: object,
    options: Options,
    stages: Stages,
    out: Sequence[Tensor] | None,
) -> Triple | None:
    """Compute `fused.fused` by code that is kept for calls of this form; None if it cannot."""
    norm, cache, dtype, scales = stages
    weights, eps, add_one = _NOTHING, 0.0, False
    if norm is not None:
        weights, eps, add_one = (norm.q, norm.k, norm.v), norm.eps, norm.add_one
    memory: tuple[Tensor | None, Tensor | None, Tensor | None] = _NOTHING
    if type(cache) is KVCache:
        memory, scales = (cache.k, cache.v, cache.slots), (scales[0], cache.k_scale, cache.v_scale)
    elif type(cache) is LatentCache:
        memory, scales = (cache.rows, None, cache.slots), (scales[0], cache.scale, 1.0)
    if dtype is not None or is_recorded_by_dynamo():
        return None
    for scale in scales:
        if type(scale) is not float or scale != 1:
            return None
    operands = q, k, v, *weights, *memory
    kind = Kind(options, eps, add_one, type(cache), tuple([x is not None for x in operands]))
    xs = [x for x in operands if x is not None]
    read: Tables = tables
    if rows is not None:
        if not isinstance(rows, Tensor):
            return None
        read = *tables, rows
    results = ready.run((kind,), xs, read, out, _code, ready.identity)
    if results is None:
        return None
    if cache is not None:
        return results[0], None, None
    return results[0], None if k is None else results[1], v


def _code(
    kind: Kind, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> Run | None:
    """Return code that runs the compiled loops on operands of these forms; None if they cannot.

    Raises ValueError for shapes that do not fit. `is_watched` must be False.
    """
    operands = *xs, *tables
    if not all(map(has_memory, (*operands, *(out or ())))) or any(map(is_on_gpu, operands)):
        return None
    if wants_grad(*operands, *(out or ())) or len(set(map(id, operands))) < len(operands):
        return None
    found = iter(range(len(xs)))
    spots = [next(found) if is_given else None for is_given in kind.given]
    q, k, v, wq, wk, wv, *memory = (None if at is None else xs[at] for at in spots)
    cos, sin, *rows = tables
    weights = [w for w in (wq, wk, wv) if w is not None]
    whole = [x for x in (memory[2], *rows) if x is not None]
    if not all([w.dtype in FLOATS and w.is_contiguous() for w in weights]):
        return None
    if not all([x.dtype == torch.int64 and x.is_contiguous() for x in whole]):
        return None
    if q is None or cos.dtype != torch.float32 or cos.stride() != sin.stride():
        return None
    cache: KVCache | LatentCache | None = None
    if kind.cache is KVCache:
        cache = KVCache(*memory)
    elif kind.cache is LatentCache:
        cache = LatentCache(memory[0], memory[2])
    if (wv is not None and cache is None) or (cache is not None and None in (spots[1], spots[8])):
        return None
    if v is not None and memory[1] is None and kind.cache is KVCache:
        return None
    check_operands([x for x in (q, k, v) if x is not None], cos, sin, None)
    norm = Norm(wq, wk, kind.eps, wv, kind.add_one) if weights else None
    shapes = [None if x is None else tuple(x.shape) for x in (q, k, v)]
    row_shape = tuple(rows[0].shape) if rows else None
    fitted = fit(shapes, tuple(cos.shape), row_shape, kind.options, Stages(norm, cache))
    rotated = (q,) if k is None or cache is not None else (q, k)
    new = [maker_of_outputs(x, sum([y.nbytes for y in rotated])) for x in rotated]
    outs = tuple(out) if out is not None else tuple([maker() for maker in new])
    alike = [(x.shape, x.dtype) for x in rotated]
    written = [*(out or ()), *[x for x in memory[:2] if x is not None]]
    if [(y.shape, y.dtype) for y in outs] != alike or len({y.is_inference() for y in written}) > 1:
        return None
    check_no_inference(written)
    is_tracked = bool(written) and not written[0].is_inference()
    call = Call(ACCESS, cos, sin, rows[0] if rows else None, fitted, norm)
    pieces = pieces_of(call, (q, k, v), outs, cache)
    if pieces is None:
        return None
    table, row_form, _ = call.table()
    plan = jobs.call_of(tuple([piece for piece, *_ in pieces]), table, row_form, kind.eps)
    if plan is None:
        return None
    # for each piece: the indices of x, out, weight and slots in (*xs, *outs, 0), and the byte
    # offset in out
    first, last = len(xs), len(xs) + len(outs)
    sources = spots[:3] if cache is not None else spots[: len(rotated)]
    targets: list[int | None] = list(range(first, last))
    targets += [spots[6], spots[6 if kind.cache is LatentCache else 7]] if cache is not None else []
    places = []
    for index, (piece, lies, _) in enumerate(pieces):
        target = targets[index]
        assert target is not None
        begin = (*xs, *outs)[target].data_ptr()
        weight = spots[3 + index] if piece.weight is not None else None
        slots = spots[8] if piece.slots is not None else None
        at = [sources[index], target, weight, slots]
        places.append(([last if each is None else each for each in at], lies.out - begin))
    is_in_place = [piece.is_in_place for piece, *_ in pieces]
    is_checked, absent = bool(written), (0,) * (3 - len(tables))
    read_count = sum([x is not None for x in (q, k, v)])
    checked_spacings: set[tuple[int, ...]] = set()

    def code(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        outs = tuple([maker() for maker in new]) if out is None else tuple(out)
        at = [*map(data_ptr, xs), *map(data_ptr, outs), 0]
        cos, sin, rows = *map(data_ptr, tables), *absent
        memories = [(at[x], at[y] + offset, at[w], at[s]) for (x, y, w, s), offset in places]
        if is_checked and [x == y for x, y, *_ in memories] != is_in_place:
            return None
        if not jobs.run(plan, memories, (cos, sin, rows), is_checked):
            if not is_checked:
                return None
            # q, k, v may be slices of one buffer: their address ranges overlap, their bytes do not
            spacing = tuple([address - at[0] for address in (*at, cos, sin, rows)])
            if spacing not in checked_spacings:
                caches = [xs[spot] for spot in spots[6:8] if spot is not None]
                read = *xs[:read_count], *tables[:2]
                check_memory(read, out or ())
                check_memory((*tables[:2], *read, *(out or ())), caches)
                if len(checked_spacings) >= _SPACINGS:
                    checked_spacings.clear()
                checked_spacings.add(spacing)
            if not jobs.run(plan, memories, (cos, sin, rows), False):
                return None
        if is_tracked:
            caches = [xs[spot] for spot in spots[6:8] if spot is not None]
            increment_version((*(out or ()), *caches))
        return outs

    return code
