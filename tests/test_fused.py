"""`rotary.fused` against formulas written out here, one token and one head at a time."""

import itertools
import math
import re

import numpy as np
import pytest
from libraries import if_installed
from published import scaled

import rotary
from rotary import KVCache, LatentCache, Norm, Rotary, fused

ml_dtypes = if_installed("ml_dtypes")
torch = if_installed("torch")

EPS = 1e-5
RNG = np.random.default_rng(0)
HEADS, SEQ, DIM = (4, 2), 6, 8
TYPES = {"int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
         "float8_e5m2": ml_dtypes.float8_e5m2}  # fmt: skip
SPECS = {
    "half": Rotary(DIM, base=100.0),
    "interleaved": Rotary(DIM, base=100.0, layout="interleaved"),
    "mixed": Rotary(DIM, base=100.0, layout="interleaved", out_layout="half"),
    "slice": Rotary(DIM, 4, 2, base=100.0),
    "trailing": Rotary(DIM, 4, 4, base=100.0, layout="interleaved"),
    "yarn": scaled("yarn", DIM, 4.0, 64),
    "backwards": Rotary(DIM, base=100.0, sign=-1),
}  # fmt: skip


def arrays(shape=(), dtype=np.float64, heads=HEADS, dim=DIM):
    return [RNG.standard_normal((*shape, count, SEQ, dim)).astype(dtype) for count in heads]


def turned(spec, row, position):
    """One row, pair by pair, by a complex number."""
    frequencies, factor = rotary.inv_freq(spec)
    read, written = (
        rotary.layouts.pair_indices(spec.rotary_dim, layout, spec.start)
        for layout in (spec.layout, spec.out_layout)
    )
    result = np.array(row)
    for frequency, (a, b), (c, d) in zip(frequencies, read, written, strict=True):
        value = complex(row[a], row[b]) * factor
        value *= complex(math.cos(frequency * position), spec.sign * math.sin(frequency * position))
        result[c], result[d] = value.real, value.imag
    return result


def expected(spec, x, weight, form, add_one=0):
    """x (..., heads, seq, dim) normalized and rotated, by loops."""
    result = np.empty(x.shape)
    for index in np.ndindex(*x.shape[:-3], x.shape[-2]):
        *batch, at = index
        token = x[(*batch, slice(None), at)]  # (heads, dim)
        for head, row in enumerate(token):
            if form == "none":
                gain, mean = 1, 1 - EPS
            elif form == "full":
                gain, mean = weight.reshape(token.shape)[head], np.square(token).mean()
            else:
                gain = weight if form == "head" else weight[head]
                mean = np.square(row).mean()
            row = row / math.sqrt(mean + EPS) * (gain + add_one if form != "none" else 1)
            result[(*batch, head, at)] = turned(spec, row, at)
    return result


FORMS = "none", "head", "heads", "full"


def weights(form, heads=HEADS, dim=DIM):
    shapes = {"head": lambda _: (dim,), "heads": lambda n: (n, dim), "full": lambda n: (n * dim,)}
    if form == "none":
        return [None, None]
    return [RNG.standard_normal(shapes[form](count)) for count in heads]


@pytest.fixture(autouse=True, params=["formula", "loops"])
def way(request):
    """What takes NumPy arrays: the reference implementation, or the compiled loops."""
    if request.param == "formula":
        request.getfixturevalue("numpy_by_formula")
    else:
        pytest.importorskip("numba")
    return request.param


@pytest.mark.parametrize("add_one", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SPECS)
def test_both_ways_compute_the_formula(name, form, add_one):
    spec, (q, k), (wq, wk) = SPECS[name], arrays((2,)), weights(form)
    norm = Norm(wq, wk, EPS, add_one=add_one)
    got = fused(q, k, None, spec, norm=norm)
    assert got[2] is None
    for x, y, weight in zip((q, k), got, (wq, wk), strict=False):
        want = expected(spec, x, weight, form, add_one)
        np.testing.assert_allclose(y, want, rtol=0, atol=3e-7 * np.abs(want).max())


