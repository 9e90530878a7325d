"""Numbers that are printed hold as they are printed: bases on pages, in commands and pictures."""

import functools
import importlib.util
import json
import math
import re
from decimal import Decimal
from pathlib import Path

import pytest
from command import document, kept
from tools import make_model_table

import rotary
from rotary import Rotary, plots
from rotary.analysis.bounds import first_failure
from rotary.analysis.search import min_base, rounded_up, safe_base
from rotary.analysis.spectrum import before_scaling
from rotary.configs import choose
from rotary.explorer import models, page, views
from rotary.explorer.side import Side, look
from rotary.plan import plan

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")]
PAGES += [*(ROOT / "examples").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
CODE = sorted(Path(rotary.__file__).parent.rglob("*.py"))
NUMBER = re.compile(r"(?<![\w.,])\d[\d,_]*(?:\.\d+)?(?:e\+?\d+)?(?![\d_]|\.\d)")
LENGTH = re.compile(r"(\d+)([kM])")
Base = tuple[str, int, int]  # as it is printed, and the context and the head_dim it is for


@functools.cache
def passes(base: float, context: int, head_dim: int = 128) -> bool:
    """Whether a base that is read from a page, or pasted, has B_m >= 0 at every distance."""
    return first_failure(Rotary(head_dim=head_dim, base=base), context) is None


def tokens(cell: str, k: int = 1024) -> int:
    """64k, 1M."""
    count, unit = LENGTH.fullmatch(cell).groups()
    return int(count) * k * (1 if unit == "k" else 1024)


def tables(name: str) -> list[list[list[str]]]:
    """The tables of a page in docs/results: rows of cells, without the line below the heads."""
    text = (ROOT / "docs" / "results" / f"{name}.md").read_text()
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.split("\n")]
        found.append([rows[0], *rows[2:-1]])
    return found


def bases_of_the_tables() -> tuple[list[Base], list[Base]]:
    """The bases that the tables call smallest, and those that they call safe."""
    smallest, safe = [], []
    ((heads, *rows),) = tables("table2")
    for row in rows:
        cells = dict(zip(heads, row, strict=True))
        smallest.append((cells["b\\*"].strip("*"), tokens(cells["L"]), 128))
        smallest.append((cells["b\\*, k = 1000"], tokens(cells["L"], 1000), 128))
        safe.append((cells["safe base"], tokens(cells["L"]), 128))
    least, _, above = tables("heads")
    for found, ((_, *widths), *rows) in ((smallest, least), (safe, above)):
        for length, *cells in rows:
            for width, cell in zip(widths, cells, strict=True):
                head_dim = int(width.removeprefix("d = "))
                found.append((cell.split(" ")[0], tokens(length), head_dim))
    return smallest, safe


# --- bases ---


def test_every_base_of_the_tables_passes_as_it_is_printed():
    smallest, safe = bases_of_the_tables()
    assert (len(smallest), len(safe)) == (2 * 11 + 7 * 8, 11 + 7 * 6)
    assert [each for each in smallest + safe if not passes(float(each[0]), *each[1:])] == []


def rounds(printed: Decimal, base: Decimal) -> bool:
    """Whether a number is this base, rounded up, down or to the nearest."""
    return abs(printed - base) <= Decimal(1).scaleb(printed.as_tuple().exponent)


def test_every_page_and_docstring_prints_a_smallest_base_so_that_it_passes():
    """Wherever a number is a smallest base of the tables, rounded, it must be rounded up."""
    smallest = [(Decimal(text), where) for text, *where in bases_of_the_tables()[0]]
    seen, wrong = [], []
    for path in (*PAGES, *CODE):
        for line in path.read_text(encoding="utf-8").splitlines():
            for text in NUMBER.findall(line):
                printed = Decimal(re.sub("[,_]", "", text))
                if "." not in text:
                    printed = printed.normalize()  # 323,740 has five digits
                if len(printed.as_tuple().digits) < 4:
                    continue
                places = [where for base, where in smallest if rounds(printed, base)]
                if not places or f"{text} fails" in line:
                    continue
                seen.append(path)
                if not any(passes(float(printed), *where) for where in places):
                    wrong.append(f"{path.relative_to(ROOT)}: {text} at {places}")
    assert len(seen) > 80
    assert len(set(seen)) > 6
    assert wrong == []


