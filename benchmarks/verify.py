"""The checks before a time is taken: our results, and those of the peers, against float64."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rotary import Rotary, apply

from . import command, peers
from .reference import rotated

SEQ = 515
# float32: the tables, two products and a sum are rounded; the others: the result is, once
LIMITS = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
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
            q, k = (torch.randn(1, heads, SEQ, 128).to(dtype) for heads in (4, 2))
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
                yield f"{name} {layout} {dtype}", _error(got, wanted), limit
            for name, case in peers.cases(spec, q, k, compiled).items():
                allowed = PEER_FACTOR * limit + PEER_ANGLES
                yield f"{name} {layout} {dtype}", _error(case(), wanted), allowed
        x = np.random.default_rng(0).standard_normal((1, 4, SEQ, 128), np.float32)
        wanted = [rotated(x, layout, spec.base)]
        yield f"numpy {layout}", _error((apply(spec, x),), wanted), LIMITS[torch.float32]


def _error(got: Sequence[object], wanted: Sequence[np.ndarray]) -> float:
    worst = 0.0
    for result, exact in zip(got, wanted, strict=False):
        values = torch.as_tensor(result).double().numpy()
        worst = max(worst, float(np.abs(values - exact).max() / np.abs(exact).max()))
    return worst
