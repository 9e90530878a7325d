"""`Rotary`: what is refused, and that a spec survives every round trip as the same spec."""

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import if_installed

import rotary
from rotary import Rotary

torch = if_installed("torch")

examples = settings(max_examples=100, deadline=None, derandomize=True)
NAN, INF = math.nan, math.inf
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}

# --- round trips ---

factors = st.floats(1, 1000) | st.integers(1, 100)
lengths = st.integers(2, 2**20)
optional = st.none() | st.floats(0.1, 10)


def lists_of(numbers, pairs: int):
    return st.lists(numbers, min_size=pairs, max_size=pairs)


def params_of(schedule: str, pairs: int):
    """Valid parameters of a schedule, given or left out."""
    trained = {"factor": factors, "original_max_position_embeddings": lengths}
    needed, extra = {
        "default": ({}, {}),
        "linear": ({"factor": factors}, {}),
        "ntk": ({"factor": factors}, {}),
        "dynamic": (trained, {}),
        "dynamic_linear": (trained, {}),
        "yarn": (
            trained,
            {
                "beta_fast": st.just(32) | st.floats(8, 64),
                "beta_slow": st.just(1.0) | st.floats(0.5, 8),
                "attention_factor": optional,
                "mscale": optional,
                "mscale_all_dim": optional,
                "truncate": st.booleans(),
            },
        ),
        "longrope": (
            {
                "short_factor": lists_of(st.floats(1, 4), pairs),
                "long_factor": lists_of(st.floats(1, 64), pairs).map(tuple),
                **trained,
            },
            {"attention_factor": optional},
        ),
        "llama3": (
            {**trained, "low_freq_factor": st.floats(0.5, 2), "high_freq_factor": st.floats(2, 8)},
            {},
        ),
        "proportional": ({"partial_rotary_factor": st.floats(0.1, 1)}, {"factor": factors}),
        "ntk_mixed": ({"factor": factors}, {"b": st.floats(0, 1)}),
        "axial": ({"num_axes": st.just(1)}, {}),
        "custom": (
            {"inv_freq": lists_of(st.just(0.0) | st.floats(1e-6, 3), pairs)},
            {"attention_factor": st.just(1) | st.floats(0.5, 2)},
        ),
    }[schedule]
    return st.fixed_dictionaries(needed, optional=extra)


@st.composite
def specs(draw) -> Rotary:
    pairs = draw(st.integers(1, 6))
    start = draw(st.integers(0, 3))
    schedule = draw(st.sampled_from(sorted(rotary.schedules.SCHEDULES)))
    order = draw(st.permutations([*range(draw(st.integers(1, pairs))), *[0] * pairs][:pairs]))
    if schedule == "axial":  # whose num_axes is 1 here, and must be that of axes
        order = [0] * pairs
    layout = st.sampled_from(["half", "interleaved"])
    return Rotary(
        head_dim=2 * pairs + start + draw(st.integers(0, 3)),
        rotary_dim=2 * pairs,
        start=start,
        base=draw(st.floats(10, 1e9) | st.integers(10, 10**9)),
        layout=draw(layout),
        out_layout=draw(st.none() | layout),
        schedule=schedule,
        params=draw(params_of(schedule, pairs)),
        axes=draw(st.sampled_from([(), tuple(order), np.array(order)])),
        sign=draw(st.sampled_from([1, -1])),
    )


@examples
@given(specs())
def test_a_spec_survives_every_round_trip(spec):
    text = spec.to_json()
    assert "\n" not in text
    copies = {
        "dict": Rotary.from_dict(spec.to_dict()),
        "json": Rotary.from_json(text),
        "json of the dict": Rotary.from_dict(json.loads(json.dumps(spec.to_dict()))),
        "pickle": pickle.loads(pickle.dumps(spec)),
        "copy": copy.copy(spec),
        "deepcopy": copy.deepcopy(spec),
        "replace": dataclasses.replace(spec),
        "repr": eval(repr(spec), {"Rotary": Rotary}),
    }
    for way, again in copies.items():
        assert again == spec, way
        assert hash(again) == hash(spec), way
        assert again.to_json() == text, way
        assert repr(again) == repr(spec), way
        assert again.num_axes == spec.num_axes, way
        assert again.depends_on_length == spec.depends_on_length, way
        np.testing.assert_array_equal(rotary.turns(again), rotary.turns(spec))


