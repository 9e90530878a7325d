"""Views that move in the browser: the script named by `kind` animates them without the server.

Speeds are radians per token of each pair, negative where it turns clockwise. `last` is the largest
distance, or the largest position, that the script shows.
"""

import dataclasses
import re

import numpy as np

from .. import layouts
from ..analysis import bounds, decay, extension, spectrum
from ..angles import inv_freq
from ..kernels import Numbers
from ..spec import Rotary
from ..words import counted
from .curves import distance_axis, outline, trained_line
from .figures import Axis, Curve, Figure, Line, Picture
from .side import Look, check_scaling

SHOWN = 4  # pairs of `two_layouts`: as many as there are colours
REACH = 64  # tokens that `two_layouts` shows
BACK = 16  # q fits a key best that is this many tokens before it
MIXED = "half, run as interleaved"
METHODS = ("linear", "ntk", "yarn", "llama3", "longrope")


def hands(look: Look) -> Picture:
    """Draw each pair as two hands, of k and q, and q . k of two equal vectors against distance."""
    distances = outline(look.spec, look.context)
    frequencies, factor = inv_freq(look.spec, look.context)
    speeds, times, still = look.spec.sign * frequencies, factor**2, spectrum.still_pairs(look.head)
    sums = bounds.similarity(look.spec, distances, still=0.0, seq_len=look.context)
    scores = times * sums + still
    words = (
        f"Move both tokens (position of k): all hands turn and q · k stays, so a score depends on "
        f"the distance alone. Move them apart (distance, or drag the red point): q · k of equal "
        f"vectors goes from {times * len(speeds) + still:.4g} at 0 to {scores[-1]:.4g} at "
        f"{counted(int(distances[-1]), 'token')}. The first pairs turn fast and tell near tokens "
        f"apart, the last ones turn slowly."
    )
    if look.spec.num_axes > 1:
        words += f" Tokens move along all {look.spec.num_axes} axes of positions at once."
    # a score is `factor` times that of the rotated channels, and `constant` by the others
    moving = {"kind": "hands", "inv_freq": speeds.tolist(), "factor": times, "constant": still}
    figure = Figure(
        distance_axis(look.spec, look.context),
        Axis("q · k"),
        (Curve("score", "q · k"),),
        (Line("y", 0, "", "ink"), *trained_line(look, look.context)),
        moving={**moving, "last": look.context},
    )
    return Picture({"distance": distances, "score": scores}, words, figure)


