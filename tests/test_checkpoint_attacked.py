"""A conversion while somebody changes its files, or leads it to write where it must not."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import INDEX, contents, converted, is_finished, llama, name_of

from rotary.checkpoint import convert, shards, writing
from rotary.checkpoint.files import read_shard


def poke(path):
    """Change the last byte, and put the time of the change back."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def link(path, target):
    os.unlink(path)
    os.symlink(target, path)


STEPS = ("planned", "written", "proved")
# what somebody does to the source at any moment
ON_SOURCE = {
    "a shard": lambda source: poke(source / name_of(0)),
    "the last shard": lambda source: poke(source / name_of(2)),
    "the config": lambda source: (source / "config.json").write_text("{}"),
    "the index": lambda source: (source / INDEX).write_text("{}"),
    "a file beside": lambda source: poke(source / "generation_config.json"),
    "a file beside, by a link": lambda source: link(source / "tokenizer.json", "/etc/passwd"),
    "a shard, by a link": lambda source: link(source / name_of(1), source.parent / "other"),
}  # fmt: skip
ON_TARGET = {
    "a shard": lambda target: poke(target / name_of(0)),
    "the config": lambda target: poke(target / "config.json"),
    "a file beside": lambda target: poke(target / "generation_config.json"),
}
FUNCTIONS = {"planned": (writing, "check_space"), "copied": (convert, "check_unchanged")}


def at(monkeypatch, step, act):
    """Have `act` happen when all is planned, written, proved, or copied from beside the weights."""
    module, name = FUNCTIONS.get(step, (convert, "prove"))
    real = getattr(module, name)

    def wrapper(*args, **kwargs):
        if step != "proved":
            act()
        found = real(*args, **kwargs)
        if step == "proved":
            act()
        return found

    monkeypatch.setattr(module, name, wrapper)


