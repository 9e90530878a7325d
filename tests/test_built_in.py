"""Compiled loops as built-in functions of Python: addresses, lifetimes, threads."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from libraries import if_installed

from rotary import Rotary, apply, cos_sin, rotate
from rotary.rotate import angle_options, options_of

pytest.importorskip("numba")
jobs = if_installed("rotary.kernels.cpu.jobs")
address = if_installed("rotary.kernels.cpu.built_in").address

SPEC = Rotary(head_dim=128)


class Lying(np.ndarray):
    """An array whose own answer about its memory is another's."""

    __array_struct__ = property(lambda self: 3)


@pytest.mark.parametrize("dtype", ["f4", ">f8", "f2", "i8", "O", ml_dtypes.bfloat16])
def test_an_address_is_that_of_numpy(dtype):
    x = np.zeros((4, 6), dtype)
    read_only = x[1:, ::2]
    read_only.flags.writeable = False
    for array in (x, x[1:], x[::-1], x[:, 3:].T, x[2:2], x[0, 0, ...], read_only, x.view(Lying)):
        plain = array.view(np.ndarray)
        assert address(array) == plain.__array_interface__["data"][0]


def test_what_has_no_address_is_refused():
    with pytest.raises(TypeError):
        address([1.0])


def test_a_job_keeps_what_it_has_addresses_of():
    """Its record, turns and scales stay when nothing else refers to them."""
    q, at = np.ones((1, 4, 1, 128), np.float32), np.array([[12345]])
    block = jobs.Block(q.shape, q.strides, "float32")
    ids = jobs.Block(at.shape, at.strides, "int64")
    options = angle_options(SPEC, seq_dim=-2)
    call = jobs.ready_call_at([block], [ids], [], None, options)
    wanted = apply(SPEC, q, positions=at, seq_dim=-2)
    jobs.call_of.cache_clear()
    for _ in range(3):
        gc.collect()
        rubbish = [np.full(200, -1.0) for _ in range(1000)]
        out = np.zeros_like(q)
        assert call.job(address(q), address(out), address(q), address(out), address(at), 0, 0, 0)
        np.testing.assert_array_equal(out, wanted)
    assert len(rubbish) == 1000


@pytest.mark.parametrize("batch", [1, 16])  # the lock of Python is kept, and given away
def test_threads_rotate_beside_each_other(batch):
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((batch, 32, 1, 128), np.float32) for _ in range(8)]
    positions = rng.integers(0, 100, (batch, 1))
    cos, sin = cos_sin(SPEC, positions)
    wanted = [rotate(x, cos, sin, SPEC, seq_dim=-2) for x in xs]

    def work(index):
        for _ in range(200):
            out = np.zeros_like(xs[index])
            rotate(xs[index], cos, sin, SPEC, seq_dim=-2, out=out)
            np.testing.assert_array_equal(out, wanted[index])
            got = apply(SPEC, xs[index], positions=positions, seq_dim=-2)
            np.testing.assert_array_equal(got, wanted[index])

    with ThreadPoolExecutor(len(xs)) as pool:
        list(pool.map(work, range(len(xs))))


@pytest.mark.parametrize(("batch", "is_long"), [(1, False), (31, True)])
def test_a_long_job_gives_the_lock_of_python_away(batch, is_long):
    """Another thread goes on while a job is done; for a short one there is no time for it."""
    x, cos = np.ones((batch, 32, 1, 128), np.float32), np.ones((1, 64), np.float32)
    block, table = (jobs.Block(each.shape, each.strides, "float32") for each in (x, cos))
    options = options_of(SPEC, seq_dim=-2)
    call = jobs.ready_call([block], [table, table], [], None, options)
    out = np.empty_like(x)
    places = [address(each) for each in (x, out, x, out, cos, cos)]
    gate, passed, during = threading.Semaphore(0), [], 0
    tries = 10_000 if is_long else 300  # on a busy machine the other thread may wake up late
    thread = threading.Thread(target=lambda: [passed.append(gate.acquire()) for _ in range(tries)])
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(100)  # so nothing else makes this thread give the lock away
        for _ in range(tries):
            before = len(passed)
            gate.release()
            assert call.job(*places, 0, 0)
            during += len(passed) > before
            if during:
                break
    finally:
        sys.setswitchinterval(interval)
        gate.release(tries)
        thread.join(10)
    assert (during > 0) == is_long
