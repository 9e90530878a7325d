"""Makes a `Rotary` from a model's config, in all versions of the format.

`entries.py` chooses the keys; this file interprets them. An unknown key, type or model is an error
that names it. `hf_writing.py` writes configs.
"""

import re
import warnings
from collections.abc import Callable, Mapping

from ..schedules import parameters, yarn_amplitude
from ..spec import Rotary, check_head_dim
from ..strict_json import JSON
from ..words import nearest
from .axes import axes_of
from .entries import HARMLESS, choose
from .layers import Model, Rope, rope_parameters
from .record import Config
from .values import whole_number

TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "axial")
# what other programs call these types: vLLM 0.33, SGLang 0.5, mlx-lm 0.32, old remote code
ALIASES = {
    "su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "telechat3-yarn": "yarn",
    "xdrope": "dynamic", "ntk": "ntk_mixed",
}  # fmt: skip
# rope types whose functions in transformers fail if head_dim is null
_NEED_HEAD_DIM = ("dynamic", "longrope", "yarn")
LAYOUT_MARK = "rope_traditional"  # of mlx-lm: true for interleaved; read here for every model
# keys beside a schedule's own; the last two do not change cos and sin
_COMMON_KEYS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section",
    "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings",
)  # fmt: skip
# keys around the rope parameters that are read here for every model
_TOP_KEYS = (
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", LAYOUT_MARK,
    "mrope_section", "layer_rope_theta", "rope_scaling_layers",
)  # fmt: skip
Complain = Callable[[str], None]


def refuse(message: str) -> None:
    """Raise ValueError: the default for `complain`.

    >>> refuse("a key")
    Traceback (most recent call last):
    ValueError: a key
    """
    raise ValueError(message)


def from_hf_config(
    config: object,
    layer_type: str | None = None,
    *,
    part: str | None = None,
    as_type: str | None = None,
    strict: bool = True,
) -> Rotary | None:
    """Return the RoPE of a model's config, as transformers 5.24 would compute it.

    config      path of a config.json or of the folder that holds it, a dict, or a PretrainedConfig
    layer_type  which entry, where frequencies differ by layer type ("full_attention", ...)
    part        which sub-config of a model of several parts ("vision_config"); default the text
    as_type     model_type whose code is like that of this model, if its own is not known
    strict      False turns unknown keys into warnings
    It reads `rope_parameters` (v5, flat or nested by layer type), `rope_scaling` with top-level
    keys (v4), the models of `MODELS`, and the type names of vLLM, SGLang and mlx-lm; a dict without
    `model_type` is read as Llama with an optional leading slice.
    Returns None for a layer type without rotation, and if the config turns RoPE off. Warns of a
    model whose frequencies are trained parameters (Mistral Large 4).

    Raises ValueError for anything missing, unknown or contradictory, FileNotFoundError for a path
    that is not there.

    >>> from_hf_config({"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 5e5})
    Rotary(head_dim=128, base=500000.0)
    >>> from_hf_config({"model_type": "lama4u", "head_dim": 64}, as_type="llama")
    Rotary(head_dim=64)
    """
    chosen = choose(config, layer_type, part, as_type)
    if "learned" in chosen.model:
        warnings.warn(
            f"{chosen.model_type!r} multiplies each frequency by a trained number, which no config "
            "has: this is its RoPE before training; rotary.from_model(model) has the one after it",
            stacklevel=2,
        )
    return rotary_of(chosen, refuse if strict else _warn)


