"""Repeats a call whose arguments have the shapes, types and strides of an earlier one.

For one token, computing how the tensors fit together takes several times as long as the rotation.
So the result is cached behind a guard: the check, in C++, that `torch.compile` makes before it runs
a compiled function. A guard compares the type, dtype, device, shape, strides and requires_grad of
each operand, and the dispatcher's state: vmap, grad, dispatch modes, jit.trace.

A guard does not see make_fx, forward mode, grad mode, row numbers and shared memory, and takes an
inference tensor for an ordinary one inside of inference mode: these are checked here. Nor does it
see torch.compile, which the caller rules out. A nested tensor would end the process inside a guard,
so calls with one never reach it.

After a matrix product as wide as a model, none of this code is in the processor's caches, so the
time depends on how much code and memory a call uses. What the guard has checked is not checked
again.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import is_not
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import CallerOptions
from ..geometry import AngleOptions, Options
from .checks import check_memory, check_no_inference
from .launch import form, jobs, on_huge_pages
from .pages import LARGE
from .private import (
    TensorGuards,
    empty_strided,
    empty_strided_on_cuda,
    increment_version,
    is_past_guards,
)
from .state import has_memory, is_on_gpu, is_recorded_by_dynamo, is_watched, wants_grad

Tables = tuple[Tensor, ...]  # cos and sin, perhaps row numbers; or only positions
# the code of a call: returns its results, or None if it cannot take these operands after all
Run = Callable[[Sequence[Tensor], Tables, Sequence[Tensor] | None], tuple[Tensor, ...] | None]
Prepared = Callable[[Sequence[Tensor], Tables, Sequence[Tensor] | None], tuple[Tensor, ...]]
Kind = TypeVar("Kind", bound=Hashable)
_FORMS, _KINDS = 8, 256  # cached at most: forms of operands for each key of `recent`, and keys
_COMPARED = 256  # addresses, and distances of addresses, that `remember` keeps at most
data_ptr: Callable[[Tensor], int] = Tensor.data_ptr
_is_nested: Callable[[Tensor], bool] = Tensor.is_nested.__get__  # type: ignore[attr-defined]


class Mode(NamedTuple):
    """A mode of torch and whether code is for it."""

    is_on: Callable[[], bool]
    wanted: bool


class Ready(NamedTuple):
    """The code for operands that pass the check of a guard."""

    check: Callable[..., bool]
    mode: Mode | None  # inference mode, or grad mode if an operand requires a gradient
    run: Run


recent: dict[tuple[object, ...], tuple[Ready, ...]] = {}


def run(
    caller_options: CallerOptions,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor] | None,
    make: Callable[[Kind, Sequence[Tensor], Tables, Sequence[Tensor] | None], Run | None],
    kind_of: Callable[..., Kind],
) -> tuple[Tensor, ...] | None:
    """Run the cached code for calls of this form; make and cache it if there is none.

    make     makes the code for a kind and these tensors; None if there can be none
    kind_of  kind_of(*caller_options) is all that the code depends on besides the tensors
    Returns the results, or None if the call has to be done in another way.
    """
    not_in_place = None
    operands = (*xs, *tables)
    if out is not None:  # no tensor twice: the guards would refuse it
        not_in_place = tuple(map(is_not, xs, out))
        if True in not_in_place:
            operands = (*operands, *itertools.compress(out, not_in_place))
    try:
        if is_past_guards():
            return None
        for operand in operands:  # faster than `map`
            if operand.is_nested is not False:  # of a proxy of torch.fx it is another proxy
                return None
        key = caller_options, len(xs), len(tables), not_in_place, xs[0].numel()
        codes = recent.get(key, ())
    except (AttributeError, TypeError):  # an operand is no tensor, or an option has no hash
        return None
    for check, mode, cached in codes:
        if check(*operands) and (mode is None or mode.is_on() is mode.wanted):
            results = cached(xs, tables, out)
            if results is not None:
                return results
    if is_watched():
        return None
    code = make(kind_of(*caller_options), xs, tables, out)
    results = None if code is None else code(xs, tables, out)
    if code is not None and results is not None and TensorGuards is not None:
        if key not in recent and len(recent) >= _KINDS:
            oldest, *_ = recent  # in one step: another thread may add to it
            recent.pop(oldest, None)
        recent[key] = (ready_for(operands, code), *recent.get(key, ())[: _FORMS - 1])
    return results


def identity(kind: Kind) -> Kind:
    """Return `kind`: the `kind_of` of a call whose only option is its kind."""
    return kind


def prepared(
    code: Run,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor] | None,
    fallback: Prepared,
) -> Prepared | None:
    """Return `code` behind a guard of these tensors, `fallback` for others; None without guards."""
    if TensorGuards is None:
        return None
    width, is_into = len(xs), out is not None
    not_in_place = tuple(map(is_not, xs, out or ()))
    has_outputs = any(not_in_place)
    operands = (*xs, *tables, *itertools.compress(out or (), not_in_place))
    count, (check, mode, code) = len(operands), ready_for(operands, code)

    def run(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...]:
        operands = (*xs, *tables)
        if out is None:
            is_alike = not is_into
        elif has_outputs:
            is_alike = tuple(map(is_not, xs, out)) == not_in_place
            operands = (*operands, *itertools.compress(out, not_in_place))
        else:
            is_alike = is_into and len(out) == width and out[0] is xs[0] and out[-1] is xs[-1]
        try:
            if (
                is_alike
                and len(operands) == count
                and not is_recorded_by_dynamo()
                and not is_past_guards()
                and True not in map(_is_nested, operands)
                and check(*operands)
                and (mode is None or mode.is_on() is mode.wanted)
            ):
                results = code(xs, tables, out)
                if results is not None:
                    return results
        except TypeError:  # an operand is not a tensor
            pass
        return fallback(xs, tables, out)

    return run


def ready_for(operands: Sequence[Tensor], code: Run) -> Ready:
    """Return the code with a guard for operands like these, all of them different tensors."""
    guard = TensorGuards(
        *operands,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in operands],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in operands],
    )
    mode = None
    if torch.is_inference_mode_enabled():  # to a guard, its tensors are like others inside of it
        mode = Mode(torch.is_inference_mode_enabled, True)
    elif any([tensor.requires_grad for tensor in operands]):
        mode = Mode(torch.is_grad_enabled, torch.is_grad_enabled())
    return Ready(guard.check, mode, code)


def maker_of_outputs(x: Tensor, size: int) -> Callable[[], Tensor]:
    """Return a maker of empty tensors like x, on huge pages if `size`, in bytes, is large."""
    like = torch.empty_like(x, device="meta")
    form = tuple(like.shape), like.stride(), x.dtype
    if x.is_cuda:
        if torch.cuda.device_count() == 1:
            return partial(empty_strided_on_cuda, *form)
        return partial(torch.empty_strided, *form[:2], dtype=x.dtype, device=x.device)
    new = partial(empty_strided, *form)
    return new if size < LARGE else lambda: on_huge_pages(new())


def remember(known: set[tuple[int, ...]], form: tuple[int, ...]) -> None:
    """Add addresses, or distances of addresses, to those whose memory was compared."""
    if len(known) >= _COMPARED:
        known.clear()
    known.add(form)


def on_cpu(
    kind: Options | AngleOptions,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor] | None,
) -> Run | None:
    """Return code that runs the compiled loops on operands of these forms; None if they cannot.

    Raises ValueError for shapes that do not fit. `is_watched` must be False.
    """
    operands = (*xs, *tables, *(out or ()))
    if jobs is None or not all(map(has_memory, operands)) or any(map(is_on_gpu, operands)):
        return None
    if wants_grad(*operands):
        return None
    check_no_inference(out or ())
    is_in_place = None
    if out is not None:
        is_in_place = tuple([x.data_ptr() == y.data_ptr() for x, y in zip(xs, out, strict=True)])
    read, written = [form(x) for x in xs], [form(y) for y in out or ()]
    ready = jobs.ready_call_at if isinstance(kind, AngleOptions) else jobs.ready_call
    call = ready(read, [form(table) for table in tables], written, is_in_place, kind)
    if call is None or (out is None and not all([x.is_contiguous() for x in xs])):
        return None  # new outputs keep the memory order of x
    if len({y.is_inference() for y in out or ()}) > 1:  # only some have a version counter
        return None
    is_tracked = out is not None and not out[0].is_inference()
    new = [maker_of_outputs(x, call.size) for x in xs]
    new_q, new_k = new[0], new[-1]
    checks = jobs.CHECK_ROWS * (len(tables) == 3) + jobs.CHECK_OVERLAP * (out is not None)
    job = call.job
    not_in_place = is_in_place and (not is_in_place[0], not is_in_place[-1])
    is_single = len(xs) == 1
    absent: tuple[int, ...] = (0,) * (3 - len(tables))
    checked_spacings: set[tuple[int, ...]] = set()

    def code(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        q, k = xs[0], xs[-1]
        if out is not None:
            outs = tuple(out)
        elif is_single:
            outs = (new_q(),)
        else:
            outs = (new_q(), new_k())
        q_at, q_out, k_at, k_out = (
            q.data_ptr(), outs[0].data_ptr(), k.data_ptr(), outs[-1].data_ptr()
        )  # fmt: skip
        cos, sin, rows = *map(data_ptr, tables), *absent
        if out is None:
            is_done = job(q_at, q_out, k_at, k_out, cos, sin, rows, checks)
            return outs if is_done else None
        if not_in_place != (q_at != q_out, k_at != k_out):
            return None
        if not job(q_at, q_out, k_at, k_out, cos, sin, rows, checks):
            # q and k may be slices of one buffer: their address ranges overlap, their bytes do not
            addresses = q_at, q_out, k_at, k_out, cos, sin, rows
            spacing = tuple([address - q_at for address in addresses])
            if spacing not in checked_spacings:
                check_memory((*xs, *tables), outs)
                remember(checked_spacings, spacing)
            if not job(*addresses, checks - jobs.CHECK_OVERLAP):
                return None
        if is_tracked:
            increment_version(outs)
        return outs

    return code
