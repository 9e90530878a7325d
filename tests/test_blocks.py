"""Large new arrays: their memory is used again, and never by two of them at once."""

import gc
import threading

import numpy as np
import pytest
import torch

import rotary
from rotary.kernels import blocks

SIZE = 3 * blocks.LARGE


@pytest.fixture(autouse=True)
def waiting(monkeypatch):
    """No block waits when a test starts."""
    waiting = blocks._Waiting(4 * SIZE)
    monkeypatch.setattr(blocks, "_waiting", waiting)
    return waiting


def address(array):
    return array.ctypes.data


def test_a_large_array_covers_whole_huge_pages():
    assert address(blocks.empty((SIZE,), np.uint8)) % (1 << 21) == 0


def test_shape_and_dtype_are_those_asked_for():
    array = blocks.empty((3, 1 << 20), np.float64)
    array[...] = 1.5
    assert (array.shape, array.dtype, array.sum()) == ((3, 1 << 20), np.float64, 1.5 * 3 * 2**20)


def test_the_block_of_a_dead_array_is_used_again():
    array = blocks.empty((SIZE,), np.uint8)
    before = address(array)
    del array
    assert address(blocks.empty((SIZE,), np.uint8)) == before


def test_a_view_keeps_the_block():
    view = blocks.empty((SIZE,), np.uint8)[5:9]
    view[...] = 7
    other = blocks.empty((SIZE,), np.uint8)
    other[...] = 0
    assert (view == 7).all()


def test_a_tensor_keeps_the_block():
    q = torch.zeros(1, 8, 4096, 128)
    tensor = rotary.apply(rotary.Rotary(head_dim=128), q + 1)[:, :, 0]
    rotary.apply(rotary.Rotary(head_dim=128), q)
    assert (tensor == 1).all()


def test_no_block_serves_an_array_much_smaller_than_itself():
    array = blocks.empty((4 * SIZE,), np.uint8)
    before = address(array)
    del array
    assert address(blocks.empty((SIZE,), np.uint8)) != before


def test_no_more_bytes_wait_than_the_limit(waiting):
    arrays = [blocks.empty((SIZE,), np.uint8) for _ in range(6)]
    assert waiting.bytes == 0
    last = address(arrays[-1])
    while arrays:
        arrays.pop(0)
    assert waiting.bytes == 4 * SIZE == sum(each.size for each in waiting._blocks.values())
    assert last in waiting._blocks  # the oldest have gone


def test_a_block_larger_than_the_limit_does_not_wait(waiting):
    blocks.empty((5 * SIZE,), np.uint8)
    assert waiting.bytes == 0


def test_an_array_in_a_cycle_gives_its_block_when_the_cycle_is_collected(waiting):
    cycle = {"array": blocks.empty((SIZE,), np.uint8)}
    cycle["itself"] = cycle
    del cycle
    gc.collect()
    assert waiting.bytes == SIZE


def test_threads_never_share_a_block():
    faults = []

    def work(mark):
        for _ in range(40):
            array = blocks.empty((SIZE,), np.uint8)
            array[:: 1 << 12] = mark
            if (array[:: 1 << 12] != mark).any():
                faults.append(mark)

    workers = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert faults == []


def in_time(action):
    """Whether `action` returns, in a thread of its own."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def test_an_array_that_dies_never_waits_for_a_lock(waiting):
    """Its destructor may run under any lock: a fork beside evicting threads hung in it."""
    array = [blocks.empty((SIZE,), np.uint8)]
    with waiting.lock:
        assert in_time(array.clear)
    assert waiting.bytes == 0  # the block went to the system


@pytest.mark.parametrize("missing", ["MADV_HUGEPAGE", "MADV_FREE"])
def test_a_kernel_without_an_advice_is_no_error(missing, waiting, monkeypatch):
    class Memory(blocks.mmap.mmap):
        def madvise(self, advice):
            if advice == getattr(blocks.mmap, missing):
                raise OSError(22, "Invalid argument")
            super().madvise(advice)

    monkeypatch.setattr(blocks.mmap, "mmap", Memory)
    q = np.ones((1, 8, 4096, 128), np.float32)
    assert rotary.apply(rotary.Rotary(head_dim=128), q).shape == q.shape
    assert (waiting.bytes > 0) == (missing == "MADV_HUGEPAGE")


def test_out_of_memory_gives_back_what_waits_and_is_a_memory_error(waiting, monkeypatch):
    blocks.empty((SIZE,), np.uint8)
    assert waiting.bytes
    tried = []

    def full(*arguments, **options):
        tried.append(waiting.bytes)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(blocks.mmap, "mmap", full)
    with pytest.raises(MemoryError, match="cannot allocate 25,165,824 bytes: Cannot allocate"):
        blocks.empty((2 * SIZE,), np.uint8)
    assert tried == [SIZE, 0]
