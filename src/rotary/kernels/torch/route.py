"""The torch kernel: chooses the code that rotates a tensor, under autograd and compilers too.

An eager call on plain CPU tensors goes straight to the compiled loops, one on plain CUDA tensors to
one launch of the Triton kernel; through an autograd function if a gradient is wanted.
Under `torch.compile` a call is recorded as an operator. On a CPU that is `torch.ops.rotary.rotate`,
which Inductor does not look into: as fast as Inductor's own code for the formula in float32, and
several times faster in bfloat16. On a GPU `apply` is recorded as `torch.ops.rotary.rotate_at`, one
launch that computes its angles without tables; Inductor would compute its float64 sines and cosines
in the loops over all channels of q and k. Inductor sees that launch itself if all sizes are known,
and the operators if lengths are open or on ROCm.
Everything else (other devices, subclasses, vmap, forward mode, export, tables that need a gradient)
is the formula in torch's own operators, which torch differentiates and transforms.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .. import CallerOptions, Kernel, Numbers
from ..geometry import AngleOptions, Geometry, Options, geometry_of, geometry_of_arrays, seq_axis
from . import angles, gpu, move, ready
from .checks import check_no_grad, check_operands, check_plain, check_rows, check_writable, check_xs
from .launch import (
    Differentiable,
    differentiable,
    formula,
    gpu_kernel,
    has_kernel,
    is_for_gpu,
    launch,
    mark_written,
)
from .operators import flat
from .private import is_exporting
from .state import (
    INTEGERS,
    are_plain,
    is_on_gpu,
    is_recorded_by_dynamo,
    is_tracing,
    is_tracing_a_transform,
    is_watched,
    wants_grad,
)


def rotate(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: object,
    options: Options,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Rotate torch tensors; the formula of `kernels/numpy.py`, with gradients.

    Arguments and errors are those of `rotary.rotate`.
    """
    tables = (cos, sin) if positions is None else (cos, sin, positions)
    results = quick((options,), ready.identity, xs, tables, out)
    return rotate_uncached(xs, cos, sin, positions, options, out) if results is None else results


def quick(
    caller_options: CallerOptions,
    options_of: Callable[..., Options | AngleOptions],
    xs: Sequence[Tensor],
    tables: Sequence[object],
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...] | None:
    """Rotate by code that is cached for calls of this form; None if there is none."""
    if is_recorded_by_dynamo():
        if len(tables) > 1:
            return None
        kind = options_of(*caller_options)
        assert isinstance(kind, AngleOptions)
        return _recorded_at(xs, tables[0] if tables else None, kind, out)
    operands: ready.Tables = tables  # type: ignore[assignment]  # checked there
    return ready.run(caller_options, xs, operands, out, _code, options_of)


