"""The page without a browser: its models, its state, its numbers, what it refuses and serves."""

import asyncio
import contextlib
import csv
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import alone

import rotary
from rotary.configs import choose
from rotary.explorer import build, figures, models, page, server, views
from rotary.explorer.models import PASTED, pasted, presets, published
from rotary.explorer.side import METHODS, FieldError, Side, look
from rotary.explorer.state import State, from_fields, shown, to_fields, to_query
from rotary.explorer.views import VIEWS

CONFIGS = Path(__file__).parent / "configs"
LLAMA_2 = Side(model="llama-2-7b")
MARKUP = "<img src=x onerror=alert(1)>"
CONFIG = '{"model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "rope_theta": 1e5}'


def picture(view, seen):
    """The picture of a view; of a view of two, with itself."""
    found = VIEWS[view]
    return found.draw(seen, seen) if found.is_of_two else found.draw(seen)


# Models


def test_there_are_presets_of_many_models():
    assert len({name.partition(",")[0] for name in presets()}) >= 90


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_what_the_whole_config_gives(name):
    path, _, kind = name.partition(", ")
    whole = json.loads((CONFIGS / f"{path}.json").read_text())
    made = published(name)
    assert made.spec == rotary.from_hf_config(whole, kind or None)
    assert made.context == choose(whole, kind or None).get("max_position_embeddings") > 0
    assert made.trained == made.spec.params.get("original_max_position_embeddings", made.context)


@pytest.mark.parametrize(("number", "name"), list(enumerate(presets())), ids=list(presets()))
def test_every_picture_of_every_model_can_be_drawn(number, name):
    """Each view for a third of the models: of three in a row, one has it."""
    length = published(name).context
    for view in list(VIEWS)[number % 3 :: 3]:
        is_slow = view in ("reach", "plan")
        seen = look(Side(model=name), min(2 * length, 2**12) if is_slow else min(length, 2**13))
        reads_no_scaling = seen.entry.model.get("only") == ["default"]
        if view == "plan" and (seen.spec.schedule in ("axial", "custom") or reads_no_scaling):
            with pytest.raises(ValueError, match=r"^(plan works for|this model reads only).*$"):
                picture(view, seen)  # in one line, as by `rotary plan`
            continue
        drawn = json.loads(json.dumps(picture(view, seen).data(), allow_nan=False))
        figure = drawn["figure"]
        assert figure["curves"] or figure["rows"] or figure["bars"] or figure["moving"]
        for part in figure["curves"] + figure["rows"]:
            assert 1 <= len(drawn["columns"][part.get("y") or part["column"]]) <= 4096


def test_a_pasted_config_may_be_of_several_layer_types():
    text = (CONFIGS / "gemma-3-4b.json").read_text()
    assert pasted(text).layers == ("full_attention", "sliding_attention")
    assert pasted(text, "sliding_attention").spec.base == 10_000
    assert pasted(text, "full_attention").spec.base == pasted(text).spec.base == 1_000_000


NONSENSE = {
    "not JSON": ("{'a': 1}", "not JSON.*line 1, column 2"),
    "cut off": ('{"head_dim": ', "not JSON"),
    "a list": ("[1, 2]", "must hold an object"),
    "a path": ('"/etc/passwd"', "must hold an object"),
    "a bare path": ("/etc/passwd", "not JSON"),
    "not a number": ('{"rope_theta": NaN}', "NaN"),
    "a key twice": ('{"head_dim": 64, "head_dim": 32}', "'head_dim' appears twice"),
    "nested too deep": ('{"a":' * 200_000 + "1" + "}" * 200_000, "nested too deep|over 1,048,576"),
    "too long": ('{"a": "' + "x" * 2**20 + '"}', "over 1,048,576 bytes"),
    "too long in bytes": ('{"a": "' + "é" * 2**19 + '"}', "over 1,048,576 bytes"),
    "an unknown model": (json.dumps({"model_type": MARKUP}), "is not known"),
    "an odd head": ('{"head_dim": 127}', "rotary_dim must be even"),
    "a wide head": ('{"head_dim": 4096}', "head_dim must be at most 1024"),
    "no rotation": (
        '{"model_type": "granite_swa", "layer_rope_theta": [0]}',
        "no rotation|rope_theta=0",
    ),
    "a base that is none": ('{"head_dim": 64, "rope_theta": -5}', "rope_theta must be finite"),
    "nothing": ("  ", "paste a config.json"),
}


