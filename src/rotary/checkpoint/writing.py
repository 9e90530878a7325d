"""Writes the folder of a conversion: only complete files, by one process, with a journal.

A kill, a full disk or a power cut leaves the old file or the new one: see `replacing`. While the
folder is unfinished it has a journal: one line about the conversion, and one for each complete
shard. When all files are complete, the manifest replaces the journal.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from .. import whole_files
from ..strict_json import JSON, parsed
from ..whole_files import is_unfinished
from .files import JOURNAL, MANIFEST
from .plan import Conversion

Hashes = dict[str, str]  # tensor -> sha256
Ticket = tuple[Path, str]  # the lock file of a folder, and the text that its holder wrote into it

LOCK = ".rotary.lock"
LOCK_BYTES = 32  # length of a ticket
SPARE = 2**20  # bytes of headers and small files, beside the weights


@contextlib.contextmanager
def replacing(path: Path, ticket: Ticket | None = None) -> Iterator[BinaryIO]:
    """As `whole_files.replacing`, and the new name survives a power cut.

    A worker in another process passes the ticket of its call, which is checked before and after:
    OSError if the call has ended.
    """
    check = partial(_check_ticket, ticket)
    check()
    with whole_files.replacing(path, check) as file:
        yield file
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_sparse(file: BinaryIO, piece: npt.NDArray[np.uint8]) -> None:
    """Write bytes into a new file; skip pieces of zeros, so that they take no disk space."""
    if piece.any():
        file.write(piece.data)
    else:
        file.seek(len(piece), os.SEEK_CUR)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Ticket]:
    """Hold the lock of a folder while this process writes; it is freed if the process dies.

    Yields the ticket of this process, which is also written into the lock file; a worker in another
    process passes it to `replacing`. Files that a killed process left unfinished are deleted before
    and after. Raises BlockingIOError if another process is writing.
    """
    path = folder / LOCK
    handle = _open_locked(path)
    try:
        ticket = secrets.token_hex(LOCK_BYTES // 2)
        os.pwrite(handle, ticket.encode(), 0)  # replaces one of the same length
        os.fsync(handle)
        _clear(folder)
        yield path.absolute(), ticket
    finally:
        _clear(folder)
        path.unlink(missing_ok=True)
        os.close(handle)


def _check_ticket(ticket: Ticket | None) -> None:
    """Raise OSError unless the process that made the ticket, if any, holds its folder's lock."""
    if ticket is None:
        return
    path, text = ticket
    if not path.exists() or path.read_text() != text:
        raise OSError(
            f"{path.parent}: is not the folder of this conversion on {platform.node()}, or the "
            "conversion has ended; all workers must see the same files"
        )


