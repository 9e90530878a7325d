"""Examines one function: pairs, frequencies, attention factor, precision, what is unusual."""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..analysis.precision import longest_safe_position, round_to
from ..angles import turns
from ..kernels import Numbers as Array
from ..spec import Rotary
from .faults import inverted_yarn, no_angle, odd_amplitude, odd_frequencies
from .fit import Fit, Measured, fit
from .lengths import Far, end_of_table, shared_positions, with_length
from .pairs import (
    Pairs,
    arithmetic,
    find_pairs,
    is_running_product,
    tables_in_other_layout,
    unwrapped_frequencies,
    wrapped,
)
from .probe import MAX_INDEXED, UNITS, Box, Finding, check, in_rad, length_dependence

RIGHT = 1e-3  # rad
RESTING = 1e-6  # rad: a pair that has turned less stands still; small angles are held precisely
FIT_NOISE = 4  # how many times the noise of an angle a schedule may be off at the last position
COARSE = ("bfloat16", "float16")
FATAL = {
    *("not_repeatable", "not_linear", "mixes_heads", "mixes_tokens", "mixes_q_k"),
    *("heads_differ", "heads_as_positions"),
}
# rad: how far an angle may be off because cos and sin are held in this type
ANGLE_NOISE = {"float32": 3e-7, "float16": 5e-4, "bfloat16": 4e-3}


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """The answer about one box; `rotary.identify.Identification` explains the fields."""

    spec: Rotary | None
    findings: tuple[Finding, ...] = ()
    is_rotation: bool = False
    amplitude: float | None = None
    inv_freq: Array | None = None
    arithmetic: str | None = None
    right_up_to: int | None = None
    right_to: float | None = None
    probed_up_to: int | None = None


class Turning(NamedTuple):
    """Measured pairs of a box: blocks (runs, 3, pairs, 2, 2) at positions `numbers` (runs, 3).

    Each run is three positions p - 1, p, p + 1 along one axis of `axis` (runs,), p = 1, 2, 4, ...
    """

    box: Box
    pairs: Pairs
    numbers: Array
    axis: Array
    type: str  # the coarsest float type that holds all cos and sin

    @property
    def last(self) -> int:
        """The largest position that was measured on every axis."""
        return min(int(self.numbers[self.axis == axis, 1].max()) for axis in set(self.axis))

    def up_to(self, position: int) -> "Turning":
        """Return the runs whose middle position is at most `position`."""
        near = self.numbers[:, 1] <= position
        pairs = self.pairs._replace(blocks=self.pairs.blocks[near])
        return self._replace(pairs=pairs, numbers=self.numbers[near], axis=self.axis[near])

    @property
    def start(self) -> Array:
        """Angle of each pair at position 0."""
        return self.pairs.angles[0, 0]

    def far(self, sign: int) -> Far:
        """Return the angles at far positions, times `sign`."""
        return Far(self.box, self.pairs, sign, self.start)

    @property
    def noise(self) -> float:
        """The possible error of an angle, rad."""
        return ANGLE_NOISE[self.type]


class Rates(NamedTuple):
    """How the angles of the pairs follow from the position.

    inv_freq  (pairs,) frequencies times `sign`; >= 0 unless pairs rotate in different directions
    axes      (pairs,) the position axis of each pair
    last      the last position whose angles fit the frequencies
    offset    position 0 is rotated as if it were this position
    phase     (pairs,) the angles of position 0, if no offset explains them
    """

    inv_freq: Array
    axes: Array
    sign: int
    last: int
    offset: float
    phase: Array


