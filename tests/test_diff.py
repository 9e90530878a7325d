"""One config as six programs read it: transformers' own numbers, and the formulas of the others."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import rotary
from rotary.configs import layer_types, parts
from rotary.programs import PROGRAMS, diff, readings

transformers = pytest.importorskip("transformers")
from huggingface_hub.errors import StrictDataclassClassValidationError  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

NAMES = ("transformers", "vLLM", "SGLang", "llama.cpp", "mlx-lm", "keras-hub")
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 1e4,
         "max_position_embeddings": 4096}  # fmt: skip
FLOAT32_RTOL = 32 * 2.0**-24  # float32 exponents, magnified by ln(base)
LISTS = {"short_factor": np.linspace(1, 3, 64).tolist(),
         "long_factor": np.geomspace(1, 40, 64).tolist()}  # fmt: skip
ROPES = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 6.0, "original_max_position_embeddings": 1024},
    "longrope": {**LISTS, "factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.25},
}  # fmt: skip


def scaled(rope_type, /, *, model_type="llama", outer=None, **rope):
    """A v4 config of Llama 2's shape, which every program reads."""
    return {**LLAMA, **(outer or {}), "model_type": model_type,
            "rope_scaling": {"rope_type": rope_type, **rope}}  # fmt: skip


def read(config, **arguments):
    return {each.framework: each for each in readings(config, **arguments)}


