"""The GPU kernel without a GPU: its numbers in Triton's interpreter, its code from the compiler."""

import mmap
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import ml_dtypes
import mpmath
import numpy as np
import pytest
import torch

import rotary
from rotary.kernels import numpy as reference
from rotary.kernels.geometry import Options, geometry_of

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)

import triton
from interpreter import kernel, mended
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rotary.kernels import launch
from rotary.kernels import triton as compiled


@pytest.fixture(autouse=True)
def _mend(monkeypatch):
    mended(monkeypatch)


@pytest.fixture(autouse=True)
def _poison():
    torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


DTYPES = {
    "float32": (np.dtype(np.float32), torch.float32),
    "float16": (np.dtype(np.float16), torch.float16),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), torch.bfloat16),
}
SAME = [("half", "half"), ("interleaved", "interleaved")]
LAYOUTS = [*SAME, ("interleaved", "half"), ("half", "interleaved")]


def to_torch(array):
    if array.dtype == DTYPES["bfloat16"][0]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor):
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"][0])
    return tensor.numpy()


def steps_apart(got, want):
    """How many numbers of their type lie between two arrays, at most."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert not (np.isnan(got) ^ np.isnan(want)).any()
    bits = [
        np.ascontiguousarray(a).view(f"i{a.dtype.itemsize}").astype(np.int64) for a in (got, want)
    ]
    low = -(2 ** (8 * got.dtype.itemsize - 1))
    ordered = [np.where(b < 0, low - b, b) for b in bits]
    return abs(ordered[0] - ordered[1])[~np.isnan(want)].max(initial=0)


def assert_equal(got, want):
    """The bits of the law; the interpreter cuts bfloat16 off instead of rounding it."""
    allowed = 1 if want.dtype == DTYPES["bfloat16"][0] else 0
    assert steps_apart(to_numpy(got), want) <= allowed


# --- tables: the same cases as the law ---


class Case(NamedTuple):
    q: tuple[int, ...]
    k: tuple[int, ...] | None
    table: tuple[int, ...]  # without pairs
    rotary_dim: int | None = None
    start: int = 0
    seq_dim: int = -2
    rows: tuple[int, ...] | None = None

    def options(self, layout, out_layout=None, conjugate=False):
        channels = self.rotary_dim, self.start
        return Options(layout, out_layout, *channels, self.seq_dim, None, conjugate)

    @property
    def shapes(self):
        return (self.q,) if self.k is None else (self.q, self.k)

    @property
    def pairs(self):
        return (self.rotary_dim or self.q[-1]) // 2


CASES = {
    "one vector": Case((1, 2), None, (1,)),
    "GQA 4:2, odd seq": Case((2, 4, 7, 64), (2, 2, 7, 64), (7,)),
    "GQA 6:4": Case((1, 6, 3, 16), (1, 4, 3, 16), (3,)),
    "MQA 8:1": Case((1, 8, 5, 128), (1, 1, 5, 128), (5,)),
    "fewer q than k heads": Case((1, 1, 5, 16), (1, 3, 5, 16), (5,)),
    "q alone": Case((2, 3, 5, 32), None, (5,)),
    "head_dim 6": Case((2, 2, 9, 6), (2, 1, 9, 6), (9,)),
    "head_dim 2": Case((2, 2, 9, 2), (2, 2, 9, 2), (9,)),
    "head_dim 72": Case((1, 2, 3, 72), (1, 2, 3, 72), (3,)),
    "head_dim 80": Case((2, 3, 5, 80), (2, 1, 5, 80), (5,)),
    "head_dim 96": Case((1, 2, 3, 96), (1, 2, 3, 96), (3,)),
    "head_dim 192": Case((1, 2, 3, 192), (1, 2, 3, 192), (3,)),
    "head_dim 256": Case((1, 2, 3, 256), (1, 2, 3, 256), (3,)),
    "head_dim 1024": Case((1, 1, 2, 1024), None, (2,)),
    "odd head_dim, partial": Case((2, 2, 4, 7), (2, 1, 4, 7), (4,), 4),
    "partial": Case((2, 2, 5, 80), (2, 1, 5, 80), (5,), 32),
    "partial from a start": Case((1, 2, 5, 72), (1, 2, 5, 72), (5,), 40, 16),
    "partial to the end": Case((1, 2, 5, 192), (1, 1, 5, 192), (5,), 64, 128),
    "little of much": Case((1, 2, 3, 128), (1, 1, 3, 128), (3,), 6, 50),
    "tables per batch": Case((3, 4, 5, 16), (3, 2, 5, 16), (3, 5)),
    "tables of batch 1": Case((3, 4, 5, 16), (3, 2, 5, 16), (1, 5)),
    "tables of the rank of x": Case((3, 4, 5, 16), (3, 4, 5, 16), (3, 4, 5)),
    "rank 3": Case((3, 5, 16), (2, 5, 16), (5,)),
    "rank 3, tables per head": Case((3, 5, 16), (3, 5, 16), (3, 5)),
    "rank 5": Case((2, 3, 2, 5, 16), (2, 3, 1, 5, 16), (5,)),
    "rank 5, tables of the rank of x": Case((2, 3, 2, 5, 16), (2, 3, 2, 5, 16), (2, 3, 2, 5)),
    "rank 5, tables per second axis": Case((2, 3, 2, 5, 16), (2, 3, 4, 5, 16), (1, 3, 1, 5)),
    "seq_dim -3": Case((2, 7, 4, 16), (2, 7, 1, 16), (7,), seq_dim=-3),
    "seq_dim -3, tables per batch": Case((2, 7, 4, 16), (2, 7, 2, 16), (2, 7), seq_dim=-3),
    "seq_dim 0": Case((7, 3, 4, 16), (7, 3, 2, 16), (7,), seq_dim=0),
    "packed sequences": Case((11, 4, 64), (11, 2, 64), (11,), seq_dim=0),
    "one new token": Case((5, 8, 1, 64), (5, 2, 1, 64), (1,)),
    "one new token each": Case((5, 8, 1, 64), (5, 2, 1, 64), (5, 1)),
    "batch, heads and seq alike": Case((4, 4, 4, 8), (4, 4, 4, 8), (4, 4)),
    "rows": Case((2, 4, 5, 16), (2, 2, 5, 16), (9,), rows=(5,)),
    "rows per batch": Case((2, 5, 4, 16), (2, 5, 2, 16), (9,), seq_dim=-3, rows=(2, 5)),
    "rows of packed sequences": Case((11, 4, 64), (11, 2, 64), (30,), seq_dim=0, rows=(11,)),
    "rows of the rank of x": Case((3, 4, 5, 16), (3, 2, 5, 16), (9,), rows=(3, 1, 5)),
    "batch 0": Case((0, 2, 5, 16), (0, 1, 5, 16), (5,)),
    "seq 0": Case((2, 2, 0, 16), (2, 1, 0, 16), (0,)),
    "no k heads": Case((2, 2, 5, 16), (2, 0, 5, 16), (5,)),
    "no q heads": Case((2, 0, 5, 16), (2, 1, 5, 16), (5,)),
}


def numbers(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def tables(shape, pairs, seed=2):
    angles = np.random.default_rng(seed).uniform(-np.pi, np.pi, (*shape, pairs))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def operands(case, dtype="float32"):
    xs = tuple(numbers(seed, shape, DTYPES[dtype][0]) for seed, shape in enumerate(case.shapes))
    rows = None
    if case.rows is not None:
        rows = np.random.default_rng(5).integers(0, case.table[0], case.rows)
    return xs, *tables(case.table, case.pairs), rows


def rotate(xs, cos, sin, rows, options, out=None):
    """The kernel on torch tensors; xs and out may be any views."""
    cos, sin = to_torch(cos), to_torch(sin)
    rows = None if rows is None else to_torch(rows)
    shape = None if rows is None else tuple(rows.shape)
    geometry = geometry_of(tuple(tuple(x.shape) for x in xs), tuple(cos.shape), shape, options)
    return kernel.rotate(xs, cos, sin, rows, geometry, out)


def check(case, layout, out_layout, conjugate, dtype):
    xs, cos, sin, rows = operands(case, dtype)
    options = case.options(layout, out_layout, conjugate)
    want = reference.rotate(xs, cos, sin, rows, options, None)
    got = rotate(tuple(map(to_torch, xs)), cos, sin, rows, options)
    for tensor, array in zip(got, want, strict=True):
        assert_equal(tensor, array)


@pytest.mark.parametrize("layout", SAME)
@pytest.mark.parametrize("case", CASES)
def test_any_shape_equals_the_law(case, layout):
    check(CASES[case], *layout, False, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_type_equals_the_law(layout, conjugate, dtype):
    check(CASES["GQA 4:2, odd seq"], *layout, conjugate, dtype)
    check(CASES["partial from a start"], *layout, conjugate, dtype)


def packed(tensor, heads):
    """q and k as slices of one block (..., q heads + k heads + v heads, head_dim)."""
    return tensor[..., : heads[0], :], tensor[..., heads[0] : sum(heads), :]


def views():
    """(q, k), all of batch 2, 6 tokens, 4 and 2 heads of 16 channels, in strange memory."""
    block = to_torch(numbers(0, (2, 6, 8, 16)))
    yield "transposed", tuple(x.transpose(1, 2) for x in packed(block, (4, 2)))
    yield "packed", packed(block, (4, 2))
    wide = to_torch(numbers(1, (2, 6, 4, 19)))
    yield "odd strides", (wide[..., 1:17], wide[:, :, 1:3, 2:18])
    yield "last axis first", (to_torch(numbers(2, (16, 2, 6, 4))).permute(1, 2, 3, 0),
                              to_torch(numbers(3, (2, 6, 2, 16))))  # fmt: skip
    yield "every second token", (to_torch(numbers(4, (2, 12, 4, 16)))[:, ::2],
                                 to_torch(numbers(5, (2, 12, 2, 16)))[:, 1::2])  # fmt: skip
    yield "one for all", (to_torch(numbers(6, (1, 6, 1, 16))).expand(2, 6, 4, 16),
                          to_torch(numbers(7, (2, 1, 2, 16))).expand(2, 6, 2, 16))  # fmt: skip


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("name", [name for name, _ in views()])
def test_any_view_equals_the_law(name, layout):
    xs = dict(views())[name]
    seq_dim = -2 if name == "transposed" else -3
    options = Options(layout, None, 12, 2, seq_dim)
    cos, sin = tables((6,), 6)
    copies = tuple(np.ascontiguousarray(x.numpy()) for x in xs)
    want = reference.rotate(copies, cos, sin, None, options, None)
    for got, array in zip(rotate(xs, cos, sin, None, options), want, strict=True):
        assert_equal(got, array)


def guarded(shape, dtype=torch.float32):
    """A NaN-filled view in the middle of a block of sevens, and the block."""
    block = torch.full(tuple(size + 2 for size in shape), 7.0, dtype=dtype)
    view = block[tuple(slice(1, -1) for _ in shape)]
    view.fill_(torch.nan)
    return view, block


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["GQA 4:2, odd seq", "partial from a start", "head_dim 6"])
def test_nothing_is_written_beside_the_output(case, layout):
    case = CASES[case]
    xs, cos, sin, rows = operands(case)
    out, blocks = zip(*map(guarded, case.shapes), strict=True)
    options = case.options(*layout)
    got = rotate(tuple(map(to_torch, xs)), cos, sin, rows, options, out=out)
    want = reference.rotate(xs, cos, sin, rows, options, None)
    for tensor, target, block, array in zip(got, out, blocks, want, strict=True):
        assert tensor is target
        assert_equal(target.contiguous(), array)
        target.fill_(7)
        assert bool((block == 7).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["GQA 4:2, odd seq", "partial from a start"])
def test_in_place_equals_out_of_place(case, layout):
    case = CASES[case]
    xs, cos, sin, rows = operands(case)
    xs, options = tuple(map(to_torch, xs)), case.options(*layout)
    want = rotate(xs, cos, sin, rows, options)
    assert all(a is b for a, b in zip(rotate(xs, cos, sin, rows, options, out=xs), xs, strict=True))
    for tensor, other in zip(xs, want, strict=True):
        assert_equal(tensor, other.numpy())


def test_three_tensors_into_memory_whose_last_axis_has_gaps():
    xs = tuple(numbers(heads, (2, heads, 5, 16)) for heads in (4, 2, 3))
    cos, sin = tables((5,), 8)
    want = reference.rotate(xs, cos, sin, None, Options(), None)
    out = tuple(torch.full((*x.shape, 2), torch.nan)[..., 0] for x in xs)
    rotate(tuple(map(to_torch, xs)), cos, sin, None, Options(), out=out)
    for tensor, array in zip(out, want, strict=True):
        assert_equal(tensor.contiguous(), array)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_a_changed_layout_in_place_goes_through_other_memory(layout, monkeypatch):
    """There, a thread writes where another one may still have to read; the interpreter has one."""
    operands = []
    monkeypatch.setattr(kernel, "_run", lambda plan, tensors, *_: operands.extend(tensors))
    x = torch.zeros(1, 2, 3, 16)
    rotate((x,), *tables((3,), 8), None, Options(*layout), out=(x,))
    assert (operands[0].data_ptr() == operands[2].data_ptr()) == (layout in SAME)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conjugate_is_the_transpose(layout):
    """The rows of the identity, rotated, are the columns of the matrix of the rotation."""
    case = Case((1, 24, 3, 24), None, (3,), 16, 4)
    cos, sin = tables(case.table, case.pairs)
    one = torch.eye(24).reshape(1, 24, 1, 24).repeat(1, 1, 3, 1)
    (forward,) = rotate((one,), cos, sin, None, case.options(*layout))
    (back,) = rotate((one,), cos, sin, None, case.options(*layout[::-1], True))
    assert torch.equal(forward, back.transpose(1, 3))
    assert not torch.equal(forward, back)


def test_a_row_outside_the_tables_gives_nan_and_harms_no_other():
    case = CASES["rows per batch"]
    xs, cos, sin, rows = operands(case)
    rows[0, 1], rows[1, 3] = 9, -1
    got = rotate(tuple(map(to_torch, xs)), cos, sin, rows, case.options("half"))
    outside = (rows < 0) | (rows >= 9)
    rows[outside] = 0
    want = reference.rotate(xs, cos, sin, rows, case.options("half"), None)
    for tensor, array in zip(got, want, strict=True):
        array[outside] = np.nan
        assert_equal(tensor, array)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_one_row_of_a_table_may_stand_for_all_tokens(layout):
    case = CASES["GQA 4:2, odd seq"]
    xs, cos, sin, _ = operands(case)
    cos, sin = (np.broadcast_to(table[:1], table.shape) for table in (cos, sin))
    want = reference.rotate(xs, cos, sin, None, case.options(layout), None)
    geometry = geometry_of(case.shapes, cos.shape, None, case.options(layout))
    expanded = (to_torch(table[:1].copy()).expand(table.shape) for table in (cos, sin))
    got = kernel.rotate(tuple(map(to_torch, xs)), *expanded, None, geometry, None)
    for tensor, array in zip(got, want, strict=True):
        assert_equal(tensor, array)


def test_tables_may_be_any_view():
    case = CASES["tables per batch"]
    xs, cos, sin, _ = operands(case)
    want = reference.rotate(xs, cos, sin, None, case.options("half"), None)
    pair = torch.stack((to_torch(cos), to_torch(sin)), dim=-1)
    geometry = geometry_of(case.shapes, cos.shape, None, case.options("half"))
    got = kernel.rotate(tuple(map(to_torch, xs)), *pair.unbind(-1), None, geometry, None)
    for tensor, array in zip(got, want, strict=True):
        assert_equal(tensor, array)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_offsets_beyond_31_bits(axis):
    """Along each axis 3 x 2^30 numbers apart, in memory of which a few pages are used."""
    step, count, width = 2**30 + 1, 2**32 + 2**20, 16
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13
    memory = mmap.mmap(-1, 2 * count, flags=mmap.MAP_PRIVATE | no_reserve)
    block = torch.frombuffer(memory, dtype=torch.float16)
    shape, strides = [1, 1, 1, width], [width, width, width, 1]
    shape[axis], strides[axis] = 4, step
    x = block.as_strided(shape, strides, step)
    values = numbers(0, shape, np.float16)
    x.copy_(torch.from_numpy(values))
    cos, sin = tables((shape[1],), width // 2)
    options = Options(seq_dim=-3)
    (got,) = rotate((x,), cos, sin, None, options)
    (want,) = reference.rotate((values,), cos, sin, None, options, None)
    assert_equal(got, want)
    rotate((x,), cos, sin, None, options, out=(x,))
    assert_equal(x.clone(memory_format=torch.contiguous_format), want)


def count_launches(monkeypatch):
    launches = []
    run = kernel._run
    monkeypatch.setattr(kernel, "_run", lambda *a: launches.append(a[0].programs) or run(*a))
    return launches


@pytest.mark.parametrize(
    ("case", "expected"),
    {
        "partial from a start": 1,
        "rank 5": 1,
        "seq_dim 0": 1,
        "tables of the rank of x": 1,
        "one new token": 1,
        "rank 5, tables per second axis": 2,  # the tables go round within each of the first axis
        "seq 0": 0,
    }.items(),
)
def test_launches_of_a_call(case, expected, monkeypatch):
    case = CASES[case]
    launches = count_launches(monkeypatch)
    xs, cos, sin, rows = operands(case)
    rotate(tuple(map(to_torch, xs)), cos, sin, rows, case.options("half"))
    assert len(launches) == expected


def test_the_work_may_be_cut_in_any_way(monkeypatch):
    """Few programs that walk over all heads, or many small ones: the numbers are the same."""
    case = Case((2, 40, 12, 16), (2, 40, 8, 16), (40,), seq_dim=-3)
    launches = count_launches(monkeypatch)
    xs, cos, sin, _ = operands(case)
    want = reference.rotate(xs, cos, sin, None, case.options("half"), None)
    for processors in (1, 10_000):
        monkeypatch.setattr(kernel, "_processors", lambda device, count=processors: count)
        got = rotate(tuple(map(to_torch, xs)), cos, sin, None, case.options("half"))
        for tensor, array in zip(got, want, strict=True):
            assert_equal(tensor, array)
    assert launches == [12, 100]


# --- exact angles, without tables ---

SPECS = {
    "half": rotary.Rotary(head_dim=16, base=5e5),
    "a slice": rotary.Rotary(head_dim=20, rotary_dim=12, start=4, layout="interleaved"),
    "mixed": rotary.Rotary(head_dim=16, layout="interleaved", out_layout="half"),
    "backwards": rotary.Rotary(head_dim=16, sign=-1),
    "amplitude": rotary.Rotary(
        head_dim=16, schedule="yarn",
        params={"factor": 8.0, "original_max_position_embeddings": 4096},
    ),
    "three axes": rotary.Rotary(head_dim=16, axes=rotary.positions.sections(4, 2, 2)),
    "three axes by turns": rotary.Rotary(head_dim=16, axes=(0, 1, 2, 0, 1, 2, 0, 0)),
}  # fmt: skip


def exact(spec, xs, positions=None, conjugate=False, out=None, seq_dim=-2):
    turns = torch.from_numpy(rotary.turns(spec).astype(np.int64))
    if spec.num_axes > 1:
        own = torch.arange(spec.num_axes)[:, None] == torch.tensor(spec.axes)
        turns = torch.where(own, turns, 0)
    shapes = tuple(tuple(x.shape) for x in xs)
    rows = None
    if positions is not None:
        rows = tuple(positions.shape[: positions.ndim - (spec.num_axes > 1)])
    options = Options(spec.layout, spec.out_layout, spec.rotary_dim, spec.start, seq_dim)
    table = (shapes[0][seq_dim], spec.rotary_dim // 2)
    options = options._replace(conjugate=conjugate != (spec.sign < 0))
    geometry, factor = geometry_of(shapes, table, rows, options), rotary.inv_freq(spec)[1]
    return kernel.rotate_exact(xs, turns, factor, positions, geometry, out)


def turned_units(spec, positions):
    """cos and sin as the kernel makes them: it turns pairs (1, 0)."""
    pairs = spec.rotary_dim // 2
    x = torch.cat((torch.ones(pairs), torch.zeros(pairs))).repeat(len(positions), 1)
    (y,) = exact(spec, (x,), torch.tensor(positions))
    return y.double().numpy().reshape(-1, 2, pairs).swapaxes(0, 1)


POSITIONS = [0, 1, 2, 65_535, 65_536, 131_071, 1_000_003, 2**24 + 1, 2**30 - 1, 2**31 - 1]
POSITIONS = [*POSITIONS, *np.random.default_rng(0).integers(0, 2**31, 20).tolist()]


def test_angles_are_exact_up_to_the_last_32_bit_position():
    spec = rotary.Rotary(head_dim=128, base=5e5)
    with mpmath.workdps(60):
        angles = [[mpmath.mpf(p) * mpmath.mpf(float(f)) for f in rotary.inv_freq(spec)[0]]
                  for p in POSITIONS]  # fmt: skip
        want = np.array([[[float(f(a)) for a in row] for row in angles]
                         for f in (mpmath.cos, mpmath.sin)])  # fmt: skip
    assert abs(turned_units(spec, POSITIONS) - want).max() <= 2e-7


def test_angles_are_the_same_whole_numbers_at_64_bit_positions():
    spec = rotary.Rotary(head_dim=32)
    positions = [2**40 + 1, 2**62 + 12_345, 2**63 - 1, -1, -(2**31), -(2**63)]
    turns = [int(turn) for turn in rotary.turns(spec)]
    fractions = np.array([[p * turn % 2**64 / 2**64 for turn in turns] for p in positions])
    want = np.stack((np.cos(2 * np.pi * fractions), np.sin(2 * np.pi * fractions)))
    assert abs(turned_units(spec, positions) - want).max() <= 2e-7


def test_every_part_of_the_turn_is_exact():
    """Angles all around, and close to each multiple of an eighth of a turn."""
    edges = [k * 2**61 + delta for k in range(-4, 4) for delta in (-(2**30), -1, 0, 1, 2**30)]
    angles = [edge for edge in edges if edge >= -(2**63)]
    angles += np.random.default_rng(0).integers(-(2**63), 2**63, 4000).tolist()
    spec = rotary.Rotary(head_dim=2, schedule="custom", params={"inv_freq": [2 * np.pi * 2.0**-64]})
    assert rotary.turns(spec).tolist() == [1]
    radians = np.array(angles)[:, None] * (2 * np.pi / 2**64)
    got = turned_units(spec, angles)
    assert abs(got - np.stack((np.cos(radians), np.sin(radians)))).max() <= 1.2e-7


def ids(spec, *shape, high=100_000):
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    return np.random.default_rng(3).integers(0, high, (*shape, *axes))


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("name", SPECS)
def test_exact_mode_equals_the_law(name, lead, conjugate):
    spec = SPECS[name]
    positions = ids(spec, *lead, 7)
    q, k = numbers(0, (2, 4, 7, spec.head_dim)), numbers(1, (2, 2, 7, spec.head_dim))
    cos, sin = rotary.cos_sin(spec, positions)
    options = Options(spec.layout, spec.out_layout, spec.rotary_dim, spec.start)
    want = reference.rotate((q, k), cos, sin, None, options._replace(conjugate=conjugate), None)
    got = exact(spec, tuple(map(to_torch, (q, k))), torch.from_numpy(positions), conjugate)
    for tensor, array in zip(got, want, strict=True):
        assert abs(tensor.numpy() - array).max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_positions_of_any_type_and_memory(dtype):
    for name in ("half", "three axes"):
        spec = SPECS[name]
        x = to_torch(numbers(0, (2, 4, 7, 16)))
        positions = torch.from_numpy(ids(spec, 2, 14, high=200))[:, ::2]
        (want,) = exact(spec, (x,), positions)
        (got,) = exact(spec, (x,), positions.to(dtype).mT.contiguous().mT)
        assert torch.equal(got, want)


@pytest.mark.parametrize("seq", [1, 7])
@pytest.mark.parametrize("seq_dim", [-2, -3])
def test_positions_need_not_be_given(seq, seq_dim):
    spec, x = SPECS["half"], to_torch(numbers(0, (5, seq, 3, 16)))
    x = x if seq_dim == -3 else x.transpose(1, 2).contiguous()

    def at(positions):
        return exact(spec, (x,), positions, seq_dim=seq_dim)[0]

    (got,) = exact(spec, (x,), seq_dim=seq_dim)
    assert torch.equal(got, at(torch.arange(seq)))


@pytest.mark.parametrize("name", ["half", "a slice", "mixed", "three axes"])
def test_exact_mode_in_place_equals_out_of_place(name):
    spec = SPECS[name]
    xs = tuple(to_torch(numbers(heads, (2, heads, 7, spec.head_dim))) for heads in (4, 2))
    positions = torch.from_numpy(ids(spec, 2, 7))
    want = exact(spec, xs, positions)
    exact(spec, xs, positions, out=xs)
    assert all(torch.equal(a, b) for a, b in zip(xs, want, strict=True))


def test_packed_sequences_start_again_at_position_0():
    spec, lengths = SPECS["half"], (5, 1, 7)
    x = to_torch(numbers(0, (sum(lengths), 4, 16)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    (got,) = exact(spec, (x,), positions, seq_dim=0)
    parts = [exact(spec, (part,), seq_dim=0)[0] for part in x.split(lengths)]
    assert torch.equal(got, torch.cat(parts))


# --- the code for the device, which the compiler makes without one ---


class Code(NamedTuple):
    loads: dict[int, int]  # how many of so many bits
    stores: dict[int, int]
    barriers: int
    shared: int  # bytes
    registers: int
    local: int  # bytes of the stack
    fused: int  # products that are added without being rounded


def code_of(plan, operands, arch):
    """What Triton makes for a launch, read from PTX and from the assembled code."""
    names, kinds = compiled.kernel.arg_names, {torch.int64: "*i64", torch.float32: "*fp32"}
    kinds |= {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32"}
    signature = dict.fromkeys(names, "i32") | {"factor": "fp32"}
    signature |= {n: kinds[t.dtype] for n, t in zip(names, operands, strict=False)}
    signature |= dict.fromkeys(plan.constants, "constexpr")
    constants = {(names.index(name),): value for name, value in plan.constants.items()}
    aligned = [index for index, t in enumerate(operands) if t.data_ptr() % 16 == 0]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(compiled.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", arch, 32)
    options = {"num_warps": plan.warps, "enable_fp_fusion": plan.constants["EXACT"]}
    result = triton.compile(source, target=target, options=options)
    used = _usage(result.asm["cubin"])
    ptx = result.asm["ptx"]
    return Code(
        _widths("ld", ptx), _widths("st", ptx), len(re.findall(r"\bbar\.sync", ptx)),
        result.metadata.shared, used["REG"], used["STACK"] + used["LOCAL"],
        len(re.findall(r"\bfma\.", ptx)),
    )  # fmt: skip


def _widths(kind, ptx):
    found = re.findall(rf"\b{kind}\.global[.:\w]*?(?:\.v(\d))?\.b(\d+)", ptx)
    assert len(found) == len(re.findall(rf"\b{kind}\.global", ptx))
    widths = [int(count or 1) * int(bits) for count, bits in found]
    return {width: widths.count(width) for width in set(widths)}


def _usage(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


@pytest.fixture
def code(monkeypatch, tmp_path):
    """Codes of the launches of a call of `compiled`, each for sm_90 and sm_80."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = []

    def compile_only(plan, operands, numbers, factor):
        found.extend(code_of(plan, operands, arch) for arch in (90, 80))

    monkeypatch.setattr(compiled, "_run", compile_only)
    monkeypatch.setattr(compiled, "_processors", lambda device: 132)
    return found


