"""The page in a real browser: Debian's Chromium, driven as a person would."""

import csv
import http.client
import io
import json
import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

import rotary
from rotary.explorer.models import published
from rotary.explorer.views import VIEWS
from rotary.layouts import pair_indices

pytestmark = pytest.mark.slow
MARKUP = "<img src=x onerror=alert(1)>"


def words(page, side="a"):
    return page.locator(f"#words-{side}")


def error(page, name):
    return page.locator(f'.error[data-of="{name}"]')


def state(page):
    return {name: value[0] for name, value in parse_qs(urlsplit(page.url).query).items()}


def download(page, name, path):
    with page.expect_download() as got:
        page.locator("#links-a").get_by_text(name).click()
    got.value.save_as(path / got.value.suggested_filename)
    return (path / got.value.suggested_filename).read_text()


def pixels(shown):
    return np.array(Image.open(io.BytesIO(shown.screenshot())).convert("RGB"))


def test_the_page_shows_that_it_waits_for_an_answer_that_takes_long(show):
    page, held = show("?view=wavelengths&context=4096"), []
    page.route("**/draw", lambda route: held.append(route))
    page.locator("#context").fill("8192")
    expect(page.locator("main")).to_have_attribute("aria-busy", "true")
    expect(page.locator("#pictures")).to_have_css("opacity", "0.4")
    held[0].continue_()
    page.unroute("**/draw")
    expect(page.locator("main")).to_have_attribute("aria-busy", "false")
    expect(page.locator("#pictures")).to_have_css("opacity", "1")


def test_words_of_the_view_before_are_faint_where_the_new_one_has_no_picture(show):
    config = json.dumps({"model_type": "pixtral"})
    page = show(f"?view=reach&a.model=a config.json, pasted below&a.config={config}"
                "&a.trained=4096&context=4096")  # fmt: skip
    said = words(page).text_content()
    page.get_by_role("radio", name="Plan").check()
    expect(error(page, "view")).to_contain_text("text models")
    for part in ("#picture-a", "#notes-a"):
        assert float(page.locator(part).evaluate("e => getComputedStyle(e).opacity")) < 0.5
    page.get_by_role("radio", name="Reach").check()
    expect(page.locator("#notes-a")).to_have_css("opacity", "1")
    expect(words(page)).to_have_text(said)


def test_a_model_is_chosen_and_its_numbers_are_shown(show):
    page = show("?view=wavelengths")
    expect(words(page)).to_contain_text("29 pairs never turn once in the 8,192 tokens")
    page.get_by_label("A: model").select_option("llama-2-7b")
    expect(words(page)).to_contain_text("18 pairs never turn once in the 4,096 tokens of training")
    expect(words(page)).to_contain_text("the critical dimension is 92")
    expect(page.locator("#a-base")).to_have_value("10000")
    expect(page.locator("#context")).to_have_value("4096")
    assert state(page) == {"view": "wavelengths", "a.model": "llama-2-7b", "context": "4096"}


def test_a_slider_is_moved_by_the_keyboard_and_the_number_follows(show):
    page = show("?a.model=llama-2-7b&view=similarity&context=4096")
    expect(words(page)).to_contain_text("At distance 1,707")
    slider = page.get_by_role("slider", name="A: base: as a power of ten")
    expect(slider).to_have_value("4")
    slider.press("ArrowRight")
    expect(page.locator("#a-base")).to_have_value("10230")
    angles = np.arange(1, 4097)[:, None] * 10230.0 ** (-np.arange(64) / 64)
    first = int(np.flatnonzero(np.cos(angles).sum(axis=1) < 0)[0]) + 1
    expect(words(page)).to_contain_text(f"At distance {first:,}")
    expect(page).to_have_url(re.compile("a.base=10230"))
    expect(page.get_by_role("heading", name="A: llama-2-7b, base 10230")).to_be_visible()
    for name, box, value in (("Context, tokens: as a power of two", "#context", "8192"),
                             ("A: trained length, tokens: as a power of two", "#a-trained", "2048"),
                             ("A: head_dim, channels: slider", "#a-head_dim", "64")):  # fmt: skip
        page.get_by_role("slider", name=name).fill(
            value if "head" in name else str(len(f"{int(value):b}") - 1)
        )
        expect(page.locator(box)).to_have_value(value)
    expect(page.locator("#factor")).to_have_value("4")
    page.locator("#factor + input").fill("16")
    expect(page.locator("#context")).to_have_value(str(16 * 2048))
    expect(page).to_have_url(re.compile("a.head_dim=64&a.trained=2048"))


