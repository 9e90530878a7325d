"""Softmax attention on NumPy and torch alike: shared heads, masks, log n, rotary values, p-RoPE."""

import math
import re

import numpy as np
import pytest
from attention_arrays import DTYPES, FAR, LIBRARIES, SHIFT, draw, qkv
from libraries import if_installed
from programs import alone
from published import scaled

from rotary import Rotary, apply, inv_freq
from rotary.attention import (
    distance_attention,
    linear_attention,
    scale_by_log_n,
    self_extend,
    softmax_attention,
    vo_rope_attention,
    xpos,
)

torch = if_installed("torch")

LAYOUTS = pytest.mark.parametrize("layout", ["half", "interleaved"])


def rotations(positions, frequencies):
    """One rotation matrix per position, half layout, from its cosines and sines: (seq, d, d)."""
    pairs = len(frequencies)
    turned = np.zeros((len(positions), 2 * pairs, 2 * pairs))
    for row, m in enumerate(positions):
        for i, frequency in enumerate(frequencies):
            c, s = math.cos(m * frequency), math.sin(m * frequency)
            turned[row, i, i] = turned[row, i + pairs, i + pairs] = c
            turned[row, i, i + pairs], turned[row, i + pairs, i] = -s, s
    return turned


def weights_by_sums(q, k, visible):
    """softmax(q k^T / sqrt d) for each query by a loop, zeros where nothing is visible."""
    weights = np.zeros((len(q), len(k)))
    for m in range(len(q)):
        exponents = [
            math.exp(q[m] @ k[n] / math.sqrt(len(q[m]))) for n in np.flatnonzero(visible[m])
        ]
        weights[m, visible[m]] = np.array(exponents) / sum(exponents)
    return weights


# --- one result on both libraries ---


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 2e-6), (np.float32, 2e-5)])
def test_softmax_attention_is_that_of_torch_and_transformers(dtype, rtol, causal):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    q, k, v = qkv(2, 3, 21, 32, dtype=dtype)
    config = LlamaConfig(hidden_size=96, num_attention_heads=3, head_dim=32)
    module = llama.LlamaRotaryEmbedding(config=config)
    cos, sin = module(torch.from_numpy(q), torch.arange(21)[None])
    rotated = llama.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *rotated, torch.from_numpy(v), is_causal=causal
    )
    ours = softmax_attention(q, k, v, Rotary(head_dim=32), causal=causal)
    # the float32 angles of transformers are off by 20 x 2^-24 at position 20
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=0, atol=rtol)


def test_tokens_added_to_a_cache_see_what_they_saw_before():
    q, k, v = qkv(2, 4, 10, 32)
    spec = Rotary(head_dim=32)
    whole = softmax_attention(q, k, v, spec)
    last = softmax_attention(q[..., 7:, :], k, v, spec, q_positions=np.arange(7, 10))
    np.testing.assert_allclose(last, whole[..., 7:, :], rtol=0, atol=100 * 2.0**-52)
    cut = softmax_attention(q[..., :7, :], k[..., :7, :], v[..., :7, :], spec)
    np.testing.assert_allclose(cut, whole[..., :7, :], rtol=0, atol=100 * 2.0**-52)


def test_positions_of_each_row_of_a_batch():
    q, k, v = qkv(3, 3, 3, 16)  # all sizes are equal: a mask that is broadcast wrongly fits
    spec = Rotary(head_dim=16)
    positions = np.array([[0, 1, 2], [2, 0, 1], [5, 9, 7]])
    wanted = [
        softmax_attention(q[row], k[row], v[row], spec, q_positions=where, k_positions=where)
        for row, where in enumerate(positions)
    ]
    ours = softmax_attention(q, k, v, spec, q_positions=positions, k_positions=positions)
    np.testing.assert_allclose(ours, np.stack(wanted), rtol=0, atol=100 * 2.0**-52)


