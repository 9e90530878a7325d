"""A cache of results with a limit in bytes; the least recently used result is dropped first."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Value = TypeVar("Value")


class Cache:
    """Arrays, or tuples of arrays, by key; safe to use from threads and signal handlers.

    The thread that holds the lock may call `get` again: from a signal handler, or from a destructor
    that the garbage collector runs. Such a call builds its result without the cache.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.lock = threading.RLock()
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._in_use = False  # by the thread that has the lock
        if hasattr(os, "register_at_fork"):  # never fork while another thread holds the lock
            release = self.lock.release
            os.register_at_fork(
                before=self.lock.acquire, after_in_parent=release, after_in_child=release
            )

    def get(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """Return the value cached under `key`, or what `build` makes, cached if it fits."""
        with self.lock:
            if not self._in_use:
                self._in_use = True
                try:
                    if key in self._entries:
                        self._entries.move_to_end(key)
                        return self._entries[key][0]
                finally:
                    self._in_use = False
        value = build()
        parts = value if isinstance(value, tuple) else (value,)
        size = sum(getattr(part, "nbytes", 64) for part in parts)
        evicted = []  # freed after the lock is released: freeing memory takes another lock
        with self.lock:
            if not self._in_use:
                self._in_use = True
                try:
                    if key not in self._entries and size <= self.max_bytes:
                        self._entries[key] = value, size
                        self.bytes += size
                    while self.bytes > self.max_bytes:
                        evicted.append(self._entries.popitem(last=False)[1])
                        self.bytes -= evicted[-1][1]
                finally:
                    self._in_use = False
        return value
