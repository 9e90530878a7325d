"""Two small models, run by one process and by four that share the work; the gaps as JSON.

    python tests/parallel_models.py --out REPORT.json
    python -m torch.distributed.run --standalone --nproc-per-node=4 tests/parallel_models.py \
        --out REPORT.json [--device cuda]

The four ranks are a mesh of 2 (context) x 2 (tensor). Each rank also runs the whole model by
itself and reports how far its share of the logits and every gradient are from that.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: for `experiments`

from experiments.lab.model import Config, build

import rotary
from rotary import positions
from rotary.integrations import conventions

BATCH, SEQ, VOCABULARY = 2, 32, 96
CONTEXT = TENSOR = 2
RANKS = CONTEXT * TENSOR
FIRST = 1000  # position of the first token, as behind a cache


@dataclasses.dataclass
class Layout:
    """Which tokens a rank holds, what RoPE is told of them, and how attention sees the others.

    attention  "gather": keys and values of all ranks; "ulysses": all tokens, a share of the heads
    seen       shapes of the queries in each attention, behind an all-to-all
    rotated    types of the queries that were given to it
    """

    tokens: Tensor  # (local,) int64
    positions: Tensor  # (local,) int64
    mesh: DeviceMesh | None = None
    attention: str = "gather"
    seen: list[list[int]] = dataclasses.field(default_factory=list)
    rotated: list[str] = dataclasses.field(default_factory=list)


class Variant(NamedTuple):
    """One way to share the work.

    tensor   None, "heads" (sharded weights), "sequence" (and sharded norms), "dtensor" (and q and k
             that stay DTensors up to the rotation)
    order    how `positions.shard` deals tokens to the ranks of a context group; None: not at all
    planted  which ranks of a context group tell RoPE 0 .. local length - 1
    """

    tensor: str | None = None
    order: str | None = None
    attention: str = "gather"
    planted: tuple[int, ...] = ()


VARIANTS = {
    "tensor": Variant("heads"),
    "sequence": Variant("sequence"),
    "dtensor": Variant("dtensor"),
    "context, contiguous": Variant(order="contiguous"),
    "context, head_tail": Variant(order="head_tail"),
    "context, ulysses": Variant(order="head_tail", attention="ulysses"),
    "both": Variant("sequence", "head_tail"),
    "both, ulysses": Variant("heads", "contiguous", "ulysses"),
    "planted on one rank": Variant(order="head_tail", planted=(1,)),
    "planted on all ranks": Variant(order="head_tail", planted=(0, 1)),
}


# --- attention over tokens that are on several ranks ---


def attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Causal attention of rotated (batch, heads, local, head_dim); order is that of `tokens`."""
    layout.rotated.append(type(q).__name__)
    q, k, v = (x.to_local() if isinstance(x, DTensor) else x for x in (q, k, v))
    seen, tokens, mesh = layout.tokens, layout.tokens, layout.mesh
    is_ulysses = mesh is not None and layout.attention == "ulysses"
    if mesh is not None:
        tokens = DTensor.from_local(tokens, mesh, [Shard(0)]).full_tensor()
    if is_ulysses:
        q, k, v = (_redistributed(x, mesh, Shard(2), Shard(1)) for x in (q, k, v))
        seen = tokens
    elif mesh is not None:
        k, v = (
            DTensor.from_local(x, mesh, [Shard(2)]).full_tensor(grad_placements=[Partial()])
            for x in (k, v)
        )
    layout.seen.append(list(q.shape))
    mask = seen[:, None] >= tokens
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return _redistributed(out, mesh, Shard(1), Shard(2)) if is_ulysses else out


def _redistributed(x: Tensor, mesh: Any, old: Shard, new: Shard) -> Tensor:
    """All-to-all, and all-to-all back in the backward."""
    return DTensor.from_local(x, mesh, [old]).redistribute(placements=[new]).to_local()


# --- the models ---


class Family(NamedTuple):
    """A model, how it is called, and how its weights are shared.

    plan     the plan of tensor parallelism; it may sort the rows of a weight
    restore  the gradient of such a weight in the order of old
    """

    build: Callable[[], nn.Module]
    forward: Callable[[nn.Module, Tensor, Layout], Tensor]
    plan: Callable[[nn.Module, str], dict[str, Any]]
    restore: Callable[[str, Tensor], Tensor]


