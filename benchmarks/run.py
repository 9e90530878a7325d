"""All benchmarks of the CPU in one run: `python -m benchmarks.run`, or `make bench`.

The gate first; then every case side by side, medians and ratios; last, each limit the project set
itself with what was measured. Writes benchmarks/results/DATE.md and .json. `--table` prints the
tables of docs/numbers.md from the newest of these and measures nothing. `--quick` leaves out what
is compiled, by torch or by Numba into an empty cache.
"""

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console

from rotary import Rotary, apply, cos_sin, rotate
from rotary import bench as timing

from . import command, decode, peers, verify

BASE = 500_000.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Rows = dict[str, dict[str, float]]  # case group -> case -> median milliseconds
Verdict = tuple[str, float, str, bool]  # what, measured, limit, met


class Plan(NamedTuple):
    """The sizes of a run.

    rounds     of every sequence length of a prefill
    seq, long  the lengths that the limits are of, and that growth is measured from and to
    calls      of one token in a row
    positions  of the tables
    starts     fresh processes for each kind of start
    compiled   whether torch.compile and the first call of a process are measured
    """

    rounds: dict[int, int]
    seq: int
    long: int
    calls: int
    positions: int
    starts: int
    compiled: bool


FULL = Plan({1: 201, 512: 51, 4096: 15, 32_768: 5}, 4096, 32_768, 1000, 131_072, 5, True)
QUICK = Plan({1: 3, 64: 3}, 64, 128, 10, 1024, 1, False)


def main() -> None:
    """Verify, measure, print, write."""
    parser = command.parser(__doc__)
    command.add_table(parser, "the tables of docs/numbers.md")
    parser.set_defaults(plan=FULL)
    given = command.parsed(parser, {"plan": QUICK}, command.RESULTS)
    if given.table is not None:
        print(short_tables(json.loads(command.newest(given.table).read_text())))
        return
    torch.manual_seed(0)
    verify.gate(given.plan.compiled)
    rows: Rows = {}
    with Console(stderr=True).status("measuring") as status:
        for name, medians in groups(given.plan):
            rows[name] = medians
            status.update(name)
    report = {
        "date": datetime.date.today().isoformat(),
        "versions": timing.versions(),
        "threads": torch.get_num_threads(),
        "milliseconds": rows,
        "bars": [dict(zip(("bar", "measured", "limit", "met"), each, strict=True))
                 for each in verdicts(rows, given.plan)],
    }  # fmt: skip
    command.publish(given.out, report["date"], as_markdown(report), report)


def groups(plan: Plan) -> Iterator[tuple[str, dict[str, float]]]:
    """Every group of cases that are timed side by side."""
    spec, seq = Rotary(head_dim=128, base=BASE), plan.seq
    for length, rounds in plan.rounds.items():
        for dtype in DTYPES:
            for layout in ("half", "interleaved"):
                name = f"{_short(dtype)} {layout} seq {length}"
                yield name, _prefill(length, dtype, layout, rounds, plan.compiled)
    for dtype in DTYPES:
        yield f"{_short(dtype)} growth", _growth(spec, dtype, plan)
    for dtype in DTYPES[:2]:
        yield f"{_short(dtype)} transposed view seq {seq}", _transposed(spec, dtype, plan)
        yield f"{_short(dtype)} forward + backward seq {seq}", _backward(spec, dtype, plan)
        yield f"{_short(dtype)} decode, loop of calls", _decode(spec, dtype, plan)
        if plan.compiled:
            yield f"{_short(dtype)} under torch.compile seq {seq}", _compiled(spec, dtype, plan)
    yield (
        f"numpy float32 half seq {seq}",
        _medians(timing.numpy_cases(spec, timing.Shape(seq)), _rounds(plan, 11)),
    )
    yield (
        f"tables of {plan.positions:,} positions".replace(",", " "),
        _medians(timing.table_cases(spec, plan.positions), _rounds(plan, 15)),
    )
    yield "start", _start(plan)


def _rounds(plan: Plan, rounds: int) -> int:
    """So many rounds; in a quick run no more than it has for the shortest prefill."""
    return min(rounds, max(plan.rounds.values()))


