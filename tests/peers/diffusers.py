"""diffusers: RoPE classes of its image and video models, built with their own arguments.

None of them reads a config of tests/configs: a row is a class with its arguments, and says which
axis of the grid drives each pair.
"""

import sys
from importlib.metadata import version

import grids
import measure

measure.leave_this_folder()

import torch  # noqa: E402
from diffusers.models import embeddings  # noqa: E402
from diffusers.models.transformers import (  # noqa: E402
    transformer_cogview4,
    transformer_cosmos,
    transformer_flux,
    transformer_hunyuan_video,
    transformer_kandinsky,
    transformer_qwenimage,
    transformer_wan,
    transformer_z_image,
)

IMAGE, VIDEO = (3, 4), (2, 3, 4)  # tokens along each axis


def ids(sizes):
    """Positions of a grid, (tokens, axes)."""
    return torch.cartesian_prod(*(torch.arange(size) for size in sizes))


def of_complex(freqs):
    """cos and sin, each twice in a row, of complex numbers that turn neighbouring channels."""
    return freqs.real.repeat_interleave(2, -1), freqs.imag.repeat_interleave(2, -1)


def of_matrices(matrices):
    """The same of 2 x 2 matrices (..., pairs, 2, 2), which turn neighbouring channels."""
    matrices = matrices.flatten(0, -4)
    cos, sin = matrices[..., 0, 0], matrices[..., 1, 0]
    return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)


def one_axis(**arguments):
    return embeddings.get_1d_rotary_pos_embed(64, torch.arange(8), use_real=True, **arguments)


def cogvideox():
    return embeddings.get_3d_rotary_pos_embed(
        64, None, (3, 4), 2, grid_type="slice", max_size=(3, 4)
    )


def cogview4():
    rope = transformer_cogview4.CogView4RotaryPosEmbed(128, 2, rope_axes_dim=(256, 256))
    cos, sin = rope(torch.zeros(1, 1, 512, 512))
    return (each.view(256, 256, -1)[:3, :4] for each in (cos, sin))


def cosmos():
    rope = transformer_cosmos.CosmosRotaryPosEmbed(128, rope_scale=(2.0, 1.0, 1.0))
    return rope(torch.zeros(1, 1, 2, 6, 8))


def flux():
    return transformer_flux.FluxPosEmbed(10000, [16, 56, 56])(ids(VIDEO))


def hunyuan_video():
    rope = transformer_hunyuan_video.HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56])
    return rope(torch.zeros(1, 1, 2, 6, 8))


def kandinsky5():
    rope = transformer_kandinsky.Kandinsky5RoPE3D([16, 24, 24])
    return of_matrices(rope((1, *VIDEO), [torch.arange(size) for size in VIDEO]))


def qwen_image():
    rope = transformer_qwenimage.QwenEmbedRope(10000, [16, 56, 56])
    return of_complex(rope([VIDEO], max_txt_seq_len=1)[0])


def wan():
    rope = transformer_wan.WanRotaryPosEmbed(128, (1, 2, 2), 1024)
    return rope(torch.zeros(1, 1, 2, 6, 8))


def z_image():
    rope = transformer_z_image.RopeEmbedder(256.0, [32, 48, 48], [64, 128, 128])
    return of_complex(rope(ids(VIDEO)))


ROTATIONS = {
    "get_1d_rotary_pos_embed(64)": (one_axis, (8,)),
    "get_1d_rotary_pos_embed(64, linear_factor=2, ntk_factor=4)": (
        lambda: one_axis(linear_factor=2.0, ntk_factor=4.0), (8,)),
    "get_1d_rotary_pos_embed(64, repeat_interleave_real=False)": (
        lambda: one_axis(repeat_interleave_real=False), (8,)),
    "get_3d_rotary_pos_embed(64), CogVideoX": (cogvideox, VIDEO),
    "CogView4RotaryPosEmbed(128, 2, (256, 256))": (cogview4, IMAGE),
    "CosmosRotaryPosEmbed(128, rope_scale=(2, 1, 1))": (cosmos, VIDEO),
    "FluxPosEmbed(10000, [16, 56, 56])": (flux, VIDEO),
    "HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56])": (hunyuan_video, VIDEO),
    "Kandinsky5RoPE3D([16, 24, 24])": (kandinsky5, VIDEO),
    "QwenEmbedRope(10000, [16, 56, 56])": (qwen_image, VIDEO),
    "WanRotaryPosEmbed(128, (1, 2, 2), 1024)": (wan, VIDEO),
    "RopeEmbedder(256, [32, 48, 48]), Z-Image": (z_image, VIDEO),
}  # fmt: skip
NOT_ONE = {
    "LTXVideoRotaryPosEmbed": "its frequencies run over all heads: each head has others",
    "MochiRoPE": "learned frequencies for each head that mix all axes",
}


def facts(make, sizes):
    cos, sin = make()
    return grids.measured(cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1]), sizes)


if __name__ == "__main__":
    rows = [measure.row(name, **facts(*rotation)) for name, rotation in ROTATIONS.items()]
    rows += [measure.row(name, skipped=why) for name, why in NOT_ONE.items()]
    measure.write(sys.argv[2], "diffusers", version("diffusers"), rows)
