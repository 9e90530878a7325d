"""docs/numbers.md and the README show the committed results, by the commands that print them."""

import json
import re
import sys
from pathlib import Path

import pytest
from benchmarks import command, decode, gpu, gpu_page, run

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = (ROOT / "docs" / "numbers.md").read_text()
README = (ROOT / "README.md").read_text().split("\n## Numbers\n")[1].split("\n## ")[0]
LIMITS = NUMBERS.split("\n## Limits on a CPU\n")[1].split("\n## ")[0]
NEWEST = command.newest(command.RESULTS)


@pytest.fixture
def report():
    return json.loads(NEWEST.read_text())


def test_the_readme_shows_tables_of_the_page_with_their_dates():
    tables = [text for text in README.split("\n\n") if text.startswith("|")]
    assert len(tables) == 3
    for text in [*tables, *re.findall(r"^.*[Mm]easured .*:$", README, re.MULTILINE)]:
        assert text.removeprefix("**On a GPU** a call").removeprefix(" is one launch. ") in NUMBERS


def test_the_tables_of_long_prompts_are_those_that_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run", "--table"])
    run.main()
    assert capsys.readouterr().out in NUMBERS, "print them by python -m benchmarks.run --table"


def test_the_table_of_one_token_is_that_of_the_newest_results(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["decode", "--table"])
    decode.main()
    assert capsys.readouterr().out in NUMBERS, "print it by python -m benchmarks.decode --table"


def test_the_page_has_no_other_table_of_numbers(report):
    token = json.loads(max(command.RESULTS.glob("????-??-??-decode.json")).read_text())
    on_gpu = json.loads(max(command.RESULTS.glob("????-??-??-gpu.json")).read_text())
    tables = decode.short_table(token) + "\n" + run.short_tables(report)
    tables += "\n" + "\n".join(gpu_page.short_tables(on_gpu["rows"]))
    shown = [line for line in NUMBERS.replace(LIMITS, "").splitlines() if line.startswith("|")]
    assert shown == [line for line in tables.splitlines() if line.startswith("|")]


def test_the_tables_of_a_gpu_are_those_that_the_command_prints(monkeypatch, capsys):
    results = max(command.RESULTS.glob("????-??-??-gpu.json"))
    monkeypatch.setattr(sys, "argv", ["gpu", "--table", str(results), "--out", "build/none"])
    monkeypatch.setattr(command, "write", lambda *_: None)
    gpu.main()
    page = capsys.readouterr().out
    assert results.with_suffix(".md").read_text() == page
    report = json.loads(results.read_text())
    for table in "\n".join(gpu_page.short_tables(report["rows"])).split("\n\n"):
        assert table in NUMBERS
        assert table in page
    assert f"python -m benchmarks.gpu --table benchmarks/results/{results.name}" in NUMBERS
    assert f"benchmarks/results/{results.stem}.md" in NUMBERS


def test_the_page_leads_to_the_results_of_these_numbers(report):
    assert f"benchmarks/results/{report['date']}.md" in NUMBERS
    assert report["date"] == NEWEST.stem


def test_the_page_is_that_of_its_numbers(report):
    assert NEWEST.with_suffix(".md").read_text() == run.as_markdown(report)


def test_the_bars_of_the_page_are_those_of_its_medians(report):
    """All 44 of a whole run: a case whose name has changed would leave its limit out."""
    names = ("bar", "measured", "limit", "met")
    bars = [
        dict(zip(names, each, strict=True))
        for each in run.verdicts(report["milliseconds"], run.FULL)
    ]
    assert bars == report["bars"]
    assert len(bars) == 44


def met(page):
    """What a page of results counts: (met, all) of its bars, or of out= and then of in place."""
    if counts := re.findall(r"(\d+) of (\d+) within the bar", page):
        return counts
    met, missed = page.count("| met |"), page.count("| **missed** |")
    return [(str(met), str(met + missed))]


def test_the_limits_that_are_met_are_counted_by_the_pages_of_results():
    linked = re.findall(r"\[(\d+) of (\d+)\]\((\S+\.md)\)(?: \| (\d+) of (\d+))?", LIMITS)
    assert len(linked) == 9
    for *told, path, second, of in linked:
        counts = met((ROOT / "docs" / path).read_text())
        assert counts[0] == tuple(told), path
        assert not second or counts[1] == (second, of), path


def test_the_limits_are_those_of_the_newest_results():
    for name in ("sizes", "avx2", "avx2-sizes", "avx2-decode", "decode"):
        newest = max(command.RESULTS.glob(f"????-??-??-{name}.md"))
        assert f"benchmarks/results/{newest.name})" in LIMITS


def test_a_number_that_changes_changes_the_table(report):
    before = run.short_tables(report)
    for cases in report["milliseconds"].values():
        for case in cases:
            if case != "copy":
                cases[case] *= 1.5
    old, new = (set(re.findall(r"^\|.*\d.*\|$", text, re.MULTILINE))
                for text in (before, run.short_tables(report)))  # fmt: skip
    assert len(old) == len(new) == 11
    assert {line for line in old & new if not line.startswith("| seq ")} == set()


def test_the_share_of_rope_in_a_model_is_that_of_the_newest_measurement():
    page = max(command.RESULTS.glob("????-??-??-patch.md"))
    share = re.search(r"(\d+\.\d %) of the prefill of four Llama-3-8B-wide layers", NUMBERS)
    row = re.search(r"^\| prefill of 4096 tokens \|.*\| (.*) \|$", page.read_text(), re.MULTILINE)
    assert share[1] == row[1]
    assert f"benchmarks/results/{page.name}" in NUMBERS


@pytest.mark.parametrize(
    ("pages", "model"), [("*-cuda-patch.md", "Llama"), ("*-cuda-qwen3-patch.md", "Qwen3")]
)
def test_the_speed_of_a_patched_model_on_a_gpu_is_that_of_the_newest_measurement(pages, model):
    page = max(command.RESULTS.glob(pages))
    ratios = re.findall(r"^\| (?:prefill|decoding) .* \| (\d\.\d+) \| [\d.]+ % \|$",
                        page.read_text(), re.MULTILINE)  # fmt: skip
    told = rf"{model} of 32 layers\b.*? is (\S+) times .*? (\S+) times for each"
    assert [*re.search(told, " ".join(NUMBERS.split())).groups()] == ratios
    assert f"benchmarks/results/{page.name}" in NUMBERS
    if model == "Llama":
        short = re.search(told, " ".join(README.split())).groups()
        assert [*short] == [f"{float(ratio):.2f}" for ratio in ratios]


def test_jax_on_a_gpu_is_to_the_formula_as_the_newest_measurement_says():
    page = max(command.RESULTS.glob("*-cuda-jax.md"))
    ratios = dict(
        re.findall(r"^\| (.*) \| rotary \| .* \| (\d\.\d+) \|$", page.read_text(), re.MULTILINE)
    )
    quicker = float(ratios.pop("bfloat16 interleaved forward"))
    told = re.search(r"65,536 tokens takes as long as .*? or (\S+) of it", NUMBERS, re.DOTALL)
    assert told[1] == f"{1 / quicker:.2f}"
    assert len(ratios) == 7
    assert all(abs(float(ratio) - 1) <= 0.02 for ratio in ratios.values())
    assert f"benchmarks/results/{page.name}" in NUMBERS
