"""The law of the source documents as tests, in the order in which they state it.

The oracles are complex numbers, dense matrices and many-digit arithmetic: never the formula of the
package. Section numbers are those of RoFormer (arXiv 2104.09864).
"""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import as_complex

import rotary
from rotary import Rotary, layouts
from rotary.kernels import numpy as reference

TABLE = 2.0**-24  # a float32 table entry is at most this far from the cosine of its turns
STEP = math.tau * 2.0**-65  # and the turns at most this far from the frequency, per token
EPS = 2.0**-52
LAYOUTS = ("interleaved", "half")
FAR = 2**39

examples = settings(max_examples=50, deadline=None, derandomize=True)
words = st.integers(0, 2**64 - 1)
places = st.integers(-FAR, FAR)
offsets = st.sampled_from([0, 1, -1, 4096, 131_071, 10**9, -(10**9), 2**38])


def angles(spec: Rotary, *positions: int) -> np.ndarray:
    """m theta_i in [0, 2 pi), from 60-digit arithmetic: (positions, pairs) float64."""
    with mpmath.workdps(60):
        turn = 2 * mpmath.pi
        return np.array(
            [[float(mpmath.mpf(w) * m % turn) for w in rotary.inv_freq(spec)[0]] for m in positions]
        )


def rotated(spec: Rotary, x: np.ndarray, *positions: int) -> np.ndarray:
    where = np.array(positions, np.int64)
    return rotary.apply(spec, x, positions=where, allow_negative=True)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# --- the derivation: boundary, norm, distance ---


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_position_0_is_the_identity(layout, dtype):
    spec = Rotary(head_dim=64, rotary_dim=48, start=8, layout=layout)
    x = draw(2, 3, 5, 64).astype(dtype)
    np.testing.assert_array_equal(rotated(spec, x, *[0] * 5), x)
    tensor = torch.from_numpy(x)
    same = rotary.apply(spec, tensor, positions=torch.zeros(5, dtype=torch.int64))
    assert torch.equal(same, tensor)


@examples
@given(places)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_of_every_pair_is_kept(layout, m):
    spec, x = Rotary(head_dim=32, layout=layout), draw(1, 32)
    before = np.abs(as_complex(x, layout))
    after = np.abs(as_complex(rotated(spec, x, m), layout))
    np.testing.assert_allclose(after, before, rtol=2 * TABLE)  # both entries are rounded


@examples
@given(st.integers(0, 5000), st.integers(0, 5000), offsets)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_score_depends_on_the_distance_alone(layout, m, n, offset):
    spec = Rotary(head_dim=32, layout=layout)
    q, k = draw(1, 32, seed=1), draw(1, 32, seed=2)
    near = (rotated(spec, q, m) * rotated(spec, k, n)).sum()
    far = (rotated(spec, q, m + offset) * rotated(spec, k, n + offset)).sum()
    product = as_complex(q, layout) * as_complex(k, layout).conj()
    wanted = (product * np.exp(1j * angles(spec, m - n))).real.sum()  # equation 35
    bound = 4 * TABLE * np.linalg.norm(q) * np.linalg.norm(k)
    np.testing.assert_allclose([near, far], wanted, rtol=0, atol=bound)


def test_the_angle_is_an_arithmetic_progression():
    spec = Rotary(head_dim=16)
    turns = rotary.turns(spec).astype(object)  # Python integers do not wrap
    for m in (1, 2, 3, 1000):
        table = rotary.cos_sin(spec, np.array([m]))
        angle = np.arctan2(table[1][0], table[0][0]) / (2 * np.pi) % 1
        wanted = np.array([int(m * t) % 2**64 / 2**64 for t in turns])
        distance = np.abs((angle - wanted + 0.5) % 1 - 0.5)
        assert (distance < TABLE).all()


# --- section 3.2.1: the plane ---


