"""cos and sin against many-digit arithmetic; the rows of a batch; the cache; what is refused."""

import dataclasses
import json
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import exact_of as exact
from libraries import if_installed
from programs import alone

import rotary
from rotary import Rotary, positions
from rotary.angles import sequence_cos_sin
from rotary.cache import Cache
from rotary.kernels import numpy as reference

ml_dtypes = if_installed("ml_dtypes")
torch = if_installed("torch")
torch_tables = if_installed("rotary.kernels.torch.angles")

PROMISED = 1.5e-7
STEP = math.tau * 2.0**-65  # turns are rounded once, per token
# float32 rounds by 2^-25; an angle of 32 bits and its polynomial are off by 2^-28
ROUNDED = 2.0**-25 + 2.0**-28
ULP = 2.0**-24  # float32 just below 1, where most of a table is
GOLDEN = json.loads((Path(__file__).parent / "golden" / "cos_sin.json").read_text())
FAR = 2**39

examples = settings(max_examples=60, deadline=None, derandomize=True)
libraries = pytest.mark.parametrize(
    "library", [np.asarray, torch.as_tensor], ids=["numpy", "torch"]
)
SPEC = Rotary(head_dim=16)


def custom(*inv_freq: float, **fields) -> Rotary:
    params = {"inv_freq": inv_freq, "attention_factor": fields.pop("attention_factor", 1.0)}
    return Rotary(2 * len(inv_freq), schedule="custom", params=params, **fields)


def assert_close(ours, wanted, bound) -> None:
    for one, other in zip(ours, wanted, strict=True):
        np.testing.assert_array_less(np.abs(np.asarray(one, np.float64) - other), bound)


def assert_same(ours, wanted) -> None:
    for one, other in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# --- exact at every position ---


@libraries
def test_golden_values(library):
    spec = custom(*map(float.fromhex, GOLDEN["inv_freq"]))
    where = np.array(GOLDEN["positions"])
    ours = rotary.cos_sin(spec, library(where), allow_negative=True)
    for name, table in zip(("cos", "sin"), ours, strict=True):
        for m, row, digits in zip(where.tolist(), table.tolist(), GOLDEN[name], strict=True):
            error = max(abs(Decimal(x) - Decimal(y)) for x, y in zip(row, digits, strict=True))
            assert error <= PROMISED
            assert error <= ROUNDED + abs(m) * STEP
            assert error <= 6.1e-8 or abs(m) > 2**37


SCHEDULES = [
    ("default", {}),
    ("linear", {"factor": 4.0}),
    ("ntk", {"factor": 8.0}),
    ("dynamic", {"factor": 4.0, "original_max_position_embeddings": 4096}),
    ("dynamic_linear", {"factor": 2.0, "original_max_position_embeddings": 4096}),
    ("yarn", {"factor": 40.0, "original_max_position_embeddings": 4096}),
    ("longrope", {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 32.0,
                  "original_max_position_embeddings": 4096}),
    ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}),
    ("proportional", {"partial_rotary_factor": 0.5}),
    ("ntk_mixed", {"factor": 8.0}),
    ("axial", {"num_axes": 1}),
    ("custom", {"inv_freq": [3.0, 1e-9, -0.7, 0.0], "attention_factor": 1.7}),
]  # fmt: skip


@examples
@given(st.sampled_from(SCHEDULES), st.floats(10, 1e9), st.integers(0, FAR))
@example(SCHEDULES[0], 1e4, FAR)
def test_any_base_schedule_and_position(schedule, base, m):
    spec = Rotary(8, base=base, schedule=schedule[0], params=schedule[1])
    inv_freq, amplitude = rotary.inv_freq(spec, m + 1)
    cos, sin = exact(inv_freq, [m])
    for ours in (rotary.cos_sin(spec, np.array([m])), rotary.cos_sin(spec, torch.tensor([m]))):
        assert_close(ours, (cos * amplitude, sin * amplitude), PROMISED * max(1.0, amplitude))


