"""One shard in the other layout: read in pieces, moved, hashed and written.

Channels move inside of their head, so a few MB of a tensor are held at once, however large it is.
"""

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..fanout import fan_out
from . import writing
from .files import Shard, Tensor, check_unchanged, open_regular, read_shard, state_of
from .plan import Bytes, Move, moved

CHUNK = 2**22
THREADS = 2
Advance = Callable[[int], None]
Turn = Callable[[Bytes], Bytes]
Hashes = dict[str, str]


class Job(NamedTuple):
    """One shard to write: everything that a worker in another process needs.

    known   sha256 of its tensors where an earlier call wrote it; empty if none did
    ticket  of the call that asks; see `writing.locked`
    """

    shard: Shard
    target: Path
    moves: Mapping[str, Move]
    known: Mapping[str, str]
    ticket: str


class Written(NamedTuple):
    """The sha256 of every tensor as it was written, and whether this call wrote the shard."""

    hashes: Hashes
    is_new: bool


def pieces(tensor: Tensor, move: Move | None) -> Iterator[tuple[int, int, Turn | None]]:
    """(begin, end, turn) of each piece: bytes of the file, and what moves them; None for nothing.

    A piece is made of itself alone.

    >>> [piece[:2] for piece in pieces(Tensor("U8", (3, CHUNK), 8, 8 + 3 * CHUNK), None)]
    [(8, 4194312), (4194312, 8388616), (8388616, 12582920)]
    """
    size = tensor.end - tensor.begin
    if size == 0:
        return
    if move is None:
        for begin in range(tensor.begin, tensor.end, CHUNK):
            yield begin, min(begin + CHUNK, tensor.end), None
    elif move.axis == 0:
        width = size // move.size  # a gain may have an axis of heads and one of their channels
        order = move.order
        for first, last in _blocks(order, max(CHUNK // max(width, 1), 1)):
            turn = _rows(order[first:last] - first)
            yield tensor.begin + first * width, tensor.begin + last * width, turn
    else:
        count = tensor.shape[0]
        width = size // count
        per = max(CHUNK // max(width, 1), 1)
        for first in range(0, count, per):
            last = min(first + per, count)
            part = tensor._replace(
                shape=(last - first, *tensor.shape[1:]), begin=0, end=(last - first) * width
            )
            turn = _slices(part, move)
            yield tensor.begin + first * width, tensor.begin + last * width, turn


def check_movable(tensor: Tensor, move: Move) -> None:
    """Raise ValueError where a channel is not whole bytes.

    >>> from rotary.checkpoint.heads import Run
    >>> from rotary.checkpoint.quantised import Place
    >>> move = Move("q", "query", 4, (Run(0, 1, 4),), 4, Place(0), "half", "interleaved")
    >>> check_movable(Tensor("F4", (4, 3), 0, 6), move)
    Traceback (most recent call last):
    ValueError: tensor 'q' of F4 (4, 3): a channel is not whole bytes; convert to another type first
    """
    count = math.prod(tensor.shape[: move.axis]) * move.size
    if not move.place.bits and count and (tensor.end - tensor.begin) % count:
        raise ValueError(
            f"tensor {move.tensor!r} of {tensor.dtype} {tensor.shape}: a channel is not whole "
            "bytes; convert to another type first"
        )


def _blocks(order: Any, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of channels that stay among themselves, of about `most` channels each."""
    ends = np.flatnonzero(np.maximum.accumulate(order) == np.arange(len(order))) + 1
    first = 0
    while first < len(order):
        fitting = np.searchsorted(ends, first + most, side="right") - 1
        following = np.searchsorted(ends, first, side="right")
        last = int(ends[max(fitting, following)])
        yield first, last
        first = last


def _rows(order: Any) -> Turn:
    return lambda raw: raw.reshape(len(order), -1)[order].reshape(-1)


def _slices(part: Tensor, move: Move) -> Turn:
    return lambda raw: moved(raw, part, move)


def write_shard(job: Job, advance: Advance | None = None) -> Written:
    """Write a shard with its tensors moved, unless it is there already, byte for byte.

    The header keeps its bytes, so there and back gives the same file.
    Raises ValueError if the source is no longer the file that was planned for, and OSError where
    the folder is not that of a call that is going on.
    """
    writing.check_ticket(job.target.parent, job.ticket)
    check_unchanged(job.shard.path, job.shard.state, state_of(job.shard.path))
    if job.known and _is_there(job):
        if advance is not None:
            advance(job.shard.state.size)
        return Written(dict(job.known), False)
    hashes, room = {}, np.empty(0, np.uint8)
    tensors = job.shard.tensors
    data = min((tensor.begin for tensor in tensors.values()), default=job.shard.state.size)
    with (
        open_regular(job.shard.path, job.shard.state) as source,
        writing.replacing(job.target) as target,
    ):
        target.write(source.read(data))
        if advance is not None:
            advance(data)
        for name, tensor in tensors.items():
            known = hashlib.sha256()
            for begin, end, turn in pieces(tensor, job.moves.get(name)):
                if len(room) < end - begin:
                    room = np.empty(end - begin, np.uint8)
                raw = read_piece(source, begin, end, room)
                piece = raw if turn is None else turn(raw)
                known.update(piece.data)
                writing.write_sparse(target, piece)
                if advance is not None:
                    advance(end - begin)
            hashes[name] = known.hexdigest()
        check_unchanged(job.shard.path, job.shard.state, state_of(job.shard.path))
        writing.check_ticket(job.target.parent, job.ticket)
    return Written(hashes, True)


def read_piece(file: Any, begin: int, end: int, room: Bytes | None = None) -> Bytes:
    """Bytes of a file, in `room` where it is given. Raises ValueError if it has become shorter.

    The first touch of new pages costs half as much as all else, so a shard is read into one place.
    """
    file.seek(begin)
    raw = np.empty(end - begin, np.uint8) if room is None else room[: end - begin]
    count = file.readinto(raw)
    if count < end - begin:
        raise ValueError(f"{file.name}: ends at byte {begin + count} now; it was truncated")
    return raw


def _is_there(job: Job) -> bool:
    """Whether a shard that an earlier call wrote still has the bytes that it was given."""
    try:
        written = read_shard(job.target)
        if written.tensors != job.shard.tensors or written.metadata != job.shard.metadata:
            return False
        with open_regular(job.target) as file:
            for name, tensor in written.tensors.items():
                known = hashlib.sha256()
                for begin, end, _ in pieces(tensor, None):
                    known.update(read_piece(file, begin, end).data)
                if known.hexdigest() != job.known.get(name):
                    return False
    except (FileNotFoundError, ValueError):
        return False
    return True


def write_shards(
    jobs: Sequence[Job],
    finished: Callable[[list[tuple[Job, Written]]], None],
    executor: Executor | None,
    advance: Advance | None,
) -> None:
    """Write shards side by side, and call `finished` here with those that are whole by then.

    A failure stops what has not begun, and nobody writes any more when it is raised: a worker of
    a cluster, which cannot be stopped, finds its ticket void before its shard takes its name.
    """

    if executor is not None:

        def told(pairs: list[tuple[Job, Written]]) -> None:
            finished(pairs)
            if advance is not None:  # the workers may be other processes
                advance(sum(job.shard.state.size for job, _ in pairs))

        fan_out(write_shard, jobs, executor, told, size_of=lambda job: job.shard.state.size)
        return
    stopped = threading.Event()

    def tick(count: int) -> None:
        if stopped.is_set():
            raise InterruptedError("another shard has failed")
        if advance is not None:
            advance(count)

    write = functools.partial(write_shard, advance=tick)
    with ThreadPoolExecutor(THREADS) as threads:
        fan_out(write, jobs, threads, finished, stop=stopped.set)
