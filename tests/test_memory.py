"""`kernels/memory.py`: strided blocks against the list of all their bytes."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rotary.kernels import memory
from rotary.kernels.memory import (
    SIZES,
    Block,
    check_overlap,
    contiguous,
    extent,
    is_contiguous,
    is_contiguous_last,
    is_injective,
)

AXES = st.lists(st.tuples(st.integers(0, 3), st.integers(-24, 24)), max_size=3)
BLOCKS = st.builds(
    lambda axes, dtype: Block(
        tuple(size for size, _ in axes), tuple(step for _, step in axes), dtype
    ),
    AXES,
    st.sampled_from(("int8", "int16", "float32", "float64")),
)
PLACES = st.integers(4000, 4080)  # addresses; NumPy takes no 0


def offsets(block):
    """The offset in bytes of each element, in the order of its indices."""
    indices = itertools.product(*map(range, block.shape))
    return [sum(map(int.__mul__, index, block.strides)) for index in indices]


def bytes_of(block, address=0):
    """The addresses of all bytes, each as often as it belongs to an element."""
    return [
        address + first + byte for first in offsets(block) for byte in range(SIZES[block.dtype])
    ]


def test_the_sizes_are_those_of_numpy_and_ml_dtypes():
    for name, size in memory.SIZES.items():
        try:
            dtype = np.dtype(name)
        except TypeError:
            dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
        assert dtype.itemsize == size, name


@given(BLOCKS)
def test_the_extent_goes_from_the_first_byte_to_the_one_after_the_last(block):
    every = bytes_of(block)
    assert extent(block) == ((min(every), max(every) + 1) if every else (0, 0))


@given(BLOCKS)
def test_a_block_said_to_be_injective_has_no_byte_twice(block):
    every = bytes_of(block)
    assert not is_injective(block) or len(set(every)) == len(every)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_views_of_an_array_are_injective(shape, data):
    view = np.empty(shape, np.float32)
    view = view.transpose(data.draw(st.permutations(range(len(shape)))))
    slices = st.builds(slice, st.none(), st.none(), st.sampled_from((-2, -1, 1, 2)))
    view = view[tuple(data.draw(slices) for _ in shape)]
    block = Block(view.shape, view.strides, "float32")
    assert is_injective(block)
    assert is_contiguous(block) == view.flags.c_contiguous
    assert is_contiguous_last(block) == (view.shape[-1] == 1 or view.strides[-1] == 4)
    assert contiguous(block).strides == np.empty(view.shape, np.float32).strides


@given(BLOCKS)
def test_contiguous_blocks_have_their_elements_in_turn(block):
    assume(0 not in block.shape)  # its strides mean nothing
    size = SIZES[block.dtype]
    assert is_contiguous(block) == (
        offsets(block) == list(range(0, size * len(offsets(block)), size))
    )


@given(PLACES, BLOCKS, PLACES, BLOCKS)
def test_an_output_shares_no_byte_with_an_input_but_its_own(place, x, out_place, out):
    assume(is_injective(out))
    is_apart = set(bytes_of(x, place)).isdisjoint(bytes_of(out, out_place))
    for in_place in (True, False):
        is_own = in_place and (place, x) == (out_place, out)
        assert is_refused([(place, x)], [(out_place, out)], in_place) != (is_apart or is_own)
    assert is_refused([], [(place, x), (out_place, out)]) != (is_apart and is_injective(x))


def is_refused(xs, outs, in_place=True):
    try:
        check_overlap(xs, outs, in_place)
    except ValueError as error:
        assert str(error).startswith("out ")  # noqa: PT017
        return True
    return False


def test_an_output_is_the_input_of_its_index_only():
    q, k, block = 4096, 4160, Block((4, 4), (16, 4), "float32")
    check_overlap([(q, block), (k, block)], [(q, block), (k, block)])
    for outs in ([k, q], [q, q], [q, q + 4], [q + 4, k], [k]):
        with pytest.raises(ValueError, match="may only be its own input"):
            check_overlap([(q, block), (k, block)], [(each, block) for each in outs])
    with pytest.raises(ValueError, match="as an expanded array has"):
        check_overlap([], [(q, Block((4, 4), (0, 4), "float32"))])
    empty = Block((0, 4), (0, 0), "float32")  # NumPy's strides
    check_overlap([(q, block)], [(q, empty)])
    unknown = block._replace(dtype="complex64")  # refused elsewhere, for its dtype
    check_overlap([(q, unknown)], [(q + 4, unknown)])
    check_overlap([(q, unknown)], [(q + 4, block)])
    check_overlap([(q, block)], [(q + 4, unknown)])