@examples
@given(st.lists(st.integers(-FAR, FAR), min_size=1, max_size=40), st.floats(10, 1e9))
def test_every_kernel_gives_the_same(where, base):
    turns = rotary.turns(Rotary(head_dim=80, base=base))[None]
    batch, scales = np.array([where]), np.array([1.25])
    wanted = reference.tables(batch, turns, scales, (), False)
    loops = rotary.cos_sin(Rotary(head_dim=80, base=base), batch[0], allow_negative=True)
    assert_close(loops, reference.tables(batch, turns, np.ones(1), (), False), 1.01 * ULP)
    tensors = torch.from_numpy(batch), torch.tensor(turns.view(np.int64)), torch.tensor(scales)
    formula = torch_tables.tables(*tensors, (), False)  # the way of other devices
    assert_close(formula, wanted, 2 * ULP)  # an ulp is twice as large above 1


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4"])
def test_whole_numbers_of_every_kind(dtype):
    where = np.array([0, 1, 100, 127])
    assert_same(rotary.cos_sin(SPEC, where.astype(dtype)), rotary.cos_sin(SPEC, where))
    if dtype in ("i1", "i2", "i4", "u1"):
        tensor = torch.from_numpy(where.astype(dtype))
        assert_same(rotary.cos_sin(SPEC, tensor), rotary.cos_sin(SPEC, where))


def test_lists_ranges_and_views_of_positions():
    wanted = rotary.cos_sin(SPEC, np.arange(6))
    assert_same(rotary.cos_sin(SPEC, [0, 1, 2, 3, 4, 5]), wanted)
    assert_same(rotary.cos_sin(SPEC, range(6)), wanted)
    assert_same(rotary.cos_sin(SPEC, np.arange(5, -1, -1)[::-1]), wanted)
    assert_same(rotary.cos_sin(SPEC, torch.arange(12)[::2] // 2), wanted)


@libraries
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fractional_positions(library, dtype):
    where = np.array([0.0, 0.5, 1 / 3, 12.75, 4095.1, 1e6 + 0.1, 2**24 - 0.5]).astype(dtype)
    inv_freq, _ = rotary.inv_freq(SPEC)
    ours = rotary.cos_sin(SPEC, library(where))
    assert_close(ours, exact(inv_freq, where.tolist()), 2.0**-25 + 2.0**24 * 2.0**-53)
    negative = rotary.cos_sin(SPEC, library(-where), allow_negative=True)
    assert_same(negative, (ours[0], -ours[1]))


@libraries
def test_float32_precision_rounds_the_angle(library):
    where, inv_freq = np.arange(131_000, 131_072), np.array([0.7, 1 / 3])
    angle = (where[:, None].astype(np.float32) * inv_freq.astype(np.float32)).astype(np.float64)
    ours = rotary.cos_sin(custom(*inv_freq), library(where), "float32")
    assert_close(ours, (np.cos(angle), np.sin(angle)), 2.0**-23)
    assert np.abs(exact(inv_freq, where.tolist())[0] - np.cos(angle)).max() > 1e-3


@pytest.mark.parametrize("base", [1e4, 150_000.0, 1e6, 7_286_182.0])
def test_float32_frequencies_of_numpy_are_near_those_of_torch(base):
    """Up to two units in the last place, which the position multiplies: docs/exactness.md."""
    spec, where = Rotary(head_dim=128, base=base), np.arange(131_000, 131_072)
    angle = where[:, None] * rotary.inv_freq(spec)[0]
    limit = 2.0**-23 * (1 + 3 * angle)  # two units of a frequency, one of the product
    tables = (rotary.cos_sin(spec, each(where), "float32") for each in (np.asarray, torch.tensor))
    for ours, theirs in zip(*tables, strict=True):
        assert (np.abs(ours.astype(np.float64) - theirs.numpy()) <= limit).all()


# --- axes, direction, shapes ---


@libraries
@pytest.mark.parametrize("precision", ["exact", "float32"])
@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_every_pair_reads_its_axis(library, precision, dtype):
    axes = positions.interleaved_sections(4, 2, 2)
    spec = dataclasses.replace(SPEC, axes=axes)
    where = np.random.default_rng(0).integers(0, 10**6, (2, 5, 3)).astype(dtype)
    ours = rotary.cos_sin(spec, library(where), precision)
    for pair, axis in enumerate(axes):
        alone = rotary.cos_sin(SPEC, library(where[..., axis]), precision)
        assert_same([table[..., pair] for table in ours], [table[..., pair] for table in alone])


@libraries
@pytest.mark.parametrize("precision", ["exact", "float32"])
@pytest.mark.parametrize("where", [np.arange(1000), np.arange(1000) / 8], ids=["int", "float"])
def test_sign_turns_the_other_way(library, precision, where):
    cos, sin = rotary.cos_sin(SPEC, library(where), precision)
    back = rotary.cos_sin(dataclasses.replace(SPEC, sign=-1), library(where), precision)
    assert_same(back, (cos, -sin))


@libraries
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 4), (7,), (2, 3, 4)])
def test_shapes(library, shape):
    where = np.arange(math.prod(shape)).reshape(shape)
    cos, sin = rotary.cos_sin(SPEC, library(where))
    assert tuple(cos.shape) == tuple(sin.shape) == (*shape, 8)
    assert str(cos.dtype).removeprefix("torch.") == "float32"
    assert_same((cos.reshape(-1, 8),), (rotary.cos_sin(SPEC, where.ravel())[0],))
    dynamic = Rotary(16, schedule="dynamic", params=SCHEDULES[3][1])
    assert tuple(rotary.cos_sin(dynamic, library(where))[0].shape) == (*shape, 8)


