"""The GPU kernel without a GPU: its launches and its exact angles.

Its rotation by tables is compared with all other kernels in `test_kernels.py`, and the code that
the compiler makes of it is read in `test_gpu_code.py`.
"""

import mmap
import sys

import numpy as np
import pytest
import torch
from published import scaled

import rotary
from rotary.kernels import numpy as reference
from rotary.kernels.geometry import Options, geometry_of

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)

import triton
import triton.language as tl
from benchmarks.gpu_plan import replanned
from grids import pairwise
from interpreter import kernel, mended
from kernel_cases import (
    CASES,
    LAYOUTS,
    MORE_CASES,
    Case,
    exact_of,
    numbers,
    operands,
    tables,
    to_torch,
)
from torch.utils._python_dispatch import TorchDispatchMode

from rotary.kernels.torch import angles as torch_tables
from rotary.kernels.torch import checks as torch_checks
from rotary.kernels.triton import kernel as compiled
from rotary.kernels.triton import plan as launch
from rotary.kernels.triton import sources


@pytest.fixture(autouse=True)
def _mend(monkeypatch):
    mended(monkeypatch)


pytestmark = pytest.mark.usefixtures("poisoned")


# --- launches ---


def rotate(xs, cos, sin, options, out=None):
    """The kernel on torch tensors, by tables of NumPy."""
    geometry = geometry_of(tuple(tuple(x.shape) for x in xs), cos.shape, None, options)
    return kernel.rotate(xs, to_torch(cos), to_torch(sin), None, geometry, out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_a_changed_layout_in_place_goes_through_other_memory(layout, monkeypatch):
    """There, a thread writes where another one may still have to read; the interpreter has one."""
    operands = []
    monkeypatch.setattr(kernel, "_run", lambda plan, tensors, *_: operands.extend(tensors))
    x = torch.zeros(1, 2, 3, 16)
    rotate((x,), *tables((3,), 8), Options(*layout), out=(x,))
    assert (operands[0].data_ptr() == operands[2].data_ptr()) == (layout[0] == layout[1])


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
    (got,) = rotate((x,), cos, sin, options)
    (want,) = reference.rotate((values,), cos, sin, None, options, None)
    assert torch.equal(got, torch.from_numpy(want))
    rotate((x,), cos, sin, options, out=(x,))
    assert torch.equal(x, torch.from_numpy(want))


def test_no_heads_where_the_batch_takes_several_launches():
    q, k = torch.zeros(3, 2, 12, 3, 6), torch.zeros(3, 2, 0, 3, 6)
    cos, sin = (torch.randn(3, 2, 1, 3, 3) for _ in range(2))
    for xs in ((q, k), (k, q)):
        shapes = tuple(tuple(x.shape) for x in xs)
        geometry = geometry_of(shapes, tuple(cos.shape), None, Options())
        results = kernel.rotate(xs, cos, sin, None, geometry, None)
        assert [tuple(y.shape) for y in results] == list(shapes)


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
    case = (CASES | MORE_CASES)[case]
    launches = count_launches(monkeypatch)
    xs, cos, sin = operands(case, np.float32)
    rotate(tuple(map(to_torch, xs)), cos, sin, case.options("half", None))
    assert len(launches) == expected


@pytest.mark.parametrize("seq_dim", [-3, -2])
def test_the_work_may_be_cut_in_any_way(seq_dim, monkeypatch):
    """Few programs of many rows, or many of few, in either order: the numbers are the same."""
    launches, plan = count_launches(monkeypatch), kernel.plan
    planned = {-3: 2 * 2 * 5, -2: 2 * 1 * 10}[seq_dim]
    for seq, change, programs in (
        (18, {}, planned),
        (5, {"tokens": 1, "heads": 1}, 2 * 5 * 10),
        (5, {"tokens": 2, "heads": 4}, 2 * 3 * 3),
        (5, {"tokens": 4, "heads": 16}, 2 * 2 * 2),
    ):
        shapes = [(2, seq, h, 16) if seq_dim == -3 else (2, h, seq, 16) for h in (6, 4)]
        case = Case(*shapes, (seq,), seq_dim=seq_dim)
        xs, cos, sin = operands(case, np.float32)
        options = case.options("half", None)
        want = reference.rotate(xs, cos, sin, None, options, None)
        monkeypatch.setattr(kernel, "plan", lambda *a, c=change: replanned(plan(*a), **c))
        got = rotate(tuple(map(to_torch, xs)), cos, sin, options)
        assert all(map(torch.equal, got, map(to_torch, want)))
        assert launches.pop() == programs


@pytest.mark.parametrize("seq_dim", [-3, -2])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("has_one_axis", [False, True])
def test_every_grid_and_width_of_offsets_gives_the_same(
    has_one_axis, is_wide, seq_dim, monkeypatch
):
    """A grid too long for three axes has one; offsets of large tensors have 64 bits."""
    plan, taken = kernel.plan, []

    def changed(*arguments):
        planned = plan(*arguments)
        grid = (planned.programs, 1, 1) if has_one_axis else planned.grid
        taken.append(grid)
        constants = {**planned.constants, "GRID_3D": not has_one_axis, "WIDE": is_wide}
        return planned._replace(grid=grid, constants=constants)

    monkeypatch.setattr(kernel, "plan", changed)
    shapes = [(2, 5, h, 16) if seq_dim == -3 else (2, h, 5, 16) for h in (6, 4)]
    rows = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(0))
    case = Case(*shapes, (7,), seq_dim=seq_dim)
    xs, cos, sin = operands(case, np.float32)
    options = case.options("half", None)
    want = reference.rotate(xs, cos, sin, rows.numpy(), options, None)
    shape = tuple(x.shape for x in xs)
    geometry = geometry_of(shape, cos.shape, tuple(rows.shape), options)
    got = kernel.rotate(tuple(map(to_torch, xs)), *map(to_torch, (cos, sin)), rows, geometry, None)
    assert all(map(torch.equal, got, map(to_torch, want)))
    spec = rotary.Rotary(head_dim=16)
    exact = rotary.apply(spec, *map(to_torch, xs), positions=rows, seq_dim=seq_dim)
    turns = torch.from_numpy(rotary.turns(spec).view(np.int64).copy())
    results = kernel.rotate_exact(tuple(map(to_torch, xs)), turns, 1.0, rows, geometry, None)
    for one, other in zip(results, exact, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=2e-6)
    assert len({len(set(grid)) > 1 for grid in taken}) == 1


