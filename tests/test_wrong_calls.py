"""Calls that people get wrong, and the sentence that each must show: what to pass instead."""

import numpy as np
import pytest

import rotary
from rotary import Rotary

torch = pytest.importorskip("torch")

SPEC = Rotary(head_dim=64)
GRID = Rotary(head_dim=64, axes=[0, 1] * 16)
ROW = np.arange(16)
COS, SIN = rotary.cos_sin(SPEC, ROW)
Q, K = np.ones((2, 8, 16, 64), np.float32), np.ones((2, 2, 16, 64), np.float32)
Q_BY_TOKEN, K_BY_TOKEN = np.ones((2, 16, 8, 64), np.float32), np.ones((2, 16, 2, 64), np.float32)
ONE = np.ones((2, 8, 1, 64), np.float32)
TENSOR = torch.ones(2, 8, 16, 64)
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


def scaled(**scaling):
    return rotary.from_hf_config({**LLAMA, "rope_scaling": scaling})


apply, cos_sin, rotate, from_hf_config = (
    rotary.apply, rotary.cos_sin, rotary.rotate, rotary.from_hf_config,
)  # fmt: skip
# what is called, part of the sentence
CALLS = [
    # positions
    (
        lambda: apply(SPEC, ONE, positions=np.array([3, 7])),
        "positions of shape (2,) does not fit x of shape (2, 8, 1, 64) with seq_dim=-2: 2 against "
        "1; for one position per row of the batch pass positions[:, None]",
    ),
    (lambda: apply(SPEC, Q, positions=np.zeros((16, 2), int)),
     "positions with 2 axes need a spec that has axes="),
    (lambda: apply(SPEC, Q, positions=np.zeros((16, 2))),
     "positions with 2 axes need a spec that has axes="),
    (lambda: apply(SPEC, Q, positions=[[1], [2, 3]]),
     "all rows must have the same length, got [[1], [2, 3]]"),
    (lambda: apply(SPEC, TENSOR, positions=[[1], [2, 3]]),
     "all rows must have the same length, got [[1], [2, 3]]"),
    (lambda: cos_sin(SPEC, [[1], [2, 3]]), "all rows must have the same length, got [[1], [2, 3]]"),
    (lambda: rotate(Q, COS, SIN, SPEC, conjugate="no"),
     "conjugate must be True or False, got 'no'"),
    (lambda: apply(SPEC, Q, seq_dim=-2.0), "seq_dim must be a whole number, as -2, got -2.0"),
    (lambda: apply(GRID, Q), "a spec with 2 axes needs positions (..., seq, axes)"),
    (lambda: apply(SPEC, Q, positions=[0, 1, 2]),
     "positions of shape (3,) does not fit x of shape (2, 8, 16, 64)"),
    (lambda: apply(SPEC, Q, positions=16),
     "positions must be an array or a list, (..., seq), got 16; range(16) gives the first 16"),
    (lambda: apply(SPEC, Q, positions=0.5), "positions must be an array or a list"),
    (lambda: cos_sin(SPEC, 4096), "got 4096; range(4096) gives the first 4096"),
    (lambda: cos_sin(SPEC, None), "positions must be an array or a list, (..., seq), got"),
    (lambda: cos_sin(SPEC, ROW > 3), "positions must be whole numbers, or float64"),
    (lambda: cos_sin(SPEC, torch.arange(16).bfloat16()), "got torch.bfloat16"),
    # shapes of q and k
    (lambda: apply(SPEC, Q_BY_TOKEN, K_BY_TOKEN),
     "(2, 16, 8, 64) and (2, 16, 2, 64); for (..., seq, heads, head_dim) pass seq_dim=-3"),
    (lambda: apply(SPEC, Q[0, 0, 0]), "x must be (..., seq, head_dim), with 2 axes"),
    # the spec
    (lambda: apply(Q, K, SPEC),
     "spec, the first argument, must be a Rotary, got ndarray: make one with"),
    (lambda: cos_sin({"head_dim": 64}, ROW), "must be a Rotary, got dict: make one with"),
    (lambda: rotate(Q, COS, SPEC),
     "cos and sin must be arrays, got a Rotary: call rotate(x, cos, sin, spec)"),
    (lambda: Rotary(dim=64), "Rotary has no field 'dim'; it is called 'head_dim' here"),
    (lambda: Rotary(head_dim=64, rope_theta=1e6), "it is called 'base' here"),
    (lambda: Rotary(head_dim=4, inv_freq=[1.0]), "Rotary(..., params={'inv_freq': "),
    (lambda: Rotary(head_dim=64, theta=1e6), "'theta'; it is called 'base' here"),
    (lambda: Rotary(head_dim=64, schedule="linear", factor=2.0),
     "it is a parameter of the schedule: Rotary(..., params={'factor': ...})"),
    (lambda: Rotary(head_dim=64, layuot="half"),
     "Rotary has no field 'layuot'; did you mean 'layout'?"),
    (lambda: Rotary(64, 10_000), "got 10000; if it is the base, name it: Rotary(64, base=10000)"),
    (lambda: apply(SPEC, (Q, K)),
     "pass q and k one by one: apply(spec, q, k); rotate takes a tuple (q, k)"),
    (lambda: rotate(Q, COS, SIN, layout="gpt-j"),
     "layout must be 'half' or 'interleaved', got 'gpt-j', which is 'interleaved'"),
    (lambda: rotate(TENSOR, COS, SIN, SPEC),
     "cos_sin makes tables in the library of its positions"),
    # tables
    (lambda: rotate(Q, COS, SIN[:8], SPEC),
     "cos and sin must have one shape and dtype, got float32 (16, 32) and float32 (8, 32)"),
    # out
    (lambda: rotate((Q, K), COS, SIN, SPEC, out=Q),
     "out must hold one array for each of the 2 inputs, as out=(q, k) for (q, k); got 1"),
    # configs and models
    (
        lambda: from_hf_config("meta-llama/Llama-3.1-8B"),
        "hf download meta-llama/Llama-3.1-8B config.json --local-dir Llama-3.1-8B, then give "
        "Llama-3.1-8B",
    ),
    (lambda: from_hf_config({**LLAMA, "model_type": "nobody"}),
     "model_type 'nobody' is not known; load the model and call rotary.from_model(model)"),
    (lambda: scaled(rope_type="magic"), "rope_type 'magic' is not known;"),
    (lambda: scaled(rope_type="linear"), "'linear' needs parameter"),
    (lambda: rotary.patch("meta-llama/Llama-3.1-8B"),
     "got str; load it first, for example by transformers.AutoModel.from_pretrained(name)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), CALLS)
def test_a_wrong_call_says_what_to_pass(call, sentence):
    with pytest.raises((TypeError, ValueError, OSError, RuntimeError)) as raised:
        call()
    message = str(raised.value)
    assert sentence in message
    assert "\n" not in message
