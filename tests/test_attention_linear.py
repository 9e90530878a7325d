"""Linear attention by all pairs, token by token, in chunks and in a stream is one function."""

import math

import numpy as np
import pytest
from attention_arrays import FAR, LIBRARIES, SHIFT, draw, qkv
from libraries import if_installed
from published import scaled

from rotary import Rotary
from rotary.attention import (
    LinearState,
    chunked_linear_attention,
    elu_plus_one,
    linear_attention,
    recurrent_linear_attention,
)

torch = if_installed("torch")

BAR = 1e-5
TABLE = 2.0**-24  # what a float32 entry of cos or sin may be off


def chunked(*arrays, **options):
    return chunked_linear_attention(*arrays, **options)[0]


FORMS = pytest.mark.parametrize(
    "attend",
    [linear_attention, recurrent_linear_attention, chunked],
    ids=lambda form: form.__name__,
)


def by_pairs(q, k, v, angles, layout):
    """Equation 19 with complex pairs, float64; angles (seq, pairs)."""

    def complex_pairs(x):
        features = np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
        if layout == "interleaved":
            return features[..., ::2] + 1j * features[..., 1::2]
        half = x.shape[-1] // 2
        return features[..., :half] + 1j * features[..., half:]

    a, b = complex_pairs(q), complex_pairs(k)
    turned_a, turned_b = a * np.exp(1j * angles), b * np.exp(1j * angles)
    weights = np.tril(np.einsum("...mi,...ni->...mn", turned_a, turned_b.conj()).real)
    norms = np.tril(np.einsum("...mi,...ni->...mn", a, b.conj()).real).sum(-1, keepdims=True)
    return weights @ v / norms


@LIBRARIES
@FORMS
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("positions", "head_dim"), [(range(1), 2), ([3, 4, 9, 100, 7, 8, 0], 12), (range(257), 32)]
)
def test_every_form_is_equation_19_in_float32(library, attend, layout, positions, head_dim):
    at = np.array(positions)
    arrays = qkv(2, 3, len(at), head_dim, dtype=np.float32, width=5)
    angles = np.outer(at, 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim))
    wanted = by_pairs(*[x.astype(np.float64) for x in arrays], angles, layout)
    ours = attend(*map(library, arrays), Rotary(head_dim=head_dim, layout=layout), positions=at)
    assert np.asarray(ours).dtype == np.float32
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=0, atol=BAR)


@LIBRARIES
@FORMS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_linear_attention_is_the_same_at_any_offset(library, attend, dtype):
    arrays = list(map(library, qkv(2, 3, 70, 64, dtype=dtype)))
    spec, positions = Rotary(head_dim=64), np.arange(70)
    near = np.asarray(attend(*arrays, spec))
    moved = np.asarray(attend(*arrays, spec, positions=positions + FAR))
    np.testing.assert_allclose(moved, near, rtol=0, atol=SHIFT)
    assert np.abs(np.asarray(attend(*arrays, spec, positions=2 * positions)) - near).max() > 0.01
    back = attend(*arrays, spec, positions=positions - FAR, allow_negative=True)
    unit = np.abs(np.asarray(arrays[2])).max()
    np.testing.assert_allclose(np.asarray(back), near, rtol=0, atol=SHIFT * unit)


@LIBRARIES
@FORMS
def test_without_a_spec_the_weights_are_an_average(library, attend):
    q, k, _ = qkv(30, 8)
    weights = np.asarray(attend(*map(library, (q, k, np.eye(30)))))
    assert weights[np.tril_indices(30)].min() > 0
    np.testing.assert_allclose(weights.sum(axis=1), np.ones(30), rtol=1e-12)


@FORMS
@pytest.mark.parametrize("lengths", [(5, 3, 3), (1, 3, 3), (5, 5, 6), (5, 5, 4)])
def test_tokens_without_a_partner_are_refused(attend, lengths):
    q, k, v = (np.ones((2, seq, 8)) for seq in lengths)
    named = "got {}, {} and {} tokens".format(*lengths)
    with pytest.raises(ValueError, match=named):
        attend(q, k, v)


@FORMS
def test_negative_positions_are_asked_for(attend):
    q, k, v = qkv(3, 8)
    with pytest.raises(ValueError, match="positions must be >= 0, got -1"):
        attend(q, k, v, Rotary(head_dim=8), positions=np.arange(3) - 1)


@FORMS
def test_weights_may_be_negative_and_need_not_sum_to_one(attend):
    q, k, _ = qkv(16, 8)
    identity = np.eye(16)  # as values it returns the weights themselves
    weights = attend(q, k, identity, Rotary(head_dim=8))
    assert weights.min() < -0.01
    assert weights.sum(axis=1).min() < 0.9
    np.testing.assert_array_equal(np.triu(weights, 1), np.zeros((16, 16)))
    assert weights[0, 0] == pytest.approx(1, abs=4 * TABLE)  # one token: distance 0


@FORMS
def test_the_denominator_is_not_rotated_and_stays_positive(attend):
    spec = Rotary(head_dim=2)
    q = k = np.zeros((2, 2))
    positions = np.array([0, 2])  # 2 rad: a rotated denominator would be 1 + cos 2
    ours = attend(q, k, np.ones((2, 1)), spec, positions=positions)
    wanted = (2 + 2 * math.cos(2)) / 4  # phi = 1, |phi|^2 = 2 for both tokens
    assert ours[1, 0] == pytest.approx(wanted, abs=4 * TABLE)
    large = attend(q - 30, k - 30, np.ones((2, 1)), spec)  # phi = e^-30: tiny, never 0
    assert np.isfinite(large).all()


