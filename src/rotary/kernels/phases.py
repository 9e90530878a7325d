"""cos and sin of angles that are whole numbers, by operators that JAX and MLX share."""

import math
from types import ModuleType

from . import Array

LIMIT = 2.0**28  # largest fractional position; up to it float64 frequencies are as exact as turns

# sin(x) = x + x^3 q(x^2) and cos(x) = 1 - x^2 / 2 + x^4 r(x^2), interpolated at the Chebyshev nodes
# of [0, (pi/4)^2]; errors 1e-8 and 8e-10
_SIN = (-0.1666666466231438, 0.008332748270629749, -0.00019587890880412386)
_COS = (0.04166666465950221, -0.0013888303035894866, 2.4547942085071572e-05)
_RADIAN = 2 * math.pi / 2**32  # radians in 2^-32 turn


def cos_sin(phase: Array, xp: ModuleType) -> tuple[Array, Array]:
    """Return float32 cos and sin of phase / 2^32 turn, for a uint32 phase.

    They are polynomials in the rest of the phase, swapped and negated by its quadrant.

    >>> import numpy as np
    >>> cos, sin = cos_sin(np.array([0, 2**30, 2**31], np.uint32), np)
    >>> np.allclose(cos, [1, 0, -1]), np.allclose(sin, [0, 1, 0]), cos.dtype
    (True, True, dtype('float32'))
    """
    quadrant = phase + 2**29 >> 30
    rest = (phase - (quadrant << 30)).astype(xp.int32)  # in [-1/8, 1/8) turn
    x = rest.astype(xp.float32) * _RADIAN
    z = x * x
    sine = x + x * z * (_SIN[0] + z * (_SIN[1] + z * _SIN[2]))
    cosine = 1 - (z / 2 - z * z * (_COS[0] + z * (_COS[1] + z * _COS[2])))
    is_odd = quadrant & 1 == 1
    cos, sin = xp.where(is_odd, sine, cosine), xp.where(is_odd, cosine, sine)
    return xp.where(quadrant + 1 & 2 == 2, -cos, cos), xp.where(quadrant & 2 == 2, -sin, sin)
