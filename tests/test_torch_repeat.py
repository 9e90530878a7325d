"""A call like the one before takes a short way: only if everything that matters is the same."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rotary import rotate
from rotary.kernels import torch as kernel

WANTED = {"atol": 1e-6, "rtol": 1e-6}


def operands(dtype=torch.float32, rows=1):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 1, 8, generator=generator).to(dtype) for heads in (4, 2))
    angles = torch.randn(rows, 1, 4, generator=generator)
    return q, k, angles.cos(), angles.sin()


def law(x, cos, sin):
    u, v = x.float().chunk(2, dim=-1)
    return torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1).to(x.dtype)


@pytest.fixture(autouse=True)
def warm(monkeypatch):
    """Two calls of plain tensors without gradients: the second one takes the short way."""
    monkeypatch.setattr(kernel, "_recent", {})
    q, k, cos, sin = operands()
    with torch.no_grad():
        rotate((q, k), cos, sin, layout="half")
        assert len(kernel._recent) == 1
        signatures = []
        with monkeypatch.context() as patched:
            patched.setattr(kernel, "_ready_call", lambda *_: signatures.append(1))
            results = rotate((q, k), cos, sin, layout="half")
        assert not signatures
        torch.testing.assert_close(results, (law(q, cos, sin), law(k, cos, sin)), **WANTED)


def test_gradients_are_noticed():
    q, k, cos, sin = operands()
    with torch.no_grad():
        rotate((q.requires_grad_(), k), cos, sin, layout="half")
    result, _ = rotate((q, k), cos, sin, layout="half")
    (grad,) = torch.autograd.grad(result.sum(), q)
    torch.testing.assert_close(grad, law(torch.ones_like(q), cos, -sin), **WANTED)


def negated(x):
    """A view whose bytes are not its values."""
    return torch.view_as_complex(torch.stack((x, -x), -1)).conj().imag


VARIANTS = {
    "a negated view": lambda q, k, cos, sin: (negated(q), k, cos, sin),
    "other strides": lambda q, k, *tables: (q.mT.contiguous().mT, k, *tables),
    "a strided last axis": lambda q, k, *tables: (q.repeat_interleave(2, -1)[..., ::2], k, *tables),
    "another dtype": lambda q, k, cos, sin: (q.double(), k.double(), cos, sin),
    "more heads": lambda q, k, cos, sin: (torch.cat((q, q), 1), k, cos, sin),
    "another table": lambda q, k, cos, sin: (q, k, sin, cos),
    "a table without its first axis": lambda q, k, cos, sin: (q, k, cos[0], sin[0]),
    "a parameter": lambda q, k, cos, sin: (torch.nn.Parameter(q), k, cos, sin),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_differs_is_rotated_as_itself(name):
    q, k, cos, sin = VARIANTS[name](*operands())
    results = rotate((q, k), cos, sin, layout="half")
    torch.testing.assert_close(results, (law(q, cos, sin), law(k, cos, sin)), **WANTED)


def test_wrong_tables_are_still_refused():
    q, k, cos, sin = operands()
    with pytest.raises(ValueError, match="alike"):
        rotate((q, k), cos, sin[..., :3], layout="half")
    with pytest.raises(TypeError, match="one dtype"):
        rotate((q, k.double()), cos, sin, layout="half")


def test_a_transform_after_plain_calls():
    q, k, cos, sin = operands()
    one = torch.vmap(lambda q, k: rotate((q, k), cos[0], sin[0], layout="half"))(q[None], k[None])
    torch.testing.assert_close(one[0][0], law(q, cos, sin), **WANTED)


def test_a_dispatch_mode_sees_operators():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        rotate(operands()[:2], *operands()[2:], layout="half")
    assert any("mul" in str(each) for each in seen)


def test_no_more_than_a_few_calls_are_remembered():
    with torch.no_grad():
        for heads in range(1, 12):
            q, k, cos, sin = operands()
            rotate((q.repeat(1, heads, 1, 1), k), cos, sin, layout="half")
    assert [len(each) for each in kernel._recent.values()] == [kernel._RECENT]


def test_without_the_guards_of_torch_the_result_is_the_same(monkeypatch):
    q, k, cos, sin = operands()
    with torch.no_grad():
        short = rotate((q, k), cos, sin, layout="half")
        monkeypatch.setattr(kernel, "_recent", {})
        monkeypatch.setattr(kernel, "TensorGuards", None)
        long = rotate((q, k), cos, sin, layout="half")
    assert kernel._recent == {}
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))
