"""RoPE classes of diffusers and timm, as they were run, and the `Rotary` that equals each."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import rotary
from rotary.positions import interleaved_sections

GOLDEN = Path(__file__).parent / "golden" / "peers"
ROWS = {
    f"{name}: {row['config']}": row
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


def unequal(widths, bases=(1e4, 1e4, 1e4), layout="interleaved"):
    """Axes of different widths, each with a ladder of its own."""
    ladders = [base ** (-np.arange(0, w, 2) / w) for w, base in zip(widths, bases, strict=True)]
    axes = tuple(axis for axis, width in enumerate(widths) for _ in range(width // 2))
    params = {"inv_freq": tuple(np.concatenate(ladders).tolist())}
    return rotary.Rotary(sum(widths), layout=layout, schedule="custom", params=params, axes=axes)


def pixels():
    """Bands from half a turn over the image to one turn over two pixels."""
    steps = np.tile(np.geomspace(1, 7 / 2, 16) * math.pi, 2)
    return rotary.Rotary(
        64, layout="interleaved", schedule="custom", params={"inv_freq": tuple(steps.tolist())},
        axes=(0,) * 16 + (1,) * 16,
    )  # fmt: skip


ntk = 1e4 * 2 ** (44 / 42)
SPECS = {
    "diffusers: get_1d_rotary_pos_embed(64)": rotary.Rotary(64, layout="interleaved"),
    "diffusers: get_1d_rotary_pos_embed(64, linear_factor=2, ntk_factor=4)": rotary.Rotary(
        64, base=4e4, layout="interleaved", schedule="linear", params={"factor": 2.0}
    ),
    "diffusers: get_1d_rotary_pos_embed(64, repeat_interleave_real=False)": rotary.Rotary(64),
    "diffusers: get_3d_rotary_pos_embed(64), CogVideoX": unequal((16, 24, 24)),
    "diffusers: CogView4RotaryPosEmbed(128, 2, (256, 256))": equal(128, layout="half"),
    "diffusers: CosmosRotaryPosEmbed(128, rope_scale=(2, 1, 1))": unequal(
        (44, 42, 42), (ntk, 1e4, 1e4), "half"
    ),
    "diffusers: FluxPosEmbed(10000, [16, 56, 56])": unequal((16, 56, 56)),
    "diffusers: HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56])": unequal(
        (16, 56, 56), (256.0, 256.0, 256.0)
    ),
    "diffusers: Kandinsky5RoPE3D([16, 24, 24])": unequal((16, 24, 24)),
    "diffusers: QwenEmbedRope(10000, [16, 56, 56])": unequal((16, 56, 56)),
    "diffusers: WanRotaryPosEmbed(128, (1, 2, 2), 1024)": unequal((44, 42, 42)),
    "diffusers: RopeEmbedder(256, [32, 48, 48]), Z-Image": unequal(
        (32, 48, 48), (256.0, 256.0, 256.0)
    ),
    "timm: RotaryEmbeddingCat(64, in_pixels=False)": equal(64),
    "timm: RotaryEmbeddingCat(64, in_pixels=False, rotate_half=True)": equal(64, layout="half"),
    "timm: RotaryEmbeddingCat(64, in_pixels=False, temperature=100)": equal(64, base=100.0),
    "timm: RotaryEmbeddingCat(64, in_pixels=True, max_res=7)": pixels(),
    "timm: RotaryEmbeddingDinoV3(64, temperature=100)": equal(
        64, base=100.0, layout="half", scale=2 * math.pi
    ),
    "timm: RotaryEmbeddingMRope(72, (12, 12, 12))": rotary.Rotary(
        72, axes=interleaved_sections(12, 12, 12)
    ),
}


def test_every_row_has_a_spec_or_a_reason():
    assert set(SPECS) == {name for name, row in ROWS.items() if "skipped" not in row}
    assert all(row["skipped"] for name, row in ROWS.items() if name not in SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_equals_the_class(name):
    row, spec = ROWS[name], SPECS[name]
    inv_freq, factor = rotary.inv_freq(spec)
    theirs = np.array(row["inv_freq"])
    turning = theirs > 0  # an image has no time: the pairs of that axis stand still
    np.testing.assert_allclose(inv_freq[turning], theirs[turning], rtol=RTOL)
    axes = np.array(spec.axes or (0,) * len(inv_freq))
    is_timeless = axes[turning].min() == 1  # the axes of the row are those of the image alone
    assert (axes[turning] - is_timeless).tolist() == np.array(row["axes"])[turning].tolist()
    assert (row["layout"], row["rotary_dim"], factor) == (spec.layout, spec.rotary_dim, 1.0)
