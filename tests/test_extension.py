"""What an extension does: angles never seen, counted one by one, and the published failures."""

import math

import numpy as np
import pytest
from published import LLAMA_2, LLAMA_3, scaled

from rotary import Rotary, from_hf_config, inv_freq, to_hf_config
from rotary.analysis import extension
from rotary.analysis.bounds import first_failure

NEOX = Rotary(head_dim=96, rotary_dim=24)
NAMES = ["none", "linear", "ntk", "ntk_mixed", "yarn", "llama3", "longrope"]


def counted(original, trained, spec, position):
    """The share of distances 1 .. position whose angle no distance below `trained` came near."""
    shares = []
    for old, new in zip(inv_freq(original)[0], inv_freq(spec)[0], strict=True):
        if trained * abs(old) >= math.tau:
            shares.append(0.0)
            continue
        angles = np.arange(1, position + 1) * abs(new) % math.tau
        shares.append(np.mean(angles > trained * abs(old)) if new else 0.0)
    return shares


@pytest.mark.parametrize("position", [300, 900, 5000, 40_000])
@pytest.mark.parametrize("factor", [1.0, 1.7, 8.0])
def test_angles_never_seen_are_those_that_counting_finds(position, factor):
    original = Rotary(head_dim=32, rotary_dim=24)
    spec = Rotary(head_dim=32, rotary_dim=24, schedule="linear", params={"factor": factor})
    found = extension.unseen(original, 300, spec, [0, position])
    expected = counted(original, 300, spec, position)
    assert found[0].tolist() == [0.0] * 12
    np.testing.assert_allclose(found[1], expected, atol=2 / position)
    mean = extension.unseen_share(original, 300, spec, position)
    assert mean == pytest.approx(np.mean(expected), abs=2 / position)
    if factor == 1 and position > 300:
        assert mean > 0


def test_frequencies_of_any_order_and_sign_are_counted():
    old = Rotary(head_dim=8, schedule="custom", params={"inv_freq": [0.001, -0.02, 0.0, 3.0]})
    new = Rotary(head_dim=8, schedule="custom", params={"inv_freq": [0.1, -0.01, 0.0, 0.01]})
    found = extension.unseen(old, 100, new, [7000])[0]
    np.testing.assert_allclose(found, counted(old, 100, new, 7000), atol=1e-3)
    assert found[2] == found[3] == 0


@pytest.mark.parametrize("spec", [LLAMA_2, LLAMA_3, NEOX])
def test_nothing_is_new_within_the_trained_length(spec):
    assert extension.unseen(spec, 4096, spec, np.arange(4097)).max() == 0


@pytest.mark.parametrize("trained", [10, 4096, 8192])
def test_coverage_is_the_share_of_the_circle(trained):
    found = extension.coverage(LLAMA_2, trained)
    for share, step in zip(found, inv_freq(LLAMA_2)[0], strict=True):
        assert share == pytest.approx(min(trained * step, math.tau) / math.tau, rel=1e-12)
    new = extension.unseen(LLAMA_2, trained, LLAMA_2, [2**20])[0]
    assert (new[found == 1] == 0).all()
    assert (new[found < 1] > 0).all()


def test_the_length_of_the_row_is_heard():
    made = extension.methods(LLAMA_2, 4096, 32768)["longrope"]
    short, long = (
        extension.unseen_share(LLAMA_2, 4096, made, 32767, seq_len) for seq_len in (None, 32768)
    )
    assert short == extension.unseen_share(LLAMA_2, 4096, LLAMA_2, 32767) > 0.1
    assert long == 0
    dynamic = scaled("dynamic", 128, 8.0, 4096)
    short, long = (extension.coverage(dynamic, 4096, seq_len)[-1] for seq_len in (None, 8192))
    assert short == pytest.approx(9 * long)


@pytest.mark.parametrize("spec", [LLAMA_2, LLAMA_3, NEOX, Rotary(head_dim=2)])
@pytest.mark.parametrize(("trained", "target"), [(2048, 16384), (4096, 10_000), (512, 512)])
def test_every_method_stretches_the_slowest_pair_by_the_factor(spec, trained, target):
    made = extension.methods(spec, trained, target)
    assert list(made) == NAMES
    assert made["none"] == spec
    factor = target / trained
    for name, stretched in made.items():
        ratio = inv_freq(stretched, target)[0] / inv_freq(spec)[0]
        one_pair = spec.rotary_dim == 2 and name != "linear" and name != "ntk_mixed"
        if name != "none" and not one_pair:
            assert ratio[-1] == pytest.approx(1 / factor)
        if name not in ("linear", "ntk_mixed"):
            assert ratio[0] == pytest.approx(1.0)
        assert (ratio <= 1 + 1e-12).all()
        assert (ratio >= 1 / factor - 1e-12).all()


@pytest.mark.parametrize("name", [name for name in NAMES if "ntk" not in name])
@pytest.mark.parametrize("spec", [LLAMA_3, NEOX])
def test_transformers_configs_can_say_them(name, spec):
    made = extension.methods(spec, 8192, 65536)[name]
    assert from_hf_config(to_hf_config(made, max_position_embeddings=65536)) == made


def test_longrope_stretches_the_pairs_beyond_the_critical_dimension():
    made = extension.methods(LLAMA_2, 4096, 32768)["longrope"]
    assert made.params["long_factor"] == (1.0,) * 46 + (8.0,) * 18
    assert made.params["short_factor"] == (1.0,) * 64


