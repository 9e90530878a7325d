"""Hugging Face configs: a `Rotary` from config.json, and the part of config.json for a `Rotary`.

Only data is read: nothing in a model folder is ever executed, and transformers is not imported.
A key, a type or a model that is not known is an error that names it.
"""

import difflib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .schedules import parameters
from .spec import Rotary

MAX_CONFIG_BYTES = 10 * 2**20


def _llama3(base: float, factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


# model_type -> what deviates from Llama: half layout, whole head rotated, base 10 000.
# What transformers 5.23 takes when the config is silent: `base`, `head_dim`, the trained length, a
# whole `rope`. `partial` is the default of partial_rotary_factor, in models that rotate a slice.
Model = Mapping[str, Any]
MODELS: dict[str, Model] = {
    "apertus": {"base": 12_000_000.0, "rope": _llama3(12_000_000.0, 8.0)},
    "arcee": {},
    "bitnet": {"base": 500_000.0},
    "cwm": {"base": 1_000_000.0, "head_dim": 128, "rope": _llama3(1_000_000.0, 16.0)},
    "exaone4": {},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "granite": {},
    "llama": {},
    "mistral": {},
    "mixtral": {"base": 1_000_000.0},
    "olmoe": {},
    "persimmon": {"partial": 0.5},
    "phi": {"partial": 0.5},
    "phi3": {"partial": 1.0, "original_max_position_embeddings": 4096},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {},
    "seed_oss": {"head_dim": 128},
    "smollm3": {"base": 2_000_000.0},
    "stablelm": {"partial": 0.25},
    "starcoder2": {},
}
TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def from_hf_config(config: Any, layer_type: str | None = None) -> Rotary | None:
    """The RoPE of a Hugging Face config, as transformers 5.23 would compute it.

    config      path of a config.json or of the folder that holds it, a dict, or a PretrainedConfig
    layer_type  which entry of a `rope_parameters` that is nested by layer type
    Understands `rope_parameters` (v5) and `rope_scaling` with top-level keys (v4), of the models in
    `MODELS`; a dict without `model_type` is read as Llama with an optional leading slice.
    Returns None for a layer type without rotation.

    Raises ValueError for anything missing, unknown or contradictory, FileNotFoundError for a path
    that is not there.

    >>> from_hf_config({"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 5e5})
    Rotary(head_dim=128, base=500000.0)
    """
    data = _read(config)
    model = _model(data)
    rope = _rope_of_layer(_rope_parameters(data, model), layer_type)
    if rope is None:
        return None
    head_dim = _head_dim(data, model)
    schedule = _rope_type(rope)
    _check_keys(rope, schedule, data.get("model_type"))
    share = _first(rope, data, "partial_rotary_factor", default=model.get("partial", 1.0))
    base = _first(rope, data, "rope_theta", default=model.get("base", 10_000.0))
    params = {key: value for key, value in rope.items() if key not in _COMMON_KEYS}
    params = {key: value for key, value in params.items() if value is not None}
    if schedule == "proportional":
        params["partial_rotary_factor"] = share
        share = 1.0
    else:
        _check_share(share, data, model)
    return Rotary(
        head_dim=head_dim,
        rotary_dim=_rotary_dim(head_dim, share),
        base=base,
        schedule=schedule,
        params=_filled(schedule, params, data, model),
    )


def to_hf_config(
    spec: Rotary, *, max_position_embeddings: int | None = None, version: int = 5
) -> dict[str, Any]:
    """The keys of a config.json that give `spec` back through `from_hf_config`.

    version 5 writes `rope_parameters`, version 4 `rope_theta` and `rope_scaling`.
    `max_position_embeddings` is written if given; `dynamic` needs its own and sets it.
    Raises ValueError for what such a config cannot say: another layout, several axes, a slice that
    does not start the head, a schedule transformers does not have.

    >>> to_hf_config(Rotary(head_dim=64))
    {'head_dim': 64, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0}}
    """
    if version not in (4, 5):
        raise ValueError(f"version must be 4 or 5, got {version!r}")
    if spec.schedule not in TYPES:
        raise ValueError(
            f"transformers has no rope_type {spec.schedule!r}; it has {', '.join(TYPES)}"
        )
    plain = Rotary(head_dim=spec.head_dim, rotary_dim=spec.rotary_dim)
    for field in ("start", "layout", "out_layout", "axes", "sign"):
        if getattr(spec, field) != getattr(plain, field):
            raise ValueError(
                f"a plain config cannot say {field}={getattr(spec, field)!r}: it belongs to a model"
            )
    if spec.schedule == "proportional" and spec.rotary_dim != spec.head_dim:
        raise ValueError(
            f"a config cannot say rotary_dim={spec.rotary_dim} beside the partial_rotary_factor of "
            "proportional: both are that key"
        )
    params = {name: _plain(value) for name, value in spec.params.items()}
    written: dict[str, Any] = {"head_dim": spec.head_dim}
    if spec.schedule == "dynamic":
        trained = params.pop("original_max_position_embeddings")
        if max_position_embeddings not in (None, trained):
            raise ValueError(
                f"dynamic scales from max_position_embeddings, which must be {trained}, "
                f"got {max_position_embeddings}"
            )
        max_position_embeddings = trained
    if max_position_embeddings is not None:
        written["max_position_embeddings"] = max_position_embeddings
    if spec.rotary_dim != spec.head_dim:
        params["partial_rotary_factor"] = _share(spec)
    if version == 5:
        rope = {"rope_type": spec.schedule, "rope_theta": spec.base, **params}
        return {**written, "rope_parameters": rope}
    share = params.pop("partial_rotary_factor", None)
    if share is not None:
        written["partial_rotary_factor"] = share
    written["rope_theta"] = spec.base
    if spec.schedule != "default":
        written["rope_scaling"] = {"rope_type": spec.schedule, **params}
    return written


def _share(spec: Rotary) -> float:
    """The share that a reader, who truncates, turns back into rotary_dim."""
    share = spec.rotary_dim / spec.head_dim
    return share if int(spec.head_dim * share) == spec.rotary_dim else math.nextafter(share, 1)


def _read(config: Any) -> Mapping[str, Any]:
    if isinstance(config, str | Path):
        return _read_file(Path(config))
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ValueError(
            "config must be a path, a dict or a PretrainedConfig, "
            f"got {type(config).__module__}.{type(config).__qualname__}"
        )
    return config


def _read_file(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give a config.json or the folder it is in")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{path}: larger than {MAX_CONFIG_BYTES:,} bytes; is this a config.json?")

    def refuse(constant: str) -> None:
        raise ValueError(f"{path}: {constant} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            keys = Counter(key for key, _ in pairs)
            raise ValueError(f"{path}: key {keys.most_common(1)[0][0]!r} appears twice")
        return data

    try:
        text = path.read_bytes().decode("utf-8-sig")
        data = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file in UTF-8: {error}") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: must hold an object, got {type(data).__name__}")
    return data


def _model(data: Mapping[str, Any]) -> Model:
    name = data.get("model_type")
    if not name:  # a bare dict, or an empty PretrainedConfig
        return {"partial": 1.0}
    if not isinstance(name, str) or name not in MODELS:
        raise ValueError(f"model_type {name!r} is not known{_nearest(name, MODELS)}")
    return MODELS[name]


def _rope_parameters(data: Mapping[str, Any], model: Model) -> dict[str, Any]:
    new, old = data.get("rope_parameters"), data.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} must be an object, got {value!r}")
    if new and old and new != old:
        raise ValueError("rope_parameters and rope_scaling are both given and differ; keep one")
    return dict(new or old or model.get("rope", {}))