def test_many_quick_moves_end_at_the_last_one(show):
    page = show("?view=similarity")
    slider = page.get_by_role("slider", name="A: base: as a power of ten")
    for power in np.arange(4, 6, 0.1):
        slider.fill(f"{power:.1f}")
    page.get_by_role("radio", name="Decay").click()
    page.get_by_label("A: method").select_option("linear")
    expect(page).to_have_url(re.compile("view=decay&a.method=linear&a.base=794300"))
    expect(page.locator("#a-base")).to_have_value("794300")


# one of one axis, one of three, one with pairs that stand still
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-vl-8b", "gemma-4-31b, full_attention"])
def test_every_picture_is_drawn_and_reached_by_the_keyboard(show, model):
    page = show(f"?view=wavelengths&a.model={model}&context=131072")
    expect(page.get_by_role("heading", name=f"A: {model}")).to_be_visible()
    titles = [view.title for view in VIEWS.values()]
    said, radios = set(), page.locator("input[name=view]")
    radios.nth(list(VIEWS).index("wavelengths")).focus()
    for title in titles[4:] + titles[:4]:
        before = words(page).inner_text()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("radio", name=title, exact=True)).to_be_focused()
        expect(words(page)).not_to_have_text(before)
        shown = page.locator("#plot-a :is(path.curve, rect.cell, rect.bar, circle.dial)")
        assert shown.first.evaluate("e => e.getBoundingClientRect().width") > 1
        assert "NaN" not in page.locator("#plot-a").inner_html()
        said.add(words(page).inner_text())
    assert len(said) == len(titles)


def test_the_picture_says_what_it_shows(show):
    page = show("?view=similarity&context=131072&a.model=llama-3.1-8b")
    expect(words(page)).to_contain_text("85,133")
    picture = page.locator("#plot-a")
    expect(picture).to_have_attribute("role", "img")
    expect(picture).to_have_attribute("aria-label", re.compile("At distance 85,133 a similar key"))
    for box in page.locator("input:not([aria-label]), select, textarea").all():
        assert box.evaluate("box => box.labels.length") > 0, box.evaluate("box => box.outerHTML")


def test_the_number_under_the_pointer_is_told_and_so_it_is_by_the_keyboard(show):
    page = show("?view=wavelengths&a.model=llama-2-7b&context=4096")
    page.locator("#plot-a circle.dot").nth(32).hover(force=True)
    expect(page.locator("#plot-a .tip")).to_contain_text("pair 32one turn: 628.319")
    read = page.locator("#picture-a [role=status]")
    expect(read).to_have_text("")
    page.locator("#plot-a").press("ArrowRight")
    expect(page.locator("#plot-a .tip")).to_contain_text("pair 33")
    expect(read).to_have_text(re.compile(r"^pair 33, one turn: [\d.]+$"))  # for screen readers


def test_a_part_of_a_picture_is_looked_at_closer(show):
    page = show("?view=wavelengths")
    box = page.locator("#plot-a").bounding_box()
    ticks = page.locator("#plot-a .tick[text-anchor=middle]")
    before = ticks.all_text_contents()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 100)
    page.mouse.up()
    expect(ticks).not_to_have_text(before)
    assert {*ticks.all_text_contents()} <= {str(pair) for pair in range(10, 40)}
    page.locator("#plot-a").dblclick()
    expect(ticks).to_have_text(before)


