"""A checkpoint in the other pair layout: shard by shard, resumable, and proved before it is whole.

Read, plan, write, verify: `prepare` reads and plans, and refuses what it can; `carry_out` writes
and verifies. The order of writing is what makes it safe: shards, the config, then the proof, the
files beside, the index, and the manifest last of all. Until the manifest is there the folder is
unfinished, and the same call goes on.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from . import writing
from .files import CONFIG, MANIFEST, read_checkpoint, read_config
from .headers import check_unchanged, state_of
from .layout_keys import warning_of, with_layout, written_config
from .plan import Conversion, Plan, plan
from .shards import Advance, jobs_of, write_shards
from .verify import Proof, check_files, prove


class Converted(NamedTuple):
    """What was done: the plan, the shards that this call wrote, and what was proved.

    warning  what will load the result and compute wrong results, and what to do; "" for nothing
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
    advance       called with numbers of bytes that are done, those of all shards in all; from the
                  threads that write, or here after some shards with an `executor`

    Rows of query and key projections move, with all that belongs to them; every other byte stays.
    `.warning` of the result says what will load it and compute wrong results, if anything will.
    Raises ValueError for whatever is refused, before anything is written, and OSError where a disk
    fails. Whatever ends it, the source is as it was, and the same call goes on.

    >>> convert_checkpoint("no such folder", "new", from_layout="half", to_layout="interleaved")
    Traceback (most recent call last):
    FileNotFoundError: no such folder: no such file; give a folder or a .safetensors file
    """
    work = prepare(source, target, from_layout, to_layout, config, trust_source, leave, verify)
    return carry_out(work, executor, advance)


def prepare(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    from_layout: str,
    to_layout: str,
    config: Any = None,
    trust_source: bool = False,
    leave: Sequence[str] = (),
    verify: str = "sample",
) -> Conversion:
    """What is there and what is to be done; whatever can be refused without a target is refused.

    target  None for a plan alone. Other arguments and errors are those of `convert_checkpoint`.
    """
    if verify not in ("sample", "full"):
        raise ValueError(f"verify must be 'sample' or 'full', got {verify!r}")
    checkpoint = read_checkpoint(source)
    root, manifest = checkpoint.root, checkpoint.manifest
    if manifest is not None and manifest.get("to") != from_layout:
        raise ValueError(
            f"{root}: was converted to {manifest.get('to')!r} already, by {MANIFEST}; "
            f"say --from {manifest.get('to')}, or convert the original"
        )
    if config is None and not (root / CONFIG).is_file():
        raise ValueError(f"{root}: has no {CONFIG}; give the model's with --config")
    file = read_config(root if config is None else config)
    todo = plan(
        checkpoint.tensors,
        file.data,
        from_layout,
        to_layout,
        trust_source=trust_source or manifest is not None,
        leave=leave,
    )
    changed = with_layout(file.data, to_layout)
    written = written_config(file, changed, (manifest or {}).get("config"))
    misread = warning_of(changed, to_layout, todo.code_base)
    inputs = {
        **file.states,
        # what was listed first is what was meant
        **{root / name: state for name, state in checkpoint.states.items()},
        **{shard.path: shard.state for shard in checkpoint.shards},
    }
    return Conversion(
        Path(source),
        None if target is None else Path(target),
        checkpoint,
        todo,
        file,
        written,
        inputs,
        verify,
        warning="; ".join(filter(None, (todo.warning, misread))),
    )


def carry_out(
    work: Conversion, executor: Executor | None = None, advance: Advance | None = None
) -> Converted:
    """Do what is prepared. Arguments and errors are those of `convert_checkpoint`."""
    folder, checkpoint = work.folder, work.checkpoint
    before = writing.written_before(work)
    sizes = {folder / shard.path.name: shard.state.size for shard in checkpoint.shards}
    missing = [path for path in sizes if path.name not in before or not path.is_file()]
    writing.check_space(folder, sum(sizes[path] for path in missing))
    with writing.new_folder(folder), writing.locked(folder) as ticket:
        before = writing.begin(work)  # the folder is there now, and another process may have ended
        jobs = jobs_of(work, before, ticket)
        hashes, new = write_shards(jobs, lambda new: writing.add(folder, new), executor, advance)
        with writing.replacing(folder / CONFIG) as file:
            file.write(work.written)
        outputs = {folder / name: state_of(folder / name) for name in (CONFIG, *hashes)}
        proof = prove(work, jobs, hashes, executor)
        beside = {CONFIG: hashlib.sha256(work.written).hexdigest()}
        for name, state in checkpoint.states.items():  # of them the index is the last
            if str(name) not in (MANIFEST, CONFIG, writing.LOCK):
                beside[str(name)] = writing.copy(checkpoint.root, name, folder, state)
                outputs[folder / name] = state_of(folder / name)
        if work.verify == "full":
            check_files(folder, beside)
        for path, state in {**work.inputs, **outputs}.items():
            check_unchanged(path, state)
        writing.finish(work, hashes, beside, proof._asdict())
    return Converted(work.plan, tuple(sorted(new)), proof, work.warning)