def memory(shape, order="bshd", dtype=torch.bfloat16):
    """Memory for x of (batch, seq, heads, head_dim), in another order, as (..., seq, head_dim)."""
    batch, seq, heads, dim = shape
    if order == "bshd":
        return torch.empty(batch, seq, heads, dim, dtype=dtype).transpose(1, 2)
    return torch.empty(batch, heads, seq, dim, dtype=dtype)


def launch_tables(dim, options, order="bshd", dtype=torch.bfloat16, heads=(32, 8), in_place=False):
    xs = tuple(memory((2, 512, count, dim), order, dtype) for count in heads)
    pairs = (options.rotary_dim or dim) // 2
    geometry = geometry_of(tuple(tuple(x.shape) for x in xs), (512, pairs), None, options)
    table = torch.empty(512, pairs)
    compiled.rotate(xs, table, table, None, geometry, xs if in_place else None)


def launch_exact(dim, options, order="bshd", axes=1, lead=(2, 512), dtype=torch.bfloat16):
    xs = tuple(memory((2, 512, count, dim), order, dtype) for count in (32, 8))
    geometry = geometry_of(tuple(tuple(x.shape) for x in xs), (512, dim // 2), lead, options)
    turns = torch.empty((dim // 2,) if axes == 1 else (axes, dim // 2), dtype=torch.int64)
    last = () if axes == 1 else (axes,)
    positions = None if lead is None else torch.empty((*lead, *last), dtype=torch.int64)
    compiled.rotate_exact(xs, turns, 1.0, positions, geometry, None)


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_tables_and_heads_move_in_vectors_of_16_bytes(dim, layout, order, code):
    launch_tables(dim, Options(layout), order)
    for each in code:
        assert set(each.loads) == set(each.stores) == {128}
        assert each.stores[128] == 4  # two pairs of vectors for each thread and step
        assert (each.shared, each.barriers, each.local) == (0, 0, 0)
        assert each.registers <= 88  # 6 blocks of 128 threads share a multiprocessor, or 5
        assert each.fused == 0  # else the last bit would not be that of the law
    assert len(code) == 2


@pytest.mark.parametrize("lead", [None, (512,), (2, 512)])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_exact_angles_need_no_local_memory(dim, layout, lead, code):
    launch_exact(dim, Options(layout), lead=lead)
    for each in code:
        assert set(each.stores) == {128}
        assert each.stores[128] == 4
        assert each.loads[128] >= 4
        assert set(each.loads) <= {64, 128}  # positions and turns are 64 bits wide
        assert each.local == 0
        assert each.registers <= 85
        assert dim == 256 or (each.shared, each.barriers) == (0, 0)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_three_axes_need_no_local_memory(layout, code):
    launch_exact(128, Options(layout), axes=3)
    for each in code:
        assert set(each.stores) == {128}
        assert each.local == 0
        assert each.shared <= 8192  # tables change hands once, before the walk over the heads
        assert each.registers <= 85


def test_the_copy_of_a_slice_is_part_of_the_launch_unless_in_place(code):
    launch_tables(128, Options("half", rotary_dim=32, start=64))
    copied, kept = code[0], []
    code.clear()
    launch_tables(128, Options("half", rotary_dim=32, start=64), in_place=True)
    kept = code[0]
    for each in (copied, kept):
        assert set(each.loads) == set(each.stores) == {128}
        assert (each.shared, each.local) == (0, 0)
    assert copied.stores[128] == 4 * kept.stores[128]  # 128 channels against 32


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float16, 128), (torch.float32, 128), (torch.float32, 80)]
)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_other_types_move_in_vectors_as_well(layout, dtype, dim, code):
    launch_tables(dim, Options(layout), dtype=dtype)
    for each in code:
        assert set(each.loads) == set(each.stores) == {128}
        assert each.local == 0
        assert each.shared <= (4096 if (dtype, layout) == (torch.float32, "interleaved") else 0)


def test_one_layout_to_the_other_stays_in_registers_and_shared_memory(code):
    launch_tables(128, Options("interleaved", "half"))
    for each in code:
        assert set(each.stores) == {128}
        assert each.local == 0
        assert each.registers <= 128


def test_what_limits_the_width_of_an_access(code):
    launch_tables(72, Options("half"))  # half a head is 72 bytes: a multiple of 8
    assert set(code[0].stores) == {64}
    code.clear()
    x = torch.empty(2, 512, 32, 132, dtype=torch.bfloat16)[..., :128]  # 264 bytes from head to head
    geometry = geometry_of(((2, 512, 32, 128),), (512, 64), None, Options(seq_dim=-3))
    compiled.rotate((x,), torch.empty(512, 64), torch.empty(512, 64), None, geometry, (x,))
    assert set(code[0].stores) == {64}
    code.clear()
    x = torch.empty(2, 512, 32, 129, dtype=torch.bfloat16)[..., 1:]
    compiled.rotate((x,), torch.empty(512, 64), torch.empty(512, 64), None, geometry, (x,))
    assert set(code[0].stores) == {16}
    assert all(each.local == 0 for each in code)


def test_no_number_is_compiled_in():
    """A new length, batch or stride must not wait for the compiler."""
    pointers = {"q", "k", "yq", "yk", "cos_or_turns", "sin_table", "rows"}
    free = {
        p.name for p in compiled.kernel.params if not p.is_constexpr and not p.do_not_specialize
    }
    assert free == {*pointers, "factor"}  # of these the alignment, and nothing of a float
    geometry = geometry_of(((2, 512, 8, 64),), (512, 32), None, Options(seq_dim=-3))
    angles = launch.Angles(False, False, (0, 32, 0))
    plans = [
        launch.plan((shape,), (torch.empty(shape, device="meta").stride(),) * 2, angles, geometry,
                    False, 2, 132)
        for shape in ((4, 2048, 8, 64), (5, 3001, 8, 64), (4, 2048, 24, 64))
    ]  # fmt: skip
    assert plans[0].constants == plans[1].constants == plans[2].constants
    assert len({plan.numbers for plan in plans}) == 3


def test_only_exact_angles_may_be_fused(monkeypatch):
    """By tables the result has the bits of the law; polynomials gain from fused steps."""
    options = []
    launcher = {(1,): lambda *_, **given: options.append(given["enable_fp_fusion"])}
    monkeypatch.setattr(compiled, "kernel", launcher)
    x, table = torch.zeros(1, 2), torch.zeros(1, 1)
    geometry = geometry_of(((1, 2),), (1, 1), None, Options())
    compiled.rotate((x,), table, table, None, geometry, None)
    turns = torch.ones(1, dtype=torch.int64)
    compiled.rotate_exact((x,), turns, 1.0, None, geometry, None)
    assert options == [False, True]


# --- on a device ---

gpu = pytest.mark.gpu
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def check_on_device(case, layout, conjugate, dtype):
    """Out of place and in place: the bits of the law, also of bfloat16."""
    xs, cos, sin, rows = operands(case, dtype)
    options = case.options(*layout, conjugate)
    geometry = geometry_of(case.shapes, cos.shape, None if rows is None else rows.shape, options)
    given = [None if array is None else to_torch(array).cuda() for array in (cos, sin, rows)]
    want = reference.rotate(xs, cos, sin, rows, options, None)
    moved = tuple(to_torch(x).cuda() for x in xs)
    got = compiled.rotate(moved, *given, geometry, None)
    compiled.rotate(moved, *given, geometry, moved)
    for tensor, own, array in zip(got, moved, want, strict=True):
        assert steps_apart(to_numpy(tensor.cpu()), array) == 0
        assert steps_apart(to_numpy(own.cpu()), array) == 0


@gpu
@needs_device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", SAME)
@pytest.mark.parametrize("case", CASES)
def test_any_shape_on_the_device_equals_the_law(case, layout, dtype):
    check_on_device(CASES[case], layout, False, dtype)


@gpu
@needs_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_and_type_on_the_device_equals_the_law(layout, conjugate, dtype):
    check_on_device(CASES["GQA 4:2, odd seq"], layout, conjugate, dtype)
    check_on_device(CASES["partial from a start"], layout, conjugate, dtype)
