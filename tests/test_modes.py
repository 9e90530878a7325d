"""Every mode of every library against every kind of call: the tables of docs/modes.md, run.

`python tests/test_modes.py` writes the page from the words below.
"""

import contextlib
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from libraries import enable_x64
from published import longrope, scaled
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import rotary
import rotary.kernels.torch.route
from rotary.kernels.torch import angles as torch_tables
from rotary.kernels.torch import gpu as torch_gpu
from rotary.kernels.torch import launch as torch_launch
from rotary.kernels.torch import ready as torch_ready
from rotary.kernels.torch import state as torch_state

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

PAGE = Path(__file__).parent.parent / "docs" / "modes.md"
SPEC = rotary.Rotary(head_dim=8, base=100.0)
ROWS = 9
COS, SIN = rotary.cos_sin(SPEC, np.arange(ROWS))


# --- the calls ---


def rotated(library, x):
    return rotary.rotate(x, *library.tables(x.shape[-2]), SPEC)


def applied(library, x):
    return rotary.apply(SPEC, x)


def applied_at(library, x, positions):
    return rotary.apply(SPEC, x, positions=positions)


def picked(library, x, rows):
    return rotary.rotate(x, *library.tables(ROWS), SPEC, positions=rows)


def written(library, x, out):
    return rotary.rotate(x, *library.tables(x.shape[-2]), SPEC, out=out)


class Call(NamedTuple):
    """One column of the table: x and what else the function is given, made by a library."""

    function: Callable[..., Any]
    tokens: Any  # the position of every token; None if there is no right answer
    given: Callable[..., tuple[Any, ...]]
    recorded: Callable[..., tuple[Any, ...]]  # in place of `given` while a program is recorded


