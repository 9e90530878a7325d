"""timm: its RoPE classes for vision transformers, each on a grid of 8 by 8 patches.

None of them reads a config of tests/configs: a row is a class with its arguments, and says which
axis of the grid drives each pair. DINOv3 and the pixel bands count in fractions of the image:
`positions` says where the first patch is and how far the next.
"""

import sys
from importlib.metadata import version

import grids
import measure

measure.leave_this_folder()

import torch  # noqa: E402

# torchvision from the registry is built for CUDA: without its two operators it still imports
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from timm.layers import pos_embed_sincos as rope  # noqa: E402

SIDE = 8


def index(**arguments):
    return rope.RotaryEmbeddingCat(64, in_pixels=False, **arguments).get_embed([SIDE, SIDE])


def plain():
    tables = rope.RotaryEmbedding(64, in_pixels=False).get_embed([SIDE, SIDE])
    return torch.cat([each.reshape(SIDE * SIDE, -1) for each in tables], -1)


def pixel():
    return rope.RotaryEmbeddingCat(64, in_pixels=True, max_res=7).get_embed([SIDE, SIDE])


def dinov3():
    return rope.RotaryEmbeddingDinoV3(64, temperature=100.0).get_embed([SIDE, SIDE])


def mrope():
    return rope.RotaryEmbeddingMRope(72, (12, 12, 12)).get_embed([SIDE, SIDE])


# class and arguments -> embedding, step from patch to patch, where the first is
ROTATIONS = {
    "RotaryEmbeddingCat(64, in_pixels=False)": (index, 1.0, 0.0),
    "RotaryEmbeddingCat(64, in_pixels=False, rotate_half=True)": (
        lambda: index(rotate_half=True), 1.0, 0.0),
    "RotaryEmbeddingCat(64, in_pixels=False, temperature=100)": (
        lambda: index(temperature=100.0), 1.0, 0.0),
    "RotaryEmbedding(64, in_pixels=False)": (plain, 1.0, 0.0),
    "RotaryEmbeddingCat(64, in_pixels=True, max_res=7)": (pixel, 2 / (SIDE - 1), -1.0),
    "RotaryEmbeddingDinoV3(64, temperature=100)": (dinov3, 2 / SIDE, 1 / SIDE - 1),
    "RotaryEmbeddingMRope(72, (12, 12, 12))": (mrope, 1.0, 0.0),
}  # fmt: skip
NOT_ONE = {
    "RotaryEmbeddingMixed": "learned directions for each head: each pair turns with both axes",
}


def facts(make, step, first):
    sin, cos = make().detach().chunk(2, -1)  # (patches, channels) each
    found = grids.measured(cos, sin, (SIDE, SIDE), (step, step))
    return {**found, "positions": {"first": first, "step": step}}


if __name__ == "__main__":
    image_models = measure.beside("image_models")
    for model in (image_models.timm_dinov3, image_models.timm_eva):
        image_models.check(model)
    rows = [measure.row(name, **facts(*rotation)) for name, rotation in ROTATIONS.items()]
    rows += [measure.row(name, skipped=why) for name, why in NOT_ONE.items()]
    measure.write(sys.argv[2], "timm", version("timm"), rows)
