"""How scores depend on distance: the terms of a score, and the upper bound of RoFormer.

Each rotated pair of a query and of a key is read as a complex number, q_i and k_i. With the
attention factor a and h_i = a^2 q_i conj(k_i), the score that a model computes is

    (R_m q) . (R_n k)  =  Re sum_i h_i e^{i (m - n) theta_i}  +  the product of the other channels.

The bound also uses S_j = sum_{i<j} e^{i (m - n) theta_i}, which depends only on the frequencies.
A distance is m - n, the query's position minus the key's; it may be negative. Angles come from
64-bit turns, so they are right to 1e-11 rad at every distance up to 2^24.
Source: Su et al., RoFormer (arXiv 2104.09864), section 3.4.3.
"""

import math

import numpy as np
import numpy.typing as npt

from ..angles import inv_freq, turns
from ..layouts import pair_slices
from ..rotate import rotate
from ..spec import Rotary
from .spectrum import MAX_LENGTH, Array, Axes, check_size, frequencies, whole_numbers

Complex = npt.NDArray[np.complex128]
Whole = npt.NDArray[np.int64]
Turns = npt.NDArray[np.uint64]
Like = npt.ArrayLike


MAX_VALUES = 2**26  # of one result: 512 MiB of float64
_BLOCK = 2**17  # phasors computed at a time: 2 MiB, which fit into a cache of the CPU


def angles_at(
    spec: Rotary, distances: Like, *, seq_len: int | None = None, axes: Axes = None
) -> Array:
    """(*distances.shape, pairs) float64: distance * theta_i in rad, minus whole turns.

    distances  whole numbers up to 2^24 in size, of any shape
    seq_len    length of the sequence, for the schedules that depend on it
    axes       which axes of the position change with the distance; None: all, as in text
    `spec.sign` is included. Raises ValueError for other distances.

    >>> angles_at(Rotary(head_dim=4, base=100.0), [0, 1, -2])
    array([[ 0. ,  0. ],
           [ 1. ,  0.1],
           [-2. , -0.2]])
    """
    whole = _whole("distances", distances)
    steps = _steps(spec, seq_len, axes)
    check_size("distances", whole.size, len(steps), MAX_VALUES)
    return _angles(whole[..., None], steps)


def score(
    spec: Rotary,
    q: Like,
    k: Like,
    distance: Like,
    *,
    route: str = "rotated",
    seq_len: int | None = None,
    axes: Axes = None,
) -> Array:
    """(...) float64: the dot product of a rotated query and a rotated key, `distance` tokens apart.

    q, k      (..., head_dim), with the channels in `spec.layout`
    distance  whole numbers, of a shape that broadcasts with the leading axes of q and k
    route     "rotated": both vectors are rotated, then multiplied, as in a model;
              "complex": the sum of `pair_terms`; "matrix": q^T R_{n-m} k, with the dense matrix.
              They agree to rounding.
    This is what a model computes before the softmax, without 1 / sqrt(head_dim): cos and sin carry
    the attention factor a, so the rotated channels count a^2 times, the others once.
    Raises ValueError for an unknown route, and for arrays that are not finite or do not fit.
    Source: RoFormer (arXiv 2104.09864), equations 16 and 35.

    >>> spec = Rotary(head_dim=2)
    >>> [score(spec, [3.0, 4.0], [3.0, 4.0], 5, route=r).round(6) for r in ("rotated", "matrix")]
    [np.float64(7.091555), np.float64(7.091555)]
    """
    if route not in ("rotated", "complex", "matrix"):
        raise ValueError(f"route must be one of rotated, complex, matrix, got {route!r}")
    if route == "complex":
        terms = pair_terms(spec, q, k, distance, seq_len=seq_len, axes=axes)
        return terms.sum(axis=-1) + still_term(spec, q, k)
    q, k, distance = _operands(spec, q, k, distance)
    shape = q.shape[:-1]
    q, k, distance = q.reshape(-1, spec.head_dim), k.reshape(-1, spec.head_dim), distance.ravel()
    steps, a = _steps(spec, seq_len, axes), inv_freq(spec, seq_len)[1]
    if route == "rotated":
        k_at = np.abs(distance)  # both vectors are rotated, and no position is negative
        angles = [_angles(positions[:, None], steps) for positions in (k_at + distance, k_at)]
        rotated = [rotate(x, a * np.cos(turned), a * np.sin(turned), spec)
                   for x, turned in zip((q, k), angles, strict=True)]  # fmt: skip
        return np.einsum("nd,nd->n", *rotated).reshape(shape)[()]
    channels = np.arange(spec.head_dim)
    first, second = (channels[s] for s in pair_slices(spec.rotary_dim, spec.layout, spec.start))
    scores = np.empty(len(q))
    for row, angle in enumerate(_angles(-distance[:, None], steps)):
        matrix = np.eye(spec.head_dim)
        matrix[first, first] = matrix[second, second] = a * a * np.cos(angle)
        matrix[second, first] = a * a * np.sin(angle)
        matrix[first, second] = -matrix[second, first]
        scores[row] = q[row] @ matrix @ k[row]
    return scores.reshape(shape)[()]


