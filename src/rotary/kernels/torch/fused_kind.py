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


class Operands(NamedTuple):
    """The operands of a call by their names, None where the call has none."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    norm: Norm | None
    cache: KVCache | LatentCache | None
    scales: tuple[object, object, object]


def operands_of(kind: Kind, xs: Sequence[Tensor]) -> Operands:
    """Return the operands of a call of this kind by name."""
    q, k, v, first, second, slots, wq, wk, wv, *scales = [
        None if place == ABSENT else xs[place] for place in kind.places
    ]
    assert q is not None
    pairs = zip(kind.scales, scales, strict=True)
    of_q, of_k, of_v = [x if scale is None else scale for scale, x in pairs]
    has_norm = any([weight is not None for weight in (wq, wk, wv)])
    norm = Norm(wq, wk, kind.eps, wv, kind.add_one) if has_norm else None
    cache: KVCache | LatentCache | None = None
    if kind.cache is KVCache:
        cache = KVCache(first, second, slots, of_k, of_v)
    elif kind.cache is LatentCache:
        assert isinstance(of_k, float)
        cache = LatentCache(first, slots, of_k)
    return Operands(q, k, v, norm, cache, (of_q, of_k, of_v))


def stages_of(kind: Kind, operands: Operands) -> Stages:
    """Return the stages of a call of this kind."""
    scales = operands.scales if kind.cache is None else (operands.scales[0], 1.0, 1.0)
    return Stages(operands.norm, operands.cache, kind.dtype, scales)
