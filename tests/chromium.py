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


@pytest.fixture
def show(page_server, browser):
    """Opens the page; at the end nothing was asked elsewhere and no error said on the console."""
    asked, said, contexts = [], [], []

    def opened(query="", width=1280, scheme="light", refused=""):
        context = browser.new_context(
            viewport={"width": width, "height": 844 if width < 500 else 900}, color_scheme=scheme
        )
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("websocket", lambda socket: asked.append(socket.url))
        page.on("console", lambda message: say(f"{message.type}: {message.text}", refused))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.goto(page_server + query)
        page.wait_for_selector("#links-a a")
        return page

    def say(line, refused):
        if not (refused and refused in line):
            said.append(line)

    yield opened
    for context in contexts:
        context.close()
    away = [
        url for url in asked if not url.startswith((page_server, "data:", f"blob:{page_server}"))
    ]
    assert len(asked) >= 6
    assert away == []
    assert [line for line in said if not line.startswith(("log:", "info:", "debug:"))] == []
