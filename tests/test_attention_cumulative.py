"""Angles that tokens add up: the running sum, in pieces, and the steps of two published models."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_arrays import LIBRARIES as NUMPY_TORCH
from attention_arrays import draw
from libraries import enable_x64

from rotary import Rotary, apply, inv_freq, rotate
from rotary.attention import (
    chunked_linear_attention,
    cumulative_cos_sin,
    mamba3_steps,
    selective_steps,
    softmax_attention,
)

pytestmark = pytest.mark.usefixtures("xla_in_less_time")
LIBRARIES = pytest.mark.parametrize(
    "library", [np.asarray, torch.from_numpy, jnp.asarray], ids=["np", "torch", "jax"]
)


def attended(q, k, v, steps):
    turned = rotate((q, k), *cumulative_cos_sin(steps)[:2], layout="half")
    return softmax_attention(*turned, v)


@LIBRARIES
def test_a_token_is_turned_by_the_sum_of_the_steps_so_far(library):
    steps = draw(2, 3, 11, 4, dtype=np.float32) * 3
    cos, sin, state = cumulative_cos_sin(library(steps))
    turned = np.ones((2, 3, 4), complex)
    for m in range(11):
        turned = turned * np.exp(1j * steps[:, :, m].astype(np.float64))
        np.testing.assert_allclose(np.asarray(cos)[:, :, m], turned.real, rtol=0, atol=3e-6)
        np.testing.assert_allclose(np.asarray(sin)[:, :, m], turned.imag, rtol=0, atol=3e-6)
    np.testing.assert_allclose(np.exp(1j * np.asarray(state)), turned, rtol=0, atol=5e-6)
    assert cos.dtype == library(steps).dtype
    assert (np.asarray(state) >= 0).all()
    assert (np.asarray(state) <= 2 * math.pi).all()


def test_equal_steps_are_rope():
    spec, x = Rotary(head_dim=8), draw(2, 3, 50, 8)
    steps = np.broadcast_to(inv_freq(spec)[0], (2, 3, 50, 4))
    (ours,) = rotate((x,), *cumulative_cos_sin(steps)[:2], layout="half")
    np.testing.assert_allclose(ours, apply(spec, x, positions=np.arange(50) + 1), atol=1e-6)


@pytest.mark.parametrize(
    ("library", "cuts"),
    [
        (np.asarray, [1]),
        (np.asarray, [5, 5, 9]),
        (torch.from_numpy, list(range(1, 12))),
        (jnp.asarray, [4, 8]),
    ],
)
def test_pieces_give_the_angles_of_the_whole(library, cuts):
    steps = draw(2, 3, 12, 4, dtype=np.float32) * 3
    whole = [np.asarray(x) for x in cumulative_cos_sin(library(steps))]
    state, parts = None, []
    for start, stop in zip([0, *cuts], [*cuts, 12], strict=True):
        cos, sin, state = cumulative_cos_sin(library(steps[:, :, start:stop]), state)
        parts.append((np.asarray(cos), np.asarray(sin)))
    for ours, wanted in zip(zip(*parts, strict=True), whole[:2], strict=True):
        np.testing.assert_allclose(np.concatenate(ours, axis=2), wanted, rtol=0, atol=4e-6)
    np.testing.assert_allclose(np.asarray(state), whole[2], rtol=0, atol=5e-6)


@pytest.mark.parametrize("step", [0.3, -0.3, 3.1, 1e-6, 100.7])
def test_long_rows_lose_nothing_without_float64(step):
    """A sum in float32 was off by 0.01 after 131 072 steps of 0.3 rad, and by 0.2 after 3.1."""
    steps = np.full((131_072, 1), step, np.float32)
    wanted = cumulative_cos_sin(steps.astype(np.float64))
    with enable_x64(False):
        for call in (cumulative_cos_sin, jax.jit(cumulative_cos_sin)):
            cos, sin, state = call(jnp.asarray(steps))
            np.testing.assert_allclose(np.asarray(cos), wanted[0], rtol=0, atol=2e-7)
            np.testing.assert_allclose(np.asarray(sin), wanted[1], rtol=0, atol=2e-7)
            apart = math.remainder(float(state[0]) - float(wanted[2][0]), 2 * math.pi)
            assert abs(apart) <= 4e-7


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_a_step_without_an_angle_is_nan_from_there_on(bad):
    steps = np.full((6, 2), 0.5, np.float32)
    steps[3, 1] = bad
    with enable_x64(False):
        cos, sin, state = (np.asarray(x) for x in cumulative_cos_sin(jnp.asarray(steps)))
    wrong = np.zeros((6, 2), bool)
    wrong[3:, 1] = True
    for table in (cos, sin):
        np.testing.assert_array_equal(np.isnan(table), wrong)
    np.testing.assert_array_equal(np.isnan(state), [False, True])


def test_long_rows_lose_nothing():
    steps = np.full((1_000_000, 1), 0.3, np.float32)
    _, sin, state = cumulative_cos_sin(steps)
    exact = math.remainder(1_000_000 * float(np.float32(0.3)), 2 * math.pi)
    assert math.remainder(float(state[0]) - exact, 2 * math.pi) == pytest.approx(0, abs=1e-8)
    assert sin[-1, 0] == pytest.approx(math.sin(exact), abs=1e-6)


def test_a_score_depends_on_what_lies_between_two_tokens_alone():
    q, k = (draw(1, 2, 12, 8, key=key) for key in range(2))
    steps = draw(1, 2, 12, 4, key=2)
    changed = steps.copy()
    changed[:, :, :5] = 7.0  # tokens before the rest
    scores = []
    for each in (steps, changed):
        turned_q, turned_k = rotate((q, k), *cumulative_cos_sin(each)[:2], layout="half")
        scores.append(turned_q @ turned_k.swapaxes(-1, -2))
    np.testing.assert_allclose(scores[0][..., 5:, 5:], scores[1][..., 5:, 5:], rtol=0, atol=1e-12)
    assert np.abs(scores[0] - scores[1])[..., 5:, :3].max() > 0.1


def test_gradients_of_steps():
    q, k, v = (torch.from_numpy(draw(1, 1, 5, 4, key=key)).requires_grad_() for key in range(3))
    steps = torch.from_numpy(draw(1, 1, 5, 2, key=3)).requires_grad_()
    assert torch.autograd.gradcheck(attended, (q, k, v, steps))

    def total(given):
        cos, sin, state = cumulative_cos_sin(given)
        return (cos * 2 + sin).sum() + (state * state).sum()

    ours = jax.jit(jax.grad(total))(jnp.asarray(steps.detach().numpy(), jnp.float32))
    (theirs,) = torch.autograd.grad(total(steps), steps)
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), rtol=0, atol=3e-5)


def test_states_that_do_not_fit_are_refused_and_an_empty_piece_changes_nothing():
    steps = draw(2, 3, 5, 4)
    with pytest.raises(ValueError, match=r"state must be \(2, 3, 4\) for steps of \(2, 3, 5, 4\)"):
        cumulative_cos_sin(steps, np.zeros((3, 4)))
    _, _, state = cumulative_cos_sin(steps)
    cos, _, after = cumulative_cos_sin(steps[:, :, :0], state)
    assert cos.shape == (2, 3, 0, 4)
    np.testing.assert_array_equal(after, state)
    np.testing.assert_array_equal(cumulative_cos_sin(steps[:, :, :0])[2], np.zeros((2, 3, 4)))


# --- Mamba-3 ---


@NUMPY_TORCH
def test_steps_of_mamba_3(library):
    angles, dt = draw(2, 3, 5, 4), np.abs(draw(2, 3, 5))
    ours = np.asarray(mamba3_steps(library(angles), library(dt)))
    for index in np.ndindex(angles.shape):
        wanted = math.pi * math.tanh(angles[index]) * dt[index[:-1]]
        assert ours[index] == pytest.approx(wanted, rel=2e-6, abs=1e-6)
    with pytest.raises(ValueError, match=r"dt must be \(2, 3, 5\) for angles of \(2, 3, 5, 4\)"):
        mamba3_steps(library(angles), library(dt[0]))


def test_a_recurrence_of_complex_numbers_is_data_dependent_rope():
    """h_m = e^(i delta_m) h_{m-1} + conj(k_m) v_m, read by q: Mamba-3's proposition, no decay."""
    q, k, v = (draw(9, 8, key=key) for key in range(3))
    steps = mamba3_steps(draw(9, 4, key=3), np.abs(draw(9, key=4)))
    turned = rotate((q, k), *cumulative_cos_sin(steps)[:2], layout="interleaved")
    weights = np.tril(turned[0] @ turned[1].T)
    pairs_q, pairs_k = (x[:, ::2] + 1j * x[:, 1::2] for x in (q, k))
    state = np.zeros((4, 8), complex)
    for m in range(9):
        state = np.exp(1j * steps[m])[:, None] * state + pairs_k[m].conj()[:, None] * v[m]
        wanted = (pairs_q[m] @ state).real
        np.testing.assert_allclose((weights @ v)[m], wanted, rtol=0, atol=1e-6)


