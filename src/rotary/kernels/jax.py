"""The JAX kernel: plain `jax.numpy`, which XLA makes one loop of for each array.

Everything is differentiable in both directions and can be traced, mapped and sharded. Angles are
exact with and without 64-bit types: a position times a frequency in turns is a product modulo 2^64,
made of 32-bit halves, and its upper half is the angle to 2^-32 turn. Values that are traced cannot
be checked: a row number outside a table, or a fractional position that is too large, gives NaN.

Sharded by batch, heads or sequence, every device turns its own part and nothing is sent. Automatic
sharding knows the whole sequence. Under `jax.shard_map` a call sees the tokens of one device alone,
and nothing tells which those are: where the sequence is sharded, give `positions`, or each device
counts from 0; dynamic and longrope need `seq_len`. Under explicit sharding give positions the
sharding of the sequence, or each device makes the tables of all of it. A sharded head_dim is right
and free for interleaved pairs; the half layout exchanges all of x under automatic sharding, and is
refused under explicit sharding.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..schedules import FLOAT32 as FLOAT32
from . import NEEDS_LENGTH, is_traced
from . import numpy as law
from .geometry import Geometry, Options, geometry_of

Array = jax.Array


def rotate(
    xs: Sequence[Array],
    cos: Array,
    sin: Array,
    positions: Any,
    options: Options,
    conjugate: bool,
    out: Sequence[Any] | None,
) -> tuple[Array, ...]:
    """Rotate JAX arrays; the same law as `kernels/numpy.py`, in one compiled call.

    Arguments and errors are those of `rotary.rotate`, but for `out`: JAX arrays are immutable.
    """
    if out is not None:
        raise TypeError("out= cannot be used with JAX arrays, which are immutable: use the result")
    operands: tuple[Any, Any, Any] = (xs, cos, sin)  # the law looks at shapes and dtypes alone
    law.check_operands(*operands, None)
    if cos.dtype == np.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise TypeError("float64 tables need jax.config.update('jax_enable_x64', True)")
    rows = None if positions is None else _check_rows(positions, cos)
    shapes = tuple(tuple(x.shape) for x in xs)
    geometry = geometry_of(shapes, tuple(cos.shape), None if rows is None else rows.shape, options)
    return _rotate(tuple(xs), cos, sin, rows, geometry, bool(conjugate))


@partial(jax.jit, static_argnames=("geometry", "conjugate"))
def _rotate(
    xs: tuple[Array, ...],
    cos: Array,
    sin: Array,
    rows: Array | None,
    geometry: Geometry,
    conjugate: bool,
) -> tuple[Array, ...]:
    for x in xs:
        _check_whole_pairs(x, geometry)
    if rows is not None:
        cos, sin = _picked(cos, rows), _picked(sin, rows)
    cos, sin = _aligned(cos, geometry.dims), _aligned(sin, geometry.dims)
    return tuple(_turned(x, cos, -sin if conjugate else sin, geometry) for x in xs)


def _turned(x: Array, cos: Array, sin: Array, geometry: Geometry) -> Array:
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
        if geometry.out_layout == "interleaved" and x.dtype.itemsize > 2:
            return _joined((head, _side_by_side(both, cos, sin).astype(x.dtype), tail))
        u, v = (part.squeeze(-1) for part in jnp.split(both, 2, axis=-1))
    one, other = u * cos - v * sin, v * cos + u * sin
    if geometry.out_layout == "half":
        return _joined((head, one.astype(x.dtype), other.astype(x.dtype), tail))
    both = jnp.stack((one, other), axis=-1).reshape(*x.shape[:-1], 2 * pairs)
    return _joined((head, both.astype(x.dtype), tail))


def _side_by_side(both: Array, cos: Array, sin: Array) -> Array:
    """Pairs (..., pairs, 2) turned where they are, (..., 2 pairs): u cos - v sin, v cos + u sin.

    With the partner by a reversal, the loop of XLA on a CPU has no branch and is vectorised; so is
    its transpose. 16-bit loads are not: there the branch of `stack` is twice as fast.
    """
    signed = jnp.where(np.array([True, False]), -sin[..., None], sin[..., None])
    turned = both * cos[..., None] + lax.rev(both, (both.ndim - 1,)) * signed
    return turned.reshape(*both.shape[:-2], 2 * both.shape[-2])


def _parted(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Parts of the last axis; split, and not sliced, so that the transpose is a join."""
    block = math.gcd(*sizes)
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    ends = [end // block for end in itertools.accumulate(sizes[:-1])]
    parts = jnp.split(blocks, ends, axis=-2)
    return [  # nothing cannot be reshaped under explicit sharding
        part.reshape(*x.shape[:-1], size) if size else x[..., :0]
        for part, size in zip(parts, sizes, strict=True)
    ]


def _joined(parts: Sequence[Array]) -> Array:
    """The parts one after the other along the last axis.

    Joined along an axis before the last, in blocks that divide every part: XLA fuses that.
    """
    sizes = [part.shape[-1] for part in parts]
    block = math.gcd(*sizes)
    blocks = [
        part.reshape(*part.shape[:-1], size // block, block)
        for part, size in zip(parts, sizes, strict=True)
        if size
    ]
    return jnp.concatenate(blocks, axis=-2).reshape(*parts[0].shape[:-1], sum(sizes))


def _aligned(table: Array, dims: tuple[int | None, ...]) -> Array:
    order = [dim for dim in dims if dim is not None]
    missing = [axis for axis, dim in enumerate(dims) if dim is None]
    return jnp.expand_dims(table.transpose(*order, table.ndim - 1), missing)


def _picked(table: Array, rows: Array) -> Array:
    # JAX counts negative numbers from the end, and cuts 64-bit ones to 32 bits
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
            f"head_dim is sharded over mesh axis {axes!r}, which parts the channels of a pair; "
            "call jax.reshard(x, P(...)) with None for head_dim first"
        )


def _mesh_axes(x: Array) -> tuple[Any, ...]:
    """The mesh axes that each axis of a traced x is sharded over by its type; None elsewhere."""
    sharding = getattr(x.aval, "sharding", None)  # types have no sharding before JAX 0.5
    return (None,) * x.ndim if sharding is None else tuple(sharding.spec)


def _check_rows(positions: Any, table: Any) -> Array:
    if not owns(positions):
        positions = np.asarray(positions)
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions must be whole numbers to pick rows, got {positions.dtype}")
    if _is_at_hand(positions):
        law.check_rows(positions, table)
    rows = jnp.asarray(positions)
    return rows if rows.dtype.itemsize == 8 else rows.astype(jnp.int32)


# --- tables ---


def tables(
    positions: Array, turns: Any, scales: Any, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """Exact cos and sin from 64-bit turns; see `kernels/numpy.py`."""
    phase = _phase(_per_pair(positions, axes), turns[:, None, :])
    return _scaled(*_cos_sin(phase), scales, backwards)


def tables_float64(
    positions: Array, inv_freq: Any, scales: Any, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """cos and sin of fractional positions, as exact as those of a product in float64.

    The whole part of a position and its fraction are turned in fixed point, so no float64 is
    needed; the derivative is that of cos and sin.
    """
    inv_freq = inv_freq[:, None, :]

    @jax.custom_jvp
    def turned(positions: Array) -> tuple[Array, Array]:
        is_known = jnp.abs(positions) <= LIMIT
        cos, sin = _cos_sin(_fractional_phase(positions, inv_freq))
        return jnp.where(is_known, cos, jnp.nan), jnp.where(is_known, sin, jnp.nan)

    @turned.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> Any:
        cos, sin = turned(*primals)
        rate = tangents[0].astype(jnp.float32) * inv_freq.astype(np.float32)
        return (cos, sin), (-sin * rate, cos * rate)

    return _scaled(*turned(_per_pair(positions, axes)), scales, backwards)


def tables_float32(
    positions: Array, inv_freq: Any, scales: Any, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """cos and sin with every step in float32, as transformers computes them."""
    positions = _per_pair(positions.astype(jnp.float32), axes)
    angles = positions * inv_freq.astype(np.float32)[:, None, :]
    return _scaled(jnp.cos(angles), jnp.sin(angles), scales, backwards)


LIMIT = 2.0**28  # largest fractional position: so far the float64 frequency is as exact as turns


def _phase(positions: Array, turns: Any) -> Array:
    """Upper 32 of the 64 bits of positions * turns modulo 2^64, as uint32."""
    high, low = (turns >> np.uint64(32)).astype(np.uint32), turns.astype(np.uint32)
    lower = positions.astype(jnp.uint32)
    phase = lower * high + _upper_product(lower, low)
    if positions.dtype.itemsize == 8:
        return phase + (positions >> 32).astype(jnp.uint32) * low
    if jnp.issubdtype(positions.dtype, jnp.unsignedinteger):
        return phase
    return phase - jnp.where(positions < 0, low, np.uint32(0))  # the sign fills the upper half


def _fractional_phase(positions: Array, inv_freq: Any) -> Array:
    """The same of fractional positions, whose whole part fits in 31 bits."""
    fraction_of_turn, whole_turns = np.modf(np.abs(inv_freq) / (2 * np.pi))
    turns = (fraction_of_turn * 2.0**64).astype(np.uint64)
    size = jnp.abs(positions)
    whole = jnp.floor(size)
    scaled = (size - whole) * 2.0**32  # both steps are exact
    upper = jnp.floor(scaled)
    fraction, rest = upper.astype(jnp.uint32), (scaled - upper).astype(jnp.float32)
    phase = _phase(whole.astype(jnp.int32), turns)
    phase += _upper_product(fraction, (turns >> np.uint64(32)).astype(np.uint32))
    phase += fraction * (whole_turns % 2.0**32).astype(np.uint32)
    phase += (rest * (whole_turns + fraction_of_turn).astype(np.float32)).astype(jnp.uint32)
    return jnp.where((positions < 0) ^ (inv_freq < 0), -phase, phase)


def _upper_product(a: Array, b: Any) -> Array:
    """Upper 32 bits of the product of two uint32, from halves of 16 bits."""
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a1 * b0 + (a0 * b0 >> 16)
    other = a0 * b1 + (middle & 0xFFFF)
    return a1 * b1 + (middle >> 16) + (other >> 16)


# sin(x) = x + x^3 q(x^2) and cos(x) = 1 - x^2 / 2 + x^4 r(x^2), interpolated at the Chebyshev nodes
# of [0, (pi/4)^2]; errors 1e-8 and 8e-10
_SIN = (-0.1666666466231438, 0.008332748270629749, -0.00019587890880412386)
_COS = (0.04166666465950221, -0.0013888303035894866, 2.4547942085071572e-05)


def _cos_sin(phase: Array) -> tuple[Array, Array]:
    """cos and sin of phase / 2^32 turn, float32: the quadrant, and polynomials inside it."""
    quadrant = phase + 2**29 >> 30
    rest = (phase - (quadrant << 30)).astype(jnp.int32)  # in [-1/8, 1/8) turn
    x = rest.astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
    z = x * x
    sine = x + x * z * (_SIN[0] + z * (_SIN[1] + z * _SIN[2]))
    cosine = 1 - (z / 2 - z * z * (_COS[0] + z * (_COS[1] + z * _COS[2])))
    is_odd = quadrant & 1 == 1
    cos, sin = jnp.where(is_odd, sine, cosine), jnp.where(is_odd, cosine, sine)
    return jnp.where(quadrant + 1 & 2 == 2, -cos, cos), jnp.where(quadrant & 2 == 2, -sin, sin)


def _scaled(cos: Array, sin: Array, scales: Any, backwards: bool) -> tuple[Array, Array]:
    """cos and sin times the attention factors, as quotients, which XLA makes once.

    Cheaper tables are made again for every head, in the loop that reads them. So is a quotient by
    a number with no other use, which becomes a product with the reciprocal: `one` has another use.
    """
    one = lax.optimization_barrier(jnp.float32(1))  # type: ignore[no-untyped-call]
    factors = (one + 1) * (scales / 2).astype(np.float32)[:, None, None]
    return cos * factors / one, sin * (-factors if backwards else factors) / one


def _per_pair(positions: Array, axes: Sequence[int]) -> Array:
    if not axes:
        return positions[..., None]
    return jnp.stack([positions[..., axis] for axis in axes], axis=-1)


# --- what `angles` and `rotate` ask of every library ---


def owns(array: Any) -> bool:
    """Whether this kernel takes an array: as everywhere in JAX, NumPy's are constants."""
    return isinstance(array, (Array, np.ndarray))


def taken_over(positions: Any, like: Array) -> Any:
    """Positions as they are; lists, and tensors of others, as NumPy arrays, which lose nothing."""
    return positions if owns(positions) else np.asarray(positions)


def stacked(positions: Array, rows: int) -> Array:
    """The same positions for so many rows: (rows, seq)."""
    return jnp.broadcast_to(positions, (rows, len(positions)))


def to_numpy(positions: Array) -> Any:
    """The positions as a NumPy array, if they are in the memory of one CPU device."""
    is_here = _is_at_hand(positions) and _device(positions) is not None
    return np.asarray(positions) if is_here else None


def from_numpy(array: Any) -> Array:
    """An array with these numbers, on the default device."""
    return jnp.asarray(array)


def inspect(positions: Array) -> tuple[str, float | None, float | None]:
    """("int" | "float32" | "float64", smallest, largest); None for values not at hand."""
    if _is_at_hand(positions):
        return law.inspect(np.asarray(positions))
    return law.inspect(np.empty(0, positions.dtype))


def row_lengths(positions: Array) -> list[int]:
    """Largest position of each row, plus one."""
    if is_traced(positions):
        raise ValueError(f"under jax.jit {NEEDS_LENGTH}")
    return law.row_lengths(np.asarray(positions))


def arange(like: Array, count: int) -> Array:
    """Positions 0 .. count - 1, on the device of `like`."""
    with jax.default_device(None if is_traced(like) else _device(like)):
        return jnp.arange(count, dtype=jnp.int32)


def constant(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`: what is worked out on the host, and a constant of a traced call."""
    return function(*arguments)


def is_cacheable(like: Array) -> bool:
    """Whether tables for this array can be kept: not while anything is traced, nor under a mesh.

    An array made under `jax.set_mesh` lies on that mesh, and no other one takes it.
    """
    made = jnp.zeros(())
    if is_traced(like) or is_traced(made):
        return False
    return isinstance(made.sharding, jax.sharding.SingleDeviceSharding)


def place(like: Array) -> str:
    """The device, as part of the key of the cache."""
    return f"jax:{_device(like)}"


def _device(array: Array) -> Any:
    """The device of an array; None, which is JAX's default, if it is spread over several."""
    devices = array.sharding.device_set
    return next(iter(devices)) if len(devices) == 1 else None


def _is_at_hand(array: Any) -> bool:
    """Whether numbers can be read without waiting for another device."""
    if isinstance(array, np.ndarray):
        return True
    if is_traced(array) or not array.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in array.sharding.device_set)
