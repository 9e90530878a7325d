"""A GPU that is not here, for code that launches on one: a stub of libcuda keeps each launch.

Triton compiles for a real architecture and its own C launcher runs; the stub takes the place of the
driver and does nothing on the device. Tensors are those of the CPU. So the time of a call up to the
driver can be measured, and what reaches the driver can be looked at, on any Linux machine with gcc.
"""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
import triton
import triton.backends.nvidia.driver as nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from rotary import angles
from rotary.cache import Cache
from rotary.integrations import norms
from rotary.kernels.torch import angles as torch_tables
from rotary.kernels.torch import fused as torch_fused
from rotary.kernels.torch import fused_gpu as torch_fused_gpu
from rotary.kernels.torch import fused_ready as torch_fused_ready
from rotary.kernels.torch import gpu as torch_gpu
from rotary.kernels.torch import launch as torch_launch
from rotary.kernels.torch import ready as torch_ready
from rotary.kernels.torch import route as torch_kernel
from rotary.kernels.torch import state as torch_state
from rotary.kernels.triton import fused as fused_kernel
from rotary.kernels.triton import kernel as gpu_kernel
from rotary.kernels.triton import launch as triton_launch

_KEPT = 256  # launches
_SOURCE = """
#include <stdint.h>
#include <string.h>
#include <unistd.h>
typedef struct { uint64_t function, stream, grid, values[128]; } Launch;
typedef struct {
    uint32_t grid[3], block[3], shared; void *stream, *attributes; uint32_t count;
} Config;
Launch launches[256];
uint64_t launched = 0, counted = 0, waited = 0, refused = 0;
int cuLaunchKernelEx(const Config *config, void *function, void **values, void **extra) {
    if (refused) { refused--; return 201; }
    if (waited) usleep(waited);
    Launch *launch = &launches[launched++ % 256];
    launch->function = (uint64_t)function;
    launch->stream = (uint64_t)config->stream;
    launch->grid = (uint64_t)config->grid[0] * config->grid[1] * config->grid[2];
    for (uint64_t i = 0; i < counted; i++) memcpy(&launch->values[i], values[i], 8);
    return 0;
}
int cuGetErrorString(int error, const char **text) { *text = "an error of the stub"; return 0; }
int cuPointerGetAttribute(uint64_t *data, int kind, uint64_t at) { *data = at; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuFuncSetAttribute(void *function, int name, int value) { return 0; }
"""


