"""Writes a `Rotary` as vLLM's `--hf-overrides`."""

from ..angles import inv_freq
from ..spec import Rotary
from ..strict_json import JSON
from .hf_writing import to_hf_config, with_own_base


def to_vllm(spec: Rotary, *, max_position_embeddings: int | None = None) -> dict[str, JSON]:
    """Return the dict for vLLM's `--hf-overrides` that makes a model compute `spec`.

    LongRoPE is written with short_mscale and long_mscale, because vLLM ignores factor and
    attention_factor there. `max_position_embeddings` and errors as in `to_hf_config`. Also raises
    ValueError for what vLLM cannot compute: dynamic, which it computes as plain RoPE, and
    proportional with a factor, which it drops.
    Source: vLLM 0.33, started with such dicts: tests/golden/peers/to_vllm.json.

    >>> to_vllm(Rotary(head_dim=64, base=5e5))
    {'rope_parameters': {'rope_type': 'default', 'rope_theta': 500000.0}}
    """
    if spec.schedule == "dynamic":
        raise ValueError("vLLM computes dynamic as plain RoPE; use ntk with a fixed factor")
    if spec.schedule == "proportional" and spec.params.get("factor", 1.0) != 1.0:
        raise ValueError("vLLM drops the factor of proportional")
    spec = with_own_base(spec)
    written = to_hf_config(spec, max_position_embeddings=max_position_embeddings)
    del written["head_dim"]
    rope = written["rope_parameters"]
    if isinstance(rope.get("factor"), int):  # an int raises TypeError in vLLM's linear scaling
        rope["factor"] = float(rope["factor"])
    if spec.schedule == "longrope":
        trained = spec.params["original_max_position_embeddings"]
        rope["short_mscale"] = inv_freq(spec, trained)[1]
        rope["long_mscale"] = inv_freq(spec, trained + 1)[1]
    return written
