"""`patch` on models of images and video: diffusers' Flux and Wan, DINOv3, timm's Eva."""

import copy
import importlib.util
import math
import pickle

import image_models
import numpy as np
import pytest
import torch
from families import distance

import rotary
from rotary.configs import from_diffusers_config
from rotary.integrations import grids
from rotary.integrations.transformers import patch, unpatch

pytestmark = pytest.mark.usefixtures("one_thread")


def needs(package, *models):
    """Models of a package that is not among those of development: `make peers` runs them."""
    is_missing = importlib.util.find_spec(package) is None
    mark = pytest.mark.skipif(is_missing, reason=f"{package} is not installed; see make peers")
    return [pytest.param(model, marks=mark) for model in models]


DIFFUSERS = needs(
    "diffusers", image_models.flux, image_models.wan, image_models.flux2, image_models.hunyuan_video
)
OWN_TABLES = needs(
    "diffusers", image_models.qwen_image, image_models.lumina2, image_models.cogvideox,
    image_models.hidream, image_models.ltx,
)  # fmt: skip
TIMM = needs("timm", image_models.timm_dinov3, image_models.timm_eva)


if importlib.util.find_spec("torchvision") is not None:
    image_models.torchvision_operators()


@pytest.mark.parametrize("make", [image_models.dinov3, *DIFFUSERS, *TIMM])
def test_a_patched_model_gives_the_same_and_says_what_was_replaced(make, kernel_calls):
    image_models.check(make)
    assert len(kernel_calls) in (4, 8)  # for each layer: q with k, or one and then the other


@pytest.mark.parametrize("make", OWN_TABLES)
def test_a_model_whose_tables_are_not_known_gives_the_same(make, kernel_calls):
    image_models.check(make)
    assert len(kernel_calls) >= 4


@pytest.mark.parametrize("make", [image_models.dinov3, *DIFFUSERS])
def test_a_copy_is_patched_and_what_was_pickled_is_not(make, kernel_calls):
    model, run = make()
    with torch.no_grad():
        before = run(model)
        patch(model)
        other, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        unpatch(model)
        assert torch.equal(run(again), before)
        assert kernel_calls == []
        assert distance(run(other), before) < 1e-5
        assert len(kernel_calls) > 1
        unpatch(other)
        assert torch.equal(run(other), before)


@pytest.mark.parametrize("make", [image_models.dinov3, *DIFFUSERS, *OWN_TABLES])
def test_gradients_are_those_of_the_model(make):
    model, run = make()

    def gradients():
        model.zero_grad()
        run(model).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    before = gradients()
    with patch(model, exact=True):
        after = gradients()
    for name, grad in before.items():
        assert float((after[name] - grad).abs().max()) <= 2e-5 * max(1, float(grad.abs().max()))


@pytest.mark.parametrize("make", [image_models.dinov3, *DIFFUSERS])
def test_torch_compile_sees_our_operator(make, graphs):
    model, run = make()
    with torch.no_grad():
        before = run(model)
        with patch(model, exact=True):
            after = run(torch.compile(model, backend=graphs.record))
    assert distance(after, before) < 1e-5
    assert graphs.rotations() >= 2


def test_tables_of_dinov3_are_those_of_the_centres_of_its_patches():
    """(row, column) of each centre in [-1, 1], times one turn, times the frequencies."""
    model, _ = image_models.dinov3()
    with patch(model, exact=True):
        cos, sin = model.rope_embeddings(torch.zeros(1, 3, 32, 48))
    assert cos.shape == (6, 16)
    assert cos.dtype == torch.float32
    for patch_number, (row, column) in enumerate((r, c) for r in range(2) for c in range(3)):
        centre = [2 * (row + 0.5) / 2 - 1] * 4 + [2 * (column + 0.5) / 3 - 1] * 4
        for pair in range(8):
            angle = 2 * math.pi * centre[pair] * 100.0 ** (-(pair % 4) / 4)
            assert abs(float(cos[patch_number, pair]) - math.cos(angle)) < 2e-7
            assert abs(float(sin[patch_number, pair + 8]) - math.sin(angle)) < 2e-7


def test_training_of_dinov3_keeps_its_random_positions():
    model, run = image_models.dinov3()
    model.train()
    with torch.no_grad(), patch(model, exact=True):
        torch.manual_seed(3)
        ours = run(model)
        other = run(model)
    with torch.no_grad():
        torch.manual_seed(3)
        assert distance(ours, run(model)) < 1e-5
        assert distance(ours, other) > 1e-3


def test_tokens_before_the_patches_are_not_rotated(kernel_calls):
    from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb

    from rotary.integrations.rotations import convention_of, replacement_of

    q, k = image_models.random(2, 4, 11, 16), image_models.random(2, 2, 11, 16)
    angles = image_models.random(6, 8).repeat(1, 2)
    ours = replacement_of(apply_rotary_pos_emb, convention_of(apply_rotary_pos_emb))
    theirs = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    for x, y, z in zip((q, k), ours(q, k, angles.cos(), angles.sin()), theirs, strict=True):
        assert torch.equal(y[:, :, :5], x[:, :, :5])
        assert distance(y, z) < 1e-6
    assert len(kernel_calls) == 1


class Sizes(torch.nn.Module):
    """Named like a rotary embedding; what it makes are no angles."""

    def forward(self, ids):
        return ids.float(), ids.float()


class SizesRotaryEmbedding(Sizes):
    pass


