"""`rotary.fused` for JAX against the reference: values, casts, caches, gradients, the program."""

import itertools
import re

import numpy as np
import pytest
from libraries import if_installed, is_jax_on_cpu

import rotary
from rotary import KVCache, Norm, Rotary, fused

jax = if_installed("jax")
jnp = if_installed("jax.numpy")
ml_dtypes = if_installed("ml_dtypes")
torch = if_installed("torch")
check_grads = if_installed("jax.test_util").check_grads
jax_fused = if_installed("rotary.kernels.jax.fused")

pytestmark = pytest.mark.usefixtures("numpy_by_formula", "xla_in_less_time")
EPS = 1e-5
HEADS, SEQ = (4, 2), 6
SPECS = {
    "half": Rotary(8, base=100.0),
    "interleaved": Rotary(8, base=100.0, layout="interleaved"),
    "mixed": Rotary(8, base=100.0, layout="interleaved", out_layout="half"),
    "slice": Rotary(10, 4, 3, base=100.0),
    "trailing": Rotary(8, 4, 4, base=100.0, layout="interleaved"),
    "backwards": Rotary(8, base=100.0, sign=-1),
}
TYPES = {
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
RNG = np.random.default_rng(0)


def numbers(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def arrays(spec, seq_dim=-2, batch=(2,), dtype=np.float32):
    made = [numbers(*batch, heads, SEQ, spec.head_dim, dtype=dtype) for heads in HEADS]
    return [x.swapaxes(-2, -3) if seq_dim == -3 else x for x in made]


def norm_of(spec, form="head", add_one=False, dtype=np.float32):
    shapes = {"head": (), "heads": (None,), "full": (None,)}[form]
    made = [numbers(*[count] * len(shapes), spec.head_dim, dtype=dtype) for count in HEADS]
    made = [w.reshape(-1) if form == "full" else w for w in made]
    return Norm(*made, EPS, add_one=add_one)


def in_jax(norm):
    return Norm(jnp.asarray(norm.q), jnp.asarray(norm.k), norm.eps, add_one=norm.add_one)


def assert_close(got, want, limit=2e-6):
    """float32: apart by no more than this share of the largest result."""
    assert isinstance(got, jax.Array)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=0, atol=limit * np.abs(want).max())


def assert_codes(got, want):
    """8 bits, and 16: the same numbers but for one in a hundred, and that a neighbour.

    XLA fuses products and sums, and divides by a constant as a product with its reciprocal.
    """
    assert got.dtype == want.dtype
    codes = [np.asarray(x).view(f"i{x.dtype.itemsize}").astype(int) for x in (got, want)]
    apart = np.abs(codes[0] - codes[1])
    assert apart.max(initial=0) <= 1
    assert (apart != 0).mean() <= 0.01


# --- values ---


@pytest.mark.parametrize(
    ("name", "form"), list(zip(SPECS, itertools.cycle(("head", "full", "heads")), strict=False))
)
def test_values_are_those_of_the_reference(name, form):
    spec = SPECS[name]
    seq_dim = -3 if form == "heads" else -2
    q, k = arrays(spec, seq_dim)
    norm = norm_of(spec, form, add_one=form == "full")
    want = fused(q, k, None, spec, norm=norm, seq_dim=seq_dim)
    got = fused(*map(jnp.asarray, (q, k)), None, spec, norm=in_jax(norm), seq_dim=seq_dim)
    assert got[2] is None
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", ml_dtypes.bfloat16), ("interleaved", np.float16)]
)
def test_16_bits_are_rounded_once(name, dtype):
    spec = SPECS[name]
    q, k = (numbers(2, heads, 50, 8, dtype=dtype) for heads in HEADS)
    norm = norm_of(spec, dtype=dtype)
    want = fused(q, k, None, spec, norm=norm)
    got = fused(*map(jnp.asarray, (q, k)), None, spec, norm=in_jax(norm))
    assert_codes(got[0], want[0])
    assert_codes(got[1], want[1])


def test_positions_tables_and_rows_of_tables():
    spec = SPECS["slice"]
    q, k = map(jnp.asarray, arrays(spec))
    ids = RNG.integers(0, 40, (2, SEQ))
    want = rotary.apply(spec, q, k, positions=ids, seq_dim=-2)
    tables = rotary.cos_sin(spec, jnp.arange(40))
    for options in ({"positions": ids}, {"positions": ids, "tables": tables}):
        got = fused(q, k, None, spec, seq_dim=-2, **options)
        assert_close(got[0], np.asarray(want[0]))
        assert_close(got[1], np.asarray(want[1]))


def test_one_of_both_is_normalized_and_v_is_returned_as_it_is():
    spec = SPECS["half"]
    q, k = arrays(spec)
    weight = numbers(8)
    v = jnp.asarray(k)
    got = fused(jnp.asarray(q), jnp.asarray(k), v, spec, norm=Norm(None, weight, EPS))
    want = fused(q, k, None, spec, norm=Norm(None, weight, EPS))
    assert got[2] is v
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


