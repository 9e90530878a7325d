"""How a model's rotation function rotates, and the same rotation by `rotary.rotate`."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fused import Norm, fused
from ..kernels import Operand
from ..kernels.geometry import Options
from ..kernels.torch.fused_ready import by_views as fused_by_views
from ..kernels.torch.gpu import by_views
from ..rotate import options_of, rotate
from ..spec import Rotary
from .styles import TWICE, agrees_twice, half_views, prepared

# parameters of diffusers and timm that choose one of several rotations, and all their values
CHOICES: Mapping[str, tuple[object, ...]] = {
    "use_real": (True, False),
    "use_real_unbind_dim": (-1, -2),
    "sequence_dim": (1, 2),
    "half": (False, True),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DOUBLE = (torch.float64, torch.complex128)
Slices = tuple[str, str, str | None, bool]  # layout, out_layout, start, clockwise of a `Convention`


class Convention(NamedTuple):
    """What a rotation function takes, and which channels it rotates by which column of a table.

    parameters  its parameters; the first `operands` are rotated
    tables      the one or two parameters that hold cos and sin
    holder      "each": a parameter holds cos, sin or both as complex numbers; "tuple": one holds
                (cos, sin); "joined": one tensor holds sin and then cos along its last axis
    defaults    of the other parameters, which must keep these values
    chosen      (parameter, value) of parameters in `CHOICES`, for which the convention holds
    new_axis    axis of size one that the tables get; "unsqueeze_dim" if that parameter sets it
    style       how a table holds its pairs, one of those in `styles`
    start       which channels a narrower table rotates: "leading", "trailing", or None: refused
    clockwise   pairs are rotated by -angle
    promotes    the result has the wider dtype of x and table; else that of x
    by_config   the layout is that of the weights by the config, not that of the function
    has_prefix  tokens before those of the tables are not rotated
    narrows     tables may be in float64 as well: the result has the dtype of x
    is_checked  what tables of unknown origin hold twice is compared at each call
    """

    parameters: tuple[str, ...]
    operands: int
    tables: tuple[str, ...]
    defaults: Mapping[str, Any]
    new_axis: int | str | None
    style: str
    layout: str
    out_layout: str
    clockwise: bool
    start: str | None = None
    promotes: bool = False
    by_config: bool = False
    has_prefix: bool = False
    holder: str = "each"
    chosen: tuple[tuple[str, object], ...] = ()
    narrows: bool = False
    is_checked: bool = False

    def __str__(self) -> str:
        layout = self.layout
        layout += f" in, {self.out_layout} out" if self.out_layout != layout else ""
        layout += ", clockwise" if self.clockwise else ""
        return layout + (", as the config says" if self.by_config else "")

    @property
    def slices(self) -> Slices:
        """The fields that say which channels are rotated, and how."""
        return self.layout, self.out_layout, self.start, self.clockwise


def of_tables(
    conventions: tuple[Convention, ...], styles: set[str], *, may_check: bool
) -> tuple[Convention, ...]:
    """Return the conventions that fit the tables of a model; ValueError if there is none.

    styles     of the tables; empty if it is not known who makes them
    may_check  whether unknown tables may be compared at each call, and a call left to the model

    Tables may hold each cos and sin twice, and we read only one of them. So the style of the
    convention must be that of the tables, or be checked.
    """
    if all(each.style not in TWICE for each in conventions):
        return conventions
    if not styles and not may_check:
        raise ValueError("gets its tables from a module that rotary does not know")
    if not styles:
        return tuple(each._replace(is_checked=each.style in TWICE) for each in conventions)
    fitting = tuple(each for each in conventions if {each.style} == styles)
    if not fitting:
        raise ValueError("gets tables that may turn the two channels of a pair differently")
    return fitting


def rotate_by(
    convention: Convention, arguments: Mapping[str, Operand], norm: Norm | None = None
) -> Operand:
    """Return the rotation for these arguments; None if `rotary.rotate` cannot compute it.

    With `norm`, q and k are normalized first, in the same pass.
    """
    operands = _operands(convention, arguments)
    if operands is None:
        return None
    xs, tables, axis = operands
    if convention.is_checked and not agrees_twice(convention.style, tables):
        return None
    rotated: Sequence[Tensor | None] | None = None
    try:
        if not convention.has_prefix:
            form = convention.style, axis, convention.slices
            if norm is None:
                rotated = by_views(xs, tables, _views, form)
            else:
                rotated = fused_by_views(xs, norm, tables, _views, form)
        if rotated is None:
            rotated = _by_copies(convention, xs, tables, axis, norm)
    except ValueError:  # of shapes
        return None
    if rotated is None or convention.operands == 2:
        return rotated
    return rotated[0]


def _by_copies(
    convention: Convention,
    xs: tuple[Tensor, ...],
    tables: Sequence[Tensor],
    axis: int | None,
    norm: Norm | None,
) -> Sequence[Tensor | None] | None:
    """Rotate by float32 copies of the tables, of half width."""
    halves = prepared(convention.style, tables, axis, xs[0].shape, convention.has_prefix)
    keywords = None if halves is None else _keywords(xs[0], halves[0], convention.slices)
    if halves is None or keywords is None:
        return None
    if norm is None:
        return rotate(xs, *halves, **keywords)
    if keywords["conjugate"]:
        return None
    layouts = keywords["layout"], keywords["out_layout"]
    spec = _spec(xs[0].shape[-1], keywords["rotary_dim"], keywords["start"], *layouts)
    q, k = (*xs, None)[:2]
    return fused(q, k, None, spec, tables=halves, norm=norm, seq_dim=keywords["seq_dim"])[:2]


def _operands(
    convention: Convention, arguments: Mapping[str, Operand]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], int | None] | None:
    """Return what is rotated, the tables and their new axis; None if the call does not fit."""
    defaults, axis = convention.defaults, convention.new_axis
    xs = tuple([arguments[name] for name in convention.parameters[: convention.operands]])
    tables = tuple([arguments[name] for name in convention.tables])
    if len(arguments) > len(xs) + len(tables):
        for name, value in arguments.items():
            if name not in convention.parameters:
                return None
            is_fixed = name in defaults and name != axis and name not in CHOICES
            if is_fixed and value is not defaults[name]:
                return None
    if convention.chosen and any(
        [arguments.get(name, defaults[name]) != value for name, value in convention.chosen]
    ):
        return None
    if convention.holder == "tuple" and isinstance(tables[0], (tuple, list)):
        tables = tuple(tables[0])
    if (
        (convention.holder == "tuple" and len(tables) != 2)
        or not (isinstance(tables[0], Tensor) and isinstance(tables[-1], Tensor))
        or xs[0].ndim < 2
        or xs[0].dtype not in _DTYPES
        or xs[0].dtype != xs[-1].dtype
        or (not convention.narrows and any([table.dtype in _DOUBLE for table in tables]))
    ):
        return None
    if convention.promotes and tables[0].dtype == torch.float32:
        xs = tuple([x.float() for x in xs])
    return xs, tables, arguments.get(axis, defaults[axis]) if isinstance(axis, str) else axis


def _views(
    xs: Sequence[Tensor], tables: Sequence[Tensor], style: str, axis: int | None, slices: Slices
) -> tuple[Tensor, Tensor, Options] | None:
    """Return cos and sin in the memory of `tables`, and the options to rotate by them."""
    if any([table.dtype in _DOUBLE for table in tables]):
        return None
    halves = half_views(tables, style, axis, xs[0].ndim)
    keywords = None if halves is None else _keywords(xs[0], halves[0], slices)
    return None if halves is None or keywords is None else (*halves, options_of(None, **keywords))


def _keywords(x: Tensor, cos: Tensor, slices: Slices) -> dict[str, Any] | None:
    """Return the keywords of `rotary.rotate`; None if the table may not be narrower than x."""
    layout, out_layout, start, clockwise = slices
    rotary_dim = 2 * cos.shape[-1]
    rest = x.shape[-1] - rotary_dim
    if rest and start is None:
        return None
    return {
        "layout": layout,
        "out_layout": out_layout,
        "rotary_dim": rotary_dim,
        "start": rest if start == "trailing" else 0,
        "seq_dim": -2 if cos.shape[-2] == x.shape[-2] else -3,
        "conjugate": clockwise,
    }


@functools.lru_cache(maxsize=64)
def _spec(head_dim: int, rotary_dim: int, start: int, layout: str, out_layout: str) -> Rotary:
    """Return a spec for the pairs alone; the tables are those of the model."""
    return Rotary(head_dim, rotary_dim, start, layout=layout, out_layout=out_layout)
