"""Causal linear attention with RoPE: by all pairs, token by token, and in chunks with a state.

    o_m = sum_{n <= m} (R_m phi(q_m))^T (R_n phi(k_n)) v_n  /  sum_{n <= m} phi(q_m)^T phi(k_n)

Rotated after the feature map; the denominator is not rotated, so it stays positive. The weights may
be negative and need not sum to one. Without a spec nothing is rotated, and they do.
Source: Su et al., RoFormer (arXiv 2104.09864), equation 19; Katharopoulos et al. (arXiv
2006.16236), equations 16 to 20, for the recurrent form.
"""

from typing import Any, NamedTuple

import numpy as np

from ..rotate import apply
from ..spec import Rotary
from .arrays import Array, at_least_float32, cast, namespace, positions_of


def elu_plus_one(x: Array) -> Array:
    """The feature map of linear attention: x + 1 for x > 0, exp(x) below; always positive.

    Source: Katharopoulos et al. (arXiv 2006.16236), equation 7.

    >>> elu_plus_one(np.array([-1.0, 0.0, 2.0])).round(4)
    array([0.3679, 1.    , 3.    ])
    """
    xp = namespace(x)
    return xp.where(x > 0, x + 1, xp.exp(xp.clip(x, None, 0)))


def linear_attention(
    q: Array, k: Array, v: Array, spec: Rotary | None = None, *,
    positions: object = None, allow_negative: bool = False,
) -> Array:  # fmt: skip
    """Causal linear attention with RoPE, by all pairs of tokens: the definition.

    q, k are (..., seq, head_dim), v is (..., seq, value_dim), with as many heads each. `positions`
    are those of `rotary.apply`; a token sees those before it in the sequence.

    >>> x = np.ones((1, 2))
    >>> linear_attention(x, x, np.array([[7.0, 8.0]]), Rotary(head_dim=2))
    array([[7., 8.]])
    """
    out_type = v.dtype
    q, k, rotated_q, rotated_k = _features(q, k, spec, positions, allow_negative)
    seen = _lower_triangle(k)
    weights = rotated_q @ rotated_k.swapaxes(-1, -2) * seen
    norm = (q @ k.swapaxes(-1, -2) * seen).sum(axis=-1, keepdims=True)
    return cast(weights @ at_least_float32(v) / norm, out_type)


def recurrent_linear_attention(
    q: Array, k: Array, v: Array, spec: Rotary | None = None, *,
    positions: object = None, allow_negative: bool = False,
) -> Array:  # fmt: skip
    """The same, token by token: S += (R_n phi(k_n)) v_n^T and z += phi(k_n), in constant memory.

    >>> x = np.ones((1, 2))
    >>> recurrent_linear_attention(x, x, np.array([[7.0, 8.0]]), Rotary(head_dim=2))
    array([[7., 8.]])
    """
    return _by_chunks(_features(q, k, spec, positions, allow_negative), v, None, 1)[0]


class LinearState(NamedTuple):
    """All that linear attention keeps of the tokens it has seen.

    s         (..., head_dim, value_dim), sum of (R_n phi(k_n)) v_n^T; at least float32
    z         (..., head_dim), sum of phi(k_n)
    position  of the next token: a number, or (batch,) where rows differ

    On JAX it is a pytree, so it can be the carry of `jax.lax.scan` and cross `jax.jit`.

    >>> LinearState(np.zeros((4, 4)), np.zeros(4), 7).position
    7
    """

    s: Any
    z: Any
    position: Any


def chunked_linear_attention(
    q: Array,
    k: Array,
    v: Array,
    spec: Rotary | None = None,
    *,
    state: LinearState | None = None,
    positions: object = None,
    chunk_size: int = 64,
    allow_negative: bool = False,
) -> tuple[Array, LinearState]:
    """The same in chunks, all pairs inside a chunk and the state S, z between: (output, state).

    Goes on behind `state`, so pieces of any length, fed one after another, give what the whole
    gives. Without `positions` the tokens stand at state.position and after, from 0 at first.
    Raises ValueError if chunk_size < 1, and for a spec of several axes or one that depends on the
    length: what the state holds cannot be turned again.
    Source: the chunkwise form of Hua et al. (arXiv 2202.10447), section 3.2, with equation 19.

    >>> x, spec = np.ones((3, 2)), Rotary(head_dim=2)
    >>> first, state = chunked_linear_attention(x[:2], x[:2], x[:2], spec)
    >>> last, state = chunked_linear_attention(x[2:], x[2:], x[2:], spec, state=state)
    >>> bool(np.allclose([*first, *last], linear_attention(x, x, x, spec)))
    True
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1 token, got {chunk_size}")
    if spec is not None and (spec.num_axes > 1 or spec.depends_on_length):
        raise ValueError(
            "a state needs one position axis and frequencies that do not depend on the length, got "
            f"{spec.num_axes} axes and schedule {spec.schedule!r}; use linear_attention"
        )
    first: Any = 0 if state is None else state.position
    if positions is None:
        # what the 32-bit integers of JAX cannot hold stays a NumPy array
        is_numpy = isinstance(first, np.ndarray | np.generic)
        is_far = isinstance(first, int) and first + q.shape[-2] > 2**31
        order = np.arange(q.shape[-2]) if is_numpy or is_far else positions_of(None, q)
        positions = (first[:, None] if getattr(first, "ndim", 0) else first) + order
        position = first + q.shape[-2]
    else:
        positions = positions_of(positions, q)
        position = positions[..., -1] + 1 if q.shape[-2] else first
    features = _features(q, k, spec, positions, allow_negative)
    output, s, z = _by_chunks(features, v, state, chunk_size)
    return output, LinearState(s, z, position)


def _by_chunks(
    features: tuple[Array, Array, Array, Array], v: Array, state: LinearState | None, size: int
) -> tuple[Array, Array, Array]:
    """The output, in the type of v, and the sums s and z behind the last token."""
    q, k, rotated_q, rotated_k = features
    xp, out_type, v = namespace(q), v.dtype, at_least_float32(v)
    if state is None:
        s, z = rotated_k[..., :0, :].swapaxes(-1, -2) @ v[..., :0, :], k[..., :0, :].sum(axis=-2)
    else:
        s, z, _ = state
    outputs = []
    for start in range(0, q.shape[-2], size):
        chunk = (..., slice(start, start + size), slice(None))
        pairs = rotated_q[chunk] @ rotated_k[chunk].swapaxes(-1, -2) * _lower_triangle(k[chunk])
        total = rotated_q[chunk] @ s + pairs @ v[chunk]
        norms = z[..., None, :] + xp.cumsum(k[chunk], axis=-2)
        outputs.append(total / (q[chunk] * norms).sum(axis=-1, keepdims=True))
        s = s + rotated_k[chunk].swapaxes(-1, -2) @ v[chunk]
        z = z + k[chunk].sum(axis=-2)
    return cast(xp.concatenate(outputs, axis=-2) if outputs else v, out_type), s, z


def _features(
    q: Array, k: Array, spec: Rotary | None, positions: object, allow_negative: bool
) -> tuple[Array, Array, Array, Array]:
    q, k = elu_plus_one(at_least_float32(q)), elu_plus_one(at_least_float32(k))
    if spec is None:
        return q, k, q, k
    rotated = apply(spec, q, k, positions=positions, seq_dim=-2, allow_negative=allow_negative)
    return q, k, *rotated


def _lower_triangle(k: Array) -> Array:
    order = positions_of(None, k)
    return cast(order[:, None] >= order, k.dtype)
