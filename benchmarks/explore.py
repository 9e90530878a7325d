"""How soon the page of `rotary explore` is usable, and how soon it answers, in a real Chromium.

Three times, each as its median and the value that 95 % stay below:
start   from the command to a first picture that answers, server and browser begun anew
change  from a moved control to the new picture, in every view; each value is a new one
frame   the work of the script for one picture while a view moves, without the server
Needs Chromium and playwright. `--quick` starts it once and changes one view of each group once.
"""

import contextlib
import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rotary.bench import versions
from rotary.explorer.models import published
from rotary.explorer.views import LEARN, VIEWS

from . import command
from .command import table

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TIME_LIMITS = {"start": 3000.0, "change": 150.0, "frame": 1000 / 60}  # ms
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
MODEL = "llama-3-8b"
# ms from each new base to the picture of it: the answer is drawn, and a frame has passed
CHANGES = """async bases => {
    const box = document.querySelector("#a-base"), times = [];
    const frame = () => new Promise(done => requestAnimationFrame(done));
    for (const base of bases) {
        await frame();
        const start = performance.now();
        box.value = base;
        box.dispatchEvent(new Event("input", { bubbles: true }));
        while (queue.length) await new Promise(done => setTimeout(done));
        times.push(performance.now() - start);
    }
    return times;
}"""
# ms of the script for each of `count` pictures of a view that moves
FRAMES = """count => Array.from({ length: count }, (_, i) => {
    const start = performance.now();
    motion.set(motion.played, motion.at(motion.played, i / count));
    return performance.now() - start;
})"""
# ms between frames while Play runs for a second
PLAYED = """() => new Promise(done => {
    const times = [];
    const step = now => {
        times.push(now);
        if (now - times[0] < 1000) return requestAnimationFrame(step);
        motion.stop();
        done(times.slice(1).map((time, i) => time - times[i]));
    };
    motion.play();
    requestAnimationFrame(step);
})"""


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of a page in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "rotary", "explore", "--no-browser"],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


@contextlib.contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser; exits with a status of 1 where it is not installed."""
    path = shutil.which("chromium")
    if path is None:
        sys.exit("needs Chromium: apt-get install -y --no-install-recommends chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


def opened(browser: "Browser", address: str, query: str = "") -> "Page":
    """The page with its first picture drawn."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"{address}?{query}")
    page.wait_for_selector("#links-a a")
    return page


def start_time(browser: "Browser") -> float:
    """Milliseconds from the command to a first picture."""
    began = time.perf_counter()
    with served() as address:
        opened(browser, address).close()
        return 1000 * (time.perf_counter() - began)


def errors(page: "Page") -> Iterator[tuple[str, float, float]]:
    """How far the scores that the browser shows are from the sum of cosines, in float64."""
    spec = published(MODEL).spec
    speeds = spec.base ** (-np.arange(0, spec.rotary_dim, 2) / spec.rotary_dim)
    for distance in (1, 20, 1000, 30_000):
        page.evaluate("distance => motion.set('distance', distance)", distance)
        text = page.locator("#plot-a text.label.red").last.text_content() or ""
        shown = float(re.sub(r".*= ", "", text))
        yield f"q . k at {distance}", abs(shown - np.cos(distance * speeds).sum()), 0.0051


def line(name: str, what: str, times: list[float], most_ms: float | None) -> list[str]:
    """A row of the table: the median, 95 %, how many, and what it should stay below."""
    middle, most = np.percentile(times, [50, 95])
    limit = "" if most_ms is None else digits(most_ms)
    return [name, what, digits(middle), digits(most), str(len(times)), limit]


def digits(value: float) -> str:
    """Three digits, without a power of ten.

    >>> digits(2496.2), digits(0.1049)
    ('2,500', '0.105')
    """
    return f"{float(f'{value:.3g}'):,g}"


def measured(
    browser: "Browser", address: str, views: Sequence[str], changes: int, frames: int
) -> list[list[str]]:
    """The rows of a page that is served: changes of every view, frames of those that move."""
    rows = []
    bases = [float(f"{base:.6g}") for base in np.geomspace(2e5, 9e5, changes + 1)]
    for name in views:
        page = opened(browser, address, f"view={name}&a.model={MODEL}&context=131072")
        times = page.evaluate(CHANGES, bases)[1:]  # the first one is not warm
        rows.append(line("change", VIEWS[name].title, times, TIME_LIMITS["change"]))
        page.close()
    for name in [name for name in views if VIEWS[name].group == LEARN]:
        page = opened(browser, address, f"view={name}&a.model={MODEL}&context=131072")
        times = page.evaluate(FRAMES, frames)
        rows.append(line("frame, script", VIEWS[name].title, times, TIME_LIMITS["frame"]))
        rows.append(line("frame, played", VIEWS[name].title, page.evaluate(PLAYED), None))
        page.close()
    return rows


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--starts", type=int, default=10, help="how often it is started")
    parser.add_argument("--changes", type=int, default=20, help="of a control, in each view")
    parser.add_argument("--frames", type=int, default=300, help="of each view that moves")
    parser.set_defaults(views=tuple(VIEWS))
    of_each_group = {view.group: name for name, view in VIEWS.items()}
    quick = {"starts": 1, "changes": 1, "frames": 10, "views": tuple(of_each_group.values())}
    options = command.parsed(parser, quick, command.RESULTS)
    with chromium() as browser:
        with served() as address:
            page = opened(browser, address, f"view=hands&a.model={MODEL}")
            command.gate(list(errors(page)), "the sum of cosines in float64")
            page.close()
            rows = measured(browser, address, options.views, options.changes, options.frames)
        starts = [start_time(browser) for _ in range(options.starts)]
        rows.insert(0, line("start", "", starts, TIME_LIMITS["start"]))
        version = browser.version
    text = "\n".join([
        "# The page of `rotary explore`", "",
        f"{', '.join(f'{name} {value}' for name, value in versions().items())}; Chromium {version} "
        f"without a GPU; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, "
        f"OPENBLAS_NUM_THREADS {os.environ.get('OPENBLAS_NUM_THREADS', 'not set')}. {MODEL} at "
        "131,072 tokens. Milliseconds.", "",
        table(["what", "view", "median", "95 %", "times", "should be at most"], rows), "",
    ])  # fmt: skip
    print(text)
    command.write(options.out, {f"{datetime.date.today()}-explore.md": text})


if __name__ == "__main__":
    main()
