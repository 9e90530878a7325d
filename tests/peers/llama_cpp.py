"""Runs llama.cpp's own converter, model loader, graph and RoPE kernel on every config.

For each config a folder with the config and no weights is converted by llama.cpp's Python code
(from the source archive of llama-cpp-python, which carries it). A second file adds every tensor
that the model needs, without its bytes; libllama (from the wheel `xllamacpp`) loads that file as
any other, but for the allocation, and its graph is read: each ROPE node with its parameters and
frequency factors. The same node is then computed by ggml on unit vectors at position 1, and the
angle and the length of what comes out are the numbers of a row. The one thing taken out of the
way is the tokenizer, which the configs do not come with.

    python tests/peers/llama_cpp.py tests/configs tests/golden/peers/llama_cpp.json
"""

import ctypes
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import xllamacpp

ARCHIVE = "llama-cpp-python==0.3.36"  # the source archive; its `vendor/llama.cpp` has the converter
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# keys of a GGUF file that say something about RoPE or the heads it turns
RECORDED = ("rope.", "attention.key_length", "attention.head_count", "attention.sliding_window",
            "context_length", "embedding_length", "block_count",
            "attention.compress_rope_freq_base",
            "leading_dense_block_count", "vocab_size")  # fmt: skip


def converter_source():
    """The folder of llama.cpp's sources, unpacked beside this environment's Python once."""
    place = Path(sys.prefix) / "llama_cpp_source"
    if not place.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:",
                 "-d", folder, ARCHIVE], check=True,
            )  # fmt: skip
            with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                archive.extractall(folder, filter="data")
            (next(Path(folder).glob("llama_cpp_python-*/vendor/llama.cpp"))).rename(place)
    return place


sys.path[1:1] = [str(converter_source() / "gguf-py"), str(converter_source())]
import gguf  # noqa: E402  (the one beside the converter: both change together)

