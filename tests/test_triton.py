"""The GPU kernel without a GPU: its launches, exact angles, and the code from the compiler.

Its rotation by tables is compared with all other kernels in `test_kernels.py`.
"""

import mmap
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

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
from kernel_cases import CASES, LAYOUTS, MORE_CASES, Case, numbers, operands, tables, to_torch
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


def test_the_work_may_be_cut_in_any_way(monkeypatch):
    """Few programs that walk over all heads, or many small ones: the numbers are the same."""
    case = Case((2, 40, 12, 16), (2, 40, 8, 16), (40,), seq_dim=-3)
    launches = count_launches(monkeypatch)
    xs, cos, sin = operands(case, np.float32)
    options = case.options("half", None)
    want = reference.rotate(xs, cos, sin, None, options, None)
    for processors in (1, 10_000):
        monkeypatch.setattr(kernel, "_processors", lambda device, count=processors: count)
        for got, array in zip(
            rotate(tuple(map(to_torch, xs)), cos, sin, options), want, strict=True
        ):
            assert torch.equal(got, to_torch(array))
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
