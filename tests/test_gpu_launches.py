"""Launches on a GPU that is not here: what reaches the driver, on which device and stream."""

import gc
import shutil
import sys
import weakref
from functools import partial

import pytest
import torch
from model_rotations import turned, turned_complex, turned_pairs
from published import scaled
from torch._subclasses.fake_tensor import FakeTensorMode

import rotary
from rotary import Rotary

if sys.platform != "linux" or shutil.which("gcc") is None:
    pytest.skip("the stub of libcuda is made by gcc on Linux", allow_module_level=True)
pytest.importorskip("triton")

import triton
from benchmarks.stub_cuda import stub_of_cuda

from rotary.integrations import hub_layers, norms
from rotary.integrations.rotations import conventions_of, replacement_of
from rotary.kernels.torch import angles as torch_tables
from rotary.kernels.torch import gpu as torch_gpu
from rotary.kernels.torch import ready as torch_ready
from rotary.kernels.triton import kernel

SPEC = Rotary(head_dim=16)
AXES = Rotary(head_dim=16, axes=(0, 1, 2, 0, 1, 2, 0, 0), layout="interleaved")


@pytest.fixture
def devices():
    """The device on which each tensor is said to lie, by its shape."""
    return {}


@pytest.fixture
def stub(stub_folder, devices):
    with stub_of_cuda(stub_folder, device_of=lambda x: devices.get(x.shape[0], 0)) as stub:
        yield stub


def randn(*shape, dtype=torch.bfloat16, grad=False):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def q_and_k(batch=3, grad=False):
    return randn(batch, 4, 1, 16, grad=grad), randn(batch, 2, 1, 16, grad=grad)


def ids(batch=3, dtype=torch.int64, axes=()):
    return torch.arange(batch).reshape(batch, 1, *[1 for _ in axes]).expand(
        batch, 1, *axes).to(dtype).contiguous()  # fmt: skip


TABLE, SINES = torch.randn(2, 9, 8)


def new(q, k):
    return rotary.rotate((q, k), TABLE[:1], SINES[:1], SPEC, seq_dim=-2)


def into(q, k, out=None):
    out = (torch.zeros_like(q), torch.zeros_like(k)) if out is None else out
    return rotary.rotate((q, k), TABLE[:1], SINES[:1], SPEC, seq_dim=-2, out=out)


def in_place(q, k):
    return into(q, k, (q, k))


def rows(q, k, dtype=torch.int64, out=None):
    positions = ids(len(q), dtype)
    return rotary.rotate((q, k), TABLE, SINES, SPEC, seq_dim=-2, positions=positions, out=out)


def rows_in_place(q, k):
    return rows(q, k, out=(q, k))


def at(q, k, spec=SPEC, **options):
    positions = ids(len(q), axes=(3,) if spec.num_axes > 1 else ())
    return rotary.apply(spec, q, k, positions=positions, seq_dim=-2, **options)


def at_in_place(q, k):
    return at(q, k, out=(q, k))


def along(q, k):
    return rotary.apply(SPEC, q, k)


def one(q, k):
    return (rotary.apply(SPEC, k, positions=ids(len(k)), seq_dim=-2),)


WAYS = {
    way.__name__: way for way in (new, into, in_place, rows, rows_in_place, at, at_in_place, along,
                                  one)
} | {
    "rows of 32 bits": partial(rows, dtype=torch.int32),
    "rows of 16 bits in place": lambda q, k: rows(q, k, torch.int16, (q, k)),
    "three axes": partial(at, spec=AXES),
    "backwards": partial(at, conjugate=True),
}  # fmt: skip


OURS = {function: replacement_of(function, *conventions_of(function))
        for function in (turned, turned_pairs, turned_complex)}  # fmt: skip
COMPLEX = torch.complex(*torch.randn(2, 3, 1, 8))


HELD = pytest.mark.parametrize(  # a rotation of a model, its tables, and where cos and sin begin
    ("function", "tables", "starts"),
    [
        (turned, [torch.randn(3, 1, 8).repeat(1, 1, 2).bfloat16() for _ in "cs"], (0, 0)),
        (
            turned_pairs,
            [torch.randn(3, 1, 8).repeat_interleave(2, -1).bfloat16() for _ in "cs"],
            (0, 0),
        ),
        (turned_complex, [COMPLEX], (0, 4)),
    ],
    ids=["halves", "pairs", "complex"],
)


