"""The layout that weights look to be in: trained ones, moved ones, and such as show nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import OTHER

from rotary.checkpoint.layout import layout_of_norms
from rotary.layouts import channel_permutation

TRAINED = json.loads((Path(__file__).parent / "golden" / "trained_norms.json").read_text())
LAYOUTS = {"llama": "half", "qwen3": "half", "gptj": "interleaved", "cohere": "interleaved"}


@pytest.mark.parametrize("family", LAYOUTS)
def test_trained_models_are_seen_in_their_layout_and_moved_ones_in_the_other(family):
    layout, norms = LAYOUTS[family], np.array(TRAINED[family])
    assert layout_of_norms(norms).layout == layout
    order = channel_permutation(norms.shape[1], layout, OTHER[layout])
    assert layout_of_norms(norms[:, order]).layout == OTHER[layout]


@pytest.mark.parametrize("family", LAYOUTS)
def test_what_is_seen_does_not_depend_on_the_size_of_the_weights(family):
    norms = np.array(TRAINED[family])
    assert layout_of_norms(norms * 1e-3) == layout_of_norms(norms)


@pytest.mark.parametrize("width", [8, 32, 128])
@pytest.mark.parametrize("heads", [12, 40])
def test_norms_without_an_order_show_nothing(heads, width):
    random = np.random.default_rng(heads + width)
    for spread in (0.01, 0.3, 1.0):
        for _ in range(200):
            assert layout_of_norms(np.exp(random.normal(0, spread, (heads, width)))) is None


def test_few_heads_narrow_heads_and_equal_norms_show_nothing():
    norms = np.array(TRAINED["llama"])
    assert layout_of_norms(norms[:11]) is None
    assert layout_of_norms(norms[:, :6]) is None
    assert layout_of_norms(np.ones((40, 64))) is None


def test_norms_that_depend_on_the_frequency_by_less_than_their_noise_show_nothing():
    random = np.random.default_rng(3)
    falling = np.linspace(0.05, -0.05, 32)
    logs = np.tile(falling, 2) + random.normal(0, 0.5, (12, 64))
    assert layout_of_norms(np.exp(logs)) is None
