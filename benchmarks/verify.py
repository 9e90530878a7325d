"""The checks before a time is taken: our results, and those of the peers, against float64."""

from collections.abc import Iterator

import numpy as np
import torch

from rotary import Rotary, apply

from . import command, peers
from .reference import LIMITS, error, rotated

SEQ = 515
PEER_FACTOR = 4  # peers round tables and products to the dtype of x as well
PEER_ANGLES = 5e-5  # and have float32 angles, whose error at SEQ positions this is


def gate(compiled: bool = True) -> None:
    """Check everything that `benchmarks.run` times; exit with status 1 if a result is wrong."""
    command.gate(errors(compiled), "complex numbers in float64")


def errors(compiled: bool) -> Iterator[tuple[str, float, float]]:
    """(what, largest error over the largest result, limit); compiled peers as well if asked for."""
    for layout in ("half", "interleaved"):
        spec = Rotary(head_dim=128, base=500_000.0, layout=layout)
        for dtype, limit in LIMITS.items():
            q, k = (torch.randn(1, heads, SEQ, 128).to(getattr(torch, dtype)) for heads in (4, 2))
            wanted = [rotated(x.double().numpy(), layout, spec.base) for x in (q, k)]
            view = q.transpose(1, 2).contiguous().transpose(1, 2)
            own = q.clone()
            results = {
                "apply": apply(spec, q, k),
                "out=": apply(spec, q, k, out=(torch.empty_like(q), torch.empty_like(k))),
                "in place": (apply(spec, own, out=own),),
                "transposed view": (apply(spec, view),),
            }
            for name, got in results.items():
                yield f"{name} {layout} {dtype}", error(got, wanted[: len(got)]), limit
            for name, case in peers.cases(spec, q, k, compiled).items():
                allowed = PEER_FACTOR * limit + PEER_ANGLES
                yield f"{name} {layout} {dtype}", error(case(), wanted), allowed
        x = np.random.default_rng(0).standard_normal((1, 4, SEQ, 128), np.float32)
        wanted = [rotated(x, layout, spec.base)]
        yield f"numpy {layout}", error([apply(spec, x)], wanted), LIMITS["float32"]
