"""The slots of a cache are (batch, seq) for every `seq_dim`, in every library."""

import math
from dataclasses import replace

import numpy as np
import pytest
from libraries import if_installed

import rotary
from rotary import KVCache, LatentCache, Norm, Rotary, fused

torch = if_installed("torch")
jax = if_installed("jax")
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
    """A function that runs `fused` in a library; it returns the result for q, and what is written.

    What is written: the caches, or (cache, scales).
    """
    library, _, by_formula = request.param.partition(" by ")
    if library == "jax":
        request.getfixturevalue("xla_in_less_time")
    if by_formula:
        request.getfixturevalue("numpy_by_formula")
        monkeypatch.setattr(torch_fused, "loops", None)
        monkeypatch.setattr(torch_fused.ready, "quick", lambda *_: None)

    def as_arrays(xs):
        of_torch = lambda x: torch.from_numpy(np.array(x))  # noqa: E731  # keeps the strides
        convert = {"torch": of_torch, "numpy": np.array, "jax": jnp.array}[library]
        return [None if x is None else convert(x) for x in xs]

    def store(xs, norm, make, memory, seq_dim, spec=SPEC, by_loops=True):
        if by_loops and request.param == "torch":
            monkeypatch.setattr(torch_fused, "formula_of_both", None)
        weights = as_arrays([None, None] if norm is None else [norm.k, norm.v])
        xs, given, (slots,) = map(as_arrays, (xs, memory, [make(*memory).slots]))

        def call(xs, weights, given, slots):
            cache = replace(make(*given), slots=slots)
            norm = Norm(None, *weights[:1], 1e-6, *weights[1:])
            return fused(*xs, spec, norm=norm, cache=cache, seq_dim=seq_dim)

        y, *new = (jax.jit(call) if library == "jax" else call)(xs, weights, given, slots)
        if library != "jax":
            assert new == [None, None]
            new = given
        flat = [each for part in new if part is not None
                for each in (part if isinstance(part, tuple) else (part,))]  # fmt: skip
        return [np.asarray(x) for x in (y, *flat)]

    return store


def tokens(x, axis):
    """(batch, seq) tokens in order, one row each."""
    return np.moveaxis(x, axis, -3).reshape(-1, *x.shape[-2:])


def case(lead, axis):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((*lead, 2, dim)).astype(np.float32) for dim in (8, 8, 5))
    count = math.prod(lead)
    slots = rng.permutation(2 * count)[:count]
    slots[1] = -1
    by_batch = slots.reshape(*lead[:axis], *lead[axis + 1 :], SEQ)
    norm = Norm(None, rng.standard_normal(8).astype(np.float32), 1e-6)
    return q, k, v, norm, slots, by_batch


@pytest.mark.parametrize(
    ("name", "form", "is_flat"),
    [
        *((name, "flat", is_flat) for name in LEADS for is_flat in (False, True)),
        ("batch, seq", "blocks", False),
        ("seq, batch", "blocks, heads first", True),
    ],
)
def test_every_token_is_in_its_slot(name, form, is_flat, store):
    lead, axis = LEADS[name]
    q, k, v, norm, slots, by_batch = case(lead, axis)
    given = slots if is_flat else by_batch
    seq_dim = axis - len(lead) - 2
    want_y, keys, _ = fused(q, k, None, SPEC, norm=norm, seq_dim=seq_dim)
    sizes = {"flat": (2 * slots.size, 2), "blocks": (2, slots.size, 2)}.get(
        form, (2, 2, slots.size)
    )
    memory = [np.full((*sizes, dim), 77, np.float32) for dim in (8, 5)]
    memory = [x.swapaxes(1, 2) if form == "blocks, heads first" else x for x in memory]
    for _ in range(2):  # torch keeps what the first call has worked out
        y, *got = store((q, k, v), norm, lambda *kv: KVCache(*kv, given), memory, seq_dim,
                         by_loops=len(lead) < 3)  # fmt: skip
        np.testing.assert_allclose(y, want_y, rtol=1e-5, atol=1e-5)
        for cache, x in zip(got, (keys, v), strict=True):
            rows = cache.reshape(2 * slots.size, 2, -1)
            want = np.full_like(rows, 77)
            want[slots[slots >= 0]] = tokens(x, axis)[slots >= 0]
            np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-5)


