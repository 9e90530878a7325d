"""The page in a real browser: Debian's Chromium, driven as a person would."""

import csv
import json
import re
import shutil
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from playwright.sync_api import expect, sync_playwright

import rotary

pytestmark = pytest.mark.slow
ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
MARKUP = "<img src=x onerror=alert(1)>"
# The server may listen and answer, and open no connection but to this machine
SERVER = """
import ipaddress, sys

def watch(event, given):
    if event == "socket.connect" and isinstance(given[1], tuple):
        if not ipaddress.ip_address(given[1][0]).is_loopback:
            print("LEAK", event, given[1], file=sys.stderr, flush=True)
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        if given[0] not in ("127.0.0.1", "localhost", None):
            print("LEAK", event, given[0], file=sys.stderr, flush=True)

sys.addaudithook(watch)
from rotary.explorer import serve
serve(ready=lambda address: print(address, flush=True))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a page in a process of its own, which is seen to open no connection."""
    log = tmp_path_factory.mktemp("explorer") / "errors"
    with log.open("w") as errors, subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:  # fmt: skip
        address = process.stdout.readline().strip()
        try:
            assert address.startswith("http://127.0.0.1:"), log.read_text()
            yield address
        finally:
            process.terminate()
    said = log.read_text()
    assert "LEAK" not in said
    assert "Traceback" not in said, said


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs Chromium: apt-get install -y --no-install-recommends chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture
def show(server, browser):
    """Opens the page; at the end nothing was asked elsewhere and no error said on the console."""
    asked, said, contexts = [], [], []

    def opened(query="", width=1280, scheme="light", refused=""):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("websocket", lambda socket: asked.append(socket.url))
        page.on("console", lambda message: say(f"{message.type}: {message.text}", refused))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.goto(server + query)
        page.wait_for_selector("#plot-a .main-svg")
        page.wait_for_selector("#links-a a")  # the last that arrives
        return page

    def say(line, refused):
        if not (refused and refused in line):
            said.append(line)

    yield opened
    for context in contexts:
        context.close()
    away = [url for url in asked if not url.startswith((server, "data:", f"blob:{server}"))]
    assert len(asked) > 20
    assert away == []
    assert [line for line in said if not line.startswith(("log:", "info:", "debug:"))] == []


def words(page, side="a"):
    return page.locator(f"#words-{side} [data-testid=markdown]")


def choose(page, control, option):
    box = page.locator(f"#{control} input")
    box.click()
    box.fill(option)
    page.get_by_role("option", name=option, exact=True).click()


def state(page):
    return {name: value[0] for name, value in parse_qs(urlsplit(page.url).query).items()}


def download(page, name):
    with page.expect_download() as got:
        page.locator("#links-a").get_by_role("link", name=name).click()
    return got.value


def test_a_model_is_chosen_and_its_numbers_are_shown(show):
    page = show()
    expect(words(page)).to_contain_text("29 pairs never turn once in the 8,192 tokens")
    choose(page, "a-model", "llama-2-7b")
    expect(words(page)).to_contain_text("18 pairs never turn once in the 4,096 tokens of training")
    expect(words(page)).to_contain_text("the critical dimension is 92")
    expect(page.locator("#a-base input")).to_have_value("10000")
    expect(page.locator("#shared-context input")).to_have_value("4096")
    assert state(page) == {"a.model": "llama-2-7b", "context": "4096"}


def test_a_slider_is_moved_by_the_keyboard_and_the_number_follows(show):
    page = show("?a.model=llama-2-7b&view=similarity&context=4096")
    expect(words(page)).to_contain_text("At distance 1,707")
    slider = page.get_by_role("slider", name="range slider for A: base: as a power of ten")
    expect(slider).to_have_value("4")
    slider.focus()
    slider.press("ArrowRight")
    expect(page.locator("#a-base input")).to_have_value("10230")
    base = 10230.0
    angles = np.arange(1, 4097)[:, None] * base ** (-np.arange(64) / 64)
    first = int(np.flatnonzero(np.cos(angles).sum(axis=1) < 0)[0]) + 1
    expect(words(page)).to_contain_text(f"At distance {first:,}")
    expect(page).to_have_url(re.compile("a.base=10230"))


# one of one axis, one of three, one with pairs that stand still
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-vl-8b", "gemma-4-31b, full_attention"])
def test_every_picture_is_drawn_and_reached_by_the_keyboard(show, model):
    page = show(f"?a.model={model}&context=131072")
    expect(page.get_by_role("heading", name=f"A: {model}")).to_be_visible()
    said = set()
    for title in ("Decay", "Similarity", "Scaling", "Coverage", "Precision",
                  "Layout", "Wavelengths"):  # fmt: skip
        before = words(page).inner_text()
        choice = page.get_by_role("radio", name=title)
        choice.focus()
        choice.press("Space")
        expect(words(page)).not_to_have_text(before)
        page.wait_for_selector(
            "#plot-a .main-svg :is(.trace, .heatmaplayer image)", state="attached"
        )
        said.add(words(page).inner_text())
    assert len(said) == 7


