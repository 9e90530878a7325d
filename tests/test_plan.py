"""What is recommended so that a model reaches a context, and that it is what it says."""

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from libraries import of_transformers
from published import scaled

from rotary import Rotary, from_hf_config, inv_freq
from rotary.analysis.bounds import first_failure
from rotary.analysis.extension import option_rows
from rotary.analysis.search import comb, min_base, safe_base
from rotary.analysis.spectrum import whole_head
from rotary.configs import choose, replace_rope
from rotary.plan import Recommendation, plan, plan_model, recommend, recommend_model
from rotary.programs import readings
from rotary.reach import reach

transformers = pytest.importorskip("transformers")
pytest.importorskip("numba", reason="a plan searches a base")
CONFIGS = Path(__file__).parent / "configs"
LLAMA_2 = Rotary(head_dim=128)


def shorter(name):
    """A published config that is trained at 64 tokens, if it is scaled, and says 256."""
    data = json.loads((CONFIGS / f"{name}.json").read_text())
    text = data.get("text_config", data)
    text["max_position_embeddings"] = 256
    if "original_max_position_embeddings" in (scaling := text.get("rope_scaling") or {}):
        scaling["original_max_position_embeddings"] = 64
    return data


@pytest.mark.parametrize(
    ("context", "head_dim"),
    [*((context, 64) for context in range(46, 60)), (512, 128), (512, 96), (256, 256)],
)
def test_a_base_for_training_passes_and_is_of_two_digits(context, head_dim):
    found = plan(context, Rotary(head_dim=head_dim, base=100.0))
    assert found.action == "base"
    base = found.recommended.base
    assert base >= found.safe_base.base >= found.min_base.base
    assert first_failure(Rotary(head_dim=head_dim, base=base), context) is None
    assert float(f"{base:.1e}") == pytest.approx(base, rel=1e-12)
    below = Rotary(head_dim=head_dim, base=found.min_base.base * (1 - 1e-7))
    assert first_failure(below, context) == found.min_base.binding


def test_a_base_that_is_large_enough_is_kept():
    found = plan(512, Rotary(head_dim=128, base=5e6))
    assert (found.action, found.recommended, found.first_failure) == ("keep", found.spec, None)


def test_a_slice_of_half_the_head_needs_no_other_base():
    found = plan(8192, Rotary(head_dim=128, rotary_dim=64))
    assert (found.action, found.min_base.base, found.failures) == ("keep", 1.0, 0)


def test_weights_get_a_scaling_by_the_method_they_do_not_have_yet():
    found = recommend(32768, LLAMA_2, 4096)
    assert (found.action, found.recommended.schedule) == ("scaling", "yarn")
    assert found.recommended.params["factor"] == 8.0
    rows = {row.method: row for row in found.options}
    assert rows["yarn"].first_failure == 8886
    assert rows["linear"].first_failure == 13649
    assert f"{rows['none'].unseen:.0%} of the angles at 32,768" in found.reason


def test_weights_that_reach_it_already_are_left_alone():
    found = recommend(2048, LLAMA_2, 4096)
    assert (found.action, found.recommended, found.options) == ("keep", LLAMA_2, ())
    assert found.first_failure == 1707  # and is said, as a diagnostic
    assert "not a hard limit" in found.reason


@pytest.mark.parametrize(
    ("name", "schedule", "factor"),
    [
        ("llama-3.1-8b", "llama3", 16.0),
        ("qwen2.5-7b-yarn", "yarn", 8.0),
        ("gemma-4-31b", "proportional", 2.0),
    ],
)
def test_a_method_that_weights_know_is_stretched_further(name, schedule, factor):
    data = shorter(name)
    kind = "full_attention" if schedule == "proportional" else None
    found = recommend_model(data, 512, kind)
    assert found.recommended.schedule == found.spec.schedule == schedule
    assert found.recommended.params["factor"] == factor


