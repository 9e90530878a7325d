"""The torch kernel: the CPU loops under autograd, the dispatcher and the compiler.

An eager call on plain CPU tensors goes straight to the compiled loops, through an autograd function
if a gradient is wanted. Under `torch.compile` the call is the operator `torch.ops.rotary.rotate`,
which Inductor does not look into: on a CPU it is as fast as what Inductor makes of the formula in
float32, and several times faster in bfloat16 (`benchmarks/run.py` compares them).
Everything else (other devices, subclasses, vmap, forward mode, export, tables that need a gradient)
is the plain formula in torch's own operators, which torch differentiates and transforms by itself.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layouts import pair_slices
from ..schedules import Arithmetic
from . import blocks, host
from . import numpy as law
from .geometry import Geometry, Options, check_fit, geometry_of
from .memory import Block, check_overlap, is_contiguous

# None in a torch that has no such check: it pays the signature
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

_FLOATS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_NAMES = {**_FLOATS, torch.int64: "int64"}
_TENSORS = (Tensor, torch.nn.Parameter)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_POSITIONS = (*_INTEGERS, torch.float64, torch.float32)


def rotate(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    positions: Any,
    options: Options,
    conjugate: bool,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """Rotate torch tensors; the same law as `kernels/numpy.py`, with gradients.

    Arguments and errors are those of `rotary.rotate`.
    """
    is_eager = positions is None and not is_tracing() and not _is_transforming()
    key = len(xs), options, conjugate
    if is_eager and out is None and not _wants_grad(*xs, cos, sin):
        for guard, call in _recent.get(key, ()):
            if guard.check(*xs, cos, sin):
                return _run(call, xs, cos, sin, None)
    if is_eager and (out is None or all(map(_has_memory, (*xs, *out)))):
        tensors = (*xs, cos, sin) if out is None else (*xs, cos, sin, *out)
        call = _ready_call(
            tuple([(type(t), t.dtype, t.is_cpu, t.is_neg(), t.shape, t.stride()) for t in tensors]),
            None if out is None else _in_place(xs, out),
            options,
            conjugate,
        )
        if call is not None and not _wants_grad(*tensors):
            if out is None and TensorGuards is not None:
                _recent[key] = ((_guard(tensors), call), *_recent.get(key, ())[: _RECENT - 1])
            return _run(call, xs, cos, sin, out)
    check_operands(xs, cos, sin, out)
    rows = None if positions is None else check_rows(positions, xs[0])
    shapes = tuple([tuple(x.shape) for x in xs])
    row_shape = None if rows is None else tuple(rows.shape)
    geometry = geometry_of(shapes, tuple(cos.shape), row_shape, options)
    if out is not None:
        return _rotate_into(xs, cos, sin, rows, geometry, conjugate, out)
    return _rotate(xs, cos, sin, rows, geometry, conjugate)


def _rotate(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    conjugate: bool,
) -> tuple[Tensor, ...]:
    if is_tracing():
        if torch.compiler.is_exporting() or _wants_grad(cos, sin) or not _is_on_cpu(xs[0]):
            return _formula(xs, cos, sin, rows, geometry, conjugate)
        return tuple(torch.ops.rotary.rotate(list(xs), cos, sin, rows, *_flat(geometry), conjugate))
    if _wants_grad(cos, sin) or not all(map(_is_plain, (*xs, cos, sin))):
        return _formula(xs, cos, sin, rows, geometry, conjugate)
    if _wants_grad(*xs):
        return _Rotate.apply(geometry, conjugate, rows, cos, sin, *xs)
    return _launch(xs, cos, sin, rows, geometry, conjugate, None)


def _in_place(xs: Sequence[Tensor], outs: Sequence[Tensor]) -> tuple[bool, ...]:
    return tuple([x.data_ptr() == y.data_ptr() for x, y in zip(xs, outs, strict=True)])


@lru_cache(maxsize=1024)
def _ready_call(
    signature: tuple[tuple[Any, ...], ...],
    is_in_place: tuple[bool, ...] | None,
    options: Options,
    conjugate: bool,
) -> Any:
    """The prepared call of the loops; None where another way has to be taken."""
    loops = host()
    if not hasattr(loops, "ready_call"):
        return None
    if not all(
        kind in _TENSORS and is_cpu and not is_neg and dtype in _FLOATS and shape
        for kind, dtype, is_cpu, is_neg, shape, _ in signature
    ):
        return None
    blocks = [_form(shape, stride, dtype) for _, dtype, _, _, shape, stride in signature]
    if is_in_place is None and not all(map(is_contiguous, blocks)):
        return None  # new outputs keep the memory order of x
    return loops.ready_call(blocks, is_in_place, options, conjugate)


# For one token the signature of four tensors costs as much as the rotation. torch.compile has a
# check in C++ of type, dtype, device, shape, strides and all that the dispatcher would look at; it
# guards the last few calls. Whether a gradient is wanted now it does not see.
_RECENT = 4
_recent: dict[tuple[Any, ...], tuple[tuple[Any, Any], ...]] = {}


def _guard(tensors: Sequence[Tensor]) -> Any:
    sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _run(
    call: Any, xs: Sequence[Tensor], cos: Tensor, sin: Tensor, out: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    if out is not None:
        _check_writable((*xs, cos, sin), out)
        outs = tuple(out)
    elif call.size < blocks.LARGE:
        outs = tuple([torch.empty_like(x) for x in xs])
    else:
        outs = tuple([_empty_like(x) for x in xs])
    sources, targets = [x.data_ptr() for x in xs], [y.data_ptr() for y in outs]
    host().run(call, sources, targets, cos.data_ptr(), sin.data_ptr(), 0)
    if out is not None:
        _mark_written(outs)
    return outs


class _Rotate(torch.autograd.Function):
    """The rotation under autograd: nothing is kept but the tables."""

    @staticmethod
    def forward(ctx, geometry, conjugate, rows, cos, sin, *xs):
        ctx.geometry, ctx.conjugate = geometry, conjugate
        ctx.save_for_backward(cos, sin, rows)
        ctx.set_materialize_grads(False)
        return _launch(xs, cos, sin, rows, geometry, conjugate, None)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin, rows = ctx.saved_tensors
        turned = _transposed(grads, cos, sin, rows, ctx.geometry, ctx.conjugate)
        return None, None, None, None, None, *turned


def _transposed(
    grads: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    conjugate: bool,
) -> tuple[Tensor | None, ...]:
    known = [grad for grad in grads if grad is not None]
    if not known:
        return (None,) * len(grads)
    rotated = iter(_rotate(known, cos, sin, rows, geometry.reversed(), not conjugate))
    return tuple(None if grad is None else next(rotated) for grad in grads)


def _launch(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    conjugate: bool,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, ...]:
    """The compiled loops on CPU tensors; the formula where there are none."""
    loops = host()
    check_fit(geometry, [x.shape for x in xs], cos.shape, None if rows is None else rows.shape)
    if rows is not None and _has_memory(rows):
        _check_row_range(rows, cos)
    tensors = (*xs, cos, sin, *(out or ()))
    has_loops = hasattr(loops, "prepare") and cos.dtype == torch.float32
    if not has_loops or not all(map(_has_memory, tensors)):
        results = _formula(xs, cos, sin, rows, geometry, conjugate)
        for target, result in zip(out or (), results, strict=out is not None):
            target.copy_(result)
        return results if out is None else tuple(out)
    results = tuple(map(_empty_like, xs)) if out is None else tuple(out)
    sources = [_contiguous_last(x) for x in xs]
    is_mixed = geometry.layout != geometry.out_layout
    targets = [
        _empty_contiguous(y)
        if _contiguous_last(y) is not y or (is_mixed and x.data_ptr() == y.data_ptr())
        else y
        for x, y in zip(xs, results, strict=True)
    ]
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    call = loops.prepare(
        tuple(_form(x.shape, x.stride(), x.dtype) for x in sources),
        tuple(_form(y.shape, y.stride(), y.dtype) for y in targets),
        tuple(x.data_ptr() == y.data_ptr() for x, y in zip(sources, targets, strict=True)),
        _form(cos.shape, cos.stride(), cos.dtype),
        None if rows is None else _form(rows.shape, rows.stride(), rows.dtype),
        geometry,
        conjugate,
    )
    loops.run(
        call,
        [x.data_ptr() for x in sources],
        [y.data_ptr() for y in targets],
        cos.data_ptr(),
        sin.data_ptr(),
        0 if rows is None else rows.data_ptr(),
    )
    for result, target in zip(results, targets, strict=True):
        if target is not result:
            result.copy_(target)
    return results


def _form(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Block:
    strides = tuple([step * dtype.itemsize for step in stride])
    return Block(tuple(shape), strides, _NAMES.get(dtype, str(dtype)))


def _contiguous_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _empty_like(x: Tensor) -> Tensor:
    """An uninitialised tensor in the memory order of x; a large one from `blocks.empty`."""
    if x.nbytes < blocks.LARGE:
        return torch.empty_like(x)
    stride = torch.empty_like(x, device="meta").stride()
    return _large(x).as_strided(x.shape, stride)


def _empty_contiguous(x: Tensor) -> Tensor:
    """The same without regard to the order of x, as a fake tensor of the operator promises."""
    if x.nbytes < blocks.LARGE:
        return x.new_empty(x.shape)
    return _large(x).view(x.shape)


def _large(x: Tensor) -> Tensor:
    return torch.from_numpy(blocks.empty((x.nbytes,), np.uint8)).view(x.dtype)


def _formula(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    conjugate: bool,
) -> tuple[Tensor, ...]:
    """The law in torch operators: any device, differentiable in everything, transformable."""
    if rows is not None:
        cos, sin = cos[rows], sin[rows]
    cos, sin = _aligned(cos, geometry.dims), _aligned(sin, geometry.dims)
    sin = -sin if conjugate else sin
    rotary_dim = 2 * geometry.pairs
    stop = geometry.start + rotary_dim
    results = []
    for x in xs:
        cos, sin = _distributed_as(x, cos), _distributed_as(x, sin)
        wide = x if x.dtype == torch.float64 else x.float()
        first, second = pair_slices(rotary_dim, geometry.layout, geometry.start)
        u, v = wide[..., first], wide[..., second]
        one, other = u * cos - v * sin, v * cos + u * sin
        if geometry.out_layout == "half":
            turned = torch.cat((one, other), dim=-1)
        else:
            turned = torch.stack((one, other), dim=-1).flatten(-2)
        turned = turned.to(x.dtype)
        if rotary_dim < x.shape[-1]:
            turned = torch.cat((x[..., : geometry.start], turned, x[..., stop:]), dim=-1)
        results.append(turned)
    return tuple(results)


def _distributed_as(x: Tensor, table: Tensor) -> Tensor:
    """A plain table for a distributed x: the whole of it on every rank."""
    mesh = getattr(x, "device_mesh", None)
    if mesh is None or hasattr(table, "device_mesh"):
        return table
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(table, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _aligned(table: Tensor, dims: tuple[int | None, ...]) -> Tensor:
    order = [dim for dim in dims if dim is not None]
    kept = [None if dim is None else slice(None) for dim in dims]
    return table.permute(*order, table.ndim - 1)[(*kept, slice(None))]


def _rotate_into(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rows: Tensor | None,
    geometry: Geometry,
    conjugate: bool,
    out: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    if _wants_grad(*xs, cos, sin, *out):
        raise RuntimeError(
            "out= does not take part in autograd: call it under torch.no_grad(), or without out="
        )
    if is_tracing():
        torch.ops.rotary.rotate_out(
            list(xs), cos, sin, rows, *_flat(geometry), conjugate, list(out)
        )
        return tuple(out)
    _check_writable((*xs, cos, sin), out)
    _launch(xs, cos, sin, rows, geometry, conjugate, out)
    _mark_written(out)
    return tuple(out)


def _check_writable(inputs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    for y in out:
        if y.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError("out is an inference tensor: write to it under inference_mode only")
    if all(map(_has_memory, (*inputs, *out))):
        check_overlap(
            *[[(x.data_ptr(), _form(x.shape, x.stride(), x.dtype)) for x in group]
              for group in (inputs, out)]
        )  # fmt: skip


def _mark_written(out: Sequence[Tensor]) -> None:
    """Tell autograd: a tensor it saved earlier and that was overwritten here must not be used."""
    for y in out:
        if not y.is_inference():
            torch.autograd.graph.increment_version(y)


# --- the operators, for torch.compile and for those who want an opaque boundary ---

_library = torch.library.Library("rotary", "DEF")
_OPERANDS = (
    "Tensor[] xs, Tensor cos, Tensor sin, Tensor? rows, "
    "int start, int pairs, str layout, str out_layout, int[] dims, bool conjugate"
)
_library.define(f"rotate({_OPERANDS}) -> Tensor[]")
_library.define(f"rotate_out({_OPERANDS}, Tensor(a!)[] out) -> ()")


def _flat(geometry: Geometry) -> tuple[int, int, str, str, list[int]]:
    dims = [-1 if dim is None else dim for dim in geometry.dims]
    return geometry.start, geometry.pairs, geometry.layout, geometry.out_layout, dims


def _geometry(
    start: int, pairs: int, layout: str, out_layout: str, dims: Sequence[int]
) -> Geometry:
    known = tuple(None if dim < 0 else dim for dim in dims)
    return Geometry(start, pairs, layout, out_layout, known)


def _operator(xs, cos, sin, rows, start, pairs, layout, out_layout, dims, conjugate):
    geometry = _geometry(start, pairs, layout, out_layout, dims)
    out = [_empty_contiguous(x) for x in xs]
    return list(_launch(xs, cos, sin, rows, geometry, conjugate, out))


def _operator_out(xs, cos, sin, rows, start, pairs, layout, out_layout, dims, conjugate, out):
    geometry = _geometry(start, pairs, layout, out_layout, dims)
    _launch(xs, cos, sin, rows, geometry, conjugate, out)


def _fake(xs, *_):
    return [x.new_empty(x.shape) for x in xs]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, rows, *rest, ctx.conjugate = inputs
    ctx.geometry = _geometry(*rest)
    ctx.save_for_backward(cos, sin, rows)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    known = [grad for grad in grads if grad is not None]
    arguments = (*ctx.saved_tensors, *_flat(ctx.geometry.reversed()), not ctx.conjugate)
    rotated = iter(torch.ops.rotary.rotate(known, *arguments) if known else ())
    return [None if grad is None else next(rotated) for grad in grads], *(None,) * 9


_library.impl("rotate", _operator, "CompositeExplicitAutograd")
_library.impl("rotate_out", _operator_out, "CompositeExplicitAutograd")
torch.library.register_fake("rotary::rotate", _fake, lib=_library)
torch.library.register_fake("rotary::rotate_out", lambda *_: None, lib=_library)
torch.library.register_autograd("rotary::rotate", _backward, setup_context=_setup, lib=_library)


# --- tables ---


def tables(
    positions: Tensor, turns: Any, scales: Any, axes: Sequence[int], backwards: bool
) -> tuple[Tensor, Tensor]:
    """Exact cos and sin from 64-bit turns; see `kernels/numpy.py`."""
    turns, scales = _on_device(positions, turns, scales)
    angles = _per_pair(positions.long(), axes) * turns[:, None, :]  # wraps modulo one turn
    return _cos_sin(angles.double() * (2 * math.pi / 2**64), scales, backwards)


def tables_float64(
    positions: Tensor, inv_freq: Any, scales: Any, axes: Sequence[int], backwards: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin of fractional positions: the product in float64, rounded once at the end."""
    inv_freq, scales = _on_device(positions, inv_freq, scales)
    return _cos_sin(_per_pair(positions.double(), axes) * inv_freq[:, None, :], scales, backwards)


