"""Makes cos and sin as torch tensors, from positions, frequencies and constants.

On the host the loops of `kernels/cpu/kernel.py` make the tables of whole positions. The same tables
in torch operators are here, for other devices, fractional positions, tracing, and the float32 steps
of transformers.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from ...schedules import Arithmetic
from ...spec import Rotary
from .. import NEEDS_LENGTH, Numbers
from .. import numpy as reference
from .checks import check_plain
from .private import constant, is_exporting, is_mapped, outside_modes
from .state import (
    FLOATS,
    INTEGERS,
    TENSORS,
    UNSIGNED,
    as_tensor,
    host_array,
    host_values,
    is_capturing,
    is_on_gpu,
    is_on_host,
    is_recording,
    is_tracing,
    is_transforming,
    wants_grad,
)

Constant = Numbers | Tensor  # a tensor while a program is recorded

_POSITIONS = (*INTEGERS, torch.float64, torch.float32)
_RADIAN = 2 * math.pi / 2**64  # radians in 2^-64 turn
_CACHED = 1 << 16  # tensors; many, because captured CUDA graphs read them: none should be evicted


def tables(
    positions: Tensor, turns: Constant, scales: Constant, axes: Sequence[int], backwards: bool
) -> tuple[Tensor, Tensor]:
    """Exact cos and sin from 64-bit turns; see `kernels/numpy.py`."""
    turns, scales = _on_device(positions, turns, scales)
    angles = _per_pair(positions.long(), axes) * turns[:, None, :]  # wraps modulo one turn
    return _cos_sin(radians_of(angles), scales, backwards)


def tables_float64(
    positions: Tensor, inv_freq: Constant, scales: Constant, axes: Sequence[int], backwards: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin of fractional positions: the product in float64, rounded once at the end."""
    inv_freq, scales = _on_device(positions, inv_freq, scales)
    return _cos_sin(_per_pair(positions.double(), axes) * inv_freq[:, None, :], scales, backwards)


def tables_float32(
    positions: Tensor, inv_freq: Constant, scales: Constant, axes: Sequence[int], backwards: bool
) -> tuple[Tensor, Tensor]:
    """cos and sin by the float32 operators transformers uses: the same bits."""
    inv_freq, scales = _on_device(positions, inv_freq, scales)
    angles = _per_pair(positions.float(), axes) * inv_freq.float()[:, None, :]
    return _cos_sin(angles, scales.float(), backwards)


def radians_of(angles: Tensor) -> Tensor:
    """Convert 64-bit fractions of one turn, int64, to float64 angles in [-pi, pi)."""
    radian: float | Tensor = _RADIAN
    if is_exporting():  # ONNX rounds a plain number to float32
        radian = torch.tensor(_RADIAN, dtype=torch.float64, device=angles.device)
    return angles.double() * radian


def _cos_sin(angles: Tensor, scales: Tensor, backwards: bool) -> tuple[Tensor, Tensor]:
    factors = scales.view(-1, 1, 1)
    cos, sin = angles.cos() * factors, angles.sin() * factors
    return cos.float(), (-sin if backwards else sin).float()


def _per_pair(positions: Tensor, axes: Sequence[int]) -> Tensor:
    if not axes:
        return positions[..., None]
    if is_tracing() or not is_on_gpu(positions):
        return positions[..., list(axes)]
    index = moved(np.array([axes]), positions).flatten()  # a list would wait for the device
    return positions.index_select(-1, index)


def _on_device(positions: Tensor, *arrays: Constant) -> list[Tensor]:
    return [
        moved(array, positions) if isinstance(array, np.ndarray) else array.to(positions.device)
        for array in arrays
    ]


def moved(array: Numbers, like: Tensor) -> Tensor:
    """Copy an array to the device of `like`; a single row is cached, for a copy waits for a GPU."""
    is_cached = is_on_gpu(like) and len(array) == 1 and _is_untraced(like)
    if not is_cached:
        return from_numpy(array).to(like.device)
    is_inference = torch.is_inference_mode_enabled()
    return _cached(array.tobytes(), array.dtype.str, like.device, is_inference)[None]


@lru_cache(maxsize=_CACHED)
def _cached(content: bytes, dtype: str, device: torch.device, is_inference: bool) -> Tensor:
    _check_no_capture()
    return from_numpy(np.frombuffer(content, dtype)).to(device)


def _check_no_capture() -> None:
    """Refuse a copy to the device while a CUDA graph is captured: it would end the capture."""
    is_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_started and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first call for a spec copies its frequencies to the GPU, which a CUDA graph "
            "cannot capture: call rotary.warm_up(spec, q, k, ...) before the capture"
        )


@lru_cache(maxsize=_CACHED)
def axis_turns(
    content: bytes, axes: tuple[int, ...], device: torch.device, is_inference: bool
) -> Tensor:
    """Return turns on a device, from the bytes of (pairs,) uint64, as int64.

    Their shape is (pairs,), for several axes (axes, pairs) with 0 where another axis turns the
    pair. `is_inference` keeps tensors that are made in inference mode apart.

    >>> axis_turns(np.uint64([5, 6, 7]).tobytes(), (0, 1, 0), torch.device("cpu"), False)
    tensor([[5, 0, 7],
            [0, 6, 0]])
    """
    _check_no_capture()
    turns = np.frombuffer(content, np.int64)
    if max(axes, default=0):
        turns = np.where(np.arange(max(axes) + 1)[:, None] == np.array(axes), turns, 0)
    return from_numpy(turns.copy()).to(device)


def takes(tensor: object) -> TypeGuard[Tensor]:
    """Whether an object is a tensor."""
    return isinstance(tensor, Tensor)


