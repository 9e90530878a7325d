"""Repeats a call on a GPU with known shapes, by a compiled launch that only needs addresses.

Triton examines every argument of a launch, which takes longer than the launch. Here everything but
the addresses is computed once for tensors of the same shapes and types, which the guards of
`ready.py` recognize. A repeated call does not wait for the device and allocates only its outputs,
so it can be captured in a CUDA graph.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import AngleOptions, Angles, Geometry, Options, geometry_of, seq_axis
from ..memory import extent
from ..triton.plan import ALIGNED
from ..triton.sources import are_walked_alike, from_tables, from_turns
from . import ready
from .angles import arange, axis_turns, radians_of
from .checks import check_memory, check_no_inference, check_operands, check_xs
from .launch import form, formula, gpu_kernel, is_for_gpu
from .private import increment_version, stays_in_place
from .ready import Run, Tables, data_ptr, maker_of_outputs, remember
from .state import INTEGERS, is_on_gpu, is_recorded_by_dynamo, wants_grad

Addresses = tuple[int, ...]
Views = Callable[..., tuple[Tensor, Tensor, Options] | None]
# that of `triton/launch.py`, which needs Triton to import: whether the alignment is known to fit
Launch = Callable[[Addresses, bool], bool]


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotation whose geometry is known; `angles` is None if it takes tables of cos and sin.

    It is compared and hashed by identity, because a hash of its fields would take 0.4 us.
    """

    geometry: Geometry
    angles: AngleOptions | None


