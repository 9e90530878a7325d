"""Reads the config.json of a diffusers model: images and video, axes of unequal widths.

Each model class has a rule here: where its config says how wide the axes are, the values where the
file has none, and the layout that its code rotates.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeGuard

from ..positions import sections
from ..schedules import default
from ..spec import Rotary, check_head_dim
from ..strict_json import JSON
from ..words import nearest
from .files import load
from .values import whole_number


class Rule(NamedTuple):
    """How one class of diffusers rotates.

    widths   key of the channels of each axis and their default; or a function of head_dim
    head     key of head_dim and its default; None if head_dim is the sum of the widths
    base     the base, or its key and default
    layout   the layout
    scale    key of a factor for each axis, which makes its base larger as NTK does
    """

    widths: tuple[str, tuple[int, ...]] | Callable[[int], tuple[int, ...]]
    head: tuple[str, int] | None = ("attention_head_dim", 128)
    base: float | tuple[str, float] = 10_000.0
    layout: str = "interleaved"
    scale: tuple[str, tuple[float, ...]] | None = None


def _thirds(head_dim: int) -> tuple[int, ...]:
    """Wan: rows and columns get a third each, rounded down to an even number, frames the rest."""
    third = 2 * (head_dim // 6)
    return head_dim - 2 * third, third, third


def _quarter(head_dim: int) -> tuple[int, ...]:
    """CogVideoX: frames get a quarter, rows and columns three eighths each."""
    return head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3


def _halves(head_dim: int) -> tuple[int, ...]:
    return head_dim // 2, head_dim // 2


_FLUX = Rule(("axes_dims_rope", (16, 56, 56)))
_HUNYUAN = Rule(("rope_axes_dim", (16, 56, 56)), base=("rope_theta", 256.0))
_WAN = Rule(_thirds)
_Z_IMAGE = Rule(("axes_dims", (32, 48, 48)), None, ("rope_theta", 256.0))
_KANDINSKY = Rule(("axes_dims", (16, 24, 24)), None)
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("FluxTransformer2DModel", "ChromaTransformer2DModel", "LongCatImageTransformer2DModel",
         "OvisImageTransformer2DModel", "QwenImageTransformer2DModel",
         "QwenImage21Transformer2DModel", "NucleusMoEImageTransformer2DModel",
         "FluxControlNetModel", "QwenImageControlNetModel"), _FLUX),
    **dict.fromkeys(
        ("BriaTransformer2DModel", "BriaFiboTransformer2DModel"),
        _FLUX._replace(base=("rope_theta", 10_000.0))),
    "Flux2Transformer2DModel": Rule(
        ("axes_dims_rope", (32, 32, 32, 32)), base=("rope_theta", 2000.0)),
    "Flux3Transformer2DModel": Rule(
        ("axes_dims_rope", (32, 32, 32, 32)), base=("rope_theta", 10_000.0)),
    "Krea2Transformer2DModel": Rule(("axes_dims_rope", (32, 48, 48)), base=("rope_theta", 1000.0)),
    **dict.fromkeys(
        ("HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel",
         "HunyuanVideoFramepackTransformer3DModel", "MotifVideoTransformer3DModel"), _HUNYUAN),
    "HunyuanImageTransformer2DModel": _HUNYUAN._replace(widths=("rope_axes_dim", (64, 64))),
    **dict.fromkeys(
        ("WanTransformer3DModel", "WanAnimateTransformer3DModel", "WanVACETransformer3DModel",
         "SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel",
         "AnyFlowTransformer3DModel", "AnyFlowFARTransformer3DModel"), _WAN),
    "SanaVideoTransformer3DModel": Rule(_thirds, ("attention_head_dim", 112)),
    "HeliosTransformer3DModel": Rule(("rope_dim", (44, 42, 42)), base=("rope_theta", 10_000.0)),
    **dict.fromkeys(("ZImageTransformer2DModel", "BriaFibo2Transformer2DModel"), _Z_IMAGE),
    "Kandinsky5Transformer3DModel": _KANDINSKY,
    "Kandinsky6Transformer3DModel": _KANDINSKY._replace(widths=("axes_dims", (32, 48, 48))),
    "Kandinsky6SRTransformer3DModel": _KANDINSKY,
    "Lumina2Transformer2DModel": Rule(("axes_dim_rope", (32, 32, 32)), None),
    **dict.fromkeys(
        ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel",
         "EasyAnimateTransformer3DModel"), Rule(_quarter, ("attention_head_dim", 64))),
    "CogView4Transformer2DModel": Rule(_halves, ("attention_head_dim", 40), layout="half"),
    "GlmImageTransformer2DModel": Rule(_halves, ("attention_head_dim", 40), layout="half"),
    "CosmosTransformer3DModel": Rule(
        _thirds, layout="half", scale=("rope_scale", (2.0, 1.0, 1.0))),
}  # fmt: skip
_LARGEST = 1e9  # factor of an axis: with more, its pairs would not turn in 64 bits
_SWITCHED = ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel")
# classes that no single `Rotary` describes, and why
_ALL_HEADS = "its frequencies run over all heads, so that each head has different ones"
NOT_ONE = {
    "LTXVideoTransformer3DModel": _ALL_HEADS,
    "LTX2VideoTransformer3DModel": _ALL_HEADS,
    "SanaWMLTX2RefinerTransformer3DModel": _ALL_HEADS,
    "MochiTransformer3DModel": "it learns frequencies for each head, which mix all axes",
}


def is_of_diffusers(config: object) -> bool:
    """Return whether a config (path, folder, dict) or a loaded model is one of diffusers.

    >>> is_of_diffusers({"_class_name": "FluxTransformer2DModel"}), is_of_diffusers({})
    (True, False)
    """
    if hasattr(config, "named_modules"):
        return type(config).__name__ in {*RULES, *NOT_ONE}
    data = load(config)
    return "_class_name" in data and "model_type" not in data


def from_diffusers_config(config: object) -> Rotary | None:
    """Return the RoPE of a diffusers model, from the config.json in its folder "transformer".

    config  path of that file or folder, a dict, or a loaded model
    The position axes are those of the model, most often (frame, row, column), which
    `rotary.positions.grid` builds; Flux has an image index before them, which is 0. Returns None
    for a CogVideoX or ConsisID model without rotation.
    Raises ValueError for a class that is not known, for one that is not a single rotation (the
    error says why), and for widths that do not add up to head_dim; FileNotFoundError for a path
    that is not there.
    Source: diffusers 0.42.1, whose classes were run: tests/peers/diffusers.py.

    >>> from_diffusers_config({"_class_name": "WanTransformer3DModel"}).params["widths"]
    (44, 42, 42)
    """
    if isinstance(inside := getattr(config, "config", None), Mapping):
        config = {**inside, "_class_name": type(config).__name__}
    data = load(config)
    name = data.get("_class_name")
    if isinstance(name, str) and name in NOT_ONE:
        raise ValueError(f"{name} is not one rotation: {NOT_ONE[name]}")
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(
            f"_class_name {name!r} is not known{nearest(name, RULES)}; give the config.json of the "
            "model in the folder transformer, or run the model: rotary.from_model(model, example=)"
        )
    if name in _SWITCHED and not _flag(data, "use_rotary_positional_embeddings"):
        return None
    rule = RULES[name]
    head_dim = None if rule.head is None else whole_number(rule.head[0], _get(data, rule.head), 1)
    if head_dim is not None:
        check_head_dim(head_dim)
    widths = _widths(data, rule, head_dim)
    if head_dim is not None and sum(widths) != head_dim:
        raise ValueError(
            f"{name}: the widths of its axes {widths} sum to {sum(widths)}, its heads have "
            f"{head_dim} channels"
        )
    least = 2 if rule.scale is None else 4  # NTK divides by the width - 2
    if any(width < least or width % 2 for width in widths):
        raise ValueError(
            f"{name}: the widths of its axes must be even and >= {least}, but heads of "
            f"{sum(widths)} channels give {widths}"
        )
    base = rule.base if isinstance(rule.base, int | float) else _number(data, *rule.base)
    schedule, params = "axial", dict[str, tuple[float, ...]](widths=widths)
    if rule.scale is not None:
        schedule, params = "custom", {"inv_freq": _ntk_scaled(widths, base, rule.scale, data)}
        base = 10_000.0
    return Rotary(
        head_dim=sum(widths),
        base=base,
        layout=rule.layout,
        schedule=schedule,
        params=params,
        axes=sections(*(width // 2 for width in widths)),
    )


def _ntk_scaled(
    widths: tuple[int, ...],
    base: float,
    scale: tuple[str, tuple[float, ...]],
    data: Mapping[str, JSON],
) -> tuple[float, ...]:
    """Return the frequencies of all axes, the base of each scaled by its factor as in NTK."""
    factors = _get(data, scale)
    if (
        not isinstance(factors, list | tuple)
        or len(factors) != len(widths)
        or not all(_is_number(factor) and 0 < factor <= _LARGEST for factor in factors)
    ):
        raise ValueError(
            f"{scale[0]} must hold {len(widths)} numbers > 0 and <= {_LARGEST:.0e}, got {factors!r}"
        )
    return tuple(
        float(frequency)
        for width, factor in zip(widths, factors, strict=True)
        for frequency in default(width, base * factor ** (width / (width - 2)))[0]
    )


def _get(data: Mapping[str, JSON], key: tuple[str, object]) -> JSON:
    value = data.get(key[0])
    return key[1] if value is None else value


def _number(data: Mapping[str, JSON], name: str, fallback: float) -> float:
    value = _get(data, (name, fallback))
    if not _is_number(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return value


def _is_number(value: JSON) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flag(data: Mapping[str, JSON], name: str) -> bool:
    value = _get(data, (name, False))
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def _widths(data: Mapping[str, JSON], rule: Rule, head_dim: int | None) -> tuple[int, ...]:
    if not isinstance(rule.widths, tuple):
        return rule.widths(head_dim or 0)
    widths = _get(data, rule.widths)
    name = rule.widths[0]
    if not isinstance(widths, list | tuple) or len(widths) < 2:
        raise ValueError(f"{name} must list the channels of each axis, got {widths!r}")
    return tuple(whole_number(name, width, 2) for width in widths)
