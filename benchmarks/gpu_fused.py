"""Calls of `rotary.fused` for the GPU benchmark, and the steps they replace, with their gate.

The shape of Qwen3: an RMS norm of every head of q and k, the rotation, and k and v written to the
slots of a cache. The steps are what a model does without a fused kernel: torch's rms_norm, our
`rotate`, and an assignment to the cache; and the same steps compiled by torch.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from rotary import KVCache, Norm, fused, rotate

from .gpu_cases import Buffers, Tables, buffers_of
from .gpu_clock import Entry
from .gpu_gate import exact_angles
from .gpu_plan import ITEMSIZE, Work

EPS = 1e-6
# Largest error of a result, in eps of bfloat16 times the length of its pair: rounded once, and the
# float32 sum of the norm; twice or three times; to float8 with 3 bits of mantissa
LIMITS = {"once": 0.6, "steps": 3.0, "float8": 8.8}


class Fused(NamedTuple):
    """One call: what it does to buffers, whose q_grad and k_grad stand for v and its cache.

    moved    bytes read and written of q, k and v, as a multiple of those of q and of k
    limit    a key of LIMITS
    stores   whether k and v go to the slots of a cache
    """

    call: Callable[[Buffers], object]
    moved: tuple[float, float]
    limit: str = "once"
    has_norm: bool = True
    stores: bool = False


def cases_of(work: Work, tables: Tables, device: str) -> Mapping[str, Fused]:
    """Every call of a line, by name."""
    spec, cos, sin = tables.spec, tables.cos, tables.sin
    weights = weights_of(work, device)
    norm = Norm(*weights, EPS)
    slots = slots_of(work, device)
    given = {"tables": (cos, sin), "seq_dim": -3}

    def cache(b: Buffers, dtype: torch.dtype | None = None) -> KVCache:
        k, v = (x.flatten(0, 1) for x in (b.k_out, b.k_grad))
        if dtype is not None:
            k, v = (x.view(dtype)[..., : work.head_dim] for x in (k, v))
        return KVCache(k, v, slots)

    def steps(q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, k_out: Tensor, v_out: Tensor) -> None:
        q, k = (rms_norm(x, x.shape[-1:], w, EPS) for x, w in zip((q, k), weights, strict=True))
        q, k = rotate((q, k), cos, sin, spec, seq_dim=-3)
        q_out.copy_(q)
        k_out.flatten(0, 1)[slots.flatten()] = k.flatten(0, 1)
        v_out.flatten(0, 1)[slots.flatten()] = v.flatten(0, 1)

    def eager(b: Buffers) -> None:
        q, k = (rms_norm(x, x.shape[-1:], w, EPS) for x, w in zip((b.q, b.k), weights, strict=True))
        _, k = rotate((q, k), cos, sin, spec, seq_dim=-3, out=(b.q_out, k))
        b.k_out.flatten(0, 1)[slots.flatten()] = k.flatten(0, 1)
        b.k_grad.flatten(0, 1)[slots.flatten()] = b.q_grad.flatten(0, 1)

    torch.compiler.reset()
    compiled = torch.compile(steps, dynamic=False)
    float8 = torch.float8_e4m3fn
    return {
        "rotate": Fused(
            lambda b: rotate((b.q, b.k), cos, sin, spec, seq_dim=-3, out=(b.q_out, b.k_out)),
            (2, 2), has_norm=False,
        ),
        "norm + rotate": Fused(
            lambda b: fused(b.q, b.k, None, spec, norm=norm, out=(b.q_out, b.k_out), **given),
            (2, 2),
        ),
        "rotate + cache": Fused(
            lambda b: fused(b.q, b.k, b.q_grad, spec, cache=cache(b), out=(b.q_out,), **given),
            (2, 4), has_norm=False, stores=True,
        ),
        "norm + rotate + cache": Fused(
            lambda b: fused(
                b.q, b.k, b.q_grad, spec, norm=norm, cache=cache(b), out=(b.q_out,), **given
            ),
            (2, 4), stores=True,
        ),
        "norm + rotate + float8 cache": Fused(
            lambda b: fused(
                b.q, b.k, b.q_grad, spec, norm=norm, cache=cache(b, float8), out=(b.q_out,),
                **given,
            ),
            (2, 3), "float8", stores=True,
        ),
        "steps": Fused(eager, (2, 4), "steps", stores=True),
        "steps, compiled": Fused(
            lambda b: compiled(b.q, b.k, b.q_grad, b.q_out, b.k_out, b.k_grad),
            (2, 4), "steps", stores=True,
        ),
    }  # fmt: skip


def checked(case: Fused, work: Work, device: str) -> Entry:
    """The entry of a case before it is timed: its error, and whether that is too large."""
    ulp, limit = error_of(case, work, device), LIMITS[case.limit]
    return {"ulp": ulp} | ({} if ulp <= limit else {"failed": f"wrong by {ulp:.3g}, not {limit:g}"})


def weights_of(work: Work, device: str) -> tuple[Tensor, Tensor]:
    """Weights of the norms of q and k, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    made = 1 + torch.randn(2, work.head_dim, generator=generator) / 4
    q, k = made.to(device, getattr(torch, work.dtype))
    return q, k


