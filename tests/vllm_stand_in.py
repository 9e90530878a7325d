"""What rotary's plug-in touches of vLLM 0.33, as little of it as it needs: tests/test_vllm.py.

That test copies this file into a package of vLLM's name. The classes have vLLM's names, arguments,
buffers and shapes; the formulas are the plainest there are.
"""

import torch
from torch import nn

op_registry_oot = {}
calls_native = False  # whether vLLM would compile a model: it then calls forward_native


class CustomOp(nn.Module):
    def __new__(cls, *args, **kwargs):
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    def __init__(self):
        super().__init__()
        self._forward_method = self.forward_native if calls_native else self.forward_cpu

    def forward(self, *args, **kwargs):
        return self._forward_method(*args, **kwargs)

    @classmethod
    def register_oot(cls, op):
        op_registry_oot[cls.__name__] = op


def turned(x, cos, sin, is_half, rotary_dim):
    """x (tokens, heads, head_dim) by cos and sin (tokens, pairs), its first channels."""
    cos, sin = cos[:, None], sin[:, None]
    pairs = x[..., :rotary_dim]
    a, b = pairs.chunk(2, -1) if is_half else (pairs[..., ::2], pairs[..., 1::2])
    pair = a * cos - b * sin, b * cos + a * sin
    pairs = torch.cat(pair, -1) if is_half else torch.stack(pair, -1).flatten(-2)
    return torch.cat([pairs, x[..., rotary_dim:]], -1)


class RotaryEmbeddingBase(CustomOp):
    def __init__(self, head_size, rotary_dim, rows, base, is_neox_style, dtype):
        super().__init__()
        self.head_size, self.rotary_dim, self.rows, self.base = head_size, rotary_dim, rows, base
        self.is_neox_style = is_neox_style
        cache = self._compute_cos_sin_cache().to(dtype)
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def _compute_inv_freq(self, base):
        return 1 / base ** (torch.arange(0, self.rotary_dim, 2, dtype=torch.float)
                            / self.rotary_dim)  # fmt: skip

    def _compute_cos_sin_cache(self):
        angles = torch.outer(
            torch.arange(self.rows, dtype=torch.float), self._compute_inv_freq(self.base)
        )
        return torch.cat([angles.cos(), angles.sin()], -1)

    def _turned(self, rows, xs):
        cos, sin = rows.chunk(2, -1)
        return tuple(None if x is None else turned(
            x.view(len(cos), -1, self.head_size), cos, sin, self.is_neox_style, self.rotary_dim
        ).view(x.shape) for x in xs)  # fmt: skip


class RotaryEmbedding(RotaryEmbeddingBase):
    def forward_native(self, positions, query, key=None):
        return self._turned(self.cos_sin_cache[positions.flatten()], (query, key))

    def forward_cpu(self, positions, query, key=None):
        for x, y in zip((query, key), self.forward_native(positions, query, key), strict=True):
            if x is not None:
                x.copy_(y)
        return query, key

    forward_cuda = forward_cpu


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    def _compute_inv_freq(self, base):
        return super()._compute_inv_freq(base) / 4


class MRotaryEmbedding(RotaryEmbeddingBase):
    mrope_interleaved = False

    def __init__(self, *args, mrope_section):
        super().__init__(*args)
        self.mrope_section = mrope_section

    def forward_native(self, positions, query, key=None, offsets=None):
        rows = self.cos_sin_cache[positions]
        if positions.dim() == 2:
            parts = [half.split(self.mrope_section, -1) for half in rows.chunk(2, -1)]
            rows = torch.cat([m[i] for half in parts for i, m in enumerate(half)], -1)
        return self._turned(rows, (query, key))

    def forward_cpu(self, positions, query, key=None, offsets=None):
        return self.forward_native(positions, query, key, offsets)

    forward_cuda = forward_cpu


class BailingMRotaryEmbedding(MRotaryEmbedding):
    """Not what vLLM's class computes: its sections are in blocks here."""

    def forward_native(self, positions, query, key=None, offsets=None):
        return super().forward_native(positions, query, key)


class DeepseekScalingRotaryEmbedding(RotaryEmbeddingBase):
    def forward_native(self, positions, query, key=None, offsets=None):
        at = positions if offsets is None else positions + offsets
        return self._turned(self.cos_sin_cache[at], (query, key))

    forward_cpu = forward_cuda = forward_native


class Phi3LongRoPEScaledRotaryEmbedding(nn.Module):
    original_max_position_embeddings, use_long_rope = 8, True

    def __init__(self, head_size, rotary_dim, rows, dtype):
        super().__init__()
        self.head_size, self.rotary_dim = head_size, rotary_dim
        parts = [self._compute_cos_sin_cache(8, 1.0), self._compute_cos_sin_cache(rows, 3.0)]
        cache = torch.cat([part.to(dtype) for part in parts])
        self.register_buffer("long_short_cos_sin_cache", cache, persistent=False)

    def _compute_cos_sin_cache(self, rows, factor):
        at = torch.arange(0, self.rotary_dim, 2, dtype=torch.float)
        inv_freq = 1 / (factor * 1e4 ** (at / self.rotary_dim))
        angles = torch.outer(torch.arange(rows, dtype=torch.float), inv_freq)
        return torch.cat([angles.cos(), angles.sin()], -1)

    def forward(self, positions, query, key=None, offsets=None):
        at = positions + 8 * self.use_long_rope + (0 if offsets is None else offsets)
        cos, sin = self.long_short_cos_sin_cache[at].chunk(2, -1)
        return tuple(
            turned(x.view(len(at), -1, self.head_size), cos, sin, True, self.rotary_dim).flatten(1)
            for x in (query, key)
        )


class FourierRotaryEmbedding(RotaryEmbedding):
    pass


class TomorrowsRotaryEmbedding(RotaryEmbedding):
    def forward_cpu(self, positions, query, key=None):
        return super().forward_cpu(positions + 1, query, key)


class Gemma4RotaryEmbedding(RotaryEmbeddingBase):
    def forward_native(self, positions, query, key=None):
        return query, key

    def forward_cpu(self, positions, query, key=None):
        return query, key


DeepseekV4ScalingRotaryEmbedding = None  # a name that is no class


class DeepseekV4Sparse(DeepseekScalingRotaryEmbedding):
    def forward_cpu(self, positions, query, key=None, indices=None):
        return query, key
