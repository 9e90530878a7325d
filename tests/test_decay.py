"""Scores against distance: three routes, their terms, the bound, the curve of the paper."""

import cmath
import math
import tracemalloc

import mpmath
import numpy as np
import pytest

import rotary
from rotary import Rotary
from rotary.analysis.decay import (
    abel_terms,
    angles_at,
    attention_terms,
    decay_curve,
    pair_terms,
    partial_sums,
    score,
    score_bound,
    still_term,
)
from rotary.attention import sinusoidal

ROUTES = ("rotated", "complex", "matrix")
TABLE = 2.0**-24  # what a float32 entry of cos or sin may be off
FAR = 2**24
YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
DYNAMIC = {"factor": 2.0, "original_max_position_embeddings": 64}
ODD = [2.5, -0.7, 0.0, 4.0, 1e-6, 0.1]  # fast, backwards, still, beyond pi
SPECS = {
    "half": (Rotary(head_dim=16), None),
    "interleaved": (Rotary(head_dim=16, base=500.0, layout="interleaved"), None),
    "slice": (Rotary(head_dim=24, rotary_dim=12, start=6, layout="interleaved"), None),
    "half slice": (Rotary(head_dim=11, rotary_dim=6, start=4), None),
    "read and written": (Rotary(head_dim=16, layout="interleaved", out_layout="half"), None),
    "backwards": (Rotary(head_dim=16, rotary_dim=8, sign=-1), None),
    "amplitude": (Rotary(head_dim=16, rotary_dim=12, schedule="yarn", params=YARN), None),
    "of a length": (Rotary(head_dim=16, schedule="dynamic", params=DYNAMIC), 300),
    "custom": (
        Rotary(head_dim=14, rotary_dim=12, schedule="custom",
               params={"inv_freq": ODD, "attention_factor": 1.3}),
        None,
    ),
    "three axes": (Rotary(head_dim=12, axes=(0, 1, 2, 0, 1, 2)), None),
}  # fmt: skip
BASES = {  # the curves of figure 2 of RoFormer at DISTANCES, head_dim 128, computed elsewhere
    1e2: "32.5 31.469 12.636 4.387 4.491 5.073 6.202 6.050",
    1e4: "32.5 31.538 17.954 12.629 10.227 6.548 4.471 3.859",
    5e5: "32.5 31.647 20.886 15.735 13.709 11.434 10.200 4.760",
    1e6: "32.5 31.664 21.289 17.502 13.533 13.759 12.501 5.518",
}
DISTANCES = (0, 1, 10, 50, 100, 250, 1000, 10_000)

anywhere = pytest.mark.parametrize(("spec", "seq_len"), SPECS.values(), ids=SPECS)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def pairs_of(spec, x):
    """The pairs of one vector as complex numbers, written out from what a layout is."""
    n = spec.rotary_dim // 2
    step, second = (1, n) if spec.layout == "half" else (2, 1)
    return [complex(x[spec.start + step * i], x[spec.start + step * i + second]) for i in range(n)]


def phase(spec, pair, distance, seq_len):
    """e^{i distance theta} of one pair, with 50 digits."""
    with mpmath.workdps(50):
        angle = spec.sign * distance * mpmath.mpf(float(rotary.inv_freq(spec, seq_len)[0][pair]))
        return complex(mpmath.expjpi(angle / mpmath.pi))


def expected_terms(spec, q, k, distance, seq_len):
    square = rotary.inv_freq(spec, seq_len)[1] ** 2
    return [
        square * (a * b.conjugate() * phase(spec, pair, distance, seq_len)).real
        for pair, (a, b) in enumerate(zip(pairs_of(spec, q), pairs_of(spec, k), strict=True))
    ]


def expected_still(spec, q, k):
    inside = range(spec.start, spec.start + spec.rotary_dim)
    return sum(q[c] * k[c] for c in range(spec.head_dim) if c not in inside)


# --- the score ---


