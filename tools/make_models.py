"""Write `models.json`, the one table of model knowledge, and `without_rope.json`; run as a script.

What a config takes where it is silent is asked from the config classes of transformers. What only a
model's code says (layout, direction, slice, how position axes are dealt out) is in `CODE` below,
read in the modelling files and proved by `tests/test_parity.py`, which compares every class.
"""

import argparse
import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from rotary.configs.entries import TEXT_PARTS

FOLDER = Path(__file__).parents[1] / "src" / "rotary" / "configs"
TABLE, WITHOUT_ROPE = FOLDER / "models.json", FOLDER / "without_rope.json"
MODELING = Path(transformers.__file__).parent / "models"
ROTARY = re.compile(r"Rotary(Positional)?Embedding$|RopePositionEmbedding$")
# in the code of a model that may rotate, itself or by a model that its config chooses
MAY_ROTATE = re.compile(
    r"rotary|rope\b|rope_|rotate_|Auto(Model|Backbone)|load_backbone|timm", re.IGNORECASE
)
# their files have a rotation, but the attention of the text calls none
STANDS_STILL = {"glm5_next_text", "inkling2_text", "jamba", "kimi_linear", "nemotron_h"}
CLASS = re.compile(
    r"^(class (\w+)\(.*\n(?:[ \t].*\n|\n)*)", re.MULTILINE
)  # its source, and its name
SIZES = ("hidden_size", "num_attention_heads", "max_position_embeddings")
SHARE, THETA = "partial_rotary_factor", "rope_theta"
LISTS = ("layer_rope_theta", "rope_scaling_layers")
READ = {"rope_parameters", "rope_scaling", THETA, SHARE, "layer_rope_theta", "rope_scaling_layers"}
# what a key must be for the model to rotate at all
SWITCHES = {
    "clvp_encoder": {"use_rotary_embedding": True},
    "esm": {"position_embedding_type": "rotary"},
    "falcon": {"alibi": False},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "seamless_m4t": {"position_embeddings_type": "rotary"},
    "wav2vec2-bert": {"position_embeddings_type": "rotary"},
    "wav2vec2-conformer": {"position_embeddings_type": "rotary"},
    "zamba2": {"use_mem_rope": True},
}

