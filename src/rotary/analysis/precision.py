"""The errors of angles and tables in the number types that programs use.

An angle is position * inv_freq. An arithmetic may round the frequency, the position and their
product, and then stores cos and sin in some type. The error of each of these steps is computed
without loss, relative to the exact product of the position and the float64 `inv_freq` of the spec.
So the errors are right even where float64 angles are not.

All pages and plots give one number for the error of an arithmetic near a position: `error_near`,
the largest error of cos or sin over all pairs and 64 positions of the last 1 %.
"""

import math
from bisect import bisect_right
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..angles import inv_freq, turns
from ..schedules import FLOAT32, SCHEDULES
from ..spec import Rotary
from .spectrum import Array, check_size, frequencies, number, row_blocks, whole_numbers

MAX_POSITION = 2**40  # where 64-bit turns are off by 2e-7 rad
NEARBY = 64  # positions that `error_near` looks at
_BLOCK = 2**16  # angles computed at a time
_TWO_PI = Fraction("6.28318530717958647692528676655900576839433879875021")
_SPLITTER = 2.0**27 + 1  # cuts the 53 bits of a float64 into two halves


# significant bits of each number type
BITS = {"float64": 53, "float32": 24, "float16": 11, "tf32": 11, "bfloat16": 8}


class Arithmetic(NamedTuple):
    """The types of the position, of inv_freq, of their product (None: not rounded), of cos and sin.

    inv_freq may be "turns", the 64-bit turns of this package.
    """

    position: str = "float32"
    inv_freq: str = "float32"
    product: str | None = "float32"
    table: str = "float32"


_ARITHMETICS = {
    "float32": Arithmetic(),
    "bfloat16": Arithmetic(position="bfloat16"),
    "tf32": Arithmetic(position="tf32", inv_freq="tf32"),
    "float16": Arithmetic(position="float16"),
    "inv_freq_bfloat16": Arithmetic(inv_freq="bfloat16"),
    "inv_freq_float16": Arithmetic(inv_freq="float16"),
    "bfloat16_table": Arithmetic("float64", "turns", None, "bfloat16"),
    "float16_table": Arithmetic("float64", "turns", None, "float16"),
    "float64": Arithmetic("float64", "float64", "float64", "float64"),
    "exact": Arithmetic("float64", "turns", None, "float32"),
}
ARITHMETICS = tuple(_ARITHMETICS)
_TABLES = ("bfloat16_table", "float16_table")  # only their cos and sin are rounded


def round_to(values: npt.ArrayLike, kind: str) -> Array:
    """Round to the nearest number of a type of `BITS`, ties to even: float64 of the same shape.

    For bfloat16, float16 and TF32 values are first rounded to float32, as programs cast to them.

    >>> round_to([257.0, 259.0], "bfloat16"), round_to([2049.0, 2051.0], "tf32")
    (array([256., 260.]), array([2048., 2052.]))
    """
    wide = np.asarray(values, np.float64)
    if kind == "float64":
        return wide
    with np.errstate(over="ignore"):
        single = wide.astype(np.float32)
        if kind in ("float32", "float16"):
            return single.astype(kind).astype(np.float64)
    # add half a step, or just under half where the kept bits are even; then drop the last bits
    dropped = np.uint64(24 - BITS[kind])
    bits = single.view(np.uint32).astype(np.uint64)
    half = (np.uint64(1) << (dropped - np.uint64(1))) - np.uint64(1)
    kept = (bits + half + ((bits >> dropped) & np.uint64(1))) >> dropped << dropped
    nearest = kept.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(single), single, nearest).astype(np.float64)


