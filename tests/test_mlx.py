"""MLX arrays: exact tables, the bits of the reference, traced, differentiated and mapped."""

from dataclasses import replace

import numpy as np
import pytest
from programs import alone

mx = pytest.importorskip("mlx.core")

from kernel_cases import (  # noqa: E402
    DTYPES,
    DYNAMIC,
    FRACTIONS,
    INTEGERS,
    LADDERS,
    SPEC,
    SPECS,
    exact,
    ids,
    range_of,
)
from mlx_arrays import to_mlx, to_numpy  # noqa: E402

import rotary  # noqa: E402
from rotary import positions  # noqa: E402
from rotary.kernels import mlx as kernel  # noqa: E402

FAR = [0, 1, 2, 65_535, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**38 + 12_345, 2**39, -1, -(2**39) + 1]


def numbers(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def errors(tables, wanted):
    return [abs(np.array(got) - want).max() for got, want in zip(tables, wanted, strict=True)]


@pytest.fixture
def on_gpu(monkeypatch):
    """As where a GPU is the default: the numbers of no array are read."""
    monkeypatch.setattr(kernel, "_is_on_cpu", lambda: False)


# --- tables ---


@pytest.mark.parametrize("way", ["traced", "on a GPU"])
def test_angles_are_exact_at_any_position(way, request):
    where = [*FAR, *ids(SPEC, 50, high=2**31 - 1).tolist()]

    def make(p):
        return rotary.cos_sin(SPEC, p, allow_negative=True)

    if way == "on a GPU":
        request.getfixturevalue("on_gpu")
    else:
        make = mx.compile(make)
    tables = make(mx.array(where, dtype=mx.int64))
    assert [table.dtype for table in tables] == [mx.float32] * 2
    assert max(errors(tables, exact(SPEC, where))) <= 1.5e-7


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_type_of_positions(dtype):
    where = np.array(range_of(dtype), dtype)
    tables = rotary.cos_sin(SPEC, mx.array(where), allow_negative=True)
    assert max(errors(tables, exact(SPEC, where.tolist()))) <= 1.5e-7


def test_where_fast_rope_is_wrong_by_hundredths_ours_is_exact():
    """Unit vectors show cos and sin: float32 angles of MLX against 60 digits."""
    far = np.arange(131_072 - 8, 131_072)
    spec = rotary.Rotary(head_dim=128, base=1e4)
    x = mx.concatenate([mx.ones((1, 1, 8, 64)), mx.zeros((1, 1, 8, 64))], axis=-1)
    wanted = np.concatenate(exact(spec, far), axis=-1)
    theirs = mx.fast.rope(x, 128, traditional=False, base=1e4, scale=1.0, offset=int(far[0]))
    ours = rotary.apply(spec, x, positions=mx.array(far))
    assert abs(np.array(theirs)[0, 0] - wanted).max() > 5e-3
    assert abs(np.array(ours)[0, 0] - wanted).max() <= 1.5e-7


@pytest.mark.parametrize("traditional", [False, True])
def test_it_is_the_rotation_of_fast_rope(traditional):
    x = mx.array(numbers(0, 2, 3, 9, 80))
    layout = "interleaved" if traditional else "half"
    spec = rotary.Rotary(head_dim=80, rotary_dim=64, base=1e4, layout=layout)
    theirs = mx.fast.rope(x, 64, traditional=traditional, base=1e4, scale=1.0, offset=5)
    ours = rotary.apply(spec, x, positions=mx.arange(5, 14), seq_dim=-2)
    assert mx.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_tables_are_those_of_numpy(name, monkeypatch):
    spec = SPECS[name]
    where, factor = ids(spec, 2, 7), rotary.inv_freq(spec)[1]
    want = rotary.cos_sin(spec, where)
    got = rotary.cos_sin(spec, mx.array(where))
    assert all(isinstance(table, mx.array) for table in got)
    assert errors(got, want) == [0, 0]
    monkeypatch.setattr(kernel, "_is_on_cpu", lambda: False)
    assert max(errors(rotary.cos_sin(spec, mx.array(where)), want)) <= 2e-7 * factor


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("inv_freq", LADDERS)
def test_fractional_positions_are_exact_without_float64(inv_freq, dtype):
    spec = rotary.Rotary(head_dim=6, schedule="custom", params={"inv_freq": inv_freq})
    where = FRACTIONS.astype(dtype)
    tables = rotary.cos_sin(spec, to_mlx(where), allow_negative=True)
    limit = 1.5e-7 + 2.0**-33 * max(map(abs, inv_freq))  # positions are rounded to 2^-32
    assert max(errors(tables, exact(spec, where))) <= limit


def test_fractional_positions_that_are_too_large():
    where = mx.array([0.5, 2.0**28, 2.0**28 + 32, -float("inf"), float("nan"), 7.0])
    with pytest.raises(ValueError, match=r"fractional positions must be <= 2\^28"):
        rotary.cos_sin(SPEC, where[:3])
    with pytest.raises(ValueError, match="positions must be finite"):
        rotary.cos_sin(SPEC, where)
    for table in mx.vmap(lambda p: rotary.cos_sin(SPEC, p))(where[None]):
        is_nan = np.isnan(np.array(table[0]))
        assert is_nan.all(axis=1).tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("sign", [1, -1])
def test_tables_can_be_differentiated_by_fractional_positions(sign):
    spec = rotary.Rotary(head_dim=8, base=100.0, sign=sign)
    frequencies, at = rotary.inv_freq(spec)[0], mx.array([0.25, 3.5])
    radians = np.array(at)[:, None] * frequencies
    wanted = (-np.sin(radians) * frequencies, np.cos(radians) * frequencies * sign)

    def tables(p):
        return rotary.cos_sin(spec, p)

    _, forward = mx.jvp(tables, [at], [mx.ones(2)])
    assert max(errors(forward, wanted)) <= 1e-6
    for index in range(2):
        back = mx.grad(lambda p, index=index: tables(p)[index].sum())(at)
        assert errors([back], [wanted[index].sum(axis=1)])[0] <= 1e-6
    twice = mx.grad(lambda q: mx.grad(lambda p: tables(p)[0].sum())(q).sum())(at)
    assert errors([twice], [-(np.cos(radians) * frequencies**2).sum(axis=1)])[0] <= 1e-6


def test_float32_precision_is_the_float32_arithmetic():
    where = np.concatenate([np.arange(500), ids(SPEC, 500, high=2**24)])
    want = rotary.cos_sin(SPEC, where, "float32")
    assert max(errors(rotary.cos_sin(SPEC, mx.array(where), "float32"), want)) <= 1.2e-7


# --- the rotation ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_apply_gives_the_bits_of_numpy(name, dtype):
    spec = SPECS[name]
    q, k = (numbers(seed, 2, heads, 7, spec.head_dim, dtype=DTYPES[dtype])
            for seed, heads in ((0, 4), (1, 2)))  # fmt: skip
    where = ids(spec, 2, 7)
    for conjugate in (False, True):
        want = rotary.apply(spec, q, k, positions=where, conjugate=conjugate)
        for given in (where, mx.array(where), where.tolist()):
            got = rotary.apply(spec, to_mlx(q), to_mlx(k), positions=given, conjugate=conjugate)
            for ours, theirs in zip(got, want, strict=True):
                assert isinstance(ours, mx.array)
                assert to_numpy(ours).dtype == theirs.dtype
                assert to_numpy(ours).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("seq_dim", [-2, -3, 1])
def test_any_axis_of_the_sequence_and_default_positions(seq_dim):
    q, k = numbers(0, 2, 9, 5, 64), numbers(1, 2, 9, 5, 64)
    want = rotary.apply(SPEC, q, k, seq_dim=seq_dim)
    for _ in range(2):  # the second time from the cache
        assert errors(rotary.apply(SPEC, mx.array(q), mx.array(k), seq_dim=seq_dim), want) == [0, 0]


def test_numpy_tables_and_rows_are_constants():
    q, (cos, sin) = numbers(0, 1, 2, 5, 64), rotary.cos_sin(SPEC, np.arange(9))
    for rows in (np.array([7, 0, 3, 3, 8]), np.array([7, 0, 3, 3, 8], ">i4"), [7, 0, 3, 3, 8]):
        want = rotary.rotate(q, cos, sin, SPEC, positions=np.asarray(rows))
        got = rotary.rotate(mx.array(q), cos, sin[::-1][::-1], SPEC, positions=rows)
        assert errors([got], [want]) == [0]
    wide = [table.astype(np.float64) for table in (cos[:5], sin[:5])]
    want = rotary.rotate(q.astype(np.float64), *wide, SPEC)
    assert errors([rotary.rotate(to_mlx(q.astype(np.float64)), *wide, SPEC)], [want]) == [0]


def test_positions_of_mlx_beside_numpy():
    q, where = numbers(0, 1, 2, 5, 64), [3, 4, 5, 6, 2**33]
    want = rotary.apply(SPEC, q, positions=np.array(where))
    got = rotary.apply(SPEC, q, positions=mx.array(where, dtype=mx.int64))
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, want)


