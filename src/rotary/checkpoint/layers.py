"""Says which layers of a model rotate, and by which spec, from its config."""

from collections.abc import Mapping

from ..configs import (
    ArgumentNeededError,
    Config,
    UnknownModelError,
    choose,
    layer_types,
    load,
)
from ..configs.hf import rotary_of
from ..spec import Rotary
from ..strict_json import JSON
from .names import Name

# layer type -> (RoPE or None, config)
Layers = Mapping[str | None, tuple[Rotary | None, Config]]


def layers_of(config: object) -> Layers:
    """Return layer type -> (RoPE or None, config). ValueError if nothing rotates."""
    data = load(config)
    try:
        kinds: tuple[str | None, ...] = layer_types(data) or (None,)
        chosen = {kind: choose(data, kind) for kind in kinds}
        layers = {kind: (rotary_of(entry), entry) for kind, entry in chosen.items()}
    except UnknownModelError as error:
        raise ValueError(
            f"{error.reason}; if the code of this model is like that of a known one, give --config "
            "(config=) a copy of its config.json with that model_type; the copy is written into "
            "the new folder"
        ) from error
    except ArgumentNeededError as error:
        raise ValueError(
            f"cannot be converted: {error.reason}; only the text part of a model is converted"
        ) from error
    first = layers[kinds[0]][1]
    name = first.data.get("model_type", "")
    if "num_axes" in first.model:
        raise ValueError(f"{name!r} is a vision tower; only the text part of a model is converted")
    if first.data.get("rotary_value"):
        raise ValueError(f"{name!r} cannot be converted: rotary_value says values rotate as well")
    if not any(spec for spec, _ in layers.values()):
        raise ValueError(f"{name!r} does not rotate: its config turns RoPE off")
    return layers


def layer_type(name: Name, layers: Layers, first: Config) -> str | None:
    """Return the layer type of a tensor, as a key of `layers`; ValueError without one."""
    slices = {spec and (spec.head_dim, spec.rotary_dim, spec.start) for spec, _ in layers.values()}
    if len(slices) == 1 and not first.data.get("attention_k_eq_v"):
        return next(iter(layers))
    types = first.data.get("layer_types")
    if bases := first.data.get("layer_rope_theta"):
        types = [f"rope_theta={base or 0:g}" for base in bases]
    # modules of multi-token prediction number their own layers
    is_extra = ".mtp" in f".{name.tensor}"
    if types is None or name.layer >= len(types) or is_extra:
        raise ValueError(
            f"tensor {name.tensor!r}: layers differ in what they rotate, and layer_types of the "
            f"config does not name the type of layer {name.layer}"
        )
    if types[name.layer] not in layers:
        raise ValueError(
            f"tensor {name.tensor!r}: layer_types says {types[name.layer]!r}, none of "
            f"{', '.join(map(str, layers))}"
        )
    return str(types[name.layer])


def why_not(name: Name, spec: Rotary | None, projections: Mapping[str, JSON], first: Config) -> str:
    """Return why a projection with a known name has no rotated heads; "" if it has."""
    if spec is None or not first.rotates_layer(name.layer):
        return "of a layer that does not rotate"
    if first.data.get("kv_lora_rank") is None:
        return ""
    if name.kind.endswith("norm"):
        return "a latent has no channels of heads"
    module = first.model.get("weights", {}).get("latent_module")
    if module and name.kind in ("query", "key"):
        siblings = name.group.removesuffix("q_proj").removesuffix("k_proj")
        if f"{siblings}{module}" not in projections:
            return "linear attention does not rotate"
    return ""


def may_be_channels(count: int, layers: Layers) -> bool:
    """Whether so many numbers may be one for each channel of one head or of several."""
    return any([spec and count % spec.head_dim == 0 for spec, _ in layers.values()])
