"""The GPU kernel on the CPU: Triton runs it in NumPy, one program after the other."""

import importlib.util

import triton
from triton.runtime import interpreter

from rotary.kernels import triton as compiled


def _interpreted():
    """The module of the kernel once more, with a kernel that Triton interprets."""
    spec = importlib.util.spec_from_file_location("rotary.kernels.run", compiled.__file__)
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


kernel = _interpreted()


def mended(monkeypatch):
    """Loop bounds are arrays of one number, which NumPy 2.4 no longer takes for a number."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
