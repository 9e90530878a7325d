"""Six programs that read a config.json: which of `rules` each has for each rope_type.

Beside every rule stands the file and function it was read in.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from . import rules as peers

# model types whose `default` type rotates a slice; all others ignore partial_rotary_factor there
SLICED = frozenset({
    "bamba", "deepseek_v4", "diffusion_gemma", "dots3_note", "efficientloftr", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "glm_image", "glm_ocr", "glmasr",
    "gpt_neox", "gpt_neox_japanese", "laguna", "mellum", "mimo_v2_flash", "minimax_m2",
    "minimax_m3_vl", "moonshine", "moonshine_streaming", "musicflamingo", "nemotron",
    "nemotron3_5_transcribe", "nemotron3_diarization", "neomme", "persimmon", "phi", "phi3",
    "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "recurrent_gemma",
    "solar_open", "stablelm", "step3p7", "zaya",
})  # fmt: skip
# what the config class of transformers demands; vLLM and SGLang load it too
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# model files of mlx-lm that take the type, or the base alone, from `rope_parameters`
MLX_TYPES = frozenset(
    {"glm_moe_dsa", "minimax_m3_vl", "ministral3", "mistral4", "qwen3", "qwen3_5"}
)
MLX_BASES = frozenset({
    "exaone_moe", "granitemoehybrid", "lfm2", "lfm2_moe", "muse_glimmer", "muse_spark",
    "olmo_hybrid",
})  # fmt: skip


class Program(NamedTuple):
    """A program: which rule it has for each type, and the file and function that rule is in.

    slices    how many channels it rotates
    unknown   its rule for every other type
    opens     what it makes of the file before any rule
    """

    name: str
    version: str
    slices: Callable[[peers.Case], int]
    rules: Mapping[str, tuple[peers.Rule, str]]
    unknown: tuple[peers.Rule, str]
    opens: Callable[[peers.Case], peers.Case]
    notes: tuple[str, ...] = ()


def _dim(case: peers.Case, honours: bool) -> int:
    return int(case.head_dim * case.share) if honours else case.head_dim


def _slices(case: peers.Case) -> bool:
    return case.model_type.removesuffix("_text") in SLICED


def _by_family(case: peers.Case) -> int:
    return _dim(case, _slices(case))


def _slice_vllm(case: peers.Case) -> int:
    return int(case.rope.get("rope_dim") or _dim(case, True))


def _slice_transformers(case: peers.Case) -> int:
    return _by_family(case) if case.rope_type == "default" else _dim(case, True)


def _as_class(case: peers.Case) -> peers.Case:
    """The case, if the config class of transformers takes it: it loads the file for all three."""
    required = REQUIRED.get(case.rope_type, ())
    if "su" in (case.rope.get("rope_type"), case.rope.get("type")):  # renamed after it is filled in
        required = (*required, "original_max_position_embeddings")
    missing = [key for key in required if key not in case.rope]
    if missing:
        raise peers.RefusedError(f"KeyError: missing required keys: {', '.join(missing)}")
    if case.model_type in peers.PHI3 and case.rope_type not in ("default", "longrope"):
        raise peers.RefusedError(f"ValueError: type must be longrope, got {case.rope_type}")
    return case


def _as_vllm(case: peers.Case) -> peers.Case:
    new, old = case.rope.get("rope_type"), case.rope.get("type")
    renamed = (new, old) in (("longrope", "su"), ("default", "mrope"))
    if new is not None and old is not None and new != old and not renamed:
        raise peers.RefusedError(f"ValueError: conflict between rope_type={new} and type={old}")
    is_cut = case.share != 1 and case.rope_type == "default" and not _slices(case)
    advice = "Remove partial_rotary_factor: vLLM obeys it, transformers ignores it here"
    return _as_class(case)._replace(advice=advice if is_cut else "")


def _as_llama_cpp(case: peers.Case) -> peers.Case:
    if case.layer_type == "sliding_attention":  # rope.freq_base_swa is all that is written of it
        return case._replace(rope={}, rope_type="default")
    if case.rope_type in ("linear", "yarn") and case.rope.get("factor") is None:
        return case._replace(rope_type=f"{case.rope_type} without a factor")
    return case


def _as_mlx(case: peers.Case) -> peers.Case:
    """What the model file takes of config.json, which it reads as it is."""
    old, new = case.data.get("rope_scaling"), case.data.get("rope_parameters")
    takes_type = case.layer_type is not None or case.model_type in MLX_TYPES
    takes_base = takes_type or case.model_type in MLX_BASES
    rope = old or (new if takes_type else None) or {}
    rope = case.rope if case.layer_type is not None else rope
    base = case.data.get("rope_theta", (new or {}).get("rope_theta") if takes_base else None)
    base = case.rope.get("rope_theta") if case.layer_type is not None else base
    advice = "Write rope_theta and rope_scaling at the top level: mlx-lm reads no rope_parameters"
    return case._replace(
        rope=rope,
        advice=advice if new and not takes_type else "",
        rope_type=rope.get("type") or rope.get("rope_type") or "default",
        base=10_000.0 if base is None else float(base),
    )


_HF, _MLX = "modeling_rope_utils.py", "mlx_lm/models/rope_utils.py"
_VLLM = _SGL = "layers/rotary_embedding/"
_KERAS = "layers/modeling/rotary_embedding.py"
PROGRAMS = (
    Program(
        "transformers",
        "5.23",
        _slice_transformers,
        {
            "default": (peers.plain, "modeling_llama.py, compute_default_rope_parameters"),
            "linear": (peers.linear, f"{_HF}, _compute_linear_scaling_rope_parameters"),
            "dynamic": (
                peers.dynamic("with the longest row of the batch, at every forward"),
                f"{_HF}, dynamic_frequency_update and _compute_dynamic_ntk_parameters",
            ),
            "yarn": (peers.yarn_transformers, f"{_HF}, _compute_yarn_parameters"),
            "longrope": (
                peers.longrope_transformers,
                f"{_HF}, longrope_frequency_update and _compute_longrope_parameters",
            ),
            "llama3": (peers.llama3, f"{_HF}, _compute_llama3_parameters"),
            "proportional": (peers.proportional, f"{_HF}, _compute_proportional_rope_parameters"),
        },
        (peers.refuse("KeyError: {!r}"), f"{_HF}, ROPE_INIT_FUNCTIONS"),
        opens=_as_class,
    ),
    Program(
        "vLLM",
        "0.33",
        _slice_vllm,
        {
            "default": (peers.plain, f"{_VLLM}base.py, _compute_inv_freq"),
            "mrope": (peers.legacy_mrope, "transformers_utils/config.py, patch_legacy_rope_type"),
            "linear": (
                peers.linear_float,
                f"{_VLLM}linear_scaling_rope.py, _compute_cos_sin_cache",
            ),
            "ntk": (peers.ntk_vllm, f"{_VLLM}ntk_scaling_rope.py, _compute_inv_freq"),
            "dynamic": (
                peers.dynamic_vllm,
                f"{_VLLM}__init__.py, get_rope: max_trained_positions; dynamic_ntk_scaling_rope.py",
            ),
            "yarn": (peers.yarn_vllm, f"{_VLLM}yarn_scaling_rope.py; mrope.py, MRotaryEmbedding"),
            "deepseek_yarn": (peers.yarn_deepseek, f"{_VLLM}deepseek_scaling_rope.py"),
            "telechat3-yarn": (
                peers.yarn_telechat,
                "transformers_utils/config.py, patch_legacy_rope_type",
            ),
            "longrope": (peers.longrope_vllm, f"{_VLLM}phi3_long_rope_scaled_rope.py, __init__"),
            "su": (peers.longrope_vllm, "transformers_utils/config.py, patch_legacy_rope_type"),
            "llama3": (peers.llama3, f"{_VLLM}llama3_rope.py, _compute_inv_freq"),
            "proportional": (
                peers.proportional_unscaled,
                f"{_VLLM}gemma4_rope.py, _compute_inv_freq",
            ),
        },
        (peers.refuse("ValueError: Unknown RoPE scaling type {}"), f"{_VLLM}__init__.py, get_rope"),
        opens=_as_vllm,
        notes=("positions past the cos/sin table of max_position_embeddings rows are not checked",),
    ),
    Program(
        "SGLang",
        "0.5.23",
        _by_family,
        {
            "default": (peers.plain, f"{_SGL}factory.py, get_rope"),
            "linear": (peers.linear_float, f"{_SGL}base.py, LinearScalingRotaryEmbedding"),
            "dynamic": (
                peers.dynamic_sglang,
                f"{_SGL}rope_variant.py, DynamicNTKScalingRotaryEmbedding",
            ),
            "yarn": (peers.yarn_sglang, f"{_SGL}yarn.py; mrope.py, YaRNScalingMRotaryEmbedding"),
            "deepseek_yarn": (
                peers.yarn_deepseek_sglang,
                f"{_SGL}rope_variant.py, DeepseekScalingRotaryEmbedding",
            ),
            "longrope": (
                peers.longrope_sglang,
                f"{_SGL}rope_variant.py, Phi3LongRoPEScaledRotaryEmbedding.forward",
            ),
            "llama3": (peers.llama3, f"{_SGL}rope_variant.py, Llama3RotaryEmbedding"),
            "proportional": (
                peers.proportional_unscaled,
                f"{_SGL}rope_variant.py, Gemma4RotaryEmbedding",
            ),
        },
        (peers.refuse("ValueError: Unknown RoPE scaling type {}"), f"{_SGL}factory.py, get_rope"),
        opens=_as_class,
    ),
    Program(
        "llama.cpp",
        "as in llama-cpp-python 0.3.36",
        _by_family,
        {
            "default": (peers.plain, "conversion/base.py, set_gguf_parameters; ggml-cpu/ops.cpp"),
            "linear": (
                peers.linear,
                "conversion/base.py, set_gguf_parameters: rope.scaling.factor",
            ),
            "yarn": (
                peers.yarn_llama_cpp,
                "conversion/base.py; src/llama-context.cpp; ggml-cpu/ops.cpp",
            ),
            "longrope": (
                peers.longrope_llama_cpp,
                "conversion/phi.py, generate_extra_tensors; src/llama-model.cpp, get_rope_factors",
            ),
            "su": (peers.longrope_llama_cpp, "conversion/phi.py, generate_extra_tensors"),
            "llama3": (peers.llama3_llama_cpp, "conversion/llama.py, generate_extra_tensors"),
            "proportional": (
                peers.proportional_unscaled,
                "conversion/gemma.py, generate_extra_tensors",
            ),
        },
        (peers.unscaled("llama.cpp"), "conversion/base.py, set_gguf_parameters"),
        opens=_as_llama_cpp,
        notes=("read from the GGUF file that convert_hf_to_gguf.py writes",),
    ),
    Program(
        "mlx-lm",
        "0.32.2",
        _by_family,
        {
            "default": (peers.plain, f"{_MLX}, initialize_rope"),
            "mrope": (peers.legacy_mrope, f"{_MLX}, initialize_rope: nn.RoPE, one axis"),
            "linear": (peers.linear, f"{_MLX}, initialize_rope"),
            "dynamic": (
                peers.dynamic("with offset + length, at every call; cached keys keep theirs"),
                f"{_MLX}, DynamicNTKScalingRoPE",
            ),
            "yarn": (peers.yarn_mlx, f"{_MLX}, YarnRoPE"),
            "deepseek_yarn": (peers.yarn_mlx, f"{_MLX}, YarnRoPE"),
            "telechat3-yarn": (peers.yarn_mlx, f"{_MLX}, YarnRoPE"),
            "longrope": (peers.longrope_mlx, f"{_MLX}, SuScaledRoPE"),
            "llama3": (peers.llama3_mlx, f"{_MLX}, Llama3RoPE"),
            "proportional": (peers.proportional, f"{_MLX}, ProportionalRoPE"),
        },
        (peers.refuse("ValueError: Unsupported RoPE type {}"), f"{_MLX}, initialize_rope"),
        opens=_as_mlx,
    ),
    Program(
        "keras-hub",
        "0.32.0",
        _by_family,
        {
            "default": (peers.plain, f"{_KERAS}, _get_inverse_freq"),
            "linear": (peers.linear, f"{_KERAS}, _get_inverse_freq"),
            "dynamic": (peers.dynamic_keras, f"{_KERAS}, _get_inverse_freq"),
            "yarn": (peers.yarn_keras, f"{_KERAS}, _get_yarn_inverse_freq"),
            "longrope": (peers.longrope_keras, "models/phi3/phi3_rotary_embedding.py"),
            "su": (peers.longrope_keras, "models/phi3/phi3_rotary_embedding.py"),
            "llama3": (peers.llama3, "models/llama/llama_rotary_embedding.py, _get_inverse_freq"),
            "proportional": (peers.proportional_unscaled, "models/gemma4/gemma4_attention.py"),
        },
        (peers.unscaled("keras-hub"), f"{_KERAS}, _get_inverse_freq"),
        opens=lambda case: case,
        notes=(
            "the layer, given these values; utils/transformers/convert_llama3.py takes llama3 "
            "from rope_scaling only, and most other converters take the base alone",
        ),
    ),
)