def _rope_of_layer(rope: dict[str, Any], layer_type: str | None) -> dict[str, Any] | None:
    is_nested = bool(rope) and all(
        value is None or isinstance(value, Mapping) for value in rope.values()
    )
    if not is_nested:
        return rope
    if layer_type not in rope:
        raise ValueError(
            f"rope_parameters is nested by layer type; pass layer_type, one of {', '.join(rope)}; "
            f"got {layer_type!r}{_nearest(layer_type, rope)}"
        )
    chosen = rope[layer_type]
    return None if chosen is None else dict(chosen)


def _rope_type(rope: Mapping[str, Any]) -> str:
    new, old = rope.get("rope_type"), rope.get("type")
    if new is not None and old is not None and new != old:
        raise ValueError(f"rope_type {new!r} and type {old!r} disagree; keep one")
    name = new or old or "default"
    if not isinstance(name, str) or name not in TYPES:
        raise ValueError(
            f"rope_type {name!r} is not known{_nearest(name, TYPES)}; known: {', '.join(TYPES)}"
        )
    return name


def _check_keys(rope: Mapping[str, Any], schedule: str, model_type: str | None) -> None:
    known = {*_COMMON_KEYS, *parameters(schedule)}
    if model_type:
        known -= {"short_mscale", "long_mscale"}  # none of these models reads them
    for key in rope:
        if key not in known:
            raise ValueError(
                f"rope_type {schedule!r} has no key {key!r}{_nearest(key, known)}; "
                f"known: {', '.join(sorted(known))}"
            )


