"""The DTensor kernel: every rank rotates the tokens that it holds, and nothing is sent.

A rotation never mixes tokens or heads. So the torch kernel rotates a shard along any axis but the
last without other shards, with the rows of the tables that belong to it. Tables and positions are
either DTensors on the mesh of x, or plain tensors, which are the same on every rank and of the
whole sequence. If a rank would need data of another rank (a head that is split, a partial sum), it
is an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import Numbers, SomeKernel, host, is_per_row
from ..geometry import Geometry, Options, geometry_of, seq_axis
from . import angles
from . import route as kernel
from .checks import check_writable
from .launch import mark_written
from .shards import (
    Spans,
    check_alike,
    check_placements,
    cuts,
    shard_of,
    share_of,
    shown,
    spans_of,
    wrapped,
)
from .state import is_tracing

Tensors = Sequence[Tensor]
Targets = Tensors | None
Results = tuple[Tensor, ...]
RotateShards = Callable[[Tensors, DTensor, Spans, Targets], Results]

_CACHED = 8  # runs of tokens whose tables are cached: of q and k in a few kinds of layers
_CACHED_BYTES = 64 * 2**20  # at most, for each


def rotate(
    xs: Sequence[DTensor],
    cos: Tensor,
    sin: Tensor,
    positions: object,
    options: Options,
    out: Sequence[DTensor] | None,
) -> tuple[DTensor, ...]:
    """Rotate DTensors, shard by shard; results have the placements of the inputs.

    Arguments and errors are those of `rotary.rotate`. Also raises ValueError for placements or
    meshes that do not fit together, and for plain tables that require a gradient.
    """
    rows = None if positions is None else angles.as_positions(positions, xs[0])
    along = None if rows is None else tuple(rows.shape)
    geometry = _checked(xs, out, tuple(cos.shape), along, options)
    dims = geometry.dims if rows is None else (None,) * len(geometry.dims)
    shard_options = options._replace(seq_dim=seq_axis(tuple(xs[0].shape), options.seq_dim))

    def rotate_shards(shards: Tensors, x: DTensor, spans: Spans, outs: Targets) -> Results:
        own = None if rows is None else share_of("positions", rows, x, spans, geometry.dims)
        tables = share_of("cos", cos, x, spans, dims), share_of("sin", sin, x, spans, dims)
        return kernel.rotate(shards, *tables, own, shard_options, outs)

    return _by_shards(xs, out, rotate_shards)


def makes_angles(xs: Tensors, positions: Tensor | None, out: Targets, num_axes: int) -> bool:
    """Whether `rotate_exact` takes these: without positions always, else if the GPU kernel does."""
    if is_tracing():
        return False
    if positions is None:
        return True
    xs, [positions], out = (list(map(_local, each)) for each in (xs, [positions], out or ()))
    return kernel.makes_angles(xs, positions, out, num_axes)


def rotate_exact(
    xs: Sequence[DTensor],
    turns: Numbers,
    factor: float,
    axes: tuple[int, ...],
    positions: Tensor | None,
    options: Options,
    out: Sequence[DTensor] | None,
) -> tuple[DTensor, ...]:
    """Rotate DTensors by exact angles; a rank computes the angles of its own tokens only.

    Arguments are those of `route.rotate_exact`; errors also those of `rotate` above.
    """
    shape = tuple(xs[0].shape)
    seq, num_axes = seq_axis(shape, options.seq_dim), max(axes, default=0) + 1
    tokens = None
    if positions is not None:
        tokens = tuple(positions.shape[:-1] if num_axes > 1 else positions.shape)
    geometry = _checked(xs, out, (shape[seq], len(turns)), tokens, options)
    shard_options = options._replace(seq_dim=seq)

    def rotate_shards(shards: Tensors, x: DTensor, spans: Spans, outs: Targets) -> Results:
        first, count = spans[seq]
        own = None
        if positions is not None:
            own = share_of("positions", positions, x, spans, geometry.dims)
        elif first:
            own = torch.arange(first, first + count, device=shards[0].device)
        if positions is not None or kernel.makes_angles(shards, own, outs, num_axes):
            return kernel.rotate_exact(shards, turns, factor, axes, own, shard_options, outs)
        is_small = count * turns.nbytes <= _CACHED_BYTES
        is_cached = is_small and angles.device_key(shards[0]) is not None
        make = _run_tables if is_cached else _run_tables.__wrapped__
        device, is_inference = shards[0].device, torch.is_inference_mode_enabled()
        cos, sin = make(turns.tobytes(), factor, first, count, device, is_inference)
        return kernel.rotate(shards, cos, sin, None, shard_options, outs)

    return _by_shards(xs, out, rotate_shards)


def _by_shards(
    xs: Sequence[DTensor], out: Sequence[DTensor] | None, rotate_shards: RotateShards
) -> tuple[DTensor, ...]:
    """Rotate the local shards, those with the same placements together; return DTensors."""
    if xs[0].device_mesh.get_coordinate() is None:  # this rank holds nothing
        return tuple(xs if out is None else out)
    spans = [spans_of(x) for x in xs]
    shards = [shard_of(x, own) for x, own in zip(xs, spans, strict=True)]
    outs = [y.to_local() for y in out or ()]
    groups: list[list[int]] = []
    for index, x in enumerate(xs):
        alike = [group for group in groups if xs[group[0]].placements == x.placements]
        if alike:
            alike[0].append(index)
        else:
            groups.append([index])
    if outs and len(groups) > 1:
        check_writable(shards, outs)
    results: dict[int, DTensor] = {}
    for group in groups:
        first = group[0]
        targets = [outs[index] for index in group] if outs else None
        local = [shards[index] for index in group]
        rotated = rotate_shards(local, xs[first], spans[first], targets)
        for index, shard in zip(group, rotated if out is None else (), strict=out is None):
            results[index] = wrapped(shard, xs[index])
    if out is not None:
        if not is_tracing():
            mark_written(out)
        return tuple(out)
    return tuple([results[index] for index in range(len(xs))])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- tables ---


def on_shards(
    make: Callable[..., tuple[Tensor, Tensor]],
    positions: DTensor,
    num_axes: int,
    seq_len: object,
    depends_on_length: bool,
) -> tuple[DTensor, DTensor]:
    """Return cos and sin of the positions that each rank holds, with the same placements.

    `make(positions, seq_len=...)` makes the tables of a plain tensor. Raises ValueError for
    placements that split the axes of a position, and if no rank knows the length of a row.
    """
    tokens = positions.ndim - (num_axes > 1)
    check_placements("positions", positions, tokens)
    if depends_on_length and seq_len is None and cuts(positions, tokens - 1):
        raise ValueError(
            "positions are sharded along the sequence, so no rank knows the length that this spec "
            "depends on: pass seq_len"
        )
    if positions.device_mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not part of {positions.device_mesh}, so it has no angles")
    spans = spans_of(positions)
    if is_per_row(seq_len):
        rows = tuple([slice(first, first + count) for first, count in spans[: tokens - 1]])
        seq_len = np.asarray(seq_len)[rows]
    cos, sin = make(shard_of(positions, spans), seq_len=seq_len)
    shape = (*positions.shape[:tokens], cos.shape[-1])
    return wrapped(cos, positions, shape), wrapped(sin, positions, shape)


@lru_cache(maxsize=_CACHED)
def _run_tables(
    turns: bytes, factor: float, first: int, count: int, device: torch.device, is_inference: bool
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a run of tokens, (count, pairs); cached for the next layers."""
    positions, steps = np.arange(first, first + count), np.frombuffer(turns, np.uint64)
    tables = host().tables(positions[None], steps[None], np.array([factor]), (), False)
    cos, sin = (angles.from_numpy(table[0]).to(device) for table in tables)
    return cos, sin


