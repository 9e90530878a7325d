"""`rotary.prepare`: the results of the whole call, for arrays of one form and no others."""

from functools import partial

import numpy as np
import pytest
from libraries import if_installed
from published import scaled

import rotary
from rotary import Rotary, apply, cos_sin, prepare, rotate

jnp = if_installed("jax.numpy")
torch = if_installed("torch")
torch_ready = if_installed("rotary.kernels.torch.ready")
forward_ad = if_installed("torch.autograd").forward_ad

SPEC = Rotary(head_dim=8, rotary_dim=6, start=2, layout="interleaved", out_layout="half")
PLAIN = Rotary(head_dim=8)
POSITIONS = torch.tensor([[5], [70_000]])


def tensors(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, 1, 8, generator=generator).to(dtype) for heads in (3, 2))


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [PLAIN, SPEC])
def test_steps_are_the_whole_call(spec, dtype):
    cos, sin = cos_sin(spec, POSITIONS)
    rows = torch.tensor([[1], [0]])
    table = cos_sin(spec, torch.tensor([3, 9]))
    xs = tensors(dtype)
    steps = (
        (prepare(rotate, xs, cos, sin, spec), (cos, sin), {}),
        (prepare(rotate, xs, *table, spec, positions=rows), table, {"positions": rows}),
    )
    for seed in range(3):
        xs = tensors(dtype, seed)
        for step, tables, more in steps:
            assert_same(step(xs, *tables, **more), rotate(xs, *tables, spec, **more))
    step = prepare(apply, spec, *xs, positions=POSITIONS)
    for shift in range(3):
        ids = POSITIONS + shift
        assert_same(step(*xs, positions=ids), apply(spec, *xs, positions=ids))


def test_a_single_array_comes_back_alone():
    q, _ = tensors()
    cos, sin = cos_sin(PLAIN, POSITIONS)
    assert torch.equal(prepare(rotate, q, cos, sin, PLAIN)(q, cos, sin), rotate(q, cos, sin, PLAIN))
    step = prepare(apply, PLAIN, q, positions=POSITIONS, out=q.clone())
    out = torch.empty_like(q)
    assert step(q, positions=POSITIONS, out=out) is out
    assert torch.equal(out, apply(PLAIN, q, positions=POSITIONS))


def test_another_number_of_outputs_is_refused():
    xs, tables = tensors(), cos_sin(PLAIN, POSITIONS)
    ours = prepare(apply, PLAIN, *xs, positions=POSITIONS, out=xs)
    steps = (
        lambda out: ours(*xs, positions=POSITIONS, out=out),
        lambda out: prepare(apply, PLAIN, *xs, positions=POSITIONS)(
            *xs, positions=POSITIONS, out=out
        ),
        lambda out: prepare(rotate, xs, *tables, PLAIN, out=xs)(xs, *tables, out=out),
    )
    for step in steps:
        for out in (xs[0], xs[:1], (*xs, xs[0])):
            with pytest.raises(
                ValueError, match="out must hold one array for each of the 2 inputs"
            ):
                step(out)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_step_is_compiled_whatever_lengths_are_open(dynamic):
    torch._dynamo.reset()
    xs, tables = tensors(), cos_sin(PLAIN, POSITIONS)
    step = prepare(rotate, xs, *tables, PLAIN)
    options = {"fullgraph": True, "dynamic": dynamic, "backend": "aot_eager"}
    compiled = torch.compile(lambda q, k, c, s: step((q, k), c, s), **options)
    assert_same(compiled(*xs, *tables), rotate(xs, *tables, PLAIN))


