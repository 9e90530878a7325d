"""Gradients of `rotary.fused` with a norm, against torch's own operators in float64."""

import numpy as np
import pytest
import torch

import rotary
from rotary import Norm, Rotary, fused

EPS = 1e-5
SPEC = Rotary(8, base=100.0)
COS, SIN = rotary.cos_sin(SPEC, torch.arange(5))


def by_torch(x, weight):
    """RMS norm and rotation of halves in operators of torch."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
    a, b = y.chunk(2, -1)
    return torch.cat((a * COS - b * SIN, b * COS + a * SIN), -1)


def ours(q, k, wq, wk):
    return fused(q, k, None, SPEC, tables=(COS, SIN), norm=Norm(wq, wk, EPS), seq_dim=-2)[:2]


def theirs(q, k, wq, wk):
    return by_torch(q, wq), by_torch(k, wk)


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def heads(is_strided):
    """q or k; as after a convolution, channels are not next to each other in memory."""
    if is_strided:
        return leaf(1, 2, 8, 5).mT
    return leaf(1, 2, 5, 8)


def shared_weight(call, is_strided):
    q, k, w = heads(is_strided), heads(is_strided), leaf(8)
    return call(q, k, w, w), (q, k, w)


def one_tensor_for_both(call, is_strided):
    q, u, w = heads(is_strided), leaf(8), leaf(8)
    return call(q, q, u, w), (q, u, w)


def keys_from_queries(call, is_strided):
    q, u, w = heads(is_strided), leaf(8), leaf(8)
    k = torch.tanh(q * w)
    return call(q, k.mT.contiguous().mT if is_strided else k, u, w), (q, u, w)


def weight_from_queries(call, is_strided):
    q, k, w = heads(is_strided), heads(is_strided), leaf(8)
    return call(q, k, w, w * q.mean()), (q, k, w)


def two_layers(call, is_strided):
    x, u, w = leaf(1, 2, 5, 8), leaf(8), leaf(8)
    h = x
    for _ in range(2):
        q = h.mT.contiguous().mT if is_strided else h * 1
        y, z = call(q, q, u, w)
        h = h + y + z
    return (h,), (x, u, w)


def one_result_is_used(call, is_strided):
    q, k, w = heads(is_strided), heads(is_strided), leaf(8)
    return call(q, k, w, w)[1:], (q, k, w)


MODELS = [
    shared_weight, one_tensor_for_both, keys_from_queries, weight_from_queries, two_layers,
    one_result_is_used,
]  # fmt: skip


def gradients(model, call, is_strided, order):
    torch.manual_seed(0)
    outs, leaves = model(call, is_strided)
    found = torch.autograd.grad(
        sum((y.sin() * (index + 1)).sum() for index, y in enumerate(outs)), leaves,
        create_graph=order > 1, allow_unused=True,
    )  # fmt: skip
    for _ in range(order - 1):
        total = sum(x.square().sum() for x in found if x is not None)
        found = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    return found


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_operands_that_depend_on_each_other(model, is_strided, order):
    got, want = [gradients(model, call, is_strided, order) for call in (ours, theirs)]
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert (x - y).abs().max() <= 1e-6 * max(1, y.abs().max())  # tables are float32


@pytest.mark.parametrize("order", [1, 2])
def test_rotation_alone_of_operands_that_depend_on_each_other(order):
    def call(q, k, *_):
        return rotary.rotate((q, k), COS, SIN, SPEC, seq_dim=-2)

    def plain(q, k, *_):
        turned = []
        for x in (q, k):
            a, b = x.chunk(2, -1)
            turned.append(torch.cat((a * COS - b * SIN, b * COS + a * SIN), -1))
        return turned

    for model in (one_tensor_for_both, keys_from_queries, two_layers):
        got, want = [gradients(model, each, False, order) for each in (call, plain)]
        for x, y in zip(got, want, strict=True):
            assert y is None or (x - y).abs().max() <= 1e-6 * max(1, y.abs().max())


@pytest.mark.parametrize("name", ["row numbers", "cos", "sin"])
@pytest.mark.parametrize("is_created", [False, True])
def test_angles_that_are_overwritten_before_the_gradient(name, is_created):
    """As rotate: the buffer of positions may be that of the next batch."""
    tables, rows = [table.clone() for table in (COS, SIN)], torch.tensor([0, 1, 2])
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    norm = Norm(torch.ones(8), None, EPS)
    y, *_ = fused(q, None, None, SPEC, rows, tables=tables, norm=norm)
    torch.autograd.grad(y.sum(), q, retain_graph=True)
    {"row numbers": rows, "cos": tables[0], "sin": tables[1]}[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), q, create_graph=is_created)


@pytest.mark.parametrize("kind", [torch.int32, np.int64])
def test_row_numbers_that_were_copied_may_be_overwritten(kind):
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    rows = torch.arange(3).to(kind) if isinstance(kind, torch.dtype) else np.arange(3)
    y, *_ = fused(q, None, None, SPEC, rows, tables=(COS, SIN), norm=Norm(torch.ones(8), None, EPS))
    z = rotary.rotate(q, COS, SIN, SPEC, positions=rows)
    want = [torch.autograd.grad(x.sum(), q, retain_graph=True)[0] for x in (y, z)]
    rows += 1
    for x, gradient in zip((y, z), want, strict=True):
        assert torch.equal(torch.autograd.grad(x.sum(), q)[0], gradient)


@pytest.mark.parametrize("is_strided", [False, True])
def test_many_gradients_at_once(is_strided):
    """`is_grads_batched` runs backward inside vmap."""
    torch.manual_seed(0)
    q, k, w = heads(is_strided), heads(is_strided), leaf(8)
    outs = ours(q, k, w, w)
    many = [torch.randn(4, *y.shape, dtype=torch.float64) for y in outs]
    got = torch.autograd.grad(outs, (q, k, w), many, retain_graph=True, is_grads_batched=True)
    for index in range(4):
        one = [each[index] for each in many]
        want = torch.autograd.grad(outs, (q, k, w), one, retain_graph=True)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x[index], y)


def test_a_jacobian_at_once():
    torch.manual_seed(0)
    q, w = torch.randn(1, 2, 5, 8), torch.randn(8)

    def call(w):
        return fused(q, None, None, SPEC, norm=Norm(w, None, EPS))[0].sum((0, 1))

    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(call, w, vectorize=True), jacobian(call, w))
