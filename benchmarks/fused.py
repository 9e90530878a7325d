"""Norm, rotation and cache in one call against steps: `python -m benchmarks.fused`.

The shape of a prefill of Qwen3 8B, 2048 tokens, q 32 x 128 and k 8 x 128, as its projections make
them: (batch, seq, heads, head_dim). Beside `rotate` alone, a copy of v, and the RMS norm and rotary
function of transformers, eager and under torch.compile, forward, and forward and backward with
gradients of q, k and both weights. A timed call comes after an untimed one of its own; cases take
turns; medians. Writes benchmarks/results/DATE-fused.json and .md, and keeps what the file of the
day has of the other type: `--dtype` measures one, as `--quick` does. `--table` prints the table of
the newest.
"""

import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rotary import KVCache, Norm, Rotary, cos_sin, fused, rotate
from rotary import bench as timing

from . import command

SPEC = Rotary(head_dim=128, base=1_000_000.0)
HEADS = 32, 8
CHECKED = 515  # tokens of the calls that the gate compares
EPS = 1e-6
DTYPES = ("float32", "bfloat16")
# of the largest result; the gradients of weights are sums over all tokens and heads
LIMITS = {"float32": 2.0**-20, "bfloat16": 2.0**-7}
PEER_FACTOR = 4  # rounds after each step
ROTATE, COPY = "rotate out=", "a copy of v"
NORM, NORM_NEW = "norm + rotate, out=", "norm + rotate"
STORE, NORM_STORE = "rotate + cache", "norm + rotate + cache"
EAGER, COMPILED = "transformers eager", "transformers torch.compile"
BACK, BACK_EAGER, BACK_COMPILED = (
    f"{name}, forward and backward" for name in (NORM_NEW, EAGER, COMPILED)
)


class Limit(NamedTuple):
    """A limit: the time of `case` is at most `most` of the sum of the times of `others`."""

    case: str
    others: tuple[str, ...]
    most: float


TIME_LIMITS = (
    Limit(NORM, (ROTATE,), 1.5),
    Limit(NORM_NEW, (COMPILED,), 1 / 3),
    Limit(NORM_NEW, (EAGER,), 1 / 8),
    Limit(STORE, (ROTATE, COPY), 1.15),
    Limit(BACK, (BACK_COMPILED,), 1 / 3),
)
Group = dict[str, float]  # case -> median microseconds


def main() -> None:
    """Compare with float64, measure, print, write."""
    parser = command.parser(__doc__)
    command.add_table(parser, "the table of a file")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.set_defaults(seconds=5.0, tokens=2048)
    given = command.parsed(
        parser, {"tokens": CHECKED, "seconds": 0.01, "dtype": DTYPES[1:]}, command.RESULTS
    )
    if given.table is not None:
        report = json.loads(command.newest(given.table, "fused").read_text())
        print(table(report["groups"]))
        return
    torch.manual_seed(0)
    made = checked = {dtype: cases(dtype, CHECKED) for dtype in given.dtype}
    command.gate(errors(checked), "the formula in float64")
    if given.tokens != CHECKED:
        made = {dtype: cases(dtype, given.tokens) for dtype in given.dtype}
    groups = {dtype: measured(each, given.seconds) for dtype, each in made.items()}
    date = datetime.date.today().isoformat()
    if given.out is not None and (file := given.out / f"{date}-fused.json").exists():
        groups = {**json.loads(file.read_text())["groups"], **groups}
    report = {
        "date": date,
        "versions": timing.versions(),
        "threads": torch.get_num_threads(),
        "groups": groups,
    }
    command.publish(given.out, f"{date}-fused", as_markdown(report), report)


def operands(dtype: str, tokens: int) -> tuple[Tensor, ...]:
    """q, k, v, and the weights of q and k, in one type."""
    shapes = [(1, tokens, heads, SPEC.head_dim) for heads in (HEADS[0], HEADS[1], HEADS[1])]
    made = [torch.randn(shape) for shape in shapes]
    weights = [1 + 0.1 * torch.randn(SPEC.head_dim) for _ in range(2)]
    return tuple(x.to(getattr(torch, dtype)) for x in (*made, *weights))


