"""Megatron's arguments, against what models of megatron-core computed when they were run."""

import json
from pathlib import Path

import numpy as np
import pytest

import rotary
from rotary import Rotary
from rotary.configs import from_megatron

RECORDED = json.loads((Path(__file__).parent / "golden" / "peers" / "megatron.json").read_text())
FLOAT32_RTOL = 1e-5
PLAIN = {"kv_channels": 128, "rotary_base": 500_000}
LATENT = {"multi_latent_attention": True, "qk_pos_emb_head_dim": 64}
# what Megatron computes and no Rotary says, or ignores without a word: refused here
REFUSED_HERE = (
    {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4},
    {"yarn_rotary_scaling_factor": 32.0, "rotary_percent": 0.5},
    {"yarn_rotary_scaling_factor": 32.0, "rotary_seq_len_interpolation_factor": 2},
    {"multi_latent_attention": True, "rotary_percent": 0.5, "rope_type": None},
)


def is_refused_here(arguments):
    return any(
        all(arguments.get(name) == value for name, value in case.items()) for case in REFUSED_HERE
    )


@pytest.mark.parametrize("row", RECORDED["rows"], ids=lambda row: str(row["arguments"])[:90])
def test_the_rotation_is_the_one_that_megatron_core_computed(row):
    if "refused" in row or is_refused_here(row["arguments"]):
        with pytest.raises(ValueError, match=r"Megatron|twice"):
            from_megatron(row["arguments"])
        return
    spec = from_megatron(row["arguments"])
    inv_freq, factor = rotary.inv_freq(spec)
    np.testing.assert_allclose(inv_freq, row["inv_freq"], rtol=FLOAT32_RTOL)
    assert factor == pytest.approx(row["attention_factor"], rel=FLOAT32_RTOL)
    assert (spec.layout, spec.out_layout) == (row["layout"], row.get("out_layout", row["layout"]))
    assert (spec.rotary_dim, spec.start, spec.sign) == (row["rotary_dim"], row["start"], 1)
    assert list(spec.axes) == row.get("axes", [])


def test_arguments_of_a_script_are_read_whole():
    """vars(args) names every argument: what is off, or of another attention, has no bearing."""
    off = {
        "use_rope_scaling": False, "rope_scaling_factor": 8.0, "rotary_percent": 1.0,
        "rotary_seq_len_interpolation_factor": None, "rope_type": None, "mrope_section": None,
        "rotary_interleaved": False, "use_rotary_position_embeddings": False, "no_rope_freq": None,
        "apply_rope_fusion": True, "max_position_embeddings": 4096, "multi_latent_attention": False,
        "qk_pos_emb_head_dim": 64, "rotary_scaling_factor": 1.0, "mscale": 1.0, "lr": 1e-4,
        "yarn_beta_fast": None, "position_embedding_type": "rope",
    }  # fmt: skip
    assert from_megatron({**off, **PLAIN}) == Rotary(head_dim=128, base=5e5)
    legacy = {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True}
    assert from_megatron({**off, **PLAIN, **legacy}) == Rotary(head_dim=128, base=5e5)


def test_yarn_of_the_scripts_has_some_names_without_a_prefix():
    names = {"rotary_scaling_factor": 32.0, "mscale": 0.7, "yarn_beta_fast": 16.0}
    given = {"kv_channels": 64, "position_embedding_type": "yarn", **names}
    assert from_megatron(given).params["factor"] == 32.0
    assert from_megatron(given).params["beta_fast"] == 16.0
    assert rotary.inv_freq(from_megatron(given))[1] == pytest.approx(0.07 * np.log(32) + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "kv_channels"),
        ({"kv_channels": 64, "rotary_bas": 1e4}, "did you mean 'rotary_base'"),
        ({"kv_channels": 64, "rotary_percent": 2.0}, r"rotary_percent must be in \(0, 1\]"),
        ({**PLAIN, "position_embedding_type": "learned_absolute"}, "no rotary embedding"),
        ({**PLAIN, "position_embedding_type": "mrope"}, "needs mrope_section"),
        ({**PLAIN, "position_embedding_type": "mrope", "mrope_section": [1, 2, 3]}, "64 pairs"),
        ({**PLAIN, "rope_type": "yarn"}, 'position_embedding_type "yarn"'),
        ({"multi_latent_attention": True}, "needs qk_pos_emb_head_dim"),
        ({**LATENT, "rope_type": "ntk"}, "'rope' and 'yarn'"),
        ({**LATENT, "use_rope_scaling": True}, "ignores use_rope_scaling"),
        ({**LATENT, "rope_scaling_factor": 40.0}, "ignores rope_scaling_factor"),
        ({"hidden_size": 64, "num_attention_heads": 0}, "num_attention_heads must be a whole"),
        ({**LATENT, "rotary_scaling_factor": "40"}, "rotary_scaling_factor must be a number"),
        ({**LATENT, "mscale": float("nan")}, "mscale must be a number, got nan"),
        ({**PLAIN, "rotary_interleaved": "no"}, "rotary_interleaved must be true or false"),
        ({**PLAIN, "mrope_section": [16, 24, 24.0]}, "mrope_section must be a list of whole"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        from_megatron(arguments)
