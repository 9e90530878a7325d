"""The page asked by another site, in Chromium: a page on another port gets and causes nothing."""

import contextlib
import http.server
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from playwright.sync_api import Error, expect

pytestmark = pytest.mark.slow
DOWNLOAD = "download/numbers.csv?view=decay"
DRAW = "draw"
# Scripts of the other page, with `at` the address of ours: each returns what it could read
FETCH = "fetch(at + '{path}', {options}).then(got => got.text()).catch(() => '')"
LOADED = """new Promise(done => {{
    const part = document.createElement('{tag}');
    part.rel = 'stylesheet';
    part.onload = () => done('loaded');
    part.onerror = () => done('');
    part.src = part.href = at + '{path}';
    document.body.append(part);
}})"""
OPENED = """new Promise(done => {{
    const opened = new {kind}(at.replace('http', '{scheme}') + '{path}');
    opened.onopen = () => done('opened');
    opened.onerror = () => done('');
}})"""
FORM = """new Promise(done => {{
    document.body.innerHTML = `<iframe name="to"></iframe>
        <form method="{method}" action="${{at}}{path}" target="to"><input name="view"></form>`;
    const frame = document.querySelector("iframe");
    frame.onload = () => done(frame.contentDocument?.body.textContent ?? '');
    document.querySelector("form").submit();
    setTimeout(() => done(''), 10000);
}})"""
FRAME = """new Promise(done => {{
    const frame = document.createElement('{tag}');
    frame.src = frame.data = at + '{path}';
    frame.onload = frame.onerror = () => done(frame.contentDocument?.body?.textContent ?? '');
    document.body.append(frame);
    setTimeout(() => done(''), 10000);
}})"""
ATTACKS = {
    "GET": FETCH.format(path=DOWNLOAD, options="{}"),
    "GET of the page": FETCH.format(path="", options="{}"),
    "GET no-cors": FETCH.format(path=DOWNLOAD, options="{mode: 'no-cors'}"),
    "GET with cookies": FETCH.format(path=DOWNLOAD, options="{credentials: 'include'}"),
    "HEAD": FETCH.format(path=DOWNLOAD, options="{method: 'HEAD', mode: 'no-cors'}"),
    "POST": FETCH.format(path=DRAW, options="{method: 'POST', body: '{}'}"),
    "POST no-cors": FETCH.format(
        path=DRAW, options="{method: 'POST', mode: 'no-cors', body: '{}'}"
    ),
    "POST of JSON": FETCH.format(
        path=DRAW,
        options="{method: 'POST', body: '{}', headers: {'content-type': 'application/json'}}",
    ),
    "beacon": f"(navigator.sendBeacon(at + '{DRAW}', '{{}}'), '')",
    "image": LOADED.format(tag="img", path=DOWNLOAD),
    "script": LOADED.format(tag="script", path=DOWNLOAD),
    "style": LOADED.format(tag="link", path="explore.css"),
    "event stream": OPENED.format(kind="EventSource", scheme="http", path=DOWNLOAD),
    "websocket": OPENED.format(kind="WebSocket", scheme="ws", path=DOWNLOAD),
    "form GET": FORM.format(method="get", path=DOWNLOAD),
    "form POST": FORM.format(method="post", path=DRAW),
    "iframe": FRAME.format(tag="iframe", path="?view=decay"),
    "object": FRAME.format(tag="object", path="?view=decay"),
}


# The real page, which says what arrives and what the guard lets through; "open": it refuses nobody
SERVER = """
import sys
from rotary.explorer import page, serve, server

def say(*words):
    print(*words, flush=True)

class Watched(server.Guard):
    def __init__(self, app, host):
        async def inner(scope, receive, send):
            if scope["type"] != "lifespan":
                say("passed", scope["path"])
            await app(scope, receive, send)

        super().__init__(inner, host)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "lifespan":
            say("arrived", scope["path"])
        await super().__call__(scope, receive, send)

def watched(write):
    return lambda *given: (say("computed", "an answer"), write(*given))[1]

server.Guard = Watched
page.drawn, page.certified = watched(page.drawn), watched(page.certified)
for name, (kind, write) in server.DOWNLOADS.items():
    server.DOWNLOADS[name] = (kind, watched(write))
if sys.argv[1:] == ["open"]:
    server.refused = lambda scope, host: None
serve(ready=lambda address: say("ready", address))
"""


