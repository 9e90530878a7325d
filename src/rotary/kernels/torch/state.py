"""Tells whether a torch tensor is plain memory to read and write, or is tracked by torch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...words import brief
from .. import Numbers
from .. import numpy as reference
from ..memory import Block, array_at
from .private import (
    constant,
    count_of_modes,
    is_in_forward_mode,
    is_in_make_fx,
    is_in_old_vmap,
    is_mapped,
    is_tracing_by_jit,
    is_wrapped,
    is_zerotensor,
    level_of_transforms,
    unwrapped,
)

FLOATS: dict[torch.dtype, str] = {getattr(torch, name): name for name in reference.FLOATS}
CODES: dict[torch.dtype, str] = {getattr(torch, name): name for name in reference.CODES}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
UNSIGNED = (torch.uint16, torch.uint32)  # torch computes with neither; both fit in int64
TENSORS = (Tensor, torch.nn.Parameter)
is_recorded_by_dynamo = torch.compiler.is_dynamo_compiling


def is_tracing() -> bool:
    """Whether torch.compile or torch.export is recording this call."""
    return torch.compiler.is_compiling()


def is_recording() -> bool:
    """Whether this call is recorded, also by jit.trace or make_fx: later values may differ."""
    return is_tracing() or is_tracing_by_jit() or is_in_make_fx()


def is_tracing_a_transform() -> bool:
    """Whether torch.compile records a call inside vmap, grad, or jvp."""
    return is_tracing() and _is_in_a_transform()


@constant
def _is_in_a_transform() -> bool:  # Dynamo enters a transform when it records one
    return level_of_transforms() is not None or is_in_forward_mode()


def is_in_vmap(tensors: Sequence[Tensor]) -> bool:
    """Whether vmap has batched one of these, also while torch.compile records the call."""
    return is_tracing_a_transform() if is_tracing() else any(map(is_mapped, tensors))


def is_transforming() -> bool:
    """Whether a functorch transform, forward mode, a dispatch mode or torch.jit.trace is active."""
    return (
        is_tracing_by_jit()
        or level_of_transforms() is not None
        or is_in_forward_mode()
        or count_of_modes() > 0
    )


def is_watched() -> bool:
    """Whether a compiler records this call, or a transform, mode or trace is active."""
    return is_tracing() or is_transforming()


def wants_grad(*tensors: Tensor) -> bool:
    """Whether autograd needs the gradient of results that are computed from these."""
    return torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])


def is_on_gpu(x: Tensor) -> bool:
    """Whether a tensor is on a CUDA or ROCm device; torch calls both "cuda"."""
    return x.is_cuda


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is captured: what is computed now on a GPU is there when it runs."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def is_lazy(x: Tensor) -> bool:
    """Whether the values of x are not its bytes: a view yet to be negated, zeros without memory."""
    return x.is_neg() or is_zerotensor(x)


def has_memory(x: Tensor) -> bool:
    """Whether the values of a tensor are bytes at its address, on the host or on a GPU."""
    return (
        type(x) in TENSORS
        and (x.is_cpu or is_on_gpu(x))
        and not is_lazy(x)
        and x.layout is torch.strided
        and not is_wrapped(x)
        and not is_in_old_vmap(x)
    )


def is_on_host(x: Tensor) -> bool:
    """Whether the values of a tensor can be read without waiting for a device."""
    return has_memory(x) and not is_on_gpu(x)


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all have memory, on one device, and no transform, mode or trace is active."""
    if is_transforming() or not all(map(has_memory, tensors)):
        return False
    device = tensors[0].device
    return all([tensor.device == device for tensor in tensors])


def host_values(x: Tensor) -> Tensor | None:
    """Return the values of x as a plain tensor on the host, also inside vmap and grad; else None.

    While a program is recorded it is None, because the program will run with other values.
    """
    if is_recording():
        return None
    value = unwrapped(x)
    return value if value is not None and is_on_host(value) else None


def as_tensor(name: str, values: object, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor as it is, and a list or a NumPy array as a copy beside `like`.

    A copy, because autograd does not see that a caller overwrites an array, and torch takes none
    with negative strides. An empty list holds whole numbers. Unsigned types become int64, because
    torch computes with none of them but uint8; ValueError for numbers that are too large for that.
    """
    if isinstance(values, Tensor):
        result = torch.as_tensor(values, dtype=dtype, device=like.device)
        return result.long() if result.dtype in UNSIGNED else result
    if isinstance(values, np.ndarray) and not is_tracing():  # Dynamo does not know NumPy dtypes
        values = _native(name, values)
    try:
        result = torch.as_tensor(values, dtype=dtype, device=like.device)
    except (RuntimeError, TypeError, ValueError):
        kind = "numbers" if dtype is not None else "whole numbers"
        raise TypeError(f"{name} must be an array of {kind}, got {brief(values)}") from None
    is_empty_list = isinstance(values, (list, tuple)) and not result.numel() and dtype is None
    return result.long() if is_empty_list else result


def _native(name: str, array: Numbers) -> Numbers:
    kind = array.dtype.newbyteorder("=")
    if kind.kind == "u":
        largest = array.max(initial=0)
        if largest >= 2**63:
            raise ValueError(f"{name} must fit in int64, got {largest}")
        kind = np.dtype(np.int64)
    return array.astype(kind, order="C")


def host_array(x: Tensor) -> Numbers:
    """Return the memory of a plain tensor on the host as a NumPy array; do not write to it.

    >>> host_array(torch.arange(3))
    array([0, 1, 2])
    """
    if not is_transforming():
        return x.detach().numpy()
    strides = tuple([x.itemsize * step for step in x.stride()])
    block = Block(tuple(x.shape), strides, str(x.dtype).removeprefix("torch."))
    return array_at(x.data_ptr(), block, block.dtype, x)  # a transform would see an operator
