"""Configs of models: a `Rotary` from config.json, in every dialect that is around.

Only data is read: nothing in a model folder is ever executed, and transformers is not imported.
What a model's code does and its config does not say stands in `models.json`, one line for each
`model_type`, next to the values that transformers takes where the config is silent. A key, a type
or a model that is not known is an error that names it.
"""

import difflib
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .positions import interleaved_sections, sections
from .schedules import parameters
from .spec import Rotary

MAX_CONFIG_BYTES = 10 * 2**20
# model_type -> what deviates from Llama: half layout, whole head rotated, one axis, base 10 000.
# Written by tests/golden/make_models.py; keys:
#   hidden_size, num_attention_heads, head_dim, max_position_embeddings, rope_theta,
#   rotary_dim, rope              what transformers takes where the config is silent
#   partial_rotary_factor         the same; where it is missing the code ignores the key
#   names                         our name -> the name the key has in this config
#   parts                         key of a sub-config -> its model_type
#   layers, layer_names           the same for each layer type, where rope_parameters is nested
#   scaled_layers                 the layer types that a flat rope_scaling is meant for
#   layout, layout_key, out_layout, sign, slice    as in `Rotary`; layout_key false means half
#   mrope, mrope_section          how three axes are dealt out, and the default counts
#   axes, num_axes, ladder        vision towers: order of the axes, and whose frequencies they have
#   head_dim_of                   a size and what it is divided by
#   mscales                       the code reads short_mscale and long_mscale
#   scaled_defaults               what such a rope_scaling has beside its own keys
#   only                          the rope types that the code reads, where it is not all
#   not_one                       why it is not one rotation
Model = Mapping[str, Any]
MODELS: dict[str, Model] = json.loads(Path(__file__).with_name("models.json").read_text())
TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "axial")
# names that other readers have for them: vLLM 0.33, SGLang 0.5, mlx-lm 0.32, old remote code
ALIASES = {
    "su": "longrope", "mrope": "default", "mllama4": "llama3", "deepseek_yarn": "yarn",
    "telechat3-yarn": "yarn", "xdrope": "dynamic", "bailing_mrope": "default",
    "openpangu": "default", "ntk": "ntk",
}  # fmt: skip
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# keys beside a schedule's own that do not change cos and sin, or are read elsewhere
_NEUTRAL_KEYS = (
    "mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings",
    "apply_yarn_scaling", "xdrope_section", "interleaved",
)  # fmt: skip
_TOP_KEYS = {
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_interleave",
    "indexer_rope_interleave", "rope_traditional", "no_rope_layers", "no_rope_layer_interval",
    "qk_rope_head_dim", "rotary_dim", "rope_type", "nope_layer_interval", "use_rope",
    "original_max_position_embeddings", "per_layer_config", "mrope_section", "rotary_value",
    "rope_dim", "layer_rope_theta", "rope_scaling_layers", "use_mem_rope",
    "memory_attention_rope_feat_sizes",
    "memory_attention_rope_k_sizes", "memory_attention_rope_dropout", "swa_rope_theta",
    "use_rotary_embedding", "rotary_embedding_base",
}  # fmt: skip
# keys that models carry and that say nothing at this value
_HARMLESS = {
    "rotary_pct": 1.0, "rotary": True, "use_rotary_pos_emb": True, "use_mrope": False,
    "use_3d_rope": True, "rope_is_neox_style": True, "rope_ratio": 1, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "use_rotary_embedding": True,
}  # fmt: skip
Complain = Callable[[str], None]


class _Config(NamedTuple):
    """What a value is looked up in, the first that has it: rope, data, then the silent defaults."""

    rope: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Model
    layer_type: str | None

    def get(self, name: str, default: Any = None) -> Any:
        layer = self.model.get("layers", {}).get(self.layer_type) or {}
        if name not in ("rope_theta", "head_dim"):
            layer = {}  # the rest of a default is taken whole, by `_rope_of_layer`, or not at all
        alias = self.model.get("layer_names", {}).get(self.layer_type, {}).get(name)
        names = (alias,) if alias else (self.model.get("names", {}).get(name, name), name)
        sources = (self.rope.get(name), *(self.data.get(each) for each in names))
        for value in (*sources, layer.get(name), self.model.get(name)):
            if value is not None:
                return value
        return default


