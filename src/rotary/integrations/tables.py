"""What the modules that make cos and sin give, found by trying them, and exact tables instead.

A module of transformers makes tables from positions: `forward(x, position_ids[, layer_type])`. It
is tried on a copy, with few and small positions, so that the model is never touched.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..angles import cos_sin, inv_freq
from ..configs import from_hf_config
from ..spec import Rotary

_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)
_MAX_AXES = 6
_SEQ = 3


class Source(NamedTuple):
    """How a module reads positions and lays out its tables.

    kind   "plain" (..., seq); "axes first" (axes, batch, seq); "axes last" (seq, axes)
    axes   how many position axes
    style  as in `rotations.Way`: "complex", "halves", "repeat"; "half" where every column has an
           angle of its own
    """

    kind: str
    axes: int
    style: str


def producers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, that make tables from positions.

    >>> producers(nn.Linear(2, 2))
    {}
    """
    return {name: module for name, module in model.named_modules() if _makes_tables(module)}


def _makes_tables(module: nn.Module) -> bool:
    names = list(inspect.signature(type(module).forward).parameters)
    return names[1:3] == ["x", "position_ids"] and set(names[3:]) <= {"layer_type"}


def nearest(names: dict[str, Any], path: str) -> str | None:
    """The producer that serves the module at `path`: the one in its closest ancestor.

    >>> nearest({"model.rotary_emb": 1, "vision.rotary_emb": 2}, "model.layers.0.self_attn")
    'model.rotary_emb'
    """
    homes = {name: name.rpartition(".")[0] for name in names}
    known = [n for n, home in homes.items() if not home or f"{path}.".startswith(f"{home}.")]
    return max(known, key=lambda name: len(homes[name]), default=None)


def layer_types(module: nn.Module) -> list[str | None]:
    """The values of `layer_type` that a producer knows; [None] if it takes none.

    >>> layer_types(nn.Linear(2, 2))
    [None]
    """
    kinds = getattr(module, "rope_type", None)
    return list(kinds) if isinstance(kinds, dict) and kinds else [None]


def sources_of(module: nn.Module) -> dict[str | None, Source]:
    """The `Source` of each layer type of a producer.

    Raises ValueError if it cannot be tried.
    """
    return {kind: _source(module, kind) for kind in layer_types(module)}


def _source(module: nn.Module, layer_type: str | None) -> Source:
    random = torch.Generator().manual_seed(5)

    def positions(*shape: int) -> Tensor:
        return torch.randint(1, 40, shape, generator=random)

    plain = _tried(module, positions(1, _SEQ), layer_type)
    for axes in range(2, _MAX_AXES + 1):
        first = _tried(module, positions(axes, 1, _SEQ), layer_type)
        if first is not None and first[0].shape[:-1] == (1, _SEQ):
            return Source("axes first", axes, _style(first))
    for axes in (2, 3):
        last = _tried(module, positions(_SEQ, axes), layer_type)
        if last is not None and last[0].ndim == 2 and last[0].shape[0] == _SEQ:
            return Source("axes last", axes, _style(last))
    if plain is None or plain[0].shape[:-1] != (1, _SEQ):
        raise ValueError("could not be tried")
    return Source("plain", 1, _style(plain))


def _tried(
    module: nn.Module, positions: Tensor, layer_type: str | None
) -> tuple[Tensor, ...] | None:
    """What a copy of the module gives in float32; None if it refuses such positions."""
    extra = {} if layer_type is None else {"layer_type": layer_type}
    try:
        trial = copy.deepcopy(module).to("cpu")
        with torch.no_grad():
            result = trial(torch.zeros(1, dtype=torch.float32), positions, **extra)
    except _REFUSALS:
        return None
    tables = result if isinstance(result, tuple) else (result,)
    is_known = len(tables) == 2 or (len(tables) == 1 and tables[0].is_complex())
    return tables if is_known else None


def _style(tables: tuple[Tensor, ...]) -> str:
    if len(tables) == 1:
        return "complex"
    width = tables[0].shape[-1]
    if width % 2 == 0 and all(torch.equal(*t.chunk(2, dim=-1)) for t in tables):
        return "halves"
    if width % 2 == 0 and all(torch.equal(t[..., ::2], t[..., 1::2]) for t in tables):
        return "repeat"
    return "half"


# --- exact tables ---


