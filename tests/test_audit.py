"""`rotary doctor` finds faults that are planted, and nothing in models that have none."""

import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from rotary import from_hf_config, inv_freq
from rotary.analysis.precision import longest_safe_position
from rotary.audit import audit
from rotary.configs import replace_rope
from rotary.programs import readings

transformers = pytest.importorskip("transformers")
from families import tiny_model  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def advice(subject):
    return " | ".join(f"{each.where}: {each.found}" for each in audit(subject) if each.advice)


@pytest.fixture
def model():
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        intermediate_size=64, vocab_size=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def test_a_sound_model_and_config_have_nothing_to_mend(model):
    assert advice(model) == advice(model.config) == advice({"model_type": "qwen3"}) == ""
    assert any("as the config says" in each.found for each in audit(model))


def test_a_part_whose_rope_is_in_its_only_part():
    """The token2wav of Qwen2.5-Omni keeps its RoPE in dit_config, and was said to be unreadable."""
    dit = {"model_type": "qwen2_5_omni_dit", "rope_theta": 5e4}
    whole = {
        "model_type": "qwen2_5_omni",
        "token2wav_config": {"model_type": "qwen2_5_omni_token2wav", "dit_config": dit},
    }
    assert advice(whole) == ""
    spec = from_hf_config(whole, part="token2wav_config")
    made = transformers.CONFIG_MAPPING["qwen2_5_omni"].from_dict(whole).token2wav_config.dit_config
    assert (spec.base, spec.head_dim) == (made.rope_parameters["rope_theta"], made.head_dim)
    new = replace_rope(whole, dataclasses.replace(spec, base=777.0), 8192, part="token2wav_config")
    assert new["token2wav_config"]["dit_config"]["rope_theta"] == 777.0


def test_frequencies_in_half_precision(model):
    assert "inv_freq: in bfloat16" in advice(model.bfloat16())


def test_frequencies_of_uninitialized_memory(model):
    model.model.rotary_emb.inv_freq.fill_(float("nan"))
    assert "not frequencies" in advice(model)
    model.model.rotary_emb.inv_freq.fill_(1e20)
    assert "not frequencies" in advice(model)


def test_frequencies_on_the_meta_device(model):
    assert "meta" in advice(model.to("meta"))


