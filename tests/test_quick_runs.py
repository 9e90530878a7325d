"""Every program in benchmarks/ and experiments/ runs: its gate, its measurement, its table."""

import ast
import contextlib
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from benchmarks import command, gpu_cases, verify
from libraries import quick_xla
from programs import assert_printed, ran

import rotary
from rotary import checkpoint
from rotary.checkpoint import convert_checkpoint

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for folder in ("benchmarks", "experiments")
               for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py")  # fmt: skip
# the quick runs of experiments are in tests/test_experiments.py, those of two that tune in
# tests/test_experiment_length.py and tests/test_experiment_tuning.py; e5_partial is run here too
ELSEWHERE = {f"experiments.{name}.run" for name in (
    "e1_convergence", "e2_linear", "e3_length", "e4_base", "e6_shift", "e7_digits", "e8_tuning",
    "e9_design")}  # fmt: skip
SLOW = {
    "benchmarks.explore",
    "benchmarks.fused",
    "benchmarks.gpu_rehearsal",
    "benchmarks.jax",
    "benchmarks.run",
}  # ten seconds where other tests run beside them


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def is_program(path: Path) -> bool:
    """Whether a file does something when it is run by `python -m`."""
    return 'if __name__ == "__main__":' in path.read_text().splitlines()


PROGRAMS = [module_of(path) for path in FILES if is_program(path)]


def imported(path: Path) -> set[str]:
    """The modules of this repository that a file imports by a relative import."""
    package = module_of(path).split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            name = ".".join(part for part in base if part)
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return found


def test_there_are_programs_and_every_other_file_serves_one():
    assert {"benchmarks.run", "benchmarks.gpu", "experiments.e1_convergence.run"} <= set(PROGRAMS)
    used = set().union(*map(imported, FILES))
    assert {module_of(path) for path in FILES} - set(PROGRAMS) <= used
    assert set(PROGRAMS) > ELSEWHERE


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in PROGRAMS
        if name not in ELSEWHERE
    ],
)
def test_a_quick_run_passes_its_gate_prints_a_table_and_writes_nothing(
    module, capsys, tmp_path, monkeypatch, one_thread
):
    if module == "benchmarks.explore" and shutil.which("chromium") is None:
        pytest.skip("needs Chromium")
    monkeypatch.chdir(tmp_path)
    before = results()
    with compiled_in_less_time(module):
        ran(module, "--quick")
    assert_printed(capsys.readouterr().out + "\n")
    assert list(tmp_path.iterdir()) == []
    assert results() == before, "a quick run is no result"


@contextlib.contextmanager
def compiled_in_less_time(module: str):
    """Peers are compiled: by XLA without most optimizations, by torch without a C++ compiler."""
    by_formula = functools.partial(torch.compile, backend="aot_eager")
    with (
        mock.patch.object(torch, "compile", by_formula),
        quick_xla() if module == "benchmarks.jax" else contextlib.nullcontext(),
    ):
        yield


def results() -> dict[Path, bytes]:
    """What is committed of runs, and what a benchmark of a GPU leaves."""
    folders = (ROOT / "benchmarks" / "results", ROOT / "experiments", ROOT / "build" / "gpu")
    kinds = {".md", ".json", ".jsonl", ".png"}
    return {
        path: path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in kinds
    }


def test_a_program_starts_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling", "--help"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "--quick" in done.stdout


def test_a_quick_run_writes_where_it_is_told(tmp_path, capsys, one_thread):
    ran("benchmarks.patch", "--quick", "--out", str(tmp_path / "new"))
    (page,) = (tmp_path / "new").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-patch\.md", page.name)
    assert page.read_text() in capsys.readouterr().out


# --- the gate that benchmarks share ---


@pytest.mark.parametrize("error", [2e-6, float("nan"), float("inf")])
def test_a_gate_stops_at_what_is_wrong(error):
    with pytest.raises(SystemExit, match=r"gate failed, nothing is measured:\nk: .* > 1\.00e-06"):
        command.gate([("q", 1e-7, 1e-6), ("k", error, 1e-6)], "float64")


def test_a_gate_that_compared_nothing_has_not_passed():
    with pytest.raises(SystemExit, match="no results"):
        command.gate([], "float64")


def wrong(function):
    """The same function, 1 % off."""

    def call(*arguments, out=None, **options):
        results = function(*arguments, **options)
        return tuple(x * 1.01 for x in results) if isinstance(results, tuple) else results * 1.01

    return call


@contextlib.contextmanager
def wrong_patch(model):
    model.lm_head.weight.mul_(1.1)
    yield "a wrong patch"


def wrong_conversion(source, target, *, executor=None, **options):
    convert_checkpoint(source, target, executor=executor, **options)
    if executor is not None:
        (target / "one file more").touch()


@pytest.mark.parametrize(
    ("program", "owner", "name", "instead"),
    [
        ("run", verify, "apply", wrong(rotary.apply)),
        ("scaling", verify, "apply", wrong(rotary.apply)),
        ("jax", rotary, "rotate", wrong(rotary.rotate)),
        ("gpu", gpu_cases, "rotate", wrong(rotary.rotate)),
        ("patch", rotary, "patch", wrong_patch),
        ("fanout", checkpoint, "convert_checkpoint", wrong_conversion),
    ],
)
def test_nothing_is_measured_where_a_result_is_wrong(
    program, owner, name, instead, monkeypatch, capsys, one_thread
):
    monkeypatch.setattr(owner, name, instead)
    with (
        compiled_in_less_time(f"benchmarks.{program}"),
        pytest.raises(SystemExit, match="gate failed, nothing is measured"),
    ):
        ran(f"benchmarks.{program}", "--quick")
    assert "|---|" not in capsys.readouterr().out
