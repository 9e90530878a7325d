"""An array library and a schedule that nobody knows, added in the places that the docs name."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest

import rotary
from rotary import kernels, schedules
from rotary.configs import hf
from rotary.kernels import numpy as reference

SPEC = rotary.Rotary(head_dim=8, base=500.0)


class Array:
    """An array of a library that is only a wrapper, as the first kernel of a new one would be."""

    def __init__(self, values):
        self.values = np.asarray(values)

    @property
    def shape(self):
        return self.values.shape

    @property
    def dtype(self):
        return self.values.dtype

    def reshape(self, *shape):
        return Array(self.values.reshape(*shape))


def plain(value):
    return value.values if isinstance(value, Array) else value


def wrapped(function):
    """A function of NumPy arrays for those of the new library."""

    def call(*arguments):
        taken = [
            tuple(map(plain, each)) if type(each) is tuple else plain(each) for each in arguments
        ]
        result = function(*taken)
        return tuple(map(Array, result)) if isinstance(result, tuple) else Array(result)

    return call


KERNEL = kernels.Kernel(
    name="toy",
    namespace="toy",
    rotate=wrapped(reference.rotate),
    tables=wrapped(reference.tables),
    tables_float64=wrapped(reference.tables_float64),
    tables_float32=wrapped(reference.tables_float32),
    arithmetic=reference.FLOAT32,
    takes=lambda array: isinstance(array, Array),
    inspect=lambda positions: reference.inspect(positions.values),
    row_lengths=lambda positions: reference.row_lengths(positions.values),
    arange=lambda like, count: Array(np.arange(count)),
    as_positions=lambda positions, like: Array(plain(positions)),
    to_numpy=lambda positions: None,
    from_numpy=Array,
    host_constant=reference.host_constant,
    device_key=lambda like: None,
)


@pytest.fixture
def toy(monkeypatch):
    """One file with a kernel, one entry in KERNELS."""
    library = ModuleType("toy")
    library.Array = Array
    monkeypatch.setitem(sys.modules, "toy", library)
    monkeypatch.setitem(kernels.KERNELS, "toy.Array", lambda: KERNEL)
    yield
    kernels.kernels_by_type.pop(Array, None)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_a_new_array_library_is_a_kernel_and_an_entry(precision):
    q = np.random.default_rng(0).standard_normal((1, 2, 5, 8)).astype(np.float32)
    positions = np.arange(5) + 3
    got = rotary.apply(SPEC, Array(q), positions=Array(positions), precision=precision)
    want = rotary.apply(SPEC, q, positions=positions, precision=precision)
    assert isinstance(got, Array)
    np.testing.assert_allclose(got.values, want, rtol=0, atol=3e-7)
    cos, sin = rotary.cos_sin(SPEC, Array(positions))
    back = rotary.rotate(rotary.rotate(Array(q), cos, sin, SPEC), cos, sin, SPEC, conjugate=True)
    np.testing.assert_allclose(back.values, q, rtol=0, atol=1e-6)


def test_without_the_entry_it_is_refused():
    with pytest.raises(TypeError, match="Array; array libraries known"):
        rotary.apply(SPEC, Array(np.ones((3, 8), np.float32)))


def halved(rotary_dim, base, arithmetic=schedules.FLOAT64, *, divisor):
    """A schedule as one of `schedules.py`: its keyword arguments are its parameters."""
    frequencies, factor = schedules.default(rotary_dim, base, arithmetic)
    return frequencies / divisor, factor


def test_a_new_schedule_is_a_function_and_an_entry(monkeypatch, tmp_path):
    monkeypatch.setitem(schedules.SCHEDULES, "halved", halved)
    monkeypatch.setattr(hf, "TYPES", (*hf.TYPES, "halved"))  # the name that configs give it
    spec = rotary.Rotary(head_dim=8, base=500.0, schedule="halved", params={"divisor": 2.0})
    np.testing.assert_array_equal(rotary.inv_freq(spec)[0], rotary.inv_freq(SPEC)[0] / 2)
    assert rotary.Rotary.from_json(spec.to_json()) == spec
    x = np.ones((3, 8), np.float32)
    wanted = rotary.apply(SPEC, x, positions=np.array([0.0, 0.5, 1.0]))
    np.testing.assert_allclose(rotary.apply(spec, x), wanted, rtol=0, atol=3e-7)
    with pytest.raises(ValueError, match="divisor"):
        rotary.Rotary(head_dim=8, schedule="halved", params={"factor": 2.0})
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 1,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "halved", "divisor": 2.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert rotary.from_hf_config(tmp_path) == spec