# --- checks ---


def _checked(
    xs: Sequence[DTensor],
    out: Sequence[DTensor] | None,
    table: tuple[int, ...],
    rows: tuple[int, ...] | None,
    options: Options,
) -> Geometry:
    """Return the geometry of the whole tensors; ValueError and TypeError if they do not fit."""
    for each in (*xs, *(out or ())):
        if not isinstance(each, DTensor):
            raise TypeError(
                "q, k and out must all be DTensors if one is: wrap a plain one by "
                "DTensor.from_local(x, mesh, placements)"
            )
        check_alike("another operand", xs[0], each)
    for x in xs:
        check_placements("x", x, x.ndim - 1)
    for x, y in zip(xs, out or (), strict=out is not None):
        if y.placements != x.placements:
            raise ValueError(
                f"out must have the placements of x, {shown(x.placements)}, got "
                f"{shown(y.placements)}"
            )
    try:
        return geometry_of(tuple([tuple(x.shape) for x in xs]), table, rows, options)
    except ValueError as error:
        held = tuple(xs[0].to_local().shape)
        if held == tuple(xs[0].shape):
            raise
        raise ValueError(
            f"{error}; x is a DTensor, of which this rank holds {held}: plain tables and positions "
            "must be those of the whole x, tables of a shard must be DTensors"
        ) from None


# --- the other functions of a `Kernel` ---


def to_numpy(positions: DTensor) -> Numbers:
    """Raise TypeError: only `rerotate` calls it, which takes positions of the whole sequence."""
    raise TypeError(
        "positions to move keys by must be plain tensors of the whole sequence, got a DTensor"
    )


def device_key(like: DTensor) -> str | None:
    """Return a part of the cache key as in `angles.py`; None if tables must not be cached."""
    return None if is_tracing() else angles.device_key(like.to_local())


_LOCAL: SomeKernel = kernel.KERNEL
KERNEL = replace(
    _LOCAL,
    name="DTensor",
    rotate=rotate,
    makes_angles=makes_angles,
    rotate_exact=rotate_exact,
    on_shards=on_shards,
    to_numpy=to_numpy,
    device_key=device_key,
    move=None,
    move_by=None,
    check_out=None,
)
