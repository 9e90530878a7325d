"""Records for the steps around the rotation of a fused call, and checks of their shapes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from ..words import brief
from . import Array, Operand
from .geometry import Geometry, Options, geometry_of, seq_axis

# dtype -> the number at which a cast to it saturates; None if the cast only rounds
LARGEST: dict[str, float | None] = {
    "float32": None,
    "float64": None,
    "float16": None,
    "bfloat16": None,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "int8": 127.0,
}
TINY = 2.0**-126  # the smallest normal number of float32
TOKEN = "token"  # one scale for each token and head, computed from the largest channel
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm before the rotation: x / sqrt(mean(x^2) + eps) * weight, in float32.

    q, k      the weights, or None for an array that is not normalized. The shape says what the mean
              is over: (head_dim,) each head separately, as Qwen3 and Gemma 3 do; (heads, head_dim)
              the same, with different weights for each head; (heads * head_dim,) all heads of a
              token together, as OLMo 2 and Wan do
    eps       added to the mean of the squares
    v         weight for v, or for the latent part of a `LatentCache`
    add_one   True if the model multiplies by 1 + weight, as Gemma does

    >>> import numpy as np
    >>> Norm(np.ones(128), np.ones(128), eps=1e-6).add_one
    False
    """

    q: Operand
    k: Operand
    eps: float
    v: Operand = None
    add_one: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.eps, Real):
            raise TypeError(f"eps must be a number, as 1e-6, got a {_kind_of(self.eps)}")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps must be a finite number >= 0, got {self.eps}")


@dataclass(frozen=True, eq=False)
class KVCache:
    """The cache that k and v are written to, each token to its slot.

    k, v      (slots, heads, head_dim), or in blocks (blocks, block_size, heads, head_dim), of any
              strides: pass `cache.transpose(1, 2)` for blocks that have the heads first. Their
              dtype is what is stored: a float type, float8_e4m3fn, float8_e5m2 or int8. v is None
              where only keys are written. With JAX, `rotary.fused` returns new caches
    slots     whole numbers, one per token: (batch, seq) for every `seq_dim`, or these flat. Slots
              of shape (seq, batch) are an error, or read wrongly if both sizes are equal. Slot s is
              token s % block_size of block s // block_size. A negative one skips the token. No slot
              may be given twice
    k_scale, v_scale   k / k_scale is stored. A number, or (heads,) numbers; or a float32 or float64
              array of the shape of the cache without its last axis. Into it the call writes a scale
              for each token and head: its largest channel over the largest number of the dtype

    >>> import numpy as np
    >>> KVCache(np.zeros((16, 8, 128)), np.zeros((16, 8, 128)), slots=[3, 4, -1]).k_scale
    1.0
    """

    k: Operand
    v: Operand
    slots: Operand
    k_scale: Operand = 1.0
    v_scale: Operand = 1.0


@dataclass(frozen=True, eq=False)
class LatentCache:
    """The cache of multi-head latent attention (DeepSeek): one row [latent | rotated] per token.

    rows      (slots, latent + rotary_dim) or (blocks, block_size, latent + rotary_dim)
    slots     as in `KVCache`
    scale     row / scale is stored: a number

    >>> import numpy as np
    >>> LatentCache(np.zeros((16, 512 + 64)), slots=[3, 4, -1]).scale
    1.0
    """

    rows: Operand
    slots: Operand
    scale: float = 1.0


class Stages(NamedTuple):
    """The steps of a fused call besides the rotation; `scales` are for the q, k, v returned."""

    norm: Norm | None = None
    cache: KVCache | LatentCache | None = None
    dtype: str | None = None
    scales: tuple[Operand, Operand, Operand] = (1.0, 1.0, 1.0)


def changes_v(stages: Stages) -> bool:
    """Whether v is normalized, or cast, before it is returned."""
    has_norm = stages.norm is not None and stages.norm.v is not None
    is_one = isinstance(stages.scales[2], (int, float)) and stages.scales[2] == 1
    return has_norm or stages.dtype is not None or not is_one


