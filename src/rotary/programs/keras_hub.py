"""What the layers of keras-hub 0.32.0 compute, given the values of a config."""

import math

from . import rules
from .case import Case, Program, Result


def dynamic(case: Case) -> Result:
    """Every frequency divided by the same number."""
    divisor = rules.need(case, "factor") ** (case.dim / max(1, case.dim - 2))
    advice = "keras-hub divides every frequency, the fastest too: that is not NTK scaling"
    inv_freq = rules.frequencies("default", case.dim, case.base) / divisor
    return Result(f"all frequencies divided by {divisor:.4g}", inv_freq, advice=advice)


def longrope(case: Case) -> Result:
    """LongRoPE, whose list follows the call."""
    is_long = case.seq_len > rules.known(case.trained)
    switch = "long list if start_index + length > L, at every call"
    return rules.longrope(case, is_long, rules.stretched(case), switch)


def yarn(case: Case) -> Result:
    """YaRN with the amplitude of the paper, below factor 1 too."""
    factor = rules.need(case, "factor")
    trained = case.rope.get("original_max_position_embeddings", 4096)
    ignored = [name for name in ("attention_factor", "mscale") if case.rope.get(name) is not None]
    advice = f"keras-hub ignores {', '.join(ignored)}" if ignored else ""
    truncate = case.rope.get("truncate", True)
    amplitude = 0.1 * math.log(factor) + 1.0
    return rules.yarn(case, amplitude, advice, trained=trained, truncate=truncate)


_FILE = "layers/modeling/rotary_embedding.py"
KERAS_HUB = Program(
    "keras-hub",
    "0.32.0",
    {
        "default": (rules.plain, f"{_FILE}, _get_inverse_freq"),
        "linear": (rules.linear, f"{_FILE}, _get_inverse_freq"),
        "dynamic": (dynamic, f"{_FILE}, _get_inverse_freq"),
        "yarn": (yarn, f"{_FILE}, _get_yarn_inverse_freq"),
        "longrope": (longrope, "models/phi3/phi3_rotary_embedding.py"),
        "su": (longrope, "models/phi3/phi3_rotary_embedding.py"),
        "llama3": (rules.llama3, "models/llama/llama_rotary_embedding.py, _get_inverse_freq"),
        "proportional": (rules.proportional_unscaled, "models/gemma4/gemma4_attention.py"),
    },
    (rules.unscaled("keras-hub"), f"{_FILE}, _get_inverse_freq"),
    lambda case: case,
    (
        "the layer, given these values; utils/transformers/convert_llama3.py takes llama3 "
        "from rope_scaling only, and most other converters take the base alone",
    ),
)
