"""Memory of torch tensors handed to a kernel: the loops on the host, Triton's on a GPU."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .geometry import Geometry
from .memory import Block
from .pages import ask_for_huge_pages
from .torch_formula import check_row_range, formula
from .torch_state import FLOATS, are_plain, is_on_gpu, is_on_host

loops: Any
try:
    from . import cpu as loops
except ImportError:  # without Numba the formula in torch operators rotates
    loops = None

_NAMES = {**FLOATS, torch.int64: "int64"}
_FIRST_CAPABILITY = (7, 0)  # what Triton compiles for


def launch(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Rotate by the kernel of the device that holds the tensors; by the formula where none can.

    On a GPU no row number is looked at, for that would wait for the device: one outside the tables
    gives NaN, by the kernel and by the formula.
    """
    if rows is not None and is_on_host(rows):
        check_row_range(rows, cos)
    indices = () if rows is None else (rows,)
    if cos.dtype == torch.float32 and are_plain((*xs, cos, sin, *indices, *(out or ()))):
        kernel = gpu_kernel(xs[0].device) if is_on_gpu(xs[0]) else None
        if kernel is not None and xs[0].dtype in kernel.DTYPES:
            return kernel.rotate(xs, cos, sin, rows, geometry, out)
        if not is_on_gpu(xs[0]) and loops is not None:
            return _loop(xs, cos, sin, rows, geometry, out)
    results = formula(xs, cos, sin, rows, geometry)
    for target, result in zip(out or (), results, strict=out is not None):
        target.copy_(result)
    return results if out is None else tuple(out)


@lru_cache
def gpu_kernel(device: torch.device) -> Any:
    """The kernel for a GPU; None where Triton is missing or does not compile for the device."""
    try:
        from . import triton
    except ImportError as error:
        reason = f"Triton cannot be loaded ({error})"
    else:
        if torch.version.hip or torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY:
            return triton
        reason = f"Triton does not compile for {torch.cuda.get_device_name(device)}"
    logging.getLogger("rotary").debug("%s: the formula in torch operators rotates", reason)
    return None


def is_for_gpu(tensors: Sequence[Tensor]) -> bool:
    """Whether the GPU kernel takes these, of which the first is to be rotated."""
    if not is_on_gpu(tensors[0]) or not are_plain(tensors):
        return False
    kernel = gpu_kernel(tensors[0].device)
    return kernel is not None and tensors[0].dtype in kernel.DTYPES


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
    call = loops.prepare(
        tuple(map(form, sources)),
        tuple(map(form, targets)),
        tuple(x.data_ptr() == y.data_ptr() for x, y in zip(sources, targets, strict=True)),
        form(cos),
        None if rows is None else form(rows),
        geometry,
    )
    loops.run(
        call,
        [x.data_ptr() for x in sources],
        [y.data_ptr() for y in targets],
        cos.data_ptr(),
        sin.data_ptr(),
        0 if rows is None else rows.data_ptr(),
    )
    for result, target in zip(results, targets, strict=True):
        if target is not result:
            result.copy_(target)
    return results


def form(x: Tensor) -> Block:
    """The form of the memory of a tensor."""
    strides = tuple([step * x.itemsize for step in x.stride()])
    return Block(tuple(x.shape), strides, _NAMES.get(x.dtype, str(x.dtype)))


def _contiguous_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised tensor in the memory order of x; a large one on huge pages."""
    return _on_huge_pages(torch.empty_like(x))


def empty_contiguous(x: Tensor) -> Tensor:
    """The same without regard to the order of x, as a fake tensor of the operator promises."""
    return _on_huge_pages(x.new_empty(x.shape))


def _on_huge_pages(x: Tensor) -> Tensor:
    if x.is_cpu:
        ask_for_huge_pages(x.data_ptr(), x.nbytes)
    return x


def mark_written(out: Sequence[Tensor]) -> None:
    """Tell autograd: a tensor it saved earlier and that was overwritten here must not be used."""
    known = [y for y in out if not y.is_inference()]
    if known:
        torch.autograd.graph.increment_version(known)
