"""Repeats a call on a GPU with known shapes: a compiled launch that only needs addresses.

Triton examines every argument of a launch, which takes longer than the launch. Here everything but
the addresses is computed once for tensors of the same shapes and types, which the guards of
`ready.py` recognise.
Nothing waits for the device, and nothing but new outputs is allocated: such a call can be captured
in a CUDA graph.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..geometry import AngleOptions, Angles, Geometry, Options, geometry_of, seq_axis
from ..memory import extent
from ..triton.sources import are_walked_alike, from_tables, from_turns
from .angles import arange, axis_turns, radians_of
from .checks import check_memory, check_no_inference, check_operands, check_xs
from .launch import form, formula, gpu_kernel, is_for_gpu
from .private import constant, increment_version, stays_in_place
from .ready import Run, Tables, data_ptr, maker_of_outputs
from .state import INTEGERS

Addresses = tuple[int, ...]
Launch = Callable[[Addresses], bool]  # as of `triton/launch.py`, which not every torch can load
_SPACINGS = 64  # of operands whose memory was compared


@dataclass(frozen=True, eq=False)
class Turn:
    """A rotation whose geometry is known; `at` has its angles, None if it is done by tables.

    It is compared and hashed by identity, because a hash of its fields would take 0.4 us.
    """

    geometry: Geometry
    at: AngleOptions | None


def turn_of(
    kind: Options | AngleOptions, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> Turn | None:
    """The rotation that a call means for these tensors; None if the GPU kernel cannot take them.

    tables  cos and sin, perhaps row numbers; for `AngleOptions` positions, or nothing for 0, 1, ...
    ValueError and TypeError for tensors that do not fit, as from `rotary.rotate`.
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
        return Turn(geometry_of(shapes, tuple(cos.shape), tokens, kind), None)
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
    return Turn(geometry_of(shapes, (seq, len(angles.turns)), tokens, options), kind)


def turns_of(at: AngleOptions, like: Tensor) -> tuple[Tensor, float]:
    """Turns on the device of a tensor, which the kernel multiplies positions by; the amplitude."""
    angles = at.angles_of(at.form)
    place = like.device, torch.is_inference_mode_enabled()
    return axis_turns(angles.turns.tobytes(), angles.axes, *place), angles.scale


