"""Attention on JAX arrays: the numbers of NumPy, traced, differentiated, mapped and streamed."""

from functools import partial

import attention_arrays
import numpy as np
import pytest
from attention_arrays import FAR
from libraries import enable_x64, if_installed
from published import scaled

from rotary import Rotary
from rotary.attention import (
    LinearState,
    chunked_linear_attention,
    cumulative_cos_sin,
    distance_attention,
    elu_plus_one,
    linear_attention,
    mixed_cos_sin,
    mixed_directions,
    recurrent_linear_attention,
    rerope,
    scale_by_log_n,
    self_extend,
    softmax_attention,
    vo_rope_attention,
    xpos,
)

jax = if_installed("jax")
jnp = if_installed("jax.numpy")
torch = if_installed("torch")

SPEC = Rotary(head_dim=32)
NEAR = 1e-6
draw = partial(attention_arrays.draw, dtype=np.float32)
qkv = partial(attention_arrays.qkv, dtype=np.float32)
DYNAMIC = scaled("dynamic", 32, 2.0, 8)


pytestmark = pytest.mark.usefixtures("xla_in_less_time")


def chunked(*arguments, **options):
    return chunked_linear_attention(*arguments, chunk_size=5, **options)[0]


# name: (attention of q, k, v at positions; whether k and v may have fewer heads)
SYSTEMS = {
    "softmax": (
        lambda q, k, v, p: softmax_attention(q, k, v, SPEC, q_positions=p, k_positions=p), True,
    ),
    "softmax, interleaved, all keys": (
        lambda q, k, v, p: softmax_attention(
            q, k, v, Rotary(head_dim=32, layout="interleaved"), q_positions=p, k_positions=p,
            causal=False,
        ), True,
    ),
    "rotary values": (
        lambda q, k, v, p: vo_rope_attention(q, k, v, SPEC, SPEC, q_positions=p, k_positions=p),
        True,
    ),
    "rerope": (
        lambda q, k, v, p: distance_attention(
            q, k, v, SPEC, rerope(4), q_positions=p, k_positions=p
        ), True,
    ),
    "self-extend": (
        lambda q, k, v, p: distance_attention(
            q, k, v, SPEC, self_extend(4, 2), q_positions=p, k_positions=p
        ), True,
    ),
    "linear": (lambda q, k, v, p: linear_attention(q, k, v, SPEC, positions=p), False),
    "linear, token by token": (
        lambda q, k, v, p: recurrent_linear_attention(q, k, v, SPEC, positions=p), False,
    ),
    "linear, in chunks": (lambda q, k, v, p: chunked(q, k, v, SPEC, positions=p), False),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", SYSTEMS)


SEQ = 6  # beyond the windows and the chunk; XLA compiles every token of a loop anew


def case(name):
    attend, shares_heads = SYSTEMS[name]
    positions = np.stack([np.arange(SEQ), np.arange(SEQ) + 40]).astype(np.int32)
    return attend, qkv(2, 4, SEQ, 32, kv_heads=2 if shares_heads else 4), positions


def assert_near(ours, wanted, limit=NEAR):
    """Within the limit, in units of the largest value: every output is about an average of them."""
    ours, wanted = np.asarray(ours), np.asarray(wanted)
    assert ours.shape == wanted.shape
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=limit * max(1, np.abs(wanted).max()))


@EACH
def test_it_is_that_of_numpy_traced_or_not(name):
    attend, arrays, positions = case(name)
    wanted = attend(*(x.astype(np.float64) for x in arrays), positions)
    for function in (attend, jax.jit(attend)):
        ours = function(*map(jnp.asarray, arrays), jnp.asarray(positions))
        assert isinstance(ours, jax.Array)
        assert ours.dtype == np.float32
        assert_near(ours, wanted)


@EACH
def test_compiled_gradients_are_those_of_torch(name):
    attend, arrays, positions = case(name)
    weights = draw(2, 4, SEQ, 32, key=7)

    def loss(q, k, v):
        return (attend(q, k, v, positions) * weights).sum()

    tensors = [torch.from_numpy(x).double().requires_grad_() for x in arrays]
    total = (attend(*tensors, torch.from_numpy(positions)) * torch.from_numpy(weights)).sum()
    wanted = torch.autograd.grad(total, tensors)
    ours = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    for mine, other in zip(ours, wanted, strict=True):
        assert_near(mine, other, 4e-6)