def test_a_broken_config_shows_its_error_in_one_line_and_a_good_one_mends_it(show):
    page = show("?view=wavelengths")
    page.get_by_label("A: model").select_option("a config.json, pasted below")
    line = error(page, "a.config")
    expect(line).to_have_text("paste a config.json, or choose a published model")
    box = page.get_by_label("A: config.json")
    box.fill('{"model_type": "llama", ')
    expect(line).to_contain_text("the config is not JSON")
    expect(box).to_have_attribute("aria-invalid", "true")
    box.fill('{"model_type": "llama", "rope_thata": 1e6}')
    expect(line).to_contain_text("'rope_thata' is not known; did you mean 'rope_theta'?")
    box.fill('{"model_type": "llama", "head_dim": 64, "rope_theta": 20000}')
    expect(words(page)).to_contain_text("32 pairs in 64 channels")
    expect(line).to_have_text("")
    expect(page.locator("#a-base")).to_have_value("20000")
    again = show("?" + urlsplit(page.url).query)
    expect(words(again)).to_contain_text("32 pairs in 64 channels")
    expect(again.get_by_label("A: config.json")).to_have_value(box.input_value())


@pytest.mark.parametrize("text", ["1,5", "", "1e400"])
def test_a_factor_that_is_no_number_leaves_the_context_alone(show, text):
    page = show("?view=wavelengths&context=4096")
    box = page.locator("#factor")
    box.fill(text)
    expect(error(page, "factor")).to_have_text(f"factor must be a number, got '{text}'")
    expect(box).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#context")).to_have_value("4096")
    box.fill("1.5")
    expect(error(page, "factor")).to_have_text("")
    expect(box).to_have_attribute("aria-invalid", "false")
    expect(page.locator("#context")).to_have_value("12288")


def test_a_config_without_a_length_asks_for_it(show):
    page = show("?view=reach&context=8192")
    page.get_by_label("A: model").select_option("a config.json, pasted below")
    page.get_by_label("A: config.json").fill('{"head_dim": 128}')
    expect(error(page, "a.trained")).to_contain_text("no max_position_embeddings")
    trained = page.get_by_label("A: trained length", exact=False).first
    expect(trained).to_have_value("")
    expect(page.locator("#factor")).to_have_value("")
    page.locator("#factor").fill("2")
    expect(error(page, "a.trained")).to_contain_text("fill in the trained length of A first")
    expect(page.locator("#context")).to_have_value("8192")
    trained.fill("2048")
    expect(error(page, "a.trained")).to_have_text("")
    expect(words(page)).to_contain_text("in the 2,048 tokens of training")
    expect(page.locator("#factor")).to_have_value("4")


def test_a_layer_type_of_a_pasted_config_is_chosen(show):
    page = show()
    page.get_by_label("A: model").select_option("a config.json, pasted below")
    text = (Path(__file__).parent / "configs" / "gemma-3-4b.json").read_text()
    page.get_by_label("A: config.json").fill(text)
    expect(page.locator("#a-base")).to_have_value("1000000")
    page.get_by_label("A: layer type").select_option("sliding_attention")
    expect(page.locator("#a-base")).to_have_value("10000")


WRONG = (
    ("a.base", "-5", "base must be in 1 .."), ("context", "100000000", "context must be in 1 .."),
    ("a.head_dim", "127", "head_dim must be even"), ("a.trained", "many", "must be a number"),
)  # fmt: skip


def test_a_wrong_number_is_one_line_at_its_control_and_changes_nothing(show):
    page = show("?view=wavelengths")
    for box, value, message in WRONG:
        before = words(page).inner_text(), page.url
        page.locator(f'[name="{box}"]').fill(value)
        expect(error(page, box)).to_contain_text(message)
        expect(page.locator(f'[name="{box}"]')).to_have_value(value)
        assert (words(page).inner_text(), page.url) == before
        page.locator(f'[name="{box}"]').fill("4096" if box != "a.head_dim" else "64")
        expect(error(page, box)).to_have_text("")
        expect(page).not_to_have_url(before[1])


