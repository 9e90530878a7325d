"""A fused call on torch tensors by the compiled loops, and its gradients."""

# mypy: disable-error-code="misc, no-untyped-call, no-untyped-def"

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import Numbers
from . import fused_jobs as jobs
from .geometry import Geometry
from .memory import Block
from .stages import (
    Fit,
    KVCache,
    LatentCache,
    Norm,
    check_cache,
    check_slots,
    slot_shape,
    weight_form,
)
from .torch_checks import check_rows
from .torch_launch import empty_like, form, launch
from .torch_state import host_array


class Call(NamedTuple):
    """A fused call on q and perhaps k: what is not a tensor to be differentiated."""

    cos: Tensor
    sin: Tensor
    rows: Tensor | None
    fitted: Fit
    norm: Norm | None

    def weight(self, index: int) -> Tensor | None:
        """The weight of q or k."""
        weight: Tensor | None = None if self.norm is None else getattr(self.norm, "qkv"[index])
        return weight

    def of(self, weights: Sequence[Tensor | None]) -> "Call":
        """The same call with these weights of q and k."""
        q, k = (*weights, None)[:2]
        return self._replace(norm=None if self.norm is None else replace(self.norm, q=q, k=k))

    def table(self) -> tuple[Block, Block | None, tuple[int, int, int]]:
        """The forms of the tables and row numbers, and where they are."""
        cos, sin, rows = self.cos, self.sin, self.rows
        places = cos.data_ptr(), sin.data_ptr(), 0 if rows is None else rows.data_ptr()
        return form(cos), None if rows is None else form(rows), places


