"""Describes where the GPU kernel finds cosines and sines: tables, or turns and positions."""

from typing import NamedTuple

from torch import Tensor

from ..geometry import Geometry
from .plan import Angles


class Source(NamedTuple):
    """Tables of cosines and sines, or turns that the kernel multiplies by positions.

    limit   the number of rows of tables that are indexed
    factor  multiplies cos and sin made from turns
    """

    memory: tuple[Tensor, Tensor, Tensor]  # cos and sin, or turns twice; then row numbers, if any
    angles: Angles
    limit: int
    factor: float


def from_tables(cos: Tensor, sin: Tensor, rows: Tensor | None, geometry: Geometry) -> Source:
    """Return a source of tables that `are_walked_alike`; `rows` are whole numbers or None."""
    walked = cos if rows is None else rows
    step = 0 if rows is None else cos.stride(0)
    column = 1 if cos.shape[-1] == 1 else cos.stride(-1)
    angles = Angles(
        False, rows is not None, along(walked, geometry.dims), step,
        column=column, itemsize=cos.itemsize,
    )  # fmt: skip
    return Source((cos, sin, walked), angles, cos.shape[0], 1.0)


def from_turns(
    turns: Tensor, factor: float, positions: Tensor | None, geometry: Geometry
) -> Source:
    """Return a source of turns and positions, as `rotate_exact` takes them."""
    dims, axes = geometry.dims, 1 if turns.ndim == 1 else turns.shape[0]
    if positions is None:
        angles = Angles(True, False, (0,) * len(dims), 0, dims.index(0))
    else:
        step = positions.stride(-1) if axes > 1 else 0
        angles = Angles(True, True, along(positions, dims), step, None, axes)
    return Source((turns, turns, turns if positions is None else positions), angles, 0, factor)


def are_walked_alike(cos: Tensor, sin: Tensor) -> bool:
    """Whether both tables have the same strides, with columns side by side or every second one."""
    return cos.stride() == sin.stride() and cos.stride(-1) in (1, 2)


def along(tensor: Tensor, dims: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor along the axes of x; 0 if one row serves the whole axis."""
    return tuple([0 if d is None or tensor.shape[d] == 1 else tensor.stride(d) for d in dims])
