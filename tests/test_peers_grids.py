"""RoPE classes of diffusers and timm, as they were run, and the `Rotary` that equals each."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import rotary
from rotary.configs import from_diffusers_config
from rotary.positions import interleaved_sections, sections

GOLDEN = Path(__file__).parent / "golden" / "peers"
ROWS = {
    row["config"]: row
    for name in ("diffusers", "timm")
    for row in json.loads((GOLDEN / f"{name}.json").read_text())["rows"]
}
RTOL = 1e-6  # angles of one step in float32


def equal(head_dim, base=1e4, layout="interleaved", scale=1.0):
    """Two axes that share the channels evenly."""
    axes = (0,) * (head_dim // 4) + (1,) * (head_dim // 4)
    if scale == 1.0:
        params = {"schedule": "axial", "params": {"num_axes": 2}}
    else:
        steps = np.tile(base ** (-np.arange(0, head_dim // 2, 2) / (head_dim // 2)), 2) * scale
        params = {"schedule": "custom", "params": {"inv_freq": tuple(steps.tolist())}}
    return rotary.Rotary(head_dim, base=base, layout=layout, axes=axes, **params)


def axial(*widths, base=1e4, layout="interleaved"):
    """Axes of widths of their own, each with a ladder of its own."""
    return rotary.Rotary(
        sum(widths), base=base, layout=layout, schedule="axial", params={"widths": widths},
        axes=sections(*(width // 2 for width in widths)),
    )  # fmt: skip


def turns():
    """Three axes of 20 channels that count whole turns, with base 100."""
    steps = np.tile(2 * math.pi * 100.0 ** (-np.arange(10) / 10), 3).tolist()
    return rotary.Rotary(
        60, schedule="custom", params={"inv_freq": steps}, axes=sections(10, 10, 10)
    )


def longrope():
    """OmniGen's Phi-3 with 16 384 tokens for 4096."""
    params = {"short_factor": [1.0 + n / 16 for n in range(16)], "long_factor": [4.0] * 16,
              "original_max_position_embeddings": 4096, "factor": 4.0}  # fmt: skip
    return rotary.Rotary(32, schedule="longrope", params=params)


def pixels():
    """Bands from half a turn over the image to one turn over two pixels."""
    steps = np.tile(np.geomspace(1, 7 / 2, 16) * math.pi, 2)
    return rotary.Rotary(
        64, layout="interleaved", schedule="custom", params={"inv_freq": tuple(steps.tolist())},
        axes=(0,) * 16 + (1,) * 16,
    )  # fmt: skip


def of_model(name, **config):
    """By the config of a diffusers model of this class."""
    return from_diffusers_config({"_class_name": name, **config})


