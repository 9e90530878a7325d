"""Functions that build arrays of positions, and the axis that each pair uses.

A position array is (..., seq) for one axis and (..., seq, axes) for several, int64; a grid that is
centred or stretched is float64. Offsets, packing, padding, images and video differ only in their
positions; the code that rotates does not know about them.

Results are in the library and on the device of the torch, JAX or MLX array that is passed, or of
`like`; otherwise they are NumPy arrays. With a `like` of JAX they are on its default device, and
JAX moves them to that of the arrays they are used with. JAX without x64 gives int32 and float32,
MLX gives float32 for float64. Arrays may be traced by jit, torch.compile and mx.compile, but sizes
must be known, except those that torch.compile and torch.export leave open.
Invalid numbers are errors, except on a GPU and in a traced call, where they are not checked.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, overload

import numpy as np
import numpy.typing as npt

from .kernels import Array, Numbers, Operand, is_traced
from .kernels.place import Place, cast, is_array, is_open_size
from .spec import is_whole
from .words import brief

Positions = npt.NDArray[np.int64]
Fractions = npt.NDArray[np.float64]
Segment = (
    tuple[Literal["text"], int]
    | tuple[Literal["image", "video"], int, int, int]
    | tuple[Literal["video"], int, int, int, float]
)
TieSegment = tuple[Literal["text"], int] | tuple[Literal["image"], int, int]
TieSpacing = Literal["whole", "equal", "unit"]
Order = Literal["contiguous", "ring", "ulysses", "head_tail", "striped"]

Known = int | Sequence[object] | Numbers  # on the host: the result is a NumPy array

ORIGINS: Mapping[str, Callable[[int], float]] = {  # coordinate of the first of `size` points
    "first": lambda size: 0,
    "middle": lambda size: size // 2 - size,
    "center": lambda size: (1 - size) / 2,
    "edge": lambda size: 0.5,
}
MAX_BYTES = 16 * 2**30


@overload
def arange(
    seq_len: int, offset: Known = 0, *, like: None = None, max_bytes: int = ...
) -> Positions: ...
@overload
def arange(
    seq_len: int, offset: Array = ..., *, like: Array | None = None, max_bytes: int = ...
) -> Array: ...
def arange(
    seq_len: int, offset: object = 0, *, like: object = None, max_bytes: int = MAX_BYTES
) -> object:
    """Positions offset .. offset + seq_len - 1: (seq,), or (batch, seq) for one offset per row.

    `offset` is the number of tokens already in the cache. Raises ValueError for a length or offsets
    that are not whole numbers, for a negative length, for positions beyond int64, and before
    allocating more than `max_bytes`.

    >>> arange(3, offset=10).tolist()
    [10, 11, 12]
    >>> arange(2, offset=[0, 7]).tolist()
    [[0, 1], [7, 8]]
    """
    place = Place(offset, like)
    offsets, seq_len = place.whole("offset", offset), _whole_number("seq_len", seq_len)
    if seq_len < 0:
        raise ValueError(f"seq_len must be >= 0, got {seq_len}")
    count = math.prod(offsets.shape)
    is_known = isinstance(seq_len, int)  # not a symbol of jax.export
    if is_known and 8 * seq_len * max(count, 1) > max_bytes:
        raise ValueError(
            f"{count} x {seq_len} positions take {8 * seq_len * count:,} bytes, over "
            f"max_bytes = {max_bytes:,}; build them in parts or raise max_bytes"
        )
    if is_known:
        _check_last(place, offsets, seq_len)
    return offsets[..., None] + place.arange(seq_len)[(None,) * offsets.ndim]


def _check_last(place: Place, offsets: Numbers, count: int) -> None:
    """Refuse `count` positions from each offset on that would wrap, where offsets can be read."""
    numbers = place.in_memory(offsets)
    if numbers is not None and numbers.size:
        place.check_size("the last position", int(numbers.max()) + count - 1)


@overload
def packed(cu_seqlens: Known, *, like: None = None, seq_len: int | None = None) -> Positions: ...
@overload
def packed(
    cu_seqlens: Array, *, like: Array | None = None, seq_len: int | None = None
) -> Array: ...
def packed(cu_seqlens: object, *, like: object = None, seq_len: int | None = None) -> object:
    """Positions of sequences laid end to end: each starts again from 0. Shape (cu_seqlens[-1],).

    `cu_seqlens` holds the boundaries: 0, then the running total of the lengths. `seq_len` is the
    last boundary; give it if cu_seqlens is traced, or on a GPU, where reading it would wait.
    Raises ValueError unless cu_seqlens starts with 0 and never falls.

    >>> packed([0, 3, 3, 5]).tolist()
    [0, 1, 2, 0, 1]
    """
    place = Place(cu_seqlens, like)
    bounds = place.whole("cu_seqlens", cu_seqlens)
    tokens = place.arange(_total(place, bounds, seq_len))
    return tokens - bounds[place.segments(bounds, tokens)]


def _total(place: Place, bounds: Numbers, seq_len: int | None) -> int:
    """Return the number of tokens; check the boundaries if they are in host memory."""
    numbers = place.in_memory(bounds)
    if numbers is None:
        if seq_len is None:
            raise ValueError(
                "cu_seqlens that are traced or on a GPU need seq_len, their last number"
            )
        return seq_len
    if numbers.ndim != 1 or numbers.size == 0 or numbers[0] != 0 or (np.diff(numbers) < 0).any():
        raise ValueError(
            f"cu_seqlens must be 1-D, start with 0 and never fall, got {numbers.tolist()}"
        )
    if seq_len is not None and numbers[-1] != seq_len:
        raise ValueError(f"cu_seqlens ends with {numbers[-1]}, seq_len is {seq_len}")
    return int(numbers[-1])


@overload
def left_padded(attention_mask: Known, *, like: None = None) -> Positions: ...
@overload
def left_padded(attention_mask: Array, *, like: Array | None = None) -> Array: ...
def left_padded(attention_mask: object, *, like: object = None) -> object:
    """Positions of a padded batch: the first real token of every row is 0. Shape (batch, seq).

    `attention_mask` is 1 for a token and 0 for padding; padding gets position 0, and is masked out.
    Raises ValueError for a mask with other values.

    >>> left_padded([[0, 0, 1, 1], [1, 1, 1, 1]]).tolist()
    [[0, 0, 0, 1], [0, 1, 2, 3]]
    """
    place = Place(attention_mask, like)
    mask = (
        attention_mask if is_array(attention_mask) else place.converted(np.asarray(attention_mask))
    )
    array: Numbers = mask  # type: ignore[assignment]
    numbers = place.in_memory(array)
    if array.ndim == 0 or (numbers is not None and not np.isin(numbers, (0, 1)).all()):
        raise ValueError("attention_mask must be (..., seq) and hold 0 for padding, 1 for tokens")
    is_token = cast(array != place.xp.zeros_like(array), place.dtype)
    return (is_token.cumsum(-1) - 1) * is_token


@overload
def draft(parents: Known, offset: Known = 0, *, like: None = None) -> Positions: ...
@overload
def draft(parents: Array, offset: object = 0, *, like: Array | None = None) -> Array: ...
def draft(parents: object, offset: object = 0, *, like: object = None) -> object:
    """Positions of a tree of draft tokens (speculative decoding), of the shape of `parents`.

    parents  (nodes,) or (batch, nodes): the number of each node's parent, in the same row and
             before it; -1 for a node that follows the last token of the cache
    offset   position of those nodes: the number of tokens in the cache, for all or per row
    A node is one position after its parent, so siblings share a position. Numbering the nodes in
    their order instead would rotate all but one branch wrongly. Raises ValueError for a parent
    that is not before its child.

    >>> draft([-1, -1, 0, 0, 2], offset=10).tolist()
    [10, 10, 11, 11, 12]
    """
    place = Place(parents, offset, like)
    array, start = place.whole("parents", parents), place.whole("offset", offset)
    nodes, numbers = array.shape[-1] if array.ndim else 0, place.in_memory(array)
    if array.ndim == 0 or (
        numbers is not None and ((numbers < -1) | (numbers >= np.arange(nodes))).any()
    ):
        raise ValueError("parents must be (..., nodes), each -1 or the number of a node before it")
    _check_last(place, start, nodes)
    ancestors = array.reshape(math.prod(array.shape[:-1]), nodes)
    rows = place.arange(ancestors.shape[0])[:, None] * nodes
    depth = place.xp.where(ancestors >= 0, ancestors * 0 + 1, 0)
    for _ in range(max(nodes - 2, 0).bit_length()):
        # every step doubles the distance to `ancestors`
        is_node = ancestors >= 0
        at = (place.xp.where(is_node, ancestors, 0) + rows).reshape(-1)
        above, farther = (each.reshape(-1)[at].reshape(depth.shape) for each in (depth, ancestors))
        depth = depth + place.xp.where(is_node, above, 0)
        ancestors = place.xp.where(is_node, farther, -1)
    return depth.reshape(array.shape) + (start[..., None] if start.ndim else start)


@overload
def shard(
    seq_len: int,
    rank: int,
    world: int,
    order: Order = "contiguous",
    *,
    cu_seqlens: Known | None = None,
    like: None = None,
) -> Positions: ...
@overload
def shard(
    seq_len: int,
    rank: int | Array,
    world: int,
    order: Order = "contiguous",
    *,
    cu_seqlens: Array | None = None,
    like: Array | None = None,
) -> Array: ...
def shard(
    seq_len: int,
    rank: Operand,
    world: int,
    order: Order = "contiguous",
    *,
    cu_seqlens: object = None,
    like: object = None,
) -> object:
    """Return the tokens of a sequence that one rank of `world` holds, in order: (seq_len / world,).

    For a plain sequence these numbers are the positions. For other positions use them as indices
    along the sequence: `packed(cu_seqlens)[shard(...)]`, `mrope(segments)[shard(...)]`.

    contiguous  block `rank`: sequence parallelism, and DTensor's Shard
    ring        the same blocks: Ring Attention (Liu et al., arXiv 2310.01889) passes keys on, and
                in step s rank r sees those of rank (r - s) mod world
    ulysses     the same blocks, before the all-to-all of Ulysses (Jacobs et al., arXiv 2309.14509);
                after it every rank has all positions, `arange(seq_len)`, and a share of the heads
    head_tail   chunks `rank` and 2 world - 1 - rank of 2 world, to balance a causal mask: the
                zig-zag of Megatron-LM, Transformer Engine and torch's `context_parallel`
    striped     tokens rank, rank + world, ...: Striped Attention (Brandon et al., arXiv 2311.09431)

    With `cu_seqlens` (see `packed`) each packed sequence is split separately, as Transformer Engine
    splits its "thd" batches. For Ulysses leave it out: the all-to-all joins the parts of all ranks
    in order of rank, which would not be the order of the whole sequence. In `jax.shard_map` the
    rank may be `jax.lax.axis_index(name)`. Raises ValueError for an unknown order, a rank outside
    0 .. world - 1, numbers that are not whole, and a length that cannot be split into equal parts:
    pad it.

    >>> [shard(8, rank, 2, "head_tail").tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> packed([0, 4, 8])[shard(8, 1, 2, cu_seqlens=[0, 4, 8])].tolist()
    [2, 3, 2, 3]
    """
    if order not in get_args(Order):
        raise ValueError(f"order must be one of {', '.join(get_args(Order))}, got {brief(order)}")
    seq_len, world = _whole_number("seq_len", seq_len), _whole_number("world", world)
    if seq_len < 0:
        raise ValueError(f"seq_len must be >= 0, got {seq_len}")
    place = Place(cu_seqlens, like, rank)
    if is_traced(rank):
        rank = place.whole("rank", rank)  # products of 8 bits would wrap
    else:
        rank = _whole_number("rank", rank)
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in 0 .. world - 1, got rank {rank} of world {world}")
    parts = 2 * world if order == "head_tail" else world
    lengths = [seq_len]
    if cu_seqlens is not None:
        bounds = place.whole("cu_seqlens", cu_seqlens)
        _total(place, bounds, seq_len)
        numbers = place.in_memory(bounds)
        lengths = [] if numbers is None else np.diff(numbers).tolist()
    for index, length in enumerate(lengths):
        if length % parts:
            where = "seq_len" if cu_seqlens is None else f"sequence {index} of cu_seqlens:"
            raise ValueError(
                f"{order} over {world} ranks needs lengths that are multiples of {parts}, "
                f"got {where} {length}; pad to {-(-length // parts) * parts}"
            )
    token = place.arange(seq_len // world)
    share: int | Numbers = seq_len // world
    start: int | Numbers = 0
    if cu_seqlens is not None:
        own = bounds // world  # boundaries within the part of one rank
        which = place.segments(own, token)
        token, share, start = token - own[which], (own[1:] - own[:-1])[which], bounds[which]
    if order == "striped":
        return token * world + (start + rank)
    if order == "head_tail":
        chunk = share // 2
        tail = cast(token >= chunk, place.dtype) * (2 * (world - 1 - rank) * chunk)
        return tail + token + (start + rank * chunk)
    return token + (start + rank * share)


@overload
def grid(*sizes: int, prefix: int = 0, like: None = None) -> Positions: ...
@overload
def grid(
    *sizes: int,
    prefix: int = 0,
    spacing: float | Sequence[float] | None = None,
    origin: str | Sequence[str] = ...,
    like: None = None,
) -> Positions | Fractions: ...
@overload
def grid(
    *sizes: int,
    prefix: int = 0,
    spacing: float | Sequence[float] | None = None,
    origin: str | Sequence[str] = ...,
    like: Array,
) -> Array: ...
def grid(
    *sizes: int,
    prefix: int = 0,
    spacing: float | Sequence[float] | None = None,
    origin: str | Sequence[str] = "first",
    like: object = None,
) -> object:  # fmt: skip
    """Coordinates of a grid in row-major order: (prefix + product of sizes, axes).

    `grid(height, width)` for an image, `grid(frames, height, width)` for a video.

    prefix   how many tokens before the grid do not belong to it, such as a class token and
             registers; their coordinates are 0, so they are not rotated
    spacing  step from one coordinate to the next, one number or one for each axis: patch_size for
             pixels, 2 / n for a range of 2, the ratio of sizes for a grid that is stretched
    origin   where 0 is, for all axes or one for each: "first" of each axis; "center" of the grid,
             between its ends, so that coordinates are negative too; "edge" half a step before the
             first (the middle of a pixel is at 0.5); "middle" the coordinate of number n - n // 2,
             which is whole (diffusers' scale_rope, with "first" for the frames of Qwen-Image)
    Returns int64 for origin "first" or "middle" without a spacing, else float64. Negative positions
    are rotated with `allow_negative=True`, and float64 ones are computed in float64.
    Raises ValueError for a size or prefix that is not a whole number >= 0, and an unknown origin.

    >>> grid(2, 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    >>> grid(1, 2, prefix=1).tolist()
    [[0, 0], [0, 0], [0, 1]]
    >>> grid(4, origin="center").T.tolist(), grid(5, origin="middle").T.tolist()
    ([[-1.5, -0.5, 0.5, 1.5]], [[-3, -2, -1, 0, 1]])
    >>> grid(2, 2, origin="edge", spacing=(8, 4)).tolist()
    [[4.0, 2.0], [4.0, 6.0], [12.0, 2.0], [12.0, 6.0]]
    >>> grid(1, 2, 2, origin=("first", "middle", "middle")).tolist()
    [[0, -1, -1], [0, -1, 0], [0, 0, -1], [0, 0, 0]]
    """
    sizes = _sizes("sizes of a grid", sizes)
    if _whole_number("prefix", prefix) < 0:
        raise ValueError(f"prefix must be >= 0, got {prefix}")
    origins = [origin] * len(sizes) if isinstance(origin, str) else [*origin]
    if len(origins) != len(sizes) or not {*origins} <= {*ORIGINS}:
        raise ValueError(
            f"origin must be one of {', '.join(ORIGINS)}, or one for each of {len(sizes)} axes, "
            f"got {brief(origin)}"
        )
    place = Place(like)
    starts = [ORIGINS[each](size) for each, size in zip(origins, sizes, strict=True)]
    is_whole = spacing is None and {*origins} <= {"first", "middle"}
    steps = [1] * len(sizes) if spacing is None else _spacing(spacing, len(sizes))
    columns = []
    for axis, size in enumerate(sizes):
        numbers = place.arange(size) if is_whole else place.fractions(place.arange(size))
        along = (numbers + starts[axis]) * steps[axis]
        along = along.reshape(*[-1 if a == axis else 1 for a in range(len(sizes))])
        columns.append(place.xp.broadcast_to(along, sizes).reshape(-1))
    places = place.xp.stack(columns, -1)
    if not prefix:
        return places
    before = place.arange(prefix * len(sizes)).reshape(prefix, len(sizes)) * 0
    return place.xp.concatenate([before if is_whole else place.fractions(before), places])


def _spacing(spacing: float | Sequence[float], axes: int) -> list[float]:
    steps = [*spacing] if isinstance(spacing, Iterable) else [spacing] * axes
    if len(steps) != axes or not all(math.isfinite(step) for step in steps):
        raise ValueError(
            f"spacing must be one number, or one for each of {axes}, got {brief(spacing)}"
        )
    return [float(step) for step in steps]


@overload
def grid_2d(height: int, width: int, *, like: None = None) -> Positions: ...
@overload
def grid_2d(height: int, width: int, *, like: Array) -> Array: ...
def grid_2d(height: int, width: int, *, like: object = None) -> object:
    """Patches of an image, (row, column): (height * width, 2).

    >>> grid_2d(1, 2).tolist()
    [[0, 0], [0, 1]]
    """
    return grid(height, width, like=like)


@overload
def video(frames: int, height: int, width: int, *, like: None = None) -> Positions: ...
@overload
def video(frames: int, height: int, width: int, *, like: Array) -> Array: ...
def video(frames: int, height: int, width: int, *, like: object = None) -> object:
    """Patches of a video, (frame, row, column): (frames * height * width, 3).

    >>> video(2, 1, 1).tolist()
    [[0, 0, 0], [1, 0, 0]]
    """
    return grid(frames, height, width, like=like)


@overload
def mrope(segments: Iterable[Segment], *, offset: Known = 0, like: None = None) -> Positions: ...
@overload
def mrope(
    segments: Iterable[Segment], *, offset: Array = ..., like: Array | None = None
) -> Array: ...
def mrope(segments: Iterable[Segment], *, offset: object = 0, like: object = None) -> object:
    """M-RoPE positions (time, row, column) of text, images and video in one sequence: (seq, 3).

    `segments` holds ("text", length) and ("image" | "video", frames, height, width), sizes in
    merged patches. Text counts all three axes together; a grid counts each axis from the same
    start; what follows starts one after the largest position used. The next position of a
    generated token is therefore `mrope(...).max() + 1`, on all axes.

    Models that tell time in seconds need a fifth entry, ("video", frames, height, width,
    time_step): frame t is then at int(t * time_step), multiplied in float32 as transformers does.
    For Qwen2.5-VL it is `tokens_per_second` of the config times `second_per_grid_ts` of the
    processor. Qwen3-VL writes the time as text between frames, each an ("image", 1, height, width).
    Qwen2.5-Omni rounds t times the seconds before it multiplies by 25 tokens per second, so that
    some of its frames are one later; Qwen3-Omni keeps fractions of a position.

    Raises ValueError for an unknown kind, a wrong number of sizes, and a step that is not > 0.
    Source: Qwen2-VL (arXiv 2409.12191), section 2.1. transformers 5.24, `get_rope_index`, differs
    after a video whose largest time is more than its rows and columns: it continues from the larger
    of those two.

    >>> mrope([("text", 2), ("image", 1, 1, 2), ("text", 1)]).tolist()
    [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [4, 4, 4]]
    >>> mrope([("video", 3, 1, 1, 2.5), ("text", 1)]).tolist()
    [[0, 0, 0], [2, 0, 0], [5, 0, 0], [6, 6, 6]]
    """
    place = Place(offset, like)
    first, start = place.whole("offset", offset), 0
    parts = [grid(0, 0, 0, like=place.like)]
    for segment in segments:
        kind, *rest = _parts(segment)
        numbers = [*rest]  # Dynamo of torch 2.8 takes it for a tuple
        given = numbers.pop() if kind == "video" and len(numbers) == 4 else 1.0
        if kind not in ("text", "image", "video") or len(numbers) != (1 if kind == "text" else 3):
            raise ValueError(
                "a segment is ('text', length), ('image' | 'video', frames, height, width) or "
                f"('video', frames, height, width, time_step), got {brief(segment)}"
            )
        sizes, step = [*_sizes(f"sizes of {kind}", numbers)], _number(given)
        if not 0 < step < 2**31:
            raise ValueError(
                f"time_step of a video must be a number > 0 and below 2^31, got {brief(given)}"
            )
        part = grid(*sizes, like=place.like)  # of text one column, which all axes share
        part = place.xp.broadcast_to(part, (*sizes, 3)) if kind == "text" else part
        if step != 1:
            times = [int(_float32(at * _float32(step))) for at in range(sizes[0])]
            sizes[0] = times[-1] + 1 if times else 0
            place.check_size("the time of the last frame", sizes[0])
            rows = place.converted(np.array(times, np.int64))[part[:, 0]]
            part = place.xp.where(place.arange(3)[None] < 1, rows[:, None], part)
        parts.append(part + start)
        start += max(sizes) if min(sizes) > 0 else 0
    _check_last(place, first, start)
    return place.xp.concatenate(parts)[(None,) * first.ndim] + first[..., None, None]


def _parts(segment: object) -> Sequence[object]:
    """Return the parts of a segment; what has none becomes a kind that is unknown."""
    return segment if isinstance(segment, (tuple, list)) and segment else (segment,)


def _number(value: object) -> float:
    """Return a number as a float, and NaN for what is none."""
    try:
        return float(value)  # type: ignore[arg-type]  # tried
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _float32(number: float) -> float:
    """The nearest float32, by steps that torch.compile can follow (Veltkamp's splitting)."""
    scaled = number * (2.0**29 + 1)
    return scaled - (scaled - number)


@overload
def tie(
    segments: Iterable[TieSegment],
    spacing: TieSpacing = "whole",
    *,
    offset: int = 0,
    like: None = None,
) -> Positions | Fractions: ...
@overload
def tie(
    segments: Iterable[TieSegment],
    spacing: TieSpacing = "whole",
    *,
    offset: int = 0,
    like: Array,
) -> Array: ...
def tie(
    segments: Iterable[TieSegment],
    spacing: TieSpacing = "whole",
    *,
    offset: int = 0,
    like: object = None,
) -> object:
    """RoPE-Tie positions (row, column) of text and images in one sequence: (seq, 2).

    `segments` holds ("text", length) and ("image", height, width), sizes in patches. Text counts
    both axes together, so that a spec whose pairs take the axes in turn (`interleaved_sections`) is
    plain RoPE on text. After a last token of text at L, the patch in row i and column j (from 1) of
    an image is at (L + a + i s, L + b + j t), and the next token at K, as far from the last patch
    as the first patch is from L:

    whole  a = b = 0, s = width + 1, t = height + 1, K = L + s t: all whole numbers
    equal  a = b = 0, s = (n + 1) / (height + 1), t = (n + 1) / (width + 1), K = L + n + 1, where
           n = height width: an image counts as n tokens
    unit   s = t = 1, a = (n - height) / 2, b = (n - width) / 2, K = L + n + 1: the same, but
           patches next to one another are 1 apart in every image (RoPE-Tie-v2, RoPE-TV)

    Returns int64 for "whole", else float64. Raises ValueError for two images without a token
    between them (models write marks around an image), for an unknown kind or spacing, and for an
    image without patches.
    Source: Su, kexue.fm 10040; 10352 for "unit", whose text was not read: a and b follow from its
    conditions as a summary gives them.

    >>> tie([("text", 2), ("image", 1, 2), ("text", 1)]).tolist()
    [[0, 0], [1, 1], [4, 3], [4, 5], [7, 7]]
    >>> tie([("text", 2), ("image", 1, 2), ("text", 1)], "unit").tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.5, 2.0], [2.5, 3.0], [4.0, 4.0]]
    """
    if spacing not in get_args(TieSpacing):
        raise ValueError(
            f"spacing must be one of {', '.join(get_args(TieSpacing))}, got {brief(spacing)}"
        )
    place, following, after_image = Place(like), 0, False
    offset = _whole_number("offset", offset)
    start, step = place.whole("offset", offset), None if spacing == "whole" else 1
    parts = [grid(0, 0, spacing=step, like=place.like)]
    for segment in segments:
        kind, *numbers = _parts(segment)
        if kind not in ("text", "image") or len(numbers) != (1 if kind == "text" else 2):
            raise ValueError(
                f"a segment is ('text', length) or ('image', height, width), got {brief(segment)}"
            )
        sizes = _sizes(f"sizes of {kind}", numbers)
        part = grid(*sizes, spacing=step, like=place.like)
        if kind == "text":
            parts.append(place.xp.broadcast_to(part + following, (*sizes, 2)))
            following, after_image = following + sizes[0], after_image and sizes[0] == 0
            continue
        height, width = sizes
        if after_image or not height * width:
            raise ValueError(
                f"an image needs patches, and text before the next: got {height} x {width} "
                + ("right after an image; put ('text', 1) between them" if after_image else "")
            )
        first, steps, count = _tie_image(height, width, spacing)
        columns = [
            (part[:, axis] + 1) * steps[axis] + (following - 1 + first[axis]) for axis in range(2)
        ]
        parts.append(place.xp.stack(columns, -1))
        following, after_image = following + count, True
    _check_last(place, start, following)
    return place.xp.concatenate(parts) + offset


def _tie_image(
    height: int, width: int, spacing: TieSpacing
) -> tuple[tuple[float, float], tuple[float, float], int]:
    """Return (a, b), (s, t), and as how many tokens the image counts."""
    patches = height * width
    if spacing == "whole":
        return (0, 0), (width + 1, height + 1), (width + 1) * (height + 1) - 1
    if spacing == "equal":
        return (0, 0), ((patches + 1) / (height + 1), (patches + 1) / (width + 1)), patches
    return ((patches - height) / 2, (patches - width) / 2), (1, 1), patches


def sections(*counts: int) -> tuple[int, ...]:
    """Return `Rotary.axes` for pairs in blocks: `counts[a]` consecutive pairs use axis a.

    Source: `mrope_section` of Qwen2-VL, [16, 24, 24].

    >>> sections(1, 2, 2)
    (0, 1, 1, 2, 2)
    """
    counts = _counts(counts)
    return tuple(axis for axis, count in enumerate(counts) for _ in range(count))


def interleaved_sections(*counts: int) -> tuple[int, ...]:
    """Return `Rotary.axes` for pairs in turn: axis a has the pairs a, a + n, ... below n counts[a].

    n is the number of axes; pairs that no other axis has use axis 0.
    Source: `mrope_interleaved` of Qwen3-VL, [24, 20, 20].

    >>> interleaved_sections(3, 2, 1)
    (0, 1, 2, 0, 1, 0)
    """
    counts = _counts(counts)
    axes = [0] * sum(counts)
    for axis, count in enumerate(counts[1:], start=1):
        claimed = range(axis, count * len(counts), len(counts))
        if count and claimed[-1] >= len(axes):
            raise ValueError(f"axis {axis} has too many pairs to be interleaved: {counts}")
        for pair in claimed:
            axes[pair] = axis
    return tuple(axes)


def _counts(counts: Sequence[int]) -> tuple[int, ...]:
    numbers = _sizes("sections", counts)
    if sum(numbers) == 0:
        raise ValueError(f"sections need at least 1 pair, got {numbers}")
    return numbers


def _sizes(name: str, sizes: Iterable[object]) -> tuple[int, ...]:
    """Return sizes as numbers of Python: those of NumPy may be narrow, and torch adds tensors.

    Symbols of torch.export stay what they are. torch.compile takes its own for an int, and knows no
    attributes of it.
    """
    numbers: tuple[Any, ...] = tuple(
        size.item() if not isinstance(size, int) and hasattr(size, "item") else size
        for size in sizes
    )
    is_whole = [
        not isinstance(number, bool) if isinstance(number, int) else hasattr(number, "__index__")
        for number in numbers
    ]
    if not numbers or not all(is_whole) or any(number < 0 for number in numbers):
        raise ValueError(f"{name} must be whole numbers >= 0, one per axis, got {brief(numbers)}")
    return numbers


def _whole_number(name: str, value: object) -> int:
    if is_whole(value) or is_open_size(value):
        return value  # type: ignore[return-value]
    number = np.asarray(value)
    if number.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold whole numbers, got dtype {number.dtype}")
    if number.ndim:
        raise ValueError(f"{name} must be one number, got shape {number.shape}")
    return int(number)