# --- Selective RoPE ---


def convolved(phi, kernel, temperature):
    """By the definition, one token and pair at a time; the kernel of each head."""
    out = np.zeros(phi.shape)
    for row, head, m, pair in np.ndindex(phi.shape):
        for back in range(min(kernel.shape[1], m + 1)):
            out[row, head, m, pair] += (
                kernel[head, -1 - back, pair] * phi[row, head, m - back, pair]
            )
    return out * temperature


@NUMPY_TORCH
@pytest.mark.parametrize("width", [1, 4])
def test_steps_of_selective_rope_in_pieces(library, width):
    phi, kernel = draw(2, 3, 9, 4), draw(3, width, 4, key=1)
    temperature = inv_freq(Rotary(head_dim=8))[0].copy()
    wanted = convolved(phi, kernel, temperature)
    arrays = library(kernel), library(temperature)
    ours, _ = selective_steps(library(phi), *arrays)
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=0, atol=3e-6)
    tail, parts = None, []
    for start, stop in ((0, 1), (1, 2), (2, 7), (7, 9)):
        part, tail = selective_steps(library(phi[:, :, start:stop]), *arrays, tail)
        parts.append(np.asarray(part))
    np.testing.assert_allclose(np.concatenate(parts, axis=2), wanted, rtol=0, atol=3e-6)


