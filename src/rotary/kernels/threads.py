"""Who does the work: the calling thread, or all threads of the OpenMP that torch uses, or Numba's.

Torch's workers spin for a while after every operator. A second pool has to wait for the core they
hold, so large jobs go to the same pool, through the C interface of GNU OpenMP.
"""

import ctypes
import os
import sys
import threading
from array import array
from contextlib import nullcontext
from functools import cache

import numba

from . import loops

SERIAL_BYTES = 1 << 20  # below this, waking the threads costs more than they save
_PARTS_PER_THREAD = 4  # a thread that is disturbed leaves the rest to the other


def count() -> int:
    """How many threads a large call uses: torch's number when torch is loaded, else Numba's.

    >>> count() >= 1
    True
    """
    torch_threads = getattr(sys.modules.get("torch"), "get_num_threads", None)
    wanted = torch_threads() if torch_threads else numba.get_num_threads()
    return min(int(wanted), int(numba.config.NUMBA_NUM_THREADS))


def run(loop: loops.Loop, size: int, job: "array[int]") -> None:
    """Do a job of one part, over `size` bytes: on this thread if it is small, or on all, in parts.

    `job` is a record of `loops.py`, whose second number is that of the parts.
    """
    address = job.buffer_info()[0]
    if size < SERIAL_BYTES or _in_forked_child or (wanted := count()) == 1:
        loop.call(address)
        return
    job[1] = wanted * _PARTS_PER_THREAD
    if (openmp := _openmp()) is not None:
        openmp.GOMP_parallel(loop.address, address, wanted, 0)
        return
    with nullcontext() if _may_overlap() else _one_at_a_time:
        loops.on_numba_threads(loop.address, address, wanted)


@cache
def _openmp() -> "ctypes.CDLL | None":
    """GNU OpenMP: the copy torch has loaded, or will share when it is; None if there is none.

    Numba's own OpenMP layer asks for another file name and would start a second pool, that waits
    for the first while its workers spin.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None
    library.GOMP_parallel.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_uint,
    )
    library.GOMP_parallel.restype = None
    return library


def pool() -> str:
    """What large calls run on, for `rotary doctor`.

    >>> pool() in ("OpenMP", "omp", "tbb", "workqueue", "not started")
    True
    """
    if _openmp() is not None:
        return "OpenMP"
    try:
        return str(numba.threading_layer())
    except ValueError:  # no parallel call has started the layer yet
        return "not started"


# Numba's own thread pool, used where there is no OpenMP, aborts the process if two threads enter it
_one_at_a_time = threading.Lock()
# an OpenMP pool does not survive a fork: the child computes serially
_in_forked_child = False


def _may_overlap() -> bool:
    return pool() not in ("workqueue", "not started")


def _after_fork() -> None:
    global _in_forked_child, _one_at_a_time
    _in_forked_child = True
    _one_at_a_time = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
if numba.config.THREADING_LAYER_PRIORITY == ["tbb", "omp", "workqueue"]:  # nobody chose otherwise
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
