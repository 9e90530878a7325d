"""Repeats a fused call on CPU tensors of known shapes, by the compiled loops.

Computing how eight tensors fit together takes 70 us, the rotation of one token 2 us.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpu import fused_jobs as jobs
from ..cpu.fused_calls import Call, PreparedPiece, pieces_of
from ..stages import LatentCache, fit
from .checks import check_memory, check_no_inference, check_operands
from .fused_cpu import ACCESS
from .fused_kind import ABSENT, Kind, operands_of
from .private import increment_version
from .ready import Run, Tables, data_ptr, maker_of_outputs, remember
from .state import FLOATS, has_memory, is_on_gpu, wants_grad


def code_of(
    kind: Kind, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> Run | None:
    """Return code that runs the compiled loops on operands of these forms; None if they cannot.

    Raises ValueError for shapes that do not fit. `is_watched` must be False.
    """
    operands = [None if place == ABSENT else xs[place] for place in kind.places]
    if not _can_run(kind, xs, operands, tables, out):
        return None
    q, k, v, stages = operands_of(kind, xs)
    cache = stages.cache
    if v is not None and cache is None and out is not None:
        return None  # v is returned unchanged, so no output may lie in it
    cos, sin, *rows = tables
    check_operands([x for x in (q, k, v) if x is not None], cos, sin, None)
    row_numbers = rows[0] if rows else None
    fitted = fit((q, k, v), cos, row_numbers, kind.options, stages)
    if cache is not None and fitted.place < len(fitted.tokens) - 1:
        return None  # the slots are put in the order of q
    rotated = (q,) if k is None or cache is not None else (q, k)
    new = [maker_of_outputs(x, sum([y.nbytes for y in rotated])) for x in rotated]
    outs = tuple(out) if out is not None else tuple([maker() for maker in new])
    if [(y.shape, y.dtype) for y in outs] != [(x.shape, x.dtype) for x in rotated]:
        return None
    written = [*(out or ()), *[x for x in operands[3:5] if x is not None]]
    if len({y.is_inference() for y in written}) > 1:
        return None
    check_no_inference(written)
    call = Call(ACCESS, cos, sin, row_numbers, fitted, stages.norm)
    pieces = pieces_of(call, (q, k, v), outs, cache)
    if pieces is None:
        return None
    table, row_form, _ = call.table()
    plan = jobs.call_of(tuple([piece for piece, *_ in pieces]), table, row_form, kind.eps)
    if plan is None:
        return None
    places = _places(kind, pieces, (*xs, *outs), len(rotated))
    is_in_place = [piece.is_in_place for piece, *_ in pieces]
    return _run_of(plan, places, is_in_place, kind.places, new, written)


def _can_run(
    kind: Kind, xs: Sequence[Tensor], operands: Sequence[Tensor | None], tables: Tables,
    out: Sequence[Tensor] | None,
) -> bool:  # fmt: skip
    """Return whether the loops can take operands of these dtypes, devices and strides.

    `operands` are in the order of `kind.places`, None where the call has none.
    """
    every = *xs, *tables
    if kind.dtype is not None or any([scale != 1 for scale in kind.scales]):
        return False
    if not all(map(has_memory, (*every, *(out or ())))) or any(map(is_on_gpu, every)):
        return False
    if wants_grad(*every, *(out or ())) or len(set(map(id, every))) < len(every):
        return False
    *_, slots, wq, wk, wv, _, _, _ = operands
    cos, sin, *rows = tables
    if cos.dtype != torch.float32 or cos.stride() != sin.stride():
        return False
    if wv is not None if kind.cache is None else slots is None:
        return False
    weights = [w for w in (wq, wk, wv) if w is not None]
    numbers = [*rows, *([] if slots is None else [slots])]
    if not all([w.dtype in FLOATS and w.is_contiguous() for w in weights]):
        return False
    return all([x.dtype == torch.int64 and x.is_contiguous() for x in numbers])


class Place(NamedTuple):
    """Where a piece finds its memory: indices in (*xs, *outs, 0), and bytes from the output on.

    An operand that the piece does not have has the index `ABSENT`, that of the 0.
    """

    x: int
    out: int
    weight: int
    slots: int
    offset: int


def _places(
    kind: Kind, pieces: Sequence[PreparedPiece], tensors: Sequence[Tensor], count: int
) -> list[Place]:
    """Return where each piece finds its memory; `tensors` are (*xs, *outs), of `count` outputs."""
    spots = kind.places
    sources, targets = spots[:count], [*range(len(tensors) - count, len(tensors))]
    if kind.cache is not None:
        sources = spots[:3]
        targets += [spots[3], spots[3 if kind.cache is LatentCache else 4]]
    places = []
    for index, (piece, lies, _) in enumerate(pieces):
        weight = ABSENT if piece.weight is None else spots[6 + index]
        slots = ABSENT if piece.slots is None else spots[5]
        offset = lies.out - tensors[targets[index]].data_ptr()
        places.append(Place(sources[index], targets[index], weight, slots, offset))
    return places


def _run_of(
    plan: jobs.Call, places: Sequence[Place], is_in_place: list[bool],
    places_of: Sequence[int], new: Sequence[Callable[[], Tensor]], written: Sequence[Tensor],
) -> Run:  # fmt: skip
    """Return code that runs a plan on tensors of the forms that it was made for."""
    is_checked, is_tracked = bool(written), bool(written) and not written[0].is_inference()
    read_count = sum([spot != ABSENT for spot in places_of[:3]])
    # slots and weights; the operands of `check_memory` begin with those that may be in place
    others = [spot for spot in places_of[5:] if spot != ABSENT]
    cache_spots = [spot for spot in places_of[3:5] if spot != ABSENT]
    checked_spacings: set[tuple[int, ...]] = set()

    def run(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        outs = tuple([maker() for maker in new]) if out is None else tuple(out)
        at = [*map(data_ptr, xs), *map(data_ptr, outs), 0]
        cos, sin, rows = (*map(data_ptr, tables), 0)[:3]
        addresses = [(at[x], at[y] + offset, at[w], at[s]) for x, y, w, s, offset in places]
        if is_checked and [x == y for x, y, *_ in addresses] != is_in_place:
            return None
        if not jobs.run(plan, addresses, (cos, sin, rows), is_checked):
            if not is_checked:
                return None
            # q, k, v may be slices of one buffer: their address ranges overlap, their bytes do not
            spacing = tuple([address - at[0] for address in (*at, cos, sin, rows)])
            if spacing not in checked_spacings:
                caches = [xs[spot] for spot in cache_spots]
                read = *xs[:read_count], *[xs[spot] for spot in others], *tables
                check_memory(read, out or ())
                check_memory((*read, *(out or ())), caches, in_place=False)
                remember(checked_spacings, spacing)
            if not jobs.run(plan, addresses, (cos, sin, rows), False):
                return None
        if is_tracked:
            increment_version((*(out or ()), *[xs[spot] for spot in cache_spots]))
        return outs

    return run