def test_pairs_that_stand_still_by_design_are_not_called_scaled():
    seen = look(Side(model="gemma-4-31b, full_attention"), 4096)
    assert seen.plain == seen.spec  # "proportional" scales nothing
    assert (views.scaling(seen).columns["speed_ratio"] == 1).all()


@pytest.mark.parametrize("name", NONSENSE)
def test_a_config_that_makes_no_sense_is_refused_in_one_line(name):
    text, message = NONSENSE[name]
    with pytest.raises(ValueError, match=message) as refusal:
        Side(model=PASTED, config=text).original()
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("length", [{}, {"max_position_embeddings": 0}])
@pytest.mark.parametrize("view", ["wavelengths", "reach", "plan"])
def test_a_length_that_a_config_does_not_say_is_asked_for(length, view):
    config = json.dumps({"head_dim": 128, "rope_theta": 5e5, **length})
    fields = {"view": view, "a.model": PASTED, "a.config": config, "context": "8192"}
    found = page.drawn(fields, "a.config")
    assert (found["pictures"], list(found["errors"])) == ({}, ["a.trained"])
    assert "no max_position_embeddings" in found["errors"]["a.trained"]
    assert (found["shown"]["a.trained"], found["shown"]["context"]) == (None, 8192)
    filled = page.drawn({**fields, "a.trained": "2048"})
    assert filled["errors"] == {}
    assert "2,048" in filled["pictures"]["a"]["words"]


def test_a_pasted_path_is_not_opened(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    for text in (str(path), json.dumps(str(path)), "config.json", "."):
        with pytest.raises(ValueError, match=r"not JSON|must hold an object"):
            pasted(text)


def test_a_long_config_is_cut_to_what_bears_on_the_rope():
    config = json.loads((CONFIGS / "phi-3-mini-128k.json").read_text())
    config["id2label"] = {str(number): MARKUP for number in range(1000)}
    side = Side(model=PASTED, config=json.dumps(config))
    assert len(side.config) > 30_000 > 8_000 > len(side.link_config())
    restored = from_fields(dict(parse_qsl(to_query(State(a=side))))).a
    assert restored.original().spec == side.original().spec
    assert restored.original().trained == side.original().trained == 4096


def test_a_config_that_stays_too_long_is_not_put_into_a_link():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 2.0}
    factors = [1 + 1 / (3 + pair) for pair in range(512)]
    config = {"head_dim": 1024, "rope_scaling": {**rope, "short_factor": factors,
              "long_factor": factors}}  # fmt: skip
    state = State(a=Side(model=PASTED, config=json.dumps(config)))
    assert state.a.original().spec.head_dim == 1024
    assert state.a.link_config() is None
    assert to_query(state) is None
    drawn = page.drawn({**to_fields(state), "a.config": state.a.config})
    assert (drawn["query"], drawn["errors"], list(drawn["pictures"])) == (None, {}, ["a"])


# State


SIDES = st.builds(
    Side,
    model=st.sampled_from([*presets()][:20]),
    method=st.sampled_from(METHODS),
    base=st.none() | st.floats(1, 1e15),
    head_dim=st.none() | st.integers(1, 512).map(lambda pairs: 2 * pairs),
    trained=st.none() | st.integers(1, 2**24),
) | st.builds(Side, model=st.just(PASTED), config=st.sampled_from([CONFIG, "{", MARKUP]))
STATES = st.builds(
    State, a=SIDES, b=SIDES, compared=st.booleans(), view=st.sampled_from(list(VIEWS)),
    context=st.integers(1, 2**24),
)  # fmt: skip


@given(STATES)
def test_a_link_brings_the_state_back(state):
    found = from_fields(dict(parse_qsl(to_query(state))))
    assert found == from_fields(to_fields(found))
    for letter in ("a", "b"):
        one, other = getattr(state, letter), getattr(found, letter)
        if one.base is not None:
            assert other.base == pytest.approx(one.base, rel=1e-14)
        assert vars(one) | {"base": 0} == vars(other) | {"base": 0}
    assert (found.view, found.context, found.compared) == (
        state.view, state.context, state.compared,
    )  # fmt: skip


