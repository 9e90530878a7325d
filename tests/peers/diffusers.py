"""diffusers: every RoPE class of its image, video and audio models, built with its own arguments.

None of them reads a config of tests/configs: a row is a class with its arguments, and says which
axis of the grid drives each pair. A class of the package that has no row here is an error.
"""

import ast
import importlib.util
import re
import sys
from importlib.metadata import version
from pathlib import Path

import grids
import measure

measure.leave_this_folder()

import diffusers  # noqa: E402
import torch  # noqa: E402
from diffusers.models import embeddings  # noqa: E402

IMAGE, VIDEO = (3, 4), (2, 3, 4)  # tokens along each axis
PIXELS, FRAMES = torch.zeros(1, 1, 6, 8), torch.zeros(1, 1, 2, 6, 8)  # in patches of 2 by 2
CPU = torch.device("cpu")


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


def class_of(name):
    """A class by its file and name, "transformer_wan.WanRotaryPosEmbed"."""
    module, _, kind = FILES[name], *name.rpartition(".")[1:]
    if importlib.util.find_spec("transformers") is None and ".pipelines." in module:
        return alone(module, kind)
    return getattr(importlib.import_module(module), kind)


def alone(module, kind):
    """A class of a file that imports transformers, which it has no need of itself."""
    path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == kind]
    namespace = {"torch": torch, "nn": torch.nn}
    exec(compile(tree, path, "exec"), namespace)  # the class as it stands
    return namespace[kind]


def one_axis(**arguments):
    return embeddings.get_1d_rotary_pos_embed(64, torch.arange(8), use_real=True, **arguments)


def cogvideox():
    return embeddings.get_3d_rotary_pos_embed(
        64, None, (3, 4), 2, grid_type="slice", max_size=(3, 4)
    )


def easyanimate(make):
    """Its grid of 30 by 45 is cut out of a larger one, and stretched; here it is of that size."""
    return make(torch.zeros(1, 1, 2, 60, 90))


def cogview4(make):
    cos, sin = make(torch.zeros(1, 1, 512, 512))
    return (each.view(256, 256, -1)[:3, :4] for each in (cos, sin))


def kandinsky(make):
    return of_matrices(make((1, *VIDEO), [torch.arange(size) for size in VIDEO]))


def kandinsky6(make):
    return of_matrices(make([torch.arange(size) for size in VIDEO]))


def of_blocks(rotation):
    """Tables of a rotation that holds channels first: cos of all axes, then sin."""
    cos, sin = rotation[0].flatten(1).T.chunk(2, -1)
    return cos, sin


def halves(angles):
    """cos and sin of angles of all channels."""
    return angles.cos(), angles.sin()


def of_frames(make):
    """Classes that take a record of how a video is cut; here it is not."""
    layout = {"total_frames": 2, "full_frame_shape": (3, 4), "compressed_frame_shape": (3, 4),
              "num_compressed_frames": 0, "num_full_frames": 2}  # fmt: skip
    return of_complex(make(layout, CPU)["query"][0, 0])


def of_vector(make):
    """A class that rotates itself: what it makes of the first channel of each pair."""
    x = torch.zeros(1, *VIDEO, 1, 64)
    x[..., ::2] = 1
    z = make(x)[0].flatten(0, -2)
    return z[:, ::2].repeat_interleave(2, -1), z[:, 1::2].repeat_interleave(2, -1)


def layers(make):
    """Its first axis counts the layers of an image; the last one is that of a condition."""
    return of_complex(make([[(1, 3, 4)] * 3], max_txt_seq_len=1)[0][:24])


def lumina2(make):
    return of_complex(make(PIXELS, torch.ones(1, 0, dtype=torch.long))[3][0])


def qwen21(make):
    freqs = make([(1, 4, 6)], torch.ones(24, dtype=torch.bool), CPU)
    return of_complex(freqs)


def helios(make):
    return of_blocks(make(torch.arange(2)[None], 3, 4, CPU))


def text_cache(make):
    cos, sin = make(8).unbind(-1)
    return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)


def row_ids():
    return torch.arange(8)[None]


PART = 1 / 64  # from token to token, for a class that counts in whole turns
T = "transformer_"
AXES = [16, 56, 56]
LONG = {"short_factor": [1.0 + n / 16 for n in range(16)], "long_factor": [4.0] * 16}
FLUX = (f"{T}flux.FluxPosEmbed", f"{T}flux2.Flux2PosEmbed", f"{T}flux3.Flux3PosEmbed",
        f"{T}bria.BriaPosEmbed", f"{T}krea2.Krea2RotaryPosEmbed",
        f"{T}longcat_image.LongCatImagePosEmbed", f"{T}ovis_image.OvisImagePosEmbed",
        "embeddings.FluxPosEmbed")  # fmt: skip
