"""Faults and what is expected of them: a clear error or the right result, never silence.

Every fault is tried for both libraries; what the shared kernel suite and the torch suite already
hold (NaN, empty and strided inputs, autograd, compiled code) is not repeated here.
"""

import re
import sys
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch

import rotary
from rotary import Rotary

rotate = partial(rotary.rotate, layout="half")
SPEC = Rotary(head_dim=8)
MROPE = Rotary(head_dim=8, axes=(0, 1, 2, 0))


class Library:
    """The few calls a test needs, in one array library."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name

    def array(self, values):
        values = np.asarray(values)
        return values.copy() if self.name == "numpy" else torch.from_numpy(values.copy())

    def cast(self, array, dtype):
        if self.name == "torch":
            return array.to(getattr(torch, dtype))
        return array.astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))

    def x(self, *shape):
        return self.array(np.random.default_rng(0).standard_normal(shape).astype(np.float32))

    def tables(self, *shape):
        angles = np.random.default_rng(1).standard_normal(shape)
        return self.array(np.cos(angles).astype(np.float32)), self.array(
            np.sin(angles).astype(np.float32)
        )

    def strided(self, array, shape, strides, offset=0):
        """A view with strides and offset counted in elements."""
        if self.name == "torch":
            return torch.as_strided(array, shape, strides, offset)
        item = array.itemsize
        return np.lib.stride_tricks.as_strided(
            array.reshape(-1)[offset:], shape, [item * step for step in strides]
        )


LIBRARIES = [Library("numpy"), Library("torch")]


@pytest.fixture(params=LIBRARIES, ids=repr)
def lib(request):
    return request.param


def refused(kind, message, call, *arguments, untouched=(), **options):
    """`call` raises this kind of error with these words, and leaves `untouched` as it was."""
    before = [values(array) for array in untouched]
    with pytest.raises(kind, match=message):
        call(*arguments, **options)
    for array, was in zip(untouched, before, strict=True):
        same(array, was)


def values(array):
    return np.array(array.detach().numpy() if isinstance(array, torch.Tensor) else array)


def same(got, want):
    np.testing.assert_array_equal(values(got), values(want))


# --- 20: the type of x ---

X_TYPES = ["int8", "int32", "int64", "uint8", "bool", "complex64", "complex128"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", X_TYPES + FP8, ids="20-x-{}".format)
@pytest.mark.parametrize("positions", [None, [0, 1, 2]], ids=["rows", "row-numbers"])
def test_types_that_cannot_be_rotated(lib, dtype, positions):
    x = lib.cast(lib.x(2, 3, 4), dtype)
    message = rf"float32, float64, float16, bfloat16, got (torch\.)?{dtype}"
    refused(TypeError, message, rotate, x, *lib.tables(3, 2), positions=positions)
    q = lib.cast(lib.x(2, 3, 8), dtype)
    refused(TypeError, message, rotary.apply, SPEC, q)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"], ids="20-k-{}".format)
def test_q_and_k_of_two_types(lib, dtype):
    q, k = lib.x(3, 4), lib.cast(lib.x(3, 4), dtype)
    refused(TypeError, f"one dtype.*float32.*{dtype}", rotate, (q, k), *lib.tables(3, 2))


@pytest.mark.parametrize("dtype", ["object", ">f4", "S4"], ids="20-numpy-{}".format)
def test_types_only_numpy_has(dtype):
    x = np.zeros((3, 4), dtype)
    name = ">float32" if dtype == ">f4" else x.dtype.name
    tables = LIBRARIES[0].tables(3, 2)
    refused(TypeError, rf"float32.*got {re.escape(name)}", rotate, x, *tables)


# --- 22: nothing to rotate ---


@pytest.mark.parametrize("seq", [0, 1], ids="22-seq-{}".format)
@pytest.mark.parametrize("schedule", ["default", "dynamic"])
def test_a_row_without_tokens(lib, schedule, seq):
    params = {"factor": 2.0, "original_max_position_embeddings": 16}
    spec = Rotary(head_dim=8, schedule=schedule, params=params if schedule == "dynamic" else {})
    q, k = lib.x(2, 3, seq, 8), lib.x(2, 1, seq, 8)
    results = rotary.apply(spec, q, k)
    results += rotary.apply(spec, q, k, positions=lib.array(np.zeros((2, seq), np.int64)))
    for result, x in zip(results, (q, k, q, k), strict=True):
        assert tuple(result.shape) == tuple(x.shape)
        same(result, x)  # position 0 changes nothing


def test_22_no_array_at_all(lib):
    refused(ValueError, "at least one array", rotate, (), *lib.tables(3, 2))


# --- 24, 26: where it is written ---


def test_24_expanded_out(lib):
    x, (cos, sin) = lib.x(3, 4), lib.tables(3, 2)
    for strides in ((0, 1), (1, 0), (2, 1)):  # the last is a sliding window
        out = lib.strided(lib.x(12), (3, 4), strides)
        refused(ValueError, "share memory", rotate, x, cos, sin, out=out, untouched=[out])


@pytest.mark.parametrize("rows", [None, [0, 1, 2]], ids=["24-rows", "24-row-numbers"])
def test_out_that_overlaps_its_input(lib, rows):
    memory, (cos, sin) = lib.x(20), lib.tables(3, 2)
    x = lib.strided(memory, (3, 4), (4, 1))
    for shape, strides, offset in (
        ((3, 4), (4, 1), 1),  # one element further
        ((3, 4), (4, 1), 4),  # one row further
        ((3, 4), (1, 3), 0),  # the same elements in another order
    ):
        out = lib.strided(memory, shape, strides, offset)
        refused(ValueError, "overlaps", rotate, x, cos, sin, out=out, positions=rows,
                untouched=[memory])  # fmt: skip


def test_24_outputs_that_overlap_each_other_or_the_other_input(lib):
    q, k, (cos, sin) = lib.x(3, 4), lib.x(3, 4), lib.tables(3, 2)
    fresh = lib.x(3, 4)
    for outs in ((q, q), (fresh, fresh), (k, q), (fresh, q)):
        refused(ValueError, "overlaps", rotate, (q, k), cos, sin, out=outs,
                untouched=[q, k])  # fmt: skip


def test_24_out_that_overlaps_the_tables(lib):
    """The first rows written would change the angles of the last."""
    memory = lib.x(40)
    cos, sin = (lib.strided(memory, (3, 2), (2, 1), offset) for offset in (0, 6))
    for offset in (0, 6, 11):
        out = lib.strided(memory, (3, 4), (4, 1), offset)
        refused(ValueError, "overlap", rotate, lib.x(3, 4), cos, sin, out=out,
                untouched=[memory])  # fmt: skip


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", ">i8", ">u4", "int8", "float32"])
def test_positions_of_any_type_beside_out(dtype):
    x, positions = LIBRARIES[0].x(3, 8), np.arange(3).astype(dtype)
    want = rotary.apply(SPEC, x, positions=positions)
    same(rotary.apply(SPEC, x, positions=positions, out=x), want)


@pytest.mark.parametrize("dtype", ["uint32", "bool", "complex64", "float16"])
def test_types_that_are_refused_with_out_as_without(lib, dtype):
    """They were a KeyError of the comparison of memory."""
    wide = lib.array(np.arange(3))
    numbers = wide.to(getattr(torch, dtype)) if lib.name == "torch" else wide.astype(dtype)
    x = lib.x(3, 8)
    if dtype != "uint32":
        message = f"positions must be whole numbers, or float64 if fractional, got .*{dtype}"
        refused(TypeError, message, rotary.apply, SPEC, x, positions=numbers, out=x, untouched=[x])
    if dtype != "float16":
        cast = lib.cast(x, dtype)
        refused(TypeError, f"x must be one of .* got .*{dtype}", rotary.apply, SPEC, cast,
                positions=wide, out=cast)  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 8), (2, 3, 0, 8), (0, 3, 5, 8)], ids=str)
def test_nothing_is_written_in_place(lib, shape):
    """Arrays without elements have none that share memory, whatever their strides are."""
    x = lib.x(*shape)
    assert rotary.apply(SPEC, x, out=x) is x
    positions = lib.array(np.arange(shape[-2]))
    assert rotary.apply(SPEC, x, positions=positions, out=x) is x
    zeros = {"from_positions": positions, "to_positions": positions}
    assert rotary.rerotate(x, SPEC, **zeros, out=x) is x


@pytest.mark.parametrize("positions", [None, [0, 1, 2]], ids=["26-rows", "26-row-numbers"])
def test_read_only_out(positions):
    lib = LIBRARIES[0]
    out = np.zeros((3, 4), np.float32)
    out.flags.writeable = False
    refused(ValueError, "read-only", rotate, lib.x(3, 4), *lib.tables(3, 2), out=out,
            positions=positions, untouched=[out])  # fmt: skip


def test_24_out_of_another_form(lib):
    q, k, (cos, sin) = lib.x(2, 3, 4), lib.x(1, 3, 4), lib.tables(3, 2)
    for out in (lib.x(2, 4, 3), lib.x(3, 4), lib.x(1, 2, 3, 4)):
        refused(ValueError, r"out must be .*\(2, 3, 4\)", rotate, q, cos, sin, out=out)
    for dtype in ("float64", "float16"):
        out = lib.cast(lib.x(2, 3, 4), dtype)
        refused(ValueError, f"out must be .*{dtype}", rotate, q, cos, sin, out=out)
    for outs in ((q,), (q, k, k)):
        refused(ValueError, "out must hold one .* each of the 2", rotate, (q, k), cos, sin,
                out=outs)  # fmt: skip


# --- 29 to 35, 39: positions ---


@pytest.mark.parametrize("rows", [2, 4], ids="29-rows-{}".format)
def test_tables_of_another_length(lib, rows):
    refused(ValueError, f"{rows} against 3", rotate, lib.x(2, 3, 4), *lib.tables(rows, 2))
    refused(ValueError, f"{rows} against 3", rotate, lib.x(1, 2, 3, 4),
            *lib.tables(1, rows, 2))  # fmt: skip


@pytest.mark.parametrize("rows", [[0, 1, 5], [-1, 0, 4], [[0, 1, 2], [3, 4, 2**62]]],
                         ids=["29-too-far", "29-before-the-first", "29-huge"])  # fmt: skip
def test_row_numbers_outside_the_tables(lib, rows):
    x, tables = lib.x(2, 1, 3, 4), lib.tables(5, 2)
    low, high = np.min(rows), np.max(rows)
    message = f"from {low} to {high}, the tables have 5 rows"
    for positions in (rows, lib.array(rows)):
        refused(ValueError, message, rotate, x, *tables, positions=positions)
        out = lib.x(2, 1, 3, 4)
        refused(ValueError, message, rotate, x, *tables, positions=positions, out=out,
                untouched=[out])  # fmt: skip


def test_29_row_numbers_into_a_table_without_rows(lib):
    x, tables = lib.x(1, 1, 3, 4), lib.tables(0, 2)
    refused(ValueError, "have 0 rows", rotate, x, *tables, positions=[0, 0, 0])


def test_29_row_numbers_that_are_not_whole(lib):
    x, tables = lib.x(1, 1, 3, 4), lib.tables(5, 2)
    for rows in ([0.0, 1.0, 2.0], [True, False, True]):
        refused(TypeError, "whole numbers", rotate, x, *tables, positions=lib.array(rows))


def test_30_negative_positions(lib):
    positions = lib.array([0, -3])
    refused(ValueError, "got -3; pass allow_negative=True", rotary.cos_sin, SPEC, positions)
    back, forth = (
        rotary.cos_sin(SPEC, p, allow_negative=True) for p in (positions, lib.array([0, 3]))
    )
    # 1.5e-7: what is promised of cos and sin
    np.testing.assert_allclose(values(back[0]), values(forth[0]), rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(values(back[1]), -values(forth[1]), rtol=0, atol=1.5e-7)


def test_31_positions_beyond_32_and_53_bits(lib):
    far = [2**31, 2**32, 2**53, 2**53 + 1, 2**62, 2**63 - 1]
    turns = rotary.turns(SPEC)
    cos, sin = rotary.cos_sin(SPEC, lib.array(np.array(far)))
    for row, position in enumerate(far):
        radians = [(position * int(t)) % 2**64 / 2**64 * 2 * np.pi for t in turns]
        # 1.5e-7: two units of float32 in the last place
        np.testing.assert_allclose(values(cos)[row], np.cos(radians), rtol=0, atol=1.5e-7)
        np.testing.assert_allclose(values(sin)[row], np.sin(radians), rtol=0, atol=1.5e-7)


def test_33_float32_positions_with_holes(lib):
    near, far = (lib.array(np.array([n, 0.5], np.float32)) for n in (2**24, 2**24 + 2))
    rotary.cos_sin(SPEC, near)
    with pytest.warns(UserWarning, match="float32 cannot hold every position"):
        rotary.cos_sin(SPEC, far)


@pytest.mark.parametrize(
    ("shape", "table"),
    [
        ((2, 3, 5, 4), (2, 3, 5, 2, 2)),
        ((3, 4), (3, 3, 2)),
        ((2, 3, 5, 3, 4), (2, 3, 2)),
        ((2, 3, 5, 3, 4), (2, 5, 3, 2)),
    ],
    ids=["34-too-many-axes", "34-more-than-x", "34-batch-of-5-D", "34-batch-and-heads-of-5-D"],
)
def test_tables_whose_axes_could_mean_anything(lib, shape, table):
    refused(ValueError, "unclear which belong together", rotate, lib.x(*shape), *lib.tables(*table))


def test_34_equal_sizes_are_told_apart_by_their_place(lib):
    """With batch = heads = seq and a seq_dim, an axis is what its place says."""
    x, (cos, sin) = lib.x(4, 4, 4, 8), lib.tables(4, 4, 4)
    heads_first = partial(rotate, seq_dim=-2)
    per_batch = heads_first(x, cos, sin)
    per_token = heads_first(x, cos[0], sin[0])
    heads_last = rotate(x, cos, sin, seq_dim=-3)
    for b in range(4):
        same(per_batch[b], heads_first(x[b], cos[b], sin[b]))
        same(per_token[b], heads_first(x[b], cos[0], sin[0]))
        same(heads_last[b], rotate(x[b], cos[b], sin[b], seq_dim=0))
    rows = lib.array([[0, 1, 2, 3]] * 3 + [[3, 2, 1, 0]])
    last = heads_first(x, cos[0], sin[0], positions=rows)[3]
    same(last, heads_first(x[3], cos[0], sin[0], positions=[3, 2, 1, 0]))


@pytest.mark.parametrize("q", [(2, 5, 8), (2, 1, 5, 8)], ids=["35-3-D", "35-4-D"])
@pytest.mark.parametrize("positions", [(3, 2, 5), (1, 2, 1, 5)], ids="35-{}".format)
def test_positions_of_several_axes_for_a_spec_of_one(lib, q, positions):
    positions = lib.array(np.zeros(positions, np.int64))
    refused(ValueError, r"positions must be \(seq\)", rotary.apply, SPEC, lib.x(*q),
            positions=positions)  # fmt: skip


def test_35_positions_of_a_spec_of_several_axes(lib):
    q = lib.x(2, 1, 5, 8)
    refused(ValueError, "3 axes needs positions", rotary.apply, MROPE, q)
    first = lib.array(np.zeros((3, 2, 5), np.int64))  # transformers puts the axes first
    refused(ValueError, "move the axes last", rotary.cos_sin, MROPE, first)
    message = r"\(\.\.\., seq, 3\) for 3 axes, got shape \(3, 2, 5\); move the axes last"
    refused(ValueError, message, rotary.apply, MROPE, q, positions=first)
    refused(ValueError, r"\(\.\.\., seq, 3\)", rotary.cos_sin, MROPE, lib.array([1, 2, 3]))
    refused(ValueError, r"\(\.\.\., seq\)", rotary.cos_sin, SPEC, lib.array(3))


# --- 36, 37: shapes of tables and of x ---


def test_36_full_width_tables(lib):
    x = lib.x(2, 3, 8)
    refused(ValueError, "looks full width", rotate, x, *lib.tables(3, 8))
    # as wide as the head of a partial rotation, or as its slice
    for start, width in ((0, 6), (2, 6)):
        refused(ValueError, "half width", rotate, x, *lib.tables(3, width), rotary_dim=6,
                start=start)  # fmt: skip


def test_36_partial_rotation_has_to_be_said(lib):
    x, tables = lib.x(2, 3, 8), lib.tables(3, 2)
    refused(ValueError, "without a spec, rotary_dim=4", rotate, x, *tables)
    refused(ValueError, "without a spec, rotary_dim=4", rotate, x, *tables, start=4)
    refused(ValueError, "rotary_dim is 6, but cos has 2", rotate, x, *tables, rotary_dim=6)
    for start in (-1, 5, 8):
        refused(ValueError, "channels", rotate, x, *tables, rotary_dim=4, start=start)
    assert tuple(rotate(x, *tables, rotary_dim=4, start=4).shape) == (2, 3, 8)


def test_36_cos_and_sin_that_differ(lib):
    x, (cos, sin) = lib.x(3, 8), lib.tables(3, 4)
    for other in (sin[:2], sin[:, :2], lib.cast(sin, "float64")):
        refused(ValueError, "must have one shape", rotate, x, cos, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64"], ids="36-tables-{}".format)
def test_tables_of_another_type(lib, dtype):
    tables = [lib.cast(table, dtype) for table in lib.tables(3, 4)]
    refused(TypeError, f"must be float32, got .*{dtype}", rotate, lib.x(3, 8), *tables)


@pytest.mark.parametrize("shape", [(), (8,)], ids=["37-0-D", "37-1-D"])
def test_x_without_a_sequence(lib, shape):
    x = lib.x(*shape)
    refused(ValueError, "2 axes or more", rotate, x, *lib.tables(1, 4))
    refused(ValueError, "axes|head_dim", rotary.apply, SPEC, x)


def test_37_tables_without_rows(lib):
    for shape in ((), (4,)):
        refused(ValueError, "cos|tables", rotate, lib.x(3, 8), *lib.tables(*shape))


# --- arrays of two libraries, or of none that is known ---


class Tensor:
    """An array of a library this package has not heard of."""

    shape, ndim, dtype = (3, 8), 2, "float32"


def test_unknown_libraries(lib):
    tables = lib.tables(3, 4)
    known = "cannot rotate a .*Tensor; array libraries known: .*numpy.*torch"
    refused(TypeError, known, rotate, Tensor(), *tables)
    refused(TypeError, known, rotate, (Tensor(), lib.x(3, 8)), *tables)
    refused(TypeError, known, rotary.apply, SPEC, Tensor())
    refused(TypeError, known, rotary.cos_sin, SPEC, Tensor())
    for x in ([[1.0] * 8] * 3, 1.0, "x", None):
        refused(TypeError, "array libraries known", rotate, (x,), *tables)
        refused(TypeError, "array libraries known", rotary.apply, SPEC, x)


def test_arrays_of_two_libraries(lib):
    other = LIBRARIES[lib.name == "numpy"]
    x, (cos, sin), strange = lib.x(3, 8), lib.tables(3, 4), other.x(3, 8)
    message = "one library"
    for arguments in (
        (x, *other.tables(3, 4)),
        (x, cos, other.tables(3, 4)[1]),
        ((x, strange), cos, sin),
        ((x, Tensor()), cos, sin),
        (x, cos, [[1.0] * 4] * 3),
    ):
        refused(TypeError, message, rotate, *arguments)
        refused(TypeError, message, rotate, *arguments, positions=[0, 1, 2])
    for out in (strange, Tensor()):
        refused(TypeError, message, rotate, x, cos, sin, out=out)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("patch", "rotary.integrations.transformers"),
        ("unpatch", "rotary.integrations.transformers"),
        ("from_model", "rotary.model"),
        ("nn", "rotary.nn"),
    ],
)
def test_72_torch_is_missing(name, file, monkeypatch):
    monkeypatch.delitem(sys.modules, file, raising=False)
    monkeypatch.delitem(vars(rotary), name, raising=False)  # as before the first use
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError) as caught:
        getattr(rotary, name)
    assert str(caught.value) == f"rotary.{name} needs torch: pip install torch"
