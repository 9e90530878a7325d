"""What llama.cpp computes from the GGUF file that its converter writes of a config."""

from . import rules
from .case import Case, Program, Result


def opens(case: Case) -> Case:
    """What the converter writes: of sliding layers the base alone, of a scaling its factor."""
    if case.config.layer_type == "sliding_attention":  # rope.freq_base_swa
        return case._replace(rope={}, rope_type="default")
    if case.rope_type in ("linear", "yarn") and case.rope.get("factor") is None:
        return case._replace(rope_type=f"{case.rope_type} without a factor")
    return case


def longrope(case: Case) -> Result:
    """LongRoPE, whose list is chosen when the context is made."""
    is_long = case.limit > rules.known(case.trained)
    switch = "long list for every row if the allocated n_ctx > L, at start"
    advice = rules.longrope_advice(case, is_long)
    return rules.longrope(case, is_long, rules.stretched(case), switch, advice)


def yarn(case: Case) -> Result:
    """YaRN with the amplitude of the paper."""
    # written to every GGUF file, but read back by two architectures only
    reads_betas = case.config.model_type in ("mistral3", "ministral3")
    betas = () if reads_betas else ("beta_fast", "beta_slow")
    keys = ("attention_factor", "mscale", "truncate", *betas)
    ignored = [name for name in keys if case.rope.get(name) is not None]
    advice = f"llama.cpp ignores {', '.join(ignored)}" if ignored else ""
    amplitude = rules.gain(rules.need(case, "factor"))
    return rules.yarn(case, amplitude, advice, reads_betas=reads_betas)


def llama3(case: Case) -> Result:
    """The band of Llama 3.1, with its values where the file is silent."""
    trained = case.trained or 8192
    return rules.llama3(case, trained, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


_BASE = "conversion/base.py, set_gguf_parameters"
LLAMA_CPP = Program(
    "llama.cpp",
    "as in llama-cpp-python 0.3.36",
    {
        "default": (rules.plain, f"{_BASE}; ggml-cpu/ops.cpp"),
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
    (rules.unscaled("llama.cpp"), _BASE),
    opens,
    ("read from the GGUF file that convert_hf_to_gguf.py writes",),
)  # fmt: skip
