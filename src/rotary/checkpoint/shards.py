"""One shard in the other layout: read in pieces, moved, hashed and written.

Channels move inside of their head, so a few MB of a tensor are held at once, however large it is.
"""

import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..fanout import fan_out
from ..layouts import Indices
from . import writing
from .headers import Shard, Tensor, check_unchanged, open_regular, read_shard
from .parameters import reordered
from .plan import Conversion, Move
from .writing import Hashes

CHUNK = 2**22
THREADS = 2
Bytes = npt.NDArray[np.uint8]
Advance = Callable[[int], None]


class Job(NamedTuple):
    """One shard to write or to read again: everything that a worker in another process needs.

    hashes  sha256 of its tensors where they were written before; empty if they were not
    ticket  of the call that asks; see `writing.locked`
    """

    shard: Shard
    target: Path
    moves: Mapping[str, Move]
    hashes: Mapping[str, str]
    ticket: str


class Written(NamedTuple):
    """The sha256 of every tensor as it was written, and whether this call wrote the shard."""

    hashes: Hashes
    is_new: bool


def jobs_of(work: Conversion, hashes: Mapping[str, Hashes], ticket: str) -> list[Job]:
    """A job for each shard; workers may have another current folder, so paths are whole.

    hashes  shard -> tensor -> sha256, of those that were written before
    """
    moves, folder = work.plan.moves, work.folder.absolute()
    return [
        Job(
            shard._replace(path=shard.path.absolute()),
            folder / shard.path.name,
            {name: moves[name] for name in shard.tensors if name in moves},
            hashes.get(shard.path.name, {}),
            ticket,
        )
        for shard in work.checkpoint.shards
    ]


def size_of(job: Job) -> int:
    """Bytes of work in a job."""
    return job.shard.state.size


def write_shards(
    jobs: list[Job],
    finished: Callable[[Mapping[str, Hashes]], None],
    executor: Executor | None = None,
    advance: Advance | None = None,
) -> tuple[dict[str, Hashes], list[str]]:
    """Write shards side by side; gives the sha256 of all tensors by file, and the new files.

    finished  called here with the files that are whole by then and new, and their sha256
    A failure stops what has not begun, and nobody writes any more when it is raised: a worker of
    a cluster, which cannot be stopped, finds its ticket void before its shard takes its name.
    """
    hashes: dict[str, Hashes] = {}
    new: list[str] = []
    stopped = threading.Event()

    def tick(count: int) -> None:
        if stopped.is_set():
            raise InterruptedError("another shard has failed")
        if advance is not None:
            advance(count)

    def collect(pairs: list[tuple[Job, Written]]) -> None:
        hashes.update({job.target.name: result.hashes for job, result in pairs})
        names = [job.target.name for job, result in pairs if result.is_new]
        if names:
            finished({name: hashes[name] for name in names})
            new.extend(names)
        if executor is not None and advance is not None:  # the workers may be other processes
            advance(sum(job.shard.state.size for job, _ in pairs))

    with contextlib.ExitStack() as stack:
        write: Callable[[Job], Written] = write_shard
        pool = executor
        if pool is None:
            write = functools.partial(write_shard, advance=tick)
            pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        fan_out(write, jobs, pool, collect, size_of=size_of, stop=stopped.set)
    return hashes, new


