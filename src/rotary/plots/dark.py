"""A figure for pages with a dark background."""

from typing import cast

from matplotlib.collections import Collection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.typing import ColorType

from .style import ON_COLOUR

RGBA = tuple[float, float, float, float]
DARKEST, LIGHTEST = 0.09, 0.95  # greys on a dark page, in place of white and black


def dark(figure: Figure) -> Figure:
    """Change a figure for a dark page and return it: greys are inverted, colours a little lighter.

    Heat maps and what is drawn inside them do not change.

    >>> from rotary import Rotary, plots
    >>> figure = plots.dark(plots.walk(Rotary(head_dim=8)))
    >>> figure.get_facecolor()
    (0.09, 0.09, 0.09, 1.0)
    """
    for artist in figure.findobj(lambda artist: artist.get_gid() != ON_COLOUR):
        if isinstance(artist, Text):
            artist.set_color(night(artist.get_color()))
        elif isinstance(artist, Line2D):
            colors = artist.get_color(), artist.get_markerfacecolor(), artist.get_markeredgecolor()
            line, face, edge = (night(color) for color in colors)
            artist.set(color=line, markerfacecolor=face, markeredgecolor=edge)
        elif isinstance(artist, Patch):
            face, edge = night(artist.get_facecolor()), night(artist.get_edgecolor())
            artist.set_facecolor(face)
            artist.set_edgecolor(edge)
        elif isinstance(artist, Collection) and artist.get_array() is None:
            artist.set_facecolor([night(color) for color in artist.get_facecolor()])
            artist.set_edgecolor([night(color) for color in artist.get_edgecolor()])
    for panel in figure.axes:
        panel.tick_params(colors=night("black"))  # also for ticks that do not exist yet
    return figure


def night(color: ColorType | float) -> RGBA:
    """Return the colour on a dark page for a colour on a light one: RGBA in 0 .. 1, same alpha.

    >>> night("black"), night("white")
    ((0.95, 0.95, 0.95, 1.0), (0.09, 0.09, 0.09, 1.0))
    """
    *shades, alpha = to_rgba(cast(ColorType, color))
    if max(shades) - min(shades) < 0.02:
        grey = round(LIGHTEST - (LIGHTEST - DARKEST) * shades[0], 3)
        return grey, grey, grey, alpha
    red, green, blue = (round(0.8 * shade + 0.2, 3) for shade in shades)
    return red, green, blue, alpha