def test_a_link_without_state_is_the_first_view_and_other_keys_are_passed_over():
    assert to_query(State()) == ""
    assert from_fields({"__theme": "dark", "utm_source": MARKUP}) == State()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("a.base", "nan", "base must be a number, got 'nan'"),
        ("a.base", MARKUP, "base must be a number"),
        ("a.base", 10**400, "base must be a number"),
        ("a.base", "-5", "base must be in 1 .. 1,000,000,000,000,000, got -5"),
        ("b.head_dim", "many", "head_dim must be a number"),
        ("b.head_dim", "99999", "head_dim must be in 2 .. 1,024, got 99,999"),
        ("b.head_dim", "127", "head_dim must be even, got 127"),
        ("a.trained", "-7", "trained must be in 1 .. 16,777,216, got -7"),
        ("a.trained", "1.5", "trained must be a whole number, got 1.5"),
        ("context", "", "context must be a number"),
        ("context", "100000000", "context must be in 1 .. 16,777,216, got 100,000,000"),
        ("context", "inf", "context must be in 1 .. 16,777,216, got inf"),
        ("view", "decai", "did you mean 'decay'"),
        ("view", {}, "view must be one of"),
        ("view", ["decay"], "view must be one of"),
        ("a.method", "yarm", "did you mean 'yarn'"),
        ("a.model", str(CONFIGS / "llama-2-7b.json"), "model must be one of the"),
        ("a.model", "llama-3-8", "did you mean 'llama-3-8b'"),
    ],
)
def test_a_value_that_makes_no_sense_is_one_line_at_its_control(key, value, message):
    with pytest.raises(FieldError, match=re.escape(message)) as refusal:
        from_fields({key: value})
    assert refusal.value.field == key
    assert len(str(refusal.value).splitlines()) == 1
    assert page.drawn({key: value}) == {"errors": {key: str(refusal.value)}}  # and nothing changes


def test_choosing_a_model_sets_every_number_to_the_model():
    fields = {"a.base": "123", "a.head_dim": "64", "context": "77", "a.model": "llama-3.1-8b"}
    values = shown(from_fields(fields, "a.model"))
    assert (values["a.head_dim"], values["a.base"]) == (128, 500_000)
    assert (values["a.trained"], values["context"]) == (8192, 131072)
    assert from_fields({**fields, "b.model": "phi-2"}, "b.model").context == 77
    assert from_fields(fields, "view").a.base == 123


def test_the_title_says_what_was_changed_of_a_model():
    assert LLAMA_2.title() == "llama-2-7b"
    changed = Side(model="llama-2-7b", base=1e6, head_dim=64, trained=2048, method="yarn")
    assert changed.title() == "llama-2-7b, base 1000000, head_dim 64, trained 2,048, yarn"
    assert Side(model="llama-2-7b", base=10_000.0).title() == "llama-2-7b"


def test_an_error_of_one_side_leaves_the_other():
    fields = {"compared": "1", "a.model": PASTED}
    drawn = page.drawn(fields)
    assert list(drawn["pictures"]) == ["b"]
    assert drawn["errors"] == {"a.config": "paste a config.json, or choose a published model"}


def test_head_dim_keeps_the_rotated_share():
    assert look(Side(model="phi-2", head_dim=160), 2048).spec.rotary_dim == 64
    last = look(Side(model="deepseek-v4-flash, main", head_dim=256), 4096).spec
    assert (last.rotary_dim, last.start) == (32, 224)


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_method_scales_the_plain_rope_to_the_context(method):
    seen = look(Side(model="llama-3.1-8b", method=method), 65536)
    assert seen.plain == rotary.Rotary(head_dim=128, base=5e5)
    assert seen.spec == rotary.analysis.extension.methods(seen.plain, 8192, 65536)[method]
    assert look(Side(model="llama-3.1-8b", method=method), 8192).spec == seen.plain


# Numbers and figures


def test_wavelengths_are_those_of_the_formula():
    columns = views.wavelengths(look(LLAMA_2, 4096)).columns
    expected = 2 * np.pi * 10_000 ** (np.arange(64) / 64)
    np.testing.assert_allclose(columns["wavelength_tokens"], expected, rtol=1e-12)
    np.testing.assert_allclose(columns["turns_in_training"], 4096 / expected, rtol=1e-12)


def test_what_the_views_say_of_llama_2():
    seen, far = look(LLAMA_2, 4096), look(LLAMA_2, 131_072)
    assert views.wavelengths(seen).words.endswith("the critical dimension is 92.")
    assert views.decay_curve(seen).columns["mean_partial_sum"][0] == 32.5
    band = views.scaling(seen).figure.band
    assert (round(band.start, 1), round(band.stop, 1)) == (20.9, 45.0)
    assert views.coverage(seen).columns["unseen_at_context"].max() == 0
    errors = views.error_of_angles(far).columns
    assert errors["float32"].max() > 1e-3 > 1e-6 > errors["exact"].max()


