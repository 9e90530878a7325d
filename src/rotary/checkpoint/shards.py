"""Writes shards in the other layout, piece by piece, and verifies what is on the disk.

Channels move within their head, so a few MB of a tensor are in memory at once, however large it is.
A written shard is read again: undoing the moves must give the bytes of the source. Then a random
hidden state goes through the old and the new weights of a layer. The outputs are rotated in the old
and in the new layout, and all scores must agree.
"""

import contextlib
import functools
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ..fanout import fan_out
from ..layouts import Indices, pair_slices
from . import writing
from .channels import Place
from .files import Shard, State, Tensor, state_of, unchanged
from .plan import Conversion, Move, Plan
from .writing import Hashes, Ticket

CHUNK = 2**22
THREADS = 2
TOLERANCE = 1e-9  # of the largest score; sums in float64, in another order
# NumPy's dtype of a safetensors type; others are read as bytes, which move in the same way
NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U64": "<u8", "I32": "<i4",
    "U32": "<u4", "I16": "<i2", "U16": "<u2", "I8": "i1", "BF16": "<u2",
}  # fmt: skip
Bytes = npt.NDArray[np.uint8]
Vector = npt.NDArray[np.float64]
Outputs = tuple[Vector, Vector]  # of the old weights and of the new
Advance = Callable[[int], None]


class Job(NamedTuple):
    """One shard to write and to verify: everything that a worker in another process needs.

    hashes  tensor -> sha256 if an earlier call wrote the shard; else empty
    ticket  of the call that this job is for; see `writing.locked`
    scored  names of the tensors whose scores are compared
    whole   whether unchanged tensors are verified as well
    """

    shard: Shard
    target: Path
    moves: Mapping[str, Move]
    hashes: Mapping[str, str]
    ticket: Ticket
    scored: frozenset[str] = frozenset()
    whole: bool = False


class Written(NamedTuple):
    """A shard that is written and verified.

    hashes   tensor -> sha256
    outputs  of the tensors whose scores are compared
    state    the state of the file when it was verified
    is_new   whether this call wrote it
    """

    hashes: Hashes
    outputs: Mapping[str, Outputs]
    state: State
    is_new: bool


class Proof(NamedTuple):
    """What was checked.

    which    "sample" or "full"
    layers   layers whose scores agree
    tensors  number of tensors that moved, and give the bytes of the source if the move is undone
    error    largest difference of two scores, relative to the largest score
    """

    which: str
    layers: tuple[int, ...]
    tensors: int
    error: float


def write_shards(
    work: Conversion,
    before: Mapping[str, Hashes],
    ticket: Ticket,
    executor: Executor | None,
    advance: Advance | None,
) -> dict[str, Written]:
    """Write shards in parallel, add each to the journal once it is verified; return them by file.

    before  file -> tensor -> sha256, for shards that an earlier call wrote
    After a failure no other job begins, and nothing is written any more once the error is raised. A
    worker of a cluster cannot be stopped, but checks that its ticket is still valid before it gives
    its file the final name.
    """
    moves, folder = work.plan.moves, work.target.absolute()
    scored = frozenset(name for names in _scored(work).values() for name in names)
    jobs = [
        Job(
            shard._replace(path=shard.path.absolute()),  # workers may have another current folder
            folder / shard.path.name,
            {name: moves[name] for name in shard.tensors if name in moves},
            before.get(shard.path.name, {}),
            ticket,
            scored,
            work.verify == "full",
        )
        for shard in work.checkpoint.shards
    ]
    written: dict[str, Written] = {}
    stopped = threading.Event()

    def tick(count: int) -> None:
        if stopped.is_set():
            raise InterruptedError("another shard has failed")
        if advance is not None:
            advance(count)

    def collect(pairs: list[tuple[Job, Written]]) -> None:
        results = {job.target.name: result for job, result in pairs}
        if new := {name: each.hashes for name, each in results.items() if each.is_new}:
            writing.add(folder, new)
        written.update(results)
        if executor is not None and advance is not None:  # the workers may be other processes
            advance(sum(job.shard.state.size for job, _ in pairs))

    own = ThreadPoolExecutor(THREADS) if executor is None else contextlib.nullcontext(executor)
    write = functools.partial(write_shard, advance=tick) if executor is None else write_shard
    with own as pool:
        fan_out(
            write, jobs, pool, collect,
            size_of=lambda job: job.shard.state.size, stop=stopped.set,
        )  # fmt: skip
    return written


