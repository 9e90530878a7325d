"""Configs other than the default ones, against the rotations of small models of transformers."""

import dataclasses
import importlib
import json
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")
from families import GPTJ, MOE, MROPE, TINY, tiny_model  # noqa: E402

import rotary  # noqa: E402
from rotary import from_hf_config  # noqa: E402
from rotary.audit import audit  # noqa: E402

WIDER = {"num_hidden_layers": 6, "head_dim": 32}
DOTS = {
    "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "index_head_dim": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "swa_qk_rope_head_dim": 8, "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
}  # fmt: skip


STEP_MODEL = importlib.import_module(
    "transformers.models.step3p7.modeling_step3p7"
).Step3p7TextModel._from_config
POSITIONS = torch.tensor([0, 1, 2, 5, 11, 30])


def rotations(monkeypatch, family, positions=POSITIONS, **keys):
    """The queries before and after each rotation of a forward, in the order of the layers."""
    auto = (
        SimpleNamespace(from_config=STEP_MODEL) if family == "step3p5" else transformers.AutoModel
    )
    model, found = tiny_model(auto, family, **keys), []
    module = importlib.import_module(type(model).__module__)
    plain = module.apply_rotary_pos_emb

    def kept(q, *arguments, **names):
        result = plain(q, *arguments, **names)
        found.append((q, result[0] if isinstance(result, tuple) else result))
        return result

    monkeypatch.setattr(module, "apply_rotary_pos_emb", kept)
    with torch.no_grad():
        model(torch.arange(4, 10)[None], position_ids=positions.expand(*positions.shape[:-1], 6))
    return model.config, found


def assert_turned_by(spec, found, positions=POSITIONS):
    """Each pair of `rotations` is a rotation by this spec."""
    for before, after in found:
        ours = rotary.apply(spec, before, positions=positions, seq_dim=-2)
        torch.testing.assert_close(ours, after, rtol=0, atol=1e-5 * float(after.abs().max()))


def made_of(data):
    """The config object that transformers makes of such a file."""
    return transformers.CONFIG_MAPPING[data["model_type"]].from_dict(json.loads(json.dumps(data)))


def as_saved(config, folder):
    """The file that transformers writes."""
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "data",
    [
        {"model_type": "gemma4_text", **WIDER, "global_head_dim": 32},
        {"model_type": "gemma4_text", **WIDER, "global_head_dim": 64},
        {"model_type": "gemma4_unified_text", **WIDER, "global_head_dim": 32},
        {"model_type": "embedding_gemma2_text", **WIDER, "global_head_dim": 32},
        {"model_type": "dots3_note_text", **DOTS},
        {"model_type": "dots3_note_text", **DOTS, "swa_qk_rope_head_dim": 4, "swa_head_dim": 20},
    ],
    ids=lambda data: data["model_type"],
)
def test_sizes_of_layer_types_survive_saving(data, tmp_path):
    """transformers leaves a size out of per_layer_config where it is that of the whole model."""
    config = made_of(data)
    name = "qk_rope_head_dim" if "qk_rope_head_dim" in data else "head_dim"
    for kind, layer in zip(config.layer_types, config.per_layer_config, strict=True):
        for read in (data, config, config.to_dict(), as_saved(config, tmp_path)):
            assert from_hf_config(read, kind).head_dim == getattr(layer, name)


def test_sizes_of_single_layers_need_their_types():
    data = {"model_type": "gemma4_text", "per_layer_config": {"5": {"head_dim": 512}}}
    with pytest.raises(ValueError, match="per_layer_config has head_dim for single layers, and"):
        from_hf_config(data, "full_attention")
    types = ["sliding_attention"] * 5 + ["full_attention"]
    assert from_hf_config({**data, "layer_types": types}, "full_attention").head_dim == 512


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"swa_qk_rope_head_dim": 4, "swa_head_dim": 20}, 4),
        ({"swa_head_dim": 28}, 12),
        ({"swa_qk_nope_head_dim": 128}, 128),
        ({}, 64),
    ],
)
def test_sliding_layers_of_dots_rotate_what_the_rest_leaves(keys, width):
    given = {key: value for key, value in DOTS.items() if not key.startswith("swa_")}
    data = {"model_type": "dots3_note_text", **given, **keys}
    if "swa_head_dim" in keys:
        data["swa_qk_nope_head_dim"] = 16
    config = made_of(data)
    layer = config.per_layer_config[config.layer_types.index("sliding_attention")]
    assert layer.qk_rope_head_dim == width
    for read in (data, config):
        assert from_hf_config(read, "sliding_attention").head_dim == width


# --- a list of bases of which only the zeros are read: Muse ---

MUSE = {**MOE, "head_dim": 16, "num_hidden_layers": 6, "moe_hidden_size": 64}


