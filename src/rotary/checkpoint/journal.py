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
from .files import JOURNAL, MANIFEST
from .plan import Conversion
from .shards import Hashes
from .verify import Proof


def written_before(work: Conversion) -> dict[str, Hashes]:
    """File -> sha256 of its tensors, of the shards that an earlier call of the same wrote.

    Raises ValueError for a folder that overlaps the source, is finished, or is not ours.
    """
    folder, identity = work.folder, _identity(work)
    writing.check_target(work.source, folder)
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    names -= {name for name in names if writing.is_unfinished(folder / name)}
    if MANIFEST in names and JOURNAL not in names:
        raise ValueError(f"{folder}: holds a finished conversion; give a new folder")
    if JOURNAL not in names:
        if others := names - {writing.LOCK}:
            raise ValueError(f"{folder}: is not empty, it has {min(others)!r}; give a new one")
        return {}
    first, *lines = map(_line, (folder / JOURNAL).read_bytes().split(b"\n"))
    if not first:
        raise ValueError(f"{folder / JOURNAL}: not readable; delete {folder} and begin again")
    if first != identity:
        raise ValueError(
            f"{folder}: holds an unfinished conversion of another source or plan, or of a source "
            "that changed; delete it, or give a new folder"
        )
    return {line["file"]: line["sha256"] for line in lines if line.keys() == {"file", "sha256"}}


def _line(text: bytes) -> dict[str, Any]:
    """A line of a journal; {} for one that a kill or a full disk cut short."""
    try:
        return dict(parsed(text, JOURNAL))
    except ValueError:
        return {}


def _identity(work: Conversion) -> dict[str, Any]:
    """What a conversion is of, and what it does: another one must not go on with its files."""
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
    """Write the journal anew, without a line that a kill cut short; result as `written_before`."""
    written = written_before(work)
    lines = [_identity(work), *({"file": file, "sha256": written[file]} for file in written)]
    with writing.replacing(work.folder / JOURNAL) as file:
        file.writelines(json.dumps(line).encode() + b"\n" for line in lines)
    return written


def add(folder: Path, written: Mapping[str, Hashes]) -> None:
    """Note that shards are whole: file -> sha256 of its tensors."""
    with open(folder / JOURNAL, "ab") as journal:
        for file, hashes in written.items():
            journal.write(json.dumps({"file": file, "sha256": hashes}).encode() + b"\n")
        journal.flush()
        os.fsync(journal.fileno())


def finish(
    work: Conversion, hashes: Mapping[str, Hashes], beside: Mapping[str, str], proof: Proof
) -> None:
    """Write the manifest, the last file of all, and end the journal.

    hashes  shard -> tensor -> sha256;  beside  file that is no shard -> the sha256 of its bytes
    It holds what was converted, how, from what, what every tensor and every file is now, and the
    text of the source's config.json, which the way back writes again.
    """
    from .. import __version__

    folder, shards, plan = work.folder, work.checkpoint.shards, work.plan.to_dict()
    content = {
        "from": plan.pop("source"),
        "to": plan.pop("target"),
        "rotary": __version__,
        "files": {shard.path.name: shard.state.size for shard in shards},
        "proof": proof._asdict(),
        "config": work.config.text,
        **plan,
        "sha256": {
            tensor: value for shard in shards for tensor, value in hashes[shard.path.name].items()
        },
        "sha256_beside": dict(beside),
    }
    text = writing.write_json(folder / MANIFEST, content)
    if (folder / MANIFEST).read_bytes() != text:
        raise OSError(f"{folder / MANIFEST}: is not what was written; check the disk")
    (folder / JOURNAL).unlink()
    writing.sync_folder(folder)
