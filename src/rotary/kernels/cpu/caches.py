"""The sizes of this processor's caches, from which the sizes of tiles follow."""

from functools import cache
from pathlib import Path

# bytes per level that most processors have at least, for systems that do not report the sizes
_USUAL = {1: 1 << 15, 2: 1 << 20, 3: 1 << 25}
_MOST = 1 << 24  # bytes for each processor that shares a cache: more are also used by others
_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


@cache
def size(level: int) -> int:
    """Return the bytes of a core's data cache of level 1 to 3, which other cores may share.

    Linux reports it. A virtual machine reports the cache of the whole host, as 300 MB for 2 cores,
    so it counts as 16 MB for each processor of this machine that shares it, if that is less. On
    other systems, and for a missing level, the result is a usual size.

    >>> size(1) <= size(2) <= size(3)
    True
    """
    for path in sorted(_FOLDER.glob("index*")):
        try:
            texts = [(path / name).read_text().strip()
                     for name in ("level", "type", "size", "shared_cpu_map")]  # fmt: skip
        except OSError:
            continue
        number, kind, text, sharing = texts
        if number == str(level) and kind != "Instruction" and text.endswith("K"):
            sharers = int(sharing.replace(",", ""), 16).bit_count()
            return min(int(text[:-1]) << 10, max(1, sharers) * _MOST)
    return _USUAL[level]
