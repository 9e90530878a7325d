"""Checks that all ranks of a torch.distributed job use the same RoPE, and hold each token once.

Every rank sends its data to all ranks, and every rank compares.
"""

import dataclasses
import hashlib
import importlib.metadata
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from .angles import cos_sin, inv_freq, turns
from .kernels import Numbers as Array
from .spec import Rotary, check_spec, check_whole
from .words import brief

TOLERANCE = 1e-6  # exact tables are off by 1.5e-7, float32 angles by 8e-3 near position 131 072
_ROUNDED = 0.05  # tables of another position are off by more than this in some pair
_FAULTY = (ValueError, TypeError, MemoryError, RuntimeError)  # the last of tensors without numbers
_PACKAGES = ("rotary", "torch", "numpy")
_SAMPLES = (0, 1, 1023, 131_071, 16_777_215, 2**39)


class Finding(NamedTuple):
    """Something that is wrong on some ranks.

    what   "versions", "spec", "kernel", "positions" or "tables"
    ranks  the ranks that have it
    text   a description
    """

    what: str
    ranks: tuple[int, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `compare` found, the same on every rank; no findings if `ok`.

    >>> print(Report(4, ()))
    4 ranks agree
    """

    world: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON-ready data."""
        findings = [each._asdict() for each in self.findings]
        return {"world": self.world, "ok": self.ok, "findings": findings}

    def __str__(self) -> str:
        """Return one line for each finding."""
        lines = [f"{each.what}: {each.text}" for each in self.findings]
        return "\n".join(lines) or f"{self.world} ranks agree"


def compare(
    spec: Rotary,
    positions: object = None,
    cos: object = None,
    sin: object = None,
    *,
    seq_len: int | None = None,
    expected: object = None,
    tolerance: float = TOLERANCE,
    group: Any = None,
) -> Report:
    """Compare versions, spec, positions and tables of all ranks of a group. Collective.

    spec       of the model, the same on every rank
    positions  of the tokens of this rank, (seq,) or (batch, seq), with several axes (..., seq,
               axes). Each position must be on the same number of ranks (2 with tensor parallelism
               over 2), once per rank, or as often as it occurs in the sequence.
    cos, sin   the tables of this rank, (..., seq, rotary_dim / 2), to check them too
    seq_len    number of tokens of the whole sequence, if its positions are 0 .. seq_len - 1
    expected   the positions of the whole sequence, if they are others (packed, padded, images):
               (seq,) or (batch, seq), with several axes (..., seq, axes). Without `seq_len` each
               row is as long as its largest of them plus one, for specs that depend on the length
    tolerance  largest error of cos and sin, relative to the attention factor
    group      the ranks that share the sequence; default: all. Findings name ranks by their number
               in the job, as torchrun does
    Every rank receives the positions of all ranks, 8 bytes a token and axis from each rank that
    holds it (8 MiB for 1M tokens, 16 MiB with tensor parallelism over 2), and about 1 KB more. A
    wrong shape or dtype on one rank, or a tensor that holds no numbers (on the meta device), is a
    finding and not an error. An error on one rank is raised on all, so that no rank waits for it.
    Raises TypeError if `spec` is not a `Rotary`; ValueError for positions with neither seq_len nor
    expected, for tables without positions, for one table without the other, for a seq_len or
    tolerance that is no length or error, and in a rank that is not in the group.

    >>> alone = dict(store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.init_process_group("gloo", **alone)
    >>> print(compare(Rotary(head_dim=64), torch.arange(8) + 1, seq_len=8))
    positions: 0 is held by nobody; 8 is outside of the sequence, on rank 0
    >>> dist.destroy_process_group()
    """
    try:
        check_spec(spec)
        if seq_len is not None:
            check_whole("seq_len", np.asarray(seq_len).tolist(), 0)
        if not (isinstance(tolerance, Real) and tolerance > 0):
            raise ValueError(f"tolerance must be a number > 0, got {brief(tolerance)}")
        if positions is not None and seq_len is None and expected is None:
            raise ValueError(
                "positions need seq_len, or expected: the positions of the whole sequence"
            )
        if (cos is None) != (sin is None) or (cos is not None and positions is None):
            raise ValueError("to check tables pass positions, cos and sin: all three are needed")
    except (TypeError, ValueError) as refusal:
        if dist.is_initialized():
            gathered(str(refusal), group)
        raise
    rank = dist.get_rank()
    facts: dict[tuple[str, str], object] = {
        **{("versions", name): importlib.metadata.version(name) for name in _PACKAGES},
        **{("spec", name): value for name, value in spec.to_dict().items()},
    }
    faults = []
    held = whole = None
    lengths = [] if seq_len is None else [seq_len]  # of the rows, or of all
    what = "positions"
    try:
        if positions is not None:
            held = _rows_of(positions, spec.num_axes)
            whole = _whole(expected, seq_len, held)
            lengths = lengths or (whole.max(axis=(1, 2), initial=-1) + 1).tolist()
        facts["positions", "batch"] = None if held is None else len(held)
        if whole is not None:
            facts["positions", "(seq_len, sha256)"] = whole.shape[1], _digest(whole)
        what = "tables"
        if cos is not None and (
            fault := _table_fault(spec, positions, cos, sin, tolerance, lengths)
        ):
            faults.append(("tables", f"those of rank {rank} are {fault}"))
    except _FAULTY as wrong:
        text = str(wrong).partition("\n")[0]
        faults.append((what, f"rank {rank}: {text}"))
    digest, error = _turns_and_error(spec, max(lengths, default=1))
    if lengths or positions is None:  # else the length is not known here
        facts["spec", "turns"] = digest
    if error > TOLERANCE:
        text = f"tables made on rank {rank} are off by {error:.1e}; run rotary doctor there"
        faults.append(("kernel", text))
    shown = {key: repr(value) for key, value in facts.items()}
    ranks = gathered((shown, held, faults), group)  # plain data: versions may differ
    for failed, told in ranks.items():
        if isinstance(told, str):
            raise ValueError(f"rank {failed}: {told}")
    findings = [*_differing({rank: shown for rank, (shown, _, _) in ranks.items()})]
    for rank, (_, _, faults) in ranks.items():
        findings += [Finding(what, (rank,), text) for what, text in faults]
    if whole is not None and not any(each.what == "positions" for each in findings):
        for number, row in enumerate(whole):  # only the first bad row is reported
            held_by = {rank: held[number] for rank, (_, held, _) in ranks.items()}
            blamed, texts = _misplaced(held_by, row)
            if texts:
                where = "" if len(whole) == 1 else f"row {number}: "
                findings.append(Finding("positions", blamed, where + "; ".join(texts)))
                break
    return Report(len(ranks), tuple(findings))


def gathered(value: Any, group: Any = None) -> dict[int, Any]:
    """Return rank -> value of every rank of the group, by its number in the job. Collective."""
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: call it in its ranks only")
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return dict(zip(dist.get_process_group_ranks(group), values, strict=True))


# --- the facts of one rank ---


def _turns_and_error(spec: Rotary, length: int) -> tuple[str, float]:
    """Return a digest of the turns, and the error of this machine's tables against float64."""
    steps, factor = turns(spec, length), inv_freq(spec, length)[1]
    at = np.array(_SAMPLES)
    per_axis = np.stack([at] * spec.num_axes, axis=-1) if spec.num_axes > 1 else at
    cos, sin = cos_sin(spec, per_axis, seq_len=length)
    phases = (at[:, None].view(np.uint64) * steps).view(np.int64)
    exact = factor * np.exp(2j * np.pi * spec.sign * (phases / 2**64))
    return _digest(steps, factor), float(np.abs(cos + 1j * sin - exact).max()) / abs(factor)


def _digest(array: Array, *more: object) -> str:
    return hashlib.sha256(array.tobytes() + repr((array.shape, *more)).encode()).hexdigest()[:8]


def _numpy(values: object) -> Array:
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.float() if values.is_floating_point() else values  # NumPy has no bfloat16
    return np.asarray(values.detach().cpu())


def _rows_of(positions: object, axes: int) -> Array:
    """Return positions as (rows, seq, axes) int64; ValueError if they are not positions."""
    array = _numpy(positions)
    if array.dtype.kind not in "iu":
        dtype = str(getattr(positions, "dtype", array.dtype)).removeprefix("torch.")
        raise ValueError(f"positions must be whole numbers, got {dtype}")
    shape, array = array.shape, array if axes > 1 else array[..., None]
    if array.ndim not in (2, 3) or array.shape[-1] != axes:
        shapes = f"(seq, {axes}) or (batch, seq, {axes})" if axes > 1 else "(seq,) or (batch, seq)"
        raise ValueError(f"positions must be {shapes}, got shape {shape}")
    return (array if array.ndim == 3 else array[None]).astype(np.int64)


def _whole(expected: object, seq_len: int | None, held: Array) -> Array:
    """Return positions of the whole sequence for every row of `held`: (rows, tokens, axes)."""
    rows, _, axes = held.shape
    if expected is None and axes > 1:
        raise ValueError(f"positions of {axes} axes need expected: those of the whole sequence")
    whole = _rows_of(np.arange(seq_len or 0) if expected is None else expected, axes)
    if len(whole) not in (1, rows):
        raise ValueError(f"expected has {len(whole)} rows, positions have {rows}")
    return np.broadcast_to(whole, (rows, *whole.shape[1:]))


def _table_fault(
    spec: Rotary, positions: object, cos: object, sin: object, tolerance: float, lengths: list[int]
) -> str:
    """Return what is wrong with the tables of a rank, or ""; ValueError for another shape.

    lengths  of the whole sequence: one for each row of positions, or one for all
    """
    at = _numpy(positions)
    seq_len = lengths[0] if len(lengths) == 1 else lengths
    exact = cos_sin(spec, at, seq_len=seq_len, allow_negative=True)
    shape, tables = exact[0].shape, (_numpy(cos), _numpy(sin))
    for name, table in zip(("cos", "sin"), tables, strict=True):
        if table.size != math.prod(shape) or table.shape[-1:] != shape[-1:]:
            hint = _width_hint(name, table, shape[-1])
            raise ValueError(f"{name} must be {shape}, got shape {table.shape}{hint}")
    tables = tables[0].reshape(shape), tables[1].reshape(shape)
    gaps = _gaps(tables, exact)
    if not (gaps > tolerance).any():
        return ""
    is_lost = ~np.isfinite(gaps)
    first = at.reshape(len(gaps), -1)[np.argmax(is_lost if is_lost.any() else gaps > tolerance)]
    where = f"first at position {tuple(first.tolist()) if len(first) > 1 else first[0]}"
    if is_lost.any():
        return f"{'NaN' if np.isnan(tables).any() else 'infinite'}, {where}"
    text = f"off by {gaps.max():.1e}, {where}: "
    size, right = np.hypot(*tables), np.hypot(*exact)
    ratio = float(np.median(size / right))
    if ratio > 0 and abs(ratio - 1) > max(tolerance, 4 * np.ptp(size / right)):
        factor = float(np.median(right))
        if abs(ratio * factor - 1) < abs(ratio - 1) / 10:
            text += f"the attention factor {factor:.6g} is missing"
        else:
            text += f"multiplied by {ratio * factor:.6g}, not by the attention factor {factor:.6g}"
        tables = tables[0] / ratio, tables[1] / ratio
        gaps = _gaps(tables, exact)
        if gaps.max() <= tolerance:
            return text
        text += "; "
    if gaps.max() < _ROUNDED:
        return f"{text}angles or tables of low precision"
    if spec.num_axes == 1:
        count = at.shape[-1]
        local = cos_sin(spec, np.broadcast_to(np.arange(count), at.shape), seq_len=seq_len)
        if _gaps(tables, local).max() <= tolerance:
            return f"{text}they are those of 0..{count - 1}, arange(local length)"
    return f"{text}they are those of other positions or frequencies"


def _width_hint(name: str, table: Array, pairs: int) -> str:
    """Return how to cut a table that has a column for each channel, if this is one."""
    if table.shape[-1:] == (2 * pairs,):
        if np.array_equal(table[..., :pairs], table[..., pairs:]):  # cat(c, c)
            return f": the full width; pass {name}[..., :{pairs}]"
        if np.array_equal(table[..., ::2], table[..., 1::2]):  # repeat_interleave(c, 2)
            return f": the full width; pass {name}[..., ::2]"
    return ""


def _gaps(tables: tuple[Array, Array], exact: tuple[Array, Array]) -> Array:
    """Return the error of every token, relative to the attention factor; of NaN it is infinite."""
    cos, sin = (
        np.abs(table - right).max(axis=-1) for table, right in zip(tables, exact, strict=True)
    )
    gaps = np.maximum(cos, sin) / np.hypot(exact[0][..., 0], exact[1][..., 0])
    return np.where(np.isnan(gaps), np.inf, gaps).ravel()


# --- ranks beside each other ---


def _differing(facts: Mapping[int, Mapping[tuple[str, str], str]]) -> Iterator[Finding]:
    """Yield a finding for every fact in which some ranks differ from most."""
    for what, name in dict.fromkeys(key for each in facts.values() for key in each):
        values = {rank: each.get((what, name)) for rank, each in facts.items()}  # None: a fault
        counts = Counter(value for value in values.values() if value is not None)
        usual = counts.most_common(1)[0][0]
        for value in counts:
            if value != usual:
                ranks = tuple(rank for rank, each in values.items() if each == value)
                text = f"{_named(ranks)} {_verb(ranks, 'has', 'have')} {name} {value}"
                yield Finding(what, ranks, f"{text}, most have {usual}")


def _misplaced(held: Mapping[int, Array], whole: Array) -> tuple[tuple[int, ...], list[str]]:
    """Return the ranks to blame, and the positions that too many or too few ranks hold, in words.

    held   rank -> its positions, (seq, axes) int64
    whole  those of the whole sequence, (seq, axes); each must be held by the same number of ranks,
           and by no rank more often than the sequence has it
    """
    points = np.concatenate([whole, *held.values()])
    points = points[:, 0] if points.shape[1] == 1 else points  # one axis is 20 times as fast
    names, ids = np.unique(points, axis=0, return_inverse=True)
    expected, holding = np.split(ids.ravel(), [len(whole)])
    once = np.bincount(expected, minlength=len(names))
    counts = np.bincount(holding, minlength=len(names))
    owners = np.repeat([*held], [len(part) for part in held.values()])
    above = 1 + max(held)
    pairs, times = np.unique(holding * above + owners, return_counts=True)
    place = pairs // above  # without what a rank holds more often than the sequence has it:
    useful = np.bincount(place, np.minimum(times, once[place]), len(names)).astype(int)
    replicas = max(1, round(useful.sum() / max(1, len(whole))))
    right = once * replicas
    owners, ends = owners[np.argsort(holding, kind="stable")], np.cumsum(counts)

    def by_owners(chosen: Array) -> Iterable[tuple[tuple[int, ...], list[int]]]:
        alike: dict[tuple[int, ...], list[int]] = {}
        for each in np.flatnonzero(chosen).tolist():
            ranks = tuple(owners[ends[each] - counts[each] : ends[each]].tolist())
            alike.setdefault(ranks, []).append(each)
        return alike.items()

    from_zero = {
        rank
        for rank, part in held.items()
        if len(part) < len(whole) and np.array_equal(part.ravel(), np.arange(len(part)))
    }
    copies = Counter(part.tobytes() for part in held.values())
    blamed: set[int] = set()
    texts = []
    for ranks, numbers in by_owners((counts > np.minimum(right, useful)) & (right > 0)):
        # blame a rank that holds it twice, then one that counts from zero, then the least common
        order = [(ranks[:n].count(rank), rank in from_zero, -copies[held[rank].tobytes()], rank)
                 for n, rank in enumerate(ranks)]  # fmt: skip
        kept = min(right[numbers[0]], useful[numbers[0]])
        extra = {rank for *_, rank in sorted(order)[kept:]}
        others = set(ranks) - extra
        also = f", which {_named(others)} {_verb(others)} as well" if others else " more than once"
        texts.append(f"{_named(extra)} {_verb(extra)} {_spans(names[numbers])}{also}")
        blamed |= extra
    for ranks, numbers in by_owners(useful < right):
        whom = f"{_named(ranks)} alone" if ranks else "nobody"
        texts.append(f"{_spans(names[numbers])} {_verb(numbers, 'is', 'are')} held by {whom}")
    for ranks, numbers in by_owners(right == 0):
        are = _verb(numbers, "is", "are")
        texts.append(f"{_spans(names[numbers])} {are} outside of the sequence, on {_named(ranks)}")
        blamed |= set(ranks)
    if blamed & from_zero:
        texts.append("it looks like arange(local length)")
    return tuple(sorted(blamed)), texts


def _named(ranks: Collection[int]) -> str:
    ranks = sorted(set(ranks))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _verb(things: Collection[object], one: str = "holds", many: str = "hold") -> str:
    return one if len(things) == 1 else many


def _spans(names: Array) -> str:
    """Format sorted positions as runs, '0..3, 8, 12..15', or as tuples of axes; four at most."""
    if names.ndim > 1:
        runs = [str(tuple(name)) for name in names.tolist()]
    else:
        parts = np.split(names, np.flatnonzero(np.diff(names) != 1) + 1)
        runs = [str(p[0]) if len(p) == 1 else f"{p[0]}..{p[-1]}" for p in parts]
    more = f" and {len(runs) - 4} more" if len(runs) > 4 else ""
    return ", ".join(runs[:4]) + more
