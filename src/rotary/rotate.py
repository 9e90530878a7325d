"""`rotate` and `apply`: the two functions that rotate q and k, for every array library."""

from typing import Any, TypeVar, overload

from . import layouts
from .angles import Precision, cos_sin, inv_freq, sequence_cos_sin, turns
from .kernels import Array, Kernel, check_positions, hint_for, is_per_row, kernel_of, known_kernel
from .kernels.geometry import AngleOptions, Angles, Options, check_axes, geometry_of, seq_axis
from .spec import Rotary, check_spec
from .words import brief

Other = TypeVar("Other", bound=Any)  # an array of the library of `Array`


@overload
def rotate(
    x: list[Array],
    cos: object,
    sin: object,
    spec: Rotary | None = None,
    *,
    layout: str | None = None,
    out_layout: str | None = None,
    rotary_dim: int | None = None,
    start: int | None = None,
    seq_dim: int | None = None,
    positions: object = None,
    conjugate: bool = False,
    out: object = None,
) -> tuple[Array, ...]: ...
@overload
def rotate(
    x: Array,
    cos: object,
    sin: object,
    spec: Rotary | None = None,
    *,
    layout: str | None = None,
    out_layout: str | None = None,
    rotary_dim: int | None = None,
    start: int | None = None,
    seq_dim: int | None = None,
    positions: object = None,
    conjugate: bool = False,
    out: object = None,
) -> Array: ...
def rotate(
    x: Array | list[Array],
    cos: object,
    sin: object,
    spec: Rotary | None = None,
    *,
    layout: str | None = None,
    out_layout: str | None = None,
    rotary_dim: int | None = None,
    start: int | None = None,
    seq_dim: int | None = None,
    positions: object = None,
    conjugate: bool = False,
    out: object = None,
) -> Array | tuple[Array, ...]:
    """Rotate `x`, or every array of a tuple such as (q, k), by tables of cos and sin.

    x          (..., seq, head_dim), or with seq_dim=-3 (..., seq, heads, head_dim); a tuple is
               rotated in one go and may differ in the number of heads
    cos, sin   (seq, pairs) for all rows, (batch, seq, pairs) for a 4-D x, or as many axes as x;
               float32 and half width: pairs = rotary_dim / 2. Sign and attention factor of a spec
               are in them already: `cos_sin` put them there.
    spec       which channels make a pair: its layout, out_layout, rotary_dim and start are used
    layout     "half" or "interleaved"; needed if there is no spec, not allowed beside one
    out_layout layout that is written; default `layout`
    rotary_dim 2 * pairs; needed without a spec if only a part of the head is rotated, from channel
               `start` on, by default 0; the rest is copied
    seq_dim    axis of the tokens, default -2. It must be given if the tables would also fit axis
               -3, so that (batch, seq, heads, head_dim) is never rotated along its heads. They fit
               both if there are as many tokens as heads, more than one, and q and k have the same
               number of heads. So always give it if q and k have the same number of heads and the
               number of tokens varies. Symbolic lengths of torch.compile or torch.export are not
               compared.
    positions  row numbers into tables of shape (rows, pairs): (seq,) or (batch, seq)
    conjugate  rotate by -angle and keep the attention factor: the transpose, which the gradient
               needs. With a spec it takes pairs in the spec's out_layout and returns them in its
               layout; without a spec, `layout` and `out_layout` are used as given. To undo a
               rotation, divide the rotated channels by the square of the attention factor.
    out        where to write: arrays of the shape of x; `out=x` rotates in place
    Returns new arrays (or `out`) of the dtype of x, computed in float32 (float64 for a float64 x)
    and rounded once.

    Raises TypeError without a spec and without a layout, or with both; for a dtype that is not
    floating point, or an array of a library that is not known. Raises ValueError for shapes that do
    not fit the spec or each other, or are ambiguous, for a row number outside the tables, and for
    memory that overlaps. Row numbers are not checked on a GPU, where reading them would wait for
    the device, nor while a program is recorded or traced; there a row outside the tables gives NaN.
    The page docs/modes.md lists every mode.
    Source: Su et al., RoFormer (arXiv 2104.09864), equation 34.

    >>> import numpy as np
    >>> cos, sin = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)  # a quarter turn
    >>> rotate(np.array([[3.0, 4.0]], np.float32), cos, sin, layout="half")
    array([[-4.,  3.]], dtype=float32)
    >>> spec = Rotary(head_dim=4, rotary_dim=2, layout="interleaved")
    >>> rotate(np.array([[3.0, 4.0, 5.0, 6.0]], np.float32), cos, sin, spec)
    array([[-4.,  3.,  5.,  6.]], dtype=float32)
    """
    is_several = isinstance(x, (tuple, list))
    xs = tuple(x) if is_several else (x,)
    if not xs:
        raise ValueError("x must hold at least one array")
    outs = None if out is None else outputs(out, len(xs))
    caller_options = spec, layout, out_layout, rotary_dim, start, seq_dim, conjugate
    kind = type(xs[0])
    kernel = known_kernel(kind) or kernel_of(xs[0])
    if kernel.quick is not None:
        tables = (cos, sin) if positions is None else (cos, sin, positions)
        results = kernel.quick(caller_options, options_of, xs, tables, outs)
        if results is not None:
            return results if is_several else results[0]
    if kernel.check is not None:
        kernel.check(xs[0])
    check_library(kernel, xs[0], *xs[1:], cos, sin, *(outs or ()))
    if positions is not None:
        check_positions(positions)
    results = kernel.rotate(xs, cos, sin, positions, options_of(*caller_options), outs)
    return results if is_several else results[0]


