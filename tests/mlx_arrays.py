"""NumPy arrays as arrays of MLX and back; the kernel of MLX for NumPy arrays."""

import ml_dtypes
import mlx.core as mx
import numpy as np

from rotary.kernels import mlx as kernel


def to_mlx(array):
    dtype = mx.float64 if array.dtype == np.float64 else None  # by itself MLX rounds it
    return mx.array(np.array(array, order="C"), dtype)


def to_numpy(array):
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


def rotated(xs, cos, sin, rows, options, out=None):
    xs, (cos, sin) = tuple(map(to_mlx, xs)), map(to_mlx, (cos, sin))
    return tuple(map(to_numpy, kernel.rotate(xs, cos, sin, rows, options, out)))
