"""How six programs turn the rope parameters of a config into frequencies: one rule for each type.

The rules are those of each program's Llama file, and of Phi-3's for `longrope`. transformers is
compared with itself by the tests. The others are read in their sources and not run here; the
classes of all but llama.cpp, which reads the GGUF file that its converter writes, were run alone
once, and the tests keep a sample of what they gave. Formulas are those of `rotary.schedules`: only
what deviates is written here.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..schedules import SCHEDULES

Array = npt.NDArray[np.floating]

PHI3 = ("phi3", "phi4_multimodal")  # the families with a trained length outside the dict


class Case(NamedTuple):
    """A config as far as a rule looks.

    rope        of one layer; with rope_theta and partial_rotary_factor filled in
    layer_type  the key it was nested under, or None
    share       partial_rotary_factor, 1.0 if there is none
    context     max_position_embeddings
    trained     original_max_position_embeddings, as the config class of transformers fills it in
    seq_len     tokens of the row that is computed
    advice      what to change in the file, known before any rule
    """

    data: Mapping[str, Any]
    rope: Mapping[str, Any]
    rope_type: str
    model_type: str
    layer_type: str | None
    base: float
    head_dim: int
    share: float
    context: int | None
    trained: int | None
    seq_len: int
    advice: str = ""

    @property
    def limit(self) -> int:
        """The longest row that a program is started for."""
        return max(self.context or 0, self.seq_len)


class Result(NamedTuple):
    """What a rule gives; `advice` is said where it differs from the reference."""

    schedule: str
    inv_freq: Array
    attention_factor: float = 1.0
    switch: str = "never"
    notes: tuple[str, ...] = ()
    advice: str = ""


class RefusedError(Exception):
    """What the program raises instead."""


Rule = Callable[[Case, int], Result]


def _run(schedule: str, dim: int, base: float, **params: Any) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a factor < 1 is read, not judged, here
        return SCHEDULES[schedule](dim, base, **params)[0]


def _need(case: Case, name: str, default: Any = None) -> Any:
    value = case.rope.get(name, default)
    if value is None:
        raise RefusedError(f"KeyError: {name!r} is missing")
    return value


def _length(value: int | None) -> int:
    if value is None:
        raise ValueError("this rope_type needs max_position_embeddings; the config has none")
    return value


def plain(case: Case, dim: int) -> Result:
    mrope = "mlx-lm and keras-hub read mrope_section as one axis: right for text alone"
    notes = (mrope,) if "mrope_section" in case.rope else ()
    return Result(f"plain, base {case.base:g}", _run("default", dim, case.base), notes=notes)


def unscaled(who: str) -> Rule:
    def rule(case: Case, dim: int) -> Result:
        result = plain(case, dim)
        advice = f"{who} does not scale rope_type {case.rope_type} at all"
        return result._replace(notes=(*result.notes, "the type is dropped"), advice=advice)

    return rule


def refuse(error: str) -> Rule:
    def rule(case: Case, dim: int) -> Result:
        raise RefusedError(error.format(case.rope_type))

    return rule


def linear(case: Case, dim: int) -> Result:
    factor = _need(case, "factor")
    return Result(f"linear, factor {factor:g}", _run("linear", dim, case.base, factor=factor))


def linear_float(case: Case, dim: int) -> Result:
    if isinstance(case.rope["factor"], int):
        raise RefusedError("TypeError: 'int' object is not iterable: factor must be a float")
    return linear(case, dim)


def llama3(case: Case, dim: int, trained: int | None = None, **silent: float) -> Result:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    params = {name: _need(case, name, silent.get(name)) for name in names}
    length = trained or _length(case.trained)
    inv_freq = _run("llama3", dim, case.base, **params, original_max_position_embeddings=length)
    return Result(f"llama3, factor {params['factor']:g}", inv_freq)


def llama3_mlx(case: Case, dim: int) -> Result:
    length = case.rope.get("original_max_position_embeddings", 8192)
    result = llama3(case, dim, length, low_freq_factor=1.0, high_freq_factor=4.0)
    kept = _run("default", dim, case.base)
    is_edge = 2 * math.pi / kept == length / case.rope.get("low_freq_factor", 1.0)  # strict < there
    return result._replace(inv_freq=np.where(is_edge, kept, result.inv_freq))


def proportional(case: Case, dim: int) -> Result:
    factor = case.rope.get("factor", 1.0)
    params = {"partial_rotary_factor": case.share, "factor": factor}
    inv_freq = _run("proportional", case.head_dim, case.base, **params)
    return Result(f"proportional, share {case.share:g}, factor {factor:g}", inv_freq)


def proportional_unscaled(case: Case, dim: int) -> Result:
    advice = "vLLM, SGLang, llama.cpp and keras-hub drop the factor of proportional"
    return proportional(case._replace(rope={}), dim)._replace(advice=advice)


def dynamic(switch: str) -> Rule:
    def rule(case: Case, dim: int) -> Result:
        factor, trained = _need(case, "factor"), _length(case.context)
        params = {"factor": factor, "original_max_position_embeddings": trained}
        inv_freq = _run("dynamic", dim, case.base, **params, seq_len=case.seq_len)
        return Result(f"dynamic NTK at {case.seq_len} tokens", inv_freq, switch=switch)

    return rule


def _grown(case: Case, dim: int, growth: float, advice: str = "") -> Result:
    base = case.base * growth ** (dim / (dim - 2)) if dim > 2 else case.base
    return Result(f"NTK, fixed base {base:.4g}", _run("default", dim, base), advice=advice)


def dynamic_vllm(case: Case, dim: int) -> Result:
    if "alpha" in case.rope:
        return _grown(case, dim, case.rope["alpha"])
    factor, context = case.rope["factor"], _length(case.context)
    trained = case.rope.get("max_trained_positions", context)
    advice = (
        "vLLM does not scale this config at all: give max_trained_positions, the trained length"
    )
    growth = factor * context / trained - (factor - 1)
    return _grown(case, dim, growth, advice if trained == context else "")


def dynamic_sglang(case: Case, dim: int) -> Result:
    if "alpha" in case.rope:
        return _grown(case, dim, case.rope["alpha"])
    factor = case.rope["factor"]
    advice = "SGLang scales every row as if it had factor * max_position_embeddings tokens"
    return _grown(case, dim, factor * factor - (factor - 1), advice)


def dynamic_keras(case: Case, dim: int) -> Result:
    divisor = _need(case, "factor") ** (dim / max(1, dim - 2))
    advice = "keras-hub divides every frequency, the fastest too: that is not NTK scaling"
    inv_freq = _run("default", dim, case.base) / divisor
    return Result(f"all frequencies divided by {divisor:.4g}", inv_freq, advice=advice)


def _gain(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(
    case: Case, dim: int, amplitude: float, advice: str = "", *,
    trained: int | None = None, truncate: bool = True, kept: float = 1.0, reads_betas: bool = True,
) -> Result:  # fmt: skip
    factor, length = _need(case, "factor"), trained or _length(case.trained)
    turns = {"beta_fast": 32.0, "beta_slow": 1.0}
    if reads_betas:
        turns = {name: case.rope.get(name) or value for name, value in turns.items()}
    params = {"factor": factor, "original_max_position_embeddings": length, "truncate": truncate}
    inv_freq = _run("yarn", dim, case.base, **params, **turns)
    interpolated = _run("default", dim, case.base) / factor
    inv_freq = interpolated + kept * (inv_freq - interpolated) if kept != 1 else inv_freq
    rounded = "" if truncate else ", not truncated"
    words = f"YaRN, factor {factor:g}, trained length {length}{rounded}"
    return Result(words, inv_freq, amplitude, advice=advice)


def _amplitude(case: Case, factor: float) -> float:
    mscale, all_dim = case.rope.get("mscale"), case.rope.get("mscale_all_dim")
    if case.rope.get("attention_factor") is not None:
        return float(case.rope["attention_factor"])
    return _gain(factor, mscale) / _gain(factor, all_dim) if mscale and all_dim else _gain(factor)


def yarn_transformers(case: Case, dim: int) -> Result:
    factor = case.rope["factor"] or _length(case.context) / _length(case.trained)
    case = case._replace(rope={**case.rope, "factor": factor})
    wanted = case.rope.get("truncate", True)
    advice = "" if wanted or case.layer_type is None else (
        "transformers ignores truncate inside a nested rope_parameters")  # fmt: skip
    truncate = wanted or case.layer_type is not None
    return _yarn(case, dim, _amplitude(case, factor), advice, truncate=truncate)


def yarn_vllm(case: Case, dim: int) -> Result:
    factor, trained = _need(case, "factor"), _length(case.trained)
    amplitude, truncate = _amplitude(case, factor), case.rope.get("truncate", True)
    if "mrope_section" not in case.rope:
        return _yarn(case, dim, amplitude, truncate=truncate)
    advice = ("vLLM takes the YaRN ramp of mrope_section from 4 times the trained length, but for "
              "model files that pass mrope_positions_factor=1")  # fmt: skip
    return _yarn(case, dim, amplitude, advice, trained=4 * trained, truncate=truncate)


def yarn_telechat(case: Case, dim: int) -> Result:
    amplitude = 0.07 * math.log(_need(case, "factor")) + 1.0
    return _yarn(case, dim, amplitude, truncate=case.rope.get("truncate", True))


def yarn_sglang(case: Case, dim: int) -> Result:
    factor, rope = _need(case, "factor"), case.rope
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if "mrope_section" in rope and rope.keys() & {"mscale", "mscale_all_dim"}:
        raise RefusedError("TypeError: unexpected keyword argument 'mscale', with mrope_section")
    amplitude = _gain(factor)
    if mscale is not None and all_dim is not None:  # 0 counts as given, in transformers it does not
        amplitude = _gain(factor, mscale) / _gain(factor, all_dim)
    advice = "SGLang ignores attention_factor: give attn_factor too, its ratio to 0.1 ln(factor)+1"
    return _yarn(
        case, dim, amplitude * rope.get("attn_factor", 1.0),
        advice if rope.get("attention_factor") is not None else "",
        truncate=rope.get("truncate", True), kept=rope.get("extrapolation_factor", 1.0),
    )  # fmt: skip


def yarn_deepseek(case: Case, dim: int, trained: int | None = None) -> Result:
    factor, rope = _need(case, "factor"), case.rope
    ratio = _gain(factor, rope.get("mscale", 1.0)) / _gain(factor, rope.get("mscale_all_dim", 0.0))
    return _yarn(case, dim, ratio, trained=trained)


def _longrope(
    case: Case, dim: int, is_long: bool, amplitude: float, switch: str, advice: str = ""
) -> Result:
    trained = _length(case.trained)
    lists = {name: _need(case, name) for name in ("short_factor", "long_factor")}
    params = {"original_max_position_embeddings": trained, "attention_factor": 1.0, **lists}
    inv_freq = _run("longrope", dim, case.base, **params, seq_len=trained + is_long)
    words = f"LongRoPE, {'long' if is_long else 'short'} list at {case.seq_len} tokens"
    return Result(words, inv_freq, amplitude, switch, advice=advice)


def _stretched(case: Case, factor: float | None = None) -> float:
    trained = _length(case.trained)
    factor = _length(case.context) / trained if factor is None else factor
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


def longrope_transformers(case: Case, dim: int) -> Result:
    is_long, rope = case.seq_len > _length(case.trained), case.rope
    switch = "long list if the longest row of the batch exceeds L, at every forward"
    if case.model_type == "phimoe":
        amplitude = _need(case, "long_mscale" if is_long else "short_mscale")
        advice = "transformers keeps the short list of phimoe beyond L, with long_mscale"
        return _longrope(case, dim, False, amplitude, switch, advice if is_long else "")
    given = rope.get("attention_factor")
    amplitude = _stretched(case, rope.get("factor")) if given is None else float(given)
    return _longrope(case, dim, is_long, amplitude, switch)


def _advice(case: Case, is_long: bool) -> str:
    """What to say where vLLM, SGLang or llama.cpp give something else than transformers."""
    if is_long != (case.seq_len > _length(case.trained)):
        return "For rows up to L start vLLM with max_model_len <= L, llama.cpp with n_ctx <= L"
    ignored = [name for name in ("factor", "attention_factor") if case.rope.get(name) is not None]
    said = "vLLM, SGLang and llama.cpp take max_position_embeddings / L as factor, and ignore "
    return said + " and ".join(ignored) if ignored else ""


def _mscale(case: Case, is_long: bool) -> float:
    given = case.rope.get("long_mscale" if is_long else "short_mscale")
    return _stretched(case) if given is None else float(given)


def longrope_vllm(case: Case, dim: int) -> Result:
    is_long = case.limit > _length(case.trained)
    amplitude, advice = _mscale(case, is_long), _advice(case, is_long)
    switch = "long list for every row if max_model_len > L (default: a top-level L), at start"
    return _longrope(case, dim, is_long, amplitude, switch, advice)


def longrope_sglang(case: Case, dim: int) -> Result:
    is_long = case.seq_len - 1 > _length(case.trained)  # a position > L: one token later
    amplitude, advice = _mscale(case, is_long), _advice(case, is_long)
    switch = "long list if any position of the running batch exceeds L"
    return _longrope(case, dim, is_long, amplitude, switch, advice)


def longrope_llama_cpp(case: Case, dim: int) -> Result:
    is_long = case.limit > _length(case.trained)
    switch = "long list for every row if the allocated n_ctx > L, at start"
    return _longrope(case, dim, is_long, _stretched(case), switch, _advice(case, is_long))


def longrope_mlx(case: Case, dim: int) -> Result:
    name = "original_max_position_embeddings"
    length = case.data.get(name, 4096) if case.model_type in PHI3 else _need(case, name)
    case = case._replace(trained=length)
    advice = "mlx-lm uses the long list for every row, and its own attention factor"
    return _longrope(case, dim, True, _stretched(case), "never: the long list always", advice)


def longrope_keras(case: Case, dim: int) -> Result:
    is_long = case.seq_len > _length(case.trained)
    switch = "long list if start_index + length > L, at every call"
    return _longrope(case, dim, is_long, _stretched(case), switch)


def legacy_mrope(case: Case, dim: int) -> Result:
    if "mrope_section" not in case.rope:
        raise RefusedError("rope_type mrope needs mrope_section, of three axes")
    return plain(case, dim)


def yarn_llama_cpp(case: Case, dim: int) -> Result:
    # written to every GGUF file, but read back by two architectures only
    reads_betas = case.model_type in ("mistral3", "ministral3")
    betas = () if reads_betas else ("beta_fast", "beta_slow")
    keys = ("attention_factor", "mscale", "truncate", *betas)
    ignored = [name for name in keys if case.rope.get(name) is not None]
    advice = f"llama.cpp ignores {', '.join(ignored)}" if ignored else ""
    return _yarn(case, dim, _gain(_need(case, "factor")), advice, reads_betas=reads_betas)


def yarn_mlx(case: Case, dim: int) -> Result:
    ignored = [name for name in ("attention_factor", "truncate") if name in case.rope]
    advice = f"mlx-lm ignores {' and '.join(ignored)}" if ignored else ""
    if not advice and ("mscale" in case.rope) != ("mscale_all_dim" in case.rope):
        advice = "Give mscale and mscale_all_dim, both or none: alone, only mlx-lm reads it"
    result = yarn_deepseek(case, dim, case.rope.get("original_max_position_embeddings", 4096))
    return result._replace(advice=advice)


def yarn_keras(case: Case, dim: int) -> Result:
    factor = _need(case, "factor")
    length = case.rope.get("original_max_position_embeddings", 4096)
    given = [name for name in ("attention_factor", "mscale") if case.rope.get(name) is not None]
    advice = f"keras-hub ignores {', '.join(given)}" if given else ""
    amplitude = 0.1 * math.log(factor) + 1.0
    return _yarn(
        case, dim, amplitude, advice, trained=length, truncate=case.rope.get("truncate", True)
    )


def ntk_vllm(case: Case, dim: int) -> Result:
    factor, b = _need(case, "factor"), case.rope.get("mixed_b")
    if b is not None:
        return Result(f"NTK-mixed, b {b:g}", _run("ntk_mixed", dim, case.base, factor=factor, b=b))
    inv_freq = _run("default", dim, case.base * factor) / factor ** (2 / dim)
    return Result(f"NTK, factor {factor:g}, the first pair scaled too", inv_freq)


def llama3_llama_cpp(case: Case, dim: int) -> Result:
    length = case.trained or 8192
    return llama3(case, dim, length, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


def yarn_deepseek_sglang(case: Case, dim: int) -> Result:
    result = yarn_deepseek(case, dim)
    amplitude = result.attention_factor * case.rope.get("attn_factor", 1.0)
    return result._replace(attention_factor=amplitude)
