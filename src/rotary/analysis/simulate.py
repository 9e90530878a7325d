"""Draws random queries and keys, and counts how often a similar key wins at a distance."""

from collections.abc import Iterator
from statistics import NormalDist

import numpy as np

from ..angles import inv_freq
from ..spec import Rotary
from .decay import Like, angles_at, checked_distances
from .spectrum import Array, Axes, check_size, number, row_blocks, still_pairs, whole_number

MAX_DRAWS = 2**18
MAX_SIZES = 2**27  # trials x pairs: 1 GiB of float64
MAX_SCORES = 2**30  # distances x trials: some minutes
_BLOCK = 2**20  # numbers computed at a time


def theorem_1(
    spec: Rotary,
    distances: Like,
    *,
    mean: float = 0.0,
    sigma: float = 1.0,
    noise: float = 0.5,
    other_mean: float | None = None,
    samples: int = 20_000,
    seed: int = 0,
    seq_len: int | None = None,
    axes: Axes = None,
) -> Array:
    """(len,) float64: (E[q^T R_m k*] - E[q^T R_m k]) / (2 sigma^2), the mean of `samples` draws.

    Every channel of q is normal with `mean` and `sigma`; k* = q + noise eps is a similar key, eps
    standard normal and independent of q; k is another one, drawn like q. The theorem says this is
    B_m = sum_i cos(m theta_i), plus one half for every channel that is not rotated.
    It holds only where q and k have the same mean. `other_mean`, the mean of k, shows other cases:
    for sigma 1 and mean 1, the result is 2 B_m with other_mean 0, and 0 with other_mean 2.
    R is the rotation alone, without the attention factor, as in B_m.

    distances, seq_len, axes as in `rotary.analysis.decay.angles_at`, distances (len,). All
    distances share the draws, so the errors of near distances are alike. At head_dim 128 and the
    defaults, the standard error is 0.07 at distance 0 and 0.06 at large distances. The same seed
    gives the same result.
    Raises ValueError for numbers that are not finite, for sigma <= 0, noise < 0, samples > 2^18.
    Source: Men et al. (arXiv 2405.14591), theorem 1.

    >>> theorem_1(Rotary(head_dim=128), [0, 10, 1000]).round(1)
    array([64. , 42.8, 10.2])
    """
    mean, sigma = number("mean", mean), number("sigma", sigma, above=0)
    random = _generator(noise, seed)
    other_mean = mean if other_mean is None else number("other_mean", other_mean)
    count = whole_number("samples", samples, 1, MAX_DRAWS)
    blocks = _angle_blocks(spec, distances, seq_len, axes, 1)

    # a score is linear in q_i conj(k_i), so the means of these products serve all distances
    products, still = np.zeros(spec.rotary_dim // 2, np.complex128), 0.0
    for rows in row_blocks(count, spec.head_dim, _BLOCK):
        shape = (rows.stop - rows.start, spec.head_dim)
        q = mean + sigma * random.standard_normal(shape)
        similar = q + noise * random.standard_normal(shape)
        difference = similar - other_mean - sigma * random.standard_normal(shape)
        # all channels have one distribution, so any two may make a pair
        turned, kept = np.split(np.stack((q, difference)), [spec.rotary_dim], axis=-1)
        of_q, of_k = turned[..., 0::2] + 1j * turned[..., 1::2]
        products += np.einsum("np,np->p", of_q, of_k.conj())
        still += float(np.vdot(*kept))

    sums = [(np.exp(1j * angles) @ products).real + still for angles in blocks]
    return np.concatenate(sums) / (2 * sigma**2 * count)


def retrieval(
    spec: Rotary,
    distances: Like,
    *,
    noise: float = 0.5,
    rivals: int = 1000,
    trials: int = 4000,
    seed: int = 0,
    seq_len: int | None = None,
    axes: Axes = None,
) -> Array:
    """(len,) float64 in 0 .. 1: how often a similar key scores higher than every random one.

    In every trial the channels of q are standard normal, the similar key is q + noise eps at the
    distance, and `rivals` keys are standard normal too. The positions of the rivals do not matter:
    the score of a random key has the same distribution at every distance. No weights are trained:
    the result depends on the frequencies alone, and follows the sign and size of B_m.

    Given q, the score of a rival is normal with variance s^2 = a^4 |rotated q|^2 + |rest of q|^2,
    where a is the attention factor. The score of the similar key is
    a^2 sum_i |q_i|^2 cos(m theta_i) + |rest of q|^2 plus noise s times a normal number. So |q_i|^2,
    that number and the best rival score are drawn from their exact distributions; no keys are.

    distances, seq_len, axes as in `rotary.analysis.decay.angles_at`, distances (len,). The standard
    error is at most 0.5 / sqrt(trials); all distances share the draws. The same seed gives the
    same result. Raises ValueError for noise < 0, rivals > 2^24, trials > 2^18, and for
    more than 2^30 distances x trials.
    Source: theorem 1 of Men et al. (arXiv 2405.14591), with a count in place of its mean.

    >>> retrieval(Rotary(head_dim=128), [100, 500, 1700]).round(1)
    array([1. , 0.5, 0. ])
    """
    random, rivals = _generator(noise, seed), whole_number("rivals", rivals)
    pairs, squared = spec.rotary_dim // 2, inv_freq(spec, seq_len)[1] ** 2
    count = whole_number("trials", trials, 1, min(MAX_DRAWS, MAX_SIZES // pairs))
    blocks = _angle_blocks(spec, distances, seq_len, axes, count)

    sizes = random.exponential(2.0, (count, pairs))  # |q_i|^2 of two standard normal channels
    rest = random.gamma(still_pairs(spec), 2.0, count)  # chi-squared, one degree per other channel
    spread = np.sqrt(squared**2 * sizes.sum(axis=1) + rest)
    # the best of N has the distribution Phi^N; its upper tail is 1 - u^(1/N)
    tail = -np.expm1(-random.exponential(size=count) / rivals)
    best = [-NormalDist().inv_cdf(share) for share in np.clip(tail, 1e-300, 1 - 1e-16)]
    needed = (np.array(best) - noise * random.standard_normal(count)) * spread - rest
    return np.concatenate(
        [(squared * np.cos(angles) @ sizes.T > needed).mean(axis=1) for angles in blocks]
    )


def _angle_blocks(
    spec: Rotary, distances: Like, seq_len: int | None, axes: Axes, draws: int
) -> Iterator[Array]:
    """Yield angles (rows, pairs) in blocks of so few rows that (rows, draws) numbers fit."""
    row = checked_distances(distances)
    check_size("distances", len(row), draws, MAX_SCORES)
    for rows in row_blocks(len(row), max(spec.rotary_dim // 2, draws), _BLOCK):
        yield angles_at(spec, row[rows], seq_len=seq_len, axes=axes)


def _generator(noise: float, seed: int) -> np.random.Generator:
    number("noise", noise, least=0)
    return np.random.default_rng(whole_number("seed", seed, 0, 2**63 - 1))
