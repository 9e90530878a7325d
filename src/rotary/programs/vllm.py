"""What vLLM 0.33 computes from a config."""

from ..schedules import yarn_amplitude
from . import rules, transformers
from .case import Case, NotComparedError, Program, RefusedError, Result

# vLLM has no model file for these, and cannot run transformers' class instead
NO_FILE = frozenset({"codegen", "csm", "esm", "mistral4", "mllama_text_model", "roformer"})
# their model files pass mrope_positions_factor=1, except if videos are pruned
RAMP_AS_TRAINED = frozenset({
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_vl_moe_text", "qwen3_vl_text", "qwen4_exp_text",
})  # fmt: skip


def opens(case: Case) -> Case:
    """Return the config as transformers' class loads it.

    vLLM obeys partial_rotary_factor for every model.
    """
    if case.config.model_type in NO_FILE:
        raise NotComparedError(f"vLLM does not run model type {case.config.model_type}")
    new, old = case.rope.get("rope_type"), case.rope.get("type")
    renamed = (new, old) in (("longrope", "su"), ("default", "mrope"))
    if new is not None and old is not None and new != old and not renamed:
        raise RefusedError(f"ValueError: conflict between rope_type={new} and type={old}")
    case, config = transformers.opens(case), case.config
    if config.reads_partial_rotary_factor or config.partial_rotary_factor == 1:
        return case
    advice = "Remove partial_rotary_factor: vLLM obeys it, transformers ignores it here"
    is_ignored_there = case.rope_type == "default"
    return case._replace(
        dim=int(config.head_dim * config.partial_rotary_factor),
        advice=advice if is_ignored_there else "",
    )


def dynamic(case: Case) -> Result:
    """Compute a fixed base, by alpha or by the ratio of the context to max_trained_positions."""
    if "alpha" in case.rope:
        return rules.grown(case, case.rope["alpha"])
    factor, context = case.rope["factor"], rules.required_length(case.config.context)
    trained = case.rope.get("max_trained_positions", context)
    advice = (
        "vLLM does not scale this config at all: give max_trained_positions, the trained length"
    )
    growth = factor * context / trained - (factor - 1)
    return rules.grown(case, growth, advice if trained == context else "")


def yarn(case: Case) -> Result:
    """Compute YaRN; with mrope_section, the ramp assumes 4 times the trained length."""
    factor, trained = rules.need(case, "factor"), rules.required_length(case.trained)
    attention_factor = rules.attention_factor_of(case, factor)
    truncate = case.rope.get("truncate", True)
    if "mrope_section" not in case.rope or case.config.model_type in RAMP_AS_TRAINED:
        return rules.yarn(case, attention_factor, truncate=truncate)
    advice = "vLLM takes the YaRN ramp of mrope_section from 4 times the trained length"
    return rules.yarn(case, attention_factor, advice, trained=4 * trained, truncate=truncate)


def yarn_telechat(case: Case) -> Result:
    """Compute YaRN with the attention factor of TeleChat3."""
    attention_factor = yarn_amplitude(rules.need(case, "factor"), 0.7)
    return rules.yarn(case, attention_factor, truncate=case.rope.get("truncate", True))


def ntk(case: Case) -> Result:
    """Compute NTK with a fixed factor, or NTK-mixed."""
    factor, b = rules.need(case, "factor"), case.rope.get("mixed_b")
    if b is not None:
        result = rules.computed(case, "ntk_mixed", factor=factor, b=b)
        return result._replace(schedule=f"NTK-mixed, b {b:g}")
    inv_freq = rules.plain(case._replace(base=case.base * factor)).inv_freq
    words = f"NTK, factor {factor:g}, the first pair scaled too"
    return Result(words, inv_freq / factor ** (2 / case.dim))


longrope = rules.longrope(
    lambda case: case.limit,
    "long list for every sequence if max_model_len > {} at start "
    "(default: the trained length, if the config has it at the top level)",
    reads_mscale=True,
)
_DIR = "layers/rotary_embedding/"
_PATCH = "transformers_utils/config.py, patch_legacy_rope_type"
VLLM = Program(
    "vLLM",
    "0.33",
    {
        "default": (rules.plain, f"{_DIR}base.py, _compute_inv_freq"),
        "mrope": (rules.legacy_mrope, _PATCH),
        "linear": (rules.linear_float, f"{_DIR}linear_scaling_rope.py, _compute_cos_sin_cache"),
        "ntk": (ntk, f"{_DIR}ntk_scaling_rope.py, _compute_inv_freq"),
        "dynamic": (
            dynamic, f"{_DIR}__init__.py, get_rope: max_trained_positions; "
            "dynamic_ntk_scaling_rope.py",
        ),
        "yarn": (yarn, f"{_DIR}yarn_scaling_rope.py; mrope.py, MRotaryEmbedding"),
        "deepseek_yarn": (rules.yarn_deepseek, f"{_DIR}deepseek_scaling_rope.py"),
        "telechat3-yarn": (yarn_telechat, _PATCH),
        "longrope": (longrope, f"{_DIR}phi3_long_rope_scaled_rope.py, __init__"),
        "su": (longrope, _PATCH),
        "llama3": (rules.llama3, f"{_DIR}llama3_rope.py, _compute_inv_freq"),
        "proportional": (rules.proportional_unscaled, f"{_DIR}gemma4_rope.py, _compute_inv_freq"),
    },
    (rules.refuse("ValueError: Unknown RoPE scaling type {}"), f"{_DIR}__init__.py, get_rope"),
    opens,
    ("positions past the cos/sin table of max_position_embeddings rows are not checked",),
)  # fmt: skip
