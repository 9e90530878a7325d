"""The plug-in for SGLang: its rotary embeddings rotate with `rotary.rotate`.

    SGLANG_PLUGINS=rotary python -m sglang.launch_server --model-path MODEL

If SGLANG_PLUGINS is unset, SGLang loads every installed plug-in, but this one then does nothing: it
must be named. If it is, `register` puts a hook around each method in `HOOKS`. q and k are rotated
in float32 by SGLang's tables, and rounded once; in place if SGLang's own code works in place.
SGLang's log names each class at its first call, and each reason why a call is left to SGLang:

- the call also writes the KV cache (`fused_set_kv_buffer_arg`, which most models use on a GPU)
- training and rollout must agree bit for bit (`--rl-on-policy-target`)
- arguments, positions or a table have a form that is not described here

Classes with a forward of their own are not replaced: Ernie 4.5 VL, dual chunk attention, Fourier,
the vision tower of Llama 4. Nor is a method whose parameters differ from those in SGLang 0.5.23.

The hooks were tested in SGLang 0.5.23 on a CPU, with SGLang's own `load_plugins` and classes;
tests/peers/in_sglang.py repeats the test. The methods for GPUs only, `forward_cuda` and
`forward_triton`, are read from SGLang's source and called there with tensors on a CPU.
"""

import importlib
import inspect
import logging
import math
import os
import pkgutil
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..rotate import rotate

NAME = "rotary"
_ROPE = "sglang.srt.layers.rotary_embedding"
_log = logging.getLogger("sglang.rotary")
_logged: set[str] = set()  # lines that are logged only once
_rotated: set[type] = set()  # classes that the log has named as rotated by this library

Pair = tuple[Tensor, Tensor]


class Rope(Protocol):
    """The attributes of a rotary embedding of SGLang that are read here."""

    head_size: int
    rotary_dim: int
    is_neox_style: bool
    cos_sin_cache: Tensor
    long_short_cos_sin_cache: Tensor
    original_max_position_embeddings: int
    mrope_interleaved_glm: bool
    axis_map: Tensor | None


class Rows(NamedTuple):
    """Tables of cos and sin, (rows, pairs), and the row of each token; None: token i has row i."""

    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None


class Method(NamedTuple):
    """A method of SGLang: the names of its parameters, and how this library computes it.

    rows         (rope, positions, offsets) -> the rows of the tokens, or why SGLang must compute
    is_in_place  whether SGLang writes the results to q and k
    is_half      whether its class has only the half layout; `is_neox_style` is then not read
    """

    parameters: tuple[str, ...]
    rows: Callable[[Rope, Tensor, object], Rows | str]
    is_in_place: bool = False
    is_half: bool = False


def by_position(rope: Rope, positions: Tensor, offsets: object) -> Rows | str:
    """Return the rows of the table at positions (tokens,)."""
    return _rows(rope.cos_sin_cache, positions, offsets)


def by_position_interleaved(rope: Rope, positions: Tensor, offsets: object) -> Rows | str:
    """Return rows for DeepSeek's formula, whose results in the half layout have one more axis."""
    if rope.is_neox_style:
        return "the half layout in DeepSeek's formula"
    return _rows(rope.cos_sin_cache, positions, offsets)


def by_longest(rope: Rope, positions: Tensor, offsets: object) -> Rows | str:
    """Return rows for LongRoPE of Phi-3.

    They are in the long table if any position of the batch is greater than the trained length.
    """
    trained = rope.original_max_position_embeddings
    is_long = (positions > trained).any()
    return _rows(rope.long_short_cos_sin_cache, positions + trained * is_long, offsets)


def by_axes(rope: Rope, positions: Tensor, offsets: object) -> Rows | str:
    """Return rows for M-RoPE: positions (3, tokens), with the axis of each pair in `axis_map`."""
    if positions.ndim == 1:
        return _rows(rope.cos_sin_cache, positions, offsets)
    if rope.axis_map is None or positions.ndim != 2:
        return f"positions of shape {tuple(positions.shape)} without an axis for each pair"
    of_pairs = positions[rope.axis_map.to(positions.device)].T
    pairs = torch.arange(of_pairs.shape[1], device=positions.device)
    cos, sin = rope.cos_sin_cache.to(positions.device).chunk(2, dim=-1)
    return Rows(cos[of_pairs, pairs].float(), sin[of_pairs, pairs].float())


def by_axes_native(rope: Rope, positions: Tensor, offsets: object) -> Rows | str:
    """Return rows as `by_axes` does, for SGLang's formula, which lacks the order of GLM."""
    if positions.ndim == 2 and rope.mrope_interleaved_glm:
        return "the order of GLM's M-RoPE, which this method does not have"
    return by_axes(rope, positions, offsets)


def _rows(table: Tensor, positions: Tensor, offsets: object) -> Rows | str:
    """Return rows of a table; if it is not float32, only the rows of the tokens are converted."""
    if positions.ndim != 1:
        return f"positions of shape {tuple(positions.shape)}"
    rows = positions + offsets if isinstance(offsets, Tensor) else positions
    table = table.to(positions.device)
    if table.dtype == torch.float32:
        cos, sin = table.chunk(2, dim=-1)
        return Rows(cos, sin, rows)
    cos, sin = table[rows].float().chunk(2, dim=-1)
    return Rows(cos, sin)


