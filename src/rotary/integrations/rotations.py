"""Find out what a model's rotation function computes by calling it, and replace it.

Names and source text prove nothing: a function is called on small random tensors, and a
`Convention` is accepted only if the code that will replace the function returns the same numbers.
"""

import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fused import Norm
from .conventions import CHOICES, Convention, rotate_by
from .norms import Deferred, deferred_norm
from .styles import REFUSALS, full_width

TOLERANCE = 4e-6  # a few float32 roundings of values below 8
_LAYOUTS = ("half", "interleaved")
_PAIRS = (("cos", "sin"), ("freqs_cos", "freqs_sin"), ("cos_emb", "sin_emb"))
_SINGLE = re.compile(r"freqs|rope|(rotary_)?emb$")  # one parameter that holds both

_BATCH, _SEQ, _HEAD_DIM = 2, 5, 16


@functools.lru_cache(maxsize=256)
def conventions_of(function: Callable[..., object]) -> tuple[Convention, ...]:
    """Return a `Convention` for each combination of values of the parameters in `CHOICES`.

    Raises ValueError as `convention_of` does, if it fails for all of them.

    >>> def turned(x, cos, sin, half=False):
    ...     first, second = x.chunk(2, dim=-1) if half else (x[..., ::2], x[..., 1::2])
    ...     both = first * cos - second * sin, second * cos + first * sin
    ...     return torch.cat(both, -1) if half else torch.stack(both, -1).flatten(-2)
    >>> [(convention.chosen, convention.layout) for convention in conventions_of(turned)]
    [((('half', False),), 'interleaved'), ((('half', True),), 'half')]
    """
    names = [name for name in inspect.signature(function).parameters if name in CHOICES]
    if not names:
        return (convention_of(function),)
    conventions, error = [], ValueError("computes no rotation of q and k that rotary knows")
    for values in itertools.product(*[CHOICES[name] for name in names]):
        try:
            conventions.append(convention_of(function, tuple(zip(names, values, strict=True))))
        except ValueError as refused:
            error = refused
    if not conventions:
        raise error
    return tuple(conventions)


@functools.lru_cache(maxsize=256)
def convention_of(
    function: Callable[..., object], chosen: tuple[tuple[str, object], ...] = ()
) -> Convention:
    """Return the first `Convention` with the results of `function`, called with `chosen` values.

    Raises ValueError if none has them. `function` must take one or two tensors, then cos and sin or
    one argument that holds both, and nothing else without a default.

    >>> def turned(x, cos, sin):
    ...     first, second = x.chunk(2, dim=-1)
    ...     return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    >>> convention_of(turned).style
    'half'
    """
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    names = tuple(defaults)
    tables: tuple[str, ...] = next((pair for pair in _PAIRS if {*pair} <= {*names}), ())
    tables = tables or tuple([name for name in names if _SINGLE.match(name)][:1])
    operands = min((names.index(name) for name in tables), default=0)
    for name in (*names[:operands], *tables):
        del defaults[name]
    if operands not in (1, 2) or inspect.Parameter.empty in defaults.values():
        raise ValueError(f"takes ({', '.join(names)}), not x or q, k and then cos, sin")
    wide = [(style, "each") for style in ("half", "first", "halves", "repeat")]
    if len(tables) == 1:
        wide = [(style, how) for how in ("tuple", "joined") for style in ("halves", "repeat")]
        wide = [("complex", "each"), ("matrix", "each"), *wide]
    trials = _trials("unsqueeze_dim" in defaults)
    for (style, holder), trial in itertools.product(wide, trials):
        for layouts_and_sign in itertools.product(_LAYOUTS, _LAYOUTS, (False, True)):
            convention = Convention(
                names, operands, tables, defaults, trial.new_axis, style, *layouts_and_sign,
                holder=holder, chosen=chosen,
            )  # fmt: skip
            if _agrees(function, convention, trial, _HEAD_DIM):
                return _completed(function, convention, trial)
    raise ValueError("computes no rotation of q and k that rotary knows")


