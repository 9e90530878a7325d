"""Fixtures for tests of the page of `rotary explore`: a server, Chromium, and a page in it."""

import shutil
import subprocess
import sys

import pytest

ARGUMENTS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
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
def page_server(tmp_path_factory):
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
    """Debian's Chromium without a window."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs Chromium: apt-get install -y --no-install-recommends chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def tab(browser):
    """One tab for the tests of a file, each of which loads the page anew; it keeps nothing else."""
    context = browser.new_context()
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()


@pytest.fixture
def show(page_server, tab):
    """Opens the page; at the end nothing was asked elsewhere and no error said on the console."""
    asked, said, shown = [], [], []
    heard = {
        "request": lambda request: asked.append(request.url),
        "websocket": lambda socket: asked.append(socket.url),
        "console": lambda message: said.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: said.append(f"error: {error}"),
        "dialog": lambda dialog: said.append(f"dialog: {dialog.message}"),
    }

    def opened(query="", width=1280, scheme="light"):
        page = tab.context.new_page() if shown else tab
        shown.append(page)
        page.set_viewport_size({"width": width, "height": 844 if width < 500 else 900})
        page.emulate_media(color_scheme=scheme)
        page.mouse.move(0, 0)
        for event, handler in heard.items():
            page.on(event, handler)
        page.goto(page_server + query)
        page.wait_for_selector("#links-a a")
        return page

    opened.said = said
    yield opened
    for event, handler in heard.items():
        tab.remove_listener(event, handler)
    for page in shown[1:]:
        page.close()
    away = [
        url for url in asked if not url.startswith((page_server, "data:", f"blob:{page_server}"))
    ]
    assert len(asked) >= 6
    assert away == []
    assert [line for line in said if not line.startswith(("log:", "info:", "debug:"))] == []
