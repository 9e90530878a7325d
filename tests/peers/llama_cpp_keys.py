"""Writes the specs and the keys that `to_gguf` makes of them, for llama.cpp to compute.

    python tests/peers/llama_cpp_keys.py tests/golden/peers/to_gguf.json
    python tests/peers/llama_cpp.py --keys tests/configs tests/golden/peers/to_gguf.json

The first needs `rotary`, the second llama.cpp; tests/test_gguf.py compares the two.
"""

import json
import sys
from pathlib import Path

from rotary import Rotary
from rotary.configs import to_gguf

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {
    "short_factor": [1.0 + pair / 100 for pair in range(48)],
    "long_factor": [1.0 + pair for pair in range(48)],
    "original_max_position_embeddings": 4096,
}
QWEN = ("qwen2", "qwen2.5-7b-instruct.json")
LLAMA = ("llama", "llama-3-8b.json")
EXAONE = ("exaone4", "exaone-4.0-32b.json")
BLOCKS = [0] * 16 + [1] * 24 + [2] * 24


def half(schedule="default", **params):
    return Rotary(head_dim=128, base=1e6, schedule=schedule, params=params)


def interleaved(schedule="default", **params):
    return Rotary(head_dim=128, base=5e5, layout="interleaved", schedule=schedule, params=params)


# name -> (architecture, config whose sizes the model has), spec
SPECS = {
    "default": (QWEN, half()),
    "default, interleaved": (LLAMA, interleaved()),
    "partial": (("phi2", "phi-2.json"), Rotary(head_dim=80, rotary_dim=32)),
    "linear": (QWEN, half("linear", factor=8.0)),
    "yarn": (QWEN, half("yarn", **YARN)),
    "yarn, amplitude 1": (QWEN, half("yarn", **YARN, attention_factor=1.0)),
    "yarn, amplitude 1.3": (LLAMA, interleaved("yarn", **YARN, attention_factor=1.3)),
    "yarn, mscale": (QWEN, half("yarn", **YARN, mscale=1.0, mscale_all_dim=0.5)),
    "yarn, betas": (
        ("mistral3", "ministral-3-8b.json"),
        interleaved("yarn", **YARN, beta_fast=16.0, beta_slow=2.0),
    ),
    "llama3": (LLAMA, interleaved("llama3", **LLAMA3)),
    "llama3, half": (EXAONE, half("llama3", **LLAMA3)),
    "proportional": (EXAONE, half("proportional", partial_rotary_factor=0.25)),
    "ntk": (LLAMA, interleaved("ntk", factor=4.0)),
    "custom, amplitude 1.1": (
        LLAMA,
        interleaved(
            "custom",
            inv_freq=[0.9**pair for pair in range(63)] + [0.0],
            attention_factor=1.1,
        ),
    ),
    "longrope": (
        ("phi3", "phi-3-mini-128k.json"),
        Rotary(head_dim=96, schedule="longrope", params={**LONG, "factor": 32.0}),
    ),
    "longrope, amplitude 1": (
        ("phi3", "phi-3-mini-128k.json"),
        Rotary(head_dim=96, schedule="longrope", params={**LONG, "attention_factor": 1.0}),
    ),
    "trailing": (
        ("minicpm3", "minicpm3-4b.json"),
        Rotary(head_dim=96, rotary_dim=32, start=64, schedule="linear", params={"factor": 2.0}),
    ),
    "sections": (
        ("qwen2vl", "qwen2-vl-7b.json"), Rotary(head_dim=128, base=1e6, axes=BLOCKS)
    ),
}  # fmt: skip

if __name__ == "__main__":
    rows = [
        {
            "name": name, "config": config, "spec": spec.to_dict(),
            "keys": to_gguf(spec, architecture, context_length=131072),
        }
        for name, ((architecture, config), spec) in SPECS.items()
    ]  # fmt: skip
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(sys.argv[1]).write_text(f'{{"rows": [\n{lines}\n]}}\n')