# --- transformed ---


@pytest.mark.parametrize("name", SPECS)
def test_the_gradient_is_the_transpose(name):
    spec = SPECS[name]
    q, back = (mx.array(numbers(seed, 2, 4, 7, spec.head_dim)) for seed in (0, 1))
    where = mx.array(ids(spec, 2, 7))
    _, (got,) = mx.vjp(lambda q: rotary.apply(spec, q, positions=where), [q], [back])
    want = rotary.apply(spec, back, positions=where, conjugate=True)
    assert mx.allclose(got, want, rtol=0, atol=1e-6)
    loss = mx.grad(lambda q: (rotary.apply(spec, q, positions=where) ** 2).sum() / 2)(q)
    scale = rotary.inv_freq(spec)[1] ** 2  # a rotation keeps lengths: the gradient is x itself
    channels = slice(spec.start, spec.start + spec.rotary_dim)
    assert mx.allclose(loss[..., channels], scale * q[..., channels], rtol=0, atol=1e-5)


def test_tables_have_gradients_too():
    x, (cos, sin) = numbers(0, 1, 1, 3, 4), rotary.cos_sin(rotary.Rotary(head_dim=4), np.arange(3))
    d_cos, d_sin = mx.grad(
        lambda c, s: rotary.rotate(mx.array(x), c, s, layout="half").sum(), argnums=(0, 1)
    )(mx.array(cos), mx.array(sin))
    u, v = x[0, 0, :, :2], x[0, 0, :, 2:]
    assert max(errors([d_cos, d_sin], [u + v, u - v])) <= 1e-6


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_compiled_call_is_not_traced_again_for_other_positions(layout):
    spec, q = rotary.Rotary(head_dim=64, layout=layout), numbers(0, 1, 2, 5, 64)
    traced = []

    @mx.compile
    def step(q, offset):
        traced.append(offset)
        return rotary.apply(spec, q, positions=positions.arange(5, offset), seq_dim=-2)

    for offset in (0, 1, 77, 2**33):
        want = rotary.apply(spec, q, positions=np.arange(offset, offset + 5), seq_dim=-2)
        got = step(mx.array(q), mx.array(offset, dtype=mx.int64))
        assert errors([got], [want])[0] <= 1e-6
    assert len(traced) == 1