def cases(dtype: str, tokens: int) -> dict[str, Callable[[], Any]]:
    """Every call; it returns what it made, (batch, seq, heads, head_dim), or q and the cache."""
    q, k, v, wq, wk = operands(dtype, tokens)
    tables = cos_sin(SPEC, torch.arange(tokens))
    outs, copied = (torch.empty_like(q), torch.empty_like(k)), torch.empty_like(v)
    norm = Norm(wq, wk, EPS)
    slots = torch.randperm(tokens + 64)[:tokens]
    memory = [torch.zeros(tokens + 64, HEADS[1], SPEC.head_dim, dtype=q.dtype) for _ in "kv"]
    cache = KVCache(*memory, slots)
    options: dict[str, Any] = {"tables": tables, "seq_dim": -3}
    theirs = transformers_steps(wq, wk, tables, q.dtype)
    compiled = torch.compile(theirs, dynamic=False)
    leaves = [x.clone().requires_grad_() for x in (q, k, wq, wk)]
    grads = [torch.randn_like(x) for x in (q, k)]

    def ours(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor) -> Any:
        return fused(q, k, None, SPEC, norm=Norm(wq, wk, EPS), **options)[:2]

    def stored(norm: Norm | None) -> Any:
        y, _, _ = fused(q, k, v, SPEC, norm=norm, cache=cache, out=outs[:1], **options)
        return y, cache.k

    def with_gradients(function: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.enable_grad():
                return torch.autograd.grad(function(*leaves), leaves, grads)

        return call

    return {
        ROTATE: lambda: rotate((q, k), *tables, SPEC, seq_dim=-3, out=outs),
        COPY: lambda: copied.copy_(v),
        NORM: lambda: fused(q, k, None, SPEC, norm=norm, out=outs, **options)[:2],
        NORM_NEW: lambda: ours(q, k, wq, wk),
        STORE: lambda: stored(None),
        NORM_STORE: lambda: stored(norm),
        EAGER: lambda: theirs(q, k, wq, wk),
        COMPILED: lambda: compiled(q, k, wq, wk),
        BACK: with_gradients(ours),
        BACK_EAGER: with_gradients(theirs),
        BACK_COMPILED: with_gradients(compiled),
        "operands": lambda: (q, k, wq, wk, grads, slots),
    }


def transformers_steps(wq: Tensor, wk: Tensor, tables: Any, dtype: torch.dtype) -> Any:
    """The norm and the rotary function of transformers' Qwen3, with the weights as arguments."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    norms = [qwen3.Qwen3RMSNorm(SPEC.head_dim, EPS) for _ in "qk"]
    cos, sin = (torch.cat((x, x), -1)[None].to(dtype) for x in tables)

    def steps(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor) -> Any:
        q, k = (
            torch.func.functional_call(norm, {"weight": w}, (x,)).transpose(1, 2)
            for norm, w, x in zip(norms, (wq, wk), (q, k), strict=True)
        )
        q, k = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return steps


def formula(q: Tensor, k: Tensor, wq: Tensor | None, wk: Tensor | None) -> list[Tensor]:
    """Norm and rotation in float64, by complex numbers, from base and positions alone."""
    results = []
    for x, weight in ((q, wq), (k, wk)):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        pairs = x.shape[-1] // 2
        frequencies = SPEC.base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * frequencies
        z = torch.complex(x[..., :pairs], x[..., pairs:]) * torch.polar(
            torch.ones_like(angles), angles
        )
        results.append(torch.cat((z.real, z.imag), -1))
    return results


def errors(made: dict[str, dict[str, Callable[[], Any]]]) -> Iterator[tuple[str, float, float]]:
    """(what, largest error over the largest result, limit) of the first call of every case."""
    for dtype, calls in made.items():
        q, k, wq, wk, grads, slots = calls["operands"]()
        wide = [x.double().requires_grad_() for x in (q, k, wq, wk)]
        normed = formula(*wide)
        slopes = torch.autograd.grad(normed, wide, [g.double() for g in grads])
        plain = formula(*wide[:2], None, None)
        for case, call in calls.items():
            if case in (COPY, "operands"):
                continue
            wanted = plain if case in (ROTATE, STORE) else normed
            wanted = slopes if "backward" in case else wanted
            with torch.no_grad():
                found = call()
                if case in (STORE, NORM_STORE):
                    found = found[0], found[1][slots][None]
                error = max(
                    ((y.double() - z).abs().max() / z.abs().max()).item()
                    for y, z in zip(found, wanted, strict=True)
                )
            factor = PEER_FACTOR if "transformers" in case else 1
            yield f"{case} {dtype}", error, factor * LIMITS[dtype] * (1 + 3 * ("back" in case))


def measured(made: dict[str, Callable[[], Any]], seconds: float) -> Group:
    """The median of each case, for so many seconds of rounds."""
    made = {case: call for case, call in made.items() if case != "operands"}
    rounds: list[Group] = []
    with torch.no_grad():
        for call in made.values():
            call()
        end = time.perf_counter() + seconds
        while len(rounds) < 5 or time.perf_counter() < end:
            rounds.append({case: timed(call) for case, call in made.items()})
    return {case: statistics.median(each[case] for each in rounds) * 1e6 for case in made}


def timed(call: timing.Case) -> float:
    """Seconds of a call after another one."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(groups: dict[str, Group]) -> str:
    """Microseconds of every case, then each limit and what was measured."""
    dtypes = list(groups)
    cases_ = list(groups[dtypes[0]])
    times = command.table(
        ("microseconds", *dtypes), [[c, *(f"{groups[d][c]:.0f}" for d in dtypes)] for c in cases_]
    )
    lines = []
    for case, others, most in TIME_LIMITS:
        line = [case, " + ".join(others), f"{most:.3g}"]
        for group in groups.values():
            ratio = group[case] / sum(group[other] for other in others)
            line.append(f"{ratio:.2f}" if ratio <= most else f"**{ratio:.2f}**")
        lines.append(line)
    return f"{times}\n\n{command.table(('', 'over', 'at most', *dtypes), lines)}"


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    machine = command.machine(report)
    return f"""\
# Fused calls, measured {report["date"]}

{machine}. `python -m benchmarks.fused` prints this page and says how it
measures. 2048 tokens, q {HEADS[0]} and k {HEADS[1]} heads of {SPEC.head_dim}; in bold what misses
its limit.

{table(report["groups"])}
"""


if __name__ == "__main__":
    main()
