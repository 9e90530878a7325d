"""Names that a library keeps for itself: asked for in one way, with what is done without them."""

from typing import TypeVar

Value = TypeVar("Value")


def private(library: object, path: str, otherwise: Value) -> Value:
    """What a library has under a private name; `otherwise` where it is gone.

    docs/private_names.md lists every use, and a test of each runs without it.

    >>> import math
    >>> private(math, "_no_such.name", "nothing")
    'nothing'
    """
    value = library
    for name in path.split("."):
        value = getattr(value, name, None)
    return otherwise if value is None else value  # type: ignore[return-value]