def test_the_first_failure_is_the_published_one_and_stands_in_the_figure():
    seen = look(Side(model="llama-3-8b"), 32768)
    found = views.similarity(seen)
    assert "18,438" in found.words
    (marked,) = found.figure.points
    assert marked.x == 18438
    assert -1 < marked.y < 0
    angles = np.arange(1, 18439)[:, None] * 500_000.0 ** (-np.arange(64) / 64)
    assert np.flatnonzero(np.cos(angles).sum(axis=1) < 0)[0] + 1 == 18438


def test_the_first_failure_is_a_point_where_it_is_not_the_lowest_around():
    found = views.similarity(look(Side(model="llama-2-7b", base=500.0), 2**17))
    at = found.columns["distance"].tolist().index(found.figure.points[0].x)
    sums = found.columns["similarity"]
    assert sums[at + 1] < sums[at] < 0 < sums[:at].min()


def test_no_dip_of_the_similarity_falls_between_two_points():
    found = views.similarity(look(Side(model="llama-2-7b"), 16384)).columns
    angles = np.arange(1, 16385)[:, None] * 10_000.0 ** (-np.arange(64) / 64)
    every = np.cos(angles).sum(axis=1)
    np.testing.assert_allclose(found["similarity"], every[found["distance"] - 1], atol=1e-9)
    assert found["similarity"].min() == pytest.approx(every.min())
    assert len(found["distance"]) <= 1100
    for distance in range(1, 16385):  # a point as low, and one as high, stands beside each
        near = np.abs(found["distance"] / distance - 1) <= 0.03
        assert found["similarity"][near].min() <= every[distance - 1] + 1e-9
        assert found["similarity"][near].max() >= every[distance - 1] - 1e-9


def test_a_search_that_would_take_long_is_not_begun():
    seen = look(Side(model="gpt-neox-20b"), 2**24)  # a quarter is rotated: never negative
    found = views.similarity(seen)
    assert found.figure.points == ()
    assert found.words.endswith("up to 131,072. Not searched beyond; the view Reach does.")
    assert found.figure.x.title == "distance, tokens, samples beyond 699,050"
    assert "rotary plan --from" in page.smallest_base(seen)
    assert "2 .. 1,048,576" in page.smallest_base(look(LLAMA_2, 2**24))
    six = page.smallest_base(look(Side(head_dim=6), 100))
    assert six.endswith("run rotary plan --context 100 --head-dim 6.")


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    found = views.scaling(look(Side(model="llama-2-7b", method="yarn"), 32768))
    ratio = found.columns["speed_ratio"]
    first, last = found.figure.band.start, found.figure.band.stop
    np.testing.assert_allclose(ratio[: int(first)], 1)
    np.testing.assert_allclose(ratio[math.ceil(last) + 1 :], 1 / 8)


