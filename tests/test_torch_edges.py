"""torch around an ordinary call: operators called directly, and traced programs."""

import pytest
import torch

import rotary
import rotary.kernels.torch.route
from rotary import Rotary

SPEC = Rotary(head_dim=8)
COS, SIN = rotary.cos_sin(SPEC, torch.arange(5))
X = torch.arange(240.0).reshape(2, 3, 5, 8)
GOOD = {
    "xs": [X], "cos": COS, "sin": SIN, "rows": None, "start": 0, "pairs": 4, "layout": "half",
    "out_layout": "half", "dims": [-1, -1, 0], "conjugate": False, "out": [torch.empty_like(X)],
}  # fmt: skip


def call(name, operands):
    operands = dict(operands)
    out = operands.pop("out")
    if name == "rotate":
        return torch.ops.rotary.rotate(*operands.values())
    torch.ops.rotary.rotate_out(*operands.values(), out)
    return out


MALFORMED = {
    "sin shorter": {"sin": SIN[:1].clone()},
    "sin of 16 bits": {"sin": SIN.half()},
    "tables of 16 bits": {"cos": COS.half(), "sin": SIN.half()},
    "two dtypes": {"xs": [X, X.double()], "out": [X.clone(), X.double()]},
    "no tensor": {"xs": [], "out": []},
    "whole numbers": {"xs": [X.long()], "out": [X.long()]},
    "more pairs than the head": {"pairs": 5},
    "a start beyond": {"start": 2},
    "a negative start": {"start": -2},
    "a layout that is not one": {"layout": "full"},
    "another out_layout": {"out_layout": ""},
    "an axis that tables lack": {"dims": [-1, -1, 1]},
    "an axis twice": {"dims": [-1, 0, 0]},
    "no axis": {"dims": [-1, -1, -1]},
    "too few dims": {"dims": [-1, 0]},
    "the wrong axis": {"dims": [-1, 0, -1]},
    "a table of one axis": {"cos": COS[0], "sin": SIN[0]},
    "a row too large": {"rows": torch.tensor([0, 1, 2, 3, 5])},
    "a negative row": {"rows": torch.tensor([0, 1, 2, 3, -1])},
    "fractional rows": {"rows": torch.zeros(5)},
    "too few rows": {"rows": torch.tensor([0, 1])},
}


@pytest.mark.parametrize("name", ["rotate", "rotate_out"])
@pytest.mark.parametrize("what", MALFORMED)
def test_an_operator_refuses_what_it_would_read_past(what, name):
    assert call(name, GOOD)
    with pytest.raises((ValueError, TypeError)):
        call(name, {**GOOD, **MALFORMED[what]})


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(lambda x: [torch.empty(1, 1, 1, 8)], id="small"),
        pytest.param(lambda x: [torch.empty_like(x).half()], id="dtype"),
        pytest.param(lambda x: [], id="none"),
        pytest.param(lambda x: [torch.empty(1, 3, 5, 8).expand(2, 3, 5, 8)], id="itself"),
        pytest.param(lambda x: [x.flatten()[:-8].as_strided((2, 3, 5, 8), (112, 40, 8, 1))],
                     id="overlap"),
    ],
)  # fmt: skip
def test_an_operator_refuses_what_it_would_write_past(out):
    x = X.clone()
    with pytest.raises(ValueError, match="out"):
        call("rotate_out", {**GOOD, "xs": [x], "out": out(x)})


@pytest.mark.parametrize("seq", [16, 128, 2048])  # below 1 MiB, below 4 MiB, above
@pytest.mark.filterwarnings("ignore")
def test_a_traced_program_rotates(seq):
    """torch.jit.trace saw nothing but the new memory, and recorded a program without rotation."""
    spec = Rotary(head_dim=128)
    cos, sin = rotary.cos_sin(spec, torch.arange(seq))
    x, other = torch.randn(2, 1, 15, seq, 128)
    with torch.no_grad():
        for function in (
            lambda q: rotary.rotate(q, cos, sin, spec),
            lambda q: rotary.rotate(q, cos, sin, spec, positions=torch.arange(seq)),
            lambda q: rotary.apply(spec, q),
        ):
            program = torch.jit.trace(function, (x,), check_trace=False)
            torch.testing.assert_close(program(other), function(other), rtol=0, atol=1e-6)


@pytest.mark.parametrize("number", [2**70, "7", None])
def test_a_list_of_what_is_no_number_is_said_to_be_positions(number):
    """The error was torch's about arrays of objects, and did not name the argument."""
    with pytest.raises(TypeError, match="positions must be whole numbers, or float64 if fract"):
        rotary.apply(SPEC, torch.ones(2, 3, 8), positions=[0, 1, number])


def test_a_list_of_fractions_is_as_fine_for_torch_as_for_numpy():
    """torch takes a list as float32: 0.066 off at four million."""
    x, positions = torch.ones(3, 8), [4000000.3, 1234567.7, 0.1]
    expected = rotary.apply(SPEC, x.numpy(), positions=positions)
    found = rotary.apply(SPEC, x, positions=positions)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=1e-6)
