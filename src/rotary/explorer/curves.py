"""Views of one number against distance, position, pair or channel, as curves and cells."""

import itertools
import math

import numpy as np
import numpy.typing as npt

from .. import layouts
from ..analysis import bounds, decay, extension, precision, spectrum
from ..angles import inv_freq
from ..kernels import Numbers
from ..spec import Rotary
from ..words import counted
from .figures import Axis, Band, Curve, Figure, Line, Picture, Point, Row
from .side import Look, is_stretchable

POINTS = 1024  # points of a curve: enough for a screen, and quick to send
EXHAUSTIVE = 2**23  # pairs times distances up to which every distance is computed
SEARCHED = 2**17  # distances that are searched while the page waits
TOLERANCE = 1e-3  # an error of cos or sin that bfloat16 q and k hide
ARITHMETICS = {  # name -> colour and dash of its curve
    "bfloat16": ("red", "dotted"),
    "tf32": ("purple", "dash"),
    "float32": ("blue", ""),
    "exact": ("green", "dash"),
}


def wavelengths(look: Look) -> Picture:
    """Draw the tokens for one turn of each pair; the columns also have the turns in two lengths."""
    waves = spectrum.wavelengths(look.spec, look.context)
    never = int(spectrum.never_turning(look.before, look.trained).sum())
    critical = spectrum.critical_dimension(look.before, look.trained)
    is_scaled = look.before != look.spec and look.before.schedule != "custom"
    before = "Before scaling " if is_scaled else ""
    moving = waves[np.isfinite(waves)]
    still = len(waves) - len(moving)
    fast, slow = (
        f"{tokens:,.1f}" if tokens < 100 else f"{tokens:,.0f}"
        for tokens in (moving.min(), moving.max())
    )
    words = (
        f"{counted(len(waves), 'pair')} in {look.head.head_dim} channels"
        + (f"; {still} {'stands' if still == 1 else 'stand'} still" if still else "")
        + f"; one turn takes {fast if fast == slow else f'from {fast} to {slow}'} tokens. "
        f"{before}{counted(never, 'pair')} never {'turns' if never == 1 else 'turn'} once in the "
        f"{counted(look.trained, 'token')} of training: the critical dimension is {critical}."
    )
    columns = {
        "pair": np.arange(len(waves)),
        "wavelength_tokens": waves,
        "turns_in_training": spectrum.turns_completed(look.before, look.trained),
        "turns_in_context": spectrum.turns_completed(look.spec, look.context, look.context),
    }
    lines = [Line("y", look.trained, f"trained: {look.trained:,}", "green")]
    if look.context != look.trained:
        lines.append(Line("y", look.context, f"context: {look.context:,}", "red"))
    figure = Figure(
        Axis("pair"),
        Axis("tokens for one turn", is_log=True),
        (Curve("wavelength_tokens", "one turn", has_dots=True),),
        tuple(lines),
    )
    return Picture(columns, words, figure)


def decay_curve(look: Look) -> Picture:
    """Draw figure 2 of RoFormer: mean |S_j| against distance, a factor of the bound of scores."""
    distances = np.concatenate([[0], spaced(look.context)])
    mean = decay.decay_curve(look.spec, distances, seq_len=look.context)
    ends = f"falls from {mean[0]:.4g} at distance 0 to {mean[-1]:.4g} at {distances[-1]:,}"
    if np.allclose(mean, mean[0]):  # all pairs turn alike
        ends = f"is {mean[0]:.4g} at every distance"
    words = (
        f"The mean size of the partial sums {ends}; it bounds scores, and far ones may still be "
        "large."
    )
    figure = Figure(
        Axis("distance, tokens", is_log=True),
        Axis("mean |S_j|"),
        (Curve("mean_partial_sum", "mean |S_j|"),),
        trained_line(look, look.context),
    )
    return Picture({"distance": distances, "mean_partial_sum": mean}, words, figure)


def similarity(look: Look) -> Picture:
    """Draw B_m, the preference for a similar key over a random one, and where it is first < 0."""
    searched = min(look.context, SEARCHED)
    first = bounds.first_failure(look.head, searched, seq_len=look.context)
    outlined = outline(look.spec, look.context)
    distances = np.union1d(outlined, [] if first is None else [first]).astype(np.int64)
    sums = bounds.similarity(look.head, distances, seq_len=look.context)
    points: tuple[Point, ...] = ()
    if first is not None:
        at_first = float(sums[np.searchsorted(distances, first)])
        points = (Point(first, at_first, f"first below 0: {first:,}"),)
        words = (
            f"At distance {first:,} a similar key is first preferred less than a random one "
            f"(B_m = {at_first:.3g}). That is a diagnostic and no limit: many good models work "
            "beyond such a distance."
        )
    else:
        words = f"A similar key is preferred at every distance up to {searched:,}."
        if searched < look.context:
            words += " Not searched beyond; the view Reach does."
    figure = Figure(
        distance_axis(look.spec, look.context),
        Axis("B_m"),
        (Curve("similarity", "B_m"),),
        (Line("y", 0, "", "ink"), *trained_line(look, look.context)),
        points,
    )
    return Picture({"distance": distances, "similarity": sums}, words, figure)