def is_written(scale: Operand, cache: Operand) -> bool:
    """Whether a cache's scale is an array that the call writes, a scale per token and head."""
    return getattr(scale, "shape", ()) == cache.shape[:-1] and cache.ndim > 2


def written_to(cache: KVCache | LatentCache | None) -> list[Operand]:
    """Return the arrays that a call writes: those of the cache, then the computed scales."""
    scales = [scale for _, array, scale in cache_scales(cache) if is_written(scale, array)]
    return [*arrays_of(cache), *scales]


def read_by(stages: Stages) -> list[Operand]:
    """Return the weights, slots and scales that a call reads, None for those it does not have."""
    norm, cache = stages.norm, stages.cache
    weights = () if norm is None else (norm.q, norm.k, norm.v)
    scales = [scale for _, array, scale in cache_scales(cache) if not is_written(scale, array)]
    return [*weights, getattr(cache, "slots", None), *scales, *stages.scales]


def arrays_of(cache: KVCache | LatentCache | None) -> list[Operand]:
    """Return the arrays that a cache has."""
    return [array for _, array, _ in cache_scales(cache)]


def cache_scales(cache: KVCache | LatentCache | None) -> list[tuple[str, Operand, Operand]]:
    """Return (name of the scale, array, scale) for each array that a cache has."""
    if cache is None:
        return []
    if isinstance(cache, LatentCache):
        return [("scale of the cache", cache.rows, cache.scale)]
    arrays = ("k_scale", cache.k, cache.k_scale), ("v_scale", cache.v, cache.v_scale)
    return [each for each in arrays if each[1] is not None]


def check_arrays(
    library: str, takes: Callable[[object], bool], stages: Stages, out: Sequence[object] | None
) -> None:
    """Refuse weights, caches and outputs that are not arrays of the library of q.

    >>> check_arrays("NumPy arrays", lambda x: False, Stages(), None)
    """
    norm, caches = stages.norm, arrays_of(stages.cache)
    weights = () if norm is None else (norm.q, norm.k, norm.v)
    for name, arrays in (("norm weights", weights), ("caches", caches), ("out", out or ())):
        _check_library(name, arrays, library, takes)
    _check_library("scales to be written", written_to(stages.cache), library, takes)
    for array in caches:
        dtype_name(array.dtype)


def _check_library(
    name: str, arrays: Sequence[object], library: str, takes: Callable[[object], bool]
) -> None:
    for array in arrays:
        if not (array is None or takes(array)):
            raise TypeError(f"{name} must be {library} like q, got a {_kind_of(array)}")


def _kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def check_scales(
    stages: Stages, xs: Sequence[object], numbers: Callable[[object], Operand | None]
) -> None:
    """Refuse scales that are None, 0, inf or NaN, and arrays for scales that cannot hold them.

    numbers   returns the values of an array; None if they are on a device or not known yet

    >>> check_scales(Stages(scales=(0.5, None, None)), ("q", None, None), lambda array: None)
    """
    of_cache = []
    for name, array, scale in cache_scales(stages.cache):
        if is_written(scale, array):
            kind = str(scale.dtype).removeprefix("torch.")
            if kind not in ("float32", "float64"):
                raise TypeError(f"{name} is written, so it must be float32 or float64, got {kind}")
        elif isinstance(scale, str):
            raise ValueError(
                f"{name} is {scale!r}: for a scale of each token and head pass an array of the "
                "shape of the cache without its last axis, which the call writes"
            )
        else:
            of_cache.append((name, scale))
    of_each = zip("qkv", xs, stages.scales, strict=True)
    used = [(f"scale of {name}", scale) for name, x, scale in of_each if x is not None]
    for name, scale in used + of_cache:
        if scale is None:
            raise TypeError(f"{name} is None: leave it out, or pass 1.0, if nothing is scaled")
        if isinstance(scale, str):
            continue
        if isinstance(scale, (int, float)):
            wrong = [] if 0 < abs(scale) < math.inf else [scale]
        else:
            array = numbers(scale)
            sizes = None if array is None else abs(array).reshape(-1)
            wrong = [] if sizes is None else sizes[~((sizes > 0) & (sizes < math.inf))]
        if len(wrong):
            raise ValueError(f"{name} must be finite and not 0, got {float(wrong[0])}")


