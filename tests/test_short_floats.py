"""Floats of 16 and 8 bits in the compiled loops: every code, and every way to round to one, beside
ml_dtypes; also as for processors without the instructions."""

import contextlib
import io
import os
import re

import numpy as np
import pytest
from programs import alone

pytest.importorskip("numba")
import ml_dtypes
import numba
from numba import njit

import rotary
from rotary.kernels.cpu import short_floats
from rotary.kernels.cpu import vectors as vec
from rotary.kernels.cpu.fused_rows import square_rows
from rotary.kernels.cpu.instructions import INT, TAG, emitted

KINDS = {
    "bfloat16": (np.uint16(0), np.uint16, ml_dtypes.bfloat16),
    "float16": (np.int16(0), np.uint16, np.float16),
    "float8_e4m3fn": (np.uint8(0), np.uint8, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (np.bool_(False), np.uint8, ml_dtypes.float8_e5m2),
}
WAYS = {
    "whole numbers": [], "float16": ["f16c"], "packing": ["f16c", "avx2"],
    "lookups": ["f16c", "avx2", "avx512bw", "avx512vbmi"],
    "products": ["f16c", "avx2", "avx512bw", "avx512vbmi", "avx512vnni"],
}  # fmt: skip
HERE = [feature for feature in WAYS["products"] if short_floats.compiles_for(feature, False)]
RESTS = [0, 1, 15, 16, 17, 31, 33, 63, 127]  # behind vectors of 128: every number of lanes


@pytest.fixture(params=[name for name, need in WAYS.items() if set(need) <= set(HERE)])
def loops(request, monkeypatch):
    """Codes to float32, float32 to codes, and to those of x and -x in turn; of a tag, two
    addresses and a count."""
    has = WAYS[request.param]
    monkeypatch.setattr(short_floats, "compiles_for", lambda feature, _: feature in has)

    def walk(body_of):
        @emitted(TAG, INT, INT, INT)
        def each(b, tag, source, target, count):
            element = vec.ELEMENTS[tag]
            widths = 2 * element.lanes[0], *element.lanes  # as many as in interleaved pairs
            vec.each(b, count, widths, body_of(b, tag, element.size, source, target))

        return njit(lambda tag, source, target, count: each(tag, source, target, count))

    def decode(b, tag, size, source, target):
        def body(index, lanes):
            value = vec.load_wide(b, tag, vec.at(b, source, index, size), lanes)
            vec.store(b, value, vec.at(b, target, index, 4))

        return body

    def encode(b, tag, size, source, target):
        def body(index, lanes):
            value = vec.load(b, vec.F32, vec.at(b, source, index, 4), lanes)
            vec.store_wide(b, tag, vec.at(b, target, index, size), value)

        return body

    def encode_both(b, tag, size, source, target):
        def body(index, lanes):
            value = vec.load(b, vec.F32, vec.at(b, source, index, 4), lanes)
            both = value, b.fsub(vec.constant(vec.F32, lanes, -0.0), value)
            vec.store_pairs(b, tag, target, index, vec.NONE, *both, "interleaved", False)

        return body

    return walk(decode), walk(encode), walk(encode_both)


@pytest.mark.parametrize("name", KINDS)
def test_every_code_is_its_number(loops, name):
    tag, code, dtype = KINDS[name]
    count = 1 << 8 * code().itemsize
    for rest in RESTS:
        codes = (np.arange(count + rest) % count).astype(code)
        found = np.zeros(len(codes), np.float32)
        loops[0](tag, codes.ctypes.data, found.ctypes.data, len(codes))
        with np.errstate(invalid="ignore"):  # on ARM, NumPy warns of NaNs that signal
            wanted = codes.view(dtype).astype(np.float32)
        np.testing.assert_array_equal(found, wanted, f"{rest} more than vectors hold")
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted), f"{rest} more")


