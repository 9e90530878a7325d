"""From the controls of the page to a `State` and back, and which controls follow which."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from .models import MAX_LENGTH, PASTED, Model
from .side import Side, number, one_of, side
from .state import State
from .views import VIEWS

# the controls of one side, and those that both share; `_log` is a slider beside a number
SIDE = (
    "model",
    "config",
    "layer",
    "method",
    "base",
    "base_log",
    "head_dim",
    "trained",
    "trained_log",
)
SHARED = ("view", "context", "context_log", "factor", "compared")
NAMES = (*(f"a.{name}" for name in SIDE), *(f"b.{name}" for name in SIDE), *SHARED)
LOGS = {
    "base_log": ("base", 10.0),
    "trained_log": ("trained", 2.0),
    "context_log": ("context", 2.0),
}
FACTORS = (0.25, 64.0)
Values = Mapping[str, Any]


def read(values: Values, changed: str) -> State:
    """The state that the controls say after the one named `changed` was moved.

    Raises ValueError of one line for a value that makes no sense.

    >>> values = shown(State())
    >>> read({**values, "a.base_log": 4.0}, "a.base_log").a.base
    10000.0
    >>> read({**values, "factor": 2.0}, "factor").context
    16384
    """
    values = {**values, **_dragged(values, changed)}
    sides = {}
    for letter, default in (("a", State().a), ("b", State().b)):
        given = {name: values[f"{letter}.{name}"] for name in SIDE if name not in LOGS}
        if changed.startswith(f"{letter}.") and changed[2:] in ("model", "config", "layer"):
            given |= {"base": None, "head_dim": None, "trained": None}
        if changed == f"{letter}.model":
            given["layer"] = None
        blank = Side(model=default.model)
        sides[letter] = _as_made(side(blank, **given))
    context = number("context", values["context"], 1, MAX_LENGTH)
    if changed in ("a.model", "a.config", "a.layer") and (made := _made(sides["a"])):
        context = made.context
    if changed == "factor":
        trained = sides["a"].trained or sides["a"].made().trained
        context = number(
            "context", trained * number("factor", values["factor"], *FACTORS), 1, MAX_LENGTH
        )
    view = one_of("view", values["view"], VIEWS)
    return State(compared=bool(values["compared"]), view=view, context=round(context), **sides)


def shown(state: State) -> dict[str, Any]:
    """What each control shows in a state; None for a number that only a good config would give.

    >>> shown(State())["a.base"], shown(State())["factor"]
    (500000.0, 4.0)
    """
    found: dict[str, Any] = {"view": state.view, "compared": state.compared}
    for letter in ("a", "b"):
        one: Side = getattr(state, letter)
        made = _made(one)
        plain = (made.spec.base, made.spec.head_dim, made.trained) if made else (None,) * 3
        given = (one.base, one.head_dim, one.trained)
        numbers = [
            own if own is not None else other for own, other in zip(given, plain, strict=True)
        ]
        layer = made.layer if made and one.model == PASTED else None
        side_shown = {
            "model": one.model,
            "config": one.config,
            "layer": layer,
            "method": one.method,
            **dict(zip(("base", "head_dim", "trained"), numbers, strict=True)),
        }
        found |= {f"{letter}.{name}": value for name, value in side_shown.items()}
    found["context"] = state.context
    trained = found["a.trained"] or state.context
    found["factor"] = min(max(round(state.context / trained, 2), FACTORS[0]), FACTORS[1])
    for letter, name in (("a.", "base_log"), ("a.", "trained_log"), ("b.", "base_log"),
                         ("b.", "trained_log"), ("", "context_log")):  # fmt: skip
        of, power = LOGS[name]
        value = found[f"{letter}{of}"]
        found[f"{letter}{name}"] = None if value is None else round(math.log(value, power), 2)
    return found


def _dragged(values: Values, changed: str) -> dict[str, Any]:
    """The number beside a slider that was moved, to four digits."""
    letter, _, name = changed.rpartition(".")
    if name not in LOGS:
        return {}
    of, power = LOGS[name]
    moved = number(name, values[changed], 0, 64)
    value = float(f"{power**moved:.4g}")
    return {f"{letter}.{of}" if letter else of: value if of == "base" else round(power**moved)}


def _made(side: Side) -> Model | None:
    try:
        return side.made()
    except ValueError:
        return None


def _as_made(side: Side) -> Side:
    """The side without the numbers that are the model's own."""
    made = _made(side)
    if made is None:
        return side
    own = {"base": made.spec.base, "head_dim": made.spec.head_dim, "trained": made.trained}
    same: dict[str, Any] = {n: None for n, value in own.items() if getattr(side, n) == value}
    return dataclasses.replace(side, **same)
