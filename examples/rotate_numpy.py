"""Rotate q and k of Llama 3.1 8B in NumPy, from the config that ships with the package."""

from importlib.resources import files

import numpy as np

import rotary

spec = rotary.from_hf_config(files("rotary") / "configs" / "llama-3.1-8b.json")
print(spec)

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 32, 512, 128), np.float32)  # (batch, heads, seq, head_dim)
k = rng.standard_normal((1, 8, 512, 128), np.float32)

rotated_q, rotated_k = rotary.apply(spec, q, k)  # positions 0 .. 511
print(
    "norm of a token before and after:",
    np.linalg.norm(q[0, 0, 9]),
    np.linalg.norm(rotated_q[0, 0, 9]),
)

# the next token of a sequence whose first 512 are in the cache
q_next = rng.standard_normal((1, 32, 1, 128), np.float32)
print(
    "decoded:", rotary.apply(spec, q_next, positions=rotary.positions.arange(1, offset=512)).shape
)

# a score depends only on the distance, at any position: here both tokens move by 2^39
one, two = q[0, 0, 0], k[0, 0, 0]


def score(m: int, n: int) -> float:
    moved = [
        rotary.apply(spec, x[None], positions=np.array([at])) for x, at in ((one, m), (two, n))
    ]
    return float((moved[0] @ moved[1].T).item())


print("score at distance 7:", score(7, 0), "and 2^39 tokens later:", score(2**39 + 7, 2**39))
