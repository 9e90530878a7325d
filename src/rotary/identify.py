"""Which RoPE does this callable compute? Probes a black box and says what it is and what is wrong.

The box is given basis vectors at positions 0, 1, 2, 4, ... What comes out says which channels form
pairs, and by which angle each pair is rotated; each doubling of the position tells the frequency
twice as precisely. `blackbox.probe` calls the box, `blackbox.pairs` finds pairs and angles,
`blackbox.fit` the schedule, and `blackbox.examine` puts what is odd into words.
"""

import dataclasses
import importlib.util
import operator
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .blackbox.examine import Answer, examine
from .blackbox.probe import (
    LIBRARIES,
    TABLES,
    UNITS,
    Box,
    Finding,
    boxes_with_positions,
    boxes_with_tables,
    first_that_works,
    form_of,
    one_line,
)
from .kernels import Numbers as Array
from .spec import Rotary
from .strict_json import JSON

FAR = 2**16  # for functions that are given tables: enough to see every pair of our tables rotate


@dataclasses.dataclass(frozen=True, eq=False)
class Identification(Answer):
    """What `identify` found.

    spec          the RoPE, or None if it is none; what a finding says deviates from it
    findings      what is unusual or wrong, (code, text) each; empty: a plain, exact RoPE
    is_rotation   every pair is rotated as a whole, and scores depend on the distance alone
    amplitude     the number that multiplies cos and sin (attention factor)
    inv_freq      (pairs,) float64, rad per token, as measured; None if unknown or given by tables
    arithmetic    what the angles are computed in: "exact", "float32 angles", "bfloat16 positions"
    right_up_to   the largest probed position up to which angles are right to 1e-3 rad
    probed_up_to  the largest position that was asked and answered
    tables        of f(q, k, cos, sin): "tile" for cat(c, c), "repeat" for repeat_interleave(c, 2),
                  "half" for c alone; None for f(x, positions)

    >>> Identification(None, (Finding("no_rotation", "it changes nothing"),)).codes
    ('no_rotation',)
    """

    tables: str | None = None

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings, in their order."""
        return tuple(finding.code for finding in self.findings)

    def to_dict(self) -> dict[str, JSON]:
        """All fields as JSON-ready data.

        >>> Identification(None).to_dict()["findings"]
        []
        """
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **plain,
            "spec": None if self.spec is None else self.spec.to_dict(),
            "findings": [finding._asdict() for finding in self.findings],
            "inv_freq": None if self.inv_freq is None else self.inv_freq.tolist(),
        }

    def __str__(self) -> str:
        lines = [_brief(self.spec) if self.spec else "not a RoPE that a Rotary can describe"]
        if self.tables:
            lines[0] += f", tables given: {self.tables} (frequencies are the caller's)"
        if self.right_up_to is not None:
            lines.append(f"angles: {self.arithmetic}; right to 1e-3 rad up to position "
                         f"{self.right_up_to:,}, probed up to {self.probed_up_to:,}")  # fmt: skip
        lines += [f"{finding.code}: {finding.text}" for finding in self.findings]
        return "\n  ".join(lines if len(lines) > 1 or not self.is_rotation else [*lines, "plain"])


def _brief(spec: Rotary) -> str:
    """The repr, with long lists cut."""

    def cut(match: re.Match[str]) -> str:
        values = match[1].split(", ")
        few = ", ".join(values[:3])
        return match[0] if len(values) <= 8 else f"[{few}, ... {len(values)} values]"

    return re.sub(r"\[([^\]]*)\]", cut, repr(spec))


def identify(
    fn: Callable[..., object] | Sequence[Callable[..., object]],
    head_dim: int,
    *,
    form: str | None = None,
    seq_dim: int = -2,
    library: str | None = None,
    dtype: str = "float32",
    num_axes: int = 1,
    rotary_dim: int | None = None,
    max_position: int = 2**20,
) -> Identification:
    """Which RoPE a callable computes, and what is unusual or wrong with it.

    fn            f(x, positions) -> x, or f(q, k, cos, sin) -> (q, k) in the style of transformers,
                  or two callables of the first form, for q and for k
    form          "positions" or "tables"; default: read from the signature
    seq_dim       -2: x is (1, heads, seq, head_dim); -3: (1, seq, heads, head_dim). Any number of
                  heads is tried, head_dim of them at once; positions are int64, (seq,) or (1, seq),
                  with several axes (seq, axes) or (1, seq, axes)
    library       "numpy" or "torch"; default: the first that the callable takes
    dtype         of x: "float32", "float64", "float16", "bfloat16"
    rotary_dim    of f(q, k, cos, sin): channels that the tables are for; default head_dim
    max_position  how far to probe; less for callables that build a table of every position

    Codes of findings, where it is no plain RoPE: no_rotation, not_a_rotation, not_linear,
    not_shift_invariant, mixes_channels, mixes_heads, mixes_tokens, mixes_batch,
    rows_share_positions, heads_differ, heads_as_positions, mixed_axes, axes_ignored,
    axes_split_pairs, mixed_directions, tables_in_other_layout, sin_missing, cos_of_cos, pair_scale,
    position_scale, scales_the_rest, clockwise, cos_sin_swapped, offset, phase, q_k_differ, no_spec;
    of cos and sin: amplitude, no_attention_factor, attention_factor_twice,
    attention_factor_divides, mscale_alone;
    of frequencies: ramp_inverted, frequencies_multiplied, growth_divides, reciprocal_frequencies,
    denominator, last_pair_at_base, pairs_from_1, duplicate_frequency, off_ladder;
    of the length: depends_on_length, depends_on_batch, depends_on_position, dynamic_linear,
    amplitude_depends_on_length, remembers_length, positions_shared, positions_clamped,
    positions_restart, positions_overflow, not_rotated_far;
    of precision: float32_angles, float32_running_product, angles_drift, uneven, and bfloat16 or
    float16 before _positions, _frequencies, _angles, _tables;
    of the call: overwrites_input, not_repeatable, positions_ignored, positions_consecutive,
    depends_on_shape, refuses_batch, far_refused. docs/guide.md says what each means, and what
    cannot be seen.

    Frequencies are found modulo one turn per token. The fewest words that explain them win: an NTK
    base may be a plain base, many trained lengths give the same YaRN, low_freq_factor is called 1.
    Raises ValueError for a callable that raises, or returns other shapes or numbers not finite,
    when asked for positions 0 to 4; farther on that is a finding.

    >>> import rotary
    >>> found = identify(lambda x, positions: rotary.apply(rotary.Rotary(head_dim=8, base=500.0), x,
    ...                                                    positions=positions), 8)
    >>> print(found)
    Rotary(head_dim=8, base=500.0)
      angles: exact; right to 1e-3 rad up to position 1,048,576, probed up to 1,048,576
    """
    _check_arguments(head_dim, form, seq_dim, library, dtype, num_axes, rotary_dim, max_position)
    fns = tuple(fn) if isinstance(fn, Sequence) else (fn,)
    if not 1 <= len(fns) <= 2 or not all(map(callable, fns)):
        raise ValueError("fn must be a callable, or two: of q and of k")
    forms = {form or form_of(f) for f in fns}
    if forms == {"tables"} and len(fns) == 1:
        if num_axes != 1:
            raise ValueError("num_axes belongs to f(x, positions): tables have no axes")
        return _with_tables(fns[0], head_dim, seq_dim, library, dtype, rotary_dim or head_dim)
    if forms != {"positions"}:
        raise ValueError("two callables must both be f(x, positions)")
    if rotary_dim is not None:
        raise ValueError("rotary_dim belongs to f(q, k, cos, sin): for f(x, positions) it is found")
    ways = [boxes_with_positions(f, head_dim, seq_dim, library, dtype, num_axes) for f in fns]
    boxes = [first_that_works(way) for way in ways]
    return _compared(boxes, [examine(box, max_position) for box in boxes])


def load(target: str) -> Callable[..., object]:
    """The callable named "module:function" or "path/to/file.py:function"; its file is executed.

    Modules are looked for in the current folder too, and a file sees its neighbours.
    Raises ValueError, of one line, for a target that cannot be read, run or called.

    >>> load("math:sqrt")(4.0)
    2.0
    """
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise ValueError(f"target must be module:function or file.py:function, got {target!r}")
    is_file = place.endswith(".py")
    folder = str(Path(place).resolve().parent if is_file else Path.cwd())
    sys.path.insert(0, folder)
    try:
        module = _from_file(Path(place)) if is_file else pkgutil.resolve_name(place)
        function: Callable[..., Any] = operator.attrgetter(name)(module)
    except Exception as error:  # whatever a stranger's file raises
        raise ValueError(f"{target} cannot be loaded: {one_line(error)}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    if not callable(function):
        raise ValueError(f"{target} is not callable: {type(function).__name__}")
    return function


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"rotary_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its own module up
    spec.loader.exec_module(module)
    return module


def _compared(boxes: Sequence[Box], answers: Sequence[Answer]) -> Identification:
    """The answer about q, with what is different about k."""
    q, *others = answers
    findings = list(q.findings)
    is_rotation = all(answer.is_rotation for answer in answers)
    for box, k in zip(boxes[1:], others, strict=True):
        findings += [
            finding._replace(text=f"k: {finding.text}")
            for finding in k.findings
            if finding not in q.findings
        ]
        if (text := _difference((boxes[0], q), (box, k))) is not None:
            findings.append(Finding("q_k_differ", text))
            is_rotation = is_rotation and q.spec == k.spec
    fields = {**vars(q), "findings": tuple(findings), "is_rotation": is_rotation}
    return Identification(**fields)


def _difference(q: tuple[Box, Answer], k: tuple[Box, Answer]) -> str | None:
    """In what q and k are treated differently, or None."""
    rotated = [box.matrices([3, 4, 5]) for box, _ in (q, k)]
    if np.abs(rotated[0] - rotated[1]).max() <= 2e-5 + 4 * UNITS[q[0].dtype]:
        return None
    one, two = q[1].spec, k[1].spec
    if one is None or two is None:
        return "q and k are treated differently"
    plain = one.to_dict(), two.to_dict()
    fields = [name for name in plain[0] if plain[0][name] != plain[1][name] and name != "params"]
    shown = ", ".join(f"{name} {plain[0][name]} and {plain[1][name]}" for name in fields)
    return f"q and k are treated differently: {shown or 'frequencies or amplitude'}"


def _with_tables(
    fn: Callable[..., object],
    head_dim: int,
    seq_dim: int,
    library: str | None,
    dtype: str,
    width: int,
) -> Identification:
    """The rotation of f(q, k, cos, sin), under the order of tables that suits it best."""
    inv_freq = 1e4 ** (-np.arange(0, width, 2) / width)
    best, refusals = None, []
    for order in TABLES:
        ways = boxes_with_tables(fn, head_dim, seq_dim, library, dtype, inv_freq, order)
        try:
            boxes = first_that_works(ways)
            answers = [examine(box, FAR) for box in boxes]
        except ValueError as error:
            refusals.append(str(error))
            continue
        result = dataclasses.replace(
            _compared(boxes, answers), tables=order,
            inv_freq=None, arithmetic=None, right_up_to=None, probed_up_to=None,
        )  # fmt: skip
        if any(_turns_by(answer, inv_freq) for answer in answers):
            return result
        best = best or result
    if best is None:
        raise ValueError(refusals[0])
    return best


def _turns_by(answer: Answer, inv_freq: Array) -> bool:
    """Whether pairs rotate by the frequencies that the tables were made of, in their order."""
    measured = answer.inv_freq
    if answer.spec is None or measured is None or len(measured) != len(inv_freq):
        return False
    return bool(np.abs(measured - inv_freq).max() < 1e-3)


def _check_arguments(
    head_dim: int, form: str | None, seq_dim: int, library: str | None, dtype: str, num_axes: int,
    rotary_dim: int | None, max_position: int,
) -> None:  # fmt: skip
    for name, value, least in (("head_dim", head_dim, 2), ("num_axes", num_axes, 1),
                               ("max_position", max_position, 1)):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    if rotary_dim is not None and (rotary_dim % 2 or not 0 < rotary_dim <= head_dim):
        raise ValueError(f"rotary_dim must be even and in (0, {head_dim}], got {rotary_dim!r}")
    for name, choice, choices in (("form", form, (None, "positions", "tables")),
                               ("seq_dim", seq_dim, (-2, -3)), ("dtype", dtype, tuple(UNITS)),
                               ("library", library, (None, *LIBRARIES))):  # fmt: skip
        if choice not in choices:
            names = ", ".join(map(repr, choices))
            raise ValueError(f"{name} must be one of {names}; got {choice!r}")
