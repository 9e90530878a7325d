"""Writes the GGUF metadata that makes llama.cpp compute a spec; `gguf` reads such metadata."""

import math
from collections.abc import Mapping

import numpy as np

from ..angles import inv_freq
from ..schedules import yarn_amplitude
from ..spec import Rotary, check_spec
from ..strict_json import JSON
from .gguf import BETAS, STANDS_STILL, from_gguf, gguf_layer_types, model_of
from .values import whole_number


def to_gguf(
    spec: Rotary, architecture: str, *, context_length: int | None = None
) -> dict[str, JSON]:
    """Return the GGUF metadata, with RoPE tensors, that makes llama.cpp compute `spec`.

    Frequencies that llama.cpp has no name for (llama3, proportional, custom, ntk) go into
    "rope_freqs.weight", float32 divisors of base^(-2i / rotary_dim), with 1e30 for a pair that
    stands still; longrope into "rope_factors_long.weight" and "_short". There YaRN's attention
    factor is attn_factor x (0.1 ln(factor) + 1), so attn_factor is written to give that of `spec`.
    If sliding-window layers have a RoPE of their own, the keys are for the other layers.

    context_length  positions the model is made for; longrope is told apart by it
    Raises ValueError for what llama.cpp does not compute in that architecture: another layout,
    slice or axes, scaling, divisors or betas it does not read, dynamic, another direction.

    >>> to_gguf(Rotary(head_dim=64, base=1e6), "qwen2")["qwen2.rope.freq_base"]
    1000000.0
    """
    check_spec(spec, "spec")
    model = model_of(architecture)
    key_length = "key_length_mla" if model.get("latent") else "key_length"
    keys: dict[str, JSON] = {
        f"attention.{key_length}": spec.head_dim,
        "rope.dimension_count": spec.rotary_dim,
        "rope.freq_base": float(spec.base),
    }
    if spec.axes:
        keys["rope.dimension_sections"] = [spec.axes.count(axis) for axis in range(4)]
    if context_length is not None:
        keys["context_length"] = whole_number("context_length", context_length, 1)
    scaling, tensors = _scaling(spec, architecture, model)
    keys |= {f"rope.scaling.{key}": value for key, value in scaling.items()}
    written = {f"{architecture}.{key}": value for key, value in keys.items()}
    written = {"general.architecture": architecture, **written, **tensors}
    read = from_gguf(written, next(iter(gguf_layer_types(written)), None))
    for field in ("layout", "out_layout", "start", "axes", "sign"):
        if getattr(read, field) != getattr(spec, field):
            hint = "; permute the rows of W_q and W_k with rotary.layouts.row_permutation"
            raise ValueError(
                f"llama.cpp computes {field} {getattr(read, field)!r} in the architecture "
                f"{architecture!r}, the spec has {getattr(spec, field)!r}"
                f"{hint if field == 'layout' else ''}"
            )
    if not _is_same(read, spec):
        raise ValueError(
            f"llama.cpp does not read the scaling of schedule {spec.schedule!r} in the "
            f"architecture {architecture!r}"
        )
    return written


def _is_same(read: Rotary, spec: Rotary) -> bool:
    """Whether two specs have the same numbers at any length, up to float32."""
    trained = spec.params.get("original_max_position_embeddings")
    lengths = (trained, trained + 1) if spec.depends_on_length and trained else (None,)
    for length in lengths:
        one, other = (np.append(*inv_freq(each, length)) for each in (read, spec))
        if not np.allclose(one, other, rtol=1e-5, atol=1e-20):
            return False
    return True


def _scaling(
    spec: Rotary, architecture: str, model: Mapping[str, JSON]
) -> tuple[dict[str, JSON], dict[str, list[float]]]:
    """Return the keys under rope.scaling, and the tensors, for the frequencies of `spec`."""
    params = spec.params
    if spec.schedule == "default":
        return {}, {}
    if spec.schedule == "linear":
        return {"type": "linear", "factor": float(params["factor"])}, {}
    if spec.schedule == "yarn":
        return _yarn_keys(spec, architecture, model), {}
    if spec.schedule == "longrope":
        trained = params["original_max_position_embeddings"]
        attention_factor = inv_freq(spec, trained)[1]
        if attention_factor != inv_freq(spec, trained + 1)[1]:
            raise ValueError("llama.cpp has one attention factor for both lists of longrope")
        keys = {"original_context_length": trained, "attn_factor": attention_factor}
        return {"type": "longrope", **keys}, {
            f"rope_factors_{name}.weight": list(map(float, params[f"{name}_factor"]))
            for name in ("long", "short")
        }
    if spec.depends_on_length:
        raise ValueError(
            f"llama.cpp has no schedule {spec.schedule!r}, which depends on the length"
        )
    frequencies, attention_factor = inv_freq(spec)
    plain = [spec.base ** (-2 * i / spec.rotary_dim) for i in range(len(frequencies))]
    divisors = [
        own / frequency if frequency else STANDS_STILL
        for own, frequency in zip(plain, frequencies.tolist(), strict=True)
    ]
    keys = {"attn_factor": attention_factor} if attention_factor != 1.0 else {}
    return keys, {"rope_freqs.weight": divisors}


def _yarn_keys(spec: Rotary, architecture: str, model: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the keys under rope.scaling for YaRN; ValueError if llama.cpp does not read one."""
    if model.get("latent") or "layers" in model:
        raise ValueError(
            f"to_gguf writes no YaRN for {architecture!r}: there llama.cpp computes the attention "
            "factor and the scale of the scores from more keys than those of RoPE"
        )
    params, factor = spec.params, float(spec.params["factor"])
    keys: dict[str, JSON] = {
        "type": "yarn",
        "factor": factor,
        "original_context_length": params["original_max_position_embeddings"],
    }
    for name, default in (("beta_fast", BETAS[0]), ("beta_slow", BETAS[1]), ("truncate", True)):
        if params.get(name, default) != default:
            if f"yarn_{name}" not in model.get("reads", ()):
                raise ValueError(
                    f"llama.cpp reads no {name} in the architecture {architecture!r}, where it is "
                    f"{default}; the spec has {params[name]}"
                )
            keys[f"yarn_{name}"] = float(params[name])
    attention_factor = inv_freq(spec)[1]
    if not math.isclose(attention_factor, yarn_amplitude(factor), rel_tol=1e-12):
        keys["attn_factor"] = attention_factor / yarn_amplitude(factor)
    return keys