def test_markup_in_a_name_is_shown_as_text(show):
    page = show()
    page.get_by_label("A: model").select_option("a config.json, pasted below")
    config = {"_name_or_path": MARKUP, "model_type": "llama", "head_dim": 64}
    page.get_by_label("A: config.json").fill(json.dumps(config))
    expect(page.get_by_role("heading", name=f"A: {MARKUP}")).to_be_visible()
    page.get_by_label("A: config.json").fill(json.dumps({"model_type": MARKUP}))
    expect(error(page, "a.config")).to_contain_text(MARKUP)
    linked = show(f"?view={MARKUP}")
    expect(error(linked, "view")).to_contain_text(MARKUP)
    assert page.locator("img").count() == linked.locator("img").count() == 0


def test_a_script_that_gets_into_the_page_is_not_run(show):
    page = show()
    page.evaluate("""() => new Promise(done => {
        window.ran = [];
        const box = document.createElement("div");
        box.innerHTML = '<b onclick="window.ran.push(1)">x</b>';
        document.body.append(box);
        box.firstChild.click();
        const script = document.createElement("script");
        script.textContent = "window.ran.push(3)";
        document.body.append(script);
        setTimeout(() => {  // what a driver evaluates is free of the policy, what it starts is not
            try { new Function("window.ran.push(2)")(); } catch {}
            done();
        });
    })""")
    assert page.evaluate("window.ran") == []
    assert show.said
    assert all("Content Security Policy" in line for line in show.said)
    show.said.clear()


def test_the_numbers_the_config_and_the_figure_are_downloaded(show, tmp_path, browser):
    page = show("?a.model=llama-2-7b&a.method=yarn&context=32768&view=band")
    expect(words(page)).to_contain_text("slowest 0.125")
    rows = list(csv.DictReader(download(page, "Numbers (CSV)", tmp_path).splitlines()))
    assert len(rows) == 64
    assert [float(rows[pair]["speed_ratio"]) for pair in (0, 63)] == [1.0, 0.125]
    spec = rotary.from_hf_config(
        json.loads(download(page, "Config for transformers (JSON)", tmp_path))
    )
    assert (spec.schedule, spec.params["factor"]) == ("yarn", 8.0)
    assert download(page, "Picture (SVG)", tmp_path).startswith("<svg")
    download(page, "Figure (HTML)", tmp_path)
    alone, asked = browser.new_page(), []
    alone.on("request", lambda request: asked.append(request.url))
    for name in ("figure.html", "rotary.svg"):
        alone.goto((tmp_path / name).as_uri())
        expect(alone.locator("path.curve")).to_have_count(1)
        expect(alone.get_by_text("YaRN blends here")).to_be_visible()
    alone.close()
    assert asked == [(tmp_path / name).as_uri() for name in ("figure.html", "rotary.svg")]


@pytest.mark.parametrize("view", ["hands", "coverage", "reach"])  # hands, labels, bold text
def test_a_downloaded_picture_looks_like_that_of_the_page(show, tmp_path, browser, view):
    page = show(f"?view={view}&context=131072")
    expect(words(page)).not_to_be_empty()
    shown = page.locator("#plot-a")
    on_page, box = pixels(shown), shown.bounding_box()
    download(page, "Picture (SVG)", tmp_path)
    size = {side: round(box[side]) for side in ("width", "height")}
    alone = browser.new_page(viewport=size, color_scheme="light")
    alone.goto((tmp_path / "rotary.svg").as_uri())
    in_file = pixels(alone)
    alone.close()
    dark = [int((each.max(axis=2) < 90).sum()) for each in (on_page, in_file)]  # ink of letters
    assert dark[0] > 200
    assert dark[1] == pytest.approx(dark[0], rel=0.2)


