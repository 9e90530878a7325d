"""One box, asked everything: its pairs, frequencies, amplitude, precision, and what is odd."""

import dataclasses
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..angles import turns
from ..spec import Rotary
from .faults import inverted_yarn, odd_amplitude, odd_frequencies
from .fit import Fit, Measured, fit, round_to
from .lengths import Far, end_of_table, shared_positions, with_length
from .pairs import (
    Pairs,
    arithmetic,
    find_pairs,
    is_running_product,
    passes_through,
    shift_error,
    table_type,
    tables_in_other_layout,
    unwrapped_frequencies,
    wrapped,
)
from .probe import MAX_INDEXED, UNITS, Box, Finding, check, length_dependence

Array = npt.NDArray[Any]

RIGHT = 1e-3  # rad
FATAL = {
    *("not_repeatable", "not_linear", "mixes_heads", "mixes_tokens"),
    *("heads_differ", "heads_as_positions"),
}
# rad: how far an angle may be off because cos and sin are held in this type
ANGLE_NOISE = {"float32": 3e-7, "float16": 5e-4, "bfloat16": 4e-3}


class Answer(NamedTuple):
    """What was found about one box; the fields are those of `rotary.identify.Identification`."""

    findings: list[Finding]
    spec: Rotary | None = None
    is_rotation: bool = False
    amplitude: float | None = None
    inv_freq: Array | None = None
    arithmetic: str | None = None
    right_up_to: int | None = None
    probed_up_to: int | None = None


class Turning(NamedTuple):
    """Pairs whose blocks are (runs, 3, pairs, 2, 2), at `numbers` (runs, 3) along `axis` (runs,).

    Each run is three positions p - 1, p, p + 1 along one axis, with p = 1, 2, 4, ...
    """

    pairs: Pairs
    numbers: Array
    axis: Array
    type: str  # the coarsest float type that holds all cos and sin

    @property
    def last(self) -> int:
        """The largest position that was asked on every axis."""
        return min(int(self.numbers[self.axis == axis, 1].max()) for axis in set(self.axis))

    def up_to(self, position: int) -> "Turning":
        """The runs whose middle is at most `position`."""
        near = self.numbers[:, 1] <= position
        pairs = self.pairs._replace(blocks=self.pairs.blocks[near])
        return self._replace(pairs=pairs, numbers=self.numbers[near], axis=self.axis[near])

    @property
    def start(self) -> Array:
        """Angle of each pair at position 0."""
        return self.pairs.angles[0, 0]

    @property
    def noise(self) -> float:
        """How far off an angle may be, rad."""
        return ANGLE_NOISE[self.type]


class Rates(NamedTuple):
    """Frequencies (pairs,), >= 0 after `sign`; the axis that drives each; the last safe position.

    `offset` is the position that position 0 is turned as, `phase` (pairs,) what else it is turned.
    """

    inv_freq: Array
    axes: Array
    sign: int
    last: int
    offset: float
    phase: Array