def test_the_bytes_of_tables_of_two_axes_are_counted_by_token():
    spec, where = Rotary(8, axes=(0, 1, 0, 1)), np.zeros((4, 2), int)
    assert rotary.cos_sin(spec, where, max_bytes=128)[0].nbytes == 128 // 2
    with pytest.raises(ValueError, match="tables of 4 positions take 128 bytes, over max_bytes"):
        rotary.cos_sin(spec, where, max_bytes=127)


# --- the length of a row ---

LONGROPE = {
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 5.0, 7.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 4096,
}
LENGTHS = [
    ("dynamic", SCHEDULES[3][1]),
    ("dynamic_linear", SCHEDULES[4][1]),
    ("longrope", LONGROPE),
]
by_length = pytest.mark.parametrize(("schedule", "params"), LENGTHS)


@by_length
@libraries
@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_a_row_does_not_feel_its_neighbours(schedule, params, library, precision):
    spec = Rotary(8, schedule=schedule, params=params)
    starts = np.array([[0], [4000], [9000], [4092]])
    where = starts + np.arange(5)
    together = rotary.cos_sin(spec, library(where), precision)
    given_ = rotary.cos_sin(spec, library(where), precision, where.max(axis=1) + 1)
    assert_same(given_, together)
    for row in range(len(where)):
        alone = rotary.cos_sin(spec, library(where[row]), precision)
        assert_same([table[row] for table in together], alone)
    assert np.abs(np.asarray(together[0])[2] - np.asarray(together[0])[0]).max() > 0.1


@by_length
def test_an_explicit_length_wins(schedule, params):
    spec, where = Rotary(8, schedule=schedule, params=params), np.arange(6).reshape(2, 3)
    inv_freq, amplitude = rotary.inv_freq(spec, 9000)
    assert not np.array_equal(inv_freq, rotary.inv_freq(spec)[0])
    cos, sin = exact(inv_freq, [0, 1, 2, 3, 4, 5])
    wanted = (amplitude * cos).reshape(2, 3, 4), (amplitude * sin).reshape(2, 3, 4)
    for length in (9000, np.int64(9000), [9000, 9000], torch.tensor([9000, 9000])):
        assert_close(rotary.cos_sin(spec, where, seq_len=length), wanted, PROMISED * amplitude)
    mixed = rotary.cos_sin(spec, where, seq_len=[100, 9000])
    assert_same((mixed[0][0],), (rotary.cos_sin(spec, where[0])[0],))
    assert_close((mixed[0][1],), (wanted[0][1],), PROMISED * amplitude)