# Keys that a model's converter or loader wants and our configs, cut down to what concerns RoPE,
# do not have: sizes of the feed-forward part and the like, as the published file has them.
_DEEPSEEK = {
    "vocab_size": 129280, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "rms_norm_eps": 1e-6, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
LEFT_OUT = {
    "deepseek_v2": {
        **_DEEPSEEK, "vocab_size": 102400, "intermediate_size": 10944, "q_lora_rank": None,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0, "norm_topk_prob": False, "scoring_func": "softmax",
    },
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": {**_DEEPSEEK, "n_routed_experts": 384, "n_group": 1, "topk_group": 1},
    "deepseek_v4": {
        **_DEEPSEEK, "scoring_func": "sqrtsoftplus", "num_hash_layers": 0, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "o_groups": 8, "o_lora_rank": 1024,
        "q_lora_rank": 1024, "swiglu_limit": 10.0, "num_experts_per_tok": 6, "index_topk": 512,
        "first_k_dense_replace": 0, "n_group": None, "topk_group": None, "n_routed_experts": 8,
        "moe_intermediate_size": 32,
    },
    "mistral4": {
        **_DEEPSEEK, "vocab_size": 131072, "kv_lora_rank": 256, "q_lora_rank": 1024,
        "intermediate_size": 12288, "n_routed_experts": 128, "num_experts_per_tok": 4,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
    },
    "ministral3": {"vocab_size": 131072, "rms_norm_eps": 1e-5, "intermediate_size": 14336},
    "mistral": {"vocab_size": 131072, "rms_norm_eps": 1e-5, "intermediate_size": 14336},
    "dots1": {
        "vocab_size": 152064, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid",
        "intermediate_size": 10944, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1,
    },
    "minimax_m2": {
        "scoring_func": "sigmoid", "num_local_experts": 256, "num_experts_per_tok": 8,
        "intermediate_size": 1536, "vocab_size": 200064, "rms_norm_eps": 1e-6,
    },
    "glm4_moe": {"num_nextn_predict_layers": 0},
    "glm_moe_dsa": {
        **_DEEPSEEK, "vocab_size": 154880, "q_lora_rank": 2048, "n_group": 1, "topk_group": 1,
        "index_n_heads": 32,
    },
    "exaone4": {"vocab_size": 153600, "rms_norm_eps": 1e-5, "intermediate_size": 27392},
    "exaone4_5_text": {"vocab_size": 153600, "rms_norm_eps": 1e-5, "intermediate_size": 27392},
    "gemma4_text": {
        "vocab_size": 262144, "rms_norm_eps": 1e-6, "intermediate_size": 21504,
        "moe_intermediate_size": None, "hidden_size_per_layer_input": 0,
    },
    "hy_v3": {
        "vocab_size": 120832, "intermediate_size": 13312, "moe_intermediate_size": 1536,
        "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "router_scaling_factor": 2.5,
        "route_norm": True, "num_nextn_predict_layers": 0,
    },
    "laguna": {
        "vocab_size": 100352, "intermediate_size": 8192, "moe_intermediate_size": 512,
        "num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512,
        "rms_norm_eps": 1e-6, "gating": True, "mlp_layer_types": ["dense"] + ["sparse"] * 39,
        "moe_routed_scaling_factor": 2.5,
    },
    "lfm2_moe": {
        "vocab_size": 65536, "intermediate_size": 7168, "moe_intermediate_size": 1792,
        "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "conv_L_cache": 3,
        "norm_eps": 1e-5,
    },
    "minicpm3": {
        "vocab_size": 73448, "intermediate_size": 6400, "rms_norm_eps": 1e-5, "q_lora_rank": 768,
        "kv_lora_rank": 256, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    },
    "paddleocr_vl": {"vocab_size": 103424, "intermediate_size": 3072, "rms_norm_eps": 1e-5},
    "qwen3_5_text": {
        "vocab_size": 248320, "intermediate_size": 17408, "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    },
    "internlm2": {"rms_norm_eps": 1e-5, "vocab_size": 92544, "intermediate_size": 14336},
    "modernbert": {"norm_eps": 1e-5, "layer_norm_eps": 1e-5, "vocab_size": 50368},
    "nomic_bert": {
        "activation_function": "swiglu", "qkv_proj_bias": False, "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "prenorm": False, "vocab_size": 30528, "n_inner": 3072,
        "layer_norm_epsilon": 1e-12,
    },
}  # fmt: skip


# --- libllama and ggml by ctypes -----------------------------------------------------------------

os.environ["GGML_NO_BACKTRACE"] = "1"  # a failed assertion would wait for a debugger
lib = ctypes.CDLL(str(Path(xllamacpp.__file__).with_name("xllamacpp.abi3.so")))
pointer, i32, i64, u32, f32 = (
    ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float,
)  # fmt: skip


class Tensor(ctypes.Structure):
    """struct ggml_tensor, ggml.h."""


Tensor._fields_ = [
    ("type", i32), ("buffer", pointer), ("ne", i64 * 4), ("nb", ctypes.c_size_t * 4), ("op", i32),
    ("op_params", i32 * 16), ("flags", i32), ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.POINTER(Tensor)), ("view_offs", ctypes.c_size_t), ("data", pointer),
    ("name", ctypes.c_char * 64), ("extra", pointer), ("padding", ctypes.c_char * 8),
]  # fmt: skip


class ModelParams(ctypes.Structure):
    """struct llama_model_params, llama.h."""

    _fields_ = [
        ("devices", pointer), ("tensor_buft_overrides", pointer), ("n_gpu_layers", i32),
        ("split_mode", i32), ("load_mode", i32), ("lazy_mode", i32), ("main_gpu", i32),
        ("tensor_split", pointer), ("progress_callback", pointer),
        ("progress_callback_user_data", pointer), ("kv_overrides", pointer),
        ("vocab_only", ctypes.c_bool), ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool), ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool), ("load_mtp", ctypes.c_bool),
    ]  # fmt: skip


class ContextParams(ctypes.Structure):
    """struct llama_context_params, llama.h."""

    _fields_ = [
        ("n_ctx", u32), ("n_batch", u32), ("n_ubatch", u32), ("n_seq_max", u32), ("n_rs_seq", u32),
        ("n_outputs_max", u32), ("n_outputs_max_per_seq", u32), ("n_threads", i32),
        ("n_threads_batch", i32), ("ctx_type", i32), ("rope_scaling_type", i32),
        ("pooling_type", i32), ("attention_type", i32), ("flash_attn_type", i32),
        ("rope_freq_base", f32), ("rope_freq_scale", f32), ("yarn_ext_factor", f32),
        ("yarn_attn_factor", f32), ("yarn_beta_fast", f32), ("yarn_beta_slow", f32),
        ("yarn_orig_ctx", u32), ("defrag_thold", f32), ("cb_eval", pointer),
        ("cb_eval_user_data", pointer), ("type_k", i32), ("type_v", i32),
        ("abort_callback", pointer), ("abort_callback_data", pointer),
        ("flags", ctypes.c_bool * 8), ("samplers", pointer), ("n_samplers", ctypes.c_size_t),
        ("ctx_other", pointer),
    ]  # fmt: skip


