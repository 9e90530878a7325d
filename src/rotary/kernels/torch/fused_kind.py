"""The form of a fused call, by which `fused_ready.py` caches its code."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..geometry import Options
from ..stages import KVCache, LatentCache, Norm, Stages

ABSENT = -1  # the place of an operand that a call does not have


class Kind(NamedTuple):
    """All that the code of a call depends on besides its tensors.

    dtype, scales  those of `rotary.fused`, or with a cache its scales for k and v: numbers, "token"
                   or None for one that is a tensor
    cache          the type of the cache, or None
    places         where q, k, v, two caches, slots, three weights and three scales are among the
                   operands; `ABSENT` for one that the call does not have. One weight, or one
                   scale, may have several places
    """

    options: Options
    eps: float
    add_one: bool
    dtype: str | None
    scales: tuple[float | str | None, ...]
    cache: type | None
    places: tuple[int, ...]


def operands_of(
    kind: Kind, xs: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor | None, Stages]:
    """Return q, k, v and the stages of a call of this kind, None for what it does not have."""
    q, k, v, first, second, slots, wq, wk, wv, *scales = [
        None if place == ABSENT else xs[place] for place in kind.places
    ]
    assert q is not None
    pairs = zip(kind.scales, scales, strict=True)
    of_q, of_k, of_v = [x if scale is None else scale for scale, x in pairs]
    has_norm = any([weight is not None for weight in (wq, wk, wv)])
    norm = Norm(wq, wk, kind.eps, wv, kind.add_one) if has_norm else None
    if kind.cache is None:
        return q, k, v, Stages(norm, None, kind.dtype, (of_q, of_k, of_v))
    cache: KVCache | LatentCache = KVCache(first, second, slots, of_k, of_v)
    if kind.cache is LatentCache:
        assert isinstance(of_k, float)
        cache = LatentCache(first, slots, of_k)
    return q, k, v, Stages(norm, cache, kind.dtype, (of_q, 1.0, 1.0))
