"""What `patch` does for a whole model of transformers: prefill and decoding, before and after.

A model of the width of Llama 3 8B with 4 layers and a small vocabulary, random weights, on the CPU.
Both states run in turns on the same instance, so that a busy machine slows both. The share of RoPE
is the time of transformers' own rotation, measured alone at the same shapes, in the time before.

    python -m benchmarks.patch
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import rotary
from rotary.integrations.transformers import patch, unpatch


def main() -> None:
    """Measure, check that both states give the same logits, print a table."""
    arguments = parsed()
    dtype = getattr(torch, arguments.dtype)
    model = llama(arguments.layers, dtype)
    ids = torch.randint(0, model.config.vocab_size, (1, arguments.prompt))
    print(f"{machine()}; {arguments.layers} layers, {arguments.dtype}")
    print(f"prefill {arguments.prompt} tokens, decode {arguments.tokens} tokens behind them")
    with torch.inference_mode():
        check(model, ids[:, :64])
        print(f"{'':8} {'before, s':>12} {'patched, s':>12} {'ratio':>7} {'RoPE before':>12}")
        for name, run, seq, tokens in (
            ("prefill", lambda: prefill(model, ids), arguments.prompt, 1),
            ("decode", decoding(model, ids, arguments), 1, arguments.tokens),
        ):
            before, after = measured(model, run, arguments.repeats)
            share = rotation(model, seq, dtype) * arguments.layers * tokens / before
            print(f"{name:8} {before:12.3f} {after:12.3f} {before / after:7.3f} {share:12.1%}")


def parsed() -> argparse.Namespace:
    """Sizes of the run; small ones make a quick try."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    return parser.parse_args()


def llama(layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Llama 3 8B but for its depth and vocabulary."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, vocab_size=1024,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def check(model: LlamaForCausalLM, ids: torch.Tensor) -> None:
    """No time is printed for a patch that changes the logits."""
    before = model(ids).logits.float()
    with patch(model) as patched:
        after = model(ids).logits.float()
        print(patched)
    limit = 1e-5 if model.dtype == torch.float32 else 5e-2
    error = float((after - before).norm() / before.norm())
    print(f"logits differ by {error:.1e}, allowed {limit:.0e}")
    if not error <= limit:
        raise SystemExit("the patch changes the logits: nothing is measured")


def prefill(model: LlamaForCausalLM, ids: torch.Tensor) -> Any:
    """The whole prompt in one go, logits of its last token."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def decoding(
    model: LlamaForCausalLM, ids: torch.Tensor, arguments: argparse.Namespace
) -> Callable[[], None]:
    """One token at a time behind the prompt, whose cache is cut back for every run."""
    cache = prefill(model, ids)

    def run() -> None:
        for _ in range(arguments.tokens):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-arguments.tokens)

    return run


def measured(model: LlamaForCausalLM, run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median seconds of (the model as it is, the patched model), run in turns after one of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * (repeats + 1)):
        if turn % 2:
            patch(model)
        start = time.perf_counter()
        run()
        if turn > 1:
            times[turn % 2].append(time.perf_counter() - start)
        if turn % 2:
            unpatch(model)
    return statistics.median(times[0]), statistics.median(times[1])


def rotation(model: LlamaForCausalLM, seq: int, dtype: torch.dtype) -> float:
    """Median seconds of transformers' rotation in one layer, after a matmul as in the model."""
    config = model.config
    q, k = (
        torch.randn(1, seq, heads, 128).to(dtype).transpose(1, 2)
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    cos, sin = model.model.rotary_emb(q, torch.arange(seq)[None])
    square = torch.randn(512, 512)
    times = []
    for _ in range(9):
        square @ square  # wakes the threads
        start = time.perf_counter()
        apply_rotary_pos_emb(q, k, cos, sin)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def machine() -> str:
    """Versions, threads and load: numbers of a shared machine mean little without them."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"rotary {rotary.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {platform.machine()}, {torch.get_num_threads()} threads{load}"
    )


if __name__ == "__main__":
    main()
