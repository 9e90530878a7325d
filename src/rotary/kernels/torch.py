"""The torch kernel: compiled loops and the GPU kernel under autograd, the dispatcher, the compiler.

An eager call on plain CPU tensors goes straight to the compiled loops, one on plain CUDA tensors to
one launch of `kernels/triton.py`; through an autograd function if a gradient is wanted. Under
`torch.compile` a call on the CPU is the operator `torch.ops.rotary.rotate`, which Inductor does not
look into: there it is as fast as what Inductor makes of the formula in float32, and several times
faster in bfloat16 (`benchmarks/run.py` compares them). On a GPU a compiled call is the formula, one
loop that Inductor may fuse with its neighbours; only `out=` stays the operator, for in place one
launch moves no byte twice. Neither choice is measured on a GPU yet.
Everything else (other devices, subclasses, vmap, forward mode, export, tables that need a gradient)
is the plain formula in torch's own operators, which torch differentiates and transforms by itself.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from . import NESTED, Kernel, torch_tables
from .geometry import Geometry, Options, geometry_of
from .memory import is_contiguous
from .pages import LARGE
from .torch_checks import (
    check_memory,
    check_no_grad,
    check_strided,
    check_writable,
)
from .torch_checks import check_operands as check_operands
from .torch_checks import check_rows as check_rows
from .torch_exact import makes_angles as makes_angles
from .torch_exact import rotate_exact as rotate_exact
from .torch_formula import formula
from .torch_launch import (
    empty_like,
    form_of,
    gpu_kernel,
    is_for_gpu,
    launch,
    loops,
    mark_written,
)
from .torch_operators import flat
from .torch_state import (
    FLOATS,
    TENSORS,
    are_plain,
    has_memory,
    is_lazy,
    is_on_gpu,
    is_tracing,
    is_tracing_a_transform,
    is_transforming,
    wants_grad,
)

# of each tensor: type, dtype, whether on the CPU, whether lazy, shape, strides
Signature = tuple[type, torch.dtype, bool, bool, Sequence[int], Sequence[int]]

# None in a torch that has no such check: it pays the signature
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def rotate(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: object,
    options: Options,
    conjugate: bool,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Rotate torch tensors; the formula of `kernels/numpy.py`, with gradients.

    Arguments and errors are those of `rotary.rotate`.
    """
    is_eager = positions is None and not is_tracing() and not is_transforming()
    key = len(xs), options, conjugate
    for tensor in (*xs, cos, sin):
        if tensor.is_nested:  # the guards below would end the process
            check_strided((tensor,))
    if is_eager and out is None and not wants_grad(*xs, cos, sin):
        for guard, call in _recent.get(key, ()):
            if guard.check(*xs, cos, sin):
                return call(xs, cos, sin, None)
    if is_eager and not is_on_gpu(xs[0]) and (out is None or all(map(has_memory, (*xs, *out)))):
        tensors = (*xs, cos, sin) if out is None else (*xs, cos, sin, *out)
        check_strided(tensors)
        ready = _ready_call(
            tuple([(type(t), t.dtype, t.is_cpu, is_lazy(t), t.shape, t.stride()) for t in tensors]),
            None if out is None else _in_place(xs, out),
            options,
            conjugate,
        )
        if ready is not None and not wants_grad(*tensors):
            if out is None:
                _remember(key, tensors, partial(_run, ready))
            return _run(ready, xs, cos, sin, out)
    check_operands(xs, cos, sin, out)
    rows = None if positions is None else check_rows(positions, xs[0])
    shapes = tuple([tuple(x.shape) for x in xs])
    row_shape = None if rows is None else tuple(rows.shape)
    geometry = geometry_of(shapes, tuple(cos.shape), row_shape, options)
    if out is not None:
        return _rotate_into(xs, cos, sin, rows, geometry, conjugate, out)
    operands = (*xs, cos, sin)
    if (
        is_eager
        and is_for_gpu(operands)
        and cos.dtype != torch.float64
        and not wants_grad(*operands)
    ):
        _remember(key, operands, partial(_run_on_gpu, geometry, conjugate))
    return _rotate(xs, cos, sin, rows, geometry, conjugate)


