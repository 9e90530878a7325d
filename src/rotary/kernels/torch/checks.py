"""Checks torch tensors before their memory is read or written."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import NESTED, is_distributed
from .. import numpy as reference
from ..memory import check_overlap
from .launch import form
from .private import is_in_forward_mode, unmapped
from .state import (
    INTEGERS,
    as_tensor,
    has_memory,
    is_on_gpu,
    is_tracing,
    is_transforming,
    wants_grad,
)


def check_operands(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, out: Sequence[Tensor] | None
) -> None:
    """Refuse what cannot be rotated: dtypes, mixed libraries or devices, unusable `out`."""
    check_strided((cos, sin))
    for table in (cos, sin):
        check_device(table, xs[0])
    check_xs(xs, out)
    reference.check_tables(cos, sin, str(cos.dtype), str(sin.dtype))


def check_xs(xs: Sequence[Tensor], out: Sequence[Tensor] | None) -> None:
    """Refuse x and `out` that cannot be rotated, whatever the angles come from."""
    x = xs[0]
    check_strided((*xs, *(out or ())))
    for tensor in (*xs[1:], *(out or ())):
        check_device(tensor, x)
    reference.check_dtypes([str(tensor.dtype) for tensor in xs])
    if out is None:
        return
    if len(out) != len(xs):
        raise ValueError(f"out must hold {len(xs)} tensors, one for each input, got {len(out)}")
    for x, y in zip(xs, out, strict=True):
        reference.check_like("input", x, y)


def check_strided(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that are not strided: nested and sparse ones."""
    for x in tensors:
        check_plain(x)
        if x.layout is not torch.strided:
            raise TypeError(f"tensors must be dense, got {x.layout}: pass x.to_dense()")


def check_plain(x: Tensor) -> None:
    """Refuse a nested tensor."""
    if x.is_nested:
        raise TypeError(NESTED)


def check_device(tensor: Tensor, x: Tensor) -> None:
    """Refuse a tensor on another device than x, or distributed where x is not."""
    if type(tensor) is not type(x) and is_distributed(tensor):
        raise TypeError(
            "x is a plain tensor and another operand a DTensor: pass its to_local(), or wrap x by "
            "DTensor.from_local(x, mesh, placements)"
        )
    if tensor.device != x.device:
        raise ValueError(f"all tensors must be on one device: {x.device} and {tensor.device}")


def check_rows(positions: object, like: Tensor) -> Tensor:
    """Return row numbers as int64, or as int32 on a GPU, whose kernel reads both.

    Whether they are inside the table is checked when the table is read.
    """
    if isinstance(positions, Tensor):
        check_strided((positions,))
    rows = as_tensor("positions", positions, like)
    check_device(rows, like)
    if rows.dtype not in INTEGERS:
        raise TypeError(f"positions must be whole numbers to pick rows, got {rows.dtype}")
    is_read_as_it_is = rows.dtype == torch.int32 and is_on_gpu(rows)
    return rows if is_read_as_it_is else rows.long()


def slots_of(slots: object, like: Tensor) -> Tensor:
    """Return the slots of a cache on the device of `like`; TypeError if not whole numbers."""
    numbers = as_tensor("slots", slots, like)
    if numbers.dtype not in INTEGERS:
        raise TypeError(f"slots must be whole numbers, got {numbers.dtype}")
    return numbers


def check_no_grad(inputs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Refuse `out` if autograd would have to record the call."""
    inputs, out = [[unmapped(x) for x in each] for each in (inputs, out)]
    if wants_grad(*inputs, *out):
        raise RuntimeError(
            "out= does not take part in autograd: call it under torch.no_grad(), or without out="
        )
    if is_in_forward_mode() and any(map(_has_tangent, (*inputs, *out))):
        raise RuntimeError("out= does not take part in forward-mode autograd: call it without out=")


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def check_writable(inputs: Sequence[Tensor], out: Sequence[Tensor], in_place: bool = True) -> None:
    """Refuse outputs that must not be written, or that share memory with what is still read.

    If `in_place`, an output may be the input at its index.
    """
    if all(map(has_memory, (*inputs, *out))):
        check_memory(inputs, out, in_place)
    else:
        check_no_inference(out)


def check_memory(inputs: Sequence[Tensor], out: Sequence[Tensor], in_place: bool = True) -> None:
    """Do the same for tensors that all have memory."""
    check_no_inference(out)
    both = [[(x.data_ptr(), form(x)) for x in group] for group in (inputs, out)]
    check_overlap(both[0], both[1], in_place)


def check_no_inference(out: Sequence[Tensor]) -> None:
    """Refuse to write inference tensors where autograd could have seen them."""
    for y in out:
        if y.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError("out is an inference tensor: write to it under inference_mode only")


def check_outputs(
    results: Sequence[Tensor], inputs: Sequence[Tensor], out: Sequence[Tensor]
) -> None:
    """Refuse outputs that are not like the results, or share memory with what is read."""
    if len(out) != len(results):
        raise ValueError(
            f"out must hold {len(results)} arrays, one for each result, got {len(out)}"
        )
    for result, y in zip(results, out, strict=True):
        reference.check_like("result", result, y)
    check_separate(inputs, out)


def check_separate(inputs: Sequence[Tensor], out: Sequence[Tensor], in_place: bool = True) -> None:
    """Do what `check_writable` does, faster if every tensor has a storage of its own.

    Nothing is checked while torch.compile records the call, and inside transforms such as vmap.
    """
    if is_tracing() or (is_transforming() and not all(map(has_memory, (*inputs, *out)))):
        return
    tensors = [*inputs, *out]
    storages = [x.untyped_storage() for x in tensors]  # two may share memory that NumPy made
    spans = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
    for index, (low, high) in enumerate(spans[len(inputs) :]):
        for other, (first, last) in enumerate(spans[: len(inputs) + index]):
            is_own = in_place and other == index and tensors[other] is out[index]
            if low < last and first < high and not is_own:
                check_writable(inputs, out, in_place)
                return
    check_no_inference(out)


def check_storage(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that reach beyond their memory, as after `untyped_storage().resize_(0)`."""
    for x in filter(has_memory, tensors):
        last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
        end = (x.storage_offset() + last + 1) * x.itemsize
        if x.numel() and end > x.untyped_storage().nbytes():
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} ends at byte {end} of a storage that has "
                f"{x.untyped_storage().nbytes()}: it was released or made smaller"
            )