def examine(box: Box, max_position: int) -> Answer:
    """Return the answer about one box. Raises ValueError if it fails at its first positions."""
    findings = check(box)
    codes = {finding.code for finding in findings}
    if codes & FATAL:
        return Answer(None, tuple(findings))
    limit = max_position
    if "positions_ignored" in codes:
        box = dataclasses.replace(box, by_index=True)
        limit = min(limit, MAX_INDEXED, max(8, 2**22 // box.head_dim**2))
    else:
        safe, more = length_dependence(box, limit, "positions_consecutive" not in codes)
        findings, limit = findings + more, safe or limit
    shared = 1 if box.num_axes > 1 else shared_positions(box)
    if shared > 1:
        text = f"{shared} neighbours share a position: it is divided by {shared} and rounded down"
        findings.append(Finding("positions_shared", text + "; other findings count these steps"))
        box, limit = dataclasses.replace(box, step=shared), limit // shared
    matrices, numbers, axis, refusal = _runs(box, limit)
    if refusal:
        findings.append(Finding("far_refused", refusal))
    pairs = find_pairs(matrices, 1e-6)
    if isinstance(pairs, Finding):
        return Answer(None, (*findings, pairs))
    rest = np.ones(box.head_dim, bool)
    rest[pairs.start : pairs.start + pairs.rotary_dim] = False
    if (np.abs(matrices[..., rest, rest] - 1) > 1e-6 + 2 * UNITS[box.dtype]).any():
        text = "channels outside the rotated slice are changed"
        findings.append(Finding("scales_the_rest", text))
    coarse = (t for t in COARSE if np.array_equal(round_to(pairs.blocks, t), pairs.blocks))
    turning = Turning(box, pairs, numbers, axis, next(coarse, "float32"))
    return _explain(turning, findings, max_position)


def _runs(box: Box, limit: int) -> tuple[Array, Array, Array, str | None]:
    """Return matrices (runs, 3, out, in), their positions, their axes, and why it ended early."""
    matrices, numbers, axes = [], [], []
    refusal = None
    for axis in range(box.num_axes):
        for exponent in range(limit.bit_length()):
            middle = 1 << exponent
            run = [middle - 1, middle, middle + 1]
            try:
                matrices.append(box.matrices(run, axis))
            except ValueError as error:
                if middle == 1:
                    raise
                refusal = f"position {middle:,}: {error}"
                break
            numbers.append(run)
            axes.append(axis)
    return np.stack(matrices), np.array(numbers), np.array(axes), refusal


def _explain(turning: Turning, findings: list[Finding], max_position: int) -> Answer:
    """Return the answer from the blocks of the pairs: the spec, and what is unusual about it."""
    box, pairs = turning.box, turning.pairs
    if pairs.skew > 1e-4 + 4 * UNITS[box.dtype]:
        return Answer(None, (*findings, *_unequal_channels(turning)))
    if (lost := no_angle(pairs, turning.numbers, 4 * turning.noise + 1e-5)) is not None:
        return Answer(None, (*findings, lost))
    amplitude, uneven = _amplitude(turning)
    findings = findings + uneven
    rates = _rates(turning)
    if rates is None:
        text = "a pair uses more than one position axis"
        return Answer(None, (*findings, Finding("mixed_axes", text)), not uneven, amplitude)
    measured, explained = _fitted(turning, rates, amplitude)
    if explained.schedule == "custom" and any(each.code == "position_scale" for each in uneven):
        # neither lengths nor angles follow a rule: there is no frequency
        return Answer(None, tuple(findings))
    findings += _odd_angles(turning, rates)
    findings += odd_amplitude(measured, explained)
    inverted = inverted_yarn(measured) if explained.schedule == "custom" else None
    if inverted:
        explained = inverted[0]
        findings.append(inverted[1])
    else:
        findings += odd_frequencies(measured, explained, box.head_dim)
    if by_length := _with_length(turning, findings, rates, explained, amplitude, max_position):
        turning, rates, explained, finding = by_length
        findings = [each for each in findings if each.code != finding.code] + [finding]
    answer = Answer(None, tuple(findings), not uneven, amplitude, rates.inv_freq)
    head = box.head_dim, pairs.rotary_dim, pairs.start, pairs.layout, pairs.out_layout
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # findings report unusual values
            spec = explained.spec(head, rates.axes, rates.sign)
    except ValueError as error:
        return dataclasses.replace(answer, findings=(*findings, Finding("no_spec", str(error))))
    by_position = any(each.code == "depends_on_position" for each in findings)
    is_rotation = answer.is_rotation and not by_position
    answer = dataclasses.replace(answer, spec=spec, is_rotation=is_rotation)
    return answer if uneven else _with_precision(turning, rates, explained, spec, answer)


def _unequal_channels(turning: Turning) -> Iterator[Finding]:
    """Explain pairs whose channels are not rotated by one angle, and how much scores change."""
    pairs, num_axes = turning.pairs, turning.box.num_axes
    error = np.abs(pairs.blocks - np.eye(2)).max(axis=(1, 4))  # (runs, pairs, channels)
    by_axis = np.stack([error[turning.axis == axis].max(axis=0) for axis in range(num_axes)])
    if tables_in_other_layout(pairs):
        right, wrong = "cat(f, f)", "repeat_interleave(f, 2)"
        if pairs.out_layout == "interleaved":
            right, wrong = wrong, right
        text = f"{pairs.layout} pairs, but the tables have the order {wrong}; needs {right}"
        yield Finding("tables_in_other_layout", text)
    elif num_axes > 1 and (by_axis.min(axis=-1) < 1e-4).all():  # an axis turns one channel
        text = "the two channels of a pair use different position axes: axes are assigned over "
        yield Finding("axes_split_pairs", text + "the doubled width (Hunyuan-VL)")
    else:
        text = "the two channels of a pair are not rotated by the same angle"
        yield Finding("not_a_rotation", text)
    near = pairs.blocks[:7]  # positions up to 64
    steps = near[:, :-1].swapaxes(-1, -2) @ near[:, 1:]  # R_p^T R_{p+1}
    change = np.abs(steps - steps[0, 0]).max()
    text = f"scores depend on more than the distance, by up to {change:.2g}"
    yield Finding("not_shift_invariant", text)


def _fitted(turning: Turning, rates: Rates, amplitude: float | None) -> tuple[Measured, Fit]:
    """Return the frequencies with their uncertainty, and the schedule that gives them."""
    noise = np.full(len(rates.inv_freq), FIT_NOISE * turning.noise / rates.last)
    amplitude_noise = 2e-6 if turning.type == "float32" else 8e-3
    # a float32 angle at 2^n is 2^n times a float32 number, unless something was added to it
    rounded = np.abs(round_to(rates.inv_freq, "float32") - rates.inv_freq) <= noise
    is_float32 = bool(rounded.all() or rates.offset or rates.phase.any())
    measured = Measured(
        rates.inv_freq, noise, turning.pairs.rotary_dim, amplitude or 1.0, amplitude_noise,
        turning.box.num_axes, is_float32,
    )  # fmt: skip
    return measured, fit(measured)


def _with_length(
    turning: Turning, findings: list[Finding], rates: Rates, explained: Fit,
    amplitude: float | None, limit: int,
) -> tuple[Turning, Rates, Fit, Finding] | None:  # fmt: skip
    """Pairs and frequencies of short rows, and the rule for long ones; None if there is no rule."""
    if turning.box.num_axes > 1 or rates.last < 8:
        return None
    if rates.last < turning.last:  # uneven beyond `last`, whose run may already be a little off
        turning = turning.up_to(rates.last // 2)
        near = _rates(turning)
        if near is None:
            return None
        rates, explained = near, _fitted(turning, near, amplitude)[1]
    elif all(finding.code != "depends_on_length" for finding in findings):
        return None
    rule = with_length(turning.far(rates.sign), explained, rates.last, limit, amplitude)
    return rule and (turning, rates, *rule)


def _amplitude(turning: Turning) -> tuple[float | None, list[Finding]]:
    """Return the factor of cos and sin; or None and the finding, if it is not one number."""
    size = np.hypot(turning.pairs.sin, turning.pairs.cos)
    common = float(np.median(size[0]))
    allowed = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}[turning.type] * common
    by_position = np.abs(size - size[0, 0]).max()
    by_pair = np.abs(size[0, 0] - common).max()
    if by_position > allowed:
        return None, [Finding("position_scale", "the length of a pair changes with its position "
                              "(xPos, or a norm that is not kept)")]  # fmt: skip
    if by_pair > allowed:
        return None, [Finding("pair_scale", "pairs are multiplied by different numbers")]
    return common if abs(common - 1) > allowed else 1.0, []


def _rates(turning: Turning) -> Rates | None:
    """Return frequencies from the angles at 1, 2, 4, ...; None if two axes rotate one pair."""
    relative = wrapped(turning.pairs.angles[:, 1] - turning.start)
    by_axis, ends = [], []
    for axis in range(turning.box.num_axes):
        numbers = turning.numbers[turning.axis == axis, 1]
        found, fitting = unwrapped_frequencies(relative[turning.axis == axis], numbers)
        ends.append(int(numbers[fitting - 1]))
        by_axis.append(np.where(np.abs(found) * ends[-1] > RESTING, found, 0.0))
    if (np.count_nonzero(by_axis, axis=0) > 1).any():
        return None
    axes = np.abs(by_axis).argmax(axis=0)
    inv_freq = np.sum(by_axis, axis=0)
    sign = -1 if (inv_freq < 0).any() and not (inv_freq > 0).any() else 1
    offset, phase = _offset(turning.start * sign, inv_freq * sign, 4 * turning.noise)
    return Rates(inv_freq * sign, axes, sign, min(ends), offset, phase)


def _offset(start: Array, inv_freq: Array, noise: float) -> tuple[float, Array]:
    """Return (c, zeros) if position 0 has the angles c inv_freq, else (0, its angles)."""
    usable = (np.abs(start) > 100 * noise) & (np.abs(inv_freq) > 0)
    if np.abs(start).max() <= noise:
        return 0.0, np.zeros_like(start)
    if usable.any():
        slow = int(np.flatnonzero(usable)[np.abs(inv_freq[usable]).argmin()])
        offset = float(np.round(start[slow] / inv_freq[slow], 2))
        if np.abs(wrapped(start - offset * inv_freq)).max() <= max(10 * noise, 1e-5):
            return offset, np.zeros_like(start)
    return 0.0, start


def _odd_angles(turning: Turning, rates: Rates) -> Iterator[Finding]:
    axes = range(turning.box.num_axes)
    ignored = set(axes) - set(rates.axes[rates.inv_freq != 0].tolist())
    if ignored and len(axes) > 1:
        names = ", ".join(map(str, sorted(ignored)))
        yield Finding("axes_ignored", f"position axes {names} rotate no pair")
    quarter = np.abs(np.abs(rates.phase) - math.pi / 2).max() < 4 * turning.noise + 1e-5
    if quarter:
        text = "position 0 is a quarter turn: cos and sin are swapped"
        yield Finding("cos_sin_swapped", text)
    elif rates.phase.any():
        yield Finding("phase", "position 0 is rotated")
    elif rates.offset:
        yield Finding("offset", f"position 0 is rotated as if it were position {rates.offset:g}")
    if rates.sign < 0 and not quarter:
        text = "pairs rotate in the other direction: as in nanochat, or sin has a wrong sign"
        yield Finding("clockwise", text)


def _with_precision(
    turning: Turning, rates: Rates, explained: Fit, spec: Rotary, answer: Answer
) -> Answer:
    """Add to the answer the arithmetic of the angles, and up to which position they are right."""
    dtype = turning.box.dtype
    numbers = np.where(turning.axis[:, None, None] == rates.axes, turning.numbers[..., None], 0)
    measured = wrapped(rates.sign * turning.pairs.angles - rates.phase)
    wraps = numbers.astype(np.uint64) * turns(spec)  # exact, modulo one turn
    exact = wraps.view(np.int64) * (math.tau / 2.0**64) + rates.offset * explained.inv_freq
    error = np.abs(wrapped(measured - exact)).max(axis=(1, 2))
    middles = turning.numbers[:, 1]
    probed = turning.last
    of_fit = FIT_NOISE * turning.noise / rates.last  # per token; frequencies are not known better
    allowed = RIGHT + ANGLE_NOISE.get(dtype, 0.0)
    wrong = middles[error > allowed + of_fit * middles]
    right = int(wrong.min()) // 2 if len(wrong) else probed
    right_to = allowed + of_fit * right

    safe, count = middles <= rates.last, len(rates.inv_freq)
    angles = (numbers[safe] + rates.offset).reshape(-1, count), measured[safe].reshape(-1, count)
    unit = max(5e-6, turning.noise) + of_fit * np.abs(angles[0])
    kinds = arithmetic(*angles, explained.inv_freq, unit)
    if kinds in ((), ("float32 angles",)) and is_running_product(
        *angles, explained.inv_freq, rates.inv_freq, explained.base
    ):
        kinds = ("float32 running product",)
    if len(wrong) and kinds == ("float32 angles",) and not spec.depends_on_length:
        # what was probed lies near powers of two, where products are hardly rounded
        right = min(right, longest_safe_position(spec, right_to))
    is_float32_at_fault = len(wrong) > 0
    if turning.type not in ("float32", dtype):
        kinds = (*(kind for kind in kinds if kind != "exact"), f"{turning.type} tables")
        # where such tables alone are off by more, they are the cause
        is_float32_at_fault &= longest_safe_position(spec, right_to, f"{turning.type}_table") > 0
    until = ""
    if len(wrong):
        until = f", off by more than {in_rad(right_to)} rad at some positions above {right:,}"
    findings = [
        Finding(kind.replace(" ", "_"), f"computed with {kind}{until}")
        for kind in kinds
        if kind != "exact" and (is_float32_at_fault or kind != "float32 angles")
    ]
    if rates.last < probed:
        text = f"beyond position {rates.last:,} pairs do not turn evenly: lost precision, a table "
        text += "that ends in an unknown way, or frequencies that follow the length"
        end = None
        if not spec.axes:
            end = end_of_table(turning.far(rates.sign), explained.inv_freq, rates.last, probed)
        findings.append(end or Finding("uneven", text))
    elif until and not findings:
        findings.append(Finding("angles_drift", f"angles drift{until}, for an unknown reason"))
    return dataclasses.replace(
        answer,
        findings=(*answer.findings, *findings),
        arithmetic=", ".join(kinds) or "unknown",
        right_up_to=right,
        right_to=right_to,
        probed_up_to=probed,
    )
