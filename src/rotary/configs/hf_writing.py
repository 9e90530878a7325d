"""Writes a RoPE as a config.json, or into one whose other keys stay unchanged."""

import copy
import dataclasses
import math
from collections.abc import Mapping
from itertools import islice

from ..angles import inv_freq
from ..schedules import depends_on_length, grown_base
from ..spec import Rotary, check_spec
from ..strict_json import JSON
from ..words import brief
from .entries import choose, layer_types, part_inside, part_key
from .files import load
from .hf import ALIASES, TYPES, check_read, from_hf_config, needs_head_dim
from .layers import entries_of_class, rope_parameters
from .record import Config
from .values import whole_number

# keys of rope_parameters that no schedule has: two assign axes to pairs, and the attention of
# Ministral 3 and Mistral 4 needs the last
_OF_MODEL = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta")


def to_hf_config(
    spec: Rotary, *, max_position_embeddings: int | None = None, version: int = 5
) -> dict[str, JSON]:
    """Return the keys of a config.json that `from_hf_config` reads as `spec`.

    version 5 writes `rope_parameters`, version 4 `rope_theta` and `rope_scaling`.
    `max_position_embeddings` is written if given; `dynamic` sets it to its trained length.
    In transformers only PhiMoE reads the short_mscale and long_mscale of longrope.
    Raises ValueError for what such a config cannot express: another layout, several axes, a slice
    that does not start the head, a schedule transformers does not have.

    >>> to_hf_config(Rotary(head_dim=64))
    {'head_dim': 64, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0}}
    """
    check_spec(spec, "spec")
    if max_position_embeddings is not None:
        whole_number("max_position_embeddings", max_position_embeddings, 1)
    if version not in (4, 5):
        raise ValueError(f"version must be 4 or 5, got {version!r}")
    if spec.schedule not in TYPES:
        raise ValueError(
            f"transformers has no rope_type {spec.schedule!r}; it has {', '.join(TYPES)}"
        )
    plain = Rotary(head_dim=spec.head_dim, rotary_dim=spec.rotary_dim)
    for field in ("start", "layout", "out_layout", "axes", "sign"):
        if getattr(spec, field) != getattr(plain, field):
            value = brief(getattr(spec, field))
            raise ValueError(f"a plain config cannot say {field}={value}: it belongs to a model")
    if spec.schedule == "proportional" and spec.rotary_dim != spec.head_dim:
        raise ValueError(
            f"a config cannot have rotary_dim={spec.rotary_dim} and a partial_rotary_factor of "
            "proportional: both are written as partial_rotary_factor"
        )
    params = spec.to_dict()["params"]
    written: dict[str, JSON] = {"head_dim": spec.head_dim}
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
        share = spec.rotary_dim / spec.head_dim
        is_exact = int(spec.head_dim * share) == spec.rotary_dim  # a reader truncates
        params["partial_rotary_factor"] = share if is_exact else math.nextafter(share, 1)
    if version == 5:
        rope = {"rope_type": spec.schedule, "rope_theta": spec.base, **params}
        return {**written, "rope_parameters": rope}
    if "partial_rotary_factor" in params:
        written["partial_rotary_factor"] = params.pop("partial_rotary_factor")
    written["rope_theta"] = spec.base
    if spec.schedule != "default":
        written["rope_scaling"] = {"rope_type": spec.schedule, **params}
    return written


def rope_keys(spec: Rotary, context: int) -> dict[str, JSON]:
    """Return `max_position_embeddings` and `rope_parameters` of `spec`, for a config of its model.

    Layout, slice, axes and direction belong to the code of the model and are not written. An "ntk"
    spec, which transformers has for Hunyuan alone, is written as the base that it grows to.

    >>> rope_keys(Rotary(head_dim=64, layout="interleaved"), 4096)["max_position_embeddings"]
    4096
    """
    spec = dataclasses.replace(spec, layout="half", out_layout="half", start=0, axes=(), sign=1)
    spec = with_own_base(spec)
    own = None if spec.schedule == "dynamic" else context
    return to_hf_config(spec, max_position_embeddings=own)


def model_keys(config: Config, spec: Rotary, context: int) -> dict[str, JSON]:
    """Return `rope_keys` for the config of one model, with what else it reads in the same object.

    Those are the keys that assign axes to pairs, and Mistral's llama_4_scaling_beta.
    head_dim is included only if transformers fails without it.
    Raises ValueError for a rope type that the model does not read; see `as_model_reads`.

    >>> model_keys(choose({"model_type": "llama"}), Rotary(head_dim=128), 4096)
    {'max_position_embeddings': 4096, 'rope_parameters': {'rope_type': 'default', \
'rope_theta': 10000.0}}
    """
    check_read(config.model, spec.schedule)
    keys = rope_keys(spec, context)
    del keys["head_dim"]
    own = {key: config.rope[key] for key in _OF_MODEL if key in config.rope}
    keys["rope_parameters"] = {**own, **keys["rope_parameters"]}
    if needs_head_dim(config, spec.schedule):
        keys["head_dim"] = config.head_dim
    return keys