INTERLEAVED = {"layout": "interleaved"}
MIXED = {"layout": "interleaved", "out_layout": "half"}
DEEPSEEK = {**MIXED, "layout_key": "rope_interleave", "plain_head_dim": "wins"}
GRID_TYPES = ["default", "axial"]  # for a vision tower, both mean what its class always makes
TWO_AXES = {"axes": "blocks", "num_axes": 2, "only": GRID_TYPES}
GEMMA = {"sliding_attention": {THETA: "rope_local_base_freq"}, "full_attention": {THETA: THETA}}
BERT = {
    "sliding_attention": {THETA: "local_rope_theta"},
    "full_attention": {THETA: "global_rope_theta"},
}
WIDER = {
    "head_dim": 256,
    "layer_names": {"full_attention": {"head_dim": "global_head_dim"}},
    "layers": {"full_attention": {"head_dim": 512}},
}
SLIDING = {"windowed": "sliding_window"}
FIXED = {
    "only": ["default"],
    "fixed_base": True,
}  # frequencies of base 10,000, whatever a file says
SCALED_FULL = {
    "layer_names": {"full_attention": {THETA: THETA}}, "scaled_layers": ["full_attention"],
}  # fmt: skip
PHI_TYPES = ["default", "longrope", "su"]  # su: an older name of longrope
# model types of code that is not in transformers, and the one that computes the same
SAME = {
    "exaone4_5_text": "exaone4",
    "internlm2": "llama",
    "kimi_k2": "deepseek_v3",
    "phi3_v": "phi3",
}
# what the code of a model says and its config does not
CODE: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {"null_base": "off"},
    **dict.fromkeys(
        ("cohere", "cohere2", "cohere2_moe", "blt_patcher", "glm", "glm4", "helium", "ernie4_5",
         "ernie4_5_moe", "ernie4_5_vl_moe_text", "moonshine", "moonshine_streaming", "glm4v_text",
         "glm_ocr_text", "openai_privacy_filter", "pe_audio_encoder",
         "pe_audio_video_encoder", "pe_video_encoder"),
        INTERLEAVED,
    ),
    **dict.fromkeys(
        ("axk2", "bailing_hybrid", "deepseek_v32"),
        {**MIXED, "plain_head_dim": "ignored"},
    ),
    "mistral_large4_text": {
        **MIXED, "plain_head_dim": "ignored", "learned": True,
        "other": ["no_rope_layer_interval", "no_rope_layers"],
    },
    "llama4_text": {**INTERLEAVED, "windowed": "attention_chunk_size"},
    "longcat_flash": MIXED,
    **dict.fromkeys(("axk1", "deepseek_v3", "glm4_moe_lite", "youtu"), DEEPSEEK),
    "deepseek_v4": {
        "layout": "interleaved", "slice": "trailing",
        "layer_names": {"compress": {THETA: "compress_rope_theta"}, "main": {THETA: THETA}},
        "scaled_layers": ["compress"], "flat": True,
        "names": {"rotary_dim": "qk_rope_head_dim"}, SHARE: 64 / 512, "needed_nested": [SHARE],
        "layers": {"compress": {SHARE: None}, "main": {SHARE: None}},  # follows qk_rope_head_dim
        "scaled_defaults": {"attention_factor": 1.0}, "scaled_unread": [THETA, SHARE],
    },
    "mistral4": {
        **MIXED, "layout_key": "rope_interleave", "head_dim": 64, "plain_head_dim": "with the rest",
        "names": {"head_dim": "qk_rope_head_dim"}, SHARE: None,
        "only": ["yarn", "linear", "dynamic", "longrope", "llama3"],  # default takes a whole head
    },
    **dict.fromkeys(
        ("deepseek_ocr2_text", "unlimited_ocr_text", "dots3_note_audio_encoder"),
        {"plain_head_dim": "divided"},
    ),
    "deepseek_v2": {**INTERLEAVED, "plain_head_dim": "ignored"},
    "nanochat": {"sign": -1},
    **dict.fromkeys(
        ("gemma3_text", "gemma3n_text", "t5gemma2_text", "t5gemma2_decoder"),
        {"layer_names": GEMMA, "scaled_layers": ["full_attention"]},
    ),
    **dict.fromkeys(
        ("modernbert", "modernbert-decoder"),
        {"layer_names": BERT, "scaled_layers": ["full_attention", "sliding_attention"]},
    ),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "embedding_gemma2_text"),
        WIDER,
    ),
    "gemma4_vision": {"not_one": "each half of the head is a rotation of its own, by one axis"},
    "hunyuan_vl_text": {"not_one": "pair (j, j + head_dim / 2) mixes two axes, norms change"},
    "olmo3": SCALED_FULL,
    "step3p5": {**SCALED_FULL, "entries_from_lists": True, "needed_nested": [THETA]},
    **dict.fromkeys(("hy_v4", "minicpm3"), {"plain_head_dim": "ignored"}),
    "hy_v4_vl_text": {
        **INTERLEAVED, "plain_head_dim": "ignored", "names": {"head_dim": "qk_rope_head_dim"},
    },
    "jetmoe": {"plain_head_dim": "wins"},
    **dict.fromkeys(("muse_glimmer_text", "muse_spark_text"), {"one_base": True}),
    **dict.fromkeys(
        ("gpt_neox", "gpt_neox_japanese"),
        {
            "names": {THETA: "rotary_emb_base", SHARE: "rotary_pct"}, "plain_head_dim": "divided",
        },
    ),
    **dict.fromkeys(
        ("gptj", "codegen"),
        {
            **INTERLEAVED, **FIXED, "names": {"rotary_dim": "rotary_dim"}, "rotary_dim": 64,
            "plain_head_dim": "divided",
        },
    ),
    "roformer": {**INTERLEAVED, **FIXED},
    "minimax_m2": {"names": {"rotary_dim": "rotary_dim"}},
    **dict.fromkeys(
        ("wav2vec2-conformer", "wav2vec2-bert", "seamless_m4t"),
        {
            "names": {THETA: "rotary_embedding_base"}, "fixed_base": "rotary_embedding_base",
            "only": ["default"],
        },
    ),
    **dict.fromkeys(("dinov3_vit", "eomt_dinov3", "sapiens2"), TWO_AXES),
    "llama4_vision_model": {**TWO_AXES, "layout": "interleaved"},
    "qwen2_vl_vision": {"names": {"hidden_size": "embed_dim", "num_attention_heads": "num_heads"}},
    **dict.fromkeys(
        ("sam2_video", "sam3_tracker_video", "edgetam_video"),
        {
            **TWO_AXES, "layout": "interleaved", "names": {THETA: "memory_attention_rope_theta"},
            "head_dim_of": ["memory_attention_hidden_size", "memory_attention_downsample_rate",
                            "memory_attention_num_attention_heads"],
            "memory_attention_hidden_size": 256, "memory_attention_downsample_rate": 1,
            "memory_attention_num_attention_heads": 1,
        },
    ),
    "clvp_encoder": {"rotary_dim": 32, **FIXED},
    "glm_moe_dsa": {
        **MIXED, "plain_head_dim": "ignored",
        "other": ["indexer_rope_interleave"],  # of its indexer alone
    },
    "esm": FIXED,
    "nomic_bert": {"names": {THETA: "rotary_emb_base"}, "unread": ["rotary_emb_base"]},
    "phimoe": {"mscales": True, "only": PHI_TYPES, **SLIDING},
    **dict.fromkeys(
        ("phi3", "phi4_multimodal"),
        {"only": PHI_TYPES, "read_as": {"su": "longrope", "yarn": "longrope"}, **SLIDING},
    ),
    "cosmos3_edge_text": {"only": ["default"]},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), {"alpha": True, "norm_after": True}),
    "recurrent_gemma": {"only": ["default"]},
    "efficientloftr": {  # turns the whole width before it is cut into heads
        **INTERLEAVED, "axes": "turns", "num_axes": 2, "names": {"head_dim": "hidden_size"},
        SHARE: None, "only": ["default"],
    },
    "dots3_note_text": {
        **MIXED, "head_dim": 64, "names": {"head_dim": "qk_rope_head_dim"}, SHARE: None,
        "layer_names": {
            "indexed_attention": {THETA: THETA},
            "sliding_attention": {
                THETA: "swa_rope_theta", "head_dim": "swa_qk_rope_head_dim",
                "qk_nope_head_dim": "swa_qk_nope_head_dim", "whole_head_dim": "swa_head_dim",
            },
        },
        "layers": {"sliding_attention": {"qk_nope_head_dim": 192, "whole_head_dim": 256}},
        "scaled_layers": ["indexed_attention", "sliding_attention"], "flat": True,
        "plain_head_dim": "ignored", "needed": [THETA],
        # proportional makes a table of the model's head_dim, and the forward then fails
        "only": ["default", "linear", "dynamic", "yarn", "longrope", "llama3"],
    },
    "musicflamingo": {"not_one": "angles are products of two positions"},
    "inkling2_vision": {**TWO_AXES, "axes": "blocks reversed", "layout": "interleaved"},
    "kimi_k25_vision": {**TWO_AXES, "axes": "turns reversed"},
    "step3p5_vision": {**TWO_AXES, "axes": "blocks reversed"},
    "minimax_m3_vl_vision": {"axes": "blocks", "num_axes": 3},
    "pixtral": {**TWO_AXES, "ladder": "dealt"},
    "ernie4_5_vl_moe_text": {
        **INTERLEAVED, "mrope": "alternating", "mrope_section": [22, 22, 20], "only": ["default"],
    },
    "cohere_compass_text": {"mrope": "interleaved", "nested": True},
    "mimo_v2_flash": {"needed_nested": [SHARE]},  # its code and its class have different defaults
    "neomme": {
        "needed_nested": [SHARE, "rope_type"],  # its class reads no `type`
        "axes": "turns of one ladder", "num_axes": 2,
        "layer_names": {kind: {THETA: THETA} for kind in ("full_attention", "sliding_attention")},
    },
    "sam3_vit_model": {**TWO_AXES, "layout": "interleaved"},
    **dict.fromkeys(("ministral3", "mistral", "mixtral", "starcoder2"), SLIDING),
}  # fmt: skip