@examples
@given(specs(), specs())
def test_equal_means_equal_json(one, other):
    assert (one == other) == (one.to_dict() == other.to_dict())
    assert len({one, other, Rotary.from_dict(one.to_dict())}) == (1 if one == other else 2)


# --- equal specs are one spec ---


@pytest.mark.parametrize(
    "written",
    [
        {"rotary_dim": 64},
        {"out_layout": "half"},
        {"base": 10_000},
        {"start": 0, "sign": 1, "schedule": "default", "params": {}, "axes": ()},
        {"head_dim": np.int32(64), "rotary_dim": np.int64(64), "axes": []},
        {"axes": np.array([], np.int64)},
        {"axes": [0] * 32},  # one axis, so positions are (seq,), not (seq, 1)
    ],
)
def test_what_is_left_out_is_what_is_said(written):
    spec = Rotary(**{"head_dim": 64, **written})
    assert spec == Rotary(head_dim=64)
    assert hash(spec) == hash(Rotary(head_dim=64))
    assert repr(spec) == "Rotary(head_dim=64)"


def test_defaults_of_a_schedule_are_dropped():
    plain = Rotary(64, schedule="yarn", params=YARN)
    said = {**YARN, "beta_fast": 32, "beta_slow": 1.0, "truncate": True, "mscale": None}
    assert Rotary(64, schedule="yarn", params=said) == plain
    assert dict(Rotary(64, schedule="yarn", params=said).params) == YARN
    assert Rotary(64, schedule="yarn", params={**YARN, "truncate": False}) != plain
    swapped = dict(reversed(YARN.items()))
    assert Rotary(64, schedule="yarn", params=swapped).to_json() == plain.to_json()


def test_lists_arrays_and_tensors_of_parameters_are_one():
    values = [1.0, 0.5]
    for given_ in (values, tuple(values), np.array(values), torch.tensor(values)):
        spec = Rotary(4, schedule="custom", params={"inv_freq": given_})
        assert spec.params["inv_freq"] == (1.0, 0.5)
        assert hash(spec) == hash(Rotary(4, schedule="custom", params={"inv_freq": values}))


def test_numpy_scalars_are_numbers():
    spec = Rotary(np.int64(64), base=np.int64(10_000), start=np.uint8(0))
    assert spec == Rotary(64)
    assert Rotary(64, base=np.float32(500_000)) == Rotary(64, base=5e5)
    plain = Rotary(64, schedule="linear", params={"factor": 4.0})
    for factor in (np.float64(4), np.float32(4), np.int64(4)):
        given_ = Rotary(64, schedule="linear", params={"factor": factor})
        assert given_ == plain
        assert repr(given_).replace("4.0", "4") == repr(plain).replace("4.0", "4")
    values = Rotary(4, schedule="custom", params={"inv_freq": list(np.array([1.0, 0.5]))})
    assert repr(values).endswith("params={'inv_freq': [1.0, 0.5]})")