@pytest.mark.parametrize("name", KINDS)
def test_every_number_is_rounded_once_to_the_nearest(loops, name):
    """All upper halves of a float32 with the lower halves at and beside a tie, and random ones."""
    tag, code, dtype = KINDS[name]
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = 0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0xFFFF
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    words = np.concatenate([*(halves + low for low in lows), random])
    most = np.inf if name.endswith("16") else float(ml_dtypes.finfo(dtype).max)
    for count in (len(words), *(128 + rest for rest in RESTS)):
        x = words[:: len(words) // count].view(np.float32)[:count].copy()
        x.view(np.uint32)[np.isnan(x)] |= 1 << 22  # quiet, as results of arithmetic are
        found, both = np.zeros(count, code), np.zeros((count, 2), code)
        loops[1](tag, x.ctypes.data, found.ctypes.data, count)
        plain = x.copy()
        if name == "bfloat16" and short_floats.compiles_for("avx512vnni", False):
            plain.view(np.uint32)[np.isnan(x)] &= 0xFFFF0000  # as those of arithmetic are
        loops[2](tag, plain.ctypes.data, both.ctypes.data, count)
        is_number = ~np.isnan(x)
        np.testing.assert_array_equal(both[is_number, 0], found[is_number])
        sign = 1 << 8 * code().itemsize - 1
        np.testing.assert_array_equal((both[:, 1] ^ both[:, 0])[is_number], sign)
        with np.errstate(over="ignore"):
            wanted = np.where(np.isnan(x), 0, np.clip(x, -most, most)).astype(dtype).view(code)
        np.testing.assert_array_equal(found[is_number], wanted[is_number])
        for signed, of in ((found, x), (both[:, 0].copy(), x), (both[:, 1].copy(), -x)):
            assert np.isnan(signed[~is_number].view(dtype).astype(np.float32)).all()
            np.testing.assert_array_equal(np.signbit(signed.view(dtype)), np.signbit(of))


SETTINGS = [
    ({}, None),
    ({"CPU_FEATURES": ""}, False),
    ({"CPU_FEATURES": "+avx2,+f16c,+avx512vbmi"}, True),
    ({"CPU_FEATURES": "-avx512vbmi,-f16c"}, False),
    ({"ENABLE_AVX": 0}, False),
]


@pytest.mark.parametrize("feature", ["f16c", "avx512vbmi"])
@pytest.mark.parametrize(("settings", "wanted"), SETTINGS)
def test_only_what_numba_compiles_for_is_used(monkeypatch, feature, settings, wanted):
    if wanted is None:
        wanted = feature in HERE
    for name, value in settings.items():
        monkeypatch.setattr(numba.config, name, value)
    assert short_floats.compiles_for(feature, False) is wanted


ROTATION = """
import ml_dtypes, numpy as np, rotary
spec, positions = rotary.Rotary(64), np.arange(9)
x = np.random.default_rng(0).standard_normal((4, 9, 64))
tables = rotary.cos_sin(spec, positions)
y = rotary.rotate(x.astype(np.float16), *tables, spec, seq_dim=-2)
print(y.astype(np.float64).sum().hex())
cache = x.astype(ml_dtypes.float8_e4m3fn)
y = rotary.rerotate(cache, spec, shift=3, seq_dim=-2)
print(y.astype(np.float64).sum().hex())
"""
AVX2 = "avx", "avx2", "fma", "f16c", "bmi", "bmi2", "sse4.2", "ssse3", "popcnt", "lzcnt", "movbe"
AVX512 = *AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"
BFLOAT16 = """
import hashlib
import ml_dtypes, numpy as np, rotary
from rotary.kernels.cpu import fused_loops
rotated, fused = hashlib.sha256(), hashlib.sha256()
for layout in ("half", "interleaved"):
    spec = rotary.Rotary(head_dim=256, rotary_dim=226, layout=layout)
    x = np.random.default_rng(0).standard_normal((1, 4, 9, 256)).astype(ml_dtypes.bfloat16)
    w = x[0, 0, 0].astype(np.float32)
    rotated.update(rotary.apply(spec, x).view(np.uint16))
    for norm in (rotary.Norm(w, w, 1e-6), rotary.Norm(np.tile(w, 4), np.tile(w, 4), 1e-6)):
        y, _, _ = rotary.fused(x, x, None, spec, np.arange(9), norm=norm, seq_dim=-2)
        fused.update(y.view(np.uint16))
assert fused_loops.loop.cache_info().currsize  # it was not the formula
print(rotated.hexdigest(), fused.hexdigest())
"""
OTHER_REGISTERS = """
import sys
from rotary.kernels.cpu import compiled, vectors
compiled._keep = lambda *arguments: None  # nothing of it is kept on disk
vectors._HELD = int(sys.argv[1])
"""
NORM = """
import numpy as np, rotary
x = np.random.default_rng(0).standard_normal((1, 4, 9, 256), np.float32)
w, spec = x[0, 0, 0].copy(), rotary.Rotary(head_dim=256, rotary_dim=224)
y, _, _ = rotary.fused(x, x, None, spec, np.arange(9), norm=rotary.Norm(w, w, 1e-6), seq_dim=-2)
print(y.astype(np.float64).sum().hex(), abs(y.astype(np.float64)).sum().hex())
from rotary.kernels.cpu import fused_loops
assert fused_loops.loop.cache_info().currsize  # it was not the formula
"""
GRADIENTS = """
import torch, rotary
torch.manual_seed(0)
x, w = torch.randn(1, 9, 4, 256).requires_grad_(), torch.randn(256).requires_grad_()
spec, norm = rotary.Rotary(head_dim=256, rotary_dim=224), rotary.Norm(w, w, 1e-6)
y, _, _ = rotary.fused(x, x, None, spec, torch.arange(9), norm=norm, seq_dim=1)
from rotary.kernels.cpu import fused_loops
before = fused_loops.loop.cache_info().currsize
{settings}
for grad in torch.autograd.grad(y, (x, w), torch.randn(y.shape)):
    print(grad.double().sum().item().hex(), grad.double().abs().sum().item().hex())
assert fused_loops.loop.cache_info().currsize > before or not {settings!r}
"""


def printed_here(code):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        exec(code, {})
    return text.getvalue().split()


def printed(code, *words, **settings):
    return alone(code, *words, env=os.environ | settings).split()


def test_processors_without_the_instructions_give_the_same_numbers():
    """`NUMBA_CPU_NAME=generic` is how machines of several kinds share what Numba compiled."""
    here = printed_here(ROTATION)
    assert len(here) == 2
    assert printed(ROTATION, NUMBA_CPU_NAME="generic") == here


@pytest.mark.skipif("avx512vnni" not in HERE, reason="this processor has not all of them")
@pytest.mark.parametrize("name", ["packing", "lookups"])
def test_older_processors_give_the_same_numbers_in_bfloat16(name):
    """AVX2 alone and AVX-512 without VNNI hold a row of bfloat16 in other orders."""
    added = AVX512 if name == "lookups" else AVX2
    features = ",".join(f"+{feature}" for feature in added)
    here = printed_here(BFLOAT16)
    assert len(here) == 2
    assert printed(BFLOAT16, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features) == here


def test_processors_with_other_registers_give_the_same_numbers():
    here = printed_here(NORM)
    assert len(here) == 2
    assert printed(OTHER_REGISTERS + NORM, "64" if vec._HELD == 256 else "256") == here


def test_processors_with_other_registers_give_the_same_gradients():
    """Only the backward pass is compiled again: the settings change after the forward pass."""
    pytest.importorskip("torch")
    here = printed_here(GRADIENTS.format(settings=""))
    assert len(here) == 4
    code = GRADIENTS.format(settings=OTHER_REGISTERS)
    assert printed(code, "64" if vec._HELD == 256 else "256") == here


@pytest.mark.skipif("f16c" not in HERE, reason="stores of other processors have other names")
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.uint16, np.int16])
def test_stores_that_are_to_bypass_the_caches_do(kind):
    """LLVM converted to float16 and stored in one instruction, which knows no such store."""

    @emitted(TAG, INT, INT)
    def stream(b, tag, source, target):
        value = vec.load(b, vec.ELEMENTS[tag].real, source, vec.ELEMENTS[tag].lanes[0])
        vec.store_wide(b, tag, target, value, True)

    walk = njit(lambda tag, source, target: stream(tag, source, target))
    walk.compile((numba.typeof(kind(0)), INT, INT))
    (assembly,) = walk.inspect_asm().values()
    stored = vec.ELEMENTS[numba.typeof(kind(0))].lanes[0] * kind(0).itemsize
    assert len(re.findall(r"\bv?movnt\w+\s+%\w+, ", assembly)) >= stored // 64
    assert not re.search(r"vcvtps2ph\s+\S+ %\w+, \d*\(", assembly)


