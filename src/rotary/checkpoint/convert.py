"""A checkpoint in the other pair layout: shard by shard, resumable, and proved before it is whole.

The order of writing is what makes it safe: shards, the files beside, the config, then the proof,
the index, and the manifest last of all. Until the manifest is there the folder is unfinished, and
the same call goes on.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from .. import configs
from ..strict_json import parsed
from . import journal, writing
from .files import Checkpoint, State, check_unchanged, read_checkpoint, state_of
from .labels import CONFIG, Labels, labels_of, warning_of
from .names import code_base
from .plan import Plan, plan
from .shards import Advance, Hashes, Job, Written, check_movable, write_shards
from .verify import Proof, check_files, check_which, prove


class Ready(NamedTuple):
    """What is there, what is to be done, and the config that is read and written.

    inputs   what every file of the source was when it was read
    warning  what will load the result and compute wrong results, and the way out; "" for nothing
    """

    source: Path
    checkpoint: Checkpoint
    plan: Plan
    labels: Labels
    inputs: Mapping[Path, State]
    warning: str

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.state.size for shard in self.checkpoint.shards)


class Converted(NamedTuple):
    """What was done: the plan, the shards that this call wrote, and what was proved.

    warning  what will load the result and compute wrong results, and the way out; "" for nothing
    """

    plan: Plan
    written: tuple[str, ...]
    proof: Proof
    warning: str


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    from_layout: str,
    to_layout: str,
    config: Any = None,
    trust_source: bool = False,
    leave: Sequence[str] = (),
    verify: str = "sample",
    executor: Executor | None = None,
    advance: Advance | None = None,
) -> Converted:
    """Write the checkpoint `source` into the folder `target`, its weights in the other pair layout.

    source        a folder of safetensors, sharded or not, or one file; of what is beside one file
                  the config alone is read, and written
    target        a new folder, or that of a conversion that was broken off, which then goes on
    from_layout   the layout of the weights: "half" or "interleaved"
    config        path or dict, where the folder has no config.json
    trust_source  take `from_layout` as given, for weights that another program has moved before
    leave         names of tensors to leave as they are, with * for any text, where one is refused
                  that looks like a query or a key and is neither
    verify        "sample" proves the scores of three layers, "full" those of all, and reads every
                  byte of every file again
    executor      what writes the shards and reads them again, of concurrent.futures or like it (of
                  Dask, `client.get_executor(pure=False)`); default two threads
    advance       called with numbers of bytes that are done, `Ready.size` in all; from the threads
                  that write, or here after some shards with an `executor`

    Rows of query and key projections move, with all that belongs to them; every other byte stays.
    `.warning` of the result says what will load it and compute wrong results, if anything will.
    Raises ValueError for whatever is refused, before anything is written, and OSError where a disk
    fails. Whatever ends it, the source is as it was, and the same call goes on.

    >>> convert_checkpoint("no such folder", "new", from_layout="half", to_layout="interleaved")
    Traceback (most recent call last):
    FileNotFoundError: no such folder: no such file; give a folder or a .safetensors file
    """
    check_which(verify)
    ready = prepared(source, from_layout, to_layout, config, trust_source, leave)
    return carried_out(ready, target, verify, executor, advance)


def prepared(
    source: str | os.PathLike[str],
    from_layout: str,
    to_layout: str,
    config: Any = None,
    trust_source: bool = False,
    leave: Sequence[str] = (),
) -> Ready:
    """What is there and what is to be done; whatever can be refused without a target is refused.

    Arguments and errors are those of `convert_checkpoint`.
    """
    checkpoint = read_checkpoint(source)
    root = checkpoint.root
    before = journal.read_manifest(root)
    if before is not None and before.get("to") != from_layout:
        raise ValueError(
            f"{root}: was converted to {before.get('to')!r} already, by {journal.MANIFEST}; "
            f"say --from {before.get('to')}, or convert the original"
        )
    if config is None and not (root / CONFIG).is_file():
        raise ValueError(f"{root}: has no {CONFIG}; give the model's with --config")
    tensors = checkpoint.tensors
    trusted = trust_source or before is not None
    inputs = {root / name: state for name, state in checkpoint.states.items()}
    inputs |= {shard.path: shard.state for shard in checkpoint.shards}
    data, text, states = _read_config(root if config is None else config)
    inputs = {**states, **inputs}  # a file that was found before is the one that was meant
    todo = plan(tensors, data, from_layout, to_layout, trust_source=trusted, leave=leave)
    for move in todo.moves.values():
        check_movable(tensors[move.tensor], move)
    labels = labels_of(data, text, from_layout, to_layout, before)
    misread = warning_of(parsed(labels.written, CONFIG), to_layout, code_base(tensors))
    warning = "; ".join(filter(None, (todo.warning, misread)))
    return Ready(Path(source), checkpoint, todo, labels, inputs, warning)


def _read_config(config: Any) -> tuple[Mapping[str, Any], str | None, dict[Path, State]]:
    """The keys of a config; of a path also its text, and what the file was when it was read."""
    if not isinstance(config, str | os.PathLike):
        return configs.load(config), None, {}
    path = Path(config) / CONFIG if Path(config).is_dir() else Path(config)
    states = {path: state_of(path)} if path.exists() else {}
    raw = configs.read_config(path)
    return parsed(raw, str(path)), raw.decode(), states


def carried_out(
    ready: Ready,
    target: str | os.PathLike[str],
    verify: str = "sample",
    executor: Executor | None = None,
    advance: Advance | None = None,
) -> Converted:
    """Do what is prepared. Arguments and errors are those of `convert_checkpoint`."""
    folder = Path(target)
    check_which(verify)
    if executor is not None:  # its workers may have another current folder
        ready, folder = _absolute(ready), folder.absolute()
    checkpoint, todo = ready.checkpoint, ready.plan
    writing.check_target(ready.source, folder)
    identity = journal.identity_of(checkpoint, todo)
    known = journal.written_before(folder, identity)
    writing.check_space(folder, sum(_missing(ready, folder, known)))
    with writing.made(folder), writing.locked(folder) as ticket:
        writing.check_target(ready.source, folder)  # by the folder that it has become
        known = journal.written_before(folder, identity)  # another process may have ended just now
        journal.begin(folder, identity, known)
        hashes: dict[str, Hashes] = {}
        written: list[str] = []

        def finished(found: Sequence[tuple[Job, Written]]) -> None:
            new = [job.target.name for job, result in found if result.is_new]
            hashes.update({job.target.name: result.hashes for job, result in found})
            if new:
                journal.add(folder, {name: hashes[name] for name in new})
                written.extend(new)

        write_shards(_jobs(ready, folder, known, ticket), finished, executor, advance)
        beside = {
            str(name): writing.copy(checkpoint.root, name, folder, checkpoint.states[name])
            for name in checkpoint.sidecars
            if str(name) not in (journal.MANIFEST, CONFIG, writing.LOCK)
        }
        with writing.replacing(folder / CONFIG) as file:
            file.write(ready.labels.written)
        beside[CONFIG] = hashlib.sha256(ready.labels.written).hexdigest()
        outputs = {folder / name: state_of(folder / name) for name in (*beside, *hashes)}
        proof = prove(checkpoint, folder, todo, hashes, verify, executor)
        if checkpoint.listing is not None:
            name = Path(checkpoint.listing.name)
            beside[str(name)] = writing.copy(checkpoint.root, name, folder, checkpoint.states[name])
        if verify == "full":
            check_files(folder, beside)
        for path, state in {**ready.inputs, **outputs}.items():
            check_unchanged(path, state, state_of(path))
        content = journal.manifest_of(
            checkpoint, todo, hashes, beside, proof, ready.labels.original
        )
        journal.finish(folder, content)
    return Converted(todo, tuple(sorted(written)), proof, ready.warning)


def _absolute(ready: Ready) -> Ready:
    shards = (shard._replace(path=shard.path.absolute()) for shard in ready.checkpoint.shards)
    return ready._replace(checkpoint=ready.checkpoint._replace(shards=tuple(shards)))


def _jobs(ready: Ready, folder: Path, known: dict[str, Hashes], ticket: str) -> list[Job]:
    moves = ready.plan.moves
    return [
        Job(
            shard,
            folder / shard.path.name,
            {name: moves[name] for name in shard.tensors if name in moves},
            known.get(shard.path.name, {}),
            ticket,
        )
        for shard in ready.checkpoint.shards
    ]


def _missing(ready: Ready, folder: Path, known: dict[str, Hashes]) -> list[int]:
    """Sizes of the shards that no earlier call wrote."""
    return [
        shard.state.size
        for shard in ready.checkpoint.shards
        if shard.path.name not in known or not (folder / shard.path.name).is_file()
    ]