def test_a_link_restores_the_page(show):
    query = (
        "?view=coverage&context=65536&compared=1&a.model=llama-2-7b&a.method=linear&b.model=phi-2"
    )
    page = show(query)
    expect(page.get_by_role("heading", name="A: llama-2-7b, linear")).to_be_visible()
    expect(page.get_by_role("heading", name="B: phi-2, yarn")).to_be_visible()
    expect(page.get_by_role("radio", name="Coverage")).to_be_checked()
    expect(page.get_by_role("checkbox", name="Compare with B")).to_be_checked()
    expect(page.locator("#context")).to_have_value("65536")
    expect(page.locator("#b-model")).to_have_value("phi-2")
    expect(page.locator("#factor + input")).to_have_value("16")
    expect(words(page)).to_contain_text("of 64 pairs saw less")
    expect(words(page, "b")).to_contain_text("of 16 pairs saw less")
    assert state(page) == {name: value[0] for name, value in parse_qs(query[1:]).items()}


def test_two_sides_are_compared_and_parted_again(show):
    page = show()
    page.get_by_role("checkbox", name="Compare with B").click()
    expect(page.get_by_role("heading", name="B: llama-3-8b, yarn")).to_be_visible()
    boxes = [page.locator(f"#plot-{side}").bounding_box() for side in "ab"]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    for side in "ab":  # drawn anew for the room that is left
        ends = page.locator(f"#plot-{side} path.curve").evaluate("e => e.getBoundingClientRect()")
        assert ends["right"] <= boxes["ab".index(side)]["x"] + boxes["ab".index(side)]["width"]
    page.get_by_role("checkbox", name="Compare with B").click()
    expect(page.locator("#plot-b")).to_be_hidden()


def test_the_smallest_base_is_found_on_demand(show):
    page = show("?context=1024")
    button = page.get_by_role("button", name="Smallest base for this context")
    button.click()
    expect(page.locator("#certified")).to_contain_text("With base 4,293.4376", timeout=120_000)
    page.locator("#context").fill("1048576")
    expect(page.locator("#certified")).to_have_text("")
    button.click()
    expect(page.locator("#certified")).to_contain_text("run rotary plan --context 1048576")


def test_two_pictures_on_a_narrow_screen_need_no_scrolling_sideways(show):
    """Of one picture: test_explorer_gallery, of every view."""
    page = show("?compared=1&view=precision", width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => e.checkVisibility() "
        "&& e.getBoundingClientRect().right > 391).map(e => e.outerHTML)"
    )
    assert wide == []


# of each control, once it has the focus: where it and the picture are
PLACES = """() => [...document.querySelectorAll("#controls :is(select, input:not([type]), button)")]
    .filter(each => each.checkVisibility()).map(each => {
        each.focus();
        const picture = document.querySelector("#plot-a").getBoundingClientRect();
        return [each.outerHTML, each.getBoundingClientRect().toJSON(), picture.toJSON()];
    })"""


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("query", ["", "?compared=1"])
def test_the_picture_stays_in_sight_of_every_control(show, width, query):
    page = show(query, width=width)
    height = page.viewport_size["height"]
    places = page.evaluate(PLACES)
    assert len(places) >= 8
    for control, own, picture in places:
        assert 0 <= own["top"] <= own["bottom"] <= height + 1, control
        assert 0 <= picture["top"] <= picture["bottom"] <= height, control
        assert picture["height"] > 150
        if width < 500:
            assert own["top"] >= picture["bottom"], control


def hands(page, name, side="a"):
    """(angle of each hand of k or q, in turns), as drawn."""
    path = page.locator(f"#plot-{side} path.hand.{name}").get_attribute("d")
    ends = np.array(re.findall(r"-?[\d.]+(?:e-?\d+)?", path), float).reshape(-1, 4)
    x, y = ends[:, 2] - ends[:, 0], ends[:, 1] - ends[:, 3]
    return np.arctan2(y, x) / (2 * np.pi)


