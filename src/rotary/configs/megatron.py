"""Makes a `Rotary` from arguments of Megatron-LM's scripts, or of megatron-core's configs."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..positions import sections
from ..schedules import yarn_amplitude
from ..spec import Rotary, is_whole
from ..strict_json import JSON
from ..words import nearest

# defaults of the arguments of YaRN
_YARN = {
    "rotary_scaling_factor": 1.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
    "correction_range_round_to_int": True,
}  # fmt: skip
_MSCALES = ("yarn_mscale", "yarn_mscale_all_dim")  # for these None is a value
_LLAMA3_FACTOR = 8.0
_LARGEST = 2**24  # channels of all heads together
_LLAMA3_SWITCHES = ("use_rope_scaling", "rope_scaling")  # in scripts, in GPTModel
_LINEAR_FACTORS = ("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor")
_Kind = tuple[str, Callable[[Any], bool]]
_NAME: _Kind = ("a name", lambda value: isinstance(value, str))
_SWITCH: _Kind = ("true or false", lambda value: isinstance(value, bool))
_SIZE: _Kind = ("a whole number > 0", lambda value: is_whole(value) and 0 < value <= _LARGEST)
_COUNTS: _Kind = (
    "a list of whole numbers",
    lambda value: isinstance(value, list | tuple) and all(map(is_whole, value)),
)
_NUMBER: _Kind = (
    "a number",
    lambda value: (is_whole(value) or isinstance(value, float)) and abs(value) < math.inf,
)
# the arguments that are read -> what each must be
_READ = {
    **dict.fromkeys(("rotary_base", "rotary_percent", "rope_scaling_factor"), _NUMBER),
    **dict.fromkeys(_LINEAR_FACTORS, _NUMBER),
    **dict.fromkeys((*_YARN, *(f"yarn_{name}" for name in _YARN)), _NUMBER),
    **dict.fromkeys(("position_embedding_type", "rope_type"), _NAME),
    **dict.fromkeys(
        ("kv_channels", "hidden_size", "num_attention_heads", "qk_pos_emb_head_dim"), _SIZE
    ),
    **dict.fromkeys(
        ("multi_latent_attention", "use_rotary_position_embeddings", "rotary_interleaved",
         "correction_range_round_to_int", "yarn_correction_range_round_to_int", *_LLAMA3_SWITCHES),
        _SWITCH,
    ),
    "mrope_section": _COUNTS,
}  # fmt: skip
# names that look like RoPE and do not change it: which layers rotate, and with which kernel
_NOT_READ = {
    "no_rope_freq", "apply_rope_fusion", "fused_single_qkv_rope", "dsa_indexer_rope_interleaved",
}  # fmt: skip


def from_megatron(arguments: Mapping[str, JSON]) -> Rotary:
    """Return the RoPE of Megatron's arguments: {"kv_channels": 128, "rotary_base": 500000, ...}.

    arguments  a dict by their Python names; other arguments may be among them: `vars(args)` of a
               script, or the fields of a TransformerConfig and the arguments of GPTModel. A value
               of None counts as missing.

    `use_rope_scaling` is llama3 scaling with low_freq_factor 1, high_freq_factor 4 and a trained
    length of 8192; `rotary_percent` is a leading slice; `position_embedding_type` "mrope" deals the
    pairs out to three axes by `mrope_section`, "yarn" reads `yarn_rotary_scaling_factor` and its
    companions. Multi-latent attention (`multi_latent_attention`, or `qk_pos_emb_head_dim` alone)
    rotates `qk_pos_emb_head_dim` channels, reads the interleaved layout, writes the half layout,
    and is YaRN unless `rope_type` is "rope". There a missing `rotary_scaling_factor` is 40, as in
    MLATransformerConfig; the scripts of Megatron-LM give 1.0, so `vars(args)` has it.
    Raises ValueError for an unknown argument of RoPE, for one that Megatron ignores or refuses
    beside the others, and for a position embedding that is not rotary.
    Source: megatron-core 0.16.1, models/gpt/gpt_model.py, transformer/multi_latent_attention.py and
    models/common/embeddings; compared with its models, run, in tests/golden/peers/megatron.json.

    >>> from_megatron({"kv_channels": 128, "rotary_base": 500000, "rotary_percent": 0.5}).rotary_dim
    64
    >>> latent = from_megatron({"qk_pos_emb_head_dim": 64, "rotary_scaling_factor": 40.0})
    >>> latent.schedule, latent.layout, latent.out_layout
    ('yarn', 'interleaved', 'half')
    """
    values = _checked(arguments)
    is_latent = values.get("multi_latent_attention", "qk_pos_emb_head_dim" in values)
    head_dim, kind = (_latent if is_latent else _plain)(values)
    _refuse_ignored(values, is_latent, kind)
    rotary_dim = int(head_dim * values.get("rotary_percent", 1.0))
    schedule, params = _scaling(values, is_latent, kind)
    axes: tuple[int, ...] = ()
    if kind == "mrope":
        if "mrope_section" not in values:
            raise ValueError('position_embedding_type "mrope" needs mrope_section')
        counts = values["mrope_section"]
        if len(counts) != 3 or sum(counts) != rotary_dim // 2:
            raise ValueError(f"mrope_section must be three counts that sum to {rotary_dim // 2} "
                             f"pairs, got {counts}")  # fmt: skip
        axes = sections(*counts)
    layout = "interleaved" if is_latent or values.get("rotary_interleaved") else "half"
    return Rotary(
        head_dim=head_dim, rotary_dim=rotary_dim, base=values.get("rotary_base", 10_000),
        layout=layout, out_layout="half" if is_latent else layout,
        schedule=schedule, params=params, axes=axes,
    )  # fmt: skip


def _checked(arguments: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the arguments of RoPE; ValueError for one that is not known or of a wrong type."""
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise ValueError(f"arguments must be a dict of names to values, got {arguments!r:.60}")
    values = {}
    for name, value in arguments.items():
        if name not in _READ:
            is_near = any(word in name for word in ("rope", "rotary", "pos_emb", "yarn"))
            if is_near and name not in _NOT_READ:
                raise ValueError(f"argument {name!r} is not known{nearest(name, _READ)}")
        elif value is not None:
            kind, is_right = _READ[name]
            if not is_right(value):
                raise ValueError(f"{name} must be {kind}, got {value!r:.60}")
            values[name] = value
        elif name in _MSCALES:
            values[name] = None
    return values


