"""Test vectors for any language: positions, cos, sin, and q and k before and after.

docs/conformance.md describes the format, which is JSON with every float32 as the hex digits of its
bits; `VERSION` grows when a reader of the format would have to change.
"""

import json
from collections.abc import Mapping

import numpy as np

from ..angles import inv_freq
from ..kernels import Numbers as Array
from ..layouts import pair_indices
from ..spec import Rotary
from ..strict_json import JSON
from ..words import brief
from .formula import rotated, tables

FORMAT, VERSION = "rotary-vectors", 1
# where 16-bit positions, short tables and float32 angles begin to go wrong
POSITIONS = (0, 1, 2, 3, 15, 64, 255, 257, 1000, 4095, 4097, 32767, 131_071)
EXACT = 3e-7  # of cos and sin: twice the error of float32 tables and polynomials
PER_POSITION = 2.4e-7  # the error of float32 angles, in rad per position at 1 rad per token


def vectors(specs: Rotary | Mapping[str | None, Rotary | None]) -> dict[str, JSON]:
    """Return golden vectors of a spec, or of one spec per layer type, as JSON-ready data.

    specs  a spec, or {layer type: spec} as from `rotary.from_hf_config`; None: layers that rotate
           nothing. A spec whose frequencies depend on the length has two cases: a row of the
           trained length, and one of twice that.
    The numbers are computed in float64 and rounded once to float32. q has two heads and k one; they
    hold multiples of 1/8 from -1 to 1, which every float type holds exactly.

    >>> document = vectors(Rotary(head_dim=4))
    >>> document["cases"][0]["cos"]["bits"][:35]
    '3f800000 3f800000 3f0a5140 3f7ffcb9'
    """
    by_type = {None: specs} if isinstance(specs, Rotary) else specs
    if not isinstance(by_type, Mapping) or not all(
        spec is None or isinstance(spec, Rotary) for spec in by_type.values()
    ):
        rule = "specs must be a Rotary, or {layer type: Rotary or None}, as from_hf_config returns"
        raise TypeError(f"{rule}; got {brief(specs)}")
    if not by_type:
        raise ValueError("vectors needs at least one spec")
    cases: list[dict[str, JSON]] = []
    for layer_type, spec in by_type.items():
        if spec is None:
            cases.append({"layer_type": layer_type, "spec": None})
            continue
        trained: int = spec.params.get("original_max_position_embeddings", 0)
        lengths = (trained, 2 * trained) if spec.depends_on_length else (None,)
        cases += [{"layer_type": layer_type, **_case(spec, length)} for length in lengths]
    return {"format": FORMAT, "version": VERSION, "cases": cases}


def to_json(document: Mapping[str, JSON]) -> str:
    """Return the document as JSON text with one line for each array.

    >>> print(to_json({"version": 1, "cases": [{"spec": None}]}), end="")
    {
    "version": 1,
    "cases": [
    {
    "spec": null
    }
    ]
    }
    """
    head = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in document.items() if k != "cases"]
    cases = [
        "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in case.items()) + "\n}"
        for case in document["cases"]
    ]
    return "{\n" + ",\n".join([*head, '"cases": [\n' + ",\n".join(cases) + "\n]"]) + "\n}\n"


def _case(spec: Rotary, seq_len: int | None) -> dict[str, JSON]:
    in_row = POSITIONS if seq_len is None else [*POSITIONS, seq_len - 1]
    numbers = np.array([n for n in in_row if seq_len is None or n < seq_len])
    several = [np.roll(numbers, axis) for axis in range(spec.num_axes)]
    positions = numbers if spec.num_axes == 1 else np.stack(several, axis=-1)
    frequencies, factor = inv_freq(spec, seq_len)
    cos, sin = tables(spec, positions, seq_len)
    q, k = (_numbers(heads, len(numbers), spec.head_dim, heads) for heads in (2, 1))
    size = max(1.0, factor)
    slope = PER_POSITION * max(1.0, float(np.abs(frequencies).max()))
    return {
        "spec": spec.to_dict(),
        "seq_len": seq_len,
        "head_dim": spec.head_dim,
        "num_axes": spec.num_axes,
        "attention_factor": factor,
        "tolerance": {
            "cos_sin": EXACT * size,
            "cos_sin_per_position": slope * size,
            "rotated": 2 * EXACT * size,
            "rotated_per_position": 2 * slope * size,
        },
        "pairs": pair_indices(spec.rotary_dim, spec.layout, spec.start).tolist(),
        "written_pairs": pair_indices(spec.rotary_dim, spec.out_layout, spec.start).tolist(),
        "inv_freq": _array(frequencies, "float64"),
        "positions": {
            "type": "int64", "shape": list(positions.shape), "values": positions.ravel().tolist(),
        },
        "cos": _array(cos),
        "sin": _array(sin),
        "q": _array(q),
        "k": _array(k),
        "q_rotated": _array(rotated(spec, q, cos, sin)),
        "k_rotated": _array(rotated(spec, k, cos, sin)),
    }  # fmt: skip


def _numbers(heads: int, seq: int, head_dim: int, seed: int) -> Array:
    """(heads, seq, head_dim) of multiples of 1/8 from -1 to 1.

    Each is a hash of its index, which is the same on every machine and repeats no pattern.
    """
    hashed = np.arange(heads * seq * head_dim, dtype=np.uint32) + np.uint32(seed << 20)
    for multiplier in (0x7FEB352D, 0x846CA68B):  # modulo 2^32
        hashed = (hashed ^ hashed >> np.uint32(16)) * np.uint32(multiplier)
    hashed ^= hashed >> np.uint32(16)
    return ((hashed % np.uint32(17)).astype(np.float64) / 8 - 1).reshape(heads, seq, head_dim)


def _array(values: Array, dtype: str = "float32") -> dict[str, JSON]:
    flat = np.ascontiguousarray(values, dtype).ravel()
    bits = flat.view(f"u{flat.itemsize}").tolist()
    return {
        "type": dtype,
        "shape": list(values.shape),
        "bits": " ".join(f"{each:0{2 * flat.itemsize}x}" for each in bits),
        "values": [float(str(each)) for each in flat],  # the shortest decimal with these bits
    }
