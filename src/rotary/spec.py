"""`Rotary`: a frozen data class with all settings of a RoPE; invalid values are errors."""

import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeGuard, TypeVar

from .kernels.private import is_recorded_by_dynamo
from .layouts import check as check_layout
from .schedules import SCHEDULES, depends_on_length, parameters
from .strict_json import JSON, parsed
from .words import brief, nearest

Value = TypeVar("Value")

MAX_HEAD_DIM = 65_536  # refused beyond, before anything of that size is made
_LARGEST = sys.float_info.max
_SMALLEST = 2 * math.pi * 2.0**-65  # half a step of the 64-bit turns: a slower pair never turns


@dataclasses.dataclass(frozen=True)
class Rotary:
    """All that defines a rotary position embedding: frequencies, layout, slice, axes and direction.

    head_dim    channels of one attention head
    rotary_dim  how many of them are rotated; even; default head_dim
    start       first rotated channel
    base        the 10,000 of the paper (`rope_theta`)
    layout      pairs (i, i + rotary_dim/2): "half"; pairs (2i, 2i + 1): "interleaved"
    out_layout  layout of the result, default `layout`. DeepSeek reads interleaved pairs and writes
                them in the half layout: out_layout="half"
    schedule    name of a function in `rotary.schedules`
    params      its keyword-only arguments, under the names of transformers' `rope_parameters`
    axes        the position axis that each pair uses, (rotary_dim/2,); () if they are all 0.
                Schedule axial needs them, because models differ in which axis comes first
    sign        +1, or -1 if pairs rotate in the other direction (nanochat)

    Hashable, comparable, picklable; `to_dict` and `from_dict` round-trip through JSON.
    Raises ValueError for every invalid value, here and not later; TypeError for an unknown field.

    >>> Rotary(head_dim=128, base=500_000.0).rotary_dim
    128
    >>> Rotary(head_dim=127)
    Traceback (most recent call last):
    ValueError: rotary_dim must be even and in (0, head_dim=127], got 127
    """

    head_dim: int
    rotary_dim: int = None  # type: ignore[assignment]  # filled in by __post_init__
    start: int = 0
    base: float = 10_000.0
    layout: str = "half"
    out_layout: str = None  # type: ignore[assignment]  # filled in by __post_init__
    schedule: str = "default"
    params: Mapping[str, JSON] = dataclasses.field(default_factory=dict)
    axes: Sequence[int] = ()
    sign: int = 1

    def __new__(cls, *args: object, **fields: object) -> "Rotary":
        if is_recorded_by_dynamo():
            raise TypeError(
                "torch.compile does not record how a Rotary is made: make it, or call the function "
                "that makes it, outside of the compiled function"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in names:
                raise TypeError(f"Rotary has no field {name!r}{_field_hint(name, names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("head_dim", "rotary_dim", "start", "base", "sign"):
            self._set(name, unwrapped(getattr(self, name)))
        self._set("rotary_dim", self.head_dim if self.rotary_dim is None else self.rotary_dim)
        self._set("out_layout", self.layout if self.out_layout is None else self.out_layout)
        _check_slice(self)
        _check_base(self.base)
        self._set("base", float(self.base))
        for name in ("layout", "out_layout"):
            check_layout(getattr(self, name), name)
        if self.schedule not in list(SCHEDULES):
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)}; "
                f"got {brief(self.schedule)}{nearest(self.schedule, SCHEDULES)}"
            )
        if not is_whole(self.sign) or self.sign not in (1, -1):
            raise ValueError(f"sign must be +1 or -1, got {brief(self.sign)}")
        self._set("params", _frozen_params(self.schedule, self.params))
        self._set("axes", _checked_axes(self.axes, self.rotary_dim // 2))
        _check_frequencies(self)
        factor = self.params.get("factor")
        if isinstance(factor, int | float) and factor < 1:
            text = f"factor {factor} < 1 shortens the context; a factor is usually >= 1"
            warnings.warn(text, stacklevel=3)
        _check_axes_of_schedule(self)
        self._set("_depends_on_length", depends_on_length(self.schedule))
        self._set("_json", json.dumps(self.to_dict()))
        plain = [getattr(self, field.name) for field in dataclasses.fields(self)
                 if field.name != "params"]  # fmt: skip
        self._set("_hash", hash((*plain, *sorted(self.params.items()))))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]  # set once, in __post_init__

    def __reduce__(self) -> tuple[object, ...]:
        return Rotary, (*self.to_dict().values(),)  # torch.load(weights_only=True) calls a class

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={_plain_value(getattr(self, field.name))!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != _default(self, field)
        )
        return f"Rotary({', '.join(shown)})"

    @property
    def num_axes(self) -> int:
        """Return the number of position axes; with more than one, positions end in (seq, axes).

        >>> Rotary(head_dim=8, axes=(0, 1, 0, 1)).num_axes
        2
        """
        return max(self.axes) + 1 if self.axes else 1

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies depend on the length: dynamic, dynamic_linear, longrope.

        >>> Rotary(head_dim=8).depends_on_length
        False
        """
        return self._depends_on_length  # type: ignore[attr-defined]  # set once, in __post_init__

    def constant(self, make: Callable[..., object], *arguments: object) -> object:
        """Return `make(self, *arguments)`, for torch.compile a constant, which takes no data class.

        >>> Rotary(head_dim=4).constant(lambda spec, number: spec.head_dim + number, 3)
        7
        """
        return make(self, *arguments)

    constant._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def to_dict(self) -> dict[str, JSON]:
        """Return all fields as JSON-ready data.

        >>> Rotary(head_dim=4).to_dict()["base"]
        10000.0
        """
        fields = dataclasses.fields(self)
        return {field.name: _plain_value(getattr(self, field.name)) for field in fields}

    def to_json(self) -> str:
        """Return the spec as one line of JSON.

        >>> Rotary.from_json(Rotary(head_dim=4).to_json())
        Rotary(head_dim=4)
        """
        return self._json  # type: ignore[attr-defined]  # set once, in __post_init__

    @classmethod
    def from_json(cls, text: str) -> "Rotary":
        """Return the spec that `to_json` wrote; errors as in `from_dict`.

        >>> Rotary.from_json('{"head_dim": 4}').rotary_dim
        4
        """
        return cls.from_dict(parsed(text, "a spec"))

    @classmethod
    def from_dict(cls, data: Mapping[str, JSON]) -> "Rotary":
        """Return the spec that `to_dict` wrote; ValueError for an unknown field or a bad value.

        >>> Rotary.from_dict({"head_dim": 4, "theta": 1e4})
        Traceback (most recent call last):
        ValueError: unknown field 'theta'; known: head_dim, rotary_dim, start, base, layout, \
out_layout, schedule, params, axes, sign
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(data, Mapping):
            raise ValueError(f"a spec must be a JSON object, got {brief(data)}")
        for name in data:
            if name not in fields:
                raise ValueError(
                    f"unknown field {name!r}{nearest(name, fields)}; known: {', '.join(fields)}"
                )
        if "head_dim" not in data:
            raise ValueError("field 'head_dim' is missing")
        return cls(**data)


_OTHER_NAMES = {"dim": "head_dim", "theta": "base", "rope_theta": "base"}


def _field_hint(name: str, fields: Sequence[str]) -> str:
    """Return a hint for an unknown field: its name here, or that it belongs into params."""
    if any(name in parameters(each) for each in SCHEDULES):
        return f"; it is a parameter of the schedule: Rotary(..., params={{{name!r}: ...}})"
    if name in _OTHER_NAMES:
        return f"; it is called {_OTHER_NAMES[name]!r} here"
    return nearest(name, fields) or f"; its fields: {', '.join(fields)}"


def _default(spec: Rotary, field: dataclasses.Field[object]) -> object:
    computed = {"rotary_dim": spec.head_dim, "out_layout": spec.layout, "params": {}}
    return computed.get(field.name, field.default)


def unwrapped(value: Value) -> Value:
    """Return a NumPy scalar as a number of Python; other values as they are.

    >>> unwrapped(4)
    4
    """
    item = getattr(value, "item", None)
    return value if item is None or getattr(value, "ndim", 1) != 0 else item()


def is_whole(value: object) -> TypeGuard[int]:
    """True for an int that is not a boolean.

    >>> is_whole(64), is_whole(True)
    (True, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise ValueError unless `value` is a whole number and at least `least`.

    >>> check_whole("heads", 2.0)
    Traceback (most recent call last):
    ValueError: heads must be a whole number >= 1, got 2.0
    """
    if not is_whole(value) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {brief(value)}")


def check_spec(spec: object, name: str = "spec, the first argument,") -> None:
    """Refuse an argument that is not a Rotary, and say how to make one.

    >>> check_spec(64)
    Traceback (most recent call last):
    TypeError: spec, the first argument, must be a Rotary, got int: make one with \
rotary.Rotary(head_dim=...) or rotary.from_hf_config(config)
    """
    if not isinstance(spec, Rotary):
        raise TypeError(
            f"{name} must be a Rotary, got {type(spec).__qualname__}: make one with "
            "rotary.Rotary(head_dim=...) or rotary.from_hf_config(config)"
        )


def check_head_dim(head_dim: object) -> None:
    """Refuse a head_dim outside 1 .. MAX_HEAD_DIM, before anything of that size is made.

    >>> check_head_dim(128)
    """
    if not is_whole(head_dim) or not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim must be a whole number from 1 to {MAX_HEAD_DIM:,}, got {brief(head_dim)}"
        )


