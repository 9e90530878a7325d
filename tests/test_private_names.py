"""Private names of other libraries: all are in docs/private_names.md, and none is needed."""

import ast
import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from libraries import if_installed
from published import scaled

import rotary
from rotary import Rotary
from rotary.kernels import private

torch = if_installed("torch")
ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "rotary").rglob("*.py"))
PAGE = (ROOT / "docs" / "private_names.md").read_text()
LISTED = {part for name in re.findall(r"`([\w.]+)`", PAGE) for part in name.split(".")}
PUBLIC = {"_replace", "_fields", "_fields_", "_asdict", "_make"}  # of NamedTuple and ctypes


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def own_names(nodes):
    """Attributes that a file gives its own classes, and names at its top."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "_set":
            yield getattr(node.args[0], "value", None)


def private_names(tree):
    """(line, name) of each private name of another library, or of a class of one."""
    nodes = list(ast.walk(tree))
    own = set(own_names(nodes))
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id in ("getattr", "hasattr", "setattr", "private", "attrgetter")
            names = [
                argument.value
                for argument in node.args
                if asks and isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
        for name in names:
            parts = name.split(".")
            if any(map(is_private, parts)) or name.startswith(("numba.core", "core.")):
                yield node.lineno, name


def test_every_private_name_is_listed_and_has_one_place():
    unlisted, places = [], set()
    for path in SOURCES:
        for line, name in private_names(ast.parse(path.read_text())):
            where = path.relative_to(ROOT / "src" / "rotary").as_posix()
            if not LISTED.issuperset(filter(is_private, name.split("."))):
                unlisted.append(f"{where}:{line}: {name}")
            if "." in name:
                places.add(where)
                assert name.removesuffix(".__get__") in PAGE
    assert not unlisted
    assert places == {"kernels/torch/private.py", "kernels/cpu/compiled.py"}


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nx = torch._C._no_such()",
        "from torch._ops import OpOverload",
        "import numba.core.cgutils",
        "x = getattr(y, '_no_such', None)",
        "class A:\n    def f(self):\n        return self._of_a_base_class",
    ],
)
def test_the_search_sees(code):
    assert list(private_names(ast.parse(code)))


# --- torch without them ---


def loaded(name, path):
    """A file of ours once more, as another module."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def without(monkeypatch):
    """`without(name, ...)`: values of `torch_private` as in a torch that lacks what is private."""
    from rotary.kernels.torch import private as torch_private
    from rotary.kernels.torch import ready as torch_ready

    with monkeypatch.context() as patch:
        patch.setattr(private, "private", lambda library, path, fallback: fallback)
        forced = loaded("rotary.kernels.torch.without", torch_private.__file__)
    monkeypatch.setattr(torch_ready, "recent", {})

    def take(*names):
        for name in names:
            normal = getattr(torch_private, name)
            monkeypatch.setattr(torch_private, name, getattr(forced, name))
            for module in [m for n, m in sys.modules.items() if n.startswith("rotary.")]:
                for key, value in list(vars(module).items()):
                    if value is normal and module is not torch_private and normal is not None:
                        monkeypatch.setattr(module, key, getattr(forced, name))

    return take


ALONE = [
    ("is_tracing_by_jit",),
    ("level_of_transforms",),
    ("count_of_modes",),
    ("_mode_of", "_PROXY"),
    ("_levels",),
    ("_disabled_modes",),
    ("has_global_hook",),
    ("is_zerotensor",),
    ("is_wrapped",),
    ("is_in_old_vmap",),
    ("_is_batched",),
    ("_unwrapped",),
    ("version_of",),
    ("TensorGuards",),
    ("increment_version",),
    ("empty_strided",),
    ("empty_strided_on_cuda",),
]
ALL = tuple(name for names in ALONE for name in names)
SPEC = Rotary(head_dim=16)
DYNAMIC = scaled("dynamic", 16, 2.0, 4)


def results():
    """What calls give, each by its name: arrays, or the words of an error."""
    from torch.fx.experimental.proxy_tensor import make_fx

    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 5, 16, generator=random)
    half = q.to(torch.bfloat16)
    cos, sin = rotary.cos_sin(SPEC, torch.arange(5))
    zeros = torch._efficientzerotensor(2, 3, 5, 16)

    def turned(x):
        return rotary.rotate(x, cos, sin, SPEC)

    def applied(x):
        return rotary.apply(DYNAMIC, x)

    def gradient(x):
        x = x.detach().requires_grad_()
        turned(x).square().sum().backward()
        return x.grad

    def written(x):
        x = x.clone()
        before = x._version
        rotary.rotate(x, cos, sin, SPEC, out=x)
        return x, x._version > before

    def learnt(x):
        return torch.func.grad(lambda x: turned(x).square().sum())(x)

    calls = {
        "rotate": lambda: [turned(q) for _ in range(3)],
        "bfloat16": lambda: [turned(half), applied(half)],
        "apply": lambda: [applied(q), rotary.apply(SPEC, q, positions=torch.arange(5))],
        "rows": lambda: rotary.apply(DYNAMIC, q, positions=torch.arange(10).reshape(2, 5)),
        "in place": lambda: written(q),
        "zeros": lambda: turned(zeros),
        "backward": lambda: gradient(q),
        "vmap": lambda: torch.vmap(turned)(q),
        "vmap of a gradient": lambda: torch.vmap(learnt)(q),
        "jvp": lambda: torch.func.jvp(turned, (q,), (q,)),
        "jit": lambda: torch.jit.trace(turned, q)(q + 1),
        "make_fx": lambda: make_fx(turned)(q)(q + 1),
        "make_fx, float32": lambda: make_fx(
            lambda x: rotary.apply(SPEC, x, positions=torch.arange(5))
        )(q)(q + 1),
        "positions inside vmap": lambda: torch.vmap(
            lambda at: rotary.cos_sin(SPEC, at), out_dims=0
        )(torch.arange(6).reshape(2, 3)),
        "out inside vmap": lambda: torch.vmap(
            lambda x: rotary.rotate(x, cos, sin, SPEC, out=x.clone())
        )(q),
    }
    found = {}
    for name, call in calls.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch.jit.trace: shapes are constants
                found[name] = call()
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple | list):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@pytest.fixture(scope="module")
def wanted():
    pytest.importorskip("torch")
    return results()