def ladder(base=1e4, dim=128):
    return np.array([base ** (-2 * i / dim) for i in range(dim // 2)])


def ramp(low, high, pairs):
    return np.clip((np.arange(pairs) - low) / (high - low), 0, 1)


def yarn(base, dim, factor, low, high):
    mixed = ramp(low, high, dim // 2)
    return ladder(base, dim) / factor * mixed + ladder(base, dim) * (1 - mixed)


def base_of(inv_freq, dim=128):
    """The base of a plain ladder, from its last pair."""
    return inv_freq[-1] ** (-dim / (dim - 2))


def theirs(config):
    data = copy.deepcopy(config)  # transformers writes into the dicts it is given
    return transformers.AutoConfig.for_model(data.pop("model_type"), **data)


def module_of(config):
    loaded = theirs(config)
    return modeling_llama.LlamaRotaryEmbedding(loaded)


def assert_transformers(config, seq_len=None, module=None):
    """Our reading is what the module of transformers has after a row of `seq_len` tokens."""
    reading = readings(config, seq_len=seq_len)[0]
    module = module or module_of(config)
    if seq_len is not None:
        module(torch.zeros(1), torch.arange(seq_len)[None])
    np.testing.assert_allclose(reading.inv_freq, module.inv_freq.numpy(), rtol=FLOAT32_RTOL, atol=0)
    assert reading.attention_factor == pytest.approx(module.attention_scaling, rel=1e-12)


# inv_freq of pairs 30 and 40, and amplitude, as float32 classes of vLLM 0.33.0, SGLang 0.5.23 and
# mlx-lm 0.32.2 gave them, each run alone on its own file; None: it raised
YARN = {"factor": 6.0, "original_max_position_embeddings": 1024}
LONGROPE = {**LISTS, "original_max_position_embeddings": 1024}
RUN = [
    ("linear", 4096, {"factor": 3.0},
     [(0.00444507, 0.00105409, 1.0), (0.00444507, 0.00105409, 1.0),
      (0.00444507, 0.00105409, 1.0)]),
    ("dynamic", 10, {"factor": 4.0},
     [(0.0133352, 0.00316228, 1.0), (0.00393143, 0.000620489, 1.0), (0.0133352, 0.00316228, 1.0)]),
    ("dynamic", 9000, {"factor": 4.0},
     [(0.0133352, 0.00316228, 1.0), (0.00393143, 0.000620489, 1.0),
      (0.00577901, 0.00103706, 1.0)]),
    ("dynamic", 4096, {"factor": 1.0, "alpha": 1000.0},
     [(0.000497083, 3.93766e-05, 1.0), (0.000497083, 3.93766e-05, 1.0),
      (0.0133352, 0.00316228, 1.0)]),
    ("dynamic", 4096, {"factor": 4.0, "max_trained_positions": 1024},
     [(0.00393143, 0.000620489, 1.0), (0.00393143, 0.000620489, 1.0),
      (0.0133352, 0.00316228, 1.0)]),
    ("yarn", 4096, YARN,
     [(0.00488958, 0.000527046, 1.17918), (0.00488958, 0.000527046, 1.17918),
      (0.00488958, 0.000527046, 1.17918)]),
    ("yarn", 4096, {**YARN, "attention_factor": 0.5},
     [(0.00488958, 0.000527046, 0.5), (0.00488958, 0.000527046, 1.17918),
      (0.00488958, 0.000527046, 1.17918)]),
    ("yarn", 4096, {**YARN, "attn_factor": 0.9},
     [(0.00488958, 0.000527046, 1.17918), (0.00488958, 0.000527046, 1.06126),
      (0.00488958, 0.000527046, 1.17918)]),
    ("yarn", 4096, {**YARN, "mscale": 0.7},
     [(0.00488958, 0.000527046, 1.17918), (0.00488958, 0.000527046, 1.17918),
      (0.00488958, 0.000527046, 1.12542)]),
    ("yarn", 4096, {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0},
     [(0.00488958, 0.000527046, 1.17918), (0.00488958, 0.000527046, 1.12542),
      (0.00488958, 0.000527046, 1.12542)]),
    ("yarn", 4096, {**YARN, "truncate": False, "beta_fast": 20, "beta_slow": 2},
     [(0.00262359, 0.000527046, 1.17918), (0.00262359, 0.000527046, 1.17918),
      (0.00287622, 0.000527046, 1.17918)]),
    ("yarn", 4096, {**YARN, "extrapolation_factor": 0.5},
     [(0.00488958, 0.000527046, 1.17918), (0.00355606, 0.000527046, 1.17918),
      (0.00488958, 0.000527046, 1.17918)]),
    ("yarn", 4096, {**YARN, "mrope_section": [16, 24, 24]},
     [(0.00906111, 0.00113518, 1.17918), (0.00488958, 0.000527046, 1.17918),
      (0.00488958, 0.000527046, 1.17918)]),
    ("yarn", 4096, {**YARN, "mrope_section": [16, 24, 24], "mscale": 1.0},
     [(0.00906111, 0.00113518, 1.17918), None, (0.00488958, 0.000527046, 1.17918)]),
    ("deepseek_yarn", 4096, {**YARN, "mscale": 0.7},
     [(0.00488958, 0.000527046, 1.12542), (0.00488958, 0.000527046, 1.12542),
      (0.00488958, 0.000527046, 1.12542)]),
    ("telechat3-yarn", 4096, YARN,
     [(0.00488958, 0.000527046, 1.12542), None, (0.00488958, 0.000527046, 1.17918)]),
    ("longrope", 1025, LONGROPE,
     [(0.00230205, 0.000303962, 1.09545), (0.00683023, 0.00139317, 1.09545),
      (0.00230205, 0.000303962, 1.09545)]),
    ("longrope", 9000, {**LONGROPE, "factor": 16.0},
     [(0.00230205, 0.000303962, 1.09545), (0.00230205, 0.000303962, 1.09545),
      (0.00230205, 0.000303962, 1.09545)]),
    ("longrope", 10, {**LONGROPE, "short_mscale": 1.5, "long_mscale": 2.5},
     [(0.00230205, 0.000303962, 2.5), (0.00683023, 0.00139317, 1.5),
      (0.00230205, 0.000303962, 1.09545)]),
    ("su", 4096, LONGROPE,
     [(0.00230205, 0.000303962, 1.09545), None, None]),
    ("llama3", 4096, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 512},
     [(0.00200393, 0.000395285, 1.0), (0.00200393, 0.000395285, 1.0),
      (0.00200393, 0.000395285, 1.0)]),
    ("ntk", 4096, {"factor": 4.0},
     [(0.00681361, 0.00130108, 1.0), None, None]),
    ("ntk", 4096, {"factor": 4.0, "mixed_b": 0.6},
     [(0.00543605, 0.00109422, 1.0), None, None]),
]  # fmt: skip


@pytest.mark.parametrize(("rope_type", "seq_len", "rope", "theirs"), RUN, ids=str)
def test_the_classes_of_three_programs_gave_the_same(rope_type, seq_len, rope, theirs):
    found = read(scaled(rope_type, **rope), seq_len=seq_len)
    for name, expected in zip(("vLLM", "SGLang", "mlx-lm"), theirs, strict=True):
        if expected is None:
            assert found[name].refuses
        else:
            inv_freq = found[name].inv_freq
            ours = (inv_freq[30], inv_freq[40], found[name].attention_factor)
            np.testing.assert_allclose(ours, expected, rtol=1e-5)


# --- transformers, as it computes ---


@pytest.mark.parametrize("rope_type", ROPES)
def test_the_reading_of_transformers_is_what_it_computes(rope_type):
    old = scaled(rope_type, **ROPES[rope_type])
    rope = {"rope_type": rope_type, "rope_theta": 5e5, **ROPES[rope_type]}
    new = {**LLAMA, "rope_parameters": rope}
    del new["rope_theta"]
    for config in (old, new):
        if rope_type in ("dynamic", "longrope"):
            for seq_len in (1, 1024, 1025, 4096, 4097, 9000):
                assert_transformers(config, seq_len)
        else:
            assert_transformers(config)


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_factor": 0.5},
        {"mscale": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"mscale": 0.7, "mscale_all_dim": 0.0},
        {"truncate": False, "beta_fast": 20, "beta_slow": 2},
        {"factor": None},
        {"factor": 0.5},
    ],
    ids=str,
)
def test_the_reading_of_transformers_for_every_key_of_yarn(extra):
    assert_transformers(scaled("yarn", **{**ROPES["yarn"], **extra}))


def test_transformers_does_not_read_alpha():
    assert_transformers(scaled("dynamic", factor=1.0, alpha=1000.0), 9000)


@pytest.mark.parametrize("extra", [{"attention_factor": 0.5}, {"factor": None}, {"factor": 0.5}])
def test_the_reading_of_transformers_for_the_amplitude_of_longrope(extra):
    assert_transformers(scaled("longrope", **{**ROPES["longrope"], **extra}), 2000)


def test_a_trained_length_outside_the_dict_wins_in_transformers():
    outer = {"original_max_position_embeddings": 2048}
    config = scaled("yarn", outer=outer, **ROPES["yarn"])
    assert_transformers(config)
    assert "2048" in readings(config)[0].schedule


def test_a_slice_is_ignored_by_the_default_type_of_llama_and_obeyed_by_the_others():
    config = {**LLAMA, "head_dim": 64, "partial_rotary_factor": 0.5}
    assert_transformers(config)
    found = read(config)
    assert {name: len(each.inv_freq) for name, each in found.items()} == {
        "transformers": 32, "vLLM": 16, "SGLang": 32, "llama.cpp": 32, "mlx-lm": 32, "keras-hub": 32
    }  # fmt: skip
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    assert_transformers(config)
    assert [len(each.inv_freq) for each in readings(config)[:5]] == [16, 16, 32, 32, 32]


def test_the_slice_of_a_family_that_has_one_is_read_by_all():
    config = {**LLAMA, "model_type": "stablelm", "partial_rotary_factor": 0.25}
    for model_type in ("stablelm", "glm4"):
        config["model_type"] = model_type
        assert diff(config).verdict == f"All that read it agree: {', '.join(NAMES[:5])}."
        assert [len(each.inv_freq) for each in readings(config)[:5]] == [16] * 5


CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))


