"""Compiled loops of `search.py`: B_m of many distances at one base, and of one over many bases.

With x = ln b and u_i = m theta_i(x), each derivative of B_m by x is a sum over pairs of (2i/d)^p
times a function of u_i, and u_i only falls as x grows. So the Taylor polynomial at x, with a bound
of the third derivative that is taken at x, is above B_m for all larger x. Where the polynomial is
negative, every base fails at m, and the search steps to its root.
"""

# mypy: ignore-errors
# compiled by Numba, from types mypy does not know

import math

import numpy as np

from ..kernels.cpu.compiled import compiled

GAP = 5e-10  # of ln b: steps shorter than this are counted as undecided
_BLOCK = 128  # distances that `_scan` computes at a time
_POOL = 128  # distances that are tried again at the next bases


# --- B_m of many distances at one base, in float32: finds distances for the float64 code ---


@compiled()
def _fill(theta, cos, sin):
    """cos and sin of j theta_i, (pairs, _BLOCK) float32."""
    for i in range(theta.size):
        step_cos, step_sin = math.cos(theta[i]), math.sin(theta[i])
        c, s = 1.0, 0.0
        for j in range(_BLOCK):
            cos[i, j], sin[i, j] = c, s
            c, s = c * step_cos - s * step_sin, s * step_cos + c * step_sin


@compiled(fastmath={"contract"})
def _add(cos, sin, c, s, i, total):
    """Add four pairs to the similarities of a block."""
    c0, c1, c2, c3 = c[i], c[i + 1], c[i + 2], c[i + 3]
    s0, s1, s2, s3 = s[i], s[i + 1], s[i + 2], s[i + 3]
    p0, p1, p2, p3 = cos[i], cos[i + 1], cos[i + 2], cos[i + 3]
    q0, q1, q2, q3 = sin[i], sin[i + 1], sin[i + 2], sin[i + 3]
    for j in range(_BLOCK):
        value = total[j]
        value += c0 * p0[j] - s0 * q0[j]
        value += c1 * p1[j] - s1 * q1[j]
        value += c2 * p2[j] - s2 * q2[j]
        value += c3 * p3[j] - s3 * q3[j]
        total[j] = value


@compiled()
def _scan(theta, cos, sin, still, first, last, threshold, below):
    """Write to `below` the distances of first .. last whose similarity is below `threshold`.

    Returns (count, next): stops when `below` is full; `next` is the first distance not scanned.
    """
    padded, pairs = cos.shape[0], theta.size
    c, s = np.cos(first * theta), np.sin(first * theta)
    turn_c, turn_s = np.cos(_BLOCK * theta), np.sin(_BLOCK * theta)
    short_c, short_s = np.zeros(padded, np.float32), np.zeros(padded, np.float32)
    total = np.empty(_BLOCK, np.float32)
    limit = np.float32(threshold)
    count = 0
    for start in range(first, last + 1, _BLOCK):
        for i in range(pairs):
            short_c[i], short_s[i] = c[i], s[i]
            c[i], s[i] = c[i] * turn_c[i] - s[i] * turn_s[i], s[i] * turn_c[i] + c[i] * turn_s[i]
        total[:] = np.float32(still)
        for i in range(0, padded, 4):
            _add(cos, sin, short_c, short_s, i, total)
        hits = 0
        for j in range(_BLOCK):
            hits += total[j] < limit
        if hits == 0:
            continue
        for j in range(min(_BLOCK, last + 1 - start)):
            if total[j] < limit:
                below[count] = start + j
                count += 1
                if count == below.size:
                    return count, start + j + 1
    return count, last + 1


# --- B_m of one distance and its derivatives by ln b, float64 ---

_ROUND = 1.5 * 2.0**52  # adding and subtracting it rounds to a whole number
_PI = (3.141592651605606, 1.9841871548575973e-09, 4.503483548312435e-18)  # 29 + 29 + 53 bits
# coefficients of sin r / r and of cos r in r^2, the highest power first
_S = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1))
_C = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(10, -1, -1))