@HELD
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_patched_model_is_one_launch_by_its_own_tables(stub, function, tables, starts, mode):
    """No copy of the tables is made, which a graph or a write could leave behind."""
    q, k = q_and_k()
    with mode():
        tables = [table.clone() for table in tables]
        for _ in range(3):
            stub.forget()
            results = OURS[function](q, k, *tables)
            assert [result.shape for result in results] == [q.shape, k.shape]
            (launch,) = stub.launches
            at = [table.data_ptr() for table in (tables[0], tables[-1])]
            assert launch.pointers[4:6] == (at[0] + starts[0], at[1] + starts[1])
            assert launch.pointers[:2] == (q.data_ptr(), k.data_ptr())
            tables = [table.clone() for table in tables]
    assert not any(vars(table) for table in tables)


@HELD
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_shared", [False, True])
def test_norms_of_a_patched_model_are_in_that_launch(
    stub, function, tables, starts, mode, is_shared
):
    """For one token, norms by torch's operators take 14 launches more."""
    both = [torch.nn.RMSNorm(16, eps=1e-6, dtype=torch.bfloat16) for _ in "qk"]
    both = both[:1] * 2 if is_shared else both
    xs = [x.transpose(1, 2) for x in q_and_k()]
    with mode():
        tables = [table.clone() for table in tables]
        for _ in range(3):
            parts = [norms.norm_or_defer(*each) for each in zip(both, xs, strict=True)]
            assert all(x is y for (x, _), y in zip(parts, xs, strict=True))
            stub.counted = 45  # up to the weight of k
            stub.forget()
            heads_first = [x.transpose(1, 2) for x in xs]
            left = [norm for _, norm in parts]
            results = OURS[function](*heads_first, *tables, rotary_norms=left)
            assert [y.shape for y in results] == [x.transpose(1, 2).shape for x in xs]
            (launch,) = stub.launches
            at = [table.data_ptr() for table in (tables[0], tables[-1])]
            assert launch.values[:2] == (at[0] + starts[0], at[1] + starts[1])
            read = {x.data_ptr() for x in (*xs, *[norm.weight for norm in both])}
            assert read <= set(launch.values)
            tables, xs = [table.clone() for table in tables], [x.clone() for x in xs]
    assert not any(vars(table) for table in tables)


def test_norms_that_need_a_gradient_are_left_to_the_model(stub):
    norm = torch.nn.RMSNorm(16, eps=1e-6, dtype=torch.bfloat16)
    x = q_and_k()[0]
    assert norms.norm_or_defer(norm, x)[1] is None
    assert norms.norm_or_defer(norm.requires_grad_(False), x)[1] is None  # one may be wanted
    with torch.no_grad():
        assert norms.norm_or_defer(norm, x) == (x, (norm, norm.weight, 1e-6, False))
    assert stub.launches == []


def test_norms_before_tables_that_the_kernel_cannot_read_are_computed_too(stub):
    """By copies of the tables: their columns are three apart, or they differ in strides."""
    both = [torch.nn.RMSNorm(16, eps=1e-6) for _ in "qk"]
    xs = [x.float().transpose(1, 2) for x in q_and_k()]
    cos, sin, _ = torch.randn(3, 1, 16, 3).unbind(-1)
    with torch.no_grad():
        left = [norms.norm_or_defer(*each)[1] for each in zip(both, xs, strict=True)]
        for tables in ((cos, sin), (cos.contiguous(), torch.randn(3, 2, 16)[:, :1])):
            stub.forget()
            OURS[turned](*[x.transpose(1, 2) for x in xs], *tables, rotary_norms=left)
            assert len(stub.launches) == 1


