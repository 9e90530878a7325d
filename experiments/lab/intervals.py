"""How far apart two methods are, seed by seed, and whether the seeds resolve it.

Every table and every sentence of the experiments compares by `difference` alone.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """A mean that is 0 without an effect, and the ends of its 95 % interval by Student's t."""

    mean: float
    low: float
    high: float

    @property
    def is_resolved(self) -> bool:
        """Whether 0 is outside of the interval; never where the mean is not finite."""
        return self.low > 0 or self.high < 0

    def told(self, form: str = ".3f") -> str:
        """Mean, interval, and "not resolved" where the interval holds 0.

        >>> Difference(0.5, 0.25, 0.75).told(".2f"), Difference(0.5, -0.25, 1.25).told(".2f")
        ('+0.50 [+0.25, +0.75]', '+0.50 [-0.25, +1.25], not resolved')
        """
        if not math.isfinite(self.mean):
            return "diverged"
        mean, low, high = (_signed(value, form) for value in self)
        shown = f"{mean} [{low}, {high}]"
        return shown if self.is_resolved else f"{shown}, not resolved"


def _signed(value: float, form: str) -> str:
    """A number with its sign, which is + where it is written as 0."""
    shown = f"{value:+{form}}"
    return shown if float(shown) else shown.replace("-", "+", 1)


def difference(own: Mapping[int, float], other: Mapping[int, float]) -> Difference:
    """The mean of own - other, paired by seed, with its 95 % interval; each is {seed: number}.

    Raises ValueError where the two have other seeds.

    >>> difference({0: 3.0, 1: 5.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0}).told(".2f")
    '+2.00 [-0.48, +4.48], not resolved'
    """
    if own.keys() != other.keys():
        raise ValueError(f"a pair is two runs of one seed, got {sorted(own)} and {sorted(other)}")
    return mean({seed: own[seed] - other[seed] for seed in own})


def mean(values: Mapping[int, float]) -> Difference:
    """The mean of {seed: number} and its 95 % interval, as a difference from 0.

    One seed has an interval without ends, so nothing is resolved by it. Where a run diverged, and
    has no finite number, neither has the mean.
    """
    found = np.array([*values.values()], np.float64)
    if not np.isfinite(found).all():
        return Difference(math.nan, math.nan, math.nan)
    middle, half = float(found.mean()), math.inf
    if len(found) > 1:
        error = float(found.std(ddof=1)) / math.sqrt(len(found))
        half = quantile(len(found) - 1) * error if error else 0.0
    return Difference(middle, middle - half, middle + half)


def quantile(freedom: int) -> float:
    """The t that a variable of Student's distribution stays within, on both sides, 95 % of times.

    >>> [round(quantile(freedom), 3) for freedom in (1, 2, 4, 5)]
    [12.706, 4.303, 2.776, 2.571]
    """
    low, high = 0.0, 1000.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t), by the finite sum for whole degrees of freedom.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cos, sin = math.cos(angle), math.sin(angle)
    is_odd = freedom % 2
    term, total = (cos if is_odd else 1.0), 0.0
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= cos * cos * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sin * total) if is_odd else sin * total
