"""The systems of the paper: sinusoidal embedding, softmax and linear attention with rotary q and k.

Small and readable, in NumPy; q, k and v are (..., seq, head_dim).
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .angles import turns
from .rotate import apply
from .spec import Rotary

Array = npt.NDArray[Any]


def sinusoidal(positions: Array, dim: int, base: float = 10_000.0) -> Array:
    """The additive embedding that RoPE replaces: (..., dim) float64.

    p[2t] = sin(position / base^(2t/dim)), p[2t + 1] = cos of the same. It is added to the token
    embeddings, before W_q, W_k and W_v. Its inner product depends on distance alone:
    p_m . p_n = sum_t cos((m - n) base^(-2t/dim)).
    Source: Vaswani et al. (arXiv 1706.03762), section 3.5.

    >>> sinusoidal(np.array([0, 1]), 2).round(4)
    array([[0.    , 1.    ],
           [0.8415, 0.5403]])
    """
    steps = turns(Rotary(head_dim=dim, base=base)).astype(np.int64)
    angles = np.asarray(positions, np.int64)[..., None] * steps * (2 * np.pi / 2**64)
    return np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(*angles.shape[:-1], dim)


def softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    spec: Rotary | None = None,
    *,
    q_positions: Array | None = None,
    k_positions: Array | None = None,
    causal: bool = True,
) -> Array:
    """softmax(q k^T / sqrt(head_dim)) v, with q and k rotated if a spec is given.

    Positions are (seq,) or (batch, seq), by default 0 .. seq - 1; `causal` hides the keys at larger
    ones.
    Source: Su et al., RoFormer (arXiv 2104.09864), equations 2 and 16.

    >>> q = np.ones((1, 2))
    >>> softmax_attention(q, q, np.array([[7.0, 8.0]]))
    array([[7., 8.]])
    """
    q_positions = np.arange(q.shape[-2]) if q_positions is None else q_positions
    k_positions = np.arange(k.shape[-2]) if k_positions is None else k_positions
    if spec is not None:
        q, k = apply(spec, q, positions=q_positions), apply(spec, k, positions=k_positions)
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    if causal:
        visible = k_positions[..., None, :] <= q_positions[..., :, None]
        if visible.ndim == 3 and scores.ndim == 4:
            visible = visible[:, None]  # the same for every head
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=np.finfo(q.dtype).min))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def elu_plus_one(x: Array) -> Array:
    """The feature map of linear attention: x + 1 for x > 0, exp(x) below; always positive.

    Source: Katharopoulos et al. (arXiv 2006.16236), equation 7.

    >>> elu_plus_one(np.array([-1.0, 0.0, 2.0])).round(4)
    array([0.3679, 1.    , 3.    ])
    """
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    spec: Rotary,
    *,
    positions: Array | None = None,
    allow_negative: bool = False,
) -> Array:
    """Causal linear attention with RoPE, by all pairs of tokens: the definition.

        o_m = sum_{n <= m} (R_m phi(q_m))^T (R_n phi(k_n)) v_n  /  sum_{n <= m} phi(q_m)^T phi(k_n)

    Rotated after the feature map; the denominator is not rotated, so it stays positive. The weights
    may be negative and need not sum to one.
    Source: Su et al., RoFormer (arXiv 2104.09864), equation 19.

    >>> x = np.ones((1, 2))
    >>> linear_attention(x, x, np.array([[7.0, 8.0]]), Rotary(head_dim=2))
    array([[7., 8.]])
    """
    q, k, rotated_q, rotated_k = _features(q, k, spec, positions, allow_negative)
    seen = np.tril(np.ones((q.shape[-2], k.shape[-2]), q.dtype))
    weights = rotated_q @ np.swapaxes(rotated_k, -1, -2) * seen
    norm = (q @ np.swapaxes(k, -1, -2) * seen).sum(axis=-1, keepdims=True)
    return weights @ v / norm


def recurrent_linear_attention(
    q: Array,
    k: Array,
    v: Array,
    spec: Rotary,
    *,
    positions: Array | None = None,
    allow_negative: bool = False,
) -> Array:
    """The same, token by token: S += (R_n phi(k_n)) v_n^T and z += phi(k_n), in constant memory.

    >>> x = np.ones((1, 2))
    >>> recurrent_linear_attention(x, x, np.array([[7.0, 8.0]]), Rotary(head_dim=2))
    array([[7., 8.]])
    """
    q, k, rotated_q, rotated_k = _features(q, k, spec, positions, allow_negative)
    state = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]), v.dtype)
    norm = np.zeros((*k.shape[:-2], k.shape[-1]), v.dtype)
    outputs = []
    for n in range(k.shape[-2]):
        state = state + rotated_k[..., n, :, None] * v[..., n, None, :]
        norm = norm + k[..., n, :]
        total = (rotated_q[..., n, None, :] @ state)[..., 0, :]
        outputs.append(total / (q[..., n, :] * norm).sum(axis=-1, keepdims=True))
    return np.stack(outputs, axis=-2) if outputs else np.zeros_like(v)


def _features(
    q: Array, k: Array, spec: Rotary, positions: Array | None, allow_negative: bool
) -> tuple[Array, Array, Array, Array]:
    q, k = elu_plus_one(q), elu_plus_one(k)
    rotated = apply(spec, q, k, positions=positions, allow_negative=allow_negative)
    return q, k, *rotated
