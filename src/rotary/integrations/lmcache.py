"""The plug-in for LMCache: `rotary.rerotate` moves cached keys instead of LMCache's kernel.

LMCache reuses the keys of a text at other positions (CacheBlend). Its kernel rotates a key back by
one row of the server's table and forward by another. `install(spec)` puts `rerotate` in its place:

    from rotary.integrations import lmcache
    lmcache.install(rotary.from_hf_config("config.json"))

- The two angles are subtracted as whole numbers, so each move rounds a key once, whatever the
  distance. LMCache rounds four products with tables that vLLM keeps in 16 bits.
- Rope scaling and partial rotation work. LMCache refuses them if they are passed to it, but its
  code that reads vLLM's model does not pass them: it builds an unscaled table of the whole head.
  With YaRN its kernel multiplies keys by the square of the attention factor; here it cancels.

In a vLLM server, the plug-in `rotary_lmcache` calls `install` in every process:

    VLLM_PLUGINS=rotary_lmcache ROTARY_CONFIG=/models/mine/config.json vllm serve ...

It covers the blending that runs inside vLLM (`lmcache.v1.compute`). LMCache's separate server
(`lmcache.v1.multiprocess`) moves keys in one native call that has no hook.

Tested with LMCache 0.5.6 and vLLM 0.33 on a CPU; tests/peers/in_lmcache.py repeats the test.
"""

import importlib
import logging
import math
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..configs import from_hf_config
from ..kernels.numpy import check_rows
from ..rerotate import rerotate
from ..rotate import rotate
from ..spec import Rotary, check_spec

NAME = "rotary_lmcache"
CONFIG = "ROTARY_CONFIG"
_MODELS = "lmcache.v1.compute.models.base"  # has imported a name that is replaced elsewhere
_log = logging.getLogger("lmcache.rotary")
_originals: list[tuple[dict[str, object], str, object]] = []  # namespace, name, original value


