"""The rule of every comparison: the choice of rates, paired intervals, numbers of the pages."""

import importlib
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from experiments.lab import report, results, sweep
from experiments.lab.intervals import Difference, difference, mean, quantile
from experiments.lab.job import of_this_recipe
from experiments.lab.staged import TRAINED
from experiments.lab.sweep import LADDER, Run
from PIL import Image

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.parent.name for path in ROOT.glob("experiments/e*/run.py"))


def module(name):
    return importlib.import_module(f"experiments.{name}.run")


def rows_of(name):
    return results.rows(module(name).FOLDER / "results.jsonl")


# --- intervals ---


def test_the_quantile_is_that_of_student():
    """Closed forms for 1 and 2 degrees of freedom, and the integral of the density for others."""
    assert quantile(1) == pytest.approx(math.tan(math.pi * 0.95 / 2), rel=1e-12)
    assert quantile(2) == pytest.approx(0.95 * (2 / (1 - 0.95**2)) ** 0.5, rel=1e-12)
    for freedom in range(3, 31):
        t = np.linspace(-quantile(freedom), quantile(freedom), 20_001)
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2)
        density = (
            scale / math.sqrt(freedom * math.pi) * (1 + t * t / freedom) ** -((freedom + 1) / 2)
        )
        assert np.trapezoid(density, t) == pytest.approx(0.95, abs=1e-6), freedom


def test_a_difference_is_paired_by_seed_and_says_what_it_does_not_resolve():
    own, other = {0: 5.0, 1: 1.0, 2: 3.0}, {2: 2.0, 0: 4.5, 1: 0.0}  # another order of the seeds
    found = difference(own, other)
    half = quantile(2) * np.std([0.5, 1.0, 1.0], ddof=1) / 3**0.5
    assert found == pytest.approx((2.5 / 3, 2.5 / 3 - half, 2.5 / 3 + half))
    assert found.is_resolved
    assert found.told(".2f") == "+0.83 [+0.12, +1.55]"
    crossing = difference({0: 1.0, 1: -1.0, 2: 1.0}, dict.fromkeys(range(3), 0.0))
    assert crossing.told(".1f") == "+0.3 [-2.5, +3.2], not resolved"
    assert Difference(-0.00001, -0.00002, 0.0).told(".2f") == "+0.00 [+0.00, +0.00], not resolved"
    with pytest.raises(ValueError, match=r"two runs of one seed, got \[0\] and \[0, 1\]"):
        difference({0: 1.0}, {0: 1.0, 1: 2.0})


def test_one_seed_and_a_run_that_diverged_resolve_nothing():
    assert mean({0: 1.0}).told(".1f") == "+1.0 [-inf, +inf], not resolved"
    assert mean({0: 1.0, 1: math.inf}).told() == "diverged"
    assert not mean({0: 1.0, 1: math.inf}).is_resolved
    assert mean({0: 2.0, 1: 2.0}) == (2.0, 2.0, 2.0)


def test_an_interval_holds_the_true_mean_19_times_of_20():
    chance = np.random.default_rng(0)
    drawn = chance.normal(0.3, 1.0, (2000, 5))
    held = [low <= 0.3 <= high for _, low, high in (mean(dict(enumerate(x))) for x in drawn)]
    assert 0.935 < np.mean(held) < 0.965


# --- the choice of a learning rate ---


def trained(run, validation, bits=9.0):
    """A row of a run that ended at these bits; None where it diverged."""
    found = {"method": run.method, "recipe": {"learning_rate": run.rate, "seed": run.seed}}
    if validation is None:
        return {"run": found, "looks": [], "diverged": 3}
    return {"run": found, "looks": [{"bits": bits, "validation": validation}]}


def swept(best, rates, seeds, noise=lambda run: 0.0):
    """The runs of a sweep, and its rows, where validation bits rise with the distance to a best."""
    rows, asked = [], []
    for run in sweep.runs([*best], rates, seeds, rows):
        apart = abs(math.log(run.rate / best[run.method]))
        rows.append(trained(run, 2 + apart + noise(run) if run.rate < 1 else None))
        asked.append(run)
    return asked, rows


