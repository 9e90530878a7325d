"""The views that move and those that advise: their numbers, without a browser."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import rotary
from rotary.analysis import extension
from rotary.analysis.extension import option_rows
from rotary.analysis.spectrum import yarn_band
from rotary.explorer import page, views
from rotary.explorer.figures import Band
from rotary.explorer.models import PASTED, published
from rotary.explorer.side import FieldError, Side, look
from rotary.explorer.state import State, to_fields
from rotary.plan import plan, recommend, recommend_model
from rotary.reach import reach, reaches

CONFIGS = Path(__file__).parent / "configs"
LLAMA_3 = Side(model="llama-3-8b")


def heads(order, speeds):
    """(spec, q, k) of one order of `two_layouts`, for `rotary.apply`."""
    layout = "interleaved" if order["pairs"][0] == [0, 1] else "half"
    spec = rotary.Rotary(
        head_dim=2 * len(speeds), layout=layout, schedule="custom",
        params={"inv_freq": list(speeds)},
    )  # fmt: skip
    return spec, *(np.array(x)[None, None, None] for x in (order["q"], order["k"]))


def test_two_layouts_are_one_rotation_of_channels_in_another_order():
    found = views.two_layouts(look(LLAMA_3, 32768))
    speeds, orders = found.figure.moving["inv_freq"], found.figure.moving["orders"]
    names = [order["name"] for order in orders]
    assert names == ["interleaved", "half", "half, run as interleaved"]
    assert [order["pairs"][0] for order in orders] == [[0, 1], [0, 4], [0, 1]]
    own = 500_000.0 ** (-np.arange(64) / 64)
    assert [np.abs(own / speed - 1).min() < 1e-12 for speed in speeds] == [True] * 4
    for order in orders:
        spec, q, k = heads(order, speeds)
        for distance, at in ((0, 3), (1, 0), (16, 7), (40, 20)):
            one = rotary.apply(spec, q, q, positions=[at + distance])[0]
            other = rotary.apply(spec, k, k, positions=[at])[0]
            curve = found.columns[order["column"]]
            assert curve[distance] == pytest.approx(float((one * other).sum()), abs=1e-5)
    right, wrong = found.columns["right"], found.columns["mixed_up"]
    assert right.argmax() == 16  # where q is made to fit k
    assert right[16] == pytest.approx(np.square(orders[0]["k"]).sum())
    assert wrong[16] < right[16] / 2
    assert f"{wrong[16]:.2f} there instead of {right[16]:.2f}" in found.words


def test_a_head_of_one_pair_has_one_layout():
    found = views.two_layouts(look(Side(head_dim=2), 64))
    np.testing.assert_allclose(found.columns["right"], found.columns["mixed_up"])


def test_each_method_turns_each_pair_as_its_schedule_says():
    seen = look(LLAMA_3, 131_072)
    moving = views.methods(seen).figure.moving
    expected = extension.methods(seen.plain, 8192, 131_072)
    names = [each["name"] for each in moving["methods"]]
    assert names == ["no scaling", "linear", "ntk", "yarn", "llama3", "longrope"]
    for each in moving["methods"]:
        spec = expected["none" if each["name"] == "no scaling" else each["name"]]
        np.testing.assert_allclose(each["inv_freq"], rotary.inv_freq(spec, 131_072)[0])
    before = np.array(moving["before"])
    np.testing.assert_allclose(moving["seen"], np.minimum(8192 * before, 2 * np.pi))
    np.testing.assert_allclose(np.array(moving["methods"][1]["inv_freq"]) * 16, before)


def test_the_scaling_of_a_model_stands_beside_the_methods():
    names = [each["name"] for each in views.methods(look(Side(model="llama-3.1-8b"), 131_072))
             .figure.moving["methods"]]  # fmt: skip
    assert names[-1] == "model: llama3"
    short = views.methods(look(LLAMA_3, 4096))
    assert short.words.endswith(
        "Choose a context longer than the training to see what scaling does."
    )
    still = views.methods(look(Side(model="gemma-4-31b, full_attention"), 2**19))
    assert "do not scale RoPE of type 'proportional'" in still.words
    short = views.methods(look(Side(model="gemma-4-31b, full_attention"), 4096))
    assert "Choose a context" not in short.words  # no context makes a method scale it


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "gemma-4-e4b, full_attention"])
def test_no_scaling_is_shown_at_any_length_for_every_model(name):
    model = published(name)
    for context in (model.trained, model.trained + 1, 2 * model.trained):
        assert look(Side(model=name, method="none"), context).spec == model.spec
    with pytest.raises(FieldError, match="no method scales a RoPE of"):
        look(Side(model=name, method="yarn"), 2 * model.trained)


def test_words_are_right_for_one_token_one_pair_and_several_axes():
    one = look(Side(model="llama-2-7b", trained=1), 1)
    for view in (views.hands, views.wavelengths, views.coverage, views.reach):
        assert "1 tokens" not in view(one).words, view
    assert views.coverage(one).words.endswith("At 1 token no angle is new.")
    assert "instead of" not in views.two_layouts(look(Side(head_dim=2), 64)).words
    assert "along all 2 axes" in views.hands(look(PIXTRAL, 4096)).words
    assert "along all" not in views.hands(look(LLAMA_3, 4096)).words


PIXTRAL = Side(model=PASTED, config='{"model_type": "pixtral"}', trained=4096)


@pytest.mark.parametrize(
    ("side", "own"), [(Side(model="gemma-4-31b, full_attention"), "proportional"),
                      (PIXTRAL, "axial")]
)  # fmt: skip
def test_no_band_of_yarn_is_shown_for_a_rope_that_yarn_does_not_scale(side, own):
    found = views.scaling(look(side, 4096))
    assert found.figure.band is None
    assert f"Nothing is scaled here. YaRN does not scale RoPE of type '{own}'." in found.words


@pytest.mark.parametrize(
    ("model", "turns"), [("kimi-k2", 1.0), ("laguna-xs.2, full_attention", 64.0)]
)
def test_the_band_is_the_one_in_which_the_yarn_of_the_model_blends(model, turns):
    found = views.scaling(look(Side(model=model), 131_072))
    spec = published(model).spec
    first, last = yarn_band(dataclasses.replace(spec, schedule="default", params={}), 4096, turns)
    assert found.figure.band == Band(first, last, "YaRN blends here")
    ratio = found.columns["speed_ratio"]
    np.testing.assert_allclose(ratio[: int(first) + 1], 1)
    np.testing.assert_allclose(ratio[int(last) + 1 :], 1 / 32)
    assert f"({turns:g} turn" in found.words


def test_the_band_of_another_method_is_one_where_yarn_would_blend():
    found = views.scaling(look(Side(model="llama-3.1-8b"), 131_072))
    assert found.figure.band.label == "YaRN would blend here"
    assert "YaRN would keep pairs before 18.1 (32 turns) and interpolate those" in found.words


def test_reach_is_that_of_the_library():
    seen = look(LLAMA_3, 32_768)
    found, expected = views.reach(seen), reach(published("llama-3-8b").spec, 32_768, 8192)
    assert found.words == expected.verdict
    assert found.tables[0].rows == tuple(expected.rows())
    bars = {bar.name: bar for bar in found.figure.bars}
    first = bars["a similar key is first not preferred at (B_m < 0)"]
    assert (first.length, first.text, first.is_short) == (18_438, "18,438", True)
    assert bars["trained length"].is_short
    assert not bars["context asked for"].is_short
    assert views.reach(look(LLAMA_3, 8192)).figure.bars[2].text == "none up to 8,192"


@pytest.mark.parametrize(("method", "count"), [("linear", 18), ("ntk", 18), ("as published", 18)])
def test_reach_counts_what_the_training_showed_and_a_chosen_method_came_later(method, count):
    seen = look(Side(model="llama-2-7b", method=method), 32_768)
    trained = 4096 * 10_000.0 ** (-np.arange(64) / 64) / (2 * np.pi)
    assert (trained < 1).sum() == count
    assert f"{count} of 64 pairs made less than one turn" in views.reach(seen).words
    waves = views.wavelengths(seen).words
    assert f"{count} pairs never turn once" in waves
    assert f"{count} of 64 pairs saw less than the whole circle" in views.coverage(seen).words
    new = {"linear": "0.0%", "ntk": "5.6%"}.get(method)
    rows = dict(views.reach(seen).tables[0].rows)
    assert new is None or rows["angles not seen in training"].startswith(new)


@pytest.mark.parametrize("name", ["gemma-3-4b, full_attention", "hunyuan-7b", "llama-3.1-8b"])
def test_views_agree_on_what_a_model_as_published_was_trained_with(name):
    seen = look(Side(model=name), published(name).context)
    (count,) = (word for word in views.wavelengths(seen).words.split() if word.isdigit()
                and f"{word} pairs never turn" in views.wavelengths(seen).words)  # fmt: skip
    assert f"{count} of " in views.coverage(seen).words
    assert f"{count} of " in views.reach(seen).words
    less = np.array(views.methods(seen).figure.moving["seen"]) < 2 * np.pi
    assert less.sum() == int(count)


@pytest.mark.parametrize(
    ("name", "window"),
    [("gemma-3-4b, sliding_attention", 1024), ("mistral-7b-v0.1", 4096),
     ("gemma-4-31b, sliding_attention", 1024), ("exaone-4.5-33b", 4096), ("llama-4-scout", 8192)],
)  # fmt: skip
def test_reach_sees_no_farther_than_a_window_as_rotary_reach(name, window):
    path, _, kind = name.partition(", ")
    seen = look(Side(model=name), published(name).context)
    expected = reaches(CONFIGS / f"{path}.json", kind or None)[kind or None]
    found = views.reach(seen)
    assert found.tables[0].rows == tuple(expected.rows())
    assert expected.length == window
    assert found.words == expected.verdict
    asked, *bars, turn = found.figure.bars
    assert bars[0].length == window
    similar = next(bar for bar in bars if "B_m" in bar.name)
    if expected.first_failure is None:  # searched as far as the window, where nothing ends
        assert (similar.length, similar.text) == (window, f"none up to {window:,}")
        assert not similar.is_short
        bars.remove(similar)
    assert [bar.is_short for bar in bars] == [bar.length < asked.length for bar in bars]
    assert bars[0].is_short
    assert not turn.is_short


def test_a_pair_that_turns_within_the_context_is_no_end_of_it():
    found = views.reach(look(Side(model="gemma-3-4b, sliding_attention"), 131_072))
    turn = found.figure.bars[-1]
    assert (turn.name, turn.is_short) == ("the slowest pair turns once in", False)
    assert turn.length < 131_072


PLANNED = [
    "phi-3-mini-128k", "phi-3.5-moe", "exaone-4.0-32b", "mistral-7b-v0.1",
    "command-r7b", "gemma-3-1b, sliding_attention", "olmo-3-7b, sliding_attention", "glm-4.5v",
    "qwen2-vl-7b", "qwen3-vl-8b", "ministral-3-8b", "modernbert-base-v5, sliding_attention",
    "llama-3-8b", "gpt-oss-20b",
]  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_that_of_rotary_plan_for_the_config_of_the_model(name):
    path, _, kind = name.partition(", ")
    config = json.loads((CONFIGS / f"{path}.json").read_text())
    context = min(2 * published(name).context, 2**19)
    pasted = Side(model=PASTED, config=json.dumps(config), layer=kind)
    for side in (Side(model=name), pasted):
        found = page.drawn(to_fields(State(a=side, view="plan", context=context)))
        expected = recommend_model(config, context, kind or None)
        shown = found["pictures"]["a"]
        assert json.loads(shown["config"]) == expected.rope_parameters
        assert shown["words"] == expected.reason


@pytest.mark.parametrize("name", ["gpt-j-6b", "esm2-650m"])
def test_a_plan_refuses_what_the_code_of_the_model_does_not_read(name):
    found = page.drawn({"view": "plan", "a.model": name, "context": "16384"})
    assert found["pictures"] == {}
    assert found["errors"] == {"view": "this model reads only rope_type default, got 'yarn'"}


def test_the_curve_of_a_plan_has_the_points_that_its_words_name():
    found = views.plan(look(LLAMA_3, 131_072))
    assert "at 12,703 of 131,072 distances (B_m < 0), first at 18,438" in found.words
    distances, sums = found.columns["distance"], found.columns["as_it_is"]
    angles = np.arange(1, 131_073)[:, None] * 500_000.0 ** (-np.arange(64) / 64)
    every = np.cos(angles).sum(1)
    assert sums.min() == pytest.approx(every.min())
    below = distances[sums < 0][0]
    assert 18_438 <= below < 18_438 * 1.03


def test_q_times_k_counts_the_attention_factor_of_a_method():
    seen = look(Side(model="llama-2-7b", method="yarn"), 131_072)
    found = views.hands(seen)
    factor = (0.1 * np.log(32) + 1) ** 2
    assert found.figure.moving["factor"] == pytest.approx(factor)
    assert f"from {64 * factor:.4g} at 0" in found.words
    one = rotary.apply(seen.spec, np.ones((1, 1, 1, 128)), positions=[0], seq_len=131_072)
    assert float((one * one).sum()) / 2 == pytest.approx(64 * factor)
    speeds = np.abs(found.figure.moving["inv_freq"])
    at = int(found.columns["distance"][-1])
    assert found.columns["score"][-1] == pytest.approx(factor * np.cos(at * speeds).sum())


@pytest.mark.filterwarnings("ignore:base 1 gives")
def test_sentences_fit_one_pair_and_pairs_that_turn_alike():
    alike, one = look(Side(base=1), 4096), look(Side(head_dim=2), 4)
    assert "64 pairs in 128 channels; one turn takes 6.3 tokens. 0 pairs never turn once" in (
        views.wavelengths(alike).words
    )
    assert views.wavelengths(one).words.startswith(
        "1 pair in 2 channels; one turn takes 6.3 tokens. 0 pairs never turn once"
    )
    assert (
        "1 pair never turns once" in views.wavelengths(look(Side(head_dim=2, trained=6), 4)).words
    )
    assert "partial sums is 32.5 at every distance; it" in views.decay_curve(alike).words


def test_a_reason_why_there_is_no_config_is_short():
    reason = page.drawn({"view": "layout", "a.model": "qwen3-vl-8b"})["no_config"]["a"]
    assert "cannot say axes=(0, 1, 2, 0, 1, 2" in reason
    assert len(reason) < 150


def test_views_of_latent_attention_are_of_the_whole_head():
    seen = look(Side(model="deepseek-v3"), 131_072)  # 64 rotated channels after 128 others
    scores, sums = (views.hands(seen).columns["score"], views.similarity(seen).columns)
    assert scores.min() == pytest.approx(sums["similarity"].min())
    assert views.hands(seen).figure.moving["constant"] == 64
    assert "32 pairs in 192 channels" in views.wavelengths(seen).words
    assert views.layout(seen).words.startswith("Channels 128 to 191 of 192 are rotated")
    two, rows = difference(LLAMA_3, Side(model="deepseek-v3"))
    assert "A rotates 128 of 128 channels, B 64 of 192" in two.words
    assert rows["head_dim"] == ("128", "192")


def test_plan_is_that_of_the_library_and_its_config_gives_the_recommendation():
    spec = published("llama-3-8b").spec
    found, expected = views.plan(look(LLAMA_3, 32_768)), recommend(32_768, spec, 8192)
    assert found.words == expected.reason
    assert list(found.tables[0].rows) == option_rows(expected.options)[1:]
    config = json.loads(found.config)
    assert config["max_position_embeddings"] == 32_768
    assert rotary.from_hf_config({"head_dim": 128, **config}) == expected.recommended
    np.testing.assert_array_equal(
        found.columns["recommended"],
        rotary.analysis.similarity(expected.recommended, found.columns["distance"], seq_len=32_768),
    )


def test_a_plan_begins_with_the_model_and_not_with_a_method_that_was_chosen():
    scaled = Side(model="llama-3.1-8b")
    assert look(scaled, 4096).advertised == 131_072
    assert "keep its RoPE." in views.plan(look(scaled, 4096)).words
    fields = {"view": "plan", "a.model": "llama-3-8b", "context": "32768"}
    plain, chosen = page.drawn(fields), page.drawn({**fields, "a.method": "linear"})
    assert plain["pictures"] == chosen["pictures"]
    assert plain["pictures"]["a"]["title"] == "A: llama-3-8b"
    assert chosen["fields"]["a.method"] == "linear"  # for the other views


def test_a_recommendation_is_the_plan_without_the_bases():
    spec = rotary.Rotary(head_dim=32, base=100.0)
    found, whole = recommend(256, spec, 64), plan(256, spec, 64)
    assert {**whole._asdict(), "reason": ""} == {
        **found._asdict(), "reason": "", "min_base": whole.min_base, "safe_base": whole.safe_base,
    }  # fmt: skip
    assert "base instead" in whole.reason
    assert "base instead" not in found.reason
    assert [each for each in found.reason.split(". ") if each not in whole.reason] == []
    with pytest.raises(ValueError, match="context"):
        recommend(1, spec, 1024)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [({"context": "2000000"}, "context", "a plan is made for a context of 2 .. 1,048,576 tokens"),
     ({"a.trained": "1"}, "a.trained", "a trained length of 2 tokens or more"),
     ({"view": "methods", "a.trained": "1"}, "a.trained", "a trained length of 2 tokens or more"),
     ({"a.base": "1"}, "a.base", "with base 1 all pairs turn alike")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:base 1 gives")
def test_a_plan_that_cannot_be_is_one_line_at_its_control(fields, field, message):
    found = page.drawn({"view": "plan", **fields})
    assert found["pictures"] == {}
    assert list(found["errors"]) == [field]
    assert message in found["errors"][field]
    assert len(found["errors"][field].splitlines()) == 1


def test_an_error_of_a_compared_side_stands_at_its_own_control():
    found = page.drawn({"view": "plan", "compared": "1", "b.trained": "1"})
    assert list(found["errors"]) == ["b.trained"]
    assert list(found["pictures"]) == ["a"]


# Two models


def difference(a, b, context=32_768):
    found = views.difference(look(a, context), look(b, context))
    return found, {row[0]: row[1:] for table in found.tables for row in table.rows}


def test_two_models_that_are_alike_differ_in_nothing():
    found, rows = difference(LLAMA_3, LLAMA_3)
    assert rows == {}
    assert found.words == (
        "Every pair turns at the same speed in both: one can be used in place of the other."
    )


def test_an_order_that_is_written_bears_on_cached_keys_and_not_on_weights():
    found, rows = difference(*(Side(model=f"deepseek-{name}", method="none")
                               for name in ("v3", "v2-lite")))  # fmt: skip
    assert "layout" not in rows
    assert "out_layout" in rows
    assert "weights fit both, but keys cached by one" in found.words
    assert "rotary convert" not in found.words


def test_an_attention_factor_keeps_one_model_from_replacing_the_other():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    one, other = (
        Side(model=PASTED, config=json.dumps({"head_dim": 64, "rope_scaling": {**scaling, **own}}))
        for own in ({}, {"attention_factor": 1.0})
    )
    words = difference(one, other, 8192)[0].words
    assert words.startswith("Every pair turns at the same speed in both. Scores are multiplied by")


def test_two_ropes_that_differ_at_another_length_do_not_replace_each_other():
    dynamic, plain = Side(model="internvl3-8b"), Side(model="qwen2.5-7b")
    words = difference(dynamic, plain, 32_768)[0].words
    assert words == (
        "Every pair turns at the same speed in both. "
        "A depends on the length: shown at 32,768 tokens."
    )
    assert "turn at another speed" in difference(dynamic, plain, 65_536)[0].words
    assert difference(dynamic, dynamic)[0].words.startswith(
        "Every pair turns at the same speed in both: one can be used in place of the other. "
        "A and B depend on the length"
    )


def test_what_differs_between_two_models_is_listed_and_explained():
    found, rows = difference(LLAMA_3, Side(model="llama-3.1-8b"), 131_072)
    assert rows["schedule"] == ("default", "llama3")
    assert rows["factor"] == ("-", "8")
    assert "head_dim" not in rows
    assert found.words.startswith("35 of 64 pairs, from 29 on, turn at another speed; pair 35")
    assert "in A it turns 8 times as fast as in B" in found.words
    ratio = found.columns["wavelength_b"] / found.columns["wavelength_a"]
    assert (ratio[:29] == 1).all()
    np.testing.assert_allclose(ratio[35:], 8)


def test_another_layout_and_another_width_are_said_to_fit_no_weights():
    found, rows = difference(Side(model="gpt-j-6b"), Side(model="phi-2"))
    assert "neither weights nor cached keys of one fit the other" in found.words
    assert rows["head_dim"] == ("256", "80")
    assert np.isnan(found.columns["wavelength_b"][16:]).all()
    same = look(LLAMA_3, 4096)
    other = same.spec.from_dict({**same.spec.to_dict(), "layout": "interleaved",
                                 "out_layout": "interleaved"})  # fmt: skip
    turned = views.difference(same, same.__class__(**{**vars(same), "spec": other}))
    assert "A is half, B is interleaved" in turned.words
    assert "`rotary convert`" in turned.words


def test_a_view_of_two_has_one_picture_and_the_controls_of_both():
    found = page.drawn({"view": "models", "b.model": "phi-2", "b.method": "as published"})
    assert (list(found["pictures"]), found["figures"], found["controls"]) == (["a"], "a", "ab")
    assert found["pictures"]["a"]["title"] == "A: llama-3-8b; B: phi-2"
    wrong = page.drawn({"view": "models", "b.model": "a config.json, pasted below"})
    assert list(wrong["errors"]) == ["b.config"]
    alone = page.drawn({"view": "hands"})
    assert (alone["figures"], alone["controls"]) == ("a", "a")


def test_a_field_error_names_its_field():
    with pytest.raises(FieldError, match="16,777,216") as refusal:
        views.plan(look(LLAMA_3, 2**24))
    assert refusal.value.field == "context"