def test_vmap_over_x_and_positions():
    q, where = numbers(0, 3, 2, 5, 64), ids(SPEC, 3, 5)
    want = rotary.apply(SPEC, q, positions=where, seq_dim=-2)
    got = mx.vmap(lambda q, p: rotary.apply(SPEC, q, positions=p, seq_dim=-2))(
        mx.array(q), mx.array(where)
    )
    assert errors([got], [want])[0] <= 2e-6
    got = mx.vmap(lambda q: rotary.apply(SPEC, q))(mx.array(q))
    assert errors([got], [rotary.apply(SPEC, q)]) == [0]


def test_a_row_outside_is_refused_where_it_is_known_and_nan_where_it_is_traced():
    q, (cos, sin) = mx.ones((1, 1, 4, 64)), rotary.cos_sin(SPEC, mx.arange(9))
    rows = mx.array([2, -1, 9, 8])
    with pytest.raises(ValueError, match="positions run from -1 to 9, the tables have 9 rows"):
        rotary.rotate(q, cos, sin, SPEC, positions=rows)
    got = mx.vmap(lambda p: rotary.rotate(q, cos, sin, SPEC, positions=p))(rows[None])[0, 0, 0]
    is_nan = np.isnan(np.array(got))
    assert is_nan.all(axis=1).tolist() == [False, True, True, False]
    assert not is_nan[[0, 3]].any()


