"""Sinusoids, xPos with a fixed origin, RoPE-mixed, against complex numbers and the papers."""

import math

import numpy as np
import pytest
from attention_arrays import DTYPES, FAR, LIBRARIES, SHIFT, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import as_complex
from libraries import if_installed

from rotary import Rotary, apply, positions, rotate
from rotary.attention import (
    mixed_cos_sin,
    mixed_directions,
    sinusoidal,
    softmax_attention,
    xpos,
)

torch = if_installed("torch")

EPS = 2.0**-52


def scores_of(q, k):
    return np.asarray(q) @ np.asarray(k).swapaxes(-1, -2)


# --- the additive embedding ---


@pytest.mark.parametrize(("dim", "base"), [(2, 10_000.0), (64, 10_000.0), (96, 500.0)])
def test_sinusoidal_is_the_formula(dim, base):
    where = np.array([[0, 1, 2], [17, 511, 4096]])
    wanted = np.empty((2, 3, dim))
    for t in range(dim // 2):
        angle = where / base ** (2 * t / dim)
        wanted[..., 2 * t], wanted[..., 2 * t + 1] = np.sin(angle), np.cos(angle)
    ours = sinusoidal(where, dim, base)
    assert ours.dtype == np.float64
    # the quotient and the power are each rounded, which the position magnifies
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=4096 * 4 * EPS)


def test_fractions_are_the_formula_and_numbers_that_are_none_are_refused():
    where = np.array([-0.5, 1.5, 1000.25])
    wanted = np.stack((np.sin(where), np.cos(where), np.sin(where / 100), np.cos(where / 100)), -1)
    np.testing.assert_allclose(sinusoidal(where, 4), wanted, rtol=0, atol=1000 * 4 * EPS)
    np.testing.assert_array_equal(sinusoidal(np.arange(3.0), 4), sinusoidal([0, 1, 2], 4))
    for wrong in ([0.5, math.nan], [math.inf]):
        with pytest.raises(ValueError, match="positions must be finite"):
            sinusoidal(wrong, 4)
    with pytest.raises(TypeError, match="positions must be whole numbers, or float64"):
        sinusoidal(np.array([True]), 4)
    with pytest.raises(ValueError, match=f"positions must fit in int64, got {2**63}"):
        sinusoidal(np.array([2**63], np.uint64), 4)


@settings(max_examples=50, deadline=None, derandomize=True)
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


# --- xPos ---


@LIBRARIES
@DTYPES
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("scale_base", "gamma"), [(512.0, 0.4), (16.0, 1.0)])
def test_xpos_scores_are_those_of_the_paper(library, dtype, layout, scale_base, gamma):
    q, k = draw(30, 16, dtype=dtype), draw(30, 16, key=1, dtype=dtype)
    spec = Rotary(head_dim=16, layout=layout)
    turned = xpos(spec, library(q), library(k), scale_base=scale_base, gamma=gamma)
    theta = 10_000.0 ** (-np.arange(8) / 8)
    zeta = ((np.arange(8) / 8 + gamma) / (1 + gamma)) ** (1 / scale_base)
    distance = np.arange(30)[:, None] - np.arange(30)
    factors = zeta ** distance[..., None] * np.exp(1j * distance[..., None] * theta)
    products = as_complex(q, layout)[:, None] * as_complex(k, layout).conj()
    wanted = (products * factors).sum(axis=-1).real
    assert turned[0].dtype == turned[1].dtype == library(q).dtype
    # a factor above 1 magnifies the rounding of the keys; causal pairs, which are used, have none
    atol = SHIFT * np.tril((np.abs(products) * np.abs(factors)).sum(axis=-1)).max()
    np.testing.assert_allclose(np.tril(scores_of(*turned)), np.tril(wanted), rtol=0, atol=atol)


