"""The clocks of the GPU benchmark: graph replays, eager calls, copies, and what a call consists of.

Everything here needs a CUDA device.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch

import rotary

from .gpu_cases import Buffers, Case
from .gpu_plan import L2_BYTES

Entry = dict[str, Any]  # what was measured of one case
Timer = Callable[[Case, list[Buffers], int], float]
COPY_BYTES = 2 * 10**9
CALLS = 2000
FIRST_CALL = """
import time, torch, rotary
q, k = (torch.randn(2, 64, n, 128, device="cuda", dtype=torch.bfloat16) for n in (32, 8))
spec = rotary.Rotary(head_dim=128)
cos, sin = (t.cuda() for t in rotary.cos_sin(spec, torch.arange(64)))
torch.cuda.synchronize()
start = time.perf_counter()
rotary.rotate((q, k), cos, sin, spec, seq_dim=-3)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def graph_us(case: Case, buffers: list[Buffers], launches: int) -> float:
    """Microseconds of one call: the median replay of a graph of so many, over buffers in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for each in buffers[:3]:  # compiled and loaded before the capture
            case(each)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(launches):
            case(buffers[index % len(buffers)])
    first = _replayed(graph)
    count = max(7, min(50, round(120 / first)))  # 0.1 s
    return statistics.median(_replayed(graph) for _ in range(count)) / launches * 1e3


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    return _milliseconds(graph.replay)


def _milliseconds(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def host_us(case: Case, buffers: list[Buffers], launches: int) -> float:
    """Microseconds of the host for one eager call: the median of 5 times 2000 between two syncs."""
    for _ in range(10):
        case(buffers[0])
    spent = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            case(buffers[0])
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(spent)


def cold_us(case: Case, buffers: list[Buffers], launches: int) -> float:
    """Microseconds of one call by Triton's own clock, which empties the cache before each."""
    from triton.testing import do_bench

    return do_bench(lambda: case(buffers[0]), return_mode="median") * 1e3


TIMERS: Mapping[str, Timer] = {
    "prefill": graph_us,
    "decode": graph_us,
    "host": host_us,
    "ablation": graph_us,
    "fused": graph_us,
    "do_bench": cold_us,
}


def copy_speed() -> float:
    """Bytes a second, read and written, of a copy of 2 GB of random numbers: the median of 20."""
    source = torch.randn(COPY_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    spent = [_milliseconds(lambda: target.copy_(source)) for _ in range(23)][3:]
    return 2 * COPY_BYTES / (statistics.median(spent) * 1e-3)


def empty_us() -> float:
    """Microseconds of a launch that does nothing, in a graph of 200: what every launch costs."""
    import triton

    kernel = triton.JITFunction(_nothing)
    buffers = [Buffers(*[torch.empty(0, device="cuda")] * 6)]
    return graph_us(lambda b: kernel[(132,)](b.q), buffers, 200)


def _nothing(x):  # type: ignore[no-untyped-def]  # a program of Triton
    pass


def add(entry: Entry, told: Entry) -> None:
    """Put the numbers of one pass behind those of the one before."""
    for name, value in told.items():
        if name == "failed":
            entry[name] = value
        else:
            entry.setdefault(name, []).append(value)


def attempted(measure: Callable[[], Entry | None]) -> Entry:
    """What was measured, or why not: one that fails must not cost the others their numbers."""
    try:
        return measure() or {}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def counts(case: Case, buffers: Buffers) -> dict[str, Any]:
    """Kernels and copies that one call puts on the device, and blocks of memory it asks for."""
    case(buffers)
    torch.cuda.synchronize()
    allocated = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[allocated]
    result = case(buffers)
    after = torch.cuda.memory_stats()[allocated]
    del result
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        case(buffers)
        torch.cuda.synchronize()
    on_device = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return {"launches": [len(on_device)], "allocations": [after - before]}


def first_call_seconds() -> float:
    """Seconds of the first call of a process in which CUDA runs and nothing is compiled."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALL],
            check=True,
            capture_output=True,
            env={**os.environ, "TRITON_CACHE_DIR": folder},
        )
    return float(done.stdout)


def l2_bytes(device: str) -> int:
    """The size of the cache that the inputs must exceed."""
    if device == "cpu":
        return L2_BYTES
    return torch.cuda.get_device_properties(device).L2_cache_size


def clocks() -> str:
    """The clocks of the processors and of the memory, in MHz, read while copies run."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    source = torch.randn(COPY_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    for _ in range(2000):  # about two seconds, so that the reading falls into them
        target.copy_(source)
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True)
    torch.cuda.synchronize()
    if done.returncode or not done.stdout.strip():
        return f"unknown, nvidia-smi ended with status {done.returncode}"
    return done.stdout.splitlines()[0]


def facts() -> list[str]:
    """The device and the versions."""
    device = torch.cuda.get_device_properties(0)
    versions = {"rotary": rotary.__version__, "torch": torch.__version__}
    for name in ("triton", "transformers", "liger-kernel", "fla-core"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return [
        f"{device.name}, sm_{device.major}{device.minor}, {device.multi_processor_count} "
        f"processors, L2 of {device.L2_cache_size / 1e6:.0f} MB",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