def route(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> str:
    """Which code rotates: the first line of the table that fits.

    | the call | the code |
    |---|---|
    | torch.compile records it for a CPU, the tables want no gradient | "operator" |
    | it is recorded otherwise: torch.export, another device, torch.func | "formula" |
    | the tables want a gradient; a subclass, another device, vmap, a mode | "formula" |
    | x wants a gradient | "autograd", around the same as below |
    | any other on a CPU or a GPU | "memory": compiled loops, or one launch of Triton |

    The operator is opaque to Inductor. The formula is torch's own operators, which torch records,
    differentiates and fuses by itself. Where out= is given no gradient is wanted, and only the
    operator and the memory are left.
    """
    if is_tracing():
        is_opaque = not (
            torch.compiler.is_exporting()
            or wants_grad(cos, sin)
            or xs[0].device.type != "cpu"
            or is_tracing_a_transform()
        )
        return "operator" if is_opaque else "formula"
    if wants_grad(cos, sin) or not are_plain((*xs, cos, sin)):
        return "formula"
    return "autograd" if wants_grad(*xs) else "memory"


def _rotate(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    conjugate: bool,
) -> tuple[Tensor, ...]:
    way = route(xs, cos, sin)
    if way == "operator":
        return tuple(torch.ops.rotary.rotate(list(xs), cos, sin, rows, *flat(geometry), conjugate))
    if way == "formula":
        return formula(xs, cos, sin, rows, geometry, conjugate)
    if way == "autograd":
        return _Rotate.apply(geometry, conjugate, rows, cos, sin, *xs)
    return launch(xs, cos, sin, rows, geometry, conjugate, None)


def _rotate_into(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    conjugate: bool,
    out: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    if is_tracing_a_transform():
        raise RuntimeError(
            "out= cannot be used where torch.compile records vmap, grad or jvp: call without out="
        )
    check_no_grad((*xs, cos, sin), out)
    if is_tracing():
        torch.ops.rotary.rotate_out(list(xs), cos, sin, rows, *flat(geometry), conjugate, list(out))
        return tuple(out)
    check_writable((*xs, cos, sin, *(() if rows is None else (rows,))), out)
    launch(xs, cos, sin, rows, geometry, conjugate, out)
    mark_written(out)
    return tuple(out)


# --- a call like the one before ---


def _in_place(xs: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[bool, ...]:
    return tuple([x.data_ptr() == y.data_ptr() for x, y in zip(xs, outs, strict=True)])


@lru_cache(maxsize=1024)
def _ready_call(
    signature: tuple[Signature, ...],
    is_in_place: tuple[bool, ...] | None,
    options: Options,
    conjugate: bool,
) -> Any:
    """The prepared call of the loops; None where another way has to be taken."""
    if loops is None or not all(
        kind in TENSORS and is_cpu and not is_lazy and dtype in FLOATS and shape
        for kind, dtype, is_cpu, is_lazy, shape, _ in signature
    ):
        return None
    blocks = [form_of(shape, stride, dtype) for _, dtype, _, _, shape, stride in signature]
    if is_in_place is None and not all(map(is_contiguous, blocks)):
        return None  # new outputs keep the memory order of x
    return loops.ready_call(blocks, is_in_place, options, conjugate)


# For one token the signature of four tensors costs as much as the rotation. torch.compile has a
# check in C++ of type, dtype, device, shape, strides and all that the dispatcher would look at; it
# guards the last few calls. Whether a gradient is wanted now it does not see.
_RECENT = 4
Recent = Callable[[Sequence[Tensor], Tensor, Tensor, None], tuple[Tensor, ...]]
_recent: dict[object, tuple[tuple[Any, Recent], ...]] = {}


def _remember(key: object, tensors: Sequence[Tensor], call: Recent) -> None:
    if TensorGuards is None:
        return
    sizes: list[list[int]] = [list(tensor.shape) for tensor in tensors]
    strides: list[list[int]] = [list(tensor.stride()) for tensor in tensors]
    guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    _recent[key] = ((guard, call), *_recent.get(key, ())[: _RECENT - 1])


def _run(
    call: Any, xs: Sequence[Tensor], cos: Tensor, sin: Tensor, out: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    if out is not None:
        check_memory((*xs, cos, sin), out)
        outs = tuple(out)
    elif call.size < LARGE:  # nothing stands between one token and its outputs
        outs = tuple([torch.empty_like(x) for x in xs])
    else:
        outs = tuple([empty_like(x) for x in xs])
    sources, targets = [x.data_ptr() for x in xs], [y.data_ptr() for y in outs]
    loops.run(call, sources, targets, cos.data_ptr(), sin.data_ptr(), 0)
    if out is not None:
        mark_written(outs)
    return outs


def _run_on_gpu(
    geometry: Geometry,
    conjugate: bool,
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    return gpu_kernel(xs[0].device).rotate(xs, cos, sin, None, geometry, conjugate, out)


# --- autograd ---


class _Rotate(torch.autograd.Function):
    """The rotation under autograd: nothing is kept but the tables."""

    @staticmethod
    def forward(ctx, geometry, conjugate, rows, cos, sin, *xs):
        ctx.geometry, ctx.conjugate = geometry, conjugate
        ctx.save_for_backward(cos, sin, rows)
        ctx.set_materialize_grads(False)
        return launch(xs, cos, sin, rows, geometry, conjugate, None)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin, rows = ctx.saved_tensors
        known = [grad for grad in grads if grad is not None]
        way = ctx.geometry.reversed(), not ctx.conjugate
        turned = iter(_rotate(known, cos, sin, rows, *way) if known else ())
        return *(None,) * 5, *[None if grad is None else next(turned) for grad in grads]


def _check(x: Tensor) -> None:
    if x.is_nested:
        raise TypeError(NESTED)


KERNEL = Kernel(
    name="torch",
    namespace="torch",
    rotate=rotate,
    tables=torch_tables.tables,
    tables_float64=torch_tables.tables_float64,
    tables_float32=torch_tables.tables_float32,
    arithmetic=torch_tables.FLOAT32,
    takes=torch_tables.takes,
    inspect=torch_tables.inspect,
    row_lengths=torch_tables.row_lengths,
    arange=torch_tables.arange,
    as_positions=torch_tables.as_positions,
    repeat_rows=torch_tables.repeat_rows,
    to_numpy=torch_tables.to_numpy,
    from_numpy=torch_tables.from_numpy,
    host_constant=torch_tables.host_constant,
    is_cacheable=torch_tables.is_cacheable,
    device_key=torch_tables.device_key,
    check=_check,
    makes_angles=makes_angles,
    rotate_exact=rotate_exact,
)