WAN = (f"{T}wan.WanRotaryPosEmbed", f"{T}skyreels_v2.SkyReelsV2RotaryPosEmbed",
       f"{T}chronoedit.ChronoEditRotaryPosEmbed", f"{T}wan_animate.WanRotaryPosEmbed",
       f"{T}sana_video.WanRotaryPosEmbed")  # fmt: skip
HUNYUAN = (f"{T}hunyuan_video.HunyuanVideoRotaryPosEmbed",
           f"{T}hunyuan_video15.HunyuanVideo15RotaryPosEmbed",
           f"{T}motif_video.MotifVideoRotaryPosEmbed")  # fmt: skip
Z_IMAGE = (f"{T}z_image.RopeEmbedder", "controlnet_z_image.RopeEmbedder",
           f"{T}bria_fibo2.RopeEmbedder")  # fmt: skip
QWEN = (f"{T}qwenimage.QwenEmbedRope", f"{T}nucleusmoe_image.NucleusMoEEmbedRope")
# name, arguments of the class, what makes cos and sin of its instance, tokens along each axis, and
# how far apart they are where that is not 1
CLASSES = [
    *((name, (10000, AXES), lambda make: make(ids(VIDEO)), VIDEO) for name in FLUX),
    *((name, (128, (1, 2, 2), 1024), lambda make: make(
        torch.zeros(1, 1, 3, 6, 8)), (3, 3, 4)) for name in WAN),
    *((name, (2, 1, AXES), lambda make: make(FRAMES), VIDEO) for name in HUNYUAN),
    *((name, (256.0, [32, 48, 48], [64, 128, 128]), lambda make: of_complex(
        make(ids(VIDEO))), VIDEO) for name in Z_IMAGE),
    *((name, (10000, AXES), lambda make: of_complex(
        make([VIDEO], max_txt_seq_len=1)[0]), VIDEO) for name in QWEN),
    (f"{T}qwenimage.QwenEmbedLayer3DRope", (10000, AXES), layers, VIDEO),
    (f"{T}hunyuan_video_framepack.HunyuanVideoFramepackRotaryPosEmbed", (2, 1, AXES),
     lambda make: make(torch.arange(2), 6, 8, CPU), VIDEO),
    (f"{T}hunyuanimage.HunyuanImageRotaryPosEmbed", ((2, 2), (64, 64)),
     lambda make: make(PIXELS), IMAGE),
    (f"{T}cogview4.CogView4RotaryPosEmbed", (128, 2, (256, 256)), cogview4, IMAGE),
    (f"{T}glm_image.GlmImageRotaryPosEmbed", (128, 2), lambda make: make(PIXELS), IMAGE),
    (f"{T}easyanimate.EasyAnimateRotaryPosEmbed", (2, 64), easyanimate, (2, 30, 45)),
    (f"{T}cosmos.CosmosRotaryPosEmbed", (128, (128, 240, 240), (1, 2, 2), 24, (2.0, 1.0, 1.0)),
     lambda make: make(FRAMES), VIDEO),
    (f"{T}cosmos3.Cosmos3VLTextRotaryEmbedding", (128, 5e6, (24, 20, 20)),
     lambda make: make(ids(VIDEO).T[:, None], CPU, torch.float32), VIDEO),
    (f"{T}ideogram4.Ideogram4MRoPE", (128, 5000000, (24, 20, 20)),
     lambda make: make(ids(VIDEO)[None]), VIDEO),
    (f"{T}kandinsky.Kandinsky5RoPE1D", (64,), lambda make: of_matrices(
        make(torch.arange(8))), (8,)),
    (f"{T}kandinsky.Kandinsky5RoPE3D", ([16, 24, 24],), kandinsky, VIDEO),
    (f"{T}kandinsky6.Kandinsky6RoPE1D", (64,), lambda make: of_matrices(
        make(torch.arange(8))), (8,)),
    (f"{T}kandinsky6.Kandinsky6RoPE3D", ((16, 24, 24),), kandinsky6, VIDEO),
    (f"{T}kandinsky6_sr.Kandinsky6SRRoPE3D", ((16, 24, 24),), kandinsky6, VIDEO),
    (f"{T}qwenimage21.QwenImage21Rope", (10000, AXES), qwen21, (4, 6)),
    (f"{T}lumina2.Lumina2RotaryPosEmbed", (10000, [32, 32, 32]), lumina2, IMAGE),
    (f"{T}helios.HeliosRotaryPosEmbed", ((44, 42, 42), 10000.0), helios, VIDEO),
    (f"{T}sana_wm.SanaWMRotaryPosEmbed", (128, (1, 2, 2), 1024),
     lambda make: of_complex(make(VIDEO)[0, 0]), VIDEO),
    (f"{T}anyflow.AnyFlowRotaryPosEmbed", (128, (1, 2, 2), 1024), of_frames, VIDEO),
    (f"{T}anyflow_far.AnyFlowCausalRotaryPosEmbed", (128, (1, 2, 2), (1, 4, 4), 1024),
     of_frames, VIDEO),
    (f"{T}omnigen.OmniGenSuScaledRotaryEmbedding", (32, 16384, 4096, 10000, LONG),
     lambda make: make(torch.zeros(1), row_ids()), (8,)),
    (f"{T}minimax_h3.MiniMaxH3RotaryPosEmbed", (16,),
     lambda make: make(ids(VIDEO).T[None]), VIDEO),
    (f"{T}minimax_music3.MiniMaxMusic3RotaryEmbedding", (64,), lambda make: make(8, CPU), (8,)),
    (f"{T}longcat_audio_dit.AudioDiTRotaryEmbedding", (64,),
     lambda make: make(torch.zeros(1, 8, 64)), (8,)),
    (f"{T}stable_audio3.StableAudio3RotaryEmbedding", (64,),
     lambda make: halves(make(8, CPU)), (8,)),
    ("autoencoder_same.RotaryEmbedding", (64,), lambda make: halves(make(8, CPU)), (8,)),
    ("autoencoder_kl_minimax_h3.MiniMaxH3VideoRotaryPosEmbed", (60,),
     lambda make: make(ids(VIDEO)[None] * PART), VIDEO, (PART,) * 3),
    ("ltx2_diffusion_decoder.LTX2VideoVaeRotaryPosEmbed3D", (64,), of_vector, VIDEO),
    ("condition_embedder_anima.AnimaRotaryEmbedding", (64,),
     lambda make: make(torch.zeros(1), row_ids()), (8,)),
    ("text_encoder.RotaryEmbedding", (64,), text_cache, (8,)),
]  # fmt: skip
FUNCTIONS = {
    "get_1d_rotary_pos_embed(64)": (one_axis, (8,)),
    "get_1d_rotary_pos_embed(64, linear_factor=2, ntk_factor=4)": (
        lambda: one_axis(linear_factor=2.0, ntk_factor=4.0), (8,)),
    "get_1d_rotary_pos_embed(64, repeat_interleave_real=False)": (
        lambda: one_axis(repeat_interleave_real=False), (8,)),
    "get_3d_rotary_pos_embed(64), CogVideoX": (cogvideox, VIDEO),
}  # fmt: skip
ALL_HEADS = "its frequencies run over all heads: each head has others"
NOT_ONE = {
    f"{T}ltx.LTXVideoRotaryPosEmbed": ALL_HEADS,
    f"{T}ltx2.LTX2AudioVideoRotaryPosEmbed": ALL_HEADS,
    f"{T}sana_wm_refiner.SanaWMLTX2AudioVideoRotaryPosEmbed": ALL_HEADS,
    "connectors.LTX2RotaryPosEmbed1d": ALL_HEADS,
    f"{T}mochi.MochiRoPE": "learned frequencies for each head that mix all axes",
}
IS_ROPE = re.compile(
    r"^class (\w*(?:Rope|RoPE|Rotary)\w*|\w*(?:Flux|Flux2|Flux3|Bria|Image)PosEmbed)\(?", re.M
)
PATCHED = ("flux", "flux2", "hunyuan_video", "wan",  # models of tests/image_models.py
           "qwen_image", "lumina2", "cogvideox", "hidream", "ltx")  # fmt: skip
