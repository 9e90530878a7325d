"""SGLang: its config loader and its model class on each config, on no weights, as on a CPU.

The rotary module of each layer rotates unit vectors with its own `forward_native`. SGLang picks
the list of LongRoPE by the positions of the running batch, so that is measured at both lengths.
Its kernels and other modules that do not install on a CPU machine are replaced by empty ones.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from importlib.metadata import version
from pathlib import Path

import measure
import servers

measure.leave_this_folder()

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", GLOO_SOCKET_IFNAME="lo",
                  TRANSFORMERS_VERBOSITY="error")  # fmt: skip
MISSING = ("sgl_kernel", "tvm_ffi", "loguru", "cutlass", "flashinfer", "deep_gemm", "torchaudio")


class _Class(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty

    def __call__(cls, *args, **options):
        if cls is Empty and len(args) == 1 and not options and callable(args[0]):
            return args[0]  # a decorator
        return super().__call__(*args, **options)

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Empty(metaclass=_Class):
    """Whatever a missing module is asked for: a class, a decorator, a function, a value."""

    def __init__(self, *args, **options):
        pass

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports an empty module for each of MISSING that is not installed."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _attribute(name)
        return module

    def exec_module(self, module):
        pass


def _attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Empty,), {}) if name[0].isupper() else Empty


sys.meta_path.append(EmptyModules())
import torch  # noqa: E402

# torchvision from the registry is built for CUDA: once its two operators exist it imports
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import sglang.srt.distributed.bootstrap as bootstrap  # noqa: E402
import transformers  # noqa: E402
from sglang.srt.arg_groups import mamba_hook  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.layers.rotary_embedding import apply_rotary_pos_emb, factory  # noqa: E402
from sglang.srt.model_loader.loader import _initialize_model  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

torch.ops.sgl_kernel = Empty()  # model files ask for operators when they are imported
from sglang.srt.models import registry  # noqa: E402


def started(config):
    """(model config, model) of SGLang for a config, as its server makes them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        needs_triton = "Exaone4ForCausalLM" in (config.get("architectures") or ())
        arguments = ServerArgs(
            model_path=folder, device="cpu", dtype="float32", load_format="dummy",
            skip_tokenizer_init=True, attention_backend="triton" if needs_triton else None,
        )  # fmt: skip
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        model_config = ModelConfig.from_server_args(arguments)
        if not torch.distributed.is_initialized():
            bootstrap._init_parallel_groups(
                backend="gloo", dist_init_method=f"file://{folder}/store",
                server_args=arguments, gpu_id=0,
            )  # fmt: skip
        with servers.NoWeights(servers.table_rows(config)):
            return model_config, _initialize_model(model_config, LoadConfig(load_format="dummy"))


def gemma3_rows(name, model):
    """Rows of Gemma 3, whose angles are made once for the model; its layers have their own too."""
    made = {path.split(".")[-1]: module for path, module in model.named_modules()
            if type(module).__name__ == "Gemma3RotaryEmbedding"}  # fmt: skip
    names = {"full_attention": "rotary_emb", "sliding_attention": "rotary_emb_local"}

    def row(layer_type, module):
        def rotate(position):
            cos, sin = module(torch.zeros(1, 1, 8), torch.tensor([[position]]))
            unit = torch.eye(cos.shape[-1])[None]
            return apply_rotary_pos_emb(unit, unit, cos[0], sin[0])[0][0].numpy()

        row = measure.measured(rotate, rotate(0).shape[0], farthest=servers.FARTHEST)
        note = "a CPU with AMX takes the angles of the layers, which have no scaling"
        return measure.row(name, layer_type, **row, note=note)

    return made and [row(layer_type, made[key]) for layer_type, key in names.items()]


def deepseek_v4_rows(name, model, text):
    """Rows of DeepSeek-V4, whose kernels multiply the last channels by complex numbers."""
    ratios = getattr(text, "compress_ratios", None) or [0]
    rows = {}
    for path, module in model.named_modules():
        table = getattr(module, "freqs_cis", None)
        if isinstance(table, torch.Tensor) and path.endswith("self_attn"):
            layer = next(int(part) for part in path.split(".") if part.isdigit())
            near, far = table[1], table[servers.FARTHEST]
            row = {
                "inv_freq": near.angle().tolist(), "attention_factor": float(near.abs().mean()),
                "layout": "interleaved", "rotary_dim": 2 * len(near),
                "start": text.head_dim - 2 * len(near),
            }  # fmt: skip
            turned = (far / near**servers.FARTHEST).angle().abs().max()
            if turned > 1e-2:
                raise ValueError("the angles are not proportional to the position")
            note = "its table freqs_cis; layout and slice are those of kernels for a GPU"
            label = "compress" if ratios[layer] > 1 else "main"
            rows[label] = measure.row(name, label, **row, note=note)
    return [rows[label] for label in sorted(rows)]


def run_on_a_cpu():
    """Take away what stops a model for a GPU from being built on a CPU; none of it is RoPE."""
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    factory.get_rope_cpu = lambda *args: factory.get_rope(*args[:-1])  # the last is the device
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *args: (9, 0)


def rows_of(name, config):
    config, notes = servers.completed(config), []
    model_type = config.get("model_type")
    if model_type in servers.REMOTE and model_type not in transformers.CONFIG_MAPPING:
        plain = servers.plain_config_class(transformers.PretrainedConfig, model_type)
        transformers.AutoConfig.register(model_type, plain)
        notes.append(servers.REMOTE_NOTE)
    model_config, model = servers.built(started, config)
    text, modules = model_config.hf_text_config, servers.rotary_modules(model)
    lengths = {None: None}
    for module, _ in modules:
        if hasattr(module, "long_factor"):
            trained, longest = module.original_max_position_embeddings, text.max_position_embeddings
            lengths = dict.fromkeys((trained, longest))
    rows = [row for length in lengths
            for row in servers.rows_of_modules(name, model, text, length)]  # fmt: skip
    own = gemma3_rows(name, model) or deepseek_v4_rows(name, model, text)
    rows = own or rows or servers.rows_of_transformers(name, model)
    for row in rows:
        if notes:
            row["note"] = "; ".join(notes)
    return rows


def main(folder, out):
    run_on_a_cpu()
    registry.ModelRegistry.get_supported_archs()  # imports every model file, once
    rows = []
    for name, config in measure.configs(folder):
        rows += servers.in_its_own_process(rows_of, name, config)
    measure.write(out, "SGLang", version("sglang"), rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