# what only moving weights to the other layout asks; `rotary.checkpoint` reads it
#   modules          name of a module inside attention -> the kind of its rows; "left: why"
#   key_heads        "queries": there are as many, and the class has no count of its own;
#                    "or twice": layers of a sliding window have twice the number of the config
#   without_rotation which layers do not rotate: those of "no_rope_layers"; those of
#                    "full_attention"; these only "beside windows", unless sliding_window is null;
#                    or these only "of experts", while those without experts rotate; every fourth
#                    from the last, where the file has no "layer_rope_theta"
#   full_every       key, and its default: every so many-th layer has full attention, where the file
#                    lists no layer_types; key "" where the class has no key for it
#   full_every_dense the same for the dense layers of mixture models, which come first
#   repeated, ends   the types that repeat where the file lists none, and that of the first and last
#   latent_module    layers without this module have linear attention, which does not rotate
#   refused          why the weights cannot be moved
GATED = {"modules": {"q_proj": "query, with a gate"}}
KEYS_AS_VALUES = {"modules": {"o_proj": "output"}}
PER_HEAD = {"modules": {"query_key_value": "query and key, per head"}}
HIDDEN = {"refused": "hidden states are rotated, before the projection"}
LINEAR = "left: linear attention does not rotate"
FULL, WINDOW = "full_attention", "sliding_attention"
PATTERN = {"full_every": ["sliding_window_pattern", 4]}
WEIGHTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), GATED),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text"), KEYS_AS_VALUES
    ),
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese", "persimmon"), PER_HEAD),
    "falcon": {"modules": {"query_key_value": "query and key, falcon"}},
    "codegen": {"modules": {"qkv_proj": "query and key, 4 blocks"}},
    "internlm2": {"modules": {"wqkv": "query and key, grouped"}},
    "jetmoe": {
        "modules": {"experts.input_linear": "query of an expert", "kv_proj": "key and value"}
    },
    "timesfm2_5": {"modules": {"scaling": "query norm"}},
    "dory": {"modules": {"sqk": "query norm"}},
    "minimax": {"modules": dict.fromkeys(("qkv_proj", "query_decay", "key_decay"), LINEAR)},
    "granite": {"modules": dict.fromkeys(("to_q", "to_kv"), "left: not of the text model")},
    # files that transformers loads under other names
    **dict.fromkeys(
        ("cosmos3_edge_text", "qwen3_vl_text"),  # the latter is the text part of cosmos3_omni
        {"modules": {"to_q": "query", "to_k": "key", "norm_q": "query norm", "norm_k": "key norm"}},
    ),
    "sarvam_moe": {"modules": {"query_key_value": "query and key"}},
    "axk2": {"modules": {"q_b_proj": "latent query, with a gate"}},
    "hrm_text": {
        "modules": {"gqkv_proj": "query and key, behind a gate"}, "key_heads": "queries"
    },
    **dict.fromkeys(
        ("gptj", "gte", "idefics", "jina_embeddings_v3", "modernbert",
         "modernbert-decoder", "nomic_bert", "roformer"),
        {"key_heads": "queries"},
    ),
    "mimo_v2_flash": {"key_heads": "or twice"},
    **dict.fromkeys(
        ("muse_glimmer_text", "muse_spark_text"), {"without_rotation": "layer_rope_theta"}
    ),
    **dict.fromkeys(
        ("smollm3", "llama4_text", "mistral_large4_text"), {"without_rotation": "no_rope_layers"}
    ),
    "flint": {
        "without_rotation": "full_attention", "repeated": [WINDOW, FULL, WINDOW, WINDOW],
        "ends": FULL,
    },
    "lara_mini": {
        "without_rotation": "full_attention",
        "repeated": ["linear_attention", WINDOW, "linear_attention", FULL, WINDOW],
    },
    "afmoe": {
        "without_rotation": "full_attention", "full_every": ["global_attn_every_n_layers", 4],
    },
    "cohere2": {"without_rotation": "full_attention", **PATTERN},
    **dict.fromkeys(
        ("exaone4", "exaone4_5_text", "exaone_moe"),
        {"without_rotation": "full_attention beside windows", **PATTERN},
    ),
    "kolibri1": {"without_rotation": "full_attention beside windows", "full_every": ["", 5]},
    "cohere2_moe": {
        "without_rotation": "full_attention of experts", **PATTERN,
        "full_every_dense": ["prefix_dense_sliding_window_pattern", 1],
    },
    "bailing_hybrid": {
        "latent_module": "kv_a_proj_with_mqa",
        "modules": dict.fromkeys(("q_conv1d", "k_conv1d"), LINEAR),
    },
    "clvp_encoder": {"refused": "values are rotated as well"},
    "csm": {"refused": "its two decoders have different heads"},
    "deepseek_v4": {"refused": "keys are values as well, and outputs are rotated back"},
    "dots3_note_text": {
        "refused": "its latents differ by layer, and a gain is of their rotated part alone"
    },
    **dict.fromkeys(
        ("t5_gemma_module", "t5gemma2_decoder"),
        {"refused": "its encoder rotates too, and the config key for the layout is of one part"},
    ),
    "zaya": {"refused": "queries and keys pass a convolution before the rotation"},
    **dict.fromkeys(("seamless_m4t", "wav2vec2-bert", "wav2vec2-conformer"), HIDDEN),
}  # fmt: skip