def test_a_layer_for_kernels_keeps_its_launch(stub, monkeypatch):
    """By Triton, a launch of a layer takes longer than the steps of the model."""
    monkeypatch.setattr(hub_layers, "gpu_kernel", lambda device: kernel)
    layer, (q, k) = hub_layers.apply_rotary_transformers(), q_and_k()
    tables = [torch.randn(3, 1, 8).repeat(1, 1, 2).bfloat16() for _ in "cs"]
    layer(q, k, *tables)
    (first,) = stub.launches
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_run", lambda *_: pytest.fail("launched by Triton"))
        for x in (q, q.clone()):
            stub.forget()
            results = layer(x, k, *tables)
            (launch,) = stub.launches
            assert launch.pointers[0] == x.data_ptr()
            assert launch.pointers[2:6] == tuple(t.data_ptr() for t in (*results, *tables))
            assert launch.numbers == first.numbers
    stub.forget()
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_launches", {})
        patch.setattr(kernel, "prepared", lambda *_: None)
        layer(q, k, *tables)
    (by_triton,) = stub.launches
    assert (by_triton.numbers, by_triton.programs) == (first.numbers, first.programs)
    stub.forget()
    layer(q[:2], k[:2], *[table[:2] for table in tables])
    assert stub.launches[0].numbers != first.numbers


def joined(q, k, emb):
    """Rotates the first channels by sin and then cos along one axis."""
    sin, cos = emb.chunk(2, -1)
    half, end = cos.shape[-1] // 2, cos.shape[-1]

    def one(x):
        u, v, rest = x[..., :half], x[..., half:end], x[..., end:]
        turned = x[..., :end] * cos + torch.cat((-v, u), -1) * sin
        return torch.cat((turned, rest), -1)

    return one(q), one(k)


def alone(x, cos, sin):
    return joined(x, x, torch.cat((sin, cos), -1))[0]


JOINED, ALONE = (replacement_of(f, *conventions_of(f)) for f in (joined, alone))


def test_a_function_of_q_and_k_is_not_one_of_q_and_two_tables(stub):
    """All operands have one form; a launch that is kept for one must not serve the other."""
    q, k, cos, sin, emb = (randn(1, 1, 5, 16, dtype=torch.float32) for _ in range(5))
    with torch.no_grad():
        for _ in range(2):
            stub.forget()
            ALONE(q, cos[..., :8], sin[..., :8])
            JOINED(q, k, emb)
            ALONE(q, cos, sin)
            counts = [launch.programs for launch in stub.launches]
            assert counts[1] == 2 * counts[2]  # q and k, each with a head


@pytest.mark.parametrize("name", [*WAYS, "patched", "layer", "gradient"])
def test_a_kept_launch_keeps_no_tensor(name, stub, monkeypatch):
    """It is kept for 256 forms and more, each of which may be a prompt of another length."""
    monkeypatch.setattr(hub_layers, "gpu_kernel", lambda device: kernel)
    made = torch.randn(2, 3, 1, 8).repeat(1, 1, 1, 2).bfloat16()
    tables = [table.clone() for table in made]
    others = {
        "patched": lambda q, k: OURS[turned](q, k, *tables),
        "layer": lambda q, k: hub_layers.apply_rotary_transformers()(q, k, *tables),
        "gradient": lambda q, k: torch.autograd.grad(new(q.requires_grad_(), k)[0], q, q.detach()),
    }
    q, k = q_and_k()
    for _ in range(2):
        results = (WAYS | others)[name](q, k)
    gone = [weakref.ref(x) for x in (q, k, *results, *tables)]
    del q, k, results
    tables.clear()
    gc.collect()
    assert not any(each() is not None for each in gone)


def test_a_layer_keeps_a_launch_for_each_alignment(stub, monkeypatch):
    monkeypatch.setattr(hub_layers, "gpu_kernel", lambda device: kernel)
    tables = [torch.randn(3, 1, 8).repeat(1, 1, 2).bfloat16() for _ in "cs"]
    q, k = q_and_k()
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    layer = hub_layers.apply_rotary_transformers()
    layer(odd, k, *tables)
    layer(q, k, *tables)
    monkeypatch.setattr(kernel, "_run", lambda *_: pytest.fail("launched by Triton"))
    layer(q, k, *tables)


def test_a_layer_with_gradients_saves_copies_of_short_tables(stub, monkeypatch):
    """A model may make its tables in inference mode, and write to them before the way back."""
    monkeypatch.setattr(hub_layers, "gpu_kernel", lambda device: kernel)
    with torch.inference_mode():
        tables = [torch.randn(3, 1, 8).repeat(1, 1, 2).bfloat16() for _ in "cs"]
    q, k = q_and_k(grad=True)
    rotated, _ = hub_layers.apply_rotary_transformers()(q, k, *tables)
    rotated.float().sum().backward()
    tables = [table.clone() for table in tables]
    rotated, _ = hub_layers.apply_rotary_transformers()(q, k, *tables)
    tables[0].mul_(2)
    rotated.float().sum().backward()
    assert q.grad.shape == q.shape


