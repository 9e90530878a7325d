"""The page without a browser: its models, its state, its numbers, what it refuses and serves."""

import asyncio
import csv
import html
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import gradio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rotary
from rotary.configs import choose
from rotary.explorer import controls, guard, models, numbers, page
from rotary.explorer.models import PASTED, pasted, presets, published
from rotary.explorer.side import METHODS, Side, look, side
from rotary.explorer.state import State, from_query, to_query
from rotary.explorer.views import VIEWS

CONFIGS = Path(__file__).parent / "configs"
LLAMA_2 = Side(model="llama-2-7b")
MARKUP = "<img src=x onerror=alert(1)>"
CONFIG = '{"model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "rope_theta": 1e5}'


# Models


def test_there_are_presets_of_many_models():
    assert len({name.partition(",")[0] for name in presets()}) >= 90


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_what_the_whole_config_gives(name):
    path, _, kind = name.partition(", ")
    whole = json.loads((CONFIGS / f"{path}.json").read_text())
    made = published(name)
    assert made.spec == rotary.from_hf_config(whole, kind or None)
    length = choose(whole, kind or None).get("max_position_embeddings")
    assert made.context == (length or 4096)
    assert made.trained == made.spec.params.get("original_max_position_embeddings", made.context)


@pytest.mark.parametrize("name", presets())
def test_every_picture_of_every_model_can_be_drawn(name):
    for view in VIEWS:
        seen = look(Side(model=name), published(name).context)
        figure = VIEWS[view].draw(seen, VIEWS[view].numbers(seen))
        assert json.loads(figure.to_json())["data"]
        for trace in figure.data:
            assert 1 <= len(trace.x) <= 4096


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
    "a base that is none": ('{"head_dim": 64, "rope_theta": -5}', "base must be finite"),
    "nothing": ("  ", "paste a config.json"),
}


def test_pairs_that_stand_still_by_design_are_not_called_scaled():
    seen = look(Side(model="gemma-4-31b, full_attention"), 4096)
    assert seen.plain == seen.spec  # "proportional" scales nothing
    assert (VIEWS["band"].numbers(seen).columns["speed_ratio"] == 1).all()


@pytest.mark.parametrize("name", NONSENSE)
def test_a_config_that_makes_no_sense_is_refused_in_one_line(name):
    text, message = NONSENSE[name]
    with pytest.raises(ValueError, match=message) as refusal:
        Side(model=PASTED, config=text).made()
    assert len(str(refusal.value).splitlines()) == 1


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
    restored = from_query(dict(parse_qsl(to_query(State(a=side))))).a
    assert restored.made().spec == side.made().spec
    assert restored.made().trained == side.made().trained == 4096


def test_a_config_that_stays_too_long_is_not_put_into_a_link():
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 2.0}
    factors = [1 + 1 / (3 + pair) for pair in range(512)]
    config = {"head_dim": 1024, "rope_scaling": {**rope, "short_factor": factors,
              "long_factor": factors}}  # fmt: skip
    state = State(a=Side(model=PASTED, config=json.dumps(config)))
    assert state.a.made().spec.head_dim == 1024
    assert state.a.link_config() is None
    assert "too long for a link" in page.drawn(state)["a.links"]
    assert "a.config" not in to_query(state)


# State


SIDES = st.builds(
    Side,
    model=st.sampled_from([*presets()][:20]),
    method=st.sampled_from(METHODS),
    base=st.none() | st.floats(1, 1e15),
    head_dim=st.none() | st.integers(2, 1024),
    trained=st.none() | st.integers(1, 2**24),
) | st.builds(Side, model=st.just(PASTED), config=st.sampled_from([CONFIG, "{", MARKUP]))
STATES = st.builds(
    State, a=SIDES, b=SIDES, compared=st.booleans(), view=st.sampled_from(list(VIEWS)),
    context=st.integers(1, 2**24),
)  # fmt: skip


