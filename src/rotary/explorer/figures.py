"""The pictures of the page: plotly figures, in colours that colour-blind people tell apart.

Drawn dark on white, as they are downloaded; the style sheet of the page turns them for dark mode.
"""

from typing import Any

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]

from .numbers import TOLERANCE, Numbers
from .side import Look

# Okabe and Ito, "Color universal design", 2008
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE)
INK = "#1f2937"
CONFIG = {  # what the bar over a figure can do; no logo, because it is a link to elsewhere
    "displaylogo": False,
    "displayModeBar": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg", "filename": "rotary"},
}


def wavelengths(look: Look, numbers: Numbers) -> go.Figure:
    """Tokens for one turn of each pair, log, with both lengths."""
    figure = _frame("pair", "tokens for one turn", log_y=True)
    _curve(figure, numbers, "pair", "wavelength_tokens", "one turn", mode="lines+markers")
    _line(figure, "y", look.trained, f"trained: {look.trained:,}", GREEN)
    if look.context != look.trained:
        _line(figure, "y", look.context, f"context: {look.context:,}", RED)
    return figure


def decay(look: Look, numbers: Numbers) -> go.Figure:
    """Mean size of the partial sums against distance."""
    figure = _frame("distance, tokens", "mean |S_j|", log_x=True)
    _curve(figure, numbers, "distance", "mean_partial_sum", "mean |S_j|")
    _lengths(figure, look)
    return figure


def similarity(look: Look, numbers: Numbers) -> go.Figure:
    """B_m against distance, with the first distance where it is negative."""
    figure = _frame("distance m, tokens", "B_m", log_x=True)
    _curve(figure, numbers, "distance", "similarity", "B_m")
    figure.add_hline(y=0, line_color=INK, line_width=1)
    first = numbers.marks.get("first_failure")
    if first is not None:
        at = numbers.columns["similarity"][np.searchsorted(numbers.columns["distance"], first)]
        label = f"first below 0: {first:,.0f}"
        marker = {"color": RED, "size": 11, "symbol": "diamond"}
        figure.add_scatter(x=[first], y=[at], name=label, mode="markers", marker=marker)
    _lengths(figure, look)
    return figure


def band(look: Look, numbers: Numbers) -> go.Figure:
    """Speed of each pair after the scaling over before, with the band of YaRN."""
    figure = _frame("pair", "speed after / before scaling", log_y=True)
    _curve(figure, numbers, "pair", "speed_ratio", "speed ratio", mode="lines+markers")
    last = len(numbers.columns["pair"]) - 1
    edges = [min(max(numbers.marks[name], 0), last) for name in numbers.marks]
    figure.add_vrect(
        *edges, fillcolor=ORANGE, opacity=0.18, line_width=0,
        annotation_text="YaRN blends here", annotation_position="bottom left",
    )  # fmt: skip
    ratio = numbers.columns["speed_ratio"]
    lowest = float(ratio[ratio > 0].min())
    figure.update_yaxes(range=[np.log10(min(lowest, 0.5)) - 0.1, 0.1], dtick="D2")
    return figure


def coverage(look: Look, numbers: Numbers) -> go.Figure:
    """Share of the circle seen in training, and share of the angles at the context never seen."""
    figure = _frame("pair", "share")
    _curve(figure, numbers, "pair", "circle_seen_in_training", "seen in training")
    _curve(
        figure, numbers, "pair", "unseen_at_context", "new angles at the context", RED, dash="dot"
    )
    figure.update_yaxes(range=[-0.02, 1.05], tickformat=".0%")
    return figure


def precision(look: Look, numbers: Numbers) -> go.Figure:
    """Largest error of cos or sin near a position, for each arithmetic."""
    figure = _frame(
        "position, tokens", "largest error of cos or sin nearby", log_x=True, log_y=True
    )
    styles = {
        "bfloat16": (RED, "dot"), "tf32": (PURPLE, "dash"), "float32": (BLUE, "solid"),
        "exact": (GREEN, "dashdot"),
    }  # fmt: skip
    for name, (colour, dash) in styles.items():
        _curve(figure, numbers, "position", name, name, colour, dash=dash)
    _line(figure, "y", TOLERANCE, f"{TOLERANCE:g}", INK)
    figure.update_yaxes(range=[-9, 0.5])
    return figure


