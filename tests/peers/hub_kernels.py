"""Hugging Face's kernels: what `rotary export-kernel` writes, as a layer of models of transformers.

Tiny models with random weights run with their own function and with the layer in its place, in
inference and in training; the logits and the gradients of all weights are compared. In float32 a
difference is written down as it is; in bfloat16, where transformers rounds every product and the
layer the result alone, it is "rounding" up to 5 % of the largest number. Neither Numba nor Triton
is installed here.

    python tests/peers/hub_kernels.py tests/configs OUT.json
"""

import logging
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import measure

measure.leave_this_folder()
logging.disable(logging.WARNING)  # of each layer of a model that is not in the mapping

import torch  # noqa: E402
import transformers  # noqa: E402
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from transformers.utils.kernel_config import KernelConfig  # noqa: E402

SOURCES = Path(__file__).resolve().parents[2] / "src"
EXPORT = "import sys; sys.path.insert(0, sys.argv[1]); from rotary.integrations import hub_kernel; \
hub_kernel.export(sys.argv[2])"
PLAIN = "apply_rotary_transformers"
MODELS = {  # class -> the layer for it, and what its config needs beside TINY
    "LlamaForCausalLM": (PLAIN, {}),
    "MistralForCausalLM": (PLAIN, {}),
    "Qwen3ForCausalLM": (PLAIN, {"head_dim": 16}),
    "Gemma2ForCausalLM": (PLAIN, {"head_dim": 16}),
    "Olmo2ForCausalLM": (PLAIN, {}),
    "ModernBertForMaskedLM": (PLAIN, {}),
    "EsmForMaskedLM": (PLAIN, {"position_embedding_type": "rotary", "mask_token_id": 4}),
    "NanoChatForCausalLM": ("apply_rotary_conjugate", {}),
    "GptOssForCausalLM": ("apply_rotary_half_width", {"head_dim": 16}),
    "OpenAIPrivacyFilterForTokenClassification": ("apply_rotary_interleaved", {"head_dim": 16}),
}
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0,
}  # fmt: skip
TOKENS = torch.arange(24).view(2, 12) * 7 % 90 + 5
ROUNDING = 0.05


def made(name, dtype):
    torch.manual_seed(0)
    known = getattr(transformers, name)
    return known(known.config_class(**TINY | MODELS[name][1])).to(dtype).eval()


def functions(model):
    """The rotation of each layer, as an object whose `forward` is replaced."""
    found = [f for m in model.modules() for f in getattr(m, "_kernel_funcs", {}).values()]
    return [f for f in found if f.kernel_layer_name == "rotary_pos_emb"]


def ran(model):
    """Logits, and the gradients of all weights that have one."""
    model.zero_grad()
    torch.manual_seed(0)  # of dropout
    logits = model(TOKENS).logits
    logits.float().square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def apart(ours, theirs, dtype):
    """(the largest difference, of the largest number), or "rounding"."""
    assert len(ours) == len(theirs)
    most = 0.0
    for a, b in zip(ours, theirs, strict=True):
        most = max(most, float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)))
    return most if dtype == torch.float32 or most > ROUNDING else "rounding"


def rows_of(name, folder):
    layer, _ = MODELS[name]
    chosen = LocalLayerRepository(repo_path=folder, layer_name=layer)
    for dtype in (torch.float32, torch.bfloat16):
        for mode in (Mode.INFERENCE, Mode.TRAINING):
            model = made(name, dtype).train(mode is Mode.TRAINING)
            kernelize_by(model, mode, {})
            theirs = ran(model)
            kernelize_by(model, mode, {"rotary_pos_emb": {"cpu": chosen}})
            assert is_used(layer, model)
            ours = ran(model)
            yield {"arguments": [name, str(dtype)[6:], mode.name.lower()], "layer": layer,
                   "logits": apart(ours[:1], theirs[:1], dtype),
                   "gradients": apart(ours[1:], theirs[1:], dtype)}  # fmt: skip
    kernelize_by(model, Mode.INFERENCE, {})


def kernelize_by(model, mode, mapping):
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=mode, device="cpu")


def is_used(layer, model):
    used = {function.forward.__func__.__qualname__ for function in functions(model)}
    return used == {f"{layer}.forward"}


def compiled_row(folder):
    """The whole model under torch.compile, with the layer as `can_torch_compile` lets it be."""
    mode = Mode.INFERENCE | Mode.TORCH_COMPILE
    model = made("LlamaForCausalLM", torch.float32)
    kernelize_by(model, Mode.INFERENCE, {})
    theirs = model(TOKENS).logits
    chosen = LocalLayerRepository(repo_path=folder, layer_name=PLAIN)
    kernelize_by(model, mode, {"rotary_pos_emb": {"cpu": chosen}})
    assert is_used(PLAIN, model)
    ours = torch.compile(model, fullgraph=True)(TOKENS).logits
    most = float((ours - theirs).abs().max() / theirs.abs().max())
    return {"arguments": ["LlamaForCausalLM", "float32", "torch.compile, fullgraph"],
            "layer": PLAIN, "logits": "rounding" if most < 1e-5 else most}  # fmt: skip


def wrong_layer_row(folder):
    """A model whose tables have another width is refused by the plain layer, not rotated wrong."""
    model = made("GptOssForCausalLM", torch.float32)
    chosen = LocalLayerRepository(repo_path=folder, layer_name=PLAIN)
    kernelize_by(model, Mode.INFERENCE, {"rotary_pos_emb": {"cpu": chosen}})
    try:
        model(TOKENS)
        found = {"logits": "no error"}
    except ValueError as error:
        found = {"refused": str(error)}
    kernelize_by(model, Mode.INFERENCE, {})
    return {"arguments": ["GptOssForCausalLM", "the layer of others"], "layer": PLAIN, **found}


def by_config_row(folder):
    """transformers' own `KernelConfig`, which names a local layer by its path."""
    model = made("LlamaForCausalLM", torch.float32)
    theirs = model(TOKENS).logits
    about = {"arguments": ["LlamaForCausalLM", "by KernelConfig"], "layer": PLAIN}
    try:
        config = KernelConfig({"rotary_pos_emb": f"{folder}:{PLAIN}"}, use_local_kernel=True)
        model.set_use_kernels(True, config)
    except ValueError as error:
        return {**about, "skipped": " ".join(str(error).split())[:120]}
    assert is_used(PLAIN, model)
    return {**about, "logits": float((model(TOKENS).logits - theirs).abs().max())}


def main(out):
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "kernel"
        subprocess.run([sys.executable, "-c", EXPORT, SOURCES, folder], check=True)
        sys.modules["rotary"] = sys.modules["numba"] = None
        rows = [row for name in MODELS for row in rows_of(name, folder)]
        rows += [compiled_row(folder), wrong_layer_row(folder), by_config_row(folder)]
    program = f"kernels, in transformers {transformers.__version__}"
    measure.write(out, program, version("kernels"), rows)


if __name__ == "__main__":
    main(sys.argv[2])
