"""Position encodings other than RoPE: the sinusoidal embedding, xPos, learned 2-D directions."""

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ..angles import check_range, cos_sin, inv_freq, turns
from ..kernels import Numbers, host, kernel_of
from ..rotate import rotate
from ..spec import Rotary, check_spec
from .arrays import Array, cast, float64_of, namespace, positions_of


def sinusoidal(positions: Numbers, dim: int, base: float = 10_000.0) -> npt.NDArray[np.float64]:
    """Return the additive embedding that RoPE replaces: (..., dim) float64, a NumPy array.

    positions  (...) whole numbers, at which angles are exact, or fractions as in `rotary.cos_sin`

    p[2t] = sin(position / base^(2t/dim)), p[2t + 1] = cos of the same angle. It is added to the
    token embeddings, before W_q, W_k and W_v. Its inner product depends on distance alone:
    p_m . p_n = sum_t cos((m - n) base^(-2t/dim)).
    It is made on the host: call it outside of functions that torch.compile or jax.jit compile.
    Raises TypeError and ValueError for positions that `rotary.cos_sin` refuses, except negative.
    Source: Vaswani et al. (arXiv 1706.03762), section 3.5.

    >>> sinusoidal(np.array([0, 1]), 2).round(4)
    array([[0.    , 1.    ],
           [0.8415, 0.5403]])
    """
    spec, where = Rotary(head_dim=dim, base=base), np.asarray(positions)
    kind, low, high = host().inspect(where)
    check_range(kind, low, high, allow_negative=True)
    if kind == "int":
        steps = turns(spec).astype(np.int64)
        angles = where.astype(np.int64)[..., None] * steps * (2 * np.pi / 2**64)
    else:
        angles = where.astype(np.float64)[..., None] * inv_freq(spec)[0]
    return np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(*angles.shape[:-1], dim)


