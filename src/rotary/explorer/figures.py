"""The data of a picture: curves, lines, a band, bars or rows of cells over two axes.

`chart.js` draws it as an SVG in the browser. A curve names the columns that it draws. Colours are
names of the style sheet, so that they follow the colour scheme.
"""

import dataclasses
import json
from dataclasses import dataclass

import numpy as np

from ..kernels import Numbers
from ..strict_json import JSON


@dataclass(frozen=True)
class Axis:
    """The title of an axis, whether it is logarithmic, and its ends; None: ends of the data."""

    title: str
    is_log: bool = False
    ends: tuple[float, float] | None = None
    is_share: bool = False


@dataclass(frozen=True)
class Curve:
    """The column `y` against the first one, as a line; also as dots where pairs are counted."""

    y: str
    name: str
    colour: str = "blue"
    dash: str = ""
    has_dots: bool = False


@dataclass(frozen=True)
class Line:
    """A dashed line across the figure at a value of one axis, with its label."""

    axis: str
    at: float
    label: str
    colour: str


@dataclass(frozen=True)
class Point:
    """One point with a label, such as a first failure."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Band:
    """A shaded range of x."""

    start: float
    stop: float
    label: str


@dataclass(frozen=True)
class Row:
    """A row of cells, coloured by the numbers of a column; NaN leaves a cell blank."""

    column: str
    name: str
    of: str


@dataclass(frozen=True)
class Bar:
    """A bar of this length on the x axis, with its name and a text beside it; red if `is_short`."""

    name: str
    length: float
    text: str
    is_short: bool = False


@dataclass(frozen=True)
class Figure:
    """Two axes and everything drawn over them.

    moving  `kind`, the name of a script, and what it draws: see `moving.py`
    """

    x: Axis
    y: Axis
    curves: tuple[Curve, ...] = ()
    lines: tuple[Line, ...] = ()
    points: tuple[Point, ...] = ()
    band: Band | None = None
    rows: tuple[Row, ...] = ()
    bars: tuple[Bar, ...] = ()
    moving: dict[str, JSON] | None = None


@dataclass(frozen=True)
class Table:
    """Headers, and rows of as many texts."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """What a view shows.

    columns  arrays of one length;  words  their meaning in sentences
    tables   numbers as text below the words;  config  text to copy into a config.json, or ""
    """

    columns: dict[str, Numbers]
    words: str
    figure: Figure
    tables: tuple[Table, ...] = ()
    config: str = ""

    def csv(self) -> str:
        """Return the columns as comma-separated text: a line of names, then numbers in full.

        >>> figure = Figure(Axis("pair"), Axis("x"))
        >>> columns = {"pair": np.arange(2), "x": np.array([0.5, 1e-9])}
        >>> print(Picture(columns, "", figure).csv(), end="")
        pair,x
        0,0.5
        1,1e-09
        """
        rows = zip(*(column.tolist() for column in self.columns.values()), strict=True)
        lines = [",".join(self.columns), *(",".join(map(repr, row)) for row in rows)]
        return "\n".join(lines) + "\n"

    def data(self) -> dict[str, object]:
        """Return all of it as JSON-ready data: None in place of NaN and infinities."""
        columns = {
            name: [value if np.isfinite(value) else None for value in column.tolist()]
            for name, column in self.columns.items()
        }
        return {**dataclasses.asdict(self), "columns": columns}


def as_script(value: object) -> str:
    """Return JSON that is safe inside a script of an HTML page: no tag can end the script.

    >>> as_script("</script>")
    '"\\\\u003c/script>"'
    """
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
