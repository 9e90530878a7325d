"""What `patch` does for a whole model of transformers: prefill and decoding, before and after.

A model of the width of Llama 3 8B with 4 layers and a small vocabulary, random weights, on the CPU.
Both states run in turns on the same instance, so that a busy machine slows both. The share of RoPE
is the time of transformers' own rotation, measured alone at the same shapes, in the time before.

    python -m benchmarks.patch

Writes benchmarks/results/DATE-patch.md. With --quick the model is 512 wide and has 2 layers.
"""

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import rotary
from rotary import patch, unpatch

from . import command

HEAD_DIM = 128
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # of the logits, relative


def main() -> None:
    """Check that both states give the same logits, measure, print a table."""
    given = parsed()
    dtype = getattr(torch, given.dtype)
    model = llama(given.width, given.layers, dtype)
    ids = torch.randint(0, model.config.vocab_size, (1, given.prompt))
    rows = []
    with torch.inference_mode():
        command.gate(errors(model, ids[:, :64]), "the logits of the model before")
        for name, run, seq, tokens in (
            (f"prefill of {given.prompt} tokens", lambda: prefill(model, ids), given.prompt, 1),
            (f"decoding {given.tokens} tokens behind them", decoding(model, ids, given), 1,
             given.tokens),
        ):  # fmt: skip
            before, after = measured(model, run, given.repeats)
            share = rotation(model, seq, dtype) * given.layers * tokens / before
            rows.append((name, f"{before:.3g}", f"{after:.3g}", f"{before / after:.3f}",
                         f"{100 * share:.1f} %"))  # fmt: skip
    date = datetime.date.today().isoformat()
    heads = ("", "before, s", "patched, s", "ratio", "share of RoPE before")
    text = f"""\
# Measured {date}: `rotary.patch` on a whole model

`python -m benchmarks.patch --repeats {given.repeats}`, {machine()}:
{given.layers} layers of width {given.width}, {given.dtype}, random weights, medians in turns.

{command.table(heads, rows)}
"""
    print(text)
    command.write(given.out, {f"{date}-patch.md": text})


def parsed() -> argparse.Namespace:
    """Sizes of the run."""
    parser = command.parser(__doc__)
    sizes = {"prompt": 4096, "tokens": 16, "layers": 4, "repeats": 5}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default {size}")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.set_defaults(width=4096)
    quick = {"prompt": 64, "tokens": 2, "layers": 2, "repeats": 1, "width": 512}
    return command.parsed(parser, quick, command.RESULTS)


def llama(width: int, layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Llama 3 8B but for its depth and vocabulary, and its width if that is not 4096."""
    heads = width // HEAD_DIM
    config = LlamaConfig(
        hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=layers,
        vocab_size=1024, num_attention_heads=heads, num_key_value_heads=heads // 4,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def errors(model: LlamaForCausalLM, ids: torch.Tensor) -> Iterator[tuple[str, float, float]]:
    """(what, difference of the logits over their size, limit) of the patched model."""
    before = model(ids).logits.float()
    with patch(model) as patched:
        after = model(ids).logits.float()
    yield str(patched), float((after - before).norm() / before.norm()), LIMITS[model.dtype]


def prefill(model: LlamaForCausalLM, ids: torch.Tensor) -> Any:
    """The whole prompt in one go, logits of its last token."""
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def decoding(
    model: LlamaForCausalLM, ids: torch.Tensor, given: argparse.Namespace
) -> Callable[[], None]:
    """One token at a time behind the prompt, whose cache is cut back for every run."""
    cache = prefill(model, ids)

    def run() -> None:
        for _ in range(given.tokens):
            model(ids[:, :1], cache=cache, use_cache=True)
        cache.crop(-given.tokens)

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
        torch.randn(1, seq, heads, HEAD_DIM).to(dtype).transpose(1, 2)
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
