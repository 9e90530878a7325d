"""The reference formula in torch operators: any device, any transform, every gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layouts import pair_slices
from .geometry import Geometry
from .torch_state import host_array, host_values


def formula(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
) -> tuple[Tensor, ...]:
    """Every tensor of `xs` rotated, as `kernels/numpy.py` says; new tensors."""
    if rows is not None:
        cos, sin = _picked(cos, rows), _picked(sin, rows)
    cos, sin = _aligned(cos, geometry.dims), _aligned(sin, geometry.dims)
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
            turned = torch.stack((one, other), dim=-1).flatten(-2)
        turned = turned.to(x.dtype)
        if rotary_dim < x.shape[-1]:
            turned = torch.cat((x[..., : geometry.start], turned, x[..., stop:]), dim=-1)
        results.append(turned)
    return tuple(results)


def check_row_range(rows: Tensor, table: Tensor) -> None:
    """Refuse row numbers outside the tables; to be asked on the host only."""
    if not rows.numel():
        return
    numbers = host_array(rows)
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= table.shape[0]:
        raise ValueError(
            f"positions run from {low} to {high}, the tables have {table.shape[0]} rows"
        )


def _picked(table: Tensor, rows: Tensor) -> Tensor:
    numbers = host_values(rows)
    if numbers is None:
        return _picked_or_nan(table, rows)
    check_row_range(numbers, table)
    return table[rows]


def _picked_or_nan(table: Tensor, rows: Tensor) -> Tensor:
    """Rows of a table; NaN for one outside, where to look at numbers would wait or is too early."""
    is_inside = (rows >= 0) & (rows < table.shape[0])
    return torch.where(is_inside[..., None], table[rows * is_inside], torch.nan)


def _aligned(table: Tensor, dims: tuple[int | None, ...]) -> Tensor:
    order = [dim for dim in dims if dim is not None]
    kept = [None if dim is None else slice(None) for dim in dims]
    return table.permute(*order, table.ndim - 1)[(*kept, slice(None))]
