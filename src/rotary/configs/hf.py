"""A `Rotary` from a model's config, in every dialect that is around, and a config for a `Rotary`.

Which keys are meant is chosen in `entries.py`; here they get their meaning. A key, a type or a
model that is not known is an error that names it.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..positions import interleaved_sections, sections
from ..schedules import parameters, yarn_amplitude
from ..spec import Rotary, nearest
from .entries import Config, choose
from .layers import Model, Rope
from .values import whole_number

TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "axial")
# names that other readers have for them: vLLM 0.33, SGLang 0.5, mlx-lm 0.32, old remote code
ALIASES = {
    "su": "longrope", "mrope": "default", "mllama4": "llama3", "deepseek_yarn": "yarn",
    "telechat3-yarn": "yarn", "xdrope": "dynamic", "bailing_mrope": "default",
    "openpangu": "default", "ntk": "ntk",
}  # fmt: skip
LAYOUT_MARK = "rope_traditional"  # of mlx-lm: true for interleaved; read here for every model
_COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# keys beside a schedule's own that do not change cos and sin, or are read elsewhere
_NEUTRAL_KEYS = (
    "mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings",
)  # fmt: skip
# keys around the rope parameters that are read here for every model
_TOP_KEYS = (
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", LAYOUT_MARK,
    "mrope_section", "layer_rope_theta", "rope_scaling_layers",
)  # fmt: skip
_HARMLESS = {  # keys that published files carry and that say nothing at this value
    "rotary_pct": 1.0, "rotary": True, "use_rotary_pos_emb": True, "use_mrope": False,
    "use_3d_rope": True, "rope_is_neox_style": True, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
}  # fmt: skip
Complain = Callable[[str], None]


def from_hf_config(
    config: Any,
    layer_type: str | None = None,
    *,
    part: str | None = None,
    strict: bool = True,
) -> Rotary | None:
    """The RoPE of a model's config, as transformers 5.23 would compute it.

    config      path of a config.json or of the folder that holds it, a dict, or a PretrainedConfig
    layer_type  which entry, where frequencies differ by layer type ("full_attention", ...)
    part        which sub-config of a model of several parts ("vision_config"); default the text
    strict      False turns unknown keys into warnings
    Understands `rope_parameters` (v5, flat or nested by layer type), `rope_scaling` with top-level
    keys (v4), the models of `MODELS`, and the type names of vLLM, SGLang and mlx-lm; a dict without
    `model_type` is read as Llama with an optional leading slice.
    Returns None for a layer type without rotation, and where the config turns RoPE off.

    Raises ValueError for anything missing, unknown or contradictory, FileNotFoundError for a path
    that is not there.

    >>> from_hf_config({"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 5e5})
    Rotary(head_dim=128, base=500000.0)
    >>> from_hf_config({"model_type": "nanochat"}).sign
    -1
    """
    return rotary_of(choose(config, layer_type, part), refuse if strict else _warn)


def rotary_of(found: Config, complain: Complain) -> Rotary | None:
    """The RoPE of a config that was read; `complain` is given each key that has no meaning here.

    >>> rotary_of(choose({"head_dim": 64}), print)
    Rotary(head_dim=64)
    """
    rope, data, model = found.rope, found.data, found.model
    if "not_one" in model:
        raise ValueError(f"{data['model_type']!r} is not one rotation: {model['not_one']}")
    check_top(found, complain)
    if not found.rotates:
        return None
    head_dim = found.head_dim
    name = _rope_type(found)
    schedule = _schedule(name, rope, model)
    _check_trained(found, schedule, complain)
    rope = _known_keys(rope, schedule, name, model, complain)
    if schedule == "proportional":
        rotary_dim, params = head_dim, {"partial_rotary_factor": found.share}
    else:
        _check_share(found, complain)
        rotary_dim, params = found.rotary_dim, {}
    start = head_dim - rotary_dim if model.get("slice") == "trailing" else 0
    layout, out_layout = _layouts(found)
    taken = {key: value for key, value in rope.items() if key in parameters(schedule)}
    params = {**taken, **_renamed(name, schedule, rope), **params}
    if "truncate" in params and params["truncate"] is None:
        params["truncate"] = False  # null counts as false where transformers asks
    params = {key: value for key, value in params.items() if value is not None}
    if schedule == "axial":
        rotary_dim, params = _axial(head_dim, model)
    return Rotary(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        start=start,
        base=found.base,
        layout=layout,
        out_layout=out_layout,
        schedule=schedule,
        params=_filled(schedule, params, found),
        axes=_axes(found, rotary_dim // 2),
        sign=model.get("sign", 1),
    )


def to_hf_config(
    spec: Rotary, *, max_position_embeddings: int | None = None, version: int = 5
) -> dict[str, Any]:
    """The keys of a config.json that give `spec` back through `from_hf_config`.

    version 5 writes `rope_parameters`, version 4 `rope_theta` and `rope_scaling`.
    `max_position_embeddings` is written if given; `dynamic` needs its own and sets it.
    Raises ValueError for what such a config cannot say: another layout, several axes, a slice that
    does not start the head, a schedule transformers does not have.

    >>> to_hf_config(Rotary(head_dim=64))
    {'head_dim': 64, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0}}
    """
    if not isinstance(spec, Rotary):
        raise TypeError(f"spec must be a Rotary, got {type(spec).__qualname__}")
    if (
        max_position_embeddings is not None
        and whole_number("max_position_embeddings", max_position_embeddings) < 1
    ):
        raise ValueError(f"max_position_embeddings must be >= 1, got {max_position_embeddings}")
    if version not in (4, 5):
        raise ValueError(f"version must be 4 or 5, got {version!r}")
    if spec.schedule not in TYPES:
        raise ValueError(
            f"transformers has no rope_type {spec.schedule!r}; it has {', '.join(TYPES)}"
        )
    plain = Rotary(head_dim=spec.head_dim, rotary_dim=spec.rotary_dim)
    for field in ("start", "layout", "out_layout", "axes", "sign"):
        if getattr(spec, field) != getattr(plain, field):
            raise ValueError(
                f"a plain config cannot say {field}={getattr(spec, field)!r}: it belongs to a model"
            )
    if spec.schedule == "proportional" and spec.rotary_dim != spec.head_dim:
        raise ValueError(
            f"a config cannot say rotary_dim={spec.rotary_dim} beside the partial_rotary_factor of "
            "proportional: both are that key"
        )
    params = spec.to_dict()["params"]
    written: dict[str, Any] = {"head_dim": spec.head_dim}
    if spec.schedule == "dynamic":
        trained = params.pop("original_max_position_embeddings")
        if max_position_embeddings not in (None, trained):
            raise ValueError(
                f"dynamic scales from max_position_embeddings, which must be {trained}, "
                f"got {max_position_embeddings}"
            )
        max_position_embeddings = trained
    if max_position_embeddings is not None:
        written["max_position_embeddings"] = max_position_embeddings
    if spec.rotary_dim != spec.head_dim:
        params["partial_rotary_factor"] = _share(spec)
    if version == 5:
        rope = {"rope_type": spec.schedule, "rope_theta": spec.base, **params}
        return {**written, "rope_parameters": rope}
    share = params.pop("partial_rotary_factor", None)
    if share is not None:
        written["partial_rotary_factor"] = share
    written["rope_theta"] = spec.base
    if spec.schedule != "default":
        written["rope_scaling"] = {"rope_type": spec.schedule, **params}
    return written


def _share(spec: Rotary) -> float:
    """The share that a reader, who truncates, turns back into rotary_dim."""
    share = spec.rotary_dim / spec.head_dim
    return share if int(spec.head_dim * share) == spec.rotary_dim else math.nextafter(share, 1)


def refuse(message: str) -> None:
    """Complain by a ValueError.

    >>> refuse("a key")
    Traceback (most recent call last):
    ValueError: a key
    """
    raise ValueError(message)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def check_top(found: Config, complain: Complain) -> None:
    """Complain about keys that look like RoPE and that this model does not read: misspelt ones.

    >>> check_top(choose({"model_type": "llama", "rope_thata": 1e4}), print)
    config key 'rope_thata' is not known; did you mean 'rope_theta'?
    """
    data, model = found.data, found.model
    known = {*_TOP_KEYS, *model.get("names", {}).values(), *model.get("other", ())}
    known |= {model.get("layout_key", ""), model.get("switch", "")}
    if not found.model_type:
        known.add("rope_dim")  # vLLM's name of the width
    unread = found.unread_base
    if unread is not None and unread != found.base:
        where = f"layers of {found.layer_type!r}" if found.layer_type else "this model"
        complain(
            f"rope_theta {unread!r} is not read for {where} of model_type {found.model_type!r}, "
            f"whose base is {found.base:g}; a layer type takes it from its rope_parameters"
        )
    our_names = {theirs: ours for ours, theirs in model.get("names", {}).items()}
    for key in found.unread:
        name, share = our_names.get(key, key), found.share
        used = {"rope_theta": unread or found.base, "partial_rotary_factor": share}.get(name)
        if used and data.get(key) is not None and data[key] != used:
            complain(
                f"{key} {data[key]!r} is not read for model_type {found.model_type!r}, which has "
                f"{used:g}; write it under rope_parameters, as {name}"
            )
    for names in model.get("layer_names", {}).values():
        known |= set(names.values())
    harmless = {**_HARMLESS, "rope_interleave": model.get("layout") == "interleaved"}
    for key, value in data.items():
        is_harmless = key in harmless and harmless[key] == value
        if re.search("rope|rotary", str(key)) and key not in known and not is_harmless:
            complain(f"config key {key!r} is not known{nearest(key, known)}")


def _rope_type(found: Config) -> str:
    name, model = found.rope_type, found.model
    new, old = found.rope.get("rope_type"), found.rope.get("type")
    if new is not None and old is not None and new != old and ALIASES.get(str(old), old) != new:
        raise ValueError(f"rope_type {new!r} and type {old!r} disagree; keep one")
    known = (*TYPES, *ALIASES)
    if name not in known:
        raise ValueError(
            f"rope_type {name!r} is not known{nearest(name, known)}; known: {', '.join(TYPES)}"
        )
    if name not in model.get("only", (name,)):
        raise ValueError(
            f"of this model rope_type {', '.join(model['only'])} alone is read, got {name!r}"
        )
    if "num_axes" in model and model["axes"] != "turns of one ladder" and name == "default":
        return "axial"
    return name


def _schedule(name: str, rope: Mapping[str, Any], model: Model) -> str:
    schedule = ALIASES.get(name, name)
    if schedule == "dynamic" and rope.get("alpha") and model.get("alpha"):
        return "ntk"  # Hunyuan: a fixed base, whatever the length
    if name == "ntk" and rope.get("mixed_b") is not None:
        return "ntk_mixed"
    return schedule


def _known_keys(
    rope: Mapping[str, Any], schedule: str, name: str, model: Model, complain: Complain
) -> Rope:
    """The rope parameters without those that are not known, each of which is complained about."""
    if rope.get("use_fope"):
        raise ValueError("use_fope is not a rotary embedding: FoPE mixes frequencies by matrices")
    known = {*_COMMON_KEYS, *_NEUTRAL_KEYS, *parameters(schedule), *_DIALECT_KEYS.get(name, ())}
    known -= {"num_axes", "ladder"}
    if not model.get("mscales"):  # a model whose code ignores them
        known -= {"short_mscale", "long_mscale"}
    if name == "dynamic" and model.get("alpha"):  # Hunyuan's files carry YaRN's keys, unread
        known |= {"alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    if rope.get("extrapolation_factor") == 1:
        known.add("extrapolation_factor")
    if rope.get("interleaved") == rope.get("mrope_interleaved"):  # Qwen3-Omni says it twice
        known.add("interleaved")
    for key in rope:
        if key not in known:
            complain(
                f"rope_type {name!r} has no key {key!r}{nearest(key, known)}; "
                f"known: {', '.join(sorted(known))}"
            )
    return {key: value for key, value in rope.items() if key in known}


# rope type -> keys it has beside those of its schedule
_DIALECT_KEYS = {
    "dynamic": ("max_trained_positions",),
    "xdrope": ("alpha", "factor", "max_trained_positions"),
    "ntk": ("mixed_b",),
    "yarn": ("apply_yarn_scaling",),
    "deepseek_yarn": ("attn_factor",),
}


def _renamed(name: str, schedule: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that a dialect says in its own way."""
    if schedule == "ntk" and rope.get("alpha"):
        return {"factor": rope["alpha"]}
    if schedule == "ntk_mixed":
        return {"b": rope["mixed_b"]}
    if rope.get("apply_yarn_scaling") is False:  # Mistral's own files
        return {"attention_factor": 1.0}
    factor = rope.get("factor")
    if name == "telechat3-yarn" and isinstance(factor, int | float) and factor > 1:
        return {"attention_factor": yarn_amplitude(factor, 0.7)}  # vLLM 0.33, config.py
    if name == "deepseek_yarn" and isinstance(factor, int | float) and factor > 1:
        amplitude = yarn_amplitude(factor, rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0))
        return {"attention_factor": amplitude * rope.get("attn_factor", 1.0)}
    return {}


