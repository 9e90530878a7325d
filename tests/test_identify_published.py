"""Faults of published code, built from the formula of each, and called by their names."""

from functools import partial

import numpy as np
import pytest
from published import scaled
from test_identify_bugs import LADDER, D, half, rope

import rotary
from rotary import Rotary
from rotary.blackbox.probe import Box, check
from rotary.identify import identify
from rotary.schedules import SCHEDULES

PAIRS = np.arange(D // 2)
PLAIN = Rotary(head_dim=D)


def found_in(fn, **options):
    return identify(fn, D, form="positions", **options)


def scheduled(name, base=1e4, d=D, **params):
    return SCHEDULES[name](d, base, **params)


def rotated(x, positions, inv_freq, amplitude=1.0):
    return rope(x, positions, inv_freq=inv_freq) * np.float32(amplitude)


# --- frequencies that follow the length ---


def grown_ladder(length, factor, trained, d=D, base=1e4):
    growth = factor * max(length, trained) / trained - (factor - 1)
    return (base * growth ** (d / (d - 2))) ** (-np.arange(0, d, 2) / d)


def at_the_length_of_the_call(factor, trained):
    """mlx-lm: one offset for the call, and the length is offset + tokens."""

    def rotate(x, positions):
        positions = positions[0] + np.arange(x.shape[-2])
        return rope(x, positions, inv_freq=grown_ladder(positions[-1] + 1, factor, trained))

    return rotate


def token_by_token(rotate):
    """A decoder: every token by a call of its own."""

    def decode(x, positions):
        ways = [rotate(x[..., i : i + 1, :], positions[i : i + 1]) for i in range(len(positions))]
        return np.concatenate(ways, axis=-2)

    return decode


DYNAMIC = [(4.0, 2048), (2.0, 4096), (8.0, 1000), (2.5, 8192)]


@pytest.mark.parametrize(("factor", "trained"), DYNAMIC[2:])  # as below: a call a token is slow
def test_dynamic_ntk_in_decoding_is_named_with_its_base_factor_and_trained_length(factor, trained):
    found = found_in(token_by_token(at_the_length_of_the_call(factor, trained)))
    assert found.spec == scaled("dynamic", D, factor, trained)
    assert found.codes == ("depends_on_position",)
    assert f"dynamic NTK by {factor:g} from {trained:,} tokens on, base 10000" in str(found)
    assert not found.is_rotation  # a score depends on more than the distance


@pytest.mark.parametrize(("factor", "trained"), DYNAMIC)
def test_dynamic_ntk_by_calls_that_have_an_offset(factor, trained):
    found = found_in(at_the_length_of_the_call(factor, trained))
    assert found.spec == scaled("dynamic", D, factor, trained)
    assert found.codes == ("positions_consecutive", "depends_on_length")
    assert "follow the length of each call" in found.findings[1].text


def test_dynamic_ntk_is_not_claimed_for_a_base_that_jumps():
    def jumps(x, positions):
        base = np.where(positions[:, None] < 2048, 1e4, 4e4)
        angle = np.tile(positions[:, None] * base ** (-2 * PAIRS / D), 2)
        return (x * np.cos(angle) + half(x) * np.sin(angle)).astype(x.dtype)

    assert found_in(jumps).codes == ("uneven",)


def test_dynamic_linear_scaling():
    def divided(x, positions):  # TransformerEngine
        length = max(2048, int(positions.max()) + 1)
        return rope(x, positions, inv_freq=LADDER * 2048 / length)

    found = found_in(divided)
    assert found.codes == ("depends_on_length", "dynamic_linear")
    assert "divided by length / 2,048" in found.findings[1].text
    assert found.spec == scaled("dynamic_linear", D, 1.0, 2048)


def test_an_amplitude_that_changes_with_the_length_alone():
    def long_amplitude(x, positions):  # Phi-3.5-MoE in transformers
        return rotated(x, positions, LADDER, 1.19 if positions.max() >= 4096 else 1.0)

    found = found_in(long_amplitude)
    assert found.codes == ("depends_on_length", "amplitude_depends_on_length")
    assert "times 1.19" in found.findings[1].text


def test_the_long_amplitude_of_phi_3_5_moe_in_transformers():
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 32.0,
        "original_max_position_embeddings": 4096, "short_mscale": 1.1, "long_mscale": 1.3,
        "short_factor": (1 + PAIRS / 64).tolist(), "long_factor": (1 + PAIRS / 4).tolist(),
    }  # fmt: skip
    config = phimoe.PhimoeConfig(
        hidden_size=4 * D, num_attention_heads=4, max_position_embeddings=131_072,
        rope_parameters=rope,
    )  # fmt: skip
    embedding = phimoe.PhimoeRotaryEmbedding(config)

    def rotate(x, positions):
        return phimoe.apply_rotary_pos_emb(x, x, *embedding(x, positions))[0]

    found = found_in(rotate)
    assert "amplitude_depends_on_length" in found.codes
    assert "long rows are times 1.3, short ones times 1.1" in str(found)


