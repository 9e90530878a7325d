"""The same in PyTorch: gradients, torch.compile, in place, and a module without state."""

import torch

import rotary
import rotary.nn

spec = rotary.Rotary(head_dim=64, base=500_000.0)
q = torch.randn(2, 8, 128, 64, requires_grad=True)
k = torch.randn(2, 2, 128, 64, requires_grad=True)

rotated_q, rotated_k = rotary.apply(spec, q, k)
(rotated_q.square().sum() + rotated_k.square().sum()).backward()
print("gradients:", tuple(q.grad.shape), tuple(k.grad.shape))

# once per forward: tables. once per layer: the rotation, here into the same memory
cos, sin = rotary.cos_sin(spec, torch.arange(128))
with torch.no_grad():
    rotary.rotate((q, k), cos, sin, spec, out=(q, k))
print("in place equals new:", torch.equal(q, rotated_q) and torch.equal(k, rotated_k))


class Attention(torch.nn.Module):
    """A layer that rotates; the embedding has no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Linear(256, 2 * 256)
        self.rotary = rotary.nn.RotaryEmbedding(spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.qk(x).unflatten(-1, (2, 4, 64)).permute(2, 0, 3, 1, 4)
        q, k = self.rotary(q, k)
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)


layer = Attention()
print(layer)
compiled = torch.compile(layer, fullgraph=True)
x = torch.randn(1, 16, 256)
print("compiled equals eager:", torch.allclose(compiled(x), layer(x), atol=1e-6))
