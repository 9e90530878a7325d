"""The state of the page, as plain data that is written to a link and read from it.

All values from controls and links are checked here and in `side`.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from urllib.parse import urlencode

from .models import PASTED
from .side import AS_MADE, FieldError, Look, Side, look, number, one_of, side
from .views import VIEWS


@dataclasses.dataclass(frozen=True)
class State:
    """The values of all controls of the page."""

    a: Side = Side()  # noqa: RUF009  # frozen
    b: Side = Side(method="yarn")  # noqa: RUF009
    compared: bool = False
    view: str = "hands"
    context: int = 32768

    def side(self, letter: str) -> Side:
        """Return side "a" or "b" as the view shows it: a plan starts without a chosen method."""
        one: Side = getattr(self, letter)
        return dataclasses.replace(one, method=AS_MADE) if self.view == "plan" else one

    def look(self, letter: str) -> Look:
        """Return the RoPE and lengths of side "a" or "b"; FieldError if a value is invalid."""
        one = self.side(letter)
        try:
            one.original()
        except ValueError as error:
            field = "config" if one.model == PASTED else "model"
            raise FieldError(f"{letter}.{field}", str(error)) from error
        try:
            return look(one, self.context)
        except FieldError as error:
            raise error.of(letter) from error
        except ValueError as error:
            raise FieldError(f"{letter}.method", str(error)) from error


def to_fields(state: State) -> dict[str, str]:
    """Return control name -> text; controls at their default are left out.

    >>> to_fields(State(context=4096, a=Side(base=1e4)))
    {'context': '4096', 'a.base': '10000'}
    """
    plain = _texts(State())
    return {name: text for name, text in _texts(state).items() if text != plain.get(name)}


def _texts(state: State) -> dict[str, str]:
    """Return control name -> text, for all controls that are used and not empty."""
    values = {"view": state.view, "context": state.context, "compared": int(state.compared)}
    for letter in ("a", "b"):
        one: Side = getattr(state, letter)
        unused = () if one.model == PASTED else ("config", "layer")
        values |= {f"{letter}.{name}": value for name, value in vars(one).items()
                   if value and name not in unused}  # fmt: skip
    return {name: f"{value:.15g}" if isinstance(value, float) else str(value)
            for name, value in values.items()}  # fmt: skip


def to_query(state: State) -> str | None:
    """Return the state as the query of a link; None if a config is too long for a link.

    >>> to_query(State(context=4096, a=Side(base=1e4)))
    'context=4096&a.base=10000'
    """
    fields = to_fields(state)
    for letter in ("a", "b"):
        config = getattr(state, letter).link_config()
        if config is None:
            return None
        if config:
            fields[f"{letter}.config"] = config
    return urlencode(fields)


def from_fields(fields: Mapping[str, object], changed: str = "") -> State:
    """Return the state of a link or of the controls; FieldError for an invalid value.

    changed  the control that was moved: a new model replaces the numbers of its side
    Unknown keys are ignored: hosts and browsers add some.

    >>> from_fields({"context": "4096", "a.base": "10000"}) == State(context=4096, a=Side(base=1e4))
    True
    >>> from_fields({"a.model": "llama-2-7b", "a.base": "5"}, "a.model").a.base is None
    True
    """
    letter, _, name = changed.rpartition(".")
    if name in ("model", "config", "layer"):
        stale = ["base", "head_dim", "trained", *["layer"] * (name == "model")]
        fields = {key: value for key, value in fields.items()
                  if key not in [f"{letter}.{each}" for each in stale]}  # fmt: skip
    plain = State()
    a, b = side("a", plain.a, fields), side("b", plain.b, fields)
    context = int(number("context", fields.get("context", plain.context)))
    if changed in ("a.model", "a.config", "a.layer"):
        with contextlib.suppress(ValueError):
            context = a.original().context or context
    view = one_of("view", fields.get("view", plain.view), VIEWS)
    return State(a, b, fields.get("compared") in ("1", True), view, context)


def shown(state: State) -> dict[str, object]:
    """Return the values that the controls show, except configs; and the layer types on offer."""
    values: dict[str, object] = {
        name: getattr(state, name) for name in ("view", "compared", "context")
    }
    for letter in ("a", "b"):
        one: Side = getattr(state, letter)
        values |= {f"{letter}.model": one.model, f"{letter}.method": one.method}
        with contextlib.suppress(ValueError):
            original = one.original()
            values |= {
                f"{letter}.base": one.base or original.spec.base,
                f"{letter}.head_dim": one.head_dim or original.spec.head_dim,
                f"{letter}.trained": one.trained or original.trained,
            }
            if one.model == PASTED and original.layers:
                values |= {f"{letter}.layers": original.layers, f"{letter}.layer": original.layer}
    return values