def test_the_slice_the_layout_and_the_direction_stay():
    spec = Rotary(head_dim=96, rotary_dim=24, start=8, layout="interleaved", sign=-1)
    for made in extension.methods(spec, 2048, 8192).values():
        assert (made.head_dim, made.rotary_dim, made.start) == (96, 24, 8)
        assert (made.layout, made.out_layout, made.sign) == ("interleaved", "interleaved", -1)


def proportional(share):
    params = {"partial_rotary_factor": share}
    return Rotary(head_dim=128, schedule="proportional", params=params)


# first distance at which a random key scores higher than a similar one, in the mean
PUBLISHED = {
    "Llama 2, linear 8": (extension.methods(LLAMA_2, 4096, 32768)["linear"], 13649),
    "Llama 2, YaRN 8": (extension.methods(LLAMA_2, 4096, 32768)["yarn"], 8886),
    "Llama 3": (LLAMA_3, 18438),
    "Llama 3.1": (extension.methods(LLAMA_3, 8192, 65536)["llama3"], 85133),
    "0.75-RoPE": (proportional(0.75), 30376),
    "GPT-NeoX": (NEOX, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_first_failure_is_the_known_one(name):
    spec, expected = PUBLISHED[name]
    assert first_failure(spec, 2**17) == expected


def similarities(spec, target):
    """B_m of 1 .. target, written out."""
    still = (spec.head_dim - spec.rotary_dim) / 2
    distances = np.arange(1, target + 1)
    return sum(np.cos(distances * step) for step in inv_freq(spec, target)[0]) + still


@pytest.mark.parametrize("spec", [LLAMA_2, Rotary(head_dim=64, rotary_dim=48, base=500.0)])
def test_a_comparison_says_what_the_curves_say(spec):
    trained, target = 2048, 10_000
    rows = extension.compare(spec, trained, target)
    assert {row.method: row.spec for row in rows} == extension.methods(spec, trained, target)
    for row in rows:
        curve = similarities(row.spec, target)
        failing = np.flatnonzero(curve < 0) + 1
        assert row.failures == len(failing)
        assert row.first_failure == (failing[0] if len(failing) else None)
        assert row.lowest == pytest.approx(curve.min() / (spec.head_dim / 2), abs=1e-9)
        steps, factor = inv_freq(row.spec, target)
        assert row.fastest_ratio == pytest.approx(steps[0] / inv_freq(spec)[0][0])
        assert row.slowest_ratio == pytest.approx(steps[-1] / inv_freq(spec)[0][-1])
        assert row.attention_factor == factor
        new = extension.unseen_share(spec, trained, row.spec, target - 1, target)
        assert row.unseen == new
    assert any(row.failures for row in rows)


def test_a_comparison_tells_the_methods_apart():
    trained, target = 2048, 10_000
    rows = extension.compare(LLAMA_2, trained, target)
    shares = {row.method: row.unseen for row in rows}
    assert shares["linear"] == shares["longrope"] == 0 < shares["ntk"] < shares["none"]
    factors = {row.method: row.attention_factor for row in rows}
    assert factors["yarn"] == pytest.approx(1 + 0.1 * math.log(target / trained))
    assert factors["longrope"] == pytest.approx(
        math.sqrt(1 + math.log(target / trained) / math.log(trained))
    )


SCALED = Rotary(head_dim=8, schedule="linear", params={"factor": 2.0})
GRID = Rotary(head_dim=8, axes=(0, 1, 0, 1))
BAD_CALLS = {
    "got schedule 'linear'": lambda: extension.methods(SCALED, 512, 4096),
    "got 2 axes": lambda: extension.compare(GRID, 512, 4096),
    "trained must be in 2": lambda: extension.methods(LLAMA_2, 1, 4096),
    "target must be in 4,096": lambda: extension.compare(LLAMA_2, 4096, 4095),
    "target must be in 4,096 .. 16,777,216": lambda: extension.compare(LLAMA_2, 4096, 10**15),
    "trained must be a whole number, got 4096.0": lambda: extension.methods(LLAMA_2, 4096.0, 8192),
    "target must be a whole number, got nan": lambda: extension.methods(LLAMA_2, 4096, math.nan),
    "must have the same rotary_dim, got 128 and 24": lambda: extension.unseen(
        LLAMA_2, 512, NEOX, [1]
    ),
    "trained must be in 1": lambda: extension.unseen(LLAMA_2, 0, LLAMA_2, [1]),
    "trained must be a whole number, got True": lambda: extension.coverage(LLAMA_2, True),
    "positions must be in 0": lambda: extension.unseen(LLAMA_2, 512, LLAMA_2, [-1]),
    "position must be a whole number": lambda: extension.unseen_share(LLAMA_2, 512, LLAMA_2, 0.5),
    "schedule 'default' of the spec has no factor to be made larger: analysis.methods": lambda: (
        extension.stretched_further(LLAMA_2, 2.0)
    ),
    r"more than 2\^27; ask for fewer": lambda: extension.unseen(
        LLAMA_2, 512, LLAMA_2, np.arange(2**21 + 1)
    ),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_nonsense_is_refused_in_one_line(message):
    with pytest.raises(ValueError, match=message) as caught:
        BAD_CALLS[message]()
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:base 1 gives every pair")
def test_base_one_has_no_ladder_to_stretch():
    with pytest.raises(ValueError, match="base 1 has a single one"):
        extension.methods(Rotary(head_dim=8, base=1.0), 512, 4096)
