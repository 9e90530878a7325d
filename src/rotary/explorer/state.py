"""What the page shows, as plain data that goes into a link and comes back from it.

Everything that arrives, from a control or from a link, is checked and bounded here.
"""

import dataclasses
import math
from collections.abc import Mapping
from urllib.parse import urlencode

from ..spec import nearest
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
VIEWS = ("wavelengths", "decay", "similarity", "band", "coverage", "precision", "layout")


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
class State:
    """Everything that the controls of the page say."""

    a: Side = Side()
    b: Side = Side(method="yarn")
    compared: bool = False
    view: str = "wavelengths"
    context: int = 32768


_SIDES = [field.name for field in dataclasses.fields(Side)]
QUERY = ("view", "context", "compared", *(f"{side}.{name}" for side in "ab" for name in _SIDES))


def to_query(state: State) -> str:
    """The state as a query string; what is at its default is left out.

    >>> to_query(State(context=4096, a=Side(base=1e4)))
    'context=4096&a.base=10000'
    """
    fields: dict[str, str] = {}
    plain = State()
    for name in ("view", "context", "compared"):
        if getattr(state, name) != getattr(plain, name):
            fields[name] = _written(getattr(state, name))
    for letter in ("a", "b"):
        side, default = getattr(state, letter), getattr(plain, letter)
        for field in dataclasses.fields(Side):
            value = side.link_config() if field.name == "config" else getattr(side, field.name)
            unused = field.name == "layer" and side.model != PASTED
            if not value or value == getattr(default, field.name) or unused:
                continue
            fields[f"{letter}.{field.name}"] = _written(value)
    return urlencode(fields)


def from_query(query: Mapping[str, str]) -> State:
    """The state of a link; ValueError of one line for a value that makes no sense.

    Keys that are not known are passed over: hosts and browsers add their own.

    >>> from_query({"context": "4096", "a.base": "10000"}) == State(context=4096, a=Side(base=1e4))
    True
    """
    sides = {}
    for letter, default in (("a", State().a), ("b", State().b)):
        given = {key[2:]: value for key, value in query.items() if key.startswith(f"{letter}.")}
        sides[letter] = side(default, **given)
    view = one_of("view", query.get("view", State().view), VIEWS)
    context = number("context", query.get("context", State().context), 1, MAX_LENGTH)
    return State(compared=query.get("compared") == "1", view=view, context=int(context), **sides)


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


def one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    """`value` if it is one of `known`; else ValueError, with the nearest one.

    >>> one_of("view", "decay", VIEWS)
    'decay'
    """
    if value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(known)}; "
            f"got {str(value)[:40]!r}{nearest(str(value)[:40], known)}"
        )
    return str(value)


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return f"{value:.15g}" if isinstance(value, float) else str(value)