@given(STATES)
def test_a_link_brings_the_state_back(state):
    found = from_query(dict(parse_qsl(to_query(state))))
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
    assert from_query({"__theme": "dark", "utm_source": MARKUP}) == State()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("a.base", "nan", "base must be a number, got 'nan'"),
        ("a.base", MARKUP, "base must be a number"),
        ("b.head_dim", "many", "head_dim must be a number"),
        ("context", "", "context must be a number"),
        ("view", "decai", "did you mean 'decay'"),
        ("a.method", "yarm", "did you mean 'yarn'"),
    ],
)
def test_a_link_that_makes_no_sense_is_refused_in_one_line(key, value, message):
    with pytest.raises(ValueError, match=message) as refusal:
        from_query({key: value})
    assert len(str(refusal.value).splitlines()) == 1


def test_what_is_out_of_bounds_is_moved_in():
    state = from_query({"context": "1e15", "a.head_dim": "99999", "a.trained": "-7", "a.base": "0"})
    assert state.context == 2**24
    assert (state.a.head_dim, state.a.trained, state.a.base) == (1024, 1, 1)
    assert from_query({"context": "inf"}).context == 2**24
    assert side(Side(), base=0, head_dim=0, trained=0) == Side(base=1.0, head_dim=2, trained=1)


def test_a_file_named_as_a_model_is_not_opened():
    with pytest.raises(ValueError, match="is not one of the"):
        from_query({"a.model": str(CONFIGS / "llama-2-7b.json")})


# Controls


@given(STATES)
@settings(max_examples=50)
def test_controls_that_nobody_moved_say_the_same_state(state):
    one = controls.read(controls.shown(state), "view")
    assert controls.read(controls.shown(one), "view") == one


@given(STATES)
@settings(max_examples=50)
def test_no_slider_is_put_outside_its_ends(state):
    shown = controls.shown(state)
    ends = {"base_log": (0, 15), "trained_log": (0, 24), "context_log": (0, 24),
            "factor": controls.FACTORS, "head_dim": (2, 1024)}  # fmt: skip
    for name, value in shown.items():
        low, high = ends.get(name.rpartition(".")[2], (-math.inf, math.inf))
        assert not isinstance(value, int | float) or low <= value <= high


def test_a_slider_moves_the_number_beside_it():
    values = controls.shown(State())
    moved = page.update("a.base_log", {**values, "a.base_log": 4.003})
    assert moved["a.base"] == 10_070
    assert "a.base_log" not in moved
    assert page.update("context_log", {**values, "context_log": 12.0})["context"] == 4096
    assert page.update("a.trained_log", {**values, "a.trained_log": 11.0})["a.trained"] == 2048
    assert page.update("factor", {**values, "factor": 16.0})["context"] == 16 * 8192


def test_choosing_a_model_sets_every_number_to_the_model():
    values = {**controls.shown(State(a=Side(base=123.0, head_dim=64))), "a.model": "llama-3.1-8b"}
    moved = page.update("a.model", values)
    wanted = {"a.head_dim": 128, "a.base": 500_000, "context": 131072, "factor": 16}
    assert {name: moved.get(name, values[name]) for name in wanted} == wanted
    assert "a.trained" not in moved  # 8192 for both


def test_a_bad_value_changes_nothing_but_the_error_line():
    values = {**controls.shown(State()), "context": None}
    assert set(page.update("context", values)) == {"error"}
    values = {**controls.shown(State()), "a.head_dim": 127}
    moved = page.update("a.head_dim", values)
    assert moved["error"] == "Not drawn: A: head&#95;dim must be even, got 127"
    assert "a.plot" not in moved


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
    columns = numbers.wavelengths(look(LLAMA_2, 4096)).columns
    expected = 2 * np.pi * 10_000 ** (np.arange(64) / 64)
    np.testing.assert_allclose(columns["wavelength_tokens"], expected, rtol=1e-12)
    np.testing.assert_allclose(columns["turns_in_training"], 4096 / expected, rtol=1e-12)


