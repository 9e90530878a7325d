"""A fused call on torch tensors by the compiled loops, and its gradients."""

# mypy: disable-error-code="misc, no-untyped-call, no-untyped-def"

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cpu import fused_jobs as jobs
from ..memory import Block
from ..stages import (
    Fit,
    KVCache,
    LatentCache,
    Norm,
    check_cache,
    check_slots,
    slot_shape,
    weight_form,
)
from .checks import check_rows
from .launch import check_row_range, empty_like, form, launch
from .state import FLOATS, host_array


class Call(NamedTuple):
    """A fused call on q and perhaps k, without the tensors that get gradients."""

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
    return _run(call, pieces_of(call, (*xs, None)[:2], outs, None))


def stored(
    call: Call, q: Tensor, k: Tensor, v: Tensor | None, out: Tensor, cache: KVCache | LatentCache
) -> bool:
    """q to `out`, k and v to their slots; False, and nothing written, where the loops cannot."""
    slots = torch.as_tensor(cache.slots).long().contiguous()
    return _run(call, pieces_of(call, (q, k, v), (out,), replace(cache, slots=slots)))


Made = tuple[jobs.Piece, jobs.Memory, object]  # and what has to live until it is done


def pieces_of(
    call: Call, xs: Sequence[Tensor | None], outs: Sequence[Tensor],
    cache: KVCache | LatentCache | None,
) -> list[Made] | None:  # fmt: skip
    """The work of the loops on q, k and perhaps v: all to `outs`, or k and v to a cache.

    ValueError for a cache or slots, contiguous int64, that do not fit.
    """
    made = [
        _piece(call, index, x, y)
        for index, (x, y) in enumerate(zip(xs, outs, strict=False)) if x is not None
    ]  # fmt: skip
    if cache is None:
        return made
    _, k, v = xs
    slots = cache.slots
    slot_shape(tuple(slots.shape), call.fitted.tokens)
    numbers = host_array(slots)
    low, high = (int(numbers.min()), int(numbers.max())) if numbers.size else (-1, -1)
    assert k is not None
    for index, (name, x, target, row) in enumerate(_targets(call, k, v, cache)):
        shape = tuple(target.shape)
        block = check_cache(name, shape, row)
        check_slots(low, high, shape, block)
        if target.dtype != x.dtype:
            return None
        made.append(_piece(call, index + 1, x, target, (slots, block)))
    return made


def _targets(
    call: Call, k: Tensor, v: Tensor | None, cache: KVCache | LatentCache
) -> list[tuple[str, Tensor, Tensor, tuple[int, ...]]]:
    """The writes to a cache, each as (name, values, target, shape of a token in the target)."""
    if isinstance(cache, LatentCache):
        assert v is not None
        latent, width = v.shape[-1], v.shape[-1] + k.shape[-1]
        values, keys = cache.rows.split([latent, width - latent], dim=-1)
        return [("k", k, keys, (k.shape[-1],)), ("v", v, values, (latent,))]
    axis = call.fitted.head_axis
    heads = 1 if axis is None else k.shape[axis]
    pairs = [("k", k, cache.k)] if v is None else [("k", k, cache.k), ("v", v, cache.v)]
    return [(name, x, target, (heads, x.shape[-1])) for name, x, target in pairs]


def _run(call: Call, made: list[Made] | None) -> bool:
    if made is None:
        return False
    pieces, memories, alive = zip(*made, strict=True)
    table, rows, places = call.table()
    eps = 0.0 if call.norm is None else call.norm.eps
    known = jobs.call_of(pieces, table, rows, eps)
    is_done = known is not None and jobs.run(known, memories, places, False)
    del alive
    return is_done


def _piece(
    call: Call, index: int, x: Tensor, out: Tensor, to: tuple[Tensor, int | None] | None = None
) -> Made:
    fitted, weight, name = call.fitted, call.weight(index), "qkv"[index]
    geometry = fitted.geometries[index] if index < 2 else None
    is_latent = index == 2 and x.ndim == len(fitted.tokens) + 1
    head_axis = None if is_latent else fitted.head_axis
    known, slots, taken = None, None, None
    if weight is not None and call.norm is not None:
        heads = 1 if head_axis is None else x.shape[head_axis]
        rows, is_full = weight_form(name, tuple(weight.shape), heads, x.shape[-1])
        weight = weight.detach()
        weight = (weight if weight.dtype in FLOATS else weight.float()).contiguous()
        is_full = is_full and heads > 1
        known = jobs.Weight(FLOATS[weight.dtype], rows[0], is_full, call.norm.add_one)
    if to is not None:
        slots, block = to
        taken = jobs.Slots(form(out).strides[:2], block)
    is_in_place = x.data_ptr() == out.data_ptr()
    piece = jobs.Piece(form(x), form(out), geometry, head_axis, known, taken, is_in_place)
    places = [0 if each is None else each.data_ptr() for each in (x, out, weight, slots)]
    return piece, jobs.Memory(*places), (weight, slots)


class Differentiable(torch.autograd.Function):
    """q and k, each with its weight or None, to new tensors; the gradients by the same loops.

    Only the operands are kept. `formula` computes it where the loops cannot take the tensors, and
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
    if weight is None:
        back = call.fitted.geometries[index].reversed()
        turned = launch((grad,), call.cos, call.sin, call.rows, back, None)
        return turned[0], None
    assert call.norm is not None
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    result = empty_like(x)
    piece, memory, alive = _piece(call, index, x, result)
    given = form(grad), grad.data_ptr()
    gains = jobs.run_back(piece, memory, given, call.norm.eps, *call.table())
    del alive
    if gains is None:
        return None
    return result, torch.from_numpy(gains).reshape(weight.shape).to(weight.dtype)


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
    check_row_range(rows, cos)
    return rows
