"""Code as a user writes it, for the type checkers: `test_types.py` has mypy and pyright read it."""

import jax
import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import assert_type

import rotary
from rotary import attention
from rotary.nn import RotaryEmbedding

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


def with_numpy(spec: rotary.Rotary, q: Float32, k: Float32, ids: Int64) -> None:
    assert_type(rotary.cos_sin(spec, ids), tuple[Float32, Float32])
    assert_type(rotary.cos_sin(spec, [0, 1, 2]), tuple[Float32, Float32])
    cos, sin = rotary.cos_sin(spec, ids)
    assert_type(rotary.rotate(q, cos, sin, spec), Float32)
    assert_type(rotary.rotate((q, k), cos, sin, spec, out=(q, k)), tuple[Float32, Float32])
    assert_type(rotary.rotate([q, k], cos, sin, layout="half"), tuple[Float32, ...])
    assert_type(rotary.apply(spec, q), Float32)
    assert_type(rotary.apply(spec, q, k, positions=[0, 1]), tuple[Float32, Float32])
    assert_type(rotary.rerotate(k, spec, ids, [4, 5]), Float32)
    assert_type(rotary.rerotate([k, k], spec, ids, ids), tuple[Float32, ...])
    assert_type(rotary.inv_freq(spec)[1], float)
    assert_type(rotary.turns(spec), npt.NDArray[np.uint64])
    assert_type(rotary.positions.packed([0, 3]), Int64)
    assert_type(rotary.layouts.channel_permutation(4, "half", "interleaved"), Int64)
    assert_type(attention.softmax_attention(q, k, k, spec), Float32)
    assert_type(attention.scale_by_log_n(q, ids, 4096), Float32)


def with_torch(spec: rotary.Rotary, q: Tensor, k: Tensor, ids: Tensor) -> None:
    assert_type(rotary.cos_sin(spec, ids), tuple[Tensor, Tensor])
    cos, sin = rotary.cos_sin(spec, ids)
    assert_type(rotary.rotate(q, cos, sin, spec), Tensor)
    assert_type(rotary.rotate((q, k), cos, sin, spec, positions=ids), tuple[Tensor, Tensor])
    assert_type(rotary.apply(spec, q), Tensor)
    assert_type(rotary.apply(spec, q, k, positions=ids), tuple[Tensor, Tensor])
    assert_type(rotary.rerotate(k, spec, ids, np.arange(3)), Tensor)
    assert_type(attention.softmax_attention(q, k, k, spec, q_positions=ids), Tensor)
    assert_type(attention.vo_rope_attention(q, k, k, spec), Tensor)
    assert_type(attention.distance_attention(q, k, k, spec, attention.rerope(8)), Tensor)
    assert_type(attention.linear_attention(q, k, k, spec), Tensor)
    assert_type(attention.chunked_linear_attention(q, k, k)[0], Tensor)
    assert_type(attention.xpos(spec, q, k), tuple[Tensor, Tensor])
    assert_type(attention.elu_plus_one(q), Tensor)
    module = RotaryEmbedding(spec)
    assert_type(module.forward(q), Tensor)
    assert_type(module.forward(q, k, positions=ids), tuple[Tensor, Tensor])


def with_jax(spec: rotary.Rotary, q: jax.Array, k: jax.Array, ids: jax.Array) -> None:
    cos, sin = rotary.cos_sin(spec, ids)
    assert_type(cos, jax.Array)
    assert_type(rotary.rotate((q, k), cos, sin, spec), tuple[jax.Array, jax.Array])
    assert_type(rotary.apply(spec, q, k), tuple[jax.Array, jax.Array])
    assert_type(rotary.rerotate((q, k), spec, ids, ids), tuple[jax.Array, jax.Array])
    assert_type(attention.recurrent_linear_attention(q, k, k, spec), jax.Array)


def refused(spec: rotary.Rotary, q: Tensor) -> None:
    rotary.apply(spec, q, seq_dim="seq")  # type: ignore[call-overload]  # pyright: ignore
    rotary.Rotary(head_dim="128")  # type: ignore[arg-type]  # pyright: ignore
    rotary.cos_sin(spec, q, "float16")  # type: ignore[call-overload]  # pyright: ignore