def test_xpos_scores_are_those_of_a_peer_on_a_whole_row():
    peer = pytest.importorskip("rotary_embedding_torch").RotaryEmbedding(
        dim=32, use_xpos=True, xpos_scale_base=64, cache_if_possible=False
    )
    q, k = (torch.from_numpy(draw(2, 3, 50, 32, key=key, dtype=np.float32)) for key in (0, 1))
    theirs = scores_of(*(x.detach() for x in peer.rotate_queries_and_keys(q, k)))
    ours = scores_of(*xpos(Rotary(head_dim=32, layout="interleaved"), q, k, scale_base=64))
    np.testing.assert_allclose(np.tril(ours), np.tril(theirs), rtol=0, atol=2e-4)


@LIBRARIES
@pytest.mark.parametrize("split", [1, 7, 20, 39])
def test_xpos_with_a_cache_is_the_whole_for_any_split(library, split):
    q, k, v = (library(draw(2, 40, 16, key=key)) for key in range(3))
    spec = Rotary(head_dim=16)
    whole = np.asarray(softmax_attention(*xpos(spec, q, k, scale_base=32), v))
    cached = np.asarray(xpos(spec, q[:, :split], k[:, :split], scale_base=32)[1])
    for token in range(split, 40):
        one = slice(token, token + 1)
        where = np.array([token])
        new_q, new_k = xpos(spec, q[:, one], k[:, one], positions=where, scale_base=32)
        cached = np.concatenate((cached, np.asarray(new_k)), axis=1)
        out = softmax_attention(new_q, library(cached), v[:, : token + 1], q_positions=where)
        np.testing.assert_allclose(np.asarray(out)[:, 0], whole[:, token], rtol=0, atol=1e-6)


def test_an_origin_that_moves_with_the_row_breaks_a_cache():
    """What the authors' code does: the middle of the row is the origin, and it moves."""
    q, k = draw(40, 16), draw(40, 16, key=1)
    spec, options = Rotary(head_dim=16), {"scale_base": 32}
    whole = scores_of(*xpos(spec, q, k, origin=20, **options))
    cached = xpos(spec, q[:30], k[:30], origin=15, **options)[1]
    new_q, _ = xpos(spec, q[30:], k[30:], positions=np.arange(30, 40), origin=20, **options)
    assert np.abs(scores_of(new_q, cached) - whole[30:, :30]).max() > 0.01
    cached = xpos(spec, q[:30], k[:30], origin=20, **options)[1]
    np.testing.assert_allclose(scores_of(new_q, cached), whole[30:, :30], rtol=0, atol=1e-12)


@LIBRARIES
@DTYPES
def test_xpos_attention_is_the_same_at_any_offset_and_origin(library, dtype):
    q, k, v = (library(draw(2, 40, 64, key=key, dtype=dtype)) for key in range(3))
    spec, where = Rotary(head_dim=64), np.arange(40)
    near = np.asarray(softmax_attention(*xpos(spec, q, k), v))
    unit = np.abs(np.asarray(v)).max()
    for offset, origin in [(FAR, FAR), (FAR, FAR + 20), (0, 20), (5, -300)]:
        turned = xpos(spec, q, k, positions=where + offset, origin=origin)
        ours = np.asarray(softmax_attention(*turned, v))
        np.testing.assert_allclose(ours, near, rtol=0, atol=SHIFT * unit)
    plain = np.asarray(softmax_attention(q, k, v, spec))
    assert np.abs(near - plain).max() > 0.001  # the decay is felt


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float16, 8), (torch.bfloat16, 64), (torch.float32, 64), (torch.float64, 512)],
)
def test_xpos_holds_up_to_the_limit_it_names(dtype, bits):
    limit = int(512 * bits / math.log2(3.5))  # zeta = (1 / 3.5)^(1 / 512) for gamma = 0.4
    x = torch.ones(2, 8, dtype=dtype)
    spec = Rotary(head_dim=8)
    q, k = xpos(spec, x, x, positions=torch.tensor([limit - 1, limit]))
    assert torch.isfinite(q).all()
    assert torch.isfinite(k).all()
    score, wanted = (q[1] @ k[1]).item(), 8.0
    assert score == pytest.approx(wanted, rel=8 * max(torch.finfo(dtype).eps, 2.0**-23))
    with pytest.raises(ValueError, match=f"{limit + 1} tokens from the origin, .* allow {limit}: "):
        xpos(spec, x, x, positions=torch.tensor([0, limit + 1]))
    xpos(spec, x, x, positions=torch.tensor([0, limit + 1]), origin=limit)


