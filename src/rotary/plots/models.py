"""Plots that compare models, and measured times with the speed of memory."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ..analysis import bounds, spectrum
from ..analysis.spectrum import whole_number
from ..spec import Rotary
from .style import (
    GREY,
    Specs,
    curve,
    heading,
    label,
    legend,
    named,
    of_each,
    panels,
    plain,
    scaling,
    write,
)

MAX_ROWS = 40
MAX_MEASURED = 4096
SPEEDS = 10.0 ** np.arange(6, 14)  # bytes per second
# heading of each column, and its start as a share of the width
COLUMNS = (
    ("model", 0.0), ("rotated", 0.155), ("layout", 0.23), ("base", 0.345), ("schedule", 0.42),
    ("longest wavelength", 0.555), ("first failure", 0.685),
)  # fmt: skip
STRIP = (0.79, 1.0)
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("B", 1.0))


def gallery(
    specs: Specs, length: int = 2**20, *, seq_len: int | Mapping[str, int] | None = None
) -> Figure:
    """Draw a table of models, one row each: their RoPE, and the wavelengths of their pairs.

    length   the largest distance at which a first failure is searched for
    seq_len  length of the sequence, or {name in specs: length}: wavelengths and first failures are
             those after scaling, and LongRoPE and dynamic NTK take effect at this length
    Cells that differ from the first row are black, the others grey. The strip shows the wavelength
    of every pair, from the first to the last, on one log scale for all rows; pairs that stand still
    are white. Up to 40 specs. Raises ValueError for a name in seq_len that is not in specs.

    >>> figure = gallery({"Llama 2": Rotary(head_dim=128)}, length=4096)
    >>> "1,707" in [text.get_text() for text in figure.axes[0].texts]
    True
    """
    length = whole_number("length", length)
    models = named(specs, MAX_ROWS)
    sizes = of_each("seq_len", seq_len, models)
    rows = [_cells(name, spec, length, sizes.get(name)) for name, spec in models.items()]
    figure, (panel,) = panels(width=12, height=1.6 + 0.27 * len(rows))
    panel.set_axis_off()
    waves = [np.log10(spectrum.wavelengths(s, sizes.get(name))) for name, s in models.items()]
    moving = np.concatenate([wave[np.isfinite(wave)] for wave in waves])
    low, high = (moving.min(), moving.max()) if moving.size else (0.0, 1.0)
    for column, x in (*COLUMNS, ("wavelength of every pair", STRIP[0])):
        write(panel, x, -1, column, va="center", color="black", fontsize=9, weight="bold")
    for row, (cells, wave) in enumerate(zip(rows, waves, strict=True)):
        for (_, x), cell, first in zip(COLUMNS, cells, rows[0], strict=True):
            differs = row == 0 or cell != first
            write(panel, x, row, cell, va="center", color="black" if differs else GREY)
        image = panel.imshow(
            np.ma.masked_invalid(wave[None]), aspect="auto", cmap="cividis", vmin=low, vmax=high,
            interpolation="nearest", extent=(*STRIP, row + 0.4, row - 0.4),
        )  # fmt: skip
    title = f"Models side by side, after scaling; in tokens, first failure up to {length:,}"
    write(panel, 0, -2, title, fontsize=11, color="black")
    panel.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -2.6))
    bar = figure.colorbar(image, ax=panel, location="bottom", shrink=0.4, aspect=40, anchor=(1, 1))
    bar.set_label("wavelength, log10 of tokens", fontsize=9)
    return figure


def _cells(name: str, spec: Rotary, length: int, seq_len: int | None) -> tuple[str, ...]:
    width = f"{spec.rotary_dim}"
    width += f" of {spec.head_dim}" if spec.rotary_dim < spec.head_dim else ""
    pairs = spec.layout + ("" if spec.out_layout == spec.layout else f" to {spec.out_layout}")
    axes = f", {spec.num_axes} axes" if spec.num_axes > 1 else ""
    waves = spectrum.wavelengths(spec, seq_len)
    longest = waves[np.isfinite(waves)].max(initial=0.0)
    failing = bounds.first_failure(spec, length, seq_len=seq_len)
    return (
        plain(name, 24),
        width,
        pairs,
        "any" if spec.schedule == "custom" else f"{spec.base:,.7g}",
        scaling(spec) + axes,
        f"{longest:,.0f}" if longest else "none",
        "none" if failing is None else f"{failing:,}",
    )


def roofline(
    measured: Mapping[str, Sequence[tuple[float, float]]],
    *,
    bandwidth: float | None = None,
    setting: str = "",
) -> Figure:
    """Draw time against bytes moved, log scales, one curve per kernel, and lines of equal speed.

    measured   {name: [(bytes read and written, seconds), ...]}, as benchmarks give them
    bandwidth  of the memory, bytes per second: the roof for arrays that do not fit in the caches
    setting    what was measured, and where: shapes, dtype, machine
    Rotation does few operations for each byte, so its roof is the memory's speed. Raises ValueError
    for numbers that are not finite and above 0.

    >>> roofline({"copy": [(1e6, 1e-4), (1e8, 1e-2)]}).axes[0].get_ylabel()
    'time, s'
    """
    if not isinstance(measured, Mapping) or not measured:
        raise ValueError("measured must map at least one name to its (bytes, seconds)")
    figure, (panel,) = panels(log="xy")
    entries = []
    for index, (name, pairs) in enumerate(measured.items()):
        points = np.array(sorted(_point(name, pair) for pair in pairs))
        if not 0 < len(points) <= MAX_MEASURED:
            raise ValueError(f"{plain(name)!r} must have 1 to {MAX_MEASURED} points")
        line = panel.plot(points[:, 0], points[:, 1], marker="o", markersize=4, **curve(index))[0]
        entries.append((plain(name), line))
    panel.margins(0.08)
    low, high = panel.get_xlim()
    high *= (high / low) ** 0.06  # room for the speeds
    bottom, top = panel.get_ylim()
    ends = np.array([low, high])
    for speed in SPEEDS[(low / top < SPEEDS) & (high / bottom > SPEEDS)]:
        panel.plot(ends, ends / speed, color="0.85", linewidth=0.8, zorder=0)
        x = min(high, top * speed)
        write(panel, x, x / speed, _speed(speed), ha="right", va="top", fontsize=8)
    if bandwidth is not None:
        _point("bandwidth", (bandwidth, 1.0))
        roof = panel.plot(ends, ends / bandwidth, color="black", linewidth=2, zorder=0)[0]
        entries.append((f"roof, {_speed(bandwidth)}", roof))
    panel.set(xlim=(low, high), ylim=(bottom, top))
    heading(figure, setting)
    label(panel, "bytes read and written", "time, s", "Time against bytes moved")
    return legend(figure, entries)


def _speed(speed: float) -> str:
    unit, size = next((u, s) for u, s in UNITS if speed >= s or u == "B")
    return f"{speed / size:,.3g} {unit}/s"


def _point(name: object, pair: tuple[float, float]) -> tuple[float, float]:
    try:
        moved, seconds = (float(value) for value in pair)
    except (TypeError, ValueError):
        raise ValueError(f"{plain(name)!r} must hold (bytes, seconds), got {pair!r:.60}") from None
    if not (0 < moved < np.inf and 0 < seconds < np.inf):
        raise ValueError(f"{plain(name)!r} must hold finite numbers above 0, got {pair!r:.60}")
    return moved, seconds
