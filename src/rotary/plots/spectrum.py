"""Plots of frequencies: wavelengths, their change by an extension, angles seen in training."""

import dataclasses

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..analysis import extension, spectrum
from ..analysis.decay import angles_at
from ..analysis.spectrum import whole_number
from ..spec import Rotary
from .style import (
    GREY,
    ON_COLOUR,
    SHADE,
    Specs,
    attention_suffix,
    curve,
    curves,
    described,
    heading,
    label,
    legend,
    named,
    panels,
    write,
)

PAIR = "pair"
MAX_COLUMNS, MAX_ROWS = 1024, 256  # of a heat map: more would not be visible


def wavelengths(
    specs: Specs,
    *,
    trained: int | None = None,
    target: int | None = None,
    seq_len: int | None = None,
) -> Figure:
    """Draw the wavelength of every pair in tokens, after scaling, log scale.

    trained  length trained on; pairs above its line complete no turn within it, and the legend
             gives the critical dimension (Liu et al., arXiv 2310.05209) of the spec before scaling,
             as `rotary.reach` counts it
    target   length to reach
    Pairs that stand still have no wavelength: they are triangles at the top. If several axes share
    the pairs, points are not joined. Raises ValueError if there is no spec or a length is invalid.

    >>> wavelengths(Rotary(head_dim=128), trained=4096).axes[0].get_yscale()
    'log'
    """
    for name, length in (("trained", trained), ("target", target)):
        if length is not None:
            whole_number(name, length)
    figure, (panel,) = panels(log="y")
    entries: list[tuple[str, Artist]] = []
    for name, spec, style in curves(specs):
        values = spectrum.wavelengths(spec, seq_len)
        pairs = np.arange(values.size)
        line = panel.plot(pairs, values, **{**style, "marker": ".", **_joined(spec)})[0]
        still = pairs[~np.isfinite(values)]
        if still.size:
            name += f": {still.size} pairs stand still"
            panel.plot(
                still, np.full(still.size, 0.985), "^", markersize=4, clip_on=False,
                color=style["color"], transform=panel.get_xaxis_transform(),
            )  # fmt: skip
        if trained is not None:
            before = spectrum.before_scaling(spec)
            name += f", critical dimension {spectrum.critical_dimension(before, trained)}"
            name += "" if before == spec or before.schedule == "custom" else " before scaling"
        entries.append((name, line))
    panel.margins(y=0.08)
    label(panel, PAIR, "wavelength, tokens", "Wavelength of every pair, after scaling")
    _lengths(panel, trained, target)
    if trained is not None:
        entries.append((f"less than one turn in {trained:,} tokens", Patch(color=SHADE)))
    return legend(figure, entries)


def _joined(spec: Rotary) -> dict[str, str]:
    """Return line options that do not join the points of pairs of several axes."""
    return {} if spec.num_axes == 1 else {"linestyle": "none", "marker": "."}


def _lengths(panel: Axes, trained: int | None, target: int | None) -> None:
    low, high = panel.get_ylim()
    high = max(high, 3 * max(trained or 0, target or 0))
    panel.set_ylim(low, high)
    if trained is not None:
        panel.axhspan(trained, high, color=SHADE, zorder=0)
    lines = [(n, what) for n, what in ((trained, "trained"), (target, "target")) if n is not None]
    for length, what in lines:
        panel.axhline(length, color=GREY, linewidth=0.8, linestyle=":")
        # the lower text is below its line, so that the two cannot overlap
        below = len(lines) == 2 and (length, what) == min(lines)
        write(
            panel, 1.01, length, f"{what} {length:,}", va="top" if below else "bottom",
            transform=panel.get_yaxis_transform(),
        )  # fmt: skip


def frequency_ratio(
    specs: Specs,
    *,
    original: Rotary | None = None,
    trained: int | None = None,
    seq_len: int | None = None,
) -> Figure:
    """Draw the frequency of every pair over its original frequency: 1 is kept, 1/8 stretched by 8.

    original  the RoPE before the extension; default: the same base and width without any scaling
    trained   length trained on: shades the band in which YaRN goes from kept to interpolated,
              pairs of 32 turns to pairs of 1 (Peng et al., arXiv 2309.00071, equation 17)
    `rotary.analysis.extension.methods` gives all the methods for one target length; LongRoPE and
    dynamic NTK take effect at `seq_len`, the length of the sequence.
    Raises ValueError if the rotary_dim of a spec differs from that of its original.

    >>> spec = Rotary(head_dim=8, schedule="linear", params={"factor": 4.0})
    >>> frequency_ratio(spec).axes[0].lines[0].get_ydata()
    array([0.25, 0.25, 0.25, 0.25])
    """
    figure, (panel,) = panels()
    models = list(curves(specs))
    entries: list[tuple[str, Artist]] = []
    originals = [original or _unscaled(spec) for _, spec, _ in models]
    if len(set(originals)) == 1:
        heading(figure, f"original: {described(originals[0])}")
    for index, (name, spec, style) in enumerate(models):
        ratio = _ratio(spec, originals[index], seq_len)
        style |= _joined(spec)
        width = 1.2 + 0.35 * (len(models) - 1 - index)  # so that coinciding curves are all visible
        line = panel.plot(np.arange(ratio.size), ratio, linewidth=width, **style)[0]
        entries.append((name + attention_suffix(spec, seq_len), line))
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(
        lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}"
    )
    panel.margins(y=0.08)
    if trained is not None:
        first, last = spectrum.yarn_band(originals[0], trained)
        panel.axvspan(first, last, color=SHADE, zorder=0)
        entries.append((f"32 turns to 1 turn in {trained:,} tokens", Patch(color=SHADE)))
    label(panel, PAIR, "frequency / original frequency", "What the extension does to each pair")
    return legend(figure, entries)


