"""The GPU benchmark without a GPU: its plan, its gate, its arithmetic, its page."""

import math
from pathlib import Path

import pytest
import torch
from benchmarks import gpu, gpu_cases, gpu_fused, gpu_plan
from benchmarks.gpu_cases import buffers_of, ours, tables_of
from benchmarks.gpu_gate import LIMITS, error_of, poisoned
from benchmarks.gpu_plan import KINDS, ONE_TOKEN, PARTS, SECONDS, Work

from rotary.kernels.geometry import Geometry
from rotary.kernels.triton import plan as launch

ROOT = Path(__file__).parents[1]
LINES = [line for part in KINDS for line in gpu_plan.lines(part)]
WAYS = ("out=", "in place", "rows", "new", "apply", "backward")
SMALL = Work(6, 2, 4, 2, 16, 16)
FORMS = {
    "bshd": SMALL,
    "hf view": SMALL._replace(memory="hf view"),
    "bhsd": SMALL._replace(memory="bhsd"),
    "packed qkv": SMALL._replace(memory="packed qkv"),
    "thd": Work(128, 1, 2, 1, 16, 16, memory="thd", positions="ragged"),
    "own rows": SMALL._replace(positions="own rows"),
    "three axes": Work(32, 1, 2, 1, positions="three axes"),
    "a part": SMALL._replace(rotary_dim=8),
    "interleaved": SMALL._replace(layout="interleaved"),
    "interleaved part": SMALL._replace(layout="interleaved", rotary_dim=12),
}


# --- the plan ---


def test_bytes_are_those_counted_by_hand():
    assert Work().bytes == 8192 * (32 + 8) * 128 * 2 == 83_886_080
    assert Work(batch=2).moved("out=") == 335_544_320
    assert Work(batch=4).moved("new") == 671_088_640
    assert Work(1, 256).moved("out=") == 5_242_880
    assert Work(1).moved("out=") == 20_480
    assert Work(batch=2).moved("backward") == 2 * 335_544_320
    assert Work(dtype="float32").bytes == 2 * Work().bytes
    quarter = Work(batch=2, rotary_dim=32)
    assert quarter.moved("in place") * 4 == quarter.moved("out=")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_bytes_are_those_of_the_tensors(form, dtype):
    work = FORMS[form]._replace(dtype=dtype)
    buffers = buffers_of(work, "cpu")
    assert work.bytes == buffers.q.nbytes + buffers.k.nbytes


def test_every_line_has_a_name_of_its_own():
    names = [line.name for line in LINES]
    assert len(set(names)) == len(names) > 40
    assert {line.kind for line in LINES} == set(KINDS)


def test_ours_and_the_peers_each_end_before_a_command_may_take_ten_minutes():
    assert sum(SECONDS[part] for part in KINDS) <= 540
    assert sum(SECONDS[part] for part in ("peers", "tuned")) <= 540
    assert set(PARTS) == {*KINDS, "peers", "tuned"}
    for part in ("peers", "tuned"):
        theirs = list(gpu_plan.lines(part))
        assert [line.name for line in theirs] == [line.name for line in LINES if line.peers]
        for line, own in zip(theirs, (line for line in LINES if line.peers), strict=True):
            assert line.ways == (("backward",) if "backward" in own.ways else ())


def test_every_shape_of_the_protocol_is_there():
    works = [line.work for line in LINES]
    assert {(w.seq, w.batch) for w in works} >= {
        (seq, batch) for seq in (1, 16, 128, 1024) for batch in (1, 8, 64, 256)
    } | {(8192, 1), (8192, 2), (8192, 4), (131_072, 1), (2**20, 1)}
    assert {(w.q_heads, w.k_heads) for w in works} == {(32, 8), (28, 4), (64, 8), (16, 2)}
    assert {w.head_dim for w in works} == {64, 80, 96, 128, 256}
    assert {w.rotary_dim / w.head_dim for w in works} == {0.25, 0.5, 1}
    assert {w.memory for w in works} == {"bshd", "hf view", "bhsd", "packed qkv", "thd"}
    assert {w.dtype for w in works} == {"bfloat16", "float16", "float32"}
    assert {w.positions for w in works} == {"from 0", "own rows", "ragged", "three axes"}
    assert {way for line in LINES for way in line.ways} == set(WAYS)
    for line in LINES:
        if line.work.seq == 1:  # as servers call it
            assert {"rows", "apply"} <= set(line.ways) or line.kind in ("ablation", "fused")


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_buffers_are_more_than_the_cache_holds(line):
    sets, footprint = gpu_plan.sets_of(line.work), 2 * line.work.bytes
    assert sets * footprint >= 4 * gpu_plan.L2_BYTES or sets == 64
    assert sets >= 4 or footprint >= 16 * gpu_plan.L2_BYTES
    assert sets * footprint <= 40e9
    launches = gpu_plan.launches_of(line.work, sets)
    assert launches >= 20
    assert launches % sets == 0