def rotate(
    turn: Turn, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Rotate plain tensors on a GPU, of any memory, by as many launches as it takes."""
    kernel = gpu_kernel(xs[0].device)
    if turn.at is None:
        cos, sin, rows = (*tables, None)[:3]
        return tuple(kernel.rotate(xs, cos, sin, rows, turn.geometry, out))
    positions = tables[0] if tables else None
    steps, factor = turns_of(turn.at, xs[0])
    return tuple(kernel.rotate_exact(xs, steps, factor, positions, turn.geometry, out))


def rotate_at(
    xs: Sequence[Tensor],
    positions: Tensor | None,
    turns: Tensor,
    factor: float,
    geometry: Geometry,
    out: Sequence[Tensor],
) -> None:
    """Write the rotation at whole positions, by the kernel, or the formula where none can.

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
    """The same by torch's own operators; `turns` as from `angles.axis_turns`."""
    if positions is None:
        positions = arange(xs[0], xs[0].shape[geometry.dims.index(0)])
    steps = positions.long()[..., None] * turns
    radians = radians_of(steps if turns.ndim == 1 else steps.sum(-2))
    cos, sin = (radians.cos() * factor).float(), (radians.sin() * factor).float()
    return formula(xs, cos, sin, None, geometry)


class Constants:
    """Tensors on a GPU that compiled programs read: attributes, so that Dynamo takes them for
    inputs that do not move. A constant of a program would be copied in every call."""


constants = Constants()


@constant
def keep_turns(
    angles_of: Callable[..., Angles], device: torch.device, *form: Hashable
) -> tuple[str, float]:
    """The name in `constants` of turns as from `angles.axis_turns`, and the amplitude.

    `form` is that of AngleOptions, one by one: Dynamo takes no spec inside a tuple.
    """
    angles = angles_of(form)
    content = angles.turns.tobytes()
    digest = hashlib.sha256(repr((content, angles.axes, device)).encode()).hexdigest()
    name = f"turns_{digest[:16]}"
    if not hasattr(constants, name):
        with torch.inference_mode(False):  # or no gradient could use them
            turns = axis_turns(content, angles.axes, device, False)
        stays_in_place(turns)
        setattr(constants, name, turns)
    return name, angles.scale


def code_of(
    turn: Turn, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> Run | None:
    """Code that rotates tensors of these forms, compiled and loaded: by one launch if possible.

    None where out= needs more than one launch, or more checks.
    """
    check_no_inference(out or ())
    if len({y.is_inference() for y in out or ()}) > 1:  # one of them has no version to count
        return None
    launch, fixed = _launch(turn, xs, tables, out)
    if launch is not None:
        if out is None:
            return _new(launch, fixed, xs)
        return _into(launch, fixed, xs, tables, out)
    return partial(rotate, turn) if out is None else None


def _launch(
    turn: Turn, xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
) -> tuple[Launch | None, Addresses]:
    """A launch by addresses, None where it takes more; and the addresses of turns."""
    kernel = gpu_kernel(xs[0].device)
    fixed: Addresses = ()
    if turn.at is None:
        cos, sin, *rows = tables
        if not are_walked_alike(cos, sin):
            return None, ()
        source = from_tables(cos, sin, rows[0] if rows else None, turn.geometry)
    else:
        steps, factor = turns_of(turn.at, xs[0])
        positions = tables[0] if tables else None
        source = from_turns(steps, factor, positions, turn.geometry)
        fixed = (steps.data_ptr(),) * 2
    outs = [torch.empty_like(x, device="meta") for x in xs] if out is None else out
    return kernel.prepared(xs, outs, source, turn.geometry), fixed


def _new(launch: Launch, fixed: tuple[int, ...], xs: Sequence[Tensor]) -> Run:
    """The code of a call with new outputs; `fixed` are the addresses of turns."""
    is_single = len(xs) == 1
    new_q, new_k = (maker_of_outputs(x, 0) for x in (xs[0], xs[-1]))

    def code(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        q, k = xs[0], xs[-1]
        outs = (new_q(),) if is_single else (new_q(), new_k())
        read = *fixed, *map(data_ptr, tables)
        places = q.data_ptr(), k.data_ptr(), outs[0].data_ptr(), outs[-1].data_ptr()
        return outs if launch((*places, read[0], read[1], read[-1])) else None

    return code


def _into(
    launch: Launch,
    fixed: tuple[int, ...],
    xs: Sequence[Tensor],
    tables: Tables,
    out: Sequence[Tensor],
) -> Run:
    """The same with out=, for calls that are in place just where this one is."""
    is_other_memory = tuple([x.data_ptr() != y.data_ptr() for x, y in zip(xs, out, strict=True)])
    is_other_memory = is_other_memory[0], is_other_memory[-1]
    is_tracked = not out[0].is_inference()
    are_apart = _reach(xs, tables, out)
    compared: set[tuple[int, ...]] = set()

    def code(
        xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor] | None
    ) -> tuple[Tensor, ...] | None:
        assert out is not None
        outs = tuple(out)
        q, k = xs[0].data_ptr(), xs[-1].data_ptr()
        q_out, k_out = outs[0].data_ptr(), outs[-1].data_ptr()
        if is_other_memory != (q != q_out, k != k_out):
            return None
        addresses = tuple(map(data_ptr, tables))
        spacing = (k - q, q_out - q, k_out - q, *[place - q for place in addresses])
        if spacing not in compared:
            if not are_apart((q, k, *addresses), (q_out, k_out)):
                check_memory((*xs, *tables), outs)
            if len(compared) >= _SPACINGS:
                compared.clear()
            compared.add(spacing)
        read = fixed + addresses
        if not launch((q, k, q_out, k_out, read[0], read[1], read[-1])):
            return None
        if is_tracked:
            increment_version(outs)
        return outs

    return code


def _reach(
    xs: Sequence[Tensor], tables: Tables, out: Sequence[Tensor]
) -> Callable[[Addresses, Addresses], bool]:
    """Whether what is written lies apart from all else, by the first and last byte of each.

    That takes 2 us, and byte by byte 12. q and k may be slices of one buffer: they are not apart.
    """
    reads = [extent(form(x)) for x in (xs[0], xs[-1], *tables)]
    writes = [extent(form(y)) for y in (out[0], out[-1])]
    is_own = [x.stride() == y.stride() for x, y in ((xs[0], out[0]), (xs[-1], out[-1]))]
    is_single = len(xs) == 1

    def are_apart(read: Addresses, written: Addresses) -> bool:
        spans = [(at + low, at + high) for at, (low, high) in zip(read, reads, strict=True)]
        results = [(at + low, at + high) for at, (low, high) in zip(written, writes, strict=True)]
        for index, (low, high) in enumerate(results[: 1 if is_single else 2]):
            for other, (first, last) in enumerate(spans):
                is_same = other == index and is_own[index] and written[index] == read[index]
                if low < last and first < high and not is_same and not (is_single and other == 1):
                    return False
        (low, high), (first, last) = results
        return is_single or not (low < last and first < high)

    return are_apart