BACKWARDS = {
    "softmax": lambda spec, x, p, **how: softmax_attention(
        *x, spec, q_positions=p, k_positions=p, **how),
    "values": lambda spec, x, p, **how: vo_rope_attention(
        *x, spec, spec, q_positions=p, k_positions=p, **how),
    "distances": lambda spec, x, p, **how: distance_attention(
        *x, spec, self_extend(4, 2), q_positions=p, k_positions=p, **how),
    "xpos": lambda spec, x, p, **how: softmax_attention(
        *xpos(spec, *x[:2], positions=p, **how), x[2]),
}  # fmt: skip


@LIBRARIES
@pytest.mark.parametrize("name", BACKWARDS)
def test_negative_positions_are_asked_for(name, library):
    spec, x = Rotary(head_dim=8), [library(each) for each in qkv(2, 9, 8)]
    wanted = BACKWARDS[name](spec, x, np.arange(9))
    ours = BACKWARDS[name](spec, x, np.arange(-6, 3), allow_negative=True)
    np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted), rtol=0, atol=SHIFT)
    with pytest.raises(ValueError, match=r"positions must be >= 0, got -[63]; pass allow_negative"):
        BACKWARDS[name](spec, x, np.arange(-6, 3))


@LIBRARIES
@pytest.mark.parametrize("last", [-3, 6.5])
def test_the_length_of_negative_and_fractional_positions(library, last):
    spec, x = scaled("dynamic", 8, 2.0, 4), [library(e) for e in qkv(1, 2, 3, 8)]
    where = library(np.array([last - 2, last - 1, last]))
    ours = softmax_attention(*x, spec, q_positions=where, k_positions=where, allow_negative=True)
    options = {"seq_len": max(0, int(last) + 1), "allow_negative": True}
    rotated = [apply(spec, each, positions=where, seq_dim=-2, **options) for each in x[:2]]
    wanted = softmax_attention(*rotated, x[2])
    np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted), rtol=0, atol=1e-14)


@LIBRARIES
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4), (3, 4), (2, 2, 4)])
def test_positions_and_counts_that_are_not_one_per_token_are_refused(library, shape):
    q = library(draw(*((2, 3, 2, 4, 8) if shape == (2, 4) else (2, 2, 4, 8))))
    p, where = library(np.ones(shape, np.int64)), re.escape(f"got {shape} beside (2, ")
    for name, call in (
        ("q_positions", lambda: softmax_attention(q, q, q, q_positions=p)),
        ("k_positions", lambda: softmax_attention(q, q, q, k_positions=p)),
        ("counts", lambda: scale_by_log_n(q, p, 10)),
    ):
        with pytest.raises(ValueError, match=f"{name} must be .*{where}"):
            call()


def test_what_is_no_spec_is_refused():
    q = draw(3, 8)
    for name, call in (
        ("spec", lambda: softmax_attention(q, q, q, 64)),
        ("value_spec", lambda: vo_rope_attention(q, q, q, 64)),
        ("spec", lambda: linear_attention(q, q, q, 64)),
        ("spec, the first argument,", lambda: xpos(64, q, q)),
    ):
        with pytest.raises(TypeError, match=f"^{name} must be a Rotary, got int: make one with "):
            call()


NARROW = pytest.mark.parametrize("kind", ["i1", "u1", "u2", "u4", "u8"])


@NARROW
def test_positions_of_a_narrow_type_hide_and_scale_as_others_do(kind):
    """Their differences are below 0, and the length behind 255 is 256: neither fits in the type."""
    arrays = qkv(2, 4, 8)
    spec = scaled("dynamic", 8, 2.0, 8)
    wide = np.arange(124, 128) if kind == "i1" else np.arange(252, 256)
    for attend in (
        lambda p, x: softmax_attention(*x, q_positions=p, k_positions=p),
        lambda p, x: softmax_attention(*x, spec, q_positions=p, k_positions=p, window=2),
        lambda p, x: vo_rope_attention(*x, spec, q_positions=p, k_positions=p),
    ):
        wanted = attend(wide, arrays)
        np.testing.assert_array_equal(attend(wide.astype(kind), arrays), wanted)
        tensors = [torch.from_numpy(x) for x in arrays]
        np.testing.assert_allclose(attend(wide.astype(kind), tensors), wanted, rtol=0, atol=1e-12)
        if kind in ("i1", "u1"):
            ours = attend(torch.from_numpy(wide.astype(kind)), tensors)
            np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-12)


