"""FoPE: tables of several frequencies for each pair, and pairs that position does not reach."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_arrays import draw

from rotary import Rotary, apply, rotate
from rotary.attention import fourier_coefficients, fourier_cos_sin, softmax_attention

pytestmark = pytest.mark.usefixtures("xla_in_less_time")
SPEC = Rotary(head_dim=16, base=100.0)  # 8 pairs: a turn takes 6.3 to 353 tokens
LENGTH = 64


def ladder():
    return [100.0 ** (-2 * i / 16) for i in range(8)]


def by_sums(coefficients, positions):
    """cos and sin of every head, position and pair, by the sum in the paper."""
    _, heads, kept, outputs = coefficients.shape
    cos, sin = np.ones((heads, len(positions), 8)), np.zeros((heads, len(positions), 8))
    for h in range(heads):
        for row, m in enumerate(positions):
            for p in range(outputs):
                a, b = coefficients[:, h, :, p]
                cos[h, row, p] = sum(a[j] * math.cos(m * ladder()[j]) for j in range(kept))
                sin[h, row, p] = sum(b[j] * math.sin(m * ladder()[j]) for j in range(kept))
    return cos, sin


@pytest.mark.parametrize(
    ("library", "outputs"),
    [(np.asarray, None), (np.asarray, 3), (torch.from_numpy, 3), (jnp.asarray, 3)],
)
def test_tables_are_the_sums_of_the_paper(library, outputs):
    learned = fourier_coefficients(SPEC, LENGTH, 2, seed=0, outputs=outputs)
    wanted = by_sums(learned, [0, 1, 7, 500])
    ours = fourier_cos_sin(SPEC, library(learned.astype(np.float32)), [0, 1, 7, 500])
    for mine, other in zip(ours, wanted, strict=True):
        assert mine.shape == (1, 2, 4, 8)
        np.testing.assert_allclose(np.asarray(mine)[0], other, rtol=0, atol=2e-6)
    back = fourier_cos_sin(SPEC, library(learned), [-500, -7], allow_negative=True)
    np.testing.assert_allclose(np.asarray(back[0])[0, :, ::-1], wanted[0][:, 2:], atol=2e-6)
    np.testing.assert_allclose(np.asarray(back[1])[0, :, ::-1], -wanted[1][:, 2:], atol=2e-6)
    by_row = fourier_cos_sin(SPEC, library(learned), np.array([[3, 4], [8, 2]]))
    for table, wanted_ in zip(by_row, by_sums(learned, [3, 4, 8, 2]), strict=True):
        rows = np.asarray(table).transpose(0, 2, 1, 3).reshape(4, 2, 8).transpose(1, 0, 2)
        np.testing.assert_allclose(rows, wanted_, rtol=0, atol=2e-6)


def test_frequencies_without_a_whole_turn_are_left_out():
    kept = sum(frequency >= 2 * math.pi / LENGTH for frequency in ladder())
    assert kept == 5
    learned = fourier_coefficients(SPEC, LENGTH, 3, seed=0)
    assert learned.shape == (2, 3, 5, 5)
    cos, sin = fourier_cos_sin(SPEC, learned, seq_len=100)
    np.testing.assert_array_equal(cos[..., 5:], np.ones((1, 3, 100, 3)))
    np.testing.assert_array_equal(sin[..., 5:], np.zeros((1, 3, 100, 3)))
    exact = 2 * math.pi / ladder()[4]  # a length that makes exactly one turn counts as whole
    assert fourier_coefficients(SPEC, math.ceil(exact), 1, seed=0).shape[2] == 5
    assert fourier_coefficients(SPEC, math.floor(exact), 1, seed=0).shape[2] == 4


def test_without_noise_it_is_rope_whose_slow_pairs_stand_still():
    x = draw(2, 3, 30, 16)
    start = fourier_coefficients(SPEC, LENGTH, 3, seed=0, gain=0.0)
    (ours,) = rotate((x,), *fourier_cos_sin(SPEC, start, seq_len=30), SPEC)
    frequencies = [*ladder()[:5], 0.0, 0.0, 0.0]
    still = Rotary(head_dim=16, schedule="custom", params={"inv_freq": frequencies})
    np.testing.assert_allclose(ours, apply(still, x), rtol=0, atol=1e-6)


def test_the_noise_is_that_of_torch():
    drawn = fourier_coefficients(Rotary(head_dim=128), 2**16, 8, seed=0, gain=0.5)
    _, heads, kept, outputs = drawn.shape
    assert drawn[0, 0, 3, 3] != drawn[1, 0, 3, 3]
    noise = drawn - np.eye(kept)
    torch.manual_seed(0)
    theirs = torch.nn.init.xavier_normal_(torch.empty(heads, kept, outputs), gain=0.5)
    assert noise.std() == pytest.approx(float(theirs.std()), rel=0.03)
    fewer = fourier_coefficients(Rotary(head_dim=128), 2**16, 1, seed=0, gain=0.0, outputs=16)
    assert np.flatnonzero(fewer[0, 0, :, 1]).tolist() == [math.ceil(kept / 16)]


def test_scores_depend_on_more_than_the_distance():
    q, k = draw(1, 2, 2, 16), draw(1, 2, 2, 16, key=1)
    learned = fourier_coefficients(SPEC, LENGTH, 2, seed=0)

    def score(m, n):
        tables = fourier_cos_sin(SPEC, learned, [m, n])
        turned_q, turned_k = rotate((q, k), *tables, SPEC)
        return float((turned_q[0, 0, 0] * turned_k[0, 0, 1]).sum())

    assert abs(score(10, 3) - score(110, 103)) > 0.01
    learned = fourier_coefficients(SPEC, LENGTH, 2, seed=0, gain=0.0)  # one frequency each
    assert score(10, 3) == pytest.approx(score(110, 103), abs=1e-5)


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["np", "torch"])
def test_decoding_with_cached_keys_gives_what_the_whole_gives(library):
    q, k, v = (library(draw(1, 2, 12, 16, key=key)) for key in range(3))
    learned = library(fourier_coefficients(SPEC, LENGTH, 2, seed=0))
    whole_q, whole_k = rotate((q, k), *fourier_cos_sin(SPEC, learned, seq_len=12), SPEC)
    whole = softmax_attention(whole_q, whole_k, v)
    cached = []
    for m in range(12):
        one = [x[:, :, m : m + 1] for x in (q, k)]
        turned, key = rotate(tuple(one), *fourier_cos_sin(SPEC, learned, [m]), SPEC)
        cached.append(key)
        keys = np.concatenate([np.asarray(each) for each in cached], axis=2)
        step = softmax_attention(
            np.asarray(turned), keys, np.asarray(v)[:, :, : m + 1], causal=False
        )
        np.testing.assert_allclose(step, np.asarray(whole)[:, :, m : m + 1], rtol=0, atol=1e-12)


def test_coefficients_get_their_gradient():
    learned = torch.from_numpy(fourier_coefficients(SPEC, LENGTH, 1, seed=0)).requires_grad_()
    x = torch.from_numpy(draw(1, 1, 4, 16)).requires_grad_()

    def turned(coefficients, given):
        return rotate((given,), *fourier_cos_sin(SPEC, coefficients, seq_len=4), SPEC)[0]

    assert torch.autograd.gradcheck(turned, (learned, x))

    def total(coefficients):
        cos, sin = fourier_cos_sin(SPEC, coefficients, seq_len=4)
        return (cos[..., :5] * 2 + sin[..., :5]).sum()

    ours = jax.jit(jax.grad(total))(jnp.asarray(learned.detach().numpy(), jnp.float32))
    (theirs,) = torch.autograd.grad(total(learned), learned)
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trained_length": 6}, "no frequency makes a turn in trained_length = 6 tokens"),
        ({"trained_length": 0}, "trained_length must be a whole number >= 1, got 0"),
        ({"heads": 2.0}, "heads must be a whole number >= 1, got 2.0"),
        ({"outputs": 6}, "outputs must be 1 .. 5, the frequencies with a whole turn, got 6"),
        ({"spec": Rotary(head_dim=8, axes=(0, 1, 0, 1))}, "FoPE needs one position axis"),
        ({"spec": Rotary(head_dim=4, schedule="custom", params={"inv_freq": [0.1, 1.0]})},
         "frequencies that fall from pair to pair"),
    ],
)  # fmt: skip
def test_sizes_and_specs_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fourier_coefficients(**{"spec": SPEC, "trained_length": LENGTH, "heads": 1, **options},
                             seed=0)  # fmt: skip


def test_coefficients_and_positions_that_do_not_fit_are_refused():
    learned = fourier_coefficients(SPEC, LENGTH, 1, seed=0)
    for shape in (learned[0], learned[:1], np.zeros((2, 1, 9, 3))):
        with pytest.raises(ValueError, match=r"coefficients must be \(2, heads, frequencies,"):
            fourier_cos_sin(SPEC, shape, seq_len=3)
    for options in ({}, {"positions": [0], "seq_len": 1}):
        with pytest.raises(ValueError, match="give either positions or seq_len, got"):
            fourier_cos_sin(SPEC, learned, **options)
    for seq_len in (-1, 2.0):
        with pytest.raises(ValueError, match=f"seq_len must be a whole number >= 0, got {seq_len}"):
            fourier_cos_sin(SPEC, learned, seq_len=seq_len)
    for wrong, found in ((3, "int64 of shape ()"), ([0.5], "float64 of shape (1,)"),
                         ([[[1]]], "int64 of shape (1, 1, 1)")):  # fmt: skip
        for coefficients in (learned, torch.from_numpy(learned)):
            with pytest.raises(ValueError, match=f"positions must be whole.*{re.escape(found)}"):
                fourier_cos_sin(SPEC, coefficients, wrong)


def test_torch_compiles_the_tables():
    """The check of the frequencies was recorded, which is an error of Dynamo."""
    torch._dynamo.reset()
    spec, coefficients = Rotary(head_dim=8), torch.ones(2, 4, 4, 4)

    def tables(positions):
        return fourier_cos_sin(spec, coefficients, positions)

    compiled = torch.compile(tables, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.arange(6)), tables(torch.arange(6)))