def _prefill(
    seq: int, dtype: torch.dtype, layout: str, rounds: int, compiled: bool
) -> dict[str, float]:
    spec, shape = Rotary(head_dim=128, base=BASE, layout=layout), timing.Shape(seq)
    cases = timing.torch_cases(spec, shape, dtype)
    with torch.no_grad():
        more = peers.cases(spec, *_inputs(shape, dtype), compiled)
        return _medians({**cases, **more}, rounds, timing.torch_matmul())


def _inputs(shape: timing.Shape, dtype: torch.dtype) -> list[torch.Tensor]:
    heads = shape.q_heads, shape.k_heads
    return [torch.randn(shape.of(count, 128)).to(dtype) for count in heads]


def _growth(spec: Rotary, dtype: torch.dtype, plan: Plan) -> dict[str, float]:
    """A short and a long sequence side by side, without the peers, whose intermediate results take
    the memory of the long one from it every round."""
    cases = {}
    for seq in (plan.seq, plan.long):
        made = timing.torch_cases(spec, timing.Shape(seq), dtype)
        for name in ("copy", "rotary out="):
            cases[f"{name} {seq}"] = made[name]
    with torch.no_grad():
        return _medians(cases, _rounds(plan, 31), timing.torch_matmul())


def _transposed(spec: Rotary, dtype: torch.dtype, plan: Plan) -> dict[str, float]:
    shape = timing.Shape(plan.seq)
    plain = timing.torch_cases(spec, shape, dtype)
    views = timing.torch_cases(spec, shape, dtype, transposed=True)
    cases = {}
    for name in ("rotary", "rotary out=", "rotary in place"):
        cases[f"{name}, contiguous"], cases[f"{name}, view"] = plain[name], views[name]
    return _medians(cases, _rounds(plan, 31), timing.torch_matmul())


def _backward(spec: Rotary, dtype: torch.dtype, plan: Plan) -> dict[str, float]:
    q, k = (x.requires_grad_() for x in _inputs(timing.Shape(plan.seq), dtype))
    grads = torch.randn_like(q), torch.randn_like(k)

    def with_backward(forward: timing.Case) -> timing.Case:
        return lambda: torch.autograd.grad(forward(), (q, k), grads)

    cases = {"rotary": lambda: apply(spec, q, k), **peers.cases(spec, q, k, plan.compiled)}
    timed = {name: with_backward(case) for name, case in cases.items()}
    return _medians(timed, _rounds(plan, 9), timing.torch_matmul())


def _decode(spec: Rotary, dtype: torch.dtype, plan: Plan) -> dict[str, float]:
    """One token, many calls in a row: what a call costs, in milliseconds."""
    q, k = _inputs(timing.Shape(1), dtype)
    position = torch.tensor([[1000]])
    cos, sin = cos_sin(spec, position)
    cases = {
        "rotate": lambda: rotate((q, k), cos, sin, spec),
        "apply": lambda: apply(spec, q, k, positions=position),
        **peers.transformers_cases(spec, q, k, plan.compiled),
        **peers.lucidrains_cases(spec, q, k),
    }
    spent = decode.in_a_loop(cases, plan.calls, _rounds(plan, 9))
    return {name: microseconds / 1e3 for name, microseconds in spent.items()}


def _compiled(spec: Rotary, dtype: torch.dtype, plan: Plan) -> dict[str, float]:
    """What torch.compile should see: the operator, or the formula for Inductor to fuse."""
    q, k = _inputs(timing.Shape(plan.seq), dtype)
    cos, sin = cos_sin(spec, torch.arange(plan.seq))

    def formula() -> list[torch.Tensor]:
        turned = []
        for x in (q, k):
            first, second = x.float().chunk(2, -1)
            both = first * cos - second * sin, second * cos + first * sin
            turned.append(torch.cat(both, -1).to(x.dtype))
        return turned

    torch.compiler.reset()
    operator = torch.compile(lambda: rotate((q, k), cos, sin, spec), fullgraph=True)
    cases = {"operator": operator, "formula": torch.compile(formula, fullgraph=True)}
    with torch.no_grad():
        return _medians(cases, _rounds(plan, 15), timing.torch_matmul())


