"""`torch.ops.rotary.*`, for torch.compile and for those who want a call that nothing looks into.

They may be called directly, so they check all that they take, also where tensors are fake.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import layouts
from . import torch_tables
from .geometry import Geometry, check_fit
from .torch_checks import (
    check_device,
    check_no_grad,
    check_operands,
    check_rows,
    check_storage,
    check_strided,
    check_writable,
)
from .torch_launch import empty_contiguous, launch, mark_written

_library = torch.library.Library("rotary", "DEF")
_OPERANDS = (
    "Tensor[] xs, Tensor cos, Tensor sin, Tensor? rows, "
    "int start, int pairs, str layout, str out_layout, int[] dims, bool conjugate"
)
_library.define(f"rotate({_OPERANDS}) -> Tensor[]")
_library.define(f"rotate_out({_OPERANDS}, Tensor(a!)[] out) -> ()")


def flat(geometry: Geometry) -> tuple[int, int, str, str, list[int], bool]:
    """A geometry as the last arguments of an operator, -1 for None."""
    start, pairs, layout, out_layout, dims, conjugate = geometry
    return start, pairs, layout, out_layout, [-1 if d is None else d for d in dims], conjugate


def _geometry(start, pairs, layout, out_layout, dims, conjugate):
    known = tuple(None if dim == -1 else dim for dim in dims)
    return Geometry(start, pairs, layout, out_layout, known, conjugate)


def _checked(xs, cos, sin, rows, *form, out=None):
    """Row numbers as int64 and the geometry; what a kernel would read or write past is refused."""
    geometry = _geometry(*form)
    if not xs:
        raise ValueError("xs must hold at least one tensor")
    if forward_ad._current_level >= 0:  # an operator sees no tangent, and it would be lost
        raise RuntimeError(
            "the operators torch.ops.rotary.* have no forward-mode derivative: call rotary.rotate; "
            "of a compiled program, compile the call of torch.func.jvp"
        )
    indices = () if rows is None else (rows,)
    given = (*xs, cos, sin, *indices, *(out or ()))
    check_strided(given)
    check_storage(given)
    check_operands(xs, cos, sin, out)
    layouts.check(geometry.layout)
    layouts.check(geometry.out_layout, "out_layout")
    if rows is not None:
        check_device(rows, xs[0])
        rows = check_rows(rows, xs[0])
        indices = (rows,)
    along = cos.ndim - 1 if rows is None else rows.ndim
    used = [dim for dim in geometry.dims if dim is not None]
    if cos.ndim < 2 or sorted(used) != list(range(along)) or (rows is not None and cos.ndim != 2):
        raise ValueError(
            f"dims {flat(geometry)[4]} must name each of the {along} leading axes of "
            f"{'cos and sin' if rows is None else 'rows'} once, -1 for the other axes of x"
        )
    check_fit(geometry, [x.shape for x in xs], cos.shape, None if rows is None else rows.shape)
    if out is not None:
        check_no_grad((*xs, cos, sin), out)
        check_writable((*xs, cos, sin, *indices), out)
    return rows, geometry


def _operator(xs, cos, sin, *rest):
    rows, geometry = _checked(xs, cos, sin, *rest)
    return list(launch(xs, cos, sin, rows, geometry, [empty_contiguous(x) for x in xs]))


def _operator_out(xs, cos, sin, *rest):
    *form, out = rest
    rows, geometry = _checked(xs, cos, sin, *form, out=out)
    launch(xs, cos, sin, rows, geometry, out)
    mark_written(out)


def _fake(xs, *rest):
    _checked(xs, *rest)
    return [x.new_empty(x.shape) for x in xs]


def _fake_out(*operands):
    *given, out = operands
    _checked(*given, out=out)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    _, cos, sin, rows, *rest = inputs
    if cos.requires_grad or sin.requires_grad:
        raise RuntimeError(
            "the operator rotary::rotate gives cos and sin no gradient: call rotary.rotate, which "
            "does, or pass cos.detach() and sin.detach()"
        )
    ctx.geometry = _geometry(*rest)
    ctx.save_for_backward(cos, sin, rows)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[object, ...]:
    known = [grad for grad in grads if grad is not None]
    arguments = (*ctx.saved_tensors, *flat(ctx.geometry.reversed()))
    rotated = iter(torch.ops.rotary.rotate(known, *arguments) if known else ())
    return [None if grad is None else next(rotated) for grad in grads], *(None,) * 9


_library.impl("rotate", _operator, "CompositeExplicitAutograd")
_library.impl("rotate_out", _operator_out, "CompositeExplicitAutograd")
torch.library.register_fake("rotary::rotate", _fake, lib=_library)
torch.library.register_fake("rotary::rotate_out", _fake_out, lib=_library)
torch.library.register_autograd("rotary::rotate", _backward, setup_context=_setup, lib=_library)
_library.define("of_lengths(str name, SymInt[] lengths) -> Tensor")
_library.impl("of_lengths", torch_tables.operator_of_lengths, "CompositeExplicitAutograd")
torch.library.register_fake("rotary::of_lengths", torch_tables.fake_of_lengths, lib=_library)
