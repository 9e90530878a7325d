"""What llama.cpp computes from the GGUF file into which its converter translates a config."""

from ..configs.gguf import axes_of
from ..schedules import yarn_amplitude
from . import rules
from .case import Case, NotComparedError, Program, Result

# model types without a class in its converter; conversion/*.py
NOT_CONVERTED = {
    "codegen", "csm", "diffllama", "doge", "esm", "eurobert", "flex_olmo", "gpt_neox_japanese",
    "gptj", "helium", "jetmoe", "longcat_flash", "mllama_text_model", "modernbert-decoder", "moshi",
    "nanochat", "olmo_hybrid", "persimmon", "phi3_v", "roformer", "vaultgemma", "zamba2", "zaya",
}  # fmt: skip
# model types whose sections alternate; src/llama-model.cpp, llama_model_rope_type
INTERLEAVED_SECTIONS = {
    "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text",
}  # fmt: skip
# model types whose mscale_all_dim it reads; src/models/deepseek2.cpp, deepseek32.cpp, mistral3.cpp
READS_MSCALE = {
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "ministral3", "mistral4",
}  # fmt: skip


def opens(case: Case) -> Case:
    """Return what the converter writes to the GGUF file.

    Of sliding layers that is only the base; of linear and yarn, nothing if the factor is missing.
    """
    if case.config.model_type in NOT_CONVERTED:
        raise NotComparedError(f"its converter has no file for {case.config.model_type}")
    if case.config.layer_type == "sliding_attention":  # rope.freq_base_swa
        return case._replace(rope={}, rope_type="default")
    if case.rope_type in ("linear", "yarn") and case.rope.get("factor") is None:
        return case._replace(rope_type=f"{case.rope_type} without a factor")
    return case


def plain(case: Case) -> Result:
    """Compute the frequencies of the base; with alternating sections, some pairs may stand still.

    A pair beyond the section of its axis uses a fourth position, which is 0 for text.
    """
    result = rules.plain(case)
    sections = case.rope.get("mrope_section")
    if not sections or case.config.model_type not in INTERLEAVED_SECTIONS:
        return result
    axes = axes_of(sections, len(result.inv_freq), {"sections": "interleaved"})
    still = [pair for pair, axis in enumerate(axes) if axis == 3]
    if not still:
        return result
    inv_freq = result.inv_freq.copy()
    inv_freq[still] = 0.0
    listed = ", ".join(map(str, still))
    advice = f"llama.cpp gives pairs {listed} to a fourth position, 0 for text: they stand still"
    return result._replace(inv_freq=inv_freq, advice=advice)


def unscaled(case: Case) -> Result:
    """Do not scale a type that is not known."""
    advice = f"llama.cpp does not scale rope_type {case.rope_type} at all"
    return rules.plain(case)._replace(notes=("the type is dropped",), advice=advice)


def dynamic(case: Case) -> Result:
    """Do not scale, except by Hunyuan's alpha, which the converter turns into a base."""
    alpha = case.rope.get("alpha")
    if alpha and case.config.model_type.startswith("hunyuan"):
        return rules.grown(case, alpha)
    return unscaled(case)


def yarn(case: Case) -> Result:
    """Compute YaRN with the attention factor of the paper, or that of mscale_all_dim if read."""
    model, mscale = case.config.model_type, case.rope.get("mscale_all_dim")
    # written to every GGUF file, but read back by few architectures
    reads_betas = model == "ministral3"
    keys = ["attention_factor", "truncate"]
    keys += [] if reads_betas else ["beta_fast", "beta_slow"]
    factor = rules.need(case, "factor")
    attention_factor = yarn_amplitude(factor)
    if model == "deepseek_v4":
        attention_factor = 1.0
    elif model in READS_MSCALE and mscale:
        # llama.cpp takes mscale as 1, but for deepseek2 as equal to mscale_all_dim
        over = mscale if model in ("deepseek_v2", "deepseek_v3", "kimi_k2") else 1.0
        attention_factor = yarn_amplitude(factor, over, mscale)
    else:
        keys.append("mscale")
    ignored = [name for name in keys if case.rope.get(name) is not None]
    advice = f"llama.cpp ignores {', '.join(ignored)}" if ignored else ""
    return rules.yarn(case, attention_factor, advice, reads_betas=reads_betas)


def llama3(case: Case) -> Result:
    """Compute the schedule of Llama 3.1, with the values of Llama 3.1 for missing keys."""
    trained = case.trained or 8192
    return rules.llama3(case, trained, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


longrope = rules.longrope(
    lambda case: case.limit,
    "long list for every sequence if the allocated n_ctx > {}, at start",
    reads_mscale=False,
)
_BASE = "conversion/base.py, set_gguf_parameters"
LLAMA_CPP = Program(
    "llama.cpp",
    "as in llama-cpp-python 0.3.36",
    {
        "default": (plain, f"{_BASE}; ggml-cpu/ops.cpp"),
        "dynamic": (dynamic, "conversion/hunyuan.py, set_gguf_parameters"),
        "linear": (rules.linear, f"{_BASE}: rope.scaling.factor"),
        "yarn": (yarn, "conversion/base.py; src/llama-context.cpp; ggml-cpu/ops.cpp"),
        "longrope": (
            longrope,
            "conversion/phi.py, generate_extra_tensors; src/llama-model.cpp, get_rope_factors",
        ),
        "su": (longrope, "conversion/phi.py, generate_extra_tensors"),
        "llama3": (llama3, "conversion/llama.py, generate_extra_tensors"),
        "proportional": (
            rules.proportional_unscaled, "conversion/gemma.py, generate_extra_tensors",
        ),
    },
    (unscaled, _BASE),
    opens,
    ("read from the GGUF file that convert_hf_to_gguf.py writes",),
)  # fmt: skip
