"""Arguments of Megatron: of Megatron-LM's scripts, and of megatron-core's configs and models."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..positions import sections
from ..schedules import yarn_amplitude
from ..spec import Rotary, nearest
from ..strict_json import JSON
from .values import is_whole

# what a missing argument is, for each way in which Megatron builds its RoPE
_YARN = {
    "rotary_scaling_factor": 1.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
    "correction_range_round_to_int": True,
}  # fmt: skip
_LATENT_YARN = {**_YARN, "rotary_scaling_factor": 40.0}
_MSCALES = ("yarn_mscale", "yarn_mscale_all_dim")  # None is a value there
_BAND_FACTOR = 8.0
_LARGEST = 2**24  # channels of all heads together
_BAND = ("use_rope_scaling", "rope_scaling")  # of the scripts, of GPTModel
_STRETCH = ("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor")
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "a name": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a whole number > 0": lambda value: is_whole(value) and 0 < value <= _LARGEST,
    "a list of whole numbers": lambda value: (
        isinstance(value, list | tuple) and all(map(is_whole, value))
    ),
    "a number": lambda value: (
        isinstance(value, float | int)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    ),
}
# the arguments that are read -> what each must be
_READ = {
    **dict.fromkeys(
        ("rotary_base", "rotary_percent", "rope_scaling_factor", *_STRETCH, *_YARN,
         *(f"yarn_{name}" for name in _YARN)), "a number",
    ),
    **dict.fromkeys(("position_embedding_type", "rope_type"), "a name"),
    **dict.fromkeys(
        ("kv_channels", "hidden_size", "num_attention_heads", "qk_pos_emb_head_dim"),
        "a whole number > 0",
    ),
    **dict.fromkeys(
        ("multi_latent_attention", "use_rotary_position_embeddings", "rotary_interleaved", *_BAND,
         "correction_range_round_to_int", "yarn_correction_range_round_to_int"), "true or false",
    ),
    "mrope_section": "a list of whole numbers",
}  # fmt: skip
# which layers rotate, and with which kernel
_NO_BEARING = {
    "no_rope_freq", "apply_rope_fusion", "fused_single_qkv_rope", "dsa_indexer_rope_interleaved",
}  # fmt: skip


def from_megatron(arguments: Mapping[str, JSON]) -> Rotary:
    """The RoPE of Megatron's arguments: {"kv_channels": 128, "rotary_base": 500000, ...}.

    arguments  as a dict under their Python names, with or without the arguments of other subjects:
               `vars(args)` of a script, or the fields of a TransformerConfig and what GPTModel is
               given besides. A value of None counts as missing.

    `use_rope_scaling` is the llama3 band with 1, 4 and 8192 built in; `rotary_percent` a leading
    slice; `position_embedding_type` "mrope" deals the pairs out to three axes by `mrope_section`,
    "yarn" reads `yarn_rotary_scaling_factor` and its companions. Multi-latent attention
    (`multi_latent_attention`, or `qk_pos_emb_head_dim` alone) rotates `qk_pos_emb_head_dim`
    channels, reads interleaved pairs, writes half-split ones, and is YaRN unless `rope_type` is
    "rope". There a missing `rotary_scaling_factor` is 40, as in MLATransformerConfig; the scripts
    of Megatron-LM give 1.0, so `vars(args)` has it.
    Raises ValueError for an argument of RoPE that is not known, for one that Megatron ignores or
    refuses beside the others, and for positions that are not rotary.
    Source: megatron-core 0.16.1, models/gpt/gpt_model.py, transformer/multi_latent_attention.py and
    models/common/embeddings; compared with its models, run, in tests/golden/peers/megatron.json.

    >>> from_megatron({"kv_channels": 128, "rotary_base": 500000, "rotary_percent": 0.5}).rotary_dim
    64
    >>> latent = from_megatron({"qk_pos_emb_head_dim": 64, "rotary_scaling_factor": 40.0})
    >>> latent.schedule, latent.layout, latent.out_layout
    ('yarn', 'interleaved', 'half')
    """
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise ValueError(f"arguments must be a dict of names to values, got {arguments!r:.60}")
    for name in arguments:
        if name not in {*_READ, *_NO_BEARING} and any(
            word in name for word in ("rope", "rotary", "pos_emb", "yarn")
        ):
            raise ValueError(f"argument {name!r} is not known{nearest(name, _READ)}")
    values = {
        name: value
        for name, value in arguments.items()
        if name in _READ and (value is not None or name in _MSCALES)
    }
    for name, value in values.items():
        if value is not None and not _CHECKS[_READ[name]](value):
            raise ValueError(f"{name} must be {_READ[name]}, got {value!r:.60}")
    if values.get("multi_latent_attention", "qk_pos_emb_head_dim" in values):
        return _latent(values)
    kind = values.get("position_embedding_type", "rope")
    if values.get("use_rotary_position_embeddings"):
        kind = "rope"
    if kind == "yarn":
        return _yarn_rotary(values, _head_dim(values), _YARN, "yarn_")
    if kind not in ("rope", "mrope"):
        raise ValueError(f"position_embedding_type {kind!r} is no rotary embedding")
    if values.get("rope_type", "rope") != "rope":
        raise ValueError(
            f"Megatron takes rope_type {values['rope_type']!r} for multi_latent_attention alone; "
            'for other attention give position_embedding_type "yarn"'
        )
    return _plain(values, _head_dim(values), has_axes=kind == "mrope")


def _head_dim(values: Mapping[str, JSON]) -> int:
    if "kv_channels" in values:
        return int(values["kv_channels"])
    if not {"hidden_size", "num_attention_heads"} <= values.keys():
        raise ValueError("the arguments need kv_channels, or hidden_size and num_attention_heads")
    return int(values["hidden_size"] // values["num_attention_heads"])


def _latent(values: Mapping[str, JSON]) -> Rotary:
    """The slice of multi-latent attention."""
    if values.get("rotary_interleaved"):
        raise ValueError("Megatron refuses rotary_interleaved with multi_latent_attention")
    if "qk_pos_emb_head_dim" not in values:
        raise ValueError("multi_latent_attention needs qk_pos_emb_head_dim (Megatron's is 64)")
    _refuse_ignored(values, "multi_latent_attention", *_BAND, *_STRETCH)
    head_dim, kind = values["qk_pos_emb_head_dim"], values.get("rope_type", "yarn")
    if kind == "yarn":
        spec = _yarn_rotary(values, head_dim, _LATENT_YARN, "")
    elif kind == "rope":
        spec = _plain(values, head_dim)
    else:
        raise ValueError(f"rope_type {kind!r} is not known: Megatron has 'rope' and 'yarn'")
    return dataclasses.replace(spec, layout="interleaved", out_layout="half")


def _refuse_ignored(values: Mapping[str, JSON], beside: str, *names: str) -> None:
    for name in names:
        if values.get(name):
            raise ValueError(f"Megatron ignores {name} beside {beside}: leave it out")
    if values.get("rope_scaling_factor", _BAND_FACTOR) != _BAND_FACTOR:
        raise ValueError(f"Megatron ignores rope_scaling_factor beside {beside}: leave it out")


def _plain(values: Mapping[str, JSON], head_dim: int, *, has_axes: bool = False) -> Rotary:
    """RotaryEmbedding, or MultimodalRotaryEmbedding with three axes."""
    share = values.get("rotary_percent", 1.0)
    if not 0 < share <= 1:
        raise ValueError(f"rotary_percent must be in (0, 1], got {share!r}")
    rotary_dim = int(head_dim * share)
    stretch = next((values[name] for name in _STRETCH if name in values), None)
    has_band = any(values.get(name) for name in _BAND)
    schedule, params = "default", {}
    axes: tuple[int, ...] = ()
    if has_axes:
        _refuse_ignored(values, 'position_embedding_type "mrope"', *_BAND)
        if values.get("rotary_interleaved"):
            raise ValueError('Megatron cannot run rotary_interleaved with "mrope"')
        if "mrope_section" not in values:
            raise ValueError('position_embedding_type "mrope" needs mrope_section')
        counts = values["mrope_section"]
        if len(counts) != 3 or sum(counts) != rotary_dim // 2:
            raise ValueError(f"mrope_section must be three counts that sum to {rotary_dim // 2} "
                             f"pairs, got {counts}")  # fmt: skip
        axes = sections(*counts)
    elif stretch is not None and has_band:
        raise ValueError(
            "use_rope_scaling and rotary_seq_len_interpolation_factor scale the same frequencies "
            "twice; no Rotary says that: give one of them"
        )
    if stretch is not None:
        schedule, params = "linear", {"factor": stretch}
    elif has_band:
        schedule, params = "llama3", {
            "factor": values.get("rope_scaling_factor", _BAND_FACTOR), "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
    return Rotary(
        head_dim=head_dim, rotary_dim=rotary_dim, base=values.get("rotary_base", 10_000),
        layout="interleaved" if values.get("rotary_interleaved") else "half",
        schedule=schedule, params=params, axes=axes,
    )  # fmt: skip


def _yarn_rotary(
    values: Mapping[str, JSON], head_dim: int, silent: Mapping[str, JSON], prefix: str
) -> Rotary:
    """YarnRotaryEmbedding, which rotates the whole width whatever rotary_percent says."""
    if values.get("rotary_interleaved"):
        raise ValueError("Megatron refuses rotary_interleaved with YaRN")
    if values.get("rotary_percent", 1.0) != 1.0:
        raise ValueError("Megatron ignores rotary_percent beside YaRN: leave it out")
    _refuse_ignored(values, "YaRN", *_BAND, *_STRETCH)
    value = {name: values.get(prefix + name, values.get(name, silent[name])) for name in silent}
    factor, mscales = value["rotary_scaling_factor"], (value["mscale"], value["mscale_all_dim"])
    over, under = (1.0, 0.0) if None in mscales else mscales
    params = {
        "factor": factor,
        "original_max_position_embeddings": value["original_max_position_embeddings"],
        "beta_fast": value["beta_fast"],
        "beta_slow": value["beta_slow"],
        "attention_factor": yarn_amplitude(factor, over, under),
        "truncate": value["correction_range_round_to_int"],
    }
    base = values.get("rotary_base", 10_000)
    return Rotary(head_dim=head_dim, base=base, schedule="yarn", params=params)