def test_the_picture_says_what_it_shows(show):
    page = show("?view=similarity&context=131072&a.model=llama-3.1-8b")
    expect(words(page)).to_contain_text("85,133")
    picture = page.locator("#plot-a")
    expect(picture).to_have_attribute("role", "img")
    expect(picture).to_have_attribute("aria-label", re.compile("At distance 85,133 a similar key"))
    unnamed = page.locator("input:not([aria-label]):not([type=radio]):not([type=checkbox])")
    for box in unnamed.all():
        assert box.evaluate("box => box.labels.length") > 0, box.evaluate("box => box.outerHTML")


def test_a_figure_keeps_its_clips_and_gradients_when_the_address_changes(show):
    page = show("?view=layout&a.model=deepseek-v3")
    page.locator("#shared-context input").fill("5000")
    expect(page).to_have_url(re.compile("context=5000"))
    found = page.evaluate("""() => [...document.querySelectorAll("#plot-a svg *")].flatMap(each =>
        [each.getAttribute("clip-path"), each.style.fill, each.style.clipPath]
    ).filter(value => value && value.startsWith("url("))""")
    assert len(found) >= 2
    assert [value for value in found if not re.match(r"url\([\"']?#", value)] == []


def test_hover_tells_the_number_under_the_pointer(show):
    page = show("?a.model=llama-2-7b&context=4096")
    page.locator("#plot-a .trace .point").nth(32).hover(force=True)
    expect(page.locator("#plot-a .hoverlayer")).to_contain_text("628.319")


def test_a_broken_config_shows_its_error_in_one_line_and_a_good_one_mends_it(show):
    page = show()
    choose(page, "a-model", "a config.json, pasted below")
    error = page.get_by_role("alert").filter(has_text="Not drawn")
    expect(error).to_contain_text("A: paste a config.json, or choose a published model")
    box = page.get_by_label("A: config.json")
    box.fill('{"model_type": "llama", ')
    expect(error).to_contain_text("Not drawn: A: the config is not JSON")
    box.fill('{"model_type": "llama", "rope_thata": 1e6}')
    expect(error).to_contain_text("'rope_thata' is not known; did you mean 'rope_theta'?")
    box.fill('{"model_type": "llama", "head_dim": 64, "rope_theta": 20000}')
    expect(words(page)).to_contain_text("32 pairs in 64 channels")
    expect(error).to_have_count(0)
    expect(page.locator("#a-base input")).to_have_value("20000")
    again = show("?" + urlsplit(page.url).query)
    expect(words(again)).to_contain_text("32 pairs in 64 channels")
    expect(again.get_by_label("A: config.json")).to_have_value(box.input_value())


def test_markup_in_a_name_is_shown_as_text(show):
    page = show()
    choose(page, "a-model", "a config.json, pasted below")
    config = {"_name_or_path": MARKUP, "model_type": "llama", "head_dim": 64}
    page.get_by_label("A: config.json").fill(json.dumps(config))
    expect(page.get_by_role("heading", name=f"A: {MARKUP}")).to_be_visible()
    page.get_by_label("A: config.json").fill(json.dumps({"model_type": MARKUP}))
    expect(page.get_by_role("alert").filter(has_text=MARKUP)).to_be_visible()
    assert page.locator("img[src=x]").count() == 0
    linked = show(f"?a.model={MARKUP}&view={MARKUP}")
    expect(linked.get_by_role("alert").filter(has_text=MARKUP)).to_be_visible()
    assert linked.locator("img[src=x]").count() == 0


def test_a_script_that_gets_into_the_page_is_not_run(show):
    page = show(refused="Content Security Policy")
    page.evaluate("""() => new Promise(done => {
        window.ran = [];
        const box = document.createElement("div");
        box.innerHTML = '<b onclick="window.ran.push(1)">x</b>';
        document.body.append(box);
        box.firstChild.click();
        setTimeout(() => {  // what a driver evaluates is free of the policy, what it starts is not
            try { new Function("window.ran.push(2)")(); } catch {}
            done();
        });
    })""")
    assert page.evaluate("window.ran") == []


def test_the_numbers_and_the_config_are_downloaded(show, tmp_path):
    page = show("?a.model=llama-2-7b&a.method=yarn&context=32768&view=band")
    expect(words(page)).to_contain_text("slowest 0.125")
    got = download(page, "Numbers (CSV)")
    assert got.suggested_filename == "numbers.csv"
    got.save_as(tmp_path / "numbers.csv")
    rows = list(csv.DictReader((tmp_path / "numbers.csv").read_text().splitlines()))
    assert len(rows) == 64
    assert [float(rows[pair]["speed_ratio"]) for pair in (0, 63)] == [1.0, 0.125]
    download(page, "Config for transformers (JSON)").save_as(tmp_path / "config.json")
    spec = rotary.from_hf_config(tmp_path / "config.json")
    assert (spec.schedule, spec.params["factor"]) == ("yarn", 8.0)
    download(page, "Figure (HTML)").save_as(tmp_path / "figure.html")
    assert "Plotly.newPlot" in (tmp_path / "figure.html").read_text()


