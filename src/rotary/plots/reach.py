"""Plots of the reach: first failures, the smallest base for a context, rounded angles."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from ..analysis import bounds, fitting, ladders, search
from ..analysis.precision import ARITHMETICS, error_near
from ..analysis.spectrum import Axes, whole_number
from .points import MAX_POINTS, extremes, log_bins, means
from .style import (
    BLUE,
    GREY,
    VERMILLION,
    Specs,
    curve,
    curves,
    heading,
    label,
    legend,
    named,
    of_each,
    panels,
    plain,
    write,
)

PLACES = 64  # positions that `precision` draws, along the log axis
LOWEST = 80  # bins of `similarity`: wider than the waves of the curve, so their lowest values join


def similarity(
    specs: Specs,
    length: int | Mapping[str, int] = 131_072,
    *,
    seq_len: int | Mapping[str, int] | None = None,
    axes: Axes = None,
) -> Figure:
    """Draw similarity B_m / B_0 against distance, and mark the first failure.

    Men et al. (arXiv 2405.14591): below 0 a random key scores higher than a key that is similar to
    the query, in the mean over independent queries and keys. A diagnostic, not a limit: many good
    models violate it. Every distance up to `length` is computed. The line goes through the lowest
    value of each of 80 bins, equally wide on the log scale, so no failure is hidden; a dot marks
    the first failure. `length` and `seq_len` are one number, or {name in specs: number}: layers
    with a sliding window see no farther than that. Raises ValueError for another name.

    >>> from rotary import Rotary
    >>> figure = similarity(Rotary(head_dim=128), length=4096)
    >>> figure.legends[0].get_texts()[0].get_text()
    'base 10,000, head_dim 128: first failure 1,707'
    """
    models = named(specs)
    ends = {name: whole_number("length", end)
            for name, end in of_each("length", length, models).items()}  # fmt: skip
    sizes, longest = of_each("seq_len", seq_len, models), max(ends.values())
    starts = log_bins(longest, LOWEST)
    figure, (panel,) = panels(log="x")
    panel.axhline(0, color=GREY, linewidth=0.8)
    entries = []
    for name, spec, style in curves(specs):
        end, size = ends.get(name, longest), sizes.get(name)
        values = bounds.similarity(spec, np.arange(end + 1), seq_len=size, axes=axes)
        values /= spec.head_dim / 2
        failing = bounds.first_failure(spec, end, seq_len=size, axes=axes)
        low, _ = extremes(values, starts[starts <= end])
        line = panel.plot(low, values[low], linewidth=1.5, **style)[0]
        if failing is None:
            entries.append((f"{name}: none to {end:,}", line))
            continue
        panel.plot(
            [failing], [values[failing]], "o", markersize=7, markeredgecolor="white",
            color=style["color"], zorder=3,
        )  # fmt: skip
        panel.axvline(failing, color=style["color"], linewidth=0.8, linestyle=":")
        entries.append((f"{name}: first failure {failing:,}", line))
    title = "Mean advantage of a similar key over a random one: lowest of each bin, first below 0"
    label(panel, "distance, tokens", "advantage, B_m / B_0", title)
    return legend(figure, entries)


def design(
    specs: Specs, wanted: ladders.Wanted, *, seq_len: int | None = None, axes: Axes = None
) -> Figure:
    """Draw B_m / B_0 of each spec against distance, over the wanted values.

    wanted  from `rotary.analysis.ladders`; its length is the largest distance. Grey shows it: a
            line, or a band between the two wanted values
    Every distance is computed. If there are at most 400, each is drawn; else the mean of 400 bins
    of equal width on the log scale, with a band from lowest to highest for the first spec. The
    legend has the error of each spec, `rotary.analysis.misses`, and its first distance with
    B_m < 0.

    >>> from rotary import Rotary
    >>> from rotary.analysis import wanted_reach
    >>> head = Rotary(head_dim=32)
    >>> figure = design({"base 10,000": head}, wanted_reach(head, 128, 1024))
    >>> figure.legends[0].get_texts()[0].get_text()
    'base 10,000: misses by 0.0073, fails at 474'
    """
    length = len(wanted.lower)
    seq_len = length if seq_len is None else seq_len
    starts = log_bins(length)
    figure, (panel,) = panels(log="x")
    panel.axhline(0, color=GREY, linewidth=0.8)
    low, high = (means(np.append(0.0, each), starts) for each in (wanted.lower, wanted.upper))
    band = panel.fill_between(starts, low, np.minimum(high, 1.0), color=GREY, alpha=0.15,
                              linewidth=4)  # fmt: skip
    points = fitting.every_distance(wanted.lower, wanted.upper)
    entries: list[tuple[str, Artist]] = []
    for index, (name, spec, style) in enumerate(curves(specs)):
        values = bounds.similarity(spec, np.arange(length + 1), seq_len=seq_len, axes=axes)
        values /= spec.head_dim / 2
        if index == 0:
            least, most = (values[at] for at in extremes(values, starts))
            panel.fill_between(starts, least, most, color=style["color"], alpha=0.2, linewidth=0)
        if index % 2 and style["linestyle"] == "-":
            style["linestyle"] = (0, (5, 2))  # lets a curve be seen that this one covers
        line = panel.plot(starts, means(values, starts), linewidth=1.5 - 0.4 * (index > 0), **style)
        failing = bounds.first_failure(spec, length, seq_len=seq_len, axes=axes)
        fails = "never fails" if failing is None else f"fails at {failing:,}"
        missed = points.error(values[1:])
        entries.append((f"{name}: misses by {missed:.2g}, {fails}", line[0]))
    entries.append(("wanted", band))
    panel.set_ylim(-0.35, 1.02)
    title = "Mean advantage of a similar key over a random one, wanted and computed"
    label(panel, "distance, tokens", "advantage, B_m / B_0", title)
    return legend(figure, entries)


def base_bound(
    smallest: Mapping[int, Mapping[int, float]],
    *,
    specs: Specs | None = None,
    contexts: Mapping[str, int] | None = None,
) -> Figure:
    """Draw the smallest base with B_m >= 0 up to a context, both log scales, and specs as dots.

    smallest  {head_dim: {context: base}}, from `rotary.analysis.search.min_base(...).base`
    specs     each is a dot at its base and its first failure, which is searched for up to 2^20
    contexts  {name in specs: context of the model}: a line goes from the first failure to the
              context, and LongRoPE and dynamic NTK take effect at it
    Men et al. (arXiv 2405.14591). A diagnostic, not a limit. Raises ValueError for an empty table.

    >>> figure = base_bound({128: {1024: 4293.44, 8192: 83763.85}})
    >>> figure.axes[0].get_xscale(), figure.axes[0].get_yscale()
    ('log', 'log')
    """
    if not smallest or not all(smallest.values()):
        raise ValueError("smallest must hold at least one context for each head_dim")
    figure, (panel,) = panels(log="xy")
    entries = []
    for index, (head_dim, table) in enumerate(sorted(smallest.items())):
        at = sorted(whole_number("context", context) for context in table)
        values = [_base(table[context]) for context in at]
        line = panel.plot(at, values, marker=".", **curve(index))[0]
        entries.append((f"smallest base, head_dim {head_dim}", line))
    models = named(specs) if specs is not None else {}
    targets = {name: whole_number("contexts", n)
               for name, n in of_each("contexts", contexts, models).items()}  # fmt: skip
    limit = 2**20
    for index, (name, spec) in enumerate(models.items(), start=len(smallest)):
        failing = bounds.first_failure(spec, limit, seq_len=targets.get(name))
        color = curve(index)["color"]
        reach, marker, text = limit, ">", f"none to {limit:,}"
        if failing is not None:
            reach, marker, text = failing, "o", f"{failing:,}"
        dot = panel.plot([reach], [spec.base], marker, markersize=7, color=color)[0]
        if name in targets:
            ends = [reach, targets[name]]
            panel.plot(ends, [spec.base] * 2, linewidth=0.9, color=color, linestyle=":")
            panel.plot(ends[1:], [spec.base], "|", markersize=10, color=color)
        entries.append((f"{name}: first failure {text}", dot))
    label(panel, "context or first failure, tokens", "base", "Smallest base for a context")
    return legend(figure, entries)


def _base(value: float) -> float:
    if isinstance(value, bool) or not 1 <= value < np.inf:
        raise ValueError(f"a base must be finite and >= 1, got {value!r}")
    return float(value)


def comb(
    context: int,
    bases: Sequence[float] | npt.NDArray[np.float64],
    head_dim: int = 128,
    *,
    rotary_dim: int | None = None,
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Draw which bases keep B_m >= 0 up to a context: a comb, because a larger base may fail again.

    bases  up to 4096, rising, log scale; each is drawn up to half way to its neighbours
    marks  {name: base} drawn as lines, for example of `min_base` and `safe_base`; the legend rounds
           a base that passes up, to a number that also passes
    Raises ValueError for bases that do not rise.

    >>> comb(64, [10.0, 100.0, 1000.0]).axes[0].get_xscale()
    'log'
    """
    values = np.asarray(bases, np.float64)
    if values.ndim != 1 or not 2 <= values.size <= MAX_POINTS or not (np.diff(values) > 0).all():
        raise ValueError(f"bases must be 2 to {MAX_POINTS} rising numbers, got {values.size}")
    passing = search.comb(context, values, head_dim, rotary_dim=rotary_dim)
    middle = np.sqrt(values[1:] * values[:-1])
    edges = np.concatenate(([values[0] ** 2 / middle[0]], middle, [values[-1] ** 2 / middle[-1]]))
    figure, (panel,) = panels(height=2.6, log="x")
    panel.pcolormesh(
        edges, [0.0, 1.0], passing[None].astype(float), vmin=0, vmax=1,
        cmap=ListedColormap([VERMILLION, BLUE]),
    )  # fmt: skip
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    passed = f"passes: {int(passing.sum()):,} of {passing.size:,}"
    entries = [
        (name, panel.plot([], [], "s", color=color)[0])
        for name, color in ((passed, BLUE), ("fails", VERMILLION))
    ]
    marked = {name: _base(base) for name, base in (marks or {}).items()}
    passes = search.comb(context, list(marked.values()), head_dim, rotary_dim=rotary_dim)
    for index, (name, base) in enumerate(marked.items()):
        line = panel.axvline(base, color="black", linewidth=2, linestyle=("-", ":")[index % 2])
        text = f"{base:,.15g} fails"
        if passes[index]:
            text = f"{search.rounded_up(base, context, head_dim, rotary_dim=rotary_dim):,f}"
        entries.append((f"{plain(name)} {text}", line))
    label(panel, "base", "", f"Bases for a context of {context:,} tokens, head_dim {head_dim}")
    return legend(figure, entries)


