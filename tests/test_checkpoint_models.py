"""Whole models of transformers after a move: the same logits under the other rotation."""

import pytest
import torch
from checkpoints import OTHER, moved
from families import FAMILIES, MLA, MOE, distance, last_hidden, tiny_model
from transformers import AutoModel

import rotary
from rotary import from_hf_config
from rotary.checkpoint.files import Tensor
from rotary.checkpoint.layout import unread_layout, with_layout
from rotary.checkpoint.plan import plan
from rotary.configs import layer_types

LOCAL = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
NO_Q_LORA = {**MLA, **MOE, "n_shared_experts": 1, "q_lora_rank": None}
GEMMA4 = {
    **FAMILIES["gemma4_text"][0],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
LONGCAT = {
    **MLA, "head_dim": 8, "num_layers": 1, "n_routed_experts": 4, "moe_topk": 2,
    "zero_expert_num": 0, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 32,
}  # fmt: skip
INDEXED = {**NO_Q_LORA, "q_lora_rank": 16, "head_dim": 8, "index_n_heads": 2,
           "index_head_dim": 16, "index_topk": 64}  # fmt: skip
# name -> model type, what its config says beside TINY
VARIANTS = {
    "falcon, a key per head": ("falcon", {"multi_query": False, "num_kv_heads": 4}),
    "falcon, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, biased": ("falcon", {"bias": True}),
    "stablelm, norms": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "cohere, norms": ("cohere", {"use_qk_norm": True}),
    "deepseek_v3, plain q": ("deepseek_v3", NO_Q_LORA),
    "deepseek_v3, half": ("deepseek_v3", {**NO_Q_LORA, "rope_interleave": False}),
    "gemma4_text, keys as values": ("gemma4_text", GEMMA4),
    "phi3, partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "gpt_neox, all": ("gpt_neox", {"rotary_pct": 1.0}),
    "llama, biased": ("llama", {"attention_bias": True}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "dory": ("dory", {"head_dim": 16, "num_hidden_layers": 4, "n_input_layers": 1,
                      "n_output_layers": 1}),
    "afmoe": ("afmoe", dict(head_dim=16, num_dense_layers=1, **MOE, **LOCAL)),
    "exaone_moe": ("exaone_moe", dict(**MOE, **LOCAL)),
    "lfm2": ("lfm2", {"layer_types": ["full_attention", "conv"], "conv_L_cache": 3}),
    "hrm_text": ("hrm_text", {"head_dim": 16}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}),
    "jetmoe": ("jetmoe", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "longcat_flash": ("longcat_flash", LONGCAT),
    "minicpm3": ("minicpm3", MLA),
    "axk2": ("axk2", INDEXED),
    "glm_moe_dsa": ("glm_moe_dsa", INDEXED),
    "mistral4": ("mistral4", {**MLA, **MOE, "head_dim": 24, "n_shared_experts": 1}),
    "muse_spark_text": ("muse_spark_text", dict(head_dim=16, **MOE)),
    "modernbert-decoder": ("modernbert-decoder", {"cls_token_id": 1, "sep_token_id": 2}),
    "qwen3_next": ("qwen3_next", dict(head_dim=16, **MOE, layer_types=["full_attention"] * 2)),
    "qwen3_5_text": ("qwen3_5_text", {"head_dim": 32, "layer_types": ["full_attention"] * 2,
                                      "rope_parameters": {"mrope_section": [2, 1, 1],
                                                          "rope_type": "default",
                                                          "rope_theta": 1e4,
                                                          "partial_rotary_factor": 0.25}}),
    "qwen3_vl_text": ("qwen3_vl_text", {"head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}),
    "zamba2": ("zamba2", {"layers_block_type": ["mamba", "hybrid"], "use_mem_rope": True,
                          "use_shared_attention_adapter": True, "num_key_value_heads": 4,
                          "n_mamba_heads": 4, "mamba_headdim": 32, "adapter_rank": 8}),
}  # fmt: skip
CASES = {
    **{
        family: (family, values)
        for family, (values, _) in FAMILIES.items()
        if family not in ("deepseek_v4", "esm")
    },
    **VARIANTS,
}


def model_of(case):
    """A small model whose norms and biases are not all alike, for they have to move as well."""
    family, values = CASES[case]
    model = tiny_model(AutoModel, family, **values)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or parameter.shape[-1] != 64:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def run(model, case):
    return last_hidden(model, CASES[case][0])


def layout_of(config):
    specs = [from_hf_config(config, kind) for kind in layer_types(config) or (None,)]
    return next(spec.layout for spec in specs if spec is not None)


def tensors_of(state):
    kinds = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    return {
        name: Tensor(kinds[value.dtype], tuple(value.shape), 0, value.nbytes)
        for name, value in state.items()
    }


def converted(state, made):
    """A state dict with the tensors of a plan moved as bytes."""
    result = dict(state)
    for name, move in made.moves.items():
        value = state[name].contiguous()
        raw = value.view(torch.uint8).numpy().reshape(-1)
        result[name] = torch.from_numpy(moved(raw, tensors_of({name: value})[name], move))
        result[name] = result[name].view(value.dtype).reshape(value.shape)
    return result


WITH_A_KEY = ("deepseek_v3", "mistral4")  # of CASES: their code in transformers reads a key


@pytest.mark.parametrize("case", CASES)
def test_a_moved_model_gives_the_same_logits_under_the_other_rotation(case):
    """That of `patch`, or of transformers where it reads the key; others get a mark."""
    model = model_of(case)
    before = run(model, case)
    state, config = model.state_dict(), model.config.to_dict()
    source = layout_of(model.config)
    target = OTHER[source]
    made = plan(tensors_of(state), config, source, target)
    after = converted(state, made)
    marked = type(model.config).from_dict(with_layout(config, target))
    other = AutoModel.from_config(marked).eval()
    other.load_state_dict(after)
    unread = unread_layout(other.config)
    assert layout_of(other.config) == target
    assert (unread is None) == (distance(run(other, case), before) < 1e-5)
    assert (unread is None) == (CASES[case][0] in WITH_A_KEY)
    with rotary.patch(other) as patched:
        assert distance(run(other, case), before) < 1e-5
    assert patched.skipped == []
    if unread:
        assert (unread.weights, unread.code) == (target, source)
        assert distance(run(other, case), before) > 1e-3
        assert all(target in what for _, what in patched.patched if "as the config says" in what)
        assert "as the config says" in str(patched)
    back = plan(tensors_of(after), config, target, source, trust_source=True)
    again = converted(after, back)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
    others = state.keys() - made.moves.keys()
    assert all(torch.equal(after[name], state[name]) for name in others)
