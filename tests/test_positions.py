"""Builders of positions against loops, and against what transformers builds for its models."""

import re
import types
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import if_installed, of_transformers

import rotary
from rotary import positions

torch = if_installed("torch")

examples = settings(max_examples=50, deadline=None, derandomize=True)
sizes = st.integers(0, 5)


# --- text ---


@pytest.mark.parametrize("offset", [0, 7, 2**40, np.int64(3), np.uint8(255), -2])
def test_arange_counts_from_the_offset(offset):
    ours = positions.arange(5, offset)
    assert ours.dtype == np.int64
    assert ours.tolist() == list(range(int(offset), int(offset) + 5))


def test_arange_takes_an_offset_per_row():
    offsets = np.array([[3, 0], [10, 2**33]])
    ours = positions.arange(4, offsets)
    assert ours.shape == (2, 2, 4)
    for row in np.ndindex(2, 2):
        assert ours[row].tolist() == [offsets[row] + step for step in range(4)]
    assert positions.arange(0, [1, 2]).shape == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "seq_len must be >= 0, got -1"),
        ((3, 0.5), "offset must hold whole numbers, got dtype float64"),
        ((3, [True]), "offset must hold whole numbers, got dtype bool"),
        ((2.5,), "seq_len must hold whole numbers, got dtype float64"),
        ((True,), "seq_len must hold whole numbers, got dtype bool"),
        (("3",), "seq_len must hold whole numbers, got dtype <U1"),
        ((2, 2**63 - 1), "the last position must fit in int64, got 9223372036854775808"),
        ((2, [0, 2**63 - 1]), "the last position must fit in int64, got 9223372036854775808"),
        ((2, 2**64), "offset must fit in int64, got 18446744073709551616"),
        ((2, np.array([2**63], np.uint64)), "offset must fit in int64, got 9223372036854775808"),
        (
            (10**12,),
            r"1 x 1000000000000 positions take 8,000,000,000,000 bytes, over "
            "max_bytes = 17,179,869,184; build",
        ),
        ((2**30, [0, 1, 2]), r"3 x 1073741824 positions take 25,769,803,776 bytes"),
    ],
)
def test_arange_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        positions.arange(*arguments)


def test_an_empty_list_holds_whole_numbers():
    """NumPy makes it float64."""
    assert positions.arange(2, []).shape == (0, 2)
    assert positions.draft([]).shape == (0,)
    assert positions.draft([[], []]).shape == (2, 0)
    assert positions.mrope([("text", 2)], offset=[]).shape == (0, 2, 3)
    for result in (positions.arange(2, []), positions.draft([]), positions.draft([[]])):
        assert result.dtype == np.int64


@pytest.mark.parametrize("dtype", [">i4", ">u2", ">i8", ">u8"])
@pytest.mark.parametrize("like", [None, torch.zeros(1)])
def test_numbers_of_either_byte_order_are_taken(dtype, like):
    def made(*values):
        return np.array(values, dtype)

    bounds = positions.packed(made(0, 2, 5), like=like)
    starts = positions.arange(2, made(2, 5), like=like)
    padded = positions.left_padded(made(0, 1, 1), like=like)
    assert bounds.tolist() == [0, 1, 0, 1, 2]
    assert starts.tolist() == [[2, 3], [5, 6]]
    assert padded.tolist() == [0, 0, 1]
    if "i" in dtype:
        assert positions.draft(made(-1, 0), like=like).tolist() == [0, 1]


@pytest.mark.parametrize(
    "call",
    [
        lambda masked: positions.arange(2, masked),
        positions.packed,
        positions.left_padded,
        lambda masked: positions.draft(masked - 1),
        lambda masked: positions.draft([[-1]], masked),
        lambda masked: positions.mrope([("text", 2)], offset=masked),
        lambda masked: positions.shard(2, 0, 2, cu_seqlens=masked),
        lambda masked: positions.tie([("text", 2)], like=masked),
    ],
)
def test_a_masked_array_is_refused(call):
    """Its mask was dropped; cos_sin refuses one."""
    with pytest.raises(TypeError, match="a masked array; a mask would be lost: "):
        call(np.ma.masked_array([0, 0, 2], [False, True, False]))