def test_in_place_and_nothing_is_written_before():
    xs = tensors()
    want = apply(PLAIN, *xs, positions=POSITIONS)
    own = tuple(x.clone() for x in xs)
    step = prepare(apply, PLAIN, *own, positions=POSITIONS, out=own)
    assert_same(own, xs)
    assert all(a is b for a, b in zip(step(*own, positions=POSITIONS, out=own), own, strict=True))
    assert_same(own, want)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda q, k, p: {"q": q[:1]},
            r"x\[0\] float32 \(2, 3, 1, 8\).*got float32 \(1, 3, 1, 8\)",
        ),
        (lambda q, k, p: {"k": k.double()}, r"x\[1\] float32.*got float64"),
        (lambda q, k, p: {"q": q.mT.contiguous().mT}, None),
        (lambda q, k, p: {"q": q.transpose(0, 1).contiguous().transpose(0, 1)}, "strides"),
        (lambda q, k, p: {"k": None}, r"x\[1\].*got none"),
        (lambda q, k, p: {"positions": None}, "positions.*got none"),
        (lambda q, k, p: {"positions": p.int()}, "positions int64.*got int32"),
        (lambda q, k, p: {"positions": p.tolist()}, "positions int64.*got list"),
        (lambda q, k, p: {"out": (q, k)}, r"out\[0\] none"),
    ],
)
def test_another_form_is_refused_before_anything_is_written(change, named):
    q, k = tensors()
    step = prepare(apply, PLAIN, q, k, positions=POSITIONS)
    given = {"q": q, "k": k, "positions": POSITIONS, **change(q, k, POSITIONS)}
    before = q.clone(), k.clone()
    if named is None:  # an axis of size 1 may have any stride
        step(**given)
    else:
        with pytest.raises(ValueError, match=f"prepared for .*{named}.*rotary.apply"):
            step(**given)
    assert_same((q, k), before)


def test_a_step_says_that_it_takes_arrays():
    q, k = tensors()
    step = prepare(apply, PLAIN, q, k, positions=POSITIONS)
    with pytest.raises(TypeError, match=r"pass arrays as to rotary.apply, got a tuple of a torch"):
        step((q, k), positions=POSITIONS)


def test_what_the_whole_call_refuses_a_step_refuses():
    xs = tensors()
    cos, sin = cos_sin(PLAIN, torch.arange(4))
    rows = torch.tensor([[1], [0]])
    by_row = prepare(rotate, xs, cos, sin, PLAIN, positions=rows, out=xs)
    before = tuple(x.clone() for x in xs)
    with pytest.raises(ValueError, match="the tables have 4 rows"):
        by_row(xs, cos, sin, positions=rows + 3, out=xs)
    at = prepare(apply, PLAIN, *xs, positions=POSITIONS)
    with pytest.raises(ValueError, match="positions must be >= 0"):
        at(*xs, positions=-POSITIONS)
    q = torch.zeros(2, 4, 1, 8)
    separate = prepare(apply, PLAIN, q[:, :3], positions=POSITIONS, out=q[:, :3].clone())
    with pytest.raises(ValueError, match=r"strides"):
        separate(q[:, :3], positions=POSITIONS, out=q[:, 1:])
    assert_same(xs, before)


def test_overlapping_memory_is_refused():
    memory = torch.zeros(2 * 2 * 3 * 8 + 8)
    first, second = (memory[n : n + 48].view(2, 3, 1, 8) for n in (0, 8))
    step = prepare(apply, PLAIN, first, positions=POSITIONS, out=memory[48:96].view(2, 3, 1, 8))
    step(first, positions=POSITIONS, out=memory[48:96].view(2, 3, 1, 8))
    with pytest.raises(ValueError, match="out overlaps"):
        step(first, positions=POSITIONS, out=second)