def rotate_uncached(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: object,
    options: Options,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Check the arguments of `rotate`, and rotate without the code that `ready.py` caches."""
    check_operands(xs, cos, sin, out)
    rows = None if positions is None else check_rows(positions, xs[0])
    geometry = geometry_of_arrays(xs, cos, rows, options)
    if out is not None:
        return _rotate_into(xs, cos, sin, rows, geometry, out)
    return _rotate(xs, (cos, sin, rows), geometry)


def _recorded_at(
    xs: Sequence[Tensor], positions: object, kind: AngleOptions, out: Sequence[Tensor] | None
) -> tuple[Tensor, ...] | None:
    """Call the operator that torch.compile records on a GPU; None if tables are needed."""
    x = xs[0]
    if not is_on_gpu(x) or is_exporting() or is_tracing_a_transform():
        return None
    if not has_kernel(x.device, x.dtype):
        return None
    name, factor = kind.form[0].constant(gpu.keep_turns, kind.angles_of, x.device, *kind.form[1:])
    turns = getattr(gpu.constants, name)
    tokens = None
    if isinstance(positions, Tensor):
        has_axes = turns.ndim > 1
        tokens = tuple(positions.shape[:-1] if has_axes else positions.shape)
        is_fit = len(tokens) == 1 or (len(tokens) == 2 and x.ndim >= 4)
        if positions.dtype not in INTEGERS or not is_fit:
            return None
        if has_axes and positions.shape[-1] != len(turns):
            return None
    check_xs(xs, out)
    shapes = tuple([tuple(each.shape) for each in xs])
    seq = x.shape[seq_axis(shapes[0], kind.options.seq_dim)]
    geometry = geometry_of(shapes, (seq, turns.shape[-1]), tokens, kind.options)
    operands = (list(xs), positions, turns, factor, *flat(geometry))
    if out is None:
        return tuple(torch.ops.rotary.rotate_at(*operands))
    check_no_grad(xs, out)
    torch.ops.rotary.rotate_at_out(*operands, list(out))
    return tuple(out)


def prepare(
    options: Options | AngleOptions,
    xs: Sequence[Tensor],
    tables: ready.Tables,
    out: Sequence[Tensor] | None,
    fallback: ready.Prepared,
) -> ready.Prepared | None:
    """Return code for tensors of this form, `fallback` for others; None if there is no code."""
    if is_watched() or not (tables or is_on_gpu(xs[0])):
        return None
    code = _code(options, xs, tables, out)
    return None if code is None else ready.prepared(code, xs, tables, out, fallback)


def _code(
    kind: Options | AngleOptions | gpu.Rotation,
    xs: Sequence[Tensor],
    tables: ready.Tables,
    out: Sequence[Tensor] | None,
) -> ready.Run | None:
    """Return code that rotates tensors like these, unchecked; None if there is none."""
    if isinstance(kind, gpu.Rotation):
        rotation = kind if is_for_gpu((*xs, *tables)) else None  # not in vmap of is_grads_batched
    elif is_on_gpu(xs[0]):
        rotation = gpu.rotation_of(kind, xs, tables, out)
    else:
        return ready.on_cpu(kind, xs, tables, out)
    if rotation is None or wants_grad(*tables, *(out or ())):
        return None
    if not wants_grad(*xs):
        return gpu.code_of(rotation, xs, tables, out)
    return _code_with_gradient(rotation, xs, tables) if out is None else None


def _code_with_gradient(
    rotation: gpu.Rotation, xs: Sequence[Tensor], tables: ready.Tables
) -> ready.Run | None:
    launch = gpu.code_of(rotation, xs, tables, None)
    if launch is None:
        return None

    def code(
        xs: Sequence[Tensor], tables: ready.Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...]:
        def run(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            results = launch(xs, tables, None)
            return gpu.rotate(rotation, xs, tables, None) if results is None else results

        return differentiable(run, back, tables, *xs)

    back = partial(_rotate_gradients, gpu.Rotation(rotation.geometry.reversed(), rotation.angles))
    return code


def _rotate_gradients(
    rotation: gpu.Rotation, xs: Sequence[Tensor], tables: ready.Tables
) -> tuple[Tensor, ...]:
    """Rotate gradients on a GPU; the result can be differentiated again."""
    results = ready.run((rotation,), xs, tables, None, _code, ready.identity)
    if results is not None:
        return results
    if rotation.angles is None:
        cos, sin, *rows = tables
        return _rotate(xs, (cos, sin, rows[0] if rows else None), rotation.geometry)
    steps, factor = gpu.turns_of(rotation.angles, xs[0])
    return _rotate_exact(factor, xs, (steps, tables[0] if tables else None), rotation.geometry)


def route(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> str:
    """Return which code rotates: the first line of the table that fits the call.

    | the call | the code |
    |---|---|
    | torch.compile records it for loops or Triton; the tables need no gradient | "operator" |
    | it is recorded otherwise: torch.export, another device, torch.func | "formula" |
    | the tables need a gradient; a subclass, another device, vmap, a mode | "formula" |
    | x requires a gradient | "autograd": a function around the code of the next line |
    | any other on a CPU or a GPU | "memory": compiled loops, or one launch of Triton |

    A call like an earlier one never gets here, because `ready.py` repeats it. The operator is
    opaque to Inductor. The formula is torch's own operators, which torch records, differentiates
    and fuses. With out= there is no gradient, so only "operator" and "memory" are possible.
    """
    if is_tracing():
        if is_exporting() or wants_grad(cos, sin) or is_tracing_a_transform():
            return "formula"
        x = xs[0]
        is_taken = (
            cos.dtype == torch.float32 and has_kernel(x.device, x.dtype)
            if is_on_gpu(x)
            else x.device.type == "cpu"
        )
        return "operator" if is_taken else "formula"
    if wants_grad(cos, sin) or not are_plain((*xs, cos, sin)):
        return "formula"
    return "autograd" if wants_grad(*xs) else "memory"


def _rotate(
    xs: Sequence[Tensor], tables: tuple[Tensor, Tensor, Tensor | None], geometry: Geometry
) -> tuple[Tensor, ...]:
    cos, sin, rows = tables
    code = route(xs, cos, sin)
    if code == "operator":
        return tuple(torch.ops.rotary.rotate(list(xs), cos, sin, rows, *flat(geometry)))
    if code == "formula":
        return formula(xs, cos, sin, rows, geometry)

    def run(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return launch(xs, cos, sin, rows, geometry, None)

    if code == "autograd":
        back = partial(_rotate, geometry=geometry.reversed())
        return Differentiable.apply(run, back, tables, *xs)
    return run(xs)


def _rotate_into(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    out: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    if is_tracing_a_transform():
        raise RuntimeError(
            "out= cannot be used where torch.compile records vmap, grad or jvp: call without out="
        )
    check_no_grad((*xs, cos, sin), out)
    if is_tracing():
        torch.ops.rotary.rotate_out(list(xs), cos, sin, rows, *flat(geometry), list(out))
        return tuple(out)
    check_writable((*xs, cos, sin, *(() if rows is None else (rows,))), out)
    launch(xs, cos, sin, rows, geometry, out)
    mark_written(out)
    return tuple(out)


# --- exact angles, without tables ---


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
    """Rotate tensors on a GPU by angles that the kernel computes itself, without tables.

    turns      (pairs,) uint64, as from `rotary.turns`;  axes  of its pairs, as in `Rotary`
    factor     multiplies cos and sin: the attention factor
    positions  (seq) or (batch, seq), for several axes (..., axes); None for 0 .. seq - 1. Angles
               are exact at every 64-bit position, also a negative one: none is checked or refused.
    The other arguments, and errors, are those of `rotary.rotate`.
    """
    check_xs(xs, out)
    seq = xs[0].shape[seq_axis(tuple(xs[0].shape), options.seq_dim)]
    tokens = None
    if positions is not None:
        tokens = tuple(positions.shape[:-1] if max(axes, default=0) else positions.shape)
    shapes = tuple([tuple(x.shape) for x in xs])
    geometry = geometry_of(shapes, (seq, len(turns)), tokens, options)
    is_inference = torch.is_inference_mode_enabled()
    steps = angles.axis_turns(turns.tobytes(), axes, xs[0].device, is_inference)
    if out is None:
        return _rotate_exact(factor, xs, (steps, positions), geometry)
    check_no_grad(xs, out)
    check_writable(xs, out)
    gpu_kernel(xs[0].device).rotate_exact(xs, steps, factor, positions, geometry, out)
    mark_written(out)
    return tuple(out)


def _rotate_exact(
    factor: float,
    xs: Sequence[Tensor],
    angles: tuple[Tensor, Tensor | None],
    geometry: Geometry,
) -> tuple[Tensor, ...]:
    turns, positions = angles
    rows = () if positions is None else (positions,)
    if is_tracing() or not are_plain((*xs, turns, *rows)):  # a gradient under a transform
        return gpu.formula_at(xs, turns, factor, positions, geometry)

    def run(xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        kernel = gpu_kernel(xs[0].device)
        return kernel.rotate_exact(xs, turns, factor, positions, geometry, None)

    if wants_grad(*xs):
        back = partial(_rotate_exact, factor, geometry=geometry.reversed())
        return Differentiable.apply(run, back, angles, *xs)
    return run(xs)


KERNEL = Kernel(
    name="torch",
    namespace=torch,
    rotate=rotate_uncached,
    quick=quick,
    prepare=prepare,
    tables=angles.tables,
    tables_float64=angles.tables_float64,
    tables_float32=angles.tables_float32,
    arithmetic=angles.FLOAT32,
    takes=angles.takes,
    inspect=angles.inspect,
    row_lengths=angles.row_lengths,
    arange=angles.arange,
    as_positions=angles.as_positions,
    to_numpy=angles.to_numpy,
    from_numpy=angles.from_numpy,
    host_constant=angles.host_constant,
    device_key=angles.device_key,
    check=check_plain,
    check_xs=check_xs,
    is_on_gpu=lambda x: is_on_gpu(x),
    makes_angles=makes_angles,
    rotate_exact=rotate_exact,
    move=partial(move.move, rotate),
    move_by=move.move_by,
    check_out=move.check_out,
)
