"""Frequencies by design: known answers, bounds against plain sums, and what is refused."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from command import assert_refused, document
from hypothesis import given, settings
from hypothesis import strategies as st

from rotary import Rotary, analysis, from_hf_config, inv_freq, plots
from rotary.analysis import fitting
from rotary.analysis.ladders import (
    alternatives,
    design,
    misses,
    wanted_curve,
    wanted_level,
    wanted_reach,
)
from rotary.configs import as_longrope, replace_rope, to_hf_config

LLAMA_2 = str(Path(__file__).parent / "configs" / "llama-2-7b.json")
SMALL = Rotary(head_dim=16, base=500.0)


def plain(theta, length):
    """The mean of cos(m theta_i) of m = 1 .. length, term by term, in extended precision."""
    m = np.arange(1, length + 1)[:, None].astype(np.longdouble)
    return np.cos(m * np.asarray(theta, np.longdouble)).mean(axis=1)


def custom(theta):
    theta = [float(each) for each in theta]
    return Rotary(head_dim=2 * len(theta), schedule="custom", params={"inv_freq": theta})


# --- known answers ---


@pytest.mark.parametrize("base", [50.0, 500.0, 10_000.0])
def test_the_curve_of_a_base_is_found_again(base):
    ladder = base ** (-np.arange(16) / 16)
    curve = plain(ladder, 512)
    found = design(Rotary(head_dim=32), wanted_curve(curve, 512, floor=None))
    assert found.error < 1e-6
    assert np.abs(plain(found.spec.params["inv_freq"], 512) - curve).max() < 1e-5


def test_one_frequency_is_found_again():
    curve = np.cos(0.3 * np.arange(1, 65))
    found = design(Rotary(head_dim=8), wanted_curve(curve, 64, floor=None))
    np.testing.assert_allclose(found.spec.params["inv_freq"], 0.3, rtol=1e-4)


def test_a_constant_is_met_by_the_slowest_pairs_alone():
    found = design(Rotary(head_dim=8), wanted_curve(np.ones(100), 100))
    slowest = 2 * np.pi / 6400
    np.testing.assert_allclose(found.spec.params["inv_freq"], slowest, rtol=1e-9)
    error = np.sqrt(fitting.every_distance(np.ones(100), np.ones(100)).weight
                    @ (1 - np.cos(np.arange(1, 101) * slowest)) ** 2)  # fmt: skip
    assert found.error == pytest.approx(error, rel=1e-6)
    assert 0.7 * error < found.lower_bound <= error


def test_a_reach_that_a_base_has_not_is_proved():
    head = Rotary(head_dim=32)
    assert analysis.first_failure(head) == 474
    found = design(head, wanted_reach(head, 128, 1024))
    curve = plain(found.spec.params["inv_freq"], 1024)
    assert found.certificate.holds
    assert curve.min() > 0
    own = plain(inv_freq(head)[0], 128)
    assert np.abs(curve[:128] - own).max() < 1e-3


def test_at_least_so_much_and_then_a_power():
    wanted = wanted_level(0.3, 32, 256, power=1)
    found = design(Rotary(head_dim=32), wanted, starts=2)
    curve = plain(found.spec.params["inv_freq"], 256)
    assert found.certificate.holds
    assert curve[:32].min() >= 0.3
    assert curve[32:].min() >= 0
    assert found.error < 0.05 < misses(Rotary(head_dim=32), wanted)


def test_the_same_call_gives_the_same_frequencies():
    wanted = wanted_level(0.3, 20, 100, scale=30)
    assert design(SMALL, wanted, starts=1) == design(SMALL, wanted, starts=1)


def test_more_starts_are_never_worse():
    wanted = wanted_level(0.2, 10, 60, at_most=0.05)

    def judged(starts):
        found = design(SMALL, wanted, starts=starts)
        return max(0.0, 1e-7 - found.certificate.lowest), found.error

    assert judged(3) <= judged(1)


# --- the error and its lower bound ---


def test_the_error_is_the_weighted_distance_from_the_band():
    wanted = wanted_level(0.5, 3, 8, at_most=0.1)
    curve = plain(inv_freq(SMALL)[0], 8).astype(float)
    gap = [max(0.5 - c, 0) if m <= 3 else max(-c, c - 0.1, 0) for m, c in enumerate(curve, 1)]
    total = sum(g * g / m for m, g in enumerate(gap, 1)) / sum(1 / m for m in range(1, 9))
    assert misses(SMALL, wanted) == pytest.approx(math.sqrt(total), rel=1e-9)


def test_a_design_says_the_error_of_its_spec():
    for spec in (SMALL, Rotary(head_dim=32, rotary_dim=16, layout="interleaved")):
        wanted = wanted_curve(lambda m: np.exp(-m / 20), 100)
        found = design(spec, wanted, starts=1)
        assert found.error == pytest.approx(misses(found.spec, wanted), rel=1e-9)
        assert dataclasses.replace(found.spec, schedule="default", params={}) == spec


IMPOSSIBLE = {
    "a step": wanted_curve(lambda m: (m <= 10) * 1.0, 80, floor=None),
    "exp": wanted_curve(lambda m: np.exp(-m / 5), 80, floor=None),
    "below": wanted_level(0.9, 10, 80, at_most=0.1),
    "always -1": wanted_curve(-np.ones(80), 80, floor=None),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_frequencies_come_below_the_bound(name, seed):
    wanted = IMPOSSIBLE[name]
    bound = bounds(name)[0]
    assert bound > 0.01
    random = np.random.default_rng(seed)
    theta = np.exp(random.uniform(np.log(2 * np.pi / 5120), 0, random.integers(1, 200)))
    points = fitting.every_distance(wanted.lower, wanted.upper)
    few = fitting.sampled(points, 0)
    for each in (theta, fitting.polished(few, theta[:8], 2 * np.pi / 5120, 1.0)):
        assert points.error(plain(each, 80).astype(float)) >= bound


FOUND = {}


def bounds(name):
    """(lower bound, error of the measure) of a curve that no frequencies have."""
    if name not in FOUND:
        wanted, slowest = IMPOSSIBLE[name], 2 * np.pi / 5120
        points = fitting.every_distance(wanted.lower, wanted.upper)
        theta, share = fitting.nearest_measure(fitting.sampled(points, 0), slowest, 1.0)
        curve = fitting.mean_cosine(theta, 80, share)
        FOUND[name] = fitting.lower_bound(points, curve, slowest, 1.0), points.error(curve)
    return FOUND[name]


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_the_bound_is_near_what_a_measure_reaches(name):
    bound, error = bounds(name)
    assert 0.97 * error < bound <= error
    found = design(SMALL, IMPOSSIBLE[name], starts=2)
    assert found.error >= found.lower_bound > 0


def test_a_bound_from_a_bad_measure_is_lower_and_holds():
    wanted = IMPOSSIBLE["exp"]
    points = fitting.every_distance(wanted.lower, wanted.upper)
    bad = fitting.lower_bound(points, fitting.mean_cosine(np.array([0.5]), 80), 1e-3, 1.0)
    assert bad <= bounds("exp")[1]


# --- the certificate ---


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(1e-4, np.pi), min_size=1, max_size=6),
    st.integers(1, 60), st.floats(-0.9, 0.9), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_certificate_is_what_plain_sums_say(theta, length, floor, seed):
    floors = floor + 0.1 * np.random.default_rng(seed).standard_normal(length)
    above = plain(theta, length).astype(float) - floors
    found = analysis.certify(custom(theta), length, floors)
    failing = np.flatnonzero(above < 0)
    assert found.holds == (len(failing) == 0)
    assert found.first_failure == (int(failing[0]) + 1 if len(failing) else None)
    assert found.lowest == pytest.approx(above.min(), abs=1e-12)
    assert above[found.lowest_at - 1] == pytest.approx(above.min(), abs=1e-12)
    if found.holds:
        change = np.random.default_rng(seed).choice([-1.0, 1.0], len(theta))
        moved = np.array(theta) * (1 + 0.999 * found.tolerance * change)
        assert (plain(moved, length) >= floors).all()
    else:
        assert found.tolerance == 0


def test_a_certificate_of_long_rows_is_that_of_every_block():
    found = analysis.certify(Rotary(head_dim=128), 2**17)
    assert (found.holds, found.first_failure) == (False, 1707)
    assert (found.lowest_at, found.lowest) == analysis.lowest(Rotary(head_dim=128), 2**17)
    assert analysis.certify(Rotary(head_dim=128), 1706).holds


def test_what_rounding_hides_is_not_called_proved():
    found = analysis.certify(custom([np.pi / 2]), 1)
    assert (found.holds, found.first_failure, found.undecided) == (False, None, 1)


def test_channels_that_stand_still_are_counted():
    assert analysis.certify(Rotary(head_dim=64, rotary_dim=32), 10_000).holds
    assert not analysis.certify(Rotary(head_dim=64, rotary_dim=32), 10_000, 0.5).holds


# --- in configs, on the command line, in a picture ---


def test_a_design_goes_into_a_config_and_back():
    found = design(SMALL, wanted_curve(lambda m: 1 / m, 64), starts=1)
    written = as_longrope(found.spec, 64)
    read = from_hf_config(json.loads(json.dumps(to_hf_config(written, max_position_embeddings=64))))
    for length in (1, 64, 1000):
        frequencies, amplitude = inv_freq(read, length)
        np.testing.assert_allclose(frequencies, found.spec.params["inv_freq"], rtol=1e-14)
        assert amplitude == 1
    assert from_hf_config(replace_rope(LLAMA_2, as_longrope(Rotary(head_dim=128), 64), 64)) == (
        as_longrope(Rotary(head_dim=128), 64)
    )


def test_transformers_reads_these_frequencies():
    ropes = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    written = as_longrope(custom([1.0, 0.3, 0.02, 1e-4]), 256)
    keys = to_hf_config(written, max_position_embeddings=256)
    config = LlamaConfig(hidden_size=8, num_attention_heads=1, **keys)
    for length in (16, 4096):
        found, amplitude = ropes.ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
        np.testing.assert_allclose(found, [1.0, 0.3, 0.02, 1e-4], rtol=1e-6)
        assert amplitude == 1


def test_an_amplitude_is_kept_in_a_config():
    spec = dataclasses.replace(SMALL, schedule="yarn", params={
        "factor": 4.0, "original_max_position_embeddings": 64})  # fmt: skip
    written = as_longrope(spec, 256)
    np.testing.assert_allclose(inv_freq(written)[0], inv_freq(spec)[0], rtol=1e-14)
    assert inv_freq(written, 1000)[1] == inv_freq(spec)[1] > 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (custom([1.0, 0.0]), "a factor gives frequencies > 0 only, got 0"),
        (dataclasses.replace(SMALL, schedule="dynamic", params={
            "factor": 2.0, "original_max_position_embeddings": 64}), "schedule 'dynamic'"),
        (Rotary(head_dim=8, axes=(0, 0, 1, 1)), "2 axes"),
    ],
)  # fmt: skip
def test_what_a_list_of_factors_cannot_say(spec, message):
    with pytest.raises(ValueError, match=message):
        as_longrope(spec, 256)


def test_the_command_writes_what_it_prints(main, tmp_path):
    out, plot = tmp_path / "new.json", tmp_path / "new.png"
    arguments = ("design", "--length", "512", "--keep", "64", "--from", LLAMA_2, "--starts", "1")
    found = document(main(*arguments, "--out", str(out), "--plot", str(plot), "--json"))
    spec = Rotary.from_dict(found["spec"])
    assert found["certificate"]["holds"]
    assert plot.read_bytes()[:4] == b"\x89PNG"
    np.testing.assert_allclose(
        inv_freq(from_hf_config(out))[0], spec.params["inv_freq"], rtol=1e-14
    )
    assert json.loads(out.read_text())["max_position_embeddings"] == 512
    assert json.loads(out.read_text())["model_type"] == "llama"
    assert [row["method"] for row in found["methods"]][:2] == ["designed", "as it is"]
    for row in found["methods"]:
        assert row["error"] >= found["error"] - 1e-12


@pytest.mark.parametrize("length", [512, 4096])
def test_the_command_writes_for_a_model_with_a_trained_length_of_its_own(main, tmp_path, length):
    """Phi-3 was trained at 4096: another length failed, after the search."""
    config, out = Path(LLAMA_2).with_name("phi-3.5-mini.json"), tmp_path / "new.json"
    arguments = ("design", "--length", str(length), "--keep", "64", "--from", str(config))
    found = document(main(*arguments, "--starts", "1", "--out", str(out), "--json"))
    spec = Rotary.from_dict(found["spec"])
    np.testing.assert_allclose(
        inv_freq(from_hf_config(out))[0], spec.params["inv_freq"], rtol=1e-14
    )


def test_the_command_counts_what_latent_attention_does_not_rotate(main, tmp_path):
    """DeepSeek-V3 rotates 64 of 192 channels: B_m of the whole head never falls below 0."""
    config, out = tmp_path / "config.json", tmp_path / "new.json"
    config.write_text('{"model_type": "deepseek_v3", "max_position_embeddings": 4096}')
    arguments = ("design", "--length", "2048", "--keep", "256", "--from", str(config))
    found = document(main(*arguments, "--starts", "1", "--out", str(out), "--json"))
    as_it_is = found["methods"][1]
    assert (as_it_is["error"], as_it_is["first_failure"]) == (0, None)
    spec, head = Rotary.from_dict(found["spec"]), Rotary(64, layout="interleaved")
    theta = np.array(spec.params["inv_freq"])
    np.testing.assert_allclose(inv_freq(from_hf_config(out))[0], theta, rtol=1e-14)
    assert spec.head_dim == head.head_dim
    means = 64 + np.cos(np.outer(np.arange(1, 2049), theta)).sum(1)  # of 64 pairs more, which stay
    wanted = 64 + np.cos(np.outer(np.arange(1, 257), inv_freq(head)[0])).sum(1)
    np.testing.assert_allclose(means[:256], wanted, rtol=1e-6)
    np.testing.assert_allclose(found["certificate"]["lowest"], means[256:].min() / 96, rtol=1e-6)


def test_the_command_refuses_a_config_before_the_search(main, tmp_path, monkeypatch):
    monkeypatch.setattr("rotary.analysis.ladders.design", lambda *_, **__: pytest.fail("searches"))
    config, out = tmp_path / "config.json", tmp_path / "new.json"
    config.write_text('{"model_type": "ernie4_5_vl_moe_text", "max_position_embeddings": 256}')
    done = main(
        "design", "--length", "512", "--keep", "64", "--from", str(config), "--out", str(out)
    )
    assert_refused(done, "axes")
    assert not out.exists()


def test_the_command_tells_every_method(main):
    shown = main("design", "--length", "256", "--head-dim", "32", "--keep", "64").out
    assert "proved at every distance to 256" in " ".join(shown.split())
    for method in ("designed", "as it is", "ntk", "yarn", "llama3", "longrope"):
        assert re.search(rf"^ ?{method} +\S+ +(none|[\d,]+)", shown, re.MULTILINE), method


def test_the_command_reads_a_curve(main, tmp_path):
    curve = tmp_path / "curve.csv"
    curve.write_text("distance,favour\n1,1.0\n\n10,0.5\n100,0.1\n")
    arguments = ("design", "--length", "100", "--head-dim", "16", "--curve", str(curve))
    found = document(main(*arguments, "--json"))
    wanted = wanted_curve([1.0, 0.5, 0.1], 100, [1, 10, 100])
    assert found["error"] == pytest.approx(misses(Rotary.from_dict(found["spec"]), wanted))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "say what is wanted, with exactly one of --keep N"),
        ("--keep 50 --at-least 0.5", "say what is wanted, with exactly one of"),
        ("--keep 500", "--keep must be in 1 .. 100, the length, got 500"),
        ("--keep 50 --power 1", "--power cannot be given without --at-least"),
        ("--at-least 0.5", "--at-least needs --until N"),
        ("--at-least 1.5 --until 9", "--at-least is a share of B_0, in 0 .. 1; got 1.5"),
        ("--at-least 0.5 --until 9 --power 1 --scale 2", "one of --power, --scale and --at-most"),
        ("--at-least 0.5 --until 9 --power -1", "power must be > 0, got -1"),
        ("--keep 9 --longest-wavelength 3", "--longest-wavelength 3 must be longer than"),
        ("--keep 9 --starts 0", "starts must be in 1 .. 48, got 0"),
        ("--curve CURVE", "curve.csv, line 2: must be a whole distance, a comma and a number"),
        (
            f"--keep 9 --from {LLAMA_2} --base 100",
            "--head-dim and --base cannot be used with --from",
        ),
        ("--keep 9 --part text", "give --from as well"),
        ("--keep 9 --out CURVE", "the file exists; name a new one"),
    ],
)
def test_what_the_command_refuses(main, tmp_path, arguments, message):
    curve = tmp_path / "curve.csv"
    curve.write_text("1,1.0\n2,one\n")
    words = arguments.replace("CURVE", str(curve)).split()
    assert_refused(main("design", "--length", "100", *words), message)


def test_a_picture_shows_what_is_wanted_and_how_each_misses():
    head = Rotary(head_dim=32)
    wanted = wanted_reach(head, 128, 1024)
    figure = plots.design({"own": head, "larger": Rotary(head_dim=32, base=58_153.2)}, wanted)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [
        "own: misses by 0.0073, fails at 474",
        f"larger: misses by {misses(Rotary(head_dim=32, base=58_153.2), wanted):.2g}, never fails",
        "wanted",
    ]
    at, values = figure.axes[0].lines[1].get_data()
    assert values[:40] == pytest.approx(plain(inv_freq(head)[0], 40).astype(float))
    assert at[0] == 1


# --- what else there is, and what is refused ---


def test_the_alternatives_reach_the_length():
    found = alternatives(Rotary(head_dim=32), 1024, 128)
    assert list(found)[:2] == ["as it is", "base 58,153.2"]
    assert analysis.first_failure(found["base 58,153.2"], 1024) is None
    assert found["yarn"].params["factor"] == 8
    assert list(alternatives(custom([1.0]), 1024, 128)) == ["as it is"]
    assert list(alternatives(Rotary(head_dim=32), 1024)) == ["as it is", "base 58,153.2"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wanted_curve([1.0, 0.5], 8), "a curve must be 8 numbers"),
        (lambda: wanted_curve([1.0, 0.5], 8, [2, 1]), "distances must rise, got 2 before 1"),
        (lambda: wanted_curve([1.0, 0.5], 8, [0, 1]), "distances must be in 1"),
        (lambda: wanted_curve([1.0, 1.5], 8, [1, 2]), r"in -1 .. 1, got 1.5"),
        (lambda: wanted_curve([1.0, math.nan], 8, [1, 2]), r"in -1 .. 1, got nan"),
        (lambda: wanted_curve(["a", "b"], 8, [1, 2]), "a curve must be 2 numbers"),
        (lambda: wanted_curve(lambda m: m, 1), "length must be in 2 .. 262,144, got 1"),
        (lambda: wanted_level(0.5, 9, 8), "until must be in 1 .. 8, got 9"),
        (lambda: wanted_level(0.5, 3, 8, at_most=2), "at_most is a share of B_0"),
        (lambda: design(SMALL, IMPOSSIBLE["exp"], fastest=4), "fastest must be in 0 .. pi"),
        (lambda: design(SMALL, IMPOSSIBLE["exp"], seed=-1), "seed must be in 0"),
        (lambda: design(Rotary(head_dim=8, axes=(0, 0, 1, 1)), IMPOSSIBLE["exp"]), "has 2"),
        (lambda: analysis.certify(SMALL, 8, [0.0] * 7), "floor must be a number or 8 of them"),
        (lambda: analysis.certify(SMALL, 0), "length must be in 1"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