PACKAGE = Path(diffusers.__file__).parent


def classes():
    """Module of every RoPE class of the package, by its file and name."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "modular_pipelines" not in path.parts:  # steps of pipelines, which call the models'
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            for name in IS_ROPE.findall(path.read_text()):
                files[f"{path.stem}.{name}"] = ".".join(parts)
    return files


FILES = classes()


def facts(tables, sizes, steps=None):
    cos, sin = (each.reshape(-1, each.shape[-1]) for each in tables)
    return grids.measured(cos, sin, sizes, steps)


def row(name, arguments, tables_of, *sizes_and_steps):
    shown = ", ".join(map(str, arguments))
    tables = tables_of(class_of(name)(*arguments))
    return measure.row(f"{name}({shown})", **facts(tables, *sizes_and_steps))


if __name__ == "__main__":
    image_models = measure.beside("image_models")
    for name in PATCHED:
        image_models.check(getattr(image_models, name))
    without = FILES.keys() - NOT_ONE.keys() - {name for name, *_ in CLASSES}
    if without:
        raise SystemExit(f"no row for {sorted(without)}")
    rows = [measure.row(name, **facts(make(), sizes)) for name, (make, sizes) in FUNCTIONS.items()]
    rows += [row(*each) for each in CLASSES]
    rows += [measure.row(name, skipped=why) for name, why in NOT_ONE.items()]
    measure.write(sys.argv[2], "diffusers", version("diffusers"), rows)
