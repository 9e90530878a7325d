"""Asks for huge pages for large new tensors: new 4 KiB pages take four times as long to touch.

torch or NumPy allocates the memory. Nothing is stored here, so there is no lock.
"""

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

LARGE = 1 << 22  # bytes; smaller memory may hold no whole huge page, of 2 MiB
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # only Linux has it


def ask_for_huge_pages(address: int, size: int) -> None:
    """Ask the system to back this memory, which nobody has touched yet, with huge pages.

    This is a hint: the memory can be used whether the system follows it or not.
    """
    if size >= LARGE and (madvise := _madvise()) is not None:
        start = address - address % mmap.PAGESIZE
        madvise(start, address + size - start, _ADVICE)


@cache
def _madvise() -> Callable[[int, int, int | None], int] | None:
    """Return the system's madvise; None if it has no huge pages."""
    if _ADVICE is None:
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return madvise