@pytest.mark.filterwarnings("ignore")  # of torch.jit.trace, that what it records is fixed
def test_a_gradient_and_a_transform_take_the_whole_call():
    xs = tensors()
    step = prepare(apply, PLAIN, *xs, positions=POSITIONS)
    leaves = tuple(x.clone().requires_grad_() for x in xs)
    sum(y.sum() for y in step(*leaves, positions=POSITIONS)).backward()
    want = tuple(x.clone().requires_grad_() for x in xs)
    sum(y.sum() for y in apply(PLAIN, *want, positions=POSITIONS)).backward()
    assert_same([x.grad for x in leaves], [x.grad for x in want])
    with torch.no_grad():
        assert_same(step(*leaves, positions=POSITIONS), apply(PLAIN, *xs, positions=POSITIONS))
    compiled = torch.compile(lambda q, k, p: step(q, k, positions=p), backend="eager")
    wanted = apply(PLAIN, *xs, positions=POSITIONS)
    assert all(map(torch.allclose, compiled(*xs, POSITIONS), wanted))
    traced = torch.jit.trace(lambda q, k: step(q, k, positions=POSITIONS), xs, check_trace=False)
    others = tensors(seed=1)
    wanted = apply(PLAIN, *others, positions=POSITIONS)
    assert all(map(torch.allclose, traced(*others), wanted))
    mapped = torch.vmap(lambda q: prepare(apply, PLAIN, q, positions=POSITIONS[0])(
        q, positions=POSITIONS[0]))(xs[0])  # fmt: skip
    assert torch.allclose(mapped, apply(PLAIN, xs[0], positions=POSITIONS[:1]))


def test_a_step_prepared_without_gradients_gives_them_later():
    xs = tuple(x.requires_grad_() for x in tensors())
    with torch.no_grad():
        step = prepare(apply, PLAIN, *xs, positions=POSITIONS)
        assert not step(*xs, positions=POSITIONS)[0].requires_grad
    assert step(*xs, positions=POSITIONS)[0].requires_grad


def test_forward_mode_keeps_its_tangents():
    q, _ = tensors()
    step = prepare(apply, PLAIN, q, positions=POSITIONS)
    with forward_ad.dual_level():
        result = step(forward_ad.make_dual(q, q + 1), positions=POSITIONS)
        tangent = forward_ad.unpack_dual(result).tangent
    assert torch.allclose(tangent, apply(PLAIN, q + 1, positions=POSITIONS))