@pytest.mark.parametrize("model", ["phi-2", "nanochat-d32"])  # partly rotated; clockwise
def test_hands_turn_by_the_positions_and_the_score_by_the_distance_alone(show, model):
    page = show(f"?view=hands&context=4096&a.model={model}")
    distance, position = (
        page.get_by_role("slider", name=name) for name in ("Distance, tokens", "Position of k")
    )
    distance.fill("0.5")
    marked = page.locator("#plot-a text.label.red").last
    expect(marked).to_contain_text("q · k = ")
    score = marked.text_content()
    spec = published(model).spec
    speeds = spec.base ** (-np.arange(0, spec.rotary_dim, 2) / spec.rotary_dim)
    for share, at in ((0.0, 0), (0.5, round(4097**0.5) - 1), (1.0, 4096)):
        position.fill(str(share))
        expect(position).to_have_attribute("aria-valuetext", f"{at} tokens")
        for name, where in (("orange", at), ("blue", at + 64)):
            turns = where * spec.sign * speeds / (2 * np.pi)
            away = (hands(page, name) - turns + 0.5) % 1 - 0.5
            assert np.abs(away).max() < 1e-6
        assert marked.text_content() == score
    q = np.zeros((1, 1, 1, spec.head_dim))
    q[..., [pair[0] for pair in pair_indices(spec.rotary_dim, spec.layout, spec.start)]] = 1
    still = (spec.head_dim - spec.rotary_dim) // 2
    one, other = (rotary.apply(spec, q, q, positions=[[at]])[0] for at in (0, 64))
    assert float(score.split()[-1]) == pytest.approx((one * other).sum() + still, abs=0.006)


@pytest.mark.parametrize(
    ("width", "query"), [(390, ""), (390, "&compared=1"), (1400, "&compared=1")]
)
def test_hands_and_their_sliders_are_seen_together_and_move_without_the_server(show, width, query):
    page = show(f"?view=hands{query}", width=width)
    height = page.viewport_size["height"]
    for part in page.locator(".motion input, .motion button, #pictures svg:visible").all():
        box = part.bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= height
        assert box["x"] + box["width"] <= width
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    before = hands(page, "blue")
    page.get_by_role("button", name="Play").click()
    seconds = page.evaluate(
        """() => new Promise(done => {
            const times = [], step = now => {
                times.push(now);
                times.length < 31 ? requestAnimationFrame(step) : done((now - times[0]) / 1000);
            };
            requestAnimationFrame(step);
        })"""
    )
    page.get_by_role("button", name="Stop").click()
    assert asked == []
    assert (hands(page, "blue") != before).any()
    assert seconds < 2  # 0.5 where nothing else runs
    work = page.evaluate(
        """() => {
            const start = performance.now();
            for (let i = 1; i <= 100; i++) motion.set("distance", i);
            return (performance.now() - start) / 100;
        }"""
    )
    assert work < 8  # ms; half of a frame of 60 in a second
    if query:
        page.get_by_role("checkbox", name="Compare with B").click()
        expect(page.locator("#plot-b")).to_be_hidden()
    page.locator("[name=view]:visible").first.evaluate("""(control) => {
        const box = control.type === "radio" ? document.querySelector("[value=decay]") : control;
        if (box === control) box.value = "decay"; else box.checked = true;
        box.dispatchEvent(new Event("input", { bubbles: true }));
    }""")
    expect(page.get_by_role("img", name="The mean size of the partial sums")).to_be_visible()
    expect(page.locator(".motion")).to_be_hidden()


def test_a_downloaded_figure_of_hands_moves_by_itself(show, tmp_path, browser):
    page = show("?a.model=phi-2&view=hands")
    download(page, "Figure (HTML)", tmp_path)
    alone, said = browser.new_page(), []
    alone.on("pageerror", lambda error: said.append(str(error)))
    alone.goto((tmp_path / "figure.html").as_uri())
    before = hands(alone, "blue")
    alone.get_by_role("slider", name="Distance, tokens").fill("0.5")
    assert (hands(alone, "blue") != before).any()
    alone.close()
    assert said == []


@pytest.mark.parametrize("query", ["", "?compared=1"])
def test_no_control_of_a_phone_is_under_the_picture_when_the_keyboard_reaches_it(show, query):
    page = show(query, width=390)
    page.locator("#links-a a").last.focus()
    for _ in range(page.locator("#controls :is(select, input, button):visible").count()):
        page.keyboard.press("Shift+Tab")
        hidden = page.evaluate(
            """() => {
            const own = document.activeElement, box = own.getBoundingClientRect();
            const picture = document.querySelector("#pictures").getBoundingClientRect();
            const isOver = own.closest("#controls") && box.top < picture.bottom;
            return isOver ? own.outerHTML : "";
        }"""
        )
        assert hidden == ""


