"""Which frequencies turn in p-RoPE and in partial rotation, and that nothing else differs."""

import itertools

import numpy as np
import pytest
import torch
from experiments.e5_partial import run as partial
from experiments.lab.model import Config, build

import rotary

SMALL = Config(layers=2, width=64, heads=2)


def inv_freq(method, head_dim=32):
    return rotary.inv_freq(partial.spec_of(method, head_dim, 10_000.0))[0]


@pytest.mark.parametrize(("method", "turning"), [("p 0", 0), ("p 0.25", 4), ("p 0.5", 8),
                                                 ("p 0.75", 12), ("p 1", 16)])  # fmt: skip
def test_a_share_of_p_rope_is_the_fastest_pairs_of_the_full_ladder(method, turning):
    full = np.exp(-np.log(10_000.0) * np.arange(16) / 16)
    np.testing.assert_allclose(inv_freq(method), full * (np.arange(16) < turning), rtol=1e-14)


@pytest.mark.parametrize(("method", "rotary_dim"), [("part 0.25", 8), ("part 0.5", 16)])
def test_partial_rotation_has_the_scores_of_a_rotated_slice(method, rotary_dim):
    """Channels in another order: what GPT-NeoX pairs inside of its slice is paired across it."""
    half = rotary_dim // 2
    first, second = list(range(half)), list(range(16, 16 + half))
    order = first + second + [at for at in range(32) if at not in first + second]
    q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 40, 32)).astype(np.float32)
    sliced = rotary.Rotary(head_dim=32, rotary_dim=rotary_dim)
    a, b = rotary.apply(sliced, q[..., order], k[..., order])
    c, d = rotary.apply(partial.spec_of(method, 32, 10_000.0), q, k)
    np.testing.assert_allclose(c @ d.swapaxes(-1, -2), a @ b.swapaxes(-1, -2), atol=2e-5)
    assert np.abs(c @ d.swapaxes(-1, -2) - q @ k.swapaxes(-1, -2)).max() > 1


def test_the_ladder_of_a_part_is_spread_over_the_whole_range_again():
    np.testing.assert_allclose(inv_freq("part 0.25")[:4], [1, 0.1, 0.01, 0.001], rtol=1e-14)
    np.testing.assert_allclose(inv_freq("p 0.25")[:4], [1, 0.562341, 0.316228, 0.177828], rtol=1e-5)
    assert not inv_freq("part 0.25")[4:].any()


def test_the_whole_share_is_the_common_model_and_none_of_it_no_positions():
    tokens = torch.arange(60).view(2, 30)
    for method, encoding in ((partial.WHOLE, "rope"), ("p 0", "none")):
        common = build(Config(layers=2, width=64, heads=2, encoding=encoding), seed=3)
        assert torch.equal(partial.Turned(SMALL, method, 3)(tokens), common(tokens)), method


def test_two_methods_differ_in_their_frequencies_alone():
    tokens = torch.arange(60).view(2, 30)
    models = [partial.Turned(SMALL, method, 3) for method in partial.METHODS]
    for one, other in itertools.combinations(models, 2):
        assert one.spec != other.spec
        assert str(one.config) != str(other.config), "a checkpoint must not pass for another's"
        assert not torch.equal(one(tokens), other(tokens))
        for (name, weight), (same, its) in zip(
            one.named_parameters(), other.named_parameters(), strict=True
        ):
            assert name == same
            assert torch.equal(weight, its)


def told(method, rate, seed, bits):
    """A row as `trained` makes it."""
    spec = partial.spec_of(method, 32, 10_000.0).to_dict()
    run = {"method": method, "spec": spec, "recipe": {"learning_rate": rate, "seed": seed}}
    return {"run": run, "looks": [{"step": 9, "bits": bits}]}


def test_the_table_says_which_difference_is_resolved():
    above = {"p 0": (0.5, 0.6, 0.7), "p 0.25": (0.1, -0.1, 0.3)}
    rows = [
        told(method, rate, seed, 2 + seed + above.get(method, (0, 0, 0))[seed] + (rate == 1e-3))
        for method in partial.METHODS
        for rate, seed in ((1e-3, 0), (3e-3, 0), (3e-3, 1), (3e-3, 2))
    ]
    shown = partial.table(rows)
    assert "| p 0 | 0 | - | 0.003 | 3.600 ± 1.100 |" in shown
    assert "| p 0 minus p 1 | +0.600 [+0.352, +0.848] |" in shown
    assert "| p 0.25 minus p 1 | +0.100 [-0.397, +0.597], not resolved |" in shown
    assert "| p 1 | 16 | 35333 | 0.003 | 3.000 ± 1.000 |" in shown
    assert "| part 0.25 minus p 1 | +0.000 [+0.000, +0.000], not resolved |" in shown