def write_shard(job: Job, advance: Advance | None = None) -> Written:
    """Write and verify a shard with its tensors moved, unless it is there already, byte for byte.

    The header keeps its bytes, so a conversion there and back gives the same file.
    Raises ValueError if the source has changed since it was planned, and for a result that is not
    right; OSError if the call that the job is for has ended.
    """
    tick = advance or (lambda count: None)
    shard = job.shard
    if job.hashes:
        with contextlib.suppress(FileNotFoundError, ValueError):
            state, outputs = read_again(job._replace(whole=True))
            tick(shard.state.size)
            return Written(dict(job.hashes), outputs, state, False)
    hashes, room = {}, np.empty(0, np.uint8)
    with (
        writing.replacing(job.target, job.ticket) as target,
        unchanged(shard.path, shard.state) as source,
    ):
        target.write(source.read(shard.header))
        tick(shard.header)
        for name, tensor in shard.tensors.items():
            digest = hashlib.sha256()
            for begin, end, move in pieces(tensor, job.moves.get(name)):
                if len(room) < end - begin:
                    room = np.empty(end - begin, np.uint8)
                piece = move(read_piece(source, begin, end, room))
                digest.update(piece.data)
                writing.write_sparse(target, piece)
                tick(end - begin)
            hashes[name] = digest.hexdigest()
    state, outputs = read_again(job._replace(hashes=hashes))
    return Written(hashes, outputs, state, True)


def copy_file(work: Conversion, name: Path, state: State, ticket: Ticket) -> Written:
    """Copy a file from beside the shards, as a shard with one tensor of bytes.

    name   path relative to the folder
    state  state of the file when it was listed
    Raises ValueError if a folder of the path is a link, which could lead anywhere.
    """
    source, target = work.checkpoint.root / name, work.target / name
    if Path(os.path.realpath(target.parent)) != Path(os.path.realpath(work.target)) / name.parent:
        raise ValueError(f"{target.parent}: a link, in a folder that is written here; delete it")
    target.parent.mkdir(parents=True, exist_ok=True)
    shard = Shard(source, {str(name): Tensor("U8", (state.size,), 0, state.size)}, 0, state)
    return write_shard(Job(shard, target, {}, {}, ticket, whole=work.verify == "full"))


def read_again(job: Job) -> tuple[State, dict[str, Outputs]]:
    """Verify a written file; return its state and the outputs of the tensors that are scored.

    Raises ValueError unless it has the header of the source, the bytes that were written, and the
    bytes of the source once every move is undone.
    """
    shard, outputs = job.shard, {}
    state = state_of(job.target)
    with unchanged(shard.path, shard.state) as source, unchanged(job.target, state) as target:
        if state.size != shard.state.size or source.read(shard.header) != target.read(shard.header):
            raise ValueError(f"{job.target}: has another header than {shard.path}; run it again")
        for name, tensor in shard.tensors.items():
            move = job.moves.get(name)
            if move is None and not job.whole:
                continue
            back = move and move._replace(source=move.target, target=move.source)
            digest, is_undone = hashlib.sha256(), True
            for begin, end, undo in pieces(tensor, back):
                raw = read_piece(target, begin, end)
                digest.update(raw.data)
                is_undone &= np.array_equal(undo(raw), read_piece(source, begin, end))
            problem = (
                "does not come back when its move is undone" if move else "differs from the source"
            )
            if is_damaged := digest.hexdigest() != job.hashes.get(name):
                problem = "is not what was written; check the disk, and run it again"
            if is_damaged or not is_undone:
                raise ValueError(f"{job.target}: {name!r} {problem}")
            if move is not None and name in job.scored:
                outputs[name] = _outputs(source, tensor, move), _outputs(target, tensor, move)
    return state, outputs


