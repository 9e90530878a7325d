"""The plug-in for vLLM: its rotary embeddings rotate with `rotary.rotate`.

    VLLM_PLUGINS=rotary vllm serve MODEL --enforce-eager

If VLLM_PLUGINS is unset, vLLM loads every installed plug-in, but this one then does nothing: it
must be named, so that rotary installed for another purpose changes no server. If it is named,
`register` replaces each class that it can by a subclass: same arguments, same tables, same shapes,
but q and k are rotated by `rotary.rotate`, in float32, and rounded once. One line in vLLM's log
names the classes that were replaced, and those that were not, with the reason. One more line for
each embedding that is made says whether rotary rotates for it.

ROTARY_EXACT=1 also recomputes the tables, by the formula of vLLM's own class in float64, rounded
once to float32. vLLM's tables hold float32 angles, in the dtype of the model. Exact tables are not
used if they differ from vLLM's by more than the error of float32 angles.

With --enforce-eager vLLM calls its own operators and those of plug-ins. When it compiles a model by
Inductor it calls none of them, not this one either, and compiles its own formula, unless you pass
`--compilation-config '{"custom_ops": ["+rotary_embedding"]}'`.

An embedding is compared with vLLM's own formula when it is made, and not replaced if they differ.
vLLM's own code computes calls of a form that is not known here. The log says so, once.

This file imports no Numba: at its start, vLLM without Triton looks into every module that is
loaded, and an object of llvmlite does not survive that. The first rotation, later, may.

Interface: vLLM 0.33, `model_executor/custom_op.py` and `model_executor/layers/rotary_embedding`.
"""

import importlib
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from ..kernels.numpy import check_rows
from ..kernels.torch.state import host_array, is_on_host
from ..prepare import prepare
from ..rotate import rotate
from .vllm_tables import EXACT, Rope, adopt, cache_of, exact_table, is_exact, tables_of

NAME = "rotary"
# classes that are not replaced, and why
NOT_REPLACED = {
    "DualChunkRotaryEmbedding": "it makes five queries of one, each with a table of its own",
    "FourierRotaryEmbedding": "it mixes frequencies by learned weights, which is no rotation",
    "Llama4VisionRotaryEmbedding": "it multiplies an image by a complex table, without positions",
    "RotaryEmbeddingBase": "it has no forward",
}
_ARGUMENTS = {"self", "positions", "query", "key", "offsets", "inverse"}
_AXES = "rotary_axes"  # the buffer with the axis of each column of the table
_log = logging.getLogger("vllm.plugins.rotary")  # below "vllm", whose handlers a server shows
_logged: set[str] = set()
_waiting: list[str] = []  # lines that are not in the log yet
_replaced: dict[type, type] = {}  # a class of vLLM -> its replacement

FEW = 512  # the most tokens of a call that is prepared, and the most prepared calls per embedding

Results = tuple[Tensor, Tensor | None]


class RotateOptions(TypedDict):
    """Options of `rotary.rotate`."""

    layout: str
    rotary_dim: int
    start: int
    seq_dim: int
    conjugate: bool


class Family(NamedTuple):
    """What the forward does that several classes of vLLM share."""

    forwards: tuple[str, ...] = ("forward_cpu", "forward_cuda")  # the methods that are replaced
    is_in_place: bool = False  # writes to q and k, as vLLM's operator does; else to new tensors
    takes_heads: bool = False  # q is (tokens, heads, head_dim), not (tokens, heads * head_dim)
    takes_offsets: bool = False  # added to the positions
    is_at_the_end: bool = False  # rotates the last channels, by float32 tables; takes `inverse`
    axes_of: Callable[[Rope], list[int]] | None = None  # axis of positions (3, tokens) of each pair