@FORMS
@pytest.mark.parametrize("shape", [(0, 8), (2, 3, 0, 8), (0, 3, 5, 8)])
def test_linear_attention_of_nothing(attend, shape):
    assert attend(*qkv(*shape), Rotary(head_dim=8)).shape == shape


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_feature_map_is_elu_plus_one(dtype):
    x = np.concatenate((draw(1000), [0.0, -0.0, -700.0, 700.0, -1e9, 1e9])).astype(dtype)
    ours = elu_plus_one(x)
    assert ours.dtype == dtype
    wanted = torch.nn.functional.elu(torch.from_numpy(x)).numpy() + 1
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(ours, wanted, rtol=2 * eps, atol=2 * eps)
    assert (ours[x > -80] > 0).all()


# --- the state ---


def feed(arrays, spec, cuts, **options):
    """The outputs of the pieces between the cuts, one after another, and the last state."""
    outputs, state = [], None
    for start, stop in zip([0, *cuts], [*cuts, arrays[0].shape[-2]], strict=True):
        piece = [x[..., start:stop, :] for x in arrays]
        output, state = chunked_linear_attention(*piece, spec, state=state, **options)
        outputs.append(np.asarray(output))
    return np.concatenate(outputs, axis=-2), state


@LIBRARIES
@pytest.mark.parametrize("cuts", [[], [1], [17], [1, 2, 3], [5, 5, 40], [36], list(range(1, 37))])
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
def test_pieces_give_what_the_whole_gives(library, cuts, chunk_size):
    arrays = list(map(library, qkv(2, 3, 37, 16, width=6)))
    spec = Rotary(head_dim=16)
    wanted = np.asarray(linear_attention(*arrays, spec))
    ours, state = feed(arrays, spec, cuts, chunk_size=chunk_size)
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-12)
    _, whole = chunked_linear_attention(*arrays, spec)
    assert state.position == whole.position == 37
    assert state.s.shape == (2, 3, 16, 6)
    assert state.z.shape == (2, 3, 16)
    np.testing.assert_allclose(np.asarray(state.s), np.asarray(whole.s), rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.asarray(state.z), np.asarray(whole.z), rtol=0, atol=1e-12)


@LIBRARIES
def test_a_state_goes_on_at_the_positions_of_each_row(library):
    arrays = list(map(library, qkv(2, 3, 9, 8)))
    spec = Rotary(head_dim=8)
    starts = np.array([[0], [FAR]])
    first = [x[..., :4, :] for x in arrays]
    _, state = chunked_linear_attention(*first, spec, positions=library(starts + np.arange(4)))
    assert np.asarray(state.position).tolist() == [4, FAR + 4]
    rest = [x[..., 4:, :] for x in arrays]
    ours, state = chunked_linear_attention(*rest, spec, state=state)
    assert np.asarray(state.position).tolist() == [9, FAR + 9]
    wanted = linear_attention(*arrays, spec, positions=library(starts + np.arange(9)))
    np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted)[..., 4:, :], rtol=0, atol=1e-12)


@LIBRARIES
def test_the_position_behind_the_largest_of_a_narrow_type(library):
    arrays = list(map(library, qkv(4, 8)))
    positions = library(np.arange(252, 256, dtype=np.uint8))
    _, state = chunked_linear_attention(*arrays, Rotary(head_dim=8), positions=positions)
    assert int(state.position) == 256  # of uint8, 0 == 256 on torch


@LIBRARIES
def test_an_empty_piece_changes_nothing(library):
    arrays = list(map(library, qkv(2, 5, 8)))
    _, state = chunked_linear_attention(*arrays, Rotary(head_dim=8))
    nothing = [x[..., :0, :] for x in arrays]
    output, after = chunked_linear_attention(*nothing, Rotary(head_dim=8), state=state)
    assert output.shape == (2, 0, 8)
    assert after.position == 5
    np.testing.assert_array_equal(np.asarray(after.s), np.asarray(state.s))
    np.testing.assert_array_equal(np.asarray(after.z), np.asarray(state.z))


def test_the_state_of_16_bit_tokens_is_float32():
    arrays = [torch.from_numpy(x).bfloat16() for x in qkv(2, 300, 16)]
    output, state = chunked_linear_attention(*arrays, Rotary(head_dim=16))
    assert (output.dtype, state.s.dtype, state.z.dtype) == (
        torch.bfloat16, torch.float32, torch.float32,
    )  # fmt: skip
    exact = linear_attention(*[x.double() for x in arrays], Rotary(head_dim=16))
    torch.testing.assert_close(output.double(), exact, rtol=2.0**-8, atol=1e-5)


def test_what_a_state_cannot_hold_is_refused():
    q, k, v = qkv(4, 8)
    for spec in (
        Rotary(head_dim=8, axes=(0, 1, 0, 1)),
        scaled("dynamic", 8, 2.0, 4),
    ):
        with pytest.raises(ValueError, match="a state needs one position axis and frequencies"):
            chunked_linear_attention(q, k, v, spec)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"chunk_size must be >= 1 token, got {size}"):
            chunked_linear_attention(q, k, v, chunk_size=size)


# --- gradients ---


def test_gradients_flow_through_the_state():
    arrays = [torch.from_numpy(x).requires_grad_() for x in qkv(6, 4)]
    spec = Rotary(head_dim=4)
    whole = torch.autograd.grad(linear_attention(*arrays, spec)[3:].sum(), arrays)
    _, state = chunked_linear_attention(*[x[:3] for x in arrays], spec)
    assert isinstance(state, LinearState)
    output, _ = chunked_linear_attention(*[x[3:] for x in arrays], spec, state=state)
    pieces = torch.autograd.grad(output.sum(), arrays)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-13)