def rotary_embedding_k_fused(
    old_positions: Tensor,
    new_positions: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Move keys as LMCache's operator of this name, by the server's table instead of a spec.

    old_positions, new_positions  (tokens,) rows of the table
    key            (tokens, heads, head_size), written in place
    cos_sin_cache  (rows, rotary_dim): cos, then sin; rotary_dim may be less than head_size
    is_neox        half layout, else interleaved

    The move is one rotation, by the difference of the two angles of the table, so an attention
    factor in the table cancels. It is as exact as the table; `KeyMover` does not use the table.
    Raises ValueError for shapes that do not fit, and for positions on the host that are no rows of
    the table.

    >>> cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # row 1 is a quarter turn
    >>> key = torch.tensor([[[3.0, 4.0]]])
    >>> rotary_embedding_k_fused(torch.tensor([0]), torch.tensor([1]), key, 2, cache, True)
    >>> key
    tensor([[[-4.,  3.]]])
    """
    _check(key, head_size)
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim > head_size:
        raise ValueError(f"cos_sin_cache has {rotary_dim} columns, more than head_size {head_size}")
    for positions in (old_positions, new_positions):
        if positions.device.type == "cpu":  # to read those of a GPU would wait for it
            check_rows(positions, cos_sin_cache)
    table = cos_sin_cache.to(key.device)
    (old_cos, old_sin), (new_cos, new_sin) = (
        table[where].to(torch.float32).chunk(2, dim=-1) for where in (old_positions, new_positions)
    )
    length = old_cos.square() + old_sin.square()
    cos = (old_cos * new_cos + old_sin * new_sin) / length
    sin = (old_cos * new_sin - old_sin * new_cos) / length
    layout = "half" if is_neox else "interleaved"
    rotate(key, cos, sin, layout=layout, rotary_dim=rotary_dim, seq_dim=-3, out=key)


def rotary_embedding_k_fused_strided(
    old_positions: Tensor,
    new_positions: Tensor,
    key: Tensor,
    head_size: int,
    head_stride: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Move keys as `rotary_embedding_k_fused` does, in an array that also holds the values.

    key          (tokens, heads, head_stride): keys of head_size channels, then values, which stay

    >>> cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> key = torch.tensor([[[3.0, 4.0, 5.0]]])
    >>> rotary_embedding_k_fused_strided(
    ...     torch.tensor([0]), torch.tensor([1]), key, 2, 3, cache, True)
    >>> key
    tensor([[[-4.,  3.,  5.]]])
    """
    _check(key, head_stride)
    keys = key[..., :head_size]
    rotary_embedding_k_fused(old_positions, new_positions, keys, head_size, cos_sin_cache, is_neox)


class KeyMover(NamedTuple):
    """Both operators of LMCache and its `FusedRope`, by exact angles of a spec.

    spec     the spec of the model that wrote the keys
    seq_len  the length for which `dynamic` or `longrope` keys were scaled

    A call `mover(old_positions, new_positions, k)` moves k of (tokens, heads * head_dim) in place
    and returns it. The operators take the server's table, but read only its width.

    >>> mover = KeyMover(Rotary(head_dim=4))
    >>> key = torch.ones(1, 8)
    >>> moved = mover(torch.tensor([7]), torch.tensor([9]), key.clone())
    >>> back = mover(torch.tensor([9]), torch.tensor([7]), moved)
    >>> torch.allclose(back, key)
    True
    """

    spec: Rotary
    seq_len: int | None = None

    def __call__(self, old_positions: Tensor, new_positions: Tensor, k: Tensor) -> Tensor:
        heads = math.prod(k.shape[1:]) // self.spec.head_dim  # torch infers none without tokens
        keys = k.view(k.shape[0], heads, self.spec.head_dim)
        self._move(old_positions, new_positions, keys)
        return k

    def rotary_embedding_k_fused(
        self,
        old_positions: Tensor,
        new_positions: Tensor,
        key: Tensor,
        head_size: int,
        cos_sin_cache: Tensor,
        is_neox: bool,
    ) -> None:
        """Move keys as the function of this name; ValueError if the spec has another form."""
        _check(key, head_size)
        self.check(head_size, is_neox)
        if cos_sin_cache.shape[-1] != self.spec.rotary_dim:
            raise ValueError(
                f"the table of the server rotates {cos_sin_cache.shape[-1]} channels, the spec "
                f"{self.spec.rotary_dim}: install the spec of the model that is served"
            )
        self._move(old_positions, new_positions, key)

    def rotary_embedding_k_fused_strided(
        self,
        old_positions: Tensor,
        new_positions: Tensor,
        key: Tensor,
        head_size: int,
        head_stride: int,
        cos_sin_cache: Tensor,
        is_neox: bool,
    ) -> None:
        """Move keys as the function of this name; ValueError if the spec has another form."""
        _check(key, head_stride)
        self.rotary_embedding_k_fused(
            old_positions, new_positions, key[..., :head_size], head_size, cos_sin_cache, is_neox
        )

    def check(self, head_size: int, is_neox: bool) -> None:
        """Raise ValueError if the spec has another head_dim or layout than the server."""
        layout = "half" if is_neox else "interleaved"
        if (head_size, layout) != (self.spec.head_dim, self.spec.out_layout):
            raise ValueError(
                f"the server has heads of {head_size} channels in {layout} layout, the spec "
                f"{self.spec.head_dim} in {self.spec.out_layout} layout: install the spec of the "
                "model that is served"
            )

    def _move(self, old_positions: Tensor, new_positions: Tensor, keys: Tensor) -> None:
        rerotate(keys, self.spec, old_positions, new_positions, seq_len=self.seq_len,
                 new_seq_len=self.seq_len, seq_dim=-3, out=keys)  # fmt: skip


def install(spec: Rotary, seq_len: int | None = None) -> None:
    """Make LMCache move keys by `rerotate`, in this process.

    spec     the spec of the model that is served, `rotary.from_hf_config("config.json")`
    seq_len  the length for which its keys are scaled, if the schedule depends on it

    Call it before the model is loaded; `uninstall` reverts it. It replaces both operators of
    `lmcache.device_ops`, and `get_fused_rope`, which returns the object that moves the keys of a
    model. The new one raises ValueError if head_size, layout or base are not those of `spec`.

    Raises ImportError if LMCache is not installed; TypeError if `spec` is not a `Rotary`;
    ValueError for a spec that depends on the length without `seq_len`, or that has several position
    axes.

    >>> install(Rotary(head_dim=64, schedule="dynamic", params={"factor": 2.0,
    ...                "original_max_position_embeddings": 4096}))
    Traceback (most recent call last):
    ValueError: a 'dynamic' spec needs seq_len=, the length that the server scales its keys for
    """
    check_spec(spec, "spec")
    if spec.depends_on_length and seq_len is None:
        raise ValueError(
            f"a {spec.schedule!r} spec needs seq_len=, the length that the server scales its keys "
            "for"
        )
    if spec.num_axes > 1:
        raise ValueError(f"LMCache has one position a token, the spec {spec.num_axes} axes")
    operators = vars(importlib.import_module("lmcache"))["device_ops"]
    rope = importlib.import_module("lmcache.v1.compute.positional_encoding")
    mover = KeyMover(spec, seq_len)
    for name in ("rotary_embedding_k_fused", "rotary_embedding_k_fused_strided"):
        _replace(operators, name, getattr(mover, name))
    for module in (rope, sys.modules.get(_MODELS)):
        if module is not None:
            _replace(module, "get_fused_rope", _fused_rope_of(mover))
    _log.info("rotary moves the keys of LMCache, by %s", spec)


def uninstall() -> None:
    """Restore LMCache's own code; do nothing if nothing is installed.

    >>> uninstall()
    """
    while _originals:
        names, name, value = _originals.pop()
        names.pop(name)
        if value is not None:
            names[name] = value


def register() -> None:
    """Call `install` with the config at ROTARY_CONFIG: vLLM's plug-in `rotary_lmcache`.

    Does nothing unless VLLM_PLUGINS names `rotary_lmcache`. It may be called many times. Raises
    ValueError without ROTARY_CONFIG.

    >>> register()  # VLLM_PLUGINS does not name it here: nothing happens
    """
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    path = os.environ.get(CONFIG)
    if not path:
        raise ValueError(f"{NAME} needs {CONFIG}, the config.json of the model that is served")
    spec = from_hf_config(path)
    if spec is None:
        raise ValueError(f"the model of {CONFIG}={path} does not rotate: there is nothing to move")
    install(spec)


def _fused_rope_of(mover: KeyMover) -> Callable[..., KeyMover]:
    def get_fused_rope(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        is_neox_style: bool = True,
        rope_scaling: object = None,
        dtype: object = None,
        partial_rotary_factor: float = 1.0,
    ) -> KeyMover:
        mover.check(head_size, is_neox_style)
        if base != mover.spec.base:
            raise ValueError(
                f"the server has base {base}, the spec {mover.spec.base}: install the spec of the "
                "model that is served"
            )
        _log.info("cached keys are moved by rotary.rerotate, %s", mover.spec)
        return mover

    return get_fused_rope


def _replace(owner: object, name: str, value: object) -> None:
    _originals.append((vars(owner), name, vars(owner).get(name)))
    setattr(owner, name, value)


def _check(key: Tensor, width: int) -> None:
    if key.ndim != 3 or key.shape[-1] != width:
        raise ValueError(f"key must be (tokens, heads, {width}), got {tuple(key.shape)}")
