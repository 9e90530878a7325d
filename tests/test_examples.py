"""Every example runs as it is and says something."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
COMPILES = {"rotate_torch.py"}  # it calls torch.compile, which calls a C++ compiler


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.slow] * (path.name in COMPILES))
        for path in EXAMPLES
    ],
)
def test_an_example_runs(path, tmp_path):
    # away from the checkout, and with warnings as errors in what the example itself does
    command = [sys.executable, "-W", "error::UserWarning", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "an example leaves files behind"
