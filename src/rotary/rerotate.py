"""`rerotate`: keys that are rotated and cached, moved to other positions or other frequencies."""

from typing import Any, overload

from .angles import moved_cos_sin
from .kernels import Array, kernel_of
from .kernels.geometry import seq_axis
from .rotate import rotate
from .spec import Rotary

_FIXED = ("head_dim", "rotary_dim", "start", "out_layout")


@overload
def rerotate(
    k: list[Array],
    spec: Rotary,
    from_positions: object,
    to_positions: object,
    new_spec: Rotary | None = None,
    *,
    seq_len: object = None,
    new_seq_len: object = None,
    seq_dim: int | None = None,
    allow_negative: bool = False,
    out: object = None,
) -> tuple[Array, ...]: ...
@overload
def rerotate(
    k: Array,
    spec: Rotary,
    from_positions: object,
    to_positions: object,
    new_spec: Rotary | None = None,
    *,
    seq_len: object = None,
    new_seq_len: object = None,
    seq_dim: int | None = None,
    allow_negative: bool = False,
    out: object = None,
) -> Array: ...
def rerotate(
    k: Array | list[Array],
    spec: Rotary,
    from_positions: object,
    to_positions: object,
    new_spec: Rotary | None = None,
    *,
    seq_len: object = None,
    new_seq_len: object = None,
    seq_dim: int | None = None,
    allow_negative: bool = False,
    out: object = None,
) -> Array | tuple[Array, ...]:
    """Keys rotated by `spec` at `from_positions`, as `new_spec` rotates them at `to_positions`.

    k               (..., seq, head_dim), or with seq_dim=-3 (..., seq, heads, head_dim), as they
                    are cached: rotated, and in `spec.out_layout`. A tuple is moved in one go: the
                    layers of a cache. Queries can be moved as well.
    from_positions  (seq,) or (batch, seq); with several axes (seq, axes) or (batch, seq, axes)
    to_positions    the same, with the axes of `new_spec`
    new_spec        default `spec`; head_dim, rotary_dim, start and out_layout must be those of
                    `spec`. Base, schedule, params, axes and sign may differ.
    seq_len, new_seq_len  lengths that `dynamic` and `longrope` were, and are now, scaled for; as in
                    `cos_sin`. Growth alone: `rerotate(k, spec, m, m, seq_len=4, new_seq_len=8)`.
    seq_dim         axis of the tokens, default -2; to be given where there are as many heads as
                    tokens, more than one, and the arrays of a tuple do not differ in heads
    Returns new arrays (or `out`, which may be `k`) of the dtype of k. Channels that are not rotated
    are copied. The attention factor is in there once: what k carries is divided out.

    A pair turns by to * turns_new - from * turns_old, in 64-bit integers modulo one turn, so only
    the cos and sin of the result are rounded, wherever both positions are: by 2^-25 + 2^-28, plus
    1.7e-19 for each token of either position. JAX tables of traced positions are right to 1.1e-7.
    Two tables are multiplied in float32, right to 3e-7, where positions are fractional, or where
    the frequencies change at positions that are traced or on an accelerator. Keys that were rotated
    by float32 angles keep the error of those.

    Many moves in float32, with one attention factor. Of a pair of length r a move rounds four
    products, by sqrt(2) 2^-24 r together, two sums, by 2^-24 r, and uses a cos and a sin that are
    off by 2^-25 + 2^-28, another 0.8 * 2^-24 r. That is 3.25 * 2^-24 = 1.94e-7 of r at most, and
    n moves (1 + 1.94e-7)^n - 1: 2e-4 for 1000. The angles themselves add up without any rounding,
    so moving the original keys each time stays at 1.94e-7. 16-bit types round every move besides.

    Raises ValueError for specs that put channels elsewhere, for positions that do not fit k or each
    other, or are negative unless `allow_negative`; all else as `rotate`.
    Source: Su et al., RoFormer (arXiv 2104.09864), equation 16: R_m^T R_n = R_{n - m}. Positions
    within a cache: Xiao et al., StreamingLLM (arXiv 2309.17453), section 3.2.

    >>> import numpy as np, rotary
    >>> spec, k = Rotary(head_dim=4), np.ones((3, 4))
    >>> cached = rotary.apply(spec, k, positions=[7, 8, 9])
    >>> moved = rerotate(cached, spec, from_positions=[7, 8, 9], to_positions=[4, 5, 6])
    >>> np.allclose(moved, rotary.apply(spec, k, positions=[4, 5, 6]))
    True
    """
    new_spec = spec if new_spec is None else new_spec
    _check_specs(spec, new_spec)
    like: Any = k[0] if isinstance(k, (tuple, list)) and k else k
    kernel = kernel_of(like)
    shape = tuple(like.shape)
    seq = shape[seq_axis(shape, seq_dim)]
    if shape[-1] != spec.head_dim:
        raise ValueError(f"the spec has head_dim {spec.head_dim}, k has {shape[-1]}")
    old, new = (kernel.as_positions(where, like) for where in (from_positions, to_positions))
    _check_positions("from_positions", old, spec, seq, shape)
    _check_positions("to_positions", new, new_spec, seq, shape)
    cos, sin = moved_cos_sin(spec, new_spec, old, new, like, seq_len, new_seq_len, allow_negative)
    return rotate(
        k,
        cos,
        sin,
        layout=spec.out_layout,
        rotary_dim=spec.rotary_dim,
        start=spec.start,
        seq_dim=seq_dim,
        out=out,
    )


def _check_specs(spec: Rotary, new_spec: Rotary) -> None:
    for name in _FIXED:
        old, new = getattr(spec, name), getattr(new_spec, name)
        if old != new:
            raise ValueError(
                f"new_spec must have the {name} of spec, {old!r}, got {new!r}: "
                "re-rotating moves no channel"
            )


def _check_positions(
    name: str, where: Array, spec: Rotary, seq: int, shape: tuple[int, ...]
) -> None:
    """Refuse what would broadcast, or run along the heads."""
    tokens = tuple(where.shape[:-1] if spec.num_axes > 1 else where.shape)
    batches = ((), (1,), shape[:1]) if len(shape) > 3 else ((),)
    if tokens[:-1] not in batches or tokens[-1:] != (seq,):
        axes = f", {spec.num_axes}" if spec.num_axes > 1 else ""
        raise ValueError(
            f"{name} must be ({seq}{axes}) or, for a 4-D k, (batch, {seq}{axes}); "
            f"got shape {tuple(where.shape)} for k {shape}"
        )
