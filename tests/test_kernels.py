"""One suite for all kernels: the same cases, the same bits."""

import ctypes
import importlib.util
import itertools
import math
import mmap
import sys

import numpy as np
import pytest
from grids import pairwise
from kernel_cases import (
    CASES,
    DTYPES,
    LAYOUTS,
    MORE_CASES,
    Case,
    channels,
    numbers,
    operands,
    tables,
    to_numpy,
    to_torch,
)
from libraries import enable_x64, if_installed, older_loops

import rotary
from rotary.kernels import numpy as reference
from rotary.kernels.geometry import Geometry, Options, geometry_of_arrays
from rotary.kernels.memory import Block

jax = if_installed("jax")
ml_dtypes = if_installed("ml_dtypes")
cpu = pytest.importorskip("rotary.kernels.cpu.kernel", reason="needs numba")
jobs = pytest.importorskip("rotary.kernels.cpu.jobs", reason="needs numba")
pool = pytest.importorskip("rotary.kernels.cpu.threads", reason="needs numba")
pytest.importorskip("numba.np.arrayobj")  # Numba learns of np.empty before it is poisoned
torch = if_installed("torch")
jax_kernel = if_installed("rotary.kernels.jax.kernel")
torch_kernel = if_installed("rotary.kernels.torch.route")

WAYS = [(*pair, conjugate) for pair in LAYOUTS for conjugate in (False, True)]


# --- what every kernel is compared with: the formula of the paper, written out here ---


def spread(table, x, seq_dim):
    """A table with one axis for each axis of x."""
    leading, axis = x.ndim - 1, seq_dim % x.ndim
    if table.ndim == leading + 1:
        return table
    kept = [axis] if table.ndim == 2 else [min(i for i in range(leading) if i != axis), axis]
    order = np.argsort(kept)
    table = table.transpose(*order, table.ndim - 1)
    return np.expand_dims(table, [i for i in range(leading) if i not in kept])


def formula(x, cos, sin, options, work=None):
    """x cos - y sin and y cos + x sin in the type `work`, rounded once to the type of x."""
    work = work or (np.float64 if x.dtype == np.float64 else np.float32)
    read = channels(options.layout, cos.shape[-1], options.start)
    write = channels(options.out_layout or options.layout, cos.shape[-1], options.start)
    u, v = (x[..., index].astype(work) for index in read)
    c, s = (spread(table, x, options.seq_dim).astype(work) for table in (cos, sin))
    s = -s if options.conjugate else s
    y = x.astype(work)
    y[..., write[0]], y[..., write[1]] = u * c - v * s, v * c + u * s
    return y


def assert_bits(got, want):
    """Equal shape, type and bits; a NaN equals any NaN."""
    assert isinstance(got, np.ndarray)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    unsigned = f"u{want.dtype.itemsize}"
    ours, theirs = (np.ascontiguousarray(a).view(unsigned) for a in (got, want))
    wrong = np.argwhere((ours != theirs) & ~(np.isnan(got) & np.isnan(want)))
    assert len(wrong) == 0, f"{len(wrong)} of {got.size} differ, first at {tuple(wrong[0])}"


# --- the kernels: (xs, cos, sin, rows, options, out) of NumPy arrays ---


def _cpu(xs, cos, sin, rows, options, out=None):
    tables = (cos, sin) if rows is None else (cos, sin, rows)
    results = cpu.quick((options,), lambda options: options, xs, tables, out)
    return cpu.rotate(xs, cos, sin, rows, options, out) if results is None else results


def _torch(xs, cos, sin, rows, options, out=None):
    xs, (cos, sin) = map(to_torch, xs), map(to_torch, (cos, sin))
    out = None if out is None else tuple(map(to_torch, out))
    results = torch_kernel.rotate(tuple(xs), cos, sin, rows, options, out)
    return tuple(map(to_numpy, results))


def _torch_formula(xs, cos, sin, rows, options):
    cos, sin = (to_torch(table).requires_grad_() for table in (cos, sin))
    results = torch_kernel.rotate(tuple(map(to_torch, xs)), cos, sin, rows, options, None)
    assert all(result.requires_grad for result in results)  # else another way was taken
    return tuple(map(to_numpy, results))