class Fit(NamedTuple):
    """How the arrays of a fused call fit together.

    geometries  of q and k
    seq_axis    of the tokens of q and k;  head_axis  of their heads, None where there are none
    tokens      their axes in the order of q: (batch, seq), (seq, batch) or (seq,);  place  the
                index of seq in it;  by_batch  the same with seq last, as slots have them
    """

    geometries: tuple[Geometry, ...]
    seq_axis: int
    head_axis: int | None
    tokens: Shape

    @property
    def place(self) -> int:
        return self.seq_axis - (self.head_axis is not None and self.head_axis < self.seq_axis)

    @property
    def by_batch(self) -> Shape:
        before, (seq, *after) = self.tokens[: self.place], self.tokens[self.place :]
        return (*before, *after, seq)


def fit(
    qkv: Sequence[Operand], cos: Operand, row_numbers: Operand, options: Options, stages: Stages
) -> Fit:
    """Return how q, k, v, of which k and v may be None, fit the tables; ValueError if they do not.

    row_numbers   picks rows of the tables; None if each token has its own

    >>> import numpy as np
    >>> q, k, cos = np.ones((8, 5, 64)), np.ones((2, 5, 64)), np.ones((5, 32))
    >>> fit((q, k, None), cos, None, Options(), Stages())[1:]
    (1, 0, (5,))
    """
    q, k, v, table, rows = [None if x is None else tuple(x.shape) for x in (*qkv, cos, row_numbers)]
    assert q is not None
    assert table is not None
    axis = seq_axis(q, options.seq_dim)
    head_axis = None if len(q) == 2 else len(q) - (2 if axis != len(q) - 2 else 3)
    tokens = _tokens(q, head_axis)
    geometries: tuple[Geometry, ...]
    if isinstance(stages.cache, LatentCache):
        _check_latent(k, v, stages.cache, table)
        assert k is not None
        assert v is not None
        if len(k) != len(q) or (head_axis is not None and k[head_axis] != 1):
            one = tuple(1 if axis == head_axis else size for axis, size in enumerate(q[:-1]))
            raise ValueError(f"for a LatentCache k has one head, {(*one, k[-1])}, got {k}")
        of_k = options._replace(start=0, rotary_dim=None, head_dim=None, seq_dim=axis)
        geometries = (
            geometry_of((q,), table, rows, options._replace(seq_dim=axis)),
            geometry_of((k,), table, rows, of_k),
        )
        for name, given in (("k", _tokens(k, head_axis)), ("v", v[:-1])):
            if given != tokens:
                raise ValueError(f"{name} has tokens {given}, q has {tokens}")
    else:
        both = (q,) if k is None else (q, k)
        geometries = (geometry_of(both, table, rows, options),) * len(both)
        if v is not None and (k is None or v[:-1] != k[:-1]):
            raise ValueError(
                f"v must have the shape of k except for its last axis, got {v} and {k}"
            )
    if stages.cache is not None and k is None:
        raise ValueError("cache= was given without k, which is written to it: pass k")
    if isinstance(stages.cache, KVCache) and (v is None) != (stages.cache.v is None):
        raise ValueError(
            "v was given, but the cache has no v: pass KVCache(k, v, slots)" if v is not None
            else "the cache has v, but v was not given: pass v, or KVCache(k, None, slots)"
        )  # fmt: skip
    return Fit(geometries, axis, head_axis, tokens)


