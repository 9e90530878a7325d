"""Fused calls on a GPU that is not here: the kept launch is the one that Triton makes."""

import itertools
import math
import shutil
import sys
import threading

import pytest
import torch

import rotary
from rotary import KVCache, LatentCache, Norm, Rotary

if sys.platform != "linux" or shutil.which("gcc") is None:
    pytest.skip("the stub of libcuda is made by gcc on Linux", allow_module_level=True)
pytest.importorskip("triton")

from benchmarks.stub_cuda import stub_of_cuda

from rotary.kernels.torch import fused as torch_fused
from rotary.kernels.torch import fused_gpu, ready
from rotary.kernels.triton import fused as triton_fused
from rotary.kernels.triton import launch as triton_launch

SPEC = Rotary(head_dim=16)
LATENT = Rotary(head_dim=24, rotary_dim=8, start=16, layout="interleaved")
TABLE = torch.randn(9, 8), torch.randn(9, 8)


@pytest.fixture
def stub(stub_folder):
    with stub_of_cuda(stub_folder) as stub:
        yield stub


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


def qkv(batch=3):
    return randn(batch, 1, 4, 16), randn(batch, 1, 2, 16), randn(batch, 1, 2, 16)


def packed(batch=3):
    """Q, k and v as slices of what one projection makes."""
    block = randn(batch, 1, 8, 16)
    return block[:, :, :4], block[:, :, 4:6], block[:, :, 6:]


WEIGHTS = randn(16), randn(16)
ONE = randn(16)
MEMORY = torch.zeros(2, 32, 2, 16).bfloat16()
BLOCKS = torch.zeros(2, 2, 16, 2, 16).bfloat16()  # k and v side by side, as vLLM keeps them
BYTES = torch.zeros(2, 32, 2, 16, dtype=torch.float8_e4m3fn)
ROWS = torch.zeros(32, 40).bfloat16()
OF_LATENT = randn(3, 1, 4, 24), randn(3, 1, 1, 8), randn(3, 1, 32)
SHORT = torch.randn(1, 4), torch.randn(1, 4)
FOR_TOKENS = torch.zeros(2, 32, 2)
FOR_ALL, FOR_HEADS = torch.tensor(0.5), torch.tensor([0.25, 0.5])
SLOTS = torch.tensor([[3], [5], [-1]])
IDS = torch.tensor([[1], [7], [2]])
ANGLES = {"tables": tuple(table[:1] for table in TABLE), "seq_dim": -3}
PICKED = {"tables": TABLE, "positions": IDS, "seq_dim": -3}


def call(q, k, v, **options):
    return rotary.fused(q, k, v, SPEC, **(ANGLES | options))


CALLS = {
    "norm": lambda q, k, v: call(q, k, None, norm=Norm(*WEIGHTS, 1e-6)),
    "one weight for both": lambda q, k, v: call(q, k, None, norm=Norm(ONE, ONE, 1e-6)),
    "norm, in place": lambda q, k, v: call(q, k, None, norm=Norm(*WEIGHTS, 1e-6), out=(q, k)),
    "q alone": lambda q, k, v: call(q, None, None, norm=Norm(ONE, None, 1e-6)),
    "picked rows": lambda q, k, v: call(q, k, None, norm=Norm(*WEIGHTS, 1e-6), **PICKED),
    "cache": lambda q, k, v: call(q, k, v, cache=KVCache(*MEMORY, SLOTS), out=(q,)),
    "cache in blocks": lambda q, k, v: call(
        q, k, v, norm=Norm(*WEIGHTS, 1e-6), cache=KVCache(*BLOCKS, SLOTS)
    ),
    "cache of bytes": lambda q, k, v: call(q, k, v, cache=KVCache(*BYTES, SLOTS, 0.5, 0.25)),
    "cache of bytes, scales in memory": lambda q, k, v: call(
        q, k, v, cache=KVCache(*BYTES, SLOTS, FOR_ALL, FOR_HEADS), out=(q,)
    ),
    "cache of bytes, one scale in memory": lambda q, k, v: call(
        q, k, v, cache=KVCache(*BYTES, SLOTS, FOR_ALL, FOR_ALL)
    ),
    "cache of bytes, scales of tokens": lambda q, k, v: call(
        q, k, v, cache=KVCache(*BYTES, SLOTS, *FOR_TOKENS)
    ),
    "bytes": lambda q, k, v: call(q, k, v, dtype="int8", scale=0.1),
    "bytes, scales in memory": lambda q, k, v: call(
        q, k, v, dtype="int8", scale=(0.1, FOR_HEADS, FOR_ALL)
    ),
    "bytes, one scale in memory": lambda q, k, v: call(q, k, v, dtype="int8", scale=FOR_ALL),
    "bytes, one scale in memory for q": lambda q, k, v: call(
        q, None, None, dtype="int8", scale=FOR_ALL
    ),
    "bytes, whole scales": lambda q, k, v: call(q, k, None, dtype="int8", scale=(2, FOR_ALL, 1)),
    "bytes, scales of tokens": lambda q, k, v: call(q, k, v, dtype="int8", scale="token"),
    "bytes, scales of tokens of k": lambda q, k, v: call(
        q, k, None, dtype="int8", scale=(FOR_ALL, "token", 1.0)
    ),
    "latent": lambda q, k, v: rotary.fused(
        *OF_LATENT, LATENT, seq_dim=-3, tables=SHORT, cache=LatentCache(ROWS, SLOTS),
    ),
}  # fmt: skip