@pytest.mark.parametrize("model", ["llama-2-7b", "phi-2", "nanochat-d32"])
def test_hands_turn_by_inv_freq_and_the_score_of_equal_vectors_is_theirs(model):
    seen = look(Side(model=model), 2048)
    spec, found = seen.spec, views.hands(seen)
    speeds = spec.base ** (-np.arange(0, spec.rotary_dim, 2) / spec.rotary_dim)
    np.testing.assert_allclose(found.figure.moving["inv_freq"], spec.sign * speeds, rtol=1e-12)
    assert found.figure.moving["constant"] == (spec.head_dim - spec.rotary_dim) // 2
    sums = np.cos(found.columns["distance"][:, None] * speeds).sum(axis=1)
    np.testing.assert_allclose(
        found.columns["score"], sums + found.figure.moving["constant"], rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("view", VIEWS)
def test_the_file_of_numbers_holds_every_digit(view):
    found = picture(view, look(LLAMA_2, 4096))
    rows = list(csv.DictReader(found.csv().splitlines()))
    for name, column in found.columns.items():
        np.testing.assert_array_equal([float(row[name]) for row in rows], column)


@pytest.mark.parametrize("view", VIEWS)
def test_a_figure_names_its_axes_and_columns_that_are_there(view):
    found = picture(view, look(LLAMA_2, 4096))
    assert found.figure.x.title
    assert found.figure.y.title or not found.figure.curves
    names = {curve.y for curve in found.figure.curves} | {row.column for row in found.figure.rows}
    assert names or found.figure.bars or found.figure.moving
    assert names <= set(found.columns)


def test_channels_of_one_pair_have_one_number():
    for name in ("llama-2-7b", "gpt-j-6b", "deepseek-v3"):
        seen = look(Side(model=name), 4096)
        spec, columns = seen.head, views.layout(seen).columns
        reads, writes = columns["reads"], columns["writes"]
        x = np.random.default_rng(0).standard_normal(spec.head_dim)
        for pair in range(spec.rotary_dim // 2):
            alone = np.where(reads == pair, x, 0.0)[None]
            turned = rotary.apply(spec, alone, alone, positions=np.array([7]))[0][0]
            np.testing.assert_array_equal(np.flatnonzero(turned), np.flatnonzero(writes == pair))
        assert np.isnan(reads).sum() == spec.head_dim - spec.rotary_dim


# What is shown as text, and what is served


def test_no_file_of_the_page_names_another_host():
    names = [*server.STATIC, "page.html", "side.html"]
    for text in map(page.file, names):
        assert set(re.findall(r"https?://[^\s\"']*", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", page.page())  # all by the policy


def ask(path, query="", given=(), method="GET", sends=(), host="127.0.0.1", app=None):
    """(status, headers, body) of the page.

    given  more headers;  sends  the parts of the body of the request;  host  where it is served
    """
    sent, parts = [], [*sends]

    async def send(message):
        sent.append(message)

    async def receive():
        if not parts:
            await asyncio.sleep(60)  # a body that never ends
        return {"type": "http.request", "body": parts.pop(0), "more_body": parts != [b""]}

    headers = [(b"host", b"localhost:7860"), *given]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(),
             "root_path": "", "client": ("127.0.0.1", 1), "headers": headers}  # fmt: skip
    asyncio.run((app or build(host))(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent)


def draw(fields, **given):
    """(status, answer) of a change of the controls."""
    status, _, body = ask(
        "/draw", method="POST", sends=[json.dumps({"fields": fields}).encode(), b""], **given
    )
    return status, json.loads(body) if status == 200 else body.decode()


def test_the_name_of_a_model_is_sent_as_text_alone():
    config = json.dumps({**json.loads(CONFIG), "_name_or_path": MARKUP})
    status, found = draw({"a.model": PASTED, "a.config": config})
    assert (status, found["pictures"]["a"]["title"]) == (200, f"A: {MARKUP}")
    assert ask("/draw", method="POST", sends=[b"{}", b""])[1]["content-type"] == "application/json"
    wrong = draw({"a.model": PASTED, "a.config": json.dumps({"model_type": MARKUP})})[1]
    assert MARKUP in wrong["errors"]["a.config"]
    text = ask("/download/figure.html", urlencode({"a.model": PASTED, "a.config": config}))[2]
    assert MARKUP.encode() not in text
    assert b"&lt;img src=x" in text


def test_half_a_character_is_no_fault_of_the_server():
    config = '{"model_type": "llama", "_name_or_path": "\\ud800"}'
    fields = {"a.model": PASTED, "a.config": config}
    assert draw(fields)[1]["pictures"]["a"]["title"] == "A: ?"
    assert ask("/download/figure.html", urlencode(fields))[0] == 200
    found = draw({"a.model": PASTED, "a.config": '{"model_type": "llama", "x": "\ud800"}'})[1]
    assert found["errors"] == {} or "a.config" in found["errors"]


def test_a_figure_holds_no_tag_of_a_stranger_in_its_script():
    assert "<" not in figures.as_script({"words": "</script><!--"})


@pytest.mark.parametrize("path", ["/", "/explore.css", "/download/numbers.csv", "/none"])
def test_every_answer_carries_the_policy_and_cannot_be_framed_or_read_by_another_page(path):
    status, headers, body = ask(path)
    assert status == (404 if path == "/none" else 200)
    assert int(headers["content-length"]) == len(body)
    policy = headers["content-security-policy"]
    for part in ("default-src 'none'", "script-src 'self';", "frame-ancestors 'none'"):
        assert part in policy
    assert "unsafe" not in policy
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "path",
    ["/upload", "/file=/etc/passwd", "/proxy=http://a.org/", "/docs", "/openapi.json", "/page.py",
     "/side.html", "/../page.py", "/download/../page.py", "/download/page.py", "//explore.js"],
)  # fmt: skip
def test_nothing_but_the_page_and_its_files_is_given(path):
    assert ask(path)[0] == 404


def test_the_numbers_are_downloaded_for_each_side():
    query = to_query(State(a=LLAMA_2, b=Side(model="phi-2"), view="wavelengths", context=4096))
    for asked, wanted in (("", LLAMA_2), ("&side=b", Side(model="phi-2"))):
        status, headers, body = ask("/download/numbers.csv", query + asked)
        assert (status, headers["content-type"]) == (200, "text/csv; charset=utf-8")
        assert headers["content-disposition"] == 'attachment; filename="numbers.csv"'
        assert body.decode() == views.wavelengths(look(wanted, 4096)).csv()


@pytest.mark.parametrize("method", ["none", "linear", "yarn", "llama3", "longrope"])
def test_the_config_is_downloaded_for_transformers_and_gives_the_spec_back(method):
    state = State(a=Side(model="llama-2-7b", method=method), context=16384)
    status, _, body = ask("/download/config.json", to_query(state))
    assert status == 200
    assert rotary.from_hf_config(json.loads(body)) == look(state.a, 16384).spec
    assert json.loads(body)["max_position_embeddings"] == 16384


def test_the_config_of_dynamic_is_downloaded_at_any_context():
    """It scales from max_position_embeddings, its trained length: a longer context was refused."""
    status, _, body = ask("/download/config.json", "a.model=internvl3-8b&context=131072")
    made = json.loads(body)
    assert (status, made["max_position_embeddings"]) == (200, 32768)
    assert made["rope_parameters"]["rope_type"] == "dynamic"


def test_the_figure_is_downloaded_whole():
    status, headers, body = ask("/download/figure.html", to_query(State(view="decay")))
    assert (status, headers["content-disposition"]) == (200, 'attachment; filename="figure.html"')
    assert b"partial" in body
    assert not re.search(rb'<(?:script|link)\b[^>]*(?:src|href)="', body)


@pytest.mark.parametrize(
    ("file", "query", "message"),
    [
        ("config.json", "a.model=gpt-j-6b", "a plain config cannot say"),
        ("config.json", "a.method=ntk", "transformers has no rope_type 'ntk'"),
        ("numbers.csv", "view=decai", "did you mean 'decay'"),
        ("figure.html", "a.base=much", "base must be a number"),
    ],
)
def test_a_download_that_cannot_be_is_refused_in_one_line_of_text(file, query, message):
    status, headers, body = ask(f"/download/{file}", query)
    assert (status, headers["content-type"]) == (422, "text/plain; charset=utf-8")
    assert message in body.decode()
    assert body.count(b"\n") == 1


# Who is answered, and how much


OWN = [(b"origin", b"http://localhost:7860"), (b"sec-fetch-site", b"same-origin")]
STRANGERS = {
    "another port": [(b"sec-fetch-site", b"same-site")],
    "another site": [(b"sec-fetch-site", b"cross-site")],
    "an origin alone": [(b"origin", b"http://localhost:9000")],
    "an origin of one name": [(b"origin", b"http://localhost")],
    "an origin that is none": [(b"origin", b"http://[")],
    "a frame without an origin": [(b"origin", b"null")],
    "both": [(b"origin", b"https://evil.example"), (b"sec-fetch-site", b"cross-site")],
    "a value not known": [(b"sec-fetch-site", b"")],
}


@pytest.fixture
def work(monkeypatch):
    """What was computed since the test began."""
    done = []
    for name, (kind, _) in server.DOWNLOADS.items():
        watched = (kind, lambda *given: done.append(given) or "x")
        monkeypatch.setitem(server.DOWNLOADS, name, watched)
    for name in ("drawn", "certified"):
        monkeypatch.setattr(page, name, lambda *given: done.append(given) or {})
    return done


@pytest.mark.parametrize("who", STRANGERS)
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/download/numbers.csv"), ("GET", "/explore.js"), ("GET", "/none"),
     ("POST", "/draw"), ("POST", "/base"), ("OPTIONS", "/draw")],
)  # fmt: skip
def test_another_site_gets_one_line_and_causes_no_work(who, method, path, work):
    status, headers, body = ask(path, method=method, given=STRANGERS[who], sends=[b"{}", b""])
    assert (status, headers["content-type"]) == (403, "text/plain; charset=utf-8")
    assert body == b"another site asked for this page: copy the address into a tab of its own\n"
    assert "access-control-allow-origin" not in headers
    assert work == []


@pytest.mark.parametrize(
    "given", [OWN, OWN[1:], [(b"sec-fetch-site", b"none")], []], ids=["own", "get", "typed", "curl"]
)
def test_its_own_page_a_typed_address_and_a_program_are_answered(given, work):
    assert ask("/", given=given)[0] == 200
    assert ask("/draw", method="POST", given=given, sends=[b"{}", b""])[0] == 200
    assert ask("/base", method="POST", given=given, sends=[b"{}", b""])[0] == 200
    assert ask("/download/numbers.csv", given=given)[::2] == (200, b"x")
    assert len(work) == 3


@pytest.mark.parametrize(
    ("name", "served", "status"),
    [("evil.example", "127.0.0.1", 400), ("evil.example:7860", "::1", 400), ("", "localhost", 400),
     ("127.0.0.1.evil.example", "127.0.0.1", 400), ("[::1]:7860", "127.0.0.1", 200),
     ("[::1]", "::1", 200), ("LOCALHOST", "127.0.0.1", 200), ("rope.example", "0.0.0.0", 200)],
)  # fmt: skip
def test_a_page_of_this_machine_is_asked_by_its_own_names_alone(name, served, status):
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", name.encode())]}
    found = server.refused(scope, served)
    assert (found.status_code if found else 200) == status


def test_a_websocket_is_closed():
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/draw", "root_path": "", "headers": []}
    asyncio.run(build()(scope, None, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE"])
def test_methods_that_the_page_does_not_use_are_refused(method, work):
    assert ask("/", method=method)[0] == 405
    assert work == []


def test_a_long_address_and_long_headers_are_refused(work):
    long = "x" * server.MAX_HEAD
    for request in ({"query": f"a.config={long}"}, {"given": [(b"cookie", long.encode())]},
                    {"given": [(b"x", b"y" * 100)] * 700}):  # fmt: skip
        status, _, body = ask("/download/numbers.csv", **request)
        assert (status, body) == (431, b"address and headers must be at most 65,536 bytes\n")
    assert work == []


def test_two_long_configs_fit_into_a_link():
    text = json.dumps({"head_dim": 64, "rope_theta": 1e4, "_name_or_path": '"' * 3950})
    side = Side(model=PASTED, config=text)
    assert 7900 < len(side.link_config()) <= 8000
    assert len(to_query(State(a=side, b=side, compared=True))) < server.MAX_HEAD - 8192


def test_a_body_is_read_whole_up_to_its_limit_and_no_further(work):
    start, part = b'{"fields": {"a.config": "', b"x" * 2**20
    body = [start, *[part] * 4, part[: -len(start) - 3], b'"}}']
    assert ask("/draw", method="POST", sends=[*body, b""])[0] == 200
    assert len(work) == 1
    status, _, words = ask("/draw", method="POST", sends=[part] * 6 + [b""])
    assert (status, words) == (413, b"a request must be at most 5,242,880 bytes\n")
    assert len(work) == 1


@pytest.mark.parametrize("path", ["/draw", "/base"])
def test_a_body_that_does_not_arrive_is_given_up(path, work, monkeypatch):
    monkeypatch.setattr(server, "BODY_SECONDS", 0.05)
    status, _, body = ask(path, method="POST", sends=[b"{"])
    assert (status, body) == (408, b"a request must arrive within 0.05 seconds\n")
    assert work == []


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'"x"', b"\xff", b'{"fields": NaN}', b"[" * 9999]
)
def test_a_body_that_is_no_object_is_refused_in_one_line(body, work):
    status, _, words = ask("/draw", method="POST", sends=[body, b""])
    assert (status, words.count(b"\n"), words[:11]) == (400, 1, b"the request")
    assert work == []


@pytest.mark.parametrize(
    ("path", "method", "at_once", "waiting"),
    [("/download/config.json", "GET", 4, 32), ("/draw", "POST", 4, 64), ("/base", "POST", 1, 16)],
)
def test_slow_requests_stop_no_other_request(path, method, at_once, waiting, monkeypatch):
    release, running, seen = threading.Event(), [], []

    def slow(*given):
        running.append(given)
        return str(release.wait(20))

    for name in ("drawn", "certified"):
        monkeypatch.setattr(page, name, slow)
    monkeypatch.setitem(server.DOWNLOADS, "config.json", ("text/plain", slow))
    head = {"type": "http", "query_string": b"", "client": ("127.0.0.1", 1), "root_path": "",
            "headers": [(b"host", b"localhost")]}  # fmt: skip

    async def main():
        app = build()

        def asked(path, method="GET"):
            async def send(message):
                if "status" in message:
                    seen.append((path, message["status"]))

            async def receive():
                return {"type": "http.request", "body": b"{}"}

            scope = {**head, "path": path, "method": method}
            return asyncio.create_task(app(scope, receive, send))

        calls = [asked(path, method) for _ in range(at_once + waiting + 3)]
        await asyncio.wait_for(asked("/explore.js"), 5)
        while len(seen) < 4:
            await asyncio.sleep(0.01)
        assert sorted(seen) == sorted([("/explore.js", 200), *[(path, 503)] * 3])
        assert len(running) <= at_once
        release.set()
        await asyncio.wait_for(asyncio.gather(*calls), 10)
        await asked(path, method)

    asyncio.run(main())
    assert seen[4:] == [(path, 200)] * (at_once + waiting + 1)


STUCK = {
    "a search": "POST /base HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60\r\n\r\n"
    '{"fields":{"context":131072,"a.head_dim":256}}              ',
    "a client that does not read": "GET /explore.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000,
    "a client that does not send": "POST /draw HTTP/1.1\r\nHost: localhost\r\n"
    "Content-Length: 9\r\n\r\n{",
}


@pytest.mark.parametrize("case", STUCK)
def test_an_interrupt_ends_the_server_whatever_is_being_computed_or_sent(case):
    """A search ran to its end first; for a client that did not read the server waited for ever."""
    code = "from rotary.explorer import serve; serve(ready=lambda at: print(at, flush=True))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            port = int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                client.connect(("127.0.0.1", port))
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.sendall(STUCK[case].encode())
                time.sleep(1.5)
                process.send_signal(signal.SIGINT)
                assert process.wait(8) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_a_download_writes_no_file():
    written, is_watching = [], True

    def watch(event, given):
        if is_watching and event == "open" and set(str(given[1])) & set("wax+"):
            written.append(given[0])

    sys.addaudithook(watch)
    for name in server.DOWNLOADS:
        assert ask(f"/download/{name}")[0] == 200
    assert written == []
    with open(os.devnull, "w"):  # it would have been seen
        assert written == [os.devnull]
    is_watching = False


# What the worst request costs


@pytest.mark.parametrize("length", [10**8, 10**12, 10**18])
def test_a_length_beyond_every_picture_is_refused(length):
    text = json.dumps({"head_dim": 64, "max_position_embeddings": length})
    with pytest.raises(ValueError, match="must be at most 16,777,216 tokens"):
        pasted(text)
    assert set(draw({"a.model": PASTED, "a.config": text})[1]["errors"]) == {"a.config"}


def test_the_width_of_a_head_is_refused_before_it_is_drawn():
    started = time.perf_counter()
    for width in (1026, 60_000_000, 10**18):
        status, _, body = ask("/download/numbers.csv", urlencode(
            {"a.model": PASTED, "a.config": json.dumps({"head_dim": width})}
        ))  # fmt: skip
        assert status == 422
        assert b"head_dim must be" in body
    assert time.perf_counter() - started < 2


def test_a_megabyte_of_layer_types_is_shortened_in_bounded_time():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = json.dumps({"head_dim": 64, "rope_parameters": {f"l{i}": rope for i in range(15_000)}})
    assert 700_000 < len(text) < models.MAX_PASTED
    read, tried = models.read, []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(models, "read", lambda *given: tried.append(0) or read(*given))
        models.shortened(text)
    assert len(tried) < 30  # 401 before there was a limit: a minute


def test_the_page_needs_no_library_that_counts_its_use():
    code = "import sys, rotary.explorer; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(alone(code).split())
    assert "starlette" in loaded
    assert not {"gradio", "huggingface_hub", "plotly", "pandas", "torch"} & loaded


def test_a_port_that_is_taken_is_an_error_that_names_it():
    from rotary.explorer import serve

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}: .*; choose another port"):
            serve(port=port)


