"""One RoPE of the page: what controls or a link say of it, bounded, and what it is then."""

import dataclasses
import math
from collections.abc import Collection

from ..analysis import extension, spectrum
from ..spec import Rotary, nearest
from .models import (
    MAX_HEAD_DIM,
    MAX_LENGTH,
    MAX_PASTED,
    PASTED,
    Model,
    pasted,
    published,
    shortened,
)

MAX_BASE = 1e15
MAX_LINK = 8000  # characters of a config in a link; servers refuse far longer ones
AS_MADE = "as published"
METHODS = (AS_MADE, "none", "linear", "ntk", "ntk_mixed", "yarn", "llama3", "longrope")


@dataclasses.dataclass(frozen=True)
class Side:
    """One RoPE of the page: a model, and what was changed of it; None: as the model has it."""

    model: str = "llama-3-8b"
    config: str = ""
    layer: str = ""
    method: str = AS_MADE
    base: float | None = None
    head_dim: int | None = None
    trained: int | None = None

    def made(self) -> Model:
        """The RoPE before any change; ValueError as of `pasted` and `published`.

        >>> Side().made().spec.base
        500000.0
        """
        if self.model == PASTED:
            if not self.config.strip():
                raise ValueError("paste a config.json, or choose a published model")
            return pasted(self.config, self.layer or None)
        return published(self.model)

    def link_config(self) -> str | None:
        """The config as it stands in a link, cut if it is long; None where that is not enough.

        >>> Side(config="{}").link_config()
        ''
        """
        if self.model != PASTED or len(self.config) <= MAX_LINK:
            return self.config if self.model == PASTED else ""
        short = shortened(self.config, self.layer or None)
        return short if len(short) <= MAX_LINK else None


@dataclasses.dataclass(frozen=True)
class Look:
    """What one figure is about: a RoPE, the plain one it was made from, and two lengths in tokens.

    plain    the same base and channels without any scaling
    before   what the training had, by `spectrum.before_scaling`: the critical dimension is of it
    trained  length of the training before an extension;  context  length that is asked about
    """

    spec: Rotary
    plain: Rotary
    before: Rotary
    trained: int
    context: int


def look(side: Side, context: int) -> Look:
    """The RoPE that one side asks for; ValueError of one line where that makes no sense.

    >>> look(Side(model="llama-2-7b", method="linear"), 8192).spec.params["factor"]
    2.0
    """
    made = side.made()
    spec = _changed(made.spec, side)
    trained = side.trained or made.trained
    plain = spec
    if spec.schedule not in ("custom", "axial", "proportional"):  # these scale nothing
        plain = dataclasses.replace(spec, schedule="default", params={})
    before = spectrum.before_scaling(spec)
    if side.method != AS_MADE:
        scaled = extension.methods(plain, trained, context) if context > trained else {}
        spec, before = scaled.get(side.method, plain), plain
    return Look(spec, plain, before, trained, context)


def _changed(spec: Rotary, side: Side) -> Rotary:
    """The spec with the base and the width of the side; the rotated share of the head is kept."""
    if side.base is not None and side.base != spec.base:
        spec = dataclasses.replace(spec, base=side.base)
    if side.head_dim is None or side.head_dim == spec.head_dim:
        return spec
    if side.head_dim % 2:
        raise ValueError(f"head_dim must be even, got {side.head_dim}")
    share = side.head_dim / spec.head_dim
    rotary_dim = max(2, 2 * round(spec.rotary_dim * share / 2))
    start = min(round(spec.start * share), side.head_dim - rotary_dim)
    return dataclasses.replace(spec, head_dim=side.head_dim, rotary_dim=rotary_dim, start=start)


def side(default: Side, **given: object) -> Side:
    """A side from what controls or a link say, checked and bounded; None and "" say nothing.

    >>> side(Side(), base="1e99", head_dim=96) == Side(base=1e15, head_dim=96)
    True
    """
    kept: dict[str, object] = {}
    for name, value in given.items():
        if value is None or value == "":
            continue
        if name == "base":
            kept[name] = number(name, value, 1, MAX_BASE)
        elif name == "head_dim":
            kept[name] = int(number(name, value, 2, MAX_HEAD_DIM))
        elif name == "trained":
            kept[name] = int(number(name, value, 1, MAX_LENGTH))
        elif name == "method":
            kept[name] = one_of(name, value, METHODS)
        elif name == "model":
            if value != PASTED:
                published(str(value))
            kept[name] = str(value)
        elif name in ("layer", "config"):
            kept[name] = str(value)[: MAX_PASTED + 1]
    return dataclasses.replace(default, **kept)  # type: ignore[arg-type]  # by name, checked above


def number(name: str, value: object, least: float, most: float) -> float:
    """`value` as a number, moved into `least` .. `most`; ValueError for what is no number.

    >>> number("context", "1e15", 1, 2**24)
    16777216
    """
    try:
        found = float(value)  # type: ignore[arg-type]  # what is no number raises
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if math.isnan(found):
        raise ValueError(f"{name} must be a number, got {str(value)[:40]!r}")
    return min(max(found, least), most)


def one_of(name: str, value: object, known: Collection[str]) -> str:
    """`value` if it is one of `known`; else ValueError, with the nearest one.

    >>> one_of("method", "yarn", METHODS)
    'yarn'
    """
    if value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(known)}; "
            f"got {str(value)[:40]!r}{nearest(str(value)[:40], known)}"
        )
    return str(value)