def _torch_operator(xs, cos, sin, rows, options, out=None):
    geometry = geometry_of_arrays(xs, cos, rows, options)
    rows = None if rows is None else torch.from_numpy(rows)
    tensors = [*map(to_torch, xs)], to_torch(cos), to_torch(sin), rows
    rest = torch_kernel.flat(geometry)
    if out is None:
        return tuple(map(to_numpy, torch.ops.rotary.rotate(*tensors, *rest)))
    torch.ops.rotary.rotate_out(*tensors, *rest, [*map(to_torch, out)])
    return tuple(out)


def _triton(xs, cos, sin, rows, options, out=None):
    """The code for GPUs, in Triton's interpreter."""
    geometry = geometry_of_arrays(xs, cos, rows, options)
    rows = None if rows is None else torch.from_numpy(rows)
    tensors = tuple(map(to_torch, xs)), to_torch(cos), to_torch(sin), rows
    out = None if out is None else tuple(map(to_torch, out))
    return tuple(map(to_numpy, interpreter.kernel.rotate(*tensors, geometry, out)))


def stored(kernel, y, dtype):
    """What a kernel makes of float32 or float64 numbers: rounded once to the type of x."""
    if kernel == "triton" and dtype == DTYPES["bfloat16"]:  # the interpreter cuts it off instead
        return (y.view(np.uint32) >> 16).astype(np.uint16).view(dtype)
    return y.astype(dtype)


# every operation is a loop of its own, so that no product and sum are rounded together
PLAIN_XLA = {"xla_backend_optimization_level": 0, "xla_disable_hlo_passes": "fusion"}


def _jax(xs, cos, sin, rows, options, out=None):
    """One program for a call: operation by operation, each would be compiled for each shape."""
    with enable_x64(True):
        xs = tuple(map(jax.numpy.asarray, xs))
        arguments = xs, *map(jax.numpy.asarray, (cos, sin))

        def call(xs, cos, sin):
            return jax_kernel.rotate(xs, cos, sin, rows, options, out)

        if hasattr(jax, "enable_x64"):
            call = (
                jax.jit(call).lower(*arguments).compile(compiler_options=PLAIN_XLA | older_loops())
            )
            return tuple(map(np.asarray, call(*arguments)))
        with jax.disable_jit():  # an older JAX cannot be told to fuse nothing
            return tuple(map(np.asarray, call(*arguments)))


