"""Which tensors are queries and keys: the names of every model of transformers, and of others."""

import contextlib
import fnmatch
import functools
import re

import pytest
import torch
import transformers
from checkpoints import OTHER
from transformers.core_model_loading import revert_weight_conversion

from rotary import Rotary, from_hf_config
from rotary.checkpoint import names
from rotary.checkpoint.channels import runs_of
from rotary.checkpoint.files import Tensor
from rotary.checkpoint.plan import plan
from rotary.configs import MODELS, choose, layer_types

# the kinds of models, and which configs they take
AUTOS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModel": "MODEL_MAPPING",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
}
# what a name of a tensor that moves may end in, beside the parameter; all else is none of ours
MAY_MOVE = re.compile(
    r"\.(?:q_proj|k_proj|q_norm|k_norm|q_layernorm|k_layernorm|qkv_proj|query_key_value|Wqkv|query"
    r"|key|q_b_proj|kv_a_proj_with_mqa|q_gate_proj|experts\.input_linear|kv_proj|scaling|sqk)"
    r"(?:\.linear)?(?:\.weight|\.bias)?$"
)
LAYERS = re.compile(r"(?:num_hidden_layers|n_layers?|num_layers|\w+coder_layers|\w+_hidden_layers"
                    r"|num_experts|n_routed_experts|num_local_experts)")  # fmt: skip
# quickly built, one for each way of naming
QUICK = (
    "llama", "phi3", "gptj", "codegen", "gpt_neox", "falcon", "persimmon", "deepseek_v3", "jetmoe",
    "axk2", "qwen3", "qwen3_next", "olmo2", "cohere", "lfm2", "recurrent_gemma", "timesfm2_5",
    "roformer", "minimax", "bailing_hybrid", "longcat_flash", "mllama", "qwen2_vl", "idefics",
)  # fmt: skip


def shrunk(config):
    """A config of a few layers, as many as show each layer type once, and of its parts."""
    kinds = getattr(config, "layer_types", None)
    kinds = list(kinds) if isinstance(kinds, list | tuple) else []
    count = max([4, *(kinds.index(kind) + 1 for kind in kinds)])
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrunk(value)
        elif LAYERS.fullmatch(key) and isinstance(value, int) and value > count:
            setattr(config, key, count)
    if len(kinds) > count and len(config.layer_types) > count:
        config.layer_types = kinds[:count]
    return config


@functools.lru_cache(maxsize=1)
def quiet():
    transformers.logging.set_verbosity_error()


def state_of(model_type, in_files):
    """(shapes by tensor name, config) of a model on the meta device; None if none can be built.

    in_files  by the names in files, where transformers renames what it loads
    """
    quiet()
    try:
        config = shrunk(transformers.AutoConfig.for_model(model_type))
    except Exception:  # a config without defaults, or whose layers cannot be made fewer
        return None
    for auto, mapping in AUTOS.items():
        if type(config) not in getattr(transformers, mapping):  # whose refusal imports all models
            continue
        try:
            with torch.device("meta"):
                model = getattr(transformers, auto).from_config(config)
        except Exception:  # a package is missing
            continue
        state = model.state_dict()
        state = revert_weight_conversion(model, state) if in_files else state
        return {name: tuple(x.shape) for name, x in state.items()}, config.to_dict()
    return None


@functools.cache
def planned(model_type, in_files=False):
    """The plan of a model, its shapes, or why there is none."""
    built = state_of(model_type, in_files)
    if built is None:
        return "not built"
    shapes, config = built
    tensors = {name: Tensor("BF16", shape, 0, 0) for name, shape in shapes.items()}
    try:
        specs = [from_hf_config(config, kind) for kind in layer_types(config) or (None,)]
        layout = next((spec.layout for spec in specs if spec is not None), "half")
        return plan(tensors, config, layout, OTHER[layout]), shapes
    except ValueError as error:
        return str(error)


def check(made, shapes):
    assert made.moves
    assert made.warning == ""
    for name, move in made.moves.items():
        assert MAY_MOVE.search(name), name
        assert sorted(move.order.tolist()) == list(range(move.size))
    for name in shapes:
        seen = name in made.moves or name in {left.tensor for left in made.left}
        assert seen or not re.search(r"[._](?:q|k|qk|qkv|kv)_|query|\.key\.", name), name


@pytest.mark.parametrize("model_type", QUICK)
def test_queries_and_keys_are_found_and_nothing_else(model_type):
    check(*planned(model_type))


