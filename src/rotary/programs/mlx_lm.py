"""What mlx-lm 0.32.2 computes from a config.

`mlx_lm.json` describes each of its model files that `rotary.configs` knows, and their aliases:
  reads          what it reads from `rope_parameters`: "type", only the "base", or entries "nested"
                 by layer type; without it, rope_theta and rope_scaling at the top level
  base           the base if the config has none; null if mlx-lm then raises; default 10 000
  base_in        the object of the config that must have rope_theta
  fixed_base     the base, whatever the config says
  share          the rotated share of the head, whatever the config says
  parameters     the keys that rope_parameters must have, which mlx-lm reads without asking
  local_base     the key of the base of sliding layers, which is 10 000 if the config has none
  scaled_layers  the layer type that rope_scaling applies to; others are plain
  unscaled       plain whatever rope_scaling says
  needs_scaling  mlx-lm raises without rope_scaling
  needs, types   the keys that rope_scaling must have, and the types it may have; mlx-lm raises for
                 all others
  fails          the error that a type of rope_scaling raises in this file alone
  float_factor   mlx-lm raises for a factor of linear that is a whole number, as 8
  read_as        the type that is computed for each type of rope_scaling
  partial_rotary_factor, rotary_dim, original_max_position_embeddings
                 the value if the config has none at the top level, where alone such a file reads
                 it (GPT-NeoX: rotary_pct); null if mlx-lm then raises
tests/test_peers.py compares with recorded results of mlx-lm, also for configs without these keys.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..strict_json import JSON
from . import rules
from .case import Case, NotComparedError, Program, RefusedError, Result

MODELS: dict[str, dict[str, JSON]] = json.loads(Path(__file__).with_suffix(".json").read_text())
TRAINED = "original_max_position_embeddings"


def opens(case: Case) -> Case:
    """Return what the model file reads from config.json, which mlx-lm does not rewrite first."""
    config, data = case.config, case.config.data
    if config.file_type and config.file_type not in MODELS:
        raise NotComparedError(f"mlx-lm has no file for model type {config.file_type}")
    model_type, layer_type = config.model_type.removesuffix("_text"), config.layer_type
    if model_type == "olmo":
        raise RefusedError(
            "TypeError: missing d_model, n_layers, n_heads: it reads OLMo's own file"
        )
    # llama4_text has a file of its own, which scales nothing
    model = MODELS.get(config.file_type) or MODELS.get(model_type, {})
    _check_parameters(data.get("rope_parameters"), model)
    rope, base = _rope_and_base(case, model)
    if base is None or None in rope.values():
        raise NotComparedError("a null that only mlx-lm reads was never run")
    advice = ""
    if base != case.base and "fixed_base" in model:
        advice = f"mlx-lm always takes the base {base:g} for {model_type}"
    elif base != case.base and "base" in model:
        advice = f"Write rope_theta: without it mlx-lm takes {base:g}"
    if model_type == "glm":
        advice = "mlx-lm rotates the whole head of glm"
    _check_scaling(rope, model)
    if layer_type is not None and layer_type != model.get("scaled_layers", layer_type):
        if _type_of(rope) not in MLX_LM.rules:  # its other layers fail, and the model with them
            raise RefusedError(f"ValueError: Unsupported RoPE type {_type_of(rope)}")
        rope = {}
    if "unscaled" in model:
        advice = f"mlx-lm does not scale {model_type} at all" if rope else advice
        rope = {}
    rope_type = _type_of(rope)
    if rope and "read_as" in model:
        rope_type = model["read_as"].get(rope_type, model["read_as"]["others"])
    length = config.model.get("names", {}).get("max_position_embeddings", "max_position_embeddings")
    if rope_type in ("dynamic", "longrope") and data.get(length) is None:
        raise NotComparedError(f"mlx-lm has its own {length} where the config has none")
    width_key, dim = _width(case, model)
    if data.get("rope_parameters") and model.get("reads") not in ("type", "nested"):
        keys = "rope_theta and rope_scaling"
        if width_key and dim != case.dim:
            keys = f"rope_theta, rope_scaling and {width_key}"
        advice = f"Write {keys} at the top level: mlx-lm reads no rope_parameters"
    return case._replace(
        rope=rope,
        advice=advice,
        rope_type=rope_type,
        base=float(base),
        dim=dim,
    )


def _type_of(rope: Mapping[str, JSON]) -> str:
    return rope.get("type") or rope.get("rope_type") or "default"


def _check_parameters(rope: JSON, model: Mapping[str, JSON]) -> None:
    """Raise the error of a model file for rope_parameters without a key that it reads."""
    for key in model.get("parameters", ()):
        if rope is None:
            raise RefusedError("TypeError: 'NoneType' object is not subscriptable")
        if key not in rope:
            raise RefusedError(f"KeyError: {key!r}")


def _check_scaling(rope: Mapping[str, JSON], model: Mapping[str, JSON]) -> None:
    """Raise the error of the model file for a rope_scaling that it does not accept."""
    if error := model.get("fails", {}).get(_type_of(rope)):
        raise RefusedError(error)
    if not rope and "needs_scaling" in model:
        raise RefusedError("AttributeError: 'NoneType' object has no attribute 'get'")
    needs, types = model.get("needs", ()), model.get("types", ())
    if not rope or not (needs or types):
        return
    if not rope.keys() >= set(needs):
        keys = ", ".join(map(repr, needs))
        words = f"keys {{{keys}}}" if len(needs) > 1 else keys
        raise RefusedError(f"ValueError: rope_scaling must contain {words}")
    if types and _type_of(rope) not in types:
        words = " or ".join(map(repr, types))
        raise RefusedError(f"ValueError: rope_scaling 'type' currently only supports {words}")
    if "type" not in rope:  # read without asking whether it is there
        raise RefusedError("KeyError: 'type'")
    if "float_factor" in model and rope["type"] == "linear" and isinstance(rope["factor"], int):
        raise RefusedError("AssertionError: factor must be a float")


def _width(case: Case, model: Mapping[str, JSON]) -> tuple[str, int]:
    """Return the number of rotated channels, after the top-level key that says it, or ""."""
    config = case.config
    if "share" in model:
        return "", int(model["share"] * config.head_dim)
    name = next((each for each in ("partial_rotary_factor", "rotary_dim") if each in model), "")
    if not name:
        return "", case.dim
    key = config.model.get("names", {}).get(name, name)
    value = config.data.get(key, model[name])
    if value is None:
        raise RefusedError(f"TypeError: missing 1 required argument: {key!r}")
    dim = int(value if name == "rotary_dim" else value * config.head_dim)
    if dim % 2:
        raise RefusedError(f"ValueError: [rope] dims must be even but got {dim}.")
    return key, dim


def _rope_and_base(case: Case, model: Mapping[str, JSON]) -> tuple[Mapping[str, JSON], float]:
    """Return the rope parameters and the base, from the keys that the model file reads."""
    data, reads = case.config.data, model.get("reads")
    new = data.get("rope_parameters") or {}
    if reads == "nested":
        return case.rope, case.rope.get("rope_theta", case.base)
    rope = data.get("rope_scaling") or (new if reads == "type" else {})
    if case.config.layer_type == "sliding_attention" and "local_base" in model:
        return rope, data.get(model["local_base"], 10_000.0)
    if "base_in" in model and "rope_theta" not in (data.get(model["base_in"]) or {}):
        raise RefusedError("KeyError: 'rope_theta'")
    name = case.config.model.get("names", {}).get("rope_theta", "rope_theta")
    base = data.get(name, new.get("rope_theta") if reads else None)
    if name in data and base is None:
        raise NotComparedError(f"a null for {name}, which mlx-lm takes for a number")
    if base is None and model.get("base", 10_000.0) is None:
        raise RefusedError("TypeError: missing 1 required argument: 'rope_theta'")
    base = model.get("base", 10_000.0) if base is None else base
    return rope, model.get("fixed_base", base)


def mrope(case: Case) -> Result:
    """Compute rope_type mrope of older files, on one axis."""
    rules.need(case, "mrope_section")
    return rules.plain_on_one_axis(case)


def llama3(case: Case) -> Result:
    """Compute the schedule of Llama 3.1; a wavelength of trained / low_freq_factor is kept."""
    trained = case.rope.get(TRAINED, 8192)
    result = rules.llama3(case, trained, low_freq_factor=1.0, high_freq_factor=4.0)
    kept = rules.plain(case).inv_freq
    edge = trained / case.rope.get("low_freq_factor", 1.0)
    inv_freq = np.where(2 * math.pi / kept == edge, kept, result.inv_freq)  # mlx-lm has a < here
    return result._replace(inv_freq=inv_freq)


def longrope(case: Case) -> Result:
    """Compute LongRoPE, always with the long list."""
    if case.config.model_type == "minicpm3":  # its file has defaults for all three
        ones = [1.0] * (case.dim // 2)
        defaults = {TRAINED: 4096, "short_factor": ones, "long_factor": ones}
        case = case._replace(rope={**defaults, **case.rope})
    data, silent = case.config.data, MODELS.get(case.config.model_type, {}).get(TRAINED)
    trained = data.get(TRAINED, silent) if silent else rules.need(case, TRAINED)
    case = case._replace(trained=trained)
    advice = (
        case.advice or "mlx-lm uses the long list for every sequence, and its own attention factor"
    )
    rule = rules.longrope(lambda _: math.inf, "never: the long list always", reads_mscale=False)
    result = rule(case)._replace(advice=advice)
    if case.config.model_type == "phimoe":
        result = result._replace(attention_factor=float(rules.need(case, "long_mscale")))
    return result


def dynamic(case: Case) -> Result:
    """Compute dynamic NTK at each call's length, or for Hunyuan a fixed base, grown by alpha."""
    if case.config.model_type == "hunyuan_v1_dense":
        return rules.grown(case, rules.need(case, "alpha"))
    return rules.dynamic("with offset + length, at every call; cached keys keep theirs")(case)


def yarn(case: Case) -> Result:
    """Compute YaRN with DeepSeek's attention factor, and 4096 if the trained length is missing."""
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
