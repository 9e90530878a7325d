"""Shapes and specs for every kernel, with numbers to rotate, and exact angles, as NumPy arrays."""

import itertools
from typing import NamedTuple

import numpy as np
from libraries import if_installed
from published import scaled

import rotary
from rotary import Rotary
from rotary.kernels.geometry import Options

ml_dtypes = if_installed("ml_dtypes")
mpmath = if_installed("mpmath")
torch = if_installed("torch")

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
LAYOUTS = list(itertools.product(("half", "interleaved"), repeat=2))


def to_torch(array):
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor):
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return tensor.numpy()


def randn(*shape, seed=0, dtype=None, grad=False):
    """Random numbers of torch, float32 unless another dtype is given; alike in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, dtype=torch.float64, generator=generator)
    return made.to(dtype or torch.float32).requires_grad_(grad)


def channels(layout, pairs, start=0):
    """Numbers of the first and of the second channels of the pairs, as a layout says."""
    index = np.arange(pairs)
    if layout == "half":
        return start + index, start + pairs + index
    return start + 2 * index, start + 2 * index + 1


def as_complex(x, layout, pairs=None, start=0):
    """The pairs of x as complex numbers, (..., pairs); without `pairs` all its channels."""
    first, second = channels(layout, x.shape[-1] // 2 if pairs is None else pairs, start)
    x = np.asarray(x, np.float64)
    return x[..., first] + 1j * x[..., second]


def way(options):
    """What `rotate` is passed for options."""
    names = set(Options._fields) - {"head_dim", "conjugate"}
    return {name: getattr(options, name) for name in names}


class Case(NamedTuple):
    q: tuple[int, ...]
    k: tuple[int, ...]
    table: tuple[int, ...]  # without pairs
    rotary_dim: int | None = None
    start: int = 0
    seq_dim: int = -2
    rows: tuple[int, ...] | None = None  # the shape of the row numbers

    def options(self, layout, out_layout, conjugate=False):
        channels = self.rotary_dim, self.start
        return Options(layout, out_layout, *channels, self.seq_dim, None, conjugate)


CASES = {
    "one vector": Case((1, 2), (1, 2), (1,)),
    "odd seq, GQA 4:2": Case((2, 4, 7, 64), (2, 2, 7, 64), (7,)),
    "MQA 8:1": Case((1, 8, 5, 128), (1, 1, 5, 128), (5,)),
    "fewer q than k heads": Case((1, 1, 5, 16), (1, 3, 5, 16), (5,)),
    "head_dim 80": Case((2, 3, 5, 80), (2, 1, 5, 80), (5,)),
    "head_dim 72": Case((1, 2, 3, 72), (1, 2, 3, 72), (3,)),
    "head_dim 6": Case((2, 2, 9, 6), (2, 1, 9, 6), (9,)),
    "head_dim 2": Case((2, 2, 9, 2), (2, 2, 9, 2), (9,)),
    "odd head_dim, partial": Case((2, 2, 4, 7), (2, 1, 4, 7), (4,), 4),
    "partial": Case((2, 2, 5, 80), (2, 1, 5, 80), (5,), 32),
    "partial from a start": Case((1, 2, 5, 72), (1, 2, 5, 72), (5,), 40, 16),
    "partial to the end": Case((1, 2, 5, 24), (1, 2, 5, 24), (5,), 8, 16),
    "tables per batch": Case((3, 4, 5, 16), (3, 2, 5, 16), (3, 5)),
    "tables of batch 1": Case((3, 4, 5, 16), (3, 2, 5, 16), (1, 5)),
    "tables of the rank of x": Case((3, 4, 5, 16), (3, 4, 5, 16), (3, 4, 5)),
    "tables of the rank of x, broadcast": Case((3, 4, 5, 16), (3, 2, 5, 16), (3, 1, 5)),
    "rank 2": Case((5, 16), (5, 16), (5,)),
    "rank 3": Case((3, 5, 16), (2, 5, 16), (5,)),
    "rank 3, tables per head": Case((3, 5, 16), (3, 5, 16), (3, 5)),
    "rank 5": Case((2, 3, 2, 5, 16), (2, 3, 1, 5, 16), (5,)),
    "rank 5, tables of the rank of x": Case((2, 3, 2, 5, 16), (2, 3, 2, 5, 16), (2, 3, 2, 5)),
    "seq_dim -3": Case((2, 7, 4, 16), (2, 7, 1, 16), (7,), seq_dim=-3),
    "seq_dim -3, tables per batch": Case((2, 7, 4, 16), (2, 7, 2, 16), (2, 7), seq_dim=-3),
    "seq_dim 0": Case((7, 3, 4, 16), (7, 3, 2, 16), (7,), seq_dim=0),
    "seq_dim 0, tables per batch": Case((7, 3, 4, 16), (7, 3, 2, 16), (3, 7), seq_dim=0),
    "seq_dim 0, rank 3": Case((7, 4, 16), (7, 2, 16), (7,), seq_dim=0),
    "batch, heads and seq alike": Case((4, 4, 4, 8), (4, 4, 4, 8), (4, 4)),
    "batch 0": Case((0, 2, 5, 16), (0, 1, 5, 16), (5,)),
    "seq 0": Case((2, 2, 0, 16), (2, 1, 0, 16), (0,)),
    "heads 0": Case((2, 2, 5, 16), (2, 0, 5, 16), (5,)),
}
MORE_CASES = {  # blocks of a GPU of every width, and the orders of axes in which it walks over them
    "GQA 6:4": Case((1, 6, 3, 16), (1, 4, 3, 16), (3,)),
    "head_dim 96": Case((1, 2, 3, 96), (1, 2, 3, 96), (3,)),
    "head_dim 192": Case((1, 2, 3, 192), (1, 2, 3, 192), (3,)),
    "head_dim 256": Case((1, 2, 3, 256), (1, 2, 3, 256), (3,)),
    "head_dim 1024": Case((1, 1, 2, 1024), (1, 1, 2, 1024), (2,)),
    "partial to the end of a wide head": Case((1, 2, 5, 192), (1, 1, 5, 192), (5,), 64, 128),
    "little of much": Case((1, 2, 3, 128), (1, 1, 3, 128), (3,), 6, 50),
    "rank 5, tables per second axis": Case((2, 3, 2, 5, 16), (2, 3, 4, 5, 16), (1, 3, 1, 5)),
    "packed sequences": Case((11, 4, 64), (11, 2, 64), (11,), seq_dim=0),
    "one new token": Case((5, 8, 1, 64), (5, 2, 1, 64), (1,)),
    "one new token each": Case((5, 8, 1, 64), (5, 2, 1, 64), (5, 1)),
    "no q heads": Case((2, 0, 5, 16), (2, 1, 5, 16), (5,)),
    "rows": Case((2, 4, 5, 16), (2, 2, 5, 16), (9,), rows=(5,)),
    "rows per batch": Case((2, 5, 4, 16), (2, 5, 2, 16), (9,), seq_dim=-3, rows=(2, 5)),
    "rows of packed sequences": Case((11, 4, 64), (11, 2, 64), (30,), seq_dim=0, rows=(11,)),
    "rows of the rank of x": Case((3, 4, 5, 16), (3, 2, 5, 16), (9,), rows=(3, 1, 5)),
}


def numbers(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def tables(shape, pairs, seed=2):
    angles = np.random.default_rng(seed).uniform(-np.pi, np.pi, (*shape, pairs))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def operands(case, dtype):
    q, k = (numbers(seed, shape, dtype) for seed, shape in enumerate((case.q, case.k)))
    return (q, k), *tables(case.table, (case.rotary_dim or case.q[-1]) // 2)


SPEC = Rotary(head_dim=64, base=5e5)
SPECS = {
    "half": SPEC,
    "interleaved": Rotary(head_dim=64, layout="interleaved"),
    "interleaved in, half out": Rotary(head_dim=64, layout="interleaved", out_layout="half"),
    "half in, interleaved out": Rotary(head_dim=64, layout="half", out_layout="interleaved"),
    "a slice": Rotary(head_dim=80, rotary_dim=32, start=16, layout="interleaved"),
    "backwards": Rotary(head_dim=64, sign=-1),
    "amplitude": scaled("yarn", 64, 8.0, 4096),
    "three axes": Rotary(head_dim=64, axes=rotary.positions.sections(16, 8, 8)),
}  # fmt: skip
DYNAMIC = scaled("dynamic", 64, 2.0, 16)  # fmt: skip
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
LADDERS = [[1.0, 0.01, 1e-4], [1000.0, 100.0, 7.0], [0.0, -1.5, 2.0]]
FRACTIONS = [0.5, -0.5, 2.0**-30, -(2.0**-30), 1e-30, 0.0, 123_456.75]
FRACTIONS = np.append(FRACTIONS, np.outer([1, 3e4], np.random.default_rng(0).uniform(-1, 1, 50)))


def ids(spec, *shape, high=100_000):
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    return np.random.default_rng(3).integers(0, high, (*shape, *axes))


def range_of(dtype):
    """Whole numbers of a type, up to its ends and not beyond 2^39."""
    info = np.iinfo(dtype)
    return sorted({max(info.min, -(2**39)), 0, 1, 100, min(info.max, 2**39)})


def exact_of(inv_freq, where):
    """cos and sin of where x inv_freq from 60-digit arithmetic: (len(where), pairs) float64."""
    with mpmath.workdps(60):
        angles = [[mpmath.mpf(float(w)) * mpmath.mpf(float(p)) for w in inv_freq] for p in where]
        return tuple(
            np.array([[float(f(angle)) for angle in row] for row in angles])
            for f in (mpmath.cos, mpmath.sin)
        )


def exact(spec, where):
    """The same times the attention factor, for the frequencies of a spec and one axis."""
    frequencies, factor = rotary.inv_freq(spec)
    return tuple(factor * table for table in exact_of(frequencies, where))
