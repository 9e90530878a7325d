"""What every rank says of itself, gathered, and what is wrong between them."""

import dataclasses
import hashlib
import importlib.metadata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..angles import cos_sin, inv_freq, turns
from ..spec import Rotary
from .holders import misplaced, named, replicas, verb

Array = npt.NDArray[Any]

TOLERANCE = 1e-6  # exact tables are off by 1.5e-7, float32 angles by 8e-3 near position 131 072
_ROUNDED = 0.05  # another position is farther off than this in some pair
_SAMPLES = (0, 1, 1023, 131_071, 16_777_215, 2**39)


class Finding(NamedTuple):
    """One fault, in words, and the ranks that have it.

    what  "versions", "spec", "kernel", "positions" or "tables"
    """

    what: str
    ranks: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `compare` found, the same on every rank; nothing if `ok`.

    >>> print(Report(4, ()))
    4 ranks agree
    """

    world: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready data."""
        findings = [
            {"what": what, "ranks": list(ranks), "text": text}
            for what, ranks, text in self.findings
        ]
        return {"world": self.world, "ok": self.ok, "findings": findings}

    def __str__(self) -> str:
        """One line for each finding."""
        lines = [f"{each.what}: {each.text}" for each in self.findings]
        return "\n".join(lines) or f"{self.world} ranks agree"


class Account(NamedTuple):
    """What a rank says of itself, in a few hundred bytes.

    kernel  digest of the turns, and the largest error of the tables this machine makes
    rows    rows of a batch; None if it gives no positions
    digest  of the positions in their order
    total   how many tokens it holds of a row, and a sum over positions, blind to their order
    wanted  the same of the whole sequence
    """

    versions: dict[str, str]
    spec: dict[str, Any]
    kernel: tuple[str, float]
    rows: int | None = None
    digest: str = ""
    total: tuple[int, int] = (0, 0)
    wanted: tuple[int, int] = (0, 0)
    problem: str = ""
    tables: str = ""


def compare(
    spec: Rotary,
    positions: Any = None,
    cos: Any = None,
    sin: Any = None,
    *,
    seq_len: int | None = None,
    expected: Any = None,
    tolerance: float = TOLERANCE,
    group: Any = None,
) -> Report:
    """What is wrong between the ranks of a group: versions, spec, positions, tables. Collective.

    spec       of the model, the same on every rank
    positions  those of the tokens of this rank, (seq,) or (batch, seq), with several axes
               (..., seq, axes). All positions must be held by as many ranks: with tensor
               parallelism over 2 by two.
    cos, sin   the tables this rank turns by, (..., seq, rotary_dim / 2), if they are to be checked
    seq_len    tokens of the whole sequence, at positions 0 .. seq_len - 1 but for `expected`
    expected   its positions where they are others, (seq,) or (batch, seq), with several axes
               (..., seq, axes): packed, padded, images
    group      the ranks that share the sequence; default: all
    Ranks exchange a few hundred bytes each, and positions only where something is wrong. What a
    rank gives in a wrong shape or dtype is a finding, so that the others do not wait for it.
    Raises ValueError for positions with neither seq_len nor expected.

    >>> alone = dict(store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.init_process_group("gloo", **alone)
    >>> print(compare(Rotary(head_dim=64), torch.arange(8) + 1, seq_len=8))
    positions: 0 is held by nobody; 8 is outside of the sequence, on rank 0
    >>> dist.destroy_process_group()
    """
    if positions is not None and seq_len is None and expected is None:
        raise ValueError("positions need seq_len, or expected: the positions of the whole sequence")
    if cos is not None and (sin is None or positions is None):
        raise ValueError("tables are checked as cos and sin of positions: all three are needed")
    account = Account(_versions(), spec.to_dict(), _kernel(spec, seq_len))
    held = np.empty((0, 0, 0), np.int64)
    try:
        if positions is not None:
            held = _rows_of(positions, spec.num_axes)
            whole = _whole(expected, seq_len, held)
            digest = hashlib.sha256(repr(held.shape).encode() + held.tobytes()).hexdigest()
            account = account._replace(
                rows=len(held), digest=digest, total=_total(held), wanted=_total(whole)
            )
        if cos is not None:
            gap = _table_gaps(spec, _numpy(positions), cos, sin, seq_len)
            account = account._replace(
                tables=_tables_text(spec, gap, held, cos, tolerance, seq_len)
            )
    except (ValueError, TypeError) as error:
        account = account._replace(problem=str(error))
    accounts = gathered(account, group)
    findings = list(disagreements(accounts))
    is_readable = not any(each.what == "positions" for each in findings)
    if positions is not None and is_readable and not _is_whole(accounts):
        same = groups(accounts)
        is_first = dist.get_rank(group) in [ranks[0] for ranks in same]
        arrays = gathered(held if is_first else None, group)
        found = misplaced({ranks: arrays[ranks[0]] for ranks in same}, whole)
        findings += [Finding("positions", *found)] if found else []
    return Report(len(accounts), tuple(findings))


