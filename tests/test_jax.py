"""JAX arrays: traced, differentiated, mapped, and one loop when compiled."""

import itertools
import re

import numpy as np
import pytest
from grids import pairwise
from kernel_cases import DTYPES, DYNAMIC, FRACTIONS, INTEGERS, LADDERS, SPEC, SPECS, exact, range_of
from kernel_cases import ids as whole
from libraries import enable_x64, if_installed, is_jax_on_cpu

import rotary
from rotary import angles

jax = if_installed("jax")
export = if_installed("jax.export")
jnp = if_installed("jax.numpy")
ml_dtypes = if_installed("ml_dtypes")
torch = if_installed("torch")
check_grads = if_installed("jax.test_util").check_grads

PARTIAL = SPECS["a slice"]
pytestmark = pytest.mark.usefixtures("xla_in_less_time")


def numbers(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ids(spec, *shape, **options):
    return whole(spec, *shape, **options).astype(np.int32)


def pair(spec, dtype=np.float32):
    return (numbers(0, 2, 4, 7, spec.head_dim, dtype=dtype),
            numbers(1, 2, 2, 7, spec.head_dim, dtype=dtype))  # fmt: skip


def assert_near(got, want, units=2):
    """Within so many units in the last place of the larger number of a pair, which is below 8."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    step = 8 * float(ml_dtypes.finfo(want.dtype).eps)
    assert abs(got.astype(np.float64) - want.astype(np.float64)).max(initial=0) <= units * step


# --- angles ---

INT32 = [0, 1, 2, 65_535, 65_536, 1_000_003, 2**24 + 1, 2**30 - 1, 2**31 - 1, -1, -65_536, -(2**31)]
INT64 = [*INT32, 2**32, 2**38 + 12_345, 2**39, -(2**39) + 1]


def traced_tables(spec, positions, **options):
    options = {"allow_negative": True, **options}
    return jax.jit(lambda p: rotary.cos_sin(spec, p, **options))(positions)


@pytest.mark.parametrize("x64", [False, True])
def test_traced_angles_are_exact_at_any_position(x64):
    positions = [*(INT64 if x64 else INT32), *ids(SPEC, 200, high=2**31 - 1).tolist()]
    with enable_x64(x64):
        tables = traced_tables(SPEC, jnp.array(positions))
    limit = np.where(np.abs(np.array(positions, float)) <= 2**35, 1.2e-7, 2e-7)[:, None]
    for got, want in zip(tables, exact(SPEC, positions), strict=True):
        assert got.dtype == np.float32
        assert (abs(np.asarray(got) - want) <= limit).all()


@pytest.mark.usefixtures("optimized")
def test_64_bit_types_change_no_bit_of_traced_tables():
    positions = np.concatenate([INT32, ids(SPEC, 20_000, high=2**31 - 1)])
    narrow = traced_tables(SPEC, jnp.array(positions, np.int32))
    with enable_x64(True):
        for dtype in (np.int32, np.int64):
            wide = traced_tables(SPEC, jnp.array(positions, dtype))
            for a, b in zip(narrow, wide, strict=True):
                assert np.array_equal(a, b)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_type_of_positions(dtype):
    positions = range_of(dtype)
    with enable_x64(dtype.endswith("64")):
        tables = traced_tables(SPEC, jnp.array(positions, dtype))
    for got, want in zip(tables, exact(SPEC, positions), strict=True):
        assert abs(np.asarray(got) - want).max() <= 1.5e-7


@pytest.mark.parametrize("name", SPECS)
def test_tables_equal_those_of_numpy(name):
    spec = SPECS[name]
    positions = ids(spec, 2, 7)
    want = rotary.cos_sin(spec, positions)
    factor = rotary.inv_freq(spec)[1]
    for got, traced, table in zip(
        rotary.cos_sin(spec, jnp.array(positions)), traced_tables(spec, positions), want,
        strict=True,
    ):  # fmt: skip
        assert isinstance(got, jax.Array)
        assert np.array_equal(got, table) or not is_jax_on_cpu()
        assert abs(np.asarray(got) - table).max() <= 2e-7 * factor
        assert abs(np.asarray(traced) - table).max() <= 2e-7 * factor


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("inv_freq", LADDERS)
def test_fractional_positions_are_exact_without_float64(inv_freq, dtype):
    spec = rotary.Rotary(head_dim=6, schedule="custom", params={"inv_freq": inv_freq})
    positions = FRACTIONS.astype(dtype)
    with enable_x64(dtype == "float64"):
        tables = traced_tables(spec, jnp.array(positions))
        assert all(table.dtype == np.float32 for table in tables)
    for got, want in zip(tables, exact(spec, positions), strict=True):
        assert abs(np.asarray(got) - want).max() <= 2e-7


def test_known_fractional_positions_go_the_way_of_numpy():
    if not is_jax_on_cpu():
        pytest.skip("only numbers on the host are read")
    positions = np.arange(9) / 4
    want = rotary.cos_sin(SPEC, positions)
    given = jnp.array(positions, np.float32)  # quarters are exact in it
    for got, table in zip(rotary.cos_sin(SPEC, given), want, strict=True):
        assert np.array_equal(got, table)
    with pytest.warns(UserWarning, match="float32 cannot hold every position"):
        rotary.cos_sin(SPEC, jnp.array([2.0**25]))


def test_fractional_positions_that_cannot_be_turned_give_nan():
    positions = jnp.array([0.5, 2.0**28, 2.0**28 + 32, -jnp.inf, jnp.nan, 7.0])
    for table in traced_tables(SPEC, positions):
        assert np.isnan(table).all(axis=1).tolist() == [False, False, True, True, True, False]
    positions = positions if is_jax_on_cpu() else np.asarray(positions)
    with pytest.raises(ValueError, match=r"fractional positions must be <= 2\^28"):
        rotary.cos_sin(SPEC, positions[:3])
    with pytest.raises(ValueError, match="positions must be finite"):
        rotary.cos_sin(SPEC, positions)


@pytest.mark.parametrize("sign", [1, -1])
def test_tables_can_be_differentiated_by_fractional_positions(sign):
    spec = rotary.Rotary(head_dim=8, base=100.0, sign=sign)
    frequencies = rotary.inv_freq(spec)[0]
    at = jnp.array([0.25, 3.5])
    cos, sin = jax.jit(jax.jacfwd(lambda p: rotary.cos_sin(spec, p)))(at)
    back = jax.jit(jax.jacrev(lambda p: rotary.cos_sin(spec, p)))(at)
    radians = np.asarray(at)[:, None] * frequencies
    for index in range(2):
        assert np.allclose(cos[index, :, index], -np.sin(radians[index]) * frequencies, atol=1e-6)
        assert np.allclose(sin[index, :, index], np.cos(radians[index]) * frequencies * sign,
                           atol=1e-6)  # fmt: skip
        assert not cos[index, :, 1 - index].any()
    assert np.allclose(back[0], cos, atol=1e-6)
    assert np.allclose(back[1], sin, atol=1e-6)
    second = jax.jit(jax.hessian(lambda p: rotary.cos_sin(spec, p)[0].sum()))(at)
    assert np.allclose(np.diag(second), -(np.cos(radians) * frequencies**2).sum(1), atol=1e-5)


@pytest.mark.parametrize("name", ["half", "amplitude", "backwards"])
def test_float32_precision_is_the_float32_arithmetic(name):
    spec = SPECS[name]
    positions = np.concatenate([np.arange(2000), ids(spec, 2000, high=2**24)])
    want = rotary.cos_sin(spec, positions, "float32")
    factor = max(1, rotary.inv_freq(spec)[1])
    for tables in (
        rotary.cos_sin(spec, jnp.array(positions), "float32"),
        traced_tables(spec, positions, precision="float32"),
    ):
        for got, table in zip(tables, want, strict=True):
            assert abs(np.asarray(got) - table).max() <= 1.2e-7 * factor


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "bool", "complex64"])
def test_other_types_of_positions_are_refused(dtype):
    positions = jnp.ones(3, dtype)
    with pytest.raises(TypeError, match="positions must be whole numbers"):
        rotary.cos_sin(SPEC, positions)
    with pytest.raises(TypeError, match="positions must be whole numbers"):
        traced_tables(SPEC, positions)


def test_known_positions_are_checked_and_traced_ones_are_turned():
    tables = jax.jit(lambda p: rotary.cos_sin(SPEC, p))(jnp.array([-1, 4]))
    for got, want in zip(tables, exact(SPEC, [-1, 4]), strict=True):
        assert abs(np.asarray(got) - want).max() <= 1.5e-7
    with pytest.raises(ValueError, match="positions must be >= 0, got -1"):
        rotary.cos_sin(SPEC, jnp.array([-1, 4]) if is_jax_on_cpu() else np.array([-1, 4]))


def test_long_numpy_positions_lose_nothing_without_64_bit_types():
    q = jnp.array(numbers(0, 1, 2, 3, 64))
    far = np.array([2**33, 2**33 + 1, 2**35])
    want = rotary.apply(SPEC, np.asarray(q), positions=far)
    assert_near(rotary.apply(SPEC, q, positions=far), want)
    assert_near(jax.jit(lambda q: rotary.apply(SPEC, q, positions=far))(q), want)
    assert_near(rotary.apply(SPEC, q, positions=[5, 6, 7]),
                rotary.apply(SPEC, np.asarray(q), positions=[5, 6, 7]))  # fmt: skip


# --- the rotation ---


@pytest.mark.parametrize(
    ("name", "dtype", "conjugate", "traced"),
    list(pairwise(SPECS, DTYPES, (False, True), (False, True))),
)
def test_apply_equals_that_of_numpy(name, dtype, conjugate, traced):
    spec = SPECS[name]
    q, k = pair(spec, DTYPES[dtype])
    positions = ids(spec, 2, 7)
    want = rotary.apply(spec, q, k, positions=positions, conjugate=conjugate)

    def call(q, k, p):
        return rotary.apply(spec, q, k, positions=p, conjugate=conjugate)

    with enable_x64(dtype == "float64"):
        arrays = jnp.array(q), jnp.array(k), jnp.array(positions)
        for got, expected in zip((jax.jit(call) if traced else call)(*arrays), want, strict=True):
            assert isinstance(got, jax.Array)
            # float64 is rotated by float32 tables, which differ by 2e-7 when traced
            if dtype == "float64":
                assert abs(np.asarray(got) - expected).max() <= 4e-6
            else:
                assert_near(got, expected)


@pytest.mark.parametrize("seq_dim", [-2, -3, 1])
def test_any_axis_of_the_sequence_and_default_positions(seq_dim):
    q, k = numbers(0, 2, 9, 5, 64), numbers(1, 2, 9, 5, 64)
    want = rotary.apply(SPEC, q, k, seq_dim=seq_dim)

    def call(q, k):
        return rotary.apply(SPEC, q, k, seq_dim=seq_dim)

    for function in (call, jax.jit(call)):
        for got, expected in zip(function(jnp.array(q), jnp.array(k)), want, strict=True):
            assert_near(got, expected)


def test_numpy_tables_are_constants_and_tensors_are_refused():
    q, _ = pair(SPEC)
    cos, sin = rotary.cos_sin(SPEC, np.arange(7))
    want = rotary.rotate(q, cos, sin, layout="half")
    assert_near(rotary.rotate(jnp.array(q), cos, sin, layout="half"), want)
    assert_near(jax.jit(lambda q: rotary.rotate(q, cos, sin, layout="half"))(q), want)
    with pytest.raises(TypeError, match="all arrays must be of one library"):
        rotary.rotate(jnp.array(q), torch.from_numpy(cos), torch.from_numpy(sin), layout="half")
    with pytest.raises(TypeError, match="all arrays must be of one library"):
        rotary.rotate(torch.from_numpy(q), jnp.array(cos), jnp.array(sin), layout="half")
    with pytest.raises(TypeError, match="float64 tables need jax"):
        rotary.rotate(jnp.array(q), cos.astype(np.float64), sin.astype(np.float64), layout="half")


def test_out_is_refused():
    q, k = map(jnp.array, pair(SPEC))
    cos, sin = rotary.cos_sin(SPEC, jnp.arange(7))
    for call in (
        lambda: rotary.rotate(q, cos, sin, out=q, layout="half"),
        lambda: rotary.rotate((q, k), cos, sin, out=(q, k), layout="half"),
        lambda: rotary.apply(SPEC, q, k, out=(q, k)),
    ):
        with pytest.raises(TypeError, match=r"out= cannot be used with JAX arrays, .*immutable"):
            call()


def test_what_does_not_fit_is_refused_traced_or_not():
    q = jnp.ones((1, 2, 7, 64))
    cos, sin = rotary.cos_sin(SPEC, jnp.arange(7))
    wrong = [
        (ValueError, "does not fit", lambda q: rotary.rotate(q, cos[:5], sin[:5], layout="half")),
        (ValueError, "cos and sin must have one shape and dtype",
         lambda q: rotary.rotate(q, cos, sin[:5], layout="half")),
        (ValueError, "the last axis of x must be head_dim",
         lambda q: rotary.apply(SPEC, q[..., :32])),
        (TypeError, "x must be one of",
         lambda q: rotary.rotate(q.astype(int), cos, sin, layout="half")),
        (TypeError, "q, k and v must have one dtype",
         lambda q: rotary.rotate((q, q.astype(jnp.float16)), cos, sin, layout="half")),
        (TypeError, "tables must be float32",
         lambda q: rotary.rotate(
             q, cos.astype(jnp.bfloat16), sin.astype(jnp.bfloat16), layout="half")),
        (TypeError, "positions must be whole numbers",
         lambda q: rotary.rotate(q, cos, sin, positions=jnp.ones(7), layout="half")),
    ]  # fmt: skip
    for error, match, call in wrong:
        with pytest.raises(error, match=match):
            call(q)
        with pytest.raises(error, match=match):
            jax.jit(call)(q)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_compiled_rotation_differs_by_one_fused_rounding_at_most(layout, dtype):
    """That of a product, which may move the sum by one unit; 16-bit results rarely."""
    kind = DTYPES[dtype]
    x = numbers(0, 4, 500, 64, dtype=kind)
    cos, sin = rotary.cos_sin(SPEC, np.arange(500))
    want = rotary.rotate(x, cos, sin, layout=layout)
    with enable_x64(dtype == "float64"):
        got = np.asarray(rotary.rotate(jnp.array(x), cos, sin, layout=layout))
    work = np.float64 if dtype == "float64" else np.float32
    first, second = rotary.layouts.pair_slices(64, layout)
    larger = np.empty(x.shape, work)
    larger[..., first] = larger[..., second] = np.maximum(abs(x[..., first]), abs(x[..., second]))
    wide_got, wide_want = got.astype(work), want.astype(work)
    if x.itemsize == 2:
        unit = np.spacing(abs(want))
        assert (abs(wide_got - wide_want) <= unit.astype(work)).all()
        assert (got != want).mean() < 1e-3
    else:
        assert (abs(wide_got - wide_want) <= 2 * np.spacing(larger)).all()


# --- row numbers into tables ---


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
def test_rows_outside_a_table_are_an_error_or_nan_and_never_another_row(dtype):
    info = np.iinfo(dtype)
    rows = np.array([0, 10, 11, info.max, info.min if info.min else 12, 3], dtype)
    inside = np.array([True, True, False, False, False, True])
    q = numbers(0, 1, 2, 6, 64)
    cos, sin = rotary.cos_sin(SPEC, np.arange(11))
    want = rotary.rotate(q[:, :, inside], cos, sin, positions=rows[inside], layout="half")
    with enable_x64(dtype == "int64"):
        tables = jnp.array(cos), jnp.array(sin)

        def call(q, rows):
            return rotary.rotate(q, *tables, positions=rows, layout="half")

        got = np.asarray(jax.jit(call)(q, rows))
        assert np.isnan(got[:, :, ~inside]).all()
        assert_near(got[:, :, inside], want)
        for known in (rows, rows.tolist(), jnp.array(rows))[: 3 if is_jax_on_cpu() else 2]:
            with pytest.raises(ValueError, match="the tables have 11 rows"):
                call(jnp.array(q), known)
        assert_near(call(jnp.array(q[:, :, inside]), jnp.array(rows[inside])), want)


# --- derivatives ---


def torch_gradients(spec, q, k, cos, sin, weights):
    tensors = [torch.from_numpy(np.array(a)).requires_grad_() for a in (q, k, cos, sin)]
    results = rotary.rotate(
        tensors[:2], *tensors[2:], layout=spec.layout, out_layout=spec.out_layout,
        rotary_dim=spec.rotary_dim, start=spec.start,
    )  # fmt: skip
    total = sum((y * torch.from_numpy(w)).sum() for y, w in zip(results, weights, strict=True))
    return [gradient.numpy() for gradient in torch.autograd.grad(total, tensors)]


@pytest.mark.parametrize("name", ["half", "interleaved", "interleaved in, half out", "a slice"])
def test_compiled_gradients_equal_those_of_torch(name):
    spec = SPECS[name]
    q, k = pair(spec)
    weights = numbers(5, *q.shape), numbers(6, *k.shape)
    cos, sin = rotary.cos_sin(spec, np.arange(7))
    want = torch_gradients(spec, q, k, cos, sin, weights)

    def loss(q, k, cos, sin):
        results = rotary.rotate(
            (q, k), cos, sin, layout=spec.layout, out_layout=spec.out_layout,
            rotary_dim=spec.rotary_dim, start=spec.start,
        )  # fmt: skip
        return sum((y * w).sum() for y, w in zip(results, weights, strict=True))

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, cos, sin)
    for ours, theirs in zip(got[:2], want[:2], strict=True):
        assert_near(ours, theirs)
    for ours, theirs in zip(got[2:], want[2:], strict=True):  # sums over batch and heads
        assert np.allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("name", ["half in, interleaved out", "a slice"])
def test_derivatives_of_both_modes_and_orders(name):
    spec = SPECS[name]
    with enable_x64(True):
        q = jnp.array(numbers(0, 1, 2, 3, spec.head_dim, dtype=np.float64))
        cos, sin = (t.astype(jnp.float64) for t in rotary.cos_sin(spec, jnp.arange(3)))

        def call(q, cos, sin):
            y = rotary.rotate(q, cos, sin, layout=spec.layout, out_layout=spec.out_layout,
                              rotary_dim=spec.rotary_dim, start=spec.start)  # fmt: skip
            return (y**3).sum()

        check_grads(
            jax.jit(call), (q, cos, sin), order=2, modes=("fwd", "rev"), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_is_the_conjugate_and_keeps_only_the_tables(dtype):
    q, k = (jnp.array(x, DTYPES[dtype]) for x in pair(SPEC))
    cos, sin = rotary.cos_sin(SPEC, jnp.arange(7))
    (y, _), back = jax.vjp(lambda q, k: rotary.rotate((q, k), cos, sin, layout="half"), q, k)
    kept = sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(back))
    assert cos.nbytes + sin.nbytes <= kept <= 2 * (cos.nbytes + sin.nbytes)
    want = rotary.rotate((q, k), cos, sin, conjugate=True, layout="half")
    for got, expected in zip(back((q, k)), want, strict=True):
        assert_near(got, expected)
    tangent = jax.jvp(lambda q: rotary.rotate(q, cos, sin, layout="half"), (k,), (q[:, :2],))[1]
    assert_near(tangent, y[:, :2])


# --- transforms ---


def test_vmap_and_scan_equal_a_loop():
    q, k = numbers(0, 3, 2, 4, 7, 64), numbers(1, 3, 2, 2, 7, 64)
    positions = ids(SPEC, 3, 2, 7)

    def call(q, k, p):
        return rotary.apply(SPEC, q, k, positions=p)

    want = [call(*arrays) for arrays in zip(q, k, positions, strict=True)]
    mapped = jax.jit(jax.vmap(call))(q, k, positions)
    _, scanned = jax.lax.scan(lambda carry, x: (carry, call(*x)), None, (q, k, positions))
    inner = jax.jit(jax.vmap(jax.vmap(call, in_axes=(1, 1, None)), in_axes=(0, 0, 0)))(
        q[..., None, :, :].swapaxes(2, 3), k[..., None, :, :].swapaxes(2, 3), positions[:, 0]
    )
    assert inner[0].shape[-3:] == (4, 7, 64)
    for index, expected in enumerate(want):
        for part in range(2):
            assert_near(mapped[part][index], expected[part])
            assert_near(scanned[part][index], expected[part])
    default = jax.jit(jax.vmap(lambda q: rotary.apply(SPEC, q)))(q)
    assert_near(default, rotary.apply(SPEC, q.reshape(6, 4, 7, 64)).reshape(q.shape))


def test_no_tracer_is_kept():
    """Tables made while a call is traced must not be found by the next one."""
    angles._cache._entries.clear()
    angles._cache.bytes = 0
    q = jnp.array(numbers(0, 1, 2, 300, 64))
    want = rotary.apply(SPEC, np.asarray(q))
    assert_near(jax.jit(lambda: rotary.apply(SPEC, q))(), want)
    assert_near(jax.jit(lambda q: rotary.apply(SPEC, q))(q), want)
    assert_near(jax.vmap(lambda q: rotary.apply(SPEC, q))(q[None])[0], want)
    assert not any("jax" in str(key[-1]) for key in angles._cache._entries)
    assert_near(rotary.apply(SPEC, q), want)
    kept = [entry for key, (entry, _) in angles._cache._entries.items() if key[0] == "tables"
            and "jax" in key[-1]]  # fmt: skip
    assert len(kept) == 1
    assert not any(isinstance(table, jax.core.Tracer) for entry in kept for table in entry)
    assert_near(rotary.apply(SPEC, q), want)


def test_row_numbers_may_have_the_other_byte_order():
    q, rows = jnp.array(numbers(0, 1, 2, 3, 64)), np.array([4, 0, 2])
    cos, sin = rotary.cos_sin(SPEC, jnp.arange(5))
    want = rotary.rotate(q, cos, sin, SPEC, positions=rows)
    other = rows.astype(rows.dtype.newbyteorder("S"))
    np.testing.assert_array_equal(rotary.rotate(q, cos, sin, SPEC, positions=other), want)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["half", "a slice", "half in, interleaved out"])
def test_the_strict_settings_of_jax_are_kept(name, dtype, backend, request):
    if backend == "gpu":
        request.getfixturevalue("for_a_gpu")
    spec = SPECS[name]
    q, k = pair(spec, DTYPES[dtype])
    positions = ids(spec, 2, 7)
    with (
        jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True), jax.transfer_guard("log"),
    ):  # fmt: skip
        call = jax.jit(lambda q, k, p: rotary.apply(spec, q, k, positions=p))
        want = rotary.apply(spec, q, k, positions=positions)
        for got, expected in zip(call(q, k, positions), want, strict=True):
            assert_near(got, expected)
        jax.jit(lambda p: rotary.cos_sin(spec, p))(positions.astype(np.float32))
        jax.jit(lambda p: rotary.cos_sin(spec, p, "float32"))(positions)
        rotary.rotate(jnp.array(q), *rotary.cos_sin(spec, jnp.arange(9)), positions=[1] * 7,
                      rotary_dim=spec.rotary_dim, start=spec.start, layout=spec.layout)  # fmt: skip


def test_an_exported_call_takes_any_batch_and_sequence():
    batch, seq = export.symbolic_shape("batch, seq")
    q = jax.ShapeDtypeStruct((batch, 4, seq, 80), np.float32)
    p = jax.ShapeDtypeStruct((batch, seq), np.int32)
    plain = export.export(jax.jit(lambda q: rotary.apply(PARTIAL, q)))(q)
    at = export.export(jax.jit(lambda q, p: rotary.apply(PARTIAL, q, positions=p)))(q, p)
    x, positions = numbers(0, 3, 4, 11, 80), ids(PARTIAL, 3, 11)
    assert_near(plain.call(x), rotary.apply(PARTIAL, x))
    assert_near(at.call(x, positions), rotary.apply(PARTIAL, x, positions=positions))


# --- schedules that depend on the length ---


def test_a_length_that_is_known_gives_the_scaled_tables_under_jit():
    q = numbers(0, 2, 2, 40, 64)
    positions = np.arange(40, dtype=np.int32)
    for options in ({}, {"seq_len": 64}, {"seq_len": np.int64(64)}, {"seq_len": [20, 64]}):
        want = rotary.apply(DYNAMIC, q, **options)
        assert_near(jax.jit(lambda q, o=options: rotary.apply(DYNAMIC, q, **o))(q), want)
        assert_near(rotary.apply(DYNAMIC, jnp.array(q), **options), want)
    call = jax.jit(lambda q, p: rotary.apply(DYNAMIC, q, positions=p, seq_len=40))
    assert_near(call(q, positions), rotary.apply(DYNAMIC, q))
    rows = jnp.array([np.arange(40), np.arange(40) + 50])
    assert_near(rotary.apply(DYNAMIC, jnp.array(q), positions=rows),
                rotary.apply(DYNAMIC, q, positions=np.asarray(rows)))  # fmt: skip
    static = jax.jit(lambda q, n: rotary.apply(DYNAMIC, q, seq_len=n), static_argnums=1)
    assert_near(static(q, 64), rotary.apply(DYNAMIC, q, seq_len=64))


def test_a_length_that_is_traced_is_refused():
    q, positions = jnp.ones((2, 2, 40, 64)), jnp.arange(40)
    with pytest.raises(ValueError, match=r"under jax.jit .* needs seq_len"):
        jax.jit(lambda p: rotary.cos_sin(DYNAMIC, p))(positions)
    for length in (64, jnp.array([20, 64])):
        for call in (
            lambda n: rotary.apply(DYNAMIC, q, seq_len=n),
            lambda n: rotary.cos_sin(DYNAMIC, jnp.stack([positions] * 2), seq_len=n),
        ):
            with pytest.raises(ValueError, match="make it a static argument"):
                jax.jit(call)(length)
    jax.jit(lambda n: rotary.apply(SPEC, q, seq_len=n))(64)  # no matter to the other schedules


# --- the compiled program ---


def program(function, *arguments):
    """The text of the optimised program, as XLA makes it for a CPU."""
    if not is_jax_on_cpu():
        pytest.skip("another program than that for a CPU")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        return jax.jit(function).lower(*arguments).compile().as_text()
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def operations_of(text):
    """(operations of the entry, all operations) of a program."""
    # XLA of jax 0.4 puts a loop for more than one thread into a function, and calls that
    text = re.sub(r" call\((.*to_apply=%parallel_)", r" fusion(\1", text)
    entry = text[text.index("\nENTRY") :]
    found = [re.findall(r"= (?:\(.*?\)|\S+) ([a-z][\w-]*)\(", part) for part in (entry, text)]
    no_work = ("parameter", "tuple", "constant")
    return [name for name in found[0] if name not in no_work], set(found[1])


LAYOUTS = itertools.product(("half", "interleaved"), repeat=2)
WAYS = pairwise(LAYOUTS, ((128, 0), (64, 0), (32, 64)), ("float32", "bfloat16"))


@pytest.mark.parametrize(("layouts", "part", "dtype"), list(WAYS))
def test_a_rotation_is_one_loop(layouts, part, dtype):
    (layout, out_layout), (rotary_dim, start) = layouts, part
    x = jax.ShapeDtypeStruct((1, 8, 512, 128), DTYPES[dtype])
    table = jax.ShapeDtypeStruct((512, rotary_dim // 2), np.float32)

    def rotate(x, cos, sin):
        return rotary.rotate(x, cos, sin, layout=layout, out_layout=out_layout,
                             rotary_dim=rotary_dim, start=start)  # fmt: skip

    def gradient(x, cos, sin):
        return jax.vjp(lambda y: rotate(y, cos, sin), x)[1](x)[0]

    for function in (rotate, gradient):
        steps, operations = operations_of(program(function, x, table, table))
        assert steps == ["fusion"]
        assert not operations & {"gather", "scatter", "dot", "while", "sort", "custom-call"}
        assert ("convert" in operations) == (dtype == "bfloat16")
        if layout == out_layout:
            assert "transpose" not in operations


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adjacent_pairs_are_turned_by_the_fastest_loop_of_their_type(dtype):
    """A reversal for 32 bits, forward and back; for 16 a branch, and a join in the transpose.

    Interior padding, which the transpose of strided slices is, is several times slower in 16 bits.
    """
    x = jax.ShapeDtypeStruct((1, 8, 512, 128), DTYPES[dtype])
    table = jax.ShapeDtypeStruct((512, 64), np.float32)

    def rotate(x, cos, sin):
        return rotary.rotate(x, cos, sin, layout="interleaved")

    def gradient(x, cos, sin):
        return jax.vjp(lambda y: rotate(y, cos, sin), x)[1](x)[0]

    if dtype == "bfloat16" and not hasattr(jax.lax, "split"):
        pytest.skip(f"JAX {jax.__version__} slices instead of splitting, so the transpose pads")
    way = {"reverse"} if dtype == "float32" else {"concatenate", "slice"}
    for function in (rotate, gradient):
        steps, operations = operations_of(program(function, x, table, table))
        assert steps == ["fusion"]
        assert operations & {"reverse", "concatenate", "slice", "pad", "gather"} == way


@pytest.mark.parametrize(
    ("rotary_dim", "start", "block"), [(128, 0, 64), (64, 0, 32), (32, 64, 16)]
)
def test_halves_are_joined_in_blocks_as_wide_as_they_allow(rotary_dim, start, block):
    """Joined channel by channel it would be one loop as well, several times slower."""
    x = jax.ShapeDtypeStruct((1, 8, 512, 128), np.float32)
    table = jax.ShapeDtypeStruct((512, rotary_dim // 2), np.float32)
    text = program(
        lambda x, c, s: rotary.rotate(x, c, s, rotary_dim=rotary_dim, start=start, layout="half"),
        x,
        table,
        table,
    )
    (joined,) = re.findall(r"= f32\[([\d,]+)\]\S* concatenate\(", text)
    assert joined.split(",")[-2:] == [str(128 // block), str(block)]


@pytest.mark.parametrize("name", ["half", "interleaved", "amplitude"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tables_made_inside_are_made_once(name, dtype):
    """A loop for cos, one for sin, and one for each array, with no table in it."""
    spec = SPECS[name]
    q, k = (jax.ShapeDtypeStruct((1, heads, 512, 64), DTYPES[dtype]) for heads in (8, 2))
    positions = jax.ShapeDtypeStruct((512,), np.int32)
    text = program(lambda q, k, p: rotary.apply(spec, q, k, positions=p), q, k, positions)
    steps, _ = operations_of(text)
    assert steps == ["fusion"] * 4
    made = re.findall(r"ROOT \S+ = f32\[(?:1,)?512,32\]\S* divide\(", text)
    assert len(made) == 2
    assert text.count("shift-right-logical(") == 2 * steps_of_one_table(spec)


def steps_of_one_table(spec):
    """How often the program of cos alone shifts: the product of 64 bits and the quadrant."""
    positions = jax.ShapeDtypeStruct((512,), np.int32)
    return program(lambda p: rotary.cos_sin(spec, p)[0], positions).count("shift-right-logical(")


def test_tables_of_a_traced_call_need_no_64_bit_type():
    text = jax.jit(lambda p: rotary.cos_sin(SPEC, p)).lower(jnp.arange(9)).as_text()
    assert not re.search(r"[iuf]64>", text)


# --- for a GPU ---


@pytest.fixture
def for_a_gpu(monkeypatch):
    """Programs are traced as where JAX has a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("for_a_gpu")
@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(SPECS, itertools.cycle(("float32", "bfloat16"))))
)
def test_the_formula_for_a_gpu_has_the_same_numbers_and_gradients(name, dtype):
    spec = SPECS[name]
    q, k = pair(spec, DTYPES[dtype])
    positions = ids(spec, 2, 7)
    want = rotary.apply(spec, q, k, positions=positions)
    back = rotary.apply(spec, q, k, positions=positions, conjugate=True)

    @jax.jit
    def both_ways(q, k):
        results, transpose = jax.vjp(lambda q, k: rotary.apply(spec, q, k, positions=positions),
                                     q, k)  # fmt: skip
        return results, transpose((q, k))

    for got, expected in zip(both_ways(jnp.array(q), jnp.array(k)), (want, back), strict=True):
        for array, other in zip(got, expected, strict=True):
            assert_near(array, other)


@pytest.mark.usefixtures("for_a_gpu")
@pytest.mark.parametrize("out_layout", ["half", "interleaved"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_gpu_gets_no_blocks_of_channels_and_no_branches(layout, out_layout):
    """XLA for a GPU reads blocks, and stacked pairs, at half the speed.

    If a table has a sign of its own for each channel, XLA writes it to memory and reads it again.
    """
    x = jax.ShapeDtypeStruct((1, 8, 512, 128), DTYPES["bfloat16"])
    table = jax.ShapeDtypeStruct((512, 64), np.float32)

    def call(*operands):
        return rotary.rotate(*operands, layout=layout, out_layout=out_layout)

    text = jax.jit(call).lower(x, table, table).as_text()
    joined = re.findall(r"stablehlo.concatenate.* -> tensor<(\S+)xbf16>", text)
    assert joined == (["1x8x512x128"] if out_layout == "half" else [])
    assert ("stablehlo.reverse" in text) == (layout == out_layout == "interleaved")
    assert ("stablehlo.pad" in text) == (layout == "half" and out_layout == "interleaved")
    assert not re.search(r"stablehlo.(select|multiply).* tensor<(1x)*512x64x2xf32>", text)