@pytest.mark.slow
def test_every_model_type_that_can_be_built_is_planned_or_refused_with_a_reason():
    """What is refused is refused for one of these reasons; the rest of transformers is planned."""
    reasons = {
        "vision": "is a vision tower",
        "parts": "has several parts, none known as its text",
        "not one": "is not one rotation",
        "no heads": "no tensor is a query or key projection",
        "still": "does not rotate",
        "refused": "cannot be converted",
        "defaults": "give head_dim|must sum to the 64 pairs",  # a default config that is no model
    }
    found = {"planned": [], "not built": [], **{reason: [] for reason in reasons}}
    for model_type in MODELS:
        made = planned(model_type)
        if not isinstance(made, str):
            check(*made)
            found["planned"].append(model_type)
        elif made == "not built":
            found[made].append(model_type)
        else:
            fitting = [name for name, text in reasons.items() if re.search(text, made)]
            assert fitting, f"{model_type}: {made}"
            found[fitting[0]].append(model_type)
    assert len(found["planned"]) >= 195
    assert set(found["no heads"]) <= {"bamba", "granitemoehybrid"}  # default: no attention layer
    assert {*found["still"]} >= {"granitemoehybrid", "wav2vec2-conformer", "zamba2"}
    assert {*found["still"]} <= {name for name in MODELS if "switch" in MODELS[name]}
    assert {*found["refused"]} >= {"deepseek_v4", "zaya"}


@pytest.mark.slow
def test_names_in_files_are_known_as_those_in_memory_are():
    """People have the names on the disk; some of known models were refused, or warned of."""
    refused = {}
    for model_type in MODELS:
        if not isinstance(planned(model_type), str):
            made = planned(model_type, in_files=True)
            if isinstance(made, str):
                refused[model_type] = made
            else:
                assert made[0].warning == "", model_type
    # its files have fused rows, which transformers moves to the half layout as it loads them
    assert refused.keys() == {"gradium_phonon_tts"}
    assert "in_proj.weight' looks like a query or a key" in refused["gradium_phonon_tts"]


@pytest.mark.parametrize(
    ("tensor", "model", "kind"),
    [
        ("layers.0.attention.wq.weight", "", "query"),  # Meta, Mistral
        ("layers.0.attention.wk.weight", "", "key"),
        ("layers.0.attention.query_norm.weight", "", None),
        ("layers.0.attn.wq_b.weight", "deepseek_v3", "latent query"),  # DeepSeek
        ("layers.0.attn.wkv_a.weight", "deepseek_v3", "latent key"),
        ("layers.0.attn.wkv_b.weight", "deepseek_v3", "left"),
        ("transformer.h.0.attn.q_proj.weight", "gptj", "query"),
        ("transformer.h.3.attn.c_attn.bias", "", "query and key"),  # Qwen 1
        ("transformer.h.3.attn.attention.q_proj.weight", "exaone", "query"),
        ("model.layers.3.attention.query_key_value.weight", "sarvam_moe", "query and key"),
        ("layers.3.self_attn.to_k.weight", "cosmos3_edge_text", "key"),
        ("layers.3.self_attn.to_q.weight", "qwen3_vl_text", "query"),  # Cosmos 3 Omni
        ("transformer.blocks.3.norm_attn_norm.attn.Wqkv.weight", "dbrx", "query and key"),
        ("model.layers.9.attention.wqkv.weight", "internlm2", "query and key, grouped"),
        ("model.layers.9.self_attn.W_pack.weight", "", "query and key"),  # Baichuan
        ("blk.4.attn_q.weight", "", "query"),  # GGUF
        ("blk.4.attn_qkv.weight", "", "query and key"),
        ("blk.4.attn_k_norm.weight", "", "key norm"),
        ("blk.4.attn_kv_b.weight", "", "left"),
        ("language_model.model.layers.3.self_attn.k_proj.qweight", "", "key"),
        ("model.layers.61.self_attn.q_a_proj.weight", "deepseek_v3", "left"),
        ("model.visual.blocks.3.attn.qkv.weight", "qwen2_vl_text", "left"),
        ("vision_tower.encoder.layers.3.self_attn.q_proj.weight", "llama", "left"),
        ("model.layers.3.cross_attn.q_proj.weight", "mllama_text_model", "left"),
        ("model.layers.3.linear_attn.in_proj_qkvz.weight", "qwen3_next", "left"),
        ("model.layers.3.self_attn.k_scale", "llama", "left"),
        ("model.layers.3.self_attn.v_proj.weight", "llama", None),
        ("model.layers.3.self_attn.o_proj.weight", "llama", None),
        ("model.layers.3.mlp.gate_proj.weight", "llama", None),
        ("model.embed_tokens.weight", "llama", None),
    ],
)
def test_names_of_other_code_bases_are_known(tensor, model, kind):
    found = names.classify(tensor, model)
    assert (found and found.kind) == kind
    if found and kind not in ("left", None):
        assert found.layer == int(re.search(r"\.(\d+)\.", tensor)[1])
        assert tensor == f"{found.group}.{found.parameter}"


@pytest.mark.parametrize(
    "tensor",
    ["model.layers.0.self_attn.q_projection.weight", "model.layers.0.attn.query.0.weight",
     "encoder.Wqkv.weight", "model.layers.0.self_attn.q_proj.parametrizations.weight.original0",
     "model.layers.0.attn.to_q.weight", "layers.0.keys.weight",
     "layers.0.attention.query_key_value.weight", "layers.0.attention.wqkv.weight",
     "model.layers.1.attn.queries.weight", "layers.0.attn.in_proj_weight",
     "layers.0.attn.in_proj.weight", "layers.0.mha.block_in_proj.bias", "layers.0.attn.queries.b"],
)  # fmt: skip
def test_a_name_that_looks_like_a_query_or_a_key_and_fits_no_rule_is_refused(tensor):
    known = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=re.escape(f"{tensor!r} looks like a query or a key")):
        names.recognized([known, tensor], "llama")


