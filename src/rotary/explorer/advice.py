"""Views that say what to do: how far a RoPE reaches, how to extend it, how two RoPEs differ."""

import json
import math
from collections.abc import Iterator

import numpy as np

from ..analysis import bounds
from ..analysis.extension import option_rows
from ..analysis.spectrum import whole_head
from ..angles import inv_freq
from ..kernels import Numbers
from ..plan import MAX_CONTEXT, recommend_layers
from ..reach import TOLERANCE, reach_of_layer
from ..words import counted
from .curves import distance_axis, outline, trained_line
from .figures import Axis, Bar, Curve, Figure, Line, Picture, Table
from .side import FieldError, Look, check_scaling

ALIKE = 1e-9  # frequencies with a smaller relative difference count as equal


def reach(look: Look) -> Picture:
    """Draw every length that bounds a RoPE, beside the requested context: `rotary.reach`."""
    context, trained, window = look.context, look.trained, look.entry.window
    result = reach_of_layer(look.spec, context, trained, look.entry, original=look.before)
    first, exact, turn = result.first_failure, result.float32_positions, result.longest_wavelength
    similar = "a similar key is first not preferred at (B_m < 0)"

    def end(name: str, at: int, text: str = "") -> Bar:
        return Bar(name, at, text or counted(at, "token"), at < context)

    bars = (
        Bar("context asked for", context, counted(context, "token")),
        *([] if window is None else [end("these layers see no farther than", window)]),
        end("trained length", trained),
        end(similar, first, f"{first:,}")
        if first
        else Bar(similar, result.length, f"none up to {result.length:,}"),
        end(f"float32 angles are right to {TOLERANCE:g} rad up to", exact, f"{exact:,}"),
        # no end: a pair that turns has shown all of its angles
        Bar("the slowest pair turns once in", turn, f"{turn:,.0f} tokens"),
    )
    lengths = np.array([max(bar.length, 1.0) for bar in bars])
    figure = Figure(
        Axis("tokens", is_log=True, ends=(float(lengths.min()) / 4, float(lengths.max()) * 1.1)),
        Axis(""),
        lines=(Line("x", context, "context", "red"),),
        bars=bars,
    )
    columns: dict[str, Numbers] = {"bar": np.arange(len(bars)), "tokens": lengths}
    table = Table(("what", "value"), tuple(result.rows()))
    return Picture(columns, result.verdict, figure, (table,))


def plan(look: Look) -> Picture:
    """Draw how trained weights can reach the context, with the config for it: `rotary.plan`.

    Raises FieldError for a context beyond what `rotary plan` searches, ValueError as `recommend`.
    """
    if not 2 <= look.context <= MAX_CONTEXT:
        raise FieldError(
            "context",
            f"a plan is made for a context of 2 .. {MAX_CONTEXT:,} tokens, got {look.context:,}",
        )
    if look.context > look.advertised:
        check_scaling(look.spec, look.trained)
    advice = recommend_layers(look.entry, look.spec, look.context, look.trained, look.advertised)
    shown = [("as_it_is", "as it is", look.spec)]
    if advice.action != "keep":
        name = f"recommended: {advice.recommended.schedule}"
        shown.append(("recommended", name, advice.recommended))
    last = advice.context  # no farther than the window
    distances = np.unique(np.concatenate([outline(spec, last) for *_, spec in shown]))
    columns: dict[str, Numbers] = {"distance": distances}
    curves: list[Curve] = []
    for column, name, spec in shown:
        head = whole_head(spec, advice.nope_head_dim)
        columns[column] = bounds.similarity(head, distances, seq_len=last)
        curves.append(Curve(column, name, *(("red", "dotted") if curves else ("blue", ""))))
    figure = Figure(
        distance_axis(look.spec, last),
        Axis("B_m: preference for a similar key"),
        tuple(curves),
        (Line("y", 0, "", "ink"), *trained_line(look, last)),
    )
    header, *rows = option_rows(advice.options)
    tables = (Table(header, tuple(rows)),) if rows else ()
    keys = dict(advice.rope_parameters)
    if "head_dim" in keys:  # of the config, which may have been changed on the page
        keys["head_dim"] = look.spec.head_dim
    return Picture(columns, advice.reason, figure, tables, json.dumps(keys, indent=2))