def test_xpos_refuses_what_makes_no_sense():
    x = draw(3, 8)
    for name in ("scale_base", "gamma"):
        with pytest.raises(ValueError, match="scale_base and gamma must be > 0"):
            xpos(Rotary(head_dim=8), x, x, **{name: 0.0})
    for types in ((np.float32, np.float16), (np.float16, np.float32)):
        with pytest.raises(ValueError, match="a position is 16000 tokens from the origin"):
            xpos(Rotary(head_dim=8), *map(x[:1].astype, types), positions=[16_000])
    with pytest.raises(ValueError, match="xPos needs one position axis, the spec has 2"):
        xpos(Rotary(head_dim=8, axes=(0, 0, 1, 1)), x, x)
    assert xpos(Rotary(head_dim=8), x[:0], x[:0])[0].shape == (0, 8)


def test_gradients_reach_q_and_k_through_xpos():
    arrays = [torch.from_numpy(draw(1, 2, 5, 4, key=key)).requires_grad_() for key in (0, 1)]
    spec = Rotary(head_dim=4)
    assert torch.autograd.gradcheck(lambda q, k: xpos(spec, q, k, scale_base=8), arrays)


# --- RoPE-mixed ---

PHASES = [0.0, 0.3, 2.0]


def test_directions_start_as_those_of_the_authors():
    """Two bundles of one ladder a head, one along its phase, one at a right angle to it."""
    ours = mixed_directions(16, PHASES, base=10.0)
    assert ours.shape == (2, 3, 8)
    for head, phase in enumerate(PHASES):
        for t in range(4):
            size = 1 / 10.0 ** (4 * t / 16)
            pair = [size * math.cos(phase), size * math.sin(phase)]
            np.testing.assert_allclose(ours[:, head, t], pair, atol=1e-15)
            turned = [size * math.cos(phase + math.pi / 2), size * math.sin(phase + math.pi / 2)]
            np.testing.assert_allclose(ours[:, head, 4 + t], turned, atol=1e-15)
    for head_dim, phases in [(6, [0.0]), (0, [0.0]), (8, 0.0)]:
        with pytest.raises(ValueError, match="head_dim must be a multiple of 4 and phases"):
            mixed_directions(head_dim, phases)


def test_phase_zero_is_axial_rope():
    """The library's own axial schedule reads (row, column); x is the column."""
    x, where = draw(1, 2, 12, 16), positions.grid_2d(3, 4)
    axial = Rotary(
        head_dim=16, base=10.0, schedule="axial", params={"num_axes": 2}, axes=(0,) * 4 + (1,) * 4
    )
    wanted = apply(axial, x, positions=where)
    tables = mixed_cos_sin(mixed_directions(16, [0.0, 0.0]), where)
    np.testing.assert_allclose(rotate(x, *tables, layout="half"), wanted, rtol=0, atol=1e-6)