def test_the_first_failure_is_the_published_one_and_stands_in_the_figure():
    seen = look(Side(model="llama-3-8b"), 32768)
    found = numbers.similarity(seen)
    assert found.marks["first_failure"] == 18438
    assert "18,438" in found.words
    marked = VIEWS["similarity"].draw(seen, found).data[1]
    assert marked.x[0] == 18438
    assert -1 < marked.y[0] < 0
    angles = np.arange(1, 18439)[:, None] * 500_000.0 ** (-np.arange(64) / 64)
    assert np.flatnonzero(np.cos(angles).sum(axis=1) < 0)[0] + 1 == 18438


def test_the_first_failure_is_a_point_where_it_is_not_the_lowest_around():
    found = numbers.similarity(look(Side(model="llama-2-7b", base=500.0), 2**17))
    at = found.columns["distance"].tolist().index(int(found.marks["first_failure"]))
    sums = found.columns["similarity"]
    assert sums[at + 1] < sums[at] < 0 < sums[:at].min()


def test_no_dip_of_the_similarity_falls_between_two_points():
    found = numbers.similarity(look(Side(model="llama-2-7b"), 16384)).columns
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
    found = numbers.similarity(seen)
    assert found.marks == {}
    assert "up to 131,072. Not searched beyond; `rotary plan --context 16777216`" in found.words
    assert "rotary plan --context 16777216" in numbers.smallest_base(seen)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    found = numbers.band(look(Side(model="llama-2-7b", method="yarn"), 32768))
    ratio = found.columns["speed_ratio"]
    first, last = found.marks["kept_before"], found.marks["interpolated_after"]
    np.testing.assert_allclose(ratio[: int(first)], 1)
    np.testing.assert_allclose(ratio[math.ceil(last) + 1 :], 1 / 8)


@pytest.mark.parametrize("view", VIEWS)
def test_the_file_of_numbers_holds_every_digit(view):
    found = VIEWS[view].numbers(look(LLAMA_2, 4096))
    rows = list(csv.DictReader(numbers.csv(found).splitlines()))
    for name, column in found.columns.items():
        np.testing.assert_array_equal([float(row[name]) for row in rows], column)


@pytest.mark.parametrize("view", VIEWS)
def test_a_figure_names_its_axes_and_carries_no_address(view):
    seen = look(LLAMA_2, 4096)
    figure = VIEWS[view].draw(seen, VIEWS[view].numbers(seen))
    assert figure.layout.xaxis.title.text
    assert figure.layout.yaxis.title.text or view == "layout"
    assert "http" not in figure.to_json()
    assert "http" not in json.dumps(page.CONFIG)


