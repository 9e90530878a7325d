"""The header of one file of safetensors, read strictly, and what tells that a file was changed.

Nothing of the weights is read here, and nothing is ever unpickled. A file that breaks the format is
an error.
Source of the format: the README of safetensors 0.8.
"""

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..strict_json import JSON, parsed

MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors
MAX_AXES = 64  # the limit of NumPy and of torch
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# how files begin that are met under the name of a checkpoint
FOREIGN = {
    b"version https://git-lfs": "a git-lfs pointer, not the weights; run `git lfs pull`",
    b"PK\x03\x04": "a zip file, as torch.save writes; convert it to safetensors first",
    b"\x80\x02": "a pickle; convert it to safetensors first, it is never unpickled here",
    b"\x1f\x8b": "a gzip file; unpack it first",
    b"GGUF": "a GGUF file; convert it to safetensors first",
    b"\x93NUMPY": "a NumPy file; convert it to safetensors first",
    b"<": "a web page; the download went wrong",
}


class Tensor(NamedTuple):
    """What a header says of a tensor; `begin` and `end` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class State(NamedTuple):
    """What tells that a file is still the one that was read."""

    size: int
    modified: int  # nanoseconds
    inode: int
    changed: int  # nanoseconds; unlike `modified`, no program can put it back


class Shard(NamedTuple):
    """One file: its tensors in the order of their bytes, and the free text of its header."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    state: State


def read_shard(path: Path, expected: State | None = None) -> Shard:
    """The header of one file. Raises ValueError for whatever breaks the format.

    expected  as in `open_regular`
    """
    with open_regular(path, expected) as file:
        state = state_from(os.fstat(file.fileno()))
        size = state.size
        start = file.read(32)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path}: not a safetensors file: {_reason(start, length, size)}")
        file.seek(8)
        text = file.read(length)
    tensors, metadata = _parsed_header(text, size - 8 - length, 8 + length, path)
    return Shard(path, tensors, metadata, state)


def state_of(path: Path) -> State:
    """What a file is now; another than a shard's own `state` if somebody changed it."""
    return state_from(os.stat(path))


def state_from(status: os.stat_result) -> State:
    """The part of a file's status that changes when it is written or replaced."""
    return State(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def open_regular(path: Path, expected: State | None = None) -> BinaryIO:
    """A regular file to read bytes from; never a device or a pipe, which could wait for ever.

    expected  what the file was when it was first read: ValueError if the one that is opened is
              another, as where it was changed since, or replaced by a link to somewhere else
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path}: not a regular file")

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)  # of what is open: a name may be another's by now
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path}: not a regular file")
            if expected is not None:
                check_unchanged(path, expected, state_from(status))
        except BaseException:
            os.close(handle)
            raise
        return handle

    return open(path, "rb", opener=opener)


def check_unchanged(path: Path, expected: State, now: State | None = None) -> None:
    """Raise ValueError where a file is not what it was when it was first read."""
    if (now or state_of(path)) != expected:
        raise ValueError(
            f"{path}: changed while it was converted; delete the target and begin again"
        )


def read_json(path: Path, expected: State | None = None) -> Mapping[str, JSON]:
    """An object in a file that may be as long as a header. Raises ValueError for anything else."""
    with open_regular(path, expected) as file:
        text = file.read(MAX_HEADER_BYTES + 1)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: larger than {MAX_HEADER_BYTES} bytes; is it the right file?")
    return parsed(text, str(path))


def _reason(start: bytes, length: int, size: int) -> str:
    for magic, meaning in FOREIGN.items():
        if start.startswith(magic):
            return meaning
    if len(start) < 8:
        return f"{size} bytes, too few for a header"
    if length > MAX_HEADER_BYTES:
        return f"a header of {length} bytes, and {MAX_HEADER_BYTES} is the limit"
    return f"a header of {length} bytes in a file of {size}; is it truncated?"


def _parsed_header(
    text: bytes, data_bytes: int, data_start: int, path: Path
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors in the order of their bytes, which they must fill without a gap, and the metadata."""
    if not text.startswith(b"{"):
        raise ValueError(f"{path}: the header does not begin with an open brace")
    header = dict(parsed(text, f"{path}: the header"))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path}: __metadata__ must hold text alone")
    try:
        "".join([*header, *metadata.values()]).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path}: a name or __metadata__ holds half of a character") from None
    entries = {}
    for name, value in header.items():
        try:
            entries[name] = _entry(value, data_start)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name!r:.200}{error}") from None
    tensors = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    at = data_start
    for name, tensor in tensors.items():
        if tensor.begin != at:
            raise ValueError(
                f"{path}: tensor {name!r:.200} begins at byte {tensor.begin}, not at {at}"
            )
        at = tensor.end
    if at != data_start + data_bytes:
        raise ValueError(
            f"{path}: the tensors end at byte {at} and the file at {data_start + data_bytes}; "
            "is it truncated?"
        )
    return tensors, metadata


def _entry(value: Any, data_start: int) -> Tensor:
    """What a header says of one tensor. Raises ValueError with what is wrong with it."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(" must have dtype, shape and data_offsets alone")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f": dtype {dtype!r:.80} is not known; known: {', '.join(BITS)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(": shape and data_offsets must be whole numbers >= 0")
    if len(shape) > MAX_AXES:
        raise ValueError(f": a shape of {len(shape)} axes; NumPy and torch have {MAX_AXES}")
    bits = math.prod(shape) * BITS[dtype]
    begin, end = offsets
    if bits != 8 * (end - begin):
        raise ValueError(f": shape {shape!s:.200} of {dtype} is not {end - begin} bytes")
    return Tensor(dtype, tuple(shape), data_start + begin, data_start + end)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and {*map(type, value)} <= {int} and min(value, default=0) >= 0
