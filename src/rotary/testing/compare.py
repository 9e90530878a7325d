"""`check`: compares a function with the formula, and names the fault if they differ."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import NamedTuple

import numpy as np

from .. import words
from ..angles import inv_freq
from ..blackbox.forms import (
    TABLES,
    boxes_with_positions,
    boxes_with_tables,
    first_that_works,
)
from ..blackbox.probe import ROWS, UNITS, Box, Finding, grouped, overwriting, sample, takes
from ..identify import Identification, brief, callables, identify
from ..kernels import Numbers as Array
from ..layouts import pair_indices
from ..spec import Rotary, check_spec, check_whole
from .faults import faults
from .formula import rotated, tables
from .golden import PER_POSITION

UNCLEAR = 0.5  # float32 angles that are off by more explain every result
FAR = 4095  # the last row of a table of 4096; float32 angles are right to 1e-3 rad there
# the cases of a check, and the codes of identify that concern only these cases
CASES = {
    "near": (),
    "gaps": ("positions_consecutive",),
    "row": (),
    "one head": ("depends_on_shape", "mixes_batch"),
    "one token": ("depends_on_shape", "mixes_batch"),
    "batch": ("mixes_batch", "refuses_batch"),
    "rows": (*ROWS, "depends_on_batch", "mixes_batch"),
    "key heads": ("depends_on_shape",),
    "far": (),
    "again": ("remembers_length",),
    "input": ("overwrites_input",),
    "output": ("overwrites_output",),
}


class WrongRotationError(AssertionError):
    """A function does not rotate as its spec says.

    findings  the reasons, (code, text) each, never empty

    >>> WrongRotationError("it turns nothing", (Finding("no_rotation", "it turns nothing"),)).codes
    ('no_rotation',)
    """

    def __init__(self, message: str, findings: tuple[Finding, ...]) -> None:
        super().__init__(message)
        self.findings = findings

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings, in their order."""
        return tuple(finding.code for finding in self.findings)


class Call(NamedTuple):
    """One call and its result: x and y (batch, heads, seq, head_dim); y None if it was refused."""

    case: str
    x: Array
    positions: Array
    y: Array | None
    refusal: str


class Rules(NamedTuple):
    """Which calls are made, and when a result is right."""

    max_position: int
    seq_len: int | None
    allowed: float  # of the largest number of a call
    skip: Sequence[str]


def check(
    fn: Callable[..., object] | Sequence[Callable[..., object]],
    spec: Rotary,
    *,
    form: str | None = None,
    seq_dim: int = -2,
    library: str | None = None,
    dtype: str = "float32",
    seq_len: int | None = None,
    max_position: int | None = None,
    tolerance: float = 1e-3,
    skip: Sequence[str] = (),
) -> None:
    """Raise WrongRotationError, which names the fault, unless fn rotates as its spec says.

    fn            f(x, positions) -> x, or f(q, k, cos, sin) -> (q, k) in the style of transformers,
                  or two callables of the first form, for q and for k; see `rotary.identify`
    form, seq_dim, library, dtype
                  how it is called, as in `rotary.identify`. f(q, k, cos, sin) is given cos and sin
                  of position * inv_freq, without the sign and the attention factor of the spec; it
                  passes if it is right with the columns as cat(c, c), as repeat_interleave(c, 2),
                  or as c alone
    seq_len       length that `dynamic` and `longrope` are scaled for; default: that of each row,
                  its largest position plus one
    max_position  the largest position that is tested. Default 4095; if frequencies depend on the
                  length, twice the trained length where that is more
    tolerance     of the results, relative to the largest number of a call, in addition to the
                  rounding of `dtype`; float32 angles reach 1e-3 near position 8000
    skip          cases of `CASES` to leave out: "gaps" for a function that takes one offset,
                  "input" for one that works in place, "output" for one that writes into one
                  buffer, "batch", "rows", ...

    Compares with the plain formula in float64: 2 heads at positions 0 to 15, positions with gaps, a
    row of 1024 tokens, one head, one token, a batch, a batch whose rows have different positions if
    the function takes them without an error, half as many heads of k as of q if f(q, k, cos, sin)
    takes them, far positions, the first call again, and whether an argument or the result of an
    earlier call was overwritten. The numbers of q and of k differ. If anything differs, it looks
    for the fault among `faults`, then by `identify`.
    Raises ValueError for a callable that cannot be called in any known way, and for a bad argument.

    >>> import rotary
    >>> spec = Rotary(head_dim=16, base=500_000.0)
    >>> check(lambda x, positions: rotary.apply(spec, x, positions=positions), spec)
    >>> plain = Rotary(head_dim=16)
    >>> try:
    ...     check(lambda x, positions: rotary.apply(plain, x, positions=positions), spec)
    ... except WrongRotationError as error:
    ...     print(error.findings[0].text)
    base 10000, not 500000: the base of the config is not read
    """
    __tracebackhide__ = True
    check_spec(spec, "spec")
    fns, kind = callables(fn, form, seq_dim, library, dtype)
    rules = _rules(spec, seq_len, max_position, tolerance, dtype, skip)
    if kind == "tables":  # they have one axis and no attention factor
        params = {"inv_freq": inv_freq(spec)[0].tolist()}
        spec = dataclasses.replace(spec, schedule="custom", params=params, axes=())
    trials = [
        [call for box in boxes for call in _calls(box, spec, rules)]
        for boxes in _boxes(fns, kind, spec, seq_dim, library, dtype)
    ]
    wrong = [[call for call in calls if _differs(call, spec, rules)] for calls in trials]
    if not all(wrong):
        return
    fewest = min(wrong, key=len)
    findings = _known(spec, trials, rules) or _causes(
        fewest, spec, kind, rules,
        partial(identify, fn, spec.head_dim, form=kind, seq_dim=seq_dim, library=library,
                dtype=dtype, max_position=rules.max_position),
    )  # fmt: skip
    where = _where(fewest, spec, rules, len(trials[0]))
    lines = [f"does not rotate as {brief(spec)}", *(f"{code}: {text}" for code, text in findings)]
    raise WrongRotationError("\n  ".join([*lines, where]), findings)