# --- frequencies ---

INVERTED = {
    "from 2048": (4.0, 2048, 1e4, D, True),
    "wide": (4.0, 32768, 1e6, 128, True),
    "gpt-oss": (32.0, 4096, 150_000.0, 64, False),
    "amplitude": (40.0, 4096, 1e4, D, True),
}


@pytest.mark.parametrize("name", INVERTED)
def test_a_yarn_ramp_that_runs_the_wrong_way(name):
    factor, trained, base, d, truncate = INVERTED[name]
    given = {"factor": factor, "original_max_position_embeddings": trained, "truncate": truncate}
    right, amplitude = scheduled("yarn", base, d, **given)
    ladder = base ** (-np.arange(0, d, 2) / d)
    wrong = ladder + ladder / factor - right
    size = amplitude if name == "amplitude" else 1.0  # litgpt multiplies if mscale is given
    found = identify(lambda x, positions: rotated(x, positions, wrong, size), d)
    assert found.codes == (*(["amplitude"] if size != 1 else []), "ramp_inverted")
    text = f"YaRN by {factor:g} from {trained:,} tokens, base {base:g}, with the ramp inverted: "
    assert found.findings[-1].text.startswith(text + "fast pairs are interpolated and slow pairs")
    np.testing.assert_allclose(found.spec.params["inv_freq"], wrong, rtol=1e-12)


def test_a_yarn_ramp_that_runs_the_right_way_is_not_called_inverted():
    right = scheduled("yarn", factor=4.0, original_max_position_embeddings=2048)
    assert found_in(partial(rotated, inv_freq=right[0], amplitude=right[1])).codes == ("amplitude",)


