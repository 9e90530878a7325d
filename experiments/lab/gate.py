"""The gate: nothing is trained unless the rotation that the models use gives the right numbers."""

import sys
from collections.abc import Iterator

import torch

import rotary

LIMIT = 2.0**-21  # of the largest input: three roundings in float32
SPEC = rotary.Rotary(head_dim=32)
STARTS = (0, 2**24)  # positions from here on; E6 moves its text that far


def check() -> str:
    """One line that says what was compared; exits with status 1 if a result is wrong.

    >>> check()
    'gate passed: 4 results of rotate and its gradient against complex numbers in float64'
    """
    found = list(errors())
    if wrong := [f"{name} is off by {error:.1e}" for name, error in found if not error <= LIMIT]:
        sys.exit(f"gate failed, nothing is trained: {'; '.join(wrong)}")
    return (
        f"gate passed: {len(found)} results of rotate and its gradient against complex numbers in "
        "float64"
    )


def errors() -> Iterator[tuple[str, float]]:
    """(what, largest error over the largest input) of the rotation and of its gradient."""
    chance = torch.Generator().manual_seed(0)
    for start in STARTS:
        positions = torch.arange(start, start + 256)
        x = torch.randn(2, 256, 32, generator=chance).requires_grad_()
        grad = torch.randn(x.shape, generator=chance)
        y = rotary.rotate(x, *rotary.cos_sin(SPEC, positions), layout=SPEC.layout)
        (back,) = torch.autograd.grad(y, x, grad)
        inv_freq = SPEC.base ** -(torch.arange(16, dtype=torch.float64) / 16)
        turn = torch.polar(torch.ones(256, 16, dtype=torch.float64), positions[:, None] * inv_freq)
        for name, got, given, by in (("rotate", y, x, turn), ("gradient", back, grad, turn.conj())):
            product = torch.complex(*given.detach().double().chunk(2, -1)) * by
            wanted = torch.cat((product.real, product.imag), -1)
            error = (got.detach() - wanted).abs().max() / given.detach().abs().max()
            yield f"{name} at {start}", float(error)
