"""Formulas of published faults of frequencies and attention factors, and the text for each.

A fault is only a finding if the numbers agree with its formula as exactly as they were measured.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from ..kernels import Numbers as Array
from ..schedules import yarn_amplitude
from .fit import BASES, FLOAT32_RATIO, Fit, Measured, fit, rounded
from .pairs import Pairs, wrapped
from .probe import Finding

NEAR = 64  # positions around which neighbours are told apart in every float type

# code, text, and the exponent (from rotary_dim, head_dim) that makes the measured base a usual one
EXPONENTS: tuple[tuple[str, Callable[[int, int], float], str], ...] = (
    (
        "denominator", lambda d, width: width / d,
        "these are the frequencies of base {base:g} with head_dim {width} in the exponent, not "
        "rotary_dim {d}",
    ),
    (
        "last_pair_at_base", lambda d, width: (d - 2) / d,
        "the exponents of base {base:g} run to 1, as linspace(0, 1, {pairs}) has them, not to "
        "1 - 2 / {d}",
    ),
)  # fmt: skip

# code, text, and a wrong attention factor of YaRN from the right one, g = 0.1 ln(factor) + 1
AMPLITUDES: tuple[tuple[str, Callable[[float], float], str], ...] = (
    (
        "no_attention_factor", lambda g: 1.0,
        "cos and sin are not multiplied by the {g:.6g} of YaRN by {factor:g}: it is missing, or "
        "is part of the softmax scale (DeepSeek)",
    ),
    (
        "attention_factor_twice", lambda g: g * g,
        "cos and sin are multiplied by {g:.6g} twice: the attention factor of YaRN by {factor:g} "
        "is applied in the tables and again after them",
    ),
    (
        "attention_factor_divides", lambda g: 1 / g,
        "cos and sin are divided by {g:.6g}, the attention factor of YaRN by {factor:g}, not "
        "multiplied",
    ),
)  # fmt: skip


def odd_frequencies(measured: Measured, explained: Fit, head_dim: int) -> Iterator[Finding]:
    """Yield findings about frequencies that published faults give."""
    d = measured.rotary_dim
    if explained.schedule == "custom":  # perhaps only because none has this attention factor
        explained = fit(measured._replace(amplitude=1.0))
    name, base = explained.schedule, explained.base
    if name == "custom":
        yield from _odd_list(measured)
    if name == "linear":
        factor = explained.params["factor"]
        if factor < 1:
            text = f"every angle is {1 / factor:.10g} times that of base {base:g}"
            if factor == 0.5:
                text += ": it is rotated twice"
            elif math.isclose(factor * math.tau, 1):
                text += ": that is 2 pi"
            yield Finding("frequencies_multiplied", text)
        yield from _odd_factor(factor, base, d)
    if name in ("default", "linear") and base not in BASES:
        for code, exponent, text in EXPONENTS:
            power = base ** exponent(d, head_dim)
            for usual in BASES:
                if abs(power / usual - 1) < 1e-4 < abs(base / usual - 1):
                    known = text.format(base=usual, d=d, width=head_dim, pairs=d // 2)
                    yield Finding(code, known)


def _odd_factor(factor: float, base: float, d: int) -> Iterator[Finding]:
    """Yield the fault that gives a factor of linear scaling that is not round, if there is one."""
    if d == 2 or float(f"{factor:.3e}") == factor:
        return
    growth = factor ** ((d - 2) / d)
    if abs(math.log(factor) * d / 2 - math.log(base)) < FLOAT32_RATIO * d:
        text = f"pairs are counted from 1, not from 0: base^(-2 (i + 1) / {d})"
        yield Finding("pairs_from_1", text)
    elif growth > 1 and abs(float(f"{growth:.1e}") / growth - 1) < FLOAT32_RATIO:
        text = f"every frequency is divided by {growth:.2g}^(d / (d - 2)), by which NTK scaling "
        yield Finding("growth_divides", text + "multiplies the base (keras-hub's dynamic)")


def _odd_list(measured: Measured) -> Iterator[Finding]:
    """Yield findings about frequencies that no schedule gives."""
    size = measured.inv_freq
    index = np.arange(len(size))
    for base in BASES:
        reciprocal = base ** (index / len(size))
        allowed = measured.noise + FLOAT32_RATIO * reciprocal
        if (np.abs(wrapped(reciprocal - size)) < allowed).all():
            text = f"frequencies are base^(+2i / d) of base {base:g}: 1 / inv_freq (MLX's freqs) "
            text += "is taken for inv_freq, or the minus of the exponent is missing"
            yield Finding("reciprocal_frequencies", text)
            return
    if (size < 0).any():
        text = "some pairs rotate in the other direction, or by more than half a turn per token"
        yield Finding("mixed_directions", text)
    same = (np.abs(size[:, None] - size) <= measured.noise + 3e-7 * np.abs(size)) & (size != 0)
    twins = np.argwhere(np.triu(same, 1)).tolist()
    if twins and measured.num_axes == 1:
        shown = ", ".join(f"{i} and {j}" for i, j in twins[:4])
        yield Finding("duplicate_frequency", f"pairs with one frequency: {shown}")
    size = np.abs(size)
    turning = (size > measured.noise) & (index > 0)
    slopes = -np.log(size[turning]) / index[turning]
    usual = math.exp(min(700.0, float(np.median(slopes)) * len(size))) if len(slopes) > 2 else 0.0
    for base in rounded(usual, range(1, 5)):
        ladder = base ** (-index / len(size))
        wrong = np.abs(size - ladder) > measured.noise + FLOAT32_RATIO * ladder
        if base >= 1 and 0 < wrong.sum() <= len(size) / 4:
            others = np.flatnonzero(wrong).tolist()
            yield Finding("off_ladder", f"all pairs but {others} follow base {base:g}")
            return


def _are_cosines(values: Array, numbers: Array, allowed: float) -> bool:
    """Whether values (runs, 3, pairs) at positions are a number times cos(position x frequency).

    Then c(2p) = 2 c(p)^2 - 1, also of rounded angles, and c(p - 1) + c(p + 1) = 2 c(p) c(1).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        cos = values / values[0, 0]
    if not (np.abs(cos) <= 1 + allowed).all():
        return False
    middle, near = cos[:, 1], numbers[:, 1] <= NEAR
    doubled = numbers[1:, 1] == 2 * numbers[:-1, 1]  # the next run may be of another axis
    off = np.abs(middle[1:] - (2 * middle[:-1] ** 2 - 1))[doubled]
    first = middle[np.maximum.accumulate(np.where(numbers[:, 1] == 1, np.arange(len(cos)), 0))]
    steps = np.abs(cos[:, 0] + cos[:, 2] - 2 * middle * first)[near]
    return bool((off <= 8 * allowed).all() and (steps <= 8 * allowed).all())


