"""Finds out which RoPE a function computes, and what is wrong with it, by calling the function.

The function is called with basis vectors at positions 0, 1, 2, 4, ... Its results show which
channels form pairs, and by which angle each pair is rotated; each doubling of the position gives
the frequency twice as precisely. `blackbox.probe` calls the function, `blackbox.pairs` finds pairs
and angles, `blackbox.fit` the schedule, and `blackbox.examine` describes what is unusual.
"""

import dataclasses
import importlib.util
import operator
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .blackbox.examine import Answer, examine
from .blackbox.forms import (
    LIBRARIES,
    TABLES,
    Ways,
    boxes_with_positions,
    boxes_with_tables,
    by_place,
    first_that_works,
    form_of,
)
from .blackbox.probe import UNITS, Box, Finding, in_rad, one_line
from .kernels import Numbers as Array
from .spec import Rotary, check_whole
from .strict_json import JSON

FAR = 2**16  # for functions that take tables: here every pair of the probing tables has turned


@dataclasses.dataclass(frozen=True, eq=False)
class Identification(Answer):
    """What `identify` found.

    spec          the RoPE, or None if no `Rotary` describes it; findings are differences from it
    findings      what is unusual or wrong, (code, text) each; empty: a plain, exact RoPE
    is_rotation   every pair is rotated as a whole, and scores depend on the distance alone
    amplitude     the attention factor, as measured: the number that multiplies cos and sin
    inv_freq      (pairs,) float64, rad per token, as measured; None if unknown or given by tables
    arithmetic    what the angles are computed in: "exact", "float32 angles", "bfloat16 positions"
    right_up_to   the position up to which angles are right to `right_to`: of those probed, or for
                  float32 angles of all
    right_to      rad: 1e-3, and more where x or the tables are of 16 bits, which hide an error
    probed_up_to  the largest position at which the function returned a result
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
        return {
            **vars(self),
            "spec": None if self.spec is None else self.spec.to_dict(),
            "findings": [finding._asdict() for finding in self.findings],
            "inv_freq": None if self.inv_freq is None else self.inv_freq.tolist(),
        }

    def __str__(self) -> str:
        lines = [brief(self.spec) if self.spec else "not a RoPE that a Rotary can describe"]
        if self.tables:
            lines[0] += f", tables given: {self.tables} (frequencies are the caller's)"
        if self.right_up_to is not None:
            right = f"right to {in_rad(self.right_to or 0.0)} rad up to position"
            lines.append(f"angles: {self.arithmetic}; {right} {self.right_up_to:,}, probed up to "
                         f"{self.probed_up_to:,}")  # fmt: skip
        lines += [f"{finding.code}: {finding.text}" for finding in self.findings]
        return "\n  ".join(lines if len(lines) > 1 or not self.is_rotation else [*lines, "plain"])


def brief(spec: Rotary) -> str:
    """Return the repr of a spec, with long lists shortened.

    >>> brief(Rotary(head_dim=4))
    'Rotary(head_dim=4)'
    """

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
    """Find out which RoPE a callable computes, and what is unusual or wrong with it.

    fn            f(x, positions) -> x, or f(q, k, cos, sin) -> (q, k) in the style of transformers,
                  or two callables of the first form, for q and for k; arguments may be
                  keyword-only, in this order
    head_dim      channels of a head
    form          "positions" or "tables"; default: read from the signature
    seq_dim       -2: x is (1, heads, seq, head_dim); -3: (1, seq, heads, head_dim). The number of
                  heads differs between calls, and is often head_dim. Positions are int64, (seq,) or
                  (1, seq), with several axes (seq, axes) or (1, seq, axes). A batch of two is also
                  asked with positions, or tables, of two rows: (2, seq)
    library       "numpy" or "torch"; default: the first that the callable takes
    dtype         of x: "float32", "float64", "float16", "bfloat16"
    num_axes      how many numbers a position has, for f(x, positions)
    rotary_dim    of f(q, k, cos, sin): channels that the tables are for; default head_dim
    max_position  largest position to probe; lower it for callables that build a table up to it

    Returns an `Identification`. The code of a finding is a stable name, such as "no_rotation".
    docs/identify.md lists all codes with their meaning, and the faults that cannot be detected.

    Frequencies are found modulo one turn per token. If several specs explain them, the simplest one
    is returned: an NTK base may be reported as a plain base, many trained lengths give the same
    YaRN, and low_freq_factor is reported as 1.
    Raises ValueError for a callable that raises, or returns another shape or numbers that are not
    finite, at positions 0 to 4; at larger positions that is a finding.

    >>> import rotary
    >>> found = identify(lambda x, positions: rotary.apply(rotary.Rotary(head_dim=8, base=500.0), x,
    ...                                                    positions=positions), 8)
    >>> print(found)
    Rotary(head_dim=8, base=500.0)
      angles: exact; right to 1e-3 rad up to position 1,048,576, probed up to 1,048,576
    """
    check_whole("head_dim", head_dim, 2)
    check_whole("num_axes", num_axes)
    check_whole("max_position", max_position)
    if rotary_dim is not None and (rotary_dim % 2 or not 0 < rotary_dim <= head_dim):
        raise ValueError(f"rotary_dim must be even and in (0, {head_dim}], got {rotary_dim!r}")
    fns, kind = callables(fn, form, seq_dim, library, dtype)
    if kind == "tables":
        if num_axes != 1:
            raise ValueError("num_axes belongs to f(x, positions): tables have no axes")
        boxes_of = partial(boxes_with_tables, fns[0], head_dim, seq_dim, library, dtype)
        return _with_tables(boxes_of, rotary_dim or head_dim)
    if rotary_dim is not None:
        raise ValueError(
            "rotary_dim belongs to f(q, k, cos, sin): for f(x, positions) it is measured"
        )
    ways = [boxes_with_positions(f, head_dim, seq_dim, library, dtype, num_axes) for f in fns]
    boxes = [box for way in ways for box in first_that_works(way)]
    return _with_differences(boxes, [examine(box, max_position) for box in boxes])


def callables(
    fn: Callable[..., object] | Sequence[Callable[..., object]],
    form: str | None,
    seq_dim: int,
    library: str | None,
    dtype: str,
) -> tuple[tuple[Callable[..., object], ...], str]:
    """Return the callables, one or two, and their form; ValueError for an invalid argument.

    >>> callables(lambda x, positions: x, None, -2, None, "float32")[1]
    'positions'
    """
    for name, choice, choices in (("form", form, (None, "positions", "tables")),
                                  ("seq_dim", seq_dim, (-2, -3)), ("dtype", dtype, tuple(UNITS)),
                                  ("library", library, (None, *LIBRARIES))):  # fmt: skip
        if choice not in choices:
            names = ", ".join(map(repr, choices))
            raise ValueError(f"{name} must be one of {names}; got {choice!r}")
    fns = tuple(fn) if isinstance(fn, Sequence) else (fn,)
    if not 1 <= len(fns) <= 2 or not all(map(callable, fns)):
        raise ValueError("fn must be a callable, or two: of q and of k")
    forms = {form or form_of(f) for f in fns}
    if len(fns) == 2 and forms != {"positions"}:
        raise ValueError("two callables must both be f(x, positions)")
    return tuple(map(by_place, fns)), forms.pop()


def load(target: str) -> Callable[..., object]:
    """Import the callable "module:function" or "path/to/file.py:function"; its file is executed.

    Modules are looked for in the current folder too, and a file can import its neighbours.
    Raises ValueError, in one line, for a target that cannot be read, run or called.

    >>> load("math:sqrt")(4.0)
    2.0
    """
    location, colon, name = target.rpartition(":")
    if not (location and colon and name):
        raise ValueError(f"target must be module:function or file.py:function, got {target!r}")
    is_file = location.endswith(".py")
    folder = str(Path(location).resolve().parent if is_file else Path.cwd())
    sys.path.insert(0, folder)
    try:
        module = _from_file(Path(location)) if is_file else pkgutil.resolve_name(location)
        function: Callable[..., Any] = operator.attrgetter(name)(module)
    except (Exception, SystemExit) as error:  # whatever a stranger's file raises
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


def _with_differences(boxes: Sequence[Box], answers: Sequence[Answer]) -> Identification:
    """Return the answer about q, with findings about what is different in k."""
    q, findings = answers[0], list(answers[0].findings)
    is_rotation = all(answer.is_rotation for answer in answers)
    for box, k in zip(boxes[1:], answers[1:], strict=True):
        findings += [
            finding._replace(text=f"k: {finding.text}")
            for finding in k.findings
            if finding not in q.findings
        ]
        apart = np.abs(box.matrices([3, 4, 5]) - boxes[0].matrices([3, 4, 5])).max()
        if apart > 2e-5 + 4 * UNITS[box.dtype]:
            text = f"q and k are treated differently{_difference(q.spec, k.spec)}"
            findings.append(Finding("q_k_differ", text))
            is_rotation = is_rotation and q.spec == k.spec
    fields = {**vars(q), "findings": tuple(findings), "is_rotation": is_rotation}
    return Identification(**fields)


def _difference(q: Rotary | None, k: Rotary | None) -> str:
    """Describe the fields in which two specs differ; "" if either is None."""
    if q is None or k is None:
        return ""
    one, two = q.to_dict(), k.to_dict()
    names = [name for name in one if one[name] != two[name] and name != "params"]
    shown = ", ".join(f"{name} {one[name]} and {two[name]}" for name in names)
    return f": {shown or 'frequencies or attention factor'}"


def _with_tables(boxes_of: Callable[[Array, str], Ways], width: int) -> Identification:
    """Identify f(q, k, cos, sin), with the order of table columns that fits it best.

    boxes_of  (inv_freq, order) -> the boxes to try, with such tables
    """
    inv_freq = 1e4 ** (-np.arange(0, width, 2) / width)
    best, refusals = None, []
    for order in TABLES:
        try:
            boxes = first_that_works(boxes_of(inv_freq, order))
            answers = [examine(box, FAR) for box in boxes]
        except ValueError as error:
            refusals.append(str(error))
            continue
        result = dataclasses.replace(
            _with_differences(boxes, answers), tables=order,
            inv_freq=None, arithmetic=None, right_up_to=None, right_to=None,
            probed_up_to=None,
        )  # fmt: skip
        for answer in answers:
            measured = np.zeros(0) if answer.inv_freq is None else answer.inv_freq
            is_right = measured.shape == inv_freq.shape and np.abs(measured - inv_freq).max() < 1e-3
            if answer.spec is not None and is_right:  # they rotate as the tables say
                return result
        best = best or result
    if best is None:
        raise ValueError(refusals[0])
    return best