def _searched(spec: Rotary, last: int) -> int:
    """Return up to which distance `outline` computes every B_m."""
    return min(last, EXHAUSTIVE // (spec.rotary_dim // 2))


def distance_axis(spec: Rotary, last: int) -> Axis:
    """Return the axis of the distances of `outline`."""
    every = _searched(spec, last)
    samples = f", samples beyond {every:,}" if every < last else ""
    return Axis(f"distance, tokens{samples}", is_log=True)


def outline(spec: Rotary, last: int) -> npt.NDArray[np.int64]:
    """Return the distances in `last` tokens of the highest and the lowest B_m in each interval.

    Where computing every B_m would be slow, these are samples.
    """
    every = _searched(spec, last)
    sums = bounds.similarity(spec, np.arange(1, every + 1), seq_len=last)
    kept = [1, every]
    for start, stop in itertools.pairwise(spaced(every, POINTS // 2).tolist()):
        stretch = sums[start - 1 : stop - 1]
        kept += [start + int(stretch.argmin()), start + int(stretch.argmax())]
    samples = spaced(last)
    return np.union1d(kept, samples[samples > every]).astype(np.int64)


def scaling(look: Look) -> Picture:
    """Draw how much the scaling slowed each pair down, with the band in which YaRN blends."""
    (now, factor), before = inv_freq(look.spec, look.context), inv_freq(look.plain)[0]
    ratio = np.abs(np.divide(now, before, out=np.ones_like(now), where=before != 0))
    said, band = _yarn_band(look)
    words = f"The fastest pair keeps {ratio[0]:.4g} of its speed and the slowest {ratio[-1]:.4g}."
    if (ratio == 1).all():
        choose = ": choose a method, and a context longer than the training"
        words = f"Nothing is scaled here{choose if is_stretchable(look.plain) else ''}."
    words += f" {said}Scores are multiplied by {factor**2:.4g}."
    columns = {
        "pair": np.arange(len(ratio)),
        "speed_ratio": ratio,
        "turns_in_training": spectrum.turns_completed(look.before, look.trained),
    }
    lowest = min(float(ratio[ratio > 0].min()), 0.5)
    figure = Figure(
        Axis("pair"),
        Axis("speed after / before scaling", is_log=True, ends=(lowest / 1.25, 1.25)),
        (Curve("speed_ratio", "speed ratio", has_dots=True),),
        band=band,
    )
    return Picture(columns, words, figure)


def _yarn_band(look: Look) -> tuple[str, Band | None]:
    """Return the pairs that YaRN blends, in words and as a band; None where it has no place.

    Of a RoPE that YaRN scales these are its own pairs, of others those that it would blend.
    """
    count = look.spec.rotary_dim // 2
    if look.plain.schedule != "default":
        return f"YaRN does not scale RoPE of type {look.plain.schedule!r}. ", None
    if count == 1 or look.plain.base == 1:  # no pair is faster than another
        return "", None
    own = look.spec.params if look.spec.schedule == "yarn" else {}
    trained = own.get("original_max_position_embeddings", look.trained)
    turns = own.get("beta_fast", 32.0), own.get("beta_slow", 1.0)
    first, last = np.clip(spectrum.yarn_band(look.plain, trained, *turns), 0, count).tolist()
    fast, slow = (f"{each:g} turn" + "s" * (each != 1) for each in turns)
    words = (
        f"With {counted(trained, 'trained token')} YaRN {'keeps' if own else 'would keep'} pairs "
        f"before {first:.1f} ({fast}) and {'interpolates' if own else 'interpolate'} those after "
        f"{last:.1f} ({slow}), of {count}. "
    )
    label = f"YaRN {'blends' if own else 'would blend'} here"
    return words, Band(min(first, count - 1), min(last, count - 1), label)


def coverage(look: Look) -> Picture:
    """Draw the share of its circle that each pair saw in training, and its share of new angles."""
    seen = extension.coverage(look.before, look.trained)
    unseen = extension.unseen(
        look.before, look.trained, look.spec, [look.context - 1], look.context
    )[0]
    words = (
        f"{int((seen < 1).sum())} of {len(seen)} pairs saw less than the whole circle in "
        f"{counted(look.trained, 'token')}. At {counted(look.context, 'token')} "
        + (
            f"{unseen.mean():.1%} of all angles are new, {unseen.max():.1%} in the worst pair."
            if unseen.any()
            else "no angle is new."
        )
    )
    columns = {
        "pair": np.arange(len(seen)),
        "circle_seen_in_training": seen,
        "unseen_at_context": unseen,
    }
    figure = Figure(
        Axis("pair"),
        Axis("share", ends=(-0.02, 1.05), is_share=True),
        (
            Curve("circle_seen_in_training", "seen in training"),
            Curve("unseen_at_context", "new angles at the context", "red", "dotted"),
        ),
    )
    return Picture(columns, words, figure)


def error_of_angles(look: Look) -> Picture:
    """Draw the largest error of cos or sin near a position, in four arithmetics: `error_near`."""
    positions = spaced(look.context, 12)
    columns: dict[str, Numbers] = {"position": positions}
    for name in ARITHMETICS:
        columns[name] = precision.error_near(look.spec, positions, name, look.context)
    worst = {name: columns[name][-1] for name in ARITHMETICS}
    safe = precision.longest_safe_position(look.spec, TOLERANCE, seq_len=look.context)
    words = (
        f"Near position {positions[-1]:,} float32 angles put cos or sin wrong by as much as "
        f"{worst['float32']:.2g}, a matrix product in TF32 by {worst['tf32']:.2g}, positions in "
        f"bfloat16 by {worst['bfloat16']:.2g}, and exact angles, the default here, by "
        f"{worst['exact']:.1g}. "
        f"No float32 angle is off by over {TOLERANCE:g} rad up to position {safe:,}."
    )
    figure = Figure(
        Axis("position, tokens", is_log=True),
        Axis("largest error of cos or sin nearby", is_log=True, ends=(1e-9, 3)),
        tuple(Curve(name, name, *style) for name, style in ARITHMETICS.items()),
        (Line("y", TOLERANCE, f"{TOLERANCE:g}", "ink"),),
    )
    return Picture(columns, words, figure)


def layout(look: Look) -> Picture:
    """Draw the pair of each channel, in the layout that is read and in the one written."""
    spec, count = look.head, look.spec.rotary_dim // 2
    columns: dict[str, Numbers] = {"channel": np.arange(spec.head_dim)}
    axes = np.array(spec.axes or (0,) * count)
    for name, kind, values in (
        ("reads", spec.layout, np.arange(count)),
        ("writes", spec.out_layout, np.arange(count)),
        ("axis", spec.layout, axes),
    ):
        columns[name] = np.full(spec.head_dim, math.nan)
        columns[name][layouts.pair_indices(spec.rotary_dim, kind, spec.start)] = values[:, None]
    first, second = layouts.pair_indices(spec.rotary_dim, spec.layout, spec.start)[0]
    words = (
        f"Channels {spec.start} to {spec.start + spec.rotary_dim - 1} of {spec.head_dim} are "
        f"rotated, read as {spec.layout}: channel {first} turns with channel {second}. "
        + (f"Written as {spec.out_layout}. " if spec.out_layout != spec.layout else "")
        + ("Pairs turn clockwise. " if spec.sign < 0 else "")
        + (
            f"{spec.num_axes} position axes share the pairs: other views show a step along all "
            "of them at once."
            if spec.num_axes > 1
            else ""
        )
    )
    rows = [Row("reads", f"read as {spec.layout}", "pair")]
    if spec.out_layout != spec.layout:
        rows.append(Row("writes", f"written as {spec.out_layout}", "pair"))
    if spec.num_axes > 1:
        rows.append(Row("axis", "position axis", "axis"))
    return Picture(columns, words.strip(), Figure(Axis("channel"), Axis(""), rows=tuple(rows)))


def spaced(last: int, count: int = POINTS) -> npt.NDArray[np.int64]:
    """Return at most `count` whole numbers from 1 to `last`, evenly spaced on a log axis."""
    return np.unique(np.geomspace(1, last, count).round().astype(np.int64))


def trained_line(look: Look, last: int) -> tuple[Line, ...]:
    """Return the trained length as a line, if the figure, up to `last`, reaches that far."""
    return (Line("x", look.trained, "trained", "green"),) if look.trained <= last else ()
