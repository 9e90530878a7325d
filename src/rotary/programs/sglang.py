"""What SGLang 0.5.23 computes from a config."""

from . import rules, transformers
from .case import Case, Program, RefusedError, Result


def dynamic(case: Case) -> Result:
    """A fixed base, by alpha or as if every row were factor times the context."""
    if "alpha" in case.rope:
        return rules.grown(case, case.rope["alpha"])
    factor = case.rope["factor"]
    advice = "SGLang scales every row as if it had factor * max_position_embeddings tokens"
    return rules.grown(case, factor * factor - (factor - 1), advice)


def yarn(case: Case) -> Result:
    """YaRN, whose amplitude is scaled by attn_factor."""
    factor, rope = rules.need(case, "factor"), case.rope
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if "mrope_section" in rope and rope.keys() & {"mscale", "mscale_all_dim"}:
        raise RefusedError("TypeError: unexpected keyword argument 'mscale', with mrope_section")
    amplitude = rules.gain(factor)
    if mscale is not None and all_dim is not None:  # 0 counts as given, in transformers it does not
        amplitude = rules.gain(factor, mscale) / rules.gain(factor, all_dim)
    advice = "SGLang ignores attention_factor: give attn_factor too, its ratio to 0.1 ln(factor)+1"
    return rules.yarn(
        case, amplitude * rope.get("attn_factor", 1.0),
        advice if rope.get("attention_factor") is not None else "",
        truncate=rope.get("truncate", True), kept=rope.get("extrapolation_factor", 1.0),
    )  # fmt: skip


def yarn_deepseek(case: Case) -> Result:
    """DeepSeek's YaRN, whose amplitude is scaled by attn_factor."""
    result = rules.yarn_deepseek(case)
    amplitude = result.attention_factor * case.rope.get("attn_factor", 1.0)
    return result._replace(attention_factor=amplitude)


def longrope(case: Case) -> Result:
    """LongRoPE, whose list follows the running batch."""
    is_long = case.seq_len - 1 > rules.known(case.trained)  # a position > L: one token later
    amplitude = rules.longrope_mscale(case, is_long)
    switch = "long list if any position of the running batch exceeds L"
    return rules.longrope(case, is_long, amplitude, switch, rules.longrope_advice(case, is_long))


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
    transformers.opens,
)  # fmt: skip