def _sections(rope: Rope) -> list[int]:
    """Return the axis of each pair: t, h, w in blocks, or alternating until h and w are used up."""
    t, h, w = rope.mrope_section
    if not rope.mrope_interleaved:
        return [0] * t + [1] * h + [2] * w
    return [i % 3 if i < 3 * (0, h, w)[i % 3] else 0 for i in range(rope.rotary_dim // 2)]


def _alternating(count: int, rope: Rope) -> list[int]:
    """Return the axis of each pair: h and w alternate for `count` pairs, then t."""
    return [1 + i % 2 if i < count else 0 for i in range(rope.rotary_dim // 2)]


# by the class that defines the forward; classes that only change the frequencies inherit it
FAMILIES = {
    "RotaryEmbedding": Family(is_in_place=True),
    "DeepseekScalingRotaryEmbedding": Family(takes_heads=True, takes_offsets=True),
    "DeepseekV4ScalingRotaryEmbedding": Family(
        is_in_place=True, takes_heads=True, takes_offsets=True, is_at_the_end=True
    ),
    "Phi3LongRoPEScaledRotaryEmbedding": Family(("forward",), takes_offsets=True),
    "MRotaryEmbedding": Family(axes_of=_sections),
    "Ernie4_5_VLRotaryEmbedding": Family(
        axes_of=lambda rope: _alternating(sum(rope.mrope_section[:2]), rope)
    ),
    "BailingMRotaryEmbedding": Family(
        axes_of=lambda rope: _alternating(sum(rope.mrope_section[1:]), rope)
    ),
    "MRotaryEmbeddingInterleaved": Family(
        ("forward",), axes_of=lambda rope: rope.mrope_dim[: rope.rotary_dim // 2]
    ),
}


def register() -> None:
    """Replace vLLM's classes by rotary's: the entry point in `vllm.general_plugins`.

    Does nothing unless VLLM_PLUGINS names `rotary`. It may be called many times. A class that
    another plug-in has replaced is not changed. Raises ValueError for a ROTARY_EXACT other than 0
    and 1.

    >>> register()  # VLLM_PLUGINS does not name it here: nothing happens
    """
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    how = "builds their tables exactly" if is_exact() else "keeps their tables"
    package = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
    registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
    left = []
    for base in classes(package):
        family, other = family_of(base), registry.get(base.__name__)
        if base in _replaced:
            continue
        if isinstance(family, str):
            left.append(f"{base.__name__}: {family}")
        elif other is not None:
            left.append(f"{base.__name__}: {other.__module__} has replaced it")
        else:
            _replaced[base] = replacement(base, family)
            if hasattr(base, "register_oot"):
                registry[base.__name__] = _replaced[base]
            else:
                setattr(package, base.__name__, _replaced[base])  # where get_rope looks it up
    names = ", ".join(sorted(base.__name__ for base in _replaced))
    _log_once(f"rotary replaces {names} and {how}. Not replaced: {'; '.join(left)}")


def classes(package: object) -> Iterator[type]:
    """Yield every class of vLLM's package of rotary embeddings that has tables of cos and sin."""
    for file in pkgutil.iter_modules(getattr(package, "__path__", [])):
        module = pkgutil.resolve_name(f"{getattr(package, '__name__', '')}.{file.name}")
        for value in vars(module).values():
            if getattr(value, "__module__", "") == module.__name__ and hasattr(
                value, "_compute_cos_sin_cache"
            ):
                yield value


def family_of(base: type) -> Family | str:
    """Return the `Family` of a class of vLLM, or why the class is not replaced."""
    if base.__name__ in NOT_REPLACED:
        return NOT_REPLACED[base.__name__]
    owner = next(
        each for each in base.__mro__ if any(name.startswith("forward") for name in vars(each))
    ).__name__
    if owner not in FAMILIES:
        return f"rotary does not know the forward of {owner}"
    family = FAMILIES[owner]
    for name in family.forwards:
        parameters = inspect.signature(getattr(base, name)).parameters.values()
        for parameter in parameters:
            is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.name not in _ARGUMENTS and not is_open:
                return f"rotary does not know the argument {parameter.name} of its {name}"
    return family


def replacement(base: type, family: Family) -> type:
    """Return the subclass that replaces a class of vLLM, with the same name."""
    names = "__init__", "_compute_cos_sin_cache", *family.forwards
    own: dict[str, Callable[..., object]] = {name: getattr(base, name) for name in names}
    exact: list[Tensor] = []  # of the embedding that is being made

    def init(self: Rope, *arguments: object, **options: object) -> None:
        exact.clear()
        own["__init__"](self, *arguments, **options)
        _set_up(self, base, family, torch.cat(exact) if exact else None)
        exact.clear()

    def compute(self: Rope, *arguments: object) -> object:
        table = own["_compute_cos_sin_cache"](self, *arguments)
        if not is_exact() or not isinstance(table, Tensor) or table.is_meta:
            return table
        exact_rows = exact_table(lambda: own["_compute_cos_sin_cache"](self, *arguments), table)
        if exact_rows is None:
            _log_once(f"{EXACT}: {base.__name__} keeps vLLM's tables, float64 gives others")
            return table
        exact.append(exact_rows)
        return exact_rows

    methods = {name: _forward(own[name], family) for name in family.forwards}
    kept = {"__module__": __name__, "__doc__": base.__doc__}
    return type(
        base.__name__, (base,),
        {**kept, **methods, "__init__": init, "_compute_cos_sin_cache": compute},
    )  # fmt: skip


def _forward(own: Callable[..., object], family: Family) -> Callable[..., object]:
    def forward(
        self: Rope,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        offsets: Tensor | None = None,
        inverse: bool = False,
    ) -> object:
        results = _rotated(self, family, positions, query, key, offsets, inverse)
        if results is not None:
            return results
        if not torch.compiler.is_compiling() and self.rotary_tables is not None:
            _log_once(
                f"vLLM's own code answers a call of {type(self).__name__} that rotary does not "
                f"know: q {query.dtype} {tuple(query.shape)}, positions {tuple(positions.shape)}"
            )
        more: dict[str, object] = {} if offsets is None else {"offsets": offsets}
        if inverse:
            more["inverse"] = inverse
        return own(self, positions, query, key, **more)

    return forward


def _rotated(
    rope: Rope,
    family: Family,
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    offsets: Tensor | None = None,
    inverse: bool = False,
) -> Results | None:
    """Rotate q and k; return None for a call that vLLM's own code has to compute."""
    tables = tables_of(rope)
    if tables is None:
        return None
    form = query.shape, key is None or key.shape, positions.dim(), offsets is None, inverse
    is_compiling = torch.compiler.is_compiling()
    step = None if is_compiling else tables.steps.get(form)
    has_axes = family.axes_of is not None and positions.dim() == 2
    heads = [query] if key is None else [query, key]
    head = query.shape[-1] if family.is_at_the_end else rope.head_size
    if step is None:
        has_heads = positions.dim() == 1 and all([x.dim() == 3 for x in heads])
        if (
            query.device != tables.whole.device
            or (query.dtype != tables.cache.dtype and not family.is_at_the_end)
            or (inverse and not family.is_at_the_end)
            or (offsets is not None and (has_axes or not family.takes_offsets))
            or (family.takes_heads and not (has_heads and {x.shape[-1] for x in heads} == {head}))
        ):
            return None
    if not family.takes_heads:
        tokens = positions.shape[-1] if has_axes else positions.numel()
        try:
            heads = [x.view(tokens, -1, head) for x in heads]
        except RuntimeError:  # another number of tokens, or memory in another order
            return None
    cos, sin, rows = tables.cos, tables.sin, None
    if has_axes:
        axes = rope._buffers[_AXES]
        if not is_compiling and is_on_host(positions):
            check_rows(host_array(positions), range(len(tables.whole)))
        columns = torch.arange(len(axes), device=axes.device)
        cos, sin = tables.whole[positions.t()[:, axes], columns].chunk(2, -1)
    else:
        rows = positions if positions.dim() == 1 else positions.flatten()
        rows = rows if offsets is None else rows + offsets
    out, turned = heads, (query, key)
    if not family.is_in_place:
        out = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in heads]
        turned = out[0].view(query.shape), None if key is None else out[1].view(key.shape)
    if step is not None:
        try:
            step(heads, cos, sin, positions=rows, out=out)
            return turned
        except ValueError:  # not the strides or dtypes of the prepared call, or no row of the table
            del tables.steps[form]
            return _rotated(rope, family, positions, query, key, offsets, inverse)
    options: RotateOptions = {
        "layout": "half" if getattr(rope, "is_neox_style", True) else "interleaved",
        "rotary_dim": rope.rotary_dim,
        "start": head - rope.rotary_dim if family.is_at_the_end else 0,
        "seq_dim": -3,
        "conjugate": inverse,
    }
    rotate(heads, cos, sin, positions=rows, out=out, **options)
    if not is_compiling and len(heads[0]) <= FEW and len(tables.steps) < FEW:
        tables.steps[form] = prepare(rotate, heads, cos, sin, positions=rows, out=out, **options)
    return turned


def _set_up(rope: Rope, base: type, family: Family, exact: Tensor | None) -> None:
    """Take the tables of a new embedding, compare it with vLLM's formula, and log what is used."""
    rope.rotary_tables = None
    if "_buffers" not in vars(rope):
        _log_once(
            f"vLLM's {base.__name__} stays: torch {torch.__version__} keeps buffers elsewhere"
        )
        return
    cache = cache_of(rope)
    name = f"{base.__name__} ({len(cache)} rows, {rope.rotary_dim} channels)"
    if cache.is_meta:
        _log_once(f"vLLM's {name} stays: its tables have no memory")
        return
    if family.axes_of is not None:
        axes = torch.tensor(family.axes_of(rope) * 2, device=cache.device)
        rope.register_buffer(_AXES, axes, persistent=False)
    adopt(rope, exact)
    if difference := _difference(rope, base, family):
        rope.rotary_tables = None
        _log_once(f"vLLM's {name} stays: {difference}")
        return
    tables = "vLLM's tables" if exact is None else "exact tables"
    called = getattr(getattr(rope, "_forward_method", None), "__name__", "forward")
    if "forward" in family.forwards or called == "forward":
        _log_once(f"rotary rotates for {name} by {tables}")
    else:
        _log_once(
            f"vLLM calls its own {called} of {name}, by {tables}: to have rotary called, give "
            '--enforce-eager or --compilation-config \'{"custom_ops": ["+rotary_embedding"]}\''
        )


def _difference(rope: Rope, base: type, family: Family) -> str:
    """Return in words how the embedding differs from vLLM's own formula; empty if it does not."""
    cache = cache_of(rope)
    positions = torch.arange(3, device=cache.device) % len(cache)
    if family.axes_of is not None:
        positions = torch.stack([positions, positions.flip(0), positions.roll(1)])
    width = 2 * rope.rotary_dim if family.is_at_the_end else rope.head_size
    numbers = torch.arange(9 * width, device=cache.device, dtype=torch.float32).sin()
    heads = numbers.to(cache.dtype).view(3, 3, width)
    q, k = heads[:, :2], heads[:, 2:]
    if not family.takes_heads:
        q, k = q.flatten(1), k.flatten(1)
    own = getattr(base, "forward" if "forward" in family.forwards else "forward_native")
    limit = 8 * torch.finfo(cache.dtype).eps * max(1.0, float(cache.abs().max()))
    try:
        theirs = own(rope, positions, q.clone(), k.clone())
        ours = _rotated(rope, family, positions, q.clone(), k.clone())
        errors = [float((x - y).abs().max()) for x, y in zip(theirs, ours or (), strict=True)]
    except Exception as error:  # other versions of vLLM may raise anything
        return f"it cannot be compared with its own formula ({error})"
    return "" if max(errors) <= limit else f"it is off from its own formula by {max(errors):.2g}"


def _log_once(text: str) -> None:
    """Log a line once; those from before vLLM has set up its log come with the first one after."""
    if text not in _logged:
        _logged.add(text)
        _waiting.append(text)
    if _log.isEnabledFor(logging.INFO):
        for line in _waiting:
            _log.info(line)
        _waiting.clear()