def from_hf_config(
    config: Any,
    layer_type: str | None = None,
    *,
    part: str | None = None,
    strict: bool = True,
) -> Rotary | None:
    """The RoPE of a model's config, as transformers 5.23 would compute it.

    config      path of a config.json or of the folder that holds it, a dict, or a PretrainedConfig
    layer_type  which entry, where frequencies differ by layer type ("full_attention", ...)
    part        which sub-config of a model of several parts ("vision_config"); default the text
    strict      False turns unknown keys into warnings
    Understands `rope_parameters` (v5, flat or nested by layer type), `rope_scaling` with top-level
    keys (v4), the models of `MODELS`, and the type names of vLLM, SGLang and mlx-lm; a dict without
    `model_type` is read as Llama with an optional leading slice.
    Returns None for a layer type without rotation.

    Raises ValueError for anything missing, unknown or contradictory, FileNotFoundError for a path
    that is not there.

    >>> from_hf_config({"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 5e5})
    Rotary(head_dim=128, base=500000.0)
    >>> from_hf_config({"model_type": "nanochat"}).sign
    -1
    """
    complain = _refuse if strict else _warn
    data, model = _part(_read(config), part)
    if "not_one" in model:
        raise ValueError(f"{data['model_type']!r} is not one rotation: {model['not_one']}")
    _check_top(data, model, complain)
    rope = _rope_of_layer(_rope_parameters(data, model), data, model, layer_type)
    if rope is None:
        return None
    found = _Config(rope, data, model, layer_type)
    head_dim = _head_dim(found)
    name = _rope_type(rope, model)
    schedule = _schedule(name, rope)
    _check_keys(rope, schedule, name, model, complain)
    rotary_dim, params = _slice(found, head_dim, schedule)
    start = head_dim - rotary_dim if model.get("slice") == "trailing" else 0
    layout, out_layout = _layouts(found)
    taken = {key: value for key, value in rope.items() if key in parameters(schedule)}
    params = {**taken, **_renamed(name, schedule, rope), **params}
    params = {key: value for key, value in params.items() if value is not None}
    if schedule == "axial":
        rotary_dim, params = _axial(head_dim, model)
    return Rotary(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        start=start,
        base=found.get("rope_theta", 10_000.0),
        layout=layout,
        out_layout=out_layout,
        schedule=schedule,
        params=_filled(schedule, params, found),
        axes=_axes(found, rotary_dim // 2),
        sign=model.get("sign", 1),
    )


def layer_types(config: Any, *, part: str | None = None) -> tuple[str, ...]:
    """The layer types that have entries of their own; empty where all layers are alike.

    >>> layer_types({"model_type": "gemma3_text"})
    ('full_attention', 'sliding_attention')
    """
    data, model = _part(_read(config), part)
    rope = _rope_parameters(data, model)
    thetas = data.get("layer_rope_theta") or ()
    if len(set(thetas)) > 1:
        return tuple(dict.fromkeys(f"rope_theta={theta or 0:g}" for theta in thetas))
    if _is_nested(rope, data, model):
        return tuple(key for key, value in rope.items() if value is None or hasattr(value, "keys"))
    return tuple(model.get("layers", ()))


def parts(config: Any) -> tuple[str, ...]:
    """The parts of a model of several, whose RoPE can be asked for; empty for a model of one.

    >>> parts({"model_type": "qwen2_vl"})
    ('vision_config', 'text_config')
    """
    data = _read(config)
    return tuple(MODELS.get(str(data.get("model_type")), {}).get("parts", ()))


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


def _part(data: Mapping[str, Any], part: str | None) -> tuple[Mapping[str, Any], Model]:
    """The sub-config that is meant, and what is known of its model."""
    name = data.get("model_type")
    if not name:  # a bare dict, or an empty PretrainedConfig
        if part is not None:
            raise ValueError(f"part {part!r} of a config without model_type")
        return data, {"partial_rotary_factor": 1.0, "mscales": True}
    if not isinstance(name, str) or name not in MODELS:
        raise ValueError(f"model_type {name!r} is not known{_nearest(name, MODELS)}")
    model = MODELS[name]
    known = model.get("parts", {})
    if part is None and set(model) - {"parts"}:
        return data, model
    if not known:
        if part is not None:
            raise ValueError(f"model_type {name!r} has no part {part!r}: it is one model")
        return data, model
    key = part or next((key for key in _TEXT_PARTS if key in known), None)
    if key is None or key not in known:
        raise ValueError(
            f"model_type {name!r} has several parts; pass part, one of {', '.join(known)}; "
            f"got {part!r}{_nearest(part, known)}"
        )
    inner = data.get(key)
    if inner is None:  # an older config.json that is flat
        inner = {} if part else {k: v for k, v in data.items() if k not in known}
        inner = {**inner, "model_type": known[key]}
    if not isinstance(inner, Mapping):
        raise ValueError(f"{key} must be an object, got {inner!r}")
    inner = {**inner, "model_type": inner.get("model_type") or known[key]}
    if inner["model_type"] == name:  # the part bears the name of the whole
        inner["model_type"] = known[key]
    return _part(inner, None)


_TEXT_PARTS = (
    "text_config", "thinker_config", "llm_config", "language_config", "decoder_config", "decoder",
)  # fmt: skip


def _refuse(message: str) -> None:
    raise ValueError(message)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _check_top(data: Mapping[str, Any], model: Model, complain: Complain) -> None:
    """A key that looks like RoPE and that no model reads may be a misspelt one."""
    known = {*_TOP_KEYS, *model.get("names", {}).values()}
    for names in model.get("layer_names", {}).values():
        known |= set(names.values())
    for key, value in data.items():
        if key in _HARMLESS and _HARMLESS[key] == value:
            continue
        if re.search("rope|rotary", str(key)) and key not in known:
            complain(f"config key {key!r} is not known{_nearest(key, known)}")


def _rope_parameters(data: Mapping[str, Any], model: Model) -> dict[str, Any]:
    new, old = data.get("rope_parameters"), data.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} must be an object, got {value!r}")
    if new and old and new != old:
        raise ValueError("rope_parameters and rope_scaling are both given and differ; keep one")
    return dict(new or old or model.get("rope", {}))