STEPS = (2 * 64 * 8 * 32, 8 * 32, 32, 1)
HEADS = (2, 64, 8, 32), (2, 64, 4, 32)
ARGUMENTS = (
    HEADS,
    (STEPS,) * 4,
    launch.Angles(False, False, (0, 16, 0)),
    Geometry(0, 16, "half", "half", (None, 0, None)),
    False,
    2,
    132,
)


def test_a_launch_cut_otherwise_is_the_one_planned_for_that_tile(monkeypatch):
    planned = launch.plan.__wrapped__(*ARGUMENTS)
    assert gpu_plan.replanned(planned) == planned
    for change in gpu_plan.variants().values():
        tile = change["tokens"], change["heads"]
        monkeypatch.setattr(launch, "_tile", lambda *_, tile=tile: tile)
        wanted = launch.plan.__wrapped__(*ARGUMENTS)
        assert gpu_plan.replanned(planned, **change) == wanted._replace(warps=change["warps"])


# --- the tensors ---


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_memory_hold_the_same_tokens(form):
    work = FORMS[form]
    buffers = buffers_of(work, "cpu")
    for x, heads in ((buffers.q, work.q_heads), (buffers.k, work.k_heads)):
        shape = (work.batch, work.seq, heads, work.head_dim)
        assert gpu_cases.tokens_first(x, work).shape == shape
    assert buffers.q_out.isnan().all()
    assert buffers.k_out.isnan().all()
    assert buffers.q_out.shape == buffers.q.shape


def test_views_are_views_and_slices_are_slices():
    made = {form: buffers_of(FORMS[form], "cpu") for form in ("hf view", "bhsd", "packed qkv")}
    assert made["hf view"].q.transpose(1, 2).is_contiguous()
    assert made["bhsd"].q.is_contiguous()
    packed = made["packed qkv"]
    assert packed.q.untyped_storage().data_ptr() == packed.k.untyped_storage().data_ptr()
    assert packed.q.stride(1) == (4 + 2 * 2) * 16


def test_positions_turn_something_in_every_line():
    for line in LINES:
        if line.work.seq <= 16_384:
            assert int(gpu_cases.positions_of(line.work).max()) > 0
    ragged = gpu_cases.positions_of(Work(16_384, memory="thd", positions="ragged"))
    assert len(ragged) == 16_384
    assert int((ragged == 0).sum()) == 64
    assert gpu_cases.positions_of(Work(positions="three axes")).shape == (8192, 3)
    assert gpu_cases.positions_of(ONE_TOKEN._replace(batch=3)).tolist() == [[1000], [1017], [1034]]


# --- the gate ---


@pytest.mark.parametrize(("form", "way"), [(form, way) for form in FORMS for way in WAYS])
def test_our_calls_pass_the_gate(form, way):
    if (form, way) == ("three axes", "rows"):
        return  # a row of a table is picked by one number
    for dtype in LIMITS:
        work = FORMS[form]._replace(dtype=dtype)
        entry = gpu.checked(f"rotary {way}", ours(way, work, tables_of(work, "cpu")), work, "cpu")
        assert "failed" not in entry
        assert entry["ulp"] > 0.1  # a rotation is not exact
        assert entry["rounded"] > (0.5 if dtype == "float32" else 0.99)


