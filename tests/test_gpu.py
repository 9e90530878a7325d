"""On a CUDA device, and skipped without one: sizes, races, graphs, streams, and no waiting.

`compute-sanitizer --tool memcheck python -m pytest tests/test_gpu.py -m gpu -k "not huge"` looks at
every access as well; so does `--tool racecheck`.
"""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from kernel_cases import LAYOUTS, way
from model_rotations import turned, turned_complex, turned_pairs

import rotary
from rotary import Rotary, positions
from rotary.kernels import numpy as reference
from rotary.kernels.geometry import Options, geometry_of
from rotary.kernels.torch import launch as torch_launch
from rotary.kernels.torch import route as kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),  # what the compiler advises
    pytest.mark.usefixtures("poisoned"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SAME = ["half", "interleaved"]
SPECS = {
    "half": Rotary(head_dim=128, base=5e5),
    "interleaved": Rotary(head_dim=128, base=5e5, layout="interleaved"),
    "a slice": Rotary(head_dim=80, rotary_dim=32, start=16),
    "mixed": Rotary(head_dim=64, layout="interleaved", out_layout="half"),
    "backwards": Rotary(head_dim=64, sign=-1),
    "three axes": Rotary(head_dim=128, axes=positions.interleaved_sections(24, 20, 20)),
}


def randn(*shape, seed=0, dtype=torch.float32, grad=False):
    generator = torch.Generator("cuda").manual_seed(seed)
    made = torch.randn(shape, generator=generator, device="cuda")
    return made.to(dtype).requires_grad_(grad)


def tables(*shape):
    angles = randn(*shape, seed=9).double()
    return angles.cos().float(), angles.sin().float()


def wanted(x, cos, sin, options, conjugate=False):
    """The reference implementation, on the host, in float32, rounded once to the dtype of x."""
    cos, sin = (table.cpu().numpy() for table in (cos, sin))
    wide = x.detach().cpu().float().contiguous().numpy()
    (result,) = reference.rotate(
        (wide,), cos, sin, None, options._replace(conjugate=conjugate), None
    )
    return torch.from_numpy(result).to(x.dtype)


def same(got, want):
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.fixture
def launches():
    """The launches of the kernel in a test, as Triton tells a profiler of them."""
    assert torch_launch.gpu_kernel(torch.device("cuda:0")) is not None, "Triton cannot be loaded"
    from triton import knobs

    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    yield seen
    knobs.runtime.launch_enter_hook.remove(seen.append)


@contextmanager
def never_waiting():
    """Whatever waits for the device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- the route ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_q_and_k_are_one_launch_with_the_bits_of_the_law(layout, dtype, launches):
    options = Options(*layout, 64, 16, -3)
    xs = randn(2, 67, 32, 96, dtype=dtype), randn(2, 67, 8, 96, seed=1, dtype=dtype)
    cos, sin = tables(67, 32)
    for conjugate in (False, True):
        for _ in range(2):  # the second call takes the short way
            got = rotary.rotate(xs, cos, sin, conjugate=conjugate, **way(options))
            for x, y in zip(xs, got, strict=True):
                same(y, wanted(x, cos, sin, options, conjugate))
    assert len(launches) == 4


@pytest.mark.parametrize("name", SPECS)
def test_apply_is_exact_up_to_the_last_32_bit_position(name, launches):
    spec = SPECS[name]
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    ids = np.random.default_rng(0).integers(0, 2**31, (2, 33, *axes))
    q, k = randn(2, 8, 33, spec.head_dim), randn(2, 2, 33, spec.head_dim, seed=1)
    cos, sin = map(torch.from_numpy, rotary.cos_sin(spec, ids))
    for conjugate in (False, True):
        layouts = (spec.layout, spec.out_layout)[:: -1 if conjugate else 1]
        options = Options(*layouts, spec.rotary_dim, spec.start)
        got = rotary.apply(spec, q, k, positions=torch.from_numpy(ids).cuda(), conjugate=conjugate)
        for x, y in zip((q, k), got, strict=True):
            want = wanted(x, cos, sin, options, conjugate)
            torch.testing.assert_close(y.cpu(), want, rtol=0, atol=4e-6)
    assert len(launches) == 2


@pytest.mark.parametrize("layout", SAME)
def test_tables_and_exact_angles_give_what_float64_gives(layout, launches):
    spec = Rotary(head_dim=128, base=5e5, layout=layout)
    x = randn(1, 4, 500, 128)
    inv_freq = torch.tensor(rotary.inv_freq(spec)[0])
    radians = torch.arange(500).double()[:, None] * inv_freq
    want = wanted(x, radians.cos().float(), radians.sin().float(), Options(layout))
    cos, sin = rotary.cos_sin(spec, torch.arange(500, device="cuda"))
    for y in (rotary.apply(spec, x), rotary.rotate(x, cos, sin, layout=layout)):
        torch.testing.assert_close(y.cpu(), want, rtol=0, atol=4e-6)
    assert len(launches) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_two_orders_for_gradients_of_any_memory(layout, launches):
    options, back = Options(*layout, 48, 8), Options(*layout[::-1], 48, 8)
    x, (cos, sin) = randn(2, 4, 31, 64, grad=True), tables(31, 24)
    upstream = randn(2, 31, 64, 8, seed=1, grad=True)
    strided = upstream.permute(0, 3, 1, 2)[:, ::2]
    y = rotary.rotate(x, cos, sin, **way(options))
    (first,) = torch.autograd.grad(y, x, strided, create_graph=True)
    same(first.detach(), wanted(strided, cos, sin, back, True))
    third = randn(1, 1, 1, 64, seed=2).expand(2, 4, 31, 64)
    (second,) = torch.autograd.grad(first, upstream, third)
    same(second.permute(0, 3, 1, 2)[:, ::2], wanted(third, cos, sin, options))
    assert not second.permute(0, 3, 1, 2)[:, 1::2].any()
    (ones,) = torch.autograd.grad(rotary.rotate(x, cos, sin, **way(options)).sum(), x)
    same(ones, wanted(torch.ones(2, 4, 31, 64), cos, sin, back, True))
    assert len(launches) == 5


@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_apply_turn_back(name, launches):
    spec = SPECS[name]
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    ids = torch.randint(0, 2**31, (2, 9, *axes), device="cuda")
    x, upstream = randn(2, 4, 9, spec.head_dim, grad=True), randn(2, 4, 9, spec.head_dim, seed=1)
    y = rotary.apply(spec, x, positions=ids)
    (grad,) = torch.autograd.grad(y, x, upstream)
    one, other = (y.double() * upstream).sum(), (x.double() * grad).sum()  # <R x, u> = <x, R' u>
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    assert len(launches) == 2


def test_what_the_kernel_does_not_take_is_the_formula(launches):
    x, (cos, sin) = randn(2, 3, 5, 8), tables(5, 4)
    wide = x.double()
    arrays = (wide.cpu().numpy(),), cos.cpu().numpy(), sin.cpu().numpy()
    want = reference.rotate(*arrays, None, Options(), None)[0]
    same(rotary.rotate(wide, cos, sin, layout="half"), torch.from_numpy(want))
    same(
        torch.vmap(lambda x: rotary.rotate(x, cos, sin, layout="half"))(x),
        wanted(x, cos, sin, Options()),
    )
    learning = [table.clone().requires_grad_() for table in (cos, sin)]
    same(rotary.rotate(x, *learning, layout="half").detach(), wanted(x, cos, sin, Options()))
    assert launches == []


def test_rows_outside_the_tables_are_nan_compiled_or_not(launches):
    x, (cos, sin) = randn(1, 2, 5, 8), tables(9, 4)
    rows = torch.tensor([3, -1, 8, 9, 0], device="cuda")
    is_inside = (rows >= 0) & (rows < 9)
    torch._dynamo.reset()

    def call(x, rows):
        return rotary.rotate(x, cos, sin, positions=rows, layout="half")

    for y in (call(x, rows), torch.compile(call, fullgraph=True)(x, rows)):
        assert y[:, :, ~is_inside].isnan().all()
        assert y[:, :, is_inside].isfinite().all()
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_compiled_calls_equal_eager_ones(name, dtype):
    spec = SPECS[name]
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    ids = torch.randint(0, 100_000, (2, 9, *axes), device="cuda")
    x = randn(2, 4, 9, spec.head_dim, dtype=dtype, grad=True)
    torch._dynamo.reset()

    def call(x):
        return rotary.apply(spec, x, positions=ids)

    fast = torch.compile(call, fullgraph=True)
    close = {"rtol": 0.02 if dtype == torch.bfloat16 else 0, "atol": 1e-5}
    torch.testing.assert_close(fast(x), call(x), **close)
    grads = [torch.autograd.grad(f(x).float().square().sum(), x)[0] for f in (fast, call)]
    torch.testing.assert_close(*grads, rtol=close["rtol"], atol=0.02)


def test_a_compiled_call_in_place_is_one_launch(launches):
    q, k, (cos, sin) = randn(2, 4, 9, 64), randn(2, 1, 9, 64, seed=1), tables(9, 32)
    want = [wanted(x, cos, sin, Options()) for x in (q, k)]
    torch._dynamo.reset()
    torch.compile(
        lambda q, k: rotary.rotate((q, k), cos, sin, out=(q, k), layout="half"), fullgraph=True
    )(q, k)
    for x, y in zip((q, k), want, strict=True):
        same(x, y)
    assert len(launches) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    xs = [randn(2, heads, 5, 8, dtype=dtype) for heads in (4, 2)]
    geometry = geometry_of(((2, 4, 5, 8), (2, 2, 5, 8)), (5, 3), None, Options("half", None, 6, 1))
    arguments = xs, *tables(5, 3), None, *kernel.flat(geometry)
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(torch.ops.rotary.rotate.default, arguments)
    out = [torch.empty_like(x) for x in xs]
    torch.library.opcheck(torch.ops.rotary.rotate_out.default, (*arguments, out))


def test_tensors_of_two_devices_are_refused_before_the_launch(launches):
    x, (cos, sin) = randn(5, 8), tables(5, 4)
    geometry = geometry_of(((5, 8),), (5, 4), None, Options())
    rest = None, *kernel.flat(geometry)
    for mixed in (([x], cos.cpu(), sin.cpu()), ([x.cpu()], cos, sin)):
        with pytest.raises((RuntimeError, ValueError), match="device"):
            torch.ops.rotary.rotate(*mixed, *rest)
        with pytest.raises(ValueError, match="one device"):
            rotary.rotate(mixed[0][0], *mixed[1:], layout="half")
    assert launches == []


# --- memory ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thousand_rotations_in_place_give_one_result(layout):
    """A thread that writes what another has still to read is seen now and then only."""
    options = {"layout": layout[0], "out_layout": layout[1], "seq_dim": -3}
    xs = [randn(2, 512, heads, 80, seed=heads, dtype=torch.bfloat16) for heads in (32, 8)]
    cos, sin = tables(512, 40)
    want = rotary.rotate(xs, cos, sin, **options)
    for _ in range(1000):
        copies = [x.clone() for x in xs]
        rotary.rotate(copies, cos, sin, out=copies, **options)
        assert all(torch.equal(a, b) for a, b in zip(copies, want, strict=True))


def test_packed_projections_in_place_leave_the_values_alone():
    block = randn(2, 33, 48, 128, dtype=torch.bfloat16)
    before, (cos, sin) = block.clone(), tables(33, 64)
    q, k = block[:, :, :32], block[:, :, 32:40]
    want = [wanted(x, cos, sin, Options(seq_dim=-3)) for x in (q, k)]
    rotary.rotate((q, k), cos, sin, seq_dim=-3, out=(q, k), layout="half")
    for x, y in zip((q, k), want, strict=True):
        same(x, y)
    assert torch.equal(block[:, :, 40:], before[:, :, 40:])


def test_outputs_that_overlap_are_refused():
    memory, (cos, sin) = randn(6, 8), tables(5, 4)
    with pytest.raises(ValueError, match="out overlaps an input"):
        rotary.rotate(memory[:5], cos, sin, out=memory[1:], layout="half")
    with pytest.raises(ValueError, match="share memory"):
        rotary.rotate(memory[:5], cos, sin, out=memory[:1].expand(5, 8), layout="half")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 7, 72), (1, 5, 9, 80), (3, 1, 1, 6), (2, 4, 5, 130)])
def test_nothing_beside_is_written_and_nothing_beside_is_read(shape, layout):
    """The input lies amid NaN, the output amid sevens."""
    wide = tuple(size + 2 for size in shape)
    inner = tuple(slice(1, -1) for _ in shape)
    source = torch.full(wide, torch.nan, device="cuda")
    target = torch.full(wide, 7.0, device="cuda")
    source[inner] = randn(*shape)
    pairs = shape[-1] // 2 - 1
    cos, sin = tables(shape[2], pairs)
    options = Options(*layout, 2 * pairs, 1)
    rotary.rotate(source[inner], cos, sin, out=target[inner], **way(options))
    same(target[inner], wanted(source[inner], cos, sin, options))
    target[inner] = 7
    assert bool((target == 7).all())


def test_in_place_allocates_nothing():
    q, k, (cos, sin) = randn(2, 32, 64, 128), randn(2, 8, 64, 128), tables(64, 64)
    ids = torch.arange(64, device="cuda")
    calls = (
        lambda: rotary.rotate((q, k), cos, sin, out=(q, k), layout="half"),
        lambda: rotary.apply(SPECS["half"], q, k, positions=ids, out=(q, k)),
    )
    for call in calls:
        call()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        call()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# --- sizes ---


def needs(gigabytes):
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    return pytest.mark.skipif(free < gigabytes * 2**30, reason=f"needs {gigabytes} GB of memory")


HUGE = 1_100_000  # tokens: more than 524 280, and with 16 heads of 128 more than 2^31 numbers


def assert_huge(got, cos, sin, layout):
    """Every number against the formula in torch, a part at a time; x was all ones."""
    for part in torch.arange(HUGE, device="cuda").split(50_000):
        one = (cos[part] - sin[part])[:, None]
        other = (cos[part] + sin[part])[:, None]
        pair = torch.stack((one, other), -1).flatten(-2)
        want = torch.cat((one, other), -1) if layout == "half" else pair
        error = (got[part].float() - want).abs().max()
        assert error <= 2**-7  # one step of bfloat16 below 2, and the angle


@needs(16)
@pytest.mark.parametrize("layout", SAME)
def test_huge_tensors_by_exact_angles(layout):
    spec = Rotary(head_dim=128, layout=layout)
    x = torch.ones(HUGE, 16, 128, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    cos, sin = rotary.cos_sin(spec, torch.arange(HUGE, device="cuda"))
    rotary.apply(spec, x, seq_dim=0, out=x)
    assert_huge(x, cos, sin, layout)


@needs(24)
@pytest.mark.parametrize("layout", SAME)
def test_huge_tensors_by_tables_and_rows(layout):
    cos, sin = rotary.cos_sin(Rotary(head_dim=128), torch.arange(HUGE, device="cuda"))
    x = torch.ones(HUGE, 16, 128, dtype=torch.bfloat16, device="cuda")
    y = rotary.rotate(x, cos, sin, layout=layout, seq_dim=0)
    assert_huge(y, cos, sin, layout)
    del y
    rows = torch.arange(HUGE, device="cuda").flip(0)
    rotary.rotate(x, cos, sin, positions=rows, layout=layout, seq_dim=0, out=x)
    assert_huge(x.flip(0), cos, sin, layout)


@needs(12)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_huge_steps_along_each_axis(axis):
    step, width = 2**30 + 8, 64
    shape, strides = [1, 1, 1, width], [width, width, width, 1]
    shape[axis], strides[axis] = 4, step
    block = torch.zeros(3 * step + width, dtype=torch.float16, device="cuda")
    x = block.as_strided(shape, strides)
    x.copy_(randn(*shape))
    cos, sin = tables(shape[1], width // 2)
    want = wanted(x, cos, sin, Options(seq_dim=-3))
    same(rotary.rotate(x, cos, sin, seq_dim=-3, layout="half").contiguous(), want)
    rotary.rotate(x, cos, sin, seq_dim=-3, out=x, layout="half")
    same(x.contiguous(), want)


# --- the device runs on by itself ---


def test_no_call_waits_for_the_device():
    xs = randn(2, 8, 5, 128), randn(2, 2, 5, 128, seed=1)
    (cos, sin), ids = tables(9, 64), torch.arange(5, device="cuda")
    learning = [x.clone().requires_grad_() for x in xs]

    def calls():
        rotary.rotate(xs, cos[:5], sin[:5], layout="half")
        rotary.rotate(xs, cos, sin, positions=ids, layout="half")
        rotary.rotate(xs, cos[:5], sin[:5], out=xs, layout="half")
        rotary.apply(SPECS["half"], *xs)
        rotary.apply(SPECS["half"], *xs, positions=ids)
        rotary.apply(SPECS["half"], *xs, precision="float32")
        for precision in ("exact", "float32"):
            rotary.cos_sin(SPECS["half"], ids, precision)
        rotary.apply(SPECS["three axes"], *xs, positions=ids[:, None].expand(5, 3))
        for q, k in (
            rotary.apply(SPECS["half"], *learning),
            rotary.rotate(learning, cos, sin, positions=ids, layout="half"),
        ):
            torch.autograd.grad(q.sum() + k.sum(), learning)

    calls()  # compiled, and what is kept on the device is there
    with never_waiting():
        calls()


def test_waiting_would_be_noticed():
    with never_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        randn(3).sum().item()


def test_a_captured_graph_runs_again_at_other_positions_and_tables():
    spec = SPECS["half"]
    q, k = randn(3, 8, 1, 128), randn(3, 2, 1, 128, seed=1)
    ids = torch.tensor([[5], [9], [700]], device="cuda")
    cos, sin = tables(1000, 64)
    outs = [torch.empty_like(x) for x in (q, k, q)]

    def calls():
        rotary.apply(spec, q, k, positions=ids, out=outs[:2])
        rotary.rotate(q, cos, sin, positions=ids, out=outs[2], layout="half")
        return rotary.apply(spec, q, k, positions=ids)

    rotary.warm_up(spec, q, k, positions=ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    for step in (0, 1, 290):
        ids.add_(step)
        cos.mul_(0.5)
        q.add_(1)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        want = rotary.apply(spec, q, k, positions=ids)
        for pair in (captured, outs[:2]):
            assert all(torch.equal(a, b) for a, b in zip(pair, want, strict=True))
        assert torch.equal(outs[2], rotary.rotate(q, cos, sin, positions=ids, layout="half"))


def test_tables_that_a_capture_makes_are_for_its_graph_alone():
    """Until the graph runs they are empty; a call by itself must not find them in a cache."""
    spec, q = Rotary(head_dim=64, base=31_000.0), randn(1, 2, 300, 64)
    rotary.apply(spec, q[:, :, :5], precision="float32")  # frequencies go to the device
    want = rotary.apply(spec, q.cpu(), precision="float32")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rotary.apply(spec, q, precision="float32")
    got = rotary.apply(spec, q, precision="float32").cpu()
    assert (got - want).abs().max() < 1e-4
    graph.replay()
    assert torch.equal(captured.cpu(), got)


def test_a_call_follows_the_current_stream():
    x, (cos, sin) = randn(64, 32, 128), tables(64, 64)
    want = wanted(x * 3, cos, sin, Options(seq_dim=0))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # cycles, in which another stream would run ahead
        y = rotary.rotate(x * 3, cos, sin, seq_dim=0, layout="half")
    stream.synchronize()
    same(y, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_the_device_of_the_tensors_counts_not_the_current_one():
    x, (cos, sin) = randn(5, 8), tables(5, 4)
    want = wanted(x, cos, sin, Options())
    other = [t.to("cuda:1") for t in (x, cos, sin)]
    for _ in range(2):
        same(rotary.rotate(*other, layout="half"), want)
    assert rotary.apply(Rotary(head_dim=8), other[0]).device == torch.device("cuda:1")
    with pytest.raises(ValueError, match="one device"):
        rotary.rotate(x, *other[1:], layout="half")


@pytest.mark.parametrize("dtype", [None, "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("name", ["half", "interleaved", "a slice"])
def test_a_fused_call_is_that_of_the_host(name, dtype):
    spec = SPECS[name]
    q, k, v = (randn(2, heads, 37, spec.head_dim, seed=heads) for heads in (8, 2, 2))
    weights = randn(spec.head_dim, seed=4), randn(2 * spec.head_dim, seed=5)
    slots = torch.randperm(128, device="cuda")[:74]
    memory = torch.zeros(2, 8, 16, 2, spec.head_dim, device="cuda")

    def call(device, is_stored):
        norm = rotary.Norm(*[weight.to(device) for weight in weights], 1e-6)
        cache = rotary.KVCache(*memory.to(device), slots.to(device)) if is_stored else None
        xs = [x.to(device) for x in (q, k, v)]
        scale = 1.0 if dtype is None else "token"
        results = rotary.fused(*xs, spec, norm=norm, cache=cache, dtype=dtype, scale=scale)
        each = [y if isinstance(y, tuple) else (y,) for y in results if y is not None]
        kept = [] if cache is None else [cache.k, cache.v]
        return [y.float().cpu() for group in each for y in group] + [y.cpu() for y in kept]

    step = {None: 1e-5, "int8": 1.0, "float8_e4m3fn": 32.0}[dtype]  # one number of the type apart
    for is_stored in (False, True):
        for y, z in zip(call("cuda", is_stored), call("cpu", is_stored), strict=True):
            torch.testing.assert_close(y, z, rtol=1e-5, atol=step)


# --- a patched model ---


MODELS = {
    turned: ("half", lambda cos, sin: [torch.cat((table, table), -1) for table in (cos, sin)]),
    turned_pairs: (
        "interleaved",
        lambda cos, sin: [table.repeat_interleave(2, -1) for table in (cos, sin)],
    ),
    turned_complex: (
        "interleaved",
        lambda cos, sin: [torch.complex(cos.float(), sin.float())],
    ),
}


def replaced(function):
    from rotary.integrations.rotations import conventions_of, replacement_of

    return replacement_of(function, *conventions_of(function))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("seq", [1, 37])
@pytest.mark.parametrize("function", MODELS)
def test_a_patched_model_rotates_by_its_own_tables(function, seq, mode):
    layout, widened = MODELS[function]
    with mode():
        q = randn(2, 8, seq, 128, dtype=torch.bfloat16, grad=mode is torch.enable_grad)
        k = randn(2, 2, seq, 128, seed=1, dtype=torch.bfloat16)
        cos, sin = (table.bfloat16() for table in tables(2, seq, 64))
        ours, given = replaced(function), widened(cos, sin)
        got = ours(q, k, *given)
        has_copies = any(vars(table) for table in given)
        assert has_copies == (mode is torch.enable_grad)  # for gradients they are made, and kept
        for x, y in zip((q, k), got, strict=True):
            same(y.detach(), wanted(x, cos.float(), sin.float(), Options(layout, seq_dim=-2)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("seq", [1, 37])
@pytest.mark.parametrize("function", MODELS)
def test_norms_of_a_patched_model_are_in_the_same_pass(function, seq, mode):
    from rotary.integrations import norms

    layout, widened = MODELS[function]
    xs = [randn(2, seq, heads, 128, seed=heads, dtype=torch.bfloat16) for heads in (8, 2)]
    both = [torch.nn.RMSNorm(128, eps=1e-6, device="cuda", dtype=torch.bfloat16) for _ in xs]
    with mode():
        for norm in both:
            norm.weight.uniform_(0.5, 2)
        cos, sin = (table.bfloat16() for table in tables(2, seq, 64))
        given = widened(cos, sin)
        for _ in range(2):
            left = [norms.norm_or_defer(*each)[1] for each in zip(both, xs, strict=True)]
            assert [each.norm for each in left] == both
            heads_first = [x.transpose(1, 2) for x in xs]
            got = replaced(function)(*heads_first, *given, rotary_norms=left)
            assert not any(vars(table) for table in given)  # no copies are made
            for x, norm, y in zip(heads_first, both, got, strict=True):
                wide = x.double()
                wide *= norm.weight * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
                want = wanted(wide, cos.double(), sin.double(), Options(layout, seq_dim=-2))
                torch.testing.assert_close(y.cpu().double(), want, rtol=2**-8, atol=1e-3)
            xs = [x.clone() for x in xs]


@pytest.mark.parametrize("has_grad", [False, True])
def test_a_captured_patched_model_reads_tables_that_change(has_grad):
    """Copies of the tables that were made before the graph would be those of the first step."""
    q = randn(1, 8, 1, 128, dtype=torch.bfloat16, grad=has_grad)
    k = randn(1, 2, 1, 128, seed=1, dtype=torch.bfloat16)
    ours, widened = replaced(turned), MODELS[turned][1]
    given = widened(*(table.bfloat16() for table in tables(1, 1, 64)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours(q, k, *given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(q, k, *given)
    for step in range(3):
        for table in given:
            table.mul_(0.5)
        graph.replay()
        want = ours(q, k, *[table.clone() for table in given])
        assert all(map(torch.equal, captured, want)), step