@pytest.mark.parametrize("family", ["muse_glimmer_text", "muse_spark_text"])
def test_bases_of_muse_say_only_which_layers_rotate(monkeypatch, family):
    rope = {"rope_type": "default", "rope_theta": 5e4}
    bases = [7e3, 0, 7e3, 7e3, 7e3, 7e3]
    keys = {**MUSE, "rope_parameters": rope, "layer_rope_theta": bases}
    config, found = rotations(monkeypatch, family, positions=POSITIONS[None], **keys)
    assert len(found) == 5
    assert_turned_by(rotary.Rotary(head_dim=16, base=5e4), found)
    for data in ({"model_type": family, **keys}, config.to_dict()):
        assert from_hf_config(data, "rope_theta=0") is None
        with pytest.raises(ValueError, match=r"layer_rope_theta has 7000.0, and the code of 'muse"):
            from_hf_config(data, "rope_theta=7000")
    same = {"model_type": family, **keys, "layer_rope_theta": [5e4] * 6}
    assert from_hf_config(same).base == 5e4


@pytest.mark.parametrize("family", ["muse_glimmer_text", "muse_spark_text"])
def test_every_fourth_layer_of_muse_from_the_last_takes_no_rotation(monkeypatch, family):
    config, found = rotations(monkeypatch, family, positions=POSITIONS[None], **MUSE)
    assert [bool(base) for base in config.layer_rope_theta] == [
        True,
        False,
        True,
        True,
        True,
        False,
    ]
    assert len(found) == 4
    silent = {"model_type": family, **MUSE}
    chosen = rotary.configs.choose(silent)
    assert [chosen.rotates_layer(layer) for layer in range(6)] == [
        *map(bool, config.layer_rope_theta)
    ]
    assert_turned_by(from_hf_config(silent), found)
    said = [each.found for each in audit(silent)]
    assert "2 of 6 layers take no rotation: every fourth, counted from the last" in said
    assert chosen.data == silent


@pytest.mark.parametrize("family", ["wav2vec2-conformer", "wav2vec2-bert", "seamless_m4t"])
def test_encoders_of_audio_read_rotary_embedding_base_alone(family):
    data = {
        "model_type": family,
        "position_embeddings_type": "rotary",
        "rotary_embedding_base": 500,
    }
    assert from_hf_config(data).base == 500
    for keys in ({"rope_theta": 7e3}, {"rope_parameters": {"rope_theta": 7e3}}):
        with pytest.raises(ValueError, match=r"rope_theta 7000.0 is not read for .* base is 500"):
            from_hf_config({**data, **keys})
    spec = rotary.Rotary(head_dim=from_hf_config(data).head_dim, base=321.0)
    written = rotary.configs.replace_rope(data, spec, 4096)
    assert written["rotary_embedding_base"] == 321
    made = made_of({**written, "rotary_embedding_base": 321})
    module = importlib.import_module(f"transformers.models.{family.replace('-', '_')}.modeling_"
                                     f"{family.replace('-', '_')}")  # fmt: skip
    (kind,) = [
        each for name, each in vars(module).items() if name.endswith("RotaryPositionalEmbedding")
    ]
    torch.testing.assert_close(kind(made).inv_freq, torch.tensor(rotary.inv_freq(spec)[0]).float())


# --- keys that the code of a model does not read ---


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gptj", GPTJ),
        ("codegen", GPTJ),
        ("gpt_neox", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ],
)
def test_head_dim_of_a_model_that_divides_is_refused(family, keys):
    data = {"model_type": family, **TINY, **keys}
    model = tiny_model(transformers.AutoModel, family, **keys, head_dim=32)
    attention = next(each for each in model.modules() if hasattr(each, "layer_idx"))
    assert getattr(attention, "head_dim", None) or attention.head_size == 16
    assert from_hf_config({**data, "head_dim": 16}) == from_hf_config(data)
    with pytest.raises(ValueError, match=f"head_dim 32 is not read by model_type '{family}'"):
        from_hf_config({**data, "head_dim": 32})