def exact_forward(module: nn.Module) -> Callable[..., Any]:
    """A forward for `module` with float32 tables from exact angles; ValueError if it cannot be."""
    if any(True for _ in module.parameters()):
        raise ValueError("its frequencies are learned")
    made = {kind: _exact(module, kind, source) for kind, source in sources_of(module).items()}

    def forward(self: nn.Module, x: Tensor, position_ids: Tensor, layer_type: Any = None) -> Any:
        spec, source = made[layer_type if layer_type in made else None]
        cos, sin = cos_sin(spec, _arranged(position_ids, source), allow_negative=True)
        if source.style == "complex":
            return torch.complex(cos, sin)
        return _widened(cos, source.style), _widened(sin, source.style)

    return forward


def _arranged(position_ids: Tensor, source: Source) -> Tensor:
    """Positions as `cos_sin` takes them: (..., seq), or (..., seq, axes)."""
    if source.kind == "axes first":
        return position_ids.expand(source.axes, -1, -1).movedim(0, -1)
    return position_ids


def _widened(table: Tensor, style: str) -> Tensor:
    if style == "halves":
        return torch.cat((table, table), dim=-1)
    return table.repeat_interleave(2, dim=-1) if style == "repeat" else table


def _exact(module: nn.Module, layer_type: str | None, source: Source) -> tuple[Rotary, Source]:
    """The spec behind the tables of a module, from what they are at position 1 of each axis."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer = getattr(module, f"{prefix}inv_freq", None)
    if not isinstance(buffer, Tensor) or buffer.ndim != 1:
        raise ValueError("its tables are not made of inv_freq alone")
    if _rope_type(module, layer_type) in ("dynamic", "longrope"):
        raise ValueError("its frequencies depend on the length, which transformers keeps as state")
    columns = [_at(module, layer_type, source, step) for step in torch.eye(source.axes).long()]
    angles = torch.stack([torch.atan2(sin[0], cos[0]) for cos, sin in columns])
    axis = angles.abs().argmax(dim=0)
    own = buffer.double().cpu()
    which = (angles.amax(dim=0).double()[:, None] - own).abs().argmin(dim=-1)
    factor = float(getattr(module, f"{prefix}attention_scaling", 1.0))

    def spec(frequencies: Tensor) -> Rotary:
        return Rotary(
            head_dim=2 * len(which),
            schedule="custom",
            params={"inv_freq": frequencies[which], "attention_factor": factor},
            axes=axis.tolist() if source.axes > 1 else (),
        )

    _check(module, layer_type, source, spec(own))
    return spec(_definition(module, layer_type, own, buffer.dtype)), source


def _rope_type(module: nn.Module, layer_type: str | None) -> str:
    kind = getattr(module, "rope_type", "default")
    return str(kind.get(layer_type, "default") if isinstance(kind, dict) else kind)


def _at(
    module: nn.Module, layer_type: str | None, source: Source, steps: Tensor
) -> tuple[Tensor, Tensor]:
    """cos and sin of a module, (seq, pairs), at positions (seq, axes)."""
    steps = steps.reshape(-1, source.axes)
    plain = {"plain": steps.T, "axes first": steps.T[:, None], "axes last": steps}[source.kind]
    tables = _tried(module, plain, layer_type)
    if tables is None:
        raise ValueError("could not be tried")
    if source.style == "complex":
        tables = tables[0].real, tables[0].imag
    cos, sin = (table.reshape(len(steps), -1) for table in tables)
    width = cos.shape[-1]
    if source.style == "halves":
        return cos[:, : width // 2], sin[:, : width // 2]
    return (cos[:, ::2], sin[:, ::2]) if source.style == "repeat" else (cos, sin)


def _check(module: nn.Module, layer_type: str | None, source: Source, spec: Rotary) -> None:
    """Refuse a spec that does not give what the module gives, within float32 at small positions."""
    steps = torch.randint(1, 40, (7, source.axes), generator=torch.Generator().manual_seed(3))
    theirs = _at(module, layer_type, source, steps)
    ours = cos_sin(spec, steps if source.axes > 1 else steps[:, 0])
    for one, other in zip(theirs, ours, strict=True):
        if not torch.allclose(one, other, rtol=2e-5, atol=2e-5):
            raise ValueError("its tables are not made of inv_freq alone")


def _definition(
    module: nn.Module, layer_type: str | None, own: Tensor, dtype: torch.dtype
) -> Tensor:
    """The frequencies in float64: by the config where it is known and agrees, else as they are."""
    try:
        spec = from_hf_config(getattr(module, "config", None), layer_type)
    except ValueError:
        return own
    known = own if spec is None else torch.tensor(inv_freq(spec)[0])
    agrees = known.shape == own.shape and torch.allclose(
        known, own, rtol=8 * torch.finfo(dtype).eps, atol=0
    )
    return known if agrees else own