@pytest.mark.parametrize("names", [*ALONE, ALL], ids=lambda names: f"{names[0]} of {len(names)}")
def test_bits_without_a_private_name_of_torch(names, wanted, without):
    without(*names)
    got = results()
    different = {name for name in wanted if not same(wanted[name], got[name])}
    refused = {"_is_batched", "_unwrapped"} & set(names)
    assert different <= ({"out inside vmap"} if refused else set()), {n: got[n] for n in different}
    if refused:
        assert "call it without out=" in str(got["out inside vmap"])


def test_a_forward_is_watched_without_dispatch_modes(monkeypatch):
    pytest.importorskip("torch")
    from rotary.blackbox import forward
    from rotary.kernels.torch import private as torch_private

    cos, sin = (table[:, :8] for table in rotary.cos_sin(SPEC, torch.arange(6)))

    class Model(torch.nn.Module):
        def forward(self, x):
            a, b = x[..., :8], x[..., 8:]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    monkeypatch.setattr(torch_private, "OperatorMode", torch.overrides.TorchFunctionMode)
    other = loaded("rotary.blackbox.forward_without", forward.__file__)
    x = torch.randn(1, 2, 6, 16, generator=torch.Generator().manual_seed(1))
    (wanted,), none = forward.watch(Model(), (x,), {}, 6)
    (got,), error = other.watch(Model(), (x,), {}, 6)
    assert none is error is None
    assert np.array_equal(got.y, wanted.y)
    assert got._replace(x=0, y=0, turned=0) == wanted._replace(x=0, y=0, turned=0)
    assert repr(got.turned) == repr(wanted.turned)


# --- Dynamo, which takes a second to import ---

WITHOUT_DYNAMO = """
import sys, torch, rotary
q, spec = torch.randn(1, 2, 3, 8), rotary.Rotary(head_dim=8)
expected = rotary.apply(spec, q)
assert "torch._dynamo" not in sys.modules
compiled = torch.compile(lambda x: rotary.apply(spec, x), backend="eager", fullgraph=True)
assert torch.equal(compiled(q), expected)
"""


def test_a_call_imports_no_dynamo_and_compiles_afterwards():
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", WITHOUT_DYNAMO], check=True)


def test_a_constant_is_marked_as_torch_marks_it():
    pytest.importorskip("torch")
    from rotary.kernels.torch.private import constant

    expected = torch.compiler.assume_constant_result(lambda: 0)
    assert vars(constant(lambda: 0)) == vars(expected) != {}


# --- Numba without them ---

WITHOUT = """
import sys
from rotary.kernels import private
asked = private.private
private.private = lambda library, path, fallback: (
    fallback if path in {taken} else asked(library, path, fallback)
)
import numpy as np, rotary
from rotary.kernels.cpu import compiled, loops
q, cos, sin = np.random.default_rng(0).standard_normal((3, 3, 8), np.float32)
sys.stdout.buffer.write(rotary.rotate(q, cos[:, :4], sin[:, :4], layout="half").tobytes())
cache = type(loops.on_numba_threads._cache).__name__
has_compiler = "numba.np.linalg" in sys.modules
print(cache, compiled._CFunc is not None, has_compiler, file=sys.stderr)
"""


def without_in_numba(*taken):
    """The bytes of a rotation, the class that keeps loops on disk, whether functions of C are kept,
    and whether Numba has loaded what it compiles with.
    """
    code = WITHOUT.format(taken=taken)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return done.stdout, *done.stderr.decode().split()[-3:]


@pytest.mark.parametrize(
    "taken",
    [
        (),
        ("core.caching.FunctionCache",),
        ("core.caching.IndexDataCacheFile",),
        ("core.ccallback.CFunc",),
        ("core.runtime.rtsys",),
        ("_load_overload",),
    ],
)
def test_bits_without_a_private_name_of_numba(taken):
    pytest.importorskip("numba")
    q, cos, sin = np.random.default_rng(0).standard_normal((3, 3, 8), np.float32)
    found, kept_by, keeps_c_functions, has_compiler = without_in_numba(*taken)
    assert found == rotary.rotate(q, cos[:, :4], sin[:, :4], layout="half").tobytes()
    assert kept_by == ("NullCache" if "core.caching" in str(taken) else "_Cache")
    assert keeps_c_functions == str("core.ccallback.CFunc" not in taken)
    assert has_compiler == "True" or not taken


def test_a_process_with_all_code_on_disk_loads_no_compiler():
    """Those above, which lack a name, load it."""
    pytest.importorskip("numba")
    without_in_numba()  # may compile
    *_, has_compiler = without_in_numba()
    assert has_compiler == "False"


def test_files_of_another_numba_are_not_written(monkeypatch):
    compiled = pytest.importorskip("rotary.kernels.cpu.compiled")
    result = compiled.compiled()(lambda x: x)  # of this file, which has a folder for the cache
    assert type(result._cache).__name__ == "_Cache"
    monkeypatch.setattr(compiled, "_OF_FILES", (*compiled._OF_FILES, "_no_such"))
    result = compiled.compiled()(lambda x: x)
    assert type(result._cache).__name__ == "NullCache"
    assert result(3) == 3
