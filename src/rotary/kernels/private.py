"""Reads private names of other libraries, with a fallback for when they are gone."""

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., object])


def private(library: object, path: str, fallback: Value) -> Value:
    """Return the value of a private name of a library, or `fallback` if the name is gone.

    docs/private_names.md lists every use; for each, a test runs without the name.

    >>> import math
    >>> private(math, "_no_such.name", "nothing")
    'nothing'
    """
    value = library
    for name in path.split("."):
        value = getattr(value, name, None)
    return fallback if value is None else value  # type: ignore[return-value]


def recorded_as(other: Callable[..., object]) -> Callable[[Function], Function]:
    """Have torch.compile record `other` in place of the function below, without a guard on it.

    >>> recorded_as(abs)(lambda x: x)(-1)
    -1
    """

    def marked(function: Function) -> Function:
        function._torchdynamo_inline = other  # type: ignore[attr-defined]
        return function

    return marked