def numbers(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


MEMORY, OTHER = numbers(2, 3, 6, 8, seed=0), numbers(2, 3, 5, 8, seed=1)
X = MEMORY[:, :, :5]


def call(function, tokens, *further):
    return Call(
        function,
        tokens,
        lambda library: (library.array(X), *map(library.array, further)),
        lambda library: (
            library.array(OTHER),
            *[library.array(np.clip(each, 0, ROWS - 1)) for each in further],
        ),
    )


def overlapping(library):
    memory = library.array(MEMORY)
    return memory[:, :, :5], memory[:, :, 1:]


ORDER = np.array([8, 0, 3, 3, 1])
LOW, HIGH = np.array([3, -1, 0, 8, -9]), np.array([3, 9, 0, 8, 2**32 + 1])
FRACTIONS = np.array([0.5, 1e6 + 0.25, 2.0, 3.75, 4.0])
BELOW = np.array([0, -1, 5, 10**6, -(2**30)])
CALLS = {
    "`rotate`": call(rotated, np.arange(5)),
    "`apply`": call(applied, np.arange(5)),
    "rows": call(picked, ORDER, ORDER),
    "a row below 0": call(picked, LOW, LOW),
    "a row too large": call(picked, HIGH, HIGH),
    "a fractional row": call(picked, None, FRACTIONS),
    "fractional positions": call(applied_at, FRACTIONS, FRACTIONS),
    "a position below 0": call(applied_at, BELOW, BELOW),
    "`out=`": call(written, np.arange(5), OTHER),
    "overlapping `out=`": call(written, np.arange(5), OTHER)._replace(given=overlapping),
}


def reference(tokens, is_transposed):
    """X rotated by the formula in float64."""
    angles = tokens[:, None] * 100.0 ** (-np.arange(4) / 4)
    cos, sin = np.cos(angles), np.sin(angles) * (-1 if is_transposed else 1)
    u, v = np.split(X.astype(np.float64), 2, axis=-1)
    return np.concatenate([u * cos - v * sin, v * cos + u * sin], axis=-1)


# --- the modes ---


class Mode(NamedTuple):
    """One row of the table.

    gives       a word for every call: one of `WORDS`, or a number of `REFUSALS`
    run         run(function, given, recorded): the result of the call in this mode
    transposes  whether that is R^T x, the gradient of <x, R x>, and not R x
    context     what is around making the arrays as well
    """

    gives: str
    run: Callable[..., Any]
    transposes: bool = False
    context: Callable[..., Any] = contextlib.nullcontext


def plain(function, given, recorded):
    return function(*given)


def within(context):
    def run(function, given, recorded):
        with context():
            return function(*given)

    return run


class NumPy:
    """Arrays of a library, and the tables for so many tokens."""

    array = staticmethod(np.array)
    to_numpy = staticmethod(np.asarray)

    @classmethod
    def tables(cls, rows):
        return cls.array(COS)[:rows], cls.array(SIN)[:rows]


class Torch(NumPy):
    constants = torch.from_numpy(COS), torch.from_numpy(SIN)

    @staticmethod
    def array(x):
        return torch.from_numpy(np.array(x))

    @staticmethod
    def to_numpy(x):
        has_values = type(x) is torch.Tensor and x.device.type == "cpu"
        return x.detach().numpy() if has_values else tuple(x.shape)

    @classmethod
    def tables(cls, rows):
        return [table[:rows] for table in cls.constants]


def gradient(function, given, recorded):
    x = given[0].requires_grad_()
    weight = x.detach().clone()
    (found,) = torch.autograd.grad((function(*given) * weight).sum(), x)
    return found


def mapped(function, given, recorded):
    dims = tuple(0 if each.ndim == 4 else None for each in given)
    return torch.vmap(function, dims)(*given)


def mapped_with_rows(function, given, recorded):
    return torch.vmap(function)(*[x if x.ndim == 4 else x.expand(2, *x.shape) for x in given])


def gradient_of(function, x, *further):
    weight = x.detach().clone()
    return torch.func.grad(lambda a: (function(a, *further) * weight).sum())(x)


def functional_gradient(function, given, recorded):
    return gradient_of(function, *given)


def vmap_of_grad(function, given, recorded):
    return mapped(partial(gradient_of, function), given, recorded)


def grad_of_vmap(function, given, recorded):
    return gradient_of(lambda *given: mapped(function, given, recorded), *given)


def tangent(function, given, recorded):
    x, *further = given
    return torch.func.jvp(lambda a: function(a, *further), (x,), (x.clone(),))[1]


def jvp_of_vmap(function, given, recorded):
    return tangent(lambda *given: mapped(function, given, recorded), given, recorded)


def vmap_of_jvp(function, given, recorded):
    return mapped(lambda *given: tangent(function, given, recorded), given, recorded)


def dual(function, given, recorded):
    x, *further = given
    with forward_ad.dual_level():
        found = function(forward_ad.make_dual(x, x.clone()), *further)
        return forward_ad.unpack_dual(found).tangent


@cache
def compiled(function, way, dynamic, backend):
    torch._dynamo.reset()  # at most 8 programs of one line of code are kept
    return torch.compile(
        lambda *given: way(function, given, given),
        fullgraph=True, dynamic=dynamic, backend=backend,
    )  # fmt: skip


def of_seven(x):
    """Of 7 tokens, a number that no other axis has: one symbol would stand for both."""
    axis = x.ndim - 2 if x.ndim == 4 else 0
    return torch.cat((x, x), axis).narrow(axis, 0, 7).clone(memory_format=torch.contiguous_format)


def compiling(way=plain, dynamic=False, backend="aot_eager"):
    """Compiled for other values, and if dynamic for another number of tokens as well."""

    def run(function, given, recorded):
        # aot_eager rotates into copies: an `out` that overlaps x would be right, and no error
        is_written = dynamic and function.func is written
        fast = compiled(function, way, dynamic, "inductor" if is_written else backend)
        fast(*(map(of_seven, recorded) if dynamic else recorded))
        return fast(*given)

    return run


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


def exporting(strict):
    """Calls that differ by their values alone share a program."""
    programs = {}

    def run(function, given, recorded):
        form = function, *[(x.dtype, x.shape) for x in recorded]
        if form not in programs:
            programs[form] = torch.export.export(Module(function), recorded, strict=strict).module()
        return programs[form](*given)

    return run


def traced(function, given, recorded):
    with torch.no_grad():
        program = torch.jit.trace(lambda *given: function(*given), recorded, check_trace=False)
        return program(*given)


def made_fx(function, given, recorded):
    return make_fx(function)(*recorded)(*given)


def symbolic(function, given, recorded):
    five = bound(function.func, Five)  # an fx proxy has no size

    def one(x):
        return five(x)

    def two(x, further):
        return five(x, further)

    return torch.fx.symbolic_trace(one if len(given) == 1 else two)(*given)


class Five(Torch):
    @classmethod
    def tables(cls, rows):
        return Torch.tables(rows if rows is ROWS else 5)


class Meta(Torch):
    constants = tuple(table.to("meta") for table in Torch.constants)


def meta(function, given, recorded):
    return bound(function.func, Meta)(*[x.to("meta") for x in given])


def fake(function, given, recorded):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return function(*map(mode.from_tensor, given))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Overriding(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def refuse_to_wait(*_, **__):
    raise AssertionError("this waits for the device, which a graph cannot capture")


def captured(function, given, recorded):
    """CPU tensors taken for those of a GPU; launches are kept, and run when the call is over."""
    interpreter = pytest.importorskip("interpreter")
    kernel, launches, run = interpreter.kernel, [], interpreter.kernel._run
    with pytest.MonkeyPatch.context() as patch:
        interpreter.mended(patch)
        for module in (
            torch_state,
            torch_tables,
            torch_launch,
            torch_ready,
            rotary.kernels.torch.route,
        ):
            patch.setattr(module, "is_on_gpu", lambda x: True)
        for module in (torch_launch, torch_gpu, rotary.kernels.torch.route):
            patch.setattr(module, "gpu_kernel", lambda device: kernel)
        patch.setattr(torch_ready, "recent", {})
        patch.setattr(kernel, "_run", lambda *arguments: launches.append(arguments))
        function(*recorded)  # constants are then on the device
        launches.clear()
        with pytest.MonkeyPatch.context() as no_waiting:
            for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__",
                         "__float__", "__index__"):  # fmt: skip
                no_waiting.setattr(torch.Tensor, name, refuse_to_wait)
            found = function(*given)
        assert len(launches) == 1
        run(*launches[0])
    return found


# rotate, apply, rows, a row below 0, too large, fractional, fractional positions, one below 0
CHECKED = "right right right error error error right error"
COMPILED = "right right right error error error right backwards"
RECORDED = "right right right NaN NaN error right backwards"
SHAPES = "shape shape shape shape shape error shape shape"
TORCH = {
    "eager": Mode(f"{CHECKED} right error", plain),
    "a gradient": Mode(f"{CHECKED} 1 1", gradient, True),
    "`no_grad`": Mode(f"{CHECKED} right error", within(torch.no_grad)),
    "`inference_mode`": Mode(f"{CHECKED} right error", within(torch.inference_mode)),
    "`autocast`": Mode(
        f"{CHECKED} right error", within(partial(torch.autocast, "cpu", torch.bfloat16))
    ),
    "deterministic algorithms": Mode(f"{CHECKED} right error", within(deterministic)),
    "`TorchDispatchMode`": Mode(f"{CHECKED} right error", within(Dispatching)),
    "`TorchFunctionMode`": Mode(f"{CHECKED} right error", within(Overriding)),
    "`vmap` over x": Mode(f"{CHECKED} right right", mapped),
    "`vmap` over x and rows": Mode(f"{CHECKED} right right", mapped_with_rows),
    "`func.grad`": Mode(f"{CHECKED} 1 1", functional_gradient, True),
    "`vmap(grad)`": Mode(f"{CHECKED} 1 1", vmap_of_grad, True),
    "`grad(vmap)`": Mode(f"{CHECKED} 1 1", grad_of_vmap, True),
    "`jvp`": Mode(f"{CHECKED} 2 2", tangent),
    "`jvp(vmap)`": Mode(f"{CHECKED} 2 2", jvp_of_vmap),
    "`vmap(jvp)`": Mode(f"{CHECKED} 2 2", vmap_of_jvp),
    "`dual_level`": Mode(f"{CHECKED} 2 2", dual),
    "`compile`": Mode(f"{COMPILED} right error", compiling(backend="inductor")),
    "`compile(dynamic=True)`": Mode(f"{COMPILED} right error", compiling(dynamic=True)),
    "`compile` of `vmap`": Mode(f"{RECORDED} 3 3", compiling(mapped_with_rows)),
    "`compile` of `grad`": Mode(f"{RECORDED} 3 3", compiling(functional_gradient), True),
    "`compile` of `vmap(grad)`": Mode(f"{RECORDED} 3 3", compiling(vmap_of_grad), True),
    "`compile` of `jvp`": Mode(f"{RECORDED} 3 3", compiling(tangent)),
    "`export`": Mode(f"{RECORDED} right error", exporting(False)),
    "`export(strict=True)`": Mode(f"{RECORDED} right error", exporting(True)),
    "`jit.trace`": Mode(f"{RECORDED} right right", traced),
    "`make_fx`": Mode(f"{RECORDED} right right", made_fx),
    "`fx.symbolic_trace`": Mode("4 4 4 4 4 4 4 4 4 4", symbolic),
    "meta tensors": Mode(f"{SHAPES} shape shape", meta),
    "fake tensors": Mode(f"{SHAPES} shape shape", fake),
    "a CUDA graph (imitated)": Mode(f"{RECORDED} right error", captured),
}


class Jax(NumPy):
    @staticmethod
    def array(x):
        x = np.asarray(x)
        is_cut = x.dtype == np.int64 and not jax.config.jax_enable_x64
        return jnp.asarray(np.clip(x, -(2**31), 2**31 - 1) if is_cut else x)

    @staticmethod
    def to_numpy(x):
        return x.shape if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x)


