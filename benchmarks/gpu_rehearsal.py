"""A rehearsal of the GPU benchmark without a GPU: `python -m benchmarks.gpu_rehearsal`.

Every line of every part, with every peer that is installed, goes through the code that a run on a
device takes: the tensors, the check against float64, the graphs and events, the files. CPU tensors
play those of a GPU, at a few tokens; Triton's interpreter runs our kernel and those of the peers;
what torch.cuda would do is played, so its times mean nothing. Prints what fails, and the minutes
that each part would take on a device. Exits with status 1 if anything fails, or takes too long.
"""

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from . import command, gpu, gpu_cases, gpu_clock, gpu_fused, gpu_gate, gpu_peers, gpu_plan
from .gpu_plan import COPY, KINDS, PARTS, SECONDS, Line

# Seconds on a device with 16 processor cores, after `--compile 12`: to check a case; to load it; to
# compile it anew, as torch does; to capture and replay it; to call it 10 000 times
CHECK, COMPILE, TUNE, REPLAY, EAGER = 0.1, 0.02, 3.0, 0.17, 0.5
ONCE = 8.0  # a part: imports, copies, clocks; of the host's, two programs of their own

# The interpreter cuts 16 bits off float32 where a device rounds: 1 ulp, not 0.5
INTERPRETED = {"bfloat16": 1.1}