def rotated(call: Call, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> bool:
    """q and k to `outs`; False, and nothing written, where the loops cannot take them."""
    made = [_piece(call, index, x, y) for index, (x, y) in enumerate(zip(xs, outs, strict=True))]
    return _run(call, made)


def stored(
    call: Call, q: Tensor, k: Tensor, v: Tensor | None, out: Tensor, cache: KVCache | LatentCache
) -> bool:
    """q to `out`, k and v to their slots; False, and nothing written, where the loops cannot."""
    fitted = call.fitted
    slots = torch.as_tensor(cache.slots)
    slot_shape(tuple(slots.shape), fitted.tokens)
    numbers = host_array(slots.reshape(-1).long())
    heads = 1 if fitted.head_axis is None else k.shape[fitted.head_axis]
    targets: list[tuple[str, Tensor | None, Tensor, tuple[int, ...]]]
    if isinstance(cache, LatentCache):
        assert v is not None
        latent, width = v.shape[-1], v.shape[-1] + k.shape[-1]
        values, keys = cache.rows.split([latent, width - latent], dim=-1)
        targets = [("k", k, keys, (k.shape[-1],)), ("v", v, values, (latent,))]
    else:
        targets = [("k", k, cache.k, (heads, k.shape[-1]))]
        if v is not None:
            targets.append(("v", v, cache.v, (heads, v.shape[-1])))
    made = [_piece(call, 0, q, out)]
    for index, (name, x, target, row) in enumerate(targets):
        assert x is not None
        block = check_cache(name, tuple(target.shape), row)
        low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (-1, -1)
        check_slots(low, high, tuple(target.shape), block)
        offsets = jobs.offsets_of(numbers, form(target).strides, block)
        if offsets is None or target.dtype != q.dtype:
            return False
        made.append(_piece(call, index + 1, x, target, offsets))
    return _run(call, made)


def _run(call: Call, made: list[tuple[jobs.Piece, jobs.Memory]]) -> bool:
    pieces, memories = zip(*made, strict=True)
    eps = 0.0 if call.norm is None else call.norm.eps
    return jobs.run(pieces, memories, eps, *call.table())


def _piece(
    call: Call, index: int, x: Tensor, out: Tensor, offsets: Numbers | None = None
) -> tuple[jobs.Piece, jobs.Memory]:
    fitted, weight, name = call.fitted, call.weight(index), "qkv"[index]
    geometry = fitted.geometries[index] if index < 2 else None
    is_latent = index == 2 and x.ndim == len(fitted.tokens) + 1
    head_axis = None if is_latent else fitted.head_axis
    gain, is_full, count = None, False, 0
    if weight is not None and call.norm is not None:
        heads = 1 if head_axis is None else x.shape[head_axis]
        rows, is_full = weight_form(name, tuple(weight.shape), heads, x.shape[-1])
        gain = _gain(weight, rows, call.norm.add_one, geometry, x)
        is_full, count = is_full and heads > 1, rows[0]
    is_in_place = x.data_ptr() == out.data_ptr()
    forms = form(x), form(out), geometry, head_axis, count, is_full
    piece = jobs.Piece(*forms, offsets is not None, is_in_place)
    return piece, jobs.Memory(x.data_ptr(), out.data_ptr(), gain, offsets)


def _gain(
    weight: Tensor, rows: tuple[int, ...], add_one: bool, geometry: Geometry | None, x: Tensor
) -> Numbers:
    wide = weight.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    name = "float64" if x.dtype == torch.float64 else "float32"
    return jobs.gain_of(host_array(wide.reshape(rows)), add_one, geometry, name)


class Differentiable(torch.autograd.Function):
    """q and k, each with its weight or None, to new tensors; the gradients by the same loops.

    What is kept is what was given. `formula` does it where the loops cannot take the tensors, and
    for gradients of gradients.
    """

    @staticmethod
    def forward(ctx, call, formula, *operands):
        xs = operands[: len(operands) // 2]
        ctx.call, ctx.formula, ctx.count = call, formula, len(xs)
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        outs = tuple(empty_like(x) for x in xs)
        if not rotated(call, xs, outs):
            outs = tuple(_by_formula(call, formula, operands))
        return outs

    @staticmethod
    def backward(ctx, *grads):
        operands, count = ctx.saved_tensors, ctx.count
        weights = operands[count:]
        call = ctx.call.of(weights)
        if torch.is_grad_enabled():
            return None, None, *_again(call, ctx, grads)
        results: list[Tensor | None] = [None] * len(operands)
        for index, (x, weight, grad) in enumerate(
            zip(operands[:count], weights, grads, strict=True)
        ):
            if grad is None:
                continue
            both = _back(call, index, x, weight, grad)
            if both is None:
                return None, None, *_again(call, ctx, grads)
            results[index], results[count + index] = both
        return None, None, *results


def _back(
    call: Call, index: int, x: Tensor, weight: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    """Gradients of x and of its weight; None where the loops cannot take these."""
    geometry = call.fitted.geometries[index]
    if weight is None:
        turned = launch((grad,), call.cos, call.sin, call.rows, geometry.reversed(), None)
        return turned[0], None
    assert call.norm is not None
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    result = empty_like(x)
    piece, memory = _piece(call, index, x, result)
    given = form(grad), grad.data_ptr()
    gains = jobs.run_back(piece, memory, given, call.norm.eps, *call.table())
    if gains is None:
        return None
    order = jobs.order(x.shape[-1], geometry.start, geometry.pairs, geometry.layout)
    ordered = torch.empty(
        gains.shape, dtype=torch.float64 if gains.itemsize == 8 else torch.float32
    )
    ordered[:, torch.from_numpy(order)] = torch.from_numpy(gains)
    return result, ordered.reshape(weight.shape).to(weight.dtype)


def _by_formula(
    call: Call, formula: Callable[..., list[Tensor]], operands: Sequence[Tensor]
) -> list[Tensor]:
    xs = operands[: len(operands) // 2]
    call = call.of(operands[len(xs) :])
    ys = formula(xs, call.norm, call.cos, call.sin, call.rows, call.fitted)
    return [y.to(x.dtype) for x, y in zip(xs, ys, strict=True)]


def _again(call: Call, ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients through the formula, which can be differentiated again."""
    operands, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        outs = _by_formula(call, ctx.formula, operands)
        chosen = [x for x, is_needed in zip(operands, needs, strict=True) if is_needed]
        pairs = [(y, g) for y, g in zip(outs, grads, strict=True) if g is not None]
        found = torch.autograd.grad(
            [y for y, _ in pairs], chosen, [g for _, g in pairs],
            create_graph=is_recorded, allow_unused=True,
        )  # fmt: skip
    known = iter(found)
    return [next(known) if is_needed else None for is_needed in needs]


def checked_rows(rows: Tensor | None, cos: Tensor) -> Tensor | None:
    """Row numbers as the loops read them; ValueError for one outside the table."""
    if rows is None:
        return None
    rows = check_rows(rows, cos).contiguous()
    if rows.numel():
        numbers = host_array(rows)
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(
                f"positions run from {low} to {high}, the tables have {cos.shape[0]} rows"
            )
    return rows
