"""Exact tables for the modules of diffusers, timm and DINOv3 that make tables of images and videos.

The modules of `tables` take positions; these take ids of patches, an image, or its size. For each
known kind of module, this file has how to call it, and the positions that a call stands for.
"""

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..angles import cos_sin
from ..configs import from_hf_config
from ..configs.diffusers import from_diffusers_config
from ..positions import grid
from ..spec import Rotary
from .styles import REFUSALS, full_width, style_of

# in the names of classes that make tables
_NAME = re.compile("rope|rotary|pos_?embed|positionembedding|embednd", re.IGNORECASE)
_SIZES = (2, 3, 4)  # patches along each axis of the example that a module is called with
_CLOSE = 2e-5  # rounding of float32 angles of a few turns; 16-bit tables round by more


class Maker(NamedTuple):
    """A kind of module that makes tables: its method, and the name of the first parameter of that.

    examples   arguments to try; the first one that the module accepts is used
    positions  from such an argument, positions (tokens, axes) of its patches
    augments   whether training moves the positions at random
    """

    method: str
    parameter: str
    examples: Callable[[nn.Module], Iterator[object]]
    positions: Callable[[nn.Module, Tensor], Tensor] | None = None
    augments: bool = False


def maker_of(module: nn.Module) -> Maker | None:
    """Return how a module makes tables of patches; None if it is not of a known kind.

    >>> maker_of(nn.Linear(2, 2))
    """
    if not _NAME.search(type(module).__name__):
        return None  # calling every module would copy all weights of a model
    for maker in _MAKERS:
        method = getattr(type(module), maker.method, None)
        if callable(method) and list(inspect.signature(method).parameters)[1:2] == [
            maker.parameter
        ]:
            return maker if next(_tried(module, maker), None) else None
    return None


def tables_of(module: nn.Module) -> tuple[Tensor, ...] | None:
    """Return the tables that a module makes of a small image; None if it is not of a known kind."""
    maker = maker_of(module)
    return None if maker is None else next(_tried(module, maker))[1]


def exact_tables(module: nn.Module, maker: Maker, model: nn.Module) -> Callable[..., object]:
    """Return a forward for `module`, a part of `model`, with float32 tables from exact angles.

    In training, DINOv3 moves the positions at random; the module's own forward is called then.
    Raises ValueError if the config has no frequencies, or other ones than the module.
    """
    if maker.positions is None:
        raise ValueError("it does not say which positions its tables are of")
    positions_of, augments = maker.positions, maker.augments
    if others := list(inspect.signature(type(module).forward).parameters)[2:]:
        raise ValueError(f"its tables may depend on {', '.join(others)} too")
    spec = _spec(module, model)
    examples = [
        (at, tables)
        for argument, tables in _tried(module, maker)
        if isinstance(argument, Tensor)  # true of every maker that has `positions`
        if (at := positions_of(module, argument)).shape[-1] == spec.num_axes
    ]
    if not examples:
        raise ValueError(f"it takes no positions of {spec.num_axes} axes, as its config has")
    at, theirs = examples[0]
    style, shape = style_of(theirs), theirs[0].shape
    outer = [-1 if n == len(at) else 1 for n in shape[:-1]]

    def tables(at: Tensor) -> tuple[Tensor, ...]:
        wide = full_width(style, *cos_sin(spec, at, allow_negative=True))
        return tuple([table.reshape([*outer, shape[-1]]) for table in wide])

    ours = tables(at)
    if len(theirs) != len(ours) or any(
        one.shape != other.shape
        or (one - other).abs().max() > max(_CLOSE, torch.finfo(one.dtype).eps)
        for one, other in zip(theirs, ours, strict=True)
    ):
        raise ValueError("its tables are not those of its config")
    own = type(module).forward

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        xs = (*args, *kwargs.values())
        if len(xs) == 1 and isinstance(xs[0], Tensor) and not (augments and self.training):
            at = positions_of(self, xs[0])
            if at.shape[-1] == spec.num_axes:
                exact = tables(at.to(xs[0].device))
                return exact if len(exact) == 2 else exact[0]
        return own(self, *args, **kwargs)

    return forward


