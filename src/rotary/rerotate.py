"""`rerotate`: move cached keys, which are already rotated, to other positions or frequencies."""

from collections.abc import Iterable, Sequence
from functools import partial
from operator import is_
from typing import overload

import numpy as np

from .angles import moved_cos_sin, turns
from .kernels import Array, Kernel, is_per_row, kernel_of
from .kernels.geometry import Options, seq_axis
from .kernels.numpy import CODES, FLOATS
from .rotate import check_library, outputs, rotate
from .spec import Rotary, check_spec

_FIXED = ("head_dim", "rotary_dim", "start", "out_layout")


@overload
def rerotate(
    k: list[Array],
    spec: Rotary,
    from_positions: object = None,
    to_positions: object = None,
    new_spec: Rotary | None = None,
    *,
    shift: object = None,
    blocks: object = None,
    scale: object = None,
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
    from_positions: object = None,
    to_positions: object = None,
    new_spec: Rotary | None = None,
    *,
    shift: object = None,
    blocks: object = None,
    scale: object = None,
    seq_len: object = None,
    new_seq_len: object = None,
    seq_dim: int | None = None,
    allow_negative: bool = False,
    out: object = None,
) -> Array: ...
def rerotate(
    k: Array | list[Array],
    spec: Rotary,
    from_positions: object = None,
    to_positions: object = None,
    new_spec: Rotary | None = None,
    *,
    shift: object = None,
    blocks: object = None,
    scale: object = None,
    seq_len: object = None,
    new_seq_len: object = None,
    seq_dim: int | None = None,
    allow_negative: bool = False,
    out: object = None,
) -> Array | tuple[Array, ...]:
    """Move keys that `spec` rotated at `from_positions` to `to_positions`, under `new_spec`.

    k               (..., seq, head_dim), or with seq_dim=-3 (..., seq, heads, head_dim), as they
                    are cached: rotated, and in `spec.out_layout`. A tuple is moved in one go: the
                    layers of a cache. Queries can be moved as well. Floating point, or of 8 bits:
                    int8, float8_e4m3fn, float8_e5m2.
    from_positions  (seq,) or (batch, seq); with several axes (seq, axes) or (batch, seq, axes)
    to_positions    the same, with the axes of `new_spec`
    new_spec        default `spec`; head_dim, rotary_dim, start and out_layout must be those of
                    `spec`. Base, schedule, params, axes and sign may differ.
    shift           tokens to move by, in place of both positions: whole numbers, also negative, or
                    fractions as float64; one number for all tokens, or an array of the shape of the
                    positions
    blocks          (n,) indices of the first axis of k, each once: only these are moved. Then k is
                    a paged cache, (blocks, block, heads, head_dim) or (blocks, heads, block,
                    head_dim), a flat one, (slots, heads, head_dim), or rows of latents, (blocks,
                    block, head_dim). `shift` is one number or (n,); positions are (n,), or (n,
                    block) for each token, along seq_dim, which must be given for a 4-D k.
    scale           of 8-bit keys: an array that broadcasts to k. It does not change, and is needed
                    only if it differs between channels of a head; otherwise it cancels.
    seq_len, new_seq_len  for `dynamic`, `dynamic_linear` and `longrope`: the length that k was
                    rotated for, and the new one; as in `cos_sin`. To change only the length:
                    `rerotate(k, spec, m, m, seq_len=4, new_seq_len=8)`.
    seq_dim         axis of the tokens, default -2; give it if there can be as many tokens as heads
                    and all arrays of the tuple have the same number of heads
    Returns new arrays (or `out`, which may be `k`) of the dtype of k. Channels that are not rotated
    are copied, and so are other blocks; with `out=k` only the given ones are read and written. The
    attention factor is applied once: the one that k already has is divided out.

    A pair turns by to * turns_new - from * turns_old, in 64-bit integers modulo one turn. So only
    the cos and sin of the result are rounded, at any positions: by 2^-25 + 2^-28, plus 1.7e-19 for
    each token of either position. JAX tables of traced positions are right to 1.1e-7.
    Two tables are multiplied in float32, right to 3e-7, if positions are fractional, or if the
    frequencies change at positions that are traced or on an accelerator. Keys that were rotated by
    float32 angles keep the error of those angles.

    Errors of many moves add up. In float32, with one attention factor, a move of a pair of length r
    rounds four products, by sqrt(2) 2^-24 r together, and two sums, by 2^-24 r. Its cos and sin are
    off by 2^-25 + 2^-28, which adds 0.8 * 2^-24 r. That is at most 3.25 * 2^-24 = 1.94e-7 of r, and
    (1 + 1.94e-7)^n - 1 for n moves: 2e-4 for 1000. The angles add up without rounding, so moving
    the original keys each time stays at 1.94e-7. 16-bit types also round the result of every move.

    8-bit keys are rotated in float32 and rounded once to their codes, so each move adds as much
    error as quantizing did. A pair keeps its length, but one of its channels can grow by up to
    sqrt(2), and a value beyond the largest code is cut off; leave this margin in the scales. If a
    move changes a slow pair by less than half a code, rounding undoes it: add up shifts, and move
    once.

    Raises ValueError for specs that differ in slice or layout, for positions that do not fit k or
    each other, or are negative without `allow_negative`, and for a block that is not in k or given
    twice (not checked on a GPU, nor while a program is recorded or traced); all else as `rotate`.
    Source: Su et al., RoFormer (arXiv 2104.09864), equation 16: R_m^T R_n = R_{n - m}. Positions
    within a cache: Xiao et al., StreamingLLM (arXiv 2309.17453), section 3.2. Paged caches:
    Kwon et al., PagedAttention (arXiv 2309.06180), section 4.

    >>> import numpy as np, rotary
    >>> spec, k = Rotary(head_dim=4), np.ones((3, 4))
    >>> cached = rotary.apply(spec, k, positions=[7, 8, 9])
    >>> moved = rerotate(cached, spec, from_positions=[7, 8, 9], to_positions=[4, 5, 6])
    >>> np.allclose(moved, rotary.apply(spec, k, positions=[4, 5, 6]))
    True
    >>> cache = np.ones((8, 16, 2, 4), np.float32)  # 8 blocks of 16 tokens, 2 heads
    >>> _ = rerotate(cache, spec, blocks=[5, 2], shift=[-16, -32], out=cache)
    >>> (cache != 1).any(axis=(1, 2, 3))
    array([False, False,  True, False, False,  True, False, False])
    """
    xs = tuple(k) if isinstance(k, (tuple, list)) else (k,)
    if not xs:
        raise ValueError("k must hold at least one array")
    like, kernel = xs[0], kernel_of(xs[0])
    check_spec(spec, "spec, the second argument,")
    check_spec(spec if new_spec is None else new_spec, "new_spec")
    check_library(kernel, like, *xs[1:])
    shape = tuple(like.shape)
    axis = seq_axis(shape, seq_dim)
    if shape[-1] != spec.head_dim:
        raise ValueError(
            f"the last axis of k must be head_dim={spec.head_dim} of the spec, got {shape[-1]}"
        )
    for index, x in enumerate(xs[1:], start=1):
        _check_layer(index, x, like, axis, is_paged=blocks is not None)
    if out is not None and len(xs) > 1 and kernel.check_out is not None:
        kernel.check_out(xs, outputs(out, len(xs)))
    shift = None if shift is None else _signed(kernel, shift, like)
    is_shift = shift is not None and from_positions is to_positions is new_spec is scale is None
    if is_shift and _moved_in_place(kernel, xs, spec, shift, blocks, out):
        return xs if isinstance(k, (tuple, list)) else like
    picked = None if blocks is None else _picked(kernel, blocks, xs)
    count = shape[axis] if picked is None else len(picked)
    if shift is not None:
        if not (from_positions is None and to_positions is None and new_spec is None):
            raise TypeError("give shift=, or from_positions, to_positions and perhaps new_spec")
        from_positions, to_positions = _shifted(kernel, shift, spec, count, like)
        new_seq_len, allow_negative = seq_len, True
    if from_positions is None or to_positions is None:
        raise TypeError("rerotate needs from_positions and to_positions, or shift=")
    new_spec = spec if new_spec is None else new_spec
    _check_specs(spec, new_spec)
    if shift is not None or picked is not None:
        _check_lengths((("seq_len", spec, seq_len), ("new_seq_len", new_spec, new_seq_len)))
    old, new = (kernel.as_positions(where, like) for where in (from_positions, to_positions))
    names = ("from_positions", "to_positions") if shift is None else ("shift", "shift")
    for name, where, each in zip(names, (old, new), (spec, new_spec), strict=True):
        if picked is None:
            _check_positions(name, where, each, count, shape)
        else:
            _check_block_positions(name, where, each, count, shape, seq_dim)
    if picked is not None and not any(map(is_per_row, (seq_len, new_seq_len))):
        picked, old, new = _in_order(kernel, picked, old, new, len(like))
    cos, sin = moved_cos_sin(spec, new_spec, old, new, like, seq_len, new_seq_len, allow_negative)
    dtype = _dtype_of(like)
    if dtype not in (*FLOATS, *CODES):
        raise TypeError(f"k must be one of {', '.join((*FLOATS, *CODES))}, got {like.dtype}")
    scales = None if scale is None else _channel_scales(kernel, scale, xs, dtype)
    if picked is None and dtype not in CODES:
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
    if kernel.move is None:
        raise TypeError(f"{kernel.name} keys are not moved in blocks or 8 bits: move x.to_local()")
    if picked is not None:
        sizes = [count, *[1] * (len(shape) - 2), spec.rotary_dim // 2]
        if len(cos.shape) == 3:
            sizes[axis] = shape[axis]
            if any([x.shape[axis] != shape[axis] for x in xs]):
                raise ValueError("positions of each token need arrays k of one block size")
        cos, sin, seq_dim = cos.reshape(sizes), sin.reshape(sizes), 0
    options = Options(spec.out_layout, None, spec.rotary_dim, spec.start, seq_dim, spec.head_dim)
    outs = [None] * len(xs) if out is None else outputs(out, len(xs))
    moved = tuple(
        kernel.move(x, cos, sin, picked, scales, options, y) for x, y in zip(xs, outs, strict=True)
    )
    return moved if isinstance(k, (tuple, list)) else moved[0]


def _moved_in_place(
    kernel: Kernel[Array], xs: Sequence[Array], spec: Rotary, shift: object, blocks: object,
    out: object,
) -> bool:  # fmt: skip
    """Move blocks of caches in place by code that does not read positions, if that is possible.

    Returns whether it did; if not, nothing has changed.
    """
    outs = out if isinstance(out, (tuple, list)) else (out,)
    is_in_place = len(outs) == len(xs) and all(map(is_, xs, outs))
    is_simple = is_in_place and not (spec.axes or spec.depends_on_length)
    if kernel.move_by is None or blocks is None or not is_simple:
        return False
    options = Options(spec.out_layout, None, spec.rotary_dim, spec.start, 0, spec.head_dim)
    return kernel.move_by(xs, blocks, shift, partial(turns, spec), spec.sign < 0, options)


def _dtype_of(x: Array) -> str:
    return str(getattr(x.dtype, "name", x.dtype)).rpartition(".")[2]  # NumPy's may be ">i8"


def _check_layer(index: int, x: Array, like: Array, axis: int, *, is_paged: bool) -> None:
    """Refuse an array that does not fit the first one, before any of them is moved."""
    shape, first = tuple(x.shape), tuple(like.shape)
    free = [len(first) - 2 if axis == len(first) - 3 else len(first) - 3]  # heads may differ
    free += ([0, 1] if len(first) == 3 else [0]) if is_paged else []  # (slots, heads, head_dim)
    sizes = [[n for place, n in enumerate(each) if place not in free] for each in (shape, first)]
    if len(shape) != len(first) or sizes[0] != sizes[1] or _dtype_of(x) != _dtype_of(like):
        raise ValueError(
            f"k[{index}] must be like k[0], {like.dtype} {first}, except for the number of heads "
            f"or blocks; got {x.dtype} {shape}"
        )


def _check_specs(spec: Rotary, new_spec: Rotary) -> None:
    for name in _FIXED:
        old, new = getattr(spec, name), getattr(new_spec, name)
        if old != new:
            raise ValueError(
                f"new_spec must have the {name} of spec, {old!r}, got {new!r}: "
                "re-rotation does not move channels"
            )


def _check_lengths(lengths: Iterable[tuple[str, Rotary, object]]) -> None:
    """Refuse shifts or blocks without a length, which their positions do not tell."""
    for name, spec, seq_len in lengths:
        if spec.depends_on_length and seq_len is None:
            raise ValueError(
                f"with shift= or blocks= a {spec.schedule!r} spec needs {name}=, the length of the "
                "text that its keys are scaled for"
            )


def _check_positions(
    name: str, where: Array, spec: Rotary, seq: int, shape: tuple[int, ...]
) -> None:
    """Refuse positions that would broadcast, or run along the heads."""
    tokens = tuple(where.shape[:-1] if spec.num_axes > 1 else where.shape)
    batches = ((), (1,), shape[:1]) if len(shape) > 3 else ((),)
    if tokens[:-1] not in batches or tokens[-1:] != (seq,):
        axes = f", {spec.num_axes}" if spec.num_axes > 1 else ""
        raise ValueError(
            f"{name} must be ({seq}{axes}) or, for a 4-D k, (batch, {seq}{axes}); "
            f"got shape {tuple(where.shape)} for k {shape}"
        )


def _check_block_positions(
    name: str, where: Array, spec: Rotary, count: int, shape: tuple[int, ...], seq_dim: int | None
) -> None:
    """Refuse positions other than one for each of `count` blocks, or one for each token of them."""
    tokens = tuple(where.shape[:-1] if spec.num_axes > 1 else where.shape)
    axis = seq_axis(shape, seq_dim)
    if tokens == (count, shape[axis]) and axis > 0:
        if seq_dim is None and len(shape) > 3:
            raise ValueError(
                f"for {name} of each token pass seq_dim=-3 for k of (blocks, block, heads, "
                "head_dim), seq_dim=-2 for (blocks, heads, block, head_dim)"
            )
    elif tokens != (count,):
        axes = f", {spec.num_axes}" if spec.num_axes > 1 else ""
        raise ValueError(
            f"{name} must be ({count}{axes}), one for each block, or ({count}, tokens{axes}) with "
            f"the tokens along seq_dim; got shape {tuple(where.shape)} for k {shape}"
        )


def _picked(kernel: Kernel[Array], blocks: object, xs: Sequence[Array]) -> Array:
    """Return block numbers in the library of k, int64; check them if they are on the host."""
    is_empty = isinstance(blocks, (list, tuple)) and not blocks  # NumPy would take it for floats
    numbers = kernel.as_positions(np.empty(0, np.int64) if is_empty else blocks, xs[0])
    library = kernel_of(numbers)
    if len(numbers.shape) != 1 or library.inspect(numbers)[0] != "int":
        raise ValueError(
            f"blocks must be whole numbers of shape (n,), got {numbers.dtype} "
            f"{tuple(numbers.shape)}"
        )
    values = library.to_numpy(numbers)
    if values is None:
        return numbers
    last = min(len(x) for x in xs) - 1
    outside = values[(values < 0) | (values > last)]
    if outside.size:
        raise ValueError(
            f"blocks must be 0 to {last}, the first axis of k, got {outside[0]}; leave out "
            "padding: is_used = blocks >= 0, then blocks[is_used] and shift[is_used]"
        )
    is_given = np.zeros(last + 1, bool)
    is_given[values] = True
    if np.count_nonzero(is_given) < values.size:
        different, counts = np.unique(values, return_counts=True)
        raise ValueError(
            f"block {different[counts > 1][0]} is given twice: move a shared block only once"
        )
    return kernel.from_numpy(values.astype(np.int64))


def _in_order(
    kernel: Kernel[Array], blocks: Array, old: Array, new: Array, size: int
) -> tuple[Array, Array, Array]:
    """Sort blocks on the host, and their positions: memory is read fastest in rising order."""
    numbers, first, second = [kernel_of(each).to_numpy(each) for each in (blocks, old, new)]
    if numbers is None or first is None or second is None or (numbers[1:] > numbers[:-1]).all():
        return blocks, old, new
    row = np.full(size, -1)  # of each block among those given: no sort
    row[numbers] = np.arange(len(numbers))
    chosen = np.flatnonzero(row >= 0)
    order = row[chosen]
    return (
        kernel.from_numpy(chosen),
        kernel_of(old).from_numpy(first[order]),
        kernel_of(new).from_numpy(second[order]),
    )


def _signed(kernel: Kernel[Array], shift: object, like: Array) -> Array:
    """Return the shift in the library of k: unsigned types on the host as int64, bool refused."""
    numbers = kernel.as_positions(shift, like)
    dtype = _dtype_of(numbers)
    if not dtype.startswith(("int", "uint", "float", "bfloat")):
        raise TypeError(f"shift must be whole numbers of tokens, got {dtype}")
    values = kernel_of(numbers).to_numpy(numbers) if dtype.startswith("uint") else None
    if values is None:
        return numbers
    if values.max(initial=0) >= 2**63:
        raise ValueError(f"shift must fit in int64, got {values.max()}")
    return kernel.as_positions(values.astype(np.int64), like)


def _shifted(
    kernel: Kernel[Array], shift: Array, spec: Rotary, count: int, like: Array
) -> tuple[Array, Array]:
    """Return positions 0 and the shifted ones; a single shift holds for all of `count`."""
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    if tuple(shift.shape) == axes:
        if isinstance(count, int):
            zeros = kernel.as_positions(np.zeros(count, np.int64), like)
        else:  # a length that export leaves open
            zeros = 0 * kernel.arange(like, count)
        shift = shift + (zeros[:, None] if axes else zeros)
    return shift - shift, shift


def _channel_scales(
    kernel: Kernel[Array], scale: object, xs: Sequence[Array], dtype: str
) -> Array | None:
    """Return scales of 8-bit keys that differ between channels; None for others, which cancel."""
    if dtype not in CODES:
        raise TypeError(f"scale= is for keys of {', '.join(CODES)}, got k of {dtype}")
    scales = kernel.as_positions(scale, xs[0])
    sizes = tuple(scales.shape)
    for shape in [tuple(x.shape) for x in xs]:
        beside = shape[len(shape) - len(sizes) :]  # Dynamo of torch 2.8 fails in broadcast_shapes
        if len(beside) < len(sizes) or not all(
            [n in (1, m) for n, m in zip(sizes, beside, strict=True)]
        ):
            raise ValueError(f"scale of shape {sizes} does not broadcast to k {shape}")
    if sizes[-1:] in ((), (1,)):
        return None
    values = kernel_of(scales).to_numpy(scales)
    if values is not None and not (is_good := np.isfinite(values) & (values != 0)).all():
        raise ValueError(f"scale must be finite and not 0, got {values[~is_good][0]}")
    return scales