class Launch(NamedTuple):
    """What reached the driver; `device` is the one that the code was loaded for.

    values  8 bytes of each argument of the kernel, of which a number of 32 bits fills the lower 4
    """

    device: int
    stream: int
    programs: int
    values: tuple[int, ...]

    @property
    def pointers(self) -> tuple[int, ...]:
        """Those of q, k, their outputs, and what the angles come from, in a rotation."""
        return self.values[:7]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The bits of the numbers of a rotation."""
        return tuple([value & 0xFFFFFFFF for value in self.values[7:]])


class _Kept(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint64),
        ("values", ctypes.c_uint64 * 128),
    )


@dataclass
class Stub:
    """The devices, as Triton asks for them, and what was launched on them."""

    library: ctypes.CDLL
    arch: int
    device: int = 0  # the current one
    streams: dict[int, int] = field(default_factory=dict)  # the current one of each device
    loaded: list[int] = field(default_factory=list)  # the device of each code that was loaded

    launcher_cls = nvidia.CudaLauncher

    @property
    def utils(self) -> SimpleNamespace:
        return SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda _: {"max_shared_mem": 232448}
        )

    def _load(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, ...]:
        self.loaded.append(device)
        return 1, len(self.loaded), 0, 0, 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.streams.get(device, 0)

    @property
    def launches(self) -> list[Launch]:
        """The launches so far, of which the last 256 are kept."""
        count = ctypes.c_uint64.in_dll(self.library, "launched").value
        kept = (_Kept * _KEPT).in_dll(self.library, "launches")
        found = [kept[index % _KEPT] for index in range(max(0, count - _KEPT), count)]
        return [
            Launch(
                self.loaded[each.function - 1], each.stream, each.grid,
                tuple(each.values)[: self.counted],
            )
            for each in found
        ]  # fmt: skip

    @property
    def counted(self) -> int:
        """How many arguments of a launch are kept; at first as many as a rotation has."""
        return ctypes.c_uint64.in_dll(self.library, "counted").value

    @counted.setter
    def counted(self, count: int) -> None:
        ctypes.c_uint64.in_dll(self.library, "counted").value = count

    def wait(self, microseconds: int) -> None:
        """Let the driver wait so long before it reads the arguments of a launch."""
        ctypes.c_uint64.in_dll(self.library, "waited").value = microseconds

    def refuse(self, count: int) -> None:
        """Let the driver refuse so many launches, as in a thread without a context."""
        ctypes.c_uint64.in_dll(self.library, "refused").value = count

    def forget(self) -> None:
        """Begin to count launches anew."""
        ctypes.c_uint64.in_dll(self.library, "launched").value = 0


_loaded: list[ctypes.CDLL] = []


def _library(folder: Path) -> ctypes.CDLL:
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    if not library.exists():
        source.write_text(_SOURCE)
        command = ["gcc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
        subprocess.run([*command, str(source)], check=True)
    if not _loaded:  # the launcher of a second stub calls what is loaded under this name
        _loaded.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    return _loaded[0]


@contextmanager
def stub_of_cuda(
    folder: Path, arch: int = 90, device_of: Callable[[torch.Tensor], int] = lambda x: 0
) -> Iterator[Stub]:
    """In this block CPU tensors are taken for those of a GPU, whose launches go to a stub.

    folder     where the stub and what Triton makes are written
    device_of  the number of the device that a tensor is said to lie on
    """
    stub = Stub(_library(folder), arch)

    @contextmanager
    def on_device(index: int) -> Iterator[None]:
        before, stub.device = stub.device, index
        try:
            yield
        finally:
            stub.device = before

    modules = (
        *(torch_state, torch_tables, torch_launch, torch_ready, torch_gpu, torch_kernel),
        *(torch_fused, torch_fused_ready, norms),
    )
    with ExitStack() as stack:
        stack.enter_context(triton.knobs.nvidia.scope())
        stack.enter_context(triton.knobs.cache.scope())
        triton.knobs.nvidia.libcuda_path, triton.knobs.cache.dir = str(folder), str(folder)
        changes = [
            *[(module, "is_on_gpu", lambda x: True) for module in modules],
            *[
                (module, "gpu_kernel", lambda device: gpu_kernel)
                for module in (torch_launch, torch_gpu, torch_kernel)
            ],
            (torch_ready, "recent", {}),
            (gpu_kernel, "_launches", {}),
            # of the tables that are made as on a GPU the last bit of some differs
            (angles, "_cache", Cache(angles.CACHE_BYTES)),
            (gpu_kernel, "index_of", device_of),
            (triton_launch, "index_of", device_of),
            (torch_fused_gpu, "index_of", device_of),
            (gpu_kernel, "processors_of", lambda device: 132),
            (torch_fused_gpu, "processors_of", lambda device: 132),
            (nvidia, "PyCUtensorMap", type("PyCUtensorMap", (), {})),
            (torch.cuda, "device", on_device),
        ]
        for place, name, value in changes:
            stack.enter_context(patch.object(place, name, value))
        for kernel in (gpu_kernel.kernel, fused_kernel.kernel):
            kernel.device_caches.clear()
        nvidia.libcuda_dirs.cache_clear()
        nvidia.library_dirs.cache_clear()
        before = driver._active
        driver.set_active(stub)
        stub.forget()
        stub.counted = sum(not each.is_constexpr for each in gpu_kernel.kernel.params)
        stub.wait(0)
        try:
            yield stub
        finally:
            driver._active = before
            for kernel in (gpu_kernel.kernel, fused_kernel.kernel):
                kernel.device_caches.clear()
            nvidia.libcuda_dirs.cache_clear()
            nvidia.library_dirs.cache_clear()
