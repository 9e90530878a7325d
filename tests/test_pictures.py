"""The committed pictures: each is shown on a page, and is what the code draws today."""

import copy
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from PIL import Image

from rotary import Rotary, plots
from rotary.plots import style

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "make_pictures.py")
make_pictures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_pictures)
DRAWN = sorted(make_pictures.PICTURES)


def shown_on_pages():
    """The file names of the pictures that pages show."""
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    return set(re.findall(r"pictures/([\w-]+\.\w+)", text))


def test_every_picture_is_shown_on_a_page_and_has_a_twin_for_dark_pages():
    light = {f"{name}.png" for name in DRAWN}
    assert light - shown_on_pages() == set()
    twins = {f"{name}-dark.png" for name in DRAWN}
    assert {path.name for path in FOLDER.iterdir()} == light | twins | {"architecture.svg"}


def test_every_picture_on_a_page_says_in_words_what_it_shows():
    """The text in brackets, which readers without the picture get, is a phrase."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        alts = re.findall(r"!\[([^\]]*)\]", text)
        assert [alt for alt in alts if len(alt.split()) < 4] == [], path.name


def without_caption(text):
    """The drawn pictures of a page that no paragraph in italics follows, which says what to see."""
    after = re.findall(r"^!\[[^\]]*\]\(\S*?([\w-]+)\.png\)\n+(?=(.*(?:\n.+)*))", text, re.MULTILINE)
    return [
        name
        for name, said in after
        if not (said.startswith("*") and "What to see" in " ".join(said.split()))
    ]


def test_every_picture_on_a_page_of_the_docs_has_a_caption_that_says_what_to_see():
    pages = [path for path in PAGES if path.is_relative_to(ROOT / "docs")]
    assert {path.name: names for path in pages
            if (names := without_caption(path.read_text(encoding="utf-8")))} == {}  # fmt: skip


def test_a_picture_without_a_caption_is_found():
    said = "![one line rises](a.png)\n\n*A line. What to\nsee: it rises.*\n\n"
    assert without_caption(said) == []
    assert without_caption(said + "![it falls](b.png)\n![again](c.png)\n\nText.\n") == ["b", "c"]


def same(one, two):
    """Whether two summaries agree: words exactly, numbers to 1e-3 of the larger."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float | int) and isinstance(two, float | int):
        return bool(np.isclose(one, two, rtol=1e-3, atol=1e-7))
    return one == two


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_the_code_draws(name):
    committed = json.loads(Image.open(FOLDER / f"{name}.png").text["Summary"])
    drawn = json.loads(json.dumps(make_pictures.summary(make_pictures.PICTURES[name]())))
    assert same(committed, drawn), f"draw it: python tools/make_pictures.py {name}"


def test_a_changed_picture_is_found():
    before = make_pictures.summary(plots.walk(Rotary(head_dim=8)))
    assert same(before, copy.deepcopy(before))
    assert not same(before, make_pictures.summary(plots.walk(Rotary(head_dim=8, base=9000.0))))
    retitled = plots.walk(Rotary(head_dim=8))
    retitled.axes[0].set_title("another", loc="left")
    assert not same(before, make_pictures.summary(retitled))
    recoloured = plots.walk(Rotary(head_dim=8))
    recoloured.axes[0].lines[0].set_color("red")
    assert not same(before, make_pictures.summary(recoloured))


def luminance(color):
    """Relative luminance of WCAG 2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def contrast(one, two):
    bright, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (bright + 0.05) / (low + 0.05)


SAMPLES = {
    "wavelengths": lambda: plots.wavelengths(Rotary(head_dim=16), trained=64, target=256),
    "angle_coverage": lambda: plots.angle_coverage(Rotary(head_dim=16), trained=64, target=256),
    "layout": lambda: plots.layout(Rotary(head_dim=16, rotary_dim=8)),
    "unit_circle": lambda: plots.unit_circle(Rotary(head_dim=16), 100, 8),
    "decay": lambda: plots.decay(Rotary(head_dim=16), 1000),
    "comb": lambda: plots.comb(64, [10.0, 100.0, 1000.0], marks={"mark": 100.0}),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read_on_its_page(name, is_dark):
    figure = SAMPLES[name]()
    figure = plots.dark(figure) if is_dark else figure
    figure.draw_without_rendering()
    texts = [artist for artist in figure.findobj(Text) if artist.get_text()]
    outside = [text for text in texts if text.get_gid() != style.ON_COLOUR]
    assert len(outside) > 3
    page = figure.get_facecolor()
    assert luminance(page) < 0.01 if is_dark else luminance(page) == 1
    for text in outside:
        assert contrast(text.get_color(), page) >= 4.5, text.get_text()
    for panel in figure.axes:
        for line in panel.lines:
            if line.get_color() in style.PALETTE:
                assert contrast(line.get_color(), page) >= 2, line


def test_a_dark_figure_keeps_its_data():
    light, night = plots.walk(Rotary(head_dim=8)), plots.dark(plots.walk(Rotary(head_dim=8)))
    for before, after in zip(light.axes[0].lines, night.axes[0].lines, strict=True):
        np.testing.assert_array_equal(before.get_data(), after.get_data())
        assert before.get_color() != after.get_color()
