"""Launches Triton code by addresses, without examining the arguments again in every call.

Triton binds each argument of a launch, which takes 13 us for the kernel of `kernel.py`. A call of
the compiled code with bound arguments takes 1.4 us (`benchmarks/launches.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.runtime.driver import driver  # type: ignore[import-untyped]

Addresses = tuple[int, ...]
Launch = Callable[[Addresses], bool]  # returns False if it cannot launch for these addresses
_ALIGNED = 15  # the bits of an address that are 0 if 16 bytes can be read at a time


def index_of(x: Tensor) -> int:
    """Return the index of a tensor's device; -1 for the host, where the interpreter runs."""
    return x.get_device()


def on_device(index: int) -> AbstractContextManager[None]:
    """Make a device the current one in this block: its streams and its code are used."""
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
    """Return a launch of `programs` programs, compiled and loaded for the device of the operands.

    operands  the first seven arguments of the kernel, with the dtypes and alignment of those of
              later calls
    numbers   the next arguments, the same in all calls
    options   the compile-time arguments, and other options of Triton

    The launch takes the addresses of seven operands and uses the stream that is current on that
    device. It returns False, having launched nothing, if the alignment of an operand differs.
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
    """Whether a profiler, such as Proton, has hooked launches."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
