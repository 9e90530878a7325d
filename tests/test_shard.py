"""Shards of positions: all ranks together are the whole, as torch, Megatron and others cut it."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._context_parallel import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
)

import rotary
from rotary import positions
from rotary.positions import shard

ORDERS = ("contiguous", "ring", "ulysses", "head_tail", "striped")
LAYOUTS = ("half", "interleaved")
HEADS, HEAD_DIM = 3, 16
examples = settings(max_examples=150, deadline=None, derandomize=True)
worlds = st.integers(1, 8)
orders = st.sampled_from(ORDERS)


def parts(order: str, world: int) -> int:
    """What a length must be a multiple of."""
    return 2 * world if order == "head_tail" else world


def bounds(lengths) -> list[int]:
    return [sum(lengths[:count]) for count in range(len(lengths) + 1)]


@st.composite
def schemes(draw, order: str, world: int):
    """(positions of the whole, axes, cu_seqlens for `shard`) of a sequence that can be cut."""
    step = parts(order, world)
    kind = draw(st.sampled_from(("text", "packed", "each", "padded", "grid", "mrope")))
    if kind in ("packed", "each"):
        lengths = [n * step for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))]
        if kind == "packed":
            lengths += [1, 2 * step - 1]
        cu_seqlens = bounds(lengths)
        return positions.packed(cu_seqlens), 1, cu_seqlens if kind == "each" else None
    count = draw(st.integers(1, 3))
    seq = count * step
    if kind == "text":
        return positions.arange(seq, draw(st.integers(0, 2**40))), 1, None
    if kind == "padded":
        padding = draw(st.lists(st.integers(0, seq), min_size=2, max_size=2))
        return positions.left_padded(np.arange(seq) >= np.array(padding)[:, None]), 1, None
    if kind == "grid":
        return positions.grid_2d(step, count), 2, None
    before = draw(st.integers(0, seq))
    width = draw(st.integers(0, (seq - before) // 2))
    segments = [("text", before), ("image", 1, 2, width), ("text", seq - before - 2 * width)]
    return positions.mrope(segments), 3, None


def spec_of(axes: int, layout: str) -> rotary.Rotary:
    pairs = {1: (), 2: positions.sections(4, 4), 3: positions.sections(2, 3, 3)}
    return rotary.Rotary(head_dim=HEAD_DIM, base=5e5, layout=layout, axes=pairs[axes])


def tokens_of(place: np.ndarray, axes: int) -> int:
    return place.shape[-2] if axes > 1 else place.shape[-1]


def taken(place: np.ndarray, held: np.ndarray, axes: int) -> np.ndarray:
    """The positions of the tokens that are held."""
    return place[..., held, :] if axes > 1 else place[..., held]


def bits(x) -> bytes:
    return (x.view(torch.int16).numpy() if isinstance(x, torch.Tensor) else x).tobytes()


# --- all ranks together ---


@examples
@given(st.data(), worlds, orders, st.sampled_from(LAYOUTS), st.sampled_from(("numpy", "torch")))
def test_the_rotated_shards_of_all_ranks_are_the_whole_bit_for_bit(
    data, world, order, layout, library
):
    place, axes, cu_seqlens = data.draw(schemes(order, world))
    seq, spec = tokens_of(place, axes), spec_of(axes, layout)
    rng = np.random.default_rng(seq)
    x = rng.standard_normal((2, HEADS, seq, HEAD_DIM)).astype(np.float32)
    if library == "torch":
        x, place = torch.from_numpy(x).bfloat16(), torch.from_numpy(place)
    whole = rotary.apply(spec, x, positions=place, seq_dim=-2)
    union = whole * np.nan
    for rank in range(world):
        held = shard(seq, rank, world, order, cu_seqlens=cu_seqlens)
        local = rotary.apply(spec, x[:, :, held], positions=taken(place, held, axes), seq_dim=-2)
        union[:, :, held] = local
    assert bits(union) == bits(whole)


@examples
@given(st.data(), worlds, orders)
def test_every_token_is_held_by_exactly_one_rank(data, world, order):
    place, axes, cu_seqlens = data.draw(schemes(order, world))
    seq = tokens_of(place, axes)
    held = [shard(seq, rank, world, order, cu_seqlens=cu_seqlens) for rank in range(world)]
    assert {(each.dtype, each.shape) for each in held} == {(np.dtype(np.int64), (seq // world,))}
    joined = np.concatenate(held)
    assert np.array_equal(np.sort(joined), np.arange(seq))
    if order in ORDERS[:3] and cu_seqlens is None:
        assert np.array_equal(joined, np.arange(seq))  # blocks in the order of the ranks
    assert all((np.diff(each) > 0).all() for each in held)


@examples
@given(worlds, orders, st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_packed_sequences_are_cut_one_by_one(world, order, counts):
    lengths = [count * parts(order, world) for count in counts]
    starts = bounds(lengths)
    for rank in range(world):
        one_by_one = [
            start + shard(length, rank, world, order)
            for start, length in zip(starts, lengths, strict=False)
        ]
        ours = shard(starts[-1], rank, world, order, cu_seqlens=starts)
        assert ours.tolist() == np.concatenate(one_by_one).tolist()


def test_a_shard_of_nothing_is_empty():
    for order, cu_seqlens in itertools.product(ORDERS, (None, [0])):
        assert shard(0, 1, 2, order, cu_seqlens=cu_seqlens).shape == (0,)


# --- as others cut ---


def zig_zag(x: np.ndarray, rank: int, world: int, axis: int) -> np.ndarray:
    """The slice of a rank in Megatron-LM, of any array with a sequence axis.

    core/models/common/embeddings/rope_utils.py, get_pos_emb_on_this_cp_rank, and core/utils.py,
    get_batch_on_this_cp_rank: of 2 world chunks those numbered rank and 2 world - rank - 1.
    """
    chunks = np.split(x, 2 * world, axis)
    return np.concatenate([chunks[rank], chunks[2 * world - rank - 1]], axis)


@examples
@given(worlds, st.integers(0, 3), st.integers(0, 2))
def test_head_tail_is_what_megatron_slices(world, count, axis):
    seq = 2 * world * count
    batch = np.moveaxis(np.arange(seq * 6).reshape(seq, 2, 3), 0, axis)
    for rank in range(world):
        ours = np.take(batch, shard(seq, rank, world, "head_tail"), axis)
        assert np.array_equal(ours, zig_zag(batch, rank, world, axis))


def thd_indices(cu_seqlens: list[int], world: int, rank: int) -> list[int]:
    """The tokens of a rank in Transformer Engine, in its order.

    common/fused_attn/context_parallel.cu, thd_partition_indices_kernel: local token i of a
    sequence is moved by rank half-shards if it is in the first half of what the rank has of it,
    and by 2 (world - 1) - rank in the second.
    """
    local = [bound // world for bound in cu_seqlens]
    found = []
    for token in range(local[-1]):
        sequence = max(n for n in range(len(local) - 1) if local[n] <= token)
        length, index = local[sequence + 1] - local[sequence], token - local[sequence]
        steps = rank if index < length // 2 else 2 * (world - 1) - rank
        found.append(index + cu_seqlens[sequence] + length // 2 * steps)
    return found


def thd_rows(lengths: list[int], world: int, rank: int) -> list[int]:
    """Which rows of a table a rank of Megatron-LM reads for its packed tokens.

    core/models/common/embeddings/rope_utils.py, _get_thd_freqs_on_this_cp_rank.
    """
    rows = []
    for length in lengths:
        half = length // world // 2
        rows += range(rank * half, (rank + 1) * half)
        rows += range(length - (rank + 1) * half, length - rank * half)
    return rows


@examples
@given(worlds, st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_head_tail_of_packed_sequences_is_what_transformer_engine_partitions(world, counts):
    lengths = [2 * world * count for count in counts]
    cu_seqlens = bounds(lengths)
    for rank in range(world):
        ours = shard(cu_seqlens[-1], rank, world, "head_tail", cu_seqlens=cu_seqlens)
        assert ours.tolist() == thd_indices(cu_seqlens, world, rank)
        assert positions.packed(cu_seqlens)[ours].tolist() == thd_rows(lengths, world, rank)


@examples
@given(worlds, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_head_tail_is_the_order_of_the_load_balancers_of_torch(world, counts):
    lengths = [2 * world * count for count in counts]
    starts = bounds(lengths)
    whole = _HeadTailLoadBalancer(starts[-1], world, "cpu")._generate_indices()[0]
    ours = [shard(starts[-1], rank, world, "head_tail") for rank in range(world)]
    assert whole.tolist() == np.concatenate(ours).tolist()
    # torch 2.13 lays document after document, all ranks of one before the next
    documents = _PerDocumentHeadTailLoadBalancer([lengths], world, "cpu")._generate_indices()[0]
    ours = [
        start + shard(length, rank, world, "head_tail")
        for start, length in zip(starts, lengths, strict=False)
        for rank in range(world)
    ]
    assert documents.tolist() == np.concatenate(ours).tolist()


RANKS = """
import json, os
from pathlib import Path
import numpy as np, torch, rotary
import torch.distributed as dist
from rotary import positions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import _context_parallel as experimental
from torch.multiprocessing import start_processes

