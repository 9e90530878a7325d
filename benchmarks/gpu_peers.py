"""The peers of `benchmarks/gpu.py`, as their users call them.

A peer is optional. It is imported where it is installed, or from `build/peers`, which git ignores;
[how](README.md). Peers get exact tables in the dtype they ask for, so that what is compared is how
they rotate.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotary import cos_sin

from .gpu_cases import Case, Pair, Tables, gradient, tokens_first
from .gpu_plan import Work

FOLDER = Path(__file__).parents[1] / "build" / "peers"


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