@LIBRARIES
def test_positions_beyond_int64_are_refused(library):
    x, far = library(draw(2, 8)), np.array([0, 2**63], np.uint64)
    with pytest.raises(ValueError, match=f"positions must fit in int64, got {2**63}$"):
        softmax_attention(x, x, x, q_positions=library(far), k_positions=library(far))


def test_softmax_attention_of_an_empty_sequence():
    q, k, v = qkv(2, 0, 8)
    assert softmax_attention(q, k, v, Rotary(head_dim=8)).shape == (2, 0, 8)


@DTYPES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("given", [False, True], ids=["counted", "given"])
def test_numpy_and_torch_agree_for_every_number_of_key_heads(dtype, causal, kv_heads, lead, given):
    arrays = qkv(*lead, 6, 7, 16, dtype=dtype, kv_heads=kv_heads)
    positions = np.arange(7) + 5 if given else None
    options = {"q_positions": positions, "k_positions": positions, "causal": causal}
    ours = softmax_attention(*arrays, Rotary(head_dim=16), **options)
    theirs = softmax_attention(*map(torch.from_numpy, arrays), Rotary(head_dim=16), **options)
    assert ours.dtype == dtype
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=16 * np.finfo(dtype).eps)


@LIBRARIES
def test_query_heads_in_a_row_share_a_key_head(library):
    q, k, v = qkv(2, 6, 5, 8, kv_heads=2)
    spec = Rotary(head_dim=8)
    ours = softmax_attention(*map(library, (q, k, v)), spec)
    for head in range(6):
        alone = softmax_attention(q[:, head], k[:, head // 3], v[:, head // 3], spec)
        np.testing.assert_allclose(np.asarray(ours[:, head]), alone, rtol=0, atol=1e-14)


@LIBRARIES
def test_heads_that_cannot_be_shared_out_are_refused(library):
    arrays = qkv(2, 6, 5, 8, kv_heads=4)
    with pytest.raises(ValueError, match="q has 6 heads and k has 4: make the first a multiple"):
        softmax_attention(*map(library, arrays))


@LIBRARIES
def test_the_weights_are_those_of_a_loop_over_tokens(library):
    q, k, v = qkv(9, 8)
    moved = np.arange(9) * 3
    turned = rotations(moved, inv_freq(Rotary(head_dim=8))[0])
    turned_q, turned_k = (np.einsum("nij,nj->ni", turned, x) for x in (q, k))
    wanted = weights_by_sums(turned_q, turned_k, moved[None] <= moved[:, None]) @ v
    positions = {"q_positions": moved, "k_positions": moved}
    ours = softmax_attention(*map(library, (q, k, v)), Rotary(head_dim=8), **positions)
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=0, atol=1e-6)


@LIBRARIES
def test_a_query_that_sees_no_key_gives_zeros(library):
    arrays = map(library, qkv(3, 8))
    positions = {"q_positions": np.array([0, 5, 6]), "k_positions": np.array([3, 4, 5])}
    ours = np.asarray(softmax_attention(*arrays, **positions))
    np.testing.assert_array_equal(ours[0], np.zeros(8))
    assert np.abs(ours[1:]).min() > 0


@LIBRARIES
def test_attention_to_no_keys_gives_zeros(library):
    q, (_, k, v) = draw(2, 3, 8), qkv(2, 0, 8)
    ours = softmax_attention(*map(library, (q, k, v)), causal=False)
    np.testing.assert_array_equal(np.asarray(ours), np.zeros((2, 3, 8)))


@LIBRARIES
@LAYOUTS
@DTYPES
def test_softmax_attention_is_the_same_at_any_offset(library, layout, dtype):
    arrays = list(map(library, qkv(2, 4, 24, 64, dtype=dtype, kv_heads=2)))
    spec, positions = Rotary(head_dim=64, layout=layout), np.arange(24)
    near = softmax_attention(*arrays, spec)
    far = {"q_positions": positions + FAR, "k_positions": positions + FAR}
    moved = softmax_attention(*arrays, spec, **far)
    unit = np.abs(np.asarray(arrays[2])).max()
    np.testing.assert_allclose(np.asarray(moved), np.asarray(near), rtol=0, atol=SHIFT * unit)
    apart = softmax_attention(*arrays, spec, q_positions=positions + 3, causal=False)
    together = softmax_attention(*arrays, spec, causal=False)
    assert np.abs(np.asarray(apart) - np.asarray(together)).max() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_keep_their_type(dtype):
    arrays = [torch.from_numpy(x).to(dtype) for x in qkv(2, 2, 7, 16)]
    ours = softmax_attention(*arrays, Rotary(head_dim=16))
    assert ours.dtype == dtype
    exact = softmax_attention(*[x.double() for x in arrays], Rotary(head_dim=16))
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)
    if dtype == torch.float16:
        plain = softmax_attention(*[x.numpy() for x in arrays], Rotary(head_dim=16))
        assert plain.dtype == np.float16
        np.testing.assert_allclose(plain, exact.numpy(), rtol=0, atol=8 * 2.0**-10)


