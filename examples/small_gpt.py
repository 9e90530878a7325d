"""A small GPT in one file: RoPE, a cache of keys and values, a padded batch, greedy decoding."""

import torch
from torch import nn

import rotary

PAD = 16  # tokens are 0 to 15; 16 is padding
spec = rotary.Rotary(head_dim=16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, (4 + 2 + 2) * 16))
        self.out = nn.Linear(4 * 16, 64)
        self.mlp = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x, cos, sin, mask, cache):
        q, k, v = self.qkv(x).unflatten(-1, (8, 16)).transpose(1, 2).split([4, 2, 2], dim=1)
        q, k = rotary.rotate((q, k), cos, sin, spec)  # (batch, heads, new, head_dim)
        cache.append((k, v))  # keys are stored rotated: the position of a token never changes
        k, v = (torch.cat(parts, dim=2) for parts in zip(*cache, strict=True))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.logits = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 16))

    def forward(self, tokens, caches):
        """Logits of the tokens that are not cached yet; tokens (batch, all so far), padded left."""
        cached = sum(k.shape[2] for k, _ in caches[0])
        is_token = tokens != PAD
        positions = rotary.positions.left_padded(is_token)[:, cached:]  # 0 at the first real token
        cos, sin = rotary.cos_sin(spec, positions)  # once for all blocks
        index = torch.arange(tokens.shape[1])  # a new token sees the tokens up to itself
        mask = (index <= index[cached:, None]) & is_token[:, None, None]  # (batch, 1, new, all)
        x = self.embed(tokens[:, cached:])
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cos, sin, mask, cache)
        return self.logits(x)


@torch.no_grad()
def greedy(model, tokens, steps):
    """The most likely continuation, one token at a time: (batch, steps)."""
    caches = [[], []]
    for _ in range(steps):
        tokens = torch.cat([tokens, model(tokens, caches)[:, -1:].argmax(-1)], dim=1)
    return tokens[:, -steps:]


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = (torch.arange(16)[:, None] + torch.arange(9)) % 16  # 16 rows that count modulo 16
for _ in range(60):
    logits = model(text[:, :-1], caches=[[], []])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

prompts = torch.tensor([[PAD, PAD, PAD, 3, 4], [7, 8, 9, 10, 11]])
both = greedy(model, prompts, steps=6)
alone = greedy(model, prompts[:1, 3:], steps=6)
print("continued:", both.tolist())
print("the padded prompt gives the same alone:", torch.equal(alone[0], both[0]))
