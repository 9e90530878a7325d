"""Computes cos and sin from a spec and positions, exactly at every position.

A frequency is stored in turns per token, as a 64-bit fraction: `turns = round(inv_freq / 2pi *
2^64)`. `position * turns` modulo 2^64 is then the angle modulo one turn, without any rounding:
angle(m) + angle(n) = angle(m + n) as integers, so R_m R_n = R_{m+n} holds bit for bit. The turns
are rounded once, from the float64 `inv_freq`, with an error of at most 2^-65 turn per token.
"""

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from .cache import Cache
from .kernels import (
    NEEDS_LENGTH,
    Array,
    Kernel,
    Numbers,
    SomeKernel,
    check_positions,
    host,
    is_per_row,
    is_symbolic,
    is_traced,
    kernel_of,
    recorded_by_torch,
)
from .kernels.geometry import check_axes
from .kernels.numpy import of_list
from .schedules import FLOAT64, SCHEDULES, Arithmetic
from .spec import Rotary, check_spec, check_whole
from .words import brief

Precision = Literal["exact", "float32"]

MAX_BYTES = 16 * 2**30
CACHE_BYTES = 256 * 2**20
FRACTION_LIMIT = 2**28  # a float64 product of this size is off by 3e-8 rad

_BITS = 384
_INVERSE_TWO_PI = int(  # 2^384 / 2pi
    "28be60db9391054a7f09d5f47d4d377036d8a5664f10e410"
    "7f9458eaf7aef1586dc91b8e909374b801924bba82746487", 16,
)  # fmt: skip


def inv_freq(spec: Rotary, seq_len: int | None = None) -> tuple[Numbers, float]:
    """Return (inv_freq, attention_factor) of a spec.

    (rotary_dim / 2,) float64 in rad per token, read-only, and the number that multiplies cos and
    sin. `seq_len`, the length of the sequence, matters only for `dynamic`, `dynamic_linear` and
    `longrope`; None: not beyond the trained length. Raises ValueError unless it is whole and >= 0.

    >>> inv_freq(Rotary(head_dim=4))
    (array([1.  , 0.01]), 1.0)
    """
    return _frequencies(spec, _known_length(spec, seq_len), FLOAT64)


def turns(spec: Rotary, seq_len: int | None = None) -> npt.NDArray[np.uint64]:
    """Return the frequencies in turns per token, as 64-bit fractions of one turn.

    (rotary_dim / 2,) uint64, read-only: round(inv_freq / 2pi * 2^64). The angle of position m is
    `m * turns` in wrapping 64-bit arithmetic, in units of 2^-64 turn. `seq_len` as in `inv_freq`.

    >>> turns(Rotary(head_dim=2)) / 2**64 * 2 * np.pi
    array([1.])
    """
    length = _known_length(spec, seq_len)
    return _cache.get(("turns", spec, length), lambda: _turns_of(inv_freq(spec, length)[0]))


def check_precision(precision: object) -> None:
    if precision not in ("exact", "float32"):
        raise ValueError(f"precision must be 'exact' or 'float32', got {brief(precision)}")


@overload
def cos_sin(
    spec: Rotary,
    positions: Numbers | Sequence[object],
    precision: Precision = "exact",
    seq_len: object = None,
    *,
    allow_negative: bool = False,
    max_bytes: int = MAX_BYTES,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]: ...
