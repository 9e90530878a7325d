"""The numbers of each picture: columns for the file, marks for the figure, words for the ear."""

import itertools
import math
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import layouts
from ..analysis import bounds, decay, extension, precision, search, spectrum
from ..angles import inv_freq
from .side import Look

Array = npt.NDArray[np.float64]
POINTS = 1024  # of a curve: more than a screen has, and quick to send
WORK = 2**23  # pairs times distances that are all looked at
QUICK = 2**17  # distances that are searched while somebody waits
TOLERANCE = 1e-3  # an error of cos or sin that bfloat16 q and k hide
_ONE_SEARCH = threading.Lock()  # some of Numba's threading layers break under two calls
ARITHMETICS = ("bfloat16", "tf32", "float32", "exact")


class Numbers(NamedTuple):
    """columns: arrays of one length; marks: single numbers; words: what they say."""

    columns: dict[str, npt.NDArray[Any]]
    marks: dict[str, float]
    words: str


def wavelengths(look: Look) -> Numbers:
    """Tokens for one whole turn of each pair, and the turns in both lengths.

    >>> from rotary.explorer.side import Side, look
    >>> wavelengths(look(Side(model="llama-2-7b"), 4096)).marks["critical_dimension"]
    92
    """
    waves = spectrum.wavelengths(look.spec, look.context)
    never = int(spectrum.never_turning(look.before, look.trained).sum())
    critical = spectrum.critical_dimension(look.before, look.trained)
    before = "" if look.before == look.spec else "Before scaling "
    moving = waves[np.isfinite(waves)]
    still = f"; {len(waves) - len(moving)} stand still" if len(moving) < len(waves) else ""
    words = (
        f"{len(waves)} pairs in {look.spec.head_dim} channels{still}; one turn takes from "
        f"{moving.min():,.1f} to {moving.max():,.0f} tokens. {before}{never} pairs never turn once "
        f"in the {look.trained:,} tokens of training: the critical dimension is {critical}."
    )
    columns = {
        "pair": np.arange(len(waves)),
        "wavelength_tokens": waves,
        "turns_in_training": spectrum.turns_completed(look.before, look.trained),
        "turns_in_context": spectrum.turns_completed(look.spec, look.context, look.context),
    }
    return Numbers(columns, {"critical_dimension": critical}, words)


def decay_curve(look: Look) -> Numbers:
    """Figure 2 of RoFormer: mean |S_j| against distance, the size a score can have at most.

    >>> from rotary.explorer.side import Side, look
    >>> float(decay_curve(look(Side(model="llama-2-7b"), 4096)).columns["mean_partial_sum"][0])
    32.5
    """
    distances = np.concatenate([[0], spaced(look.context)])
    mean = decay.decay_curve(look.spec, distances, seq_len=look.context)
    words = (
        f"The mean size of the partial sums falls from {mean[0]:.4g} at distance 0 to "
        f"{mean[-1]:.4g} at {distances[-1]:,}; it bounds scores, and far ones may still be large."
    )
    return Numbers({"distance": distances, "mean_partial_sum": mean}, {}, words)


def similarity(look: Look) -> Numbers:
    """B_m, by which a similar key is preferred to a random one, and where it first is negative.

    >>> from rotary.explorer.side import Side, look
    >>> similarity(look(Side(model="llama-2-7b"), 4096)).marks["first_failure"]
    1707.0
    """
    searched = min(look.context, QUICK)
    first = bounds.first_failure(look.spec, searched, seq_len=look.context)
    distances = np.union1d(_outline(look), [] if first is None else [first]).astype(np.int64)
    found = bounds.similarity(look.spec, distances, seq_len=look.context)
    if first is not None:
        marks = {"first_failure": float(first)}
        words = (
            f"At distance {first:,} a similar key is first preferred less than a random one "
            f"(B = {found[np.searchsorted(distances, first)]:.3g}). Many good models go beyond "
            "theirs: a diagnostic, and no limit."
        )
    else:
        marks = {}
        words = f"A similar key is preferred at every distance up to {searched:,}."
        if searched < look.context:
            words += f" Not searched beyond; `rotary plan --context {look.context}` does."
    return Numbers({"distance": distances, "similarity": found}, marks, words)


