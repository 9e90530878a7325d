"""Array helpers of the attention functions: library, positions, types and shared heads."""

from typing import Any

import numpy as np

from ..kernels import Array as Array
from ..kernels import kernel_of
from ..kernels.place import cast as cast
from ..spec import Rotary, check_spec


def namespace(array: Array) -> Any:
    """Return `numpy`, `torch` or `jax.numpy`, for an array of it; TypeError for another array.

    Callers use names that all three have: exp, where, amax, stack, with `axis` and `keepdims`.
    """
    kernel = kernel_of(array)
    if kernel.name == "mlx":
        raise TypeError(
            "rotary.attention takes arrays of NumPy, torch and JAX, got MLX: pass numpy.array(x)"
        )
    return kernel.namespace


def positions_of(positions: object, x: Array) -> Array:
    """Return `positions` as an array of the library and device of x; None: 0 .. seq - 1.

    Whole numbers become the widest signed type, in which differences can be negative: int64, or
    int32 on JAX without 64-bit types. Raises ValueError for a position that does not fit, if it is
    on the host and not traced.

    >>> positions_of(np.array([0, 255], np.uint8), np.zeros((2, 4))) + 1
    array([  1, 256])
    """
    kernel = kernel_of(x)
    if positions is None:
        return kernel.arange(x, x.shape[-2])
    given = kernel.as_positions(positions, x)
    dtype = str(getattr(given.dtype, "name", given.dtype))  # of NumPy also ">u8"
    if "int" not in dtype:
        return given
    wide = cast(given, widest(namespace(given)))
    values = kernel_of(wide).to_numpy(wide) if "uint" in dtype else None
    if values is not None and (values < 0).any():
        too_large = values.view(f"u{values.itemsize}").max()
        raise ValueError(f"positions must fit in {values.dtype}, got {too_large}")
    return wide


def widest(xp: Any) -> Any:
    """Return the widest signed integer type of a library."""
    return xp.asarray(0).dtype if xp.__name__ == "jax.numpy" else xp.int64


def positions_of_both(
    q_positions: object, q: Array, k_positions: object, k: Array
) -> tuple[Array, Array]:
    """Return `positions_of` for queries and for keys; if one is a JAX array, both are.

    Raises ValueError for NumPy positions beyond the integers of JAX, which would wrap.

    >>> positions_of_both(None, np.zeros((2, 4)), [5, 6, 7], np.zeros((3, 4)))[1]
    array([5, 6, 7])
    """
    pair = positions_of(q_positions, q), positions_of(k_positions, k)
    others = [namespace(each) for each in pair if not isinstance(each, np.ndarray)]
    if not others or others[0].__name__ != "jax.numpy":
        return pair
    xp = others[0]
    limit = xp.iinfo(widest(xp)).max
    if any(isinstance(each, np.ndarray) and (abs(each) > limit).any() for each in pair):
        raise ValueError(
            "NumPy positions above 2^31 beside JAX ones: make both NumPy arrays, or set "
            "jax_enable_x64"
        )
    return xp.asarray(pair[0]), xp.asarray(pair[1])


def float64_of(x: Array) -> Any:
    """Return the float64 type of the library of x; TypeError on JAX without 64-bit types."""
    xp = namespace(x)
    if xp.__name__ == "jax.numpy" and xp.asarray(0.0).dtype != np.float64:
        raise TypeError(
            "this needs float64: call jax.config.update('jax_enable_x64', True), or pass NumPy "
            "arrays"
        )
    return xp.float64


def at_least_float32(x: Array) -> Array:
    """Widen x of a 16-bit type to float32, for sums over a sequence."""
    xp = namespace(x)
    return cast(x, xp.promote_types(x.dtype, xp.float32))


def check_steady(user: str, spec: Rotary, advice: str = "") -> None:
    """Refuse several axes, and frequencies that depend on the length; the text names the user."""
    check_spec(spec, "spec")
    if spec.num_axes > 1 or spec.depends_on_length:
        raise ValueError(
            f"{user} one position axis and frequencies that do not depend on the length, got "
            f"{spec.num_axes} axes and schedule {spec.schedule!r}{advice}"
        )


def has_shared_heads(q: Array, k: Array) -> bool:
    """Whether several heads of q share one of k (GQA); ValueError if q has no multiple of them."""
    if q.ndim < 3 or q.shape[-3] == k.shape[-3]:
        return False
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"q has {q.shape[-3]} heads and k has {k.shape[-3]}: make the first a multiple of the "
            "second, with heads on axis -3"
        )
    return True


def per_query_head(q: Array, k: Array) -> Array:
    """Repeat the heads of k or v to as many as q has: adjacent heads of q share one.

    >>> per_query_head(np.zeros((4, 1, 1)), np.arange(2.0).reshape(2, 1, 1)).ravel()
    array([0., 0., 1., 1.])
    """
    if not has_shared_heads(q, k):
        return k
    *lead, heads, seq, width = k.shape
    shared = (*lead, heads, q.shape[-3] // heads, seq, width)
    each = namespace(k).broadcast_to(k[..., None, :, :], shared)
    return each.reshape(*lead, q.shape[-3], seq, width)


def check_per_token(name: str, positions: Array, x: Array) -> None:
    """Refuse numbers that are not one per token of x, which NumPy's rules may still broadcast.

    >>> check_per_token("q_positions", np.zeros(1), np.zeros((4, 8)))
    Traceback (most recent call last):
    ValueError: q_positions must be (seq,), or (batch, seq) beside 4 axes; got (1,) beside (4, 8)
    """
    shape, beside = tuple(positions.shape), tuple(x.shape)
    is_by_row = len(shape) == 2 and len(beside) in (3, 4) and shape[0] in (1, beside[0])
    if shape[-1:] != beside[-2:-1] or not (len(shape) == 1 or is_by_row):
        raise ValueError(
            f"{name} must be (seq,), or (batch, seq) beside 4 axes; got {shape} beside {beside}"
        )


def per_head(pairs: Array, num_dims: int) -> Array:
    """Add axes of size 1 to numbers for pairs of tokens: `num_dims`, as the scores have.

    (batch, ...) arrays of 3 axes get the axis of the heads, if the scores have 4.

    >>> per_head(np.zeros((2, 5, 5)), 4).shape, per_head(np.zeros((5, 5)), 4).shape
    ((2, 1, 5, 5), (1, 1, 5, 5))
    """
    if pairs.ndim == 3 and num_dims == 4:
        return pairs[:, None]
    return pairs[(None,) * (num_dims - pairs.ndim)]