def llama() -> LlamaForCausalLM:
    """Rotated by transformers: 8 query heads, 4 key heads, the frequencies of Llama 3.1."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, vocab_size=VOCABULARY,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096,
        initializer_range=0.2, attn_implementation="parallel_models",
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
        },
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    for path, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):  # it computes in float32, which hides what is lost
            norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=torch.float64)
            model.set_submodule(path, norm)
    return model


def patched_llama() -> LlamaForCausalLM:
    """Rotated by ours, in float32: `rotary.patch` leaves float64 to transformers."""
    model = llama().float()
    rotary.patch(model, exact=True)
    return model


def _counted(*args: Any, **kwargs: Any) -> Any:
    calls["rotate"] += 1
    return rotary.rotate(*args, **kwargs)


calls: Counter[str] = Counter()


def _hooked(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    return attention(q, k, v, kwargs["layout"]).transpose(1, 2), None


AttentionInterface.register("parallel_models", _hooked)


def llama_forward(model: nn.Module, tokens: Tensor, layout: Layout) -> Tensor:
    ids = layout.positions.expand(len(tokens), -1)
    return model(tokens, position_ids=ids, use_cache=False, layout=layout).logits


def llama_plan(model: nn.Module, kind: str) -> dict[str, Any]:
    column = ColwiseParallel(use_local_output=kind != "dtensor")
    plan: dict[str, Any] = {
        "model.layers.*.self_attn.q_proj": column,
        "model.layers.*.self_attn.k_proj": column,
        "model.layers.*.self_attn.v_proj": column,
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    if kind != "sequence":
        return plan
    whole = {"hidden_states": Replicate()}
    return plan | {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts=whole
        ),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


LAB = Config(layers=2, width=128, heads=8, vocabulary=VOCABULARY)


def lab() -> nn.Module:
    """The model of the experiments, with weights large enough that attention has a say."""
    model = build(LAB, seed=0).double()
    with torch.no_grad():
        for block in model.blocks:
            block.qkv.weight.mul_(10)
            block.out.weight.mul_(10)
    return model


def lab_forward(model: nn.Module, tokens: Tensor, layout: Layout) -> Tensor:
    def mixed(q: Tensor, k: Tensor, v: Tensor, turn: Any, causal: bool) -> Tensor:
        return attention(*turn(q, k), v, layout)

    for block in model.blocks:
        block.attention = mixed
    return model(tokens, rotary.cos_sin(LAB.spec, layout.positions))


def lab_plan(model: nn.Module, kind: str) -> dict[str, Any]:
    """q, k and v are one weight: its rows are sorted so that a rank's share is whole heads."""
    for block in model.blocks:
        block.heads //= TENSOR
        with torch.no_grad():
            block.qkv.weight.copy_(block.qkv.weight[_rows()])
    parts = {} if kind != "sequence" else {"input_layouts": Shard(1)}
    rows = {} if kind != "sequence" else {"output_layouts": Shard(1)}
    plan: dict[str, Any] = {
        "blocks.*.qkv": ColwiseParallel(**parts),
        "blocks.*.out": RowwiseParallel(**rows),
        "blocks.*.wider": ColwiseParallel(**parts),
        "blocks.*.narrower": RowwiseParallel(**rows),
        "head": ColwiseParallel(**parts, output_layouts=Replicate()),
    }
    if kind == "sequence":
        plan["tokens"] = RowwiseParallel(input_layouts=Replicate(), **rows)
        plan |= dict.fromkeys(("blocks.*.norms.0", "blocks.*.norms.1", "norm"), SequenceParallel())
    return plan


def _rows() -> Tensor:
    """Which row of the fused weight of all heads stands where, rank by rank."""
    rows = torch.arange(3 * LAB.width).unflatten(0, (3, TENSOR, -1))
    return rows.transpose(0, 1).flatten()


def lab_restore(name: str, gradient: Tensor) -> Tensor:
    return gradient[_rows().argsort()] if name.endswith("qkv.weight") else gradient


