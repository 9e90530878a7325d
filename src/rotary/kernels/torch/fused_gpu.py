"""`rotary.fused` for torch on a GPU: tensors of any strides, in one launch of the kernel."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Geometry
from ..stages import (
    LARGEST,
    TOKEN,
    Fit,
    KVCache,
    LatentCache,
    Norm,
    Stages,
    arrays_of,
    changes_v,
    check_cache,
    check_slot_shape,
    dtype_name,
    read_by,
    scale_form,
    weight_form,
    written_to,
)
from ..triton.fused import kernel
from ..triton.launch import by_addresses, index_of, on_device, processors_of
from ..triton.plan import grid_of, inverse_of
from ..triton.sources import along, are_walked_alike
from .checks import check_outputs, check_writable, slots_of
from .launch import mark_written
from .state import as_tensor

# of 1024 to 8192 elements and 1 to 8 warps the fastest on an H100, but for a few rows
_WARPS = 2
_ELEMENTS = 1024  # in a tile: 16 for each thread
_PROGRAMS = 32  # for each processor: heads are parted among programs until there are so many
Result = Tensor | tuple[Tensor, Tensor] | None


class ArrayPlan(NamedTuple):
    """How one of q, k and v is read and written.

    x, y     input and output, (batch, tokens, heads, channels); in a cache y is
             (blocks, block_size, heads, channels)
    kind     the dtype name of what is stored;  start  the first rotated channel
    scale    a number; (heads,) float32 of any stride; or, if `has_scales`, the tensor into which
             the kernel writes one for each token and head: (batch, tokens, heads), or in a cache
             (blocks, block_size, heads)
    weight   (heads or 1, channels), or None;  is_full  whether the mean is over all heads
    """

    x: Tensor
    y: Tensor
    kind: str
    scale: Tensor | float
    has_scales: bool
    start: int
    weight: Tensor | None
    is_full: bool


class Launch(NamedTuple):
    """A launch of the kernel: its arguments in order, and its options."""

    device: int
    grid: tuple[int, int, int]
    arguments: list[object]
    options: dict[str, object]

    def run(self) -> None:
        """Launch it by Triton."""
        with on_device(self.device):
            kernel[self.grid](*self.arguments, **self.options)

    def prepared(self) -> Callable[[tuple[int, ...], bool], bool] | None:
        """Return this launch for the addresses of its tensors, in order, compiled and loaded."""
        return by_addresses(kernel, self.grid, self.arguments, self.options)


def fused(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    fitted: Fit,
    stages: Stages,
    out: Sequence[Tensor] | None,
) -> tuple[Result, Result, Result] | None:
    """Compute `rotary.fused` in one launch; None, with nothing written, if it cannot.

    The arguments are those of `kernels/torch/fused.py`, checked. Slots are not checked, because
    that would wait for the device: one beyond the cache is skipped.
    """
    plan = planned((q, k, v), cos, sin, rows, fitted, stages, out)
    if plan is None:
        return None
    results, launch = plan
    if launch is not None:
        launch.run()
    mark_written([*written_to(stages.cache), *(out or ())])
    if out is not None:
        tensors = [result for result in results if isinstance(result, Tensor)]
        for y, result in zip(out, tensors, strict=True):
            if y is not result:
                y.copy_(result)
        done = iter(out)
        results = [None if result is None else next(done) for result in results]
    is_changed = changes_v(stages) or stages.cache is not None
    return results[0], results[1], results[2] if is_changed else v


def planned(
    qkv: tuple[Tensor, Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    fitted: Fit,
    stages: Stages,
    out: Sequence[Tensor] | None,
) -> tuple[list[Result], Launch | None] | None:
    """Return results to be written, and the launch that writes them; no launch for no elements.

    The kernel writes into a tensor of `out` if it can, else the result is a new tensor. None if
    there are no tokens, if there are batch axes on both sides of theirs, if angles differ between
    heads, if the blocks of k and v differ in size, or if the cache has more slots than 32-bit
    numbers can count. Raises ValueError for outputs and caches that must not be written.
    """
    q, k, v = qkv
    xs = q, k, v if changes_v(stages) or stages.cache is not None else None
    read = [x for x in (*qkv, cos, sin, rows, *read_by(stages)) if isinstance(x, Tensor)]
    if out is not None:
        if "token" in [scale for scale in stages.scales if isinstance(scale, str)]:
            raise ValueError("out= cannot be used with computed scales: call without out=")
        kind = q.dtype if stages.dtype is None else getattr(torch, stages.dtype)
        returned = [x for x in (xs if stages.cache is None else (q,)) if x is not None]
        check_outputs([x.to("meta", kind) for x in returned], read, out)
    check_writable([*read, *(out or ())], written_to(stages.cache), in_place=False)
    if cos.dtype == torch.float64:
        cos, sin = cos.float(), sin.float()
    if not are_walked_alike(cos, sin):
        cos, sin = cos.contiguous(), sin.contiguous()
    steps = dict(enumerate(along(cos if rows is None else rows, fitted.geometries[0].dims)))
    if 0 in fitted.tokens or 0 < fitted.place < len(fitted.tokens) - 1:
        return None
    slots, block, count = _slots(stages.cache, fitted)
    is_by_head = fitted.head_axis is not None and bool(steps.pop(fitted.head_axis))
    if is_by_head or count >= 2**31 or block is None:
        return None
    steps[fitted.seq_axis] = steps.pop(fitted.seq_axis)  # after the batch axes
    sizes, strides = [xs[0].shape[axis] for axis in steps], list(steps.values())
    if rows is None:
        width, column = cos.shape[-1], cos.stride(-1)
        cos, sin = (
            table.as_strided((*sizes, width), (*strides, column)).reshape(-1, sizes[-1], width)
            for table in (cos, sin)
        )
    else:
        rows = rows.as_strided(sizes, strides).reshape(-1, sizes[-1])
    plans: list[ArrayPlan | None] = []
    results: list[Result] = []
    outs = iter(out or ())
    is_mixed = fitted.geometries[0].layout != fitted.geometries[0].out_layout
    for name, x, scale in zip("qkv", xs, stages.scales, strict=True):
        if x is None:
            plans.append(None)
            results.append(None)
            continue
        is_latent = isinstance(stages.cache, LatentCache) and name == "v"
        head_axis = None if is_latent else fitted.head_axis
        axes = head_axis, fitted.place
        source = as_4d(x if x.stride(-1) == 1 else x.contiguous(), axes)
        start = fitted.geometries[name == "k"].start if name != "v" else 0
        weight = _weight(stages.norm, name, source)
        if stages.cache is not None and name != "q":
            target = _in_cache(name, stages.cache, source)
            results.append(None)
        else:
            kind = stages.dtype or str(xs[0].dtype).removeprefix("torch.")
            y, result = _output(x, axes, kind, next(outs, None), is_mixed)
            target = _scaled(name, y, kind, scale)
            if target[3]:
                scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
                target = *target[:2], as_4d(scales[..., None], axes)[..., 0], True
                results.append((result, scales))
            else:
                results.append(result)
        plans.append(ArrayPlan(source, *target, start, *weight))
    geometry = fitted.geometries[0]
    return results, _launch(plans, cos, sin, rows, slots, block, count, geometry, stages.norm)


def as_4d(x: Tensor, axes: tuple[int | None, int]) -> Tensor:
    """Return x as (batch, tokens, heads, channels), without a copy if possible.

    axes  that of the heads, or None; and of the sequence, once the heads are moved
    """
    head_axis, place = axes
    x = x.unsqueeze(-2) if head_axis is None else x.movedim(head_axis, -2)
    x = x.movedim(place, -3)
    return x.reshape(-1, *x.shape[-3:]) if x.numel() else x.reshape(0, 1, *x.shape[-2:])


def _weight(norm: Norm | None, name: str, x: Tensor) -> tuple[Tensor | None, bool]:
    weight = None if norm is None else getattr(norm, name)
    if weight is None:
        return None, False
    form, is_full = weight_form(name, tuple(weight.shape), x.shape[-2], x.shape[-1])
    return weight.reshape(form).contiguous(), is_full and x.shape[-2] > 1


def _output(
    x: Tensor, axes: tuple[int | None, int], kind: str, out: Tensor | None, is_mixed: bool
) -> tuple[Tensor, Tensor]:
    """Return the result, `out` if the kernel can write into it, preceded by its `as_4d`."""
    dtype = getattr(torch, kind)
    if out is not None and out.dtype == dtype and out.shape == x.shape and out.stride(-1) == 1:
        y = as_4d(out, axes)
        if y.data_ptr() == out.data_ptr() and not (is_mixed and out.data_ptr() == x.data_ptr()):
            return y, out
    result = torch.empty_like(x, dtype=dtype)
    y = as_4d(result, axes)
    if y.data_ptr() != result.data_ptr() or y.stride(-1) != 1:
        result = torch.empty(x.shape, dtype=dtype, device=x.device)
        y = as_4d(result, axes)
    return y, result


def _scaled(
    name: str, y: Tensor, kind: str, scale: object
) -> tuple[Tensor, str, Tensor | float, bool]:
    """Return `y`, `kind`, `scale` and `has_scales` of an `ArrayPlan`, for an output."""
    if isinstance(scale, str):
        if scale != TOKEN or LARGEST[kind] is None:
            raise ValueError(
                f"scale={scale!r} with {kind}: pass numbers, or 'token' for int8 and float8"
            )
        return y, kind, 1.0, True
    if isinstance(scale, (int, float)):
        return y, kind, scale, False
    numbers = as_tensor("scale", scale, y, torch.float32)
    scale_form(name, tuple(numbers.shape), y.shape[-2])
    return y, kind, numbers.expand(y.shape[-2]), False


def _in_cache(
    name: str, cache: KVCache | LatentCache, x: Tensor
) -> tuple[Tensor, str, Tensor | float, bool]:
    """Return `y`, `kind`, `scale` and `has_scales` of an `ArrayPlan`, for a cache."""
    if isinstance(cache, LatentCache):
        row = (cache.rows.shape[-1],)
        block = check_cache("the rows", tuple(cache.rows.shape), row)
        part = slice(-x.shape[-1], None) if name == "k" else slice(x.shape[-1])
        memory, scale = cache.rows[..., None, part], cache.scale
    else:
        memory, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
        block = check_cache(name, tuple(memory.shape), tuple(x.shape[-2:]))
    kind = dtype_name(memory.dtype)
    y = memory.unsqueeze(1) if block is None else memory
    if y.stride(-1) != 1:
        raise ValueError(f"on a GPU the cache of {name} must be contiguous along its channels")
    if isinstance(scale, Tensor) and scale.shape == memory.shape[:-1] and memory.ndim > 2:
        _scaled(name, y, kind, TOKEN)
        return y, kind, scale.unsqueeze(1) if block is None else scale, True
    return _scaled(name, y, kind, scale)


def _slots(
    cache: KVCache | LatentCache | None, fitted: Fit
) -> tuple[Tensor | None, int | None, int]:
    """Return the slots as (batch, tokens), the block size, and the number of slots in the cache.

    The block size is None if that of k is not that of v. Raises ValueError if one has more slots.
    """
    if cache is None:
        return None, 1, 0
    memories = arrays_of(cache)
    if not memories:
        raise ValueError("the cache has neither k nor v: pass KVCache(k, v, slots)")
    slots = slots_of(cache.slots, memories[0])
    check_slot_shape(tuple(slots.shape), fitted.by_batch)
    flat = 2 if isinstance(cache, LatentCache) else 3
    blocks = {1 if memory.ndim == flat else memory.shape[1] for memory in memories}
    counts = [math.prod(memory.shape[: memory.ndim - flat + 1]) for memory in memories]
    if len({*counts}) > 1:
        raise ValueError(f"k and v of the cache must have as many slots: got {counts}")
    slots = slots.reshape(-1, fitted.by_batch[-1])
    return slots, blocks.pop() if len(blocks) == 1 else None, counts[0]


def _launch(
    plans: Sequence[ArrayPlan | None],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    slots: Tensor | None,
    block: int,
    slot_count: int,
    geometry: Geometry,
    norm: Norm | None,
) -> Launch | None:
    """Return the launch. cos and sin are (batch, tokens, pairs), or with `rows` (rows, pairs)."""
    present = [plan for plan in plans if plan is not None and plan.x.numel()]
    if not present:
        return None
    batches, tokens = present[0].x.shape[:2]
    widest = max(max(_power(plan.x.shape[-1]) for plan in present), 2 * _power(geometry.pairs))
    fitting = max(1, _ELEMENTS // widest)
    heads, counts = 1, [plan.x.shape[2] for plan in present]
    if not any(plan.is_full for plan in present):
        while 2 * heads <= min(8, fitting) and not any(count % (2 * heads) for count in counts):
            heads *= 2
    tile_tokens = min(fitting // heads, _power(tokens))
    blocks = -(-tokens // tile_tokens)
    processors = processors_of(cos.device)
    is_filled = batches * tokens * sum(counts) * widest > processors * _ELEMENTS
    numbers: list[object] = []
    constants: dict[str, object] = {}
    programs = 0
    for name, plan in zip("QKV", plans, strict=True):
        is_there = plan is not None and plan.x.numel() > 0
        used = plan if plan is not None and is_there else present[0]  # of 0 heads nothing is read
        parts = 0
        if is_there:
            groups = -(-used.x.shape[2] // heads)
            parts = -(-_PROGRAMS * processors // (batches * blocks))
            each = -(-groups // min(groups, parts))  # of a program; 4 groups in 3 parts are in 2
            parts = 1 if used.is_full else -(-groups // each)
        array_numbers, array_constants = _arguments(name, used, geometry)
        numbers += [*array_numbers, used.x.shape[2] if is_there else 0, parts]
        constants |= array_constants
        programs += parts
    grid = grid_of(programs, blocks, batches)
    steps = (cos if rows is None else rows).stride()[:2]
    batch_step = 0 if (cos if rows is None else rows).shape[0] == 1 else steps[0]
    row_step, count = (0, 0) if rows is None else (cos.stride(0), cos.shape[0])
    arguments = [
        cos, sin, cos if rows is None else rows, cos if slots is None else slots,
        batch_step, steps[1], row_step, count, *((0, 0) if slots is None else slots.stride()),
        slot_count, tokens, programs, *inverse_of(programs), blocks, *inverse_of(blocks),
        block, *inverse_of(block), 0.0 if norm is None else float(norm.eps), *numbers,
    ]  # fmt: skip
    options = {
        "PAIRS": geometry.pairs,
        "WIDTH": _power(geometry.pairs),
        "COLUMN": 1 if geometry.pairs == 1 else cos.stride(-1),
        "TOKENS": tile_tokens,
        "HEADS": heads,
        "READ_HALF": geometry.layout == "half",
        "WRITE_HALF": geometry.out_layout == "half",
        "HAS_ROWS": rows is not None,
        "ADD_ONE": int(norm is not None and norm.add_one),
        "SLOTS": slots is not None,
        "GRID_3D": grid == (programs, blocks, batches),
        **constants,
        "num_warps": _WARPS if is_filled else 2 * _WARPS,
        "enable_fp_fusion": False,
    }
    return Launch(index_of(cos), grid, arguments, options)


def _arguments(
    name: str, plan: ArrayPlan, geometry: Geometry
) -> tuple[list[object], dict[str, object]]:
    """Return the run-time arguments of one array, from `q` to `q_number`, and its constants."""
    width, weight, scale = plan.x.shape[-1], plan.weight, plan.scale
    rest = width if name == "V" else width - 2 * geometry.pairs
    kind = "token" if plan.has_scales else "heads" if isinstance(scale, Tensor) else "number"
    largest = LARGEST[plan.kind]
    constants: dict[str, object] = {
        "DIM": width,
        "REST": _power(rest) if rest else 0,
        "NORM": "" if weight is None else "all heads" if plan.is_full else "head",
        "SCALE": "" if kind == "number" and scale == 1 else kind,
        "FORM": "" if largest is None else plan.kind,
        "LARGEST": 0.0 if largest is None else largest,
        **({} if name == "V" else {"START": plan.start}),
    }
    is_byte = plan.kind.startswith("float8")
    steps = scale.stride() if isinstance(scale, Tensor) else ()
    numbers = [
        plan.x, plan.y.view(torch.uint8) if is_byte else plan.y,
        plan.x if weight is None else weight,
        scale if isinstance(scale, Tensor) else plan.x, *plan.x.stride()[:3], *plan.y.stride()[:3],
        *(0,) * (3 - len(steps)), *steps,
        weight.stride(0) if weight is not None and len(weight) > 1 else 0,
        1.0 if isinstance(scale, Tensor) else float(scale),
    ]  # fmt: skip
    return numbers, {f"{name}_{key}": value for key, value in constants.items()}


def _power(number: int) -> int:
    """Return the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()
