"""`from_diffusers_config`; what the classes themselves compute is in test_peers_grids.py."""

import json
import math
import re

import numpy as np
import pytest

import rotary
from rotary import positions
from rotary.configs import from_diffusers_config


def config(kind, **keys):
    return {"_class_name": kind, "_diffusers_version": "0.42.1", **keys}


def test_flux_from_a_file_and_its_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config("FluxTransformer2DModel", attention_head_dim=128)))
    params, axes = {"widths": (16, 56, 56)}, positions.sections(8, 28, 28)
    spec = rotary.Rotary(128, layout="interleaved", schedule="axial", params=params, axes=axes)
    assert from_diffusers_config(path) == from_diffusers_config(tmp_path) == spec


def test_flux_rotates_as_its_formula():
    """Su's formula with complex numbers, axis by axis."""
    spec = from_diffusers_config(config("FluxTransformer2DModel"))
    where = positions.grid(1, 3, 4, prefix=2)
    x = np.random.default_rng(0).normal(size=(1, 2, len(where), 128))
    ladders = [1e4 ** (-np.arange(0, width, 2) / width) for width in (16, 56, 56)]
    angles = np.concatenate([where[:, a : a + 1] * ladders[a] for a in range(3)], -1)
    turned = x.view(np.complex128) * np.exp(1j * angles)
    np.testing.assert_allclose(
        rotary.apply(spec, x, positions=where), turned.view(np.float64), atol=1e-6
    )


def test_a_loaded_model_knows_its_class():
    class ChromaTransformer2DModel:
        config = {"attention_head_dim": 24, "axes_dims_rope": (4, 8, 12)}  # noqa: RUF012

    assert from_diffusers_config(ChromaTransformer2DModel()).params["widths"] == (4, 8, 12)


@pytest.mark.parametrize(("kind", "other", "keys"), [
    ("ConsisIDTransformer3DModel", "CogVideoXTransformer3DModel",
     {"use_rotary_positional_embeddings": True}),
    ("ConsisIDTransformer3DModel", "CogVideoXTransformer3DModel", {}),
    ("FluxControlNetModel", "FluxTransformer2DModel", {}),
    ("QwenImageControlNetModel", "QwenImageTransformer2DModel", {}),
])  # fmt: skip
def test_a_model_that_rotates_as_another_one(kind, other, keys):
    """ConsisID is CogVideoX with faces; a control net rotates as the model that it controls."""
    assert from_diffusers_config(config(kind, **keys)) == from_diffusers_config(
        config(other, **keys)
    )


def test_a_model_without_rotation():
    assert from_diffusers_config(config("CogVideoXTransformer3DModel")) is None


@pytest.mark.parametrize(("keys", "message"), [
    (config("LlamaModel"), "_class_name 'LlamaModel' is not known.*rotary.from_model"),
    ({}, "_class_name None is not known; give the config.json of the model in the folder"),
    (config("FluxTransformer2DMode"), "did you mean 'FluxTransformer2DModel'"),
    (config("MochiTransformer3DModel"), "is not one rotation: it learns frequencies"),
    (config("LTXVideoTransformer3DModel"), "is not one rotation: .* each head has different ones"),
    (config("FluxTransformer2DModel", attention_head_dim=64),
     r"widths of its axes \(16, 56, 56\) sum to 128, its heads have 64 channels"),
    (config("FluxTransformer2DModel", axes_dims_rope=128), "must list the channels of each axis"),
    (config("FluxTransformer2DModel", axes_dims_rope=[True, 64]), "must be a whole number"),
    (config("FluxTransformer2DModel", attention_head_dim=10**9), "head_dim must be"),
    (config("WanTransformer3DModel", attention_head_dim=10**9), "head_dim must be"),
    (config("Flux2Transformer2DModel", rope_theta="big"), "rope_theta must be a number, got 'big'"),
    (config("CosmosTransformer3DModel", rope_scale=2.0), "rope_scale must hold 3 numbers"),
    (config("CosmosTransformer3DModel", rope_scale=[2.0, "a", 1]), "rope_scale must hold 3 num"),
    (config("CosmosTransformer3DModel", rope_scale=[True, 1, 1]), "rope_scale must hold 3 numbers"),
    (config("CosmosTransformer3DModel", rope_scale=[math.inf, 1, 1]), "rope_scale must hold 3 num"),
    (config("CosmosTransformer3DModel", rope_scale=[10**400, 1, 1]), "rope_scale must hold 3 num"),
    *((config("CosmosTransformer3DModel", attention_head_dim=head_dim),
       f"Cosmos.*: the widths of its axes must be even and >= 4, but heads of {head_dim} channels "
       f"give {re.escape(str(widths))}")
      for head_dim, widths in ((4, (4, 0, 0)), (6, (2, 2, 2)), (10, (6, 2, 2)))),
    (config("WanTransformer3DModel", attention_head_dim=4), r"even and >= 2, .* give \(4, 0, 0\)"),
    (config("CogView4Transformer2DModel", attention_head_dim=42), r"even .* give \(21, 21\)"),
    (config("CogVideoXTransformer3DModel", attention_head_dim=24,
            use_rotary_positional_embeddings=True), r"even and >= 2, .* give \(6, 9, 9\)"),
    (config("CogVideoXTransformer3DModel", use_rotary_positional_embeddings="false"),
     "use_rotary_positional_embeddings must be true or false, got 'false'"),
    (config(["Flux"]), r"_class_name \['Flux'\] is not known"),
    ([1], "config must be a path, a dict"),
])  # fmt: skip
def test_what_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        from_diffusers_config(keys)


def test_the_reader_of_transformers_leaves_them_to_this_one():
    """Its keys would be read as those of Llama: half layout, one axis."""
    keys = {"head_dim": 128, "num_attention_heads": 32, "rope_theta": 5e6}
    with pytest.raises(ValueError, match=r"of 'Cosmos3Omni.*read it with .*from_diffusers_config"):
        rotary.from_hf_config(config("Cosmos3OmniTransformer", **keys))