def check_library(kernel: Kernel[Array], x: Array, *others: object) -> None:
    """Refuse arrays that `kernel`, that of x, does not take.

    >>> import numpy as np
    >>> check_library(kernel_of(np.ones(2)), np.ones(2), [1.0, 2.0])
    Traceback (most recent call last):
    TypeError: all arrays must be of one library: ndarray and builtins.list; cos_sin makes tables \
in the library of its positions
    """
    kind = type(x)
    for array in others:
        if type(array) is not kind and not kernel.takes(array):
            if isinstance(array, Rotary):
                raise TypeError(f"cos and sin must be arrays, got a Rotary: {_BOTH_FORMS}")
            raise TypeError(
                f"all arrays must be of one library: {kind.__qualname__} and "
                f"{type(array).__module__}.{type(array).__qualname__}{hint_for(type(array))}; "
                "cos_sin makes tables in the library of its positions"
            )


_BOTH_FORMS = (
    "call rotate(x, cos, sin, spec), or without a spec rotate(x, cos, sin, layout='half') or "
    "layout='interleaved'"
)


def options_of(
    spec: Rotary | None,
    layout: str | None = None,
    out_layout: str | None = None,
    rotary_dim: int | None = None,
    start: int | None = None,
    seq_dim: int | None = None,
    conjugate: bool = False,
    sign: int = 1,
) -> Options:
    """Return the options of a kernel for these arguments of `rotate`.

    `sign` is that of the spec, or 1 if the tables include it already.
    Raises TypeError without a spec and without a layout, and for both, and for a `conjugate` that
    is not True or False; ValueError for a layout that is neither half nor interleaved.

    >>> options_of(Rotary(head_dim=4)).layout
    'half'
    """
    if conjugate not in (True, False):
        raise TypeError(f"conjugate must be True or False, got {brief(conjugate)}")
    if spec is None:
        if layout is None:
            raise TypeError(f"rotate does not guess which channels make a pair: {_BOTH_FORMS}")
        layouts.check(layout)
        if out_layout is not None:
            layouts.check(out_layout, "out_layout")
        return Options(layout, out_layout, rotary_dim, start or 0, seq_dim, None, conjugate)
    if not isinstance(spec, Rotary):
        raise TypeError(f"spec must be a Rotary, got {type(spec).__qualname__}; {_BOTH_FORMS}")
    if not (layout is None and out_layout is None and rotary_dim is None and start is None):
        raise TypeError(f"the spec has layout, out_layout, rotary_dim and start: {_BOTH_FORMS}")
    read, written = spec.layout, spec.out_layout
    if conjugate:
        read, written = written, read
    is_back = not conjugate if sign < 0 else conjugate
    return Options(read, written, spec.rotary_dim, spec.start, seq_dim, spec.head_dim, is_back)