def _unscaled(spec: Rotary) -> Rotary:
    return dataclasses.replace(spec, schedule="default", params={})


def _ratio(spec: Rotary, before: Rotary, seq_len: int | None) -> spectrum.Array:
    if before.rotary_dim != spec.rotary_dim:
        raise ValueError(
            f"original must have the same rotary_dim, {spec.rotary_dim}, got {before.rotary_dim}"
        )
    old, new = spectrum.frequencies(before, seq_len), spectrum.frequencies(spec, seq_len)
    # a pair that stands still before or after has no ratio on a log scale
    nothing = np.full_like(new, np.nan)
    return np.divide(new, old, out=nothing, where=(old > 0) & (new > 0))


def angle_coverage(
    specs: Specs,
    *,
    trained: int,
    target: int,
    original: Rotary | None = None,
    seq_len: int | None = None,
) -> Figure:
    """Draw the share of its circle that each pair saw in training, and which angles are new.

    Above: for the spec that was trained (`original`; default: each spec without its scaling), the
    share of all angles that lengths up to `trained` show. Below: for each spec, the share of a
    pair's angles up to a position that training never showed; dark means many. Positions go up to
    `target`. seq_len is the length of the sequence; default: `target`.
    Raises ValueError for a target below the trained length.

    >>> figure = angle_coverage(Rotary(head_dim=128), trained=4096, target=16384)
    >>> len(figure.axes)  # two panels and a colour bar
    3
    """
    trained = whole_number("trained", trained)
    target = whole_number("target", target, trained)
    models = named(specs, 6)
    row = target if seq_len is None else seq_len
    rows = len(models) + 1
    figure, (top, *strips) = panels(rows, 1, height=2.2 + 1.7 * len(models), sharex=True)
    positions = np.linspace(0, target, min(target + 1, MAX_ROWS)).round().astype(np.int64)
    seen: dict[str, Artist] = {}
    for panel, (name, spec) in zip(strips, models.items(), strict=True):
        before = original or _unscaled(spec)
        if described(before) not in seen:
            share = extension.coverage(before, trained)
            style = curve(len(seen))
            line = top.step(np.arange(share.size), share, where="mid", **style)[0]
            seen[described(before)] = line
        new = extension.unseen(before, trained, spec, positions, row)
        image = panel.imshow(
            new, aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1,
            interpolation="nearest", extent=(-0.5, new.shape[1] - 0.5, 0, target),
        )  # fmt: skip
        if not new.any():
            write(
                panel, 0.5, 0.5, "training has shown every angle", ha="center", va="center",
                color="black", gid=ON_COLOUR, transform=panel.transAxes,
            )  # fmt: skip
        limit = panel.axhline(trained, color="black", linewidth=0.9, linestyle=":", gid=ON_COLOUR)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        label(panel, "", "position, tokens", name)
    top.set_ylim(0, 1.05)
    label(top, "", "share of circle", f"Angles seen in training on {trained:,} tokens")
    strips[-1].set_xlabel(PAIR)
    figure.colorbar(image, ax=strips, label="share of angles never seen", shrink=0.9)
    return legend(figure, [*seen.items(), (f"trained length, {trained:,}", limit)])


def cosine_map(spec: Specs, length: int = 256, *, seq_len: int | None = None) -> Figure:
    """Draw cos(position x inv_freq) for every position below `length` and every pair.

    Of more than 1024 positions only every k-th is drawn, as the axis says: fast pairs then show
    patterns that are an artifact. All axes of a grid have the same position, as in text; the
    attention factor is left out.

    >>> cosine_map(Rotary(head_dim=8), length=64).axes[0].images[0].get_array().shape
    (4, 64)
    """
    ((name, spec),) = named(spec, 1).items()
    length = whole_number("length", length)
    step = -(-length // MAX_COLUMNS)
    positions = np.arange(0, length, step)
    cosines = np.cos(angles_at(spec, positions, seq_len=seq_len)).T
    figure, (panel,) = panels()
    image = panel.imshow(
        cosines, aspect="auto", cmap="PuOr", vmin=-1, vmax=1, interpolation="nearest",
        extent=(-0.5 * step, positions[-1] + 0.5 * step, len(cosines) - 0.5, -0.5),
    )  # fmt: skip
    heading(figure, name)
    every = "" if step == 1 else f", every {step}th drawn"
    label(panel, f"position, tokens{every}", PAIR, "cos(position x frequency)")
    figure.colorbar(image, ax=panel, label="cosine")
    return figure