@compiled(fastmath={"contract"})
def _turned(m, theta, u, cos, sin):
    """Compute u = m theta, cos u and sin u, to 1e-15, in loops that compile to vector code."""
    for i in range(theta.size):
        angle = m * theta[i]
        half_turns = (angle * (1 / math.pi) + _ROUND) - _ROUND
        odd = half_turns * 0.5 - ((half_turns * 0.5 + _ROUND) - _ROUND)
        sign = 1.0 - 4.0 * abs(odd)
        r = ((angle - half_turns * _PI[0]) - half_turns * _PI[1]) - half_turns * _PI[2]
        z = r * r
        a, b = _S[0], _C[0]
        for c in _S[1:]:  # unrolled by the compiler
            a = a * z + c
        for c in _C[1:]:
            b = b * z + c
        u[i], cos[i], sin[i] = angle, sign * b, sign * r * a


@compiled(fastmath=True)
def _sums(k, u, cos, sin):
    """Return B_m, its first two derivatives by ln b, and a bound of the third for larger bases.

    With ' = d/dx and u' = -k u: cos(u)' = k u sin u, cos(u)'' = -k^2 u (sin u + u cos u), and
    |cos(u)'''| = k^3 u |(1 - u^2) sin u + 3 u cos u| <= k^3 u min(u^2 + 3.5, u^3 + 4 u).
    """
    value = slope = curve = bound = 0.0
    for i in range(k.size):
        ku = k[i] * u[i]
        value += cos[i]
        slope += ku * sin[i]
        curve -= k[i] * ku * (sin[i] + u[i] * cos[i])
        square = u[i] * u[i]
        bound += k[i] * k[i] * ku * min(square + 3.5, u[i] * (square + 4.0))
    return value, slope, curve, bound


@compiled()
def _step(value, slope, curve, bound):
    """Return s such that value + slope t + curve t^2/2 + bound t^3/6 < 0 for all t in [0, s]."""
    # with a rising slope the polynomial may turn twice; without the falling term it is convex
    half = 0.5 * curve if curve > 0.0 or slope <= 0.0 else 0.0
    sixth = bound / 6.0
    s = 1e-12
    while s < 64.0 and value + s * (slope + s * (half + s * sixth)) < 0.0:
        s *= 4.0
    for _ in range(60):  # Newton from the right of the only root, where the curve is convex
        excess = value + s * (slope + s * (half + s * sixth))
        rise = slope + s * (2.0 * half + s * 3.0 * sixth)
        if excess <= 0.0 or rise <= 0.0:
            break
        shorter = s - excess / rise
        if shorter >= s * (1.0 - 1e-9):
            break
        s = shorter
    s *= 1.0 - 1e-6
    is_sound = value + s * (slope + s * (half + s * sixth)) < 0.0
    return s if s > 0.0 and is_sound else 0.0


@compiled()
def _reach(m, k, theta, still, noise, u, cos, sin):
    """Return how far above ln b of this base all bases fail at m; 0 if this base may pass at m."""
    _turned(float(m), theta, u, cos, sin)
    value, slope, curve, bound = _sums(k, u, cos, sin)
    value += still + noise * m + 1e-14 + 3e-16 * k.size * (k.size + still)
    return _step(value, slope, curve, bound) if value < 0.0 else 0.0