def test_lengths_must_be_known():
    where = mx.array([[0, 1, 2, 3], [28, 29, 30, 31]])
    assert errors(rotary.cos_sin(DYNAMIC, where), rotary.cos_sin(DYNAMIC, np.array(where))) == [
        0,
        0,
    ]
    with pytest.raises(ValueError, match=r"under mx\.compile and mx\.vmap a spec that depends"):
        mx.vmap(lambda p: rotary.cos_sin(DYNAMIC, p))(where)
    tables = mx.vmap(lambda p: rotary.cos_sin(DYNAMIC, p, seq_len=32))(where)
    assert max(errors(tables, rotary.cos_sin(DYNAMIC, np.array(where), seq_len=32))) <= 2e-7


# --- what is refused ---


def test_what_does_not_fit_is_refused_traced_or_not():
    q = mx.ones((1, 2, 7, 64))
    cos, sin = rotary.cos_sin(SPEC, mx.arange(7))
    torch_like = type("Tensor", (), {"__module__": "other"})()
    wrong = [
        (TypeError, "out= cannot be used with MLX arrays",
         lambda q: rotary.rotate(q, cos, sin, out=q, layout="half")),
        (ValueError, "does not fit", lambda q: rotary.rotate(q, cos[:5], sin[:5], layout="half")),
        (ValueError, r"cos and sin must have one shape and dtype, got float32 \(7, 32\) and",
         lambda q: rotary.rotate(q, cos, sin[:5], layout="half")),
        (ValueError, "the last axis of x must be head_dim",
         lambda q: rotary.apply(SPEC, q[..., :32])),
        (TypeError, "x must be one of .*, got int32",
         lambda q: rotary.rotate(q.astype(mx.int32), cos, sin, layout="half")),
        (TypeError, "q, k and v must have one dtype, got float32 and float16",
         lambda q: rotary.rotate((q, q.astype(mx.float16)), cos, sin, layout="half")),
        (TypeError, "tables must be float32, got bfloat16: they are already rounded",
         lambda q: rotary.rotate(
             q, cos.astype(mx.bfloat16), sin.astype(mx.bfloat16), layout="half")),
        (TypeError, "positions must be whole numbers to pick rows, got float32",
         lambda q: rotary.rotate(q, cos, sin, positions=mx.ones(7), layout="half")),
        (TypeError, "got bfloat16: they are already rounded",
         lambda q: rotary.apply(SPEC, q, positions=mx.arange(7).astype(mx.bfloat16))),
        (TypeError, "positions must be whole numbers, .* got bool",
         lambda q: rotary.apply(SPEC, q, positions=mx.ones(7) > 0)),
        (TypeError, "all arrays must be of one library",
         lambda q: rotary.rotate(q, torch_like, torch_like, layout="half")),
        (TypeError, "fused takes arrays of NumPy, torch and JAX, got one of mlx",
         lambda q: rotary.fused(q, q, q, SPEC, mx.arange(7))),
    ]  # fmt: skip
    for error, match, call in wrong:
        with pytest.raises(error, match=match):
            call(q)
        with pytest.raises(error, match=match):
            mx.compile(call)(q)


