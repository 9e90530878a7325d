"""The two layouts, and the permutations of channels that convert one into the other.

A pair is the two channels that are rotated together. `half` pairs channel i with i + d/2 (Llama,
most of transformers); `interleaved` pairs 2i with 2i + 1 (the paper, GPT-J). Both are the same
rotation of differently ordered channels, so a permutation of the rows of W_q and W_k converts one
into the other and changes no score.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

Layout = Literal["half", "interleaved"]
LAYOUTS: tuple[Layout, ...] = ("half", "interleaved")
Indices = npt.NDArray[np.int64]
_OTHER_NAMES: dict[str, Layout] = {  # in other programs, and of their functions; GPT-J is "j" here
    **dict.fromkeys(("neox", "rotate_half", "non_interleaved"), "half"),
    **dict.fromkeys(("j", "rotate_every_two", "traditional", "complex"), "interleaved"),
    "interleave": "interleaved",
}


def check(layout: str, name: str = "layout") -> None:
    """Raise ValueError unless `layout` is the name of a layout.

    >>> check("neox")
    Traceback (most recent call last):
    ValueError: layout must be 'half' or 'interleaved', got 'neox', which is 'half'
    """
    if layout not in LAYOUTS:
        plain = str(layout)[:80].lower().replace("-", "_").removeprefix("gpt").removeprefix("_")
        same = _OTHER_NAMES.get(plain)
        hint = "" if same is None else f", which is {same!r}"
        given = " ".join(repr(layout).split())[:80]
        raise ValueError(f"{name} must be 'half' or 'interleaved', got {given}{hint}")


def pair_slices(rotary_dim: int, layout: str, start: int = 0) -> tuple[slice, slice]:
    """Return the channels of the first members of all pairs, and of the second, as two slices.

    >>> pair_slices(4, "half")
    (slice(0, 2, None), slice(2, 4, None))
    >>> pair_slices(4, "interleaved")
    (slice(0, 4, 2), slice(1, 4, 2))
    """
    check(layout)
    stop = start + rotary_dim
    if layout == "half":
        middle = start + rotary_dim // 2
        return slice(start, middle), slice(middle, stop)
    return slice(start, stop, 2), slice(start + 1, stop, 2)


def pair_indices(rotary_dim: int, layout: str, start: int = 0) -> Indices:
    """Return the channels of every pair, (rotary_dim / 2, 2) int64: first member, then second.

    >>> pair_indices(6, "half").tolist()
    [[0, 3], [1, 4], [2, 5]]
    >>> pair_indices(6, "interleaved").tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    channels = np.arange(start + rotary_dim, dtype=np.int64)
    first, second = pair_slices(rotary_dim, layout, start)
    return np.stack([channels[first], channels[second]], axis=-1)


def channel_permutation(
    head_dim: int, source: str, target: str, *, rotary_dim: int | None = None, start: int = 0
) -> Indices:
    """Return the `order` with which `x[..., order]` is `x` moved from layout `source` to `target`.

    `order` is (head_dim,) int64. Channels outside [start, start + rotary_dim) stay where they are.
    Rotating in `target` after the move equals moving after rotating in `source`, bit for bit.
    Raises ValueError for an unknown layout, an odd rotary_dim, or a slice outside the head.

    >>> channel_permutation(6, "interleaved", "half").tolist()
    [0, 2, 4, 1, 3, 5]
    >>> channel_permutation(6, "half", "interleaved").tolist()
    [0, 3, 1, 4, 2, 5]
    """
    check(source, "source")
    check(target, "target")
    rotary_dim = head_dim - start if rotary_dim is None else rotary_dim
    if rotary_dim <= 0 or rotary_dim % 2 or start < 0 or start + rotary_dim > head_dim:
        raise ValueError(
            f"rotary_dim must be even and > 0, and start + rotary_dim <= head_dim = {head_dim}; "
            f"got rotary_dim {rotary_dim}, start {start}"
        )
    order = np.arange(head_dim, dtype=np.int64)
    from_pairs = pair_indices(rotary_dim, source, start)
    to_pairs = pair_indices(rotary_dim, target, start)
    order[to_pairs] = from_pairs
    return order


def row_permutation(
    num_heads: int,
    head_dim: int,
    source: str,
    target: str,
    *,
    rotary_dim: int | None = None,
    start: int = 0,
) -> Indices:
    """Return the `order` of rows that moves a q or k projection from layout `source` to `target`.

    `order` is (num_heads * head_dim,) int64, for `weight[order]` and `bias[order]`. `num_heads` is
    the count of *this* projection: for k under GQA, the number of key heads.
    Raises ValueError as `channel_permutation`, or if num_heads < 1.

    >>> row_permutation(2, 4, "interleaved", "half").tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be >= 1, got {num_heads}")
    order = channel_permutation(head_dim, source, target, rotary_dim=rotary_dim, start=start)
    return (np.arange(num_heads, dtype=np.int64)[:, None] * head_dim + order).reshape(-1)
