"""The GPU benchmark without a GPU: what its peers are given, what its ablations change."""

import sys
import types

import pytest
import torch
from benchmarks import gpu, gpu_cases, gpu_peers, gpu_plan
from benchmarks.gpu_plan import Work
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

SMALL = Work(6, 2, 4, 2, 16, 16)
EAGER = "transformers eager"


# --- peers ---


def flash_attn(x, cos, sin, seqlen_offsets=0, interleaved=False):
    """flash-attn's interface: (batch, seq, heads, dim), tables of all rows, an offset for each."""
    rows = torch.arange(x.shape[1])
    if isinstance(seqlen_offsets, torch.Tensor):
        assert seqlen_offsets.shape == (x.shape[0],)
        rows = seqlen_offsets[:, None] + rows
    assert cos.dtype == sin.dtype == x.dtype
    cos, sin = cos[rows].unsqueeze(-2), sin[rows].unsqueeze(-2)  # ([batch], seq, 1, pairs)
    half = cos.shape[-1]
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


class Liger:
    """Liger's interface: that of transformers, but it rotates the leading part of the head."""

    @staticmethod
    def apply(q, k, cos, sin):
        wide, rest = cos.shape[-1], lambda x: x[..., cos.shape[-1] :]
        turned = apply_rotary_pos_emb(q[..., :wide], k[..., :wide], cos, sin)
        return tuple(torch.cat((y, rest(x)), -1) for y, x in zip(turned, (q, k), strict=True))


class LigerLlama4:
    """Complex numbers: (batch, seq, heads, dim), turns of (seq, pairs)."""

    @staticmethod
    def apply(q, k, turns):
        def turned(x):
            z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turns[:, None]
            return torch.view_as_real(z).flatten(-2).to(x.dtype)

        return turned(q), turned(k)


THERE = {
    EAGER: apply_rotary_pos_emb,
    "liger": Liger,
    "liger llama4": LigerLlama4,
    "flash-attn": flash_attn,
    "fla": flash_attn,
}
HALF = {EAGER, "liger", "flash-attn", "fla"}
FITTING = {
    "bshd": (SMALL, HALF),
    "interleaved": (SMALL._replace(layout="interleaved"), {"liger llama4", "flash-attn", "fla"}),
    "hf view": (SMALL._replace(memory="hf view"), HALF),
    "bhsd": (SMALL._replace(memory="bhsd"), HALF),
    "packed qkv": (SMALL._replace(memory="packed qkv"), HALF),
    "thd": (Work(128, 1, 2, 1, 16, 16, memory="thd", positions="ragged"), {EAGER, "liger"}),
    "own rows": (Work(1, 3, 4, 2, 16, 16, positions="own rows"), HALF),
    "three axes": (Work(32, 2, 2, 1, positions="three axes"), {EAGER, "liger"}),
    "a part": (SMALL._replace(rotary_dim=8), {"liger", "flash-attn", "fla"}),
}


@pytest.fixture
def tuned_at_any_size(monkeypatch):
    """Peers that compile or tune are measured on the main shapes alone; here on small ones."""
    fits = {peer.name: peer.fits for peer in gpu_peers.PEERS}
    fits |= {"fla": fits["flash-attn"], "torch.compile of it": gpu_peers._is_llama}
    peers = [peer._replace(fits=fits[peer.name]) for peer in gpu_peers.PEERS]
    monkeypatch.setattr(gpu_peers, "PEERS", tuple(peers))


@pytest.mark.usefixtures("tuned_at_any_size")
@pytest.mark.parametrize("form", FITTING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peers_get_what_they_ask_for_and_pass_the_gate(form, dtype):
    """Their interfaces in plain torch; transformers is the real one."""
    work, names = FITTING[form]
    work = work._replace(dtype=dtype)
    tables = gpu_cases.tables_of(work, "cpu")
    cases = gpu_peers.peer_cases(work, tables, THERE, False)
    assert "fla" not in cases  # it tunes
    cases |= gpu_peers.peer_cases(work, tables, THERE, True)
    assert {who.removesuffix(" backward") for who in cases} == names
    assert {who for who in cases if who.endswith("backward")} == {
        f"{name} backward" for name in names - {"flash-attn"}
    }
    for who, case in cases.items():
        entry = gpu.checked(who, case, work, "cpu")
        assert "failed" not in entry, (who, entry)


def test_peers_that_are_not_there_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_peers, "FOLDER", tmp_path)
    (tmp_path / "flash_attn_rotary.py").write_text("def apply_rotary():\n    return 'found'\n")
    (tmp_path / "broken_peer.py").write_text("raise OSError('no driver\\nat all')\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    broken = gpu_peers.PEERS[0]._replace(name="broken", module="broken_peer")
    absent = gpu_peers.PEERS[0]._replace(name="absent", module="no_such_peer.at_all")
    there, missing = gpu_peers.found((absent, broken, *gpu_peers.PEERS))
    monkeypatch.delitem(sys.modules, "flash_attn_rotary")
    assert missing["absent"] == "not installed (no_such_peer)"
    assert missing["broken"] == "cannot be imported: no driver"
    assert there["flash-attn"]() == "found"
    assert there[EAGER] is apply_rotary_pos_emb
    assert not set(there) & set(missing)


@pytest.mark.slow
@pytest.mark.usefixtures("tuned_at_any_size")
def test_a_compiled_peer_passes_the_gate():
    work = Work(1, 2, 4, 2, 16, 16, positions="own rows")
    there = {"torch.compile of it": apply_rotary_pos_emb}
    cases = gpu_peers.peer_cases(work, gpu_cases.tables_of(work, "cpu"), there, True)
    assert list(cases) == ["torch.compile of it", "torch.compile of it backward"]
    for who, case in cases.items():
        assert "failed" not in gpu.checked(who, case, work, "cpu")


# --- the ablations, with a kernel that only plans ---


def planning_kernel(asks):
    """A kernel that does nothing, but asks for its plan if `asks`."""
    kernel = types.SimpleNamespace(plan=lambda *_: "as planned", seen=[])

    def rotate(xs, cos, sin, rows, geometry, out):
        if asks:
            kernel.seen.append(kernel.plan(geometry))
        return out

    kernel.rotate = rotate
    kernel.rotate_exact = lambda xs, bits, factor, where, *rest: rotate(xs, *(None,) * 3, *rest)
    return kernel


def test_every_variant_changes_the_launch_and_only_its_own(monkeypatch):
    monkeypatch.setattr(gpu_cases, "replanned", lambda plan, **change: change)
    kernel, work = planning_kernel(asks=True), SMALL
    cases = gpu_cases.ablations(work, gpu_cases.tables_of(work, "cpu"), kernel)
    before = kernel.plan
    variants = gpu_plan.variants()
    bases = ["table", "exact, positions given", "exact"]
    cut = ["table", "exact"]
    assert list(cases) == bases + [f"{base}, {name}" for base in cut for name in variants]
    buffers = gpu_cases.buffers_of(work, "cpu")
    for case in cases.values():
        case(buffers)
    assert kernel.seen[3:] == list(variants.values()) * 2
    assert kernel.plan is before


def test_a_variant_that_changes_nothing_is_an_error():
    kernel = planning_kernel(asks=False)
    cases = gpu_cases.ablations(SMALL, gpu_cases.tables_of(SMALL, "cpu"), kernel)
    with pytest.raises(RuntimeError, match="did not ask for a plan"):
        cases["table, 2 tokens x 8 heads, 2 warps"](gpu_cases.buffers_of(SMALL, "cpu"))