# --- casts ---


@pytest.mark.parametrize("kind", TYPES)
def test_casts_are_those_of_the_reference(kind):
    spec = SPECS["half"]
    q, k = (numbers(2, heads, 100, 8) for heads in HEADS)
    q[0, 0, 0] = 1e6
    scale = (np.array([0.1, 0.2, 0.3, 0.4], np.float32), 0.5, "token")
    want = fused(q, k, k, spec, dtype=kind, scale=scale)
    got = fused(*map(jnp.asarray, (q, k, k)), spec, dtype=kind, scale=scale)
    assert got[0].dtype == TYPES[kind]
    assert_codes(got[0], want[0])
    assert_codes(got[1], want[1])
    assert_codes(got[2][0], want[2][0])
    np.testing.assert_allclose(got[2][1], want[2][1], rtol=1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_too_small_for_a_scale_is_zero(kind):
    q = jnp.zeros((2, 8)).at[:, 0].set(jnp.array([1e-36, 1e-37]))
    q = q if kind == "float8_e4m3fn" else q * 0.1
    (y, scales), _, _ = fused(q, None, None, SPECS["half"], dtype=kind, scale="token")
    assert (y.astype("float32") == 0).all()
    assert (scales == 1).all()


# --- caches ---

SLOTS = np.array([[11, 3, -1, 0, 8, 2], [1, -7, 4, 5, 6, 7]])
FORMS = {"flat": (12, 2), "blocks": (3, 4, 2), "blocks, heads first": (3, 2, 4)}


def memory_of(form, dims, dtype=np.float32):
    made = [np.full((*FORMS[form], dim), 77, dtype) for dim in dims]
    return [x.swapaxes(1, 2) if form == "blocks, heads first" else x for x in made]


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_a_cache_of_few_bits_and_its_scales(kind):
    spec = SPECS["half"]
    q, k = arrays(spec)
    memory = memory_of("blocks", (8, 8), TYPES[kind])
    scales = np.zeros((3, 4, 2), np.float32)
    heads = np.array([0.1, 0.2], np.float32)
    given = [jnp.asarray(x) for x in (*memory, scales)]
    _, (keys, key_scales), values = fused(
        *map(jnp.asarray, (q, k, k)), spec, cache=KVCache(*given[:2], SLOTS, given[2], heads)
    )
    fused(q, k, k, spec, cache=KVCache(*memory, SLOTS, scales, heads))
    np.testing.assert_allclose(key_scales, scales, rtol=1e-6)
    assert (scales == 0).sum() == 4  # the two slots that nothing was written to
    assert_codes(keys, memory[0])
    assert_codes(values, memory[1])


@pytest.mark.usefixtures("optimized")
def test_a_donated_cache_is_written_in_place():
    spec = SPECS["half"]
    q, k = map(jnp.asarray, arrays(spec))
    memory = [jnp.zeros((64, 16, 2, 8)) for _ in "kv"]

    def step(q, k, v, keys, values, slots):
        return fused(q, k, v, spec, cache=KVCache(keys, values, slots))

    args = (q, k, k, *memory, jnp.asarray(SLOTS))
    compiled = jax.jit(step, donate_argnums=(3, 4)).lower(*args).compile()
    assert not re.search(r"= f32\[64,16,2,8\]\S* copy\(", compiled.as_text())
    size = sum(x.nbytes for x in memory)
    assert compiled.memory_analysis().alias_size_in_bytes == size
    assert compiled.memory_analysis().temp_size_in_bytes < size / 8
    places = [x.unsafe_buffer_pointer() for x in memory]
    _, keys, values = compiled(*args)
    assert [x.unsafe_buffer_pointer() for x in (keys, values)] == places
    assert all(x.is_deleted() for x in memory)


def test_a_traced_slot_beyond_the_cache_is_skipped():
    spec = SPECS["half"]
    q, k = map(jnp.asarray, arrays(spec, batch=()))
    slots = jnp.array([0, 12, 99, -1, -12, 11])
    call = jax.jit(lambda keys, s: fused(q, k, None, spec, cache=KVCache(keys, None, s))[1])
    new = call(jnp.full((12, 2, 8), 77.0), slots)
    assert ((new == 77).all((1, 2)) == np.isin(np.arange(12), (0, 11), invert=True)).all()


# --- transforms ---


@pytest.mark.parametrize("form", ["heads", "full"])
def test_gradients_are_those_of_torch(form):
    """Those of torch's compiled loops, which are written by hand."""
    spec = SPECS["slice"]
    q, k = arrays(spec)
    norm = norm_of(spec, form, add_one=True)
    slopes = [numbers(*x.shape) for x in (q, k)]

    def loss(q, k, wq, wk):
        ys = fused(q, k, None, spec, norm=Norm(wq, wk, EPS, add_one=True))
        return sum((y * slope).sum() for y, slope in zip(ys, slopes, strict=False))

    operands = q, k, norm.q, norm.k
    got = jax.jit(jax.grad(loss, argnums=range(4)))(*map(jnp.asarray, operands))
    leaves = [torch.tensor(x, requires_grad=True) for x in operands]
    slopes = [torch.tensor(x) for x in slopes]
    loss(*leaves).backward()
    for grad, leaf in zip(got, leaves, strict=True):
        assert_close(grad, leaf.grad.numpy(), 2e-5)


def test_derivatives_of_both_modes_and_through_a_cache():
    spec = Rotary(4, base=100.0)
    q, k, weight = numbers(2, 3, 4), numbers(1, 3, 4), 1 + 0.1 * numbers(4)

    def call(q, k, weight, keys):
        cache = KVCache(keys, None, jnp.array([1, -1, 0]))
        return fused(q, k, None, spec, norm=Norm(weight, weight, EPS), cache=cache)[:2]

    check_grads(jax.jit(call), (q, k, weight, numbers(4, 1, 4)), order=1, atol=2e-2, rtol=2e-2)


def test_vmap_equals_the_whole():
    spec, norm = SPECS["half"], norm_of(SPECS["half"], "full")
    q, k = map(jnp.asarray, arrays(spec))
    tables = rotary.cos_sin(spec, jnp.arange(SEQ))

    def call(q, k):
        return fused(q, k, None, spec, tables=tables, norm=norm, seq_dim=-2)[:2]

    for got, want in zip(jax.vmap(call)(q, k), call(q, k), strict=True):
        assert_close(got, np.asarray(want))


# --- the program ---


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("layout", "dtype"), [("half", "float32"), ("interleaved", "float32"), ("half", "bfloat16")]
)
def test_norm_rotation_and_rounding_are_one_loop_behind_the_mean(layout, dtype):
    """What XLA for a CPU makes of them: a sum over each head, and one loop over q.

    It converts 16-bit arrays to float32 before the sum; the loop reads them as they came.
    """
    if not is_jax_on_cpu():
        pytest.skip("another program than that for a CPU")
    if jax_fused.barrier is not jax.lax.optimization_barrier:
        pytest.skip(f"JAX {jax.__version__} has no derivative of what keeps the two apart")
    spec = Rotary(128, layout=layout)
    shape = (1, 2048, 32, 128)
    q, weight = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((128,), dtype)
    table = jax.ShapeDtypeStruct((2048, 64), "float32")

    def call(q, weight, cos, sin):
        norm = Norm(weight, None, EPS)
        return fused(q, None, None, spec, tables=(cos, sin), norm=norm, seq_dim=-3)[0]

    text = jax.jit(call).lower(q, weight, table, table).compile().as_text()
    entry = text[text.index("\nENTRY") :].splitlines()[2:]
    large = [line for line in entry if re.search(r"= \w+\[1,2048,32,(128|64,2|2,64)\]", line)]
    made = [line for line in large if "parameter(" not in line]
    assert "ROOT" in made[-1]
    # JAX 0.6 gives the loop to several threads, numbers the operands, and writes the squares
    is_shared = re.search(r"to_apply=%parallel_\w+_fusion", made[-1])
    assert is_shared or "kind=kLoop" in made[-1]
    assert re.search(r"%(q|Arg_0)\b", made[-1])
    assert len(made) == (1 if dtype == "float32" and not is_shared else 2)


