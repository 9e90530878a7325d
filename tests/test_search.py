"""The certified search: against published values, plain sums on both sides, and fine grids."""

import importlib
import inspect
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import alone

from rotary import Rotary, analysis
from rotary.analysis.bounds import first_failure
from rotary.analysis.search import MinBase, comb, min_base, safe_base

loops = pytest.importorskip("rotary.analysis.loops", reason="needs numba")


def plain(base, context, head_dim, rotary_dim=None):
    """B_m of m = 1 .. context, term by term."""
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    theta = base ** (-2 * np.arange(rotary_dim // 2) / rotary_dim)
    return np.cos(np.arange(1, context + 1)[:, None] * theta).sum(-1) + (head_dim - rotary_dim) / 2


# --- published values ---


@pytest.mark.parametrize(
    ("context", "head_dim", "base", "digits", "binding", "later"),
    [
        (1024, 128, 4293.4376, 4, 1009, 1077),
        (8192, 128, 8.376384e4, -1, 8172, 8278),
        (65536, 128, 2.090180e6, -1, 60076, 75413),
        (1000, 128, 4.20602e3, 2, None, None),
        (8000, 128, 8.361343e4, -1, None, None),
        (64000, 128, 2.090180e6, -1, 60076, 75413),
        (8192, 64, 3.2374e5, -1, None, None),
        (1024, 64, 7.7530e3, 1, None, None),
        (8192, 256, 4.1307e4, 0, None, None),
        (256, 64, 1412.3, 1, None, None),
        (512, 64, 3438.9, 1, None, None),
        (127, 64, 463.27, 2, 127, 128),
    ],
)
def test_published_bases(context, head_dim, base, digits, binding, later):
    found = min_base(context, head_dim)
    assert found.base == pytest.approx(base, abs=0.51 * 10.0**-digits)
    assert found.undecided == 0
    if binding:
        assert (found.binding, found.next_failing) == (binding, later)


@pytest.mark.parametrize(
    ("context", "su"),
    [(1, 4.3e3), (2, 1.2e4), (4, 2.7e4), (8, 8.4e4), (16, 2.3e5), (32, 6.3e5), (64, 2.1e6)],
)
def test_two_digits_of_the_table_of_su(context, su):
    assert float(f"{min_base(1024 * context).base:.1e}") == su


@pytest.mark.parametrize(("head_dim", "ratio"), [(128, 4.04), (512, 2.07), (2048, 1.63)])
def test_wide_heads_approach_their_limit(head_dim, ratio):
    """b*/L falls to 1 / 0.6165, the zero of the cosine integral."""
    assert min_base(512, head_dim).base / 512 == pytest.approx(ratio, abs=0.01)


# --- against plain sums ---


@pytest.mark.parametrize(
    ("context", "head_dim", "rotary_dim"),
    [
        *((1, 66, 66), (2, 128, 128), (17, 80, 80), (128, 64, 64), (1024, 128, 128)),
        *((3000, 112, 112), (4096, 192, 192), (5000, 256, 256), (8192, 96, 96), (20000, 128, 128)),
        *((1000, 128, 96), (4096, 128, 112), (300, 66, 64), (700, 64, 50), (999, 6, 6)),
    ],
)
def test_the_base_passes_and_a_little_less_does_not(context, head_dim, rotary_dim):
    found = min_base(context, head_dim, rotary_dim=rotary_dim)
    if found.binding is None:
        assert found.base == 1
        assert plain(1.0, context, head_dim, rotary_dim).min() > 0
        return
    above = plain(found.base * (1 + 1e-7), context, head_dim, rotary_dim)
    below = plain(found.base * (1 - 1e-7), context, head_dim, rotary_dim)
    assert above.min() >= 0 > below.min()
    assert below.argmin() + 1 == found.binding
    spec = Rotary(head_dim=head_dim, rotary_dim=rotary_dim, base=found.base)
    assert first_failure(spec, 2**24) == found.next_failing
    assert found.next_failing is None or found.next_failing > context


@settings(max_examples=8, deadline=None)
@given(
    context=st.integers(2, 300),
    pairs=st.integers(2, 70),
    still=st.floats(0, 0.9),
)
def test_no_base_of_a_fine_grid_below_passes(context, pairs, still):
    rotary_dim = 2 * pairs
    head_dim = rotary_dim + 2 * int(still * pairs)
    found = min_base(context, head_dim, rotary_dim=rotary_dim)
    high = math.log(found.base) - 1e-6
    for x in np.linspace(max(0.0, high - 3), high, 150) if found.binding else ():
        assert plain(math.exp(x), context, head_dim, rotary_dim).min() < 0
    assert plain(found.base, context, head_dim, rotary_dim).min() > -1e-9


@settings(max_examples=15, deadline=None)
@given(
    context=st.integers(1, 3000),
    pairs=st.integers(2, 40),
    still=st.integers(0, 30),
    low=st.floats(0, 12),
    width=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_the_comb_is_what_plain_sums_say(context, pairs, still, low, width):
    head_dim, rotary_dim = 2 * (pairs + still), 2 * pairs
    bases = np.exp(low + width * np.linspace(0, 1, 12))[::-1]
    lowest = [plain(base, context, head_dim, rotary_dim).min() for base in bases]
    found = comb(context, bases, head_dim, rotary_dim=rotary_dim)
    clear = np.abs(lowest) > 1e-8
    assert (found == (np.array(lowest) >= 0))[clear].all()


def test_a_comb_of_many_bases_is_what_plain_sums_say():
    """Neighbours share what was learnt of the distances: it must not outlive its reach."""
    bases = np.exp(np.linspace(math.log(4000), math.log(8000), 1000))
    bases = np.random.default_rng(0).permutation(bases)
    found = comb(1024, bases)
    assert found.tolist() == [bool((plain(base, 1024, 128) >= 0).all()) for base in bases]
    assert 0.1 < found.mean() < 0.9


def test_a_comb_keeps_the_shape_and_the_order_of_its_bases():
    bases = np.array([[6100.0, 4293.0], [4294.0, 4294.0]])
    assert comb(1024, bases).tolist() == [[True, False], [True, True]]
    assert comb(1024, []).tolist() == []


# --- laws ---


def test_longer_contexts_need_larger_bases():
    found = [min_base(context).base for context in range(100, 1100, 100)]
    assert found == sorted(found)


@pytest.mark.parametrize("rotary_dim", [2, 16, 64])
def test_half_a_head_never_fails(rotary_dim):
    assert min_base(2**20, 128, rotary_dim=rotary_dim) == MinBase(1.0, None, None, 0)
    assert comb(4096, [1.0, 100.0], 128, rotary_dim=rotary_dim).all()
    safe = safe_base(4096, 128, rotary_dim=rotary_dim)
    assert (safe.base, safe.largest_failing, safe.passing_share) == (1.0, 1.0, 1.0)


def test_what_is_left_undecided_is_narrow():
    assert loops.GAP < 1e-9


def test_one_token_back_is_always_similar():
    assert min_base(1) == MinBase(1.0, None, 2, 0)


def test_cos_and_sin_of_the_loops_hold_at_the_longest_context():
    theta = np.exp(-np.linspace(0, 20, 64))
    u, cos, sin = np.empty((3, 64))
    for m in (1, 355, 2**20 + 7, 2**22):
        loops._turned(float(m), theta, u, cos, sin)
        assert (u == m * theta).all()
        np.testing.assert_allclose(cos, np.cos(u), rtol=0, atol=4e-15)
        np.testing.assert_allclose(sin, np.sin(u), rtol=0, atol=4e-15)


def test_the_third_derivative_is_within_its_bound():
    """And the first two are those of B_m by ln b, by central differences in long double."""
    k = np.arange(24) / 24
    u, cos, sin = np.empty((3, 24))
    rng = np.random.default_rng(0)
    for m, x in zip(rng.integers(1, 4000, 50), rng.uniform(0.5, 9, 50), strict=True):
        loops._turned(float(m), np.exp(-k * x), u, cos, sin)
        value, slope, curve, bound = loops._sums(k, u, cos, sin)
        h = np.longdouble(2e-3) / m
        ladder = np.longdouble(x) + h * np.arange(-2, 3)
        b = np.cos(m * np.exp(-np.longdouble(k) * ladder[:, None])).sum(-1)
        assert value == pytest.approx(float(b[2]), abs=1e-11)
        size = max(1.0, m * k @ np.exp(-k * x))
        assert slope == pytest.approx(float((b[3] - b[1]) / (2 * h)), abs=1e-4 * size)
        assert curve == pytest.approx(float((b[3] - 2 * b[2] + b[1]) / h**2), abs=1e-4 * size**2)
        third = (b[4] - 2 * b[3] + 2 * b[1] - b[0]) / (2 * h**3)
        assert abs(third) <= bound * 1.01


def terms(seed):
    rng = np.random.default_rng(seed)
    slope, curve = 10.0 ** rng.uniform(0, 8, 2) * rng.normal(size=2)
    return -rng.exponential(), slope, curve, 10.0 ** rng.uniform(2, 12)


@pytest.mark.parametrize(
    ("value", "slope", "curve", "bound"),
    [*map(terms, range(20)), (-1.0, 10.0, -40.0, 30.0), (-1.0, -9.0, -40.0, 30.0)],
)  # the first by hand is positive for a while and then negative again
def test_a_step_stays_where_the_polynomial_is_negative(value, slope, curve, bound):
    step = loops._step(value, slope, curve, bound)
    assert step > 0
    t = np.linspace(0, step, 2001)
    assert (value + slope * t + curve * t**2 / 2 + bound * t**3 / 6 < 0).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_result_does_not_depend_on_the_number_of_threads(threads):
    script = (
        "from rotary.analysis.search import min_base, safe_base\n"
        "print(repr((min_base(3000, 96), safe_base(500, 64))))"
    )
    told = alone(script, env={**os.environ, "NUMBA_NUM_THREADS": str(threads)})
    assert told.strip() == repr((min_base(3000, 96), safe_base(500, 64)))


# --- safe base ---


def test_a_published_safe_base():
    found = safe_base(1024)
    assert found.largest_failing == pytest.approx(6.018e3, rel=2e-4)
    assert found.passing_share == pytest.approx(0.87, abs=0.005)
    assert first_failure(Rotary(head_dim=128, base=found.largest_failing), 1024)
    assert first_failure(Rotary(head_dim=128, base=found.base), 1024) is None
    assert found.searched_to == pytest.approx(12 * min_base(1024).base, rel=1e-4)


def test_the_published_safe_base_of_a_longer_context_on_every_fifth_point_of_the_grid():
    bases = min_base(8192).base * np.exp(np.arange(0, math.log(12), 5e-5))
    passes = comb(8192, bases)
    assert bases[~passes].max() == pytest.approx(3.943e5, rel=2e-4)
    assert passes.mean() == pytest.approx(0.77, abs=0.005)


@pytest.mark.parametrize(
    ("context", "step"), [(64, 1e-5), (8192, 1e-5), (8193, 1.0001319e-5), (131_072, 2e-4)]
)
def test_the_step_of_the_grid_grows_with_a_long_context(context, step):
    """Of half a head, every base of which passes at once."""
    assert safe_base(context, 128, rotary_dim=64).step == pytest.approx(step, rel=1e-6)


def test_the_grid_goes_on_while_its_end_fails():
    """The smallest base of six pairs at 100 tokens is a lucky one, far below the others."""
    found, least = safe_base(100, 12), min_base(100, 12).base
    assert 12 < found.largest_failing / least < 0.8 * found.searched_to / least
    above = np.linspace(found.base, found.searched_to, 200)
    assert comb(100, above, 12).all()


def test_a_known_start_saves_the_search():
    assert safe_base(600, 64, start=min_base(600, 64).base) == safe_base(600, 64)


# --- progress and faults ---


@pytest.mark.parametrize("search", [min_base, safe_base])
def test_progress_grows_from_zero_to_one(search):
    shares = []
    search(1024, 64, progress=shares.append)
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 0.1
    assert shares[-1] == 1
    assert len(shares) > 20


def test_an_error_in_progress_ends_the_search():
    def progress(share):
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        min_base(65536, progress=progress)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: min_base(0), "context must be in 1 .. 4,194,304, got 0"),
        (lambda: min_base(-5), "context must be in 1"),
        (lambda: min_base(10**15), "context must be in 1"),
        (lambda: min_base(1e15), "context must be a whole number"),
        (lambda: min_base(math.nan), "context must be a whole number, got nan"),
        (lambda: min_base(True), "context must be a whole number"),
        (lambda: min_base(64, 127), "head_dim must be even, got 127"),
        (lambda: min_base(64, 0), "head_dim must be in 2"),
        (lambda: min_base(64, 2**20), "head_dim must be in 2"),
        (lambda: min_base(64, 64, rotary_dim=128), "rotary_dim must be even and in"),
        (lambda: min_base(64, 64, rotary_dim=33), "rotary_dim must be even and in"),
        (lambda: min_base(64, 2), "no base passes at every distance up to 64: bases up to 1e37"),
        (lambda: safe_base(0), "context must be in 1"),
        (lambda: safe_base(64, start=0.5), r"a base must be in 1 .. 1e37, got 0.5"),
        (lambda: safe_base(64, start=math.nan), "a base must be in 1 .. 1e37, got nan"),
        (lambda: comb(64, [100.0, -1.0]), "a base must be in 1 .. 1e37, got -1"),
        (lambda: comb(64, ["a"]), "bases must be numbers"),
        (lambda: comb(64, [math.inf]), "a base must be in 1 .. 1e37, got inf"),
        (lambda: comb(64, [1e4], 127), "head_dim must be even"),
    ],
)
def test_nonsense_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_small_heads_whose_sign_rounding_hides_still_pass():
    """cos 355 is -1 + 5e-10: whether the other pair makes up for it is beyond a float32 scan."""
    found = min_base(1000, 4)
    assert found.binding == 355
    assert plain(found.base, 1000, 4).min() >= 0
    assert found.base == pytest.approx(355**2 / (2 * (1 + math.cos(355))), rel=1e-3)


