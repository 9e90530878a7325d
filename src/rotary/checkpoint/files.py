"""Reads what a conversion needs: headers of safetensors files, their folder, and its config.

Of the weights only the headers are read here, strictly: a file that breaks the format is an error,
as are a link that leads out of the folder, an index that does not fit its shards and an unfinished
conversion. Nothing is ever unpickled or imported. Format: the README of safetensors 0.8.
"""

import contextlib
import math
import os
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .. import configs
from ..strict_json import JSON, parsed

CONFIG = "config.json"
INDEX = ".safetensors.index.json"
MANIFEST = "rotary-conversion.json"  # of a finished conversion
JOURNAL = "rotary-conversion.unfinished"  # of an unfinished one
# suffixes of files with weights, or lists of them; only safetensors are converted and copied
WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".pt2", ".pkl", ".ckpt", ".distcp", ".nemo", ".h5",
    ".msgpack", ".gguf", ".npz", ".npy", ".onnx", ".onnx_data", ".ot", ".tflite",
)  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors
MAX_AXES = 64  # the limit of NumPy and of torch
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# first bytes of files that are not safetensors, whatever their name -> what they are
FOREIGN: dict[bytes | tuple[bytes, ...], str] = {
    b"version https://git-lfs": "a git-lfs pointer, not the weights; run `git lfs pull`",
    b"PK\x03\x04": "a zip file, as torch.save writes; convert it to safetensors first",
    b"\x80\x02": "a pickle; convert it to safetensors first, it is never unpickled here",
    b"\x1f\x8b": "a gzip file; unpack it first",
    b"GGUF": "a GGUF file; convert it to safetensors first",
    b"\x93NUMPY": "a NumPy file; convert it to safetensors first",
    b"<": "a web page; the download went wrong",
    (b'{"', b"{\n", b"{\r", b"{ "): "JSON, as a config or an index; give the folder it is in",
}
NAMES_SHOWN = 5


