"""The kernel package that `rotary export-kernel` writes, loaded as Hugging Face's `kernels` does.

`tests/peers/hub_kernels.py` loads it by that library into models of transformers.
"""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import assert_refused, document, run
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)

import gpu_code
import transformers
import triton
from interpreter import mended
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rotary import layouts
from rotary.integrations import collect, hub_kernel, hub_layers
from rotary.kernels import geometry, memory, private
from rotary.kernels.torch import launch as torch_launch
from rotary.kernels.torch import private as torch_private
from rotary.kernels.torch import state as torch_state
from rotary.kernels.triton import arithmetic, sources
from rotary.kernels.triton import kernel as compiled
from rotary.kernels.triton import launch as triton_launch
from rotary.kernels.triton import plan as launch

ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
CUT_OFF = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}  # Triton's interpreter cuts
LOAD = """
import importlib.util, json, pathlib, sys
def load(variant):
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    hub_kernel.export(folder)
    return folder


@pytest.fixture(scope="module")
def package(folder):
    """The package in this process, with a Triton kernel that Triton interprets."""
    space = {}
    exec(LOAD, space)
    package = space["load"](folder / "build/torch-cuda")
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        importlib.import_module(f"{package.__name__}.triton")
    return package


@pytest.fixture
def launches(package, monkeypatch):
    """Tensors of this machine are taken for those of a GPU; the list of launches."""
    mended(monkeypatch)
    done = []
    start = package.triton._run
    monkeypatch.setattr(package.triton, "_run", lambda *a: done.append(a) or start(*a))
    monkeypatch.setattr(package.layers, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(package.layers, "gpu_kernel", lambda device: package.triton)
    return done


def operands(heads=(4, 2), width=16, pairs=8, dtype=torch.float32, order="bshd", seq=5):
    """q and k as transformers makes them, and angles of (batch, seq, pairs) in float64."""
    generator = torch.Generator().manual_seed(0)
    xs = []
    for count in heads:
        x = torch.randn(2, seq, count, width, generator=generator).to(dtype)
        xs.append(x.transpose(1, 2) if order == "bshd" else x.transpose(1, 2).contiguous())
    return (*xs, torch.randn(2, seq, pairs, generator=generator, dtype=torch.float64) * 9)


def turned(x, angles, layout="half", axis=1):
    """x with its pairs as complex numbers, times e^(i angle), in float64."""
    pairs = angles.shape[-1]
    wide, rest = x.double()[..., : 2 * pairs], x.double()[..., 2 * pairs :]
    if layout == "half":
        members = wide.unflatten(-1, (2, pairs)).transpose(-1, -2)
    else:
        members = wide.unflatten(-1, (pairs, 2))
    numbers = torch.view_as_complex(members.contiguous())
    numbers = numbers * torch.polar(torch.ones_like(angles), angles).unsqueeze(axis)
    members = torch.view_as_real(numbers)
    if layout == "half":
        members = members.transpose(-1, -2)
    return torch.cat((members.flatten(-2), rest), dim=-1)


def is_near(got, want, scale=1.0):
    """Whether a result is the exact one, rounded once; tables may be rounded as well."""
    limit = scale * ROUNDING[got.dtype] * want.abs().amax()
    return got.shape == want.shape and bool((got.double() - want).abs().amax() <= limit)


def tables(angles, dtype=torch.float32, columns="twice"):
    """cos and sin with one column for each pair, or these twice, as most models make them."""
    for table in (angles.cos(), angles.sin()):
        yield (table if columns == "once" else torch.cat((table, table), dim=-1)).to(dtype)


# --- what is written ---


def test_only_torch_and_triton_are_imported():
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for name, text in hub_kernel.sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 or (node.module or "").split(".")[0] in allowed, name


MADE_OF = {
    "layers.py": (
        geometry,
        layouts,
        private,
        torch_private,
        torch_state,
        torch_launch,
        hub_layers,
    ),
    "triton.py": (arithmetic, launch, memory, sources, triton_launch, compiled),
}


@pytest.mark.parametrize("name", MADE_OF)
def test_every_definition_is_the_current_one(name):
    """As Python itself gives the source of what this library runs."""
    text = hub_kernel.sources()[name]
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    assert len(nodes) > 15
    for node in nodes:
        (value,) = [vars(m)[node.name] for m in MADE_OF[name] if is_defined_in(m, node.name)]
        function = getattr(value, "fn", value)  # a kernel of Triton has one
        assert inspect.getsource(function).strip() in text, node.name


def is_defined_in(module, name):
    return getattr(vars(module).get(name), "__module__", None) == module.__name__


def test_the_kernel_is_among_them_and_tables_of_the_launch(package):
    assert inspect.getsource(compiled.kernel.fn) in hub_kernel.sources()["triton.py"]
    assert package.triton.NUMBERS == compiled.NUMBERS
    assert package.triton.DTYPES == compiled.DTYPES


def test_no_name_is_missing_and_no_import_unused(folder):
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_definitions_of_one_name_are_refused():
    both = {("spec.py", "Rotary"), ("rotate.py", "rotate"), ("kernels/torch/route.py", "rotate")}
    with pytest.raises(ValueError, match=r"rotate: defined in more than one of \["):
        collect.collected(both, {})


def test_files_say_where_they_come_from(folder):
    for name in ("layers.py", "triton.py", "__init__.py"):
        text = (folder / "build/torch-cpu" / name).read_text()
        assert "rotary export-kernel" in text
        assert "SPDX-License-Identifier: Apache-2.0" in text
        assert max(map(len, text.splitlines())) <= 100


def test_each_backend_has_what_the_library_asks_for(folder):
    ids = set()
    for backend in ("cpu", "cuda", "rocm"):
        metadata = json.loads((folder / f"build/torch-{backend}/metadata.json").read_text())
        ids.add(metadata.pop("id"))
        assert metadata == {
            "name": "rotary", "version": 1, "license": "Apache-2.0", "python-depends": [],
            "backend": {"type": backend},
        }  # fmt: skip
    assert len(ids) == 3


def test_it_runs_where_this_library_is_not(folder):
    """And without Numba, without Triton on a CPU, and by Triton's interpreter."""
    code = LOAD + """
for name in ("rotary", "numba", "triton"):
    sys.modules[name] = None
import torch
package = load(pathlib.Path(sys.argv[1]) / "build/torch-cpu")
torch.manual_seed(0)
q, k = torch.randn(1, 3, 2, 8).transpose(1, 2).requires_grad_(), torch.randn(1, 1, 3, 8)
cos, sin = torch.randn(2, 1, 3, 4)
got, _ = package.apply_rotary(q, k, cos, sin)
got.sum().backward()
want = torch.cat((q[..., :4] * cos[:, None] - q[..., 4:] * sin[:, None],
                  q[..., 4:] * cos[:, None] + q[..., :4] * sin[:, None]), -1)
(grad,) = torch.autograd.grad(want.sum(), q)
assert torch.equal(got, want) and torch.allclose(q.grad, grad)
layer = package.layers.apply_rotary_transformers()
assert torch.equal(layer(q, None, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))[0], want)

del sys.modules["triton"]
from triton.runtime import interpreter
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
interpreter._patch_lang_tensor = patched
from importlib import import_module
kernel = import_module(package.__name__ + ".triton")
geometry = package.layers.Geometry(0, 4, "half", "half", (0, 1, 2))
(by_kernel,) = kernel.rotate((q.detach(),), cos[:, None], sin[:, None], None, geometry, None)
assert torch.equal(by_kernel, want)
assert [name for name in sys.modules if name.split(".")[0] in ("rotary", "numba")] == [
    "rotary", "numba"]
print("done")
"""  # fmt: skip
    done = run(str(folder), code=code, TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")
    assert (done.code, done.out) == (0, "done\n"), done.err


# --- what it computes ---


def functions_of_transformers():
    """Every function of the installed transformers that a layer takes the place of, by model."""
    mark = '@use_kernel_forward_from_hub("rotary_pos_emb")\n'
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text()
        if mark in text:
            space = {"torch": torch}
            for name in ("rotate_half", "_apply_rotary_emb", "apply_rotary_pos_emb"):
                if source := re.search(rf"^def {name}\(.*?(?=^\S(?<!\)))", text, re.M | re.S):
                    exec("from __future__ import annotations\n" + source[0], space)
            yield path.parent.name, space["apply_rotary_pos_emb"]


ONE_COLUMN = ("apply_rotary_half_width", "apply_rotary_interleaved")  # for each pair
OTHER_LAYERS = {
    "gpt_oss": "apply_rotary_half_width",
    "openai_privacy_filter": "apply_rotary_interleaved",
    "nanochat": "apply_rotary_conjugate",  # until transformers 5.23
}


def test_every_function_of_transformers(package):
    """Bit for bit in float32, and no model needs another layer than the page says."""
    q, k, angles = operands()
    functions = dict(functions_of_transformers())
    assert len(functions) == 122  # as docs/use_in/hub_kernels.md counts them
    assert OTHER_LAYERS.keys() - functions.keys() <= {"nanochat"}
    for model, function in functions.items():
        name = OTHER_LAYERS.get(model, "apply_rotary_transformers")
        cos, sin = tables(angles, columns="once" if name in ONE_COLUMN else "twice")
        layer = getattr(package.layers, name)()
        for got, want in zip(layer(q, k, cos, sin), function(q, k, cos, sin), strict=True):
            assert torch.equal(got, want), model
        assert list(inspect.signature(layer.forward).parameters.values())[4].default == 1


@pytest.mark.parametrize("way", ["operators", "kernel"])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_dtypes(dtype, table_dtype, way, package, request):
    done = request.getfixturevalue("launches") if way == "kernel" else None
    q, k, angles = operands(dtype=dtype)
    cos, sin = tables(angles, table_dtype)
    got = package.layers.apply_rotary_transformers()(q, k, cos, sin)
    wide = apply_rotary_pos_emb(q.double(), k.double(), cos.double(), sin.double())
    for mine, want in zip(got, wide, strict=True):
        assert mine.dtype == dtype
        assert is_near(mine, want, 1 if done is None else CUT_OFF[dtype])
    if done is not None:
        ((_, given, *_),) = done  # q and k in one launch
        is_copied = table_dtype == torch.float64
        assert given[4].dtype == given[5].dtype == (torch.float32 if is_copied else table_dtype)
        for mine, want in zip(given[4:6], (cos, sin), strict=True):
            assert (mine.data_ptr() == want.data_ptr()) != is_copied
        assert got[0].stride() == q.stride()


FORMS = {
    "all channels": ({"pairs": 8}, "half", "apply_rotary_transformers", "twice"),
    "a quarter": ({"pairs": 2}, "half", "apply_rotary_transformers", "twice"),
    "one half, said": ({"pairs": 4}, "half", "apply_rotary_partial", "twice"),
    "interleaved": ({"pairs": 8}, "interleaved", "apply_rotary_interleaved", "once"),
    "interleaved, part": ({"pairs": 3}, "interleaved", "apply_rotary_interleaved", "once"),
    "half width": ({"pairs": 8}, "half", "apply_rotary_half_width", "once"),
    "one key head": ({"heads": (4, 1)}, "half", "apply_rotary_transformers", "twice"),
    "contiguous": ({"order": "bhsd"}, "half", "apply_rotary_transformers", "twice"),
    "one token": ({"seq": 1}, "half", "apply_rotary_transformers", "twice"),
    "no token": ({"seq": 0}, "half", "apply_rotary_transformers", "twice"),
    "no power of two": ({"width": 20, "pairs": 10}, "half", "apply_rotary_transformers", "twice"),
}


@pytest.mark.parametrize("way", ["operators", "kernel"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, way, package, request):
    """q and k, q alone, heads before and behind the tokens; the kernel has the operators' bits."""
    options, layout, name, columns = FORMS[form]
    q, k, angles = operands(**options)
    cos, sin = tables(angles, columns=columns)
    layer = getattr(package.layers, name)()
    by_operators = layer(q, k, cos, sin)
    done = request.getfixturevalue("launches") if way == "kernel" else None
    got = layer(q, k, cos, sin)
    alone, none = layer(q, None, cos, sin)
    behind = layer(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert none is None
    for x, mine, same, other in zip((q, k), got, by_operators, behind, strict=True):
        assert x.numel() == 0 or is_near(mine, turned(x, angles, layout))
        assert torch.equal(mine, same)
        assert torch.equal(mine, other.transpose(1, 2))
    assert torch.equal(alone, got[0])
    assert done is None or len(done) == (0 if "no token" in form else 3)


@pytest.mark.parametrize("way", ["operators", "kernel"])
def test_other_ranks_and_shared_rows(way, package, request):
    if way == "kernel":
        request.getfixturevalue("launches")
    q, k, angles = operands()
    apply, (cos, sin) = package.apply_rotary, tables(angles, columns="once")
    shared = apply(q, k, cos[:1], sin[:1])
    for x, mine in zip((q, k), shared, strict=True):
        assert is_near(mine, turned(x, angles[:1].expand(2, -1, -1)))
    packed = apply(q[0].transpose(0, 1), None, cos[0], sin[0])[0]  # (tokens, heads, head_dim)
    assert torch.equal(packed.transpose(0, 1), apply(q[:1], None, cos[:1], sin[:1])[0][0])
    back = apply(*apply(q, k, cos, sin), cos, sin, conjugate=True)
    assert all(is_near(a, b.double(), 2) for a, b in zip(back, (q, k), strict=True))


ROWS = json.loads((Path(__file__).parent / "golden/peers/hub_kernels.json").read_text())["rows"]


def test_models_of_transformers_as_they_were_run():
    """By `kernels` itself: logits and gradients, 0.0 apart in float32."""
    float32 = [row for row in ROWS if "gradients" in row and "float32" in row["arguments"]]
    bfloat16 = [row for row in ROWS if "gradients" in row and "bfloat16" in row["arguments"]]
    assert len(float32) == len(bfloat16) == 20
    assert all(row["logits"] == row["gradients"] == 0.0 for row in float32)
    assert all(row["logits"] == row["gradients"] == "rounding" for row in bfloat16)
    recorded, wrong_layer, _ = ROWS[40:]
    assert recorded["logits"] == "rounding"  # Inductor
    assert "use layer apply_rotary_half_width" in wrong_layer["refused"]


# --- gradients and torch.compile ---


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gradients_of_every_operand(layout, package):
    q, k, angles = operands(heads=(2, 1), width=6, pairs=2, dtype=torch.float64, seq=2)
    given = [x[:1].requires_grad_() for x in (q, k, angles.cos(), angles.sin())]

    def function(*given):
        return package.apply_rotary(*given, layout=layout)

    assert gradcheck(function, given, fast_mode=True)
    assert gradgradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_by_the_kernel(dtype, layout, package, launches):
    """Those of the exact rotation back, of q and k, of one of them, and of a gradient."""
    q, k, angles = operands(pairs=4, dtype=dtype)
    cos, sin = tables(angles, columns="once")
    q.requires_grad_()
    k.requires_grad_()
    got = package.apply_rotary(q, k, cos, sin, layout=layout)
    weights = [torch.randn(x.shape).to(dtype) for x in got]
    loss = sum((w * x).sum() for w, x in zip(weights, got, strict=True))
    grads = torch.autograd.grad(loss, (q, k), retain_graph=True)
    for weight, grad in zip(weights, grads, strict=True):
        assert is_near(grad, turned(weight, -angles, layout), CUT_OFF[dtype])
    (alone,) = torch.autograd.grad((weights[1] * got[1]).sum(), k, create_graph=True)
    assert torch.equal(alone, grads[1])
    assert len(launches) == 3
    w = weights[1].clone().requires_grad_()
    (grad,) = torch.autograd.grad((w * package.apply_rotary(k, None, cos, sin)[0]).sum(), k,
                                  create_graph=True)  # fmt: skip
    (twice,) = torch.autograd.grad(grad.sum(), w)
    assert is_near(twice, turned(torch.ones_like(w), angles), CUT_OFF[dtype])


def test_tables_that_want_a_gradient_go_by_operators(package, launches):
    q, k, angles = operands()
    cos, sin = (table.requires_grad_() for table in tables(angles, columns="once"))
    package.apply_rotary(q, k, cos, sin)[0].sum().backward()
    assert cos.grad is not None
    assert launches == []


@pytest.mark.parametrize("name", hub_kernel.LAYERS)
def test_compile_records_one_graph_and_no_kernel(name, package, launches):
    """As the flag `can_torch_compile` says; the gradient too."""
    torch._dynamo.reset()
    layer = getattr(package.layers, name)()
    q, k, angles = operands()
    cos, sin = tables(angles, columns="once" if name in ONE_COLUMN else "twice")
    recorded = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for function in (layer, recorded):
        xs = [x.detach().requires_grad_() for x in (q, k)]
        got = function(*xs, cos, sin)
        before = len(launches)
        results.append((*got, *torch.autograd.grad(sum(x.square().sum() for x in got), xs)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert before == len(launches) == 2  # those of the first function


def test_vmap_and_forward_mode(package, launches):
    q, _, angles = operands()
    cos, sin = tables(angles, columns="once")
    want, _ = package.apply_rotary(q, None, cos, sin)
    each = torch.func.vmap(lambda x, c, s: package.apply_rotary(x[None], None, c[None], s[None])[0])
    assert torch.equal(each(q, cos, sin)[:, 0], want)
    _, tangent = torch.func.jvp(lambda x: package.apply_rotary(x, None, cos, sin)[0], (q,), (q,))
    assert torch.equal(tangent, want)
    assert len(launches) == 1


@pytest.mark.parametrize("name", hub_kernel.LAYERS)
def test_layers_are_what_the_library_takes(name, package):
    """A class without a constructor and without members but the two flags."""
    layer = getattr(package.layers, name)
    assert issubclass(layer, nn.Module)
    assert layer.__init__ is nn.Module.__init__
    assert set(dir(layer)) - set(dir(nn.Module)) == {"has_backward", "can_torch_compile"}
    assert layer.has_backward is layer.can_torch_compile is True
    kinds = [each.kind for each in inspect.signature(layer.forward).parameters.values()]
    theirs = inspect.signature(apply_rotary_pos_emb).parameters.values()
    assert kinds[1:] == [each.kind for each in theirs]


@pytest.mark.parametrize(("name", "pairs", "columns", "message"), [
    ("apply_rotary_transformers", 4, "twice", "cos has 8 columns and a head 16 channels: use layer "
     r"apply_rotary_half_width \(gpt_oss\) or"),
    ("apply_rotary_partial", 3, "once", "cos has 3 columns; one for each"),
    ("apply_rotary_half_width", 8, "twice", "tables of 16 pairs rotate 32 channels"),
    ("apply_rotary_interleaved", 8, "twice", "tables of 16 pairs rotate 32 channels"),
    ("apply_rotary_partial", 9, "twice", "tables of 9 pairs rotate 18 channels, and a head has 16"),
])  # fmt: skip
def test_tables_of_another_width_are_refused(name, pairs, columns, message, package):
    q, k, angles = operands(pairs=pairs)
    with pytest.raises(ValueError, match=message):
        getattr(package.layers, name)()(q, k, *tables(angles, columns=columns))


def test_what_does_not_fit_is_refused(package):
    q, k, angles = operands()
    apply, (cos, sin) = package.apply_rotary, tables(angles, columns="once")
    with pytest.raises(TypeError, match=r"of one dtype .*float32 on cpu and torch.bfloat16"):
        apply(q, k.bfloat16(), cos, sin)
    with pytest.raises(TypeError, match="must be floating point"):
        apply(q.long(), None, cos, sin)
    with pytest.raises(TypeError, match="cos and sin must have one dtype and lie on cpu"):
        apply(q, k, cos, sin.double())
    with pytest.raises(TypeError, match="cos and sin must have one dtype and lie on cpu"):
        apply(q, k, cos.to("meta"), sin)
    for dtype in (torch.complex64, torch.int64):
        with pytest.raises(TypeError, match=f"cos and sin must be floating point, got {dtype}"):
            apply(q, k, cos.to(dtype), sin.to(dtype))
    with pytest.raises(ValueError, match="differ in shape"):
        apply(q, k, cos, sin[:, :1])
    with pytest.raises(ValueError, match="layout must be 'half' or 'interleaved', got 'neox'"):
        apply(q, k, cos, sin, layout="neox")
    for wrong in ({"cos": cos[:, :3], "sin": sin[:, :3]}, {"unsqueeze_dim": 2}, {"k": k[:1]},
                  {"k": k[..., :8]}, {"q": q[0]}, {"q": q[:1], "k": k[:1]},
                  {"k": k[:1], "cos": cos[:1], "sin": sin[:1]}):  # fmt: skip
        with pytest.raises(ValueError, match="do not fit; for "):
            apply(**({"q": q, "k": k, "cos": cos, "sin": sin} | wrong))


def test_the_compiler_makes_the_same_code_of_it(folder, monkeypatch, tmp_path):
    """For sm_90, of the exported kernel and of ours, at the strides of transformers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    space = {}
    exec(LOAD, space)
    package = space["load"](folder / "build/torch-rocm")
    exported = importlib.import_module(f"{package.__name__}.triton")
    xs = tuple(torch.empty(2, 512, n, 128, dtype=torch.bfloat16).transpose(1, 2) for n in (32, 8))
    table = torch.empty(2, 512, 128)[:, None, :, :64]
    codes = []

    def compile_only(plan, given, *_):
        codes.append(gpu_code.code_of(plan, given, 90))

    half = geometry.Geometry(0, 64, "half", "half", (0, 1, 2))
    for module in (exported, compiled):
        monkeypatch.setattr(gpu_code, "compiled", module)
        monkeypatch.setattr(module, "processors_of", lambda device: 132)
        monkeypatch.setattr(module, "_run", compile_only)
        module.rotate(xs, table, table, None, half, None)
    assert len(codes) == 2
    assert codes[0] == codes[1]
    assert codes[0].listing == codes[1].listing
    assert set(codes[0].loads) == set(codes[0].stores) == {128}
    assert codes[0].local == 0


# --- the folder and the command ---


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="is not empty: name a new folder"):
        hub_kernel.export(tmp_path)
    with pytest.raises(FileExistsError, match="mine is a file: name a new folder"):
        hub_kernel.export(tmp_path / "mine")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist: make it first"):
        hub_kernel.export(tmp_path / "nowhere" / "kernel")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("is_new", [True, False])
def test_nothing_is_left_half_written(is_new, tmp_path, monkeypatch):
    folder = tmp_path / "kernel"
    if not is_new:
        folder.mkdir()
    write, count = Path.write_text, []

    def fail_at_the_fifth(self, *given, **named):
        count.append(self)
        if len(count) == 5:
            raise OSError("no space left on device")
        return write(self, *given, **named)

    monkeypatch.setattr(Path, "write_text", fail_at_the_fifth)
    with pytest.raises(OSError, match="no space left"):
        hub_kernel.export(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ([] if is_new else ["kernel"])


def test_an_empty_folder_is_filled_also_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = hub_kernel.export(".")
    assert sorted(path for path in Path().rglob("*") if path.is_file()) == files
    assert len(files) == 12


def test_the_command(tmp_path, main):
    told = document(main("export-kernel", str(tmp_path / "kernel"), "--json"))
    assert told["layers"] == list(hub_kernel.LAYERS)
    assert all((tmp_path / "kernel" / file).is_file() for file in told["files"])
    assert_refused(main("export-kernel", str(tmp_path / "kernel")), "is not empty")
    done = main("export-kernel", str(tmp_path / "other"))
    assert (done.code, done.err) == (0, "")
    assert "build/torch-cuda/triton.py" in done.out
    assert 'layer_name="apply_rotary_transformers"' in done.out
    assert "DIR" in main("export-kernel", "--help").out
