"""What may be wrong with the RoPE of a config or of a loaded model, for `rotary doctor`."""

import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .analysis.precision import longest_safe_position
from .angles import inv_freq
from .configs import Config, choose, from_hf_config, layer_types, parts
from .spec import Rotary

# an angle that is off by this much is seen in float32 attention
_TOLERANCE = 1e-2


class Remark(NamedTuple):
    """`where` in the config or the model, what was `found`, and `advice` if something is wrong."""

    where: str
    found: str
    advice: str = ""


def audit(subject: Any) -> list[Remark]:
    """Look for faults of RoPE in a config (path, folder, dict) or in a loaded torch model.

    Configs: keys that no code reads or that this model's code ignores, a context longer than what
    was trained times the factor, positions at which float32 angles are off by more than 1e-2 rad.
    Models: the same of `model.config`; buffers of frequencies that are in half precision, on the
    meta device, not finite, or not what the config says; projections whose rows look as if they
    were trained for the other layout (the two channels of a pair have rows of like norm).
    Raises ValueError for a config that cannot be read at all.

    >>> [each.where for each in audit({"model_type": "llama", "rope_thata": 1e4}) if each.advice]
    ['config']
    """
    if hasattr(subject, "named_modules"):
        remarks = list(_buffers(subject))
        config = getattr(subject, "config", None)
        return remarks if config is None else [*audit(config), *remarks, *_weights(subject, config)]
    remarks = []
    names = parts(subject) or (None,)
    for part in names:
        try:
            remarks += _config(subject, part)
        except ValueError as error:
            remarks.append(Remark(part or "config", "cannot be read", str(error)))
    return remarks


def _config(subject: Any, part: str | None) -> Iterator[Remark]:
    for kind in layer_types(subject, part=part) or (None,):
        where = " ".join(word for word in (part, kind) if word) or "config"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            spec = from_hf_config(subject, kind, part=part, strict=False)
        for each in caught:
            yield Remark(where, str(each.message), "nothing reads this key: mend or remove it")
        if spec is None:
            yield Remark(where, "no rotation")
            continue
        factor = inv_freq(spec)[1]
        share = f", {spec.rotary_dim} of {spec.head_dim} channels from {spec.start}"
        yield Remark(
            where,
            f"{spec.schedule}, base {spec.base:g}, {spec.layout}"
            f"{share if spec.rotary_dim != spec.head_dim else ''}, amplitude {factor:.6g}",
        )
        found = choose(subject, kind, part)
        yield from _lengths(where, spec, found.get("max_position_embeddings"))
        yield from _layers_without(where, found)


def _layers_without(where: str, found: Config) -> Iterator[Remark]:
    """Llama 4 and SmolLM 3 leave out the rotation of the layers marked 0."""
    marks = found.data.get("no_rope_layers")
    if marks and not all(marks):
        count = len(marks) - sum(map(bool, marks))
        yield Remark(where, f"{count} of {len(marks)} layers take no rotation: no_rope_layers")


def _lengths(where: str, spec: Rotary, context: int | None) -> Iterator[Remark]:
    trained = spec.params.get("original_max_position_embeddings")
    factor = spec.params.get("factor", 1.0)
    is_stretch = spec.schedule in ("linear", "yarn", "longrope")  # llama3 trained on more
    if context and trained and is_stretch and context > 1.001 * trained * factor:
        yield Remark(
            where,
            f"max_position_embeddings {context:,} is more than {trained:,} trained times "
            f"{factor:g}",
            f"positions beyond {trained * factor:,.0f} were never seen: raise factor or serve less",
        )
    safe = longest_safe_position(spec, _TOLERANCE)
    if context and context > safe + 1:
        yield Remark(
            where,
            f"float32 angles may be off by more than {_TOLERANCE:g} rad beyond position {safe:,}",
            "compute angles exactly: rotary.apply, or rotary.patch(model, exact=True)",
        )