def test_scales_of_tokens_are_in_their_slots(store):
    lead, axis = LEADS["seq, batch"]
    q, k, _, norm, slots, by_batch = case(lead, axis)
    _, keys, _ = fused(q, k, None, SPEC, norm=norm, seq_dim=0)
    memory = np.zeros((2 * slots.size, 2, 8), np.int8), np.zeros((2 * slots.size, 2), np.float32)
    *_, scales = store(
        (q, k, None), norm, lambda cache, scales: KVCache(cache, None, by_batch, scales), memory, 0,
        by_loops=False,
    )  # fmt: skip
    want = np.zeros_like(scales)
    want[slots[slots >= 0]] = np.abs(tokens(keys, axis)).max(-1)[slots >= 0] / 127
    np.testing.assert_allclose(scales, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "form", "scale"),  # the loops take no scale
    [*((name, "flat", 1.0) for name in LEADS), ("batch, seq", "blocks", 1.0),
     ("seq, batch", "blocks", 0.5)],
)  # fmt: skip
def test_a_latent_cache_holds_the_latent_part_and_the_rotated_one(name, form, scale, store):
    lead, axis = LEADS[name]
    *_, slots, by_batch = case(lead, axis)
    spec = Rotary(12, 4, 8, base=100.0, layout="interleaved", out_layout="half")
    alone = Rotary(4, base=100.0, layout="interleaved", out_layout="half")
    rng = np.random.default_rng(1)
    q, k, latent, weight = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((*lead, 2, 12), (*lead, 1, 4), (*lead, 7), (7,))
    )
    seq_dim = axis - len(lead) - 2
    memory = [np.full((*{"flat": (2 * slots.size,), "blocks": (2, slots.size)}[form], 11), 77)]
    norm, is_plain = Norm(None, None, 1e-6, weight), scale == 1 and len(lead) < 3
    y, rows = store(
        (q, k, latent), norm, lambda rows: LatentCache(rows, by_batch, scale),
        [x.astype(np.float32) for x in memory], seq_dim, spec, by_loops=is_plain,
    )  # fmt: skip
    np.testing.assert_allclose(y, rotary.apply(spec, q, seq_dim=seq_dim), rtol=1e-5, atol=1e-6)
    latent = latent / np.sqrt(np.square(latent).mean(-1, keepdims=True) + 1e-6) * weight
    keys = rotary.apply(alone, k, seq_dim=seq_dim)
    values = tokens(np.concatenate((latent[..., None, :], keys), -1), axis)[:, 0] / scale
    rows = rows.reshape(2 * slots.size, 11)
    want = np.full_like(rows, 77)
    want[slots[slots >= 0]] = values[slots >= 0]
    np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-5)


def test_a_step_without_tokens_writes_no_latent_rows(store):
    q, k, latent = (np.zeros((0, *shape), np.float32) for shape in ((4, 8), (1, 8), (16,)))
    memory, slots = [np.ones((5, 24), np.float32)], np.zeros(0, int)
    _, rows = store((q, k, latent), None, lambda rows: LatentCache(rows, slots), memory, -3,
                    by_loops=False)  # fmt: skip
    assert (rows == 1).all()


def test_slots_in_the_order_of_q_are_refused(store):
    lead, axis = LEADS["seq, batch"]
    q, k, v, norm, _, by_batch = case(lead, axis)
    memory = [np.zeros((20, 2, dim), np.float32) for dim in (8, 5)]
    with pytest.raises(ValueError, match=r"slots must be one per token, \(2, 3\) or flat, got \(3"):
        store((q, k, v), norm, lambda *kv: KVCache(*kv, by_batch.T), memory, 0)
