"""Run jobs on the calling thread, or on all threads of torch's OpenMP or of Numba.

Torch's workers spin for a while after every operator. A second pool has to wait for the core they
hold, so large jobs go to the same pool, through the C interface of GNU OpenMP.
"""

import ctypes
import os
import sys
import threading
from array import array
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import numba

from . import loops

PARTS = 4  # per thread; the other threads take the parts that a delayed one has not begun
SERIAL_BYTES = 1 << 20  # below this, waking the threads costs more than they save
_most = int(numba.config.NUMBA_NUM_THREADS)  # 1 in a forked child
_number_of_torch: Callable[[], int] | None = None  # its get_num_threads, once it is loaded


def count() -> int:
    """Return the threads of a large call: torch's number if torch is loaded, else Numba's.

    It is 1 in a forked child. A large call leaves the caches cold, so this does little.

    >>> count() >= 1
    True
    """
    global _number_of_torch
    if _number_of_torch is None:
        _number_of_torch = getattr(sys.modules.get("torch"), "get_num_threads", None)
        if _number_of_torch is None:
            return min(int(numba.get_num_threads()), _most)
    return min(_number_of_torch(), _most)


def run(loop: loops.Loop, size: int, job: "array[int]") -> None:
    """Run a job over `size` bytes: on this thread if it is small, else in parts on all threads.

    `job` is a record made for one part; `loops.py` explains its first three numbers and its last.
    """
    if size < SERIAL_BYTES or (number := count()) == 1:
        loop.call(job.buffer_info()[0])
        return
    job[0], job[1] = number, PARTS
    job.extend((0,) * number)
    if (opened := openmp()) is not None:
        job[2] = opened.thread_number
        opened.parallel(loop.address, job.buffer_info()[0], number, 0)
        return
    address = job.buffer_info()[0]
    with _one_at_a_time if pool() in ("workqueue", "not started") else nullcontext():
        loops.on_numba_threads(loop.address, address, number)


class OpenMP(NamedTuple):
    """GOMP_parallel of GNU OpenMP and its address, and that of `int omp_get_thread_num(void)`."""

    parallel: Callable[..., None]
    address: int
    thread_number: int


@cache
def openmp() -> OpenMP | None:
    """Return GNU OpenMP, the copy that torch has loaded or will load; None if there is none.

    Numba's own OpenMP layer loads another file name and would start a second pool, which waits for
    the first while the workers of that one spin.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None
    parallel = library.GOMP_parallel
    parallel.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    parallel.restype = None
    functions = parallel, library.omp_get_thread_num
    address, number = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions)
    return OpenMP(parallel, address, number)


def pool() -> str:
    """Return the name of the thread pool of large calls, for `rotary doctor`.

    >>> pool() in ("OpenMP", "omp", "tbb", "workqueue", "not started")
    True
    """
    if openmp() is not None:
        return "OpenMP"
    try:
        return str(numba.threading_layer())
    except ValueError:  # no parallel call has started the layer yet
        return "not started"


# Numba's own thread pool, used where there is no OpenMP, aborts the process if two threads enter it
_one_at_a_time = threading.Lock()


def _after_fork() -> None:
    """Compute on one thread in the child: an OpenMP pool does not survive a fork."""
    global _most, _one_at_a_time
    _most = 1
    _one_at_a_time = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
if numba.config.THREADING_LAYER_PRIORITY == ["tbb", "omp", "workqueue"]:  # nobody chose otherwise
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