def _is_nested(rope: Mapping[str, Any], data: Mapping[str, Any], model: Model) -> bool:
    labels = {*model.get("layers", ()), *(data.get("layer_types") or ())}
    if rope and any(key in labels for key in rope):
        return True
    return bool(rope) and all(
        value is None or isinstance(value, Mapping) for value in rope.values()
    )


def _rope_of_layer(
    rope: dict[str, Any], data: Mapping[str, Any], model: Model, layer_type: str | None
) -> dict[str, Any] | None:
    own = model.get("layers", {})
    thetas = data.get("layer_rope_theta")
    if thetas and (len(set(thetas)) > 1 or not thetas[0]):
        return _rope_of_theta(rope, thetas, layer_type)
    if thetas:
        return {**rope, "rope_theta": thetas[0]}
    scaled = data.get("rope_scaling_layers")
    if scaled is not None and len(scaled) < data.get("num_hidden_layers", len(scaled)):
        if layer_type not in ("scaled", "unscaled"):  # Molmo 2
            raise ValueError(
                "rope_scaling_layers names some of the layers; pass layer_type, scaled or "
                f"unscaled; got {layer_type!r}"
            )
        plain = {key: rope[key] for key in rope if key == "rope_theta"}
        return rope if layer_type == "scaled" else plain
    if _is_nested(rope, data, model):
        known = {
            key: value for key, value in rope.items() if value is None or hasattr(value, "keys")
        }
        if layer_type not in known and layer_type in own:  # silent about this one
            return None if own[layer_type] is None else dict(own[layer_type])
        if layer_type not in known:
            raise ValueError(
                f"rope_parameters is nested by layer type; pass layer_type, one of "
                f"{', '.join(known)}; got {layer_type!r}{_nearest(layer_type, known)}"
            )
        chosen = known[layer_type]
        return None if chosen is None else dict(chosen)
    if not own:
        return rope
    if layer_type not in own:
        raise ValueError(
            f"{data['model_type']!r} has a RoPE for each layer type; pass layer_type, one of "
            f"{', '.join(own)}; got {layer_type!r}{_nearest(layer_type, own)}"
        )
    if own[layer_type] is None:
        return None
    # an older config with one rope_scaling, meant for some of the layers
    if rope and layer_type in model.get("scaled_layers", own):
        return {**model.get("scaled_defaults", {}), **rope}
    return {key: value for key, value in own[layer_type].items() if key != "rope_theta"}


