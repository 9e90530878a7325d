"""What a model's own rotation function computes, found by trying it, and ours in its place.

Nothing is concluded from names or source text: a function is called on small random tensors, and
a `Way` counts only if our replacement, the very code that will run, returns the same numbers.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..rotate import rotate

TOLERANCE = 4e-6  # float32: some roundings of values below 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)  # what a wrong shape raises
_KEPT = "_rotary_prepared"

_BATCH, _SEQ, _HEAD_DIM = 2, 5, 16


class Way(NamedTuple):
    """How to compute what a rotation function computes.

    parameters  its parameters; the first `operands` are rotated
    tables      the one or two among them that hold cos and sin
    defaults    of the parameters that must not be given another value
    insert      axis of size one that the tables get; "unsqueeze_dim" if a parameter says it
    style       how a table of width W holds its pairs: "half" one column each, "first" in its first
                half, "halves" twice over, "repeat" in neighbours, "complex" as one complex number
    start       where a narrower table turns the head: "leading", "trailing", or None: nowhere
    clockwise   pairs turn by -angle
    promotes    the result takes the wider dtype of x and table; else that of x
    """

    parameters: tuple[str, ...]
    operands: int
    tables: tuple[str, ...]
    defaults: Mapping[str, Any]
    insert: int | str | None
    style: str
    layout: str
    out_layout: str
    clockwise: bool
    start: str | None = None
    promotes: bool = False

    def __str__(self) -> str:
        layout = self.layout
        layout += f" in, {self.out_layout} out" if self.out_layout != layout else ""
        layout += ", clockwise" if self.clockwise else ""
        return layout


def signature_of(function: Callable[..., Any]) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
    """(parameter names, how many come before the tables, table names) of a rotation function.

    Raises ValueError if it does not take one or two tensors and then cos and sin, or one complex
    table, and nothing else without a default.

    >>> signature_of(lambda q, k, cos, sin, unsqueeze_dim=1: ...)
    (('q', 'k', 'cos', 'sin', 'unsqueeze_dim'), 2, ('cos', 'sin'))
    """
    parameters = inspect.signature(function).parameters
    named = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = tuple(p.name for p in named)
    tables: tuple[str, ...] = ("cos", "sin")
    if not {"cos", "sin"} <= set(names):
        tables = tuple(name for name in names if name.startswith("freqs_ci"))
    count = min((names.index(name) for name in tables), default=0)
    needed = {p.name for p in named[count:] if p.default is p.empty} - set(tables)
    if len(tables) == 0 or count not in (1, 2) or needed:
        raise ValueError(f"takes ({', '.join(names)}), not x or q, k and then cos, sin")
    return names, count, tables


@functools.lru_cache(maxsize=256)
def way_of(function: Callable[..., Any]) -> Way:
    """The first `Way` that gives what `function` gives; ValueError if none does.

    >>> way_of(lambda x, cos, sin: torch.cat((x[..., :8] * cos - x[..., 8:] * sin,
    ...                                       x[..., 8:] * cos + x[..., :8] * sin), -1)).style
    'half'
    """
    names, count, tables = signature_of(function)
    parameters = inspect.signature(function).parameters
    defaults = {n: parameters[n].default for n in names[count:] if n not in tables}
    for style, probe in itertools.product(_STYLES, _probes("unsqueeze_dim" in names)):
        if (style == "complex") != (len(tables) == 1):
            continue
        for layout, out_layout, clockwise in itertools.product(_LAYOUTS, _LAYOUTS, (False, True)):
            way = Way(
                names, count, tables, defaults, probe.insert, style, layout, out_layout, clockwise
            )
            if _agrees(function, way, probe, _HEAD_DIM):
                return _completed(function, way, probe)
    raise ValueError("computes no rotation of q and k that is known")


def replacement_of(
    function: Callable[..., Any],
    way: Way,
    *,
    keeps_dtype: bool = False,
    is_other_layout: bool = False,
) -> Callable[..., Any]:
    """A function called as `function` is, which rotates by `rotary.rotate`.

    A call that does not fit (another argument, shape or dtype) goes to `function` itself.
    `keeps_dtype` is for tables that are wider than the model made them: the result has the dtype of
    x, and `function` gets them in that dtype.
    `is_other_layout` is for a `way` in another layout than `function` has: a call that does not fit
    raises ValueError, for `function` would rotate the wrong channels.
    """
    kept = way._replace(promotes=False) if keeps_dtype else way

    def rotation(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(kept.parameters, args, strict=False), **kwargs)
        call = _call_of(kept, given) if len(given) == len(args) + len(kwargs) else None
        if call is None:
            if is_other_layout:
                raise ValueError(
                    f"{function.__name__} is called with shapes or dtypes that rotary does not "
                    f"take, and its own code does not rotate {kept.layout} weights; convert the "
                    "weights back to its own layout"
                )
            if keeps_dtype:
                args, kwargs = _narrowed(kept, args, kwargs)
            return function(*args, **kwargs)
        xs, cos, sin, seq_dim, start = call
        turned = rotate(
            xs,
            cos,
            sin,
            layout=kept.layout,
            out_layout=kept.out_layout,
            rotary_dim=2 * cos.shape[-1],
            start=start,
            seq_dim=seq_dim,
            conjugate=kept.clockwise,
        )
        return turned if kept.operands == 2 else turned[0]

    return rotation


def _call_of(way: Way, given: dict[str, Any]) -> Any:
    """(xs, cos, sin, seq_dim, start) for `rotate`; None if this call does not fit."""
    insert: Any = way.insert
    for name, value in given.items():
        if name == insert:
            insert = value
        elif name not in way.parameters or (
            name in way.defaults and value is not way.defaults[name]
        ):
            return None
    insert = way.defaults[insert] if isinstance(insert, str) else insert
    xs: Any = tuple([given.get(name) for name in way.parameters[: way.operands]])
    tables: Any = tuple([given.get(name) for name in way.tables])
    if not all([isinstance(value, Tensor) for value in (*xs, *tables)]):
        return None
    x = xs[0]
    if x.ndim < 2 or x.dtype not in _DTYPES or any([y.dtype != x.dtype for y in xs[1:]]):
        return None
    if way.promotes and tables[0].dtype == torch.float32 and x.dtype != torch.float32:
        xs = tuple([other.float() for other in xs])
    prepared = _prepared(way.style, tables, insert, x.ndim)
    if prepared is None:
        return None
    cos, sin = prepared
    seq_dim = -2 if cos.shape[-2] == x.shape[-2] else -3
    start = _start(way, x.shape[-1], 2 * cos.shape[-1])
    if start is None or not _fits(xs, cos, seq_dim):
        return None
    return xs, cos, sin, seq_dim, start


def _prepared(
    style: str, tables: Sequence[Tensor], insert: int | None, ndim: int
) -> tuple[Tensor, Tensor] | None:
    """Half width, float32, and as many axes as x.

    Made once for all layers of a forward: kept on the first table itself, and gone with it.
    """
    if torch.compiler.is_compiling() or any([table.requires_grad for table in tables]):
        return _aligned(style, tables, insert, ndim)
    first, last = tables[0], tables[-1]
    versions = [0 if table.is_inference() else table._version for table in tables]
    kept = vars(first).setdefault(_KEPT, {})
    key = style, insert, ndim
    other = None if last is first else last  # a table must not hold itself
    if key in kept and kept[key][0] is other and kept[key][1] == versions:
        return kept[key][2]
    prepared = _aligned(style, tables, insert, ndim)
    kept[key] = other, versions, prepared
    return prepared


def _aligned(
    style: str, tables: Sequence[Tensor], insert: int | None, ndim: int
) -> tuple[Tensor, Tensor] | None:
    if style == "complex":
        if not tables[0].is_complex():
            return None
        cos, sin = tables[0].real, tables[0].imag
    else:
        cos, sin = tables
    width = cos.shape[-1] if cos.ndim else 0
    if cos.shape != sin.shape or (style in ("first", "halves", "repeat") and width % 2):
        return None
    aligned = []
    for table in (cos, sin):
        if style in ("first", "halves"):
            table = table[..., : width // 2]
        elif style == "repeat":
            table = table[..., ::2]
        if insert is not None:
            if not -table.ndim - 1 <= insert < table.ndim:  # the last axis holds the pairs
                return None
            table = table.unsqueeze(insert)
        if table.ndim > ndim or table.dtype == torch.float64:
            return None
        aligned.append(table[(None,) * (ndim - table.ndim)].float().contiguous())
    return aligned[0], aligned[1]


def _fits(xs: Sequence[Tensor], cos: Tensor, seq_dim: int) -> bool:
    first = xs[0].shape
    ndim = len(first)
    if ndim < 2 - (seq_dim + 2) or cos.shape[-1] == 0:
        return False
    seq = ndim + seq_dim
    heads = ndim - 2 if seq_dim == -3 else ndim - 3
    for x in xs:
        shape = x.shape
        if len(shape) != ndim:
            return False
        for axis in range(ndim):
            if axis != heads and shape[axis] != first[axis]:
                return False
            rows = cos.shape[axis]
            if axis < ndim - 1 and rows != shape[axis] and (axis == seq or rows != 1):
                return False
    return True


def _start(way: Way, head_dim: int, rotary_dim: int) -> int | None:
    if rotary_dim == head_dim:
        return 0
    if rotary_dim > head_dim or way.start is None:
        return None
    return 0 if way.start == "leading" else head_dim - rotary_dim


def _narrowed(way: Way, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call, with its tables in the dtype of x."""
    given = dict(zip(way.parameters, args, strict=False), **kwargs)
    x = given.get(way.parameters[0])
    if not isinstance(x, Tensor):
        return args, kwargs

    def cast(name: str, value: Any) -> Any:
        is_table = name in way.tables and isinstance(value, Tensor) and not value.is_complex()
        return value.to(x.dtype) if is_table else value

    names = (*way.parameters, *[""] * len(args))
    return (
        tuple([cast(name, value) for name, value in zip(names, args, strict=False)]),
        {name: cast(name, value) for name, value in kwargs.items()},
    )


