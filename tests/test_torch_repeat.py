"""A call like one before takes a short way: only if everything that matters is the same."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from rotary import rotate
from rotary.kernels.torch import private as torch_private
from rotary.kernels.torch import ready as torch_ready

pytest.importorskip("numba", reason="calls of the loops are kept, and no others")
WANTED = {"atol": 1e-6, "rtol": 1e-6}


def operands(dtype=torch.float32, rows=1):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 1, 8, generator=generator).to(dtype) for heads in (4, 2))
    angles = torch.randn(rows, 1, 4, generator=generator)
    return q, k, angles.cos(), angles.sin()


def formula(x, cos, sin):
    u, v = x.float().chunk(2, dim=-1)
    return torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1).to(x.dtype)


def new_outputs(q, k, cos, sin):
    return rotate((q, k), cos, sin, layout="half")


def into(q, k, cos, sin):
    out = torch.zeros_like(q), torch.zeros_like(k)
    assert rotate((q, k), cos, sin, layout="half", out=out)[0] is out[0]
    return out


def in_place(q, k, cos, sin):
    own = q.detach().clone(), k.detach().clone()
    return rotate(own, cos, sin, layout="half", out=own)


def by_row(q, k, cos, sin):
    tables = [torch.cat((table[0], -table[0])) for table in (cos, sin)]
    return rotate((q, k), *tables, layout="half", positions=torch.zeros(1, dtype=torch.int64))


FORMS = {form.__name__: form for form in (new_outputs, into, in_place, by_row)}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Two calls of plain tensors without gradients: the second one takes the short way."""
    monkeypatch.setattr(torch_ready, "recent", {})
    form, (q, k, cos, sin) = FORMS[request.param], operands()
    with torch.no_grad():
        form(q, k, cos, sin)
        assert len(torch_ready.recent) == 1
        with monkeypatch.context() as patched:
            patched.setattr(torch_ready, "on_cpu", lambda *_: pytest.fail("worked out again"))
            results = form(q, k, cos, sin)
    torch.testing.assert_close(results, (formula(q, cos, sin), formula(k, cos, sin)), **WANTED)
    return form


def negated(x):
    """A view whose bytes are not its values."""
    return torch.view_as_complex(torch.stack((x, -x), -1)).conj().imag


