"""What the tests of attention share: queries, keys and values, libraries, and how near is near."""

import numpy as np
import pytest
from libraries import if_installed

torch = if_installed("torch")

FAR = 2**40
SHIFT = 1e-6  # in units of the values, of which every output is an average
LIBRARIES = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["np", "torch"])
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def draw(*shape, key=0, dtype=np.float64):
    return np.random.default_rng(key).standard_normal(shape).astype(dtype)


def qkv(*shape, dtype=np.float64, kv_heads=None, width=None):
    """q, k and v; k and v may have fewer heads, v another width."""
    kv = shape if kv_heads is None else (*shape[:-3], kv_heads, *shape[-2:])
    v = (*kv[:-1], width or kv[-1])
    return draw(*shape, dtype=dtype), draw(*kv, key=1, dtype=dtype), draw(*v, key=2, dtype=dtype)
