"""The versions that are promised, on every page and in every job, are those of pyproject.toml."""

import ast
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import conftest
import pytest
from tools import versions

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "stability.md").read_text()
NOX = ast.parse((ROOT / "noxfile.py").read_text())
NAMES = {"numpy": "NumPy", "numba": "Numba", "torch": "PyTorch", "jax": "JAX"}


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_page_promises_the_lower_bounds(project):
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], extras["torch"][0], extras["jax"][0]]
    floors = dict(versions.floor(each).split("==") for each in [*wanted, *extras["transformers"]])
    for name in versions.LIBRARIES:
        assert f"| {NAMES.get(name, name)} | {floors[name]} or newer" in PAGE
    pythons = versions.pythons(project)
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in PAGE
    assert project["requires-python"] == f">={pythons[0]}"


def test_the_workflow_runs_every_session(project):
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    listed = text[text.index("session:") : text.index("steps:", text.index("session:"))]
    sessions = [f"newest-{each}" for each in versions.pythons(project)] + ["oldest"]
    sessions += [f"absent(library='{name}')" for name in ("torch", "numba", "jax")]
    assert re.findall(r"- (\S+)$", listed, re.MULTILINE) == sessions
    assert ".ci/run" in text
    for name in ("newest", "oldest", "absent", "newest_transformers"):
        assert any(isinstance(n, ast.FunctionDef) and n.name == name for n in NOX.body)
    assert "newest_transformers" in text


def test_every_file_of_a_session_exists():
    lists = [
        node.value
        for node in NOX.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("TESTS")
    ]
    names = [n.value for each in lists for n in ast.walk(each) if isinstance(n, ast.Constant)]
    assert len(names) > 40
    assert len(set(names)) == len(names)
    for name in names:
        assert (ROOT / "tests" / f"test_{name}.py").is_file(), name


def test_the_table_adds_up_what_ran(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(versions, "RESULTS", tmp_path)
    monkeypatch.setattr(versions, "installed", lambda: {"python": "3.10.1", "jax": "0.4"})
    versions.main(["oldest"])
    assert json.loads((tmp_path / "oldest.json").read_text())["jax"] == "0.4"
    for number in ("1", "2"):
        suite = f'<testsuite tests="9" skipped="{number}" failures="1" errors="0"/>'
        (tmp_path / f"oldest.{number}.xml").write_text(f"<testsuites>{suite}</testsuites>")
    capsys.readouterr()
    versions.main([])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "| oldest |  | 3.10.1 |  |  |  | 0.4 |  | 13 | 3 | 2 |"
    )
    assert sys.version.startswith(versions.platform.python_version())


class Case(NamedTuple):
    nodeid: str


def test_a_tenth_has_every_test_and_the_same_cases_again():
    names = {"large": 300, "small": 20, "alone": 1}
    cases = [Case(f"{name}[{n}]") for name, count in names.items() for n in range(count)]
    kept, dropped = cases.copy(), []
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    config = SimpleNamespace(getoption=lambda name: name == "tenth", hook=hook)
    conftest.pytest_collection_modifyitems(config, kept)
    counts = {name: sum(case.nodeid.startswith(name) for case in kept) for name in names}
    assert counts == {"large": 30, "small": 8, "alone": 1}
    assert kept == [case for case in cases if case not in dropped]  # in their order
    again = cases.copy()
    conftest.pytest_collection_modifyitems(config, again)
    assert again == kept
    config.getoption = lambda name: False
    conftest.pytest_collection_modifyitems(config, again)
    assert again == kept
