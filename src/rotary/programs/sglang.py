"""What SGLang 0.5.23 computes from a config."""

from ..schedules import yarn_amplitude
from . import rules, transformers
from .case import Case, NotComparedError, Program, RefusedError, Result

# SGLang has no model file for these, and cannot run transformers' class instead
NO_FILE = frozenset({
    "codegen", "csm", "esm", "falcon", "glm", "mistral4", "phi3_v", "qwen2_5_omni_text", "roformer",
})  # fmt: skip
THROUGH_TRANSFORMERS = frozenset({"internvl"})  # types of files that it runs by transformers' class
# laguna: SGLang's config class rewrites the key; deepseek_v4: its model file makes its own table
# with attention factor 1
OBEYS_ATTENTION_FACTOR = frozenset({"laguna", "deepseek_v4"})


def opens(case: Case) -> Case:
    """Return the config as transformers' class loads it."""
    if case.config.model_type in NO_FILE:
        raise NotComparedError(f"SGLang does not run model type {case.config.model_type}")
    return transformers.opens(case)


def dynamic(case: Case) -> Result:
    """Compute a fixed base, by alpha or as if every sequence were factor times the context."""
    if case.config.file_type in THROUGH_TRANSFORMERS:
        return transformers.computed(case)
    if "alpha" in case.rope:
        return rules.grown(case, case.rope["alpha"])
    factor = case.rope["factor"]
    advice = "SGLang scales every sequence as if it had factor * max_position_embeddings tokens"
    return rules.grown(case, factor * factor - (factor - 1), advice)


def yarn(case: Case) -> Result:
    """Compute YaRN, whose attention factor is scaled by attn_factor."""
    factor, rope = rules.need(case, "factor"), case.rope
    if case.config.model_type in OBEYS_ATTENTION_FACTOR:
        return rules.yarn(case, rules.attention_factor_of(case, factor))
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if "mrope_section" in rope and rope.keys() & {"mscale", "mscale_all_dim"}:
        raise RefusedError("TypeError: unexpected keyword argument 'mscale', with mrope_section")
    # SGLang counts 0 as given, transformers does not
    both = () if mscale is None or all_dim is None else (mscale, all_dim)
    attention_factor = yarn_amplitude(factor, *both)
    advice = "SGLang ignores attention_factor: give attn_factor too, its ratio to 0.1 ln(factor)+1"
    result = rules.yarn(
        case, attention_factor * rope.get("attn_factor", 1.0),
        advice if rope.get("attention_factor") is not None else "",
        truncate=rope.get("truncate", True),
    )  # fmt: skip
    kept = rope.get("extrapolation_factor", 1.0)
    if kept == 1:
        return result
    interpolated = rules.plain(case).inv_freq / factor
    inv_freq = interpolated + kept * (result.inv_freq - interpolated)
    return result._replace(inv_freq=inv_freq)


def yarn_deepseek(case: Case) -> Result:
    """Compute DeepSeek's YaRN, whose attention factor is scaled by attn_factor."""
    result = rules.yarn_deepseek(case)
    attention_factor = result.attention_factor * case.rope.get("attn_factor", 1.0)
    return result._replace(attention_factor=attention_factor)


longrope = rules.longrope(
    lambda case: case.seq_len - 1,  # SGLang compares the last position, not the length
    "long list if any position of the running batch exceeds {}",
    reads_mscale=True,
)
_DIR = "layers/rotary_embedding/"
SGLANG = Program(
    "SGLang",
    "0.5.23",
    {
        "default": (rules.plain, f"{_DIR}factory.py, get_rope"),
        "linear": (rules.linear_float, f"{_DIR}base.py, LinearScalingRotaryEmbedding"),
        "dynamic": (dynamic, f"{_DIR}rope_variant.py, DynamicNTKScalingRotaryEmbedding"),
        "yarn": (yarn, f"{_DIR}yarn.py; mrope.py, YaRNScalingMRotaryEmbedding"),
        "deepseek_yarn": (
            yarn_deepseek, f"{_DIR}rope_variant.py, DeepseekScalingRotaryEmbedding",
        ),
        "longrope": (longrope, f"{_DIR}rope_variant.py, Phi3LongRoPEScaledRotaryEmbedding.forward"),
        "llama3": (rules.llama3, f"{_DIR}rope_variant.py, Llama3RotaryEmbedding"),
        "proportional": (
            rules.proportional_unscaled, f"{_DIR}rope_variant.py, Gemma4RotaryEmbedding",
        ),
    },
    (rules.refuse("ValueError: Unknown RoPE scaling type {}"), f"{_DIR}factory.py, get_rope"),
    opens,
)  # fmt: skip
