"""Makes a `Rotary` from the metadata of a GGUF file: the RoPE that llama.cpp computes from it.

`gguf.json` says for each architecture what its code in llama.cpp does; keys:
  layout      the pairs it rotates; weights of "interleaved" ones were permuted when converted
  sections    how `rope.dimension_sections` assign axes to pairs: "blocks", or "interleaved"
  sliding     the RoPE of sliding-window layers, which may have a base of their own: "same": else
              as the other layers; "own": 10 000 without such a base, and no scaling; "plain": no
              scaling
  layers      its layer types, if they are those of DeepSeek-V4; only "compress" has YaRN
  slice       "trailing": the last channels of a head are rotated
  latent      it has multi-head latent attention: head_dim is in key_length_mla
  divisors    tensors that it divides frequencies by
  undivided   the layer type whose frequencies it does not divide
  reads       keys under `rope.scaling.` that only some architectures read; with "finetuned", false
              turns RoPE off
  log_multiplier  it reads yarn_log_multiplier, which holds mscale_all_dim times this number;
                  equal_mscales: mscale is then the same, otherwise 1
  needs_sections  the loader stops without dimension_sections
  whole_head  it refuses to rotate a part of the head
  blocks      it rotates only in models of so many blocks (Baichuan 7B, not 13B)
Sources: llama.cpp b11549, src/llama-model.cpp (load_hparams, llama_model_rope_type,
get_rope_factors), src/llama-context.cpp (the constructor), src/models/*.cpp, ggml-cpu/ops.cpp
(ggml_compute_forward_rope_flt). tests/test_gguf.py compares with what that program computed.
"""

import bisect
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import NamedTuple

from ..angles import inv_freq
from ..schedules import grown_base, yarn_amplitude
from ..spec import Rotary
from ..strict_json import JSON
from ..words import nearest
from .gguf_file import TENSORS, read_gguf

ARCHITECTURES: dict[str, dict[str, JSON]] = json.loads(
    Path(__file__).with_name("gguf.json").read_text()
)
# what may follow "<architecture>.rope."; gguf-py/gguf/constants.py
_KEYS = (
    "dimension_count", "dimension_count_swa", "dimension_sections", "freq_base", "freq_base_swa",
    "scale_linear", "scaling.type", "scaling.factor", "scaling.alpha", "scaling.attn_factor",
    "scaling.original_context_length", "scaling.finetuned", "scaling.yarn_log_multiplier",
    "scaling.yarn_ext_factor", "scaling.yarn_attn_factor", "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
)  # fmt: skip
_TYPES = ("none", "linear", "yarn", "longrope")
_LARGEST = 1 << 20  # head_dim, and the pairs of an axis: no model comes near it
BETAS = (32.0, 1.0)
STANDS_STILL = 1e30  # the divisor that is written for a pair that is not rotated


class _GgmlParameters(NamedTuple):
    """The parameters of ggml's RoPE, for one layer type.

    factor            1 / freq_scale
    is_yarn           whether ext_factor is 1: YaRN; 0 gives the plain or interpolated frequencies
    attention_factor  multiplies cos and sin
    betas             turns at which YaRN's ramp ends
    """

    base: float
    factor: float = 1.0
    is_yarn: bool = False
    attention_factor: float = 1.0
    betas: tuple[float, ...] = BETAS


