"""GGUF metadata, Megatron arguments and vLLM overrides: what is written is read back the same."""

import numpy as np
import pytest

import rotary
from rotary import Rotary, from_hf_config
from rotary.configs import from_gguf, to_gguf, to_vllm

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SPECS = {
    "default": Rotary(head_dim=128, base=1e6),
    "partial": Rotary(head_dim=80, rotary_dim=32),
    "linear": Rotary(head_dim=64, schedule="linear", params={"factor": 8.0}),
    "yarn": Rotary(head_dim=128, base=1e6, schedule="yarn", params=YARN),
    "yarn with a factor of its own": Rotary(
        head_dim=128, schedule="yarn", params={**YARN, "attention_factor": 1.0}
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_gguf_gives_the_spec_back(name):
    written = to_gguf(SPECS[name], "qwen2", context_length=131072)
    assert written["qwen2.context_length"] == 131072
    assert from_gguf(written) == SPECS[name]


@pytest.mark.parametrize(
    ("schedule", "params"),
    [
        ("llama3", LLAMA3),
        ("proportional", {"partial_rotary_factor": 0.25}),
        ("ntk", {"factor": 4.0}),
        ("custom", {"inv_freq": [1.0, 0.5, 0.25, 0.125]}),
    ],
)
def test_frequencies_without_a_name_go_into_rope_freqs(schedule, params):
    spec = Rotary(head_dim=8, base=5e5, schedule=schedule, params=params)
    read = from_gguf(to_gguf(spec, "exaone4"))
    ours, theirs = rotary.inv_freq(spec)[0], rotary.inv_freq(read)[0]
    np.testing.assert_allclose(theirs, ours, rtol=1e-12, atol=1e-29)


def test_llama_is_permuted_in_gguf():
    with pytest.raises(ValueError, match=r"interleaved layout.*row_permutation"):
        to_gguf(Rotary(head_dim=64), "llama")
    spec = Rotary(head_dim=64, layout="interleaved")
    assert from_gguf(to_gguf(spec, "llama")) == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Rotary(head_dim=8, rotary_dim=4, start=4), "start"),
        (Rotary(head_dim=8, sign=-1), "sign"),
        (Rotary(head_dim=8, axes=(0, 1, 0, 1)), "axes"),
        (Rotary(head_dim=8, schedule="dynamic",
                params={"factor": 2.0, "original_max_position_embeddings": 64}), "dynamic"),
    ],
)  # fmt: skip
def test_what_gguf_cannot_say_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        to_gguf(spec, "qwen2")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "general.architecture"),
        ({"general.architecture": "qwen2"}, "key_length"),
        ({"general.architecture": "qwen22", "qwen22.attention.key_length": 64}, "did you mean"),
        ({"general.architecture": "qwen2", "qwen2.attention.key_length": 64,
          "qwen2.rope.freq_bas": 1.0}, "did you mean 'rope.freq_base'"),
        ({"general.architecture": "qwen2", "qwen2.attention.key_length": 64,
          "qwen2.rope.scaling.type": "yarm"}, "did you mean 'yarn'"),
    ],
)  # fmt: skip
def test_gguf_metadata_that_makes_no_sense(metadata, message):
    with pytest.raises(ValueError, match=message):
        from_gguf(metadata)


@pytest.mark.parametrize("name", SPECS)
def test_vllm_overrides_are_read_back(name):
    spec = SPECS[name]
    written = to_vllm(spec)
    assert from_hf_config({"head_dim": spec.head_dim, **written}) == spec


def test_vllm_gets_ntk_as_another_base_and_no_int_factor():
    spec = Rotary(head_dim=128, schedule="ntk", params={"factor": 4.0})
    read = from_hf_config({"head_dim": 128, **to_vllm(spec)})
    np.testing.assert_allclose(rotary.inv_freq(read)[0], rotary.inv_freq(spec)[0], rtol=1e-12)
    linear = to_vllm(Rotary(head_dim=64, schedule="linear", params={"factor": 8}))
    assert isinstance(linear["rope_parameters"]["factor"], float)
    with pytest.raises(ValueError, match="plain RoPE"):
        to_vllm(Rotary(head_dim=8, schedule="dynamic",
                       params={"factor": 2.0, "original_max_position_embeddings": 64}))  # fmt: skip
    with pytest.raises(ValueError, match="drops the factor"):
        to_vllm(Rotary(head_dim=8, schedule="proportional",
                       params={"partial_rotary_factor": 0.5, "factor": 2.0}))  # fmt: skip
