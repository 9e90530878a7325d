"""Layouts: pairs against loops, permutations as permutations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import if_installed

from rotary import layouts

torch = if_installed("torch")

examples = settings(max_examples=60, deadline=None, derandomize=True)
PAIRS = {
    "half": lambda i, pairs: (i, i + pairs),
    "interleaved": lambda i, pairs: (2 * i, 2 * i + 1),
}
both = pytest.mark.parametrize("layout", list(PAIRS))


@st.composite
def slices(draw):
    """(head_dim, rotary_dim, start) that fit into one another."""
    rotary_dim = 2 * draw(st.integers(1, 16))
    start = draw(st.integers(0, 5))
    return start + rotary_dim + draw(st.integers(0, 5)), rotary_dim, start


def test_there_are_two_layouts():
    assert set(layouts.LAYOUTS) == set(PAIRS)
    for name in layouts.LAYOUTS:
        layouts.check(name)


@both
@examples
@given(slices())
def test_pairs_are_where_the_name_says(layout, shape):
    _, rotary_dim, start = shape
    pairs = rotary_dim // 2
    wanted = [[start + c for c in PAIRS[layout](i, pairs)] for i in range(pairs)]
    indices = layouts.pair_indices(rotary_dim, layout, start)
    assert indices.tolist() == wanted
    assert indices.dtype == np.int64
    channels = list(range(40))
    first, second = layouts.pair_slices(rotary_dim, layout, start)
    assert [list(pair) for pair in zip(channels[first], channels[second], strict=True)] == wanted


@examples
@given(slices())
def test_permutations_undo_one_another(shape):
    head_dim, rotary_dim, start = shape
    there, back = (
        layouts.channel_permutation(head_dim, *names, rotary_dim=rotary_dim, start=start)
        for names in (("interleaved", "half"), ("half", "interleaved"))
    )
    assert sorted(there.tolist()) == list(range(head_dim))
    np.testing.assert_array_equal(there[back], np.arange(head_dim))
    np.testing.assert_array_equal(back[there], np.arange(head_dim))
    outside = [c for c in range(head_dim) if not start <= c < start + rotary_dim]
    assert there[outside].tolist() == outside
    for i in range(rotary_dim // 2):  # pair i is pair i after the move
        for paper, llama in zip(*(PAIRS[name](i, rotary_dim // 2) for name in
                                  ("interleaved", "half")), strict=True):  # fmt: skip
            assert there[start + llama] == start + paper


@both
def test_a_layout_moved_to_itself_stays(layout):
    order = layouts.channel_permutation(12, layout, layout, rotary_dim=8, start=1)
    assert order.tolist() == list(range(12))


def test_the_rotated_slice_defaults_to_the_rest_of_the_head():
    whole = layouts.channel_permutation(10, "half", "interleaved", rotary_dim=8, start=2)
    assert layouts.channel_permutation(10, "half", "interleaved", start=2).tolist() == \
        whole.tolist()  # fmt: skip


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 4), (4, 8), (3, 64)])
def test_rows_move_as_in_the_llama_conversion(num_heads, head_dim):
    weight = torch.arange(num_heads * head_dim * 5.0).view(-1, 5)
    split = weight.view(num_heads, head_dim // 2, 2, 5)  # Meta's rows: (pair, member)
    wanted = split.transpose(1, 2).reshape(-1, 5)  # transformers' rows: (member, pair)
    rows = torch.from_numpy(layouts.row_permutation(num_heads, head_dim, "interleaved", "half"))
    assert torch.equal(weight[rows], wanted)
    back = layouts.row_permutation(num_heads, head_dim, "half", "interleaved")
    assert torch.equal(wanted[torch.from_numpy(back)], weight)


@examples
@given(slices(), st.integers(1, 4))
def test_rows_of_a_projection_are_channels_of_its_output(shape, num_heads):
    head_dim, rotary_dim, start = shape
    slice_ = {"rotary_dim": rotary_dim, "start": start}
    weight = np.random.default_rng(0).integers(-9, 9, (num_heads * head_dim, 3))
    x = np.array([2, -3, 5])
    rows = layouts.row_permutation(num_heads, head_dim, "half", "interleaved", **slice_)
    channels = layouts.channel_permutation(head_dim, "half", "interleaved", **slice_)
    moved = (weight @ x).reshape(num_heads, head_dim)[:, channels]
    np.testing.assert_array_equal((weight[rows] @ x).reshape(num_heads, head_dim), moved)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layouts.check("neox"), "layout must be 'half' or 'interleaved', got 'neox'"),
        (lambda: layouts.pair_slices(4, "Half"), "layout must be .* got 'Half'"),
        (lambda: layouts.pair_indices(4, "gptj"), "layout must be .* got 'gptj'"),
        (lambda: layouts.channel_permutation(4, "neox", "half"), "source must be .* got 'neox'"),
        (lambda: layouts.channel_permutation(4, "half", ""), "target must be .* got ''"),
        (lambda: layouts.channel_permutation(5, "half", "half"), "must be even.* rotary_dim 5"),
        (lambda: layouts.channel_permutation(8, "half", "half", rotary_dim=0), "rotary_dim 0"),
        (lambda: layouts.channel_permutation(8, "half", "half", rotary_dim=-2), "rotary_dim -2"),
        (lambda: layouts.channel_permutation(8, "half", "half", rotary_dim=10), "head_dim = 8"),
        (lambda: layouts.channel_permutation(8, "half", "half", rotary_dim=6, start=4), "start 4"),
        (lambda: layouts.channel_permutation(8, "half", "half", rotary_dim=6, start=-1), "-1"),
        (lambda: layouts.row_permutation(0, 8, "half", "half"), "num_heads must be >= 1, got 0"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
