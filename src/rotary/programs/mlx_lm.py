"""What mlx-lm 0.32.2 computes from a config."""

import math

import numpy as np

from . import rules
from .case import Case, Program, Result
from .transformers import PHI3

# model files that take the type, or the base alone, from `rope_parameters`
READ_TYPES = frozenset(
    {"glm_moe_dsa", "minimax_m3_vl", "ministral3", "mistral4", "qwen3", "qwen3_5"}
)
READ_BASES = frozenset({
    "exaone_moe", "granitemoehybrid", "lfm2", "lfm2_moe", "muse_glimmer", "muse_spark",
    "olmo_hybrid",
})  # fmt: skip
TRAINED = "original_max_position_embeddings"


def opens(case: Case) -> Case:
    """What the model file takes of config.json, which it reads as it is."""
    data, layer_type = case.config.data, case.config.layer_type
    model_type = case.config.model_type.removesuffix("_text")
    old, new = data.get("rope_scaling"), data.get("rope_parameters")
    takes_type = layer_type is not None or model_type in READ_TYPES
    takes_base = takes_type or model_type in READ_BASES
    rope = old or (new if takes_type else None) or {}
    rope = case.rope if layer_type is not None else rope
    base = data.get("rope_theta", (new or {}).get("rope_theta") if takes_base else None)
    base = case.rope.get("rope_theta") if layer_type is not None else base
    advice = "Write rope_theta and rope_scaling at the top level: mlx-lm reads no rope_parameters"
    return case._replace(
        rope=rope,
        advice=advice if new and not takes_type else "",
        rope_type=rope.get("type") or rope.get("rope_type") or "default",
        base=10_000.0 if base is None else float(base),
    )


def llama3(case: Case) -> Result:
    """The band of Llama 3.1; a wavelength on its edge is kept."""
    trained = case.rope.get(TRAINED, 8192)
    result = rules.llama3(case, trained, low_freq_factor=1.0, high_freq_factor=4.0)
    kept = rules.frequencies("default", case.dim, case.base)
    edge = trained / case.rope.get("low_freq_factor", 1.0)
    inv_freq = np.where(2 * math.pi / kept == edge, kept, result.inv_freq)  # strict < there
    return result._replace(inv_freq=inv_freq)


def longrope(case: Case) -> Result:
    """LongRoPE, always with the long list."""
    data = case.config.data
    is_phi3 = case.config.model_type in PHI3
    case = case._replace(trained=data.get(TRAINED, 4096) if is_phi3 else rules.need(case, TRAINED))
    advice = "mlx-lm uses the long list for every row, and its own attention factor"
    switch = "never: the long list always"
    return rules.longrope(case, True, rules.stretched(case), switch, advice)


def yarn(case: Case) -> Result:
    """YaRN with DeepSeek's amplitude and 4096 where the trained length is missing."""
    ignored = [name for name in ("attention_factor", "truncate") if name in case.rope]
    advice = f"mlx-lm ignores {' and '.join(ignored)}" if ignored else ""
    if not advice and ("mscale" in case.rope) != ("mscale_all_dim" in case.rope):
        advice = "Give mscale and mscale_all_dim, both or none: alone, only mlx-lm reads it"
    result = rules.yarn_deepseek(case, case.rope.get(TRAINED, 4096))
    return result._replace(advice=advice)


_FILE = "mlx_lm/models/rope_utils.py"
MLX_LM = Program(
    "mlx-lm",
    "0.32.2",
    {
        "default": (rules.plain, f"{_FILE}, initialize_rope"),
        "mrope": (rules.legacy_mrope, f"{_FILE}, initialize_rope: nn.RoPE, one axis"),
        "linear": (rules.linear, f"{_FILE}, initialize_rope"),
        "dynamic": (
            rules.dynamic("with offset + length, at every call; cached keys keep theirs"),
            f"{_FILE}, DynamicNTKScalingRoPE",
        ),
        "yarn": (yarn, f"{_FILE}, YarnRoPE"),
        "deepseek_yarn": (yarn, f"{_FILE}, YarnRoPE"),
        "telechat3-yarn": (yarn, f"{_FILE}, YarnRoPE"),
        "longrope": (longrope, f"{_FILE}, SuScaledRoPE"),
        "llama3": (llama3, f"{_FILE}, Llama3RoPE"),
        "proportional": (rules.proportional, f"{_FILE}, ProportionalRoPE"),
    },
    (rules.refuse("ValueError: Unsupported RoPE type {}"), f"{_FILE}, initialize_rope"),
    opens,
)
