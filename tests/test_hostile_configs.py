"""Configs that are broken on purpose: a reading, or one sentence; no other error, and quickly."""

import contextlib
import copy
import json
import random
import time
import warnings
from pathlib import Path

import pytest

import rotary
from rotary.configs import layer_types
from rotary.programs import diff

CONFIGS = [json.loads(path.read_text()) for path in
           sorted((Path(__file__).parent / "configs").glob("*.json"))]  # fmt: skip
ODD = [
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
CASES = 4000  # for each of four seeds; 100,000 were run once


def places(data):
    """Every key and list entry inside, as (container, key)."""
    for key, value in data.items():
        yield data, key
        if isinstance(value, dict):
            yield from places(value)
        if isinstance(value, list):
            yield from ((value, at) for at in range(min(len(value), 3)))


def mutated(chance):
    config = copy.deepcopy(chance.choice(CONFIGS))
    for _ in range(chance.choice([1, 1, 2, 3])):
        if chance.random() < 0.6:
            inside, key = chance.choice(list(places(config)))
        else:
            parts = [each for each in config.values() if isinstance(each, dict)]
            inside, key = chance.choice([config, *parts]), chance.choice(KEYS)
        inside[key] = copy.deepcopy(chance.choice(ODD))
    return config


@pytest.mark.parametrize("seed", range(4))
def test_a_broken_config_is_a_reading_or_one_sentence(seed):
    chance = random.Random(seed)
    slow, sentences = [], set()
    for _ in range(CASES):
        config = mutated(chance)
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                kinds = layer_types(config) or (None,)
                spec = rotary.from_hf_config(config, chance.choice(kinds), strict=seed % 2 == 0)
            except ValueError as error:
                sentences.add(str(error))
            else:
                assert spec is None or rotary.Rotary.from_json(spec.to_json()) == spec
        slow.append(time.process_time() - start)
    assert not [sentence for sentence in sentences if "\n" in sentence]
    assert sorted(slow)[-3] < 0.05, "seconds for one config"


@pytest.mark.parametrize("seed", range(2))
def test_diff_reads_a_broken_config_or_says_one_sentence(seed):
    chance = random.Random(seed)
    for _ in range(CASES):
        config = mutated(chance)
        with warnings.catch_warnings(), contextlib.suppress(ValueError):
            warnings.simplefilter("ignore")
            kinds = layer_types(config) or (None,)
            diff(config, layer_type=chance.choice(kinds))


def test_keys_that_transformers_reads_otherwise():
    """Each was read as something else than transformers computes, without a word."""
    llama = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 4096}
    rope = {"type": "dynamic", "factor": 4.0, "alpha": 1000.0}
    with pytest.raises(ValueError, match="rope_type 'dynamic' has no key 'alpha'"):
        rotary.from_hf_config({**llama, "rope_scaling": rope})
    hunyuan = {**llama, "model_type": "hunyuan_v1_dense", "rope_scaling": rope}
    assert rotary.from_hf_config(hunyuan).schedule == "ntk"
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    null = {"model_type": "gpt_oss", "head_dim": 64, "rope_scaling": {**yarn, "truncate": None}}
    assert rotary.from_hf_config(null).params["truncate"] is False
    with pytest.raises(ValueError, match="4096 beside the rope parameters and 64 among them"):
        rotary.from_hf_config(
            {**llama, "original_max_position_embeddings": 4096,
             "rope_scaling": {**yarn, "original_max_position_embeddings": 64}}
        )  # fmt: skip
    qwen = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16}
    assert rotary.from_hf_config(qwen).head_dim == 128  # what its class takes where it is silent
    assert rotary.from_hf_config({**qwen, "head_dim": None}).head_dim == 64