@pytest.mark.parametrize("distance", [0, 1, -7, 4095, FAR, -FAR])
@anywhere
def test_the_routes_are_the_formula(spec, seq_len, distance):
    q, k = draw(2, spec.head_dim)
    terms = expected_terms(spec, q, k, distance, seq_len)
    wanted = sum(terms) + expected_still(spec, q, k)
    size = np.abs(q) @ np.abs(k) * rotary.inv_freq(spec, seq_len)[1] ** 2
    # a frequency is rounded to 2^-65 turn per token, which the distance magnifies
    allowed = size * 1e-11
    for route in ROUTES:
        found = score(spec, q, k, distance, route=route, seq_len=seq_len)
        assert found.shape == ()
        assert float(found) == pytest.approx(wanted, abs=allowed), route
    np.testing.assert_allclose(
        pair_terms(spec, q, k, distance, seq_len=seq_len), terms, rtol=0, atol=allowed
    )
    assert float(still_term(spec, q, k)) == pytest.approx(expected_still(spec, q, k), abs=1e-13)


@pytest.mark.parametrize("moving", [(0,), (1, 2), (), (0, 1, 2)])
def test_an_axis_that_does_not_move_is_a_distance_of_zero(moving):
    spec = Rotary(head_dim=12, axes=(0, 1, 2, 0, 1, 2), sign=-1)
    q, k = draw(2, 12, seed=2)
    at_q = np.array([[7 if axis in moving else 0 for axis in range(3)]])
    left, right = (
        rotary.apply(spec, x[None], positions=p)[0] for x, p in ((q, at_q), (k, 0 * at_q))
    )
    for route in ROUTES:
        found = score(spec, q, k, 7, route=route, axes=moving)
        assert float(found) == pytest.approx(left @ right, abs=1e-5)
    curve = decay_curve(spec, [7], axes=moving)
    sums = np.cumsum([cmath.exp(7j * 1e4 ** (-i / 6) * (i % 3 in moving)) for i in range(6)])
    np.testing.assert_allclose(curve, np.abs(sums).mean(), rtol=1e-13)


@pytest.mark.parametrize("route", ROUTES)
def test_leading_axes_and_distances_broadcast(route):
    spec = Rotary(head_dim=8, rotary_dim=6, start=1)
    q, k, distances = draw(3, 1, 8), draw(4, 8, seed=1), np.arange(4) - 1
    found = score(spec, q, k, distances, route=route)
    assert found.shape == (3, 4)
    for row in range(3):
        for column in range(4):
            one = score(spec, q[row, 0], k[column], int(distances[column]))
            assert found[row, column] == pytest.approx(float(one), abs=1e-13)
    assert score(spec, np.zeros((0, 8)), np.zeros((0, 8)), 3, route=route).shape == (0,)


# --- its terms ---


