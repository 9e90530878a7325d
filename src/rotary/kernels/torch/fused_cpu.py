"""Computes a fused call on torch tensors by the compiled loops, with gradients."""

# mypy: disable-error-code="misc, no-untyped-call, no-untyped-def"

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cpu import fused_jobs as jobs
from ..cpu.fused_calls import Access, Call, piece_of, rotated
from .launch import empty_like, form, launch
from .state import FLOATS, are_plain, host_array


def _weight(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return (weight if weight.dtype in FLOATS else weight.float()).contiguous()


ACCESS = Access(form, Tensor.data_ptr, host_array, _weight)


class Differentiable(torch.autograd.Function):
    """Normalizes and rotates q and k into new tensors; compiled loops compute gradients too.

    The operands are q, k, the weight of q and that of k, or None; they and the tables are saved.
    `formula` is used if the loops cannot take the tensors, and for gradients of gradients.
    """

    @staticmethod
    def forward(ctx, call, formula, *operands):
        xs = operands[: len(operands) // 2]
        ctx.call, ctx.formula, ctx.count = call, formula, len(xs)
        ctx.save_for_backward(call.cos, call.sin, call.rows, *operands)
        ctx.set_materialize_grads(False)
        outs = tuple(empty_like(x) for x in xs)
        if not rotated(call, xs, outs):
            outs = tuple(_by_formula(call, formula, operands))
        return outs

    @staticmethod
    def backward(ctx, *grads):
        (cos, sin, rows, *operands), count = ctx.saved_tensors, ctx.count
        weights = operands[count:]
        call = ctx.call._replace(cos=cos, sin=sin, rows=rows).with_weights(weights)
        given = [grad for grad in grads if grad is not None]
        if torch.is_grad_enabled() or not (given and are_plain([*given, cos])):
            return None, None, *_gradients_by_formula(call, ctx, operands, grads)
        results: list[Tensor | None] = [None] * len(operands)
        for index, (x, weight, grad) in enumerate(
            zip(operands[:count], weights, grads, strict=True)
        ):
            if grad is None:
                continue
            both = _gradients_by_loops(call, index, x, weight, grad)
            if both is None:
                return None, None, *_gradients_by_formula(call, ctx, operands, grads)
            results[index], results[count + index] = both
        return None, None, *results


def _gradients_by_loops(
    call: Call, index: int, x: Tensor, weight: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    """Return the gradients of x and of its weight; None if the loops cannot take these."""
    if weight is None:
        back = call.fitted.geometries[index].reversed()
        turned = launch((grad,), call.cos, call.sin, call.rows, back, None)
        return turned[0], None
    assert call.norm is not None
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    result = empty_like(x)
    piece, memory, alive = piece_of(call, index, x, result)
    gradient = form(grad), grad.data_ptr()
    gains = jobs.run_back(piece, memory, gradient, call.norm.eps, *call.table())
    del alive
    if gains is None:
        return None
    return result, torch.from_numpy(gains).reshape(weight.shape).to(weight.dtype)


def _by_formula(
    call: Call, formula: Callable[..., list[Tensor]], operands: Sequence[Tensor]
) -> list[Tensor]:
    xs = operands[: len(operands) // 2]
    call = call.with_weights(operands[len(xs) :])
    ys = formula(xs, call.norm, call.cos, call.sin, call.rows, call.fitted)
    return [y.to(x.dtype) for x, y in zip(xs, ys, strict=True)]


def _gradients_by_formula(
    call: Call, ctx: Any, operands: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients by the formula, which can be differentiated again."""
    needs = ctx.needs_input_grad[2:]
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [
            _alias(x, is_recorded) if is_needed else x
            for x, is_needed in zip(operands, needs, strict=True)
        ]
        outs = _by_formula(call, ctx.formula, aliases)
        chosen = [x for x, is_needed in zip(aliases, needs, strict=True) if is_needed]
        pairs = [(y, g) for y, g in zip(outs, grads, strict=True) if g is not None]
        computed = torch.autograd.grad(
            [y for y, _ in pairs], chosen, [g for _, g in pairs],
            create_graph=is_recorded, allow_unused=True,
        )  # fmt: skip
    gradients = iter(computed)
    return [next(gradients) if is_needed else None for is_needed in needs]


def _alias(x: Tensor, is_recorded: bool) -> Tensor:
    """Return x as an operand of its own, so that its gradient is not that of another operand.

    Two operands may be one tensor, or one may be computed from the other. `is_recorded` keeps the
    graph that x comes from, for gradients of gradients.
    """
    return x.view_as(x) if is_recorded else x.detach().requires_grad_()