def test_a_patched_model_with_gradients_rotates_by_copies_of_its_tables(stub):
    tables = [torch.randn(3, 1, 8).repeat(1, 1, 2).bfloat16() for _ in "cs"]
    results = OURS[turned](*q_and_k(grad=True), *tables)
    (launch,) = stub.launches
    assert launch.pointers[4] != tables[0].data_ptr()
    assert all(result.requires_grad for result in results)


@pytest.mark.parametrize("name", WAYS)
def test_a_prepared_launch_is_the_one_that_triton_makes_of_the_call(stub, name, monkeypatch):
    q, k = q_and_k()
    for _ in range(2):
        results = WAYS[name](q, k)
    first, second = stub.launches
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "prepared", lambda *_: None)
        patch.setattr(torch_ready, "recent", {})
        WAYS[name](q, k)
    by_triton = stub.launches[-1]
    assert len(stub.launches) == 3
    for launch in (first, second):
        assert launch.numbers == by_triton.numbers
        assert launch.programs == by_triton.programs
        assert (launch.device, launch.stream) == (0, 0)
    inputs = (k, k) if name == "one" else (q, k)
    assert second.pointers[:2] == by_triton.pointers[:2] == tuple(x.data_ptr() for x in inputs)
    assert second.pointers[2:4] == (results[0].data_ptr(), results[-1].data_ptr())
    if "rows" not in name and name not in ("new", "into", "in_place", "along"):
        assert second.pointers[4:6] == by_triton.pointers[4:6]  # the turns, which stay
    if "in place" not in name:  # that way Triton's binder is given rows of 64 bits
        assert stub.loaded == [0]  # both are the same code


def test_what_the_driver_refuses_is_launched_by_triton(stub):
    """A thread that never used CUDA has no context; Triton's launcher makes it one."""
    q, k = q_and_k()
    into(q, k)
    stub.forget()
    stub.refuse(1)
    results = into(q, k)
    (launch,) = stub.launches
    assert launch.pointers[2:4] == tuple(y.data_ptr() for y in results)


@pytest.mark.parametrize("name", WAYS)
def test_a_call_like_the_one_before_is_not_worked_out_again(stub, name, monkeypatch):
    before = q_and_k()
    WAYS[name](*before)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "prepared", lambda *_: pytest.fail("worked out again"))
        patch.setattr(kernel, "_run", lambda *_: pytest.fail("all arguments looked at"))
        q, k = (x.clone() for x in before)
        results = WAYS[name](q, k)
    (first, second), expected = stub.launches, k if name == "one" else q
    assert second.numbers == first.numbers
    assert second.pointers[0] == expected.data_ptr() != first.pointers[0]
    assert second.pointers[2] == results[0].data_ptr()


def test_sixty_four_shapes_in_turn_are_all_kept(stub, monkeypatch):
    batches = range(1, 65)
    for name in ("new", "in_place", "rows", "at"):
        monkeypatch.setattr(torch_ready, "recent", {})
        for batch in batches:
            WAYS[name](*q_and_k(batch))
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "prepared", lambda *_: pytest.fail("worked out again"))
            stub.forget()
            for batch in batches:
                WAYS[name](*q_and_k(batch))
        assert len(stub.launches) == 64
    assert len(stub.loaded) <= 4 * 6  # codes: no number of tokens is compiled in


def test_memory_that_is_not_aligned_takes_another_code(stub):
    """Triton reads 16 bytes at once where an address allows it."""
    room = torch.zeros(3 * 4 * 16 + 8, dtype=torch.bfloat16)
    _, k = q_and_k()
    counts = []
    for start in (0, 1, 0, 8, 1):
        q = room[start : start + 192].view(3, 4, 1, 16)
        along(q, k)
        assert stub.launches[-1].pointers[0] == q.data_ptr()
        counts.append(len(stub.loaded))
    assert counts == [1, 2, 2, 2, 2]


