"""Finds the rotations in one forward of a torch module, whatever the names of its functions.

The result of every operator is compared with earlier arrays: `turned` decides from the numbers if
it is a rotation of one of them. So a rotation is found wherever it is computed: in a function, a
method, a module, a nested function, an operator in place, or written out in the attention.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..kernels import Numbers as Array
from ..kernels.torch.private import OperatorMode
from .probe import one_line
from .turned import Turned, turned

KEPT = 24  # the latest arrays of one shape, with which the next array is compared
MAX_CHANNELS = 1024  # of a head
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Rotation(NamedTuple):
    """One rotation that was seen: x became y, both (tokens, heads, channels).

    path   of the module in which y was made
    dtype  the coarsest type of the two
    """

    path: str
    x: Array
    y: Array
    dtype: str
    turned: Turned


def of_widest_heads(seen: Sequence[Rotation]) -> list[Rotation]:
    """Drop rotations of slices of heads: keep the widest head_dim that both q and k have."""
    by_width: dict[int, list[Rotation]] = {}
    for each in seen:
        by_width.setdefault(each.turned.head_dim, []).append(each)
    several = [width for width, own in by_width.items() if len(own) > 1]
    return by_width[max(several or by_width)]


def forwards(seen: Sequence[Rotation]) -> list[Rotation]:
    """Drop what is rotated back after two or more arrays were rotated as the first one.

    DeepSeek V4 rotates q and k, and rotates what its attention returns back. A model that rotates
    only k back keeps all, since it is wrong.
    """
    first = seen[0].turned

    def is_turned(each: Rotation, sign: int) -> bool:
        own = each.turned
        if own.angles.shape != first.angles.shape:
            return False
        gap = np.abs(np.exp(1j * own.angles) - np.exp(1j * sign * first.angles)).max()
        return bool(gap <= 40 * max(own.noise, first.noise))

    ahead = [each for each in seen if is_turned(each, 1)]
    others = [each for each in seen if not is_turned(each, 1)]
    is_back = len(ahead) > 1 and all(is_turned(each, -1) for each in others)
    return ahead if is_back else list(seen)


def watch(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], tokens: int
) -> tuple[list[Rotation], str | None]:
    """Return the rotations in one forward along axes of `tokens` entries, and its error or None.

    The model runs in evaluation mode and without gradients.

    >>> watch(nn.Linear(2, 2), (torch.ones(3, 2),), {}, 3)
    ([], None)
    """
    watcher = _Watcher(tokens)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            watcher.see(value)
    hooks = []
    for path, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(watcher.entered(path)),
            module.register_forward_hook(watcher.left, always_call=True),
        ]
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    error = None
    try:
        with torch.no_grad(), watcher:
            model(*args, **kwargs)
    except (Exception, SystemExit) as raised:  # whatever a stranger's forward raises
        error = one_line(raised)
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return list(_last_of_each(watcher.seen)), error


class _Snapshot(NamedTuple):
    values: Array
    dtype: str
    root: int  # number of the array that rotations made this one from


class _Operators(OperatorMode):  # type: ignore[misc]  # one of two classes of torch
    """Calls `run` in place of every operator; it returns what the operator returns."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return self.run(func, args, kwargs or {})

    __torch_function__ = __torch_dispatch__


