"""What may import what, what is documented, and how long a file may be."""

import ast
import importlib
import inspect
import sys
from pathlib import Path

import pytest

import rotary

ROOT = Path(rotary.__file__).parent

# Every file of the package, and all it may import beside the standard library: files of ours by
# their path, packages of others by their name. An import inside a function counts as well.
FLOOR_0 = {"schedules", "layouts", "positions"}
FLOOR_1 = FLOOR_0 | {"spec"}
FLOOR_2 = FLOOR_1 | {"angles", "rotate", "rerotate", "configs", "hf", "attention"}
KERNELS = {"kernels", "kernels/geometry", "kernels/memory", "kernels/numpy"}
ARROWS = {
    "schedules": {"numpy"},
    "layouts": {"numpy"},
    "positions": {"numpy"},
    "spec": {"schedules"},
    "kernels/geometry": {"layouts"},
    "kernels/memory": {"numpy"},
    "kernels/blocks": {"numpy"},
    "kernels/numpy": {"layouts", "schedules", "kernels/geometry", "kernels/memory", "numpy"},
    "kernels/vector": {"numpy", "numba", "llvmlite"},
    "kernels/threads": {"kernels/vector", "numpy", "numba"},
    "kernels/cpu": {
        *("kernels/geometry", "kernels/memory", "kernels/numpy", "kernels/vector"),
        *("kernels/blocks", "kernels/threads", "numpy"),
    },
    "kernels/torch_state": {"torch"},
    "kernels/torch_tables": {"schedules", "kernels/numpy", "kernels/torch_state", "numpy", "torch"},
    "kernels/torch_formula": {"layouts", "kernels/geometry", "kernels/torch_state", "torch"},
    "kernels/torch_launch": {
        *("kernels", "kernels/blocks", "kernels/geometry", "kernels/memory", "kernels/triton"),
        *("kernels/torch_formula", "kernels/torch_state", "numpy", "torch"),
    },
    "kernels/torch_checks": {
        *("kernels", "kernels/memory", "kernels/torch_launch", "kernels/torch_state", "torch"),
    },
    "kernels/torch_exact": {
        *("kernels/geometry", "kernels/torch_checks", "kernels/torch_formula"),
        *("kernels/torch_launch", "kernels/torch_state", "kernels/torch_tables", "torch"),
    },
    "kernels/torch": {
        *("kernels", "kernels/blocks", "kernels/geometry", "kernels/memory"),
        *("kernels/torch_checks", "kernels/torch_exact", "kernels/torch_formula"),
        *("kernels/torch_launch", "kernels/torch_state", "kernels/torch_tables", "torch"),
    },
    "kernels/dtensor_shards": {"kernels/torch_state", "torch"},
    "kernels/dtensor": {
        *("kernels", "kernels/dtensor_shards", "kernels/geometry", "kernels/torch"),
        *("kernels/torch_checks", "kernels/torch_exact", "kernels/torch_launch"),
        *("kernels/torch_state", "kernels/torch_tables", "numpy", "torch"),
    },
    "kernels/jax": {"schedules", *KERNELS, "jax", "numpy"},
    "kernels/launch": {"kernels/geometry"},
    "kernels/triton": {"kernels/geometry", "kernels/launch", "torch", "triton"},
    "kernels": {
        *("kernels/cpu", "kernels/dtensor", "kernels/jax", "kernels/numpy", "kernels/torch"),
        "numpy",
    },
    "angles": {"kernels", "schedules", "spec", "numpy"},
    "rotate": {"angles", "kernels", "kernels/geometry", "spec", "numpy"},
    "rerotate": {"angles", "kernels", "kernels/geometry", "rotate", "spec"},
    "configs": {"spec"},
    "hf": {"configs", "spec", "schedules", "positions"},
    "attention/arrays": {"kernels", "numpy"},
    "attention/softmax": {"attention/arrays", "angles", "rotate", "spec"},
    "attention/linear": {"attention/arrays", "kernels", "rotate", "spec"},
    "attention/distances": {"attention/arrays", "attention/softmax", "angles", "rotate", "spec"},
    "attention/encodings": {"attention/arrays", "angles", "kernels", "rotate", "spec", "numpy"},
    "attention": {
        *("attention/distances", "attention/encodings", "attention/linear", "attention/softmax"),
    },
    "nn": {"rotate", "spec", "angles", "torch"},
    "ranks/holders": {"numpy"},
    "ranks/compare": {"ranks/holders", "angles", "spec", "numpy", "torch"},
    "ranks": {"ranks/compare"},
    "integrations": set(),
    "integrations/rotations": {"rotate", "torch"},
    "integrations/onnx": {"kernels", "kernels/geometry", "kernels/torch", "onnx", "torch"},
    "integrations/tables": {"angles", "hf", "spec", "torch"},
    "integrations/transformers": {
        *("integrations", "integrations/rotations", "integrations/tables", "torch"),
    },
    "fanout": set(),
    "checkpoint/names": set(),
    "checkpoint/heads": {"checkpoint/names", "configs", "spec"},
    "checkpoint/quantised": {"checkpoint/files", "checkpoint/names", "numpy"},
    "checkpoint/plan": {
        *("checkpoint/files", "checkpoint/heads", "checkpoint/names", "checkpoint/quantised"),
        *("configs", "hf", "layouts", "spec", "numpy"),
    },
    "checkpoint/files": {"configs"},
    "checkpoint/writing": {"checkpoint/files", "numpy"},
    "checkpoint/shards": {
        *("fanout", "checkpoint/files", "checkpoint/plan", "checkpoint/writing"),
        "numpy",
    },
    "checkpoint/labels": {"configs", "hf"},
    "checkpoint/verify": {
        *("fanout", "checkpoint/files", "checkpoint/names", "checkpoint/plan"),
        *("checkpoint/shards", "layouts", "numpy"),
    },
    "checkpoint/journal": {
        *("checkpoint/files", "checkpoint/plan", "checkpoint/shards", "checkpoint/verify"),
        *("checkpoint/writing", ""),  # the version
    },
    "checkpoint/convert": {
        *("checkpoint/files", "checkpoint/journal", "checkpoint/labels", "checkpoint/plan"),
        *("checkpoint/shards", "checkpoint/verify", "checkpoint/writing"),
    },
    "checkpoint": {"checkpoint/convert"},
    "peers": {"schedules", "numpy"},
    "programs": {"peers"},
    "diff": {"configs", "peers", "programs", "numpy"},
    "blackbox": set(),
    "blackbox/probe": {"numpy", "torch"},
    "blackbox/fit": {"schedules", "numpy"},
    "blackbox/pairs": {"blackbox/fit", "layouts", "numpy"},
    "blackbox/examine": {
        *("blackbox/probe", "blackbox/pairs", "blackbox/fit", "angles", "spec", "numpy"),
    },
    "identify": {"blackbox/probe", "blackbox/examine", "spec", "numpy"},
    # __init__.py: the public names; those of torch are loaded when they are asked for
    "": FLOOR_2 | {"integrations/transformers"},
    "dialects": {"angles", "hf", "spec"},
    "audit": {"analysis/precision", "angles", "configs", "hf", "spec", "numpy"},
    "analysis": {
        *("analysis/bounds", "analysis/decay", "analysis/extension", "analysis/precision"),
        *("analysis/search", "analysis/simulate", "analysis/spectrum"),
    },
    "analysis/spectrum": {"angles", "spec", "numpy"},
    "analysis/bounds": {"analysis/spectrum", "spec", "numpy"},
    "analysis/loops": {"numpy", "numba"},
    "analysis/search": {
        *("analysis/bounds", "analysis/loops", "analysis/spectrum", "spec", "numpy", "numba"),
    },
    "analysis/extension": {"analysis/bounds", "analysis/spectrum", "angles", "spec", "numpy"},
    "analysis/precision": {"analysis/spectrum", "angles", "schedules", "spec", "numpy"},
    "analysis/decay": {"analysis/spectrum", "angles", "layouts", "rotate", "spec", "numpy"},
    "analysis/simulate": {"analysis/decay", "analysis/spectrum", "angles", "spec", "numpy"},
    "plots/style": {"plots/points", "spec", "matplotlib"},
    "plots/files": {"matplotlib"},
    "plots/points": {"numpy"},
    "plots/spectrum": {
        *("analysis/decay", "analysis/extension", "analysis/spectrum", "angles", "spec"),
        *("plots/points", "plots/style", "numpy", "matplotlib"),
    },
    "plots/distance": {
        *("analysis/decay", "analysis/spectrum", "angles", "spec"),
        *("plots/points", "plots/style", "numpy", "matplotlib"),
    },
    "plots/reach": {
        *("analysis/bounds", "analysis/search", "analysis/spectrum", "spec"),
        *("plots/points", "plots/style", "numpy", "matplotlib"),
    },
    "plots/rounding": {
        *("analysis/precision", "analysis/spectrum"),
        *("plots/points", "plots/style", "numpy", "matplotlib"),
    },
    "plots/geometry": {
        *("analysis/decay", "analysis/spectrum", "layouts", "positions", "spec"),
        *("plots/points", "plots/style", "numpy", "matplotlib"),
    },
    "plots/models": {
        *("analysis/bounds", "analysis/spectrum", "spec", "plots/style", "numpy", "matplotlib"),
    },
    "plots": {
        *("plots/distance", "plots/files", "plots/geometry", "plots/models", "plots/reach"),
        *("plots/rounding", "plots/spectrum", "matplotlib"),
    },
    "explorer/models": {"configs", "hf", "reach", "spec"},
    "explorer/state": {"explorer/models", "spec"},
    "explorer/controls": {"explorer/models", "explorer/state"},
    "explorer/numbers": {
        *("analysis/bounds", "analysis/decay", "analysis/extension", "analysis/precision"),
        *("analysis/search", "analysis/spectrum", "angles", "explorer/state", "layouts"),
        *("spec", "numpy"),
    },
    "explorer/figures": {"explorer/numbers", "numpy", "plotly"},
    "explorer/guard": {
        *("explorer/figures", "explorer/numbers", "explorer/state", "hf", "gradio"),
    },
    "explorer/page": {
        *("explorer/controls", "explorer/figures", "explorer/models", "explorer/numbers"),
        *("explorer/state", "gradio", "plotly"),
    },
    "explorer/server": {
        *("explorer/guard", "explorer/page", "fastapi", "gradio", "starlette", "uvicorn"),
    },
    "explorer": {"explorer/page", "explorer/server"},
    "bench": {*FLOOR_2, *KERNELS, "numpy", "torch", "transformers"},
    "doctor": {*FLOOR_2, *KERNELS, "kernels/threads", "kernels/vector", "numpy", "numba", "torch"},
    "demo": {*FLOOR_2, *KERNELS, "bench", "numpy", "torch", "transformers"},
    "reach": {
        *("analysis/bounds", "analysis/extension", "analysis/precision", "analysis/spectrum"),
        *("configs", "hf", "spec", "numpy"),
    },
    "plan": {
        *("analysis/bounds", "analysis/extension", "analysis/search", "analysis/spectrum"),
        *("configs", "hf", "reach", "spec"),
    },
    "cli/terminal": {"typer", "rich"},
    "cli/app": {"cli/terminal", "hf", "spec", "typer"},
    "cli/machine": {"cli/app", "cli/terminal", "bench", "demo", "spec", "torch", "typer"},
    "cli/configs": {
        *("cli/app", "cli/terminal", "angles", "audit", "configs", "diff", "doctor", "hf"),
        *("cli/ranks", "identify", "typer"),
    },
    "cli/cluster": {"checkpoint/files", "distributed", "typer"},
    "cli/ranks": {
        *(
            "cli/app",
            "cli/terminal",
            "blackbox/probe",
            "identify",
            "ranks/compare",
            "torch",
            "typer",
        ),
    },
    "cli/context": {
        *("cli/app", "cli/cluster", "cli/terminal", "analysis/bounds", "analysis/decay"),
        *("configs", "explorer", "plan", "plots", "reach", "spec", "typer"),
    },
    "cli/checkpoints": {
        *("cli/app", "cli/cluster", "cli/terminal", "checkpoint/convert", "checkpoint/plan"),
        *("rich", "typer"),
    },
    "__main__": {"cli"},
    "cli": {"cli/app", "cli/checkpoints", "cli/machine", "cli/configs", "cli/context"},
}
# What may be imported at the top of any file that `import rotary` loads
LIGHT = {"numpy"}
MAX_LINES = 400
LONGER = {
    "schedules": "one function for each published schedule, with its source",
    "kernels/vector": "vector code is written out, and read from top to bottom",
}
FILES = {
    path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("__init__").rstrip("/"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports(tree, name, is_package):
    """(what is imported, whether at the top of the file), of the module `name` of ours."""
    at_top = set(_at_top(tree))
    package = name.split("/") if is_package else name.split("/")[:-1]
    package = [part for part in package if part]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [_ours(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + module
                targets = [_file([*base, alias.name]) for alias in node.names]
            elif module[0] == "rotary":
                targets = [_file([*module[1:], alias.name]) for alias in node.names]
            else:
                targets = [module[0]]
        elif isinstance(node, ast.Call) and _is_dynamic(node.func):
            targets = [
                _ours(argument.value.split(".")) if isinstance(argument, ast.Constant) else "?"
                for argument in node.args[:1]
            ]
        else:
            continue
        for target in targets:
            yield target, node in at_top


def _at_top(tree):
    """Nodes that run when the file is imported: not in a function, not for the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _at_top(node)


def _is_dynamic(function):
    return ast.unparse(function) in ("__import__", "importlib.import_module", "import_module")


def _ours(parts):
    return _file(parts[1:]) if parts[0] == "rotary" else parts[0]


def _file(parts):
    """The file of ours behind a dotted name: the longest part of it that is one."""
    for end in range(len(parts), 0, -1):
        if "/".join(parts[:end]) in {*ARROWS, *FILES}:
            return "/".join(parts[:end])
    return ""


def violations(source, name, is_package=False):
    """What the module `name` with this source imports against the table."""
    allowed = ARROWS[name]
    found = {target for target, _ in imports(ast.parse(source), name, is_package)}
    return sorted(found - allowed - set(sys.stdlib_module_names) - {"__future__"})


def test_every_file_is_in_the_table():
    assert set(FILES) <= set(ARROWS), "add the file to ARROWS, with what it may import"
    assert {"schedules", "kernels", "kernels/cpu", ""} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_arrows(name):
    path = FILES[name]
    assert violations(path.read_text(), name, path.name == "__init__.py") == []


def test_the_table_has_no_cycle_but_the_lazy_one():
    """`kernels` loads the kernel of a library on first use, and those use `kernels.host`."""
    below = {name: {n for n in ARROWS[name] if n in ARROWS} for name in ARROWS}
    below["kernels"] = set()
    done = set()
    while ready := {name for name in below if name not in done and below[name] <= done}:
        done |= ready
    assert done == set(ARROWS)


@pytest.mark.parametrize("name", ["", *sorted(FLOOR_2)])
def test_what_the_package_loads_is_light(name):
    path = FILES[name]
    found = imports(ast.parse(path.read_text()), name, path.name == "__init__.py")
    top = {target for target, at_top in found if at_top}
    assert top <= LIGHT | set(ARROWS) | set(sys.stdlib_module_names)


PLANTED = {
    "a floor above": ("schedules", "from .spec import Rotary", ["spec"]),
    "a floor above, whole": ("spec", "from . import angles", ["angles"]),
    "another library": ("spec", "import torch.nn", ["torch"]),
    "inside a function": ("angles", "def f():\n    import torch\n", ["torch"]),
    "inside a branch": ("angles", "if x:\n    from jax import numpy\n", ["jax"]),
    "for the type checker": ("angles", "if TYPE_CHECKING:\n    import torch\n", ["torch"]),
    "two dots": ("kernels/numpy", "from ..rotate import rotate", ["rotate"]),
    "two dots, whole": ("kernels/numpy", "from .. import spec", ["spec"]),
    "another kernel": ("kernels/cpu", "from . import torch", ["kernels/torch"]),
    "by its full name": ("layouts", "import rotary.spec", ["spec"]),
    "from its full name": ("layouts", "from rotary.kernels import cpu", ["kernels/cpu"]),
    "the public names": ("layouts", "from rotary import apply", [""]),
    "by a call": ("layouts", "importlib.import_module('numba.core')", ["numba"]),
    "by a call with a name made up": ("layouts", "__import__(name)", ["?"]),
    "in a package": ("kernels", "from .memory import Block", ["kernels/memory"]),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_checker_sees_a_planted_import(planted):
    name, source, expected = PLANTED[planted]
    assert violations(source, name, is_package=name == "kernels") == expected


def test_the_checker_lets_allowed_imports_pass():
    source = (
        "import os.path\nimport numpy as np\nfrom .spec import Rotary\nfrom .kernels import host"
    )
    assert violations(source, "angles") == []
    found = dict(imports(ast.parse("import a\ndef f():\n    import b\n"), "spec", False))
    assert found == {"a": True, "b": False}


@pytest.mark.parametrize("name", FILES)
def test_length_of_files(name):
    count = len(FILES[name].read_text().splitlines())
    assert (count > MAX_LINES) <= (name in LONGER), f"{count} lines: is it still one idea?"


@pytest.mark.parametrize("name", LONGER)
def test_exceptions_to_the_length_are_still_needed(name):
    assert len(FILES[name].read_text().splitlines()) > MAX_LINES


def undocumented(namespace, names):
    """Names without a docstring that holds an example; of modules, their functions are asked."""
    missing = []
    for name in names:
        value = getattr(namespace, name)
        if inspect.ismodule(value):
            members = [n for n, f in vars(value).items()
                       if inspect.isfunction(f) and f.__module__ == value.__name__
                       and not n.startswith("_")]  # fmt: skip
            missing += [f"{name}.{member}" for member in undocumented(value, members)]
            missing += [] if value.__doc__ else [name]
        elif ">>>" not in (value.__doc__ or ""):
            missing.append(name)
    return missing


def test_public_names_are_documented_with_an_example():
    assert list(rotary.__all__) == sorted(rotary.__all__)
    assert undocumented(rotary, rotary.__all__) == []
    methods = [n for n, m in vars(rotary.Rotary).items()
               if not n.startswith("_") and (callable(m) or isinstance(m, property))]  # fmt: skip
    assert {"to_dict", "num_axes"} <= set(methods)
    assert undocumented(rotary.Rotary, methods) == []


def test_the_documentation_checker_sees_what_is_missing():
    class Names:
        def bare():
            pass

        def without_example():
            """Says something."""

        def good():
            """Says something.

            >>> 1
            1
            """

    names = ["bare", "without_example", "good"]
    assert undocumented(Names, names) == ["bare", "without_example"]


def test_every_public_module_can_be_imported_by_its_name():
    for name in ("layouts", "positions", "schedules", "spec", "angles"):
        assert importlib.import_module(f"rotary.{name}").__doc__
