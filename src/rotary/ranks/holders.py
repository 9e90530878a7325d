"""Who holds which positions: what is missing, held twice, or no position of the sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]


def replicas(held: int, whole: int) -> int:
    """How many ranks should hold each of `whole` positions, if all ranks together hold `held`.

    >>> replicas(4 * 512, 1024)  # context parallelism over 2, tensor parallelism over 2
    2
    """
    return max(1, round(held / max(1, whole)))


def misplaced(
    held: Mapping[tuple[int, ...], Array], whole: Array
) -> tuple[tuple[int, ...], str] | None:
    """The ranks to blame and what is wrong with who holds what, of the first bad row, or None.

    held   positions of each group of ranks that hold the same, (rows, seq, axes) int64
    whole  those of the whole sequence, (rows, seq, axes); each is to be held by as many ranks

    >>> zero, four = np.arange(4).reshape(1, 4, 1), np.arange(8).reshape(1, 8, 1)
    >>> misplaced({(0, 1): zero}, four)[1]  # doctest: +NORMALIZE_WHITESPACE
    'rank 1 holds 0..3, which rank 0 holds as well; 4..7 are held by nobody; it looks like
    arange(local length)'
    """
    for row, wanted in enumerate(whole):
        parts = {ranks: array[row] for ranks, array in held.items()}
        blamed, texts = _row_misplaced(parts, wanted)
        if texts:
            where = "" if len(whole) == 1 else f"row {row}: "
            return tuple(sorted(blamed)), where + "; ".join(texts)
    return None


def _row_misplaced(
    held: Mapping[tuple[int, ...], Array], whole: Array
) -> tuple[set[int], list[str]]:
    names, ids = np.unique(np.concatenate([whole, *held.values()]), axis=0, return_inverse=True)
    cuts = np.cumsum([len(whole), *(len(part) for part in held.values())])[:-1]
    counts = [np.bincount(part, minlength=len(names)) for part in np.split(ids.ravel(), cuts)]
    holders = dict(zip(held, counts[1:], strict=True))
    total = sum(len(ranks) * count for ranks, count in holders.items())
    wanted = counts[0] * replicas(sum(len(r) * len(part) for r, part in held.items()), len(whole))
    suspects = [ranks for ranks, part in held.items() if _is_local(part, len(whole))]
    texts, blamed = [], set()
    for owners, several in _by_owners(holders, (total > wanted) & (wanted > 0)):
        extra = _extra(owners, suspects, int(wanted[several[0]]))
        others = sorted(rank for ranks in owners for rank in ranks if rank not in extra)
        texts.append(_both(extra or others, _spans(names[several]), others if extra else []))
        blamed |= set(extra or others)
    for owners, few in _by_owners(holders, total < wanted):
        whom = named(sorted(sum(owners, ()))) + " alone" if owners else "nobody"
        texts.append(f"{_spans(names[few])} {verb(few, 'is', 'are')} held by {whom}")
    for ranks, count in holders.items():
        outside = names[(count > 0) & (wanted == 0)]
        if len(outside):
            are = verb(outside, "is", "are")
            texts.append(f"{_spans(outside)} {are} outside of the sequence, on {named(ranks)}")
            blamed |= set(ranks)
    if any(set(ranks) & blamed for ranks in suspects):
        texts.append("it looks like arange(local length)")
    return blamed, texts


def _by_owners(
    holders: Mapping[tuple[int, ...], Array], chosen: npt.NDArray[np.bool_]
) -> list[tuple[tuple[tuple[int, ...], ...], list[int]]]:
    """The chosen positions, by the set of groups that hold them."""
    sets: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for index in np.flatnonzero(chosen):
        owners = tuple(ranks for ranks, count in holders.items() if count[index])
        sets.setdefault(owners, []).append(int(index))
    return list(sets.items())


def _extra(
    owners: Sequence[tuple[int, ...]], suspects: Sequence[tuple[int, ...]], wanted: int
) -> list[int]:
    """Which owners are too many: those that count from 0, or else those with fewer like them."""
    ranks = [rank for group in sorted(owners, key=lambda g: (-len(g), g)) for rank in group]
    counting = [group for group in owners if group in suspects]
    return list(counting[0]) if counting and len(owners) > 1 else ranks[wanted:]


def _both(ranks: Sequence[int], span: str, others: Sequence[int]) -> str:
    held = f"{named(ranks)} {verb(ranks)} {span}"
    if not others:
        return f"{held} more than once"
    return f"{held}, which {named(others)} {verb(others)} as well"


def _is_local(part: Array, length: int) -> bool:
    return (
        part.shape[1] == 1
        and len(part) < length
        and bool((part[:, 0] == np.arange(len(part))).all())
    )


def named(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> named([0, 2])
    'ranks 0, 2'
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def verb(things: Sequence[Any], one: str = "holds", many: str = "hold") -> str:
    """The form of a verb that goes with one thing, or with several.

    >>> verb([3]), verb([1, 2], "is", "are")
    ('holds', 'are')
    """
    return one if len(things) == 1 else many


def _spans(names: Array) -> str:
    """Sorted positions as runs: '0..3, 8, 12..15'; of several axes as tuples; four at most.

    >>> _spans(np.array([[0], [1], [2], [7]]))
    '0..2, 7'
    """
    if names.shape[1] > 1:
        runs = [str(tuple(name)) for name in names.tolist()]
    else:
        values = names[:, 0]
        parts = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
        runs = [str(p[0]) if len(p) == 1 else f"{p[0]}..{p[-1]}" for p in parts]
    more = f" and {len(runs) - 4} more" if len(runs) > 4 else ""
    return ", ".join(runs[:4]) + more