FUSED = Work(6, 2, 4, 2)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_fused_calls_pass_their_gate_and_a_wrong_one_does_not(layout, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    work = FUSED._replace(layout=layout)
    cases = gpu_fused.cases_of(work, tables_of(work, "cpu"), "cpu")
    for name, case in cases.items():
        limit = gpu_fused.LIMITS[case.limit]
        assert gpu_fused.error_of(case, work, "cpu") <= limit, name
        other = gpu_fused.slots_of(work, "cpu").flip(0)
        with monkeypatch.context() as patch:  # the gate then looks at other rows and weights
            patch.setattr(gpu_fused, "slots_of", lambda *_, o=other: o)
            patch.setattr(gpu_fused, "weights_of", lambda *_: torch.ones(2, 128).bfloat16())
            if case.stores or case.has_norm:
                assert not gpu_fused.error_of(case, work, "cpu") <= limit, name


@pytest.mark.parametrize("part", KINDS)
def test_every_case_of_a_part_is_called_to_compile_it(part, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    first = gpu_plan.small(next(gpu_plan.lines(part)))
    first = first._replace(work=first.work._replace(seq=4, q_heads=2, k_heads=1))
    monkeypatch.setattr(gpu_plan, "lines", lambda part: iter([first]))
    if part == "ablation":  # its kernel runs on a device only, which is told, not raised
        assert all("ablation" in told for told in gpu.compiled(part, 0, "cpu"))
    else:
        assert gpu.compiled(part, 0, "cpu") == []


def turned_by_complex_numbers(work, shift=0, sign=1):
    """q and k of (batch, seq, heads, dim) in complex128, rounded once at the end."""
    pairs = work.rotary_dim // 2
    inv_freq = torch.tensor([500_000.0 ** (-i / pairs) for i in range(pairs)], dtype=torch.float64)
    angles = (torch.arange(work.seq).double() + shift)[:, None] * inv_freq
    turn = torch.polar(torch.ones_like(angles), sign * angles)[:, None]

    def rotated(x):
        if work.layout == "half":
            z = torch.complex(*x.double().chunk(2, -1)) * turn
            return torch.cat((z.real, z.imag), -1).to(x.dtype)
        z = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * turn
        return torch.view_as_real(z).flatten(-2).to(x.dtype)

    return rotated


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", LIMITS)
def test_the_reference_is_complex_multiplication(layout, dtype):
    work = SMALL._replace(layout=layout, dtype=dtype)
    there, back = (turned_by_complex_numbers(work, sign=sign) for sign in (1, -1))
    for is_back, rotated in ((False, there), (True, back)):
        error, rounded = error_of(
            lambda b, r=rotated, i=is_back: [r(x) for x in (b[4:] if i else b[:2])],
            *(is_back, work, "cpu"),
        )
        assert error <= 0.5001
        assert rounded > 0.9999


def wrong_calls():
    right = turned_by_complex_numbers(SMALL)

    def unwritten(b):
        b.q_out[:, :, :, 1:] = right(b.q)[..., 1:]
        b.k_out.copy_(right(b.k))
        return b.q_out, b.k_out

    shifted, backwards = (
        turned_by_complex_numbers(SMALL, 1),
        turned_by_complex_numbers(SMALL, 0, -1),
    )
    other = turned_by_complex_numbers(SMALL._replace(layout="interleaved"))
    return {
        "nothing is done": lambda b: b[:2],
        "one channel is never written": unwritten,
        "positions are one off": lambda b: [shifted(x) for x in b[:2]],
        "the angle has the wrong sign": lambda b: [backwards(x) for x in b[:2]],
        "the layout is the other one": lambda b: [other(x) for x in b[:2]],
        "k is not turned": lambda b: (right(b.q), b.k),
        "the last token is left out": lambda b: [
            torch.cat((right(x)[:, :-1], x[:, -1:]), 1) for x in b[:2]
        ],
    }


@pytest.mark.parametrize("fault", wrong_calls())
def test_a_wrong_call_is_never_timed(fault):
    entry = gpu.checked("rotary out=", wrong_calls()[fault], SMALL, "cpu")
    assert entry["failed"].startswith("wrong by ")
    assert not entry["ulp"] <= 4


def test_a_tail_that_is_not_copied_is_wrong():
    work = FORMS["a part"]

    def call(b):
        q, k = ours("new", work, tables_of(work, "cpu"))(b)
        return q, torch.cat((k[..., :8], k[..., 8:] * 1.01), -1)

    assert error_of(call, False, work, "cpu")[0] == math.inf


def test_new_memory_is_poisoned_for_our_calls():
    def call(b):
        q, k = torch.empty_like(b.q), turned_by_complex_numbers(SMALL)(b.k)
        q[:, 1:] = turned_by_complex_numbers(SMALL)(b.q)[:, 1:]
        return q, k

    assert math.isnan(gpu.checked("rotary new", call, SMALL, "cpu")["ulp"])
    torch.ones(54_321)  # what the next tensor of this size would hold
    with poisoned():
        assert torch.empty(54_321).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_angles_of_the_gate_are_right_far_out():
    """float32 angles, as peers compute them, would not pass at position 2^20."""
    work = Work(1, 60_000, 1, 1, positions="own rows", dtype="float32")
    assert error_of(ours("new", work, tables_of(work, "cpu")), False, work, "cpu")[0] < 4
    tables = tables_of(work, "cpu")
    inv_freq = 500_000.0 ** -(torch.arange(64) / 64)
    angles = tables.positions[..., None].float() * inv_freq
    rounded = tables._replace(cos=angles.cos(), sin=angles.sin())
    assert error_of(ours("new", work, rounded), False, work, "cpu")[0] > 4
