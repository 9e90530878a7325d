"""Arrays of GPU libraries that are not known: refused with a way to go on, and never read."""

import numpy as np
import pytest
import torch

import rotary

SPEC = rotary.Rotary(head_dim=4)


def stranger(module, name, **members):
    """An array of another library, as far as anybody can see; reading it fails."""

    def refuse(self, *_, **__):
        raise AssertionError("copied to the host")

    readers = ("__array__", "__float__", "__len__", "__iter__", "__getitem__", "tolist", "get")
    kind = type(name, (), {"__module__": module, **dict.fromkeys(readers, refuse), **members})
    kind.shape, kind.ndim, kind.dtype = (1, 2, 3, 4), 4, np.dtype(np.float32)
    return kind()


def on_gpu(self):
    raise AssertionError("copied to the host")


ARRAYS = {
    "cupy": stranger("cupy", "ndarray", __cuda_array_interface__=property(on_gpu)),
    "numba": stranger("numba.cuda.cudadrv.devicearray", "DeviceNDArray",
                      __cuda_array_interface__=property(on_gpu)),
}  # fmt: skip
LIBRARIES = {"numpy": np.asarray, "torch": lambda x: torch.from_numpy(np.asarray(x))}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_error_names_the_known_libraries_and_a_way_on(name):
    strange = ARRAYS[name]
    table = np.ones((3, 2), np.float32)
    kind = f"{type(strange).__module__}.{type(strange).__qualname__}"
    wanted = (
        rf"{kind}; array libraries known: numpy, torch, jax, mlx; "
        r"go on with torch\.from_dlpack\(x\)"
    )
    for call in (
        lambda: rotary.rotate(strange, table, table, layout="half"),
        lambda: rotary.rotate((strange, strange), strange, strange, layout="half"),
        lambda: rotary.apply(SPEC, strange),
        lambda: rotary.cos_sin(SPEC, strange),
    ):
        with pytest.raises(TypeError, match=wanted):
            call()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ARRAYS)
def test_one_among_arrays_of_the_host_is_not_copied(name, library):
    strange, make = ARRAYS[name], LIBRARIES[library]
    x, table = make(np.ones((1, 2, 3, 4), np.float32)), make(np.ones((3, 2), np.float32))
    for call in (
        lambda: rotary.rotate(x, strange, strange, layout="half"),
        lambda: rotary.rotate((x, strange), table, table, layout="half"),
        lambda: rotary.rotate(x, table, table, out=strange, layout="half"),
        lambda: rotary.rotate(x, table, table, positions=strange, layout="half"),
        lambda: rotary.apply(SPEC, x, positions=strange),
        lambda: rotary.apply(SPEC, x, strange),
    ):
        with pytest.raises(TypeError, match=r"go on with torch\.from_dlpack\(x\)"):
            call()


def test_the_way_on_leads_there():
    """`from_dlpack` shares the memory: what is rotated in place is seen by the other library."""
    x = np.ones((1, 2, 3, 4), np.float32)
    want = rotary.apply(SPEC, x)
    shared = torch.from_dlpack(x)
    rotary.apply(SPEC, shared, out=shared)
    assert np.array_equal(x, want)


@pytest.mark.parametrize("library", LIBRARIES)
def test_positions_of_numpy_and_of_torch_are_taken_by_either(library):
    x = LIBRARIES[library](np.ones((1, 2, 3, 4), np.float32))
    want = rotary.apply(SPEC, np.ones((1, 2, 3, 4), np.float32), positions=np.array([4, 5, 6]))
    for make in (np.asarray, torch.tensor, list, tuple):
        assert np.array_equal(rotary.apply(SPEC, x, positions=make([4, 5, 6])), want)


@pytest.mark.parametrize("library", LIBRARIES)
def test_positions_of_numpy_beyond_int64_are_refused_by_either(library):
    x, far = LIBRARIES[library](np.ones((1, 4), np.float32)), np.array([2**63], np.uint64)
    with pytest.raises(ValueError, match=f"^positions must fit in int64, got {2**63}$"):
        rotary.apply(SPEC, x, positions=far)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32"])
def test_positions_may_be_unsigned_tensors(kind):
    torch = pytest.importorskip("torch")
    x, ids = torch.ones(1, 2, 3, 4), torch.tensor([4, 1, 6])
    tables, given = rotary.cos_sin(SPEC, torch.arange(9)), ids.to(getattr(torch, kind))
    want = rotary.apply(SPEC, x, positions=ids)
    assert torch.equal(rotary.apply(SPEC, x, positions=given), want)
    rotated = rotary.rotate(x, *tables, SPEC, positions=given, seq_dim=-2)
    torch.testing.assert_close(rotated, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", ">i8", "<i2"])
def test_arrays_of_numpy_are_taken_whatever_their_form(library, kind):
    """Backwards in memory, without a sign or of another byte order."""
    x, numbers = np.ones((1, 2, 3, 4), np.float32), np.array([4, 1, 6])
    given = numbers[::-1].astype(kind)[::-1]
    tables = rotary.cos_sin(SPEC, np.arange(9))
    scale = np.array([2.0, 4.0])[::-1]

    def results(like, ids, by):
        q = like(x)
        cos, sin = (like(table) for table in tables)
        memory = like(np.zeros((9, 2, 4), np.float32))
        cache = rotary.KVCache(memory, None, ids, by)
        yield rotary.apply(SPEC, q, positions=ids)
        yield rotary.rotate(q, cos, sin, SPEC, positions=ids, seq_dim=-2)
        yield rotary.fused(q, None, None, SPEC, ids, scale=by)[0]
        new = rotary.fused(q, q, None, SPEC, ids, cache=cache, seq_dim=-2)[1]
        yield memory if new is None else new

    got = results(LIBRARIES[library], given, scale)
    for y, want in zip(got, results(np.array, numbers, scale.copy()), strict=True):
        np.testing.assert_allclose(np.asarray(y), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_empty_list_holds_whole_numbers(library):
    like = LIBRARIES[library]
    q, memory = like(np.ones((2, 0, 4), np.float32)), like(np.zeros((9, 2, 4), np.float32))
    tables = [like(table) for table in rotary.cos_sin(SPEC, np.arange(9))]
    rotary.fused(q, q, None, SPEC, cache=rotary.KVCache(memory, None, []))
    assert rotary.rotate(q, *tables, SPEC, positions=[]).shape == (2, 0, 4)
    for empty in (np.empty(0), np.empty(0, np.float32)):
        with pytest.raises(TypeError, match=r"slots must be whole numbers, got .*float"):
            rotary.fused(q, q, None, SPEC, cache=rotary.KVCache(memory, None, empty))


@pytest.mark.parametrize("library", LIBRARIES)
def test_another_dtype_of_v_is_said_to_be_one(library):
    like = LIBRARIES[library]
    q, v = like(np.ones((2, 3, 4), np.float32)), like(np.ones((2, 3, 4), np.float16))
    with pytest.raises(TypeError, match=r"^q, k and v must have one dtype, got .*32 and .*16$"):
        rotary.fused(q, q, v, SPEC)