def xpos(
    spec: Rotary,
    q: Array,
    k: Array,
    *,
    positions: object = None,
    origin: int = 0,
    scale_base: float = 512.0,
    gamma: float = 0.4,
    allow_negative: bool = False,
) -> tuple[Array, Array]:
    """Return q and k rotated by `spec`, q times zeta^m and k times zeta^-n: scores decay.

    Pair i of d/2 has zeta_i = ((i / (d/2) + gamma) / (1 + gamma))^(1 / scale_base). Positions m and
    n count from `origin`. The score of pair i has the factor zeta_i^(m - n), so a causal score
    decays. The origin cancels if it is the same for q and for every key, so cached keys stay right
    while decoding. An origin in the middle of the current sequence, as in the authors' code, moves
    while decoding.
    Raises ValueError for several axes, for a negative position unless `allow_negative`, and for one
    so far from the origin that a factor is beyond 2^64 (float16: 2^8, float64: 2^512): 18,000
    tokens, for gamma 0.4 and scale_base 512.
    Positions that are traced or on a GPU are not checked: too far from the origin gives infinity or
    NaN.
    On JAX it needs 64-bit types, as `mixed_cos_sin` does; without them it raises a TypeError.
    Source: Sun et al. (arXiv 2212.10554), algorithm 1.

    >>> q, k = xpos(Rotary(head_dim=2), np.ones((3, 2)), np.ones((3, 2)), scale_base=1, gamma=1)
    >>> (q[2] @ k[1] / (2 * np.cos(1))).round(6).item()
    0.5
    """
    check_spec(spec)
    if spec.num_axes > 1:
        raise ValueError(f"xPos needs one position axis, the spec has {spec.num_axes}")
    if not (scale_base > 0 and gamma > 0):
        raise ValueError(f"scale_base and gamma must be > 0, got {scale_base!r} and {gamma!r}")
    xp, kernel = namespace(q), kernel_of(q)
    positions = positions_of(positions, q)
    pairs = np.arange(spec.rotary_dim // 2) / (spec.rotary_dim // 2)
    rates = np.log((pairs + gamma) / (1 + gamma)) / scale_base
    _check_distance(positions - origin, -rates[0], q.dtype, k.dtype)
    exponents = cast(positions - origin, float64_of(q))[..., None] * kernel.as_positions(rates, q)
    cos, sin = cos_sin(spec, positions, allow_negative=allow_negative)
    width = xp.promote_types(q.dtype, xp.float32)
    up, down = cast(xp.exp(exponents), width), cast(xp.exp(-exponents), width)
    return (
        rotate(q, cos * up, sin * up, spec, seq_dim=-2),
        rotate(k, cos * down, sin * down, spec, seq_dim=-2),
    )


_BITS = {"float16": 8, "float64": 512}  # half the exponent range of a type; 64 for other types


def _check_distance(from_origin: Array, rate: float, *dtypes: object) -> None:
    _, first, last = kernel_of(from_origin).inspect(from_origin)
    if first is None or last is None:
        return
    bits = min(_BITS.get(str(dtype).rpartition(".")[2], 64) for dtype in dtypes)
    farthest, limit = max(-first, last), int(bits * math.log(2) / rate)
    if farthest > limit:
        raise ValueError(
            f"a position is {farthest:.0f} tokens from the origin, but the factors of xPos allow "
            f"{limit}: pass an origin near the positions, the same for q and all its keys, or a "
            "larger scale_base"
        )


def mixed_directions(
    head_dim: int, phases: npt.ArrayLike, base: float = 10.0
) -> npt.NDArray[np.float64]:
    """Return initial directions of RoPE-mixed: (2, heads, head_dim / 2) float64, rad per patch.

    Each head has head_dim / 4 frequencies base^(-4t/head_dim) in two orthogonal directions: at the
    angle `phases[h]` and a quarter turn further. Draw phases (heads,), in rad, uniformly from a
    full turn, separately for each layer; 0 is axial RoPE. Training then learns the directions.
    Raises ValueError unless head_dim is a multiple of 4 and phases is 1-D.
    Source: Heo et al. (arXiv 2403.13298), section 3.2, and the authors' `init_random_2d_freqs`.

    >>> mixed_directions(4, [0.0]).round(6).tolist()
    [[[1.0, 0.0]], [[0.0, 1.0]]]
    """
    turned = np.asarray(phases, np.float64)
    if head_dim < 4 or head_dim % 4 or turned.ndim != 1:
        raise ValueError(
            f"head_dim must be a multiple of 4 and phases (heads,), got {head_dim} and shape "
            f"{turned.shape}"
        )
    sizes = base ** (-np.arange(0, head_dim, 4) / head_dim)
    both = np.stack((turned, turned + np.pi / 2), axis=-1)[..., None]
    along = np.stack((np.cos(both), np.sin(both))) * sizes
    return along.reshape(2, len(turned), head_dim // 2)


def mixed_cos_sin(directions: Array, positions: Array) -> tuple[Array, Array]:
    """Return cos and sin of RoPE-mixed, where pair t of head h turns by x theta_x + y theta_y.

    directions  (axes, heads, pairs), float32 or float64, in rad per patch: theta_x, theta_y of each
                head of one layer; on torch a parameter, which gets its gradient
    positions   (seq, axes) or (batch, seq, axes). Whole numbers give exact turns: any offset gives
                the same scores. Fractions give float64 products.
    The tables are (1 or batch, heads, seq, pairs) in the dtype of directions, for 4-D q and k:
    `rotate((q, k), cos, sin, layout="interleaved")`, or "half", as the model pairs its channels.
    Raises ValueError for shapes that do not fit.
    Source: Heo et al. (arXiv 2403.13298), section 3.2, mixed learnable frequencies.

    >>> cos, sin = mixed_cos_sin(mixed_directions(4, [0.0]), np.array([[0, 0], [0, 1]]))
    >>> cos.round(4).tolist()
    [[[[1.0, 1.0], [1.0, 0.5403]]]]
    """
    xp = namespace(directions)
    positions = positions_of(positions, directions)
    axes = directions.shape[0]
    if directions.ndim != 3 or positions.ndim not in (2, 3) or positions.shape[-1] != axes:
        raise ValueError(
            "directions must be (axes, heads, pairs) and positions (seq, axes) or (batch, seq, "
            f"axes), got {tuple(directions.shape)} and {tuple(positions.shape)}"
        )
    positions = positions if positions.ndim == 3 else positions[None]
    steps = cast(directions, float64_of(directions))
    factors = cast(positions, xp.float64)
    if "int" in str(positions.dtype):
        # turns wrap without rounding; the second term is 0 and only carries the gradient
        constant = _constant(steps)
        angles = _exact(xp, positions, constant) + _summed(factors, steps - constant)
    else:
        angles = _summed(factors, steps)
    return cast(xp.cos(angles), directions.dtype), cast(xp.sin(angles), directions.dtype)


def _constant(x: Array) -> Array:
    """Return x detached from its gradient."""
    if namespace(x).__name__ == "jax.numpy":
        return sys.modules["jax"].lax.stop_gradient(x)
    return x.detach() if hasattr(x, "detach") else x


def _exact(xp: Any, positions: Array, steps: Array) -> Array:
    turned = steps / (2 * math.pi)
    whole = cast(xp.round((turned - xp.round(turned)) * 2.0**62), xp.int64)
    return cast(_summed(cast(positions, xp.int64), whole), xp.float64) * (2 * math.pi / 2**62)


def _summed(positions: Array, steps: Array) -> Array:
    """Sum over the axes of position times step: (batch, heads, seq, pairs)."""
    parts = [positions[:, None, :, axis, None] * steps[axis, :, None] for axis in range(len(steps))]
    return sum(parts[1:], start=parts[0])
