"""Find out what a module returns as cos and sin by calling it, and make exact tables.

A rotary embedding of transformers makes tables from positions: `forward(x, position_ids)`, some
with a `layer_type`. A copy of it is called, with few and small positions, so the model is never
changed. `grids` does the same for modules of images and videos.
"""

import copy
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..angles import cos_sin, inv_freq
from ..configs import from_hf_config
from ..configs import layer_types as types_in_config
from ..spec import Rotary
from .grids import exact_tables, maker_of, tables_of
from .methods import methods_of, rotations_called
from .styles import REFUSALS, full_width, half_width, style_of

_NAME = re.compile("R[oO][pP][eE]|[rR]otary")  # in names of classes; but not Europe
_SEQ = 3
_FAR = tuple(2**power for power in (9, 12, 15, 18))  # where frequencies may be others


class Source(NamedTuple):
    """How a rotary embedding reads positions and lays out its tables.

    kind   "plain" (..., seq); "axes first" (axes, batch, seq); "axes last" (seq, axes)
    axes   how many position axes
    style  of the tables, as `styles` lists them; "half" if every column has an angle of its own
    """

    kind: str
    axes: int
    style: str


def embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """Return the rotary embeddings by name: the modules that make tables from positions.

    Some have only the name of one, so that `styles_of` finds none.

    >>> embeddings(nn.Linear(2, 2))
    {}
    """
    takes = (["x", "position_ids"], ["x", "position_ids", "layer_type"])
    return {
        name: module
        for name, module in model.named_modules()
        if list(inspect.signature(type(module).forward).parameters)[1:] in takes
        or maker_of(module) is not None
        or _is_named_like_one(module)
    }


def _is_named_like_one(module: nn.Module) -> bool:
    return (
        _NAME.search(type(module).__name__) is not None
        and next(module.parameters(), None) is None
        and not any([rotates(each) for each in module.modules()])
    )


def rotates(owner: object) -> bool:
    """Return whether a method of this object calls a function named like a rotation.

    >>> rotates(nn.Linear(2, 2))
    False
    """
    methods = methods_of(type(owner))  # type: ignore[arg-type]  # it has a hash
    return any([True for _, method, _ in methods for _ in rotations_called(method)])