def test_labels_of_lines_that_are_close_do_not_cover_each_other(show):
    page = show("?view=wavelengths&a.trained=8192&context=9000", width=390)
    boxes = page.locator("#plot-a text.label").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().toJSON())"
    )
    assert len(boxes) == 2
    upper, lower = sorted(boxes, key=lambda box: box["top"])
    assert upper["top"] + 12 <= lower["top"]
    assert upper["top"] >= page.locator("#plot-a").bounding_box()["y"]


def test_compared_pictures_have_one_scale(show):
    page = show("?view=wavelengths&compared=1")
    ticks = [page.locator(f"#plot-{side} .tick") for side in "ab"]
    expect(ticks[1]).to_have_text(ticks[0].all_text_contents())
    expect(page.locator("#plot-a")).to_contain_text("10⁷")  # of B alone
    heights = [one.evaluate_all("all => all.map(each => each.getAttribute('y'))") for one in ticks]
    assert heights[0] == heights[1]


@pytest.mark.parametrize("view", ["reach", "band"])
def test_compared_pictures_have_one_scale_where_their_ends_are_given(show, view):
    page = show(f"?view={view}&compared=1&a.model=llama-2-7b&a.method=none&context=262144"
                "&b.model=llama-3-8b&b.method=longrope")  # fmt: skip
    page.wait_for_selector("#links-b a")
    ticks = [
        page.locator(f"#plot-{side} .tick").evaluate_all(
            "all => all.map(each => ['x', 'y'].map(name => each.getAttribute(name))"
            ".concat(each.textContent))"
        )
        for side in "ab"
    ]
    assert ticks[0] == ticks[1] != []


def luminance(colour):
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_page_and_its_figures_follow_the_colour_scheme(show):
    page = show(scheme="dark")
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        ink = page.locator("#plot-a text.tick").first.evaluate("e => getComputedStyle(e).fill")
        assert (luminance(ground) < 60) == (scheme == "dark")
        assert (luminance(ink) > 180) == (scheme == "dark")


def test_another_name_for_this_machine_is_not_answered(page_server):
    found = urlsplit(page_server)
    for host, status in ((found.netloc, 200), ("evil.example", 400)):
        connection = http.client.HTTPConnection(found.hostname, found.port, timeout=30)
        connection.request("GET", "/", headers={"Host": host})
        assert connection.getresponse().status == status
        connection.close()


def test_no_file_is_given_out_by_its_path(page_server):
    found = urlsplit(page_server)
    for path in ("/file=/etc/passwd", "/../../../../../../etc/passwd", "/page.py", "/page.html",
                 "/%2e%2e/%2e%2e/etc/passwd", "/download/%2e%2e/page.py"):  # fmt: skip
        connection = http.client.HTTPConnection(found.hostname, found.port, timeout=30)
        connection.request("GET", path)
        assert connection.getresponse().status == 404, path
        connection.close()


@pytest.mark.parametrize("query", ["a.head_dim=2&context=1000", "a.base=1&context=4096"])
def test_a_curve_that_is_flat_up_to_rounding_is_drawn_at_once(show, query):
    page = show(f"?view=decay&{query}")
    expect(page.locator("#plot-a path.curve")).to_have_count(1)
    assert 1 <= page.locator("#plot-a text.tick").count() < 40
    page.locator("#plot-a").press("ArrowRight")  # distance 0, which a log axis does not have
    expect(page.locator("#plot-a .tip text").first).to_have_text("distance 0")


