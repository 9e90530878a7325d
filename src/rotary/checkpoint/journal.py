"""What is kept about a conversion: a journal while it is unfinished, the manifest when it is whole.

The journal has one line for what is converted, and one for each shard that is whole.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..strict_json import parsed
from . import writing
from .files import Checkpoint, read_json
from .plan import Plan
from .shards import Hashes
from .verify import Proof

MANIFEST = "rotary-conversion.json"
JOURNAL = "rotary-conversion.unfinished"
Identity = dict[str, Any]


def read_manifest(root: Path) -> Mapping[str, Any] | None:
    """The manifest of a folder, if it was converted.

    Raises ValueError for a conversion that was broken off: half of its weights are old.
    """
    if (root / JOURNAL).exists():
        raise ValueError(f"{root}: holds an unfinished conversion; finish it first")
    return read_json(root / MANIFEST) if (root / MANIFEST).is_file() else None


def identity_of(checkpoint: Checkpoint, todo: Plan) -> Identity:
    """What a conversion is of, and what it does: another one must not go on with its files."""
    planned = json.dumps(todo.to_dict(), sort_keys=True).encode()
    return {
        "from": todo.source,
        "to": todo.target,
        "source": {
            shard.path.name: [shard.state.size, shard.state.modified, shard.state.changed]
            for shard in checkpoint.shards
        },
        "plan": hashlib.sha256(planned).hexdigest(),
    }


def written_before(folder: Path, identity: Identity) -> dict[str, Hashes]:
    """File -> sha256 of its tensors, of the shards that an earlier call of the same wrote.

    Raises ValueError for a folder that is finished, or not ours.
    """
    journal, entries = folder / JOURNAL, _entries(folder)
    if MANIFEST in entries and JOURNAL not in entries:
        raise ValueError(f"{folder}: holds a finished conversion; give a new folder")
    strangers = entries - {JOURNAL, writing.LOCK}
    if JOURNAL not in entries:
        if strangers:
            raise ValueError(f"{folder}: is not empty, it has {min(strangers)!r}; give a new one")
        return {}
    first, *others = _lines(journal)
    if not first:
        raise ValueError(f"{journal}: not readable; delete {folder} and begin again")
    if first != identity:
        raise ValueError(
            f"{folder}: holds an unfinished conversion of another source or plan, or of a source "
            "that changed; delete it, or give a new folder"
        )
    return {line["file"]: line["sha256"] for line in others if line.keys() == {"file", "sha256"}}


def _lines(journal: Path) -> list[dict[str, Any]]:
    """The lines of a journal; {} for one that a kill or a full disk cut short."""
    lines = []
    for line in journal.read_bytes().split(b"\n"):
        try:
            lines.append(dict(parsed(line, JOURNAL)))
        except ValueError:
            lines.append({})
    return lines


def _entries(folder: Path) -> set[str]:
    """Names in a folder, without those of files that are not whole."""
    if not folder.is_dir():
        return set()
    return {entry.name for entry in folder.iterdir() if not writing.is_unfinished(entry)}


def begin(folder: Path, identity: Identity, known: Mapping[str, Hashes]) -> None:
    """Write the journal anew, without a line that a kill cut short."""
    lines = [identity, *(_line(file, hashes) for file, hashes in known.items())]
    with writing.replacing(folder / JOURNAL) as file:
        file.writelines(json.dumps(line).encode() + b"\n" for line in lines)


def add(folder: Path, written: Mapping[str, Hashes]) -> None:
    """Say that shards are whole: file -> sha256 of its tensors."""
    with open(folder / JOURNAL, "ab") as journal:
        journal.writelines(
            json.dumps(_line(file, hashes)).encode() + b"\n" for file, hashes in written.items()
        )
        journal.flush()
        os.fsync(journal.fileno())


def _line(file: str, hashes: Hashes) -> dict[str, Any]:
    return {"file": file, "sha256": hashes}


def finish(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest, the last file of all, and end the journal."""
    text = writing.write_json(folder / MANIFEST, content)
    if (folder / MANIFEST).read_bytes() != text:
        raise OSError(f"{folder / MANIFEST}: is not what was written; check the disk")
    (folder / JOURNAL).unlink()
    writing.sync_folder(folder)


def manifest_of(
    checkpoint: Checkpoint,
    todo: Plan,
    hashes: Mapping[str, Hashes],
    beside: Mapping[str, str],
    proof: Proof,
    config: str | None,
) -> dict[str, Any]:
    """What was converted, how, from what, and what every tensor and every file beside is now.

    beside  file that is no shard -> the sha256 of its bytes
    config  text of the source's config.json, which the way back writes again
    """
    plan = todo.to_dict()
    in_order = (hashes[shard.path.name] for shard in checkpoint.shards)
    return {
        "from": plan.pop("source"),
        "to": plan.pop("target"),
        "rotary": _version(),
        "files": {shard.path.name: shard.state.size for shard in checkpoint.shards},
        "proof": proof._asdict(),
        "config": config,
        **plan,
        "sha256": {name: value for each in in_order for name, value in each.items()},
        "sha256_beside": dict(beside),
    }


def _version() -> str:
    from .. import __version__

    return __version__
