"""The tables of cos and sin of vLLM's rotary embeddings: vLLM's own, in float32, or exact ones."""

import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..kernels.torch.private import version_of

EXACT = "ROTARY_EXACT"
CACHES = ("cos_sin_cache", "long_short_cos_sin_cache")  # vLLM's buffers, of which one exists
TABLE = "rotary_table"  # our buffer with the float32 table, if vLLM's has another dtype


class Rope(Protocol):
    """The attributes of a rotary embedding of vLLM that are read here, and those added here."""

    head_size: int
    rotary_dim: int
    mrope_section: list[int]
    mrope_interleaved: bool
    mrope_dim: list[int]
    original_max_position_embeddings: int
    use_long_rope: bool
    rotary_tables: "Tables | None"
    _buffers: dict[str, Tensor]

    def register_buffer(self, name: str, tensor: Tensor, persistent: bool) -> None:
        """As torch.nn.Module has it."""


class Tables(NamedTuple):
    """cos and sin (rows, pairs) in float32, and the buffers that they are views of."""

    cos: Tensor
    sin: Tensor
    whole: Tensor  # the float32 table of which cos and sin are views
    cache: Tensor  # vLLM's table
    version: object  # of the cache, changes when it is written to; None for an inference tensor
    steps: dict[object, Callable[..., object]]  # prepared calls, by the form of q and k


def is_exact() -> bool:
    """Return whether ROTARY_EXACT asks for exact tables; ValueError for a value except 0 and 1."""
    value = os.environ.get(EXACT, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{EXACT} must be 0 (keep vLLM's tables) or 1, got {value!r}")
    return value == "1"


def cache_of(rope: Rope) -> Tensor:
    """Return vLLM's table of an embedding: cos beside sin, in the dtype of the model."""
    return next(rope._buffers[name] for name in CACHES if name in rope._buffers)


def tables_of(rope: Rope) -> Tables | None:
    """Return the tables of an embedding's present buffers; None if vLLM rotates for it."""
    tables = rope.rotary_tables
    if tables is None:
        return None
    buffers = rope._buffers
    if torch.compiler.is_compiling():
        cache = cache_of(rope)
        return _halves(rope, buffers.get(TABLE, cache), cache, None)
    cache = tables.cache
    if (
        buffers.get(TABLE, cache) is tables.whole
        and buffers.get(CACHES[0], cache) is cache is buffers.get(CACHES[1], cache)
        and (tables.version is None or version_of(cache) == tables.version)
    ):
        return tables
    return adopt(rope)


def adopt(rope: Rope, exact: Tensor | None = None) -> Tables:
    """Read the tables from vLLM's buffer; keep exact ones as long as they round to its values."""
    cache, table = cache_of(rope), rope._buffers.pop(TABLE, exact)
    whole = cache.float()
    if cache.dtype != torch.float32:
        if (
            table is not None
            and table.dtype == torch.float32
            and table.device == cache.device
            and torch.equal(table.to(cache.dtype), cache)
        ):
            whole = table
        rope.register_buffer(TABLE, whole, persistent=False)
    version = None if cache.is_inference() else version_of(cache)
    rope.rotary_tables = _halves(rope, whole, cache, version)
    return rope.rotary_tables


def _halves(rope: Rope, whole: Tensor, cache: Tensor, version: object) -> Tables:
    rows = whole
    if hasattr(rope, "use_long_rope"):  # the rows of its long list are after those of the short one
        short = rope.original_max_position_embeddings
        rows = whole[short:] if rope.use_long_rope else whole[:short]
    cos, sin = rows.chunk(2, -1)
    return Tables(cos, sin, whole, cache, version, {})


def exact_table(compute: Callable[[], object], table: Tensor) -> Tensor | None:
    """Return the result of `compute` in float64, rounded once to float32.

    table  its result in float32; if the two differ by more than the error of float32 angles, the
           return value is None
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            exact = compute()
    finally:
        torch.set_default_dtype(default)
    if not isinstance(exact, Tensor) or exact.dtype != torch.float64 or exact.shape != table.shape:
        return None
    rounded = exact.float()
    error = (rounded - table.float()).abs().amax(-1)
    rows = torch.arange(len(table), device=table.device)
    return rounded if bool((error <= (rows + 4) * 2.0**-20).all()) else None


class _Float64(TorchFunctionMode):
    """Makes every torch function use float64 where the code asks for float32."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        options = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return function(*map(_widened, args), **options)


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value
