"""The JAX kernel: plain `jax.numpy`, which XLA compiles to one loop for each array.

Everything is differentiable in both directions and can be traced, mapped and sharded. Angles are
exact with and without 64-bit types: a position times a frequency in turns is a product modulo 2^64,
made of 32-bit halves, and its upper half is the angle to 2^-32 turn. Values that are traced cannot
be checked: a row number outside a table, or a fractional position that is too large, gives NaN.

If x is sharded by batch, heads or sequence, every device rotates its own part and sends nothing.
Automatic sharding: positions are those of the whole sequence. `jax.shard_map`: a call sees only the
tokens of one device, and cannot know which these are. If the sequence is sharded, give `positions`,
or each device counts from 0; dynamic and longrope need `seq_len`. Explicit sharding: give positions
the sharding of the sequence, or each device makes the tables of all of it. A sharded head_dim
rotates interleaved pairs without communication; the half layout exchanges all of x under automatic
sharding, and is refused under explicit sharding.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import Kernel
from .. import numpy as reference
from ..geometry import Geometry, Options, aligned, geometry_of_arrays
from . import angles

Array = jax.Array
_FLOAT64 = np.dtype(np.float64)
_dtype = attrgetter("dtype")
# both read only shapes and dtypes
check_operands: Callable[..., None] = reference.check_operands
_check_dtypes: Callable[..., None] = reference.check_xs


def rotate(
    xs: Sequence[Array],
    cos: Array,
    sin: Array,
    positions: object,
    options: Options,
    out: object,
) -> tuple[Array, ...]:
    """Rotate JAX arrays; the formula of `kernels/numpy.py`, in one compiled call.

    Arguments and errors are those of `rotary.rotate`, except `out`: JAX arrays are immutable.
    """
    check_types(xs, cos, sin, out)
    rows = None if positions is None else check_rows(positions, cos)
    return _rotate(tuple(xs), cos, sin, rows, options)


def check_types(xs: Sequence[Array], cos: Array, sin: Array, out: object) -> None:
    """Refuse what the compiled call cannot check: `out`, and float64 if JAX has 32 bits only."""
    _check_out(out)
    if _FLOAT64 in map(_dtype, (*xs, cos, sin)):  # also NumPy arrays, which jit rounds
        check_operands(xs, cos, sin, None)
        if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise TypeError("float64 tables need jax.config.update('jax_enable_x64', True)")


def check_xs(xs: Sequence[Array], out: object) -> None:
    """Refuse dtypes that cannot be rotated, and `out`."""
    _check_out(out)
    _check_dtypes(xs, None)


def _check_out(out: object) -> None:
    if out is not None:
        raise TypeError("out= cannot be used with JAX arrays, which are immutable: use the result")


def move(
    x: Array,
    cos: Array,
    sin: Array,
    blocks: Array | None,
    scale: Array | None,
    options: Options,
    out: object,
) -> Array:
    """Rotate the keys of some blocks of a cache, as in `kernels/numpy.py`.

    A traced block number outside the cache is skipped.
    """
    if blocks is not None:  # an index below 0 would count from the end
        blocks = jnp.where(blocks < 0, x.shape[0], blocks)
    keys, scales = x if blocks is None else x[blocks], None
    name = reference.name_of(x.dtype)
    if name not in reference.CODES:
        (moved,) = rotate((keys,), cos, sin, None, options, out)
        moved = moved.astype(x.dtype)
        return moved if blocks is None else x.at[blocks].set(moved)
    numbers = keys.astype(np.float32)
    if scale is not None:
        scales = jnp.broadcast_to(jnp.asarray(scale, np.float32), x.shape)
        scales = scales if blocks is None else scales[blocks]
        numbers = numbers * scales
    (moved,) = rotate((numbers,), cos, sin, None, options, out)
    moved = jnp.clip(moved if scales is None else moved / scales, *reference.CODES[name])
    moved = (jnp.rint(moved) if name == "int8" else moved).astype(x.dtype)
    # channels that are not rotated keep their bits: XLA has one NaN for the codes of all
    own = (..., slice(options.start, options.start + 2 * cos.shape[-1]))
    cache, kept, bits = (lax.bitcast_convert_type(y, np.uint8) for y in (x, keys, moved))
    bits = kept.at[own].set(bits[own])
    bits = bits if blocks is None else cache.at[blocks].set(bits)
    return lax.bitcast_convert_type(bits, x.dtype)


@partial(jax.jit, static_argnames="options")
def _rotate(
    xs: tuple[Array, ...], cos: Array, sin: Array, rows: Array | None, options: Options
) -> tuple[Array, ...]:
    """Check shapes and dtypes and compute the geometry, once for each form that JAX traces."""
    check_operands(xs, cos, sin, None)
    geometry = geometry_of_arrays(xs, cos, rows, options)
    return turned(xs, cos, sin, rows, geometry, xs[0].dtype.itemsize <= 2)


def turned(
    xs: Sequence[Array], cos: Array, sin: Array, rows: Array | None, geometry: Geometry,
    is_short: bool,
) -> tuple[Array, ...]:  # fmt: skip
    """Rotate by the formula, inside a compiled call; `is_short` if 16-bit numbers are loaded."""
    for x in xs:
        _check_whole_pairs(x, geometry)
    if rows is not None:
        cos, sin = _picked(cos, rows), _picked(sin, rows)
    cos, sin = aligned(cos, geometry.dims), aligned(sin, geometry.dims)
    sin = -sin if geometry.conjugate else sin
    return tuple(_turned(x, cos, sin, geometry, is_short) for x in xs)


def _turned(x: Array, cos: Array, sin: Array, geometry: Geometry, is_short: bool) -> Array:
    start, pairs = geometry.start, geometry.pairs
    rest = x.shape[-1] - start - 2 * pairs
    work = np.float64 if np.float64 in (x.dtype, cos.dtype) else np.float32
    cos, sin = cos.astype(work), sin.astype(work)
    if geometry.layout == "half":
        head, u, v, tail = _parted(x, (start, pairs, pairs, rest))
        u, v = u.astype(work), v.astype(work)
    else:
        head, both, tail = _parted(x, (start, 2 * pairs, rest))
        both = both.astype(work).reshape(*x.shape[:-1], pairs, 2)
        if geometry.out_layout == "interleaved" and (_is_for_gpu() or not is_short):
            return _joined((head, _side_by_side(both, cos, sin).astype(x.dtype), tail))
        if _is_for_gpu():  # a gradient then takes half the time
            flat = both.reshape(*x.shape[:-1], 2 * pairs)
            u, v = (lax.slice_in_dim(flat, first, None, 2, -1) for first in (0, 1))
        else:
            u, v = (part.squeeze(-1) for part in jnp.split(both, 2, axis=-1))
    one, other = u * cos - v * sin, v * cos + u * sin
    if geometry.out_layout == "half":
        return _joined((head, one.astype(x.dtype), other.astype(x.dtype), tail))
    return _joined((head, _alternating(one, other).astype(x.dtype), tail))


def _alternating(one: Array, other: Array) -> Array:
    """Return the channels of both in turn. On a GPU a join along a new axis takes twice as long."""
    if _is_for_gpu():
        around = [(0, 0, 0)] * (one.ndim - 1)
        nothing = np.array(-0.0, one.dtype)  # any number plus it is that number
        first = lax.pad(one, nothing, (*around, (0, 1, 1)))
        return first + lax.pad(other, nothing, (*around, (1, 0, 1)))
    return jnp.stack((one, other), axis=-1).reshape(*one.shape[:-1], 2 * one.shape[-1])


def _side_by_side(both: Array, cos: Array, sin: Array) -> Array:
    """Rotate pairs (..., pairs, 2) without splitting them: u cos - v sin, v cos + u sin.

    Returns (..., 2 pairs). As a reversal gives the other channel, XLA's loop has no branch: on a
    CPU it is vectorized, and so is its transpose. With 16-bit loads it is not: `stack`, with a
    branch, is then twice as fast on a CPU, and takes twice as long on a GPU. The sign is that of
    the reversed channel, because XLA for a GPU would write a table of signed sines to memory.
    """
    signs = np.array([-1, 1], both.dtype).reshape(*[1] * (both.ndim - 1), 2)
    crossed = lax.rev(both, (both.ndim - 1,)) * signs
    turned = both * cos[..., None] + crossed * sin[..., None]
    return turned.reshape(*both.shape[:-2], 2 * both.shape[-2])


def _is_for_gpu() -> bool:
    """Whether a program that is traced now will run on a GPU, if it runs where JAX puts arrays."""
    return jax.default_backend() == "gpu"


def _parted(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Split the last axis into parts; by split, not slices, so that the transpose is a join."""
    ends = list(itertools.accumulate(sizes[:-1]))
    if _is_for_gpu():
        return jnp.split(x, ends, axis=-1)
    block = math.gcd(*sizes)
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    parts = jnp.split(blocks, [end // block for end in ends], axis=-2)
    return [  # an empty part cannot be reshaped under explicit sharding
        part.reshape(*x.shape[:-1], size) if size else x[..., :0]
        for part, size in zip(parts, sizes, strict=True)
    ]


def _joined(parts: Sequence[Array]) -> Array:
    """Join the parts along the last axis.

    For a CPU they are joined along an extra axis before it, in blocks that divide every part: XLA
    fuses that. For a GPU it fuses the plain join, and takes twice as long for blocks.
    """
    parts = [part for part in parts if part.shape[-1]]
    if _is_for_gpu():
        return jnp.concatenate(parts, axis=-1)
    sizes = [part.shape[-1] for part in parts]
    block = math.gcd(*sizes)
    blocks = [
        part.reshape(*part.shape[:-1], size // block, block)
        for part, size in zip(parts, sizes, strict=True)
    ]
    return jnp.concatenate(blocks, axis=-2).reshape(*parts[0].shape[:-1], sum(sizes))


def _picked(table: Array, rows: Array) -> Array:
    # JAX counts negative numbers from the end, and truncates 64-bit ones to 32 bits
    inside = jnp.where((rows < 0) | (rows >= len(table)), len(table), rows)
    picked = table.at[inside]
    if any(_mesh_axes(rows)):
        where = rows.aval.sharding.update(spec=(*_mesh_axes(rows), None))
        return picked.get(mode="fill", fill_value=jnp.nan, out_sharding=where)
    return picked.get(mode="fill", fill_value=jnp.nan)


def _check_whole_pairs(x: Array, geometry: Geometry) -> None:
    axes = _mesh_axes(x)[-1]
    is_whole = geometry.layout == geometry.out_layout == "interleaved"
    if axes and not (is_whole and 2 * geometry.pairs == x.shape[-1]):
        raise ValueError(
            f"head_dim is sharded over mesh axis {axes!r}, which separates the channels of a pair; "
            "call jax.reshard(x, P(...)) with None for head_dim first"
        )


def _mesh_axes(x: Array) -> tuple[object, ...]:
    """Return the mesh axis over which the type of x shards each of its axes; None if not."""
    sharding = getattr(x.aval, "sharding", None)  # types have no sharding before JAX 0.5
    return (None,) * x.ndim if sharding is None else tuple(sharding.spec)


def check_rows(positions: Any, table: Array) -> Array:
    """Return row numbers with 32 or 64 bits; ValueError if one is known to be outside the table."""
    if not angles.takes(positions):
        positions = reference.of_list(positions)
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions must be whole numbers to pick rows, got {positions.dtype}")
    if angles.is_at_hand(positions):
        reference.check_rows(positions, table)
    if isinstance(positions, np.ndarray):  # JAX takes no other byte order
        positions = positions.astype(positions.dtype.newbyteorder("="), copy=False)
    rows = jnp.asarray(positions)
    return rows if rows.dtype.itemsize == 8 else rows.astype(jnp.int32)


KERNEL = Kernel(
    name="jax",
    namespace=jnp,
    rotate=rotate,
    tables=angles.tables,
    tables_float64=angles.tables_float64,
    tables_float32=angles.tables_float32,
    arithmetic=reference.FLOAT32,
    takes=angles.takes,
    inspect=angles.inspect,
    row_lengths=angles.row_lengths,
    arange=angles.arange,
    as_positions=angles.as_positions,
    to_numpy=angles.to_numpy,
    from_numpy=angles.from_numpy,
    host_constant=reference.host_constant,  # what it returns is a constant in a traced call
    device_key=angles.device_key,
    move=move,
    check_xs=check_xs,
)
