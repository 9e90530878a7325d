"""Data-dependent angles: the angle of a token is a sum of steps computed from the tokens.

    phi_m = sum_{n <= m} delta_n,   q and k at m are rotated by phi_m

delta (rad, one per pair) is computed from the token; RoPE is delta = theta for every token. The
score of a query at m and a key at n depends only on the tokens n + 1 .. m: on their sum of delta.
The state of a decoder is one angle for each pair.
Mamba-3: delta = pi tanh(a_m) dt_m, on interleaved pairs of the first channels. Selective RoPE:
delta = temperature times a short causal convolution of a projection of the normalized token.
Source: Lahoti et al., Mamba-3 (ICLR 2026), and `angle_dt` of the authors' code; Movahedi et al.,
Selective Rotary Position Embedding (ICLR 2026), and the authors' `SelectiveRoPE`.
"""

import math

from .arrays import Array, at_least_float32, cast, namespace


def cumulative_cos_sin(steps: Array, state: Array | None = None) -> tuple[Array, Array, Array]:
    """Return cos and sin of the running sum of steps, and the state: the sum at the last token.

    steps  (batch, heads, seq, pairs) or (seq, pairs), in rad: how far each token turns each pair
    state  (batch, heads, pairs) or (pairs,), returned for the previous piece; None: zeros
    Pass cos and sin to `rotate((q, k), cos, sin, layout=...)`. If there are fewer pairs than a head
    has, rotate its first channels, `q[..., : 2 * pairs]`. Rotated keys can be cached. Sums are
    float64 and reduced to one turn, on JAX without 64-bit types whole numbers that wrap after one
    turn, so that long sequences lose no precision. Pieces of any length, one after another, give
    the result of the whole sequence, but without 64-bit types each rounds the state by up to
    2.4e-7, and steps above 2^16 rad give NaN. Raises ValueError for a state of another shape.

    >>> import numpy as np
    >>> steps = np.array([[0.5], [1.0], [2.0]])
    >>> cos, sin, state = cumulative_cos_sin(steps)
    >>> np.arctan2(sin, cos).ravel().round(4).tolist(), state.tolist()
    ([0.5, 1.5, -2.7832], [3.5])
    """
    xp = namespace(steps)
    out_type = at_least_float32(steps).dtype
    wide = xp.asarray(0.0).dtype if xp.__name__ == "jax.numpy" else xp.float64
    if state is not None and tuple(state.shape) != (*steps.shape[:-2], steps.shape[-1]):
        raise ValueError(
            f"state must be {(*steps.shape[:-2], steps.shape[-1])} for steps of "
            f"{tuple(steps.shape)}, got {tuple(state.shape)}"
        )
    rows = cast(steps, wide)
    first = rows[..., :0, :].sum(axis=-2) if state is None else cast(state, wide)
    if wide == xp.float32 and steps.shape[-2]:
        from ..kernels.jax.angles import running_cos_sin

        return running_cos_sin(rows, first)  # type: ignore[return-value]  # these are JAX's
    angles = xp.cumsum(rows, axis=-2)
    if state is not None:
        angles = angles + first[..., None, :]
    angles = angles - 2 * math.pi * xp.floor(angles / (2 * math.pi))
    last = angles[..., -1, :] if steps.shape[-2] else first
    return cast(xp.cos(angles), out_type), cast(xp.sin(angles), out_type), last


def mamba3_steps(angles: Array, dt: Array) -> Array:
    """pi tanh(angles) dt: the steps of Mamba-3, (..., seq, pairs), for `cumulative_cos_sin`.

    angles (..., seq, pairs) and dt (..., seq) > 0 are projections of the tokens, dt after its
    softplus.

    >>> import numpy as np
    >>> mamba3_steps(np.array([[0.0, 100.0]]), np.array([0.5])).round(4)
    array([[0.    , 1.5708]])
    """
    if tuple(dt.shape) != tuple(angles.shape[:-1]):
        raise ValueError(
            f"dt must be {tuple(angles.shape[:-1])} for angles of {tuple(angles.shape)}, got "
            f"{tuple(dt.shape)}"
        )
    return math.pi * namespace(angles).tanh(angles) * dt[..., None]


def selective_steps(
    phi: Array, kernel: Array, temperature: Array, tail: Array | None = None
) -> tuple[Array, Array]:
    """Return the steps of Selective RoPE, temperature times a causal convolution of phi, and tail.

    phi          (..., seq, pairs): a projection of each token, divided by its norm
    kernel       (..., width, pairs): weights of a depthwise convolution; the last is for the token
                 itself, the first for the token width - 1 before it
    temperature  (pairs,): rad; the authors' are the frequencies of RoPE, `rotary.inv_freq(spec)[0]`
    tail         (..., width - 1, pairs): returned for the previous piece; None: zeros
    The steps are for `cumulative_cos_sin`; the tail, the last phi, is for the next piece. If the
    model has a gate, which multiplies phi after the convolution, multiply the steps by it.
    Raises ValueError for shapes that do not fit.

    >>> import numpy as np
    >>> phi, kernel = np.array([[1.0], [2.0], [4.0]]), np.array([[10.0], [1.0]])
    >>> selective_steps(phi, kernel, np.ones(1))[0].ravel().tolist()
    [1.0, 12.0, 24.0]
    """
    xp, width, pairs = namespace(phi), kernel.shape[-2], phi.shape[-1]
    if tail is None:
        zeros = phi[..., :1, :] * 0 if phi.shape[-2] else phi.sum(axis=-2, keepdims=True)
        tail = xp.broadcast_to(zeros, (*phi.shape[:-2], width - 1, pairs))
    expected = (*phi.shape[:-2], width - 1, pairs)
    if (
        kernel.shape[-1] != pairs
        or tuple(temperature.shape) != (pairs,)
        or tuple(tail.shape) != expected
    ):
        raise ValueError(
            f"phi of {pairs} pairs and a kernel of {width} tokens need temperature ({pairs},) and "
            f"tail {expected}, got kernel {tuple(kernel.shape)}, temperature "
            f"{tuple(temperature.shape)} and tail {tuple(tail.shape)}"
        )
    row, seq = xp.concatenate((tail, phi), axis=-2), phi.shape[-2]
    parts = [
        row[..., first : first + seq, :] * kernel[..., first : first + 1, :]
        for first in range(width)
    ]
    return sum(parts[1:], start=parts[0]) * temperature, row[..., row.shape[-2] - (width - 1) :, :]