def readable(
    styles: Mapping[str, set[str]], rotating: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return, for each module that rotates, the rotary embeddings whose tables it may read.

    styles    of the tables of each rotary embedding, by its name; none if they are not known
    rotating  the paths of the modules that rotate

    No code says which tables a layer gets, and models have rotary embeddings that are not used:
    Granite SWA next to a list of others, and attention of older transformers. So a module may read
    the tables of all that are in a module around it, or in a list or another part of such a module
    in which nothing rotates. Tables of unknown style, made in a module that rotates itself, are
    for that module alone.

    >>> readable({"model.ropes.0": {"half"}, "vision.rope": {"half"}}, ["model.layers.0.self_attn"])
    {'model.layers.0.self_attn': ('model.ropes.0', 'vision.rope')}
    """
    around = {path: {*_around(path)} for path in rotating}
    all_around = {""}.union(*around.values())
    homes = {
        name: next(home for home in _around(name)[1:] if home in all_around) for name in styles
    }
    return {
        path: tuple([
            name for name, home in homes.items()
            if home == path or (home in around[path] and (styles[name] or home not in around))
        ]) for path in rotating
    }  # fmt: skip


def _around(path: str) -> list[str]:
    """Return the path of a module and of all around it, the smallest first.

    >>> _around("model.layers.0")
    ['model.layers.0', 'model.layers', 'model', '']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def layer_types(module: nn.Module) -> list[str | None]:
    """Return the values of `layer_type` that a rotary embedding accepts; [None] if it takes none.

    >>> layer_types(nn.Linear(2, 2))
    [None]
    """
    kinds = getattr(module, "rope_type", None)
    return list(kinds) if isinstance(kinds, dict) and kinds else [None]


def source_of(module: nn.Module, layer_type: str | None) -> Source:
    """Return the `Source` of a rotary embedding; ValueError if no trial call succeeds."""
    random = torch.Generator().manual_seed(5)
    kinds = [("axes first", axes) for axes in range(2, 7)]
    kinds += [("axes last", 2), ("axes last", 3), ("plain", 1)]
    for kind, axes in kinds:
        steps = torch.randint(1, 40, (_SEQ, axes), generator=random)
        tables = _tried(module, _positions(kind, steps), layer_type)
        tokens = (_SEQ,) if kind == "axes last" else (1, _SEQ)
        if tables is not None and tables[0].shape[:-1] == tokens:
            return Source(kind, axes, style_of(tables))
    raise ValueError("could not be tried")


def styles_of(module: nn.Module) -> set[str]:
    """Return the styles of a rotary embedding's tables; none if no trial call succeeds."""
    if (of_image := tables_of(module)) is not None:
        return {style_of(of_image)}
    try:
        return {source_of(module, kind).style for kind in layer_types(module)}
    except ValueError:
        return set()


def _positions(kind: str, steps: Tensor) -> Tensor:
    """Return positions as a module of this kind takes them, from steps (seq, axes)."""
    return {"plain": steps.T, "axes first": steps.T[:, None], "axes last": steps}[kind]


def _tried(
    module: nn.Module, positions: Tensor, layer_type: str | None
) -> tuple[Tensor, ...] | None:
    """Return what a copy of the module returns in float32; None if it refuses the positions."""
    extra = {} if layer_type is None else {"layer_type": layer_type}
    try:
        trial = copy.deepcopy(module).to("cpu")
        with torch.no_grad():
            result = trial(torch.zeros(1, dtype=torch.float32), positions, **extra)
    except REFUSALS:
        return None
    tables = result if isinstance(result, tuple) else (result,)
    is_known = len(tables) == 2 or (len(tables) == 1 and tables[0].is_complex())
    return tables if is_known else None


# --- exact tables ---


def exact_forward(module: nn.Module, model: nn.Module) -> Callable[..., object]:
    """Return a forward for `module`, a part of `model`, with float32 tables from exact angles.

    Raises ValueError if its frequencies are not known.
    """
    if any(True for _ in module.parameters()):
        raise ValueError("its frequencies are learned")
    if (maker := maker_of(module)) is not None:
        return exact_tables(module, maker, model)
    exact = {}
    for kind in layer_types(module):
        source = source_of(module, kind)
        exact[kind] = *_spec_and_axes(module, kind, source), source

    def forward(
        self: nn.Module, x: Tensor, position_ids: Tensor, layer_type: object = None
    ) -> object:
        spec, read, source = exact[layer_type if layer_type in exact else None]
        if source.kind == "axes first":
            position_ids = position_ids.expand(source.axes, -1, -1).movedim(0, -1)
        if source.kind != "plain":
            position_ids = _of_axes(position_ids, read)
        tables = full_width(source.style, *cos_sin(spec, position_ids, allow_negative=True))
        return tables if len(tables) == 2 else tables[0]

    return forward


def _of_axes(positions: Tensor, axes: list[int]) -> Tensor:
    """Return positions (..., seq, axes) of some axes, and (..., seq) of one, as a spec takes them.

    >>> _of_axes(torch.tensor([[3, 4, 5]]), [0, 2]), _of_axes(torch.tensor([[3, 4, 5]]), [1])
    (tensor([[3, 5]]), tensor([4]))
    """
    return positions[..., axes] if len(axes) > 1 else positions[..., axes[0]]


def _spec_and_axes(
    module: nn.Module, layer_type: str | None, source: Source
) -> tuple[Rotary, list[int]]:
    """Return the spec of a module's tables, and which of the position axes have a pair.

    The tables at position 1 of each axis tell which axis each pair has.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer = getattr(module, f"{prefix}inv_freq", None)
    if not isinstance(buffer, Tensor) or buffer.ndim != 1:
        raise ValueError("its tables do not follow from inv_freq alone")
    rope_type = getattr(module, "rope_type", "default")
    if isinstance(rope_type, dict):
        rope_type = rope_type.get(layer_type, "default")
    if rope_type in ("dynamic", "longrope"):
        raise ValueError("its frequencies depend on the length, which transformers keeps as state")
    columns = [_cos_sin(module, layer_type, source, step) for step in torch.eye(source.axes).long()]
    angles = torch.stack([torch.atan2(sin[0], cos[0]) for cos, sin in columns])
    axis_of_pair = angles.abs().argmax(dim=0).tolist()
    read = sorted(set(axis_of_pair))
    own = buffer.double().cpu()
    which = (angles.amax(dim=0).double()[:, None] - own).abs().argmin(dim=-1)

    def spec(frequencies: Tensor) -> Rotary:
        factor = float(getattr(module, f"{prefix}attention_scaling", 1.0))
        return Rotary(
            head_dim=2 * len(which),
            schedule="custom",
            params={"inv_freq": frequencies[which], "attention_factor": factor},
            axes=[read.index(axis) for axis in axis_of_pair] if len(read) > 1 else (),
        )

    steps = torch.randint(1, 40, (7, source.axes), generator=torch.Generator().manual_seed(3))
    theirs = _cos_sin(module, layer_type, source, steps)
    ours = cos_sin(spec(own), _of_axes(steps, read))
    for one, other in zip(theirs, ours, strict=True):
        if not torch.allclose(one, other, rtol=2e-5, atol=2e-5):
            raise ValueError("its tables do not follow from inv_freq alone")
    for position in _FAR:
        steps = torch.full((1, source.axes), position)
        try:
            theirs = _cos_sin(module, layer_type, source, steps)
        except ValueError:  # a module may have no tables there
            continue
        ours = cos_sin(spec(own), _of_axes(steps, read))
        rounding = 2e-5 + 2.0**-22 * position * own[which].abs()  # of float32 angles
        for one, other in zip(theirs, ours, strict=True):
            if ((one - other).abs() > rounding).any():
                raise ValueError(f"its frequencies at position {position} are not inv_freq")
    return spec(_float64_frequencies(module, layer_type, buffer)), read


def _cos_sin(
    module: nn.Module, layer_type: str | None, source: Source, steps: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a module, (seq, pairs), at positions (seq, axes)."""
    steps = steps.reshape(-1, source.axes)
    tables = _tried(module, _positions(source.kind, steps), layer_type)
    halves = None if tables is None else half_width(tables, source.style)
    if halves is None or halves[0].shape[:-1].numel() != len(steps):
        raise ValueError("could not be tried")
    return halves[0].reshape(len(steps), -1), halves[1].reshape(len(steps), -1)


def _float64_frequencies(module: nn.Module, layer_type: str | None, buffer: Tensor) -> Tensor:
    """Return inv_freq of the config, if rotary reads it and the buffer agrees; else the buffer.

    Where layer types differ and the module does not say its own, it may be of any.
    """
    own, config = buffer.double().cpu(), getattr(module, "config", None)
    tolerance = 8 * torch.finfo(buffer.dtype).eps
    try:
        kinds = (layer_type,) if layer_type else types_in_config(config) or (None,)
        specs = [from_hf_config(config, kind) for kind in kinds]
    except ValueError:
        return own
    for spec in filter(None, specs):
        exact = torch.tensor(inv_freq(spec)[0])
        if exact.shape == own.shape and torch.allclose(exact, own, rtol=tolerance, atol=0):
            return exact
    return own