def _tokens(shape: Shape, head_axis: int | None) -> Shape:
    """Return the shape without the axes of heads and channels."""
    return tuple(size for index, size in enumerate(shape[:-1]) if index != head_axis)


def _check_latent(k: Shape | None, v: Shape | None, cache: LatentCache, table: Shape) -> None:
    if k is None or v is None:
        raise ValueError("a LatentCache takes k, the part that is rotated, and v, the latent part")
    width = cache.rows.shape[-1]
    if k[-1] != 2 * table[-1] or v[-1] + k[-1] != width:
        raise ValueError(
            f"a row of the cache has {width} channels, which the last axes of v {v} and k {k} must "
            f"add up to; that of k must be {2 * table[-1]}, the channels that cos and sin rotate"
        )


def weight_form(name: str, weight: Shape, heads: int, width: int) -> tuple[Shape, bool]:
    """Return the shape (heads or 1, width), and whether the mean is over all heads of a token.

    >>> weight_form("q", (64,), 8, 64), weight_form("q", (512,), 8, 64)
    (((1, 64), False), ((8, 64), True))
    """
    if weight == (width,):
        return (1, width), False
    if weight == (heads, width):
        return weight, False
    if weight == (heads * width,):
        return (heads, width), True
    raise ValueError(
        f"the norm weight of {name} must be ({width},) for every head, ({heads}, {width}) for each "
        f"head its own, or ({heads * width},) over all heads together; got {weight}"
    )


def check_cache(name: str, cache: Shape, heads: Shape) -> int | None:
    """Return the block size, None for flat slots; ValueError if the cache does not fit.

    heads   the shape that is written for a token: (heads, head_dim), or (channels,)

    >>> check_cache("k", (4, 16, 8, 64), (8, 64)), check_cache("k", (64, 8, 64), (8, 64))
    (16, None)
    """
    leading = len(cache) - len(heads)
    if leading not in (1, 2) or cache[leading:] != heads:
        form = ", ".join(map(str, heads))
        raise ValueError(
            f"the cache of {name} must be (slots, {form}) or (blocks, block_size, {form}), "
            f"got {cache}"
        )
    return None if leading == 1 else cache[1]


def check_slots(highest: int, cache: Shape, block: int | None) -> None:
    """Refuse slots beyond the end of the cache.

    >>> check_slots(63, (4, 16, 8, 64), 16)
    """
    count = cache[0] * (1 if block is None else block)
    if highest >= count:
        raise ValueError(f"slots run to {highest}, the cache has {count}")


def check_slot_shape(slots: Shape, tokens: Shape) -> None:
    """Refuse slots that are not one per token; `tokens` as in `Fit.by_batch`.

    >>> check_slot_shape((10,), (2, 5))
    """
    if slots not in (tokens, (math.prod(tokens),)):
        raise ValueError(f"slots must be one per token, {tokens} or flat, got {slots}")


def along_heads(values: Array, ndim: int, head_axis: int | None) -> Array:
    """Reshape (heads or 1, channels) to broadcast with an array of `ndim` axes."""
    if not values.ndim or head_axis is None:
        return values[0] if values.ndim else values
    shape = [1] * ndim
    shape[head_axis], shape[-1] = values.shape
    return values.reshape(shape)


def scale_form(name: str, scale: Shape, heads: int) -> Shape:
    """Return the shape in which a scale broadcasts with (heads, channels).

    >>> scale_form("k", (8,), 8), scale_form("k", (), 8)
    ((8, 1), ())
    """
    if scale not in ((), (heads,)):
        raise ValueError(
            f"the scale of {name} must be a number, ({heads},) numbers for its heads, or 'token'; "
            f"got shape {scale}"
        )
    return (heads, 1) if scale else ()


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of any library; TypeError if casts to it are not supported.

    >>> dtype_name("int8")
    'int8'
    """
    name = str(dtype).removeprefix("torch.")
    if name not in LARGEST:
        raise TypeError(f"dtype must be one of {', '.join(LARGEST)}, got {brief(name)}")
    return name