VARIANTS = {
    "a negated view": lambda q, k, cos, sin: (negated(q), k, cos, sin),
    "other strides": lambda q, k, *tables: (q.mT.contiguous().mT, k, *tables),
    "a strided last axis": lambda q, k, *tables: (q.repeat_interleave(2, -1)[..., ::2], k, *tables),
    "another dtype": lambda q, k, cos, sin: (q.half(), k.half(), cos, sin),
    "more heads": lambda q, k, cos, sin: (torch.cat((q, q), 1), k, cos, sin),
    "another table": lambda q, k, cos, sin: (q, k, sin, cos),
    "a parameter": lambda q, k, cos, sin: (torch.nn.Parameter(q), k, cos, sin),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_differs_is_rotated_as_itself(form, name):
    q, k, cos, sin = VARIANTS[name](*operands())
    with torch.no_grad():
        results = form(q, k, cos, sin)
    wanted = formula(q, cos, sin), formula(k, cos, sin)
    torch.testing.assert_close(results, wanted, atol=1e-3, rtol=1e-3)


def test_gradients_are_noticed():
    q, k, cos, sin = operands()
    q.requires_grad_()
    with torch.no_grad():
        new_outputs(q, k, cos, sin)
    result, _ = new_outputs(q, k, cos, sin)
    (grad,) = torch.autograd.grad(result.sum(), q)
    torch.testing.assert_close(grad, formula(torch.ones_like(q), cos, -sin), **WANTED)
    with torch.no_grad():
        into(q, k, cos, sin)
    with pytest.raises(RuntimeError, match="does not take part in autograd"):
        into(q, k, cos, sin)


def test_forward_mode_is_noticed():
    q, k, cos, sin = operands()
    into(q, k, cos, sin)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        result = torch.autograd.forward_ad.unpack_dual(new_outputs(dual, k, cos, sin)[0])
        torch.testing.assert_close(result.tangent, formula(torch.ones_like(q), cos, sin), **WANTED)
        with pytest.raises(RuntimeError, match="forward-mode"):
            into(dual, k, cos, sin)


def test_wrong_tables_are_still_refused(form):
    q, k, cos, sin = operands()
    with pytest.raises(ValueError, match=r"one shape|rotate 6 of the 8"):
        form(q, k, cos, sin[..., :3])
    with pytest.raises(TypeError, match="one dtype"):
        form(q, k.double(), cos, sin)


def test_a_transform_after_plain_calls(form):
    q, k, cos, sin = operands()
    one = torch.vmap(lambda q, k: new_outputs(q, k, cos[0], sin[0]))(q[None], k[None])
    torch.testing.assert_close(one[0][0], formula(q, cos, sin), **WANTED)
    gradient = torch.func.grad(lambda w: (w * new_outputs(q, k, cos, sin)[0]).sum())(torch.ones(8))
    torch.testing.assert_close(gradient, formula(q, cos, sin).sum((0, 1, 2)), **WANTED)


def test_a_dispatch_mode_sees_operators():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    new_outputs(*operands())
    with torch.no_grad(), Watch():
        new_outputs(*operands())
    assert any("mul" in str(each) for each in seen)


@pytest.mark.filterwarnings("ignore")  # of torch.jit.trace, that what it records is fixed
def test_a_recording_sees_operators():
    q, k, cos, sin = operands()
    new_outputs(q, k, cos, sin)
    program = torch.jit.trace(lambda q: new_outputs(q, k, cos, sin), (q,))
    torch.testing.assert_close(program(2 * q)[0], formula(2 * q, cos, sin), **WANTED)


def test_row_numbers_outside_of_the_table_after_right_ones():
    q, k, cos, sin = operands()
    tables, own = [torch.cat((table[0],) * 3) for table in (cos, sin)], (q.clone(), k.clone())
    for row in (0, 2):
        rotate((q, k), *tables, layout="half", positions=torch.tensor([row]))
    for row in (-1, 3, 2**40):
        for out in (None, own):
            with pytest.raises(ValueError, match=f"positions run from {row} to {row}, the tables"):
                rotate(own, *tables, layout="half", positions=torch.tensor([row]), out=out)
    assert torch.equal(own[0], q), "something was written"


def test_outputs_that_share_memory_after_some_that_do_not():
    q, k, cos, sin = operands()
    memory = torch.zeros(4 * 8 + 2 * 8)
    before = memory[: 4 * 8].view_as(q)
    for start in (32, 31, 30, 1, 0):  # elements between the two outputs
        out = before, memory[start : start + 16].view_as(k)
        if start == 32:
            rotate((q, k), cos, sin, layout="half", out=out)
            memory.zero_()
            continue
        with pytest.raises(ValueError, match="out overlaps"):
            rotate((q, k), cos, sin, layout="half", out=out)
        assert not memory.any(), "something was written"
    own = torch.cat((q.flatten(), torch.zeros(8)))
    for shift in (0, 1, 8):  # in place, then beside it
        out = own[shift : shift + 32].view_as(q), torch.zeros_like(k)
        x = own[:32].view_as(q)
        if shift:
            with pytest.raises(ValueError, match="out overlaps"):
                rotate((x, k), cos, sin, layout="half", out=out)
        else:
            rotate((x, k), cos, sin, layout="half", out=out)
            torch.testing.assert_close(x, formula(q, cos, sin), **WANTED)


def test_slices_of_one_projection_in_place(monkeypatch):
    """q and k lie in one buffer, token by token: their reach overlaps, their bytes do not."""
    compared, both = [], torch.empty(5, 6, 8)
    check_memory = torch_ready.check_memory
    monkeypatch.setattr(
        torch_ready, "check_memory", lambda *given: (compared.append(1), check_memory(*given))
    )
    q, k = both[None, :, :4].transpose(1, 2), both[None, :, 4:].transpose(1, 2)
    table, rows = torch.randn(2, 9, 4), torch.arange(5)
    for _ in range(3):
        both.copy_(torch.randn(5, 6, 8))
        for given, tables in (({}, table[:, :5]), ({"positions": rows}, table)):
            wanted = [formula(x, *table[:, :5]) for x in (q, k)]
            rotate((q, k), *tables, layout="half", seq_dim=-2, out=(q, k), **given)
            torch.testing.assert_close((q, k), tuple(wanted), **WANTED)
    assert len(compared) == 2
    before = both.clone()
    with pytest.raises(ValueError, match="positions run from 5 to 9"):
        rotate((q, k), *table, layout="half", seq_dim=-2, out=(q, k), positions=rows + 5)
    assert torch.equal(both, before)


def test_what_ordinary_tensors_keep_in_inference_mode_is_not_for_inference_tensors_outside():
    """To a guard these are alike."""
    q, k, cos, sin = operands()
    out = torch.zeros_like(q), torch.zeros_like(k)
    with torch.inference_mode():
        rotate((q, k), cos, sin, layout="half", out=out)
        q, k, cos, sin = (x.clone() for x in (q, k, cos, sin))
        out = tuple([torch.zeros_like(x) for x in out])
    with pytest.raises(RuntimeError, match="inference tensor"):
        rotate((q, k), cos, sin, layout="half", out=out)
    assert not any([x.any() for x in out])


def test_an_inference_tensor_is_written_in_inference_mode_alone():
    with torch.inference_mode():
        q, k, cos, sin = operands()
        out = torch.zeros_like(q), torch.zeros_like(k)
        for _ in range(2):
            rotate((q, k), cos, sin, layout="half", out=out)
    with pytest.raises(RuntimeError, match="inference"):
        rotate((q, k), cos, sin, layout="half", out=out)


def test_sixty_four_shapes_in_turn_are_all_kept(monkeypatch):
    monkeypatch.setattr(torch_ready, "recent", {})
    calls = [operands()[:2] for _ in range(64)]
    calls = [(q.repeat(n + 1, 1, 1, 1), k.repeat(n + 1, 1, 1, 1)) for n, (q, k) in enumerate(calls)]
    cos, sin = operands()[2:]
    for q, k in calls:
        new_outputs(q, k, cos, sin)
    monkeypatch.setattr(torch_ready, "on_cpu", lambda *_: pytest.fail("worked out again"))
    for q, k in calls:
        torch.testing.assert_close(new_outputs(q, k, cos, sin)[0], formula(q, cos, sin), **WANTED)


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(torch_ready, "recent", {})
    monkeypatch.setattr(torch_ready, "_KINDS", 8)
    q, k, cos, sin = operands()
    for heads in range(1, 12):
        new_outputs(q.repeat(1, heads, 1, 1), k, cos, sin)
    assert len(torch_ready.recent) == 8
    for heads in range(1, 12):
        new_outputs(q, k.repeat(1, heads, 1, 1), cos, sin)
    assert max(map(len, torch_ready.recent.values())) == torch_ready._FORMS


def test_without_the_guards_of_torch_the_result_is_the_same(form, monkeypatch):
    with torch.no_grad():
        short = form(*operands())
        monkeypatch.setattr(torch_ready, "recent", {})
        monkeypatch.setattr(torch_ready, "TensorGuards", None)
        long = form(*operands())
    assert torch_ready.recent == {}
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def test_every_output_that_autograd_knows_is_marked_as_written():
    """One of them is an inference tensor, which has no version, and the other is not."""
    q, k, cos, sin = operands()
    known = torch.zeros_like(q)
    with torch.inference_mode():
        for other in (torch.zeros_like(k), torch.zeros_like(k)):
            for count in range(1, 4):
                before = known._version
                rotate((q, k), cos, sin, layout="half", out=(known, other))
                assert known._version == before + 1, count


@pytest.mark.parametrize("place", ["x", "cos", "positions", "out"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_after_plain_ones_is_refused_by_a_sentence(place):
    """The guards of torch would end the process."""
    q, k, cos, sin = operands()
    tables, row = [table[0] for table in (cos, sin)], torch.zeros(1, dtype=torch.int64)
    out = torch.zeros_like(q), torch.zeros_like(k)
    for nested in (None, torch.nested.nested_tensor([torch.zeros(4, 1, 8)])):
        given = {"x": q, "cos": tables[0], "positions": row, "out": out[0]}
        if nested is None:
            rotate((q, k), *tables, layout="half", positions=row, out=out)
            continue
        given[place] = nested
        with pytest.raises(TypeError, match=r"nested tensor is not rotated|one library"):
            rotate(
                (given["x"], k), given["cos"], tables[1], layout="half",
                positions=given["positions"], out=(given["out"], out[1]),
            )  # fmt: skip


def test_arrays_of_another_library_after_tensors_are_refused_by_a_sentence():
    q, k, cos, sin = operands()
    new_outputs(q, k, cos, sin)
    for mixed in ((q, k.numpy(), cos, sin), (q, k, cos.numpy(), sin), (q, k, cos, [[1.0]])):
        with pytest.raises(TypeError, match="all arrays must be of one library"):
            new_outputs(*mixed)
    with pytest.raises(TypeError, match="does not guess which channels make a pair"):
        rotate((q, k), cos, sin)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_new_outputs_are_those_of_empty_like(mode):
    q, k, cos, sin = operands()
    thin = q.transpose(1, 2).contiguous().transpose(1, 2)  # its axis of size 1 has another stride
    with mode():
        for _ in range(2):
            for x in (q, thin):
                results, like = new_outputs(x, k, cos, sin), torch.empty_like(x)
                assert results[0].stride() == like.stride() == x.stride()
                assert results[0].is_inference() == like.is_inference()
                assert not results[0].requires_grad
                assert results[0].untyped_storage().nbytes() == x.nbytes
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        results = new_outputs(q, k, cos, sin)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert results[0].device.type == "cpu"
    torch.testing.assert_close(results[0], formula(q, cos, sin), **WANTED)


def test_outputs_without_the_allocator_of_inductor(monkeypatch):
    monkeypatch.setattr(torch_ready, "recent", {})
    monkeypatch.setattr(torch_ready, "empty_strided", torch_private._empty_on("cpu"))
    test_new_outputs_are_those_of_empty_like(torch.no_grad)


def test_make_fx_records_a_call_like_one_before():
    """Its dispatch mode is none that a guard sees: the loops would leave an empty program."""
    q, k, cos, sin = operands(torch.float32)

    def turned(q, k):
        return rotate((q, k), cos, sin, layout="half")

    for _ in range(3):
        turned(q, k)
    program = make_fx(turned)(q, k)
    other = [torch.randn_like(x) for x in (q, k)]
    torch.testing.assert_close(program(*other), turned(*other), rtol=0, atol=1e-6)