def _outline(look: Look) -> npt.NDArray[np.int64]:
    """Distances of the highest and lowest B_m of every stretch; samples where that is slow."""
    quick = min(look.context, WORK // (look.spec.rotary_dim // 2))
    found = bounds.similarity(look.spec, np.arange(1, quick + 1), seq_len=look.context)
    kept = [1, quick]
    for start, stop in itertools.pairwise(spaced(quick, POINTS // 2).tolist()):
        part = found[start - 1 : stop - 1]
        kept += [start + int(part.argmin()), start + int(part.argmax())]
    samples = spaced(look.context)
    return np.union1d(kept, samples[samples > quick]).astype(np.int64)


def band(look: Look) -> Numbers:
    """How much the scaling slowed each pair down, beside the band that YaRN would draw.

    >>> from rotary.explorer.side import Side, look
    >>> found = band(look(Side(model="llama-2-7b"), 4096))
    >>> round(found.marks["kept_before"], 1), round(found.marks["interpolated_after"], 1)
    (20.9, 45.0)
    """
    now, before = inv_freq(look.spec, look.context)[0], inv_freq(look.plain)[0]
    ratio = np.abs(np.divide(now, before, out=np.ones_like(now), where=before != 0))
    first, last = spectrum.yarn_band(look.plain, look.trained)
    words = (
        f"The fastest pair keeps {ratio[0]:.4g} of its speed and the slowest {ratio[-1]:.4g}. "
        f"With {look.trained:,} trained tokens YaRN keeps pairs before {first:.1f} "
        f"(32 turns) and interpolates those after {last:.1f} (1 turn). "
        f"Scores are multiplied by {inv_freq(look.spec, look.context)[1] ** 2:.4g}."
    )
    columns = {
        "pair": np.arange(len(ratio)),
        "speed_ratio": ratio,
        "turns_in_training": spectrum.turns_completed(look.plain, look.trained),
    }
    return Numbers(columns, {"kept_before": first, "interpolated_after": last}, words)


def coverage(look: Look) -> Numbers:
    """The share of the circle each pair saw in training, and of the angles that are new to it.

    >>> from rotary.explorer.side import Side, look
    >>> float(coverage(look(Side(model="llama-2-7b"), 4096)).columns["unseen_at_context"].max())
    0.0
    """
    seen = extension.coverage(look.plain, look.trained)
    unseen = extension.unseen(
        look.plain, look.trained, look.spec, [look.context - 1], look.context
    )[0]
    words = (
        f"{int((seen < 1).sum())} of {len(seen)} pairs saw less than the whole circle in "
        f"{look.trained:,} tokens. At {look.context:,} tokens {unseen.mean():.1%} of all angles "
        f"are new, {unseen.max():.1%} in the worst pair."
    )
    columns = {
        "pair": np.arange(len(seen)),
        "circle_seen_in_training": seen,
        "unseen_at_context": unseen,
    }
    return Numbers(columns, {}, words)


def error_of_angles(look: Look) -> Numbers:
    """The largest error of cos or sin near a position, in four arithmetics: `error_near`.

    >>> from rotary.explorer.side import Side, look
    >>> found = error_of_angles(look(Side(model="llama-2-7b"), 131072)).columns
    >>> bool(found["float32"].max() > 1e-3 > 1e-6 > found["exact"].max())
    True
    """
    positions = spaced(look.context, 48)
    columns: dict[str, npt.NDArray[Any]] = {"position": positions}
    for name in ARITHMETICS:
        columns[name] = precision.error_near(look.spec, positions, name, look.context)
    worst = {name: columns[name][-1] for name in ARITHMETICS}
    safe = precision.longest_safe_position(look.spec, TOLERANCE, seq_len=look.context)
    words = (
        f"Near position {positions[-1]:,} float32 angles put cos or sin wrong by as much as "
        f"{worst['float32']:.2g}, positions in bfloat16 by {worst['bfloat16']:.2g}, and exact "
        f"angles, the default here, by {worst['exact']:.1g}. "
        f"No float32 angle is off by over {TOLERANCE:g} rad up to position {safe:,}."
    )
    return Numbers(columns, {"longest_safe_position": float(safe)}, words)


def layout(look: Look) -> Numbers:
    """Which pair each channel belongs to, in the layout that is read and the one that is written.

    >>> from rotary.explorer.side import Side, look
    >>> layout(look(Side(model="llama-2-7b"), 4096)).columns["reads"][:3].tolist()
    [0.0, 1.0, 2.0]
    """
    spec = look.spec
    columns: dict[str, npt.NDArray[Any]] = {"channel": np.arange(spec.head_dim)}
    for name, kind in (("reads", spec.layout), ("writes", spec.out_layout)):
        pair = np.full(spec.head_dim, math.nan)
        pair[layouts.pair_indices(spec.rotary_dim, kind, spec.start)] = np.arange(
            spec.rotary_dim // 2
        )[:, None]
        columns[name] = pair
    first, second = layouts.pair_indices(spec.rotary_dim, spec.layout, spec.start)[0]
    words = (
        f"Channels {spec.start} to {spec.start + spec.rotary_dim - 1} of {spec.head_dim} are "
        f"rotated, read as {spec.layout}: channel {first} turns with channel {second}. "
        + (f"Written as {spec.out_layout}. " if spec.out_layout != spec.layout else "")
        + ("Pairs turn clockwise. " if spec.sign < 0 else "")
        + (f"{spec.num_axes} position axes share the pairs." if spec.num_axes > 1 else "")
    )
    columns["axis"] = np.full(spec.head_dim, math.nan)
    axes = np.array(spec.axes or (0,) * (spec.rotary_dim // 2))
    columns["axis"][layouts.pair_indices(spec.rotary_dim, spec.layout, spec.start)] = axes[:, None]
    return Numbers(columns, {}, words.strip())


def smallest_base(look: Look) -> str:
    """Words on the smallest base that never fails in the context, where that is quickly found.

    >>> from rotary.explorer.side import Side, look
    >>> smallest_base(look(Side(model="llama-2-7b"), 1024))
    'With base 4,293.4376 a similar key is preferred at every distance up to 1,024. It is the \
smallest one, rounded up: certified for a plain RoPE of head_dim 128.'
    """
    spec, context = look.spec, look.context
    if not (spec.rotary_dim == spec.head_dim <= 256 and spec.head_dim >= 8 and context <= 2**15):
        return f"This takes more than a moment: run rotary plan --context {context}."
    base = search.rounded_up(
        _smallest_base(context, spec.head_dim), context, spec.head_dim, digits=8
    )
    return (
        f"With base {base:,f} a similar key is preferred at every distance up to {context:,}. It "
        f"is the smallest one, rounded up: certified for a plain RoPE of head_dim {spec.head_dim}."
    )


@lru_cache(maxsize=256)
def _smallest_base(context: int, head_dim: int) -> float:
    with _ONE_SEARCH:
        return search.min_base(context, head_dim).base


def spaced(last: int, count: int = POINTS) -> npt.NDArray[np.int64]:
    """At most `count` whole numbers from 1 to `last`, evenly spaced on a log axis.

    >>> spaced(10, 4).tolist()
    [1, 2, 5, 10]
    """
    return np.unique(np.geomspace(1, last, count).round().astype(np.int64))


def csv(numbers: Numbers) -> str:
    """The columns as comma-separated text, one head line, every digit.

    >>> print(csv(Numbers({"pair": np.arange(2), "x": np.array([0.5, 1e-9])}, {}, "")), end="")
    pair,x
    0,0.5
    1,1e-09
    """
    rows = zip(*(column.tolist() for column in numbers.columns.values()), strict=True)
    lines = [",".join(numbers.columns), *(",".join(map(repr, row)) for row in rows)]
    return "\n".join(lines) + "\n"
