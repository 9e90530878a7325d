"""The dialects of a config: names of other programs, parts, layer types, keys that nobody reads."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest

import rotary
from rotary import Rotary, from_hf_config
from rotary.configs import MODELS, layer_types, parts

SIZES = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 4096}
YARN = {"factor": 40.0, "original_max_position_embeddings": 4096}


def read(rope, **more):
    return from_hf_config({**SIZES, **more, "rope_scaling": rope})


def test_su_is_longrope():
    lists = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64}
    rope = {"type": "su", **lists, "original_max_position_embeddings": 1024}
    assert read(rope).schedule == "longrope"
    assert read(rope) == read({**rope, "type": "longrope"})


def test_mrope_is_default_with_three_axes():
    spec = read({"type": "mrope", "mrope_section": [16, 24, 24]})
    assert spec.schedule == "default"
    assert spec.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    turned = read({"type": "mrope", "mrope_section": [24, 20, 20], "mrope_interleaved": True})
    assert turned.axes[:6] == (0, 1, 2, 0, 1, 2)


def test_sections_must_sum_to_the_pairs():
    with pytest.raises(ValueError, match=r"mrope_section \[16, 24\] must sum to the 64 pairs"):
        read({"type": "mrope", "mrope_section": [16, 24]})


def test_hunyuan_says_dynamic_and_means_a_fixed_base():
    spec = read({"type": "dynamic", "alpha": 1000.0, "factor": 1.0})
    assert not spec.depends_on_length
    base = 10_000 * 1000 ** (128 / 126)
    np.testing.assert_allclose(rotary.inv_freq(spec)[0], base ** (-np.arange(64) / 64), rtol=1e-12)


def test_ntk_and_ntk_mixed_of_vllm():
    for ntk in ({"type": "ntk", "factor": 4.0}, {"type": "ntk", "factor": 4.0, "mixed_b": None}):
        assert (read(ntk).schedule, read(ntk).params["b"]) == ("ntk_mixed", 1.0)
    mixed = read({"type": "ntk", "factor": 4.0, "mixed_b": 0.5})
    assert (mixed.schedule, mixed.params["b"]) == ("ntk_mixed", 0.5)


def test_yarn_of_deepseek_takes_a_missing_mscale_all_dim_as_zero():
    spec = read({"type": "deepseek_yarn", **YARN, "mscale": 0.707})
    assert rotary.inv_freq(spec)[1] == pytest.approx(0.1 * 0.707 * math.log(40) + 1)
    plain = read({"type": "yarn", **YARN, "mscale": 0.707})
    assert rotary.inv_freq(plain)[1] == pytest.approx(0.1 * math.log(40) + 1)


def test_yarn_of_telechat():
    spec = read({"type": "telechat3-yarn", **YARN})
    assert rotary.inv_freq(spec)[1] == pytest.approx(0.07 * math.log(40) + 1)


def test_layouts_and_direction_belong_to_the_model():
    deepseek = from_hf_config({"model_type": "deepseek_v3"})
    assert (deepseek.head_dim, deepseek.layout, deepseek.out_layout) == (64, "interleaved", "half")
    plain = from_hf_config({"model_type": "deepseek_v3", "rope_interleave": False})
    assert (plain.layout, plain.out_layout) == ("half", "half")
    assert from_hf_config({"model_type": "nanochat"}).sign == -1
    assert from_hf_config({"model_type": "glm4"}).layout == "interleaved"
    assert from_hf_config({"model_type": "glm4_moe", "head_dim": 128}).layout == "half"
    assert from_hf_config({**SIZES, "rope_traditional": True}).layout == "interleaved"
    gptj = {"model_type": "gptj", "n_embd": 64, "n_head": 4, "rotary_dim": 8}
    assert from_hf_config(gptj).layout == "interleaved"
    assert from_hf_config({**gptj, "rope_traditional": False}).layout == "half"


@pytest.mark.parametrize("value", ["false", 0, None, [True]])
@pytest.mark.parametrize("key", ["rope_traditional", "rope_interleave"])
def test_a_mark_that_is_no_yes_or_no_is_refused(key, value):
    name = "llama" if key == "rope_traditional" else "deepseek_v3"
    with pytest.raises(ValueError, match=f"{key} must be true or false, got"):
        from_hf_config({"model_type": name, key: value})


def test_two_keys_that_say_different_layouts_are_refused():
    config = {"model_type": "deepseek_v3", "rope_interleave": True, "rope_traditional": False}
    with pytest.raises(ValueError, match="say different layouts of the weights: keep one"):
        from_hf_config(config)


@pytest.mark.parametrize("name", ["deepseek_v32", "longcat_flash", "glm_moe_dsa", "axk2",
                                  "bailing_hybrid", "mistral_large4_text", "kimi_k2"])  # fmt: skip
def test_a_key_that_the_code_of_a_model_ignores_says_nothing_or_is_refused(name):
    assert from_hf_config({"model_type": name, "rope_interleave": True}).layout == "interleaved"
    with pytest.raises(ValueError, match="'rope_interleave' is not known"):
        from_hf_config({"model_type": name, "rope_interleave": False})


def test_a_slice_may_be_the_last_channels():
    spec = from_hf_config({"model_type": "deepseek_v4"}, "compress")
    assert (spec.head_dim, spec.rotary_dim, spec.start, spec.base) == (512, 64, 448, 160_000.0)


def test_layer_types_have_frequencies_of_their_own():
    data = {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert layer_types(data) == ("full_attention", "sliding_attention")
    full, sliding = (from_hf_config(data, kind) for kind in layer_types(data))
    assert (full.schedule, full.base) == ("linear", 1e6)
    assert (sliding.schedule, sliding.base) == ("default", 1e4)
    local = from_hf_config({**data, "rope_local_base_freq": 5e3}, "sliding_attention")
    assert local.base == 5e3
    with pytest.raises(ValueError, match="did you mean 'full_attention'"):
        from_hf_config(data, "ful_attention")


def test_a_layer_type_without_rotation_is_none():
    assert from_hf_config({"model_type": "beam"}, "full_attention") is None


def test_layers_that_are_not_scaled():
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    data = {"model_type": "molmo2_text", "rope_parameters": rope, "num_hidden_layers": 4}
    assert from_hf_config({**data, "rope_scaling_layers": [0, 1, 2, 3]}).schedule == "linear"
    some = {**data, "rope_scaling_layers": [1, 3]}
    kinds = [from_hf_config(some, kind) for kind in ("scaled", "unscaled")]
    assert [(spec.schedule, spec.base) for spec in kinds] == [("linear", 5e5), ("default", 5e5)]
    with pytest.raises(ValueError, match="one of scaled, unscaled"):
        from_hf_config(some)


def test_a_base_for_each_layer():
    data = {"model_type": "granite_swa", "layer_rope_theta": [1e4, 5e5, 0]}
    assert layer_types(data) == ("rope_theta=10000", "rope_theta=500000", "rope_theta=0")
    bases = [from_hf_config(data, kind) for kind in layer_types(data)]
    assert [spec and spec.base for spec in bases] == [1e4, 5e5, None]


def test_parts_of_a_model_are_read_by_their_key():
    data = {"model_type": "qwen2_vl", "vision_config": {"embed_dim": 1280, "num_heads": 16}}
    assert parts(data) == ("vision_config", "text_config")
    assert from_hf_config(data).num_axes == 3
    vision = from_hf_config(data, part="vision_config")
    assert (vision.schedule, vision.head_dim, vision.num_axes) == ("axial", 80, 2)
    with pytest.raises(ValueError, match="did you mean 'vision_config'"):
        from_hf_config(data, part="vison_config")


@pytest.mark.parametrize(
    "data",
    [
        {**SIZES, "rope_thata": 1e5},
        {**SIZES, "rotary_percent": 0.5},
        {**SIZES, "rope_scaling": {"type": "linear", "factor": 2.0, "faktor": 2.0}},
    ],
)
def test_a_key_that_nobody_reads_is_an_error_or_a_warning(data):
    name = next(key for key in (*data, *data.get("rope_scaling", {}))
                if key in ("rope_thata", "rotary_percent", "faktor"))  # fmt: skip
    with pytest.raises(ValueError, match=name):
        from_hf_config(data)
    with pytest.warns(UserWarning, match=name):
        spec = from_hf_config(data, strict=False)
    sound = {key: value for key, value in data.items() if key in (*SIZES, "rope_scaling")}
    if "rope_scaling" in sound:
        sound["rope_scaling"] = {"type": "linear", "factor": 2.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spec == from_hf_config(sound)


def test_keys_of_vllm_and_others_that_change_what_is_computed():
    spec = read({"type": "dynamic", "factor": 4.0, "max_trained_positions": 1024})
    assert spec.params["original_max_position_embeddings"] == 1024
    assert read({"type": "yarn", **YARN, "extrapolation_factor": 1.0}) == read(
        {"type": "yarn", **YARN}
    )
    with pytest.raises(ValueError, match="extrapolation_factor"):
        read({"type": "yarn", **YARN, "extrapolation_factor": 0.5})
    assert from_hf_config({**SIZES, "rope_dim": 64}).rotary_dim == 64
    with pytest.raises(ValueError, match="FoPE"):
        read({"type": "default", "use_fope": True})
    for name in ("openpangu", "bailing_mrope", "mllama4"):  # of no file: set by code of vLLM
        with pytest.raises(ValueError, match=f"rope_type '{name}' is not known"):
            read({"type": name, "mrope_section": [24, 20, 20], "mrope_interleaved": True})


def test_what_is_not_a_rotation_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="mixes two axes"):
        from_hf_config({"model_type": "hunyuan_vl_text"})


def test_models_of_other_code_that_compute_the_same():
    key = {"layout_key": "rope_interleave"}  # which the class of transformers alone reads
    assert {**MODELS["kimi_k2"], **key} == MODELS["deepseek_v3"]
    assert from_hf_config({"model_type": "internlm2"}) == Rotary(head_dim=128)


@pytest.mark.parametrize(
    ("own", "as_type", "key"),
    [("internvl_chat", "internvl", "llm_config"), ("ovis", "ovis2", "llm_config"),
     ("deepseek_vl_v2", "deepseek_vl", "language_config")],
)  # fmt: skip
def test_a_text_model_under_the_key_of_other_code_is_read_or_refused(own, as_type, key):
    text = {"model_type": "qwen2", **SIZES, "rope_theta": 5e5}
    whole = {"model_type": own, key: text, "vision_config": {"model_type": "intern_vit_6b"}}
    assert from_hf_config(whole, as_type=as_type) == Rotary(head_dim=128, base=5e5)
    with pytest.raises(ValueError, match=f"needs text_config: the config has none but {key}"):
        from_hf_config({**whole, "model_type": as_type})


def test_a_base_inside_of_attn_config_is_refused_as_transformers_ignores_it():
    dbrx = {"model_type": "dbrx", "d_model": 6144, "n_heads": 48}
    for inside in ({}, {"rope_theta": 10_000}, {"rope_theta": None}):
        assert from_hf_config({**dbrx, "attn_config": inside}) == Rotary(head_dim=128)
    whole = {**dbrx, "attn_config": {"rope_theta": 500_000}}
    with pytest.raises(ValueError, match="500000 in attn_config is not read by transformers"):
        from_hf_config(whole)
    assert from_hf_config({**whole, "rope_theta": 500_000}).base == 500_000


def test_a_head_that_the_class_divides_is_divided():
    """Doubling the width of this model alone is an error of its class."""
    for heads in (8, 16):
        config = {"model_type": "pocket_tts", "hidden_size": 1024, "num_attention_heads": heads}
        assert from_hf_config(config).head_dim == 1024 // heads


def test_a_layer_type_that_the_model_does_not_have_is_refused():
    """By the reader, so by everything that reads a config: inspect, freqs, diff, reach, plan."""
    config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
    with pytest.raises(ValueError, match="layer_type 'foo' is not one of this model's"):
        from_hf_config(config, "foo")
    listed = {**config, "layer_types": ["full_attention", "sliding_attention"]}
    assert from_hf_config(listed, "sliding_attention") == from_hf_config(config)
    with pytest.raises(ValueError, match="layer_type 'foo'"):
        from_hf_config(listed, "foo")
    with pytest.raises(ValueError, match="one of full_attention, sliding_attention; got 'foo'"):
        from_hf_config({"model_type": "gemma3_text"}, "foo")


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"head_dim": 8}])
def test_a_part_that_the_model_does_not_have_is_refused(config):
    with pytest.raises(ValueError, match="part 'vision_config'"):
        from_hf_config(config, part="vision_config")


@pytest.mark.parametrize(
    ("name", "kind"), [("lfm2-8b-a1b", "conv"), ("qwen3.5-27b", "linear_attention")]
)
def test_a_listed_layer_type_that_does_not_rotate_is_none(name, kind):
    path = Path(__file__).parent / "configs" / f"{name}.json"
    assert from_hf_config(path, kind) is None
    assert from_hf_config(path, "full_attention") == from_hf_config(path)


def test_a_listed_layer_type_that_nobody_knows_is_refused():
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(
        ValueError, match="it is not known whether layers of type 'foo' have a RoPE"
    ):
        from_hf_config({**config, "layer_types": ["foo"]}, "foo")
