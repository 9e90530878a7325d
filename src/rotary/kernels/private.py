"""Reads private names of other libraries, with a value to use once they are gone."""

from typing import TypeVar

Value = TypeVar("Value")


def private(library: object, path: str, otherwise: Value) -> Value:
    """The value of a private name of a library; `otherwise` if the name is gone.

    docs/private_names.md lists every use, and a test of each runs without it.

    >>> import math
    >>> private(math, "_no_such.name", "nothing")
    'nothing'
    """
    value = library
    for name in path.split("."):
        value = getattr(value, name, None)
    return otherwise if value is None else value  # type: ignore[return-value]
