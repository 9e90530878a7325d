"""Threads, forks, caches and missing packages: the same bits wherever and however it runs."""

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numba
import numpy as np
import pytest
import torch

import rotary
from rotary.kernels.cpu.compiled import _Files, compiled

PACKAGE = Path(rotary.__file__).parent
LIBRARIES = ["numpy", "torch"]
SPEC = rotary.Rotary(head_dim=64, base=5e5)

# Tables and a forward and, in torch, a backward pass, in one call above and one below the size from
# which threads are used; the digest is that of every number that comes out.
WORK = """
import hashlib
import sys
import numpy as np
import rotary

SPEC = rotary.Rotary(head_dim=64, base=5e5)

def work(library, learn=True):
    digest = hashlib.sha256()
    for seq in (9, 1000):
        q, k = (np.sin(np.arange(n * seq * 64) % 1013.0).astype(np.float32).reshape(1, n, seq, 64)
                for n in (8, 3))
        positions = np.arange(seq) + 1_000_000
        if library == "torch":
            import torch
            q, k = (torch.from_numpy(x).requires_grad_(learn) for x in (q, k))
            positions = torch.from_numpy(positions)
        for options in ({}, {"positions": positions}):
            results = rotary.apply(SPEC, q, k, **options)
            if library == "torch" and learn:
                results += torch.autograd.grad([x.sum() for x in results], [q, k])
            for x in results:
                x = x.detach().numpy() if library == "torch" else x
                digest.update(x.tobytes())
    return digest.hexdigest()
"""


names = {}
exec(WORK, names)
work = names["work"]


def python(script, *arguments, timeout=60, **environment):
    """What a fresh interpreter prints; a variable that is None is removed."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"))  # of the machine, not a test's
    merged = {**os.environ, **limits, **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={name: str(value) for name, value in merged.items() if value is not None},
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    return done.stdout.strip()


def test_the_helper_notices_failure():
    with pytest.raises(AssertionError, match="exit status 3"):
        python("raise SystemExit(3)")
    with pytest.raises(AssertionError, match="exit status -6"):
        python("import os; os.abort()")


# --- memory ---


def early_addresses(source):
    """Lines that take the address of an array which Numba may free before the address is used.

    It frees an array behind the last line that names it. One that the caller passed lives until the
    call returns, if the function is not inlined. One that each turn of a loop names lives until the
    loop ends, and one that the last return names until then.
    """
    lines = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        passed = {each.arg for each in function.args.args}
        if "inlined" in map(ast.unparse, function.decorator_list):
            passed = set()
        if isinstance(function.body[-1], ast.Return):
            passed |= {
                each.id for each in ast.walk(function.body[-1]) if isinstance(each, ast.Name)
            }
        loops = [each for each in own_nodes(function) if isinstance(each, ast.For)]
        for node in own_nodes(function):
            if not (isinstance(node, ast.Attribute) and ast.unparse(node).endswith(".ctypes.data")):
                continue
            (name, *_) = (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            around = [each for each in loops if node in ast.walk(each)]
            if name not in passed and (not around or name in assigned(around[0])):
                lines.append(ast.unparse(node))
    return lines


def own_nodes(function):
    """The nodes of a function without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from own_nodes(node)


def assigned(node):
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, ast.Store)}


def test_no_loop_takes_an_address_of_what_may_be_freed_before_it_is_used():
    for path in (PACKAGE / "kernels" / "cpu").glob("*.py"):
        assert early_addresses(path.read_text()) == [], path.name
    once = "def turn(n):\n    both = empty((2, n))\n    use(both[0].ctypes.data)\n"
    assert early_addresses(once) == ["both[0].ctypes.data"]
    inner = "def turn(n):\n    for i in range(n):\n        x = empty(n)\n        x.ctypes.data\n"
    assert early_addresses(inner) == ["x.ctypes.data"]
    passed = "def turn(x):\n    use(x.ctypes.data)\n"
    assert early_addresses(passed) == []
    assert early_addresses(f"@inlined\n{passed}") == ["x.ctypes.data"]
    assert early_addresses(once + "    return f(len(both))\n") == []


# --- threads ---


