"""The keys of config.json that say in which layout weights are, wherever a program reads it."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..configs import MODELS, load
from ..configs.entries import TEXT_PARTS
from ..configs.hf import LAYOUT_MARK
from ..strict_json import JSON, parsed
from .files import CONFIG, ConfigFile


class Unread(NamedTuple):
    """Weights in one layout, `weights`, of a `model` whose class in transformers has another."""

    model: str
    weights: str
    code: str


def written_config(config: ConfigFile, changed: Mapping[str, JSON], original: Any = None) -> bytes:
    """The config.json to be written beside the weights, byte for byte.

    changed   the config with the new layout, as `with_layout` gives it
    original  text of the config before an earlier conversion, or None: on the way back it is
              written again, unless something else was changed
    Raises ValueError for a value that is none of JSON.
    """
    if config.text is not None and changed == config.data:
        return config.text.encode()
    if isinstance(original, str):
        before = parsed(original.encode(), CONFIG)
        is_right = layout_of(before) == layout_of(changed)
        if is_right and with_layout(before, layout_of(config.data)) == config.data:
            return original.encode()
    try:
        return json.dumps(changed, indent=2).encode() + b"\n"
    except TypeError as error:
        raise ValueError(f"config: {error}; give a config.json or plain values") from error


def with_layout(data: Mapping[str, JSON], layout: str) -> dict[str, JSON]:
    """A config that says a layout where it is read: a key of the model, or `rope_traditional`.

    `rope_traditional` is the key of mlx-lm, which `from_hf_config` reads for every model; it stands
    only where the layout is not the model's own.

    >>> with_layout({"hidden_size": 64, "num_attention_heads": 2}, "interleaved")
    {'hidden_size': 64, 'num_attention_heads': 2, 'rope_traditional': True}
    """
    text, name = _text_part(data)
    keys, model = _without_mark(text), MODELS.get(name, {})
    key = model.get("layout_key")
    if layout != model.get("layout", "half") or key in keys:
        keys[key or LAYOUT_MARK] = layout == "interleaved"
    changed: dict[str, JSON] = _replaced(data, text, keys)
    return changed


def layout_of(config: Any) -> str:
    """The layout that a config says the weights of the text model have.

    config  as in `from_hf_config`. Raises ValueError for a model that is not known.

    >>> layout_of({"model_type": "gptj"})
    'interleaved'
    """
    text, name = _text_part(load(config))
    if name and name not in MODELS:
        raise ValueError(f"model_type {name!r} is not known")
    model = MODELS.get(name, {})
    keys = (model.get("layout_key", LAYOUT_MARK), LAYOUT_MARK)
    is_interleaved = next((text[key] for key in keys if key in text), None)
    if is_interleaved is None:
        return str(model.get("layout", "half"))
    return "interleaved" if is_interleaved else "half"


def marked_layout(config: Any) -> str | None:
    """The layout that `rope_traditional` says the weights of the text model have; None without it.

    config  as in `from_hf_config`. Raises ValueError for a value that is not true or false.

    >>> marked_layout({"model_type": "llama", "rope_traditional": True})
    'interleaved'
    """
    text, _ = _text_part(load(config))
    if LAYOUT_MARK not in text:
        return None
    if not isinstance(text[LAYOUT_MARK], bool):
        raise ValueError(f"{LAYOUT_MARK} must be true or false, got {text[LAYOUT_MARK]!r}")
    return "interleaved" if text[LAYOUT_MARK] else "half"


def unread_layout(config: Any) -> Unread | None:
    """The layout of the weights, where transformers loads them and rotates in another one.

    config  as in `from_hf_config`. Raises ValueError for a model that is not known.
    None for a config without `rope_traditional`, or where it says what the code does anyway.

    >>> unread_layout({"model_type": "gptj", "rope_traditional": False})
    Unread(model='gptj', weights='half', code='interleaved')
    """
    data = load(config)
    weights = marked_layout(data)
    if not weights:
        return None
    text, name = _text_part(data)
    code = layout_of(_replaced(data, text, _without_mark(text)))
    return Unread(name, weights, code) if name and code != weights else None


def edit_of(config: Any, layout: str) -> str:
    """What to change in a config.json, so that it says that its weights are in `layout`.

    >>> edit_of({"model_type": "gptj"}, "half")
    'write "rope_traditional": false into config.json'
    """
    before = load(config)
    (old, _), (new, _) = _text_part(before), _text_part(with_layout(before, layout))
    for key, value in new.items():
        if old.get(key) != value:
            return f'write "{key}": {json.dumps(value)} into config.json'
    return f"remove {LAYOUT_MARK} from config.json"


def warning_of(
    config: Mapping[str, JSON], layout: str, code_base: tuple[str, tuple[str, ...]] | None
) -> str:
    """What will load weights that are now in `layout` and compute wrong results; "" for nothing.

    config     the one that is written beside them
    code_base  name and layouts of the code base that the names of the tensors are of, if known

    >>> warning_of({"model_type": "llama"}, "half", None)
    ''
    """
    if code_base is not None:
        name, layouts = code_base
        if layout in layouts:
            return ""
        return (
            f"the code that reads {name} rotates {layouts[0]}, and these weights are now "
            f"{layout}: it would compute wrong results without an error; load them in code that "
            f"rotates {layout}"
        )
    unread = unread_layout(config)
    if unread:
        return (
            f"transformers will load these weights without an error and compute wrong results: "
            f"they are now {unread.weights}, and its {unread.model!r} rotates {unread.code}; call "
            f"rotary.patch(model) on the loaded model, or load them in code that rotates "
            f"{unread.weights}"
        )
    text, name = _text_part(config)
    key = MODELS.get(name, {}).get("layout_key")
    if key and text.get(key) is False and config.get("auto_map"):
        return (
            f"transformers reads {key} of config.json, and the code that auto_map names may not: "
            "load the model without trust_remote_code"
        )
    return ""


def _text_part(data: Mapping[str, JSON], name: str = "") -> tuple[Mapping[str, JSON], str]:
    """The keys of the text model, all keys where there is one part alone; and its model_type."""
    name = str(data.get("model_type") or name)
    parts = MODELS.get(name, {}).get("parts", {})
    key = next((key for key in TEXT_PARTS if key in parts), None)
    if key is None:
        return data, name
    inner = data.get(key)  # missing in an older config.json, which is flat
    return _text_part(inner, parts[key]) if isinstance(inner, Mapping) else (data, parts[key])


def _without_mark(data: Mapping[str, JSON]) -> dict[str, JSON]:
    return {key: value for key, value in data.items() if key != LAYOUT_MARK}


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """A nested object with one of its objects replaced."""
    if value is old:
        return new
    if isinstance(value, Mapping):
        return {key: _replaced(inner, old, new) for key, inner in value.items()}
    return value
