"""What Inductor makes of a call on an H100, which is not here: CPU tensors play those of a GPU."""

import re
import sys
from types import SimpleNamespace

import interpreter
import pytest
import torch
from published import scaled
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
)
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import rotary
from rotary import Rotary
from rotary.kernels.torch import angles as torch_tables
from rotary.kernels.torch import gpu as torch_gpu
from rotary.kernels.torch import launch as torch_launch
from rotary.kernels.torch import operators as torch_operators
from rotary.kernels.torch import ready as torch_ready
from rotary.kernels.torch import route as kernel
from rotary.kernels.torch import state as torch_state

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton")

SPEC = Rotary(head_dim=128, base=5e5)
H100 = SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, warp_size=32, gcnArchName="",
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, total_memory=80 << 30,
    max_threads_per_block=1024, shared_memory_per_block=49152, L2_cache_size=50 << 20,
    shared_memory_per_block_optin=232448, is_integrated=0, clock_rate=1_755_000,
    memory_clock_rate=2_619_000, memory_bus_width=5120,
)  # fmt: skip


def formula_kernel(dtypes=(torch.float32, torch.float16, torch.bfloat16)):
    def rotate(xs, cos, sin, rows, geometry, out):
        results = torch_launch.formula(xs, cos, sin, rows, geometry)
        for target, result in zip(out or (), results, strict=out is not None):
            target.copy_(result)
        return results if out is None else tuple(out)

    def rotate_exact(xs, turns, factor, positions, geometry, out):
        results = torch_gpu.formula_at(xs, turns, factor, positions, geometry)
        for target, result in zip(out or (), results, strict=out is not None):
            target.copy_(result)
        return results if out is None else tuple(out)

    from rotary.kernels.triton import kernel as real

    return SimpleNamespace(
        DTYPES=dtypes, rotate=rotate, rotate_exact=rotate_exact, prepared=lambda *_: None,
        record=real.record,
    )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors are taken for those of a GPU, where a kernel rotates by the formula."""
    played = formula_kernel()
    for module in (torch_state, torch_tables, torch_launch, torch_ready, torch_operators, kernel):
        monkeypatch.setattr(module, "is_on_gpu", lambda x: True)
    for module in (torch_launch, torch_gpu, torch_operators, kernel):
        monkeypatch.setattr(module, "gpu_kernel", lambda device: played)
    target_an_h100(monkeypatch)
    interpreter.mended(monkeypatch)


def target_an_h100(monkeypatch):
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(driver, "_active", target)


def play_an_h100(monkeypatch):
    """Inductor finds an H100 and Triton, and constants stay where they are."""
    for each in (CudaInterface, CudaInterface.Worker):
        monkeypatch.setattr(each, "get_device_properties", staticmethod(lambda *_: H100))
        monkeypatch.setattr(each, "current_device", staticmethod(lambda: 0))
    answers = {
        "is_available": True,
        "get_compute_capability": 90,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(CudaInterface, name, staticmethod(lambda *_, says=answer, **__: says))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: H100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(_triton, "triton_hash_with_backend", lambda: "0")
    named = GraphLowering.constant_name
    monkeypatch.setattr(
        GraphLowering, "constant_name", lambda graph, name, device: named(graph, name, None)
    )
    target_an_h100(monkeypatch)


class Played(torch.fx.Interpreter):
    """Runs a graph, and the launches in it in Triton's interpreter."""

    def call_function(self, target, args, kwargs):
        if target is not triton_kernel_wrapper_functional:
            return super().call_function(target, args, kwargs)
        written = {name: kwargs["kwargs"][name].clone() for name in kwargs["tensors_to_clone"]}
        fixed = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
        # it has no instructions of a device, and fuses nothing
        given = {**kwargs["kwargs"], **fixed, **written, "ROUNDED": False}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "_active", None)
            interpreter.kernel.kernel[tuple(kwargs["grid"][0])](**given)
        return written