def test_in_place_after_other_memory_of_the_same_form(stub):
    """With part of the head rotated, the rest is copied unless it is there already."""
    spec = Rotary(head_dim=16, rotary_dim=8)
    x, out = randn(3, 4, 1, 16), torch.zeros(3, 4, 1, 16, dtype=torch.bfloat16)
    for y in (out, out, x.view_as(x), out, x.view_as(x)):
        rotary.apply(spec, x, out=y)
        assert stub.launches[-1].pointers[:4] == (x.data_ptr(),) * 2 + (y.data_ptr(),) * 2
    assert len(stub.loaded) == 2


# --- streams and devices ---


@pytest.mark.parametrize("name", ["new", "in_place", "rows", "at", "along"])
def test_each_call_goes_to_the_stream_of_that_moment(stub, name):
    for stream in (0, 77, 77, 5):
        stub.streams[0] = stream
        WAYS[name](*q_and_k())
    assert [launch.stream for launch in stub.launches] == [0, 77, 77, 5]


@pytest.mark.parametrize("name", ["new", "in_place", "rows", "at", "along"])
def test_two_devices_in_one_process(stub, devices, name):
    """Each has its own code and stream; the current device is the caller's, and stays."""
    devices |= {3: 0, 5: 1}
    stub.streams |= {0: 10, 1: 11}
    for current, batch in ((0, 3), (0, 5), (1, 3), (1, 5), (0, 5)):
        stub.device = current
        WAYS[name](*q_and_k(batch))
        assert stub.device == current
    seen = [(launch.device, launch.stream) for launch in stub.launches]
    assert seen == [(devices[batch], 10 + devices[batch]) for batch in (3, 5, 3, 5, 5)]
    assert sorted(stub.loaded) == [0, 1]


def test_two_devices_where_a_call_takes_several_launches(stub, devices):
    devices |= {5: 1}
    stub.streams |= {1: 11}
    x, table = randn(5, 2, 3, 4, 16), torch.randn(2, 4, 8)
    options = {"layout": "half", "seq_dim": -2}
    rotary.rotate(x, table[:, None].expand(5, 2, 1, 4, 8).contiguous(), table[:, None].expand(
        5, 2, 1, 4, 8).contiguous(), **options)  # fmt: skip
    assert {(launch.device, launch.stream) for launch in stub.launches} == {(1, 11)}
    assert stub.device == 0


@pytest.mark.parametrize("name", ["new", "rows", "at", "along"])
def test_gradients_go_to_the_device_of_the_tensors(stub, devices, name):
    devices |= {5: 1}
    stub.streams |= {1: 11}
    for _ in range(2):
        xs = q_and_k(5, grad=True)
        grads = torch.autograd.grad(sum(y.sum() for y in WAYS[name](*xs)), xs)
        assert [g.shape for g in grads] == [x.shape for x in xs]
    assert {(launch.device, launch.stream) for launch in stub.launches} == {(1, 11)}
    assert len(stub.launches) == 4
    assert stub.device == 0