@EACH
def test_mapped_over_the_batch_it_is_the_same(name):
    attend, arrays, positions = case(name)
    wanted = attend(*arrays, positions)
    assert_near(jax.jit(jax.vmap(attend))(*arrays, positions), wanted)


@EACH
def test_it_depends_on_distances_alone_at_any_offset(name):
    attend, arrays, _ = case(name)
    arrays = tuple(map(jnp.asarray, arrays))
    where = np.arange(SEQ)
    near = attend(*arrays, where)
    assert_near(attend(*arrays, where + FAR), near)  # NumPy positions need no 64-bit type
    assert_near(jax.jit(lambda *x: attend(*x, where + FAR))(*arrays), near)
    with enable_x64(True):
        assert_near(jax.jit(attend)(*arrays, jnp.asarray(where + FAR)), near)
    assert np.abs(np.asarray(attend(*arrays, 2 * where) - near)).max() > 0.01


# --- the state of a stream ---


def step(state, tokens):
    output, state = chunked_linear_attention(*tokens, SPEC, state=state)
    return state, output


@pytest.mark.parametrize("start", [0, 1000])
def test_a_stream_is_a_scan_over_its_pieces(start):
    arrays = qkv(2, 3, 24, 32)
    wanted = linear_attention(*arrays, SPEC, positions=np.arange(24) + start)
    pieces = [np.stack(np.split(x, 6, axis=-2)) for x in arrays]
    empty = LinearState(jnp.zeros((2, 3, 32, 32)), jnp.zeros((2, 3, 32)), start)
    state, outputs = jax.jit(lambda state, x: jax.lax.scan(step, state, x))(empty, pieces)
    assert int(state.position) == 24 + start
    assert_near(np.concatenate(list(outputs), axis=-2), wanted, 1e-5)
    whole = chunked_linear_attention(*arrays, SPEC, positions=np.arange(24) + start)[1]
    assert_near(state.s, whole.s, 1e-5)
    assert_near(state.z, whole.z, 1e-5)


def test_gradients_flow_through_a_scan():
    arrays = qkv(2, 12, 32)

    def streamed(q, k, v):
        pieces = [x.reshape(2, 3, 4, 32).swapaxes(0, 1) for x in (q, k, v)]
        empty = LinearState(jnp.zeros((2, 32, 32)), jnp.zeros((2, 32)), 0)
        return (jax.lax.scan(step, empty, pieces)[1] ** 2).sum()

    def whole(q, k, v):
        return (linear_attention(q, k, v, SPEC) ** 2).sum()

    ours = jax.jit(jax.grad(streamed, argnums=(0, 1, 2)))(*arrays)
    wanted = jax.jit(jax.grad(whole, argnums=(0, 1, 2)))(*arrays)
    for mine, other in zip(ours, wanted, strict=True):
        assert_near(mine, other, 1e-5)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("kind", ["u1", "u4"])
def test_positions_without_a_sign_are_causal_also_where_traced(kind, is_wide):
    arrays = qkv(4, 32)
    with enable_x64(is_wide):
        positions, arrays = jnp.arange(4, dtype=kind), [jnp.asarray(x) for x in arrays]

        def attend(p):
            return softmax_attention(*arrays, SPEC, q_positions=p, k_positions=p)

        wanted = softmax_attention(*arrays, SPEC)
        assert_near(attend(positions), wanted, NEAR)
        assert_near(jax.jit(attend)(positions), wanted, NEAR)
        assert_near(attend(np.arange(4, dtype=kind)), wanted, NEAR)


def test_positions_beyond_the_integers_of_jax_are_refused():
    far, x = jnp.asarray([0, 2**31], np.uint32), jnp.ones((2, 32))
    with pytest.raises(ValueError, match=f"positions must fit in int32, got {2**31}$"):
        softmax_attention(x, x, x, q_positions=far, k_positions=far)