one = rotary.Rotary(64)
flux = axial(16, 56, 56)
wan = axial(44, 42, 42)
cogvideox = axial(16, 24, 24)
qwen3_vl = rotary.Rotary(128, base=5e6, axes=interleaved_sections(24, 20, 20))
# class, without its arguments, -> the spec; where diffusers has a model of it by its config
SPECS = {
    "get_1d_rotary_pos_embed(64)": rotary.Rotary(64, layout="interleaved"),
    "get_1d_rotary_pos_embed(64, linear_factor=2, ntk_factor=4)": rotary.Rotary(
        64, base=4e4, layout="interleaved", schedule="linear", params={"factor": 2.0}),
    "get_1d_rotary_pos_embed(64, repeat_interleave_real=False)": one,
    "get_3d_rotary_pos_embed(64), CogVideoX": of_model(
        "CogVideoXTransformer3DModel", use_rotary_positional_embeddings=True),
    "transformer_flux.FluxPosEmbed": of_model("FluxTransformer2DModel"),
    "transformer_flux2.Flux2PosEmbed": flux,
    "transformer_flux3.Flux3PosEmbed": flux,
    "transformer_bria.BriaPosEmbed": of_model("BriaTransformer2DModel"),
    "transformer_krea2.Krea2RotaryPosEmbed": of_model(
        "Krea2Transformer2DModel", axes_dims_rope=[16, 56, 56], rope_theta=10000),
    "transformer_longcat_image.LongCatImagePosEmbed": of_model("LongCatImageTransformer2DModel"),
    "transformer_ovis_image.OvisImagePosEmbed": of_model("OvisImageTransformer2DModel"),
    "embeddings.FluxPosEmbed": flux,
    "transformer_wan.WanRotaryPosEmbed": of_model("WanTransformer3DModel"),
    "transformer_skyreels_v2.SkyReelsV2RotaryPosEmbed": of_model("SkyReelsV2Transformer3DModel"),
    "transformer_chronoedit.ChronoEditRotaryPosEmbed": of_model("ChronoEditTransformer3DModel"),
    "transformer_wan_animate.WanRotaryPosEmbed": of_model("WanAnimateTransformer3DModel"),
    "transformer_sana_video.WanRotaryPosEmbed": of_model(
        "SanaVideoTransformer3DModel", attention_head_dim=128),
    "transformer_hunyuan_video.HunyuanVideoRotaryPosEmbed": of_model(
        "HunyuanVideoTransformer3DModel"),
    "transformer_hunyuan_video15.HunyuanVideo15RotaryPosEmbed": of_model(
        "HunyuanVideo15Transformer3DModel"),
    "transformer_motif_video.MotifVideoRotaryPosEmbed": of_model("MotifVideoTransformer3DModel"),
    "transformer_hunyuan_video_framepack.HunyuanVideoFramepackRotaryPosEmbed": of_model(
        "HunyuanVideoFramepackTransformer3DModel"),
    "transformer_hunyuanimage.HunyuanImageRotaryPosEmbed": of_model(
        "HunyuanImageTransformer2DModel"),
    "transformer_z_image.RopeEmbedder": of_model("ZImageTransformer2DModel"),
    "controlnet_z_image.RopeEmbedder": of_model("ZImageTransformer2DModel"),
    "transformer_bria_fibo2.RopeEmbedder": of_model("BriaFibo2Transformer2DModel"),
    "transformer_qwenimage.QwenEmbedRope": of_model("QwenImageTransformer2DModel"),
    "transformer_qwenimage.QwenEmbedLayer3DRope": of_model("QwenImageTransformer2DModel"),
    "transformer_qwenimage21.QwenImage21Rope": of_model("QwenImage21Transformer2DModel"),
    "transformer_nucleusmoe_image.NucleusMoEEmbedRope": of_model(
        "NucleusMoEImageTransformer2DModel"),
    "transformer_cogview4.CogView4RotaryPosEmbed": of_model(
        "CogView4Transformer2DModel", attention_head_dim=128),
    "transformer_glm_image.GlmImageRotaryPosEmbed": of_model(
        "GlmImageTransformer2DModel", attention_head_dim=128),
    "transformer_easyanimate.EasyAnimateRotaryPosEmbed": of_model(
        "EasyAnimateTransformer3DModel"),
    "transformer_cosmos.CosmosRotaryPosEmbed": of_model("CosmosTransformer3DModel"),
    "transformer_cosmos3.Cosmos3VLTextRotaryEmbedding": qwen3_vl,
    "transformer_ideogram4.Ideogram4MRoPE": qwen3_vl,
    "transformer_kandinsky.Kandinsky5RoPE1D": rotary.Rotary(64, layout="interleaved"),
    "transformer_kandinsky.Kandinsky5RoPE3D": of_model("Kandinsky5Transformer3DModel"),
    "transformer_kandinsky6.Kandinsky6RoPE1D": rotary.Rotary(64, layout="interleaved"),
    "transformer_kandinsky6.Kandinsky6RoPE3D": of_model(
        "Kandinsky6Transformer3DModel", axes_dims=[16, 24, 24]),
    "transformer_kandinsky6_sr.Kandinsky6SRRoPE3D": of_model("Kandinsky6SRTransformer3DModel"),
    "transformer_lumina2.Lumina2RotaryPosEmbed": of_model("Lumina2Transformer2DModel"),
    "transformer_helios.HeliosRotaryPosEmbed": of_model("HeliosTransformer3DModel"),
    "transformer_sana_wm.SanaWMRotaryPosEmbed": wan,
    "transformer_anyflow.AnyFlowRotaryPosEmbed": of_model("AnyFlowTransformer3DModel"),
    "transformer_anyflow_far.AnyFlowCausalRotaryPosEmbed": of_model("AnyFlowFARTransformer3DModel"),
    "transformer_omnigen.OmniGenSuScaledRotaryEmbedding": longrope(),
    "transformer_minimax_h3.MiniMaxH3RotaryPosEmbed": axial(32, 32, 32, layout="half"),
    "transformer_minimax_music3.MiniMaxMusic3RotaryEmbedding": one,
    "transformer_longcat_audio_dit.AudioDiTRotaryEmbedding": rotary.Rotary(64, base=1e5),
    "transformer_stable_audio3.StableAudio3RotaryEmbedding": one,
    "autoencoder_same.RotaryEmbedding": one,
    "autoencoder_kl_minimax_h3.MiniMaxH3VideoRotaryPosEmbed": turns(),
    "ltx2_diffusion_decoder.LTX2VideoVaeRotaryPosEmbed3D": cogvideox,
    "condition_embedder_anima.AnimaRotaryEmbedding": one,
    "text_encoder.RotaryEmbedding": rotary.Rotary(64, layout="interleaved"),
    "RotaryEmbeddingCat(64, in_pixels=False)": equal(64),
    "RotaryEmbeddingCat(64, in_pixels=False, rotate_half=True)": equal(64, layout="half"),
    "RotaryEmbeddingCat(64, in_pixels=False, temperature=100)": equal(64, base=100.0),
    "RotaryEmbeddingCat(64, in_pixels=True, max_res=7)": pixels(),
    "RotaryEmbedding(64, in_pixels=False)": equal(64),
    "RotaryEmbeddingDinoV3(64, temperature=100)": equal(
        64, base=100.0, layout="half", scale=2 * math.pi),
    "RotaryEmbeddingMRope(72, (12, 12, 12))": rotary.Rotary(
        72, axes=interleaved_sections(12, 12, 12)),
}  # fmt: skip
NAMES = {row: next((name for name in (row, row.split("(")[0]) if name in SPECS), row)
         for row in ROWS}  # fmt: skip