# --- what a rank says ---


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("rotary", "torch", "numpy")}


def _numpy(values: Any) -> Array:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)


def _kernel(spec: Rotary, seq_len: int | None) -> tuple[str, float]:
    """Digest of the turns, and the error of this machine's tables against float64."""
    length = 1 if seq_len is None else seq_len  # else it would follow from the samples
    steps, factor = turns(spec, length), inv_freq(spec, length)[1]
    at = np.array(_SAMPLES)
    per_axis = np.stack([at] * spec.num_axes, axis=-1) if spec.num_axes > 1 else at
    cos, sin = cos_sin(spec, per_axis, seq_len=length)
    phases = (at[:, None].view(np.uint64) * steps).view(np.int64)
    wanted = factor * np.exp(2j * np.pi * spec.sign * (phases / 2**64))
    off = float(np.abs(cos + 1j * sin - wanted).max()) / abs(factor)
    return hashlib.sha256(steps.tobytes() + repr(factor).encode()).hexdigest(), off


def _rows_of(positions: Any, axes: int) -> Array:
    """Positions as (rows, seq, axes) int64; ValueError if they are not positions."""
    array = _numpy(positions)
    if array.dtype.kind not in "iu":
        raise ValueError(f"positions must be whole numbers, got {array.dtype}")
    array = array if axes > 1 else array[..., None]
    if array.ndim not in (2, 3) or array.shape[-1] != axes:
        wanted = f"(seq, {axes}) or (batch, seq, {axes})" if axes > 1 else "(seq,) or (batch, seq)"
        raise ValueError(f"positions must be {wanted}, got shape {tuple(np.shape(positions))}")
    array = array.astype(np.int64)
    return np.ascontiguousarray(array if array.ndim == 3 else array[None])


def _total(rows: Array) -> tuple[int, int]:
    """Tokens of a row, and a 64-bit sum over all that is another if a position of any row is."""
    number = _mixed(np.arange(len(rows), dtype=np.uint64))
    state = np.broadcast_to(number[:, None], rows.shape[:2])
    for axis in range(rows.shape[2]):
        state = _mixed(state ^ rows[..., axis].astype(np.uint64))
    return rows.shape[1], int(state.sum(dtype=np.uint64))


