"""Chooses what a call asks for: the file, the part of a model, the layer type.

`choose` reads a config once into one `Config`, which all other code takes: `hf.py` makes a `Rotary`
of it, `rotary.programs` computes what other programs make of it. Only data is read: nothing in a
model folder is ever executed, and transformers is not imported.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ..strict_json import JSON
from ..words import brief, nearest
from .files import load
from .layers import Model, listed_layer_types, ropes, with_entries, with_layer_types
from .record import Config

# model_type -> what deviates from Llama: half layout, whole head rotated, one axis, base 10 000.
# Written by tools/make_models.py; keys:
#   hidden_size, num_attention_heads, head_dim, max_position_embeddings, rope_theta,
#   rotary_dim, rope              the defaults of transformers, for keys that the config lacks
#   partial_rotary_factor         likewise; the code of a model without this default ignores the key
#   names                         our name -> the name the key has in this config
#   layers, layer_names           the same for each layer type, where rope_parameters is nested
#   unlisted_layers               the same for layer types that a config has only if it lists them
#   entries_from_lists            rope_theta and partial_rotary_factors may be lists, of which
#                                 the class makes an entry for each layer type
#   scaled_layers                 the layer types that a flat rope_scaling is meant for
#   flat                          a flat rope_parameters is read like a flat rope_scaling
#   nested                        the code reads entries by layer type, without defaults
#   lists                         keys with a list of the base or scaling of each layer
#   one_base                      of a list of bases, the code reads only which of them are 0
#   fixed_base                    the code reads no rope_theta: its base is 10 000, or in this key
#   plain_head_dim                what the code does with the key head_dim, if it reads another one:
#                                 see `record.py`
#   null_head_dim                 the class leaves head_dim null where the file has none
#   unread, unread_alone          keys that the code does not read: never, or where the file has no
#                                 rope parameters
#   needed                        rope parameters whose default is used only where the file has no
#                                 rope parameters
#   needed_nested                 keys that each entry by layer type needs: where one is missing,
#                                 the code does not take the default of the class
#   layout, layout_key, out_layout, sign, slice    as in `Rotary`; layout_key false means half
#   mrope, mrope_section          how three axes are dealt out, and the default counts
#   axes, num_axes, ladder        vision towers: order and frequencies of the axes
#   head_dim_of                   a size and what it is divided by
#   switch                        a key, and what it must be for the model to rotate at all
#   null_base                     "off": a rope_theta of null turns RoPE off
#   norm_after                    rotated keys get a norm with weights, and cannot be moved
#   windowed                      the key whose window all layers that rotate have, if it is set
#   other                         keys of this config that look like RoPE and do not change it
#   mscales                       the code reads short_mscale and long_mscale
#   alpha                         rope type dynamic with alpha is a fixed base
#   scaled_defaults               parameters that the code adds to a flat rope_scaling of type yarn
#   scaled_unread                 keys of a flat rope_scaling that the code replaces
#   only                          the rope types that the code reads, if it does not read all
#   read_as                       rope types that the class takes for another one
#   not_one                       why it is not one rotation
#   learned                       each frequency is multiplied by a trained parameter
#   parts                         key and model_type of each part of a model with parts
#   beside_parts                  keys outside of the parts, read where there is no text part
#   own_text                      without a text part in the file, the class has other defaults
#   text_defaults                 what the class adds to a text part where the file is silent
#   weights                       of its tensors, for `rotary.checkpoint`: see tools/make_models.py
MODELS: dict[str, Model] = json.loads(Path(__file__).with_name("models.json").read_text())
# model types of transformers whose code has no rotation
_WITHOUT_ROPE = json.loads(Path(__file__).with_name("without_rope.json").read_text())
# keys of the part that holds the text model, which is read if no part is asked for
TEXT_PARTS = (
    "text_config", "thinker_config", "llm_config", "language_config", "decoder_config", "decoder",
)  # fmt: skip
_OF_PARTS = {"parts", "beside_parts", "own_text", "text_defaults"}
_TEXT_KEYS = re.compile(
    "rope|rotary|hidden_size|num_attention_heads|head_dim|max_position|layer_types"
)
HARMLESS = {  # keys of published files that change nothing at this value
    "rotary_pct": 1.0, "rotary": True, "use_rotary_pos_emb": True, "use_mrope": False,
    "use_3d_rope": True, "rope_is_neox_style": True, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "rope_interleaved": False,  # SmolLM2
}  # fmt: skip
# names in layer_types where all layers that rotate have one RoPE: those of transformers 5.24,
# configuration_utils.py, and of older files
LAYERS_WITH_ROPE = frozenset({
    "full_attention", "sliding_attention", "chunked_attention", "window_attention", "attention",
    "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", "hybrid",
    "hybrid_sliding", "reference_sliding_attention", "minimax_m3_sparse",
})  # fmt: skip
LAYERS_WITHOUT_ROPE = frozenset({"conv", "linear_attention", "mamba", "moe", "dense", "sparse"})

_ALTERNATIVES = (
    "load the model and call rotary.from_model(model); or, if its code is like that of a known "
    "model, call rotary.from_hf_config(config, as_type='llama') with its type; or write "
    "rotary.Rotary(head_dim=, base=, layout=, ...)"
)


class ArgumentNeededError(ValueError):
    """A config alone does not say the RoPE. `reason` is the text without what to pass."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason, advice)
        self.reason, self.advice = reason, advice

    def __str__(self) -> str:
        return f"{self.reason}; {self.advice}"


