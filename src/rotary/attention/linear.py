"""Linear attention with RoPE: over all pairs of tokens, token by token, or by chunks with a state.

    o_m = sum_n (R_m phi(q_m))^T (R_n varphi(k_n)) v_n  /  sum_n phi(q_m)^T varphi(k_n)

The sums are over the tokens n <= m, or over all N without `causal`. The rotation comes after the
feature maps. The denominator is not rotated, so it stays positive. The weights may be negative and
need not sum to one. Without a spec nothing is rotated, and the weights sum to one.

phi and varphi are `q_features` and `k_features`, any non-negative maps (`features.FeatureMap`); the
head_dim of the spec is the number of their features. Where a denominator is 0 (relu, or exp of
numbers far below 0) the output is 0. Where it is tiny beside a rotated numerator the output is
large. elu + 1, which is positive, avoids both.
Source: Su et al., RoFormer (arXiv 2104.09864), equation 19; Katharopoulos et al. (arXiv
2006.16236), equations 16 to 20, for the recurrent form.
"""

from typing import Any, NamedTuple

import numpy as np

from ..rotate import apply
from ..spec import Rotary, check_spec
from .arrays import Array, at_least_float32, cast, check_steady, namespace, per_head, positions_of
from .features import FeatureMap, elu_plus_one


def linear_attention(
    q: Array, k: Array, v: Array, spec: Rotary | None = None, *,
    positions: object = None, allow_negative: bool = False, causal: bool = True,
    q_features: FeatureMap[Array] = elu_plus_one, k_features: FeatureMap[Array] = elu_plus_one,
) -> Array:  # fmt: skip
    """Compute linear attention with RoPE, as it is defined.

    q, k are (..., seq, head_dim), v is (..., seq, value_dim), all with the same number of heads.
    `positions` and `allow_negative` are those of `rotary.apply`. With `causal` a token sees itself
    and the tokens before it, and all pairs of tokens are computed. Without `causal` each token sees
    all tokens, in time linear in seq.
    Raises ValueError for q, k and v of different lengths (without `causal`, k and v), and for a
    feature map that does not return (..., seq, features), or in NumPy returns negative numbers.

    >>> x = np.ones((1, 2))
    >>> linear_attention(x, x, np.array([[7.0, 8.0]]), Rotary(head_dim=2))
    array([[7., 8.]])
    >>> both = np.array([[1.0], [2.0]])
    >>> linear_attention(both, both, both, causal=False, q_features=np.exp, k_features=np.exp)
    array([[1.73105858],
           [1.73105858]])
    """
    _check_tokens(*((q, k, v) if causal else (k, k, v)))
    out_type, v = v.dtype, at_least_float32(v)
    maps = q_features, k_features
    q, k, rotated_q, rotated_k = _features(q, k, spec, positions, allow_negative, maps)
    if causal:
        seen = _lower_triangle(k)
        total = (rotated_q @ rotated_k.swapaxes(-1, -2) * seen) @ v
        norms = (q @ k.swapaxes(-1, -2) * seen).sum(axis=-1, keepdims=True)
    else:
        total = rotated_q @ (rotated_k.swapaxes(-1, -2) @ v)
        norms = (q * k.sum(axis=-2, keepdims=True)).sum(axis=-1, keepdims=True)
    return cast(_divided(total, norms), out_type)


def recurrent_linear_attention(
    q: Array, k: Array, v: Array, spec: Rotary | None = None, *,
    positions: object = None, allow_negative: bool = False,
    q_features: FeatureMap[Array] = elu_plus_one, k_features: FeatureMap[Array] = elu_plus_one,
) -> Array:  # fmt: skip
    """Causal linear attention, token by token: S += (R_n phi(k_n)) v_n^T and z += phi(k_n).

    The state S, z has a constant size. Arguments are those of `linear_attention`.

    >>> x = np.ones((1, 2))
    >>> recurrent_linear_attention(x, x, np.array([[7.0, 8.0]]), Rotary(head_dim=2))
    array([[7., 8.]])
    """
    _check_tokens(q, k, v)
    maps = q_features, k_features
    return _by_chunks(_features(q, k, spec, positions, allow_negative, maps), v, None, 1)[0]