def test_channels_of_one_pair_have_one_number():
    for name in ("llama-2-7b", "gpt-j-6b", "deepseek-v3"):
        spec = published(name).spec
        columns = numbers.layout(look(Side(model=name), 4096)).columns
        reads, writes = columns["reads"], columns["writes"]
        x = np.random.default_rng(0).standard_normal(spec.head_dim)
        for pair in range(spec.rotary_dim // 2):
            alone = np.where(reads == pair, x, 0.0)[None]
            turned = rotary.apply(spec, alone, alone, positions=np.array([7]))[0][0]
            np.testing.assert_array_equal(np.flatnonzero(turned), np.flatnonzero(writes == pair))
        assert np.isnan(reads).sum() == spec.head_dim - spec.rotary_dim


# What is shown as text, and what is served


@given(st.text())
def test_text_is_shown_as_it_is(text):
    shown = page.as_text(text)
    assert html.unescape(shown) == "".join(html.unescape(f"&#{ord(c)};") for c in text)
    assert not re.search(r"[<>\"'`*_\[\]|\\~^$]|://", shown)


def test_the_name_of_a_model_is_never_markup():
    config = json.dumps({**json.loads(CONFIG), "_name_or_path": MARKUP})
    state = State(a=Side(model=PASTED, config=config))
    found = page.drawn(state)
    assert MARKUP in html.unescape(found["a.title"])
    assert "<" not in found["a.title"] + found["a.words"] + found["a.links"]
    wrong = page.drawn(State(a=Side(model=PASTED, config=json.dumps({"model_type": MARKUP}))))
    assert MARKUP in html.unescape(wrong["error"])
    assert "<" not in wrong["error"]


def test_the_page_of_gradio_keeps_no_address_and_every_script_has_the_nonce():
    template = Path(gradio.__file__).parent / "templates" / "frontend" / "index.html"
    before = template.read_text()
    after = guard.rewritten(before, "NONCE")
    assert re.findall(r"<[^>]*https?://[^>]*>", before)
    assert re.findall(r"<[^>]*https?://[^>]*>", after) == []
    scripts = re.findall(r"<script\b[^>]*>", after)
    assert len(scripts) == len(re.findall(r"<script\b", before)) + 1
    assert all('nonce="NONCE"' in script for script in scripts)
    preloaded = re.findall(r'modulepreload.*?assets/([^"]*)"', after)
    assert len(preloaded) == 1
    assert (template.parent / "assets" / preloaded[0]).is_file()


passed = []  # paths that the guard let through to the app behind it


def ask(path, query="", host="127.0.0.1", body=b"<head></head>", kind=b"text/html", given=(),
        method="GET", sends=()):  # fmt: skip
    """(status, headers, body) of the guard around an app that answers with `body`, in two parts.

    given  more headers;  sends  the parts of the body of the request
    """
    sent, parts = [], [*sends]

    async def inner(scope, receive, send):
        passed.append(scope["path"])
        assert (b"accept-encoding", b"br") not in scope["headers"] or host != "127.0.0.1"
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})

    async def send(message):
        sent.append(message)

    async def receive():
        if not parts:
            await asyncio.sleep(60)  # a body that never ends
        return {"type": "http.request", "body": parts.pop(0), "more_body": parts != [b""]}

    headers = [(b"host", b"localhost:7860"), (b"accept-encoding", b"br"), *given]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(),
             "client": (host, 1), "headers": headers}  # fmt: skip
    asyncio.run(guard.Guard(inner)(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent)


def test_every_answer_carries_the_policy_and_a_page_its_length():
    for kind in (b"text/html; charset=utf-8", b"text/css"):
        status, headers, body = ask("/", kind=kind)
        assert status == 200
        assert int(headers["content-length"]) == len(body)
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe-eval" not in policy
        assert re.search(r"script-src 'self' 'nonce-[\w-]{20,}';", policy)
        assert (b"explore.js" in body) == (kind != b"text/css")
    assert ask("/")[1]["content-security-policy"] != ask("/")[1]["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    [
        *("/gradio_api/upload", "/gradio_api/file=/etc/passwd", "/gradio_api/proxy=http://a.org/"),
        *("/gradio_api/stream/x", "/docs", "/login", "/monitoring", "//assets/a", "/assets/../a"),
    ],
)
def test_what_the_page_does_not_ask_for_is_not_passed_on(path):
    assert ask(path)[0] == 404


def test_parts_of_the_page_are_kept_by_a_near_browser_and_nothing_beside_them_is_given():
    name = next(guard.ASSETS.glob("PlotlyPlot-*.js")).name
    status, headers, body = ask(f"/assets/{name}")
    assert (status, headers["content-type"]) == (200, "text/javascript")
    assert "immutable" in headers["cache-control"]
    assert body == (guard.ASSETS / name).read_bytes()
    for beside in ("..", "../index.html", "/etc/passwd", "no-such.js"):
        assert guard._asset(f"assets/{beside}") is None


def test_a_far_browser_is_sent_packed_files_but_a_page_that_can_be_rewritten():
    assert b"explore.js" in ask("/", host="10.0.0.1")[2]
    assert ask("/assets/a.js", host="10.0.0.1", kind=b"text/javascript")[0] == 200