def precision(
    specs: Specs,
    length: int = 2**20,
    *,
    arithmetics: Sequence[str] = ARITHMETICS,
    seq_len: int | None = None,
) -> Figure:
    """Draw the largest error of cos or sin near a position, both log scales, for each arithmetic.

    It is `rotary.analysis.error_near` at 64 log-spaced positions: the largest error of all pairs at
    64 positions before each. Near 1, an angle is meaningless; 2 is the maximum. Errors of exactly 0
    are not drawn, nor positions that a type cannot hold (float16 beyond 65,504).
    Give several specs with one arithmetic, or one spec with several arithmetics.
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
        worst = error_near(spec, at, kind, seq_len)
        shown = np.where((worst > 0) & np.isfinite(worst), worst, np.nan)
        line = panel.plot(at, shown, marker=".", markersize=4, **curve(index))[0]
        entries.append((kind if len(models) == 1 else f"{name}, {kind}", line))
    if len(models) == 1:
        heading(figure, *models)
    panel.axhline(2.0, color=GREY, linewidth=0.8, linestyle=":")
    write(panel, 0.01, 2.0, "2, the maximum", va="bottom", transform=panel.get_yaxis_transform())
    title = "Largest error of cos or sin near a position"
    label(panel, "position, tokens", "largest error of cos or sin", title)
    return legend(figure, entries)
