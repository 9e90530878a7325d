"""Frequencies, turns and bands: the published values, and what follows from the definitions."""

import math

import mpmath
import numpy as np
import pytest
from published import LLAMA_2, LLAMA_3, LLAMA_3_1, scaled

from rotary import Rotary, inv_freq
from rotary.analysis import spectrum

SCALED = {
    "linear": Rotary(head_dim=64, schedule="linear", params={"factor": 8.0}),
    "ntk": Rotary(head_dim=64, schedule="ntk", params={"factor": 8.0}),
    "ntk_mixed": Rotary(head_dim=64, schedule="ntk_mixed", params={"factor": 8.0}),
    "yarn": scaled("yarn", 64, 8.0, 4096),
    "llama3": LLAMA_3_1,
    "partial": Rotary(head_dim=80, rotary_dim=32, start=48, sign=-1),
    "custom": Rotary(head_dim=8, schedule="custom", params={"inv_freq": [-1.0, 0.5, -0.02, 0.001]}),
}
DYNAMIC = scaled("dynamic", 64, 4.0, 2048)
STANDING = Rotary(
    head_dim=16, schedule="proportional", params={"partial_rotary_factor": 0.5, "factor": 2.0}
)


@pytest.mark.parametrize(
    ("base", "trained", "published"), [(1e4, 4096, 92), (5e5, 8192, 70), (1e6, 32768, 80)]
)
def test_the_critical_dimension_is_the_published_one(base, trained, published):
    assert spectrum.critical_dimension(Rotary(head_dim=128, base=base), trained) == published


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128, 256])
@pytest.mark.parametrize("base", [100.0, 1e4, 5e5, 1e7])
@pytest.mark.parametrize("trained", [7, 100, 512, 4096, 131072])
def test_the_critical_dimension_of_a_ladder_is_its_formula(head_dim, base, trained):
    share = math.log(trained / (2 * math.pi)) / math.log(base)
    formula = 2 * min(math.ceil(head_dim / 2 * share), head_dim // 2)
    assert spectrum.critical_dimension(Rotary(head_dim=head_dim, base=base), trained) == formula


def test_the_critical_dimension_counts_pairs_of_any_order():
    mixed = Rotary(head_dim=8, schedule="custom", params={"inv_freq": [0.0, 1.0, 0.0628, -0.07]})
    assert spectrum.critical_dimension(mixed, 100) == 4
    assert spectrum.never_turning(mixed, 100).tolist() == [True, False, True, False]


def test_a_tuned_base_extrapolates_to_the_published_length():
    assert round(spectrum.extrapolation_length(1e6, 92, 128)) == 129027


def test_that_length_is_the_wavelength_of_the_first_pair_that_is_not_trained():
    found = spectrum.wavelengths(Rotary(head_dim=128, base=1e6))[92 // 2]
    assert spectrum.extrapolation_length(1e6, 92, 128) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(
    ("spec", "trained", "published"), [(LLAMA_2, 4096, (20.9, 45.0)), (LLAMA_3, 8192, (18.1, 35.0))]
)
def test_the_yarn_band_is_the_published_one(spec, trained, published):
    assert [round(pair, 1) for pair in spectrum.yarn_band(spec, trained)] == list(published)


@pytest.mark.parametrize("turns", [1e-6, 0.5, 1, 32, 651, 1e6])
def test_a_pair_is_found_on_the_ladder_and_beyond_its_ends(turns):
    formula = 128 * math.log(4096 / (2 * math.pi * turns)) / (2 * math.log(1e4))
    assert spectrum.pair_with_turns(LLAMA_2, 4096, turns) == pytest.approx(formula, abs=1e-9)


@pytest.mark.parametrize("name", SCALED)
def test_every_pair_is_found_by_its_own_turns(name):
    spec = SCALED[name]
    for pair, turns in enumerate(spectrum.turns_completed(spec, 4096)):
        assert spectrum.pair_with_turns(spec, 4096, turns) == pytest.approx(pair, abs=1e-9)


def test_pairs_that_stand_still_at_the_end_are_left_out():
    kept = Rotary(head_dim=16, schedule="linear", params={"factor": 2.0})
    for turns in (0.01, 1, 20):
        found = spectrum.pair_with_turns(STANDING, 4096, turns)
        assert found == pytest.approx(spectrum.pair_with_turns(kept, 4096, turns), abs=1e-9)


@pytest.mark.parametrize(
    "spec",
    [
        Rotary(head_dim=2),
        Rotary(head_dim=8, schedule="custom", params={"inv_freq": [0.1, 1.0, 0.01, 0.001]}),
        Rotary(head_dim=8, schedule="custom", params={"inv_freq": [1.0, 0.0, 0.1, 0.01]}),
        Rotary(head_dim=8, schedule="custom", params={"inv_freq": [0.0] * 4}),
        Rotary(head_dim=8, schedule="axial", params={"num_axes": 2}, axes=(0, 0, 1, 1)),
    ],
)
def test_frequencies_that_do_not_fall_have_no_band(spec):
    with pytest.raises(ValueError, match="frequencies must decrease from pair to pair"):
        spectrum.yarn_band(spec, 4096)


@pytest.mark.parametrize("name", SCALED)
def test_turns_times_wavelength_is_the_length(name):
    spec = SCALED[name]
    turns = spectrum.turns_completed(spec, 3000)
    np.testing.assert_allclose(turns * spectrum.wavelengths(spec), 3000, rtol=1e-14)
    np.testing.assert_allclose(turns, 3000 * np.abs(inv_freq(spec)[0]) / math.tau, rtol=1e-14)


def test_a_pair_that_stands_still_never_turns():
    assert spectrum.wavelengths(STANDING)[4:].tolist() == [math.inf] * 4
    assert spectrum.turns_completed(STANDING, 2**24)[4:].tolist() == [0.0] * 4
    assert spectrum.never_turning(STANDING, 2**24).tolist() == [False] * 4 + [True] * 4


def test_the_length_of_the_row_is_heard():
    assert spectrum.wavelengths(DYNAMIC, 8192)[-1] > 4 * spectrum.wavelengths(DYNAMIC)[-1]
    short, long = (spectrum.turns_completed(DYNAMIC, 8192, n)[-1] for n in (None, 8192))
    assert short > 4 * long
    counts = [spectrum.never_turning(DYNAMIC, 8192, n).sum() for n in (None, 8192)]
    assert counts[0] < counts[1]
    assert spectrum.critical_dimension(DYNAMIC, 8192) == 64 - 2 * counts[0]
    assert spectrum.critical_dimension(DYNAMIC, 8192, 8192) == 64 - 2 * counts[1]
    plain, grown = (spectrum.yarn_band(DYNAMIC, 2048, seq_len=n) for n in (None, 8192))
    assert plain[0] > grown[0]
    assert plain[1] > grown[1]


def test_only_the_axes_that_move_have_frequencies():
    spec = Rotary(head_dim=12, axes=(0, 1, 2, 0, 1, 2))
    whole = np.abs(inv_freq(spec)[0])
    assert spectrum.frequencies(spec).tolist() == whole.tolist()
    for axes in ((), (0,), (1, 2), (0, 1, 2)):
        moves = [axis in axes for axis in spec.axes]
        found = spectrum.frequencies(spec, axes=axes)
        assert found.tolist() == np.where(moves, whole, 0.0).tolist()


def test_channels_that_are_not_rotated_are_counted_in_pairs():
    assert spectrum.still_pairs(SCALED["partial"]) == 24
    assert spectrum.still_pairs(Rotary(head_dim=7, rotary_dim=4)) == 1.5


@pytest.mark.parametrize(("base", "head_dim"), [(1e4, 8), (1e3, 6), (1e5, 10), (1e2, 4), (1e8, 16)])
def test_digits_in_base_ten_are_those_of_the_number(base, head_dim):
    for position in (0, 7, 10, 99, 100, 1000, 8675, 16_777_216):
        expected = [int(digit) for digit in reversed(f"{position:0{head_dim}d}")][: head_dim // 2]
        assert spectrum.digits(position, base, head_dim).tolist() == expected


def test_digits_in_a_base_that_is_not_whole():
    with mpmath.workdps(50):
        beta = mpmath.mpf(10_000) ** (mpmath.mpf(2) / 128)
        for position in (1, 4095, 131071):
            expected = [mpmath.fmod(mpmath.floor(position / beta**i), beta) for i in range(64)]
            found = spectrum.digits(position, 1e4, 128)
            np.testing.assert_allclose(found, np.array(expected, float), atol=1e-9)


LENGTHS = [0, -1, 2**24 + 1, 10**15, 1.5, 4096.0, math.nan, True, "4096", None]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "function",
    [
        spectrum.turns_completed,
        spectrum.never_turning,
        spectrum.critical_dimension,
        spectrum.yarn_band,
        lambda spec, length: spectrum.pair_with_turns(spec, length, 1.0),
    ],
)
def test_a_length_must_be_a_whole_number_in_range(function, length):
    with pytest.raises(ValueError, match=r"(length|trained) must be (a whole number|in 1 \.\.)"):
        function(LLAMA_2, length)


BAD_CALLS = {
    "trained must be in 1": lambda: spectrum.critical_dimension(LLAMA_2, 0),
    "turns must be > 0": lambda: spectrum.pair_with_turns(LLAMA_2, 4096, 0),
    "turns must be finite": lambda: spectrum.pair_with_turns(LLAMA_2, 4096, math.nan),
    "turns must be a number": lambda: spectrum.pair_with_turns(LLAMA_2, 4096, "1"),
    "beta_fast must be >= beta_slow": lambda: spectrum.yarn_band(LLAMA_2, 4096, 1, 32),
    "beta_slow must be finite": lambda: spectrum.yarn_band(LLAMA_2, 4096, 32, math.inf),
    "base must be >= 1": lambda: spectrum.extrapolation_length(0.5, 92, 128),
    "base must be finite": lambda: spectrum.digits(1, math.nan, 128),
    "base must be a number": lambda: spectrum.digits(1, True, 128),
    "critical_dim must be in 0 .. 128": lambda: spectrum.extrapolation_length(1e6, 130, 128),
    "head_dim must be even": lambda: spectrum.digits(1, 1e4, 127),
    "head_dim must be in 1": lambda: spectrum.digits(1, 1e4, 0),
    "position must be in 0": lambda: spectrum.digits(-1, 1e4, 128),
    "position must be a whole number": lambda: spectrum.digits(0.5, 1e4, 128),
    "axes must be a tuple": lambda: spectrum.frequencies(LLAMA_2, axes=0),
    "axes must be in 0 .. 0": lambda: spectrum.frequencies(LLAMA_2, axes=(1,)),
    "seq_len must be a whole number": lambda: spectrum.wavelengths(DYNAMIC, -1),
    "positions must be a list of whole numbers": lambda: spectrum.whole_numbers("positions", [0.5]),
    "positions must be in 0 .. 16,777,216, got -1 .. 3": lambda: spectrum.whole_numbers(
        "positions", [3, -1]
    ),
    r"more than 2\^27": lambda: spectrum.check_size("positions", 2**24, 64),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_nonsense_is_refused_in_one_line(message):
    with pytest.raises(ValueError, match=message) as caught:
        BAD_CALLS[message]()
    assert "\n" not in str(caught.value)