class UnknownModelError(ArgumentNeededError):
    """The model_type of a config is not known, or not as one that rotates."""


class NoRopeError(UnknownModelError):
    """The model_type of a config is one that does not rotate."""


def choose(
    config: object,
    layer_type: str | None = None,
    part: str | None = None,
    as_type: str | None = None,
) -> Config:
    """Return the config of one part and layer type; arguments and errors as in `from_hf_config`.

    >>> choose({"model_type": "gemma3_text"}, "sliding_attention").get("rope_theta")
    10000.0
    """
    whole = load(config) if as_type is None else _as_type(load(config), as_type)
    data, model = _part(whole, part)
    entries = ropes(data, model)
    are_alike = None in entries
    if not are_alike and layer_type not in entries:
        kinds = [str(kind) for kind in entries]
        raise ValueError(
            f"rope_parameters is nested by layer type; pass layer_type, one of "
            f"{', '.join(kinds)}; got {brief(layer_type)}{nearest(layer_type, kinds)}"
        )
    rope = entries[None if are_alike else layer_type]
    if are_alike and layer_type is not None:
        if layer_type not in listed_layer_types(data):
            raise ValueError(
                f"layer_type {brief(layer_type)} is not one of this model's: all its layers have "
                "one RoPE; leave layer_type out"
            )
        if layer_type in LAYERS_WITHOUT_ROPE:
            rope = None
        elif layer_type not in LAYERS_WITH_ROPE:
            raise ValueError(
                f"it is not known whether layers of type {layer_type!r} have a RoPE; leave out "
                "layer_type for the RoPE of the layers that have one"
            )
    file_type = str(whole.get("model_type") or "")
    return Config(rope or {}, data, model, layer_type, rope is not None, file_type)


def layer_types(config: object, *, part: str | None = None) -> tuple[str, ...]:
    """Return the layer types with rope parameters of their own; empty if all layers are alike.

    >>> layer_types({"model_type": "gemma3_text"})
    ('full_attention', 'sliding_attention')
    """
    return tuple(kind for kind in ropes(*_part(load(config), part)) if kind is not None)


def parts(config: object) -> tuple[str, ...]:
    """Return the parts of a model, to choose from by `part`; empty for a model without parts.

    >>> parts({"model_type": "qwen2_vl"})
    ('vision_config', 'text_config')
    """
    return tuple(MODELS.get(str(load(config).get("model_type")), {}).get("parts", ()))


def part_key(data: Mapping[str, JSON], part: str | None) -> str | None:
    """Return the key of the sub-config of a part; None if the part is the whole config.

    >>> part_key({"model_type": "qwen2_vl"}, None), part_key({"model_type": "llama"}, None)
    ('text_config', None)
    """
    model = MODELS.get(str(data.get("model_type")), {})
    if part is None and set(model) - _OF_PARTS:
        return None
    return part or next((key for key in TEXT_PARTS if key in model.get("parts", {})), None)


def part_inside(data: Mapping[str, JSON]) -> str | None:
    """Return the key of the only part of a part that has no RoPE itself; None for any other part.

    >>> part_inside({"model_type": "sam3_vision_model"}), part_inside({"model_type": "qwen2_vl"})
    ('backbone_config', None)
    """
    model = MODELS.get(str(data.get("model_type")), {})
    keys = tuple(model.get("parts", ()))
    return keys[0] if len(keys) == 1 and not set(model) - _OF_PARTS else None


