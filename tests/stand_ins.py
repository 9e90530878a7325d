"""Small modules in the place of programs that are not installed where the tests run."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


def install(monkeypatch, modules, ours):
    """Our module `ours`, imported anew while `modules`, {dotted name: its names}, stand in."""
    for name, names in modules.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.delitem(sys.modules, ours, raising=False)
    fresh = importlib.import_module(ours)
    monkeypatch.setitem(sys.modules, ours, fresh)  # so that it is taken away again
    return fresh
