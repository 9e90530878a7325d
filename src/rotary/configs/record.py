"""`Config`: what a config says about one RoPE, the record that all other code takes."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..spec import is_whole
from ..strict_json import JSON
from .layers import DENSE_COUNT, MOST_LAYERS, Model, Rope, listed_layer_types, rope_parameters
from .values import length, whole_number

_NO_ROPE_EVERY = 4  # no_rope_layer_interval of SmolLM3, Llama 4 and Mistral Large 4; also of Muse
_DENSE_PATTERN = "prefix_dense_sliding_window_pattern"
_SIZES = ("head_dim", "qk_nope_head_dim", "whole_head_dim")  # a layer type may have its own


class Config(NamedTuple):
    """What a config says about one RoPE. `get` looks a value up in rope, then data, then model.

    rope        the rope parameters of the layer type
    data        the keys around them
    model       its entry in `MODELS`, with the defaults of the model's class
    layer_type  None if all layers are alike
    is_layer_rotated   False for a layer type without rotation
    file_type   model_type of the whole file, of which this may be one part
    """

    rope: Rope
    data: Mapping[str, JSON]
    model: Model
    layer_type: str | None
    is_layer_rotated: bool
    file_type: str = ""

    @property
    def model_type(self) -> str:
        """The model_type of the part; "" for a config without one."""
        return str(self.data.get("model_type") or "")

    @property
    def rotates(self) -> bool:
        """False for a layer type without rotation, and if a key of the model turns RoPE off."""
        for key, value in self.model.get("switch", {}).items():
            own = self.get(key)
            if value != (bool(own) if isinstance(value, bool) else own):
                return False
        if "null_base" in self.model and {**self.data, **self.rope}.get("rope_theta", 1) is None:
            return False
        types = listed_layer_types(self.data)
        own = [layer for layer, kind in enumerate(types) if kind == self.layer_type]
        return self.is_layer_rotated and (not own or any(map(self.rotates_layer, own)))

    def rotates_layer(self, layer: int) -> bool:
        """Whether the model rotates in a layer, as far as its config says; `layer` counts from 0.

        >>> config = Config({}, {}, {"weights": {"without_rotation": "no_rope_layers"}}, None, True)
        >>> [config.rotates_layer(layer) for layer in range(5)]
        [True, True, True, False, True]
        """
        rule, data = self.model.get("weights", {}).get("without_rotation"), self.data
        if rule == "no_rope_layers":
            if flags := data.get(rule):  # 1: rotates
                return layer >= len(flags) or bool(flags[layer])
            name = "no_rope_layer_interval"
            return (layer + 1) % whole_number(name, data.get(name) or _NO_ROPE_EVERY, 1) != 0
        if rule == "layer_rope_theta" and not data.get(rule):  # its entries are those of `ropes`
            count = length("num_hidden_layers", data.get("num_hidden_layers"))
            return count is None or (count - 1 - layer) % _NO_ROPE_EVERY != 0
        types = listed_layer_types(data)
        if layer >= len(types) or types[layer] != self.type_without_rotation:
            return True
        if rule != "full_attention of experts" or data.get(_DENSE_PATTERN, 1) != 1:
            return False
        kinds = data.get("mlp_layer_types")  # dense layers rotate
        if kinds:
            return layer < len(kinds) and kinds[layer] == "dense"
        return layer < whole_number(DENSE_COUNT, data.get(DENSE_COUNT) or 0, 0)

    @property
    def type_without_rotation(self) -> str | None:
        """The layer type that is not rotated, in models that rotate only layers with a window.

        All other layers have the same RoPE, so the types have no entries of their own.
        """
        rule = self.model.get("weights", {}).get("without_rotation") or ""
        if rule == "full_attention beside windows" and self.data.get("sliding_window", 1) is None:
            return None
        return "full_attention" if rule.startswith("full_attention") else None

    @property
    def layers_without_rotation(self) -> str:
        """How many layers take no rotation, and which, in words; "" if all rotate.

        >>> model = {"weights": {"without_rotation": "no_rope_layers"}}
        >>> Config({}, {"num_hidden_layers": 36}, model, None, True).layers_without_rotation
        '9 of 36 layers take no rotation: every fourth'
        """
        lists = [self.data.get(name) or () for name in ("layer_types", "no_rope_layers")]
        number = length("num_hidden_layers", self.data.get("num_hidden_layers"))
        count = max(map(len, lists)) or min(number or 0, MOST_LAYERS)
        still = sum(not self.rotates_layer(layer) for layer in range(count))
        names = ("no_rope_layers", "no_rope_layer_interval")
        is_from_last = "one_base" in self.model
        every = "every fourth, counted from the last" if is_from_last else "every fourth"
        key = next((name for name in names if self.data.get(name)), every)
        kind = self.type_without_rotation
        which = f"type {kind}" if kind else key
        return f"{still} of {count} layers take no rotation: {which}" if still else ""

    @property
    def window(self) -> int | None:
        """How far back the rotated layers see, in tokens; None if one of them has no window."""
        key = self.model.get("windowed")
        sides = self.data.get("local_attention")  # of ModernBERT: half of it to each side
        window = sides // 2 if is_whole(sides) else self.data.get(key or "sliding_window")
        types = listed_layer_types(self.data)
        rotated = {kind for layer, kind in enumerate(types) if self.rotates_layer(layer)}
        kinds = {self.layer_type} if self.layer_type else rotated
        has_window = all(str(kind).startswith(("sliding", "chunked")) for kind in kinds)
        if not kinds:
            has_window = bool(key or self.type_without_rotation)
        return window if has_window and is_whole(window) and window > 0 else None

    @property
    def rope_type(self) -> str:
        """The name of the rope type as the file has it, by default "default"."""
        names = [self.rope[key] for key in ("rope_type", "type") if key in self.rope] or ["default"]
        name = next(filter(None, names), names[0])
        if not name or not isinstance(name, str):
            raise ValueError(f'rope_type must be a name such as "default", got {name!r}')
        return name

    @property
    def base(self) -> float:
        """The base, rope_theta; by default 10,000."""
        base = self.get("rope_theta", 10_000.0)
        if isinstance(base, bool) or not isinstance(base, int | float):
            raise ValueError(f"rope_theta must be a number, got {base!r}")
        if not 1 <= base < math.inf:
            raise ValueError(f"rope_theta must be finite and >= 1, got {base!r}")
        return base

    @property
    def head_dim(self) -> int:
        """Channels of a head, as far as RoPE sees them (DeepSeek: qk_rope_head_dim)."""
        name = self.model.get("names", {}).get("head_dim", "head_dim")
        if (own := self._in_own_layers(name)) is not None:
            return whole_number(name, own)
        if (rest := self._beside_nope_head_dim) is not None:
            return rest
        self._check_plain_head_dim(name)
        # null means hidden_size / num_attention_heads, unlike a missing key: that has a default
        is_null = name in self.data and self.data[name] is None
        head_dim = None if is_null else self.get("head_dim")
        if head_dim is not None:
            return whole_number("head_dim", head_dim)
        if "head_dim_of" in self.model:
            whole, *others = (whole_number(n, self.get(n)) for n in self.model["head_dim_of"])
            return whole // math.prod(others) if all(others) else 0
        if (sizes := self._width_and_heads) is None:
            raise ValueError("the config needs head_dim, or hidden_size and num_attention_heads")
        hidden, heads = sizes
        if hidden % heads:
            raise ValueError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
                "give head_dim"
            )
        return hidden // heads

    @property
    def _beside_nope_head_dim(self) -> int | None:
        """What qk_nope_head_dim leaves of a head, where a layer type has a key for the whole."""
        names = self.model.get("layer_names", {}).get(self.layer_type, {})
        whole = self.get("whole_head_dim") if "whole_head_dim" in names else None
        if whole is None or self.data.get(names["head_dim"]) is not None:
            return None
        return whole_number(names["whole_head_dim"], whole) - self.nope_head_dim

    @property
    def _width_and_heads(self) -> tuple[int, int] | None:
        """hidden_size and num_attention_heads if both are whole and there are heads, else None."""
        hidden, heads = self.get("hidden_size"), self.get("num_attention_heads")
        return (hidden, heads) if is_whole(hidden) and is_whole(heads) and heads > 0 else None

    def _check_plain_head_dim(self, name: str) -> None:
        """Refuse a key head_dim that disagrees with `name`, the key that the code reads.

        `plain_head_dim` says what the model does with head_dim. "wins": the class stores `name`
        as head_dim, so head_dim replaces it. "divided": the code divides hidden_size by the heads.
        "with the rest": head_dim also counts the channels that are not rotated.
        """
        data, rule = self.data, self.model.get("plain_head_dim")
        plain, sizes = data.get("head_dim"), self._width_and_heads
        divided = sizes[0] // sizes[1] if sizes and rule == "divided" else plain
        if plain is not None and sizes and plain != divided:
            raise ValueError(
                f"head_dim {plain!r} is not read by model_type {self.model_type!r}, which "
                f"divides hidden_size {sizes[0]} by {sizes[1]}"
            )
        if rule == "wins" and name != "head_dim" and "head_dim" in data:
            named = data.get(name, self.model["head_dim"])
            if plain != named:
                raise ValueError(
                    f"head_dim {plain!r} and {name} {named!r} are both given; leave head_dim out"
                )
        if rule == "with the rest":
            named = whole_number(name, data.get(name, self.model["head_dim"]))
            rest = data.get("qk_nope_head_dim", self.model["qk_nope_head_dim"])
            whole = named + whole_number("qk_nope_head_dim", rest)
            share = rope_parameters(data).get("partial_rotary_factor")
            if share is None and not data.get("rope_scaling"):
                share = named / max(whole, 1)
            plain = data.get("head_dim", whole)
            if not isinstance(share, float) or not is_whole(plain) or int(plain * share) != named:
                raise ValueError(
                    f"head_dim {plain!r}, {name} {named}, qk_nope_head_dim {rest} and "
                    f"partial_rotary_factor {share!r} disagree: head_dim must be the sum, and the "
                    f"factor, in rope_parameters, the part of {name} in it"
                )

    @property
    def nope_head_dim(self) -> int:
        """Channels of a head beside `head_dim`, not rotated: qk_nope_head_dim of latent attention.

        >>> Config({}, {}, {"qk_nope_head_dim": 128}, None, True).nope_head_dim
        128
        """
        name = "qk_nope_head_dim"
        if name not in self.model:  # the code of the model does not read it
            return 0
        own = self._in_own_layers(name)
        return whole_number(name, self.get(name) if own is None else own, 0)

    def _in_own_layers(self, name: str) -> JSON:
        """Return the value of a key in the first layer of this type that has its own, or None.

        A file with per_layer_config has the sizes of all layers there; one that is not there is
        that of the whole model, and the names and defaults of layer types are not read.
        """
        per_layer = self.data.get("per_layer_config") or {}
        own = {int(layer): values for layer, values in per_layer.items()}  # a key is "2", or "02"
        types = listed_layer_types(self.data)
        if self.layer_type and not types and any(name in values for values in own.values()):
            raise ValueError(
                f"per_layer_config has {name} for single layers, and the config has no layer_types "
                "that say of which type they are; write layer_types"
            )
        kinds = enumerate(types)
        found = (own.get(layer, {}).get(name) for layer, kind in kinds if kind == self.layer_type)
        return next((value for value in found if value is not None), None)

    @property
    def partial_rotary_factor(self) -> float:
        """partial_rotary_factor of the file or the model's class, read by the code or not."""
        name = "partial_rotary_factor"
        # null: the whole head
        is_null = name in self._names(name) and self.data.get(name, name) is None
        share = self.get(name, 1.0) if not is_null or name in self.rope else 1.0
        if self.model.get("partial_rotary_factor", share) is None:  # the class has it, unused
            return 1.0
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"partial_rotary_factor must be in (0, 1], got {share!r}")
        return share

    @property
    def reads_rotary_dim(self) -> bool:
        """True if the model's code reads the number of rotated channels, under any name."""
        return "rotary_dim" in {**self.model, **self.model.get("names", {})}

    @property
    def reads_partial_rotary_factor(self) -> bool:
        """True if the model's code reads partial_rotary_factor; Llama's ignores it."""
        return self.reads_rotary_dim or "partial_rotary_factor" in self.model

    @property
    def rotary_dim(self) -> int:
        """How many channels the code rotates, by `partial_rotary_factor` if it reads that."""
        if self.data.get("rope_dim") is not None and not self.model_type:  # vLLM's name of it
            return whole_number("rope_dim", self.data["rope_dim"])
        width = self.get("rotary_dim") if self.reads_rotary_dim else None
        if width is not None and self.rope.get("partial_rotary_factor") is None:
            if (
                "partial_rotary_factor" in self.data
                and int(self.head_dim * self.partial_rotary_factor) != width
            ):
                raise ValueError(
                    f"rotary_dim {width!r} and partial_rotary_factor "
                    f"{self.data['partial_rotary_factor']!r} of head_dim {self.head_dim} disagree; "
                    "keep one"
                )
            return whole_number("rotary_dim", width)
        share = self.partial_rotary_factor if self.reads_partial_rotary_factor else 1.0
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
        """max_position_embeddings; the one in the rope parameters counts last."""
        name = "max_position_embeddings"
        beside = (self.data.get(each) for each in self._names(name))
        values = (*beside, self.model.get(name), self.rope.get(name))
        return length(name, next((value for value in values if value is not None), None))

    @property
    def trained(self) -> int | None:
        """original_max_position_embeddings, or `context` if the config has none."""
        value = self.written_trained
        return self.context if value is None else value

    @property
    def written_trained(self) -> int | None:
        """original_max_position_embeddings of the file or of the model's class, else None."""
        name = "original_max_position_embeddings"
        # Phi-3 has it beside the rope parameters, and it wins where one object serves all layers
        sources = (self.rope,) if self.is_by_layer_type else (self.data, self.model, self.rope)
        values = (each[name] for each in sources if each.get(name) is not None)
        return length(name, next(values, None))

    @property
    def is_by_layer_type(self) -> bool:
        """True if each layer type has rope parameters of its own, in the file or in the class."""
        entries = rope_parameters(self.data).values()
        return "layers" in self.model or any(isinstance(each, Mapping) for each in entries)

    @property
    def truncate(self) -> bool:
        """Whether YaRN's ramp is rounded: by layer type read beside the entries, not in them.

        >>> entry = {"rope_type": "yarn", "truncate": False}
        >>> Config(entry, {"rope_scaling": entry}, {}, None, True).truncate
        False
        >>> Config(entry, {"rope_parameters": {"full": entry}}, {}, "full", True).truncate
        True
        """
        written = rope_parameters(self.data) if self.is_by_layer_type else self.rope
        is_flat = self.is_by_layer_type and self.layer_type not in written
        return is_flat or bool(written.get("truncate", True))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value by rotary's name for it, or `default` if no source has it."""
        layer = self.model.get("layers", {}).get(self.layer_type) or {}
        # `ropes` uses the other values of a default entry, all or none
        if name != "rope_theta" and (name not in _SIZES or "per_layer_config" in self.data):
            layer = {}
        sources = (self.rope.get(name), *(self.data.get(each) for each in self._names(name)))
        if name == "rope_theta" and (fixed := self.model.get("fixed_base")):
            sources = (self.data.get(fixed),) if isinstance(fixed, str) else ()
        for value in (*sources, layer.get(name), self.model.get(name)):
            if value is not None:
                return value
        return default

    def _names(self, name: str) -> tuple[str, ...]:
        """Return the keys beside the rope parameters under which the model's code reads `name`."""
        alias = self.model.get("layer_names", {}).get(self.layer_type, {}).get(name)
        if alias and not (name in _SIZES and "per_layer_config" in self.data):
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

        >>> Config({}, {}, {"unread": ["rope_theta"]}, None, True).unread
        ('rope_theta',)
        """
        alone = () if rope_parameters(self.data) else self.model.get("unread_alone", ())
        return tuple(dict.fromkeys((*self.model.get("unread", ()), *alone)))

    @property
    def unread_base(self) -> float | None:
        """A rope_theta of the file that the model's code does not read, or None.

        >>> Config({}, {"rope_theta": 5e5}, {"fixed_base": True}, None, True).unread_base
        500000.0
        """
        inside, outside = self.rope.get("rope_theta"), self.data.get("rope_theta")
        if self.model.get("fixed_base"):
            return inside if inside is not None else outside
        return None if inside is not None or self._names("rope_theta") else outside