def test_known_positions_are_checked_and_traced_ones_are_turned():
    where = mx.array([-1, 4])
    with pytest.raises(ValueError, match="positions must be >= 0, got -1"):
        rotary.cos_sin(SPEC, where)
    tables = mx.vmap(lambda p: rotary.cos_sin(SPEC, p))(where[None])
    assert max(errors([table[0] for table in tables], exact(SPEC, [-1, 4]))) <= 1.5e-7


def test_the_systems_of_the_paper_name_the_libraries_that_they_take():
    from rotary import attention

    x = mx.ones((1, 3, 4))
    with pytest.raises(TypeError, match="takes arrays of NumPy, torch and JAX"):
        attention.softmax_attention(x, x, x)


# --- positions, moved keys ---


def test_builders_of_positions_answer_in_mlx():
    from test_positions_libraries import MASK, OF_ARRAYS, OF_SIZES, REFUSED

    twice = ("one", "row", "contiguous", "ring", "striped")  # a compiled one takes seconds: of each
    for name, (build, given) in OF_ARRAYS.items():
        want = build(*map(np.array, given))
        for dtype in (mx.int32, mx.int64, mx.uint64):
            if dtype is mx.uint64 and min(np.ravel(given[0])) < 0:
                continue
            found = build(*[mx.array(each, dtype=dtype) for each in given])
            assert (type(found), found.dtype) == (mx.array, mx.int64), name
            assert np.array_equal(found, want), name
        if not name.endswith(twice):
            assert np.array_equal(mx.compile(build)(*map(mx.array, given)), want), name
    for name, build in OF_SIZES.items():
        found = build(mx.zeros(2))
        assert isinstance(found, mx.array), name
        assert np.array_equal(found, build(None)), name
    for call, text in REFUSED.values():
        with pytest.raises(ValueError, match=text):
            call(mx.array)
    assert positions.left_padded(mx.array(MASK) > 0).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


