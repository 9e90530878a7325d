"""`apply(positions=)` of a few tokens makes no tables, with the same bits and the same errors."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import if_installed
from programs import alone
from published import STEPS, scaled

from rotary import Rotary, apply, cos_sin, rotate

cpu = pytest.importorskip("rotary.kernels.cpu.kernel", reason="needs numba")
jobs = pytest.importorskip("rotary.kernels.cpu.jobs", reason="needs numba")
torch = if_installed("torch")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SPECS = (
    Rotary(head_dim=128),
    Rotary(head_dim=12, rotary_dim=8, start=3, layout="interleaved"),
    Rotary(head_dim=8, out_layout="interleaved", sign=-1),
    scaled("llama3", 10, 8.0, 8192, STEPS, base=5e5),
    Rotary(head_dim=12, axes=(0, 1, 2, 2, 1, 0)),
    scaled("yarn", 16, 4.0, 64),
)  # fmt: skip


@pytest.fixture
def without_tables(monkeypatch):
    """How many calls were prepared to work out their angles."""
    calls = []
    ready = cpu.ready_call_at
    for module in (cpu, jobs):
        monkeypatch.setattr(
            module, "ready_call_at", lambda *form: calls.append(ready(*form)) or calls[-1]
        )
    return calls


@settings(max_examples=150, deadline=None)
@given(
    spec=st.sampled_from(SPECS), dtype=st.sampled_from(DTYPES), batch=st.integers(1, 3),
    seq=st.integers(1, 4), heads=st.integers(1, 3), is_batched=st.booleans(),
    tokens_first=st.booleans(), conjugate=st.booleans(), into=st.sampled_from(("new", "out", "x")),
    low=st.sampled_from((0, -(2**40), 2**62)), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_bits_of_tables(
    spec, dtype, batch, seq, heads, is_batched, tokens_first, conjugate, into, low, seed
):
    if into == "x" and spec.layout != spec.out_layout:
        into = "out"
    rng = np.random.default_rng(seed)
    shape = (batch, seq, heads) if tokens_first else (batch, heads, seq)
    xs = [torch.tensor(rng.standard_normal((*shape, spec.head_dim))).to(dtype) for _ in range(2)]
    tokens = (batch, seq) if is_batched else (seq,)
    axes = (spec.num_axes,) if spec.num_axes > 1 else ()
    positions = torch.tensor(rng.integers(low, low + 2**30, (*tokens, *axes)))
    how = {"seq_dim": -3 if tokens_first else -2, "conjugate": conjugate}
    tables = cos_sin(spec, positions, allow_negative=True)
    want = rotate(xs, *tables, spec, **how)
    for library in ("torch", "numpy"):
        if library == "numpy" and dtype is torch.bfloat16:
            continue
        mine = [x.clone() for x in xs]
        ids = positions
        if library == "numpy":
            mine, ids = [x.numpy() for x in mine], positions.numpy()
        empty = torch.empty_like if library == "torch" else np.empty_like
        out = {"new": None, "out": [empty(x) for x in mine], "x": mine}[into]
        got = apply(spec, *mine, positions=ids, allow_negative=True, out=out, **how)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(torch.as_tensor(a), b)


@pytest.mark.parametrize("convert", [torch.as_tensor, np.asarray])
def test_no_table_is_made(convert, without_tables, monkeypatch):
    q = convert(np.ones((1, 2, 1, 8), np.float32))
    spec = Rotary(head_dim=8, base=777.0)
    monkeypatch.setattr(cpu, "tables", None)
    apply(spec, q, positions=convert(np.array([[3]])))
    assert without_tables[-1] is not None
    apply(spec, q, positions=convert(np.array([[4]])))
    assert len(without_tables) == 1  # the second call is known


@pytest.mark.parametrize("convert", [torch.as_tensor, np.asarray])
@pytest.mark.parametrize("repeat", [1, 3])
def test_errors_are_those_of_tables(convert, repeat):
    spec = Rotary(head_dim=8)
    q = convert(np.ones((2, 3, 4, 8), np.float32))
    good = convert(np.arange(4))
    for _ in range(repeat):
        apply(spec, q, positions=good)
        apply(spec, q, positions=-good, allow_negative=True)
        with pytest.raises(ValueError, match="positions must be >= 0, got -3"):
            apply(spec, q, positions=-good)
        with pytest.raises(ValueError, match="4 against"):
            apply(spec, q[:, :, :2], positions=good)
        with pytest.raises(ValueError, match=r"positions must be \(seq\)"):
            apply(spec, q, positions=good.reshape(1, 1, 4))
        with pytest.raises(ValueError, match="head_dim"):
            apply(spec, q[..., :6], positions=good)
    own = q + 0
    out = own[:1] if repeat == 1 else own[:, :2]
    with pytest.raises(ValueError, match="out must be"):
        apply(spec, own, positions=good, out=out)


def test_many_tokens_take_tables(without_tables):
    q = np.ones((1, 32, 256, 128), np.float32)
    apply(Rotary(head_dim=128), q, positions=np.arange(256))
    assert without_tables == [None]


def test_what_a_call_makes_of_positions_lives_until_it_is_done():
    """Freed memory of this size goes back to the system: who reads it is ended by a signal."""
    script = """
import numpy as np
from rotary import Rotary, apply, cos_sin, rotate
spec, at = Rotary(head_dim=128), np.arange(1900)[None]
x = np.random.default_rng(0).standard_normal((1, 1900, 1, 128), np.float32)
got = apply(spec, x, positions=at, seq_dim=1)
np.testing.assert_array_equal(got, rotate(x, *cos_sin(spec, at), spec, seq_dim=1))
"""
    alone(script, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "4096"})
