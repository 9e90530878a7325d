"""FSDP2 with bfloat16 mixed precision: weights and inputs are cast, positions and angles are not.

python examples/train_fsdp2.py
torchrun --nproc-per-node=2 examples/train_fsdp2.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import rotary.nn

WIDTH, HEADS, SEQ, FIRST = 64, 4, 32, 1_000_000
spec = rotary.Rotary(head_dim=WIDTH // HEADS, base=500_000.0)


class Block(nn.Module):
    """Attention; the embedding has no parameter and no buffer to cast."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.rotary = rotary.nn.RotaryEmbedding(spec)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.rotary(q, k, positions=positions)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Cross-entropy of the next symbol, of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, text: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(text[:, :-1])
        for block in self.blocks:
            x = block(x, positions)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), text[:, 1:].flatten())


alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **({} if "RANK" in os.environ else alone))
say = print if dist.get_rank() == 0 else lambda text: None
torch.manual_seed(0)
model, seen = Model(), {}
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for part in (*model.blocks, model):
    fully_shard(part, mesh=mesh, mp_policy=policy)
model.blocks[0].rotary.register_forward_hook(
    lambda module, q_k, given, out: seen.update(q=q_k[0], **given), with_kwargs=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
torch.manual_seed(dist.get_rank())  # each rank has its own text: counting in steps, modulo 16
for step in range(14):
    first, by = torch.randint(16, (32, 1)), torch.randint(1, 4, (32, 1))
    loss = model((first + by * torch.arange(SEQ + 1)) % 16, torch.arange(SEQ) + FIRST)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 13 == 0:
        say(f"step {step}: loss {loss.item():.2f}")

cos, _ = rotary.cos_sin(spec, seen["positions"])
angles = seen["positions"].double()[:, None] * torch.tensor(rotary.inv_freq(spec)[0])
say(f"in a block: q {seen['q'].dtype}, positions {seen['positions'].dtype}")
say(f"cos near position {FIRST:,} is off by {(cos - angles.cos()).abs().max():.0e}")
dist.barrier()  # let gloo's threads finish before Python does
dist.destroy_process_group()
