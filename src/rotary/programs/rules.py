"""Formulas that several programs share, as rules: functions from a `Case` to a `Result`.

Frequencies come from `rotary.schedules`; this folder has only what deviates from it.
"""

from collections.abc import Callable, Mapping

from ..schedules import SCHEDULES, grown_base, longrope_amplitude, yarn_amplitude
from ..strict_json import JSON
from .case import Case, NotComparedError, RefusedError, Result, Rule


def computed(
    case: Case, schedule: str, attention_factor: float = 1.0, /, switch: str = "never",
    advice: str = "", *, seq_len: int | None = None, **params: JSON,
) -> Result:  # fmt: skip
    """Compute a schedule of `rotary.schedules` for the channels and the base of `case`."""
    if case.base <= 0:
        raise NotComparedError(f"its base would be {case.base:g}")
    length = {} if seq_len is None else {"seq_len": seq_len}
    inv_freq = SCHEDULES[schedule](case.dim, case.base, **params, **length)[0]
    words = in_words(schedule, case.base, params, case.seq_len if seq_len is None else seq_len)
    return Result(words, inv_freq, attention_factor, switch, advice=advice)


def in_words(schedule: str, base: float, params: Mapping[str, JSON], seq_len: int) -> str:
    """Return the words for a schedule in a table of readings."""
    factor, trained = (
        params.get(name, silent)
        for name, silent in (("factor", 1), ("original_max_position_embeddings", 0))
    )
    exact = "" if params.get("truncate", True) else ", not truncated"
    share = f", share {params['partial_rotary_factor']:g}" if schedule == "proportional" else ""
    return {
        "default": f"plain, base {base:g}",
        "dynamic": f"dynamic NTK at {seq_len} tokens",
        "yarn": f"YaRN, factor {factor:g}, trained length {trained}{exact}",
        "longrope": f"LongRoPE, {'long' if seq_len > trained else 'short'} list",
    }.get(schedule, f"{schedule}{share}, factor {factor:g}")


def need(case: Case, name: str, default: JSON = None) -> JSON:
    """Return the rope parameter `name`; RefusedError, as for a KeyError, if it is missing."""
    value = case.rope.get(name, default)
    if value is None:
        raise RefusedError(f"KeyError: {name!r} is missing")
    return value


def required_length(value: int | None) -> int:
    """Return `value`, a length of the config; ValueError if it is None."""
    if value is None:
        raise ValueError("this rope_type needs max_position_embeddings; the config has none")
    return value


def plain(case: Case) -> Result:
    """Compute the unscaled frequencies of the base."""
    return computed(case, "default")


def plain_on_one_axis(case: Case) -> Result:
    """Compute `plain`, with a note: the program reads the sections of M-RoPE as one axis."""
    notes = ("reads mrope_section as one axis: right for text alone",)
    return plain(case)._replace(notes=notes if "mrope_section" in case.rope else ())


def refuse(error: str) -> Rule:
    """Return the rule of a program that raises for a type that it does not know."""

    def rule(case: Case) -> Result:
        raise RefusedError(error.format(case.rope_type))

    return rule


def linear(case: Case) -> Result:
    """Divide all frequencies by factor."""
    return computed(case, "linear", factor=need(case, "factor"))


def linear_float(case: Case) -> Result:
    """Compute `linear` for a program that iterates over the factor if it is not a float."""
    if isinstance(case.rope["factor"], int):
        raise RefusedError("TypeError: 'int' object is not iterable: factor must be a float")
    return linear(case)


def llama3(case: Case, trained: int | None = None, **defaults: float) -> Result:
    """Compute the schedule of Llama 3.1; `trained` replaces `case.trained`.

    `defaults` are the values of missing keys.
    """
    names = ("factor", "low_freq_factor", "high_freq_factor")
    params = {name: need(case, name, defaults.get(name)) for name in names}
    length = trained or required_length(case.trained)
    return computed(case, "llama3", **params, original_max_position_embeddings=length)


def proportional(case: Case, advice: str = "") -> Result:
    """Compute the schedule of Gemma 4.

    The exponent is relative to the whole head, and pairs beyond the share stand still.
    """
    params = {
        "partial_rotary_factor": case.config.partial_rotary_factor,
        "factor": case.rope.get("factor", 1.0),
    }
    return computed(
        case._replace(dim=case.config.head_dim), "proportional", advice=advice, **params
    )


