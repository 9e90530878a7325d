"""`patch` on small models of every layout: the same numbers, from our kernel, and exact tables."""

import functools

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

from rotary.integrations import rotations, tables
from rotary.integrations.transformers import patch

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GPTJ = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64, "n_ctx": 64}
LOCAL = {
    "head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
HALF, INTERLEAVED, MIXED = {"half"}, {"interleaved"}, "interleaved in, half out"
# model_type -> what its config says beside TINY, and the layouts found
FAMILIES = {
    "arcee": ({}, HALF),
    "bitnet": ({}, HALF),
    "codegen": (GPTJ, INTERLEAVED),
    "cohere": ({}, INTERLEAVED),
    "cohere2": ({}, INTERLEAVED),
    "deepseek_v2": ({**MLA, **MOE, "n_shared_experts": 1}, INTERLEAVED),
    "deepseek_v3": ({**MLA, **MOE, "n_shared_experts": 1}, {f"half and {MIXED}"}),
    "deepseek_v32": ({**MLA, **MOE, "n_shared_experts": 1}, HALF | {MIXED}),
    "deepseek_v4": ({}, INTERLEAVED),
    "diffllama": ({}, HALF),
    "ernie4_5": ({}, INTERLEAVED),
    "esm": ({"position_embedding_type": "rotary", "mask_token_id": 3}, HALF),
    "exaone4": ({}, HALF),
    "falcon": ({}, HALF),
    "gemma": ({"head_dim": 16}, HALF),
    "gemma2": ({"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}, HALF),
    "gemma3_text": (dict(**LOCAL, query_pre_attn_scalar=16), HALF),
    "gemma4_text": (
        dict(
            **LOCAL,
            global_head_dim=32,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=0,
        ),
        HALF,
    ),
    "glm": ({"head_dim": 16}, INTERLEAVED),
    "glm4": ({"head_dim": 16}, INTERLEAVED),
    "glm4_moe": (dict(head_dim=16, **MOE), HALF),
    "glm4v_text": ({"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}, INTERLEAVED),
    "gpt_neox": ({}, HALF),
    "gpt_oss": (dict(head_dim=16, sliding_window=4, **MOE), HALF),
    "gptj": (GPTJ, INTERLEAVED),
    "granite": ({}, HALF),
    "helium": ({"head_dim": 16}, INTERLEAVED),
    "llama": ({}, HALF),
    "llama4_text": (dict(head_dim=16, **MOE, intermediate_size_mlp=64), INTERLEAVED),
    "mistral": ({}, HALF),
    "mixtral": (MOE, HALF),
    "modernbert": ({"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2}, HALF),
    "nanochat": ({}, {"half, clockwise"}),
    "nemotron": ({}, HALF),
    "olmo": ({}, HALF),
    "olmo2": ({}, HALF),
    "olmo3": ({}, HALF),
    "persimmon": ({}, HALF),
    "phi": ({}, HALF),
    "phi3": ({}, HALF),
    "qwen2": ({}, HALF),
    "qwen2_vl_text": ({"rope_parameters": MROPE}, HALF),
    "qwen3": ({"head_dim": 16}, HALF),
    "qwen3_moe": (dict(head_dim=16, **MOE), HALF),
    "qwen3_vl_text": ({"head_dim": 16, "rope_parameters": MROPE}, HALF),
    "smollm3": ({}, HALF),
    "stablelm": ({}, HALF),
    "starcoder2": ({}, HALF),
}
TABLES_OF_THEIR_OWN = {"codegen", "gptj"}  # a buffer in each attention, not a module
MROPES = {"glm4v_text", "qwen2_vl_text", "qwen3_vl_text"}


@functools.lru_cache(maxsize=2)
def model_of(family):
    transformers.logging.set_verbosity_error()
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family][0]})
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough for attention to depend on positions
                parameter.normal_(0, 0.15)
    return model


def run(model, family):
    random = torch.Generator().manual_seed(1)
    extra = {}
    if family in MROPES:
        extra["position_ids"] = torch.randint(0, 30, (3, 2, 12), generator=random)
    with torch.no_grad():
        ids = torch.randint(3, 128, (2, 12), generator=random)
        return model(ids, **extra).last_hidden_state


def distance(one, other):
    return float((one - other).abs().max() / other.abs().max())


@pytest.fixture
def calls(monkeypatch):
    """How often our kernel was called, and with how many axes."""
    counted = []

    def counting(xs, *args, **kwargs):
        counted.append(len(xs))
        return original(xs, *args, **kwargs)

    original = rotations.rotate
    monkeypatch.setattr(rotations, "rotate", counting)
    return counted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_gives_the_same_and_rotates_by_our_kernel(family, calls):
    model = model_of(family)
    before = run(model, family)
    assert calls == []
    with patch(model) as patched:
        calls.clear()  # of the tries
        after = run(model, family)
        assert len(calls) >= len(patched.patched) >= 2
        assert {layout for _, layout in patched.patched} == FAMILIES[family][1]
        assert patched.skipped == []
    assert distance(after, before) < 1e-5
    count = len(calls)
    assert torch.equal(run(model, family), before)
    assert len(calls) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_tables_differ_little_from_the_float32_ones_at_small_positions(family, calls):
    model = model_of(family)
    before = run(model, family)
    with patch(model, exact=True) as patched:
        calls.clear()
        after = run(model, family)
    exact = [name for name, what in patched.patched if what == "exact tables"]
    if family in TABLES_OF_THEIR_OWN:
        assert {why for _, why in patched.skipped} == {"makes its own tables"}
    else:
        assert exact
        assert patched.skipped == []
    assert distance(after, before) < 1e-5
    assert calls


FAR = 1_000_003


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - TABLES_OF_THEIR_OWN))
def test_exact_tables_keep_angle_differences_at_a_far_position(family):
    """exp(i w (m + n)) exp(-i w m) = exp(i w n), which the model's own tables break."""
    model = model_of(family)
    with patch(model, exact=True) as patched:
        names = [name for name, what in patched.patched if what == "exact tables"]
        modules = [model.get_submodule(name) for name in names]
        cases = [(module, kind) for module in modules for kind in tables.layer_types(module)]
        exact = [turned(*case, (0, 1, 40, FAR, FAR + 40), family) for case in cases]
    assert exact
    for case, (start, one, forty, far, farther) in zip(cases, exact, strict=True):
        scale = start.abs().max()  # the attention factor, which each of them carries
        assert (farther * far.conj() - forty * scale).abs().max() < 6e-7 * scale**2
        near = turned(*case, (0, 1, 40), family)
        assert (torch.stack(near) - torch.stack((start, one, forty))).abs().max() < 6e-6
        own_far, own_farther = turned(*case, (FAR, FAR + 40), family)
        assert (own_farther * own_far.conj() - forty * scale).abs().max() > 1e-4


def turned(module, kind, positions, family):
    """cos + i sin of a module at each position, in complex128."""
    found = []
    for position in positions:
        ids = torch.full((3, 1, 1) if family in MROPES else (1, 1), position)
        result = module(torch.zeros(1), ids, **({"layer_type": kind} if kind else {}))
        cos, sin = (result.real, result.imag) if torch.is_tensor(result) else result
        assert cos.dtype == torch.float32
        found.append(torch.complex(cos.double(), sin.double()).flatten())
    return found
