"""The GPU kernel: rotates q and k of any strides in one launch of one Triton kernel.

A program rotates one tile of rows; a row is one head of one token. It reads the cosines and sines
of the rows from tables, or computes them from 64-bit turns. The same launch copies the channels
that are not rotated, unless the rotation is in place. The tile depends on shapes and strides only:
nothing is tuned, and no call waits for the device, so it can be captured in a CUDA graph. Written
for CUDA, it compiles for ROCm's gfx942; XPU and other devices rotate by torch operators.
"""

# ruff: noqa: N803  # Triton's compile-time arguments are written in capitals
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..geometry import Geometry
from .arithmetic import cos_sin, product, quotient
from .launch import Launch, by_addresses, index_of, lanes_of, on_device, processors_of
from .plan import ALIGNED, Angles, Plan, plan
from .sources import Source, are_walked_alike, from_tables, from_turns

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FORMS = 256  # of tensors, for which `rotate_cached` caches launches at most
_launches: dict[tuple[object, ...], Launch | None] = {}
NUMBERS = (  # their values are not compiled in, so a new length does not wait for the compiler
    *("q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head"),
    *("yq_batch", "yq_token", "yq_head", "yk_batch", "yk_token", "yk_head"),
    *("row_batch", "row_token", "tokens", "q_heads", "k_heads", "step", "advance"),
    *("inner", "inner_inverse", "inner_shift", "outer", "outer_inverse", "outer_shift", "count"),
)


