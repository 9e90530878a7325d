"""Small models of images and video whose rotation `patch` replaces, and one forward of each.

tests/test_patch_images.py runs those that are installed; tests/peers/diffusers.py and timm.py run
theirs in an environment that has them.
"""

import torch


def torchvision_operators():
    """torchvision of the registry is built for CUDA: it does not import without these two."""
    _LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
    for name in ("nms", "qnms"):
        _LIBRARIES[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_LIBRARIES = []  # what is defined goes with the object


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def scaled(model):
    """The model with weights large enough for attention to depend on positions."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15, generator=generator)
    return model.eval()


def flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    rows, columns = torch.arange(12) // 4, torch.arange(12) % 4
    inputs = {
        "hidden_states": random(1, 12, 4), "encoder_hidden_states": random(1, 5, 32),
        "pooled_projections": random(1, 32), "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack((rows * 0, rows, columns), -1).float(),
        "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip
    return scaled(model), lambda model: model(**inputs).sample


def flux2():
    """Four axes, of which its text has ids on the last."""
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 4, 4),
        timestep_guidance_channels=16,
    )  # fmt: skip
    rows, columns, still = torch.arange(12) // 4, torch.arange(12) % 4, torch.zeros(12)
    inputs = {
        "hidden_states": random(1, 12, 4), "encoder_hidden_states": random(1, 5, 32),
        "timestep": torch.tensor([0.5]), "guidance": torch.tensor([0.5]),
        "img_ids": torch.stack((still, rows, columns, still), -1)[None],
        "txt_ids": torch.arange(5.0)[None, :, None] * torch.tensor([0, 0, 0, 1]),
    }  # fmt: skip
    return scaled(model), lambda model: model(**inputs).sample


def hunyuan_video():
    """Its processor imports the rotation each time that it is called."""
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": random(1, 4, 3, 10, 14), "timestep": torch.tensor([3]),
        "encoder_hidden_states": random(1, 5, 16), "encoder_attention_mask": torch.ones(1, 5),
        "pooled_projections": random(1, 8), "guidance": torch.tensor([1.0]),
    }  # fmt: skip
    return scaled(model), lambda model: model(**inputs).sample


def wan():
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    x, text = random(1, 4, 3, 8, 12), random(1, 7, 16)

    def run(model):
        dtype = model.blocks[0].attn1.to_q.weight.dtype
        return model(x.to(dtype), torch.tensor([3]), text.to(dtype)).sample

    return scaled(model), run


def qwen_image():
    """Tables of complex numbers, two for image and text, from a module that needs their sizes."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": random(1, 24, 16), "encoder_hidden_states": random(1, 5, 16),
        "encoder_hidden_states_mask": torch.ones(1, 5, dtype=torch.long),
        "timestep": torch.tensor([0.5]), "img_shapes": [(1, 4, 6)],
    }  # fmt: skip
    return scaled(model), lambda model: model(**inputs).sample


def lumina2():
    """Tables of complex numbers in float64; one key for three queries."""
    from diffusers import Lumina2Transformer2DModel

    model = Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=2,
        num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1, multiple_of=2,
        axes_dim_rope=(4, 2, 2), axes_lens=(64, 64, 64), cap_feat_dim=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": random(1, 4, 8, 12), "encoder_hidden_states": random(1, 5, 16),
        "timestep": torch.tensor([0.5]),
        "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
    }  # fmt: skip
    return scaled(model), lambda model: model(**inputs).sample


def cogvideox():
    """Its pipeline makes the tables."""
    from diffusers import CogVideoXTransformer3DModel
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    model = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=8, text_embed_dim=8, num_layers=2, sample_width=12, sample_height=8,
        sample_frames=9, max_text_seq_length=5, use_rotary_positional_embeddings=True,
    )  # fmt: skip
    inputs = {
        "hidden_states": random(1, 3, 4, 8, 12), "encoder_hidden_states": random(1, 5, 8),
        "timestep": torch.tensor([3]),
        "image_rotary_emb": get_3d_rotary_pos_embed(
            16, None, (4, 6), 3, grid_type="slice", max_size=(4, 6)),
    }  # fmt: skip
    return scaled(model), lambda model: model(**inputs).sample


def hidream():
    """Tables of rotation matrices."""
    from diffusers import HiDreamImageTransformer2DModel

    model = HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=8, num_attention_heads=4, caption_channels=[8, 4], text_emb_dim=8,
        num_routed_experts=2, num_activated_experts=2, axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16), llama_layers=(0, 1), force_inference_output=True,
    )  # fmt: skip
    inputs = {
        "hidden_states": random(1, 4, 16, 16), "encoder_hidden_states_t5": random(1, 5, 8),
        "encoder_hidden_states_llama3": random(2, 1, 5, 4), "pooled_embeds": random(1, 8),
        "timesteps": torch.tensor([3]),
    }  # fmt: skip
    return scaled(model), lambda model: model(**inputs).sample


def ltx():
    """Rotates one row with the channels of all heads."""
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, num_layers=2, caption_channels=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": random(1, 48, 4), "encoder_hidden_states": random(1, 5, 16),
        "timestep": torch.tensor([3]), "num_frames": 2, "height": 4, "width": 6,
        "encoder_attention_mask": torch.ones(1, 5, dtype=torch.bool),
    }  # fmt: skip
    return scaled(model), lambda model: model(**inputs).sample


