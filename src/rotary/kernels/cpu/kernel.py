"""The CPU kernel: NumPy arrays through the compiled loops, serially or on all threads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from .. import CallerOptions
from .. import Numbers as Array
from .. import numpy as reference
from ..geometry import AngleOptions, Options, geometry_of_arrays
from ..memory import Block, is_contiguous_last
from . import move as move_loops
from .built_in import address
from .jobs import (
    CHECK_OVERLAP,
    CHECK_ROWS,
    Call,
    call_of,
    ready_call,
    ready_call_at,
    run,
    tables,
)

# what a prepared call depends on: shape, strides, dtype and alignment of each array
Signature = tuple[tuple[int, ...], tuple[int, ...], np.dtype[np.generic], bool]


def quick(
    caller_options: CallerOptions,
    options_of: Callable[..., Options | AngleOptions],
    xs: Sequence[Array],
    tables: Sequence[object],
    out: Sequence[Array] | None,
) -> tuple[Array, ...] | None:
    """Rotate arrays that the loops can read and write as they are; None for others.

    None, with nothing written, also if a check fails.
    """
    arrays: Sequence[Array] = tables  # type: ignore[assignment]  # checked in the next line
    if not all([type(each) is np.ndarray for each in (*xs, *tables, *(out or ()))]):
        return None
    signatures = tuple([
        (array.shape, array.strides, array.dtype, array.flags.aligned)
        for array in (*xs, *arrays, *(out or ()))
    ])  # fmt: skip
    is_in_place = None if out is None else _in_place(xs, out)
    options = options_of(*caller_options)
    call = _ready_call(signatures, len(xs), len(tables), is_in_place, options)
    if call is None or not all([y.flags.writeable for y in out or ()]):
        return None
    outs = [np.empty(x.shape, x.dtype) for x in xs] if out is None else out
    q, k, q_out, k_out = map(address, (xs[0], xs[-1], outs[0], outs[-1]))
    cos, sin, rows = *map(address, arrays), *(0,) * (3 - len(arrays))
    checks = CHECK_ROWS * (rows != 0) + CHECK_OVERLAP * (out is not None)
    return tuple(outs) if call.job(q, q_out, k, k_out, cos, sin, rows, checks) else None


def rotate(
    xs: Sequence[Array],
    cos: Array,
    sin: Array,
    positions: object,
    options: Options,
    out: Sequence[Array] | None,
) -> tuple[Array, ...]:
    """Rotate NumPy arrays, as `kernels/numpy.py` does."""
    reference.check_operands(xs, cos, sin, out)
    rows = None if positions is None else reference.check_rows(positions, cos)
    if out is not None and rows is not None:
        reference.check_out((*xs, cos, sin, rows), out)
    if cos.dtype != np.float32:
        return reference.rotate(xs, cos, sin, positions, options, out)
    geometry = geometry_of_arrays(xs, cos, rows, options)
    if cos.strides != sin.strides or not _is_ready(cos):
        cos, sin = np.ascontiguousarray(cos), np.ascontiguousarray(sin)
    results = tuple(np.empty(x.shape, x.dtype) for x in xs) if out is None else tuple(out)
    is_mixed = geometry.layout != geometry.out_layout
    sources = [x if _is_ready(x) else np.ascontiguousarray(x) for x in xs]
    targets = [
        y
        if _is_ready(y) and not (is_mixed and address(x) == address(y))
        else np.empty(y.shape, y.dtype)
        for x, y in zip(xs, results, strict=True)
    ]
    call = call_of(
        tuple(map(reference.block, sources)),
        tuple(map(reference.block, targets)),
        _in_place(sources, targets),
        reference.block(cos),
        None if rows is None else reference.block(rows),
        geometry,
    )
    places = [(address(x), address(y)) for x, y in zip(sources, targets, strict=True)]
    run(call, places, address(cos), address(sin), 0 if rows is None else address(rows))
    for result, target in zip(results, targets, strict=True):
        if target is not result:
            result[...] = target
    return results


def _in_place(xs: Sequence[Array], outs: Sequence[Array]) -> tuple[bool, ...]:
    return tuple([address(x) == address(y) for x, y in zip(xs, outs, strict=True)])


@lru_cache(maxsize=1024)
def _ready_call(
    signatures: tuple[Signature, ...],
    count: int,
    tables: int,
    is_in_place: tuple[bool, ...] | None,
    options: Options | AngleOptions,
) -> Call | None:
    """Return the call for arrays with these signatures; None if one has to be copied first."""
    if not all(is_aligned for *_, is_aligned in signatures):
        return None
    blocks = [
        Block(shape, strides, reference.name_of(dtype)) for shape, strides, dtype, _ in signatures
    ]
    stop = count + tables
    groups = blocks[:count], blocks[count:stop], blocks[stop:], is_in_place
    if isinstance(options, AngleOptions):
        return ready_call_at(*groups, options)
    return ready_call(*groups, options)


def move(
    x: Array,
    cos: Array,
    sin: Array,
    blocks: Array | None,
    scale: Array | None,
    options: Options,
    out: Array | None,
) -> Array:
    """Rotate the keys of some blocks of a cache, as `kernels/numpy.py` does."""
    y = reference.copied(x, cos, sin, out)
    if scale is None and y.flags.aligned and cos.strides == sin.strides:
        operands = reference.block(y), address(y), reference.block(cos), address(cos), address(sin)
        if move_loops.run(*operands, blocks, options):
            return y
    return reference.move(y, cos, sin, blocks, scale, options, y)


def move_by(
    xs: Sequence[Array], blocks: object, shift: object, turns: Callable[[], Array], backwards: bool,
    options: Options,
) -> bool:  # fmt: skip
    """Rotate blocks of caches in place by whole numbers of tokens; return False if `move` must."""
    form, *others = map(reference.block, xs)
    if not all(x.flags.aligned and x.flags.writeable for x in xs) or any(x != form for x in others):
        return False
    numbers = np.asarray(blocks), np.asarray(shift)
    places = [address(x) for x in xs]
    return move_loops.run_shifted(form, places, *numbers, turns, backwards, options)


def _is_ready(array: Array) -> bool:
    return array.flags.aligned and is_contiguous_last(reference.block(array))


# the functions that are not replaced are those of the reference implementation
KERNEL = replace(
    reference.KERNEL,
    name="compiled loops",
    rotate=rotate,
    quick=quick,
    tables=tables,
    move=move,
    move_by=move_by,
)
