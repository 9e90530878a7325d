"""torchtune: its own builder of each model that both it and tests/configs have, as its layers turn.

torchtune reads no config.json; the file is matched by the model's name. The model is built on the
meta device, and the rotary module of its first layer is then filled in and run on unit vectors.
"""

import sys
from importlib import import_module
from importlib.metadata import version

import measure

measure.leave_this_folder()

import torch  # noqa: E402

BUILDERS = {
    "codellama-7b.json": "code_llama2.code_llama2_7b", "gemma-2-9b.json": "gemma2.gemma2_9b",
    "gemma-7b.json": "gemma.gemma_7b", "llama-2-7b.json": "llama2.llama2_7b",
    "llama-3-8b.json": "llama3.llama3_8b", "llama-3.1-8b.json": "llama3_1.llama3_1_8b",
    "llama-3.2-1b.json": "llama3_2.llama3_2_1b", "mistral-7b-v0.1.json": "mistral.mistral_7b",
    "phi-3-mini-128k.json": "phi3.phi3_mini", "qwen2.5-7b.json": "qwen2_5.qwen2_5_7b_base",
    "qwen2.5-7b-instruct.json": "qwen2_5.qwen2_5_7b_instruct",
}  # fmt: skip
NOTES = {"phi-3-mini-128k.json": "its only Phi-3 is the one of 4096 tokens"}


def rows_of(name):
    if name not in BUILDERS:
        return [measure.row(name, skipped="torchtune has no builder of this model")]
    module, builder = BUILDERS[name].split(".")
    with torch.device("meta"):
        model = getattr(import_module(f"torchtune.models.{module}"), builder)()
    rope = model.layers[0].attn.pos_embeddings
    rope.is_cache_built = False
    rope.rope_init()
    width = rope.dim
    x = torch.eye(width).view(1, 1, width, width)

    def rotate(position):
        return rope(x, input_pos=torch.tensor([[position]])).view(width, width).numpy()

    note = {"note": NOTES[name]} if name in NOTES else {}
    return [measure.row(name, **measure.measured(rotate, width, farthest=2**11), **note)]


if __name__ == "__main__":
    rows = [row for name, _ in measure.configs(sys.argv[1]) for row in rows_of(name)]
    measure.write(sys.argv[2], "torchtune", version("torchtune"), rows)
