"""Mixed calls of the library from many threads, with forks, signals and too little memory.

    python tests/soak.py --minutes 30 --threads 8

Every result is compared, bit for bit, with what the same call gave before, alone. Beside the calls
the first thread forks, and the child must give the same bits; a signal arrives every 50 ms, and its
handler rotates; some calls ask for more memory than RLIMIT_AS allows; and once a minute the limit
falls to what the process has, so that any call may fail, after which all must work again. Prints
the numbers as JSON, and ends with 1 where a result was wrong, a child hung, or the memory grew.
torch takes part where it is installed.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

import rotary
from rotary.checkpoint import convert_checkpoint

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

GROWTH = 64 << 20  # bytes of RSS from the first quarter after warm-up to the last, at most
LONG = 600  # seconds, from which on a run says whether it grows: before, what is kept fills up
HEADROOM = 2 << 30  # of addresses, over what the process has after each call was made once
SLACK = 0  # the same while memory is short
CHILD_SECONDS = 120  # from which on a child has hung
CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))


class Job(NamedTuple):
    """`call()` gives arrays or bytes, the same in every call. `is_bare`: with NumPy alone, so it
    may be made in a forked child, and while memory is short."""

    name: str
    call: Callable[[], object]
    is_bare: bool = True


def digest(result):
    """Of every bit of arrays, tensors, text, or tuples of these."""
    total = hashlib.blake2b()

    def add(part):
        if isinstance(part, tuple | list):
            for each in part:
                add(each)
            return
        if torch is not None and isinstance(part, torch.Tensor):
            part = part.detach().contiguous().view(torch.uint8).numpy()
        total.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).view(np.uint8))

    add(result)
    return total.hexdigest()


def numbers(*shape, dtype=np.float32):
    return np.sin(np.arange(np.prod(shape)) % 1013.0).astype(dtype).reshape(shape)


# --- the calls ---


def numpy_jobs():
    for name, spec, seq in (
        ("one token", rotary.Rotary(64, base=5e5), 1),
        ("some tokens", rotary.Rotary(80, rotary_dim=32, layout="interleaved"), 33),
        ("many tokens", rotary.Rotary(128, base=1e6), 700),
        ("mixed layouts", rotary.Rotary(64, layout="interleaved", out_layout="half"), 300),
    ):
        q, k = numbers(2, 8, seq, spec.head_dim), numbers(2, 2, seq, spec.head_dim)
        at = np.arange(seq) + 1_000_000
        cos, sin = rotary.cos_sin(spec, at)
        yield Job(
            f"apply, {name}", functools.partial(rotary.apply, spec, q, k, positions=at, seq_dim=-2)
        )
        yield Job(
            f"rotate, {name}", functools.partial(rotary.rotate, (q, k), cos, sin, spec, seq_dim=-2)
        )

        def in_place(spec=spec, q=q, k=k, cos=cos, sin=sin):
            xs = q.copy(), k.copy()
            return rotary.rotate(xs, cos, sin, spec, seq_dim=-2, out=xs)

        yield Job(f"rotate in place, {name}", in_place)
        half = q.astype(np.float16)
        yield Job(
            f"float16, {name}",
            functools.partial(rotary.apply, spec, half, positions=at, seq_dim=-2),
        )
    spec = rotary.Rotary(64)
    cache = numbers(64, 16, 2, 64)
    yield Job("moved blocks", functools.partial(
        rotary.rerotate, cache, spec, blocks=np.arange(0, 64, 3), shift=-7))  # fmt: skip
    norm = rotary.Norm(numbers(64), numbers(64), 1e-6)
    q, k = numbers(4, 50, 64), numbers(1, 50, 64)
    yield Job("fused, NumPy", lambda: rotary.fused(q, k, None, spec, norm=norm)[:2])


def table_jobs():
    """Tables of more specs and lengths than the cache keeps."""
    x = numbers(1, 8 + 8192 * 3, 128)
    for number in range(24):
        spec = rotary.Rotary(128, base=1e4 + 997 * number)
        seq = 8 + 8192 * (number % 3 + 1)
        yield Job(f"tables {number}", functools.partial(_apply_to_few, spec, x[:, :seq]))


def _apply_to_few(spec, x):
    return rotary.apply(spec, x)[:, ::997]


def torch_jobs():
    spec = rotary.Rotary(64, base=5e5)
    for seq in (1, 40, 600):
        q, k = (torch.from_numpy(numbers(1, n, seq, 64)) for n in (8, 2))
        at = torch.arange(seq) + 70_000
        for dtype in (torch.float32, torch.bfloat16):
            x, y = q.to(dtype), k.to(dtype)

            def trained(x=x, at=at):
                x = x.clone().requires_grad_()
                z = rotary.apply(spec, x, positions=at, seq_dim=-2)
                return z, *torch.autograd.grad(z.float().square().sum(), x)

            step = rotary.prepare(rotary.apply, spec, x, y, positions=at, seq_dim=-2)
            name = f"{dtype}, {seq}".removeprefix("torch.")
            yield Job(f"torch, {name}", functools.partial(
                rotary.apply, spec, x, y, positions=at, seq_dim=-2), False)  # fmt: skip
            yield Job(f"prepared, {name}", functools.partial(step, x, y, positions=at), False)
            yield Job(f"gradient, {name}", trained, False)
    norm = rotary.Norm(torch.from_numpy(numbers(64)), torch.from_numpy(numbers(64)), 1e-6)

    def cached():
        k, v = torch.zeros(64, 2, 64), torch.zeros(64, 2, 64)
        cache = rotary.KVCache(k, v, torch.arange(40).flip(0) - 3)
        xs = [torch.from_numpy(numbers(n, 40, 64)) for n in (8, 2, 2)]
        out, *_ = rotary.fused(*xs, spec, norm=norm, cache=cache)
        return out, k, v

    yield Job("fused cache, torch", cached, False)


def compiled_job():
    spec = rotary.Rotary(64, base=5e5)
    x, at = torch.from_numpy(numbers(1, 4, 24, 64)), torch.arange(24)
    call = torch.compile(lambda x, at: rotary.apply(spec, x * 2, positions=at, seq_dim=-2) + 1)
    return Job("torch.compile", functools.partial(_without_grad, call, x, at), False)


def _without_grad(function, *arguments):
    with torch.no_grad():
        return function(*arguments)


def file_jobs(folder):
    """A checkpoint of one layer converted, and configs read."""
    source = folder / "source"
    source.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
              "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 8,
              "intermediate_size": 8, "max_position_embeddings": 64}  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32}
    header, body = {}, b""
    for name, size in rows.items():
        data = (numbers(size, 64) + size).tobytes()
        header[f"model.layers.0.self_attn.{name}.weight"] = {
            "dtype": "F32", "shape": [size, 64], "data_offsets": [len(body), len(body) + len(data)],
        }  # fmt: skip
        body += data
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)

    def converted():
        target = Path(tempfile.mkdtemp(dir=folder)) / "out"
        try:
            convert_checkpoint(source, target, from_layout="half", to_layout="interleaved")
            return (target / "model.safetensors").read_bytes()
        finally:
            shutil.rmtree(target.parent)

    yield Job("convert", converted, False)

    def read(path):
        try:
            return repr(rotary.from_hf_config(path)).encode()
        except ValueError as error:  # of a model with more than one kind of layer
            return str(error).encode()

    for path in CONFIGS[::9]:
        yield Job(f"config {path.stem}", functools.partial(read, path))


# --- what is hard on them ---


class Soak:
    """The calls, what each gave alone, and what happened since."""

    def __init__(self, folder, is_compiled):
        self.jobs = [*numpy_jobs(), *table_jobs(), *file_jobs(folder)]
        if torch is not None:
            self.jobs += torch_jobs()
            self.jobs += [compiled_job()] if is_compiled else []
        self.expected = {job.name: digest(job.call()) for job in self.jobs}
        for job in self.jobs:
            assert digest(job.call()) == self.expected[job.name], f"{job.name} differs alone"
        self.counts, self.faults, self.lock = Counter(), [], threading.RLock()
        self.bare = [job for job in self.jobs if job.is_bare]
        self.quick = [job for job in self.bare if "token" in job.name]
        self.not_bare = 0  # calls under way that may start threads
        self.is_over, self.is_short = threading.Event(), threading.Event()
        self.free = address_space() + HEADROOM

    def count(self, name, fault=None):
        with self.lock:
            self.counts[name] += 1
            if fault is not None:
                self.faults.append(fault)

    def do(self, job, where):
        """One call, compared. It may fail where memory is short, and nowhere else."""
        was_short = self.is_short.is_set()
        try:
            is_right = digest(job.call()) == self.expected[job.name]
        except (MemoryError, OSError, RuntimeError) as error:
            if was_short or self.is_short.is_set():
                self.count("calls refused while memory was short")
            else:
                self.count("errors", f"{where}: {job.name}: {type(error).__name__}: {error}")
            return
        self.count(where, None if is_right else f"{where}: {job.name}: other bits")

    def work(self, seed):
        chance = random.Random(seed)
        while not self.is_over.is_set():
            with self.lock:
                job = chance.choice(self.bare if self.is_short.is_set() else self.jobs)
                self.not_bare += not job.is_bare
            try:
                self.do(job, "calls")
            finally:
                with self.lock:
                    self.not_bare -= not job.is_bare

    def fork(self, chance):
        """A child that makes calls and ends; it must give the same bits, and must not hang."""
        chosen = [chance.choice(self.bare) for _ in range(3)]
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                same = all(digest(job.call()) == self.expected[job.name] for job in chosen)
                status = 0 if same else 2
            os._exit(status)
        until = time.monotonic() + CHILD_SECONDS
        while time.monotonic() < until:
            if os.waitpid(child, os.WNOHANG)[0]:
                break
            time.sleep(0.01)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self.count("children", f"a child hung: {[job.name for job in chosen]}")
            return
        self.count("children")

    def too_large(self):
        """Calls that want more memory than there may be: MemoryError, and nothing else."""
        x = np.broadcast_to(np.float32(1), (1, 1 << 20, 128, 64))
        spec = rotary.Rotary(64)
        cos, sin = rotary.cos_sin(spec, np.arange(128))
        for call in (
            lambda: rotary.rotate(x, cos, sin, spec, seq_dim=-2),
            lambda: rotary.cos_sin(spec, np.broadcast_to(np.int64(3), (1 << 12, 1 << 12))),
        ):
            try:
                call()
            except MemoryError:
                self.count("MemoryErrors that were wanted")
            else:
                self.count("errors", "a call got memory that there is not")

    def short_of_memory(self):
        """For a moment any call may find no memory.

        Not while a thread may be started: where the new one finds no memory, Python's `start` waits
        for it for ever.
        """
        with self.lock:
            self.is_short.set()
        while self.not_bare:
            time.sleep(0.01)
        try:
            limit(address_space() + SLACK)
            time.sleep(0.5)
        finally:
            limit(self.free)
            self.is_short.clear()
        for job in self.bare:
            self.do(job, "calls after memory was short")


def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def limit(size):
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def run(seconds, threads, folder, is_compiled):
    """All of it for so long; the numbers, and the faults."""
    soak = Soak(folder, is_compiled)
    limit(soak.free)
    chance = random.Random(0)
    turns = iter(lambda: chance.choice(soak.quick), None)
    signal.signal(signal.SIGALRM, lambda *_: soak.do(next(turns), "calls of signal handlers"))
    start, samples = time.monotonic(), []
    every = max(1.0, min(10.0, seconds / 60))
    next_sample = next_short = 0.0
    with ThreadPoolExecutor(threads) as pool:
        workers = [pool.submit(soak.work, seed) for seed in range(threads)]
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        try:
            while (now := time.monotonic() - start) < seconds and not soak.faults:
                soak.fork(chance)
                soak.too_large()
                if now >= next_short:
                    soak.short_of_memory()
                    next_short = now + min(60.0, seconds / 3)
                if now >= next_sample:
                    samples.append((round(now), resident()))
                    next_sample = now + every
                time.sleep(0.05)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            soak.is_over.set()
        for worker in workers:
            worker.result()
    warm = [size for at, size in samples if at >= seconds / 6]
    quarter = max(1, len(warm) // 4)
    growth = statistics.median(warm[-quarter:]) - statistics.median(warm[:quarter]) if warm else 0
    if seconds >= LONG and growth > GROWTH:
        soak.faults.append(f"RSS grew by {growth / 2**20:.0f} MiB")
    return {
        "seconds": round(time.monotonic() - start),
        "threads": threads,
        "different calls": len(soak.jobs),
        **soak.counts,
        "RSS in MiB": {at: size >> 20 for at, size in samples[:: max(1, len(samples) // 12)]},
        "growth of RSS in MiB": round(growth / 2**20, 1),
        "files open at the end": len(os.listdir("/proc/self/fd")),
        "python": sys.version.split()[0],
        "GIL": "off" if sysconfig.get_config_var("Py_GIL_DISABLED") and not is_gil_on() else "on",
        "threads of a call": torch.get_num_threads() if torch else "numba's, if installed",
        "faults": soak.faults[:20],
    }


def is_gil_on():
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    with tempfile.TemporaryDirectory() as folder:
        result = run(60 * options.minutes, options.threads, Path(folder), not options.no_compile)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