def _mixed(x: Array) -> Array:
    """Source: SplitMix64 (Steele, Lea, Flood 2014), whose outputs of different inputs differ."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _whole(expected: Any, seq_len: int | None, held: Array) -> Array:
    """Positions of the whole sequence, for as many rows as there are: (rows, tokens, axes)."""
    rows, _, axes = held.shape
    if expected is None and axes > 1:
        raise ValueError(f"positions of {axes} axes need expected: those of the whole sequence")
    whole = _rows_of(np.arange(seq_len or 0) if expected is None else expected, axes)
    if len(whole) not in (1, rows):
        raise ValueError(f"expected has {len(whole)} rows, positions have {rows}")
    return np.broadcast_to(whole, (rows, *whole.shape[1:]))


def _table_gaps(spec: Rotary, positions: Array, cos: Any, sin: Any, seq_len: int | None) -> Array:
    """How far cos or sin of every token is from the exact one, (tokens,), amplitude 1."""
    exact = cos_sin(spec, positions, seq_len=seq_len, allow_negative=True)
    gaps = []
    for name, given, wanted in (("cos", cos, exact[0]), ("sin", sin, exact[1])):
        table = _floats(given)
        if table.size != wanted.size or table.shape[-1] != wanted.shape[-1]:
            raise ValueError(f"{name} must be {wanted.shape}, got shape {table.shape}")
        gap = np.abs(table.reshape(wanted.shape) - wanted).max(axis=-1).ravel()
        gaps.append(np.where(np.isnan(gap), np.inf, gap))
    return np.maximum(*gaps) / abs(inv_freq(spec, seq_len)[1])


def _tables_text(
    spec: Rotary, gaps: Array, held: Array, cos: Any, tolerance: float, seq_len: int | None
) -> str:
    """What is wrong with tables, or nothing."""
    if not (gaps > tolerance).any():
        return ""
    first = held.reshape(len(gaps), -1)[np.argmax(gaps > tolerance)].tolist()
    at = first[0] if len(first) == 1 else tuple(first)
    said = f"off by {gaps.max():.1e}, first at position {at}"
    if gaps.max() < _ROUNDED:
        return f"{said}: angles or tables of low precision"
    count = held.shape[1]
    if spec.num_axes == 1:
        local = cos_sin(spec, np.arange(count), seq_len=seq_len)[0]
        if np.abs(_floats(cos).reshape(-1, *local.shape) - local).max() <= tolerance:
            return f"{said}: they are those of 0..{count - 1}, arange(local length)"
    return f"{said}: they are those of other positions or frequencies"


def _floats(table: Any) -> Array:
    return _numpy(table.float() if isinstance(table, torch.Tensor) else table)


def gathered(mine: Any, group: Any = None) -> list[Any]:
    """What every rank of the group gives, by rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


# --- what follows from it ---


def _is_whole(accounts: Sequence[Account]) -> bool:
    """Whether the ranks hold every position of the sequence equally often, by their sums."""
    length, wanted = accounts[0].wanted
    count, total = (sum(each.total[part] for each in accounts) for part in (0, 1))
    return (total - replicas(count, length) * wanted) % 2**64 == 0


def groups(accounts: Sequence[Account]) -> list[tuple[int, ...]]:
    """The ranks that hold the same positions in the same order, by the first of them.

    >>> one = Account({}, {}, ("", 0.0), rows=1, digest="a")
    >>> groups([one, one._replace(digest="b"), one])
    [(0, 2), (1,)]
    """
    found: dict[str, list[int]] = {}
    for rank, each in enumerate(accounts):
        if each.rows is not None:
            found.setdefault(each.digest, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def disagreements(accounts: Sequence[Account]) -> Iterator[Finding]:
    """In what ranks differ from most others, and what each of them does wrong by itself.

    >>> one = Account({"rotary": "1"}, {"base": 10000.0}, ("", 0.0))
    >>> [each.text for each in disagreements([one, one, one._replace(spec={"base": 5e5})])]
    ['rank 2 has base 500000.0, most have 10000.0']
    """
    yield from _differing("versions", [each.versions for each in accounts])
    yield from _differing("spec", [each.spec for each in accounts])
    yield from _differing("spec", [{"turns": each.kernel[0][:8]} for each in accounts])
    yield from _differing("positions", [{"batch": each.rows} for each in accounts])
    yield from _differing("positions", [{"(seq_len, checksum)": each.wanted} for each in accounts])
    for rank, each in enumerate(accounts):
        if each.kernel[1] > TOLERANCE:
            text = f"tables made on rank {rank} are off by {each.kernel[1]:.1e}"
            yield Finding("kernel", (rank,), f"{text}; run rotary doctor there")
        if each.problem:
            yield Finding("positions", (rank,), f"rank {rank}: {each.problem}")
        if each.tables:
            yield Finding("tables", (rank,), f"those of rank {rank} are {each.tables}")


def _differing(what: str, facts: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for name in facts[0]:
        values = [repr(each[name]) for each in facts]
        usual = Counter(values).most_common(1)[0][0]
        for value in dict.fromkeys(values):
            if value != usual:
                ranks = tuple(rank for rank, each in enumerate(values) if each == value)
                said = f"{named(ranks)} {verb(ranks, 'has', 'have')} {name} {value}"
                yield Finding(what, ranks, f"{said}, most have {usual}")
