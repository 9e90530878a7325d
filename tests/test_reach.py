"""How far the RoPE of a model reaches, and the words that are said about it."""

import json
from pathlib import Path

import numpy as np
import pytest
from published import scaled

from rotary import Rotary, from_hf_config, inv_freq
from rotary.analysis.extension import unseen_share
from rotary.plan import recommend_model
from rotary.reach import Reach, distances_to, reach, reaches

CONFIGS = Path(__file__).parent / "configs"
LLAMA_2 = Rotary(head_dim=128)


def test_llama_2_has_the_published_numbers():
    found = reach(LLAMA_2, 4096)
    assert (found.first_failure, found.critical_dimension) == (1707, 92)
    assert (found.pairs, found.never_turning, found.still_pairs) == (64, 18, 0.0)
    assert found.longest_wavelength == pytest.approx(2 * np.pi * 1e4 ** (126 / 128))
    distances = np.arange(1, 4097)
    alike = np.cos(distances[:, None] * 1e4 ** (-np.arange(64) / 64)).sum(1)
    assert found.failures == (alike < 0).sum()
    assert found.lowest_distance == distances[alike.argmin()]
    assert found.lowest == pytest.approx(alike.min() / 64)


def test_a_failure_is_told_as_a_diagnostic_and_not_as_a_limit():
    verdict = reach(LLAMA_2, 4096).verdict
    assert "at 420 of 4,096 distances (B_m < 0), first at 1,707 tokens" in verdict
    assert "not a limit" in verdict
    assert "18 of 64 pairs" in verdict
    for word in ("cannot", "must not", "fails", "broken"):
        assert word not in verdict


def test_what_never_fails_is_said():
    found = reach(Rotary(head_dim=128, rotary_dim=32), 65536)
    assert (found.first_failure, found.failures, found.still_pairs) == (None, 0, 48.0)
    assert found.lowest >= 0
    assert "at every distance" in found.verdict
    assert "48 pairs of channels are not rotated" in found.verdict


def test_a_pair_that_stands_still_has_no_wavelength():
    spec = Rotary(head_dim=8, schedule="custom", params={"inv_freq": [1.0, 0.0, 0.0, 0.0]})
    found = reach(spec, 100)
    assert found.longest_wavelength == pytest.approx(2 * np.pi)
    assert found.never_turning == 3


def test_float32_is_spoken_of_only_where_it_matters():
    short, long = reach(LLAMA_2, 4096), reach(LLAMA_2, 2**20)
    assert short.float32_positions == long.float32_positions
    assert 4096 < long.float32_positions < 2**20
    assert "float32" not in short.verdict
    assert f"{long.float32_positions:,}" in long.verdict


def test_float32_angles_are_those_of_the_list_that_runs_at_the_length():
    config = json.loads((CONFIGS / "phi-3-mini-128k.json").read_text())
    factors = np.array(config["rope_scaling"]["long_factor"])  # short_factor is right to 144,180
    powers = np.arange(48) / 48
    true = 1 / (factors * 1e4**powers)
    held = 1 / (factors.astype(np.float32) * np.float32(1e4) ** powers.astype(np.float32))
    places = np.arange(2**17)[:, None]
    apart = np.abs(places.astype(np.float32) * held - places * true)
    first = int((apart > 1e-2).any(1).argmax())
    found = reaches(config)[None]
    assert 0.9 * first < found.float32_positions < first < found.length == 131_072
    assert f"beyond position {found.float32_positions:,}" in found.verdict
    short = reach(found.spec, 4096).float32_positions
    assert short > found.float32_positions


def test_the_length_of_training_is_that_before_scaling():
    found = reaches(CONFIGS / "llama-3.1-8b.json")[None]
    assert (found.trained, found.length, found.first_failure) == (8192, 131072, 85133)
    assert (found.critical_dimension, found.never_turning) == (70, 29)  # as Llama 3 before it
    assert found.unseen == pytest.approx(
        unseen_share(Rotary(head_dim=128, base=5e5), 8192, found.spec, 131071)
    )
    assert 0.1 < found.unseen < 0.3
    assert f"{found.unseen:.1%} of the angles" in found.verdict


def test_a_scaling_that_covers_the_length_shows_no_new_angle():
    found = reach(scaled("yarn", 128, 4.0, 4096), 16384, 4096)
    assert found.unseen < 0.005
    assert "every angle up to 16,384 tokens occurred in training." in found.verdict
    assert reach(LLAMA_2, 16384, 4096).unseen > 0.1


