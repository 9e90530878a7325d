"""Calls that are prepared once for arrays of one shape and dtype, and made many times."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .angles import Precision, cos_sin, sequence_cos_sin
from .kernels import NEEDS_LENGTH, Array, Operand, SomeKernel, check_positions, kernel_of
from .kernels.geometry import AngleOptions, Options, geometry_of, seq_axis
from .rotate import (
    angle_options,
    apply,
    check_library,
    check_one_axis,
    check_tokens,
    is_length_known,
    options_of,
    outputs,
    rotate,
)
from .spec import Rotary, check_spec
from .words import brief

Arrays = Sequence[object]
Run = Callable[[Arrays, Arrays, Arrays | None], Arrays]  # (xs, tables, out) -> results
Call = Callable[..., Any]
Form = tuple[str, tuple[int, ...], list[int]]  # dtype, shape, strides


def prepare(function: Call, *arguments: Any, **options: Any) -> Call:
    """Prepare `rotate` or `apply` for one shape and dtype, for loops that call it many times.

    function   `rotary.rotate` or `rotary.apply`
    arguments  and options as in a call of it, with arrays like those of the later calls. Nothing is
               rotated or written now.
    Returns a function that takes only the arrays of that call, passed in the same way:
    `step(x, cos, sin, positions=, out=)` for `rotate`, `step(q, k, positions=, out=)` for `apply`.
    It returns what the ordinary call would return.

    A step skips the checks whose result cannot have changed. For one token, it takes about half the
    time of the ordinary call with torch tensors on a CPU without gradients, and on a GPU about
    three quarters of the CPU time. Elsewhere (NumPy, JAX, a gradient on a CPU, torch.compile)
    it checks shapes and dtypes and makes the ordinary call.

    Raises TypeError for another function, and what the call would raise for shapes and dtypes that
    do not fit, and for outputs unlike their input. A step raises ValueError for arrays of another
    shape, dtype, memory order or number than it was prepared for, before anything is written. Row
    numbers, positions and overlapping memory are checked as in the ordinary call.

    >>> import numpy as np
    >>> spec, q, positions = Rotary(head_dim=4), np.ones((1, 2, 1, 4), np.float32), np.array([[3]])
    >>> step = prepare(apply, spec, q, positions=positions, seq_dim=-2)
    >>> bool((step(q, positions=positions + 1) == apply(spec, q, positions=positions + 1)).all())
    True
    >>> step(q[:, :1], positions=positions)
    Traceback (most recent call last):
    ValueError: this call was prepared for x[0] float32 (1, 2, 1, 4) with strides [16, 4], \
