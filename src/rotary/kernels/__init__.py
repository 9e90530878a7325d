"""One module per array library, each with the same verbs; this file picks one by the array's type.

rotate(xs, cos, sin, positions, options, conjugate, out)            the rotation
tables(positions, turns, scales, axes, backwards)                   cos and sin, exact
tables_float64(positions, inv_freq, scales, axes, backwards)        of fractional positions
tables_float32(positions, inv_freq, scales, axes, backwards)        in float32 steps

And where a library can do more:
makes_angles(xs, positions, out, num_axes)                          whether it takes the next call
rotate_exact(xs, turns, factor, axes, positions, options, ...)      the rotation without tables
on_shards(make, positions, num_axes, seq_len, depends_on_length)    tables of distributed positions
"""

import sys
from types import ModuleType
from typing import Any

import numpy as np

KNOWN = "numpy, torch, jax"
NEEDS_LENGTH = "a spec that depends on the length needs seq_len as a whole number"
NESTED = (
    "a nested tensor is not rotated as it is: rotate every tensor of x.unbind(), or "
    "x.to_padded_tensor(0.0), or x.values() of a jagged one with one position per token"
)


def kernel_of(array: Any) -> ModuleType:
    """The kernel module for an array; TypeError, naming the known libraries, for anything else.

    >>> import numpy
    >>> kernel_of(numpy.zeros(2)).__name__
    'rotary.kernels.cpu'
    """
    if type(array) is np.ndarray or (isinstance(array, np.ndarray) and not way_on(type(array))):
        return host()
    torch = sys.modules.get("torch")  # a torch tensor cannot exist before torch is imported
    if torch is not None and isinstance(array, torch.Tensor):
        if array.is_nested:
            raise TypeError(NESTED)
        if type(array) is not torch.Tensor and is_distributed(array):
            from . import dtensor

            return dtensor
        return _torch_kernel or _load_torch_kernel(torch)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):
        from . import jax as module

        return module
    raise TypeError(f"cannot rotate a {_described(array)}")


def is_distributed(tensor: Any) -> bool:
    """Whether a torch tensor is a DTensor, of which this process holds a part.

    >>> is_distributed(3)
    False
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_positions(positions: Any) -> None:
    """Refuse positions that only a copy from a GPU, or the loss of their mask, would read.

    >>> check_positions([0, 1, 2])
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(positions, torch.Tensor):
        if positions.is_nested:
            raise TypeError(NESTED)
        return
    if way_on(type(positions)):
        raise TypeError(f"cannot take positions from a {_described(positions)}")


def _described(array: Any) -> str:
    kind = type(array)
    libraries = f"array libraries known: {KNOWN}{way_on(kind)}"
    return f"{kind.__module__}.{kind.__qualname__}; {libraries}"


def way_on(kind: type) -> str:
    """What to do with an array that is not taken: of a GPU library, of torch.fx, or masked.

    >>> way_on(np.ndarray)
    ''
    """
    library = kind.__module__.partition(".")[0]
    if kind.__module__ == "torch.fx.proxy":
        return (
            "; torch.fx.symbolic_trace does not look into rotary: record with torch.export.export "
            "or make_fx, or mark your function that calls rotary by torch.fx.wrap"
        )
    if library == "mlx":
        return "; go on with torch.from_dlpack(x) or numpy.array(x)"
    if hasattr(kind, "__cuda_array_interface__") and library not in ("jax", "jaxlib"):
        return "; go on with torch.from_dlpack(x), which copies nothing"
    if issubclass(kind, np.ma.MaskedArray):
        return "; a mask would be lost: go on with x.data, or x.filled(0), and mask the result"
    return ""


def host() -> ModuleType:
    """The kernel for memory of this machine: `cpu`, or the law where Numba cannot be loaded.

    >>> host().__name__
    'rotary.kernels.cpu'
    """
    global _host
    if _host is None:
        try:
            from . import cpu as module
        except ImportError:  # the law gives the same numbers, slowly; `rotary doctor` says so
            from . import numpy as module  # type: ignore[no-redef]
        _host = module
    return _host


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer of JAX: its numbers are known only when the compiled call runs.

    >>> is_traced(3)
    False
    """
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def is_open(value: Any) -> bool:
    """Whether a value is a size that torch.export leaves open, for the program to take any.

    >>> is_open(3)
    False
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.SymInt)


def _load_torch_kernel(torch: ModuleType) -> ModuleType:
    global _torch_kernel
    from . import torch as module

    if not torch.compiler.is_compiling():  # a traced call must have no side effect
        _torch_kernel = module
    return module


_host: ModuleType | None = None
_torch_kernel: ModuleType | None = None