SEQ = 48
segments = [("text", 7), ("image", 1, 5, 6), ("text", 11)]
axes = positions.sections(2, 3, 3)
plain, vision = rotary.Rotary(head_dim=16), rotary.Rotary(head_dim=16, axes=axes)

def make():
    generator = torch.Generator().manual_seed(0)
    return {
        "positions": torch.arange(SEQ),
        "rows": torch.arange(2 * SEQ).reshape(2, SEQ),
        "mrope": torch.from_numpy(positions.mrope(segments)).T[:, None].repeat(1, 2, 1),
        "cos": rotary.cos_sin(plain, torch.arange(SEQ))[0].clone(),
        "q": torch.randn(2, 3, SEQ, 16, generator=generator),
    }

def work(rank, world):
    store = f"file://{os.getcwd()}/{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    dims = {"positions": 0, "rows": 1, "mrope": 2, "cos": 0, "q": 2}
    whole, buffers = make(), make()
    held = torch.from_numpy(positions.shard(SEQ, rank, world, "head_tail"))
    seen = {}
    with experimental.context_parallel(
        mesh, buffers=list(buffers.values()), buffer_seq_dims=list(dims.values())
    ):
        for name, dim in dims.items():
            ours = whole[name].index_select(dim, held)
            seen[name] = bool(torch.equal(ours, buffers[name]))
        q, ids = buffers["q"], buffers["mrope"].permute(1, 2, 0)
        turned = [rotary.apply(plain, q, positions=held), rotary.apply(vision, q, positions=ids)]
        joined = experimental.context_parallel_unshard(mesh, turned, [2, 2])
    for name, dim in dims.items():
        seen["restored " + name] = bool(torch.equal(whole[name], buffers[name]))
        blocks = distribute_tensor(whole[name], mesh, [Shard(dim)]).to_local()
        block = torch.from_numpy(positions.shard(SEQ, rank, world))
        seen["Shard " + name] = bool(torch.equal(whole[name].index_select(dim, block), blocks))
    ids = whole["mrope"].permute(1, 2, 0)
    wanted = [rotary.apply(plain, whole["q"]), rotary.apply(vision, whole["q"], positions=ids)]
    seen["rotated text"] = bool(torch.equal(joined[0], wanted[0]))
    seen["rotated mrope"] = bool(torch.equal(joined[1], wanted[1]))
    dist.destroy_process_group()
    Path(f"{world} {rank}.json").write_text(json.dumps(seen))

