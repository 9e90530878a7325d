"""Calls a function, and finds out what it does beside rotating single tokens.

Every call goes through `Box`, which takes and returns float64 NumPy arrays and turns any error into
a ValueError of one line.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Converter = Callable[[Array], Any]  # to an array of any library

UNITS = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # rounding of x
LONG_ROWS = (1024, 4096, 16384)  # tokens: enough to pass the usual trained lengths
ROWS = {  # how two rows of positions, or of tables, can rotate two rows of x wrongly
    "rows_share_positions": "given {what} of two rows, row 1 of x is rotated by those of row 0: "
    "right only if all rows share their positions",
    "rows_differ": "given {what} of two rows, rows of x are not rotated by their own",
}
MAX_INDEXED = 256  # positions that are token numbers cost memory: head_dim^2 for each of them


class Finding(NamedTuple):
    """Something worth knowing: a stable `code`, and what it means in plain words."""

    code: str
    text: str


class NotFiniteError(ValueError):
    """A call that was not refused gave numbers that are not finite."""


@dataclasses.dataclass(frozen=True)
class Box:
    """A callable and the form of its arguments.

    `arguments` makes of x and positions the NumPy arrays that the callable takes, by name and in
    order. The callable returns the rotated x, or q and k, of which x is the one at index `which`.
    With `by_index` it ignores positions and counts tokens from 0, so a run of positions is put at
    the end of a longer row.
    Positions are multiples of `step`; with `by_row` each row may have its own: (batch, seq).
    """

    fn: Callable[..., Any]
    convert: Converter
    head_dim: int
    seq_dim: int
    num_axes: int
    dtype: str
    arguments: Callable[[Array, Array], Mapping[str, Array]] = lambda x, p: {"x": x, "positions": p}
    which: int | None = None
    by_index: bool = False
    step: int = 1
    by_row: bool = False

    def __call__(self, x: Array, positions: Array) -> Array:
        """Return x (batch, heads, seq, head_dim) rotated at `positions` (seq,) or (seq, axes)."""
        return self.call(self.given(x, positions))[0]

    def given(self, x: Array, positions: Array) -> dict[str, object]:
        """Return new arguments of the callable by name, arrays of its own library."""
        arrays = self.arguments(x if self.seq_dim == -2 else x.swapaxes(1, 2), positions)
        return {name: self.convert(array) for name, array in arrays.items()}

    def call(self, given: Mapping[str, Any]) -> tuple[Array, object]:
        """Return the rotated x, and the array that was returned, of the callable's own library."""
        asked = tuple(list(given.values())[self.which or 0].shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a box may warn of far positions
            try:
                result = self.fn(*given.values())
                result = result if self.which is None else _chosen(result, self.which)
                shape, values = np.shape(result), to_numpy(result)
            except (Exception, SystemExit) as error:  # whatever a stranger's code raises
                raise ValueError(f"the callable raised {one_line(error)}") from error
        if tuple(shape) != asked:
            raise ValueError(f"the callable returned shape {tuple(shape)} for x of shape {asked}")
        if not np.isfinite(values).all():
            raise NotFiniteError("the callable returned numbers that are not finite")
        return values if self.seq_dim == -2 else values.swapaxes(1, 2), result

    def positions(self, numbers: Any, axis: int | None = None) -> Array:
        """Return positions (seq,) or (seq, axes): `numbers` on `axis`, others 0; None: on all."""
        numbers = np.asarray(numbers, np.int64) * self.step
        if self.num_axes == 1:
            return numbers
        columns = np.zeros((len(numbers), self.num_axes), np.int64)
        columns.T[slice(None) if axis is None else axis] = numbers
        return columns

    def matrices(self, numbers: Sequence[int], axis: int | None = None) -> Array:
        """Return the matrix that the box applies to channels at each position: (numbers, out, in).

        With `by_index` the numbers must be consecutive.
        """
        lead = numbers[0] if self.by_index else 0
        tokens = np.concatenate([np.arange(lead), numbers])
        # head h holds the h-th basis vector, at every token; one more head avoids equal numbers of
        # heads and tokens, which a callable may refuse
        heads = self.head_dim + (len(tokens) == self.head_dim)
        eye = np.eye(heads, self.head_dim)
        x = np.broadcast_to(eye[None, :, None], (1, heads, len(tokens), self.head_dim))
        rotated = self(x, self.positions(tokens, axis))[0, : self.head_dim, lead:]
        return rotated.transpose(1, 2, 0).astype(np.float32 if self.dtype != "float64" else None)


def _chosen(results: Any, which: int) -> Any:
    if not isinstance(results, tuple | list) or len(results) != 2:
        raise ValueError(f"it must return (q, k), got {type(results).__name__}")
    return results[which]


def to_numpy(array: object) -> Array:
    """Return a float64 NumPy copy of an array of any library."""
    if hasattr(array, "detach"):  # torch has no NumPy dtype for bfloat16
        array = array.detach().cpu().double().numpy()
    return np.array(array, np.float64)


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def in_rad(angle: float) -> str:
    """Return an angle as text of two digits.

    >>> in_rad(0.0010003), in_rad(0.0213)
    ('1e-3', '2.1e-2')
    """
    digits, exponent = f"{angle:.1e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def sample(box: Box, batch: int, heads: int, seq: int, seed: int = 0) -> Array:
    """Return x (batch, heads, seq, head_dim) of numbers that every float type holds exactly."""
    shape = (batch, heads, seq, box.head_dim)
    return np.random.default_rng(seed).integers(-8, 9, shape) / 4


def rotation_of_rows(box: Box) -> str | None:
    """Return how two rows of positions rotate x: "own", each row by its own; or a code of `ROWS`.

    None if a box that takes one row refuses two, or takes them for something else: for two axes,
    where each channel of all rows follows one of them and not all the same, or for one offset.
    Two rows that are not broadcast to heads are refused, for there are three heads.
    """
    x = sample(box, 2, 3, 5)
    near, later = (box.positions(np.arange(first, first + 5)) for first in (3, 10))
    try:
        one, two = box(x, near), box(x, later)
    except ValueError:
        return None
    try:
        y = box(x, np.stack([near, later]))
    except NotFiniteError:
        return "rows_differ"
    except ValueError:
        return None
    allowed = (2e-5 + 8 * UNITS[box.dtype]) * np.abs(one).max()
    own = np.stack([one[0], two[1]])
    follows = [np.abs(y - each).max(axis=(0, 1, 2)) <= allowed for each in (own, one, two)]
    if follows[0].all():
        return "own"
    if follows[1].all():
        return "rows_share_positions"
    if not follows[2].all() and (follows[1] | follows[2]).all():
        return None
    try:
        gaps = box(x, box.positions([3, 11, 4, 20, 9]))
    except ValueError:  # it takes one offset
        return None
    return "rows_differ" if np.abs(gaps - one).max() > allowed else None


def beside(box: Box, change: Callable[[Array], Array]) -> Box:
    """Return a box of q or k where the other of both is changed."""
    other = "k" if box.which == 0 else "q"

    def arguments(x: Array, positions: Array) -> Mapping[str, Array]:
        given = box.arguments(x, positions)
        return {**given, other: change(given[other])}

    return dataclasses.replace(box, arguments=arguments)


def grouped(box: Box) -> Box:
    """Return a box of q or k where q has twice as many heads as k, as grouped queries have."""
    axis = 1 if box.seq_dim == -2 else 2
    if box.which == 0:
        return beside(box, lambda k: np.split(k, 2, axis)[0])
    return beside(box, lambda q: np.repeat(q, 2, axis))


def takes(box: Box, x: Array, positions: Array) -> bool:
    """Whether a call gives numbers of the right shape, also if they are not finite."""
    try:
        box(x, positions)
    except NotFiniteError:
        return True
    except ValueError:
        return False
    return True


def overwriting(box: Box, x: Array, other: Array, positions: Array) -> list[Finding]:
    """Return findings about arguments, and results of an earlier call, that a call overwrites."""
    given, findings = box.given(x, positions), []
    before = {name: to_numpy(array) for name, array in given.items()}
    _, returned = box.call(given)
    overwritten = [n for n in given if not np.array_equal(before[n], to_numpy(given[n]))]
    kept = to_numpy(returned)
    box(other, positions)
    if overwritten:
        text = f"overwrites the {' and '.join(overwritten)} that it gets"
        findings.append(Finding("overwrites_input", text))
    if not np.array_equal(kept, to_numpy(returned)):
        text = "overwrites the result of the call before: every call returns the same buffer"
        findings.append(Finding("overwrites_output", text))
    return findings


def check(box: Box) -> list[Finding]:
    """Return findings of a few small calls: effects that no rotation of single tokens has."""
    numbers = np.arange(3, 8)
    x, other, positions = sample(box, 1, 3, 5), sample(box, 1, 3, 5, 1), box.positions(numbers)
    y, findings = box(x, positions), overwriting(box, x, other, positions)
    allowed = (2e-5 + 8 * UNITS[box.dtype]) * (float(np.abs(y).max()) or 1.0)

    def differ(one: Array, two: Array) -> bool:
        return bool(np.abs(one - two).max() > allowed)

    def add_if(is_true: bool, code: str, text: str) -> None:
        if is_true:
            findings.append(Finding(code, text))

    if differ(box(x, positions), y):
        return [*findings, Finding("not_repeatable", "the same call gives another result")]
    if box.which is not None and differ(beside(box, np.negative)(x, positions), y):
        own, other_one = "qk" if box.which == 0 else "kq"
        text = f"the result for {own} depends on {other_one}"
        if not differ(beside(box, np.negative)(-x, positions), y):
            text += f", and not on {own}: one is taken for the other"
        return [*findings, Finding("mixes_q_k", text)]
    mixed = box(2 * x - 3 * other, positions)
    if differ(mixed, 2 * y - 3 * box(other, positions)):
        return [*findings, Finding("not_linear", "not linear in x: it normalizes, adds or clips")]

    lone = x.copy()
    lone[:, 1:] = 0
    add_if(differ(box(lone, positions)[:, 1:], lone[:, 1:]),
           "mixes_heads", "the result of one head depends on another head")  # fmt: skip
    order = [1, 2, 0]  # not a swap, which would commute with a box that swaps the same heads
    if differ(box(x[:, order], positions), y[:, order]):
        turned = box(np.broadcast_to(x[:, :1, :1], x.shape), positions)
        size = np.linalg.norm(turned, axis=-1)
        if not differ(turned, turned[:, :, :1]) and np.ptp(size) < 1e-3 * size.max():
            return [*findings, Finding("heads_as_positions", "each head is rotated by an angle of "
                                       "its own and tokens are not: heads are taken for tokens, or "
                                       "seq_dim is the other one")]  # fmt: skip
        findings.append(Finding("heads_differ", "not all heads are rotated alike"))
    if not findings:
        many = np.repeat(x[:, :1], max(64, box.head_dim), axis=1)
        with suppress(ValueError):  # it may take other numbers of heads only
            wrong = np.abs(box(many, positions) - y[:, :1]).max((0, 2, 3)) > allowed
            text = f"head {wrong.argmax()} of {len(wrong)} equal ones is rotated differently"
            add_if(bool(wrong.any()), "heads_differ", text)
    others = [0, 2, 3, 4]
    lone = x.copy()
    lone[:, :, others] = 0
    add_if(differ(box(lone, positions)[:, :, others], lone[:, :, others]),
           "mixes_tokens", "the result of one token depends on another token")  # fmt: skip
    for what, lone in (("head", x[:, :1]), ("token", x[:, :, :1])) if not findings else ():
        for rows in (1, 2):  # 2: a kernel may forget all rows of a batch but the first
            with suppress(ValueError):  # it may refuse such a call
                alone = box(np.repeat(lone, rows, axis=0), positions[: lone.shape[2]])
                add_if(differ(alone[-1:], y[:, : lone.shape[1], : lone.shape[2]]),
                       "depends_on_shape", f"a {what} alone is rotated differently than among "
                       f"others, in a batch of {rows}")  # fmt: skip
    if box.which is not None and not findings:
        with suppress(ValueError):  # it may take as many heads of k as of q only
            four = sample(box, 1, 4, 5)
            text = "the result is another one where k has half as many heads as q"
            wrong = differ(grouped(box)(four, positions), box(four, positions))
            add_if(wrong, "depends_on_shape", text)
    try:
        both = box(np.concatenate([other, x]), positions)
        add_if(differ(both[1:], y), "mixes_batch", "a row depends on the rest of its batch")
    except ValueError as error:
        add_if(True, "refuses_batch", f"refuses a batch of two: {error}")
    if box.by_row and (code := rotation_of_rows(box)) in ROWS:
        what = "positions" if box.which is None else "cos and sin"
        findings.append(Finding(code, ROWS[code].format(what=what)))
    later = box(x, box.positions(numbers + 7))
    if not differ(later, y):
        add_if(True, "positions_ignored", "the result does not depend on the given positions")
        return findings
    try:
        jumped = box(x, box.positions([3, 11, 4, 20, 9]))
        text = "reads only the first position: positions must be consecutive, so packing and "
        text += "padding go wrong"
        add_if(differ(jumped[:, :, 1], later[:, :, 1]), "positions_consecutive", text)
    except ValueError as error:
        add_if(True, "positions_consecutive", f"refuses positions with gaps: {error}")
    return findings


def length_dependence(box: Box, limit: int, jumps: bool) -> tuple[int | None, list[Finding]]:
    """Return the last position before results depend on the row length, or None; and findings.

    `jumps`: the box takes positions that are not consecutive, so one far position makes a row long.
    """
    x = sample(box, 1, 2, 3)
    near = box.positions([17, 18, 19])
    before = box(x, near)
    findings, safe = [], None

    def differ(one: Array, two: Array) -> bool:
        return bool(np.abs(one - two).max() > 2e-5 + 16 * UNITS[box.dtype])

    def changes(far: int) -> bool | None:
        """Whether a far token changes the first one of a row; None if the row is refused."""
        try:
            return differ(box(x, box.positions([17, 18, far]))[:, :, :1], before[:, :, :1])
        except ValueError:
            return None

    far = 32
    while jumps and far <= limit and (changed := changes(far)) is not None:
        if changed:
            safe = far // 2
            findings = [Finding("depends_on_length", f"results change when the row reaches a "
                                f"length between {safe + 2} and {far + 1}")]  # fmt: skip
            break
        far *= 2
    if findings and box.by_row:
        with suppress(ValueError):
            rows = np.stack([near, box.positions([17, 18, far])])
            if differ(box(np.concatenate([x, x]), rows)[:1], box(x, near)):
                text = "a short row is rotated differently beside a long one: the length is "
                findings.append(Finding("depends_on_batch", text + "that of the batch"))
    for seq in [seq for seq in LONG_ROWS if seq <= limit and not findings]:
        row = np.concatenate([x, sample(box, 1, 2, seq - 3, 1)], axis=2)
        try:
            y = box(row, box.positions(np.arange(17, 17 + seq)))
        except ValueError:
            continue
        if differ(y[:, :, :1], before[:, :, :1]):
            safe = seq // 4
            text = f"rows of {seq} tokens are rotated differently"
            findings = [Finding("depends_on_length", text)]
        elif (token := token_lost(box, row, y, differ)) is not None:
            text = f"token {token} or one of the next two is rotated differently in a row of "
            text += f"{seq} than at the beginning of a row"
            findings = [Finding("later_tokens_differ", text)]
        if findings:
            break
    if differ(box(x, near), before):
        text = "a short row is rotated differently after a long one"
        findings.append(Finding("remembers_length", text))
    return safe, findings


def token_lost(
    box: Box, row: Array, y: Array, differ: Callable[[Array, Array], bool]
) -> int | None:
    """Return the first of some tokens of y, a rotated row, that a short row has otherwise; or None.

    The tokens 4, 8, 16, ... and the last three, each with the next two; the row begins at 17.
    """
    seq = row.shape[2]
    try:
        for at in (*(1 << power for power in range(2, seq.bit_length() - 1)), seq - 3):
            few = slice(at, at + 3)
            alone = box(row[:, :, few], box.positions(np.arange(17 + at, 20 + at)))
            if differ(y[:, :, few], alone):
                return at
    except ValueError:
        return None
    return None
