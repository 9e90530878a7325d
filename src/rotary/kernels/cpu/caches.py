"""The sizes of this processor's caches, from which the sizes of tiles follow."""

from functools import cache
from pathlib import Path

# where the system does not say: what most processors have at least
_USUAL = {1: 1 << 15, 2: 1 << 20, 3: 1 << 25}
_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


@cache
def size(level: int) -> int:
    """Bytes of the data cache of a level, 1 to 3, that a core has, alone or with others.

    Linux says it; elsewhere, and of a level that is not there, it is the usual one.

    >>> size(1) <= size(2) <= size(3)
    True
    """
    for path in sorted(_FOLDER.glob("index*")):
        try:
            texts = [(path / name).read_text().strip() for name in ("level", "type", "size")]
        except OSError:
            continue
        number, kind, text = texts
        if number == str(level) and kind != "Instruction" and text.endswith("K"):
            return int(text[:-1]) << 10
    return _USUAL[level]
