"""torch around the rotation: autograd, transforms, the compiler, export, modes and devices."""

import copy
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from kernel_cases import channels, randn
from published import STEPS, longrope, scaled
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode

import rotary
from rotary import Rotary

LAYOUTS = ["half", "interleaved", "half to interleaved", "interleaved to half"]
SPECS = {
    "default": Rotary(head_dim=8),
    "llama3": scaled("llama3", 8, 8.0, 64, STEPS, base=5e5),
    "longrope": longrope(4.0, 16, [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 3.0, 4.0]),
    "dynamic": scaled("dynamic", 8, 2.0, 16),
    "partial": Rotary(head_dim=8, rotary_dim=4, start=2, layout="interleaved", out_layout="half"),
}


def ways(layout):
    read, _, write = layout.partition(" to ")
    return {"layout": read, "out_layout": write or None}


def tables(*shape, dtype=torch.float32, grad=False):
    angles = randn(*shape, seed=9, dtype=torch.float64)
    return tuple(t.to(dtype).requires_grad_(grad) for t in (angles.cos(), angles.sin()))


def formula(x, cos, sin, layout="half", out_layout=None, rotary_dim=None, start=0):
    """The rotation of the paper in torch's own operators, seq_dim=-2, tables (..., seq, pairs)."""
    pairs = cos.shape[-1]
    u, v = (x[..., index] for index in channels(layout, pairs, start))
    written = channels(out_layout or layout, pairs, start)
    outside = np.arange(start), np.arange(start + 2 * pairs, x.shape[-1])
    order = np.argsort(np.concatenate((*written, *outside)))
    rest = x[..., :start], x[..., start + 2 * pairs :]
    return torch.cat((u * cos - v * sin, v * cos + u * sin, *rest), dim=-1)[..., order]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    # that cache on disk does not know of changes in our backward pass
    with functorch_config.patch(enable_autograd_cache=False):
        yield


