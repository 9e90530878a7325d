"""Tensors on a GPU go to the GPU kernel: the same way on the CPU, in Triton's interpreter."""

import logging
import sys

import numpy as np
import pytest
import torch
from grids import pairwise
from kernel_cases import LAYOUTS, randn, way
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import rotary
from rotary import Rotary
from rotary.kernels import numpy as reference
from rotary.kernels.geometry import Options, geometry_of
from rotary.kernels.torch import angles as torch_tables
from rotary.kernels.torch import gpu as torch_gpu
from rotary.kernels.torch import launch as torch_launch
from rotary.kernels.torch import ready as torch_ready
from rotary.kernels.torch import route as kernel
from rotary.kernels.torch import state as torch_state

pytest.importorskip("triton", reason="Triton is made for Linux")

import interpreter


class Route:
    """What went to the kernel, and whether it is to run."""

    def __init__(self):
        self.launches = 0
        self.runs = True


@pytest.fixture
def route(monkeypatch, poisoned):
    """CPU tensors are taken for those of a GPU."""
    seen, run = Route(), interpreter.kernel._run

    def watched(*arguments):
        seen.launches += 1
        if seen.runs:
            run(*arguments)

    interpreter.mended(monkeypatch)
    monkeypatch.setattr(interpreter.kernel, "_run", watched)
    for module in (torch_state, torch_tables, torch_launch, torch_ready, kernel):
        monkeypatch.setattr(module, "is_on_gpu", lambda x: True)
    for module in (torch_launch, torch_gpu, kernel):
        monkeypatch.setattr(module, "gpu_kernel", lambda device: interpreter.kernel)
    monkeypatch.setattr(torch_ready, "recent", {})
    return seen


def tables(*shape):
    angles = randn(*shape, seed=9, dtype=torch.float64)
    return angles.cos().float(), angles.sin().float()


def wanted(xs, cos, sin, options, conjugate=False):
    """The law on NumPy arrays."""
    arrays = [np.ascontiguousarray(x.detach().numpy()) for x in xs]
    results = reference.rotate(
        arrays, cos.numpy(), sin.numpy(), None, options._replace(conjugate=conjugate), None
    )
    return tuple(map(torch.from_numpy, results))


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# --- by tables ---


