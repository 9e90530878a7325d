"""Defines `Kernel`, the functions of one array library, and finds the kernel of an array.

To add a library, write a file with a `KERNEL` and add an entry to `KERNELS`. `numpy.py` is the
reference implementation and documents what each function computes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from ..schedules import Arithmetic
from ..words import brief
from .geometry import AngleOptions, Options
from .private import is_a, is_recorded_by_torch, recorded_as

Array = TypeVar("Array", bound=Any)  # of NumPy, torch, JAX or MLX: the type that goes in comes out
Operand = Any  # an array of any library, or what a caller passes in its place, such as a number
Numbers = npt.NDArray[Any]  # a NumPy array
Rotate = Callable[
    [Sequence[Array], Array, Array, object, Options, Sequence[Array] | None],
    tuple[Array, ...],
]
CallerOptions = tuple[object, ...]  # arguments of `rotate` or `apply` other than arrays, as passed
# (caller_options, options_of, xs, tables, out); options_of(*caller_options) returns the options of
# the call. `tables` are cos, sin and perhaps row numbers, or for AngleOptions positions, or nothing
Quick = Callable[
    [
        CallerOptions,
        Callable[..., Options | AngleOptions],
        Sequence[Array],
        Sequence[object],
        Sequence[Array] | None,
    ],
    tuple[Array, ...] | None,
]
Tables = Callable[[Array, Numbers, Numbers, Sequence[int], bool], tuple[Array, Array]]

NEEDS_LENGTH = "a spec that depends on the length needs seq_len as a whole number"
NESTED = (
    "a nested tensor is not rotated as it is: rotate every tensor of x.unbind(), or "
    "x.to_padded_tensor(0.0), or x.values() of a jagged one with one position per token"
)


@dataclass(frozen=True)
class Kernel(Generic[Array]):
    """The functions of an array library; those with default None are optional."""

    name: str
    namespace: ModuleType  # the module with exp, where, stack, ...
    rotate: Rotate[Array]  # (xs, cos, sin, positions, options, out)
    tables: Tables[Array]  # cos and sin: (positions, turns, scales, axes, backwards)
    tables_float64: Tables[Array]  # of fractional positions, from inv_freq
    tables_float32: Tables[Array]  # in float32 steps, from inv_freq
    arithmetic: Arithmetic  # how the library computes frequencies in float32

    takes: Callable[[object], bool]  # whether it accepts an object as an operand
    inspect: Callable[[Array], tuple[str, float | None, float | None]]  # kind, lowest, highest
    row_lengths: Callable[[Array], list[int]]  # largest position of each row, plus one
    arange: Callable[[Array, int], Array]  # positions 0 .. count - 1 on the device of an array
    as_positions: Callable[[object, Array], Array]  # converts lists and other arrays
    to_numpy: Callable[[Array], Numbers | None]  # positions, if they are on the host
    from_numpy: Callable[[Numbers], Array]  # converts a table made by NumPy
    host_constant: Callable[..., Any]  # calls a function on the host, also while tracing
    # the device of an array, a part of the cache key; None if tables for it must not be cached
    device_key: Callable[[Array], str | None]

    check: Callable[[Array], None] | None = None  # refuses arrays that their type does not exclude
    # (xs, out): refuses dtypes, and outputs unlike x, as `rotate` does, before anything is prepared
    check_xs: Callable[..., None] | None = None
    # the fast path of `rotate` and `apply`, tried first: runs code that is cached for calls of this
    # form. None if it cannot, or if `apply` needs tables in memory, on a CPU for more than a few
    # tokens
    quick: Quick[Array] | None = None
    # whether an array is on a GPU; if so, `quick` also takes no tables, for positions 0, 1, ...
    is_on_gpu: Callable[[Array], bool] | None = None
    # (options, xs, tables, out, fallback): returns code for arrays of this form, which calls
    # `fallback` for arrays of another form; None if that would not be faster
    prepare: Callable[..., Callable[..., tuple[Array, ...]] | None] | None = None
    # rotates at whole positions, without tables
    rotate_exact: Callable[..., tuple[Array, ...]] | None = None
    # (xs, positions, out, num_axes): whether `rotate_exact` takes these operands
    makes_angles: Callable[..., bool] | None = None
    # rotates blocks of cached keys, which may have 8 bits: (x, cos, sin, blocks, scale, options,
    # out)
    move: Callable[..., Array] | None = None
    # the same in place, by whole numbers of tokens: (xs, blocks, shift, turns, backwards, options);
    # returns False, having written nothing, if `move` must be called instead
    move_by: Callable[..., bool] | None = None
    check_out: Callable[..., None] | None = None  # (xs, out): refuses arrays that share memory
    # makes the tables of positions that are sharded over processes
    on_shards: Callable[..., tuple[Array, Array]] | None = None


SomeKernel = Kernel[Any]  # of any array library


def kernel_of(array: Array) -> Kernel[Array]:
    """Return the kernel of an array; TypeError, naming the known libraries, for anything else.

    >>> import numpy
    >>> kernel_of(numpy.zeros(2)).name
    'compiled loops'
    """
    kernel = known_kernel(type(array)) or _find(array)
    if kernel.check is not None:
        kernel.check(array)
    return kernel


@recorded_as(lambda kind: None)
def known_kernel(kind: type) -> SomeKernel | None:
    """Return the kernel of a type that came before; None while torch.compile records.

    Dynamo guards every key of the table: a program would be compiled again after each new type.

    >>> known_kernel(type(None))
    """
    return kernels_by_type.get(kind)


def _find(array: object) -> SomeKernel:
    kernels = [load() for name, load in KERNELS.items() if is_a(array, name)]
    if isinstance(array, (tuple, list)) and any(hasattr(item, "shape") for item in array):
        raise TypeError("pass q and k one by one: apply(spec, q, k); rotate takes a tuple (q, k)")
    if not (kernels and kernels[0].takes(array)):
        raise TypeError(f"cannot rotate a {_described(array)}")
    if not is_recorded_by_torch():  # a traced call has no side effect
        kernels_by_type[type(array)] = kernels[0]
    return kernels[0]


def _numpy() -> SomeKernel:
    try:
        from .cpu.kernel import KERNEL
    except ImportError:  # without Numba: the reference gives the same numbers, slowly
        from .numpy import KERNEL
    return KERNEL


def _dtensor() -> SomeKernel:
    from .torch.dtensor import KERNEL

    return KERNEL


def _torch() -> SomeKernel:
    from .torch.route import KERNEL

    return KERNEL


def _jax() -> SomeKernel:
    from .jax.kernel import KERNEL

    return KERNEL


def _mlx() -> SomeKernel:
    from .mlx import KERNEL

    return KERNEL


# Array type -> the function that loads its kernel, called for the first such array. The first
# entry that an array is an instance of wins.
KERNELS: dict[str, Callable[[], SomeKernel]] = {
    "numpy.ndarray": _numpy,
    "torch.distributed.tensor.DTensor": _dtensor,
    "torch.Tensor": _torch,
    "jax.Array": _jax,
    "mlx.core.array": _mlx,
}
kernels_by_type: dict[type, SomeKernel] = {}  # filled as arrays come


def _as_tensor(array: object) -> object:
    return _torch().namespace.as_tensor(array) if isinstance(array, np.ndarray) else None


@recorded_as(_as_tensor)
def recorded_by_torch(array: object) -> Any:
    """Return the tensor that torch.compile makes of a NumPy array; None in an ordinary call.

    >>> recorded_by_torch(np.arange(3))
    """
    return None


# (q, k, v, cos, sin, positions, options, stages, out) -> what `rotary.fused` returns
Fused = Callable[..., tuple[Operand, Operand, Operand]]


def fused_of(kernel: SomeKernel) -> Fused:
    """Return the function that computes `rotary.fused`; TypeError if the kernel has none.

    >>> fused_of(kernel_of(np.zeros(2))).__name__
    'fused'
    """
    known = known_fused(kernel.name)
    if known is not None:
        return known
    if kernel.name not in FUSED:
        raise TypeError(
            f"fused takes arrays of NumPy, torch and JAX, got one of {kernel.name}: call "
            "rotary.rotate, and compute the other steps separately"
        )
    function = FUSED[kernel.name]()
    if not is_recorded_by_torch():  # a traced call has no side effect
        fused_by_name[kernel.name] = function
    return function


@recorded_as(lambda name: None)
def known_fused(name: str) -> Fused | None:
    """Return the fused call of a kernel that came before, which an import takes 2 us to find.

    >>> known_fused("no kernel")
    """
    return fused_by_name.get(name)


def _numpy_fused() -> Fused:
    from .numpy_fused import fused

    return fused


def _cpu_fused() -> Fused:
    from .cpu.fused import fused

    return fused


def _torch_fused() -> Fused:
    from .torch.fused import fused

    return fused


def _jax_fused() -> Fused:
    from .jax.fused import fused

    return fused


fused_by_name: dict[str, Fused] = {}  # filled as arrays come
# name of a kernel -> the function that loads its fused call
FUSED: dict[str, Callable[[], Fused]] = {
    "reference": _numpy_fused,
    "compiled loops": _cpu_fused,
    "torch": _torch_fused,
    "jax": _jax_fused,
}


@contextmanager
def using_kernel(kernel: SomeKernel, module: Any) -> Iterator[None]:
    """Use `kernel` in place of `module.KERNEL` inside this block."""
    before, module.KERNEL = module.KERNEL, kernel
    kernels_by_type.clear()
    try:
        yield
    finally:
        module.KERNEL = before
        kernels_by_type.clear()


def host() -> Kernel[Numbers]:
    """Return the kernel of NumPy arrays.

    >>> host().name
    'compiled loops'
    """
    return known_kernel(np.ndarray) or _find(_NOTHING)


_NOTHING = np.empty(0)


def is_distributed(tensor: object) -> bool:
    """Whether a torch tensor is a DTensor, of which this process holds a part.

    >>> is_distributed(3)
    False
    """
    return is_a(tensor, "torch.distributed.tensor.DTensor")


def check_positions(positions: object) -> None:
    """Refuse a single number, arrays of GPU libraries other than torch's, and masked arrays.

    >>> check_positions([0, 1, 2])
    """
    if positions is None or isinstance(positions, (int, float, str)):
        count = positions if isinstance(positions, int) and positions > 0 else "n"
        raise TypeError(
            f"positions must be an array or a list, (..., seq), got {brief(positions)}; "
            f"range({count}) gives the first {count} positions"
        )
    if isinstance(positions, (list, tuple, range)) or type(positions) is np.ndarray:
        return
    if is_a(positions, "torch.Tensor"):
        if positions.is_nested:  # type: ignore[attr-defined]
            raise TypeError(NESTED)
        return
    if hint_for(type(positions)):
        raise TypeError(f"cannot take positions from a {_described(positions)}")


def _described(array: object) -> str:
    kind = type(array)
    libraries = f"array libraries known: numpy, torch, jax, mlx{hint_for(kind)}"
    return f"{kind.__module__}.{kind.__qualname__}; {libraries}"


def hint_for(kind: type) -> str:
    """Return advice on what no kernel takes (arrays of GPU libraries, masked ones ...); else "".

    >>> hint_for(np.ndarray)
    ''
    """
    library = kind.__module__.partition(".")[0]
    if kind.__module__ == "torch.fx.proxy":
        return (
            "; torch.fx.symbolic_trace does not look into rotary: record with torch.export.export "
            "or make_fx, or mark your function that calls rotary by torch.fx.wrap"
        )
    if kind.__module__.startswith("torch.distributed."):  # of a DTensor, from_dlpack has no memory
        return "; go on with x.to_local(), the part that this process holds"
    if hasattr(kind, "__cuda_array_interface__") and library not in ("jax", "jaxlib"):
        return "; go on with torch.from_dlpack(x), which copies nothing"
    if issubclass(kind, np.ma.MaskedArray):
        return "; a mask would be lost: go on with x.data, or x.filled(0), and mask the result"
    return ""


def is_per_row(seq_len: Any) -> TypeGuard[Sequence[int]]:
    """Whether `seq_len` is a list or an array with a length for each row, not a single number.

    >>> is_per_row([5, 7]), is_per_row(5), is_per_row(np.array(5))
    (True, False, False)
    """
    # isinstance comes first: a length may be a symbol of torch.compile, which has no attributes
    if isinstance(seq_len, int):
        return False
    return hasattr(seq_len, "__len__") and getattr(seq_len, "ndim", 1) > 0


def is_traced(value: object) -> bool:
    """Whether a value is a tracer of JAX: its numbers are known only when the compiled call runs.

    >>> is_traced(3)
    False
    """
    return is_a(value, "jax.core.Tracer")


def is_symbolic(value: object) -> bool:
    """Whether a value is a size that a recorded program of torch leaves open.

    torch.export has symbols for dynamic dimensions, and torch.jit.trace has tensors for all sizes.

    >>> is_symbolic(3)
    False
    """
    if is_a(value, "torch.Tensor"):
        import torch

        return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]
    return is_a(value, "torch.SymInt")