@pytest.mark.parametrize("host", ["999.1.1.1", "192.0.2.1"])  # no address; not of this machine
def test_a_host_that_is_not_this_machine_is_an_error_that_says_so(host):
    from rotary.explorer import serve

    with pytest.raises(OSError, match=f"{host}, port .*; --host must be an address of this"):
        serve(host, port=8000)


@pytest.mark.parametrize("host", ["", "a\udcff", "\u00e4" * 70, "a..b"])
def test_a_host_that_is_no_name_is_refused(host, monkeypatch):
    """An empty one, as of a variable that is not set, opened the page to every network."""
    monkeypatch.setattr(socket, "create_server", lambda *_, **__: pytest.fail("it listens"))
    with pytest.raises(ValueError, match=r"--host must be an address of this machine, such as"):
        server.serve(host, port=8000)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.1", "127.0.0.1"])
def test_every_name_of_this_machine_is_guarded_as_such(host, monkeypatch):
    """127.1 is 127.0.0.1: a page there answered to any name, as one of a network address does."""
    served = []
    monkeypatch.setattr(server, "build", lambda name, ready: served.append(name))
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda *_, **__: None)
    server.serve(host)
    assert served == ["localhost" if host == "localhost" else "127.0.0.1"]


def test_the_smallest_base_is_the_certified_one():
    assert "4,293.4376" in page.smallest_base(look(LLAMA_2, 1024))
    assert models.published("llama-2-7b").spec.base > 4293.4376
