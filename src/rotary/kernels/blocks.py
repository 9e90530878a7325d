"""Memory for large new arrays: on huge pages, and from blocks that were released before.

Memory that the system has yet to provide costs more than the rotation: zeroed and mapped page by
page, and on a virtual machine fetched from its host, 64 MiB take as long as 1 to 40 copies. So the
block of an array that is gone is kept for the next one, as every layer of a model asks for arrays
of the sizes of the last. A block that waits is declared free to the system, which may take its
pages at any time.
"""

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LARGE = 1 << 22  # bytes; smaller arrays are left to NumPy
KEEP = 1 << 28  # at most so many bytes wait
_HUGE_PAGE = 1 << 21
_CAN_WAIT = hasattr(mmap, "MADV_FREE")


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array; a large one starts on a huge page.

    >>> empty((2, 3), np.float32).shape
    (2, 3)
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE:
        return np.empty(shape, dtype)
    block = _waiting.take(size) or _new_block(size)
    return np.asarray(_Lease(block, size, _waiting.give)).view(dtype).reshape(shape)


def _new_block(size: int) -> "_Block":
    try:
        return _Block(size)
    except (OSError, MemoryError):
        _waiting.clear()
    try:
        return _Block(size)
    except OSError as error:  # mmap's way to say that there is no memory
        raise MemoryError(f"cannot allocate {size:,} bytes: {error.strerror}") from error


class _Block:
    """Private memory that covers whole huge pages."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        if _CAN_WAIT:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self.memory = mmap.mmap(-1, self.size + _HUGE_PAGE, flags=flags)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    self.memory.madvise(mmap.MADV_HUGEPAGE)
            array = np.frombuffer(self.memory, np.uint8)
        else:
            array = np.empty(self.size + _HUGE_PAGE, np.uint8)
        start = array.ctypes.data
        self.address = start + -start % _HUGE_PAGE
        self.array = array  # keeps the memory


class _Lease:
    """What an array holds on to while it uses a block; after that the block waits for another."""

    def __init__(self, block: _Block, size: int, give: Callable[[_Block], None]) -> None:
        self._block, self._give = block, give
        self.__array_interface__ = {
            "data": (block.address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._give(self._block)


class _Waiting:
    """Blocks that no array uses; the one that waited longest goes first.

    A block is given by the destructor of an array, which may run in any thread, inside any line of
    Python, under any lock. So `give` never waits, and each step on `_blocks` is one call.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: dict[int, _Block] = {}  # by address
        self.lock = threading.RLock()

    @property
    def bytes(self) -> int:
        """How much waits."""
        return sum(block.size for block in list(self._blocks.values()))

    def take(self, size: int) -> _Block | None:
        """A block of this size or up to a quarter larger, the last one given."""
        with self.lock:
            for block in reversed(list(self._blocks.values())):
                if size <= block.size <= size + max(size // 4, _HUGE_PAGE):
                    return self._blocks.pop(block.address, None)
        return None

    def give(self, block: _Block) -> None:
        """Keep a block, if it can wait without holding on to memory."""
        if not _CAN_WAIT or block.size > self.limit:
            return
        try:
            block.memory.madvise(mmap.MADV_FREE)
        except OSError:  # a kernel without it, or memory that is locked
            return
        if not self.lock.acquire(blocking=False):
            return
        try:
            self._blocks[block.address] = block
            while self.bytes > self.limit:
                self._blocks.pop(next(iter(self._blocks)), None)
        finally:
            self.lock.release()

    def clear(self) -> None:
        """Give all that waits back to the system."""
        with self.lock:
            self._blocks.clear()


_waiting = _Waiting(KEEP)
if hasattr(os, "register_at_fork"):  # never fork while another thread holds the lock
    os.register_at_fork(
        before=_waiting.lock.acquire,
        after_in_parent=_waiting.lock.release,
        after_in_child=_waiting.lock.release,
    )
