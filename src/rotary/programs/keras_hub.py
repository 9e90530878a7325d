"""What keras-hub 0.32.0 computes from a config, by its converters from transformers.

Its layers support more rope types than its converters pass on: a type that a converter does not
read is dropped.
"""

from ..schedules import yarn_amplitude
from ..strict_json import JSON
from . import rules
from .case import Case, NotComparedError, Program, RefusedError, Result

CONVERTERS = frozenset({  # model types of text models with RoPE
    "esm", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text",
    "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_moe", "smollm3", "t5gemma", "t5gemma2",
})  # fmt: skip
FIXED_BASE = frozenset({"esm", "gemma", "gemma2"})  # 10 000, whatever the file says
GEMMA3_BASES = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}


def opens(case: Case) -> Case:
    """Return what the converter of the model type passes to the layers."""
    config = case.config
    if config.file_type and config.file_type not in CONVERTERS:
        raise NotComparedError(f"keras-hub has no converter for model type {config.file_type}")
    model_type = config.model_type.removesuffix("_text") or "llama"
    if model_type == "gemma3":
        return _gemma3(case)
    if model_type == "gemma4":
        kept = case.rope_type if case.rope_type == "proportional" else "default"
        return case._replace(rope_type=kept, advice=_dropped(case, kept))
    base = 10_000.0 if model_type in FIXED_BASE else _base(case)
    if model_type == "gpt_oss":
        return case._replace(rope_type="yarn" if case.rope else "default", base=base)
    if model_type == "llama":
        return case._replace(rope_type=_llama_type(case), base=base)
    return case._replace(rope={}, rope_type="default", base=base, advice=_dropped(case, "default"))


def _base(case: Case) -> float:
    data = case.config.data
    base: JSON = (data.get("rope_parameters") or {}).get("rope_theta", data.get("rope_theta"))
    if base is None:
        raise RefusedError("KeyError: 'rope_theta'")
    return float(base)


def _llama_type(case: Case) -> str:
    scaling = case.config.data.get("rope_scaling")
    if scaling is None:
        return "default"
    if "rope_type" not in scaling:
        raise RefusedError("KeyError: 'rope_type'")
    if scaling["rope_type"] != "llama3":
        raise RefusedError("ValueError: The config should be a valid llama3 config.")
    return "llama3"


def _gemma3(case: Case) -> Case:
    """Return bases that no key changes, and the factor of rope_scaling, whatever its type."""
    if "head_dim" not in case.config.data:
        raise RefusedError("KeyError: 'head_dim'")
    layer_type = case.config.layer_type or "full_attention"
    if layer_type not in GEMMA3_BASES:
        raise NotComparedError(f"keras-hub has no layers of type {layer_type} in gemma3")
    factor = case.rope.get("factor", 1.0)
    return case._replace(rope={"factor": factor}, rope_type="linear", base=GEMMA3_BASES[layer_type])


def _dropped(case: Case, kept: str) -> str:
    if case.rope_type == kept:
        return ""
    return f"keras-hub's converter of {case.config.model_type} drops rope_type {case.rope_type}"


def yarn(case: Case) -> Result:
    """Compute YaRN for GPT-OSS: only the factor is read, other numbers are those of its config."""
    factor = case.rope.get("factor", 32.0)
    if factor is None:
        raise NotComparedError("a factor of null was never run")
    case = case._replace(rope={"factor": factor})
    return rules.yarn(case, yarn_amplitude(factor), trained=4096, truncate=False)


_FILE = "layers/modeling/rotary_embedding.py"
KERAS_HUB = Program(
    "keras-hub",
    "0.32.0",
    {
        "default": (rules.plain_on_one_axis, f"{_FILE}, _get_inverse_freq"),
        "linear": (rules.linear, f"{_FILE}, _get_inverse_freq"),
        "yarn": (yarn, f"{_FILE}, _get_yarn_inverse_freq"),
        "llama3": (rules.llama3, "models/llama/llama_rotary_embedding.py, _get_inverse_freq"),
        "proportional": (rules.proportional_unscaled, "models/gemma4/gemma4_attention.py"),
    },
    (rules.plain_on_one_axis, f"{_FILE}, _get_inverse_freq"),
    opens,
)
