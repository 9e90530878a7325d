"""What a checkpoint of safetensors holds, read strictly: headers, the index, the files beside.

Nothing of the weights is read here, and nothing is ever unpickled or imported. A file that breaks
the format, an index that does not fit its shards and a name that leads out of the folder are
errors.
Source of the format: the README of safetensors 0.8.
"""

import math
import os
import re
import stat
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..strict_json import parsed

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
# files that hold weights in another form, or list them, which stay as they are and are not copied
OTHER_WEIGHTS = (
    ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack", ".gguf", ".npz", ".onnx",
)  # fmt: skip
INDEX = ".safetensors.index.json"
NAMES_SHOWN = 5


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


class Checkpoint(NamedTuple):
    """A whole model.

    root      the folder that it is in
    shards    its files, by name
    listing   the index, which says in which file a tensor is, or None
    sidecars  other files under the folder, relative, to be copied as they are
    states    what the index and the sidecars were when they were found, by their relative path
    left      weights in other forms or in folders below, relative, which are not copied
    """

    root: Path
    shards: tuple[Shard, ...]
    listing: Path | None
    sidecars: tuple[Path, ...]
    left: tuple[Path, ...]
    states: Mapping[Path, State]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all shards."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a folder, or the one file of safetensors that `path` is.

    Raises FileNotFoundError for a path that is not there, and ValueError for a folder without
    safetensors, with several and no index, with an index that does not fit, and for a broken file.
    UserWarning where the index says another size than its shards have.

    >>> read_checkpoint("no such folder")
    Traceback (most recent call last):
    FileNotFoundError: no such folder: no such file; give a folder or a .safetensors file
    """
    given = Path(path)
    if not given.exists():
        raise FileNotFoundError(f"{given}: no such file; give a folder or a .safetensors file")
    if not given.is_dir():
        known = _inside(given.parent, given)
        return Checkpoint(given.parent, (read_shard(given, known),), None, (), (), {})
    files = _files(given)
    weights = [file for file in files if file.suffix == ".safetensors" and len(file.parts) == 1]
    indices = [file for file in files if file.name.endswith(INDEX) and len(file.parts) == 1]
    if len(indices) > 1:
        raise ValueError(f"{given}: more than one index, {_shown(indices)}; keep one")
    kept = {*weights, *indices}
    left = tuple(file for file in files if file not in kept and _holds_weights(file))
    if not kept:
        below = any(file.suffix == ".safetensors" for file in left)
        how = "give the folder below" if below else "convert it to safetensors first"
        raise ValueError(
            f"{given}: no .safetensors file" + f", only {_shown(left)}; {how}" * bool(left)
        )
    if indices:
        shards = _indexed(given, indices[0], weights, files)
    elif len(weights) > 1:
        raise ValueError(
            f"{given}: {len(weights)} files and no model{INDEX}, {_shown(weights)}; "
            "give the path of one file"
        )
    else:
        shards = (read_shard(given / weights[0], files[weights[0]]),)
    sidecars = tuple(file for file in files if file not in {*kept, *left})
    states = {file: files[file] for file in (*sidecars, *indices)}
    return Checkpoint(
        given, shards, given / indices[0] if indices else None, sidecars, left, states
    )


def _holds_weights(file: Path) -> bool:
    """Whether a file is of weights, or is the index of such files, by its name."""
    form = Path(file.name.removesuffix(".index.json")).suffix
    return form in (*OTHER_WEIGHTS, ".safetensors")


def read_shard(path: Path, known: State | None = None) -> Shard:
    """The header of one file. Raises ValueError for whatever breaks the format.

    known  as in `open_regular`
    """
    with open_regular(path, known) as file:
        state = _state(os.fstat(file.fileno()))
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
    return _state(os.stat(path))


def _state(found: os.stat_result) -> State:
    return State(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


def open_regular(path: Path, known: State | None = None) -> BinaryIO:
    """A regular file to read bytes from; never a device or a pipe, which could wait for ever.

    known  what the file was when it was found: ValueError if the one that is opened is another,
           as where it was changed since, or a link to somewhere else was put in its place
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path}: not a regular file")

    def opened(name: str, flags: int) -> int:
        handle = os.open(name, flags | os.O_NONBLOCK)
        try:
            found = os.fstat(handle)  # of what is open: a name may be another's by now
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{path}: not a regular file")
            check_unchanged(path, known, _state(found))
        except BaseException:
            os.close(handle)
            raise
        return handle

    return open(path, "rb", opener=opened)


def check_unchanged(path: Path, known: State | None, now: State) -> None:
    """Raise ValueError where a file is not what it was when it was found."""
    if known is not None and now != known:
        raise ValueError(
            f"{path}: changed while it was converted; delete the target and begin again"
        )


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
    entries = {name: _entry(name, value, data_start, path) for name, value in header.items()}
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