def test_decoding_token_by_token_gives_what_the_whole_gives():
    q, k, v = (draw(1, 2, 10, 8, key=key) for key in range(3))
    phi, kernel, temperature = draw(1, 2, 10, 4, key=3), draw(2, 4, 4, key=4), np.ones(4)
    steps, _ = selective_steps(phi, kernel, temperature)
    whole = attended(q, k, v, steps)
    turned = rotate((q, k), *cumulative_cos_sin(steps)[:2], layout="half")
    linear, _ = chunked_linear_attention(*turned, v)
    tail, state, memory, keys = None, None, None, []
    for m in range(10):
        at = (slice(None), slice(None), slice(m, m + 1))
        step, tail = selective_steps(phi[at], kernel, temperature, tail)
        cos, sin, state = cumulative_cos_sin(step, state)
        one_q, one_k = rotate((q[at], k[at]), cos, sin, layout="half")
        keys.append(one_k)
        out = softmax_attention(one_q, np.concatenate(keys, 2), v[:, :, : m + 1], causal=False)
        np.testing.assert_allclose(out, whole[at], rtol=0, atol=1e-12)
        out, memory = chunked_linear_attention(one_q, one_k, v[at], state=memory)
        np.testing.assert_allclose(out, linear[at], rtol=0, atol=1e-12)


def test_gradients_of_selective_steps_and_shapes_that_do_not_fit():
    phi, kernel = (torch.from_numpy(draw(*s)).requires_grad_() for s in ((1, 2, 5, 3), (2, 4, 3)))
    temperature = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: selective_steps(*x)[0], (phi, kernel, temperature))
    for wrong in (
        (phi, kernel[..., :2], temperature),
        (phi, kernel, temperature[:2]),
        (phi, kernel, temperature, phi[:, :, :2]),
    ):
        with pytest.raises(ValueError, match="phi of 3 pairs and a kernel of 4 tokens need"):
            selective_steps(*wrong)