class Tensor(NamedTuple):
    """What a header says of a tensor; `begin` and `end` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class State(NamedTuple):
    """Facts about a file that differ if it has changed since it was read."""

    size: int
    modified: int  # nanoseconds
    inode: int
    changed: int  # nanoseconds; unlike `modified`, no program can set it


class Shard(NamedTuple):
    """One file: its tensors in the order of their bytes, which follow `header` bytes."""

    path: Path
    tensors: Mapping[str, Tensor]
    header: int
    state: State


class Checkpoint(NamedTuple):
    """A whole model.

    root      the folder that it is in
    shards    its files, by name
    left      relative paths of weights in other formats or in subfolders, which are not copied
    beside    other files under the folder, to be copied as they are, the index last: relative path
              -> state of the file when it was listed
    manifest  of the conversion that wrote the folder, or None
    """

    root: Path
    shards: tuple[Shard, ...]
    left: tuple[Path, ...] = ()
    beside: Mapping[Path, State] = {}
    manifest: Mapping[str, JSON] | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all shards."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}


class ConfigFile(NamedTuple):
    """A config as it was read: its keys, and its text if it came from a file."""

    data: Mapping[str, JSON]
    text: str | None = None


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a checkpoint: a folder, or one file of safetensors.

    Raises FileNotFoundError for a path that is not there. Raises ValueError for a folder without
    safetensors, with several and no index, or with an index that does not fit, for a broken file,
    and for an unfinished conversion.
    Warns if the index states another size than its shards have.

    >>> read_checkpoint("no such folder")
    Traceback (most recent call last):
    FileNotFoundError: no such folder: no such file; give a folder or a .safetensors file
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; give a folder or a .safetensors file")
    if not path.is_dir():
        shard = read_shard(path, _state_inside(path.parent, path))
        return Checkpoint(path.parent, (shard,), manifest=read_manifest(path.parent))
    states = _files(path)
    manifest = read_manifest(path)
    files = [file for file in states if len(file.parts) == 1]
    weights = [file for file in files if file.suffix == ".safetensors"]
    indices = [file for file in files if file.name.endswith(INDEX)]
    others = [file for file in states if file not in {*weights, *indices}]
    # weights in other formats, and their indices, by their names
    left = [
        each for each in others if Path(each.name.removesuffix(".index.json")).suffix in WEIGHTS
    ]
    if len(indices) > 1:
        raise ValueError(f"{path}: more than one index, {_few(indices)}; keep one")
    if indices:
        shards = _indexed(path, indices[0], states)
    elif len(weights) == 1:
        shards = (read_shard(path / weights[0], states[weights[0]]),)
    elif weights:
        raise ValueError(
            f"{path}: {len(weights)} files and no model{INDEX}, {_few(weights)}; "
            "give the path of one file"
        )
    else:
        below = any(file.suffix == ".safetensors" for file in left)
        how = "give the folder below" if below else "convert it to safetensors first"
        raise ValueError(
            f"{path}: no .safetensors file" + f", only {_few(left)}; {how}" * bool(left)
        )
    beside = {file: states[file] for file in (*others, *indices) if file not in left}
    return Checkpoint(path, shards, tuple(left), beside, manifest)


def read_manifest(root: Path) -> Mapping[str, JSON] | None:
    """Return the manifest of a folder that was converted, else None.

    Raises ValueError for an unfinished conversion.
    """
    if (root / JOURNAL).exists():
        raise ValueError(f"{root}: holds an unfinished conversion; finish it first")
    return read_json(root / MANIFEST) if (root / MANIFEST).is_file() else None


def read_config(config: object) -> ConfigFile:
    """Read a config: path of a file or of its folder, a dict, or a PretrainedConfig.

    >>> read_config({"head_dim": 64}).data
    {'head_dim': 64}
    """
    if not isinstance(config, str | os.PathLike):
        return ConfigFile(configs.load(config))
    text = configs.read_config(Path(config))
    return ConfigFile(parsed(text, str(config), infinity=True), text.decode())


def read_json(path: Path, expected: State | None = None) -> Mapping[str, JSON]:
    """Read a JSON object from a file of at most MAX_HEADER_BYTES; ValueError for anything else."""
    with open_regular(path, expected) as file:
        text = file.read(MAX_HEADER_BYTES + 1)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{path}: larger than {MAX_HEADER_BYTES} bytes; is it the right file?")
    return parsed(text, str(path))


def state_of(path: Path) -> State:
    """Return the present state of a file, which differs from an earlier one if it was changed."""
    return _state(os.stat(path))


def _state(status: os.stat_result) -> State:
    return State(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def open_regular(path: Path, expected: State | None = None) -> BinaryIO:
    """Open a regular file to read bytes; never a device or a pipe, which could block forever.

    expected  state of the file when it was first read; ValueError if it was changed or replaced
              since, for example by a link to another file
    """

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)  # of the open file: its name may mean another by now
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path}: not a regular file")
            if expected is not None:
                check_unchanged(path, expected, _state(status))
        except BaseException:
            os.close(handle)
            raise
        return handle

    return open(path, "rb", opener=opener)


@contextlib.contextmanager
def unchanged(path: Path, expected: State) -> Iterator[BinaryIO]:
    """Open a file to read; ValueError if its state is not `expected`, when opened or at the end."""
    with open_regular(path, expected) as file:
        yield file
        check_unchanged(path, expected)


def check_unchanged(path: Path, expected: State, now: State | None = None) -> None:
    """Raise ValueError if a file has changed since it was first read."""
    if (now or state_of(path)) != expected:
        raise ValueError(
            f"{path}: changed while it was converted; delete the target and begin again"
        )


# --- the files of a folder ---


def _files(root: Path) -> dict[Path, State]:
    """Return all files under a folder by relative path, sorted, without hidden folders."""

    def stop(error: OSError) -> None:  # without it a folder that cannot be read is passed over
        raise error

    states: dict[Path, State] = {}
    for folder, inner, names in os.walk(root, onerror=stop):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in [*inner, *names]:
            path = Path(folder) / name
            if path.is_symlink() or name in names:
                states[path.relative_to(root)] = _state_inside(root, path)
    return dict(sorted(states.items()))


def _state_inside(root: Path, path: Path) -> State:
    """Return the state of a regular file; ValueError for others, and for links out of the folder.

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
    status = os.lstat(real)  # a link that was put here just now is not a regular file
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: not a regular file")
    return _state(status)


