"""The proof that a converted checkpoint computes what it did, from the files that were written.

Weights of a layer are taken from both checkpoints, a random hidden state goes through them, and
what comes out is rotated, in the old layout and in the new. All scores must agree. Where the slices
are that rotate is the word of the plan, which reads it from the config.
"""

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ..fanout import fan_out
from ..layouts import pair_slices
from .files import Checkpoint, Shard, Tensor, open_regular, read_shard
from .names import classify
from .plan import Bytes, Move, Plan
from .shards import CHUNK, Hashes, pieces, read_piece

TOLERANCE = 1e-9  # of the largest score; sums in float64, in another order
WHICH = ("sample", "full")
# how NumPy reads what it knows; an 8-bit float counts as its bits, which move as a number does
NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U64": "<u8", "I32": "<i4",
    "U32": "<u4", "I16": "<i2", "U16": "<u2", "I8": "i1",
}  # fmt: skip
Vector = npt.NDArray[np.float64]
Outputs = tuple[Vector, Vector]  # of the old weights and of the new


class Proof(NamedTuple):
    """What was checked.

    which    "sample" or "full"
    layers   whose scores agree
    tensors  that moved and were read again: undoing the move gives the bytes of the source
    error    largest difference of two scores, relative to the largest score
    """

    which: str
    layers: tuple[int, ...]
    tensors: int
    error: float


def check_which(which: str) -> None:
    """Raise ValueError unless there is such a proof.

    >>> check_which("none")
    Traceback (most recent call last):
    ValueError: verify must be 'sample' or 'full', got 'none'
    """
    if which not in WHICH:
        raise ValueError(f"verify must be 'sample' or 'full', got {which!r}")


class Ask(NamedTuple):
    """One shard to read again: everything that a worker in another process needs.

    hashes  tensor -> the sha256 that was written
    scored  tensors whose outputs are wanted;  whole  whether those that stay are read as well
    """

    shard: Shard
    written: Path
    hashes: Hashes
    moves: Mapping[str, Move]
    scored: frozenset[str]
    whole: bool


def prove(
    checkpoint: Checkpoint,
    folder: Path,
    todo: Plan,
    hashes: Mapping[str, Hashes],
    which: str,
    executor: Executor | None = None,
) -> Proof:
    """Read a converted checkpoint again. Raises ValueError for anything that is not as it must be.

    hashes    file -> tensor -> the sha256 that was written
    executor  what reads; default this thread
    """
    groups = _groups(todo)
    layers = sorted({layer for layer, _ in groups})
    chosen = set(layers) if which == "full" else _sample(layers)
    asked = {key: names for key, names in groups.items() if key[0] in chosen}
    wanted = {name for names in asked.values() for name in names}
    asks = [
        Ask(
            shard,
            folder / shard.path.name,
            hashes[shard.path.name],
            {name: todo.moves[name] for name in shard.tensors if name in todo.moves},
            frozenset(wanted.intersection(shard.tensors)),
            which == "full",
        )
        for shard in checkpoint.shards
    ]
    outputs: dict[str, Outputs] = {}

    def told(found: list[tuple[Ask, dict[str, Outputs]]]) -> None:
        for _, each in found:
            outputs.update(each)

    if executor is None:
        told([(ask, read_again(ask)) for ask in asks])
    else:
        fan_out(read_again, asks, executor, told, size_of=lambda ask: ask.shard.state.size)
    errors = [
        _error(layer, {name: outputs[name] for name in names}, todo)
        for (layer, _), names in asked.items()
    ]
    return Proof(which, tuple(sorted(chosen)), len(todo.moves), max(errors, default=0.0))


def read_again(ask: Ask) -> dict[str, Outputs]:
    """Outputs of the tensors that are wanted. Raises ValueError for a shard that is not right."""
    outputs: dict[str, Outputs] = {}
    _check_header(ask)
    for name, tensor in ask.shard.tensors.items():
        move = ask.moves.get(name)
        if move is not None or ask.whole:
            _check(ask, tensor, name, move)
        if move is not None and name in ask.scored:
            outputs[name] = (
                _outputs(ask.shard.path, tensor, move),
                _outputs(ask.written, tensor, move),
            )
    return outputs


def _groups(todo: Plan) -> dict[tuple[int, int], list[str]]:
    """(layer, rotary_dim) -> the tensors that move and hold numbers, not words of packed ones."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, move in todo.moves.items():
        rule = classify(name, todo.model)
        if rule is not None and not move.place.bits:
            found.setdefault((rule.layer, move.rotary_dim), []).append(name)
    return found


def _sample(layers: list[int]) -> set[int]:
    return {layers[0], layers[len(layers) // 2], layers[-1]} if layers else set()


def _source(ask: Ask) -> BinaryIO:
    return open_regular(ask.shard.path, ask.shard.state)


def _check_header(ask: Ask) -> None:
    """A written header has the bytes of the source's, and its file their size."""
    size = read_shard(ask.written).state.size
    data = min((tensor.begin for tensor in ask.shard.tensors.values()), default=size)
    with _source(ask) as source, open_regular(ask.written) as target:
        if size != ask.shard.state.size or source.read(data) != target.read(data):
            raise ValueError(
                f"{ask.written}: has another header than {ask.shard.path}; run it again"
            )