def test_positions_end_with_the_last_of_int64():
    assert positions.arange(2, 2**63 - 2).tolist() == [2**63 - 2, 2**63 - 1]
    for call in (
        lambda: positions.draft([-1, 0], 2**63 - 1),
        lambda: positions.mrope([("text", 2)], offset=2**63 - 1),
        lambda: positions.tie([("text", 2)], offset=2**63 - 1),
        lambda: positions.tie([("image", 2, 1)], "unit", offset=2**63 - 1),
    ):
        with pytest.raises(ValueError, match="the last position must fit in int64"):
            call()


def test_arange_stops_at_the_limit_exactly():
    assert positions.arange(4, max_bytes=32).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="32 bytes, over max_bytes = 31"):
        positions.arange(4, max_bytes=31)


@examples
@given(st.lists(sizes, max_size=6))
def test_packed_starts_every_sequence_again(lengths):
    bounds = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    wanted = [step for length in lengths for step in range(length)]
    ours = positions.packed(bounds)
    assert ours.dtype == np.int64
    assert ours.tolist() == wanted
    assert positions.packed(torch.tensor(bounds, dtype=torch.int32)).tolist() == wanted


@pytest.mark.parametrize("bounds", [[], [1, 2], [0, 3, 2], [[0, 1]], 3])
def test_packed_refuses_what_are_no_boundaries(bounds):
    bounds = np.array(bounds, np.int64)
    with pytest.raises(ValueError, match="cu_seqlens must be 1-D, start with 0 and never fall"):
        positions.packed(bounds)


def test_packed_refuses_fractions():
    with pytest.raises(ValueError, match="cu_seqlens must hold whole numbers, got dtype float64"):
        positions.packed([0.0, 2.0])


@examples
@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
def test_left_padded_counts_as_generate_does(mask):
    generation = of_transformers("transformers.generation.utils")
    tensor = torch.tensor(mask)
    kwargs = {"attention_mask": tensor.long(), "input_ids": torch.zeros_like(tensor).long()}
    build = generation.GenerationMixin._prepare_position_ids_for_generation
    theirs = build(types.SimpleNamespace(), kwargs["input_ids"], kwargs)
    np.testing.assert_array_equal(positions.left_padded(mask), theirs.numpy())
    np.testing.assert_array_equal(positions.left_padded(tensor.int().numpy()), theirs.numpy())


@pytest.mark.parametrize("mask", [[[0, 2]], [[0.5, 1]], 1, [[-1, 0]], [[0.0, float("nan")]]])
def test_left_padded_refuses_other_masks(mask):
    with pytest.raises(ValueError, match="hold 0 for padding, 1 for tokens"):
        positions.left_padded(mask)


# --- grids ---


@examples
@given(st.lists(sizes, min_size=1, max_size=4))
def test_grid_is_row_major(shape):
    ours = positions.grid(*shape)
    assert ours.shape == (np.prod(shape), len(shape))
    assert ours.dtype == np.int64
    assert ours.tolist() == [list(place) for place in np.ndindex(*shape)]


def test_images_and_videos_are_grids():
    wanted = [[t, h, w] for t in range(2) for h in range(3) for w in range(4)]
    assert positions.video(2, 3, 4).tolist() == wanted
    assert positions.grid_2d(3, 4).tolist() == [place[1:] for place in wanted[:12]]


@pytest.mark.parametrize(
    "shape", [(), (2, -1), (64 / 16, 4), (True, 2), ("2",), ([2, 3],), (None,)]
)
def test_grid_refuses(shape):
    with pytest.raises(
        ValueError, match="sizes of a grid must be whole numbers >= 0, one per axis"
    ):
        positions.grid(*shape)


# --- text, images and video in one sequence ---

MERGE = 2
PER_SECOND = 2


