"""The GPU kernel of `rotary.fused`: norm, rotation, cast and cache in one launch.

A program takes a block of tokens and some heads of q, of k or of v. A row is one head of one token:
it is read once, and written once, to a new tensor or to its slot. If the mean of the norm is
over all heads of a token, one program takes them all and reads them twice. Everything between is in
float32. Quotients and casts to 8 bits are rounded to nearest even, float8 by whole-number
arithmetic, so every device, also one without float8, stores the same bits for the same numbers.
"""

# ruff: noqa: N803  # Triton's compile-time arguments are written in capitals
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from .arithmetic import quotient

# their values are not compiled in, so that a new length does not wait for the compiler
NUMBERS = (
    *("tokens", "parts", "parts_inverse", "parts_shift", "blocks", "blocks_inverse"),
    *("blocks_shift", "block", "block_inverse", "block_shift"),
    *("q_heads", "k_heads", "v_heads", "q_parts", "k_parts", "v_parts"),
)


@triton.jit
def added(a, b):
    return a + b


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def float8(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return y, which is in range, as a byte: float8 with MANTISSA and BIAS; NaN is 0x7f."""
    bits = y.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA
    # below the smallest normal number a float32 sum puts the last bit in its place
    lowest: tl.constexpr = (127 - BIAS + shift + 1) << 23
    small = bits.to(tl.float32, bitcast=True) + tl.full((), lowest, tl.uint32).to(
        tl.float32, bitcast=True
    )
    small = small.to(tl.uint32, bitcast=True) - lowest
    half: tl.constexpr = (1 << (shift - 1)) - 1
    large = (bits + half + ((bits >> shift) & 1) - ((127 - BIAS) << 23)) >> shift
    byte = tl.where(bits < ((128 - BIAS) << 23), small, large)
    return (tl.where(y != y, 0x7F, byte) | sign).to(tl.uint8)


@triton.jit
def stored(y, FORM: tl.constexpr, LARGEST: tl.constexpr):
    """Return y as it is stored: float32, which the store casts, or a byte."""
    result = y
    if FORM != "":
        result = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
        result = tl.where(y != y, 0.0 if FORM == "int8" else y, result)
        if FORM == "int8":
            result = ((result + 12582912.0) - 12582912.0).to(tl.int8)
        elif FORM == "float8_e4m3fn":
            result = float8(result, 3, 7)
        else:
            result = float8(result, 2, 15)
    return result


@triton.jit
def pairs_of(
    x, mask, START: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Load both channels of every pair at `x`, (ROWS, WIDTH) float32; 0 where masked."""
    pair = tl.arange(0, WIDTH)[None, :]
    if HALF:
        inside = mask & (pair < PAIRS)
        u = tl.load(x + START + pair, mask=inside, other=0).to(tl.float32)
        v = tl.load(x + START + PAIRS + pair, mask=inside, other=0).to(tl.float32)
    else:
        both = tl.arange(0, 2 * WIDTH)[None, :]
        uv = tl.load(x + START + both, mask=mask & (both < 2 * PAIRS), other=0).to(tl.float32)
        u, v = tl.split(tl.reshape(uv, (ROWS, WIDTH, 2)))
    return u, v


@triton.jit
def rest_of(
    x, mask, START: tl.constexpr, PAIRS: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr
):
    """Load the channels at `x` that are not rotated, (ROWS, REST) float32."""
    column = tl.arange(0, REST)[None, :]
    column = tl.where(column < START, column, column + 2 * PAIRS)
    return tl.load(x + column, mask=mask & (column < DIM), other=0).to(tl.float32)


@triton.jit
def all_stages(
    x, y, weight, scale, cos, sin, page, place, batch, token, is_token, part, parts,
    x_batch, x_token, x_head, y_batch, y_token, y_head, s_batch, s_token, s_head,
    weight_head, number, heads, eps,
    DIM: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    REST: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, READ_HALF: tl.constexpr,
    WRITE_HALF: tl.constexpr, NORM: tl.constexpr, ADD_ONE: tl.constexpr, SLOTS: tl.constexpr,
    SCALE: tl.constexpr, FORM: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Take all steps for one array, of whose heads this program has part `part` of `parts`.

    With SLOTS y is a cache, whose rows are at `place` of `page`; a token of page -1 is not stored.
    """
    groups = (heads + HEADS - 1) // HEADS
    each = (groups + parts - 1) // parts
    tile = tl.arange(0, ROWS) % HEADS
    source = x + (batch * x_batch + token * x_token)
    at, scale_at = batch * y_batch + token * y_token, batch * s_batch + token * s_token
    if SLOTS:
        is_token = is_token & (page >= 0)
        at = page * y_batch + place * y_token
        scale_at = page * s_batch + place * s_token
    total = tl.full((ROWS,), 0.0, tl.float32)
    if NORM == "all heads":
        for each_head in range(heads):
            row = (source + (tl.full((ROWS,), 0, tl.int64) + each_head) * x_head)[:, None]
            if PAIRS > 0:
                u, v = pairs_of(row, is_token[:, None], START, PAIRS, WIDTH, ROWS, READ_HALF)
                total += tl.reduce(u * u + v * v, 1, added)
            if REST > 0:
                rest = rest_of(row, is_token[:, None], START, PAIRS, DIM, REST)
                total += tl.reduce(rest * rest, 1, added)
        total = total / heads
    for group in range(part * each, tl.minimum((part + 1) * each, groups)):
        head = (group * HEADS + tile).to(tl.int64)
        is_row = (is_token & (head < heads))[:, None]
        row = (source + head * x_head)[:, None]
        squares = total
        if PAIRS > 0:
            u, v = pairs_of(row, is_row, START, PAIRS, WIDTH, ROWS, READ_HALF)
            if NORM == "head":
                squares += tl.reduce(u * u + v * v, 1, added)
        if REST > 0:
            rest = rest_of(row, is_row, START, PAIRS, DIM, REST)
            if NORM == "head":
                squares += tl.reduce(rest * rest, 1, added)
        if NORM != "":
            gain = tl.rsqrt(squares / DIM + eps)[:, None]
            of_head = weight + (head * weight_head)[:, None]
            if PAIRS > 0:
                wu, wv = pairs_of(of_head, is_row, START, PAIRS, WIDTH, ROWS, READ_HALF)
                u, v = u * gain * (wu + ADD_ONE), v * gain * (wv + ADD_ONE)
            if REST > 0:
                wrest = rest_of(of_head, is_row, START, PAIRS, DIM, REST)
                rest = rest * gain * (wrest + ADD_ONE)
        if PAIRS > 0:
            u, v = u * cos - v * sin, v * cos + u * sin
        if SCALE != "":
            if SCALE == "token":
                most = tl.full((ROWS,), 0.0, tl.float32)
                if PAIRS > 0:
                    is_pair = tl.arange(0, WIDTH)[None, :] < PAIRS  # of others the angles are NaN
                    longer = tl.where(is_pair, larger(tl.abs(u), tl.abs(v)), 0.0)
                    most = tl.reduce(longer, 1, larger)
                if REST > 0:
                    most = larger(most, tl.reduce(tl.abs(rest), 1, larger))
                divisor = tl.div_rn(most, tl.full((ROWS,), LARGEST, tl.float32))
                divisor = tl.where(divisor < 1.1754943508222875e-38, 1.0, divisor)  # TINY
                tl.store(
                    scale + scale_at + head * s_head,
                    divisor.to(scale.dtype.element_ty),
                    mask=is_token & (head < heads),
                )
            elif SCALE == "heads":
                divisor = tl.load(scale + head * s_head, mask=head < heads, other=1.0)
            else:
                divisor = tl.full((ROWS,), 0.0, tl.float32) + number
            if PAIRS > 0:
                wide = tl.broadcast_to(divisor[:, None], (ROWS, WIDTH))
                u, v = tl.div_rn(u, wide), tl.div_rn(v, wide)
            if REST > 0:
                rest = tl.div_rn(rest, tl.broadcast_to(divisor[:, None], (ROWS, REST)))
        target = y + (at + head * y_head)[:, None]
        if PAIRS > 0:
            pair = tl.arange(0, WIDTH)[None, :]
            one, other = stored(u, FORM, LARGEST), stored(v, FORM, LARGEST)
            one, other = one.to(y.dtype.element_ty), other.to(y.dtype.element_ty)
            if WRITE_HALF:
                tl.store(target + START + pair, one, mask=is_row & (pair < PAIRS))
                tl.store(target + START + PAIRS + pair, other, mask=is_row & (pair < PAIRS))
            else:
                both = tl.arange(0, 2 * WIDTH)[None, :]
                turned = tl.reshape(tl.join(one, other), (ROWS, 2 * WIDTH))
                tl.store(target + START + both, turned, mask=is_row & (both < 2 * PAIRS))
        if REST > 0:
            column = tl.arange(0, REST)[None, :]
            column = tl.where(column < START, column, column + 2 * PAIRS)
            values = stored(rest, FORM, LARGEST).to(y.dtype.element_ty)
            tl.store(target + column, values, mask=is_row & (column < DIM))


@triton.jit(do_not_specialize=NUMBERS)
def kernel(
    cos_table, sin_table, rows, slots, row_batch, row_token, step, count, slot_batch, slot_token,
    slot_count, tokens, parts, parts_inverse, parts_shift, blocks, blocks_inverse, blocks_shift,
    block, block_inverse, block_shift, eps,
    q, yq, wq, sq, q_batch, q_token, q_head, yq_batch, yq_token, yq_head, sq_batch, sq_token,
    sq_head, wq_head, q_number, q_heads, q_parts,
    k, yk, wk, sk, k_batch, k_token, k_head, yk_batch, yk_token, yk_head, sk_batch, sk_token,
    sk_head, wk_head, k_number, k_heads, k_parts,
    v, yv, wv, sv, v_batch, v_token, v_head, yv_batch, yv_token, yv_head, sv_batch, sv_token,
    sv_head, wv_head, v_number, v_heads, v_parts,
    PAIRS: tl.constexpr, WIDTH: tl.constexpr, COLUMN: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, READ_HALF: tl.constexpr, WRITE_HALF: tl.constexpr, HAS_ROWS: tl.constexpr,
    ADD_ONE: tl.constexpr, SLOTS: tl.constexpr, GRID_3D: tl.constexpr,
    Q_DIM: tl.constexpr, Q_START: tl.constexpr, Q_REST: tl.constexpr, Q_NORM: tl.constexpr,
    Q_SCALE: tl.constexpr, Q_FORM: tl.constexpr, Q_LARGEST: tl.constexpr,
    K_DIM: tl.constexpr, K_START: tl.constexpr, K_REST: tl.constexpr, K_NORM: tl.constexpr,
    K_SCALE: tl.constexpr, K_FORM: tl.constexpr, K_LARGEST: tl.constexpr,
    V_DIM: tl.constexpr, V_REST: tl.constexpr, V_NORM: tl.constexpr, V_SCALE: tl.constexpr,
    V_FORM: tl.constexpr, V_LARGEST: tl.constexpr,
):  # fmt: skip
    """Take all steps for a block of tokens and a part of the heads of q, k or v.

    A table row is at `row_batch b + row_token t`, or `step` times the number found there in `rows`;
    COLUMN is the stride between its columns. With GRID_3D the grid has an axis each for parts,
    blocks of tokens and batch; else it has one.
    """
    ROWS: tl.constexpr = TOKENS * HEADS
    if GRID_3D:
        part, tile, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    else:
        program = tl.program_id(0)
        of_all = quotient(program, parts_inverse, parts_shift)
        part = program - of_all * parts
        batch = quotient(of_all, blocks_inverse, blocks_shift)
        tile = of_all - batch * blocks
    token = tile.to(tl.int64) * TOKENS + tl.arange(0, ROWS) // HEADS
    batch = batch.to(tl.int64)
    is_token = token < tokens
    pair = tl.arange(0, WIDTH)[None, :]
    # a bool a pair: Triton 3.9 interprets bools & one bool as whole numbers
    readable = is_token[:, None] & (pair < PAIRS) & (0 * pair + part < q_parts + k_parts)
    at = batch * row_batch + token * row_token
    if HAS_ROWS:
        row = tl.load(rows + at, mask=is_token, other=0).to(tl.int64)
        readable = readable & ((row >= 0) & (row < count))[:, None]
        at = row * step
    column = at[:, None] + COLUMN * pair
    cos = tl.load(cos_table + column, mask=readable, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_table + column, mask=readable, other=float("nan")).to(tl.float32)
    page, place = token, token
    if SLOTS:
        slot_at = batch * slot_batch + token * slot_token
        slot = tl.load(slots + slot_at, mask=is_token, other=-1).to(tl.int64)
        is_inside = (slot >= 0) & (slot < slot_count)
        slot = tl.where(is_inside, slot, 0).to(tl.int32)
        page = quotient(slot, block_inverse, block_shift)
        place = (slot - page * block).to(tl.int64)
        page = tl.where(is_inside, page, -1).to(tl.int64)
    if part < q_parts:
        all_stages(
            q, yq, wq, sq, cos, sin, page, place, batch, token, is_token, part, q_parts,
            q_batch, q_token, q_head, yq_batch, yq_token, yq_head, sq_batch, sq_token, sq_head,
            wq_head, q_number, q_heads, eps,
            Q_DIM, Q_START, PAIRS, WIDTH, Q_REST, ROWS, HEADS, READ_HALF, WRITE_HALF,
            Q_NORM, ADD_ONE, False, Q_SCALE, Q_FORM, Q_LARGEST,
        )  # fmt: skip
    elif part < q_parts + k_parts:
        all_stages(
            k, yk, wk, sk, cos, sin, page, place, batch, token, is_token, part - q_parts, k_parts,
            k_batch, k_token, k_head, yk_batch, yk_token, yk_head, sk_batch, sk_token, sk_head,
            wk_head, k_number, k_heads, eps,
            K_DIM, K_START, PAIRS, WIDTH, K_REST, ROWS, HEADS, READ_HALF, WRITE_HALF,
            K_NORM, ADD_ONE, SLOTS, K_SCALE, K_FORM, K_LARGEST,
        )  # fmt: skip
    else:
        all_stages(
            v, yv, wv, sv, cos, sin, page, place, batch, token, is_token, part - q_parts - k_parts,
            v_parts, v_batch, v_token, v_head, yv_batch, yv_token, yv_head, sv_batch, sv_token,
            sv_head, wv_head, v_number, v_heads, eps,
            V_DIM, 0, 0, 1, V_REST, ROWS, HEADS, READ_HALF, WRITE_HALF,
            V_NORM, ADD_ONE, SLOTS, V_SCALE, V_FORM, V_LARGEST,
        )  # fmt: skip