@pytest.mark.parametrize(
    ("dtype", "column", "layout", "has_rows"),
    list(pairwise((torch.float32, torch.bfloat16, torch.float16), (1, 2), LAYOUTS, (False, True))),
)
def test_tables_of_a_model_are_read_where_they_are(dtype, column, layout, has_rows):
    """In 16 bits, and every second column: the bits of float32 tables without gaps."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 5, 16, generator=generator).to(dtype)
    tables = [table[:, :8] if column == 1 else table[:, ::2] for table in wide]
    assert sources.are_walked_alike(*tables)
    q, k = (torch.randn(2, 5, heads, 16, generator=generator) for heads in (4, 2))
    rows = torch.randint(5, (2, 5), generator=generator) if has_rows else None
    options = Options(*layout, seq_dim=-3)
    shapes, tokens = (tuple(q.shape), tuple(k.shape)), (2, 5) if has_rows else None
    geometry = geometry_of(shapes, (5, 8), tokens, options)
    got = kernel.rotate((q, k), *tables, rows, geometry, None)
    plain = [table.float().contiguous() for table in tables]
    layouts = {"layout": layout[0], "out_layout": layout[1]}
    want = rotary.rotate((q, k), *plain, **layouts, seq_dim=-3, positions=rows)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("case", range(40))
def test_offsets_have_64_bits_where_one_needs_them(case):
    """The largest offset of each tensor and table, in elements, worked out by itself."""
    random = np.random.default_rng(case)
    batch, heads, width = 3, 8, 128
    limit = 2**31 // (batch * heads * width)
    seq = int(limit * random.choice([0.5, 0.97, 1.03, 2]))
    by_token = bool(random.integers(2))
    shape = (batch, seq, heads, width) if by_token else (batch, heads, seq, width)
    x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    table_step = int(random.choice([64, 2**31 // seq + 64]))
    table = torch.empty(1, device="meta").as_strided((seq, 64), (table_step, 1))
    options = Options(seq_dim=-3 if by_token else -2)
    geometry = geometry_of((shape,), tuple(table.shape), None, options)
    source = kernel.from_tables(table, table, None, geometry)
    planned = launch.plan((shape,), (x.stride(),) * 2, source.angles, geometry, False, 2, 132)
    last = max(
        sum((n - 1) * step for n, step in zip(y.shape, y.stride(), strict=True)) for y in (x, table)
    )
    if last >= 2**31 or last < 2**31 - 2**12:  # a tensor that just fits may count as too large
        assert planned.constants["WIDE"] == (last >= 2**31)
    inner, outer = planned.numbers[-6], planned.numbers[-3]
    assert planned.programs % (inner * outer) == 0
    grid = inner, outer, planned.programs // (inner * outer)
    assert planned.constants["GRID_3D"] == (max(grid[1:]) < 2**16)
    assert planned.grid == (grid if max(grid[1:]) < 2**16 else (planned.programs, 1, 1))


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 10, 641, 65_535, 65_537, 2**30 + 1, 2**31 - 1])
def test_a_quotient_is_exact_below_31_bits(divisor):
    inverse, shift = launch.inverse_of(divisor)
    assert -(2**31) <= inverse < 0  # so it is an int32 for every divisor
    ends = {0, 1, divisor - 1, divisor, 2**31 - 1, 2**31 - 2, 2**31 // divisor * divisor - 1}
    values = torch.randint(2**31, (1024,), generator=torch.Generator().manual_seed(0))
    values[: len(ends)] = torch.tensor([min(end, 2**31 - 1) for end in ends])
    values, got = values.int(), torch.empty(1024, dtype=torch.int32)
    all_quotients[(1,)](values, got, inverse, shift)
    assert torch.equal(got, values // divisor)


def _all_quotients(values, results, inverse, shift):
    index = tl.arange(0, 1024)
    tl.store(results + index, quotient(tl.load(values + index), inverse, shift))


quotient = kernel.quotient
with triton.knobs.runtime.scope():
    triton.knobs.runtime.interpret = True
    all_quotients = triton.jit(_all_quotients)


def test_row_numbers_of_32_bits_take_no_kernel_of_their_own(monkeypatch):
    """On a GPU a cast would be a launch: the kernel reads them as they are."""
    rows = torch.tensor([[5, 0, 7], [1, 1, 6]], dtype=torch.int32)
    assert torch_checks.check_rows(rows, rows).dtype == torch.int64
    monkeypatch.setattr(torch_checks, "is_on_gpu", lambda x: True)
    assert torch_checks.check_rows(rows, rows) is rows
    for other in (torch.int64, torch.int16, torch.uint8):
        assert torch_checks.check_rows(rows.to(other), rows).dtype == torch.int64
    x, table = to_torch(numbers(0, (2, 4, 3, 16))), to_torch(numbers(1, (8, 8)))
    geometry = geometry_of(((2, 4, 3, 16),), (8, 8), (2, 3), Options())
    (got,), (want,) = (
        kernel.rotate((x,), table, table, each, geometry, None) for each in (rows, rows.long())
    )
    assert torch.equal(got, want)


class Called(TorchDispatchMode):
    """The operators of torch that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_several_axes_are_picked_without_a_list(monkeypatch):
    """An index that is a list goes to the device with every call, which waits."""
    monkeypatch.setattr(torch_tables, "is_on_gpu", lambda x: True)
    positions = torch.arange(12).reshape(4, 3)
    wanted = positions[..., [0, 2, 1, 1]]
    torch_tables._per_pair(positions, (0, 2, 1, 1))  # the index is kept on the device
    with Called() as called:
        assert torch.equal(torch_tables._per_pair(positions, (0, 2, 1, 1)), wanted)
    assert "aten::index_select" in called.names
    assert not {"aten::index.Tensor", "aten::_to_copy", "aten::copy_"} & {*called.names}


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_the_next_program_takes_what_follows_in_memory(order):
    """Tokens where a head's tokens lie side by side, else the heads of the same tokens."""
    shape, axes = ((1, 4096, 32, 128), -3) if order == "bshd" else ((1, 32, 4096, 128), -2)
    strides = (shape[1] * shape[2] * 128, shape[2] * 128, 128, 1)
    geometry = geometry_of((shape,), (4096, 64), None, Options(seq_dim=axes))
    angles = launch.Angles(False, False, (0, 64, 0) if order == "bshd" else (0, 0, 64))
    planned = launch.plan((shape,), (strides,) * 2, angles, geometry, True, 2, 132)
    assert planned.constants["TOKENS_FIRST"] == (order == "bhsd")


