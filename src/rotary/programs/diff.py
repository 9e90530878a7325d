"""`diff`: compare what several programs compute from the same config.json.

transformers, vLLM, SGLang, llama.cpp, mlx-lm and keras-hub may compute different rotations from one
file. The file is read once, by `rotary.configs`. The rotation of transformers is that of
`from_hf_config`; each other program has a file in this folder. llama.cpp reads the GGUF file that
its converter writes.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..configs import Config, choose
from ..configs.entries import MODELS, TEXT_PARTS
from ..configs.hf import LAYOUT_MARK, check_top, refuse
from ..configs.values import whole_number
from ..schedules import SCHEDULES, parameters
from ..spec import Rotary, check_whole
from ..strict_json import JSON
from ..words import nearest
from .case import Array, Case, NotComparedError, Program, RefusedError
from .keras_hub import KERAS_HUB
from .llama_cpp import LLAMA_CPP
from .mlx_lm import MLX_LM
from .sglang import SGLANG
from .transformers import TRANSFORMERS
from .vllm import VLLM

PROGRAMS = (TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP, MLX_LM, KERAS_HUB)
TOLERANCE = 1e-9  # between formulas in float64; float32 of the programs adds errors of 1e-6
NUMBERS = frozenset({
    "factor", "alpha", "mixed_b", "max_trained_positions", "beta_fast", "beta_slow",
    "attention_factor", "attn_factor", "mscale", "mscale_all_dim", "extrapolation_factor",
    "low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale", "rope_dim", "rotary_dim",
    "rotary_pct", "rope_theta", "partial_rotary_factor",
})  # fmt: skip
BASE_KEYS = frozenset(  # the names that models have for the key of the base
    names["rope_theta"]
    for model in MODELS.values()
    for names in (model.get("names", {}), *model.get("layer_names", {}).values())
    if "rope_theta" in names
)
LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")
KEYS = NUMBERS | {  # rope parameters that at least one program reads
    *(key for schedule in SCHEDULES for key in parameters(schedule)),
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "rope_dim", "interleaved"),
    *("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings"),
    *("apply_yarn_scaling", "original_max_position_embeddings", "use_fope", "finetuned"),
}
RENAME = {  # what to write instead of a type that at least one program refuses
    "su": "write rope_type longrope",
    "mrope": "write rope_type default beside mrope_section",
    "deepseek_yarn": "write rope_type yarn with the attention_factor this model was trained with",
    "telechat3-yarn": "write rope_type yarn with attention_factor = 0.07 ln(factor) + 1",
    "linear": "write factor with a decimal point, as 8.0",
}


class Reading(NamedTuple):
    """What one program makes of a config.

    schedule          what it computes, in words
    inv_freq          (pairs,) float64, rad per token; None if it computes nothing
    attention_factor  multiplies cos and sin; None if it computes nothing
    switch            when the frequencies change with length, and what decides
    refuses           its error, or ""
    not_compared      why it is not known what it computes from this config, or ""
    notes, advice     what else differs; what to change, or ""
    source            file and function of the program, in this version
    """

    framework: str
    version: str
    schedule: str = ""
    inv_freq: Array | None = None
    attention_factor: float | None = None
    switch: str = ""
    refuses: str = ""
    not_compared: str = ""
    notes: tuple[str, ...] = ()
    advice: str = ""
    source: str = ""

    def to_dict(self) -> dict[str, JSON]:
        """Return the reading as JSON-ready data.

        >>> readings({"head_dim": 4})[0].to_dict()["inv_freq"]
        [1.0, 0.01]
        """
        inv_freq = None if self.inv_freq is None else self.inv_freq.tolist()
        return {**self._asdict(), "inv_freq": inv_freq, "notes": list(self.notes)}


Readings = Mapping[int, Mapping[str, Reading]]  # by length and program


class Difference(NamedTuple):
    """How far a program is from the reference, at the sequence length of the largest difference.

    inv_freq is the largest |inv_freq - reference| / reference of all pairs, and attention_factor
    the same for the attention factor. inf if the two rotate another number of pairs, or if the
    program rotates a pair that stands still in the reference.
    """

    framework: str
    seq_len: int
    inv_freq: float
    attention_factor: float

    @property
    def agrees(self) -> bool:
        """Return True if both differences are within rounding.

        >>> Difference("vLLM", 4096, 0.0, 0.0).agrees
        True
        """
        return _size(self) <= TOLERANCE


class Diff(NamedTuple):
    """The readings at the longest sequence compared, and what they mean."""

    readings: tuple[Reading, ...]
    lengths: tuple[int, ...]
    reference: str
    differences: tuple[Difference, ...]
    verdict: str

    def to_dict(self) -> dict[str, JSON]:
        """Return the comparison as JSON-ready data; an infinite difference is null.

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
    config: object,
    *,
    seq_len: int | None = None,
    layer_type: str | None = None,
    part: str | None = None,
) -> tuple[Reading, ...]:
    """Return what each of six programs makes of a Hugging Face config.

    config      path of a config.json or of the folder that holds it, or a dict
    seq_len     tokens of the one sequence that is computed, alone in its batch; it matters to
                dynamic and longrope. Default: the longest sequence that the config is made for,
                that is max_position_embeddings, and factor times that for dynamic. Programs that
                decide once at start (vLLM, llama.cpp) are assumed to be started for that longest
                sequence.
    layer_type  which entry, if frequencies differ by layer type
    part        which sub-config of a model of several parts, as in `from_hf_config`; the vision
                parts of other programs are not compared

    If a program does not know a type, `refuses` of its reading has the error that it raises. Raises
    ValueError for a model type, layer type or part that is not known and for values that give no
    rotation (a list of the wrong length, a negative factor), FileNotFoundError for a path that does
    not exist.

    >>> for reading in readings({"head_dim": 128, "max_position_embeddings": 4096,
    ...                          "rope_scaling": {"type": "dynamic", "factor": 4.0}})[:3]:
    ...     print(f"{reading.framework:12} {reading.inv_freq[-1]:.2e} {reading.switch}")
    transformers 8.88e-06 with the longest sequence of the batch, at every forward
    vLLM         1.15e-04 never
    SGLang       8.88e-06 never
    """
    return tuple(_read_all(_case(choose(config, layer_type, part), seq_len), part).values())