class Mirror:
    """Arrays as tensors on a device: what shares memory here shares it there."""

    device = "cuda"

    def __init__(self):
        self.blocks = {}

    def __call__(self, array):
        tensor, base = to_torch(array), array
        if not array.size:
            return tensor.to(self.device)
        while isinstance(base.base, np.ndarray):
            base = base.base
        low, high = np.lib.array_utils.byte_bounds(base)
        low += (reference.address(array) - low) % array.itemsize  # a device has nothing misaligned
        if low not in self.blocks:
            host = np.frombuffer((ctypes.c_byte * (high - low)).from_address(low), np.uint8)
            self.blocks[low] = host, torch.from_numpy(host).to(self.device, copy=True)
        block = self.blocks[low][1]
        typed = block[: len(block) // array.itemsize * array.itemsize].view(tensor.dtype)
        offset = (reference.address(array) - low) // array.itemsize
        return typed.as_strided(tensor.shape, tensor.stride(), offset)

    def bring_back(self):
        for host, block in self.blocks.values():
            host[:] = block.cpu().numpy()


def _on_device(call):
    """A kernel of torch that gets its tensors on the device."""

    def kernel(xs, cos, sin, rows, options, out=None):
        mirror = Mirror()
        xs, (cos, sin) = tuple(map(mirror, xs)), map(mirror, (cos, sin))
        rows = None if rows is None else torch.from_numpy(rows.copy()).to(mirror.device)
        results = call(xs, cos, sin, rows, options, out and tuple(map(mirror, out)))
        if out is None:
            return tuple(to_numpy(result.cpu()) for result in results)
        mirror.bring_back()
        return tuple(out)

    return kernel


def _call_operator(xs, cos, sin, rows, options, out):
    geometry = geometry_of_arrays(xs, cos, rows, options)
    arguments = list(xs), cos, sin, rows, *torch_kernel.flat(geometry)
    if out is None:
        return torch.ops.rotary.rotate(*arguments)
    return torch.ops.rotary.rotate_out(*arguments, list(out))


IN_PLACE = {
    "reference": reference.rotate,
    "cpu": _cpu,
    "torch": _torch,
    "operator": _torch_operator,
}
if importlib.util.find_spec("torch") and torch.cuda.is_available():
    IN_PLACE |= {
        "cuda": _on_device(torch_kernel.rotate),
        "cuda operator": _on_device(_call_operator),
    }
ROUNDING = {**IN_PLACE, "formula": _torch_formula, "jax": _jax}  # these also take float64
if importlib.util.find_spec("mlx"):
    import mlx_arrays

    ROUNDING["mlx"] = mlx_arrays.rotated
if importlib.util.find_spec("triton"):
    import interpreter

    IN_PLACE["triton"] = _triton
KERNELS = IN_PLACE | ROUNDING


@pytest.fixture(autouse=True, scope="module")
def _poison():
    """Memory that a kernel asks for comes full of NaN: what it forgets to write shows."""
    empty = np.empty

    def poisoned(*arguments, **options):
        array = empty(*arguments, **options)
        if array.dtype.kind in "fV" and array.flags.c_contiguous:
            array.reshape(-1).view(np.uint8).fill(0xFF)
        return array

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", poisoned)
        if "triton" in KERNELS:
            interpreter.mended(patch)
        torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
        yield
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_memory_is_poisoned_in_these_tests(dtype):
    tensor = to_torch(np.zeros((3, 4), DTYPES[dtype]))
    assert np.isnan(np.empty((3, 4), DTYPES[dtype])).all()
    assert torch.empty_like(tensor).isnan().all()
    assert tensor.new_empty(2, 2).isnan().all()


# --- shapes ---


def _assert_close(got, x, cos, sin, options):
    """Two products and a sum, half a unit each, the sum at most twice the larger of the pair."""
    exact = formula(x, cos, sin, options, np.float64)
    layout = options.out_layout or options.layout
    sizes = np.zeros(x.shape, np.float32)
    read = channels(options.layout, cos.shape[-1], options.start)
    larger = np.maximum(abs(x[..., read[0]]), abs(x[..., read[1]]))
    for index in channels(layout, cos.shape[-1], options.start):
        sizes[..., index] = larger
    assert (abs(got - exact) <= 2 * np.spacing(sizes)).all()


# every operation of JAX is compiled for every shape, and Triton's interpreter takes one block of
# numbers after the other: these get some of the ways for each shape, and types of both widths
SLOW = {"jax": [["float32"], ["bfloat16"]], "triton": [["float32"], ["float16", "bfloat16"]]}
# these have no code for a type of their own: every shape in all ways, each type in two of them
SHARED = ("operator", "formula", "mlx")


def tried(forms_of):
    """(kernel, form, dtype, the ways to try) for the forms of each kernel."""
    rows = []
    for kernel, forms in forms_of.items():
        ways = dict.fromkeys(itertools.product(forms, DTYPES), WAYS)
        if kernel in SLOW:
            ways, axes = {}, [("half", "interleaved")] * 2
            widths = map(itertools.cycle, SLOW[kernel])  # types of one width take turns
            for form, dtypes, *way in pairwise(forms, widths, *axes, (False, True)):
                ways.setdefault((form, next(dtypes)), []).append(way)
        if kernel in SHARED:
            for number, each in enumerate(ways):
                first = 2 * number + number // len(DTYPES)  # a type has others for the next form
                ways[each] = [WAYS[(first + more) % len(WAYS)] for more in (0, 1)]
        for (form, dtype), some in ways.items():
            rows.append(pytest.param(kernel, form, dtype, some, id=f"{kernel}-{dtype}-{form}"))
    return rows


SHAPES_OF = dict.fromkeys(KERNELS, CASES | MORE_CASES) | {"jax": CASES}


@pytest.mark.parametrize(("kernel", "name", "dtype", "ways"), tried(SHAPES_OF))
def test_every_shape(kernel, name, dtype, ways):
    case = SHAPES_OF[kernel][name]
    xs, cos, sin = operands(case, DTYPES[dtype])
    rows = case.rows and np.random.default_rng(5).integers(0, case.table[0], case.rows)
    tables = (cos, sin) if rows is None else (cos[rows], sin[rows])
    before = [x.copy() for x in xs]
    for layout, out_layout, conjugate in ways:
        options = case.options(layout, out_layout, conjugate)
        results = KERNELS[kernel](xs, cos, sin, rows, options, *_no_out(kernel))
        for x, result in zip(xs, results, strict=True):
            want = formula(x, *tables, options)
            assert_bits(result, stored(kernel, want, x.dtype))
            if dtype == "float32":
                _assert_close(result, x, *tables, options)
    for x, was in zip(xs, before, strict=True):
        assert_bits(x, was)


def _no_out(kernel):
    return () if kernel == "formula" else (None,)


# --- memory: the same values in another order, and the way there ---


def in_wider(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] + 5), 77, x.dtype)
    wide[..., 3 : 3 + x.shape[-1]] = x
    return wide[..., 3 : 3 + x.shape[-1]]


