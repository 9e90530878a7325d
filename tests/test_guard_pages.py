"""The compiled loops on memory between pages that nobody may touch: tests/guard_pages.py."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def counts():
    script = str(Path(__file__).with_name("guard_pages.py"))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"the last number is the case, see --show: {run.stderr[-4000:]}"
    return json.loads(run.stdout)


def test_a_loop_that_goes_one_element_too_far_ends_the_process(counts):
    assert len(counts["planted"]) == 6
    assert set(counts["planted"].values()) == {-signal.SIGSEGV}


def test_no_loop_leaves_its_operands(counts, record_property):
    record_property("cases between guarded pages", counts["by a loop"])
    assert counts["by a loop"] > 700
