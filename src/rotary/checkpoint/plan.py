"""Plans which tensors are reordered to convert a checkpoint, as plain data.

Applying one permutation to the rows of both W_q and W_k of a head changes no score. So a layer
without rotation may be reordered or not, as its rotating neighbours need.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..configs import Config, load
from ..layouts import Indices, channel_permutation, check
from ..spec import Rotary
from ..strict_json import JSON
from . import channels
from .channels import BLOCK, Place, Run
from .files import Checkpoint, ConfigFile, Tensor
from .layers import layer_type, layers_of, may_be_channels, why_not
from .names import (
    CACHE_SCALE,
    LEFT,
    Name,
    code_base,
    recognized,
    unknown_in_attention,
    widened_layer,
)

UNKNOWN = "in attention, but its name is not known"


class Move(NamedTuple):
    """How one tensor moves: slices of `rotary_dim` channels along one axis.

    size    channels along the axis
    runs    where the slices are
    place   the axis, and how channels are packed along it
    source  the layout of the weights;  target  the layout to convert to
    """

    tensor: str
    kind: str
    size: int
    runs: tuple[Run, ...]
    rotary_dim: int
    place: Place
    source: str
    target: str
    layer: int = -1

    @property
    def axis(self) -> int:
        """The axis along which channels move."""
        return self.place.axis or 0

    @property
    def heads(self) -> int:
        """How many slices move."""
        return sum(run.heads for run in self.runs)

    @property
    def slices(self) -> Indices:
        """(heads, rotary_dim) int64: the channels of each slice."""
        begins = [run.begin + run.stride * head for run in self.runs for head in range(run.heads)]
        return np.array(begins, np.int64)[:, None] + np.arange(self.rotary_dim)

    @property
    def order(self) -> Indices:
        """(size,) int64: channel j of the result is channel order[j] of the source."""
        order = np.arange(self.size, dtype=np.int64)
        inside = channel_permutation(self.rotary_dim, self.source, self.target)
        slices = self.slices
        order[slices] = slices[:, inside]
        return order

    def to_dict(self) -> dict[str, JSON]:
        """The move as JSON-ready data, without the order itself."""
        return {
            "tensor": self.tensor,
            "kind": self.kind,
            "axis": self.axis,
            "size": self.size,
            "heads": self.heads,
            "runs": [run._asdict() for run in self.runs],
            "rotary_dim": self.rotary_dim,
            "bits": self.place.bits,
        }


class Left(NamedTuple):
    """A tensor that looks like a query or a key, or belongs to one, and stays as it is."""

    tensor: str
    reason: str


class Plan(NamedTuple):
    """The tensors that move, by name, and those that look alike but stay; all others are copied.

    code_base  name and layouts of the code base whose tensor names these are, if it is known
    """

    model: str
    source: str
    target: str
    moves: Mapping[str, Move]
    left: tuple[Left, ...]
    code_base: tuple[str, tuple[str, ...]] | None = None

    @property
    def warning(self) -> str:
        """A warning of unchanged tensors that may hold queries or keys; "" if there are none."""
        names = [left.tensor for left in self.left if left.reason == UNKNOWN]
        if not names:
            return ""
        more = f" and {len(names) - 1} more" * (len(names) > 1)
        return (
            f"{names[0]}{more} stays as it is: it is {UNKNOWN}; if it holds channels of queries or "
            "keys, the result computes wrong results"
        )

    def to_dict(self) -> dict[str, JSON]:
        """The plan as JSON-ready data.

        >>> shape = {"layers.0.attention.wk.weight": Tensor("F32", (64, 32), 0, 8192)}
        >>> todo = plan(shape, {"head_dim": 16}, "interleaved", "half")
        >>> todo.to_dict()["moves"][0]["runs"]
        [{'begin': 0, 'heads': 4, 'stride': 16}]
        """
        return {
            "model": self.model,
            "source": self.source,
            "target": self.target,
            "moves": [move.to_dict() for move in self.moves.values()],
            "left": [left._asdict() for left in self.left],
        }


class Conversion(NamedTuple):
    """Everything about a conversion before it begins; the functions that write and verify take it.

    source      the folder or file that is converted
    target      the folder to write
    checkpoint  what the source holds
    plan        which tensors move
    config      the config of the source
    written     the bytes of config.json in the target
    verify      "sample" or "full"
    warnings    which tensors may be left by mistake; which program will load the result and compute
                wrong results, and what to do
    """

    source: Path
    target: Path
    checkpoint: Checkpoint
    plan: Plan
    config: ConfigFile
    written: bytes
    verify: str
    warnings: tuple[str, ...]

    @property
    def warning(self) -> str:
        """All warnings as one text; "" if there are none."""
        return "; ".join(self.warnings)


def plan(
    tensors: Mapping[str, Tensor],
    config: object,
    source: str,
    target: str,
    *,
    trust_source: bool = False,
    leave: Sequence[str] = (),
) -> Plan:
    """Plan what to move in a checkpoint to convert its weights from layout `source` to `target`.

    tensors       name -> dtype and shape, of all shards together
    config        of the model, as in `from_hf_config`
    source        the layout of the weights: that of the config, unless the names show a code base
                  whose files have another one (Meta's own Llama files are interleaved)
    trust_source  believe `source`: for weights that were converted before
    leave         names of tensors to copy unchanged, with * for any text
    Raises ValueError for a layout the weights do not have, for a tensor that no rule knows, for
    shapes that the config's heads do not divide, and for formats that cannot be moved.

    >>> rows = {f"model.layers.0.self_attn.{name}_proj.weight": Tensor("BF16", (64, 64), 0, 8192)
    ...         for name in "qkv"}
    >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    >>> moves = plan(rows, config, "half", "interleaved").moves
    >>> [move.order[:4].tolist() for move in moves.values()]
    [[0, 8, 1, 9], [0, 8, 1, 9]]
    """
    check(source, "source")
    check(target, "target")
    if source == target:
        raise ValueError(f"both layouts are {source!r}: nothing is to be moved")
    layers = layers_of(config)
    first = next(iter(layers.values()))[1]
    model = first.data.get("model_type", "")
    block = _block_of(config, first)
    base = code_base(tensors)
    layouts = tuple(sorted({spec.layout for spec, _ in layers.values() if spec}))
    owner, layouts = base or (repr(model), layouts)
    if not trust_source and (base or model) and source not in layouts:
        raise ValueError(
            f"weights of {owner} are {' or '.join(layouts)}, not {source}: say --from "
            f"{layouts[0]}; for weights that were moved before give --trust-source "
            "(trust_source=True)"
        )
    names = recognized(tensors, model, leave)
    wide = {widened_layer(name): (name, tensor) for name, tensor in tensors.items()}
    projections: dict[str, dict[str, Tensor]] = {}
    for name in names:
        if name.kind != LEFT:
            projections.setdefault(name.group, {})[name.parameter] = tensors[name.tensor]
    moves: dict[str, Move] = {}
    left: list[Left] = []
    for name in names:
        kind = None if name.kind == LEFT else layer_type(name, layers, first)
        spec, layer = layers.get(kind, (None, first))
        reason = name.reason or why_not(name, spec, projections, first)
        if name.kind == "output":
            # Gemma 4: in full attention the projected keys are the values as well
            is_value = first.data.get("attention_k_eq_v") and kind != "sliding_attention"
            if reason or not is_value:
                continue
        count = math.prod(tensors[name.tensor].shape)
        if reason == CACHE_SCALE and may_be_channels(count, layers):
            raise ValueError(
                f"tensor {name.tensor!r} may scale every channel of the heads, {count} of them, "
                "and these move; if it does not, name it in leave (--leave)"
            )
        if spec is None or reason:
            left.append(Left(name.tensor, reason))
            continue
        move = _move_of(name, projections[name.group], wide, spec, layer, block, source, target)
        if move.place.axis is None:
            left.append(Left(name.tensor, move.place.stays))
        else:
            moves[name.tensor] = move
    if not moves:
        raise ValueError(f"no tensor is to be moved: {left[0].tensor!r} is {left[0].reason}")
    named = {name.tensor for name in names}
    left += [
        Left(name, UNKNOWN)
        for name, tensor in tensors.items()
        if name not in named
        and unknown_in_attention(name, len(tensor.shape) < 2)
        and (len(tensor.shape) > 1 or may_be_channels(math.prod(tensor.shape), layers))
    ]
    return Plan(model, source, target, moves, tuple(left), base)


def _move_of(
    name: Name,
    group: Mapping[str, Tensor],
    wide: Mapping[str, tuple[str, Tensor]],
    spec: Rotary,
    layer: Config,
    block: tuple[int, int],
    source: str,
    target: str,
) -> Move:
    """Return the move of one tensor; its place has no axis if the tensor stays."""
    tensor = group[name.parameter]
    if name.kind == "output":
        size = spec.head_dim * int(layer.get("num_attention_heads"))
        place = channels.place_of_inputs(name.tensor, name.parameter, tensor, size)
        runs: tuple[Run, ...] = (Run(spec.start, size // spec.head_dim, spec.head_dim),)
    else:
        if name.kind.endswith("norm"):
            size, place = math.prod(next(iter(group.values())).shape), Place(0)
        else:
            size = channels.count_of(name.group, group)
            place = channels.place_of(name.group, name.parameter, group, size, block)
        runs = channels.runs_of(name, size, spec, layer, tensor.shape)
        channels.check_inputs(name, tensor, layer, wide.get(name.before))
    move = Move(
        name.tensor, name.kind, size, runs, spec.rotary_dim, place, source, target, name.layer
    )
    count = math.prod(tensor.shape[: move.axis]) * size
    if place.axis is not None and not place.bits and count and (tensor.end - tensor.begin) % count:
        raise ValueError(
            f"tensor {name.tensor!r} of {tensor.dtype} {tensor.shape}: a channel is not whole "
            "bytes; convert to another type first"
        )
    if place.block and np.any(move.order // place.block != np.arange(size) // place.block):
        raise ValueError(
            f"tensor {name.tensor!r} scales blocks of {place.block} rows, and rows would leave "
            "their block; convert the weights before they are quantized"
        )
    return move


def _block_of(config: object, first: Config) -> tuple[int, int]:
    """Return the number of rows and of columns of a block of quantized scales."""
    quantized = load(config).get("quantization_config") or first.data.get("quantization_config")
    values = quantized if isinstance(quantized, Mapping) else {}
    blocks = values.get("weight_block_size") or BLOCK
    ends = (blocks[0], blocks[-1]) if isinstance(blocks, list | tuple) else (blocks, blocks)
    sizes = [size for size in ends if type(size) is int and size >= 1]
    if (quantized and not isinstance(quantized, Mapping)) or len(sizes) < 2:
        raise ValueError(
            "quantization_config must be an object, and its weight_block_size hold whole numbers "
            f">= 1, got {quantized!r:.200}"
        )
    if values.get("quant_method") == "eetq":
        raise ValueError(
            "quantization_config says eetq, which stores weights transposed; convert the weights "
            "before they are quantized"
        )
    return sizes[0], sizes[1]