@pytest.mark.parametrize("repeat", ["step", "call"])
def test_memory_of_x_under_another_name(repeat):
    """A layout cannot be changed in place row by row: such a call goes another way."""
    q, _ = tensors()
    want = apply(SPEC, q, positions=POSITIONS)
    out = torch.empty_like(q)
    step = prepare(apply, SPEC, q, positions=POSITIONS, out=out)
    if repeat == "call":
        step = partial(apply, SPEC)
    step(q, positions=POSITIONS, out=out)
    own = q.clone()
    step(own, positions=POSITIONS, out=own.view_as(own))
    assert torch.equal(own, want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_does_not_end_the_process():
    q, k = tensors()
    nested = torch.nested.nested_tensor([torch.randn(3, 1, 8), torch.randn(2, 1, 8)])
    step = prepare(apply, PLAIN, q, k, positions=POSITIONS)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        step(nested, k, positions=POSITIONS)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_other_libraries(convert):
    q, k = (convert(x.numpy()) for x in tensors())
    ids = convert(POSITIONS.numpy())
    cos, sin = cos_sin(SPEC, ids)
    step = prepare(rotate, (q, k), cos, sin, SPEC)
    for got, want in zip(step((q, k), cos, sin), rotate((q, k), cos, sin, SPEC), strict=True):
        assert type(got) is type(want)
        assert np.array_equal(got, want)
    at = prepare(apply, PLAIN, q, positions=ids)
    assert np.array_equal(at(q, positions=ids), apply(PLAIN, q, positions=ids))
    with pytest.raises(ValueError, match="prepared for"):
        at(q[:1], positions=ids[:1])


def test_a_schedule_that_depends_on_the_length():
    spec = scaled("dynamic", 8, 2.0, 16)
    q, _ = tensors()
    ids = torch.tensor([[40], [7]])
    for seq_len in (None, 64):
        step = prepare(apply, spec, q, positions=ids, seq_len=seq_len)
        for shift in (0, 30):
            want = apply(spec, q, positions=ids + shift, seq_len=seq_len)
            assert torch.equal(step(q, positions=ids + shift), want)


def test_without_positions_and_with_the_arithmetic_of_transformers():
    q = torch.randn(1, 2, 5, 8)
    assert torch.equal(prepare(apply, PLAIN, q)(q), apply(PLAIN, q))
    step = prepare(apply, PLAIN, q, positions=torch.arange(5), precision="float32")
    want = apply(PLAIN, q, positions=torch.arange(5), precision="float32")
    assert torch.equal(step(q, positions=torch.arange(5)), want)


def test_wrong_preparations():
    q, _ = tensors()
    cos, sin = cos_sin(PLAIN, POSITIONS)
    with pytest.raises(TypeError, match=r"prepare\(rotary.apply, spec, q, k"):
        prepare(rotary.cos_sin, PLAIN, q)
    with pytest.raises(TypeError, match=r"spec, ...\); got a tuple$"):  # and no line of numbers
        prepare((q, q), cos, sin, PLAIN)
    with pytest.raises(TypeError, match=r"^rotary.apply: missing a required argument: 'q'"):
        prepare(apply, PLAIN)
    with pytest.raises(TypeError, match=r"^rotary.rotate: got an unexpected keyword .* 'base'"):
        prepare(rotate, q, cos, sin, PLAIN, base=10.0)
    with pytest.raises(TypeError, match=r"^spec, the first argument, must be a Rotary, got Tensor"):
        prepare(apply, q, q)
    with pytest.raises(TypeError, match="does not guess"):
        prepare(rotate, q, cos, sin)
    with pytest.raises(ValueError, match="x must hold at least one array"):
        prepare(rotate, (), cos, sin, PLAIN)
    pytest.importorskip("numba", reason="without loops the first call refuses it")
    with pytest.raises(ValueError, match="does not fit x"):
        prepare(rotate, q, cos[:, :0], sin[:, :0], PLAIN)


def test_a_warm_up_for_negative_positions():
    q, k = tensors()
    rotary.warm_up(PLAIN, q, k, positions=-POSITIONS, allow_negative=True)
    with pytest.raises(ValueError, match="positions must be >= 0, got -70000"):
        rotary.warm_up(PLAIN, q, k, positions=-POSITIONS)


UNFIT = {
    "head_dim": (lambda a: {"q": a(2, 6)}, ValueError, "must be head_dim=8 of the spec, got 6"),
    "k": (lambda a: {"k": a(1, 2, 5, 8)}, ValueError, "may differ in the number of heads only"),
    "positions": (lambda a: {"positions": np.arange(5), "seq_dim": -2}, ValueError, "5 against 3"),
    "a number": (lambda a: {"positions": 3}, TypeError, "positions must be an array or a list"),
    "dtype": (lambda a: {"q": a(1, 2, 3, 8, kind=np.int32)}, TypeError, "x must be one of float32"),
    "out": (lambda a: {"out": a(1, 2, 3, 6)}, (TypeError, ValueError), "out(= cannot| must be)"),
    "library": (lambda a: {"k": [[1.0]]}, TypeError, "all arrays must be of one library"),
    "spec": (lambda a: {"spec": 8}, TypeError, "spec, the first argument, must be a Rotary"),
    "axes": (lambda a: {"spec": Rotary(8, axes=(0, 1) * 2)}, ValueError, "2 axes needs positions"),
}
LIBRARIES = {
    "numpy": np.asarray,
    "torch": torch.from_numpy,
    "jax": jnp.asarray,
    "mlx": if_installed("mlx.core").array,
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_before_the_first_step(name, library):
    change, error, message = UNFIT[name]

    def array(*shape, kind=np.float32):
        return LIBRARIES[library](np.ones(shape, kind))

    given = {"spec": PLAIN, "q": array(1, 2, 3, 8), **change(array)}
    with pytest.raises(error, match=message):
        rotary.warm_up(**given)
    with pytest.raises(error, match=message):
        prepare(apply, **given)


def test_without_the_guards_of_torch_it_is_the_whole_call(monkeypatch):
    monkeypatch.setattr(torch_ready, "TensorGuards", None)
    xs = tensors()
    step = prepare(apply, PLAIN, *xs, positions=POSITIONS)
    assert_same(step(*xs, positions=POSITIONS), apply(PLAIN, *xs, positions=POSITIONS))
