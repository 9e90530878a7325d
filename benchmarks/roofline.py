"""What the caches and the memory of this machine allow: measured bandwidths, and a bound.

Every thread passes over memory of its own, again and again in compiled code: it reads, inverts in
place (reads and writes), copies by plain stores (each line of the target is fetched before it is
written, for the core to own it) or by stores past the caches (nothing is fetched). Bytes are those
of the program: a copy of n bytes counts 2 n, and the fetch for ownership shows as less bandwidth.

A level is measured with half of its size: what fits it, and not the one before. The memory is
measured with four times the last cache.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rotary.kernels.cpu import caches

READ, INVERT, COPY, STREAM = "read", "invert in place", "copy", "copy past the caches"
LEVELS = ("L1", "L2", "L3", "memory")
Bandwidth = dict[str, dict[str, float]]  # level -> way -> bytes a second of all threads
_LINE = 8  # numbers of 64 bits


@intrinsic  # type: ignore[untyped-decorator]
def _stream_line(context: Any, target: Any, source: Any) -> Any:
    """Copy one line of 64 bytes by a store past the caches."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE).as_pointer()
        to, come = (b.inttoptr(each, line) for each in arguments)
        hint = b.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        b.store(b.load(come, align=64), to, align=64).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _read(x: Any, y: Any, times: int) -> int:
    total = 0
    for turn in range(times):
        for i in range(x.size):
            total ^= x[i] + turn
    return total


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _invert(x: Any, y: Any, times: int) -> int:
    for turn in range(times):
        for i in range(x.size):
            x[i] ^= turn + 1
    return 0


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _copy(x: Any, y: Any, times: int) -> int:
    for turn in range(times):
        for i in range(x.size):
            y[i] = x[i] + turn  # a plain copy becomes a call of memcpy, which may stream
    return 0


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _stream(x: Any, y: Any, times: int) -> int:
    for _ in range(times):
        for i in range(0, x.size, 8):
            _stream_line(y.ctypes.data + 8 * i, x.ctypes.data + 8 * i)
    return 0


# way -> its loop, how many arrays it passes over, and how often over each byte
WAYS: dict[str, tuple[Callable[..., int], int, int]] = {
    READ: (_read, 1, 1),
    INVERT: (_invert, 1, 2),
    COPY: (_copy, 2, 1),
    STREAM: (_stream, 2, 1),
}


def measured(threads: int, seconds: float) -> Bandwidth:
    """The bandwidth of each level, each way: the best of 5, of so many seconds each."""
    share = capacities(1)  # L1 and L2 are of each core, the third of all
    sizes = [share[0] // 2, share[1] // 2, share[2] // (2 * threads), 4 * share[2] // threads]
    return {
        level: {way: _bandwidth(way, size, threads, seconds) for way in WAYS}
        for level, size in zip(LEVELS, sizes, strict=True)
    }


def capacities(threads: int) -> tuple[int, int, int]:
    """Bytes of the caches that so many threads have together.

    >>> capacities(2)[2] == capacities(1)[2]
    True
    """
    return threads * caches.size(1), threads * caches.size(2), caches.size(3)


def _bandwidth(way: str, size: int, threads: int, seconds: float) -> float:
    """Bytes a second, of arrays that have so many bytes for each thread together."""
    loop, arrays, passes = WAYS[way]
    count = max(_LINE, size // arrays // 8 // _LINE * _LINE)
    memory = [[_aligned(count) for _ in range(2)] for _ in range(threads)]
    moved = arrays * passes * count * 8
    loop(*memory[0], 1)
    start = time.perf_counter()
    loop(*memory[0], 4)
    times = max(1, round(seconds * 4 / (time.perf_counter() - start)))
    return max(threads * moved * times / _together(loop, memory, times) for _ in range(5))


def _aligned(count: int) -> Any:
    """So many numbers, the first at the start of a cache line."""
    memory = np.ones(count + _LINE, np.int64)  # zeros are not in memory before they are written
    skipped = -memory.ctypes.data % 64 // 8
    return memory[skipped : skipped + count]


def _together(loop: Callable[..., int], memory: list[list[Any]], times: int) -> float:
    """Seconds of the slowest thread, each over its own arrays; all begin together."""
    begin, took = threading.Barrier(len(memory)), [0.0] * len(memory)

    def work(number: int) -> None:
        x, y = memory[number]
        begin.wait()
        start = time.perf_counter()
        loop(x, y, times)
        took[number] = time.perf_counter() - start

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(memory))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(took)


def held(size: int, threads: int) -> dict[str, float]:
    """The share of so many bytes that each level holds at best, when they are walked in turn.

    Caches keep what fits them, the fastest first: no cache can return more than it holds.

    >>> held(2**40, 2)["memory"] > 0.99
    True
    """
    shares, rest = {}, size
    for level, capacity in zip(LEVELS, capacities(threads), strict=False):
        shares[level] = min(rest, capacity) / size
        rest -= min(rest, capacity)
    return {**shares, "memory": rest / size}


def bound(x_bytes: int, table_bytes: int, way: str, bandwidth: Bandwidth, threads: int) -> float:
    """Seconds of a rotation that is as quick as its bytes: x and out in a way, the tables once.

    x_bytes      of q and k; they are read and written, in place or to other memory
    table_bytes  of cos and sin, which are read once for all heads
    way          INVERT for a rotation in place, else COPY: by whichever stores are quicker
    """
    moved = 2 * x_bytes
    resident = (x_bytes if way == INVERT else moved) + table_bytes
    shares = held(resident, threads)

    def seconds(size: int, ways: tuple[str, ...]) -> float:
        return sum(
            share * size / max(bandwidth[level][each] for each in ways)
            for level, share in shares.items()
        )

    ways = (INVERT,) if way == INVERT else (COPY, STREAM)
    return seconds(moved, ways) + seconds(table_bytes, (READ,))