def test_the_numbers_are_downloaded_for_each_side():
    query = to_query(State(a=LLAMA_2, b=Side(model="phi-2"), view="wavelengths", context=4096))
    for asked, wanted in (("", LLAMA_2), ("&side=b", Side(model="phi-2"))):
        status, headers, body = ask("/download/numbers.csv", query + asked)
        assert (status, headers["content-type"]) == (200, "text/csv; charset=utf-8")
        assert headers["content-disposition"] == 'attachment; filename="numbers.csv"'
        assert body.decode() == numbers.csv(numbers.wavelengths(look(wanted, 4096)))


@pytest.mark.parametrize("method", ["none", "linear", "yarn", "llama3", "longrope"])
def test_the_config_is_downloaded_for_transformers_and_gives_the_spec_back(method):
    state = State(a=Side(model="llama-2-7b", method=method), context=16384)
    status, _, body = ask("/download/config.json", to_query(state))
    assert status == 200
    assert rotary.from_hf_config(json.loads(body)) == look(state.a, 16384).spec
    assert json.loads(body)["max_position_embeddings"] == 16384


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
    "a frame without an origin": [(b"origin", b"null")],
    "both": [(b"origin", b"https://evil.example"), (b"sec-fetch-site", b"cross-site")],
    "a value not known": [(b"sec-fetch-site", b"")],
}


@pytest.fixture
def work(monkeypatch):
    """What was computed or passed on since the test began."""
    done = []
    for name, (kind, _) in guard.DOWNLOADS.items():
        monkeypatch.setitem(guard.DOWNLOADS, name, (kind, lambda query: done.append(query) or "x"))
    monkeypatch.setattr(sys.modules[__name__], "passed", done)
    return done


@pytest.mark.parametrize("who", STRANGERS)
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/download/numbers.csv"), ("GET", "/explore.js"), ("GET", "/theme.css"),
     ("GET", "/gradio_api/queue/data"), ("POST", "/gradio_api/queue/join"),
     ("OPTIONS", "/gradio_api/queue/join")],
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
    assert ask("/gradio_api/queue/data", given=given)[0] == 200
    assert ask("/gradio_api/queue/join", method="POST", given=given, sends=[b"{}", b""])[0] == 200
    assert ask("/download/numbers.csv", given=given)[::2] == (200, b"x")
    assert len(work) == 3


@pytest.mark.parametrize(
    ("name", "served", "status"),
    [("evil.example", "127.0.0.1", 400), ("evil.example:7860", "::1", 400), ("", "localhost", 400),
     ("127.0.0.1.evil.example", "127.0.0.1", 400), ("[::1]:7860", "127.0.0.1", 200),
     ("[::1]", "::1", 200), ("LOCALHOST", "127.0.0.1", 200), ("rope.example", "0.0.0.0", 200)],
)  # fmt: skip
def test_a_page_of_this_machine_is_asked_by_its_own_names_alone(name, served, status):
    scope = {"method": "GET", "path": "/", "headers": [(b"host", name.encode())]}
    found = guard.refused(scope, served)
    assert (found.status if found else 200) == status


def test_a_websocket_is_closed_and_not_passed_on(work):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard.Guard(None)({"type": "websocket"}, None, send))
    assert sent == [{"type": "websocket.close"}]


def test_no_answer_may_be_framed_or_read_by_another_page():
    for path in ("/", "/theme.css", "/download/numbers.csv", "/none"):
        headers = ask(path)[1]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE"])
def test_methods_that_the_page_does_not_use_are_refused(method, work):
    assert ask("/", method=method)[0] == 405
    assert work == []


def test_a_long_address_and_long_headers_are_refused(work):
    long = "x" * guard.MAX_HEAD
    for request in ({"query": f"a.config={long}"}, {"given": [(b"cookie", long.encode())]},
                    {"given": [(b"x", b"y" * 100)] * 700}):  # fmt: skip
        status, _, body = ask("/download/numbers.csv", **request)
        assert (status, body) == (431, b"address and headers must be at most 65,536 bytes\n")
    assert work == []


