"""Every example runs as it is and says something."""

import os
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
    said = assert_runs([str(path)], tmp_path)
    if path.name == "small_gpt.py":
        page = (path.parents[1] / "docs" / "tutorials" / "gpt.md").read_text(encoding="utf-8")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
        assert said in page
        assert f"in {len(lines)} lines without the blank ones" in page
        assert len(lines) <= 60
    if path.name == "context_parallel.py":  # starts torchrun by itself
        assert_said_once(said)


def test_an_example_of_many_ranks_runs_under_torchrun(tmp_path):
    (path,) = [path for path in EXAMPLES if path.name == "train_fsdp2.py"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert_said_once(assert_runs([*launch, str(path)], tmp_path))


def assert_said_once(said):
    assert len(set(said.splitlines())) == len(said.splitlines()), "every rank says the same"


def assert_runs(arguments, folder):
    # away from the checkout, and with warnings as errors in what the example itself does
    command = [sys.executable, "-W", "error::UserWarning", *arguments]
    environment = {**os.environ, "PYTHONWARNINGS": "error::UserWarning", "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment
        )
        # torch's gloo may abort a rank at its exit, when all is done, on a busy machine
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert not list(folder.iterdir()), "an example leaves files behind"
    return done.stdout