def slots_of(work: Work, device: str) -> Tensor:
    """A slot for each token, in no order: (batch, seq)."""
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(work.batch * work.seq, generator=generator)
    return order.view(work.batch, work.seq).to(device)


def buffers(work: Work, device: str) -> Buffers:
    """Inputs, v in `q_grad`, outputs of q and k, and the cache of v in `k_grad`; outputs NaN."""
    made = buffers_of(work, device)
    v = torch.randn_like(made.k)
    return made._replace(q_grad=v, k_grad=torch.full_like(v, torch.nan))


def moved_bytes(case: Fused, work: Work) -> float:
    """Bytes of q, k and v that the call must read and write."""
    of_q, of_k = case.moved
    size = work.batch * work.seq * work.head_dim * ITEMSIZE[work.dtype]
    return size * (of_q * work.q_heads + of_k * work.k_heads)


def error_of(case: Fused, work: Work, device: str) -> float:
    """The largest error in eps times the length of the pair; infinity if v is not a copy."""
    b = buffers(work, device)
    x, v = (b.q.double(), b.k.double()), b.q_grad.clone()
    case.call(b)
    slots = slots_of(work, device).flatten()
    got = [b.q_out, b.k_out]
    if case.stores:
        kept = [each.flatten(0, 1) for each in (b.k_out, b.k_grad)]
        if case.limit == "float8":
            kept = [each.view(torch.float8_e4m3fn)[..., : work.head_dim].float() for each in kept]
        got[1], kept_v = (each[slots].view(b.k.shape) for each in kept)
        is_same = torch.allclose(kept_v.float(), v.float(), rtol=0.07, atol=0.01)
        if not (is_same if case.limit == "float8" else torch.equal(kept_v, v)):
            return float("inf")
    if case.has_norm:
        weights = weights_of(work, device)
        x = tuple(
            each * torch.rsqrt(each.square().mean(-1, keepdim=True) + EPS) * weight.double()
            for each, weight in zip(x, weights, strict=True)
        )
    angles = exact_angles(work, device)
    eps = torch.finfo(b.q.dtype).eps
    return max(
        float(_error(each, wanted, angles, work.layout, eps))
        for each, wanted in zip(got, x, strict=True)
    )


def _error(got: Tensor, x: Tensor, angles: Tensor, layout: str, eps: float) -> Tensor:
    half = x.shape[-1] // 2
    members = (slice(half), slice(half, None))
    if layout == "interleaved":
        members = (slice(0, None, 2), slice(1, None, 2))
    u, v = (x[..., member] for member in members)
    length = torch.hypot(u, v).clamp_min(2.0**-6)  # below it float8 has a fixed step
    wanted = u * angles.cos() - v * angles.sin(), v * angles.cos() + u * angles.sin()
    errors = [
        ((got[..., member].double() - each).abs() / length).max()
        for member, each in zip(members, wanted, strict=True)
    ]
    return torch.stack(errors).max() / eps