def test_a_scan_that_stops_where_its_list_is_full_goes_on_with_the_next_distance():
    theta = 1e4 ** (-np.arange(7) / 7)  # a number of pairs that `_add` does not take four by four
    cos, sin = np.zeros((2, 8, loops._BLOCK), np.float32)
    loops._fill(theta, cos, sin)
    begin, below, seen = 1, np.empty(5, np.int64), []
    while begin <= 1000:
        count, begin = loops._scan(theta, cos, sin, 0.5, begin, 1000, 1.0, below)
        seen += below[:count].tolist()
    every = np.arange(1, 1001)
    sums = np.cos(every[:, None] * theta).sum(axis=1) + 0.5
    assert np.abs(sums - 1.0).min() > 1e-5  # no distance that float32 could put on either side
    assert seen == every[sums < 1.0].tolist()


def test_every_public_function_is_a_name_of_the_package():
    files = ("bounds", "decay", "extension", "precision", "search", "simulate", "spectrum")
    among_themselves = {"angles_at", "check_size", "checked_distances", "number", "round_to"}
    among_themselves |= {"row_blocks", "whole_number", "whole_numbers"}
    among_themselves.add("option_rows")  # of the command and the page
    for file in files:
        module = importlib.import_module(f"rotary.analysis.{file}")
        for name, value in vars(module).items():
            is_own = inspect.isfunction(value) and value.__module__ == module.__name__
            if is_own and not name.startswith("_") and name not in among_themselves:
                assert getattr(analysis, name) is value
    with pytest.raises(AttributeError, match="has no attribute 'minbase'"):
        analysis.minbase  # noqa: B018  # it is asked for


def test_the_package_does_not_load_numba_before_a_search():
    pytest.importorskip("matplotlib")
    alone("import sys, rotary.plots, rotary.analysis; assert 'numba' not in sys.modules")