def rotation_of(
    kind: Options | AngleOptions, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> Rotation | None:
    """Return the rotation of a call with these tensors; None if the GPU kernel cannot take them.

    tables  cos and sin, perhaps row numbers; for `AngleOptions` positions, or nothing for 0, 1, ...
    Raises ValueError and TypeError for tensors that do not fit, as `rotary.rotate` does.
    """
    if not is_for_gpu((*xs, *tables, *(out or ()))):
        return None
    shapes = tuple([tuple(x.shape) for x in xs])
    if not isinstance(kind, AngleOptions):
        cos, sin, *rows = tables
        if cos.dtype != torch.float32 or any([row.dtype not in INTEGERS for row in rows]):
            return None
        check_operands(xs, cos, sin, out)
        tokens = tuple(rows[0].shape) if rows else None
        return Rotation(geometry_of(shapes, tuple(cos.shape), tokens, kind), None)
    check_xs(xs, out)
    options, angles = kind.options, kind.angles_of(kind.form)
    num_axes, tokens = max(angles.axes, default=0) + 1, None
    if num_axes > 1 and (not tables or tables[0].shape[-1:] != (num_axes,)):
        return None
    if tables:
        tokens = tuple(tables[0].shape[:-1] if num_axes > 1 else tables[0].shape)
        is_fit = len(tokens) == 1 or (len(tokens) == 2 and xs[0].ndim >= 4)
        if tables[0].dtype not in INTEGERS or not is_fit:
            return None
    seq = xs[0].shape[seq_axis(shapes[0], options.seq_dim)]
    return Rotation(geometry_of(shapes, (seq, len(angles.turns)), tokens, options), kind)


def turns_of(angle_options: AngleOptions, like: Tensor) -> tuple[Tensor, float]:
    """Return the turns, on the device of a tensor, and the attention factor."""
    angles = angle_options.angles_of(angle_options.form)
    is_inference = torch.is_inference_mode_enabled()
    turns = axis_turns(angles.turns.tobytes(), angles.axes, like.device, is_inference)
    return turns, angles.scale


def rotate(
    rotation: Rotation, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Rotate plain tensors of any strides on a GPU, by as many launches as it takes."""
    kernel = gpu_kernel(xs[0].device)
    if rotation.angles is None:
        cos, sin, rows = (*tables, None)[:3]
        return tuple(kernel.rotate(xs, cos, sin, rows, rotation.geometry, out))
    positions = tables[0] if tables else None
    steps, factor = turns_of(rotation.angles, xs[0])
    return tuple(kernel.rotate_exact(xs, steps, factor, positions, rotation.geometry, out))


def by_views(
    xs: Sequence[Tensor],
    tables: Tables,
    views: Views,
    form: tuple[Hashable, ...],
) -> tuple[Tensor, ...] | None:
    """Rotate by parts of tables, which are read where they are; None if the kernel cannot.

    views(xs, tables, *form) returns cos and sin in the memory of `tables`, as `rotary.rotate` takes
    them, but perhaps in 16 bits, and the options; or None. It is called once for tensors of a form.
    None also on a CPU, in a compiled call, and if a gradient is wanted. Raises ValueError for
    shapes that do not fit.
    """
    if not is_on_gpu(xs[0]) or is_recorded_by_dynamo():
        return None
    return ready.run((views, form), xs, tables, None, _code_by_views, _ByViews)


class _ByViews(NamedTuple):
    """All that such a call depends on besides its tensors."""

    views: Views
    form: tuple[Hashable, ...]


def halves_of(
    xs: Sequence[Tensor], tables: Tables, views: Views, form: tuple[Hashable, ...]
) -> tuple[Tensor, Tensor, Options] | None:
    """Return what `views` returns; None if a kernel cannot read it, or a gradient is wanted."""
    if not is_for_gpu((*xs, *tables)) or wants_grad(*xs, *tables):
        return None
    found = views(xs, tables, *form)
    if found is None or found[0].dtype != found[1].dtype or not is_for_gpu(found[:2]):
        return None
    return found


def _code_by_views(
    kind: _ByViews,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor] | None,
) -> Run | None:
    found = halves_of(xs, tables, kind.views, kind.form)
    if found is None:
        return None
    *halves, options = found
    shapes = tuple([tuple(x.shape) for x in xs])
    geometry = geometry_of(shapes, tuple(halves[0].shape), None, options)
    launch, _ = _launch(Rotation(geometry, None), xs, halves, None)
    if launch is None:
        return None
    new_q, new_k = (maker_of_outputs(x, 0) for x in (xs[0], xs[-1]))
    starts = [view.data_ptr() - table.data_ptr()
              for view, table in zip(halves, (tables[0], tables[-1]), strict=True)]  # fmt: skip

    def code(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        outs = (new_q(), new_k()) if len(xs) > 1 else (new_q(),)
        cos, sin = tables[0].data_ptr() + starts[0], tables[-1].data_ptr() + starts[1]
        at = *map(data_ptr, (xs[0], xs[-1], outs[0], outs[-1])), cos, sin
        return outs if launch(at, False) else None

    return code


def rotate_at(
    xs: Sequence[Tensor],
    positions: Tensor | None,
    turns: Tensor,
    factor: float,
    geometry: Geometry,
    out: Sequence[Tensor],
) -> None:
    """Write the rotation at whole positions into `out`, by the kernel if it can, or the formula.

    turns  as from `angles.axis_turns`;  positions  None for 0, 1, ... along the tokens
    """
    if is_for_gpu((*xs, turns, *(() if positions is None else (positions,)), *out)):
        gpu_kernel(xs[0].device).rotate_exact(xs, turns, factor, positions, geometry, out)
        return
    results = formula_at(xs, turns, factor, positions, geometry)
    for target, result in zip(out, results, strict=True):
        target.copy_(result)


def formula_at(
    xs: Sequence[Tensor],
    turns: Tensor,
    factor: float,
    positions: Tensor | None,
    geometry: Geometry,
) -> tuple[Tensor, ...]:
    """Rotate at whole positions by torch's own operators; `turns` as from `angles.axis_turns`."""
    if positions is None:
        positions = arange(xs[0], xs[0].shape[geometry.dims.index(0)])
    steps = positions.long()[..., None] * turns
    radians = radians_of(steps if turns.ndim == 1 else steps.sum(-2))
    cos, sin = (radians.cos() * factor).float(), (radians.sin() * factor).float()
    return formula(xs, cos, sin, None, geometry)


class Constants:
    """Holds tensors on a GPU that compiled programs read, each as an attribute.

    Dynamo takes attributes for inputs that do not move; it would copy a constant in every call.
    """


constants = Constants()


def keep_turns(
    spec: Hashable, angles_of: Callable[..., Angles], device: torch.device, *form: Hashable
) -> tuple[str, float]:
    """Return the name in `constants` of turns (`angles.axis_turns`), and the attention factor.

    `spec` and `form` are the form of AngleOptions.
    """
    angles = angles_of((spec, *form))
    content = angles.turns.tobytes()
    digest = hashlib.sha256(repr((content, angles.axes, device)).encode()).hexdigest()
    name = f"turns_{digest[:16]}"
    if not hasattr(constants, name):
        with torch.inference_mode(False):  # autograd cannot save inference tensors
            turns = axis_turns(content, angles.axes, device, False)
        stays_in_place(turns)
        setattr(constants, name, turns)
    return name, angles.scale


def code_of(
    rotation: Rotation, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> Run | None:
    """Return code, compiled and loaded, that rotates tensors of these forms.

    It takes one launch if possible; None if out= needs more than one, or further checks.
    """
    check_no_inference(out or ())
    if len({y.is_inference() for y in out or ()}) > 1:  # only some have a version counter
        return None
    launch, fixed = _launch(rotation, xs, tables, out)
    if launch is not None:
        if out is None:
            return _code_with_new_outputs(launch, fixed, xs, tables)
        return _code_with_out(launch, fixed, xs, tables, out)
    return partial(rotate, rotation) if out is None else None


def _launch(
    rotation: Rotation, xs: Sequence[Tensor], tables: Sequence[Tensor], out: Sequence[Tensor] | None
) -> tuple[Launch | None, Addresses]:
    """Return a launch by addresses, None if it takes several, and the addresses of turns."""
    kernel = gpu_kernel(xs[0].device)
    fixed: Addresses = ()
    if rotation.angles is None:
        cos, sin, *rows = tables
        if not are_walked_alike(cos, sin):
            return None, ()
        source = from_tables(cos, sin, rows[0] if rows else None, rotation.geometry)
    else:
        steps, factor = turns_of(rotation.angles, xs[0])
        positions = tables[0] if tables else None
        source = from_turns(steps, factor, positions, rotation.geometry)
        fixed = (steps.data_ptr(),) * 2
    outs = [torch.empty_like(x, device="meta") for x in xs] if out is None else out
    return kernel.prepared(xs, outs, source, rotation.geometry), fixed


def _code_with_new_outputs(
    launch: Launch, fixed: Addresses, xs: Sequence[Tensor], tables: Tables
) -> Run:
    """Return the code of a call with new outputs; `fixed` are the addresses of turns."""
    is_single = len(xs) == 1
    misaligned = max([x.data_ptr() & ALIGNED for x in (*xs, *tables)])
    new_q, new_k = (maker_of_outputs(x, 0) for x in (xs[0], xs[-1]))

    def code(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        outs = (new_q(),) if is_single else (new_q(), new_k())
        at = tuple(map(data_ptr, (xs[0], xs[-1], outs[0], outs[-1], *tables)))
        bits = at[0] | at[1] | misaligned
        for address in at[4:]:
            bits |= address
        return outs if launch(at[:4] + fixed + at[4:], not bits & ALIGNED) else None

    return code


def _code_with_out(
    launch: Launch,
    fixed: Addresses,
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor],
) -> Run:
    """Return the code of a call with out=, for calls that are in place for the same arrays."""
    is_in_place = [x.data_ptr() == y.data_ptr() for x, y in zip(xs, out, strict=True)]
    is_tracked, is_single = not out[0].is_inference(), len(xs) == 1
    are_apart = range_check((*xs, *tables), out, range(len(xs)))
    seen: set[Addresses] = set()
    spacings: set[Addresses] = set()

    def code(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        assert out is not None
        at = tuple(map(data_ptr, (xs[0], xs[-1], out[0], out[-1], *tables)))
        is_known = is_seen = at in seen
        if not is_seen:
            q, k, q_out, k_out, *read = at
            spacing = q & ALIGNED, k - q, q_out - q, k_out - q, *[each - q for each in read]
            is_known = spacing in spacings
        if not is_known:
            inputs, outputs = ((q,), (q_out,)) if is_single else ((q, k), (q_out, k_out))
            if [x == y for x, y in zip(inputs, outputs, strict=True)] != is_in_place:
                return None
            if not are_apart((*inputs, *read), outputs):
                check_memory((*xs, *tables), out)
        if not launch(at[:4] + fixed + at[4:] if fixed else at, is_known):
            return None
        if not is_seen:
            remember(seen, at)
            remember(spacings, spacing)
        if is_tracked:
            increment_version(out)
        return tuple(out)

    return code


def range_check(
    reads: Sequence[Tensor], writes: Sequence[Tensor], own: Sequence[int]
) -> Callable[[Sequence[int], Sequence[int]], bool]:
    """Return a check that written memory lies apart from all other, by first and last byte.

    own  for each tensor of `writes` the index in `reads` of the one it may be, in place

    It takes addresses, and 2 us; a check byte by byte takes 12 us. Slices q and k of one buffer are
    not apart.
    """
    read_extents, write_extents = [[extent(form(x)) for x in xs] for xs in (reads, writes)]
    is_alike = [reads[x].stride() == y.stride() for x, y in zip(own, writes, strict=False)]
    owners = [*own, *[-1] * (len(writes) - len(own))]

    def are_apart(read: Sequence[int], written: Sequence[int]) -> bool:
        spans = [(at + low, at + high)
                 for at, (low, high) in zip(read, read_extents, strict=True)]  # fmt: skip
        results = [(at + low, at + high)
                   for at, (low, high) in zip(written, write_extents, strict=True)]  # fmt: skip
        for index, (low, high) in enumerate(results):
            for other, (first, last) in enumerate((*spans, *results[:index])):
                is_same = other == owners[index] and is_alike[index]
                if low < last and first < high and not (is_same and written[index] == read[other]):
                    return False
        return True

    return are_apart