def _rules(
    spec: Rotary, seq_len: int | None, max_position: int | None, tolerance: float, dtype: str,
    skip: Sequence[str],
) -> Rules:  # fmt: skip
    if not isinstance(skip, tuple | list) or not all(each in [*CASES] for each in skip):
        got = words.brief(skip)
        raise ValueError(f"skip must be a list of cases, of {', '.join(CASES)}; got {got}")
    if not (isinstance(tolerance, Real) and 0 < tolerance < 1):
        got = words.brief(tolerance)
        raise ValueError(f"tolerance must be a number above 0 and below 1, got {got}")
    if seq_len is not None:
        check_whole("seq_len", seq_len)
    if max_position is None:
        trained = spec.params.get("original_max_position_embeddings", 0)
        max_position = max(FAR, 2 * trained if spec.depends_on_length else 0)
    check_whole("max_position", max_position, 31)
    return Rules(max_position, seq_len, tolerance + 4 * UNITS[dtype], skip)


def _boxes(
    fns: Sequence[Callable[..., object]], kind: str, spec: Rotary, seq_dim: int,
    library: str | None, dtype: str,
) -> Iterator[Sequence[Box]]:  # fmt: skip
    """Yield the boxes of q and k; for tables once for every order of columns that fn accepts."""
    how = (spec.head_dim, seq_dim, library, dtype)
    if kind == "positions":
        ways = [boxes_with_positions(fn, *how, spec.num_axes) for fn in fns]
        yield [box for way in ways for box in first_that_works(way)]
        return
    refusals = []
    for order in TABLES:
        try:
            yield first_that_works(boxes_with_tables(fns[0], *how, inv_freq(spec)[0], order))
        except ValueError as error:
            refusals.append(error)
    if len(refusals) == len(TABLES):
        raise refusals[0]