@LIBRARIES
def test_scores_beyond_float16_do_not_overflow(library):
    q, k, v = (np.full((2, 16), size, np.float16) for size in (200, 200, 3))
    k[1] = -200  # scores of 640,000 and their negative, over the square root of 16
    ours = softmax_attention(*map(library, (q, k, v)), causal=False)
    np.testing.assert_array_equal(np.asarray(ours), v)


@pytest.mark.parametrize("length", [8, 40])
@LIBRARIES
def test_a_spec_that_depends_on_the_length_takes_that_of_the_keys(library, length):
    spec = scaled("dynamic", 16, 4.0, 16)
    arrays = list(map(library, qkv(2, 2, length, 16)))
    whole = softmax_attention(*arrays, spec)
    half = np.arange(length // 2, length)
    last = softmax_attention(arrays[0][..., half, :], *arrays[1:], spec, q_positions=half)
    first = softmax_attention(
        arrays[0][..., : length // 2, :], *arrays[1:], spec, q_positions=np.arange(length // 2)
    )
    both = np.concatenate((np.asarray(first), np.asarray(last)), axis=-2)
    np.testing.assert_allclose(both, np.asarray(whole), rtol=0, atol=1e-14)
    default = np.asarray(softmax_attention(*arrays, Rotary(head_dim=16)))
    assert (np.abs(default - both).max() > 0.01) == (length > 16)


def test_causal_attention_over_several_axes_is_refused():
    q, k, v = qkv(2, 4, 8)
    spec = Rotary(head_dim=8, axes=(0, 0, 1, 1))
    with pytest.raises(ValueError, match="causal=True needs one position axis, the spec has 2"):
        softmax_attention(q, k, v, spec)


def test_attention_on_numpy_does_not_load_torch():
    code = (
        "import sys, numpy as np\n"
        "from rotary import Rotary, attention as a\n"
        "x, s = np.ones((3, 4)), Rotary(head_dim=4)\n"
        "a.softmax_attention(x, x, x, s), a.linear_attention(x, x, x, s)\n"
        "a.chunked_linear_attention(x, x, x, s), a.distance_attention(x, x, x, s, a.rerope(2))\n"
        "a.xpos(s, x, x), a.vo_rope_attention(x, x, x, s)\n"
        "a.mixed_cos_sin(a.mixed_directions(4, [0.0]), np.zeros((3, 2), np.int64))\n"
        "sys.exit('torch' in sys.modules)"
    )
    alone(code)


def test_an_unknown_library_is_named():
    with pytest.raises(TypeError, match=r"builtins\.list; array libraries known: numpy, torch"):
        softmax_attention([[1.0]], [[1.0]], [[1.0]])


# --- log n ---


@LIBRARIES
def test_log_n_grows_from_the_trained_length_on(library):
    counts = [1, 2, 511, 512, 1024, 2**18]
    q = library(np.ones((2, 6, 4), np.float32))
    ours = np.asarray(scale_by_log_n(q, np.array(counts), 512))
    wanted = [max(1.0, math.log(n) / math.log(512)) for n in counts]
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, np.tile(np.array(wanted)[:, None], (2, 1, 4)), rtol=1e-7)
    assert ours[0, 5, 0] == 2


@LIBRARIES
def test_log_n_takes_one_count_for_each_row(library):
    counts = np.array([[4, 16], [16, 64]])
    ours = np.asarray(scale_by_log_n(library(np.ones((2, 3, 2, 4))), counts, 4))
    np.testing.assert_allclose(ours[:, 1, :, 0], [[1, 2], [2, 3]])
    with pytest.raises(ValueError, match="trained_length must be >= 2 tokens, got 1"):
        scale_by_log_n(library(np.ones((1, 4))), np.array([3]), 1)


def test_log_n_before_or_after_the_rotation_is_the_same():
    q, k, v = qkv(2, 40, 8)
    spec, counts = Rotary(head_dim=8), np.arange(40) + 1
    before = softmax_attention(scale_by_log_n(q, counts, 8), k, v, spec)
    after = softmax_attention(scale_by_log_n(apply(spec, q), counts, 8), apply(spec, k), v)
    np.testing.assert_allclose(before, after, rtol=0, atol=1e-14)
    assert np.abs(before - softmax_attention(q, k, v, spec)).max() > 0.01


# --- rotary values ---

YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
VALUES = {
    "default": Rotary(head_dim=12),
    "amplitude": Rotary(head_dim=12, schedule="yarn", params=YARN),
}


@LIBRARIES
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("turned", [False, True], ids=["alone", "with q and k"])
def test_rotary_values_are_turned_by_the_distance(library, name, turned):
    q, k, _ = qkv(7, 8)
    v, spec = draw(7, 12, key=3), Rotary(head_dim=8) if turned else None
    positions = np.array([0, 1, 2, 5, 9, 40, 41])
    where = {"q_positions": positions, "k_positions": positions}
    weights = softmax_attention(q, k, np.eye(7), spec, **where)
    frequencies = inv_freq(VALUES[name])[0]
    wanted = np.zeros((7, 12))
    for m in range(7):
        for n, matrix in enumerate(rotations(positions - positions[m], frequencies)):
            wanted[m] += weights[m, n] * (matrix @ v[n])
    ours = vo_rope_attention(*map(library, (q, k, v)), VALUES[name], spec, **where)
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=0, atol=2e-6)


