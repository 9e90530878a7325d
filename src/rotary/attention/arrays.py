"""What the systems ask of an array: its library, its positions, its type, the heads it shares."""

import sys
from typing import Any

import numpy as np

from ..kernels import Array as Array
from ..kernels import kernel_of


def namespace(array: Array) -> Any:
    """`numpy`, `torch` or `jax.numpy`; TypeError, naming the known libraries, for another array.

    They are called by the names they share: exp, where, amax, stack, with `axis` and `keepdims`.
    """
    kernel = kernel_of(array)
    if kernel.name == "mlx":
        raise TypeError(
            "rotary.attention takes arrays of NumPy, torch and JAX: go on with numpy.array(x)"
        )
    return sys.modules[kernel.namespace]


def positions_of(positions: object, x: Array) -> Array:
    """`positions` as an array of the library and on the device of x; None is 0 .. seq - 1.

    Whole numbers come in the widest signed type, where a difference can be below 0: int64, on JAX
    without 64-bit types int32. Raises ValueError for one beyond it, if on the host and not traced.

    >>> positions_of(np.array([0, 255], np.uint8), np.zeros((2, 4))) + 1
    array([  1, 256])
    """
    kernel = kernel_of(x)
    if positions is None:
        return kernel.arange(x, x.shape[-2])
    return _signed(kernel.as_positions(positions, x))


def _signed(positions: Array) -> Array:
    dtype = str(getattr(positions.dtype, "name", positions.dtype))  # of NumPy also ">u8"
    if "int" not in dtype:
        return positions
    wide = cast(positions, _widest(namespace(positions)))
    values = kernel_of(wide).to_numpy(wide) if "uint" in dtype else None
    if values is not None and (values < 0).any():
        too_large = values.view(f"u{values.itemsize}").max()
        raise ValueError(f"positions must fit in {values.dtype}, got {too_large}")
    return wide


def _widest(xp: Any) -> Any:
    """The widest type of whole numbers of a library that are signed."""
    return xp.asarray(0).dtype if xp.__name__ == "jax.numpy" else xp.int64


def positions_of_both(
    q_positions: object, q: Array, k_positions: object, k: Array
) -> tuple[Array, Array]:
    """`positions_of` queries and keys; on JAX a NumPy array beside a JAX array becomes one.

    Raises ValueError for NumPy positions beyond the integers of JAX: it would wrap them.

    >>> positions_of_both(None, np.zeros((2, 4)), [5, 6, 7], np.zeros((3, 4)))[1]
    array([5, 6, 7])
    """
    pair = positions_of(q_positions, q), positions_of(k_positions, k)
    xp = next((namespace(p) for p in pair if not isinstance(p, np.ndarray)), None)
    if xp is None or xp.__name__ != "jax.numpy":
        return pair
    limit = xp.iinfo(_widest(xp)).max
    if any(isinstance(each, np.ndarray) and (abs(each) > limit).any() for each in pair):
        raise ValueError(
            "NumPy positions above 2^31 beside JAX ones: make both NumPy arrays, or set "
            "jax_enable_x64"
        )
    return xp.asarray(pair[0]), xp.asarray(pair[1])


def float64_of(x: Array) -> Any:
    """The type float64 of the library of x; TypeError on JAX without 64-bit types."""
    xp = namespace(x)
    if xp.__name__ == "jax.numpy" and xp.asarray(0.0).dtype != np.float64:
        raise TypeError(
            "this needs float64: call jax.config.update('jax_enable_x64', True), or pass NumPy "
            "arrays"
        )
    return xp.float64


def cast(x: Array, dtype: Any) -> Array:
    """x in another type, differentiably."""
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)


def at_least_float32(x: Array) -> Array:
    """x with its 16-bit types widened, for sums over a sequence."""
    xp = namespace(x)
    return cast(x, xp.promote_types(x.dtype, xp.float32))


def has_shared_heads(q: Array, k: Array) -> bool:
    """Whether several heads of q share one of k (GQA); ValueError if they cannot be shared out."""
    if q.ndim < 3 or q.shape[-3] == k.shape[-3]:
        return False
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"q has {q.shape[-3]} heads and k has {k.shape[-3]}: make the first a multiple of the "
            "second, with heads on axis -3"
        )
    return True


def per_query_head(q: Array, k: Array) -> Array:
    """k, or v, with one head for each of q: heads of q in a row share one.

    >>> per_query_head(np.zeros((4, 1, 1)), np.arange(2.0).reshape(2, 1, 1)).ravel()
    array([0., 0., 1., 1.])
    """
    if not has_shared_heads(q, k):
        return k
    *lead, heads, seq, width = k.shape
    shared = (*lead, heads, q.shape[-3] // heads, seq, width)
    each = namespace(k).broadcast_to(k[..., None, :, :], shared)
    return each.reshape(*lead, q.shape[-3], seq, width)


def per_head(pairs: Array, num_dims: int) -> Array:
    """A matrix for each row of a batch, made the same for every head of 4-D scores.

    >>> per_head(np.zeros((2, 5, 5)), 4).shape
    (2, 1, 5, 5)
    """
    return pairs[:, None] if pairs.ndim == 3 and num_dims == 4 else pairs
