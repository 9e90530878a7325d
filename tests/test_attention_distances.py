"""ReRoPE, leaky ReRoPE and self-extend: the maps, and attention against pairwise rotation."""

import math

import numpy as np
import pytest
from attention_arrays import FAR, LIBRARIES, SHIFT, draw, qkv
from libraries import if_installed
from published import scaled

from rotary import Rotary, inv_freq
from rotary.attention import (
    DistanceMap,
    distance_attention,
    leaky_rerope,
    rerope,
    self_extend,
    softmax_attention,
)

torch = if_installed("torch")

# every map beside the formula of its paper, for one query at m and one key at n
MAPS = {
    "rerope 1": (rerope(1), lambda m, n: min(m - n, 1)),
    "rerope 5": (rerope(5), lambda m, n: min(m - n, 5)),
    "leaky 5, 4": (leaky_rerope(5, 4), lambda m, n: m - n if m - n < 5 else 5 + (m - n - 5) / 4),
    "leaky 6, 2.5": (
        leaky_rerope(6, 2.5),
        lambda m, n: m - n if m - n < 6 else m / 2.5 - n / 2.5 + 6 - 6 / 2.5,
    ),
    "self-extend 4, 2": (
        self_extend(4, 2),
        lambda m, n: m - n if m - n < 4 else (m // 2 + 4 - 4 // 2) - n // 2,
    ),
    "self-extend 7, 3": (
        self_extend(7, 3),
        lambda m, n: m - n if m - n < 7 else (m // 3 + 7 - 7 // 3) - n // 3,
    ),
}
EACH = pytest.mark.parametrize("name", MAPS)


@EACH
@LIBRARIES
def test_a_map_is_the_formula_of_its_paper(name, library):
    distances, formula = MAPS[name]
    positions = np.arange(40)
    ours = distances(library(positions)[:, None], library(positions)[None, :])
    wanted = [[formula(m, n) if m >= n else m - n for n in range(40)] for m in range(40)]
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=1e-6, atol=1e-6)


def test_a_map_takes_numbers_and_lists_and_sizes_of_numpy():
    assert rerope(3)(5, 0) == 3
    assert rerope(3)([5, 2], [0]).tolist() == [3, 2]
    assert rerope(3)([5, 2], torch.zeros(1, dtype=torch.int64)).tolist() == [3, 2]
    assert self_extend(np.uint8(200), np.int64(2))(np.arange(500), 0)[-1] == 349
    assert self_extend(np.uint8(200), 2) == self_extend(200, 2)


@EACH
def test_a_map_keeps_the_window_and_never_turns_back(name):
    distances, _ = MAPS[name]
    mapped = distances(np.arange(100), 0)
    np.testing.assert_array_equal(mapped[: distances.window], np.arange(distances.window))
    assert np.diff(mapped).min() >= 0
    assert (mapped <= np.arange(100)).all()


def test_the_limits_of_leaky_rerope_are_rope_and_rerope():
    distance = np.arange(200)
    np.testing.assert_array_equal(leaky_rerope(20, 1)(distance, 0), distance)
    np.testing.assert_allclose(leaky_rerope(20, 1e12)(distance, 0), rerope(20)(distance, 0))
    np.testing.assert_array_equal(self_extend(20, 1)(distance, 0), distance)


def test_self_extend_reaches_as_far_as_published():
    """(trained - window) group + window: 4096 with window 1024 and groups of 8 reach 25,600."""
    mapped = self_extend(1024, 8)(np.arange(26_000), 0)
    assert mapped[25_599] <= 4096 <= mapped[25_600]


def brute_force(q, k, v, spec, m, n, formula):
    """Every pair rotated by its own mapped distance, pairs as complex numbers, half layout."""
    frequencies, factor = inv_freq(spec)
    half = q.shape[-1] // 2
    a, b = q[:, :half] + 1j * q[:, half:], k[:, :half] + 1j * k[:, half:]
    output = np.zeros((len(m), v.shape[-1]))
    for i in range(len(m)):
        seen = [j for j in range(len(n)) if n[j] <= m[i]]
        scores = [
            (a[i] * b[j].conj() * np.exp(1j * formula(m[i], n[j]) * frequencies)).sum().real
            for j in seen
        ]
        weights = np.exp(np.array(scores) * factor**2 / math.sqrt(q.shape[-1]))
        output[i] = weights @ v[seen] / weights.sum()
    return output


@EACH
@LIBRARIES
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_attention_is_that_of_pairs_rotated_one_by_one(name, library, dtype):
    distances, formula = MAPS[name]
    q, k, v = qkv(33, 16, dtype=dtype)
    spec = Rotary(head_dim=16)
    ours = distance_attention(*map(library, (q, k, v)), spec, distances)
    wanted = brute_force(*[x.astype(float) for x in (q, k, v)], spec, range(33), range(33), formula)
    assert ours.dtype == library(v).dtype
    unit = np.abs(v).max()
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=0, atol=SHIFT * unit)
    plain = np.asarray(softmax_attention(*map(library, (q, k, v)), spec))
    assert np.abs(np.asarray(ours) - plain).max() > 0.01  # the map is felt


@EACH
def test_a_spec_with_an_amplitude_keeps_it(name):
    distances, formula = MAPS[name]
    spec = scaled("yarn", 16, 8.0, 16)
    q, k, v = qkv(20, 16)
    ours = distance_attention(q, k, v, spec, distances)
    wanted = brute_force(q, k, v, spec, range(20), range(20), formula)
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=2 * SHIFT * np.abs(v).max())