# --- trying a function ---

_STYLES = ("half", "first", "halves", "repeat", "complex")
_LAYOUTS = ("half", "interleaved")


class _Probe(NamedTuple):
    """Shapes of one try: of q and k without their last axis, of a table, and the arguments."""

    insert: int | str | None
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    table: tuple[int, ...]
    extra: Mapping[str, Any]


def _probes(has_unsqueeze_dim: bool) -> Iterator[_Probe]:
    heads_first = ((_BATCH, 3, _SEQ), (_BATCH, 2, _SEQ))
    heads_last = ((_BATCH, _SEQ, 3), (_BATCH, _SEQ, 2))
    if has_unsqueeze_dim:
        yield _Probe("unsqueeze_dim", heads_first, (_BATCH, _SEQ), {"unsqueeze_dim": 1})
        return
    yield _Probe(1, heads_first, (_BATCH, _SEQ), {})
    yield _Probe(-2, heads_last, (_BATCH, _SEQ), {})
    yield _Probe(-2, ((_SEQ, 3), (_SEQ, 2)), (_SEQ,), {})
    yield _Probe(None, heads_first, (_SEQ,), {})


def _agrees(function: Callable[..., Any], way: Way, probe: _Probe, rotary_dim: int) -> bool:
    """Whether ours and theirs give the same on random tensors with random angles."""
    xs, tables = _random(way, probe, rotary_dim)
    arguments = {**dict(zip(way.parameters, xs, strict=False)), **tables, **probe.extra}
    with torch.no_grad():
        try:
            theirs = function(**arguments)
            ours = replacement_of(_refuse, way)(**arguments)
        except _REFUSALS:
            return False
    if way.operands == 1:
        theirs, ours = (theirs,), (ours,)
    if not isinstance(theirs, (tuple, list)) or len(theirs) != way.operands:
        return False
    return all(
        isinstance(one, Tensor)
        and one.shape == other.shape
        and one.dtype == other.dtype
        and torch.allclose(one, other, rtol=0, atol=TOLERANCE)
        for one, other in zip(theirs, ours, strict=True)
    )


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("does not fit")


