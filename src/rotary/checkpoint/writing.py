"""Files that are written whole or not at all, by one process at a time.

A file grows under a name of its own in the folder where it belongs, is synced, and then takes its
name in one step. So a kill, a full disk or a power cut leaves the old file or the new one.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .files import open_regular

UNFINISHED = ".rotary-{}"  # names of files that are not whole yet
LOCK = ".rotary.lock"
CHUNK = 2**24
SPARE = 2**20  # bytes of headers and small files, beside the weights


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write `path` into; it takes its name when the block ends, and goes on an error.

    The mode is that of a new file under this umask.
    """
    unfinished = path.parent / UNFINISHED.format(secrets.token_hex(8))
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.truncate()  # to where it is: zeros at the end may have been passed over
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Write JSON as people read it, whole or not at all; ASCII, whatever is in a name."""
    with replacing(path) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def write_sparse(file: BinaryIO, piece: Any) -> None:
    """Write bytes into a new file; zeros are passed over, so that they take no disk."""
    if np.frombuffer(piece, np.uint8).any():
        file.write(piece)
    else:
        file.seek(len(piece), os.SEEK_CUR)


def copy(source: Path, target: Path) -> None:
    """Copy the bytes of a file, and make the folder it belongs in."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(source) as file, replacing(target) as written:
        shutil.copyfileobj(file, written, CHUNK)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[str]:
    """Be the one process that writes in a folder; the lock goes with the process, however it ends.

    Gives the ticket of this process, which is in the lock: whoever works for it elsewhere shows it
    to `check_ticket`. Files that a killed process left unfinished are deleted, before and after.
    Raises BlockingIOError where another process is at work.
    """
    path = folder / LOCK
    handle = _taken(path)
    try:
        ticket = secrets.token_hex(16)
        os.pwrite(handle, ticket.encode(), 0)  # as long as one that a killed process left
        os.fsync(handle)
        _clear(folder)
        try:
            yield ticket
        finally:
            _clear(folder)
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def check_ticket(folder: Path, ticket: str) -> None:
    """Raise OSError unless the process that gave the ticket holds the lock of the folder."""
    try:
        found = (folder / LOCK).read_text()
    except FileNotFoundError:
        found = ""
    if found != ticket:
        raise OSError(
            f"{folder}: is not the folder of this conversion on {platform.node()}, or it is over; "
            "all workers must see the same files"
        )


def _clear(folder: Path) -> None:
    for path in [path for path in folder.rglob(".*") if is_unfinished(path)]:
        path.unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Whether a file is one of ours that is not whole.

    >>> is_unfinished(Path(".rotary-notes"))
    False
    """
    return bool(re.fullmatch(UNFINISHED.format("[0-9a-f]{16}"), path.name)) and path.is_file()


@contextlib.contextmanager
def made(folder: Path) -> Iterator[None]:
    """A folder that is there; if it was made here and an error leaves it empty, it goes again."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        yield
    except BaseException:
        for each in new:
            with contextlib.suppress(OSError):  # it is not empty
                each.rmdir()
        raise


def _taken(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise BlockingIOError(f"{path.parent}: another process writes here; wait") from None
        try:
            if os.fstat(handle).st_ino == os.stat(path).st_ino:
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)  # its holder has just left and taken the name away


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what cannot end: OSError unless a disk has `needed` bytes and some more.

    The folder need not be there yet.
    """
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if free < needed + SPARE:
        raise OSError(
            f"{folder}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free"
        )


def check_target(source: Path, target: Path) -> None:
    """Refuse a folder to write in that is the source, is inside it, holds it, or is a link."""
    here, there = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if target.is_symlink():
        raise ValueError(f"{target}: a link; give the folder that is meant")
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"{target}: overlaps the source {source}; give another folder")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: not a folder")