def compiled(function, *inputs, dynamic=None):
    """The graphs that are handed to a compiler, and what the compiled function returns."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(Played(graph).run)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )  # fmt: skip
    torch._dynamo.reset()
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    return graphs, run(*inputs)


def on_cuda(value):
    if isinstance(value, FakeTensor):
        value.fake_device = torch.device("cuda:0")
    elif isinstance(value, (tuple, list)):
        for each in value:
            on_cuda(each)


def lowered(graph):
    """What Inductor writes for a graph whose tensors are then on a GPU."""
    for node in graph.graph.nodes:
        on_cuda(node.meta.get("val"))
        if node.op == "call_function" and "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = next(each.fake_mode for each in inputs if isinstance(each, FakeTensor))
    _triton.has_triton.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch, V.set_fake_mode(mode):
            play_an_h100(patch)
            post_grad_passes(graph, is_inference=True)
            lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env)
            with V.set_graph_handler(lowering), DebugContext():
                lowering.run(*inputs)
                return lowering.codegen()[0].value
    finally:
        _triton.has_triton.cache_clear()


def launches(source):
    """How often the program calls a kernel of Inductor, and ours; no operator hides one."""
    assert "torch.ops.rotary.rotate" not in source
    return len(re.findall(r"triton_\w+\.run\(", source)), len(
        re.findall(r"\bkernel_\d+\.run\(", source)
    )


def check_no_sine_over_channels(source):
    """A loop with float64 runs over (batch, seq, pairs), without a number of q or k."""
    kernels = source.split("async_compile.triton(")[1:]
    for each in kernels:
        signature = re.search(r"'signature': \{(.*?)\}", each).group(1)
        assert not ("libdevice." in each and "*bf16" in signature)
    assert sum(each.count("libdevice.cos(") for each in kernels) <= 1


def q_and_k(dtype=torch.bfloat16, grad=False):
    torch.manual_seed(0)
    return [torch.randn(2, heads, 4, 128).to(dtype).requires_grad_(grad) for heads in (2, 1)]


POSITIONS = torch.arange(8).reshape(2, 4)


AXES = Rotary(head_dim=128, axes=rotary.positions.sections(24, 20, 20), layout="interleaved")
YARN = scaled("yarn", 128, 8.0, 4096, sign=-1)  # fmt: skip
SPECS = {"plain": SPEC, "three axes": AXES, "amplitude, backwards": YARN}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", SPECS)
def test_apply_is_one_launch_without_tables_forward_and_backward(name):
    spec, (q, k) = SPECS[name], q_and_k(torch.float32, grad=True)
    positions = POSITIONS if spec.num_axes == 1 else torch.stack((POSITIONS,) * 3, -1)

    def call(q, k, positions):
        return rotary.apply(spec, q, k, positions=positions, seq_dim=-2)

    graphs, results = compiled(call, q, k, positions)
    upstream = [torch.randn_like(x) for x in results]
    grads = torch.autograd.grad(results, (q, k), upstream)
    for graph in graphs:
        source = lowered(graph)
        assert launches(source) == (0, 1)  # no kernel of Inductor, none of whose sines are float64
        assert "libdevice." not in source
    tables = rotary.cos_sin(spec, positions)
    wanted = rotary.rotate((q, k), *tables, spec)
    turned_back = rotary.rotate(upstream, *tables, spec, conjugate=True)
    torch.testing.assert_close((*results, *grads), (*wanted, *turned_back), rtol=0, atol=4e-6)


@pytest.mark.usefixtures("gpu")
def test_apply_without_positions_and_with_two_lengths():
    def call(q, k):
        return rotary.apply(SPEC, q, k)

    graphs, _ = compiled(call, *q_and_k())
    assert launches(lowered(graphs[0])) == (0, 1)
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    call = torch.compile(call, backend=counted, fullgraph=True, dynamic=True)
    for seq in (5, 9, 17):
        x = torch.randn(1, 4, seq, 128)
        got, want = call(x, x + 1), rotary.apply(SPEC, x, x + 1)
        assert all(map(torch.equal, got, want))
    assert counted.frame_count == 1


@pytest.mark.usefixtures("gpu")
def test_what_the_operator_of_exact_angles_does_not_take_is_tables_or_the_formula():
    """Lengths that are known when the program runs, fractions, and transforms of torch.func."""
    by_length = scaled("dynamic", 128, 2.0, 16)
    x = torch.randn(2, 4, 4, 128)
    calls = [
        lambda x: rotary.apply(by_length, x),
        lambda x: rotary.apply(by_length, x, positions=POSITIONS, seq_dim=-2, seq_len=4),
        lambda x: rotary.apply(SPEC, x, positions=POSITIONS + 0.5, seq_dim=-2),
        lambda x: torch.vmap(lambda x: rotary.apply(SPEC, x))(x),
        lambda x: torch.func.grad(lambda x: rotary.apply(SPEC, x).square().sum())(x),
    ]
    for call in calls:
        torch._dynamo.reset()
        torch.testing.assert_close(
            torch.compile(call, backend="eager", fullgraph=True, dynamic=True)(x), call(x),
            rtol=0, atol=2e-6,
        )  # fmt: skip


@pytest.mark.usefixtures("gpu")
def test_layers_share_the_tables_of_one_graph():
    def call(x, y, positions):
        cos, sin = rotary.cos_sin(SPEC, positions)
        for _ in range(3):
            x, y = rotary.rotate((x, y), cos, sin, SPEC)
        return x, y

    (graph,), _ = compiled(call, *q_and_k(), POSITIONS)
    source = lowered(graph)
    assert launches(source) == (1, 3)
    check_no_sine_over_channels(source)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("rows", [None, POSITIONS], ids=["tables", "rows of tables"])
def test_rotation_by_given_tables_is_one_launch(rows):
    """Inductor tells Triton that all memory is aligned to 16 bytes: it is read 128 bits at a time,
    as `test_gpu_code.py` sees."""
    tables = rotary.cos_sin(SPEC, POSITIONS if rows is None else torch.arange(8))
    q, k = q_and_k(torch.float32)

    def call(q, k, cos, sin, rows):
        return rotary.rotate((q, k), cos, sin, SPEC, positions=rows, seq_dim=-2)

    (graph,), results = compiled(call, q, k, *tables, rows)
    source = lowered(graph)
    assert launches(source) == (0, 1)
    for operand in range(7):
        assert f"({operand},): [['tt.divisibility', 16]]" in source
    assert re.search(r"'ROUNDED': True", source)
    torch.testing.assert_close(results, call(q, k, *tables, rows), rtol=0, atol=0)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("is_in_place", [False, True])
def test_one_tensor_is_what_the_launch_writes(is_in_place):
    """Q stands for k, which has no heads then; both outputs must not be one tensor."""
    (q, _), tables = q_and_k(torch.float32), rotary.cos_sin(SPEC, POSITIONS)
    want = rotary.rotate(q, *tables, SPEC)

    def call(q, cos, sin):
        return rotary.rotate(q, cos, sin, SPEC, out=q if is_in_place else None)

    (graph,), got = compiled(call, q, *tables)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert torch.equal(q, want) == is_in_place
    source = lowered(graph)
    assert launches(source) == (0, 1)
    assert ".clone" not in source


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("why", ["a length is left open", "ROCm"])
def test_what_inductor_cannot_see_is_an_operator(why, monkeypatch):
    """The tile depends on the sizes, and rounding products by an instruction on the device."""
    if why == "ROCm":
        monkeypatch.setattr(torch.version, "hip", "7.2")
    tables = rotary.cos_sin(SPEC, POSITIONS)

    def call(q, k, cos, sin, positions):
        q, k = rotary.rotate((q, k), cos, sin, SPEC)
        return rotary.apply(SPEC, q, k, positions=positions, seq_dim=-2)

    given = *q_and_k(), *tables, POSITIONS
    (graph,), results = compiled(call, *given, dynamic=why != "ROCm")
    names = [str(node.target) for node in graph.graph.nodes if "rotary" in str(node.target)]
    assert names == ["rotary.rotate.default", "rotary.rotate_at.default"]
    torch.testing.assert_close(results, call(*given), rtol=0, atol=0)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("spec", [SPEC, Rotary(head_dim=128, rotary_dim=32)], ids=["all", "part"])
def test_in_place_nothing_is_copied(spec):
    q, k = q_and_k(torch.float32)
    want = rotary.rotate((q, k), *rotary.cos_sin(spec, POSITIONS), spec)

    def call(q, k, positions):
        rotary.apply(spec, q, k, positions=positions, out=(q, k))

    (graph,), _ = compiled(call, q, k, POSITIONS)
    torch.testing.assert_close((q, k), want, rtol=0, atol=2e-6)
    source = lowered(graph)
    assert launches(source) == (0, 1)
    assert ".clone" not in source
    assert "empty_strided" not in source.split("def call")[1]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("is_new", [True, False], ids=["new outputs", "out="])
def test_channels_that_are_not_rotated_are_copied_by_the_launch(is_new):
    spec = Rotary(head_dim=128, rotary_dim=32, start=64)
    q, k = q_and_k(torch.float32)
    tables = rotary.cos_sin(spec, POSITIONS)
    want = rotary.rotate((q, k), *tables, spec)

    def call(q, k, *out):
        return rotary.rotate((q, k), *tables, spec, out=out or None)

    out = () if is_new else (torch.full_like(q, 7.0), torch.full_like(k, 7.0))
    (graph,), got = compiled(call, q, k, *out)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert launches(lowered(graph)) == (0, 1)


@pytest.mark.parametrize(
    ("dtype", "has_triton", "way"),
    [
        (torch.bfloat16, True, "operator"),
        (torch.float64, True, "formula"),
        (torch.bfloat16, False, "formula"),
    ],
)
def test_a_compiled_call_on_a_gpu_is_the_operator_where_the_kernel_takes_it(
    dtype, has_triton, way, monkeypatch
):
    played = formula_kernel() if has_triton else None
    monkeypatch.setattr(torch_launch, "gpu_kernel", lambda device: played)
    monkeypatch.setattr(kernel, "is_tracing", lambda: True)
    with FakeTensorMode():
        x = torch.empty(2, 3, 5, 8, dtype=dtype, device="cuda")
        table = torch.empty(5, 4, device="cuda")
    assert kernel.route((x,), table, table) == way
