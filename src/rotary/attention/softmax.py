"""Softmax attention with rotary q and k, with a window or rotary v; scaling of q, norms of k.

Three methods for sequences longer than those of the training need no function of their own. Window
attention is `window=`. HWFA (Su, kexue.fm 9603) is window attention with RoPE in all layers but the
last, which sees everything and has no positions: `softmax_attention(q, k, v, spec,
window=hybrid_window(...))`, and `softmax_attention(scale_by_log_n(q, ...), k, v)`. HWFA2 (Su,
kexue.fm 9731) has a larger window and some full layers with RoPE, trained with `softmax_attention`
and run with `distance_attention` and `rerope`.
"""

import math
from typing import Any

from ..angles import moved_cos_sin
from ..kernels import is_per_row
from ..rotate import apply, check_one_axis, check_tokens, options_of, rotate
from ..spec import Rotary, check_spec, check_whole, unwrapped
from .arrays import (
    Array,
    at_least_float32,
    cast,
    check_per_token,
    has_shared_heads,
    namespace,
    per_head,
    per_query_head,
    positions_of,
    positions_of_both,
    widest,
)


def softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    spec: Rotary | None = None,
    *,
    q_positions: object = None,
    k_positions: object = None,
    causal: bool = True,
    window: int | None = None,
    allow_negative: bool = False,
) -> Array:
    """softmax(q k^T / sqrt(head_dim)) v, with q and k rotated if a spec is given.

    Positions are (seq,) or (batch, seq), by default 0 .. seq - 1; `causal` hides the keys at larger
    positions. A query that sees no key gives zeros. k and v may have fewer heads (axis -3) than q.
    With `window` a query at m sees the keys at m - window + 1 .. m only: the last `window` tokens,
    including itself, so that no distance is larger than window - 1.
    A spec that depends on the length is scaled for the largest position of the keys.
    On torch this is `scaled_dot_product_attention`, on NumPy and JAX the formula.
    Raises ValueError if the heads of q are not a multiple of those of k, for positions that are not
    one per token, for a negative one with a spec unless `allow_negative`, for causal=True with
    several axes, and for a window below 1 or without causal=True.
    Source: Su et al., RoFormer (arXiv 2104.09864), equations 2 and 16; Su, kexue.fm 9431, for the
    window.

    >>> import numpy as np
    >>> q = np.ones((1, 2))
    >>> softmax_attention(q, q, np.array([[7.0, 8.0]]))
    array([[7., 8.]])
    """
    if spec is not None:
        check_spec(spec, "spec")
    if causal and spec is not None and spec.num_axes > 1:
        raise ValueError(
            f"causal=True needs one position axis, the spec has {spec.num_axes}: rotate q and k "
            "with rotary.apply, and pass them with the order of the tokens as positions"
        )
    if window is not None:
        window = unwrapped(window)
        check_whole("window", window)
        if not causal:
            raise ValueError("window counts the tokens before a query: it needs causal=True")
    if spec is not None:
        seq_len = row_length(spec, k, k_positions)
        q, k = (
            apply(
                spec,
                x,
                positions=_by_row(where, x, seq_len),
                seq_dim=-2,
                seq_len=seq_len,
                allow_negative=allow_negative,
            )
            for x, where in ((q, q_positions), (k, k_positions))
        )
    is_torch = namespace(q).__name__ == "torch"
    has_default_positions = q_positions is None and k_positions is None
    visible = None
    if causal and not (is_torch and has_default_positions and window is None):
        m, n = positions_of_both(q_positions, q, k_positions, k)
        check_per_token("q_positions", m, q)
        check_per_token("k_positions", n, k)
        distance = m[..., :, None] - n[..., None, :]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        visible = per_head(seen, q.ndim)
    if is_torch:
        return namespace(q).nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            is_causal=causal and visible is None,
            enable_gqa=has_shared_heads(q, k),
        )
    k, v = per_query_head(q, k), per_query_head(q, v)
    scores = at_least_float32(q) @ at_least_float32(k).swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    return weighted(scores, visible, v)


