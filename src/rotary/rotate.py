"""`rotate` and `apply`: the two calls of a model, for every array library."""

from typing import Any

from .angles import Precision, cos_sin, sequence_cos_sin
from .kernels import kernel_of
from .kernels.geometry import Options, seq_axis
from .spec import Rotary


def rotate(
    x: Any,
    cos: Any,
    sin: Any,
    *,
    layout: str = "half",
    out_layout: str | None = None,
    rotary_dim: int | None = None,
    start: int = 0,
    seq_dim: int = -2,
    positions: Any = None,
    conjugate: bool = False,
    out: Any = None,
) -> Any:
    """`x`, or every array of a tuple such as (q, k), rotated by tables of cos and sin.

    x          (..., seq, head_dim), or with seq_dim=-3 (..., seq, heads, head_dim); a tuple is
               rotated in one go and may differ in the number of heads
    cos, sin   (seq, pairs) for all rows, (batch, seq, pairs) for a 4-D x, or as many axes as x;
               float32 and half width: pairs = rotary_dim / 2
    positions  row numbers into tables of shape (rows, pairs): (seq,) or (batch, seq)
    rotary_dim needed if only a part of the head is rotated: 2 pairs, from channel `start` on; the
               rest is copied
    conjugate  turn by -angle and keep the amplitude: the transpose, that is, the gradient. The way
               back is conjugate=True divided by the square of the attention factor.
    out        where to write: arrays of the shape of x; `out=x` rotates in place
    Returns new arrays (or `out`) of the dtype of x: float32 inside, rounded once.

    Raises ValueError for shapes that do not fit or could mean two things, for a row number outside
    the tables, for memory that overlaps; TypeError for a dtype that is not floating point.
    Source: Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> import numpy as np
    >>> cos, sin = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)  # a quarter turn
    >>> rotate(np.array([[3.0, 4.0]], np.float32), cos, sin)
    array([[-4.,  3.]], dtype=float32)
    """
    is_several = isinstance(x, (tuple, list))
    xs = tuple(x) if is_several else (x,)
    if not xs:
        raise ValueError("x must hold at least one array")
    outs = None if out is None else tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if outs is not None and len(outs) != len(xs):
        raise ValueError(f"out must hold one array for each of the {len(xs)} inputs")
    kernel = kernel_of(xs[0])
    kind = type(xs[0])
    for array in (*xs[1:], cos, sin, *(outs or ())):
        if type(array) is not kind and not kernel.owns(array):
            raise TypeError(
                f"all arrays must be of one library: {kind.__qualname__} and "
                f"{type(array).__module__}.{type(array).__qualname__}"
            )
    options = Options(layout, out_layout, rotary_dim, start, seq_dim)
    results = kernel.rotate(xs, cos, sin, positions, options, conjugate, outs)
    return results if is_several else results[0]


def apply(
    spec: Rotary,
    q: Any,
    k: Any = None,
    *,
    positions: Any = None,
    seq_dim: int = -2,
    seq_len: Any = None,
    precision: Precision = "exact",
    allow_negative: bool = False,
    conjugate: bool = False,
    out: Any = None,
) -> Any:
    """q and k rotated as `spec` says, at `positions`, or at 0 .. seq - 1.

    q, k       (..., seq, head_dim), or with seq_dim=-3 (..., seq, heads, head_dim)
    positions  (seq,) or (batch, seq); with several axes (seq, axes) or (batch, seq, axes)
    Other arguments as in `cos_sin` and `rotate`. Returns (q, k), or q alone if k is None.

    >>> import numpy as np
    >>> q = np.ones((1, 2, 3, 4), np.float32)
    >>> bool((apply(Rotary(head_dim=4), q)[:, :, 0] == 1).all())  # position 0 changes nothing
    True
    """
    kernel = kernel_of(q)
    seq = q.shape[seq_axis(tuple(q.shape), seq_dim)]
    if q.shape[-1] != spec.head_dim:
        raise ValueError(f"the spec has head_dim {spec.head_dim}, q has {q.shape[-1]}")
    if positions is None:
        if spec.num_axes > 1:
            raise ValueError(f"a spec with {spec.num_axes} axes needs positions (..., seq, axes)")
        cos, sin = sequence_cos_sin(spec, q, seq, precision, seq_len)
    else:
        positions = kernel.taken_over(positions, q)
        _check_positions(spec, tuple(positions.shape), tuple(q.shape))
        cos, sin = cos_sin(spec, positions, precision, seq_len, allow_negative=allow_negative)
    return rotate(
        q if k is None else (q, k),
        cos,
        sin,
        layout=spec.layout,
        out_layout=spec.out_layout,
        rotary_dim=spec.rotary_dim,
        start=spec.start,
        seq_dim=seq_dim,
        conjugate=conjugate,
        out=out,
    )


def _check_positions(spec: Rotary, shape: tuple[int, ...], x_shape: tuple[int, ...]) -> None:
    """A table of as many axes as x is legal for `rotate`, but positions never have a head axis."""
    tokens = shape[:-1] if spec.num_axes > 1 else shape
    if len(tokens) > 2 or (len(tokens) == 2 and len(x_shape) < 4):
        axes = ", axes" if spec.num_axes > 1 else ""
        hint = "; a 1-D spec has no axes" if spec.num_axes == 1 and len(tokens) == 3 else ""
        raise ValueError(
            f"positions must be (seq{axes}) or, for a 4-D q, (batch, seq{axes}); "
            f"got shape {shape} for q {x_shape}{hint}"
        )