@pytest.mark.parametrize(("context", "action", "factor"), [
    (256, "keep", 4.0), (257, "scaling", 4 * 257 / 256), (512, "scaling", 8.0)
])  # fmt: skip
def test_a_config_may_say_the_length_before_its_yarn(context, action, factor):
    """As Qwen2.5's model cards ask to write it, and Qwen3's: max_position_embeddings stays."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    data = {"model_type": "qwen3", "max_position_embeddings": 80, "rope_scaling": yarn}
    found = recommend_model(data, context)
    assert (found.trained, found.action) == (64, action)
    assert found.recommended.params["factor"] == pytest.approx(factor)
    assert ("reaches this context as it is: keep" in found.reason) == (action == "keep")


@pytest.mark.parametrize(("given", "wanted"), [
    (0.1 * np.log(4.0) + 1, 0.1 * np.log(8.0) + 1),  # as OLMo 3 says it
    (1.0, 1.0),  # as Laguna
    (None, 0.1 * np.log(8.0) + 1),
])  # fmt: skip
def test_the_attention_factor_of_yarn_grows_with_its_factor(given, wanted):
    params = {"factor": 4.0, "original_max_position_embeddings": 64}
    params |= {} if given is None else {"attention_factor": given}
    spec = Rotary(head_dim=64, schedule="yarn", params=params)
    found = recommend(512, spec, 64, advertised=256)
    assert found.recommended.params["factor"] == 8.0
    assert inv_freq(found.recommended)[1] == pytest.approx(wanted, rel=1e-12)


def test_what_is_written_gives_the_recommendation_back():
    data = shorter("qwen2.5-7b")
    found = recommend_model(data, 1024)
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        data.pop(key, None)
    assert from_hf_config({**data, **found.rope_parameters}) == found.recommended


def test_sections_of_several_axes_are_kept_in_what_is_written():
    data = shorter("qwen2-vl-7b")
    before = from_hf_config(data).axes
    found = recommend_model(data, 1024)
    assert "head_dim" not in found.rope_parameters  # this class does not read it
    assert found.rope_parameters["rope_parameters"]["mrope_section"] == [16, 24, 24]
    for key in ("rope_theta", "rope_scaling"):
        data.pop(key)
    again = from_hf_config({**data, **found.rope_parameters})
    assert again == found.recommended
    assert again.axes == before


@pytest.mark.parametrize("name", ["phi-3.5-mini", "phi-3.5-moe"])
def test_transformers_loads_what_is_written_for_a_model_that_reads_longrope_alone(name):
    of_transformers("transformers")
    data = {**shorter(name), "original_max_position_embeddings": 64}
    found = recommend_model(data, 512)
    assert found.recommended.schedule == "yarn"
    assert "does not read yarn: the keys say it as longrope" in found.reason
    data.pop("rope_scaling")
    new = {**data, **found.rope_parameters}
    (steps, amplitude), (wanted, other) = inv_freq(from_hf_config(new)), inv_freq(found.recommended)
    np.testing.assert_allclose(steps, wanted, rtol=1e-14)
    assert amplitude == other
    loaded = transformers.AutoConfig.for_model(**copy.deepcopy(new)).rope_parameters
    assert loaded["rope_type"] == "longrope"
    assert loaded["original_max_position_embeddings"] == 64
    assert loaded.get("attention_factor", loaded.get("long_mscale")) == amplitude


def test_transformers_builds_what_is_written_for_mixtral():
    of_transformers("transformers")
    mixtral = {"model_type": "mixtral", "max_position_embeddings": 256}
    found = recommend_model(mixtral, 512)
    new = {**mixtral, **copy.deepcopy(found.rope_parameters)}
    config = transformers.AutoConfig.for_model(**new)
    module = transformers.models.mixtral.modeling_mixtral.MixtralRotaryEmbedding(config)
    np.testing.assert_allclose(module.inv_freq.numpy(), inv_freq(found.recommended)[0], rtol=2e-6)


@pytest.mark.parametrize(
    ("context", "action", "alpha"), [(256, "keep", 1000), (512, "scaling", 2000)]
)
def test_transformers_builds_what_is_written_for_the_alpha_of_hunyuan(context, action, alpha):
    of_transformers("transformers")
    data = shorter("hunyuan-7b")
    found = recommend_model(data, context)
    assert (found.action, found.recommended.params) == (action, {"factor": alpha})
    data = replace_rope(data, found.recommended, context)
    config = transformers.AutoConfig.for_model(**data)
    module = transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense
    rotary = module.HunYuanDenseV1RotaryEmbedding(config)
    wanted = (1e4 * alpha ** (128 / 126)) ** (-np.arange(64) / 64)
    np.testing.assert_allclose(rotary.inv_freq.numpy(), wanted, rtol=2e-6)
    assert (
        config.rope_parameters["rope_theta"]
        == found.rope_parameters["rope_parameters"]["rope_theta"]
    )


@pytest.mark.parametrize("context", [262_144, 524_288])
def test_the_share_of_unseen_angles_is_that_of_what_is_recommended(context):
    """Llama 3.1 has factor 8 for 16 times its training: twice 8 was told by the share of 32."""
    found = recommend_model(CONFIGS / "llama-3.1-8b.json", context)
    unseen = reach(found.recommended, context, 8192).unseen
    assert unseen > 0.05
    assert f"did not occur in training, with llama3 {unseen:.0%}." in found.reason


def test_the_length_of_a_linear_config_may_be_either():
    """Vicuna 16k writes 4096, which its factor 4 stretches; Gemma 3 writes what it reaches."""
    vicuna = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 4096,
              "rope_scaling": {"type": "linear", "factor": 4.0}}  # fmt: skip
    assert "before the factor 4 or the one it reaches" in recommend_model(vicuna, 32768).reason
    # as the sentence advises for 32,768 tokens
    assert recommend_model(vicuna, 32768 // 4).recommended.params["factor"] == 4.0 * 32768 / 16384


def test_a_method_is_named_as_the_configs_and_not_as_trained():
    """Dynamic NTK changes nothing up to the trained length."""
    llama = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 4096,
             "rope_scaling": {"type": "dynamic", "factor": 4.0}}  # fmt: skip
    reason = recommend_model(llama, 8192).reason
    assert "trained at 4,096 tokens; the config scales them by dynamic." in reason


def test_a_share_that_the_table_shows_is_not_told_as_none():
    """The table said 0.2%, and the sentence "0% of the angles"."""
    found = recommend(1024, Rotary(head_dim=64), 1015)
    table = {method: unseen for method, _, _, unseen, *_ in option_rows(found.options)}
    assert table["none"] == "0.3%"
    assert "Without scaling, less than 1% of the angles at 1,024 tokens" in found.reason


def test_the_recommendation_is_a_list_with_commas():
    how = dict(plan(512, Rotary(head_dim=64), 128).rows())["recommended"]
    assert how.startswith("scaling: yarn, base 10,000, factor 4, ")


@pytest.mark.parametrize(("schedule", "factor"), [("linear", 8.0), ("ntk", 1000.0)])
def test_methods_are_compared_only_for_frequencies_that_were_trained(schedule, factor):
    """Gemma 3 and Hunyuan were never trained with the plain RoPE of their base."""
    spec = Rotary(head_dim=64, schedule=schedule, params={"factor": factor})
    found = recommend(1024, spec, 512)
    assert (found.recommended.params["factor"], found.options) == (2 * factor, ())
    assert "Without scaling" not in found.reason
    longer = recommend(1024, scaled("yarn", 64, 4.0, 128), 128)
    assert longer.options == recommend(1024, Rotary(head_dim=64), 128).options != ()


@pytest.mark.parametrize(("name", "more", "context"), [
    ("llama-3.1-8b", {}, 200), ("qwen2.5-7b-yarn", {}, 257),
    ("mistral-7b-v0.1", {"sliding_window": 64}, 512),
])  # fmt: skip
def test_a_plan_is_the_recommendation_and_the_bases_of_its_context(name, more, context):
    data = {**shorter(name), **more}
    advice, found = recommend_model(data, context), plan_model(data, context)
    for field in set(Recommendation._fields) - {"reason"}:
        assert getattr(found, field) == getattr(advice, field), field
    assert found.reason.startswith(advice.reason)
    assert found.min_base == min_base(found.context, found.spec.head_dim)
    assert found.safe_base == safe_base(found.context, found.spec.head_dim)
    needs_more = found.action != "keep" and found.spec.base < found.safe_base.base
    assert (found.shown(found.safe_base.base) in found.reason) == needs_more


@pytest.mark.parametrize(("name", "kind", "window"), [
    ("gemma-3-1b", "sliding_attention", 512),
    ("mistral-7b-v0.1", None, 4096),  # in all layers
    ("command-r7b", None, 4096),  # in all layers that rotate
    ("llama-4-scout", None, 8192),  # chunks, in all layers that rotate
])  # fmt: skip
def test_layers_with_a_window_need_no_scaling(name, kind, window):
    path = CONFIGS / f"{name}.json"
    found = recommend_model(path, 131072, kind)
    assert (found.context, found.action, found.recommended) == (window, "keep", found.spec)
    assert f"no farther than their window, {window:,} tokens" in found.reason
    length = max(131072, choose(path, kind).context)  # Llama 4 has 10 million
    assert found.rope_parameters["max_position_embeddings"] == length


def test_no_scaling_is_planned_for_a_model_that_reads_none():
    ernie = {"model_type": "ernie4_5_vl_moe_text", "max_position_embeddings": 256}
    with pytest.raises(ValueError, match="reads only rope_type default, got 'yarn'"):
        plan_model(ernie, 512)
    assert recommend_model(ernie, 200).action == "keep"


def test_a_layout_belongs_to_the_model_and_is_kept():
    glm = {"model_type": "glm", "max_position_embeddings": 256}
    found = recommend_model(glm, 1024)
    assert found.recommended.layout == "interleaved"
    assert from_hf_config({**glm, **found.rope_parameters}) == found.recommended


def test_failures_are_counted_up_to_the_context_itself():
    found = recommend(1707, LLAMA_2, 4096)  # B_m is first negative there
    assert (found.first_failure, found.failures) == (1707, 1)
    found = recommend(1706, LLAMA_2, 4096)
    assert (found.first_failure, found.failures) == (None, 0)


def test_a_scaled_model_within_its_advertised_length_is_left_alone():
    data = shorter("llama-3.1-8b")  # trained at 64, says 256
    found = recommend_model(data, 200)
    assert (found.trained, found.action, found.recommended) == (64, "keep", found.spec)


def test_a_plan_is_one_json_document():
    found = plan(1024, Rotary(head_dim=64), 512)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert {"min_base", "safe_base", "first_failure", "recommended"} <= set(document)
    assert document["first_failure"] == 725
    assert document["min_base"] < document["safe_base"]
    assert Rotary.from_dict(document["recommended"]) == found.recommended


def test_progress_goes_from_nothing_to_all():
    told = []
    plan(512, Rotary(head_dim=64), progress=told.append)
    assert told == sorted(told)
    assert 0 <= told[0] <= told[-1] == 1


@pytest.mark.parametrize("context", [0, 1, -5, 10**15, 1.5, True, float("nan")])
def test_a_context_is_a_whole_number_within_the_limit(context):
    with pytest.raises(ValueError, match="context must be"):
        plan(context, LLAMA_2)


def test_what_is_no_text_is_refused():
    image = Rotary(head_dim=8, schedule="axial", params={"num_axes": 2}, axes=(0, 0, 1, 1))
    with pytest.raises(ValueError, match="this spec has 'axial'"):
        plan(1024, image)
    with pytest.raises(ValueError, match="max_position_embeddings, the trained length"):
        plan_model({"head_dim": 64}, 1024)
    with pytest.raises(ValueError, match="trained must be in 1"):
        plan(1024, LLAMA_2, -1)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("gemma-3-1b", "full_attention", "into the entry of 'full_attention' in its rope_param"),
        ("mistral-small-3.1-24b", None, "into the part with model_type 'mistral'"),
        ("llama-3-8b", None, None),
    ],
)
def test_it_says_where_the_keys_go(name, kind, words):
    """A flat rope_parameters is not read by models with layer types, nor keys beside a part."""
    context = 2 * recommend_model(CONFIGS / f"{name}.json", 4096, kind).trained
    found = recommend_model(CONFIGS / f"{name}.json", context, kind)
    assert found.action == "scaling"
    assert (" The keys go " in found.reason) == (words is not None)
    assert words is None or words in found.reason


@pytest.mark.parametrize(("name", "is_told"), [("glm-4.5v", True), ("qwen2-vl-7b", False)])
def test_a_scaling_where_no_angle_is_new_says_to_measure_without_it(name, is_told):
    """Its slowest pair turns once in 47,117 tokens, and 65,536 were trained."""
    found = recommend_model(json.loads((CONFIGS / f"{name}.json").read_text()), 131072)
    assert found.action == "scaling"
    assert ("No angle is new at this length" in found.reason) == is_told


def test_the_share_of_bases_that_pass_is_told_of_the_bases_that_were_tested():
    """It stood for the bases between the smallest and the safe one, of which 5 % pass."""
    found = plan(1024, Rotary(head_dim=128))
    told = re.search(r"evenly in ln b up to ([\d,]+), (\d+)% pass", dict(found.rows())["safe base"])
    least, last = found.min_base.base, float(told[1].replace(",", ""))
    assert last == pytest.approx(12 * least, rel=1e-4)
    passing = comb(1024, np.geomspace(least, last, 20_001)).mean()
    assert int(told[2]) == round(100 * passing)


@pytest.mark.parametrize("context", [16384, 131072])
def test_a_rope_that_is_kept_keeps_the_length_that_its_attention_factor_comes_from(context):
    """vLLM, SGLang, llama.cpp and mlx-lm take max_position_embeddings / original of LongRoPE."""
    data = json.loads((CONFIGS / "phi-3.5-mini.json").read_text())
    found = recommend_model(data, context)
    assert found.action == "keep"
    length = found.rope_parameters["max_position_embeddings"]
    assert length == data["max_position_embeddings"] == 131072
    written = replace_rope(data, found.recommended, length)
    read = [(each.framework, each.attention_factor, each.inv_freq) for each in readings(data)]
    for (name, factor, rates), new in zip(read, readings(written), strict=True):
        assert (new.framework, new.attention_factor) == (name, factor)
        np.testing.assert_array_equal(new.inv_freq, rates)
    scaling = {name: data["rope_scaling"][name] for name in ("short_factor", "long_factor")}
    scaling |= {"original_max_position_embeddings": 4096, "factor": 32.0}
    spec = Rotary(head_dim=96, schedule="longrope", params=scaling)
    keys = recommend(context, spec, 4096, advertised=131072).rope_parameters
    assert keys["max_position_embeddings"] == 131072


def test_a_window_does_not_raise_the_length_of_longrope():
    """Such layers keep their RoPE at any context, and the length is a part of it."""
    data = {**json.loads((CONFIGS / "phi-3.5-mini.json").read_text()), "sliding_window": 4096}
    found = recommend_model(data, 262144)
    assert (found.context, found.action) == (4096, "keep")
    assert found.rope_parameters["max_position_embeddings"] == 131072


@pytest.mark.parametrize(("name", "context"), [("deepseek-v3", 327680), ("minicpm3-4b", 32768)])
def test_the_channels_of_latent_attention_that_are_not_rotated_count(name, context):
    found = recommend_model(CONFIGS / f"{name}.json", context)
    spec, rest = found.spec, found.nope_head_dim
    assert spec == from_hf_config(CONFIGS / f"{name}.json")
    assert rest == {"deepseek-v3": 128, "minicpm3-4b": 64}[name]
    assert (found.first_failure, found.failures) == (None, 0)
    assert "prefers a similar key to a random one at every distance" in found.reason
    for option in found.options:
        whole = whole_head(option.spec, rest)
        assert option.first_failure == first_failure(whole, context, seq_len=context)
    planned = plan_model(CONFIGS / f"{name}.json", context)
    assert (planned.min_base.base, planned.head_dim) == (1.0, spec.head_dim + rest)
    assert planned.reason == found.reason  # more than half of the head rests: any base passes
    assert f"head_dim {spec.head_dim + rest}" in dict(planned.rows())["smallest base"]


@pytest.mark.parametrize("base", [1e4, 5000.0, 300.0])
def test_no_base_is_advised_below_the_present_one(base):
    """The smallest that passes is 4,293.44, and from 6,018.32 on all do."""
    found = plan(1024, Rotary(head_dim=128, base=base), 512)
    assert found.action == "scaling"
    assert ("raise the base" in found.reason) == (base < 6018)
    assert ("4,293.44" in found.reason) == (base < 4293)
    half = plan(1024, Rotary(head_dim=128, rotary_dim=64, base=base), 512)
    assert "rope_theta" not in half.reason


def test_a_base_that_passes_is_not_replaced_because_of_a_scaling():
    spec = Rotary(head_dim=128, rotary_dim=64, schedule="linear", params={"factor": 2.0})
    found = plan(1024, spec)
    assert (found.action, found.recommended) == ("base", Rotary(head_dim=128, rotary_dim=64))