@pytest.mark.parametrize(
    ("seq_len", "message"),
    [
        ([1, 2, 3], r"one number or one per row, of shape \(2,\), got \(3,\)"),
        (-1, "seq_len must be a whole number >= 0, got -1"),
        (2.5, "seq_len must be a whole number >= 0, got 2.5"),
        (True, "seq_len must be a whole number >= 0, got True"),
    ],
)
def test_lengths_that_make_no_sense(seq_len, message):
    spec = Rotary(8, schedule="dynamic", params=SCHEDULES[3][1])
    with pytest.raises(ValueError, match=message):
        rotary.cos_sin(spec, np.zeros((2, 3), int), seq_len=seq_len)


@pytest.mark.parametrize("of", [lambda spec: rotary.inv_freq(spec)[0], rotary.turns])
def test_kept_frequencies_cannot_be_written_to(of):
    with pytest.raises(ValueError, match="read-only"):
        of(SPEC)[0] = 0


def test_a_spec_warns_when_it_is_made_and_not_again():
    with pytest.warns(UserWarning, match="factor 0.5 < 1"):
        spec = Rotary(8, base=12_345, schedule="linear", params={"factor": 0.5})
    rotary.inv_freq(spec)  # a warning would be an error


def test_frequencies_leave_the_filters_of_warnings_alone(monkeypatch):
    """`catch_warnings` changes them for all threads, and its lock hangs a child of Python 3.14."""

    def enter(catch):
        pytest.fail("filters were changed")

    q = np.ones((1, 1, 3, 8), np.float32)
    rotary.apply(Rotary(8), q)  # loads the loops
    spec = Rotary(8, base=54_321, schedule="linear", params={"factor": 2.0})
    with monkeypatch.context() as patched:
        patched.setattr(warnings.catch_warnings, "__enter__", enter)
        rotary.apply(spec, q)


# --- the cache ---


def test_the_cache_is_bounded_in_bytes():
    cache = Cache(max_bytes=100)
    made = []

    def build(name: str, size: int):
        return lambda: made.append(name) or np.zeros(size, np.uint8)

    for name, size in (("a", 40), ("b", 40), ("a", 40), ("c", 40), ("a", 40), ("b", 40)):
        cache.get(name, build(name, size))
        assert cache.bytes <= 100
    assert made == ["a", "b", "c", "b"]  # c pushed out b, the least recently used
    cache.get("huge", build("huge", 101))
    assert "huge" not in cache._entries
    assert cache.bytes == sum(size for _, size in cache._entries.values()) == 80


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
VARIED = {
    "head_dim": 24,
    "rotary_dim": 8,
    "start": 2,
    "base": 10_000.5,
    "layout": "interleaved",
    "out_layout": "interleaved",
    "schedule": "ntk",
    "params": {**YARN, "beta_fast": 20.0},
    "axes": (0, 0, 0, 0, 0, 0, 0, 1),
    "sign": -1,
}


def test_every_field_is_varied():
    assert set(VARIED) == {field.name for field in dataclasses.fields(Rotary)}


@pytest.mark.parametrize("field", VARIED)
def test_the_key_is_the_whole_spec(field, monkeypatch):
    kept = {"head_dim": 20, "rotary_dim": 16, "schedule": "yarn", "params": YARN}
    if field == "schedule":
        kept["params"] = {"factor": 4.0}
        kept["schedule"] = "linear"
    spec = Rotary(**kept)
    other = Rotary(**{**kept, field: VARIED[field]})

    def tables(of: Rotary):
        if of.num_axes > 1:
            return rotary.inv_freq(of)[0], rotary.turns(of)
        return *sequence_cos_sin(of, np.empty(0), 300), rotary.inv_freq(of)[0], rotary.turns(of)

    cold = {}
    for each in (spec, other):
        monkeypatch.setattr(rotary.angles, "_cache", Cache(2**20))
        cold[each] = tables(each)
    monkeypatch.setattr(rotary.angles, "_cache", Cache(2**20))
    for each in (spec, other, spec):
        assert_same(tables(each), cold[each])
    keys = [key for key in rotary.angles._cache._entries if key[0] == "turns"]
    assert {key[1] for key in keys} == {spec, other}
    assert len(keys) == 2