def _indexed(root: Path, name: Path, states: Mapping[Path, State]) -> tuple[Shard, ...]:
    """Read the shards that an index lists; ValueError if it differs from the files.

    name    path of the index, relative to the folder `root`
    states  state of every file, by path relative to `root`
    """
    index = root / name
    content = read_json(index, states[name])
    where, metadata = content.get("weight_map"), content.get("metadata") or {}
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"{index}: weight_map must hold a file name for each tensor")
    # a name with a folder in it matches none of these, so it is never opened
    here = {file.name for file in states if file.suffix == ".safetensors" and len(file.parts) == 1}
    listed = set(where.values())
    problems = [f"{file!r} is missing, or no .safetensors file" for file in sorted(listed - here)]
    problems += [f"{file!r} is not in the index, move it away" for file in sorted(here - listed)]
    if problems:
        raise ValueError(f"{index}: {_few(problems, '; ')}")
    shards = tuple(read_shard(root / file, states[Path(file)]) for file in sorted(listed))
    file_of: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            file = shard.path.name
            if tensor in file_of:
                problems.append(f"tensor {tensor!r} is in {file_of[tensor]!r} and {file!r}")
            elif where.get(tensor) != file:
                problems.append(f"tensor {tensor!r} is in {file!r}, not in {where.get(tensor)!r}")
            file_of[tensor] = file
    problems += [
        f"tensor {each!r} is not in {where[each]!r}" for each in where if each not in file_of
    ]
    if problems:
        raise ValueError(f"{index}: {_few(problems, '; ')}")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(shard.state.size - shard.header for shard in shards)
    if type(total) is int and total != size:
        warnings.warn(f"{index}: total_size is {total}, the tensors have {size}", stacklevel=3)
    return shards


def _few(items: Sequence[object], between: str = ", ") -> str:
    more = len(items) - NAMES_SHOWN
    return between.join([*map(str, items[:NAMES_SHOWN]), *[f"and {more} more"] * (more > 0)])


# --- one file ---


def read_shard(path: Path, expected: State | None = None) -> Shard:
    """Read the header of one file. Raises ValueError for whatever breaks the format.

    expected  as in `open_regular`
    """
    with open_regular(path, expected) as file:
        state = _state(os.fstat(file.fileno()))
        start = file.read(32)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, state.size - 8):
            reason = _reason(start, length, state.size)
            raise ValueError(f"{path}: not a safetensors file: {reason}")
        file.seek(8)
        text = file.read(length)
    return Shard(path, _tensors(text, state.size, path), 8 + length, state)


def _reason(start: bytes, length: int, size: int) -> str:
    for magic, meaning in FOREIGN.items():
        if start.startswith(magic):
            return meaning
    if len(start) < 8:
        return f"{size} bytes, too few for a header"
    if length > MAX_HEADER_BYTES:
        return f"a header of {length} bytes, and {MAX_HEADER_BYTES} is the limit"
    return f"a header of {length} bytes in a file of {size}; is it truncated?"


def _tensors(text: bytes, size: int, path: Path) -> dict[str, Tensor]:
    """Return tensors in the order of their bytes, which must fill the file without a gap."""
    if not text.startswith(b"{"):
        raise ValueError(f"{path}: the header does not begin with an open brace")
    header = dict(parsed(text, f"{path}: the header"))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path}: __metadata__ must hold only text")
    try:
        "".join([*header, *metadata.values()]).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path}: a name or __metadata__ is not valid Unicode") from None
    entries, at = {}, 8 + len(text)
    for name, value in header.items():
        try:
            entries[name] = _tensor(value, at)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name!r:.200}{error}") from None
    tensors = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    for name, tensor in tensors.items():
        if tensor.begin != at:
            raise ValueError(
                f"{path}: tensor {name!r:.200} begins at byte {tensor.begin}, not at {at}"
            )
        at = tensor.end
    if at != size:
        raise ValueError(
            f"{path}: the tensors end at byte {at} and the file at {size}; is it truncated?"
        )
    return tensors


def _tensor(value: JSON, data_start: int) -> Tensor:
    """Return what a header says of one tensor; ValueError that says what is wrong with it."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(" must have dtype, shape and data_offsets alone")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f": dtype {dtype!r:.80} is not known; known: {', '.join(BITS)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(": shape and data_offsets must be whole numbers >= 0")
    if len(shape) > MAX_AXES:
        raise ValueError(f": a shape of {len(shape)} axes; NumPy and torch have {MAX_AXES}")
    begin, end = offsets
    if math.prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise ValueError(f": shape {shape!s:.200} of {dtype} is not {end - begin} bytes")
    return Tensor(dtype, tuple(shape), data_start + begin, data_start + end)


def _are_counts(value: JSON) -> bool:
    return isinstance(value, list) and {*map(type, value)} <= {int} and min(value, default=0) >= 0
