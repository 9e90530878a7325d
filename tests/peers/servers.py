"""What the runners of vLLM and SGLang share: both build the same kind of model from a config.

Each config runs in a process of its own; the model is built whole, with weights that are shapes
without memory, and the rotary module of each layer rotates unit vectors. What the configs of this
repository leave out (vocabulary, experts) is made up, RoPE's own keys never are.
"""

import copy
import importlib
import json
import os
import re
import signal
import tempfile
import traceback
from multiprocessing import get_context

import measure
import torch
from torch.overrides import TorchFunctionMode

ROWS = 4096  # of a table of cos and sin that are computed
FARTHEST = ROWS // 4  # position at which a table is read
LAYERS = 12  # enough to meet every layer type
# what a program asks for and the files in tests/configs leave out; any other number is 8
MADE_UP = {
    "vocab_size": 1024, "tie_word_embeddings": False, "scoring_func": "sigmoid",
    "activation_function": "swiglu", "use_qk_norm": False, "hidden_act": "silu", "bias": False,
    "img_processor": {"name": "clip_vision_model", "image_dim_out": 1024, "num_img_tokens": 144},
    "embd_layer": {"use_hd_transform": True, "with_learnable_separator": True,
                   "hd_transform_order": "sub_glb", "projection_cls": "mlp"},
}  # fmt: skip
NEVER_MADE_UP = ("rope", "rotary", "theta", "position", "head_dim", "layer_types")
OWN = {  # what a model needs before any program says so
    "deepseek_v2": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
                    "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "deepseek_v32": {"index_topk": 2048, "index_n_heads": 8, "index_head_dim": 128},
    "deepseek_v4": {"vocab_size": 1024},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe_vl": {
        "moe_num_experts": [8, 8], "moe_intermediate_size": [64, 64], "moe_k": 2,
        "moe_layer_start_index": [1, 1], "moe_layer_end_index": [2, 2],
    },
    "esm": {"vocab_size": 33},
    "hy_v3": {"first_k_dense_replace": 1},
}  # fmt: skip
# model types whose config class comes with the checkpoint: a plain one stands for it
REMOTE = ("internlm2", "minicpm3", "minicpmv", "phi3_v", "ernie4_5_moe_vl")
REMOTE_NOTE = "its config class comes with the checkpoint: a plain one stood for it"


class NoWeights(TorchFunctionMode):
    """Empty tensors get no memory, nothing goes to a GPU, and no table more than some rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.empty:
            kwargs["device"] = "meta"
        elif "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.arange and len(args) == 1 and args[0] > self.rows:
            args = (self.rows,)
        return function(*args, **kwargs)


def table_rows(config):
    """How many rows of a table are computed: all where a long list lies behind a short one."""
    return 2**20 if "long_factor" in json.dumps(config) else ROWS


def parts(config):
    """The config and its sub-configs."""
    return [config, *(part for part in config.values() if isinstance(part, dict))]


def completed(config):
    """The config with what a program reads before anything else, and fewer layers."""
    config = copy.deepcopy(config)
    config.update(OWN.get(config.get("model_type"), {}))
    for part in parts(config):
        if any(key in part for key in ("num_kv_shared_layers", "num_attention_heads_per_layer")):
            continue  # these count layers too
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            if isinstance(part.get(key), int):
                part[key] = min(part[key], LAYERS)
        for key in ("layer_types", "no_rope_layers", "compress_ratios", "mlp_layer_types"):
            if isinstance(part.get(key), list):
                part[key] = part[key][:LAYERS]
    return config


def built(build, config):
    """build(config), with every key that the program misses made up."""
    while True:
        try:
            return build(config)
        except AttributeError as error:
            missing = re.fullmatch(
                r"'(\w*Config\w*|Plain|NoneType)' object has no attribute '(\w+)'", str(error)
            )
            if missing is None or any(word in missing[2] for word in NEVER_MADE_UP):
                raise
            if any(missing[2] in part for part in parts(config)):
                raise
            key = missing[2]
            value = MADE_UP.get(key, 1e-6 if "_eps" in key else 8)
            for part in parts(config):
                if part is config or "hidden_size" in part:
                    part.setdefault(key, value)


def plain_config_class(base, model_type):
    """A config class with the keys of the file and nothing else."""

    class Plain(base):
        def __init__(self, vision_config=None, **keys):
            if vision_config is not None:
                self.vision_config = base(**vision_config)
            self.__dict__.update(keys)
            super().__init__(**keys)

    Plain.model_type = model_type
    return Plain


def rotary_modules(model):
    """[(module, layers that use it)] of the attention of the text part."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        is_other = any(word in path for word in ("visual", "vision", "audio", "vpm", "indexer"))
        if path.split(".")[-1] == "rotary_emb" and hasattr(module, "rotary_dim") and not is_other:
            layer = next(int(part) for part in path.split(".") if part.isdigit())
            found.setdefault(id(module), (module, set()))[1].add(layer)
    return list(found.values())


