"""Times a rotation next to a copy of the same bytes.

Every round runs every case once, so that other work or a change of the clock rate affects all
cases. Their medians, and ratios of medians, are comparable even if single times are not.
"""

import importlib.metadata
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .angles import cos_sin
from .rotate import apply, rotate
from .spec import Rotary

Case = Callable[[], object]
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}  # by the flags of /proc/cpuinfo


class Shape(NamedTuple):
    """Sizes of one rotation: q is (batch, q_heads, seq, head_dim), k has k_heads."""

    seq: int
    batch: int = 1
    q_heads: int = 32
    k_heads: int = 8

    def of(self, heads: int, head_dim: int) -> tuple[int, int, int, int]:
        """Return the shape of q or k with this number of heads.

        >>> Shape(16).of(8, 128)
        (1, 8, 16, 128)
        """
        return self.batch, heads, self.seq, head_dim


class Timing(NamedTuple):
    """Seconds of one case: the median of all rounds, and the fastest."""

    median: float
    best: float


def measure(
    cases: Mapping[str, Case], *, rounds: int = 11, between: Case | None = None
) -> dict[str, Timing]:
    """Time every case once per round, after two rounds of warm-up that are not counted.

    between  runs before each timed call, as the other operators of a model would
    The result of a call is freed outside the timed interval.

    >>> sorted(measure({"a": lambda: 1, "b": lambda: 2}, rounds=3))
    ['a', 'b']
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 2):
        for name, case in cases.items():
            if between is not None:
                between()
            start = time.perf_counter()
            result = case()
            spent = time.perf_counter() - start
            del result
            if number >= 2:
                seconds[name].append(spent)
    return {name: Timing(statistics.median(each), min(each)) for name, each in seconds.items()}


def numpy_cases(spec: Rotary, shape: Shape, dtype: npt.DTypeLike = np.float32) -> dict[str, Case]:
    """Return the cases in NumPy: a copy, the usual formula, and rotary, also with `out=`."""
    rng = np.random.default_rng(0)
    q, k = (
        rng.standard_normal(shape.of(heads, spec.head_dim), np.float32).astype(dtype)
        for heads in (shape.q_heads, shape.k_heads)
    )
    return _cases(spec, q, k, np.arange(shape.seq), np.copyto)


def torch_cases(
    spec: Rotary, shape: Shape, dtype: Any, *, transposed: bool = False
) -> dict[str, Case]:
    """Return the cases in torch, on a CPU; `transposed` gives views of (batch, seq, heads, dim)."""
    import torch

    generator = torch.Generator().manual_seed(0)
    order = (0, 2, 1, 3) if transposed else (0, 1, 2, 3)
    q, k = (
        torch.randn([size[axis] for axis in order], generator=generator).to(dtype).permute(order)
        for size in (shape.of(heads, spec.head_dim) for heads in (shape.q_heads, shape.k_heads))
    )
    return _cases(spec, q, k, torch.arange(shape.seq), torch.Tensor.copy_)


def _cases(
    spec: Rotary, q: Any, k: Any, positions: Any, copy: Callable[[Any, Any], object]
) -> dict[str, Case]:
    """Return the cases for arrays of one library; `copy(to, array)` is the copy that is timed."""
    library = np if isinstance(q, np.ndarray) else sys.modules["torch"]
    q_out, k_out, q_own, k_own = (library.zeros_like(x) for x in (q, k, q, k))
    copy(q_own, q)
    copy(k_own, k)
    cos, sin = cos_sin(spec, positions)
    is_half = spec.layout == "half"

    def full_width(table: Any) -> Any:
        if is_half:
            return library.concatenate((table, table), axis=-1)
        return library.stack((table, table), axis=-1).reshape(*table.shape[:-1], -1)

    def swapped(x: Any) -> Any:
        """Swap the members of each pair and negate one: the term that the sine multiplies."""
        if is_half:
            half = x.shape[-1] // 2
            return library.concatenate((-x[..., half:], x[..., :half]), axis=-1)
        return library.stack((-x[..., 1::2], x[..., ::2]), axis=-1).reshape(x.shape)

    wide_cos, wide_sin = (library.asarray(full_width(each), dtype=q.dtype) for each in (cos, sin))
    return {
        "copy": lambda: (copy(q_out, q), copy(k_out, k)),
        "formula": lambda: [x * wide_cos + swapped(x) * wide_sin for x in (q, k)],
        "rotary": lambda: apply(spec, q, k),
        "rotary out=": lambda: rotate((q, k), cos, sin, spec, seq_dim=-2, out=(q_out, k_out)),
        "rotary in place": lambda: rotate(
            (q_own, k_own), cos, sin, spec, seq_dim=-2, out=(q_own, k_own)
        ),
    }


def table_cases(spec: Rotary, count: int) -> dict[str, Case]:
    """Return cases that build tables of `count` positions: rotary, and a float32 outer product."""
    positions = np.arange(count)
    inverse = (spec.base ** (-np.arange(0, spec.rotary_dim, 2) / spec.rotary_dim)).astype("f4")

    def outer() -> tuple[object, object]:
        angles = np.outer(positions.astype(np.float32), inverse)
        return np.cos(angles), np.sin(angles)

    return {"numpy float32": outer, "rotary": lambda: cos_sin(spec, positions)}


def torch_matmul() -> Case:
    """Return a small torch operator to run between timed calls; it wakes torch's threads."""
    import torch

    a = torch.randn(512, 512)
    return lambda: a @ a