def every_second(x):
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), 77, x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def misaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    memory[...] = x
    return memory


def expanded(x, axis):
    strides = tuple(0 if index == axis else step for index, step in enumerate(x.strides))
    return np.lib.stride_tricks.as_strided(x, x.shape, strides)


WRITABLE = {
    "contiguous": np.copy,
    "heads and seq swapped": lambda x: x.swapaxes(-2, -3).copy().swapaxes(-2, -3),
    "column order": lambda x: x.T.copy().T,
    "last axis slowest but one": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "part of a wider array": in_wider,
    "every second channel": every_second,
    "misaligned": misaligned,
    "backward along seq": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "backward along batch and heads": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "backward channels": lambda x: x[..., ::-1].copy()[..., ::-1],
}
FORMS = {
    **WRITABLE,
    "one batch for all": lambda x: expanded(x, 0),
    "one head for all": lambda x: expanded(x, 1),
    "one position for all": lambda x: expanded(x, 2),
    "one number for all channels": lambda x: expanded(x, 3),
}


def forms_of(kernels, forms):
    """Of each kernel; torch has no negative strides, JAX has no strides."""
    ahead = [form for form in forms if not form.startswith("backward")]
    every = {"reference": forms, "cpu": forms, "jax": ["misaligned"]}
    return {kernel: every.get(kernel, ahead) for kernel in kernels}


MEMORY = Case((2, 3, 4, 40), (2, 2, 4, 40), (4,), 36, 2)


@pytest.mark.parametrize(("kernel", "form", "dtype", "ways"), tried(forms_of(KERNELS, FORMS)))
def test_any_memory_of_x(kernel, form, dtype, ways):
    xs, cos, sin = operands(MEMORY, DTYPES[dtype])
    xs = tuple(map(FORMS[form], xs))
    for layout, out_layout, conjugate in ways:
        options = MEMORY.options(layout, out_layout, conjugate)
        results = KERNELS[kernel](xs, cos, sin, None, options, *_no_out(kernel))
        for x, result in zip(xs, results, strict=True):
            want = formula(x, cos, sin, options)
            assert_bits(result, stored(kernel, want, x.dtype))


@pytest.mark.parametrize(("kernel", "form", "dtype", "ways"), tried(forms_of(IN_PLACE, WRITABLE)))
def test_any_memory_of_out_and_in_place(kernel, form, dtype, ways):
    xs, cos, sin = operands(MEMORY, DTYPES[dtype])
    for layout, out_layout, conjugate in ways:
        options = MEMORY.options(layout, out_layout, conjugate)
        arguments = cos, sin, None, options
        outs = tuple(WRITABLE[form](np.full_like(x, np.nan)) for x in xs)
        IN_PLACE[kernel](xs, *arguments, outs)
        same = tuple(map(WRITABLE[form], xs))
        IN_PLACE[kernel](same, *arguments, same)
        for x, out, own in zip(xs, outs, same, strict=True):
            want = stored(kernel, formula(x, cos, sin, options), x.dtype)
            assert_bits(out, want)
            assert_bits(own, want)


@pytest.mark.parametrize("kernel", IN_PLACE)
def test_out_touches_nothing_beside_it(kernel):
    (x, _), cos, sin = operands(MEMORY, DTYPES["float32"])
    for make, rest in (
        (in_wider, (..., [0, 1, 2, -2, -1])),
        (every_second, (..., slice(1, None, 2))),
    ):
        view = make(x)
        IN_PLACE[kernel]((view,), cos, sin, None, MEMORY.options("half", None), (view,))
        assert (view.base[rest] == 77).all()


@pytest.mark.parametrize("kernel", IN_PLACE)
def test_q_and_k_inside_one_packed_projection_in_place(kernel):
    packed = numbers(0, (2, 5, 3, 4, 16))  # (batch, seq, q k v, heads, head_dim)
    want, (cos, sin) = packed.copy(), tables((5,), 8)
    options = Options(seq_dim=1)
    for part in (0, 1):
        want[:, :, part] = formula(packed[:, :, part], cos, sin, options)
    xs = packed[:, :, 0], packed[:, :, 1]
    IN_PLACE[kernel](xs, cos, sin, None, options, xs)
    assert_bits(packed, want)


