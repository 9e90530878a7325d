"""Arguments of Megatron-LM's training and serving scripts."""

import math
from collections.abc import Mapping
from typing import Any

from ..spec import Rotary, nearest
from .hf import from_hf_config

# Megatron: arguments of training and serving scripts -> ours. Source: Megatron-LM, arguments.py
_MEGATRON = {
    "kv_channels", "hidden_size", "num_attention_heads", "rotary_base", "rotary_percent",
    "rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling",
    "rope_scaling_factor", "use_rotary_position_embeddings", "position_embedding_type",
    "max_position_embeddings", "qk_pos_emb_head_dim", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "rope_type",
}  # fmt: skip


def from_megatron(arguments: Mapping[str, Any]) -> Rotary:
    """The RoPE of Megatron-LM's arguments: {"kv_channels": 128, "rotary_base": 500000, ...}.

    `use_rope_scaling` is the llama3 band with 1, 4 and 8192 built in; `rotary_percent` a leading
    slice; `rope_type` "yarn" takes YaRN's own names, and rotates `qk_pos_emb_head_dim` channels.
    Raises ValueError for an argument of RoPE that is not known.
    Source: Megatron-LM, core/models/common/embeddings/rotary_pos_embedding.py.

    >>> from_megatron({"kv_channels": 128, "rotary_base": 500000, "rotary_percent": 0.5}).rotary_dim
    64
    """
    for name in arguments:
        if name not in _MEGATRON and any(word in name for word in ("rope", "rotary", "pos_emb")):
            raise ValueError(f"argument {name!r} is not known{nearest(name, _MEGATRON)}")
    width = arguments.get("qk_pos_emb_head_dim") or arguments.get("kv_channels")
    if width is None and not {"hidden_size", "num_attention_heads"} <= arguments.keys():
        raise ValueError("the arguments need kv_channels, or hidden_size and num_attention_heads")
    width = width or arguments["hidden_size"] // arguments["num_attention_heads"]
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": arguments.get("rotary_base", 10_000),
    }
    stretch = arguments.get("rotary_seq_len_interpolation_factor")
    if stretch is not None:
        rope |= {"rope_type": "linear", "factor": stretch}
    elif arguments.get("use_rope_scaling"):
        rope |= {
            "rope_type": "llama3", "factor": arguments.get("rope_scaling_factor", 8.0),
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    elif arguments.get("rope_type") == "yarn":
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
        rope |= {"rope_type": "yarn", "factor": arguments.get("rope_scaling_factor", 1.0)}
        rope |= {name: arguments[name] for name in names if name in arguments}
        if rope["factor"] > 1 and ("mscale" in arguments or "mscale_all_dim" in arguments):
            over, under = arguments.get("mscale", 1.0), arguments.get("mscale_all_dim", 0.0)
            gain = [0.1 * each * math.log(rope["factor"]) + 1 for each in (over, under)]
            rope["attention_factor"] = gain[0] / gain[1]
            rope.pop("mscale", None)
    share = arguments.get("rotary_percent", 1.0)
    spec = from_hf_config(
        {"head_dim": width, "partial_rotary_factor": share, "rope_parameters": rope}
    )
    assert spec is not None  # no layer type is asked for
    if not arguments.get("rotary_interleaved"):
        return spec
    return Rotary.from_dict(
        {**spec.to_dict(), "layout": "interleaved", "out_layout": "interleaved"}
    )