def jitted(function, given, recorded):
    return jax.jit(function)(*given)


def jax_gradient_of(function, x, *further):
    return jax.grad(lambda a: (function(a, *further) * x).sum())(x)


def jax_gradient(function, given, recorded):
    return jax_gradient_of(function, *given)


def jitted_gradient(function, given, recorded):
    return jax.jit(partial(jax_gradient_of, function))(*given)


def jax_mapped(function, given, recorded):
    return jax.vmap(function, tuple(0 if x.ndim == 4 else None for x in given))(*given)


def jax_mapped_with_rows(function, given, recorded):
    return jax.jit(jax.vmap(function))(*[x if x.ndim == 4 else jnp.stack([x, x]) for x in given])


def jax_vmap_of_grad(function, given, recorded):
    return jax_mapped(partial(jax_gradient_of, function), given, recorded)


def jax_grad_of_vmap(function, given, recorded):
    return jax_gradient_of(lambda *given: jax_mapped(function, given, recorded), *given)


def jax_tangent(function, given, recorded):
    x, *further = given
    return jax.jvp(lambda a: function(a, *further), (x,), (x,))[1]


def scanned(function, given, recorded):
    x, *further = given
    return jax.lax.scan(lambda carry, a: (carry, function(a, *carry)), further, x)[1]