@EACH
@LIBRARIES
def test_a_query_behind_a_cache_sees_what_it_saw_in_the_whole(name, library):
    distances, _ = MAPS[name]
    arrays = list(map(library, qkv(2, 4, 30, 8, kv_heads=2)))
    spec = Rotary(head_dim=8)
    whole = np.asarray(distance_attention(*arrays, spec, distances))
    for split in (1, 11, 29):
        last = distance_attention(
            arrays[0][..., split:, :], *arrays[1:], spec, distances,
            q_positions=np.arange(split, 30),
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(last), whole[..., split:, :], rtol=0, atol=1e-13)
    head = distance_attention(
        *[x[:, h] for x, h in zip(arrays, (3, 1, 1), strict=True)], spec, distances
    )
    np.testing.assert_allclose(np.asarray(head), whole[:, 3], rtol=0, atol=1e-13)


@EACH
@LIBRARIES
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layouts", [("half", "half"), ("interleaved", "half")])
def test_mapped_attention_is_the_same_at_any_offset(name, library, dtype, layouts):
    distances, _ = MAPS[name]
    arrays = list(map(library, qkv(2, 2, 40, 32, dtype=dtype)))
    spec = Rotary(head_dim=32, layout=layouts[0], out_layout=layouts[1])
    near = np.asarray(distance_attention(*arrays, spec, distances))
    offset = FAR // distances.group * distances.group
    far = np.arange(40) + offset
    moved = distance_attention(
        *arrays, spec, distances, q_positions=far, k_positions=np.stack([far, far])
    )
    unit = np.abs(np.asarray(arrays[2])).max()
    np.testing.assert_allclose(np.asarray(moved), near, rtol=0, atol=SHIFT * unit)


def test_self_extend_depends_on_where_the_groups_begin():
    q, k, v = qkv(30, 8)
    spec, distances = Rotary(head_dim=8), self_extend(4, 3)
    near = distance_attention(q, k, v, spec, distances)
    by_one = {"q_positions": np.arange(30) + 1, "k_positions": np.arange(30) + 1}
    assert np.abs(distance_attention(q, k, v, spec, distances, **by_one) - near).max() > 0.01


def test_layouts_and_slices_are_one_rotation():
    q, k, v = qkv(30, 16)
    half = distance_attention(q, k, v, Rotary(head_dim=16), rerope(6))
    order = np.arange(16).reshape(2, 8).T.ravel()  # half to interleaved
    interleaved = Rotary(head_dim=16, layout="interleaved")
    moved = distance_attention(q[:, order], k[:, order], v, interleaved, rerope(6))
    np.testing.assert_allclose(moved, half, rtol=0, atol=1e-14)
    partial = Rotary(head_dim=16, rotary_dim=8, start=4, sign=-1)
    turned = distance_attention(q, k, v, partial, rerope(1))
    # sign -1 is the mirror image: the other members of all pairs negated
    flip = np.where(np.isin(np.arange(16), range(8, 12)), -1.0, 1.0)
    other = Rotary(head_dim=16, rotary_dim=8, start=4)
    mirrored = distance_attention(q * flip, k * flip, v, other, rerope(1))
    np.testing.assert_allclose(turned, mirrored, rtol=0, atol=1e-14)


@LIBRARIES
def test_distances_of_positions_without_a_sign_are_those_of_others(library):
    x, wide = library(draw(6, 8)), np.arange(6)
    narrow = library(wide.astype(np.uint8))
    distances = self_extend(2, 2)
    np.testing.assert_array_equal(
        distances(narrow[:, None], narrow), distances(wide[:, None], wide)
    )
    ours, wanted = (
        distance_attention(x, x, x, Rotary(head_dim=8), distances, q_positions=p, k_positions=p)
        for p in (narrow, library(wide))
    )
    np.testing.assert_array_equal(ours, wanted)


def test_attention_is_compiled_and_exported_by_torch():
    """It made specs while torch.compile recorded it, which is an error of Dynamo."""
    pytest.importorskip("torch")
    torch._dynamo.reset()
    spec = Rotary(head_dim=8, rotary_dim=4, layout="interleaved", out_layout="half")

    def attention(q, k, distances):
        return distance_attention(q, k, k, spec, distances, q_positions=torch.arange(q.shape[-2]))

    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="eager")
    for seq, distances in ((7, leaky_rerope(5, 4)), (9, leaky_rerope(5, 4)), (9, rerope(3))):
        q, k = torch.from_numpy(draw(2, 4, seq, 8)), torch.from_numpy(draw(2, 2, seq, 8))
        torch.testing.assert_close(compiled(q, k, distances), attention(q, k, distances))

    class Block(torch.nn.Module):
        def forward(self, q, k):
            return attention(q, k, self_extend(4, 2))

    for strict in (False, True):
        program = torch.export.export(Block(), (q, k), strict=strict).module()
        torch.testing.assert_close(program(q, k), Block()(q, k))


def test_what_makes_no_sense_is_refused():
    for window in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="window must be a whole number >= 1"):
            rerope(window)
    with pytest.raises(ValueError, match="group must be a whole number >= 1, got 0"):
        self_extend(4, 0)
    for factor in (0.5, 0, float("nan")):
        with pytest.raises(ValueError, match="factor must be >= 1"):
            leaky_rerope(4, factor)
    with pytest.raises(ValueError, match=r"slope must be in \[0, 1\], got 1.5"):
        DistanceMap(4, slope=1.5)
    q, k, v = qkv(4, 8)
    with pytest.raises(TypeError, match=r"must be a DistanceMap, such as rerope\(window\), got 2"):
        distance_attention(q, k, v, Rotary(head_dim=8), 2)
    with pytest.raises(TypeError, match="spec must be a Rotary, got NoneType: make one with"):
        distance_attention(q, k, v, None, rerope(2))
    with pytest.raises(ValueError, match="distances need one position axis"):
        distance_attention(q, k, v, Rotary(head_dim=8, axes=(0, 0, 1, 1)), rerope(2))