@pytest.mark.parametrize("seq", [1, 2, 255, 256, 257, 1024, 1025])
@libraries
def test_tables_of_a_sequence_are_cut_from_a_longer_one(library, seq):
    for precision in ("exact", "float32"):
        ours = sequence_cos_sin(SPEC, library(np.empty(0)), seq, precision)
        assert_same(ours, rotary.cos_sin(SPEC, library(np.arange(seq)), precision))
    dynamic = Rotary(8, schedule="dynamic", params={**YARN})
    ours = sequence_cos_sin(dynamic, library(np.empty(0)), seq)
    assert_same(ours, rotary.cos_sin(dynamic, library(np.arange(seq))))


def test_tables_of_a_sequence_are_kept_and_a_few_sizes_serve_every_length(monkeypatch):
    cache = Cache(2**20)
    monkeypatch.setattr(rotary.angles, "_cache", cache)
    rotary.turns(SPEC)
    before = cache.bytes
    one, other = (sequence_cos_sin(SPEC, np.empty(0), seq)[0] for seq in (200, 150))
    assert np.shares_memory(one, other)
    sequence_cos_sin(SPEC, np.empty(0), 256)  # a power of two fits without a row to spare
    assert cache.bytes - before == 2 * 256 * 8 * 4
    sequence_cos_sin(SPEC, np.empty(0), 1024)
    assert cache.bytes - before == 2 * (256 + 1024) * 8 * 4


def test_default_positions_take_the_length_that_is_said():
    dynamic = Rotary(8, schedule="dynamic", params={**YARN})
    for length in (20, 4096, [20, 4096]):
        where = np.array([np.arange(5)] * 2 if isinstance(length, list) else np.arange(5))
        ours = sequence_cos_sin(dynamic, np.empty(0), 5, seq_len=length)
        assert_same(ours, rotary.cos_sin(dynamic, where, seq_len=length))
    assert np.abs(ours[0][0] - ours[0][1]).max() > 0.05


def test_many_threads_may_ask_at_once(monkeypatch):
    cache = Cache(200_000)  # too small for all: entries come and go
    monkeypatch.setattr(rotary.angles, "_cache", cache)
    specs = [Rotary(16, base=1e4 + step) for step in range(12)]
    wanted = [rotary.cos_sin(spec, np.arange(700)) for spec in specs]

    def ask(index: int):
        return sequence_cos_sin(specs[index % 12], np.empty(0), 700)

    with ThreadPoolExecutor(8) as pool:
        for index, tables in enumerate(pool.map(ask, range(240))):
            assert_same(tables, wanted[index % 12])
    assert cache.bytes == sum(size for _, size in cache._entries.values()) <= 200_000


# --- what is refused ---

AXES = dataclasses.replace(SPEC, axes=positions.sections(4, 2, 2))


@pytest.mark.parametrize(
    "where",
    [
        np.arange(4, dtype=np.float16),
        np.arange(4).astype(ml_dtypes.bfloat16),
        np.array([True, False]),
        np.arange(4, dtype=np.complex128),
        np.array(["1"]),
        np.array([1], object),
        [True, False],
        torch.arange(4, dtype=torch.bfloat16),
        torch.arange(4).half(),
        torch.tensor([True]),
        torch.arange(4).to(torch.complex64),
    ],
    ids=lambda where: f"{type(where).__name__}-{getattr(where, 'dtype', 'bool')}",
)
def test_positions_of_another_kind(where):
    with pytest.raises(TypeError, match="positions must be whole numbers"):
        rotary.cos_sin(SPEC, where)