def sharded(function, given, recorded):
    parts = tuple(PartitionSpec("batch") if x.ndim == 4 else PartitionSpec() for x in given)
    mesh = Mesh(jax.devices()[:1], "batch")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=parts[0]))(*given)


def shapes(function, given, recorded):
    return jax.eval_shape(function, *given)


JAX_MODES = {
    "eager": (CHECKED, plain, False),
    "`jit`": (RECORDED, jitted, False),
    "`grad`": (CHECKED, jax_gradient, True),
    "`jit(grad)`": (RECORDED, jitted_gradient, True),
    "`vmap` over x": (CHECKED, jax_mapped, False),
    "`jit(vmap)` over x and rows": (RECORDED, jax_mapped_with_rows, False),
    "`vmap(grad)`": (CHECKED, jax_vmap_of_grad, True),
    "`grad(vmap)`": (CHECKED, jax_grad_of_vmap, True),
    "`jvp`": (CHECKED, jax_tangent, False),
    "`scan`": (RECORDED, scanned, False),
    "`shard_map`": (RECORDED, sharded, False),
    "`eval_shape`": (SHAPES, shapes, False),
}
JAX = {
    name + suffix: Mode(f"{gives} error error", run, transposes, partial(enable_x64, is_wide))
    for suffix, is_wide in (("", False), (", x64", True))
    for name, (gives, run, transposes) in JAX_MODES.items()
}
LIBRARIES = {
    "NumPy": (NumPy, {"eager": Mode(f"{CHECKED} right error", plain)}),
    "PyTorch": (Torch, TORCH),
    "JAX": (Jax, JAX),
}


