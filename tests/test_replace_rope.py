"""`replace_rope`: another RoPE in the config of a model, and every other key as it was."""

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from libraries import of_transformers

from rotary import Rotary, from_hf_config, inv_freq
from rotary.configs import as_longrope, layer_types, replace_rope
from rotary.programs import readings

pytest.importorskip("transformers")
from huggingface_hub.errors import StrictDataclassClassValidationError

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))
KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base", "global_rope_theta",
        "max_position_embeddings", "head_dim", "n_positions", "max_seq_len", "model_max_length",
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


def assert_same_frequencies(got, wanted):
    (ours, amplitude), (theirs, other) = inv_freq(got), inv_freq(wanted)
    np.testing.assert_allclose(ours, theirs, rtol=1e-14)
    assert amplitude == other


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
            got = from_hf_config(new, kind)
            if old["model_type"] in ("phi3", "phi3_v", "phimoe") and change == "yarn":
                assert got.schedule == "longrope"  # they read no other
                assert_same_frequencies(got, wanted)
            else:
                assert got == wanted
            assert set(changed(old, new)) <= KEYS
            others = [each for each in specs if each != kind]
            assert all(from_hf_config(new, each) == specs[each] for each in others)
            written += 1
    assert written >= 87  # of the others, three have their frequencies in the code of the model


def test_a_part_and_the_names_of_a_model():
    qwen = json.loads((Path(__file__).parent / "configs" / "qwen2-vl-7b.json").read_text())
    spec = dataclasses.replace(from_hf_config(qwen), base=2e6)
    new = replace_rope(qwen, spec, 65536)
    assert new["rope_scaling"]["mrope_section"] == qwen["rope_scaling"]["mrope_section"]
    gpt = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4}
    new = replace_rope(gpt, dataclasses.replace(from_hf_config(gpt), base=2e6), 65536)
    assert (new["rotary_emb_base"], "rope_theta" in new) == (2e6, False)


def test_a_trained_length_is_written_where_the_model_reads_it():
    """Phi-3 reads the one beside its rope parameters, which has a default in its class."""
    phi = json.loads((Path(__file__).parent / "configs" / "phi-3.5-mini.json").read_text())
    silent = {name: value for name, value in phi.items() if name[:8] != "original"}
    for config in (phi, silent):
        spec = as_longrope(Rotary(head_dim=96, base=5e5), 8192)
        new = replace_rope(config, spec, 8192)
        assert new["original_max_position_embeddings"] == 8192
        assert from_hf_config(new) == spec
        assert {each.attention_factor for each in readings(new) if each.attention_factor} == {1.0}


def test_an_error_of_long_lists_is_one_short_line():
    spec = as_longrope(Rotary(head_dim=96, base=5e5, layout="interleaved"), 8192)
    with pytest.raises(
        ValueError, match="read with layout 'half' instead of 'interleaved'"
    ) as told:
        replace_rope({"model_type": "llama", "head_dim": 96}, spec, 8192)
    assert len(str(told.value)) < 200


def test_what_the_keys_of_a_model_cannot_say():
    llama = {"model_type": "llama", "head_dim": 64}
    with pytest.raises(ValueError, match="would be read with head_dim 64 instead of 128"):
        replace_rope(llama, Rotary(head_dim=128), 4096)
    esm = {"model_type": "esm", "head_dim": 64, "position_embedding_type": "rotary"}
    spec = dataclasses.replace(from_hf_config(esm), **CHANGES["yarn"])
    with pytest.raises(ValueError, match="this model reads only rope_type default"):
        replace_rope(esm, spec, 4096)
    bert = json.loads((Path(__file__).parent / "configs" / "modernbert-base.json").read_text())
    spec = dataclasses.replace(from_hf_config(bert, "full_attention"), **CHANGES["yarn"])
    with pytest.raises(ValueError, match="layers of 'sliding_attention' read the same keys"):
        replace_rope(bert, spec, 4096, "full_attention")


def module_of(data):
    """What transformers builds from a config: the module that makes its tables."""
    against = pytest.importorskip("against_transformers", reason="needs transformers")
    of_transformers("transformers")
    data = copy.deepcopy(data)  # transformers writes into the dicts it is given
    name = data.pop("model_type")
    for key in ("auto_map", "transformers_version"):
        data.pop(key, None)
    return against.classes()[name](against.transformers.AutoConfig.for_model(name, **data))


def assert_transformers_computes(data, spec):
    """The tables of transformers have the frequencies and the amplitude of `spec`."""
    module, (steps, amplitude) = module_of(data), inv_freq(spec)
    np.testing.assert_allclose(module.inv_freq.numpy(), steps, rtol=2e-6)
    for length in (1, 9000):  # up to the trained length and beyond it
        cos, _ = module(torch.zeros(1), torch.arange(length)[None])
        assert float(cos.reshape(length, -1)[0, 0]) == pytest.approx(amplitude, rel=1e-6)


SCALED = {
    "yarn": CHANGES["yarn"],
    "linear": {"schedule": "linear", "params": {"factor": 4.0}},
    "llama3": {"schedule": "llama3", "params": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}},
}  # fmt: skip


@pytest.mark.parametrize("change", SCALED)
@pytest.mark.parametrize("name", ["phi-3-mini-128k", "phi-3.5-mini", "phi-4-mini", "phi-3.5-moe"])
def test_phi3_gets_every_scaling_as_longrope_and_transformers_reads_it(name, change):
    old = json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    wanted = dataclasses.replace(from_hf_config(old), **SCALED[change])
    new = replace_rope(old, wanted, 262144)
    assert new["max_position_embeddings"] == 262144
    assert_same_frequencies(from_hf_config(new), wanted)
    assert_transformers_computes(new, wanted)