def _as_type(data: Mapping[str, JSON], as_type: str) -> Mapping[str, JSON]:
    """Return the config with another model_type, and its parts with those of that model."""
    own = data.get("model_type")
    if as_type not in MODELS:
        raise ValueError(f"as_type {brief(as_type)} is not known{nearest(as_type, MODELS)}")
    if own in MODELS and own != as_type:
        raise ValueError(f"model_type {own!r} is known: leave out as_type, which is {as_type!r}")
    renamed = {**data, "model_type": as_type}
    of_parts = MODELS[as_type].get("parts", {})
    text = next((key for key in TEXT_PARTS if key in of_parts), None)
    if text and renamed.get(text) is None and (other := _other_text(data, of_parts)):
        renamed[text] = renamed.pop(other)  # InternVL and DeepSeek-VL have another key for it
    for key, kind in of_parts.items():
        inner = renamed.get(key)
        if isinstance(inner, Mapping) and inner.get("model_type") not in MODELS:
            renamed[key] = {**inner, "model_type": kind}
    return renamed


def _other_text(data: Mapping[str, JSON], of_parts: Mapping[str, str]) -> str | None:
    """Return the key of a text model that is none of the parts; None if there is none."""
    others = [key for key in TEXT_PARTS if key not in of_parts]
    return next((key for key in others if isinstance(data.get(key), Mapping)), None)


def _part(data: Mapping[str, JSON], part: str | None) -> tuple[Mapping[str, JSON], Model]:
    """Return the sub-config of a part, and the entry of its model in `MODELS`."""
    name = data.get("model_type")
    if name is None and "_class_name" in data:
        raise ArgumentNeededError(
            f"this is a config of diffusers, of {data['_class_name']!r}",
            "read it with rotary.configs.from_diffusers_config",
        )
    if name is None or name == "":  # a bare dict, or an empty PretrainedConfig
        if part is not None:
            raise ValueError(f"part {brief(part)} needs a config with model_type")
        return data, {"partial_rotary_factor": 1.0, "mscales": True, "alpha": True}
    if name in _WITHOUT_ROPE:
        raise NoRopeError(
            f"model_type {name!r} has no RoPE in transformers",
            f"if this model's own code rotates, {_ALTERNATIVES}",
        )
    if not isinstance(name, str) or name not in MODELS:
        raise UnknownModelError(
            f"model_type {name!r} is not known{nearest(name, MODELS)}", _ALTERNATIVES
        )
    model = MODELS[name]
    of_parts = model.get("parts", {})
    if part is None and (not of_parts or set(model) - _OF_PARTS):
        return with_entries(with_layer_types(data, model), model), model
    if not of_parts:
        raise ValueError(f"model_type {name!r} has no part {brief(part)}: it is one model")
    key = part_key(data, part)
    if key is None or key not in of_parts:
        raise ArgumentNeededError(
            f"model_type {name!r} has several parts" + ", none known as its text" * (part is None),
            f"pass part, one of {', '.join(of_parts)}; got {brief(part)}{nearest(part, of_parts)}",
        )
    inner = data.get(key)
    if inner is None and part:  # the defaults of its class
        inner = {}
    elif inner is None:  # an older config.json that is flat
        beside = model.get("beside_parts", ())
        defaults = {**HARMLESS, **MODELS[of_parts[key]]} if beside else {}
        unread = [
            each for each in data if _TEXT_KEYS.search(str(each))
            and each not in beside and data[each] not in (None, defaults.get(each))
        ]  # fmt: skip
        if other := _other_text(data, of_parts):
            unread = [other]
        if unread or model.get("own_text"):
            outside = f" but {unread[0]} outside of it, where it is not read" if unread else ""
            raise ValueError(f"model_type {name!r} needs {key}: the config has none{outside}")
        inner = {each: data[each] for each in data if each not in of_parts}
    if not isinstance(inner, Mapping):
        raise ValueError(f"{key} must be an object, got {brief(inner)}")
    if key in TEXT_PARTS and data.get(key):
        added = dict(model.get("text_defaults", {}))
        if inner.get("rope_scaling"):  # the class of the text takes it instead
            added.pop("rope_parameters", None)
        inner = {**added, **inner}
    if not inner.get("model_type") or inner["model_type"] == name:  # none, or that of the whole
        inner = {**inner, "model_type": of_parts[key]}
    return _part(inner, part_inside(inner))
