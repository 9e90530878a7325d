"""The GPU kernel on the CPU: Triton runs it in NumPy, one program after the other."""

import importlib.util

import triton
from triton.runtime import interpreter

from rotary.kernels.triton import kernel as compiled


def _interpreted():
    """The module of the kernel once more, with a kernel that Triton interprets."""
    spec = importlib.util.spec_from_file_location("rotary.kernels.triton.run", compiled.__file__)
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


kernel = _interpreted()


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