def get_rope_index(segments, name="Qwen2VL") -> np.ndarray:
    """Positions by transformers, (seq, 3); sizes are in merged patches, and time steps of videos
    are those of Qwen2.5-VL."""
    module = {"Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl"}[name]
    model = getattr(
        of_transformers(f"transformers.models.{module}.modeling_{module}"), f"{name}Model"
    )
    vision = types.SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=PER_SECOND)
    stub = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=vision))
    stub.get_vision_position_ids = types.MethodType(model.get_vision_position_ids, stub)
    kinds, grids, steps = [], {"image": [], "video": []}, []
    for kind, *size in segments:
        steps += size[3:]
        size = size[:3]
        kinds += [("text", "image", "video").index(kind)] * int(np.prod(size))
        if kind != "text":
            grids[kind].append([size[0], size[1] * MERGE, size[2] * MERGE])
    ids = torch.tensor([kinds])
    grids = {
        f"{kind}_grid_thw": torch.tensor(grid) if grid else None for kind, grid in grids.items()
    }
    if steps:
        grids["second_per_grid_ts"] = [step / PER_SECOND for step in steps]
    theirs, _ = model.get_rope_index(stub, torch.zeros_like(ids), ids, **grids)
    return theirs[:, 0].T.numpy()


@pytest.mark.parametrize(
    "segments",
    [
        [("text", 5)],
        [("text", 3), ("image", 1, 4, 6), ("text", 2)],
        [("image", 1, 3, 3), ("text", 1), ("image", 1, 1, 7)],
        [("text", 3), ("video", 3, 2, 5), ("text", 4), ("image", 1, 6, 2), ("text", 1)],
        [("text", 1), ("video", 4, 4, 4)],
    ],
)
def test_mrope_is_that_of_transformers(segments):
    ours = positions.mrope(segments)
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, get_rope_index(segments))
    np.testing.assert_array_equal(positions.mrope(iter(segments), offset=9), ours + 9)


def test_times_in_seconds_are_those_of_transformers():
    """Of Qwen2.5-VL; the last segment is a video, since transformers goes on elsewhere after one.
    In float64 36 frames at a step of 1.1 would have another time, so it tells in what to multiply.
    """
    random = np.random.default_rng(0)
    steps = [1.0, 2.0, 0.5, 1.1, 0.1, 0.7, 4.0, *random.uniform(0.05, 60, 60).round(3).tolist()]
    for step in steps:
        for frames in (1, 2, 90):
            segments = [("text", 3), ("image", 1, 2, 5), ("text", 2), ("video", frames, 5, 3, step)]
            ours, theirs = positions.mrope(segments), get_rope_index(segments, "Qwen2_5_VL")
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{step} {frames}")


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor])
def test_a_step_of_time_may_be_a_number_of_a_library(kind):
    """`second_per_grid_ts` is a tensor, whose product with a number stays float32."""
    times = positions.mrope([("video", 20, 1, 1, kind(2.6))])[:, 0]
    assert times.tolist() == positions.mrope([("video", 20, 1, 1, 2.6)])[:, 0].tolist()
    assert times[-1] == 49


def test_after_a_video_in_seconds_text_follows_the_largest_position():
    ids = positions.mrope([("text", 1), ("video", 3, 4, 2, 2.5), ("video", 2, 1, 4, 0.5)], offset=7)
    assert ids[1:25:8].tolist() == [[8, 8, 8], [10, 8, 8], [13, 8, 8]]
    assert ids[25:].tolist() == [[14, 14, 14 + column] for column in (0, 1, 2, 3)] * 2
    assert positions.mrope([("video", 0, 4, 2, 2.5), ("text", 1)]).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("step", [0, -1.0, float("nan"), float("inf"), None, "a", 1e305])
def test_mrope_refuses_other_steps_of_time(step):
    with pytest.raises(ValueError, match="time_step of a video must be a number > 0 and below"):
        positions.mrope([("video", 2, 1, 1, step)])


@pytest.mark.parametrize("build", [positions.mrope, positions.tie])
@pytest.mark.parametrize("segment", [3, (), None])
def test_what_is_no_segment_is_refused(build, segment):
    with pytest.raises(ValueError, match=re.escape(f"got {segment}") + "$"):
        build([("text", 1), segment])