def _clear(folder: Path) -> None:
    for path in filter(is_unfinished, list(folder.rglob(".*"))):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder if it is not there; it is deleted again if an error leaves it empty."""
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


def _open_locked(path: Path) -> int:
    """Open and lock the lock file; return its handle."""
    while True:
        if path.is_symlink():
            raise ValueError(f"{path}: a link, and no lock of rotary; delete it")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_size > LOCK_BYTES:
            os.close(handle)  # the ticket would be written into another file
            raise ValueError(f"{path}: no lock of rotary; delete it, or give a new folder")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise BlockingIOError(f"{path.parent}: another process is writing here; wait") from None
        with contextlib.suppress(FileNotFoundError):
            if status.st_ino == os.stat(path).st_ino:
                return handle
        os.close(handle)  # its holder has just deleted the file: try again


def check_space(folder: Path, needed: int) -> None:
    """Raise OSError unless the disk can be written and has `needed` bytes free, plus SPARE.

    The folder need not be there yet.
    """
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    disk = shutil.disk_usage(there)
    if disk.total == 0 or not os.access(there, os.W_OK):  # /proc and /sys have no bytes
        raise OSError(f"{folder}: cannot be written; give another folder")
    if disk.free < needed + SPARE:
        raise OSError(
            f"{folder}: {needed / 1e9:.2f} GB are needed and {disk.free / 1e9:.2f} GB are free"
        )


def check_target(source: Path, target: Path) -> None:
    """Refuse a folder to write in that is the source, is inside it, holds it, or is a link.

    Folders are compared by device and inode as well as by path: one that is mounted in a second
    place (`mount --bind`) has two paths.
    """
    if target.is_symlink():
        raise ValueError(f"{target}: a link; give the folder that is meant")
    here, there = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    above = [_identity(each) for each in (there, *there.parents) if each.exists()]
    below = {_identity(here), *(_identity(Path(folder)) for folder, _, _ in os.walk(here))}
    holds = there.exists() and above[0] in map(_identity, here.parents)
    if holds or not below.isdisjoint(above):
        raise ValueError(f"{target}: overlaps the source {source}; give another folder")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: not a folder")


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


# --- the journal and the manifest ---


def written_before(work: Conversion) -> dict[str, Hashes]:
    """Return file -> sha256 of its tensors, for shards that an earlier call wrote.

    Raises ValueError for a folder that overlaps the source, is finished, or is not of this
    conversion.
    """
    folder, conversion = work.target, _conversion_line(work)
    check_target(work.source, folder)
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    names -= {name for name in names if is_unfinished(folder / name)}
    if MANIFEST in names and JOURNAL not in names:
        raise ValueError(f"{folder}: holds a finished conversion; give a new folder")
    if JOURNAL not in names:
        if others := names - {LOCK}:
            raise ValueError(f"{folder}: is not empty, it has {min(others)!r}; give a new one")
        return {}
    first, *lines = map(_line, (folder / JOURNAL).read_bytes().split(b"\n"))
    if not first:
        raise ValueError(f"{folder / JOURNAL}: not readable; delete {folder} and begin again")
    if first != conversion:
        raise ValueError(
            f"{folder}: holds an unfinished conversion of another source or plan, or of a source "
            "that changed; delete it, or give a new folder"
        )
    return {line["file"]: line["sha256"] for line in lines if line.keys() == {"file", "sha256"}}


def _line(text: bytes) -> dict[str, JSON]:
    """Parse a line of a journal; {} for one that a kill or a full disk cut short."""
    try:
        return dict(parsed(text, JOURNAL))
    except ValueError:
        return {}


def _conversion_line(work: Conversion) -> dict[str, JSON]:
    """Return the first line of the journal; a conversion with another line must not continue it."""
    return {
        "from": work.plan.source,
        "to": work.plan.target,
        "source": {
            shard.path.name: [shard.state.size, shard.state.modified, shard.state.changed]
            for shard in work.checkpoint.shards
        },
        "plan": hashlib.sha256(
            json.dumps(work.plan.to_dict(), sort_keys=True).encode()
        ).hexdigest(),
    }


def begin(work: Conversion) -> dict[str, Hashes]:
    """Rewrite the journal without lines that a kill cut short; return as `written_before`."""
    written = written_before(work)
    lines = [_conversion_line(work), *({"file": file, "sha256": written[file]} for file in written)]
    with replacing(work.target / JOURNAL) as file:
        file.writelines(json.dumps(line).encode() + b"\n" for line in lines)
    return written


def add(folder: Path, written: Mapping[str, Hashes]) -> None:
    """Add complete shards to the journal: file -> sha256 of its tensors."""
    with open(folder / JOURNAL, "ab") as journal:
        for file, hashes in written.items():
            journal.write(json.dumps({"file": file, "sha256": hashes}).encode() + b"\n")
        journal.flush()
        os.fsync(journal.fileno())


def finish(
    work: Conversion,
    hashes: Mapping[str, Hashes],
    beside: Mapping[str, str],
    proof: Mapping[str, JSON],
) -> None:
    """Write the manifest, the last file of all, and delete the journal.

    hashes  shard -> tensor -> sha256
    beside  file that is not a shard -> sha256 of its bytes
    The manifest holds the plan, the checksums of every tensor and of every other file, and the text
    of the source's config.json, which a conversion back writes again.
    """
    from .. import __version__

    folder, shards, plan = work.target, work.checkpoint.shards, work.plan.to_dict()
    content = {
        "from": plan.pop("source"),
        "to": plan.pop("target"),
        "rotary": __version__,
        "files": {shard.path.name: shard.state.size for shard in shards},
        "proof": proof,
        "config": work.config.text,
        **plan,
        "sha256": {
            tensor: value for shard in shards for tensor, value in hashes[shard.path.name].items()
        },
        "sha256_beside": dict(beside),
    }
    text = json.dumps(content, indent=2).encode() + b"\n"  # ASCII, whatever is in a name
    with replacing(folder / MANIFEST) as file:
        file.write(text)
    if (folder / MANIFEST).read_bytes() != text:
        raise OSError(f"{folder / MANIFEST}: is not what was written; check the disk")
    (folder / JOURNAL).unlink()
    sync_folder(folder)
