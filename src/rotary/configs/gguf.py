"""RoPE keys of GGUF files, as llama.cpp writes and reads them."""

from collections.abc import Mapping
from typing import Any

from ..angles import inv_freq
from ..spec import Rotary, nearest

# GGUF: what follows "<architecture>." -> ours. Source: llama.cpp, gguf-py/gguf/constants.py
_GGUF = {
    "rope.dimension_count": "rotary_dim",
    "rope.freq_base": "base",
    "rope.scaling.type": "type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.finetuned": "",
    "rope.dimension_sections": "mrope_section",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
# GGUF architecture -> the pairs its RoPE turns. Source: llama.cpp, src/llama-model.cpp,
# llama_model_rope_type. Weights of "interleaved" ones were permuted when they were converted.
_LAYOUTS = {
    **dict.fromkeys(
        ("llama", "llama4", "deci", "baichuan", "starcoder", "internlm2", "minicpm", "xverse",
         "command-r", "cohere2", "olmo", "arctic", "deepseek", "deepseek2", "plm", "chatglm",
         "glm4", "granite", "granitemoe", "granitehybrid", "chameleon", "bailingmoe", "neo-bert",
         "smollm3", "arcee", "ernie4_5", "ernie4_5-moe", "mistral3", "mistral4"),
        "interleaved",
    ),
    **dict.fromkeys(
        ("falcon", "falcon-h1", "grok", "dbrx", "nomic-bert", "modern-bert", "stablelm", "bitnet",
         "qwen", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "olmo2", "olmoe", "phi2", "phi3",
         "phimoe", "gemma", "gemma2", "gemma3", "starcoder2", "openelm", "gptneox", "codeshell",
         "nemotron", "exaone", "minicpm3", "gpt-oss"),
        "half",
    ),
}  # fmt: skip


def from_gguf(metadata: Mapping[str, Any]) -> Rotary:
    """The RoPE of a GGUF file, from its metadata: {"general.architecture": "llama", ...}.

    Understands the keys under `<architecture>.rope.` and the sizes beside them; keys of other
    subjects are passed over. The band of llama3 is not metadata but a tensor, `rope_freqs.weight`:
    give its values as "rope_freqs.weight"; frequencies are divided by them.
    Raises ValueError for a key under rope that is not known, or for sizes that are missing.
    Source: llama.cpp, gguf-py/gguf/constants.py and src/llama-model.cpp (llama_model_rope_type).

    >>> from_gguf({"general.architecture": "qwen2", "qwen2.rope.freq_base": 1e6,
    ...            "qwen2.embedding_length": 896, "qwen2.attention.head_count": 14})
    Rotary(head_dim=64, base=1000000.0)
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ValueError('GGUF metadata must have "general.architecture"')
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        inside = key.removeprefix(f"{name}.")
        if inside in _GGUF:
            found[_GGUF[inside]] = value
        elif inside.startswith("rope."):
            raise ValueError(f"GGUF key {key!r} is not known{nearest(inside, _GGUF)}")
    head_dim = found.get("head_dim")
    if head_dim is None:
        try:
            head_dim = found["hidden_size"] // found["num_attention_heads"]
        except KeyError:
            raise ValueError(
                f"GGUF metadata needs {name}.attention.key_length, or embedding_length and "
                "attention.head_count"
            ) from None
    kind = found.get("type", "none")
    schedules = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
    if kind not in schedules:
        raise ValueError(f"rope.scaling.type {kind!r} is not known{nearest(kind, schedules)}")
    schedule = schedules[kind]
    params: dict[str, Any] = {}
    if schedule == "longrope":
        raise ValueError("longrope has its factors in tensors of the file: build the Rotary itself")
    if schedule != "default":
        params["factor"] = found.get("factor", 1.0)
    if schedule == "yarn":
        length = found.get("original_max_position_embeddings") or found["max_position_embeddings"]
        params["original_max_position_embeddings"] = length
        if "attention_factor" in found:
            params["attention_factor"] = found["attention_factor"]
    rotary_dim, base = found.get("rotary_dim", head_dim), found.get("base", 10_000.0)
    divisors = metadata.get("rope_freqs.weight")
    if divisors is not None:
        if schedule != "default":
            raise ValueError(f"rope_freqs.weight together with rope.scaling.type {kind!r}")
        divisors = [float(value) for value in divisors]
        plain = (base ** (-2 * i / rotary_dim) for i in range(len(divisors)))
        steps = [  # a pair that stands still is written as one divided by 1e30
            0.0 if value >= 1e30 else step / value
            for step, value in zip(plain, divisors, strict=True)
        ]
        schedule, params = "custom", {"inv_freq": steps}
    layout = _layout(name)
    return Rotary(
        head_dim=head_dim, rotary_dim=rotary_dim, base=base, layout=layout, schedule=schedule,
        params=params,
    )  # fmt: skip


def to_gguf(
    spec: Rotary, architecture: str, *, context_length: int | None = None
) -> dict[str, Any]:
    """The GGUF metadata that makes llama.cpp compute `spec`; `from_gguf` reads it back.

    Frequencies that llama.cpp has no name for (llama3, proportional, custom, ntk) go into
    "rope_freqs.weight", float32 divisors of base^(-2i / rotary_dim), with 1e30 for a pair that
    stands still. Raises ValueError for what it cannot do: a layout that is not the one of the
    architecture, several axes, a slice that does not start the head, another direction.

    >>> to_gguf(Rotary(head_dim=64, base=1e6), "qwen2")["qwen2.rope.freq_base"]
    1000000.0
    """
    layout = _layout(architecture)
    if (spec.layout, spec.out_layout) != (layout, layout):
        raise ValueError(
            f"llama.cpp reads {architecture!r} in the {layout} layout, the spec has "
            f"{spec.layout!r}; permute the rows of W_q and W_k with rotary.layouts.row_permutation"
        )
    if spec.start or spec.sign != 1 or spec.num_axes > 1:
        raise ValueError("GGUF metadata cannot say start, sign or axes")
    if spec.depends_on_length:
        raise ValueError(f"llama.cpp has no {spec.schedule!r} that follows the length")
    written: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.attention.key_length": spec.head_dim,
        f"{architecture}.rope.dimension_count": spec.rotary_dim,
        f"{architecture}.rope.freq_base": float(spec.base),
    }
    if context_length is not None:
        written[f"{architecture}.context_length"] = context_length
    scaling = f"{architecture}.rope.scaling"
    if spec.schedule == "default":
        return written
    if spec.schedule == "linear":
        return {**written, f"{scaling}.type": "linear", f"{scaling}.factor": spec.params["factor"]}
    if spec.schedule == "yarn" and set(spec.params) <= {
        "factor", "original_max_position_embeddings", "attention_factor",
    }:  # fmt: skip
        written |= {f"{scaling}.type": "yarn", f"{scaling}.factor": spec.params["factor"]}
        length = spec.params["original_max_position_embeddings"]
        written[f"{scaling}.original_context_length"] = length
        if "attention_factor" in spec.params:
            written[f"{scaling}.attn_factor"] = spec.params["attention_factor"]
        return written
    steps, amplitude = inv_freq(spec)
    if amplitude != 1.0:
        raise ValueError(f"rope_freqs.weight has no amplitude, the spec has {amplitude:g}")
    plain = [spec.base ** (-2 * i / spec.rotary_dim) for i in range(len(steps))]
    divisors = [
        own / step if step else 1e30 for own, step in zip(plain, steps.tolist(), strict=True)
    ]
    return {**written, "rope_freqs.weight": divisors}


def _layout(architecture: str) -> str:
    if architecture not in _LAYOUTS:
        raise ValueError(
            f"GGUF architecture {architecture!r} is not known{nearest(architecture, _LAYOUTS)}"
        )
    return _LAYOUTS[architecture]
