"""Tiny random models in vLLM with and without rotary's plug-in: are the tokens the same?

    python tests/peers/vllm_plugin.py [PAGE]

Runs in vLLM's environment, with rotary installed there (`pip install --no-deps -e .`), so that vLLM
itself finds the plug-in. Every model has random weights large enough for positions to decide its
tokens, which the column "other positions" shows: vLLM alone, by every second row of its tables.
Each run is a process of its own, which writes 32 greedy tokens for each of 3 prompts and counts the
calls that rotary answered. Prints the table, writes it to PAGE, and ends with 1 if a float32 token
differs or rotary was not called.
"""

import os
import sys
import tempfile
import traceback
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

import measure
import numpy as np

measure.leave_this_folder()

os.environ.update(
    VLLM_TARGET_DEVICE="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="INFO", GLOO_SOCKET_IFNAME="lo",
    VLLM_DISABLE_COMPILE_CACHE="1", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    TRANSFORMERS_VERBOSITY="error",
)  # fmt: skip
import torch  # noqa: E402

# torchvision from the registry is built for CUDA: once its two operators exist it imports
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import torch.profiler  # noqa: E402
import transformers  # noqa: E402
import vllm  # noqa: E402
import vllm.model_executor.models.registry as registry  # noqa: E402
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration  # noqa: E402

import rotary.integrations.vllm as plugin  # noqa: E402

registry._run_in_subprocess = lambda function: function()  # torchvision fails there
TOKENS = 32
BASE = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rope(rope_type, **keys):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **keys}}


MODELS = {  # name -> (class of vLLM's embedding, class of transformers' config, keys)
    "default": ("RotaryEmbedding", "LlamaConfig", rope("default")),
    "llama3": ("Llama3RotaryEmbedding", "LlamaConfig", rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64)),
    "linear": ("LinearScalingRotaryEmbedding", "LlamaConfig", rope("linear", factor=4.0)),
    "dynamic": ("DynamicNTKScalingRotaryEmbedding", "LlamaConfig", rope(
        "dynamic", factor=4.0, max_trained_positions=128)),
    "yarn": ("YaRNScalingRotaryEmbedding", "Qwen2Config", rope(**YARN)),
    "longrope": ("Phi3LongRoPEScaledRotaryEmbedding", "Phi3Config", {
        **rope("longrope", short_factor=[1.0] * 32, long_factor=[1 + i / 8 for i in range(32)],
               original_max_position_embeddings=64), "original_max_position_embeddings": 64}),
    "partial, half": ("RotaryEmbedding", "Phi3Config", rope("default", partial_rotary_factor=0.5)),
    "partial, interleaved": ("RotaryEmbedding", "Glm4Config", {
        **rope("default", partial_rotary_factor=0.5), "head_dim": 64}),
    "M-RoPE": ("MRotaryEmbedding", "Qwen2VLConfig", rope("default", mrope_section=[8, 12, 12])),
    "DeepSeek MLA": ("DeepseekScalingRotaryEmbedding", "DeepseekV2Config", {
        **rope(**YARN, mscale=0.707, mscale_all_dim=0.5), "num_key_value_heads": 4,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "first_k_dense_replace": 2, "n_routed_experts": 2}),
}  # fmt: skip
EAGER = {"enforce_eager": True}
COMPILED = {"compilation_config": {"custom_ops": ["+rotary_embedding"]}}
WAYS = {  # of a run: options of vLLM, dtype, ROTARY_EXACT
    "eager, float32": (EAGER, "float32", "0"),
    "eager, bfloat16": (EAGER, "bfloat16", "0"),
    "eager, float32, exact": (EAGER, "float32", "1"),
    "eager, bfloat16, exact": (EAGER, "bfloat16", "1"),
    "compiled, float32": (COMPILED, "float32", "0"),
}
ALWAYS = [way for way in WAYS if not way.startswith("compiled")]
COMPILED_TOO = ("default", "longrope", "M-RoPE")


def write(name, folder):
    """A model of transformers with random weights, as a checkpoint."""
    _, kind, keys = MODELS[name]
    torch.manual_seed(7)
    if kind == "Qwen2VLConfig":
        vision = {"depth": 1, "embed_dim": 64, "num_heads": 2, "hidden_size": 256, "mlp_ratio": 2}
        config = transformers.Qwen2VLConfig(text_config={**BASE, **keys}, vision_config=vision)
        model = transformers.Qwen2VLForConditionalGeneration(config)
    else:
        config = getattr(transformers, kind)(**{**BASE, **keys})
        model = transformers.AutoModelForCausalLM.from_config(config)
    for path, weight in model.named_parameters():
        if weight.dim() > 1:  # queries and keys large, so that a score decides
            scale = 3.0 if any(part in path for part in ("q_", "k_", "qkv", "kv_")) else 1.0
            torch.nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    if kind == "Qwen2VLConfig":
        transformers.Qwen2VLImageProcessor().save_pretrained(folder)


