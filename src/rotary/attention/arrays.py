"""What the systems ask of an array: its library, its positions, its type, the heads it shares."""

import sys
from typing import Any

from ..kernels import kernel_of

Array = Any  # a NumPy array or a torch tensor

_NAMESPACES = {"cpu": "numpy", "numpy": "numpy", "torch": "torch"}  # by the name of the kernel


def namespace(array: Array) -> Any:
    """The module `numpy` or `torch`; TypeError, naming the known libraries, for any other array.

    Both are called by the names they share: exp, where, amax, stack, with `axis` and `keepdims`.

    >>> import numpy as np
    >>> namespace(np.zeros(2)).__name__
    'numpy'
    """
    return sys.modules[_NAMESPACES[kernel_of(array).__name__.rpartition(".")[2]]]


def positions_of(positions: Any, x: Array) -> Array:
    """`positions` as an array of the library and on the device of x; None is 0 .. seq - 1.

    >>> import numpy as np
    >>> positions_of(None, np.zeros((3, 4)))
    array([0, 1, 2])
    """
    kernel = kernel_of(x)
    return kernel.arange(x, x.shape[-2]) if positions is None else kernel.taken_over(positions, x)


def cast(x: Array, dtype: Any) -> Array:
    """x in another type, differentiably.

    >>> import numpy as np
    >>> cast(np.ones(1), np.float32)
    array([1.], dtype=float32)
    """
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)


def at_least_float32(x: Array) -> Array:
    """x with its 16-bit types widened, for sums over a sequence.

    >>> import numpy as np
    >>> at_least_float32(np.ones(1, np.float16)).dtype
    dtype('float32')
    """
    xp = namespace(x)
    return cast(x, xp.promote_types(x.dtype, xp.float32))


def has_shared_heads(q: Array, k: Array) -> bool:
    """Whether several heads of q share one of k (GQA); ValueError if they cannot be shared out.

    >>> import numpy as np
    >>> has_shared_heads(np.zeros((8, 5, 4)), np.zeros((2, 5, 4)))
    True
    """
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

    >>> import numpy as np
    >>> per_query_head(np.zeros((4, 1, 1)), np.arange(2.0).reshape(2, 1, 1)).ravel()
    array([0., 0., 1., 1.])
    """
    if not has_shared_heads(q, k):
        return k
    heads = range(q.shape[-3])
    return k[..., [head * k.shape[-3] // q.shape[-3] for head in heads], :, :]


def is_visible(q_positions: Array, k_positions: Array, num_dims: int) -> Array:
    """Whether a key is at or before a query: (seq, seq), or (batch, 1, seq, seq) for 4-D scores.

    >>> import numpy as np
    >>> is_visible(np.arange(2), np.arange(2), 2).tolist()
    [[True, False], [True, True]]
    """
    return per_head(k_positions[..., None, :] <= q_positions[..., :, None], num_dims)


def per_head(pairs: Array, num_dims: int) -> Array:
    """A matrix for each row of a batch, made the same for every head of 4-D scores.

    >>> import numpy as np
    >>> per_head(np.zeros((2, 5, 5)), 4).shape
    (2, 1, 5, 5)
    """
    return pairs[:, None] if pairs.ndim == 3 and num_dims == 4 else pairs