@pytest.mark.parametrize("m", [1, 7, 4096, -5])
def test_complex_matrix_and_elementwise_forms_agree(m):
    spec, x = Rotary(head_dim=2, layout="interleaved"), np.array([[0.6, -1.7]])
    (angle,) = angles(spec, m)[0]
    matrix = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    number = complex(*x[0]) * np.exp(1j * angle)
    np.testing.assert_allclose(matrix @ x[0], [number.real, number.imag], rtol=4 * EPS)
    np.testing.assert_allclose(rotated(spec, x, m)[0], matrix @ x[0], atol=2 * TABLE * 2, rtol=0)


@examples
@given(words, words)
def test_rotations_add_as_integers(m, n):
    turns = rotary.turns(Rotary(head_dim=64))
    one = np.array([[1]])
    scale = np.ones(1)
    both = np.uint64(m) * turns + np.uint64(n) * turns
    place = np.array([[(m + n) % 2**64]], np.uint64).view(np.int64)
    together = reference.tables(place, turns[None], scale, (), False)  # R_{m+n}
    in_turn = reference.tables(one, both[None], scale, (), False)  # R_m R_n
    np.testing.assert_array_equal(np.uint64((m + n) % 2**64) * turns, both)
    np.testing.assert_array_equal(together, in_turn)


@examples
@given(words, words, words)
def test_rotations_are_associative_and_have_an_inverse(a, b, c):
    turns = rotary.turns(Rotary(head_dim=64, base=5e5))
    ra, rb, rc = (np.uint64(m) * turns for m in (a, b, c))
    np.testing.assert_array_equal((ra + rb) + rc, ra + (rb + rc))
    np.testing.assert_array_equal(ra + np.uint64(-a % 2**64) * turns, np.zeros_like(turns))


@examples
@given(st.integers(1, 2**63 - 1))
def test_the_transpose_is_the_rotation_back(m):
    turns = rotary.turns(Rotary(head_dim=64))
    there, back = np.array([[m]]), np.array([[-m]])
    np.testing.assert_array_equal(back[0].astype(np.uint64) * turns, -(np.uint64(m) * turns))
    cos, sin = reference.tables(there, turns[None], np.ones(1), (), False)
    np.testing.assert_array_equal(
        reference.tables(back, turns[None], np.ones(1), (), False), (cos, -sin)
    )
    ours = rotary.cos_sin(Rotary(head_dim=64), back[0], allow_negative=True)
    np.testing.assert_allclose(ours, (cos[0], -sin[0]), rtol=0, atol=2 * TABLE)


FAST = {"inv_freq": [7.0, -0.1, 1e9, 1e15, 1e30, 1e45, 1e60, 1e75]}  # whole turns drop out


@pytest.mark.parametrize(
    "spec",
    [Rotary(128, base=5e5), Rotary(16, schedule="custom", params=FAST)],
    ids=["paper", "fast"],
)
def test_turns_are_the_frequencies_rounded_once(spec):
    with mpmath.workdps(200):
        exact = [mpmath.mpf(w) / (2 * mpmath.pi) * 2**64 for w in rotary.inv_freq(spec)[0].tolist()]
        wanted = [int(mpmath.nint(value)) % 2**64 for value in exact]
    assert rotary.turns(spec).tolist() == wanted


# --- section 3.2.2: the general form ---


def block_diagonal(spec: Rotary, m: int) -> np.ndarray:
    """R^d_{Theta, m} as the paper prints it, for interleaved pairs."""
    matrix = np.zeros((spec.head_dim, spec.head_dim))
    for i, angle in enumerate(angles(spec, m)[0]):
        cos, sin = math.cos(angle), math.sin(angle)
        matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[cos, -sin], [sin, cos]]
    return matrix


@pytest.mark.parametrize("m", [0, 1, 511, 131_071, 2**39, -77])
def test_the_rotation_is_the_block_diagonal_matrix(m):
    spec = Rotary(head_dim=16, layout="interleaved")
    ours = rotated(spec, np.eye(16), *[m] * 16).T  # row j of the result is R e_j
    wanted = block_diagonal(spec, m)
    np.testing.assert_allclose(ours, wanted, atol=TABLE + abs(m) * STEP, rtol=0)
    assert not ours[wanted == 0].any()  # sparse: nothing leaks between pairs
    np.testing.assert_allclose(ours.T @ ours, np.eye(16), atol=4 * TABLE, rtol=0)
    assert np.linalg.det(ours) == pytest.approx(1, abs=16 * 2 * TABLE)