def weighted(scores: Array, visible: Array | None, v: Array) -> Array:
    """Return softmax(scores) v over the visible keys, in the dtype of v; zeros for no keys."""
    xp = namespace(scores)
    if not scores.shape[-1]:
        return cast(scores, v.dtype) @ v
    if visible is not None:
        scores = xp.where(visible, scores, -math.inf)
    highest = xp.amax(scores, axis=-1, keepdims=True)
    weights = xp.exp(scores - xp.where(highest == -math.inf, 0.0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    return cast(weights / xp.where(total == 0, 1.0, total) @ cast(v, weights.dtype), v.dtype)


def vo_rope_attention(
    q: Array,
    k: Array,
    v: Array,
    value_spec: Rotary,
    spec: Rotary | None = None,
    *,
    q_positions: object = None,
    k_positions: object = None,
    causal: bool = True,
    allow_negative: bool = False,
) -> Array:
    """VO-RoPE: softmax attention with rotated values, whose output is rotated back.

        o_m = R_m^T sum_n a_mn R_n v_n = sum_n a_mn R_{n-m} v_n

    The head_dim of `value_spec` is that of v; its attention factor has no effect. With `spec`, q
    and k are rotated as well. Other arguments are those of `softmax_attention`.
    Source: Su, kexue.fm 10862, the second kind of rotary embedding.

    >>> import numpy as np
    >>> x = np.eye(2)
    >>> bool(np.allclose(vo_rope_attention(x, x, x, Rotary(head_dim=2))[0], x[0]))
    True
    """
    check_spec(value_spec, "value_spec")
    seq_len = row_length(value_spec, k, k_positions)
    rotated = _turned(value_spec, v, k_positions, seq_len, allow_negative)
    attended = softmax_attention(
        q,
        k,
        rotated,
        spec,
        q_positions=q_positions,
        k_positions=k_positions,
        causal=causal,
        allow_negative=allow_negative,
    )
    return _turned(value_spec, attended, q_positions, seq_len, allow_negative, conjugate=True)


def _by_row(positions: object, x: Array, seq_len: object) -> Any:
    """Return positions of one row for every row, if each row has a length of its own."""
    if positions is None or not is_per_row(seq_len):
        return positions
    where = positions_of(positions, x)
    if where.ndim > 1:
        return where
    return namespace(x).broadcast_to(where, (len(seq_len), *where.shape))


def _turned(
    spec: Rotary,
    x: Array,
    positions: object,
    seq_len: object,
    allow_negative: bool,
    conjugate: bool = False,
) -> Array:
    """Rotate x as `apply` does, but without the attention factor: as a move from position 0."""
    if positions is None:
        check_one_axis(spec)
    where = _by_row(positions_of(positions, x), x, seq_len)
    options = options_of(spec, seq_dim=-2)
    check_tokens(spec, tuple(where.shape), (tuple(x.shape),), options, is_part=False)
    first = namespace(where).zeros_like(where)
    cos, sin = moved_cos_sin(spec, spec, first, where, x, seq_len, seq_len, allow_negative)
    return rotate(x, cos, sin, spec, seq_dim=-2, conjugate=conjugate)


def scale_by_log_n(q: Array, counts: object, trained_length: int) -> Array:
    """Return q times max(1, ln n / ln trained_length), for queries that see n keys each.

    This keeps the entropy of the weights from growing with the number of keys. `counts`, the n, are
    (seq,) or (batch, seq): position + 1 if positions start at 0. q may be rotated before or after.
    Raises ValueError if trained_length < 2, and for counts that are not one per token.
    Source: Su, kexue.fm 8823 (log n) and 9708 (never below 1, for a model trained without it).

    >>> import numpy as np
    >>> scale_by_log_n(np.ones((3, 1)), np.array([10, 100, 10_000]), 100).ravel()
    array([1., 1., 2.])
    """
    if trained_length < 2:
        raise ValueError(f"trained_length must be >= 2 tokens, got {trained_length}")
    xp = namespace(q)
    seen = positions_of(counts, q)
    check_per_token("counts", seen, q)
    seen = cast(seen, at_least_float32(q).dtype)
    factors = xp.clip(xp.log(xp.clip(seen, 1, None)) / math.log(trained_length), 1, None)
    return q * cast(per_head(factors[..., None], q.ndim), q.dtype)


def hybrid_window(trained_length: int, num_layers: int, share: float = 0.75) -> int:
    """Return the largest window of HWFA for num_layers - 1 window layers and a trained length.

    (window - 1)(num_layers - 1) + 1 <= share trained_length, at least 1: then a feature that the
    last layer gets depends on no more tokens than in training. `share` is in (0, 1].
    Raises ValueError for sizes that are not whole numbers >= 1, num_layers 1 and another share.
    Source: Su, kexue.fm 9603, which advises a share up to 3/4; there 16 for 24 layers and 512.

    >>> hybrid_window(512, 24), hybrid_window(512, 24, share=1.0)
    (17, 23)
    """
    check_whole("trained_length", trained_length)
    check_whole("num_layers", num_layers)
    if num_layers < 2 or not 0 < share <= 1:
        raise ValueError(
            f"HWFA needs 2 layers or more and a share in (0, 1], got {num_layers} and {share!r}"
        )
    return max(1, int((share * trained_length - 1) // (num_layers - 1)) + 1)


def key_norm(k: Array) -> Array:
    """Scale every vector of k to length sqrt(head_dim): KeyNorm, for `softmax_attention`.

    Its scores q . k / sqrt(head_dim) are then q . (k / |k|): they depend on the direction of a key
    alone. It gives the same before or after a rotation. Zero vectors stay zero. Applied to q alone
    it is QueryNorm (QNA). CosA is `key_norm` of both, one of them times 4 ln(n) / sqrt(head_dim),
    with n half the trained length or the position + 1.
    Source: Su, kexue.fm 9859, in whose experiment it kept 47.7 % of the tokens right at 8 times the
    trained length, where the same model without it fell from 49.4 % to 23.2 %.

    >>> import numpy as np
    >>> key_norm(np.array([[3.0, 4.0, 0.0, 0.0]]))
    array([[1.2, 1.6, 0. , 0. ]])
    """
    xp = namespace(k)
    wide = at_least_float32(k)
    largest = xp.amax(xp.abs(wide), axis=-1, keepdims=True)
    is_zero = largest == 0
    unit = wide / xp.where(is_zero, 1.0, largest)  # squares of 1e30 or 1e-30 leave float32
    squares = (unit * unit).sum(axis=-1, keepdims=True)
    lengths = xp.sqrt(xp.where(is_zero, 1.0, squares))
    return cast(unit * (math.sqrt(k.shape[-1]) / lengths), k.dtype)


def row_length(spec: Rotary, k: Array, k_positions: object) -> object:
    """Return the length of the keys for a spec that depends on the length; else None."""
    if not (spec.depends_on_length and k.shape[-2]):
        return None
    if k_positions is None:
        return k.shape[-2]
    positions = positions_of(k_positions, k)
    xp = namespace(positions)
    largest = xp.amax(positions, axis=(-2, -1) if spec.num_axes > 1 else -1)
    return xp.clip(cast(largest, widest(xp)), -1, None) + 1