def _start(plan: Plan) -> dict[str, float]:
    """Milliseconds in fresh processes: imports, the first rotation with a cold and a warm cache."""
    clock = "import time; start = time.perf_counter();"
    done = "; print(time.perf_counter() - start)"
    first, of_torch = (
        f"import {library} as xp, rotary; q = xp.ones((1, 32, 4096, 128), dtype=xp.float32);"
        f"spec = rotary.Rotary(head_dim=128); {clock} rotary.apply(spec, q)"
        for library in ("numpy", "torch")
    )
    starts = {"import numpy": f"{clock} import numpy", "import rotary": f"{clock} import rotary"}
    if plan.compiled:
        starts |= {"first call, cold cache": first, "first call, warm cache": first}
        starts["first call of torch, warm cache"] = of_torch
    spent: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(plan.starts):
        with tempfile.TemporaryDirectory() as folder:
            for name, code in starts.items():
                answer = subprocess.run(
                    [sys.executable, "-c", code + done],
                    check=True,
                    capture_output=True,
                    env={**os.environ, "NUMBA_CACHE_DIR": folder},
                )
                spent[name].append(float(answer.stdout) * 1e3)
    return {name: sorted(times)[len(times) // 2] for name, times in spent.items()}


def verdicts(rows: Rows, plan: Plan) -> Iterator[Verdict]:
    """Every limit that the project set itself whose cases were measured."""

    def most(name: str, group: str, case: str, other: str, limit: float) -> Iterator[Verdict]:
        """At most so many times as long as another case of the group."""
        ratio = rows[group][case] / rows[group][other]
        yield name, ratio, f"<= {limit}", ratio <= limit

    def least(name: str, group: str, case: str, own: str, limit: float) -> Iterator[Verdict]:
        """At least so many times as long as our case of the group."""
        if case in rows.get(group, {}):
            ratio = rows[group][case] / rows[group][own]
            yield name, ratio, f">= {limit}", ratio >= limit

    eager, compiled, lucid = PEERS
    limits = {"float32": (1.2, 1.0), "bfloat16": (1.35, 1.2), "float16": (1.35, 1.2)}
    for dtype, (out, own) in limits.items():
        for layout in ("half", "interleaved"):
            group = f"{dtype} {layout} seq {plan.seq}"
            for name, limit in (("rotary out=", out), ("rotary in place", own)):
                yield from most(f"{name} / copy, {dtype} {layout}", group, name, "copy", limit)
    for dtype, faster in {"float32": (4, 1.8, 7), "bfloat16": (10, 2.5, 25)}.items():
        for name, limit in zip(PEERS, faster, strict=True):
            yield from least(f"{name} / apply, {dtype}", _group_of(name, dtype, plan), name,
                             "rotary", limit)  # fmt: skip
    for name, limit in ((eager, 12), (compiled, 5), (lucid, 20)):
        yield from least(f"{name} / out=, float32", _group_of(name, "float32", plan), name,
                         "rotary out=", limit)  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        group = f"{dtype} forward + backward seq {plan.seq}"
        for name, limit in ((eager, 6), (compiled, 3)):
            yield from least(f"{name} / rotary, {dtype} with backward", group, name, "rotary",
                             limit)  # fmt: skip
        group = f"{dtype} decode, loop of calls"
        micro = rows[group]["rotate"] * 1e3
        yield f"one token, us a call, {dtype}", micro, "<= 25", micro <= 25
        yield from least(f"{eager} / rotate, one token {dtype}", group, eager, "rotate", 3)
        group = f"{dtype} transposed view seq {plan.seq}"
        for name in ("rotary", "rotary out=", "rotary in place"):
            yield from most(f"{name}, view / contiguous, {dtype}", group, f"{name}, view",
                            f"{name}, contiguous", 1.1)  # fmt: skip
    group = f"tables of {plan.positions:,} positions".replace(",", " ")
    yield from least("numpy float32 / rotary, tables", group, "numpy float32", "rotary", 5)
    for dtype in map(_short, DTYPES):
        yield from most(f"growth from {plan.seq} to {plan.long}, {dtype}", f"{dtype} growth",
                        f"rotary out= {plan.long}", f"rotary out= {plan.seq}",
                        1.1 * plan.long / plan.seq)  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        group = f"{dtype} under torch.compile seq {plan.seq}"
        yield from least(f"compiled formula / operator, {dtype}", group, "formula", "operator", 1)
    row = rows["start"]
    seconds = {"import rotary over numpy, s": (row["import rotary"] - row["import numpy"], 0.15)}
    for name, limit in (("first call, cold cache", 5), ("first call, warm cache", 0.6)):
        if name in row:
            seconds[f"{name}, s"] = row[name], limit
    for name, (spent, limit) in seconds.items():
        yield name, spent / 1e3, f"<= {limit}", spent / 1e3 <= limit


PEERS = ("transformers eager", "transformers compiled", "rotary-embedding-torch")


def _group_of(peer: str, dtype: str, plan: Plan) -> str:
    layout = "interleaved" if peer == "rotary-embedding-torch" else "half"
    return f"{dtype} {layout} seq {plan.seq}"


# --- the page, and the tables of docs/numbers.md ---


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page: machine, limits, every median."""
    machine = command.machine(report)
    bars = [
        (bar["bar"], f"{bar['measured']:.2f}", bar["limit"], "met" if bar["met"] else "**missed**")
        for bar in report["bars"]
    ]
    times = [
        (group, case, f"{spent:.4g}", f"{spent / cases['copy']:.2f}" if "copy" in cases else "")
        for group, cases in report["milliseconds"].items()
        for case, spent in cases.items()
    ]
    return f"""\
# Measured {report["date"]}

{machine}. `python -m benchmarks.run` prints this page.
Llama-3-8B shape: q 32 heads, k 8 heads, head_dim 128, one sequence; medians of one run.

{command.table(("bar", "measured", "limit", ""), bars)}

{command.table(("group", "case", "ms", "x copy"), times)}
"""


def short_tables(report: dict[str, Any]) -> str:
    """The tables of docs/numbers.md: times over that of a copy of the same bytes, then times."""
    rows = report["milliseconds"]

    def over_copy(label: str, layout: str, case: str) -> list[str]:
        groups = (rows[f"{dtype} {layout} seq {FULL.seq}"] for dtype in ("float32", "bfloat16"))
        ratios = [group[case] / group["copy"] for group in groups]
        return [label, *(f"{ratio:.0f}" if ratio > 5 else f"{ratio:.2f}" for ratio in ratios)]

    def against(label: str, ours: float, theirs: float, note: str = "") -> list[str]:
        return [label, f"{ours:.3g}", f"{note}{theirs:.3g}"]

    backward = rows[f"float32 forward + backward seq {FULL.seq}"]
    token, tables = rows["float32 decode, loop of calls"], rows["tables of 131 072 positions"]
    copies = [
        times["copy"] for name, times in rows.items()
        if name.startswith("bfloat16 ") and name.endswith(f" seq {FULL.seq}") and "copy" in times
    ]  # fmt: skip
    ratios = [
        over_copy("`rotate(..., out=)`, half layout", "half", "rotary out="),
        over_copy("`rotate(..., out=)`, interleaved layout", "interleaved", "rotary out="),
        over_copy("in place, half layout", "half", "rotary in place"),
        over_copy("`apply`, new outputs", "half", "rotary"),
        over_copy("transformers, eager", "half", "transformers eager"),
        over_copy("transformers, `torch.compile`", "half", "transformers compiled"),
        over_copy("rotary-embedding-torch, interleaved", "interleaved", "rotary-embedding-torch"),
    ]
    times = [
        against("forward and backward, float32, ms", backward["rotary"],
                backward["transformers eager"]),
        against("one token, q and k, float32, a loop of such calls, us", 1e3 * token["rotate"],
                1e3 * token["transformers eager"]),
        against("cos and sin of 131 072 positions x 64 pairs, ms", tables["rotary"],
                tables["numpy float32"], "NumPy float32: "),
    ]  # fmt: skip
    return f"""\
Measured {report["date"]} on {report["versions"]["cpu"]}, {report["threads"]} threads:

{command.table((f"seq {FULL.seq}", "float32", "bfloat16"), ratios)}

{command.table(("", "rotary", "transformers eager"), times)}

In that run a copy of q and k in bfloat16 took {min(copies):.1f} to {max(copies):.1f} ms."""


def _medians(
    cases: dict[str, timing.Case], rounds: int, between: timing.Case | None = None
) -> dict[str, float]:
    measured = timing.measure(cases, rounds=rounds, between=between)
    return {name: each.median * 1e3 for name, each in measured.items()}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
