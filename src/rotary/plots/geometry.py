"""Plots of pairs, layouts of channels, axes, positions and ranks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from .. import positions as builders
from ..analysis.decay import angles_at
from ..analysis.spectrum import wavelengths, whole_number, whole_numbers
from ..layouts import LAYOUTS, pair_indices, row_permutation
from ..spec import Rotary
from .points import MAX_POINTS
from .style import (
    BLUE,
    GREY,
    ON_COLOUR,
    VERMILLION,
    Specs,
    curve,
    heading,
    label,
    legend,
    named,
    panels,
    write,
)

MAX_CIRCLES = 8
ARROWS = ((BLUE, 3.0), (VERMILLION, 1.5))  # colour and width, before and after
AXIS_NAMES = {1: ("position",), 2: ("row", "column"), 3: ("time", "row", "column")}


def unit_circle(
    spec: Specs,
    position: int,
    distance: int,
    *,
    pairs: Sequence[int] | None = None,
    seq_len: int | None = None,
) -> Figure:
    """Draw the angles of chosen pairs at `position` and `distance` tokens on, one circle each.

    pairs  up to 8 of them; default: 6 from the fastest to the slowest
    For an animation, call it for one position after another. Raises ValueError for a pair that
    does not exist.

    >>> len(unit_circle(Rotary(head_dim=128), 100, 10).axes)
    6
    """
    ((name, spec),) = named(spec, 1).items()
    last = spec.rotary_dim // 2 - 1
    at = [whole_number("position", position, 0)]
    at.append(at[0] + whole_number("distance", distance, 0))
    if pairs is None:
        pairs = np.unique(np.linspace(0, last, 6).round().astype(int)).tolist()
    chosen = whole_numbers("pairs", pairs, 0, last).tolist()
    if not 0 < len(chosen) <= MAX_CIRCLES:
        raise ValueError(f"pairs must be 1 to {MAX_CIRCLES} pairs, got {len(chosen)}")
    angles = angles_at(spec, at, seq_len=seq_len)
    turns_in = wavelengths(spec, seq_len)
    columns = min(4, len(chosen)) if len(chosen) != 6 else 3
    rows = -(-len(chosen) // columns)
    figure, circles = panels(rows, columns, width=2.2 * columns + 0.6, height=2.5 * rows + 0.6)
    heading(figure, name)
    for panel in circles[len(chosen) :]:
        panel.remove()
    arrows: list[Artist] = []
    for panel, pair in zip(circles, chosen, strict=False):
        panel.add_patch(Circle((0, 0), 1, fill=False, color=GREY, linewidth=0.8))
        arrows = [
            panel.plot(
                [0, np.cos(angle)], [0, np.sin(angle)], color=colour, linewidth=width,
                marker="o", markevery=[1], markersize=6,
            )[0]
            for angle, (colour, width) in zip(angles[:, pair], ARROWS, strict=True)
        ]  # fmt: skip
        panel.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
        panel.set_axis_off()
        length = turns_in[pair]
        text = f"{length:,.{1 if length < 1000 else 0}f} tokens a turn"
        text = text if np.isfinite(length) else "stands still"
        panel.set_title(f"pair {pair}: {text}", fontsize=9)
    names = (f"position {at[0]:,}", f"position {at[1]:,}")
    return legend(figure, list(zip(names, arrows, strict=True)))


def layout(spec: Specs, *, num_heads: int = 4, num_key_heads: int = 2) -> Figure:
    """Draw the pairs of channels in both layouts, and how rows of W_q and W_k move between them.

    Above: the channels of a head, coloured by their pair, grey if they are not rotated; small heads
    show the number of the pair. Below: the permutations of the rows of the query and key
    projections from `spec.layout` to the other layout; lines separate the heads.
    Raises ValueError for more than 4096 rows.

    >>> len(layout(Rotary(head_dim=8)).axes)
    4
    """
    ((name, spec),) = named(spec, 1).items()
    counts = [whole_number("num_heads", num_heads), whole_number("num_key_heads", num_key_heads)]
    whole_number("num_heads x head_dim", max(counts) * spec.head_dim, 1, MAX_POINTS)
    figure = Figure(figsize=(8, 7), layout="constrained", dpi=100)
    heading(figure, name)
    rows = figure.add_gridspec(3, 2, height_ratios=[0.5, 0.5, 4])
    for row, pairing in enumerate(LAYOUTS):
        strip = figure.add_subplot(rows[row, :])
        _strip(strip, spec, pairing)
    strip.set_xlabel("channel of a head, coloured by its pair", fontsize=9)
    other = next(pairing for pairing in LAYOUTS if pairing != spec.layout)
    for column, (count, what) in enumerate(zip(counts, ("W_q", "W_k"), strict=True)):
        order = row_permutation(
            count, spec.head_dim, spec.layout, other, rotary_dim=spec.rotary_dim, start=spec.start
        )
        panel = figure.add_subplot(rows[2, column])
        size = max(0.5, min(6.0, 300 / order.size))
        panel.plot(order, np.arange(order.size), "s", markersize=size, color=BLUE)
        for border in range(spec.head_dim, order.size, spec.head_dim):
            panel.axhline(border - 0.5, color=GREY, linewidth=0.5)
            panel.axvline(border - 0.5, color=GREY, linewidth=0.5)
        panel.set(xlim=(-0.5, order.size - 0.5), ylim=(order.size - 0.5, -0.5), aspect="equal")
        heads = f"{count} head{'s' if count > 1 else ''}"
        label(panel, f"row before, {spec.layout}", f"row after, {other}", f"{what}, {heads}")
    return figure


def _strip(panel: Axes, spec: Rotary, name: str) -> None:
    pairs = np.full(spec.head_dim, np.nan)
    members = pair_indices(spec.rotary_dim, name, spec.start)
    pairs[members] = np.arange(len(members))[:, None]
    panel.imshow(
        np.ma.masked_invalid(pairs[None]), aspect="auto", cmap="viridis", vmin=0,
        vmax=max(len(members) - 1, 1), interpolation="nearest",
    )  # fmt: skip
    panel.set_facecolor("0.8")
    panel.set_yticks([])
    roles = [role for role, own in (("read", spec.layout), ("written", spec.out_layout))
             if own == name]  # fmt: skip
    by_spec = f", {' and '.join(roles)} by this spec" if roles else ""
    panel.set_title(f"{name}{by_spec}", loc="left", fontsize=10)
    if spec.head_dim <= 32:
        for channel, pair in enumerate(pairs):
            text = "" if np.isnan(pair) else f"{pair:.0f}"
            _write_inside(panel, channel, 0, text, is_dark=pair < len(members) / 2)


def _write_inside(panel: Axes, x: float, y: float, text: str, *, is_dark: bool) -> None:
    color = "white" if is_dark else "black"
    write(panel, x, y, text, ha="center", va="center", color=color, gid=ON_COLOUR)


def grid(spec: Specs, *, positions: npt.ArrayLike | None = None, ranks: int = 4) -> Figure:
    """Draw the axis of each pair, the position of every token on each axis, and its rank.

    positions  (tokens,) or (tokens, axes), from `rotary.positions`; default: text for one axis, an
               image of 4 x 8 patches for two axes, text, an image of 4 x 6 and text for three
    ranks      number of ranks of context parallelism, with one piece each ("contiguous"), or with
               the first and the last of 2 x ranks pieces paired ("head-tail"), which balances
               causal attention
    Up to 4096 tokens. Raises ValueError for positions that do not fit the axes.

    >>> vision = Rotary(head_dim=128, axes=builders.sections(16, 24, 24))
    >>> len(grid(vision).axes)
    3
    """
    ((name, spec),) = named(spec, 1).items()
    ids = _ids(spec, positions)
    ranks = whole_number("ranks", ranks, 1, 64)
    figure, (bands, places, shares) = panels(3, 1, width=8, height=7.5)
    heading(figure, name)
    names = AXIS_NAMES.get(spec.num_axes, tuple(f"axis {a}" for a in range(spec.num_axes)))
    length = wavelengths(spec)
    driven = np.array(spec.axes or (0,) * length.size)
    entries = []
    for axis, direction in enumerate(names):
        pairs = np.flatnonzero(driven == axis)
        style = {"color": curve(axis)["color"], "marker": "os^Dv<>"[axis % 7]}
        dots = bands.plot(pairs, length[pairs], linestyle="none", markersize=4, **style)[0]
        entries.append((f"{direction}: {pairs.size} pairs", dots))
        places.plot(ids[:, axis], linewidth=1, markersize=3, **style)
    bands.set_yscale("log")
    label(bands, "pair", "wavelength, tokens", "The axis that drives each pair")
    label(places, "token", "position", "Position on each axis")
    _ranks(shares, len(ids), ranks)
    return legend(figure, entries)


def _ids(spec: Rotary, positions: npt.ArrayLike | None) -> npt.NDArray[np.float64]:
    if positions is None:
        defaults = {
            1: lambda: builders.arange(32),
            2: lambda: builders.grid_2d(4, 8),
            3: lambda: builders.mrope([("text", 6), ("image", 1, 4, 6), ("text", 6)]),
        }
        positions = defaults.get(spec.num_axes, lambda: builders.grid(*(2,) * spec.num_axes))()
    ids = np.asarray(positions, np.float64)
    ids = ids[:, None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[1] != spec.num_axes or not 0 < len(ids) <= MAX_POINTS:
        raise ValueError(
            f"positions must be (tokens, {spec.num_axes}) with 1 to {MAX_POINTS} tokens, "
            f"got shape {np.shape(positions)}"
        )
    if not np.isfinite(ids).all():
        raise ValueError("positions must be finite")
    return ids


def _ranks(panel: Axes, tokens: int, ranks: int) -> None:
    token = np.arange(tokens)
    half = token * 2 * ranks // tokens
    rows = {"contiguous": half // 2, "head-tail": np.minimum(half, 2 * ranks - 1 - half)}
    panel.imshow(
        np.stack(list(rows.values())), aspect="auto", interpolation="nearest",
        cmap="viridis", vmin=0, vmax=max(ranks - 1, 1),
    )  # fmt: skip
    panel.set_yticks([0, 1], list(rows))
    panel.axhline(0.5, color="white", linewidth=3)
    for row, owner in enumerate(rows.values()):
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], tokens], strict=True):
            if stop - start >= tokens / 40:  # a narrower piece has no room for its number
                middle, rank = (start + stop - 1) / 2, owner[start]
                _write_inside(panel, middle, row, str(rank), is_dark=rank < ranks / 2)
    label(panel, "token", "", f"Rank of each token, of {ranks} in context parallelism")