def run(name, folder, way, is_on, positions):
    """One run of vLLM: what it wrote, and how often rotary was called."""
    options, dtype, exact = WAYS[way]
    os.environ.update(VLLM_PLUGINS="rotary" if is_on else "", ROTARY_EXACT=exact)
    calls, own = {"rotary": 0, "grid": 0}, plugin._rotated

    def counted(*args):
        results = own(*args)
        calls["rotary"] += results is not None
        return results

    def grid(self, tokens, features):
        """Positions as of an image of 4 x 4 patches behind 4 tokens, then text."""
        count = len(tokens)
        calls["grid"] += 1
        at = torch.arange(count).repeat(3, 1)
        h, w = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        image = min(16, count - 4)
        at[:, 4 : 4 + image] = (
            4 + torch.stack([torch.zeros(16), h.flatten(), w.flatten()])[:, :image].long()
        )
        at[:, 4 + image :] = 8 + torch.arange(count - 4 - image)
        return at * positions, int(at.max()) + 1 - count

    Qwen2VLForConditionalGeneration.get_mrope_input_positions = grid
    more = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if name == "M-RoPE" else {}
    engine = vllm.LLM(
        model=folder, dtype=dtype, skip_tokenizer_init=True, max_model_len=256, seed=0,
        enable_prefix_caching=False, max_num_seqs=4, **more, **options,
    )  # fmt: skip
    modules = []
    engine.apply_model(lambda model: modules.extend(model.modules()))
    ropes = [module for module in modules if type(module).__name__ == MODELS[name][0]]
    if not ropes:
        raise LookupError(f"no {MODELS[name][0]} in the model")
    if positions != 1:  # row 2 p where row p was
        for module in ropes:
            cache = next(iter(module._buffers.values()))
            cache.copy_(torch.cat([cache[::positions]] * positions)[: len(cache)])
    plugin._rotated = counted
    prompts = [[(7 * i + 3 * j) % 500 + 5 for i in range(24)] for j in range(3)]
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    watched = torch.profiler.profile() if "compiled" in way else nullcontext()
    with watched:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    if "compiled" in way:  # there rotary is an operator in a graph
        calls["rotary"] += sum(each.name.startswith("rotary::") for each in watched.events())
    if name == "M-RoPE" and calls["grid"] < len(prompts):
        raise RuntimeError("the positions of an image were not asked for")
    found = {
        "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        "logprobs": [max(v.logprob for v in step.values())
                     for each in outputs for step in each.outputs[0].logprobs],
        "calls": calls["rotary"],
        "is_ours": type(ropes[0]).__module__ == plugin.__name__,
    }  # fmt: skip
    buffers = ropes[0]._buffers
    table = buffers.get("rotary_table", next(iter(buffers.values())))
    return found | {"table": table[:256].double().tolist()}


def started(name, folder, way, is_on, positions=1):
    """The same in a process of its own, which may end by itself."""
    receiver, sender = get_context("fork").Pipe(False)

    def answer():
        place = os.environ.get("PEER_LOGS", tempfile.gettempdir())
        log = os.open(f"{place}/vllm-plugin.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            if way is None:
                sender.send(write(name, folder))
            else:
                sender.send(run(name, folder, way, is_on, positions))
        except Exception as error:
            traceback.print_exc()
            sender.send({"error": measure.reason(error)})

    child = get_context("fork").Process(target=answer)
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return {"error": "the process ended by itself"}
    finally:
        child.join()


def alike(a, b):
    """Tokens of a before the first that b has otherwise, over all prompts."""
    count = 0
    for x, y in zip(a["tokens"], b["tokens"], strict=True):
        same = [left == right for left, right in zip(x, y, strict=True)]
        count += same.index(False) if False in same else len(same)
    return count


def rows_of(name):
    """(cells, whether all is well) of every run of one model."""
    with tempfile.TemporaryDirectory() as folder:
        if error := started(name, folder, None, False):
            yield [name, "", error["error"], "", "", "", ""], False
            return
        without = {}
        for way, (_, dtype, exact) in WAYS.items():
            if way not in ALWAYS and name not in COMPILED_TOO:
                continue
            key = way.removesuffix(", exact")
            if key not in without:
                without[key] = started(name, folder, key, False)
            own, ours = without[key], started(name, folder, way, True)
            if error := own.get("error") or ours.get("error"):
                yield [name, way, error, "", "", "", ""], False
                continue
            other = started(name, folder, way, False, 2) if way == next(iter(WAYS)) else None
            count = sum(map(len, own["tokens"]))
            same = alike(own, ours)
            off = np.abs(np.subtract(own["logprobs"], ours["logprobs"])).max()
            apart = np.abs(np.subtract(own["table"], ours["table"])).max()
            is_well = ours["is_ours"] and not own["is_ours"] and ours["calls"] > own["calls"] == 0
            yield [
                name, way, f"{same} of {count}", f"{off:.1e}" if same == count else "",
                f"{apart:.1e}", str(ours["calls"]),
                "" if other is None else other.get("error") or f"{alike(own, other)} of {count}",
            ], is_well and (same == count or dtype != "float32" or exact == "1")  # fmt: skip


def main(page=None, only=None):
    head = [
        "model", "run", "tokens alike", "log probabilities apart", "tables apart",
        "calls of rotary", "other positions",
    ]  # fmt: skip
    rows, is_well = [], True
    for name in MODELS if only is None else only.split(";"):
        for row, is_fine in rows_of(name):
            rows.append(row)
            is_well &= is_fine
            sys.stdout.write(" | ".join(row) + ("" if is_fine else "  <- wrong") + "\n")
            sys.stdout.flush()
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    if page:
        Path(page).write_text("\n".join([*lines, ""]))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
