"""Finds the simplest schedule that explains measured frequencies.

The parameters of candidates are computed from the measured values and rounded to as few digits as
possible. The frequencies of a candidate come from the schedule itself. They are compared with the
measured ones at four levels: as precisely as the measurement, as precisely as float32 formulas, and
as frequencies that were rounded to float16 or bfloat16. The first match wins; without one, the
schedule is `custom`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ..analysis.precision import round_to
from ..kernels import Numbers as Array
from ..schedules import SCHEDULES
from ..spec import Rotary
from ..strict_json import JSON
from .pairs import wrapped

# rope_theta of released models; a base that is not round may be derived from one of them
BASES = (1e4, 5e5, 1e6, 1e5, 1.5e5, 1e7, 5e6, 2e6, 1.2e7, 4e4, 1.6e5, 8e6, 2.5e5)
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
LENGTHS = [2**n for n in range(8, 22)]  # nearly all trained lengths are powers of two
# Relative error of base^x in float32, as in transformers: x is off by 2^-24, so the power is by
# ln(base) times as much, 8e-7 for base 1e6; about four times that is allowed
FLOAT32_RATIO = 3e-6


class Measured(NamedTuple):
    """Measured frequencies (pairs,) in rad per token, their possible errors, the attention factor.

    `is_float32` says that the frequencies may come from float32 formulas.
    """

    inv_freq: Array
    noise: Array
    rotary_dim: int
    amplitude: float = 1.0
    amplitude_noise: float = 1e-6
    num_axes: int = 1
    is_float32: bool = True


class Fit(NamedTuple):
    """A schedule: name, base, params, its exact frequencies and its attention factor."""

    schedule: str
    base: float
    params: Mapping[str, JSON]
    inv_freq: Array
    factor: float = 1.0

    def spec(self, head: tuple[int, int, int, str, str], axes: Array, sign: int) -> Rotary:
        """Return the spec of a `head`: head_dim, rotary_dim, start, layout and out_layout."""
        head_dim, rotary_dim, start, layout, out_layout = head
        return Rotary(
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            start=start,
            base=self.base,
            layout=layout,
            out_layout=out_layout,
            schedule=self.schedule,
            params=self.params,
            axes=axes.tolist(),
            sign=sign,
        )


Candidate = tuple[str, float, dict[str, JSON]]


def fit(measured: Measured) -> Fit:
    """Return the simplest schedule that gives the measured frequencies and attention factor.

    >>> fit(Measured(np.array([1.0, 0.01]), np.full(2, 1e-9), 4))[:2]
    ('default', 10000.0)
    """
    for level in ("", *(("float32",) if measured.is_float32 else ()), "float16", "bfloat16"):
        for candidate in _candidates(measured, level):
            computed = _computed(*candidate, measured.rotary_dim)
            if computed and _matches(computed, measured, level):
                return computed
    if multiplied := _beyond_half_a_turn(measured):
        return multiplied
    if abs(measured.amplitude - 1) <= measured.amplitude_noise:
        params = {"inv_freq": measured.inv_freq.tolist()}
        return Fit("custom", 10_000.0, params, measured.inv_freq)
    plain = fit(measured._replace(amplitude=1.0))  # no schedule has this attention factor
    params = {"inv_freq": plain.inv_freq.tolist(), "attention_factor": measured.amplitude}
    return plain._replace(schedule="custom", base=10_000.0, params=params)


def _beyond_half_a_turn(measured: Measured) -> Fit | None:
    """Return the plain ladder times n > pi that has these frequencies modulo a turn, or None.

    The last quarter of the pairs, which turns less than half a turn per token, gives base and n.
    """
    size, count = measured.inv_freq, len(measured.inv_freq)
    index, slow = np.arange(count), slice(-max(2, count // 4), None)
    if count < 4 or not (np.diff(size[slow], prepend=math.pi) < 0).all() or size[-1] <= 0:
        return None
    slope, level = np.polyfit(index[slow], np.log(size[slow]), 1, w=size[slow])
    for base in rounded(math.exp(min(700.0, max(0.0, -slope * count))), range(1, 5)):
        scale = float((size * base ** (index / count))[slow][0])
        if abs(math.log(scale) - level) > 1e-2 or scale <= math.pi:
            continue
        for times in (*_turns_near(scale), *rounded(scale, range(1, 8))):
            computed = _computed("linear", base, {"factor": 1 / times}, measured.rotary_dim)
            if computed is None or abs(measured.amplitude - 1) > measured.amplitude_noise:
                continue
            off = wrapped(computed.inv_freq - size)
            if (np.abs(off) <= measured.noise + FLOAT32_RATIO * computed.inv_freq).all():
                return computed
    return None


def _computed(name: str, base: float, params: dict[str, JSON], rotary_dim: int) -> Fit | None:
    """Compute the schedule of a candidate; None if it refuses the parameters."""
    try:
        inv_freq, factor = SCHEDULES[name](rotary_dim, base, **params)
    except (ValueError, OverflowError, ZeroDivisionError):
        return None
    return Fit(name, base, params, np.asarray(inv_freq, np.float64), factor)


def _tolerance(measured: Measured, level: str) -> Array:
    """Return how far frequencies may be from the formula's, which are not rounded."""
    shares = {"": 0.0, "float32": FLOAT32_RATIO, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    least = 2.0**-25 if level == "float16" else 0.0  # half of its smallest step
    return measured.noise + np.abs(measured.inv_freq) * shares[level] + least


def _matches(computed: Fit, measured: Measured, level: str) -> bool:
    if abs(computed.factor - measured.amplitude) > measured.amplitude_noise:
        return False
    if not (np.abs(computed.inv_freq - measured.inv_freq) <= _tolerance(measured, level)).all():
        return False
    if level not in ("float16", "bfloat16"):
        return True
    error = np.abs(round_to(computed.inv_freq, level) - measured.inv_freq)
    return bool((error <= _tolerance(measured, "float32")).mean() >= 0.9)  # near ties may differ


def _candidates(measured: Measured, level: str) -> Iterator[Candidate]:
    """Yield schedules with their parameters, the simplest first."""
    size, tolerance = measured.inv_freq, _tolerance(measured, level)
    if (size < 0).any() or not size.any():
        return
    few, many = range(1, 5), range(5, 16)
    turning = int((size > 0).sum())
    if turning == len(size):
        ladder = _ladder(size, tolerance)
        yield from _geometric(ladder, few)
        yield from _ntk(ladder[0], measured.rotary_dim)
        yield from _ntk_mixed(size)
        yield from _geometric(ladder, many)
        yield from _bent(measured, tolerance)
        yield from _axial(size, tolerance, measured.num_axes)
    elif not size[turning:].any():
        ladder = _ladder(size[:turning], tolerance[:turning], len(size))
        yield from _geometric(ladder, few)  # the rest may be too slow to be seen
        share = {"partial_rotary_factor": turning / len(size)}
        for _, base, params in _geometric(ladder, range(1, 16)):
            yield "proportional", base, {**share, **params}


def _axial(size: Array, tolerance: Array, num_axes: int) -> Iterator[Candidate]:
    """Yield `axial`: the frequencies of each axis start again at 1."""
    starts = np.flatnonzero(np.abs(size - 1) <= tolerance)
    if num_axes == 1 or len(starts) != num_axes or starts[0] != 0:
        return
    shares = np.diff([*starts, len(size)])
    is_equal = (shares == shares[0]).all()
    params = {"num_axes": num_axes} if is_equal else {"widths": (2 * shares).tolist()}
    at, own = max(zip(starts, shares, strict=True), key=lambda each: int(each[1]))
    ladder = _ladder(size[at : at + own], tolerance[at : at + own])
    for base in rounded(ladder[0], range(1, 16)):
        yield "axial", base, params


def _geometric(ladder: tuple[float, float], digits: range) -> Iterator[Candidate]:
    base, scale = ladder
    for times in _turns_near(scale):
        for each in rounded(base, digits):
            yield "linear", each, {"factor": 1 / times}
    for count in digits:
        for each in rounded(base, [count]):
            yield "default", each, {}
            for factor in rounded(1 / scale, [count]):
                yield "linear", each, {"factor": factor}


def _ntk(grown: float, rotary_dim: int) -> Iterator[Candidate]:
    for base in BASES if rotary_dim > 2 else ():
        if grown > base:
            factor = (grown / base) ** ((rotary_dim - 2) / rotary_dim)
            for each in rounded(factor, [1, 2, 3]):
                yield "ntk", base, {"factor": each}


def _ntk_mixed(size: Array) -> Iterator[Candidate]:
    """Yield `ntk_mixed`, which divides pair m = 1 .. n by exp(a m^b): n gives factor, 1 gives b."""
    count = len(size)
    for base in BASES if count > 1 else ():
        first, last = 1 / size[0], base ** (-(count - 1) / count) / size[-1]
        if 1 < first < last:
            power = math.log(math.log(last) / math.log(first)) / math.log(count)
            for factor in rounded(last, [1, 2, 3]):
                for b in rounded(power, [1, 2, 3]):
                    yield "ntk_mixed", base, {"factor": factor, "b": b}


def _bent(measured: Measured, tolerance: Array) -> Iterator[Candidate]:
    """Yield llama3 and yarn: first a ladder, then a blend, at the end `factor` times slower."""
    size, d = measured.inv_freq, measured.rotary_dim
    index = np.arange(len(size))
    straight = _prefix(size, tolerance)
    if straight < 2 or straight == len(size):
        return
    grown = _ladder(size[:straight], tolerance[:straight], len(size))[0]
    for base in rounded(grown, range(1, 16)):
        plain = base ** (-index / len(size))
        if (np.abs(plain - size) > tolerance)[:straight].any():
            continue
        ratio = size / plain
        for factor in (*rounded(1 / ratio[-1], range(1, 5)), *FACTORS):
            if factor <= 1:
                continue
            kept = (ratio - 1 / factor) / (1 - 1 / factor)
            margin = 1e-3 + 4 * float((tolerance / size).max())
            between = (kept > margin) & (kept < 1 - margin)
            yield from _llama3(base, factor, kept[between], plain[between])
            ramp = kept[between], index[between], margin
            yield from _yarn(base, factor, ramp, measured.amplitude, d)
        return


def _llama3(base: float, factor: float, kept: Array, plain: Array) -> Iterator[Candidate]:
    """Yield llama3: the kept share is linear in the frequency; only ratios of its ends show."""

    def candidate(high: float, length: int) -> Candidate:
        return "llama3", base, {
            "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }  # fmt: skip

    yield candidate(4.0, 8192)
    if not len(kept):  # a step, where a pair makes one turn
        yield from (candidate(1.0, length) for length in (8192, *LENGTHS))
    if len(kept) < 2 or base == 1:  # equal frequencies make no line
        return
    slope, intercept = np.polyfit(plain, kept, 1)
    if slope > 0 > intercept:
        for high in rounded(1 - 1 / intercept, range(1, 8)):
            yield candidate(high, max(2, round(slope * math.tau * (high - 1))))


def _yarn(
    base: float, factor: float, ramp: tuple[Array, Array, float], amplitude: float, d: int
) -> Iterator[Candidate]:
    """Yield yarn: the kept share is linear in the index; many trained lengths give one line."""
    kept, index, margin = ramp
    lengths, exact = list(LENGTHS), []
    if len(kept) > 1:
        slope, intercept = np.polyfit(index, kept, 1)
        if slope >= 0 or np.abs(slope * index + intercept - kept).max() > margin + 1e-2:
            return
        low = (1 - intercept) / slope  # where the line reaches 1
        near = 32 * math.tau * base ** (2 * low / d)  # 32: beta_fast
        above = [near * base ** (step / 16 / d) for step in range(33)]  # low is rounded down
        several = (round(n) for digits in range(1, 8) for a in above for n in rounded(a, [digits]))
        lengths += dict.fromkeys(several)
        exact = [round(near)]
    scales: list[dict[str, JSON]] = [{}]
    scales += [{"attention_factor": value} for value in rounded(amplitude, range(1, 9))]
    for cut, choices in (({}, lengths), ({"truncate": False}, exact)):
        for length in choices:
            params = {"factor": factor, "original_max_position_embeddings": length, **cut}
            computed = _computed("yarn", base, params, d)
            seen = base ** (-2 * index / d) * ((1 - kept) / factor + kept)
            if computed and (np.abs(computed.inv_freq[index] / seen - 1) < margin + 1e-2).all():
                yield from (("yarn", base, {**params, **scale}) for scale in scales)


def _ladder(size: Array, tolerance: Array, pairs: int | None = None) -> tuple[float, float]:
    """(base, scale) of size_i = scale base^(-i / pairs): least squares, weighted by precision."""
    pairs = pairs or len(size)
    index = np.arange(len(size))
    if len(size) == 1:
        return 10_000.0, float(size[0])
    weights = size / np.maximum(tolerance, 1e-16)
    logs = np.log(size)
    if abs(size[0] - 1) <= tolerance[0]:
        slope = (weights**2 * index * logs).sum() / (weights**2 * index**2).sum()
        level = 0.0
    else:
        slope, level = np.polyfit(index, logs, 1, w=weights)
    return math.exp(min(700.0, max(0.0, -slope * pairs))), math.exp(level)


def _prefix(size: Array, tolerance: Array) -> int:
    """Return how many of the first pairs lie on one ladder that starts at 1."""
    if abs(size[0] - 1) > tolerance[0]:
        return 0
    count = len(size)
    for end in range(2, count + 1):
        base, _ = _ladder(size[:end], tolerance[:end], count)
        ladder = base ** (-np.arange(end) / count)
        if (np.abs(ladder - size[:end]) > 2 * tolerance[:end]).any():
            return end - 1
    return count


def _turns_near(scale: float) -> list[float]:
    """Return half a turn or a turn in rad if a ladder starts there."""
    return [turn for turn in (math.pi, math.tau) if abs(scale / turn - 1) < 1e-5]


def rounded(value: float, digits: Iterable[int]) -> list[float]:
    """Round to each number of digits, without repetition; no values unless 0 < value < inf."""
    if not 0 < value < math.inf:
        return []
    return list(dict.fromkeys(float(f"{value:.{count - 1}e}") for count in digits))


def nearest_length(trained: float) -> int:
    """Round a length to a power of two if that is within 1e-3 of it, else to a whole number.

    >>> nearest_length(4096.7), nearest_length(3000.2)
    (4096, 3000)
    """
    power = 2 ** round(math.log2(trained))
    return power if abs(power / trained - 1) < 1e-3 else round(trained)


def dynamic(
    base: float, rotary_dim: int, one: tuple[int, float], two: tuple[int, float]
) -> Fit | None:
    """Fit dynamic NTK to two (length n, growth); None if it does not fit.

    growth is how many times slower the slowest pair is in a row of n tokens: factor n / L -
    (factor - 1) for the trained length L, a straight line in n.

    >>> dynamic(1e4, 4, (4096, 5.0), (8192, 13.0)).params
    {'factor': 4.0, 'original_max_position_embeddings': 2048}
    """
    if rotary_dim == 2 or not 1 < one[1] < two[1]:
        return None
    (near, first), (far, second) = one, two
    slope = (second - first) / (far - near)
    for factor in rounded(1 + slope * near - first, range(1, 6)):
        length = nearest_length(factor / slope)
        line = [factor * n / length - (factor - 1) for n in (near, far)]
        if abs(line[0] / first - 1) < 1e-4 and abs(line[1] / second - 1) < 1e-4:
            params = {"factor": factor, "original_max_position_embeddings": length}
            return _computed("dynamic", base, params, rotary_dim)
    return None
