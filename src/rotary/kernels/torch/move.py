"""Rotates cached keys in torch tensors: by compiled loops on the host, else by torch operators."""

from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from .. import Numbers, Rotate
from ..geometry import Options
from ..numpy import CODES as LIMITS
from ..numpy import check_like
from .checks import check_device, check_no_grad, check_no_inference, check_strided, check_writable
from .launch import form, mark_written
from .state import CODES, INTEGERS, are_plain, host_array, is_on_host, is_recording, wants_grad

loops: ModuleType | None
try:
    from ..cpu import move as loops
except ImportError:  # without Numba torch's operators move keys
    loops = None


def move(
    rotate: Rotate[Tensor],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    blocks: Tensor | None,
    scale: Tensor | None,
    options: Options,
    out: Tensor | None,
) -> Tensor:
    """Rotate the keys of some blocks of a cache, as in `kernels/numpy.py`; `rotate` is torch's.

    On a GPU the blocks are gathered, rotated and written back, which takes memory for them only.
    """
    operands = [y for y in (cos, sin, blocks, scale, out) if y is not None]
    for other in operands:
        check_device(other, x)
    check_strided((x, *operands))
    if out is not None:
        check_like("input", x, out)
        check_no_grad((x, cos, sin), (out,))
        if not is_recording():
            check_writable((x, cos, sin), (out,))
    is_for_loops = not is_recording() and not wants_grad(x, cos, sin) and scale is None
    if is_for_loops and is_on_host(x) and are_plain((x, *operands)) and loops is not None:
        y = _copied(x, out)
        rows = None if blocks is None else host_array(blocks.contiguous())
        tables = form(cos), cos.data_ptr(), sin.data_ptr()
        is_alike = cos.stride() == sin.stride()
        if is_alike and loops.run(form(y), y.data_ptr(), *tables, rows, options):
            if out is not None:
                mark_written((out,))
            return y
    return _formula(rotate, x, cos, sin, blocks, scale, options, out)


def move_by(
    xs: Sequence[Tensor], blocks: object, shift: object, turns: Callable[[], Numbers],
    backwards: bool, options: Options,
) -> bool:  # fmt: skip
    """Rotate blocks of these caches in place, by whole numbers of tokens, in the compiled loops.

    Returns False, having written nothing, if `move` has to be called, or would refuse the call.
    """
    if loops is None or is_recording() or not are_plain(xs) or wants_grad(*xs):
        return False
    blocks, shift = (_host_numbers(each) for each in (blocks, shift))
    first, *others = map(form, xs)
    if xs[0].is_cuda or blocks is None or shift is None or any(x != first for x in others):
        return False
    check_no_inference(xs)
    addresses = [x.data_ptr() for x in xs]
    if not loops.run_shifted(first, addresses, blocks, shift, turns, backwards, options):
        return False
    mark_written(xs)
    return True


def check_out(xs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Refuse arrays on several devices, and outputs that must not be written or share memory.

    `xs` are the input of each output, in the same order, then what else is read.
    """
    for x, y in zip(xs, out, strict=False):
        check_device(x, xs[0])
        check_device(y, x)
        check_strided((x, y))
        check_like("input", x, y)
    check_no_grad(xs, out)
    if not is_recording():
        check_writable(xs, out)


def _host_numbers(numbers: object) -> Numbers | None:
    if not isinstance(numbers, Tensor):
        return np.asarray(numbers)
    return host_array(numbers) if numbers.dtype in INTEGERS and is_on_host(numbers) else None


def _copied(x: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return x.detach().clone()
    return out if out.data_ptr() == x.data_ptr() else out.copy_(x)


def _formula(
    rotate: Rotate[Tensor],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    blocks: Tensor | None,
    scale: Tensor | None,
    options: Options,
    out: Tensor | None,
) -> Tensor:
    is_codes = x.dtype in CODES
    cache = x.view(torch.uint8) if is_codes else x  # torch cannot index float8
    keys = codes = cache if blocks is None else cache.index_select(0, blocks)
    if is_codes:
        keys = codes.view(x.dtype).float()
        if scale is not None:
            scales = scale.float().expand(x.shape)
            scale = scales if blocks is None else scales.index_select(0, blocks)
            keys = keys * scale
    (moved,) = rotate((keys,), cos, sin, None, options, None)
    if is_codes:
        moved = (moved if scale is None else moved / scale).clamp(*LIMITS[CODES[x.dtype]])
        moved = moved.round() if x.dtype == torch.int8 else moved
        moved = moved.to(x.dtype).view(torch.uint8)
        start, stop = options.start, options.start + 2 * cos.shape[-1]
        if stop - start < x.shape[-1]:  # codes of other channels are kept: rounding changes NaN
            parts = codes[..., :start], moved[..., start:stop], codes[..., stop:]
            moved = torch.cat(parts, dim=-1)
    if out is None:
        result = moved if blocks is None else cache.index_copy(0, blocks, moved)
        return result.view(x.dtype) if is_codes else result
    target = out.view(torch.uint8) if is_codes else out
    if blocks is None:
        target.copy_(moved)
        return out
    if out is not x:
        target.copy_(cache)
    target.index_copy_(0, blocks, moved)
    return out