# models of parts whose class, where a file has no text, makes another than the text's own class
OWN_TEXTS = (
    "ernie4_5_vl_moe", "got_ocr2", "lighton_ocr", "mistral3", "moss_transcribe_diarize",
    "omniasr", "pp_chart2table", "voxtral", "voxtral_realtime",
)  # fmt: skip
# those whose class also adds its own defaults to a text part that a file has
ADDS_TO_TEXT = ("glmasr", "voxtral", "voxtral_realtime")
ROPES = ("rope_parameters", "rope_scaling")
# values that no class has where it is silent
BESIDE: dict[str, Any] = {
    "hidden_size": 2176, "num_attention_heads": 17, "head_dim": 34, "max_position_embeddings": 777,
    "original_max_position_embeddings": 333, THETA: 54_321.0, SHARE: 0.375,
    **dict.fromkeys(ROPES, {"rope_type": "linear", "factor": 3.0}),
}  # fmt: skip


def main() -> None:
    """Ask every config class, add what the code says, write the table."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    table: dict[str, dict[str, Any]] = {}
    classes: dict[str, tuple[type, str]] = {}
    for (module, name), source in rotary_classes().items():
        rotary = rotary_class(module, name)
        config = config_for(rotary)
        if config is not None and config.model_type:
            classes.setdefault(config.model_type, (rotary, source))
            table.setdefault(config.model_type, entry(type(config)(), rotary, source))
    for name in (
        "gptj",
        "codegen",
        "t5gemma2_decoder",
        "roformer",
        "wav2vec2-conformer",
        "wav2vec2-bert",
        "seamless_m4t",
    ):
        if name not in table:
            table[name] = entry(transformers.AutoConfig.for_model(name))
    owners = {name: owner for name, owner in owners_of_code().items() if owner in table}
    for name, owner in owners.items():
        table[name] = entry(transformers.AutoConfig.for_model(name), *classes[owner])
    for name in table:
        table[name] = merged(table[name], CODE.get(owners.get(name, name), {}))
    for says in table.values():
        says["other"] = [key for key in says.pop("other") if key not in read_keys(says)]
        if not says["other"]:
            del says["other"]
    for name, same in SAME.items():
        # no class of transformers reads their keys and names, and code beside the weights may not
        own = ("layout_key", "read_as")
        says = {key: value for key, value in table[same].items() if key not in own}
        table.setdefault(name, says)
    for name in table:
        # the names in files are of the model type, all else is of the code
        if says := WEIGHTS.get(name) or WEIGHTS.get(owners.get(name, name)):
            table[name] = {**table[name], "weights": says}
    for name in list(transformers.CONFIG_MAPPING):
        parts = parts_of(name, table)
        if parts:
            table.setdefault(name, {})["parts"] = parts
            text = next((key for key in TEXT_PARTS if key in parts), None)
            if text and set(table[name]) == {"parts"} and (keys := keys_beside(name, text)):
                table[name]["beside_parts"] = keys
    for name in OWN_TEXTS:
        table[name]["own_text"] = True
    for name in ADDS_TO_TEXT:
        spec = transformers.CONFIG_MAPPING[name].sub_configs_defaults["text_config"]
        table[name]["text_defaults"] = {
            key: value for key, value in spec.init_kwargs.items() if key in (*BESIDE, *ROPES)
        }
    lines = [f" {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(table)} model types in {TABLE.name}")
    names = without_rope(table)
    WITHOUT_ROPE.write_text(json.dumps(names, indent=1) + "\n")
    print(f"{len(names)} model types in {WITHOUT_ROPE.name}")


def owners_of_code() -> dict[str, str]:
    """model_type -> another one, whose model transformers makes of its config."""
    code = {name: code_of(name) for name in MODEL_MAPPING_NAMES}
    owners = {
        kind: name
        for name, kind in MODEL_MAPPING_NAMES.items()
        if isinstance(kind, str) and f"class {kind}(" in code[name]
    }
    return {
        name: owners[kind]
        for name, kind in MODEL_MAPPING_NAMES.items()
        if not code[name] and kind in owners
    }


def code_of(name: str) -> str:
    """The source of the models of one type; empty if it has none of its own."""
    folder = MODELING / model_type_to_module_name(name)
    return "".join(path.read_text() for path in folder.glob("modeling_*.py"))


def without_rope(table: Mapping[str, object]) -> list[str]:
    """The model types of transformers whose code has no rotation."""
    owners = owners_of_code()
    names = [name for name in CONFIG_MAPPING_NAMES if name not in table]
    code = {name: code_of(owners.get(name, name)) for name in names}
    return sorted(
        name
        for name, text in code.items()
        if name in STANDS_STILL or (text and not MAY_ROTATE.search(text))
    )


# classes whose constructor does not say its config, and configs that run where the default does not
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "SeamlessM4TConformerRotaryPositionalEmbedding": ("seamless_m4t", {}),
    "Wav2Vec2BertRotaryPositionalEmbedding": ("wav2vec2-bert", {}),
    "Wav2Vec2ConformerRotaryPositionalEmbedding": ("wav2vec2-conformer", {}),
    "ClvpRotaryPositionalEmbedding": ("clvp_encoder", {}),
    "CohereCompassRotaryEmbedding": (
        "cohere_compass_text",
        {
            "rope_parameters": {
                kind: {"rope_type": "default", THETA: theta, "mrope_section": [24, 20, 20]}
                for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))
            },
            "layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2,
        },
    ),
    "Glm4MoeRotaryEmbedding": ("glm4_moe", {"head_dim": 128}),
    "Glm4vMoeTextRotaryEmbedding": ("glm4v_moe_text", {"head_dim": 128}),
    "Glm4vTextRotaryEmbedding": ("glm4v_text", {"partial_rotary_factor": 0.5}),
    "GlmImageTextRotaryEmbedding": ("glm_image_text", {"partial_rotary_factor": 0.5}),
    "Qwen3OmniMoeThinkerTextRotaryEmbedding": ("qwen3_omni_moe_text", {"head_dim": 128}),
    "Qwen3OmniMoeRotaryEmbedding": ("qwen3_omni_moe_talker_code_predictor", {}),
    "Qwen3OmniMoeTalkerRotaryEmbedding": ("qwen3_omni_moe_text", {"head_dim": 128}),
    "Qwen4ExpTextRotaryEmbedding": ("qwen4_exp_text", {"partial_rotary_factor": 0.25}),
}  # fmt: skip


def read_keys(says: dict[str, Any]) -> set[str]:
    """The keys of a config that `hf.py` reads for such a model."""
    names = [says.get("names", {}), *says.get("layer_names", {}).values()]
    return {
        *READ,
        says.get("layout_key"),
        *says.get("switch", {}),
        *(key for each in names for key in each.values()),
    }


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`one` with what `other` says, dicts inside dicts too."""
    both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys()
            if isinstance(one[key], dict) and isinstance(other[key], dict)}  # fmt: skip
    return {**one, **other, **both}