def test_after_a_long_video_text_follows_the_last_frame():
    segments = [("text", 2), ("video", 5, 1, 3), ("text", 2)]
    ours, theirs = positions.mrope(segments), get_rope_index(segments)
    # the paper: one after the largest position; transformers 5.23 counts height and width alone
    assert ours[-2:].tolist() == [[7] * 3, [8] * 3]
    assert theirs[-2:].tolist() == [[5] * 3, [6] * 3]
    np.testing.assert_array_equal(ours[:-2], theirs[:-2])


def test_mrope_of_nothing():
    assert positions.mrope([]).shape == (0, 3)
    empty = positions.mrope([("text", 2), ("image", 1, 0, 3), ("text", 0), ("text", 1)])
    assert empty.tolist() == [[0] * 3, [1] * 3, [2] * 3]


@pytest.mark.parametrize("segment", [("audio", 3), ("text", 1, 2), ("image", 2, 2), ("video",),
                                     ("image", 1, 1, 1, 2.0)])  # fmt: skip
def test_mrope_refuses_other_segments(segment):
    with pytest.raises(ValueError, match=r"a segment is \('text', length\), .*got \('"):
        positions.mrope([("text", 1), segment])


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint64, torch.tensor])
def test_sizes_of_a_library_are_those_of_python(kind):
    """Narrow numbers would start again from 0, unsigned 64-bit ones give float64."""

    def segments(size):
        return [("text", size(100)), ("image", size(1), size(9), size(7)), ("text", size(100)),
                ("video", size(2), size(9), size(1), 3.0), ("text", size(100))]  # fmt: skip

    ours, wanted = positions.mrope(segments(kind)), positions.mrope(segments(int))
    assert (ours.dtype, ours.tolist()) == (np.int64, wanted.tolist())
    for spacing in get_args(positions.TieSpacing):
        tied = [
            positions.tie(
                [("text", size(100)), ("image", size(20), size(20)), ("text", size(9))], spacing
            ).tolist()
            for size in (kind, int)
        ]
        assert tied[0] == tied[1]


@pytest.mark.parametrize("build", [positions.mrope, positions.tie])
@pytest.mark.parametrize("segment", [("text", 2.5), ("text", -1), ("text", True), ("text", "2")])
def test_sizes_that_are_not_whole_are_refused(build, segment):
    message = r"sizes of text must be whole numbers >= 0, one per axis, got \("
    with pytest.raises(ValueError, match=message):
        build([segment])


# --- which axis drives which pair ---


def recomposed(cls, counts: tuple[int, ...]) -> list[int]:
    """The axis transformers reads for every pair: what it picks from tables that hold the axis."""
    tables = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 1, sum(counts)).clone()
    stub = types.SimpleNamespace(mrope_section=list(counts))
    full = cls.recomposition_frequencies(stub, tables)[0, 0]
    return full[: sum(counts)].int().tolist()


@pytest.mark.parametrize("counts", [(16, 24, 24), (1, 2, 3), (8, 12, 12), (4, 0, 4)])
def test_sections_are_those_of_qwen2_vl(counts):
    modeling = of_transformers("transformers.models.qwen2_vl.modeling_qwen2_vl")
    ours = positions.sections(*counts)
    assert list(ours) == recomposed(modeling.Qwen2VLRotaryEmbedding, counts)


@pytest.mark.parametrize("counts", [(24, 20, 20), (11, 11, 10), (3, 2, 1), (5, 0, 1), (2, 0, 0)])
def test_interleaved_sections_are_those_of_qwen3_vl(counts):
    modeling = of_transformers("transformers.models.qwen3_vl.modeling_qwen3_vl")
    ours = positions.interleaved_sections(*counts)
    assert list(ours) == recomposed(modeling.Qwen3VLTextRotaryEmbedding, counts)


def test_interleaved_sections_take_any_number_of_axes():
    assert positions.interleaved_sections(3, 3) == (0, 1, 0, 1, 0, 1)
    assert positions.interleaved_sections(2, 1, 1, 1) == (0, 1, 2, 3, 0)
    assert positions.interleaved_sections(4) == (0, 0, 0, 0)