def same(name: str, gradient: Tensor) -> Tensor:
    return gradient


FAMILIES = {
    "llama": (Family(patched_llama, llama_forward, llama_plan, same), VARIANTS),
    "llama, not patched": (
        Family(llama, llama_forward, llama_plan, same),
        ("context, head_tail", "both"),
    ),
    "lab": (
        Family(lab, lab_forward, lab_plan, lab_restore),
        ("sequence", "context, head_tail", "context, ulysses", "both", "both, ulysses",
         "planted on one rank"),
    ),
}  # fmt: skip


# --- one process against four ---


def layout_of(variant: Variant, mesh: DeviceMesh) -> Layout:
    everything = torch.arange(SEQ, device=mesh.device_type)
    if variant.order is None:
        return Layout(everything, everything + FIRST)
    part = mesh["context"]
    rank = part.get_local_rank()
    held = torch.from_numpy(positions.shard(SEQ, rank, CONTEXT, variant.order)).to(everything)
    told = torch.arange(len(held), device=held.device) if rank in variant.planted else held
    return Layout(held, told + FIRST, part, variant.attention)


def step(
    family: Family, model: nn.Module, text: Tensor, layout: Layout
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits (batch, local, vocabulary) and the gradient of every parameter, whole."""
    logits = family.forward(model, text[:, layout.tokens], layout)
    wanted = text.roll(-1, dims=1)[:, layout.tokens]
    loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    (loss / text.numel()).backward()
    gradients = {}
    for name, weight in model.named_parameters():
        gradient = weight.grad
        if layout.mesh is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=layout.mesh.get_group())
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return logits.detach(), gradients


def gap(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, in units of the largest number that is wanted."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def alone(family: Family, text: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of the whole model in one process."""
    everything = torch.arange(SEQ, device=text.device)
    model = family.build().to(text.device)
    return step(family, model, text, Layout(everything, everything + FIRST))


def compare(
    family: Family,
    variant: Variant,
    mesh: DeviceMesh,
    text: Tensor,
    wanted: tuple[Tensor, dict[str, Tensor]],
) -> dict[str, Any]:
    model = family.build().to(text.device)
    if variant.tensor:
        parallelize_module(model, mesh["tensor"], family.plan(model, variant.tensor))
    layout = layout_of(variant, mesh)
    calls.clear()
    logits, gradients = step(family, model, text, layout)
    gaps = {
        name: gap(family.restore(name, found) if variant.tensor else found, wanted[1][name])
        for name, found in gradients.items()
    }
    return {
        "logits": gap(logits, wanted[0][:, layout.tokens]),
        "gradients": gaps,
        "sharded": sum(isinstance(weight, DTensor) for weight in model.parameters()),
        "queries": layout.seen[0],
        "rotated": layout.rotated[0],
        "calls": calls["rotate"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments)
    else:  # forked: what a first call imports and loads, it does once for all ranks
        torch.set_num_threads(1)
        two = torch.arange(2)
        for family, _ in FAMILIES.values():
            with torch.no_grad():  # a backward would start threads
                family.forward(family.build(), two[None], Layout(two, two))
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.start_processes(
                lambda rank: work(arguments, f"file://{folder}/store", rank), (), RANKS,
                start_method="fork",
            )  # fmt: skip


def work(arguments: argparse.Namespace, store: str = "env://", rank: int = -1) -> None:
    """What one rank does; by default the one that torchrun has told this process to be."""
    conventions.rotate = _counted  # in this process alone, and not where the tests import the names
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "nccl" if arguments.device == "cuda" else "gloo",
        init_method=store, rank=rank, world_size=RANKS if rank >= 0 else -1,
    )  # fmt: skip
    mesh = init_device_mesh(
        arguments.device, (CONTEXT, TENSOR), mesh_dim_names=("context", "tensor")
    )
    chance = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (BATCH, SEQ), generator=chance).to(arguments.device)
    mine = {
        name: {kind: compare(family, VARIANTS[kind], mesh, text, wanted) for kind in kinds}
        for name, (family, kinds) in FAMILIES.items()
        for wanted in [alone(family, text)]
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        Path(arguments.out).write_text(json.dumps(ranks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