@LIBRARIES
@DTYPES
@pytest.mark.parametrize("out_layout", ["half", "interleaved"])
def test_rotary_values_are_the_same_at_any_offset(library, dtype, out_layout):
    arrays = list(map(library, qkv(2, 4, 20, 16, dtype=dtype, kv_heads=2)))
    spec = Rotary(head_dim=16, out_layout=out_layout)
    near = vo_rope_attention(*arrays, spec, spec)
    far = np.arange(20) + FAR
    moved = vo_rope_attention(*arrays, spec, spec, q_positions=far, k_positions=far)
    assert near.dtype == arrays[2].dtype
    unit = np.abs(np.asarray(arrays[2])).max()
    np.testing.assert_allclose(np.asarray(moved), np.asarray(near), rtol=0, atol=SHIFT * unit)
    first = np.asarray(near)[..., 0, :]  # the first token sees itself, at distance 0
    np.testing.assert_allclose(
        first, np.repeat(np.asarray(arrays[2])[..., 0, :], 2, axis=1), rtol=0, atol=SHIFT
    )


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.0,
            "long_mscale": 1.5, "original_max_position_embeddings": 4}  # fmt: skip
SCALED = {
    "partial": Rotary(head_dim=8, rotary_dim=4, start=2, schedule="yarn", params=YARN),
    "by length": Rotary(head_dim=8, schedule="longrope", params=LONGROPE, out_layout="interleaved"),
    "backwards": Rotary(head_dim=8, schedule="yarn", params=YARN, sign=-1),
}