def examine(box: Box, max_position: int) -> Answer:
    """Everything about one box. Raises ValueError if it fails at its first positions."""
    found = check(box)
    codes = {finding.code for finding in found}
    if codes & FATAL:
        return Answer(found)
    limit = max_position
    if "positions_ignored" in codes:
        box = dataclasses.replace(box, by_index=True)
        limit = min(limit, MAX_INDEXED, max(8, 2**22 // box.head_dim**2))
    else:
        safe, more = length_dependence(box, limit, "positions_consecutive" not in codes)
        found, limit = found + more, safe or limit
    shared = 1 if box.num_axes > 1 else shared_positions(box)
    if shared > 1:
        text = f"{shared} neighbours share a position: it is divided by {shared} and rounded down"
        found.append(Finding("positions_shared", text + "; what follows is in such steps"))
        box, limit = dataclasses.replace(box, step=shared), limit // shared
    matrices, numbers, axis, refusal = _runs(box, limit)
    if refusal:
        found.append(Finding("far_refused", refusal))
    try:
        pairs = find_pairs(matrices, 1e-6)
    except ValueError as error:
        return Answer([*found, Finding("no_rotation", str(error))])
    if pairs is None:
        return Answer([*found, Finding("mixes_channels", "its channels do not form pairs")])
    if not passes_through(matrices, pairs, 1e-6 + 2 * UNITS[box.dtype]):
        found.append(Finding("scales_the_rest", "channels outside the rotated slice are changed"))
    turning = Turning(pairs, numbers, axis, table_type(pairs.blocks))
    return _explain(box, turning, found, max_position)


def _runs(box: Box, limit: int) -> tuple[Array, Array, Array, str | None]:
    """Matrices (runs, 3, out, in), their positions and axes; and why it stopped, if early."""
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


def _explain(box: Box, turning: Turning, found: list[Finding], max_position: int) -> Answer:
    pairs = turning.pairs
    if pairs.skew > 1e-4 + 4 * UNITS[box.dtype]:
        if tables_in_other_layout(pairs):
            tiled = pairs.out_layout == "interleaved"
            names = ("cat(f, f)", "repeat_interleave(f, 2)")
            text = f"{pairs.layout} pairs, but tables laid out as {names[0 if tiled else 1]}; "
            found.append(Finding("tables_in_other_layout", text + f"needs {names[tiled]}"))
        elif _axes_split_pairs(turning, box.num_axes):
            text = "the two channels of a pair read different position axes: they are divided over "
            found.append(Finding("axes_split_pairs", text + "the doubled width (Hunyuan-VL)"))
        else:
            found.append(Finding("not_a_rotation", "the two channels of a pair do not turn by "
                                 "one angle"))  # fmt: skip
        found.append(Finding("not_shift_invariant", "scores depend on more than the distance, by "
                             f"up to {shift_error(pairs):.2g}"))  # fmt: skip
        return Answer(found)
    if (lost := _no_angle(turning)) is not None:
        return Answer([*found, lost])
    amplitude, more = _amplitude(turning)
    found = found + more
    rates = _rates(turning, box.num_axes)
    if rates is None:
        text = "a pair is driven by more than one position axis"
        return Answer([*found, Finding("mixed_axes", text)], None, not more, amplitude)
    measured, explained = _fitted(turning, rates, amplitude or 1.0, box.num_axes)
    if explained.schedule == "custom" and any(each.code == "position_scale" for each in more):
        return Answer(found)  # neither lengths nor angles follow a rule: there is no frequency
    found += _odd_angles(turning, rates, box.num_axes)
    found += odd_amplitude(measured, explained)
    inverted = inverted_yarn(measured) if explained.schedule == "custom" else None
    if inverted:
        explained = inverted[0]
        found.append(inverted[1])
    else:
        found += odd_frequencies(measured, explained, box.head_dim)
    if known := _with_length(box, turning, found, rates, explained, amplitude, max_position):
        turning, rates, explained, finding = known
        found = [each for each in found if each.code != finding.code] + [finding]
    spec = _spec(pairs, rates, explained, box)
    if isinstance(spec, str):
        return Answer([*found, Finding("no_spec", spec)], None, not more, amplitude, rates.inv_freq)
    is_rotation = not more and all(each.code != "depends_on_position" for each in found)
    answer = Answer(found, spec, is_rotation, amplitude, rates.inv_freq)
    return answer if more else _with_precision(box, turning, rates, explained, spec, answer)


def _axes_split_pairs(turning: Turning, num_axes: int) -> bool:
    """Whether each axis turns one channel of every pair alone, and leaves the other as it is."""
    error = np.abs(turning.pairs.blocks - np.eye(2)).max(axis=(1, 4))  # (runs, pairs, channels)
    by_axis = np.stack([error[turning.axis == axis].max(axis=0) for axis in range(num_axes)])
    return num_axes > 1 and bool((by_axis.min(axis=-1) < 1e-4).all())


def _no_angle(turning: Turning) -> Finding | None:
    """A cos and sin that are not those of one angle, if it is known how they came about."""
    cos, sin = turning.pairs.cos, turning.pairs.sin
    allowed = 4 * turning.noise + 1e-5
    if np.abs(sin).max() <= allowed and np.abs(cos - cos[0, 0]).max() > allowed:
        return Finding("sin_missing", "pairs are multiplied by cos and sin is missing: a complex "
                       "table cast to a real type loses it")  # fmt: skip
    if max(np.abs(cos).max(), np.abs(sin).max()) < 1:  # never cos 0: its cosine is taken again
        of_angles = np.arccos(cos) ** 2 + np.arcsin(sin) ** 2  # cos(a)^2 + sin(a)^2
        if np.abs(of_angles - 1).max() <= 1e-3:
            return Finding("cos_of_cos", "cos and sin are taken of a table that holds cos and sin "
                           "already")  # fmt: skip
    return None


def _fitted(
    turning: Turning, rates: Rates, amplitude: float, num_axes: int
) -> tuple[Measured, Fit]:
    """The frequencies with how exactly they are known, and the schedule that gives them."""
    noise = np.full(len(rates.inv_freq), 4 * turning.noise / rates.last)
    amplitude_noise = 2e-6 if turning.type == "float32" else 8e-3
    # a float32 angle at 2^n is 2^n times a float32 number, unless something was added to it
    rounded = np.abs(round_to(rates.inv_freq, "float32") - rates.inv_freq) <= noise
    is_float32 = bool(rounded.all() or rates.offset or rates.phase.any())
    measured = Measured(
        rates.inv_freq, noise, turning.pairs.rotary_dim, amplitude, amplitude_noise, num_axes,
        is_float32,
    )  # fmt: skip
    return measured, fit(measured)


def _with_length(
    box: Box, turning: Turning, found: list[Finding], rates: Rates, explained: Fit,
    amplitude: float | None, limit: int,
) -> tuple[Turning, Rates, Fit, Finding] | None:  # fmt: skip
    """What holds for short rows, and the rule by which long ones differ, if there is one."""
    is_uneven = rates.last < turning.last
    if box.num_axes > 1 or rates.last < 8:
        return None
    if is_uneven:  # its last run may already be a little off
        turning = turning.up_to(rates.last // 2)
        near = _rates(turning, 1)
        if near is None:
            return None
        rates, explained = near, _fitted(turning, near, amplitude or 1.0, 1)[1]
    elif all(finding.code != "depends_on_length" for finding in found):
        return None
    far = Far(box, turning.pairs, rates.sign, turning.start)
    known = with_length(far, explained, rates.last, limit, amplitude)
    return known and (turning, rates, *known)


def _amplitude(turning: Turning) -> tuple[float | None, list[Finding]]:
    """The factor of cos and sin; or None and what is wrong, if it is not one number."""
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
    if abs(common - 1) > allowed:
        return common, []
    return 1.0, []


def _rates(turning: Turning, num_axes: int) -> Rates | None:
    """Frequencies from the angles at 1, 2, 4, ...; None if two axes drive one pair."""
    relative = wrapped(turning.pairs.angles[:, 1] - turning.start)
    table, lasts = [], []
    for axis in range(num_axes):
        rows = turning.axis == axis
        numbers = turning.numbers[rows, 1]
        frequencies, last = unwrapped_frequencies(relative[rows], numbers)
        table.append(frequencies)
        lasts.append(last)
    by_axis = np.stack(table)
    if (np.count_nonzero(by_axis, axis=0) > 1).any():
        return None
    axes = np.abs(by_axis).argmax(axis=0)
    inv_freq = by_axis.sum(axis=0)
    sign = -1 if (inv_freq < 0).any() and not (inv_freq > 0).any() else 1
    offset, phase = _offset(turning.start * sign, inv_freq * sign, 4 * turning.noise)
    return Rates(inv_freq * sign, axes, sign, min(lasts), offset, phase)


def _offset(start: Array, inv_freq: Array, noise: float) -> tuple[float, Array]:
    """The position c with angle c inv_freq at position 0, or (0, those angles) if there is none."""
    tells = (np.abs(start) > 100 * noise) & (np.abs(inv_freq) > 0)
    if np.abs(start).max() <= noise:
        return 0.0, np.zeros_like(start)
    if tells.any():
        slow = int(np.flatnonzero(tells)[np.abs(inv_freq[tells]).argmin()])
        offset = float(np.round(start[slow] / inv_freq[slow], 2))
        if np.abs(wrapped(start - offset * inv_freq)).max() <= max(10 * noise, 1e-5):
            return offset, np.zeros_like(start)
    return 0.0, start


def _odd_angles(turning: Turning, rates: Rates, num_axes: int) -> list[Finding]:
    found = []
    ignored = set(range(num_axes)) - set(rates.axes[rates.inv_freq != 0].tolist())
    if ignored and num_axes > 1:
        names = ", ".join(map(str, sorted(ignored)))
        found.append(Finding("axes_ignored", f"position axes {names} turn no pair"))
    quarter = np.abs(np.abs(rates.phase) - math.pi / 2).max() < 4 * turning.noise + 1e-5
    if quarter:
        found.append(Finding("cos_sin_swapped", "position 0 is a quarter turn: cos and sin are "
                             "swapped"))  # fmt: skip
    elif rates.phase.any():
        found.append(Finding("phase", "position 0 is not left as it is"))
    elif rates.offset:
        found.append(Finding("offset", "position 0 is turned as if it were position "
                             f"{rates.offset:g}"))  # fmt: skip
    if rates.sign < 0 and not quarter:
        found.append(Finding("clockwise", "pairs turn the other way: the direction of nanochat, or "
                             "a wrong sign of sin"))  # fmt: skip
    return found


def _spec(pairs: Pairs, rates: Rates, explained: Fit, box: Box) -> Rotary | str:
    """The spec, or why there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd is what was asked for
        try:
            return Rotary(
                head_dim=box.head_dim,
                rotary_dim=pairs.rotary_dim,
                start=pairs.start,
                base=explained.base,
                layout=pairs.layout,
                out_layout=pairs.out_layout,
                schedule=explained.schedule,
                params=explained.params,
                axes=rates.axes.tolist() if box.num_axes > 1 else (),
                sign=rates.sign,
            )
        except ValueError as error:
            return str(error)


def _with_precision(
    box: Box, turning: Turning, rates: Rates, explained: Fit, spec: Rotary, answer: Answer
) -> Answer:
    """The answer with what the angles are computed in, and how far they are right."""
    numbers = np.where(turning.axis[:, None, None] == rates.axes, turning.numbers[..., None], 0)
    measured = wrapped(rates.sign * turning.pairs.angles - rates.phase)
    wraps = numbers.astype(np.uint64) * turns(spec)  # exact, modulo one turn
    exact = wraps.view(np.int64) * (math.tau / 2.0**64) + rates.offset * explained.inv_freq
    error = np.abs(wrapped(measured - exact)).max(axis=(1, 2))
    middles = turning.numbers[:, 1]
    probed = turning.last
    wrong = middles[error > RIGHT + ANGLE_NOISE.get(box.dtype, 0.0)]
    right = int(wrong.min()) // 2 if len(wrong) else probed

    safe = middles <= rates.last
    unit = max(5e-6, turning.noise)
    reached = numbers[safe] + rates.offset, measured[safe]
    flat = [part.reshape(-1, part.shape[-1]) for part in reached]
    kinds = arithmetic(flat[0], flat[1], explained.inv_freq, unit)
    rules = explained.inv_freq, rates.inv_freq, explained.base
    if kinds in ((), ("float32 angles",)) and is_running_product(flat[0], flat[1], *rules):
        kinds = ("float32 running product",)
    if turning.type not in ("float32", box.dtype):
        kinds = (*(kind for kind in kinds if kind != "exact"), f"{turning.type} tables")
    until = f", off by more than 1e-3 rad from position {2 * right or 1:,} on" if len(wrong) else ""
    found = [
        Finding(kind.replace(" ", "_"), f"computed with {kind}{until}")
        for kind in kinds
        if kind != "exact" and (until or kind != "float32 angles")
    ]
    if rates.last < probed:
        far = Far(box, turning.pairs, rates.sign, turning.start)
        text = f"beyond position {rates.last:,} pairs do not turn evenly: lost precision, or a "
        uneven = Finding("uneven", text + "table that ends in a way not known")
        end = end_of_table(far, explained.inv_freq, rates.last, probed) if not spec.axes else None
        found.append(end or uneven)
    elif until and not found:
        found.append(Finding("angles_drift", f"angles drift{until}, for a reason not known"))
    return answer._replace(
        findings=answer.findings + found,
        arithmetic=", ".join(kinds) or "unknown",
        right_up_to=right,
        probed_up_to=probed,
    )