@pytest.mark.parametrize("start", [2**31 - 5, FAR, np.int64(FAR), np.array([FAR, 3])])
def test_a_stream_goes_on_beyond_the_32_bit_integers(start):
    arrays = tuple(map(jnp.asarray, qkv(2, 1, 9, 32)))
    state = LinearState(jnp.zeros((2, 1, 32, 32)), jnp.zeros((2, 1, 32)), start)
    outputs = []
    for piece in (slice(0, 4), slice(4, 9)):
        output, state = chunked_linear_attention(
            *(x[..., piece, :] for x in arrays), SPEC, state=state
        )
        outputs.append(output)
    assert np.array_equal(state.position, start + 9)
    wanted = linear_attention(*arrays, SPEC)
    assert_near(jnp.concatenate(outputs, axis=-2), wanted, 1e-5)


# --- masks, types, lengths, errors ---


def test_a_query_that_sees_no_key_gives_zeros_and_no_nan():
    q, k, v = qkv(1, 2, 3, 32)

    def call(q, k, v, p):
        return softmax_attention(q, k, v, SPEC, q_positions=p, k_positions=np.arange(3) + 1)

    positions = jnp.arange(3)
    ours = jax.jit(call)(q, k, v, positions)
    assert not np.asarray(ours)[:, :, 0].any()
    assert_near(ours, call(q, k, v, np.arange(3)))
    gradient = jax.grad(lambda *x: call(*x, positions).sum(), argnums=(0, 1, 2))
    for each in jax.jit(gradient)(q, k, v):
        assert np.isfinite(each).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["softmax", "rotary values", "linear", "linear, in chunks"])
def test_16_bit_types_come_back_as_they_went_in(name, dtype):
    attend, arrays, positions = case(name)
    given = tuple(jnp.asarray(x, dtype) for x in arrays)
    ours = jax.jit(attend)(*given, positions)
    assert ours.dtype == dtype
    wide = attend(*(np.asarray(x, np.float64) for x in given), positions)
    assert_near(ours.astype(np.float32), wide, 8 * float(jnp.finfo(dtype).eps))


def test_a_length_that_is_known_scales_under_jit_and_a_traced_one_is_refused():
    arrays = qkv(2, 20, 32)
    wanted = softmax_attention(*arrays, DYNAMIC)
    assert_near(jax.jit(lambda *x: softmax_attention(*x, DYNAMIC))(*arrays), wanted)
    where = np.arange(20) + 2**33
    at = {"q_positions": where, "k_positions": where}
    wanted = softmax_attention(*arrays, DYNAMIC, **at)
    assert_near(jax.jit(lambda *x: softmax_attention(*x, DYNAMIC, **at))(*arrays), wanted)
    with pytest.raises(ValueError, match="seq_len must be known when the call is traced"):
        jax.jit(lambda q, p: softmax_attention(q, q, q, DYNAMIC, k_positions=p))(
            arrays[0], np.arange(20)
        )


def test_positions_that_jax_would_wrap_are_refused_and_others_mixed():
    q, k, v = map(jnp.asarray, qkv(2, 5, 32))
    where = np.arange(5)
    wanted = softmax_attention(q, k, v, SPEC)
    assert_near(softmax_attention(q, k, v, SPEC, q_positions=where), wanted)
    assert_near(softmax_attention(q, k, v, SPEC, k_positions=where.tolist()), wanted)
    message = r"NumPy positions above 2\^31 beside JAX ones"
    with pytest.raises(ValueError, match=message):
        softmax_attention(q, k, v, SPEC, q_positions=where + FAR)
    with pytest.raises(ValueError, match=message):
        distance_attention(q, k, v, SPEC, rerope(3), k_positions=where + FAR)
    with enable_x64(True):
        ours = softmax_attention(q, k, v, SPEC, q_positions=where + FAR)
        assert_near(ours, softmax_attention(q, k, v, SPEC, q_positions=where + FAR,
                                            k_positions=where))  # fmt: skip


