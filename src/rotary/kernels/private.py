"""Reads private names of other libraries, with a fallback for when they are gone."""

from typing import TypeVar

Value = TypeVar("Value")


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