def _buffers(model: Any) -> Iterator[Remark]:
    for where, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            place = f"{where}.{name}" if where else name
            if buffer.device.type == "meta":
                yield Remark(place, "on the meta device", "it has no values: load or build it anew")
                continue
            values = buffer.detach().double().cpu().numpy()
            dtype = str(buffer.dtype).removeprefix("torch.")
            if not np.isfinite(values).all() or not (np.abs(values) <= 2 * math.pi).all():
                yield Remark(
                    place,
                    "values that are no frequencies",
                    "uninitialised memory, as after to_empty(): build the module anew",
                )
                continue
            if dtype in ("bfloat16", "float16"):
                yield Remark(
                    place,
                    f"in {dtype}",
                    "angles are wrong after some hundred tokens: cast the model without it",
                )
                continue
            yield from _against(place, name, module, values)


def _against(place: str, name: str, module: Any, values: np.ndarray[Any, Any]) -> Iterator[Remark]:
    """The frequencies of a module against those its config says."""
    config = getattr(module, "config", None)
    if config is None:
        yield Remark(place, f"{len(values)} frequencies, float32 or better")
        return
    kind = name.removesuffix("inv_freq").rstrip("_") or None
    try:
        spec = from_hf_config(config, kind, strict=False)
    except ValueError as error:
        yield Remark(place, f"{len(values)} frequencies", f"not compared: {error}")
        return
    wanted = None if spec is None else inv_freq(spec)[0]
    if wanted is None or wanted.shape != values.shape:
        count = "no" if wanted is None else len(wanted)
        yield Remark(
            place,
            f"{len(values)} frequencies, the config says {count}",
            "the module was built from another config",
        )
        return
    apart = float(np.max(np.abs(values - wanted) / np.maximum(np.abs(wanted), 1e-30)))
    if apart > 1e-4:
        yield Remark(
            place,
            f"frequencies differ from the config by {apart:.1e}",
            "loaded from a checkpoint, or changed since: build the module anew",
        )
        return
    yield Remark(place, f"{len(values)} frequencies, as the config says")


def _weights(model: Any, config: Any) -> Iterator[Remark]:
    """Whether the rows of W_k lie in the layout that the code reads, where that can be told."""
    try:
        kinds = layer_types(config) or (None,)
        spec = from_hf_config(config, kinds[0], strict=False)
    except ValueError:
        return
    if spec is None or spec.rotary_dim < max(spec.head_dim, 16) or spec.num_axes > 1:
        return
    for where, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not where.endswith("k_proj") or weight is None or weight.device.type == "meta":
            continue
        if weight.ndim != 2 or weight.shape[0] % spec.head_dim:
            continue
        rows = weight.detach().double().norm(dim=1).cpu().numpy().reshape(-1, spec.head_dim)
        looks = layout_of_rows(rows)
        if looks is not None and looks != spec.layout:
            yield Remark(
                f"{where}.weight",
                f"rows look {looks}, the code reads {spec.layout}",
                "converted twice or not at all: permute with rotary.layouts.row_permutation",
            )


def layout_of_rows(norms: np.ndarray[Any, Any]) -> str | None:
    """The layout in which partners have like norms; None where that cannot be told.

    norms  (heads, head_dim), of the rows of W_q or W_k, or of channels of q or k. Training moves
           the two channels of a pair together; random weights show no layout.

    >>> layout_of_rows(np.repeat(np.linspace(1, 2, 32), 2)[None])
    'interleaved'
    """
    logs = np.log(np.maximum(norms, 1e-30))
    half = logs.shape[1] // 2
    apart = {
        "half": np.abs(logs[:, :half] - logs[:, half:]).mean(),
        "interleaved": np.abs(logs[:, 0::2] - logs[:, 1::2]).mean(),
    }
    near, far = sorted(apart, key=lambda name: apart[name])
    return near if apart[near] < 0.5 * apart[far] else None