@pytest.mark.parametrize("library", LIBRARIES)
def test_eight_threads_at_once(library):
    barrier = Barrier(8)

    def together(_):
        barrier.wait()
        return [work(library) for _ in range(3)]

    with ThreadPoolExecutor(8) as pool:
        digests = {digest for each in pool.map(together, range(8)) for digest in each}
    assert digests == {work(library)}


def test_threads_that_start_with_a_pool_that_allows_one_only():
    """Numba's own pool aborts the process when two threads enter it."""
    script = """
import ctypes, numba
from concurrent.futures import ThreadPoolExecutor
real = ctypes.CDLL

def without_openmp(name, *arguments, **options):  # as on a machine that has no libgomp
    if name == "libgomp.so.1":
        raise OSError(name)
    return real(name, *arguments, **options)

ctypes.CDLL = without_openmp
libraries = ["numpy", "torch"] * 4
with ThreadPoolExecutor(8) as pool:
    digests = list(pool.map(lambda library: [work(library) for _ in range(2)][0], libraries))
assert numba.threading_layer() == "workqueue", numba.threading_layer()
print(*digests)
"""
    got = python(WORK + script, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS=2)
    assert got.split() == [work(library) for library in LIBRARIES] * 4


def test_bits_do_not_depend_on_the_number_of_threads():
    """One here; two in the test above, and as many as there are cores in this process.

    Nor do NumPy and torch need JAX, which takes a second to import.
    """
    script = WORK + "print(work('numpy'), work('torch'))\n" + PROBE
    digests, loaded = python(script, NUMBA_NUM_THREADS=1, OMP_NUM_THREADS=1).split("\n")
    assert digests.split() == [work(library) for library in LIBRARIES]
    assert "jax" not in loaded.split()


NORM = """
import hashlib
import numpy as np
import torch
import rotary

spec = rotary.Rotary(head_dim=64)
q = torch.sin(torch.arange(8 * 1000 * 64) % 1013.0).view(1, 8, 1000, 64).requires_grad_()
weight = torch.ones(64, requires_grad=True)
y, *_ = rotary.fused(q, None, None, spec, norm=rotary.Norm(weight, None, 1e-6))
dq, dw = torch.autograd.grad((y * torch.cos(torch.arange(64))).sum(), [q, weight])
results = b"".join(x.detach().numpy().tobytes() for x in (y, dq))
print(hashlib.sha256(results).hexdigest(), *dw.tolist())
"""


def test_only_the_gradient_of_a_norm_weight_depends_on_the_number_of_threads():
    """It is a sum over tokens, in another order."""
    one, two = (python(NORM, NUMBA_NUM_THREADS=n, OMP_NUM_THREADS=n).split() for n in (1, 2))
    assert one[0] == two[0]
    np.testing.assert_allclose(
        np.float64(one[1:]), np.float64(two[1:]), atol=1e-5 * max(map(abs, map(float, one[1:])))
    )


