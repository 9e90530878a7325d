"""vLLM: started on each config as its server starts, up to the whole model on no weights.

vLLM's own config loader, its engine arguments with their defaults (float32), its choice of a model
class and that class. The rotary module of each layer rotates unit vectors with its own
`forward_native`; where vLLM runs a model through transformers' class, that class's rotary module
and `apply_rotary_pos_emb` do. LongRoPE is recorded as started for max_position_embeddings.

    python tests/peers/vllm.py tests/configs OUT.json
    python tests/peers/vllm.py tests/golden/peers/to_vllm.json OUT.json

The second form starts a Llama model with each dict that `to_vllm` wrote, as --hf-overrides.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import measure
import servers

measure.leave_this_folder()

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
                  GLOO_SOCKET_IFNAME="lo", TRANSFORMERS_VERBOSITY="error",
                  VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")  # fmt: skip
import torch  # noqa: E402

# torchvision from the registry is built for CUDA: once its two operators exist it imports
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import transformers  # noqa: E402
import vllm  # noqa: E402
import vllm.model_executor.models.registry as registry  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers import rotary_embedding  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl  # noqa: E402

# names that vLLM writes otherwise than the published file
ARCHITECTURES = {"Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}


def started(config, max_model_len=None, overrides=None):
    """(engine config, model) of vLLM for a config, as `vllm serve` makes them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = EngineArgs(
            model=folder, dtype="float32", load_format="dummy", enforce_eager=True,
            skip_tokenizer_init=True, max_model_len=max_model_len, hf_overrides=overrides or {},
        ).create_engine_config()  # fmt: skip
        rotary_embedding._ROPE_DICT.clear()  # it keeps a list that was chosen by max_model_len
        with set_current_vllm_config(engine):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
                initialize_model_parallel()
        rows = servers.table_rows([config, overrides])
        with set_default_torch_dtype(torch.float32), servers.NoWeights(rows):
            return engine, initialize_model(engine)


def rows_of(name, config):
    config, notes = servers.completed(config), []
    model_type = config.get("model_type")
    if model_type in servers.REMOTE and model_type not in transformers.CONFIG_MAPPING:
        plain = servers.plain_config_class(transformers.PretrainedConfig, model_type)
        transformers.AutoConfig.register(model_type, plain)
        notes.append(servers.REMOTE_NOTE)
    for old in set(ARCHITECTURES) & set(config.get("architectures") or ()):
        config["architectures"] = [ARCHITECTURES[old]]
        notes.append(f"vLLM refuses the name {old} and knows {ARCHITECTURES[old]}")
    engine, model = servers.built(started, config)
    text, seq_len = engine.model_config.hf_text_config, None
    if any(hasattr(each, "use_long_rope") for each in model.modules()):
        by_default, seq_len = engine.model_config.max_model_len, text.max_position_embeddings
        if by_default < seq_len:
            engine, model = started(config, seq_len)
            notes.append(f"started with max_model_len {seq_len}; without options {by_default}")
    if ".transformers" in type(model).__module__:
        rows = servers.rows_of_transformers(name, model)
    else:
        rows = servers.rows_of_modules(name, model, text, seq_len)
    if any(hasattr(each, "permute_qk_weight_for_rotary") for each in model.modules()):
        notes.append("permutes the rows of q and k when it loads them")
    if "dual_chunk_attention_config" in config:
        notes.append("dual chunk attention counts positions from the start of a chunk")
    for row in rows:
        if notes:
            row["note"] = "; ".join([*filter(None, [row.get("note")]), *notes])
    return rows


class Nothing:
    """Stands for streams and events of a GPU."""

    def __init__(self, *args, **options):
        pass


def run_on_a_cpu():
    """Take away what stops a model for a GPU from being built on a CPU; none of it is RoPE."""
    registry._run_in_subprocess = lambda function: function()  # torchvision fails there
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.Event = torch.cuda.Stream = Nothing
    choose_backend = type(current_platform).get_attn_backend_cls
    make_attention = CPUAttentionBackendImpl.__init__

    def without_sparse(cls, selected_backend, attn_selector_config, num_heads=None):
        dense = attn_selector_config._replace(use_sparse=False)
        return choose_backend(selected_backend, dense, num_heads)

    def without_dual_chunks(self, *args, layer_idx=None, dual_chunk_attention_config=None, **more):
        make_attention(self, *args, **more)

    type(current_platform).get_attn_backend_cls = classmethod(without_sparse)
    CPUAttentionBackendImpl.__init__ = without_dual_chunks


def overridden(_, row):
    """The row of to_vllm.json with what a Llama model computes that is started with its dict."""
    llama = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4,
        "hidden_size": 4 * row["spec"]["head_dim"], "num_hidden_layers": 1, "vocab_size": 64,
        "intermediate_size": 64, "max_position_embeddings": 65536,
    }  # fmt: skip
    engine, model = started(llama, row["seq_len"], row["overrides"])
    (found,) = servers.rows_of_modules(None, model, engine.model_config.hf_text_config)
    kept = {key: row[key] for key in ("spec", "seq_len", "overrides")}
    return [{**kept, **{key: found[key] for key in found if key not in ("config", *kept)}}]


def main(source, out):
    run_on_a_cpu()
    rows = []
    if Path(source).is_file():
        for row in json.loads(Path(source).read_text())["rows"]:
            rows += servers.in_its_own_process(overridden, "to_vllm", row)
    else:
        for name, config in measure.configs(source):
            rows += servers.in_its_own_process(rows_of, name, config)
    measure.write(out, "vLLM", vllm.__version__, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
