"""The bits of results as they were recorded: the same on every processor.

`tools/arm64.sh tests/test_bits.py` runs this on ARM64. `python tests/test_bits.py` records them.
"""

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import rotary
from rotary import Norm, Rotary

RECORDED = Path(__file__).parent / "golden" / "bits.json"
DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
SIZES = ((64, 64), (128, 128), (96, 32), (80, 80), (6, 6), (256, 64))  # head_dim, rotary_dim
POSITIONS = np.array([0, 1, 2, 1000, 131_071, 2**24 + 1, 2**31, 2**39 - 1, 7])


def numbers(*shape, dtype=np.float64):
    """Numbers from -1 to 1 that no library draws."""
    steps = np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * 2_654_435_761 % 2**32
    return (steps / 2**31 - 1).reshape(shape).astype(dtype)


def spec_of(head_dim, rotary_dim, layout):
    """Frequencies without a power, which is that of the C library."""
    params = {"inv_freq": (1 / np.arange(1, rotary_dim // 2 + 1)).tolist()}
    return Rotary(head_dim=head_dim, rotary_dim=rotary_dim, layout=layout, schedule="custom",
                  params=params)  # fmt: skip


def results(layout, dtype):
    for head_dim, rotary_dim in SIZES:
        spec = spec_of(head_dim, rotary_dim, layout)
        q, k = (numbers(2, heads, 9, head_dim, dtype=dtype) for heads in (4, 2))
        name = f"{layout} {np.dtype(dtype).name} {head_dim} {rotary_dim}"
        yield f"{name} tables", rotary.cos_sin(spec, POSITIONS)
        yield f"{name} apply", rotary.apply(spec, q, k, positions=POSITIONS)
        yield f"{name} one token", rotary.apply(spec, q[:, :, :1], positions=[131_071])
        yield f"{name} tokens first", rotary.apply(spec, q, positions=POSITIONS[:4], seq_dim=1)
        yield f"{name} rerotate", rotary.rerotate(k, spec, POSITIONS, POSITIONS[::-1].copy())
        weights = numbers(head_dim, dtype=np.float32)
        for kind in (None, "bfloat16", "float8_e4m3fn", "int8"):
            for norm in (None, Norm(weights, weights, eps=1e-6)):
                is_short = kind in ("float8_e4m3fn", "int8")
                for scale in (0.37, "token") if is_short else (0.37, 1.0):  # loops take 1 alone
                    fused = rotary.fused(q, k, None, spec, POSITIONS, norm=norm, dtype=kind,
                                         scale=scale)  # fmt: skip
                    yield f"{name} fused {norm is not None} {kind} {scale}", fused


def digest(result):
    """Of the bytes of all arrays in a result."""
    if isinstance(result, np.ndarray):
        return result.tobytes()
    return b"".join(digest(each) for each in result if each is not None)


def recorded(layout, dtype):
    return {
        name: hashlib.sha256(digest(result)).hexdigest()[:12]
        for name, result in results(layout, dtype)
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_results_have_the_recorded_bits(layout, dtype):
    ours = recorded(layout, dtype)
    every = json.loads(RECORDED.read_text())
    assert ours == {name: every[name] for name in ours}


if __name__ == "__main__":
    every = {}
    for layout in ("half", "interleaved"):
        for dtype in DTYPES:
            every |= recorded(layout, dtype)
    RECORDED.write_text(json.dumps(every, indent=0) + "\n")