def tables_float32(
    positions: Tensor, inv_freq: Any, scales: Any, axes: Sequence[int], backwards: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin by the float32 operators transformers uses: the same bits."""
    inv_freq, scales = _on_device(positions, inv_freq, scales)
    angles = _per_pair(positions.float(), axes) * inv_freq.float()[:, None, :]
    return _cos_sin(angles, scales.float(), backwards)


def _cos_sin(angles: Tensor, scales: Tensor, backwards: bool) -> tuple[Tensor, Tensor]:
    factors = scales.view(-1, 1, 1)
    cos, sin = angles.cos() * factors, angles.sin() * factors
    return cos.float(), (-sin if backwards else sin).float()


def _per_pair(positions: Tensor, axes: Sequence[int]) -> Tensor:
    return positions[..., list(axes)] if axes else positions[..., None]


def _on_device(positions: Tensor, *arrays: Any) -> list[Tensor]:
    return [
        (from_numpy(array) if isinstance(array, np.ndarray) else array).to(positions.device)
        for array in arrays
    ]


def owns(tensor: Any) -> bool:
    """Whether this kernel is the one for an array."""
    return isinstance(tensor, Tensor)


def taken_over(positions: Any, like: Tensor) -> Tensor:
    """Positions as a tensor on the device of `like`: those of NumPy, or lists, are taken over."""
    return positions if owns(positions) else torch.as_tensor(positions, device=like.device)


def stacked(positions: Tensor, rows: int) -> Tensor:
    """The same positions for so many rows: (rows, seq)."""
    return positions.expand(rows, -1)


def to_numpy(positions: Tensor) -> Any:
    """The positions as a NumPy array, if they are in memory and of a dtype that NumPy has."""
    if is_tracing() or not _has_memory(positions) or positions.dtype not in _POSITIONS:
        return None
    return positions.detach().numpy()


def from_numpy(array: Any) -> Tensor:
    """A tensor that shares the memory of an array; a copy of one that must not be written."""
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array)


def _powers(base: float, exponents: Any) -> Any:
    return torch.pow(base, torch.from_numpy(exponents)).numpy()


def _power(x: float, exponent: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32, device="cpu") ** exponent)


FLOAT32 = Arithmetic(np.float32, _powers, _power)


def inspect(positions: Tensor) -> tuple[str, float | None, float | None]:
    """("int" | "float32" | "float64", smallest, largest); None for values not at hand."""
    if positions.dtype in _INTEGERS:
        kind = "int"
    elif positions.dtype in (torch.float32, torch.float64):
        kind = _FLOATS[positions.dtype]
    else:
        raise TypeError(
            f"positions must be whole numbers, or float64 if fractional, got {positions.dtype}"
        )
    if is_tracing() or not _has_memory(positions):
        return kind, None, None
    return kind, *law.inspect(positions.detach().numpy())[1:]


def row_lengths(positions: Tensor) -> list[int]:
    """Largest position of each row, plus one."""
    if is_tracing() or not isinstance(positions, Tensor):
        raise ValueError(
            "under torch.compile a spec that depends on the length needs seq_len as a whole number"
        )
    return law.row_lengths(positions.detach().cpu().numpy())


def arange(like: Tensor, count: int) -> Tensor:
    """Positions 0 .. count - 1 on the device of `like`."""
    return torch.arange(count, dtype=torch.int64, device=like.device)


def is_cacheable(like: Tensor) -> bool:
    """Whether tables for this tensor can be kept: not while tracing, nor for fake tensors."""
    if is_tracing():
        return False
    return type(like) in _TENSORS and not _is_transforming()


def is_tracing() -> bool:
    """Whether torch.compile or torch.export is recording this call."""
    return torch.compiler.is_compiling()


def place(like: Tensor) -> str:
    """The device, as part of the key of the cache; inference tensors are kept apart."""
    return f"torch:{like.device}:{torch.is_inference_mode_enabled()}"


def constant(function: Callable[..., Any], spec: Any, *arguments: Any) -> Any:
    """`function(spec, *arguments)`: an array on the host, or a constant of the traced graph."""
    if not is_tracing():
        return function(spec, *arguments)
    kind, *rows = _traced(function, spec, *arguments).split(";")
    numbers = [[int(value) for value in row.split()] for row in rows]
    bits = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return bits.view(torch.float64) if kind == "float64" else bits


@torch.compiler.assume_constant_result
def _traced(function: Callable[..., Any], spec: Any, *arguments: Any) -> str:
    # as text: Dynamo 2.13 takes two tensors that come from here for the same one
    array = np.atleast_2d(function(spec, *arguments))
    if array.dtype == np.float32:
        array = array.astype(np.float64)
    rows = [" ".join(map(str, row)) for row in array.view(np.int64).tolist()]
    return ";".join([array.dtype.name, *rows])


# --- checks ---


def check_operands(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, out: Sequence[Tensor] | None
) -> None:
    """Refuse what cannot be rotated: dtypes, mixed libraries or devices, unusable `out`."""
    x = xs[0]
    for tensor in (*xs, cos, sin, *(out or ())):
        if tensor.device != x.device:
            raise ValueError(f"all tensors must be on one device: {x.device} and {tensor.device}")
    if x.dtype not in _FLOATS:
        raise TypeError(f"x must be one of {', '.join(_FLOATS.values())}, got {x.dtype}")
    for other in xs[1:]:
        if other.dtype != x.dtype:
            raise TypeError(f"q and k must have one dtype, got {x.dtype} and {other.dtype}")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"cos and sin must be alike, got {cos.dtype} {tuple(cos.shape)} and "
            f"{sin.dtype} {tuple(sin.shape)}"
        )
    if cos.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"tables must be float32, got {cos.dtype}: they were rounded before")
    if out is not None:
        _check_out(xs, out)


def _check_out(xs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    for x, y in zip(xs, out, strict=True):
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(
                f"out must be {x.dtype} {tuple(x.shape)} like the input, "
                f"got {y.dtype} {tuple(y.shape)}"
            )


def check_rows(positions: Any, like: Tensor) -> Tensor:
    """Row numbers as int64; whether they are inside the table is seen when they are read."""
    rows = torch.as_tensor(positions, device=like.device)
    if rows.dtype not in _INTEGERS:
        raise TypeError(f"positions must be whole numbers to pick rows, got {rows.dtype}")
    return rows.long()


def _check_row_range(rows: Tensor, table: Tensor) -> None:
    if not rows.numel():
        return
    low, high = (int(value) for value in torch.aminmax(rows))
    if low < 0 or high >= table.shape[0]:
        raise ValueError(
            f"positions run from {low} to {high}, the tables have {table.shape[0]} rows"
        )


def _wants_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _is_plain(x: Tensor) -> bool:
    """A tensor whose memory may be read and written, with nothing that watches the operators."""
    return _has_memory(x) and not _is_transforming()


def _has_memory(x: Tensor) -> bool:
    return (
        type(x) in _TENSORS
        and x.is_cpu
        and not x.is_neg()  # the bytes of a negated view are not its values
        and x.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch._C._functorch.is_legacy_batchedtensor(x)
    )


def _is_transforming() -> bool:
    """Whether a functorch transform, a forward-mode level or a dispatch mode is active."""
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
    )
