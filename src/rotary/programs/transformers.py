"""What transformers 5.24 computes from a config: the reading of `from_hf_config`.

This file has only what differs from that reading: where the code of transformers deviates from the
model that it implements, and which keys it ignores that other programs read.
"""

import warnings

import numpy as np

from ..angles import inv_freq
from ..configs import Config
from ..configs.entries import MODELS
from ..configs.hf import needs_head_dim, rotary_of
from .case import Case, Program, RefusedError, Result
from .rules import in_words, refuse

# keys that transformers' config class requires; vLLM and SGLang load configs by this class too
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# their config classes read su and yarn as longrope
PHI3 = tuple(name for name, model in MODELS.items() if "yarn" in model.get("read_as", {}))
ONLY = (*PHI3, "cosmos3_edge_text")  # these refuse all types except those in the model's `only`
OWN_CODE = ("phi3_v",)  # transformers runs the code in the model's folder, which has type su
NO_HEAD_DIM = "TypeError: head_dim is null: write it into the config"
QWEN_VL = ("qwen2_vl_text", "qwen2_5_vl_text")  # their config classes read mrope as default


def opens(case: Case) -> Case:
    """Return the case as transformers' config class loads it, for vLLM and SGLang too.

    Raises RefusedError if the class raises.
    """
    config, rope_type = case.config, case.rope_type
    if config.model_type in OWN_CODE:
        return case._replace(rope_type="longrope" if rope_type == "su" else rope_type)
    rope_type = config.model.get("read_as", {}).get(rope_type, rope_type)
    if config.model_type in QWEN_VL and rope_type == "mrope":
        rope_type = "default"
    required = REQUIRED.get(rope_type, ())
    # su gets its new name after missing keys are filled in
    if "su" in (case.rope.get("rope_type"), case.rope.get("type")):
        required = (*required, "original_max_position_embeddings")
    missing = [key for key in required if key not in case.rope]
    if missing:
        raise RefusedError(f"KeyError: missing required keys: {', '.join(missing)}")
    if config.model_type in ONLY and rope_type not in config.model["only"]:
        raise RefusedError(_of_type(config, rope_type))
    if config.model_type == "phimoe" and rope_type != "default":
        for key in ("short_mscale", "long_mscale"):
            if not isinstance(case.rope.get(key), int | float):
                raise RefusedError(f"TypeError: {key} must be a number")
    if rope_type == "longrope" and needs_head_dim(config, rope_type):
        raise RefusedError(NO_HEAD_DIM)
    return case._replace(rope_type=rope_type)


def computed(case: Case) -> Result:
    """Compute the frequencies of the `Rotary` that `from_hf_config` makes of the config."""
    if case.config.model_type == "ernie4_5_vl_moe_text" and case.rope_type != "default":
        raise RefusedError(_of_type(case.config, case.rope_type))
    if needs_head_dim(case.config, case.rope_type):
        raise RefusedError(NO_HEAD_DIM)
    config = _as_its_code_reads(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as the one for a factor < 1
        spec = rotary_of(config, lambda complaint: None)
    assert spec is not None  # a config without rotation is refused before
    frequencies, factor = inv_freq(spec, case.seq_len)
    words, advice = in_words(spec.schedule, spec.base, spec.params, case.seq_len), ""
    trained: int = spec.params.get("original_max_position_embeddings", 0)
    switch = {
        "dynamic": "with the longest sequence of the batch, at every forward",
        "longrope": "long list if the longest sequence of the batch exceeds "
        f"{trained}, at every forward",
    }.get(spec.schedule, "never")
    if spec.schedule == "longrope":
        at = case.seq_len
        if config.model_type == "phimoe":
            if at > trained:
                advice = ("transformers keeps the short list of phimoe beyond the trained length, "
                          "with long_mscale")  # fmt: skip
            frequencies, words, at = inv_freq(spec)[0], "LongRoPE, short list", trained
            switch = f"never: the short list always, with long_mscale beyond {trained}"
        words += f" at {at} tokens"
    elif case.rope.get("truncate") is False and config.truncate:
        advice = "transformers ignores truncate inside a nested rope_parameters"
    return Result(words, np.asarray(frequencies), factor, switch, advice=advice)


def _of_type(config: Config, rope_type: str) -> str:
    types = " or ".join(name for name in config.model["only"] if name != "su")
    return f"ValueError: type must be {types}, got {rope_type}"


def _as_its_code_reads(case: Case) -> Config:
    """Return the config without the keys that the code of transformers ignores."""
    config = case.config
    ignored = {"type", "max_trained_positions", "attn_factor", "extrapolation_factor"}
    ignored |= set() if config.model.get("alpha") else {"alpha"}
    data, model = config.data, config.model
    if not config.reads_partial_rotary_factor and case.rope_type == "default":
        ignored.add("partial_rotary_factor")
        data = {key: data[key] for key in data if key != "partial_rotary_factor"}
    elif not config.reads_partial_rotary_factor:
        # the functions of the scaled types read it for every model
        model = {**model, "partial_rotary_factor": 1.0}
    rope = {key: value for key, value in config.rope.items() if key not in ignored}
    return config._replace(rope={**rope, "rope_type": case.rope_type}, data=data, model=model)


_HF = "modeling_rope_utils.py"
TRANSFORMERS = Program(
    "transformers",
    "5.24",
    {
        "default": (computed, "modeling_llama.py, compute_default_rope_parameters"),
        "linear": (computed, f"{_HF}, _compute_linear_scaling_rope_parameters"),
        "dynamic": (
            computed, f"{_HF}, dynamic_frequency_update and _compute_dynamic_ntk_parameters",
        ),
        "yarn": (computed, f"{_HF}, _compute_yarn_parameters"),
        "longrope": (
            computed, f"{_HF}, longrope_frequency_update and _compute_longrope_parameters",
        ),
        "llama3": (computed, f"{_HF}, _compute_llama3_parameters"),
        "proportional": (computed, f"{_HF}, _compute_proportional_rope_parameters"),
    },
    (refuse("KeyError: {!r}"), f"{_HF}, ROPE_INIT_FUNCTIONS"),
    opens,
)  # fmt: skip
