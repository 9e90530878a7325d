"""Computes how the shapes of the arrays of one rotation fit together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..words import brief
from .private import is_recorded_by_torch

Table = TypeVar("Table", bound=Any)  # an array of any library


class Options(NamedTuple):
    """The arguments of `rotate` that name channels and axes of x, given or taken from the spec.

    `head_dim` is that of the spec, None without a spec; `seq_dim` is None if the caller did not
    give it. For a rotation back, the layouts are already exchanged; `conjugate` only negates the
    angles.
    """

    layout: str = "half"
    out_layout: str | None = None
    rotary_dim: int | None = None
    start: int = 0
    seq_dim: int | None = -2
    head_dim: int | None = None
    conjugate: bool = False


@dataclass(frozen=True, eq=False)
class Angles:
    """The turns that positions are multiplied by, the same for all rows.

    turns   (pairs,) uint64: 2^64 for one turn per token
    scale   multiplies cos and sin: the attention factor
    axes    of positions, one per pair; empty if there is one axis
    lowest  the smallest position that is not refused
    """

    turns: npt.NDArray[np.uint64]
    scale: float
    axes: tuple[int, ...]
    lowest: int


class AngleOptions(NamedTuple):
    """Options of a rotation at positions, without tables."""

    options: Options
    form: tuple[Any, ...]  # what the angles depend on: spec, seq_len, allow_negative
    angles_of: Callable[[Any], Angles]  # form -> angles


class Geometry(NamedTuple):
    """Which channels are rotated, and which axis of a table belongs to which axis of x.

    `dims` has one entry per axis of x but the last: the axis of cos and sin (or, for an indexed
    table, of `rows`) that runs along it, or None where one table row serves the whole axis. With
    `conjugate` the rotation is by minus the angles.
    """

    start: int
    pairs: int
    layout: str
    out_layout: str
    dims: tuple[int | None, ...]
    conjugate: bool = False

    def reversed(self) -> "Geometry":
        """Return the geometry of the rotation back: minus the angles, layouts exchanged."""
        start, pairs, layout, out_layout, dims, conjugate = self
        return Geometry(start, pairs, out_layout, layout, dims, not conjugate)


def geometry_of(
    shapes: tuple[tuple[int, ...], ...],
    table: tuple[int, ...],
    rows: tuple[int, ...] | None,
    options: Options,
) -> Geometry:
    """Apply `options` to arrays of these shapes; ValueError if they do not fit.

    shapes  of the arrays rotated together
    table   the shape of cos and sin;  rows  the shape of the row numbers, or None

    >>> geometry_of(((2, 8, 5, 64),), (5, 32), None, Options()).dims
    (None, None, 0)
    """
    layout, out_layout, _, start, seq_dim, head_dim, conjugate = options
    out_layout = layout if out_layout is None else out_layout
    shape = shapes[0]
    axis = seq_axis(shape, seq_dim)
    others = [index for index in range(len(shape) - 1) if index != axis]
    if head_dim is not None and head_dim != shape[-1]:
        raise ValueError(
            f"the last axis of x must be head_dim={head_dim} of the spec, got {shape[-1]}"
        )
    for other in shapes[1:]:
        fixed = [index for index in range(len(shape)) if index not in others[-1:]]
        if len(other) != len(shape) or any(other[index] != shape[index] for index in fixed):
            listed = " and ".join(map(str, shapes))
            raise ValueError(
                "arrays rotated together, such as q and k, may differ in the number of heads "
                f"only, got shapes {listed}{_other_axis_hint(shapes, axis)}"
            )
    pairs = _pairs(shape[-1], table, options)
    if rows is not None and len(table) != 2:
        raise ValueError(f"with positions, cos and sin must be (rows, pairs), got {table}")
    along = table[:-1] if rows is None else rows
    dims = _table_axes(len(shape) - 1, axis, others, along)
    name = "cos" if rows is None else "positions"
    for each in shapes:
        for index, dim in enumerate(dims):
            if dim is None or along[dim] == each[index] or (along[dim] == 1 and index != axis):
                continue
            hint = ""
            if index == axis == len(each) - 2 > 0 and along[dim] == each[-3]:
                hint = "; for (..., seq, heads, head_dim) pass seq_dim=-3"
            elif rows is None and index == axis:
                hint = "; pass positions to pick rows of a longer table"
            elif rows == each[:1]:
                hint = "; for one position per row of the batch pass positions[:, None]"
            elif rows is not None and len(rows) == 2 and rows[0] == each[axis]:
                hint = f"; positions with {rows[1]} axes need a spec that has axes="
            raise ValueError(
                f"{name} of shape {table if rows is None else rows} does not fit x of shape {each} "
                f"with seq_dim={axis - len(each)}: {along[dim]} against {each[index]}{hint}"
            )
    if seq_dim is None and len(along) < len(shape) - 1 and _is_ambiguous(shapes):
        raise ValueError(
            f"x of shape {shape} has {shape[-2]} heads or tokens on axis -3 and as many on axis "
            "-2: pass seq_dim=-2 for (..., heads, seq, head_dim), seq_dim=-3 for (..., seq, "
            "heads, head_dim)"
        )
    return Geometry(start, pairs, layout, out_layout, dims, conjugate)


def geometry_of_arrays(
    xs: Sequence[Table], table: Table, rows: Table | None, options: Options
) -> Geometry:
    """Return `geometry_of` the shapes of arrays of any library; `rows` may be None."""
    shapes = tuple([tuple(x.shape) for x in xs])
    return geometry_of(
        shapes, tuple(table.shape), None if rows is None else tuple(rows.shape), options
    )


def aligned(table: Table, dims: tuple[int | None, ...]) -> Table:
    """Return a table, of an array library, with the axes of x; `dims` as in `Geometry`.

    >>> aligned(np.ones((5, 4)), (None, 0)).shape
    (1, 5, 4)
    """
    order = [dim for dim in dims if dim is not None]
    kept = [None if dim is None else slice(None) for dim in dims]
    transposed = getattr(table, "permute", table.transpose)(*order, table.ndim - 1)  # of torch
    return transposed[(*kept, slice(None))]


def check_fit(
    geometry: Geometry,
    shapes: Sequence[Sequence[int]],
    table: Sequence[int],
    rows: Sequence[int] | None,
) -> None:
    """Refuse arrays that do not fit a geometry, before it is used to address their memory.

    >>> check_fit(Geometry(0, 2, "half", "half", (0,)), [(3, 4)], (3, 2), None)
    """
    along = table[:-1] if rows is None else rows
    stop = geometry.start + 2 * geometry.pairs
    for shape in shapes:
        sizes = zip(shape[:-1], geometry.dims, strict=False)
        if (
            len(shape) != len(geometry.dims) + 1
            or table[-1] != geometry.pairs
            or geometry.pairs < 1
            or not 0 <= geometry.start <= stop <= shape[-1]
            or any(dim is not None and along[dim] not in (size, 1) for size, dim in sizes)
        ):
            raise ValueError(
                f"x {tuple(shape)}, cos {tuple(table)} and positions {rows} do not fit {geometry}"
            )


def seq_axis(shape: tuple[int, ...], seq_dim: int | None) -> int:
    """Return `seq_dim` (None: -2) counted from the front.

    Raises TypeError if it is not a whole number, ValueError if x has no such axis.

    >>> seq_axis((2, 8, 5, 64), -2)
    2
    """
    if len(shape) < 2:
        raise ValueError(f"x must be (..., seq, head_dim), with 2 axes or more, got shape {shape}")
    seq_dim = -2 if seq_dim is None else seq_dim
    if not isinstance(seq_dim, (int, np.integer)):
        raise TypeError(f"seq_dim must be a whole number, as -2, got {brief(seq_dim)}")
    axis = seq_dim if seq_dim >= 0 else len(shape) + seq_dim
    if not 0 <= axis < len(shape) - 1:
        raise ValueError(
            f"seq_dim={seq_dim} is not an axis before the last of x, which has shape {shape}"
        )
    return axis


def _is_ambiguous(shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether tables fit axis -2 and axis -3, and the numbers of heads do not decide which.

    Sizes that are symbols of torch.compile or torch.export count as different: comparing them
    would compile a call for each number of tokens.
    """
    is_known: Callable[[bool], bool] = bool
    if is_recorded_by_torch():
        from torch.fx.experimental.symbolic_shapes import statically_known_true as is_known
    shape = shapes[0]
    return (
        is_known(shape[-3] == shape[-2])
        and shape[-2] > 1
        and all(is_known(other[-3] == shape[-3]) for other in shapes[1:])
    )


