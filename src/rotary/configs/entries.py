"""Which config is meant: the file, the part of a model, the model, the entry of a layer type.

`choose` reads a config once into one `Config`; everything else takes that: `hf.py` makes a `Rotary`
of it, `rotary.programs` what other programs compute. Only data is read: nothing in a model folder
is ever executed, and transformers is not imported.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..spec import nearest
from .files import load
from .layers import Model, Rope, listed_layer_types, rope_parameters, ropes
from .values import is_whole, length, whole_number

# model_type -> what deviates from Llama: half layout, whole head rotated, one axis, base 10 000.
# Written by tools/make_models.py; keys:
#   hidden_size, num_attention_heads, head_dim, max_position_embeddings, rope_theta,
#   rotary_dim, rope              what transformers takes where the config is silent
#   partial_rotary_factor         the same; where it is missing the code ignores the key
#   names                         our name -> the name the key has in this config
#   parts                         key of a sub-config -> its model_type
#   layers, layer_names           the same for each layer type, where rope_parameters is nested
#   scaled_layers                 the layer types that a flat rope_scaling is meant for
#   flat                          a flat rope_parameters is read like that rope_scaling
#   nested                        layer types are read, and the class names none
#   lists                         the keys that say by layer which base or scaling it has
#   fixed_base                    the code has its own base and reads none
#   plain_head_dim                where head_dim has another name: what head_dim is beside it;
#                                 "divided" where the code divides hidden_size, whatever it says
#   unread, unread_alone          keys that the code does not read: never, or where the file has no
#                                 rope parameters
#   needed                        rope parameters whose default holds only where the file has none
#   layout, layout_key, out_layout, sign, slice    as in `Rotary`; layout_key false means half
#   mrope, mrope_section          how three axes are dealt out, and the default counts
#   axes, num_axes, ladder        vision towers: order of the axes, and whose frequencies they have
#   head_dim_of                   a size and what it is divided by
#   switch                        key that turns RoPE off where it is false
#   other                         keys of this config that look like RoPE and have no bearing
#   mscales                       the code reads short_mscale and long_mscale
#   alpha                         rope type dynamic with alpha is a fixed base
#   scaled_defaults               what such a rope_scaling has beside its own keys, if it is yarn
#   scaled_unread                 keys of such a rope_scaling that the code replaces
#   only                          the rope types that the code reads, where not all are right
#   not_one                       why it is not one rotation
#   parts                         key and model_type of each part of a model of several
#   beside_parts                  keys that are read beside the parts where a file has no text
#   own_text                      the class, where a file has no text, makes another than its part's
MODELS: dict[str, Model] = json.loads(Path(__file__).with_name("models.json").read_text())
# where the text of a model of several parts is, if no part is asked for
TEXT_PARTS = (
    "text_config", "thinker_config", "llm_config", "language_config", "decoder_config", "decoder",
)  # fmt: skip
_TEXT_KEYS = re.compile(
    "rope|rotary|hidden_size|num_attention_heads|head_dim|max_position|layer_types"
)
# names in the layer_types of a config whose layers do not differ in their RoPE; transformers 5.23,
# configuration_utils.py, with the names of older files
LAYERS_WITH_ROPE = frozenset({
    "full_attention", "sliding_attention", "chunked_attention", "window_attention", "attention",
    "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", "hybrid",
    "hybrid_sliding", "reference_sliding_attention", "minimax_m3_sparse",
})  # fmt: skip
LAYERS_WITHOUT_ROPE = frozenset({"conv", "linear_attention", "mamba", "moe", "dense", "sparse"})


class Config(NamedTuple):
    """What a config says about one RoPE, read once. A value is looked up in rope, data, model.

    rope        the rope parameters of the layer type
    data        the keys around them
    model       what `MODELS` knows: the values of the model's class where the file is silent
    layer_type  None where all layers are alike
    is_layer_rotated   False for a layer type without rotation
    file_type   model_type of the whole file, of which this may be one part
    """

    rope: Rope
    data: Mapping[str, Any]
    model: Model
    layer_type: str | None
    is_layer_rotated: bool
    file_type: str = ""

    @property
    def model_type(self) -> str:
        """The model type of the part; "" for a config that has none."""
        return str(self.data.get("model_type") or "")

    @property
    def rotates(self) -> bool:
        """False for a layer type without rotation, and where a key of the model turns it off."""
        return self.is_layer_rotated and self.get(self.model.get("switch", ""), True) is not False

    @property
    def rope_type(self) -> str:
        """The name of the rope type as the file has it, "default" where it is silent."""
        name = self.rope.get("rope_type") or self.rope.get("type") or "default"
        if not isinstance(name, str):
            raise ValueError(f"rope_type must be a name, got {name!r}")
        return name

    @property
    def base(self) -> float:
        """rope_theta."""
        base = self.get("rope_theta", 10_000.0)
        if isinstance(base, bool) or not isinstance(base, int | float):
            raise ValueError(f"rope_theta must be a number, got {base!r}")
        return base

    @property
    def head_dim(self) -> int:
        """Channels of a head, as far as RoPE sees them (DeepSeek: qk_rope_head_dim)."""
        name = self.model.get("names", {}).get("head_dim", "head_dim")
        per_layer = self.data.get("per_layer_config") or {}
        own = {int(layer): values for layer, values in per_layer.items()}  # "2", or "02" of many
        for layer, kind in enumerate(self.data.get("layer_types") or ()):
            if kind == self.layer_type and own.get(layer, {}).get(name) is not None:
                return whole_number(name, own[layer][name])
        is_null = name in self.data and self.data[name] is None  # not silent: the code divides
        self._check_plain_head_dim(name)
        head_dim = None if is_null else self.get("head_dim")
        if head_dim is not None:
            return whole_number("head_dim", head_dim)
        if "head_dim_of" in self.model:
            whole, *others = (whole_number(n, self.get(n)) for n in self.model["head_dim_of"])
            return whole // math.prod(others) if all(others) else 0
        hidden, heads = self.get("hidden_size"), self.get("num_attention_heads")
        if not is_whole(hidden) or not is_whole(heads) or heads < 1:
            raise ValueError("the config needs head_dim, or hidden_size and num_attention_heads")
        if hidden % heads:
            raise ValueError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
                "give head_dim"
            )
        return hidden // heads

    def _check_plain_head_dim(self, name: str) -> None:
        """Refuse a key head_dim beside `name`, the key that is meant, where it would change it."""
        rule = self.model.get("plain_head_dim")
        if rule == "wins" and name != "head_dim" and "head_dim" in self.data:
            plain, named = self.data["head_dim"], self.data.get(name, self.model["head_dim"])
            if plain != named:
                raise ValueError(
                    f"head_dim {plain!r} is beside {name}, which is {named!r}; leave head_dim out"
                )
        whole, heads = self.get("hidden_size"), self.get("num_attention_heads")
        if rule == "divided" and is_whole(whole) and is_whole(heads) and heads > 0:
            plain = self.data.get("head_dim")
            if plain is not None and plain != whole // heads:
                raise ValueError(
                    f"head_dim {plain!r} is not read by model_type {self.model_type!r}, which "
                    f"divides hidden_size {whole} by {heads}"
                )
        if rule == "with the rest":  # the width that is rotated is a share of both together
            named = whole_number(name, self.data.get(name, self.model["head_dim"]))
            rest = self.data.get("qk_nope_head_dim", self.model["qk_nope_head_dim"])
            whole = named + whole_number("qk_nope_head_dim", rest)
            share = rope_parameters(self.data).get("partial_rotary_factor")
            if share is None and not self.data.get("rope_scaling"):
                share = named / max(whole, 1)
            both = self.data.get("head_dim", whole)
            if not isinstance(share, float) or not is_whole(both) or int(both * share) != named:
                raise ValueError(
                    f"head_dim {both!r}, {name} {named}, qk_nope_head_dim {rest} and "
                    f"partial_rotary_factor {share!r} disagree: head_dim must be the sum, and the "
                    f"factor, in rope_parameters, the part of {name} in it"
                )

    @property
    def share(self) -> float:
        """partial_rotary_factor of the file or the model's class, read by the code or not."""
        name = "partial_rotary_factor"
        is_null = name in self._names(name) and self.data.get(name, name) is None  # a whole head
        share = self.get(name, 1.0) if not is_null or name in self.rope else 1.0
        if self.model.get("partial_rotary_factor", share) is None:  # there, and without a bearing
            return 1.0
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"partial_rotary_factor must be in (0, 1], got {share!r}")
        return share

    @property
    def reads_width(self) -> bool:
        """True if the model's code reads a number of channels, rotary_dim or its name for it."""
        return "rotary_dim" in {**self.model, **self.model.get("names", {})}

    @property
    def reads_share(self) -> bool:
        """True if the model's code reads partial_rotary_factor; Llama's ignores it."""
        return self.reads_width or "partial_rotary_factor" in self.model

    @property
    def rotary_dim(self) -> int:
        """How many channels the model's code rotates; `share` of the head where it reads that."""
        if self.data.get("rope_dim") is not None and not self.model_type:  # vLLM's name of it
            return whole_number("rope_dim", self.data["rope_dim"])
        width = self.get("rotary_dim") if self.reads_width else None
        if width is not None and self.rope.get("partial_rotary_factor") is None:
            if "partial_rotary_factor" in self.data and int(self.head_dim * self.share) != width:
                raise ValueError(
                    f"rotary_dim {width!r} and partial_rotary_factor "
                    f"{self.data['partial_rotary_factor']!r} of head_dim {self.head_dim} disagree; "
                    "keep one"
                )
            return whole_number("rotary_dim", width)
        share = self.share if self.reads_share else 1.0
        rotary_dim = int(self.head_dim * share)
        if rotary_dim % 2 and rotary_dim < self.head_dim:
            raise ValueError(
                f"partial_rotary_factor {share} of head_dim {self.head_dim} is {rotary_dim} "
                f"channels, an odd number; transformers rounds up to {rotary_dim + 1}: build "
                f"Rotary(head_dim={self.head_dim}, rotary_dim={rotary_dim + 1}, ...) if that is "
                "meant"
            )
        return rotary_dim

    @property
    def context(self) -> int | None:
        """max_position_embeddings; that among the rope parameters only if there is no other."""
        name = "max_position_embeddings"
        beside = (self.data.get(each) for each in self._names(name))
        values = (*beside, self.model.get(name), self.rope.get(name))
        return length(name, next((value for value in values if value is not None), None))

    @property
    def trained(self) -> int | None:
        """original_max_position_embeddings, or `context` where the config has none."""
        name = "original_max_position_embeddings"
        # Phi-3 has it outside the rope parameters, and it wins
        for source in (self.data, self.model, self.rope):
            if source.get(name) is not None:
                return length(name, source[name])
        return self.context

    def get(self, name: str, default: Any = None) -> Any:
        """The value under our name, whatever this config calls it; `default` if all are silent."""
        layer = self.model.get("layers", {}).get(self.layer_type) or {}
        if name not in ("rope_theta", "head_dim"):
            layer = {}  # the rest of a default is taken whole, by `ropes`, or not at all
        sources = (self.rope.get(name), *(self.data.get(each) for each in self._names(name)))
        if name == "rope_theta" and self.model.get("fixed_base"):
            sources = ()
        for value in (*sources, layer.get(name), self.model.get(name)):
            if value is not None:
                return value
        return default

    def _names(self, name: str) -> tuple[str, ...]:
        """The keys of the file, beside the rope parameters, that this model's code reads."""
        alias = self.model.get("layer_names", {}).get(self.layer_type, {}).get(name)
        if alias:
            return (alias,)
        if name == "rope_theta" and "layers" in self.model:
            return ()
        alias = self.model.get("names", {}).get(name, name)
        rule = self.model.get("plain_head_dim")
        is_alone = name == "head_dim" and rule in ("ignored", "with the rest")
        names = (alias,) if is_alone else (alias, name)
        return tuple(each for each in names if each not in self.unread)

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys beside the rope parameters that the model's code does not read.

        >>> choose({"model_type": "gpt_neox"}).unread
        ('rope_theta', 'partial_rotary_factor')
        """
        alone = () if rope_parameters(self.data) else self.model.get("unread_alone", ())
        return tuple(dict.fromkeys((*self.model.get("unread", ()), *alone)))

    @property
    def unread_base(self) -> float | None:
        """A rope_theta of the file that the model's code does not read, or None.

        >>> choose({"model_type": "esm", "rope_theta": 5e5}).unread_base
        500000.0
        """
        inside, outside = self.rope.get("rope_theta"), self.data.get("rope_theta")
        if self.model.get("fixed_base"):
            return inside if inside is not None else outside
        return None if inside is not None or self._names("rope_theta") else outside


def choose(config: Any, layer_type: str | None = None, part: str | None = None) -> Config:
    """The config of one part and layer type; arguments and errors as in `from_hf_config`.

    >>> choose({"model_type": "gemma3_text"}, "sliding_attention").get("rope_theta")
    10000.0
    """
    whole = load(config)
    data, model = _part(whole, part)
    found = ropes(data, model)
    if None not in found and layer_type not in found:
        known = [str(kind) for kind in found]
        raise ValueError(
            f"rope_parameters is nested by layer type; pass layer_type, one of "
            f"{', '.join(known)}; got {layer_type!r}{nearest(layer_type, known)}"
        )
    rope = found[None if None in found else layer_type]  # None: all layers are alike
    if None in found and layer_type is not None:
        if layer_type not in listed_layer_types(data):
            raise ValueError(
                f"layer_type {layer_type!r} is not one of this model's: all its layers have one "
                "RoPE; leave layer_type out"
            )
        if layer_type in LAYERS_WITHOUT_ROPE:
            rope = None
        elif layer_type not in LAYERS_WITH_ROPE:
            raise ValueError(
                f"whether layers of type {layer_type!r} have a RoPE is not known; leave layer_type "
                "out for the RoPE of those that have"
            )
    file_type = str(whole.get("model_type") or "")
    return Config(rope or {}, data, model, layer_type, rope is not None, file_type)


def layer_types(config: Any, *, part: str | None = None) -> tuple[str, ...]:
    """The layer types that have entries of their own; empty where all layers are alike.

    >>> layer_types({"model_type": "gemma3_text"})
    ('full_attention', 'sliding_attention')
    """
    return tuple(kind for kind in ropes(*_part(load(config), part)) if kind is not None)


def parts(config: Any) -> tuple[str, ...]:
    """The parts of a model of several, whose RoPE can be asked for; empty for a model of one.

    >>> parts({"model_type": "qwen2_vl"})
    ('vision_config', 'text_config')
    """
    return tuple(MODELS.get(str(load(config).get("model_type")), {}).get("parts", ()))


def _part(data: Mapping[str, Any], part: str | None) -> tuple[Mapping[str, Any], Model]:
    """The sub-config that is meant, and what is known of its model."""
    name = data.get("model_type")
    if name is None or name == "":  # a bare dict, or an empty PretrainedConfig
        if part is not None:
            raise ValueError(f"part {part!r} of a config without model_type")
        return data, {"partial_rotary_factor": 1.0, "mscales": True, "alpha": True}
    if not isinstance(name, str) or name not in MODELS:
        raise ValueError(f"model_type {name!r} is not known{nearest(name, MODELS)}")
    model = MODELS[name]
    known = model.get("parts", {})
    if part is None and set(model) - {"parts", "beside_parts", "own_text"}:
        return data, model
    if not known:
        if part is not None:
            raise ValueError(f"model_type {name!r} has no part {part!r}: it is one model")
        return data, model
    key = part or next((key for key in TEXT_PARTS if key in known), None)
    if key is None or key not in known:
        raise ValueError(
            f"model_type {name!r} has several parts; pass part, one of {', '.join(known)}; "
            f"got {part!r}{nearest(part, known)}"
        )
    inner = data.get(key)
    if inner is None:  # an older config.json that is flat
        beside = () if part else model.get("beside_parts", ())
        silent = MODELS[known[key]] if beside else {}
        unread = [
            each for each in data if part is None and _TEXT_KEYS.search(str(each))
            and each not in beside and data[each] not in (None, silent.get(each))
        ]  # fmt: skip
        if unread or (part is None and model.get("own_text")):
            outside = f" but {unread[0]} outside of it, where it is not read" if unread else ""
            raise ValueError(f"model_type {name!r} needs {key}: the config has none{outside}")
        inner = {} if part else {each: data[each] for each in data if each not in known}
        inner = {**inner, "model_type": known[key]}
    if not isinstance(inner, Mapping):
        raise ValueError(f"{key} must be an object, got {inner!r}")
    inner = {**inner, "model_type": inner.get("model_type") or known[key]}
    if inner["model_type"] == name:  # the part bears the name of the whole
        inner["model_type"] = known[key]
    return _part(inner, None)