@pytest.mark.parametrize("which", ["sample", "full"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", ON_SOURCE)
def test_a_source_that_changes_is_noticed_whenever_it_happens(
    tmp_path, monkeypatch, case, step, which
):
    source, target = llama(tmp_path / "a"), tmp_path / "b"
    shutil.copy(source / name_of(1), tmp_path / "other")
    at(monkeypatch, step, lambda: ON_SOURCE[case](source))
    with pytest.raises(ValueError, match="changed while it was converted; delete the target"):
        converted(source, target, verify=which)
    assert not is_finished(target)
    for content in contents(target).values() if target.exists() else ():
        assert b"root:" not in content


@pytest.mark.parametrize(
    ("case", "step"),
    [*((case, step) for case in ("a shard", "the config") for step in ("written", "proved")),
     *((case, "copied") for case in ON_TARGET)],
)  # fmt: skip
def test_a_file_that_changes_after_it_was_written_is_noticed(tmp_path, monkeypatch, case, step):
    source, target = llama(tmp_path / "a"), tmp_path / "b"
    at(monkeypatch, step, lambda: ON_TARGET[case](target))
    with pytest.raises(ValueError, match=r"is not what was written|changed while it was"):
        converted(source, target, verify="full")
    assert not is_finished(target)


def test_every_byte_is_compared_with_the_source(tmp_path, monkeypatch):
    """Also where the hashes are those of what was written: a tensor that was read wrongly once."""
    source, real, calls = llama(tmp_path / "a"), shards.read_piece, []
    where = read_shard(source / name_of(0)).tensors["lm_head.weight"].begin

    def wrong(file, begin, end, room=None):
        piece = real(file, begin, end, room)
        if is_there := "/a/" in file.name and begin == where:
            calls.append(begin)
        return piece ^ np.uint8(is_there and len(calls) == 1)

    monkeypatch.setattr(shards, "read_piece", wrong)
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs from the source"):
        converted(source, tmp_path / "b", verify="full")


def test_the_index_and_the_files_beside_are_read_again(tmp_path, monkeypatch):
    source, real = llama(tmp_path / "a"), shards.read_again
    names = [INDEX, "tokenizer.json", "original/params.json"]
    for number, name in enumerate(names):

        def damaged(job, name=name):
            if str(job.target).endswith(name):
                poke(job.target)
            return real(job)

        monkeypatch.setattr(shards, "read_again", damaged)
        with pytest.raises(ValueError, match=f"{name}: .* is not what was written"):
            converted(source, tmp_path / f"b{number}", verify="full")
    monkeypatch.setattr(shards, "read_again", real)
    converted(source, tmp_path / "b", verify="full")
    hashes = json.loads((tmp_path / "b" / "rotary-conversion.json").read_text())["sha256_beside"]
    assert {*names, "config.json"} <= set(hashes)
    for name, digest in hashes.items():
        assert hashlib.sha256((tmp_path / "b" / name).read_bytes()).hexdigest() == digest


# --- where it writes ---


def mounted(command):
    """Whether a command succeeds where folders may be mounted; skips where they may not."""
    probe = ["unshare", "-m", "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    return subprocess.run(["unshare", "-m", "sh", "-ec", command], capture_output=True, text=True)


CONVERT = """import sys
from rotary.checkpoint import convert_checkpoint
convert_checkpoint(*sys.argv[1:3], from_layout="half", to_layout="interleaved")"""


@pytest.mark.parametrize(
    ("what", "target"),
    [("a", "mount/new"), ("a", "mount"), ("a/original", "mount/new"), (".", "mount/a/new"),
     (".", "mount/a"), (".", "mount")],
)  # fmt: skip
def test_a_target_under_another_mount_of_the_source_is_refused(tmp_path, what, target):
    source = llama(tmp_path / "a")
    (tmp_path / "mount").mkdir()
    before = contents(source)
    (tmp_path / "run.py").write_text(CONVERT)
    done = mounted(f"cd {tmp_path}; mount --bind {what} mount; {sys.executable} run.py a {target}")
    assert "overlaps the source a; give another folder" in done.stderr
    assert contents(source) == before


def test_a_target_whose_folder_has_the_number_of_the_source_is_refused(tmp_path, monkeypatch):
    """As under a mount, where this process may not mount."""
    source, other = llama(tmp_path / "a"), tmp_path / "other"
    other.mkdir()
    real = writing._identity
    monkeypatch.setattr(writing, "_identity", lambda p: real(source if p == other else p))
    with pytest.raises(ValueError, match="overlaps the source"):
        converted(source, other / "new")
    assert os.listdir(other) == []


@pytest.mark.parametrize("make", [os.link, os.symlink])
def test_a_lock_that_is_another_file_is_refused_and_not_written_into(tmp_path, make):
    source, target = llama(tmp_path / "a"), tmp_path / "b"
    before = contents(source)
    target.mkdir()
    make(source / name_of(0), target / writing.LOCK)
    with pytest.raises(ValueError, match="no lock of rotary; delete it"):
        converted(source, target)
    assert contents(source) == before


def test_a_lock_that_was_deleted_while_it_was_waited_for_is_not_trusted(tmp_path, monkeypatch):
    """Between the opening and the taking of a lock its holder may leave and delete the name."""
    opened, real = [], os.open

    def open_and_delete(path, *args, **kwargs):
        handle = real(path, *args, **kwargs)
        opened.append(path)
        if len(opened) == 1:
            os.unlink(path)
        return handle

    monkeypatch.setattr(os, "open", open_and_delete)
    with writing.locked(tmp_path):
        assert (tmp_path / writing.LOCK).exists()
    assert len(opened) == 2


def test_a_folder_of_the_target_that_is_a_link_is_not_written_through(tmp_path, monkeypatch):
    source, target = llama(tmp_path / "a"), tmp_path / "b"
    (tmp_path / "elsewhere").mkdir()
    real = convert.write_shards

    def write(*args):
        done = real(*args)
        (target / "original").symlink_to(tmp_path / "elsewhere")
        return done

    monkeypatch.setattr(convert, "write_shards", write)
    with pytest.raises(ValueError, match="original: a link, in a folder that is written here"):
        converted(source, target)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_target_whose_files_are_hard_links_to_the_source_leaves_the_source_alone(tmp_path):
    """As `cp -al` makes them, in a conversion that goes on."""
    source, target = llama(tmp_path / "a"), tmp_path / "b"
    before = contents(source)
    with pytest.raises(ZeroDivisionError):
        converted(source, target, advance=lambda count: 1 / 0)
    for name in before:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).unlink(missing_ok=True)
        os.link(source / name, target / name)
    (target / "rotary-conversion.unfinished").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="is not empty"):
        converted(source, target)
    assert contents(source) == before