def _rope_of_theta(
    rope: Mapping[str, Any], thetas: Iterable[float], layer_type: str | None
) -> dict[str, Any] | None:
    """Granite and Muse give every layer a base; 0 is a layer without rotation."""
    known = {f"rope_theta={theta or 0:g}": theta for theta in thetas}
    if layer_type not in known:
        raise ValueError(
            f"layer_rope_theta differs by layer; pass layer_type, one of {', '.join(known)}; "
            f"got {layer_type!r}{_nearest(layer_type, known)}"
        )
    return {**rope, "rope_theta": known[layer_type]} if known[layer_type] else None


def _rope_type(rope: Mapping[str, Any], model: Model) -> str:
    new, old = rope.get("rope_type"), rope.get("type")
    if new is not None and old is not None and new != old and ALIASES.get(str(old), old) != new:
        raise ValueError(f"rope_type {new!r} and type {old!r} disagree; keep one")
    name = new or old or "default"
    known = (*TYPES, *ALIASES)
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"rope_type {name!r} is not known{_nearest(name, known)}; known: {', '.join(TYPES)}"
        )
    if name not in model.get("only", (name,)):
        raise ValueError(
            f"the code of this model reads rope_type {model['only']} only, got {name!r}"
        )
    if "num_axes" in model and model["axes"] != "turns of one ladder" and name == "default":
        return "axial"
    return name


def _schedule(name: str, rope: Mapping[str, Any]) -> str:
    schedule = ALIASES.get(name, name)
    if schedule == "dynamic" and rope.get("alpha"):
        return "ntk"  # Hunyuan: a fixed base, whatever the length
    if name == "ntk" and rope.get("mixed_b") is not None:
        return "ntk_mixed"
    return schedule


