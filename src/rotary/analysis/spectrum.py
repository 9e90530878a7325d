"""The frequencies of a RoPE, and how far each pair turns."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..angles import inv_freq
from ..spec import Rotary
from ..words import brief

Array = npt.NDArray[np.float64]
Axes = tuple[int, ...] | None  # which axes of the position change; None: all, as in text
MAX_LENGTH = 2**24  # tokens: 128 MiB in one array of float64
MAX_ANGLES = 2**27  # positions times pairs in one result: 1 GiB


def whole_number(name: str, value: object, least: int = 1, most: int = MAX_LENGTH) -> int:
    """Return `value` if it is a whole number in `least` .. `most`; else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be a whole number, got {brief(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be in {least:,} .. {most:,}, got {value:,}")
    return int(value)


def frequencies(spec: Rotary, seq_len: int | None = None, *, axes: Axes = None) -> Array:
    """(pairs,) float64: |inv_freq| in rad per token; 0 for pairs whose axis is not in `axes`.

    seq_len  length of the sequence, for the schedules that depend on it
    axes     which axes of the position change; None: all of them, as in text

    >>> frequencies(Rotary(head_dim=4, base=100.0))
    array([1. , 0.1])
    >>> frequencies(Rotary(head_dim=4, base=100.0, axes=(0, 1)), axes=(1,))
    array([0. , 0.1])
    """
    rates = np.abs(inv_freq(spec, seq_len)[0])
    if axes is None:
        return rates
    if not isinstance(axes, tuple | list):
        raise ValueError(f"axes must be a tuple of axis numbers, got {brief(axes)}")
    for axis in axes:
        whole_number("axes", axis, 0, spec.num_axes - 1)
    driven = np.array(spec.axes or (0,) * len(rates))
    return np.where(np.isin(driven, axes), rates, 0.0)


def still_pairs(spec: Rotary) -> float:
    """Return how many pairs the channels that are not rotated make: half their number.

    >>> still_pairs(Rotary(head_dim=128, rotary_dim=32))
    48.0
    """
    return (spec.head_dim - spec.rotary_dim) / 2


def whole_head(spec: Rotary, nope_head_dim: int) -> Rotary:
    """Return the RoPE of a head with channels before those of `spec`, which are not rotated.

    Latent attention has them, as qk_nope_head_dim; its RoPE is of the other channels alone.

    >>> whole_head(Rotary(head_dim=64), 128)  # DeepSeek-V3
    Rotary(head_dim=192, rotary_dim=64, start=128)
    """
    if not nope_head_dim:
        return spec
    return dataclasses.replace(
        spec, head_dim=spec.head_dim + nope_head_dim, start=spec.start + nope_head_dim
    )


def whole_numbers(
    name: str, values: object, least: int = 0, most: int = MAX_LENGTH
) -> npt.NDArray[np.int64]:
    """Return `values` as (len,) int64; ValueError if not whole numbers in `least` .. `most`.

    >>> whole_numbers("positions", [0, 4096])
    array([   0, 4096])
    """
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a list of whole numbers, got {array.dtype} of shape {array.shape}"
        )
    if array.size and not (least <= array.min() and array.max() <= most):
        raise ValueError(
            f"{name} must be in {least:,} .. {most:,}, got {array.min():,} .. {array.max():,}"
        )
    return array.astype(np.int64)


def check_size(name: str, count: int, each: int, most: int = MAX_ANGLES) -> None:
    """Raise ValueError if `count` times `each` numbers are more than `most`, a power of two."""
    if count * each > most:
        raise ValueError(
            f"{count:,} {name} x {each:,} are more than 2^{most.bit_length() - 1}; "
            "ask for fewer at a time"
        )


def row_blocks(count: int, each: int, most: int) -> Iterator[slice]:
    """Yield slices of `count` rows of `each` numbers, `most` numbers at a time; one for no rows."""
    rows = max(most // each, 1)
    for begin in range(0, max(count, 1), rows):
        yield slice(begin, min(begin + rows, count))


def number(
    name: str, value: object, *, least: float = -math.inf, above: float = -math.inf
) -> float:
    """Return `value` as a float if it is finite, >= `least` and > `above`; else raise ValueError.

    >>> number("turns", 0, above=0)
    Traceback (most recent call last):
    ValueError: turns must be > 0, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"{name} must be a number, got {brief(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {brief(value)}")
    if value < least or value <= above:
        bound = f"> {above:g}" if value <= above else f">= {least:g}"
        raise ValueError(f"{name} must be {bound}, got {brief(value)}")
    return float(value)


def before_scaling(spec: Rotary) -> Rotary:
    """Return the RoPE that the model was trained with before a scaling; `spec` if it has none.

    A scaling is recognized by its `original_max_position_embeddings`, the length of that training.
    A scaling without it (linear, ntk) is taken as part of the training, and so is LongRoPE with the
    same factors for short and long sequences (MiniCPM3): its frequencies are returned as `custom`.

    >>> params = {"factor": 4.0, "original_max_position_embeddings": 4096}
    >>> before_scaling(Rotary(head_dim=8, schedule="yarn", params=params))
    Rotary(head_dim=8)
    """
    if "original_max_position_embeddings" not in spec.params:
        return spec
    short, long = (spec.params.get(name) for name in ("short_factor", "long_factor"))
    if short == long and set(short or [1.0]) != {1.0}:
        values, factor = inv_freq(spec, 1)
        params = {"inv_freq": values.tolist(), "attention_factor": factor}
        return dataclasses.replace(spec, schedule="custom", params=params)
    return dataclasses.replace(spec, schedule="default", params={})


def wavelengths(spec: Rotary, seq_len: int | None = None) -> Array:
    """(pairs,) float64: tokens that each pair takes for one turn; inf for a pair that stands still.

    lambda_i = 2 pi / inv_freq_i; Peng et al., YaRN (arXiv 2309.00071), equation 14.

    >>> wavelengths(Rotary(head_dim=4, base=100.0)).round(2)
    array([ 6.28, 62.83])
    """
    with np.errstate(divide="ignore"):
        return 2 * math.pi / frequencies(spec, seq_len)


def turns_completed(spec: Rotary, length: int, seq_len: int | None = None) -> Array:
    """(pairs,) float64: turns that each pair makes in `length` tokens, length / wavelength.

    Peng et al., YaRN (arXiv 2309.00071), equation 17, where it is r(d). Raises ValueError for a
    length that is not a whole number in 1 .. 2^24.

    >>> turns_completed(Rotary(head_dim=4, base=100.0), 100).round(2)
    array([15.92,  1.59])
    """
    return whole_number("length", length) * frequencies(spec, seq_len) / (2 * math.pi)


def never_turning(spec: Rotary, length: int, seq_len: int | None = None) -> npt.NDArray[np.bool_]:
    """(pairs,) bool: True for pairs that make less than one whole turn in `length` tokens.

    Training at `length` has shown only part of the circle of such a pair. Raises as
    `turns_completed`.

    >>> never_turning(Rotary(head_dim=4), 100)
    array([False,  True])
    """
    return turns_completed(spec, length, seq_len) < 1


def critical_dimension(spec: Rotary, trained: int, seq_len: int | None = None) -> int:
    """Channels whose pairs make more than one turn in `trained` tokens; others extrapolate badly.

    For the geometric ladder of base b it is 2 ceil(d/2 log_b(trained / 2 pi)), the form in which
    Liu et al. (arXiv 2310.05209) define it; here pairs are counted, so any spec has one.
    Raises as `turns_completed`.

    >>> critical_dimension(Rotary(head_dim=128), 4096)  # Llama 2
    92
    """
    trained = whole_number("trained", trained)
    return 2 * int(np.count_nonzero(turns_completed(spec, trained, seq_len) > 1))


def extrapolation_length(base: float, critical_dim: int, head_dim: int) -> float:
    """Tokens to which a model tuned with `base` extrapolates: 2 pi base^(critical_dim / head_dim).

    critical_dim  of the model before tuning, from `critical_dimension`
    It is the wavelength of the first pair that is not trained on whole turns. Source: Liu et al.
    (arXiv 2310.05209), where it is T_extra. Raises ValueError for a base that is not finite and
    >= 1, and for a critical_dim beyond head_dim.

    >>> round(extrapolation_length(1e6, 92, 128))
    129027
    """
    head_dim = whole_number("head_dim", head_dim)
    critical_dim = whole_number("critical_dim", critical_dim, 0, head_dim)
    return 2 * math.pi * number("base", base, least=1) ** (critical_dim / head_dim)


def pair_with_turns(spec: Rotary, length: int, turns: float, seq_len: int | None = None) -> float:
    """Return the index, with a fraction, of the pair that makes `turns` turns in `length` tokens.

    Between two pairs, and before the first and beyond the last one, the logarithm of the frequency
    is a straight line, as it is all along the ladder of the paper. Pairs at the end that stand
    still are left out. Source: Peng et al., YaRN (arXiv 2309.00071), section 3.2; with d ladder
    channels it is d ln(length / (2 pi turns)) / (2 ln base).
    Raises ValueError for frequencies that do not fall from pair to pair, and for a single pair.

    >>> spec = Rotary(head_dim=128)
    >>> round(pair_with_turns(spec, 4096, 32), 1), round(pair_with_turns(spec, 4096, 1), 1)
    (20.9, 45.0)
    """
    length = whole_number("length", length)
    turns = number("turns", turns, above=0)
    rates = frequencies(spec, seq_len)
    moving = rates[: np.count_nonzero(rates)]
    if len(moving) < 2 or not (moving > 0).all() or not (np.diff(moving) < 0).all():
        raise ValueError(
            "frequencies must decrease from pair to pair for this function; "
            f"those of schedule {spec.schedule!r} do not: use turns_completed instead"
        )
    heights = -np.log(moving)
    height = -math.log(2 * math.pi * turns / length)
    left = int(np.clip(np.searchsorted(heights, height) - 1, 0, len(heights) - 2))
    return float(left + (height - heights[left]) / (heights[left + 1] - heights[left]))


def yarn_band(
    spec: Rotary,
    trained: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    seq_len: int | None = None,
) -> tuple[float, float]:
    """(first, last): YaRN keeps the pairs before `first` and interpolates those after `last`.

    `first` makes beta_fast turns in `trained` tokens, `last` beta_slow; neither is rounded or
    clipped to existing pairs. `spec` is the one that was trained, before any scaling.
    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.2. Raises as `pair_with_turns`, and
    ValueError if beta_fast < beta_slow.

    >>> [round(pair, 1) for pair in yarn_band(Rotary(head_dim=128, base=5e5), 8192)]  # Llama 3
    [18.1, 35.0]
    """
    if number("beta_fast", beta_fast) < number("beta_slow", beta_slow):
        raise ValueError(f"beta_fast must be >= beta_slow, got {beta_fast} < {beta_slow}")
    whole_number("trained", trained)
    first = pair_with_turns(spec, trained, beta_fast, seq_len)
    return first, pair_with_turns(spec, trained, beta_slow, seq_len)


def digits(position: int, base: float, head_dim: int) -> Array:
    """(head_dim / 2,) float64: the digits of `position` in base beta = base^(2 / head_dim).

    Digit i is floor(position / beta^i) mod beta, the lowest first. Beta is rarely whole, and then
    a digit may be a fraction, below beta. The angle of pair i is position / beta^i: the same
    number, with a circle in place of floor and mod. Source: Su, kexue.fm 9675.
    Raises ValueError for an odd head_dim, a base that is not finite and >= 1, and a position
    outside of 0 .. 2^24.

    >>> digits(2024, 1e4, 8)
    array([4., 2., 0., 2.])
    """
    position = whole_number("position", position, 0)
    if whole_number("head_dim", head_dim) % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    beta = number("base", base, least=1) ** (2 / head_dim)
    if abs(beta - round(beta)) < 1e-9:  # a whole beta must not lose a digit to rounding
        beta = float(round(beta))
    return np.floor(position / beta ** np.arange(head_dim // 2)) % beta
