"""Every example runs as it is and says something."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
COMPILES = "rotate_torch.py"  # it calls torch.compile, which calls a C++ compiler
# warnings are errors in what the example itself does
PYTHON = [sys.executable, "-W", "error::UserWarning"]
ENVIRONMENT = {
    **os.environ, "PYTHONWARNINGS": "error::UserWarning", "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}  # fmt: skip


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.slow] * (path.name == COMPILES))
        for path in EXAMPLES
    ],
)
def test_an_example_runs(path, tmp_path, request):
    if "import torch" in path.read_text(encoding="utf-8"):
        said = forked(request.getfixturevalue("forks"), path, tmp_path, [{}])
    else:
        said = alone(path, tmp_path)
    if path.name == "small_gpt.py":
        page = (path.parents[1] / "docs" / "tutorials" / "gpt.md").read_text(encoding="utf-8")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
        assert said in page
        assert f"in {len(lines)} lines without the blank ones" in page
        assert len(lines) <= 60
    if path.name == "context_parallel.py":  # starts torchrun by itself
        assert_said_once(said)


def test_an_example_of_many_ranks_runs_as_torchrun_starts_it(tmp_path, forks):
    (path,) = [path for path in EXAMPLES if path.name == "train_fsdp2.py"]
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    assert_said_once(forked(forks, path, tmp_path, ranks))


def assert_said_once(said):
    assert len(set(said.splitlines())) == len(said.splitlines()), "every rank says the same"


def forked(forks, path, folder, environments):
    statuses, out, err = forks(path, folder, environments)
    assert statuses == [0] * len(environments), err
    return checked(out, err, folder)


def alone(path, folder):
    """What an example says in a process of its own, away from the checkout."""
    done = subprocess.run(
        [*PYTHON, str(path)], cwd=folder, capture_output=True, text=True, timeout=120,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return checked(done.stdout, done.stderr, folder)


def checked(out, err, folder):
    assert out.strip()
    assert "Traceback" not in err
    assert not list(folder.iterdir()), "an example leaves files behind"
    return out
