"""What `benchmarks/gpu.py` runs: the tensors, our calls, and the peers as their users call them.

A peer is optional. It is imported where it is installed, or from `build/peers`, which git ignores;
[how](README.md). Peers get exact tables in the dtype they ask for, so that what is compared is how
they rotate.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from rotary import Rotary, apply, cos_sin, positions, rotate, turns
from rotary.kernels.geometry import Geometry, Options, geometry_of

from .gpu_plan import ITEMSIZE, Work, replanned, variants

FOLDER = Path(__file__).parents[1] / "build" / "peers"
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


# --- peers ---


class Peer(NamedTuple):
    """Another implementation.

    build     (what was imported, work, tables) -> function of q and k in the memory form of the
              work
    is_tuned  whether it compiles or tunes for each shape, which takes seconds
    is_cuda   whether it is CUDA code, which takes no tensors of a CPU, not even in a rehearsal
    """

    name: str
    module: str
    attribute: str
    fits: Callable[[Work], bool]
    build: Callable[[Any, Work, Tables], Callable[[Tensor, Tensor], Pair]]
    has_gradient: bool = True
    is_tuned: bool = False
    is_cuda: bool = False


def found(peers: tuple[Peer, ...] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """(what was imported of each peer that is there, why the others are not), by name."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    there, missing = {}, {}
    for peer in PEERS if peers is None else peers:
        try:
            there[peer.name] = getattr(importlib.import_module(peer.module), peer.attribute)
        except ModuleNotFoundError as error:
            missing[peer.name] = f"not installed ({error.name})"
        except Exception as error:  # one broken package must not cost the others their numbers
            missing[peer.name] = f"cannot be imported: {error}".splitlines()[0]
    return there, missing


def peer_cases(
    work: Work, tables: Tables, there: Mapping[str, Any], is_tuned: bool, has_backward: bool = True
) -> dict[str, Case]:
    """The peers that can do this work, forward, and with the way back if they have one."""
    cases: dict[str, Case] = {}
    for peer in PEERS:
        if peer.name in there and peer.is_tuned == is_tuned and peer.fits(work):
            forward = peer.build(there[peer.name], work, tables)
            cases[peer.name] = lambda b, forward=forward: forward(b.q, b.k)
            if peer.has_gradient and has_backward:
                cases[f"{peer.name} backward"] = gradient(forward)
    return cases


def _eager(function: Any, work: Work, tables: Tables) -> Callable[[Tensor, Tensor], Pair]:
    """The function of modeling_llama: (batch, heads, seq, dim) and tables of full width."""
    cos, sin = _full_width(work, tables)

    def call(q: Tensor, k: Tensor) -> Pair:
        turned = function(_heads_first(q, work), _heads_first(k, work), cos, sin)
        return _back(turned[0], work), _back(turned[1], work)

    return call


def _compiled(mode: str | None) -> Any:
    def build(function: Any, work: Work, tables: Tables) -> Callable[[Tensor, Tensor], Pair]:
        torch.compiler.reset()  # or the many shapes of a run use up its recompilations
        return torch.compile(_eager(function, work, tables), mode=mode, dynamic=False)

    return build


def _liger(function: Any, work: Work, tables: Tables) -> Callable[[Tensor, Tensor], Pair]:
    return _eager(function.apply, work, tables)


def _liger_llama4(function: Any, work: Work, tables: Tables) -> Callable[[Tensor, Tensor], Pair]:
    turns = torch.complex(tables.cos, tables.sin)

    def call(q: Tensor, k: Tensor) -> Pair:
        turned = function.apply(tokens_first(q, work), tokens_first(k, work), turns)
        return _as_given(turned[0], work), _as_given(turned[1], work)

    return call


def _per_tensor(function: Any, work: Work, tables: Tables) -> Callable[[Tensor, Tensor], Pair]:
    """flash-attn and fla: a call for each of q and k; tables in the dtype of x, rows by offset."""
    cos, sin, offsets = tables.cos, tables.sin, 0
    if work.positions == "own rows":
        last = int(tables.positions.max()) + 1
        cos, sin = (t.to(cos.device) for t in cos_sin(tables.spec, torch.arange(last)))
        offsets = tables.positions[:, 0].contiguous()
    cos, sin = (table.to(getattr(torch, work.dtype)) for table in (cos, sin))
    options = {"seqlen_offsets": offsets, "interleaved": work.layout == "interleaved"}

    def call(q: Tensor, k: Tensor) -> Pair:
        turned = [function(tokens_first(x, work), cos, sin, **options) for x in (q, k)]
        return _as_given(turned[0], work), _as_given(turned[1], work)

    return call


def _vllm(function: Any, work: Work, tables: Tables) -> Callable[[Tensor, Tensor], Pair]:
    """The kernel of vLLM, in place: positions pick rows of a table in the dtype of x."""
    where, cos, sin = _rows_of(work, tables)
    cache = torch.cat((cos, sin), -1).to(getattr(torch, work.dtype))

    def call(q: Tensor, k: Tensor) -> Pair:
        flat = (x.view(-1, *x.shape[-2:]) for x in (q, k))
        function(where, *flat, work.head_dim, cache, work.layout == "half")
        return q, k

    return call


