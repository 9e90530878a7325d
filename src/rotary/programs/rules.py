"""Formulas that several programs share, as rules: from a `Case` to a `Result`.

Frequencies come from `rotary.schedules`; only what deviates from there is written in this folder.
"""

import warnings
from typing import Any

from ..schedules import SCHEDULES, grown_base, longrope_amplitude, yarn_amplitude
from ..strict_json import JSON
from .case import Array, Case, NotComparedError, RefusedError, Result, Rule


def frequencies(schedule: str, dim: int, base: float, **params: Any) -> Array:
    """The frequencies of a schedule of ours, (dim / 2,) float64 in rad per token."""
    if base <= 0:
        raise NotComparedError(f"its base would be {base:g}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a factor < 1 is read, not judged, here
        return SCHEDULES[schedule](dim, base, **params)[0]


def need(case: Case, name: str, default: JSON = None) -> JSON:
    """The rope parameter `name`; the program raises KeyError where it is missing."""
    value = case.rope.get(name, default)
    if value is None:
        raise RefusedError(f"KeyError: {name!r} is missing")
    return value


def required_length(value: int | None) -> int:
    """`value`, a length of the config; ValueError where the config has none."""
    if value is None:
        raise ValueError("this rope_type needs max_position_embeddings; the config has none")
    return value


def plain(case: Case) -> Result:
    """Frequencies of the base alone."""
    inv_freq = frequencies("default", case.dim, case.base)
    return Result(f"plain, base {case.base:g}", inv_freq)


def plain_on_one_axis(case: Case) -> Result:
    """The same by a program that reads the sections of M-RoPE as one axis."""
    notes = ("reads mrope_section as one axis: right for text alone",)
    return plain(case)._replace(notes=notes if "mrope_section" in case.rope else ())


def unscaled(who: str) -> Rule:
    """A program that drops a type it does not know."""

    def rule(case: Case) -> Result:
        result = plain(case)
        advice = f"{who} does not scale rope_type {case.rope_type} at all"
        return result._replace(notes=(*result.notes, "the type is dropped"), advice=advice)

    return rule


def refuse(error: str) -> Rule:
    """A program that raises for a type it does not know."""

    def rule(case: Case) -> Result:
        raise RefusedError(error.format(case.rope_type))

    return rule


def linear(case: Case) -> Result:
    """All frequencies divided by factor."""
    factor = need(case, "factor")
    return Result(
        f"linear, factor {factor:g}", frequencies("linear", case.dim, case.base, factor=factor)
    )


def linear_float(case: Case) -> Result:
    """The same, by a program that iterates over a factor that is not a float."""
    if isinstance(case.rope["factor"], int):
        raise RefusedError("TypeError: 'int' object is not iterable: factor must be a float")
    return linear(case)


def llama3(case: Case, trained: int | None = None, **silent: float) -> Result:
    """The band of Llama 3.1; `trained` and `silent` stand where the file is silent."""
    names = ("factor", "low_freq_factor", "high_freq_factor")
    params = {name: need(case, name, silent.get(name)) for name in names}
    length = trained or required_length(case.trained)
    inv_freq = frequencies(
        "llama3", case.dim, case.base, **params, original_max_position_embeddings=length
    )
    return Result(f"llama3, factor {params['factor']:g}", inv_freq)


def proportional(case: Case) -> Result:
    """Gemma 4: the exponent counts the whole head, pairs beyond the share stand still."""
    factor = case.rope.get("factor", 1.0)
    params = {"partial_rotary_factor": case.config.share, "factor": factor}
    inv_freq = frequencies("proportional", case.config.head_dim, case.base, **params)
    return Result(f"proportional, share {case.config.share:g}, factor {factor:g}", inv_freq)


def proportional_unscaled(case: Case) -> Result:
    """The same without its factor."""
    advice = "vLLM, SGLang, llama.cpp and keras-hub drop the factor of proportional"
    return proportional(case._replace(rope={}))._replace(advice=advice)


def dynamic(switch: str) -> Rule:
    """The base grows with the row; `switch` says when that is decided."""

    def rule(case: Case) -> Result:
        factor, trained = need(case, "factor"), required_length(case.config.context)
        params = {"factor": factor, "original_max_position_embeddings": trained}
        inv_freq = frequencies("dynamic", case.dim, case.base, **params, seq_len=case.seq_len)
        return Result(f"dynamic NTK at {case.seq_len} tokens", inv_freq, switch=switch)

    return rule


def grown(case: Case, growth: float, advice: str = "") -> Result:
    """A fixed base, grown by `growth`."""
    if growth <= 0:
        raise NotComparedError(f"it would grow the base by {growth:g}")
    base = grown_base(case.dim, case.base, growth)
    return Result(
        f"NTK, fixed base {base:.4g}", frequencies("default", case.dim, base), advice=advice
    )


def yarn(
    case: Case, amplitude: float, advice: str = "", *,
    trained: int | None = None, truncate: bool = True, kept: float = 1.0, reads_betas: bool = True,
) -> Result:  # fmt: skip
    """YaRN; `kept` is SGLang's extrapolation_factor."""
    factor, length = need(case, "factor"), trained or required_length(case.trained)
    turns = {"beta_fast": 32.0, "beta_slow": 1.0}
    if reads_betas:
        turns = {name: case.rope.get(name) or value for name, value in turns.items()}
    params = {"factor": factor, "original_max_position_embeddings": length, "truncate": truncate}
    inv_freq = frequencies("yarn", case.dim, case.base, **params, **turns)
    interpolated = frequencies("default", case.dim, case.base) / factor
    inv_freq = interpolated + kept * (inv_freq - interpolated) if kept != 1 else inv_freq
    rounded = "" if truncate else ", not truncated"
    words = f"YaRN, factor {factor:g}, trained length {length}{rounded}"
    return Result(words, inv_freq, amplitude, advice=advice)


def amplitude_of(case: Case, factor: float) -> float:
    """YaRN's amplitude as transformers takes it from the keys."""
    mscale, all_dim = case.rope.get("mscale"), case.rope.get("mscale_all_dim")
    if case.rope.get("attention_factor") is not None:
        return float(case.rope["attention_factor"])
    both = (mscale, all_dim) if mscale and all_dim else ()
    return yarn_amplitude(factor, *both)


def yarn_deepseek(case: Case, trained: int | None = None) -> Result:
    """YaRN with DeepSeek's amplitude, where a missing mscale_all_dim is 0."""
    factor, rope = need(case, "factor"), case.rope
    amplitude = yarn_amplitude(factor, rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0))
    return yarn(case, amplitude, trained=trained)