def _check_trained(found: Config, schedule: str, complain: Complain) -> None:
    name = "original_max_position_embeddings"
    outside, inside = found.data.get(name), found.rope.get(name)
    is_silent = inside is None and schedule in ("yarn", "longrope", "llama3") and found.model_type
    used = found.context if is_silent else inside
    if name not in found.model and None not in (outside, used) and outside != used:
        complain(  # Phi-3's code reads the outer one
            f"{name} is {outside} beside the rope parameters and {inside} among them, where alone "
            "it is read; keep one, there"
        )


def _check_share(found: Config, complain: Complain) -> None:
    if found.share != 1 and not found.reads_share:
        complain(
            f"partial_rotary_factor is {found.share}, but the code of {found.model_type!r} "
            "rotates the whole head and ignores it; remove the key"
        )


def _layouts(found: Config) -> tuple[str, str]:
    """(layout, out_layout): the model's own, unless a key says that its weights have the other."""
    layout = found.model.get("layout", "half")
    keys = (found.model.get("layout_key", LAYOUT_MARK), LAYOUT_MARK)
    said = {key: found.data[key] for key in keys if key in found.data}
    for key, value in said.items():
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, got {value!r}")
    if len(set(said.values())) > 1:
        raise ValueError(f"{said} say different layouts of the weights: keep one of the keys")
    told = layout if not said else "interleaved" if any(said.values()) else "half"
    return told, found.model.get("out_layout", told) if told == layout else told


