"""All that a conversion reads: the folder of a checkpoint with its index, manifest and config.

A link that leads out of the folder, an index that does not fit its shards and an unfinished
conversion are errors. Nothing is ever unpickled or imported.
"""

import os
import re
import stat
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import configs
from ..strict_json import JSON, parsed
from .headers import Shard, State, Tensor, read_json, read_shard, state_from, state_of

CONFIG = "config.json"
MANIFEST = "rotary-conversion.json"  # of a conversion that is whole
JOURNAL = "rotary-conversion.unfinished"  # of one that is not
# files that hold weights in another form, or list them, which stay as they are and are not copied
OTHER_WEIGHTS = (
    ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack", ".gguf", ".npz", ".onnx",
)  # fmt: skip
INDEX = ".safetensors.index.json"
NAMES_SHOWN = 5


class Checkpoint(NamedTuple):
    """A whole model.

    root      the folder that it is in
    shards    its files, by name
    listing   relative path of the index, which says in which file a tensor is, or None
    sidecars  other files under the folder, relative, to be copied as they are
    left      weights in other forms or in folders below, relative, which are not copied
    states    what the index and the sidecars were when they were read, by their relative path
    manifest  of the conversion that wrote the folder, if one did
    """

    root: Path
    shards: tuple[Shard, ...]
    listing: Path | None = None
    sidecars: tuple[Path, ...] = ()
    left: tuple[Path, ...] = ()
    states: Mapping[Path, State] = {}
    manifest: Mapping[str, JSON] | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all shards."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}


class ConfigFile(NamedTuple):
    """A config as it was read: its keys, and of a file its text and what the file was."""

    data: Mapping[str, JSON]
    text: str | None = None
    states: Mapping[Path, State] = {}


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a folder, or the one file of safetensors that `path` is.

    Raises FileNotFoundError for a path that is not there, and ValueError for a folder without
    safetensors, with several and no index, with an index that does not fit, for a broken file, and
    for a conversion that was broken off: half of its weights are old.
    UserWarning where the index says another size than its shards have.

    >>> read_checkpoint("no such folder")
    Traceback (most recent call last):
    FileNotFoundError: no such folder: no such file; give a folder or a .safetensors file
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; give a folder or a .safetensors file")
    root = path if path.is_dir() else path.parent
    files = _files(root) if path.is_dir() else {path: _inside(root, path)}
    manifest = read_manifest(root)
    if not path.is_dir():
        return Checkpoint(root, (read_shard(path, files[path]),), manifest=manifest)
    weights = [file for file in files if file.suffix == ".safetensors" and len(file.parts) == 1]
    indices = [file for file in files if file.name.endswith(INDEX) and len(file.parts) == 1]
    if len(indices) > 1:
        raise ValueError(f"{path}: more than one index, {_shown(indices)}; keep one")
    kept = {*weights, *indices}
    # by the names, also of the indices of such files
    left = tuple(
        file
        for file in files
        if file not in kept
        and Path(file.name.removesuffix(".index.json")).suffix in (*OTHER_WEIGHTS, ".safetensors")
    )
    if not kept:
        below = any(file.suffix == ".safetensors" for file in left)
        how = "give the folder below" if below else "convert it to safetensors first"
        raise ValueError(
            f"{path}: no .safetensors file" + f", only {_shown(left)}; {how}" * bool(left)
        )
    if indices:
        shards = _indexed(path, indices[0], weights, files)
    elif len(weights) > 1:
        raise ValueError(
            f"{path}: {len(weights)} files and no model{INDEX}, {_shown(weights)}; "
            "give the path of one file"
        )
    else:
        shards = (read_shard(path / weights[0], files[weights[0]]),)
    sidecars = tuple(file for file in files if file not in {*kept, *left})
    states = {file: files[file] for file in (*sidecars, *indices)}
    listing = indices[0] if indices else None
    return Checkpoint(path, shards, listing, sidecars, left, states, manifest)


def read_manifest(root: Path) -> Mapping[str, JSON] | None:
    """The manifest of a folder, if it was converted.

    Raises ValueError for a conversion that was broken off: half of its weights are old.
    """
    if (root / JOURNAL).exists():
        raise ValueError(f"{root}: holds an unfinished conversion; finish it first")
    return read_json(root / MANIFEST) if (root / MANIFEST).is_file() else None


def read_config(config: Any) -> ConfigFile:
    """A config: path of a file or of the folder it is in, a dict, or a PretrainedConfig.

    >>> read_config({"head_dim": 64}).data
    {'head_dim': 64}
    """
    if not isinstance(config, str | os.PathLike):
        return ConfigFile(configs.load(config))
    path = Path(config) / CONFIG if Path(config).is_dir() else Path(config)
    states = {path: state_of(path)} if path.exists() else {}
    text = configs.read_config(path)
    return ConfigFile(parsed(text, str(path)), text.decode(), states)


def _files(root: Path) -> dict[Path, State]:
    """All files under a folder, relative and sorted, hidden folders left out."""
    states: dict[Path, State] = {}
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in [*inner, *names]:
            path = Path(folder) / name
            if path.is_symlink() or name in names:
                states[path.relative_to(root)] = _inside(root, path)
    return dict(sorted(states.items()))


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
    status = os.lstat(real)  # a link that was put there since is none
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: not a regular file")
    return state_from(status)


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


def weight_map(index: Path, expected: State | None = None) -> tuple[dict[str, str], int | None]:
    """Tensor -> file, and the size of all, as an index says. Raises ValueError for another form."""
    content = read_json(index, expected)
    where, metadata = content.get("weight_map"), content.get("metadata") or {}
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"{index}: weight_map must hold a file name for each tensor")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return where, total if type(total) is int else None


def _refuse(index: Path, problems: list[str]) -> None:
    if problems:
        more = len(problems) - NAMES_SHOWN
        shown = "; ".join(problems[:NAMES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(f"{index}: {shown}")


def _shown(files: Iterable[Path]) -> str:
    names = [str(file) for file in files]
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
