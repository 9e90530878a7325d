"""The config beside converted weights, which says their layout wherever a program reads it."""

import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import configs
from ..configs import from_hf_config
from ..configs.entries import TEXT_PARTS
from ..configs.hf import LAYOUT_MARK
from ..strict_json import parsed

CONFIG = "config.json"


class Unread(NamedTuple):
    """Weights in one layout, `weights`, of a `model` whose class in transformers has another."""

    model: str
    weights: str
    code: str


class Labels(NamedTuple):
    """The text of the config that was read, None if it was a dict; and the one to be written."""

    original: str | None
    written: bytes


def labels_of(
    data: Mapping[str, Any],
    text: str | None,
    source: str,
    target: str,
    before: Mapping[str, Any] | None,
) -> Labels:
    """What is to be in config.json beside the weights, byte for byte.

    data    the config of the source
    text    of its file; None if it was given as a dict
    before  the manifest of the folder, if it was converted: on the way back the text of the
            original is written again
    Raises ValueError where no key can say the layout, or a value is none of JSON.
    """
    changed = with_layout(data, target)
    original = (before or {}).get("config")
    if text is not None and changed == data:
        written = text.encode()
    elif isinstance(original, str) and _is_origin(
        parsed(original.encode(), CONFIG), data, source, target
    ):
        written = original.encode()
    else:
        written = _as_json(changed)
    return Labels(text, written)


def _as_json(data: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(data, indent=2).encode() + b"\n"
    except TypeError as error:
        raise ValueError(f"config: {error}; give a config.json or plain values") from error


def _is_origin(
    original: Mapping[str, Any], data: Mapping[str, Any], source: str, target: str
) -> bool:
    """Whether `data` is what became of an original in layout `target`, and nothing else changed."""
    return with_layout(original, source) == data and layouts_of(original) <= {target}


def with_layout(data: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """A config that says a layout where it is read: a key of the model, or `rope_traditional`.

    `rope_traditional` is the key of mlx-lm, which `from_hf_config` reads for every model; it stands
    only where the layout is not the model's own.
    Raises ValueError where no key can say it.

    >>> with_layout({"hidden_size": 64, "num_attention_heads": 2}, "interleaved")
    {'hidden_size': 64, 'num_attention_heads': 2, 'rope_traditional': True}
    """
    inner, found = _text_part(data), _text_model(data)
    own = found.model.get("layout", "half")
    said = _without_mark(inner)
    key = found.model.get("layout_key")
    if key and (key in said or layout != own):
        said[key] = layout == "interleaved"
    elif layout != own:
        said[LAYOUT_MARK] = layout == "interleaved"
    changed = _replaced(data, inner, said)
    if not layouts_of(changed) <= {layout}:
        name = found.data.get("model_type")
        raise ValueError(f"no key of {name!r} can say layout {layout!r}")
    return dict(changed)


def marked_layout(config: Any) -> str | None:
    """The layout that `rope_traditional` says the weights of the text model have; None without it.

    config  as in `from_hf_config`. Raises ValueError for a value that is not true or false.

    >>> marked_layout({"model_type": "llama", "rope_traditional": True})
    'interleaved'
    """
    inner = _text_part(configs.load(config))
    if LAYOUT_MARK not in inner:
        return None
    if not isinstance(inner[LAYOUT_MARK], bool):
        raise ValueError(f"{LAYOUT_MARK} must be true or false, got {inner[LAYOUT_MARK]!r}")
    return "interleaved" if inner[LAYOUT_MARK] else "half"


def unread_layout(config: Any) -> Unread | None:
    """The layout of the weights, where transformers loads them and rotates in another one.

    config  as in `from_hf_config`, whose errors are raised
    None for a config without `rope_traditional`, or where it says what the code does anyway.

    >>> unread_layout({"model_type": "gptj", "rope_traditional": False})
    Unread(model='gptj', weights='half', code='interleaved')
    """
    data = configs.load(config)
    weights = marked_layout(data)
    inner = _text_part(data)
    code = layouts_of(_replaced(data, inner, _without_mark(inner))) if weights else set()
    if not weights or len(code) != 1 or code == {weights}:
        return None
    name = _text_model(data).data.get("model_type")
    return Unread(name, weights, *code) if name else None


def edit_of(config: Any, layout: str) -> str:
    """What to change in a config.json, so that it says that its weights are in `layout`.

    >>> edit_of({"model_type": "gptj"}, "half")
    'write "rope_traditional": false into config.json'
    """
    before = configs.load(config)
    old, new = _text_part(before), _text_part(with_layout(before, layout))
    for key, value in new.items():
        if old.get(key) != value:
            return f'write "{key}": {json.dumps(value)} into config.json'
    return f"remove {LAYOUT_MARK} from config.json"


def warning_of(
    data: Mapping[str, Any], layout: str, base: tuple[str, tuple[str, ...]] | None
) -> str:
    """What will load weights that are now in `layout` and compute wrong results; "" for nothing.

    data  the config that is written beside them
    base  name and layouts of the code base that the names of the tensors are of, if it is known

    >>> warning_of({"model_type": "llama"}, "half", None)
    ''
    """
    if base is not None and layout not in base[1]:
        return (
            f"the code that reads {base[0]} rotates {base[1][0]}, and these weights are now "
            f"{layout}: it would compute wrong results without an error; load them in code that "
            f"rotates {layout}"
        )
    if base is not None:
        return ""
    unread = unread_layout(data)
    if unread:
        return (
            f"transformers will load these weights without an error and compute wrong results: "
            f"they are now {unread.weights}, and its {unread.model!r} rotates {unread.code}; call "
            f"rotary.patch(model) on the loaded model, or load them in code that rotates "
            f"{unread.weights}"
        )
    key = _text_model(data).model.get("layout_key")
    if key and _text_part(data).get(key) is False and data.get("auto_map"):
        return (
            f"transformers reads {key} of config.json, and the code that auto_map names may not: "
            "load the model without trust_remote_code"
        )
    return ""


def layouts_of(config: Any) -> set[str]:
    """The layouts that a config says the weights have, over all layer types that rotate.

    config  as in `from_hf_config`, whose errors are raised; keys that nothing reads are passed over

    >>> layouts_of({"model_type": "gptj"})
    {'interleaved'}
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = configs.layer_types(config) or (None,)
        specs = [from_hf_config(config, kind, strict=False) for kind in kinds]
    return {spec.layout for spec in specs if spec is not None}


def _text_model(data: Mapping[str, Any]) -> configs.Config:
    kinds = configs.layer_types(data) or (None,)
    return configs.choose(data, kinds[0])


def _without_mark(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != LAYOUT_MARK}


def _text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the text model, which are all keys where there is one part alone."""
    known = configs.MODELS.get(str(data.get("model_type")), {}).get("parts", {})
    key = next((key for key in TEXT_PARTS if key in known), None)
    inner = data.get(key) if key else None
    return _text_part(inner) if isinstance(inner, Mapping) else data


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """A nested object with one of its objects replaced."""
    if value is old:
        return new
    if isinstance(value, Mapping):
        return {key: _replaced(inner, old, new) for key, inner in value.items()}
    return value