def _calls(box: Box, spec: Rotary, rules: Rules) -> Iterator[Call]:
    """Yield every call of the cases that are not skipped, in their order."""

    def at(*numbers: int) -> Array:
        """Return positions (seq,) or (seq, axes), with different numbers on each axis."""
        row = np.array(numbers, np.int64)
        axes = np.arange(1, spec.num_axes + 1)
        several = (row[:, None] * axes + axes - 1) % (row.max() + 1)
        return row if spec.num_axes == 1 else several

    near, five, token = at(*range(16)), at(*range(3, 8)), at(17)
    inputs = [
        ("near", sample(box, 1, 2, 16), near),
        ("gaps", sample(box, 1, 2, 5), at(3, 11, 4, 20, 9)),
        ("row", sample(box, 1, 2, min(1024, rules.max_position + 1)),
         at(*range(min(1024, rules.max_position + 1)))),
        *(("one head", sample(box, batch, 1, 5), five) for batch in (1, 2)),
        *(("one token", sample(box, batch, 2, 1), token) for batch in (1, 2)),
        ("batch", sample(box, 3, 2, 5), five),
    ]  # fmt: skip
    if box.by_row:
        inputs.append(("rows", sample(box, 2, 2, 5), np.stack([five, at(*range(20, 25))])))
    four = sample(box, 1, 4, 5)
    if box.which is not None and takes(grouped(box), four, five):
        inputs.append(("key heads", four, five))
    middles = [1 << n for n in range(5, rules.max_position.bit_length())]
    for axis, middle in itertools.product(range(spec.num_axes), [*middles, rules.max_position]):
        run = box.positions([middle - 2, middle - 1, middle], axis)
        inputs.append(("far", sample(box, 1, 2, 3), run))
    inputs.append(("again", *inputs[0][1:]))
    for case, x, positions in inputs:
        if case in rules.skip:
            continue
        try:
            y = (grouped(box) if case == "key heads" else box)(x, positions)
            written = overwriting(box, x, -x, positions) if case == "near" else ()
        except ValueError as error:
            yield Call(case, x, positions, None, str(error))
        else:
            yield Call(case, x, positions, y, "")
            for code, text in written:
                if (name := code.removeprefix("overwrites_")) not in rules.skip:
                    yield Call(name, x, positions, None, text)


def _expected(call: Call, spec: Rotary, seq_len: int | None) -> Array:
    is_one_row = call.positions.ndim == (1 if spec.num_axes == 1 else 2)
    rows = [call.positions] if is_one_row else call.positions
    each = [tables(spec, row, seq_len) for row in rows]
    cos, sin = (np.stack(table)[:, None] for table in zip(*each, strict=True))
    return rotated(spec, call.x, cos, sin)


def _differs(call: Call, spec: Rotary, rules: Rules) -> bool:
    return call.y is None or bool(_errors(call, spec, rules).max() > rules.allowed)


def _errors(call: Call, spec: Rotary, rules: Rules) -> Array:
    """Return how far each number of a result is off, as a part of the largest right one."""
    expected = _expected(call, spec, rules.seq_len)
    return np.abs(call.y - expected) / np.abs(expected).max()


def _is_rounded(call: Call, spec: Rotary, rules: Rules) -> bool:
    """Whether float32 angles explain a result: each pair is off by a small share of its angle."""
    if call.y is None:
        return False
    numbers = call.positions[..., list(spec.axes)] if spec.axes else call.positions[..., None]
    angles = np.abs(numbers * inv_freq(spec, rules.seq_len)[0])
    pairs = pair_indices(spec.rotary_dim, spec.out_layout, spec.start)
    allowed = np.zeros((*angles.shape[:-1], spec.head_dim))
    allowed[..., pairs] = np.minimum(2 * PER_POSITION * angles, UNCLEAR)[..., None]
    if allowed.ndim == 3:  # rows; the same for all heads
        allowed = allowed[:, None]
    return bool((_errors(call, spec, rules) <= rules.allowed + allowed).all())


def _rounded(calls: Sequence[Call], spec: Rotary, rules: Rules) -> Finding:
    """Return the finding about calls that float32 angles explain, and what would allow them."""
    errors = [float(_errors(call, spec, rules).max()) for call in calls]
    worst = calls[int(np.argmax(errors))]
    digit = 10.0 ** math.floor(math.log10(max(errors)))
    enough = digit * math.ceil(max(errors) / digit)
    cases = ", ".join(dict.fromkeys(repr(call.case) for call in calls))
    text = (
        f"angles are computed in float32: off by {max(errors):.1e} of the largest number in a row "
    )
    text += f"up to position {worst.positions.max():,}; allowed by tolerance={enough:g}, or leave "
    text += f"it out by skip=[{cases}]"
    return Finding("float32_angles", text)


