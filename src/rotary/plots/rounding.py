"""The picture of rounding: how far cos and sin of each arithmetic are off, by position."""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ..analysis import precision as numbers
from ..analysis.spectrum import whole_number
from .style import GREY, Specs, curve, label, legend, named, panels, write

PLACES = 64  # along the log axis


def precision(
    specs: Specs,
    length: int = 2**20,
    *,
    arithmetics: Sequence[str] = numbers.ARITHMETICS,
    seq_len: int | None = None,
) -> Figure:
    """Largest error of cos or sin near a position, both log scales, for each arithmetic.

    `rotary.analysis.error_near` at 64 log-spaced places: the worst of all pairs and of 64 positions
    before each. Where it is near 1 an angle says nothing, and 2 is the most. An error of exactly
    0 has no place on a log scale, nor have positions that a type cannot hold (float16 beyond
    65,504).
    Several specs are drawn for one arithmetic each, several arithmetics for one spec.
    Raises ValueError for an unknown arithmetic.

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
    ends = np.geomspace(1, whole_number("length", length, 2), PLACES)
    at = np.unique(ends.round().astype(np.int64))
    figure, (panel,) = panels(log="xy")
    entries = []
    for index, ((name, spec), kind) in enumerate(itertools.product(models.items(), kinds)):
        worst = numbers.error_near(spec, at, kind, seq_len)
        shown = np.where((worst > 0) & np.isfinite(worst), worst, np.nan)
        line = panel.plot(at, shown, marker=".", markersize=4, **curve(index))[0]
        entries.append((kind if len(models) == 1 else f"{name}, {kind}", line))
    panel.axhline(2.0, color=GREY, linewidth=0.8, linestyle=":")
    write(panel, 0.01, 2.0, "2, the most", va="bottom", transform=panel.get_yaxis_transform())
    title = "Largest error of cos or sin near a position"
    label(panel, "position, tokens", "largest error of cos or sin", title)
    return legend(figure, entries)
