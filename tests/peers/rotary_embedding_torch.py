"""rotary-embedding-torch: `rotate_queries_or_keys` on unit vectors, for ten plain RoPEs."""

import sys
from importlib.metadata import version

import measure
import plain

measure.leave_this_folder()

import torch  # noqa: E402
from rotary_embedding_torch import RotaryEmbedding  # noqa: E402


def rotation_of(head_dim, rotary_dim, base, factor, _):
    rope = RotaryEmbedding(rotary_dim, theta=base, interpolate_factor=factor)
    x = torch.eye(head_dim).view(1, head_dim, 1, head_dim)

    def rotate(position):
        with torch.no_grad():
            return rope.rotate_queries_or_keys(x, offset=position)[0, :, 0].numpy()

    return rotate


if __name__ == "__main__":
    rows = plain.rows(sys.argv[1], rotation_of, ("interleaved",))
    measure.write(sys.argv[2], "rotary-embedding-torch", version("rotary-embedding-torch"), rows)