def angle_error(
    spec: Rotary, positions: npt.ArrayLike, arithmetic: str = "float32", seq_len: int | None = None
) -> Array:
    """(len, pairs) float64, rad: how far the angle position * inv_freq is off, in size.

    positions   (len,) whole numbers in 0 .. 2^40; with several axes, the same on each of them
    arithmetic  "float32": inv_freq, position and product in float32, as most programs compute it
                "bfloat16", "float16": the position in that type first, the rest in float32
                "tf32": position and inv_freq in TF32, as in a matrix product that allows it
                "inv_freq_bfloat16", "inv_freq_float16": inv_freq cast to that type with the model
                "bfloat16_table", "float16_table": exact angles, but cos and sin in that type; the
                angle is that of the rounded point (cos, sin)
                "float64": all in float64; "exact": this package's 64-bit turns
    Types round to nearest, ties to even, those of 16 bits and TF32 from float32. The error is not
    taken modulo one turn; it is inf where a position does not fit (float16 beyond 65,504). The true
    angle is the float64 `inv_freq` of `spec` times the position, in real numbers.
    Raises ValueError for positions that are not such numbers, an unknown arithmetic, and results of
    over 2^27 angles.

    >>> spec = Rotary(head_dim=128)
    >>> bool(angle_error(spec, [131071]).max() < 8e-3)
    True
    >>> angle_error(spec, [257], "bfloat16")[0, 0]
    np.float64(1.0)
    """
    rule, places = _rule(arithmetic), whole_numbers("positions", positions, 0, MAX_POSITION)
    check_size("positions", len(places), spec.rotary_dim // 2)
    true, (rate, off) = frequencies(spec, seq_len), _rates(spec, seq_len, rule.inv_freq)
    error = np.empty((len(places), len(true)))
    for part in row_blocks(len(places), len(true), _BLOCK):
        if arithmetic in _TABLES:  # from the exact angle to that of the rounded point (cos, sin)
            cos, sin = _cos_sin(places[part], true)
            x, y = round_to(cos, rule.table), round_to(sin, rule.table)
            error[part] = np.arctan2(y * cos - x * sin, x * cos + y * sin)
        else:
            error[part] = _angle_errors(rule, places[part], rate, off)
    return np.abs(error)


def table_error(
    spec: Rotary, positions: npt.ArrayLike, arithmetic: str = "float32", seq_len: int | None = None
) -> Array:
    """(len,) float64: the largest error of cos or sin at each position, over all pairs.

    cos and sin of the angle that `arithmetic` gives are rounded to float32; to float64 for
    "float64", to 16 bits for the two tables. The attention factor, which scales all of them, is
    left out. The error is at most 2, or inf where there is no angle. Arguments and errors are those
    of `angle_error`, for any number of positions.

    >>> bool(table_error(Rotary(head_dim=128), [2**20], "exact")[0] < 1e-7)
    True
    """
    rule, places = _rule(arithmetic), whole_numbers("positions", positions, 0, MAX_POSITION)
    true, (rate, off) = frequencies(spec, seq_len), _rates(spec, seq_len, rule.inv_freq)
    worst = np.empty(len(places))
    for part in row_blocks(len(places), len(true), _BLOCK):
        exact = np.stack(_cos_sin(places[part], true))
        with np.errstate(invalid="ignore"):  # no angle, no table
            error = _angle_errors(rule, places[part], rate, off)
            turned = np.stack(_turned(exact[0], exact[1], error))
        worst[part] = _inf_for_nan(np.abs(round_to(turned, rule.table) - exact)).max(axis=(0, 2))
    return worst


def error_near(
    spec: Rotary, positions: npt.ArrayLike, arithmetic: str = "float32", seq_len: int | None = None
) -> Array:
    """(len,) float64: the largest error of cos or sin near each position, of all pairs.

    This is the largest |cos - exact| or |sin - exact| at the 64 positions that `nearby` gives. One
    position alone says little: float32 products with a power of two are exact, and those with other
    round positions nearly so. `positions` are in 1 .. 2^40; the rest is as in `table_error`.

    >>> spec = Rotary(head_dim=128)
    >>> table_error(spec, [131_072]).round(4), error_near(spec, [131_072]).round(4)
    (array([0.0034]), array([0.0076]))
    """
    near = nearby(positions)
    return table_error(spec, near.ravel(), arithmetic, seq_len).reshape(near.shape).max(axis=1)


def nearby(positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """(len, 64) int64: 64 positions below each of `positions`, spread over the last 1 % before it.

    One is drawn from each 64th of that 1 %, or of the last 64 tokens where those are more. The
    draws are the same in every call. Raises ValueError for positions that are not whole numbers in
    1 .. 2^40.

    >>> near = nearby([131_072])
    >>> near.shape, int(near.min()) >= 131_072 - 1310, int(near.max()) < 131_072
    ((1, 64), True, True)
    """
    places = whole_numbers("positions", positions, 1, MAX_POSITION)[:, None]
    width = np.minimum(places, np.maximum(places // 100, NEARBY))
    share = (np.arange(NEARBY) + np.random.default_rng(0).random(NEARBY)) / NEARBY
    return places - 1 - (share * width).astype(np.int64)


def longest_safe_position(
    spec: Rotary, tolerance: float, arithmetic: str = "float32", seq_len: int | None = None
) -> int:
    """Return the last position up to which every angle is surely right to `tolerance` rad.

    Bisection finds it with a bound on each of the three roundings (half a step of the type, and the
    position times the error of inv_freq), so `angle_error` is within the tolerance at all positions
    up to it. The first position with a larger error is less than a tenth further for a ladder of
    frequencies, and less than twice as far for a few irregular frequencies. The result is at most
    2^40. Tables of 16 bits are safe everywhere (2^40) or nowhere (0).
    Raises ValueError for a tolerance that is not finite and > 0, and an unknown arithmetic.

    >>> longest_safe_position(Rotary(head_dim=128), 0.01)
    151359
    >>> longest_safe_position(Rotary(head_dim=128), 0.01, "bfloat16")
    256
    """
    rule = _rule(arithmetic)
    number("tolerance", tolerance, above=0)
    rate, off = _rates(spec, seq_len, rule.inv_freq)
    if arithmetic in _TABLES:
        # cos and sin off by a share u turn a pair by u / (1 - u) at most; 2^-24: float16 subnormals
        share = 2.0 ** -BITS[rule.table]
        return MAX_POSITION if (share + 2.0**-24) / (1 - share) <= tolerance else 0
    return bisect_right(  # the number of positions 1, 2, 3 ... within it is the last of them
        range(1, MAX_POSITION + 1),
        tolerance,
        key=lambda position: _bound(rule, position, rate, np.abs(off)),
    )


def _rule(arithmetic: str) -> Arithmetic:
    if arithmetic not in ARITHMETICS:  # a tuple: `in` accepts unhashable values too
        raise ValueError(f"arithmetic must be one of {', '.join(ARITHMETICS)}; got {arithmetic!r}")
    return _ARITHMETICS[arithmetic]


def _rates(spec: Rotary, seq_len: int | None, kind: str) -> tuple[Array, Array]:
    """Return inv_freq rounded to type `kind` and its error; for "turns", true and their error."""
    true = frequencies(spec, seq_len)
    if kind == "float64":
        return true, np.zeros_like(true)
    if kind == "turns":
        signed, off = inv_freq(spec, seq_len)[0], []
        for value, turn in zip(signed.tolist(), turns(spec, seq_len).tolist(), strict=True):
            apart = Fraction(turn, 2**64) - Fraction(value) / _TWO_PI
            off.append(float((apart - round(apart)) * _TWO_PI))  # without whole turns
        return true, np.array(off) * np.sign(signed)
    extra = {"seq_len": seq_len and int(seq_len)} if spec.depends_on_length else {}
    with np.errstate(over="ignore", invalid="ignore"):
        schedule = SCHEDULES[spec.schedule]
        single = schedule(spec.rotary_dim, spec.base, FLOAT32, **spec.params, **extra)[0]
        rate = round_to(np.abs(single), kind)
        return rate, rate - true


def _angle_errors(
    rule: Arithmetic, positions: npt.NDArray[np.int64], rate: Array, off: Array
) -> Array:
    """(len, pairs) signed error of the angle, from rounding product, position and frequency."""
    true = positions[:, None].astype(np.float64)
    held = round_to(true, rule.position)
    with np.errstate(over="ignore", invalid="ignore"):  # a position that does not fit
        error = (held - true) * rate + true * off
        if rule.product is not None:
            high, low = _product(held, rate)
            error += round_to(high, rule.product) - high - low
    return _inf_for_nan(error)


def _inf_for_nan(error: Array) -> Array:
    return np.where(np.isnan(error), math.inf, error)


def _product(x: Array, y: Array) -> tuple[Array, Array]:
    """Return the rounded product and its error: x y = high + low exactly (Dekker 1971, Mul12)."""
    (x1, x2), (y1, y2) = _halves(x), _halves(y)
    high = x * y
    return high, x2 * y2 - (high - x1 * y1 - x2 * y1 - x1 * y2)


def _halves(x: Array) -> tuple[Array, Array]:
    upper = _SPLITTER * x
    upper = upper - (upper - x)
    return upper, x - upper


def _cos_sin(positions: npt.NDArray[np.int64], rate: Array) -> tuple[Array, Array]:
    """cos and sin, (len, pairs) each, right to 1e-15: the product is exactly high + low."""
    with np.errstate(over="ignore", invalid="ignore"):
        high, low = _product(positions[:, None].astype(np.float64), rate)
        return _turned(np.cos(high), np.sin(high), low)


def _turned(cos: Array, sin: Array, angle: Array) -> tuple[Array, Array]:
    c, s = np.cos(angle), np.sin(angle)
    return cos * c - sin * s, sin * c + cos * s


def _bound(rule: Arithmetic, position: int, rate: Array, off: Array) -> float:
    """Return an upper bound of the errors at positions up to this one; it grows with them."""
    held = round_to([position], rule.position)
    if not (np.isfinite(held).all() and np.isfinite(rate).all()):
        return math.inf
    # only `position` itself may have one bit more: then it is a power of two, which is exact
    bits = max(position - 1, 0).bit_length()
    own = BITS[rule.position]  # types of fewer bits than float32 are rounded to float32 first
    moved = sum(2.0 ** (bits - kind - 1) for kind in {own, max(own, 24)} if bits > kind)
    error = moved * rate + position * off
    if rule.product is not None:
        steps = np.ldexp(1.0, np.frexp((position + moved) * rate)[1] - BITS[rule.product] - 1)
        whole = (np.frexp(rate)[0] * 2.0**53).astype(np.int64)
        last = np.frexp((whole & -whole).astype(np.float64))[1]
        widths = np.where(whole == 0, 0, 54 - last)  # bits from the first to the last that is set
        is_exact = min(bits, own) + widths <= BITS[rule.product]
        error += np.where(is_exact, 0.0, steps)
    return float(error.max()) * (1 + 1e-12)  # 1e-12: the bound itself is computed in float64
