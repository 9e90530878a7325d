"""A small GPT in one file: RoPE, a cache of keys and values, a padded batch, greedy decoding."""

import torch
from torch import Tensor, nn
from torch.nn import functional

import rotary
from rotary import positions

WIDTH, HEADS, KEY_HEADS, LAYERS, SYMBOLS = 64, 4, 2, 2, 16
spec = rotary.Rotary(head_dim=WIDTH // HEADS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dim = spec.head_dim
        self.q = nn.Linear(WIDTH, HEADS * dim, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KEY_HEADS * dim, bias=False)
        self.out = nn.Linear(HEADS * dim, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: list) -> Tensor:
        y = functional.rms_norm(x, (WIDTH,))
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (batch, heads, seq, dim)
        k, v = self.kv(y).unflatten(-1, (2 * KEY_HEADS, -1)).transpose(1, 2).chunk(2, dim=1)
        q, k = rotary.rotate((q, k), cos, sin, spec)
        if cache:  # keys are kept rotated: their positions never change
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        cache[:] = k, v
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(functional.rms_norm(x, (WIDTH,)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, is_token: Tensor, caches: list) -> Tensor:
        """Logits of the new tokens; is_token is (batch, all tokens so far), False for padding."""
        new, total = tokens.shape[1], is_token.shape[1]
        where = positions.left_padded(is_token)[:, -new:]  # the first real token is at position 0
        cos, sin = rotary.cos_sin(spec, where)  # once per forward: (batch, new, dim / 2)
        row, column = torch.arange(total - new, total)[:, None], torch.arange(total)
        mask = (column <= row) & is_token[:, None, None, :] | (column == row)  # padding sees itself
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cos, sin, mask, cache)
        return functional.rms_norm(x, (WIDTH,)) @ self.embed.weight.T


@torch.no_grad()
def greedy(model: GPT, tokens: Tensor, is_token: Tensor, steps: int) -> Tensor:
    """The most likely next tokens, one at a time: (batch, steps)."""
    caches, found = [[] for _ in model.blocks], []
    for _ in range(steps):
        tokens = model(tokens, is_token, caches)[:, -1:].argmax(-1)
        is_token = functional.pad(is_token, (0, 1), value=True)
        found.append(tokens)
    return torch.cat(found, dim=1)


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(60):  # learn to count: every token is the one before plus 1, modulo 16
    text = (torch.arange(SYMBOLS)[:, None] + torch.arange(9)) % SYMBOLS
    is_token = torch.ones(16, 8, dtype=torch.bool)
    logits = model(text[:, :-1], is_token, [[] for _ in range(LAYERS)])
    loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss at the end of training: {loss.item():.3f}")

prompts = torch.tensor([[0, 0, 0, 3, 4], [7, 8, 9, 10, 11]])  # the first is padded on the left
is_token = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
both = greedy(model, prompts, is_token, 6)
alone = greedy(model, prompts[:1, 3:], is_token[:1, 3:], 6)
print("continued:", both.tolist())
print("the padded prompt gives the same alone:", torch.equal(alone[0], both[0]))
