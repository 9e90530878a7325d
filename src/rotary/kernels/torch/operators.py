"""`torch.ops.rotary.*`: opaque operators for torch.compile and for direct calls.

They may be called directly, so they check all arguments, also those that are fake tensors.
"""

import torch
from torch import Tensor

from ... import layouts
from ..geometry import Geometry, check_fit
from ..triton.sources import are_walked_alike, from_tables, from_turns
from . import angles
from .checks import (
    check_device,
    check_no_grad,
    check_operands,
    check_rows,
    check_storage,
    check_strided,
    check_writable,
    check_xs,
)
from .gpu import rotate_at
from .launch import empty_contiguous, gpu_kernel, has_kernel, launch, mark_written
from .private import FunctionalMode, FunctionalTensor, is_in_forward_mode
from .state import INTEGERS, is_on_gpu

_library = torch.library.Library("rotary", "DEF")
_GEOMETRY = "int start, int pairs, str layout, str out_layout, int[] dims, bool conjugate"
_TABLES = "Tensor cos, Tensor sin, Tensor? rows"
_ANGLES = "Tensor? positions, Tensor turns, float factor"
for _name, _from in (("rotate", _TABLES), ("rotate_at", _ANGLES)):
    _library.define(f"{_name}(Tensor[] xs, {_from}, {_GEOMETRY}) -> Tensor[]")
    _library.define(f"{_name}_out(Tensor[] xs, {_from}, {_GEOMETRY}, Tensor(a!)[] out) -> ()")


def flat(geometry: Geometry) -> tuple[int, int, str, str, list[int], bool]:
    """A geometry as the last arguments of an operator, -1 for None."""
    start, pairs, layout, out_layout, dims, conjugate = geometry
    return start, pairs, layout, out_layout, [-1 if d is None else d for d in dims], conjugate


def _geometry(start, pairs, layout, out_layout, dims, conjugate):
    axes = tuple(None if dim == -1 else dim for dim in dims)
    return Geometry(start, pairs, layout, out_layout, axes, conjugate)


def _checked(xs, cos, sin, rows, *form, out=None):
    """Return the arguments of `launch` except its outputs; `rows` as the kernels read them.

    Arguments that would make a kernel read or write outside of the tensors are refused.
    """
    geometry = _geometry(*form)
    indices = () if rows is None else (rows,)
    _check_tensors(geometry, xs, (cos, sin, *indices), out)
    check_operands(xs, cos, sin, out)
    if rows is not None:
        check_device(rows, xs[0])
        rows = check_rows(rows, xs[0])
        indices = (rows,)
    along = cos.ndim - 1 if rows is None else rows.ndim
    if cos.ndim < 2 or (rows is not None and cos.ndim != 2):
        along = -1
    _check_dims(geometry, along, "cos and sin" if rows is None else "rows")
    check_fit(geometry, [x.shape for x in xs], cos.shape, None if rows is None else rows.shape)
    if out is not None:
        check_no_grad((*xs, cos, sin), out)
        check_writable((*xs, cos, sin, *indices), out)
    return xs, cos, sin, rows, geometry


def _check_tensors(geometry, xs, others, out):
    if not xs:
        raise ValueError("xs must hold at least one tensor")
    if is_in_forward_mode():  # an operator does not see tangents: they would be lost
        raise RuntimeError(
            "the operators torch.ops.rotary.* have no forward-mode derivative: call rotary.rotate; "
            "of a compiled program, compile the call of torch.func.jvp"
        )
    operands = (*xs, *others, *(out or ()))
    check_strided(operands)
    check_storage(operands)
    layouts.check(geometry.layout)
    layouts.check(geometry.out_layout, "out_layout")


def _check_dims(geometry, along, name):
    used = sorted(dim for dim in geometry.dims if dim is not None)
    if used != list(range(along)) or along < 0:
        raise ValueError(
            f"dims {flat(geometry)[4]} must name each of the {max(along, 1)} leading axes of "
            f"{name} once, -1 for the other axes of x"
        )


def _checked_at(xs, positions, turns, factor, *form, out=None):
    """Return the arguments of `rotate_at` except its outputs, checked as those of `rotate` are.

    turns  (pairs,) int64; for several axes (axes, pairs), 0 where another axis turns the pair
    """
    geometry = _geometry(*form)
    others = (turns,) if positions is None else (turns, positions)
    _check_tensors(geometry, xs, others, out)
    check_xs(xs, out)
    check_device(turns, xs[0])
    axes = 1 if turns.ndim == 1 else turns.shape[0]
    is_fit = turns.ndim in (1, 2) and turns.shape[-1] == geometry.pairs and axes > 0
    if turns.dtype != torch.int64 or not is_fit or not turns.is_contiguous():
        raise ValueError(
            f"turns must be contiguous int64 numbers, ({geometry.pairs},) or (axes, "
            f"{geometry.pairs}); got {turns.dtype} {tuple(turns.shape)}"
        )
    if positions is None:
        _check_dims(geometry, 1, "positions")
        if axes > 1:
            raise ValueError("several axes need positions (..., axes)")
        tokens = [xs[0].shape[geometry.dims.index(0)]]
    else:
        check_device(positions, xs[0])
        tokens = list(positions.shape)
        if positions.dtype not in INTEGERS:
            raise TypeError(f"positions must be whole numbers, got {positions.dtype}")
        if axes > 1:
            *tokens, last = tokens or [0]
            if last != axes:
                raise ValueError(f"positions must be (..., {axes}), got {positions.shape}")
        _check_dims(geometry, len(tokens), "positions")
    check_fit(geometry, [x.shape for x in xs], (1, geometry.pairs), tuple(tokens))
    if out is not None:
        check_no_grad(xs, out)
        check_writable((*xs, *others), out)
    return xs, positions, turns, factor, geometry