def odd_amplitude(measured: Measured, explained: Fit) -> Iterator[Finding]:
    """Yield findings about the number that multiplies cos and sin."""
    size, noise = measured.amplitude, measured.amplitude_noise
    if abs(size - 1) > noise:
        yield Finding("amplitude", f"cos and sin are multiplied by {size:.6g}")
    factor = explained.params.get("factor", 1.0)
    g = yarn_amplitude(factor)
    if explained.schedule != "yarn" or factor <= 1 or abs(size - g) <= noise:
        return
    for code, value, text in AMPLITUDES:
        if abs(size - value(g)) <= noise:
            yield Finding(code, text.format(g=g, factor=factor))
            return
    mscale = (size - 1) / (g - 1)
    error = noise / (g - 1)
    if mscale > 0 and error < 1e-4 and abs(float(f"{mscale:.2e}") - mscale) <= error:
        text = f"cos and sin are multiplied by 0.1 x {mscale:.3g} x ln({factor:g}) + 1: "
        yield Finding("mscale_alone", text + "mscale without mscale_all_dim")


def inverted_yarn(measured: Measured) -> tuple[Fit, Finding] | None:
    """Explain frequencies by YaRN with an inverted ramp: w + w / factor - yarn(w).

    Returns the fit and the finding; None if this does not give the frequencies.
    """
    size, pairs = measured.inv_freq, len(measured.inv_freq)
    if pairs < 4 or not 0 < size[-1] < size[0] < 0.9:
        return None
    for factor in rounded(1 / size[0], range(1, 5)):
        for base in rounded(size[-1] ** (-pairs / (pairs - 1)), range(1, 5)):
            both = base ** (-np.arange(pairs) / pairs) * (1 + 1 / factor)
            right = fit(measured._replace(inv_freq=both - size))
            if right.schedule == "yarn" and right.base == base:
                trained = right.params["original_max_position_embeddings"]
                inverted = both - right.inv_freq
                params = {"inv_freq": inverted.tolist(), "attention_factor": measured.amplitude}
                text = f"YaRN by {factor:g} from {trained:,} tokens, base {base:g}, with the ramp "
                text += "inverted: fast pairs are interpolated and slow pairs kept (litgpt)"
                return Fit("custom", 1e4, params, inverted), Finding("ramp_inverted", text)
    return None


def no_angle(pairs: Pairs, numbers: Array, allowed: float) -> Finding | None:
    """Return the published fault that makes cos and sin not those of one angle, if there is one.

    numbers  (runs, 3) the positions of the blocks of the pairs
    allowed  how far cos and sin may be off
    """
    cos, sin = pairs.cos, pairs.sin
    if not pairs.blocks.any():
        return Finding("zeros", "the rotated channels become 0: cos and sin are 0, as in buffers "
                       "that were never filled")  # fmt: skip
    is_alone = np.abs(sin).max() <= allowed and np.abs(cos - cos[0, 0]).max() > allowed
    if is_alone and _are_cosines(cos, numbers, allowed):
        return Finding("sin_missing", "pairs are multiplied by cos and sin is missing: a complex "
                       "table cast to a real type loses it")  # fmt: skip
    if max(np.abs(cos).max(), np.abs(sin).max()) < 1:  # position 0 has cos(cos(0)), not cos(0) = 1
        of_angles = np.arccos(cos) ** 2 + np.arcsin(sin) ** 2  # cos(a)^2 + sin(a)^2
        if np.abs(of_angles - 1).max() <= 1e-3:
            return Finding("cos_of_cos", "cos and sin are taken of a table that holds cos and sin "
                           "already")  # fmt: skip
    return None