def rotary_classes() -> dict[tuple[str, str], str]:
    """(module, class name) of every class of transformers that makes rotary tables -> its source.

    The files are read as text, because to import all these modules takes ten seconds.
    """
    found = {}
    for path in sorted(MODELING.glob("*/modeling_*.py")):
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        for source, name in CLASS.findall(path.read_text()):
            if ROTARY.search(name):
                found[module, name] = source
    return found


def rotary_class(module: str, name: str) -> type:
    """The class itself."""
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def config_for(rotary: type) -> Any:
    """The default config, or the first of its parts, that the class can be built from.

    A key that it needs to rotate is set.
    """
    module = sys.modules[rotary.__module__]
    if rotary.__name__ in CONFIGS:
        name, values = CONFIGS[rotary.__name__]
        return _config_class(module, name)(**SWITCHES.get(name, {}), **values)
    given = inspect.signature(rotary.__init__).parameters.get("config")
    kind = None if given is None else given.annotation
    kind = getattr(module, kind, None) if isinstance(kind, str) else kind
    if not inspect.isclass(kind) or kind is inspect.Parameter.empty:
        return None
    whole = kind()
    for config in (whole, *_parts(whole)):
        if config.model_type == "llama" and "llama" not in module.__name__:
            continue  # the language model beside the audio tower that is meant
        try:
            rotary(config)
        except (AttributeError, KeyError, TypeError):
            continue
        # as it is by itself: the whole may fill it in
        return type(config)(**SWITCHES.get(config.model_type, {}))
    return None


