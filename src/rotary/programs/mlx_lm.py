"""What mlx-lm 0.32.2 computes from a config."""

import math
from collections.abc import Mapping

import numpy as np

from ..strict_json import JSON
from . import rules
from .case import Case, NotComparedError, Program, RefusedError, Result
from .transformers import PHI3

# those of its model files that `rotary.configs` knows, and their aliases
MODEL_TYPES = frozenset({
    "afmoe", "apertus", "bailing_hybrid", "bitnet", "cohere", "cohere2", "dbrx", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe",
    "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text",
    "gemma4_unified", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox",
    "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "helium",
    "hunyuan_v1_dense", "internlm2", "kimi_k2", "kimi_k25", "laguna", "lfm2", "lfm2_moe",
    "llama", "llama4", "llama4_text", "llava", "longcat_flash", "mellum", "mimo_v2_flash",
    "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl", "ministral3", "mistral", "mistral3",
    "mistral4", "mixtral", "muse_glimmer", "muse_spark", "nanochat", "nemotron", "olmo",
    "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phi3", "phimoe", "pixtral", "qwen2",
    "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe",
    "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "recurrent_gemma", "seed_oss", "smollm3",
    "solar_open", "stablelm", "starcoder2", "step3p5",
})  # fmt: skip
# model files that take the type, or the base alone, from `rope_parameters`
READ_TYPES = frozenset({
    "glm_moe_dsa", "minimax_m3_vl", "ministral3", "mistral4", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_vl",
})  # fmt: skip
READ_BASES = frozenset({
    "exaone_moe", "granitemoehybrid", "lfm2", "lfm2_moe", "muse_glimmer", "muse_spark",
    "olmo_hybrid",
})  # fmt: skip
READ_NESTED = frozenset({"gemma4", "laguna", "mellum", "minimax_m3_vl"})  # by layer type
SCALED_LAYERS = {"gemma3": "full_attention", "olmo3": "full_attention"}  # others are plain
LOCAL_BASES = {"gemma3": "rope_local_base_freq", "gemma3n": "rope_local_base_freq"}
UNSCALED = frozenset({  # plain whatever rope_scaling says
    "cohere", "cohere2", "dbrx", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "gemma3n", "glm",
    "glm4", "glm4_moe", "gpt_neox", "gptj", "granitemoehybrid", "helium", "lfm2", "lfm2_moe",
    "minimax_m2", "mixtral", "nanochat", "olmo_hybrid", "phi", "qwen3_moe", "recurrent_gemma",
    "solar_open", "stablelm", "starcoder2",
})  # fmt: skip
NEEDS_BASE = frozenset({  # rope_theta at the top level, or a TypeError
    "apertus", "bailing_hybrid", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma3n", "glm4",
    "glm4_moe", "granite", "granitemoe", "helium", "llama4", "longcat_flash", "mimo_v2_flash",
    "minimax_m2", "olmo3", "qwen3_moe", "qwen3_next", "recurrent_gemma", "solar_open", "stablelm",
})  # fmt: skip
BASES = {  # where the file is silent; 10 000 in the others
    "cohere": 8e6, "cohere2": 5e4, "exaone_moe": 1e6, "falcon_h1": 1e11, "gemma3": 1e6,
    "glm4_moe_lite": 1e6, "gpt_oss": 1.5e5, "lfm2": 1e6, "lfm2_moe": 1e6, "minicpm3": 1e6,
    "mixtral": 1e6, "muse_glimmer": 5e5, "qwen2": 1e6, "qwen2_moe": 1e6, "qwen2_vl": 1e6,
    "qwen2_5_vl": 1e6, "starcoder2": 1e5,
}  # fmt: skip
TRAINED = "original_max_position_embeddings"