def test_one_of_both_may_be_left_unnormalized():
    q, k = arrays()
    y, z, _ = fused(q, k, None, SPECS["half"], norm=Norm(None, np.ones(DIM), EPS))
    np.testing.assert_array_equal(y, rotary.apply(SPECS["half"], q))
    assert np.abs(z - rotary.apply(SPECS["half"], k)).max() > 0.01


@pytest.mark.parametrize("form", ["head", "heads", "full"])
@pytest.mark.parametrize("seq_dim", [-2, -3])
def test_any_order_of_axes(seq_dim, form):
    spec, (q, k), (wq, wk) = SPECS["slice"], arrays((2,)), weights(form)
    norm = Norm(wq, wk, EPS)
    want = fused(q, k, k, spec, norm=norm)
    if seq_dim == -3:
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    got = fused(q, k, k, spec, norm=norm, seq_dim=seq_dim)
    for y, z in zip(got, want, strict=True):
        np.testing.assert_array_equal(y.swapaxes(1, 2) if seq_dim == -3 else y, z)


def test_positions_and_tables():
    spec, (q, k) = SPECS["half"], arrays((2,))
    ids = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    want = fused(q, k, None, spec, ids, seq_dim=-2)
    for y, x in zip(want, (q, k), strict=False):
        np.testing.assert_array_equal(y, rotary.apply(spec, x, positions=ids, seq_dim=-2))
    tables = rotary.cos_sin(spec, np.arange(10))
    for y, z in zip(fused(q, k, None, spec, ids, tables=tables, seq_dim=-2), want, strict=False):
        np.testing.assert_array_equal(y, z)
    tables = rotary.cos_sin(spec, ids)
    for y, z in zip(fused(q, k, None, spec, tables=tables, seq_dim=-2), want, strict=False):
        np.testing.assert_array_equal(y, z)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax", "compiled"])
def test_a_centred_grid_rotates_backwards_if_asked_to(library):
    spec = Rotary(DIM, axes=(0, 1) * 2)
    where = rotary.positions.grid(2, 3, origin="center")
    q, k = arrays((2,), np.float32)
    wanted = rotary.apply(spec, q, k, positions=where, seq_dim=-2, allow_negative=True)
    call = fused if library != "compiled" else torch.compile(fused, backend="eager")
    if library == "jax":
        q, k = map(if_installed("jax.numpy").asarray, (q, k))
    elif library != "numpy":
        q, k, where = map(torch.from_numpy, (q, k, where))
    ours = call(q, k, None, spec, where, seq_dim=-2, allow_negative=True)
    for mine, other in zip(ours, wanted, strict=False):
        np.testing.assert_allclose(np.asarray(mine), other, rtol=0, atol=1e-6)
    if library != "compiled":
        with pytest.raises(ValueError, match=r"positions must be >= 0, got -1.0; pass allow_neg"):
            fused(q, k, None, spec, where, seq_dim=-2)


def test_16_bits_are_rounded_once():
    spec, norm = SPECS["half"], Norm(*weights("head"), EPS)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        q, k = arrays(dtype=dtype)
        wide = fused(q.astype(np.float32), k.astype(np.float32), None, spec, norm=norm)
        for y, z in zip(fused(q, k, None, spec, norm=norm), wide[:2], strict=False):
            assert y.dtype == dtype
            np.testing.assert_array_equal(y, z.astype(dtype))


# --- casts ---


@pytest.mark.parametrize("kind", TYPES)
def test_a_cast_divides_by_the_scale_rounds_and_saturates(kind):
    spec, (q, k) = SPECS["half"], arrays(dtype=np.float32)
    q[0, 0] = 1e6
    scale = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    y, z, _ = fused(q, k, None, spec, dtype=kind, scale=(scale, 0.5, 1.0))
    wide = [rotary.apply(spec, x) for x in (q, k)]
    largest = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[kind]
    for result, x, by in zip((y, z), wide, (scale[:, None, None], np.float32(0.5)), strict=True):
        assert result.dtype == TYPES[kind]
        number = np.clip(x / by, -largest, largest)
        number = np.rint(number) if kind == "int8" else number
        np.testing.assert_array_equal(
            result.astype(np.float32), number.astype(TYPES[kind]).astype(np.float32)
        )