@anywhere
def test_the_terms_of_a_map_add_up_to_the_product_of_rotated_queries_and_keys(spec, seq_len):
    q, k = draw(2, 9, spec.head_dim, seed=4)
    several = spec.num_axes > 1
    at = np.random.default_rng(1).integers(0, 300, (9, spec.num_axes) if several else 9)
    rotated = [rotary.apply(spec, x, positions=at, seq_len=seq_len) for x in (q, k)]
    terms = attention_terms(spec, q, k, at, seq_len=seq_len)
    assert terms.shape == (spec.rotary_dim // 2, 9, 9)
    scores = terms.sum(axis=0) + still_term(spec, q[:, None], k)
    np.testing.assert_allclose(scores, rotated[0] @ rotated[1].T, rtol=0, atol=1e-5)


def test_a_cell_of_a_map_has_the_terms_of_its_score():
    spec, (q, k) = Rotary(head_dim=8, layout="interleaved"), draw(2, 5, 8)
    last = attention_terms(spec, q[-1:], k, [4], key_positions=np.arange(5))
    whole = attention_terms(spec, q, k)
    np.testing.assert_array_equal(last[:, 0], whole[:, -1])
    for n in range(5):
        np.testing.assert_allclose(last[:, 0, n], pair_terms(spec, q[-1], k[n], 4 - n), atol=1e-14)


@anywhere
def test_the_sum_by_parts_is_the_score(spec, seq_len):
    q, k = draw(2, 2000, spec.head_dim, seed=5)
    distances = np.random.default_rng(2).integers(-100_000, 100_000, 2000)
    terms = abel_terms(spec, q, k, distances, seq_len=seq_len)
    found = still_term(spec, q, k) - terms.real.sum(axis=-1)
    scores = score(spec, q, k, distances, seq_len=seq_len)
    np.testing.assert_allclose(found, scores, rtol=0, atol=1e-10)


def test_the_first_term_by_parts_is_written_out():
    spec, (q, k) = Rotary(head_dim=6, base=100.0), draw(2, 6, seed=6)
    h = [a * b.conjugate() for a, b in zip(pairs_of(spec, q), pairs_of(spec, k), strict=True)]
    e = [cmath.exp(3j * 100.0 ** (-i / 3)) for i in range(3)]
    wanted = [e[0] * (h[1] - h[0]), (e[0] + e[1]) * (h[2] - h[1]), -sum(e) * h[2]]
    np.testing.assert_allclose(abel_terms(spec, q, k, 3), wanted, rtol=1e-13)


# --- the bound ---


@anywhere
def test_no_score_is_above_its_bound(spec, seq_len):
    q, k = draw(2, 5000, spec.head_dim, seed=7)
    distances = np.random.default_rng(3).integers(-50_000, 50_000, 5000)
    bound = score_bound(spec, q, k, distances, seq_len=seq_len)
    assert (np.abs(score(spec, q, k, distances, seq_len=seq_len)) <= bound).all()
    # a key like the query, where all terms are positive, comes nearest
    same = score_bound(spec, q, q, 0, seq_len=seq_len)
    assert (score(spec, q, q, 0, seq_len=seq_len) <= same).all()


@anywhere
def test_the_bound_is_the_largest_step_times_the_sum_of_sizes(spec, seq_len):
    q, k = draw(2, spec.head_dim, seed=8)
    square = rotary.inv_freq(spec, seq_len)[1] ** 2
    h = [square * a * b.conjugate()
         for a, b in zip(pairs_of(spec, q), pairs_of(spec, k), strict=True)]  # fmt: skip
    largest = max(abs(b - a) for a, b in zip(h, [*h[1:], 0], strict=True))
    sums = np.cumsum([phase(spec, pair, 33, seq_len) for pair in range(len(h))])
    wanted = largest * np.abs(sums).sum() + abs(expected_still(spec, q, k))
    found = score_bound(spec, q, k, 33, seq_len=seq_len)
    assert float(found) == pytest.approx(wanted, rel=1e-10)


def test_the_bound_counts_the_last_difference():
    ones = np.ones(16)  # all h are equal: the only step is the last one, to 0
    assert float(score_bound(Rotary(head_dim=16), ones, ones, 0)) == 2 * sum(range(1, 9))


# --- the curve of the paper ---


@pytest.mark.parametrize("base", BASES)
def test_the_curve_of_figure_2_has_these_digits(base):
    found = decay_curve(Rotary(head_dim=128, base=base), DISTANCES)
    wanted = [float(value) for value in BASES[base].split()]
    np.testing.assert_array_equal(found.round(3), wanted)


@anywhere
def test_the_curve_is_the_mean_size_of_the_sums(spec, seq_len):
    distances = [0, 1, -5, 77, 123_456, FAR]
    n = spec.rotary_dim // 2
    waves = [[phase(spec, pair, m, seq_len) for pair in range(n)] for m in distances]
    sums = np.cumsum(waves, axis=1)
    found = decay_curve(spec, distances, seq_len=seq_len)
    np.testing.assert_allclose(found, np.abs(sums).mean(axis=1), rtol=0, atol=n * 1e-10)
    np.testing.assert_allclose(
        partial_sums(spec, distances, seq_len=seq_len)[:, 1:], sums, rtol=0, atol=n * 1e-10
    )
    assert found[0] == (n + 1) / 2


@pytest.mark.parametrize(
    "distances",
    [range(-3000, 9000), range(0, FAR + 1, 2**10), range(9000, 0, -3), range(5), [8] * 5000],
    ids=["all", "far", "backwards", "few", "one"],
)
def test_evenly_spaced_distances_give_what_each_gives_alone(distances):
    spec = Rotary(head_dim=128, sign=-1)
    distances = np.array(distances)
    shuffled = np.random.default_rng(0).permutation(len(distances))
    found = decay_curve(spec, distances)
    np.testing.assert_allclose(found[shuffled], decay_curve(spec, distances[shuffled]), atol=1e-12)
    some = shuffled[:50]
    by_sums = np.abs(partial_sums(spec, distances[some])[:, 1:]).mean(axis=1)
    np.testing.assert_allclose(found[some], by_sums, atol=1e-12)


def test_equal_frequencies_do_not_decay():
    with pytest.warns(UserWarning, match="base 1 gives every pair the same frequency"):
        spec = Rotary(head_dim=128, base=1.0)
    ones = Rotary(head_dim=128, schedule="custom", params={"inv_freq": [1.0] * 64})
    for same in (spec, ones):
        np.testing.assert_allclose(decay_curve(same, range(0, 20_000, 7)), 32.5, rtol=1e-14)


def test_a_very_large_base_decays_late():
    near, far = (decay_curve(Rotary(head_dim=128, base=b), [100])[0] for b in (1e4, 1e12))
    assert far > 2 * near
    assert far == pytest.approx(22, abs=0.5)


def test_the_curve_takes_little_memory():
    spec, distances = Rotary(head_dim=128), np.arange(2**17)
    tracemalloc.start()
    curve = decay_curve(spec, distances)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(curve) == 2**17
    assert peak < 16 * 2**20  # the phasors of all of them would take 128 MiB


# --- the walk ---


def test_the_walk_has_steps_of_length_one_and_ends_at_the_product_of_two_sinusoids():
    distances = np.array([0, 3, 1000])
    walks = partial_sums(Rotary(head_dim=64), distances)
    assert walks.shape == (3, 33)
    assert (walks[:, 0] == 0).all()
    np.testing.assert_allclose(np.abs(np.diff(walks)), 1, rtol=1e-13)
    ends = sinusoidal(distances, 64) @ sinusoidal(np.array(0), 64)
    np.testing.assert_allclose(walks[:, -1].real, ends, atol=1e-11)


@pytest.mark.parametrize("sign", [1, -1])
def test_angles_are_exact_and_signed(sign):
    spec = Rotary(head_dim=4, base=100.0, sign=sign)
    found = angles_at(spec, [[3], [FAR]])
    assert found.shape == (2, 1, 2)
    for i, m in enumerate((3, FAR)):
        for pair in range(2):
            assert cmath.exp(1j * found[i, 0, pair]) == pytest.approx(
                phase(spec, pair, m, None), abs=1e-11
            )
    assert math.pi >= np.abs(found).max()


# --- what is refused ---

SPEC, WIDE = Rotary(head_dim=4), Rotary(head_dim=128)
Q = [1.0, 2.0, 3.0, 4.0]
REFUSED = [
    (lambda: decay_curve(SPEC, [0.5]), "distances must be a list of whole numbers"),
    (lambda: decay_curve(SPEC, [math.nan]), "distances must be a list of whole numbers"),
    (lambda: partial_sums(SPEC, [True]), "distances must be a list of whole numbers"),
    (lambda: decay_curve(SPEC, [10**15]), "distances must be in -16,777,216 .. "),
    (lambda: decay_curve(SPEC, [[1]]), "distances must be a list of whole numbers"),
    (lambda: partial_sums(WIDE, range(2**25 // 65 + 1)), "more than 2^25"),
    (lambda: angles_at(WIDE, range(2**20 + 1)), "more than 2^26"),
    (lambda: decay_curve(SPEC, [1], axes=(1,)), "axes must be in 0 .. 0"),
    (lambda: score(SPEC, Q, Q, 1, route="polar"), "route must be one of rotated, comp"),
    (lambda: score(SPEC, Q, Q, 1.5), "distance must be a list of whole numbers"),
    (lambda: score(SPEC, Q[:3], Q, 1), r"q must be \(..., head_dim = 4\), got \(3,\)"),
    (lambda: score(SPEC, 1.0, Q, 1), r"q must be \(..., head_dim = 4\), got \(\)"),
    (lambda: pair_terms(SPEC, Q, list("abcd"), 1), "k must hold real numbers"),
    (lambda: still_term(SPEC, np.ones(4) * 1j, Q), "q must hold real numbers"),
    (lambda: abel_terms(SPEC, [math.inf] * 4, Q, 1), "q must be finite"),
    (lambda: score(SPEC, [Q] * 2, [Q] * 3, 1), "leading axes of q, k and distance"),
    (lambda: attention_terms(SPEC, Q, Q), r"q and k must be \(seq, head_dim\)"),
    (lambda: attention_terms(SPEC, [Q], [Q] * 2), "need key_positions"),
    (lambda: attention_terms(SPEC, [Q], [Q], [1, 2]), r"must be of shape \(1,\)"),
    (lambda: attention_terms(Rotary(head_dim=4, axes=(0, 1)), [Q], [Q]),
     r"a spec with 2 axes needs positions \(seq, axes\)"),
    (lambda: attention_terms(SPEC, np.ones((6000, 4)), np.ones((6000, 4))), "more than 2^26"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_nonsense_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message.replace("^", r"\^")) as caught:
        call()
    assert "\n" not in str(caught.value)
