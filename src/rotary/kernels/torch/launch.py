"""Rotates torch tensors: by the loops on a CPU, Triton's kernel on a GPU, or the formula.

The formula is torch's own operators. Kernels write memory, without gradients; `Differentiable`
gives them gradients of every order.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...layouts import pair_slices
from .. import numpy as reference
from ..geometry import Geometry, aligned
from ..memory import Block
from .pages import ask_for_huge_pages
from .private import constant
from .state import (
    CODES,
    FLOATS,
    INTEGERS,
    are_plain,
    host_array,
    host_values,
    is_on_gpu,
    is_on_host,
)

jobs: Any
try:
    from ..cpu import jobs
except ImportError:  # without Numba the formula in torch operators rotates
    jobs = None

_NAMES = FLOATS | CODES | {kind: str(kind).removeprefix("torch.") for kind in INTEGERS}
_FIRST_CAPABILITY = (7, 0)  # what Triton compiles for


def launch(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Rotate by the kernel of the tensors' device, or by the formula if no kernel can.

    On a GPU row numbers are not checked, because that would wait for the device: one outside the
    tables gives NaN, by the kernel and by the formula.
    """
    if rows is not None and is_on_host(rows):
        check_row_range(rows, cos)
    indices = () if rows is None else (rows,)
    if cos.dtype == torch.float32 and are_plain((*xs, cos, sin, *indices, *(out or ()))):
        if is_on_gpu(xs[0]):
            if has_kernel(xs[0].device, xs[0].dtype):
                kernel = gpu_kernel(xs[0].device)
                return kernel.rotate(xs, cos, sin, rows, geometry, out)
        elif jobs is not None:
            return _loop(xs, cos, sin, rows, geometry, out)
    results = formula(xs, cos, sin, rows, geometry)
    if out is None:
        return results
    for target, result in zip(out, results, strict=True):
        target.copy_(result)
    return tuple(out)


@lru_cache
def gpu_kernel(device: torch.device) -> Any:
    """Return the kernel for a GPU; None if Triton is missing or does not compile for it."""
    try:
        from ..triton import kernel as triton
    except ImportError as error:
        reason = f"Triton cannot be loaded ({error})"
    else:
        if torch.version.hip or torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY:
            return triton
        reason = f"Triton does not compile for {torch.cuda.get_device_name(device)}"
    logging.getLogger("rotary").debug("%s: the formula in torch operators rotates", reason)
    return None


def is_for_gpu(tensors: Sequence[Tensor]) -> bool:
    """Whether the GPU kernel takes these tensors, of which the first is x."""
    x = tensors[0]
    return is_on_gpu(x) and are_plain(tensors) and has_kernel(x.device, x.dtype)


@constant
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU has a kernel that takes a dtype; a constant for torch.compile."""
    kernel = gpu_kernel(device)
    return kernel is not None and dtype in kernel.DTYPES


def _loop(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    results = tuple(map(empty_like, xs)) if out is None else tuple(out)
    sources = [_contiguous_last(x) for x in xs]
    is_mixed = geometry.layout != geometry.out_layout
    targets = [
        empty_contiguous(y)
        if _contiguous_last(y) is not y or (is_mixed and x.data_ptr() == y.data_ptr())
        else y
        for x, y in zip(xs, results, strict=True)
    ]
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    call = jobs.call_of(
        tuple(map(form, sources)),
        tuple(map(form, targets)),
        tuple(x.data_ptr() == y.data_ptr() for x, y in zip(sources, targets, strict=True)),
        form(cos),
        None if rows is None else form(rows),
        geometry,
    )
    addresses = [(x.data_ptr(), y.data_ptr()) for x, y in zip(sources, targets, strict=True)]
    jobs.run(
        call, addresses, cos.data_ptr(), sin.data_ptr(), 0 if rows is None else rows.data_ptr()
    )
    for result, target in zip(results, targets, strict=True):
        if target is not result:
            result.copy_(target)
    return results


def form(x: Tensor) -> Block:
    """Return the shape, strides in bytes and dtype of a tensor."""
    strides = tuple([step * x.itemsize for step in x.stride()])
    return Block(tuple(x.shape), strides, _NAMES.get(x.dtype, str(x.dtype)))


def _contiguous_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """Return an uninitialized tensor in the memory order of x; a large one on huge pages."""
    return on_huge_pages(torch.empty_like(x))


def empty_contiguous(x: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor, as the operator's fake tensor is."""
    return on_huge_pages(x.new_empty(x.shape))


