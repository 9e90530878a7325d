"""Every view at the width of a phone and of a desk: what is in sight, reached and moves.

Each test leaves a screenshot in build/gallery. `python -m tools.make_gallery` takes those that the
docs show from there.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect
from tools import make_gallery

from rotary.explorer import views
from rotary.explorer.side import Side, look
from rotary.explorer.views import LEARN, VIEWS

pytestmark = pytest.mark.slow
GALLERY = Path(__file__).resolve().parent.parent / "build" / "gallery"
QUERY = "a.model=llama-3-8b&context=32768&b.model=llama-3.1-8b&b.method=as+published"
WIDTHS = {"phone": 390, "desk": 1400}
MOVING = [name for name, view in VIEWS.items() if view.group == LEARN]
# what stands out of its box, or has no sign of where the keyboard is
OUTSIDE = """width => [...document.querySelectorAll("body *")].filter(each => each.checkVisibility()
    && !each.closest(".table, .config") && each.getBoundingClientRect().right > width + 1)
    .map(each => each.outerHTML.slice(0, 200))"""
CUT = """() => [...document.querySelectorAll("#pictures svg:not([hidden])")].flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(text => {
        const own = text.getBoundingClientRect();
        return own.width && (own.left < box.left - 2 || own.right > box.right + 2
            || own.top < box.top - 2 || own.bottom > box.bottom + 2);
    }).map(text => text.textContent);
})"""

CONTROLS = "#controls :is(select, input, button), .motion :is(input, button)"
# of the control that has the focus: its name, whether that is seen, and whether it and the picture
# are in sight together
REACHED = """controls => {
    const own = document.activeElement, box = own.getBoundingClientRect();
    if (!own.matches(controls)) return null;
    const picture = document.querySelector("#plot-a").getBoundingClientRect();
    const style = getComputedStyle(own);
    const isFocusSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
    const isInSight = picture.top >= -1 && picture.bottom <= innerHeight + 1
        && box.top >= -1 && box.bottom <= innerHeight + 1
        && (innerWidth > 760 || box.top >= picture.bottom - 1);
    const name = own.getAttribute("aria-label") ?? own.labels?.[0]?.textContent ?? own.textContent;
    return [name, isFocusSeen, isInSight];
}"""


@pytest.fixture(params=WIDTHS)
def screen(request):
    return request.param


def choose(page, view):
    """Chooses a view by the control that this screen has for it."""
    if page.viewport_size["width"] < 500:
        page.get_by_role("combobox", name="View").select_option(view)
    else:
        page.locator(f"input[name=view][value={view}]").check()
    expect(page.locator("#about")).to_have_text(VIEWS[view].text, timeout=20_000)  # a plan searches


def test_every_view_fits_its_screen_and_every_control_is_in_sight_of_it(show, screen):
    width = WIDTHS[screen]
    page = show(f"?{QUERY}", width=width)
    height = page.viewport_size["height"]
    GALLERY.mkdir(parents=True, exist_ok=True)
    for number, view in enumerate(VIEWS):
        page.evaluate("scrollTo(0, 0)")
        choose(page, view)
        page.screenshot(path=GALLERY / f"{view}-{screen}.png")
        assert page.evaluate(OUTSIDE, width) == [], view
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert page.evaluate(CUT) == [], view
        picture = page.locator("#plot-a").bounding_box()
        assert picture["y"] + picture["height"] <= height, view
        is_of_two = VIEWS[view].is_of_two
        assert page.locator("#side-b").is_visible() == is_of_two
        if not is_of_two and (number + [*WIDTHS].index(screen)) % 2:
            continue  # of each group, every second view is walked through on this screen
        page.locator("#plot-a").focus()
        names, last = set(), page.locator(CONTROLS).locator("visible=true").count()
        for _ in range(last + 12):  # the links and tables stand between
            page.keyboard.press("Tab")
            name, *seen = page.evaluate(REACHED, CONTROLS) or [None]
            assert seen in ([], [True, True]), (view, name, seen)
            names |= {name} - {None}
        assert len(names) == last, (view, names)


# each text of the pictures that a bar or another text covers: letters leave 3 pixels of their boxes
COVERED = """() => [...document.querySelectorAll("#pictures svg")].flatMap(svg => {
    const all = [...svg.querySelectorAll("text, rect.bar")].map(each =>
        [each, each.getBoundingClientRect(), each.tagName === "text" ? 3 : 0]);
    const texts = all.filter(([each]) => each.tagName === "text" && each.textContent);
    return texts.flatMap(([text, own]) => all.filter(([other, box, least]) => other !== text
        && Math.min(own.right, box.right) - Math.max(own.left, box.left) > 2
        && Math.min(own.bottom, box.bottom) - Math.max(own.top, box.top) > least)
    .map(([other]) => `${text.textContent} / ${other.textContent}`));
})"""


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-4-31b, full_attention",
                                   "gemma-3-4b, sliding_attention"])  # fmt: skip
def test_no_text_of_two_compared_models_is_cut_or_covered_on_a_phone(show, model):
    page = show(f"?compared=1&a.model={model}&context=262144", width=WIDTHS["phone"])
    for view in VIEWS:
        choose(page, view)
        assert page.evaluate(CUT) == [], view
        assert page.evaluate(COVERED) == [], view
        if view == "layouts":  # the names of the rows stay left of the curve
            names = page.locator("#plot-a text.strong").evaluate_all(
                "all => all.map(each => each.getBBox().x + each.getBBox().width)"
            )
            assert max(names) < page.evaluate("charts.a.box.left") - 8


def test_the_label_of_a_line_is_on_no_other_line(show, screen):
    page = show("?view=wavelengths&a.model=gemma-4-31b, full_attention&context=524288",
                width=WIDTHS[screen])  # fmt: skip
    for query in ("", "&compared=1", "&a.trained=524288"):
        page.goto(page.url.partition("&compared")[0] + query)
        page.wait_for_selector("#links-a a")
        places = page.evaluate("""() => ["text.label", "line.dash"].map(name =>
            [...document.querySelectorAll(`#plot-a ${name}`)].map(each => each.getBBox())
            .map(({ y, height }) => [y, y + height]))""")
        labels, lines = places
        assert len(labels) == len(lines) == (1 if "trained" in query else 2)
        for top, bottom in labels:
            assert all(not top + 3 < line < bottom - 2 for line, _ in lines), (query, places)


def test_a_scale_of_little_more_than_a_power_of_ten_has_two_numbers_or_more(show):
    page = show("?view=band&compared=1&a.model=llama-3.1-8b&context=131072", width=390)
    for side in "ab":
        numbers = page.locator(f"#plot-{side} .tick[text-anchor=end]").all_text_contents()
        assert len(numbers) >= 2, numbers


def test_each_colour_of_an_axis_of_positions_is_named(show, screen):
    page = show("?view=layout&a.model=qwen3-vl-8b", width=WIDTHS[screen])
    named = page.evaluate("""() => {
        const rects = [...document.querySelectorAll("#plot-a rect:not(.cell)")];
        return rects.filter(each => each.nextSibling.tagName === "text").map(each =>
            [each.nextSibling.textContent, getComputedStyle(each).fill]).slice(-3);
    }""")
    assert [name for name, _ in named] == ["0", "1", "2"]
    cells = page.locator("#plot-a rect.cell").evaluate_all(
        "all => all.slice(128).map(each => getComputedStyle(each).fill)"
    )
    assert [dict(map(reversed, named))[fill] for fill in cells[:6]] == ["0", "1", "2"] * 2
    assert len({fill for _, fill in named}) == 3


def test_a_wrong_number_is_one_line_at_its_control_in_views_of_each_group(show):
    page = show(f"?{QUERY}", width=1400)
    wrong = "context", "100000000", "context must be in 1 .."  # seen before any view is drawn
    cases = [(view, *wrong) for view in ("hands", "decay", "reach", "models")]
    cases += [("plan", "context", "2000000", "a plan is made for a context of 2 .. 1,048,576"),
              ("methods", "a.trained", "1", "scaling needs a trained length of 2"),
              ("models", "b.head_dim", "127", "head_dim must be even")]  # fmt: skip
    for view, field, value, message in cases:
        choose(page, view)
        box = page.locator(f'[name="{field}"]')
        before = box.input_value()
        box.fill(value)
        line = page.locator(f'.error[data-of="{field}"]')
        expect(line).to_contain_text(message)
        assert line.bounding_box()["height"] < 70
        said = [each for each in page.locator(".error").all_text_contents() if each]
        assert said == [line.text_content()], view
        expect(box).to_have_attribute("aria-invalid", "true")
        box.fill(before)
        expect(line).to_have_text("")


@pytest.mark.parametrize("view", MOVING)
def test_a_moving_view_plays_without_the_server_at_the_pace_of_the_screen(show, view, screen):
    page = show(f"?view={view}&{QUERY}", width=WIDTHS[screen])
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    hand = page.locator("#plot-a path.hand.blue").first
    before = hand.get_attribute("d")
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("before => document.querySelector('#plot-a path.hand.blue')"
                           ".getAttribute('d') !== before", arg=before)  # fmt: skip
    page.get_by_role("button", name="Stop").click()
    work = page.evaluate("""() => {
        const start = performance.now();
        for (let i = 1; i <= 100; i++) motion.set(motion.played, i);
        return (performance.now() - start) / 100;
    }""")
    assert work < 8  # ms; half of a frame of 60 in a second
    assert asked == []


@pytest.mark.parametrize("view", ["hands", "layouts"])
def test_the_score_follows_the_point_that_is_dragged(show, view, screen):
    page = show(f"?view={view}&{QUERY}", width=WIDTHS[screen])
    mark = page.locator("#plot-a circle.mark").first
    label = page.locator("#plot-a text.label", has_text="q · k = ").first
    box, before = mark.bounding_box(), label.text_content()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    seen = []
    for step in (10, 25, 40):
        page.mouse.move(x + step, y)
        seen.append(label.text_content())
        moved = mark.bounding_box()
        assert abs(moved["x"] + moved["width"] / 2 - x - step) < 6  # a whole token is beside it
    page.mouse.up()
    assert len({before, *seen}) == 4  # while it is held
    distance = round(float(page.evaluate("motion.values.distance")))
    found = VIEWS[view].draw(look(Side(), 32768))
    if view == "layouts":
        score = found.columns["right"][distance]
    else:
        speeds = np.array(found.figure.moving["inv_freq"])
        score = np.cos(distance * speeds).sum() + found.figure.moving["constant"]
    assert seen[-1] == f"q · k = {score:.2f}"
    page.mouse.move(x + 80, y)
    assert label.text_content() == seen[-1]
    assert page.evaluate("charts.a.zoom ?? null") is None


def test_both_layouts_have_the_same_hands_and_a_mix_of_them_has_not(show):
    page = show(f"?view=layouts&{QUERY}", width=1400)
    page.get_by_role("slider", name="Position of k").fill("0.5")
    paths = page.locator("#plot-a path.hand.orange").evaluate_all(
        "all => all.map(each => each.getAttribute('d'))"
    )
    ends = [np.array(re.findall(r"-?[\d.]+(?:e-?\d+)?", path), float).reshape(-1, 4)
            for path in paths]  # fmt: skip
    one, other, mixed = (end[:, 2:] - end[:, :2] for end in ends)
    np.testing.assert_allclose(one, other, atol=1e-6)
    assert np.abs(one - mixed).max() > 5
    (interleaved, half, _) = views.two_layouts(look(Side(), 32768)).figure.moving["orders"]
    k = np.array(half["k"])[[0, 4]]
    np.testing.assert_allclose(k, np.array(interleaved["k"])[[0, 1]])


def test_scaling_brings_hands_back_to_angles_that_training_showed(show):
    page = show(f"?view=methods&{QUERY}", width=1400)
    counts = page.locator("#plot-a text", has_text=" new").all_text_contents()[1:]
    assert counts == page.locator("#plot-a text", has_text="of 64 new").all_text_contents()
    number = dict(zip(["none", "linear", "ntk", "yarn", "llama3", "longrope"],
                      [int(count.split()[0]) for count in counts], strict=True))  # fmt: skip
    assert number["none"] > 20
    assert number["linear"] == number["yarn"] == number["llama3"] == number["longrope"] == 0
    page.get_by_role("slider", name="Position, tokens").fill("0.5")
    counts = page.locator("#plot-a text", has_text="of 64 new").all_text_contents()
    assert {count.split()[0] for count in counts} == {"0"}


def test_an_engineer_extends_a_model_and_copies_the_config(show):
    page = show("?view=plan&a.model=llama-3-8b")
    page.locator("#context").fill("131072")
    expect(page.locator("#words-a")).to_contain_text("Use yarn with factor 16.")
    expect(page.locator("#tables-a pre")).to_contain_text('"rope_type": "yarn"')
    expect(page.locator("#tables-a tr", has_text="yarn")).to_contain_text("none")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the config").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    text = page.evaluate("navigator.clipboard.readText()")
    assert '"original_max_position_embeddings": 8192' in text


def test_the_pictures_of_the_docs_are_of_this_page(show):
    """`python -m tools.make_gallery` draws them again."""
    text = (GALLERY.parent.parent / "docs" / "explore.md").read_text()
    assert set(re.findall(r"\(explore/(\w+)\.png\)", text)) == set(make_gallery.PICTURES)
    files = {path.name: path.stat().st_size for path in make_gallery.FOLDER.iterdir()}
    assert set(files) == {f"{name}.png" for name in make_gallery.PICTURES}
    assert sum(files.values()) < 1_000_000
    page = show(f"?{QUERY}")
    page.set_viewport_size(make_gallery.SIZE)
    for name, query in make_gallery.PICTURES.items():
        page.goto(f"{page.url.partition('?')[0]}?{query}")
        page.wait_for_selector("#links-a a")
        saved = Image.open(make_gallery.FOLDER / f"{name}.png")
        assert make_gallery.text_of(page) == saved.text["Text"], name
        colours = {colour for _, colour in saved.convert("RGB").getcolors()}
        for part in ("body", "select"):
            ground = page.locator(part).first.evaluate("e => getComputedStyle(e).backgroundColor")
            assert tuple(map(int, re.findall(r"\d+", ground))) in colours, (name, part)