def entries_of(path):
    """Every part and layer type of a config that `from_hf_config` reads."""
    for part in (None, *parts(path)):
        try:
            for layer_type in layer_types(path, part=part) or (None,):
                spec = rotary.from_hf_config(path, layer_type, part=part)
                if spec is not None:
                    yield part, layer_type, spec
        except ValueError:
            continue  # its model type is not known, or it is no single rotation


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_line_of_transformers_is_what_from_hf_config_reads(path):
    for part, layer_type, spec in entries_of(path):
        trained = spec.params.get("original_max_position_embeddings")
        result = diff(path, layer_type=layer_type, part=part)
        for seq_len in result.lengths:
            if path.stem == "phi-3.5-moe" and seq_len > trained:
                continue  # transformers keeps the short list: DIFFERENCES.md
            reading = readings(path, seq_len=seq_len, layer_type=layer_type, part=part)[0]
            inv_freq, factor = rotary.inv_freq(spec, seq_len)
            assert reading.inv_freq.tobytes() == inv_freq.tobytes()
            assert reading.attention_factor == factor


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_from_hf_config_refuses_as_unknown_diff_refuses_too(path):
    model_type = json.loads(path.read_text()).get("model_type")
    try:
        rotary.from_hf_config(path)
    except ValueError as error:
        if "model_type" in str(error):
            with pytest.raises(ValueError, match=f"model_type '{model_type}' is not known"):
                diff(path)


@pytest.mark.parametrize("rope_type", ["su", "ntk", "mrope", "telechat3-yarn", "deepseek_yarn"])
def test_the_types_that_transformers_refuses(rope_type):
    config = scaled(rope_type, **LISTS, factor=4.0, mrope_section=[16, 24, 24],
                    original_max_position_embeddings=1024)  # fmt: skip
    with pytest.raises(KeyError, match=rope_type):
        module_of(config)
    refused = read(config)["transformers"]
    assert refused.refuses == f"KeyError: '{rope_type}'"
    assert refused.inv_freq is None
    assert refused.attention_factor is None
    assert not read(config)["vLLM"].refuses


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "longrope", "llama3"])
def test_a_missing_key_is_refused_by_all_that_load_the_class_of_transformers(rope_type):
    config = scaled(rope_type, original_max_position_embeddings=1024)
    with pytest.raises(KeyError, match="Missing required keys"):
        theirs(config)
    found = read(config)
    for name in ("transformers", "vLLM", "SGLang"):
        assert found[name].refuses.startswith("KeyError: missing required keys"), name
    if rope_type in ("linear", "yarn"):
        assert found["llama.cpp"].advice.endswith(f"{rope_type} without a factor at all")