def _check_slice(spec: Rotary) -> None:
    head_dim, rotary_dim, start = spec.head_dim, spec.rotary_dim, spec.start
    check_head_dim(head_dim)
    if not is_whole(rotary_dim) or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        hint = "; a layer without rotation has no Rotary" if rotary_dim == 0 else ""
        if is_whole(rotary_dim) and rotary_dim > head_dim:
            hint = f"; if it is the base, name it: Rotary({head_dim}, base={rotary_dim})"
        raise ValueError(
            f"rotary_dim must be even and in (0, head_dim={head_dim}], "
            f"got {brief(rotary_dim)}{hint}"
        )
    if not is_whole(start) or not 0 <= start <= head_dim - rotary_dim:
        raise ValueError(
            f"start must be in [0, head_dim - rotary_dim = {head_dim - rotary_dim}], "
            f"got {brief(start)}"
        )


def _check_base(base: object) -> None:
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise ValueError(f"base must be a number, got {brief(base)}")
    if not 1 <= base <= _LARGEST:
        raise ValueError(f"base must be finite and >= 1, got {brief(base)}")
    if base == 1:
        warnings.warn("base 1 gives every pair the same frequency, 1 rad per token", stacklevel=4)


def _frozen_params(schedule: str, params: Mapping[str, object]) -> Mapping[str, object]:
    if not isinstance(params, Mapping):
        raise ValueError(f"params must be a mapping of names to values, got {brief(params)}")
    allowed = parameters(schedule)
    for name in params:
        if name not in allowed:
            listed = ", ".join(allowed) or "none"
            raise ValueError(
                f"schedule {schedule!r} has no parameter {name!r}{nearest(name, allowed)}; "
                f"its parameters: {listed}"
            )
    kept = {}
    for name, parameter in allowed.items():
        default = parameter.default
        if name in params:
            value = _frozen(name, params[name])
            # a parameter at its default says nothing: dropping it makes equal specs compare equal
            if value != default or isinstance(value, bool) != isinstance(default, bool):
                kept[name] = value
        elif default is parameter.empty:
            raise ValueError(f"schedule {schedule!r} needs parameter {name!r}")
    return MappingProxyType(kept)