def _flashinfer(function: Any, work: Work, tables: Tables) -> Callable[[Tensor, Tensor], Pair]:
    """The kernel of FlashInfer, in place: positions pick rows of a float32 table."""
    where, cos, sin = _rows_of(work, tables)
    cache = torch.cat((cos, sin), -1)

    def call(q: Tensor, k: Tensor) -> Pair:
        flat_q, flat_k = (x.view(-1, *x.shape[-2:]) for x in (q, k))
        function(where, flat_q, flat_k, flat_q, flat_k, cache, work.layout == "half")
        return q, k

    return call


def _rows_of(work: Work, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """A row number for each token of all sequences, and the tables that they pick from."""
    where = tables.positions.expand(work.batch, work.seq).reshape(-1)
    every = torch.arange(int(where.max()) + 1)
    cos, sin = (table.to(where.device) for table in cos_sin(tables.spec, every))
    return where, cos, sin


def _lucidrains(function: Any, work: Work, tables: Tables) -> Callable[[Tensor, Tensor], Pair]:
    """rotary-embedding-torch: angles of each channel, whose cosines are taken in every call."""
    angles = torch.atan2(tables.sin, tables.cos).repeat_interleave(2, -1)

    def call(q: Tensor, k: Tensor) -> Pair:
        turned = [function(angles, _heads_first(x, work)) for x in (q, k)]
        return _back(turned[0], work), _back(turned[1], work)

    return call


def _full_width(work: Work, tables: Tables) -> Pair:
    """(1 or batch, seq, rotary_dim) in the dtype of the model, as transformers makes them."""
    wide = [torch.cat((t, t), -1).to(getattr(torch, work.dtype)) for t in (tables.cos, tables.sin)]
    cos, sin = (t if t.ndim == 3 else t[None] for t in wide)
    return cos, sin


def _heads_first(x: Tensor, work: Work) -> Tensor:
    return tokens_first(x, work).transpose(1, 2)


def _back(x: Tensor, work: Work) -> Tensor:
    return _as_given(x.transpose(1, 2), work)


def _as_given(x: Tensor, work: Work) -> Tensor:
    return x[0] if work.memory == "thd" else tokens_first(x, work)


def _is_half(work: Work) -> bool:
    return work.layout == "half"


def _is_llama(work: Work) -> bool:
    return _is_half(work) and work.rotary_dim == work.head_dim


def _is_worth_tuning(work: Work) -> bool:
    """For each of these some seconds go into compiling or tuning: the main shapes alone."""
    main = Work(layout=work.layout)
    is_main = work._replace(batch=1, memory="bshd") == main and work.memory in ("bshd", "hf view")
    one = main._replace(seq=1, positions="own rows", batch=work.batch)
    return is_main or (work == one and work.batch in (1, 256))


def _is_worth_compiling(work: Work) -> bool:
    return _is_llama(work) and _is_worth_tuning(work)


def _is_main(work: Work) -> bool:
    return _is_half(work) and work == Work(batch=2)


def _is_llama4(work: Work) -> bool:
    is_plain = work.rotary_dim == work.head_dim and work.positions == "from 0"
    return work.layout == "interleaved" and is_plain


def _has_tables_from_0(work: Work) -> bool:
    return work.positions in ("from 0", "own rows") and work.memory != "thd"


def _is_flat(work: Work) -> bool:
    """Heads after tokens, 16 bits, one position for each token: what servers have."""
    has_tokens_first = work.memory in ("bshd", "packed qkv", "thd")
    is_whole = work.rotary_dim == work.head_dim == 128 and work.dtype == "bfloat16"
    return has_tokens_first and is_whole and work.positions != "three axes"


_LLAMA = "transformers.models.llama.modeling_llama", "apply_rotary_pos_emb"
PEERS = (
    Peer("transformers eager", *_LLAMA, _is_llama, _eager),
    Peer("torch.compile of it", *_LLAMA, _is_worth_compiling, _compiled(None),
         is_tuned=True),
    Peer("compiled, max-autotune", *_LLAMA, _is_main, _compiled("max-autotune-no-cudagraphs"),
         is_tuned=True),
    Peer("liger", "liger_kernel.ops.rope", "LigerRopeFunction", _is_half, _liger),
    Peer("liger llama4", "liger_kernel.ops.llama4_rope", "LigerLlama4RopeFunction", _is_llama4,
         _liger_llama4),
    Peer("flash-attn", "flash_attn_rotary", "apply_rotary", _has_tables_from_0, _per_tensor,
         has_gradient=False),
    Peer("vLLM kernel", "rope_peers", "vllm_rotary_embedding", _is_flat, _vllm,
         has_gradient=False, is_cuda=True),
    Peer("FlashInfer kernel", "rope_peers", "flashinfer_apply_rope_with_cos_sin_cache", _is_flat,
         _flashinfer, has_gradient=False, is_cuda=True),
    Peer("rotary-embedding-torch", "rotary_embedding_torch.rotary_embedding_torch",
         "apply_rotary_emb", _is_llama4, _lucidrains),
    Peer("fla", "fla.modules.rotary", "rotary_embedding", _is_worth_tuning, _per_tensor,
         is_tuned=True),
)  # fmt: skip
