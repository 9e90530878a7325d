"""litgpt: its own config of each model that both it and tests/configs have, as its GPT rotates.

litgpt reads no config.json; the file is matched by the model's name. The tables of
`GPT.rope_cache` go through its `apply_rope` on unit vectors.
"""

import sys
from importlib.metadata import version

import measure

measure.leave_this_folder()

import torch  # noqa: E402
from litgpt.config import Config  # noqa: E402
from litgpt.model import GPT, apply_rope, apply_rope_interleave  # noqa: E402

NAMES = {
    "codellama-7b.json": "CodeLlama-7b-hf", "falcon-7b.json": "falcon-7b",
    "gemma-2-9b.json": "Gemma-2-9b", "gemma-3-1b.json": "Gemma-3-1b-it",
    "gemma-3-27b.json": "Gemma-3-27b-it", "gemma-3-4b.json": "Gemma-3-4b-it",
    "gemma-7b.json": "Gemma-7b", "llama-2-7b.json": "Llama-2-7b-hf",
    "llama-3-8b.json": "Llama-3-8B", "llama-3.1-8b.json": "Llama-3.1-8B",
    "llama-3.2-1b.json": "Llama-3.2-1B", "mistral-7b-v0.1.json": "Mistral-7B-v0.1",
    "mixtral-8x7b.json": "Mixtral-8x7B-v0.1", "olmo-2-7b.json": "OLMo-2-1124-7B",
    "phi-2.json": "phi-2", "phi-3-mini-128k.json": "Phi-3-mini-128k-instruct",
    "phi-3.5-mini.json": "Phi-3.5-mini-instruct", "phi-4-mini.json": "Phi-4-mini-instruct",
    "pythia-70m.json": "pythia-70m", "qwen2.5-7b-1m.json": "Qwen2.5-7B-Instruct-1M",
    "qwen2.5-7b-instruct.json": "Qwen2.5-7B-Instruct", "qwen2.5-7b.json": "Qwen2.5-7B",
    "qwen2.5-7b-yarn.json": "Qwen2.5-7B", "qwen3-30b-a3b.json": "Qwen3-30B-A3B",
    "qwen3-8b.json": "Qwen3-8B", "stablelm-3b-4e1t.json": "stablelm-3b-4e1t",
}  # fmt: skip
BY_HAND = {  # what a user of litgpt would write for the rope_scaling of the file
    "qwen2.5-7b-yarn.json": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                             "original_max_seq_len": 32768},
}  # fmt: skip
ROWS = 2**11 + 1


def rows_of(name):
    if name not in NAMES:
        return [measure.row(name, skipped="litgpt has no config of this model")]
    by_hand = {"rope_adjustments": BY_HAND[name]} if name in BY_HAND else {}
    try:
        config = Config.from_name(NAMES[name], block_size=ROWS, **by_hand)
        with torch.device("meta"):
            model = GPT(config)
        cos, sin = model.rope_cache(device=torch.device("cpu"))
    except Exception as error:
        return [measure.row(name, refused=measure.reason(error))]
    note = {"note": "rope_adjustments given by hand"} if by_hand else {}
    if cos.dim() == 2:
        return [measure.row(name, **facts(config, cos, sin), **note)]
    kinds = ("full_attention", "sliding_attention")  # the last axis of a cache of two
    return [measure.row(name, kind, **facts(config, cos[..., i], sin[..., i]))
            for i, kind in enumerate(kinds)]  # fmt: skip


def facts(config, cos, sin):
    apply = apply_rope_interleave if config.rope_interleave else apply_rope
    width = config.rope_n_elem
    x = torch.eye(width).view(1, width, 1, width)

    def rotate(position):
        at = slice(position, position + 1)
        return apply(x, cos[None, at], sin[None, at]).view(width, width).numpy()

    return measure.measured(rotate, width, farthest=ROWS - 1)


if __name__ == "__main__":
    rows = [row for name, _ in measure.configs(sys.argv[1]) for row in rows_of(name)]
    measure.write(sys.argv[2], "litgpt", version("litgpt"), rows)