def diff(
    config: object,
    *,
    seq_len: int | None = None,
    layer_type: str | None = None,
    part: str | None = None,
) -> Diff:
    """Return how far apart six programs are on one config, and what to do about it.

    Frequencies and attention factors are compared, not which channels make a pair.
    Arguments and errors are those of `readings`. Differences are from transformers or, if it
    refuses, from the first program that accepts. Without `seq_len`, dynamic and longrope are
    compared at two lengths, the trained one and the longest, and the larger difference counts.

    >>> diff({"head_dim": 128, "rope_theta": 5e5}).verdict
    'All six agree.'
    >>> print(diff({"head_dim": 64, "rope_scaling": {"type": "linear", "factor": 8}}).verdict)
    Refused by vLLM, SGLang, keras-hub; all others agree. To be read by more, write factor with a \
decimal point, as 8.0.
    """
    entry = choose(config, layer_type, part)
    longest = _case(entry, seq_len)
    lengths = {longest.seq_len}
    trained = entry.context if longest.rope_type == "dynamic" else longest.trained
    if seq_len is None and trained and longest.rope_type in ("dynamic", "longrope", "su"):
        lengths.add(trained)
    by_length = {length: _read_all(_case(entry, length), part) for length in sorted(lengths)}
    of_longest = by_length[max(by_length)]
    accepted = [name for name, reading in of_longest.items() if reading.inv_freq is not None]
    reference = accepted[0] if accepted else ""
    differences = tuple(_farthest(name, reference, by_length) for name in accepted[1:])
    verdict = _verdict(by_length, reference, differences, longest.rope_type)
    if key := _key_of_another_layout(entry):
        verdict += f" Layouts are not compared, and not all programs read {key}."
    return Diff(tuple(of_longest.values()), tuple(by_length), reference, differences, verdict)


def _case(config: Config, seq_len: int | None) -> Case:
    """Check the values of the config, and return it before any program has opened it."""
    if not config.rotates:
        where = f"layer type {config.layer_type!r}" if config.layer_type else "this config"
        raise ValueError(f"{where} has no rotation; there is nothing to compare")
    if seq_len is not None:
        check_whole("seq_len", seq_len)
    Rotary(head_dim=config.head_dim, rotary_dim=config.rotary_dim, base=config.base)  # checks these
    for name in config.rope:
        if name not in KEYS:
            raise ValueError(f"rope key {name!r} is read by no program{nearest(name, KEYS)}")
    for keys in (config.rope, config.data):  # some programs also read keys outside the entry
        _check_values(keys)
    check_top(config, refuse)
    rope_type, context = config.rope_type, config.context
    growth = config.rope.get("factor") or 1 if rope_type == "dynamic" else 1
    if seq_len is None:
        seq_len = math.ceil((context or 1) * growth)
    rope = {
        name: False if name == "truncate" and value is None else value
        for name, value in config.rope.items()
        if value is not None or name in ("truncate", "factor")  # null only has a meaning for these
    }
    return Case(config, rope, rope_type, config.base, config.rotary_dim, config.trained, seq_len)


def _check_values(keys: Mapping[str, JSON]) -> None:
    """Refuse a value of the wrong type, also in nested objects."""
    for name, value in keys.items():
        if value is None:
            continue
        if name in LENGTHS:
            whole_number(name, value, 1)
        elif name in ("rope_type", "type"):
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a name, got {value!r}")
        elif name in NUMBERS | BASE_KEYS and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(f"{name} must be a number, got {value!r}")
        elif name in ("short_factor", "long_factor"):
            if not isinstance(value, list | tuple):
                raise ValueError(f"{name} must be a list of numbers, got {value!r}")
        elif isinstance(value, Mapping) and name not in NUMBERS:
            _check_values(value)