def test_a_layer_sees_no_farther_than_its_window():
    found = reaches(CONFIGS / "gemma-3-1b.json")
    assert found["sliding_attention"].length == 512
    assert found["full_attention"].length == 32768
    assert found["sliding_attention"].trained == 512
    assert reaches(CONFIGS / "modernbert-base.json")["sliding_attention"].length == 64  # each side
    only = reaches(CONFIGS / "gemma-3-1b.json", "sliding_attention")
    assert only == {"sliding_attention": found["sliding_attention"]}


@pytest.mark.parametrize(("name", "length"), [
    ("mistral-7b-v0.1", 4096),  # all layers have a window, and the config names no types
    ("starcoder2-7b", 4096),
    ("command-r7b", 4096),  # those without a window do not rotate
    ("exaone-4.0-32b", 4096),
    ("llama-4-scout", 8192),  # chunks; full attention does not rotate
    ("mixtral-8x7b", 32768),  # a window of null
    ("qwen2.5-7b-instruct", 32768),  # a window that is not used
    ("gemma-2-9b", 8192),  # every other layer has a window
    ("gpt-oss-20b", 131072),
])  # fmt: skip
def test_layers_that_all_have_a_window_see_no_farther(name, length):
    assert reaches(CONFIGS / f"{name}.json")[None].length == length


def test_a_length_of_ones_own_replaces_that_of_the_config():
    found = reaches({"head_dim": 128, "max_position_embeddings": 4096}, length=1000)[None]
    assert (found.length, found.trained) == (1000, 4096)
    found = reaches({"head_dim": 128}, length=1000)[None]
    assert (found.length, found.trained) == (1000, 1000)


def test_layers_without_rotation_have_no_reach():
    layers = {"layer_rope_theta": [1e4, 0, 1e4, 0]}
    found = reaches({"head_dim": 64, "max_position_embeddings": 4096, **layers})
    assert isinstance(found["rope_theta=10000"], Reach)
    assert found["rope_theta=0"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"head_dim": 64},), "no max_position_embeddings; give the length"),
        (({"head_dim": 64, "max_position_embeddings": 0},), "length must be in 1"),
        (({"head_dim": 63, "max_position_embeddings": 8},), "rotary_dim must be even"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        reaches(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, -1, 1.5, True, 2**24 + 1, float("nan")])
def test_a_length_is_a_whole_number_within_the_limit(length):
    with pytest.raises(ValueError, match="length must be"):
        reach(LLAMA_2, length)


@pytest.mark.parametrize(
    "spec",
    [
        LLAMA_2,
        Rotary(head_dim=64, rotary_dim=32, start=32, layout="interleaved", sign=-1),
        Rotary(head_dim=12, axes=(0, 1, 2, 0, 1, 2)),
        Rotary(head_dim=8, schedule="axial", params={"num_axes": 2}, axes=(0, 0, 1, 1)),
        scaled("dynamic", 8, 2.0, 64),
    ],
    ids=lambda spec: spec.schedule,
)  # fmt: skip
def test_every_kind_of_spec_has_a_reach_that_is_json(spec):
    document = json.loads(json.dumps(reach(spec, 256).to_dict(), allow_nan=False))
    assert Rotary.from_dict(document["spec"]) == spec
    assert document["length"] == 256


def test_a_schedule_that_depends_on_the_length_is_taken_at_the_length():
    dynamic = scaled("dynamic", 64, 2.0, 512, base=100.0)
    inside = inv_freq(dynamic, 4096)[0].tolist()
    same = Rotary(head_dim=64, schedule="custom", params={"inv_freq": inside})
    for field in ("first_failure", "failures", "lowest", "lowest_distance", "longest_wavelength"):
        assert getattr(reach(dynamic, 4096, 512), field) == getattr(reach(same, 4096, 512), field)
    assert reach(dynamic, 4096, 512).first_failure != reach(dynamic, 512).first_failure