def layout(look: Look, numbers: Numbers) -> go.Figure:
    """The channels of a head, coloured by the pair they belong to; those not rotated are blank."""
    figure, spec = _frame("channel", ""), look.spec
    rows = {f"reads {spec.layout}": "reads"}
    if spec.out_layout != spec.layout:
        rows[f"writes {spec.out_layout}"] = "writes"
    bar = {"title": "pair", "thickness": 12, "outlinewidth": 0}
    _cells(figure, numbers, rows, "pair", colorscale="Cividis", colorbar=bar)
    if spec.num_axes > 1:
        last = spec.num_axes - 1
        shades = [[axis / last, PALETTE[axis % len(PALETTE)]] for axis in range(last + 1)]
        above = dict.fromkeys(rows, "")
        _cells(
            figure, numbers, {**above, "position axis": "axis"}, "axis",
            colorscale=shades, showscale=False,
        )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False, tickangle=-90)
    return figure


def _cells(
    figure: go.Figure, numbers: Numbers, rows: dict[str, str], name: str, **style: Any
) -> None:
    """A heatmap with one row for each name, blank where it names no column."""
    channels = numbers.columns["channel"]
    blank = np.full(len(channels), np.nan)
    figure.add_heatmap(
        z=np.array([numbers.columns.get(column, blank) for column in rows.values()]),
        x=channels, y=list(rows), ygap=6, hoverongaps=False, **style,
        hovertemplate=f"channel %{{x}}<br>%{{y}}: {name} %{{z}}<extra></extra>",
    )  # fmt: skip


def _frame(x: str, y: str, *, log_x: bool = False, log_y: bool = False) -> go.Figure:
    """An empty figure with titled axes; a log axis says its numbers in full words of ten."""
    axis: dict[str, Any] = {
        "gridcolor": "#d9dde3", "linecolor": INK, "ticks": "outside", "zeroline": False,
        "automargin": True, "exponentformat": "power",
    }  # fmt: skip
    log = {"type": "log", "dtick": 1}
    return go.Figure(
        layout={
            "template": "none",
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "height": 420,
            "margin": {"l": 55, "r": 12, "t": 64, "b": 50},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "hovermode": "closest",
            "xaxis": {**axis, "title": x, **(log if log_x else {})},
            "yaxis": {**axis, "title": y, **(log if log_y else {})},
        }
    )


def _curve(
    figure: go.Figure,
    numbers: Numbers,
    x: str,
    y: str,
    name: str,
    colour: str = BLUE,
    *,
    dash: str = "solid",
    mode: str = "lines",
) -> None:
    figure.add_scatter(
        x=numbers.columns[x], y=numbers.columns[y], name=name, mode=mode, showlegend=True,
        line={"color": colour, "dash": dash, "width": 2}, marker={"color": colour, "size": 4},
        hovertemplate=f"{x.replace('_', ' ')} %{{x:,}}<br>%{{y:,.6g}}<extra>{name}</extra>",
    )  # fmt: skip


def _lengths(figure: go.Figure, look: Look) -> None:
    if look.trained <= look.context:
        _line(figure, "x", look.trained, "trained", GREEN)


def _line(figure: go.Figure, axis: str, at: float, label: str, colour: str) -> None:
    """A dashed line across the figure; plotly places its label by log10 on a log axis."""
    add = figure.add_hline if axis == "y" else figure.add_vline
    add(**{axis: at}, line={"color": colour, "dash": "dash", "width": 2})
    place: dict[str, Any] = {"x": 0.01, "xref": "paper", "xanchor": "left", "yanchor": "bottom"}
    if axis == "x":
        place = {"y": 0.01, "yref": "paper", "xanchor": "right", "yanchor": "bottom"}
    figure.add_annotation(
        **{axis: float(np.log10(at))}, **place, text=label, showarrow=False, font={"color": colour}
    )