# --- refusals ---

Q, KEY = jnp.ones((4, SEQ, 8)), jnp.ones((2, SEQ, 8))
CACHE, PLACES = jnp.zeros((16, 2, 8)), np.arange(SEQ)
REFUSED = [
    (lambda f: f(out=(Q, KEY)), TypeError, "immutable"),
    (lambda f: f(norm=Norm(torch.ones(8), None, EPS)), TypeError, "norm weights"),
    (lambda f: f(dtype="int8", scale=None), TypeError, "scale of q is None"),
    (lambda f: f(dtype="int8", scale=np.zeros(4)), ValueError, "finite and not 0, got 0.0"),
    (lambda f: f(k=torch.ones(2, SEQ, 8)), TypeError, "one library"),
    (lambda f: f(cache=KVCache(CACHE, None, PLACES + 11)), ValueError, "run to 16"),
    (lambda f: f(cache=KVCache(CACHE, None, PLACES * 0.5)), TypeError, "whole"),
    (lambda f: fused(Q.astype(int), None, None, SPECS["half"]), TypeError, "x must"),
    (lambda f: fused(Q, np.ones(KEY.shape), None, SPECS["half"]), TypeError, "one dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_what_does_not_fit_is_refused(call, error, text):
    def f(k=KEY, v=None, **options):
        return fused(Q, k, v, SPECS["half"], **options)

    with pytest.raises(error, match=re.escape(text)) as caught:
        call(f)
    assert "\n" not in str(caught.value).partition("\n--------------------")[0]