_SELF = ("self", "positions", "query", "key")
_ALL = (*_SELF, "offsets", "fused_set_kv_buffer_arg")
HOOKS = {  # class.method below _ROPE -> how this library computes it
    "base.RotaryEmbedding.forward_native": Method(_ALL, by_position),
    "base.RotaryEmbedding.forward_cpu": Method(_ALL, by_position),
    "base.RotaryEmbedding.forward_cuda": Method(_ALL, by_position, is_in_place=True),
    "mrope.MRotaryEmbedding.forward_native": Method(
        (*_SELF, "fused_set_kv_buffer_arg"), by_axes_native
    ),
    "mrope.MRotaryEmbedding.forward_triton": Method(_SELF, by_axes, is_in_place=True),
    "rope_variant.DeepseekScalingRotaryEmbedding.forward_native": Method(
        (*_SELF, "offsets"), by_position_interleaved
    ),
    "rope_variant.Phi3LongRoPEScaledRotaryEmbedding.forward": Method(
        (*_SELF, "offsets"), by_longest, is_half=True
    ),
}


def register() -> None:
    """Put a hook around each method in `HOOKS`; the entry point `sglang.srt.plugins`.

    Does nothing unless SGLANG_PLUGINS names `rotary`. A method that this SGLang does not have, or
    that has other parameters, is left alone, with a line in the log.

    >>> register()  # SGLANG_PLUGINS does not name it here: nothing happens
    """
    if NAME not in map(str.strip, os.environ.get("SGLANG_PLUGINS", "").split(",")):
        return
    plugins = vars(importlib.import_module("sglang.srt.plugins.hook_registry"))
    hooked = []
    for path, method in HOOKS.items():
        file, owner, name = path.split(".")
        methods = vars(getattr(pkgutil.resolve_name(f"{_ROPE}.{file}:"), owner, object))
        original = methods.get(name)
        names = tuple(inspect.signature(original).parameters) if original else None
        if names == method.parameters:
            target = f"{_ROPE}.{path}"
            plugins["HookRegistry"].register(target, hook_of(method), plugins["HookType"].AROUND)
            hooked.append(f"{owner}.{name}")
        else:
            _log.warning("rotary leaves %s alone: its parameters are %s", path, names)
    _log.info("rotary rotates q and k in %s", ", ".join(hooked) or "nothing")


def hook_of(method: Method) -> Callable[..., Pair]:
    """Return a hook, which SGLang calls with the original method and its arguments.

    >>> from types import SimpleNamespace
    >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # row 1 is a quarter turn
    >>> rope = SimpleNamespace(head_size=2, rotary_dim=2, is_neox_style=True, cos_sin_cache=table)
    >>> hook = hook_of(HOOKS["base.RotaryEmbedding.forward_native"])
    >>> q = torch.tensor([[3.0, 4.0]])
    >>> hook(None, rope, torch.tensor([1]), q, q)[0]
    tensor([[-4.,  3.]])
    """

    def around(
        original: Callable[..., Pair],
        rope: Rope,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        *others: object,
        **named: object,
    ) -> Pair:
        options = {**dict(zip(method.parameters[4:], others, strict=False)), **named}
        tables = _why_not(method, rope, options) or method.rows(
            rope, positions, options.get("offsets")
        )
        if isinstance(tables, str):
            _log_once(f"{type(rope).__name__} is left to SGLang: {tables}")
            return original(rope, positions, query, key, *others, **named)
        if type(rope) not in _rotated and not torch.compiler.is_compiling():
            _rotated.add(type(rope))
            _log.info("q and k of %s are rotated by rotary", type(rope).__name__)
        size = rope.head_size
        heads = [x.view(len(x), math.prod(x.shape[1:]) // size, size) for x in (query, key)]
        layout = "half" if method.is_half or rope.is_neox_style else "interleaved"
        q, k = rotate(
            (heads[0], heads[1]), tables.cos, tables.sin, positions=tables.positions, layout=layout,
            rotary_dim=rope.rotary_dim, seq_dim=-3, out=heads if method.is_in_place else None,
        )  # fmt: skip
        if method.is_in_place:
            return query, key
        return q.view(query.shape), k.view(key.shape)

    return around


def _why_not(method: Method, rope: Rope, options: dict[str, object]) -> str | None:
    """Return why a call is left to SGLang, whatever its positions are; None if it is not."""
    if options.get("fused_set_kv_buffer_arg") is not None:
        return "the call also writes the KV cache"
    if getattr(rope, "_force_native", False):
        return "training and rollout are to agree bit for bit"
    if hasattr(rope, "sin_cos_cache"):
        return "a table of rows that were taken before"
    if unknown := options.keys() - set(method.parameters):
        return f"arguments that are not known, {', '.join(sorted(unknown))}"
    table = getattr(rope, "long_short_cos_sin_cache", None)
    table = rope.cos_sin_cache if table is None else table
    if table.shape[1:] != (rope.rotary_dim,):
        return f"a table of shape {tuple(table.shape)} for rotary_dim {rope.rotary_dim}"
    return None


def _log_once(line: str) -> None:
    if line not in _logged and not torch.compiler.is_compiling():
        _logged.add(line)
        _log.info(line)