@pytest.mark.parametrize(("head_dim", "base"), [(2, 1e4), (64, 1e4), (128, 5e5), (96, 10.0)])
def test_frequencies_are_a_geometric_ladder(head_dim, base):
    inv_freq, amplitude = rotary.inv_freq(Rotary(head_dim=head_dim, base=base))
    with mpmath.workdps(40):  # i = 1 .. d/2 as the paper counts
        wanted = [
            mpmath.mpf(base) ** (-2 * mpmath.mpf(i - 1) / head_dim)
            for i in range(1, head_dim // 2 + 1)
        ]
    np.testing.assert_allclose(inv_freq, np.array(wanted, float), rtol=4 * EPS)
    assert inv_freq[0] == 1.0
    assert amplitude == 1.0


def test_wavelengths_run_from_2_pi_to_2_pi_base():
    wavelengths = 2 * np.pi / rotary.inv_freq(Rotary(head_dim=128))[0]
    assert wavelengths[0] == 2 * np.pi
    assert wavelengths[-1] == pytest.approx(2 * math.pi * 1e4 ** (126 / 128), rel=4 * EPS)
    assert (np.diff(wavelengths) > 0).all()
    slower = 2 * np.pi / rotary.inv_freq(Rotary(head_dim=128, base=1e6))[0]
    assert (slower[1:] > wavelengths[1:]).all()  # a larger base turns more slowly


# --- the two layouts ---


class Interleaved:
    """The elementwise form of the paper: channels repeated in place, neighbours swapped."""

    @staticmethod
    def turn(x: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
        seq, width = x.shape[-2:]
        steps = 1 / base ** (torch.arange(0, width, 2).float() / width)
        table = torch.arange(seq).float()[:, None] * steps.repeat_interleave(2)
        swapped = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        return x * table.cos() + swapped * table.sin()


class Half:
    """The form of Llama: channels repeated as a block, halves swapped."""

    @staticmethod
    def turn(x: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
        seq, width = x.shape[-2:]
        steps = 1 / base ** (torch.arange(0, width, 2).float() / width)
        table = torch.arange(seq).float()[:, None] * steps.repeat(2)
        swapped = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
        return x * table.cos() + swapped * table.sin()


@pytest.mark.parametrize(("layout", "form"), [("interleaved", Interleaved), ("half", Half)])
def test_both_elementwise_forms_bit_for_bit(layout, form):
    x = torch.from_numpy(draw(2, 4, 512, 64)).float()
    spec = Rotary(head_dim=64, layout=layout)
    assert torch.equal(rotary.apply(spec, x, precision="float32"), form.turn(x))


def test_rows_of_the_paper_and_of_llama():
    d, m = 6, 3
    q = draw(1, d)
    theta = [10_000.0 ** (-2 * i / d) for i in range(d // 2)]
    paper, llama = np.empty(d), np.empty(d)
    for i, t in enumerate(theta):
        cos, sin = math.cos(m * t), math.sin(m * t)
        paper[2 * i] = q[0, 2 * i] * cos - q[0, 2 * i + 1] * sin
        paper[2 * i + 1] = q[0, 2 * i] * sin + q[0, 2 * i + 1] * cos
        llama[i] = q[0, i] * cos - q[0, i + d // 2] * sin
        llama[i + d // 2] = q[0, i] * sin + q[0, i + d // 2] * cos
    bound = 4 * TABLE * np.abs(q).max()
    for layout, wanted in (("interleaved", paper), ("half", llama)):
        ours = rotated(Rotary(head_dim=d, layout=layout), q, m)[0]
        np.testing.assert_allclose(ours, wanted, atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rotary_dim", "start"), [(64, 0), (32, 0), (32, 16)])
def test_layouts_are_one_rotation_up_to_order(dtype, rotary_dim, start):
    x = torch.from_numpy(draw(1, 2, 33, 64)).to(dtype)
    order = torch.from_numpy(
        layouts.channel_permutation(64, "interleaved", "half", rotary_dim=rotary_dim, start=start)
    )
    ours = {
        layout: Rotary(head_dim=64, rotary_dim=rotary_dim, start=start, layout=layout)
        for layout in LAYOUTS
    }
    moved = rotary.apply(ours["half"], x[..., order])
    assert torch.equal(moved, rotary.apply(ours["interleaved"], x)[..., order])
    mixed = Rotary(64, rotary_dim, start, layout="interleaved", out_layout="half")
    assert torch.equal(rotary.apply(mixed, x), moved)


def scores(spec: Rotary, x: np.ndarray, w_q: np.ndarray, w_k: np.ndarray) -> np.ndarray:
    """Scores of grouped queries: (query heads, seq, seq)."""
    q, k = ((x @ w.T).reshape(len(x), -1, spec.head_dim).swapaxes(0, 1) for w in (w_q, w_k))
    q, k = rotary.apply(spec, q, k)
    return q @ k.repeat(len(q) // len(k), axis=0).swapaxes(1, 2)


def test_permuted_projections_leave_every_score():
    x, w_q, w_k = draw(9, 24), draw(4 * 16, 24, seed=1), draw(2 * 16, 24, seed=2)
    slice_ = {"rotary_dim": 12, "start": 2}
    paper, llama = (Rotary(head_dim=16, layout=layout, **slice_) for layout in LAYOUTS)
    rows_q = layouts.row_permutation(4, 16, "interleaved", "half", **slice_)
    rows_k = layouts.row_permutation(2, 16, "interleaved", "half", **slice_)
    wanted = scores(paper, x, w_q, w_k)
    bound = 64 * EPS * np.abs(wanted).max()  # sums in another order
    np.testing.assert_allclose(scores(llama, x, w_q[rows_q], w_k[rows_k]), wanted, atol=bound)
    assert np.abs(scores(llama, x, w_q, w_k) - wanted).max() > 1  # unpermuted weights are wrong


# --- the libraries that the documents compare with ---


@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_equal_to_rotary_embedding_torch(rotary_dim):
    peer = pytest.importorskip("rotary_embedding_torch").RotaryEmbedding(dim=rotary_dim)
    q, k = (torch.from_numpy(draw(1, 8, 1024, 64, seed=seed)).float() for seed in (0, 1))
    spec = Rotary(head_dim=64, rotary_dim=rotary_dim, layout="interleaved")
    ours = rotary.apply(spec, q, k, precision="float32")
    for mine, x in zip(ours, (q, k), strict=True):
        assert torch.equal(mine, peer.rotate_queries_or_keys(x))


@pytest.mark.parametrize("first", [0, 1, 4000, 131_071 - 15, 10**6])
def test_equal_to_transformers(first):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    shape = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    config = LlamaConfig(**shape, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    q = torch.from_numpy(draw(2, 4, 16, 64)).float()
    k = torch.from_numpy(draw(2, 2, 16, 64, seed=1)).float()
    ids = torch.stack([torch.arange(first, first + 16), torch.arange(16)])
    cos, sin = LlamaRotaryEmbedding(config)(q, ids)
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    spec = Rotary(head_dim=64, base=5e5)
    ours = rotary.apply(spec, q, k, positions=ids, precision="float32")
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


# --- the transpose is the gradient ---

AMPLIFIED = {"inv_freq": [0.3, 0.02, 0.001, 1.0], "attention_factor": 1.37}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_layout", LAYOUTS)
def test_conjugate_is_the_transpose(layout, out_layout):
    spec = Rotary(8, layout=layout, out_layout=out_layout, schedule="custom", params=AMPLIFIED)
    x, y = draw(5, 8), draw(5, 8, seed=1)
    left = (rotary.apply(spec, x) * y).sum()
    right = (x * rotary.apply(spec, y, conjugate=True)).sum()
    assert left == pytest.approx(right, rel=64 * EPS)  # one table, sums in another order
    again = rotary.apply(spec, rotary.apply(spec, x), conjugate=True)
    np.testing.assert_allclose(again, 1.37**2 * x, rtol=0, atol=8 * TABLE * np.abs(x).max())