def two_layouts(look: Look) -> Picture:
    """Draw q . k by distance: in both layouts, and in one layout that is run as the other."""
    speeds = look.spec.sign * inv_freq(look.spec, look.context)[0]
    speeds = speeds[:: max(1, len(speeds) // (2 * SHOWN))][:SHOWN]
    width = 2 * len(speeds)
    custom = {"inv_freq": np.abs(speeds).tolist()}
    small = Rotary(head_dim=width, layout="interleaved", schedule="custom", params=custom,
                   sign=look.spec.sign)  # fmt: skip
    k = np.linspace(1, 0.4, width) * np.where(np.arange(width) % 3 == 2, -1, 1)
    k *= np.sqrt(width / (k @ k))
    pairs = layouts.pair_indices(width, "interleaved")
    q = np.empty(width)  # q is such that it equals k after rotation if k is 16 tokens before it
    turned = (k[pairs[:, 0]] + 1j * k[pairs[:, 1]]) * np.exp(-1j * BACK * speeds)
    q[pairs[:, 0]], q[pairs[:, 1]] = turned.real, turned.imag
    in_half = layouts.channel_permutation(width, "interleaved", "half")
    distances = np.arange(REACH + 1)
    columns: dict[str, Numbers] = {"distance": distances}
    orders = []
    for name, layout, run_as, column, colour in (
        ("interleaved", "interleaved", "interleaved", "right", "blue"),
        ("half", "half", "half", "right", "blue"),
        (MIXED, "half", "interleaved", "mixed_up", "red"),
    ):
        one, other = (x if layout == "interleaved" else x[in_half] for x in (q, k))
        spec = dataclasses.replace(small, layout=run_as)
        rows = [np.broadcast_to(x, (len(distances), width)) for x in (one, other)]
        columns[column] = decay.score(spec, rows[0], rows[1], distances, route="complex")
        pairs = layouts.pair_indices(width, run_as)
        # one order of the channels, and the curve that is marked with its score
        parts = {"pairs": pairs.tolist(), "q": one.tolist(), "k": other.tolist()}
        orders.append({"name": name, "column": column, "colour": colour, **parts})
    best, wrong = columns["right"][BACK], columns["mixed_up"][BACK]
    second = layouts.pair_indices(width, "half")[0, 1]
    words = (
        f"The bars are k: {len(speeds)} of the pairs of this model, each in one colour. "
        f"“interleaved” keeps the channels of a pair side by side (0 and 1), “half” keeps them "
        f"half a head apart (0 and {second}). The numbers are the same in another order, so the "
        f"hands and q · k are the same at every position. Weights made for “half” and run as "
        f"“interleaved” turn channels together that do not belong together: q, which is made to "
        f"fit a key {BACK} tokens before it best, scores {wrong:.2f} there instead of {best:.2f}. "
        f"Nothing fails and no error is shown."
    )
    if width == 2:
        words = "The bars are k. A head of one pair is the same in both layouts."
    figure = Figure(
        Axis("distance, tokens"),
        Axis("q · k"),
        (Curve("right", "one layout"), Curve("mixed_up", "mixed up", "red", "dotted")),
        (Line("y", 0, "", "ink"),),
        moving={"kind": "layouts", "inv_freq": speeds.tolist(), "orders": orders, "last": REACH},
    )
    return Picture(columns, words, figure)


def methods(look: Look) -> Picture:
    """Draw what each scaling method does to each pair: its hand before and after scaling."""
    before = inv_freq(look.plain)[0]
    ways = _methods(look)
    seen = np.minimum(look.trained * inv_freq(look.before)[0], 2 * np.pi)
    last = max(look.context, look.trained)
    columns: dict[str, Numbers] = {"pair": np.arange(len(before))}
    new, stretched = {}, []
    for name, spec in ways.items():
        speeds = columns[re.sub(r"\W+", "_", name)] = inv_freq(spec, last)[0]
        stretched.append({"name": name, "inv_freq": (look.spec.sign * speeds).tolist()})
        share = extension.unseen(look.before, look.trained, spec, [last - 1], last)[0]
        new[name] = int((share > 0.005).sum())
    listed = ", ".join(f"{name} {count}" for name, count in new.items())
    words = (
        f"Each row is one method, each circle one pair at the position of the slider: the thin "
        f"orange hand without scaling, the blue one with it. Grey is what the pair showed in the "
        f"{counted(look.trained, 'token')} of training; a thick red hand is at an angle it never "
        f"showed. Pairs that meet such angles up to {last:,} tokens: {listed}, of {len(before)}."
    )
    if look.plain.schedule != "default":
        words += f" The published methods do not scale RoPE of type {look.plain.schedule!r}."
    elif look.context <= look.trained:
        words += " Choose a context longer than the training to see what scaling does."
    moving = {
        "kind": "methods",
        "before": (look.spec.sign * before).tolist(),  # without scaling
        "seen": seen.tolist(),  # radians that each pair made in training
        "methods": stretched,
        "last": last - 1,
    }
    return Picture(columns, words, Figure(Axis("pair"), Axis(""), moving=moving))


def _methods(look: Look) -> dict[str, Rotary]:
    """Return name -> RoPE: without scaling, by each method, and that of the model if it differs."""
    ways = {"no scaling": look.plain}
    if look.plain.schedule == "default":
        check_scaling(look.plain, look.trained)
        plain = dataclasses.replace(look.plain, axes=())
        specs = extension.methods(plain, look.trained, max(look.context, look.trained))
        ways |= {name: specs[name] for name in METHODS}
    if look.spec != look.plain and look.spec not in ways.values():
        ways[f"model: {look.spec.schedule}"] = look.spec
    return ways