def _read_all(case: Case, part: str | None) -> dict[str, Reading]:
    is_text = part is None or part in TEXT_PARTS
    return {program.name: _read(program, case, is_text) for program in PROGRAMS}


def _read(program: Program, case: Case, is_text: bool) -> Reading:
    _, source = program.rules.get(case.rope_type, program.unknown)
    reading = Reading(program.name, program.version, notes=program.notes, source=source)
    try:
        if not is_text and program is not TRANSFORMERS:
            raise NotComparedError("only the text part is compared")
        case = program.opens(case)
        rule, source = program.rules.get(case.rope_type, program.unknown)
        reading = reading._replace(source=source)
        result = rule(case)
    except RefusedError as error:
        return reading._replace(schedule="refused", refuses=str(error))
    except NotComparedError as error:
        return reading._replace(schedule="not compared", not_compared=str(error))
    notes, advice = (*program.notes, *result.notes), result.advice or case.advice
    return reading._replace(**{**result._asdict(), "notes": notes, "advice": advice})


def _farthest(name: str, reference: str, by_length: Readings) -> Difference:
    """Return the largest difference, over all lengths, of two programs that accept the config."""
    differences = []
    for length, of in by_length.items():
        inv_freq = _relative(of[name].inv_freq, of[reference].inv_freq)
        attention_factor = _relative(of[name].attention_factor, of[reference].attention_factor)
        differences.append(Difference(name, length, inv_freq, attention_factor))
    return max(differences, key=_size)


def _size(difference: Difference) -> float:
    return max(difference.inv_freq, difference.attention_factor)


def _relative(theirs: npt.ArrayLike | None, ours: npt.ArrayLike | None) -> float:
    a, b = np.asarray(theirs, np.float64), np.asarray(ours, np.float64)
    if a.shape != b.shape:
        return math.inf
    away = np.abs(a - b)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.max(np.where(away == 0, 0.0, away / np.abs(b))))


def _verdict(
    by_length: Readings, reference: str, differences: tuple[Difference, ...], rope_type: str
) -> str:
    readings = by_length[max(by_length)]
    refusing = [name for name, reading in readings.items() if reading.refuses]
    compared = [name for name, reading in readings.items() if reading.inv_freq is not None]
    apart = sorted((each for each in differences if not each.agrees), key=_size, reverse=True)
    if not reference:
        refusal = readings["transformers"].refuses
        return f"No program accepts this config; transformers says {refusal}."
    if len(compared) == 1 and not refusing:
        return f"Read by {reference} alone; nothing to compare."
    if not refusing and not apart:
        if len(compared) == len(readings):
            return "All six agree."
        return f"All that read it agree: {', '.join(compared)}."
    off = [f"{each.framework} {_words(each, readings[each.framework])}"
           for each in differences if each in apart]  # fmt: skip
    lengths = sorted({each.seq_len for each in apart}) if len(by_length) > 1 else []
    at = f" at {' or '.join([f'{length:,}' for length in lengths])} tokens" if lengths else ""
    first = f"off from {reference}{at}: {', '.join(off)}" if apart else "all others agree"
    if refusing:
        first = f"refused by {', '.join(refusing)}; {first}"
    advice = readings[reference].advice
    if (
        refusing
        and rope_type in RENAME
        and (rope_type != "linear" or {"vLLM", "SGLang"} & set(refusing))
    ):
        advice = f"To be read by more, {RENAME[rope_type]}"
    elif apart and not advice:  # the advice for the program that is farthest off and has one
        lines = (by_length[each.seq_len][each.framework].advice for each in apart)
        share = "Not all obey partial_rotary_factor: remove it where the model rotates whole heads"
        advice = next(filter(None, lines), share if apart[0].inv_freq == math.inf else "")
    return f"{first[0].upper()}{first[1:]}.{f' {advice}.' if advice else ''}"


def _key_of_another_layout(config: Config) -> str:
    """Return the key that states another layout than that of the model's code, or ""."""
    is_interleaved = config.model.get("layout", "half") == "interleaved"
    keys = (config.model.get("layout_key", LAYOUT_MARK), LAYOUT_MARK)
    return next((key for key in keys if config.data.get(key) is (not is_interleaved)), "")


def _words(each: Difference, reading: Reading) -> str:
    if each.inv_freq == math.inf:
        return f"rotates {np.count_nonzero(np.asarray(reading.inv_freq))} pairs"
    sizes = {"inv_freq": each.inv_freq, "attention factor": each.attention_factor}
    parts = [f"{100 * size:.2g}% in {name}" if size < 0.1 else f"{size:,.0%} in {name}"
             for name, size in sizes.items() if size > TOLERANCE]  # fmt: skip
    return f"by {' and '.join(parts)}"