def _other_axis_hint(shapes: tuple[tuple[int, ...], ...], axis: int) -> str:
    """Advice in an error about arrays that differ only in the axis before the last; else ""."""
    is_heads_last = all(
        len(shape) == len(shapes[0]) > 2
        and (*shape[:-2], shape[-1]) == (*shapes[0][:-2], shapes[0][-1])
        for shape in shapes
    )
    if axis != len(shapes[0]) - 2 or not is_heads_last:
        return ""
    return "; for (..., seq, heads, head_dim) pass seq_dim=-3"


def _pairs(head_dim: int, table: tuple[int, ...], options: Options) -> int:
    if len(table) < 2:
        raise ValueError(f"cos must be (seq, pairs) or have more axes, got shape {table}")
    pairs, rotary_dim, start = table[-1], options.rotary_dim, options.start
    if rotary_dim is not None and rotary_dim != 2 * pairs:
        source = "" if options.head_dim is None else " in the spec"
        raise ValueError(
            f"rotary_dim is {rotary_dim}{source}, but cos has {pairs} columns, which make "
            f"{2 * pairs}; tables are half width: one column per pair"
        )
    if start < 0 or pairs == 0 or start + 2 * pairs > head_dim:
        hint = "; it looks full width: pass each pair once" if pairs == head_dim else ""
        raise ValueError(
            f"cos has {pairs} columns, so channels {start} to {start + 2 * pairs} would be "
            f"rotated, of {head_dim}{hint}"
        )
    if rotary_dim is None and 2 * pairs != head_dim:
        raise ValueError(
            f"cos has {pairs} columns, which rotate {2 * pairs} of the {head_dim} channels of x: "
            "pass the spec, rotate(x, cos, sin, spec), or, without a spec, "
            f"rotary_dim={2 * pairs}, with start= if these are not the first channels; a "
            "full-width table must be halved"
        )
    return pairs


