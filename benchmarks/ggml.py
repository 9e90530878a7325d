"""ggml's RoPE in place, called in C: a peer of `benchmarks.sizes`.

`--ggml FOLDER` names where libggml-base.so and libggml-cpu.so are. From ggml's source:

    cmake -S ggml -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target ggml-cpu

It works out its angles in every call, in float32, once for each token; there is no bfloat16.
"""

import ctypes
import weakref
from collections.abc import Callable
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

TYPES = {torch.float32: 0, torch.float16: 1, torch.int32: 26}
MODES = {"interleaved": 0, "half": 2}
_SPARE = 1 << 22  # bytes beside the data: records of tensors, and the graph


class _Memory(Structure):
    _fields_ = (("size", c_size_t), ("buffer", c_void_p), ("no_alloc", c_bool))


class _Plan(Structure):
    _fields_ = (
        ("work_size", c_size_t), ("work", c_void_p), ("threads", c_int), ("pool", c_void_p),
        ("abort", c_void_p), ("abort_data", c_void_p), ("reference", c_bool),
    )  # fmt: skip


class Rope(NamedTuple):
    """A call that rotates in place, and what it rotates: (tokens, heads, head_dim) of each."""

    call: Callable[[], None]
    xs: tuple[torch.Tensor, ...]


@cache
def _libraries(folder: Path) -> tuple[Any, Any]:
    base, cpu = (
        ctypes.CDLL(str(folder / f"libggml-{name}.so"), mode=ctypes.RTLD_GLOBAL)
        for name in ("base", "cpu")
    )
    pointers = "ggml_init ggml_new_tensor_1d ggml_new_tensor_3d ggml_rope_ext_inplace ggml_get_data"
    for name in (*pointers.split(), "ggml_new_graph"):
        getattr(base, name).restype = c_void_p
    base.ggml_init.argtypes = (_Memory,)
    base.ggml_free.argtypes = base.ggml_new_graph.argtypes = base.ggml_get_data.argtypes = (
        c_void_p,
    )
    base.ggml_new_tensor_1d.argtypes = c_void_p, c_int, c_int64
    base.ggml_new_tensor_3d.argtypes = c_void_p, c_int, c_int64, c_int64, c_int64
    base.ggml_rope_ext_inplace.argtypes = *(c_void_p,) * 4, *(c_int,) * 3, *(c_float,) * 6
    base.ggml_build_forward_expand.argtypes = c_void_p, c_void_p
    base.ggml_commit.restype = base.ggml_version.restype = c_char_p
    cpu.ggml_cpu_init.argtypes = ()
    cpu.ggml_graph_plan.argtypes, cpu.ggml_graph_plan.restype = (c_void_p, c_int, c_void_p), _Plan
    cpu.ggml_graph_compute.argtypes = c_void_p, POINTER(_Plan)
    cpu.ggml_cpu_init()
    return base, cpu


def version(folder: Path) -> str:
    """Of the library in a folder."""
    return str(_libraries(folder)[0].ggml_version().decode())


def rope(folder: Path, xs: tuple[torch.Tensor, ...], layout: str, base: float) -> Rope | None:
    """The call on copies of these (tokens, heads, head_dim), from position 0; None for bfloat16."""
    if xs[0].dtype not in TYPES:
        return None
    library, cpu = _libraries(folder)
    size = sum(x.numel() * x.element_size() for x in xs) + 4 * len(xs[0])
    context = library.ggml_init(_Memory(size + _SPARE, None, False))
    graph = library.ggml_new_graph(context)
    at = library.ggml_new_tensor_1d(context, TYPES[torch.int32], len(xs[0]))
    _memory(library, at, torch.arange(len(xs[0]), dtype=torch.int32))
    own = []
    for x in xs:
        tensor = library.ggml_new_tensor_3d(context, TYPES[x.dtype], *reversed(x.shape))
        own.append(_memory(library, tensor, x))
        turned = library.ggml_rope_ext_inplace(
            context, tensor, at, None, x.shape[-1], MODES[layout], 0, base, 1, 0, 1, 0, 0
        )
        library.ggml_build_forward_expand(graph, turned)
    plan = cpu.ggml_graph_plan(graph, torch.get_num_threads(), None)
    work = ctypes.create_string_buffer(max(1, plan.work_size))
    plan.work = ctypes.addressof(work)

    def call() -> None:
        if cpu.ggml_graph_compute(graph, ctypes.byref(plan)) != 0:
            raise RuntimeError(f"ggml did not rotate {xs[0].dtype} {tuple(xs[0].shape)}")

    call.alive = work  # type: ignore[attr-defined]  # the plan has its address
    weakref.finalize(call, library.ggml_free, context)
    return Rope(call, tuple(own))


def _memory(library: Any, tensor: int, x: torch.Tensor) -> torch.Tensor:
    """The data of a tensor of ggml, filled with x; it lives as long as the call."""
    size = x.numel() * x.element_size()
    held = (ctypes.c_char * size).from_address(library.ggml_get_data(tensor))
    return torch.frombuffer(held, dtype=x.dtype).view(x.shape).copy_(x)