def pair_terms(
    spec: Rotary, q: Like, k: Like, distance: Like, *, seq_len: int | None = None, axes: Axes = None
) -> Array:
    """(..., pairs) float64: what each pair adds to the score, Re(h_i e^{i distance theta_i}).

    Arguments and errors are those of `score`. The score is the sum of the terms and `still_term`.
    Source: RoFormer (arXiv 2104.09864), equation 35.

    >>> pair_terms(Rotary(head_dim=4), [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], 3).round(4)
    array([-1.98  ,  1.9991])
    """
    products, phases = _factors(spec, q, k, distance, seq_len, axes)
    return (products * phases).real


def still_term(spec: Rotary, q: Like, k: Like) -> Array:
    """(...) float64: what the channels that are not rotated add to the score, at any distance.

    >>> still_term(Rotary(head_dim=4, rotary_dim=2), [9.0, 9.0, 1.0, 2.0], [9.0, 9.0, 3.0, 4.0])
    np.float64(11.0)
    """
    q, k, _ = _operands(spec, q, k, 0)
    still = np.ones(spec.head_dim, bool)
    still[spec.start : spec.start + spec.rotary_dim] = False
    return (q[..., still] * k[..., still]).sum(axis=-1)


def attention_terms(
    spec: Rotary,
    q: Like,
    k: Like,
    positions: Like | None = None,
    *,
    key_positions: Like | None = None,
    seq_len: int | None = None,
) -> Array:
    """(pairs, seq_q, seq_k) float64: what each pair adds to every score of an attention map.

    q, k           (seq_q, head_dim) and (seq_k, head_dim): one head
    positions      of the queries: (seq_q,), or (seq_q, axes) for several axes; None: 0 .. seq_q - 1
    key_positions  of the keys; None: those of the queries
    The sum over pairs, plus `still_term(spec, q[:, None], k)`, is the scores before the softmax.
    No mask is applied. Raises ValueError for shapes that do not fit, and for more than 2^26 terms.

    >>> attention_terms(Rotary(head_dim=2), [[1.0, 0.0]] * 2, [[1.0, 0.0]] * 2).round(4)
    array([[[1.    , 0.5403],
            [0.5403, 1.    ]]])
    """
    q, k = _vectors(spec, "q", q), _vectors(spec, "k", k)
    if q.ndim != 2 or k.ndim != 2:
        raise ValueError(f"q and k must be (seq, head_dim), got {q.shape} and {k.shape}")
    steps = _steps(spec, seq_len, None)
    check_size("scores", len(q) * len(k), len(steps), MAX_VALUES)
    if key_positions is None and len(q) != len(k):
        raise ValueError(
            f"{len(q)} queries and {len(k)} keys need key_positions, the positions of the keys"
        )
    of_q = _token_positions(spec, "positions", positions, len(q))
    of_keys = positions if key_positions is None else key_positions
    of_k = _token_positions(spec, "key_positions", of_keys, len(k))
    first = _pairs(spec, q) * np.exp(1j * _angles(of_q, steps)) * inv_freq(spec, seq_len)[1] ** 2
    second = np.conj(_pairs(spec, k) * np.exp(1j * _angles(of_k, steps)))
    terms = np.empty((len(steps), len(q), len(k)))
    for pair, term in enumerate(terms):
        np.outer(first[:, pair].real, second[:, pair].real, out=term)
        term -= np.outer(first[:, pair].imag, second[:, pair].imag)
    return terms