def rows_of_modules(name, model, text, seq_len=None):
    """Rows of a model: one, or one for each layer type where their rotations differ.

    text     the text config that the program made
    seq_len  positions of the running batch, where the rotation depends on them
    """
    rows, types = {}, getattr(text, "layer_types", None)
    if hasattr(text, "compress_ratios"):
        types = ["compress" if ratio > 1 else "main" for ratio in text.compress_ratios]
    elif text.model_type == "deepseek_v4":  # its rope_parameters are nested by these two
        types = ["main" if each == "sliding_attention" else "compress" for each in types]
    for module, layers in rotary_modules(model):
        row = turning(module, seq_len)
        labels = {types[layer] for layer in layers} if types else {None}
        rows.setdefault(json.dumps(row), (row, set()))[1].update(labels)
    if len(rows) == 1:
        return [measure.row(name, None, seq_len, **row) for row, _ in rows.values()]
    return [
        measure.row(name, label, seq_len, **row)
        for row, labels in rows.values() for label in sorted(labels, key=str)
    ]  # fmt: skip


def rows_of_transformers(name, model):
    """Rows of a model that the program runs through transformers' class."""
    found = [
        module
        for path, module in model.named_modules()
        if path.endswith("rotary_emb") and "vision" not in path
    ]
    if not found:
        raise LookupError("no module rotary_emb in the model")
    module = found[0]
    code = importlib.import_module(type(module).__module__)
    rope = getattr(module.config, "rope_parameters", None) or {}
    lengths = [None]
    if rope.get("rope_type") == "dynamic" and "alpha" not in rope:
        trained = module.original_max_seq_len
        lengths = [trained, int(trained * rope["factor"])]

    def row(layer_type, seq_len):
        def rotate(position):
            positions = torch.tensor([[position, (seq_len or 1) - 1]])
            own = (layer_type,) if layer_type else ()
            cos, sin = (table[:, :1] for table in module(torch.zeros(1, 2, 8), positions, *own))
            unit = torch.eye(cos.shape[-1])[None, :, None]
            return code.apply_rotary_pos_emb(unit, unit, cos, sin)[0][0, :, 0].numpy()

        numbers = measure.measured(rotate, rotate(0).shape[0], farthest=FARTHEST)
        note = "run through transformers' class of it"
        return measure.row(name, layer_type, seq_len, **numbers, note=note)

    types = getattr(module, "layer_types", None)
    return [
        row(layer_type, seq_len)
        for seq_len in lengths
        for layer_type in (sorted(set(types)) if types else [None])
    ]


def turning(module, seq_len=None):
    """What one rotary module does to unit vectors, and which position axis drives each pair."""
    head = module.head_size
    unit = torch.eye(head).repeat(2, 1, 1)  # (tokens, heads, head)
    if hasattr(module, "long_factor"):
        unit = unit.flatten(1)
    apply = getattr(module, "forward_native", module.forward)
    last = (seq_len or 1) - 1  # the second token is the last of the batch

    def rotate(position, axis=None):
        positions = torch.tensor([position, last])
        if axis is not None:
            positions = torch.zeros(3, 2, dtype=torch.long)
            positions[axis, 0] = position
        if hasattr(module, "cos_sin_q_cache"):  # dual chunk attention
            table = module.cos_sin_q_cache[positions]
            query = module._apply_rotary_embedding(table, unit, None)
        else:
            query, _ = apply(positions, unit.clone(), unit.clone())
        return query.reshape(2, head, head)[0].numpy()

    row = measure.measured(rotate, head, farthest=FARTHEST)
    if getattr(module, "mrope_section", None):
        driven = [abs(rotate(1, axis) - rotate(0, axis)).max(1) > 1e-9 for axis in range(3)]
        step = 1 if row["layout"] == "half" else 2
        first = [row["start"] + step * i for i in range(len(row["inv_freq"]))]
        row["axes"] = [next(axis for axis in range(3) if driven[axis][i]) for i in first]
    return row


def in_its_own_process(rows_of, name, config):
    """rows_of(name, config), for a program that keeps one engine per process."""
    receiver, sender = get_context("fork").Pipe(False)
    child = get_context("fork").Process(target=_answer, args=(rows_of, name, config, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return [measure.row(name, skipped=f"the process ended with {child.exitcode}")]
    finally:
        child.join()


def _answer(rows_of, name, config, sender):
    place = os.environ.get("PEER_LOGS")
    log = open(os.path.join(place, f"{name}.txt") if place else os.devnull, "w")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    signal.alarm(300)
    try:
        rows = rows_of(name, config)
    except Exception as error:
        traceback.print_exc()
        unknown = re.search("Model architectures .* are not supported for now", str(error))
        reason = "no model file for it" if unknown else measure.reason(error)
        reason = re.sub(rf"{tempfile.gettempdir()}/\w+", "the folder", reason)
        calls = traceback.extract_tb(error.__traceback__)
        about_rope = any("rope" in call.name or "rotary" in call.filename for call in calls)
        rows = [measure.row(name, **{"refused" if about_rope else "skipped": reason})]
    sender.send(rows)