def read_piece(file: BinaryIO, begin: int, end: int, room: Bytes | None = None) -> Bytes:
    """Read bytes of a file, into `room` if given. Raises ValueError if it has become shorter.

    The first write to new memory pages costs half as much as all else, so callers reuse `room`.
    """
    file.seek(begin)
    raw = np.empty(end - begin, np.uint8) if room is None else room[: end - begin]
    count: int = file.readinto(raw)  # type: ignore[attr-defined]  # of every binary file
    if count < end - begin:
        raise ValueError(f"{file.name}: ends at byte {begin + count} now; it was truncated")
    return raw


# --- the move of bytes ---


def pieces(
    tensor: Tensor, move: Move | None
) -> Iterator[tuple[int, int, Callable[[Bytes], Bytes]]]:
    """Yield (begin, end, function) for pieces of a tensor: bytes of the file, and their move.

    Each piece of the result depends only on the same piece of the source.

    >>> [piece[:2] for piece in pieces(Tensor("U8", (3, CHUNK), 8, 8 + 3 * CHUNK), None)]
    [(8, 4194312), (4194312, 8388616), (8388616, 12582920)]
    """
    begin, size = tensor.begin, tensor.end - tensor.begin
    if size == 0:
        return
    if move is not None and move.axis == 0:
        width = size // move.size  # a gain may have an axis of heads and one of their channels
        for first, last in _blocks(move.order, max(CHUNK // max(width, 1), 1)):
            order = move.order[first:last] - first
            rows = functools.partial(moved, order=order, place=move.place)
            yield begin + first * width, begin + last * width, rows
        return
    row, change = 1, lambda raw: raw
    if move is not None:
        row = size // math.prod(tensor.shape[: move.axis])
        change = functools.partial(moved, order=move.order, place=move.place, row=row)
    step = max(CHUNK // row, 1) * row
    for first in range(begin, tensor.end, step):
        yield first, min(first + step, tensor.end), change


def _blocks(order: Indices, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of channels that `order` maps to themselves, of about `most` channels each."""
    ends = np.flatnonzero(np.maximum.accumulate(order) == np.arange(len(order))) + 1
    first = 0
    while first < len(order):
        fitting = np.searchsorted(ends, first + most, side="right") - 1
        following = np.searchsorted(ends, first, side="right")
        last = int(ends[max(fitting, following)])
        yield first, last
        first = last


def moved(raw: Bytes, order: Indices, place: Place, row: int | None = None) -> Bytes:
    """Reorder the channels of whole rows, given as bytes; every value stays as it is.

    raw    (bytes,) uint8
    order  channel j of the result is channel order[j]
    row    bytes of all channels of one row, by default all of `raw`

    >>> values = np.arange(4, dtype=np.float32)
    >>> moved(values.view(np.uint8), np.array([0, 2, 1, 3]), Place(0)).view(np.float32)
    array([0., 2., 1., 3.], dtype=float32)
    >>> nibbles = np.array([0x76543210], "<u4").view(np.uint8)
    >>> hex(moved(nibbles, np.arange(8)[::-1], Place(1, 4, tuple(range(8)))).view("<u4")[0])
    '0x1234567'
    """
    rows = raw.reshape(-1, row or len(raw))
    if not place.bits:
        return rows.reshape(len(rows), len(order), -1)[:, order].reshape(-1)
    words, mask = rows.view("<u4"), np.uint32((1 << place.bits) - 1)
    shifts = np.arange(0, 32, place.bits, dtype=np.uint32)
    values = (words[..., None] >> shifts & mask).astype(np.uint8)[..., np.argsort(place.lanes)]
    values = values.reshape(len(rows), -1)[:, order].reshape(values.shape)[..., place.lanes]
    return np.bitwise_or.reduce(values << shifts, axis=-1).reshape(-1).view(np.uint8)


# --- scores ---


def prove(work: Conversion, written: Mapping[str, Written]) -> Proof:
    """Compare the scores of the layers. Raises ValueError if old and new scores differ."""
    outputs = {name: pair for each in written.values() for name, pair in each.outputs.items()}
    groups = _scored(work)
    errors = [
        _error(layer, {name: outputs[name] for name in names}, work.plan)
        for (layer, _), names in groups.items()
    ]
    layers = tuple(sorted({layer for layer, _ in groups}))
    return Proof(work.verify, layers, len(work.plan.moves), max(errors, default=0.0))


def _scored(work: Conversion) -> dict[tuple[int, int], list[str]]:
    """Return (layer, rotary_dim) -> tensors whose scores are compared, without packed ones."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name, move in work.plan.moves.items():
        if not move.place.bits:
            groups.setdefault((move.layer, move.rotary_dim), []).append(name)
    layers = sorted({layer for layer, _ in groups})
    if work.verify == "sample" and layers:
        layers = [layers[0], layers[len(layers) // 2], layers[-1]]
    return {key: names for key, names in groups.items() if key[0] in layers}


def _error(layer: int, outputs: Mapping[str, Outputs], plan: Plan) -> float:
    """Return the largest difference of old and new scores of a layer, over the largest score."""
    old: list[Vector] = []
    new: list[Vector] = []
    for name, (before, after) in outputs.items():
        where = plan.moves[name].slices
        rest = np.setdiff1d(np.arange(len(before)), where)
        if not np.array_equal(before[rest], after[rest]):
            raise ValueError(f"tensor {name!r}: channels outside the rotated slices have moved")
        old.append(before[where])
        new.append(after[where])
    first, second = _scores(old, plan.source), _scores(new, plan.target)
    largest = float(np.abs(first).max())
    error = float(np.abs(first - second).max()) / largest if largest else 0.0
    if not error <= TOLERANCE:
        raise ValueError(
            f"layer {layer}: scores of the old and the new weights differ by {error:.1e} of the "
            "largest; the rows do not fit this model"
        )
    return error


def _scores(slices: list[Vector], layout: str) -> Vector:
    """Return the scores of every slice with every other, both rotated by arbitrary angles.

    A pair is a complex number, and a rotation a factor: q k* in the paper, equation 12.
    """
    x = np.concatenate(slices)
    first, second = pair_slices(x.shape[1], layout)
    angles = np.random.default_rng(0).uniform(0, math.tau, (2, x.shape[1] // 2))
    q, k = (x[:, first] + 1j * x[:, second]) * np.exp(1j * angles[:, None])
    return (q @ k.conj().T).real


def _outputs(file: BinaryIO, tensor: Tensor, move: Move) -> Vector:
    """Return the output of each channel of a moved tensor for a random input, (size,) float64."""
    before = math.prod(tensor.shape[: move.axis])
    width = (tensor.end - tensor.begin) // (before * move.size)
    after = width // np.dtype(NUMPY.get(tensor.dtype, "u1")).itemsize
    random = np.random.default_rng(1)
    left, right = random.standard_normal(before), random.standard_normal(after)
    sums = [rows @ right for rows in rows_of(file, tensor, after)]
    return left @ np.concatenate(sums).reshape(before, move.size) if sums else np.zeros(move.size)


def rows_of(file: BinaryIO, tensor: Tensor, columns: int) -> Iterator[Vector]:
    """Yield the values of a tensor in rows of `columns`, a few MB at a time, as float64.

    NaN and infinity become 0, because they would spoil the sum of their row.
    """
    kind = np.dtype(NUMPY.get(tensor.dtype, "u1"))
    width = max(columns * kind.itemsize, 1)
    step = max(CHUNK // width, 1) * width
    for begin in range(tensor.begin, tensor.end, step):
        values = read_piece(file, begin, min(begin + step, tensor.end)).view(kind)
        if tensor.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            wide = values.astype(np.float64)
        np.nan_to_num(wide, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        yield wide.reshape(-1, columns)
