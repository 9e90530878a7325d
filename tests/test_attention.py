"""Sinusoidal embedding, softmax and linear attention against independent oracles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rotary import Rotary
from rotary.attention import (
    elu_plus_one,
    linear_attention,
    recurrent_linear_attention,
    sinusoidal,
    softmax_attention,
)

EPS = 2.0**-52
TABLE = 2.0**-24  # what a float32 entry of cos or sin may be off
FAR = 2**40
SHIFT = 1e-6  # a score is a sum of products, each off by a few entries of the tables
LAYOUTS = ("half", "interleaved")
examples = settings(max_examples=50, deadline=None, derandomize=True)


def draw(*shape: int, seed: int = 0, dtype: type = np.float64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(*shape: int, dtype: type = np.float64) -> tuple[np.ndarray, ...]:
    return tuple(draw(*shape, seed=seed, dtype=dtype) for seed in range(3))


# --- the additive embedding ---


@pytest.mark.parametrize(("dim", "base"), [(2, 10_000.0), (64, 10_000.0), (96, 500.0)])
def test_sinusoidal_is_the_formula(dim, base):
    positions = np.array([[0, 1, 2], [17, 511, 4096]])
    wanted = np.empty((2, 3, dim))
    for t in range(dim // 2):
        angle = positions / base ** (2 * t / dim)
        wanted[..., 2 * t], wanted[..., 2 * t + 1] = np.sin(angle), np.cos(angle)
    ours = sinusoidal(positions, dim, base)
    assert ours.dtype == np.float64
    # the quotient and the power are each rounded, which the position magnifies
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=4096 * 4 * EPS)


@examples
@given(st.integers(0, 2**20), st.integers(0, 2**20))
def test_inner_products_depend_on_the_distance(m, n):
    p_m, p_n = sinusoidal(np.array([m, n]), 64)
    wanted = sum(math.cos((m - n) * 10_000 ** (-2 * t / 64)) for t in range(32))
    assert p_m @ p_n == pytest.approx(wanted, abs=32 * 2**20 * 4 * EPS)


def test_inner_products_do_not_drift():
    near = sinusoidal(np.arange(100), 64)
    far = sinusoidal(np.arange(100) + FAR, 64)
    # integer turns: only the cosine itself is rounded, and its angle of at most pi
    np.testing.assert_allclose(far @ far.T, near @ near.T, rtol=0, atol=64 * 8 * EPS)


# --- softmax attention ---


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 2e-6), (np.float32, 2e-5)])
def test_softmax_attention_is_that_of_torch_and_transformers(dtype, rtol, causal):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    q, k, v = qkv(2, 3, 21, 32, dtype=dtype)
    config = LlamaConfig(hidden_size=96, num_attention_heads=3, head_dim=32)
    module = llama.LlamaRotaryEmbedding(config)
    cos, sin = module(torch.from_numpy(q), torch.arange(21)[None])
    rotated = llama.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *rotated, torch.from_numpy(v), is_causal=causal
    )
    ours = softmax_attention(q, k, v, Rotary(head_dim=32), causal=causal)
    # the float32 angles of transformers are off by 20 x 2^-24 at position 20
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=0, atol=rtol)


@pytest.mark.parametrize("causal", [True, False])
def test_softmax_attention_without_rotation_is_that_of_torch(causal):
    q, k, v = qkv(2, 9, 16)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q, k, v)), is_causal=causal
    )
    ours = softmax_attention(q, k, v, causal=causal)
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=0, atol=100 * EPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_softmax_attention_depends_on_distances_alone(layout):
    q, k, v = qkv(2, 12, 64)
    spec, positions = Rotary(head_dim=64, layout=layout), np.arange(12)
    near = softmax_attention(q, k, v, spec)
    shifted = {"q_positions": positions + FAR, "k_positions": positions + FAR}
    np.testing.assert_allclose(
        softmax_attention(q, k, v, spec, **shifted), near, rtol=0, atol=SHIFT
    )
    moved = softmax_attention(q, k, v, spec, q_positions=positions + 3, causal=False)
    assert np.abs(moved - softmax_attention(q, k, v, spec, causal=False)).max() > 0.01


def test_tokens_added_to_a_cache_see_what_they_saw_before():
    q, k, v = qkv(2, 4, 10, 32)
    spec = Rotary(head_dim=32)
    whole = softmax_attention(q, k, v, spec)
    last = softmax_attention(q[..., 7:, :], k, v, spec, q_positions=np.arange(7, 10))
    np.testing.assert_allclose(last, whole[..., 7:, :], rtol=0, atol=100 * EPS)
    cut = softmax_attention(q[..., :7, :], k[..., :7, :], v[..., :7, :], spec)
    np.testing.assert_allclose(cut, whole[..., :7, :], rtol=0, atol=100 * EPS)


def test_positions_of_each_row_of_a_batch():
    q, k, v = qkv(3, 3, 3, 16)  # all sizes are equal: a mask that is broadcast wrongly fits
    spec = Rotary(head_dim=16)
    positions = np.array([[0, 1, 2], [2, 0, 1], [5, 9, 7]])
    wanted = [
        softmax_attention(q[row], k[row], v[row], spec, q_positions=where, k_positions=where)
        for row, where in enumerate(positions)
    ]
    ours = softmax_attention(q, k, v, spec, q_positions=positions, k_positions=positions)
    np.testing.assert_allclose(ours, np.stack(wanted), rtol=0, atol=100 * EPS)


def test_softmax_attention_of_an_empty_sequence():
    q, k, v = qkv(2, 0, 8)
    assert softmax_attention(q, k, v, Rotary(head_dim=8)).shape == (2, 0, 8)


def test_large_scores_do_not_overflow():
    q, k, v = qkv(5, 8)
    assert np.isfinite(softmax_attention(1e3 * q, 1e3 * k, v, Rotary(head_dim=8))).all()


# --- linear attention ---

BOTH = pytest.mark.parametrize("attend", [linear_attention, recurrent_linear_attention])


@BOTH
def test_negative_positions_are_asked_for(attend):
    q, k, v = qkv(3, 8)
    with pytest.raises(ValueError, match="positions must be >= 0, got -1"):
        attend(q, k, v, Rotary(head_dim=8), positions=np.arange(3) - 1)


@BOTH
def test_weights_may_be_negative_and_need_not_sum_to_one(attend):
    q, k, _ = qkv(16, 8)
    identity = np.eye(16)  # as values it returns the weights themselves
    weights = attend(q, k, identity, Rotary(head_dim=8))
    assert weights.min() < -0.01
    assert weights.sum(axis=1).min() < 0.9
    np.testing.assert_array_equal(np.triu(weights, 1), np.zeros((16, 16)))
    assert weights[0, 0] == pytest.approx(1, abs=4 * TABLE)  # one token: distance 0


@BOTH
def test_the_denominator_is_not_rotated_and_stays_positive(attend):
    spec = Rotary(head_dim=2)
    q = k = np.zeros((2, 2))
    positions = np.array([0, 2])  # 2 rad: a rotated denominator would be 1 + cos 2
    ours = attend(q, k, np.ones((2, 1)), spec, positions=positions)
    wanted = (2 + 2 * math.cos(2)) / 4  # phi = 1, |phi|^2 = 2 for both tokens
    assert ours[1, 0] == pytest.approx(wanted, abs=4 * TABLE)
    large = attend(q - 30, k - 30, np.ones((2, 1)), spec)  # phi = e^-30: tiny, never 0
    assert np.isfinite(large).all()


@BOTH
@pytest.mark.parametrize("shape", [(0, 8), (2, 3, 0, 8), (0, 3, 5, 8)])
def test_linear_attention_of_nothing(attend, shape):
    assert attend(*qkv(*shape), Rotary(head_dim=8)).shape == shape


@BOTH
def test_values_may_have_another_width(attend):
    q, k, _ = qkv(2, 5, 8)
    v = draw(2, 5, 3, seed=9)
    ours = attend(q, k, v, Rotary(head_dim=8))
    np.testing.assert_allclose(ours[1], attend(q[1], k[1], v[1], Rotary(head_dim=8)), atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "attend", [softmax_attention, linear_attention, recurrent_linear_attention]
)
def test_the_result_has_the_type_of_the_input(attend, dtype):
    q, k, v = qkv(5, 8, dtype=dtype)
    assert attend(q, k, v, Rotary(head_dim=8)).dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_feature_map_is_elu_plus_one(dtype):
    x = np.concatenate((draw(1000), [0.0, -0.0, -700.0, 700.0, -1e9, 1e9])).astype(dtype)
    ours = elu_plus_one(x)
    assert ours.dtype == dtype
    wanted = torch.nn.functional.elu(torch.from_numpy(x)).numpy() + 1
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(ours, wanted, rtol=2 * eps, atol=2 * eps)
    assert (ours[x > -80] > 0).all()
