"""The fixture `rotary_check`, in a run of pytest of its own."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import alone

CONFIGS = Path(__file__).parent / "configs"
USED = """
import json
import numpy as np
import pytest
import rotary

def rope(base, layout="half"):
    spec = rotary.Rotary(head_dim=128, base=base, layout=layout)
    return lambda x, positions: rotary.apply(spec, x, positions=positions, seq_dim=-2)

def test_by_a_path_beside_the_test(rotary_check):
    rotary_check(rope(1e6), "qwen3-8b.json")

def test_by_the_content_of_a_config(rotary_check):
    rotary_check(rope(1e6), {"head_dim": 128, "rope_theta": 1e6})

def test_by_a_spec(rotary_check):
    rotary_check(rope(1e6), rotary.Rotary(head_dim=128, base=1e6), max_position=100)

def test_by_layer_type(rotary_check):
    spec = rotary.from_hf_config("gemma-3-4b.json", "full_attention")
    def fn(x, positions):
        return rotary.apply(spec, x, positions=positions, seq_dim=-2)
    rotary_check(fn, "gemma-3-4b.json", layer_type="full_attention")
    with pytest.raises(rotary.testing.WrongRotationError):
        rotary_check(fn, "gemma-3-4b.json", layer_type="sliding_attention")

def test_that_is_wrong(rotary_check):
    rotary_check(rope(1e6, "interleaved"), "qwen3-8b.json")

def test_of_a_layer_without_rotation(rotary_check):
    with pytest.raises(ValueError, match="no rotation to check"):
        rotary_check(rope(1e6), {"head_dim": 128, "rope_parameters": {"none": None, "full": {}}},
                     layer_type="none")

def test_of_a_rotary_with_a_layer_type(rotary_check):
    with pytest.raises(ValueError, match="choose from a config"):
        rotary_check(rope(1e6), rotary.Rotary(head_dim=128), layer_type="full_attention")
"""


def installed():
    return any(
        each.value == "rotary.pytest_plugin"
        for each in importlib.metadata.entry_points(group="pytest11")
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("used")
    for name in ("qwen3-8b.json", "gemma-3-4b.json"):
        shutil.copy(CONFIGS / name, folder)
    (folder / "test_used.py").write_text(USED)
    loaded = [] if installed() else ["-p", "rotary.pytest_plugin"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *loaded,
        "-p",
        "no:cacheprovider",
        "-v",
        "-W",
        "error",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    return done.stdout


@pytest.mark.parametrize(
    "name", ["by_a_path_beside_the_test", "by_the_content_of_a_config", "by_a_spec",
             "by_layer_type", "of_a_layer_without_rotation", "of_a_rotary_with_a_layer_type"]
)  # fmt: skip
def test_the_fixture_takes_a_spec_or_a_config(told, name):
    assert f"test_{name} PASSED" in told


def test_a_wrong_rotation_fails_with_its_name_and_without_our_own_lines(told):
    assert "test_that_is_wrong FAILED" in told
    assert "other_layout: pairs are interleaved, not half" in told
    assert "compare.py" not in told.split("short test summary")[0].replace(
        "rotary.testing.compare.WrongRotationError", ""
    )


def test_the_plugin_loads_nothing_slow():
    """pytest loads it in every run, also where nobody asks for the fixture."""
    code = "import sys, rotary.pytest_plugin; print(*sorted(sys.modules))"
    loaded = set(alone(code).split())
    assert {"numba", "torch", "jax", "rotary.identify", "rotary.testing"} & loaded == set()
