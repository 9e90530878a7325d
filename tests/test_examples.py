"""Every example runs as it is and says something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
RANKS = [path for path in EXAMPLES if path.stem in ("context_parallel", "train_fsdp2")]
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
    assert_runs([str(path)], tmp_path)


@pytest.mark.parametrize("path", RANKS, ids=lambda path: path.name)
def test_an_example_of_many_ranks_runs_under_torchrun(path, tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    said = assert_runs([*launch, str(path)], tmp_path)
    assert len(RANKS) == 2
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