class GgufParams(ctypes.Structure):
    """struct gguf_init_params, gguf.h."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", pointer)]


class InitParams(ctypes.Structure):
    """struct ggml_init_params, ggml.h."""

    _fields_ = [("size", ctypes.c_size_t), ("buffer", pointer), ("no_alloc", ctypes.c_bool)]


tensor_p = ctypes.POINTER(Tensor)


def declare(name, result, *arguments):
    call = getattr(lib, name)
    call.restype, call.argtypes = result, list(arguments)
    return call


backend_load_all = declare("ggml_backend_load_all", None)
backend_init = declare("llama_backend_init", None)
log_set = declare("llama_log_set", None, pointer, pointer)
model_params = declare("llama_model_default_params", ModelParams)
context_params = declare("llama_context_default_params", ContextParams)
gguf_open = declare("gguf_init_from_file", pointer, ctypes.c_char_p, GgufParams)
gguf_add = declare("gguf_add_tensor", None, pointer, tensor_p)
gguf_write = declare("gguf_write_to_file", ctypes.c_bool, pointer, ctypes.c_char_p, ctypes.c_bool)
gguf_find = declare("gguf_find_tensor", i64, pointer, ctypes.c_char_p)
gguf_offset = declare("gguf_get_tensor_offset", ctypes.c_size_t, pointer, i64)
gguf_size = declare("gguf_get_tensor_size", ctypes.c_size_t, pointer, i64)
gguf_count = declare("gguf_get_n_tensors", i64, pointer)
model_of_metadata = declare("llama_model_init_from_user", pointer, pointer, pointer, pointer,
                            ModelParams)  # fmt: skip
model_of_file = declare("llama_model_load_from_file", pointer, ctypes.c_char_p, ModelParams)
new_context = declare("llama_init_from_model", pointer, pointer, ContextParams)
free_context = declare("llama_free", None, pointer)
rope_type = declare("llama_model_rope_type", i32, pointer)
graph_nodes = declare("ggml_graph_n_nodes", i32, pointer)
graph_node = declare("ggml_graph_node", tensor_p, pointer, i32)
op_name = declare("ggml_op_name", ctypes.c_char_p, i32)
ggml_init = declare("ggml_init", pointer, InitParams)
ggml_free = declare("ggml_free", None, pointer)
new_1d = declare("ggml_new_tensor_1d", tensor_p, pointer, i32, i64)
new_3d = declare("ggml_new_tensor_3d", tensor_p, pointer, i32, i64, i64, i64)
rope_ext = declare("ggml_rope_ext", tensor_p, pointer, tensor_p, tensor_p, tensor_p, i32, i32, i32,
                   f32, f32, f32, f32, f32, f32)  # fmt: skip
rope_multi = declare("ggml_rope_multi", tensor_p, pointer, tensor_p, tensor_p, tensor_p, i32,
                     i32 * 4, i32, i32, f32, f32, f32, f32, f32, f32)  # fmt: skip
new_graph = declare("ggml_new_graph", pointer, pointer)
expand = declare("ggml_build_forward_expand", None, pointer, tensor_p)
compute = declare("ggml_graph_compute_with_ctx", i32, pointer, pointer, i32)
arch_name = declare("_Z13llm_arch_name8llm_arch", ctypes.c_char_p, i32)
model_of_arch = declare(
    "_Z18llama_model_create8llm_archRK18llama_model_params", pointer, i32, pointer
)
graph_reserve = lib["_Z19llama_graph_reserveP13llama_contextjjj"]
graph_reserve.restype, graph_reserve.argtypes = pointer, [pointer, u32, u32, u32]
tensor_map = lib["_Z29llama_internal_get_tensor_mapPK11llama_model"]
tensor_map.restype, tensor_map.argtypes = ctypes.POINTER(pointer), [pointer]
F32, I32 = 0, 26
MROPE, IMROPE, NEOX = 8, 40, 2
leave_empty = ctypes.CFUNCTYPE(None, tensor_p, pointer)(lambda tensor, user: None)


# --- the converter -------------------------------------------------------------------------------


def convert(config, folder, keys=None):
    """The GGUF file that the real converter writes for `config`, without weights and words.

    `keys` takes the place of every key and tensor of RoPE that the converter would write.
    """
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from safetensors.torch import save_file

    config = json.loads(json.dumps(config))
    for part in [config, *(part for part in config.values() if isinstance(part, dict))]:
        for key, value in LEFT_OUT.get(part.get("model_type"), {}).items():
            part.setdefault(key, value)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {"type": "WordPiece"}}')
    weights = wanted_weights(config)
    save_file(weights, folder / "model.safetensors")
    hparams = ModelBase.load_hparams(folder, False)
    model_class = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    written = folder / "converted.gguf"
    model_class.no_mtp = True  # the option --no-mtp; the layers for drafts have the same RoPE
    model = model_class(folder, gguf.LlamaFileType.ALL_F32, written, eager=True)
    model = getattr(model, "impl", model)  # of Mistral 3 and 4

    def no_words():
        model.gguf_writer.add_tokenizer_model("none")
        model.gguf_writer.add_token_type_count(2)
        if f"{model.gguf_writer.arch}.vocab_size" not in model.gguf_writer.kv_data[0]:
            model.gguf_writer.add_vocab_size(model.hparams.get("vocab_size") or 1024)

    model.set_vocab = no_words
    model.prepare_tensors()
    model.prepare_metadata(vocab_only=False)
    if keys is not None:
        replace_rope(model.gguf_writer, keys)
    model.gguf_writer.write_header_to_file(path=written)
    model.gguf_writer.write_kv_data_to_file()
    model.gguf_writer.write_tensors_to_file()
    model.gguf_writer.close()
    return written


def wanted_weights(config):
    """The few weights without which two of the converters stop, as small as they may be."""
    import torch

    weights = {}
    if config["model_type"] == "apertus":  # numbers of its activation, which become metadata
        for layer in range(config["num_hidden_layers"]):
            for name in ("alpha_n", "alpha_p", "beta", "eps"):
                weights[f"model.layers.{layer}.mlp.act_fn.{name}"] = torch.ones(1)
    if config["model_type"] == "deepseek_v4":  # experts in 4 bits, stacked when they are converted
        inner, width = config["moe_intermediate_size"], config["hidden_size"]
        for layer in range(config["num_hidden_layers"]):
            for expert in range(config["n_routed_experts"]):
                for name, rows, columns in (
                    ("w1", inner, width), ("w2", width, inner), ("w3", inner, width),
                ):  # fmt: skip
                    full = f"layers.{layer}.ffn.experts.{expert}.{name}"
                    weights[f"{full}.weight"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
                    weights[f"{full}.scale"] = torch.zeros(rows, columns // 32, dtype=torch.uint8)
    return weights


def replace_rope(writer, keys):
    """Put `keys` and the tensors among them where the converter had its own about RoPE."""
    values, tensors = writer.kv_data[0], writer.tensors[0]
    for name in [name for name in values if name.startswith(f"{writer.arch}.rope.")]:
        del values[name]
    for name in ROPE_TENSORS:
        tensors.pop(name, None)
    for name, value in keys.items():
        if name in ROPE_TENSORS:
            writer.add_tensor(name, np.asarray(value, np.float32))
        elif name != "general.architecture":
            values.pop(name, None)
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
            getattr(writer, f"add_{kind[type(value)]}")(name, value)


def metadata(path):
    """The architecture, the keys that concern RoPE and the tensors of RoPE of a GGUF file."""
    reader = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    name = values["general.architecture"]
    kept = {"general.architecture": name} | {
        key: value
        for key, value in values.items()
        if key.removeprefix(f"{name}.").startswith(RECORDED)
    }
    tensors = {
        each.name: [float(f"{value:.9g}") for value in each.data.tolist()]
        for each in reader.tensors
        if each.name in ROPE_TENSORS
    }
    return kept, tensors


def with_tensors(converted, folder):
    """A file with the converter's metadata and RoPE tensors, and all tensors of the model.

    The model's tensors have no bytes: the file is sparse, and nothing reads them.
    """
    header = gguf_open(str(converted).encode(), GgufParams(False, None))
    params = model_params()
    params.no_alloc = True
    model = model_of_metadata(header, leave_empty, None, params)
    if not model:
        raise RuntimeError("libllama does not make a model of the metadata")
    begin, end = tensor_map(model)[0], tensor_map(model)[1]
    for entry in range(begin, end, 16):  # pairs of std::string (a pointer in the old ABI), tensor
        tensor = ctypes.cast(pointer.from_address(entry + 8).value, tensor_p)
        name = tensor.contents.name
        if name.decode() not in ROPE_TENSORS and gguf_find(header, name) < 0:
            gguf_add(header, tensor)
    complete = folder / "complete.gguf"
    gguf_write(header, str(complete).encode(), True)
    last = gguf_count(header) - 1
    start = complete.stat().st_size
    os.truncate(complete, start + gguf_offset(header, last) + gguf_size(header, last) + 64)
    with complete.open("r+b") as stream:
        for tensor in gguf.GGUFReader(converted).tensors:
            if tensor.name in ROPE_TENSORS:
                stream.seek(start + gguf_offset(header, gguf_find(header, tensor.name.encode())))
                stream.write(tensor.data.astype(np.float32).tobytes())
    return complete


# --- what libllama computes ----------------------------------------------------------------------


def rope_nodes(model, length):
    """Every ROPE node of the graph that libllama builds for a context of `length` tokens."""
    params = context_params()
    params.n_ctx, params.n_batch, params.n_ubatch = length, 8, 8
    context = new_context(model, params)
    if not context:
        raise RuntimeError("libllama makes no context")
    graph = graph_reserve(context, 8, 1, 8)
    nodes = []
    for index in range(graph_nodes(graph)):
        node = graph_node(graph, index).contents
        if op_name(node.op) == b"ROPE":
            source = node.src[0].contents
            factors = node.src[2].contents.name.decode() if node.src[2] else None
            nodes.append({
                "name": node.name.decode(), "params": list(node.op_params), "width": source.ne[0],
                "heads": source.ne[1], "offset": source.view_offs, "stride": source.nb[1],
                "source": source.name.decode(), "factors": factors,
            })  # fmt: skip
    free_context(context)
    return nodes


def kernel(params, width, factors, position):
    """Unit vectors (1 at one channel each, all `width` of them) rotated by ggml at `position`.

    `position` has 4 numbers, of which plain RoPE takes the first. Returns (width, width): row c
    is what became of channel c.
    """
    memory = ggml_init(InitParams(1 << 26, None, False))
    x = new_3d(memory, F32, width, width, 1)
    np.ctypeslib.as_array(ctypes.cast(x.contents.data, ctypes.POINTER(f32)), (width, width))[:] = (
        np.eye(width, dtype=np.float32)
    )
    many = params[2] & MROPE
    at = new_1d(memory, I32, 4 if many else 1)
    ids = np.ctypeslib.as_array(ctypes.cast(at.contents.data, ctypes.POINTER(i32)),
                                (4 if many else 1,))  # fmt: skip
    ids[:] = position[: len(ids)]
    divisors = None
    if factors is not None:
        divisors = new_1d(memory, F32, len(factors))
        np.ctypeslib.as_array(ctypes.cast(divisors.contents.data, ctypes.POINTER(f32)),
                              (len(factors),))[:] = factors  # fmt: skip
    numbers = np.array(params[5:11], np.int32).view(np.float32).tolist()
    if many:
        sections = (i32 * 4)(*params[11:15])
        y = rope_multi(memory, x, at, divisors, params[1], sections, params[2], params[4], *numbers)
    else:
        y = rope_ext(memory, x, at, divisors, params[1], params[2], params[4], *numbers)
    y.contents.op_params[:] = params  # with the offset, which is set apart
    graph = new_graph(memory)
    expand(graph, y)
    compute(memory, graph, 1)
    turned = np.ctypeslib.as_array(ctypes.cast(y.contents.data, ctypes.POINTER(f32)),
                                   (width, width)).astype(np.float64)  # fmt: skip
    ggml_free(memory)
    return turned


def measure(node, tensors):
    """The numbers of a row: what ggml does with unit vectors under this node's parameters."""
    params, width = node["params"], node["width"]
    factors = tensors.get(node["factors"]) if node["factors"] else None
    turned = kernel(params, width, factors, (1, 1, 1, 0))  # llama.cpp's positions of a text token
    still = kernel(params, width, factors, (0, 0, 0, 0))
    amplitude = float(np.max(np.abs(np.diagonal(still))))
    start, rotary_dim = params[15], params[1]
    half = params[2] & NEOX or params[2] & MROPE
    first = start + (np.arange(rotary_dim // 2) if half else np.arange(0, rotary_dim, 2))
    second = first + (rotary_dim // 2 if half else 1)
    inv_freq = np.arctan2(turned[first, second], turned[first, first])
    inv_freq[np.abs(inv_freq) < 1e-25] = 0  # divided by 1e30, so that it stands still
    built = np.eye(width) * 1.0  # nothing but these pairs may have moved
    cos, sin = turned[first, first], turned[first, second]
    built[first, first], built[second, second] = cos, cos
    built[first, second], built[second, first] = sin, -sin
    if not np.allclose(built, turned, atol=1e-6):
        raise RuntimeError("ggml moved other channels than the layout says")
    row = {
        "inv_freq": [float(f"{value:.9g}") for value in inv_freq],
        "attention_factor": float(f"{amplitude:.9g}"),
        "layout": "half" if half else "interleaved",
        "rotary_dim": rotary_dim,
        "start": start + node["offset"] % node["stride"] // 4 if node["heads"] > 1 else start,
    }
    if params[2] & MROPE:
        axes = np.full(rotary_dim // 2, -1)
        for axis in range(4):
            position = [0, 0, 0, 0]
            position[axis] = 1
            moved = kernel(params, width, factors, position)[first, second]
            axes[np.abs(moved) > 0] = axis
        row["axes"] = axes.tolist()
    return row


def layers_of(nodes):
    """The nodes that turn queries, by what they compute: [(nodes, layers)]."""
    groups = {}
    for node in nodes:
        if not node["name"].lower().startswith(("k", "indexer", "mtp_")):
            key = json.dumps([node["params"], node["width"], node["factors"]])
            groups.setdefault(key, []).append(node)
    number = re.compile(r"-(\d+)$")
    return [
        (group, [int(n[1]) for node in group if (n := number.search(node["name"]))])
        for group in groups.values()
    ]


def layer_types_of(config, groups):
    """A name for each group of layers, as the config calls them; None where there is one."""
    if len(groups) == 1:
        return [None]
    text = config.get("text_config") or config
    if text.get("layer_types"):
        return [text["layer_types"][layers[0]] for _, layers in groups]
    if text.get("compress_ratios"):
        return [
            "compress" if text["compress_ratios"][layers[0]] else "main" for _, layers in groups
        ]
    # Gemma 3, ModernBERT, OLMo 3: of two kinds of layers the sliding ones are more
    most = max(len(layers) for _, layers in groups)
    return [
        "sliding_attention" if len(layers) == most else "full_attention" for _, layers in groups
    ]


def rows_of(config, name, folder, keys=None):
    """The rows of one config, and what its GGUF file says about RoPE."""
    written, tensors = metadata(converted := convert(config, folder, keys))
    backend_load_all()
    backend_init()
    params = model_params()
    params.no_alloc, params.load_mode = True, 0
    model = model_of_file(str(with_tensors(converted, folder)).encode(), params)
    if not model:
        raise RuntimeError("libllama does not load the file")
    architecture = written["general.architecture"]
    longest = written.get(f"{architecture}.context_length", 4096)
    lengths = [longest]
    if "rope_factors_long.weight" in tensors:
        trained = f"{architecture}.rope.scaling.original_context_length"
        lengths = sorted({written.get(trained, longest), longest})
    rows = []
    for length in lengths:
        groups = layers_of(rope_nodes(model, min(length, 1 << 18)))
        kinds = layer_types_of(config, groups)
        for (group, _), kind in zip(groups, kinds, strict=True):
            if any((each["layer_type"], each["seq_len"]) == (kind, length) for each in rows):
                continue  # DeepSeek-V4's indexer, after the heads of the same layers
            row = {"config": name, "layer_type": kind, "seq_len": length}
            row |= measure(group[0], tensors)
            rows.append(row)
    return rows, {**written, **tensors}


def rope_type_of(index, _folder):
    """(name, the number of its RoPE type) of an architecture of libllama, without sections."""
    params = model_params()
    return arch_name(index).decode(), rope_type(model_of_arch(index, ctypes.byref(params)))


def rope_types():
    """Architecture -> the number of its RoPE type in llama.h, of all that libllama can make."""
    names = iter(range(1000))
    found = {}
    while not arch_name(index := next(names)).endswith(b"unknown)"):
        result = apart(rope_type_of, index)
        if not isinstance(result, str):
            found[result[0]] = result[1]
    return found


def apart(job, *arguments):
    """`job` in a process of its own: a failed assertion of ggml ends the process."""

    def run(connection, log):
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            with tempfile.TemporaryDirectory() as folder:
                connection.send(job(*arguments, Path(folder)))
        except Exception as problem:
            connection.send(f"{type(problem).__name__}: {problem}".splitlines()[0])

    with tempfile.TemporaryFile() as log:
        receiver, sender = multiprocessing.Pipe(False)
        process = multiprocessing.get_context("fork").Process(
            target=run, args=(sender, log.fileno())
        )
        process.start()
        sender.close()
        try:
            result = receiver.recv() if receiver.poll(120) else "no answer in 120 s"
        except EOFError:
            log.seek(0)
            result = log.read().decode(errors="replace").strip().splitlines()[-1]
        process.kill()
        process.join()
    return result


def write(path, head, rows):
    """JSON with a row per line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n')


def head():
    return {
        "program": "llama.cpp", "version": f"b{version('xllamacpp').rsplit('.', 1)[1]}",
        "date": date.today().isoformat(),
        "environment": f"xllamacpp {version('xllamacpp')}, converter of {ARCHIVE}, "
        f"transformers {version('transformers')}",
    }  # fmt: skip


def every_config(configs, out):
    """Convert, load and measure every config; the metadata goes into a second file beside OUT.

    The context is what the config is made for; rows of a shorter one, where a file has factors for
    short and long contexts, stand beside its metadata as "short_context".
    """
    rows, files = [], []
    for path in sorted(Path(configs).glob("*.json")):
        config = json.loads(path.read_text())
        result = apart(lambda folder: rows_of(config, path.name, folder))  # noqa: B023
        if isinstance(result, str):
            reason = "skipped" if result.startswith("NotImplementedError") else "refused"
            rows.append({"config": path.name, "layer_type": None, reason: result})
        else:
            measured, written = result
            longest = max(row["seq_len"] for row in measured)
            rows += [row for row in measured if row["seq_len"] == longest]
            short = [row for row in measured if row["seq_len"] < longest]
            files.append({"config": path.name, "metadata": written, "short_context": short})
        outcome = rows[-1].get("refused") or rows[-1].get("skipped") or "measured"
        print(path.name, outcome, flush=True)  # noqa: T201
    write(Path(out), head(), rows)
    types = {"rope_types": rope_types()}
    write(Path(out).with_name("gguf_metadata.json"), head() | types, files)


def every_key(configs, path):
    """What llama.cpp computes from the keys in the rows of `path`, written into those rows.

    A row has "keys", made by another program, and "config", whose sizes the model takes.
    """
    recorded = json.loads(Path(path).read_text())
    for row in recorded["rows"]:
        config = json.loads((Path(configs) / row["config"]).read_text())
        result = apart(lambda folder: rows_of(config, "", folder, row["keys"])[0])  # noqa: B023
        row["computed"] = result if isinstance(result, str) else [
            {key: value for key, value in each.items() if key != "config"} for each in result
        ]  # fmt: skip
        outcome = result if isinstance(result, str) else "measured"
        print(row["name"], outcome, flush=True)  # noqa: T201
    write(Path(path), head(), recorded["rows"])


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    import conversion  # noqa: F401  (before the forks, once)

    if sys.argv[1] == "--keys":
        every_key(*sys.argv[2:4])
    else:
        every_config(*sys.argv[1:3])
