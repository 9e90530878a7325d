"""What a release needs and a quick test can hold; `make release` builds it and tries the rest."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tools import release, smoke

import rotary

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer reads TOML")

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NUMBER = rotary.__version__


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- the metadata ---


def test_the_version_stands_in_one_place():
    assert release.version() == NUMBER
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    assert not re.search(r"^version:", text_of("CITATION.cff"), re.MULTILINE)


def test_the_first_section_of_the_changelog_is_of_this_version():
    first = re.search(r"^## (\S+), (unreleased|\d{4}-\d\d-\d\d)$", text_of("CHANGELOG.md"), re.M)
    assert first
    assert first[1] == NUMBER


def test_the_classifiers_name_every_python_from_the_first_that_is_required():
    named = [
        int(minor) for minor in re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))
    ]
    assert PROJECT["requires-python"] == f">=3.{named[0]}"
    assert named == list(range(named[0], named[-1] + 1))
    assert sys.version_info.minor in named


def test_the_classifiers_say_what_is_shipped():
    kinds = {*PROJECT["classifiers"]}
    assert ("Typing :: Typed" in kinds) == (ROOT / "src" / "rotary" / "py.typed").is_file()
    assert ("Framework :: Pytest" in kinds) == ("pytest11" in PROJECT["entry-points"])
    assert ("Development Status :: 3 - Alpha" in kinds) == NUMBER.startswith("0.")
    for name in PROJECT["license-files"]:
        assert "Apache License" in text_of(name)


def test_the_promised_versions_are_the_lower_bounds():
    """The table of the page, against the requirements and the classifiers."""
    extras = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *(one for each in extras.values() for one in each)]
    bounds = dict(re.fullmatch(r"([a-z]+)>=([\d.]+)", one).groups()
                  for one in required if re.fullmatch(r"[a-z]+>=[\d.]+", one))  # fmt: skip
    page = text_of("docs/stability.md")
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) or newer", page, re.MULTILINE))
    names = {"NumPy": "numpy", "Numba": "numba", "PyTorch": "torch", "JAX": "jax"}
    assert rows == {
        **{name: bounds[package] for name, package in names.items()},
        "transformers": bounds["transformers"],
    }
    first, last = re.search(r"^\| Python \| 3\.(\d+) to 3\.(\d+) \|$", page, re.MULTILINE).groups()
    assert f"Programming Language :: Python :: 3.{last}" in PROJECT["classifiers"]
    assert PROJECT["requires-python"] == f">=3.{first}"


def test_the_page_of_installing_lists_the_extras():
    table = text_of("docs/install.md").split("| extra | for |")[1].split("\n\n")[0]
    assert {*re.findall(r"`([a-z]+)`[,| ]", table)} >= {*PROJECT["optional-dependencies"]} - {
        *("dev", "docs")
    }


def test_no_hint_installs_the_package_from_an_index():
    """It is on none: `pip install 'rotary[plots]'` fails."""
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    hints = re.compile(r"pip install (?:-\S+ )*['\"]?rotary(?![\w./-])")
    assert len(files) > 200
    assert [path.name for path in files if hints.search(path.read_text(encoding="utf-8"))] == []


# --- the files that people look for ---


@pytest.mark.parametrize(
    "name", ["CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "README", "RELEASE", "SECURITY"]
)
def test_a_page_that_people_look_for_is_there(name):
    assert text_of(f"{name}.md").startswith("# ")


def test_the_citation_can_be_read():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation["license"] == PROJECT["license"]
    assert citation["references"][0]["identifiers"][0]["value"] == "arXiv:2104.09864"


def test_every_command_of_make_that_a_page_names_exists():
    targets = {*re.findall(r"^([a-z]+)(?: [a-z]+)?:", text_of("Makefile"), re.MULTILINE)}
    for name in ("RELEASE.md", "CONTRIBUTING.md", "README.md"):
        named = {*re.findall(r"(?:`|^\$ )make ([a-z]+)", text_of(name), re.MULTILINE)}
        assert named
        assert named <= targets | {"quick"}, name


# --- what `make release` checks ---


def test_a_file_that_is_missing_and_one_too_many_are_named():
    wanted = release.wheel_files({"src/rotary/py.typed", "src/rotary/spec.py", "docs/a.md"}, "0.1")
    assert {"rotary/py.typed", "rotary/spec.py"} < wanted
    assert "rotary-0.1.dist-info/licenses/LICENSE" in wanted
    inside = wanted - {"rotary/py.typed"} | {"tests/test_spec.py"}
    assert release.difference("a.whl", inside, wanted) == [
        "a.whl: rotary/py.typed is missing",
        "a.whl: tests/test_spec.py does not belong there",
    ]
    assert release.difference("a.whl", wanted, wanted) == []


def test_the_wheel_is_held_to_the_files_of_the_repository():
    """Every file of the package, with its types and data; no test, picture or experiment."""
    done = subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True)
    if done.returncode:
        pytest.skip("not a checkout")
    wanted = release.wheel_files(release.tracked(), NUMBER)
    assert {"rotary/py.typed", "rotary/configs/models.json", "rotary/explorer/page.html"} < wanted
    assert {name.partition("/")[0] for name in wanted} == {"rotary", f"rotary-{NUMBER}.dist-info"}
    assert not [name for name in wanted if name.endswith((".png", ".npz", ".nbi"))]


def test_what_an_upload_lacks_is_named():
    fields = "Metadata-Version: 2.4\nName: rotary\nVersion: 0.1.0\n"
    address = "Project-URL: Source, https://example.org/rotary\n"
    problems = release.metadata_problems
    assert problems(fields + address, "0.1.0", "# Changelog\n\n## 0.1.0, 2026-11-30\n") == []
    undated, without = problems(fields, "0.1.0", "## 0.1.0, unreleased\n")
    assert "'## 0.1.0, unreleased' has no date" in undated
    assert "no [project.urls]" in without
    stale = problems(fields + address, "0.2.0", "## 0.1.0, 2026-11-30\n")
    assert stale == [
        "METADATA: version 0.1.0, the package says 0.2.0",
        "CHANGELOG.md: no section '## 0.2.0, DATE'",
    ]


def test_the_bill_of_materials_names_what_is_installed_and_no_path():
    made = {
        "bomFormat": "CycloneDX",
        "components": [
            {"name": "pip", "bom-ref": "pip==24"},
            {"name": "rotary", "bom-ref": "rotary==1", "externalReferences": [
                {"url": "file:///home/me/rotary.whl"}, {"url": "https://example.org"}]},
        ],
        "dependencies": [{"ref": "pip==24"}, {"ref": "rotary==1"}],
    }  # fmt: skip
    text = release.bill_of_materials("a warning\n" + json.dumps(made))
    bill = json.loads(text)
    assert [each["name"] for each in bill["components"]] == ["rotary"]
    assert bill["dependencies"] == [{"ref": "rotary==1"}]
    assert "file:" not in text
    assert "https://example.org" in text


SPEC = rotary.Rotary(head_dim=64, base=500_000.0)


def test_the_smoke_test_passes_what_is_right():
    smoke.check_angles(SPEC)
    smoke.check_rotation(SPEC)


def test_the_smoke_test_fails_for_float32_angles(monkeypatch):
    def rounded(spec, positions):
        frequencies = rotary.inv_freq(spec)[0].astype(np.float32)
        angles = positions.astype(np.float32)[:, None] * frequencies
        return np.cos(angles), np.sin(angles)

    monkeypatch.setattr(rotary, "cos_sin", rounded)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        smoke.check_angles(SPEC)


def test_the_smoke_test_fails_for_the_other_layout(monkeypatch):
    other = rotary.Rotary(head_dim=64, base=500_000.0, layout="interleaved")
    apply = rotary.apply
    monkeypatch.setattr(rotary, "apply", lambda spec, *x: apply(other, *x))
    with pytest.raises(AssertionError, match="Mismatched elements"):
        smoke.check_rotation(SPEC)


def test_the_smoke_test_refuses_a_package_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(AssertionError, match="is not installed in"):
        smoke.check_place(())