def with_own_base(spec: Rotary) -> Rotary:
    """Return an "ntk" spec as a "default" one of the same frequencies; another one as it is.

    >>> with_own_base(Rotary(head_dim=4, schedule="ntk", params={"factor": 2.0}))
    Rotary(head_dim=4, base=40000.0)
    """
    if spec.schedule != "ntk":
        return spec
    base = grown_base(spec.rotary_dim, spec.base, spec.params["factor"])
    return dataclasses.replace(spec, schedule="default", base=base, params={})


def as_model_reads(config: Config, spec: Rotary, context: int) -> Rotary:
    """Return `spec`, or `as_longrope(spec)` if the model reads longrope and not its schedule.

    Phi-3 is such a model. A spec of "ntk", as Hunyuan has, gets the base that it grows to. For
    Phi-3.5-MoE the attention factor goes into short_mscale and long_mscale.

    >>> as_model_reads(choose({"model_type": "llama"}), Rotary(head_dim=64), 4096)
    Rotary(head_dim=64)
    """
    spec = with_own_base(spec)
    only = config.model.get("only", (spec.schedule,))
    if spec.schedule not in ("default", *only) and "longrope" in only:
        spec = as_longrope(spec, config.trained or context)
    is_phimoe = config.model.get("mscales") and config.model_type
    if is_phimoe and spec.schedule == "longrope" and "long_mscale" not in spec.params:
        attention_factor = inv_freq(spec)[1]
        params = {key: value for key, value in spec.params.items()
                  if key not in ("factor", "attention_factor")}  # fmt: skip
        params |= dict.fromkeys(("short_mscale", "long_mscale"), attention_factor)
        spec = dataclasses.replace(spec, params=params)
    return spec


def as_longrope(spec: Rotary, context: int) -> Rotary:
    """Return a spec of schedule "longrope" with the frequencies of `spec`, for use in configs.

    spec     for example of schedule "custom", which no program reads from a config
    context  the max_position_embeddings of the config, in tokens
    Both lists of factors are base^(-2i / rotary_dim) / inv_freq, so nothing depends on the length;
    the attention factor is that of `spec`. Read back, each frequency is right to a relative 1e-15.
    Raises ValueError for frequencies that are not > 0, which no factor gives, for a schedule that
    depends on the length, and for several axes.

    >>> spec = Rotary(head_dim=4, schedule="custom", params={"inv_freq": [1.0, 0.02]})
    >>> as_longrope(spec, 4096).params["long_factor"]
    (1.0, 0.5)
    """
    context = whole_number("context", context, 2)
    if depends_on_length(spec.schedule) or spec.num_axes > 1:
        raise ValueError(
            f"one list of factors cannot say a RoPE of schedule {spec.schedule!r} and "
            f"{spec.num_axes} axes"
        )
    frequencies, attention_factor = inv_freq(spec)
    if not (frequencies > 0).all():
        raise ValueError(f"a factor gives frequencies > 0 only, got {frequencies.min():g}")
    plain = dataclasses.replace(spec, schedule="default", params={})
    factors = (inv_freq(plain)[0] / frequencies).tolist()
    params = {
        "short_factor": factors, "long_factor": factors,
        "original_max_position_embeddings": context,
        **({"factor": 1.0} if attention_factor == 1 else {"attention_factor": attention_factor}),
    }  # fmt: skip
    return dataclasses.replace(spec, schedule="longrope", params=params)