@overload
def cos_sin(
    spec: Rotary,
    positions: Array,
    precision: Precision = "exact",
    seq_len: object = None,
    *,
    allow_negative: bool = False,
    max_bytes: int = MAX_BYTES,
) -> tuple[Array, Array]: ...
def cos_sin(
    spec: Rotary,
    positions: Any,
    precision: Precision = "exact",
    seq_len: object = None,
    *,
    allow_negative: bool = False,
    max_bytes: int = MAX_BYTES,
) -> tuple[Any, Any]:
    """Return cos and sin of every position and pair, times the attention factor.

    positions  (..., seq) whole numbers, or (..., seq, axes) if `spec.num_axes` > 1. Floats are
               fractional positions, multiplied in float64; float16 and bfloat16 are an error.
    precision  "exact": right to 1.5e-7 up to position 2^39, or to 2e-7 for JAX and MLX arrays that
               are traced or on a GPU (times the attention factor, if above 1).
               "float32": the float32 arithmetic of transformers, bit for bit on torch tensors;
               its error grows with the position, 8e-3 near 131 072.
    seq_len    length of the sequence, for `dynamic`, `dynamic_linear` and `longrope`: one number,
               or one per row of positions. Default: the largest position of each row, plus one.
    Returns (cos, sin), each (..., seq, rotary_dim / 2) float32, in the library of `positions`; one
    call per forward pass serves all layers.

    Raises ValueError for a negative position unless `allow_negative`, for a shape that does not fit
    the number of axes, and before allocating more than `max_bytes`; TypeError for positions that
    are not numbers, or of an unknown library. Warns of float32 positions beyond 2^24.

    >>> cos, sin = cos_sin(Rotary(head_dim=4), np.arange(2))
    >>> cos
    array([[1.       , 1.       ],
           [0.5403023, 0.99995  ]], dtype=float32)
    """
    check_precision(precision)
    check_spec(spec)
    if isinstance(positions, (list, tuple, range)):
        positions = of_list(positions)
    elif positions is None or isinstance(positions, (int, float, str)):
        check_positions(positions)
    make = partial(
        cos_sin, spec, precision=precision, allow_negative=allow_negative, max_bytes=max_bytes
    )
    if (tensor := recorded_by_torch(positions)) is not None:
        cos, sin = make(tensor, seq_len=seq_len)
        return cos.numpy(), sin.numpy()  # type: ignore[attr-defined]  # of a tensor
    library = kernel_of(positions)
    if library.on_shards is not None:
        return library.on_shards(make, positions, spec.num_axes, seq_len, spec.depends_on_length)
    local = library.to_numpy(positions) if precision == "exact" else None
    kernel: SomeKernel = library if local is None else host()
    given = positions if local is None else local
    rows, kind, lengths = _rows(spec, kernel, given, seq_len, allow_negative, max_bytes)
    cos, sin = _tables(spec, kernel, rows, kind, precision, lengths)
    shape = (*_tokens(spec, given), spec.rotary_dim // 2)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    return (cos, sin) if local is None else (library.from_numpy(cos), library.from_numpy(sin))


def sequence_cos_sin(
    spec: Rotary, like: Array, seq: int, precision: Precision = "exact", seq_len: object = None
) -> tuple[Array, Array]:
    """Return cos and sin of the positions 0 .. seq - 1, in the library of `like`.

    The tables are (seq, rotary_dim / 2). They are cached for later calls with an equal spec, so do
    not write to them. With one `seq_len` per row they are (rows, seq, rotary_dim / 2), not cached.

    >>> sequence_cos_sin(Rotary(head_dim=4), np.empty(0), 8)[0].shape
    (8, 2)
    """
    kernel = kernel_of(like)
    if spec.depends_on_length and is_per_row(seq_len):
        positions = kernel.namespace.broadcast_to(kernel.arange(like, seq), (len(seq_len), seq))
        return cos_sin(spec, positions, precision, seq_len)
    length = _known_length(spec, seq if seq_len is None else seq_len)
    if (device := kernel.device_key(like)) is None:
        return cos_sin(spec, kernel.arange(like, seq), precision, length)
    # round up to a power of two: a few cached sizes serve every length
    rows = seq if spec.depends_on_length else 1 << max(seq - 1, 255).bit_length()
    key = ("tables", spec, length, rows, precision, device)
    cos, sin = _cache.get(key, lambda: cos_sin(spec, kernel.arange(like, rows), precision, length))
    return cos[:seq], sin[:seq]


def moved_cos_sin(
    spec: Rotary,
    new_spec: Rotary,
    from_positions: object,
    to_positions: object,
    like: Array,
    seq_len: object = None,
    new_seq_len: object = None,
    allow_negative: bool = False,
) -> tuple[Array, Array]:
    """Return tables that rotate from `spec` at `from_positions` to `new_spec` at `to_positions`.

    Positions are (seq,) or (batch, seq), with the axes last if there are several. The attention
    factor is the new one over the old one. Lengths, errors and bounds as in `rotary.rerotate`.
    Returns (cos, sin), (seq, pairs) or (batch, seq, pairs) float32, in the library of `like`.

    >>> spec, start = Rotary(head_dim=4), np.array([7])
    >>> bool((moved_cos_sin(spec, spec, start, start + 2, start)[0] == cos_sin(spec, [2])[0]).all())
    True
    """
    old: Any = kernel_of(from_positions).to_numpy(from_positions)
    new: Any = kernel_of(to_positions).to_numpy(to_positions)
    library, is_local = kernel_of(like), old is not None and new is not None
    kernel: SomeKernel = host() if is_local else library
    old, new = (old, new) if is_local else (from_positions, to_positions)
    is_one_row = len(_tokens(spec, old)) == len(_tokens(new_spec, new)) == 1
    old, kind, lengths = _rows(spec, kernel, old, seq_len, allow_negative)
    new, new_kind, new_lengths = _rows(new_spec, kernel, new, new_seq_len, allow_negative)
    is_whole = kind == new_kind == "int"
    # in torch 2.8 Dynamo says that a spec does not equal itself
    is_shift = lengths == new_lengths and (new_spec is spec or new_spec == spec)
    if is_whole and is_local:
        old, new = old.astype(np.int64), new.astype(np.int64)
    if is_whole and is_local and not is_shift:
        phases = _phases(new_spec, new, new_lengths) - _phases(spec, old, lengths)
        ratios = _scale_rows(new_spec, new_lengths) / _scale_rows(spec, lengths)
        units = np.ones((1, phases.shape[-1]), np.uint64)
        cos, sin = kernel.tables(phases, units, ratios, range(units.size), False)
    elif is_whole and is_shift and _is_subtractable(old, new, allow_negative):
        cos, sin = _tables(spec, kernel, new - old, kind, "exact", lengths, power=0)
    else:
        cos, sin = _tables(new_spec, kernel, new, new_kind, "exact", new_lengths)
        u, v = _tables(spec, kernel, old, kind, "exact", lengths, power=-1)
        cos, sin = cos * u + sin * v, sin * u - cos * v
    cos, sin = (cos[0], sin[0]) if is_one_row else (cos, sin)
    return (library.from_numpy(cos), library.from_numpy(sin)) if is_local else (cos, sin)


def _phases(spec: Rotary, positions: Numbers, lengths: tuple[int | None, ...]) -> Numbers:
    """Return every angle in units of 2^-64 turn, modulo one turn: (rows, seq, pairs) int64."""
    turns = spec.sign * _frequency_rows(spec, lengths, None).view(np.int64)
    per_pair = positions[..., list(spec.axes)] if spec.axes else positions[..., None]
    return per_pair * turns[:, None, :]


def _is_subtractable(old: Array, new: Array, allow_negative: bool) -> bool:
    """Whether the difference of two whole numbers fits in their type, or wraps modulo 2^64."""
    names = {str(where.dtype).rpartition(".")[2] for where in (old, new)}
    return names == {"int64"} or (names == {"int32"} and not allow_negative)


def _tokens(spec: Rotary, positions: Array) -> tuple[int, ...]:
    return tuple(positions.shape[:-1] if spec.num_axes > 1 else positions.shape)


def _rows(
    spec: Rotary,
    kernel: Kernel[Array],
    positions: Array,
    seq_len: object,
    allow_negative: bool,
    max_bytes: int = MAX_BYTES,
) -> tuple[Array, str, tuple[int | None, ...]]:
    """Check positions; return them as (rows, seq) or (rows, seq, axes), their kind, the lengths."""
    check_axes(spec.num_axes, positions.shape)
    tokens = _tokens(spec, positions)
    if all(isinstance(size, int) for size in positions.shape):
        count = math.prod(tokens)
        if (size := 4 * spec.rotary_dim * count) > max_bytes:
            raise ValueError(
                f"tables of {count:,} positions take {size:,} bytes, over max_bytes = "
                f"{max_bytes:,}; build them in parts or raise max_bytes"
            )
    kind, low, high = kernel.inspect(positions)
    check_range(kind, low, high, allow_negative)
    lead = tokens[:-1]
    rows = positions.reshape(math.prod(lead), *positions.shape[len(lead) :])
    return rows, kind, _row_lengths(spec, kernel, rows, seq_len, lead)


def _tables(
    spec: Rotary,
    kernel: Kernel[Array],
    positions: Array,
    kind: str,
    precision: Precision,
    lengths: tuple[int | None, ...],
    power: int = 1,
) -> tuple[Array, Array]:
    """Return cos and sin times `attention_factor ** power`."""
    if precision == "float32":
        make, arithmetic = kernel.tables_float32, kernel.arithmetic
    elif kind == "int":
        make, arithmetic = kernel.tables, None
    else:
        make, arithmetic = kernel.tables_float64, FLOAT64
    frequencies = kernel.host_constant(_frequency_rows, spec, lengths, arithmetic)
    scales = kernel.host_constant(_scale_rows, spec, lengths, power)
    return make(positions, frequencies, scales, spec.axes, spec.sign < 0)


def _frequency_rows(
    spec: Rotary, lengths: tuple[int | None, ...], arithmetic: Arithmetic | None
) -> Numbers:
    rows = [
        turns(spec, length) if arithmetic is None else _frequencies(spec, length, arithmetic)[0]
        for length in lengths
    ]
    return rows[0][None] if len(rows) == 1 else np.stack(rows)


def _scale_rows(spec: Rotary, lengths: tuple[int | None, ...], power: int = 1) -> Numbers:
    return np.array([_frequencies(spec, length, FLOAT64)[1] ** power for length in lengths])


def _frequencies(spec: Rotary, length: int | None, arithmetic: Arithmetic) -> tuple[Numbers, float]:
    def build() -> tuple[Numbers, float]:
        extra = {"seq_len": length} if spec.depends_on_length else {}
        frequencies, factor = SCHEDULES[spec.schedule](
            spec.rotary_dim, spec.base, arithmetic, **spec.params, **extra
        )
        frequencies.setflags(write=False)
        return frequencies, factor

    return _cache.get(("inv_freq", spec, length, arithmetic), build)


def _turns_of(frequencies: Numbers) -> npt.NDArray[np.uint64]:
    exact = []
    for value in frequencies:
        numerator, denominator = float(value).as_integer_ratio()
        shift = _BITS - 64 + denominator.bit_length() - 1  # the denominator is a power of two
        exact.append(((numerator * _INVERSE_TWO_PI + (1 << (shift - 1))) >> shift) % 2**64)
    turns = np.array(exact, np.uint64)
    turns.setflags(write=False)
    return turns


def _known_length(spec: Rotary, seq_len: Any) -> int | None:
    check_spec(spec)
    if seq_len is None or not spec.depends_on_length:
        return None
    _check_known(seq_len)
    # isinstance comes first: a length may be a symbol of torch.compile, which has no attributes
    if not isinstance(seq_len, int) and hasattr(seq_len, "item"):
        seq_len = seq_len.item()
    check_whole("seq_len", seq_len, 0)
    return seq_len


def _check_known(seq_len: object) -> None:
    if is_traced(seq_len):
        raise ValueError(
            "seq_len must be known when the call is traced: make it a static argument of jax.jit"
        )
    if is_symbolic(seq_len):
        raise ValueError(f"where torch.export or jit.trace leaves the length open {NEEDS_LENGTH}")


def _row_lengths(
    spec: Rotary, kernel: Kernel[Array], positions: Array, seq_len: object, lead: tuple[int, ...]
) -> tuple[int | None, ...]:
    """Return the length that each row is scaled for; one entry if it is the same for all."""
    if not spec.depends_on_length:
        return (None,)
    if seq_len is None:
        lengths = kernel.row_lengths(positions)
    elif isinstance(seq_len, int):
        return (_known_length(spec, seq_len),)
    else:
        _check_known(seq_len)
        array = np.asarray(seq_len.tolist() if hasattr(seq_len, "tolist") else seq_len)
        if array.ndim and array.shape != lead:
            raise ValueError(
                f"seq_len must be one number or one per row, of shape {lead}, got {array.shape}"
            )
        lengths = array.reshape(-1).tolist()
    exact = tuple(_known_length(spec, length) for length in lengths)
    return exact[:1] if len(set(exact)) == 1 else exact or (None,)


def check_range(kind: str, low: float | None, high: float | None, allow_negative: bool) -> None:
    if low is None or high is None:
        return
    if not math.isfinite(size := max(abs(low), abs(high))):
        raise ValueError("positions must be finite")
    if low < 0 and not allow_negative:
        raise ValueError(
            f"positions must be >= 0, got {low}; pass allow_negative=True to rotate backwards"
        )
    if high >= 2**63:  # a list of such numbers may have become float64
        raise ValueError(f"positions must fit in int64, got {high}")
    if kind != "int" and size > FRACTION_LIMIT:
        raise ValueError(
            f"fractional positions must be <= 2^28 in size, got {size}; use whole numbers"
        )
    if kind == "float32" and size > 2**24:
        warnings.warn(
            f"float32 cannot hold every position up to {size}; use float64 or whole numbers",
            stacklevel=5,
        )


_cache = Cache(CACHE_BYTES)
