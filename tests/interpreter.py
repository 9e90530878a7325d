"""The GPU kernels on the CPU: Triton runs them in NumPy, one program after the other."""

import importlib.util
import sys
from unittest import mock

import triton
from triton.runtime import interpreter

from rotary.kernels.triton import arithmetic as shared
from rotary.kernels.triton import fused as compiled_fused
from rotary.kernels.triton import kernel as compiled


def _interpreted(module):
    """The module once more, with kernels that Triton interprets."""
    spec = importlib.util.spec_from_file_location("rotary.kernels.triton.run", module.__file__)
    again = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(again)
    return again


with mock.patch.dict(sys.modules, {shared.__name__: _interpreted(shared)}):
    kernel, fused = _interpreted(compiled), _interpreted(compiled_fused)


def mended(monkeypatch):
    """Loop bounds are arrays of one number, which NumPy warns of, and 2.4 takes for no number."""
    patch = interpreter._patch_lang_tensor

    def number(self):
        return self.handle.data.item()

    def patched(tensor, *scope):
        patch(tensor, *scope)
        if scope:
            scope[0].set_attr(tensor, "__index__", number)
        else:  # Triton 3.4, of the oldest torch, never takes back what it sets
            tensor.__index__ = number

    def inside(self, *arguments, **options):
        return self.rewrite()(*arguments, **options)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    # a function that a kernel calls is given what the kernel already has, a fifth of all time
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", inside)
