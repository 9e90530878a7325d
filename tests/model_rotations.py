"""Rotation functions as models have them, for what `rotary.patch` puts in their place."""

import torch


def turned(q, k, cos, sin):
    """The rotation of most models: tables of full width, in halves."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = cos.shape[-1] // 2
    return tuple(x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin for x in (q, k))


def turned_pairs(q, k, cos, sin):
    """The same of adjacent channels, each column twice."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin
                 for x in (q, k))  # fmt: skip


def turned_complex(q, k, freqs_cis):
    both = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) for x in (q, k))
    return tuple(torch.view_as_real(x * freqs_cis[:, None]).flatten(-2).to(q.dtype) for x in both)