@pytest.mark.parametrize(
    ("query", "dots"), [("view=decay&a.trained=1&context=1", 1), ("view=coverage&a.head_dim=2", 2)]
)
def test_a_curve_of_one_point_is_a_dot_over_an_axis_of_whole_numbers(show, query, dots):
    page = show(f"?a.model=llama-2-7b&{query}")
    shown = page.locator("#plot-a circle.dot")
    expect(shown).to_have_count(dots)
    assert shown.first.bounding_box()["width"] >= 8
    ticks = page.locator("#plot-a .tick[text-anchor=middle]").all_text_contents()
    assert ticks
    assert all(tick.isdigit() for tick in ticks), ticks
    page.goto(page.url.partition("?")[0] + "?view=decay&a.model=llama-2-7b")
    expect(page.locator("#plot-a path.curve.thin")).to_have_count(1)
    expect(shown).to_have_count(0)  # a line needs none


def test_a_wrong_number_stops_no_other_control_and_goes_back_with_its_error(show):
    page = show("?view=wavelengths&context=4096")
    page.locator("#context").fill("32k")
    expect(error(page, "context")).to_contain_text("must be a number, got '32k'")
    page.get_by_role("radio", name="Decay").check()
    expect(words(page)).to_contain_text("mean size of the partial sums")
    expect(page.locator("#context")).to_have_value("4096")
    expect(error(page, "context")).to_contain_text("must be a number, got '32k'")
    page.get_by_label("A: model").select_option("llama-2-7b")
    expect(error(page, "context")).to_have_text("")
    page.get_by_label("Compare with B").check()
    page.locator("#b-base").fill("-5")
    expect(error(page, "b.base")).to_contain_text("base must be in")
    page.get_by_label("Compare with B").uncheck()
    expect(page.locator("#side-b")).to_be_hidden()


def test_a_zoom_ends_where_the_next_picture_has_other_axes_or_no_point_in_it(show):
    page = show("?view=wavelengths&a.model=llama-2-7b")
    box = page.locator("#plot-a").bounding_box()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + box["height"] / 2)
    page.mouse.up()
    dots = page.locator("#plot-a circle.dot")
    seen = page.evaluate("charts.a.zoom")
    assert seen[0] > 40
    page.locator("#a-head_dim").fill("32")
    expect(dots).to_have_count(16)
    assert page.evaluate("charts.a.zoom") is None


def test_a_rope_that_no_config_holds_says_so_in_the_place_of_the_file(show):
    page = show("?view=wavelengths&a.method=ntk&context=65536")
    expect(page.locator("#links-a")).to_contain_text("No config: ")
    expect(page.locator("#links-a").get_by_text("Config for transformers")).to_have_count(0)
    page.get_by_label("A: method").select_option("yarn")
    expect(page.locator("#links-a").get_by_text("Config for transformers")).to_have_count(1)


def test_names_of_bars_and_methods_fit_on_a_phone(show):
    page = show("?view=reach&a.model=gemma-3-4b, sliding_attention&context=131072", width=390)
    expect(page.locator("#plot-a rect.bar")).to_have_count(6)
    wide = page.evaluate("""() => [...document.querySelectorAll("#plot-a text")].map(each =>
        each.getBBox().x + each.getBBox().width - document.querySelector("#plot-a").clientWidth)""")
    assert max(wide) <= 0
    page.goto(page.url.partition("?")[0] + "?view=methods&a.model=phi-3.5-mini&context=131072")
    expect(page.locator("#plot-a text.strong").last).to_have_text("model: longrope")
    names, dials = page.evaluate("""() => [
        Math.max(...[...document.querySelectorAll("#plot-a text.strong")].map(each =>
            each.getBBox().x + each.getBBox().width)),
        Math.min(...[...document.querySelectorAll("#plot-a circle.dial")].map(each =>
            each.getBBox().x))]""")
    assert names <= dials


def test_a_server_that_is_gone_is_asked_no_more_than_twice(show):
    page = show("?view=wavelengths&context=4096")
    asked = []
    page.route(
        "**/draw", lambda route: (asked.append(route), route.fulfill(status=503, body="busy"))
    )
    page.locator("#context").fill("8192")
    expect(error(page, "view")).to_contain_text("busy")
    page.wait_for_timeout(300)
    assert 1 <= len(asked) <= 2
    page.unroute("**/draw")
    show.said.clear()  # Chromium tells of each answer with status 503
