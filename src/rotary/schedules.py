"""Inverse frequencies: one pure function per published schedule.

Every function takes `(rotary_dim, base, arithmetic, *, parameters)` and returns
`(inv_freq, attention_factor)`: `inv_freq` of shape (rotary_dim / 2,) in rad per token, and the
number that multiplies cos *and* sin, so scores are multiplied by its square. The keyword-only
arguments are the keys that `Rotary.params` may have, under the names of transformers'
`rope_parameters`. Only the keyword `seq_len` is not a parameter: a schedule that has it depends on
the length of the sequence.

`arithmetic` says in which number type the formula runs. float64 is the definition. The other one,
float32, repeats transformers' own order of operations, so that its tables can be compared bit for
bit; that is why a formula here is never rearranged.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Frequencies = tuple[npt.NDArray[np.floating], float]


class Arithmetic(NamedTuple):
    """The number type that a schedule computes in, and its powers, in which libraries differ.

    `powers` raises a number to an array of exponents, `power` one number to another.
    """

    dtype: type[np.floating]
    powers: Callable[[float, npt.NDArray[np.floating]], npt.NDArray[np.floating]]
    power: Callable[[float, float], float]


def _powers(base: float, exponents: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    # Python floats go through the C library: the same bits whatever vector unit the CPU has
    return np.array([base ** float(e) for e in exponents], dtype=np.float64)


def _powers_float32(base: float, exponents: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return _powers(float(np.float32(base)), exponents).astype(np.float32)


def _power_float32(x: float, exponent: float) -> float:
    return float(np.float32(float(np.float32(x)) ** float(np.float32(exponent))))


# of normal float32 numbers: a factor that becomes 0 or inf in float32 makes tables of NaN
FLOAT32_RANGE = (float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max))
FLOAT64 = Arithmetic(np.float64, _powers, pow)
FLOAT32 = Arithmetic(np.float32, _powers_float32, _power_float32)


def default(rotary_dim: int, base: float, arithmetic: Arithmetic = FLOAT64) -> Frequencies:
    """Inverse frequencies of the paper: base^(-2i / rotary_dim), i = 0 .. rotary_dim/2 - 1.

    Returns (inv_freq, 1.0): (rotary_dim / 2,) in rad per token.
    Source: Su et al., RoFormer (arXiv 2104.09864), section 3.2.2. Differs from it: i counts from 0.

    >>> default(4, 1e4)[0]
    array([1.  , 0.01])
    """
    return 1.0 / _ladder(rotary_dim, base, arithmetic), 1.0


def linear(
    rotary_dim: int, base: float, arithmetic: Arithmetic = FLOAT64, *, factor: float
) -> Frequencies:
    """Position interpolation: every frequency divided by `factor`.

    Source: Chen et al. (arXiv 2306.15595), equation 4. Differs from it: the frequency is divided,
    not the position, so positions stay integers.

    >>> linear(4, 1e4, factor=4)[0]
    array([0.25  , 0.0025])
    """
    _positive("factor", factor)
    return default(rotary_dim, base, arithmetic)[0] / factor, 1.0


def ntk(
    rotary_dim: int, base: float, arithmetic: Arithmetic = FLOAT64, *, factor: float
) -> Frequencies:
    """NTK-aware interpolation: the base grows to base * factor^(d / (d - 2)).

    The fastest pair keeps its frequency, the slowest is divided by exactly `factor`. With
    rotary_dim 2 there is one pair, of frequency 1 under every base, and nothing to stretch.
    Source: Su, kexue.fm 9675; Peng et al., YaRN (arXiv 2309.00071), definition 1.

    >>> ntk(4, 1e4, factor=4)[0]
    array([1.    , 0.0025])
    """
    _positive("factor", factor)
    return default(rotary_dim, grown_base(rotary_dim, base, factor, arithmetic), arithmetic)


def dynamic(
    rotary_dim: int,
    base: float,
    arithmetic: Arithmetic = FLOAT64,
    *,
    factor: float,
    original_max_position_embeddings: int,
    seq_len: int | None = None,
) -> Frequencies:
    """Dynamic NTK: the base grows once a sequence is longer than the trained length.

    n = max(seq_len, L), L = original_max_position_embeddings; the base is multiplied by
    (factor n / L - (factor - 1))^(d / (d - 2)). `seq_len=None` means a sequence within L.
    Source: transformers 5.24, `_compute_dynamic_ntk_parameters`, which calls L
    `max_position_embeddings`. Differs from it: rotary_dim 2 is defined (transformers divides by 0).

    >>> dynamic(4, 1e4, factor=4, original_max_position_embeddings=2048)[0]
    array([1.  , 0.01])
    >>> dynamic(4, 1e4, factor=4, original_max_position_embeddings=2048, seq_len=4096)[0]
    array([1.   , 0.002])
    """
    _positive("factor", factor)
    if factor > 2**53:
        raise ValueError(f"factor must be <= 2^53: {factor} - 1 is rounded to another number")
    trained = _length("original_max_position_embeddings", original_max_position_embeddings)
    number = arithmetic.dtype
    length = max(seq_len or 0, trained)
    growth = number(factor * length) / number(trained) - number(factor - 1)
    grown = grown_base(rotary_dim, base, float(growth), arithmetic)
    return default(rotary_dim, grown if length > trained else base, arithmetic)


def dynamic_linear(
    rotary_dim: int,
    base: float,
    arithmetic: Arithmetic = FLOAT64,
    *,
    factor: float,
    original_max_position_embeddings: int,
    seq_len: int | None = None,
) -> Frequencies:
    """Linear scaling by `factor`, and by the length of the row once that is more.

    L = original_max_position_embeddings; every frequency is divided by max(factor, seq_len / L), so
    no row has an angle that position L does not have. `seq_len=None` means a row within factor L.
    Source: TransformerEngine 2.20, `RotaryPositionEmbedding`, where the two parameters are called
    seq_len_interpolation_factor and pretrained_max_position_embeddings, and with only one of them
    nothing is scaled. Differs from it: the frequency is divided, not the position.

    >>> dynamic_linear(4, 1e4, factor=2, original_max_position_embeddings=2048)[0]
    array([0.5  , 0.005])
    >>> dynamic_linear(4, 1e4, factor=2, original_max_position_embeddings=2048, seq_len=8192)[0]
    array([0.25  , 0.0025])
    """
    _positive("factor", factor)
    trained = _length("original_max_position_embeddings", original_max_position_embeddings)
    number = arithmetic.dtype
    growth = max(number(factor), number(seq_len or 0) / number(trained))
    return default(rotary_dim, base, arithmetic)[0] / growth, 1.0


def yarn(
    rotary_dim: int,
    base: float,
    arithmetic: Arithmetic = FLOAT64,
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Frequencies:
    """YaRN: pairs that turn often are kept, pairs that turn little interpolated, a ramp between.

    A pair that makes r turns in L = original_max_position_embeddings sits at
    dim(r) = d ln(L / (2 pi r)) / (2 ln base); the ramp runs from dim(beta_fast) to dim(beta_slow),
    rounded outwards if `truncate`. attention_factor: as given; else, if mscale and mscale_all_dim
    are both non-zero, g(mscale) / g(mscale_all_dim); else g(1), with g(m) = 0.1 m ln(factor) + 1.
    Raises ValueError if beta_fast < beta_slow, or for base 1, which has no dim(r).
    Source: Peng et al. (arXiv 2309.00071), equations 17-19 and 22. Follows transformers 5.24,
    `_compute_yarn_parameters`: upper clamp at d - 1, 0.001 added where both ends meet.

    >>> yarn(8, 1e4, factor=4, original_max_position_embeddings=2048)[0]
    array([1.00e+00, 1.00e-01, 6.25e-03, 2.50e-04])
    """
    _positive("factor", factor)
    trained = _length("original_max_position_embeddings", original_max_position_embeddings)
    _positive("beta_fast", beta_fast)
    _positive("beta_slow", beta_slow)
    if beta_fast < beta_slow:
        raise ValueError(f"beta_fast must be >= beta_slow, got {beta_fast} < {beta_slow}")
    if base == 1:
        raise ValueError("base must be > 1 for schedule 'yarn', got 1: its ramp needs ln(base)")
    for name, scale in (("mscale", mscale), ("mscale_all_dim", mscale_all_dim)):
        if scale is not None and not (_is_number(scale) and 0 <= scale < math.inf):
            raise ValueError(f"{name} must be finite and >= 0, got {scale!r}")
    if not isinstance(truncate, bool):
        raise ValueError(f"truncate must be true or false, got {truncate!r}")

    def dimension(turns: float) -> float:
        return rotary_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # 0.001: transformers' guard against an empty ramp
    steps = np.arange(rotary_dim // 2, dtype=arithmetic.dtype)
    kept = 1 - np.clip((steps - low) / (high - low), 0, 1)
    ladder = _ladder(rotary_dim, base, arithmetic)
    inv_freq = 1.0 / (factor * ladder) * (1 - kept) + 1.0 / ladder * kept
    if attention_factor is None:
        if not (mscale and mscale_all_dim):
            mscale, mscale_all_dim = 1.0, 0.0
        attention_factor = yarn_amplitude(factor, mscale, mscale_all_dim)
    return inv_freq, _positive("attention_factor", attention_factor)


def longrope(
    rotary_dim: int,
    base: float,
    arithmetic: Arithmetic = FLOAT64,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    factor: float | None = None,
    attention_factor: float | None = None,
    short_mscale: float | None = None,
    long_mscale: float | None = None,
    seq_len: int | None = None,
) -> Frequencies:
    """LongRoPE: each frequency divided by its own factor, from one list up to L, another beyond.

    L = original_max_position_embeddings; `seq_len` > L takes `long_factor`, else `short_factor`.
    attention_factor: as given; else short_mscale / long_mscale, the one that goes with the list in
    use (Phi-3.5-MoE); else sqrt(1 + ln(factor) / ln(L)) for factor > 1, where transformers takes
    factor = max_position_embeddings / L if the config has none.
    Raises ValueError if a list has the wrong length or a value <= 0, or if two rules for the
    attention factor are given, or none.
    Source: Ding et al. (arXiv 2402.13753), section 3; transformers 5.24,
    `_compute_longrope_parameters`. Differs from it: phimoe there keeps the short list beyond L.

    >>> longrope(4, 1e4, short_factor=[1, 1], long_factor=[1, 4], factor=4, seq_len=9000,
    ...          original_max_position_embeddings=4096)[0]
    array([1.    , 0.0025])
    """
    trained = _length("original_max_position_embeddings", original_max_position_embeddings)
    _check_list("short_factor", short_factor, rotary_dim // 2)
    _check_list("long_factor", long_factor, rotary_dim // 2)
    is_long = seq_len is not None and seq_len > trained
    divisors = np.asarray(long_factor if is_long else short_factor, arithmetic.dtype)
    inv_freq = 1.0 / (divisors * _ladder(rotary_dim, base, arithmetic))

    if factor is not None:
        _positive("factor", factor)
    if (short_mscale is None) != (long_mscale is None):
        raise ValueError("short_mscale and long_mscale must be given together")
    if short_mscale is not None and long_mscale is not None:
        if attention_factor is not None:
            raise ValueError("give attention_factor or short_mscale and long_mscale, not both")
        _positive("short_mscale", short_mscale)
        _positive("long_mscale", long_mscale)
        return inv_freq, float(long_mscale if is_long else short_mscale)
    if attention_factor is not None:
        return inv_freq, _positive("attention_factor", attention_factor)
    if factor is None:
        raise ValueError(
            "longrope needs factor, attention_factor, or short_mscale and long_mscale; "
            "transformers takes factor = max_position_embeddings / original_max_position_embeddings"
        )
    return inv_freq, longrope_amplitude(factor, trained)


def llama3(
    rotary_dim: int,
    base: float,
    arithmetic: Arithmetic = FLOAT64,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Frequencies:
    """Llama 3.1: long wavelengths interpolated by `factor`, short ones kept, a blend between.

    With t = L inv_freq / 2 pi turns in L = original_max_position_embeddings tokens: t above
    high_freq_factor keeps the frequency, below low_freq_factor divides it by `factor`; between,
    the kept share is (t - low) / (high - low).
    Raises ValueError if high_freq_factor < low_freq_factor; equal means a step (Llama 4 Scout).
    Source: transformers 5.24, `_compute_llama3_parameters`. Differs from it: the step is computed
    without a division by zero.

    >>> llama3(4, 1e4, factor=8, low_freq_factor=1, high_freq_factor=4,
    ...        original_max_position_embeddings=8192)[0]
    array([1.  , 0.01])
    """
    _positive("factor", factor)
    trained = _length("original_max_position_embeddings", original_max_position_embeddings)
    _positive("low_freq_factor", low_freq_factor)
    _positive("high_freq_factor", high_freq_factor)
    if high_freq_factor < low_freq_factor:
        raise ValueError(
            "high_freq_factor must be >= low_freq_factor, "
            f"got {high_freq_factor} < {low_freq_factor}"
        )
    inv_freq = default(rotary_dim, base, arithmetic)[0]
    wavelength = 2 * math.pi * (1.0 / inv_freq)  # torch computes number / tensor in this way
    scaled = np.where(wavelength > trained / low_freq_factor, inv_freq / factor, inv_freq)
    if high_freq_factor == low_freq_factor:
        return scaled, 1.0
    turns = trained * (1.0 / wavelength)
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = (1 - kept) * scaled / factor + kept * scaled
    is_between = ~(wavelength < trained / high_freq_factor) & ~(
        wavelength > trained / low_freq_factor
    )
    return np.where(is_between, blend, scaled), 1.0


def proportional(
    rotary_dim: int,
    base: float,
    arithmetic: Arithmetic = FLOAT64,
    *,
    partial_rotary_factor: float,
    factor: float = 1.0,
) -> Frequencies:
    """p-RoPE: only the fastest share of the pairs turns, on the grid of the full width.

    The first int(partial_rotary_factor * rotary_dim // 2) pairs have base^(-2i / rotary_dim), the
    rest frequency 0; all are divided by `factor`. Not a leading slice: in the half layout the pairs
    that stand still lie in the middle of the head.
    Source: Barbero et al. (arXiv 2410.06205), section 6; transformers 5.24,
    `_compute_proportional_rope_parameters` (Gemma 4).

    >>> proportional(8, 1e4, partial_rotary_factor=0.5)[0]
    array([1. , 0.1, 0. , 0. ])
    """
    _positive("factor", factor)
    _positive("partial_rotary_factor", partial_rotary_factor)
    if partial_rotary_factor > 1:
        raise ValueError(f"partial_rotary_factor must be in (0, 1], got {partial_rotary_factor}")
    turning = int(partial_rotary_factor * rotary_dim // 2)
    inv_freq = np.zeros(rotary_dim // 2, arithmetic.dtype)
    inv_freq[:turning] = 1.0 / _ladder(rotary_dim, base, arithmetic)[:turning]
    return inv_freq / factor, 1.0


def ntk_mixed(
    rotary_dim: int,
    base: float,
    arithmetic: Arithmetic = FLOAT64,
    *,
    factor: float,
    b: float = 0.625,
) -> Frequencies:
    """NTK-RoPE-mixed: pair m = 1 .. d/2 divided by exp(a m^b), with a = ln(factor) / (d/2)^b.

    b = 0 is position interpolation, b = 1 NTK scaling with the first pair scaled too.
    Source: Su, kexue.fm 9706, whose best b is 0.625. vLLM calls it `ntk` with `mixed_b`.

    >>> ntk_mixed(4, 1e4, factor=4)[0]
    array([0.40701686, 0.0025    ])
    """
    _positive("factor", factor)
    if not _is_number(b) or not 0 <= b <= 1:
        raise ValueError(f"b must be in [0, 1], got {b!r}")
    pairs = rotary_dim // 2
    order = np.arange(1, pairs + 1, dtype=arithmetic.dtype)
    divisors = np.exp(math.log(factor) / pairs**b * order**b)
    return default(rotary_dim, base, arithmetic)[0] / divisors, 1.0


def axial(
    rotary_dim: int,
    base: float,
    arithmetic: Arithmetic = FLOAT64,
    *,
    num_axes: int | None = None,
    ladder: str = "blocks",
    widths: Sequence[int] | None = None,
) -> Frequencies:
    """Axial RoPE: the axes of a grid share the pairs; `Rotary.axes` says which axis drives which.

    A `Rotary` with more than one axis must be given `axes`, for example [0] * 16 + [1] * 16: some
    models turn the first pairs by rows (Qwen2-VL), some by columns (Kimi K2.5).

    num_axes  how many axes have equal shares
    widths    channels of each axis, where the shares are not equal (16, 56, 56): each has the
              ladder of its own width, one after another
    ladder    "blocks": every axis has the ladder of rotary_dim / num_axes channels, one after
              another; "turns": the same ladders, whose axes take turns: each frequency once per
              axis (this has nothing to do with the turns of `rotary.turns`);
              "dealt": one ladder of the full width, dealt out to the axes in turn
    Raises ValueError if rotary_dim is not a multiple of 2 num_axes, or not the sum of even widths.
    Source: Su, kexue.fm 8397; transformers 5.24, the vision towers of the Qwen2-VL family
    ("blocks"), Kimi K2.5 ("turns"), Pixtral ("dealt"); diffusers 0.42, Flux and Wan (`widths`).

    >>> axial(8, 1e4, num_axes=2)[0]
    array([1.  , 0.01, 1.  , 0.01])
    >>> axial(8, 1e4, num_axes=2, ladder="dealt")[0]
    array([1.   , 0.01 , 0.1  , 0.001])
    >>> axial(6, 1e4, widths=(2, 4))[0]
    array([1.  , 1.  , 0.01])
    """
    if widths is not None:
        return _of_widths(rotary_dim, base, arithmetic, num_axes, ladder, widths)
    if isinstance(num_axes, bool) or not isinstance(num_axes, int) or num_axes < 1:
        raise ValueError(f"num_axes must be a whole number >= 1, got {num_axes!r}")
    if rotary_dim % (2 * num_axes):
        raise ValueError(
            f"rotary_dim must be a multiple of 2 num_axes = {2 * num_axes}, got {rotary_dim}; "
            "for axes of unequal shares pass widths="
        )
    if ladder == "dealt":
        whole = default(rotary_dim, base, arithmetic)[0]
        return np.concatenate([whole[axis::num_axes] for axis in range(num_axes)]), 1.0
    own = default(rotary_dim // num_axes, base, arithmetic)[0]
    if ladder not in ("blocks", "turns"):
        raise ValueError(f'ladder must be "blocks", "turns" or "dealt", got {ladder!r}')
    return np.tile(own, num_axes) if ladder == "blocks" else np.repeat(own, num_axes), 1.0


def _of_widths(
    rotary_dim: int, base: float, arithmetic: Arithmetic, num_axes: int | None, ladder: str,
    widths: Sequence[int],
) -> Frequencies:  # fmt: skip
    is_list = isinstance(widths, Sequence) and not isinstance(widths, str) and len(widths) > 0
    if not is_list or not all(
        isinstance(width, int) and not isinstance(width, bool) and width > 0 and width % 2 == 0
        for width in widths
    ):
        raise ValueError(f"widths must be even numbers > 0, one for each axis, got {widths!r}")
    if sum(widths) != rotary_dim:
        raise ValueError(
            f"widths must sum to rotary_dim {rotary_dim}, got {tuple(widths)}, which is "
            f"{sum(widths)}"
        )
    if num_axes not in (None, len(widths)):
        raise ValueError(f"num_axes {num_axes} and {len(widths)} widths disagree; keep widths")
    if ladder != "blocks":
        raise ValueError(f'widths need ladder "blocks", got {ladder!r}')
    return np.concatenate([default(width, base, arithmetic)[0] for width in widths]), 1.0


def custom(
    rotary_dim: int,
    base: float,
    arithmetic: Arithmetic = FLOAT64,
    *,
    inv_freq: Sequence[float],
    attention_factor: float = 1.0,
) -> Frequencies:
    """Frequencies as given: any vector of rad per token is a RoPE; `base` has no effect.

    Raises ValueError if the length is not rotary_dim / 2 or a value is not finite.

    >>> custom(4, 1e4, inv_freq=[0.5, 0.0])[0]
    array([0.5, 0. ])
    """
    if len(inv_freq) != rotary_dim // 2:
        raise ValueError(
            f"inv_freq must have rotary_dim / 2 = {rotary_dim // 2} values, got {len(inv_freq)}"
        )
    if not all(_is_number(value) and math.isfinite(value) for value in inv_freq):
        raise ValueError("inv_freq must hold finite numbers only")
    return np.array(inv_freq, arithmetic.dtype), _positive("attention_factor", attention_factor)


Schedule = Callable[..., Frequencies]
SCHEDULES: dict[str, Schedule] = {
    "default": default,
    "linear": linear,
    "ntk": ntk,
    "dynamic": dynamic,
    "dynamic_linear": dynamic_linear,
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
    "proportional": proportional,
    "ntk_mixed": ntk_mixed,
    "axial": axial,
    "custom": custom,
}


@cache
def parameters(schedule: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a schedule by name: its keyword-only arguments without `seq_len`.

    >>> list(parameters("linear"))
    ['factor']
    """
    signature = inspect.signature(SCHEDULES[schedule]).parameters
    return {
        name: parameter
        for name, parameter in signature.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name != "seq_len"
    }


@cache
def depends_on_length(schedule: str) -> bool:
    """True if the frequencies of a schedule depend on the length of the row (`seq_len`).

    >>> depends_on_length("dynamic"), depends_on_length("yarn")
    (True, False)
    """
    return "seq_len" in inspect.signature(SCHEDULES[schedule]).parameters


def _ladder(rotary_dim: int, base: float, arithmetic: Arithmetic) -> npt.NDArray[np.floating]:
    number = arithmetic.dtype
    return arithmetic.powers(base, np.arange(0, rotary_dim, 2).astype(number) / number(rotary_dim))


def grown_base(
    rotary_dim: int, base: float, growth: float, arithmetic: Arithmetic = FLOAT64
) -> float:
    """Return the base of NTK scaling: base * growth^(d / (d - 2)); `base` if there is one pair.

    >>> grown_base(4, 1e4, 4.0)
    160000.0
    """
    if rotary_dim == 2:
        return base
    power = arithmetic.power(growth, rotary_dim / (rotary_dim - 2))
    return float(arithmetic.dtype(base) * arithmetic.dtype(power))


def yarn_amplitude(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """Return YaRN's attention factor, g(mscale) / g(mscale_all_dim), g(m) = 0.1 m ln(factor) + 1.

    The defaults are the paper's; DeepSeek sets both scales. The result is 1 for a factor <= 1.

    >>> round(yarn_amplitude(4.0), 4), yarn_amplitude(4.0, 0.7, 0.7)
    (1.1386, 1.0)
    """
    if factor <= 1:
        return 1.0
    gain, gain_all = (0.1 * scale * math.log(factor) + 1.0 for scale in (mscale, mscale_all_dim))
    return gain / gain_all


def longrope_amplitude(factor: float, trained: int) -> float:
    """Return LongRoPE's attention factor: sqrt(1 + ln(factor) / ln(trained)), 1 for factor <= 1.

    trained  the trained length, in tokens

    >>> longrope_amplitude(4.0, 4)
    1.4142135623730951
    """
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value!r}")
    if not FLOAT32_RANGE[0] <= value <= FLOAT32_RANGE[1]:
        raise ValueError(f"{name} must be in the range of float32, 1.2e-38 to 3.4e38, got {value}")
    return float(value)


def _length(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise ValueError(f"{name} must be a whole number of tokens >= 2, got {value!r}")
    return value


def _check_list(name: str, values: Sequence[float], length: int) -> None:
    if len(values) != length:
        raise ValueError(f"{name} must have rotary_dim / 2 = {length} values, got {len(values)}")
    for index, value in enumerate(values):
        _positive(f"{name}[{index}]", value)