def test_the_bar_over_a_figure_saves_it_as_svg(show, tmp_path):
    page = show("?view=decay")
    with page.expect_download() as got:
        page.locator("#plot-a .modebar-btn[data-title^='Download plot']").click(force=True)
    got.value.save_as(tmp_path / got.value.suggested_filename)
    assert (tmp_path / "rotary.svg").read_text().startswith("<svg")


def test_a_link_restores_the_page(show):
    query = (
        "?view=coverage&context=65536&compared=1&a.model=llama-2-7b&a.method=linear&b.model=phi-2"
    )
    page = show(query)
    expect(page.get_by_role("heading", name="A: llama-2-7b, linear")).to_be_visible()
    expect(page.get_by_role("heading", name="B: phi-2, yarn")).to_be_visible()
    expect(page.get_by_role("radio", name="Coverage")).to_be_checked()
    expect(page.get_by_role("checkbox", name="Compare with B")).to_be_checked()
    expect(page.locator("#shared-context input")).to_have_value("65536")
    expect(page.locator("#b-model input")).to_have_value("phi-2")
    expect(page.locator("#factor input[type=range]")).to_have_value("16")
    page.wait_for_selector("#plot-b .main-svg")
    expect(words(page)).to_contain_text("of 64 pairs saw less")
    expect(words(page, "b")).to_contain_text("of 16 pairs saw less")
    assert state(page) == state(type("Opened", (), {"url": query}))


def test_two_sides_are_compared_and_parted_again(show):
    page = show()
    page.get_by_role("checkbox", name="Compare with B").click()
    expect(page.get_by_role("heading", name="B: llama-3-8b, yarn")).to_be_visible()
    page.wait_for_selector("#plot-b .main-svg")
    boxes = [page.locator(f"#plot-{side}").bounding_box() for side in "ab"]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.get_by_role("checkbox", name="Compare with B").click()
    expect(page.locator("#plot-b")).to_have_count(0)


def test_the_smallest_base_is_found_on_demand(show):
    page = show("?context=1024")
    page.get_by_role("button", name="Smallest base for this context").click()
    expect(page.locator("#certified")).to_contain_text("With base 4,293.4376", timeout=120_000)
    context = page.locator("#shared-context input")
    context.fill("1048576")
    expect(page).to_have_url(re.compile("context=1048576"))
    page.get_by_role("button", name="Smallest base for this context").click()
    expect(page.locator("#certified")).to_contain_text("run rotary plan --context 1048576")


@pytest.mark.parametrize("query", ["", "?compared=1&view=precision", "?view=layout", "?view=band"])
def test_a_narrow_screen_needs_no_scrolling_sideways(show, query):
    page = show(query, width=400)
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    wide = page.evaluate(
        "[...document.querySelectorAll('.gradio-container *')].filter(e => e.checkVisibility() "
        "&& !e.closest('svg') && e.getBoundingClientRect().right > 401).map(e => e.className)"
    )
    assert wide == []


def luminance(colour):
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("scheme", "is_dark"), [("dark", True), ("light", False)])
def test_the_page_and_its_figures_follow_the_colour_scheme(show, scheme, is_dark):
    page = show(scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.locator("#plot-a .xtick text").first.evaluate("e => getComputedStyle(e).fill")
    paper = page.locator("#plot-a .main-svg").first.evaluate("e => getComputedStyle(e).background")
    assert "rgba(0, 0, 0, 0)" in paper
    assert (luminance(ground) < 60) == is_dark
    assert (luminance(ink) > 180) == is_dark


def test_an_update_leaves_no_more_than_4096_points_in_a_curve(show):
    page = show("?view=similarity&context=131072")
    counts = page.evaluate(
        "document.querySelector('#plot-a .js-plotly-plot')._fullData.map(trace => trace.x.length)"
    )
    assert counts
    assert max(counts) <= 4096


def test_another_name_for_this_machine_is_not_answered(server):
    import http.client

    found = urlsplit(server)
    for host, status in ((found.netloc, 200), ("evil.example", 400)):
        connection = http.client.HTTPConnection(found.hostname, found.port, timeout=30)
        connection.request("GET", "/", headers={"Host": host})
        assert connection.getresponse().status == status
        connection.close()


def test_no_file_is_given_out_by_its_path(server):
    import http.client

    found = urlsplit(server)
    for path in (
        *("/gradio_api/file=/etc/passwd", "/file=/etc/passwd", "/gradio_api/file=app.py"),
        *("/assets/../../../../../../etc/passwd", "/gradio_api/file=http://example.com/"),
        *(
            "/assets/%2e%2e/%2e%2e/index.html",
            "/gradio_api/proxy=http://example.com/",
            "/monitoring",
        ),
    ):
        connection = http.client.HTTPConnection(found.hostname, found.port, timeout=30)
        connection.request("GET", path)
        assert connection.getresponse().status == 404, path
        connection.close()