@triton.jit
def _rows(
    q, k, group, head, token, batch, is_token, q_heads, k_heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, HEADS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return the addresses of the rows of a group of heads, and a mask of those that exist."""
    q_groups = (q_heads + HEADS - 1) // HEADS
    is_q = group < q_groups
    number = (group - tl.where(is_q, 0, q_groups)) * HEADS + head
    at = batch * tl.where(is_q, q_batch, k_batch) + token * tl.where(is_q, q_token, k_token)
    at = at + number * tl.where(is_q, q_head, k_head)
    is_row = (is_token & (number < tl.where(is_q, q_heads, k_heads)))[:, None]
    return tl.where(is_q, q, k) + (at * ALIGN)[:, None], is_row


@triton.jit
def _loaded(x, is_row, PAIRS: tl.constexpr, WIDTH: tl.constexpr, READ_HALF: tl.constexpr):
    """Load the first and second channels of the pairs; interleaved: all of them, returned twice."""
    if READ_HALF:
        pair = tl.arange(0, WIDTH)[None, :]
        is_one = is_row & (pair < PAIRS)
        return tl.load(x + pair, mask=is_one), tl.load(x + PAIRS + pair, mask=is_one)
    else:  # noqa: RET505  # Triton would compile both returns
        both = tl.arange(0, 2 * WIDTH)[None, :]
        members = tl.load(x + both, mask=is_row & (both < 2 * PAIRS))
        return members, members


@triton.jit
def _copy(x, y, mask, FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr):
    for start in tl.static_range(FIRST, LAST, WIDTH):
        column = (start + tl.arange(0, WIDTH))[None, :]
        inside = mask & (column < LAST)
        tl.store(y + column, tl.load(x + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=NUMBERS)
def kernel(
    q, k, yq, yk, cos_or_turns, sin_table, rows,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    yq_batch, yq_token, yq_head, yk_batch, yk_token, yk_head,
    row_batch, row_token, tokens, q_heads, k_heads, step, advance,
    inner, inner_inverse, inner_shift, outer, outer_inverse, outer_shift, count, factor,
    HEAD_DIM: tl.constexpr, START: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    COLUMN: tl.constexpr, READ_HALF: tl.constexpr, WRITE_HALF: tl.constexpr, NEGATE: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, HAS_ROWS: tl.constexpr, EXACT: tl.constexpr,
    AXES: tl.constexpr, ROUNDED: tl.constexpr, TOKENS_FIRST: tl.constexpr,
    GRID_3D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rotate one tile: TOKENS tokens of HEADS heads of q, or of k.

    Strides are in units of ALIGN elements, so that Triton knows what divides them. A table row is
    at `row_batch b + row_token t`, or `step` times the number found there in `rows`; COLUMN is the
    stride between its columns. With EXACT the position is the number in `rows`, or without them
    `advance t`; `step` is the stride between its axes, and PAIRS that between the turns of the
    axes. BEFORE and AFTER say how many channels before and after the rotated ones are copied at
    once, 0 for none. With TOKENS_FIRST the next program takes the next tokens, else the next heads;
    `inner` and `outer` say how many there are. They are the first axes of the grid with GRID_3D; a
    longer grid has one axis. With WIDE offsets need 64 bits.
    """
    if GRID_3D:
        group, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    else:
        program = tl.program_id(0)
        slow = quotient(program, inner_inverse, inner_shift)
        batch = quotient(slow, outer_inverse, outer_shift)
        group, block = program - slow * inner, slow - batch * outer
    if TOKENS_FIRST:
        group, block = block, group
    if WIDE:
        group, block, batch = group.to(tl.int64), block.to(tl.int64), batch.to(tl.int64)
    tile = tl.arange(0, TOKENS * HEADS)
    token = block * TOKENS + tile // HEADS
    head = tile % HEADS
    is_token = token < tokens
    pair = tl.arange(0, WIDTH)
    is_pair = pair < PAIRS
    mask = is_token[:, None] & is_pair[None, :]

    # before the angles, which wait for memory as well
    x, is_row = _rows(
        q, k, group, head, token, batch, is_token, q_heads, k_heads,
        q_batch, q_token, q_head, k_batch, k_token, k_head, HEADS, ALIGN,
    )  # fmt: skip
    a, b = _loaded(x + START, is_row, PAIRS, WIDTH, READ_HALF)

    at = batch * row_batch + token * row_token
    if EXACT:
        position = (token * advance).to(tl.int64)
        if HAS_ROWS:
            position = tl.load(rows + at, mask=is_token, other=0).to(tl.int64)
        turns = tl.load(cos_or_turns + pair, mask=is_pair, other=0)
        angle = position[:, None] * turns[None, :]
        for axis in tl.static_range(1, AXES):
            position = tl.load(rows + at + axis * step, mask=is_token, other=0).to(tl.int64)
            turns = tl.load(cos_or_turns + axis * PAIRS + pair, mask=is_pair, other=0)
            angle += position[:, None] * turns[None, :]
        cos, sin = cos_sin(angle, factor)
    else:
        readable = mask
        if HAS_ROWS:
            row = tl.load(rows + at, mask=is_token, other=0).to(tl.int64)
            readable = mask & ((row >= 0) & (row < count))[:, None]
            at = row * (step * TABLE_ALIGN)
        else:
            at = at * TABLE_ALIGN
        column = at[:, None] + COLUMN * pair[None, :]
        cos = tl.load(cos_or_turns + column, mask=readable, other=float("nan")).to(tl.float32)
        sin = tl.load(sin_table + column, mask=readable, other=float("nan")).to(tl.float32)
    if NEGATE:
        sin = -sin

    y, _ = _rows(
        yq, yk, group, head, token, batch, is_token, q_heads, k_heads,
        yq_batch, yq_token, yq_head, yk_batch, yk_token, yk_head, HEADS, ALIGN,
    )  # fmt: skip
    if BEFORE:  # copied first: a load after the stores below would wait for their operands
        _copy(x, y, is_row, 0, START, BEFORE)
    if AFTER:
        _copy(x, y, is_row, START + 2 * PAIRS, HEAD_DIM, AFTER)

    if READ_HALF:
        u, v = a.to(tl.float32), b.to(tl.float32)
    else:
        u, v = tl.split(tl.reshape(a.to(tl.float32), (TOKENS * HEADS, WIDTH, 2)))
    one = product(u, cos, ROUNDED) - product(v, sin, ROUNDED)
    other = product(v, cos, ROUNDED) + product(u, sin, ROUNDED)
    one, other = one.to(q.dtype.element_ty), other.to(q.dtype.element_ty)
    if WRITE_HALF:
        is_one = is_row & is_pair[None, :]
        tl.store(y + START + pair[None, :], one, mask=is_one)
        tl.store(y + START + PAIRS + pair[None, :], other, mask=is_one)
    else:
        both = tl.arange(0, 2 * WIDTH)[None, :]
        turned = tl.reshape(tl.join(one, other), (TOKENS * HEADS, 2 * WIDTH))
        tl.store(y + START + both, turned, mask=is_row & (both < 2 * PAIRS))


# --- the calls ---


def rotate(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Rotate every tensor of `xs` by tables of cos and sin, two tensors in one launch.

    The caller has checked the arguments: tables of one of DTYPES, `rows` whole numbers or None. A
    row number outside the tables gives NaN, because checking it would wait for the device.
    """
    if not are_walked_alike(cos, sin):
        cos, sin = cos.contiguous(), sin.contiguous()
    return _rotate(xs, out, from_tables(cos, sin, rows, geometry), geometry)


def rotate_exact(
    xs: Sequence[Tensor],
    turns: Tensor,
    factor: float,
    positions: Tensor | None,
    geometry: Geometry,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Rotate every tensor of `xs` at whole positions, without tables; cos, sin right to 2e-7.

    turns      (pairs,) int64, the bits of `rotary.turns`; with several axes (axes, pairs), 0 where
               another axis turns the pair
    factor     multiplies cos and sin: the attention factor
    positions  whole numbers, aligned with x by `geometry`; (..., axes) if there are several axes.
               None for 0, 1, ... along the axis of the tokens
    """
    return _rotate(xs, out, from_turns(turns, factor, positions, geometry), geometry)


def _rotate(
    xs: Sequence[Tensor], out: Sequence[Tensor] | None, source: Source, geometry: Geometry
) -> tuple[Tensor, ...]:
    results = tuple([torch.empty_like(x) for x in xs]) if out is None else tuple(out)
    sources = [x if x.stride(-1) == 1 else x.contiguous() for x in xs]
    targets = [
        y
        if _can_be_written(x, y, geometry)
        else torch.empty(y.shape, dtype=y.dtype, device=y.device)
        for x, y in zip(sources, results, strict=True)
    ]
    for index in range(0, len(xs), 2):
        inputs, outputs = sources[index : index + 2], targets[index : index + 2]
        is_same = _are_same_memory(inputs, outputs)
        launch = _planned(inputs, outputs, source.angles, geometry, is_same)
        operands = (inputs[0], inputs[-1], outputs[0], outputs[-1], *source.memory)
        for corner in launch.corners if launch.programs else ():
            moved = _moved(operands, corner, source.angles)
            _run(launch, moved, source.limit, source.factor)
    for result, target in zip(results, targets, strict=True):
        if target is not result:
            result.copy_(target)
    return results


def _can_be_written(x: Tensor, y: Tensor, geometry: Geometry) -> bool:
    """Whether the kernel can write the result of x into y; it cannot change layouts in place."""
    is_mixed = geometry.layout != geometry.out_layout  # a pair would overwrite one not read yet
    return y.stride(-1) == 1 and not (is_mixed and x.data_ptr() == y.data_ptr())


def _are_same_memory(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    return all([x.data_ptr() == y.data_ptr() for x, y in zip(xs, ys, strict=True)])


def _planned(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    angles: Angles,
    geometry: Geometry,
    is_in_place: bool,
) -> Plan:
    return plan(
        tuple([tuple(x.shape) for x in inputs]),
        tuple([x.stride() for x in (*inputs, *outputs)]),
        angles,
        geometry,
        is_in_place,
        inputs[0].itemsize,
        processors_of(inputs[0].device),
        lanes_of(inputs[0].device),
    )


def _moved(
    operands: tuple[Tensor, ...], corner: tuple[int, ...], angles: Angles
) -> tuple[Tensor, ...]:
    """Return the operands (q, k, outputs, source of angles), starting at a corner."""
    if not any(corner):
        return operands
    *blocks, at = corner
    starts = (*blocks, 0, 0, at) if angles.has_rows else (*blocks, at, at, 0)
    return tuple(
        x if start == 0 or not x.numel() else x.as_strided((1,), (1,), x.storage_offset() + start)
        for x, start in zip(operands, starts, strict=True)
    )


def _run(launch: Plan, operands: tuple[Tensor, ...], count: int, factor: float) -> None:
    with on_device(index_of(operands[0])):
        kernel[launch.grid](*operands, *launch.numbers, count, factor, **_options(launch))


def _options(launch: Plan) -> dict[str, int | bool]:
    """Return the options of a launch; with tables, no product is fused with a sum, as in NumPy."""
    more = {"num_warps": launch.warps, "enable_fp_fusion": launch.constants["EXACT"]}
    return launch.constants | more


def prepared(
    xs: Sequence[Tensor], outs: Sequence[Tensor], source: Source, geometry: Geometry
) -> Launch | None:
    """Return a compiled and loaded launch by addresses, for tensors of these forms.

    The addresses are those of q, k, their outputs, and `source.memory`. Of `outs` only the form
    matters, and whether each is its x, in place. None if a call takes several launches or a copy.
    """
    if (
        len(xs) > 2
        or any([x.stride(-1) != 1 for x in xs])
        or not all([_can_be_written(x, y, geometry) for x, y in zip(xs, outs, strict=True)])
    ):
        return None
    launch = _planned(xs, outs, source.angles, geometry, _are_same_memory(xs, outs))
    if launch.programs == 0 or len(launch.corners) > 1 or any(launch.corners[0]):
        return None
    operands = xs[0], xs[-1], outs[0], outs[-1], *source.memory
    arguments = *operands, *launch.numbers, source.limit, source.factor
    return by_addresses(kernel, launch.grid, arguments, _options(launch))


def rotate_cached(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, geometry: Geometry
) -> tuple[Tensor, ...]:
    """Rotate as `rotate` does, into new tensors; the launch is cached for tensors of one form.

    For the layers that are exported without `torch/ready.py`, whose guards recognize a form faster.
    """
    form: tuple[object, ...] = (geometry,)
    for x in (*xs, cos, sin):
        form += x.shape, x.stride(), x.dtype, index_of(x), x.data_ptr() & ALIGNED == 0
    try:
        launch = _launches[form]
    except KeyError:
        outs = [torch.empty_like(x, device="meta") for x in xs]
        is_alike, source = are_walked_alike(cos, sin), from_tables(cos, sin, None, geometry)
        launch = prepared(xs, outs, source, geometry) if is_alike else None
        if len(_launches) >= _FORMS:
            _launches.clear()
        _launches[form] = launch
    if launch is not None:
        results = tuple([torch.empty_like(x) for x in xs])
        every = xs[0], xs[-1], results[0], results[-1], cos, sin
        if launch(tuple([x.data_ptr() for x in every]), False):
            return results
    return rotate(xs, cos, sin, None, geometry, None)


def record(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    source: Source,
    geometry: Geometry,
    is_in_place: bool,
) -> bool:
    """Put the launch into a program of torch.compile; False if a call takes several launches.

    Inductor has no option against fusing products with sums, so ROUNDED makes the kernel round.
    """
    launch = _planned(xs, outs, source.angles, geometry, is_in_place)
    if len(launch.corners) > 1 or any(launch.corners[0]):
        return False
    if launch.programs:
        # functionalization takes what is written twice for two tensors, one of which is not written
        other = outs[1] if len(outs) > 1 else outs[0].new_empty(1)
        torch.library.wrap_triton(kernel)[launch.grid](
            *(xs[0], xs[-1], outs[0], other, *source.memory, *launch.numbers, source.limit),
            source.factor, num_warps=launch.warps,
            **{**launch.constants, "ROUNDED": not launch.constants["EXACT"]},
        )  # fmt: skip
    return True
