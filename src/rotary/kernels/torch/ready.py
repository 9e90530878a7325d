"""Repeats a call whose arguments have the shapes, types and strides of an earlier one.

For one token, working out how the tensors fit together costs several times the rotation. The checks
that `torch.compile` makes before it runs a compiled function, in C++, cover what the answer depends
on: of each operand its type, dtype, device, shape, strides, whether it requires a gradient, and
what the dispatcher looks at, so also vmap, grad, inference mode, dispatch modes and jit.trace. They
do not see make_fx, forward mode, grad mode, row numbers, and whether memory is shared, which are
looked at here; torch.compile, which the caller rules out; and would end the process for a nested
tensor.

After a matrix product as wide as a model, none of this code is in the processor's caches, so the
time depends on how much code and memory a call uses: what the guard has checked is not checked
again.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import is_not
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import Said
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
from .state import FLOATS, has_memory, is_on_gpu, is_recorded_by_dynamo, is_watched, wants_grad

Tables = tuple[Tensor, ...]  # cos and sin, perhaps row numbers; or positions alone
# the code of a call: its results, or None where it cannot take these after all
Run = Callable[[Sequence[Tensor], Tables, Sequence[Tensor] | None], tuple[Tensor, ...] | None]
Prepared = Callable[[Sequence[Tensor], Tables, Sequence[Tensor] | None], tuple[Tensor, ...]]
Kind = TypeVar("Kind", bound=Hashable)
# of calls of one kind and size of x: forms of the operands; and how many kinds and sizes
_FORMS, _KINDS = 8, 256
_SPACINGS = 64  # of operands whose memory was compared byte by byte
data_ptr: Callable[[Tensor], int] = Tensor.data_ptr
_is_nested: Callable[[Tensor], bool] = Tensor.is_nested.__get__  # type: ignore[attr-defined]


class Ready(NamedTuple):
    """The code for operands that pass the check of a guard."""

    check: Callable[..., bool]
    grad_mode: bool | None  # which it must be; None where no operand requires a gradient
    run: Run


recent: dict[tuple[object, ...], tuple[Ready, ...]] = {}


def run(
    said: Said,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor] | None,
    make: Callable[[Kind, Sequence[Tensor], Tables, Sequence[Tensor] | None], Run | None],
    kind_of: Callable[..., Kind],
) -> tuple[Tensor, ...] | None:
    """The results, by the code of a call like this one, or by new code, which is then kept.

    `kind_of(*said)` is all that the code depends on beside the tensors, and `make` writes it for
    these tensors. None where it cannot: another way has to be taken.
    """
    others = None
    operands = (*xs, *tables)
    if out is not None:  # no tensor twice: the guards would refuse it
        others = tuple(map(is_not, xs, out))
        operands = (*operands, *itertools.compress(out, others))
    try:
        if is_past_guards() or True in map(_is_nested, operands):  # it would end the process
            return None
        key = said, len(operands), others, xs[0].numel()
        for check, grad_mode, known in recent.get(key, ()):
            if check(*operands) and (grad_mode is None or grad_mode is torch.is_grad_enabled()):
                results = known(xs, tables, out)
                if results is not None:
                    return results
    except TypeError:  # an operand is no tensor
        return None
    if is_watched():
        return None
    code = make(kind_of(*said), xs, tables, out)
    results = None if code is None else code(xs, tables, out)
    if code is not None and results is not None and TensorGuards is not None:
        if key not in recent and len(recent) >= _KINDS:
            oldest, *_ = recent  # in one step: another thread may add to it
            recent.pop(oldest, None)
        recent[key] = (ready_for(operands, code), *recent.get(key, ())[: _FORMS - 1])
    return results


def itself(kind: Kind) -> Kind:
    """The `kind_of` of a call that says its kind."""
    return kind


def prepared(
    code: Run,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor] | None,
    otherwise: Prepared,
) -> Prepared | None:
    """The code behind a guard of these tensors, and `otherwise` for others; None without guards."""
    if TensorGuards is None:
        return None
    width, is_into = len(xs), out is not None
    others = tuple(map(is_not, xs, out or ()))
    has_others = any(others)
    operands = (*xs, *tables, *itertools.compress(out or (), others))
    count, (check, grad_mode, code) = len(operands), ready_for(operands, code)

    def run(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...]:
        operands = (*xs, *tables)
        if out is None:
            is_alike = not is_into
        elif has_others:
            is_alike = tuple(map(is_not, xs, out)) == others
            operands = (*operands, *itertools.compress(out, others))
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
                and (grad_mode is None or grad_mode is torch.is_grad_enabled())
            ):
                results = code(xs, tables, out)
                if results is not None:
                    return results
        except TypeError:  # an operand is no tensor
            pass
        return otherwise(xs, tables, out)

    return run


def ready_for(operands: Sequence[Tensor], code: Run) -> Ready:
    """The code and the guard of operands like these, of which none stands twice."""
    guard = TensorGuards(
        *operands,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in operands],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in operands],
    )
    wants_it = any([tensor.requires_grad for tensor in operands])
    return Ready(guard.check, torch.is_grad_enabled() if wants_it else None, code)


def maker_of_outputs(x: Tensor, size: int) -> Callable[[], Tensor]:
    """What makes a tensor without values like x; on huge pages where those of a call are large."""
    like = torch.empty_like(x, device="meta")
    form = tuple(like.shape), like.stride(), x.dtype
    if x.is_cuda:
        if torch.cuda.device_count() == 1:
            return partial(empty_strided_on_cuda, *form)
        return partial(torch.empty_strided, *form[:2], dtype=x.dtype, device=x.device)
    new = partial(empty_strided, *form)
    return new if size < LARGE else lambda: on_huge_pages(new())


def on_cpu(
    kind: Options | AngleOptions,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor] | None,
) -> Run | None:
    """The compiled loops for operands of these forms; None where another way has to be taken.

    ValueError for shapes that do not fit. Nobody may watch the operators.
    """
    operands = (*xs, *tables, *(out or ()))
    if jobs is None or not all(map(has_memory, operands)) or any(map(is_on_gpu, operands)):
        return None
    if wants_grad(*operands) or not all([x.dtype in FLOATS for x in xs]):
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
    if len({y.is_inference() for y in out or ()}) > 1:  # one of them has no version to count
        return None
    is_tracked = out is not None and not out[0].is_inference()
    new = [maker_of_outputs(x, call.size) for x in xs]
    new_q, new_k = new[0], new[-1]
    checks = jobs.CHECK_ROWS * (len(tables) == 3) + jobs.CHECK_OVERLAP * (out is not None)
    job = call.job
    is_other_memory = is_in_place and (not is_in_place[0], not is_in_place[-1])
    is_single = len(xs) == 1
    absent: tuple[int, ...] = (0,) * (3 - len(tables))
    apart: set[tuple[int, ...]] = set()

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
        if is_other_memory != (q_at != q_out, k_at != k_out):
            return None
        if not job(q_at, q_out, k_at, k_out, cos, sin, rows, checks):
            # q and k may be slices of one buffer: their reach overlaps, their bytes do not
            places = q_at, q_out, k_at, k_out, cos, sin, rows
            spacing = tuple([place - q_at for place in places])
            if spacing not in apart:
                check_memory((*xs, *tables), outs)
                if len(apart) >= _SPACINGS:
                    apart.clear()
                apart.add(spacing)
            if not job(*places, checks - jobs.CHECK_OVERLAP):
                return None
        if is_tracked:
            increment_version(outs)
        return outs

    return code