def test_a_name_that_is_left_on_purpose_is_listed_and_one_that_is_not_there_refused():
    known, odd = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.memory.keys.weight"
    found = names.recognized([known, odd], "llama", ["*.memory.keys.*"])
    assert [(name.tensor, name.kind) for name in found] == [(known, "key"), (odd, "left")]
    with pytest.raises(
        ValueError, match=r"leave names '\*\.values', but no tensor has such a name"
    ):
        names.recognized([known, odd], "llama", [odd, "*.values"])
    with pytest.raises(TypeError, match=r"got a string: pass leave=\['\*\.keys\.\*'\]"):
        names.recognized([known, odd], "llama", "*.keys.*")


ATTENTION = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2)
             for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.scales",
                          "q_norm.weight", "k_norm.weight")]  # fmt: skip


@pytest.mark.parametrize("leave", ["*k_proj*", "*.1.*k_proj.weight", "*q_proj.bias", "*k_norm*"])
def test_of_a_layer_that_moves_no_known_query_or_key_may_be_left(leave):
    """The keys stayed alone, all scores were wrong, and the proof found no difference."""
    with pytest.raises(ValueError, match=r"^leave names .*take it out of leave \(--leave\)$"):
        names.recognized(ATTENTION, "qwen3", [leave])


@pytest.mark.parametrize("leave", ["*.1.*", "*k_proj.scales"])
def test_a_whole_layer_and_what_holds_no_channels_may_be_left(leave):
    found = names.recognized(ATTENTION, "qwen3", [leave])
    left = [name.tensor for name in found if name.kind == names.LEFT]
    assert left == [tensor for tensor in ATTENTION if fnmatch.fnmatchcase(tensor, leave)]


@pytest.mark.parametrize(
    ("tensor", "is_unknown"),
    [("model.layers.1.attn.first.weight", True), ("h.0.attention.kernel", True),
     ("blocks.3.mha.lin.weight", True), ("model.layers.0.self_attn.v_proj.weight", False),
     ("model.layers.0.post_attention_layernorm.weight", False), ("blk.0.attn_output.weight", False),
     ("model.layers.0.self_attn.o_proj.lora_A.weight", False), ("attn.first.weight", False),
     ("layers.0.attention.wo.weight", False), ("visual.blocks.0.attn.first.weight", False),
     ("model.layers.0.hc_pre.hc_attn_layer.hc_fn", False),  # HY 4
     ("model.layers.0.attn_hyper_connection.input_mix_weight_down.weight", False),  # Qwen 4
     ("transformer.h.0.attn.causal_mask", False), ("h.0.attn.masked_bias", False)],  # CodeGen
)  # fmt: skip
def test_what_is_in_attention_under_a_name_that_says_nothing_is_told_apart(tensor, is_unknown):
    assert names.unknown_in_attention(tensor) == is_unknown


def test_an_encoder_that_rotates_by_itself_is_left():
    """Evolla's protein encoder is ESM, with heads and layers of its own."""
    tensor = "model.protein_encoder.model.encoder.layer.0.attention.self.query.weight"
    found = names.classify(tensor, "evolla")
    assert (found.kind, found.reason) == ("left", "not of the text model")


def test_no_query_and_no_key_at_all_is_refused_with_a_few_names():
    with pytest.raises(ValueError, match=r"the first names are: lm_head\.weight, a\.b$"):
        names.recognized(["lm_head.weight", "a.b"])
    with pytest.raises(ValueError, match="the first names are: none"):
        names.recognized([])
    with pytest.raises(ValueError, match="no tensor is a query or key projection"):
        names.recognized(["visual.blocks.0.attn.qkv.weight"])


REFUSED = {
    model: entry["weights"]["refused"]
    for model, entry in MODELS.items()
    if "refused" in entry.get("weights", {})
}


@pytest.mark.parametrize("model", REFUSED)
def test_models_that_cannot_be_converted_say_why(model):
    with pytest.raises(ValueError, match=f"{model!r} cannot be converted: {REFUSED[model]}"):
        names.recognized(["layers.0.self_attn.q_proj.weight"], model)


def test_every_rule_has_a_kind_that_is_known_and_says_why_it_leaves():
    spec, config = Rotary(head_dim=8), choose({"num_attention_heads": 4, "head_dim": 8})
    rules = [kind for kind, _ in names.RULES]
    for model, entry in MODELS.items():
        for module in entry.get("weights", {}).get("modules", {}):
            rules.append(names.rule_of(f"self_attn.{module}", model))
    for rule in rules:
        kind, _, reason = rule.partition(": ")
        assert bool(reason) == (kind == names.LEFT), rule
        if kind not in (names.LEFT, "output"):
            name = names.Name("q", "q", 0, "weight", kind)
            with contextlib.suppress(ValueError):  # other sizes are wanted; a KeyError is a fault
                runs_of(name, 64, spec, config)
