"""keras-hub: each config through its converter, then one turn of the attention layers it builds.

Only the first layers are built, with the sizes that bear on RoPE; everything else is made up small.
"""

import os
import sys
from importlib.metadata import version

import measure

measure.leave_this_folder()
os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np  # noqa: E402
from keras_hub.src.models.smollm3.smollm3_layers import apply_rotary_pos_emb  # noqa: E402
from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader  # noqa: E402

LAYERS = 6  # five sliding ones of Gemma, and a full one
NEVER_MADE_UP = ("rope", "rotary", "theta", "position", "head", "layer_types", "sliding",
                 "hidden_size", "num_hidden_layers")  # fmt: skip
MADE_UP = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
           "decoder_sparse_step": 1, "position_embedding_type": "rotary",
           "linear_num_value_heads": 2, "linear_num_key_heads": 2,
           "num_position_embeddings": 8,
           "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
SMALL = {"vocabulary_size": 16, "intermediate_dim": 8, "moe_intermediate_dim": 8,
         "vision_encoder": None, "audio_encoder": None}  # fmt: skip


class Filled(dict):
    """A config that answers with some small value for a size that it lacks, but for RoPE's own."""

    def __init__(self, config):
        nested = {
            k: Filled(v) for k, v in config.items() if isinstance(v, dict) and "rope" not in k
        }
        super().__init__({**config, **nested})

    def __missing__(self, key):
        if self.get("model_type") == "smollm3" and key == "layer_types":
            return ["full_attention"] * self["num_hidden_layers"]
        if self.get("model_type") == "smollm3" and key == "no_rope_layers":  # 1: has RoPE
            interval = self["no_rope_layer_interval"]
            return [int((i + 1) % interval != 0) for i in range(self["num_hidden_layers"])]
        if key in MADE_UP:
            return MADE_UP[key]
        if any(word in key for word in NEVER_MADE_UP):
            raise KeyError(key)
        return 8 if "size" in key or "num_" in key else 0.0 if "dropout" in key else False


def rows_of(name, config):
    text = config.get("text_config", config)
    filled = Filled(config)
    try:
        converter = TransformersPresetLoader(None, filled).converter
    except ValueError:
        return [measure.row(name, skipped="no converter for its model type")]
    try:
        attentions = attentions_of(built(converter, filled))
        by_label = {}
        for i, attention in enumerate(attentions):
            by_label.setdefault(label(attention, text, i), facts(attention))
    except Exception as error:
        return [measure.row(name, refused=measure.reason(error))]
    if len({str(found) for found in by_label.values()}) == 1:
        by_label = {None: next(iter(by_label.values()))}
    return [measure.row(name, layer_type, **found) for layer_type, found in by_label.items()]


def built(converter, config):
    for each in vars(converter):
        if each.endswith(("VisionEncoder", "AudioEncoder")):
            setattr(converter, each, lambda **_: None)  # of the text model only
    arguments = converter.convert_backbone_config(config)
    arguments |= {key: value for key, value in SMALL.items() if key in arguments}
    arguments["num_layers"] = min(arguments["num_layers"], LAYERS)
    if arguments.get("head_dim"):
        arguments["hidden_dim"] = 64
    else:
        arguments["num_layers"] = 1
    return converter.backbone_cls(**arguments)


def attentions_of(backbone):
    """The attention layers that rotate, in the order of the decoder."""
    found = []
    for layer in backbone.layers:
        for each in (layer, *layer._flatten_layers()):
            if rope_of(each) is not None and each not in found:
                found.append(each)
    if not found:
        raise ValueError("no attention layer with a rotary embedding")
    return found


def rope_of(attention):
    names = ("rope_layer", "rotary_embedding_layer", "rotary_embedding")
    return next((getattr(attention, name) for name in names if hasattr(attention, name)), None)


def label(attention, text, index):
    types = text.get("layer_types")
    if types:
        return types[index]
    sliding = getattr(attention, "use_sliding_window_attention", None)
    return None if sliding is None else "sliding_attention" if sliding else "full_attention"


def facts(attention):
    width = (
        next(
            (
                getattr(attention, name)
                for name in ("head_dim", "_head_dim", "head_size")
                if hasattr(attention, name)
            ),
            None,
        )
        or attention._query_dense.kernel.shape[-1]
    )
    x = np.eye(width, dtype=np.float32).reshape(1, 1, width, width)

    is_esm = type(rope_of(attention)).__name__ == "ESMRotaryEmbedding"  # counts from 0 alone

    def rotate(position):
        if is_esm:
            rows = np.zeros((1, position + 1, width, width), np.float32)
            rows[:, position] = x
            y = np.array(rope_of(attention)(rows, rows)[0])[:, position]
        elif hasattr(attention, "_apply_rope"):
            y = attention._apply_rope(x, position)
        elif hasattr(attention, "_apply_partial_rope"):
            y = attention._apply_partial_rope(x, position)
        else:
            y = rope_of(attention)(x, start_index=position)
        if isinstance(y, tuple):
            y, _ = apply_rotary_pos_emb(x, x, *y, expansion_axis=2)
        return np.array(y).reshape(width, width)

    return measure.measured(rotate, width, farthest=2**11 if is_esm else 2**30)


if __name__ == "__main__":
    rows = [row for name, config in measure.configs(sys.argv[1]) for row in rows_of(name, config)]
    measure.write(sys.argv[2], "keras-hub", version("keras-hub"), rows)