def rotary_of(config: Config, complain: Complain = refuse) -> Rotary | None:
    """Return the RoPE of a config; `complain` is called with a message on each unknown key.

    >>> rotary_of(choose({"head_dim": 64}))
    Rotary(head_dim=64)
    """
    model = config.model
    if "not_one" in model:
        raise ValueError(f"{config.model_type!r} is not one rotation: {model['not_one']}")
    check_top(config, complain)
    if not config.rotates:
        return None
    head_dim = config.head_dim
    check_head_dim(head_dim)
    rope_type, schedule = _rope_type(config)
    params = _parameters(rope_type, schedule, config, complain)
    if schedule == "axial":
        count = model["num_axes"]
        rotary_dim = 2 * count * (head_dim // count // 2)
    elif schedule == "proportional":
        rotary_dim = head_dim
    else:
        if config.partial_rotary_factor != 1 and not config.reads_partial_rotary_factor:
            complain(
                f"partial_rotary_factor is {config.partial_rotary_factor}, but the code of "
                f"{config.model_type!r} rotates the whole head and ignores it; remove the key"
            )
        rotary_dim = config.rotary_dim
    layout = layout_of_weights(config.data, model)
    is_own = layout == model.get("layout", "half")
    return Rotary(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        start=head_dim - rotary_dim if model.get("slice") == "trailing" else 0,
        base=config.base,
        layout=layout,
        out_layout=model.get("out_layout", layout) if is_own else layout,
        schedule=schedule,
        params=params,
        axes=axes_of(config, rotary_dim // 2),
        sign=model.get("sign", 1),
    )


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def check_top(config: Config, complain: Complain) -> None:
    """Complain about top-level keys that look like RoPE and that are misspelled or not read.

    >>> check_top(choose({"model_type": "llama", "rope_thata": 1e4}), print)
    config key 'rope_thata' is not known; did you mean 'rope_theta'?
    """
    data, model, kind = config.data, config.model, f"model_type {config.model_type!r}"
    base = config.unread_base
    if base is not None and base != config.base:
        where, hint = f"this model of {kind}", ""
        if config.layer_type:
            where = f"layers of {config.layer_type!r} of {kind}"
            hint = "; a layer type takes it from its rope_parameters"
        complain(
            f"rope_theta {base!r} is not read for {where}, whose base is {config.base:g}{hint}"
        )
    others = [each for each in data.get("layer_rope_theta") or () if each and each != config.base]
    if others and config.is_layer_rotated and "one_base" in model:
        complain(
            f"layer_rope_theta has {others[0]!r}, and the code of {config.model_type!r} reads only "
            f"which of its entries are 0: the base of all others is {config.base:g}, rope_theta"
        )
    inner = data.get("attn_config")  # of DBRX
    inside = inner.get("rope_theta") if isinstance(inner, Mapping) else None
    if inside is not None and inside != config.base:
        complain(
            f"rope_theta {inside!r} in attn_config is not read by transformers, whose base is "
            f"{config.base:g}; write rope_theta beside attn_config"
        )
    names = model.get("names", {})
    our_names = {theirs: ours for ours, theirs in names.items()}
    for key in config.unread:
        name, share = our_names.get(key, key), config.partial_rotary_factor
        used = {"rope_theta": base or config.base, "partial_rotary_factor": share}.get(name)
        entry = rope_parameters(data).get(config.layer_type or "")  # its own value is the one read
        is_own = isinstance(entry, Mapping) and entry.get(name) is not None
        if used and not is_own and data.get(key) is not None and data[key] != used:
            complain(
                f"{key} {data[key]!r} is not read for {kind}, which has "
                f"{used:g}; write it under rope_parameters, as {name}"
            )
    layer_names = [name for each in model.get("layer_names", {}).values() for name in each.values()]
    read = {*_TOP_KEYS, *names.values(), *layer_names, *model.get("other", ())}
    read |= {model.get("layout_key", ""), *model.get("switch", {})}
    read |= set() if config.model_type else {"rope_dim"}  # vLLM's name of the width
    harmless = {**HARMLESS, "rope_interleave": model.get("layout") == "interleaved"}
    for key, value in data.items():
        is_harmless = key in harmless and harmless[key] == value
        if re.search("rope|rotary", str(key)) and key not in read and not is_harmless:
            complain(f"config key {key!r} is not known{nearest(key, read)}")


def _rope_type(config: Config) -> tuple[str, str]:
    """Return the rope type of the file, one of `TYPES` or `ALIASES`, and its schedule."""
    name, model, rope = config.rope_type, config.model, config.rope
    new, old = rope.get("rope_type"), rope.get("type")
    if new is not None and old is not None and new != old and ALIASES.get(str(old), old) != new:
        raise ValueError(f"rope_type {new!r} and type {old!r} disagree; keep one")
    names = (*TYPES, *ALIASES)
    if name not in names:
        raise ValueError(
            f"rope_type {name!r} is not known{nearest(name, names)}; known: {', '.join(TYPES)}"
        )
    name = model.get("read_as", {}).get(name, name)
    check_read(model, name)
    if "num_axes" in model and model["axes"] != "turns of one ladder" and name == "default":
        return "axial", "axial"
    schedule = ALIASES.get(name, name)
    if schedule == "dynamic" and rope.get("alpha") and model.get("alpha"):
        schedule = "ntk"  # Hunyuan: a fixed base, whatever the length
    return name, schedule


def check_read(model: Model, rope_type: str) -> None:
    """Refuse a rope type that the code of the model does not read.

    >>> check_read({"only": ["default"]}, "yarn")
    Traceback (most recent call last):
    ValueError: this model reads only rope_type default, got 'yarn'
    """
    if rope_type not in model.get("only", (rope_type,)):
        raise ValueError(
            f"this model reads only rope_type {', '.join(model['only'])}, got {rope_type!r}"
        )
    if rope_type == "axial" and "num_axes" not in model:
        raise ValueError("this model rotates by one position, and rope_type 'axial' by several")


def needs_head_dim(config: Config, rope_type: str) -> bool:
    """True if transformers cannot build this type unless the file has head_dim, and it has none.

    >>> needs_head_dim(choose({"model_type": "mixtral"}), "yarn")
    True
    """
    is_null = "null_head_dim" in config.model and config.data.get("head_dim") is None
    return is_null and rope_type in _NEED_HEAD_DIM


def _parameters(
    rope_type: str, schedule: str, config: Config, complain: Complain
) -> dict[str, JSON]:
    """Return the schedule's parameters; null counts as missing, except for truncate."""
    _check_trained(config, schedule, complain)
    rope = _known_keys(config.rope, schedule, rope_type, config.model, complain)
    if schedule == "axial":
        axes = config.model["axes"]
        ladder = "turns" if axes.startswith("turns") else config.model.get("ladder", "blocks")
        return {"num_axes": config.model["num_axes"], "ladder": ladder}
    params = {key: value for key, value in rope.items() if key in parameters(schedule)}
    params |= _translated(rope_type, schedule, rope)
    if schedule == "proportional":
        width = config.rotary_dim if config.reads_rotary_dim else None
        share = width / config.head_dim if width else config.partial_rotary_factor
        params["partial_rotary_factor"] = share
    written = params.get("truncate", True)  # transformers takes null for false
    if schedule == "yarn" and bool(written) != config.truncate:
        complain(
            f"truncate {written!r} of {config.layer_type!r} is not read: where layer types "
            "differ, transformers reads it beside their entries in rope_parameters; write it there "
            "as well, or remove it"
        )
        params["truncate"] = config.truncate
    elif written is None:
        params["truncate"] = False
    params = {key: value for key, value in params.items() if value is not None}
    return _with_lengths(schedule, params, config)


def _known_keys(
    rope: Mapping[str, JSON], schedule: str, rope_type: str, model: Model, complain: Complain
) -> Rope:
    """Return the rope parameters that are known; complain about the others."""
    if rope.get("use_fope"):
        raise ValueError("use_fope is not a rotary embedding: FoPE mixes frequencies by matrices")
    keys = {*_COMMON_KEYS, *parameters(schedule), *_DIALECT_KEYS.get(rope_type, ())}
    keys -= {"num_axes", "ladder", "widths"}
    if not model.get("mscales"):  # a model whose code ignores them
        keys -= {"short_mscale", "long_mscale"}
    if rope_type == "dynamic" and model.get("alpha"):  # Hunyuan's files have unread keys of YaRN
        keys |= {"alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    if rope.get("extrapolation_factor") == 1:
        keys.add("extrapolation_factor")
    if rope_type == "yarn" and rope.get("finetuned") is True:  # the paper's own models: not dynamic
        keys.add("finetuned")
    if rope.get("interleaved") == rope.get("mrope_interleaved"):  # Qwen3-Omni says it twice
        keys.add("interleaved")
    for key in rope:
        if key not in keys:
            complain(
                f"rope_type {rope_type!r} has no key {key!r}{nearest(key, keys)}; "
                f"known: {', '.join(sorted(keys))}"
            )
    return {key: value for key, value in rope.items() if key in keys}


# rope type -> keys it has beside those of its schedule
_DIALECT_KEYS = {
    "dynamic": ("max_trained_positions",),
    "xdrope": ("alpha", "factor", "max_trained_positions"),
    "ntk": ("mixed_b",),
    "yarn": ("apply_yarn_scaling",),
    "deepseek_yarn": ("attn_factor",),
}


def _translated(rope_type: str, schedule: str, rope: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return parameters that a dialect has under another name, or as another formula."""
    if schedule == "ntk" and rope.get("alpha"):
        return {"factor": rope["alpha"]}
    if schedule == "ntk_mixed":  # without mixed_b the programs divide every pair as with 1
        b = rope.get("mixed_b")
        return {"b": 1.0 if b is None else b}
    if rope.get("apply_yarn_scaling") is False:  # Mistral's own files
        return {"attention_factor": 1.0}
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or factor <= 1:
        return {}
    if rope_type == "telechat3-yarn":
        return {"attention_factor": yarn_amplitude(factor, 0.7)}  # vLLM 0.33, config.py
    if rope_type == "deepseek_yarn":
        attention_factor = yarn_amplitude(
            factor, rope.get("mscale", 1.0), rope.get("mscale_all_dim", 0.0)
        )
        return {"attention_factor": attention_factor * rope.get("attn_factor", 1.0)}
    return {}


def _check_trained(config: Config, schedule: str, complain: Complain) -> None:
    """Complain about the trained length that is not read, if a config has two different ones.

    transformers reads the one beside flat rope parameters, and the one inside nested ones.
    """
    name = "original_max_position_embeddings"
    outside, inside = config.data.get(name), config.rope.get(name)
    if name in config.model or outside is None or schedule not in ("yarn", "longrope", "llama3"):
        return  # Phi-3's class has its own length, beside the rope parameters
    if config.is_by_layer_type:
        if outside != (config.context if inside is None else inside):
            complain(
                f"{name} {outside} beside rope parameters that differ by layer type is not read; "
                "write it into those of each layer type"
            )
    elif inside is not None and inside != outside:
        complain(
            f"{name} {inside} among the rope parameters is not read: transformers takes the "
            f"{outside} beside them; keep one"
        )


def layout_of_weights(data: Mapping[str, JSON], model: Model) -> str:
    """Return the layout of the weights: the model's, unless a key of the config states the other.

    >>> layout_of_weights({"rope_traditional": True}, {"layout": "half"})
    'interleaved'
    """
    names = (model.get("layout_key", LAYOUT_MARK), LAYOUT_MARK)
    keys = {key: data[key] for key in names if key in data}
    for key, value in keys.items():
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, got {value!r}")
    if len(set(keys.values())) > 1:
        raise ValueError(f"{keys} say different layouts of the weights: keep one of the keys")
    if not keys:
        return str(model.get("layout", "half"))
    return "interleaved" if any(keys.values()) else "half"


def _with_lengths(schedule: str, params: dict[str, JSON], config: Config) -> dict[str, JSON]:
    """Add the trained length, and a missing factor, from keys beside the rope parameters."""
    name = "original_max_position_embeddings"
    context, trained = config.context, config.trained
    if schedule == "dynamic":
        context = config.rope.get("max_trained_positions", context)  # vLLM's name, which wins there
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
