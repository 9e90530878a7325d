"""The 2-D experiment: positions of a grid, images at twice the size, a model that reads both."""

import numpy as np
import pytest
import torch
from experiments.e7_digits import images, model
from experiments.e7_digits import run as digits
from experiments.lab.data import Batch

pytestmark = pytest.mark.usefixtures("one_thread")


def built(encoding):
    return model.build(model.Config(encoding, layers=2, width=32, heads=2), seed=0)


def logits(made, pixels, spacing=1.0):
    with torch.no_grad():
        return made(pixels, spacing)[:, 0]


def test_the_last_900_images_are_kept_for_choosing_and_reporting_and_never_drawn():
    found = images.digits()
    parts = (found.training, found.validation, found.held_out)
    assert [len(part.tokens) for part in parts] == [897, 300, 600]
    whole = torch.cat([part.tokens for part in parts])
    assert whole.min() == 0
    assert whole.max() == 1
    names = torch.cat([part.targets for part in parts]).flatten()
    assert names.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    step = images.drawn(found.training, 897, seed=0, step=0)
    assert torch.equal(step.tokens.sum(0), found.training.tokens.sum(0)), "each of them once"
    again = images.drawn(found.training, 8, seed=1, step=2)
    assert torch.equal(again.tokens, images.drawn(found.training, 8, seed=1, step=2).tokens)
    assert not torch.equal(again.tokens, images.drawn(found.training, 8, seed=1, step=3).tokens)


def test_an_enlarged_image_is_bilinear_between_centres():
    row, column = np.indices((8, 8))
    slope = torch.from_numpy(3.0 * row - 2.0 * column).float().reshape(1, 64)
    larger = images.enlarged(Batch(slope, torch.zeros(1, 1)), 2).tokens.reshape(16, 16)
    row, column = (np.clip((part + 0.5) / 2 - 0.5, 0, 7) for part in np.indices((16, 16)))
    torch.testing.assert_close(larger, torch.from_numpy(3.0 * row - 2.0 * column).float())


def test_only_without_positions_is_the_place_of_a_pixel_not_seen():
    pixels = torch.rand(2, 64, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    for encoding in model.ENCODINGS:
        made = built(encoding)
        apart = (logits(made, pixels) - logits(made, pixels[:, order])).abs().max()
        assert (apart < 1e-5) == (encoding == "none"), f"{encoding}: {apart}"


@pytest.mark.parametrize("encoding", ["axial", "mixed"])
def test_scores_turn_by_the_distance_in_both_directions(encoding):
    made = built(encoding)
    q, k = torch.randn(2, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0)).unbind()
    q, k = (part[:, :, :1].expand_as(part) for part in (q, k))  # the same vector at every place
    for layer, turn in enumerate(made.turns(8, 1.0)):
        turned_q, turned_k = turn(q, k)
        scores = (turned_q @ turned_k.mT).detach().reshape(2, 8, 8, 8, 8)
        moved = scores[:, 1:, 2:, 1:, 2:]
        torch.testing.assert_close(moved, scores[:, :-1, :-2, :-1, :-2], atol=1e-4, rtol=1e-4)
        for head in range(2):
            assert (scores[head, 0, 0, 0] - scores[head, 0, 0, :, 0]).abs().max() > 0.1, layer


def test_axial_turns_by_rows_in_one_half_and_by_columns_in_the_other():
    made = built("axial")
    inv_freq = 100.0 ** (-np.arange(4) / 4)
    q = torch.zeros(1, 2, 256, 16)
    q[..., :8] = 1  # the first member of every pair: turned, its cos and sin
    (turned, _), spacing = made.turns(16, 0.5)[0](q, q), 0.5
    row, column = np.indices((16, 16)).reshape(2, -1, 1) * spacing
    angles = np.concatenate([row * inv_freq, column * inv_freq], axis=1)
    wanted = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).float()
    torch.testing.assert_close(turned[0, 0], wanted, atol=1e-6, rtol=0)


def test_every_second_place_of_a_scaled_grid_is_one_of_the_trained_grid():
    for encoding in ("axial", "mixed"):
        made = built(encoding)
        q = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(0))
        larger = made.turns(16, 0.5)[1](q.expand(1, 2, 256, 16), q.expand(1, 2, 256, 16))[0]
        small = made.turns(8, 1.0)[1](q.expand(1, 2, 64, 16), q.expand(1, 2, 64, 16))[0]
        larger = larger.unflatten(2, (16, 16))[:, :, ::2, ::2].flatten(2, 3)
        torch.testing.assert_close(larger, small, atol=1e-5, rtol=1e-5)


def test_directions_are_learned_in_every_layer():
    made = built("mixed")
    assert len(made.directions) == 2
    assert not torch.equal(made.directions[0], made.directions[1])
    for block in made.blocks:
        block.qkv.weight.data *= 5
    made(torch.rand(2, 64, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    for directions in made.directions:
        assert directions.grad.abs().min() > 0


def cubic(x, a=-0.75):
    """Keys' kernel, with the parameter that torch takes."""
    x = abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    return np.where(x <= 1, near, np.where(x < 2, a * (x**3 - 5 * x**2 + 8 * x - 4), 0.0))


def test_learned_places_are_interpolated_and_do_not_go_on():
    spread = np.zeros((16, 8))
    for target in range(16):
        centre = (target + 0.5) / 2 - 0.5
        for source in range(-3, 11):
            spread[target, np.clip(source, 0, 7)] += cubic(centre - source)
    places = np.random.default_rng(0).normal(size=(8, 8, 3))
    wanted = np.einsum("ri,cj,ijw->rcw", spread, spread, places).reshape(256, 3)
    larger = model.interpolated(torch.from_numpy(places.reshape(64, 3)), 16)
    np.testing.assert_allclose(larger.numpy(), wanted, atol=1e-12)
    made = built("learned")
    assert logits(made, torch.zeros(1, 256), 0.5).shape == (1, 10)
    with pytest.raises(ValueError, match=r"learned places span 8 pixels, got 16 that are 1\.0"):
        made(torch.zeros(1, 256))


def test_what_two_encodings_share_starts_equal():
    weights = {encoding: dict(built(encoding).named_parameters()) for encoding in model.ENCODINGS}
    for encoding, own in weights.items():
        extra = {"learned": {"places"}, "mixed": {"directions.0", "directions.1"}}.get(encoding)
        assert set(own) - set(weights["none"]) == (extra or set())
        for name, weight in weights["none"].items():
            assert torch.equal(own[name], weight), f"{encoding} {name}"


def test_a_share_right_and_its_bits_are_those_of_the_logits():
    held_out = images.digits().held_out
    part = Batch(held_out.tokens[:70], held_out.targets[:70])
    made = built("axial")
    found = logits(made, part.tokens).double().numpy()
    chance = np.exp(found) / np.exp(found).sum(-1, keepdims=True)
    names = part.targets[:, 0].numpy()
    with torch.no_grad():
        bits, right = digits.judged(made, part, 1.0)
        seen = digits.seen(made, part)
    assert bits == pytest.approx(-np.log2(chance[np.arange(70), names]).mean(), rel=1e-5)
    assert right == np.mean(found.argmax(-1) == names) == seen["8"]
    with torch.no_grad():
        assert "extrapolated" not in digits.seen(built("learned"), part)