def _config_class(module: Any, name: str) -> Any:
    """The config class with a model_type: that of transformers, or one of the module alone."""
    folder = module.__name__.rsplit(".", 1)[0]
    own = importlib.import_module(f"{folder}.configuration_{folder.rsplit('.', 1)[1]}")
    return next(each for each in vars(own).values() if getattr(each, "model_type", None) == name)


def _parts(config: Any) -> list[Any]:
    found = []
    for key in config.sub_configs or {}:
        part = getattr(config, key, None)
        if hasattr(part, "model_type"):
            found += [part, *_parts(part)]
    return found


def parts_of(name: str, table: dict[str, Any]) -> dict[str, str]:
    """The parts of a config that hold a RoPE: key -> model_type."""
    try:
        config = transformers.AutoConfig.for_model(name)
    except Exception:
        return {}
    parts = {key: getattr(config, key, None) for key in config.sub_configs or {}}
    known = {key: getattr(part, "model_type", None) for key, part in parts.items()}
    return {
        key: model for key, model in known.items() if model in table or _has_parts(model, table)
    }


def keys_beside(name: str, text: str) -> list[str]:
    """The keys that the class takes for those of its text where a file has none: older files."""
    silent, found = _text(name, text, {}), []
    for key, value in BESIDE.items():
        config = _text(name, text, {key: value})
        if config is None or silent is None:
            continue
        if key in ROPES:
            reads = (config.get("rope_parameters") or {}).get("factor") == value["factor"]
        else:
            before, after = ({**each, **(each.get("rope_parameters") or {})}.get(key)
                             for each in (silent, config))  # fmt: skip
            reads = before != value == after
        if reads:
            found.append(key)
    return found