def longrope(case: Case, is_long: bool, amplitude: float, switch: str, advice: str = "") -> Result:
    """LongRoPE, with the list that is in use."""
    trained = required_length(case.trained)
    lists = {name: need(case, name) for name in ("short_factor", "long_factor")}
    params = {"original_max_position_embeddings": trained, "attention_factor": 1.0, **lists}
    inv_freq = frequencies("longrope", case.dim, case.base, **params, seq_len=trained + is_long)
    words = f"LongRoPE, {'long' if is_long else 'short'} list at {case.seq_len} tokens"
    return Result(words, inv_freq, amplitude, switch, advice=advice)


def context_amplitude(case: Case) -> float:
    """LongRoPE's amplitude, of the factor from the trained length to the context."""
    trained = required_length(case.trained)
    if trained == 1:
        raise NotComparedError("it would divide by the logarithm of a trained length of 1")
    return longrope_amplitude(required_length(case.config.context) / trained, trained)


def longrope_advice(case: Case, is_long: bool) -> str:
    """What to say where vLLM, SGLang or llama.cpp give something else than transformers."""
    if is_long != (case.seq_len > required_length(case.trained)):
        return "For rows up to L start vLLM with max_model_len <= L, llama.cpp with n_ctx <= L"
    ignored = [name for name in ("factor", "attention_factor") if case.rope.get(name) is not None]
    text = "vLLM, SGLang and llama.cpp take max_position_embeddings / L as factor, and ignore "
    return text + " and ".join(ignored) if ignored else ""


def longrope_mscale(case: Case, is_long: bool) -> float:
    """long_mscale or short_mscale, and the amplitude where it is missing."""
    mscale = case.rope.get("long_mscale" if is_long else "short_mscale")
    return context_amplitude(case) if mscale is None else float(mscale)


def legacy_mrope(case: Case) -> Result:
    """rope_type mrope of older files, for which mrope_section must be there."""
    need(case, "mrope_section")
    return plain(case)