def main() -> None:
    """Rehearse the parts asked for; in a process of its own, in which Triton interprets."""
    parser = command.parser(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all of them")
    given = command.parsed(parser, {"part": ["decode", "peers"]})
    if os.environ.get("TRITON_INTERPRET") != "1":
        again = [sys.executable, "-m", "benchmarks.gpu_rehearsal", *sys.argv[1:]]
        if importlib.util.find_spec("triton") is None:
            sys.exit("a rehearsal needs Triton, on Linux: pip install triton==3.6.0")
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        root = Path(__file__).parents[1]
        with subprocess.Popen(
            again, env=environment, cwd=root, text=True, stdout=subprocess.PIPE
        ) as inner:
            for text in inner.stdout or ():
                print(text, end="", flush=True)
        sys.exit(inner.returncode)
    wrong: list[str] = []
    minutes: dict[str, float] = {}
    rows: list[list[str]] = []
    total = 0
    there, missing = gpu_peers.found()
    for peer in gpu_peers.PEERS:
        if peer.is_cuda and there.pop(peer.name, None):
            missing[peer.name] = "is CUDA code"
    with played():
        print(f"torch {torch.__version__}; peers: {', '.join(there) or 'none'}")
        print("".join(f"without {name}: {why}\n" for name, why in missing.items()), end="")
        for part in given.part or PARTS:
            lines = list(gpu_plan.lines(part))
            lines = lines[:1] if given.quick else lines
            seconds, count = ONCE * (4 if part == "host" else 1), 0
            for line in lines:
                found = rehearsed(line, there)
                wrong += [f"{part}, {line.name}, {who}: {entry['failed']}"
                          for who, entry in found.items() if "failed" in entry]  # fmt: skip
                seconds += seconds_of(line, found)
                count += len(found)
            minutes[part] = seconds / 60
            total += count
            spent = f"{minutes[part]:.1f}", f"{SECONDS[part] / 60:.1f}"
            rows.append([part, str(len(lines)), str(count), *spent])
            with tempfile.TemporaryDirectory() as folder:
                wrong += written(part, lines[0], Path(folder))
    for name, parts in (("ours", KINDS), ("all peers", ("peers", "tuned"))):
        rows.append([name, "", "", f"{sum(minutes.get(part, 0) for part in parts):.1f}", ""])
    wrong += [f"{part} takes {spent:.1f} minutes, longer than its limit"
              for part, spent in minutes.items() if 60 * spent > SECONDS[part]]  # fmt: skip
    print(command.table(["part", "lines", "cases", "minutes on a device", "at most"], rows))
    if wrong:
        sys.exit("\n".join(["failed:", *wrong]))
    print(f"gate passed: {total} results against angles in float64, in a rehearsal")


def rehearsed(line: Line, there: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a run on a device would write of a line, in one pass, of a few tokens."""
    from rotary.kernels.triton import kernel

    found: dict[str, dict[str, Any]] = {}
    plain = mock.patch.object(torch, "compile", lambda call, **_: call)
    with (
        fitting(line),
        plain if line.kind == "fused" else contextlib.nullcontext(),
        mock.patch.object(kernel, "_run", wraps=kernel._run) as run,
    ):
        told = gpu.attempted(lambda: gpu.collect(found, short(line), there, "cpu"))
    ours = [who for who in found if who.startswith("rotary ") or line.kind == "ablation"]
    if len(ours) > run.call_count:
        told = {"failed": f"{run.call_count} launches of our kernel for {len(ours)} cases"}
    return found | ({"rotary": told} if told else {})


def written(part: str, line: Line, folder: Path) -> list[str]:
    """A whole part of one line, twice, with its files; what failed."""
    collect = gpu.collect
    with (
        fitting(line),
        mock.patch.object(gpu, "collect", lambda *given: collect(*given, "cpu")),
        mock.patch.object(torch, "compile", lambda call, **_: call),
        mock.patch.object(gpu_clock, "empty_us", return_value=1.0),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        report = gpu.measured(part, [short(line)], time.monotonic() + 3600, folder)
    names = [path.name for path in folder.iterdir()]
    failed = [] if names == [f"gpu-{part}.json"] else [f"{part} wrote {names}"]
    failed += [f"{part} skipped {name}" for name in report["skipped"]]
    return failed + gpu.failures(report["rows"])


def short(line: Line) -> Line:
    """The same forms at a few tokens: a program of the interpreter takes some milliseconds.

    Peers multiply 16-bit numbers, which the interpreter gets wrong: they take float32.
    """
    work = line.work
    seq = {"ragged": 16, "three axes": 32}.get(work.positions, min(work.seq, 4))
    dtype = "float32" if line.peers in ("plain", "tuned") else work.dtype
    few = work._replace(seq=seq, batch=min(work.batch, 2), q_heads=2, k_heads=1, dtype=dtype)
    return line._replace(work=few)


def fitting(line: Line) -> Any:
    """Within, the peers that take part are those of the line as it is, and not of a short one."""
    peers = [peer._replace(fits=lambda _, fits=peer.fits: fits(line.work))
             for peer in gpu_peers.PEERS]  # fmt: skip
    return mock.patch.object(gpu_peers, "PEERS", tuple(peers))


def seconds_of(line: Line, found: Mapping[str, Any]) -> float:
    """How long a device takes for a line: each case is checked and compiled once, timed twice."""
    cases = [who for who in found if who != COPY]
    timed = EAGER if line.kind == "host" else REPLAY
    compiled = [who for who in cases if not who.startswith("transformers")]
    first = TUNE if line.peers == "tuned" else COMPILE
    copied = 2 * REPLAY if COPY in found else 0
    return len(cases) * (CHECK + 2 * timed) + len(compiled) * first + copied


# --- what plays a device ---


class Event:
    """A moment, in milliseconds that pass from one to the next."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Keep this moment."""
        self.at = time.perf_counter() * 1e3

    def synchronize(self) -> None:
        """Nothing is under way."""

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds until another moment."""
        return max(end.at - self.at, 1e-3)


@contextlib.contextmanager
def played() -> Iterator[None]:
    """Within, CPU tensors are taken for those of a GPU, and torch.cuda for one that works."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import interpreter
    from triton.runtime.driver import driver

    import rotary.kernels.torch.route  # noqa: F401  # whose parts are replaced below
    from rotary.kernels.triton import kernel

    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    device = SimpleNamespace(
        name="a rehearsal", major=9, minor=0, multi_processor_count=132, L2_cache_size=1 << 10
    )
    cuda = {
        "Event": Event,
        "Stream": lambda: stream,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda graph, stream: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda *_: stream,
        "synchronize": lambda *_: None,
        "device": lambda index: contextlib.nullcontext(),
        "get_device_properties": lambda *_: device,
        "get_device_capability": lambda *_: (9, 0),
        "memory_stats": lambda *_: {"allocation.all.allocated": 0},
    }
    compile_, randn = torch.compile, torch.randn
    on_cpu = gpu_clock.FIRST_CALL.replace('device="cuda"', 'device="cpu"').replace(".cuda()", "")
    patches = [
        *(mock.patch.object(torch.cuda, name, value) for name, value in cuda.items()),
        # Inductor would write code for this processor: all but that runs
        mock.patch.object(
            torch, "compile",
            lambda call, mode, dynamic: compile_(call, backend="aot_eager", dynamic=dynamic),
        ),
        mock.patch.object(torch, "randn", lambda *size, device=None, **how: randn(*size, **how)),
        # it refuses a kernel that is interpreted
        mock.patch.object(torch.library, "wrap_triton", lambda kernel: kernel),
        mock.patch.object(gpu_clock, "CALLS", 1),
        mock.patch.object(gpu_clock, "COPY_BYTES", 1 << 10),
        mock.patch.object(gpu_clock, "FIRST_CALL",
                          on_cpu.replace("torch.cuda.synchronize()", "")),
        mock.patch.object(gpu, "counted", partial(gpu.counted, "cpu")),
        mock.patch.object(gpu_plan, "COUNTED", gpu_plan.Work(8, 2, 1, 1)),
        mock.patch.object(gpu_cases, "SEQUENCES", 4),
        mock.patch.object(gpu_plan, "sets_of", return_value=1),
        mock.patch.object(gpu_plan, "launches_of", return_value=1),
        mock.patch("triton.testing.do_bench", lambda call, **_: call() and 1e-3),
        mock.patch.dict(gpu_gate.LIMITS, INTERPRETED),
        mock.patch.dict(gpu_fused.LIMITS, {"once": INTERPRETED["bfloat16"]}),
        mock.patch.object(interpreter, "_patch_lang_tensor",
                          _indexed(interpreter._patch_lang_tensor)),
    ]  # fmt: skip
    for name, module in list(sys.modules.items()):
        if name.startswith("rotary.kernels."):
            answers = {"is_on_gpu": lambda x: True, "gpu_kernel": lambda device: kernel}
            patches += [mock.patch.object(module, asked, answer)
                        for asked, answer in answers.items() if hasattr(module, asked)]  # fmt: skip
    driver.set_active(
        SimpleNamespace(
            get_benchmarker=lambda: lambda call, **_: [call() or 1e-3] * 3,  # to tune a kernel
            get_current_device=lambda: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _indexed(patch: Any) -> Any:
    """Loop bounds are arrays of one number, which NumPy 2.4 no longer takes for a number."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


if __name__ == "__main__":
    main()
