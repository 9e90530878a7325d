"""The config beside converted weights, which says their layout wherever a program reads it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import configs
from ..configs import from_hf_config
from ..configs.entries import TEXT_PARTS

CONFIG = "config.json"


class Labels(NamedTuple):
    """The text of the config that was read, None if it was a dict; and the one to be written."""

    original: str | None
    written: bytes


def labels_of(
    root: Path, config: Any, source: str, target: str, before: Mapping[str, Any] | None
) -> Labels:
    """What is to be in config.json beside the weights, byte for byte.

    config  path or dict, where the folder `root` has none
    before  the manifest of the folder, if it was converted: on the way back the text of the
            original is written again
    Raises ValueError where no key can say the layout, or a value is none of JSON.
    """
    whole = root if config is None else config
    data = configs.load(whole)
    text = _text(Path(whole)) if isinstance(whole, str | Path) else None
    changed = with_layout(data, target)
    original = (before or {}).get("config")
    if text is not None and changed == data:
        written = text.encode()
    elif isinstance(original, str) and _is_origin(_parsed(original), data, source, target):
        written = original.encode()
    else:
        written = _as_json(changed)
    return Labels(text, written)


def _text(path: Path) -> str:
    return (path / CONFIG if path.is_dir() else path).read_bytes().decode()


def _as_json(data: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(data, indent=2).encode() + b"\n"
    except TypeError as error:
        raise ValueError(f"config: {error}; give a config.json or plain values") from error


def _parsed(text: str) -> Mapping[str, Any]:
    return configs.parsed(text.removeprefix("\ufeff"), CONFIG)


def _is_origin(
    original: Mapping[str, Any], data: Mapping[str, Any], source: str, target: str
) -> bool:
    """Whether `data` is what became of an original in layout `target`, and nothing else changed."""
    return with_layout(original, source) == data and with_layout(original, target) == original


def with_layout(data: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """A config that says a layout where it is read: a key of the model, or `rope_traditional`.

    `rope_traditional` is the key of mlx-lm, which `from_hf_config` reads for every model; it stands
    only where the layout is not the model's own.
    Raises ValueError where no key can say it.

    >>> with_layout({"hidden_size": 64, "num_attention_heads": 2}, "interleaved")
    {'hidden_size': 64, 'num_attention_heads': 2, 'rope_traditional': True}
    """
    inner = _text_part(data)
    model = configs.MODELS.get(str(inner.get("model_type")), {})
    own = model.get("layout", "half")
    said = {key: value for key, value in inner.items() if key != "rope_traditional"}
    key = model.get("layout_key")
    if key and (key in said or layout != own):
        said[key] = layout == "interleaved"
    elif layout != own:
        said["rope_traditional"] = layout == "interleaved"
    changed = said if inner is data else _replaced(data, inner, said)
    for kind in configs.layer_types(changed) or (None,):
        spec = from_hf_config(changed, kind)
        if spec is not None and spec.layout != layout:
            raise ValueError(f"no key of {inner.get('model_type')!r} can say layout {layout!r}")
    return dict(changed)


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