def test_longrope_of_phimoe_gets_the_two_scales_that_its_class_demands():
    phimoe = {"model_type": "phimoe", "head_dim": 128, "max_position_embeddings": 4096}
    params = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "factor": 8.0,
              "original_max_position_embeddings": 4096}  # fmt: skip
    spec = Rotary(head_dim=128, schedule="longrope", params=params)
    new = replace_rope(phimoe, spec, 32768)
    amplitude = inv_freq(spec)[1]
    assert new["rope_scaling"]["short_mscale"] == new["rope_scaling"]["long_mscale"] == amplitude
    cos, _ = module_of(new)(torch.zeros(1), torch.arange(2)[None])
    assert float(cos.reshape(2, -1)[0, 0]) == pytest.approx(amplitude)


@pytest.mark.parametrize("change", SCALED)
@pytest.mark.parametrize("name", ["ernie4_5_vl_moe_text", "cosmos3_edge_text"])
def test_a_model_of_the_default_type_alone_gets_no_other(name, change):
    old = {"model_type": name, "max_position_embeddings": 4096}
    spec = dataclasses.replace(from_hf_config(old), **SCALED[change])
    with pytest.raises(ValueError, match=f"reads only rope_type default, got '{change}'"):
        replace_rope(old, spec, 32768)
    rope = {"rope_type": change, "rope_theta": 1e4, **SCALED[change]["params"]}
    with pytest.raises((ValueError, StrictDataclassClassValidationError), match="default"):
        module_of({**old, "rope_parameters": rope})


@pytest.mark.parametrize(
    "name", ["phi-3-mini-128k", "phi-3-vision-128k", "phi-3.5-mini", "phi-3.5-moe", "phi-4-mini",
             "qwen2-vl-7b", "internvl3-8b", "llama-3.1-8b"]
)  # fmt: skip
def test_the_rope_of_a_file_is_written_as_the_file_spells_it(name):
    """DeepSeek's own code reads `type`, and Phi-3 of transformers 4 only three keys, one `type`."""
    old = json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    spec, text = from_hf_config(old), old.get("text_config", old)
    assert replace_rope(old, spec, text["max_position_embeddings"]) == old


def test_type_is_written_where_the_file_has_it_and_for_phi3():
    yarn = Rotary(head_dim=64, **CHANGES["yarn"])
    llama = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 8192}
    for old, names in (
        ({"type": "linear", "factor": 2.0}, {"type"}),
        ({"rope_type": "linear", "type": "linear", "factor": 2.0}, {"rope_type", "type"}),
        (None, {"rope_type"}),
    ):
        scaling = replace_rope({**llama, "rope_scaling": old}, yarn, 32768)["rope_scaling"]
        assert {name for name in ("rope_type", "type") if scaling.get(name) == "yarn"} == names
    phi = {"model_type": "phi3", "hidden_size": 768, "num_attention_heads": 12}
    spec = as_longrope(Rotary(head_dim=64, base=5e5), 8192)
    new = replace_rope(phi, spec, 8192)
    assert set(new["rope_scaling"]) == {"type", "short_factor", "long_factor"}
    assert (new["rope_scaling"]["type"], from_hf_config(new)) == ("longrope", spec)
    assert_transformers_computes(new, spec)


@pytest.mark.parametrize("schedule", ["yarn", "dynamic", "longrope", "linear", "llama3"])
@pytest.mark.parametrize(
    "name", ["mixtral", "ministral", "minimax", "hunyuan_v1_dense", "hunyuan_v1_moe"]
)
def test_head_dim_is_written_where_transformers_fails_without_it(name, schedule):
    old = {"model_type": name, "max_position_embeddings": 8192}
    dynamic = {"factor": 4.0, "original_max_position_embeddings": 8192}
    longrope = {**dynamic, "short_factor": [1.0] * 64, "long_factor": [1.0] * 64}
    change = SCALED.get(schedule) or {
        "schedule": schedule, "params": dynamic if schedule == "dynamic" else longrope,
    }  # fmt: skip
    spec = dataclasses.replace(from_hf_config(old), **change)
    new = replace_rope(old, spec, 8192)
    np.testing.assert_allclose(module_of(new).inv_freq.numpy(), inv_freq(spec)[0], rtol=2e-6)
    assert ("head_dim" in new) == (schedule in ("yarn", "dynamic", "longrope"))
    if "head_dim" in new:
        assert from_hf_config({**new, "head_dim": None}) == spec  # which the class then says
        with pytest.raises((TypeError, StrictDataclassClassValidationError)):
            module_of({**new, "head_dim": None})
    wide = dataclasses.replace(spec, head_dim=256, rotary_dim=128)
    with pytest.raises(ValueError, match="cannot express this RoPE"):
        replace_rope(old, wide, 8192)


@pytest.mark.parametrize("says", ["the file", "the class"])
def test_the_attention_of_ministral_finds_its_own_key_again(says):
    """It multiplies queries by a factor made of llama_4_scaling_beta, in rope_parameters."""
    transformers = of_transformers("transformers")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64}  # fmt: skip
    old = {"model_type": "ministral3", "hidden_size": 64, "intermediate_size": 64, "head_dim": 16,
           "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
           "vocab_size": 99}  # fmt: skip
    old |= {"rope_parameters": yarn} if says == "the file" else {}
    spec = from_hf_config(old)
    spec = dataclasses.replace(spec, params={**spec.params, "factor": 8.0})
    new = replace_rope(old, spec, 512)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(new))
    assert config.rope_parameters["llama_4_scaling_beta"] == 0.1
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_config(config)(torch.arange(9)[None]).logits
    assert logits.isfinite().all()
