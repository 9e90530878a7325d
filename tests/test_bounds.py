"""B_m of Men et al.: against sums term by term, in many digits, and the published counts."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import LLAMA_2, LLAMA_3_1, scaled

from rotary import Rotary, inv_freq
from rotary.analysis.bounds import failures, first_failure, lowest, similarity, survey
from rotary.analysis.spectrum import frequencies


def plain(spec, distances, weights=1.0, still=None):
    """Term by term, in float64: right as long as the distances are small."""
    still = (spec.head_dim - spec.rotary_dim) / 2 if still is None else still
    angles = np.asarray(distances)[:, None] * np.abs(inv_freq(spec)[0])
    return (weights * np.exp(1j * angles)).sum(-1).real + still


# --- values ---


@pytest.mark.parametrize(
    ("base", "first"), [(100.0, 59), (1e4, 1707), (5e5, 18438), (2.7e4, 4079), (6.4e5, 27685)]
)
def test_first_failures_of_common_bases(base, first):
    assert first_failure(Rotary(head_dim=128, base=base)) == first


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (
            Rotary(head_dim=128, schedule="proportional", params={"partial_rotary_factor": 0.75}),
            30376,
        ),
        (Rotary(head_dim=96, rotary_dim=24), None),
        (LLAMA_3_1, 85133),
        (Rotary(head_dim=128, schedule="linear", params={"factor": 8.0}), 13649),
        (
            scaled("yarn", 128, 8.0, 4096),
            8886,
        ),
    ],
)  # fmt: skip
def test_first_failures_of_partial_and_scaled_ropes(spec, first):
    assert first_failure(spec, 2**17) == first


def test_the_counts_of_table_4_of_men_et_al():
    """Llama 2 from 4k to 32k: pairs from 44 on interpolated, the others by a larger base."""
    pairs = np.arange(64)
    larger = (1e4 * 8 ** (128 / 88)) ** (-pairs / 64)
    params = {"inv_freq": np.where(pairs < 44, larger, 1e4 ** (-pairs / 64) / 8)}
    mixed = Rotary(head_dim=128, schedule="custom", params=params)
    assert [len(failures(mixed, length)) for length in (15 * 1024, 30 * 1024)] == [97, 2554]


@pytest.mark.parametrize("distance", [0, 1, 511, 512, 131_071, 2**20 + 3, 2**24, -(2**24) + 1])
@pytest.mark.parametrize("spec", [LLAMA_2, LLAMA_3_1], ids=["base 1e4", "llama3"])
def test_far_distances_in_forty_digits(spec, distance):
    with mpmath.workdps(40):
        angles = [distance * mpmath.mpf(float(each)) for each in inv_freq(spec)[0]]
        exact = float(mpmath.fsum(map(mpmath.cos, angles)))
    assert similarity(spec, [distance])[0] == pytest.approx(exact, abs=1e-12)


def test_the_start_is_the_number_of_pairs():
    assert similarity(Rotary(head_dim=128, rotary_dim=32), [0])[0] == 64


def test_a_spec_whose_pairs_all_turn_alike_has_one_cosine():
    params = {"inv_freq": [1.0] * 8}
    alike = Rotary(head_dim=16, schedule="custom", params=params)
    found = similarity(alike, range(2000))
    np.testing.assert_allclose(found, 8 * np.cos(np.arange(2000)), rtol=0, atol=1e-12)
    assert first_failure(alike) == 2
    assert lowest(alike, 400) == (355, pytest.approx(math.cos(355)))


# --- laws ---


@settings(max_examples=40, deadline=None)
@given(
    head_dim=st.integers(1, 40).map(lambda n: 2 * n),
    share=st.floats(0.1, 1.0),
    base=st.floats(1.5, 1e7),
    distances=st.lists(st.integers(-3000, 3000), min_size=1, max_size=40),
    seed=st.integers(0, 99),
)
def test_it_is_the_sum_term_by_term(head_dim, share, base, distances, seed):
    spec = Rotary(head_dim=head_dim, rotary_dim=2 * math.ceil(head_dim * share / 2), base=base)
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(spec.rotary_dim // 2) * np.exp(1j * rng.uniform(0, 6))
    np.testing.assert_allclose(
        similarity(spec, distances), plain(spec, distances), rtol=0, atol=1e-10
    )
    found = similarity(spec, distances, weights=weights, still=0.25)
    np.testing.assert_allclose(found, plain(spec, distances, weights, 0.25), rtol=0, atol=1e-10)


def test_rows_and_scattered_distances_agree():
    spec = Rotary(head_dim=64, base=1e6)
    whole = similarity(spec, range(70_000))
    scattered = np.random.default_rng(0).permutation(70_000)[:100]
    np.testing.assert_allclose(similarity(spec, scattered), whole[scattered], rtol=0, atol=1e-12)
    np.testing.assert_allclose(whole[::97], plain(spec, range(0, 70_000, 97)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("spec", [LLAMA_2, Rotary(head_dim=64, base=300.0)], ids=["1e4", "300"])
def test_failures_first_failure_and_lowest_tell_the_same_story(spec):
    values = plain(spec, np.arange(1, 9001))
    found = failures(spec, 9000)
    assert found.tolist() == (1 + np.flatnonzero(values < 0)).tolist()
    assert first_failure(spec, 9000) == found[0]
    assert first_failure(spec, int(found[0])) == found[0]
    assert first_failure(spec, int(found[0]) - 1) is None
    assert lowest(spec, 9000)[0] == values.argmin() + 1
    assert lowest(spec, 9000)[1] == pytest.approx(values.min() / (spec.head_dim / 2))
    failing, *least = survey(spec, 9000)
    assert (failing.tolist(), *least) == (found.tolist(), *lowest(spec, 9000))


def test_weights_scale_the_similarity_and_not_its_lowest_share():
    weights = np.linspace(1, 2, 64)
    one, three = (lowest(LLAMA_2, 4096, weights=c * weights) for c in (1.0, 3.0))
    assert one == pytest.approx(three)
    assert first_failure(LLAMA_2, weights=3 * weights) == first_failure(LLAMA_2, weights=weights)


def test_still_channels_move_the_first_failure():
    assert first_failure(LLAMA_2, still=64.0) is None
    assert first_failure(LLAMA_2, still=0.0) < first_failure(LLAMA_2, 2**24, still=8.0)


def test_pairs_of_axes_that_stand_still_count_fully():
    spec = Rotary(head_dim=8, base=100.0, axes=(0, 1, 1, 2))
    distances = np.arange(50)
    theta = frequencies(spec)
    expected = 2 + np.cos(distances[:, None] * theta[1:3]).sum(-1)
    np.testing.assert_allclose(similarity(spec, distances, axes=(1,)), expected, rtol=0, atol=1e-12)


def test_the_length_of_the_row_reaches_dynamic_frequencies():
    spec = scaled("dynamic", 128, 4.0, 2048)
    short, long = (first_failure(spec, seq_len=length) for length in (2048, 65536))
    assert short == 1707
    assert long > 10 * short
    assert len(failures(spec, 4096, seq_len=65536)) == 0
    assert lowest(spec, 4096, seq_len=65536)[1] > 0 > lowest(spec, 4096)[1]
    assert similarity(spec, [1707], seq_len=65536)[0] > 0 > similarity(spec, [1707])[0]


# --- faults ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: first_failure(LLAMA_2, 0), "limit must be in 1"),
        (lambda: first_failure(LLAMA_2, 2**24 + 1), "limit must be in 1 .. 16,777,216"),
        (lambda: failures(LLAMA_2, -5), "length must be in 1"),
        (lambda: failures(LLAMA_2, math.nan), "length must be a whole number, got nan"),
        (lambda: lowest(LLAMA_2, 10**15), "length must be in 1"),
        (lambda: lowest(LLAMA_2, 8, weights=np.zeros(64)), "weights and still are all 0"),
        (lambda: similarity(LLAMA_2, [0.5]), "distances must be"),
        (lambda: similarity(LLAMA_2, [2**24 + 1]), "distances must be"),
        (lambda: similarity(LLAMA_2, [True]), "distances must be"),
        (lambda: similarity(LLAMA_2, [1], weights=np.ones(63)), r"weights must be \(64,\)"),
        (lambda: similarity(LLAMA_2, [1], weights=["a"] * 64), r"weights must be \(64,\)"),
        (lambda: similarity(LLAMA_2, [1], weights=[math.nan] * 64), "weights must be finite"),
        (lambda: similarity(LLAMA_2, [1], still=math.inf), "still must be a finite number"),
        (lambda: similarity(LLAMA_2, [1], still="1"), "still must be a finite number"),
        (lambda: similarity(LLAMA_2, [1], axes=(1,)), "axes must be in 0 .. 0"),
    ],
)
def test_nonsense_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