def read(pattern: str, text: str) -> float:
    """The one number that a pattern finds in a text whose lines may be broken anywhere."""
    (found,) = re.findall(pattern, " ".join(text.split()))
    return float(found.replace(",", ""))


SMALLEST = r"passes[^.;]*? is ([\d,.]*\d) \(certified, rounded up\)"
SAFE = r"every base tested from ([\d,.]*\d) on passes"
PLANS = [(1500, 128), (1024, 64), (46, 64)]


@pytest.mark.parametrize(
    ("context", "head_dim", "trained"),
    [*((*each, None) for each in PLANS), (1024, 64, 768), (46, 64, 40)],
)
def test_the_bases_that_a_plan_prints_pass_when_they_are_pasted(
    main, monkeypatch, context, head_dim, trained
):
    kept(monkeypatch, "rotary.plan", "plan")
    arguments = ["plan", "--context", str(context), "--head-dim", str(head_dim), "--base", "50"]
    arguments += ["--trained", str(trained)] if trained else []
    shown = main(*arguments).out
    table, reason = shown.split("With the present RoPE (base 50,")
    reason = " ".join(reason.split())
    read_bases = {
        "smallest": read(r"smallest base ([\d,.]+), certified", table),
        "safe": read(r"safe base ([\d,.]+);", table),
        "smallest, in words": read(SMALLEST, reason),
        "safe, in words": read(SAFE, reason),
    }
    if not trained:
        read_bases["recommended"] = read(r"recommended base: default, base ([\d,.]+)", table)
        read_bases["in words"] = read(r"Train with rope_theta ([\d,.]*\d), which", reason)
        written = json.loads(shown[shown.index("{") :])["rope_parameters"]["rope_theta"]
        assert read_bases["recommended"] == read_bases["in words"] == written
    found = document(main(*arguments, "--json"))
    read_bases |= {name: found[name] for name in ("min_base", "safe_base")}
    read_bases["certificate"] = found["min_base_certificate"]["base"]
    read_bases["search"] = found["safe_base_search"]["base"]
    assert [name for name, base in read_bases.items() if not passes(base, context, head_dim)] == []
    assert read_bases["smallest"] == pytest.approx(found["min_base"], rel=1e-5)


@pytest.mark.parametrize(("context", "model"), [(1024, "llama-2-7b"), (2048, "gemma-7b")])
def test_the_smallest_base_that_the_page_tells_passes_when_it_is_pasted(context, model):
    seen = look(Side(model=model), context)
    base = read(r"With base ([\d,.]+) a similar key", page.smallest_base(seen))
    assert passes(base, context, seen.spec.head_dim)
    assert base == pytest.approx(min_base(context, seen.spec.head_dim).base, rel=1e-7)


def test_the_bases_in_the_legend_of_a_comb_pass_when_they_are_pasted():
    marks = {"smallest base": min_base(1100).base, "safe base": safe_base(1100).base, "Men": 4e3}
    figure = plots.comb(1100, [2e3, 4e3, 9e3], marks=marks)
    shown = [text.get_text() for text in figure.legends[0].get_texts()][2:]
    assert shown == ["smallest base 6,069.03", "safe base 7,611.56", "Men 4,000 fails"]
    assert passes(6069.03, 1100)
    assert passes(7611.56, 1100)


@pytest.mark.parametrize("digits", [1, 2, 3, 5, 9, 17])
@pytest.mark.parametrize(("context", "head_dim"), PLANS)
def test_a_base_that_is_rounded_up_is_the_next_one_that_passes(context, head_dim, digits):
    for base in (min_base(context, head_dim).base, 1e6 / 3):
        shown = rounded_up(base, context, head_dim, digits=digits)
        assert base <= float(shown)
        assert passes(float(shown), context, head_dim)
        count = len(shown.as_tuple().digits)
        assert count >= digits
        assert float(shown) - base <= 10.0 ** (math.floor(math.log10(base)) - count + 1) * 1.001
        for fewer in range(digits, count):  # each number of fewer digits fails
            unit = Decimal(1).scaleb(math.floor(math.log10(base)) - fewer + 1)
            above = (Decimal(base) / unit).to_integral_value("ROUND_CEILING") * unit
            assert not passes(float(above), context, head_dim)