def from_gguf(
    source: str | os.PathLike[str] | Mapping[str, JSON], layer_type: str | None = None
) -> Rotary:
    """Return the RoPE that llama.cpp computes from a GGUF file.

    source      path of the file, of which only header and RoPE tensors are read; or its
                metadata, {"general.architecture": "llama", ...}, with the values of
                "rope_freqs.weight", "rope_factors_long.weight" and "_short" if it has them
    layer_type  "full_attention" or "sliding_attention" where `gguf_layer_types` names them
    Keys that llama.cpp does not read have no effect. M-RoPE has its four axes: text tokens have the
    positions (p, p, p, 0).

    Raises ValueError for a key under rope that is not known, an architecture without RoPE, a file
    that turns it off (Granite), sizes that are missing, and a damaged file; ImportError without the
    package `gguf`.
    Source: llama.cpp b11549; see the top of this file.

    >>> from_gguf({"general.architecture": "qwen2", "qwen2.rope.freq_base": 1e6,
    ...            "qwen2.embedding_length": 896, "qwen2.attention.head_count": 14})
    Rotary(head_dim=64, base=1000000.0)
    """
    name, keys, tensors = _opened(source)
    model = ARCHITECTURES[name]
    kinds = _layer_types(name, keys)
    if layer_type not in (kinds or (None,)):
        if not kinds:
            raise ValueError(
                f"layer_type {layer_type!r}: all layers of this file have one RoPE; leave it out"
            )
        raise ValueError(f"layer_type must be one of {', '.join(kinds)}; got {layer_type!r}")
    ggml = _parameters(name, keys, layer_type)
    if model.get("needs_sections") and not keys.get("rope.dimension_sections"):
        raise ValueError(f"llama.cpp needs {name}.rope.dimension_sections, the metadata has none")
    sliding = "_swa" if layer_type == "sliding_attention" else ""
    head_dim = _head_dim(name, keys, sliding)
    rotary_dim = keys.get(f"rope.dimension_count{sliding}", keys.get("rope.dimension_count"))
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if model.get("whole_head") and rotary_dim != head_dim:
        raise ValueError(
            f"llama.cpp rotates the whole head in {name!r}, the metadata has rope.dimension_count "
            f"{rotary_dim} of {head_dim}"
        )
    spec = Rotary(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        start=head_dim - rotary_dim if model.get("slice") == "trailing" else 0,
        base=ggml.base,
        layout=model["layout"],
        axes=axes_of(keys.get("rope.dimension_sections", ()), rotary_dim // 2, model),
    )
    if layer_type is not None and layer_type == model.get("undivided"):
        tensors = {}
    trained = keys.get("rope.scaling.original_context_length") or keys.get("context_length")
    return _scaled(spec, ggml, trained, tensors)


def gguf_layer_types(source: str | os.PathLike[str] | Mapping[str, JSON]) -> tuple[str, ...]:
    """Return the layer types with a RoPE of their own, for `from_gguf`; empty if all are alike.

    >>> gguf_layer_types({"general.architecture": "gemma3", "gemma3.rope.freq_base": 1e6,
    ...                   "gemma3.attention.sliding_window": 512})
    ('full_attention', 'sliding_attention')
    """
    name, keys, _ = _opened(source)
    return _layer_types(name, keys)


def model_of(architecture: object) -> dict[str, JSON]:
    """Return the entry of an architecture; ValueError for one that is unknown or has no RoPE.

    >>> model_of("llama")["layout"]
    'interleaved'
    """
    if not isinstance(architecture, str):
        raise ValueError('GGUF metadata must have "general.architecture"')
    if architecture not in ARCHITECTURES:
        hint = nearest(architecture, ARCHITECTURES)
        raise ValueError(f"GGUF architecture {architecture!r} is not known{hint}")
    if ARCHITECTURES[architecture]["layout"] is None:
        raise ValueError(f"llama.cpp has no RoPE in the architecture {architecture!r}")
    return ARCHITECTURES[architecture]


def _opened(
    source: str | os.PathLike[str] | Mapping[str, JSON],
) -> tuple[str, dict[str, JSON], dict[str, list[float]]]:
    """Return (architecture, its keys without that prefix, RoPE tensors); refuse unknown keys."""
    if not isinstance(source, Mapping):
        source = read_gguf(source)
    name: JSON = source.get("general.architecture")
    model = model_of(name)
    prefix = f"{name}."
    keys = {k.removeprefix(prefix): v for k, v in source.items() if k.startswith(prefix)}
    for key in keys:
        if key.startswith("rope.") and key.removeprefix("rope.") not in _KEYS:
            hint = nearest(key, [f"rope.{each}" for each in _KEYS])
            raise ValueError(f"GGUF key {prefix + key!r} is not known{hint}")
        _check_value(prefix + key, key, keys[key])
    count = keys.get("block_count")
    if count is not None and count != model.get("blocks", count):
        raise ValueError(
            f"llama.cpp rotates in {name!r} only if it has {model['blocks']} blocks, got {count!r}"
        )
    if "finetuned" in model.get("reads", ()) and not keys.get("rope.scaling.finetuned", True):
        raise ValueError(
            f"llama.cpp does not rotate in this file: {name}.rope.scaling.finetuned is false"
        )
    tensors = {}
    for tensor in TENSORS:
        if source.get(tensor) is None:
            continue
        kind = "rope_freqs" if tensor == TENSORS[0] else "rope_factors"
        if kind not in model.get("divisors", ()):
            raise ValueError(f"llama.cpp reads no {tensor} in the architecture {name!r}")
        longrope = keys.get("rope.scaling.type") == "longrope"
        if len(model["divisors"]) > 1 and longrope != (kind == "rope_factors"):
            raise ValueError(
                f"llama.cpp reads rope_factors with rope.scaling.type longrope, and rope_freqs "
                f"without, in the architecture {name!r}"
            )
        values = source[tensor].tolist() if hasattr(source[tensor], "tolist") else source[tensor]
        if not isinstance(values, Sequence) or not all(
            isinstance(value, int | float) and 0 < value < math.inf for value in values
        ):
            raise ValueError(f"{tensor} must be a list of finite numbers > 0")
        tensors[tensor] = list(map(float, values))
    return name, keys, tensors


def _check_value(name: str, key: str, value: JSON) -> None:
    """Refuse a value of a wrong type, or larger than in any model, of a key that is read."""
    if key in ("rope.scaling.type", "rope.scaling.finetuned"):  # checked where they are read
        return
    if key in ("rope.dimension_sections", "attention.head_count"):
        sizes = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if key == "rope.dimension_sections" and (sizes is not value or len(sizes) > 4):
            raise ValueError(f"{name} must be a list of up to four numbers, got {value!r:.80}")
        expected, is_right = f"whole numbers from 0 to {_LARGEST:,}", all(map(_is_size, sizes))
    elif key.startswith(("rope.dimension_count", "attention.key_length")):
        expected, is_right = f"a whole number from 0 to {_LARGEST:,}", _is_size(value)
    elif key in ("embedding_length", "context_length", "rope.scaling.original_context_length"):
        expected, is_right = "a whole number", isinstance(value, Integral)
    elif key.startswith("rope.") or key == "attention.compress_rope_freq_base":
        expected = "a finite number"
        is_right = isinstance(value, Real) and math.isfinite(value)
    else:
        return
    if not is_right:
        raise ValueError(f"{name} must be {expected}, got {value!r:.80}")


def _is_size(value: JSON) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) <= _LARGEST