def replace_rope(
    config: object,
    spec: Rotary,
    context: int,
    layer_type: str | None = None,
    *,
    part: str | None = None,
) -> dict[str, JSON]:
    """Return the keys of a config.json with another RoPE in it; other keys stay as they are.

    config   path of a config.json or its folder, a dict, or a PretrainedConfig; not changed
    spec     what `from_hf_config` is to return for the result; a model that reads longrope and not
             this schedule (Phi-3) gets the same frequencies as longrope
    context  its max_position_embeddings, in tokens
    layer_type, part  which RoPE of the config, as in `from_hf_config`
    The keys are `rope_parameters` if the config has them, else `rope_theta` and `rope_scaling`,
    under the names of its model; `type` stays where rope_scaling has it, for older programs.
    The result is read back and compared before it is returned.
    Raises ValueError if a config of this model cannot express `spec` (such as a base that is fixed
    in its code), and if layers of another type would change with it.

    >>> llama = {"model_type": "llama", "head_dim": 64, "vocab_size": 32000}
    >>> replace_rope(llama, Rotary(head_dim=64, base=1e6), 8192)["vocab_size"]
    32000
    """
    document = copy.deepcopy(dict(load(config)))
    entry = choose(document, layer_type, part)
    inner = _part_of(document, part)
    names = entry.model.get("names", {})
    spec = as_model_reads(entry, spec, context)
    keys = model_keys(entry, spec, context)
    rope = keys.pop("rope_parameters")
    inner |= {names.get(key, key): value for key, value in keys.items()}
    of_class = entries_of_class(inner, entry.model)
    beside = entry.model.get("layer_names", {}).get(layer_type, {})
    if layer_type in of_class and "rope_theta" not in beside and not rope_parameters(inner):
        inner["rope_parameters"] = dict(of_class)  # no key beside them is read
    if not isinstance(inner.get("rope_parameters"), dict):
        inner[names.get("rope_theta", "rope_theta")] = rope.pop("rope_theta")
        rope.pop("partial_rotary_factor", None)
        if rope != {"rope_type": "default"}:
            inner["rope_scaling"] = _as_spelled(
                rope, inner.get("rope_scaling") or {}, entry, context
            )
        elif "rope_scaling" in inner:
            inner["rope_scaling"] = None
    elif layer_type in inner["rope_parameters"]:
        inner["rope_parameters"][layer_type] = rope
    else:
        inner["rope_parameters"] = rope
    trained = "original_max_position_embeddings"
    if trained in rope and (trained in inner or trained in entry.model):  # Phi-3 reads that one
        inner[trained] = rope[trained]
    read_back = from_hf_config(document, layer_type, part=part)
    if read_back != spec:
        raise ValueError(
            f"a config of model_type {entry.model_type!r} cannot express this RoPE: it would be "
            f"read with {_differences(read_back, spec)}"
        )
    for other in layer_types(document, part=part):
        kept = from_hf_config(config, other, part=part)
        if other != layer_type and from_hf_config(document, other, part=part) != kept:
            raise ValueError(
                f"layers of {other!r} read the same keys of this config and would change with "
                f"those of {layer_type!r}; write rope_parameters nested by layer type instead"
            )
    return document


def _as_spelled(
    rope: dict[str, JSON], old: Mapping[str, JSON], config: Config, context: int
) -> dict[str, JSON]:
    """Return a `rope_scaling` whose type stands under the key that the old one has for it.

    A model with its trained length beside it (Phi-3) wants `type`, and in transformers 4 nothing
    else but the two lists: a length and a factor that are said beside them are left out.

    >>> _as_spelled({"rope_type": "yarn", "factor": 4.0}, {"type": "linear"}, choose({}), 4096)
    {'type': 'yarn', 'factor': 4.0}
    """
    trained = "original_max_position_embeddings"
    is_beside = trained in config.model
    names = [name for name in ("rope_type", "type") if name in old]
    names = names or ["type" if is_beside else "rope_type"]
    own, name = old.get("type"), rope["rope_type"]
    keeps_name = own in ("su", "mrope") and ALIASES[own] == name  # some programs know no other
    spelled = {each: own if each == "type" and keeps_name else name for each in names}
    said = {trained: rope.get(trained), "factor": context / rope.get(trained, context)}
    return spelled | {
        key: value for key, value in rope.items() if key != "rope_type"
        and not (is_beside and key not in old and said.get(key) == value)
    }  # fmt: skip


def _differences(one: Rotary | None, other: Rotary) -> str:
    """Return the fields of two specs that differ, in a few words."""
    if one is None:
        return "no rotation"
    had, wanted = ({**each.to_dict(), **each.to_dict()["params"]} for each in (one, other))
    names = [name for name in {**had, **wanted} if had.get(name) != wanted.get(name)]
    shown = (f"{name} {brief(had.get(name)):.40} instead of {brief(wanted.get(name)):.40}"
             for name in names if name != "params")  # fmt: skip
    return ", ".join(islice(shown, 3))


def _part_of(document: dict[str, JSON], part: str | None) -> dict[str, JSON]:
    """Return the object in a document that holds the keys of a part."""
    inner = document.get(part_key(document, part) or "")
    return _part_of(inner, part_inside(inner)) if isinstance(inner, dict) else document