torch.set_num_threads(1)
rotary.apply(plain, make()["q"])  # forked: the loops are loaded once for all ranks
for world in (2, 4):
    start_processes(work, (world,), world, start_method="fork")
"""


@pytest.mark.slow
def test_head_tail_is_what_context_parallel_of_torch_does_to_its_buffers(tmp_path, forks):
    (tmp_path / "ranks.py").write_text(RANKS)
    single = {"NUMBA_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    statuses, _, err = forks(tmp_path / "ranks.py", tmp_path, [single])
    assert statuses == [0], err
    answers = sorted(tmp_path.glob("*.json"))
    assert len(answers) == 2 + 4
    for answer in answers:
        seen = json.loads(answer.read_text())
        assert len(seen) == 17
        assert [name for name, is_equal in seen.items() if not is_equal] == []


# --- what is sent between the ranks ---


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotating_before_the_all_to_all_of_ulysses_is_rotating_after_it(world, layout):
    seq, heads, spec = 8 * world, 4, spec_of(1, layout)
    x = np.random.default_rng(0).standard_normal((heads, seq, HEAD_DIM)).astype(np.float32)
    cut = [shard(seq, rank, world, "ulysses") for rank in range(world)]
    early = [rotary.apply(spec, x[:, held], positions=held) for held in cut]

    def all_to_all(blocks):
        """From (all heads, own tokens) on each rank to (own heads, all tokens)."""
        sent = [np.split(block, world) for block in blocks]
        return [np.concatenate([sent[r][to] for r in range(world)], axis=1) for to in range(world)]

    late = [
        rotary.apply(spec, block, positions=positions.arange(seq))
        for block in all_to_all([x[:, held] for held in cut])
    ]
    for before, after in zip(all_to_all(early), late, strict=True):
        assert bits(before) == bits(after)
    assert bits(np.concatenate(late)) == bits(rotary.apply(spec, x))


def test_documents_that_are_cut_one_by_one_leave_ulysses_in_another_order():
    each = [shard(8, rank, 2, "ulysses", cu_seqlens=[0, 4, 8]) for rank in range(2)]
    assert np.concatenate(each).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def attention(q, k, v, q_at, k_at):
    """Causal (weighted sum of v, sum of weights, largest score) over the keys that are there."""
    scores = np.where(k_at <= q_at[:, None], q @ k.T / np.sqrt(q.shape[-1]), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    return weights @ v, weights.sum(axis=-1, keepdims=True), top


def merged(one, other):
    """Two parts of a softmax as one: Milakov and Gimelshein, arXiv 1805.02867."""
    top = np.maximum(one[2], other[2])
    left, right = (np.exp(np.where(np.isfinite(p[2]), p[2] - top, -np.inf)) for p in (one, other))
    return one[0] * left + other[0] * right, one[1] * left + other[1] * right, top


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("order", ["ring", "head_tail", "striped"])
def test_attention_over_the_blocks_of_a_ring_is_the_whole_attention(world, order):
    seq, spec = 8 * world, spec_of(1, "half")
    q, k, v = np.random.default_rng(1).standard_normal((3, seq, HEAD_DIM))
    at = np.arange(seq)
    whole = attention(rotary.apply(spec, q), rotary.apply(spec, k), v, at, at)
    held = [shard(seq, rank, world, order) for rank in range(world)]
    # k is rotated once, by the rank that has it, and its positions travel with it
    blocks = [(rotary.apply(spec, k[own], positions=own), v[own], own) for own in held]
    queries = [rotary.apply(spec, q[own], positions=own) for own in held]
    found = [None] * world
    for step in range(world):
        for rank in range(world):
            assert np.array_equal(blocks[rank][2], shard(seq, (rank - step) % world, world, order))
            part = attention(queries[rank], *blocks[rank][:2], held[rank], blocks[rank][2])
            found[rank] = part if step == 0 else merged(found[rank], part)
        blocks = [blocks[rank - 1] for rank in range(world)]  # every rank passes its block on
    for own, part in zip(held, found, strict=True):
        np.testing.assert_allclose(part[0] / part[1], (whole[0] / whole[1])[own], atol=1e-13)


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((8, 0, 2, "zigzag"), {}, "order must be one of contiguous, ring, ulysses, head_tail, "
         "striped, got 'zigzag'"),
        ((8, 2, 2), {}, r"rank must be in 0 \.\. world - 1, got rank 2 of world 2"),
        ((8, -1, 2), {}, r"rank must be in 0 \.\. world - 1, got rank -1 of world 2"),
        ((8, 0, 0), {}, r"rank must be in 0 \.\. world - 1, got rank 0 of world 0"),
        ((8, 0.5, 2), {}, "rank must hold whole numbers, got dtype float64"),
        ((8, 0, True), {}, "world must hold whole numbers, got dtype bool"),
        ((8.0, 0, 2), {}, "seq_len must hold whole numbers, got dtype float64"),
        (([8], 0, 2), {}, r"seq_len must be one number, got shape \(1,\)"),
        ((-8, 0, 2), {}, "seq_len must be >= 0, got -8"),
        ((10, 0, 4, "ring"), {}, "ring over 4 ranks needs lengths that are multiples of 4, "
         "got seq_len 10; pad to 12"),
        ((10, 0, 4, "head_tail"), {}, "multiples of 8, got seq_len 10; pad to 16"),
        ((10_000_000, 0, 1024, "head_tail"), {}, "multiples of 2048, got seq_len 10000000; "
         "pad to 10000384"),
        ((8, 0, 2), {"cu_seqlens": [0, 4, 5, 8]}, "got sequence 1 of cu_seqlens: 1; pad to 2"),
        ((8, 0, 2), {"cu_seqlens": [0, 4]}, "cu_seqlens ends with 4, seq_len is 8"),
        ((8, 0, 2), {"cu_seqlens": [1, 8]}, r"must be 1-D, start with 0 and never fall, got"),
        ((8, 0, 2), {"cu_seqlens": [0.0, 8.0]}, "cu_seqlens must hold whole numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_in_one_line(arguments, options, message):
    with pytest.raises(ValueError, match=message) as error:
        shard(*arguments, **options)
    assert "\n" not in str(error.value)