def _check(ask: Ask, tensor: Tensor, name: str, move: Move | None) -> None:
    """A written tensor has the bytes that were meant, and undoing its move gives the source's."""
    back = move and move._replace(source=move.target, target=move.source)
    known, is_undone = hashlib.sha256(), True
    with _source(ask) as source, open_regular(ask.written) as target:
        for begin, end, turn in pieces(tensor, back):
            raw = read_piece(target, begin, end)
            known.update(raw.data)
            undone = raw if turn is None else turn(raw)
            is_undone &= np.array_equal(undone, read_piece(source, begin, end))
    if known.hexdigest() != ask.hashes[name]:
        raise ValueError(
            f"{ask.written}: tensor {name!r} is not what was written; check the disk, and run it "
            "again"
        )
    if not is_undone:
        what = "does not come back when its move is undone" if move else "is not the source's"
        raise ValueError(f"{ask.written}: tensor {name!r} {what}")


def check_files(folder: Path, hashes: Mapping[str, str]) -> None:
    """Read files that are no shards again: name -> the sha256 that was written.

    >>> check_files(Path("."), {})
    """
    for name, known in hashes.items():
        found = hashlib.sha256()
        with open_regular(folder / name) as file:
            while piece := file.read(CHUNK):
                found.update(piece)
        if found.hexdigest() != known:
            raise ValueError(
                f"{folder / name}: is not what was written; check the disk, and run it again"
            )


# --- scores ---


def _error(layer: int, outputs: Mapping[str, Outputs], todo: Plan) -> float:
    """The largest difference of two scores of a layer, relative to the largest score."""
    old: list[Vector] = []
    new: list[Vector] = []
    for name, (before, after) in outputs.items():
        where = _slices(todo.moves[name])
        rest = np.setdiff1d(np.arange(len(before)), where)
        if not np.array_equal(before[rest], after[rest]):
            raise ValueError(f"tensor {name!r}: channels outside the rotated slices have moved")
        old.append(before[where])
        new.append(after[where])
    first, second = _scores(old, todo.source), _scores(new, todo.target)
    largest = float(np.abs(first).max())
    error = float(np.abs(first - second).max()) / largest if largest else 0.0
    if not error <= TOLERANCE:
        raise ValueError(
            f"layer {layer}: scores of the old and the new weights differ by {error:.1e} of the "
            "largest; the rows do not fit this model"
        )
    return error


def _slices(move: Move) -> npt.NDArray[np.int64]:
    """Channel numbers of the rotated slices, (slices, rotary_dim)."""
    begins = [run.begin + run.stride * head for run in move.runs for head in range(run.heads)]
    return np.array(begins)[:, None] + np.arange(move.rotary_dim)


def _scores(slices: list[Vector], layout: str) -> Vector:
    """Every slice against every other, the one turned by arbitrary angles, the other by others.

    A pair is a complex number, a rotation a factor: q k* of the paper, equation 12.
    """
    x = np.concatenate(slices)
    first, second = pair_slices(x.shape[1], layout)
    angles = np.random.default_rng(0).uniform(0, math.tau, (2, x.shape[1] // 2))
    q, k = (x[:, first] + 1j * x[:, second]) * np.exp(1j * angles[:, None])
    return (q @ k.conj().T).real


def _outputs(path: Path, tensor: Tensor, move: Move) -> Vector:
    """What the channels along the axis of a move give for one random input, (size,) float64."""
    before = math.prod(tensor.shape[: move.axis])
    width = (tensor.end - tensor.begin) // (before * move.size)
    step = max(CHUNK // max(width, 1), 1) * max(width, 1)
    after = width // np.dtype(_kind(tensor.dtype)).itemsize
    chance = np.random.default_rng(1)
    left, right = chance.standard_normal(before), chance.standard_normal(after)
    with open_regular(path) as file:
        sums = [
            numbers(read_piece(file, begin, min(begin + step, tensor.end)), tensor.dtype)
            .reshape(-1, after) @ right
            for begin in range(tensor.begin, tensor.end, step)
        ]  # fmt: skip
    whole = np.concatenate([np.zeros(0), *sums])
    return left @ whole.reshape(before, move.size) if whole.size else np.zeros(move.size)


def _kind(dtype: str) -> str:
    """How NumPy reads a type; what it does not know counts as bytes."""
    return "<u2" if dtype == "BF16" else NUMPY.get(dtype, "u1")


def numbers(raw: Bytes, dtype: str) -> Vector:
    """Bytes of a tensor as float64; what is no number counts as 0, for it would spoil its row.

    >>> numbers(np.array([0x80, 0x3F], np.uint8), "BF16")
    array([1.])
    """
    values = raw.view(_kind(dtype))
    if dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide = values.astype(np.float64)
    return np.nan_to_num(wide, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
