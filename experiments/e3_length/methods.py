"""The ways to give a model rows longer than those it was trained on; all come from `rotary`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import rotary
from rotary import attention
from rotary.attention import DistanceMap

from ..lab.model import Model, Tensor, Turn

Attention = Callable[[Tensor, Tensor, Tensor, Turn, bool], Tensor]


class Method(NamedTuple):
    """Frequencies, distances and the size of q, each a function of (trained, target) tokens.

    schedule   a name in `rotary.schedules`
    params     its parameters for a pair of lengths
    distances  the map of distances, for attention that has one
    log_n      whether q is multiplied by max(1, ln n / ln trained)
    """

    schedule: str = "default"
    params: Callable[[int, int], dict[str, Any]] = lambda trained, target: {}
    distances: Callable[[int, int], DistanceMap] | None = None
    log_n: bool = False


def _factor(trained: int, target: int) -> dict[str, Any]:
    return {"factor": target / trained}


def _fixed(trained: int, target: int) -> dict[str, Any]:
    return {"factor": target / trained, "b": 1.0}


def _from_trained(trained: int, target: int) -> dict[str, Any]:
    return {"factor": target / trained, "original_max_position_embeddings": trained}


def _by_parts(trained: int, target: int) -> dict[str, Any]:
    return {**_from_trained(trained, target), "attention_factor": 1.0}


def _dynamic(trained: int, target: int) -> dict[str, Any]:
    return {"factor": 2.0, "original_max_position_embeddings": trained}


def _window(share: int) -> Callable[[int, int], DistanceMap]:
    return lambda trained, target: attention.rerope(trained // share)


def _groups(share: int) -> Callable[[int, int], DistanceMap]:
    return lambda trained, target: smallest_groups(trained // share, trained, target)


def smallest_groups(window: int, trained: int, target: int) -> DistanceMap:
    """Self-extend with the smallest group that leaves no distance of a row beyond the trained ones.

    >>> smallest_groups(4, trained=8, target=16)
    DistanceMap(window=4, slope=1.0, group=4)
    """
    group = math.ceil((target - window) / (trained - window))
    while (
        attention.self_extend(window, group)(torch.tensor(target - 1), torch.tensor(0)) >= trained
    ):
        group += 1
    return attention.self_extend(window, group)


METHODS = {
    "direct": Method(),
    "PI": Method("linear", _factor),
    "NTK": Method("ntk", _factor),
    "NTK-fixed": Method("ntk_mixed", _fixed),
    "NTK-mixed": Method("ntk_mixed", _factor),
    "NTK-by-parts": Method("yarn", _by_parts),
    "YaRN": Method("yarn", _from_trained),
    "dynamic NTK": Method("dynamic", _dynamic),
    "ReRoPE, window 1/2": Method(distances=_window(2)),
    "ReRoPE, window 1/4": Method(distances=_window(4)),
    "self-extend, window 1/2": Method(distances=_groups(2)),
    "self-extend, window 1/4": Method(distances=_groups(4)),
    "direct, log n": Method(log_n=True),
    "NTK-mixed, log n": Method("ntk_mixed", _factor, log_n=True),
    "ReRoPE, window 1/2, log n": Method(distances=_window(2), log_n=True),
}


def stretched(method: Method, spec: rotary.Rotary, trained: int, target: int) -> rotary.Rotary:
    """The spec of a model, its frequencies those of a method.

    >>> stretched(METHODS["PI"], rotary.Rotary(head_dim=8), 128, 512)
    Rotary(head_dim=8, schedule='linear', params={'factor': 4.0})
    """
    params = method.params(trained, target)
    return dataclasses.replace(spec, schedule=method.schedule, params=params)


def attention_of(method: Method, spec: rotary.Rotary, trained: int, target: int) -> Attention:
    """The causal attention of a method, in place of that of a `Block`.

    It rotates q and k itself, and leaves the tables of the model unused.
    """
    used = stretched(method, spec, trained, target)
    distances = method.distances and method.distances(trained, target)

    def attend(q: Tensor, k: Tensor, v: Tensor, turn: Turn, causal: bool) -> Tensor:
        if not causal:
            raise ValueError(
                "rows longer than the trained ones are read causally, got causal=False"
            )
        if method.log_n:
            counts = torch.arange(1, q.shape[-2] + 1, device=q.device)
            q = attention.scale_by_log_n(q, counts, trained)
        if distances is None:
            found: Tensor = attention.softmax_attention(q, k, v, used)
        else:
            found = attention.distance_attention(q, k, v, used, distances)
        return found

    return attend


def read_by(model: Model, name: str, trained: int, target: int) -> Model:
    """The model itself, whose attention is from now on that of a method by its name."""
    attend = attention_of(METHODS[name], model.config.spec, trained, target)
    for block in model.blocks:
        block.attention = attend
    return model