def test_a_spec_is_frozen():
    params = {"inv_freq": [1.0, 0.5]}
    spec = Rotary(4, schedule="custom", params=params)
    params["inv_freq"][0] = 7.0
    params["attention_factor"] = 3.0
    assert dict(spec.params) == {"inv_freq": (1.0, 0.5)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.base = 5.0
    with pytest.raises(TypeError):
        spec.params["inv_freq"] = (1.0, 1.0)


def test_repr_says_what_is_unusual():
    spec = Rotary(64, 32, layout="interleaved", schedule="linear", params={"factor": 2.0}, sign=-1)
    assert repr(spec) == (
        "Rotary(head_dim=64, rotary_dim=32, layout='interleaved', schedule='linear', "
        "params={'factor': 2.0}, sign=-1)"
    )


def test_facts_about_a_spec():
    assert Rotary(8).num_axes == 1
    assert Rotary(8, axes=(2, 0, 1, 0)).num_axes == 3
    params = {"factor": 2.0, "original_max_position_embeddings": 64}
    assert Rotary(8, schedule="dynamic", params=params).depends_on_length
    assert not Rotary(8, schedule="yarn", params=params).depends_on_length


# --- what is refused ---

FAULTS = [
    # the slice of the head
    ({"head_dim": 127}, r"rotary_dim must be even and in \(0, head_dim=127\], got 127"),
    ({"rotary_dim": 63}, r"rotary_dim must be even and in \(0, head_dim=64\], got 63"),
    ({"rotary_dim": 66}, r"rotary_dim must be even and in \(0, head_dim=64\], got 66"),
    ({"rotary_dim": 0}, r"got 0; a layer without rotation has no Rotary"),
    ({"rotary_dim": -2}, r"rotary_dim must be even and in .* got -2"),
    ({"rotary_dim": 32.0}, r"rotary_dim must be even and in .* got 32.0"),
    ({"rotary_dim": "32"}, r"rotary_dim must be even and in .* got '32'"),
    ({"rotary_dim": True}, r"rotary_dim must be even and in .* got True"),
    ({"head_dim": 0}, "head_dim must be a whole number from 1 to 65,536, got 0"),
    ({"head_dim": 1}, r"rotary_dim must be even and in \(0, head_dim=1\], got 1"),
    ({"head_dim": 65_537}, "head_dim must be a whole number from 1 to 65,536, got 65537"),
    ({"head_dim": 10**30}, "head_dim must be a whole number from 1 to 65,536, got 1000"),
    ({"head_dim": -64}, "head_dim must be a whole number from 1 to 65,536, got -64"),
    ({"head_dim": 64.0}, "head_dim must be a whole number from 1 to 65,536, got 64.0"),
    ({"head_dim": NAN}, "head_dim must be a whole number from 1 to 65,536, got nan"),
    ({"head_dim": None}, "head_dim must be a whole number from 1 to 65,536, got None"),
    ({"start": 2}, r"start must be in \[0, head_dim - rotary_dim = 0\], got 2"),
    ({"rotary_dim": 32, "start": -1}, r"start must be in \[0, .* = 32\], got -1"),
    ({"rotary_dim": 32, "start": 0.5}, r"start must be in \[0, .* = 32\], got 0.5"),
    # the base
    ({"base": 0}, "base must be finite and >= 1, got 0"),
    ({"base": -1e4}, "base must be finite and >= 1, got -10000.0"),
    ({"base": 0.5}, "base must be finite and >= 1, got 0.5"),
    ({"base": NAN}, "base must be finite and >= 1, got nan"),
    ({"base": INF}, "base must be finite and >= 1, got inf"),
    ({"base": "1e4"}, "base must be a number, got '1e4'"),
    ({"base": True}, "base must be a number, got True"),
    ({"base": None}, "base must be a number, got None"),
    ({"base": 1e308}, r"base 1e\+308 is too large: the slowest pair turns"),
    ({"base": 10**400}, r"base must be"),
    # names
    ({"layout": "neox"}, "layout must be 'half' or 'interleaved', got 'neox', which is 'half'"),
    ({"layout": "haf"}, "layout must be 'half' or 'interleaved', got 'haf'"),
    ({"out_layout": "interleave"}, "out_layout must be .*'interleave', which is 'interleaved'"),
    ({"schedule": "yarm"}, r"schedule must be one of default, .*yarn.*got 'yarm'; did you mean"),
    ({"schedule": None}, "schedule must be one of default, .*got None"),
    ({"schedule": ["default"]}, "schedule must be one of default"),
    ({"sign": 0}, r"sign must be \+1 or -1, got 0"),
    ({"sign": 1.0}, r"sign must be \+1 or -1, got 1.0"),
    ({"sign": True}, r"sign must be \+1 or -1, got True"),
    # parameters
    ({"params": {"factor": 2.0}}, "schedule 'default' has no parameter 'factor'; .*: none"),
    ({"params": [("factor", 2)]}, "params must be a mapping of names to values"),
    ({"schedule": "linear"}, "schedule 'linear' needs parameter 'factor'"),
    ({"schedule": "linear", "params": {"factr": 2.0}},
     "has no parameter 'factr'; did you mean 'factor'.; its parameters: factor"),
    ({"schedule": "dynamic", "params": {**YARN, "seq_len": 5}}, "has no parameter 'seq_len'"),
    ({"schedule": "yarn", "params": {**YARN, "beta_fst": 3}}, "did you mean 'beta_fast'"),
    ({"schedule": "linear", "params": {"factor": None}}, "factor must be a number, got None"),
    ({"schedule": "linear", "params": {"factor": object}}, "parameter 'factor' must be a number"),
    ({"schedule": "linear", "params": {"factor": [2.0]}}, r"factor must be a number, got \(2.0,\)"),
    ({"schedule": "custom", "params": {"inv_freq": 1.0}}, "inv_freq"),
    # axes
    ({"axes": (0, 1)}, "axes must name one axis per pair: rotary_dim / 2 = 32, got 2"),
    ({"axes": (0,) * 31 + (2,)}, "axes must be whole numbers from 0 without a gap"),
    ({"axes": (1,) * 32}, "axes must be whole numbers from 0 without a gap"),
    ({"axes": (0,) * 31 + (-1,)}, "axes must be whole numbers from 0 without a gap"),
    ({"axes": (0.0,) * 32}, "axes must be whole numbers from 0 without a gap"),
    ({"axes": (False,) * 32}, "axes must be whole numbers from 0 without a gap"),
    ({"axes": ("0",) * 32}, "axes must be whole numbers from 0 without a gap"),
    ({"axes": 3}, "axes must"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), FAULTS)
def test_a_spec_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Rotary(**{"head_dim": 64, **fields})


def test_the_widest_head_is_taken():
    assert Rotary(65_536).rotary_dim == 65_536


def test_sections_that_do_not_add_up_are_refused():
    counts = rotary.positions.sections(16, 24, 20)  # a head of 128 has 64 pairs, these are 60
    with pytest.raises(ValueError, match="rotary_dim / 2 = 64, got 60"):
        Rotary(128, axes=counts)


def test_base_1_is_pointed_out():
    with pytest.warns(UserWarning, match="base 1 gives every pair the same frequency"):
        spec = Rotary(8, base=1)
    assert rotary.inv_freq(spec)[0].tolist() == [1.0] * 4


def test_the_slowest_frequency_that_can_be_held():
    smallest = 2 * math.pi * 2.0**-65
    kept = Rotary(2, schedule="custom", params={"inv_freq": [smallest * 1.01]})
    assert rotary.turns(kept).tolist() == [1]
    with pytest.raises(ValueError, match=r"less than 1\.7e-19, the least that 64 bits can hold"):
        Rotary(2, schedule="custom", params={"inv_freq": [smallest * 0.99]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"head_dim": 4, "rotary_dims": 4}, "unknown field 'rotary_dims'; did you mean 'rotary_di"),
        ({"head_dim": 4, "theta": 1e4}, "unknown field 'theta'; known: head_dim, .*, sign"),
        ({"base": 1e4}, "field 'head_dim' is missing"),
        ({}, "field 'head_dim' is missing"),
    ],
)
def test_dicts_that_are_no_spec(data, message):
    with pytest.raises(ValueError, match=message):
        Rotary.from_dict(data)
    with pytest.raises(ValueError, match=message):
        Rotary.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "3", '{"head_dim": 4', '{"head_dim": NaN}', "null"])
def test_texts_that_are_no_spec(text):
    with pytest.raises(ValueError, match=r"^a spec(:| is not JSON)"):
        Rotary.from_json(text)


def test_a_list_of_fields_is_no_spec():
    with pytest.raises(ValueError, match=r"must be a JSON object, got \[\('head_dim', 4\)"):
        Rotary.from_dict([("head_dim", 4)])