TABLE_FORMS = {
    "column order": lambda t: (np.asfortranarray(t[0]), np.asfortranarray(t[1])),
    "only sin in column order": lambda t: (t[0], np.asfortranarray(t[1])),
    "cos and sin side by side": lambda t: np.split(np.concatenate(t, axis=-1), 2, axis=-1),
    "every second column": lambda t: (every_second(t[0]), every_second(t[1])),
    "misaligned": lambda t: (misaligned(t[0]), misaligned(t[1])),
    "one row for all": lambda t: (expanded(t[0], 0), expanded(t[1], 0)),
    "backward": lambda t: (t[0][::-1], t[1][::-1]),
}


@pytest.mark.parametrize(
    ("kernel", "form"),
    [(kernel, form) for kernel, forms in forms_of(KERNELS, TABLE_FORMS).items() for form in forms],
)
def test_any_memory_of_the_tables(kernel, form):
    xs, *both = operands(MEMORY, DTYPES["float32"])
    cos, sin = TABLE_FORMS[form](both)
    options = MEMORY.options("half", None)
    results = KERNELS[kernel](xs, cos, sin, None, options, *_no_out(kernel))
    for x, result in zip(xs, results, strict=True):
        assert_bits(result, formula(x, cos, sin, options))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kernel", ROUNDING)
def test_float64_tables_compute_in_float64(kernel, dtype):
    xs, *_ = operands(MEMORY, DTYPES[dtype])
    angles = numbers(3, (4, 18), np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    options = MEMORY.options("interleaved", None)
    results = KERNELS[kernel](xs, cos, sin, None, options, *_no_out(kernel))
    for x, result in zip(xs, results, strict=True):
        want = formula(x, cos, sin, options, np.float64).astype(x.dtype)
        assert_bits(result, want)


# --- values ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ROUNDING)
def test_special_values_stay_in_their_pair(kernel, dtype):
    kind = DTYPES[dtype]
    finfo = ml_dtypes.finfo(kind)
    small = finfo.tiny / 2 if kernel != "jax" else 0.5  # XLA takes subnormal numbers for zero
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, finfo.max, -finfo.max, small, 1.0]
    pairs = np.array(list(itertools.product(special, repeat=2)), kind)  # (81, 2)
    x = np.stack([pairs[:, 0], pairs[:, 1], np.ones(81, kind), np.ones(81, kind)], -1)
    cos, sin = tables((81,), 2)
    cos[::3], sin[::3] = 1, 0  # position 0: Inf * 0 is NaN, as in the plain formula
    cos[1::27, :1] = np.uint32(0x7FFFFFFF).view(np.float32)  # a NaN that rounding up would end
    options = Options("interleaved")
    with np.errstate(all="ignore"):
        (result,) = KERNELS[kernel]((x,), cos, sin, None, options, *_no_out(kernel))
        want = formula(x, cos, sin, options).astype(kind)
    assert_bits(result, want)
    assert np.isfinite(result[:, 2:]).all()
    assert np.isnan(result[:, :2]).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernel", ROUNDING)
def test_halves_are_rounded_to_nearest_even(kernel, dtype):
    kind = DTYPES[dtype]
    step = float(ml_dtypes.finfo(kind).eps)
    # 1 + n step at full amplitude, scaled by factors that land on and beside the middle
    x = np.stack([1 + step * np.arange(32), np.zeros(32)], -1).astype(kind)
    middle = (x[:, :1].astype(np.float32) + np.float32(step / 2)) / x[:, :1].astype(np.float32)
    for cos in (middle, np.nextafter(middle, 0, dtype=np.float32), np.ones_like(middle)):
        (y,) = KERNELS[kernel]((x,), cos, 0 * cos, None, Options(), *_no_out(kernel))
        exact = x[:, :1].astype(np.float32) * cos
        low = np.floor(exact / np.float32(step)) * np.float32(step)  # both neighbours are exact
        rest, odd = exact - low, np.round(low / step) % 2 == 1
        up = (rest > step / 2) | ((rest == step / 2) & odd)
        assert_bits(
            y[:, :1].astype(np.float32), low + np.where(up, np.float32(step), np.float32(0))
        )


# --- one call or many ---


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_several_arrays_in_one_call_equal_one_call_each(kernel, count):
    xs = tuple(numbers(seed, (2, seed + 1, 5, 16)) for seed in range(count))
    cos, sin = tables((5,), 8)
    results = KERNELS[kernel](xs, cos, sin, None, Options(), *_no_out(kernel))
    assert len(results) == count
    for x, result in zip(xs, results, strict=True):
        assert_bits(result, formula(x, cos, sin, Options()))