# --- fork ---


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("parent", LIBRARIES)
def test_a_forked_child_answers(parent):
    """A pool of OpenMP threads does not survive a fork: waiting for it would last for ever.

    No backward pass in the child: the large operators of torch around it do hang there.
    """
    script = """
import os, signal, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: it is the point
import torch
big = np.ones((8, 16, 512, 64), np.float32)
rotary.apply(SPEC, torch.from_numpy(big) if sys.argv[1] == "torch" else big)
before = work(sys.argv[1])
for library in ("numpy", "torch"):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # ends a child that hangs
        print(work(library, learn=False), flush=True)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"child with {library} ended with status {status}"
assert work(sys.argv[1]) == before  # the parent goes on as before
"""
    got = python(WORK + script, parent)
    assert got.split() == [work(library, learn=False) for library in LIBRARIES]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_while_other_threads_work():
    """The child may not inherit a lock that another thread held."""
    script = """
import os, signal, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
work("numpy")  # compiled: a fork in the middle of Numba's compiler is not ours to mend
stop, count = threading.Event(), iter(range(10**9))

def busy():
    while not stop.is_set():
        rotary.cos_sin(rotary.Rotary(head_dim=64, base=1000.0 + next(count)), np.arange(9))
        work("numpy")

threads = [threading.Thread(target=busy) for _ in range(4)]
for thread in threads:
    thread.start()
codes = []
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        rotary.apply(rotary.Rotary(head_dim=64, base=77.0), np.ones((1, 1, 9, 64), np.float32))
        work("numpy")
        os._exit(0)
    codes.append(os.waitpid(pid, 0)[1])
stop.set()
for thread in threads:
    thread.join()
print(*codes)
"""
    assert python(WORK + script) == " ".join("0" * 5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_while_another_thread_holds_the_cache():
    script = """
import os, signal, threading, time, warnings
from rotary.angles import _cache
warnings.simplefilter("ignore", DeprecationWarning)
held = threading.Event()

def hold():
    with _cache.lock:
        held.set()
        time.sleep(0.5)

thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    rotary.apply(SPEC, np.ones((1, 1, 9, 64), np.float32))
    os._exit(0)
thread.join()
print(os.waitpid(pid, 0)[1])
"""
    assert python(WORK + script) == "0"


# --- packages that are not there ---

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_numba_the_law_gives_the_same_numbers(library, tmp_path):
    """The rotation bit for bit; tables to the 1.5e-7 that is promised of both."""
    script = """
import numpy as np, rotary
from rotary.kernels import host
assert host().name == "reference"
library, path = sys.argv[1:]
given = dict(np.load(path))
if library == "torch":
    import torch
    given = {name: torch.from_numpy(array) for name, array in given.items()}
    given["x"].requires_grad_()
x = given["x"]
y = rotary.rotate(x, given["cos"], given["sin"], layout="interleaved")
cos, sin = rotary.cos_sin(rotary.Rotary(head_dim=64, base=5e5), given["positions"])
extra = {}
if library == "torch":
    extra["grad"] = torch.autograd.grad(y.square().sum(), x)[0].numpy()
    y = y.detach()
    buffer = x.detach().clone()
    out = rotary.rotate(buffer, given["cos"], given["sin"], layout="interleaved", out=buffer)
    assert out is buffer and torch.equal(out, y)
np.savez(path, y=y, cos=cos, sin=sin, **extra)
"""
    x = np.random.default_rng(0).standard_normal((2, 3, 50, 64)).astype(np.float32)
    positions = np.arange(50) * 10_007
    cos, sin = rotary.cos_sin(SPEC, positions)
    want = rotary.rotate(x, cos, sin, layout="interleaved")
    path = tmp_path / "arrays.npz"
    np.savez(path, x=x, positions=positions, cos=cos, sin=sin)
    python(BLOCK.format(names={"numba", "llvmlite"}) + script, library, str(path))
    got = dict(np.load(path))
    assert got["y"].tobytes() == want.tobytes()
    for name, table in (("cos", cos), ("sin", sin)):
        np.testing.assert_allclose(got[name], table, rtol=0, atol=1.5e-7)
    if library == "torch":
        leaf = torch.from_numpy(x).requires_grad_()
        result = rotary.rotate(leaf, *map(torch.from_numpy, (cos, sin)), layout="interleaved")
        (grad,) = torch.autograd.grad(result.square().sum(), leaf)
        assert got["grad"].tobytes() == grad.numpy().tobytes()


def test_numpy_alone_is_enough_for_numpy():
    script = BLOCK.format(names={"torch", "numba", "llvmlite", "typer", "rich", "transformers"})
    script += "import numpy, rotary; x = numpy.ones((1, 3, 8), numpy.float32)\n"
    script += "print(rotary.apply(rotary.Rotary(head_dim=8), x).shape)"
    assert python(script) == "(1, 3, 8)"


def test_commands_need_nothing_that_is_optional(tmp_path):
    """Of each group one, on a config; a search of bases names what it needs."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "head_dim": 64, "rope_theta": 5e5}')
    optional = {"numba", "llvmlite", "torch", "jax", "transformers", "matplotlib", "starlette"}
    script = """
import contextlib, io
from rotary.cli import main
for arguments in (["inspect"], ["freqs"], ["diff"], ["doctor"], ["reach"], ["decay"], ["vectors"],
                  ["plan", "--context", "4096", "--from"]):
    sys.argv = ["rotary", *arguments, path := sys.argv[-1]]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    if code:
        print(arguments[0], code, err.getvalue().strip())
"""
    assert python(BLOCK.format(names=optional) + script, str(path)) == (
        "plan 1 error: a search of bases needs Numba (No module named 'numba'): pip install numba"
    )


# --- caches that cannot be written ---


@pytest.fixture
def installed(tmp_path):
    """A copy of the package, so that no cache lies beside it."""
    target = tmp_path / "site" / "rotary"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


COPY = """
import sys
sys.path.insert(0, {path!r})
import rotary
assert rotary.__file__.startswith({path!r}), rotary.__file__
"""


def in_copy(installed, script, **environment):
    return python(COPY.format(path=str(installed.parent)) + script, **environment)


NOWHERE = "/proc/none" if sys.platform == "linux" else "/dev/null/none"
FILLED = """
import hashlib
import numpy as np
import rotary

def filled():
    tables = rotary.cos_sin(rotary.Rotary(head_dim=64, base=5e5), np.arange(9) * 10_007)
    return hashlib.sha256(np.stack(tables)).hexdigest()
"""
FILL = FILLED + "print(filled())"  # compiles the smallest loop, in half the time of a rotation


exec(FILLED, names)
filled = names["filled"]


PLACES = {
    "a file": {"NUMBA_CACHE_DIR": __file__},
    "no home": {"HOME": None, "XDG_CACHE_HOME": None, "NUMBA_CACHE_DIR": None},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_cache_folder_that_cannot_be_written(place, installed):
    assert in_copy(installed, FILL, **PLACES[place]) == filled()


def test_no_folder_for_a_cache_at_all(installed):
    """As in an image that is mounted read-only: compiled anew, but working."""
    (installed / "kernels" / "cpu" / "__pycache__").touch()  # a file: no folder can be made there
    nowhere = {"HOME": NOWHERE, "XDG_CACHE_HOME": NOWHERE, "NUMBA_CACHE_DIR": NOWHERE}
    assert in_copy(installed, FILL, PYTHONDONTWRITEBYTECODE=1, **nowhere) == filled()
    assert (installed / "kernels" / "cpu" / "__pycache__").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file size are a matter of Unix")
def test_a_full_disk_does_not_stop_the_work(tmp_path, installed):
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # every write of a file fails, as when full
"""
    cache = {"NUMBA_CACHE_DIR": tmp_path / "cache", "PYTHONDONTWRITEBYTECODE": 1}
    assert in_copy(installed, script + FILL, **cache) == filled()


DAMAGE = {
    "cut short": lambda content, at: content[:at],
    "a flipped bit": lambda content, at: (
        content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]
    ),
    "zeros": lambda content, at: content[:at] + bytes(len(content) - at),
    "noise": lambda content, at: np.random.default_rng(at).bytes(len(content)),
}


