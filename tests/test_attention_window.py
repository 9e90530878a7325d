"""Attention in a window, HWFA made of it, and normalized keys."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_arrays import DTYPES, FAR, LIBRARIES, draw, qkv

from rotary import Rotary, apply
from rotary.attention import hybrid_window, key_norm, scale_by_log_n, softmax_attention

pytestmark = pytest.mark.usefixtures("xla_in_less_time")
SPEC = Rotary(head_dim=8)


def by_sums(q, k, v, first):
    """Softmax over the keys first(m) .. m, one query at a time."""
    out = np.zeros(v.shape)
    for m in range(len(q)):
        keys = range(max(first(m), 0), m + 1)
        weights = np.array([math.exp(q[m] @ k[n] / math.sqrt(q.shape[-1])) for n in keys])
        out[m] = weights / weights.sum() @ v[keys.start : keys.stop]
    return out


@pytest.mark.parametrize(
    ("library", "window"),
    [
        *((library, w) for library in (np.asarray, torch.from_numpy) for w in (1, 3, 7, 8, 100)),
        (jnp.asarray, 3),
    ],
)
def test_a_query_sees_the_last_tokens_alone(library, window):
    q, k, v = qkv(8, 8, dtype=np.float32)
    turned = [apply(SPEC, x.astype(np.float64)) for x in (q, k)]
    wanted = by_sums(*turned, v, lambda m: m - window + 1)
    ours = softmax_attention(*map(library, (q, k, v)), SPEC, window=window)
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=0, atol=2e-6)


@LIBRARIES
def test_a_window_counts_positions_in_every_row_and_moves_with_them(library):
    q, k, v = qkv(2, 3, 8, 8, kv_heads=1)
    spread = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6, 8, 10, 12, 14]])
    arrays = [library(x) for x in (q, k, v)]
    at = library(spread)
    ours = np.asarray(softmax_attention(*arrays, SPEC, q_positions=at, k_positions=at, window=4))
    for row, first in ((0, lambda m: m - 3), (1, lambda m: m - 1)):
        for head in range(3):
            turned = [apply(SPEC, x, positions=spread[row]) for x in (q[row, head], k[row, 0])]
            wanted = by_sums(*turned, v[row, 0], first)
            np.testing.assert_allclose(ours[row, head], wanted, rtol=0, atol=2e-6)
    far = library(spread + FAR)
    moved = softmax_attention(*arrays, SPEC, q_positions=far, k_positions=far, window=4)
    np.testing.assert_allclose(np.asarray(moved), ours, rtol=0, atol=1e-6)


def test_tokens_before_the_window_change_nothing():
    q, k, v = qkv(20, 8)
    whole = softmax_attention(q, k, v, SPEC, window=5)
    last = [x[10:] for x in (q, k, v)]
    np.testing.assert_allclose(
        softmax_attention(*last, SPEC, window=5)[4:], whole[14:], rtol=0, atol=1e-6
    )
    decoded = softmax_attention(
        q[-1:], k[-5:], v[-5:], SPEC, q_positions=[19], k_positions=range(15, 20), window=5
    )
    np.testing.assert_allclose(decoded, whole[-1:], rtol=0, atol=1e-12)


def test_gradients_of_window_attention():
    arrays = [torch.from_numpy(x).requires_grad_() for x in qkv(5, 4)]
    spec = Rotary(head_dim=4)
    assert torch.autograd.gradcheck(
        lambda q, k, v: softmax_attention(q, key_norm(k), v, spec, window=3), arrays
    )


def test_windows_that_make_no_sense_are_refused():
    arrays = qkv(3, 4)
    for window in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="window must be a whole number >= 1, got"):
            softmax_attention(*arrays, window=window)
    with pytest.raises(ValueError, match=r"got a numpy.ndarray of shape \(2,\)"):
        softmax_attention(*arrays, window=np.arange(2))
    given = softmax_attention(*arrays, window=np.int64(2))
    np.testing.assert_array_equal(given, softmax_attention(*arrays, window=2))
    with pytest.raises(ValueError, match="it needs causal=True"):
        softmax_attention(*arrays, window=2, causal=False)


# --- HWFA ---


def reach(num_layers, window, seq=60):
    """How many tokens the last position is made of, through window layers: by a random network."""
    seen = np.eye(seq)
    for layer in range(num_layers - 1):
        q, k, _ = qkv(seq, 8)
        weights = softmax_attention(q + layer, k, np.eye(seq), Rotary(head_dim=8), window=window)
        seen = weights @ seen
    return int((seen[-1] > 0).sum())


@pytest.mark.parametrize(("num_layers", "window"), [(2, 5), (3, 4), (5, 7), (24, 2)])
def test_window_layers_see_what_the_formula_says(num_layers, window):
    assert reach(num_layers, window) == (window - 1) * (num_layers - 1) + 1
    trained = reach(num_layers, window)
    assert hybrid_window(trained, num_layers, share=1.0) == window
    assert hybrid_window(trained - 1, num_layers, share=1.0) == max(window - 1, 1)
    assert hybrid_window(2 * trained, num_layers, share=0.5) == window


def test_a_hybrid_of_window_layers_and_a_full_one_is_the_same_wherever_the_row_begins():
    """The last token is made of the same sums when padding-free tokens stand at other positions."""
    x = draw(30, 8)

    def model(positions):
        hidden = x
        for _ in range(3):
            hidden = hidden + softmax_attention(
                hidden, hidden, hidden, SPEC, q_positions=positions, k_positions=positions, window=4
            )
        q = scale_by_log_n(hidden, np.arange(30) + 1, trained_length=10)
        return hidden + softmax_attention(q, hidden, hidden)

    np.testing.assert_allclose(model(np.arange(30)), model(np.arange(30) + FAR), rtol=0, atol=1e-5)


def test_sizes_of_a_hybrid_that_make_no_sense_are_refused():
    for sizes in ((0, 3), (8, 1), (8.0, 3), (8, 3, 0), (8, 3, 1.5)):
        with pytest.raises(ValueError, match=r"must be a whole number >= 1|HWFA needs 2 layers"):
            hybrid_window(*sizes)


# --- KeyNorm ---


@LIBRARIES
@DTYPES
def test_scores_of_normed_keys_are_products_with_directions(library, dtype):
    q, k, v = qkv(7, 6, dtype=dtype)
    spec = Rotary(head_dim=6)
    turned = [apply(spec, x.astype(np.float64)) for x in (q, k)]
    directions = turned[1] / np.linalg.norm(turned[1], axis=-1, keepdims=True)
    wanted = by_sums(turned[0], directions * math.sqrt(6), v, lambda m: 0)
    q, k, v = map(library, (q, k, v))
    np.testing.assert_allclose(
        np.asarray(softmax_attention(q, key_norm(k), v, spec)), wanted, rtol=0, atol=3e-6
    )


def test_the_length_of_a_key_does_not_matter_and_zeros_stay():
    k = draw(5, 8)
    np.testing.assert_allclose(key_norm(k * 1e6), key_norm(k), rtol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(key_norm(k), axis=-1), math.sqrt(8), rtol=1e-14)
    rotated_before = apply(SPEC, key_norm(k))
    np.testing.assert_allclose(rotated_before, key_norm(apply(SPEC, k)), rtol=0, atol=1e-6)
    for size in (1e30, 1e-30):  # their squares are infinite, or 0, in float32
        for one in (np.full((1, 4), size, np.float32), torch.full((1, 4), size)):
            np.testing.assert_allclose(np.asarray(key_norm(one)), np.ones((1, 4)), rtol=1e-6)
    zeros = torch.zeros(2, 4, requires_grad=True)
    key_norm(zeros).sum().backward()
    assert not key_norm(zeros).any()
    assert torch.isfinite(zeros.grad).all()
    assert key_norm(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
