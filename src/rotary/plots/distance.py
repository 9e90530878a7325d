"""Plots of long-term decay: the curve of the paper, scores, their terms, partial sums."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..analysis import decay as numbers
from ..analysis.spectrum import Axes, whole_number, whole_numbers
from .points import extremes, log_bins, means, spaced
from .style import (
    BLUE,
    GREEN,
    GREY,
    VERMILLION,
    Specs,
    attention_suffix,
    curve,
    curves,
    heading,
    label,
    legend,
    named,
    panels,
)

DRAWS = 32  # random queries and keys
SAMPLES = 256  # distances for which scores are computed
DISTANCE = "distance, tokens"


def decay(
    specs: Specs, length: int = 4096, *, seq_len: int | None = None, axes: Axes = None
) -> Figure:
    """Draw mean |S_j| against distance, log scale: the factor of the bound that decays.

    Figure 2 of RoFormer (arXiv 2104.09864). Every distance up to `length` is computed. If there are
    at most 400, each is drawn; else 400 bins of equal width on the log scale, as a line at the mean
    and a band from lowest to highest. seq_len and axes as in `rotary.analysis.decay.decay_curve`.

    >>> from rotary import Rotary
    >>> decay(Rotary(head_dim=128)).axes[0].lines[0].get_ydata()[0].round(3)
    np.float64(31.538)
    """
    length = whole_number("length", length)
    starts, distances = log_bins(length), np.arange(1, length + 1)
    figure, (panel,) = panels(log="x")
    entries: list[tuple[str, Artist]] = []
    for name, spec, style in curves(specs):
        values = np.zeros(length + 1)  # that at distance 0 is not drawn
        values[1:] = numbers.decay_curve(spec, distances, seq_len=seq_len, axes=axes)
        low, high = (values[at] for at in extremes(values, starts))
        panel.fill_between(starts, low, high, color=style["color"], alpha=0.2, linewidth=0)
        entries += [(name, panel.plot(starts, means(values, starts), linewidth=1.3, **style)[0])]
    if length > len(starts):
        entries.append(("band: lowest to highest nearby; line: mean", Patch(color=GREY, alpha=0.2)))
    panel.set_ylim(bottom=0)
    label(panel, DISTANCE, "mean |S_j|, pairs", "Long-term decay of the bound")
    return legend(figure, entries)


def scores(
    spec: Specs,
    length: int = 4096,
    *,
    seed: int = 0,
    seq_len: int | None = None,
    axes: Axes = None,
) -> Figure:
    """Draw scores of random queries and keys against distance, with their bound; log scales.

    Left: the bound of equation 37 of RoFormer, and the root mean square of the scores of 32
    independent normal queries and keys: the bound decays, the scores do not. Right: the mean score
    of a query with itself as the key, which falls and wiggles. Scores are divided by sqrt(head_dim)
    and include the square of the attention factor. At most 256 distances: all small ones, then
    log-spaced.

    >>> from rotary import Rotary
    >>> len(scores(Rotary(head_dim=8), length=64).axes)
    2
    """
    ((name, spec),) = named(spec, 1).items()
    at = spaced(whole_number("length", length), SAMPLES)
    q, k = np.random.default_rng(whole_number("seed", seed, 0)).standard_normal(
        (2, DRAWS, 1, spec.head_dim)
    )
    scale = math.sqrt(spec.head_dim)
    options: dict[str, Any] = {"seq_len": seq_len, "axes": axes}
    random = numbers.score(spec, q, k, at, **options) / scale
    bound = numbers.score_bound(spec, q, k, at, **options) / scale
    same = numbers.score(spec, q, q, at, **options) / scale
    figure, (left, right) = panels(1, 2, width=9.5, log="x")
    left.set_yscale("log")
    size = left.plot(at, np.sqrt((random**2).mean(axis=0)), color=BLUE)[0]
    above = left.plot(at, bound.mean(axis=0), color=VERMILLION)[0]
    alike = right.plot(at, same.mean(axis=0), color=GREEN)[0]
    right.axhline(0, color=GREY, linewidth=0.8)
    heading(figure, name)
    title = f"Independent query and key{attention_suffix(spec, seq_len)}"
    label(left, DISTANCE, "score / sqrt(head_dim)", title)
    label(right, DISTANCE, "score / sqrt(head_dim)", "Key equal to the query")
    names = "left: mean bound, equation 37", "left: root mean square", "right: mean over queries"
    return legend(figure, list(zip(names, (above, size, alike), strict=True)))


def walk(
    spec: Specs,
    distances: Sequence[int] = (1, 10, 100, 1000),
    *,
    seq_len: int | None = None,
    axes: Axes = None,
) -> Figure:
    """Draw S_j as a walk in the plane, one step of length 1 per pair, for up to 7 distances.

    Every walk starts at 0, marked by a ring; a dot marks its end, which is far from 0 if the angles
    of the pairs are similar. The slow pairs at the end of a walk go straight on. Su, kexue.fm 8265.

    >>> from rotary import Rotary
    >>> len(walk(Rotary(head_dim=128), [1, 100]).axes[0].lines)
    5
    """
    ((name, spec),) = named(spec, 1).items()
    at = whole_numbers("distances", distances, 0)
    if not 0 < len(at) <= 7:
        raise ValueError(f"distances must be 1 to 7 whole numbers, got {len(at)}")
    sums = numbers.partial_sums(spec, at, seq_len=seq_len, axes=axes)
    figure, (panel,) = panels(height=5)
    entries = []
    for index, (distance, path) in enumerate(zip(at.tolist(), sums, strict=True)):
        line = panel.plot(
            path.real, path.imag, marker=".", markersize=3, linewidth=1, **curve(index)
        )[0]
        panel.plot(path.real[-1:], path.imag[-1:], "o", markersize=6, color=line.get_color())
        entries.append((f"distance {distance:,}: |S| = {abs(path[-1]):.1f}", line))
    panel.plot([0], [0], "o", markersize=9, markerfacecolor="none", color=GREY)
    panel.set_aspect("equal", adjustable="datalim")
    heading(figure, name)
    label(panel, "real part, pairs", "imaginary part, pairs", "Partial sums as a walk")
    return legend(figure, entries)


def terms(
    spec: Specs, q: npt.ArrayLike, k: npt.ArrayLike, distance: int, *, seq_len: int | None = None
) -> Figure:
    """Draw what each pair adds to the score of a query and a key, and the sum over the pairs.

    q, k are (head_dim,), with channels in `spec.layout`. The last point of the sum is the score;
    the channels that are not rotated are a separate bar after the last pair.

    >>> from rotary import Rotary
    >>> terms(Rotary(head_dim=4), [1, 0, 1, 0], [1, 0, 1, 0], 5).axes[1].get_xlabel()
    'pair'
    """
    ((name, spec),) = named(spec, 1).items()
    distance = whole_number("distance", distance, 0)
    for letter, x in (("q", q), ("k", k)):
        if np.shape(x) != (spec.head_dim,):
            raise ValueError(
                f"{letter} must be (head_dim,) = ({spec.head_dim},), got {np.shape(x)}"
            )
    each = numbers.pair_terms(spec, q, k, distance, seq_len=seq_len)
    still = float(numbers.still_term(spec, q, k))
    pairs = np.arange(each.size)
    figure, (top, bottom) = panels(2, 1, height=5.5, sharex=True)
    heading(figure, name)
    up, down = (np.where(sign * each > 0, each, 0.0) for sign in (1, -1))
    entries = [
        ("pairs that add", top.bar(pairs, up, width=0.85, color=BLUE)[0]),
        ("pairs that take away", top.bar(pairs, down, width=0.85, color=VERMILLION)[0]),
    ]
    total = np.cumsum(each)
    if spec.rotary_dim < spec.head_dim:
        place = each.size + 1
        pairs, total = np.append(pairs, place), np.append(total, total[-1] + still)
        bar = top.bar([place], [still], width=0.85, color=GREEN)
        entries.append(("channels that are not rotated", bar[0]))
        step = -(-each.size // 8)
        shown = [pair for pair in range(0, each.size, step) if place - pair > step / 2]
        bottom.set_xticks([*shown, place], [*map(str, shown), "rest"])
    bottom.plot(pairs, total, marker=".", linewidth=1, color="black")
    for panel in (top, bottom):
        panel.axhline(0, color=GREY, linewidth=0.8)
    label(top, "", "term of the score", f"Terms of a score {distance:,} tokens apart")
    label(bottom, "pair", "sum of the terms", f"The sum ends at the score, {total[-1]:.4g}")
    return legend(figure, entries)
