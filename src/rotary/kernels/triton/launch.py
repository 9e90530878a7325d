"""A launch of Triton by addresses: what it looks at in every call is looked at once.

Triton binds each argument of a launch, 13 us for the kernel of `kernel.py`; the compiled code is
then called with the arguments as they are, 1.4 us (`benchmarks/launches.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.runtime.driver import driver  # type: ignore[import-untyped]

Addresses = tuple[int, ...]
Launch = Callable[[Addresses], bool]  # False where another launch has to be taken
_ALIGNED = 15  # the bits of an address that are 0, if 16 bytes can be read at a time


def index_of(x: Tensor) -> int:
    """The number of the device that holds a tensor, -1 for the host of the interpreter."""
    return x.get_device()


def on_device(index: int) -> AbstractContextManager[None]:
    """In this block a device is the current one: its streams and its copy of the code are used."""
    if index < 0 or driver.active.get_current_device() == index:
        return nullcontext()
    return torch.cuda.device(index)


def by_addresses(
    kernel: triton.JITFunction,
    programs: int,
    operands: Sequence[Tensor],
    numbers: Sequence[int | float],
    options: Mapping[str, int | bool],
) -> Launch:
    """A launch of `programs` programs, compiled and loaded for the device of the operands.

    operands  the first seven arguments of the kernel, of the dtypes and alignment of those that
              will come
    numbers   the next ones, which stay
    options   the compile-time arguments, and what else Triton is told

    It takes the addresses of operands, and the stream that is then current on that device. False,
    and nothing is launched, where one is aligned and its operand was not, or the other way round.
    """
    index, grid = index_of(operands[0]), (programs, 1, 1)
    with on_device(index):
        code = kernel.warmup(*operands, *numbers, grid=grid, **options)
        watched = code[grid]  # the module is loaded here
    run, function, metadata = code.run, code.function, code.packed_metadata
    rest = (*numbers, *[options[name] for name in kernel.arg_names if name in options])
    aligned = [x.data_ptr() & _ALIGNED == 0 for x in operands]
    bits = 0 if all(aligned) else -1
    current_device = driver.active.get_current_device
    current_stream = driver.active.get_current_stream

    def launch(addresses: Addresses) -> bool:
        q, k, q_out, k_out, one, other, rows = addresses
        is_other = bits or (q | k | q_out | k_out | one | other | rows) & _ALIGNED
        if is_other and [address & _ALIGNED == 0 for address in addresses] != aligned:
            return False
        if current_device() != index:
            with on_device(index):
                watched(*addresses, *rest, stream=current_stream(index))
        elif _is_watched():
            watched(*addresses, *rest, stream=current_stream(index))
        else:
            stream = current_stream(index)
            run(*grid, stream, function, metadata, None, None, None, *addresses, *rest)
        return True

    return launch


def _is_watched() -> bool:
    """Whether a profiler, such as Proton, is to be told of every launch."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
