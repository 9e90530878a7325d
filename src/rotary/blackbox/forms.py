"""Finds out which arguments a function takes: its form, its library, and the axes of positions."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from .probe import Array, Box, Converter, rotation_of_rows, sample

LIBRARIES = ("numpy", "torch")
Ways = Iterator[tuple[str, tuple[Box, ...]]]  # in words, and a box for each array it rotates
TABLES: Mapping[str, Callable[[Array], Array]] = {  # orders of the columns of a table
    "tile": lambda table: np.concatenate([table, table], -1),
    "repeat": lambda table: np.repeat(table, 2, -1),
    "half": lambda table: table,
}


def form_of(fn: Callable[..., object]) -> str:
    """Return the form of a callable by its signature: "positions" or "tables"; else ValueError.

    >>> form_of(lambda x, *, positions: x), form_of(lambda q, k, cos, sin, unsqueeze_dim=1: (q, k))
    ('positions', 'tables')
    """
    if isinstance(fn, type):
        raise ValueError(f"{fn.__name__} is a class; give a function, or a method of an object")
    if hasattr(fn, "forward") and hasattr(fn, "modules"):
        raise ValueError("this is a module of torch; give its method, such as name.forward")
    hint = "; say form='positions' for f(x, positions) or form='tables' for f(q, k, cos, sin)"
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(f"the callable has no signature to read{hint}") from error
    required = [p.name for p in parameters if _is_required(p)]
    if len(required) == 4 and "cos" in required[2] and "sin" in required[3]:
        return "tables"
    if len(required) == 2 and not {"cos", "sin", "k", "key", "keys"} & set(required):
        return "positions"
    shown = ", ".join(p.name for p in parameters) or "nothing"
    raise ValueError(f"the callable takes ({shown}), which is neither form{hint}")


def by_place(fn: Callable[..., object]) -> Callable[..., object]:
    """Return a function that takes by their place also the arguments that fn takes by keyword only.

    >>> by_place(lambda x, *, positions: (x, positions))(1, 2)
    (1, 2)
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return fn
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and _is_required(p)]

    def called(*given: object) -> object:
        places = len(given) - len(names)
        return fn(*given[:places], **dict(zip(names, given[places:], strict=False)))

    return called if names else fn


def _is_required(p: inspect.Parameter) -> bool:
    return p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)


def boxes_with_positions(
    fn: Callable[..., object],
    head_dim: int,
    seq_dim: int,
    library: str | None,
    dtype: str,
    axes: int,
) -> Ways:
    """Yield ways to call f(x, positions): by library, positions without and with a batch axis."""
    for name, convert in _converters(library, dtype):
        for lead in ((), (1,)):

            def arguments(x: Array, p: Array, lead: tuple[int, ...] = lead) -> Mapping[str, Array]:
                is_one_row = p.ndim == (1 if axes == 1 else 2)
                return {"x": x, "positions": p.reshape(lead + p.shape) if is_one_row else p}

            box = Box(fn, convert, head_dim, seq_dim, axes, dtype, arguments)
            yield f"{name}, positions {'(1, seq' if lead else '(seq'})", (box,)


def boxes_with_tables(
    fn: Callable[..., object],
    head_dim: int,
    seq_dim: int,
    library: str | None,
    dtype: str,
    inv_freq: Array,
    order: str,
) -> Ways:
    """Yield ways to call f(q, k, cos, sin), tables in one `order`: a box of q and one of k each."""
    for name, convert in _converters(library, dtype):
        for lead in ((1,), (), (1, 1)):

            def arguments(
                which: int, x: Array, p: Array, lead: tuple[int, ...] = lead
            ) -> Mapping[str, Array]:
                angles = p[..., None] * inv_freq
                tables = [TABLES[order](table) for table in (np.cos(angles), np.sin(angles))]
                rows = p.shape[:-1] + lead[p.ndim - 1 :]
                cos, sin = (t.reshape(rows + t.shape[-2:]) for t in tables)
                q, k = (x, x[..., ::-1]) if which == 0 else (x[..., ::-1], x)  # never alike
                return {"q": q, "k": k, "cos": cos, "sin": sin}

            q, k = (
                Box(fn, convert, head_dim, seq_dim, 1, dtype, partial(arguments, which), which)
                for which in (0, 1)
            )
            yield f"{name}, tables of {len(lead) + 2} axes", (q, k)


def _converters(library: str | None, dtype: str) -> Iterator[tuple[str, Converter]]:
    """Yield each library and a function that converts NumPy arrays to it; integers stay so."""
    if library != "torch" and dtype != "bfloat16":  # NumPy has no bfloat16
        yield "numpy", lambda a: np.array(a, dtype if a.dtype.kind == "f" else np.int64, order="C")
    if library == "numpy":
        return
    try:
        import torch
    except ImportError:
        if library is not None:
            raise ValueError(f"{library} is not installed") from None
        return
    kind = getattr(torch, dtype)
    yield (
        "torch",
        lambda a: torch.tensor(a.copy(), dtype=kind if a.dtype.kind == "f" else torch.int64),
    )


def first_that_works(ways: Ways) -> tuple[Box, ...]:
    """Return the boxes of the first way with finite numbers of the right shape, or ValueError."""
    refusals: dict[str, str] = {}  # the error, and the first way that gave it
    for name, boxes in ways:
        try:
            for box in boxes:
                # 2 heads, 5 tokens: a wrong broadcast cannot pass as a right one
                box(sample(box, 1, 2, 5), box.positions(np.arange(5)))
        except ValueError as error:
            refusals.setdefault(str(error), name)
        else:
            return tuple(
                dataclasses.replace(box, by_row=rotation_of_rows(box) is not None) for box in boxes
            )
    shown = [f"{name}: {error}" for error, name in refusals.items()]
    raise ValueError(f"no way to call it works: {'; '.join(shown[:3]) or 'no array library'}")