got float32 (1, 1, 1, 4) with strides [4]: prepare a call for each shape and dtype, or call \
rotary.apply
    """
    if function is not rotate and function is not apply:
        name = getattr(function, "__name__", f"a {type(function).__name__}")
        raise TypeError(
            "give the function and its arguments, prepare(rotary.apply, spec, q, k, ...) or "
            f"prepare(rotary.rotate, (q, k), cos, sin, spec, ...); got {name}"
        )
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"rotary.{function.__name__}: {error}") from None
    prepared = _prepared_rotate if function is rotate else _prepared_apply
    return prepared(*arguments, **options)


def warm_up(
    spec: Rotary,
    q: Array,
    k: object = None,
    *,
    positions: Array | None = None,
    seq_dim: int | None = None,
    seq_len: object = None,
    allow_negative: bool = False,
    out: object = None,
    gradient: bool = False,
) -> None:
    """Compile and load in advance what the first call needs, e.g. before a CUDA graph is captured.

    q, k       and the other arguments: those of `rotary.apply`, arrays like those of later calls
    gradient   also prepare the backward pass

    On a GPU the first call with new shapes or dtypes compiles a kernel, loads it, and copies the
    frequencies of the spec to the device. This waits for the device, which is an error inside a
    capture. After `warm_up`, calls with arrays like these can be captured: `apply(spec, q, k,
    ...)`, `cos_sin(spec, positions)`, and `rotate` with their tables, also with `positions=` if
    they are given here. Call it once for each batch size, dtype, memory order and device. On a CPU
    it compiles the loops for torch tensors. For other libraries it only checks the arguments.
    Nothing is rotated or written.

    Raises what the calls would raise for shapes, dtypes and libraries that do not fit, for outputs
    unlike their input, and for positions that can be read. Whether torch tensors share memory is
    checked by the calls. On a GPU also TypeError for positions that are not a tensor on it, and
    ValueError if the spec depends on the length and there are positions but no `seq_len`: both
    would wait for the device in every call.

    >>> import numpy as np
    >>> warm_up(Rotary(head_dim=4), np.ones((1, 2, 3, 4), np.float32))  # nothing to do
    """
    check_spec(spec)
    kernel = kernel_of(q)
    if positions is not None and kernel.is_on_gpu is not None and kernel.is_on_gpu(q):
        if not (kernel.takes(positions) and kernel.is_on_gpu(positions)):
            raise TypeError(
                f"positions must be a tensor on the device of q, got {type(positions).__name__}: "
                "they would be copied to the GPU in every call, which waits for it"
            )
        if spec.depends_on_length and seq_len is None:
            raise ValueError(f"on a GPU {NEEDS_LENGTH}: it would be read from the positions")
    xs = (q,) if k is None else (q, k)
    if positions is None:
        check_one_axis(spec)
        seq_dim = -2 if seq_dim is None else seq_dim  # as `apply` does
    else:
        check_positions(positions)
        positions = kernel.as_positions(positions, q)
    seq = q.shape[seq_axis(tuple(q.shape), seq_dim)]
    table = sequence_cos_sin(spec, q, seq, "exact", seq_len) if spec.num_axes == 1 else None
    tables = table
    if positions is not None:
        tables = cos_sin(spec, positions, "exact", seq_len, allow_negative=allow_negative)
    assert tables is not None  # the spec has one axis, or there are positions
    for is_back in (False, True) if gradient else (False,):
        to = None if is_back else out
        how = {"seq_dim": seq_dim, "conjugate": is_back, "out": to}
        at = {"positions": positions, "seq_len": seq_len, "allow_negative": allow_negative}
        prepare(apply, spec, q, k, **at, **how)
        prepare(rotate, xs, *tables, spec, **how)
        if positions is not None and table is not None:
            prepare(rotate, xs, *table, spec, positions=positions, **how)


def _prepared_rotate(
    x: object,
    cos: object,
    sin: object,
    spec: Rotary | None = None,
    *,
    positions: object = None,
    out: object = None,
    **how: Any,
) -> Call:
    def whole(xs: Arrays, tables: Arrays, out: Arrays | None) -> Arrays:
        cos, sin, positions = (*tables, None)[:3]
        return rotate(list(xs), cos, sin, spec, positions=positions, out=out, **how)

    is_several = isinstance(x, (tuple, list))
    tables = (cos, sin) if positions is None else (cos, sin, positions)
    if not (xs := _as_tuple(x)):
        raise ValueError("x must hold at least one array")
    options = options_of(spec, **how)
    kernel = _checked(xs, (cos, sin), out)
    if kernel.on_shards is None:
        rows = None if positions is None else _shape(positions)
        geometry_of(tuple(map(_shape, xs)), _shape(cos), rows, options)
    run = _run(options, xs, tables, _as_tuple(out), whole, "rotate")

    def step(
        x: Any, cos: object, sin: object, *, positions: object = None, out: Any = None
    ) -> object:
        tables = (cos, sin) if positions is None else (cos, sin, positions)
        xs = x if is_several else (x,)
        results = run(xs, tables, out if out is None else outputs(out, len(xs)))
        return results if is_several else results[0]

    return step


def _prepared_apply(
    spec: Rotary,
    q: object,
    k: object = None,
    *,
    positions: object = None,
    out: object = None,
    seq_len: object = None,
    allow_negative: bool = False,
    precision: Precision = "exact",
    seq_dim: int | None = None,
    conjugate: bool = False,
) -> Call:
    check_spec(spec)
    if positions is None:
        check_one_axis(spec)
        seq_dim = -2 if seq_dim is None else seq_dim
    at = options_of(spec, seq_dim=seq_dim, conjugate=conjugate, sign=spec.sign)
    options = None
    if precision == "exact" and is_length_known(spec, seq_len):
        length: Any = seq_len if spec.depends_on_length else None
        options = angle_options(spec, seq_dim, conjugate, length, allow_negative)

    def whole(xs: Arrays, tables: Arrays, out: Arrays | None) -> Arrays:
        results: Any = apply(
            spec, *xs, positions=(*tables, None)[0], seq_len=seq_len, precision=precision,
            allow_negative=allow_negative, seq_dim=seq_dim, conjugate=conjugate, out=out,
        )  # fmt: skip
        return results if len(xs) > 1 else (results,)

    xs = (q,) if k is None else (q, k)
    kernel, shapes = _checked(xs, (), out), tuple(map(_shape, xs))
    if positions is not None:
        check_positions(positions)
        check_tokens(spec, _shape(positions), shapes, at, kernel.on_shards is not None)
    elif kernel.on_shards is None:
        seq = shapes[0][seq_axis(shapes[0], at.seq_dim)]
        geometry_of(shapes, (seq, spec.rotary_dim // 2), None, at)
    tables = () if positions is None else (positions,)
    run = _run(options, xs, tables, _as_tuple(out), whole, "apply")

    def step(
        q: object, k: object = None, *, positions: object = None, out: Arrays | None = None
    ) -> object:
        tables = () if positions is None else (positions,)
        xs = (q,) if k is None else (q, k)
        results = run(xs, tables, out if out is None else outputs(out, len(xs)))
        return results[0] if k is None else results

    return step


def _checked(xs: Arrays, others: Arrays, out: object) -> SomeKernel:
    """Return the kernel of arrays; refuse libraries and dtypes, and outputs, as `rotate` does."""
    kernel: SomeKernel = kernel_of(xs[0])
    outs = None if out is None else outputs(out, len(xs))
    check_library(kernel, xs[0], *xs[1:], *others, *(outs or ()))
    if kernel.check_xs is not None:
        kernel.check_xs(xs, outs)
    return kernel


def _shape(array: Operand) -> tuple[int, ...]:
    return tuple(np.shape(array))


def _as_tuple(arrays: object) -> Arrays | None:
    """Wrap a single array in a tuple; leave a sequence and None as they are."""
    return arrays if arrays is None or isinstance(arrays, (tuple, list)) else (arrays,)


def _run(
    options: Options | AngleOptions | None,
    xs: Arrays,
    tables: Arrays,
    out: Arrays | None,
    whole: Run,
    name: str,
) -> Run:
    prepared, kernel = _forms(xs, tables, out), kernel_of(xs[0])

    def checked(xs: Arrays, tables: Arrays, out: Arrays | None) -> Arrays:
        for x in xs:
            if not kernel.takes(x):
                raise TypeError(f"pass arrays as to rotary.{name}, got {brief(x)}")
        forms = _forms(xs, tables, out)
        for operand in {**prepared, **forms}:
            old, new = prepared.get(operand), forms.get(operand)
            if old != new:
                raise ValueError(
                    f"this call was prepared for {operand} {_described(old)}, got "
                    f"{_described(new)}: prepare a call for each shape and dtype, or call "
                    f"rotary.{name}"
                )
        return whole(xs, tables, out)

    if kernel.prepare is None or options is None:
        return checked
    return kernel.prepare(options, xs, tables, out, checked) or checked


def _forms(xs: Arrays, tables: Arrays, out: Arrays | None) -> dict[str, Form]:
    names = ("positions",) if len(tables) == 1 else ("cos", "sin", "positions")[: len(tables)]
    operands = dict(zip(names, tables, strict=True))
    for name, arrays in (("x", xs), ("out", out or ())):
        operands.update({f"{name}[{index}]": array for index, array in enumerate(arrays)})
    return {name: _form(array) for name, array in operands.items()}


def _form(array: Operand) -> Form:
    """Return dtype, shape and strides; strides of axes of size 1 are left out, JAX has none."""
    shape = tuple([int(size) for size in np.shape(array)])
    strides = array.stride() if hasattr(array, "stride") else getattr(array, "strides", ())
    steps = [int(step) for size, step in zip(shape, strides, strict=False) if size > 1]
    return str(getattr(array, "dtype", "list")).rpartition(".")[2], shape, steps


def _described(form: Form | None) -> str:
    if form is None:
        return "none"
    dtype, shape, steps = form
    return f"{dtype} {shape} with strides {steps}" if steps else f"{dtype} {shape}"