def test_the_feature_map_and_log_n_are_those_of_numpy():
    x = np.concatenate((draw(1000), [0.0, -0.0, -700.0, 700.0])).astype(np.float32)
    assert_near(jax.jit(elu_plus_one)(x), elu_plus_one(x))
    q, counts = draw(2, 3, 7, 8), np.array([1, 10, 512, 513, 4096, 10**6, 10**9])
    wanted = scale_by_log_n(q, counts, 512)
    for ours in (scale_by_log_n(jnp.asarray(q), counts, 512),
                 jax.jit(lambda q, n: scale_by_log_n(q, n, 512))(q, counts)):  # fmt: skip
        assert ours.dtype == np.float32
        assert_near(ours, wanted)


def test_encodings_in_float64_ask_for_it_and_then_are_those_of_numpy():
    q, k = draw(2, 3, 12, 16), draw(2, 3, 12, 16, key=1)
    spec, grid = Rotary(head_dim=16), np.stack(np.divmod(np.arange(12), 4), axis=-1)
    directions = mixed_directions(16, [0.0, 0.3, 2.0])
    for call in (
        lambda: xpos(spec, jnp.asarray(q), jnp.asarray(k)),
        lambda: mixed_cos_sin(jnp.asarray(directions, np.float32), grid),
    ):
        with pytest.raises(TypeError, match=r"needs float64: call jax\.config"):
            call()
    with enable_x64(True):
        for offset in (0, FAR):
            where = np.arange(12) + offset
            wanted = xpos(spec, q, k, positions=where, origin=offset)

            def turned(q, k, p, offset=offset):
                return xpos(spec, q, k, positions=p, origin=offset)

            arrays = jnp.asarray(q), jnp.asarray(k), where
            for ours in (turned(*arrays), jax.jit(turned)(*arrays)):
                for mine, other in zip(ours, wanted, strict=True):
                    assert_near(mine, other)
        for positions in (grid, grid / 2):
            wanted = mixed_cos_sin(directions, positions)
            ours = jax.jit(mixed_cos_sin)(directions, positions)
            for mine, other in zip(ours, wanted, strict=True):
                assert_near(mine, other, 1e-9)
        near, far = (jax.jit(mixed_cos_sin)(directions, grid + at) for at in (0, FAR))
        turns = [np.asarray(cos + 1j * sin) for cos, sin in (near, far)]
        steps = [turn * turn[..., :1, :].conj() for turn in turns]
        assert_near(steps[1], steps[0], 1e-9)


@pytest.mark.parametrize("offset", [0, 2**20])
def test_learned_directions_get_their_gradient(offset):
    directions = 3 * draw(2, 3, 4, key=5, dtype=np.float64)
    grid = np.stack(np.divmod(np.arange(6), 3), axis=-1) + offset
    weights = draw(1, 3, 6, 4, key=8, dtype=np.float64)

    def loss(directions, weights=weights, grid=grid):
        cos, sin = mixed_cos_sin(directions, grid)
        return (cos * weights + sin * weights**2).sum()

    tensor = torch.from_numpy(directions).requires_grad_()
    loss(tensor, torch.from_numpy(weights), torch.from_numpy(grid)).backward()
    with enable_x64(True):
        ours = jax.jit(jax.grad(loss))(directions)
    assert_near(ours, tensor.grad, 1e-9)


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_the_strict_settings_of_jax_are_kept(axes):
    x = jnp.asarray(draw(2, 3, 6, 32)[(0,) * (4 - axes)])
    counts = jnp.arange(6, dtype=jnp.int32) + 1
    calls = [
        lambda: softmax_attention(x, x, x, SPEC, window=3),
        lambda: scale_by_log_n(x, counts, 4),
        lambda: linear_attention(x, x, x, SPEC),
        lambda: chunked_linear_attention(x, x, x, SPEC, chunk_size=4)[0],
        lambda: distance_attention(x, x, x, SPEC, rerope(2)),
        lambda: vo_rope_attention(x, x, x, SPEC),
        lambda: cumulative_cos_sin(x)[0],
        lambda: cumulative_cos_sin(x, x[..., 0, :])[0],
    ]
    for call in calls:
        want = call()
        with jax.numpy_rank_promotion("raise"):
            np.testing.assert_array_equal(call(), want)