def measure_libraries(
    spec: Rotary, shape: Shape, dtypes: Sequence[str], rounds: int, tell: Callable[[str], None]
) -> dict[str, dict[str, Timing]]:
    """Time the cases in NumPy, and in torch with each of `dtypes` if torch is installed.

    tell  called with a description of each step, before it starts
    """
    tell("timing NumPy float32")
    times = {"NumPy float32": measure(numpy_cases(spec, shape), rounds=rounds)}
    if importlib.util.find_spec("torch") is not None:
        import torch

        for dtype in dtypes:
            tell(f"timing PyTorch {dtype}")
            cases = torch_cases(spec, shape, getattr(torch, dtype))
            times[f"PyTorch {dtype}"] = measure(cases, rounds=rounds, between=torch_matmul())
    return times


def medians_in_ms(times: Mapping[str, Mapping[str, Timing]]) -> dict[str, dict[str, float]]:
    """Return library -> case -> median in milliseconds.

    >>> medians_in_ms({"NumPy float32": {"copy": Timing(0.002, 0.001)}})
    {'NumPy float32': {'copy': 2.0}}
    """
    return {
        name: {case: each.median * 1e3 for case, each in cases.items()}
        for name, cases in times.items()
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the loaded libraries, and the name of the CPU."""
    result = {"python": sys.version.split()[0], "cpu": _cpu_name()}
    for name in ("numpy", "numba", "torch", "transformers", "rotary_embedding_torch"):
        module = sys.modules.get(name)
        if module is not None:
            own = getattr(module, "__version__", None)
            result[name] = str(own or importlib.metadata.version(name))
    return result


def _cpu_name() -> str:
    """Return the number and name of the processors, and the widest x86 vectors, if any."""
    try:
        with open("/proc/cpuinfo") as file:
            fields = [tuple(part.strip() for part in line.split(":", 1)) for line in file]
    except OSError:
        return "unknown"
    names = [field[1] for field in fields if field[0] == "model name"]
    flags = {flag for field in fields if field[0] == "flags" for flag in field[1].split()}
    vectors = [f" with {name}" for flag, name in _VECTORS.items() if flag in flags][:1]
    return "".join([f"{len(names)} x {names[0]}", *vectors]) if names else "unknown"
