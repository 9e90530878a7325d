"""How the arrays of one rotation fit together, worked out from their shapes alone."""

from collections.abc import Sequence
from typing import NamedTuple

from .. import layouts


class Options(NamedTuple):
    """What the caller of `rotate` said about the layout; the names are those of its arguments."""

    layout: str = "half"
    out_layout: str | None = None
    rotary_dim: int | None = None
    start: int = 0
    seq_dim: int = -2


class Geometry(NamedTuple):
    """Where the rotated channels are, and how the axes of a table line up with those of x.

    `dims` has one entry per axis of x but the last: the axis of cos and sin (or, for an indexed
    table, of `rows`) that runs along it, or None where one table row serves the whole axis.
    """

    start: int
    pairs: int
    layout: str
    out_layout: str
    dims: tuple[int | None, ...]

    def reversed(self) -> "Geometry":
        """The geometry of the way back: it reads what this one writes."""
        return self._replace(layout=self.out_layout, out_layout=self.layout)


def geometry_of(
    shapes: tuple[tuple[int, ...], ...],
    table: tuple[int, ...],
    rows: tuple[int, ...] | None,
    options: Options,
) -> Geometry:
    """What `options` mean for arrays of these shapes; ValueError if they do not fit.

    shapes  of the arrays rotated together;  table  of cos and sin;  rows  of row numbers, or None

    >>> geometry_of(((2, 8, 5, 64),), (5, 32), None, Options()).dims
    (None, None, 0)
    """
    layout, out_layout, rotary_dim, start, seq_dim = options
    out_layout = layout if out_layout is None else out_layout
    layouts.check(layout)
    layouts.check(out_layout, "out_layout")
    shape = shapes[0]
    axis = seq_axis(shape, seq_dim)
    others = [index for index in range(len(shape) - 1) if index != axis]
    for other in shapes[1:]:
        fixed = [index for index in range(len(shape)) if index not in others[-1:]]
        if len(other) != len(shape) or any(other[index] != shape[index] for index in fixed):
            raise ValueError(
                f"arrays rotated together may differ in the number of heads only, got {shapes}"
            )
    pairs = _pairs(shape[-1], table, rotary_dim, start)
    if rows is not None and len(table) != 2:
        raise ValueError(f"with positions, cos and sin must be (rows, pairs), got {table}")
    along = table[:-1] if rows is None else rows
    dims = _table_axes(len(shape) - 1, axis, others, along)
    name = "cos" if rows is None else "positions"
    for each in shapes:
        for index, dim in enumerate(dims):
            if dim is None or along[dim] == each[index] or (along[dim] == 1 and index != axis):
                continue
            hint = "; pass positions to pick rows of a longer table" if index == axis else ""
            raise ValueError(
                f"{name} of shape {table if rows is None else rows} does not fit x of shape {each} "
                f"with seq_dim={seq_dim}: {along[dim]} against {each[index]}{hint}"
            )
    return Geometry(start, pairs, layout, out_layout, dims)


def check_fit(
    geometry: Geometry,
    shapes: Sequence[Sequence[int]],
    table: Sequence[int],
    rows: Sequence[int] | None,
) -> None:
    """Refuse arrays that a geometry was not made for, before memory is read by its numbers.

    >>> check_fit(Geometry(0, 2, "half", "half", (0,)), [(3, 4)], (3, 2), None)
    """
    along = table[:-1] if rows is None else rows
    stop = geometry.start + 2 * geometry.pairs
    for shape in shapes:
        sizes = zip(shape[:-1], geometry.dims, strict=False)
        if (
            len(shape) != len(geometry.dims) + 1
            or table[-1] != geometry.pairs
            or not 0 <= geometry.start <= stop <= shape[-1]
            or any(dim is not None and along[dim] not in (1, size) for size, dim in sizes)
        ):
            raise ValueError(
                f"x {tuple(shape)}, cos {tuple(table)} and positions {rows} do not fit {geometry}"
            )


def seq_axis(shape: tuple[int, ...], seq_dim: int) -> int:
    """`seq_dim` counted from the front; ValueError if x has no such axis before its last.

    >>> seq_axis((2, 8, 5, 64), -2)
    2
    """
    if len(shape) < 2:
        raise ValueError(f"x must be (..., seq, head_dim), with 2 axes or more, got shape {shape}")
    axis = seq_dim if seq_dim >= 0 else len(shape) + seq_dim
    if not 0 <= axis < len(shape) - 1:
        raise ValueError(
            f"seq_dim={seq_dim} is not an axis before the last of x, which has shape {shape}"
        )
    return axis


def _pairs(head_dim: int, table: tuple[int, ...], rotary_dim: int | None, start: int) -> int:
    if len(table) < 2:
        raise ValueError(f"cos must be (seq, pairs) or have more axes, got shape {table}")
    pairs = table[-1]
    if rotary_dim is not None and rotary_dim != 2 * pairs:
        raise ValueError(
            f"rotary_dim is {rotary_dim}, but cos has {pairs} columns, which make {2 * pairs}; "
            "tables are half width: one column per pair"
        )
    if start < 0 or pairs == 0 or start + 2 * pairs > head_dim:
        hint = "; it looks full width: pass each pair once" if pairs == head_dim else ""
        raise ValueError(
            f"cos has {pairs} columns, so channels {start} to {start + 2 * pairs} would be "
            f"rotated, of {head_dim}{hint}"
        )
    if rotary_dim is None and 2 * pairs != head_dim:
        raise ValueError(
            f"cos has {pairs} columns for head_dim {head_dim}: pass rotary_dim={2 * pairs} if only "
            f"{2 * pairs} channels are rotated, or half of the columns if the table is full width"
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
            f"tables or positions of {len(along)} leading axes do not say how they go with x of "
            f"{leading}: give (seq), (batch, seq) for a 4-D x, or an axis for each of x"
        )
    return tuple(dims)
