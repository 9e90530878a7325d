"""Small models of transformers with random weights, one of each family that `patch` is tried on."""

import torch
import transformers

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
    "granite_swa": ({"layer_rope_theta": [1e4, 5e5]}, HALF),  # tables for each layer, in a list
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
TABLES_OF_THEIR_OWN = {"codegen", "gptj"}  # rows of a buffer
MROPES = {"glm4v_text", "qwen2_vl_text", "qwen3_5_text", "qwen3_vl_text"}


def tiny_model(auto, family, **values):
    """The model that `auto` makes of a small config; `values` go before `TINY`."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**TINY, **values})
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough for attention to depend on positions
                parameter.normal_(0, 0.15)
    return model


def distance(one, other):
    """The largest difference, as a share of the largest value."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


def tokens(batch=2, seq=12):
    return torch.randint(3, 128, (batch, seq), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def last_hidden(model, family):
    """What a model gives for random tokens; at random places of three axes, if it has those."""
    random = torch.Generator().manual_seed(1)
    extra = {}
    if family in MROPES:
        extra["position_ids"] = torch.randint(0, 30, (3, 2, 12), generator=random)
    ids = torch.randint(3, 128, (2, 12), generator=random)
    return model(ids, **extra).last_hidden_state


def gradients(model):
    """The gradient of every parameter, by its name."""
    model.zero_grad()
    model(tokens()).logits.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}