def test_two_long_configs_fit_into_a_link():
    text = json.dumps({"head_dim": 64, "rope_theta": 1e4, "_name_or_path": '"' * 3950})
    side = Side(model=PASTED, config=text)
    assert 7900 < len(side.link_config()) <= 8000
    assert len(to_query(State(a=side, b=side, compared=True))) < guard.MAX_HEAD - 8192


def test_a_body_is_passed_on_whole_up_to_its_limit_and_no_further(work):
    part = b"x" * 2**20
    for count, status in ((5, 200), (6, 413)):
        assert (
            ask("/gradio_api/queue/join", method="POST", sends=[part] * count + [b""])[0] == status
        )
    assert len(work) == 1


def test_a_body_that_does_not_arrive_is_given_up(work, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.05)
    status, _, body = ask("/gradio_api/queue/join", method="POST", sends=[b"{"])
    assert (status, body) == (408, b"a request must arrive within 0.05 seconds\n")
    assert work == []


def test_a_slow_download_stops_no_other_request(monkeypatch):
    release, seen = threading.Event(), []
    monkeypatch.setitem(
        guard.DOWNLOADS, "download/config.json", ("text/plain", lambda _: str(release.wait(20)))
    )
    head = {"type": "http", "method": "GET", "query_string": b"", "client": ("127.0.0.1", 1),
            "headers": [(b"host", b"localhost")]}  # fmt: skip

    async def main():
        app = guard.Guard(None)

        def asked(path):
            async def send(message):
                if "status" in message:
                    seen.append((path, message["status"]))

            return asyncio.create_task(app({**head, "path": path}, None, send))

        slow = [asked("/download/config.json") for _ in range(guard.WAITING + 3)]
        await asyncio.wait_for(asked("/explore.js"), 5)
        assert seen[-1] == ("/explore.js", 200)
        assert seen[:-1] == [("/download/config.json", 503)] * 3
        release.set()
        await asyncio.wait_for(asyncio.gather(*slow), 10)
        await asked("/download/config.json")

    asyncio.run(main())
    assert seen[4:] == [("/download/config.json", 200)] * (guard.WAITING + 1)


def test_moves_of_controls_wait_in_a_queue_of_bounded_length():
    code = (
        "from rotary.explorer import build; page = build(); print(page._queue.max_size);"
        "print(*sorted({each.concurrency_limit for each in page.fns.values()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "64\n1 4\n", done.stderr  # 1: the search for the smallest base


def test_a_download_writes_no_file():
    written, is_watching = [], True

    def watch(event, given):
        if is_watching and event == "open" and set(str(given[1])) & set("wax+"):
            written.append(given[0])

    sys.addaudithook(watch)
    for name in guard.DOWNLOADS:
        assert ask(f"/{name}")[0] == 200
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
    values = {**controls.shown(State()), "a.model": PASTED, "a.config": text}
    assert set(page.update("a.config", values)) >= {"error"}
    assert page.update("context", {**controls.shown(State()), "context": length})


def test_a_number_of_four_hundred_digits_is_no_number():
    values = {**controls.shown(State()), "a.base": 10**400}
    assert page.update("a.base", values)["error"].startswith("Not drawn: base must be a number")


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


def test_nothing_is_counted_whatever_the_environment_says():
    code = (
        "import rotary.explorer, gradio.analytics as a, huggingface_hub.constants as c;"
        "assert not a.analytics_enabled() and c.HF_HUB_DISABLE_TELEMETRY;"
        "assert rotary.explorer.build().analytics_enabled is False"
    )
    environment = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "True", "GRADIO_SHARE": "True"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_port_that_is_taken_is_an_error_that_names_it():
    import socket

    from rotary.explorer import serve

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}: .*; choose another port"):
            serve(port=port)


def test_the_smallest_base_is_the_certified_one():
    assert "4,293.4376" in numbers.smallest_base(look(LLAMA_2, 1024))
    assert models.published("llama-2-7b").spec.base > 4293.4376