@pytest.mark.parametrize("build", [positions.sections, positions.interleaved_sections])
@pytest.mark.parametrize("counts", [(), (2, -1), ([24, 20, 20],), (1.5, 2), (True, 1), ("8",)])
def test_sections_refuse(build, counts):
    with pytest.raises(ValueError, match="sections must be whole numbers >= 0, one per axis, got"):
        build(*counts)
    with pytest.raises(ValueError, match=r"sections need at least 1 pair, got \(0, 0\)"):
        build(0, 0)
    counts = np.array([100, 90, 90], np.uint8)  # three times 100 is more than a byte holds
    assert build(*counts) == build(*counts.tolist())


def test_interleaved_sections_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"axis 1 has too many pairs .*\(1, 4, 1\)"):
        positions.interleaved_sections(1, 4, 1)


# --- grids that are centred, stretched, or have tokens in front ---


def test_tokens_before_a_grid_are_not_rotated():
    spec = rotary.Rotary(8, schedule="axial", params={"num_axes": 2}, axes=[0, 0, 1, 1])
    q = np.random.default_rng(0).normal(size=(1, 2, 5 + 12, 8))
    where = positions.grid(3, 4, prefix=5)
    assert where.shape == (17, 2)
    assert where.dtype == np.int64
    turned = rotary.apply(spec, q, positions=where)
    np.testing.assert_array_equal(turned[:, :, :5], q[:, :, :5])
    alone = rotary.apply(spec, q[:, :, 5:], positions=positions.grid(3, 4))
    np.testing.assert_array_equal(turned[:, :, 5:], alone)


@pytest.mark.parametrize("origin", positions.ORIGINS)
def test_scores_do_not_depend_on_the_origin(origin):
    spec = rotary.Rotary(8, schedule="axial", params={"num_axes": 2}, axes=[0, 0, 1, 1])
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 20, 8))
    one, other = (
        rotary.apply(spec, q, k, positions=where, allow_negative=True)
        for where in (positions.grid(4, 5), positions.grid(4, 5, origin=origin))
    )
    scores = [q @ k.swapaxes(-1, -2) for q, k in (one, other)]
    np.testing.assert_allclose(*scores, atol=1e-6)


def test_a_centred_grid_and_its_spacing():
    assert positions.grid(3, origin="center", spacing=2).tolist() == [[-2.0], [0.0], [2.0]]
    edge = positions.grid(4, 4, origin="edge", spacing=2 / 4) - 1  # DINOv3: -1 .. 1
    assert (edge.min(), edge.max()) == (-0.75, 0.75)
    for kind in (int, np.int64, np.uint8):
        middle = positions.grid(kind(4), origin="middle")
        assert (middle.dtype, middle.ravel().tolist()) == (np.int64, [-2, -1, 0, 1])
        center = positions.grid(kind(4), origin="center")
        assert (center.dtype, center.ravel().tolist()) == (np.float64, [-1.5, -0.5, 0.5, 1.5])


def test_an_origin_for_each_axis():
    """Qwen-Image counts frames from 0, rows and columns from the middle."""
    wanted = [[t, h, w] for t in range(2) for h in (-2, -1, 0) for w in (-2, -1, 0, 1)]
    ours = positions.grid(2, 3, 4, origin=("first", "middle", "middle"))
    assert (ours.dtype, ours.tolist()) == (np.int64, wanted)
    half = positions.grid(2, 2, origin=["edge", "first"])
    assert half.tolist() == [[0.5, 0], [0.5, 1], [1.5, 0], [1.5, 1]]


def test_a_grid_that_makes_no_sense_is_refused():
    for arguments, message in (
        ({"prefix": -1}, "prefix must be >= 0, got -1"),
        ({"prefix": 1.0}, "prefix must hold whole numbers, got dtype float64"),
        ({"origin": "centre"}, "origin must be one of .*, or one for each of 2 axes, got 'centre'"),
        ({"origin": ("first",)}, r"origin must be one of first, middle, .* got \('first',\)"),
        ({"origin": ("first", "last")}, "origin must be one of first, middle, center, edge, or"),
        ({"spacing": (1, 2, 3)}, r"spacing must be one number, or one for each of 2, got \(1, 2"),
        ({"spacing": np.inf}, "spacing must be one number"),
    ):
        with pytest.raises(ValueError, match=message):
            positions.grid(2, 3, **arguments)