@pytest.mark.parametrize("kind", TYPES)
def test_scales_per_token_use_the_whole_range(kind):
    spec, (q, k) = SPECS["half"], arrays(dtype=np.float32)
    k[:, 2] = 0
    (y, scales), (z, others), _ = fused(q, k, None, spec, dtype=kind, scale="token")
    wide = rotary.apply(spec, q)
    largest = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[kind]
    np.testing.assert_allclose(scales, np.abs(wide).max(-1) / largest, rtol=1e-6)
    step = {"int8": 0.5 / 127, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}[kind]
    error = np.abs(y.astype(np.float32) * scales[..., None] - wide)
    assert (error <= step * np.abs(wide).max(-1, keepdims=True)).all()
    assert (others[:, 2] == 1).all()
    assert (z[:, 2].astype(np.float32) == 0).all()


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_too_small_for_a_scale_is_zero(kind):
    q = np.zeros((3, 4), np.float32)
    q[0, 0], q[1, 0], q[2, 0] = 1e-44, 1e-40, 1e-30
    (y, scales), _, _ = fused(q, None, None, Rotary(4), dtype=kind, scale="token")
    assert (y[:2].astype(np.float32) == 0).all()
    assert scales[:2].tolist() == [1, 1]
    largest = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[kind]
    assert np.abs(y[2].astype(np.float32)).max() == largest


def test_a_nan_is_zero_in_int8():
    q = np.full((2, 4), np.nan, np.float32)
    y, _, _ = fused(q, None, None, Rotary(4), dtype="int8")
    assert (y == 0).all()


# --- caches ---


def cache_of(shape, dtype=np.float64):
    return np.full(shape, 77, dtype)


@pytest.mark.parametrize("kind", TYPES)
def test_a_cache_of_few_bits(kind):
    spec, (q, k) = SPECS["half"], arrays(dtype=np.float32)
    slots = np.array([4, 3, 2, 1, 0, 5])
    keys = rotary.apply(spec, k)
    cache = KVCache(cache_of((6, 2, DIM), TYPES[kind]), cache_of((6, 2, DIM), TYPES[kind]), slots,
                    0.25, np.array([0.5, 0.25], np.float32))  # fmt: skip
    fused(q, k, k, spec, cache=cache)
    both = fused(k, k, None, spec, dtype=kind, scale=0.25)[0]
    np.testing.assert_array_equal(
        cache.k[slots].astype(np.float32), both.swapaxes(0, 1).astype(np.float32)
    )
    scales = [np.zeros((6, 2), np.float32) for _ in range(2)]
    cache = KVCache(cache.k, cache.v, slots, *scales)
    fused(q, k, k, spec, cache=cache)
    (y, wanted), _, _ = fused(k, k, None, spec, dtype=kind, scale="token")
    np.testing.assert_array_equal(scales[0][slots], wanted.swapaxes(0, 1))
    np.testing.assert_array_equal(
        cache.k[slots].astype(np.float32), y.swapaxes(0, 1).astype(np.float32)
    )
    step = {"int8": 0.6 / 127, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}[kind]
    back = cache.v[slots].astype(np.float32) * scales[1][slots][..., None]
    assert (np.abs(back - k.swapaxes(0, 1)) <= step * np.abs(k).max()).all()
    del keys


# --- the loops, and when they are not taken ---


BY_FORMULA = pytest.mark.parametrize("way", ["formula"], indirect=True)


