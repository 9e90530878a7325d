"""Makes positions in the library and on the device of an array that a caller passes."""

import sys
from typing import Any

import numpy as np

from . import Array, Numbers, SomeKernel, hint_for, host, is_symbolic, kernel_of
from .private import recorded_as


class Place:
    """The library and device of the first array of torch, JAX or MLX; NumPy if there is none.

    Raises TypeError for a masked array, whose mask would be lost.
    """

    def __init__(self, *candidates: object) -> None:
        for each in candidates:
            if isinstance(each, np.ma.MaskedArray):
                raise TypeError(f"positions are not made of a masked array{hint_for(type(each))}")
        arrays = [each for each in candidates if is_array(each)]
        self.like: Numbers = arrays[0] if arrays else np.empty(0)  # type: ignore[assignment]
        self.kernel: SomeKernel = kernel_of(self.like) if arrays else host()
        self.xp = self.kernel.namespace

    def arange(self, count: int) -> Numbers:
        """Return 0 .. count - 1 in the type of positions: int64, in JAX without x64 int32."""
        numbers = self.kernel.arange(self.like, count)
        is_jax = self.xp.__name__ == "jax.numpy"  # its kernel makes int32
        return numbers.astype(self.xp.asarray(0).dtype) if is_jax else numbers

    def in_memory(self, array: Numbers) -> Numbers | None:
        """Return the numbers on the host; None if they are traced or on a GPU."""
        return self.kernel.to_numpy(array)

    def segments(self, bounds: Numbers, tokens: Numbers) -> Numbers:
        """Return, for each token, the number of the segment between sorted bounds that it is in."""
        if self.xp.__name__ == "torch" and self.xp.compiler.is_exporting():
            return (bounds <= tokens[:, None]).sum(-1) - 1  # ONNX has no searchsorted
        return self.xp.searchsorted(bounds, tokens, side="right") - 1

    def whole(self, name: str, value: object) -> Numbers:
        """Convert whole numbers to this library and device; ValueError for other numbers."""
        is_torch = self.xp.__name__ == "torch"
        is_int = type(value) is int or is_open_size(value)  # both may be symbols of torch
        if type(value) is int:
            self.check_size(name, value)
        if is_int and (is_torch or self.xp is np):
            return (self.arange(1) + value)[0]
        numbers: Any = value if is_array(value) else host().as_positions(value, np.empty(0))
        if is_torch and not is_array(value):
            numbers = self.converted(numbers)
        # NumPy writes the other byte order as ">i4"; its name is "int32"
        kind = str(getattr(numbers.dtype, "name", numbers.dtype)).rpartition(".")[2]
        if not kind.startswith(("int", "uint")):
            raise ValueError(f"{name} must hold whole numbers, got dtype {kind}")
        if isinstance(numbers, np.ndarray):
            if numbers.size:
                self.check_size(name, int(numbers.max()))
                self.check_size(name, int(numbers.min()))
            return cast(self.converted(numbers.astype(np.int64)), self.dtype)
        signed = cast(numbers, self.dtype)
        values = self.in_memory(signed) if kind.startswith("uint") else None
        if values is not None and (values < 0).any():  # too large, and wrapped
            self.check_size(name, int(values.view(f"u{values.itemsize}").max()))
        return signed

    def converted(self, numbers: Numbers) -> Numbers:
        """Convert a NumPy array to this library and device."""
        if self.xp is np:
            return numbers
        result: Numbers = self.xp.asarray(self.kernel.as_positions(numbers, self.like))
        return result

    @property
    def dtype(self) -> "np.dtype[np.generic]":
        """The type of positions: int64, in JAX without x64 int32."""
        return self.arange(0).dtype

    def fractions(self, numbers: Numbers) -> Numbers:
        """Return whole numbers as float64; as float32 in JAX without x64 and in MLX."""
        return cast(numbers, self.converted(np.ones(1)).dtype)

    def check_size(self, name: str, value: int) -> None:
        """Refuse a whole number that would wrap: int64 holds positions, in JAX without x64 int32.

        >>> Place().check_size("offset", 2**63)
        Traceback (most recent call last):
        ValueError: offset must fit in int64, got 9223372036854775808
        """
        if self.xp.__name__ == "jax.numpy":
            limit = int(self.xp.iinfo(self.xp.asarray(0).dtype).max)
        else:
            limit = 2**63 - 1
        if abs(value) > limit:
            kind = "int64" if limit > 2**31 else "int32, as JAX without x64 ends at 2^31 - 1"
            raise ValueError(f"{name} must fit in {kind}, got {value}")


def cast(array: Array, dtype: Any) -> Array:
    """Convert an array to another dtype of its library; gradients pass through."""
    return array.astype(dtype) if hasattr(array, "astype") else array.to(dtype)


def is_open_size(value: object) -> bool:
    """Whether a value is a size that torch.export or jax.export leaves open, and no array.

    >>> is_open_size(3)
    False
    """
    return _is_open_in_jax(value) or (is_symbolic(value) and not is_array(value))


@recorded_as(lambda value: False)
def _is_open_in_jax(value: object) -> bool:
    export = sys.modules.get("jax.export")  # no symbol of it can exist before its import
    return export is not None and bool(export.is_symbolic_dim(value))


# a tuple: torch.compile of torch 2.8 takes no union of types
_ON_HOST = int, float, list, tuple, range, np.ndarray, np.generic, type(None)


def is_array(value: object) -> bool:
    """Whether a value is an array of torch, JAX or MLX, not of NumPy."""
    if isinstance(value, _ON_HOST):
        return False
    try:
        kernel_of(value)
    except TypeError:
        return False
    return True
