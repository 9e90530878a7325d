"""The views of the page: each is one entry, by the name it has in a link."""

from collections.abc import Callable
from typing import NamedTuple

import plotly.graph_objects as go  # type: ignore[import-untyped]

from . import figures, numbers
from .side import Look


class View(NamedTuple):
    """A title, one sentence about it, the numbers of a RoPE and the figure that shows them."""

    title: str
    about: str
    numbers: Callable[[Look], numbers.Numbers]
    draw: Callable[[Look, numbers.Numbers], go.Figure]


VIEWS = {
    "wavelengths": View(
        "Wavelengths",
        "Tokens that each pair of channels needs for one whole turn.",
        numbers.wavelengths,
        figures.wavelengths,
    ),
    "decay": View(
        "Decay",
        "RoFormer, figure 2: the mean size of the partial sums, which bounds a score.",
        numbers.decay_curve,
        figures.decay,
    ),
    "similarity": View(
        "Similarity",
        "Men et al.: by how much a similar key is preferred to a random one.",
        numbers.similarity,
        figures.similarity,
    ),
    "band": View(
        "Scaling",
        "What the scaling does to the speed of each pair, and the band where YaRN blends.",
        numbers.band,
        figures.band,
    ),
    "coverage": View(
        "Coverage",
        "How much of its circle each pair saw in training, and what is new at the context.",
        numbers.coverage,
        figures.coverage,
    ),
    "precision": View(
        "Precision",
        "What an angle computed in 32 or 16 bits does to cos and sin.",
        numbers.error_of_angles,
        figures.precision,
    ),
    "layout": View(
        "Layout",
        "Which channels of a head turn together.",
        numbers.layout,
        figures.layout,
    ),
}
