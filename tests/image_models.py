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
