"""float8 in the compiled loops: every code, and every way to round to one, beside ml_dtypes."""

import numpy as np
import pytest

pytest.importorskip("numba")
import ml_dtypes
from numba import njit, types
from numba.extending import intrinsic

from rotary.kernels import float8
from rotary.kernels import vectors as vec

KINDS = {
    "float8_e4m3fn": (np.uint8(0), ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (np.bool_(False), ml_dtypes.float8_e5m2),
}
LOOKUPS = [False] + [True] * float8._has_lookup()
RESTS = [0, 1, 15, 16, 17, 31, 33, 63]  # behind vectors of 64: every number of lanes


@pytest.fixture(params=LOOKUPS, ids=lambda is_looked_up: "lookup" if is_looked_up else "arithmetic")
def loops(request, monkeypatch):
    """Codes to float32, and float32 to codes; of a tag, two addresses and a count."""
    monkeypatch.setattr(float8, "_has_lookup", lambda: request.param)

    def walk(body_of):
        @intrinsic
        def each(context, tag, source, target, count):
            def generate(context, b, signature, arguments):
                _, source, target, count = arguments
                body = body_of(b, tag, source, target)
                vec.each(b, count, vec.ELEMENTS[tag].lanes, body)
                return context.get_dummy_value()

            return types.void(tag, types.int64, types.int64, types.int64), generate

        return njit(lambda tag, source, target, count: each(tag, source, target, count))

    def decode(b, tag, source, target):
        def body(index, lanes):
            value = vec.load_wide(b, tag, vec.at(b, source, index, 1), lanes)
            vec.store(b, value, vec.at(b, target, index, 4))

        return body

    def encode(b, tag, source, target):
        def body(index, lanes):
            value = vec.load(b, vec.F32, vec.at(b, source, index, 4), lanes)
            vec.store_wide(b, tag, vec.at(b, target, index, 1), value)

        return body

    return walk(decode), walk(encode)


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("name", KINDS)
def test_every_code_is_the_number_of_ml_dtypes(loops, name, rest):
    tag, dtype = KINDS[name]
    codes = (np.arange(256 + rest) % 256).astype(np.uint8)
    found = np.zeros(len(codes), np.float32)
    loops[0](tag, codes.ctypes.data, found.ctypes.data, len(codes))
    wanted = codes.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize("name", KINDS)
def test_every_number_is_rounded_once_to_the_nearest(loops, name):
    """All upper halves of a float32 with the lower halves at and beside a tie, and random ones."""
    tag, dtype = KINDS[name]
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    words = np.concatenate([*(halves + low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)), random])
    for count in (len(words), *(64 + rest for rest in RESTS)):
        x = words[:: len(words) // count].view(np.float32)[:count].copy()
        found = np.zeros(count, np.uint8)
        loops[1](tag, x.ctypes.data, found.ctypes.data, count)
        most = float(ml_dtypes.finfo(dtype).max)
        numbers = np.where(np.isnan(x), 0, np.clip(x, -most, most)).astype(dtype)
        codes = np.where(np.isnan(x), 0x7F, numbers.view(np.uint8) & 0x7F)
        wanted = codes | np.signbit(x) * 0x80
        np.testing.assert_array_equal(found, wanted)


def test_another_processor_is_compiled_without_lookups(monkeypatch):
    import numba

    for name, value in {"CPU_NAME": "generic", "CPU_FEATURES": "", "ENABLE_AVX": 0}.items():
        with monkeypatch.context() as patched:
            patched.setattr(numba.config, name, value)
            assert not float8._has_lookup.__wrapped__()
