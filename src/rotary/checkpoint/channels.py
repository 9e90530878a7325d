"""Finds the rotated channels of a projection: the axis of each tensor, and the rows.

A projection is stored as one tensor or as several: a bias, the halves of an adapter, quantized
values with their scales. Each tensor moves with the rows of the weight along one axis, as whole
bytes or packed into 32-bit words, or does not change; a format that needs more is an error.

The rows hold heads side by side, or queries, keys and values packed into one tensor, in one of
several orders, or heads of which a slice comes from a latent. Counts are read from the config and
must add up to the number of rows.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..configs import Config
from ..spec import Rotary, is_whole
from ..strict_json import JSON
from .files import Tensor
from .names import PARAMETERS, SCALES_OF_ROWS, Name

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# AWQ packs the columns 0 2 4 6 1 3 5 7 of each eight, lowest bits first
# (AutoAWQ 0.2.9, awq/modules/linear/gemm.py, `order_map`); GPTQ packs them as they come
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
BLOCK = 128  # rows of a block of weight_scale_inv, if the config states none
FALCON = "query and key, falcon"
_QUERIES = re.compile(r"(?:.*_)?(?:num_(?:attention_)?heads|n_heads?|attention_heads)(?:_.*)?")
_KEYS = re.compile(
    r"(?:.*_)?(?:num_(?:\w+_)?key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads|n_head_kv"
    r"|num_attention_groups|multi_query_group_num)(?:_.*)?"
)
_WIDTHS = re.compile(
    r"(?:.*_)?(?:hidden_size|hidden_dim|n_embd|d_model|embed_dim)|q_lora_rank|adapter_rank"
)


# --- the axis ---


class Place(NamedTuple):
    """Where the output channels are in one tensor.

    axis   the axis of the channels; None: the tensor does not change, and `stays` says why
    bits   bits of one value that is packed into 32-bit words; 0: values are whole bytes
    lanes  which column each value of a word is, lowest bits first
    block  rows of one block of scales, which must hold whole slices; 0 for none
    """

    axis: int | None
    bits: int = 0
    lanes: tuple[int, ...] = ()
    block: int = 0
    stays: str = ""


def treatment(parameter: str) -> str:
    """Return how a parameter moves with the rows of its weight: a name of `PARAMETERS`.

    >>> treatment("lora_A.default.weight"), treatment("weight_scale_inv"), treatment("weight")
    ('inputs', 'scales', 'rows')
    """
    return next(
        way for way, names in PARAMETERS.items() if re.fullmatch(names, parameter or "weight")
    )


def count_of(group: str, tensors: Mapping[str, Tensor]) -> int:
    """Return the number of output channels of a projection, from its tensors by parameter name.

    Raises ValueError for 4-bit weights of bitsandbytes, and if no tensor shows the number.
    """
    for parameter in tensors:
        if treatment(parameter) == "unknown":
            owner = "bitsandbytes" if parameter.startswith("weight.") else "this quantized format"
            raise ValueError(
                f"tensor '{group}.{parameter}': {owner} holds blocks across rows, which cannot "
                "move; convert the weights before they are quantized"
            )
    weight = tensors.get("weight")
    if weight is not None and weight.dtype in ("I32", "U32") and "weight_scale" in tensors:
        raise ValueError(
            f"tensor '{group}.weight' packs several numbers in 32 bits, as AMD Quark does along "
            "the output channels; convert the weights before they are quantized"
        )
    if "qweight" in tensors:
        if "scales" not in tensors:
            raise ValueError(f"tensor '{group}.qweight' needs '{group}.scales' beside it")
        return tensors["scales"].shape[-1]
    for name in sorted(tensors, key="weight".__ne__):
        if treatment(name) == "rows" and (shape := tensors[name].shape):
            return shape[max(len(shape) - 2, 0)]
    raise ValueError(f"'{group}' has {', '.join(tensors)} but no weight, so its rows are unknown")


def place_of(
    group: str,
    parameter: str,
    tensors: Mapping[str, Tensor],
    size: int,
    block: tuple[int, int] = (BLOCK, BLOCK),
) -> Place:
    """Return where the `size` output channels of a projection are in one of its tensors.

    block  rows and columns of a block of scales, `weight_block_size` of a quantization_config
    Raises ValueError for a shape that does not hold them, with both numbers.
    """
    shape, kind = tensors[parameter].shape, treatment(parameter)
    where = f"tensor '{group}.{parameter}'" if parameter else f"'{group}'"
    if kind == "inputs":
        return Place(None, stays="of the input channels")
    if kind == "words":
        return _of_words(where, parameter, tensors, size)
    if kind == "scales" and (math.prod(shape) == 1 or parameter == "weight_shape"):
        return Place(None, stays="one for the whole tensor")
    if kind == "rows" or "qweight" in tensors:
        axis = max(len(shape) - 2, 0) if kind == "rows" else len(shape) - 1
        if not shape or shape[axis] != size:
            raise ValueError(
                f"{where} has shape {shape}, but its projection has {size} output channels"
            )
        return Place(axis)
    weight = tensors.get("weight")  # U8 may hold several numbers in a byte
    if shape[0] == size:
        is_square = weight is None or weight.dtype == "U8" or weight.shape[-1] == size
        if len(shape) == 1 and is_square and not re.fullmatch(SCALES_OF_ROWS, parameter):
            raise ValueError(
                f"{where} may scale input or output channels, {size} of each; if input, name it in "
                "leave (--leave)"
            )
        return Place(0)
    if parameter == "weight_zero_point" and "weight_packed" in tensors:
        raise ValueError(
            f"{where} packs the zero points of several rows in 32 bits, as compressed-tensors does "
            "(pack-quantized); convert the weights before they are quantized"
        )
    inputs = weight.shape[-1] if weight is not None and len(weight.shape) == 2 else None
    blocks = math.ceil(size / block[0]), None if inputs is None else math.ceil(inputs / block[1])
    if shape == blocks:
        return Place(None, block=block[0], stays="its blocks hold whole slices")
    of_blocks = f", nor {blocks[0]} x {blocks[1]} blocks of {block[0]} x {block[1]}"
    raise ValueError(
        f"{where} has shape {shape}: neither one number, nor {size} rows"
        + of_blocks * (inputs is not None)
    )


def _of_words(where: str, parameter: str, tensors: Mapping[str, Tensor], size: int) -> Place:
    shape, values = tensors[parameter].shape, tensors["qweight"].shape
    if tensors[parameter].dtype not in ("I32", "U32") or len(shape) != 2 or len(values) != 2:
        raise ValueError(f"{where} must be two axes of 32-bit words, got {shape}")
    if parameter == "qweight" and shape[1] == size:  # GPTQ packs along the inputs
        return Place(1)
    bits, rest = divmod(32 * shape[1], size)
    if rest or bits not in (2, 4, 8):
        raise ValueError(
            f"{where} has {shape[1]} words for {size} channels, which is not 2, 4 or 8 bits each"
        )
    if values[1] == size:
        return Place(1, bits, tuple(range(32 // bits)))
    if bits != 4:
        raise ValueError(f"{where} packs {bits} bits along the output channels; AWQ packs 4")
    return Place(1, bits, AWQ)


def place_of_inputs(name: str, parameter: str, tensor: Tensor, size: int) -> Place:
    """Return where a projection that reads `size` channels of heads has them: along its inputs.

    name  of the tensor, which ends in the parameter
    Raises ValueError for quantized columns, and for another number of columns.
    """
    if parameter == "weight" or parameter.startswith("lora_A"):
        if len(tensor.shape) != 2 or tensor.shape[1] != size:
            raise ValueError(f"tensor {name!r} has shape {tensor.shape}, not {size} columns")
        return Place(1)
    kind = treatment(parameter)
    if kind == "rows" or (kind == "scales" and math.prod(tensor.shape[1:]) == 1):
        return Place(None, stays="of the output channels")
    raise ValueError(
        f"tensor {name!r}: this model uses its keys as values, and quantized columns cannot be "
        "reordered; convert the weights before they are quantized"
    )


# --- the rows ---


class Run(NamedTuple):
    """Equal slices at equal distances: `heads` of them, `stride` apart, the first at `begin`."""

    begin: int
    heads: int
    stride: int


def runs_of(
    name: Name, rows: int, spec: Rotary, config: Config, shape: tuple[int, ...] = ()
) -> tuple[Run, ...]:
    """Return where the rotated slices of a tensor are among its `rows` output channels.

    shape  of the tensor, for the error and to recognize a transposed one
    Raises ValueError, with what the config says, if its heads do not make up these rows. The number
    of heads is that of the config. It is derived from the rows only if the config states no number
    of key heads.
    """
    kind, width = name.kind, spec.head_dim
    heads = config.get("num_attention_heads")
    if isinstance(heads, list | tuple) and name.layer < len(heads):
        heads = heads[name.layer]

    def refusal(reason: str) -> ValueError:
        """Say what the tensor has, what is wrong with it, and which keys of the config say so."""
        keys = ("hidden_size", "num_attention_heads", "qk_nope_head_dim", "kv_lora_rank")
        values = {config.model.get("names", {}).get(key, key): config.get(key) for key in keys}
        values |= dict(_matching(config.data, _KEYS)) | {"head_dim": width}
        says = ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)
        if len(shape) == 2 and shape[0] == config.get("hidden_size") != shape[1]:
            says += "; it looks transposed, for a weight is (outputs, inputs)"
        return ValueError(
            f"tensor {name.tensor!r}{f' of shape {shape}' * bool(shape)} ({name.kind}) has {rows} "
            f"output channels, {reason}; the config says {says}"
        )

    if kind.endswith("norm") and rows == width:  # a gain of one head, for all of them
        return (Run(spec.start, 1, width),)
    if kind == "query" and config.data.get("kv_lora_rank") is not None:
        kind = "latent query"
    if kind in ("query", "key", "query norm", "key norm", "query of an expert"):
        count, rest = divmod(rows, width)
        if kind.startswith("key") or kind == "query of an expert":
            counts = _key_heads(name, heads, config)
        else:
            counts = _counts(name, config, _QUERIES) | {heads} - {None}
        if rest or count < 1 or not _is_count(count, counts, heads):
            expected = " or ".join(map(str, sorted(counts))) or f"a divisor of {heads}"
            raise refusal(f"and {expected} heads of {width} are expected")
        return (Run(spec.start, count, width),)
    if not isinstance(heads, int):
        raise ValueError(f"the config needs num_attention_heads, got {heads!r}")
    if kind == FALCON:
        is_shared = config.get("multi_query") is not False
        kind = "query and key" if is_shared else "query and key, per head"
        kind = "query and key, grouped" if config.get("new_decoder_architecture") else kind
    keys = rows // width // 2 if kind == "key and value" else (rows // width - heads) // 2
    is_solved = kind in ("query and key", "query and key, grouped", "key and value")
    if is_solved and not _is_count(keys, _key_heads(name, heads, config), heads):
        beside = "" if kind == "key and value" else f" beside {heads} query heads"
        raise refusal(f"which has room for {keys} key heads{beside}")
    repeat, parts = _packed(kind, heads, keys, width, config)
    stride = sum(slices * size for slices, size, _ in parts)
    if repeat < 1 or stride * repeat != rows:
        widths = " + ".join(f"{slices} x {size}" for slices, size, _ in parts)
        raise refusal(f"and its heads need {stride * repeat} = {repeat} x ({widths})")
    runs, begin = [], spec.start
    for slices, size, is_rotated in parts:
        if is_rotated and repeat == 1:
            runs.append(Run(begin, slices, size))
        elif is_rotated:
            runs += [Run(begin + i * size, repeat, stride) for i in range(slices)]
        begin += slices * size
    return tuple(runs)


def _packed(
    kind: str, heads: int, keys: int, width: int, config: Config
) -> tuple[int, tuple[tuple[int, int, bool], ...]]:
    """Return how often a tensor repeats its parts, and these: (slices, channels each, rotated)."""

    def size_of(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int):
            raise ValueError(f"the config needs {key}, a whole number, got {value!r}")
        return value

    queries, key, value = (heads, width, True), (keys, width, True), (keys, width, False)
    one, still = (1, width, True), (1, width, False)
    match kind:
        case "query and key":
            return 1, (queries, key, value)
        case "query and key, per head":
            return heads, ((2, width, True), still)
        case "query and key, behind a gate":
            return 1, ((heads, width, False), queries, queries, (heads, width, False))
        case "query and key, grouped":
            return keys, ((heads // max(keys, 1) + 1, width, True), still)
        case "query and key, 4 blocks":
            return 4, tuple((heads // 4, width, is_rotated) for is_rotated in (True, False, True))
        case "key and value":
            return 1, (key, value)
        case "query, with a gate":
            return heads, (one, still)
        case "latent query":
            return heads, ((1, size_of("qk_nope_head_dim"), False), one)
        case "latent query, with a gate":
            nope, gate = size_of("qk_nope_head_dim"), size_of("v_head_dim")
            return heads, ((1, nope, False), one, (1, gate, False))
        case "latent key":
            return 1, ((1, size_of("kv_lora_rank"), False), one)
    raise KeyError(f"models.json names a kind {kind!r}, which is not known here")


def check_inputs(
    name: Name, tensor: Tensor, config: Config, wide: tuple[str, Tensor] | None
) -> None:
    """Raise ValueError if a weight has another number of input channels than the config says.

    wide  name and tensor of a weight of the same layer that widens the hidden state: if it is
          transposed, so is a square weight, whose own shape does not show it
    A matrix of whole numbers is not checked, because it may be packed.
    """
    hidden, shape = config.get("hidden_size"), tensor.shape
    if name.parameter != "weight" or hidden is None:
        return
    if wide and shape == (hidden, hidden) and wide[1].shape[:1] == (hidden,) != wide[1].shape[1:]:
        raise ValueError(
            f"tensor {name.tensor!r} of shape {shape} looks transposed: {wide[0]!r} of the same "
            f"layer has shape {wide[1].shape}, and its inputs are hidden_size {hidden}; a weight "
            "must be (outputs, inputs)"
        )
    if len(shape) < 2 or tensor.dtype not in FLOATS or name.kind.endswith("norm"):
        return
    widths = [(config.model.get("names", {}).get("hidden_size", "hidden_size"), hidden)]
    widths += [pair for pair in _matching(config.data, _WIDTHS) if isinstance(pair[1], int)]
    count = 2 if name.kind == "latent query, with a gate" else 1  # two latents
    if shape[-1] not in [value * count for _, value in widths]:
        keys = " or ".join(dict.fromkeys(f"{key} {value}" for key, value in widths))
        raise ValueError(
            f"tensor {name.tensor!r} of shape {shape} has {shape[-1]} input channels, and the "
            f"config says {keys}"
        )


def _is_count(count: int, counts: set[int], heads: JSON) -> bool:
    """Whether a layer may have `count` heads, if the config names `counts`.

    If the config names none, the number is the default of the model's class, which is not known
    here. Then any divisor of `heads`, the number of query heads, is accepted; without it, any.
    """
    return count in counts if counts else count >= 1 and (heads is None or heads % count == 0)


def _key_heads(name: Name, heads: JSON, config: Config) -> set[int]:
    """Return the counts of key heads that the config names for a layer; empty if it names none."""
    if name.kind == FALCON and not config.get("new_decoder_architecture"):
        return {1} if config.get("multi_query") is not False else {heads}
    rule = config.model.get("weights", {}).get("key_heads")
    if rule == "queries":
        return {heads}
    counts = _counts(name, config, _KEYS)
    return counts | {2 * count for count in counts} if rule == "or twice" else counts


def _counts(name: Name, config: Config, pattern: re.Pattern[str]) -> set[int]:
    """Return the head counts that a config names; of a list by layer, the count of this layer.

    Objects in the config, except per_layer_config, are read only if it has no such key itself.
    """
    top = {key: value for key, value in config.data.items() if not isinstance(value, Mapping)}
    pairs = list(_matching(top, pattern))
    layers = config.data.get("per_layer_config") or {}
    pairs += _matching(layers if pairs else config.data, pattern)
    counts = set()
    for key, value in pairs:
        is_list = isinstance(value, list | tuple) and name.layer < len(value)
        count = value[name.layer] if is_list else value
        if not is_whole(count) or count < 1:
            raise ValueError(
                f"{key} must be a whole number >= 1, got {count!r:.80}; it is the number of heads "
                f"of {name.tensor!r}"
            )
        counts.add(count)
    return counts


def _matching(data: Mapping[str, JSON], pattern: re.Pattern[str]) -> Iterator[tuple[str, JSON]]:
    """Yield matching keys at any depth, with their values; null is left out."""
    for key, value in data.items():
        if pattern.fullmatch(str(key)) and value is not None:
            yield str(key), value
        elif isinstance(value, Mapping):
            yield from _matching(value, pattern)