def test_only_tables_of_angles_are_taken():
    assert grids.maker_of(Sizes()) is None
    assert grids.maker_of(SizesRotaryEmbedding()) is None
    assert grids.tables_of(SizesRotaryEmbedding()) is None


class FluxPosEmbed(torch.nn.Module):
    """As in Flux 2: ids may have more axes than it reads."""

    def __init__(self, widths):
        super().__init__()
        self.widths = widths

    def forward(self, ids):
        angles = [ids[:, [axis]] * 1e4 ** (-torch.arange(0, width, 2) / width)
                  for axis, width in enumerate(self.widths)]  # fmt: skip
        wide = torch.cat(angles, -1).repeat_interleave(2, -1)
        return wide.cos(), wide.sin()


def apply_rotary(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = cos[..., ::2], sin[..., ::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class FluxTransformer2DModel(torch.nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.config = {"attention_head_dim": sum(widths), "axes_dims_rope": widths}
        self.pos_embed = FluxPosEmbed(widths)

    def forward(self, x, ids):
        return apply_rotary(x, *self.pos_embed(ids))


@pytest.mark.parametrize("widths", [(4, 8, 12), (4, 4, 4, 4), (4, 4)])
def test_tables_from_ids_are_exact_whatever_the_widths(widths):
    """24 channels are as many as the example has tokens; the config may have fewer axes."""
    model = FluxTransformer2DModel(*widths)
    ids, x = torch.randint(0, 40, (7, len(widths))), image_models.random(1, 2, 7, sum(widths))
    before = model(x, ids)
    with patch(model, exact=True) as patched:
        assert str(patched) == "patched   (1): interleaved\npatched  pos_embed (1): exact tables"
        assert distance(model(x, ids), before) < 1e-5
        cos, _ = model.pos_embed(ids)
    at = ids.double().numpy()
    angles = [at[:, [axis]] * 1e4 ** -(np.arange(0, width, 2) / width)
              for axis, width in enumerate(widths)]  # fmt: skip
    want = np.cos(np.concatenate(angles, -1)).repeat(2, -1)
    assert np.abs(cos.numpy() - want).max() < 1e-7


class ImageRotaryPosEmbed(torch.nn.Module):
    """As in GLM-Image and HunyuanImage: it takes an image, and counts its patches."""

    def __init__(self, patch_size):
        super().__init__()
        self.patch_size = patch_size

    def forward(self, hidden_states):
        rows, columns = (size // 2 for size in hidden_states.shape[2:])
        ids = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        return FluxPosEmbed((8, 8))(ids)


class HunyuanImageTransformer2DModel(torch.nn.Module):
    config = {  # noqa: RUF012
        "attention_head_dim": 16, "rope_axes_dim": (8, 8), "rope_theta": 1e4,
    }  # fmt: skip

    def __init__(self, patch_size):
        super().__init__()
        self.rope = ImageRotaryPosEmbed(patch_size)

    def forward(self, x, image):
        return apply_rotary(x, *self.rope(image))


@pytest.mark.parametrize("patch_size", [2, (2, 2)])
def test_tables_from_an_image_without_frames_are_exact(patch_size):
    model = HunyuanImageTransformer2DModel(patch_size)
    x, image = image_models.random(1, 2, 35, 16), torch.zeros(1, 3, 10, 14)
    before = model(x, image)
    with patch(model, exact=True) as patched:
        assert patched.patched == [("", "interleaved"), ("rope", "exact tables")]
        assert distance(model(x, image), before) < 1e-5


class BriaEmbedND(FluxPosEmbed):
    """Bria's name for it, and that of Flux's own code."""


def test_tables_of_another_name_and_of_ids_with_more_axes_than_are_read():
    model = FluxTransformer2DModel(4, 8)
    model.pos_embed = BriaEmbedND((4, 8))
    ids, x = torch.randint(0, 40, (7, 3)), image_models.random(1, 2, 7, 12)
    before = model(x, ids)
    with patch(model, exact=True) as patched:
        assert ("pos_embed", "exact tables") in patched.patched
        assert distance(model(x, ids[:, :2]), before) < 1e-5
        assert distance(model(x, ids), before) < 1e-5


class FramesPosEmbed(FluxPosEmbed):
    def forward(self, ids, fps=None):
        return super().forward(ids if fps is None else ids / fps)


def test_tables_that_depend_on_more_than_ids_are_kept():
    model = FluxTransformer2DModel(4, 8)
    model.pos_embed = FramesPosEmbed((4, 8))
    with patch(model, exact=True) as patched:
        assert patched.skipped == [
            ("pos_embed", "keeps its own tables: its tables may depend on fps too")
        ]


@pytest.mark.parametrize("make", DIFFUSERS[1:2])
def test_tables_of_wan_that_were_cast_to_bfloat16_are_exact_again(make):
    model, _ = make()
    model = model.to(torch.bfloat16)
    assert model.rope.freqs_cos.dtype == torch.bfloat16
    with patch(model, exact=True):
        cos, sin = model.rope(torch.zeros(1, 4, 9, 8, 12))
    spec = from_diffusers_config(model)
    want = rotary.cos_sin(spec, rotary.positions.video(9, 4, 6))
    for ours, table in zip((cos, sin), want, strict=True):
        wide = torch.from_numpy(table).repeat_interleave(2, -1)
        assert torch.equal(ours, wide.reshape(1, 9 * 4 * 6, 1, 12))
