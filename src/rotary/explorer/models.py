"""The RoPE that the page shows: of a published model, or of a pasted config.json."""

import json
import warnings
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from ..configs import Config, choose, from_hf_config, layer_types
from ..configs.hf_writing import as_model_reads, model_keys
from ..reach import lengths
from ..spec import Rotary
from ..strict_json import JSON, parsed

MAX_PASTED = 2**20  # characters, and bytes: a longer text is not a config.json
MAX_HEAD_DIM = 1024
MAX_LENGTH = 2**24  # tokens
MAX_TRIED = 2**24  # characters that `cut` reads at most, counting READING more for each attempt
READING = 2**15  # the fixed cost of reading a config, in characters
PASTED = "a config.json, pasted below"


class Model(NamedTuple):
    """A RoPE as its authors made it.

    trained  tokens it was trained on before any extension; context  tokens it is advertised for;
             None: the config does not say
    layers   the layer types with different RoPEs; empty if all layers have the same
    layer    the one of these layer types that `spec` belongs to
    name     its name in a pasted config, text that must not be trusted; "" for a published model
    entry    what the config says about these layers
    """

    spec: Rotary
    trained: int | None
    context: int | None
    layers: tuple[str, ...]
    layer: str | None
    name: str
    entry: Config


@cache
def presets() -> Mapping[str, JSON]:
    """Return name -> layer type and config keys of the RoPE, for each published model.

    >>> presets()["llama-3-8b"]["config"]["rope_theta"]
    500000.0
    """
    return parsed(Path(__file__).with_name("presets.json").read_text(), "presets.json")


@cache
def published(name: str) -> Model:
    """Return the RoPE of a published model; ValueError for a name that is not in `presets`."""
    if name not in presets():
        raise ValueError(f"model {name[:80]!r} is not one of the {len(presets())} published ones")
    preset = presets()[name]
    return read(preset["config"], preset["layer_type"])


@lru_cache(maxsize=8)
def pasted(text: str, layer_type: str | None = None) -> Model:
    """Return the RoPE of a pasted config.json. The text is parsed as JSON and as nothing else.

    Raises ValueError of one line for text that is too long, is not JSON, or gives no RoPE.

    >>> pasted('{"hidden_size": 64, "num_attention_heads": 1, "rope_theta": 500}').spec
    Rotary(head_dim=64, base=500.0)
    """
    if len(text.encode("utf-8", "replace")) > MAX_PASTED:
        raise ValueError(f"the config is over {MAX_PASTED:,} bytes; paste a config.json alone")
    config = parsed(text, "the config", infinity=True)
    name = config.get("_name_or_path") or config.get("model_type") or "no name"
    return read(config, layer_type)._replace(name=encodable(str(name)[:80]))


def encodable(text: str) -> str:
    """Return the text with "?" for each unpaired surrogate, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def read(config: Mapping[str, JSON], layer_type: str | None) -> Model:
    """Return the RoPE of a config dict; errors as of `from_hf_config`, and for no rotation.

    If layer types differ and `layer_type` is none of them, the first one that rotates is taken.
    """
    layers = layer_types(config)
    if layer_type not in layers:
        rotating = (kind for kind in layers if from_hf_config(config, kind))
        layer_type = next(rotating, layers[0] if layers else None)
    spec = from_hf_config(config, layer_type)
    if spec is None:
        raise ValueError("these layers have no rotation; choose another layer type")
    if spec.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {spec.head_dim}")
    entry = choose(config, layer_type)
    trained, context = (each if each and each > 0 else None for each in lengths(spec, entry))
    if max(context or 0, trained or 0) > MAX_LENGTH:
        raise ValueError(f"the lengths of the config must be at most {MAX_LENGTH:,} tokens here")
    return Model(spec, trained, context, layers, layer_type, "", entry)


@lru_cache(maxsize=8)
def shortened(text: str, layer_type: str | None = None) -> str:
    """Return a pasted config without keys that do not affect its RoPE; unchanged if it has none."""
    try:
        pasted(text, layer_type)
    except ValueError:
        return text
    return json.dumps(
        cut(dict(parsed(text, "the config", infinity=True)), layer_type), separators=(",", ":")
    )


def cut(config: dict[str, JSON], layer_type: str | None) -> dict[str, JSON]:
    """Return a copy without the keys, at any depth, that do not affect the RoPE.

    The longest values are tried first. Each attempt reads all of the remaining config, so fewer
    keys are tried in a longer config.

    >>> cut({"rope_theta": 5e5, "head_dim": 64, "id2label": {"0": "no"}}, None)
    {'rope_theta': 500000.0, 'head_dim': 64}
    """
    text = json.dumps(config)
    original, kept, size, left = _facts(config, layer_type), json.loads(text), len(text), MAX_TRIED

    def look_in(part: dict[str, JSON]) -> None:
        nonlocal left, size
        long = {key: len(json.dumps(value)) for key, value in part.items()}
        for key in sorted(long, key=lambda key: -long[key]):
            left -= size + READING
            if left < 0 or (part is kept and key == "model_type"):
                continue
            before, value = dict(part), part.pop(key)
            if _facts(kept, layer_type) == original:
                size -= long[key]
                continue
            part.clear()
            part.update(before)  # in the same order
            if isinstance(value, dict):
                look_in(value)

    look_in(kept)
    return kept


def _facts(config: dict[str, JSON], layer_type: str | None) -> tuple[object, ...] | None:
    """Return all that the page shows of a config, None if it gives no RoPE."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an attempt may lack keys that it needs
            model = read(config, layer_type)
    except ValueError:
        return None
    entry, context = model.entry, model.context or 1
    try:  # the keys that a plan writes
        keys = model_keys(entry, as_model_reads(entry, model.spec, context), context)
    except ValueError:
        keys = {}
    # all but the entry, which has every key
    return *model[:-1], entry.window, entry.nope_head_dim, keys
