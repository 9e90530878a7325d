"""torch.ops.rotary.*: right or refused, whatever they are called with, and nothing beside it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import rotary
import rotary.kernels.torch.route
from rotary import Rotary

# torch.library.opcheck of torch 2.15 itself reads the gradient of what is no leaf
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

SPEC = Rotary(head_dim=8)
COS, SIN = rotary.cos_sin(SPEC, torch.arange(5))
X = torch.arange(240.0).reshape(2, 3, 5, 8)
REST = (None, 0, 4, "half", "half", [-1, -1, 0], False)
rotate, rotate_out = torch.ops.rotary.rotate, torch.ops.rotary.rotate_out


# --- memory between guarded pages ---


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 2000), pytest.param(2000, 6500, marks=pytest.mark.slow)],
)
def test_malformed_operands_are_rotated_right_or_refused(first, last, record_property):
    script = str(Path(__file__).with_name("guarded_operators.py"))
    command = [sys.executable, "-W", "ignore", script, str(first), str(last)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    counts = json.loads(run.stdout)
    record_property("operand sets", run.stdout.strip())
    assert set(counts["errors"]) <= {
        "ValueError", "TypeError", "RuntimeError", "NotImplementedError"
    }  # fmt: skip
    assert counts["taken"] > (last - first) // 4 < counts["refused"]


# --- what a fuzz does not see ---


def test_row_numbers_in_the_memory_of_the_output_are_refused():
    """They were overwritten while they were read: a step anywhere in memory."""
    pytest.importorskip("numba", reason="the formula reads all before it writes")
    memory = torch.zeros(240, dtype=torch.int64)
    out, rows = memory.view(torch.float32)[:240].view(2, 3, 5, 8), memory[:5]
    with pytest.raises(ValueError, match="out overlaps"):
        rotate_out([X], COS, SIN, rows, *REST[1:], [out])
    with pytest.raises(ValueError, match="out overlaps"):
        rotary.rotate(X, COS, SIN, SPEC, positions=rows, out=out)
    with pytest.raises(ValueError, match="out overlaps"):
        rotary.rotate(
            *map(np.asarray, (X, COS, SIN)), SPEC, positions=rows.numpy(), out=out.numpy()
        )


@pytest.mark.parametrize("count", [4, 300_000])  # in one loop, and by tables
@pytest.mark.parametrize("library", [torch.as_tensor, np.asarray])
def test_positions_in_the_memory_of_the_output_are_refused(count, library):
    """A row of a table is shorter here than a position, so its length says nothing of theirs."""
    memory = np.zeros(4 * count + 4, np.float32)
    positions = memory.view(np.int64)[:count]
    positions[:] = np.arange(count)
    x, spec = library(np.ones((count, 2), np.float32)), rotary.Rotary(2)
    for start in (0, 4, 2 * count - 1):
        out = library(memory[start : start + 2 * count].reshape(count, 2))
        with pytest.raises(ValueError, match="out overlaps"):
            rotary.apply(spec, x, positions=library(positions), out=out)
    assert (positions == np.arange(count)).all()
    beside = library(memory[2 * count : 4 * count].reshape(count, 2))
    rotary.apply(spec, x, positions=library(positions), out=beside)
    assert (positions == np.arange(count)).all()


def test_released_memory_is_not_read():
    x = X.clone()
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="released or made smaller"):
        rotate([x], COS, SIN, *REST)


def test_zeros_without_memory_are_rotated():
    """Those of forward mode have no address: the process ended."""
    rotary.rotate(X, COS, SIN, SPEC)
    zeros = torch._efficientzerotensor(X.shape)
    assert not rotary.rotate(zeros, COS, SIN, SPEC).any()
    assert not rotate([zeros], COS, SIN, *REST)[0].any()


@pytest.mark.parametrize("operands", [([X], COS[:2], SIN), ([X], COS, SIN[..., :2])])
def test_a_fake_call_is_refused_like_a_real_one(operands):
    xs, cos, sin = operands
    for call in (
        lambda *tensors: rotate(list(tensors[:1]), *tensors[1:], *REST),
        lambda *tensors: rotate_out(list(tensors[:1]), *tensors[1:], *REST, [tensors[0].clone()]),
    ):
        with pytest.raises(ValueError, match="must have one shape"):
            call(*xs, cos, sin)
        with pytest.raises(ValueError, match="must have one shape"):
            call(*[x.to("meta") for x in (*xs, cos, sin)])


def test_operands_of_two_devices_are_refused():
    """A meta tensor among them made the result one that nobody wrote to."""
    rows = torch.arange(5, device="meta")
    for arguments in (([X.to("meta")], COS, SIN, *REST), ([X], COS, SIN, rows, *REST[1:])):
        with pytest.raises(ValueError, match="on one device"):
            rotate(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(([X], COS[:, :0], SIN[:, :0], None, 0, 0, *REST[3:]), "do not fit", id="none"),
        pytest.param(([X], COS, SIN, *REST[:5], [-2, -1, 0], False), "dims", id="dims"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        rotate(*arguments)


def test_no_gradient_is_lost():
    wanted = COS.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="gives cos and sin no gradient"):
        rotate([X], wanted, SIN, *REST)
    leaf = X.clone().requires_grad_()
    for x, out in ((leaf, X.clone()), (X, leaf * 1)):
        with pytest.raises(RuntimeError, match="out= does not take part in autograd"):
            rotate_out([x], COS, SIN, *REST, [out])


def test_no_tangent_is_lost():
    message = "no forward-mode derivative"
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
        rotate([forward_ad.make_dual(X, X)], COS, SIN, *REST)
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(lambda x: rotate([x], COS, SIN, *REST)[0], (X,), (X,))


def test_what_the_operator_overwrites_is_not_used_for_a_gradient():
    x, weight = X.clone(), torch.ones(8, requires_grad=True)
    product = (weight * x).sum()
    rotate_out([x], COS, SIN, *REST, [x])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_an_empty_batch_is_rotated():  # opcheck's own clone of one fails
    x = torch.empty(0, 3, 5, 8)
    assert rotate([x], COS, SIN, *REST)[0].shape == x.shape


# --- opcheck ---


def sample(shape=(2, 3, 5, 8), order=None, dtype=torch.float32, grad=False, expand=False):
    x = torch.randn(shape, dtype=dtype)
    if order is not None:
        x = x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])
    if expand:
        x = x[:, :1].expand(shape)
    return x.requires_grad_(grad)


SAMPLES = {
    "plain": sample(),
    "gradient": sample(grad=True),
    "bfloat16, gradient": sample(dtype=torch.bfloat16, grad=True),
    "float64": sample(dtype=torch.float64),
    "tokens before heads": sample(order=(0, 2, 1, 3)),
    "channels first, gradient": sample(order=(3, 2, 1, 0), grad=True),
    "every other number": torch.randn(2, 3, 5, 16)[..., ::2],
    "an offset": torch.randn(2, 3, 5, 11)[..., 2:10],
    "expanded": sample(expand=True),
    "no heads, gradient": sample((2, 0, 5, 8), grad=True),
    "one of each": sample((1, 1, 5, 8)),
}
OPERANDS = {
    "all": (COS, SIN, *REST),
    "rows": (COS, SIN, torch.tensor([4, 0, 0, 2, 1]), *REST[1:]),
    "rows of 32 bits": (COS, SIN, torch.tensor([4, 0, 0, 2, 1], dtype=torch.int32), *REST[1:]),
    "a slice, mixed": (
        COS[:, :2], SIN[:, :2], None, 3, 2, "interleaved", "half", [-1, -1, 0], True),
    "one row for all": (COS[:1], SIN[:1], *REST),
    "float64 tables": (COS.double(), SIN.double(), *REST),
    "tables by column": (COS.T.contiguous().T, SIN.T.contiguous().T, *REST),
}  # fmt: skip
PAIRS = [("plain", name) for name in OPERANDS] + [
    *((name, "all") for name in SAMPLES if name != "plain"),
    ("gradient", "rows"),
    ("channels first, gradient", "a slice, mixed"),
]


@pytest.mark.parametrize(("x", "operands"), PAIRS)
def test_opcheck(x, operands):
    x = SAMPLES[x]  # alone it is in the checks of `out`
    other = x[:, :1].detach().contiguous().requires_grad_(x.requires_grad)
    torch.library.opcheck(rotate.default, ([x, other], *OPERANDS[operands]))


@pytest.mark.parametrize(("x", "operands"), PAIRS)
def test_opcheck_out(x, operands):
    x = SAMPLES[x].detach()
    torch.library.opcheck(rotate_out.default, ([x], *OPERANDS[operands], [torch.empty_like(x)]))


# --- tensors that are not one block of memory ---


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore")
def test_a_nested_tensor_is_refused_with_the_way_on(layout):
    """After an ordinary call, whose form is remembered, a strided one ended the process."""
    nested = torch.nested.nested_tensor([X[0], X[1]], layout=layout)
    rotary.rotate(X, COS, SIN, SPEC)
    rotary.rotate((X, X), COS, SIN, SPEC, out=(X.clone(), X.clone()))
    for call in (
        lambda: rotary.rotate(nested, COS, SIN, SPEC),
        lambda: rotary.rotate((X, nested), COS, SIN, SPEC),
        lambda: rotary.rotate(nested, COS, SIN, SPEC, out=X.clone()),
        lambda: rotary.rotate(X, COS, SIN, SPEC, out=nested),
        lambda: rotary.rotate(X, nested, nested, SPEC),
        lambda: rotary.rotate(nested, COS, SIN, SPEC, positions=torch.arange(5)),
        lambda: rotary.rotate(X, COS, SIN, SPEC, positions=nested.to(torch.int64)),
        lambda: rotary.apply(SPEC, nested),
        lambda: rotary.apply(SPEC, X, nested),
        lambda: rotary.apply(SPEC, X, positions=nested),
        lambda: rotary.cos_sin(SPEC, nested),
    ):
        with pytest.raises(TypeError, match=r"x\.unbind\(\), or x\.to_padded_tensor\(0\.0\)"):
            call()


@pytest.mark.filterwarnings("ignore")
def test_the_ways_on_from_a_nested_tensor_are_right():
    parts = [X[0].transpose(0, 1), X[1, :, :3].transpose(0, 1)]  # (tokens, heads, head_dim)
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    padded = rotary.apply(SPEC, nested.to_padded_tensor(0.0), seq_dim=-3)
    tokens = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    packed = rotary.apply(SPEC, nested.values(), positions=tokens, seq_dim=-3)
    for index, each in enumerate(nested.unbind()):
        alone = rotary.apply(SPEC, each, seq_dim=-3)
        torch.testing.assert_close(padded[index, : len(each)], alone, rtol=0, atol=0)
        torch.testing.assert_close(packed[5 * index :][: len(each)], alone, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["to_sparse", "to_mkldnn"])
def test_a_sparse_tensor_is_refused_with_the_way_on(kind):
    x = getattr(X, kind)()
    rotary.rotate(X, COS, SIN, SPEC)
    for call in (
        lambda: rotary.rotate(x, COS, SIN, SPEC),
        lambda: rotary.rotate(X, COS, SIN, SPEC, out=x),
        lambda: rotary.apply(SPEC, x),
        lambda: rotate([x], COS, SIN, *REST),
    ):
        with pytest.raises(TypeError, match=r"must be dense, .* pass x\.to_dense\(\)"):
            call()


# --- NumPy arrays that are more than their numbers ---


def test_a_masked_array_is_refused_with_the_way_on():
    """Its mask was lost."""
    x, cos, sin = (np.asarray(each) for each in (X, COS, SIN))
    masked = np.ma.masked_array(x, x > 100)
    for call in (
        lambda: rotary.rotate(masked, cos, sin, SPEC),
        lambda: rotary.rotate((x, masked), cos, sin, SPEC),
        lambda: rotary.rotate(x, cos, sin, SPEC, out=masked),
        lambda: rotary.rotate(x, np.ma.masked_array(cos), sin, SPEC),
        lambda: rotary.rotate(x, cos, sin, SPEC, positions=np.ma.masked_array(np.arange(5))),
        lambda: rotary.apply(SPEC, masked),
        lambda: rotary.apply(SPEC, x, positions=np.ma.masked_array(np.arange(5))),
        lambda: rotary.apply(SPEC, X, positions=np.ma.masked_array(np.arange(5))),
        lambda: rotary.cos_sin(SPEC, np.ma.masked_array(np.arange(5))),
    ):
        with pytest.raises(TypeError, match=r"a mask would be lost: go on with x\.data"):
            call()


@pytest.mark.parametrize("which", ["x", "tables", "positions"])
def test_another_byte_order_is_said(which):
    x, cos, sin = (np.asarray(each) for each in (X, COS, SIN))
    message = r">float(32|64): pass x\.astype\(x\.dtype\.newbyteorder\('='\)\)"
    call = {
        "x": lambda: rotary.rotate(x.astype(">f4"), cos, sin, SPEC),
        "tables": lambda: rotary.rotate(x, cos.astype(">f4"), sin.astype(">f4"), SPEC),
        "positions": lambda: rotary.cos_sin(SPEC, np.arange(5.0).astype(">f8")),
    }[which]
    with pytest.raises(TypeError, match=message):
        call()


# --- angles worked out by the operator ---

TURNS = torch.from_numpy(rotary.turns(SPEC).view(np.int64).copy())
TWO = TURNS.expand(2, 4).clone()  # of two axes
AT = (None, TURNS, 1.0, *REST[1:])


@pytest.mark.parametrize("positions", [None, torch.arange(5), torch.arange(5, dtype=torch.int32)])
def test_rotate_at_is_the_rotation_by_exact_tables(positions):
    want = rotary.rotate(X, COS, SIN, SPEC)
    given = (positions, *AT[1:])
    (got,) = torch.ops.rotary.rotate_at([X], *given)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4)
    own = X.clone()
    torch.ops.rotary.rotate_at_out([own], *given, [own])
    assert torch.equal(own, got)
    torch.library.opcheck(torch.ops.rotary.rotate_at.default, ([X], *given))
    torch.library.opcheck(torch.ops.rotary.rotate_at_out.default, ([X], *given, [X.clone()]))


def test_the_gradient_of_rotate_at_turns_back():
    x, upstream = X.clone().requires_grad_(), torch.ones_like(X)
    (grad,) = torch.autograd.grad(torch.ops.rotary.rotate_at([x], *AT)[0], x, upstream)
    want = rotary.rotate(upstream, COS, SIN, SPEC, conjugate=True)
    torch.testing.assert_close(grad, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({1: TURNS[:3]}, ValueError, r"turns must be contiguous int64 numbers, \(4,\)"),
        ({1: TURNS.double()}, ValueError, "turns must be contiguous int64 numbers"),
        ({1: TURNS[None, None]}, ValueError, r"or \(axes, 4\); got torch.int64 \(1, 1, 4\)"),
        ({1: TURNS.repeat_interleave(2)[::2]}, ValueError, "turns must be contiguous"),
        ({1: TURNS[:0].reshape(0, 4)}, ValueError, "turns must be contiguous"),
        ({1: TWO}, ValueError, "several axes need positions"),
        ({0: torch.zeros(5, 3, dtype=torch.int64), 1: TWO}, ValueError, r"\(..., 2\)"),
        ({0: torch.zeros((), dtype=torch.int64), 1: TWO}, ValueError, r"\(..., 2\)"),
        ({0: torch.zeros(5)}, TypeError, "whole numbers, got torch.float32"),
        ({0: torch.zeros(4, dtype=torch.int64)}, ValueError, "do not fit"),
        ({0: torch.zeros(2, 5, dtype=torch.int64)}, ValueError, "each of the 2 leading axes"),
        ({7: [-1, -1, -1]}, ValueError, "must name each of the 1 leading axes of positions"),
        ({4: 5, 1: torch.zeros(5, dtype=torch.int64)}, ValueError, "do not fit"),
        ({5: "diagonal"}, ValueError, "layout"),
    ],
)
def test_what_rotate_at_refuses(change, error, text):
    given = list(AT)
    for index, value in change.items():
        given[index] = value
    with pytest.raises(error, match=text):
        torch.ops.rotary.rotate_at([X], *given)
    with pytest.raises(error, match=text):
        torch.ops.rotary.rotate_at_out([X], *given, [torch.empty_like(X)])
