"""Reads the header and the RoPE tensors of a GGUF file."""

import os
import struct
import sys
from pathlib import Path
from typing import Any

from ..strict_json import JSON

TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# GGUF's type of a number -> its size in bytes
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def read_gguf(path: str | os.PathLike[str]) -> dict[str, JSON]:
    """Read what a GGUF file says about its RoPE: keys of the header, and RoPE tensors as lists.

    Weights are not read, however large the file is. For a model in several files give the first;
    the RoPE tensors of all files are read.
    Raises FileNotFoundError, ValueError for a damaged file and for RoPE tensors that are not F32,
    which llama.cpp does not take, ImportError without `gguf`.
    """
    path = Path(path)
    kept = _read_file(path)
    count = kept.get("split.count", 1)
    if not isinstance(count, int):
        raise ValueError(f"{path}: split.count must be a whole number, got {count!r:.80}")
    first = f"-00001-of-{count:05}.gguf"
    if count > 1:
        if not path.name.endswith(first):
            raise ValueError(f"{path}: one of {count} files; give the first, ...{first}")
        for number in range(2, count + 1):
            name = path.name.removesuffix(first) + f"-{number:05}-of-{count:05}.gguf"
            part = _read_file(path.with_name(name))
            kept |= {tensor: part[tensor] for tensor in TENSORS if tensor in part}
    return kept


def _read_file(path: Path) -> dict[str, JSON]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give a .gguf file")
    try:
        from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
    except ImportError as error:
        raise ImportError(
            f"{path}: reading a GGUF file needs the package gguf: pip install gguf"
        ) from error

    class Header(GGUFReader):
        """Skips the long lists of the tokenizer, which take 8 s to read; nothing else differs."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[Any, ...]:
            if raw_type == GGUFValueType.ARRAY:
                content = self.data.data
                is_little = (self.byte_order == "I") == (sys.byteorder == "little")  # I: as here
                order = "<" if is_little else ">"
                kind, count = struct.unpack_from(f"{order}IQ", content, orig_offs)
                end = orig_offs + 12
                if count > len(content) - end:
                    raise ValueError(f"a list of {count} items in a file of {len(content)} bytes")
                if 1000 < count <= len(content) and kind in _BYTES:
                    end += count * _BYTES[kind]
                    return end - orig_offs, [], [], [GGUFValueType.ARRAY]
                if 1000 < count <= len(content) and kind == GGUFValueType.STRING:
                    for _ in range(count):
                        end += 8 + struct.unpack_from(f"{order}Q", content, end)[0]
                    return end - orig_offs, [], [], [GGUFValueType.ARRAY]
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        reader = Header(path)
        kept: dict[str, JSON] = {
            key: field.contents()
            for key, field in reader.fields.items()
            if key == "general.architecture" or not key.startswith(("general.", "tokenizer."))
        }
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError,
            RecursionError, struct.error) as error:  # fmt: skip
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: not a GGUF file, or cut short: {reason}") from error
    for tensor in reader.tensors:
        if tensor.name in TENSORS:
            kind = tensor.tensor_type
            if kind != GGMLQuantizationType.F32:
                raise ValueError(f"{path}: {tensor.name} is {kind.name}, llama.cpp reads only F32")
            kept[tensor.name] = tensor.data.ravel().tolist()
    return kept
