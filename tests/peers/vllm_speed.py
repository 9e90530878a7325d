"""One decode step through rotary's plug-in and through vLLM's own classes, in microseconds.

    python tests/peers/vllm_speed.py

Runs in vLLM's environment with rotary installed there. q and k are slices of one buffer, as in a
model: 32 and 8 heads of 128, bfloat16. Cases take turns; medians. "After a product" follows a
matrix product with a weight of 4096 x 4096, whose time is not counted.
"""

import os
import statistics
import sys
import time

import measure

measure.leave_this_folder()
os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import torch  # noqa: E402
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import base, mrope  # noqa: E402

import rotary.integrations.vllm as plugin  # noqa: E402

HEADS, HEAD, ROWS = (32, 8), 128, 4096
CALLS, ROUNDS = 300, 41


def embeddings():
    """{name: embedding} of vLLM's classes and of those in their place."""
    arguments = HEAD, HEAD, ROWS, 5e5, True, torch.bfloat16
    made = {}
    eager = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    with set_current_vllm_config(eager):
        for kind, more in (
            (base.RotaryEmbedding, {}), (mrope.MRotaryEmbedding, {"mrope_section": [16, 24, 24]}),
        ):  # fmt: skip
            ours = plugin.replacement(kind, plugin.family_of(kind))
            made[kind.__name__, "vLLM"] = kind(*arguments, **more)
            made[kind.__name__, "rotary"] = ours(*arguments, **more)
    return made


def microseconds(tokens, made):
    """{(class, whose): (in a loop, after a product)} of medians."""
    qkv = torch.randn(tokens, (HEADS[0] + 2 * HEADS[1]) * HEAD).bfloat16()
    sizes = [HEADS[0] * HEAD, HEADS[1] * HEAD, HEADS[1] * HEAD]
    q, k, _ = qkv.split(sizes, -1)
    weight, x = torch.randn(4096, 4096).bfloat16(), torch.randn(tokens, 4096).bfloat16()
    one = torch.arange(tokens) + 1000
    grid = torch.stack([one, one + 1, one + 2])
    taken = {key: ([], []) for key in made}
    for _ in range(ROUNDS):
        for key, rope in made.items():
            positions = grid if key[0].startswith("M") else one
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                rope(positions, q, k)
            taken[key][0].append((time.perf_counter_ns() - start) / CALLS / 1e3)
            qkv.normal_()
            for _ in range(3):
                x @ weight
                start = time.perf_counter_ns()
                rope(positions, q, k)
                taken[key][1].append((time.perf_counter_ns() - start) / 1e3)
    return {key: tuple(map(statistics.median, times)) for key, times in taken.items()}


def main():
    made = embeddings()
    lines = ["| class | tokens | | vLLM | rotary | rotary / vLLM |", "|---|---|---|---|---|---|"]
    with torch.inference_mode():
        for tokens in (1, 16):
            found = microseconds(tokens, made)
            for name in dict.fromkeys(name for name, _ in made):
                both = zip(found[name, "vLLM"], found[name, "rotary"], strict=True)
                for where, (own, ours) in zip(("in a loop", "after a product"), both, strict=True):
                    numbers = f"{own:.1f} | {ours:.1f} | {ours / own:.2f}"
                    lines.append(f"| {name} | {tokens} | {where} | {numbers} |")
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
