"""The same config.json as six programs read it: frequencies, switch rule, amplitude, side by side.

transformers, vLLM, SGLang, llama.cpp, mlx-lm and keras-hub take different rotations from one file.
Only transformers is run, by the tests, which compare its reading with what it computes. The rules
of the other five are read in their sources: every `Reading` names version, file and function. Each
is that of the program's Llama file, and of Phi-3's for `longrope`; where a file is silent about its
base, Llama's 10 000 is taken. llama.cpp reads the GGUF file that its converter writes.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..configs.entries import load, rope_parameters
from . import rules as peers
from .tables import PROGRAMS, Program

Array = npt.NDArray[np.floating]
TOLERANCE = 1e-9  # two formulas in float64; programs compute in float32, and differ by 1e-6 anyway

TRAINED = "original_max_position_embeddings"
NUMBERS = frozenset({
    "factor", "alpha", "mixed_b", "max_trained_positions", "beta_fast", "beta_slow",
    "attention_factor", "attn_factor", "mscale", "mscale_all_dim", "extrapolation_factor",
    "low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale", "rope_dim",
})  # fmt: skip
QWEN_VL = ("qwen2_vl", "qwen2_5_vl")
RENAME = {  # what to write instead of a type that some program refuses
    "su": "write rope_type longrope",
    "mrope": "write rope_type default beside mrope_section",
    "deepseek_yarn": "write rope_type yarn with the attention_factor this model was trained with",
    "telechat3-yarn": "write rope_type yarn with attention_factor = 0.07 ln(factor) + 1",
    "linear": "write factor with a decimal point, as 8.0",
}


class Reading(NamedTuple):
    """What one program makes of a config.

    schedule          what it computes, in words
    inv_freq          (pairs,) float64, rad per token; None if it refuses the config
    attention_factor  multiplies cos and sin; None if it refuses
    switch            when the frequencies change with length, and what decides
    refuses           its error, or ""
    notes, advice     what else differs; what to change, or ""
    source            file and function, in the version named
    """

    framework: str
    version: str
    schedule: str
    inv_freq: Array | None
    attention_factor: float | None
    switch: str
    refuses: str
    notes: tuple[str, ...]
    advice: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """The reading as JSON-ready data.

        >>> readings({"head_dim": 4})[0].to_dict()["inv_freq"]
        [1.0, 0.01]
        """
        inv_freq = None if self.inv_freq is None else self.inv_freq.tolist()
        return {**self._asdict(), "inv_freq": inv_freq, "notes": list(self.notes)}


class Difference(NamedTuple):
    """How far a program is from the reference, at the row length where that is farthest.

    Relative: the largest |inv_freq - reference| / reference, and the same of attention_factor. inf
    where one turns another number of pairs, or a pair that stands still in the other.
    """

    framework: str
    seq_len: int
    inv_freq: float
    attention_factor: float

    @property
    def agrees(self) -> bool:
        """True if both are within rounding.

        >>> Difference("vLLM", 4096, 0.0, 0.0).agrees
        True
        """
        return max(self.inv_freq, self.attention_factor) <= TOLERANCE


class Diff(NamedTuple):
    """The readings at the longest row compared, and what they mean."""

    readings: tuple[Reading, ...]
    lengths: tuple[int, ...]
    reference: str
    differences: tuple[Difference, ...]
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready data; null where a difference is infinite.

        >>> diff({"head_dim": 4}).to_dict()["reference"]
        'transformers'
        """
        return {
            "verdict": self.verdict,
            "reference": self.reference,
            "lengths": list(self.lengths),
            "differences": [
                {key: None if value == math.inf else value for key, value in d._asdict().items()}
                for d in self.differences
            ],
            "readings": [reading.to_dict() for reading in self.readings],
        }