LADDERS = {
    "pairs_from_1": 1e4 ** (-2 * (PAIRS + 1) / D),
    "last_pair_at_base": 1e4 ** -np.linspace(0, 1, D // 2),
    "growth_divides": LADDER / 4 ** (D / (D - 2)),
    "reciprocal_frequencies": 1 / LADDER,
}


@pytest.mark.parametrize("code", LADDERS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_frequencies_that_are_wrong_in_a_known_way(code, dtype):
    wrong = LADDERS[code].astype(dtype).astype(np.float64)
    found = found_in(partial(rope, inv_freq=wrong), max_position=2**12)
    assert found.codes[0] == code
    assert set(found.codes[1:]) <= {"angles_drift"}  # the base is known to float32 only


@pytest.mark.parametrize(
    ("inv_freq", "params"),
    [
        (LADDER / 8.0 ** (2 * (PAIRS + 1) / D), {"factor": 8.0, "b": 1.0}),  # vLLM's ntk
        (scheduled("ntk_mixed", factor=8.0)[0], {"factor": 8.0}),
        (scheduled("ntk_mixed", factor=16.0, b=0.5)[0], {"factor": 16.0, "b": 0.5}),
    ],
)
def test_ntk_mixed(inv_freq, params):
    found = found_in(partial(rope, inv_freq=inv_freq))
    assert found.spec == Rotary(head_dim=D, schedule="ntk_mixed", params=params)
    assert found.findings == ()


@pytest.mark.parametrize("factor", [4.0, 2.53, 1.0671, 57.3])
def test_a_factor_that_was_chosen_is_not_explained_away(factor):
    assert found_in(partial(rope, inv_freq=LADDER / factor)).findings == ()


# --- the number that multiplies cos and sin ---


AMPLITUDES = {
    "no_attention_factor": lambda g: 1.0,
    "attention_factor_twice": lambda g: g * g,
    "attention_factor_divides": lambda g: 1 / g,
    "mscale_alone": lambda g: 0.707 * (g - 1) + 1,  # DeepSeek's own code, without mscale_all_dim
}


@pytest.mark.parametrize("code", AMPLITUDES)
@pytest.mark.parametrize("factor", [4.0, 40.0])
def test_the_attention_factor_of_yarn(code, factor):
    inv_freq, g = scheduled("yarn", factor=factor, original_max_position_embeddings=4096)
    size = AMPLITUDES[code](g)
    found = found_in(partial(rotated, inv_freq=inv_freq, amplitude=size))
    assert found.codes == (*(["amplitude"] if size != 1 else []), code)
    assert found.spec.schedule == "yarn"


def test_another_attention_factor_is_only_measured():
    inv_freq, _ = scheduled("yarn", factor=4.0, original_max_position_embeddings=4096)
    assert found_in(partial(rotated, inv_freq=inv_freq, amplitude=1.2)).codes == ("amplitude",)


# --- positions far out ---

ENDS = {
    "positions_clamped": lambda p: np.minimum(p, 4095),
    "positions_restart": lambda p: p % 4096,
    "positions_overflow": lambda p: p.astype(np.int16).astype(np.int64),
    "not_rotated_far": lambda p: np.where(p < 3000, p, 0),
}


@pytest.mark.parametrize("code", ENDS)
@pytest.mark.parametrize("inv_freq", [LADDER, LADDER / 8], ids=["plain", "slow"])
def test_a_table_that_ends(code, inv_freq):
    def rotate(x, positions):
        return rope(x, ENDS[code](positions), inv_freq=inv_freq)

    found = found_in(rotate)
    assert found.codes == (code,)
    edge = {"positions_overflow": "32,768", "not_rotated_far": "3,000"}.get(code, "4,096")
    assert edge in found.findings[0].text


def test_positions_of_32_bits():
    found = found_in(lambda x, p: rope(x, p.astype(np.int32)), max_position=2**33)
    assert found.codes == ("positions_overflow",)
    assert "2,147,483,648" in found.findings[0].text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("factor", "trained"), [(1.0, 4096), (1.0, 2048), (2.0, 2048)])
def test_frequencies_that_follow_the_length_are_no_table_that_ends(dtype, factor, trained):
    torch = pytest.importorskip("torch")

    def rotate(x, positions):  # a token alone at p >= trained has the angles of p L / (p + 1)
        divided = max(1.0, (int(positions.max()) + 1) / trained / factor) * factor
        angle = positions.double()[:, None] * torch.tensor(LADDER) / divided
        cos, sin = angle.cos().tile(2), angle.sin().tile(2)
        first, second = x.double().chunk(2, -1)
        return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

    codes = found_in(rotate, dtype=dtype, library="torch").codes
    assert "depends_on_length" in codes
    assert not {"positions_clamped", "positions_restart", "not_rotated_far"} & set(codes)


def test_a_table_that_ends_in_another_way_is_uneven():
    found = found_in(lambda x, p: rope(x, np.where(p < 4096, p, 17)))
    assert found.codes == ("uneven",)
    assert found.right_up_to == 2048


@pytest.mark.parametrize("group", [2, 4, 7])
def test_positions_that_neighbours_share(group):
    found = found_in(lambda x, positions: rope(x, positions // group))
    assert found.codes == ("positions_shared",)
    assert f"{group} neighbours share a position" in found.findings[0].text
    assert found.spec == PLAIN


def test_pairs_that_are_only_slow_share_no_position():
    found = found_in(partial(rope, inv_freq=LADDER * 1e-7))
    assert "positions_shared" not in found.codes


# --- precision ---


def running_product(x, positions, base=1e4, d=D, scale=1.0):
    """llama.cpp: the angle of a pair is the one before it times one float32 ratio."""
    angle, step, columns = positions.astype(np.float32), np.float32(base ** (-2 / d)), []
    for _ in range(d // 2):
        columns.append(np.float32(scale) * angle)
        angle = angle * step
    angles = np.tile(np.stack(columns, axis=-1).astype(np.float64), 2)[..., None, :, :]
    return (x * np.cos(angles) + half(x) * np.sin(angles)).astype(x.dtype)


@pytest.mark.parametrize(("base", "d", "scale"), [(1e4, 64, 1.0), (5e5, 128, 1.0), (1e6, 96, 0.25)])
def test_angles_as_a_running_product(base, d, scale):
    found = identify(lambda x, p: running_product(x, p, base, d, scale), d)
    assert found.codes == ("float32_running_product",)
    assert found.spec.base == base


@pytest.mark.parametrize(("base", "d"), [(1e4, 64), (5e5, 128), (5e4, 14), (5e4, 8)])
def test_float32_angles_are_no_running_product(base, d):
    spec = Rotary(head_dim=d, base=base)

    def in_float32(x, positions):
        return rotary.apply(spec, x, positions=positions, precision="float32", seq_dim=-2)

    assert identify(in_float32, d).codes == ("float32_angles",)


# --- what is not one rotation per pair ---


def test_tables_that_are_mixed_have_no_frequencies():
    """FoPE: learned matrices mix the cos and the sin of all pairs."""
    mix = np.tile(np.linalg.qr(np.random.default_rng(0).standard_normal((D // 2, D // 2)))[0], 2)
    found = found_in(
        partial(rope, cos=lambda a: np.cos(a[:, : D // 2]) @ mix,
                sin=lambda a: np.sin(a[:, : D // 2]) @ mix)
    )  # fmt: skip
    assert (found.codes, found.spec) == (("position_scale",), None)


def test_axes_that_are_not_read():
    found = found_in(lambda x, positions: rope(x, positions[:, 0]), num_axes=3, max_position=4096)
    assert found.codes == ("axes_ignored",)
    assert "1, 2" in found.findings[0].text


def test_axes_that_split_pairs():
    axes = np.arange(2).repeat(D // 2)  # over the doubled width: pair (j, j + D/2) reads both

    def rotate(x, positions):
        angle = positions[:, axes] * np.tile(LADDER, 2)
        return (x * np.cos(angle) + half(x) * np.sin(angle)).astype(x.dtype)

    found = found_in(rotate, num_axes=2, max_position=4096)
    assert found.codes == ("axes_split_pairs", "not_shift_invariant")


# --- shapes ---


def test_heads_that_are_taken_for_tokens():
    def swapped(x, positions):
        return rope(x.swapaxes(1, 2), np.arange(x.shape[1])).swapaxes(1, 2)

    assert found_in(swapped).codes == ("heads_as_positions",)


def test_heads_that_are_scaled_are_not_taken_for_tokens():
    scaled = found_in(lambda x, p: x * np.arange(1, x.shape[1] + 1)[:, None, None].astype(x.dtype))
    assert "heads_differ" in scaled.codes


def by_row(x, positions, length=None):
    """Positions (batch, seq); a base of its own for rows, or batches, that are long."""
    inv_freq = LADDER
    if length is not None:
        base = np.where(length(positions) < 4096, 1e4, 8e4)
        inv_freq = (base[..., None] ** (-2 * PAIRS / D))[..., None, :]
    angle = np.tile(positions[..., None] * inv_freq, 2)[:, None]
    return (x * np.cos(angle) + half(x) * np.sin(angle)).astype(x.dtype)


def test_rows_with_positions_of_their_own():
    assert found_in(by_row).findings == ()
    shared = found_in(lambda x, p: by_row(x, p[:1].repeat(len(p), axis=0)))
    assert shared.codes == ("rows_share_positions",)


def test_a_length_that_is_that_of_the_batch():
    alone = found_in(partial(by_row, length=lambda p: p.max(axis=-1)))
    assert alone.codes == ("depends_on_length",)
    batch = found_in(partial(by_row, length=np.max))
    assert batch.codes == ("depends_on_length", "depends_on_batch")


def unrotated(condition):
    def rotate(x, positions):
        return x.copy() if condition(x) else rope(x, positions)

    return rotate


def first_row_alone(x, positions):
    rotated = rope(x, positions)
    if x.shape[-2] == 1:
        rotated[1:] = x[1:]
    return rotated


SHAPES = {
    "a head alone": unrotated(lambda x: x.shape[1] == 1),
    "a token alone": unrotated(lambda x: x.shape[2] == 1),
    "in a batch of 2": first_row_alone,
}


@pytest.mark.parametrize("said", SHAPES)
def test_shapes_that_are_forgotten(said):
    found = found_in(SHAPES[said])
    assert set(found.codes) == {"depends_on_shape"}
    assert said in found.findings[0].text


def test_a_box_that_refuses_gaps_must_have_consecutive_positions():
    def strict(x, positions):
        if (np.diff(positions) != 1).any():
            raise ValueError("give one offset")
        return rope(x, positions)

    box = Box(strict, lambda a: a.astype(np.float32), D, -2, 1, "float32")
    (finding,) = check(box)
    assert finding.code == "positions_consecutive"
    assert "give one offset" in finding.text
    assert found_in(strict).spec == PLAIN
