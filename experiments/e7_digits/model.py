"""A small bidirectional transformer that names the digit of an image, one token for each pixel."""

import dataclasses
import math
import zlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import rotary
from rotary.attention import mixed_cos_sin, mixed_directions
from rotary.positions import grid

from ..lab import model as lab
from ..lab.data import seed_of
from .images import CLASSES, SIDE

Tensor = torch.Tensor

ENCODINGS = ("learned", "axial", "mixed", "none")
AXIAL_BASE, MIXED_BASE = 100.0, 10.0  # of Heo et al. (arXiv 2403.13298) and their code


@dataclasses.dataclass(frozen=True)
class Config:
    """What a model is; `encoding` is one of ENCODINGS.

    >>> Config("rope")
    Traceback (most recent call last):
    ValueError: encoding must be one of learned, axial, mixed, none; got 'rope'
    """

    encoding: str
    layers: int = 3
    width: int = 64
    heads: int = 4

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ValueError(
                f"encoding must be one of {', '.join(ENCODINGS)}; got {self.encoding!r}"
            )

    @property
    def spec(self) -> rotary.Rotary:
        """Axial RoPE: the first half of the pairs turns by the row, the other by the column.

        >>> Config("axial").spec.axes
        (0, 0, 0, 0, 1, 1, 1, 1)
        """
        head_dim = self.width // self.heads
        return rotary.Rotary(
            head_dim=head_dim, base=AXIAL_BASE, schedule="axial", params={"num_axes": 2},
            axes=(0,) * (head_dim // 4) + (1,) * (head_dim // 4),
        )  # fmt: skip


class Model(nn.Module):
    """Logits of the ten digits; `build` makes one whose weights follow from a seed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.pixel = nn.Linear(1, config.width)
        if config.encoding == "learned":
            self.places = nn.Parameter(torch.empty(SIDE**2, config.width))
        if config.encoding == "mixed":
            shape = (2, config.heads, config.width // config.heads // 2)
            self.directions = nn.ParameterList(torch.empty(shape) for _ in range(config.layers))
        block = lab.Config(
            "none", causal=False, layers=config.layers, width=config.width, heads=config.heads
        )
        self.blocks = nn.ModuleList([lab.Block(block) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, CLASSES, bias=False)

    def forward(self, pixels: Tensor, spacing: float = 1.0) -> Tensor:
        """(images, 1, 10) from (images, side * side), neighbours `spacing` apart.

        At another side than 8 learned places are interpolated to the span of the trained ones, as
        ViT does (Dosovitskiy et al., arXiv 2010.11929, section 3.2). Raises ValueError where they
        would have to go on beyond it.
        """
        side = math.isqrt(pixels.shape[1])
        x = self.pixel(pixels[..., None])
        if self.config.encoding == "learned":
            if side * spacing != SIDE:
                raise ValueError(
                    f"learned places span {SIDE} pixels, got {side} that are {spacing} apart"
                )
            x = x + interpolated(self.places, side)
        for block, turn in zip(self.blocks, self.turns(side, spacing), strict=True):
            x = block(x, turn)
        return self.head(self.norm(x).mean(1, keepdim=True))

    def turns(self, side: int, spacing: float) -> list[lab.Turn]:
        """What turns q and k in each layer: at (row, column) times the spacing."""
        places = torch.from_numpy(grid(side, side)).to(self.head.weight.device)
        if spacing != 1:
            places = places * float(spacing)
        if self.config.encoding == "axial":
            tables = [rotary.cos_sin(self.config.spec, places)] * self.config.layers
        elif self.config.encoding == "mixed":
            tables = [mixed_cos_sin(directions, places) for directions in self.directions]
        else:
            return [lambda q, k: (q, k)] * self.config.layers
        return [_turn(cos, sin) for cos, sin in tables]


def _turn(cos: Tensor, sin: Tensor) -> lab.Turn:
    return lambda q, k: rotary.rotate((q, k), cos, sin, layout="half", seq_dim=-2)


def interpolated(places: Tensor, side: int) -> Tensor:
    """Learned places of another grid, (side^2, width) from (64, width), bicubic between centres.

    >>> places = torch.arange(64.0)[:, None]
    >>> torch.equal(interpolated(places, 8), places)
    True
    """
    if side == SIDE:
        return places
    square = places.T.unflatten(1, (SIDE, SIDE))[None]
    larger = functional.interpolate(square, size=(side, side), mode="bicubic")
    return larger[0].flatten(1).T


def build(config: Config, seed: int) -> Model:
    """A model whose weights are a function of (config, seed); what two configs share starts equal.

    Matrices have deviation 1 / sqrt(inputs), those that add to the sum 1 / sqrt(2 layers) of it;
    learned places start with 0.02, as in ViT; directions at random phases.

    >>> axial, none = (build(Config(name), seed=0) for name in ("axial", "none"))
    >>> torch.equal(axial.head.weight, none.head.weight)
    True
    """
    model = Model(config)
    for name, weight in model.named_parameters():
        seeded = seed_of(seed, zlib.crc32(name.encode()))
        if name.startswith("directions"):
            phases = np.random.default_rng(seeded).uniform(0, 2 * np.pi, config.heads)
            start = mixed_directions(config.width // config.heads, phases, MIXED_BASE)
            weight.data.copy_(torch.from_numpy(start))
        elif weight.dim() == 2:
            chance = torch.Generator().manual_seed(seeded)
            nn.init.normal_(weight, std=_deviation(name, weight, config), generator=chance)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return model


def _deviation(name: str, weight: Tensor, config: Config) -> float:
    if name == "places":
        return 0.02
    into_sum = name.endswith(("out.weight", "narrower.weight"))
    return float(weight.shape[1]) ** -0.5 / (math.sqrt(2 * config.layers) if into_sum else 1)