def kinds(rows):
    """The classes of some rows, without the functions."""
    return {name.split("(")[0] for name in rows if not name.startswith("get_")}


def test_every_row_has_a_spec_or_a_reason():
    equal = {NAMES[name] for name, row in ROWS.items() if "skipped" not in row}
    assert equal == set(SPECS)
    assert all(row["skipped"] for name, row in ROWS.items() if NAMES[name] not in SPECS)


def test_nine_of_ten_classes_are_equal():
    equal = kinds(name for name, row in ROWS.items() if "skipped" not in row)
    assert len(equal) >= 0.9 * len(kinds(ROWS))
    assert (len(equal), len(kinds(ROWS))) == (55, 61)


@pytest.mark.parametrize("name", [name for name in ROWS if NAMES[name] in SPECS])
def test_a_spec_equals_the_class(name):
    row, spec = ROWS[name], SPECS[NAMES[name]]
    inv_freq, factor = rotary.inv_freq(spec, *([8] if spec.depends_on_length else []))
    theirs = np.array(row["inv_freq"])
    turning = theirs > 0  # an image has no time: the pairs of that axis stand still
    np.testing.assert_allclose(inv_freq[turning], theirs[turning], rtol=RTOL)
    axes = np.array(spec.axes or (0,) * len(inv_freq))
    is_timeless = axes[turning].min() == 1  # the axes of the row are those of the image alone
    assert (axes[turning] - is_timeless).tolist() == np.array(row["axes"])[turning].tolist()
    assert (row["layout"], row["rotary_dim"]) == (spec.layout, spec.rotary_dim)
    assert row["attention_factor"] == pytest.approx(factor, abs=RTOL)
