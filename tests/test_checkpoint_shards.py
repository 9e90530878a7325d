"""Shards in pieces, by any executor: the bytes of a whole move, modes, names, holes, progress."""

import json
import os
import stat
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import numpy as np
import pytest
from checkpoints import (
    LAYERS,
    LLAMA,
    Dying,
    Inline,
    contents,
    converted,
    is_finished,
    leftovers,
    llama,
    moved,
    name_of,
    there,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from rotary.checkpoint import shards
from rotary.checkpoint.channels import AWQ, Place, Run
from rotary.checkpoint.files import JOURNAL, Tensor
from rotary.checkpoint.plan import Move


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_tensor_moved_in_pieces_is_the_tensor_moved_at_once(data):
    pairs, heads, gap = (data.draw(st.integers(low, 5)) for low in (1, 1, 0))
    stride = 2 * pairs + gap
    size, columns = heads * stride, data.draw(st.integers(1, 7))
    place, shape, dtype = data.draw(st.sampled_from([
        (Place(0), (size, columns), "F16"), (Place(0), (size,), "U8"),
        (Place(0), (heads, stride), "F16"),
        (Place(1), (columns, size), "I32"), (Place(1), (3, size, columns), "F16"),
        (Place(1, 4, AWQ), (columns, size), "I32"),
    ]))  # fmt: skip
    if place.bits:
        stride, size = 8 * stride, 8 * size
    move = Move("x", "query", size, (Run(gap, heads, stride),), 2 * pairs, place, "half",
                "interleaved")  # fmt: skip
    begin = data.draw(st.integers(0, 9))
    count = int(np.prod(shape)) * {"F16": 2, "U8": 1, "I32": 4}[dtype]
    tensor = Tensor(dtype, shape, begin, begin + count)
    raw = np.random.default_rng(0).integers(0, 256, begin + count).astype(np.uint8)
    chunk = data.draw(st.integers(1, 100))
    old, shards.CHUNK = shards.CHUNK, chunk
    try:
        cut = list(shards.pieces(tensor, move))
    finally:
        shards.CHUNK = old
    assert [each[0] for each in cut] == [begin, *(each[1] for each in cut[:-1])]
    assert cut[-1][1] == tensor.end
    found = np.concatenate([turn(raw[first:last]) for first, last, turn in cut])
    assert np.array_equal(found, moved(raw[begin:], tensor, move))


def test_zeros_take_no_disk(tmp_path):
    tensors = weights(0)
    tensors["zeros"] = np.zeros(2**24, np.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    target = there(tmp_path / "model.safetensors", tmp_path / "b", config=LLAMA)
    found = (target / "model.safetensors").stat()
    assert found.st_size > 2**24
    assert 512 * found.st_blocks < 2**20
    assert not load_file(target / "model.safetensors")["zeros"].any()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_every_file_has_the_mode_of_a_new_file(tmp_path, mask, mode):
    source = llama(tmp_path / "a")
    before = os.umask(mask)
    try:
        target = there(source, tmp_path / "b")
    finally:
        os.umask(before)
    files = [path for path in target.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}


@pytest.mark.parametrize("name", ["x" * 243 + ".safetensors", "a b\x1b[31m'.safetensors"])
def test_files_of_any_name_are_converted(tmp_path, name):
    save_file(weights(0), tmp_path / name)
    target = there(tmp_path / name, tmp_path / "b", config=LLAMA)
    assert name in contents(target)
    assert is_finished(target)


def test_a_file_whose_name_is_no_text_is_converted(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.safetensors")
    save_file(weights(0), tmp_path / "x")
    os.rename(tmp_path / "x", path)
    assert path.name in contents(there(path, tmp_path / os.fsdecode(b"\xfe"), config=LLAMA))


# --- executors ---


EXECUTORS = {
    "threads of ours": lambda: None,
    "threads": lambda: ThreadPoolExecutor(3),
    "processes": lambda: ProcessPoolExecutor(2, mp_context=get_context("spawn")),
    "of no library": Inline,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A folder, and what becomes of it without any executor."""
    root = tmp_path_factory.mktemp("expected")
    source = llama(root / "a")
    return source, contents(there(source, root / "b", executor=Inline()))


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_executor_writes_the_same_and_counts_every_byte_once(tmp_path, expected, name):
    source, whole = expected
    seen, executor = [], EXECUTORS[name]()
    done = converted(source, tmp_path / "b", executor=executor, advance=seen.append)
    if executor is not None:
        executor.shutdown()
    assert contents(tmp_path / "b") == whole
    assert done.written == tuple(name_of(layer) for layer in range(LAYERS))
    assert sum(seen) == sum((source / name_of(layer)).stat().st_size for layer in range(LAYERS))


def test_a_killed_worker_is_an_error_and_the_next_call_goes_on(tmp_path, expected):
    source, whole = expected
    with Dying(1, mp_context=get_context("spawn")) as pool, pytest.raises(BrokenProcessPool):
        converted(source, tmp_path / "b", executor=pool)
    assert not is_finished(tmp_path / "b")
    assert leftovers(tmp_path / "b") == []
    seen = []
    done = converted(source, tmp_path / "b", advance=seen.append)
    assert name_of(0) not in done.written
    assert contents(tmp_path / "b") == whole
    assert sum(seen) == sum((source / name_of(layer)).stat().st_size for layer in range(LAYERS))


@pytest.mark.parametrize("executor", [None, "threads"])
def test_after_an_error_nobody_writes_any_more(tmp_path, expected, executor, monkeypatch):
    """An error while the third shard is being written: the call waits for it, or ends it."""
    source, whole = expected
    calls, real = [], shards.read_piece

    def slow(file, *rest):
        time.sleep(0.05 * str(file.name).endswith(name_of(2)))
        return real(file, *rest)

    monkeypatch.setattr(shards, "read_piece", slow)

    def fail(count):
        calls.append(count)
        if len(calls) == 2:
            raise KeyboardInterrupt

    pool = ThreadPoolExecutor(3) if executor else None
    with pytest.raises(KeyboardInterrupt):
        converted(source, tmp_path / "b", executor=pool, advance=fail)
    assert leftovers(tmp_path / "b") == []
    before = contents(tmp_path / "b")
    if pool:
        pool.shutdown()
        assert name_of(2) in before, "what others have begun is waited for, and kept"
    assert contents(tmp_path / "b") == before
    converted(source, tmp_path / "b")
    assert contents(tmp_path / "b") == whole


# --- going on ---


def end_after(count, source, folder):
    """A conversion that is broken off when `count` shards are whole, one after the other."""
    executor = Inline()

    def stop(size):
        if executor.count > count:
            raise InterruptedError

    executor.tick = stop
    with pytest.raises(InterruptedError):
        converted(source, folder, executor=executor)


def test_a_conversion_that_was_broken_off_goes_on_behind_the_shards_that_are_whole(
    tmp_path, expected
):
    source, whole = expected
    folder = tmp_path / "b"
    end_after(1, source, folder)
    assert not is_finished(folder)
    assert converted(source, folder).written == tuple(name_of(i) for i in range(1, LAYERS))
    assert contents(folder) == whole


DAMAGE = {
    "altered": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    "truncated": lambda path: os.truncate(path, 100),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "another": lambda path: save_file(weights(2), path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_whole_shard_that_was_damaged_since_is_written_again(tmp_path, expected, damage):
    source, whole = expected
    folder = tmp_path / "b"
    end_after(2, source, folder)
    DAMAGE[damage](folder / name_of(0))
    assert converted(source, folder).written == (name_of(0), name_of(2))
    assert contents(folder) == whole


def test_lines_of_the_journal_that_are_cut_short_do_not_count(tmp_path, expected):
    source, whole = expected
    folder = tmp_path / "b"
    end_after(2, source, folder)
    first, *lines = (folder / JOURNAL).read_bytes().splitlines()
    assert {json.loads(line)["file"] for line in lines} == {name_of(0), name_of(1)}
    (folder / JOURNAL).write_bytes(first + b"\n" + lines[0][:-9] + lines[1] + b"\n" + lines[0][:20])
    assert len(converted(source, folder).written) == LAYERS
    assert contents(folder) == whole


def test_a_source_that_changed_between_is_refused(tmp_path):
    source, folder = llama(tmp_path / "a"), tmp_path / "b"
    end_after(1, source, folder)
    os.utime(source / name_of(2))
    with pytest.raises(ValueError, match="of a source that changed; delete it"):
        converted(source, folder)


def test_another_plan_does_not_go_on(tmp_path):
    source, folder = llama(tmp_path / "a"), tmp_path / "b"
    end_after(1, source, folder)
    with pytest.raises(ValueError, match="of another source or plan"):
        converted(source, folder, config={**LLAMA, "partial_rotary_factor": 0.5,
                                          "model_type": "phi"})  # fmt: skip


@pytest.mark.parametrize("when", [1, 2])
def test_a_source_that_changes_meanwhile_is_an_error_and_its_shard_does_not_appear(tmp_path, when):
    """The second shard changes before it is begun, or while it is read."""
    source, folder = llama(tmp_path / "a"), tmp_path / "b"
    executor = Inline()
    executor.tick = lambda _: executor.count == when and os.utime(source / name_of(1))
    with pytest.raises(ValueError, match=r"changed while it was converted; delete the target"):
        converted(source, folder, executor=executor)
    assert name_of(1) not in contents(folder)
    assert not is_finished(folder)
    assert leftovers(folder) == []


def test_a_source_that_is_cut_meanwhile_is_an_error(tmp_path):
    source, folder = llama(tmp_path / "a"), tmp_path / "b"
    executor = Inline()
    executor.tick = lambda _: executor.count == 2 and os.truncate(source / name_of(1), 4000)
    with pytest.raises(ValueError, match=r"00002-of-00003.safetensors: ends at byte \d+ now"):
        converted(source, folder, executor=executor)
    assert name_of(1) not in contents(folder)