def test_rates_are_added_until_the_best_is_between_two_others():
    best = {"inside": 3e-3, "above": 1e-1, "below": 1e-4}
    asked, rows = swept(best, (1e-3, 3e-3, 1e-2), range(5))
    tried = {name: list(sweep.validation(rows, name)) for name in best}
    assert tried["inside"] == [1e-3, 3e-3, 1e-2]
    assert tried["above"] == [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
    assert tried["below"] == [3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
    assert {name: sweep.best_rate(rows, name) for name in best} == best
    for name, rate in best.items():
        assert list(sweep.chosen(rows, name)) == [0, 1, 2, 3, 4]
        assert sweep.choosing(rows, name) == [0, 1]
        assert not report.is_at_edge(rows, name)
        assert {run.rate for run in asked if run.method == name and run.seed > 1} == {rate}
    assert len(asked) == len(set(asked)) == 2 * (3 + 6 + 6) + 3 * 3


def test_at_the_end_of_the_ladder_the_edge_stays_and_is_told():
    _, rows = swept({"a": 1e-9}, (1e-3, 3e-3, 1e-2), [0])
    assert sweep.best_rate(rows, "a") == LADDER[0]
    assert "The best rate is the least or the greatest tried for: a." in report.recipe(rows, ["a"])


def test_the_rate_is_chosen_by_the_mean_of_two_seeds_and_more_seeds_keep_it():
    def noise(run):
        return 2.0 if (run.seed, run.rate) == (0, 3e-3) else 0.0  # unlucky on the first seed

    _, rows = swept({"a": 3e-3}, (1e-3, 3e-3, 1e-2), [0], noise)
    assert sweep.best_rate(rows, "a") != 3e-3
    _, rows = swept({"a": 3e-3}, (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), [0, 1], noise)
    assert sweep.best_rate(rows, "a") == 3e-3
    again = list(sweep.runs(["a"], (1e-3, 3e-3, 1e-2), [0, 1], rows))
    assert set(again) >= {Run("a", 3e-2, 0), Run("a", 3e-4, 1)}, "rates that were tried count"


def test_the_reported_bits_have_no_part_in_the_choice():
    rows = [
        trained(Run("a", rate, 0), validation, bits)
        for rate, validation, bits in ((1e-3, 2.0, 9.0), (3e-3, 3.0, 1.0), (1e-2, 4.0, 2.0))
    ]
    assert sweep.best_rate(rows, "a") == 1e-3
    shown = report.recipe(rows, ["a"])
    assert "seed 0 alone, on the validation part, which is neither learned from" in shown
    assert "| a | 2.000 | 3.000 | 4.000 | 0.001 |" in shown
    for row in rows:
        del row["looks"][0]["validation"]
    assert sweep.best_rate(rows, "a") == 3e-3
    assert "on the very data that are reported, which favours" in report.recipe(rows, ["a"])


def test_rows_of_another_recipe_are_refused():
    rows = [trained(Run("a", 1e-3, seed), 2.0) for seed in (0, 1)]

    def settings_of(run):
        steps = {"steps": 100} if run.seed else {}
        recipe = {"learning_rate": run.rate, "seed": run.seed, **steps}
        return {"method": run.method, "recipe": recipe}

    of_this_recipe(rows[:1], settings_of)
    with pytest.raises(ValueError, match=r"another recipe, a 0\.001 seed 1; move the file away"):
        of_this_recipe(rows, settings_of)


# --- what is committed ---


def settings_today(name, rows):
    """What today's code says that the run of each row follows from."""
    of = module(name)
    for row in rows:
        run, recipe = row["run"], row["run"]["recipe"]
        subject = SimpleNamespace(name=run.get("text"), sha256=run["sha256"])
        asked = Run(run.get("method", ""), recipe["learning_rate"], recipe["seed"])
        if hasattr(of, "EXPERIMENT"):
            start = run.get("trained", recipe)["learning_rate"]
            yield row, of.settings_of(of.FULL, subject, asked, start)
        else:
            yield row, of.settings_of(of.FULL, subject, asked)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "e6_shift"])
def test_committed_rows_are_of_todays_recipe(name):
    same = [results.is_done([row], wanted) for row, wanted in settings_today(name, rows_of(name))]
    assert same
    assert all(same)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "e6_shift"])
