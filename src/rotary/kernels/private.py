"""Private names of other libraries, and what torch.compile records in place of a function."""

import sys
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


def constant(function: Function) -> Function:
    """Have torch.compile call a function while it records, and use the result as a constant.

    `torch.compiler.assume_constant_result` does the same, and imports Dynamo: that takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _class(name: str) -> type | tuple[()]:
    library, _, kind = name.rpartition(".")
    found: type | tuple[()] = getattr(sys.modules.get(library), kind, ())
    return found


@constant
def _is_below(kind: type, name: str) -> bool:
    return issubclass(kind, _class(name))


@recorded_as(lambda value, name: _is_below(type(value), name))
def is_a(value: object, name: str) -> bool:
    """Whether a value is of a class such as "torch.Tensor", whose library may not be imported.

    No value of the class exists before that. If Dynamo recorded the look into `sys.modules`, it
    would make a variable of each of thousands of modules, which takes half of the time to compile.

    >>> is_a(3, "builtins.int"), is_a(3, "no_such.Tensor")
    (True, False)
    """
    return isinstance(value, _class(name))


@recorded_as(lambda: True)
def is_recorded_by_torch() -> bool:
    """Whether torch.compile or torch.export records this call."""
    # another thread may be in the middle of importing torch
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())


@recorded_as(lambda: True)
def is_recorded_by_dynamo() -> bool:
    """Whether Dynamo, the first stage of torch.compile, records this line; not what it calls."""
    return False
