"""Models, and layers of models, that do not rotate: how often transformers does is counted."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers
from families import MOE, tiny_model
from tools import make_models
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.llama.modeling_llama import LlamaAttention

from rotary import from_hf_config
from rotary.audit import audit
from rotary.configs import choose

LAYERS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
          "num_hidden_layers": 3, "head_dim": 16}  # fmt: skip
HYBRID = {"layer_types": ["attention", "attention"], "num_local_experts": 0,
          "shared_intermediate_size": 64, "mamba_n_heads": 4, "mamba_d_head": 32}  # fmt: skip
# model_type, keys of the config -> how many layers rotate
WHOLE = [
    ("falcon", {}, 2),
    ("falcon", {"alibi": True}, 0),
    ("falcon", {"alibi": None}, 2),
    ("esm", {"mask_token_id": 3}, 0),
    ("esm", {"mask_token_id": 3, "position_embedding_type": "rotary"}, 2),
    ("granitemoehybrid", HYBRID, 0),
    ("granitemoehybrid", {**HYBRID, "position_embedding_type": "nope"}, 0),
    ("granitemoehybrid", {**HYBRID, "position_embedding_type": "rope"}, 2),
]
BY_TYPE = [
    ("cohere2", {"sliding_window": 4}, 2),
    ("exaone4", {"sliding_window": 4}, 2),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, 3),
    ("exaone_moe", {**MOE, "sliding_window": 4}, 2),
    ("afmoe", {**MOE, "sliding_window": 4}, 2),
    ("flint", {**MOE, "sliding_window": 4}, 2),
    ("kolibri1", {**MOE, "sliding_window": 4}, 2),
    ("cohere2_moe", {**MOE, "sliding_window": 4}, 2),
    ("cohere2_moe", {**MOE, "first_k_dense_replace": 3}, 3),
    ("cohere2_moe", {**MOE, "first_k_dense_replace": 1}, 2),
    ("lara_mini", {**MOE, "sliding_window": 4, "shared_expert_intermediate_size": 32}, 2),
]
# in the source of an attention that does
ROTATES = re.compile(r"apply_rotary|\bcos\b")


def layers_that_rotate(model, monkeypatch):
    """How often a forward rotates q and k."""
    calls, module = [], importlib.import_module(type(model).__module__)
    plain = module.apply_rotary_pos_emb

    def counted(*arguments, **names):
        calls.append(1)
        return plain(*arguments, **names)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", counted)
    with torch.no_grad():
        model(torch.arange(4, 9)[None])
    return len(calls)


@pytest.mark.parametrize(("family", "keys", "count"), WHOLE)
def test_a_config_without_rotation_is_none(monkeypatch, family, keys, count):
    model = tiny_model(transformers.AutoModel, family, **keys)
    assert layers_that_rotate(model, monkeypatch) == count
    data = {**model.config.to_dict(), **keys}
    assert (from_hf_config(data) is None) == (count == 0)
    silent = {key: data[key] for key in ("hidden_size", "num_attention_heads")}
    spec = from_hf_config({"model_type": family, **silent, **keys})
    assert (spec is None) == (count == 0)


@pytest.mark.parametrize(("family", "keys", "count"), BY_TYPE)
def test_layers_of_a_type_without_rotation_are_none(monkeypatch, family, keys, count):
    model = tiny_model(transformers.AutoModel, family, **{**LAYERS, **keys})
    assert layers_that_rotate(model, monkeypatch) == count
    data = model.config.to_dict()
    specs = [from_hf_config(data, kind) for kind in data["layer_types"]]
    assert [spec for spec in specs if spec is not None] == [from_hf_config(data)] * count
    if data["sliding_window"] is not None:  # the class has a window where the file says none
        silent = {key: value for key, value in data.items() if key != "sliding_window"}
        assert [from_hf_config(silent, kind) for kind in data["layer_types"]] == specs
    found = " ".join(finding.found for finding in audit(data))
    assert ("1 of 3 layers take no rotation: type full_attention" in found) == (count == 2)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("afmoe", {}),
        ("afmoe", {"global_attn_every_n_layers": 3}),
        ("cohere2", {}),
        ("cohere2", {"sliding_window_pattern": 2}),
        ("cohere2_moe", {"sliding_window_pattern": 3}),
        ("cohere2_moe", {"first_k_dense_replace": 3}),
        ("cohere2_moe", {"first_k_dense_replace": 5, "prefix_dense_sliding_window_pattern": 2}),
        ("exaone4", {"sliding_window": 4096}),
        ("exaone4", {"sliding_window": 4096, "sliding_window_pattern": 3}),
        ("exaone_moe", {"sliding_window": 4096, "first_k_dense_replace": 3}),
        ("kolibri1", {}),
        ("flint", {}),
        ("flint", {"num_hidden_layers": 1}),
        ("lara_mini", {}),
    ],
)
def test_types_that_the_class_makes_of_another_key_are_known(family, keys):
    data = {"model_type": family, "num_hidden_layers": 11, "head_dim": 128, **keys}
    made = transformers.AutoConfig.for_model(**data).to_dict()
    assert choose(data).data["layer_types"] == made["layer_types"]
    listed = {**data, "layer_types": made["layer_types"]}
    assert audit(data) == audit(listed)
    count = data["num_hidden_layers"]
    assert any(f"of {count} layers take no rotation" in each.found for each in audit(data))
    for kind in set(made["layer_types"]):
        assert from_hf_config(data, kind) == from_hf_config(listed, kind)


def test_the_published_config_of_command_r7b_says_which_layers_do_not_rotate():
    config = Path(__file__).with_name("configs") / "command-r7b.json"
    assert from_hf_config(config, "full_attention") is None
    assert from_hf_config(config, "sliding_attention") == from_hf_config(config)
    assert [each.found for each in audit(config)][1:] == [
        "8 of 32 layers take no rotation: type full_attention"
    ]


@pytest.mark.parametrize("value", [0, True, 1.5])
def test_a_pattern_that_is_no_count_is_refused(value):
    data = {"model_type": "exaone4", "num_hidden_layers": 8, "sliding_window_pattern": value}
    with pytest.raises(ValueError, match=r"^sliding_window_pattern must be"):
        from_hf_config(data)
    assert from_hf_config({**data, "layer_types": ["full_attention"] * 8}, "full_attention") is None


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("smollm3", "no_rope_layer_interval", "x"),
        ("smollm3", "no_rope_layer_interval", -3),
        ("cohere2_moe", "first_k_dense_replace", "x"),
        ("cohere2_moe", "mlp_layer_types", 3),
    ],
)
def test_a_key_of_layers_that_is_no_count_is_an_error_about_it(family, key, value):
    data = {"model_type": family, "layer_types": ["full_attention"] * 4, key: value}
    (found,) = [finding for finding in audit(data) if finding.is_fault]
    assert found.found == "cannot be read"
    assert found.advice.startswith(f"{key} must be")


def test_layers_beyond_the_list_of_their_mlps_are_of_experts():
    data = {"model_type": "cohere2_moe", "layer_types": ["full_attention"] * 4}
    config = choose({**data, "mlp_layer_types": ["dense"]})
    assert [config.rotates_layer(layer) for layer in range(4)] == [True, False, False, False]


def test_a_pattern_in_letters_says_no_types():
    """EXAONE 4 has "LLLG" beside its list; transformers fails where the list is missing."""
    data = {"model_type": "exaone4", "num_hidden_layers": 8, "sliding_window_pattern": "LLLG"}
    with pytest.raises(TypeError):
        transformers.AutoConfig.for_model(**data, sliding_window=4096)
    assert "layer_types" not in choose(data).data
    assert from_hf_config(data) == from_hf_config({"model_type": "exaone4"})


def test_layers_of_llama_4_without_rotation_are_none():
    config = transformers.AutoConfig.for_model("llama4_text", num_hidden_layers=4)
    types, flags = config.layer_types, config.no_rope_layers
    assert flags == [1, 1, 1, 0]
    for data in (config.to_dict(), {"model_type": "llama4_text", "layer_types": types}):
        rotates = [from_hf_config(data, kind) is not None for kind in types]
        assert rotates == [bool(flag) for flag in flags]


def test_layers_without_rotation_are_counted_where_no_list_says_which():
    config = {"model_type": "smollm3", "num_hidden_layers": 36}
    (found,) = [each.found for each in audit(config) if "take no rotation" in each.found]
    assert found == "9 of 36 layers take no rotation: every fourth"
    reading = from_hf_config({"model_type": "smollm3", "layer_types": ["full_attention"] * 4},
                             "full_attention")  # fmt: skip
    assert reading is not None  # three of them rotate


@pytest.mark.parametrize(
    ("keys", "rotates"),
    [
        ({}, True),
        ({"rope_theta": 5e5}, True),
        ({"rope_theta": None}, False),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, False),
    ],
)
def test_an_olmo_hybrid_without_a_base_does_not_rotate(keys, rotates):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model("olmo_hybrid", **sizes, **keys, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    assert (model.rotary_emb is not None) == rotates
    for data in ({"model_type": "olmo_hybrid", **sizes, **keys}, config.to_dict()):
        assert (from_hf_config(data) is not None) == rotates


@pytest.mark.parametrize("family", ["wav2vec2-conformer", "wav2vec2-bert"])
def test_an_encoder_of_audio_rotates_only_where_its_config_says_so(family):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    for keys in ({}, {"position_embeddings_type": "rotary"}):
        config = transformers.AutoConfig.for_model(family, **sizes, **keys)
        model = transformers.AutoModel.from_config(config)
        names = [type(each).__name__ for each in model.modules()]
        assert any("RotaryPositional" in name for name in names) == bool(keys)
        assert (from_hf_config({"model_type": family, **sizes, **keys}) is None) == (not keys)


def test_a_model_type_without_rope_is_refused_as_such():
    names = json.loads(make_models.WITHOUT_ROPE.read_text())
    assert {"gpt2", "bert", "t5", "mamba", "whisper", *make_models.STANDS_STILL} <= {*names}
    for name in names:
        with pytest.raises(ValueError, match=f"^model_type '{name}' has no RoPE in transformers"):
            from_hf_config({"model_type": name})
    spec = from_hf_config({"model_type": "bert", "head_dim": 64}, as_type="llama")
    assert spec.head_dim == 64


@pytest.mark.parametrize("name", sorted(make_models.STANDS_STILL))
def test_the_attention_of_the_text_calls_no_rotation(name):
    folder = model_type_to_module_name(name)
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    classes = [each for each in vars(module) if "Attention" in each and "Vision" not in each]
    own = [vars(module)[each] for each in classes]
    sources = [inspect.getsource(each.forward) for each in own if hasattr(each, "forward")]
    assert sources
    assert not [text for text in sources if ROTATES.search(text)]
    assert ROTATES.search(inspect.getsource(LlamaAttention.forward))