@pytest.mark.parametrize(
    ("family", "says"), [("qwen2_vl_text", True), ("qwen3_vl_text", False), ("glm4v_text", True)]
)
def test_an_order_of_axes_that_the_code_does_not_read_is_refused(monkeypatch, family, says):
    rope = {**MROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": says}
    if family == "glm4v_text":
        rope["partial_rotary_factor"] = 1.0
    at = torch.stack((POSITIONS, POSITIONS + 3, 2 * POSITIONS))[:, None]
    keys = {"head_dim": 16, "rope_parameters": rope}
    config, found = rotations(monkeypatch, family, positions=at, **keys)
    with pytest.raises(ValueError, match=f"mrope_interleaved {says} is not read by model_type"):
        from_hf_config(config)
    own = {key: value for key, value in rope.items() if key != "mrope_interleaved"}
    spec = from_hf_config({**config.to_dict(), "rope_parameters": own})
    assert_turned_by(spec, found, at[:, 0].T)
    agrees = {**config.to_dict(), "rope_parameters": {**own, "mrope_interleaved": not says}}
    assert from_hf_config(agrees) == spec


def test_a_model_of_three_axes_has_three_sections(monkeypatch):
    """transformers deals four sections out to three axes, the last to the first of them."""
    rope = {**MROPE, "mrope_section": [2, 2, 2, 2]}
    at = torch.stack((POSITIONS, POSITIONS + 3, 2 * POSITIONS))[:, None]
    config, found = rotations(monkeypatch, "qwen2_vl_text", positions=at, rope_parameters=rope)
    assert_turned_by(rotary.Rotary(head_dim=16, axes=(0, 0, 1, 1, 2, 2, 0, 0)), found, at[:, 0].T)
    with pytest.raises(ValueError, match="must be 3 numbers: model_type 'qwen2_vl_text' has"):
        from_hf_config(config)


# --- layers whose types the default config does not have ---

MIXED = ["sliding_attention", "full_attention"]
STEP = {**MOE, "head_dim": 16, "layer_types": MIXED, "mlp_layer_types": ["dense"] * 2,
        "sliding_window": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("laguna", {**MOE, "head_dim": 16, "layer_types": MIXED}),
        ("mellum", {**MOE, "head_dim": 16, "layer_types": MIXED}),
        ("step3p5", STEP),
        ("step3p5", {**STEP, "rope_theta": 777.0}),
        ("step3p5", {**STEP, "rope_theta": [1e4, 5e6], "partial_rotary_factors": [1.0, 0.5]}),
        ("step3p5", {**STEP, "rope_theta": [1e4, 5e6], "rope_scaling":
                     {"rope_type": "linear", "factor": 4.0}}),
    ],
)  # fmt: skip
def test_types_of_layers_that_a_config_lists(monkeypatch, family, keys):
    at = POSITIONS[None]
    config, found = rotations(monkeypatch, family, positions=at, **keys)
    for data in ({"model_type": family, **TINY, **keys}, config.to_dict()):
        assert {*rotary.configs.layer_types(data)} == {*MIXED}
        for kind, (before, after) in zip(MIXED, found, strict=True):
            spec = from_hf_config(data, kind)
            start = spec.rotary_dim if before.shape[-1] == spec.rotary_dim else 16
            assert_turned_by(spec, [(torch.nn.functional.pad(before, (0, 16 - start)),
                                     torch.nn.functional.pad(after, (0, 16 - start)))])  # fmt: skip


def test_step_takes_no_base_beside_entries():
    """transformers drops it and takes 10,000."""
    rope = {"full_attention": {"rope_type": "default"}}
    data = {"model_type": "step3p5", "head_dim": 16, "rope_parameters": rope, "rope_theta": 999.0}
    assert made_of(data).rope_parameters["full_attention"].get("rope_theta", 1e4) == 1e4
    with pytest.raises(ValueError, match="rope_parameters of 'full_attention' needs rope_theta"):
        from_hf_config(data, "full_attention")


def test_a_list_of_bases_is_long_enough():
    data = {"model_type": "step3p5", "layer_types": MIXED, "rope_theta": [1e4]}
    with pytest.raises(ValueError, match="rope_theta has 1 values, and layer_types has more"):
        from_hf_config(data, "full_attention")


@pytest.mark.parametrize("family", ["laguna", "mellum"])
@pytest.mark.parametrize("kind", MIXED)
def test_the_rope_of_one_layer_type_is_replaced_where_a_file_has_none(family, kind):
    data = {"model_type": family, "layer_types": MIXED, "num_hidden_layers": 2}
    (other,) = {*MIXED} - {kind}
    spec = dataclasses.replace(from_hf_config(data, kind), base=777.0)
    new = rotary.configs.replace_rope(data, spec, 4096, kind)
    assert from_hf_config(new, other) == from_hf_config(data, other)
    made = made_of(new).rope_parameters
    assert made[kind]["rope_theta"] == 777
    assert made[other] == made_of(data).rope_parameters[other]


@pytest.mark.parametrize("family", ["dots3_note_text", "dory"])
def test_a_file_needs_entries_of_the_types_that_it_lists(family):
    """As transformers saves a model all of whose layers are of one type."""
    kind = "sliding_attention"
    rope = {kind: {"rope_type": "default", "rope_theta": 777.0}}
    data = {"model_type": family, "rope_parameters": rope, "layer_types": [kind] * 2}
    assert rotary.configs.layer_types(data) == (kind,)
    assert from_hf_config(data, kind).base == 777
    with pytest.raises(ValueError, match=r"has no entry for '(full|indexed)_attention'"):
        from_hf_config({**data, "layer_types": [kind, "full_attention", "indexed_attention"]}, kind)


def test_mistral_large_4_has_an_interval_of_layers_without_rotation():
    data = {
        "model_type": "mistral_large4_text",
        "num_hidden_layers": 6,
        "no_rope_layer_interval": 3,
    }
    flags = made_of(data).no_rope_layers
    assert flags == [1, 1, 0, 1, 1, 0]
    with pytest.warns(UserWarning, match="trained number"):
        assert from_hf_config(data) is not None
    chosen = rotary.configs.choose(data)
    assert [chosen.rotates_layer(layer) for layer in range(6)] == [*map(bool, flags)]