def difference(a: Look, b: Look) -> Picture:
    """Draw the frequencies of two RoPEs in one figure; list and explain their differences."""
    speeds = [np.abs(inv_freq(each.spec, each.context)[0]) for each in (a, b)]
    count = max(map(len, speeds))
    columns: dict[str, Numbers] = {"pair": np.arange(count)}
    for name, values in zip("ab", speeds, strict=True):
        columns[f"wavelength_{name}"] = np.full(count, math.nan)
        turning = values > 0
        columns[f"wavelength_{name}"][: len(values)][turning] = 2 * math.pi / values[turning]
    figure = Figure(
        Axis("pair"),
        Axis("tokens for one turn", is_log=True),
        (Curve("wavelength_a", "A", has_dots=True),
         Curve("wavelength_b", "B", "red", "dotted", has_dots=True)),
    )  # fmt: skip
    one, other = _fields(a), _fields(b)
    rows = tuple((name, one.get(name, "-"), other.get(name, "-")) for name in one | other
                 if one.get(name) != other.get(name))  # fmt: skip
    tables = (Table(("field", "A", "B"), rows),) if rows else ()
    return Picture(columns, " ".join(_meaning(a, b, speeds)), figure, tables)


def _fields(look: Look) -> dict[str, str]:
    """Return the fields of a RoPE and its trained and advertised length, each as text."""
    spec = look.head.to_dict()
    params = spec.pop("params")
    lengths = {"trained length": look.trained, "advertised length": look.advertised}
    factor = {"attention_factor": inv_freq(look.spec, look.context)[1]}
    return {name: _text(value) for name, value in {**spec, **params, **factor, **lengths}.items()}


def _text(value: object) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"{len(value)} numbers, {value[0]:.4g} to {value[-1]:.4g}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.10g}"
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _meaning(a: Look, b: Look, speeds: list[Numbers]) -> Iterator[str]:
    """Yield sentences that say what the differences mean for weights and cached keys."""
    one, other = a.head, b.head
    slices = [(each.head_dim, each.rotary_dim, each.start) for each in (one, other)]
    if slices[0] != slices[1]:
        yield (
            f"A rotates {one.rotary_dim} of {one.head_dim} channels, B {other.rotary_dim} of "
            f"{other.head_dim}: neither weights nor cached keys of one fit the other."
        )
        return
    if one.layout != other.layout:
        yield (
            f"The layouts differ: A is {one.layout}, B is {other.layout}. Weights of one give "
            "wrong scores in code for the other, without an error: `rotary convert` moves them."
        )
    elif one.out_layout != other.out_layout:
        yield (
            f"A writes rotated channels as {one.out_layout}, B as {other.out_layout}: weights fit "
            "both, but keys cached by one give wrong scores with queries of the other."
        )
    is_same_order = (one.layout, one.out_layout) == (other.layout, other.out_layout)
    if (one.sign, one.axes) != (other.sign, other.axes):
        yield "Direction or axes of the pairs differ: they turn by other angles."
    first, second = speeds
    apart = np.abs(first - second) > ALIKE * np.maximum(first, second)
    factors = [inv_freq(each.spec, each.context)[1] for each in (a, b)]
    depends = [name for name, each in (("A", one), ("B", other)) if each.depends_on_length]
    if apart.any():
        pairs = np.flatnonzero(apart)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(apart, first / second, 1.0)
        worst = int(np.nanargmax(np.abs(np.log(np.clip(ratio, 1e-300, 1e300)))))
        fast, slow, by = (
            ("A", "B", ratio[worst]) if ratio[worst] > 1 else ("B", "A", 1 / ratio[worst])
        )
        which = "All pairs"
        if not apart.all():
            which = f"{len(pairs)} of {len(apart)} pairs, from {pairs[0]} on,"
        yield (
            f"{which} turn at another speed; pair {worst} differs most: in {fast} it turns "
            f"{by:.4g} times as fast as in {slow}. Keys cached by one cannot be read by the other, "
            "and weights trained with one need the frequencies of that one."
        )
    elif (
        is_same_order and one.axes == other.axes and one.sign == other.sign
        and math.isclose(*factors) and (not depends or one == other)
    ):  # fmt: skip
        yield "Every pair turns at the same speed in both: one can be used in place of the other."
    else:
        yield "Every pair turns at the same speed in both."
    if not math.isclose(*factors):
        yield (
            f"Scores are multiplied by {factors[0] ** 2:.4g} in A and {factors[1] ** 2:.4g} in B."
        )
    if depends:
        verb = "depend" if len(depends) > 1 else "depends"
        yield f"{' and '.join(depends)} {verb} on the length: shown at {a.context:,} tokens."
