"""Exact angles on a GPU without tables: the kernel works them out from positions and turns."""

# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from . import Numbers
from .geometry import Geometry, Options, geometry_of, seq_axis
from .torch_checks import check_no_grad, check_writable, check_xs
from .torch_launch import Differentiable, formula, gpu_kernel, is_for_gpu, mark_written
from .torch_state import INTEGERS, are_plain, is_on_gpu, is_tracing, wants_grad
from .torch_tables import arange, axis_turns, radians_of


def makes_angles(
    xs: Sequence[Tensor], positions: Tensor | None, out: Sequence[Tensor] | None, num_axes: int
) -> bool:
    """Whether `rotate_exact` takes these: plain tensors on a GPU, at whole positions there."""
    if is_tracing() or not is_on_gpu(xs[0]):
        return False
    if positions is None:
        return is_for_gpu((*xs, *(out or ())))
    has_axes = num_axes == 1 or positions.shape[-1] == num_axes
    return positions.dtype in INTEGERS and has_axes and is_for_gpu((*xs, positions, *(out or ())))


def rotate_exact(
    xs: Sequence[Tensor],
    turns: Numbers,
    factor: float,
    axes: tuple[int, ...],
    positions: Tensor | None,
    options: Options,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Rotate tensors on a GPU by angles that the kernel works out itself: no table is made or read.

    turns      (pairs,) uint64, as from `rotary.turns`;  axes  of its pairs, as in `Rotary`
    factor     multiplies cos and sin: the attention factor
    positions  (seq) or (batch, seq), with several axes followed by them; None for 0 .. seq - 1.
               Every 64-bit position is right, also a negative one: none is looked at or refused.
    The other arguments, and errors, are those of `rotary.rotate`.
    """
    check_xs(xs, out)
    seq = xs[0].shape[seq_axis(tuple(xs[0].shape), options.seq_dim)]
    tokens = None
    if positions is not None:
        tokens = tuple(positions.shape[:-1] if max(axes, default=0) else positions.shape)
    shapes = tuple([tuple(x.shape) for x in xs])
    geometry = geometry_of(shapes, (seq, len(turns)), tokens, options)
    place = xs[0].device, torch.is_inference_mode_enabled()
    steps = axis_turns(turns.tobytes(), axes, *place)
    if out is None:
        return _turned(factor, xs, (steps, positions), geometry)
    check_no_grad(xs, out)
    check_writable(xs, out)
    gpu_kernel(xs[0].device).rotate_exact(xs, steps, factor, positions, geometry, out)
    mark_written(out)
    return tuple(out)


def _turned(
    factor: float,
    xs: Sequence[Tensor],
    angles: tuple[Tensor, Tensor | None],
    geometry: Geometry,
) -> tuple[Tensor, ...]:
    turns, positions = angles
    given = () if positions is None else (positions,)
    if is_tracing() or not are_plain((*xs, turns, *given)):  # a gradient under a transform
        if positions is None:
            positions = arange(xs[0], xs[0].shape[geometry.dims.index(0)])
        steps = positions.long()[..., None] * turns
        radians = radians_of(steps if turns.ndim == 1 else steps.sum(-2))
        cos, sin = (radians.cos() * factor).float(), (radians.sin() * factor).float()
        return formula(xs, cos, sin, None, geometry)

    def run(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        kernel = gpu_kernel(xs[0].device)
        return kernel.rotate_exact(xs, turns, factor, positions, geometry, None)

    if wants_grad(*xs):
        return Differentiable.apply(run, partial(_turned, factor), angles, geometry, *xs)
    return run(xs)