@LIBRARIES
@pytest.mark.parametrize("name", SCALED)
def test_a_token_that_sees_itself_gets_its_own_value(library, name):
    """The square of one attention factor was taken out, of all channels, rotated or not."""
    v, spec = library(draw(2, 3, 6, 8, dtype=np.float32)), SCALED[name]
    far = np.broadcast_to(100 * np.eye(6, dtype=np.float32), (2, 3, 6, 6))  # apart from others
    q = k = library(far.copy())
    rows = np.stack([np.arange(6), np.arange(6) % 4])  # of length 6 and 4: long and short factors
    given = library(rows)
    for where in (
        {},
        {"q_positions": given, "k_positions": given},
        {"q_positions": given + 0.5, "k_positions": given + 0.5},
        {"k_positions": given},
    ):
        ours = np.asarray(vo_rope_attention(q, k, v, spec, **where))
        same = slice(None) if len(where) != 1 else slice(4)  # tokens at one position as q and as k
        wanted = np.asarray(v)[..., same, :]
        np.testing.assert_allclose(ours[..., same, :], wanted, rtol=0, atol=2e-6)


def test_rotary_values_keep_their_type():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (x.astype(bfloat16) for x in qkv(1, 2, 4, 8))
    assert vo_rope_attention(q, k, v, SCALED["partial"]).dtype == bfloat16


# --- p-RoPE ---


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75, 1.0])
def test_p_rope_keeps_the_fastest_pairs_on_the_grid_of_the_full_width(p):
    params = {"partial_rotary_factor": p}
    spec = Rotary(head_dim=32, schedule="proportional", params=params)
    kept = int(p * 32 / 2)
    grid = [10_000 ** (-2 * i / 32) if i < kept else 0.0 for i in range(16)]
    np.testing.assert_allclose(inv_freq(spec)[0], grid, rtol=1e-15)
    given = Rotary(head_dim=32, schedule="custom", params={"inv_freq": inv_freq(spec)[0]})
    q, k, v = qkv(2, 20, 32)
    ours = softmax_attention(q, k, v, spec)
    np.testing.assert_array_equal(ours, softmax_attention(q, k, v, given))
    still = np.arange(kept, 16)
    np.testing.assert_array_equal(apply(spec, q)[..., still], q[..., still])
    # a partial rotation of the first 2 p d / 2 channels is another grid
    partial = softmax_attention(q, k, v, Rotary(head_dim=32, rotary_dim=2 * kept))
    assert (np.abs(ours - partial).max() > 0.01) == (p < 1)


def test_p_rope_scores_of_still_pairs_do_not_depend_on_the_distance():
    params = {"partial_rotary_factor": 0.5}
    spec = Rotary(head_dim=8, schedule="proportional", params=params)
    content = np.array([0, 0, 1.0, 1.0, 0, 0, 1.0, 1.0])  # channels of pairs 2 and 3 alone
    turned = apply(spec, np.tile(content, (50, 1)))
    np.testing.assert_array_equal(turned @ turned.T, np.full((50, 50), 4.0))


@pytest.mark.parametrize("attend", [softmax_attention, vo_rope_attention])
def test_one_row_of_query_positions_beside_keys_of_two_lengths(attend):
    """Dynamic NTK rotates each row by the length of its keys."""
    spec = scaled("dynamic", 8, 4.0, 4)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 2, 6, 8))
    one, keys = np.arange(6) + 5, np.arange(6) + np.array([[0], [5]])
    found, wanted = (
        attend(q, k, v, spec, q_positions=each, k_positions=keys)
        for each in (one, np.stack([one, one]))
    )
    np.testing.assert_array_equal(found, wanted)