def readings(
    config: Any, *, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[Reading, ...]:
    """What each of six programs makes of a Hugging Face config.

    config      path of a config.json or of the folder that holds it, or a dict
    seq_len     tokens of the one row that is computed, alone in its batch; it matters to dynamic
                and longrope. Default: the longest row the config is made for, that is
                max_position_embeddings, and factor times that for dynamic. Programs that decide
                once at start (vLLM, llama.cpp) are taken to be started for that longest row.
    layer_type  which entry of a `rope_parameters` that is nested by layer type

    A type that a program does not know is no error here but its `refuses`. Raises ValueError for
    values that give no rotation (a list of the wrong length, a negative factor), FileNotFoundError
    for a path that is not there.

    >>> for reading in readings({"head_dim": 128, "max_position_embeddings": 4096,
    ...                          "rope_scaling": {"type": "dynamic", "factor": 4.0}})[:3]:
    ...     print(f"{reading.framework:12} {reading.inv_freq[-1]:.2e} {reading.switch}")
    transformers 8.88e-06 with the longest row of the batch, at every forward
    vLLM         1.15e-04 never
    SGLang       8.88e-06 never
    """
    data, rope = _text_model(load(config), layer_type)
    return _read_all(_case(data, rope, layer_type, seq_len))


def diff(config: Any, *, seq_len: int | None = None, layer_type: str | None = None) -> Diff:
    """How far apart six programs are on one config, and what to do about it.

    Arguments and errors are those of `readings`. Differences are against transformers, or, where it
    refuses, the first program that accepts. Without `seq_len`, dynamic and longrope are compared
    at two lengths, the trained one and the longest, and the larger difference counts.

    >>> diff({"head_dim": 128, "rope_theta": 5e5}).verdict
    'All six agree.'
    >>> print(diff({"head_dim": 64, "rope_scaling": {"type": "linear", "factor": 8}}).verdict)
    Refused by vLLM, SGLang; all others agree. To be read by all, write factor with a decimal \
point, as 8.0.
    """
    data, rope = _text_model(load(config), layer_type)
    longest = _case(data, rope, layer_type, seq_len)
    lengths = {longest.seq_len}
    trained = longest.context if longest.rope_type == "dynamic" else longest.trained
    if seq_len is None and trained and longest.rope_type in ("dynamic", "longrope", "su"):
        lengths.add(trained)
    rows = {length: _read_all(_case(data, rope, layer_type, length)) for length in sorted(lengths)}
    accepted = [r.framework for r in rows[max(rows)] if r.inv_freq is not None]
    reference = accepted[0] if accepted else ""
    differences = tuple(_farthest(name, reference, rows) for name in accepted[1:])
    verdict = _verdict(rows, reference, differences, longest.rope_type)
    return Diff(rows[max(rows)], tuple(rows), reference, differences, verdict)


def _read_all(case: peers.Case) -> tuple[Reading, ...]:
    return tuple(_read(program, case) for program in PROGRAMS)


def _read(program: Program, case: peers.Case) -> Reading:
    rule, source = program.rules.get(case.rope_type, program.unknown)
    try:
        opened = program.opens(case)
        rule, source = program.rules.get(opened.rope_type, program.unknown)
        result = rule(opened, program.slices(opened))
    except peers.RefusedError as error:
        nothing = (None, None, "", str(error), program.notes, "")
        return Reading(program.name, program.version, "refused", *nothing, source)
    notes = (*program.notes, *result.notes)
    return Reading(
        program.name, program.version, result.schedule, result.inv_freq, result.attention_factor,
        result.switch, "", notes, result.advice or opened.advice, source,
    )  # fmt: skip


def _farthest(name: str, reference: str, rows: Mapping[int, tuple[Reading, ...]]) -> Difference:
    found = []
    for length, row in rows.items():
        by_name = {reading.framework: reading for reading in row}
        (theirs, factor), (ours, ours_factor) = (
            _accepted(by_name[name]),
            _accepted(by_name[reference]),
        )
        amplitude = abs(factor / ours_factor - 1)
        found.append(Difference(name, length, _relative(theirs, ours), amplitude))
    return max(found, key=lambda each: max(each.inv_freq, each.attention_factor))


def _accepted(reading: Reading) -> tuple[Array, float]:
    if reading.inv_freq is None or reading.attention_factor is None:
        raise ValueError(f"{reading.framework} refuses this config: {reading.refuses}")
    return reading.inv_freq, reading.attention_factor


def _relative(theirs: Array, ours: Array) -> float:
    if theirs.shape != ours.shape:
        return math.inf
    away = np.abs(theirs - ours)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.max(np.where(away == 0, 0.0, away / np.abs(ours))))


def _verdict(
    rows: Mapping[int, tuple[Reading, ...]],
    reference: str,
    differences: tuple[Difference, ...],
    rope_type: str,
) -> str:
    found = rows[max(rows)]
    if not reference:
        return f"No program accepts this config; transformers says {found[0].refuses}."
    refusing = [reading.framework for reading in found if reading.refuses]
    apart = [each for each in differences if not each.agrees]
    if not refusing and not apart:
        return "All six agree."
    said = [f"refused by {', '.join(refusing)}"] if refusing else []
    far = ", ".join(f"{each.framework} {_size(each, found)}" for each in apart)
    said.append(f"off from {reference}: {far}" if apart else "all others agree")
    first = "; ".join(said)
    advice = _advice(rows, apart)
    if refusing and rope_type in RENAME:
        advice = f"To be read by all, {RENAME[rope_type]}"
    elif refusing and not apart:
        advice = next(r.advice for r in found if r.framework == reference)
    return f"{first[0].upper()}{first[1:]}.{f' {advice}.' if advice else ''}"