def replacement_of(
    function: Callable[..., object],
    *conventions: Convention,
    keeps_dtype: bool = False,
) -> Callable[..., object]:
    """Return a function with the arguments of `function` that rotates by `rotary.rotate`.

    Of several conventions, the arguments of a call choose one. A call that does not fit (another
    argument, shape or dtype) is passed to `function`. With `convention.by_config` it raises
    ValueError instead, since `function` would rotate the wrong channels. `keeps_dtype` is for
    tables in a wider dtype than those of the model: the result has the dtype of x, and `function`
    gets the tables in that dtype.
    """
    if keeps_dtype:
        conventions = tuple([each._replace(promotes=False) for each in conventions])
    convention = conventions[0]
    operands = convention.parameters[: convention.operands]
    needed = {*operands, *convention.tables}

    @functools.wraps(function, updated=())
    def rotation(*args: Any, rotary_norms: Sequence[Deferred | None] = (), **kwargs: Any) -> Any:
        values = dict(zip(convention.parameters, args, strict=False), **kwargs)
        is_complete = (
            len(values) == len(args) + len(kwargs)
            and values.keys() >= needed
            and isinstance(values[operands[0]], Tensor)
            and isinstance(values[operands[-1]], Tensor)
        )
        if any(rotary_norms):
            norm = _norm_of(rotary_norms) if is_complete else None
            if norm is not None and (rotated := rotate_by(convention, values, norm)) is not None:
                return rotated
            for name, left in zip(operands, rotary_norms, strict=True):
                values[name] = values[name] if left is None else deferred_norm(left, values[name])
            args, kwargs = (), values
        for each in conventions if is_complete else ():
            rotated = rotate_by(each, values)
            if rotated is not None:
                return rotated
        if convention.by_config:
            raise ValueError(
                f"{function.__name__} is called with shapes or dtypes that rotary does not take, "
                f"and its own code does not rotate {convention.layout} weights; convert the "
                "weights back to its own layout"
            )
        if is_complete and keeps_dtype and len(convention.tables) == 2:
            dtype = values[operands[0]].dtype
            return function(**values | {name: values[name].to(dtype) for name in convention.tables})
        return function(*args, **kwargs)

    return rotation


def _norm_of(left: Sequence[Deferred | None]) -> Norm | None:
    """Return the norms of q and k for `rotary.fused`; None if it cannot compute both."""
    of_q, of_k = (*left, None)[:2]
    one = of_q or of_k
    if one is None or (of_q and of_k and of_q[2:] != of_k[2:]):
        return None
    return Norm(of_q and of_q.weight, of_k and of_k.weight, one.eps, add_one=one.add_one)


# --- trying a function ---


class _Trial(NamedTuple):
    """One trial: shapes of q and k without the last axis, and of a table; and `unsqueeze_dim`."""

    new_axis: int | str | None
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    table: tuple[int, ...]
    unsqueeze_dim: int | None = None


_HEADS_FIRST = ((_BATCH, 3, _SEQ), (_BATCH, 2, _SEQ))
_HEADS_LAST = ((_BATCH, _SEQ, 3), (_BATCH, _SEQ, 2))
_NO_HEADS = ((_BATCH, _SEQ),) * 2  # all heads in one row, and tables as wide


def _trials(has_unsqueeze_dim: bool) -> list[_Trial]:
    if has_unsqueeze_dim:
        return [_Trial("unsqueeze_dim", _HEADS_FIRST, (_BATCH, _SEQ), 1)]
    return [
        _Trial(1, _HEADS_FIRST, (_BATCH, _SEQ)),
        _Trial(-2, _HEADS_LAST, (_BATCH, _SEQ)),
        _Trial(-2, ((_SEQ, 3), (_SEQ, 2)), (_SEQ,)),
        _Trial(None, _HEADS_FIRST, (_SEQ,)),
        _Trial(-2, _HEADS_LAST, (_SEQ,)),
        _Trial(None, _HEADS_LAST, (1, _SEQ, 1)),
        _Trial(None, _NO_HEADS, (_BATCH, _SEQ)),
    ]


