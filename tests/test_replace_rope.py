"""`replace_rope`: another RoPE in the config of a model, and every other key as it was."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from rotary import Rotary, from_hf_config
from rotary.configs import layer_types, replace_rope

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))
KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base", "global_rope_theta",
        "max_position_embeddings", "n_positions", "max_seq_len", "model_max_length",
        "max_sequence_length", "max_trained_positions", "n_ctx", "seq_length"}  # fmt: skip
CHANGES = {
    "base": {"schedule": "default", "params": {}, "base": 2e7},
    "yarn": {"schedule": "yarn",
             "params": {"factor": 4.0, "original_max_position_embeddings": 8192}},
}  # fmt: skip


def changed(old, new, path=()):
    """The keys at which two documents differ."""
    for key in {*old, *new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict) and "model_type" in before:
            yield from changed(before, after, (*path, key))
        elif before != after:
            yield key


@pytest.mark.parametrize("change", CHANGES)
def test_the_published_configs(change):
    """Read again they give what was asked for, or nothing is returned."""
    written = 0
    for path in CONFIGS:
        old = json.loads(path.read_text())
        try:
            specs = {kind: from_hf_config(old, kind) for kind in layer_types(old) or (None,)}
        except ValueError:
            continue  # one of the few that are refused
        for kind, spec in specs.items():
            if spec is None or spec.schedule == "axial":
                continue
            wanted, before = dataclasses.replace(spec, **CHANGES[change]), copy.deepcopy(old)
            try:
                new = replace_rope(old, wanted, 32768, kind)
            except ValueError:
                continue
            finally:
                assert old == before
            assert from_hf_config(new, kind) == wanted
            assert set(changed(old, new)) <= KEYS
            others = [each for each in specs if each != kind]
            assert all(from_hf_config(new, each) == specs[each] for each in others)
            written += 1
    assert written >= 90


def test_a_part_and_the_names_of_a_model():
    qwen = json.loads((Path(__file__).parent / "configs" / "qwen2-vl-7b.json").read_text())
    spec = dataclasses.replace(from_hf_config(qwen), base=2e6)
    new = replace_rope(qwen, spec, 65536)
    assert new["rope_scaling"]["mrope_section"] == qwen["rope_scaling"]["mrope_section"]
    gpt = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4}
    new = replace_rope(gpt, dataclasses.replace(from_hf_config(gpt), base=2e6), 65536)
    assert (new["rotary_emb_base"], "rope_theta" in new) == (2e6, False)


def test_what_the_keys_of_a_model_cannot_say():
    llama = {"model_type": "llama", "head_dim": 64}
    with pytest.raises(ValueError, match="cannot express this RoPE: it would be read as Rotary"):
        replace_rope(llama, Rotary(head_dim=128), 4096)
    esm = {"model_type": "esm", "head_dim": 64, "position_embedding_type": "rotary"}
    spec = dataclasses.replace(from_hf_config(esm), **CHANGES["yarn"])
    with pytest.raises(ValueError, match="this model reads only rope_type default"):
        replace_rope(esm, spec, 4096)
    bert = json.loads((Path(__file__).parent / "configs" / "modernbert-base.json").read_text())
    spec = dataclasses.replace(from_hf_config(bert, "full_attention"), **CHANGES["yarn"])
    with pytest.raises(ValueError, match="layers of 'sliding_attention' read the same keys"):
        replace_rope(bert, spec, 4096, "full_attention")