def test_a_base_where_nothing_fails_is_printed_as_it_is():
    assert rounded_up(1.0, 4096, 128, rotary_dim=64) == 1
    found = plan(4096, Rotary(head_dim=128, rotary_dim=64))
    assert (found.shown(found.min_base.base), found.shown(found.safe_base.base)) == ("1", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (26_952.3, 4096),
            r"base 26952.3 has B_m < 0 at a distance up to 4,096, with head_dim 128",
        ),
        ((0.5, 4096), "a base must be in 1 .. 1e37, got 0.5"),
        ((math.nan, 4096), "a base must be in 1 .. 1e37, got nan"),
        ((3e4, 0), "context must be in 1"),
        ((3e4, 4096, 127), "head_dim must be even, got 127"),
    ],
)
def test_what_does_not_pass_cannot_be_rounded_up(arguments, message):
    with pytest.raises(ValueError, match=message):
        rounded_up(*arguments)


# --- models ---


def published_reach() -> dict[str, dict[str, str]]:
    """Model and layer type -> the cells of docs/results/models.md, by their heads."""
    ((heads, *rows),) = tables("models")
    cells = [dict(zip(heads, row, strict=True)) for row in rows]
    return {", ".join(filter(None, (row["model"], row["layers"]))): row for row in cells}


@pytest.fixture(scope="module")
def pictures():
    """tools/make_pictures.py, as a module."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "make_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_models_is_what_its_tool_writes():
    assert make_model_table.page() == (ROOT / "docs" / "models.md").read_text()


def test_the_gallery_shows_the_numbers_of_the_table_of_models(pictures):
    panel = pictures.gallery_picture().axes[0]
    rows: dict[float, dict[float, str]] = {}
    for text in panel.texts:
        x, y = text.get_position()
        rows.setdefault(y, {})[x] = text.get_text()
    places = {heading: x for x, heading in rows[-1].items()}
    published, compared = published_reach(), []
    for row in (row for y, row in rows.items() if y >= 0):
        name = row[places["model"]]
        name += "_attention" if ", " in name else ""
        for heading, column in (("first failure", "F"), ("base", "base")):
            assert row[places[heading]] == published[name][column], name
        compared.append(name)
    assert len(compared) == 16
    assert published["phi-3-mini-128k"]["F"] == "46,828"
    assert "after scaling" in rows[-2][0]


def test_wavelengths_show_the_critical_dimensions_of_the_table_of_models(pictures):
    figure = pictures.PICTURES["wavelengths"]()
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    published = published_reach()
    before = published["llama-3-8b"]["critical dimension"]
    after = published["llama-3.1-8b"]["critical dimension"]
    assert (before, after) == ("70", "70")
    assert shown[:2] == [
        f"Llama 3 8B, base 500,000, critical dimension {before}",
        f"Llama 3.1 8B, base 500,000, critical dimension {after} before scaling",
    ]


def test_other_pictures_of_models_show_the_first_failures_of_the_table(pictures):
    names = {"Llama 2 7B, base 10,000": "llama-2-7b", "Llama 3 8B, base 500,000": "llama-3-8b"}
    names["Llama 3.1 8B, base 500,000"] = "llama-3.1-8b"
    names["Qwen2.5 7B, base 1,000,000"] = "qwen2.5-7b"
    wanted = {f"{name}: first failure {published_reach()[key]['F']}" for name, key in names.items()}
    for draw in (pictures.PICTURES["similarity"], pictures.base_bound_picture):
        shown = [text.get_text() for text in draw().legends[0].get_texts()]
        assert wanted <= set(shown)


def test_the_page_counts_the_critical_dimensions_of_the_table_of_models():
    for name, row in published_reach().items():
        model, *kind = name.split(", ")
        if choose(ROOT / "tests" / "configs" / f"{model}.json", *kind).window:
            continue  # the page knows no window
        made = models.published(name)
        found = views.wavelengths(look(Side(model=name), made.context))
        assert found.words.endswith(f"dimension is {row['critical dimension']}."), name
        before = before_scaling(made.spec)  # MiniCPM3 was trained with its factors
        scaled = made.spec != before and model != "minicpm3-4b"
        assert ("Before scaling" in found.words) == scaled, name
