"""The benchmark of every size: its roofline, its peers, and what it says of a measured group."""

from pathlib import Path

import pytest
import torch
from benchmarks import ggml, roofline, sizes

SPEED = {level: dict.fromkeys(roofline.WAYS, 1e9 * 10**-at) for at, level in
         enumerate(roofline.LEVELS)}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1, 10**5, 10**7, 10**9])
def test_levels_hold_all_bytes_and_no_more_than_they_have(size, threads):
    shares = roofline.held(size, threads)
    assert tuple(shares) == roofline.LEVELS
    assert sum(shares.values()) == pytest.approx(1)
    for share, capacity in zip(shares.values(), roofline.capacities(threads), strict=False):
        assert 0 <= share * size <= capacity * (1 + 1e-9)
    if size > 1:  # a level is used only when those before it are full
        full = [share * size >= capacity * (1 - 1e-9) for share, capacity in
                zip(shares.values(), roofline.capacities(threads), strict=False)]  # fmt: skip
        later = list(shares.values())[1:]
        assert all(is_full or share == 0 for is_full, share in zip(full, later, strict=True))


def test_the_bound_of_bytes_that_fit_a_level_is_their_time_there():
    # 100 bytes of x read and written, 10 of tables read, all in the first cache: 1e9 bytes a second
    assert roofline.bound(100, 10, roofline.INVERT, SPEED, 1) == pytest.approx(210e-9)
    assert roofline.bound(100, 10, roofline.COPY, SPEED, 1) == pytest.approx(210e-9)


def test_the_bound_takes_the_quicker_stores_and_counts_both_memories():
    big = 10**10
    speeds = {level: {**ways, roofline.STREAM: 2 * ways[roofline.STREAM]}
              for level, ways in SPEED.items()}  # fmt: skip
    one, other = (roofline.bound(big, 0, roofline.COPY, each, 1) for each in (SPEED, speeds))
    assert other == pytest.approx(one / 2)
    in_place = roofline.bound(big, 0, roofline.INVERT, SPEED, 1)
    assert in_place < one  # half of the memory, so more of it stays in the caches


def test_bandwidths_are_measured_of_every_level_and_way():
    found = roofline.measured(1, 1e-4)
    assert tuple(found) == roofline.LEVELS
    assert all(tuple(ways) == tuple(roofline.WAYS) for ways in found.values())
    assert all(speed > 0 for ways in found.values() for speed in ways.values())


@pytest.mark.parametrize("way", [roofline.COPY, roofline.STREAM, roofline.INVERT, roofline.READ])
def test_a_pass_does_what_it_says(way):
    loop, _, _ = roofline.WAYS[way]
    x, y = roofline._aligned(24), roofline._aligned(24)
    x[:], y[:] = range(24), 0
    total = loop(x, y, 1)
    if way in (roofline.COPY, roofline.STREAM):
        assert y.tolist() == list(range(24))
    elif way == roofline.INVERT:
        assert x.tolist() == [number ^ 1 for number in range(24)]
    else:
        assert total == 0  # 0 ^ 1 ^ ... ^ 23
    assert roofline._aligned(24).ctypes.data % 64 == 0


def group(**times: float) -> sizes.Group:
    return {
        sizes.OUT: 1.0, sizes.OWN: 1.0, sizes.TOKENS_FIRST: 0.9, "quickest rotate out=": 10.0,
        "quickest rotate in place": 10.0, "roofline of rotate out=": 5.0,
        "roofline of rotate in place": 5.0, sizes.COPY: 10.0, **times,
    }  # fmt: skip


def test_a_case_is_met_within_the_bar_or_near_the_roofline():
    for ratio, roof, within, met in ((1.2, 5, True, True), (1.3, 5, False, False),
                                     (1.3, 9, False, True)):  # fmt: skip
        found = next(sizes.verdicts(group(**{sizes.OUT: ratio, "roofline of rotate out=": roof}),
                                    "float32"))  # fmt: skip
        assert (found.is_within, found.is_met) == (within, met)


def test_peers_are_compared_in_their_memory_order_and_shown():
    slower = group(**{sizes.VLLM: 0.8, sizes.GGML: 2.0})
    assert sizes.is_slower(slower, sizes.TOKENS_FIRST)
    assert not sizes.is_slower(group(**{sizes.GGML: 2.0}), sizes.TOKENS_FIRST)
    assert "**0.90** | 0.80 | 2.00 |" in sizes.table({"float32 half q 1 k 1 seq 16": slower})


def test_a_folder_without_ggml_is_named(tmp_path):
    with pytest.raises(OSError, match=r"libggml-base\.so"):
        ggml.version(tmp_path)


def test_ggml_has_no_bfloat16():
    xs = (torch.zeros(1, 1, 2, dtype=torch.bfloat16),)
    assert ggml.rope(Path("nowhere"), xs, "half", 1e4) is None