def _text(name: str, text: str, data: dict[str, Any]) -> dict[str, Any] | None:
    """The keys of the text of such a file; None where the class refuses it."""
    try:
        config = transformers.CONFIG_MAPPING[name].from_dict({"model_type": name, **data})
        return dict(getattr(config, text).to_dict())
    except Exception:
        return None


def _has_parts(name: str | None, table: dict[str, Any]) -> bool:
    return bool(name) and name in transformers.CONFIG_MAPPING and bool(parts_of(name, table))


def entry(config: Any, rotary: type | None = None, source: str = "") -> dict[str, Any]:
    """What a silent config of this class takes, as far as it has a bearing on RoPE."""
    says: dict[str, Any] = {}
    names = {}
    for ours, theirs in (config.attribute_map or {}).items():
        if ours in (*SIZES, "head_dim"):
            names[ours] = theirs
    for size in SIZES:
        if (value := _get(config, size)) is not None:
            says[size] = value
    head_dim = _get(config, "head_dim")
    divides = "hidden_size", "num_attention_heads"
    if head_dim is not None and not any(_follows(config, head_dim, key) for key in divides):
        says["head_dim"] = head_dim
        if _follows(config, head_dim, "qk_rope_head_dim"):
            names["head_dim"] = "qk_rope_head_dim"
    if vars(config).get("head_dim", 0) is None:
        says["null_head_dim"] = True
    if names:
        says["names"] = names
    own = config.to_dict()
    if (plain := own.get("qk_nope_head_dim")) is not None:  # of latent attention: not rotated
        says["qk_nope_head_dim"] = plain
    if lists := [key for key in LISTS if key in own]:
        says["lists"] = lists
    for key, value in SWITCHES.get(config.model_type, {}).items():
        says["switch"], says[key] = {key: value}, own[key]
    says["other"] = sorted(key for key in own if re.search("rope|rotary", key))
    if (trained := _get(config, "original_max_position_embeddings")) is not None:
        says["original_max_position_embeddings"] = trained
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if not rope and getattr(config, THETA, None) not in (None, 10_000.0):
        says[THETA] = config.rope_theta
    labels = (
        getattr(config, "_rope_type_labels", None) or getattr(config, "layer_types", None) or ()
    )
    if rope and set(rope) & set(labels):
        says["layers"] = {
            key: value and _tidy(value) for key, value in sorted(rope.items()) if key in labels
        }
        unlisted = {key: value for key, value in sorted(rope.items()) if key not in labels}
        if unlisted := {key: value for key, value in unlisted.items() if isinstance(value, dict)}:
            says["unlisted_layers"] = unlisted
    elif rope:
        if rope.get("rope_type", rope.get("type")) in ("default", "axial", None):
            if rope.get(THETA) not in (None, 10_000.0):
                says[THETA] = rope[THETA]
            if SHARE in rope:
                says[SHARE] = rope[SHARE]
        else:
            says["rope"] = _tidy(rope)
            if type(config).default_theta != 10_000.0:
                says[THETA] = type(config).default_theta
    says |= unread(config, "layers" in says)
    if rotary is not None:
        if SHARE in source and SHARE not in says:
            says[SHARE] = 1.0
        if rope.get("rope_type") == "axial":
            says.setdefault("axes", "blocks")
            says.setdefault("num_axes", 2)
            says.setdefault("only", GRID_TYPES)
        try:
            sections = getattr(rotary(config), "mrope_section", None)
        except KeyError:  # the default of CohereCompass names no layer type
            sections = None
        if sections and "slice(offset, length, 3)" in source:
            says["mrope"], says["mrope_section"] = "interleaved", sections
        elif sections and "m[i % 3]" in source:
            says["mrope"], says["mrope_section"] = "sections", sections
    return says


