"""Rare refusals, and what commands say of a model that does not rotate."""

import json

import numpy as np
import pytest
from command import assert_refused

from rotary import Rotary, configs, from_hf_config, fused, plan, plots, programs
from rotary.analysis import decay
from rotary.audit import audit
from rotary.checkpoint import convert
from rotary.explorer import models

SPEC, GRID = Rotary(64), Rotary(64, axes=[0, 1] * 16)
STILL = {"model_type": "falcon", "alibi": True, "head_dim": 64, "max_position_embeddings": 2048}
Q = np.ones((1, 2, 4, 64), np.float32)
NONE = "has no rotation"
# what is called, the error, part of its sentence
CALLS = [
    (lambda: decay.checked_distances(np.zeros(2**24 + 1, np.int64)),
     ValueError, "distances must be at most 2^24 numbers, got 16,777,217"),
    (lambda: from_hf_config({"model_type": "new", "head_dim": 64}, as_type="lama"),
     ValueError, "as_type 'lama' is not known; did you mean 'llama'?"),
    (lambda: from_hf_config({"model_type": "llama", "head_dim": 64}, as_type="gemma"),
     ValueError, "model_type 'llama' is known: leave out as_type, which is 'gemma'"),
    (lambda: configs.to_hf_config({"head_dim": 64}), TypeError, "spec must be a Rotary, got dict"),
    (lambda: configs.from_megatron(["--rotary-base", 1]),
     ValueError, "arguments must be a dict of names to values"),
    (lambda: fused(Q, None, None, GRID), ValueError, "a spec with 2 axes needs positions"),
    (lambda: fused(Q, Q[:, :, :2], None, SPEC),
     ValueError, "may differ in the number of heads only"),
    (
        lambda: convert.convert_checkpoint(
            "a", "b", from_layout="half", to_layout="interleaved", verify="all"
        ),
        ValueError, "verify must be 'sample' or 'full', got 'all'",
    ),
    (lambda: plan.plan_model(STILL, 4096), ValueError, f"this config {NONE}"),
    (lambda: programs.diff(STILL), ValueError, "this config has no rotation"),
    (lambda: plots.walk(SPEC, range(8)),
     ValueError, "distances must be 1 to 7 whole numbers, got 8"),
    (lambda: models.published("llama 99"), ValueError, "is not one of the"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "sentence"), CALLS)
def test_the_sentence_says_what_was_passed(call, kind, sentence):
    with pytest.raises(kind) as caught:
        call()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parts_take_the_types_of_the_model_that_is_named():
    data = {"model_type": "new", "text_config": {"model_type": "newer", "head_dim": 64}}
    known = {"model_type": "gemma3", "text_config": {"head_dim": 64}}
    kinds = configs.layer_types(known)
    assert from_hf_config(data, kinds[0], as_type="gemma3") == from_hf_config(known, kinds[0])


# --- commands ---


@pytest.fixture
def still(tmp_path):
    file = tmp_path / "still.json"
    file.write_text(json.dumps(STILL))
    return str(file)


def test_the_audit_says_that_there_is_no_rotation():
    assert [each.found for each in audit(STILL)] == ["no rotation"]


@pytest.mark.parametrize("command", ["inspect", "reach"])
def test_tables_say_that_layers_do_not_rotate(main, still, command):
    done = main(command, still)
    assert (done.code, done.err) == (0, "")
    assert "none: these layers have no rotary embedding" in done.out


@pytest.mark.parametrize("command", ["freqs", "decay", "diff"])
def test_what_needs_a_rotation_is_refused(main, still, command):
    assert_refused(main(command, still), NONE)


def test_decay_needs_a_length(main, tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"head_dim": 64}')
    assert_refused(main("decay", str(file)), "has no max_position_embeddings; give --length")


def test_a_part_of_a_gguf_and_allow_alone_are_refused(main):
    assert_refused(main("inspect", "model.gguf", "--part", "text_config"), "model.gguf")
    assert_refused(
        main("identify", "json:loads", "--head-dim", "8", "--allow", "layout"),
        "--allow needs --check",
    )


def test_a_table_of_targets_must_have_a_line(main, tmp_path):
    file = tmp_path / "targets.csv"
    file.write_text("distance,value\n")
    done = main("design", "--curve", str(file), "--length", "1024")
    assert_refused(done, "has no line of a distance and a value")
