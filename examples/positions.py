"""Packing, padding, images and long context are positions; the rotation stays the same."""

import numpy as np

import rotary
from rotary import positions

spec = rotary.Rotary(head_dim=16)
tokens = np.random.default_rng(0).standard_normal((7, 2, 16), np.float32)  # (tokens, heads, dim)

# two sequences laid end to end: each counts from 0
packed = rotary.apply(spec, tokens, positions=positions.packed([0, 3, 7]), seq_dim=-3)
alone = rotary.apply(spec, tokens[3:], seq_dim=-3)
print("packed equals alone:", np.array_equal(packed[3:], alone))

# a left-padded batch
mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
print("left padded:", positions.left_padded(mask).tolist())

# text, then an image of 2 x 2 patches, then text: Qwen2-VL's three axes
axes = positions.sections(2, 3, 3)
vision = rotary.Rotary(head_dim=16, axes=axes)
ids = positions.mrope([("text", 3), ("image", 1, 2, 2), ("text", 2)])
x = np.ones((1, 2, len(ids), 16), np.float32)
print("three axes:", rotary.apply(vision, x, positions=ids).shape, "next position:", ids.max() + 1)

# every row is scaled for its own length: a long one never changes another
dynamic = rotary.Rotary(
    head_dim=16,
    schedule="dynamic",
    params={"factor": 4.0, "original_max_position_embeddings": 2048},
)
rows = np.array([[5], [9000]])
both, _ = rotary.cos_sin(dynamic, rows)
short, _ = rotary.cos_sin(dynamic, rows[:1])
print("the short row is what it was alone:", np.array_equal(both[:1], short))