ROWS = {
    "(seq)": np.array([7, 3, 3, 10]),
    "(batch, seq)": np.array([[7, 3, 3, 10], [1, 0, 4, 5]]),
    "(1, seq)": np.array([[7, 3, 3, 10]]),
    "int32": np.array([7, 3, 3, 10], np.int32),
    "every second": np.arange(8)[::2],
    "one for all": np.lib.stride_tricks.as_strided(np.array([9]), (2, 4), (0, 0)),
}


def _some_ways(kernel, forms):
    """(kernel, form, the ways to try), all of them but for slow kernels."""
    ways = dict.fromkeys(forms, WAYS)
    if kernel in SLOW:
        ways = {}
        for form, *way in pairwise(forms, *[("half", "interleaved")] * 2, (False, True)):
            ways.setdefault(form, []).append(way)
    return [pytest.param(kernel, *each, id=f"{kernel}-{each[0]}") for each in ways.items()]


@pytest.mark.parametrize(
    ("kernel", "form", "ways"), [row for kernel in KERNELS for row in _some_ways(kernel, ROWS)]
)
def test_row_numbers_equal_gathered_tables(kernel, form, ways):
    xs, *_ = operands(MEMORY, DTYPES["float32"])
    cos, sin = tables((11,), 18)
    rows = ROWS[form].astype(np.int64) if "operator" in kernel else ROWS[form]
    for layout, out_layout, conjugate in ways:
        options = MEMORY.options(layout, out_layout, conjugate)
        results = KERNELS[kernel](xs, cos, sin, rows, options, *_no_out(kernel))
        for x, result in zip(xs, results, strict=True):
            assert_bits(result, formula(x, cos[rows], sin[rows], options))


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ROUNDING)
def test_large_work_on_any_number_of_threads_is_right(kernel, dtype, set_threads, monkeypatch):
    # odd counts of rows, so that a thread's share ends inside an array and between the two
    xs = numbers(0, (3, 7, 31, 144), DTYPES[dtype]), numbers(1, (3, 1, 31, 144), DTYPES[dtype])
    monkeypatch.setattr(pool, "SERIAL_BYTES", xs[1].nbytes + 1)
    cos, sin = tables((3, 31), 72)
    wanted = [formula(x, cos, sin, Options()).astype(x.dtype) for x in xs]
    for threads in (1, 2):
        set_threads(threads)
        results = KERNELS[kernel](xs, cos, sin, None, Options(), *_no_out(kernel))
        for result, want in zip(results, wanted, strict=True):
            assert_bits(result, want)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_shares_cover_every_row_once(threads, monkeypatch):
    """In place, a row that two shares had would be turned twice."""
    monkeypatch.setattr(pool, "SERIAL_BYTES", 0)
    monkeypatch.setattr(pool, "count", lambda: threads)
    for heads in (1, 2, 13):
        xs = numbers(0, (2, heads, 5, 16)), numbers(1, (2, 1, 5, 16))
        cos, sin = tables((5,), 8)
        wanted = [formula(x, cos, sin, Options()) for x in xs]
        _cpu(xs, cos, sin, None, Options(), xs)
        for x, want in zip(xs, wanted, strict=True):
            assert_bits(x, want)


def test_a_large_call_does_not_describe_its_record_again(monkeypatch):
    """NumPy makes a list of all fields of a record for its array interface: 20 us a call."""
    monkeypatch.setattr(pool, "SERIAL_BYTES", 0)
    xs, (cos, sin) = (numbers(0, (2, 5, 16)),), tables((5,), 8)
    _cpu(xs, cos, sin, None, Options(), xs)
    called = set()
    sys.setprofile(lambda frame, *_: called.add(frame.f_code.co_name))
    try:
        _cpu(xs, cos, sin, None, Options(), xs)
    finally:
        sys.setprofile(None)
    assert "address" in called
    assert "_array_descr" not in called


