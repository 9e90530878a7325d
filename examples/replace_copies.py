"""The two RoPE classes that every code base copies, each replaced by one line.

The interleaved class of the paper (GPT-J, rotary-embedding-torch) and the half class of
transformers (Llama, Mistral) are the same rotation of differently ordered channels: a permutation
of the rows of W_q and W_k turns one into the other and keeps every score.
"""

import torch

import rotary
import rotary.nn

dim, seq = 64, 32
interleaved = rotary.nn.RotaryEmbedding(rotary.Rotary(head_dim=dim, layout="interleaved"))
half = rotary.nn.RotaryEmbedding(rotary.Rotary(head_dim=dim))

x = torch.randn(1, 4, seq, 256)
w_q, w_k = torch.randn(2, dim, 256)  # one head, trained with interleaved pairs
scores = interleaved(x @ w_q.T) @ interleaved(x @ w_k.T).mT

order = torch.from_numpy(rotary.layouts.row_permutation(1, dim, "interleaved", "half"))
moved = half(x @ w_q[order].T) @ half(x @ w_k[order].T).mT
mixed = half(x @ w_q.T) @ half(x @ w_k.T).mT

print("same scores after the permutation:", torch.allclose(scores, moved, rtol=1e-4, atol=1e-2))
print("largest error without it:", float((scores - mixed).abs().max()))
assert torch.allclose(scores, moved, rtol=1e-4, atol=1e-2)