@pytest.mark.slow
def test_a_damaged_cache_is_compiled_anew(tmp_path, installed):
    cache = {"NUMBA_CACHE_DIR": tmp_path / "cache"}
    assert in_copy(installed, FILL, **cache) == filled()
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(entries) == 4  # index and code: of the tables, and of reading an address
    before = {path: path.read_bytes() for path in entries}
    for path, content in before.items():
        path.write_bytes(DAMAGE["a flipped bit"](content, len(content) // 2))
    assert in_copy(installed, FILL, **cache) == filled()
    for path in entries:  # written over
        content = path.read_bytes()
        assert hashlib.sha256(content[32:]).digest() == content[:32]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_anywhere_in_a_file_of_the_cache(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    rng = np.random.default_rng(0)

    def loaded():
        function = compiled()(plus_one)
        assert function(41) == 42
        return function.stats.cache_hits[(numba.int64,)] == 1

    assert [loaded() for _ in range(2)] == [False, True]
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        for at in (0, 31, 32, len(content) - 1, *rng.integers(1, len(content), 2).tolist()):
            path.write_bytes(DAMAGE[damage](content, at))
            assert [loaded() for _ in range(2)] == [False, True]


def plus_one(x):
    return x + 1


@pytest.mark.parametrize("stamp", ["old", "new"])
def test_a_file_of_the_cache_with_other_code_is_not_loaded(stamp, tmp_path):
    """As after a full disk, which the index still fitted on, and beside a process that also took
    the number 1: all loops of a function have one signature in C, so other code would run."""
    before = _Files(str(tmp_path), "loop", ("old",))
    before.save("float32", "code of float32")
    assert before.load("float32") == "code of float32"
    files = _Files(str(tmp_path), "loop", (stamp,))
    files._save_index({"float64": files._data_name(1)})
    assert files.load("float64") is None
    files.save("float64", "code of float64")
    assert files.load("float64") == "code of float64"
    assert before.load("float32") is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    function = compiled()(plus_one)

    def disk_is_full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(function._cache._cache_file, "_open_for_write", disk_is_full)
    assert function(41) == 42
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_file_beside_a_loop_that_changed(tmp_path, monkeypatch):
    """Numba asks for the file of the loop alone, not for those whose code it calls."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    hits = []
    for digest in ("one", "one", "other"):
        monkeypatch.setattr(
            "rotary.kernels.cpu.compiled._digest_of_folder", lambda _, as_=digest: as_
        )
        function = compiled()(plus_one)
        function(41)
        hits.append(sum(function.stats.cache_hits.values()))
    assert hits == [0, 1, 0]


# --- what an import loads ---

HEAVY = ("torch", "jax", "numba", "llvmlite", "matplotlib", "typer", "rich", "transformers")
PROBE = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"


@pytest.mark.parametrize("use", ["", "rotary.Rotary(head_dim=8); rotary.layouts; rotary.positions"])
def test_import_is_light(use):
    loaded = set(python(f"import rotary; {use}\n{PROBE}").split())
    assert "rotary" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("name", ["numba", "rich"])
def test_the_probe_would_notice(name):
    assert name in python(f"import rotary, {name}\n{PROBE}").split()


def test_the_plug_ins_of_vllm_load_no_numba():
    """While vLLM without Triton starts, an object of llvmlite would end it."""
    plug_ins = "import rotary.integrations.vllm, rotary.integrations.lmcache"
    loaded = set(python(f"{plug_ins}\n{PROBE}").split())
    assert "torch" in loaded
    assert not loaded & {"numba", "llvmlite"}


def test_numpy_work_does_not_load_torch():
    script = WORK + "work('numpy')\n" + PROBE
    assert not {"torch", "transformers", "typer"} & set(python(script).split())


@pytest.mark.parametrize("why", ["NUMBA_DISABLE_JIT", "Py_GIL_DISABLED"])
def test_without_compiled_loops_the_plain_formula_rotates(why):
    """Without a compiler, or on a Python without the global lock, where no test runs the loops."""
    code = (
        "import sys, sysconfig, numpy as np, rotary; from rotary.kernels import host\n"
        "if sys.argv[1] == 'Py_GIL_DISABLED': sysconfig.get_config_vars()[sys.argv[1]] = 1\n"
        "spec, x = rotary.Rotary(head_dim=2), np.ones((2, 2), 'f4')\n"
        "print(host().name, rotary.apply(spec, x)[0].tolist())\n"
        "import torch; x = torch.from_numpy(x)\n"
        "norm = rotary.Norm(torch.ones(2), None, 0.0)\n"
        "rotary.fused(x, None, None, spec, norm=norm)\n"
        "assert 'rotary.kernels.cpu.jobs' not in sys.modules\n"
        "print(host().name, rotary.apply(spec, x)[0].tolist())"
    )
    jit = {"NUMBA_DISABLE_JIT": "1"} if why == "NUMBA_DISABLE_JIT" else {}
    assert python(code, why, **jit).split("\n") == ["reference [1.0, 1.0]"] * 2


def test_doctor_says_why_there_are_no_compiled_loops():
    code = (
        "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n"
        "from rotary.doctor import examine\n"
        "print(examine())"
    )
    assert "no compiled loops: the compiled loops need a Python with a global lock" in python(code)