def write_shard(job: Job, advance: Advance | None = None) -> Written:
    """Write a shard with its tensors moved, unless it is there already, byte for byte.

    The header keeps its bytes, so there and back gives the same file.
    Raises ValueError if the source is no longer the file that was planned for, and OSError where
    the folder is not that of a call that is going on.
    """
    tick = advance or (lambda count: None)
    shard, tensors = job.shard, job.shard.tensors
    writing.check_ticket(job.target.parent, job.ticket)
    check_unchanged(shard.path, shard.state)
    if job.hashes and _is_there(job):
        tick(shard.state.size)
        return Written(dict(job.hashes), False)
    hashes, room = {}, np.empty(0, np.uint8)
    data = min((tensor.begin for tensor in tensors.values()), default=shard.state.size)
    with (
        open_regular(shard.path, shard.state) as source,
        writing.replacing(job.target) as target,
    ):
        target.write(source.read(data))
        tick(data)
        for name, tensor in tensors.items():
            written = hashlib.sha256()
            for begin, end, move in pieces(tensor, job.moves.get(name)):
                if len(room) < end - begin:
                    room = np.empty(end - begin, np.uint8)
                raw = read_piece(source, begin, end, room)
                piece = raw if move is None else move(raw)
                written.update(piece.data)
                writing.write_sparse(target, piece)
                tick(end - begin)
            hashes[name] = written.hexdigest()
        check_unchanged(shard.path, shard.state)
        writing.check_ticket(job.target.parent, job.ticket)
    return Written(hashes, True)


def _is_there(job: Job) -> bool:
    """Whether a shard that an earlier call wrote still has the bytes that were written."""
    try:
        written = read_shard(job.target)
        with open_regular(job.target) as file:
            same = written._replace(path=job.shard.path, state=job.shard.state) == job.shard
            return same and all(
                _hash_of(file, tensor) == job.hashes.get(name)
                for name, tensor in written.tensors.items()
            )
    except (FileNotFoundError, ValueError):
        return False


def _hash_of(file: Any, tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for begin, end, _ in pieces(tensor, None):
        digest.update(read_piece(file, begin, end).data)
    return digest.hexdigest()


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


# --- the move of bytes ---


def pieces(
    tensor: Tensor, move: Move | None
) -> Iterator[tuple[int, int, Callable[[Bytes], Bytes] | None]]:
    """(begin, end, function) of each piece: bytes of the file, and what moves them, or None.

    A piece of the result is made of the same piece of the source alone.

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
            rows = functools.partial(_rows, order[first:last] - first)
            yield tensor.begin + first * width, tensor.begin + last * width, rows
    else:
        count = tensor.shape[0]
        width = size // count
        step = max(CHUNK // max(width, 1), 1)
        for first in range(0, count, step):
            last = min(first + step, count)
            shape = (last - first, *tensor.shape[1:])
            part = Tensor(tensor.dtype, shape, 0, (last - first) * width)
            slices = functools.partial(moved, tensor=part, move=move)
            yield tensor.begin + first * width, tensor.begin + last * width, slices


def _blocks(order: Indices, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of channels that stay among themselves, of about `most` channels each."""
    ends = np.flatnonzero(np.maximum.accumulate(order) == np.arange(len(order))) + 1
    first = 0
    while first < len(order):
        fitting = np.searchsorted(ends, first + most, side="right") - 1
        following = np.searchsorted(ends, first, side="right")
        last = int(ends[max(fitting, following)])
        yield first, last
        first = last


def _rows(order: Indices, raw: Bytes) -> Bytes:
    return raw.reshape(len(order), -1)[order].reshape(-1)


def moved(raw: Bytes, tensor: Tensor, move: Move) -> Bytes:
    """The bytes of a tensor after its move; the bytes of every value stay as they are.

    raw     (bytes of the tensor,) uint8, of at least one byte

    >>> from rotary.checkpoint.heads import Run
    >>> from rotary.checkpoint.parameters import Place
    >>> weight = np.arange(8, dtype=np.float32)
    >>> move = Move("q", "query", 8, (Run(0, 2, 4),), 4, Place(0), "half", "interleaved")
    >>> moved(weight.view(np.uint8), Tensor("F32", (8,), 0, 32), move).view(np.float32)
    array([0., 2., 1., 3., 4., 6., 5., 7.], dtype=float32)
    """
    if move.place.bits:
        words = np.ascontiguousarray(raw).view("<u4").reshape(tensor.shape)
        return reordered(words, move.order, move.place).view(np.uint8).reshape(-1)
    before = math.prod(tensor.shape[: move.axis])
    slices = np.ascontiguousarray(raw).reshape(before, move.size, -1)
    return slices[:, move.order].reshape(-1)
