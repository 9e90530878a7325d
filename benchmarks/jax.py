"""JAX under jit: `python -m benchmarks.jax`, CPU time side by side and the ratio to the formula.

The formula is what code bases write today: x * cos + turned(x) * sin with float32 tables of full
width, made of given ones. The gate first: nothing is timed that does not give the right numbers.
Exits with status 1 if a rotation, of given tables or of tables made inside, takes longer than the
formula by more than the noise.

Times are those of all threads of the process, which a busy machine stretches little; a ratio is the
median of those of the rounds. `python -m benchmarks.jax --seq 128` is the same in the cache: at the
default of 4096 all wait for the memory of their new outputs. `--quick` has one dtype, and no time
fails it. On a GPU the clock is the wall's, over 20 calls of 65536 tokens that are given to it at
once: the host takes longer over a short one than the device. --out names a folder for the table,
DATE-jax.md, or DATE-cuda-jax.md.
"""

import datetime
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rotary import Rotary, apply, cos_sin, rotate
from rotary import bench as timing

from . import command
from .reference import LIMITS, error, rotated

BASE = 500_000.0
NOISE = 0.1  # of a ratio, from run to run
DTYPES = ("float32", "bfloat16")
LAYOUTS = ("half", "interleaved")
Function = Callable[..., Any]
Group = tuple[dict[str, Function], tuple[Any, ...]]  # functions to compile, their arguments


def main() -> None:
    """Verify, measure, print."""
    parser = command.parser(__doc__)
    seq = 65536 if is_on_gpu() else 4096
    parser.add_argument("--seq", type=int, default=seq, help=f"tokens; default {seq}, 64 if quick")
    parser.set_defaults(rounds=31, dtypes=DTYPES)
    given = command.parsed(parser, {"seq": 64, "rounds": 3, "dtypes": DTYPES[1:]})
    kinds = [(dtype, layout) for dtype in given.dtypes for layout in LAYOUTS]
    named = {kind: groups(*kind, timing.Shape(given.seq)) for kind in kinds}
    command.gate(
        (error for kind in kinds for error in errors(*kind, *named[kind]["forward"])),
        "complex numbers in float64",
    )
    rows, slower = [], []
    for kind in kinds:
        for group, (functions, arguments) in named[kind].items():
            name = " ".join((*kind, group))
            times = measured(functions, arguments, given.rounds)
            for case, spent in times.items():
                ratio = _ratio(times["formula"], spent)
                rows.append((name, case, f"{statistics.median(spent):.3g}",
                             f"{_ratio(spent, times['copy']):.2f}", f"{ratio:.2f}"))  # fmt: skip
                if case.startswith("rotary") and ratio < 1 - NOISE:
                    slower.append(f"{name}, {case}")
    machine = f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {timing.versions()['cpu']}"
    heads = ("group", "case", "ms" if is_on_gpu() else "CPU ms", "x copy", "formula / it")
    date, name = datetime.date.today().isoformat(), "cuda-jax" if is_on_gpu() else "jax"
    text = f"""\
# Measured {date}: rotations of JAX under jit

`python -m benchmarks.jax --seq {given.seq}`: {machine}.

{command.table(heads, rows)}
"""
    print(text)
    command.write(given.out, {f"{date}-{name}.md": text})
    if slower and not given.quick:
        sys.exit("slower than the formula: " + "; ".join(slower))


def groups(dtype: str, layout: str, shape: timing.Shape) -> dict[str, Group]:
    """The rotation and its gradient."""
    spec = Rotary(head_dim=128, base=BASE, layout=layout)
    keys = jax.random.split(jax.random.key(0), 2)
    q, k = (
        jax.random.normal(key, shape.of(heads, 128)).astype(dtype)
        for key, heads in zip(keys, (shape.q_heads, shape.k_heads), strict=True)
    )
    tables = cos_sin(spec, jnp.arange(shape.seq))

    def formula(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        cos, sin = (_full_width(table, layout) for table in (cos, sin))
        return tuple((x * cos + _turned(x, layout) * sin).astype(x.dtype) for x in (q, k))

    forward = {
        "copy": lambda q, k, cos, sin: (jnp.copy(q), jnp.copy(k)),
        "formula": formula,
        "rotary": lambda q, k, cos, sin: rotate((q, k), cos, sin, spec),
        "rotary, tables inside": lambda q, k, cos, sin: apply(spec, q, k),
    }

    def gradient(function: Function) -> Function:
        def back(q: Any, k: Any, cos: Any, sin: Any) -> Any:
            return jax.vjp(lambda *x: function(*x, cos, sin), q, k)[1]((q, k))

        return back

    backward = {"copy": forward["copy"]}
    backward |= {name: gradient(forward[name]) for name in ("formula", "rotary")}
    return {"forward": (forward, (q, k, *tables)), "gradient": (backward, (q, k, *tables))}


def errors(
    dtype: str, layout: str, functions: dict[str, Function], arguments: tuple[Any, ...]
) -> Iterator[tuple[str, float, float]]:
    """(what, largest error over the largest result, limit) of one head of every rotation."""
    x = np.asarray(arguments[0][:, :1]).astype(np.float64)
    wanted = rotated(x, layout, BASE)
    for name, function in functions.items():
        if name != "copy":
            got = jax.jit(function)(*arguments)[0][:, :1]
            yield f"{name} {dtype} {layout}", error([got], [wanted]), LIMITS[dtype]


def measured(
    functions: dict[str, Function], arguments: tuple[Any, ...], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each compiled function, in turn, for every round."""
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    spent: dict[str, list[float]] = {name: [] for name in compiled}
    order = random.Random(0)
    clock, calls = (time.perf_counter, 20) if is_on_gpu() else (time.process_time, 1)
    for number in range(rounds + 2):
        # a case writes to memory that the one before it has freed: none always follows the same
        for name in order.sample(list(compiled), len(compiled)):
            start = clock()
            for _ in range(calls):
                result = compiled[name](*arguments)
            jax.block_until_ready(result)
            if number >= 2:
                spent[name].append((clock() - start) / calls * 1e3)
            del result
    return spent


def is_on_gpu() -> bool:
    """Whether JAX puts arrays on a GPU."""
    return jax.default_backend() == "gpu"


def _ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def _full_width(table: Any, layout: str) -> Any:
    if layout == "half":
        return jnp.concatenate((table, table), axis=-1)
    return jnp.repeat(table, 2, axis=-1)


def _turned(x: Any, layout: str) -> Any:
    """x with the members of each pair swapped and one negated: what the sine multiplies."""
    if layout == "half":
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate((-second, first), axis=-1)
    return jnp.stack((-x[..., 1::2], x[..., ::2]), axis=-1).reshape(x.shape)


if __name__ == "__main__":
    main()