NANS = [0x7F800001, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("bits", NANS)
def test_a_nan_of_any_bits_stays_one(bits, layout, dtype):
    """In a table, in a weight, and in x itself: the next number above it may be a 0."""
    spec = rotary.Rotary(head_dim=256, rotary_dim=224, layout=layout)  # vectors of each length
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 256)).astype(dtype)
    tables = rotary.cos_sin(spec, np.arange(2))
    turned = slice(0, 224)
    nans = np.full(tables[0].shape, bits, np.uint32).view(np.float32)
    for cos, sin in ((nans, tables[1]), (tables[0], nans)):
        got = rotary.rotate(x, cos, sin, spec, seq_dim=-2)
        assert np.isnan(got[..., turned].astype(np.float32)).all()
    for width in (256, 3 * 256):  # of each head, and of all of them
        weight = np.full(width, bits, np.uint32).view(np.float32)
        got, _, _ = rotary.fused(x, None, None, spec, tables=tables, seq_dim=-2,
                                 norm=rotary.Norm(weight, None, 1e-6))  # fmt: skip
        assert np.isnan(got.astype(np.float32)).all()
    x[...] = np.uint16(bits >> 16 | 0x40).view(dtype)
    assert np.isnan(
        rotary.rotate(x, *tables, spec, seq_dim=-2)[..., turned].astype(np.float32)
    ).all()


@pytest.mark.parametrize(("tag", "is_exact"), [(np.float32(0), False), (np.uint16(0), True)])
def test_only_exact_squares_may_be_fused_with_their_additions(tag, is_exact):
    """LLVM for ARM fused those of float32 because the addition allowed it: other bits than x86."""
    run = njit(
        lambda tag, x, step, width, count, sums: square_rows(tag, x, step, width, count, sums)
    )
    run.compile((numba.typeof(tag), *[numba.int64] * 5))
    (code,) = run.inspect_llvm().values()
    assert ("contract" in code) == is_exact
