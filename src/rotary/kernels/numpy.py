"""The reference implementation: the plain formula, in NumPy. Every other kernel agrees with it.

    first  of a pair:  x cos - y sin
    second of a pair:  y cos + x sin

float32 inside (float64 for float64 input), rounded once to the dtype of x. Nothing is fused, so the
float32 result is that of the formula that every code base uses.
"""

from collections.abc import Callable, Sequence, Sized
from functools import cache

import numpy as np

from ..layouts import pair_slices
from ..schedules import FLOAT32 as FLOAT32
from ..words import brief
from . import Kernel, Operand
from . import Numbers as Array
from .geometry import Geometry, Options, aligned, geometry_of_arrays
from .memory import Block, check_overlap


def rotate(
    xs: Sequence[Array],
    cos: Array,
    sin: Array,
    positions: object,
    options: Options,
    out: Sequence[Array] | None,
) -> tuple[Array, ...]:
    """Rotate every array of `xs`; into `out` if given, which may be `xs` itself.

    Arguments and errors are those of `rotary.rotate`.
    """
    check_operands(xs, cos, sin, out)
    rows = None if positions is None else check_rows(positions, cos)
    return turned(xs, cos, sin, rows, geometry_of_arrays(xs, cos, rows, options), out)


def turned(
    xs: Sequence[Array], cos: Array, sin: Array, rows: Array | None, geometry: Geometry,
    out: Sequence[Array] | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Rotate by the formula, without checks."""
    if rows is not None:
        cos, sin = cos[rows], sin[rows]
    cos, sin = aligned(cos, geometry.dims), aligned(sin, geometry.dims)
    sin = -sin if geometry.conjugate else sin
    results = []
    for index, x in enumerate(xs):
        work = np.promote_types(x.dtype, np.float32) if x.dtype.kind == "f" else np.float32
        first, second = _pairs(geometry, geometry.layout)
        u, v = x[..., first].astype(work), x[..., second].astype(work)
        y = x.copy() if out is None else out[index]
        if out is not None and y is not x:
            y[...] = x
        first, second = _pairs(geometry, geometry.out_layout)
        y[..., first] = u * cos - v * sin
        y[..., second] = v * cos + u * sin
        results.append(y)
    return tuple(results)


FLOATS = ("float32", "float64", "float16", "bfloat16")


@cache
def name_of(dtype: np.dtype[np.generic]) -> str:
    """Return the name of a dtype, with a foreign byte order; cached, because NumPy's is slow.

    >>> name_of(np.dtype(">f4")), name_of(np.dtype("f4"))
    ('>float32', 'float32')
    """
    return dtype.name if dtype.isnative else f"{dtype.byteorder}{dtype.name}"


def described(kind: str) -> str:
    """Return the name of a wrong dtype, of any library, with what an error says of it.

    >>> described("torch.bfloat16"), described("int32")
    ('torch.bfloat16: they are already rounded', 'int32')
    """
    if kind.startswith(("<", ">")):
        return f"{kind}: pass x.astype(x.dtype.newbyteorder('='))"
    is_short = kind.removeprefix("torch.") in ("float16", "bfloat16")
    return f"{kind}: they are already rounded" if is_short else kind


def wrong_positions(kind: str) -> TypeError:
    """Return the error for positions of a dtype, of any library."""
    return TypeError(
        f"positions must be whole numbers, or float64 if fractional, got {described(kind)}"
    )


def check_operands(
    xs: Sequence[Array], cos: Array, sin: Array, out: Sequence[Array] | None
) -> None:
    """Refuse what cannot be rotated: dtypes, mixed libraries, unusable `out`."""
    check_xs(xs, None)
    check_tables(cos, sin, name_of(cos.dtype), name_of(sin.dtype))
    if out is not None:
        check_out((*xs, cos, sin), out)


def check_xs(xs: Sequence[Array], out: Sequence[Array] | None) -> None:
    """Refuse x and `out` that cannot be rotated, whatever the tables are."""
    check_dtypes([name_of(x.dtype) for x in xs])
    if out is not None:
        check_out(xs, out)


def check_dtypes(kinds: Sequence[str]) -> None:
    """Refuse dtypes of q, k and v, of any library, that cannot be rotated or that differ."""
    for kind in kinds:
        if kind.removeprefix("torch.") not in FLOATS:
            raise TypeError(f"x must be one of {', '.join(FLOATS)}, got {described(kind)}")
        if kind != kinds[0]:
            raise TypeError(f"q, k and v must have one dtype, got {kinds[0]} and {kind}")


def check_tables(cos: Operand, sin: Operand, of_cos: str, of_sin: str) -> None:
    """Refuse tables, of any library, by their shapes and the names of their dtypes."""
    if cos.shape != sin.shape or of_cos != of_sin:
        raise ValueError(
            f"cos and sin must have one shape and dtype, got {of_cos} {tuple(cos.shape)} and "
            f"{of_sin} {tuple(sin.shape)}"
        )
    if of_cos.removeprefix("torch.") not in ("float32", "float64"):
        raise TypeError(f"tables must be float32, got {described(of_cos)}")


def check_out(inputs: Sequence[Array], out: Sequence[Array]) -> None:
    """Refuse outputs that are not like their input, are read-only, or overlap other arrays.

    `inputs` are the x of each output, in the same order, then other arrays such as the tables.
    """
    for x, y in zip(inputs, out, strict=False):
        check_like("input", x, y)
        if not y.flags.writeable:
            raise ValueError("out is read-only")
    both = [[(address(array), block(array)) for array in group] for group in (inputs, out)]
    check_overlap(both[0], both[1])


def check_like(name: str, x: Operand, out: Operand) -> None:
    """Refuse an output whose shape or dtype differs from an input or result, in any library."""
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(
            f"out must be {x.dtype} {tuple(x.shape)} like the {name}, "
            f"got {out.dtype} {tuple(out.shape)}"
        )


def block(array: Array) -> Block:
    """Return the shape, strides and dtype of an array."""
    return Block(array.shape, array.strides, name_of(array.dtype))


def address(array: Array) -> int:
    """Return the address of an array; keep the array alive while the address is used."""
    return array.ctypes.data  # __array_interface__ lists all fields of a record: 20 us for 45


def of_list(values: object) -> Array:
    """Return an array; an empty list holds whole numbers, where NumPy would make it float64.

    Raises ValueError for a list of rows of different lengths.

    >>> of_list([]).dtype, of_list([0.5]).dtype
    (dtype('int64'), dtype('float64'))
    """
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"all rows must have the same length, got {brief(values)}") from None
    is_empty_list = isinstance(values, (list, tuple)) and not array.size
    return array.astype(np.int64) if is_empty_list else array


def check_rows(positions: object, table: Sized) -> Array:
    """Return row numbers as int64; ValueError if one is outside the table."""
    rows = of_list(positions)
    if rows.dtype.kind not in "iu":
        raise TypeError(f"positions must be whole numbers to pick rows, got {rows.dtype}")
    if rows.size and (rows.min() < 0 or rows.max() >= len(table)):
        raise ValueError(
            f"positions run from {rows.min()} to {rows.max()}, the tables have {len(table)} rows"
        )
    return rows.astype(np.int64, copy=False)


def inspect(positions: Array) -> tuple[str, float | None, float | None]:
    """("int" | "float32" | "float64", smallest, largest) of an array of positions."""
    dtype = positions.dtype
    if dtype.kind in "iu":
        kind = "int"
    elif dtype in (np.float32, np.float64):
        kind = dtype.name
    elif "int" in dtype.name:  # of JAX and ml_dtypes, such as int4
        raise TypeError(f"positions must be whole numbers of 8 to 64 bits, got {dtype.name}")
    else:
        raise wrong_positions(name_of(dtype))
    if not positions.size:
        return kind, None, None
    return kind, positions.min().item(), positions.max().item()


def row_lengths(positions: Array) -> list[int]:
    """Return largest position + 1 of each row, 0 if all are negative.

    Positions are (batch, seq) or (batch, seq, axes).
    """
    if not positions.size:
        return []
    largest = positions.reshape(len(positions), -1).max(axis=1).tolist()
    return [max(0, int(each) + 1) for each in largest]


def arange(like: Array, count: int) -> Array:
    """Return positions 0 .. count - 1."""
    return np.arange(count, dtype=np.int64)


def takes(array: object) -> bool:
    """Whether an object is an array of this kernel."""
    return isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)


def as_positions(positions: object, like: Array) -> Array:
    """Convert positions, a list or an array of any library, to an array of this library."""
    return of_list(positions)


def to_numpy(positions: Array) -> Array:
    """Return the positions unchanged."""
    return positions


def from_numpy(table: Array) -> Array:
    """Return the table unchanged."""
    return table


def host_constant(function: Callable[..., Array], *arguments: object) -> Array:
    """Return `function(*arguments)`."""
    return function(*arguments)


def device_key(like: Array) -> str | None:
    """Return the device of tables for this array, a part of the cache key."""
    return "numpy"


def tables(
    positions: Array, turns: Array, scales: Array, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """Exact cos and sin: angle = position * turns modulo 2^64, a 64-bit fraction of one turn.

    positions  (batch, seq) or (batch, seq, axes) int64
    turns      (batch or 1, pairs) uint64;  scales (batch or 1,) float64, the attention factors
    Returns cos, sin: (batch, seq, pairs) float32, rounded once.
    """
    angles = _per_pair(positions, axes).astype(np.uint64) * turns[:, None, :]
    radians = angles.astype(np.int64) * (2 * np.pi / 2**64)  # int64: in [-1/2, 1/2) turn
    return _cos_sin(radians, scales, backwards)


def tables_float64(
    positions: Array, inv_freq: Array, scales: Array, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """cos and sin of fractional positions: the product in float64, rounded once at the end."""
    return _cos_sin(_per_pair(positions, axes) * inv_freq[:, None, :], scales, backwards)


def tables_float32(
    positions: Array, inv_freq: Array, scales: Array, axes: Sequence[int], backwards: bool
) -> tuple[Array, Array]:
    """cos and sin with every step in float32, as transformers computes them.

    The cosine itself is correctly rounded. torch's differs from it by one unit in the last place in
    about one value of a hundred, so only torch tensors give the same bits as transformers.
    """
    positions = positions.astype(np.float32)
    angles = _per_pair(positions, axes) * inv_freq.astype(np.float32)[:, None, :]
    cos, sin = _cos_sin(angles.astype(np.float64), np.ones(1), backwards)
    factors = scales.astype(np.float32)[:, None, None]
    return cos * factors, sin * factors


def _cos_sin(radians: Array, scales: Array, backwards: bool) -> tuple[Array, Array]:
    factors = scales[:, None, None]
    cos, sin = np.cos(radians) * factors, np.sin(radians) * (-factors if backwards else factors)
    return cos.astype(np.float32), sin.astype(np.float32)


def _per_pair(positions: Array, axes: Sequence[int]) -> Array:
    return positions[..., list(axes)] if axes else positions[..., None]


def _pairs(geometry: Geometry, layout: str) -> tuple[slice, slice]:
    return pair_slices(2 * geometry.pairs, layout, geometry.start)


# 8-bit dtype of cached keys -> its smallest and its largest number
CODES = {
    "int8": (-128.0, 127.0),
    "float8_e4m3fn": (-448.0, 448.0),
    "float8_e5m2": (-57344.0, 57344.0),
}


def move(
    x: Array,
    cos: Array,
    sin: Array,
    blocks: Array | None,
    scale: Array | None,
    options: Options,
    out: Array | None,
) -> Array:
    """Rotate the keys of some blocks of a cache.

        keys = codes * scale, if they have 8 bits
        keys rotated
        codes = round(keys / scale), ties to even, saturated, of the channels that are rotated

    x         (blocks, ..., head_dim), floating point or of a dtype of CODES
    cos, sin  (blocks, ..., pairs), with as many axes as x, each of the size in x or 1. With
              `blocks` the first axis has the size of `blocks`
    blocks    (n,) int64, different indices of the first axis of x; None for all of them
    scale     broadcasts with x, for 8-bit keys; None if both channels of a pair have the same
              scale, because then codes can be rotated without it
    Returns x with these blocks rotated and all others unchanged: a new array, or `out`.
    """
    y = copied(x, cos, sin, out)
    picked = slice(None) if blocks is None else blocks
    keys = x[picked]
    if name_of(x.dtype) not in CODES:
        (y[picked],) = rotate((keys,), cos, sin, None, options, None)
        return y
    scales = np.float32(1) if scale is None else np.broadcast_to(scale, x.shape)[picked]
    numbers = (keys.astype(np.float32) * scales).astype(np.float32)
    (moved,) = rotate((numbers,), cos, sin, None, options, None)
    own = (picked, ..., slice(options.start, options.start + 2 * cos.shape[-1]))
    y[own] = rounded(moved / scales, x.dtype)[own[1:]]  # codes of other channels are kept
    return y


def copied(x: Array, cos: Array, sin: Array, out: Array | None) -> Array:
    """Copy x, into `out` if given, which may be x itself."""
    if out is None:
        return x.copy()
    check_out((x, cos, sin), (out,))
    if address(out) != address(x):
        out[...] = x
    return out


def rounded(numbers: Array, dtype: np.dtype[np.generic]) -> Array:
    """Round and saturate numbers to 8-bit codes of a dtype of CODES.

    >>> rounded(np.array([0.5, -1.5, 300.0]), np.dtype("int8"))
    array([  0,  -2, 127], dtype=int8)
    """
    inside = np.clip(numbers, *CODES[name_of(dtype)])
    return (np.rint(inside) if name_of(dtype) == "int8" else inside).astype(dtype)


KERNEL = Kernel(
    name="reference",
    namespace=np,
    rotate=rotate,
    tables=tables,
    tables_float64=tables_float64,
    tables_float32=tables_float32,
    arithmetic=FLOAT32,
    takes=takes,
    inspect=inspect,
    row_lengths=row_lengths,
    arange=arange,
    as_positions=as_positions,
    to_numpy=to_numpy,
    from_numpy=from_numpy,
    host_constant=host_constant,
    device_key=device_key,
    move=move,
    check_out=check_out,
    check_xs=check_xs,
)