def as_positions(positions: object, like: Tensor) -> Tensor:
    """Return positions as a tensor; NumPy arrays and lists are copied to the device of `like`.

    A list goes through NumPy, which makes fractions float64; torch would make them float32.
    """
    if takes(positions):
        check_plain(positions)
        return positions.long() if positions.dtype in UNSIGNED else positions
    array = np.asarray(positions) if is_tracing() else reference.of_list(positions)
    kind = "i" if is_tracing() else array.dtype.kind  # Dynamo does not know NumPy dtypes
    if kind in "OSUV":  # objects, such as 2**70, and texts
        raise reference.wrong_positions(str(array.dtype))
    return as_tensor("positions", array, like)


def to_numpy(positions: Tensor) -> Numbers | None:
    """Return positions as a NumPy array; None if not on the host, of another dtype, or trained."""
    if is_recording() or not is_on_host(positions) or positions.dtype not in _POSITIONS:
        return None
    if wants_grad(positions):
        return None
    return host_array(positions)


def from_numpy(array: Numbers) -> Tensor:
    """Return a tensor that shares the memory of an array, or a copy if it is read-only."""
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array.view(np.int64) if array.dtype == np.uint64 else array)


def _powers(base: float, exponents: Numbers) -> Numbers:
    # computed now, on the host, not in the graph that is recorded
    return outside_modes(lambda: torch.pow(base, torch.from_numpy(exponents)).numpy())


def _power(x: float, exponent: float) -> float:
    return outside_modes(
        lambda: float(torch.tensor(x, dtype=torch.float32, device="cpu") ** exponent)
    )


FLOAT32 = Arithmetic(np.float32, _powers, _power)


def inspect(positions: Tensor) -> tuple[str, float | None, float | None]:
    """("int" | "float32" | "float64", smallest, largest); None if values cannot be read."""
    if positions.dtype in INTEGERS:
        kind = "int"
    elif positions.dtype in (torch.float32, torch.float64):
        kind = FLOATS[positions.dtype]
    else:
        raise reference.wrong_positions(str(positions.dtype))
    values = host_values(positions)
    return (
        (kind, None, None) if values is None else (kind, *reference.inspect(host_array(values))[1:])
    )


def row_lengths(positions: Tensor) -> list[int]:
    """Return the largest position of each row, plus one."""
    if is_recording() or is_mapped(positions):
        raise ValueError(
            f"under torch.compile, torch.jit.trace, and vmap over positions {NEEDS_LENGTH}"
        )
    values = host_values(positions)
    values = positions.detach().cpu() if values is None else values
    return reference.row_lengths(host_array(values))


def arange(like: Tensor, count: int) -> Tensor:
    """Return positions 0 .. count - 1 on the device of `like`."""
    return torch.arange(count, dtype=torch.int64, device=like.device)


def device_key(like: Tensor) -> str | None:
    """Return the device and whether inference mode is on, a part of the cache key.

    None while tracing, and for fake tensors. A CUDA graph that is captured makes its own tables:
    they would be empty until it runs, and those of the cache may be gone by then.
    """
    if not _is_untraced(like) or is_capturing(like):
        return None
    return f"torch:{like.device}:{torch.is_inference_mode_enabled()}"


def _is_untraced(like: Tensor) -> bool:
    return not is_tracing() and type(like) in TENSORS and not is_transforming()


def host_constant(
    function: Callable[..., Numbers], spec: Rotary, lengths: Sequence[int], *arguments: object
) -> Constant:
    """Return `function(spec, lengths, *arguments)`: an array, or a constant of a recorded graph.

    If a compiled call takes any length, an operator computes it when the call runs.
    """
    if not torch.compiler.is_dynamo_compiling():
        return function(spec, lengths, *arguments)
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to load

    if spec.depends_on_length and not all(map(has_static_value, lengths)):
        if is_exporting():
            raise ValueError(f"where torch.export leaves the length open {NEEDS_LENGTH}")
        name = _registered(function, spec.to_json(), *arguments)
        return torch.ops.rotary.of_lengths(name, lengths)
    kind, *rows = _as_text(function, spec.to_json(), lengths, *arguments).split(";")
    if kind == "float64":
        numbers = [[float(value) for value in row.split()] for row in rows]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")
    bits = [[int(value) for value in row.split()] for row in rows]
    return torch.tensor(bits, dtype=torch.int64, device="cpu")


@constant
def _as_text(function: Callable[..., Numbers], spec: str, *arguments: object) -> str:
    # text, because Dynamo takes two tensors that come from here for the same one (2.13), and takes
    # no dataclass as an argument (2.8, 2.9)
    array = np.atleast_2d(function(Rotary.from_json(spec), *arguments))
    array = array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.float64)
    rows = [" ".join(map(repr, row)) for row in array.tolist()]
    return ";".join([array.dtype.name, *rows])


_of_lengths: dict[str, Callable[[Sequence[int]], Numbers]] = {}


@constant
def _registered(function: Callable[..., Numbers], spec: str, *arguments: object) -> str:
    name = f"{function.__name__} {spec} {arguments}"
    _of_lengths[name] = lambda lengths: function(Rotary.from_json(spec), tuple(lengths), *arguments)
    return name


def operator_of_lengths(name: str, lengths: Sequence[int]) -> Tensor:
    """Return frequencies or scales for lengths that are known when a compiled program runs."""
    return from_numpy(_of_lengths[name](lengths))


def fake_of_lengths(name: str, lengths: Sequence[object]) -> Tensor:
    """Return an empty tensor of the same form, while the program is compiled."""
    array = _of_lengths[name]([1] * len(lengths))
    kind = torch.int64 if array.dtype == np.uint64 else torch.float64
    return torch.empty(array.shape, dtype=kind, device="cpu")