def _operator(checked, run):
    """Return an operator and its fake, which torch.compile calls; then the same with out=.

    checked  returns the arguments of `run` for those of the operator; refuses what does not fit
    run      writes the rotation into its last argument
    """

    def new(xs, *rest):
        given = checked(xs, *rest)
        outs = [empty_contiguous(x) for x in xs]
        run(*given, outs)
        return outs

    def into(*operands):
        *given, out = operands
        run(*checked(*given, out=out), out)
        mark_written(out)

    def fake_new(xs, *rest):
        checked(xs, *rest)
        return [x.new_empty(x.shape) for x in xs]

    def fake_into(*operands):
        *given, out = operands
        checked(*given, out=out)

    return (new, fake_new), (into, fake_into)


def _setup(ctx, inputs, output):
    _, cos, sin, rows, *form = inputs
    if cos.requires_grad or sin.requires_grad:
        raise RuntimeError(
            "the operator rotary::rotate gives cos and sin no gradient: call rotary.rotate, which "
            "does, or pass cos.detach() and sin.detach()"
        )
    ctx.geometry, ctx.rest = _geometry(*form), ()
    ctx.save_for_backward(cos, sin, rows)


def _setup_at(ctx, inputs, output):
    _, *angles, factor = inputs[:4]
    ctx.geometry, ctx.rest = _geometry(*inputs[4:]), (factor,)
    ctx.save_for_backward(*angles)


def _backward(operator):
    """Return the gradient of an operator: the operator with the reversed geometry."""

    def backward(ctx, grads):
        present = [grad for grad in grads if grad is not None]
        arguments = (*ctx.saved_tensors, *ctx.rest, *flat(ctx.geometry.reversed()))
        rotated = iter(operator(present, *arguments) if present else ())
        return [None if grad is None else next(rotated) for grad in grads], *(None,) * 9

    return backward


for _name, _check, _run, _keep in (
    ("rotate", _checked, launch, _setup),
    ("rotate_at", _checked_at, rotate_at, _setup_at),
):
    for _suffix, (_does, _meta) in zip(("", "_out"), _operator(_check, _run), strict=True):
        _library.impl(f"{_name}{_suffix}", _does, "CompositeExplicitAutograd")
        torch.library.register_fake(f"rotary::{_name}{_suffix}", _meta, lib=_library)
    _back = _backward(getattr(torch.ops.rotary, _name))
    torch.library.register_autograd(f"rotary::{_name}", _back, setup_context=_keep, lib=_library)


# --- what Inductor sees: the launch, without checks and without a call of Python ---


def _recorded(xs, cos, sin, rows, *form, out=None):
    """Record the launch of `rotate` and return its outputs; None if the operator has to do it."""
    geometry, tables = _geometry(*form), (cos, sin) if rows is None else (cos, sin, rows)
    if not _can_be_recorded(xs, tables, geometry, out) or not are_walked_alike(cos, sin):
        return None
    return _launched(xs, from_tables(cos, sin, rows, geometry), geometry, out)


def _recorded_at(xs, positions, turns, factor, *form, out=None):
    """Record the launch of `rotate_at`, as `_recorded` does that of `rotate`."""
    geometry, others = _geometry(*form), (turns,) if positions is None else (turns, positions)
    if not _can_be_recorded(xs, others, geometry, out):
        return None
    return _launched(xs, from_turns(turns, factor, positions, geometry), geometry, out)


def _can_be_recorded(xs, others, geometry, out):
    x, outs = xs[0], () if out is None else out
    if len(xs) > 2 or not is_on_gpu(x) or torch.version.hip or not has_kernel(x.device, x.dtype):
        return False
    if out is not None and geometry.layout != geometry.out_layout:  # it may be in place
        return False
    # a length that torch.compile leaves open is symbolic, but the choice of a tile needs a number
    sizes = [size for y in (*xs, *others, *outs) for size in (*y.shape, *y.stride())]
    return all(type(size) is int for size in sizes) and all(y.stride(-1) == 1 for y in (*xs, *outs))


def _launched(xs, source, geometry, out):
    is_in_place = out is not None and all(x is y for x, y in zip(xs, out, strict=True))
    outs = [x.new_empty(x.shape) for x in xs] if out is None else out
    is_one = gpu_kernel(xs[0].device).record(xs, outs, source, geometry, is_in_place)
    return outs if is_one else None


def _decomposed(record, is_out):
    def rule(mode, operator, types, arguments, options):
        operands, out = (arguments[:-1], arguments[-1]) if is_out else (arguments, None)
        outs = None
        if {*types} <= {Tensor, FunctionalTensor}:
            with mode:
                outs = record(*operands, out=out)
        if outs is None:
            return mode.__torch_dispatch__(operator, types, arguments, options)
        return None if is_out else outs

    return rule


if FunctionalMode is not None:
    for _name, _record in (("rotate", _recorded), ("rotate_at", _recorded_at)):
        for _suffix in ("", "_out"):
            torch.library.register_torch_dispatch(
                f"rotary::{_name}{_suffix}",
                FunctionalMode,
                _decomposed(_record, bool(_suffix)),
                lib=_library,
            )
_library.define("of_lengths(str name, SymInt[] lengths) -> Tensor")
_library.impl("of_lengths", angles.operator_of_lengths, "CompositeExplicitAutograd")
torch.library.register_fake("rotary::of_lengths", angles.fake_of_lengths, lib=_library)