def _axial(head_dim: int, model: Model) -> tuple[int, dict[str, Any]]:
    count = model["num_axes"]
    ladder = "turns" if model["axes"].startswith("turns") else model.get("ladder", "blocks")
    return 2 * count * (head_dim // count // 2), {"num_axes": count, "ladder": ladder}


def _axes(found: Config, pairs: int) -> tuple[int, ...]:
    """Which position axis drives each pair."""
    model, rope = found.model, found.rope
    if "num_axes" in model:
        count = model["num_axes"]
        order = range(count)[::-1] if model["axes"].endswith("reversed") else range(count)
        if model["axes"].startswith("turns"):
            return tuple(axis for _ in range(pairs // count) for axis in order)
        return tuple(axis for axis in order for _ in range(pairs // count))
    counts = (
        rope.get("mrope_section") or found.data.get("mrope_section") or model.get("mrope_section")
    )
    if not counts:
        return ()
    if sum(counts) != pairs:
        raise ValueError(f"mrope_section {counts} must sum to the {pairs} pairs that are rotated")
    way = model.get("mrope", "sections")
    if rope.get("mrope_interleaved") is not None and way != "alternating":
        way = "interleaved" if rope["mrope_interleaved"] else "sections"
    if way == "alternating":  # Ernie 4.5 VL: height and width in turn, then time
        return (*((1, 2) * counts[0]), *((0,) * counts[2]))
    return interleaved_sections(*counts) if way == "interleaved" else sections(*counts)


def _filled(schedule: str, params: dict[str, Any], found: Config) -> dict[str, Any]:
    """What transformers takes from beside the dict: trained length, and factor if it is missing."""
    name = "original_max_position_embeddings"
    context, trained = found.context, found.trained
    if schedule == "dynamic":
        context = found.rope.get("max_trained_positions", context)  # vLLM's name, which wins there
        if context is None:
            raise ValueError("dynamic needs max_position_embeddings, the length it scales from")
        return {**params, name: whole_number("max_trained_positions", context)}
    if name not in parameters(schedule):
        return params
    if trained is not None:
        params = {**params, name: trained}
    is_needed = schedule == "yarn" or not params.keys() & {"attention_factor", "long_mscale"}
    if schedule != "llama3" and is_needed and "factor" not in params and context and trained:
        params["factor"] = context / trained
    return params
