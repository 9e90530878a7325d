"""A call like one before: what must be as it was, and the code that then runs at once.

For one token, working out how the tensors fit together costs several times the rotation. The checks
that `torch.compile` makes before it runs a compiled function, in C++, cover what the answer depends
on: of each operand its type, dtype, device, shape, strides, whether it requires a gradient, and
what the dispatcher looks at, so also vmap, grad and inference mode. They do not see jit.trace,
make_fx and forward mode, which the caller rules out, nor what is looked at here: grad mode, row
numbers, and whether memory is shared.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .geometry import Options
from .pages import LARGE
from .torch_checks import check_memory, check_no_inference
from .torch_launch import empty_like, form, loops, mark_written
from .torch_state import FLOATS, has_memory, is_on_gpu, wants_grad

# None in a torch that has no such check: every call is then worked out
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

# (xs, cos, sin, rows, out) -> the results, or None where this code cannot take them
Run = Callable[
    [Sequence[Tensor], Tensor, Tensor, Tensor | None, Sequence[Tensor] | None],
    tuple[Tensor, ...] | None,
]
# of calls of one kind and shape of x: forms of the other operands; and how many kinds and shapes
_FORMS, _KINDS = 4, 256
_SPACINGS = 64  # of operands whose memory was compared byte by byte


class Ready(NamedTuple):
    """The code for operands that pass the guard."""

    guard: Any
    is_without_grad: bool  # an operand requires a gradient: only where grad mode is off
    run: Run


recent: dict[tuple[object, ...], tuple[Ready, ...]] = {}


def run_again(key: tuple[object, ...], operands: Sequence[Tensor], *call: Any) -> Any:
    """The results of a call like one before, or None. `operands` are all tensors of the call."""
    for ready in recent.get(key, ()):
        if ready.guard.check(*operands) and not (ready.is_without_grad and torch.is_grad_enabled()):
            results = ready.run(*call)
            if results is not None:
                return results
    return None


def remember(key: tuple[object, ...], operands: Sequence[Tensor], run: Run) -> None:
    """Keep the code that took these operands, for calls of the same form."""
    if TensorGuards is None:
        return
    sizes: list[Any] = [list(tensor.shape) for tensor in operands]
    strides: list[Any] = [list(tensor.stride()) for tensor in operands]
    guard = TensorGuards(*operands, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    ready = Ready(guard, any([tensor.requires_grad for tensor in operands]), run)
    if key not in recent and len(recent) >= _KINDS:
        recent.pop(next(iter(recent)), None)
    recent[key] = (ready, *recent.get(key, ())[: _FORMS - 1])


def on_cpu(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    options: Options,
    out: Sequence[Tensor] | None,
) -> Run | None:
    """The compiled loops for operands of these forms; None where another way has to be taken.

    ValueError for shapes that do not fit. Nobody may watch the operators.
    """
    operands = (*xs, cos, sin, *(() if rows is None else (rows,)), *(out or ()))
    if loops is None or not all(map(has_memory, operands)) or any(map(is_on_gpu, operands)):
        return None
    if wants_grad(*operands) or not all([x.dtype in FLOATS for x in xs]):
        return None
    check_no_inference(out or ())
    is_in_place = None
    if out is not None:
        is_in_place = tuple([x.data_ptr() == y.data_ptr() for x, y in zip(xs, out, strict=True)])
    blocks = [form(x) for x in xs], form(cos), form(sin), None if rows is None else form(rows)
    call = loops.ready_call(*blocks, [form(y) for y in out or ()], is_in_place, options)
    apart: set[tuple[int, ...]] = set()
    if call is None or (out is None and not all([x.is_contiguous() for x in xs])):
        return None  # new outputs keep the memory order of x

    def run(
        xs: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        rows: Tensor | None,
        out: Sequence[Tensor] | None,
    ) -> tuple[Tensor, ...] | None:
        if out is not None:
            outs = tuple(out)
        elif call.size < LARGE:  # nothing stands between one token and its outputs
            outs = tuple([torch.empty_like(x) for x in xs])
        else:
            outs = tuple([empty_like(x) for x in xs])
        sources, targets = [x.data_ptr() for x in xs], [y.data_ptr() for y in outs]
        tables = cos.data_ptr(), sin.data_ptr(), 0 if rows is None else rows.data_ptr()
        if out is None:
            is_done = loops.run(call, sources, targets, *tables, is_checked=rows is not None)
            return outs if is_done else None
        if is_in_place != tuple([x == y for x, y in zip(sources, targets, strict=True)]):
            return None
        if not loops.run(call, sources, targets, *tables, is_checked=True):
            # q and k may be slices of one buffer: their reach overlaps, their bytes do not
            places = *sources, *targets, *tables
            spacing = tuple([place - sources[0] for place in places])
            if spacing not in apart:
                check_memory((*xs, cos, sin, *(() if rows is None else (rows,))), outs)
                if len(apart) >= _SPACINGS:
                    apart.clear()
                apart.add(spacing)
            if not loops.run(call, sources, targets, *tables, is_checked=True, is_apart=True):
                return None
        mark_written(outs)
        return outs

    return run
