"""Finds frequencies whose mean cosine comes nearest to a wanted curve: least squares, with a bound.

c_m = mean_i cos(m theta_i) of n frequencies is the curve of the measure that has 1 / n at each
theta_i. The curves of all measures on slowest .. fastest make a convex set, so the nearest one can
be found (`nearest_measure`). A hyperplane between this set and the wanted curves proves that no
frequencies, however many, come nearer (`lower_bound`). `polished` descends from the quantiles of
the measure, or from another start, to a local minimum for n frequencies; others may be lower.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .spectrum import Array, row_blocks

Distances = npt.NDArray[np.int64]

_EVERY = 256  # a sample has all distances up to this one
_SAMPLE = 2048  # distances that are fitted; errors and bounds count all distances
_ATOMS = 96  # frequencies that the search for a measure begins with
_ADDED = 16  # frequencies that a round of this search adds at most
_ROUNDS = 16
_STEPS = 80  # of a descent
_MAX_STEP = 0.3  # largest change of ln theta in one step
_GRID = 2**23  # values of one Fourier transform, at most


class Points(NamedTuple):
    """Distances at which lower <= c_m <= upper is wanted, with the weights of their errors."""

    at: Distances
    weight: Array
    lower: Array
    upper: Array

    def gap(self, curve: Array) -> Array:
        """Nearest wanted value minus the curve: 0 between lower and upper."""
        return np.clip(curve, self.lower, self.upper) - curve

    def error(self, curve: Array) -> float:
        """Root of the weighted mean square of the gap."""
        return float(np.sqrt(self.weight @ self.gap(curve) ** 2))

    def joined(self, other: "Points") -> "Points":
        """Return the points of both sets."""
        return Points(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


def every_distance(lower: Array, upper: Array) -> Points:
    """All distances 1 .. len(lower), weighted by 1 / m: every octave counts alike.

    >>> every_distance(np.zeros(2), np.ones(2)).weight
    array([0.66666667, 0.33333333])
    """
    at = np.arange(1, len(lower) + 1)
    return Points(at, 1.0 / at / (1.0 / at).sum(), lower, upper)


def sampled(points: Points, seed: int) -> Points:
    """All distances up to 256, then a random one of each of about 1800 intervals of equal ratio.

    Each random distance has the total weight of its interval.
    """
    length = len(points.at)
    ends = np.geomspace(_EVERY, length, _SAMPLE - _EVERY) if length > _EVERY else np.zeros(0)
    near = np.arange(min(length, _EVERY) + 1)
    edges = np.unique(np.concatenate([near, np.rint(ends).astype(np.int64)]))
    at = np.random.default_rng(seed).integers(edges[:-1], edges[1:])
    total = np.concatenate([[0.0], np.cumsum(points.weight)])
    return Points(at + 1, np.diff(total[edges]), points.lower[at], points.upper[at])


def mean_cosine(theta: Array, length: int, share: Array | None = None) -> Array:
    """(length,) float64: mean of cos(m theta) at m = 1 .. length, weighted by `share` if given."""
    share = np.full(len(theta), 1.0 / len(theta)) if share is None else share
    at, blocks = np.arange(1, length + 1), row_blocks(length, len(theta), 2**20)
    return np.concatenate([_cosines(at[rows], theta) @ share for rows in blocks])


def _cosines(distances: Distances, theta: Array) -> Array:
    return np.cos(np.multiply.outer(distances.astype(np.float64), theta))


def nearest_measure(points: Points, slowest: float, fastest: float) -> tuple[Array, Array]:
    """(theta rising, shares): a measure whose curve is nearly the nearest to what is wanted.

    This is the fully corrective conditional gradient method. A round finds the best shares of its
    frequencies by Newton's method, then adds the frequencies that would lower the error most.
    """
    theta = np.geomspace(slowest, fastest, _ATOMS)
    share = np.full(_ATOMS, 1.0 / _ATOMS)
    length = int(points.at.max())
    for _ in range(_ROUNDS):
        table = _cosines(points.at, theta)
        share = _shares(points, table, share)
        pull = points.weight * points.gap(table @ share)
        now = share @ (table.T @ pull)
        theta, share = theta[share > 0], share[share > 0]
        of_all = np.zeros(length)
        of_all[points.at - 1] = pull
        grid, height, _ = _waves(of_all, slowest, fastest, 16 * length)
        beside = np.concatenate([[-np.inf], height, [-np.inf]])
        is_peak = (height > now) & (height >= beside[:-2]) & (height > beside[2:])
        best = np.flatnonzero(is_peak)[np.argsort(-height[is_peak])[:_ADDED]]
        missed = float(pull @ points.gap(_cosines(points.at, theta) @ share))
        if not len(best) or height[best[0]] - now < 3e-3 * missed + 1e-14:
            break
        new = np.setdiff1d(np.clip(grid[best], slowest, fastest), theta)
        theta, share = np.concatenate([theta, new]), np.concatenate([share, np.zeros(len(new))])
    order = np.argsort(theta)
    return theta[order], share[order]


def _shares(points: Points, table: Array, share: Array) -> Array:
    """Return the shares of fixed frequencies whose curve is nearest, starting from `share`."""
    gap = points.gap(table @ share)
    value = points.weight @ gap**2
    for _ in range(20):
        active = points.weight * (gap != 0)
        hessian = table.T @ (active[:, None] * table)
        linear = table.T @ (active * (table @ share + gap))
        step = _least_on_simplex(hessian, linear, share > 0) - share
        size = 1.0
        while size > 1e-4:
            trial = share + size * step
            gap = points.gap(table @ trial)
            if points.weight @ gap**2 < value:
                break
            size /= 2
        else:
            return share
        share, before, value = np.maximum(trial, 0.0), value, points.weight @ gap**2
        if before - value < 1e-6 * before:
            break
    return share


def _least_on_simplex(hessian: Array, linear: Array, free: npt.NDArray[np.bool_]) -> Array:
    """Return the x >= 0 of sum 1 with the least x H x / 2 - linear x; it starts > 0 at `free`.

    Source: Lawson and Hanson, Solving Least Squares Problems, chapter 23. The condition on the sum
    is a row of large weight.
    """
    scale = float(np.trace(hessian)) / len(hessian) + 1e-12
    hessian = hessian + 1e4 * scale + 1e-10 * scale * np.eye(len(hessian))
    linear, free = linear + 1e4 * scale, free.copy()
    x = np.where(free, 1.0 / max(free.sum(), 1), 0.0)
    for _ in range(3 * len(x)):
        while free.any():
            at = np.flatnonzero(free)
            solved = np.linalg.solve(hessian[np.ix_(at, at)], linear[at])
            if (solved > 0).all():
                x[at] = solved
                break
            wrong = at[solved <= 0]
            x[at] += (x[wrong] / (x[wrong] - solved[solved <= 0])).min() * (solved - x[at])
            free &= x > 1e-12
            x[~free] = 0.0
        slope = np.where(free, -np.inf, linear - hessian @ x)
        if slope.max() <= 1e-9 * scale:
            break
        free[slope.argmax()] = True
    return x / x.sum()


def _waves(pull: Array, slowest: float, fastest: float, size: int) -> tuple[Array, Array, Array]:
    """Return a grid of theta in slowest .. fastest, h = sum_m pull_m cos(m theta), dh / dtheta."""
    size = min(1 << max(size - 1, 1).bit_length(), max(_GRID, 2 << len(pull).bit_length()))
    width = 2 * np.pi / size
    inside = slice(int(slowest / width), min(int(np.ceil(fastest / width)), size // 2) + 1)
    padded = np.zeros(size // 2 + 1, np.complex128)
    padded[1 : len(pull) + 1] = pull * (size / 2)
    height = np.fft.irfft(padded, size)[inside]
    padded[1 : len(pull) + 1] *= 1j * np.arange(1, len(pull) + 1)
    slope = np.fft.irfft(padded, size)[inside]
    return width * np.arange(inside.start, inside.stop, dtype=np.float64), height, slope


def lower_bound(points: Points, curve: Array, slowest: float, fastest: float) -> float:
    """Return an error that no frequencies in slowest .. fastest, however many, can go below.

    points  every distance 1 .. length
    curve   of a measure: the nearer it is to the nearest one, the higher the bound
    With r the gap of the curve and <,> the weighted product, every measure's curve c has
    <r, c> <= max h for h(theta) = sum_m w_m r_m cos(m theta), and every wanted curve y has
    <r, y> >= sum_m w_m r_m (lower_m where r_m > 0, upper_m where r_m < 0). So c and y are apart by
    at least the difference of these two over the norm of r. The maximum of h is bounded from above
    in each cell of a grid, by h and its slope at the grid point and a bound of h''.
    """
    gap = points.gap(curve)
    norm = points.error(curve)
    if norm == 0:
        return 0.0
    pull = points.weight * gap
    grid, height, slope = _waves(pull, slowest, fastest, max(256 * len(pull), 4096))
    half = (grid[1] - grid[0]) / 2
    bend = float(np.abs(pull) @ points.at.astype(np.float64) ** 2)
    most = float((height + half * np.abs(slope)).max()) + half**2 / 2 * bend
    least = float(pull @ np.where(gap > 0, points.lower, np.where(gap < 0, points.upper, 0.0)))
    return max(0.0, float((least - most) / norm) - 1e-12)


def quantiles(theta: Array, share: Array, count: int) -> Array:
    """(count,) frequencies, falling, at the quantiles (i + 1/2) / count of a measure.

    Between two frequencies of the measure, the share grows linearly in ln theta.
    """
    middle = np.cumsum(share) - share / 2
    at = (np.arange(count) + 0.5) / count
    return np.exp(np.interp(at, middle, np.log(theta)))[::-1]


def polished(points: Points, theta: Array, slowest: float, fastest: float) -> Array:
    """Frequencies, falling, at a local minimum of the error: Levenberg-Marquardt in ln theta."""
    low, high = np.log(slowest), np.log(fastest)
    x = np.clip(np.log(theta), low, high)
    root, m = np.sqrt(points.weight), points.at[:, None].astype(np.float64)

    def missed(x: Array) -> Array:
        return -root * points.gap(np.cos(m * np.exp(x)).mean(axis=1))

    now, damping = missed(x), 1e-3
    for _ in range(_STEPS):
        value = float(now @ now)
        angle = m * np.exp(x)
        jacobian = (root * (now != 0))[:, None] * angle * np.sin(angle) / -len(x)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ now
        size = np.diag(normal) + 1e-15
        free = np.flatnonzero(~(((x <= low) & (slope > 0)) | ((x >= high) & (slope < 0))))
        gained = 0.0
        while damping < 1e9 and len(free):
            damped = normal[np.ix_(free, free)] + np.diag(damping * size[free])
            trial = x.copy()
            trial[free] -= np.linalg.solve(damped, slope[free]).clip(-_MAX_STEP, _MAX_STEP)
            trial = np.clip(trial, low, high)
            remaining = missed(trial)
            gained = value - float(remaining @ remaining)
            if gained > 0:
                x, now = trial, remaining
                break
            damping *= 4
        damping = max(damping / 5, 1e-12)
        if gained <= 1e-7 * value or value < 1e-24:
            break
    return np.sort(np.exp(x))[::-1]
