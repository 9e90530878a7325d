"""The dicts of `to_vllm`, by what vLLM computed when it was started with them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import rotary
from rotary import Rotary
from rotary.configs import to_vllm

GOLDEN = Path(__file__).parent / "golden"
RECORDED = json.loads((GOLDEN / "peers" / "to_vllm.json").read_text())["rows"]
FLOAT32_RTOL = 1e-5


@pytest.mark.parametrize(
    "row", RECORDED, ids=lambda row: f"{row['spec']['schedule']}-{row['seq_len']}"
)
def test_vllm_computes_the_spec_from_its_dict(row):
    spec = Rotary.from_dict(row["spec"])
    assert to_vllm(spec) == row["overrides"]  # else run tests/golden/make_to_vllm.py and vLLM
    if spec.schedule != "longrope":  # whose amplitude is said twice, for vLLM and for others
        read = rotary.from_hf_config({"head_dim": spec.head_dim, **row["overrides"]})
        ours, amplitude = rotary.inv_freq(read)
        np.testing.assert_allclose(ours, rotary.inv_freq(spec)[0], rtol=1e-12)
        assert amplitude == rotary.inv_freq(spec)[1]
    inv_freq, factor = rotary.inv_freq(spec, row["seq_len"])
    np.testing.assert_allclose(row["inv_freq"], inv_freq, rtol=FLOAT32_RTOL)
    assert row["attention_factor"] == pytest.approx(factor, rel=FLOAT32_RTOL)
    assert (row["rotary_dim"], row["start"]) == (spec.rotary_dim, spec.start)


def test_every_schedule_of_the_list_was_run(monkeypatch):
    monkeypatch.syspath_prepend(GOLDEN)
    import make_to_vllm

    written = [(row["spec"], row["seq_len"]) for row in make_to_vllm.rows()]
    assert written == [(row["spec"], row["seq_len"]) for row in RECORDED]
    sys.modules.pop("make_to_vllm")


def test_longrope_says_its_amplitude_in_the_keys_that_vllm_reads():
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    params = {**lists, "original_max_position_embeddings": 4096, "attention_factor": 1.3}
    rope = to_vllm(Rotary(head_dim=8, schedule="longrope", params=params))["rope_parameters"]
    assert (rope["short_mscale"], rope["long_mscale"]) == (1.3, 1.3)


@pytest.mark.parametrize(
    ("schedule", "params", "message"),
    [
        ("dynamic", {"factor": 2.0, "original_max_position_embeddings": 64}, "plain RoPE"),
        ("dynamic_linear", {"factor": 2.0, "original_max_position_embeddings": 64}, "no rope_type"),
        ("proportional", {"partial_rotary_factor": 0.5, "factor": 2.0}, "drops the factor"),
    ],
)
def test_what_vllm_reads_otherwise_is_refused(schedule, params, message):
    with pytest.raises(ValueError, match=message):
        to_vllm(Rotary(head_dim=8, schedule=schedule, params=params))


@pytest.mark.parametrize("schedule", ["default", "ntk"])
@pytest.mark.parametrize(
    "field",
    [
        {"layout": "interleaved"}, {"out_layout": "interleaved"}, {"sign": -1},
        {"rotary_dim": 4, "start": 4}, {"axes": (0, 0, 1, 1)},
    ],
)  # fmt: skip
def test_what_a_plain_config_cannot_say_is_refused_for_ntk_too(schedule, field):
    params = {"factor": 4.0} if schedule == "ntk" else {}
    with pytest.raises(ValueError, match="a plain config cannot say"):
        to_vllm(Rotary(head_dim=8, schedule=schedule, params=params, **field))


def test_vllm_is_given_no_int_factor():
    rope = to_vllm(Rotary(head_dim=64, schedule="linear", params={"factor": 8}))["rope_parameters"]
    assert isinstance(rope["factor"], float)