def test_threads_follow_torch(set_threads):
    set_threads(1)
    assert pool.count() == 1


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [64, 32, 16, 5])
def test_bfloat16_is_rounded_to_nearest_even(pairs, layout):
    """x of 1 and a sine of 0 leave the cosine: ties, infinities, subnormals and any NaN."""
    edges = [0x3F808000, 0x3F818000, 0x3F817FFF, 0x3F808001, 0x7F7F8000, 0x7F800000, 0x0000FFFF,
             0x80018000, 0x007FFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC08001, 0xFFFF8000]  # fmt: skip
    drawn = np.random.default_rng(0).integers(2**32, size=5000, dtype=np.uint32)
    bits = np.concatenate((np.array(edges, np.uint32), drawn))
    cos = np.resize(bits, (len(bits) // pairs + 1, pairs)).view(np.float32)
    x = torch.ones(len(cos), 2 * pairs, dtype=torch.bfloat16)
    result = rotary.rotate(x, torch.from_numpy(cos), torch.zeros(cos.shape), layout=layout)
    first = result[:, :pairs] if layout == "half" else result[:, ::2]
    torch.testing.assert_close(
        first, torch.from_numpy(cos).to(torch.bfloat16), rtol=0, atol=0, equal_nan=True
    )


# --- more than 2^31 elements ---


def test_steps_of_a_huge_array_do_not_wrap():
    shape, item = (2**12, 2**10, 2**14, 128), 4
    strides = (2**10 * 2**14 * 128 * item, 2**14 * 128 * item * 3, 128 * item, item)
    x = Block(shape, strides, "float32")
    table = Block((2**14, 64), (64 * 4, 4), "float32")
    geometry = Geometry(0, 64, "half", "half", (None, None, 0))
    _, steps = jobs.walk(x, x, True, table, 0, geometry)
    sizes = [int(steps[f"size_{axis}"]) for axis in range(3)]
    reach = sum((size - 1) * step for size, step in zip(shape[:-1], strides[:-1], strict=True))
    assert sum((sizes[n] - 1) * int(steps[f"x_{n}"]) for n in range(3)) == reach > 2**45
    assert math.prod(sizes) == 2**36
    assert jobs.call_of((x,), (x,), (True,), table, None, geometry).size == 2**45


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that costs nothing until used")
@pytest.mark.parametrize("kernel", ["cpu", "torch", "operator"])
def test_addresses_beyond_2_31_elements(kernel):
    step = 2**31 + 64  # elements, between two positions
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, in Python from 3.13
    memory = np.frombuffer(mmap.mmap(-1, 4 * (2 * step + 64), flags=flags), np.float32)
    x = np.lib.stride_tricks.as_strided(memory, (3, 64), (4 * step, 4))
    x[...] = numbers(0, (3, 64))
    cos, sin = tables((3,), 32)
    want = formula(x, cos, sin, Options())
    KERNELS[kernel]((x,), cos, sin, None, Options(), (x,))
    assert_bits(x.copy(), want)


def test_the_public_call_is_these_kernels():
    xs, cos, sin = operands(MEMORY, DTYPES["float32"])
    want = [formula(x, cos, sin, MEMORY.options("half", "interleaved", True)) for x in xs]
    for convert, back in ((np.asarray, np.asarray), (to_torch, to_numpy)):
        results = rotary.rotate(
            list(map(convert, xs)), convert(cos), convert(sin), layout="half",
            out_layout="interleaved", rotary_dim=36, start=2, conjugate=True,
        )  # fmt: skip
        for result, expected in zip(results, want, strict=True):
            assert_bits(back(result), expected)


@pytest.mark.parametrize("has_openmp", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_stores_past_the_caches_write_the_same(monkeypatch, layout, dtype, has_openmp):
    """What only large outputs get, on small ones: aligned rows, and rows that are not."""
    openmp, modes = pool.openmp(), []
    if has_openmp and openmp is None:
        pytest.skip("no OpenMP")
    spec = rotary.Rotary(head_dim=128, layout=layout)
    x = numbers(3, (2, 5, 128), DTYPES[dtype])
    cos, sin = rotary.cos_sin(spec, np.arange(5))
    wanted = reference.rotate((x,), cos, sin, None, Options(layout), None)[0]
    monkeypatch.setattr(jobs, "STREAM_BYTES", 0)
    monkeypatch.setattr(pool, "SERIAL_BYTES", 0)
    monkeypatch.setattr(pool, "count", lambda: 2)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(loop, job, *more):
        modes.append(ctypes.c_int64.from_address(job + 32).value)
        openmp.parallel(loop, job, *more)

    if has_openmp:
        address = ctypes.cast(parallel, ctypes.c_void_p).value
        monkeypatch.setattr(pool, "openmp", lambda: openmp._replace(address=address))
    else:
        run = pool.run
        monkeypatch.setattr(pool, "openmp", lambda: None)
        monkeypatch.setattr(pool, "run", lambda *job: (modes.append(job[2][4]), run(*job)))
    memory = np.zeros(4096 + x.nbytes, np.uint8)
    aligned = -memory.ctypes.data % 64
    for shift in (0, x.itemsize):  # one element further, no store of a vector is aligned
        cpu._ready_call.cache_clear()
        jobs.call_of.cache_clear()
        out = memory[aligned + shift :][: x.nbytes].view(x.dtype).reshape(x.shape)
        rotary.rotate(x, cos, sin, layout=layout, out=out)
        assert (modes[-1] >= jobs.loops.STREAMING) == (shift == 0)
        assert out.tobytes() == wanted.tobytes()
    cpu._ready_call.cache_clear()
    jobs.call_of.cache_clear()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16])
def test_tiles_cover_every_row_once(rows, threads, monkeypatch):
    monkeypatch.setattr(pool, "SERIAL_BYTES", 0)
    monkeypatch.setattr(pool, "count", lambda: threads)
    pairs, seq = 4, 11
    monkeypatch.setattr(jobs, "TILE_BYTES", 2 * 4 * pairs)
    monkeypatch.setattr(jobs, "MOST_TILE_BYTES", rows * 2 * 4 * pairs)
    monkeypatch.setattr(jobs, "_TILES", 1)
    rng = np.random.default_rng(0)
    for shape, table in (
        ((2, 3, seq, 8), (2, seq, pairs)),
        ((2, 3, seq, 8), (seq, pairs)),
        ((1, 1, seq, 8), (seq, pairs)),
        ((2, 2, 3, seq, 8), (2, 1, 1, seq, pairs)),
    ):
        jobs.call_of.cache_clear()
        cpu._ready_call.cache_clear()
        xs = tuple(rng.standard_normal(shape, np.float32) for _ in range(2))
        cos, sin = (rng.standard_normal(table, np.float32) for _ in range(2))
        arguments = (xs, cos, sin, None, Options(), None)
        for got, want in zip(_cpu(*arguments), reference.rotate(*arguments), strict=True):
            assert_bits(got, want)
    jobs.call_of.cache_clear()
    cpu._ready_call.cache_clear()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_q_and_k_in_any_two_orders_of_memory(is_in_place, threads, monkeypatch):
    """Rows of the tables are read once where q and k use them tile by tile, and twice elsewhere."""
    monkeypatch.setattr(pool, "SERIAL_BYTES", 0)
    monkeypatch.setattr(pool, "count", lambda: threads)
    monkeypatch.setattr(jobs, "_TILES", 1)
    rng = np.random.default_rng(0)
    for _ in range(800):
        jobs.call_of.cache_clear()
        cpu._ready_call.cache_clear()
        least, most = sorted(rng.choice([1, 2, 3, 4, 6], 2))  # rows of the tables in a tile
        monkeypatch.setattr(jobs, "TILE_BYTES", 2 * 4 * 4 * least)
        monkeypatch.setattr(jobs, "MOST_TILE_BYTES", 2 * 4 * 4 * most)
        batch, seq = rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 3, 5, 7, 12])
        xs = []
        for heads in rng.choice([1, 2, 3, 19], 2):
            order = rng.permutation(3)
            memory = rng.standard_normal((*np.array([batch, heads, seq])[order], 8), np.float32)
            xs.append(memory.transpose(*np.argsort(order), 3))
        windows = [
            np.lib.stride_tricks.sliding_window_view(numbers(each, (batch + seq - 1, 4)), seq, 0)
            for each in range(2)
        ]  # row seq of batch is row batch + seq of one table
        cos, sin, rows = {
            0: (*tables((seq,), 4), None),
            1: (*tables((batch, seq), 4), None),
            2: (*tables((11,), 4), rng.integers(0, 11, seq)),
            3: (*tables((11,), 4), rng.integers(0, 11, (batch, seq))),
            4: (*[window.transpose(0, 2, 1) for window in windows], None),
        }[rng.integers(5)]
        arguments = cos, sin, rows, Options()
        wanted = [formula(x, *(t if rows is None else t[rows] for t in (cos, sin)), Options())
                  for x in xs]  # fmt: skip
        results = _cpu(xs, *arguments, tuple(xs) if is_in_place else None)
        for got, want in zip(results, wanted, strict=True):
            assert_bits(got, want)
    jobs.call_of.cache_clear()
    cpu._ready_call.cache_clear()
