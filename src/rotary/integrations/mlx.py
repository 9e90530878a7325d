"""`RoPE`: replaces `mlx.nn.RoPE`, or mlx-lm's own, in a model of mlx-lm."""

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from .. import positions
from ..angles import cos_sin
from ..cache import Cache
from ..rotate import apply, rotate
from ..spec import Rotary, check_spec

_CACHE_BYTES = 64 * 2**20


class RoPE(Module):
    """A module that rotates as `spec` says; layers of mlx-lm call it as `rope(x, offset=n)`.

    It has no weights. All layers can share one, or with `rotary.configs` all of a layer type:

        spec = rotary.from_hf_config("config.json")
        for layer in model.layers:
            layer.self_attn.rope = RoPE(spec)

    >>> rope = RoPE(Rotary(head_dim=4))
    >>> x = mx.ones((1, 2, 3, 4))
    >>> bool(mx.array_equal(rope(x, offset=5)[:, :, :1], rope(x[:, :, :1], offset=5)))
    True
    """

    def __init__(self, spec: Rotary) -> None:
        check_spec(spec)
        if spec.num_axes > 1:
            raise ValueError(
                f"an offset has one axis, the spec has {spec.num_axes}: call rotary.apply with "
                "positions on all axes"
            )
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.spec = spec

    def __call__(self, x: mx.array, offset: "int | mx.array" = 0) -> mx.array:
        """Rotate x at positions offset .. offset + seq - 1.

        x       (batch, heads, seq, head_dim), of any floating type
        offset  the number of tokens before: a number, or an array with one number for all rows or
                one for each; it may be negative for a row that begins with padding

        For `mx.compile` an array is no constant, so one compiled program serves all offsets.
        """
        seq = x.shape[-2]
        if isinstance(offset, mx.array):
            at = positions.arange(seq, offset)
            return apply(self.spec, x, positions=at, seq_dim=-2, allow_negative=True)
        cos, sin = _cache.get((self.spec, offset, seq), lambda: _tables(self.spec, offset, seq))
        return rotate(x, cos, sin, self.spec, seq_dim=-2)

    def _extra_repr(self) -> str:
        return repr(self.spec)


def _tables(spec: Rotary, offset: int, seq: int) -> tuple[mx.array, mx.array]:
    """Return cos and sin, computed with NumPy; q and k of every layer share them."""
    cos, sin = cos_sin(spec, np.arange(offset, offset + seq), allow_negative=True)
    return mx.array(cos), mx.array(sin)


_cache = Cache(_CACHE_BYTES)