class _Watcher(_Operators):
    """Compares the result of every operator with earlier ones, and records rotations."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.path: list[str] = []
        self.kept: dict[tuple[int, ...], list[_Snapshot]] = {}
        self.seen: list[tuple[int, Rotation]] = []
        self.count = 0

    def entered(self, path: str) -> Callable[..., None]:
        return lambda *_: self.path.append(path)

    def left(self, *_: object) -> None:
        self.path.pop()

    def run(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        result = func(*args, **kwargs)
        if "empty" in getattr(func, "__name__", ""):
            _hide(result)
        outputs = result if isinstance(result, tuple | list) else (result,)
        for tensor in (*outputs, *_written(func, args)):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return result

    def see(self, tensor: Tensor) -> None:
        """Keep the values of a tensor, and record it if it is a rotation of an earlier one."""
        if tensor.dtype not in _TYPES or tensor.ndim < 2 or tensor.is_meta:
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        for values in _by_token(tensor, self.tokens):
            kept = self.kept.setdefault(values.shape, [])
            if any(np.array_equal(values, each.values) for each in kept):
                continue
            self.count += 1
            root = self.count
            path = self.path[-1] if self.path else ""
            found = []
            for before in kept:
                coarser = max(dtype, before.dtype, key=["float64", "float32", "float16",
                                                        "bfloat16"].index)  # fmt: skip
                if turns := turned(before.values, values, coarser):
                    rotation = Rotation(path, before.values, values, coarser, turns)
                    found.append((before.root, rotation))
            if found:  # of queries before and after they were scaled, those it is a rotation of
                self.seen.append(min(found, key=lambda each: _scaling(each[1])))
                root = self.seen[-1][0]
            kept.append(_Snapshot(values, dtype, root))
            del kept[:-KEPT]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Give a model its attributes back as they were, and its tensors but parameters their values.

    A forward may replace, add or overwrite them: dynamic NTK makes new frequencies and notes the
    length they are for. Lazy modules keep what their first forward makes of them.

    >>> class Counts(nn.Module):
    ...     def forward(self, x):
    ...         self.length = len(x)
    ...         self.table.add_(1)
    >>> counts = Counts()
    >>> counts.register_buffer("table", torch.zeros(2))
    >>> with unchanged(counts):
    ...     counts(torch.ones(3, 2))
    >>> hasattr(counts, "length"), counts.table.tolist()
    (False, [0.0, 0.0])
    """
    held = [vars(each) for each in model.modules() if not isinstance(each, LazyModuleMixin)]
    held += [each for own in held for each in own.values() if type(each) in (dict, OrderedDict)]
    before = [(own, own.copy()) for own in held]
    writes = _Writes(each for own in held for each in own.values())
    try:
        with writes:
            yield
    finally:
        for tensor, copied in writes.copies:
            with torch.no_grad():
                tensor.copy_(copied)
        for own, values in before:
            own.clear()
            own.update(values)


class _Writes(_Operators):
    """Copies tensors, of some that are no parameters, before they are written to."""

    def __init__(self, values: Iterable[object]) -> None:
        super().__init__()
        tensors = (each for each in values if isinstance(each, Tensor))
        self.unwritten = {id(t): t for t in tensors if not isinstance(t, nn.Parameter)}
        self.copies: list[tuple[Tensor, Tensor]] = []

    def run(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        for each in _written(func, args):
            tensor = self.unwritten.pop(id(each), None)
            if tensor is not None:
                self.copies.append((tensor, tensor.clone()))
        return func(*args, **kwargs)


def _written(func: object, args: Sequence[object]) -> list[object]:
    """Return what an operator may write to: its first argument, and what that is a view of."""
    schema = getattr(func, "_schema", None)  # None: it may write
    if not args or not (schema is None or schema.is_mutable):
        return []
    return [args[0], getattr(args[0], "_base", None)]


def _hide(fresh: object) -> None:
    """Fill a tensor that an operator left uninitialized with nan, which `_by_token` skips.

    Its memory may hold queries or keys of an earlier forward, rotated by other angles.
    """
    if isinstance(fresh, Tensor) and fresh.dtype in _TYPES and not fresh.is_meta:
        fresh.fill_(math.nan)


def _by_token(tensor: Tensor, tokens: int) -> Iterator[Array]:
    """Yield a tensor as (tokens, heads, channels), for each axis of `tokens` entries."""
    *rows, channels = tensor.shape
    if channels < 2 or channels > MAX_CHANNELS or math.prod(rows) < 2 * tokens:
        return
    for axis, size in enumerate(rows):
        if size == tokens:
            moved = tensor.detach().movedim(axis, 0).reshape(tokens, -1, channels)
            values = moved.to("cpu", torch.float64, copy=True).numpy()  # the model may overwrite it
            if np.isfinite(values).all():
                yield values


def _last_of_each(seen: Sequence[tuple[int, Rotation]]) -> Iterator[Rotation]:
    """Yield, for each root, the last of its rotations with the amplitude nearest to 1."""
    roots: dict[int, Rotation] = {}
    for root, rotation in seen:
        before = roots.get(root)
        if before is None or _scaling(rotation) <= _scaling(before):
            roots[root] = rotation
    yield from roots.values()


def _scaling(rotation: Rotation) -> float:
    """Return how far the amplitude is from 1: queries are often scaled as well."""
    return round(abs(math.log(rotation.turned.amplitude)), 2)