LINEAR = {"rope_type": "linear", "factor": 2.0}


def unread(config: Any, has_layers: bool) -> dict[str, list[str]]:
    """Keys that the class does not read, never or where a file has no rope parameters (`alone`);
    and those among the rope parameters that it fills in only where a file has none (`needed`).
    """
    found: dict[str, list[str]] = {"unread": [], "unread_alone": [], "needed": []}
    plain = _rope(config, {})
    if plain is None:
        return {}
    nested = {kind: LINEAR | {THETA: 1e4} for kind in plain if isinstance(plain[kind], dict)}
    for key, value in ((SHARE, 0.375),) if has_layers else ((THETA, 54_321.0), (SHARE, 0.375)):
        if not _holds(_rope(config, {key: value}), key, value):
            found["unread_alone"].append(key)
        beside = _rope(config, {key: value, "rope_parameters": nested or dict(LINEAR)})
        if key in found["unread_alone"] and not _holds(beside, key, value):
            found["unread"].append(key)
        scaled = _rope(config, {"rope_parameters": dict(LINEAR)})
        if not has_layers and plain and scaled and plain.get(key) != scaled.get(key):
            found["needed"].append(key)
    scaled = _rope(config, {"rope_scaling": dict(LINEAR)})
    if not has_layers and scaled is not None and scaled.get("factor") != LINEAR["factor"]:
        found["unread"].append("rope_scaling")
    return {name: keys for name, keys in found.items() if keys}


def _rope(config: Any, values: dict[str, Any]) -> dict[str, Any] | None:
    try:
        rope = type(config)(**values).rope_parameters
    except Exception:
        return None
    return None if rope is None else dict(rope)


def _holds(rope: dict[str, Any] | None, key: str, value: float) -> bool:
    """True if the value came in, in all entries of rope parameters that are nested."""
    entries = [each for each in (rope or {}).values() if isinstance(each, dict)] or [rope]
    return rope is None or all(each.get(key) == value for each in entries)


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # one value for each layer
        return None


def _follows(config: Any, head_dim: int, key: str) -> bool:
    try:
        wider = type(config)(**{key: 2 * getattr(config, key)})
    except Exception:
        return False
    return _get(wider, "head_dim") != head_dim


def _tidy(rope: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if value is not None}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
