"""Attention over mapped distances: ReRoPE, leaky ReRoPE and self-extend.

A model that was trained on short sequences has never seen large distances. These maps keep the
distances inside a window and make those beyond it smaller, without any training. Beyond the window
scores come from a rotation too, by other angles, so two score matrices are enough.
"""

import dataclasses
import math
import types

from ..angles import inv_freq
from ..kernels.place import Place
from ..kernels.private import recorded_as
from ..rotate import apply
from ..spec import Rotary, check_whole, unwrapped
from ..words import brief
from .arrays import (
    Array,
    at_least_float32,
    check_steady,
    namespace,
    per_head,
    per_query_head,
    positions_of_both,
)
from .softmax import weighted


@dataclasses.dataclass(frozen=True)
class DistanceMap:
    """A map from a query at m and a key at n to the distance that the rotation uses.

        m - n < window:  m - n
        beyond it:       slope (m // group - n // group) + window - slope (window // group)

    `rerope`, `leaky_rerope` and `self_extend` make the maps of the literature. With group 1 the
    result depends on m - n alone. With a larger group it also depends on where the groups begin: it
    stays the same only if m and n move by the same multiple of `group`.
    Raises ValueError for a window or group below 1 and for a slope outside [0, 1].

    >>> import numpy as np
    >>> DistanceMap(window=2, slope=0.5)(np.arange(6), 0).tolist()
    [0.0, 1.0, 2.0, 2.5, 3.0, 3.5]
    """

    window: int
    slope: float = 1.0
    group: int = 1
    # as text, because torch.compile(dynamic=True) takes numbers for unknown ones
    _slope_and_shift: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("window", "group"):
            object.__setattr__(self, name, unwrapped(getattr(self, name)))
            check_whole(name, getattr(self, name))
        if not 0 <= self.slope <= 1:
            raise ValueError(f"slope must be in [0, 1], got {self.slope!r}")
        object.__setattr__(self, "_slope_and_shift", f"{self.slope!r} {self.shift!r}")

    def __call__(self, q_positions: Array, k_positions: Array) -> Array:
        """Return the mapped distances of query and key positions, which are broadcast."""
        like = Place(q_positions, k_positions).like
        m, n = positions_of_both(q_positions, like, k_positions, like)
        distance, blocks = m - n, m // self.group - n // self.group
        far = self.slope * blocks + self.shift
        return namespace(like).where(distance < self.window, distance, far)

    @property
    def shift(self) -> float:
        """The distance added beyond the window, so that both parts meet at its end.

        >>> DistanceMap(window=7, group=2).shift
        4.0
        """
        return self.window - self.slope * (self.window // self.group)


def rerope(window: int) -> DistanceMap:
    """ReRoPE: no distance is larger than the window, min(m - n, window).

    Source: Su, kexue.fm 9708; a window of a quarter to a half of the trained length did best.

    >>> import numpy as np
    >>> rerope(3)(np.arange(6), 0).tolist()
    [0.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    """
    return DistanceMap(window, slope=0.0)


def leaky_rerope(window: int, factor: float) -> DistanceMap:
    """Leaky ReRoPE: beyond the window every token counts 1 / factor.

    There the distance is window + (m - n - window) / factor. ReRoPE is its limit for a large
    factor; factor 1 changes nothing.
    Raises ValueError if factor < 1.
    Source: Su, kexue.fm 9708 and 9728.

    >>> import numpy as np
    >>> leaky_rerope(2, factor=4)(np.arange(6), 0).tolist()
    [0.0, 1.0, 2.0, 2.25, 2.5, 2.75]
    """
    if not factor >= 1:
        raise ValueError(f"factor must be >= 1, got {factor!r}")
    return DistanceMap(window, slope=1 / factor)


def self_extend(window: int, group: int) -> DistanceMap:
    """Self-extend: beyond the window, positions are divided by `group` and rounded down.

        m // group - n // group + window - window // group

    Source: Jin et al. (arXiv 2401.01325), section 3. The authors' code divides window by group
    without rounding, and drops the shift for sequences shorter than the window; the paper does not.

    >>> import numpy as np
    >>> self_extend(window=4, group=2)(np.arange(8), 0).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 4.0, 5.0, 5.0]
    """
    return DistanceMap(window, group=group)


def distance_attention(
    q: Array,
    k: Array,
    v: Array,
    spec: Rotary,
    distances: DistanceMap,
    *,
    q_positions: object = None,
    k_positions: object = None,
    allow_negative: bool = False,
) -> Array:
    """Causal softmax attention in which q and k are rotated by mapped distances, exactly.

    It computes two score matrices. For distances inside the window, q and k are rotated as usual.
    Beyond it, positions are m // group, frequencies are `slope` times those of the spec, and q is
    also rotated by the shift. Angles of both are 64-bit turns, so they are exact at any offset.
    Cache k unrotated. Positions, `allow_negative` and heads are as in `softmax_attention`.
    Raises ValueError for a spec of several axes or one that depends on the length.

    >>> import numpy as np
    >>> x, spec = np.eye(4), Rotary(head_dim=4)
    >>> distance_attention(x, x, x, spec, rerope(2)).shape
    (4, 4)
    """
    check_steady("distances need", spec)
    if not isinstance(distances, DistanceMap):
        raise TypeError(
            f"distances must be a DistanceMap, such as rerope(window), got {brief(distances)}"
        )
    m, n = positions_of_both(q_positions, q, k_positions, k)
    k, v = per_query_head(q, k), per_query_head(q, v)
    q, k = at_least_float32(q), at_least_float32(k)
    far_spec, shift_spec = _far_specs(spec, distances._slope_and_shift)
    far_q, far_k, near_q, near_k = (
        apply(each, x, positions=where, seq_dim=-2, allow_negative=allow_negative)
        for each, x, where in (
            (far_spec, q, m // distances.group),
            (far_spec, k, n // distances.group),
            (spec, q, m),
            (spec, k, n),
        )
    )
    far_q = apply(shift_spec, far_q, positions=0 * m + 1, seq_dim=-2)
    m, n = m[..., :, None], n[..., None, :]
    near, far = near_q @ near_k.swapaxes(-1, -2), far_q @ far_k.swapaxes(-1, -2)
    scores = namespace(q).where(per_head(m - n < distances.window, q.ndim), near, far)
    return weighted(scores / math.sqrt(q.shape[-1]), per_head(n <= m, q.ndim), v)


_recorded = types.SimpleNamespace()  # the specs of compiled programs, each pair an attribute


def _record_specs(spec: Rotary, slope_and_shift: str) -> str:
    specs = _far_specs(spec, slope_and_shift)
    name = f"specs_{id(specs)}"
    setattr(_recorded, name, specs)
    return name


def _recorded_specs(spec: Rotary, slope_and_shift: str) -> tuple[Rotary, Rotary]:
    """Do what `_far_specs` does, in steps that torch.compile can record: it makes no spec."""
    text = slope_and_shift.strip()  # an attribute is a constant after any operation on it
    name = str(spec.constant(_record_specs, text))
    specs: tuple[Rotary, Rotary] = getattr(_recorded, name)
    return specs


@recorded_as(_recorded_specs)
def _far_specs(spec: Rotary, slope_and_shift: str) -> tuple[Rotary, Rotary]:
    """Return the spec of distances beyond the window, and that of the shift of q."""
    slope, shift = map(float, slope_and_shift.split())
    frequencies, factor = inv_freq(spec)
    far_spec = _with_frequencies(spec, slope * frequencies, float(factor))
    shift_spec = _with_frequencies(spec, shift * frequencies, 1.0)
    return far_spec, dataclasses.replace(shift_spec, layout=spec.out_layout)


def _with_frequencies(spec: Rotary, frequencies: Array, factor: float) -> Rotary:
    params = {"inv_freq": frequencies, "attention_factor": factor}
    return dataclasses.replace(spec, schedule="custom", params=params)
