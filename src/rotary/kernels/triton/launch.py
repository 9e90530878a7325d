"""Launches Triton code by addresses, without examining the arguments again in every call.

Triton binds each argument of a launch, which takes 13 us for the kernel of `kernel.py`, and its
launcher parses all of them once more. Here the arguments lie in memory as the CUDA driver reads
them; a call writes the addresses into it and calls `cuLaunchKernelEx`: 2 us before the driver, by
Triton's launcher 4.4 (docs/log.md).
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.runtime.driver import driver  # type: ignore[import-untyped]

from .plan import ALIGNED

Addresses = tuple[int, ...]
# whether it could launch for these addresses; True says that their alignment is known to fit
Launch = Callable[[Addresses, bool], bool]
_SCRATCH = 4  # null pointers behind the arguments: Triton's own parameters, here of no memory
Number = ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float
_NUMBERS: dict[str, Callable[..., Number]] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
}


class _Config(ctypes.Structure):
    """CUlaunchConfig of the CUDA driver."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


def index_of(x: Tensor) -> int:
    """Return the index of a tensor's device; -1 for the host, where the interpreter runs."""
    return x.get_device()


def on_device(index: int) -> AbstractContextManager[None]:
    """Make a device the current one in this block: its streams and its code are used."""
    if index < 0 or driver.active.get_current_device() == index:
        return nullcontext()
    return torch.cuda.device(index)


@lru_cache
def processors_of(device: torch.device) -> int:
    """Return the number of multiprocessors; of a device that is not CUDA's or ROCm's any number."""
    if device.type != "cuda":
        return 128
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def lanes_of(device: torch.device) -> int:
    """Return the number of threads in a warp."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


@lru_cache
def _launch_kernel() -> Callable[..., int] | None:
    """Return `cuLaunchKernelEx` of the CUDA driver, None where there is none."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p,) * 4
    return call


class _Arguments(threading.local):
    """The arguments of one launch in memory; each thread has its own, as the GIL is released."""

    def __init__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        values: Sequence[tuple[str, object]],
    ) -> None:
        """Lay out the values, (type in Triton's words, value); that of a pointer is left open."""
        count = sum([kind.startswith("*") for kind, _ in values])
        self.addresses = (ctypes.c_uint64 * count)()
        self.numbers = [_NUMBERS[kind](value) for kind, value in values if kind in _NUMBERS]
        self.scratch = ctypes.c_uint64(0)
        numbers, place = iter(self.numbers), ctypes.addressof(self.addresses)
        places = []
        for kind, _ in values:
            is_number = kind in _NUMBERS
            places.append(ctypes.addressof(next(numbers)) if is_number else place)
            place += 0 if is_number else 8
        places += [ctypes.addressof(self.scratch)] * _SCRATCH
        self.places = (ctypes.c_void_p * len(places))(*places)
        self.config = _Config(grid, (threads, 1, 1), shared, None, None, 0)
        self.every = (
            self.addresses, self.config,
            ctypes.addressof(self.config), ctypes.addressof(self.places),
        )  # fmt: skip


def by_addresses(
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    arguments: Sequence[object],
    options: Mapping[str, object],
) -> Launch | None:
    """Return a launch of this grid, compiled and loaded for the device of the tensors.

    arguments  those of the kernel in order: tensors, of the dtypes and alignment of those of later
               calls, and numbers, which are the same in all calls
    options    the compile-time arguments, and other options of Triton

    The launch takes an address for each tensor, in order; the last ones may be left out if they are
    not read. It uses the stream that is current on that device. It returns False, having launched
    nothing, if the alignment of a tensor differs, if a profiler such as Proton watches launches, or
    if the driver refuses: the caller then launches by Triton, which says why. None if the driver
    cannot be called, if the interpreter runs, and on ROCm, whose code depends on the size of each
    storage.
    """
    call = _launch_kernel()
    if call is None or not isinstance(kernel, triton.JITFunction) or torch.version.hip:
        return None
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    index = index_of(tensors[0])
    with on_device(index):
        code = kernel.warmup(*arguments, grid=grid, **options)
        code[grid]  # the module is loaded here
    kinds = [code.src.signature[name] for name in kernel.arg_names[: len(arguments)]]
    values = [
        (kind, None if isinstance(each, Tensor) else each)  # a tensor would be kept alive
        for kind, each in zip(kinds, arguments, strict=True)
        if kind != "constexpr"
    ]
    is_known = all([kind.startswith("*") or kind in _NUMBERS for kind, _ in values])
    if not is_known or code.metadata.global_scratch_size:
        return None
    function, metadata = code.function, code.metadata
    prepared = _Arguments(grid, 32 * metadata.num_warps, metadata.shared, values)
    aligned = [x.data_ptr() & ALIGNED == 0 for x in tensors]
    is_only = torch.cuda.device_count() == 1
    current_device = driver.active.get_current_device
    current_stream = driver.active.get_current_stream

    def launch(addresses: Addresses, is_alignment_known: bool) -> bool:
        if not is_alignment_known:
            alike = [at & ALIGNED == 0 for at in addresses]
            if alike != aligned[: len(alike)]:
                return False
        if _is_watched():
            return False
        if not is_only and current_device() != index:
            with on_device(index):
                return launch(addresses, True)
        memory, config, config_at, places_at = prepared.every
        memory[: len(addresses)] = addresses  # type: ignore[call-overload]  # any sequence
        config.stream = current_stream(index)
        return call(config_at, function, places_at, None) == 0

    return launch


def _is_watched() -> bool:
    """Whether a profiler, such as Proton, has hooked launches."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