MOVES = {
    "shift": {"shift": 3},
    "to positions": {"from_positions": [7, 8, 9, 10], "to_positions": [0, 1, 2, 2**33]},
    "blocks": {"blocks": [4, 1], "shift": [-2, 3], "seq_dim": -3},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", MOVES)
def test_cached_keys_are_moved_as_by_numpy(name, dtype):
    spec = rotary.Rotary(head_dim=8)
    kind = np.dtype(np.int8) if dtype == "int8" else DTYPES[dtype]
    k = (40 * numbers(0, 6, 4, 2, 8)).astype(kind)
    how = {"seq_dim": -3, **MOVES[name]}
    scales = (None, np.linspace(0.5, 2, 8, dtype=np.float32)) if dtype == "int8" else (None,)
    for scale in scales:
        want = rotary.rerotate(k, spec, scale=scale, **how)
        given = to_mlx(k)
        got = rotary.rerotate(given, spec, scale=scale, **how)
        assert to_numpy(got).tobytes() == want.tobytes()
        assert to_numpy(given).tobytes() == k.tobytes()


def test_a_traced_shift_moves_keys():
    spec, k = rotary.Rotary(head_dim=8), numbers(0, 2, 3, 5, 8)
    move = mx.vmap(lambda k, shift: rotary.rerotate(k, spec, shift=shift))
    got = move(mx.array(k), mx.array([3, -2]))
    for row, shift in enumerate((3, -2)):
        assert errors([got[row]], [rotary.rerotate(k[row], spec, shift=shift)])[0] <= 1e-6


# --- a model ---


def test_scores_of_attention_depend_on_the_distance_alone():
    """At any place of the context: the identity that the paper is about, in MLX's own attention."""
    q, k, v = (mx.array(numbers(seed, 1, 2, 6, 64)) for seed in range(3))

    def attend(start):
        at = positions.arange(6, mx.array(start, dtype=mx.int64))
        turned = rotary.apply(SPEC, q, k, positions=at, seq_dim=-2)
        return mx.fast.scaled_dot_product_attention(*turned, v, scale=0.125, mask="causal")

    for start in (1000, 2**20, 2**38):
        assert mx.allclose(attend(0), attend(start), rtol=0, atol=2e-6)


def test_what_numpy_and_torch_calls_load():
    script = (
        "import sys, numpy, rotary; rotary.apply(rotary.Rotary(head_dim=4), "
        "numpy.ones((2, 4), 'f4'))\n"
        "print('mlx' in sys.modules, 'rotary.kernels.mlx' in sys.modules)"
    )
    assert alone(script) == "False False\n"


# --- mlx-lm ---


@pytest.mark.parametrize("traditional", [False, True])
def test_the_module_has_the_call_of_nn_rope(traditional):
    from mlx import nn

    from rotary.integrations.mlx import RoPE

    layout = "interleaved" if traditional else "half"
    ours = RoPE(rotary.Rotary(head_dim=80, rotary_dim=64, layout=layout))
    theirs = nn.RoPE(64, traditional=traditional, base=1e4)
    x = mx.array(numbers(0, 2, 3, 5, 80))
    rows = mx.array([3, 40])
    for offset in (0, 7, -2, mx.array(7), rows, mx.array([-2, 3])):
        assert mx.allclose(ours(x, offset=offset), theirs(x, offset=offset), rtol=0, atol=2e-5)
    assert mx.array_equal(ours(x, offset=rows)[1], ours(x, offset=40)[1])
    assert ours.parameters() == {}
    assert repr(ours).startswith("RoPE(Rotary(head_dim=80, rotary_dim=64")
    with pytest.raises(ValueError, match="an offset has one axis, the spec has 3"):
        RoPE(SPECS["three axes"])
    with pytest.raises(TypeError, match="must be a Rotary, got int"):
        RoPE(64)


def test_the_module_scales_for_the_length_of_each_call():
    from rotary.integrations.mlx import RoPE

    x = numbers(0, 1, 2, 5, 64)
    for offset in (0, 40):
        want = rotary.apply(DYNAMIC, x, positions=np.arange(offset, offset + 5))
        assert errors([RoPE(DYNAMIC)(mx.array(x), offset=offset)], [want]) == [0]


SCALED = {
    "default": ({}, {}),
    "llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}, {}),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                               "original_max_position_embeddings": 64}}, {}),
    "interleaved": ({"rope_traditional": True}, {"layout": "interleaved"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_a_model_of_mlx_lm_gives_the_same_logits_and_tokens(name):
    """Needs mlx-lm, of the environment that `make peers` makes; random weights."""
    llama = pytest.importorskip("mlx_lm.models.llama")
    from mlx_lm.generate import generate_step

    from rotary.integrations.mlx import RoPE

    keys, changes = SCALED[name]
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3,
              "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
              "rms_norm_eps": 1e-5, "vocab_size": 97, "max_position_embeddings": 256,
              "rope_theta": 1e4, **keys}  # fmt: skip
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(**config))
    tokens = mx.random.randint(0, 97, (2, 90))

    def answers():
        generated = [int(token) for token, _ in generate_step(tokens[0], model, max_tokens=20)]
        return np.array(model(tokens)), generated

    logits, generated = answers()
    read = {key: value for key, value in config.items() if key != "rope_traditional"}
    spec = replace(rotary.from_hf_config(read), **changes)
    for layer in model.layers:
        layer.self_attn.rope = RoPE(spec)
    found, same = answers()
    assert abs(logits).max() > 1
    assert abs(found - logits).max() < 1e-4
    assert same == generated
    for layer in model.layers:  # the comparison sees a small change of the spec
        layer.self_attn.rope = RoPE(replace(spec, base=1.02e4))
    assert abs(answers()[0] - logits).max() > 1e-3
