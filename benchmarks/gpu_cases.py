"""What `benchmarks/gpu.py` runs: the tensors, and our calls on them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from rotary import Rotary, apply, cos_sin, positions, rotate, turns
from rotary.kernels.geometry import Geometry, Options, geometry_of

from .gpu_plan import ITEMSIZE, Work, replanned, variants

BASE = 500_000.0
SECTIONS = (16, 24, 24)  # Qwen2-VL
SEQUENCES = 64
Pair = tuple[Tensor, Tensor]


class Buffers(NamedTuple):
    """The tensors of one call, as `work.memory` lays them out, and gradients for the way back.

    Where there is no way back the gradients are empty.
    """

    q: Tensor
    k: Tensor
    q_out: Tensor
    k_out: Tensor
    q_grad: Tensor
    k_grad: Tensor


class Tables(NamedTuple):
    """What every token is turned by: float32 of half width, lined up with the tokens."""

    spec: Rotary
    positions: Tensor  # (seq), (batch, seq) or (seq, axes)
    cos: Tensor  # (seq, pairs) or (batch, seq, pairs)
    sin: Tensor


Case = Callable[[Buffers], Any]  # returns q and k, or their gradients


def positions_of(work: Work) -> Tensor:
    """Where the tokens are, on the host; no row is all at position 0, where nothing turns."""
    if work.positions == "own rows":
        rows = 1000 + 17 * torch.arange(work.batch)
        return rows[:, None] + torch.arange(work.seq)
    if work.positions == "ragged":
        weights = [1 + index % 7 for index in range(SEQUENCES)]
        ends = [work.seq * sum(weights[:end]) // sum(weights) for end in range(SEQUENCES + 1)]
        return torch.from_numpy(positions.packed(ends))
    if work.positions == "three axes":
        image = work.seq // 2
        segments = [("text", work.seq - image), ("image", 1, 16, image // 16)]
        return torch.from_numpy(positions.mrope(segments))
    return torch.arange(work.seq)


def spec_of(work: Work) -> Rotary:
    """The RoPE of a work."""
    axes = positions.sections(*SECTIONS) if work.positions == "three axes" else ()
    return Rotary(
        head_dim=work.head_dim, rotary_dim=work.rotary_dim, base=BASE, layout=work.layout, axes=axes
    )


def tables_of(work: Work, device: str) -> Tables:
    """Exact tables, made on the host."""
    where, spec = positions_of(work), spec_of(work)
    cos, sin = cos_sin(spec, where)
    return Tables(spec, where.to(device), cos.to(device), sin.to(device))


def buffers_of(work: Work, device: str, has_grads: bool = False) -> Buffers:
    """Fresh random inputs, and gradients if asked for; the outputs are full of NaN."""
    heads = work.q_heads, work.k_heads

    def drawn(count: int) -> Tensor:
        shape = work.batch, work.seq, count, work.head_dim
        return torch.randn(shape, device=device, dtype=getattr(torch, work.dtype))

    if work.memory == "packed qkv":
        both = drawn(heads[0] + 2 * heads[1])
        q, k = both[:, :, : heads[0]], both[:, :, heads[0] : sum(heads)]
    else:
        q, k = (_laid_out(drawn(count), work) for count in heads)
    out = [torch.full_like(x, torch.nan) for x in (q, k)]
    grads = [_laid_out(drawn(count), work) if has_grads else q[:0] for count in heads]
    return Buffers(q, k, out[0], out[1], grads[0], grads[1])


def flat_buffers(work: Work, device: str) -> Buffers:
    """As many bytes as q and k have in one piece, and as many to copy them to."""
    count = work.bytes // ITEMSIZE[work.dtype]
    x = torch.randn(count, device=device, dtype=getattr(torch, work.dtype))
    none = x[:0]
    return Buffers(x, none, torch.empty_like(x), none, none, none)


def copied(b: Buffers) -> Tensor:
    """What a rotation is held against: as many bytes copied, by one launch."""
    return b.q_out.copy_(b.q)


def _laid_out(x: Tensor, work: Work) -> Tensor:
    if work.memory == "thd":
        return x[0]
    if work.memory in ("hf view", "bhsd"):
        view = x.transpose(1, 2)
        return view if work.memory == "hf view" else view.contiguous()
    return x


def tokens_first(x: Tensor, work: Work) -> Tensor:
    """(batch, seq, heads, dim), whatever the form; its own inverse but for packed sequences."""
    if work.memory == "thd":
        return x[None]
    return x.transpose(1, 2) if work.memory in ("hf view", "bhsd") else x


def seq_dim_of(work: Work) -> int:
    """The axis of the tokens, as `rotate` counts it."""
    return -2 if work.memory in ("hf view", "bhsd") else -3


# --- ours ---


def ours(way: str, work: Work, tables: Tables) -> Case:
    """Our call: rotate with "out=", "in place", by "rows" of a table, with "new" outputs, its
    "backward" after it; or "apply", with exact angles."""
    if way == "rows":
        return _by_rows(work, tables)
    seq_dim = seq_dim_of(work)
    cos, sin, spec = tables.cos, tables.sin, tables.spec
    where = None if work.positions == "from 0" else tables.positions
    cases: dict[str, Case] = {
        "out=": lambda b: rotate(
            (b.q, b.k), cos, sin, spec, seq_dim=seq_dim, out=(b.q_out, b.k_out)
        ),
        "in place": lambda b: rotate((b.q, b.k), cos, sin, spec, seq_dim=seq_dim, out=(b.q, b.k)),
        "new": lambda b: rotate((b.q, b.k), cos, sin, spec, seq_dim=seq_dim),
        "apply": lambda b: apply(spec, b.q, b.k, positions=where, seq_dim=seq_dim),
        "backward": gradient(lambda q, k: rotate((q, k), cos, sin, spec, seq_dim=seq_dim)),
    }
    return cases[way]


def _by_rows(work: Work, tables: Tables) -> Case:
    """Rows of one table, picked in the call, as a server calls it."""
    where, spec, seq_dim = tables.positions, tables.spec, seq_dim_of(work)
    every = torch.arange(int(where.max()) + 1)
    cos, sin = (table.to(where.device) for table in cos_sin(spec, every))
    return lambda b: rotate(
        (b.q, b.k), cos, sin, spec, seq_dim=seq_dim, positions=where, out=(b.q_out, b.k_out)
    )


def gradient(forward: Callable[[Tensor, Tensor], Pair]) -> Case:
    """The way there and the way back, as one call that returns the gradients."""

    def case(b: Buffers) -> Any:
        with torch.enable_grad():
            q, k = b.q.detach().requires_grad_(), b.k.detach().requires_grad_()
            return torch.autograd.grad(forward(q, k), (q, k), (b.q_grad, b.k_grad))

    return case


def ablations(work: Work, tables: Tables, kernel: Any) -> dict[str, Case]:
    """The kernel, a module such as `rotary.kernels.triton.kernel`, in every variant of the launch.

    From tables and with exact angles; these from the row number alone where tokens start at 0, and
    as planned from positions in memory.
    """
    options = Options(work.layout, None, work.rotary_dim, 0, seq_dim_of(work))
    bits = torch.from_numpy(turns(tables.spec).view(np.int64).copy()).to(tables.cos.device)

    def geometry(b: Buffers) -> Geometry:
        shapes = tuple(b.q.shape), tuple(b.k.shape)
        return geometry_of(shapes, tuple(tables.cos.shape), None, options)

    def exact(where: Tensor | None) -> Case:
        return lambda b: kernel.rotate_exact(b[:2], bits, 1.0, where, geometry(b), b[2:4])

    bases: dict[str, Case] = {
        "table": lambda b: kernel.rotate(b[:2], tables.cos, tables.sin, None, geometry(b), b[2:4]),
        "exact, positions given": exact(tables.positions),
    }
    if work.positions == "from 0":
        bases["exact"] = exact(None)
    cut = [name for name in ("table", "exact") if name in bases]
    changed = {
        f"{base}, {name}": _launched_otherwise(bases[base], kernel, change)
        for base in cut
        for name, change in variants().items()
    }
    return bases | changed


def _launched_otherwise(case: Case, kernel: Any, change: Mapping[str, int]) -> Case:
    def call(b: Buffers) -> Any:
        asked, plan = [], kernel.plan

        def planned(*arguments: Any) -> Any:
            asked.append(replanned(plan(*arguments), **change))
            return asked[-1]

        with mock.patch.object(kernel, "plan", planned):
            result = case(b)
        if not asked:
            raise RuntimeError("the kernel did not ask for a plan, so its launch was not changed")
        return result

    return call
