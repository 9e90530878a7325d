"""Context parallelism: the ranks share a long prompt, and RoPE is told where each token is.

python examples/context_parallel.py
torchrun --nproc-per-node=4 examples/context_parallel.py
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import rotary
from rotary import positions

SEQ, WIDTH, HEADS, LAYERS = 256, 64, 4, 2
spec = rotary.Rotary(head_dim=WIDTH // HEADS, base=500_000.0)


def gathered(x: Tensor, dim: int) -> Tensor:
    """The parts of all ranks; training wants a collective with a gradient, or ring attention."""
    parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


class Layer(nn.Module):
    """Attention of the queries that are here to the keys and values of every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, held: Tensor, told: Tensor, is_shared: bool) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotary.apply(spec, q, k, positions=told)
        seen = held
        if is_shared:
            k, v, seen = gathered(k, 2), gathered(v, 2), gathered(held, 0)
        mask = held[:, None] >= seen  # causal by position: what is here is no one stretch
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def logits(text: Tensor, held: Tensor, told: Tensor, is_shared: bool) -> Tensor:
    x = tokens(text)
    for layer in layers:
        x = layer(x, held, told, is_shared)
    return head(x)


if "RANK" not in os.environ:  # not under torchrun yet
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sys.exit(subprocess.call([*launch, __file__]))

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same weights and text on every rank
tokens, head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
text, everything = torch.randint(256, (1, SEQ)), torch.arange(SEQ)

held = torch.from_numpy(positions.shard(SEQ, rank, world, "head_tail"))
with torch.no_grad():
    wanted = logits(text, everything, everything, is_shared=False)[:, held]
    right = logits(text[:, held], held, held, is_shared=True)
    wrong = logits(text[:, held], held, torch.arange(len(held)), is_shared=True)
gaps = torch.stack([(found - wanted).abs().max() for found in (right, wrong)])
dist.all_reduce(gaps, dist.ReduceOp.MAX)
if rank == 0:
    print(f"{world} ranks, {len(held)} tokens each; rank 0 holds chunks 0 and {2 * world - 1}")
    print(f"logits equal the unsharded ones: {bool(gaps[0] < 1e-5)} (off by {gaps[0]:.0e})")
    print(f"with arange(local length) for positions they are off by {gaps[1]:.0e}")
dist.barrier()  # let gloo's threads finish before Python does
dist.destroy_process_group()
