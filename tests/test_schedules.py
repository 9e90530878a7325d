"""Every schedule against a value somebody else computed. One table of cases drives every test."""

import inspect
import math
import re
from typing import Any, NamedTuple

import mpmath
import numpy as np
import pytest
from libraries import if_installed, of_transformers

import rotary
from rotary import Rotary, positions
from rotary.kernels import numpy as reference
from rotary.schedules import FLOAT64, SCHEDULES, depends_on_length, parameters

torch = if_installed("torch")
FLOAT32 = if_installed("rotary.kernels.torch.angles").FLOAT32

D = 64
TRAINED = 2048
LENGTHS = (None, TRAINED, TRAINED + 1, 2 * TRAINED, 4 * TRAINED)
SHORT = np.linspace(1.0, 3.0, D // 2).tolist()
LONG = np.geomspace(1.0, 40.0, D // 2).tolist()
# float32 exponents are off by 2^-24, which base 1e6 magnifies by ln(1e6) = 14
FLOAT32_RTOL = 32 * 2.0**-24


class Case(NamedTuple):
    """One call of a schedule, and how its frequencies run along the pairs."""

    schedule: str
    params: dict[str, Any] = {}  # noqa: RUF012  # never written to
    base: float = 10_000.0
    is_falling: bool = True

    def __str__(self) -> str:
        shown = {name: value for name, value in self.params.items() if not isinstance(value, list)}
        return f"{self.schedule}-{self.base:g}-{shown}"

    def spec(self, rotary_dim: int = D) -> Rotary:
        params = fitted(self.params, rotary_dim)
        # axial: what each axis drives says nothing of frequencies
        count = params.get("num_axes", len(params.get("widths", [0])))
        axes = np.arange(rotary_dim // 2) % count if count > 1 else ()
        return Rotary(rotary_dim, base=self.base, schedule=self.schedule, params=params, axes=axes)

    def call(self, arithmetic: Any = FLOAT64, seq_len: int | None = None, rotary_dim: int = D):
        extra = {"seq_len": seq_len} if depends_on_length(self.schedule) else {}
        params = fitted(self.params, rotary_dim)
        return SCHEDULES[self.schedule](rotary_dim, self.base, arithmetic, **params, **extra)


def fitted(params: dict[str, Any], rotary_dim: int) -> dict[str, Any]:
    """The same parameters for a narrower head: shorter lists, and one axis where there is one pair.

    Only what the table of cases holds; it is not a rule of the package.
    """
    if "widths" in params:
        return {"widths": params["widths"] if rotary_dim == D else [rotary_dim]}
    cut = {k: v[: rotary_dim // 2] if isinstance(v, list) else v for k, v in params.items()}
    return {**cut, "num_axes": 1} if "num_axes" in cut and rotary_dim == 2 else cut


def trained(length: int = TRAINED, **params: Any) -> dict[str, Any]:
    return {"original_max_position_embeddings": length, **params}


def yarn(length: int = 4096, factor: float = 8.0, **params: Any) -> dict[str, Any]:
    return trained(length, factor=factor, **params)


def longrope(**params: Any) -> dict[str, Any]:
    return trained() | {"short_factor": SHORT, "long_factor": LONG, **params}


def llama3(factor: float = 8.0, low: float = 1.0, high: float = 4.0) -> dict[str, Any]:
    return trained(8192, factor=factor, low_freq_factor=low, high_freq_factor=high)


CASES = [
    Case("default"),
    Case("default", base=1e6),
    Case("linear", {"factor": 4.0}),
    Case("linear", {"factor": 3}),
    Case("ntk", {"factor": 8.0}),
    Case("ntk", {"factor": 1.0}, 5e5),
    Case("dynamic", trained(factor=4.0)),
    Case("dynamic", trained(factor=1.0)),
    Case("dynamic", trained(factor=2.5), 1e6),
    Case("dynamic_linear", trained(factor=1.0)),
    Case("dynamic_linear", trained(factor=2.5), 1e6),
    Case("yarn", yarn()),
    Case("yarn", yarn(4096, 1.0)),
    Case("yarn", yarn(beta_fast=16.0, beta_slow=2.0)),
    Case("yarn", yarn(beta_fast=8, beta_slow=8, truncate=False)),  # an empty ramp
    Case("yarn", yarn(attention_factor=0.75)),
    Case("yarn", yarn(mscale=0.707)),
    Case("yarn", yarn(mscale_all_dim=0.707)),
    Case("yarn", yarn(mscale=0.0, mscale_all_dim=1.0)),
    Case("yarn", yarn(mscale=0.707, mscale_all_dim=0.707)),
    Case("yarn", yarn(mscale=1.2, mscale_all_dim=0.4)),
    Case("yarn", yarn(attention_factor=1.1, mscale=1.2, mscale_all_dim=0.4)),
    Case("yarn", yarn(4096, 40.0, mscale=1.0, mscale_all_dim=1.0)),  # DeepSeek-V3
    Case("yarn", yarn(4096, 32.0, truncate=False), 150_000.0),  # gpt-oss
    Case("yarn", yarn(32_768, 4.0), 1e6),  # Qwen
    Case("yarn", yarn(16, 4.0)),  # a ramp that starts below the first pair
    Case("yarn", yarn(beta_fast=512.0), 10.0),  # a ramp that would end behind the last pair
    Case("longrope", longrope(factor=32.0), is_falling=False),
    Case("longrope", longrope(factor=1.0), is_falling=False),
    Case("longrope", longrope(attention_factor=1.25), is_falling=False),
    Case("longrope", longrope(factor=32.0, attention_factor=1.25), is_falling=False),
    Case("longrope", longrope(short_mscale=1.1, long_mscale=1.3), is_falling=False),
    Case("llama3", llama3(), 5e5),
    Case("llama3", llama3(32.0), 5e5),  # Llama 3.2
    Case("llama3", llama3(16.0, 1.0, 1.0), 5e5),  # Llama 4 Scout: a step
    Case("llama3", llama3()),
    Case("llama3", llama3(8.0, 0.5, 900.0)),
    Case("proportional", {"partial_rotary_factor": 0.25}, 1e6),  # Gemma 4
    Case("proportional", {"partial_rotary_factor": 1.0, "factor": 8.0}),
    Case("proportional", {"partial_rotary_factor": 0.3, "factor": 2.0}),
    Case("ntk_mixed", {"factor": 8.0}),
    Case("ntk_mixed", {"factor": 16.0, "b": 0.0}),
    Case("ntk_mixed", {"factor": 16.0, "b": 1.0}),
    Case("axial", {"num_axes": 2}, 100.0, is_falling=False),
    Case("axial", {"num_axes": 1}),
    Case("axial", {"num_axes": 2, "ladder": "turns"}, 100.0, is_falling=False),
    Case("axial", {"num_axes": 2, "ladder": "dealt"}, 100.0, is_falling=False),
    Case("axial", {"widths": [D // 4, D // 4, D // 2]}, 100.0, is_falling=False),
    Case("custom", {"inv_freq": [0.5] + 31 * [-1e-3], "attention_factor": 1.5}, is_falling=False),
]
TRANSFORMERS = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
theirs_too = [c for c in CASES if c.schedule in TRANSFORMERS and "short_mscale" not in c.params]
at_length = [(c, n) for c in CASES for n in (LENGTHS if depends_on_length(c.schedule) else (None,))]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def config_of(case: Case, rotary_dim: int = D) -> Any:
    """The LlamaConfig that asks transformers for the same frequencies."""
    llama = of_transformers("transformers").LlamaConfig
    params = fitted(case.params, rotary_dim)
    return llama(
        hidden_size=4 * rotary_dim,
        num_attention_heads=4,
        head_dim=rotary_dim,
        max_position_embeddings=params.get("original_max_position_embeddings", TRAINED),
        rope_parameters={"rope_type": case.schedule, "rope_theta": case.base, **params},
    )


def theirs(case: Case, seq_len: int | None = None, rotary_dim: int = D) -> tuple[np.ndarray, float]:
    """What transformers computes; a length is a tensor there, as in its forward."""
    rope_utils = of_transformers("transformers.modeling_rope_utils")

    length = None if seq_len is None else torch.tensor(seq_len)
    config = config_of(case, rotary_dim)
    inv_freq, factor = rope_utils.ROPE_INIT_FUNCTIONS[case.schedule](config, seq_len=length)
    return inv_freq.numpy(), factor


def test_every_schedule_has_a_case():
    assert {case.schedule for case in CASES} == set(SCHEDULES)
    tried = {name for case in CASES for name in case.params}
    assert tried == {name for schedule in SCHEDULES for name in parameters(schedule)}


# --- independent values ---


@pytest.mark.parametrize(("case", "seq_len"), [p for p in at_length if p[0] in theirs_too], ids=str)
def test_frequencies_are_those_of_transformers(case, seq_len):
    wanted, factor = theirs(case, seq_len)
    inv_freq, ours = case.call(FLOAT64, seq_len)
    np.testing.assert_allclose(inv_freq, wanted, rtol=FLOAT32_RTOL, atol=0)
    assert ours == pytest.approx(factor, rel=4 * 2.0**-52)
    single, _ = case.call(FLOAT32, seq_len)
    assert single.dtype == np.float32
    np.testing.assert_array_equal(single, wanted)


@pytest.mark.parametrize("first", [0, TRAINED - 64, 2 * TRAINED - 64, 4 * TRAINED, 131_008])
@pytest.mark.parametrize("case", theirs_too, ids=str)
def test_tables_are_those_of_transformers(case, first):
    modeling = of_transformers("transformers.models.llama.modeling_llama")
    ids = torch.arange(first, first + 64)[None]
    cos, sin = modeling.LlamaRotaryEmbedding(config_of(case))(torch.empty(0), ids)
    ours = rotary.cos_sin(case.spec(), ids, "float32")
    assert torch.equal(ours[0], cos[..., : D // 2])
    assert torch.equal(ours[1], sin[..., : D // 2])


@pytest.mark.parametrize("case", [c for c in CASES if c.schedule in ("default", "ntk")], ids=str)
def test_ntk_is_that_of_rotary_embedding_torch(case):
    peer = pytest.importorskip("rotary_embedding_torch").RotaryEmbedding(
        dim=D, theta=case.base, theta_rescale_factor=case.params.get("factor", 1.0)
    )
    np.testing.assert_allclose(case.call()[0], peer.freqs.detach().numpy(), rtol=FLOAT32_RTOL)


@pytest.mark.parametrize("arithmetic", [FLOAT64, reference.FLOAT32], ids=["float64", "float32"])
def test_ntk_is_dynamic_ntk_in_a_row_of_that_length(arithmetic):
    """Its growth factor n / L - (factor - 1) is 4 for factor 3 and n = 2 L, in the same bits."""
    longer = trained(factor=3, seq_len=2 * TRAINED)
    dynamic = SCHEDULES["dynamic"](D, 1e4, arithmetic, **longer)[0]
    np.testing.assert_array_equal(SCHEDULES["ntk"](D, 1e4, arithmetic, factor=4)[0], dynamic)


@pytest.mark.parametrize("case", [c for c in CASES if c.schedule == "ntk_mixed"], ids=str)
def test_ntk_mixed_is_the_formula_of_kexue_9706(case):
    factor, b = case.params["factor"], case.params.get("b", 0.625)
    with mpmath.workdps(40):
        a = mpmath.log(factor) / mpmath.mpf(D // 2) ** b
        wanted = [
            mpmath.mpf(case.base) ** (mpmath.mpf(-2 * (m - 1)) / D)
            / mpmath.exp(a * mpmath.mpf(m) ** b)
            for m in range(1, D // 2 + 1)
        ]
    np.testing.assert_allclose(case.call()[0], np.array(wanted, float), rtol=1e-14)
    assert case.call()[0][-1] == pytest.approx(Case("default").call()[0][-1] / factor, rel=1e-14)


def test_axial_is_one_ladder_per_axis():
    spec = Rotary(8, base=100.0, schedule="axial", params={"num_axes": 2},
                  axes=positions.sections(2, 2))  # fmt: skip
    cos, sin = rotary.cos_sin(spec, positions.grid_2d(3, 5))
    for patch in range(15):
        row, column = divmod(patch, 5)
        angles = [row * 1.0, row * 0.1, column * 1.0, column * 0.1]  # 100^(-2/4) = 0.1
        np.testing.assert_allclose(cos[patch], np.cos(angles), atol=2.0**-24)
        np.testing.assert_allclose(sin[patch], np.sin(angles), atol=2.0**-24)


def test_dynamic_steps_at_the_trained_length():
    case = Case("dynamic", trained(factor=4.0))
    plain = Case("default").call()[0]
    np.testing.assert_array_equal(case.call(seq_len=TRAINED)[0], plain)
    with mpmath.workdps(40):
        base = mpmath.mpf(10_000) * mpmath.mpf(4 * 2 - 3) ** (mpmath.mpf(D) / (D - 2))
        wanted = [float(base ** (mpmath.mpf(-2 * i) / D)) for i in range(D // 2)]
    np.testing.assert_allclose(case.call(seq_len=2 * TRAINED)[0], wanted, rtol=1e-14)


@pytest.mark.parametrize("factor", [1.0, 2.0, 3])
def test_dynamic_linear_is_the_branch_of_transformer_engine(factor):
    plain = Case("default").call()[0]
    case = Case("dynamic_linear", trained(factor=factor))
    for seq_len in (None, 1, *LENGTHS[1:], int(TRAINED * factor), int(TRAINED * factor) + 1):
        # the positions of a row, as TransformerEngine 2.20 scales them
        if seq_len is not None and seq_len > TRAINED * factor:
            scale = 1 / (seq_len / TRAINED)
        else:
            scale = 1 / factor
        np.testing.assert_allclose(case.call(seq_len=seq_len)[0], plain * scale, rtol=4 * 2.0**-52)
    last = case.call(seq_len=10 * TRAINED)[0] * (10 * TRAINED)
    np.testing.assert_allclose(last, plain * TRAINED, rtol=1e-15)  # the end of a row: trained


def test_longrope_takes_the_list_and_the_amplitude_of_the_length():
    plain = Case("default").call()[0]
    case = Case("longrope", longrope(short_mscale=1.1, long_mscale=1.3))
    for seq_len, divisors, amplitude in ((None, SHORT, 1.1), (TRAINED, SHORT, 1.1),
                                         (TRAINED + 1, LONG, 1.3)):  # fmt: skip
        inv_freq, factor = case.call(seq_len=seq_len)
        np.testing.assert_allclose(inv_freq, plain / divisors, rtol=4 * 2.0**-52)
        assert factor == amplitude


# --- what every schedule has in common ---


@every_case
def test_a_schedule_is_pure_and_its_spec_returns_it(case):
    inv_freq, factor = case.call()
    assert inv_freq.shape == (D // 2,)
    assert inv_freq.dtype == np.float64
    assert type(factor) is float
    np.testing.assert_array_equal(case.call()[0], inv_freq)
    ours, ours_factor = rotary.inv_freq(case.spec())
    np.testing.assert_array_equal(ours, inv_freq)
    assert ours_factor == factor
    assert not ours.flags.writeable


@pytest.mark.parametrize(("case", "seq_len"), at_length, ids=str)
def test_only_yarn_longrope_and_custom_scale_the_scores(case, seq_len):
    if case.schedule not in ("yarn", "longrope", "custom"):
        assert case.call(seq_len=seq_len)[1] == 1.0


@pytest.mark.parametrize(("case", "seq_len"), at_length, ids=str)
def test_frequencies_fall_and_scaling_never_speeds_a_pair_up(case, seq_len):
    inv_freq, factor = case.call(seq_len=seq_len)
    assert np.isfinite(inv_freq).all()
    assert factor > 0
    if case.is_falling:
        assert (np.diff(inv_freq) <= 0).all()
    if case.schedule not in ("custom", "axial"):
        plain = Case("default", base=case.base).call()[0]
        assert (inv_freq <= plain * (1 + 8 * 2.0**-52)).all()
        assert (inv_freq >= 0).all()


@pytest.mark.parametrize("arithmetic", [reference.FLOAT32, FLOAT32], ids=["numpy", "torch"])
@every_case
def test_float32_is_the_same_formula(case, arithmetic):
    for seq_len in LENGTHS:
        single, factor = case.call(arithmetic, seq_len)
        double, same_factor = case.call(FLOAT64, seq_len)
        assert single.dtype == np.float32
        assert factor == same_factor
        np.testing.assert_allclose(single, double, rtol=FLOAT32_RTOL, atol=0)


@every_case
def test_one_pair_is_enough(case):
    inv_freq, _ = case.call(seq_len=4 * TRAINED, rotary_dim=2)
    if case.schedule in ("default", "ntk", "dynamic", "axial"):  # base^0 under every base
        wanted = 1.0
    elif case.schedule == "dynamic_linear":
        wanted = 1 / max(4.0, case.params["factor"])
    elif case.schedule in TRANSFORMERS and "short_mscale" not in case.params:
        wanted = theirs(case, 4 * TRAINED, rotary_dim=2)[0][0]
    else:
        divisors = {"ntk_mixed": "factor", "longrope": "long_factor"}
        value = fitted(case.params, 2)[divisors.get(case.schedule, "inv_freq")]
        value = value[0] if isinstance(value, list) else value
        wanted = value if case.schedule == "custom" else 1 / value
    assert inv_freq.tolist() == pytest.approx([wanted], rel=FLOAT32_RTOL)
    cos, _ = rotary.cos_sin(case.spec(2), np.array([1]))
    assert cos.shape == (1, 1)


@every_case
def test_needed_parameters_are_needed(case):
    given = dict(case.params)
    for name, parameter in parameters(case.schedule).items():
        if parameter.default is inspect.Parameter.empty:
            rest = {key: value for key, value in given.items() if key != name}
            with pytest.raises(ValueError, match=f"{case.schedule}' needs parameter '{name}'"):
                Rotary(D, base=case.base, schedule=case.schedule, params=rest)


# --- parameters that make no sense ---

NAN, INF = math.nan, math.inf
SCALED = [c for c in CASES if "factor" in c.params]
ROWS_FIRST = re.escape("needs axes, the position axis that drives each pair (models differ in "
                       "which comes first): axes=[0] * 16 + [1] * 16")  # fmt: skip
IN_TURN = re.escape("axes=[0, 1] * 16")
FAULTS = [
    ("axial", {"num_axes": 2}, ROWS_FIRST),
    ("axial", {"num_axes": 2, "ladder": "dealt"}, ROWS_FIRST),
    ("axial", {"num_axes": 2, "ladder": "turns"}, IN_TURN),
    ("yarn", yarn(beta_fast=1.0, beta_slow=32.0), r"beta_fast must be >= beta_slow, got 1.0 < 32"),
    ("yarn", yarn(beta_fast=0), r"beta_fast must be finite and > 0, got 0"),
    ("yarn", yarn(beta_slow=-1.0), r"beta_slow must be finite and > 0, got -1.0"),
    ("yarn", yarn(beta_fast=NAN), r"beta_fast must be finite and > 0, got nan"),
    ("yarn", yarn(truncate=0), r"truncate must be true or false, got 0"),
    ("yarn", yarn(attention_factor=0.0), r"attention_factor must be finite and > 0, got 0.0"),
    ("yarn", yarn(attention_factor=NAN), r"attention_factor must be finite and > 0, got nan"),
    ("yarn", yarn(mscale="1", mscale_all_dim=1.0), r"mscale"),
    ("yarn", yarn(mscale="1"), r"mscale"),
    ("yarn", yarn(mscale=NAN), r"mscale"),
    ("yarn", yarn(mscale_all_dim=INF), r"mscale_all_dim"),
    ("yarn", yarn(truncate=1), r"truncate must be true or false, got 1"),
    ("yarn", yarn(beta_slow=True), r"beta_slow must be a number, got True"),
    ("yarn", trained(True, factor=2.0), r"original_max_position_embeddings must be .* got True"),
    ("dynamic", trained(1, factor=2.0), r"original_max_position_embeddings must be .* >= 2, got 1"),
    ("longrope", longrope(original_max_position_embeddings=1, factor=2.0),
     r"original_max_position_embeddings must be .* >= 2, got 1"),
    ("dynamic_linear", trained(1, factor=2.0), r"original_max_position_embeddings must be .* >= 2"),
    ("llama3", llama3() | trained(1), r"original_max_position_embeddings must be .* >= 2, got 1"),
    ("dynamic", trained(2048.0, factor=2.0), r"must be a whole number of tokens >= 2, got 2048.0"),
    ("dynamic", trained(factor=2**53 + 2), r"factor must be <= 2\^53: 90\d* - 1 is rounded to an"),
    ("linear", {"factor": 1e39}, r"factor must be in the range of float32, 1.2e-38 to 3.4e38"),
    ("linear", {"factor": 1e-39}, r"factor must be in the range of float32, 1.2e-38 to 3.4e38"),
    ("longrope", trained(short_factor=SHORT[:-1], long_factor=LONG, factor=2.0),
     r"short_factor must have rotary_dim / 2 = 32 values, got 31"),
    ("longrope", trained(short_factor=SHORT, long_factor=[0.0, *LONG[1:]], factor=2.0),
     r"long_factor\[0\] must be finite and > 0, got 0.0"),
    ("longrope", trained(short_factor=[*SHORT[:-1], NAN], long_factor=LONG, factor=2.0),
     r"short_factor\[31\] must be finite and > 0, got nan"),
    ("longrope", longrope(), r"longrope needs factor, attention_factor, or short_mscale"),
    ("longrope", longrope(short_mscale=1.0), r"short_mscale and long_mscale must be given togeth"),
    ("longrope", longrope(short_mscale=1.0, long_mscale=1.0, attention_factor=1.1), r"not both"),
    ("longrope", longrope(short_mscale=0.0, long_mscale=1.0), r"short_mscale must be .* got 0.0"),
    ("llama3", llama3(8.0, 4.0, 1.0), r"high_freq_factor must be >= low_freq_factor, got 1.0 < 4"),
    ("llama3", llama3(8.0, 0.0, 1.0), r"low_freq_factor must be finite and > 0, got 0.0"),
    ("llama3", llama3(8.0, 1.0, INF), r"high_freq_factor must be finite and > 0, got inf"),
    ("proportional", {"partial_rotary_factor": 0}, r"partial_rotary_factor must be .* > 0, got 0"),
    ("proportional", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor must be .* got 1.5"),
    ("proportional", {"partial_rotary_factor": NAN}, r"partial_rotary_factor must be .* got nan"),
    ("ntk_mixed", {"factor": 2.0, "b": 1.5}, r"b must be in \[0, 1\], got 1.5"),
    ("ntk_mixed", {"factor": 2.0, "b": NAN}, r"b must be in \[0, 1\], got nan"),
    ("axial", {"num_axes": 3}, r"rotary_dim must be a multiple of 2 num_axes = 6, got 64"),
    ("axial", {"num_axes": 2, "ladder": "steps"}, r'ladder must be "blocks", "turns" or "dealt"'),
    ("axial", {"num_axes": 0}, r"num_axes must be a whole number >= 1, got 0"),
    ("axial", {"num_axes": 2.0}, r"num_axes must be a whole number >= 1, got 2.0"),
    ("custom", {"inv_freq": [1.0]}, r"inv_freq must have rotary_dim / 2 = 32 values, got 1"),
    ("custom", {"inv_freq": 32 * [INF]}, r"inv_freq must hold finite numbers only"),
    ("custom", {"inv_freq": 32 * ["1"]}, r"inv_freq must hold finite numbers only"),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "params"), [
    ("linear", {"factor": 1}),
    ("dynamic", trained(2, factor=2.0)),
    ("dynamic", trained(factor=2**53)),
    ("yarn", yarn(beta_fast=4.0, beta_slow=4.0)),
    ("yarn", yarn(mscale=0, mscale_all_dim=0)),
    ("llama3", llama3(8.0, 2.0, 2.0)),
    ("proportional", {"partial_rotary_factor": 1}),
    ("ntk_mixed", {"factor": 2.0, "b": 0}),
    ("ntk_mixed", {"factor": 2.0, "b": 1}),
    ("axial", {"num_axes": 1}),
])  # fmt: skip
def test_the_ends_of_what_is_allowed_are_taken(schedule, params):
    assert Rotary(D, schedule=schedule, params=params).schedule == schedule


@pytest.mark.parametrize(("schedule", "params", "message"), FAULTS)
def test_parameters_that_make_no_sense_are_refused(schedule, params, message):
    with pytest.raises(ValueError, match=message):
        Rotary(D, schedule=schedule, params=params)


@pytest.mark.parametrize(
    ("count", "axes"), [(2, [0, 1, 2, 0]), (1, [0, 1, 0, 1]), (4, [0, 0, 1, 1])]
)
def test_axes_in_another_number_than_axial_has_are_refused(count, axes):
    named = max(axes) + 1
    said = f"axes name {named} position axes, but schedule 'axial' has num_axes {count}"
    with pytest.raises(ValueError, match=said):
        Rotary(8, schedule="axial", params={"num_axes": count}, axes=axes)


def test_the_axes_that_the_refusal_shows_are_taken():
    blocks = Rotary(64, schedule="axial", params={"num_axes": 2}, axes=[0] * 16 + [1] * 16)
    in_turn = {"num_axes": 2, "ladder": "turns"}
    turns = Rotary(64, schedule="axial", params=in_turn, axes=[0, 1] * 16)
    for spec in (blocks, turns):
        assert Rotary.from_json(spec.to_json()) == spec
        by_axis = np.stack([rotary.inv_freq(spec)[0][np.array(spec.axes) == a] for a in (0, 1)])
        np.testing.assert_array_equal(by_axis[0], by_axis[1])


@pytest.mark.parametrize("value", [0, -2.0, NAN, INF, "4", True])
@pytest.mark.parametrize("case", SCALED, ids=str)
def test_factors_that_make_no_sense_are_refused(case, value):
    with pytest.raises(ValueError, match=f"factor must be .*, got {value!r}"):
        Rotary(D, base=case.base, schedule=case.schedule, params={**case.params, "factor": value})


@pytest.mark.parametrize("schedule", sorted({case.schedule for case in SCALED}))
def test_a_factor_below_one_is_pointed_out(schedule):
    params = next(case.params for case in SCALED if case.schedule == schedule)
    if "attention_factor" in params or "short_mscale" in params:
        pytest.fail("the first case of a schedule must use its factor")
    with pytest.warns(UserWarning, match=r"factor 0.5 < 1"):
        Rotary(D, schedule=schedule, params={**params, "factor": 0.5})


def test_frequencies_too_slow_to_hold_are_refused():
    with pytest.raises(ValueError, match=r"base 1e\+308 is too large: the slowest pair turns"):
        Rotary(128, base=1e308)
    with pytest.raises(ValueError, match="base must be > 1 for schedule 'yarn', got 1"), \
            pytest.warns(UserWarning, match="base 1"):  # fmt: skip
        Rotary(D, base=1, schedule="yarn", params=yarn())


def test_axes_of_unequal_widths_have_the_ladder_of_their_own_width():
    inv_freq, factor = SCHEDULES["axial"](128, 1e4, widths=(16, 56, 56))
    ladders = [1e4 ** (-np.arange(0, width, 2) / width) for width in (16, 56, 56)]
    np.testing.assert_allclose(inv_freq, np.concatenate(ladders), rtol=1e-15)
    assert factor == 1.0


@pytest.mark.parametrize(("params", "message"), [
    ({"widths": (16, 56, 58)}, "widths must sum to rotary_dim 128, got .*, which is 130"),
    ({"widths": (64, 63, 1)}, "widths must be even numbers > 0, one for each axis"),
    ({"widths": ()}, "widths must be even numbers > 0"),
    ({"widths": 128}, "widths must be even numbers > 0"),
    ({"widths": (64, 64), "num_axes": 3}, "num_axes 3 and 2 widths disagree; keep widths"),
    ({"widths": (64, 64), "ladder": "dealt"}, 'widths need ladder "blocks", got .dealt'),
    ({"num_axes": 3}, "rotary_dim must be a multiple of 2 num_axes = 6, .* pass widths="),
    ({}, "num_axes must be a whole number >= 1, got None"),
])  # fmt: skip
def test_widths_that_make_no_sense_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        rotary.Rotary(128, schedule="axial", params=params)
    with pytest.raises(ValueError, match=r"needs axes.*\[0\] \* 8 \+ \[1\] \* 28 \+ \[2\] \* 28"):
        rotary.Rotary(128, schedule="axial", params={"widths": (16, 56, 56)})
