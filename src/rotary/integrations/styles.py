"""How the tables of a model hold a column for each pair of channels, read and written.

"half"     one column for each pair, as `rotary.rotate` takes them
"halves"   all columns, and once more all columns
"repeat"   each column twice, side by side
"first"    all columns, and as many that nothing reads
"complex"  one complex table, cos + i sin

One real tensor in place of two is sin and then cos, joined along the last axis, as timm has them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def style_of(tables: Sequence[Tensor]) -> str:
    """The style of (cos, sin), or of one table that holds both, by its values.

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
    style: str, tables: Sequence[Tensor], axis: int | None = None, ndim: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) as `rotary.rotate` takes them: half width and float32; None if that cannot be.

    axis  where they get an axis of size one;  ndim  how many axes they get, by more in front

    >>> half_width("repeat", [torch.tensor([1.0, 1.0, 2.0, 2.0])] * 2)[0]
    tensor([1., 2.])
    """
    if tables[0].is_complex() != (style == "complex"):
        return None
    if style == "complex":
        cos, sin = tables[0].real, tables[0].imag
    elif len(tables) == 1:
        sin, cos = tables[0].chunk(2, dim=-1)
    else:
        cos, sin = tables
    if cos.shape != sin.shape or cos.ndim == 0 or cos.dtype == torch.float64:
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
    result = []
    for table in (cos, sin):
        half = table[..., columns]
        half = half if axis is None else half.unsqueeze(axis)
        result.append(half[(None,) * missing].float().contiguous())
    return result[0], result[1]


def full_width(style: str, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """The tables of a model in this style, from cos and sin of half width.

    >>> full_width("repeat", *[torch.tensor([1.0, 2.0])] * 2)[0]
    tensor([1., 1., 2., 2.])
    """
    if style == "complex":
        return (torch.complex(cos, sin),)
    if style == "halves":
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    if style == "repeat":
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return cos, sin


def held(holder: str, tables: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """cos and sin as one argument of a function: a "tuple", or one tensor, sin and cos "joined".

    >>> held("joined", torch.tensor([[1.0], [0.0]]).unbind())
    tensor([0., 1.])
    """
    return tuple(tables) if holder == "tuple" else torch.cat((tables[1], tables[0]), dim=-1)
