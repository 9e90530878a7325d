"""Designs frequencies whose B_m / B_0 comes nearest to a wanted curve over distance.

B_m / B_0, the mean of cos(m theta_i) over the pairs, says how much attention favours a similar key
at distance m (`bounds.similarity`). The order of the pairs does not matter in a mean, so
frequencies are returned fastest first. `fitting` has the numerics.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..spec import Rotary
from . import fitting
from .bounds import Certificate, certify, similarity
from .extension import methods
from .fitting import Points
from .search import min_base, rounded_up
from .spectrum import Array, frequencies, number, still_pairs, whole_number, whole_numbers

MAX_DESIGN = 2**18  # tokens
_STARTS = 48  # ladders of one base that a descent may begin from
_ENOUGH = 1e-6  # an error this little above the lower bound ends the search
_FLOOR_ROUNDS = 12  # descents of a start; each adds the distances that are still below the floor
# B_m / B_0 this far above the floor can be proved, in float64 and for frequencies in float32
_PROVABLE = 1e-7
_MARGIN = 1e-3  # added distances are to be this far above the floor, in B_m / B_0


class Wanted(NamedTuple):
    """The wanted B_m / B_0 at m = 1 .. length: between `lower` and `upper`, both (length,).

    floor  (length,): the least allowed value, to which `design` gives priority over the error
    """

    lower: Array
    upper: Array
    floor: Array


class Design(NamedTuple):
    """What `design` found.

    spec         the RoPE with these frequencies: schedule "custom"
    error        root mean square of the gap between B_m / B_0 and the wanted values; every octave
                 of distances counts alike
    lower_bound  no frequencies within the same bounds, however many, have a smaller error
    certificate  whether B_m keeps the floor at every distance, and by how much
    """

    spec: Rotary
    error: float
    lower_bound: float
    certificate: Certificate


def wanted_curve(
    curve: Callable[[Array], Array] | npt.ArrayLike, length: int, distances: object = None,
    *, floor: float | None = 0.0,
) -> Wanted:  # fmt: skip
    """Return a `Wanted` from a curve of B_m / B_0.

    curve      a function of the distances (length,), or values at `distances`: linear in ln m
               between these distances, and flat outside of them
    distances  (len,) whole numbers >= 1, rising; None: 1 .. length
    floor      the least allowed B_m / B_0; None: no floor
    Raises ValueError for values that are not in -1 .. 1 or not one for each distance.

    >>> wanted_curve(lambda m: 1 / m, 4).lower
    array([1.        , 0.5       , 0.33333333, 0.25      ])
    >>> wanted_curve([1.0, 0.0], 4, [1, 4]).lower.round(3)
    array([1.   , 0.5  , 0.208, 0.   ])
    """
    at = np.arange(1, _length(length) + 1)
    if callable(curve):
        values = np.asarray(curve(at.astype(np.float64)))
        places = at
    else:
        values = np.asarray(curve)
        places = at if distances is None else whole_numbers("distances", distances, 1)
    if values.shape != places.shape or values.dtype.kind not in "iuf" or not len(values):
        raise ValueError(
            f"a curve must be {len(places)} numbers, one for each distance, got {values.dtype} of "
            f"shape {values.shape}"
        )
    falls = np.flatnonzero(np.diff(places) <= 0)
    if len(falls):
        first, second = places[falls[0] : falls[0] + 2]
        raise ValueError(f"distances must rise, got {first:,} before {second:,}")
    outside = ~(np.abs(values) <= 1)
    if outside.any():
        raise ValueError(f"B_m / B_0 is in -1 .. 1, got {values[outside][0]} in the curve")
    line = np.interp(np.log(at), np.log(places), values.astype(np.float64))
    least = -np.inf if floor is None else number("floor", floor)
    return Wanted(line, line, np.full(len(at), least))


def wanted_level(
    at_least: float, until: int, length: int, *, power: float | None = None,
    scale: float | None = None, at_most: float | None = None,
) -> Wanted:  # fmt: skip
    """Return a `Wanted` with a least value up to a distance, and a choice of the rest.

    at_least  the least B_m / B_0 at m = 1 .. until, and the floor there; beyond, the floor is 0
    power     wanted beyond `until`: at_least (m / until)^-power
    scale     wanted beyond `until`: at_least exp(-(m - until) / scale), scale in tokens
    at_most   wanted beyond `until`: between 0 and at_most
    Give at most one of the last three; without them, any value >= 0 is wanted beyond `until`.
    Raises ValueError for two of them, for at_least or at_most outside of 0 .. 1, for a power or
    scale <= 0, and for until > length.

    >>> wanted_level(0.5, 2, 4, power=1).upper
    array([1.        , 1.        , 0.33333333, 0.25      ])
    """
    at = np.arange(1, _length(length) + 1)
    until = whole_number("until", until, 1, length)
    least = _share("at_least", at_least)
    beyond = {"power": power, "scale": scale, "at_most": at_most}
    given = [name for name, value in beyond.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"give one of power, scale and at_most, not {' and '.join(given)}")
    lower, upper = np.zeros(len(at)), np.ones(len(at))
    if power is not None:
        power = number("power", power, above=0)
        lower[:] = upper[:] = least * (at / until) ** -power
    elif scale is not None:
        scale = number("scale", scale, above=0)
        lower[:] = upper[:] = least * np.exp(-np.maximum(at - until, 0) / scale)
    elif at_most is not None:
        upper[:] = _share("at_most", at_most)
    near = at <= until
    lower[near], upper[near] = least, 1.0
    return Wanted(lower, upper, np.where(near, least, 0.0))


def wanted_reach(spec: Rotary, until: int, length: int) -> Wanted:
    """Return a `Wanted` with the B_m / B_0 of `spec` up to `until`, and B_m >= 0 up to `length`.

    Where the B_m of `spec` is negative, 0 is wanted. Raises ValueError for until > length.

    >>> wanted_reach(Rotary(head_dim=64), 100, 800).upper[[99, 100]].round(3)
    array([0.559, 1.   ])
    """
    at = np.arange(1, _length(length) + 1)
    until = whole_number("until", until, 1, length)
    own = np.maximum(similarity(spec, at, seq_len=length) / (spec.head_dim / 2), 0.0)
    near = at <= until
    return Wanted(np.where(near, own, 0.0), np.where(near, own, 1.0), np.zeros(len(at)))


def design(
    spec: Rotary,
    wanted: Wanted,
    *,
    fastest: float = 1.0,
    longest_wavelength: float | None = None,
    starts: int = 4,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Design:
    """Find frequencies whose B_m / B_0 comes nearest to `wanted`, above its floor if possible.

    spec      gives the head, slice, layout and sign; its frequencies are replaced
    wanted    from `wanted_curve`, `wanted_level` or `wanted_reach`, over m = 1 .. length
    fastest   the largest frequency in rad per token, up to pi
    longest_wavelength  of the slowest pair in tokens; default 64 length: 0.1 rad at `length`
    starts    the number of descents
    seed      chooses the distances that are fitted
    The minimized error is sum_m w_m dist(B_m / B_0, [lower_m, upper_m])^2, w_m proportional to
    1 / m. It has many local minima: descents start from the frequencies of `spec`, from the
    quantiles of the nearest measure (`fitting`) and from the best ladders of one base; distances
    below the floor are then added with a large weight. If some descents keep the floor, the result
    is the one of them with the least error; if none does, the one that falls the least below.
    `lower_bound` limits how much nearer other frequencies could come, even without a floor. The
    same arguments give the same result on one machine.
    Raises ValueError for a spec of several axes, and for numbers out of range.

    >>> head = Rotary(head_dim=32)  # its B_m is negative at 474 tokens
    >>> found = design(head, wanted_reach(head, 128, 1024))
    >>> found.certificate.holds, found.error < 1e-4
    (True, True)
    """
    length = len(wanted.lower)
    slowest = _slowest(spec, length, fastest, longest_wavelength)
    starts = whole_number("starts", starts, 1, _STARTS)
    report = progress or (lambda share: None)
    pairs = spec.rotary_dim // 2
    turning = pairs / (pairs + still_pairs(spec))  # B_m / B_0 = turning * c_m + 1 - turning

    def of_pairs(values: Array) -> Array:
        return (values - (1 - turning)) / turning

    floor = of_pairs(wanted.floor)
    points = fitting.every_distance(of_pairs(wanted.lower), of_pairs(wanted.upper))
    sample = fitting.sampled(points, whole_number("seed", seed, 0, 2**63 - 1))
    theta, share = fitting.nearest_measure(sample, slowest, fastest)
    bound = fitting.lower_bound(points, fitting.mean_cosine(theta, length, share), slowest, fastest)
    own = np.clip(frequencies(spec, length), slowest, fastest)
    ladders = _ladders(sample, pairs, slowest, fastest)
    candidates = [own, fitting.quantiles(theta, share, pairs), *ladders]
    descents = []
    for index, start in enumerate(candidates[:starts]):
        report((index + 1) / (starts + 1))
        descents.append(_descended(points, sample, floor, start, slowest, fastest))
        if descents[-1][0] == 0 and descents[-1][1] <= bound + _ENOUGH:
            break
    _, error, best = min(descents, key=lambda each: each[:2])
    params = {"inv_freq": best.tolist()}
    designed = dataclasses.replace(spec, schedule="custom", params=params)
    report(1.0)
    return Design(
        designed, turning * error, turning * bound, certify(designed, length, wanted.floor)
    )


def misses(spec: Rotary, wanted: Wanted, *, seq_len: int | None = None) -> float:
    """Return the error of `spec` against `wanted`, as in `Design.error`: 0 if all of it is met.

    seq_len  length of the sequence, for schedules that depend on it; default that of `wanted`

    >>> head = Rotary(head_dim=64)
    >>> misses(head, wanted_reach(head, 100, 100))
    0.0
    """
    length = len(wanted.lower)
    curve = similarity(spec, np.arange(1, length + 1), seq_len=seq_len or length)
    return fitting.every_distance(wanted.lower, wanted.upper).error(curve / (spec.head_dim / 2))


def alternatives(
    spec: Rotary, length: int, trained: int | None = None, *,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Rotary]:  # fmt: skip
    """Name -> RoPEs that may reach `length`, to be compared with a design by `misses`.

    spec     is "as it is"; next comes the smallest base of `min_base`, rounded up
    trained  a shorter length, from which the methods of `extension.methods` stretch `spec`
    For a spec with base 1, with several axes or with a schedule other than "default" there is only
    "as it is". `progress` is that of `min_base`.

    >>> list(alternatives(Rotary(head_dim=64), 512, 128))
    ['as it is', 'base 3,438.91', 'linear', 'ntk', 'ntk_mixed', 'yarn', 'llama3', 'longrope']
    """
    specs = {"as it is": spec}
    if spec.schedule != "default" or spec.num_axes > 1 or spec.base == 1:
        return specs
    head, rotary_dim = spec.head_dim, spec.rotary_dim
    least = min_base(length, head, rotary_dim=rotary_dim, progress=progress).base
    base = rounded_up(least, length, head, rotary_dim=rotary_dim)
    if base > 1:
        specs[f"base {base:,f}"] = dataclasses.replace(spec, base=float(base))
    if trained is not None and 2 <= trained < length:
        stretched = methods(spec, trained, length)
        specs |= {name: each for name, each in stretched.items() if name != "none"}
    return specs


def _descended(
    points: Points, sample: Points, floor: Array, theta: Array, slowest: float, fastest: float
) -> tuple[float, float, Array]:
    """(how far it falls below the floor, error, frequencies) of a descent from `theta`."""
    best = np.inf, np.inf, theta
    for doublings in range(_FLOOR_ROUNDS):
        theta = fitting.polished(sample, theta, slowest, fastest)
        curve = fitting.mean_cosine(theta, len(floor))
        above = curve - floor
        reached = (max(0.0, _PROVABLE - float(above.min())), points.error(curve), theta)
        best = min(best, reached, key=lambda each: each[:2])
        if above.min() > _PROVABLE:
            break
        ends = np.concatenate([[np.inf], above, [np.inf]])
        dips = np.flatnonzero((above <= _PROVABLE) & (above <= ends[:-2]) & (above < ends[2:]))
        at = dips[np.argsort(above[dips])[:256]] + 1
        weight = np.full(len(at), 2.0**doublings / 256)
        added = Points(at, weight, floor[at - 1] + _MARGIN, np.full(len(at), np.inf))
        sample = sample.joined(added)
    return best


def _ladders(sample: Points, pairs: int, slowest: float, fastest: float) -> list[Array]:
    """Return ladders of one base between the bounds, the one with the least error first."""
    grid = np.geomspace(1.0, max(fastest / slowest, 2.0), _STARTS + 1)[1:]
    ladders = [fastest * base ** (-np.arange(pairs) / pairs) for base in grid]
    return sorted(ladders, key=lambda each: sample.error(
        np.cos(sample.at[:, None] * each).mean(axis=1)))  # fmt: skip


def _slowest(spec: Rotary, length: int, fastest: float, longest: float | None) -> float:
    if spec.num_axes > 1:
        raise ValueError(f"a design is for one axis of positions, this spec has {spec.num_axes}")
    if not 0 < number("fastest", fastest) <= np.pi:
        raise ValueError(f"fastest must be in 0 .. pi rad per token, got {fastest}")
    longest = 64.0 * length if longest is None else number("longest_wavelength", longest)
    if not longest * fastest > 2 * np.pi:
        raise ValueError(
            f"longest_wavelength {longest:g} must be longer than that of the fastest pair, "
            f"{2 * np.pi / fastest:g} tokens"
        )
    return float(2 * np.pi / longest)


def _length(length: int) -> int:
    return whole_number("length", length, 2, MAX_DESIGN)


def _share(name: str, value: float) -> float:
    if not 0 <= number(name, value) <= 1:
        raise ValueError(f"{name} is a share of B_0, in 0 .. 1; got {value}")
    return float(value)
