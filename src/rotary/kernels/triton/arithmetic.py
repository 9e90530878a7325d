"""Arithmetic of the GPU kernels: quotients, angles, rounded products."""

# ruff: noqa: N803  # Triton's compile-time arguments are written in capitals
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def quotient(number, inverse, shift):
    """Return number // divisor for a number of 0 to 2^31 - 1, without the time of a division.

    The inverse and the shift are those of `inverse_of` for the divisor.
    """
    twice = number.to(tl.uint32) * 2
    # Inductor may pass a Python number, which has no `.to`
    return (tl.umulhi(twice, tl.cast(inverse, tl.uint32)) >> shift).to(tl.int32)


@triton.jit
def cos_sin(turns, factor):
    """Return cos and sin of 64-bit fractions of one turn, each within 1.1e-7."""
    phase = (turns >> 32).to(tl.int32)  # right to 2^-32 turn, 1.5e-9 rad
    quadrant = (phase + 0x20000000) >> 30  # of the nearest quarter turn
    u = (phase << 2).to(tl.float32) * 4.656612873077393e-10  # [-1, 1): in eighths of a turn
    z = u * u
    # minimax polynomials of sin(pi u / 4) and cos(pi u / 4), both right to 3e-9
    s = -3.5954290725e-05 * z + 2.4900068015e-03
    s = u * ((s * z - 8.0745434708e-02) * z + 0.78539816098)
    c = 3.5419527381e-06 * z - 3.2596138035e-04
    c = ((c * z + 1.5854338147e-02) * z - 3.0842513734e-01) * z + 1.0
    is_odd = (quadrant & 1) != 0
    cos, sin = tl.where(is_odd, s, c), tl.where(is_odd, c, s)
    cos = cos * tl.where(((quadrant + 1) & 2) != 0, -factor, factor)
    return cos, sin * tl.where((quadrant & 2) != 0, -factor, factor)


@triton.jit
def product(a, b, ROUNDED: tl.constexpr):
    """Return a b; ROUNDED keeps the compiler from fusing it with an addition."""
    if ROUNDED:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505  # Triton would compile both returns
        return a * b
