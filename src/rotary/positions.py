"""Where each token is: builders of position arrays, and of the axis each pair reads.

A position array is (..., seq) for one axis and (..., seq, axes) for several, int64; a grid that is
centred or stretched is float64. Offsets, packing, padding, images and video are all positions; none
of them reaches a kernel.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, get_args, overload

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
Fractions = npt.NDArray[np.float64]
Segment = tuple[Literal["text"], int] | tuple[Literal["image", "video"], int, int, int]
Order = Literal["contiguous", "ring", "ulysses", "head_tail", "striped"]

ORIGINS: Mapping[str, Callable[[int], float]] = {  # where the first of `size` coordinates is
    "first": lambda size: 0,
    "middle": lambda size: size // 2 - size,
    "center": lambda size: (1 - size) / 2,
    "edge": lambda size: 0.5,
}
MAX_BYTES = 16 * 2**30


def arange(
    seq_len: int, offset: int | npt.ArrayLike = 0, *, max_bytes: int = MAX_BYTES
) -> Positions:
    """Positions offset .. offset + seq_len - 1: (seq,), or (batch, seq) for one offset per row.

    `offset` is the number of tokens already in the cache. Raises ValueError for a negative length,
    for offsets that are not whole numbers, and before allocating more than `max_bytes`.

    >>> arange(3, offset=10).tolist()
    [10, 11, 12]
    >>> arange(2, offset=[0, 7]).tolist()
    [[0, 1], [7, 8]]
    """
    offsets = _whole_numbers("offset", offset)
    if seq_len < 0:
        raise ValueError(f"seq_len must be >= 0, got {seq_len}")
    if 8 * seq_len * max(offsets.size, 1) > max_bytes:
        raise ValueError(
            f"{offsets.size} x {seq_len} positions take {8 * seq_len * offsets.size:,} bytes, over "
            f"max_bytes = {max_bytes:,}; build them in parts or raise max_bytes"
        )
    return offsets[..., None] + np.arange(seq_len, dtype=np.int64)


def packed(cu_seqlens: npt.ArrayLike) -> Positions:
    """Positions of sequences laid end to end: each starts again from 0. Shape (cu_seqlens[-1],).

    `cu_seqlens` holds the boundaries: 0, then the running total of the lengths.
    Raises ValueError unless it starts with 0 and never falls.

    >>> packed([0, 3, 3, 5]).tolist()
    [0, 1, 2, 0, 1]
    """
    bounds = _bounds(cu_seqlens)
    lengths = np.diff(bounds)
    return np.arange(bounds[-1], dtype=np.int64) - np.repeat(bounds[:-1], lengths)


def _bounds(cu_seqlens: npt.ArrayLike) -> Positions:
    bounds = _whole_numbers("cu_seqlens", cu_seqlens)
    if bounds.ndim != 1 or bounds.size == 0 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"cu_seqlens must be 1-D, start with 0 and never fall, got {bounds.tolist()}"
        )
    return bounds


def left_padded(attention_mask: npt.ArrayLike) -> Positions:
    """Positions of a padded batch: the first real token of every row is 0. Shape (batch, seq).

    `attention_mask` is 1 for a token and 0 for padding; padding gets position 0, it is masked out.
    Raises ValueError for a mask with other values.

    >>> left_padded([[0, 0, 1, 1], [1, 1, 1, 1]]).tolist()
    [[0, 0, 0, 1], [0, 1, 2, 3]]
    """
    mask = np.asarray(attention_mask)
    if mask.ndim == 0 or not np.isin(mask, (0, 1)).all():
        raise ValueError("attention_mask must be (..., seq) and hold 0 for padding, 1 for tokens")
    mask = mask.astype(np.int64)
    return (np.cumsum(mask, axis=-1) - 1) * mask


def shard(
    seq_len: int,
    rank: int,
    world: int,
    order: Order = "contiguous",
    *,
    cu_seqlens: npt.ArrayLike | None = None,
) -> Positions:
    """Which tokens of a sequence one rank of `world` holds, in its own order: (seq_len / world,).

    Of a plain sequence these numbers are the positions; those of any other scheme are indexed by
    them along the sequence: `packed(cu_seqlens)[shard(...)]`, `mrope(segments)[shard(...)]`.

    contiguous  block `rank`: sequence parallelism, and DTensor's Shard
    ring        the same blocks: Ring Attention (Liu et al., arXiv 2310.01889) passes keys on, and
                in step s rank r sees those of rank (r - s) mod world
    ulysses     the same blocks, before the all-to-all of Ulysses (Jacobs et al., arXiv 2309.14509);
                after it every rank has all positions, `arange(seq_len)`, and a share of the heads
    head_tail   chunks `rank` and 2 world - 1 - rank of 2 world, to balance a causal mask: the
                zig-zag of Megatron-LM, Transformer Engine and torch's `context_parallel`
    striped     tokens rank, rank + world, ...: Striped Attention (Brandon et al., arXiv 2311.09431)

    With `cu_seqlens` (see `packed`) every packed sequence is cut by itself, as Transformer Engine
    cuts its "thd" batches. For Ulysses leave it out, or the all-to-all mixes the sequences: the
    parts of all ranks one after the other are then not in the order of the whole. Raises ValueError
    for an unknown order, a rank outside 0 .. world - 1, numbers that are not whole, and a length
    that cannot be cut into equal parts: pad it.

    >>> [shard(8, rank, 2, "head_tail").tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> packed([0, 4, 8])[shard(8, 1, 2, cu_seqlens=[0, 4, 8])].tolist()
    [2, 3, 2, 3]
    """
    if order not in get_args(Order):
        raise ValueError(f"order must be one of {', '.join(get_args(Order))}, got {order!r}")
    seq_len, rank, world = (
        _whole_number(name, value)
        for name, value in (("seq_len", seq_len), ("rank", rank), ("world", world))
    )
    if seq_len < 0:
        raise ValueError(f"seq_len must be >= 0, got {seq_len}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in 0 .. world - 1, got rank {rank} of world {world}")
    bounds = _bounds([0, seq_len] if cu_seqlens is None else cu_seqlens)
    if bounds[-1] != seq_len:
        raise ValueError(f"cu_seqlens ends with {bounds[-1]}, seq_len is {seq_len}")
    parts = 2 * world if order == "head_tail" else world
    uneven = np.flatnonzero(np.diff(bounds) % parts)
    if uneven.size:
        length = np.diff(bounds)[uneven[0]]
        where = "seq_len" if cu_seqlens is None else f"sequence {uneven[0]} of cu_seqlens:"
        raise ValueError(
            f"{order} over {world} ranks needs lengths that are multiples of {parts}, "
            f"got {where} {length}; pad to {-(-length // parts) * parts}"
        )
    cuts = [
        start + cut
        for start, stop in pairwise(bounds)
        for cut in _cuts(stop - start, rank, world, order)
    ]
    return np.concatenate([np.empty(0, np.int64), *cuts])


def _cuts(length: int, rank: int, world: int, order: Order) -> list[Positions]:
    if order == "striped":
        return [np.arange(rank, length, world, dtype=np.int64)]
    chunks = [rank, 2 * world - 1 - rank] if order == "head_tail" else [rank]
    size = length // (world * len(chunks))
    return [np.arange(n * size, (n + 1) * size, dtype=np.int64) for n in chunks]


@overload
def grid(*sizes: int, prefix: int = 0) -> Positions: ...
@overload
def grid(
    *sizes: int, prefix: int = 0, spacing: float | Sequence[float] | None = None, origin: str = ...
) -> Positions | Fractions: ...
def grid(
    *sizes: int,
    prefix: int = 0,
    spacing: float | Sequence[float] | None = None,
    origin: str = "first",
) -> Positions | Fractions:
    """Coordinates of a grid in row-major order: (prefix + product of sizes, axes).

    `grid(height, width)` for an image, `grid(frames, height, width)` for a video.

    prefix   how many tokens come first that are not of the grid, as a class token and registers;
             their coordinates are 0, which leaves them as they are
    spacing  from one coordinate to the next, one number or one for each axis: patch_size for
             pixels, 2 / n for a range of 2, the ratio of sizes where a grid is stretched
    origin   where 0 is: "first" of each axis; "center" of the grid, between its ends, so that
             coordinates are negative too; "edge" half a step before the first (the middle of a
             pixel is at 0.5); "middle" the coordinate of number n - n // 2, which is whole
             (diffusers' scale_rope)
    Returns int64 without a spacing and from an origin that is a coordinate, else float64. Negative
    positions are rotated with `allow_negative=True`, and float64 ones are computed in float64.
    Raises ValueError for a negative size or prefix and an unknown origin.

    >>> grid(2, 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    >>> grid(1, 2, prefix=1).tolist()
    [[0, 0], [0, 0], [0, 1]]
    >>> grid(4, origin="center").T.tolist(), grid(5, origin="middle").T.tolist()
    ([[-1.5, -0.5, 0.5, 1.5]], [[-3, -2, -1, 0, 1]])
    >>> grid(2, 2, origin="edge", spacing=(8, 4)).tolist()
    [[4.0, 2.0], [4.0, 6.0], [12.0, 2.0], [12.0, 6.0]]
    """
    if not sizes or any(size < 0 for size in sizes):
        raise ValueError(f"grid needs one size >= 0 per axis, got {sizes}")
    if _whole_number("prefix", prefix) < 0:
        raise ValueError(f"prefix must be >= 0, got {prefix}")
    if origin not in ORIGINS:
        raise ValueError(f"origin must be one of {', '.join(ORIGINS)}, got {origin!r}")
    starts = np.array([ORIGINS[origin](size) for size in sizes])
    places: Positions | Fractions = np.indices(sizes, dtype=np.int64).reshape(len(sizes), -1).T
    places = places + starts
    if spacing is not None:
        places = places * _spacing(spacing, len(sizes))
    before = np.zeros((prefix, len(sizes)), places.dtype)
    return np.concatenate([before, places])


def _spacing(spacing: float | Sequence[float], axes: int) -> Fractions:
    steps = np.asarray(spacing, np.float64)
    if steps.shape not in ((), (axes,)) or not np.isfinite(steps).all():
        raise ValueError(f"spacing must be one number, or one for each of {axes}, got {spacing!r}")
    return steps


def grid_2d(height: int, width: int) -> Positions:
    """Patches of an image, (row, column): (height * width, 2).

    >>> grid_2d(1, 2).tolist()
    [[0, 0], [0, 1]]
    """
    return grid(height, width)


def video(frames: int, height: int, width: int) -> Positions:
    """Patches of a video, (frame, row, column): (frames * height * width, 3).

    >>> video(2, 1, 1).tolist()
    [[0, 0, 0], [1, 0, 0]]
    """
    return grid(frames, height, width)


def mrope(segments: Iterable[Segment], *, offset: int = 0) -> Positions:
    """M-RoPE positions (time, row, column) of text, images and video in one sequence: (seq, 3).

    `segments` holds ("text", length) and ("image" | "video", frames, height, width), sizes in
    merged patches. Text counts all three axes together; a grid counts each axis from the same
    start; what follows starts one after the largest position used. The next position of a
    generated token is therefore `mrope(...).max() + 1`, on all axes.
    Raises ValueError for an unknown kind or a wrong number of sizes.
    Source: Qwen2-VL (arXiv 2409.12191), section 2.1. transformers 5.23, `get_rope_index`, differs
    after a video with more frames than rows and columns: it goes on from the larger of those two.

    >>> mrope([("text", 2), ("image", 1, 1, 2), ("text", 1)]).tolist()
    [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [4, 4, 4]]
    """
    parts, start = [np.empty((0, 3), np.int64)], offset
    for kind, *sizes in segments:
        if kind not in ("text", "image", "video") or len(sizes) != (1 if kind == "text" else 3):
            raise ValueError(
                "a segment is ('text', length) or ('image' | 'video', frames, height, width), "
                f"got {(kind, *sizes)!r}"
            )
        part = np.repeat(grid(*sizes), 3, axis=1) if kind == "text" else grid(*sizes)
        parts.append(part + start)
        start = int(parts[-1].max(initial=start - 1)) + 1
    return np.concatenate(parts)


def sections(*counts: int) -> tuple[int, ...]:
    """`Rotary.axes` for pairs in blocks: `counts[a]` pairs in a row read axis a.

    Source: `mrope_section` of Qwen2-VL, [16, 24, 24].

    >>> sections(1, 2, 2)
    (0, 1, 1, 2, 2)
    """
    _check_counts(counts)
    return tuple(axis for axis, count in enumerate(counts) for _ in range(count))


def interleaved_sections(*counts: int) -> tuple[int, ...]:
    """`Rotary.axes` for pairs in turn: axis a has the pairs a, a + n, ... below n counts[a].

    n is the number of axes; what no other axis claims is read from axis 0.
    Source: `mrope_interleaved` of Qwen3-VL, [24, 20, 20].

    >>> interleaved_sections(3, 2, 1)
    (0, 1, 2, 0, 1, 0)
    """
    _check_counts(counts)
    axes = [0] * sum(counts)
    for axis, count in enumerate(counts[1:], start=1):
        claimed = range(axis, count * len(counts), len(counts))
        if count and claimed[-1] >= len(axes):
            raise ValueError(f"axis {axis} has too many pairs to be interleaved: {counts}")
        for pair in claimed:
            axes[pair] = axis
    return tuple(axes)


def _check_counts(counts: Sequence[int]) -> None:
    if not counts or any(count < 0 for count in counts) or sum(counts) == 0:
        raise ValueError(f"sections need one count >= 0 per axis and at least 1 pair, got {counts}")


def _whole_number(name: str, value: object) -> int:
    number = _whole_numbers(name, value)  # type: ignore[arg-type]  # what is no number is refused
    if number.ndim:
        raise ValueError(f"{name} must be one number, got shape {number.shape}")
    return int(number)


def _whole_numbers(name: str, value: npt.ArrayLike) -> Positions:
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold whole numbers, got dtype {array.dtype}")
    return array.astype(np.int64)
