"""What the page shows, as plain data that goes into a link and comes back from it.

Everything that arrives, from a control or from a link, is checked and bounded here.
"""

import dataclasses
from collections.abc import Mapping
from urllib.parse import urlencode

from .models import MAX_LENGTH, PASTED
from .side import Side, number, one_of, side
from .views import VIEWS


@dataclasses.dataclass(frozen=True)
class State:
    """Everything that the controls of the page say."""

    a: Side = Side()  # noqa: RUF009  # frozen
    b: Side = Side(method="yarn")  # noqa: RUF009
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


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return f"{value:.15g}" if isinstance(value, float) else str(value)