def counted(*args, **options):
    """Results, and whether the loops computed them."""
    loops = pytest.importorskip("rotary.kernels.cpu.fused", reason="needs numba")
    left, formula = [], loops.formula.fused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops.formula, "fused", lambda *a: left.append(a) or formula(*a))
        patch.setitem(rotary.kernels.FUSED, "compiled loops", lambda: loops.fused)
        patch.setattr(rotary.kernels, "fused_by_name", {})
        return fused(*args, **options), not left


@BY_FORMULA
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_loops_round_as_the_formula(dtype, is_cached):
    q, k = arrays(dtype=dtype)
    options = {"norm": Norm(*[w.astype(np.float32) for w in weights("head")], EPS)}
    caches = [], []
    made = []
    for call, memory in zip((counted, fused), caches, strict=True):
        if is_cached:
            memory += [np.full((8, 2, DIM), 7, dtype) for _ in "kv"]
            options["cache"] = KVCache(*memory, np.array([4, 3, -1, 1, 0, 5], np.int32))
        made.append(call(q, k, k, SPECS["half"], **options))
    (results, is_taken), wanted = made
    assert is_taken
    close = {2: 2.0**-7 if dtype != np.float16 else 2.0**-10, 4: 1e-6, 8: 3e-7}[q.itemsize]
    for y, z in zip((*results, *caches[0]), (*wanted, *caches[1]), strict=True):
        assert (y is None) == (z is None)
        if y is not None:
            assert y.dtype == dtype
            np.testing.assert_allclose(y.astype(float), z.astype(float), rtol=close, atol=close)


@BY_FORMULA
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_loops_take_wide_heads_in_every_layout(dtype):
    """The vectors of the loops hold 16 pairs or more; 50 pairs also leave single ones."""
    close = {np.float64: 1e-14, np.float32: 2e-6, np.float16: 2.0**-10}.get(dtype, 2.0**-7)
    layouts = "half", "interleaved"
    for layout, out_layout, form in itertools.product(layouts, layouts, FORMS):
        spec = Rotary(112, 100, 4, base=100.0, layout=layout, out_layout=out_layout)
        q, k = arrays((2,), dtype, dim=spec.head_dim)
        both = q, k.swapaxes(0, 1).copy().swapaxes(0, 1)  # the heads of k are outermost in memory
        norm = Norm(*weights(form, dim=spec.head_dim), EPS)
        # positions that both batches share, then not; and one token, at the same position in both
        for positions in (np.arange(SEQ), np.arange(2 * SEQ).reshape(2, SEQ), np.array([5])):
            q, k = (x[..., : positions.shape[-1], :] for x in both)
            options = {"tables": rotary.cos_sin(spec, positions), "norm": norm}
            got, is_taken = counted(q, k, None, spec, **options)
            assert is_taken
            for y, z in zip(got[:2], fused(q, k, None, spec, **options), strict=False):
                np.testing.assert_allclose(
                    y.astype(float), z.astype(float), rtol=close, atol=8 * close,
                    err_msg=f"{layout} to {out_layout}, weights: {form}, positions {positions}",
                )  # fmt: skip


