"""What is asked of an array library: `Kernel`, one line for each; and which one an array gets.

A library costs a file with a `KERNEL` and an entry in `KERNELS`; `numpy.py` is the reference, and
says what each of them computes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

NEEDS_LENGTH = "a spec that depends on the length needs seq_len as a whole number"
NESTED = (
    "a nested tensor is not rotated as it is: rotate every tensor of x.unbind(), or "
    "x.to_padded_tensor(0.0), or x.values() of a jagged one with one position per token"
)


def _never(*_: Any) -> bool:
    return False


@dataclass(frozen=True)
class Kernel:
    """What an array library has to give; a rotation and tables first, then what positions need."""

    name: str
    namespace: str  # the module with exp, where, stack, ...
    rotate: Callable[..., tuple[Any, ...]]  # (xs, cos, sin, positions, options, conjugate, out)
    tables: Callable[..., tuple[Any, Any]]  # cos and sin: (positions, turns, scales, axes, back)
    tables_float64: Callable[..., tuple[Any, Any]]  # of fractional positions, from inv_freq
    tables_float32: Callable[..., tuple[Any, Any]]  # in float32 steps, from inv_freq
    arithmetic: Any  # how the library computes frequencies in float32, see `schedules`

    takes: Callable[[Any], bool]  # whether an array may stand beside one of this library
    inspect: Callable[[Any], tuple[str, Any, Any]]  # kind, smallest and largest of positions
    row_lengths: Callable[[Any], list[int]]  # largest position of each row, plus one
    arange: Callable[[Any, int], Any]  # positions 0 .. count - 1 on the device of an array
    as_positions: Callable[[Any, Any], Any]  # lists, or positions of another library, beside x
    repeat_rows: Callable[[Any, int], Any]  # the same positions for so many rows
    to_numpy: Callable[[Any], Any]  # positions in memory as a NumPy array, None if they are not
    from_numpy: Callable[[Any], Any]  # a table made by NumPy
    host_constant: Callable[..., Any]  # a function called on the host, also while tracing
    is_cacheable: Callable[[Any], bool]  # whether tables for an array may be kept
    device_key: Callable[[Any], str]  # where they live, as part of the key of the cache

    check: Callable[[Any], None] | None = None  # refuses an array whose type alone says nothing
    makes_angles: Callable[..., bool] = _never  # whether `rotate_exact` takes (xs, positions, ...)
    rotate_exact: Any = None  # the rotation by angles worked out on the way, without tables
    on_shards: Any = None  # tables of positions that are spread over processes


def kernel_of(array: Any) -> Kernel:
    """The kernel for an array; TypeError, naming the known libraries, for anything else.

    >>> import numpy
    >>> kernel_of(numpy.zeros(2)).name
    'compiled loops'
    """
    kernel = _known.get(type(array)) or _find(array)
    if kernel.check is not None:
        kernel.check(array)
    return kernel


def _find(array: Any) -> Kernel:
    kernels = [load() for name, load in KERNELS.items() if _is_a(array, name)]
    if not (kernels and kernels[0].takes(array)):
        raise TypeError(f"cannot rotate a {_described(array)}")
    # another thread may be in the middle of importing torch
    compiler: Any = getattr(sys.modules.get("torch"), "compiler", None)
    if compiler is None or not compiler.is_compiling():  # a traced call has no side effect
        _known[type(array)] = kernels[0]
    return kernels[0]


def _is_a(array: Any, name: str) -> bool:
    library, _, kind = name.rpartition(".")
    module = sys.modules.get(library)  # no array can exist before its library is imported
    return module is not None and isinstance(array, getattr(module, kind, ()))


def _numpy() -> Kernel:
    try:
        from .cpu import KERNEL
    except ImportError:  # without Numba the reference gives the same numbers, slowly
        from .numpy import KERNEL
    return KERNEL


def _dtensor() -> Kernel:
    from .dtensor import KERNEL

    return KERNEL


def _torch() -> Kernel:
    from .torch import KERNEL

    return KERNEL


def _jax() -> Kernel:
    from .jax import KERNEL

    return KERNEL


# Array type -> what loads its kernel, when the first such array comes. An array gets that of the
# first type that it is one of.
KERNELS: dict[str, Callable[[], Kernel]] = {
    "numpy.ndarray": _numpy,
    "torch.distributed.tensor.DTensor": _dtensor,
    "torch.Tensor": _torch,
    "jax.Array": _jax,
}
_known: dict[type, Kernel] = {}


@contextmanager
def served_by(kernel: Kernel, module: Any) -> Iterator[None]:
    """In this block the arrays of a kernel's module are given to another kernel."""
    before, module.KERNEL = module.KERNEL, kernel
    _known.clear()
    try:
        yield
    finally:
        module.KERNEL = before
        _known.clear()


def host() -> Kernel:
    """The kernel for memory of this machine.

    >>> host().name
    'compiled loops'
    """
    return _known.get(np.ndarray) or _find(_NOTHING)


_NOTHING = np.empty(0)


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
    if hint_for(type(positions)):
        raise TypeError(f"cannot take positions from a {_described(positions)}")


def _described(array: Any) -> str:
    kind = type(array)
    libraries = f"array libraries known: numpy, torch, jax{hint_for(kind)}"
    return f"{kind.__module__}.{kind.__qualname__}; {libraries}"


def hint_for(kind: type) -> str:
    """What to do with an array that is not taken: of a GPU library, of torch.fx, or masked.

    >>> hint_for(np.ndarray)
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