# --- exact angles, without tables ---

SPECS = {
    "half": rotary.Rotary(head_dim=16, base=5e5),
    "a slice": rotary.Rotary(head_dim=20, rotary_dim=12, start=4, layout="interleaved"),
    "mixed": rotary.Rotary(head_dim=16, layout="interleaved", out_layout="half"),
    "backwards": rotary.Rotary(head_dim=16, sign=-1),
    "amplitude": scaled("yarn", 16, 8.0, 4096),
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
    assert (
        abs(turned_units(spec, POSITIONS) - exact_of(rotary.inv_freq(spec)[0], POSITIONS)).max()
        <= 2e-7
    )


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


@pytest.mark.parametrize(
    ("name", "lead", "conjugate"), list(pairwise(SPECS, ((), (2,)), (False, True)))
)
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


# --- what is compiled in ---


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
    """By tables the result has the bits of the reference; polynomials gain from fused steps."""
    options = []
    launcher = {(1, 1, 1): lambda *_, **given: options.append(given["enable_fp_fusion"])}
    monkeypatch.setattr(compiled, "kernel", launcher)
    x, table = torch.zeros(1, 2), torch.zeros(1, 1)
    geometry = geometry_of(((1, 2),), (1, 1), None, Options())
    compiled.rotate((x,), table, table, None, geometry, None)
    turns = torch.ones(1, dtype=torch.int64)
    compiled.rotate_exact((x,), turns, 1.0, None, geometry, None)
    assert options == [False, True]