def _head_dim(data: Mapping[str, Any], model: Model) -> int:
    head_dim = _first(data, model, "head_dim", default=None)
    if head_dim is not None:
        return _whole_number("head_dim", head_dim)
    hidden, heads = data.get("hidden_size"), data.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise ValueError("the config needs head_dim, or hidden_size and num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; give head_dim"
        )
    return hidden // heads


def _check_share(share: Any, data: Mapping[str, Any], model: Model) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor must be in (0, 1], got {share!r}")
    if share != 1 and "partial" not in model:
        raise ValueError(
            f"partial_rotary_factor is {share}, but the code of {data['model_type']!r} rotates the "
            "whole head and ignores it; remove the key"
        )


def _rotary_dim(head_dim: int, share: float) -> int:
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 and rotary_dim < head_dim:
        raise ValueError(
            f"partial_rotary_factor {share} of head_dim {head_dim} is {rotary_dim} channels, an "
            f"odd number; transformers rounds up to {rotary_dim + 1}: build "
            f"Rotary(head_dim={head_dim}, rotary_dim={rotary_dim + 1}, ...) if that is meant"
        )
    return rotary_dim


def _filled(
    schedule: str, params: dict[str, Any], data: Mapping[str, Any], model: Model
) -> dict[str, Any]:
    """What transformers takes from beside the dict: trained length, and factor if it is missing."""
    context = data.get("max_position_embeddings")
    if context is not None:
        context = _whole_number("max_position_embeddings", context)
    if schedule == "dynamic":
        if context is None:
            raise ValueError("dynamic needs max_position_embeddings, the length it scales from")
        return {**params, "original_max_position_embeddings": context}
    if "original_max_position_embeddings" not in parameters(schedule):
        return params
    name = "original_max_position_embeddings"
    trained = _first(
        data, model, params, name, default=context
    )  # Phi-3 has it outside, and it wins
    if trained is not None:
        params = {**params, name: _whole_number(name, trained)}
    is_needed = schedule == "yarn" or not params.keys() & {"attention_factor", "long_mscale"}
    if schedule != "llama3" and is_needed and "factor" not in params and context and trained:
        params["factor"] = context / trained
    return params


def _whole_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return value


def _first(*sources: Any, default: Any) -> Any:
    *mappings, name = sources
    for mapping in mappings:
        if mapping.get(name) is not None:
            return mapping[name]
    return default


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _nearest(value: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
