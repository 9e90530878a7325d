"""Builders of positions in the library of what they are given, traced, and put together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import enable_x64

import rotary
from rotary import Rotary, positions

SEGMENTS = [("text", 3), ("image", 1, 2, 3), ("text", 0), ("video", 2, 2, 2), ("text", 2),
            ("video", 2, 1, 2, 1.5)]  # fmt: skip
TIED = [("text", 3), ("image", 2, 3), ("text", 1), ("image", 1, 1)]
PARENTS = [[-1, 0, 0, 1, 1, 4, -1], [-1, -1, -1, 2, 3, 4, 5]]
MASK = [[0, 0, 1, 1], [1, 1, 1, 1]]
# builder: what it is called with, of arrays; and the numbers that it must be given as arrays
OF_ARRAYS = {
    "arange": (lambda offset: positions.arange(5, offset), [[7, 0, 3]]),
    "arange, one offset": (lambda offset: positions.arange(5, offset), [9]),
    "packed": (lambda bounds: positions.packed(bounds, seq_len=12), [[0, 4, 4, 12]]),
    "left_padded": (positions.left_padded, [MASK]),
    "draft": (positions.draft, [PARENTS, [10, 20]]),
    "draft, one tree": (lambda parents: positions.draft(parents, 5), [PARENTS[0]]),
    "mrope": (lambda offset: positions.mrope(SEGMENTS, offset=offset), [4]),
    "mrope by row": (lambda offset: positions.mrope(SEGMENTS, offset=offset), [[4, 0]]),
    **{f"shard {order}": (
        lambda bounds, order=order: positions.shard(24, 1, 2, order, cu_seqlens=bounds),
        [[0, 8, 8, 12, 24]]) for order in ("contiguous", "ring", "head_tail", "striped")},
}  # fmt: skip
OF_SIZES = {
    "arange": lambda like: positions.arange(5, 3, like=like),
    "packed": lambda like: positions.packed([0, 2, 5], like=like, seq_len=5),
    "left_padded": lambda like: positions.left_padded(MASK, like=like),
    "draft": lambda like: positions.draft(PARENTS, like=like),
    "shard": lambda like: positions.shard(8, 1, 2, "head_tail", like=like),
    "grid": lambda like: positions.grid(2, 3, 4, like=like),
    "grid, centred": lambda like: positions.grid(2, 3, origin="center", prefix=1, like=like),
    "grid, stretched": lambda like: positions.grid(2, 3, spacing=(8, 0.5), like=like),
    "grid_2d": lambda like: positions.grid_2d(2, 3, like=like),
    "video": lambda like: positions.video(2, 3, 1, like=like),
    "mrope": lambda like: positions.mrope(SEGMENTS, like=like),
    "tie": lambda like: positions.tie(TIED, like=like),
    "tie, 1 apart": lambda like: positions.tie(TIED, "unit", like=like),
}


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_torch_in_torch_out_eager_and_compiled(name):
    torch = pytest.importorskip("torch")
    build, numbers = OF_ARRAYS[name]
    wanted = build(*map(np.array, numbers))
    assert isinstance(wanted, np.ndarray)
    assert wanted.dtype == np.int64
    compiled = torch.compile(build, fullgraph=True, backend="eager")
    for call, dtype in ((build, torch.int64), (build, torch.int32), (compiled, torch.int32)):
        found = call(*[torch.tensor(each, dtype=dtype) for each in numbers])
        assert (found.dtype, found.device.type) == (torch.int64, "cpu")
        np.testing.assert_array_equal(found.numpy(), wanted)
    torch._dynamo.reset()


@pytest.mark.usefixtures("xla_in_less_time")
@pytest.mark.parametrize("name", OF_ARRAYS)
def test_jax_in_jax_out_eager_and_jitted(name):
    jax = pytest.importorskip("jax")
    build, numbers = OF_ARRAYS[name]
    wanted = build(*map(np.array, numbers))
    for call in (build, jax.jit(build)):
        found = call(*map(jax.numpy.array, numbers))
        assert isinstance(found, jax.Array)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.usefixtures("xla_in_less_time")
def test_the_strict_settings_of_jax_are_kept():
    jax = pytest.importorskip("jax")
    xp = jax.numpy
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for build, numbers in OF_ARRAYS.values():
            found = build(*map(xp.array, numbers))
            np.testing.assert_array_equal(found, build(*map(np.array, numbers)))
        for build in OF_SIZES.values():
            np.testing.assert_array_equal(build(xp.zeros(1)), build(None))
        for dtype in (bool, np.int8, np.float32):
            found = positions.left_padded(xp.array(MASK, dtype))
            np.testing.assert_array_equal(found, positions.left_padded(MASK))
        found = positions.tie(TIED, "equal", offset=3, like=xp.zeros(1))
        np.testing.assert_allclose(found, positions.tie(TIED, "equal", offset=3), rtol=1e-6)


@pytest.mark.usefixtures("xla_in_less_time")
@pytest.mark.parametrize("name", OF_SIZES)
def test_like_says_where_the_answer_is_made(name):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    build = OF_SIZES[name]
    wanted = build(None)
    compiled = torch.compile(build, fullgraph=True, backend="eager")
    assert isinstance(wanted, np.ndarray)
    for call in (build, compiled):
        np.testing.assert_array_equal(call(torch.empty(2)).numpy(), wanted)
    assert build(torch.empty(0, device="meta")).device.type == "meta"
    assert isinstance(build(np.empty(3)), np.ndarray)
    for call in (build, jax.jit(build)):
        found = call(jax.numpy.zeros(2))
        assert isinstance(found, jax.Array)
        np.testing.assert_array_equal(found, wanted)
    other = jax.devices()[-1]
    assert build(jax.device_put(jax.numpy.zeros(2), other)).devices() == {other}
    torch._dynamo.reset()


def test_a_compiled_call_takes_any_length():
    torch = pytest.importorskip("torch")

    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def build(x, offset):
        return positions.arange(x.shape[0], offset), positions.shard(x.shape[0], 1, 2, like=x)

    for length in (4, 6, 10):
        whole, part = build(torch.empty(length), torch.tensor(3))
        assert whole.tolist() == list(range(3, 3 + length))
        assert part.tolist() == list(range(length // 2, length))
    torch._dynamo.reset()


def test_a_compiled_grid_takes_any_size():
    """torch.compile and torch.export have symbols in place of sizes."""
    torch = pytest.importorskip("torch")

    class Grids(torch.nn.Module):
        def forward(self, x):
            rows, columns = x.shape
            segments = [("text", rows), ("image", 1, columns, 2)]
            return (
                positions.grid(1, rows, columns, like=x, origin=("first", "middle", "middle")),
                positions.mrope(segments, like=x),
            )

    compiled = torch.compile(Grids(), fullgraph=True, backend="eager", dynamic=True)
    sizes = {"x": {axis: torch.export.Dim(f"size{axis}", min=2, max=64) for axis in (0, 1)}}
    exported = [
        torch.export.export(
            Grids(), (torch.empty(3, 4),), dynamic_shapes=sizes, strict=strict
        ).module()
        for strict in (False, True)
    ]
    for shape in ((3, 4), (5, 2), (6, 7)):
        wanted = Grids()(np.empty(shape))
        for call in (compiled, *exported):
            for found, each in zip(call(torch.empty(shape)), wanted, strict=True):
                assert found.tolist() == each.tolist()
    torch._dynamo.reset()


REFUSED = {
    "an offset of floats": (lambda a: positions.arange(2, a([0.5])), "offset must hold whole num"),
    "parents of floats": (lambda a: positions.draft(a([-1.0])), "parents must hold whole numbers"),
    "a draft after half a token": (
        lambda a: positions.draft(a([-1]), a(0.5)), "offset must hold whole numbers"),
    "images after half a token": (
        lambda a: positions.mrope([("text", 1)], offset=a(0.5)), "offset must hold whole numbers"),
    "parts of floats": (
        lambda a: positions.shard(2, 0, 2, cu_seqlens=a([0.0, 2.0])), "cu_seqlens must hold whole"),
    "boundaries that fall": (lambda a: positions.packed(a([0, 3, 2])), "start with 0"),
    "another seq_len": (lambda a: positions.packed(a([0, 3]), seq_len=4), "seq_len is 4"),
    "a mask of twos": (lambda a: positions.left_padded(a([0, 2])), "0 for padding"),
    "a parent behind its child": (lambda a: positions.draft(a([-1, 2, 0])), "a node before it"),
    "a parent of itself": (lambda a: positions.draft(a([0])), "a node before it"),
    "a parent below -1": (lambda a: positions.draft(a([-2])), "a node before it"),
    "one parent": (lambda a: positions.draft(a(3)), "a node before it"),
    "an uneven sequence": (
        lambda a: positions.shard(6, 0, 2, cu_seqlens=a([0, 3, 6])), "sequence 0 of cu_seqlens: 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_numbers_in_memory_are_looked_at(name, library):
    call, text = REFUSED[name]
    module = pytest.importorskip(library)
    make = getattr(module, "tensor", None) or module.array
    with pytest.raises(ValueError, match=text):
        call(make)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_unsigned_numbers_of_numpy_beside_another_array(library):
    module = pytest.importorskip(library)
    offset, like = np.array([5, 7], np.uint64), module.zeros(1)
    found = positions.arange(2, offset, like=None if library == "numpy" else like)
    assert found.tolist() == [[5, 6], [7, 8]]
    assert type(found) is type(like)


@pytest.mark.parametrize(
    ("library", "dtype", "limit"),
    [("numpy", "uint64", "int64"), ("torch", "uint64", "int64"), ("jax.numpy", "uint32", "int32")],
)
def test_unsigned_numbers_that_would_wrap_are_refused(library, dtype, limit):
    """Those of torch and JAX became negative positions."""
    module = pytest.importorskip(library)
    most = int(np.iinfo(limit).max)

    def made(value):
        return getattr(module, "tensor", module.asarray)([value], dtype=getattr(module, dtype))

    for call in (
        lambda offset: positions.arange(1, offset),
        lambda offset: positions.draft([[-1]], offset),
        lambda offset: positions.mrope([("text", 1)], offset=offset),
    ):
        assert int(call(made(most)).max()) == most
        with pytest.raises(ValueError, match=f"offset must fit in {limit}.*, got {most + 6}"):
            call(made(most + 6))


@pytest.mark.parametrize("order", ["contiguous", "head_tail", "striped"])
@pytest.mark.parametrize("bounds", [None, [0, 8, 8, 12, 24]])
def test_the_rank_of_a_shard_may_be_traced(order, bounds):
    """In jax.shard_map it is `axis_index`, which ended in an error of JAX."""
    jax = pytest.importorskip("jax")

    def held(rank):
        return positions.shard(24, rank, 2, order, cu_seqlens=bounds)

    found = jax.vmap(held, axis_size=2)(jax.numpy.arange(2))
    np.testing.assert_array_equal(found, [held(0), held(1)])


@pytest.mark.parametrize("order", ["contiguous", "head_tail", "striped"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_a_traced_rank_of_any_type_has_its_own_tokens(order, dtype):
    """Its product with the length of a part wrapped, and gave tokens of another rank."""
    jax = pytest.importorskip("jax")
    held = jax.jit(lambda rank: positions.shard(2**18, rank, 4, order))
    found = held(jax.numpy.asarray(3, dtype))
    np.testing.assert_array_equal(found, positions.shard(2**18, 3, 4, order))
    with pytest.raises(ValueError, match="rank must hold whole numbers, got dtype float32"):
        held(jax.numpy.asarray(3.0))


def test_a_program_of_torch_export_leaves_the_length_open():
    """Its symbols, without strict=True, were taken for arrays of objects."""
    torch = pytest.importorskip("torch")

    class Build(torch.nn.Module):
        def forward(self, x):
            seq = x.shape[0]
            return (
                positions.arange(3, seq, like=x),
                positions.shard(2 * seq, 1, 2, like=x),
                positions.draft(torch.tensor([-1, 0]), offset=seq),
                positions.mrope([("text", 2)], offset=seq, like=x),
                positions.tie([("text", 2)], offset=seq, like=x),
            )

    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Build(), (torch.empty(4),), dynamic_shapes=shapes, strict=False)
    for found, wanted in zip(
        program.module()(torch.empty(7)), Build()(torch.empty(7)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_a_program_of_jax_export_leaves_the_length_open():
    jax = pytest.importorskip("jax")
    from jax import export

    (seq,) = export.symbolic_shape("seq")
    kinds = jax.ShapeDtypeStruct((seq,), np.float32), jax.ShapeDtypeStruct((), np.int32)
    build = jax.jit(lambda x, offset: positions.arange(x.shape[0], offset))
    program = export.export(build)(*kinds)
    found = program.call(np.zeros(5, np.float32), np.int32(7))
    np.testing.assert_array_equal(found, np.arange(7, 12))


def test_what_is_traced_needs_its_length():
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="need seq_len"):
        jax.jit(positions.packed)(jax.numpy.array([0, 3]))
    with pytest.raises(ValueError, match="need seq_len"):
        positions.packed(torch.empty(2, dtype=torch.int64, device="meta"))


def test_jax_without_x64_refuses_what_it_would_wrap():
    jax = pytest.importorskip("jax")
    like = jax.numpy.zeros(1)
    for call in (
        lambda: positions.arange(2, 2**40, like=like),
        lambda: positions.arange(2, [2**40], like=like),
        lambda: positions.arange(8, 2**31 - 4, like=like),
        lambda: positions.tie([("text", 2)], offset=2**40, like=like),
        lambda: positions.tie([("text", 2)], offset=2**31 - 1, like=like),
        lambda: positions.mrope([("video", 3, 1, 1, 2.0**30)], like=like),
    ):
        with pytest.raises(ValueError, match=r"2\^31 - 1"):
            call()
    assert positions.arange(2, 2**40).tolist() == [2**40, 2**40 + 1]


def test_a_video_is_traced_as_one_whatever_its_frames():
    """With an operation for each frame 384 of them took 20 s to compile."""
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    counts = {"jax": [], "torch": []}

    def count(graph, _):
        counts["torch"].append(len(graph.graph.nodes))
        return graph

    for frames in (3, 30):

        def build(offset, frames=frames):
            return positions.mrope([("video", frames, 1, 2, 1.5)], offset=offset)

        counts["jax"].append(len(jax.make_jaxpr(build)(jax.numpy.array(5)).eqns))
        torch.compile(build, backend=count, fullgraph=True, dynamic=False)(torch.tensor(5))
    assert counts["jax"][0] == counts["jax"][1]
    assert counts["torch"][0] == counts["torch"][1]


@pytest.mark.parametrize("name", {**OF_SIZES, **OF_ARRAYS})
def test_jax_with_x64_has_positions_of_64_bits(name):
    jax = pytest.importorskip("jax")
    with enable_x64(True):
        if name in OF_SIZES:
            found = OF_SIZES[name](jax.numpy.zeros(1))
        else:
            build, numbers = OF_ARRAYS[name]
            found = build(*(jax.numpy.asarray(each, np.int32) for each in numbers))
        assert found.dtype.itemsize == 8


@pytest.mark.parametrize("name", ["torch", "jax.numpy"])
def test_large_positions_are_those_of_numpy(name):
    """On JAX they wrapped, of 64 bits or not."""
    like = pytest.importorskip(name).ones(1)
    far, clip = 2**40, [("video", 3, 1, 2, 2.0**30), ("text", 1)]
    with enable_x64(True):
        for build in (
            lambda **how: positions.tie(TIED, offset=far, **how),
            lambda **how: positions.tie(TIED, "equal", offset=far, **how),
            lambda **how: positions.mrope(clip, **how),
            lambda **how: positions.mrope(clip, offset=far, **how),
        ):
            np.testing.assert_array_equal(build(like=like), build())


# --- draft trees ---


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_node_of_a_draft_tree_is_one_after_its_parent(data):
    count = data.draw(st.integers(0, 40))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
    offset, depth = data.draw(st.integers(0, 10**6)), []
    for parent in parents:
        depth.append(offset if parent < 0 else depth[parent] + 1)
    assert positions.draft(np.array(parents, np.int64), offset).tolist() == depth


def test_a_branch_is_rotated_as_the_sequence_that_it_is():
    """Keys of a path through the tree are those of the same tokens one after the other."""
    spec, path = Rotary(head_dim=8), [0, 2, 4]
    tree = [-1, 0, 0, 1, 2]
    x = np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float32)
    drafted = rotary.apply(spec, x, positions=positions.draft(tree, 100), seq_dim=-2)
    alone = rotary.apply(spec, x[:, path], positions=positions.arange(3, 100), seq_dim=-2)
    np.testing.assert_array_equal(drafted[:, path], alone)


# --- packed, sharded, M-RoPE and padded at once ---

TEXT = st.tuples(st.just("text"), st.integers(1, 6))
PICTURE = st.tuples(st.sampled_from(["image", "video"]), *[st.integers(1, 3)] * 3)


@given(
    documents=st.lists(st.lists(st.one_of(TEXT, PICTURE), min_size=1, max_size=4), min_size=1,
                       max_size=4),
    world=st.sampled_from([1, 2, 3, 4]),
    order=st.sampled_from(["contiguous", "ring", "head_tail", "striped"]),
    by_document=st.booleans(),
    library=st.sampled_from(["numpy", "torch"]),
    left=st.integers(0, 5),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_any_combination_equals_the_whole(documents, world, order, by_document, library, left):
    """Every document of images and text alone, unsharded, is the oracle of its own tokens."""
    spec = Rotary(head_dim=12, axes=(0, 1, 2, 0, 1, 2))
    each = [positions.mrope(document) for document in documents]
    parts = 2 * world if order == "head_tail" else world
    padding = [-(len(own)) % parts for own in each]  # every document can be cut by itself
    padded = [np.concatenate([own, np.zeros((p, 3), np.int64)])
              for own, p in zip(each, padding, strict=True)]  # fmt: skip
    bounds = np.cumsum([0, *map(len, padded)])
    row = np.concatenate([np.zeros((left, 3), np.int64), *padded])  # left-padded in its batch
    x = np.random.default_rng(0).standard_normal((1, 2, bounds[-1], 12)).astype(np.float32)
    x = np.concatenate([np.zeros((1, 2, left, 12), np.float32), x], axis=2)
    if library == "torch":
        torch = pytest.importorskip("torch")
        row, x, bounds = map(torch.from_numpy, (row, x, bounds))
    length = int(bounds[-1])
    result = np.zeros((1, 2, length, 12), np.float32)
    seen = []
    for rank in range(world):
        tokens = positions.shard(length, rank, world, order,
                                 cu_seqlens=bounds if by_document else None,
                                 like=bounds)  # fmt: skip
        assert type(tokens) is type(bounds)
        mine = rotary.apply(spec, x[:, :, tokens + left], positions=row[tokens + left], seq_dim=-2)
        result[:, :, np.asarray(tokens)] = np.asarray(mine)
        seen += np.asarray(tokens).tolist()
    assert sorted(seen) == list(range(length))
    start = 0
    for own, more in zip(each, padding, strict=True):
        tokens = slice(left + start, left + start + len(own))
        oracle = rotary.apply(spec, np.asarray(x)[:, :, tokens].copy(), positions=own, seq_dim=-2)
        np.testing.assert_array_equal(result[:, :, start : start + len(own)], oracle)
        start += len(own) + more
    mask = np.concatenate([np.zeros(left, np.int64), np.ones(length, np.int64)])
    text = positions.left_padded(mask if library == "numpy" else torch.from_numpy(mask))
    np.testing.assert_array_equal(np.asarray(text)[left:], np.arange(length))