class Served:
    """The page in a process of its own: `address`, and what it said since `forget`."""

    def __init__(self, *given):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *given], stdout=subprocess.PIPE, text=True
        )
        _, self.address = self.process.stdout.readline().split()
        self.said = []
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for line in self.process.stdout:
            self.said.append(line.strip())

    def forget(self):
        self.said.clear()

    def heard(self):
        """(what arrived, what was done), once a request of our own shows that all was read."""
        end = time.monotonic() + 20
        while not self.said and time.monotonic() < end:
            time.sleep(0.01)
        urllib.request.urlopen(f"{self.address}explore.js", timeout=20).close()
        while "arrived /explore.js" not in self.said and time.monotonic() < end:
            time.sleep(0.01)
        said = self.said[: self.said.index("arrived /explore.js")]
        arrived = [line for line in said if line.startswith("arrived")]
        return arrived, [line for line in said if line not in arrived]

    def end(self):
        self.process.terminate()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def served():
    found = Served()
    yield found
    found.end()


@pytest.fixture(scope="module")
def other():
    """The port of another server, whose only page is empty."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # the name that http.server calls
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title><body></body>")

        def log_message(self, *given):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found.server_port
        found.shutdown()


@pytest.fixture
def stranger(served, other, browser):
    """Opens a page of another server: the same name with another port, or another name."""
    contexts = []

    def opened(name):
        contexts.append(browser.new_context())
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.goto(f"http://{name}:{other}/")
        served.forget()
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_another_page_gets_nothing_and_causes_no_work(stranger, served, name):
    page = stranger(name)
    for attack, script in ATTACKS.items():
        page.reload()  # without what the attack before has left in it
        served.forget()
        got = page.evaluate(f"at => {script}", served.address)
        arrived, done = served.heard()
        assert arrived, attack  # it was asked
        assert done == [], attack
        assert got == "", attack
        for frame in page.frames[1:]:
            with contextlib.suppress(Error):  # of a frame that the browser has taken away
                assert "RoPE" not in frame.content(), attack


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_link_or_a_window_of_another_page_shows_one_line(stranger, served, name):
    page = stranger(name)
    with page.expect_popup() as opened:
        page.evaluate("at => { window.open(at) }", f"{served.address}?context=4096")
    page.evaluate("at => { location = at }", f"{served.address}?context=4096")
    for each in (page, opened.value):
        expect(each.locator("body")).to_contain_text("another site asked for this page")
    assert set(served.heard()[1]) <= {
        "passed /favicon.ico",
        "passed /favicon.svg",
    }  # of the page with the one line


def test_the_address_typed_into_the_same_tab_is_answered(stranger, served):
    page = stranger("127.0.0.1")
    page.goto(f"{served.address}?context=4096")
    page.wait_for_selector("#links-a a")
    with page.expect_download() as got:
        page.locator("#links-a").get_by_role("link", name="Numbers (CSV)").click()
    assert got.value.suggested_filename == "numbers.csv"
    assert any(line == "computed an answer" for line in served.said)


def test_a_page_that_is_answered_is_not_shown_in_a_frame(stranger):
    """The policy holds by itself, for browsers that do not say who asks."""
    unguarded = Served("open")
    try:
        page = stranger("127.0.0.1")
        page.evaluate(f"at => {ATTACKS['iframe']}", unguarded.address)
        assert unguarded.heard()[1] == ["passed /"]
        assert "RoPE" not in page.frames[1].content()
    finally:
        unguarded.end()
