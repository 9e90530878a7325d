"""`RoPE`: replaces `mlx.nn.RoPE`, or mlx-lm's own, in a model of mlx-lm."""

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from .. import positions
from ..angles import cos_sin
from ..cache import Cache
from ..rotate import apply, rotate
from ..spec import Rotary

_CACHE_BYTES = 64 * 2**20


class RoPE(Module):
    """Rotates as `spec` says, with the call that the layers of mlx-lm make: `rope(x, offset=n)`.

    It has no parameter. One for all layers, or with `rotary.configs` one for each layer type:

        spec = rotary.from_hf_config("config.json")
        for layer in model.layers:
            layer.self_attn.rope = RoPE(spec)

    >>> rope = RoPE(Rotary(head_dim=4))
    >>> x = mx.ones((1, 2, 3, 4))
    >>> bool(mx.array_equal(rope(x, offset=5)[:, :, :1], rope(x[:, :, :1], offset=5)))
    True
    """

    def __init__(self, spec: Rotary) -> None:
        if spec.num_axes > 1:
            raise ValueError(
                f"an offset is one axis, the spec has {spec.num_axes}: call rotary.apply with "
                "positions of all of them"
            )
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.spec = spec

    def __call__(self, x: mx.array, offset: "int | mx.array" = 0) -> mx.array:
        """x rotated at positions offset .. offset + seq - 1.

        x       (batch, heads, seq, head_dim), of any floating type
        offset  the number of tokens before: a number, or an array of one number for all rows or
                one for each, which may be negative where a row begins with padding

        An offset that is an array is not a constant of `mx.compile`: one program serves all.
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
    """cos and sin by the kernel of NumPy, the same for q and k of every layer."""
    cos, sin = cos_sin(spec, np.arange(offset, offset + seq))
    return mx.array(cos), mx.array(sin)


_cache = Cache(_CACHE_BYTES)
