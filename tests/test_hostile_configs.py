"""Configs that are broken on purpose: a reading, or one sentence; no other error, and quickly."""

import contextlib
import random
import time
import warnings

import pytest
from mutations import mutated

import rotary
from rotary.configs import layer_types
from rotary.programs import diff


@pytest.mark.parametrize("seed", range(2))
def test_a_broken_config_is_a_reading_or_one_sentence(seed):
    """Where keys that nobody reads are warnings; against_transformers.py has where they are not."""
    chance = random.Random(seed)
    slow, sentences = [], set()
    for _ in range(1500):
        config = mutated(chance)
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                kind = chance.choice(layer_types(config) or (None,))
                spec = rotary.from_hf_config(config, kind, strict=False)
            except ValueError as error:
                sentences.add(str(error))
            else:
                assert spec is None or rotary.Rotary.from_json(spec.to_json()) == spec
                slow.append(time.process_time() - start)
                with contextlib.suppress(ValueError):
                    diff(config, layer_type=kind)
    assert not [sentence for sentence in sentences if "\n" in sentence]
    assert sorted(slow)[-3] < 0.05, "seconds for one config"


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
    with pytest.raises(
        ValueError, match="64 among the rope parameters is not read: transformers takes the 4096"
    ):
        rotary.from_hf_config(
            {**llama, "original_max_position_embeddings": 4096,
             "rope_scaling": {**yarn, "original_max_position_embeddings": 64}}
        )  # fmt: skip
    qwen = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16}
    assert rotary.from_hf_config(qwen).head_dim == 128  # what its class takes where it is silent
    assert rotary.from_hf_config({**qwen, "head_dim": None}).head_dim == 64