@compiled()
def search(low, high, k, still, context, stop):
    """Exclude bases from x = low on; return (x, last distance, undecided, largest distance).

    x >= high: the whole chunk is excluded; else x is the first base that passes. The two
    distances are the last and the largest of those that excluded an interval. A `stop[0]` other
    than 0 ends the search.
    """
    theta, u, c, s, cos, sin = _workspace(k.size)
    pool, size = np.empty(_POOL, np.int64), 0
    # distances with a small B_m at this base may fail at the next bases
    threshold = max(0.25 * math.sqrt(k.size), _scan_error(k.size, still))
    x, usual, undecided, binding, largest, jumped = low, 0.0, 0, 0, 0, False
    while x < high and stop[0] == 0:
        noise = 0.0
        for i in range(k.size):
            theta[i] = math.exp(-k[i] * x)
            noise += theta[i] * (3.0 + k[i] * x)
        noise *= 4e-15  # above the rounding of theta and of m theta
        best, winner = 0.0, binding
        if binding:
            best = _reach(binding, k, theta, still, noise, u, c, s)
        if best < 0.5 * usual:
            for n in range(size):
                reach = _reach(pool[n], k, theta, still, noise, u, c, s)
                if reach > best:
                    best, winner = reach, pool[n]
        if best < 0.25 * usual or best < GAP:
            _fill(theta, cos, sin)
            begin = 1
            while begin <= context and (best < 0.25 * usual or best < GAP):
                size, begin = _scan(theta, cos, sin, still, begin, context, threshold, pool)
                for n in range(size):
                    reach = _reach(pool[n], k, theta, still, noise, u, c, s)
                    if reach > best:
                        best, winner = reach, pool[n]
        if best == 0.0:
            return x, binding, undecided - jumped, largest
        jumped = best < GAP
        undecided += jumped
        binding = winner
        largest = max(largest, binding)
        usual = 0.9 * usual + 0.1 * best if usual > 0.0 else best
        x += max(best, GAP)
    return x, binding, undecided, largest


@compiled()
def passing(logs, k, still, context, stop):
    """Whether B_m >= 0 at every distance of the context, for each base e^x, x in rising `logs`.

    |dB_m/dx| <= m sum_i k_i theta_i, which falls with x. So after a scan of every distance, those
    with B_m above `margin` stay >= 0 until x has grown enough for B_m to fall by `margin`.
    """
    theta, u, c, s, cos, sin = _workspace(k.size)
    pool, size, failing = np.empty(8 * _POOL, np.int64), 0, 0
    unsure = _scan_error(k.size, still)
    known_to, margin = -1.0, 1.0 + unsure
    passes = np.zeros(logs.size, np.bool_)
    for n in range(logs.size):
        if stop[0]:
            break
        slope = 0.0
        for i in range(k.size):
            theta[i] = math.exp(-k[i] * logs[n])
            slope += k[i] * theta[i]
        failing = _negative(pool, size, failing, k, theta, still, u, c, s)
        if failing == size and logs[n] > known_to:
            _fill(theta, cos, sin)
            begin, looks = 1, 0
            while failing == size and begin <= context:
                size, begin = _scan(theta, cos, sin, still, begin, context, margin, pool)
                failing = _negative(pool, size, 0, k, theta, still, u, c, s)
                looks += 1
            known_to = -1.0  # unless the pool was large enough for one scan of all distances
            if looks == 1 and begin > context:
                known_to = logs[n] + (margin - unsure) / (context * slope + 1e-9)
            margin = max(unsure, margin * (1.5 if looks == 1 and size < _POOL else 0.7))
        passes[n] = failing == size
    return passes


@compiled()
def _scan_error(pairs, still):
    """Return a bound of the float32 error of `_scan`, which makes 2 * pairs rounded additions."""
    return 1e-4 + 2e-7 * pairs * (pairs + still)


@compiled()
def _negative(pool, size, first, k, theta, still, u, cos, sin):
    """Index of a distance of the pool with B_m < 0, tried from `first` on; `size` if none."""
    for n in range(size):
        at = n + first if n + first < size else n + first - size
        _turned(float(pool[at]), theta, u, cos, sin)
        if _sums(k, u, cos, sin)[0] + still < 0.0:
            return at
    return size


@compiled()
def _workspace(pairs):
    padded = (pairs + 3) // 4 * 4  # `_add` takes four pairs at a time
    rows = np.empty((4, pairs))
    tables = np.zeros((2, padded, _BLOCK), np.float32)
    return rows[0], rows[1], rows[2], rows[3], tables[0], tables[1]
