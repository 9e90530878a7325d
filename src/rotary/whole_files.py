"""Replaces a file completely or not at all: a kill, a full disk or an error leaves the old one."""

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
    """Open a file that is renamed to `path` when the block ends, and deleted on an error.

    The mode is that of a new file under this umask. `check` is called just before the file is
    renamed, and may raise.
    """
    unfinished = path.with_name(f".rotary-{secrets.token_hex(8)}")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.truncate()  # to its position: zeros at the end may have been skipped
            os.fsync(file.fileno())
        check()
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def is_unfinished(path: Path) -> bool:
    """Whether a file is one that `replacing` has not finished."""
    return bool(re.fullmatch(r"\.rotary-[0-9a-f]{16}", path.name)) and path.is_file()
