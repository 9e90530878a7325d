"""Where the output channels of a projection are in each tensor that belongs to it.

A projection is stored as one tensor or as several: a bias, the halves of an adapter, quantised
values with their scales. Each of them moves with the rows of the weight along one axis, as whole
bytes or packed into 32-bit words, or stays; a format where neither is right is refused by name.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..layouts import Indices
from .headers import Tensor

# how a parameter moves with the rows of its weight, and the names of such parameters
PARAMETERS = {
    "rows": r"weight|bias|weight_packed|lora_B(?:\.\w+)??(?:\.weight|\.bias)?"
             r"|lora_magnitude_vector(?:\.\w+)??(?:\.weight)?",
    "inputs": r"lora_A(?:\.\w+)??(?:\.weight)?|(?:weight_)?g_idx",
    "words": r"qweight|qzeros",
    "scales": r"\w*scales?(?:_\w+)?|SCB|biases|weight_shape|weight_format|\w*zero_point",
    "unknown": r"weight\..+|zeros|perm|CB|B|s|workspace|W_q|meta|codes|codebooks"
                r"|lora_embedding_[AB].*",
}  # fmt: skip

# AWQ packs the columns 0 2 4 6 1 3 5 7 of each eight, lowest bits first
# (AutoAWQ 0.2.9, awq/modules/linear/gemm.py, `order_map`); GPTQ packs them as they come
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
BLOCK = 128  # rows of a block of weight_scale_inv, where the config is silent


class Place(NamedTuple):
    """Where the output channels are in one tensor.

    axis   along which they lie; None: the tensor stays, for `stays` says why
    bits   of one value that is packed into 32-bit words; 0: values are whole bytes
    lanes  which column each value of a word is, lowest bits first
    block  rows of one block of scales, which must hold whole slices; 0 for none
    """

    axis: int | None
    bits: int = 0
    lanes: tuple[int, ...] = ()
    block: int = 0
    stays: str = ""


def treatment(parameter: str) -> str:
    """How a parameter moves with the rows of its weight: a name of `PARAMETERS`.

    >>> treatment("lora_A.default.weight"), treatment("weight_scale_inv"), treatment("weight")
    ('inputs', 'scales', 'rows')
    """
    return next(
        way for way, names in PARAMETERS.items() if re.fullmatch(names, parameter or "weight")
    )


def channels(group: str, tensors: Mapping[str, Tensor]) -> int:
    """How many output channels a projection has, by its tensors, which `parameter` names.

    Raises ValueError for 4-bit weights of bitsandbytes, and if no tensor tells.

    >>> channels("layers.0.attn.q", {"weight": Tensor("F32", (64, 32), 0, 8192)})
    64
    """
    for parameter in tensors:
        if treatment(parameter) == "unknown":
            known = "bitsandbytes" if parameter.startswith("weight.") else "this quantised format"
            raise ValueError(
                f"tensor '{group}.{parameter}': {known} holds blocks across rows, which cannot "
                "move; convert the weights before they are quantised"
            )
    if "qweight" in tensors:
        if "scales" not in tensors:
            raise ValueError(f"tensor '{group}.qweight' needs '{group}.scales' beside it")
        return tensors["scales"].shape[-1]
    rows = [(name, tensors[name].shape) for name in tensors if treatment(name) == "rows"]
    for _, shape in sorted(rows, key=lambda row: row[0] != "weight"):
        if shape:
            return shape[-2] if len(shape) > 1 else shape[0]
    raise ValueError(f"'{group}' has {', '.join(tensors)} and no weight that tells its rows")


def place_of(
    group: str, parameter: str, tensors: Mapping[str, Tensor], size: int, block: int = BLOCK
) -> Place:
    """Where the `size` output channels of a projection are in one of its tensors.

    block  rows of a block of scales, `weight_block_size[0]` of a quantization_config
    Raises ValueError for a shape that does not hold them, with both numbers.

    >>> place_of("q", "bias", {"bias": Tensor("F32", (64,), 0, 256)}, 64)
    Place(axis=0, bits=0, lanes=(), block=0, stays='')
    """
    shape, kind = tensors[parameter].shape, treatment(parameter)
    where = f"tensor '{group}.{parameter}'" if parameter else f"'{group}'"
    if kind == "inputs":
        return Place(None, stays="of the input channels")
    if kind == "words":
        return _of_words(where, parameter, tensors, size)
    if kind == "scales" and (math.prod(shape) == 1 or parameter in ("weight_shape",)):
        return Place(None, stays="one for the whole tensor")
    if kind == "scales" and "qweight" in tensors:
        return _fits(where, shape, len(shape) - 1, size)
    if kind == "rows":
        return _fits(where, shape, max(len(shape) - 2, 0), size)
    if shape[0] == size:
        return Place(0)
    if len(shape) == 2 and shape[0] == math.ceil(size / block):
        return Place(None, block=block, stays="its blocks hold whole slices")
    raise ValueError(
        f"{where} has shape {shape}: neither one number, nor {size} rows, nor "
        f"{math.ceil(size / block)} blocks of {block} rows"
    )


def place_of_inputs(name: str, parameter: str, tensor: Tensor, size: int) -> Place:
    """Where a projection that reads `size` channels of heads holds them: along its inputs.

    name  of the tensor, whose end is the parameter
    Raises ValueError for quantised columns, and for another number of them.

    >>> place_of_inputs("o_proj.weight", "weight", Tensor("F32", (16, 64), 0, 4096), 64).axis
    1
    """
    if parameter == "weight" or parameter.startswith("lora_A"):
        if len(tensor.shape) != 2 or tensor.shape[1] != size:
            raise ValueError(f"tensor {name!r} has shape {tensor.shape}, not {size} columns")
        return Place(1)
    kind = treatment(parameter)
    if kind == "rows" or (kind == "scales" and math.prod(tensor.shape[1:]) == 1):
        return Place(None, stays="of the output channels")
    raise ValueError(
        f"tensor {name!r}: values are keys here, and quantised columns cannot move; convert "
        "the weights before they are quantised"
    )


def reordered(
    words: npt.NDArray[np.uint32], order: Indices, where: Place
) -> npt.NDArray[np.uint32]:
    """Words whose packed columns are in another order: column j is the old column order[j].

    words (rows, columns x bits / 32)

    >>> nibbles = np.array([[0x76543210]], np.uint32)
    >>> hex(reordered(nibbles, np.arange(8)[::-1], Place(1, 4, tuple(range(8))))[0, 0])
    '0x1234567'
    """
    lanes, mask = np.array(where.lanes), np.uint32((1 << where.bits) - 1)
    columns = np.empty((*words.shape, len(lanes)), np.uint8)
    for number, lane in enumerate(lanes):
        columns[..., lane] = (words >> np.uint32(where.bits * number)) & mask
    moved = columns.reshape(len(words), -1)[:, order].reshape(columns.shape)
    packed = np.zeros_like(words)
    for number, lane in enumerate(lanes):
        packed |= moved[..., lane].astype(np.uint32) << np.uint32(where.bits * number)
    return packed


def _fits(where: str, shape: tuple[int, ...], axis: int, size: int) -> Place:
    if not shape or shape[axis] != size:
        raise ValueError(f"{where} has shape {shape}, and its projection {size} output channels")
    return Place(axis)


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
