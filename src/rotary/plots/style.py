"""Shared parts of all plots: colours, names of curves, empty panels, the legend."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..angles import inv_freq
from ..spec import Rotary
from .points import MAX_POINTS

Style = dict[str, Any]  # colour and dashes of a curve, as options of matplotlib
Specs = Rotary | Mapping[str, Rotary] | Sequence[Rotary]

# Okabe and Ito, Color Universal Design (2008), without its yellow, which is hard to see on white
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
BLUE, VERMILLION, GREEN = PALETTE[:3]
DASHES = ("-", "--")
ON_COLOUR = "on a colour"  # gid of what is drawn inside a heat map, which keeps its own colour
GREY, SHADE = "0.45", "0.92"
MAX_CURVES = len(PALETTE) * len(DASHES)
MAX_NAME = 44
MAX_HEAD_DIM = 2 * MAX_POINTS
CHARACTERS_PER_INCH = 13  # of a 9 point font


def named(specs: Specs, most: int = MAX_CURVES) -> dict[str, Rotary]:
    """Return name -> spec to draw: the given names, or `described` for specs without names.

    Raises ValueError for no specs, for more than `most`, and for an object that is not a `Rotary`.
    """
    if isinstance(specs, Rotary):
        specs = [specs]
    if isinstance(specs, Mapping):
        pairs = list(specs.items())
    elif isinstance(specs, list | tuple):
        pairs = [(described(spec), spec) for spec in specs]
    else:
        raise ValueError(f"specs must be a Rotary, a list or a dict of them, got {specs!r:.80}")
    if not 0 < len(pairs) <= most:
        raise ValueError(f"this plot takes 1 to {most} specs, got {len(pairs)}")
    by_name: dict[str, Rotary] = {}
    for name, spec in pairs:
        if not isinstance(spec, Rotary):
            raise ValueError(f"specs must hold Rotary, got {spec!r:.80} for {plain(name)!r}")
        if spec.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"plots show heads of up to {MAX_HEAD_DIM} channels, got {spec.head_dim}"
            )
        label, again = plain(name), 2
        while label in by_name:
            label, again = f"{plain(name)} ({again})", again + 1
        by_name[label] = spec
    return by_name


def of_each(
    what: str, value: int | Mapping[str, int] | None, models: Mapping[str, Rotary]
) -> dict[str, int]:
    """Return name -> number, of one number for all models or of {name: number}; {} of None.

    Raises ValueError, with `what` in its text, for a name that is none of the models.

    >>> of_each("length", 9, {"a": Rotary(head_dim=8)})
    {'a': 9}
    """
    if not isinstance(value, Mapping):
        return {} if value is None else dict.fromkeys(models, value)
    found = {plain(name): number for name, number in value.items()}
    if unknown := set(found) - set(models):
        raise ValueError(f"{what} names {sorted(unknown)[0]!r}, which is not among the specs")
    return found


def curves(specs: Specs) -> Iterator[tuple[str, Rotary, Style]]:
    """Yield the name, the spec, and the colour and dashes of the curve of each spec."""
    for index, (name, spec) in enumerate(named(specs).items()):
        yield name, spec, curve(index)


def described(spec: Rotary) -> str:
    """Describe a spec in a few words, for a legend.

    >>> described(Rotary(head_dim=8, rotary_dim=4, schedule="linear", params={"factor": 2.0}))
    'base 10,000, linear x 2, 4 of 8 channels'
    """
    if not isinstance(spec, Rotary):
        raise ValueError(f"specs must hold Rotary, got {spec!r:.80}")
    base = "" if spec.schedule == "custom" else f"base {spec.base:,.10g}"
    schedule = "" if spec.schedule == "default" else scaling(spec)
    head = f"head_dim {spec.head_dim}"
    if spec.rotary_dim < spec.head_dim:
        head = f"{spec.rotary_dim} of {spec.head_dim} channels"
    return ", ".join(filter(None, (base, schedule, head)))


def scaling(spec: Rotary) -> str:
    """Return the schedule and its factor as text.

    >>> scaling(Rotary(head_dim=8, schedule="linear", params={"factor": 2.0}))
    'linear x 2'
    """
    factor = spec.params.get("factor")
    return spec.schedule + (f" x {factor:g}" if isinstance(factor, int | float) else "")


def attention_suffix(spec: Rotary, seq_len: int | None) -> str:
    """Return the attention factor as a suffix of a curve's name: "" if it is 1."""
    factor = inv_freq(spec, seq_len)[1]
    return "" if factor == 1 else f", attention factor {factor:.4g}"


def plain(name: object, most: int = MAX_NAME) -> str:
    """Return a name as one short line: control characters escaped, a long middle left out.

    >>> plain("a\\nb"), plain("x" * 50, 9)
    ('a\\\\nb', 'xxxxx…xxx')
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(name))
    if len(text) > most:
        text = text[: most - most // 3 - 1] + "…" + text[len(text) - most // 3 :]
    return text


def curve(index: int) -> Style:
    """Return colour and dashes of curve number `index`."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "linestyle": DASHES[index // len(PALETTE) % len(DASHES)],
    }


def panels(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 4.5,
           log: str = "", **options: Any) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """Return a new figure and its panels, row by row; `width` and `height` of the figure in inches.

    log  which axes have a log scale: "x", "y" or "xy"
    """
    figure = Figure(figsize=(width, height), layout="constrained", dpi=100)
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9)
        panel.set(**{f"{axis}scale": "log" for axis in log})
    return figure, axes


def label(panel: Axes, x: str, y: str, title: str = "") -> None:
    """Write the labels of the axes, with units, and a short title, as plain text."""
    panel.set_xlabel(x, parse_math=False)
    panel.set_ylabel(y, parse_math=False)
    if title:
        panel.set_title(title, parse_math=False, loc="left", fontsize=11)


def heading(figure: Figure, name: str) -> None:
    """Write the name of the spec or measurement above all panels."""
    wide = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    figure.suptitle(
        textwrap.fill(name, wide), x=0.01, ha="left", fontsize=9, color=GREY, parse_math=False
    )


def write(panel: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Write plain text into a panel, at data coordinates (x, y) unless `transform` is given."""
    panel.text(x, y, text, **{"parse_math": False, "fontsize": 9, "color": GREY, **options})


def legend(figure: Figure, entries: Sequence[tuple[str, Artist]]) -> Figure:
    """Add a legend below the panels, where no data is, and return the figure; names are plain."""
    if not entries:
        return figure
    names, artists = zip(*entries, strict=True)
    room = figure.get_figwidth() * CHARACTERS_PER_INCH
    columns = math.floor(room / (max(map(len, names)) + 7))
    # matplotlib 3.8 drops a name that begins with "_", so it comes later
    box = figure.legend(
        artists,
        ["curve"] * len(names),
        loc="outside lower left",
        ncols=min(max(columns, 1), len(names)),
        frameon=False,
        fontsize=9,
    )
    for text, name in zip(box.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)
    return figure
