"""Published configs with something broken in them: values, types, nesting, missing keys."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIGS = {path.stem: json.loads(path.read_text()) for path in
           sorted((Path(__file__).parent / "configs").glob("*.json"))}  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 63, 2**31, 2**63, 10**25, 0.0, -0.5, 1.5, 1e-300, 1e300, "",
    "yarn", "1", "\u202e", [], {}, [1], [None], ["x"], [16, 24, 24], [16.0, 24, 24], [[16, 24, 24]],
    {"a": 1}, {"rope_type": "linear", "factor": 2.0}, {"full_attention": None}, {"type": "dynamic"},
    {"rope_type": ["yarn"]}, {"rope_type": {}}, [0, 0, 64], [-1, 1, 64], [True, 31, 32],
    "full_attention", ["full_attention"] * 3, ["full_attention", 3, None],
]  # fmt: skip
KEYS = [
    "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "partial_rotary_factor",
    "rotary_dim", "mrope_section", "layer_types", "max_position_embeddings",
    "original_max_position_embeddings", "rope_traditional", "rope_interleave", "layer_rope_theta",
    "per_layer_config", "rope_scaling_layers", "num_hidden_layers", "text_config",
    "qk_rope_head_dim", "kv_lora_rank", "model_type", "no_rope_layers", "rope_dim", "use_fope",
    "num_attention_heads", "hidden_size",
]  # fmt: skip
NAMES = ("rope", "rotary", "head", "hidden", "layer", "max_pos", "factor", "theta", "type", "mrope",
         "section", "beta", "scale", "truncate", "partial", "base")  # fmt: skip
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 40, "beta_fast": 16, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
     "original_max_position_embeddings": 4096},
    {"rope_type": "default", "rope_theta": 5e5},
]  # fmt: skip
Place = tuple[Any, Any]  # a dict or list, and a key of it


def mutated(chance: random.Random) -> dict[str, Any]:
    """One of the published configs, changed in one to three places."""
    config = copy.deepcopy(chance.choice(list(CONFIGS.values())))
    for _ in range(chance.choice([1, 1, 2, 3])):
        chance.choice(CHANGES)(chance, config)
    return config


def places(data: dict[str, Any]) -> Iterator[Place]:
    """Every key and list entry inside."""
    for key, value in data.items():
        yield data, key
        if isinstance(value, dict):
            yield from places(value)
        if isinstance(value, list):
            yield from ((value, at) for at in range(min(len(value), 3)))


def a_place(chance: random.Random, config: dict[str, Any]) -> Place:
    """Mostly one with a bearing on RoPE."""
    found = list(places(config)) or [(config, "model_type")]
    near = [place for place in found if any(name in str(place[1]) for name in NAMES)]
    return chance.choice(near if near and chance.random() < 0.8 else found)


def a_part(chance: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """The whole config or an object in it."""
    return chance.choice([config, *(each for each in config.values() if isinstance(each, dict))])


def set_odd(chance: random.Random, config: dict[str, Any]) -> None:
    """Another value, mostly of another type."""
    inside, key = a_place(chance, config)
    inside[key] = copy.deepcopy(chance.choice(ODD))


def add_odd(chance: random.Random, config: dict[str, Any]) -> None:
    """A key that was not there."""
    a_part(chance, config)[chance.choice(KEYS)] = copy.deepcopy(chance.choice(ODD))


def retype(chance: random.Random, config: dict[str, Any]) -> None:
    """The same value in another type, or nearly the same value."""
    inside, key = a_place(chance, config)
    value, ways = inside.get(key) if isinstance(inside, dict) else inside[key], [str, lambda v: [v]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        ways += [float, lambda v: 2 * v, lambda v: v / 2, lambda v: v + 1, lambda v: -v, bool]
        ways += [lambda v: int(v) // 2]
    inside[key] = chance.choice(ways)(value)


def remove(chance: random.Random, config: dict[str, Any]) -> None:
    """A key or an entry that is missing."""
    inside, key = a_place(chance, config)
    if isinstance(inside, list):
        inside.pop(key)
    else:
        inside.pop(key, None)


def scale(chance: random.Random, config: dict[str, Any]) -> None:
    """Another scaling, under the name of either version."""
    parts = [config, *(each for each in config.values() if isinstance(each, dict)
                       and "hidden_size" in each)]  # fmt: skip
    inside = chance.choice(parts)
    if chance.random() < 0.6:
        inside.pop("rope_scaling", None)
        inside.pop("rope_parameters", None)
    name = chance.choice(["rope_scaling", "rope_parameters"])
    inside[name] = copy.deepcopy(chance.choice(SCALINGS))


def nest(chance: random.Random, config: dict[str, Any]) -> None:
    """Rope parameters nested by layer type, one entry of a nest taken out, or one key moved."""
    inside = chance.choice([each for each in (config, *config.values()) if isinstance(each, dict)])
    name = chance.choice(["rope_scaling", "rope_parameters"])
    rope = inside.get(name)
    if not isinstance(rope, dict):
        return
    entries = [value for value in rope.values() if isinstance(value, dict)]
    if entries:
        inside[name] = copy.deepcopy(chance.choice(entries))
    elif rope and chance.random() < 0.5:
        key = chance.choice(list(rope))
        inside[key] = rope.pop(key)
    else:
        kinds = chance.choice([["full_attention", "sliding_attention"], ["full_attention"], ["x"]])
        inside[name] = {kind: copy.deepcopy(rope) for kind in kinds}


def lift(chance: random.Random, config: dict[str, Any]) -> None:
    """A part without the whole, or the whole as a part."""
    parts = [value for value in config.values() if isinstance(value, dict) and len(value) > 3]
    if parts and chance.random() < 0.5:
        part = chance.choice(parts)
        config.clear()
        config.update(part)
    elif isinstance(config.get("text_config"), dict):
        config.update(config.pop("text_config"))


CHANGES = [set_odd, set_odd, add_odd, retype, retype, remove, remove, scale, nest, lift]
