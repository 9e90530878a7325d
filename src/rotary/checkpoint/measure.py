"""In which layout weights look to be, by the norms of the rows of their query and key projections.

Training gives channels of high frequency other norms than those of low frequency. In the half
layout a head begins with high frequencies twice, at channel 0 and at its middle; so norms jump at
the middle, and its two halves have the same mean. In the interleaved layout frequencies fall from
the first channel to the last: norms go on at the middle, and the means of the halves differ.

That both halves have the same mean holds for every trained half model by symmetry: the members of
all pairs swapped, one with a sign, give the same model. That norms go on at the middle of an
interleaved head is how trained models are, and no rule. Weights that were never trained, or whose
norms do not depend on the frequency, show nothing.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .files import read_checkpoint
from .headers import Shard, Tensor, open_regular
from .layout_keys import edit_of, layout_of
from .names import classify
from .plan import Move, Plan, plan
from .shards import CHUNK, read_piece
from .verify import numbers

Norms = npt.NDArray[np.float64]
TYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"
}  # fmt: skip
_LAYERS = 4  # that are looked at, spread over the model
_HEADS = 12  # fewer show nothing
_ERRORS = 6.0  # standard errors that a difference must have,
_LEAST = 0.02  # and its least size, of logarithms


class Seen(NamedTuple):
    """The layout that weights have by something else than their config, and by what."""

    layout: str
    text: str


def layout_of_norms(norms: Norms) -> Seen | None:
    """The layout that norms of rows show; None where they show none.

    norms  (heads, rotary_dim), of the rotated rows of W_q and W_k, of all heads and layers at hand

    >>> noise = 0.01 * np.sin(np.arange(16 * 64)).reshape(2, 16, 32)
    >>> falling = np.linspace(1.2, 0.8, 32) + noise
    >>> layout_of_norms(np.concatenate([*falling], axis=1))
    Seen(layout='half', text='look half, by the norms of 16 heads')
    >>> layout_of_norms(falling.transpose(1, 2, 0).reshape(16, 64)).layout
    'interleaved'
    """
    heads, width = norms.shape
    if heads < _HEADS or width < 8:
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
    """Whether differences, one of each head, have a mean that is not chance."""
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return bool(abs(differences.mean()) > max(_ERRORS * error, _LEAST))


def seen_in(
    tensors: Mapping[str, Tensor], config: object, norms_of: Callable[[str], Norms | None]
) -> Seen | None:
    """The layout that the weights of a model look to be in; None where nothing shows it.

    tensors   name -> dtype and shape
    config    of the model, as in `from_hf_config`
    norms_of  name -> norms of the rows of this matrix, (rows,); None where they cannot be had
    """
    try:
        todo = plan(tensors, config, "half", "interleaved", trust_source=True)
    except (ValueError, TypeError, LookupError):  # another kind of model, or in other parts
        return None
    by_width: dict[int, list[Norms]] = {}
    for move in _chosen(todo, tensors):
        norms = norms_of(move.tensor)
        if norms is not None and np.isfinite(norms).all() and norms.all():
            by_width.setdefault(move.rotary_dim, []).append(norms[move.slices])
    seen = [layout_of_norms(np.concatenate(each)) for each in by_width.values()]
    return seen[0] if len({each and each.layout for each in seen}) == 1 else None


def seen_in_folder(path: Path, config: object) -> Seen | None:
    """The same of safetensors in a folder, of which the rows of a few layers are read."""
    checkpoint = read_checkpoint(path)
    home = {name: shard for shard in checkpoint.shards for name in shard.tensors}
    return seen_in(checkpoint.tensors, config, lambda name: _norms(home[name], name))


def seen_in_model(model: Any) -> Seen | None:
    """The same of a loaded torch model with a config."""
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
    """What is wrong where a config means another layout than the weights have, and what to do.

    >>> disagreement({"model_type": "gptj"}, Seen("half", "look half"))[0]
    'look half; the config means interleaved'
    """
    if seen is None:
        return None
    try:
        meant, edit = layout_of(config), edit_of(config, seen.layout)
    except ValueError:  # a config that cannot be read, or say it
        return None
    if meant == seen.layout:
        return None
    more = "" if edit.startswith("remove") else ", load them anew and call rotary.patch(model)"
    return (
        f"{seen.text}; the config means {meant}",
        f"if the weights are right, {edit}{more}; if the config is, move them: "
        f"rotary convert --from {seen.layout} --to {meant} --trust-source",
    )


def _chosen(todo: Plan, tensors: Mapping[str, Tensor]) -> list[Move]:
    """The weight matrices of some layers, without gains and packed words."""
    layers: dict[int, list[Move]] = {}
    for move in todo.moves.values():
        name, tensor = classify(move.tensor, todo.model), tensors[move.tensor]
        is_matrix = len(tensor.shape) == 2 and move.axis == 0 and not move.kind.endswith("norm")
        if name and name.parameter == "weight" and is_matrix and tensor.dtype in TYPES.values():
            layers.setdefault(name.layer, []).append(move)
    at = np.linspace(0, len(layers) - 1, min(_LAYERS, len(layers))).round().astype(int)
    return [move for i in at for move in layers[sorted(layers)[i]]]


def _norms(shard: Shard, name: str) -> Norms:
    tensor = shard.tensors[name]
    width = (tensor.end - tensor.begin) // tensor.shape[0]
    step = max(CHUNK // max(width, 1), 1) * width
    with open_regular(shard.path) as file:
        squares = [
            np.square(numbers(read_piece(file, begin, end), tensor.dtype))
            .reshape(-1, tensor.shape[1]).sum(axis=1)
            for begin in range(tensor.begin, tensor.end, step)
            for end in (min(begin + step, tensor.end),)
        ]  # fmt: skip
    return np.sqrt(np.concatenate(squares))