def test_frequencies_of_another_config(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert "differ from the config by 5.0e-01" in advice(model)
    model.model.rotary_emb.inv_freq = torch.ones(3)
    assert "3 frequencies, the config says 8" in advice(model)


AXIAL = {
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", "Qwen2_5_VLVisionRotaryEmbedding"),
    "dinov3_vit": ("DINOv3ViTConfig", "DINOv3ViTRopePositionEmbedding"),
    "minimax_m3_vl": ("MiniMaxM3VLVisionConfig", "MiniMaxM3VLVisionRotaryEmbedding"),
}


@pytest.mark.parametrize("family", AXIAL)
def test_a_vision_tower_that_keeps_the_frequencies_of_one_axis_is_sound(family):
    folder = f"transformers.models.{family}"
    config, rope = AXIAL[family]
    config = getattr(importlib.import_module(f"{folder}.configuration_{family}"), config)()
    module = getattr(importlib.import_module(f"{folder}.modeling_{family}"), rope)(config)
    module.config = config
    spec = from_hf_config(config)
    assert len(module.inv_freq) == spec.rotary_dim // 2 // len(set(spec.axes))
    buffers = [each for each in audit(module) if each.where == "inv_freq"]
    assert [(each.found, each.advice) for each in buffers] == [
        (f"{len(module.inv_freq)} frequencies, as the config says", "")
    ]
    module.inv_freq.mul_(0.5)
    assert "differ from the config by 5.0e-01" in advice(module)


def test_frequencies_of_ernie_that_stand_one_axis_after_another_are_sound():
    config = transformers.CONFIG_MAPPING["ernie4_5_vl_moe_text"]()
    folder = "transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe"
    module = importlib.import_module(folder).Ernie4_5_VLMoeTextRotaryEmbedding(config)
    stated = inv_freq(from_hf_config(config))[0]
    assert not np.allclose(module.inv_freq.numpy(), stated)
    assert advice(module) == ""
    module.inv_freq.mul_(0.5)
    assert "differ from the config by 5.0e-01" in advice(module)


def test_frequencies_of_layers_with_several_bases_are_compared_with_each():
    model = tiny_model(transformers.AutoModel, "granite_swa", layer_rope_theta=[1e4, 5e5])
    found = {each.where: each.found for each in audit(model) if "inv_freq" in each.where}
    assert found == dict.fromkeys(
        ("rotary_emb.inv_freq", "rotary_embs.0.inv_freq", "rotary_embs.1.inv_freq"),
        "8 frequencies, as the config says",
    )
    assert advice(model) == ""
    model.rotary_embs[1].inv_freq.mul_(0.5)
    assert advice(model) == "rotary_embs.1.inv_freq: frequencies differ from the config by 5.0e-01"


def test_frequencies_that_cannot_be_compared_are_no_fault():
    """The encoder of Voxtral Realtime has a model_type that no config file has."""
    folder = "transformers.models.voxtral_realtime"
    config = importlib.import_module(f"{folder}.configuration_voxtral_realtime")
    code = importlib.import_module(f"{folder}.modeling_voxtral_realtime")
    module = torch.nn.ModuleList(
        [code.VoxtralRealtimeRotaryEmbedding(config.VoxtralRealtimeEncoderConfig())]
    )
    (finding,) = audit(module)
    assert finding.found.startswith("32 frequencies, not compared: model_type 'voxtral_realtime_")
    assert (finding.advice, finding.is_fault) == ("", False)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8, "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": DYNAMIC,
}
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "pad_token_id": 0,
}  # fmt: skip
LENGTHENING = {
    "dynamic": ("Llama", 64, DYNAMIC, {}),
    "longrope": ("Phi3", 256, LONGROPE, {"original_max_position_embeddings": 64}),
    "two types of layers": (
        "Gemma3Text",
        64,
        KINDS,
        {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.mark.parametrize("name", LENGTHENING)
def test_frequencies_that_a_long_prompt_leaves_are_sound(name):
    family, context, rope, more = LENGTHENING[name]
    config = getattr(transformers, f"{family}Config")(
        **SIZES, **more, max_position_embeddings=context, rope_parameters=rope
    )
    model = getattr(transformers, f"{family}Model")(config).eval()
    (buffer,) = {"inv_freq", "full_attention_inv_freq"} & dict(
        model.rotary_emb.named_buffers()
    ).keys()
    fresh = getattr(model.rotary_emb, buffer).clone()
    assert advice(model) == ""
    for tokens in (100, 80, 20, 130):  # beyond the trained length, and back
        with torch.no_grad():
            model(torch.arange(tokens)[None] % 90)
        frequencies = getattr(model.rotary_emb, buffer)
        assert torch.equal(frequencies, fresh) == (tokens == 20)
        assert advice(model) == ""
    frequencies.mul_(0.9)
    assert "differ from the config by" in advice(model)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_weights_in_the_other_layout(layout):
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=1,
        intermediate_size=64, vocab_size=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    assert "look" not in advice(model)  # random weights have no layout
    # as training leaves them: high frequencies larger, members of a pair alike up to some noise
    falling = torch.linspace(0.3, -0.3, 16)
    scale = torch.cat((falling, falling)) if layout == "half" else falling.repeat_interleave(2)
    attention = model.model.layers[0].self_attn
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        noise = 0.1 * torch.randn(len(weight) // 32, 32, generator=torch.Generator().manual_seed(1))
        weight.data.mul_((scale + noise).exp().reshape(-1, 1))
    found = advice(model)
    assert ("look interleaved" in found) == (layout == "interleaved")
    assert ("the config means half" in found) == (layout == "interleaved")


def test_models_and_configs_of_diffusers():
    class WanTransformer3DModel(torch.nn.Module):
        config = {"attention_head_dim": 64}  # noqa: RUF012

    said = "axial, base 10000, interleaved, attention factor 1"
    assert audit(WanTransformer3DModel()) == [("config", said, "", False)]
    (found,) = audit({"_class_name": "Flux2Transformer2DModel"})
    assert found.found == "axial, base 2000, interleaved, attention factor 1"
    (found,) = audit({"_class_name": "CogVideoXTransformer3DModel"})
    assert (found.found, found.is_fault) == ("no rotation", False)
    (found,) = audit({"_class_name": "WanTransformer3DModel", "attention_head_dim": 4})
    assert (found.found, found.is_fault) == ("cannot be read", True)
    assert "widths of its axes" in found.advice


def test_keys_that_nothing_reads():
    assert "rope_thata" in advice({"model_type": "llama", "rope_thata": 1e4})
    rope = {**LLAMA3, "hihg_freq_factor": 4.0}
    assert "hihg_freq_factor" in advice({"model_type": "llama", "rope_parameters": rope})


def test_the_advice_is_of_transformers_alone_where_another_program_obeys_the_key():
    data = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
            "partial_rotary_factor": 0.5}  # fmt: skip
    pairs = {each.framework: len(each.inv_freq) for each in readings(data)
             if each.inv_freq is not None}  # fmt: skip
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.AutoConfig.for_model(**data)
    )
    assert len(module.inv_freq) == pairs["transformers"] == 64
    assert pairs["vLLM"] == 32
    assert audit(data)[0].advice == (
        "transformers does not read this key: correct or remove it; `rotary diff` shows what other "
        "programs do"
    )


def test_a_trained_length_beside_the_rope_parameters_is_read():
    rope = {"rope_type": "yarn", "factor": 2.0}
    data = {"model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": rope,
            "original_max_position_embeddings": 2048}  # fmt: skip
    assert advice(data) == ""


def test_a_key_that_the_code_of_the_model_ignores():
    found = audit({"model_type": "llama", "partial_rotary_factor": 0.5})
    assert "ignores it; remove the key" in found[0].found


def test_a_context_longer_than_trained():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    data = {"model_type": "llama", "rope_parameters": rope}
    assert "trained" not in advice({**data, "max_position_embeddings": 32768})
    assert "65,536 is more than 8,192" in advice({**data, "max_position_embeddings": 65536})


def test_a_longrope_without_a_factor_is_not_told_to_raise_it():
    """Phi-3.5-MoE has amplitudes in place of a factor, and 131,072 of 4,096 trained positions."""
    lists = {"short_factor": [1.0] * 64, "long_factor": [32.0] * 64}
    rope = {"type": "longrope", **lists, "short_mscale": 1.2432, "long_mscale": 1.2432,
            "original_max_position_embeddings": 4096}  # fmt: skip
    data = {"model_type": "phimoe", "head_dim": 128, "max_position_embeddings": 131072,
            "rope_theta": 1e4, "rope_scaling": rope}  # fmt: skip
    assert advice(data) == ""
    stretched = {"type": "longrope", **lists, "factor": 8.0}
    data = {"model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": stretched,
            "hidden_size": 4096, "original_max_position_embeddings": 4096}  # fmt: skip
    assert "131,072 is more than 4,096 trained times 8" in advice(data)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
)
def test_a_schedule_without_the_length_of_the_training(rope):
    data = {"model_type": "llama", "rope_scaling": rope, "max_position_embeddings": 8192}
    (finding,) = [each for each in audit(data) if "original" in each.found]
    assert f"{rope['rope_type']} takes max_position_embeddings 8,192" in finding.found
    assert finding.is_hint
    rope["original_max_position_embeddings"] = 2048
    assert not any("original" in each.found for each in audit(data))


def test_angles_in_float32_beyond_their_length():
    data = {"model_type": "llama", "head_dim": 128}
    safe = longest_safe_position(from_hf_config(data), 1e-2)
    assert 2**16 < safe < 2**18
    beyond = advice({**data, "max_position_embeddings": safe + 2})
    assert f"more than 0.01 rad beyond position {safe:,}" in beyond
    assert "float32 angles" not in advice({**data, "max_position_embeddings": safe + 1})


@pytest.mark.parametrize(
    ("model", "said"),
    [("hy3-preview", "default, base 11158840, half, attention factor 1"),
     ("deepseek-v3", "yarn, base 10000, interleaved, writes half, attention factor 1")],
)  # fmt: skip
def test_the_base_is_told_in_full_and_so_is_the_layout_that_is_written(model, said):
    found = audit(Path(__file__).parent / "configs" / f"{model}.json")
    assert said in [each.found for each in found]


def test_float32_angles_of_longrope_are_those_of_its_long_list():
    path = Path(__file__).parent / "configs" / "phi-3-mini-128k.json"
    # short_factor alone is right up to 144,179
    safe = longest_safe_position(from_hf_config(path), 1e-2, seq_len=131_072)
    assert f"float32 angles may be off by more than 0.01 rad beyond position {safe:,}" in [
        each.found for each in audit(path)
    ]


def test_parts_and_layer_types_are_looked_at_one_by_one():
    places = [each.where for each in audit({"model_type": "gemma3"})]
    assert any("text_config sliding_attention" in place for place in places)


def test_a_model_without_config_and_without_rope():
    assert audit(torch.nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    "data",
    [
        {"model_type": "bert"},
        {"model_type": "bloom", "hidden_size": 1024, "n_head": 16},
        {"model_type": "t5"},
        {"model_type": "falcon", "alibi": True},
        {"model_type": "wav2vec2-bert"},
    ],
)
def test_a_model_without_rope_has_no_fault(data):
    assert audit(data) == [("config", "no rotation", "", False)]


def test_a_buffer_that_a_model_without_rotation_does_not_read_is_no_fault():
    model = tiny_model(transformers.AutoModel, "falcon", alibi=True)
    assert [each.found for each in audit(model)] == [
        "no rotation", "8 frequencies, the config says no rotation"
    ]  # fmt: skip
    assert advice(model) == ""


def test_layers_without_rotation_are_counted():
    data = {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0] * 9}
    assert any("9 of 36 layers take no rotation" in each.found for each in audit(data))


def test_a_factor_that_shortens_is_a_hint_and_not_a_key_that_nobody_reads():
    config = {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 0.5}}
    (hint,) = (each for each in audit(config) if each.advice)
    assert hint.found.startswith("factor 0.5 < 1 shortens the context")
    assert hint.is_hint
    assert "nothing reads" not in hint.advice
