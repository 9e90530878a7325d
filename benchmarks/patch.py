"""What `patch` does for a whole model of transformers: prefill and decoding, before and after.

A model of the width of Llama 3 8B with 4 layers and a small vocabulary, random weights, on the CPU
or on the device that --device names; or of Qwen3 8B, which normalizes q and k before it rotates.
Both states run in turns on the same instance, so that a busy machine slows both. The share of RoPE
is the time of transformers' own rotation, with Qwen3 of its norms too, measured alone at the same
shapes, in the time before.

    python -m benchmarks.patch
    python -m benchmarks.patch --device cuda --layers 32
    python -m benchmarks.patch --device cuda --layers 32 --model qwen3

Writes benchmarks/results/DATE-patch.md, DATE-cuda-patch.md, or DATE-cuda-qwen3-patch.md. With
--quick the model is 512 wide and has 2 layers.
"""

import argparse
import datetime
import inspect
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import rotary
from rotary import patch, unpatch

from . import command

HEAD_DIM = 128
MODELS = {  # config, model, its inner width over the outer one
    "llama": (LlamaConfig, LlamaForCausalLM, 3.5),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, 3),
}
SIZES = {"prompt": 4096, "tokens": 16, "layers": 4, "repeats": 5}
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 2.5e-2}  # of the logits, relative, after one layer
# older releases of transformers have another name for it
CACHE = next(name for name in ("cache", "past_key_values")
             if name in inspect.signature(LlamaForCausalLM.forward).parameters)  # fmt: skip


def main() -> None:
    """Check that both states give the same logits, measure, print a table."""
    given = parsed()
    dtype = getattr(torch, given.dtype)
    with torch.device(given.device):
        model = new_model(given.model, given.width, given.layers, dtype)
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
    sizes = " ".join(f"--{name} {getattr(given, name)}" for name in ("device", "model", *SIZES))
    heads = ("", "before, s", "patched, s", "ratio", "share of RoPE before")
    text = f"""\
# Measured {date}: `rotary.patch` on a whole model

`python -m benchmarks.patch {sizes}`,
{machine(model)}:
{given.layers} layers of width {given.width}, {given.dtype}, random weights, medians in turns.

{command.table(heads, rows)}
"""
    print(text)
    kinds = [kind for kind in (given.device, given.model) if kind not in ("cpu", "llama")]
    command.write(given.out, {"-".join((date, *kinds, "patch.md")): text})


def parsed() -> argparse.Namespace:
    """Sizes of the run."""
    parser = command.parser(__doc__)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default {size}")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--model", choices=MODELS, default="llama", help="default llama")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.set_defaults(width=4096)
    quick = {"prompt": 64, "tokens": 2, "layers": 2, "repeats": 1, "width": 512}
    return command.parsed(parser, quick, command.RESULTS)


def new_model(kind: str, width: int, layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """Llama 3 8B or Qwen3 8B but for depth and vocabulary, and its width if that is not 4096."""
    config_class, model_class, ratio = MODELS[kind]
    heads = width // HEAD_DIM
    config = config_class(
        hidden_size=width, intermediate_size=int(ratio * width), num_hidden_layers=layers,
        vocab_size=1024, num_attention_heads=heads, num_key_value_heads=heads // 4,
        head_dim=HEAD_DIM, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    model = model_class(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def errors(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[tuple[str, float, float]]:
    """(what, difference of the logits over their size, limit) of the patched model."""
    before = model(ids).logits.float()
    with patch(model) as patched:
        after = model(ids).logits.float()
    limit = LIMITS[model.dtype] * math.sqrt(model.config.num_hidden_layers)  # roundings add up
    yield str(patched), float((after - before).norm() / before.norm()), limit


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    """The whole prompt in one go, logits of its last token."""
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return cache


def decoding(
    model: PreTrainedModel, ids: torch.Tensor, given: argparse.Namespace
) -> Callable[[], None]:
    """One token at a time behind the prompt, whose cache is cut back for every run."""
    cache = prefill(model, ids)

    def run() -> None:
        for _ in range(given.tokens):
            model(ids[:, :1], **{CACHE: cache}, use_cache=True)
        cache.crop(-given.tokens)

    return run


def measured(model: PreTrainedModel, run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median seconds of (the model as it is, the patched model), run in turns after one of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * (repeats + 1)):
        if turn % 2:
            patch(model)
        seconds = timed(model.device, run)
        if turn > 1:
            times[turn % 2].append(seconds)
        if turn % 2:
            unpatch(model)
    return statistics.median(times[0]), statistics.median(times[1])


def rotation(model: PreTrainedModel, seq: int, dtype: torch.dtype) -> float:
    """Median seconds of transformers' own code in one layer, after a matmul as in the model."""
    config = model.config
    with model.device:
        q, k = (
            torch.randn(1, seq, heads, HEAD_DIM).to(dtype)
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        cos, sin = model.model.rotary_emb(q, torch.arange(seq)[None])
    attention = model.model.layers[0].self_attn
    norms = [getattr(attention, name, lambda x: x) for name in ("q_norm", "k_norm")]

    def run() -> None:
        xs = [norm(x).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True)]
        apply_rotary_pos_emb(*xs, cos, sin)

    square = torch.randn(512, 512)
    times = []
    for _ in range(9):
        square @ square  # wakes the threads
        times.append(timed(model.device, run))
    return statistics.median(times[1:])


def timed(device: torch.device, run: Callable[[], Any]) -> float:
    """Seconds of one run, until a GPU has done it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def machine(model: PreTrainedModel) -> str:
    """Versions, device and load: numbers of a shared machine mean little without them."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    if model.device.type == "cuda":
        where = torch.cuda.get_device_name(model.device)
    else:
        where = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return (
        f"rotary {rotary.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {where}{load}"
    )


if __name__ == "__main__":
    main()