def test_the_guard_knows_devices_apart():
    """The same call on another device is another form."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        here, there = (torch.empty(2, 3, device=f"cuda:{index}") for index in (0, 1))
        check = torch_ready.ready_for((here,), None).check
        assert check(here)
        assert not check(there)


def test_a_profiler_hears_of_every_launch(stub):
    seen = []
    along(*q_and_k())
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        for _ in range(2):
            along(*q_and_k())
    finally:
        hook.remove(seen.append)
    along(*q_and_k())
    assert [each.get()["name"] for each in seen] == ["kernel"] * 2
    assert len(stub.launches) == 4


# --- what is refused, and what is told ---


def test_outputs_that_overlap_are_refused_before_the_launch(stub):
    room = torch.zeros(4 * 192, dtype=torch.bfloat16)
    q, k = room[:192].view(3, 4, 1, 16), room[576:672].view(3, 2, 1, 16)
    apart = room[192:384].view(3, 4, 1, 16), room[384:480].view(3, 2, 1, 16)
    into(q, k, apart)
    count = len(stub.launches)
    for start, other in ((8, 400), (560, 384), (192, 208), (500, 592)):
        out = room[start : start + 192].view(3, 4, 1, 16), room[other : other + 96].view_as(k)
        with pytest.raises(ValueError, match="out overlaps"):
            into(q, k, out)
    assert len(stub.launches) == count
    positions = room[:4].view(torch.int64)
    x = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16)
    for own in (torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16), room[:64].view(1, 4, 1, 16)):
        call = partial(rotary.apply, SPEC, x, positions=positions, out=own)
        if own.data_ptr() == room.data_ptr():
            with pytest.raises(ValueError, match="out overlaps"):
                call()
        else:
            call()


def test_slices_of_one_projection_in_place(stub, monkeypatch):
    """q and k lie in one buffer, token by token: their reach overlaps, their bytes do not."""
    compared, check = [], torch_gpu.check_memory
    monkeypatch.setattr(
        torch_gpu, "check_memory", lambda *given: (compared.append(1), check(*given))
    )
    both = torch.zeros(1, 5, 6, 16, dtype=torch.bfloat16)
    q, k = both[:, :, :4], both[:, :, 4:]
    for _ in range(4):
        rotary.apply(SPEC, q, k, seq_dim=-3, out=(q, k))
    assert len(stub.launches) == 4
    assert len(compared) == 1


def test_autograd_is_told_what_was_overwritten(stub):
    q, k = q_and_k()
    for count in range(1, 4):
        at(q, k, out=(q, k))
        assert (q._version, k._version) == (count, count)
    learning = q_and_k(grad=True)
    with pytest.raises(RuntimeError, match="does not take part in autograd"):
        at(*learning, out=(q, k))
    with torch.inference_mode():
        mine = tuple(x.clone() for x in (q, k))
        for _ in range(2):
            at(q, k, out=mine)
    with pytest.raises(RuntimeError, match="inference"):
        at(q, k, out=mine)


def test_tables_changed_before_the_backward_pass_are_noticed(stub):
    for _ in range(2):
        q, k = q_and_k(grad=True)
        cos, sin = torch.randn(2, 1, 8)
        y, _ = rotary.rotate((q, k), cos, sin, SPEC, seq_dim=-2)
        cos += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert len(stub.launches) == 2


def test_an_array_of_another_library_is_refused_by_name(stub):
    q, k = q_and_k()
    for positions in (None, ids()):
        with pytest.raises(TypeError, match="all arrays must be of one library: Tensor and numpy"):
            rotary.apply(SPEC, q, k.float().numpy(), positions=positions)
    assert stub.launches == []


# --- before a capture ---


@pytest.fixture
def capture(monkeypatch):
    """Switched on, the current stream is being captured."""
    state = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(state))
    for kept in (torch_tables.axis_turns, torch_tables._cached):
        kept.cache_clear()
    return state


def captured(stub, monkeypatch, calls):
    """Calls of which nothing is compiled, loaded, copied to the device, or waited for."""
    loaded = len(stub.loaded)
    stub.forget()
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__",
                     "__float__", "__index__", "to"):  # fmt: skip
            patch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(name))
        patch.setattr(torch_tables, "from_numpy", lambda *_: pytest.fail("a copy to the device"))
        for call in calls:
            call()
    assert len(stub.loaded) == loaded
    return len(stub.launches)


@pytest.mark.parametrize("spec", [SPEC, AXES], ids=["one axis", "three axes"])
@pytest.mark.parametrize("out", [False, True])
def test_after_warm_up_first_calls_can_be_captured(stub, capture, spec, out, monkeypatch):
    (q, k), axes = q_and_k(7), (3,) if spec.num_axes > 1 else ()
    positions = ids(7, axes=axes)
    given = {"positions": positions, "seq_dim": -2, "out": (q, k) if out else None}
    before = q.clone()
    rotary.warm_up(spec, q, k, **given)
    assert torch.equal(q, before)
    assert stub.launches == []
    capture.append(True)

    def by_tables():
        cos, sin = rotary.cos_sin(spec, positions)
        rotary.rotate((q, k), cos, sin, spec, seq_dim=-2, out=given["out"])

    calls = [lambda: rotary.apply(spec, q, k, **given), by_tables]
    assert captured(stub, monkeypatch, calls) == 2
    if spec is SPEC:
        calls = [lambda: rotary.rotate((q, k), TABLE, SINES, spec, **given)]
        assert captured(stub, monkeypatch, calls) == 1


def test_after_warm_up_the_backward_pass_can_be_captured(stub, capture, monkeypatch):
    q, k = q_and_k(7, grad=True)
    rotary.warm_up(SPEC, q, k, positions=ids(7), seq_dim=-2, gradient=True)
    capture.append(True)
    grads, positions = (torch.zeros_like(q), torch.zeros_like(k)), ids(7)

    def call():
        results = rotary.apply(SPEC, q, k, positions=positions, seq_dim=-2)
        torch.autograd.grad(results, (q, k), grads)

    assert captured(stub, monkeypatch, [call]) == 2


def test_a_first_call_in_a_capture_says_what_to_do(stub, capture):
    q, k = q_and_k()
    capture.append(True)
    with pytest.raises(RuntimeError, match=r"cannot capture: call rotary.warm_up\(spec, q, k"):
        at(q, k)
    capture.clear()
    rotary.warm_up(SPEC, q, k, positions=ids(), seq_dim=-2)
    capture.append(True)
    at(q, k)
    assert len(stub.launches) == 1


@pytest.mark.usefixtures("stub")
def test_what_warm_up_refuses():
    q, k = q_and_k()
    with pytest.raises(TypeError, match="positions must be a tensor on the device of q, got list"):
        rotary.warm_up(SPEC, q, k, positions=[[0], [1], [2]])
    by_length = scaled("dynamic", 16, 2.0, 16)
    with pytest.raises(ValueError, match="needs seq_len as a whole number: it would be read"):
        rotary.warm_up(by_length, q, k, positions=ids(), seq_dim=-2)
    rotary.warm_up(by_length, q, k, positions=ids(), seq_dim=-2, seq_len=64)
    with pytest.raises(ValueError, match="3 axes needs positions"):
        rotary.warm_up(AXES, q, k)
    with pytest.raises(ValueError, match="does not fit x"):
        rotary.warm_up(SPEC, q, k, positions=ids(4), seq_dim=-2)
    with pytest.raises(
        ValueError, match="the last axis of x must be head_dim=8 of the spec, got 16"
    ):
        rotary.warm_up(Rotary(head_dim=8), q, k)


@pytest.mark.parametrize("name", ["rotate", "apply", "apply without positions"])
def test_a_prepared_call_is_the_launch_alone(stub, name, monkeypatch):
    q, k = q_and_k()
    if name == "rotate":
        step = rotary.prepare(rotary.rotate, (q, k), TABLE[:1], SINES[:1], SPEC, seq_dim=-2)
        call = partial(step, (q, k), TABLE[:1], SINES[:1])
    elif name == "apply":
        step = rotary.prepare(rotary.apply, SPEC, q, k, positions=ids(), seq_dim=-2)
        call = partial(step, q, k, positions=ids())
    else:
        step = rotary.prepare(rotary.apply, SPEC, q, k)
        call = partial(step, q, k)
    assert stub.launches == []
    monkeypatch.setattr(torch_ready, "run", lambda *_: pytest.fail("the whole call"))
    results = call()
    assert stub.launches[0].pointers[:4] == tuple(x.data_ptr() for x in (q, k, *results))


@pytest.mark.parametrize("devices", [1, 2])
def test_outputs_lie_on_the_device_of_their_input(devices, monkeypatch):
    """Inductor's allocator takes the current device, so it is asked where there is no other."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(
        torch_ready, "empty_strided_on_cuda", lambda *form: asked.append(form) or "current"
    )
    with FakeTensorMode():
        x = torch.empty(2, 3, 5, 8, device=f"cuda:{devices - 1}").transpose(1, 2)
        y = torch_ready.maker_of_outputs(x, 0)()
    if devices == 1:
        assert y == "current"
        assert asked == [((2, 5, 3, 8), x.stride(), torch.float32)]
    else:
        assert (y.device, y.stride(), asked) == (x.device, x.stride(), [])


def test_tables_are_not_kept_while_a_graph_is_captured(monkeypatch):
    """They would be empty until it runs; and those of the cache may be gone when it runs."""
    spec, x = Rotary(head_dim=16, base=71.0), torch.zeros(3, 16)

    def tables():
        return rotary.angles.sequence_cos_sin(spec, x, 3)

    with monkeypatch.context() as patch:
        patch.setattr(torch_tables, "is_capturing", lambda x: True)
        first, second = tables(), tables()
    kept, again = tables(), tables()
    at = [cos.data_ptr() for cos, _ in (first, second, kept, again)]
    assert len({*at[:3]}) == 3
    assert at[2] == at[3]
    assert all(torch.equal(cos, kept[0]) for cos, _ in (first, second))