def _layer_types(name: str, keys: Mapping[str, JSON]) -> tuple[str, ...]:
    model = ARCHITECTURES[name]
    if "layers" in model:
        return tuple(model["layers"])
    if "sliding" not in model or not keys.get("attention.sliding_window"):
        return ()
    sizes = ("rope.dimension_count_swa", "attention.key_length_swa")
    if _parameters(name, keys, None) == _parameters(name, keys, "sliding_attention") and not any(
        size in keys for size in sizes
    ):
        return ()
    return ("full_attention", "sliding_attention")


def _head_dim(name: str, keys: Mapping[str, JSON], sliding: str) -> int:
    for key in (f"attention.key_length_mla{sliding}", "attention.key_length_mla",
                f"attention.key_length{sliding}", "attention.key_length"):  # fmt: skip
        if key in keys:
            return int(keys[key])
    try:
        heads = keys["attention.head_count"]
        if isinstance(heads, Sequence):  # one number for each layer, 0 where it has no attention
            heads = next(count for count in heads if count)
        return int(keys["embedding_length"] // heads)
    except (KeyError, StopIteration, ZeroDivisionError):
        raise ValueError(
            f"GGUF metadata needs {name}.attention.key_length, or embedding_length and "
            "attention.head_count"
        ) from None


def _parameters(name: str, keys: Mapping[str, JSON], layer_type: str | None) -> _GgmlParameters:
    """Return the parameters that llama.cpp's loader and context derive from the keys."""
    model = ARCHITECTURES[name]
    reads = model.get("reads", ())
    prefix = "rope.scaling."
    scaling = {k.removeprefix(prefix): v for k, v in keys.items() if k.startswith(prefix)}
    kind = scaling.get("type", "linear")  # a factor without a type is linear
    if kind not in _TYPES:
        raise ValueError(f"rope.scaling.type {kind!r} is not known{nearest(kind, _TYPES)}")
    base = keys.get("rope.freq_base", 10_000.0)
    factor = scaling.get("factor", keys.get("rope.scale_linear", 0.0)) or 1.0
    if kind == "none":
        factor = 1.0
    if "alpha" in reads and scaling.get("alpha", 0.0) > 0:
        base = grown_base(_head_dim(name, keys, ""), base, scaling["alpha"])
    is_yarn = kind == "yarn"
    if "yarn_ext_factor" in reads and scaling.get("yarn_ext_factor", -1.0) >= 0:
        share = scaling["yarn_ext_factor"]
        if share not in (0.0, 1.0):
            raise ValueError(f"rope.scaling.yarn_ext_factor must be 0 or 1, got {share}")
        is_yarn = bool(share)
    unscaled = attention_factor = scaling.get("attn_factor", 1.0)
    if is_yarn:
        all_dim = 0.0
        if "log_multiplier" in model:
            all_dim = scaling.get("yarn_log_multiplier", 0.0) / model["log_multiplier"]
        mscale = all_dim if all_dim and model.get("equal_mscales") else 1.0
        attention_factor *= yarn_amplitude(factor, mscale, all_dim)
    elif "yarn_attn_factor" in reads:
        attention_factor *= scaling.get("yarn_attn_factor", 1.0)
    betas = tuple(
        scaling.get(name, default) if name in reads else default
        for name, default in zip(("yarn_beta_fast", "yarn_beta_slow"), BETAS, strict=True)
    )
    ggml = _GgmlParameters(base, factor, is_yarn, attention_factor, betas)
    if layer_type == "main":
        return _GgmlParameters(base)
    if layer_type == "compress":  # YaRN without an attention factor
        if "attention.compress_rope_freq_base" not in keys:
            raise ValueError(f"GGUF metadata needs {name}.attention.compress_rope_freq_base")
        base = keys["attention.compress_rope_freq_base"]
        return ggml._replace(base=base, attention_factor=1.0 if is_yarn else attention_factor)
    if layer_type != "sliding_attention":
        return ggml
    own_base = keys.get("rope.freq_base_swa")
    if model["sliding"] == "same":
        return ggml._replace(base=own_base or base)
    if model["sliding"] == "plain":
        return _GgmlParameters(own_base or base)
    attention_factor = unscaled if is_yarn else attention_factor
    return ggml._replace(base=own_base or 10_000.0, factor=1.0, attention_factor=attention_factor)


def axes_of(sections: Sequence[int], pairs: int, model: Mapping[str, JSON]) -> tuple[int, ...]:
    """Return the position axis of each pair: time, height, width, or a fourth, 0 for text tokens.

    >>> axes_of([2, 1, 1], 4, {"sections": "blocks"})
    (0, 0, 1, 2)
    >>> axes_of([3, 1, 1], 5, {"sections": "interleaved"})  # one pair too many for its axis
    (0, 1, 2, 0, 3)
    """
    counts = [*sections, 0, 0, 0, 0][:4]
    if "sections" not in model or not (counts[0] > 0 and counts[1] > 0):
        return ()
    ends = list(itertools.accumulate(counts))

    def axis(index: int) -> int:
        if model["sections"] == "blocks":
            return bisect.bisect(ends, index)
        # in turn; a pair whose axis has all its pairs already goes to the fourth
        return index % 3 if index < 3 * counts[index % 3] else 3

    return tuple(axis(pair % ends[-1]) for pair in range(pairs))


def _scaled(
    spec: Rotary, ggml: _GgmlParameters, trained: int | None, tensors: Mapping[str, Sequence[float]]
) -> Rotary:
    """Return `spec` with the frequencies of `ggml`, divided by the tensors, and its factor."""
    factor, attention_factor = ggml.factor, ggml.attention_factor
    schedule = "linear" if factor != 1.0 else "default"
    params: dict[str, JSON] = {"factor": factor} if factor != 1.0 else {}
    if ggml.is_yarn and factor != 1.0:
        if trained is None:
            raise ValueError(
                "YaRN needs rope.scaling.original_context_length, or context_length, "
                "in the GGUF metadata"
            )
        names = ("beta_fast", "beta_slow", "attention_factor")
        usual = (*BETAS, yarn_amplitude(factor))
        schedule, params = "yarn", {**params, "original_max_position_embeddings": trained}
        for name, value, default in zip(names, (*ggml.betas, attention_factor), usual, strict=True):
            if not math.isclose(value, default, rel_tol=1e-7):
                params[name] = value
    spec = dataclasses.replace(spec, schedule=schedule, params=params)
    freqs, long, short = map(tensors.get, TENSORS)
    pairs = spec.rotary_dim // 2
    if long is not None or short is not None:
        if long is None or short is None or trained is None or ggml.is_yarn:
            raise ValueError(
                "rope_factors need both tensors, _long and _short, the context length of the "
                "training and no YaRN in the GGUF file"
            )
        params = {
            "short_factor": [value * factor for value in short[:pairs]],
            "long_factor": [value * factor for value in long[:pairs]],
            "original_max_position_embeddings": trained,
            "attention_factor": attention_factor,
        }
        return dataclasses.replace(spec, schedule="longrope", params=params)
    if freqs is None and (schedule == "yarn" or attention_factor == 1.0):
        return spec
    frequencies = inv_freq(spec)[0].tolist()
    if freqs is not None and len(freqs) < pairs:
        raise ValueError(f"rope_freqs.weight must hold {pairs} numbers > 0")
    frequencies = [
        0.0 if divisor >= STANDS_STILL else frequency / divisor
        for frequency, divisor in zip(frequencies, freqs or [1.0] * pairs, strict=False)
    ]
    params = {"inv_freq": frequencies, "attention_factor": attention_factor}
    return dataclasses.replace(spec, schedule="custom", params=params)
