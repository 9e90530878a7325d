"""Reads private names of other libraries, with a value to use once they are gone."""

import importlib
from contextlib import suppress
from types import ModuleType
from typing import TypeVar

Value = TypeVar("Value")


def private(library: object, path: str, otherwise: Value) -> Value:
    """The value of a private name of a library; `otherwise` if the name is gone.

    A part of the library that nothing has imported yet is imported. docs/private_names.md lists
    every use, and a test of each runs without it.

    >>> import math
    >>> private(math, "_no_such.name", "nothing")
    'nothing'
    """
    value = library
    for name in path.split("."):
        if isinstance(value, ModuleType) and not hasattr(value, name):
            with suppress(ImportError):
                importlib.import_module(f"{value.__name__}.{name}")
        value = getattr(value, name, None)
    return otherwise if value is None else value  # type: ignore[return-value]