class LinearState(NamedTuple):
    """The state of linear attention after the tokens so far.

    s         (..., features, value_dim), sum of (R_n phi(k_n)) v_n^T; at least float32
    z         (..., features), sum of phi(k_n); elu + 1 has head_dim features
    position  of the next token: a number, or (batch,) if it differs by row

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
    q_features: FeatureMap[Array] = elu_plus_one,
    k_features: FeatureMap[Array] = elu_plus_one,
) -> tuple[Array, LinearState]:
    """(output, state) of causal linear attention: all pairs within a chunk, S and z across chunks.

    It continues from `state`, so pieces of any length, one after another, give the result of the
    whole sequence. Without `positions` the first token is at state.position, or 0 without a state.
    Raises ValueError if chunk_size < 1, for q, k and v of different lengths, and for a spec of
    several axes or one that depends on the length: the keys summed in a state cannot be
    rotated again.
    Source: the chunkwise form of Hua et al. (arXiv 2202.10447), section 3.2, with equation 19.

    >>> x, spec = np.ones((3, 2)), Rotary(head_dim=2)
    >>> first, state = chunked_linear_attention(x[:2], x[:2], x[:2], spec)
    >>> last, state = chunked_linear_attention(x[2:], x[2:], x[2:], spec, state=state)
    >>> bool(np.allclose([*first, *last], linear_attention(x, x, x, spec)))
    True
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1 token, got {chunk_size}")
    _check_tokens(q, k, v)
    if spec is not None:
        check_steady("a state needs", spec, "; use linear_attention")
    first: Any = 0 if state is None else state.position
    if positions is None:
        # positions beyond the 32-bit integers of JAX stay in a NumPy array
        is_numpy = isinstance(first, (np.ndarray, np.generic))
        is_far = isinstance(first, int) and first + q.shape[-2] > 2**31
        order = np.arange(q.shape[-2]) if is_numpy or is_far else positions_of(None, q)
        positions = (first[:, None] if getattr(first, "ndim", 0) else first) + order
        position = first + q.shape[-2]
    else:
        position = positions_of(positions, q)[..., -1] + 1 if q.shape[-2] else first
    features = _features(q, k, spec, positions, allow_negative, (q_features, k_features))
    output, s, z = _by_chunks(features, v, state, chunk_size)
    return output, LinearState(s, z, position)


def _check_tokens(q: Array, k: Array, v: Array) -> None:
    counts = [x.shape[-2] for x in (q, k, v)]
    if counts[0] != counts[1] or counts[1] != counts[2]:
        raise ValueError(
            "a token needs one row of each of q, k and v (without causal, of k and v): got "
            f"{counts[0]}, {counts[1]} and {counts[2]} tokens"
        )


def _by_chunks(
    features: tuple[Array, Array, Array, Array], v: Array, state: LinearState | None, size: int
) -> tuple[Array, Array, Array]:
    """Return the output, in the dtype of v, and the sums s and z after the last token."""
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
        outputs.append(_divided(total, (q[chunk] * norms).sum(axis=-1, keepdims=True)))
        s = s + rotated_k[chunk].swapaxes(-1, -2) @ v[chunk]
        z = z + k[chunk].sum(axis=-2)
    return cast(xp.concatenate(outputs, axis=-2) if outputs else v, out_type), s, z


def _divided(total: Array, norms: Array) -> Array:
    """Return total / norms, and 0 where a norm is 0."""
    where, is_zero = namespace(total).where, norms == 0
    return where(is_zero, 0.0, total / where(is_zero, 1.0, norms))


def _features(
    q: Array, k: Array, spec: Rotary | None, positions: object, allow_negative: bool,
    maps: tuple[FeatureMap[Array], FeatureMap[Array]],
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Return the features of q and k, then the same features rotated."""
    q, k = (
        _mapped(name, feature_map, x)
        for name, feature_map, x in zip(("q_features", "k_features"), maps, (q, k), strict=True)
    )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q_features gives {q.shape[-1]} features and k_features {k.shape[-1]}: they must give "
            "the same number"
        )
    if spec is None:
        return q, k, q, k
    check_spec(spec, "spec")
    rotated = apply(spec, q, k, positions=positions, seq_dim=-2, allow_negative=allow_negative)
    return q, k, *rotated


def _mapped(name: str, feature_map: FeatureMap[Array], x: Array) -> Array:
    features = feature_map(at_least_float32(x))
    if getattr(features, "ndim", 0) != x.ndim or features.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{name} must give {tuple(x.shape[:-1])} + (features,) for an input of shape "
            f"{tuple(x.shape)}, got {tuple(getattr(features, 'shape', ()))}"
        )
    if isinstance(features, np.ndarray) and (features < 0).any():
        raise ValueError(f"{name} must be >= 0, got {features.min():.6g}")
    return features


def _lower_triangle(k: Array) -> Array:
    order = positions_of(None, k)
    return per_head(cast(order[:, None] >= order[None], k.dtype), k.ndim)
