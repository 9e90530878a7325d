"""The code that the compiler makes of the GPU kernel, without a GPU: widths, registers, waits."""

import re

import pytest
import torch
from gpu_code import GPUTarget, code_of, compile_for
from grids import pairwise

from rotary.kernels.geometry import Options, geometry_of
from rotary.kernels.triton import kernel as compiled


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def arch():
    return 90


@pytest.fixture
def code(monkeypatch, arch):
    """Codes of the launches of a call of `compiled`, for an architecture."""
    found = []

    def compile_only(plan, operands, numbers, factor):
        found.append(code_of(plan, operands, arch))

    monkeypatch.setattr(compiled, "_run", compile_only)
    monkeypatch.setattr(compiled, "processors_of", lambda device: 132)
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


LAYOUTS = "half", "interleaved"
DIMS = 64, 80, 128, 256
NEW_AND_OLD = 90, 80  # of the architectures


@pytest.mark.parametrize(
    ("dim", "layout", "order", "arch"),
    list(pairwise(DIMS, LAYOUTS, ("bshd", "bhsd"), NEW_AND_OLD)),
)
def test_tables_and_heads_move_in_vectors_of_16_bytes(dim, layout, order, code):
    launch_tables(dim, Options(layout), order)
    for each in code:
        assert set(each.loads) == set(each.stores) == {128}
        assert each.stores[128] == 2  # a vector of first channels, and one of second
        assert (each.shared, each.barriers, each.local) == (0, 0, 0)
        assert each.registers <= 40  # threads that a multiprocessor holds: 1536 of 2048
        assert each.fused == 0  # else the last bit would not be that of the law
    assert len(code) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inductor_which_fuses_products_gets_a_kernel_that_rounds_them(layout, monkeypatch):
    found = []

    def compile_only(plan, operands, numbers, factor):
        for rounded in (True, False):
            constants = {**plan.constants, "ROUNDED": rounded}
            launch = plan._replace(constants=constants)
            found.append(code_of(launch, operands, 90, is_fused=True))

    monkeypatch.setattr(compiled, "_run", compile_only)
    monkeypatch.setattr(compiled, "processors_of", lambda device: 132)
    launch_tables(128, Options(layout))
    rounded, fused = found
    assert rounded.fused == 0 < fused.fused
    assert set(rounded.loads) == set(rounded.stores) == {128}
    assert (rounded.shared, rounded.local) == (0, 0)
    assert rounded.registers <= 88


@pytest.mark.parametrize(
    ("dim", "layout", "lead", "arch"),
    list(pairwise(DIMS, LAYOUTS, (None, (512,), (2, 512)), NEW_AND_OLD)),
)
def test_exact_angles_need_no_local_memory(dim, layout, lead, code):
    launch_exact(dim, Options(layout), lead=lead)
    for each in code:
        assert set(each.stores) == {128}
        assert each.stores[128] == 2
        assert each.loads[128] >= 2
        assert set(each.loads) <= {64, 128}  # positions and turns are 64 bits wide
        assert each.local == 0
        assert each.registers <= 85
        assert each.shared <= 1024  # turns change hands once
        assert each.barriers <= 1


