"""Compares the methods that extend a trained model to a longer context."""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..angles import inv_freq
from ..spec import Rotary
from .bounds import survey
from .spectrum import (
    Array,
    check_size,
    frequencies,
    turns_completed,
    whole_head,
    whole_number,
    whole_numbers,
)


class Row(NamedTuple):
    """The result of one method for a target length; see `compare`."""

    method: str
    spec: Rotary
    first_failure: int | None
    failures: int
    unseen: float
    lowest: float
    fastest_ratio: float
    slowest_ratio: float
    attention_factor: float


def coverage(spec: Rotary, trained: int, seq_len: int | None = None) -> Array:
    """(pairs,) float64 in 0..1: the share of the circle that each pair has shown in training.

    min(1, turns in `trained` tokens); 0 for a pair that stands still. Source: Peng et al., YaRN
    (arXiv 2309.00071), section 3.2. Raises ValueError for a length that is not a whole number in
    1 .. 2^24.

    >>> coverage(Rotary(head_dim=4), 100).round(2)
    array([1.  , 0.16])
    """
    return np.minimum(1.0, turns_completed(spec, whole_number("trained", trained), seq_len))


def unseen(
    original: Rotary,
    trained: int,
    spec: Rotary,
    positions: npt.ArrayLike,
    seq_len: int | None = None,
) -> Array:
    """(len, pairs) float64 in 0..1: the share of each pair's angles that training never showed.

    original   the spec that the model was trained with, on sequences of up to `trained` tokens
    spec       the spec to run it with, of as many pairs, on a sequence of `seq_len` tokens
    positions  (len,) whole numbers in 0 .. 2^24; each stands for the distances 0 .. position
    For a pair that makes a whole turn in `trained` tokens the share is 0: it has seen every angle.
    Any other pair has seen the arc 0 .. trained * inv_freq. Its share is the part of the arc
    0 .. position * inv_freq that lies outside of it, with angles as a continuum, turn by turn.
    The measure is ours; that low frequencies meet angles never seen is Peng et al., YaRN (arXiv
    2309.00071), section 3.2. Raises ValueError for lengths and positions that are not such
    numbers, for more than 2^27 positions times pairs, and for specs of different rotary_dim.

    >>> spec = Rotary(head_dim=4)
    >>> unseen(spec, 100, spec, [99, 200])
    array([[0. , 0. ],
           [0. , 0.5]])
    """
    places = whole_numbers("positions", positions)
    check_size("positions", len(places), spec.rotary_dim // 2)
    if original.rotary_dim != spec.rotary_dim:
        raise ValueError(
            f"original and spec must have the same rotary_dim, got {original.rotary_dim} and "
            f"{spec.rotary_dim}"
        )
    seen = whole_number("trained", trained) * frequencies(original)  # rad
    arcs = places[:, None] * frequencies(spec, seq_len)
    whole, rest = np.divmod(arcs, 2 * math.pi)
    new = np.where(seen < 2 * math.pi, arcs - (whole * seen + np.minimum(rest, seen)), 0.0)
    share = np.divide(new, arcs, out=np.zeros_like(arcs), where=arcs > 0)
    return np.clip(share, 0.0, 1.0)


def unseen_share(
    original: Rotary, trained: int, spec: Rotary, position: int, seq_len: int | None = None
) -> float:
    """The mean of `unseen` over the pairs, at one position. Raises as `unseen`.

    >>> spec = Rotary(head_dim=4)
    >>> unseen_share(spec, 100, spec, 200)
    0.25
    """
    place = whole_number("position", position, 0)
    return float(unseen(original, trained, spec, [place], seq_len).mean())


def methods(spec: Rotary, trained: int, target: int) -> dict[str, Rotary]:
    """Name -> `spec` stretched from `trained` to `target` tokens, by each published method.

    "none" is `spec` itself; "linear", "ntk", "ntk_mixed", "yarn", "llama3" and "longrope" are the
    schedules of `rotary.schedules`, which name their sources, with factor = target / trained and
    the parameters their authors publish: YaRN 32 and 1 turns, llama3 1 and 4 turns, ntk_mixed
    b = 0.625. LongRoPE has no formula: its authors search a factor for each pair. Here the critical
    dimension decides (Liu et al., arXiv 2310.05209): the factor is 1 for the pairs that make more
    than one turn in `trained` tokens, target / trained for the others. LongRoPE takes effect in
    sequences longer than `trained`: give `seq_len=target`.
    Slice, layout and sign stay. transformers has all types but ntk and ntk_mixed.
    Raises ValueError for a spec with a schedule of its own or several axes, for base 1, and for
    lengths that are not whole numbers, 2 <= trained <= target <= 2^24.

    >>> methods(Rotary(head_dim=128), 4096, 32768)["linear"]
    Rotary(head_dim=128, schedule='linear', params={'factor': 8.0})
    """
    trained = whole_number("trained", trained, 2)
    factor = whole_number("target", target, trained) / trained
    if spec.schedule != "default" or spec.num_axes > 1:
        own = f"schedule {spec.schedule!r}" if spec.num_axes == 1 else f"{spec.num_axes} axes"
        raise ValueError(
            f"methods stretch the spec that was trained, with schedule 'default' and one axis; "
            f"got {own}"
        )
    if spec.base == 1:
        raise ValueError("methods stretch a ladder of frequencies; base 1 has a single one")
    length = {"original_max_position_embeddings": trained}
    ones = [1.0] * (spec.rotary_dim // 2)
    by_turns = np.where(turns_completed(spec, trained) > 1, 1.0, factor).tolist()
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    lists = {"short_factor": ones, "long_factor": by_turns}
    stretched = {
        "linear": {"factor": factor},
        "ntk": {"factor": factor},
        "ntk_mixed": {"factor": factor},
        "yarn": {"factor": factor, **length},
        "llama3": {"factor": factor, **bounds, **length},
        "longrope": {"factor": factor, **lists, **length},
    }
    return {"none": spec} | {
        name: dataclasses.replace(spec, schedule=name, params=params)
        for name, params in stretched.items()
    }


def stretched_further(spec: Rotary, growth: float) -> Rotary:
    """Return a scaled spec with `growth` times its factor.

    An attention factor that is the default for the old factor becomes the default for the new one;
    another one was chosen, and stays. Raises ValueError for a spec without a factor.

    >>> params = {"factor": 4.0, "original_max_position_embeddings": 4096}
    >>> stretched_further(Rotary(head_dim=8, schedule="yarn", params=params), 2.0).params["factor"]
    8.0
    """
    if "factor" not in spec.params:
        raise ValueError(
            f"schedule {spec.schedule!r} of the spec has no factor to be made larger: "
            "analysis.methods(spec, trained, target) stretches such a spec"
        )
    params = {key: value for key, value in spec.params.items() if key != "attention_factor"}
    default = inv_freq(dataclasses.replace(spec, params=params))[1]
    if not math.isclose(default, inv_freq(spec)[1], rel_tol=1e-6):
        params["attention_factor"] = spec.params["attention_factor"]
    params["factor"] = spec.params["factor"] * growth
    return dataclasses.replace(spec, params=params)


def compare(spec: Rotary, trained: int, target: int, *, nope_head_dim: int = 0) -> list[Row]:
    """Return one `Row` for each of `methods`, for sequences of `target` tokens.

    nope_head_dim     channels of a head beside those of `spec`: qk_nope_head_dim of latent
                      attention. They are not rotated, and count in B_m
    The fields of a row:
    first_failure     first distance in 1 .. target where B_m < 0 (Men et al., arXiv 2405.14591);
                      None: there is none
    failures          how many such distances there are
    unseen            share of angles never seen in training at the last position (`unseen_share`);
                      use without tuning needs 0
    lowest            smallest B_m divided by the number of pairs, in -1..1
    fastest_ratio     new over old frequency of the fastest pair: below 1, neighbours are closer
    slowest_ratio     the same for the slowest pair: trained / target keeps it inside its arc
    attention_factor  what multiplies cos and sin
    Raises as `methods`.

    >>> for row in compare(Rotary(head_dim=128), 4096, 32768)[:3]:
    ...     print(row.method, row.first_failure, row.failures, round(row.unseen, 3))
    none 1707 18517 0.177
    linear 13649 3370 0.0
    ntk 5732 4210 0.056
    """
    rows = []
    for name, stretched in methods(spec, trained, target).items():
        head = whole_head(stretched, nope_head_dim)
        failing, _, least = survey(head, target, seq_len=target)
        ratios = frequencies(stretched, target) / frequencies(spec)
        rows.append(
            Row(
                method=name,
                spec=stretched,
                first_failure=int(failing[0]) if len(failing) else None,
                failures=len(failing),
                unseen=unseen_share(spec, trained, stretched, target - 1, target),
                lowest=least,
                fastest_ratio=float(ratios[0]),
                slowest_ratio=float(ratios[-1]),
                attention_factor=inv_freq(stretched, target)[1],
            )
        )
    return rows


def option_rows(options: Iterable[Row]) -> list[tuple[str, ...]]:
    """Return the rows of `compare` as text, headers first: the second table of `rotary plan`.

    >>> option_rows(compare(Rotary(head_dim=128), 4096, 8192))[1][:3]
    ('none', '1,707', '2,478')
    """
    return [
        ("method", "first B_m < 0", "all", "unseen angles", "fastest pair, new / old speed",
         "slowest pair, new / old speed"),
        *(
            (row.method, "none" if row.first_failure is None else f"{row.first_failure:,}",
             f"{row.failures:,}", f"{row.unseen:.1%}", f"{row.fastest_ratio:.3g}",
             f"{row.slowest_ratio:.3g}")
            for row in options
        ),
    ]  # fmt: skip