def opens(case: Case) -> Case:
    """What the model file takes of config.json, which it reads as it is."""
    config, data = case.config, case.config.data
    if config.file_type and config.file_type not in MODEL_TYPES:
        raise NotComparedError(f"mlx-lm has no file for model type {config.file_type}")
    model_type, layer_type = config.model_type.removesuffix("_text"), config.layer_type
    if model_type == "olmo":
        raise RefusedError(
            "TypeError: missing d_model, n_layers, n_heads: it reads OLMo's own file"
        )
    rope, base = _rope_and_base(case, model_type)
    if base is None or None in rope.values():
        raise NotComparedError("a null that only mlx-lm reads was never run")
    advice = ""
    if base != case.base and model_type in BASES:
        advice = f"Write rope_theta: without it mlx-lm takes {base:g}"
    if model_type == "glm":
        advice = "mlx-lm rotates the whole head of glm"
    if layer_type is not None and layer_type != SCALED_LAYERS.get(model_type, layer_type):
        rope = {}
    if model_type in UNSCALED:
        advice = f"mlx-lm does not scale {model_type} at all" if rope else advice
        rope = {}
    new = data.get("rope_parameters")
    if new and model_type not in READ_TYPES | READ_NESTED:
        keys = "rope_theta and rope_scaling"
        advice = f"Write {keys} at the top level: mlx-lm reads no rope_parameters"
    return case._replace(
        rope=rope,
        advice=advice,
        rope_type=rope.get("type") or rope.get("rope_type") or "default",
        base=float(base),
        dim=config.head_dim if model_type == "glm" else case.dim,  # never a share of the head
    )


def _rope_and_base(case: Case, model_type: str) -> tuple[Mapping[str, JSON], float]:
    """The rope parameters and the base, from the keys that the model file reads."""
    data, layer_type = case.config.data, case.config.layer_type
    new = data.get("rope_parameters") or {}
    if model_type in READ_NESTED:
        return case.rope, case.rope.get("rope_theta", case.base)
    takes_type = model_type in READ_TYPES
    rope = data.get("rope_scaling") or (new if takes_type else {})
    if layer_type == "sliding_attention" and model_type in LOCAL_BASES:
        return rope, data.get(LOCAL_BASES[model_type], 10_000.0)
    name = case.config.model.get("names", {}).get("rope_theta", "rope_theta")
    read = new.get("rope_theta") if takes_type or model_type in READ_BASES else None
    base = data.get(name, read)
    if base is None and model_type in NEEDS_BASE:
        raise RefusedError("TypeError: missing 1 required argument: 'rope_theta'")
    return rope, BASES.get(model_type, 10_000.0) if base is None else base


def mrope(case: Case) -> Result:
    """rope_type mrope of older files, on one axis."""
    rules.need(case, "mrope_section")
    return rules.plain_on_one_axis(case)


def llama3(case: Case) -> Result:
    """The band of Llama 3.1; a wavelength on its edge is kept."""
    trained = case.rope.get(TRAINED, 8192)
    result = rules.llama3(case, trained, low_freq_factor=1.0, high_freq_factor=4.0)
    kept = rules.plain(case).inv_freq
    edge = trained / case.rope.get("low_freq_factor", 1.0)
    inv_freq = np.where(2 * math.pi / kept == edge, kept, result.inv_freq)  # strict < there
    return result._replace(inv_freq=inv_freq)


def longrope(case: Case) -> Result:
    """LongRoPE, always with the long list."""
    data = case.config.data
    is_phi3 = case.config.model_type in PHI3
    case = case._replace(trained=data.get(TRAINED, 4096) if is_phi3 else rules.need(case, TRAINED))
    advice = case.advice or "mlx-lm uses the long list for every row, and its own attention factor"
    rule = rules.longrope(lambda _: math.inf, "never: the long list always", reads_mscale=False)
    result = rule(case)._replace(advice=advice)
    if case.config.model_type == "phimoe":
        result = result._replace(attention_factor=float(rules.need(case, "long_mscale")))
    return result


def dynamic(case: Case) -> Result:
    """Dynamic NTK at each call's length; Hunyuan's file has a fixed base, grown by alpha."""
    if case.config.model_type == "hunyuan_v1_dense":
        return rules.grown(case, rules.need(case, "alpha"))
    return rules.dynamic("with offset + length, at every call; cached keys keep theirs")(case)


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
        "default": (rules.plain_on_one_axis, f"{_FILE}, initialize_rope"),
        "mrope": (mrope, f"{_FILE}, initialize_rope: nn.RoPE, one axis"),
        "linear": (rules.linear, f"{_FILE}, initialize_rope"),
        "dynamic": (dynamic, f"{_FILE}, DynamicNTKScalingRoPE"),
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