def _plain(values: Mapping[str, JSON]) -> tuple[int, str]:
    """Return (head_dim, "rope", "mrope" or "yarn") for attention that is not latent."""
    kind = values.get("position_embedding_type", "rope")
    if values.get("use_rotary_position_embeddings"):
        kind = "rope"
    if kind not in ("rope", "mrope", "yarn"):
        raise ValueError(f"position_embedding_type {kind!r} is no rotary embedding")
    if kind != "yarn" and values.get("rope_type", "rope") != "rope":
        raise ValueError(
            f"Megatron reads rope_type {values['rope_type']!r} only for multi_latent_attention; "
            'for other attention give position_embedding_type "yarn"'
        )
    if "kv_channels" in values:
        return values["kv_channels"], kind
    if not {"hidden_size", "num_attention_heads"} <= values.keys():
        raise ValueError("the arguments need kv_channels, or hidden_size and num_attention_heads")
    return values["hidden_size"] // values["num_attention_heads"], kind


def _latent(values: Mapping[str, JSON]) -> tuple[int, str]:
    """Return (head_dim, "rope" or "yarn") for the rotated slice of multi-latent attention."""
    kind = values.get("rope_type", "yarn")
    if "qk_pos_emb_head_dim" not in values:
        raise ValueError("multi_latent_attention needs qk_pos_emb_head_dim (Megatron's is 64)")
    if kind not in ("rope", "yarn"):
        raise ValueError(f"rope_type {kind!r} is not known: Megatron has 'rope' and 'yarn'")
    return values["qk_pos_emb_head_dim"], kind


def _refuse_ignored(values: Mapping[str, JSON], is_latent: bool, kind: str) -> None:
    """Raise ValueError for arguments that Megatron ignores or refuses beside the others."""
    if not 0 < values.get("rotary_percent", 1.0) <= 1:
        raise ValueError(f"rotary_percent must be in (0, 1], got {values['rotary_percent']!r}")
    has_llama3, has_linear = (
        any(map(values.get, names)) for names in (_LLAMA3_SWITCHES, _LINEAR_FACTORS)
    )
    if kind == "rope" and not is_latent:
        if has_llama3 and has_linear:
            raise ValueError(
                "use_rope_scaling and rotary_seq_len_interpolation_factor scale the same "
                "frequencies twice; no Rotary says that: give one of them"
            )
        return
    beside = f'position_embedding_type "{kind}"'
    beside = "multi_latent_attention" if is_latent else beside
    if values.get("rotary_interleaved"):
        raise ValueError(f"Megatron refuses rotary_interleaved with {beside}: leave it out")
    ignored = [name for name in (*_LLAMA3_SWITCHES, *_LINEAR_FACTORS) if values.get(name)]
    if kind == "mrope":
        ignored = [name for name in ignored if name in _LLAMA3_SWITCHES]
    for name, default in (("rope_scaling_factor", _LLAMA3_FACTOR), ("rotary_percent", 1.0)):
        if values.get(name, default) != default and (name != "rotary_percent" or kind == "yarn"):
            ignored.append(name)
    if ignored:
        raise ValueError(f"Megatron ignores {ignored[0]} beside {beside}: leave it out")


def _scaling(values: Mapping[str, JSON], is_latent: bool, kind: str) -> tuple[str, dict[str, JSON]]:
    """Return the schedule and its parameters."""
    linear_factor = next((values[name] for name in _LINEAR_FACTORS if name in values), None)
    if kind != "yarn":
        if linear_factor is not None:
            return "linear", {"factor": linear_factor}
        if not any(map(values.get, _LLAMA3_SWITCHES)):
            return "default", {}
        return "llama3", {
            "factor": values.get("rope_scaling_factor", _LLAMA3_FACTOR), "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
    prefix, defaults = "yarn_", _YARN
    if is_latent:
        prefix, defaults = "", {**_YARN, "rotary_scaling_factor": 40.0}
    value = {name: values.get(prefix + name, values.get(name, defaults[name])) for name in defaults}
    mscales = (value["mscale"], value["mscale_all_dim"])
    mscale, mscale_all_dim = (1.0, 0.0) if None in mscales else mscales
    return "yarn", {
        "factor": value["rotary_scaling_factor"],
        "original_max_position_embeddings": value["original_max_position_embeddings"],
        "beta_fast": value["beta_fast"],
        "beta_slow": value["beta_slow"],
        "attention_factor": yarn_amplitude(value["rotary_scaling_factor"], mscale, mscale_all_dim),
        "truncate": value["correction_range_round_to_int"],
    }