def flat(results):
    """The tensors that a call returned, its scales among them."""
    for y in results:
        yield from y if isinstance(y, tuple) else () if y is None else (y,)


def watched(monkeypatch):
    """The types, in Triton's words, of all arguments of the launch that was planned last."""
    kinds = []
    by_addresses = fused_gpu.by_addresses

    def record(kernel, programs, arguments, options):
        kinds.clear()
        for name, value in zip(kernel.arg_names, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                kinds.append("*")
            elif isinstance(value, float) or value != 1 or name in triton_fused.NUMBERS:
                kinds.append("number")
        return by_addresses(kernel, programs, arguments, options)

    monkeypatch.setattr(fused_gpu, "by_addresses", record)
    return kinds


@pytest.mark.parametrize("memory", [qkv, packed], ids=["apart", "packed"])
@pytest.mark.parametrize("name", CALLS)
def test_a_kept_launch_is_the_one_that_triton_makes(name, memory, stub, monkeypatch):
    kinds = watched(monkeypatch)
    xs = memory()
    torch.manual_seed(0)
    CALLS[name](*xs)
    stub.counted = len(kinds)
    stub.forget()
    planned = []
    monkeypatch.setattr(fused_gpu, "planned", lambda *given: planned.append(given))
    results = CALLS[name](*xs)
    assert planned == []  # nothing is worked out again
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(torch_fused.ready, "quick", lambda *_: None)
        others = CALLS[name](*xs)
    kept, by_triton = stub.launches
    assert kept.programs == by_triton.programs
    new, new_too = ([y.data_ptr() for y in flat(each)] for each in (results, others))
    assert [type(y) for y in results] == [type(y) for y in others]
    renamed = dict(zip(new_too, new, strict=True))
    for kind, one, other in zip(kinds, kept.values, by_triton.values, strict=True):
        if kind == "*":
            assert one == renamed.get(other, other)
        else:
            assert one & 0xFFFFFFFF == other & 0xFFFFFFFF
    caches = {"cache": (*MEMORY,), "cache in blocks": (*BLOCKS,), "cache of bytes": (*BYTES,),
              "cache of bytes, scales in memory": (*BYTES, FOR_ALL, FOR_HEADS),
              "cache of bytes, scales of tokens": (*BYTES, *FOR_TOKENS)}.get(name, ())  # fmt: skip
    assert {memory.data_ptr() for memory in caches} <= set(kept.values)
    if name == "latent":  # k lies behind the latent part
        assert {ROWS.data_ptr(), ROWS[:, 32:].data_ptr()} <= set(kept.values)


def test_other_tensors_of_the_same_form_are_written_where_they_lie(stub, monkeypatch):
    kinds = watched(monkeypatch)
    for count in range(3):
        q, k, v = qkv()
        memory = torch.zeros_like(MEMORY)
        call(q, k, v, cache=KVCache(*memory, SLOTS), out=(q,))
        stub.counted = len(kinds)
        pointers = {x.data_ptr() for x in (q, k, v, *memory, SLOTS)}
        if count:
            assert pointers <= set(stub.launches[-1].values)


def test_operands_that_are_all_shifted_alike_take_another_code(stub):
    """A kept code may read 16 bytes at a time only where they begin at such an address."""
    block = torch.zeros(1 << 16, dtype=torch.uint8)
    block = block[-block.data_ptr() % 16 :]

    def shifted(by):
        made, at = [], by
        for x in (*qkv()[:2], *ANGLES["tables"]):
            flat = block[at : at + x.nbytes].view(x.dtype)
            made.append(flat.view(x.shape).copy_(x))
            at += -(-x.nbytes // 256) * 256
        return made

    codes = []
    for by in (0, 0, 4, 4):
        q, k, *tables = shifted(by)
        call(q, k, None, tables=tuple(tables), out=(q, k))
        codes.append(len(stub.loaded))
    assert codes[1] == codes[0] < codes[2] == codes[3]


def test_memory_that_overlaps_is_refused_also_in_a_kept_call(stub):
    q, k, v = qkv()
    call(q, k, None, out=(torch.zeros_like(q), torch.zeros_like(k)))
    before = len(stub.launches)
    block = torch.zeros(2 * q.numel()).bfloat16()
    shifted = [block[start : start + q.numel()].view(q.shape) for start in (0, 8)]
    with pytest.raises(ValueError, match="overlaps"):
        call(shifted[0], k, None, out=(shifted[1], torch.zeros_like(k)))
    memory = torch.zeros_like(MEMORY)
    call(q, k, v, cache=KVCache(*memory, SLOTS), out=(q,))
    with pytest.raises(ValueError, match="overlaps"):
        call(q, k, v, cache=KVCache(memory[0], memory[0], SLOTS), out=(q,))
    assert len(stub.launches) == before + 1


def lines(*shapes):
    """Memory for tensors, one after the other: numbers of 16 bits, and all of it as int64."""
    memory = torch.zeros(4 * sum(math.prod(shape) for shape in shapes), dtype=torch.int16)
    starts = [0, *itertools.accumulate(map(math.prod, shapes))]
    parts = [
        memory[start:][: math.prod(shape)].view(torch.bfloat16).view(shape)
        for start, shape in zip(starts, shapes, strict=False)
    ]
    return parts, memory.view(torch.int64)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", ["weights", "row numbers", "slots", "a scale"])
def test_what_is_only_read_may_not_lie_in_written_memory(name, is_kept, stub, monkeypatch):
    q, k, v = qkv()
    (own_q, own_k), numbers = lines(q.shape, k.shape)
    cached, whole = lines(MEMORY[0].shape, MEMORY[0].shape)
    caches = cached[0], torch.zeros_like(MEMORY[1])
    calls = {
        "weights": lambda own: call(
            q, k, None, norm=Norm(own_k[0, 0, 0] if own else ONE.clone(), None, 1e-6),
            out=(own_q, own_k),
        ),
        "row numbers": lambda own: call(
            q, k, None, tables=TABLE, positions=numbers[:3].view(3, 1) if own else IDS,
            out=(own_q, own_k),
        ),
        "slots": lambda own: call(
            q, k, v, cache=KVCache(*caches, whole[:3].view(3, 1) if own else SLOTS)
        ),
        "a scale": lambda own: call(
            q, k, v, out=(q,),
            cache=KVCache(*BYTES, SLOTS, BYTES[1].view(torch.float32)[0, 0, 0] if own
                          else FOR_ALL.clone(), 0.5),
        ),
    }  # fmt: skip
    for _ in range(2 if is_kept else 0):
        calls[name](False)
    if not is_kept:
        monkeypatch.setattr(ready, "TensorGuards", None)
    before = len(stub.launches)
    for _ in range(2):
        with pytest.raises(ValueError, match="overlaps"):
            calls[name](True)
    assert len(stub.launches) == before


def test_layouts_are_not_changed_in_place_by_a_kept_call(stub, monkeypatch):
    """A pair would overwrite one that is not read yet: the launch writes to new memory."""
    spec = Rotary(head_dim=16, layout="interleaved", out_layout="half")
    kinds = watched(monkeypatch)
    q, k, _ = qkv()
    outs = torch.zeros_like(q), torch.zeros_like(k)
    seen = []
    for out in (outs, outs, (q.view_as(q), k.view_as(k))):
        rotary.fused(q, k, None, spec, out=out, **ANGLES)
        stub.counted = len(kinds)
        seen.append(stub.launches[-1].values.count(q.data_ptr()))
    assert seen[1] == seen[2]


def test_written_caches_and_outputs_are_known_to_autograd(stub):
    q, k, v = qkv()
    memory = [x.clone() for x in MEMORY]
    for _ in range(2):
        versions = [x._version for x in (q, *memory)]
        call(q, k, v, cache=KVCache(*memory, SLOTS), out=(q,))
        assert [x._version for x in (q, *memory)] == [each + 1 for each in versions]


def test_what_is_not_kept_is_launched_by_triton(stub):
    """Scales that are copied to the device, and a profiler that watches launches."""
    q, k, v = qkv()
    size = len(ready.recent)
    for scale in ([0.25, 0.5], FOR_HEADS.numpy(), FOR_HEADS.double()):
        for _ in range(2):
            call(q, k, None, dtype="int8", scale=(0.1, scale, 1.0))
    assert len(ready.recent) == size
    assert len(stub.launches) == 6
    CALLS["norm"](q, k, v)
    seen = []
    hook = triton_launch.triton.knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        CALLS["norm"](q, k, v)
    finally:
        hook.remove(seen.append)
    assert len(seen) == 1


@pytest.mark.parametrize(("blocks", "each"), [(4 * 132, 3), (31 * 132, 3), (32 * 132, 2)])
def test_heads_are_parted_until_there_are_programs_for_all(blocks, each, stub):
    """A program takes two heads of 32 tokens, or with 32 blocks for each processor all heads."""
    q, k = (torch.zeros(1, 32 * blocks, heads, 16).bfloat16() for heads in (4, 2))
    tables = [table[:1].expand(32 * blocks, 8) for table in TABLE]
    call(q, k, None, norm=Norm(*WEIGHTS, 1e-6), tables=tables, out=(q, k))
    assert stub.launches[-1].programs == each * blocks


def test_scales_that_cannot_be_kept_are_planned_once(stub, monkeypatch):
    planned, plan = [], fused_gpu.planned
    monkeypatch.setattr(fused_gpu, "planned", lambda *given: planned.append(given) or plan(*given))
    q, k, v = qkv()
    views = FOR_HEADS[0], FOR_HEADS[0]
    for scales in ((FOR_HEADS.double(), 1.0), (FOR_HEADS.bfloat16(), 1.0), views):
        for _ in range(2):
            planned.clear()
            call(q, k, v, cache=KVCache(*BYTES, SLOTS, *scales))
            assert len(planned) == 1


def test_a_scale_that_learns_is_left_to_the_operators_of_torch(stub):
    q, k, _ = qkv()
    learning = FOR_ALL.clone().requires_grad_()
    for _ in range(2):
        y, _, _ = call(q, k, None, dtype="float32", scale=(learning, 1.0, 1.0))
        assert y.requires_grad
    assert stub.launches == []


def test_a_whole_number_for_a_scale_is_the_number(stub):
    """1 and 1.0 are one key: what is kept for one serves the other."""
    q, k, v = qkv()
    for scale in ((2.0, 1.0, 1.0), (2, 1, 1), (2.0, 1.0, 1.0)):
        assert call(q, k, v, scale=scale)[2] is v
    assert len(stub.launches) == 3


def test_scales_of_tokens_are_not_rounded_to_whole_numbers(stub):
    q, k, v = qkv()
    for wrong in (FOR_TOKENS.char(), FOR_TOKENS.half()):
        with pytest.raises(TypeError, match="k_scale is written, so it must be float32 or float64"):
            call(q, k, v, cache=KVCache(*BYTES, SLOTS, *wrong))
    assert not stub.launches


def test_the_word_token_is_no_scale_of_a_cache(stub):
    q, k, v = qkv()
    with pytest.raises(ValueError, match="k_scale is 'token': for a scale of each token and head"):
        call(q, k, v, cache=KVCache(*BYTES, SLOTS, "token", "token"))
    cache = LatentCache(ROWS.to(torch.float8_e4m3fn), SLOTS, "token")
    with pytest.raises(ValueError, match="scale of the cache is 'token'"):
        rotary.fused(*OF_LATENT, LATENT, seq_dim=-3, tables=SHORT, cache=cache)
    assert stub.launches == []


def test_each_thread_has_arguments_of_its_own(stub):
    """The driver reads them without the GIL."""
    inputs = [qkv()[:2] for _ in range(4)]
    call(*inputs[0], None, out=inputs[0])
    stub.counted = 40
    stub.wait(20)  # in which another thread writes its own
    barrier = threading.Barrier(len(inputs))

    def run(q, k):
        barrier.wait()
        for _ in range(50):
            call(q, k, None, out=(q, k))

    stub.forget()
    threads = [threading.Thread(target=run, args=xs) for xs in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for q, k in inputs:
        pair = {q.data_ptr(), k.data_ptr()}
        assert sum(pair <= set(launch.values) for launch in stub.launches) == 50