NOT_TAKEN = {
    "a cast": {"dtype": "float16"},
    "a scale": {"scale": 0.5},
    "tables of float64": {"tables": [np.ones((SEQ, DIM // 2))] * 2},
    "a norm of v": {"norm": Norm(None, None, EPS, np.ones(DIM))},
    "a scale of a cache": {"cache": KVCache(*np.zeros((2, 8, 2, DIM)), np.arange(6), 0.5, 0.5)},
}


@BY_FORMULA
@pytest.mark.parametrize("name", NOT_TAKEN)
def test_the_formula_does_what_the_loops_cannot(name):
    q, k = arrays()
    results, is_taken = counted(q, k, k, SPECS["half"], **NOT_TAKEN[name])
    assert not is_taken
    for y, z in zip(results, fused(q, k, k, SPECS["half"], **NOT_TAKEN[name]), strict=True):
        np.testing.assert_array_equal(y, z)


@BY_FORMULA
def test_keys_that_are_their_own_cache_are_right():
    q, k = (x.swapaxes(-2, -3).copy() for x in arrays())  # (seq, heads, head_dim)
    slots, v = np.roll(np.arange(SEQ), 1), np.zeros_like(k)
    want = k.copy(), v.copy()
    fused(q, k, v, SPECS["half"], cache=KVCache(*want, slots), seq_dim=-3)
    cache = KVCache(k, v.copy(), slots)
    _, is_taken = counted(q, k, v, SPECS["half"], cache=cache, seq_dim=-3)
    assert not is_taken
    np.testing.assert_array_equal(k, want[0])


@BY_FORMULA
def test_an_output_that_overlaps_an_input_is_right():
    q, _ = arrays()
    norm = Norm(*weights("head"), EPS)
    line = np.zeros(q.size + 1, q.dtype)
    x, y = line[:-1].reshape(q.shape), line[1:].reshape(q.shape)  # one element further
    x[...] = q
    _, is_taken = counted(x, None, None, SPECS["half"], norm=norm, out=(y,))
    assert not is_taken
    np.testing.assert_array_equal(y, fused(q, None, None, SPECS["half"], norm=norm)[0])


# --- out, and refusals ---


def test_in_place():
    spec, (q, k), norm = SPECS["slice"], arrays(), Norm(*weights("full"), EPS)
    want = fused(q, k, None, spec, norm=norm)
    y, z, _ = fused(q, k, None, spec, norm=norm, out=(q, k))
    assert y is q
    assert z is k
    np.testing.assert_array_equal(q, want[0])
    np.testing.assert_array_equal(k, want[1])


def expanded(*shape):
    """Zeros that can be written, all entries of the first axis in one memory."""
    strides = np.zeros(shape).strides
    return np.lib.stride_tricks.as_strided(np.zeros(shape[1:]), shape, (0, *strides[1:]))


LINE, SLOTS = np.zeros((9, 2, DIM)), np.arange(SEQ)
SHARED = {
    "an output given twice": lambda: {"out": (y := np.zeros((2, SEQ, DIM)), y)},
    "shifted outputs": lambda: {"out": (LINE.reshape(-1)[:96].reshape(2, SEQ, DIM),
                                        LINE.reshape(-1)[8:104].reshape(2, SEQ, DIM))},
    "an expanded output": lambda: {"out": (expanded(2, SEQ, DIM), np.zeros((2, SEQ, DIM)))},
    "k and v in one cache": lambda: {"cache": KVCache(LINE, LINE, SLOTS)},
    "caches that overlap": lambda: {"cache": KVCache(LINE[:8], LINE[1:], SLOTS)},
    "an expanded cache": lambda: {"cache": KVCache(expanded(8, 2, DIM), LINE, SLOTS)},
    "one array of scales": lambda: {
        "cache": KVCache(*np.zeros((2, 8, 2, DIM), np.int8), SLOTS, s := np.zeros((8, 2)), s)
    },
    "a cache that is an output": lambda: {
        "cache": KVCache(LINE, np.zeros((9, 2, DIM)), SLOTS),
        "out": (LINE.reshape(-1)[:96].reshape(2, SEQ, DIM),),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_what_is_written_may_not_share_memory(name):
    options = SHARED[name]()
    LINE[:] = 0
    with pytest.raises(ValueError, match=r"out overlaps|elements that share memory"):
        fused(KEY, KEY, KEY if "cache" in options else None, SPECS["half"], **options)
    assert (LINE == 0).all()


@BY_FORMULA
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_no_output_may_lie_in_a_v_that_is_returned_unchanged(library):
    q, k, v = (np.random.default_rng(each).random((2, SEQ, DIM), np.float32) for each in range(3))
    convert = torch.from_numpy if library == "torch" else np.asarray
    before = v.copy()
    for _ in range(2):
        for out in ((q, v), (v, k)):
            with pytest.raises(ValueError, match="out overlaps"):
                fused(*map(convert, (q, k, v)), SPECS["half"], out=tuple(map(convert, out)))
    np.testing.assert_array_equal(v, before)


@pytest.mark.parametrize("dtype", ["float32", None])
def test_no_output_may_lie_in_tables_of_torch(dtype):
    """Two tensors that NumPy made share memory without a common storage."""
    line = np.random.default_rng(0).random(2 * SEQ * DIM, np.float32)
    cos, sin = (torch.from_numpy(line)[: SEQ * DIM // 2].view(SEQ, -1), torch.rand(SEQ, DIM // 2))
    q, y = torch.rand(2, SEQ, DIM), torch.from_numpy(line).view(2, SEQ, DIM)
    q = q if dtype is None else q.bfloat16()
    before = line.copy()
    with pytest.raises(ValueError, match="out overlaps"):
        fused(q, None, None, SPECS["half"], tables=(cos, sin), dtype=dtype, out=y)
    np.testing.assert_array_equal(line, before)


def test_nothing_is_written_if_one_array_is_read_only():
    memory = np.zeros((2, 8, 2, DIM))
    k, v = memory
    v.flags.writeable = False
    with pytest.raises(ValueError, match="is read-only"):
        fused(Q, KEY, KEY, SPECS["half"], cache=KVCache(k, v, SLOTS))
    assert (k == 0).all()


Q, KEY = np.ones((4, SEQ, DIM)), np.ones((2, SEQ, DIM))
CACHE = np.zeros((16, 2, DIM))
REFUSED = [
    (lambda f: f(norm=Norm(np.ones(3), None, EPS)), ValueError, "norm weight of q must"),
    (lambda f: Norm(None, None, -1.0), ValueError, "eps must be"),
    (lambda f: Norm(None, None, math.inf), ValueError, "eps must be a finite"),
    (lambda f: f(dtype="int4"), TypeError, "dtype must be one of"),
    (lambda f: f(dtype="int8", scale=np.ones(3)), ValueError, "scale of q must be"),
    (lambda f: f(dtype="int8", scale=None), TypeError, "scale of q is None: leave it"),
    (lambda f: f(cache=KVCache(CACHE, None, SLOTS, None)), TypeError, "k_scale is None"),
    (lambda f: f(v=KEY[0], cache=LatentCache(np.zeros((16, 2 * DIM)), SLOTS, None)),
     TypeError, "scale of the cache is None"),
    (lambda f: f(scale=(1.0, 0, 1.0)), ValueError, "scale of k must be finite"),
    (lambda f: f(scale=math.inf), ValueError, "finite and not 0, got inf"),
    (lambda f: f(scale=np.array([1, 1, 1, np.nan])), ValueError, "finite and not 0, got nan"),
    (lambda f: f(scale=np.array([1, 1, -np.inf, 1])), ValueError, "finite and not 0, got inf"),
    (lambda f: f(v=KEY, cache=KVCache(CACHE, CACHE + 1, SLOTS, 1.0, np.zeros(2))),
     ValueError, "v_scale must be finite and not 0, got 0.0"),
    (lambda f: f(norm=Norm([1.0] * DIM, None, EPS)),
     TypeError, "norm weights must be NumPy arrays like q, got a list"),
    (lambda f: f(norm=Norm(None, torch.ones(DIM), EPS)),
     TypeError, "norm weights must be NumPy arrays like q, got a torch.Tensor"),
    (lambda f: f(cache=KVCache([[1.0] * DIM], None, SLOTS)),
     TypeError, "caches must be NumPy arrays like q, got a list"),
    (lambda f: f(cache=KVCache(torch.ones(16, 2, DIM), None, SLOTS)),
     TypeError, "caches must be NumPy arrays like q, got a torch.Tensor"),
    (lambda f: f(cache=KVCache(CACHE.astype(np.int8), None, SLOTS, torch.ones(16, 2))),
     TypeError, "scales to be written must be NumPy arrays like q, got a torch.Tensor"),
    (lambda f: f(cache=KVCache(CACHE.astype(np.complex64), None, SLOTS)),
     TypeError, "dtype must be one of"),
    (lambda f: f(out=([1.0], KEY)), TypeError, "out must be NumPy arrays"),
    (lambda f: Norm(None, None, np.array(1e-6)), TypeError, "eps must be a number, as 1e-6, got"),
    (lambda f: f(dtype="int8", scale=(1.0, 2.0)), ValueError, "for q, k and v"),
    (lambda f: f(scale=(1.0, 0.5, 1.0), cache=KVCache(CACHE, None, SLOTS)),
     ValueError, "scale= has a scale for k, which is written to the cache: give that to the"),
    (lambda f: f(v=KEY, scale=(1.0, 1, np.ones(2)), cache=KVCache(CACHE, CACHE + 1, SLOTS)),
     ValueError, "scale= has a scale for v, which is written to the cache: give that to the"),
    (lambda f: f(cache=KVCache(CACHE.astype(np.int8), None, SLOTS, np.zeros((16, 2), np.int8))),
     TypeError, "k_scale is written, so it must be float32 or float64, got int8"),
    (
        lambda f: f(v=KEY, cache=KVCache(*np.zeros((2, 16, 2, DIM), np.int8), SLOTS, 1.0,
                                         np.zeros((16, 2), np.float16))),
        TypeError, "v_scale is written, so it must be float32 or float64, got float16",
    ),
    (lambda f: f(scale="token"), ValueError, "for int8 and float8"),
    (lambda f: f(dtype="int8", scale="row"), ValueError, "scale='row'"),
    (lambda f: f(cache=KVCache(CACHE, None, [1, 2])), ValueError, "one per token"),
    (lambda f: f(cache=KVCache(CACHE, None, SLOTS + 11)), ValueError, "slots run to 16"),
    (lambda f: f(cache=KVCache(CACHE, None, SLOTS * 0.5)), TypeError, "whole numbers"),
    (lambda f: f(cache=KVCache(CACHE[:, :1], None, SLOTS)), ValueError, "cache of k must"),
    (lambda f: f(v=KEY, cache=KVCache(CACHE, None, SLOTS)), ValueError, "cache has no v"),
    (lambda f: f(cache=KVCache(CACHE, CACHE, SLOTS)), ValueError, "v was not given"),
    (lambda f: f(v=KEY[0], cache=LatentCache(np.zeros((16, 2 * DIM)), SLOTS)),
     ValueError, f"one head, (1, {SEQ}, {DIM}), got (2, "),
    (lambda f: f(k=KEY[0], v=KEY[0], cache=LatentCache(np.zeros((16, 2 * DIM)), SLOTS)),
     ValueError, "one head"),
    (lambda f: f(k=None, cache=KVCache(CACHE, None, SLOTS)), ValueError, "pass k"),
    (lambda f: f(v=KEY[:1]), ValueError, "shape of k except for its last axis"),
    (lambda f: f(cache=LatentCache(CACHE[:, 0], SLOTS)), ValueError, "latent part"),
    (lambda f: f(v=KEY[0], cache=LatentCache(CACHE[:, 0], SLOTS)), ValueError, "add up"),
    (lambda f: f(out=(Q,)), ValueError, "out must hold 2"),
    (lambda f: f(out=(Q, Q)), ValueError, "like the result"),
    (lambda f: f(out=(Q, KEY, None)), TypeError, "leave out what is not returned"),
    (lambda f: fused(Q, KEY, None, "llama"), TypeError, "spec must be a Rotary"),
    (lambda f: f(k=torch.ones(2, SEQ, DIM)), TypeError, "one library"),
    (lambda f: fused(Q.astype(int), None, None, SPECS["half"]), TypeError, "x must"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_what_does_not_fit_is_refused(call, error, text):
    def f(k=KEY, v=None, **options):
        return fused(Q, k, v, SPECS["half"], **options)

    with pytest.raises(error, match=re.escape(text)) as caught:
        call(f)
    assert "\n" not in str(caught.value)
