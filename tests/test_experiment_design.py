"""The models of E9: which frequencies they have, and what is chosen by."""

import numpy as np
import pytest
import torch
from experiments.e9_design import run as designed
from experiments.lab import data
from experiments.lab.model import Config, build
from experiments.lab.sweep import Run

import rotary
from rotary import analysis


def spec_of(method):
    text = designed.Split("none", "", *torch.zeros(3, 0))
    row = designed.settings_of(designed.QUICK, text, Run(method, 1e-3, 0))["model"]
    return designed.Ladder(**row).spec


@pytest.mark.parametrize("method", designed.METHODS)
def test_a_model_has_the_frequencies_that_the_table_names(method):
    np.testing.assert_array_equal(
        rotary.inv_freq(spec_of(method))[0], rotary.inv_freq(designed.spec_of(method))[0]
    )


def test_the_designed_ladders_are_what_was_wanted():
    head = rotary.Rotary(head_dim=32)
    reach, level = (spec_of(method) for method in ("reach", "level"))
    assert analysis.certify(reach, 1024).holds
    assert analysis.misses(reach, analysis.wanted_reach(head, 128, 1024)) < 1e-6
    wanted = analysis.wanted_level(0.3, 128, 1024, power=1)
    assert analysis.certify(level, 1024, wanted.floor).holds
    assert analysis.misses(level, wanted) < 0.023
    assert analysis.first_failure(head, 1024) == 474
    assert analysis.certify(spec_of("base 58153.2"), 1024).holds


def test_models_differ_in_their_frequencies_alone():
    tokens = torch.arange(60).view(2, 30)
    small = {"layers": 1, "width": 64, "heads": 2}
    plain = build(Config(**small), seed=3)
    assert torch.equal(build(designed.Ladder(**small), seed=3)(tokens), plain(tokens))
    ladder = tuple(rotary.inv_freq(rotary.Rotary(head_dim=32))[0].tolist())
    same = build(designed.Ladder(**small, inv_freq=ladder), seed=3)
    assert torch.equal(same(tokens), plain(tokens))
    other = build(designed.Ladder(**small, inv_freq=ladder[::-1]), seed=3)
    assert not torch.equal(other(tokens), plain(tokens))


def test_what_is_learned_chosen_by_and_reported_are_apart():
    parts = designed.split("python")
    whole = data.SOURCES["python"]()
    assert b"".join(bytes(part.numpy()) for part in parts[2:]) == whole
    assert [round(20 * len(part) / len(whole)) for part in parts[2:]] == [18, 1, 1]


def test_yarn_is_that_of_the_weights_of_the_reference():
    row = {"run": {"method": designed.REFERENCE, "recipe": {"seed": 0, "learning_rate": 0.01}},
           "looks": [{"bits": 1.0, "validation": 1.0, "text of 512": 2.0,
                      "yarn text of 512": 3.0}]}  # fmt: skip
    assert designed.ends([row], designed.YARN) == {0: {"text of 512": 3.0}}
    assert designed.difference([row], designed.YARN, "text of 512").mean == 1.0
    assert rotary.inv_freq(designed.spec_of(designed.YARN))[1] > 1