def proportional_unscaled(case: Case) -> Result:
    """Compute `proportional` without its factor."""
    advice = "vLLM, SGLang, llama.cpp and keras-hub drop the factor of proportional"
    return proportional(case._replace(rope={}), advice)


def dynamic(switch: str) -> Rule:
    """Return a rule whose base grows with the sequence; `switch` says when that is decided."""

    def rule(case: Case) -> Result:
        factor, trained = need(case, "factor"), required_length(case.config.context)
        params = {"factor": factor, "original_max_position_embeddings": trained}
        return computed(case, "dynamic", switch=switch, seq_len=case.seq_len, **params)

    return rule


def grown(case: Case, growth: float, advice: str = "") -> Result:
    """Compute a fixed base, grown by `growth`."""
    if growth <= 0:
        raise NotComparedError(f"it would grow the base by {growth:g}")
    case = case._replace(base=grown_base(case.dim, case.base, growth))
    result = computed(case, "default", advice=advice)
    return result._replace(schedule=f"NTK, fixed base {case.base:.4g}")


def yarn(
    case: Case, attention_factor: float, advice: str = "", *,
    trained: int | None = None, truncate: bool = True, reads_betas: bool = True,
) -> Result:  # fmt: skip
    """Compute YaRN with the attention factor of the program."""
    params = {
        "factor": need(case, "factor"),
        "original_max_position_embeddings": trained or required_length(case.trained),
        "truncate": truncate,
    }
    betas = ("beta_fast", "beta_slow") if reads_betas else ()
    params |= {name: case.rope[name] for name in betas if case.rope.get(name)}
    return computed(case, "yarn", attention_factor, advice=advice, **params)


def attention_factor_of(case: Case, factor: float) -> float:
    """Return YaRN's attention factor as transformers computes it from the keys."""
    mscale, all_dim = case.rope.get("mscale"), case.rope.get("mscale_all_dim")
    if case.rope.get("attention_factor") is not None:
        return float(case.rope["attention_factor"])
    both = (mscale, all_dim) if mscale and all_dim else ()
    return yarn_amplitude(factor, *both)


def yarn_deepseek(case: Case, trained: int | None = None) -> Result:
    """Compute YaRN with DeepSeek's attention factor, in which a missing mscale_all_dim is 0."""
    factor, rope = need(case, "factor"), case.rope
    attention_factor = yarn_amplitude(
        factor, rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0)
    )
    return yarn(case, attention_factor, trained=trained)


def longrope(decisive: Callable[[Case], float], switch: str, *, reads_mscale: bool) -> Rule:
    """Return a rule for LongRoPE: the long list if the `decisive` length exceeds the trained one.

    `switch` says so in words; {} in it is replaced by the trained length.
    """

    def rule(case: Case) -> Result:
        trained = required_length(case.trained)
        is_long = decisive(case) > trained
        name = "long_mscale" if is_long else "short_mscale"
        mscale = case.rope.get(name) if reads_mscale else None
        if mscale is not None:
            factor = float(mscale)
        elif trained == 1:
            raise NotComparedError("it would divide by the logarithm of a trained length of 1")
        else:  # the factor is the ratio of the context to the trained length
            factor = longrope_amplitude(required_length(case.config.context) / trained, trained)
        ignored = [key for key in ("factor", "attention_factor") if case.rope.get(key) is not None]
        advice = ""
        if is_long != (case.seq_len > trained):
            advice = (f"Up to {trained} tokens start vLLM with max_model_len <= {trained}, "
                      f"llama.cpp with n_ctx <= {trained}")  # fmt: skip
        elif ignored:
            advice = (f"vLLM, SGLang and llama.cpp take max_position_embeddings / {trained} as "
                      f"factor, and ignore {' and '.join(ignored)}")  # fmt: skip
        lists = {key: need(case, key) for key in ("short_factor", "long_factor")}
        params = {"original_max_position_embeddings": trained, "attention_factor": 1.0, **lists}
        length = trained + is_long
        when = switch.format(trained)
        result = computed(case, "longrope", factor, when, advice, seq_len=length, **params)
        return result._replace(schedule=f"{result.schedule} at {case.seq_len} tokens")

    return rule


def legacy_mrope(case: Case) -> Result:
    """Compute rope_type mrope of older files, which requires mrope_section."""
    need(case, "mrope_section")
    return plain(case)
