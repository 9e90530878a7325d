"""The pages: every link leads somewhere, every test they name exists, and Sphinx builds them."""

import ast
import dataclasses
import html
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import typer

import rotary
from rotary.cli.app import app
from rotary.layouts import LAYOUTS
from rotary.positions import Order
from rotary.programs import readings
from rotary.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
VERDICTS = {
    *("holds", "holds on average", "bound only", "a choice", "incomplete"),
    *("typo corrected", "wrong"),
}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
FENCE = re.compile(r"^(`{3,}).*?^\1`*\s*?$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| ([A-Z])(\d+)\. (.*?) \| \*\*([a-z ]+)\*\*: (.*?) \|(.*)\|$", re.MULTILINE)


def prose(path: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"``?[^`\n]+``?", "code", FENCE.sub("", path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    """What the headings of a page are called in links: lower case, words joined by hyphens."""
    text = FENCE.sub("", path.read_text(encoding="utf-8")).replace("`", "")
    seen: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#{1,6} +(.*?) *$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(path: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    broken = []
    for target in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    return broken


def test_the_pages_have_links():
    assert sum(len(LINK.findall(prose(path))) for path in PAGES) > 50


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    assert broken_links(path) == []


def test_a_broken_link_is_found(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# One `big` title\n\n```\n# no title\n```\n## Again\n## Again\n")
    page.write_text(
        "[a](other.md) [b](other.md#one-big-title) [c](other.md#again-1) [d](https://x.org/none)\n"
        "[e](none.md) ![f](none.png) [g](other.md#no-title) [h](#gone) `[i](none)`\n"
        "```\n[j](none)\n```\n[k\nover lines](gone/)\n"
    )
    assert broken_links(page) == ["none.md", "none.png", "other.md#no-title", "#gone", "gone/"]


# --- the papers, line by line ---


def names_of_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def claims() -> list[tuple[str, int, str, str]]:
    """(letter, number, verdict, tests) of every row of the page."""
    text = (DOCS / "paper.md").read_text(encoding="utf-8")
    return [(row[0], int(row[1]), row[3], row[5]) for row in ROW.findall(text)]


def test_every_row_of_a_table_of_claims_is_read():
    text = (DOCS / "paper.md").read_text(encoding="utf-8")
    assert len(claims()) == len(re.findall(r"^\| [A-Z]\d", text, re.MULTILINE)) > 60
    for letter in "DBGNLST":
        numbers = [number for first, number, _, _ in claims() if first == letter]
        assert numbers == list(range(1, len(numbers) + 1))


def test_every_verdict_is_one_that_is_explained():
    assert {verdict for _, _, verdict, _ in claims()} == VERDICTS
    text = (DOCS / "paper.md").read_text(encoding="utf-8")
    explained = text.split("| verdict | meaning |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| ([a-z ]+) \|", explained, re.MULTILINE)) == VERDICTS


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: f"{claim[0]}{claim[1]}")
def test_every_claim_names_tests_that_exist(claim):
    cell = claim[-1]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell)
    assert len(named) == cell.count("`") // 2
    assert named
    for file, test in named:
        assert test in names_of_tests(ROOT / "tests" / file), f"{file} has no {test}"


# --- faults and security ---

SHOWN = re.compile(r"^\|(?: (\d+) \|)?.*\| ([^|]*) \|$", re.MULTILINE)


