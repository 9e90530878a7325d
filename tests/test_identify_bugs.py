"""Planted bugs: what people get wrong in RoPE, each found and called by its name."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from rotary import Rotary
from rotary.identify import identify

D = 64
LADDER = 10_000.0 ** (-np.arange(0, D, 2) / D)


def half(x):
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([-second, first], axis=-1)


def adjacent(x):
    return np.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)


def same(values):
    return values


def held_as(dtype):
    return lambda values: np.asarray(values).astype(dtype).astype(np.float64)


BF16, F16, F32 = held_as(ml_dtypes.bfloat16), held_as(np.float16), held_as(np.float32)


def rope(x, positions, *, inv_freq=LADDER, turn=half, tiled=True, at=same, rates=same, angles=same,
         tables=same, cos=np.cos, sin=np.sin, sign=1):  # fmt: skip
    """The textbook formula, with a place for every mistake."""
    angle = angles(at(positions.astype(np.float64))[:, None] * rates(inv_freq))
    angle = np.concatenate([angle, angle], -1) if tiled else np.repeat(angle, 2, -1)
    return (x * tables(cos(angle)) + sign * turn(x) * tables(sin(angle))).astype(x.dtype)


def test_the_formula_without_a_mistake_is_found_without_a_finding():
    assert identify(rope, D, form="positions").findings == ()
    found = identify(partial(rope, turn=adjacent, tiled=False), D, form="positions")
    assert (found.findings, found.spec) == ((), Rotary(head_dim=D, layout="interleaved"))


# mistake: what it does, the code it must be given, the last position that is still right
ROUNDED = {
    "bfloat16 tables": ({"tables": BF16}, "bfloat16_tables", 0),
    "float16 tables": ({"tables": F16}, "float16_tables", 2**20),
    "bfloat16 positions": ({"at": BF16}, "bfloat16_positions", 128),
    "float16 positions": ({"at": F16}, "float16_positions", 1024),
    "bfloat16 frequencies": ({"rates": BF16}, "bfloat16_frequencies", 1),
    "float16 frequencies": ({"rates": F16}, "float16_frequencies", 4),
    "bfloat16 angles": ({"angles": BF16}, "bfloat16_angles", 1),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_rounded_is_named(name):
    mistake, code, right_up_to = ROUNDED[name]
    found = identify(partial(rope, **mistake), D, form="positions")
    assert found.spec == Rotary(head_dim=D)
    assert set(found.codes) - {"far_refused"} == {code}
    assert found.arithmetic == name
    assert found.right_up_to == right_up_to


def test_float32_angles_are_not_blamed_for_errors_of_tables():
    coarse = identify(partial(rope, angles=F32, rates=F32, tables=BF16), D, form="positions")
    assert coarse.codes == ("bfloat16_tables",)
    assert coarse.arithmetic == "float32 angles, bfloat16 tables"
    fine = identify(partial(rope, angles=F32, rates=F32, tables=F16), D, form="positions")
    assert fine.codes == ("float32_angles", "float16_tables")


@pytest.mark.parametrize(("width", "base"), [(16, 1e4), (64, 1e4), (80, 1e4), (256, 1e6)])
def test_float32_angles_are_right_up_to_where_they_are_said_to_be(width, base):
    """Powers of two, where products are hardly rounded, are right two to three times as far."""
    ladder = base ** (-np.arange(0, width, 2) / width)
    function = partial(rope, inv_freq=ladder, angles=F32, rates=F32)
    right = identify(function, width, form="positions").right_up_to
    positions = np.arange(2 * right)[:, None]
    error = np.abs(F32(positions * F32(ladder)) - positions * ladder).max(axis=1)
    first = np.flatnonzero(error > 1e-3)[0]
    assert right < first < 1.5 * right  # frequencies of transformers are less exact than these


def test_pairs_too_slow_for_a_short_bfloat16_table_are_not_taken_for_resting_ones():
    slow = 1e8 ** (-np.arange(0, D, 2) / D)
    found = identify(partial(rope, inv_freq=slow, tables=BF16), D, form="positions",
                     max_position=1024)  # fmt: skip
    assert found.spec == Rotary(head_dim=D, base=1e8)


def test_two_roundings_are_both_named():
    found = identify(partial(rope, rates=BF16, tables=BF16), D, form="positions")
    assert found.codes == ("bfloat16_frequencies", "bfloat16_tables")
    assert found.spec == Rotary(head_dim=D)


TWICE = LADDER[[0, 1, 2, 3, 4, 4, *range(6, D // 2)]]
MIXED = LADDER * np.where(np.arange(D // 2) % 2, -1, 1)
WRONG_LAYOUT = ("tables_in_other_layout", "not_shift_invariant")
# what is wrong: the formula with it, the codes, what the text says, the spec if it is asked
MISTAKES = {
    **{f"positions from {by}": ({"at": lambda p, by=by: p + by}, ("offset",), f"position {by}",
                                Rotary(head_dim=D)) for by in (1, 3, 100, -2)},
    "sign of sin": ({"sign": -1}, ("clockwise",), "nanochat", Rotary(head_dim=D, sign=-1)),
    "cos and sin swapped": ({"cos": np.sin, "sin": np.cos}, ("cos_sin_swapped",), "swapped", ...),
    "a doubled angle": ({"inv_freq": 2 * LADDER}, ("frequencies_multiplied",),
                        "2 times that of base 10000", ...),
    **{f"{name} times the angle": ({"at": lambda p, by=by: p * by}, ("frequencies_multiplied",),
                                   f"every angle is {name} times that of base 10000", ...)
       for name, by in (("1.000001", 1.000001), ("3", 3.0), ("4", 4.0), ("5.5", 5.5), ("8", 8.0),
                        ("40", 40.0), ("3.141592654", np.pi), ("6.283185307", 2 * np.pi))},
    "tiled tables": ({"turn": adjacent}, WRONG_LAYOUT, "needs repeat_interleave", None),
    "repeated tables": ({"tiled": False}, WRONG_LAYOUT, "needs cat", None),
    "one pair twice": ({"inv_freq": TWICE}, ("duplicate_frequency", "off_ladder"),
                       "4 and 5", ...),
    "some pairs backwards": ({"inv_freq": MIXED}, ("mixed_directions",), "other direction", ...),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_in_the_formula_is_named(name):
    mistake, codes, text, spec = MISTAKES[name]
    found = identify(partial(rope, **mistake), D, form="positions")
    assert found.codes == codes
    assert text in found.findings[0].text
    assert spec is ... or found.spec == spec
    assert found.is_rotation == (spec is not None)
    if "inv_freq" in mistake:
        np.testing.assert_allclose(found.inv_freq, mistake["inv_freq"], rtol=1e-9)
    if "offset" in codes:
        assert found.right_up_to == 2**20
    if "off_ladder" in codes:
        assert "all pairs but [5] follow base 10000" in found.findings[1].text


def test_q_and_k_with_opposite_signs():
    found = identify((rope, partial(rope, sign=-1)), D, form="positions")
    assert found.codes == ("clockwise", "q_k_differ")
    assert "sign 1 and -1" in str(found)
    assert not found.is_rotation
    alike = identify((rope, rope), D, form="positions")
    assert alike.is_rotation
    assert alike.findings == ()


def test_q_and_k_in_different_layouts():
    other = partial(rope, turn=adjacent, tiled=False)
    found = identify((rope, other), D, form="positions")
    assert found.codes == ("q_k_differ",)
    assert "layout half and interleaved" in found.findings[0].text


def test_the_exponent_divided_by_the_whole_head():
    wrong = 10_000.0 ** (-np.arange(0, 32, 2) / D)

    def partly(x, positions):
        rotated = rope(x[..., :32], positions, inv_freq=wrong)
        return np.concatenate([rotated, x[..., 32:]], axis=-1)

    found = identify(partly, D)
    assert found.codes == ("denominator",)
    assert "base 10000 with head_dim 64" in found.findings[0].text
    assert found.spec == Rotary(head_dim=D, rotary_dim=32, base=100.0)


def test_a_reflection_is_not_a_rotation():
    def reflected(x, positions):
        angle = positions[:, None] * LADDER
        first, second = np.split(x, 2, axis=-1)
        c, s = np.cos(angle), np.sin(angle)
        return np.concatenate([first * c + second * s, first * s + second * c], -1).astype(x.dtype)

    found = identify(reflected, D)
    assert found.codes == ("not_a_rotation", "not_shift_invariant")
    assert not found.is_rotation


def test_an_amplitude_is_measured_and_the_frequencies_still_named():
    found = identify(lambda x, positions: rope(x, positions) * np.float32(1.25), D)
    assert found.codes == ("amplitude",)
    assert found.amplitude == pytest.approx(1.25, abs=1e-6)
    assert found.is_rotation
    np.testing.assert_allclose(found.spec.params["inv_freq"], LADDER, rtol=1e-15)
    assert found.spec.params["attention_factor"] == found.amplitude


def test_pairs_of_different_length():
    scale = np.linspace(1, 2, D // 2).astype(np.float32)
    found = identify(lambda x, positions: rope(x, positions) * np.tile(scale, 2), D)
    assert found.codes == ("pair_scale",)
    assert (found.is_rotation, found.amplitude) == (False, None)
    assert found.spec == Rotary(head_dim=D)


def test_a_scale_that_grows_with_the_position_as_in_xpos():
    zeta = np.tile((np.arange(0, D, 2) + 0.4 * D) / (1.4 * D), 2)

    def xpos(x, positions):
        return (rope(x, positions) * zeta ** (positions[:, None] / 512)).astype(x.dtype)

    found = identify(xpos, D)
    assert found.codes == ("position_scale",)
    assert not found.is_rotation
    np.testing.assert_allclose(found.inv_freq, LADDER, rtol=1e-6)


def test_channels_outside_the_slice_that_are_changed():
    def careless(x, positions):
        ladder = 10_000.0 ** (-np.arange(0, 32, 2) / 32)
        rotated = rope(x[..., :32], positions, inv_freq=ladder)
        return np.concatenate([rotated, 2 * x[..., 32:]], axis=-1)

    found = identify(careless, D)
    assert found.codes == ("scales_the_rest",)
    assert found.spec == Rotary(head_dim=D, rotary_dim=32)


def test_angles_beyond_half_a_turn_give_the_factor_and_its_spec():
    for by in (4.0, np.pi, 2 * np.pi):
        found = identify(partial(rope, at=lambda p, by=by: p * by), D, form="positions")
        assert (found.spec.schedule, found.spec.base) == ("linear", 10_000.0)
        assert found.spec.params["factor"] == pytest.approx(1 / by, rel=1e-12)
        assert (found.arithmetic, found.right_up_to) == ("exact", 2**20)
        assert ("2 pi" in found.findings[0].text) == (by == 2 * np.pi)
    few = identify(partial(rope, at=lambda p: p * 5.0, angles=F32), D, form="positions")
    assert (few.spec.schedule, few.spec.params["factor"]) == ("linear", 0.2)


def test_frequencies_that_no_factor_explains_are_not_called_multiplied():
    backwards = LADDER.copy()
    backwards[:3] = -2.2, 2.9, 2.2
    found = identify(partial(rope, inv_freq=backwards), D, form="positions")
    assert "frequencies_multiplied" not in found.codes
    assert "more than half a turn" in found.findings[0].text


def cos_alone(x, positions, inv_freq=LADDER, factor=1.0):
    cos = factor * np.cos(positions.astype(np.float64)[:, None] * inv_freq)
    return (x * np.concatenate([cos, cos], -1)).astype(x.dtype)


def without_rotate_half(x, positions):
    angle = positions.astype(np.float64)[:, None] * np.concatenate([LADDER, LADDER])
    return (x * np.cos(angle) + x * np.sin(angle)).astype(x.dtype)


def log_n(x, positions):
    return (x * (np.log(positions + 2) / np.log(2048))[:, None]).astype(x.dtype)


def growing(x, positions):
    """Has c(2p) = 2 c(p)^2 - 1 as a cosine has, and is none."""
    return (x * np.cosh(np.minimum(positions * 0.01, 20.0))[:, None]).astype(x.dtype)


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("rounded", [same, BF16])
def test_a_missing_sin_is_named_for_cosines(factor, rounded):
    fn = partial(cos_alone, inv_freq=rounded(LADDER), factor=factor)
    assert identify(fn, D, form="positions").codes == ("sin_missing",)
    as_bf16 = partial(rope, sin=np.zeros_like, tables=BF16)
    assert identify(as_bf16, D, form="positions").codes == ("sin_missing",)


@pytest.mark.parametrize("fn", [without_rotate_half, log_n, growing])
def test_a_multiplier_that_is_no_cosine_has_no_name(fn):
    found = identify(fn, D, form="positions")
    assert (found.spec, found.codes) == (None, ("position_scale",))


def test_a_function_of_16_bits_is_right_to_what_these_hide():
    torch = pytest.importorskip("torch")
    ladder = torch.from_numpy(LADDER).float()

    def fn(x, positions):
        angle = positions.float()[:, None] * ladder.bfloat16().float()
        cos, sin = (torch.cat([each, each], -1).to(x.dtype) for each in (angle.cos(), angle.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    for dtype, right_to, text in (("float32", 1e-3, "1e-3"), ("bfloat16", 5e-3, "5e-3")):
        found = identify(fn, D, dtype=dtype, library="torch", form="positions")
        assert found.right_to == pytest.approx(right_to, rel=0.02)
        assert f"right to {text} rad up to position" in str(found)
        assert f"off by more than {text} rad" in found.findings[-1].text


def test_channels_that_are_mixed():
    matrix = np.linalg.qr(np.random.default_rng(0).standard_normal((D, D)))[0].astype(np.float32)
    found = identify(lambda x, positions: rope(x @ matrix, positions), D)
    assert found.codes == ("mixes_channels",)


def overwrite(x, positions):
    x[...] = rope(x, positions)
    return x


def overwrite_positions(x, positions):
    rotated = rope(x, positions)
    positions += 1
    return rotated


def one_buffer(x, positions, buffers={}):  # noqa: B006  # kept between calls
    buffer = buffers.setdefault(x.shape, x.copy())
    buffer[...] = rope(x, positions)
    return buffer


def one_head(x, positions):
    rotated = x.copy()
    rotated[:, :1] = rope(x[:, :1], positions)
    return rotated


def shuffled_batch(x, positions):
    return rope(x if len(x) == 1 else x[::-1].copy(), positions)


def one_row(x, positions):
    if len(x) > 1:
        raise IndexError("only one row")
    return rope(x, positions)


def in_order(x, positions):
    return rope(x, positions[0] + np.arange(x.shape[-2]))


noise = np.random.default_rng(0)
HABITS = {  # what it does beside rotating: code, and whether a spec can still be given
    "overwrites_input": (overwrite, True),
    "overwrites_output": (one_buffer, True),
    "mixes_heads": (lambda x, p: rope(x, p) + x.mean(1, keepdims=True) / 8, False),
    "heads_differ": (one_head, False),
    "mixes_tokens": (lambda x, p: rope(x, p) + x.mean(2, keepdims=True) / 8, False),
    "mixes_batch": (shuffled_batch, True),
    "refuses_batch": (one_row, True),
    "not_linear": (
        lambda x, p: rope(x / (1 + np.linalg.norm(x, axis=-1, keepdims=True)), p),
        False,
    ),
    "not_repeatable": (lambda x, p: x + noise.random(x.shape, np.float32), False),
    "positions_ignored": (lambda x, p: rope(x, np.arange(x.shape[-2])), True),
    "positions_consecutive": (in_order, True),
}


@pytest.mark.parametrize("code", HABITS)
def test_what_a_callable_does_beside_rotating(code):
    fn, has_spec = HABITS[code]
    found = identify(fn, D)
    assert found.codes == (code,)
    assert found.spec == (Rotary(head_dim=D) if has_spec else None)
    assert found.is_rotation is has_spec


def test_an_argument_that_is_overwritten_is_named():
    def clear_cos(q, k, cos, sin):
        rotated = tuple(x * cos[:, None] + half(x) * sin[:, None] for x in (q, k))
        cos[...] = 0
        return rotated

    for fn, name in ((overwrite, "x"), (overwrite_positions, "positions"), (clear_cos, "cos")):
        found = identify(fn, D)
        assert found.findings == (("overwrites_input", f"overwrites the {name} that it gets"),)
        assert found.spec == Rotary(head_dim=D)


def test_heads_or_tokens_in_reverse_are_mixed():
    reverse_heads = identify(lambda x, p: rope(x[:, ::-1].copy(), p), D)
    assert "mixes_heads" in reverse_heads.codes
    reverse_tokens = identify(lambda x, p: rope(x[:, :, ::-1].copy(), p), D)
    assert "mixes_tokens" in reverse_tokens.codes


def test_adding_to_x_is_not_linear():
    assert identify(lambda x, positions: rope(x, positions) + 1, D).codes == ("not_linear",)


@pytest.mark.parametrize("channels", [D, D // 2])
def test_tables_of_zeros_are_no_rotation(channels):
    """Buffers that were never filled: it was a RoPE without rotation, of amplitude 1."""
    zeros = lambda x, positions: np.where(np.arange(D) < channels, 0, x)  # noqa: E731
    found = identify(zeros, D, form="positions")
    assert found.spec is None
    assert "zeros" in {each.code for each in found.findings}


def test_doing_nothing():
    found = identify(lambda x, positions: x.copy(), D)
    assert found.codes == ("positions_ignored", "no_rotation")
    assert found.spec is None


def test_a_table_that_ends():
    table = np.arange(4096)
    found = identify(lambda x, positions: rope(x, table[positions]), D)
    assert found.codes == ("far_refused",)
    assert "position 4,096" in found.findings[0].text
    assert "IndexError" in found.findings[0].text
    assert (found.spec, found.right_up_to) == (Rotary(head_dim=D), 2048)


def test_a_state_that_a_long_row_leaves_behind():
    longest = [0]

    def grows(x, positions):
        longest[0] = max(longest[0], int(positions.max()))
        base = 10_000.0 if longest[0] < 2048 else 40_000.0
        return rope(x, positions, inv_freq=base ** (-np.arange(0, D, 2) / D))

    found = identify(grows, D)
    assert {"depends_on_length", "remembers_length"} <= set(found.codes)


def test_frequencies_that_depend_on_the_number_of_tokens():
    def scaled(x, positions):
        base = 10_000.0 if x.shape[-2] < 3000 else 40_000.0
        return rope(x, positions, inv_freq=base ** (-np.arange(0, D, 2) / D))

    found = identify(scaled, D)
    assert found.codes == ("depends_on_length",)
    assert "4096 tokens" in found.findings[0].text


TABLE_BUGS = {  # f(q, k, cos, sin): what it does, code
    "clockwise": lambda x, c, s: x * c - half(x) * s,
    "cos_sin_swapped": lambda x, c, s: x * s + half(x) * c,
    "amplitude": lambda x, c, s: 2 * (x * c + half(x) * s),
    "not_linear": lambda x, c, s: np.tanh(x) * c + half(x) * s,
    "mixes_heads": lambda x, c, s: x * c + half(x[:, ::-1]) * s,
}


@pytest.mark.parametrize("code", TABLE_BUGS)
def test_bugs_of_a_function_that_is_given_tables(code):
    def apply(q, k, cos, sin):
        return TABLE_BUGS[code](q, cos, sin), TABLE_BUGS[code](k, cos, sin)

    assert code in identify(apply, D).codes


def test_a_function_with_tables_that_treats_q_and_k_differently():
    def apply(q, k, cos, sin):
        cos, sin = cos[..., None, :, :], sin[..., None, :, :]
        return q * cos + half(q) * sin, k * cos - half(k) * sin

    found = identify(apply, D)
    assert found.codes == ("clockwise", "q_k_differ")
    assert not found.is_rotation


def test_one_wrong_sign_does_not_hide_the_order_of_the_tables():
    def apply(q, k, cos, sin):
        cos, sin = cos[..., None, :, :], sin[..., None, :, :]
        return q * cos + adjacent(q) * sin, k * cos - adjacent(k) * sin

    found = identify(apply, D)
    assert (found.spec, found.tables) == (Rotary(head_dim=D, layout="interleaved"), "repeat")
    assert found.codes == ("clockwise", "q_k_differ")


def test_given_tables_that_are_cast_to_bfloat16():
    def apply(q, k, cos, sin):
        cos, sin = (BF16(table).astype(q.dtype)[..., None, :, :] for table in (cos, sin))
        return q * cos + half(q) * sin, k * cos + half(k) * sin

    assert identify(apply, D).codes == ("bfloat16_tables",)


def test_a_function_with_tables_whose_table_order_fits_no_layout():
    def apply(q, k, cos, sin):  # tiles what it is given, and pairs neighbours
        cos, sin = (np.concatenate([t, t], -1)[..., : q.shape[-1]] for t in (cos, sin))
        return q * cos + adjacent(q) * sin, k * cos + adjacent(k) * sin

    found = identify(apply, D)
    assert found.is_rotation
    assert found.tables == "repeat"


# --- faults beyond the first heads, the first tokens, and the first wrong position ---


@pytest.mark.parametrize("first", [3, 8, 63])
def test_a_head_that_is_not_rotated_is_named_wherever_it_is(first):
    def some(x, positions):
        return np.concatenate([rope(x[:, :first], positions), x[:, first:]], axis=1)

    (finding,) = identify(some, D, form="positions").findings
    assert finding.code == "heads_differ"
    assert f"head {first} of 64" in finding.text


def forgets(count):
    def some(x, positions):
        y = rope(x, positions)
        y[..., count:, :] = x[..., count:, :]
        return y

    return some


def starts_again(x, positions):
    return rope(x, np.concatenate([positions[:64], positions[64:] - positions[64:65]]))


@pytest.mark.parametrize(
    ("some", "token"),
    [(forgets(6), 4), (forgets(1000), 1021), (forgets(1023), 1021), (forgets(16_383), 16_381),
     (starts_again, 64)],
)  # fmt: skip
def test_tokens_late_in_a_row_are_seen(some, token):
    found = identify(some, D, form="positions")
    assert found.codes == ("later_tokens_differ",)
    assert f"token {token} or one of the next two" in found.findings[0].text


@pytest.mark.parametrize(
    "at",
    [lambda p: np.where(p >= 1000, p - 1000, p),
     lambda p: np.where((p >= 4096) & (p < 6000), p - 4096, p),
     lambda p: np.where((p >= 4096) & (p < 8000), 4095, p),
     lambda p: np.where((p >= 4096) & (p < 8000), 0, p)],
    ids=["minus 1000", "a restart that ends", "clamped for a while", "still for a while"],
)  # fmt: skip
def test_what_does_not_hold_further_on_gets_no_name(at):
    """As the end of a table, or a remainder, would."""
    found = identify(partial(rope, at=at), D, form="positions")
    names = {"positions_restart", "positions_clamped", "not_rotated_far", "positions_overflow"}
    assert found.codes
    assert not names & {*found.codes}