def _check_keys(
    rope: Mapping[str, Any], schedule: str, name: str, model: Model, complain: Complain
) -> None:
    known = {*_COMMON_KEYS, *_NEUTRAL_KEYS, *parameters(schedule)}
    if not model.get("mscales"):  # a model whose code ignores them
        known -= {"short_mscale", "long_mscale"}
    known -= {"num_axes", "ladder"}
    if schedule == "ntk":
        known |= {"alpha", "factor"} | ({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
                                        if rope.get("alpha") else set())  # fmt: skip
    if schedule == "ntk_mixed":
        known |= {"mixed_b", "factor"}
    if name in ("deepseek_yarn", "telechat3-yarn"):
        known |= {"extrapolation_factor", "attn_factor"}
    if schedule == "dynamic":
        known.add("max_trained_positions")
    if rope.get("extrapolation_factor") == 1:
        known.add("extrapolation_factor")
    if rope.get("use_fope"):
        raise ValueError("use_fope is not a rotary embedding: FoPE mixes frequencies by matrices")
    for key in rope:
        if key not in known:
            complain(
                f"rope_type {name!r} has no key {key!r}{_nearest(key, known)}; "
                f"known: {', '.join(sorted(known))}"
            )


def _renamed(name: str, schedule: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that a dialect says in its own way."""
    if schedule == "ntk" and rope.get("alpha"):
        return {"factor": rope["alpha"]}
    if schedule == "ntk_mixed":
        return {"b": rope["mixed_b"]}
    factor = rope.get("factor")
    if name == "telechat3-yarn" and isinstance(factor, int | float) and factor > 1:
        return {"attention_factor": 0.07 * math.log(factor) + 1}  # vLLM 0.33, config.py
    if name == "deepseek_yarn" and isinstance(factor, int | float) and factor > 1:
        over, under = rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0)
        gain = [0.1 * each * math.log(factor) + 1 for each in (over, under)]
        return {"attention_factor": gain[0] / gain[1] * rope.get("attn_factor", 1.0)}
    return {}


def _head_dim(found: _Config) -> int:
    for layer, kind in enumerate(found.data.get("layer_types") or ()):
        own = (found.data.get("per_layer_config") or {}).get(layer, {})
        own = own or (found.data.get("per_layer_config") or {}).get(str(layer), {})
        if kind == found.layer_type and own.get("head_dim") is not None:
            return _whole_number("head_dim", own["head_dim"])
    head_dim = found.get("head_dim")
    if head_dim is not None:
        return _whole_number("head_dim", head_dim)
    if "head_dim_of" in found.model:
        whole, *others = (found.get(name) for name in found.model["head_dim_of"])
        return int(whole // math.prod(others))
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise ValueError("the config needs head_dim, or hidden_size and num_attention_heads")
    if hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; give head_dim"
        )
    return hidden // heads


def _slice(found: _Config, head_dim: int, schedule: str) -> tuple[int, dict[str, Any]]:
    """rotary_dim, and the share as a parameter where the schedule has it."""
    if found.data.get("rope_dim") is not None:  # another name of the width, whatever the model
        return _whole_number("rope_dim", found.data["rope_dim"]), {}
    has_width = "rotary_dim" in {**found.model, **found.model.get("names", {})}
    rotary_dim = found.get("rotary_dim") if has_width else None
    if rotary_dim is not None and found.rope.get("partial_rotary_factor") is None:
        return _whole_number("rotary_dim", rotary_dim), {}
    is_ignored = (
        "partial_rotary_factor" in found.model and found.model["partial_rotary_factor"] is None
    )
    share = 1.0 if is_ignored else found.get("partial_rotary_factor", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor must be in (0, 1], got {share!r}")
    if schedule == "proportional":
        return head_dim, {"partial_rotary_factor": share}
    if (
        share != 1
        and "partial_rotary_factor" not in found.model
        and "rotary_dim" not in found.model.get("names", {})
    ):
        raise ValueError(
            f"partial_rotary_factor is {share}, but the code of {found.data['model_type']!r} "
            "rotates the whole head and ignores it; remove the key"
        )
    return _rotary_dim(head_dim, share), {}


def _rotary_dim(head_dim: int, share: float) -> int:
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 and rotary_dim < head_dim:
        raise ValueError(
            f"partial_rotary_factor {share} of head_dim {head_dim} is {rotary_dim} channels, an "
            f"odd number; transformers rounds up to {rotary_dim + 1}: build "
            f"Rotary(head_dim={head_dim}, rotary_dim={rotary_dim + 1}, ...) if that is meant"
        )
    return rotary_dim


def _layouts(found: _Config) -> tuple[str, str]:
    layout = found.model.get("layout", "half")
    out_layout = found.model.get("out_layout", layout)
    key = found.model.get("layout_key")
    if key and found.data.get(key) is False:
        return "half", "half"
    if found.data.get("rope_traditional") is True:  # mlx-lm
        return "interleaved", "interleaved"
    return layout, out_layout


def _axial(head_dim: int, model: Model) -> tuple[int, dict[str, Any]]:
    count = model["num_axes"]
    ladder = "turns" if model["axes"].startswith("turns") else model.get("ladder", "blocks")
    return 2 * count * (head_dim // count // 2), {"num_axes": count, "ladder": ladder}


def _axes(found: _Config, pairs: int) -> tuple[int, ...]:
    """Which position axis drives each pair."""
    model, rope = found.model, found.rope
    if "num_axes" in model:
        count = model["num_axes"]
        order = range(count)[::-1] if model["axes"].endswith("reversed") else range(count)
        if model["axes"].startswith("turns"):
            return tuple(axis for _ in range(pairs // count) for axis in order)
        return tuple(axis for axis in order for _ in range(pairs // count))
    counts = (
        rope.get("mrope_section") or found.data.get("mrope_section") or model.get("mrope_section")
    )
    if not counts:
        return ()
    if sum(counts) != pairs:
        raise ValueError(f"mrope_section {counts} must sum to the {pairs} pairs that are rotated")
    way = model.get("mrope", "sections")
    if rope.get("mrope_interleaved") is not None and way != "alternating":
        way = "interleaved" if rope["mrope_interleaved"] else "sections"
    if way == "alternating":  # Ernie 4.5 VL: height and width in turn, then time
        return (*((1, 2) * counts[0]), *((0,) * counts[2]))
    return interleaved_sections(*counts) if way == "interleaved" else sections(*counts)


def _filled(schedule: str, params: dict[str, Any], found: _Config) -> dict[str, Any]:
    """What transformers takes from beside the dict: trained length, and factor if it is missing."""
    name = "original_max_position_embeddings"
    context = found.get("max_position_embeddings")
    if context is not None:
        context = _whole_number("max_position_embeddings", context)
    if schedule == "dynamic":
        context = found.rope.get("max_trained_positions", context)  # vLLM's name, which wins there
        if context is None:
            raise ValueError("dynamic needs max_position_embeddings, the length it scales from")
        context = _whole_number("max_trained_positions", context)
        return {**params, name: context}
    if name not in parameters(schedule):
        return params
    # Phi-3 has it outside, and it wins
    sources = (found.data.get(name), found.model.get(name), params.get(name), context)
    trained = next((each for each in sources if each is not None), None)
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


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _nearest(value: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