def rows_of(page: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """(number, [(file, test)]) of every row of a page's tables, but for their heads."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [(number, re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell))
            for number, cell in SHOWN.findall(text)
            if cell != "shown by" and not cell.startswith("---")]  # fmt: skip


@pytest.mark.parametrize("page", ["faults.md", "security.md"])
def test_every_test_that_a_table_names_exists(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 30
    assert len(named) == text.count("`test_")
    for file in sorted({file for file, _ in named}):
        wanted = {test for other, test in named if other == file}
        assert wanted - names_of_tests(ROOT / "tests" / file) == set(), file


def test_faults_are_counted_without_a_gap():
    numbers = [int(number) for number, _ in rows_of("faults.md")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 108


@pytest.mark.parametrize("page", ["faults.md", "security.md"])
def test_every_row_names_a_test_or_says_that_there_is_none(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    bare = [(number, tests) for number, tests in rows_of(page) if not tests]
    assert len(bare) == (text.count("| - |") if page == "faults.md" else 0)


def test_years_are_those_of_the_arxiv_numbers():
    """A number such as 2104.09864 says its year and month: 2021, April."""
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    dated = re.findall(r"\b(20\d\d),?\s[(\[]*arXiv\s(\d\d)\d\d\.\d{5}", "\n".join(texts))
    assert len(dated) >= 5
    assert [year for year, _ in dated] == [f"20{number}" for _, number in dated]


# --- the glossary, and the options that pages name ---


def test_the_glossary_has_every_field_layout_schedule_order_and_program():
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert len(terms) == len(set(terms))
    assert {field.name for field in dataclasses.fields(rotary.Rotary)} - {*terms} == set()
    assert {*LAYOUTS} - {*terms} == set()
    assert {*SCHEDULES, *get_args(Order)} - {*re.findall(r"`(\w+)`", text)} == set()
    assert [
        each.framework for each in readings({"head_dim": 4}) if each.framework not in text
    ] == []


def test_the_index_lists_every_page():
    """In its table and in the list that makes the menu."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    menu = re.findall(r"^[\w/]+$", text, re.MULTILINE)
    paths = [*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")]
    paths += [DOCS / folder / "index.md" for folder in ("experiments", "use_in")]
    for page in {str(path.relative_to(DOCS).with_suffix("")) for path in paths} - {"index"}:
        assert f"]({page}.md)" in text
        assert page in menu


def test_the_index_of_programs_lists_every_page_of_them():
    text = (DOCS / "use_in" / "index.md").read_text(encoding="utf-8")
    menu = re.findall(r"^[\w/]+$", text, re.MULTILINE)
    pages = {path.stem for path in DOCS.glob("use_in/*.md")} - {"index"}
    assert {*menu} == pages == {*re.findall(r"\]\((\w+)\.md\)", text)}


def test_every_experiment_has_a_page():
    folders = {path.parent.name for path in ROOT.glob("experiments/*/README.md")}
    assert {path.stem for path in DOCS.glob("experiments/*.md")} == folders | {"index"}


def test_the_page_of_commands_is_what_the_commands_say():
    path = ROOT / "tools" / "make_commands.py"
    spec = importlib.util.spec_from_file_location("make_commands", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wanted = module.page()
    assert set(module.EXAMPLES) == set(typer.main.get_command(app).commands)
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == wanted, (
        "write it: python tools/make_commands.py"
    )


OPTIONS = {
    option
    for command in typer.main.get_command(app).commands.values()
    for parameter in command.params
    for option in (*parameter.opts, "--help")
}


# of vLLM, SGLang and torchtitan
THEIR_OPTIONS = {"--enforce-eager", "--override", "--debug", "--rl-on-policy-target"}


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("use_in/*.md")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_option_of_a_command_exists(path):
    """An option in code, alone or after `rotary`, is one of a command of ours, or of a program."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`(--[a-z-]+)", text)
    for line in re.findall(r"(?:^\$ |`)rotary ([a-z][^`\n#]*)", text, re.MULTILINE):
        named += re.findall(r"(--[a-z-]+)", line)
    others = THEIR_OPTIONS if path.parent.name == "use_in" else set()
    assert {*named} - OPTIONS - others == set()


def test_an_option_that_is_gone_is_found():
    assert {"--dask", "--json", "--help"} <= OPTIONS
    assert "--cluster" not in OPTIONS


# --- the built pages ---


@pytest.fixture(scope="session")
def built(once):
    """The folder of the pages, built as on a machine without a network, and what was said."""
    folder = once("pages", build)
    return folder / "html", json.loads((folder / "said.json").read_text())


# A garbage collector that looks at all pages again and again takes a sixth of the time
SPHINX = """
import gc, sys
from sphinx.cmd.build import main
gc.disable()
sys.exit(main(sys.argv[1:]))
"""


def build(folder):
    options = ["-W", "-n", "-q", "--keep-going", "-b", "html", "-d", folder / "doctrees"]
    run = subprocess.run(
        [sys.executable, "-c", SPHINX, *options, DOCS, folder / "html"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    (folder / "said.json").write_text(json.dumps([run.returncode, run.stderr]))


@pytest.mark.slow
def test_the_pages_build_without_a_warning(built):
    assert built[1] == [0, ""]


@pytest.mark.slow
@pytest.mark.parametrize("name", rotary.__all__)
def test_every_public_name_is_in_the_reference(built, name):
    pages = "".join(path.read_text(encoding="utf-8") for path in (built[0] / "api").glob("*.html"))
    assert f'id="rotary.{name}"' in pages or f'id="module-rotary.{name}"' in pages


@pytest.mark.slow
def test_a_built_page_loads_nothing_from_elsewhere(built):
    pages = list(built[0].rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert not re.findall(
            r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//", text
        )


@pytest.mark.slow
def test_a_link_of_a_built_page_leads_to_a_page_and_a_picture_is_there(built):
    """Links between pages are checked here without a network; those to other sites by make."""
    pages = {path: path.read_text(encoding="utf-8") for path in built[0].rglob("*.html")}
    marks = {path.resolve(): {*re.findall(r' id="([^"]+)"', text)} for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        for target in re.findall(r'(?:href|src)="([^":]+)"', text):
            name, _, mark = html.unescape(target).partition("#")
            there = (path.parent / name.split("?")[0] if name else path).resolve()
            if not there.exists() or (mark and there in marks and mark not in marks[there]):
                broken.append(f"{path.relative_to(built[0])}: {target}")
    assert broken == []
    assert len(pages) > 50


@pytest.mark.slow
def test_formulas_are_typeset_and_pictures_have_one_for_each_theme(built):
    text = (built[0] / "how.html").read_text(encoding="utf-8")
    assert text.count('class="math notranslate') > 20
    assert 'src="_static/tex-svg.js' in text
    light, dark = (set(re.findall(rf'class="only-{theme}" src="_images/([\w-]+)\.png', text))
                   for theme in ("light", "dark"))  # fmt: skip
    assert {f"{name}-dark" for name in light} == dark
    assert len(light) == 18


CUT = """() => [...document.querySelectorAll("article pre")]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 80))"""
NARROW = """() => [...document.querySelectorAll("article td:has(code)")]
    .filter(e => e.clientWidth < 100).map(e => e.textContent.slice(0, 80))"""


@pytest.mark.slow
def test_no_line_of_code_is_cut_on_a_desk_or_on_a_phone(built, tab):
    """The pages with the longest lines, at 1280 and at 390 pixels."""
    names = ["guide", "identify", "tutorials/gpt", "tutorials/extend", "api/core", "commands"]
    names += ["use_in/index", "use_in/vllm"]  # and the table with the longest code
    for name in names:
        tab.goto((built[0] / f"{name}.html").as_uri())
        for width in (1280, 390):
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate(CUT) == [], (name, width)
            assert width > 390 or tab.evaluate(NARROW) == [], name
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, name


@pytest.mark.slow
def test_an_argument_table_becomes_a_list(built):
    text = (built[0] / "api" / "core.html").read_text(encoding="utf-8")
    rotate = text.split('id="rotary.rotate"')[1].split('id="rotary.rerotate"')[0]
    terms = re.findall(r"<dt><code[^>]*><span class=\"pre\">([^<]*)", rotate)
    named = ["spec", "layout", "out_layout", "rotary_dim", "seq_dim", "positions", "conjugate"]
    assert terms == ["x", "cos,", *named, "out"]