# --- autograd ---


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_order(layout, conjugate):
    q = randn(1, 2, 3, 6, dtype=torch.float64, grad=True)
    k = randn(1, 1, 3, 6, seed=1, dtype=torch.float64, grad=True)
    cos, sin = tables(3, 2)

    def call(q, k):
        way = ways(layout) | {"rotary_dim": 4, "start": 1, "conjugate": conjugate}
        return rotary.rotate((q, k), cos, sin, **way)

    assert torch.autograd.gradcheck(call, (q, k))
    assert torch.autograd.gradgradcheck(call, (q, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_those_of_the_formula(layout, dtype):
    x, (cos, sin) = randn(2, 3, 5, 16, dtype=dtype, grad=True), tables(5, 6)
    way = ways(layout) | {"rotary_dim": 12, "start": 2}
    upstream = randn(2, 3, 5, 16, seed=3, dtype=dtype)
    (ours,) = torch.autograd.grad(rotary.rotate(x, cos, sin, **way), x, upstream)
    wide = x.detach().float().requires_grad_()
    (theirs,) = torch.autograd.grad(formula(wide, cos, sin, **way), wide, upstream.float())
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("positions", [None, torch.tensor([3, 0, 0, 4, 1])])
def test_gradients_of_strided_inputs_and_row_numbers(positions):
    base = randn(2, 5, 3, 32, grad=True)
    x = base.transpose(1, 2)[..., ::2]
    cos, sin = tables(5, 8)
    got = rotary.rotate(x, cos, sin, positions=positions, layout="half")
    upstream = randn(*got.shape, seed=1).expand_as(got)
    (ours,) = torch.autograd.grad(got, base, upstream, retain_graph=True)
    rows = slice(None) if positions is None else positions
    (theirs,) = torch.autograd.grad(formula(x, cos[rows], sin[rows]), base, upstream)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    (ones,) = torch.autograd.grad(got.sum(), base)  # an expanded upstream gradient, stride 0
    (theirs,) = torch.autograd.grad(formula(x, cos[rows], sin[rows]).sum(), base)
    torch.testing.assert_close(ones, theirs, rtol=0, atol=0)


def test_only_the_tables_are_kept_for_the_backward_pass():
    q, k = randn(2, 4, 16, 8, grad=True), randn(2, 2, 16, 8, grad=True)
    cos, sin = tables(16, 4)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t
    ):
        results = rotary.rotate((q, k), cos, sin, layout="half")
    assert all(result.requires_grad for result in results)
    assert sum(t.nbytes for t in kept.values()) == cos.nbytes + sin.nbytes
    assert set(kept) == {cos.data_ptr(), sin.data_ptr()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_reach_the_tables(layout):
    x = randn(2, 2, 3, 4, dtype=torch.float64, grad=True)
    cos, sin = tables(3, 2, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(
        lambda x, cos, sin: rotary.rotate(x, cos, sin, **ways(layout)), (x, cos, sin)
    )
    rows = torch.tensor([2, 0, 2])
    assert torch.autograd.gradcheck(
        lambda cos, sin: rotary.rotate(x.detach(), cos, sin, positions=rows, layout="half"),
        (cos, sin),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_reach_fractional_positions(dtype):
    """An ordinary call dropped them; compiled, and inside torch.func.grad, they were right."""
    spec, x, y = Rotary(head_dim=4), randn(3, 4), randn(3, 4, seed=1)
    positions = torch.tensor([0.5, 2.25, 100.125], dtype=dtype, requires_grad=True)
    (rotary.apply(spec, x, positions=positions) * y).sum().backward()
    wide = positions.detach().double().requires_grad_()
    cos, sin = (
        turn(wide[:, None] * torch.tensor([1.0, 0.01]).double()) for turn in (torch.cos, torch.sin)
    )
    (formula(x.double(), cos, sin) * y).sum().backward()
    torch.testing.assert_close(positions.grad.double(), wide.grad, rtol=1e-6, atol=1e-6)
    moved = rotary.rerotate(x, spec, [0.0, 1.0, 2.0], positions)
    torch.testing.assert_close(moved, rotary.rerotate(x, spec, [0.0, 1.0, 2.0], positions.detach()))
    assert moved.requires_grad


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_results_may_be_unused(used):
    xs, (cos, sin) = [randn(1, h, 3, 4, seed=h, grad=True) for h in (2, 1)], tables(3, 2)
    rotary.rotate(xs, cos, sin, layout="half")[used].sum().backward()
    rest = xs[1 - used].grad
    assert rest is None or not rest.any()
    (alone,) = torch.autograd.grad(formula(xs[used], cos, sin).sum(), xs[used])
    torch.testing.assert_close(xs[used].grad, alone, rtol=0, atol=0)


def test_a_parameter_takes_part():
    weight, (cos, sin) = torch.nn.Parameter(randn(3, 4)), tables(3, 2)
    rotary.rotate(weight, cos, sin, layout="half").sum().backward()
    wide = weight.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(formula(wide, cos, sin).sum(), wide)
    torch.testing.assert_close(weight.grad, want, rtol=0, atol=0)
    with torch.no_grad():
        assert type(rotary.rotate(weight, cos, sin, layout="half")) is torch.Tensor


def test_row_numbers_changed_before_the_backward_pass_are_noticed():
    """As torch does for every tensor it keeps; unnoticed, rows outside the tables would be read."""
    x, rows, (cos, sin) = randn(3, 4, grad=True), torch.arange(3), tables(3, 2)
    result = rotary.rotate(x, cos, sin, positions=rows, layout="half")
    rows += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result.sum(), x)


@pytest.mark.parametrize("out_layout", ["half", "interleaved"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_batch_of_gradients_is_that_of_single_ones(layout, out_layout):
    x, (cos, sin), upstream = randn(2, 3, 6, grad=True), tables(3, 2), randn(4, 2, 3, 6, seed=1)
    y = rotary.rotate(x, cos, sin, layout=layout, out_layout=out_layout, rotary_dim=4, seq_dim=-2)
    (rows,) = torch.autograd.grad(y, x, upstream, retain_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in upstream]
    torch.testing.assert_close(rows, torch.stack(single), rtol=0, atol=0)


# --- out= and autograd ---


def test_out_and_gradients_exclude_each_other():
    cos, sin = tables(3, 2)
    for x, out in (
        (randn(3, 4, grad=True), torch.zeros(3, 4)),
        (randn(3, 4), torch.zeros(3, 4, requires_grad=True)),
    ):
        with pytest.raises(RuntimeError, match="out= does not take part in autograd"):
            rotary.rotate(x, cos, sin, out=out, layout="half")
        assert not out.any()
    leaf = randn(3, 4, grad=True)
    with torch.no_grad():
        rotary.rotate(
            leaf, cos, sin, out=leaf, layout="half"
        )  # as torch: allowed where nothing is recorded
    torch.testing.assert_close(leaf, formula(randn(3, 4), cos, sin), rtol=0, atol=0)


@pytest.mark.parametrize("positions", [None, torch.arange(3)])
def test_out_is_seen_by_tensors_saved_for_backward(positions):
    x, weight = randn(3, 4), randn(3, 4, grad=True)
    product = (weight * x).sum()
    rotary.rotate(x, *tables(3, 2), positions=positions, out=x, layout="half")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("positions", [None, torch.arange(3)])
def test_an_inference_tensor_is_not_written_outside_inference_mode(positions):
    with torch.inference_mode():
        out = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="inference tensor"):
        rotary.rotate(randn(3, 4), *tables(3, 2), positions=positions, out=out, layout="half")
    assert not out.any()
    with torch.inference_mode():
        rotary.rotate(randn(3, 4), *tables(3, 2), positions=positions, out=out, layout="half")
    assert out.any()


# --- transforms ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_functorch(layout):
    x, tangent, (cos, sin) = randn(3, 2, 5, 8), randn(3, 2, 5, 8, seed=1), tables(5, 4)

    def ours(x):
        return rotary.rotate(x, cos, sin, **ways(layout))

    def theirs(x):
        return formula(x, cos, sin, **ways(layout))

    def same(a, b):
        torch.testing.assert_close(a, b, rtol=0, atol=0)

    same(torch.vmap(ours)(x), theirs(x))
    same(torch.vmap(ours, in_dims=1, out_dims=1)(x), theirs(x))
    per_row = torch.vmap(torch.func.grad(lambda x: ours(x).square().sum()))
    torch.testing.assert_close(per_row(x), 2 * x, rtol=0, atol=1e-6)  # the norm is kept
    same(torch.func.jvp(ours, (x,), (tangent,)), (theirs(x), theirs(tangent)))
    same(torch.func.jacrev(ours)(x[0, :1]), torch.func.jacfwd(theirs)(x[0, :1]))
    with torch.autograd.forward_ad.dual_level():
        dual = ours(torch.autograd.forward_ad.make_dual(x, tangent))
        same(torch.autograd.forward_ad.unpack_dual(dual).tangent, theirs(tangent))
    same(torch.vmap(lambda x, c, s: rotary.rotate(x, c, s, **ways(layout)))(
        x, cos.expand(3, 5, 4), sin.expand(3, 5, 4)), theirs(x))  # fmt: skip


class Attention(torch.nn.Module):
    """A layer that calls `apply`, as models do."""

    def __init__(self, spec, **options):
        super().__init__()
        self.spec, self.options = spec, options
        self.project = torch.nn.Linear(8, 8, bias=False)

    def forward(self, q, k):
        return rotary.apply(self.spec, self.project(q), k, **self.options)


def test_functional_call_and_deepcopy():
    module, q, k = Attention(SPECS["default"]), randn(1, 2, 5, 8), randn(1, 1, 5, 8)
    want = module(q, k)
    copied = copy.deepcopy(module)
    assert copied.spec == module.spec
    weights = dict(module.named_parameters())
    for got in (copied(q, k), torch.func.functional_call(module, weights, (q, k))):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    grads = torch.func.grad(
        lambda w: torch.func.functional_call(module, w, (q, k))[0].square().sum()
    )(weights)
    (theirs,) = torch.autograd.grad(want[0].square().sum(), module.project.weight)
    torch.testing.assert_close(grads["project.weight"], theirs)


# --- the compiler ---

# Inductor may fuse a product and a sum, and computes its own cosine: a few units of float32
CLOSE = {"rtol": 0, "atol": 2e-6}


def compiled(function, backend="inductor", dynamic=None):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic), counter


def assert_compiled_equals_eager(
    function, arguments, close=CLOSE, backend="inductor", dynamic=None
):
    fast, counter = compiled(function, backend, dynamic)
    for xs in arguments:
        results = [call(*xs) for call in (fast, function)]
        torch.testing.assert_close(*results, **close)
        wanted = [x for x in xs if x.requires_grad]
        grads = [
            torch.autograd.grad([r.square().sum() for r in result], wanted) if wanted else ()
            for result in results
        ]
        # a gradient passes the rotation twice
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    return counter.frame_count


def lengths(*sizes, grad=True):
    return [(randn(2, 4, n, 8, grad=grad), randn(2, 2, n, 8, seed=1, grad=grad)) for n in sizes]


@pytest.mark.parametrize(
    ("layout", "backend"), [("half", "inductor"), ("interleaved to half", "aot_eager")]
)
def test_compile_rotate_is_the_same_operator(layout, backend):
    cos, sin = tables(40, 3)
    rows = torch.arange(39, -1, -1)

    def call(q, k):
        way = ways(layout) | {"rotary_dim": 6, "start": 1}
        n = q.shape[-2]
        turned = rotary.rotate((q, k), cos[:n], sin[:n], **way)
        return (*turned, rotary.rotate(q, cos, sin, positions=rows[:n], **way))

    same = {"rtol": 0, "atol": 0}
    assert assert_compiled_equals_eager(call, lengths(5, 9, 16, 33, 40), same, backend) <= 2


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "exact") for name in SPECS), ("llama3", "float32")]
)
def test_compile_apply(name, precision):
    spec = SPECS[name]
    # what Inductor makes of angles is alike for every spec: another spec is other constants
    backend = "inductor" if name == "llama3" else "aot_eager"
    seq_len = 64 if spec.depends_on_length else None
    # one of them for a length first and then for any, the others at once for any
    is_first_static = (name, precision) == ("llama3", "exact")

    def call(q, k):
        return rotary.apply(spec, q, k, precision=precision, seq_len=seq_len)

    sizes, dynamic = lengths(5, 9, 16, 33, 64), None if is_first_static else True
    count = assert_compiled_equals_eager(call, sizes, backend=backend, dynamic=dynamic)
    assert count <= (2 if is_first_static else 1)


