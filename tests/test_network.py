"""No request leaves the machine: every command and every view, with the network cut and watched."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import LLAMA

HERE = Path(__file__).parent
UNSHARE = ["unshare", "--map-root-user", "--net"]
ROPE = """
import numpy as np

def apply_rope(x, positions):
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[:, None] * 1e4 ** (-np.arange(half) / half)
    a, b, c, s = x[..., :half], x[..., half:], np.cos(angles), np.sin(angles)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)
"""


def can_cut():
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What tests/offline.py found, in a namespace without a network where the system lets us."""
    folder = tmp_path_factory.mktemp("offline")
    shutil.copy(HERE / "configs" / "llama-3.1-8b.json", folder / "config.json")
    (folder / "my_model").mkdir()
    (folder / "my_model" / "rope.py").write_text(ROPE)
    source = folder / "SRC"
    source.mkdir()
    checkpoint(source)
    log = folder / "connections"
    command = [sys.executable, str(HERE / "offline.py"), str(folder), str(log)]
    done = subprocess.run(
        [*UNSHARE, *command] if can_cut() else command, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def checkpoint(folder):
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(LLAMA))
    rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    save_file(
        {f"model.layers.0.self_attn.{name}.weight": np.ones((size, 24), np.float32)
         for name, size in rows.items()},
        folder / "model.safetensors",
    )  # fmt: skip


def test_every_command_and_every_view_works_without_a_network(result):
    if not result["cut"]:
        pytest.skip("this system lets us make no network namespace")
    assert set(result["statuses"].values()) == {0}, result["statuses"]
    assert len(result["statuses"]) >= 13
    assert all(size > 1000 for size in result["views"].values()), result["views"]
    assert len(result["views"]) >= 9


def test_no_process_of_a_command_or_of_the_page_tries_to_connect(result):
    assert result["connections"] == ""
    assert result["planted"] == "socket.connect ('192.0.2.1', 9)\n"  # seen in a process below it