def _agrees(
    function: Callable[..., object], convention: Convention, trial: _Trial, rotary_dim: int
) -> bool:
    """Return whether `function` and our rotation agree on random tensors with random angles.

    Raises ValueError if `function` writes to q or k: its caller may read the result there.
    """
    arguments = _random(convention, trial, rotary_dim)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of complex tables that a function makes real
        ours = rotate_by(convention, arguments)
        try:
            theirs = None if ours is None else function(**arguments)
        except REFUSALS:
            return False
    before = _random(convention, trial, rotary_dim)
    if not all([torch.equal(arguments[name], before[name])
                for name in convention.parameters[: convention.operands]]):  # fmt: skip
        raise ValueError("writes to q or k, which rotary would leave as they are")
    if convention.operands == 1:
        theirs, ours = (theirs,), (ours,)
    if not isinstance(theirs, (tuple, list)) or len(theirs) != convention.operands:
        return False
    return all(
        isinstance(one, Tensor)
        and one.shape == other.shape
        and one.dtype == other.dtype
        and torch.allclose(one, other, rtol=0, atol=TOLERANCE)
        for one, other in zip(theirs, ours, strict=True)
    )


def _random(convention: Convention, trial: _Trial, rotary_dim: int) -> dict[str, Any]:
    """Return random arguments of a rotation function, all but those with a default."""
    random = torch.Generator().manual_seed(7)
    operands = convention.parameters[: convention.operands]
    xs = {
        name: torch.randn(*shape, _HEAD_DIM, generator=random)
        for name, shape in zip(operands, trial.shapes, strict=False)
    }
    angles = (torch.rand(*trial.table, rotary_dim // 2, generator=random) - 0.5) * 6.28
    scale = 1.25  # an attention factor
    tables = full_width(convention.style, angles.cos() * scale, angles.sin() * scale)
    if convention.style == "first":
        unread = torch.randn(angles.shape, generator=random)
        tables = tuple(torch.cat((table, unread), dim=-1) for table in tables)
    if convention.narrows:
        tables = tuple(table.to(torch.complex128 if table.is_complex() else torch.float64)
                       for table in tables)  # fmt: skip
    more = dict(convention.chosen)
    if trial.unsqueeze_dim is not None:
        more["unsqueeze_dim"] = trial.unsqueeze_dim
    held: Sequence[object] = tables
    if convention.holder == "tuple":
        held = (tables,)
    elif convention.holder == "joined":
        held = (torch.cat(tables[::-1], dim=-1),)
    return {**xs, **dict(zip(convention.tables, held, strict=True)), **more}


def _completed(
    function: Callable[..., object], convention: Convention, trial: _Trial
) -> Convention:
    """Complete `convention` by trying narrower tables, another axis order and another dtype."""
    if convention.new_axis == "unsqueeze_dim":
        other = trial._replace(shapes=_HEADS_LAST, unsqueeze_dim=2)
        if not _agrees(function, convention, other, _HEAD_DIM):
            raise ValueError("reads unsqueeze_dim in a way that rotary does not know")
    for start in ("leading", "trailing"):
        narrow = convention._replace(start=start)
        if _agrees(function, narrow, trial, _HEAD_DIM // 2):
            convention = narrow
            break
    if convention.new_axis is None and trial.table == (_SEQ,):
        after = convention._replace(has_prefix=True)
        if _agrees(function, after, trial._replace(table=(_SEQ - 2,)), _HEAD_DIM):
            convention = after
    in_float64 = convention._replace(narrows=True)
    if _agrees(function, in_float64, trial, _HEAD_DIM):
        convention = in_float64
    arguments = _random(convention._replace(narrows=False), trial, _HEAD_DIM)
    for name in convention.parameters[: convention.operands]:
        arguments[name] = arguments[name].bfloat16()
    with torch.no_grad():
        result: Any = function(**arguments)
    first = result[0] if convention.operands == 2 else result
    return convention._replace(promotes=first.dtype == torch.float32)