@pytest.mark.parametrize(
    ("layout", "seq_dim", "conjugate"), list(pairwise(LAYOUTS, (-2, -3), (False, True)))
)
def test_two_tensors_are_one_launch_with_the_bits_of_the_law(route, layout, seq_dim, conjugate):
    xs = randn(2, 5, 4, 20), randn(2, 5, 2, 20, seed=1)
    xs = xs if seq_dim == -3 else tuple(x.transpose(1, 2) for x in xs)
    cos, sin = tables(5, 6)
    options = Options(*layout, 12, 4, seq_dim)
    got = rotary.rotate(xs, cos, sin, conjugate=conjugate, **way(options))
    same(got, wanted(xs, cos, sin, options, conjugate))
    assert route.launches == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_two_orders_are_the_rotation_back_and_forth(route, layout):
    x, upstream = randn(1, 3, 5, 8, grad=True), randn(1, 3, 5, 8, seed=2, grad=True)
    cos, sin = tables(5, 3)
    options = Options(*layout, 6, 1)
    back = Options(*layout[::-1], 6, 1)
    y = rotary.rotate(x, cos, sin, **way(options))
    (first,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    same((first.detach(),), wanted((upstream,), cos, sin, back, True))
    third = randn(1, 3, 5, 8, seed=3)
    (second,) = torch.autograd.grad(first, upstream, third)
    same((second,), wanted((third,), cos, sin, options))
    assert route.launches == 3


def test_gradients_without_memory_of_their_own_are_read_by_their_strides(route):
    base, (cos, sin) = randn(2, 5, 3, 16, grad=True), tables(5, 4)
    x = base.transpose(1, 2)[..., ::2]
    (grad,) = torch.autograd.grad(rotary.rotate(x, cos, sin, layout="half").sum(), base)
    (ones,) = wanted((torch.ones(2, 3, 5, 8),), cos, sin, Options(), True)
    want = torch.zeros(2, 5, 3, 16)
    want[..., ::2] = ones.transpose(1, 2)
    same(grad, want)
    assert route.launches == 2


def test_the_gradient_of_one_of_two_outputs(route):
    q, k, (cos, sin) = randn(1, 2, 5, 8, grad=True), randn(1, 1, 5, 8, grad=True), tables(5, 4)
    rotary.rotate((q, k), cos, sin, layout="half")[1].sum().backward()
    assert q.grad is None
    same((k.grad,), wanted((torch.ones(1, 1, 5, 8),), cos, sin, Options(), True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_and_in_place(route, layout):
    xs, (cos, sin) = (randn(2, 3, 5, 8), randn(2, 1, 5, 8, seed=1)), tables(5, 4)
    want = wanted(xs, cos, sin, Options(*layout))
    out = tuple(map(torch.empty_like, xs))
    names = {"layout": layout[0], "out_layout": layout[1]}
    got = rotary.rotate(xs, cos, sin, out=out, **names)
    assert all(a is b for a, b in zip(got, out, strict=True))
    same(out, want)
    weight = randn(2, 3, 5, 8, grad=True)
    product = (weight * xs[0]).sum()
    rotary.rotate(xs, cos, sin, out=xs, **names)
    same(xs, want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    assert route.launches == 2


def test_outputs_that_overlap_are_refused_before_the_launch(route):
    memory, (cos, sin) = randn(6, 8), tables(5, 4)
    with pytest.raises(ValueError, match="out overlaps an input"):
        rotary.rotate(memory[:5], cos, sin, out=memory[1:], layout="half")
    with pytest.raises(ValueError, match="share memory"):
        rotary.rotate(memory[:5], cos, sin, out=memory[:1].expand(5, 8), layout="half")
    with pytest.raises(RuntimeError, match="out= does not take part in autograd"):
        rotary.rotate(randn(5, 8, grad=True), cos, sin, out=memory[:5], layout="half")
    assert route.launches == 0


def test_rows_outside_the_tables_are_nan_and_nobody_waits_to_look(route):
    x, (cos, sin) = randn(1, 2, 5, 8), tables(9, 4)
    rows = torch.tensor([3, -1, 8, 9, 0])
    got = rotary.rotate(x, cos, sin, positions=rows, layout="half")
    inside = (rows >= 0) & (rows < 9)
    assert got[:, :, ~inside].isnan().all()
    picked = cos[rows[inside]], sin[rows[inside]]
    same((got[:, :, inside],), wanted((x[:, :, inside],), *picked, Options()))
    assert route.launches == 1


@pytest.mark.usefixtures("route")
def test_the_formula_gives_nan_for_rows_outside_as_the_kernel_does():
    cos, _ = tables(9, 4)
    rows = torch.tensor([[3, -1, 8], [9, 0, -(2**40)]])
    got = torch_launch._picked(cos.requires_grad_(), rows)
    inside = torch.tensor([[True, False, True], [False, True, False]])
    assert got[~inside].isnan().all()
    same(got[inside], cos[[3, 8, 0]])
    (grad,) = torch.autograd.grad(got[inside].sum(), cos)
    same(grad.sum(), torch.tensor(12.0))


def test_the_formula_on_the_host_refuses_rows_outside_the_tables():
    cos, sin = (table.requires_grad_() for table in tables(9, 4))
    with pytest.raises(ValueError, match="from -1 to 3, the tables have 9 rows"):
        rotary.rotate(randn(2, 8), cos, sin, positions=torch.tensor([3, -1]), layout="half")


def test_no_value_is_read_on_the_way_to_the_launch(route, monkeypatch):
    """Each of these would wait for the device."""
    route.runs = False
    spec = Rotary(head_dim=8)
    xs = randn(2, 3, 5, 8), randn(2, 1, 5, 8)
    (cos, sin), positions = tables(9, 4), torch.arange(5)
    rotary.apply(spec, *xs)  # its turns are then on the device

    def refuse(*_, **__):
        raise AssertionError("this waits for the device")

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__",
                 "__index__", "to"):  # fmt: skip
        monkeypatch.setattr(torch.Tensor, name, refuse)
    rotary.rotate(xs, cos[:5], sin[:5], layout="half")
    rotary.rotate(xs, cos, sin, positions=positions, layout="half")
    rotary.rotate(xs, cos[:5], sin[:5], out=xs, layout="half")
    rotary.apply(spec, *xs)
    rotary.apply(spec, *xs, positions=positions, out=xs)
    learning = xs[0].detach().requires_grad_()
    (grad,) = torch.autograd.grad(rotary.apply(spec, learning, positions=positions).sum(), learning)
    assert grad.shape == learning.shape
    assert route.launches == 8


def test_what_the_kernel_does_not_take_is_rotated_by_the_formula(route):
    cos, sin = tables(5, 4)
    for x, both in (
        (randn(2, 5, 8, dtype=torch.float64), (cos, sin)),
        (randn(2, 5, 8), (cos.double(), sin.double())),
        (torch._neg_view(randn(2, 5, 8)), (cos, sin)),
    ):
        clean = x.clone() if x.is_neg() else x
        same(rotary.rotate(x, *both, layout="half"), wanted((clean,), *both, Options())[0])
        out = torch.empty_like(x)
        same(rotary.rotate(x, *both, out=out, layout="half"), wanted((clean,), *both, Options())[0])
    assert route.launches == 0


def test_transforms_take_the_formula(route):
    x, tangent, (cos, sin) = randn(3, 2, 5, 8), randn(3, 2, 5, 8, seed=1), tables(5, 4)
    want = wanted((x,), cos, sin, Options())[0]
    same(torch.vmap(lambda x: rotary.rotate(x, cos, sin, layout="half"))(x), want)
    got = torch.func.jvp(lambda x: rotary.rotate(x, cos, sin, layout="half"), (x,), (tangent,))
    same(got, (want, wanted((tangent,), cos, sin, Options())[0]))
    assert route.launches == 0


def test_many_gradients_in_one_backward_pass(route):
    x, (cos, sin) = randn(3, 4, grad=True), tables(3, 2)
    upstream = torch.eye(12).view(12, 3, 4)
    (rows,) = torch.autograd.grad(
        rotary.rotate(x, cos, sin, layout="half"), x, upstream, is_grads_batched=True
    )
    same((rows,), wanted((upstream,), cos, sin, Options(), True))
    spec = Rotary(head_dim=4)
    (rows,) = torch.autograd.grad(rotary.apply(spec, x), x, upstream, is_grads_batched=True)
    both = rotary.cos_sin(spec, torch.arange(3))
    torch.testing.assert_close(
        (rows,), wanted((upstream,), *both, Options(), True), rtol=0, atol=2e-6
    )


def test_the_operators_take_the_same_way(route):
    xs, (cos, sin) = [randn(2, 3, 5, 8), randn(2, 1, 5, 8, seed=1)], tables(5, 4)
    geometry = geometry_of(((2, 3, 5, 8), (2, 1, 5, 8)), (5, 4), None, Options())
    arguments = xs, cos, sin, None, *kernel.flat(geometry)
    want = wanted(xs, cos, sin, Options())
    same(tuple(torch.ops.rotary.rotate(*arguments)), want)
    torch.ops.rotary.rotate_out(*arguments, xs)
    same(tuple(xs), want)
    assert route.launches == 2


def test_a_call_like_the_one_before_is_checked_once(route, monkeypatch):
    xs, (cos, sin) = (randn(2, 3, 5, 8), randn(2, 1, 5, 8, seed=1)), tables(5, 4)
    rotary.rotate(xs, cos, sin, layout="half")
    checks = []
    monkeypatch.setattr(torch_gpu, "check_operands", lambda *_: checks.append(1))
    other = tuple(x + 1 for x in xs)
    same(rotary.rotate(other, cos, sin, layout="half"), wanted(other, cos, sin, Options()))
    assert not checks
    other[0].requires_grad_()
    with torch.no_grad():
        rotary.rotate(
            other, cos, sin, layout="half"
        )  # now it is remembered with a tensor that could learn
    assert rotary.rotate(other, cos, sin, layout="half")[0].requires_grad
    rotary.rotate(tuple(x[:1] for x in xs), cos, sin, layout="half")
    assert len(checks) == 3


# --- where there is no kernel ---


@pytest.fixture
def fresh_look():
    torch_launch.gpu_kernel.cache_clear()
    yield
    torch_launch.gpu_kernel.cache_clear()


@pytest.mark.usefixtures("fresh_look")
def test_without_triton_the_formula_rotates_and_says_so_once(monkeypatch, log):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "rotary.kernels.triton.kernel", raising=False)
    monkeypatch.delattr("rotary.kernels.triton.kernel", raising=False)
    for module in (torch_state, torch_launch, torch_ready, kernel):
        monkeypatch.setattr(module, "is_on_gpu", lambda x: True)
    x, (cos, sin) = randn(2, 5, 8, grad=True), tables(5, 4)
    with log.at_level(logging.DEBUG, "rotary"):
        for _ in range(3):
            same((rotary.rotate(x, cos, sin, layout="half"),), wanted((x,), cos, sin, Options()))
        rotary.apply(Rotary(head_dim=8), x)
    (line,) = [record.getMessage() for record in log.records if record.name == "rotary"]
    assert "Triton cannot be loaded" in line


@pytest.mark.usefixtures("fresh_look")
@pytest.mark.parametrize(("capability", "is_taken"), [((6, 1), False), ((7, 0), True)])
def test_devices_that_triton_does_not_compile_for_take_the_formula(
    capability, is_taken, monkeypatch, log
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old one")
    with log.at_level(logging.DEBUG, "rotary"):
        found = torch_launch.gpu_kernel(torch.device("cuda:0"))
    assert (found is interpreter.compiled) == is_taken
    assert ("does not compile for an old one" in log.text) != is_taken


# --- exact angles, without tables ---

LENGTHS = {"factor": 2.0, "original_max_position_embeddings": 16}
SPECS = {
    "half": Rotary(head_dim=8, base=5e5),
    "a slice": Rotary(head_dim=12, rotary_dim=6, start=2, layout="interleaved", out_layout="half"),
    "backwards": Rotary(head_dim=8, sign=-1),
    "amplitude": Rotary(head_dim=8, schedule="yarn", params=LENGTHS | {"factor": 8.0}),
    "three axes": Rotary(head_dim=8, axes=(0, 1, 2, 0)),
    "by the length": Rotary(head_dim=8, schedule="dynamic", params=LENGTHS),
}


@pytest.fixture
def no_tables(monkeypatch):
    """Whoever makes a table fails."""
    module = sys.modules["rotary.rotate"]
    for name in ("cos_sin", "sequence_cos_sin"):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a table was made"))


def law_of(spec, xs, positions, conjugate=False, seq_len=None):
    cos, sin = rotary.cos_sin(spec, positions, seq_len=seq_len, allow_negative=True)
    layouts = (spec.layout, spec.out_layout)[:: -1 if conjugate else 1]
    options = Options(*layouts, spec.rotary_dim, spec.start)
    return wanted(xs, *map(torch.from_numpy, (cos, sin)), options, conjugate)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("no_tables")
@pytest.mark.parametrize("name", SPECS)
def test_apply_works_out_its_angles_in_the_kernel(route, name):
    spec = SPECS[name]
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    xs = randn(2, 3, 5, spec.head_dim), randn(2, 1, 5, spec.head_dim, seed=1)
    seq_len = 64 if spec.depends_on_length else None
    for shape, library, conjugate in pairwise(
        ((5,), (2, 5)), (np.asarray, torch.from_numpy), (False, True)
    ):
        positions = np.random.default_rng(0).integers(0, 2**31, (*shape, *axes))
        options = {"conjugate": conjugate, "seq_len": seq_len}
        want = law_of(spec, xs, positions, conjugate, seq_len)
        close(rotary.apply(spec, *xs, positions=library(positions), **options), want)
    if not axes:
        both, back = (law_of(spec, xs, np.arange(5), each, seq_len) for each in (False, True))
        close(rotary.apply(spec, *xs, seq_len=seq_len), both)
        options = {"conjugate": True, "seq_len": seq_len}
        close((rotary.apply(spec, xs[0], **options),), back[:1])
        out = tuple(map(torch.empty_like, xs))
        assert rotary.apply(spec, *xs, out=out, **options)[0] is out[0]
        close(out, back)
    assert route.launches == 7 if not axes else 4


@pytest.mark.usefixtures("no_tables")
def test_every_64_bit_position_is_computed_and_none_is_looked_at(route):
    spec, x = SPECS["half"], randn(1, 2, 4, 8)
    positions = [-1, -(2**40), 2**62 + 1, 0]
    phases = [[p * int(turn) % 2**64 / 2**64 for turn in rotary.turns(spec)] for p in positions]
    angles = torch.tensor(phases, dtype=torch.float64) * (2 * np.pi)
    want = wanted((x,), angles.cos().float(), angles.sin().float(), Options())
    close((rotary.apply(spec, x, positions=torch.tensor(positions)),), want)
    assert route.launches == 1


@pytest.mark.usefixtures("no_tables")
@pytest.mark.parametrize("name", ["half", "a slice", "backwards", "amplitude", "three axes"])
def test_exact_gradients_of_two_orders_keep_only_the_positions(route, name):
    spec = SPECS[name]
    x, upstream = (randn(2, 3, 5, spec.head_dim, seed=s, grad=True) for s in (0, 1))
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    positions = np.random.default_rng(0).integers(0, 2**31, (2, 5, *axes))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = rotary.apply(spec, x, positions=torch.from_numpy(positions))
    assert sum(t.nbytes for t in kept) == positions.nbytes
    (first,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    plain = x.detach().requires_grad_()
    cos, sin = rotary.cos_sin(spec, positions)
    options = Options(spec.layout, spec.out_layout, spec.rotary_dim, spec.start)
    both = (torch.from_numpy(t).requires_grad_() for t in (cos, sin))  # these take the formula
    theirs = rotary.rotate(plain, *both, **way(options))
    (want,) = torch.autograd.grad(theirs, plain, upstream.detach(), retain_graph=True)
    close(first.detach(), want)
    third = randn(2, 3, 5, spec.head_dim, seed=3)
    (second,) = torch.autograd.grad(first, upstream, third)
    close((second,), law_of(spec, (third,), positions))
    assert route.launches == 3


def test_positions_changed_before_the_backward_pass_are_noticed(route):
    x, positions = randn(3, 8, grad=True), torch.arange(3)
    y = rotary.apply(SPECS["half"], x, positions=positions)
    positions += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert route.launches == 1


def test_tables_are_made_where_the_kernel_cannot_work_out_the_angles(route):
    x = randn(2, 3, 5, 8)
    spec, scaled = SPECS["half"], SPECS["by the length"]
    halves = np.arange(5) + 0.5
    close((rotary.apply(spec, x, positions=torch.from_numpy(halves)),), law_of(spec, (x,), halves))
    rows = np.stack((np.arange(5), np.arange(5) + 60))
    got = rotary.apply(scaled, x, positions=torch.from_numpy(rows))
    close((got,), law_of(scaled, (x,), rows))
    got = rotary.apply(scaled, x, seq_len=[8, 64])
    close((got,), law_of(scaled, (x,), np.stack((np.arange(5),) * 2), seq_len=[8, 64]))
    assert route.launches == 3
    wide = x.double()
    want = law_of(spec, (wide,), np.arange(5))
    close((rotary.apply(spec, wide),), want)
    close(rotary.apply(spec, x, precision="float32"), want[0].float())
    assert route.launches == 4


class NoLists(TorchFunctionMode):
    """A list as an index is copied to the device, which waits for it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(each, list) for each in index)
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_tables_of_several_axes_are_made_without_waiting(precision):
    spec = SPECS["three axes"]
    positions = torch.from_numpy(np.random.default_rng(0).integers(0, 99, (2, 5, 3)))
    with NoLists():
        tables = rotary.cos_sin(spec, positions, precision)
    for got, want in zip(tables, rotary.cos_sin(spec, positions.numpy(), precision), strict=True):
        close(got, torch.from_numpy(want))


def test_what_does_not_fit_is_refused_as_on_the_host(route):
    spec, x = SPECS["three axes"], randn(2, 3, 5, 8)
    with pytest.raises(ValueError, match="must be"):
        rotary.apply(spec, x, positions=torch.zeros(5, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"does not fit x of shape \(2, 3, 5, 8\)"):
        rotary.apply(SPECS["half"], x, positions=torch.arange(4))
    with pytest.raises(TypeError, match="one dtype"):
        rotary.apply(SPECS["half"], x, x.half())
    with pytest.raises(TypeError, match="one library"):
        rotary.apply(SPECS["half"], x, x.numpy())
    with pytest.raises(ValueError, match="out must be"):
        rotary.apply(SPECS["half"], x, out=x[..., :4])
    with pytest.raises(ValueError, match="one array for each"):
        rotary.apply(SPECS["half"], x, out=(x, x))
    with pytest.raises(ValueError, match="out overlaps"):
        rotary.apply(SPECS["half"], x[:1], out=x.view(1, 3, 2, 5, 8)[:, :, 0])
    with pytest.raises(RuntimeError, match="autograd"):
        rotary.apply(SPECS["half"], x.requires_grad_(), out=torch.empty_like(x))
    assert route.launches == 0


def test_what_inference_mode_keeps_serves_training_afterwards(route):
    spec, x = Rotary(head_dim=8, base=4321.0), randn(1, 2, 5, 8)
    with torch.inference_mode():
        inside = rotary.apply(spec, x)
    learning = x.clone().requires_grad_()
    result = rotary.apply(spec, learning)
    result.square().sum().backward()
    same(result.detach(), inside.clone())
    torch.testing.assert_close(learning.grad, 2 * x, rtol=0, atol=2e-6)  # the norm is kept
    assert route.launches == 3


# --- tensors of a device that is not here ---


class Indexing(TorchFunctionMode):
    """`x[...]` by operators, because torch built without CUDA indexes no fake CUDA tensor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.__getitem__:
            return function(*args, **(kwargs or {}))
        x, index = args
        index = index if isinstance(index, tuple) else (index,)
        named = sum(each is not None and each is not Ellipsis for each in index)
        axis = 0
        for each in index:
            if each is Ellipsis:
                axis += args[0].ndim - named
            elif each is None:
                x, axis = x.unsqueeze(axis), axis + 1
            elif isinstance(each, slice):
                x = torch.ops.aten.slice(x, axis, each.start, each.stop, each.step or 1)
                axis += 1
            else:
                picked = torch.tensor(each) if isinstance(each, list) else each
                x = torch.ops.aten.index(x, [*(None,) * axis, picked])
                axis += picked.ndim
        return x


@pytest.fixture
def fake():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Indexing():
        yield mode


def fake_operands(dtype, grad=False):
    xs = [
        torch.empty(2, heads, 5, 8, dtype=dtype, device="cuda", requires_grad=grad)
        for heads in (4, 2)
    ]
    table = torch.empty(5, 3, device="cuda")
    options = Options("half", None, 6, 1)
    geometry = geometry_of(((2, 4, 5, 8), (2, 2, 5, 8)), (5, 3), None, options)
    return (xs, table, table, None, *kernel.flat(geometry))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck_of_the_operator_on_cuda(dtype, grad):
    with FakeTensorMode():
        arguments = fake_operands(dtype, grad)
    torch.library.opcheck(torch.ops.rotary.rotate.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_operator_that_writes_on_cuda(dtype):
    with FakeTensorMode():
        arguments = fake_operands(dtype)
        out = [torch.empty_like(x) for x in arguments[0]]
    torch.library.opcheck(torch.ops.rotary.rotate_out.default, (*arguments, out))


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("precision", ["exact", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_fake_cuda_tensors_have_the_right_form(name, precision):
    spec = SPECS[name]
    x = torch.empty(2, 3, 5, spec.head_dim, dtype=torch.bfloat16, device="cuda")
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    positions = torch.ones(2, 5, *axes, dtype=torch.int64, device="cuda")
    options = {"precision": precision, "seq_len": 64 if spec.depends_on_length else None}
    results = [rotary.apply(spec, x, positions=positions, **options)]
    if not axes:
        results.append(rotary.apply(spec, x, **options))
    for result in results:
        assert type(result) is FakeTensor
        assert (result.shape, result.dtype, result.device) == (x.shape, x.dtype, x.device)


@pytest.mark.usefixtures("fake")
def test_what_is_traced_for_cuda_is_what_a_compiler_may_fuse():
    q, table = torch.empty(2, 3, 5, 8, device="cuda"), torch.empty(9, 4, device="cuda")
    rows = torch.ones(5, dtype=torch.int64, device="cuda")

    def call(q, cos, sin, rows):
        return rotary.rotate(q, cos, sin, positions=rows, layout="half")

    graph = make_fx(call)(q, table, table, rows).graph
    targets = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert {"aten.where.self", "aten.mul.Tensor", "aten.cat.default"} <= targets
    assert all(target.startswith("aten.") for target in targets)
