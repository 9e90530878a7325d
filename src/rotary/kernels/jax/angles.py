"""Makes cos and sin as JAX arrays, exact with and without 64-bit types, and their positions."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import NEEDS_LENGTH, Numbers, is_traced
from .. import numpy as reference
from ..phases import LIMIT, cos_sin

Array = jax.Array
Tangent = tuple[tuple[Array, Array], tuple[Array, Array]]


def tables(
    positions: Array, turns: Numbers, scales: Numbers, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """Exact cos and sin from 64-bit turns; see `kernels/numpy.py`."""
    phase = _phase(_per_pair(positions, axes), turns[:, None, :])
    return _scaled(*cos_sin(phase, jnp), scales, backwards)


def tables_float64(
    positions: Array, inv_freq: Numbers, scales: Numbers, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """cos and sin of fractional positions, as exact as those of a product in float64.

    The whole part and the fraction of a position are multiplied in fixed point, so no float64 is
    needed; the derivative is that of cos and sin.
    """
    inv_freq = inv_freq[:, None, :]

    @jax.custom_jvp
    def turned(positions: Array) -> tuple[Array, Array]:
        is_known = jnp.abs(positions) <= LIMIT
        cos, sin = cos_sin(_fractional_phase(positions, inv_freq), jnp)
        return jnp.where(is_known, cos, jnp.nan), jnp.where(is_known, sin, jnp.nan)

    @turned.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> Tangent:
        cos, sin = turned(*primals)
        rate = tangents[0].astype(jnp.float32) * inv_freq.astype(np.float32)
        return (cos, sin), (-sin * rate, cos * rate)

    return _scaled(*turned(_per_pair(positions, axes)), scales, backwards)


def tables_float32(
    positions: Array, inv_freq: Numbers, scales: Numbers, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """cos and sin with every step in float32, as transformers computes them."""
    positions = _per_pair(positions.astype(jnp.float32), axes)
    angles = positions * inv_freq.astype(np.float32)[:, None, :]
    return _scaled(jnp.cos(angles), jnp.sin(angles), scales, backwards)


@jax.custom_jvp
def running_cos_sin(steps: Array, state: Array) -> tuple[Array, Array, Array]:
    """cos and sin of state + the running sum of float32 steps, and the last sum within a turn.

    steps (..., seq, pairs) and state (..., pairs) are in rad. A sum in float32 is off by 0.2 rad
    after 131 072 steps of 3.1. This one is of whole numbers, in units of 2^-46 turn (larger if
    there are more steps): the upper 32 bits wrap, and the sum of the lower ones is carried over.
    Steps of more than 2^16 rad, and those after them, give NaN.
    """
    count = steps.shape[-2]
    # lower bits, whose sum fits in 32; jax.export may leave the length open
    bits = max(1, min(14, 32 - count.bit_length())) if isinstance(count, int) else 10
    coarse, fine = map(_phase_of_rad, (steps, steps * 2.0**bits))
    upper = fine >> bits  # lacks the first bits of a turn, which `coarse` has
    half = np.uint32(2 ** (31 - bits))
    upper += ((coarse - upper + half) >> (32 - bits)) << (32 - bits)
    lower = fine & np.uint32(2**bits - 1)
    phase = jnp.cumsum(upper, axis=-2) + (jnp.cumsum(lower, axis=-2) >> bits)
    phase += _phase_of_rad(state)[..., None, :]
    beyond = jnp.cumsum(jnp.where(jnp.abs(steps) <= 2.0**16, 0, jnp.nan), axis=-2)
    beyond += 0 * state[..., None, :]
    cos, sin = cos_sin(phase, jnp)
    last = phase[..., -1, :].astype(jnp.float32) * (2 * np.pi / 2**32) + beyond[..., -1, :]
    return cos + beyond, sin + beyond, last


_CosSinLast = tuple[Array, Array, Array]


@running_cos_sin.defjvp
def _(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[_CosSinLast, _CosSinLast]:
    cos, sin, last = running_cos_sin(*primals)
    rate = jnp.cumsum(tangents[0], axis=-2) + tangents[1][..., None, :]
    return (cos, sin, last), (-sin * rate, cos * rate, rate[..., -1, :])


def _phase(positions: Array, turns: Numbers) -> Array:
    """Return the upper 32 of the 64 bits of positions * turns modulo 2^64, as uint32."""
    high, low = (turns >> np.uint64(32)).astype(np.uint32), turns.astype(np.uint32)
    lower = positions.astype(jnp.uint32)
    phase = lower * high + _upper_product(lower, low)
    if positions.dtype.itemsize == 8:
        return phase + (positions >> 32).astype(jnp.uint32) * low
    if jnp.issubdtype(positions.dtype, jnp.unsignedinteger):
        return phase
    return phase - jnp.where(positions < 0, low, np.uint32(0))  # the sign fills the upper half


def _fractional_phase(positions: Array, inv_freq: Numbers) -> Array:
    """Return the same for fractional positions, whose whole part fits in 31 bits."""
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


def _phase_of_rad(angles: Array) -> Array:
    return _fractional_phase(angles, np.ones((1,) * angles.ndim))


def _upper_product(a: Array, b: Array | Numbers) -> Array:
    """Return the upper 32 bits of the product of two uint32, from halves of 16 bits."""
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a1 * b0 + (a0 * b0 >> 16)
    other = a0 * b1 + (middle & 0xFFFF)
    return a1 * b1 + (middle >> 16) + (other >> 16)


def _scaled(cos: Array, sin: Array, scales: Numbers, backwards: bool) -> tuple[Array, Array]:
    """Multiply cos and sin by the attention factors, as quotients, so that XLA computes them once.

    Without a division XLA computes tables again for every head, in the loop that reads them. If the
    divisor had no other use, XLA would multiply by its reciprocal: so `one` is used twice.
    """
    one = lax.optimization_barrier(jnp.float32(1))  # type: ignore[no-untyped-call]
    factors = (one + 1) * (scales / 2).astype(np.float32)[:, None, None]
    return cos * factors / one, sin * (-factors if backwards else factors) / one


def _per_pair(positions: Array, axes: Sequence[int]) -> Array:
    if not axes:
        return positions[..., None]
    return jnp.stack([positions[..., axis] for axis in axes], axis=-1)


# --- the other functions of a `Kernel` ---


def takes(array: object) -> bool:
    """Whether this kernel takes an object: a JAX array, or a NumPy array as a constant."""
    return isinstance(array, (Array, np.ndarray))


def as_positions(positions: Any, like: Array) -> Any:
    """Return positions; lists and other arrays become NumPy arrays, without loss."""
    return positions if takes(positions) else reference.of_list(positions)


def to_numpy(positions: Array) -> Numbers | None:
    """Return the positions as a NumPy array; None if not in the memory of one CPU device."""
    is_here = is_at_hand(positions) and _device(positions) is not None
    return np.asarray(positions) if is_here else None


def from_numpy(array: Numbers) -> Array:
    """Convert a NumPy array to JAX, on the default device."""
    return jnp.asarray(array)


def inspect(positions: Array) -> tuple[str, float | None, float | None]:
    """("int" | "float32" | "float64", smallest, largest); None if values cannot be read."""
    if is_at_hand(positions):
        return reference.inspect(np.asarray(positions))
    return reference.inspect(np.empty(0, positions.dtype))


def row_lengths(positions: Array) -> list[int]:
    """Return the largest position of each row, plus one."""
    if is_traced(positions):
        raise ValueError(f"under jax.jit {NEEDS_LENGTH}")
    return reference.row_lengths(np.asarray(positions))


def arange(like: Array, count: int) -> Array:
    """Return positions 0 .. count - 1 on the device of `like`."""
    with jax.default_device(None if is_traced(like) else _device(like)):
        return jnp.arange(count, dtype=jnp.int32)


def device_key(like: Array) -> str | None:
    """Return the device, a part of the cache key; None while tracing, and under a mesh.

    An array made under `jax.set_mesh` is on that mesh, and cannot be used on another one.
    """
    own = jnp.zeros(())
    if is_traced(like) or is_traced(own):
        return None
    is_on_one_device = isinstance(own.sharding, jax.sharding.SingleDeviceSharding)
    return f"jax:{_device(like)}" if is_on_one_device else None


def _device(array: Array) -> Any:
    """Return the device of an array; None, which is JAX's default, if it is on several."""
    devices = array.sharding.device_set
    return next(iter(devices)) if len(devices) == 1 else None


def is_at_hand(array: Any) -> bool:
    """Whether the numbers of an array can be read without waiting for another device."""
    if isinstance(array, np.ndarray):
        return True
    if is_traced(array) or not array.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in array.sharding.device_set)