def outputs(out: object, count: int) -> tuple[Any, ...]:
    """Return `out` as a tuple; ValueError unless it holds `count` arrays.

    >>> outputs("y", 1)
    ('y',)
    """
    outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if len(outs) != count:
        raise ValueError(
            f"out must hold one array for each of the {count} inputs, as out=(q, k) for (q, k); "
            f"got {len(outs)}"
        )
    return outs


@overload
def apply(
    spec: Rotary,
    q: Array,
    k: None = None,
    *,
    positions: object = None,
    seq_dim: int | None = None,
    seq_len: object = None,
    precision: Precision = "exact",
    allow_negative: bool = False,
    conjugate: bool = False,
    out: object = None,
) -> Array: ...
@overload
def apply(
    spec: Rotary,
    q: Array,
    k: Other,
    *,
    positions: object = None,
    seq_dim: int | None = None,
    seq_len: object = None,
    precision: Precision = "exact",
    allow_negative: bool = False,
    conjugate: bool = False,
    out: object = None,
) -> tuple[Array, Other]: ...
def apply(
    spec: Rotary,
    q: Array,
    k: Other | None = None,
    *,
    positions: object = None,
    seq_dim: int | None = None,
    seq_len: object = None,
    precision: Precision = "exact",
    allow_negative: bool = False,
    conjugate: bool = False,
    out: object = None,
) -> Array | tuple[Array, Other]:
    """Rotate q and k by `spec`, at `positions` or at 0 .. seq - 1.

    q, k       (..., seq, head_dim), or with seq_dim=-3 (..., seq, heads, head_dim)
    positions  (seq,) or (batch, seq); with several axes (seq, axes) or (batch, seq, axes)
    seq_dim    axis of the tokens, default -2. With positions it must be given if they would also
               fit axis -3, see `rotate`.
    Other arguments and errors as in `cos_sin` and `rotate`. Returns (q, k), or q alone if k is
    None. On a GPU the kernel computes exact angles without tables. Positions are not checked on a
    GPU, nor while a program is recorded or traced: negative ones rotate backwards there.

    >>> import numpy as np
    >>> q = np.ones((1, 2, 3, 4), np.float32)
    >>> bool((apply(Rotary(head_dim=4), q)[:, :, 0] == 1).all())  # position 0 changes nothing
    True
    """
    if type(spec) is not Rotary:
        check_spec(spec)
    kind = type(q)
    kernel: Kernel[Array] = known_kernel(kind) or kernel_of(q)
    xs = (q,) if k is None else (q, k)
    outs = None if out is None else outputs(out, len(xs))
    if positions is None:
        check_one_axis(spec)
        seq_dim = -2 if seq_dim is None else seq_dim
    else:
        if type(positions) is not kind:
            check_positions(positions)
        positions = kernel.as_positions(positions, q)
    if (
        precision == "exact"
        and kernel.quick
        and is_length_known(spec, seq_len)
        and (positions is not None or (kernel.is_on_gpu and kernel.is_on_gpu(q)))
    ):
        known_length = seq_len if spec.depends_on_length else None
        caller_options = spec, seq_dim, conjugate, known_length, allow_negative
        tables = () if positions is None else (positions,)
        results: Any = kernel.quick(caller_options, angle_options, xs, tables, outs)
        if results is not None:
            return results[0] if k is None else results
    if kernel.check is not None:
        kernel.check(q)
    options = options_of(spec, seq_dim=seq_dim, conjugate=conjugate, sign=spec.sign)
    is_exact = precision == "exact" and _is_of_one_length(spec, positions, seq_len)
    seq = q.shape[seq_axis(tuple(q.shape), seq_dim)]
    if positions is not None:
        is_part = kernel.on_shards is not None
        check_tokens(spec, tuple(positions.shape), (tuple(q.shape),), options, is_part)
        if outs is not None and kernel.check_out is not None:
            shapes = [[getattr(array, "shape", None) for array in each] for each in (xs, outs)]
            if shapes[0] == shapes[1]:  # others are refused below
                kernel.check_out((*xs, positions), outs)
    if (
        is_exact
        and kernel.rotate_exact
        and kernel.makes_angles
        and kernel.makes_angles(xs, positions, outs, spec.num_axes)
    ):
        length: Any = seq if seq_len is None else seq_len
        bits, scale = turns(spec, length), inv_freq(spec, length)[1]
        results = kernel.rotate_exact(xs, bits, scale, spec.axes, positions, options, outs)
        return results[0] if k is None else results
    if positions is None:
        cos, sin = sequence_cos_sin(spec, q, seq, precision, seq_len)
    else:
        cos, sin = cos_sin(spec, positions, precision, seq_len, allow_negative=allow_negative)
    results = rotate(list(xs), cos, sin, spec, seq_dim=seq_dim, conjugate=conjugate, out=outs)
    return results[0] if k is None else results


