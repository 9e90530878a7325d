"""Repeats a fused call on a GPU with known shapes, by a compiled launch that only needs addresses.

Planning such a launch, and having Triton examine its 70 arguments, takes 300 us of the host.
"""

from collections.abc import Sequence

from torch import Tensor

from ..memory import extent
from ..stages import check_scales, fit, written_to
from ..triton.plan import ALIGNED
from .checks import check_memory, check_no_inference, check_operands, check_rows, check_xs
from .fused_kind import Kind, operands_of
from .gpu import Addresses, range_check
from .launch import form, is_for_gpu
from .private import increment_version
from .ready import Run, Tables, data_ptr, maker_of_outputs, remember
from .state import wants_grad


def code_of(
    kind: Kind,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor] | None,
    halves: tuple[Tensor, Tensor] | None = None,
) -> Run | None:
    """Return code, compiled and loaded, for tensors of these forms; None if there can be none.

    halves  cos and sin as parts of `tables`, perhaps in 16 bits; None if `tables` are cos and sin

    Raises ValueError for shapes that do not fit.
    """
    read = *xs, *tables
    every = *read, *(out or ())
    if not is_for_gpu(every) or wants_grad(*every):
        return None
    if len({x.data_ptr() for x in read}) < len(read):
        return None  # views of one tensor: an address does not tell them apart
    q, k, v, stages = operands_of(kind, xs)
    caches = written_to(stages.cache)
    check_scales(stages, (q, k, v), lambda scale: None)  # those in tensors are on the device
    given = [x for x in (q, k, v) if x is not None]
    if halves is None:
        cos, sin, *rows = tables
        check_operands(given, cos, sin, None)
    else:
        (cos, sin), rows = halves, []
        check_xs(given, None)
    row_numbers = check_rows(rows[0], q) if rows else None
    fitted = fit((q, k, v), cos, row_numbers, kind.options, stages)
    from . import fused_gpu  # which needs Triton to import

    plan = fused_gpu.planned((q, k, v), cos, sin, rows[0] if rows else None, fitted, stages, out)
    if plan is None or plan[1] is None:
        return None
    results, planned = plan[0], plan[1]
    outs = [y for result in results if result is not None
            for y in (result if isinstance(result, tuple) else (result,))]  # fmt: skip
    if out is not None and any([x is not y for x, y in zip(out, outs, strict=True)]):
        return None  # the result would be copied into it
    written = [*(out or ()), *caches]
    check_no_inference(written)
    if len({y.is_inference() for y in written}) > 1:  # only some have a version counter
        return None
    sources = [*read, *outs]
    places = _places(planned.arguments, sources, [*caches, *tables])
    launch = None if places is None else planned.prepared()
    if places is None or launch is None:
        return None
    makers = [maker_of_outputs(y, 0) for y in outs] if out is None else []
    # first those that may be in place, then what is only read
    checked = [*given, *[x for x in read if all([x is not y for y in (*given, *caches)])]]
    are_apart = range_check(checked, written, range(len(out or ())))
    reads, writes = [[_index(x, sources) for x in each] for each in (checked, written)]
    in_place = [checked[index] is y for index, y in enumerate(out or ())]
    is_tracked = bool(written) and not written[0].is_inference()
    seen: set[Addresses] = set()
    spacings: set[Addresses] = set()

    def run(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        given = (*xs, *tables, *(out or ()))
        at = tuple(map(data_ptr, given))
        outs = tuple([make() for make in makers]) if out is None else tuple(out)
        is_known = is_seen = at in seen
        if not is_seen:
            first = at[0]
            spacing = (first & ALIGNED, *[address - first for address in at])
            is_known = spacing in spacings
        if not is_known:
            sources, targets = [at[index] for index in reads], [at[index] for index in writes]
            if [sources[index] == targets[index] for index in range(len(in_place))] != in_place:
                return None
            if not are_apart(sources, targets):
                _check_memory(given, reads, writes, len(in_place))
        every = at if out is not None else at + tuple(map(data_ptr, outs))
        if not launch(tuple([every[index] + offset for index, offset in places]), is_known):
            return None
        if not is_seen:
            remember(seen, at)
            remember(spacings, spacing)
        if is_tracked:
            increment_version([given[index] for index in writes])
        return outs

    return run


def _index(x: Tensor, tensors: Sequence[Tensor]) -> int:
    return next(index for index, y in enumerate(tensors) if y is x)


def _check_memory(
    given: Sequence[Tensor], reads: Sequence[int], writes: Sequence[int], count: int
) -> None:
    """Refuse outputs, the first `count` of what is written, and caches that overlap, by bytes."""
    read, written = [[given[index] for index in each] for each in (reads, writes)]
    out, caches = written[:count], written[count:]
    check_memory(read, out)
    check_memory((*read, *out), caches, in_place=False)


def _places(
    arguments: Sequence[object], sources: Sequence[Tensor], parted: Sequence[Tensor]
) -> list[tuple[int, int]] | None:
    """Return which of `sources` each tensor of `arguments` is, and how many bytes into it.

    Only a part of those in `parted` begins within it. None if a tensor is a copy, or it is not
    clear which.
    """
    by_address: dict[int, int] = {}
    for index, x in enumerate(sources):
        same = by_address.setdefault(x.data_ptr(), index)
        if sources[same] is not x:
            return None
    places = []
    for x in [x for x in arguments if isinstance(x, Tensor)]:
        found = by_address.get(x.data_ptr())
        if found is not None:
            places.append((found, 0))
            continue
        owners = [y for y in parted
                  if y.data_ptr() < x.data_ptr() < y.data_ptr() + extent(form(y))[1]]  # fmt: skip
        if not owners:
            return None
        start = owners[0].data_ptr()
        places.append((by_address[start], x.data_ptr() - start))
    return places
