"""The proof that a converted checkpoint computes what it did, from the files that were written.

Weights of a layer are taken from both checkpoints, a random hidden state goes through them, and
what comes out is rotated, in the old layout and in the new. All scores must agree. Which slices
rotate is taken from the plan, which reads it from the config.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..fanout import fan_out
from ..layouts import pair_slices
from .headers import Tensor, open_regular, read_shard
from .plan import Conversion, Move, Plan
from .shards import CHUNK, Bytes, Job, pieces, read_piece, size_of
from .writing import Hashes

TOLERANCE = 1e-9  # of the largest score; sums in float64, in another order
# how NumPy reads a type; one that it does not know counts as bytes, which move as a number does
NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U64": "<u8", "I32": "<i4",
    "U32": "<u4", "I16": "<i2", "U16": "<u2", "I8": "i1", "BF16": "<u2",
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


def prove(
    work: Conversion,
    jobs: Sequence[Job],
    hashes: Mapping[str, Hashes],
    executor: Executor | None = None,
) -> Proof:
    """Read a converted checkpoint again. Raises ValueError for anything that is not as it must be.

    jobs      the shards as they were written
    hashes    file -> tensor -> the sha256 that was written
    executor  what reads; default this thread
    """
    # tensors of numbers, not of packed words, by what must score together
    groups: dict[tuple[int, int], list[str]] = {}
    for name, move in work.plan.moves.items():
        if not move.place.bits:
            groups.setdefault((move.layer, move.rotary_dim), []).append(name)
    layers = sorted({layer for layer, _ in groups})
    if work.verify == "sample" and layers:
        layers = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
    groups = {key: names for key, names in groups.items() if key[0] in layers}
    scored = frozenset(name for names in groups.values() for name in names)
    read = functools.partial(read_again, scored=scored, whole=work.verify == "full")
    jobs = [job._replace(hashes=hashes[job.target.name]) for job in jobs]
    outputs: dict[str, Outputs] = {}

    def collect(pairs: Sequence[tuple[Job, dict[str, Outputs]]]) -> None:
        for _, result in pairs:
            outputs.update(result)

    if executor is None:
        collect([(job, read(job)) for job in jobs])
    else:
        fan_out(read, jobs, executor, collect, size_of=size_of)
    errors = [
        _error(layer, {name: outputs[name] for name in names}, work.plan)
        for (layer, _), names in groups.items()
    ]
    return Proof(work.verify, tuple(layers), len(work.plan.moves), max(errors, default=0.0))


def read_again(job: Job, scored: Set[str], whole: bool) -> dict[str, Outputs]:
    """Outputs of the tensors of a shard that are scored. ValueError for a shard that is not right.

    scored  names of tensors of any shard;  whole  whether those that stay are read as well
    """
    outputs: dict[str, Outputs] = {}
    _check_header(job)
    for name, tensor in job.shard.tensors.items():
        move = job.moves.get(name)
        if move is not None or whole:
            _check(job, tensor, name, move)
        if move is not None and name in scored:
            before, after = (_outputs(path, tensor, move) for path in (job.shard.path, job.target))
            outputs[name] = before, after
    return outputs


def _check_header(job: Job) -> None:
    """A written header has the bytes of the source's, and its file their size."""
    path, state = job.shard.path, job.shard.state
    data = min((tensor.begin for tensor in job.shard.tensors.values()), default=state.size)
    size = read_shard(job.target).state.size
    with open_regular(path, state) as source, open_regular(job.target) as target:
        if size != state.size or source.read(data) != target.read(data):
            raise ValueError(f"{job.target}: has another header than {path}; run it again")


def _check(job: Job, tensor: Tensor, name: str, move: Move | None) -> None:
    """A written tensor has the bytes that were meant, and undoing its move gives the source's."""
    back = move and move._replace(source=move.target, target=move.source)
    digest, is_undone = hashlib.sha256(), True
    with (
        open_regular(job.shard.path, job.shard.state) as source,
        open_regular(job.target) as target,
    ):
        for begin, end, undo in pieces(tensor, back):
            raw = read_piece(target, begin, end)
            digest.update(raw.data)
            undone = raw if undo is None else undo(raw)
            is_undone &= np.array_equal(undone, read_piece(source, begin, end))
    if digest.hexdigest() != job.hashes[name]:
        raise ValueError(
            f"{job.target}: tensor {name!r} is not what was written; check the disk, and run it "
            "again"
        )
    if not is_undone:
        what = "does not come back when its move is undone" if move else "is not the source's"
        raise ValueError(f"{job.target}: tensor {name!r} {what}")


def check_files(folder: Path, hashes: Mapping[str, str]) -> None:
    """Read files that are no shards again: name -> the sha256 that was written."""
    for name, written in hashes.items():
        digest = hashlib.sha256()
        with open_regular(folder / name) as file:
            while piece := file.read(CHUNK):
                digest.update(piece)
        if digest.hexdigest() != written:
            raise ValueError(
                f"{folder / name}: is not what was written; check the disk, and run it again"
            )


# --- scores ---


def _error(layer: int, outputs: Mapping[str, Outputs], plan: Plan) -> float:
    """The largest difference of two scores of a layer, relative to the largest score."""
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
    """Scores of every slice with every other, both rotated by arbitrary angles.

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
    after = width // np.dtype(NUMPY.get(tensor.dtype, "u1")).itemsize
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


def numbers(raw: Bytes, dtype: str) -> Vector:
    """Bytes of a tensor as float64; what is no number counts as 0, for it would spoil its row.

    >>> numbers(np.array([0x80, 0x3F], np.uint8), "BF16")
    array([1.])
    """
    values = raw.view(NUMPY.get(dtype, "u1"))
    if dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wide = values.astype(np.float64)
    return np.nan_to_num(wide, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