def partial_sums(
    spec: Rotary, distances: Like, *, seq_len: int | None = None, axes: Axes = None
) -> Complex:
    """(len, pairs + 1) complex128: S_j = sum_{i<j} e^{i distance theta_i}, from S_0 = 0.

    A row is a path in the plane, with `pairs` steps of length 1: the steps of the fast pairs point
    in all directions, and the path is straight once distance * theta_i is well below 1.
    Arguments as in `angles_at`, distances (len,). Raises ValueError for more than 2^25 sums.
    Source: RoFormer (arXiv 2104.09864), section 3.4.3; the walk: Su, kexue.fm 8265.

    >>> partial_sums(Rotary(head_dim=4, base=100.0), [1]).round(4)
    array([[0.    +0.j    , 0.5403+0.8415j, 1.5353+0.9413j]])
    """
    row = checked_distances(distances)
    steps = _steps(spec, seq_len, axes)
    check_size("distances", len(row), len(steps) + 1, MAX_VALUES // 2)
    sums = np.zeros((len(row), len(steps) + 1), np.complex128)
    np.cumsum(np.exp(1j * _angles(row[:, None], steps)), axis=-1, out=sums[:, 1:])
    return sums


def abel_terms(
    spec: Rotary, q: Like, k: Like, distance: Like, *, seq_len: int | None = None, axes: Axes = None
) -> Complex:
    """(..., pairs) complex128: S_{i+1} (h_{i+1} - h_i), with h = 0 after the last pair.

    Arguments and errors are those of `score`. The score is `still_term` minus the sum of the real
    parts of these terms: the summation by parts that leads to the bound.
    Source: RoFormer (arXiv 2104.09864), equation 36.

    >>> ones = [1.0, 1.0, 1.0, 1.0]
    >>> terms, spec = abel_terms(Rotary(head_dim=4), ones, ones, 3), Rotary(head_dim=4)
    >>> bool(abs(-terms.real.sum() - score(spec, ones, ones, 3)) < 1e-12)
    True
    """
    products, phases = _factors(spec, q, k, distance, seq_len, axes)
    return np.cumsum(phases, axis=-1) * np.diff(products, append=0)


def score_bound(
    spec: Rotary, q: Like, k: Like, distance: Like, *, seq_len: int | None = None, axes: Axes = None
) -> Array:
    """(...) float64 >= |score|: max_i |h_{i+1} - h_i| * sum_i |S_{i+1}| + |still_term|.

    Arguments and errors are those of `score`. The largest difference includes the last one, from
    the last pair to h = 0. The bound is loose: for q and k of independent normal channels and
    head_dim 128, base 10,000, distances below 4096, |score| is 0.003 of it in the median and rarely
    over 0.03. It does not tell how a single score changes with distance.
    Source: RoFormer (arXiv 2104.09864), equation 37; here the channels that are not rotated and
    the attention factor are counted too.

    >>> ones = [1.0, 1.0, 1.0, 1.0]
    >>> score_bound(Rotary(head_dim=4), ones, ones, 3).round(4)
    np.float64(2.3428)
    """
    products, phases = _factors(spec, q, k, distance, seq_len, axes)
    sums = np.abs(np.cumsum(phases, axis=-1)).sum(axis=-1)
    bound = np.abs(np.diff(products, append=0)).max(axis=-1) * sums
    return bound + np.abs(still_term(spec, q, k))


def decay_curve(
    spec: Rotary, distances: Like, *, seq_len: int | None = None, axes: Axes = None
) -> Array:
    """(len,) float64: the mean over j = 1 .. pairs of |S_j|, the factor of the bound that decays.

    Arguments as in `angles_at`, distances (len,), up to 2^24 of them; memory does not grow with
    the number of pairs. Evenly spaced distances are several times faster. The curve starts at
    (pairs + 1) / 2 and wiggles as it falls; with equal frequencies (base 1) it is constant.
    Source: RoFormer (arXiv 2104.09864), section 3.4.3 and figure 2.

    >>> decay_curve(Rotary(head_dim=128), [0, 1, 100, 10_000]).round(3)
    array([32.5  , 31.538, 10.227,  3.859])
    """
    row = checked_distances(distances)
    steps = _steps(spec, seq_len, axes)
    size = max(_BLOCK // len(steps), 1)
    # e^{i (a + b) theta} = e^{i a theta} e^{i b theta}: evenly spaced blocks share the 2nd factor
    even = len(row) > size and np.ptp(np.diff(row)) == 0
    shared = _waves(row[:size] - row[0], steps) if even else None
    curve = np.empty(len(row))
    for begin in range(0, len(row), size):
        block = row[begin : begin + size]
        near = _waves(block, steps) if shared is None else shared
        first = _waves(block[:1] if even else np.zeros(1, np.int64), steps)[:, :, 0]
        along, across, total = np.zeros((3, len(block)))
        for cos, sin, c, s in zip(*near[:, :, : len(block)], *first, strict=True):
            along += cos * c - sin * s
            across += cos * s + sin * c
            total += np.sqrt(along * along + across * across)
        curve[begin : begin + size] = total / len(steps)
    return curve


def _waves(distances: Whole, steps: Turns) -> Array:
    """(2, pairs, len): cosines and sines of the angles."""
    angles = _angles(distances, steps[:, None])
    return np.stack((np.cos(angles), np.sin(angles)))


def _steps(spec: Rotary, seq_len: int | None, axes: Axes) -> Turns:
    """(pairs,) turns per token times `spec.sign`, 0 where the pair's axis is not in `axes`."""
    steps = turns(spec, seq_len)
    signed = steps if spec.sign > 0 else np.zeros_like(steps) - steps
    return np.where(frequencies(spec, seq_len, axes=axes) > 0, signed, np.uint64(0))


def _angles(distances: Whole, steps: Turns) -> Array:
    signed = (distances.astype(np.uint64) * steps).astype(np.int64)
    return signed * np.float64(2 * np.pi / 2**64)


def _factors(
    spec: Rotary, q: Like, k: Like, distance: Like, seq_len: int | None, axes: Axes
) -> tuple[Complex, Complex]:
    """h_i and e^{i distance theta_i} of every pair."""
    q, k, distance = _operands(spec, q, k, distance)
    phases = np.exp(1j * _angles(distance[..., None], _steps(spec, seq_len, axes)))
    a = inv_freq(spec, seq_len)[1]
    return a * a * _pairs(spec, q) * np.conj(_pairs(spec, k)), phases


def _pairs(spec: Rotary, x: Array) -> Complex:
    first, second = pair_slices(spec.rotary_dim, spec.layout, spec.start)
    return x[..., first] + 1j * x[..., second]


def _token_positions(spec: Rotary, name: str, positions: Like | None, count: int) -> Whole:
    """(count, pairs), or (count, 1) where all pairs read one axis."""
    if positions is None:
        if spec.num_axes > 1:
            raise ValueError(f"a spec with {spec.num_axes} axes needs {name} (seq, axes)")
        positions = np.arange(count)
    whole = _whole(name, positions)
    shape = (count, spec.num_axes) if spec.num_axes > 1 else (count,)
    if whole.shape != shape:
        raise ValueError(f"{name} must be of shape {shape}, got {whole.shape}")
    return whole[:, list(spec.axes)] if spec.num_axes > 1 else whole[:, None]


def _operands(spec: Rotary, q: Like, k: Like, distance: Like) -> tuple[Array, Array, Whole]:
    """Return q, k and the distances, checked and broadcast to the same leading axes."""
    q, k = _vectors(spec, "q", q), _vectors(spec, "k", k)
    whole = _whole("distance", distance)
    try:
        shape = np.broadcast_shapes(q.shape[:-1], k.shape[:-1], whole.shape)
    except ValueError:
        raise ValueError(
            "the leading axes of q, k and distance must broadcast, "
            f"got q {q.shape}, k {k.shape}, distance {whole.shape}"
        ) from None
    check_size("scores", math.prod(shape), spec.head_dim, MAX_VALUES)
    full = (*shape, spec.head_dim)
    return np.broadcast_to(q, full), np.broadcast_to(k, full), np.broadcast_to(whole, shape)


def _vectors(spec: Rotary, name: str, x: Like) -> Array:
    array = np.asarray(x)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must hold real numbers, got dtype {array.dtype}")
    if not array.ndim or array.shape[-1] != spec.head_dim:
        raise ValueError(f"{name} must be (..., head_dim = {spec.head_dim}), got {array.shape}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite: it holds NaN or infinity")
    return array


def checked_distances(distances: Like) -> Whole:
    """Return (len,) int64; ValueError if not at most 2^24 whole numbers up to 2^24 in size."""
    row = whole_numbers("distances", distances, -MAX_LENGTH)
    if len(row) > MAX_LENGTH:
        raise ValueError(f"distances must be at most 2^24 numbers, got {len(row):,}")
    return row


def _whole(name: str, values: Like) -> Whole:
    """Return `values` as int64 of their shape; ValueError if not whole numbers up to 2^24."""
    array = np.asarray(values)
    return whole_numbers(name, array.ravel(), -MAX_LENGTH).reshape(array.shape)
