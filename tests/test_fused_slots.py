"""The slots of a cache are (batch, seq) for every `seq_dim`, in every library."""

import math
from dataclasses import replace

import numpy as np
import pytest
from libraries import if_installed

import rotary
from rotary import KVCache, LatentCache, Norm, Rotary, fused

torch = if_installed("torch")
jnp = if_installed("jax.numpy")
torch_fused = if_installed("rotary.kernels.torch.fused")
SPEC, SEQ = Rotary(8), 3
LEADS = {  # the axes before heads and channels, and that of the tokens
    "seq": ((SEQ,), 0),
    "batch, seq": ((2, SEQ), 1),
    "seq, batch": ((SEQ, 2), 0),
    "seq, as many rows": ((SEQ, SEQ), 0),
    "seq, batch of 1": ((SEQ, 1), 0),
    "seq, 2 batch axes": ((SEQ, 2, 4), 0),
    "between batch axes": ((2, SEQ, 4), 1),
}
LIBRARIES = ["numpy", "numpy by formula", "torch", "torch by formula", "jax"]


@pytest.fixture(params=LIBRARIES)
def store(request, monkeypatch):
    """A function that runs `fused` in a library; it returns the caches, or (cache, scales)."""
    library, _, by_formula = request.param.partition(" ")
    if by_formula:
        request.getfixturevalue("numpy_by_formula")
        monkeypatch.setattr(torch_fused, "loops", None)
        monkeypatch.setattr(torch_fused.ready, "quick", lambda *_: None)

    def as_arrays(xs):
        convert = {"torch": torch.tensor, "numpy": np.array, "jax": jnp.asarray}[library]
        return [None if x is None else convert(x) for x in xs]

    def store(xs, weight, make, memory, seq_dim):
        xs, (weight,), given = as_arrays(xs), as_arrays([weight]), as_arrays(memory)
        norm = Norm(None, weight, 1e-6) if xs[1].shape[-1] == len(weight) else None
        cache = make(*given)
        cache = replace(cache, slots=as_arrays([cache.slots])[0])
        results = fused(*xs, SPEC, norm=norm, cache=cache, seq_dim=seq_dim)
        if library != "jax":
            return [np.asarray(x) for x in given]
        new = [y for result in results[1:] if result is not None
               for y in (result if isinstance(result, tuple) else (result,))]  # fmt: skip
        return [np.asarray(x) for x in new]

    return store


def tokens(x, axis):
    """(batch, seq) tokens in order, one row each."""
    return np.moveaxis(x, axis, -3).reshape(-1, *x.shape[-2:])


def case(lead, axis):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((*lead, 2, 8)).astype(np.float32) for _ in range(3))
    count = math.prod(lead)
    slots = rng.permutation(2 * count)[:count]
    slots[1] = -1
    by_batch = slots.reshape(*lead[:axis], *lead[axis + 1 :], SEQ)
    return q, k, v, rng.standard_normal(8).astype(np.float32), slots, by_batch


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("name", LEADS)
def test_every_token_is_in_its_slot(name, is_flat, store):
    lead, axis = LEADS[name]
    q, k, v, weight, slots, by_batch = case(lead, axis)
    given = slots if is_flat else by_batch
    seq_dim = axis - len(lead) - 2
    _, keys, _ = fused(q, k, None, SPEC, norm=Norm(None, weight, 1e-6), seq_dim=seq_dim)
    memory = [np.full((2 * slots.size, 2, 8), 77, np.float32) for _ in "kv"]
    for _ in range(2):  # torch keeps what the first call has worked out
        got = store((q, k, v), weight, lambda *kv: KVCache(*kv, given), memory, seq_dim)
        for cache, x in zip(got, (keys, v), strict=True):
            want = np.full_like(cache, 77)
            want[slots[slots >= 0]] = tokens(x, axis)[slots >= 0]
            np.testing.assert_allclose(cache, want, rtol=1e-5, atol=1e-5)


def test_scales_of_tokens_are_in_their_slots(store):
    lead, axis = LEADS["seq, batch"]
    q, k, _, weight, slots, by_batch = case(lead, axis)
    _, keys, _ = fused(q, k, None, SPEC, norm=Norm(None, weight, 1e-6), seq_dim=0)
    memory = np.zeros((2 * slots.size, 2, 8), np.int8), np.zeros((2 * slots.size, 2), np.float32)
    _, scales = store(
        (q, k, None),
        weight,
        lambda cache, scales: KVCache(cache, None, by_batch, scales),
        memory,
        0,
    )
    want = np.zeros_like(scales)
    want[slots[slots >= 0]] = np.abs(tokens(keys, axis)).max(-1)[slots >= 0] / 127
    np.testing.assert_allclose(scales, want, rtol=1e-5)


@pytest.mark.parametrize("name", LEADS)
def test_rows_of_a_latent_cache_are_in_their_slots(name, store):
    lead, axis = LEADS[name]
    q, _, v, weight, slots, by_batch = case(lead, axis)
    k, latent = v[..., :1, :], q.reshape(*lead, 16)
    seq_dim = axis - len(lead) - 2
    keys = rotary.apply(SPEC, k, seq_dim=seq_dim)
    memory = [np.zeros((2 * slots.size, 24), np.float32)]
    (rows,) = store(
        (q, k, latent), weight[:1], lambda rows: LatentCache(rows, by_batch), memory, seq_dim
    )
    want = np.zeros_like(rows)
    values = np.concatenate((latent[..., None, :], keys), -1)
    want[slots[slots >= 0]] = tokens(values, axis)[slots >= 0, 0]
    np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-6)


def test_a_step_without_tokens_writes_no_latent_rows(store):
    q, k, latent = (np.zeros((0, *shape), np.float32) for shape in ((4, 8), (1, 8), (16,)))
    weight, memory, slots = np.ones((1, 8), np.float32), [np.ones((5, 24), np.float32)], np.zeros(0)
    (rows,) = store(
        (q, k, latent), weight, lambda rows: LatentCache(rows, slots.astype(int)), memory, -3
    )
    assert (rows == 1).all()


def test_slots_in_the_order_of_q_are_refused(store):
    lead, axis = LEADS["seq, batch"]
    q, k, v, weight, _, by_batch = case(lead, axis)
    memory = [np.zeros((20, 2, 8), np.float32) for _ in "kv"]
    with pytest.raises(ValueError, match=r"slots must be one per token, \(2, 3\) or flat, got \(3"):
        store((q, k, v), weight, lambda *kv: KVCache(*kv, by_batch.T), memory, 0)
