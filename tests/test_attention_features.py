"""Linear attention over all tokens and with any feature maps, and the features of Performer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_arrays import draw, qkv

from rotary import Rotary
from rotary.attention import (
    FavorFeatures,
    chunked_linear_attention,
    favor_features,
    linear_attention,
    recurrent_linear_attention,
)

pytestmark = pytest.mark.usefixtures("xla_in_less_time")


def relu(x):
    return x * (x > 0)


def square_and_one(x):
    return x * x + 1


def squares_of_both(x):
    """Twice as many features as channels."""
    both = np.concatenate if isinstance(x, np.ndarray) else torch.cat
    return both([x * x, x**4 + 0.5], -1)


MAPS = {
    "squares": (square_and_one, square_and_one, 12),
    "two maps": (square_and_one, lambda x: x**4, 12),
    "relu and another": (relu, square_and_one, 12),
    "twice as wide": (squares_of_both, squares_of_both, 24),
    "favor": (favor_features(12, 20, seed=1),) * 2 + (20,),
}


def sums(q, k, v, angles, maps, is_seen):
    """Equation 19 pair by pair, complex, float64; is_seen(m, n)."""
    phi, varphi = maps
    a, b = phi(q), varphi(k)
    a_turned, b_turned = ((x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles) for x in (a, b))
    out = np.zeros(v.shape)
    for m in range(q.shape[-2]):
        total, norm = 0.0, 0.0
        for n in filter(lambda n: is_seen(m, n), range(k.shape[-2])):
            weight = (a_turned[..., m, :] * b_turned[..., n, :].conj()).real.sum(-1)
            total = total + weight[..., None] * v[..., n, :]
            norm = norm + (a[..., m, :] * b[..., n, :]).sum(-1)[..., None]
        out[..., m, :] = total / norm
    return out


def case(name, seq=7):
    phi, varphi, features = MAPS[name]
    arrays = qkv(2, 3, seq, 12, dtype=np.float32, width=5)
    at = np.array([3, 4, 9, 100, 7, 8, 0, 1, 2])[:seq]
    angles = np.outer(at, 10_000.0 ** (-np.arange(0, features, 2) / features))
    options = {"positions": at, "q_features": phi, "k_features": varphi}
    return arrays, Rotary(head_dim=features, layout="interleaved"), angles, options, (phi, varphi)


# JAX compiles every operation of its own, so one pair of maps is enough for it
EACH = pytest.mark.parametrize(
    ("library", "name"),
    [
        *((library, name) for library in (np.asarray, torch.from_numpy) for name in MAPS),
        (jnp.asarray, "favor"),
    ],
)


@EACH
@pytest.mark.parametrize("causal", [True, False])
def test_any_maps_over_all_or_earlier_tokens_are_equation_19(library, name, causal):
    arrays, spec, angles, options, maps = case(name)
    exact = [x.astype(np.float64) for x in arrays]
    wanted = sums(*exact, angles, maps, lambda m, n: n <= m or not causal)
    ours = linear_attention(*map(library, arrays), spec, causal=causal, **options)
    assert np.asarray(ours).dtype == np.float32
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=3e-5, atol=3e-5)


@EACH
def test_the_causal_forms_agree_with_any_maps(library, name):
    arrays, spec, _, options, _ = case(name)
    arrays = [library(x) for x in arrays]
    by_pairs = np.asarray(linear_attention(*arrays, spec, **options))
    by_tokens = recurrent_linear_attention(*arrays, spec, **options)
    np.testing.assert_allclose(np.asarray(by_tokens), by_pairs, rtol=3e-5, atol=3e-5)
    in_chunks, state = chunked_linear_attention(*arrays, spec, chunk_size=3, **options)
    np.testing.assert_allclose(np.asarray(in_chunks), by_pairs, rtol=3e-5, atol=3e-5)
    assert state.s.shape == (2, 3, spec.head_dim, 5)
    assert state.z.shape == (2, 3, spec.head_dim)


def test_over_all_tokens_nothing_depends_on_their_order():
    q, k, v = qkv(9, 8)
    order, spec = np.random.default_rng(0).permutation(9), Rotary(head_dim=8)
    first = linear_attention(q, k, v, spec, causal=False)
    mixed = linear_attention(
        q[order], k[order], v[order], spec, causal=False, positions=np.arange(9)[order]
    )
    np.testing.assert_allclose(mixed, first[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["squares", "twice as wide", "favor"])
def test_gradients_with_any_maps_are_those_of_differences(causal, name):
    phi, varphi, _ = MAPS[name]
    if name == "favor":
        phi = varphi = favor_features(4, 6, seed=0)
    spec = Rotary(head_dim={"squares": 4, "twice as wide": 8, "favor": 6}[name])
    arrays = [torch.from_numpy(x).requires_grad_() for x in qkv(5, 4)]
    assert torch.autograd.gradcheck(
        lambda *x: linear_attention(*x, spec, causal=causal, q_features=phi, k_features=varphi),
        arrays,
    )


def test_jax_traces_and_differentiates_it_as_torch_does():
    arrays, phi = qkv(6, 8, dtype=np.float32), favor_features(8, 8, seed=3)
    spec = Rotary(head_dim=8)

    def total(attended):
        return (attended * attended).sum()

    def in_jax(q, k, v):
        return total(linear_attention(q, k, v, spec, causal=False, q_features=phi, k_features=phi))

    ours = jax.jit(jax.grad(in_jax, argnums=(0, 1, 2)))(*map(jnp.asarray, arrays))
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
    attended = linear_attention(*tensors, spec, causal=False, q_features=phi, k_features=phi)
    theirs = torch.autograd.grad(total(attended), tensors)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(mine), other.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["np", "torch"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_denominator_of_zero_gives_zeros(library, causal):
    q = np.array([[1.0, 0.0], [-1.0, -1.0]])
    k = np.array([[0.0, 1.0], [0.0, 1.0]])  # orthogonal to the first q; relu of the second q is 0
    ours = linear_attention(
        *map(library, (q, k, k)), Rotary(head_dim=2), causal=causal, q_features=relu,
        k_features=relu,
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(ours), np.zeros((2, 2)))


def test_feature_maps_that_do_not_fit_are_refused():
    q, k, v = qkv(3, 4)
    spec = Rotary(head_dim=4)
    with pytest.raises(ValueError, match=r"k_features must be >= 0, got -"):
        linear_attention(q, k, v, spec, k_features=lambda x: x)
    with pytest.raises(ValueError, match=r"q_features must give \(3,\) \+ \(features,\)"):
        linear_attention(q, k, v, spec, q_features=lambda x: (x * x).sum(-1))
    with pytest.raises(ValueError, match="q_features gives 4 features and k_features 8"):
        linear_attention(q, k, v, spec, k_features=squares_of_both)
    phi = favor_features(4, 8, seed=0)
    with pytest.raises(ValueError, match="head_dim"):  # a spec of as many channels as features
        linear_attention(q, k, v, spec, q_features=phi, k_features=phi)
    with pytest.raises(ValueError, match="these features are for head_dim 4, got x of 6"):
        phi(draw(3, 6))
    for sizes in ((0, 8), (4, 0), (4.0, 8), (True, 8)):
        with pytest.raises(ValueError, match="must be a whole number >= 1"):
            favor_features(*sizes, seed=0)


# --- FAVOR+ ---


def test_directions_are_orthogonal_in_blocks_and_as_long_as_normal_vectors():
    directions = favor_features(16, 40, seed=5).directions
    assert directions.shape == (40, 16)
    for start in (0, 16, 32):
        products = directions[start : start + 16] @ directions[start : start + 16].T
        np.testing.assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-12)
    many = favor_features(16, 16 * 500, seed=5).directions
    squares = (many**2).sum(-1)  # chi squared of 16: mean 16, variance 32
    assert abs(squares.mean() - 16) < 5 * (32 / 8000) ** 0.5
    assert abs(squares.var() - 32) < 3
    assert np.abs(many.mean(0)).max() < 5 / 8000**0.5  # evenly distributed: no preferred side


def test_products_of_features_have_the_mean_of_softmax():
    q, k = draw(5, 8, key=1), draw(5, 8, key=2)
    wanted = np.exp(q @ k.T / np.sqrt(8))

    def products(seed):
        phi = favor_features(8, 64, seed=seed)
        return phi(q) @ phi(k).T

    drawn = np.stack([products(seed) for seed in range(400)])
    error = drawn.std(0) / 20
    assert (np.abs(drawn.mean(0) - wanted) < 5 * error).all()
    assert all((phi >= 0).all() for phi in (favor_features(8, 64, seed=0)(q),))


def test_orthogonal_directions_have_a_smaller_error_than_independent_ones():
    q, k = draw(20, 8, key=1), draw(20, 8, key=2)
    wanted = np.exp(q @ k.T / np.sqrt(8))

    def squared_error(directions):
        phi = FavorFeatures(directions)
        return ((phi(q) @ phi(k).T - wanted) ** 2).mean()

    both = [
        (
            squared_error(favor_features(8, 8, seed=seed).directions),
            squared_error(draw(8, 8, key=seed)),
        )
        for seed in range(1000)
    ]
    orthogonal, independent = np.median(np.array(both), axis=0)
    assert orthogonal < independent


def test_many_features_come_near_softmax_attention():
    q, k, v = qkv(12, 8)
    scores = np.exp(q @ k.T / np.sqrt(8))
    wanted = scores / scores.sum(-1, keepdims=True) @ v
    errors = []
    for num_features in (64, 4096):
        maps = [favor_features(8, num_features, seed=seed) for seed in range(5)]
        outputs = [
            linear_attention(q, k, v, causal=False, q_features=phi, k_features=phi) for phi in maps
        ]
        errors.append(np.sqrt(np.mean((np.stack(outputs) - wanted) ** 2)))
    # 64 times as many features: an error of about 1 / 8 in the limit
    assert errors[1] < 0.1 < errors[0]


def test_compiled_and_exported_programs_hold_the_directions():
    spec, phi = Rotary(head_dim=8), favor_features(4, 8, seed=0)
    q, k = (torch.from_numpy(draw(2, 5, 4, key=key)) for key in (1, 2))

    class Block(torch.nn.Module):
        def forward(self, q, k):
            return linear_attention(q, k, k, spec, q_features=phi, k_features=phi)

    compiled = torch.compile(Block(), fullgraph=True, backend="aot_eager")
    for program in (compiled, torch.export.export(Block(), (q, k)).module()):
        torch.testing.assert_close(program(q, k), Block()(q, k))


def test_a_compiled_program_continues_a_state_whose_position_is_a_tensor():
    """Dynamo does not take isinstance with a union of NumPy's types."""
    q, spec = torch.from_numpy(draw(3, 2, 5, 8, key=1)), Rotary(head_dim=8)

    def attend(state):
        return chunked_linear_attention(q, q, q, spec, state=state)

    _, state = attend(None)
    state = state._replace(position=torch.tensor([5, 6, 7]))
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(state), attend(state))