@LIBRARIES
@pytest.mark.parametrize("fraction", [False, True], ids=["whole", "fractions"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_mixed_scores_turn_by_the_step_in_both_directions(library, fraction, layout):
    q, k = draw(2, 3, 12, 16), draw(2, 3, 12, 16, key=1)
    where = positions.grid_2d(3, 4)
    where = where / 2 + 0.25 if fraction else where
    directions = mixed_directions(16, PHASES)
    cos, sin = mixed_cos_sin(library(directions), library(where))
    assert tuple(cos.shape) == (1, 3, 12, 8)
    turned = rotate((library(q), library(k)), cos, sin, layout=layout)
    step = where[:, None] - where[None]
    angles = np.einsum("mna,aht->hmnt", step, directions)
    pairs = [as_complex(x, layout) for x in (q, k)]
    wanted = np.einsum("bhmt,bhnt,hmnt->bhmn", pairs[0], pairs[1].conj(), np.exp(1j * angles)).real
    np.testing.assert_allclose(scores_of(*turned), wanted, rtol=0, atol=1e-12)


@LIBRARIES
@DTYPES
def test_mixed_attention_is_the_same_at_any_offset(library, dtype):
    q, k, v = (library(draw(2, 3, 20, 32, key=key, dtype=dtype)) for key in range(3))
    directions = library((20 * draw(2, 3, 16, key=5)).astype(dtype))  # learned: any size and sign
    where = positions.grid_2d(4, 5)

    def attend(offset):
        batch = np.stack([where + offset, where - offset])
        tables = mixed_cos_sin(directions, library(batch))
        return np.asarray(
            softmax_attention(*rotate((q, k), *tables, layout="half"), v, causal=False)
        )

    near, unit = attend([0, 0]), np.abs(np.asarray(v)).max()
    for offset in ([FAR, 0], [0, FAR], [FAR, -FAR], [2**62, 12_345]):
        np.testing.assert_allclose(attend(offset), near, rtol=0, atol=SHIFT * unit)


def test_every_row_of_a_batch_has_its_own_grid():
    directions = mixed_directions(8, PHASES)
    batch = np.stack([positions.grid_2d(2, 3), positions.grid_2d(3, 2)])
    cos, sin = mixed_cos_sin(directions, batch)
    for row, where in enumerate(batch):
        np.testing.assert_array_equal(cos[row], mixed_cos_sin(directions, where)[0][0])
        np.testing.assert_array_equal(sin[row], mixed_cos_sin(directions, where)[1][0])


@pytest.mark.parametrize("kind", [torch.int64, torch.float64])
def test_gradients_reach_the_directions(kind):
    directions = torch.from_numpy(mixed_directions(4, PHASES[1:])).requires_grad_()
    q, k, v = (torch.from_numpy(draw(1, 2, 4, 4, key=key)).requires_grad_() for key in range(3))
    where = torch.from_numpy(positions.grid_2d(2, 2)).to(kind)

    def attend(directions, q, k, v):
        tables = mixed_cos_sin(directions, where)
        return softmax_attention(*rotate((q, k), *tables, layout="half"), v, causal=False)

    assert torch.autograd.gradcheck(attend, (directions, q, k, v))


def test_learned_directions_of_float32_get_float32_gradients():
    directions = torch.nn.Parameter(torch.from_numpy(mixed_directions(8, PHASES)).float())
    cos, sin = mixed_cos_sin(directions, torch.from_numpy(positions.grid_2d(2, 3)))
    assert cos.dtype == sin.dtype == torch.float32
    (cos.sum() + 2 * sin.sum()).backward()
    angles = np.einsum("na,aht->hnt", positions.grid_2d(2, 3), directions.detach().double().numpy())
    slopes = 2 * np.cos(angles) - np.sin(angles)
    wanted = np.einsum("hnt,na->aht", slopes, positions.grid_2d(2, 3))
    np.testing.assert_allclose(directions.grad.numpy(), wanted, rtol=0, atol=1e-5)


def test_mixed_shapes_that_do_not_fit_are_refused():
    directions = mixed_directions(8, PHASES)
    for theirs, where in [
        (directions, np.zeros((5, 3))),
        (directions, np.zeros(2)),
        (directions[:, 0], np.zeros((5, 2))),
    ]:
        with pytest.raises(ValueError, match=r"directions must be \(axes, heads, pairs\)"):
            mixed_cos_sin(theirs, where)


def test_xpos_is_compiled_by_torch():
    pytest.importorskip("torch")
    x = torch.from_numpy(draw(2, 4, 6, 32, dtype=np.float32))
    spec = Rotary(head_dim=32)
    compiled = torch.compile(lambda x: xpos(spec, x, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), xpos(spec, x, x))


def test_xpos_is_mapped_over_rows_with_positions_of_their_own():
    """It asked for the largest position, which vmap does not allow."""
    spec, q = Rotary(head_dim=8), torch.from_numpy(draw(3, 2, 5, 8))
    positions = torch.arange(15).reshape(3, 5)
    mapped = torch.vmap(lambda q, positions: xpos(spec, q, q, positions=positions))
    torch.testing.assert_close(mapped(q, positions), xpos(spec, q, q, positions=positions))
    with pytest.raises(ValueError, match="a position is 1000014 tokens from the origin"):
        mapped(q, positions + 10**6)
