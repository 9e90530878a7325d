"""Finds the layout of a model's weights: by the keys of its config, and by their norms.

A config states it by a key of the model, or by `rope_traditional` (see `with_layout`).

Norms of the rows of query and key projections show it as well, because training gives channels of
high frequency other norms than those of low frequency. In the half layout a head begins with high
frequencies twice, at channel 0 and at its middle; so norms jump at the middle, and its two halves
have the same mean. In the interleaved layout frequencies fall from the first channel to the last:
norms go on at the middle, and the means of the halves differ.

That both halves have the same mean holds for every trained half model by symmetry: to swap the
members of all pairs, with a sign on one, gives the same model. That norms go on at the middle of an
interleaved head is only observed in trained models. Weights that were never trained, or whose norms
do not depend on the frequency, show nothing.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..configs import MODELS, load
from ..configs.entries import TEXT_PARTS
from ..configs.hf import LAYOUT_MARK, layout_of_weights
from ..strict_json import JSON, parsed
from ..words import brief
from .files import CONFIG, ConfigFile, Tensor, open_regular, read_checkpoint
from .names import classify
from .plan import Move, plan
from .shards import rows_of

Norms = npt.NDArray[np.float64]
TYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"
}  # fmt: skip
_LAYERS = 4  # whose norms are read, spread over the model
_MIN_HEADS = 12  # fewer show nothing
_MIN_STANDARD_ERRORS = 6.0  # of a difference of mean logarithms
_MIN_DIFFERENCE = 0.02  # of mean logarithms


class Unread(NamedTuple):
    """Weights in the layout `weights`, of a `model` whose code in transformers rotates `code`."""

    model: str
    weights: str
    code: str


class Seen(NamedTuple):
    """The layout that weights show without their config, and a text that says how."""

    layout: str
    text: str


# --- what a config says ---


def written_config(config: ConfigFile, changed: Mapping[str, JSON], original: JSON) -> bytes:
    """Return the bytes of the config.json to be written beside the weights.

    changed   the config with the new layout, as `with_layout` returns it
    original  text of the config before an earlier conversion, or None. A conversion back writes it
              again, unless other keys were changed
    Raises ValueError for a value that JSON does not have.
    """
    if config.text is not None and changed == config.data:
        return config.text.encode()
    if isinstance(original, str):
        before = parsed(original.encode(), CONFIG, infinity=True)
        is_right = layout_of(before) == layout_of(changed)
        if is_right and with_layout(before, layout_of(config.data)) == config.data:
            return original.encode()
    try:
        return json.dumps(changed, indent=2).encode() + b"\n"
    except TypeError as error:
        raise ValueError(f"config: {error}; give a config.json or plain values") from error


def with_layout(data: Mapping[str, JSON], layout: str) -> dict[str, JSON]:
    """Return the config with a layout in the key for it: one of the model, or `rope_traditional`.

    `rope_traditional` is the key of mlx-lm, which `from_hf_config` reads for every model; it is
    written only if the layout is not the model's own.

    >>> with_layout({"hidden_size": 64, "num_attention_heads": 2}, "interleaved")
    {'hidden_size': 64, 'num_attention_heads': 2, 'rope_traditional': True}
    """
    text, name = _text_part(data)
    keys, model = _without_mark(text), MODELS.get(name, {})
    key = model.get("layout_key")
    if layout != model.get("layout", "half") or key in keys:
        keys[key or LAYOUT_MARK] = layout == "interleaved"

    def replaced(value: JSON) -> JSON:
        if value is text:
            return keys
        if isinstance(value, Mapping):
            return {key: replaced(inner) for key, inner in value.items()}
        return value

    return replaced(data)


def layout_of(config: object) -> str:
    """Return the layout that a config states for the weights of the text model.

    config  as in `from_hf_config`. Raises ValueError for a model that is not known.

    >>> layout_of({"model_type": "gptj"})
    'interleaved'
    """
    text, name = _text_part(load(config))
    if name and name not in MODELS:
        raise ValueError(f"model_type {name!r} is not known")
    return layout_of_weights(text, MODELS.get(name, {}))


def marked_layout(config: object) -> str | None:
    """Return the layout that `rope_traditional` states for the text model; None without it.

    config  as in `from_hf_config`. Raises ValueError for a value that is not true or false.

    >>> marked_layout({"model_type": "llama", "rope_traditional": True})
    'interleaved'
    """
    text, _ = _text_part(load(config))
    return layout_of_weights(text, {}) if LAYOUT_MARK in text else None


def unread_layout(config: object) -> Unread | None:
    """Return the layout of the weights if transformers would load them and rotate in another.

    config  as in `from_hf_config`. Raises ValueError for a model that is not known.
    None for a config without `rope_traditional`, or if that is the layout of the code anyway.

    >>> unread_layout({"model_type": "gptj", "rope_traditional": False})
    Unread(model='gptj', weights='half', code='interleaved')
    """
    data = load(config)
    weights = marked_layout(data)
    if not weights:
        return None
    text, name = _text_part(data)
    code = layout_of({**_without_mark(text), "model_type": name})
    return Unread(name, weights, code) if name and code != weights else None


def warning_of(
    config: Mapping[str, JSON], layout: str, code_base: tuple[str, tuple[str, ...]] | None
) -> str:
    """Say which program will load weights in `layout` and compute wrong results; "" if none.

    config     the one that is written beside them
    code_base  name and layouts of the code base that the tensor names show, if known

    >>> warning_of({"model_type": "llama"}, "half", None)
    ''
    """
    if code_base is not None:
        name, layouts = code_base
        if layout in layouts:
            return ""
        return (
            f"the code that reads {name} rotates {layouts[0]}, and once converted these weights "
            f"are {layout}: it would compute wrong results without an error; load them in code "
            f"that rotates {layout}"
        )
    if unread := unread_layout(config):
        return (
            f"transformers will load these weights without an error and compute wrong results: "
            f"once converted they are {unread.weights}, and its {unread.model!r} rotates "
            f"{unread.code}; call rotary.patch(model) on the loaded model, or load them in code "
            f"that rotates {unread.weights}"
        )
    text, name = _text_part(config)
    key = MODELS.get(name, {}).get("layout_key")
    if key and text.get(key) is False and config.get("auto_map"):
        return (
            f"transformers reads {key} of config.json, and the code that auto_map names may not: "
            "load the model without trust_remote_code"
        )
    return ""


def warning_of_adapter(base: JSON, layout: str) -> str:
    """Say that an adapter such as LoRA, now in `layout`, fits only a base model in that layout.

    base  name or folder of the base model, as adapter_config.json states it, if it does

    >>> warning_of_adapter("org/base", "half").split(";")[0]
    "these are changes to the weights of 'org/base', and fit only weights that are half"
    """
    named = brief(base) if base and isinstance(base, str) else "a base model"
    return (
        f"these are changes to the weights of {named}, and fit only weights that are {layout}; "
        f"convert the base model to {layout} too, and name the result as base_model_name_or_path "
        "in adapter_config.json"
    )


def _text_part(data: Mapping[str, JSON], name: str = "") -> tuple[Mapping[str, JSON], str]:
    """Return the keys of the text model, all keys of a model without parts; and its model_type."""
    name = str(data.get("model_type") or name)
    parts = MODELS.get(name, {}).get("parts", {})
    key = next((key for key in TEXT_PARTS if key in parts), None)
    if key is None:
        return data, name
    inner = data.get(key)  # missing in an older config.json, which is flat
    return _text_part(inner, parts[key]) if isinstance(inner, Mapping) else (data, parts[key])


def _without_mark(data: Mapping[str, JSON]) -> dict[str, JSON]:
    return {key: value for key, value in data.items() if key != LAYOUT_MARK}


# --- what norms show ---


def layout_of_norms(norms: Norms) -> Seen | None:
    """Return the layout that norms of rows show; None if they show none.

    norms  (heads, rotary_dim): of the rotated rows of W_q and W_k, for heads of several layers

    >>> noise = 0.01 * np.sin(np.arange(16 * 64)).reshape(2, 16, 32)
    >>> falling = np.linspace(1.2, 0.8, 32) + noise
    >>> layout_of_norms(np.concatenate([*falling], axis=1))
    Seen(layout='half', text='look half, by the norms of 16 heads')
    >>> layout_of_norms(falling.transpose(1, 2, 0).reshape(16, 64)).layout
    'interleaved'
    """
    heads, width = norms.shape
    if heads < _MIN_HEADS or width < 8:
        return None
    logs = np.log(np.maximum(norms, 1e-30))
    few, half = width // 8, width // 2
    first, before, after, last = (
        logs[:, begin : begin + few].mean(axis=1) for begin in (0, half - few, half, width - few)
    )
    jump = before - after
    halves = (first + before - after - last) / 2
    if _is_sure(jump) and abs(jump.mean()) > 2 * abs(halves.mean()):
        return Seen("half", f"look half, by the norms of {heads} heads")
    if _is_sure(halves) and abs(halves.mean()) > abs(jump.mean()):
        return Seen("interleaved", f"look interleaved, by the norms of {heads} heads")
    return None


def _is_sure(differences: Norms) -> bool:
    """Whether the mean of differences, one for each head, is not due to chance."""
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return bool(abs(differences.mean()) > max(_MIN_STANDARD_ERRORS * error, _MIN_DIFFERENCE))


def seen_in(
    tensors: Mapping[str, Tensor], config: object, norms_of: Callable[[str], Norms | None]
) -> Seen | None:
    """Return the layout that the weights of a model seem to be in; None if nothing shows it.

    tensors   name -> dtype and shape
    config    of the model, as in `from_hf_config`
    norms_of  name -> norms of the rows of this matrix, (rows,); None if they are not available
    """
    try:
        todo = plan(tensors, config, "half", "interleaved", trust_source=True)
    except (ValueError, TypeError, LookupError):  # a model that cannot be converted
        return None
    layers: dict[int, list[Move]] = {}
    for move in todo.moves.values():  # matrices alone, no gains and no packed words
        name, tensor = classify(move.tensor, todo.model), tensors[move.tensor]
        is_matrix = len(tensor.shape) == 2 and move.axis == 0 and not move.kind.endswith("norm")
        if name and name.parameter == "weight" and is_matrix and tensor.dtype in TYPES.values():
            layers.setdefault(move.layer, []).append(move)
    chosen = np.linspace(0, len(layers) - 1, min(_LAYERS, len(layers))).round().astype(int)
    by_width: dict[int, list[Norms]] = {}
    for move in [move for i in chosen for move in layers[sorted(layers)[i]]]:
        norms = norms_of(move.tensor)
        if norms is not None and np.isfinite(norms).all() and norms.all():
            by_width.setdefault(move.rotary_dim, []).append(norms[move.slices])
    seen = [layout_of_norms(np.concatenate(each)) for each in by_width.values()]
    return seen[0] if len({each and each.layout for each in seen}) == 1 else None


def seen_in_folder(path: Path, config: object) -> Seen | None:
    """Return the result of `seen_in` for safetensors in a folder; reads rows of a few layers."""
    checkpoint = read_checkpoint(path)
    home = {name: shard for shard in checkpoint.shards for name in shard.tensors}

    def norms_of(name: str) -> Norms:
        tensor = home[name].tensors[name]
        with open_regular(home[name].path) as file:
            rows = rows_of(file, tensor, tensor.shape[1])
            return np.concatenate([np.linalg.norm(each, axis=1) for each in rows])

    return seen_in(checkpoint.tensors, config, norms_of)


def seen_in_model(model: Any) -> Seen | None:
    """Return the result of `seen_in` for a loaded torch model; None without a config."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    parameters = dict(model.named_parameters())
    tensors = {
        name: Tensor(TYPES.get(str(each.dtype), ""), tuple(each.shape), 0, 0)
        for name, each in parameters.items()
    }

    def norms_of(name: str) -> Norms | None:
        weight = parameters[name].detach()
        if weight.device.type == "meta" or hasattr(weight, "to_local"):  # no values, or a shard
            return None
        return weight.float().norm(dim=1).double().cpu().numpy()

    return seen_in(tensors, config, norms_of)


def disagreement(config: object, seen: Seen | None) -> tuple[str, str] | None:
    """Return (fault, advice) if a config means another layout than the weights have, else None.

    >>> wrong, advice = disagreement({"model_type": "gptj"}, Seen("half", "look half"))
    >>> wrong
    'look half; the config means interleaved'
    >>> advice.split(",")[1]
    ' write "rope_traditional": false into config.json'
    """
    if seen is None:
        return None
    try:
        data = load(config)
        meant = layout_of(data)
    except ValueError:  # a config that cannot be read, or say it
        return None
    if meant == seen.layout:
        return None
    (old, _), (new, _) = _text_part(data), _text_part(with_layout(data, seen.layout))
    edit = f"remove {LAYOUT_MARK} from config.json"
    for key, value in new.items():
        if old.get(key) != value:
            edit = f'write "{key}": {json.dumps(value)} into config.json, load them again and call '
            edit += "rotary.patch(model)"
    return (
        f"{seen.text}; the config means {meant}",
        f"if the weights are right, {edit}; if the config is, move them: "
        f"rotary convert --from {seen.layout} --to {meant} --trust-source",
    )
