"""The styles in which tables of models hold the columns of pairs, and conversions between them.

"half"     one column for each pair, as `rotary.rotate` takes them
"halves"   the columns of all pairs, then the same columns again
"repeat"   each column twice, side by side
"first"    the columns of all pairs, then as many unused columns
"complex"  one complex table, cos + i sin
"matrix"   one table of matrices [[cos, -sin], [sin, cos]], of shape (..., pairs, 2, 2)

A single tensor of another style holds sin and then cos along the last axis, as in timm.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..kernels.torch.private import version_of
from ..kernels.torch.state import has_memory, is_capturing, is_recording

# what other libraries raise for arguments of a wrong shape or type
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)
TWICE = ("halves", "repeat", "matrix")  # these hold each cos and sin twice; one of them is read
_CACHED = "_rotary_prepared"  # attribute of a table: the results of `prepared` and `agrees_twice`
Result = TypeVar("Result")
Halves = tuple[Tensor, Tensor] | None  # cos and sin with a column for each pair


def style_of(tables: Sequence[Tensor]) -> str:
    """Return the style of (cos, sin), or of one table that holds both, judged by the values.

    >>> style_of([torch.tensor([1.0, 2.0, 1.0, 2.0])] * 2)
    'halves'
    """
    if len(tables) == 1:
        if tables[0].is_complex():
            return "complex"
        tables = tables[0].chunk(2, dim=-1)
    if tables[0].shape[-1] % 2 == 0:
        if all(torch.equal(*table.chunk(2, dim=-1)) for table in tables):
            return "halves"
        if all(torch.equal(table[..., ::2], table[..., 1::2]) for table in tables):
            return "repeat"
    return "half"


def half_width(
    tables: Sequence[Tensor],
    style: str,
    axis: int | None = None,
    ndim: int | None = None,
    prefix: int = 0,
) -> Halves:
    """Return (cos, sin) as `rotary.rotate` takes them, half width and float32; None if impossible.

    prefix  rows of angle 0 in front; the other arguments as of `half_views`

    >>> half_width([torch.tensor([1.0, 1.0, 2.0, 2.0])] * 2, "repeat")[0]
    tensor([1., 2.])
    """
    halves = half_views(tables, style, axis, ndim)
    if halves is None:
        return None
    cos, sin = (half.float().contiguous() for half in halves)
    if prefix > 0:
        cos = nn.functional.pad(cos, (0, 0, prefix, 0), value=1.0)
        sin = nn.functional.pad(sin, (0, 0, prefix, 0))
    return cos, sin


def half_views(tables: Sequence[Tensor], style: str, axis: int | None, ndim: int | None) -> Halves:
    """Return the columns of cos and sin for each pair, in the memory of the tables, or None.

    axis  where to insert an axis of size one
    ndim  number of axes of the result; missing axes are added in front

    >>> half_views([torch.tensor([1.0, 1.0, 2.0, 2.0])] * 2, "repeat", None, 2)[0]
    tensor([[1., 2.]])
    """
    if tables[0].is_complex() != (style == "complex"):
        return None
    if style == "complex":
        cos, sin = tables[0].real, tables[0].imag
    elif style == "matrix":
        if tables[0].shape[-2:] != (2, 2):
            return None
        cos, sin = tables[0][..., 0, 0], tables[0][..., 1, 0]
    elif len(tables) == 1:
        sin, cos = tables[0].chunk(2, dim=-1)
    else:
        cos, sin = tables
    if cos.shape != sin.shape or cos.ndim == 0:
        return None
    width = cos.shape[-1]
    columns = slice(None)
    if style in ("first", "halves", "repeat"):
        if width % 2:
            return None
        columns = slice(None, None, 2) if style == "repeat" else slice(width // 2)
    if axis is not None and not -cos.ndim - 1 <= axis < cos.ndim:  # the last axis holds the pairs
        return None
    missing = 0 if ndim is None else ndim - cos.ndim - (axis is not None)
    if missing < 0:
        return None
    halves = []
    for table in (cos, sin):
        half = table[..., columns]
        half = half if axis is None else half.unsqueeze(axis)
        halves.append(half[(None,) * missing] if missing else half)
    return halves[0], halves[1]


def prepared(
    style: str,
    tables: Sequence[Tensor],
    axis: int | None,
    shape: tuple[int, ...],
    has_prefix: bool = False,
) -> Halves:
    """Return `half_width` for x of this shape, computed once for all layers of a forward.

    has_prefix  x may have tokens before those of the tables: they get an angle of 0

    The result is stored on the first table, so it is freed with that table. It is computed anew if
    a write to the tables would not be seen: torch does not count those to inference tensors, nor
    those of a CUDA graph, for which a call is captured once.
    """
    first, last = tables[0], tables[-1]
    rows = first.shape[-2] if has_prefix and first.ndim > 1 else 0
    key = style, axis, len(shape), shape[-2] - rows if has_prefix else 0
    if (
        torch.compiler.is_compiling()
        or first.requires_grad
        or last.requires_grad
        or is_capturing(first)
    ):
        return half_width(tables, *key)
    return _once(tables, half_width, key)


def agrees_twice(style: str, tables: Sequence[Tensor]) -> bool:
    """Return whether what these tables hold twice is equal: then reading one of the two is enough.

    Computed once for all layers of a forward. False where the values cannot be read or may change:
    in a compiler, a trace or a CUDA graph, and for tables that are learned.

    >>> agrees_twice("repeat", [torch.tensor([1.0, 1.0, 2.0, 2.5])] * 2)
    False
    """
    if style not in TWICE:
        return True
    if is_recording() or not all(map(has_memory, tables)):
        return False
    if is_capturing(tables[0]) or any([table.requires_grad for table in tables]):
        return False
    return _once(tables, _agrees_twice, (style,))


def _agrees_twice(tables: Sequence[Tensor], style: str) -> bool:
    halves = half_views(tables, style, None, None)
    if halves is None:
        return False
    if style != "matrix" and len(tables) == 1:
        tables = tables[0].chunk(2, dim=-1)[::-1]
    return all(map(torch.equal, full_width(style, *halves), tables))


def _once(
    tables: Sequence[Tensor], compute: Callable[..., Result], key: tuple[object, ...]
) -> Result:
    """Return compute(tables, *key), computed once if torch counts every write to the tables."""
    first, last = tables[0], tables[-1]
    if first.is_inference() or last.is_inference():
        return compute(tables, *key)
    other = None if last is first else last  # a table must not refer to itself
    cached = vars(first).get(_CACHED, {})
    kept = cached.get((compute, key))
    if kept is not None and kept[0] is other and kept[1] == _versions(first, last):
        found: Result = kept[2]
        return found
    result = compute(tables, *key)
    if all(map(has_memory, tables)):
        entry = other, _versions(first, last), result
        vars(first)[_CACHED] = {**cached, (compute, key): entry}
    return result


def _versions(first: Tensor, last: Tensor) -> tuple[object, ...]:
    return version_of(first), version_of(last), first.data_ptr(), last.data_ptr()


def full_width(style: str, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return the tables of a model in this style, from cos and sin of half width.

    >>> full_width("repeat", *[torch.tensor([1.0, 2.0])] * 2)[0]
    tensor([1., 1., 2., 2.])
    """
    if style == "complex":
        return (torch.complex(cos, sin),)
    if style == "matrix":
        return (torch.stack((cos, -sin, sin, cos), dim=-1).reshape(*cos.shape, 2, 2),)
    if style == "halves":
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    if style == "repeat":
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return cos, sin