def test_compile_apply_at_positions():
    def call(q, k):
        return rotary.apply(SPECS["llama3"], q, k, positions=torch.arange(q.shape[-2]) + 1_000_000)

    assert assert_compiled_equals_eager(call, lengths(5, 9, 16), dynamic=True) == 1


def test_compile_out_writes_in_place():
    cos, sin = tables(5, 4)

    def call(q, k):
        rotary.rotate((q, k), cos, sin, out=(q, k), layout="half")
        return q, k

    (xs,) = lengths(5, grad=False)
    want = [formula(x, cos, sin) for x in xs]
    fast, _ = compiled(call)
    fast(*xs)
    torch.testing.assert_close(xs, tuple(want), rtol=0, atol=0)


def test_compile_with_tables_that_learn():
    x, (cos, sin) = randn(2, 3, 5, 8, grad=True), tables(5, 4, grad=True)
    assert_compiled_equals_eager(
        lambda *a: (rotary.rotate(*a, layout="half"),), [(x, cos, sin)], backend="aot_eager"
    )


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_compile_asks_for_the_length_where_it_matters(name):
    def call(q, positions):
        return rotary.apply(SPECS[name], q, positions=positions)

    fast, _ = compiled(call)
    xs, said = (randn(1, 1, 5, 8), torch.arange(5)), "needs seq_len as a whole number"
    if torch.__version__.startswith(
        "2.8."
    ):  # where no break is allowed it hides what an error says
        with pytest.raises(ValueError, match=said):
            torch.compile(call, backend="eager")(*xs)
        return
    with pytest.raises(RuntimeError) as raised:  # Dynamo wraps it in an error of its own
        fast(*xs)
    causes = [raised.value]
    while (below := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(below)
    assert any(said in str(cause) for cause in causes)


# --- modes and global state ---


def test_autocast_leaves_tables_in_float32():
    cos, sin = rotary.cos_sin(SPECS["default"], torch.arange(5))
    with torch.autocast("cpu", torch.bfloat16):
        inside = rotary.cos_sin(SPECS["default"], torch.arange(5))
        torch.testing.assert_close(inside, (cos, sin), rtol=0, atol=0)
        for dtype in (torch.float32, torch.bfloat16):
            x = randn(2, 5, 8, dtype=dtype)
            assert rotary.rotate(x, cos, sin, layout="half").dtype == dtype
            learning = rotary.rotate(x, cos.clone().requires_grad_(), sin, layout="half")
            assert learning.dtype == dtype
            want = formula(x.float(), cos, sin).to(dtype)
            torch.testing.assert_close(learning, want, rtol=0, atol=0)


def test_tables_made_in_inference_mode_serve_training():
    spec = Rotary(head_dim=8, base=12_345.0)  # not in the cache yet
    x = randn(1, 2, 5, 8)
    with torch.inference_mode():
        inside = rotary.apply(spec, x)
        assert inside.is_inference()
    learning = x.clone().requires_grad_()
    result = rotary.apply(spec, learning)
    result.square().sum().backward()
    torch.testing.assert_close(result, inside.clone(), rtol=0, atol=0)
    torch.testing.assert_close(learning.grad, 2 * x, rtol=0, atol=1e-6)  # the norm is kept
    with torch.inference_mode():
        torch.testing.assert_close(rotary.apply(spec, x), inside, rtol=0, atol=0)


@pytest.fixture
def _other_defaults():
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_other_defaults")
@pytest.mark.parametrize("precision", ["exact", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_global_default_device_and_dtype_change_nothing(name, precision):
    spec = Rotary.from_dict(SPECS[name].to_dict() | {"base": 777.0})  # not in the cache yet
    x = torch.ones(1, 2, 5, 8, dtype=torch.float32, device="cpu")
    positions = torch.arange(5, device="cpu")
    results = [
        rotary.apply(spec, x, precision=precision),
        rotary.apply(spec, x, positions=positions, precision=precision),
        *rotary.cos_sin(spec, positions, precision),
        *rotary.cos_sin(spec, positions.double() / 2),
    ]
    learning = x.clone().requires_grad_()
    results += torch.autograd.grad(rotary.apply(spec, learning).sum(), learning)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    for result in results:
        assert (result.device.type, result.dtype) == ("cpu", torch.float32)
        assert result.isfinite().all()
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0], rotary.apply(spec, x, precision=precision))


@pytest.mark.usefixtures("_other_defaults")
def test_global_default_device_inside_compile():
    x = torch.ones(1, 2, 5, 8, dtype=torch.float32, device="cpu")
    fast, _ = compiled(lambda x: rotary.apply(SPECS["llama3"], x))
    result = fast(x)
    assert result.device.type == "cpu"
    torch.set_default_device(None)
    torch.testing.assert_close(result, rotary.apply(SPECS["llama3"], x), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["default", "llama3", "partial"])
def test_meta_and_fake_tensors_have_the_right_form(name, dtype):
    spec = SPECS[name]
    meta = torch.empty(2, 3, 5, 8, dtype=dtype, device="meta")
    with FakeTensorMode():
        fake = torch.empty(2, 3, 5, 8, dtype=dtype)
        inside = rotary.apply(spec, fake), rotary.apply(spec, fake, positions=torch.arange(5))
    for x, results in (
        (fake, (*inside, rotary.rotate(fake, *fake_tables(fake, spec), spec))),
        (meta, (rotary.apply(spec, meta), rotary.apply(spec, meta, out=meta))),
    ):
        for result in results:
            assert (result.shape, result.dtype, result.device) == (x.shape, x.dtype, x.device)
    cos, _ = rotary.cos_sin(spec, torch.empty(2, 5, dtype=torch.int64, device="meta"))
    assert (cos.shape, cos.dtype, cos.device.type) == ((2, 5, spec.rotary_dim // 2),
                                                       torch.float32, "meta")  # fmt: skip


def fake_tables(fake, spec):
    mode = fake.fake_mode
    return tuple(map(mode.from_tensor, rotary.cos_sin(spec, torch.arange(5))))


def test_a_tensor_without_elements_has_gradients():
    for shape in ((0, 2, 5, 8), (2, 2, 0, 8), (2, 0, 5, 8)):
        x = torch.empty(shape, requires_grad=True)
        result = rotary.apply(SPECS["default"], x)
        result.sum().backward()
        assert result.shape == x.grad.shape == x.shape


def test_devices_do_not_mix():
    x, (cos, sin) = randn(3, 4), tables(3, 2)
    for arguments in ((x.to("meta"), cos, sin), (x, cos.to("meta"), sin),
                      (x, cos, sin.to("meta")), ((x, x.to("meta")), cos, sin)):  # fmt: skip
        with pytest.raises(ValueError, match=r"one device: (cpu|meta) and (cpu|meta)"):
            rotary.rotate(*arguments, layout="half")
    with pytest.raises(ValueError, match="one device"):
        rotary.rotate(x, cos, sin, out=x.to("meta"), layout="half")


def test_negated_views_are_read_as_what_they_say():
    """torch negates the imaginary part of a conjugate lazily: memory holds the opposite."""
    x, (cos, sin) = randn(3, 4), tables(3, 2)
    lazy = torch._neg_view(x)
    torch.testing.assert_close(
        rotary.rotate(lazy, cos, sin, layout="half"), formula(-x, cos, sin), rtol=0, atol=0
    )
    back = rotary.rotate(x, cos, torch._neg_view(sin), layout="half")
    torch.testing.assert_close(back, formula(x, cos, -sin), rtol=0, atol=0)


# --- tensors whose memory is elsewhere ---


IN_PLACE = """
import torch, rotary
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
inside = FakeTensorMode()

def shard(x):
    return distribute_tensor(x, mesh, [Replicate()])

for kind, place in (
    ("fake tensors outside their mode", FakeTensorMode().from_tensor),
    ("DTensor", shard),
    ("fake tensors in their mode", inside.from_tensor),
):
    x, cos, sin = torch.randn(3, 4), torch.randn(3, 2), torch.randn(3, 2)
    want = rotary.rotate(x, cos, sin, layout="half")
    x, cos, sin = map(place, (x, cos, sin))
    if kind.endswith("in their mode"):
        inside.__enter__()
    try:
        got = rotary.rotate(x, cos, sin, layout="half", out=x)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        print("refused", kind, error, flush=True)
    else:
        assert got is x and got.shape == want.shape
        if hasattr(got, "full_tensor"):
            torch.testing.assert_close(got.full_tensor(), want)
        print("done", kind, flush=True)
"""


def test_out_of_a_tensor_without_memory_here():
    """The loops write to an address: without one there must be an error or another way."""
    command = [sys.executable, "-c", IN_PLACE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()  # after a line of Gloo in torch 2.8
    said = [line for line in lines if line.startswith(("refused", "done"))]
    assert done.returncode == 0, (said, done.stderr or f"ended by signal {-done.returncode}")
    assert len(said) == 3


def test_a_program_is_not_compiled_again_when_a_library_is_imported(monkeypatch):
    """What is of which type is asked for without a variable for each entry of sys.modules."""
    programs = CompileCounterWithBackend("eager")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    spec, q = Rotary(8), torch.ones(1, 2, 3, 8)
    turned = torch.compile(
        lambda q: rotary.apply(spec, q, seq_dim=-2), backend=programs, fullgraph=True
    )
    turned(q)
    monkeypatch.setitem(sys.modules, "mlx.core", ModuleType("mlx.core"))
    turned(q)
    assert programs.frame_count == 1
