"""What a picture holds: curves, lines, a band or rows of cells over two axes, as plain data.

`chart.js` draws it as an SVG in the browser. A curve names the columns that it draws; colours are
names of the style sheet, so that they follow the colour scheme.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..kernels import Numbers


@dataclass(frozen=True)
class Axis:
    """The title of an axis, whether it is logarithmic, and its ends; None: those of the data."""

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
    """A row of cells, coloured by the number that a column holds; NaN leaves a cell blank."""

    column: str
    name: str
    of: str


@dataclass(frozen=True)
class Hands:
    """Pairs that `hands.js` draws as dials, beside a curve of their score against distance.

    inv_freq  radians per token of each pair, negative where it turns clockwise
    constant  what the channels that are not rotated add to the score;  last  the largest distance
    """

    inv_freq: tuple[float, ...]
    constant: float
    last: int


@dataclass(frozen=True)
class Figure:
    """Two axes and all that is drawn over them."""

    x: Axis
    y: Axis
    curves: tuple[Curve, ...] = ()
    lines: tuple[Line, ...] = ()
    points: tuple[Point, ...] = ()
    band: Band | None = None
    rows: tuple[Row, ...] = ()
    hands: Hands | None = None


class Picture(NamedTuple):
    """columns: arrays of one length; words: what they say; figure."""

    columns: dict[str, Numbers]
    words: str
    figure: Figure

    def csv(self) -> str:
        """The columns as comma-separated text, one line of names, every digit.

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
        """Words, figure and columns as JSON can hold them: null for what is not finite."""
        columns = {
            name: [value if np.isfinite(value) else None for value in column.tolist()]
            for name, column in self.columns.items()
        }
        figure = dataclasses.asdict(self.figure)
        return {"words": self.words, "figure": figure, "columns": columns}


def as_script(value: object) -> str:
    """JSON that can stand inside a script of an HTML page: no tag ends it.

    >>> as_script("</script>")
    '"\\\\u003c/script>"'
    """
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