# --- what the words mean ---

WORDS = {
    "right": "the right answer",
    "error": "the same error as in an ordinary call, listed below. PyTorch may wrap an error that "
    "is raised while it records in one of its own",
    "NaN": "the tokens with such a row number are NaN and all others are right: the numbers are "
    "known only when the program runs, and a check would make it wait for the device",
    "backwards": "rotated backwards, as with `allow_negative=True`: the positions are not checked",
    "shape": "the arrays have no values; shape and dtype are right",
}
REFUSALS = {
    "1": "out= does not take part in autograd: call it under torch.no_grad(), or without out=",
    "2": "out= does not take part in forward-mode autograd: call it without out=",
    "3": "out= cannot be used where torch.compile records vmap, grad or jvp: call without out=",
    "4": "torch.fx.symbolic_trace does not look into rotary: record with torch.export.export or "
    "make_fx, or mark your function that calls rotary by torch.fx.wrap",
}
ERRORS = {
    "a row below 0": (ValueError, "positions run from -9 to 8, the tables have 9 rows"),
    "a row too large": (ValueError, "the tables have 9 rows"),
    "a fractional row": (TypeError, "positions must be whole numbers to pick rows, got"),
    "a position below 0": (
        ValueError,
        "positions must be >= 0, got -1073741824; pass allow_negative=True to rotate backwards",
    ),
    "`out=`": (
        TypeError,
        "out= cannot be used with JAX arrays, which are immutable: use the result",
    ),
    "overlapping `out=`": (ValueError, "out overlaps an input"),
}
bound = cache(partial)


def result(library, name, run, context):
    """What the function of a call returns or raises, by `run`."""
    each = CALLS[name]
    with context():
        try:
            found = run(bound(each.function, library), each.given(library), each.recorded(library))
        except Exception as error:
            return error
        return library.to_numpy(found)


def word_of(library, mode, name):
    """The word for what a call gives in a mode; anything else is what is wrong."""
    found = result(library, name, mode.run, mode.context)
    if isinstance(found, Exception):
        eager = result(library, name, plain, mode.context)
        if isinstance(eager, Exception) and str(eager) in str(found):
            return "error"
        numbers = [number for number, sentence in REFUSALS.items() if sentence in str(found)]
        return numbers[0] if numbers else found
    if isinstance(found, tuple):
        return "shape" if found == X.shape else found
    tokens = CALLS[name].tokens
    if tokens is None:
        return "a fractional row was taken"
    is_row = CALLS[name].function is picked
    is_outside = (tokens < 0) | (tokens >= ROWS) if is_row else np.zeros(5, bool)
    error = abs(found - reference(tokens, mode.transposes)).max(axis=(0, 1, 3))
    if (error[~is_outside] > 2e-6).any() or not np.isnan(found[:, :, is_outside]).all():
        return f"off by {error}"
    if is_outside.any():
        return "NaN"
    return "right" if (tokens >= 0).all() else "backwards"


