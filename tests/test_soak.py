"""A few seconds of tests/soak.py; docs/results/soak.md has longer runs."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_threads_forks_signals_and_too_little_memory_change_no_bit(record_property):
    script = str(Path(__file__).with_name("soak.py"))
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", script, "--minutes", "0.03", "--no-compile"],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    counts = json.loads(run.stdout)
    record_property("calls from 8 threads", counts["calls"])
    for name in ("calls", "children", "calls of signal handlers", "MemoryErrors that were wanted"):
        assert counts[name] > 0, name
    assert counts["calls after memory was short"] > 0


def test_other_bits_are_seen():
    """A call that gives something else once in a while ends the run with its name."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['soak.py', '--minutes', '0.01'];"
        "import soak, itertools; count = itertools.count();"
        "soak.numpy_jobs = lambda: [soak.Job('planted', lambda: bytes([next(count) > 40]))];"
        "soak.table_jobs = lambda: []; soak.file_jobs = lambda folder: [];"
        "soak.main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 1
    assert "planted: other bits" in run.stdout