def test_the_class_of_phi3_reads_su_and_yarn_as_longrope():
    lists = {name: values[:48] for name, values in LISTS.items()}
    outer = {"hidden_size": 3072, "original_max_position_embeddings": 1024}
    config = scaled("su", model_type="phi3", outer=outer, **lists)
    with pytest.raises(KeyError, match="original_max_position_embeddings"):
        theirs(config)
    assert "original_max_position_embeddings" in read(config)["transformers"].refuses
    for rope_type, inside in (
        ("su", {"original_max_position_embeddings": 9}),
        ("yarn", {"factor": 4}),
    ):
        config = scaled(rope_type, model_type="phi3", outer=outer, **lists, **inside)
        module = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(theirs(config))
        for seq_len in (1024, 1025):
            assert_transformers(config, seq_len, module)
        assert not any(each.refuses for each in readings(config)[:4])
    with pytest.raises(StrictDataclassClassValidationError, match="longrope"):
        theirs({**config, "rope_scaling": {"type": "linear", "factor": 2.0}})
    found = read({**config, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert [name for name in NAMES if not found[name].refuses] == ["llama.cpp", "keras-hub"]
    assert found["keras-hub"].not_compared
    found = read({**config, "rope_scaling": {"type": "longrope", **lists}}, seq_len=9)
    assert found["mlx-lm"].attention_factor == pytest.approx(math.sqrt(1.2))  # ln 4 / ln 1024


def test_types_that_transformers_refuses_for_one_model():
    ernie = scaled("linear", model_type="ernie4_5_vl_moe_text", factor=2.0)
    ernie_module = transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe
    with pytest.raises(ValueError, match="requires the `default` rope type"):
        ernie_module.Ernie4_5_VLMoeTextRotaryEmbedding(theirs(ernie))
    cosmos = scaled("linear", model_type="cosmos3_edge_text", factor=2.0)
    with pytest.raises(StrictDataclassClassValidationError, match="rope_type='default'"):
        theirs(cosmos)
    for config in (ernie, cosmos):
        assert (
            read(config)["transformers"].refuses == "ValueError: type must be default, got linear"
        )
    phimoe = scaled("longrope", model_type="phimoe", **ROPES["longrope"])
    with pytest.raises(StrictDataclassClassValidationError, match="short_mscale"):
        theirs(phimoe)
    assert read(phimoe)["transformers"].refuses == "TypeError: short_mscale must be a number"


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic", "longrope", "linear", "llama3"])
def test_transformers_fails_on_a_head_dim_that_its_class_leaves_null(rope_type):
    module = transformers.models.mixtral.modeling_mixtral.MixtralRotaryEmbedding
    config = scaled(rope_type, model_type="mixtral", **ROPES[rope_type])
    found = read(config, seq_len=4096)
    if rope_type in ("linear", "llama3"):
        assert_transformers(config, 4096, module(theirs(config)))
        return
    with pytest.raises((TypeError, StrictDataclassClassValidationError), match="NoneType"):
        module(theirs(config))
    assert found["transformers"].refuses.startswith("TypeError: head_dim is null")
    # the file is loaded for vLLM too, where only longrope is checked
    assert bool(found["vLLM"].refuses) == (rope_type == "longrope")
    assert_transformers(
        {**config, "head_dim": 128}, 4096, module(theirs({**config, "head_dim": 128}))
    )


def test_transformers_keeps_the_short_list_of_phimoe():
    rope = {**ROPES["longrope"], "short_mscale": 1.25, "long_mscale": 1.5}
    config = scaled("longrope", model_type="phimoe", **rope)
    module = transformers.models.phimoe.modeling_phimoe.PhimoeRotaryEmbedding(theirs(config))
    for seq_len, amplitude in ((1024, 1.25), (2000, 1.5)):
        found = read(config, seq_len=seq_len)
        cos, _ = module(torch.zeros(1), torch.arange(seq_len)[None])
        assert float(cos[0, 0, 0]) == amplitude == found["transformers"].attention_factor
        turned = torch.arange(2.0)[1] * torch.tensor(found["transformers"].inv_freq)
        expected = torch.cos(turned) * amplitude
        torch.testing.assert_close(cos[0, 1, :64].double(), expected, rtol=1e-6, atol=1e-6)
    assert found["vLLM"].attention_factor == 1.5
    assert found["llama.cpp"].attention_factor == pytest.approx(math.sqrt(1.2))
    np.testing.assert_allclose(found["vLLM"].inv_freq, ladder() / LISTS["long_factor"], rtol=1e-12)


def test_truncate_is_ignored_by_transformers_in_a_nested_config():
    rope = {"rope_theta": 1e4, "rope_type": "yarn", **ROPES["yarn"], "truncate": False}
    config = {"model_type": "olmo3", "hidden_size": 4096, "num_attention_heads": 32,
              "max_position_embeddings": 4096, "num_hidden_layers": 2,
              "layer_types": ["full_attention", "sliding_attention"],
              "rope_parameters": {"full_attention": rope,
                                  "sliding_attention": {**rope, "beta_fast": 9.0}}}  # fmt: skip
    yarn_of_theirs = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    inv_freq, _ = yarn_of_theirs(theirs(config), layer_type="full_attention")
    found = read(config, layer_type="full_attention")
    np.testing.assert_allclose(found["transformers"].inv_freq, inv_freq, rtol=FLOAT32_RTOL)
    assert diff(config, layer_type="full_attention").differences[0].inv_freq > 0.01
    assert "not truncated" in found["vLLM"].schedule
    found = read(config, layer_type="sliding_attention")
    assert found["llama.cpp"].schedule.startswith("plain")
    assert "rope_theta" in found["mlx-lm"].refuses  # its file reads the old keys alone


# --- dynamic ---


@pytest.mark.parametrize(
    ("tokens", "transformers_base"), [(1, 1.0e4), (4096, 1.0e4), (8192, 5.1e4), (16384, 1.35e5)]
)
def test_dynamic_of_factor_4_has_three_bases(tokens, transformers_base):
    found = read(scaled("dynamic", factor=4.0), seq_len=tokens)
    bases = {name: base_of(found[name].inv_freq) for name in NAMES[:5]}
    expected = [transformers_base, 1.0e4, 1.35e5, 1.0e4, transformers_base]
    np.testing.assert_allclose(list(bases.values()), expected, rtol=0.01)
    assert found["vLLM"].switch == found["SGLang"].switch == "never"
    assert "batch" in found["transformers"].switch


def test_vllm_scales_dynamic_once_it_knows_the_trained_length():
    config = scaled("dynamic", factor=4.0, max_trained_positions=1024)
    advice = "vLLM does not scale this config at all: give max_trained_positions"
    assert advice in diff(scaled("dynamic", factor=4.0)).verdict
    assert advice not in diff(config).verdict


# --- YaRN ---


def test_mscale_alone_is_read_by_mlx_and_the_deepseek_type():
    rope = {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707}
    found = read(scaled("deepseek_yarn", **rope))
    assert found["llama.cpp"].attention_factor == 1.0
    np.testing.assert_allclose(found["llama.cpp"].inv_freq, ladder(), rtol=1e-15)
    assert "mscale_all_dim" in diff(scaled("yarn", **rope)).verdict


def test_attention_factor_and_attn_factor():
    gain = 1 + 0.1 * math.log(6)
    config = scaled("yarn", **ROPES["yarn"], attention_factor=0.5, attn_factor=0.9)
    amplitudes = [each.attention_factor for each in readings(config)[:5]]
    assert amplitudes == pytest.approx([0.5, 0.5, 0.9 * gain, gain, gain])
    found = read(scaled("deepseek_yarn", **ROPES["yarn"], attn_factor=0.9))
    assert found["SGLang"].attention_factor == pytest.approx(0.9 * gain)
    assert found["vLLM"].attention_factor == pytest.approx(gain)
    below_1 = {**ROPES["yarn"], "factor": 0.5}
    amplitudes = [each.attention_factor for each in readings(scaled("yarn", **below_1))[:5]]
    assert amplitudes == pytest.approx([1, 1, 1, 1, 1])


def test_the_ramp_of_mrope_with_yarn_is_four_times_as_long_in_vllm():
    rope = {"factor": 4.0, "original_max_position_embeddings": 32768}
    outer = {"rope_theta": 1e6, "max_position_embeddings": 131072}
    config = scaled("yarn", outer=outer, **rope, mrope_section=[16, 24, 24])
    (worst, *others) = diff(config).differences
    assert worst.framework == "vLLM"
    assert worst.inv_freq == pytest.approx(1.24, abs=0.01)
    assert all(each.agrees for each in others)
    verdict = diff(scaled("yarn", outer=outer, **rope)).verdict
    assert verdict == "Refused by keras-hub; all others agree."


def test_who_reads_truncate_and_the_betas():
    config = scaled("yarn", **ROPES["yarn"], truncate=False, beta_fast=16.0)
    place = [128 * math.log(1024 / (r * 2 * math.pi)) / (2 * math.log(1e4)) for r in (32, 16, 1)]
    exact = yarn(1e4, 128, 6, place[1], place[2])
    rounded = yarn(1e4, 128, 6, math.floor(place[1]), math.ceil(place[2]))
    of_32 = yarn(1e4, 128, 6, math.floor(place[0]), math.ceil(place[2]))
    expected = [exact, exact, exact, of_32, rounded]
    for reading, inv_freq in zip(readings(config)[:5], expected, strict=True):
        np.testing.assert_allclose(reading.inv_freq, inv_freq, rtol=1e-12)
    config["model_type"] = "ministral3"
    np.testing.assert_allclose(read(config)["llama.cpp"].inv_freq, rounded, rtol=1e-12)


def test_a_trained_length_that_is_missing_is_another_one_in_mlx():
    found = read(scaled("yarn", factor=4.0, outer={"max_position_embeddings": 16384}))
    lengths = [found[name].schedule.split()[-1] for name in NAMES[:5]]
    assert lengths == ["16384"] * 4 + ["4096"]


# --- linear, llama3, NTK, proportional ---


def test_a_whole_factor_is_a_type_error_in_vllm_and_sglang():
    found = read(scaled("linear", factor=8))
    for name in NAMES:
        if name in ("vLLM", "SGLang"):
            assert found[name].refuses.startswith("TypeError: 'int'")
        elif name != "keras-hub":
            np.testing.assert_allclose(found[name].inv_freq, ladder() / 8, rtol=1e-15)
    assert diff(scaled("linear", factor=8.0)).differences[-1].agrees
    assert "write factor with a decimal point" in diff(scaled("linear", factor=8)).verdict


def test_a_wavelength_on_the_edge_of_llama3_is_kept_by_mlx_alone():
    wavelength = 2 * math.pi / float(ladder(dim=4)[1])
    length = next(n for n in range(2, 9999) if n / (n / wavelength) == wavelength)
    rope = {"factor": 8.0, "low_freq_factor": length / wavelength, "high_freq_factor": 1e4,
            "original_max_position_embeddings": length}  # fmt: skip
    config = {**scaled("llama3", **rope), "head_dim": 4}
    for name, reading in read(config).items():
        expected = 0.01 if name == "mlx-lm" else 0.01 / 8
        assert reading.inv_freq[1] == pytest.approx(expected, rel=1e-9), name
    assert diff(scaled("llama3", **ROPES["llama3"])).verdict == "All six agree."


def test_the_factor_of_proportional_is_dropped_by_three():
    config = scaled("proportional", **ROPES["proportional"])
    expected = np.where(np.arange(64) < 16, ladder(), 0)
    for name, reading in list(read(config).items())[:5]:
        factor = 2 if name in ("transformers", "mlx-lm") else 1
        np.testing.assert_allclose(reading.inv_freq, expected / factor, rtol=1e-12)
    config["rope_scaling"]["factor"] = 1.0
    assert all(each.agrees for each in diff(config).differences)


# --- LongRoPE ---


def test_five_rules_switch_the_list():
    config = scaled("longrope", **ROPES["longrope"])
    short, long = ladder() / LISTS["short_factor"], ladder() / LISTS["long_factor"]
    for seq_len, is_long in (
        (10, [0, 1, 0, 1, 1]),
        (1024, [0, 1, 0, 1, 1]),
        (1025, [1, 1, 0, 1, 1]),  # SGLang asks for a position > L, not a length
        (1026, [1, 1, 1, 1, 1]),
    ):
        for reading, expected in zip(readings(config, seq_len=seq_len)[:5], is_long, strict=True):
            list_in_use = long if expected else short
            np.testing.assert_allclose(reading.inv_freq, list_in_use, rtol=1e-12)
    assert len({reading.switch for reading in readings(config)[:5]}) == 5
    assert "off from transformers at 1,024 tokens: vLLM by" in diff(config).verdict
    assert "off from transformers: vLLM by" in diff(config, seq_len=10).verdict
    config["max_position_embeddings"] = 1024
    assert [each.framework for each in diff(config, seq_len=10).differences if not each.agrees] == [
        "vLLM", "SGLang", "llama.cpp", "mlx-lm"
    ]  # fmt: skip
    np.testing.assert_allclose(read(config, seq_len=10)["vLLM"].inv_freq, short, rtol=1e-12)


def test_the_amplitude_of_longrope():
    of_16, of_4 = (math.sqrt(1 + math.log(s) / math.log(1024)) for s in (16, 4))
    rope = {**ROPES["longrope"], "factor": 16.0}
    amplitudes = [each.attention_factor for each in readings(scaled("longrope", **rope))[:5]]
    assert amplitudes == pytest.approx([of_16, of_4, of_4, of_4, of_4])
    rope["attention_factor"] = 3.0
    amplitudes = [each.attention_factor for each in readings(scaled("longrope", **rope))[:5]]
    assert amplitudes == pytest.approx([3.0, of_4, of_4, of_4, of_4])
    rope |= {"short_mscale": 1.5, "long_mscale": 2.5}
    amplitudes = [each.attention_factor for each in readings(scaled("longrope", **rope))[:5]]
    assert amplitudes == pytest.approx([3.0, 2.5, 2.5, of_4, of_4])


def test_su_is_longrope_in_two_of_them():
    rope = {**LISTS, "original_max_position_embeddings": 1024}
    config = scaled("su", **rope)
    found = read(config)
    refusing = [name for name in NAMES if found[name].refuses]
    assert refusing == ["transformers", "SGLang", "mlx-lm", "keras-hub"]
    assert diff(config).reference == "vLLM"
    assert "write rope_type longrope" in diff(config).verdict


# --- the file, and what it says beside the type ---


def test_mlx_has_files_that_never_scale():
    config = scaled("linear", model_type="qwen3_moe", factor=2.0)
    np.testing.assert_allclose(read(config)["mlx-lm"].inv_freq, ladder(), rtol=1e-12)
    assert read(config)["mlx-lm"].advice == "mlx-lm does not scale qwen3_moe at all"


@pytest.mark.parametrize(("model_type", "key", "other"), [
    ("llama", "rope_traditional", True),
    ("gptj", "rope_traditional", False),
    ("deepseek_v3", "rope_interleave", False),  # transformers reads it, mlx-lm does not
])  # fmt: skip
def test_a_layout_that_not_all_programs_read_is_told(model_type, key, other):
    config = {**LLAMA, "model_type": model_type, key: other}
    said = f" Layouts are not compared, and not all programs read {key}."
    assert diff(config).verdict.endswith(said)
    assert "Layouts" not in diff({**config, key: not other}).verdict


def test_keras_reads_what_its_converters_read():
    found = read(scaled("linear", factor=2.0))["keras-hub"]
    assert found.refuses.startswith("ValueError: The config should be a valid llama3 config")
    config = scaled("yarn", model_type="qwen2", **ROPES["yarn"])
    found = read(config)["keras-hub"]
    np.testing.assert_allclose(found.inv_freq, ladder(), rtol=1e-12)
    assert "drops rope_type yarn" in diff(config).verdict
    gemma = {**LLAMA, "model_type": "gemma2", "head_dim": 128, "rope_theta": 5e5}
    found = read(gemma)["keras-hub"]
    np.testing.assert_allclose(found.inv_freq, ladder(), rtol=1e-12)  # a base of its own
    assert "no converter" in read({**LLAMA, "model_type": "phi3"})["keras-hub"].not_compared


def test_mlx_reads_no_rope_parameters_but_in_a_few_models():
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    config = {"model_type": "llama", "head_dim": 128, "rope_parameters": rope}
    np.testing.assert_allclose(read(config)["mlx-lm"].inv_freq, ladder(), rtol=1e-15)
    assert "top level" in diff(config).verdict
    np.testing.assert_allclose(read(config)["vLLM"].inv_freq, ladder(5e5) / 2, rtol=1e-12)
    config["model_type"] = "qwen3"
    np.testing.assert_allclose(read(config)["mlx-lm"].inv_freq, ladder(5e5) / 2, rtol=1e-12)
    config["model_type"] = "lfm2"  # its file takes the base alone
    np.testing.assert_allclose(read(config)["mlx-lm"].inv_freq, ladder(5e5), rtol=1e-12)


# channels of 64 that the modules of mlx-lm 0.32.2 were built for, where rope_parameters has a share
SHARES_OF_MLX = [("phi3", 0.75, 64), ("nemotron", 0.25, 32), ("gptj", 0.25, 64)]


@pytest.mark.parametrize(("model_type", "share", "width"), SHARES_OF_MLX)
def test_mlx_reads_no_share_of_rope_parameters(model_type, share, width):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    config = {"model_type": model_type, "hidden_size": 4096, "num_attention_heads": 64,
              "n_embd": 4096, "n_head": 64, "rope_parameters": rope}  # fmt: skip
    found = read(config)
    assert 2 * len(found["transformers"].inv_freq) == 64 * share
    assert 2 * len(found["mlx-lm"].inv_freq) == width
    assert " at the top level: mlx-lm reads no rope_parameters" in diff(config).verdict


@pytest.mark.parametrize(("model_type", "error"), [
    ("phi", "ValueError: [rope] dims must be even but got 25."),
    ("stablelm", "TypeError: missing 1 required argument: 'partial_rotary_factor'"),
])  # fmt: skip
def test_mlx_refuses_a_share_that_is_not_at_the_top_level(model_type, error):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = {"model_type": model_type, "hidden_size": 2048, "num_attention_heads": 32,
              "rope_theta": 1e4, "rope_parameters": rope}  # fmt: skip
    assert read(config)["mlx-lm"].refuses == error
    assert not read({**config, "partial_rotary_factor": 0.5})["mlx-lm"].refuses


MUST_HAVE = "ValueError: rope_scaling must contain "
LINEAR_ALONE = "ValueError: rope_scaling 'type' currently only supports 'linear'"


@pytest.mark.parametrize(("model_type", "rope", "error"), [
    ("nemotron", {"rope_type": "yarn", **YARN}, LINEAR_ALONE),
    ("nemotron", {"rope_type": "default"}, f"{MUST_HAVE}'factor'"),
    ("nemotron", {"rope_type": "linear", "factor": 2.0}, "KeyError: 'type'"),
    ("nemotron", {"type": "linear", "factor": 2.0}, ""),
    ("qwen2_moe", {"rope_type": "yarn", **YARN}, f"{MUST_HAVE}keys {{'factor', 'type'}}"),
    ("qwen2_moe", {"type": "yarn", **YARN}, LINEAR_ALONE),
    ("internlm2", {"type": "yarn", **YARN}, f"{LINEAR_ALONE} or 'dynamic'"),
    ("internlm2", {"type": "dynamic", "factor": 2.0}, ""),
    ("hunyuan_v1_dense", {"type": "yarn", **YARN},
     f"{MUST_HAVE}keys {{'alpha', 'factor', 'type'}}"),
    ("phi3", {"rope_type": "default"}, f"{MUST_HAVE}keys {{'long_factor', 'type'}}"),
    ("phimoe", {"type": "linear", "factor": 2.0}, "KeyError: 'short_factor' is missing"),
    ("deepseek_v2", None, "AttributeError: 'NoneType' object has no attribute 'get'"),
    ("dbrx", None, "KeyError: 'rope_theta'"),
    ("nemotron", {"type": "linear", "factor": 2}, "AssertionError: factor must be a float"),
    ("phi3", {"type": "linear", "factor": 2, "long_factor": []},
     "AssertionError: factor must be a float"),
    ("gpt_oss", {"type": "dynamic", "factor": 2.0},
     "TypeError: '>' not supported between instances of 'NoneType' and 'int'"),
    ("gpt_oss", {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32},
     "TypeError: unsupported operand type(s) for /: 'NoneType' and 'int'"),
    ("minimax", None, "TypeError: missing 1 required argument: 'rotary_dim'"),
    ("ministral3", {"rope_type": "yarn", **YARN},
     "TypeError: 'NoneType' object is not subscriptable"),
])  # fmt: skip
def test_mlx_refuses_a_scaling_that_its_model_file_does_not_accept(model_type, rope, error):
    config = {**LLAMA, "model_type": model_type, "rope_scaling": rope}
    assert read(config)["mlx-lm"].refuses == error


def test_mlx_asks_ministral_for_keys_that_transformers_has_defaults_for():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, **YARN}
    config = {**LLAMA, "model_type": "ministral3", "rope_parameters": rope}
    del config["rope_theta"]
    assert read(config)["mlx-lm"].refuses == "KeyError: 'llama_4_scaling_beta'"
    assert not read({**config, "rope_parameters": {**rope, "llama_4_scaling_beta": 0.1}})[
        "mlx-lm"
    ].refuses


def test_mlx_fails_as_a_whole_if_one_of_its_layer_types_fails():
    config = {**LLAMA, "model_type": "gemma3_text", "head_dim": 128,
              "rope_scaling": {"rope_type": "su", **LONGROPE}}  # fmt: skip
    for kind in ("full_attention", "sliding_attention"):
        found = read(config, layer_type=kind)["mlx-lm"]
        assert found.refuses == "ValueError: Unsupported RoPE type su"


def test_mlx_has_another_base_or_length_where_the_file_has_none_or_null():
    silent = {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    del silent["max_position_embeddings"]
    assert "its own max_position_embeddings" in read(silent)["mlx-lm"].not_compared
    assert "takes for a number" in read({**LLAMA, "rope_theta": None})["mlx-lm"].not_compared


def test_mlx_rotates_recurrent_gemma_by_numbers_of_its_own():
    recurrent = {"model_type": "recurrent_gemma", "hidden_size": 2560, "num_attention_heads": 10,
                 "rope_theta": 5e5, "partial_rotary_factor": 0.25}  # fmt: skip
    np.testing.assert_allclose(read(recurrent)["mlx-lm"].inv_freq, ladder(1e4, 128), rtol=1e-14)
    assert "mlx-lm always takes the base 10000" in diff(recurrent).verdict


def test_mlx_takes_the_lists_of_minicpm3_whatever_the_type():
    config = {
        "model_type": "minicpm3",
        "hidden_size": 2560,
        "num_attention_heads": 40,
        "qk_rope_head_dim": 32,
        "max_position_embeddings": 32768,
        "rope_theta": 1e4,
    }
    for rope in ({"type": "linear", "factor": 4.0}, {"rope_type": "default"}):
        found = read({**config, "rope_scaling": rope})["mlx-lm"]
        np.testing.assert_allclose(found.inv_freq, ladder(1e4, 32), rtol=1e-14)
        assert found.attention_factor == pytest.approx(1.11803401)  # as it ran


@pytest.mark.parametrize(("model_type", "rope", "schedule"), [
    ("qwen2_moe", {"type": "linear", "factor": 4.0}, "plain"),
    ("llama4_text", {"type": "linear", "factor": 4.0}, "plain"),
    ("phi3", {"type": "su", **LONGROPE}, "LongRoPE, long list"),
    ("phi3", {"type": "yarn", "factor": 4.0, **LONGROPE}, "plain"),
    ("hunyuan_v1_dense", {"type": "linear", "factor": 2.0, "alpha": 10.0}, "NTK, fixed base"),
    ("deepseek_v2", {"type": "linear", "factor": 4.0}, "YaRN, factor 4"),
])  # fmt: skip
def test_mlx_has_files_that_compute_another_type(model_type, rope, schedule):
    config = {**LLAMA, "model_type": model_type, "rope_scaling": rope}
    assert read(config)["mlx-lm"].schedule.startswith(schedule)


def test_mlx_takes_the_base_of_dbrx_from_its_attention_config():
    config = {**LLAMA, "model_type": "dbrx", "attn_config": {"rope_theta": 1e4}}
    np.testing.assert_allclose(read(config)["mlx-lm"].inv_freq, ladder(), rtol=1e-15)


def test_type_and_rope_type_that_disagree():
    config = scaled("linear", type="dynamic", factor=2.0)
    assert_transformers(config)
    found = read(config)
    assert found["vLLM"].refuses.startswith("ValueError: conflict")
    assert found["mlx-lm"].schedule.startswith("dynamic")
    assert not read(scaled("longrope", type="su", **ROPES["longrope"]))["vLLM"].refuses


def test_a_legacy_mrope_needs_its_sections():
    for name in ("vLLM", "mlx-lm"):
        assert "mrope_section" in read(scaled("mrope"))[name].refuses
    found = read(scaled("mrope", mrope_section=[16, 24, 24]))
    np.testing.assert_allclose(found["vLLM"].inv_freq, ladder(), rtol=1e-15)
    np.testing.assert_allclose(found["mlx-lm"].inv_freq, ladder(), rtol=1e-15)
    assert "one axis" in found["mlx-lm"].notes[0]
    assert not any(
        each.refuses for each in readings(scaled("mrope", model_type="qwen2_vl", factor=1.0))[:3]
    )


def test_an_unknown_type_is_dropped_by_one_and_refused_by_five():
    result = diff(scaled("nonsense", factor=2.0))
    refusing = [each.framework for each in result.readings if each.refuses]
    assert refusing == ["transformers", "vLLM", "SGLang", "mlx-lm", "keras-hub"]
    assert result.reference == "llama.cpp"
    assert "llama.cpp does not scale rope_type nonsense at all" in result.verdict


def test_a_plain_config_of_llama_is_read_alike_by_all():
    result = diff(LLAMA)
    assert result.verdict == "All six agree."
    assert result.reference == "transformers"
    assert result.lengths == (4096,)
    assert [each.framework for each in result.readings] == list(NAMES)
    for reading in result.readings:
        np.testing.assert_allclose(reading.inv_freq, ladder(), rtol=1e-15)
        assert (reading.attention_factor, reading.switch, reading.refuses) == (1.0, "never", "")
    assert all(each.agrees for each in result.differences)


def test_where_the_lengths_compared_come_from():
    dynamic, longrope = scaled("dynamic", factor=4.0), scaled("longrope", **ROPES["longrope"])
    assert diff(dynamic).lengths == (4096, 16384)
    assert diff(longrope).lengths == (1024, 4096)
    assert diff(longrope, seq_len=7).lengths == (7,)
    worst = {each.framework: each for each in diff(dynamic).differences}
    assert (worst["vLLM"].seq_len, worst["SGLang"].seq_len) == (16384, 4096)
    np.testing.assert_array_equal(
        diff(longrope).readings[0].inv_freq, readings(longrope)[0].inv_freq
    )


@pytest.mark.parametrize("rope_type", [*ROPES, "su", "ntk", "nonsense"])
def test_the_diff_is_json(rope_type):
    config = scaled(rope_type, **ROPES.get(rope_type, ROPES["longrope"]))
    result = diff(config)
    written = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert written == result.to_dict()
    assert [each["framework"] for each in written["readings"]] == list(NAMES)
    for reading, plain in zip(result.readings, written["readings"], strict=True):
        assert (plain["inv_freq"] is None) == (reading.inv_freq is None) == bool(reading.refuses)
        assert plain["inv_freq"] is None or plain["inv_freq"] == reading.inv_freq.tolist()


def test_an_infinite_difference_is_null_in_json():
    result = diff({**LLAMA, "head_dim": 64, "partial_rotary_factor": 0.5})
    assert math.isinf(result.differences[0].inv_freq)
    assert result.to_dict()["differences"][0]["inv_freq"] is None
    assert "vLLM rotates 16 pairs" in result.verdict
    assert "Remove partial_rotary_factor" in result.verdict


def test_every_rule_names_the_file_it_was_read_in():
    for program in PROGRAMS:
        for _, source in (*program.rules.values(), program.unknown):
            assert ".py" in source or ".cpp" in source
    assert [program.name for program in PROGRAMS] == list(NAMES)
    assert all(program.version[-1].isdigit() for program in PROGRAMS)


def test_a_path_a_folder_and_a_dict_are_the_same(tmp_path):
    config = scaled("yarn", **ROPES["yarn"])
    before = copy.deepcopy(config)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    expected = diff(config).to_dict()
    assert config == before
    for source in (file, str(file), tmp_path):
        assert diff(source).to_dict() == expected
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as some editors on Windows save it
    assert diff(file).to_dict() == expected


def test_the_text_part_of_a_larger_config_is_read():
    verdict = diff({"model_type": "llava", "text_config": LLAMA}).verdict
    assert verdict == f"All that read it agree: {', '.join(NAMES[:5])}."


BAD = {
    "no size": ({"rope_theta": 1e4}, "needs head_dim"),
    "base": ({**LLAMA, "rope_theta": "big"}, "rope_theta must be a number"),
    "share": ({**LLAMA, "partial_rotary_factor": 2}, r"must be in \(0, 1\]"),
    "odd": ({**LLAMA, "head_dim": 7}, "rotary_dim must be even"),
    "rope": ({**LLAMA, "rope_scaling": "yarn"}, "rope_scaling must be an object"),
    "two": ({**scaled("linear", factor=2.0), "rope_parameters": {"factor": 1}}, "keep one"),
    "type": (scaled(7), "rope_type must be a name"),
    "factor": (scaled("linear", factor="2"), "factor must be a number"),
    "negative": (scaled("linear", factor=-2.0), "factor must be finite and > 0"),
    "list": (scaled("longrope", **{**ROPES["longrope"], "long_factor": [1.0]}), "64 values"),
    "context": ({"head_dim": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "needs max"),
    "length": ({**LLAMA, "max_position_embeddings": 0.5}, "whole number"),
    "nested": ({**LLAMA, "rope_parameters": {"full_attention": {}}}, "write one object"),
    "kind": (7, "config must be a path, a dict"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_config_is_one_clear_line(name):
    config, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        diff(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seq_len", [0, -1, 2.0, True, "7"])
def test_a_length_must_be_a_whole_number(seq_len):
    with pytest.raises(ValueError, match="seq_len must be a whole number"):
        readings(LLAMA, seq_len=seq_len)


def test_a_file_that_is_not_there_or_not_json(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        diff(tmp_path / "absent.json")
    for text in ("{", "[1]", "\udcff"):
        file = tmp_path / "config.json"
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match=r"config\.json"):
            diff(file)


@pytest.mark.parametrize(
    ("name", "rope", "theirs"),
    [  # pairs 25, 30 and 40 as vLLM 0.33 computed them, its whole model built from such a config
        ("qwen2.5-vl-7b", {"mrope_section": [16, 24, 24],
                           "original_max_position_embeddings": 32768},
         (0.00453158375, 0.00153992651, 9.93744337e-05)),
        ("qwen3-vl-8b", {"mrope_section": [24, 20, 20], "mrope_interleaved": True,
                         "original_max_position_embeddings": 65536},
         (0.0022958233, 0.000506939188, 1.62586218e-05)),
    ],
)  # fmt: skip
def test_vllm_widens_the_yarn_ramp_of_some_models_with_three_axes(name, rope, theirs):
    config = json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    config.get("text_config", config)["rope_scaling"] = {
        "rope_type": "yarn", "factor": 4.0, **rope,
    }  # fmt: skip
    (vllm,) = (reading for reading in readings(config) if reading.framework == "vLLM")
    np.testing.assert_allclose(vllm.inv_freq[[25, 30, 40]], theirs, rtol=FLOAT32_RTOL)


def test_a_misspelt_key_is_refused_as_inspect_refuses_it():
    for key, where in (("rope_thata", {}), ("facter", {"rope_scaling": {"type": "linear"}})):
        config = {**LLAMA, **copy.deepcopy(where)}
        config.get("rope_scaling", config)[key] = 2.0
        with pytest.raises(ValueError, match=f"{key}.*did you mean"):
            diff(config)


def test_sizes_are_bounded_for_a_type_that_only_other_programs_read():
    with pytest.raises(ValueError, match="head_dim must be a whole number from 1 to 65,536"):
        diff({**scaled("nonsense", factor=2.0), "head_dim": 60_000_000})


@pytest.mark.parametrize("key", ["mscale", "attention_factor", "truncate", "beta_fast"])
def test_a_null_is_read_like_a_key_that_is_missing(key):
    config = scaled("yarn", **ROPES["yarn"], **{key: None})
    assert_transformers(config)
    assert len(readings(config)) == 6


def test_a_listed_layer_type_is_read_like_none():
    """gpt-oss has one RoPE for both of its layer types; truncate is false there, and read."""
    path = Path(__file__).parent / "configs" / "gpt-oss-20b.json"
    of_all = diff(path).to_dict()
    for layer_type in ("full_attention", "sliding_attention"):
        found = diff(path, layer_type=layer_type).to_dict()
        assert found["readings"][0] == of_all["readings"][0]
        np.testing.assert_array_equal(
            readings(path, layer_type=layer_type)[0].inv_freq,
            rotary.inv_freq(rotary.from_hf_config(path))[0],
        )


def test_the_short_list_that_transformers_keeps_is_said():
    path = Path(__file__).parent / "configs" / "phi-3.5-moe.json"
    assert "transformers keeps the short list of phimoe" in diff(path).verdict
    assert readings(path)[0].schedule.startswith("LongRoPE, short list")