def on_huge_pages(x: Tensor) -> Tensor:
    if x.is_cpu:
        ask_for_huge_pages(x.data_ptr(), x.nbytes)
    return x


def mark_written(out: Sequence[Tensor]) -> None:
    """Tell autograd that these were overwritten: if it saved one, backward raises an error."""
    tracked = [y for y in out if not y.is_inference()]
    if tracked:
        torch.autograd.graph.increment_version(tracked)


# --- the formula ---


def formula(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
) -> tuple[Tensor, ...]:
    """Rotate by torch's own operators; the formula of `kernels/numpy.py`.

    It runs on every device and under every transform, and has all gradients. Returns new tensors.
    """
    if rows is not None:
        cos, sin = _picked(cos, rows), _picked(sin, rows)
    return by_operators(xs, cos, sin, geometry)


def by_operators(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, geometry: Geometry
) -> tuple[Tensor, ...]:
    """Rotate by tables with one row for each token; `geometry` says how they broadcast to xs."""
    cos, sin = aligned(cos, geometry.dims), aligned(sin, geometry.dims)
    sin = -sin if geometry.conjugate else sin
    rotary_dim = 2 * geometry.pairs
    stop = geometry.start + rotary_dim
    results = []
    for x in xs:
        wide = x if x.dtype == torch.float64 else x.float()
        first, second = pair_slices(rotary_dim, geometry.layout, geometry.start)
        u, v = wide[..., first], wide[..., second]
        one, other = u * cos - v * sin, v * cos + u * sin
        if geometry.out_layout == "half":
            turned = torch.cat((one, other), dim=-1)
        else:
            # `flatten` has no rule for gradients in batches (`is_grads_batched`)
            turned = torch.stack((one, other), dim=-1).reshape(*one.shape[:-1], rotary_dim)
        turned = turned.to(x.dtype)
        if rotary_dim < x.shape[-1]:
            turned = torch.cat((x[..., : geometry.start], turned, x[..., stop:]), dim=-1)
        results.append(turned)
    return tuple(results)


def check_row_range(rows: Tensor, table: Tensor) -> None:
    """ValueError for a row number outside the table; `rows` are plain and on the host."""
    reference.check_rows(host_array(rows), range(table.shape[0]))


def _picked(table: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a table; NaN for rows outside, if their numbers cannot be read now."""
    numbers = host_values(rows)
    if numbers is None:
        is_inside = (rows >= 0) & (rows < table.shape[0])
        return torch.where(is_inside[..., None], table[rows * is_inside], torch.nan)
    check_row_range(numbers, table)
    return table[rows]


# --- autograd ---


class Differentiable(torch.autograd.Function):
    """A rotation under autograd. Its gradient is the rotation back, so it only saves `angles`.

    `run(xs)` rotates; `back(grads, angles)` rotates back, with gradients. `angles` are tensors.
    """

    @staticmethod
    def forward(ctx, run, back, angles, *xs):
        ctx.back = back
        ctx.save_for_backward(*angles)
        ctx.set_materialize_grads(False)
        return run(xs)

    @staticmethod
    def backward(ctx, *grads):
        present = [grad for grad in grads if grad is not None]
        turned = ctx.back(present, ctx.saved_tensors) if present else ()
        if len(present) < len(grads):
            rotated = iter(turned)
            turned = [None if grad is None else next(rotated) for grad in grads]
        return None, None, None, *turned


# `Differentiable.apply` without its search for torch.func transforms, 2 us of 6; only for tensors
# that are known to be in none
differentiable = super(torch.autograd.Function, Differentiable).apply