SLOW = {
    "`compile`", "`compile(dynamic=True)`", "`compile` of `vmap(grad)`", "`compile` of `jvp`",
    "`export(strict=True)`",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # tracers of torch warn of what they do
@pytest.mark.parametrize(
    ("library", "mode"),
    [
        pytest.param(library, mode, marks=[pytest.mark.slow] if mode in SLOW else [])
        for library, (_, modes) in LIBRARIES.items()
        for mode in modes
    ],
)
def test_every_call_gives_what_the_table_says(library, mode, xla_in_less_time):
    arrays, modes = LIBRARIES[library]
    if ("compile" in mode or "strict=True" in mode) and torch.__version__.startswith("2.8."):
        pytest.skip("Dynamo of torch 2.8 hides what an error says")
    found = {name: word_of(arrays, modes[mode], name) for name in CALLS}
    assert found == dict(zip(CALLS, modes[mode].gives.split(), strict=True))


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_ordinary_call_raises_the_errors_of_the_page(library):
    arrays, modes = LIBRARIES[library]
    for name, word in zip(CALLS, modes["eager"].gives.split(), strict=True):
        if word == "error":
            kind, sentence = ERRORS[name]
            if library == "JAX" and "out=" in name:
                kind, sentence = ERRORS["`out=`"]
            with pytest.raises(kind, match=re.escape(sentence)):
                raise result(arrays, name, plain, modes["eager"].context)


# --- what is beside the tables ---

BY_LENGTH = {
    "dynamic": scaled("dynamic", 8, 2.0, 6),
    "longrope": longrope(2.0, 6, [1.0] * 4, [2.0, 3.0, 4.0, 5.0]),
}


@pytest.mark.parametrize("precision", ["exact", "float32"])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_one_compiled_program_serves_every_length(name, precision):
    """The frequencies of a length that is a symbol ended in an error of Dynamo."""
    torch._dynamo.reset()
    rotary.kernels.kernels_by_type.clear()  # as in a new process: Dynamo guarded the types in it
    counter = CompileCounterWithBackend("aot_eager")

    def turned(q):
        return rotary.apply(BY_LENGTH[name], q, precision=precision)

    fast = torch.compile(turned, fullgraph=True, dynamic=True, backend=counter)
    for length in (4, 7, 6, 5, 9, 20):
        q = torch.from_numpy(numbers(1, 2, length, 8, seed=length))
        torch.testing.assert_close(fast(q), turned(q), rtol=0, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", BY_LENGTH)
def test_one_compiled_program_serves_every_given_length(name):
    """From the second length on it is a symbol, and ended in an error of Dynamo."""
    torch._dynamo.reset()
    counter, q = CompileCounterWithBackend("aot_eager"), Torch.array(X)

    def turned(q, positions, seq_len):
        return rotary.apply(BY_LENGTH[name], q, positions=positions, seq_len=seq_len)

    fast = torch.compile(turned, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 6, 7, 20):
        given = q, torch.arange(length - 5, length), length
        torch.testing.assert_close(fast(*given), turned(*given), rtol=0, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "positions", [[3, 1, 4, 1, 5000000], range(7, 12), (0.5, 1.0, 2.0, 3.0, 4e6), np.arange(5)]
)
def test_a_compiled_program_takes_positions_that_are_no_tensor(positions):
    torch._dynamo.reset()
    q = Torch.array(X)
    fast = torch.compile(partial(applied_at, Torch), fullgraph=True, backend="aot_eager")
    found = fast(q, positions)
    wanted = torch.from_numpy(reference(np.array(positions), False))
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_compiled_program_takes_a_length_for_every_row():
    torch._dynamo.reset()

    def turned(q, seq_len):
        return rotary.apply(BY_LENGTH["dynamic"], q, seq_len=seq_len)

    fast, q = torch.compile(turned, backend="eager"), Torch.array(X)
    for lengths in ([7, 5], [8, 30]):
        torch.testing.assert_close(fast(q, lengths), turned(q, lengths), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "makes",
    [
        lambda x: rotary.apply(rotary.Rotary(head_dim=8), x),
        lambda x: x + torch.from_numpy(rotary.attention.sinusoidal(np.arange(5), 8)),
    ],
)
def test_a_spec_is_made_outside_of_a_compiled_program(makes):
    """Dynamo said that it cannot handle the fields of a dataclass."""
    torch._dynamo.reset()
    x = Torch.array(X)
    words = "a Rotary is made: make it, or call the function that makes it, outside"
    if not torch.__version__.startswith("2.8."):  # Dynamo of torch 2.8 hides what an error says
        with pytest.raises(Exception, match=words):
            torch.compile(makes, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(torch.compile(makes, backend="eager")(x), makes(x))


@pytest.mark.parametrize("positions", [np.arange(5), range(5), [0.5, 1e6, 2.0, 3.0, 4.0]])
def test_a_compiled_program_makes_tables_of_positions_that_are_no_tensor(positions):
    """Dynamo knows no dtype of an array, and without fullgraph it failed inside the loops."""
    torch._dynamo.reset()

    def tables(x):
        cos, sin = rotary.cos_sin(SPEC, positions)
        return rotary.rotate(x, torch.from_numpy(cos), torch.from_numpy(sin), SPEC)

    x = Torch.array(X)
    fast = torch.compile(tables, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(x), tables(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_of_any_length_asks_for_the_length(strict):
    module = Module(lambda q: rotary.apply(BY_LENGTH["dynamic"], q))
    q, seq = Torch.array(X), torch.export.Dim("seq", min=2, max=100)
    words = r"leaves the length open .* needs seq_len as a whole number"
    if strict and torch.__version__.startswith("2.8."):
        words = "ValueError"  # Dynamo of torch 2.8 hides what an error says
    with pytest.raises(Exception, match=words):
        torch.export.export(module, (q,), dynamic_shapes=(({2: seq},),), strict=strict)
    program = torch.export.export(module, (q,), strict=strict).module()
    torch.testing.assert_close(program(q), module(q), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of torch.jit.trace: shapes are constants
@pytest.mark.parametrize("precision", ["exact", "float32"])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_traced_program_asks_for_the_length(name, precision):
    """The frequencies of the traced length were kept for every other length."""
    spec, q = BY_LENGTH[name], torch.from_numpy(numbers(1, 2, 5, 8, seed=0))
    longer = torch.from_numpy(numbers(1, 2, 9, 8, seed=1))
    for options in ({}, {"seq_len": torch.tensor(5)}):
        with pytest.raises(ValueError, match="needs seq_len as a whole number"):
            torch.jit.trace(
                lambda q, options=options: rotary.apply(spec, q, precision=precision, **options),
                (q,),
            )
    program = torch.jit.trace(
        lambda q: rotary.apply(spec, q, precision=precision, seq_len=9), (q,), check_trace=False
    )
    cos, sin = rotary.cos_sin(spec, np.arange(9), precision, 9)
    wanted = rotary.rotate(longer.numpy(), cos, sin, spec)
    torch.testing.assert_close(program(longer), torch.from_numpy(wanted), rtol=0, atol=1e-6)
    program = torch.jit.trace(lambda q: rotary.apply(SPEC, q, precision=precision), (q,))
    torch.testing.assert_close(program(longer), rotary.apply(SPEC, longer, precision=precision))


def test_positions_under_a_transform_say_the_length_unless_they_are_mapped():
    spec, q, ids = BY_LENGTH["dynamic"], Torch.array(X), torch.arange(5) + 4

    def turned(q, ids):
        return rotary.apply(spec, q, positions=ids)

    tangents = torch.func.jvp(lambda q: turned(q, ids), (q,), (q,))
    torch.testing.assert_close(tangents, (turned(q, ids),) * 2, rtol=0, atol=1e-6)
    for function in (
        lambda: torch.vmap(turned)(q, ids.expand(2, 5)),
        lambda: torch.jit.trace(turned, (q, ids)),
        lambda: make_fx(turned)(q, ids),
    ):
        with pytest.raises(ValueError, match="needs seq_len as a whole number"):
            function()


def wrapped_apply(x):
    return rotary.apply(SPEC, x)


torch.fx.wrap("wrapped_apply")


def test_a_wrapped_function_is_a_call_in_an_fx_graph():
    program = torch.fx.symbolic_trace(lambda x: wrapped_apply(2 * x))
    x = Torch.array(X)
    torch.testing.assert_close(program(x), rotary.apply(SPEC, 2 * x), rtol=0, atol=0)


# --- the page ---

HEAD = """\
# Modes of NumPy, PyTorch and JAX

You can call `rotate` and `apply` directly, under a gradient, under `vmap`, compiled, recorded, and
on tensors without values. In every mode a call gives the right answer, the same error as an
ordinary call, an error that says what to do instead or, where values are not known yet, NaN or a
rotation backwards. The tables say which.
`tests/test_modes.py` runs every cell; `python tests/test_modes.py` writes this page.

| word | meaning |
|---|---|
{words}

Each column is one kind of call:

| column | call |
|---|---|
| `rotate` | `rotate(x, cos, sin, spec)` |
| `apply` | `apply(spec, x)` |
| rows | `rotate` with `positions=`, the row numbers into longer tables |
| a row below 0, a fractional row | the same with such a number |
| a row too large | the same with a row beyond the tables: 2^32 + 1 where positions have 64 bits |
| fractional positions, a position below 0 | `apply` at such positions |
| `out=`, overlapping `out=` | `rotate` with `out=`, and with an `out` that overlaps x |
"""
TAIL = """
## The errors

| call | error |
|---|---|
{errors}

JAX arrays are immutable, so every `out=` is a TypeError there.

"Refused" is a RuntimeError, or by `fx.symbolic_trace` a TypeError, that says:

{refusals}

## Other functions

- `cos_sin`, `fused`, `rerotate`, and the functions of `rotary.positions` and `rotary.attention` can
  be compiled and exported as well, with two exceptions: torch.compile and strict torch.export do
  not record `prepare`, nor a rank of `positions.shard` that is a tensor. `positions.packed`, and
  `shard` with `cu_seqlens`, need the number of tokens there.
- `torch.jit.trace` does not record `positions.draft`, nor a cache of 8 bits that `rerotate` moves.
- A `Rotary` is made outside of a function that torch.compile or strict torch.export records, and so
  is what makes one: `from_hf_config`, `attention.sinusoidal`. With `fullgraph=True` that is an
  error that says so, without it PyTorch leaves the graph there.
- `cos_sin` of a NumPy array, a list or a range gives NumPy arrays, also where torch.compile records
  it.
- Strict torch.export, by a fault of PyTorch, makes no constant of a NumPy array that the program
  reads, such as positions in a global variable or the directions of `favor_features`: the program
  returns a FakeTensor. The default, `strict=False`, and torch.compile are right.

## How the rows are tested

- `compile` uses Inductor with `fullgraph=True`. `compile` of a transform, and with `dynamic=True`
  all but `out=`, use the backend `aot_eager`, which generates no C++. With `dynamic=True` the
  program is first called with another number of tokens. If the frequencies of a spec depend on the
  length (dynamic, longrope), one program then serves all lengths.
- `compile`, `export`, `jit.trace` and `make_fx` record with other values than those of the call
  that is checked.
- The row of CUDA graphs needs no device: it treats CPU tensors as tensors of a GPU, runs the kernel
  in Triton's interpreter after the call, and fails if the call reads a value.
- `shard_map` runs on a mesh of one device; `tests/test_jax_sharding.py` uses four.
- Without x64 JAX has no 64-bit numbers and truncates those it gets: there the row that is too large
  is 2^31 - 1.
"""


def table(heads, rows):
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def page():
    """docs/modes.md, from the words above."""
    parts = [HEAD.format(words="\n".join(f"| {word} | {text} |" for word, text in WORDS.items()))]
    for library, (_, modes) in LIBRARIES.items():
        rows = [[name, *map(cell, mode.gives.split())] for name, mode in modes.items()]
        parts += [f"## {library}\n", table(["mode", *CALLS], rows) + "\n"]
    errors = "\n".join(
        f"| {name} | {kind.__name__}: {sentence} |" for name, (kind, sentence) in ERRORS.items()
    )
    refusals = "\n".join(f"{number}. {sentence}" for number, sentence in REFUSALS.items())
    return "\n".join(parts) + TAIL.format(errors=errors, refusals=refusals)


def cell(word):
    return f"refused ({word})" if word in REFUSALS else word


def test_the_page_has_these_tables():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/test_modes.py"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