def _known(spec: Rotary, trials: Sequence[Sequence[Call]], rules: Rules) -> tuple[Finding, ...]:
    """Return the first known fault that explains every result of a trial."""
    for code, text, wrong in faults(spec):
        if wrong.num_axes == spec.num_axes and any(
            not any(_differs(call, wrong, rules) for call in calls) for calls in trials
        ):
            return (Finding(code, text),)
    return ()


def _causes(
    wrong: Sequence[Call], spec: Rotary, kind: str, rules: Rules,
    identify_fn: Callable[..., Identification],
) -> tuple[Finding, ...]:  # fmt: skip
    """Return why calls differ: float32 angles for the cases that they explain, else `identify`."""
    others = {call.case for call in wrong if not _is_rounded(call, spec, rules)}
    rounded = [call for call in wrong if call.case not in others]
    findings = _measured(identify_fn, spec, kind, rules, others) if others else ()
    if rounded and all(code != "float32_angles" for code, _ in findings):
        findings = (*findings, _rounded(rounded, spec, rules))
    return findings or (Finding("differs", "for a reason not known"),)


def _measured(
    identify_fn: Callable[..., Identification], spec: Rotary, kind: str, rules: Rules,
    cases: Collection[str],
) -> tuple[Finding, ...]:  # fmt: skip
    """Return what `identify` finds in fn and not in the formula, and how the specs differ.

    cases  that are wrong: what concerns other cases alone is not their cause
    """
    if kind == "tables":  # identify calls it with the frequencies of base 10,000
        plain = dataclasses.replace(spec, schedule="default", params={}, base=1e4)
        right = Identification(plain, amplitude=1.0)
        options = {"rotary_dim": spec.rotary_dim}
    else:
        right = identify(
            lambda x, positions: rotated(spec, x, *tables(spec, positions, rules.seq_len)),
            spec.head_dim, form="positions", library="numpy", num_axes=spec.num_axes,
            max_position=rules.max_position,
        )  # fmt: skip
        options = {"num_axes": spec.num_axes}
    try:
        result = identify_fn(**options)
    except ValueError as error:
        return (Finding("refuses", str(error)),)
    of_cases = {code for codes in CASES.values() for code in codes}
    usual = {*right.codes, *(of_cases - {code for case in cases for code in CASES[case]})}
    usual |= {"clockwise"} if spec.sign < 0 else set()
    findings = [finding for finding in result.findings if finding.code not in usual]
    return (*findings, *_other(result, right, rules.allowed))


def _other(other: Identification, right: Identification, allowed: float) -> Iterator[Finding]:
    """Yield the fields in which the RoPE that was found differs from the right one."""
    if other.amplitude and right.amplitude and abs(other.amplitude / right.amplitude - 1) > allowed:
        text = f"cos and sin are multiplied by {other.amplitude:.6g}, not by {right.amplitude:.6g}"
        yield Finding("other_amplitude", text)
    if other.spec is None or right.spec is None:
        return
    is_, expected = other.spec.to_dict(), right.spec.to_dict()
    one, two = inv_freq(other.spec)[0], inv_freq(right.spec)[0]
    is_alike = one.shape == two.shape and np.allclose(one, two, rtol=1e-4, atol=1e-9)
    for name in is_:
        if is_[name] == expected[name] or (is_alike and name in ("base", "schedule", "params")):
            continue
        if name != "params":
            yield Finding(f"other_{name}", f"{name} is {is_[name]}, not {expected[name]}")
        elif other.spec.schedule == right.spec.schedule != "custom":
            text = f"{other.spec.schedule} has {is_[name]}, not {expected[name]}"
            yield Finding("other_params", text)


def _where(wrong: Sequence[Call], spec: Rotary, rules: Rules, count: int) -> str:
    """Return a sentence: how many calls differ, and the result of the first of them."""
    names = ", ".join(dict.fromkeys(call.case for call in wrong))
    first = wrong[0]
    summary = f"{len(wrong)} of {count} calls differ ({names}); "
    if first.y is None:
        return f"{summary}the first: {first.refusal}"
    expected = _expected(first, spec, rules.seq_len)
    place = np.unravel_index(np.abs(first.y - expected).argmax(), first.y.shape)
    row, head, token, channel = map(int, place)
    at = first.positions[row] if first.case == "rows" else first.positions
    return (
        f"{summary}the first: row {row}, head {head}, position {at[token].tolist()}, channel "
        f"{channel} is {first.y[place]:.6g}, should be {expected[place]:.6g}"
    )