def dinov3():
    """Of transformers, with a class token and 4 registers that are not rotated."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config = DINOv3ViTConfig(
        hidden_size=64, num_attention_heads=4, intermediate_size=64, num_hidden_layers=2,
        image_size=64, num_register_tokens=4, layer_norm_eps=1e-6, layerscale_value=1.0,
        drop_path_rate=0.0, pos_embed_shift=0.3, pos_embed_jitter=2.0, pos_embed_rescale=2.0,
    )  # fmt: skip
    x = random(2, 3, 48, 64)
    return scaled(DINOv3ViTModel(config)), lambda model: model(x).last_hidden_state


def timm_dinov3():
    """timm's Eva as its DINOv3 models are made."""
    return _eva(rope_type="dinov3", rope_rotate_half=True)


def timm_eva():
    """timm's Eva with neighbours as pairs."""
    return _eva(rope_type="cat", attn_type="rope")


def _eva(**kind):
    from timm.models.eva import Eva

    model = Eva(
        img_size=64, patch_size=16, embed_dim=64, depth=2, num_heads=4, use_rot_pos_emb=True,
        use_abs_pos_emb=False, num_classes=5, dynamic_img_size=True, **kind,
    )  # fmt: skip
    x = random(2, 3, 48, 64)
    return scaled(model), lambda model: model(x)


UNKNOWN = "keeps its tables: rotary does not know what makes them"
# model -> what `patch(exact=True)` says of it
REPORTS = {
    flux: """\
patched  transformer_blocks.*.attn.processor (1): interleaved
patched  single_transformer_blocks.*.attn.processor (1): interleaved
patched  pos_embed (1): exact tables""",
    flux2: """\
patched  transformer_blocks.*.attn.processor (1): interleaved
patched  single_transformer_blocks.*.attn.processor (1): interleaved
patched  pos_embed (1): exact tables""",
    hunyuan_video: """\
patched  transformer_blocks.*.attn.processor (1): interleaved
patched  single_transformer_blocks.*.attn.processor (1): interleaved
patched  rope (1): exact tables""",
    wan: """\
patched  blocks.*.attn1.processor (2): interleaved
patched  blocks.*.attn2.processor (2): interleaved
patched  rope (1): exact tables""",
    qwen_image: """\
patched  transformer_blocks.*.attn.processor (2): half and interleaved, checks its tables
skipped  pos_embed (1): keeps its own tables: could not be tried""",
    lumina2: f"""\
patched  noise_refiner.*.attn.processor (1): half and interleaved, checks its tables
patched  context_refiner.*.attn.processor (1): half and interleaved, checks its tables
patched  layers.*.attn.processor (2): half and interleaved, checks its tables
skipped  rope_embedder (1): get_1d_rotary_pos_embed takes (dim, pos, theta, use_real, \
linear_factor, ntk_factor, repeat_interleave_real, freqs_dtype), not x or q, k and then cos, sin
skipped  noise_refiner.*.attn.processor (1): {UNKNOWN}
skipped  context_refiner.*.attn.processor (1): {UNKNOWN}
skipped  layers.*.attn.processor (2): {UNKNOWN}""",
    cogvideox: f"""\
patched  transformer_blocks.*.attn1.processor (2): half and interleaved, checks its tables
skipped  transformer_blocks.*.attn1.processor (2): {UNKNOWN}""",
    hidream: f"""\
patched  double_stream_blocks.*.block.attn1.processor (1): interleaved, checks its tables
patched  single_stream_blocks.*.block.attn1.processor (1): interleaved, checks its tables
skipped  double_stream_blocks.*.block.attn1.processor (1): {UNKNOWN}
skipped  single_stream_blocks.*.block.attn1.processor (1): {UNKNOWN}""",
    ltx: """\
patched  transformer_blocks.*.attn1.processor (2): interleaved, checks its tables
patched  transformer_blocks.*.attn2.processor (2): interleaved, checks its tables
skipped  rope (1): keeps its own tables: could not be tried""",
    dinov3: """\
patched  model.layer.*.attention (2): half
patched  rope_embeddings (1): exact tables""",
    timm_dinov3: """\
patched  blocks.*.attn (2): half
skipped  rope (1): keeps its own tables: it does not say which positions its tables are of""",
    timm_eva: """\
patched  blocks.*.attn (2): interleaved
skipped  rope (1): keeps its own tables: it does not say which positions its tables are of""",
}


def check(make):
    """Patch a model, with its own and with exact tables, compare what it gives, and unpatch it."""
    from rotary.integrations.transformers import patch

    model, run = make()
    with torch.no_grad():
        before = run(model)
        for exact in (False, True):
            with patch(model, exact=exact) as patched:
                after = run(model)
            far = float((after - before).abs().max() / before.abs().max())
            if far > 1e-5:
                raise AssertionError(f"{make.__name__} gives numbers {far} off after patch")
            if exact and str(patched) != REPORTS[make]:
                raise AssertionError(f"patch says of {make.__name__}: {patched}")
        if not torch.equal(run(model), before):
            raise AssertionError(f"{make.__name__} is not what it was after unpatch")
