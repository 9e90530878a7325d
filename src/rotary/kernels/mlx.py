"""The MLX kernel: plain operators of `mlx.core`, which evaluates them when a result is needed.

Everything is differentiable in both directions, and can be traced by `mx.compile` and `mx.vmap`.
Angles are exact on every device: a position times a frequency in turns is a product of whole
numbers modulo 2^64, and its upper half is the angle to 2^-32 turn; no float64 is used, which a
Metal GPU does not have.

Whole positions on a CPU are read and checked, and NumPy's kernel computes their angles. A traced
call has no numbers yet, and reading them on a GPU would wait for it. In both cases a row number
outside a table, or a fractional position that is too large, gives NaN, and a negative position
rotates backwards.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeGuard, cast

import mlx.core as mx
import numpy as np

from ..layouts import pair_slices
from . import NEEDS_LENGTH, Kernel, Numbers, Operand
from . import numpy as reference
from .geometry import Geometry, Options, aligned, geometry_of_arrays
from .phases import LIMIT, cos_sin

Array: TypeAlias = mx.array
Tables = tuple[Array, Array]


def rotate(
    xs: Sequence[Array | Numbers],
    cos: Array | Numbers,
    sin: Array | Numbers,
    positions: object,
    options: Options,
    out: object,
) -> tuple[Array, ...]:
    """Rotate MLX arrays; the formula of `kernels/numpy.py`.

    Arguments and errors are those of `rotary.rotate`, except `out`: MLX makes new arrays.
    """
    check_xs(xs, out)
    reference.check_tables(cos, sin, _kind(cos), _kind(sin))
    rows = None if positions is None else _check_rows(positions, len(cos))
    geometry = geometry_of_arrays(xs, cos, rows, options)
    tables = [_to_mlx(table) for table in (cos, sin)]
    if rows is not None:
        tables = [_picked(table, rows) for table in tables]
    cos, sin = [aligned(table, geometry.dims) for table in tables]
    sin = -sin if geometry.conjugate else sin
    return tuple(_rotated(_to_mlx(x), cos, sin, geometry) for x in xs)


def _rotated(x: Array, cos: Array, sin: Array, geometry: Geometry) -> Array:
    start, width = geometry.start, 2 * geometry.pairs
    work = mx.float64 if mx.float64 in (x.dtype, cos.dtype) else mx.float32
    cos, sin = cos.astype(work), sin.astype(work)
    # each part separately: MLX is several times slower if it converts the whole array
    u, v = (x[..., part].astype(work) for part in pair_slices(width, geometry.layout, start))
    parts = [(u * cos - v * sin).astype(x.dtype), (v * cos + u * sin).astype(x.dtype)]
    if geometry.out_layout == "interleaved":
        parts = [mx.stack(parts, axis=-1).reshape(*x.shape[:-1], width)]
    whole = [x[..., :start], *parts, x[..., start + width :]]
    return mx.concatenate([part for part in whole if part.shape[-1]], axis=-1)


def _picked(table: Array, rows: Array) -> Array:
    """Return rows of a table; NaN for rows outside, for which MLX would read other memory."""
    is_outside = (rows < 0) | (rows >= len(table))
    picked = table[mx.where(is_outside, 0, rows)]
    return mx.where(is_outside[..., None], mx.nan, picked)


def move(
    x: Array,
    cos: Array,
    sin: Array,
    blocks: Array | None,
    scale: Array | Numbers | None,
    options: Options,
    out: object,
) -> Array:
    """Rotate the keys of some blocks of a cache, as in `kernels/numpy.py`; of 8 bits only int8."""
    keys, scales, is_int8 = x if blocks is None else x[blocks], None, x.dtype == mx.int8
    if is_int8:
        keys = keys.astype(mx.float32)
        if scale is not None:
            scales = mx.broadcast_to(_to_mlx(scale).astype(mx.float32), x.shape)
            scales = scales if blocks is None else scales[blocks]
            keys = keys * scales
    (moved,) = rotate((keys,), cos, sin, None, options, out)
    if is_int8:
        codes = mx.round(moved if scales is None else moved / scales)  # ties to even
        moved = mx.clip(codes, *reference.CODES["int8"]).astype(mx.int8)
    if blocks is None:
        return moved
    result = mx.array(x)
    result[blocks] = moved
    return result


# --- cos and sin ---


def tables(
    positions: Array, turns: Numbers, scales: Numbers, axes: Sequence[int], backwards: bool
) -> Tables:
    """Exact cos and sin from 64-bit turns; see `kernels/numpy.py`."""
    angles = _per_pair(positions, axes).astype(mx.uint64) * mx.array(turns[:, None, :])
    cos, sin = cos_sin((angles >> 32).astype(mx.uint32), mx)
    return _scaled(cos, sin, scales, backwards)


def tables_float64(
    positions: Array, inv_freq: Numbers, scales: Numbers, axes: Sequence[int], backwards: bool
) -> Tables:
    """cos and sin of fractional positions, as exact as those of a product in float64.

    The whole part of a position and its fraction are turned in whole numbers, so no float64 is
    needed; the derivative is that of cos and sin.
    """
    inv_freq = inv_freq[:, None, :]
    rate = mx.array(inv_freq.astype(np.float32))

    def turned(positions: Array) -> Tables:
        is_known = mx.abs(positions) <= LIMIT
        cos, sin = cos_sin(_fractional_phase(positions, inv_freq), mx)
        return mx.where(is_known, cos, mx.nan), mx.where(is_known, sin, mx.nan)

    def gradient(positions: Array, cotangents: Tables, tables: Tables) -> Array:
        (cos, sin), (d_cos, d_sin) = tables, cotangents
        return ((d_sin * cos - d_cos * sin) * rate).astype(positions.dtype)

    def tangent(positions: Array, change: Array) -> Tables:
        cos, sin = made(positions)
        change = change.astype(mx.float32) * rate
        return -sin * change, cos * change

    function = mx.custom_function(turned)
    function.vjp(gradient)
    function.jvp(tangent)
    made = cast(Callable[[Array], Tables], function)
    columns = _per_pair(positions, axes)
    cos, sin = made(mx.broadcast_to(columns, (*columns.shape[:-1], inv_freq.shape[-1])))
    return _scaled(cos, sin, scales, backwards)


def tables_float32(
    positions: Array, inv_freq: Numbers, scales: Numbers, axes: Sequence[int], backwards: bool
) -> Tables:
    """cos and sin with every step in float32, as transformers computes them."""
    positions = _per_pair(positions, axes).astype(mx.float32)
    angles = positions * mx.array(inv_freq.astype(np.float32)[:, None, :])
    return _scaled(mx.cos(angles), mx.sin(angles), scales, backwards)


def _fractional_phase(positions: Array, inv_freq: Numbers) -> Array:
    """The angles of fractional positions in units of 2^-32 turn, uint32.

    A position is rounded to 2^-32, and so its angle by 2^-33 |inv_freq| at most.
    """
    part, whole_turns = np.modf(np.abs(inv_freq) / (2 * np.pi))
    turns = (part * 2.0**64).astype(np.uint64)
    high, low = mx.array(turns >> np.uint64(32)), mx.array(turns & np.uint64(2**32 - 1))
    size = mx.abs(positions)
    whole = mx.floor(size)
    fraction = mx.round((size - whole) * 2.0**32).astype(mx.uint64)  # the product is exact
    angles = whole.astype(mx.uint64) * mx.array(turns)
    angles = angles + fraction * high + (fraction * low >> 32)
    angles = angles + (fraction * mx.array((whole_turns % 2.0**32).astype(np.uint64)) << 32)
    phase = (angles >> 32).astype(mx.uint32)
    return mx.where((positions < 0) ^ mx.array(inv_freq < 0), -phase, phase)


def _scaled(cos: Array, sin: Array, scales: Numbers, backwards: bool) -> Tables:
    factors = mx.array(scales.astype(np.float32)[:, None, None])
    return cos * factors, sin * (-factors if backwards else factors)


def _per_pair(positions: Array | Numbers, axes: Sequence[int]) -> Array:
    positions = _to_mlx(positions)
    return positions[..., list(axes)] if axes else positions[..., None]


# --- checks ---


def check_xs(xs: Sequence[Array | Numbers], out: object) -> None:
    """Refuse dtypes that cannot be rotated, and `out`."""
    if out is not None:
        raise TypeError(
            "out= cannot be used with MLX arrays, which are not written into: use the result"
        )
    reference.check_dtypes([*map(_kind, xs)])


def _check_rows(positions: object, length: int) -> Array:
    rows = positions if takes(positions) else reference.of_list(positions)
    if not _is_whole(rows):
        raise TypeError(f"positions must be whole numbers to pick rows, got {_kind(rows)}")
    numbers = _values(rows)
    if numbers is not None:
        reference.check_rows(numbers, range(length))
    return _to_mlx(rows)


def _kind(array: Array | Numbers) -> str:
    """Return the name of the dtype as NumPy writes it, such as "float32"."""
    if isinstance(array, np.ndarray):
        return reference.name_of(array.dtype)
    return str(array.dtype).removeprefix("mlx.core.")


def _is_whole(array: Array | Numbers) -> bool:
    return _kind(array).lstrip("<>").startswith(("int", "uint"))


# --- the other functions of a `Kernel` ---


def takes(array: object) -> TypeGuard[Array | Numbers]:
    """Whether this kernel takes an object: an MLX array, or a NumPy array as a constant."""
    return isinstance(array, (mx.array, np.ndarray))


def as_positions(positions: object, like: Array) -> Operand:
    """Return positions; lists and other arrays become NumPy arrays, without loss."""
    return positions if takes(positions) else reference.of_list(positions)


def to_numpy(positions: Array | Numbers) -> Numbers | None:
    """Return whole positions, if readable; None for fractions, which may need a gradient."""
    is_kept = isinstance(positions, mx.array) and not _is_whole(positions)
    return None if is_kept else _values(positions)


def from_numpy(array: Numbers) -> Array:
    """Convert a NumPy array to MLX."""
    return mx.array(array)


def inspect(positions: Array | Numbers) -> tuple[str, float | None, float | None]:
    """("int" | "float32" | "float64", smallest, largest); None if values cannot be read."""
    kind = _kind(positions)
    if not (_is_whole(positions) or kind in ("float32", "float64")):
        raise reference.wrong_positions(kind)
    numbers = _values(positions)
    return reference.inspect(np.empty(0, kind) if numbers is None else numbers)


def row_lengths(positions: Array) -> list[int]:
    """Return the largest position of each row, plus one."""
    try:
        mx.eval(positions)
    except ValueError:
        raise ValueError(f"under mx.compile and mx.vmap {NEEDS_LENGTH}") from None
    return reference.row_lengths(np.asarray(positions))


def arange(like: Array, count: int) -> Array:
    """Return positions 0 .. count - 1."""
    return mx.arange(count, dtype=mx.int64)


def device_key(like: Array) -> str | None:
    """Return a part of the cache key; None on a GPU, where tables are not computed immediately."""
    return "mlx" if _is_on_cpu() else None


def _is_on_cpu() -> bool:
    return mx.default_device().type == mx.cpu


def _values(array: Array | Numbers) -> Numbers | None:
    """Return the numbers; None in a traced call, which has none, and on a GPU."""
    if isinstance(array, np.ndarray):
        return array
    if not _is_on_cpu():
        return None
    try:
        mx.eval(array)
    except ValueError:  # MLX raises it for a traced array
        return None
    return np.asarray(array)


def _to_mlx(array: Array | Numbers) -> Array:
    """Convert a NumPy array of any byte order to MLX, without rounding float64."""
    if isinstance(array, mx.array):
        return array
    dtype = mx.float64 if array.dtype == np.float64 else None
    return mx.array(array.astype(array.dtype.newbyteorder("="), order="C", copy=False), dtype)


KERNEL = Kernel[Array](
    name="mlx",
    namespace=mx,
    rotate=rotate,
    tables=tables,
    tables_float64=tables_float64,
    tables_float32=tables_float32,
    arithmetic=reference.FLOAT32,
    takes=takes,
    inspect=inspect,
    row_lengths=row_lengths,
    arange=arange,
    as_positions=as_positions,
    to_numpy=to_numpy,
    from_numpy=from_numpy,
    host_constant=reference.host_constant,  # what it returns is a constant in a traced call
    device_key=device_key,
    move=move,
    check_xs=check_xs,
)
