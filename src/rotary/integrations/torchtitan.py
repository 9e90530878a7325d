"""The overrides for torchtitan: its rotary modules rotate with the kernels of this library.

    torchrun -m torchtitan.train ... --override.imports \\
        rotary.integrations.torchtitan.cos_sin_rope rotary.integrations.torchtitan.complex_rope

`cos_sin_rope` replaces `CosSinRoPE`, and `complex_rope` replaces `ComplexRoPE`; name the one that
the model uses, or both. Classes derived from the two, such as the M-RoPE of Qwen3.5, are not
replaced. Positions, buffers, checkpoints and sharding remain torchtitan's. This library rotates q
and k by the rows of torchtitan's table and, with `={"exact": true}` after a name, fills the table.

torchtitan makes its table from float32 angles, which are off by 8e-3 near position 131 072.
`exact=True` fills the same buffer with cos and sin that are right to 1.5e-7. Without it the table
is torchtitan's, and q and k equal torchtitan's up to rounding.

The classes `Rotary...` and the two overrides exist only if torchtitan is installed. Tested with
torchtitan 0.3.0 (tests/peers/in_torchtitan.py repeats the test); the rotary modules alone also with
its main branch of 2026-08-21.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from ..angles import cos_sin
from ..rotate import rotate
from ..spec import Rotary


class RoPEConfig(Protocol):
    """The fields of torchtitan's `RoPE.Config` that define its angles."""

    dim: int
    max_seq_len: int
    theta: float
    scaling: str
    scaling_factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_factor: float
    beta_fast: float
    beta_slow: float
    original_seq_len: int
    truncate: bool


def spec_of(config: RoPEConfig, layout: str) -> Rotary:
    """Return the `Rotary` of a torchtitan `RoPE.Config`; layout is "half" or "interleaved".

    `CosSinRoPE` has the half layout, `ComplexRoPE` the interleaved one. torchtitan multiplies
    YaRN's attention factor into the scale of the softmax, so the attention factor of the spec is 1.
    Raises ValueError for a scaling that torchtitan 0.3 does not have.

    >>> from types import SimpleNamespace
    >>> spec_of(SimpleNamespace(dim=64, theta=1e6, scaling="none"), "half")
    Rotary(head_dim=64, base=1000000.0)
    """
    schedule, params = "default", dict[str, float]()
    if config.scaling == "llama":
        schedule, params = "llama3", {
            "factor": config.scaling_factor,
            "low_freq_factor": config.low_freq_factor,
            "high_freq_factor": config.high_freq_factor,
            "original_max_position_embeddings": config.original_max_position_embeddings,
        }  # fmt: skip
    elif config.scaling == "yarn" and config.rope_factor > 1:
        schedule, params = "yarn", {
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.original_seq_len,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "truncate": config.truncate,
            "attention_factor": 1.0,
        }  # fmt: skip
    elif config.scaling not in ("none", "yarn"):
        raise ValueError(
            f"scaling must be 'none', 'llama' or 'yarn', got {config.scaling!r}: leave out "
            "exact=True to keep the table of torchtitan"
        )
    return Rotary(config.dim, base=config.theta, layout=layout, schedule=schedule, params=params)


def exact_rows(config: RoPEConfig, layout: str) -> tuple[Tensor, Tensor]:
    """Return exact cos and sin of positions 0 to max_seq_len - 1, (max_seq_len, dim / 2) float32.

    They are on torch's default device, where torchtitan expects its table. On the meta device they
    have only a shape.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(dim=4, max_seq_len=9, theta=1e4, scaling="none")
    >>> cos, sin = exact_rows(config, "half")
    >>> cos.shape, float(sin[1, 1])
    (torch.Size([9, 2]), 0.009999833069741726)
    """
    newer = getattr(config, "max_context_length", None)  # its name after torchtitan 0.3
    count = config.max_seq_len if newer is None else newer
    return cos_sin(spec_of(config, layout), torch.arange(count))


if find_spec("torchtitan") is not None:
    from torchtitan.config import derive, override  # type: ignore[import-not-found, unused-ignore]
    from torchtitan.models.common.rope import (  # type: ignore[import-not-found, unused-ignore]
        ComplexRoPE,
        CosSinRoPE,
    )

    class RotaryCosSinRoPE(CosSinRoPE):  # type: ignore[misc, unused-ignore]
        """torchtitan's `CosSinRoPE` (half layout) with `rotary.rotate`."""

        @dataclass(kw_only=True, slots=True)
        class Config(CosSinRoPE.Config):  # type: ignore[misc, unused-ignore]
            exact: bool = False

        def _precompute_cache(self) -> Tensor:
            if not self.config.exact or self.config.scaling == "llama":
                return super()._precompute_cache()  # raises its own error for "llama"
            cos, sin = exact_rows(self.config, "half")
            return torch.cat([cos, cos, sin, sin], dim=-1)

        @staticmethod
        def apply_rotary_emb(
            query: Tensor, key: Tensor, rope_cache: Tensor
        ) -> tuple[Tensor, Tensor]:
            rows = rope_cache.squeeze(-2)  # cos, cos, sin, sin
            pairs = rows.shape[-1] // 4
            cos, sin = rows[..., :pairs], rows[..., 2 * pairs : 3 * pairs]
            q, k = rotate((query, key), cos, sin, layout="half", seq_dim=-3)
            return q, k

    class RotaryComplexRoPE(ComplexRoPE):  # type: ignore[misc, unused-ignore]
        """torchtitan's `ComplexRoPE` (interleaved layout) with `rotary.rotate`."""

        @dataclass(kw_only=True, slots=True)
        class Config(ComplexRoPE.Config):  # type: ignore[misc, unused-ignore]
            exact: bool = False

        def _precompute_cache(self) -> Tensor:
            if not self.config.exact:
                return super()._precompute_cache()
            return torch.complex(*exact_rows(self.config, "interleaved"))

        @staticmethod
        def apply_rotary_emb(
            query: Tensor, key: Tensor, rope_cache: Tensor
        ) -> tuple[Tensor, Tensor]:
            rows = torch.view_as_real(rope_cache.squeeze(-2))
            cos, sin = rows[..., 0], rows[..., 1]
            q, k = rotate((query, key), cos, sin, layout="interleaved", seq_dim=-3)
            return q, k

    @override(  # type: ignore[untyped-decorator, unused-ignore]
        target=CosSinRoPE.Config, exact=True, description="RoPE of half layout by rotary"
    )
    def cos_sin_rope(config: CosSinRoPE.Config, *, exact: bool = False) -> RotaryCosSinRoPE.Config:
        """Return the config that replaces a `CosSinRoPE.Config`, with all its fields."""
        return derive(config, RotaryCosSinRoPE.Config, exact=exact)

    @override(  # type: ignore[untyped-decorator, unused-ignore]
        target=ComplexRoPE.Config, exact=True, description="interleaved RoPE by rotary"
    )
    def complex_rope(
        config: ComplexRoPE.Config, *, exact: bool = False
    ) -> RotaryComplexRoPE.Config:
        """Return the config that replaces a `ComplexRoPE.Config`, with all its fields."""
        return derive(config, RotaryComplexRoPE.Config, exact=exact)
