"""One RoPE of the page: reads and checks its controls or its link, and makes the RoPE."""

import dataclasses
import math
from collections.abc import Collection, Mapping

from ..analysis import extension, spectrum
from ..configs import Config
from ..spec import Rotary
from ..strict_json import JSON
from ..words import nearest
from .models import (
    MAX_HEAD_DIM,
    MAX_LENGTH,
    MAX_PASTED,
    PASTED,
    Model,
    encodable,
    pasted,
    presets,
    published,
    shortened,
)

MAX_LINK = 8000  # characters of a config in a link; servers refuse far longer ones
AS_MADE = "as published"
LIMITS = {  # the least and the largest value of each control that holds a number
    "base": (1, 10**15),
    "head_dim": (2, MAX_HEAD_DIM),
    "trained": (1, MAX_LENGTH),
    "context": (1, MAX_LENGTH),
}
METHODS = (AS_MADE, "none", "linear", "ntk", "ntk_mixed", "yarn", "llama3", "longrope")


class FieldError(ValueError):
    """An invalid value of a control, `field`, such as "context" or "a.base".

    A field of a side may lack the letter of its side: `of` adds it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def of(self, letter: str) -> "FieldError":
        """Return this error with the letter of a side in its field, where it is missing."""
        is_of_side = "." not in self.field and self.field not in ("context", "view")
        return FieldError(f"{letter}.{self.field}", str(self)) if is_of_side else self


@dataclasses.dataclass(frozen=True)
class Side:
    """One RoPE of the page: a model and changes to it; None: the value of the model."""

    model: str = "llama-3-8b"
    config: str = ""
    layer: str = ""
    method: str = AS_MADE
    base: float | None = None
    head_dim: int | None = None
    trained: int | None = None

    def original(self) -> Model:
        """Return the RoPE before any change; ValueError as of `pasted` and `published`."""
        if self.model == PASTED:
            if not self.config.strip():
                raise ValueError("paste a config.json, or choose a published model")
            return pasted(self.config, self.layer or None)
        return published(self.model)

    def title(self) -> str:
        """Return the name of the model and the changes."""
        original = self.original()
        parts = [original.name or self.model]
        if self.base not in (None, original.spec.base):
            parts.append(f"base {self.base:.15g}")
        if self.head_dim not in (None, original.spec.head_dim):
            parts.append(f"head_dim {self.head_dim}")
        if self.trained not in (None, original.trained):
            parts.append(f"trained {self.trained:,}")
        return ", ".join(parts + [self.method] * (self.method != AS_MADE))

    def link_config(self) -> str | None:
        """Return the config for a link, shortened if it is long; None if it is still too long."""
        if self.model != PASTED or len(self.config) <= MAX_LINK:
            return self.config if self.model == PASTED else ""
        short = shortened(self.config, self.layer or None)
        return short if len(short) <= MAX_LINK else None


@dataclasses.dataclass(frozen=True)
class Look:
    """The subject of one figure: a RoPE, the RoPEs it was made from, and lengths in tokens.

    plain    the same base and channels without any scaling
    before   the RoPE of the training, by `spectrum.before_scaling`; gives the critical dimension
    trained  the trained length, before an extension;  context  the requested length
    advertised  the length that the model reaches as published
    side     the controls that all of it was made from
    """

    spec: Rotary
    plain: Rotary
    before: Rotary
    trained: int
    context: int
    advertised: int
    side: Side

    @property
    def entry(self) -> Config:
        """What the config says about these layers, before any change on the page."""
        return self.side.original().entry

    @property
    def head(self) -> Rotary:
        """The RoPE of all channels of a head: latent attention has more than those of `spec`."""
        return spectrum.whole_head(self.spec, self.entry.nope_head_dim)


def look(side: Side, context: int) -> Look:
    """Return the RoPE and lengths that one side asks for; ValueError of one line if invalid.

    >>> look(Side(model="llama-2-7b", method="linear"), 8192).spec.params["factor"]
    2.0
    """
    original = side.original()
    spec = _changed(original.spec, side)
    trained = side.trained or original.trained
    if trained is None:
        raise FieldError(
            "trained",
            "the config has no max_position_embeddings, the length of its training: fill it in",
        )
    plain = spec
    if spec.schedule not in ("custom", "axial", "proportional"):  # these scale nothing
        plain = dataclasses.replace(spec, schedule="default", params={})
    before, advertised = spectrum.before_scaling(spec), trained
    if original.spec.schedule != "default":  # its scaling may reach beyond the training
        advertised = max(trained, original.context or 0)
    if side.method != AS_MADE:
        spec, before = plain, plain
        if context > trained and side.method != "none":
            check_scaling(plain, trained)
            if not is_stretchable(plain):
                own = f"{plain.num_axes} axes" if plain.num_axes > 1 else f"type {plain.schedule!r}"
                raise FieldError(
                    "method", f"no method scales a RoPE of {own}; choose {AS_MADE!r} or 'none'"
                )
            spec = extension.methods(plain, trained, context)[side.method]
    return Look(spec, plain, before, trained, context, advertised, side)


def is_stretchable(plain: Rotary) -> bool:
    """Whether the methods of the page can scale this RoPE."""
    return plain.schedule == "default" and plain.num_axes == 1


def check_scaling(plain: Rotary, trained: int) -> None:
    """Raise FieldError if `trained` or the base rules out scaling; views check the rest."""
    if trained < 2:
        raise FieldError("trained", "scaling needs a trained length of 2 tokens or more, got 1")
    if plain.base == 1:
        raise FieldError("base", "with base 1 all pairs turn alike, and no method scales them")


def _changed(spec: Rotary, side: Side) -> Rotary:
    """Return the spec with the base and head_dim of the side; the rotated share does not change."""
    if side.base is not None and side.base != spec.base:
        spec = dataclasses.replace(spec, base=side.base)
    if side.head_dim is None or side.head_dim == spec.head_dim:
        return spec
    share = side.head_dim / spec.head_dim
    rotary_dim = max(2, 2 * round(spec.rotary_dim * share / 2))
    start = min(round(spec.start * share), side.head_dim - rotary_dim)
    return dataclasses.replace(spec, head_dim=side.head_dim, rotary_dim=rotary_dim, start=start)


def side(letter: str, default: Side, fields: Mapping[str, object]) -> Side:
    """Return side "a" or "b" from the fields of controls or a link; None and "" mean the default.

    Raises FieldError of one line for an invalid value.

    >>> side("a", Side(), {"a.base": "1e15", "a.head_dim": 96}) == Side(base=1e15, head_dim=96)
    True
    """
    choices = {"method": METHODS, "model": (*presets(), PASTED)}
    kept: dict[str, JSON] = {}
    for name in vars(default):
        value = fields.get(f"{letter}.{name}")
        if value is None or value == "":
            continue
        if name in LIMITS:
            kept[name] = number(f"{letter}.{name}", value)
        elif name in choices:
            kept[name] = one_of(f"{letter}.{name}", value, choices[name])
        else:
            kept[name] = encodable(str(value)[: MAX_PASTED + 1])
    return dataclasses.replace(default, **kept)


def number(field: str, value: object) -> float:
    """Return `value` if in the limits of its control and, unless a base, whole; or FieldError."""
    name = field.rpartition(".")[2]
    least, most = LIMITS[name]
    try:
        read = float(value)  # type: ignore[arg-type]  # raises for what is not a number
    except (TypeError, ValueError, OverflowError):
        read = math.nan
    if math.isnan(read):
        raise FieldError(field, f"{name} must be a number, got {str(value)[:40]!r}")
    if not least <= read <= most:
        raise FieldError(field, f"{name} must be in {least:,} .. {most:,}, got {read:,.15g}")
    if name == "base":
        return read
    if read != int(read):
        raise FieldError(field, f"{name} must be a whole number, got {read:,}")
    if name == "head_dim" and read % 2:
        raise FieldError(field, f"head_dim must be even, got {read:g}")
    return int(read)


def one_of(field: str, value: object, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`; else raise FieldError that suggests the nearest."""
    if isinstance(value, str) and value in choices:  # a list cannot be looked up
        return value
    short = str(value)[:40]
    listed = ", ".join(choices) if len(choices) < 10 else f"the {len(choices)} in the list"
    name = field.rpartition(".")[2]
    raise FieldError(
        field, f"{name} must be one of {listed}; got {short!r}{nearest(short, choices)}"
    )
