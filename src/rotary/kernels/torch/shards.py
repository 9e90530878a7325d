"""Finds the part of a DTensor, and of its tables, that this rank holds; checks placements."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..memory import dense_strides
from .state import is_tracing, wants_grad

Spans = Sequence[tuple[int, int]]  # for every axis: the first index on this rank, and how many


def spans_of(x: DTensor) -> Spans:
    """Return the indices along every axis that this rank holds, split as by torch.chunk."""
    spans = [(0, size) for size in x.shape]
    coordinate: Any = x.device_mesh.get_coordinate()  # callers checked it is not None
    for index, placement in enumerate(x.placements):
        if type(placement) is Shard:
            first, size = spans[placement.dim]
            step = -(-size // x.device_mesh.size(index))
            skipped = min(step * coordinate[index], size)
            spans[placement.dim] = first + skipped, min(step, size - skipped)
    return spans


def shard_of(x: DTensor, spans: Spans) -> Tensor:
    """Return the local tensor; ValueError if its shape is not what the placements say."""
    shard = x.to_local()
    size = tuple([count for _, count in spans])
    if tuple(shard.shape) != size:
        raise ValueError(
            f"this rank holds {tuple(shard.shape)} of a DTensor {tuple(x.shape)}, its placements "
            f"say {size}: pass shape= and stride= to DTensor.from_local"
        )
    return shard


def wrapped(shard: Tensor, like: DTensor, shape: Sequence[int] | None = None) -> DTensor:
    """Wrap a shard as a DTensor with the placements of `like`; `shape` if the whole differs."""
    whole = like.shape if shape is None else torch.Size(shape)
    order: Sequence[int] = range(len(whole))
    if shape is None and not is_tracing() and not like.is_contiguous():
        steps = list(zip(shard.stride(), like.stride(), strict=True))
        order = sorted(order, key=lambda axis: steps[axis], reverse=True)
    stride = dense_strides(whole, order, 1)
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=whole, stride=stride)


def share_of(
    name: str, table: Tensor, x: DTensor, spans: Spans, dims: Sequence[int | None]
) -> Tensor:
    """Return the part of a table, or of positions, for the shard of x; `dims` as in `Geometry`.

    A plain tensor is the whole, the same on every rank; a DTensor must be split as x is, or whole.
    """
    held: Spans = [(0, size) for size in table.shape]
    if isinstance(table, DTensor):
        _check_alongside(name, table, x, dims)
        held = spans_of(table)
        share = _local_table(table, x)
    else:
        if wants_grad(table):
            raise ValueError(
                f"{name} requires a gradient, which is a sum over ranks: pass it as "
                "DTensor.from_local(table, mesh, [Replicate()] * mesh.ndim)"
            )
        share = table
    for (first, count), size, dim in zip(spans, x.shape, dims, strict=False):
        if dim is not None and table.shape[dim] == size and held[dim] != (first, count):
            share = share.narrow(dim, first - held[dim][0], count)
    return share


def _local_table(table: DTensor, x: DTensor) -> Tensor:
    if not wants_grad(table):
        return table.to_local()
    grads: list[Placement] = [
        own if type(own) is Shard else Partial() if type(other) is Shard else Replicate()
        for own, other in zip(table.placements, x.placements, strict=True)
    ]
    return table.to_local(grad_placements=grads)


# --- checks ---


def check_alike(name: str, x: DTensor, other: DTensor) -> None:
    """Refuse operands on different meshes."""
    if other.device_mesh != x.device_mesh:
        raise ValueError(
            f"x and {name} must be on one mesh, got {x.device_mesh} and {other.device_mesh}"
        )


def check_placements(name: str, x: DTensor, stop: int) -> None:
    """Refuse anything but replicas and shards along the first `stop` axes."""
    right: list[Placement] = [
        each if _is_known(each, stop) else Replicate() for each in x.placements
    ]
    for placement in x.placements:
        if _is_known(placement, stop):
            continue
        if isinstance(placement, Partial):
            reason = "is a partial sum, which is not yet reduced over ranks"
        elif type(placement) is Shard:
            reason = "is sharded along its last axis, so that no rank holds all of a row"
        else:
            reason = "has a placement that is not supported"
        raise ValueError(
            f"{name} {reason}, {placement!r}: call {name}.redistribute(placements={shown(right)})"
        )


def cuts(x: DTensor, dim: int) -> list[int]:
    """Return the mesh axes over which an axis is sharded."""
    return [i for i, own in enumerate(x.placements) if type(own) is Shard and own.dim == dim]


def shown(placements: Sequence[Placement]) -> str:
    """Return placements as source code."""
    return f"[{', '.join(map(repr, placements))}]"


def _is_known(placement: Placement, stop: int) -> bool:
    return type(placement) is Replicate or (type(placement) is Shard and placement.dim < stop)


def _check_alongside(name: str, table: DTensor, x: DTensor, dims: Sequence[int | None]) -> None:
    """Refuse a table if a rank would lack its rows for the shard of x."""
    check_alike(name, x, table)
    check_placements(name, table, table.ndim)
    for dim in range(table.ndim):
        along = [axis for axis, other in enumerate(dims) if other == dim]
        is_along = bool(along) and table.shape[dim] == x.shape[along[0]]
        own, of_x = cuts(table, dim), cuts(x, along[0]) if is_along else []
        if own != of_x[: len(own)]:
            right = [_alongside(each, table, x, dims) for each in x.placements]
            raise ValueError(
                f"{name} is {shown(table.placements)} and x {shown(x.placements)}, so a rank would "
                f"miss rows: call {name}.redistribute(placements={shown(right)})"
            )


def _alongside(
    placement: Placement, table: DTensor, x: DTensor, dims: Sequence[int | None]
) -> Placement:
    dim = dims[placement.dim] if type(placement) is Shard else None
    is_along = dim is not None and table.shape[dim] == x.shape[placement.dim]  # type: ignore[attr-defined]
    return Shard(dim) if is_along else Replicate()  # type: ignore[arg-type]