def _entry(name: str, value: Any, data_start: int, path: Path) -> Tensor:
    where = f"{path}: tensor {name!r:.200}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} must have dtype, shape and data_offsets alone")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{where}: dtype {dtype!r:.80} is not known; known: {', '.join(BITS)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{where}: shape and data_offsets must be whole numbers >= 0")
    if len(shape) > MAX_AXES:
        raise ValueError(f"{where}: a shape of {len(shape)} axes; NumPy and torch have {MAX_AXES}")
    bits = math.prod(shape) * BITS[dtype]
    begin, end = offsets
    if bits != 8 * (end - begin):
        raise ValueError(f"{where}: shape {shape!s:.200} of {dtype} is not {end - begin} bytes")
    return Tensor(dtype, tuple(shape), data_start + begin, data_start + end)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _files(root: Path) -> dict[Path, State]:
    """All files under a folder, relative and sorted, hidden folders left out."""
    found: dict[Path, State] = {}
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in [*inner, *names]:
            path = Path(folder) / name
            if path.is_symlink() or name in names:
                found[path.relative_to(root)] = _inside(root, path)
    return dict(sorted(found.items()))


def _inside(root: Path, path: Path) -> State:
    """What a file is; ValueError for no regular file, and for a link that leads out of the folder.

    Hugging Face's cache keeps its files in `blobs`, beside `snapshots`; that is inside.
    """
    real, inside = Path(os.path.realpath(path)), [Path(os.path.realpath(root))]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    if path.is_symlink() and not any(real.is_relative_to(folder) for folder in inside):
        raise ValueError(f"{path}: a link that leads out of the folder, to {real}; copy the file")
    if not real.exists():
        raise ValueError(f"{path}: a link to nothing; download the file again")
    if real.is_dir():
        raise ValueError(f"{path}: a link to a folder; copy the folder")
    found = os.lstat(real)  # a link that was put there since is none
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: not a regular file")
    return _state(found)


def _indexed(
    root: Path, listing: Path, weights: list[Path], states: Mapping[Path, State]
) -> tuple[Shard, ...]:
    """The shards that an index lists, if they hold what it says and nothing else is there.

    listing, weights, states  relative to the folder `root`
    """
    index = root / listing
    where, total = weight_map(index, states[listing])
    problems = [
        f"tensor {name!r} is said to be in {file!r}, which is no name of a .safetensors file"
        for name, file in where.items()
        if re.search(r"[/\\\x00]", file) or not file.endswith(".safetensors")
    ]
    _refuse(index, problems)
    listed, there = set(where.values()), {file.name for file in weights}
    problems += [f"{file!r} is missing" for file in sorted(listed - there)]
    problems += [f"{file!r} is not in the index, move it away" for file in sorted(there - listed)]
    _refuse(index, problems)
    shards = tuple(read_shard(root / name, states[Path(name)]) for name in sorted(listed))
    seen: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in seen:
                problems.append(f"tensor {name!r} is in {seen[name]!r} and {shard.path.name!r}")
            elif where.get(name) != shard.path.name:
                problems.append(
                    f"tensor {name!r} is in {shard.path.name!r}, not in {where.get(name)!r}"
                )
            seen[name] = shard.path.name
    problems += [
        f"tensor {name!r} is not in {file!r}" for name, file in where.items() if name not in seen
    ]
    _refuse(index, problems)
    size = sum(t.end - t.begin for shard in shards for t in shard.tensors.values())
    if total is not None and total != size:
        warnings.warn(f"{index}: total_size is {total}, the tensors have {size}", stacklevel=3)
    return shards


def weight_map(index: Path, known: State | None = None) -> tuple[dict[str, str], int | None]:
    """Tensor -> file, and the size of all, as an index says. Raises ValueError for another form."""
    content = read_json(index, known)
    where, metadata = content.get("weight_map"), content.get("metadata") or {}
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"{index}: weight_map must hold a file name for each tensor")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return where, total if type(total) is int else None


def read_json(path: Path, known: State | None = None) -> Mapping[str, Any]:
    """An object in a file that may be as long as a header. Raises ValueError for anything else."""
    with open_regular(path, known) as file:
        text = file.read(MAX_HEADER_BYTES + 1)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: larger than {MAX_HEADER_BYTES} bytes; is it the right file?")
    return parsed(text, str(path))


def _refuse(index: Path, problems: list[str]) -> None:
    if problems:
        more = len(problems) - NAMES_SHOWN
        shown = "; ".join(problems[:NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"{index}: {shown}")


def _shown(files: Iterable[Path]) -> str:
    names = [str(file) for file in files]
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
