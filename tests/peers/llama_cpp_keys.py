"""Writes the specs and the keys that `to_gguf` makes of them, for llama.cpp to compute.

And keys that `to_gguf` does not write, but others may, to see that `from_gguf` reads them alike.

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
    "yarn, factor below 1": (QWEN, half("yarn", **{**YARN, "factor": 0.5})),
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


def keys(architecture, **rope):
    """RoPE keys of an architecture; __ in a name stands for a dot."""
    return {f"{architecture}.rope.{name.replace('__', '.')}": rope[name] for name in rope}


def stretched(architecture, kind="yarn", **more):
    return keys(
        architecture, freq_base=1e4, scaling__type=kind, scaling__factor=4.0,
        scaling__original_context_length=4096, **more,
    )  # fmt: skip


LISTS = {"rope_factors_long.weight": [2.0] * 64, "rope_factors_short.weight": [1.0] * 64}
MLA = {"dimension_count": 64, "scaling__yarn_log_multiplier": 0.05}
# name -> config, keys that `to_gguf` does not write, what our error says where llama.cpp stops
PROBES = {
    "betas that qwen2 does not read": (
        "qwen2.5-7b-instruct.json",
        stretched("qwen2", scaling__yarn_beta_fast=64.0, scaling__yarn_attn_factor=3.0),
    ),
    "divisors that qwen2 does not read": (
        "qwen2.5-7b-instruct.json",
        {**keys("qwen2", freq_base=1e6), "rope_freqs.weight": [2.0] * 64},
        "reads no rope_freqs",
    ),
    "a part of a head of llama": (
        "llama-3-8b.json", keys("llama", dimension_count=64), "the whole head"
    ),
    "llama, linear with divisors": (
        "llama-3-8b.json",
        {**stretched("llama", "linear"), "rope_freqs.weight": [1.0 + i for i in range(64)]},
    ),
    "llama, YaRN with divisors": (
        "llama-3-8b.json",
        {**stretched("llama"), "rope_freqs.weight": [1.0 + i / 64 for i in range(64)]},
    ),
    "llama, type none with a factor": ("llama-3-8b.json", stretched("llama", "none")),
    "llama, a factor without a type": ("llama-3-8b.json", keys("llama", scaling__factor=8.0)),
    "llama, the old key": ("llama-3-8b.json", keys("llama", scale_linear=8.0)),
    "llama, longrope with a factor": (
        "llama-3-8b.json", {**stretched("llama", "longrope"), **LISTS}
    ),
    "llama, factors without the type": (
        "llama-3-8b.json", {**keys("llama", freq_base=1e4), **LISTS}, "scaling.type longrope"
    ),
    "qwen2vl without sections": (
        "qwen2-vl-7b.json", keys("qwen2vl", freq_base=1e6), "dimension_sections"
    ),
    "qwen3vl, sections of another kind": (
        "qwen3-vl-8b.json", keys("qwen3vl", freq_base=1e6, dimension_sections=[32, 16, 8, 8])
    ),
    "glm4moe without sections": (
        "glm-4.5v.json", keys("glm4moe", freq_base=1e6, dimension_count=64)
    ),
    "gemma3 with YaRN": ("gemma-3-4b.json", stretched("gemma3", freq_base_swa=2e4)),
    "gpt-oss with a base of sliding layers": (
        "gpt-oss-20b.json", stretched("gpt-oss", freq_base_swa=2e4)
    ),
    "deepseek2 with attn_factor": (
        "deepseek-v3.json", stretched("deepseek2", **MLA, scaling__attn_factor=1.2)
    ),
    "deepseek2 without the multiplier": (
        "deepseek-v3.json", stretched("deepseek2", dimension_count=64)
    ),
    "deepseek32, multiplier 0.05": ("deepseek-v3.2.json", stretched("deepseek32", **MLA)),
    "mistral4, multiplier 0.05": ("mistral-small-4-119b.json", stretched("mistral4", **MLA)),
    "mistral3, multiplier 0.5": (
        "ministral-3-8b.json", stretched("mistral3", scaling__yarn_log_multiplier=0.5)
    ),
    "hunyuan, alpha": ("hunyuan-7b.json", keys("hunyuan-dense", scaling__alpha=1000.0)),
}  # fmt: skip

if __name__ == "__main__":
    rows = [
        {
            "name": name, "config": config, "spec": spec.to_dict(),
            "keys": to_gguf(spec, architecture, context_length=131072),
        }
        for name, ((architecture, config), spec) in SPECS.items()
    ]  # fmt: skip
    for name, (config, values, *message) in PROBES.items():
        architecture = next(key for key in values if ".rope." in key).split(".")[0]
        made = {"general.architecture": architecture, **values}
        rows.append({"name": name, "config": config, "keys": made, "message": "".join(message)})
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(sys.argv[1]).write_text(f'{{"rows": [\n{lines}\n]}}\n')
