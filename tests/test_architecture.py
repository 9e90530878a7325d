"""What may import what, what is documented, and how long a file may be."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
from tools.architecture import (
    FILES,
    FLOORS,
    LIBRARIES,
    PICTURE,
    UPWARD,
    floor,
    imports,
    svg,
    unit_of,
)

import rotary

LOADED_BY_IMPORT = {
    "angles",
    "cache",
    "configs",
    "fused",
    "rotate",
    "rerotate",
    "layouts",
    "positions",
    "spec",
    "strict_json",
    "words",
}
MAX_LINES = 400
LONGER = {
    "schedules": "one function for each published schedule, with its source",
    "positions": "one function for each way to number tokens",
}


def violations(source, name, is_package=False):
    """What the module `name` with this source imports against the tables."""
    unit = unit_of(name)
    libraries = {"numpy", "__future__", *LIBRARIES.get(unit, ()), *sys.stdlib_module_names}
    found = {target for target, _ in imports(ast.parse(source), name, is_package)}
    return sorted(target for target in found if not (
        (name, target) in UPWARD
        or (target in FILES and (floor(target) < floor(name) or unit_of(target) == unit))
        or (target not in FILES and target in libraries)
    ))  # fmt: skip


def test_every_file_has_a_floor():
    units = {unit_of(name) for name in FILES if name not in ("", "__main__")}
    assert units == set().union(*FLOORS)
    assert sum(map(len, FLOORS)) == len(units)


def test_the_table_for_contributors_has_these_floors():
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text().split("## Where to start")[1]
    shown = [set() for _ in FLOORS]
    for number, names in re.findall(r"^\| (\d+) \| (.*?) \|", page, re.MULTILINE):
        shown[int(number)] |= {name.rstrip("/") for name in re.findall(r"`([^`]+)`", names)}
    shown[3].remove("__init__")
    assert shown == list(FLOORS)


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down(name):
    path = FILES[name]
    assert violations(path.read_text(), name, path.name == "__init__.py") == []


def test_modules_that_tests_skip_without_are_there():
    """A test that skips where a library is absent would skip as well where ours has moved."""
    asked = re.compile(r'(?:importorskip|if_installed)\(\s*f?"(rotary\.[^"]*)"')
    named = {
        (path.name, name)
        for path in Path(__file__).parent.glob("*.py")
        for name in asked.findall(path.read_text())
    }
    assert len(named) > 10
    for file, name in sorted(named):
        assert name.removeprefix("rotary.").replace(".", "/") in FILES, f"{file}: {name}"


def test_no_two_files_need_each_other():
    """Also inside a folder."""
    below = {
        name: {target for target, _ in imports(ast.parse(path.read_text()), name,
                                               path.name == "__init__.py")
               if target in FILES and target != name and (name, target) not in UPWARD}
        for name, path in FILES.items()
    }  # fmt: skip
    done = set()
    while ready := {name for name in below if name not in done and below[name] <= done}:
        done |= ready
    assert done == set(FILES)


@pytest.mark.parametrize("name", [n for n in FILES if n.split("/")[0] in LOADED_BY_IMPORT | {""}])
def test_what_the_package_loads_is_light(name):
    path = FILES[name]
    found = imports(ast.parse(path.read_text()), name, path.name == "__init__.py")
    top = {target for target, at_top in found if at_top}
    assert top <= {"numpy", *FILES, *sys.stdlib_module_names}


PLANTED = {
    "a floor above": ("schedules", "from .spec import Rotary", ["spec"]),
    "a floor above, whole": ("spec", "from . import angles", ["angles"]),
    "another library": ("spec", "import torch.nn", ["torch"]),
    "inside a function": ("angles", "def f():\n    import torch\n", ["torch"]),
    "inside a branch": ("angles", "if x:\n    from jax import numpy\n", ["jax"]),
    "for the type checker": ("angles", "if TYPE_CHECKING:\n    import torch\n", ["torch"]),
    "two dots": ("kernels/numpy", "from ..rotate import rotate", ["rotate"]),
    "two dots, whole": ("kernels/numpy", "from .. import rotate", ["rotate"]),
    "the same floor": ("analysis/bounds", "from ..programs import diff", ["programs/diff"]),
    "by its full name": ("layouts", "import rotary.spec", ["spec"]),
    "from its full name": ("layouts", "from rotary.kernels import memory", ["kernels/memory"]),
    "the public names": ("layouts", "from rotary import apply", [""]),
    "by a call": ("layouts", "importlib.import_module('numba.core')", ["numba"]),
    "by a call with a name made up": ("layouts", "__import__(name)", ["?"]),
    "in a package": ("kernels", "from ..angles import turns", ["angles"]),
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


def test_the_picture_is_of_this_code():
    assert PICTURE.read_text() == svg(), "python -m tools.architecture draws it again"


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
