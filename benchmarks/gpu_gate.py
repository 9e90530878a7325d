"""The gate of the GPU benchmark: results of q and k against a rotation in float64.

The reference is worked out here from base and positions alone, with the pairs written out, so that
it shares nothing with what it judges.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .gpu_cases import BASE, SECTIONS, Case, buffers_of, positions_of, tokens_first
from .gpu_plan import Work

# Largest error in ulps of the pair. Ours is rounded once; float32 also has the rounding of cos and
# sin. Peers may round tables and products too.
LIMITS = {"bfloat16": 0.6, "float16": 0.6, "float32": 4.0}
PEER_LIMITS = dict.fromkeys(LIMITS, 4.0)
_TOKENS = 16_384  # at once: 0.5 GB for each float64 tensor of 32 heads of 128


def error_of(case: Case, is_back: bool, work: Work, device: str) -> tuple[float, float]:
    """(largest error, share of results that are the exact one rounded) on fresh random data.

    The error is in ulps of the pair: in units of eps times the length of the pair that is turned.
    NaN, as memory that was not written holds, or infinity where the rest of the head is not a copy.
    """
    buffers = buffers_of(work, device, has_grads=is_back)
    given = (buffers.q_grad, buffers.k_grad) if is_back else (buffers.q, buffers.k)
    given = tuple(x.clone() for x in given)
    results = case(buffers)
    angles = exact_angles(work, device)
    worst, exact, count = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    for result, x in zip(results, given, strict=True):
        if result.shape != x.shape or result.dtype != x.dtype:
            raise ValueError(f"{tuple(result.shape)} {result.dtype} came of {tuple(x.shape)}")
        got, x = tokens_first(result, work), tokens_first(x, work)
        for part in _parts(work):
            for error, is_exact in _errors(
                got[:, part], x[:, part], angles[:, part], work, is_back
            ):
                worst = torch.maximum(worst, error)  # NaN stays
                exact, count = exact + int(is_exact.sum()), count + is_exact.numel()
    return float(worst), exact / count


def exact_angles(work: Work, device: str) -> Tensor:
    """Position times frequency in float64: (1 or batch, seq, 1, pairs); right to 1e-10 at 2^20."""
    where = positions_of(work).to(device, torch.float64)
    exponents = torch.arange(0, work.rotary_dim, 2, dtype=torch.float64, device=device)
    inv_freq = BASE ** (-exponents / work.rotary_dim)
    if work.positions == "three axes":
        counts = torch.tensor(SECTIONS, device=device)
        where = where[:, torch.repeat_interleave(torch.arange(3, device=device), counts)]
    else:
        where = where[..., None]
    angles = where * inv_freq
    return (angles if angles.ndim == 3 else angles[None])[:, :, None]


def _parts(work: Work) -> Iterator[slice]:
    step = max(1, _TOKENS // work.batch)
    for start in range(0, work.seq, step):
        yield slice(start, start + step)


def _errors(
    got: Tensor, x: Tensor, angles: Tensor, work: Work, is_back: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """(largest error, which are exactly rounded) of the first and of the second members."""
    stop, half = work.rotary_dim, work.rotary_dim // 2
    members = (slice(half), slice(half, stop))
    if work.layout == "interleaved":
        members = (slice(0, stop, 2), slice(1, stop, 2))
    u, v = (x[..., member].double() for member in members)
    cos, sin = angles.cos(), -angles.sin() if is_back else angles.sin()
    info = torch.finfo(x.dtype)
    ulp = info.eps * torch.hypot(u, v).clamp_min(info.tiny)
    is_copied = torch.equal(got[..., stop:], x[..., stop:])
    for member, wanted in zip(members, (u * cos - v * sin, v * cos + u * sin), strict=True):
        error = ((got[..., member].double() - wanted).abs() / ulp).max()
        yield error if is_copied else error + torch.inf, got[..., member] == wanted.to(x.dtype)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, torch fills new memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