def test_factors_of_longrope_that_no_length_changes_are_part_of_the_training():
    """MiniCPM3 was taken as trained without them: 1 pair of less than one turn."""
    path = CONFIGS / "minicpm3-4b.json"
    spec, found = from_hf_config(path), reaches(path)[None]
    assert spec.params["short_factor"] == spec.params["long_factor"]
    periods = 2 * np.pi / inv_freq(spec, 1)[0]
    assert found.never_turning == (periods > found.trained).sum() > 1
    assert found.unseen == 0
    assert recommend_model(path, found.length).action == "keep"
    with pytest.raises(ValueError, match="cannot stretch LongRoPE whose short_factor and long_fac"):
        recommend_model(path, 2 * found.length)


def test_a_length_beyond_the_window_is_said_to_be_cut():
    mistral = {"model_type": "mistral", "head_dim": 128, "max_position_embeddings": 32768,
               "rope_theta": 1e4, "sliding_window": 4096}  # fmt: skip
    within, beyond = (reaches(mistral, length=length)[None] for length in (4096, 1_000_000))
    assert within.length == beyond.length == 4096
    assert "window" not in within.verdict
    assert "float32" not in within.verdict
    assert beyond.verdict.startswith("These layers see no farther than their window, 4,096 tokens")
    assert f"beyond position {beyond.float32_positions:,}" in beyond.verdict  # of the positions


def test_distances_go_in_ones_twos_and_fives():
    assert distances_to(1).tolist() == [1]
    assert distances_to(20).tolist() == [1, 2, 5, 10, 20]
    assert distances_to(4096).tolist()[-3:] == [1000, 2000, 4096]


@pytest.mark.parametrize(("length", "share"), [(4150, "0.4%"), (4100, "less than 0.1%")])
def test_the_table_and_the_verdict_tell_one_share_of_new_angles(length, share):
    """Their thresholds differed: "0.4%" beside "every angle did occur"."""
    found = reach(LLAMA_2, length, 4096)
    assert dict(found.rows())["angles not seen in training"].startswith(f"{share} up to")
    said = f"{share} of the angles up to {length:,} tokens did not occur in training."
    assert said in found.verdict
    assert "every angle" not in found.verdict


def test_one_token_is_no_tokens():
    found = reach(LLAMA_2, 1, 4096)
    assert dict(found.rows())["length"] == "1 token; trained at 4,096"
    assert "1 tokens" not in " ".join((found.verdict, *map(str, found.rows())))


@pytest.mark.parametrize(("name", "rest"), [
    ("deepseek-v2-lite", 128), ("deepseek-v3", 128), ("kimi-k2", 128), ("minicpm3-4b", 64),
    ("mistral-small-4-119b", 64), ("glm-5.1", 192),
])  # fmt: skip
def test_of_latent_attention_the_channels_that_rest_count(name, rest):
    """Of the rotated part alone, deepseek-v3 would have 33,457 failures, the first at 4,119."""
    path = CONFIGS / f"{name}.json"
    found = reaches(path)[None]
    spec = from_hf_config(path)
    assert found.spec == spec
    assert found.still_pairs == rest / 2
    length = min(found.length, 8192)
    cos = np.cos(np.arange(1, length + 1)[:, None] * np.abs(inv_freq(spec, found.length)[0]))
    alike = cos.sum(1) + rest / 2
    assert (alike >= 0).all()
    assert (found.first_failure, found.failures) == (None, 0)
    part = reach(spec, length, nope_head_dim=rest)
    assert part.lowest == pytest.approx(
        (np.cos(part.lowest_distance * np.abs(inv_freq(spec, length)[0])).sum() + rest / 2)
        / ((spec.head_dim + rest) / 2)
    )


def test_only_a_model_that_reads_the_unrotated_channels_has_them():
    data = {"model_type": "llama", "head_dim": 64, "qk_nope_head_dim": 128}
    assert reaches(data, length=4096)[None].still_pairs == 0
    silent = {"model_type": "deepseek_v3"}  # its class has 128
    assert reaches(silent, length=4096)[None].still_pairs == 64
    with pytest.raises(ValueError, match="qk_nope_head_dim must be a whole number"):
        reaches({**silent, "qk_nope_head_dim": 0.5}, length=4096)


@pytest.mark.parametrize(("more", "rest"), [({}, 192), ({"swa_qk_nope_head_dim": 24}, 24)])
def test_layer_types_have_unrotated_channels_of_their_own(more, rest):
    kinds = ["indexed_attention", "sliding_attention"]
    data = {"model_type": "dots3_note_text", "layer_types": kinds, "sliding_window": 512, **more}
    found = reaches(data)
    assert [found[kind].still_pairs for kind in kinds] == [64, rest / 2]