def test_positions_of_4_bits_are_refused_with_the_types_that_are_taken():
    for kind in (ml_dtypes.int4, ml_dtypes.uint4):
        message = f"whole numbers of 8 to 64 bits, got {np.dtype(kind).name}"
        with pytest.raises(TypeError, match=message):
            rotary.cos_sin(SPEC, np.arange(4).astype(kind))


@libraries
@pytest.mark.parametrize(
    ("spec", "where", "message"),
    [
        (SPEC, np.array([3, -1]), r"positions must be >= 0, got -1; pass allow_negative=True"),
        (SPEC, np.array([-0.5]), r"positions must be >= 0, got -0.5"),
        (SPEC, np.array([0.0, math.nan]), "positions must be finite"),
        (SPEC, np.array([math.inf]), "positions must be finite"),
        (SPEC, np.array([2.0**28 + 1]), r"fractional positions must be <= 2\^28 in size, got 2684"),
        (AXES, np.zeros((2, 5), int), r"for 3 axes, got shape \(2, 5\)$"),
    ],
)
def test_positions_that_make_no_sense(library, spec, where, message):
    with pytest.raises(ValueError, match=message):
        rotary.cos_sin(spec, library(where))


@libraries
def test_a_row_of_negative_positions_has_the_length_0(library):
    spec = Rotary(16, schedule="dynamic", params={"factor": 2.0, **YARN})
    for where in (np.array([[-3, -9], [500, 7]]), np.array([[-3.5, -9.0], [500.5, 7.0]])):
        ours = rotary.cos_sin(spec, library(where), allow_negative=True)
        wanted = rotary.cos_sin(spec, library(where), seq_len=[0, 501], allow_negative=True)
        assert_same(ours, wanted)


def test_a_list_of_integers_beyond_int64_is_not_called_fractional():
    """NumPy makes it float64."""
    with pytest.raises(ValueError, match=r"positions must fit in int64, got 9\.22"):
        rotary.cos_sin(SPEC, [2**63, 1])


def test_integers_beyond_int64():
    with pytest.raises(ValueError, match=r"positions must fit in int64, got 9223372036854775808"):
        rotary.cos_sin(SPEC, np.array([2**63], np.uint64))
    largest = rotary.cos_sin(SPEC, np.array([2**63 - 1], np.uint64))
    assert_same(largest, rotary.cos_sin(SPEC, np.array([2**63 - 1])))


def test_tables_too_large_are_refused_before_they_are_made():
    with pytest.raises(ValueError, match=r"take 51,200 bytes, over max_bytes = 51,199"):
        rotary.cos_sin(SPEC, np.arange(800), max_bytes=51_199)
    assert rotary.cos_sin(SPEC, np.arange(800), max_bytes=51_200)[0].shape == (800, 8)
    with pytest.raises(ValueError, match=r"8,000,000,000,000 bytes, over max_bytes"):
        positions.arange(10**12)
    for count in (2**28 + 1, 10**12):  # by default 16 GiB
        with pytest.raises(ValueError, match=f"{count:,} positions .* max_bytes = 17,179,869,184;"):
            rotary.cos_sin(SPEC, torch.empty(count, dtype=torch.int64, device="meta"))


def test_a_trillion_positions_are_refused_at_once():
    code = """if True:
        import numpy, rotary
        try:
            rotary.cos_sin(rotary.Rotary(16), numpy.broadcast_to(numpy.int64(0), (10**12,)))
        except ValueError as error:
            print(error)
    """  # in a process of its own: a loop over the positions could not be stopped here
    assert "1,000,000,000,000 positions take 64,000,000,000,000 bytes" in alone(code)


def test_precision_has_two_values():
    with pytest.raises(ValueError, match="precision must be 'exact' or 'float32', got 'hf'"):
        rotary.cos_sin(SPEC, np.arange(2), "hf")