def _table_axes(
    leading: int, axis: int, others: Sequence[int], along: tuple[int, ...]
) -> tuple[int | None, ...]:
    dims: list[int | None] = [None] * leading
    if len(along) == leading:
        return tuple(range(leading))
    if len(along) == 1:
        dims[axis] = 0
    elif len(along) == 2 and leading == 3:
        dims[others[0]], dims[axis] = 0, 1
    else:
        raise ValueError(
            f"tables or positions have {len(along)} leading axes and x has {leading}, so it is "
            "unclear which belong together: give (seq), (batch, seq) for a 4-D x, or all axes of x"
        )
    return tuple(dims)


def check_axes(axes: int, shape: Sequence[int]) -> None:
    """Refuse positions that are not (..., seq, axes), or (..., seq) for one axis.

    >>> check_axes(3, (3, 1, 8))
    Traceback (most recent call last):
    ValueError: positions must be (..., seq, 3) for 3 axes, got shape (3, 1, 8); move the axes last
    """
    is_short = len(shape) < (2 if axes > 1 else 1)
    if is_short or (axes > 1 and shape[-1] != axes):
        expected = f"(..., seq, {axes}) for {axes} axes" if axes > 1 else "(..., seq)"
        hint = "; move the axes last" if not is_short and shape[0] == axes else ""
        raise ValueError(f"positions must be {expected}, got shape {tuple(shape)}{hint}")