def _size(each: Difference, found: tuple[Reading, ...]) -> str:
    if each.inv_freq == math.inf:
        (inv_freq,) = [r.inv_freq for r in found if r.framework == each.framework]
        return f"turns {np.count_nonzero(np.asarray(inv_freq))} pairs"
    sizes = {"inv_freq": each.inv_freq, "amplitude": each.attention_factor}
    parts = [f"{100 * size:.2g}% in {name}" if size < 0.1 else f"{size:,.0%} in {name}"
             for name, size in sizes.items() if size > TOLERANCE]  # fmt: skip
    return f"by {' and '.join(parts)}"


def _advice(rows: Mapping[int, tuple[Reading, ...]], apart: list[Difference]) -> str:
    """What the program that is farthest off needs, or the next one for which that is known."""
    for each in sorted(apart, key=lambda each: -max(each.inv_freq, each.attention_factor)):
        for reading in rows[each.seq_len]:
            if reading.framework == each.framework and reading.advice:
                return reading.advice
    if any(each.inv_freq == math.inf for each in apart):
        return "Not all obey partial_rotary_factor: remove it where the model turns whole heads"
    return ""


# --- the file ---


def _text_model(
    data: Mapping[str, Any], layer_type: str | None
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The part of the file that describes the text model, and its rope parameters of one layer."""
    if isinstance(data.get("text_config"), Mapping):
        data = {**data, **data["text_config"]}
    rope = rope_parameters(data)
    is_nested = bool(rope) and all(isinstance(value, Mapping | None) for value in rope.values())
    if not is_nested:
        return data, rope
    if rope.get(layer_type or "") is None:
        turning = ", ".join(name for name, value in rope.items() if value is not None)
        raise ValueError(
            f"rope_parameters is nested: layer_type must be one of {turning}; got {layer_type!r}"
        )
    return data, dict(rope[layer_type or ""])


def _case(
    data: Mapping[str, Any], rope: dict[str, Any], layer_type: str | None, seq_len: int | None
) -> peers.Case:
    outer = {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    for name, silent in outer.items():
        value = rope.get(name) if rope.get(name) is not None else data.get(name)
        outer[name] = _number(name, silent if value is None else value)
    share = outer["partial_rotary_factor"]
    if not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor must be in (0, 1], got {share}")
    for name, value in rope.items():
        if name in NUMBERS and value is not None:
            _number(name, value)
    head_dim, context = _head_dim(data), _whole("max_position_embeddings", data)
    if head_dim % 2 or int(head_dim * share) % 2:
        raise ValueError(f"{share:g} of head_dim {head_dim} is an odd number of channels")
    model_type = str(data.get("model_type", ""))
    rope_type = _rope_type(rope, model_type)
    trained = _whole(TRAINED, data) or _whole(TRAINED, rope) or context
    if model_type in peers.PHI3:
        trained = _whole(TRAINED, data) or 4096
    growth = rope.get("factor") or 1 if rope_type == "dynamic" else 1
    longest = math.ceil((context or 1) * growth)
    if seq_len is not None and (isinstance(seq_len, bool) or not isinstance(seq_len, int)
                                or seq_len < 1):  # fmt: skip
        raise ValueError(f"seq_len must be a whole number >= 1, got {seq_len!r}")
    nested = layer_type if dict(data.get("rope_parameters") or {}).get(layer_type or "") else None
    return peers.Case(
        data, {**rope, **outer}, rope_type, model_type, nested, outer["rope_theta"], head_dim,
        share, context, trained, longest if seq_len is None else seq_len,
    )  # fmt: skip


def _rope_type(rope: Mapping[str, Any], model_type: str) -> str:
    name = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(name, str):
        raise ValueError(f"rope_type must be a name, got {name!r}")
    if model_type in peers.PHI3 and name in ("su", "yarn"):
        return "longrope"  # their config classes say so, and QWEN_VL's do the same to mrope
    return "default" if model_type in QWEN_VL and name == "mrope" else name


def _head_dim(data: Mapping[str, Any]) -> int:
    head_dim = _whole("head_dim", data)
    hidden, heads = _whole("hidden_size", data), _whole("num_attention_heads", data)
    if head_dim is None and (hidden is None or heads is None):
        raise ValueError("the config needs head_dim, or hidden_size and num_attention_heads")
    return head_dim or (hidden or 0) // (heads or 1)


def _whole(name: str, mapping: Mapping[str, Any]) -> int | None:
    value = mapping.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)
