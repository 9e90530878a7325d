"""The picture of rounding: how far the angle of each arithmetic is off, by position."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ..analysis import precision as numbers
from ..analysis.spectrum import whole_number
from .points import Indices
from .style import GREY, Entry, Specs, curve, label, legend, named, panels, write

PLACES = 64  # along the log axis
NEIGHBOURS = 16  # positions looked at around each place: a round number has no error of its own


def precision(
    specs: Specs,
    length: int = 2**20,
    *,
    arithmetics: Sequence[str] = numbers.ARITHMETICS,
    seq_len: int | None = None,
) -> Figure:
    """Largest error of an angle in rad against position, both log scales, for each arithmetic.

    At 64 log-spaced places: the worst of all pairs and of the 16 positions that end there. Above
    the line at pi an angle says nothing. An error of exactly 0 has no place on a log scale.
    Several specs are drawn for one arithmetic each, several arithmetics for one spec.
    Raises ValueError for an arithmetic that is not known.

    >>> from rotary import Rotary
    >>> precision(Rotary(head_dim=8), arithmetics=["float32"]).axes[0].get_yscale()
    'log'
    """
    models = named(specs)
    kinds = [arithmetics] if isinstance(arithmetics, str) else list(arithmetics)
    if not kinds or (len(models) > 1 and len(kinds) > 1):
        raise ValueError(
            f"draw one spec in several arithmetics or several specs in one, "
            f"got {len(models)} specs and {len(kinds)} arithmetics"
        )
    at = windows(whole_number("length", length, NEIGHBOURS))
    figure, (panel,) = panels()
    entries: list[Entry] = []
    curves = [(name, spec, kind) for name, spec in models.items() for kind in kinds]
    for index, (name, spec, kind) in enumerate(curves):
        errors = np.abs(numbers.angle_error(spec, at.ravel(), kind, seq_len))
        worst = errors.reshape(*at.shape, -1).max(axis=(1, 2))
        shown = np.where(worst > 0, worst, np.nan)
        line = panel.plot(at[:, -1], shown, marker=".", markersize=4, **curve(index))[0]
        entries.append((kind if len(models) == 1 else f"{name}, {kind}", line))
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.axhline(np.pi, color=GREY, linewidth=0.8, linestyle=":")
    write(panel, 0.01, np.pi, "half a turn", va="bottom", transform=panel.get_yaxis_transform())
    label(panel, "position, tokens", "largest error of an angle, rad", "Rounding of the angles")
    legend(figure, entries)
    return figure


def windows(length: int) -> Indices:
    """(places, 16) positions: the 16 whole numbers that end at each of 64 log-spaced places.

    >>> windows(32)[[0, -1], -1].tolist()
    [16, 32]
    """
    ends = np.unique(np.geomspace(NEIGHBOURS, length, PLACES).round().astype(np.int64))
    return ends[:, None] + np.arange(1 - NEIGHBOURS, 1)
