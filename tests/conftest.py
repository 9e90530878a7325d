"""What tests share, and counts of the comparison with transformers at the end of a run."""

import contextlib
import fcntl
import gc
import json
import logging
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from chromium import browser, page_server, show, tab  # noqa: F401  # fixtures
from libraries import quick_xla

# Also where the environment asks for no bytecode: each process that a test starts would compile
# the package anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Inductor compiles in its own process: every process of its pool would import torch once more
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# as pytest's plugin for logging did: a logger without handlers would write to stderr
logging.getLogger().addHandler(logging.NullHandler())

collect_ignore_glob = ["peers/*"]  # they run in the environments of other programs


def pytest_addoption(parser):
    parser.addoption(
        "--tenth", action="store_true",
        help="of each parametrized test a tenth of the cases, 8 at least, and always the same ones",
    )  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay to the end, so the garbage collector need not look at them again."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    if utils := sys.modules.get("transformers.utils"):
        utils.auto_docstring = undocumented
    return result


def undocumented(given=None, **_):
    """Writes no docstring, in the place of transformers' decorator: a third of most imports."""
    return undocumented if given is None else given


@pytest.hookimpl(trylast=True)  # of what -m leaves
def pytest_collection_modifyitems(config, items):
    if not config.getoption("tenth"):
        return
    groups = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    kept = {
        item
        for name, cases in groups.items()
        for item in random.Random(name).sample(cases, min(len(cases), max(8, len(cases) // 10)))
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, make)`: the folder that `make(folder)` filled, in one process of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def filled(name, make):
        folder = base / name
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                fresh = tmp_path_factory.mktemp(name)
                make(fresh)
                fresh.rename(folder)
        return folder

    return filled


@pytest.fixture(scope="session")
def forks():
    """Runs a program in forks of a process that has imported torch: one for each environment.

    Returns the statuses, and what was said on stdout and stderr.
    """
    environment = {
        **os.environ, "PYTHONWARNINGS": "error::UserWarning", "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip
    server = Path(__file__).with_name("forks.py")
    with subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning", str(server)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip

        def ran(path, folder, environments):
            for _ in range(3):
                process.stdin.write(json.dumps([str(path), str(folder), environments]) + "\n")
                process.stdin.flush()
                statuses, out, err = json.loads(process.stdout.readline())
                # torch's gloo may abort a rank at its exit, when all is done, on a busy machine
                if "terminate called without an active exception" not in err:
                    break
            return statuses, out, err

        yield ran
        process.stdin.close()


@pytest.fixture(scope="module")
def one_thread():
    """torch on one thread: two that wait for each other take ten times as long on shared cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned():
    """torch fills new memory with NaN: what a kernel forgets to write shows."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def graphs():
    """The operators of each graph that `torch.compile(..., backend=graphs.record)` sees."""
    import torch

    class Graphs(list):
        def record(self, graph, inputs):
            self.append([str(node.target) for node in graph.graph.nodes])
            return graph.forward

        def rotations(self):
            return sum("rotary.rotate" in name for names in self for name in names)

    torch.compiler.reset()
    return Graphs()


@pytest.fixture(scope="module")
def xla_in_less_time():
    """XLA without most of its optimizations: where a test is not about bits, nor the program."""
    with quick_xla():
        yield


@pytest.fixture
def optimized(xla_in_less_time):
    """XLA as users have it, for one test of such a file."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", True)


class Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def text(self):
        return "\n".join(map(self.format, self.records))

    @contextlib.contextmanager
    def at_level(self, level, name):
        logger = logging.getLogger(name)
        before = logger.level
        logger.setLevel(level)
        try:
            yield
        finally:
            logger.setLevel(before)


@pytest.fixture
def log():
    """What is logged in a test; pytest's own plugin costs every test a millisecond or more."""
    kept = Log()
    logging.getLogger().addHandler(kept)
    yield kept
    logging.getLogger().removeHandler(kept)


@pytest.fixture
def main(monkeypatch, capsys):
    """`main(*arguments)`: the command in this process; what it left, as `command.Done`."""
    from command import in_process

    return in_process(monkeypatch, capsys)


@pytest.fixture(scope="module")
def stub_folder(tmp_path_factory):
    """Where Triton keeps codes for `stub_of_cuda`, and launchers, which need no optimization."""
    folder = tmp_path_factory.mktemp("stub")
    compiler = folder / "cc"
    compiler.write_text('#!/bin/sh\nexec gcc "$@" -O0\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(compiler))
        yield folder


@pytest.fixture
def numpy_by_formula(monkeypatch):
    """Fused calls on NumPy arrays by the reference implementation, and not by compiled loops."""
    from rotary import kernels

    monkeypatch.setitem(kernels.FUSED, "compiled loops", kernels.FUSED["reference"])
    monkeypatch.setattr(kernels, "fused_by_name", {})


@pytest.fixture
def light_alone(monkeypatch):
    """Of an experiment only the picture for light pages is drawn, and not made small."""
    from experiments.lab import results

    from rotary import plots

    def draw(figure, path, of):
        path.write_bytes(plots.rendered(figure, ".png"))

    monkeypatch.setattr(results, "draw", draw)


@pytest.fixture
def kernel_calls(monkeypatch):
    """What a patched model gives our kernel to rotate: (q, k) of each call, without the trials."""
    from rotary.integrations import conventions, rotations

    calls, is_trial = [], []

    def rotate(xs, *args, **kwargs):
        if not is_trial:
            calls.append(xs)
        return original(xs, *args, **kwargs)

    def agrees(*args):
        is_trial.append(True)
        try:
            return trial(*args)
        finally:
            is_trial.pop()

    original, trial = conventions.rotate, rotations._agrees
    monkeypatch.setattr(conventions, "rotate", rotate)
    monkeypatch.setattr(rotations, "_agrees", agrees)
    return calls


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """A test that leaves gradients off fails here; without this, later tests would."""
    result = yield
    torch = sys.modules.get("torch")
    if hasattr(torch, "is_grad_enabled") and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail(f"{item.nodeid} leaves torch without gradients")
    return result


def pytest_terminal_summary(terminalreporter):
    counts = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name in ("parity", "variants"):
                kind, number = str(value).split()
                counts[name, kind] += int(number)
    if counts["parity", "equal"]:
        terminalreporter.write_line(
            f"parity with transformers: {counts['parity', 'equal']} classes and layer types equal, "
            f"{counts['parity', 'different']} listed in tests/golden/DIFFERENCES.md; "
            f"{counts['variants', 'equal']} more with another rope type, "
            f"{counts['variants', 'refused']} that the config class refuses, "
            f"{counts['variants', 'ours']} that only we refuse"
        )
