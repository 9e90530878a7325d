"""Describes blocks of memory by shape and strides, and finds those that share a byte."""

import ctypes
import itertools
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SIZES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
}  # fmt: skip


class Block(NamedTuple):
    """The form of a strided block: strides in bytes, `dtype` a key of SIZES for a kernel."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def is_contiguous_last(block: Block) -> bool:
    """Whether the last axis is contiguous, which the compiled loops need.

    >>> is_contiguous_last(Block((2, 3), (4, 8), "float32"))
    False
    """
    return block.shape[-1] == 1 or block.strides[-1] == SIZES[block.dtype]


def contiguous(block: Block) -> Block:
    """Return the contiguous block of the same shape and dtype.

    >>> contiguous(Block((2, 3), (4, 8), "float32")).strides
    (12, 4)
    """
    strides = dense_strides(block.shape, range(len(block.shape)), SIZES[block.dtype])
    return block._replace(strides=strides)


def dense_strides(shape: Sequence[int], order: Sequence[int], step: int) -> tuple[int, ...]:
    """Return strides without gaps, of which the smallest is `step`.

    `order` has the axes from the largest stride to the smallest; one that it lacks has stride 0.

    >>> dense_strides((2, 3, 5), (1, 0), 8)
    (8, 16, 0)
    """
    strides = [0] * len(shape)
    for axis in reversed(order):
        strides[axis] = step
        step = step * max(shape[axis], 1)
    return tuple(strides)


def merged_axes(axes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Merge neighbours among axes (size, strides ...) where one stride steps through both.

    >>> merged_axes([(2, 60), (3, 20), (4, 1)])
    [(6, 20), (4, 1)]
    """
    merged: list[tuple[int, ...]] = []
    for size, *steps in axes:
        is_one = merged and all(a == size * b for a, b in zip(merged[-1][1:], steps, strict=True))
        merged.append((size * merged.pop()[0] if is_one else size, *steps))
    return merged


def corners(axes: Sequence[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the offsets of every index of axes (size, strides ...) of `count` arrays.

    >>> corners([(2, 10, 0), (3, 1, 5)], 2)
    ((0, 0), (1, 5), (2, 10), (10, 0), (11, 5), (12, 10))
    """
    every = itertools.product(*[range(size) for size, *_ in axes])
    strides = list(zip(*[steps for _, *steps in axes], strict=True)) or [()] * count
    return tuple(tuple(sum(map(operator.mul, index, each)) for each in strides) for index in every)


def is_contiguous(block: Block) -> bool:
    """Whether the block has no gaps; the stride of an axis of size 1 does not matter.

    >>> is_contiguous(Block((1, 3), (99, 4), "float32"))
    True
    """
    steps = zip(block.shape, block.strides, contiguous(block).strides, strict=True)
    return all(size == 1 or step == other for size, step, other in steps)


def check_overlap(
    xs: Sequence[tuple[int, Block]], outs: Sequence[tuple[int, Block]], in_place: bool = True
) -> None:
    """Refuse outputs that share memory with themselves, each other, or any input but their own.

    Each block comes with its address. If `in_place`, an output may be the input of its index, with
    the same address and strides. Blocks of another dtype than SIZES has are skipped: no kernel
    reads or writes them, they are converted first or refused for their dtype.
    """
    for index, out in enumerate(outs):
        if out[1].dtype not in SIZES:
            continue
        if not is_injective(out[1]):
            raise ValueError("out has elements that share memory, as an expanded array has")
        others = [x for other, x in enumerate(xs) if not in_place or other != index or x != out]
        for other in (*others, *outs[:index]):
            if other[1].dtype in SIZES and _share_bytes(out, other):
                raise ValueError(
                    "out overlaps an input or another output; it may only be its own input"
                )


@lru_cache(maxsize=1024)
def is_injective(block: Block) -> bool:
    """Whether no two elements share memory: each stride exceeds what smaller strides span.

    >>> is_injective(Block((2, 3), (0, 4), "float32"))
    False
    """
    if 0 in block.shape:  # its strides mean nothing, and are 0 in NumPy
        return True
    reach = SIZES[block.dtype]
    axes = zip(block.strides, block.shape, strict=True)
    for step, size in sorted((abs(step), size) for step, size in axes if size > 1):
        if step < reach:
            return False
        reach += step * (size - 1)
    return True


def _share_bytes(one: tuple[int, Block], other: tuple[int, Block]) -> bool:
    (low, high), (other_low, other_high) = extent(one[1]), extent(other[1])
    if one[0] + high <= other[0] + other_low or other[0] + other_high <= one[0] + low:
        return False
    first, second = (array_at(*each, f"V{SIZES[each[1].dtype]}") for each in (one, other))
    return bool(np.shares_memory(first, second))


@lru_cache(maxsize=1024)
def extent(block: Block) -> tuple[int, int]:
    """Return the offsets of the first byte and of the byte after the last from the address.

    >>> extent(Block((2, 3), (-12, 4), "float32"))
    (-12, 12)
    """
    if 0 in block.shape:
        return 0, 0
    reach = [(size - 1) * step for size, step in zip(block.shape, block.strides, strict=True)]
    return sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + SIZES[block.dtype]


def array_at(
    address: int, block: Block, kind: str, owner: object = None
) -> npt.NDArray[np.generic]:
    """Return the memory of a block as an array of a NumPy type; `owner` keeps the memory alive."""
    low, high = extent(block)
    memory = (ctypes.c_char * (high - low)).from_address(address + low)
    memory.owner = owner  # type: ignore[attr-defined]
    return np.ndarray(block.shape, kind, memoryview(memory), -low, block.strides)