def test_committed_rows_have_five_seeds_and_a_best_rate_inside_of_three_or_more(name):
    rows = rows_of(name)
    assert sweep.has_validation([row for row in rows if row["run"]["method"] != "untuned"])
    methods = {row["run"]["method"] for row in rows} - {"untuned"}
    for method in methods:
        assert len(sweep.chosen(rows, method)) >= 5, method
        assert len(sweep.choosing(rows, method)) >= 2, method
        assert len(sweep.validation(rows, method)) >= 3, method
        assert not report.is_at_edge(rows, method), method
    if TRAINED in methods:
        assert len([row for row in rows if row["run"]["method"] == "untuned"]) >= 5


def test_a_text_is_moved_in_five_models_that_differ_by_their_seed_alone():
    rows = rows_of("e6_shift")
    recipes = [row["run"].pop("recipe") for row in rows]
    assert [recipe.pop("seed") for recipe in recipes] == list(range(5))
    assert all(recipe == recipes[0] for recipe in recipes)
    assert all(row["run"] == rows[0]["run"] for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_both_pictures_are_drawn_from_the_rows_that_are_there(name):
    folder = module(name).FOLDER
    (picture,) = re.findall(r"!\[[^\]]*\]\((\w+)\.png\)", (folder / "README.md").read_text())
    for stem in (picture, f"{picture}-dark"):
        of = Image.open(folder / f"{stem}.png").text.get("Rows")
        assert of == results.digest(folder / "results.jsonl"), (
            f"{stem}.png is older than its rows: python -m tools.make_experiments {name}"
        )


NUMBER = re.compile(r"(?<![\w.^])[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?(?![\w^]|\.\d)")
INTERVAL = re.compile(r"[-+][\d.]+ \[[-+][\d.]+, [-+][\d.]+\]")
COMPARES = re.compile(
    r"\b(better|worse|lower|higher|fewer|faster|slower|earlier|later|ahead|behind|helps?|hurts?|"
    r"gains?|beats?|before all|the same as)\b"
)


def section(name, title):
    text = (module(name).FOLDER / "README.md").read_text()
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def numbers(text):
    """The numbers of a text, without signs: "0.25 better" tells of a difference of -0.25."""
    return {number.lstrip("+-") for number in NUMBER.findall(text)}


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_conclusion_is_one_that_the_command_printed(name):
    printed = results.shown(module(name).FOLDER / "README.md")
    told, recipe = section(name, "What it shows"), section(name, "What was run")
    assert INTERVAL.findall(told) or "not resolved" in told
    for interval in INTERVAL.findall(" ".join(told.split())):
        assert interval in printed
    missing = numbers(told) - numbers(printed)
    assert {number for number in missing if "." in number} == set()
    assert missing - numbers(recipe) == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_conclusion_that_compares_has_an_interval_or_is_not_resolved(name):
    told = " ".join(section(name, "What it shows").split())
    for sentence in re.split(r"(?<=[.:])\s+(?=[-A-Z*`])", told):
        if COMPARES.search(sentence):
            assert INTERVAL.search(sentence) or "not resolved" in sentence, sentence


def claim(name):
    """The row of a claim in docs/paper.md."""
    (row,) = re.findall(rf"^\| {name}\. .*$", (ROOT / "docs/paper.md").read_text(), re.MULTILINE)
    return row


@pytest.mark.parametrize("name", ["B20", "B21"])
def test_what_the_page_of_the_papers_says_of_an_experiment_is_printed_there(name):
    told = claim(name)
    folders = re.findall(r"\]\(\.\./experiments/(\w+)\)", told)
    assert folders
    printed = " ".join(results.shown(module(folder).FOLDER / "README.md") for folder in folders)
    assert INTERVAL.findall(told)
    for interval in INTERVAL.findall(told):
        assert interval in printed
    decimals = {number for number in numbers(told) if "." in number}
    assert decimals <= numbers(printed)


def test_what_the_readme_says_of_moving_a_text_is_what_the_rows_say():
    of, rows = module("e6_shift"), rows_of("e6_shift")
    changed = {
        scheme: np.mean([*of.seen(rows, scheme, "changed", 2**24).values()])
        for scheme in ("exact angles", "float32 angles")
    }
    told = " ".join((ROOT / "README.md").read_text().split())
    share = re.search(r"another byte in (\d+) % of the places with float32 angles", told).group(1)
    assert changed["exact angles"] == 0
    assert round(100 * changed["float32 angles"]) == int(share)