def _tried(module: nn.Module, maker: Maker) -> Iterator[tuple[object, tuple[Tensor, ...]]]:
    """Yield each example that a module accepts, and the float32 tables that it returns."""
    try:
        trial = copy.deepcopy(module).to("cpu").eval()
        for example in maker.examples(trial):
            try:
                with torch.no_grad():
                    answer = getattr(trial, maker.method)(example)
            except REFUSALS:
                continue
            tables = answer if isinstance(answer, tuple) else (answer,)
            if _are_of_angles(tables):
                yield example, tables
    except REFUSALS:
        return


def _are_of_angles(tables: Sequence[object]) -> TypeGuard[tuple[Tensor, ...]]:
    """Return whether these are cos and sin, in two tensors or in one."""
    tensors = [table for table in tables if isinstance(table, Tensor) and table.ndim > 1]
    if len(tensors) != len(tables) or len(tensors) not in (1, 2):
        return False
    if len(tensors) == 1:
        both = tensors[0]
        tensors = [both.real, both.imag] if both.is_complex() else list(both.chunk(2, dim=-1))
    cos, sin = tensors[0], tensors[-1]
    squares = cos.square() + sin.square() if cos.shape == sin.shape else cos * 0
    return bool((squares.float() - 1).abs().max() < 0.02)  # tables may be rounded to 16 bits


def _spec(module: nn.Module, model: nn.Module) -> Rotary:
    """Read the config of the module, as in DINOv3, or of the diffusers model around it."""
    config = getattr(module, "config", None)
    spec = from_diffusers_config(model) if config is None else from_hf_config(config)
    if spec is None:
        raise ValueError("its config says that nothing is rotated")
    return spec


# --- examples and positions of each kind ---


def _ids(module: nn.Module) -> Iterator[Tensor]:
    """Flux: ids (tokens, axes), most axes first, since it also accepts fewer than it has."""
    random = torch.Generator().manual_seed(5)
    for axes in range(6, 0, -1):
        yield torch.randint(1, 40, (24, axes), generator=random)


def _pixels(module: nn.Module) -> Iterator[Tensor]:
    """Wan and HunyuanVideo: (batch, channels, frames, height, width); images: no frames."""
    patch = _patch(module)
    sizes = _SIZES[-len(patch) :]
    yield torch.zeros(1, 1, *[n * size for n, size in zip(sizes, patch, strict=True)])


def _corners(module: nn.Module, x: Tensor) -> Tensor:
    """Return the frame, row and column of each patch, counted from 0."""
    return grid(*_counts(module, x), like=x)


def _centers(module: nn.Module, x: Tensor) -> Tensor:
    """Return the center of each patch, in [-1, 1], times 2 pi."""
    counts = _counts(module, x)
    spacing = [4 * math.pi / count for count in counts]
    return grid(*counts, spacing=spacing, origin="center", like=x)


def _counts(module: nn.Module, x: Tensor) -> list[int]:
    """Return how many patches x has along each axis."""
    return [n // size for n, size in zip(x.shape[2:], _patch(module), strict=True)]


def _patch(module: nn.Module) -> list[int]:
    """Return the frames, rows and columns of a patch; rows and columns of an image."""
    owner = getattr(module, "config", module)  # DINOv3 has its sizes there
    size = getattr(owner, "patch_size", None)
    if isinstance(size, Sequence):
        return list(size)
    frames = getattr(owner, "patch_size_t", None)  # none in CogView 4, GLM-Image and DINOv3
    return [int(each) for each in (frames, size, size) if each is not None]


def _shapes(module: nn.Module) -> Iterator[list[int]]:
    """timm: (rows, columns)."""
    yield [2, 3]


_MAKERS = (
    Maker("get_embed", "shape", _shapes),
    Maker("forward", "ids", _ids, lambda module, ids: ids.double()),
    Maker("forward", "hidden_states", _pixels, _corners),
    Maker("forward", "pixel_values", _pixels, _centers, augments=True),
)
