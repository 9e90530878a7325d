"""Memory between two pages that nobody may touch: a step over either end ends the process."""

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE
FILL = 0xA5  # of every byte that nothing was put into


class Guarded:
    """`size` bytes, whole pages, with a page on either side that cannot be read or written."""

    def __init__(self, size):
        self.size = size
        self.memory = mmap.mmap(-1, size + 2 * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (address, address + PAGE + size):
            if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.bytes = np.frombuffer(self.memory, np.uint8, size, PAGE)

    def fill(self):
        self.bytes[:] = FILL