def _frozen(name: str, value: object) -> object:
    if hasattr(value, "tolist"):  # numpy and torch, arrays and scalars
        value = value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return tuple(unwrapped(item) for item in value)
    raise ValueError(f"parameter {name!r} must be a number, a flag or a list, got {brief(value)}")


def _plain_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _plain_value(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _checked_axes(axes: Sequence[int], pairs: int) -> tuple[int, ...]:
    axes = axes.tolist() if hasattr(axes, "tolist") else axes
    if not isinstance(axes, Sequence):
        raise ValueError(f"axes must be a list of axis numbers, one per pair, got {brief(axes)}")
    checked = tuple(axes)
    if not checked:
        return ()
    if len(checked) != pairs:
        raise ValueError(
            f"axes must name one axis per pair: rotary_dim / 2 = {pairs}, got {len(checked)}"
        )
    if not all(is_whole(axis) for axis in checked) or set(checked) != set(range(max(checked) + 1)):
        raise ValueError(f"axes must be whole numbers from 0 without a gap, got {checked}")
    return checked if any(checked) else ()


def _check_axes_of_schedule(spec: Rotary) -> None:
    """Refuse schedule axial without axes: it must be known which pair reads which axis."""
    widths = spec.params.get("widths")
    count = len(widths) if widths else spec.params.get("num_axes", spec.num_axes)
    if count == spec.num_axes:
        return
    if spec.axes:
        raise ValueError(
            f"axes name {spec.num_axes} position axes, but schedule {spec.schedule!r} has "
            f"num_axes {count}"
        )
    shares = [width // 2 for width in widths or [spec.rotary_dim // count] * count]
    in_turn = spec.params.get("ladder") == "turns"
    natural = f"{[*range(count)]} * {shares[0]}" if in_turn else " + ".join(
        f"[{axis}] * {share}" for axis, share in enumerate(shares)
    )  # fmt: skip
    raise ValueError(
        f"schedule {spec.schedule!r} with num_axes {count} needs axes, the position axis that "
        f"drives each pair (models differ in which comes first): axes={natural}"
    )


def _check_frequencies(spec: Rotary) -> None:
    try:
        inv_freq, factor = SCHEDULES[spec.schedule](spec.rotary_dim, spec.base, **spec.params)
    except (OverflowError, ZeroDivisionError, TypeError) as error:
        raise ValueError(
            f"schedule {spec.schedule!r} with base {spec.base} and {dict(spec.params)}: {error}"
        ) from error
    sizes = [abs(float(value)) for value in inv_freq]
    if not (all(map(math.isfinite, sizes)) and math.isfinite(factor)):
        raise ValueError(f"schedule {spec.schedule!r} gives frequencies that are not finite")
    if any(0 < size < _SMALLEST for size in sizes):
        raise ValueError(
            f"base {spec.base} is too large: the slowest pair turns {min(sizes):.1e} rad per "
            f"token, less than {_SMALLEST:.1e}, the least that 64 bits can hold"
        )