def is_length_known(spec: Rotary, seq_len: object) -> bool:
    """Whether the frequencies are known without reading positions.

    >>> is_length_known(Rotary(head_dim=4), None)
    True
    """
    return type(seq_len) is int or not spec.depends_on_length


def angle_options(
    spec: Rotary,
    seq_dim: int | None = None,
    conjugate: bool = False,
    seq_len: int | None = None,
    allow_negative: bool = False,
) -> AngleOptions:
    """Return the options for a rotation at positions.

    >>> angle_options(Rotary(head_dim=4)).form == (Rotary(head_dim=4), None, False)
    True
    """
    options = options_of(spec, seq_dim=seq_dim, conjugate=conjugate, sign=spec.sign)
    return AngleOptions(options, (spec, seq_len, allow_negative), _angles_of)


def _angles_of(form: tuple[Rotary, int | None, bool]) -> Angles:
    spec, length, allow_negative = form
    lowest = -(2**63) if allow_negative else 0
    return Angles(turns(spec, length), inv_freq(spec, length)[1], tuple(spec.axes), lowest)


def _is_of_one_length(spec: Rotary, positions: object, seq_len: object) -> bool:
    """Whether all rows are known to have the same frequencies, without reading positions."""
    if not spec.depends_on_length:
        return True
    return positions is None if seq_len is None else not is_per_row(seq_len)


def check_one_axis(spec: Rotary) -> None:
    """Refuse a spec with several axes where there are no positions.

    >>> check_one_axis(Rotary(head_dim=4))
    """
    if spec.num_axes > 1:
        raise ValueError(f"a spec with {spec.num_axes} axes needs positions (..., seq, axes)")


def check_tokens(
    spec: Rotary,
    shape: tuple[int, ...],
    x_shapes: tuple[tuple[int, ...], ...],
    options: Options,
    is_part: bool,
) -> None:
    """Refuse positions that do not fit q, before tables are made of them.

    A table of as many axes as x is legal for `rotate`, but positions never have a head axis.

    >>> check_tokens(Rotary(head_dim=4), (3,), ((2, 3, 4),), Options(), False)
    """
    x_shape = x_shapes[0]
    check_axes(spec.num_axes, shape)
    tokens = shape[:-1] if spec.num_axes > 1 else shape
    if len(tokens) > 2 or (len(tokens) == 2 and len(x_shape) < 4):
        axes = ", axes" if spec.num_axes > 1 else ""
        hint = "; a 1-D spec has no axes" if spec.num_axes == 1 and len(tokens) == 3 else ""
        raise ValueError(
            f"positions must be (seq{axes}) or, for a 4-D q, (batch, seq{axes}); "
            f"got shape {shape} for q {x_shape}{hint}"
        )
    # torch.jit.trace records sizes that are not ints; a shard has only a part of the sizes
    if tokens and not is_part and all(type(size) is int for size in (*tokens, *x_shape)):
        table = x_shape[seq_axis(x_shape, options.seq_dim)], spec.rotary_dim // 2
        geometry_of(x_shapes, table, tokens, options)
