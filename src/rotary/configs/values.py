"""Checks the values of a config, before anything of their size is allocated."""

from collections.abc import Callable, Mapping

from ..spec import MAX_HEAD_DIM, is_whole
from ..strict_json import JSON


def whole_number(name: str, value: JSON, least: int | None = None) -> int:
    """Return `value` if it is a whole number and at least `least`; else ValueError with its name.

    >>> whole_number("head_dim", 64)
    64
    """
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    return int(value)


def length(name: str, value: JSON) -> int | None:
    """Return `value` if it is None or a whole number below 2^63; else ValueError with its name.

    >>> length("max_position_embeddings", None)
    """
    if value is not None and whole_number(name, value) >= 2**63:
        raise ValueError(f"{name} must be less than 2^63, as positions are, got {value}")
    return None if value is None else int(value)


# key -> what its list must hold
_SHAPES: dict[str, tuple[str, Callable[[JSON], bool]]] = {
    "layer_types": ("a list of names", lambda value: isinstance(value, str)),
    "mlp_layer_types": ("a list of names", lambda value: isinstance(value, str)),
    "layer_rope_theta": (
        "a list of numbers, null where a layer has no RoPE",
        lambda value: value is None or is_whole(value) or isinstance(value, float),
    ),
    "no_rope_layers": ("a list of 0 and 1", lambda value: value in (0, 1)),
    "rope_scaling_layers": ("a list of layer numbers", is_whole),
    "mrope_section": (
        "a list of 2 to 8 numbers of pairs",
        lambda value: is_whole(value) and 0 <= value <= MAX_HEAD_DIM,
    ),
}
# sizes that are whole numbers in every config, or lists with one for each layer
_SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
    "max_position_embeddings",
)  # fmt: skip


def check_shapes(keys: Mapping[str, JSON]) -> None:
    """Refuse a list, an object or a size of another type than its key needs.

    >>> check_shapes({"layer_types": 3})
    Traceback (most recent call last):
    ValueError: layer_types must be a list of names, got 3
    """
    for name, (words, is_item) in _SHAPES.items():
        value = keys.get(name)
        if value is None:
            continue
        is_list = isinstance(value, list | tuple) and all(map(is_item, value))
        if not is_list or (name == "mrope_section" and not 2 <= len(value) <= 8):
            raise ValueError(f"{name} must be {words}, got {value!r}")
    for name in _SIZES:
        if isinstance(keys.get(name), bool | float | str):
            raise ValueError(f"{name} must be a whole number, got {keys[name]!r}")
    layers = keys.get("per_layer_config")
    if layers and not (
        isinstance(layers, Mapping)
        and all(str(layer).isdecimal() for layer in layers)
        and all(isinstance(each, Mapping) for each in layers.values())
    ):
        raise ValueError(f"per_layer_config must hold an object for each layer number: {layers!r}")