@pytest.mark.parametrize("arch", NEW_AND_OLD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_axes_need_no_local_memory(layout, code):
    launch_exact(128, Options(layout), axes=3)
    for each in code:
        assert set(each.stores) == {128}
        assert each.local == 0
        assert each.shared <= 8192  # tables change hands once, before the walk over the heads
        assert each.registers <= 85


def test_the_copy_of_a_slice_is_part_of_the_launch_unless_in_place(code):
    launch_tables(128, Options("half", rotary_dim=32, start=64))
    copied = code[0]
    code.clear()
    launch_tables(128, Options("half", rotary_dim=32, start=64), in_place=True)
    kept = code[0]
    for each in (copied, kept):
        assert set(each.loads) == set(each.stores) == {128}
        assert (each.shared, each.local) == (0, 0)
    assert copied.stores[128] == 4 * kept.stores[128]  # 128 channels against 32


OTHER_TYPES = (torch.float16, 128), (torch.float32, 128), (torch.float32, 80)


@pytest.mark.parametrize(
    ("type_and_dim", "layout", "arch"), list(pairwise(OTHER_TYPES, LAYOUTS, NEW_AND_OLD))
)
def test_other_types_move_in_vectors_as_well(type_and_dim, layout, code):
    dtype, dim = type_and_dim
    launch_tables(dim, Options(layout), dtype=dtype)
    for each in code:
        assert set(each.loads) == set(each.stores) == {128}
        assert each.local == 0
        assert each.shared <= (4096 if (dtype, layout) == (torch.float32, "interleaved") else 0)


@pytest.mark.parametrize("arch", NEW_AND_OLD)
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


# --- waits for memory ---

ARCHITECTURES = (80, 90, 100)


def launches_of(seq=8192, batch=2, layout="half", is_exact=False, **change):
    """The launch of q and k of 32 and 8 heads, new outputs: no memory is needed for its code."""
    shapes = tuple((batch, seq, count, 128) for count in (32, 8))
    xs = tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    has_rows = is_exact or seq == 1
    rows = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    options = Options(layout, seq_dim=-3, **change)
    pairs = (options.rotary_dim or 128) // 2
    table = torch.empty(4096 if has_rows else seq, pairs, device="meta")
    picked = tuple(rows.shape) if has_rows else None
    geometry = geometry_of(shapes, tuple(table.shape), picked, options)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_run", lambda plan, operands, *_: found.append((plan, operands)))
        patch.setattr(compiled, "processors_of", lambda device: 132)
        if is_exact:
            turns = torch.empty(pairs, dtype=torch.int64, device="meta")
            compiled.rotate_exact(xs, turns, 1.0, rows, geometry, None)
        else:
            picked = rows if has_rows else None
            compiled.rotate(xs, table, table, picked, geometry, None)
    return found


@pytest.mark.parametrize(
    ("size", "arch", "is_exact"),
    list(pairwise([(1, 4, 64), (256, 2, 128)], ARCHITECTURES, (False, True))),
)
def test_one_token_is_loaded_while_its_angles_are_found(size, arch, is_exact):
    """Positions, then what they point at; q and k beside these, and not after them."""
    batch, warps, width = size
    ((plan, operands),) = launches_of(1, batch, is_exact=is_exact)
    code = code_of(plan, operands, arch)
    assert (plan.warps, code.local, set(code.stores)) == (warps, 0, {width})
    # of a kernel that loads q and k after all else, one more; with 2 warps a thread takes the
    # second half of its table row later, by then from the first cache
    assert code.waits == (1 if is_exact else 2 if warps == 4 else 3)


def test_of_a_part_everything_is_loaded_before_it_is_stored():
    """A load behind a store that may overlap it cannot be moved before it."""
    for start, stores in ((0, 2), (96, 2), (32, 3)):
        ((plan, operands),) = launches_of(rotary_dim=32, start=start)
        code = compile_for(plan, operands, GPUTarget("cuda", 90, 32)).asm["ptx"]
        order = "".join("LS"["st.global" in line] for line in code.splitlines()
                        if "ld.global" in line or "st.global" in line)  # fmt: skip
        assert len([part for part in order.split("L") if part]) < stores


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_exact", [False, True])
def test_it_compiles_for_gfx942(is_exact, layout, monkeypatch):
    """Where a warp has 64 threads: one warp moves the tile in vectors, and nothing is spilled."""
    monkeypatch.setattr(compiled, "lanes_of", lambda device: 64)
    ((plan, operands),) = launches_of(layout=layout, is_exact=is_exact)
    code = compile_for(plan, operands, GPUTarget("hip", "gfx942", 64)).asm["amdgcn"]
    spilled = re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s+(\d+)", code)
    assert set(spilled) == {"0"}
    assert plan.warps == 1
    assert set(re.findall(r"\b(?:global|buffer)_store_(\w+)", code)) == {"dwordx4"}
