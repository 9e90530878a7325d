"""x-transformers: `RotaryEmbedding` and `apply_rotary_pos_emb` on unit vectors, ten plain RoPEs."""

import sys
from importlib.metadata import version

import measure
import plain

measure.leave_this_folder()

import torch  # noqa: E402
from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb  # noqa: E402


def rotation_of(head_dim, rotary_dim, base, factor, _):
    rope = RotaryEmbedding(rotary_dim, base=base, interpolation_factor=factor)
    x = torch.eye(head_dim).view(1, head_dim, 1, head_dim)

    def rotate(position):
        freqs, scale = rope(torch.tensor([position]))
        return apply_rotary_pos_emb(x, freqs, scale)[0, :, 0].numpy()

    return rotate


if __name__ == "__main__":
    rows = plain.rows(sys.argv[1], rotation_of, ("interleaved",))
    measure.write(sys.argv[2], "x-transformers", version("x-transformers"), rows)
