"""Converts a checkpoint to the other layout: shard by shard, resumable, verified.

`prepare` reads, checks and plans; `carry_out` writes and verifies. The order of writing makes it
safe: the shards, each of which is read again; the config; after a check of the scores the other
files and the index; and last the manifest. A folder without a manifest is unfinished, and the same
call continues it.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from ..fanout import check_executor
from . import files, writing
from .files import CONFIG, MANIFEST, check_unchanged, read_json, state_of
from .layout import warning_of, warning_of_adapter, with_layout, written_config
from .plan import Conversion, Plan, plan
from .shards import Advance, Proof, copy_file, prove, write_shards

ADAPTER_CONFIG = "adapter_config.json"  # of PEFT, beside the weights of an adapter


class Converted(NamedTuple):
    """What was done: the plan, the shards that this call wrote, and the proof.

    warning  which program will load the result and compute wrong results, or that the result is an
             adapter, whose base must be converted too; and what to do; or ""
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
    config: object = None,
    trust_source: bool = False,
    leave: Sequence[str] = (),
    verify: str = "sample",
    executor: Executor | None = None,
    advance: Advance | None = None,
) -> Converted:
    """Write the checkpoint `source` into the folder `target`, its weights in the other layout.

    source        a folder of safetensors, sharded or not, or one file; of the files beside a single
                  file only the config is read, and written
    target        a new folder, or that of an interrupted conversion, which is then continued
    from_layout   the layout of the weights: "half" or "interleaved"
    config        path or dict, in place of the config.json of the folder
    trust_source  believe `from_layout`, for weights that another program has converted before
    leave         names of tensors to copy unchanged, with * for any text: for tensors that are
                  refused because they look like a query or a key, but are neither
    verify        "sample" compares the scores of three layers, "full" those of all, and reads every
                  byte of every file again
    executor      runs the jobs that write and verify shards: one like those of concurrent.futures
                  (of Dask, `client.get_executor(pure=False)`); default two threads
    advance       called with the number of bytes just done; their sum is the size of all shards. It
                  is called by the threads that write, or by this one if there is an `executor`

    Rows of query and key projections move, with all that belongs to them; every other byte stays.
    `Converted.warning` names a program that will load it and compute wrong results.
    Raises ValueError or TypeError for what cannot be converted, before anything is written, and
    OSError if a disk fails. The source never changes, and the same call continues an interrupted
    conversion.

    >>> convert_checkpoint("no such folder", "new", from_layout="half", to_layout="interleaved")
    Traceback (most recent call last):
    FileNotFoundError: no such folder: no such file; give a folder or a .safetensors file
    """
    check_executor(executor)
    work = prepare(source, target, from_layout, to_layout, config, trust_source, leave, verify)
    return carry_out(work, executor, advance)


def prepare(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    from_layout: str,
    to_layout: str,
    config: object = None,
    trust_source: bool = False,
    leave: Sequence[str] = (),
    verify: str = "sample",
) -> Conversion:
    """Read a checkpoint and plan. Arguments and errors are those of `convert_checkpoint`.

    `check_ready` and `carry_out` check the target; for a plan alone, any path will do.
    """
    if verify not in ("sample", "full"):
        raise ValueError(f"verify must be 'sample' or 'full', got {verify!r}")
    checkpoint = files.read_checkpoint(source)
    root, manifest = checkpoint.root, checkpoint.manifest
    if manifest is not None and manifest.get("to") != from_layout:
        raise ValueError(
            f"{root}: was converted to {manifest.get('to')!r} already, by {MANIFEST}; "
            f"say --from {manifest.get('to')}, or convert the original"
        )
    if config is None and not (root / CONFIG).is_file():
        raise ValueError(f"{root}: has no {CONFIG}; give the model's with --config")
    config_file = files.read_config(root if config is None else config)
    tensors, is_moved = checkpoint.tensors, trust_source or manifest is not None
    data = config_file.data
    todo = plan(tensors, data, from_layout, to_layout, trust_source=is_moved, leave=leave)
    changed = with_layout(data, to_layout)
    adapter = root / ADAPTER_CONFIG
    if adapter.is_file() or all(".lora_" in name for name in todo.moves):
        base = read_json(adapter).get("base_model_name_or_path") if adapter.is_file() else None
        of_use = warning_of_adapter(base, to_layout)
    else:
        of_use = warning_of(changed, to_layout, todo.code_base)
    return Conversion(
        Path(source),
        Path(target),
        checkpoint,
        todo,
        config_file,
        written_config(config_file, changed, (manifest or {}).get("config")),
        verify,
        warnings=tuple(filter(None, (todo.warning, of_use))),
    )


def check_ready(work: Conversion) -> None:
    """Raise ValueError or OSError if the target is not for this conversion, or has no space."""
    before = writing.written_before(work)
    sizes = {work.target / shard.path.name: shard.state.size for shard in work.checkpoint.shards}
    missing = [path for path in sizes if path.name not in before or not path.is_file()]
    writing.check_space(work.target, sum(sizes[path] for path in missing))


def carry_out(
    work: Conversion, executor: Executor | None = None, advance: Advance | None = None
) -> Converted:
    """Write and verify what is prepared. Arguments and errors as in `convert_checkpoint`."""
    folder, checkpoint = work.target, work.checkpoint
    check_ready(work)
    # every file must be unchanged since the folder was listed
    states = {
        **{checkpoint.root / name: state for name, state in checkpoint.beside.items()},
        **{shard.path: shard.state for shard in checkpoint.shards},
    }
    with writing.new_folder(folder), writing.locked(folder) as ticket:
        before = writing.begin(work)  # under the lock: another process may have written
        written = write_shards(work, before, ticket, executor, advance)
        with writing.replacing(folder / CONFIG) as file:
            file.write(work.written)
        states |= {folder / name: shard.state for name, shard in written.items()}
        states[folder / CONFIG] = state_of(folder / CONFIG)
        if (folder / CONFIG).read_bytes() != work.written:
            raise OSError(f"{folder / CONFIG}: is not what was written; check the disk")
        proof = prove(work, written)
        beside = {CONFIG: hashlib.sha256(work.written).hexdigest()}
        for name, state in checkpoint.beside.items():  # the index is the last of them
            if str(name) not in (MANIFEST, CONFIG, writing.LOCK):
                copied = copy_file(work, name, state, ticket)
                beside[str(name)] = copied.hashes[str(name)]
                states[folder / name] = copied.state
        for path, state in states.items():
            check_unchanged(path, state)
        hashes = {name: shard.hashes for name, shard in written.items()}
        writing.finish(work, hashes, beside, proof._asdict())
    new = tuple(sorted(name for name, shard in written.items() if shard.is_new))
    return Converted(work.plan, new, proof, work.warning)