def _random(way: Way, probe: _Probe, rotary_dim: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    random = torch.Generator().manual_seed(7)
    xs = [
        torch.randn(*shape, _HEAD_DIM, generator=random) for shape in probe.shapes[: way.operands]
    ]
    pairs = rotary_dim // 2
    angles = (torch.rand(*probe.table, pairs, generator=random) - 0.5) * 6.28
    scale = 1.25  # an attention factor
    if way.style == "complex":
        return xs, {way.tables[0]: torch.polar(torch.full_like(angles, scale), angles)}
    tables = {"cos": angles.cos() * scale, "sin": angles.sin() * scale}
    for name, table in tables.items():
        noise = torch.randn(table.shape, generator=random)
        if way.style == "first":
            tables[name] = torch.cat((table, noise), dim=-1)
        elif way.style == "halves":
            tables[name] = torch.cat((table, table), dim=-1)
        elif way.style == "repeat":
            tables[name] = table.repeat_interleave(2, dim=-1)
    return xs, tables


def _completed(function: Callable[..., Any], way: Way, probe: _Probe) -> Way:
    """`way` with what narrower tables, another axis order and other dtypes do."""
    if way.insert == "unsqueeze_dim":
        heads_last = ((_BATCH, _SEQ, 3), (_BATCH, _SEQ, 2))
        other = probe._replace(shapes=heads_last, extra={"unsqueeze_dim": 2})
        if not _agrees(function, way, other, _HEAD_DIM):
            raise ValueError("reads unsqueeze_dim in a way that is not known")
    for start in ("leading", "trailing"):
        narrow = way._replace(start=start)
        if _agrees(function, narrow, probe, _HEAD_DIM // 2):
            way = narrow
            break
    xs, tables = _random(way, probe, _HEAD_DIM)
    halves = {name: x.bfloat16() for name, x in zip(way.parameters, xs, strict=False)}
    with torch.no_grad():
        result = function(**halves, **tables, **probe.extra)
    first = result[0] if way.operands == 2 else result
    return way._replace(promotes=first.dtype == torch.float32)
