"""All benchmarks in one run: `python -m benchmarks.run [--quick]`, or `make bench`.

The gate first; then every case side by side, medians and ratios; last, each bar the project set
itself with what was measured. Writes benchmarks/results/DATE.md and .json.
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rotary import Rotary, apply, cos_sin, rotate
from rotary import bench as timing
from rotary.kernels.geometry import Options, geometry_of
from rotary.kernels.torch import _formula as formula

from . import peers, verify

RESULTS = Path(__file__).parent / "results"
BASE = 500_000.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Rows = dict[str, dict[str, float]]  # case group -> case -> median milliseconds


def main() -> None:
    """Verify, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, no sequence of 32 768")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    verify.main()
    rows: Rows = {}
    with Console(stderr=True).status("measuring") as status:
        for name, medians in groups(quick):
            rows[name] = medians
            status.update(name)
    report = {
        "date": datetime.date.today().isoformat(),
        "versions": timing.versions(),
        "threads": torch.get_num_threads(),
        "milliseconds": rows,
        "bars": [dict(zip(("bar", "measured", "limit", "met"), bar, strict=True))
                 for bar in bars(rows)],
    }  # fmt: skip
    text = as_markdown(report)
    Console().print(_console_table(report))
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{report['date']}.md").write_text(text)
        (RESULTS / f"{report['date']}.json").write_text(json.dumps(report, indent=1) + "\n")


def groups(quick: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Every group of cases that are timed side by side."""
    for seq in (1, 512, 4096) if quick else (1, 512, 4096, 32768):
        rounds = {1: 201, 512: 51, 4096: 15, 32768: 5}[seq] // (3 if quick else 1)
        for dtype in DTYPES:
            for layout in ("half", "interleaved"):
                name = f"{_short(dtype)} {layout} seq {seq}"
                yield name, _prefill(seq, dtype, layout, rounds)
    for dtype in () if quick else DTYPES:
        yield f"{_short(dtype)} growth", _growth(dtype)
    for dtype in DTYPES[:2]:
        yield f"{_short(dtype)} transposed view seq 4096", _transposed(dtype)
        yield f"{_short(dtype)} forward + backward seq 4096", _backward(dtype)
        yield f"{_short(dtype)} decode, loop of calls", _decode(dtype)
        yield f"{_short(dtype)} under torch.compile seq 4096", _compiled(dtype)
    yield (
        "numpy float32 half seq 4096",
        _medians(timing.numpy_cases(Rotary(head_dim=128, base=BASE), timing.Shape(4096)), 11),
    )
    yield (
        "tables of 131 072 positions",
        _medians(timing.table_cases(Rotary(head_dim=128, base=BASE), 131_072), 15),
    )
    yield "start", _start()


def _prefill(seq: int, dtype: torch.dtype, layout: str, rounds: int) -> dict[str, float]:
    spec, shape = Rotary(head_dim=128, base=BASE, layout=layout), timing.Shape(seq)
    cases = timing.torch_cases(spec, shape, dtype)
    q, k = (torch.randn(shape.of(heads, 128)).to(dtype) for heads in (32, 8))
    is_half = layout == "half"
    more = peers.transformers_cases(spec, q, k) if is_half else peers.lucidrains_cases(spec, q, k)
    with torch.no_grad():
        return _medians({**cases, **more}, rounds, timing.torch_matmul())


def _growth(dtype: torch.dtype) -> dict[str, float]:
    """A short and a long sequence side by side, without the peers, whose intermediate results take
    the memory of the long one from it every round."""
    spec = Rotary(head_dim=128, base=BASE)
    cases = {}
    for seq in (4096, 32768):
        made = timing.torch_cases(spec, timing.Shape(seq), dtype)
        for name in ("copy", "rotary out="):
            cases[f"{name} {seq}"] = made[name]
    with torch.no_grad():
        return _medians(cases, 31, timing.torch_matmul())


def _transposed(dtype: torch.dtype) -> dict[str, float]:
    spec, shape = Rotary(head_dim=128, base=BASE), timing.Shape(4096)
    plain = timing.torch_cases(spec, shape, dtype)
    views = timing.torch_cases(spec, shape, dtype, transposed=True)
    cases = {}
    for name in ("rotary", "rotary out=", "rotary in place"):
        cases[f"{name}, contiguous"], cases[f"{name}, view"] = plain[name], views[name]
    return _medians(cases, 31, timing.torch_matmul())


def _backward(dtype: torch.dtype) -> dict[str, float]:
    spec, shape = Rotary(head_dim=128, base=BASE), timing.Shape(4096)
    q, k = (torch.randn(shape.of(n, 128)).to(dtype).requires_grad_() for n in (32, 8))
    grads = torch.randn_like(q), torch.randn_like(k)

    def with_backward(forward: timing.Case) -> timing.Case:
        return lambda: torch.autograd.grad(forward(), (q, k), grads)

    cases = {"rotary": lambda: apply(spec, q, k), **peers.transformers_cases(spec, q, k)}
    timed = {name: with_backward(case) for name, case in cases.items()}
    return _medians(timed, 9, timing.torch_matmul())


def _decode(dtype: torch.dtype) -> dict[str, float]:
    """One token, a thousand calls in a row: what a call costs, in milliseconds."""
    spec = Rotary(head_dim=128, base=BASE)
    q, k = torch.randn(1, 32, 1, 128).to(dtype), torch.randn(1, 8, 1, 128).to(dtype)
    position = torch.tensor([[1000]])
    cos, sin = cos_sin(spec, position)
    cases = {
        "rotate": lambda: rotate((q, k), cos, sin, spec),
        "apply": lambda: apply(spec, q, k, positions=position),
        **peers.transformers_cases(spec, q, k),
        **peers.lucidrains_cases(spec, q, k),
    }

    def many(case: timing.Case) -> timing.Case:
        return lambda: [case() and None for _ in range(1000)]

    with torch.no_grad():
        medians = _medians({name: many(case) for name, case in cases.items()}, 9)
    return {name: spent / 1000 for name, spent in medians.items()}


def _compiled(dtype: torch.dtype) -> dict[str, float]:
    """What torch.compile should see: the operator, or the formula for Inductor to fuse."""
    spec, shape = Rotary(head_dim=128, base=BASE), timing.Shape(4096)
    q, k = (torch.randn(shape.of(n, 128)).to(dtype) for n in (32, 8))
    cos, sin = cos_sin(spec, torch.arange(4096))
    geometry = geometry_of((q.shape, k.shape), cos.shape, None, Options())
    torch.compiler.reset()
    cases = {
        "operator": torch.compile(lambda: rotate((q, k), cos, sin, spec), fullgraph=True),
        "formula": torch.compile(
            lambda: formula((q, k), cos, sin, None, geometry, False), fullgraph=True
        ),
    }
    with torch.no_grad():
        return _medians(cases, 15, timing.torch_matmul())


def _start() -> dict[str, float]:
    """Milliseconds in fresh processes: imports, the first rotation with a cold and a warm cache."""
    import tempfile

    clock = "import time; start = time.perf_counter();"
    done = "; print(time.perf_counter() - start)"
    first = (
        "import numpy as np, rotary; q = np.ones((1, 32, 4096, 128), np.float32);"
        f"spec = rotary.Rotary(head_dim=128); {clock} rotary.apply(spec, q)"
    )
    spent: dict[str, list[float]] = {}
    for _ in range(5):
        with tempfile.TemporaryDirectory() as folder:
            for name, code in (
                ("import numpy", f"{clock} import numpy"),
                ("import rotary", f"{clock} import rotary"),
                ("first call, cold cache", first),
                ("first call, warm cache", first),
            ):
                answer = subprocess.run(
                    [sys.executable, "-c", code + done],
                    check=True,
                    capture_output=True,
                    env={"NUMBA_CACHE_DIR": folder},
                )
                spent.setdefault(name, []).append(float(answer.stdout) * 1e3)
    return {name: sorted(times)[len(times) // 2] for name, times in spent.items()}


def bars(rows: Rows) -> Iterator[tuple[str, float, str, bool]]:
    """(bar, measured, limit, met) of every bar the project set itself."""
    at_4096 = {
        (dtype, layout): rows[f"{dtype} {layout} seq 4096"]
        for dtype in map(_short, DTYPES)
        for layout in ("half", "interleaved")
    }
    limits = {"float32": (1.2, 1.0), "bfloat16": (1.35, 1.2), "float16": (1.35, 1.2)}
    for (dtype, layout), row in at_4096.items():
        out, own = limits[dtype]
        for name, limit in (("rotary out=", out), ("rotary in place", own)):
            ratio = row[name] / row["copy"]
            yield f"{name} / copy, {dtype} {layout}", ratio, f"<= {limit}", ratio <= limit
    faster = {
        "float32": (4, 1.8, 7),
        "bfloat16": (10, 2.5, 25),
    }
    for dtype, (eager, compiled, lucid) in faster.items():
        half, interleaved = at_4096[dtype, "half"], at_4096[dtype, "interleaved"]
        yield _at_least(f"transformers eager / apply, {dtype}", half["transformers eager"],
                        half["rotary"], eager)  # fmt: skip
        yield _at_least(f"transformers compiled / apply, {dtype}", half["transformers compiled"],
                        half["rotary"], compiled)  # fmt: skip
        yield _at_least(
            f"rotary-embedding-torch / apply, {dtype}",
            interleaved["rotary-embedding-torch"],
            interleaved["rotary"],
            lucid,
        )
    half, interleaved = at_4096["float32", "half"], at_4096["float32", "interleaved"]
    for name, row, limit in (
        ("transformers eager", half, 12),
        ("transformers compiled", half, 5),
        ("rotary-embedding-torch", interleaved, 20),
    ):
        yield _at_least(f"{name} / out=, float32", row[name], row["rotary out="], limit)
    for dtype in ("float32", "bfloat16"):
        row = rows[f"{dtype} forward + backward seq 4096"]
        for name, limit in (("transformers eager", 6), ("transformers compiled", 3)):
            yield _at_least(f"{name} / rotary, {dtype} with backward", row[name], row["rotary"],
                            limit)  # fmt: skip
        row = rows[f"{dtype} decode, loop of calls"]
        micro = row["rotate"] * 1e3
        yield f"one token, us a call, {dtype}", micro, "<= 25", micro <= 25
        yield _at_least(f"transformers eager / rotate, one token {dtype}",
                        row["transformers eager"], row["rotate"], 3)  # fmt: skip
        row = rows[f"{dtype} transposed view seq 4096"]
        for name in ("rotary", "rotary out=", "rotary in place"):
            ratio = row[f"{name}, view"] / row[f"{name}, contiguous"]
            yield f"{name}, view / contiguous, {dtype}", ratio, "<= 1.1", ratio <= 1.1
    row = rows["tables of 131 072 positions"]
    yield _at_least("numpy float32 / rotary, tables", row["numpy float32"], row["rotary"], 5)
    for dtype in map(_short, DTYPES) if "float32 growth" in rows else ():
        row = rows[f"{dtype} growth"]
        ratio = row["rotary out= 32768"] / row["rotary out= 4096"]
        yield f"growth from 4096 to 32768, {dtype}", ratio, "<= 8.8", ratio <= 8.8
    for dtype in ("float32", "bfloat16"):
        row = rows[f"{dtype} under torch.compile seq 4096"]
        yield _at_least(f"compiled formula / operator, {dtype}", row["formula"], row["operator"], 1)
    row = rows["start"]
    for name, measured, limit in (
        ("import rotary over numpy, s", row["import rotary"] - row["import numpy"], 0.15),
        ("first call, cold cache, s", row["first call, cold cache"], 5),
        ("first call, warm cache, s", row["first call, warm cache"], 0.6),
    ):
        yield name, measured / 1e3, f"<= {limit}", measured / 1e3 <= limit


def _at_least(
    name: str, slower: float, faster: float, limit: float
) -> tuple[str, float, str, bool]:
    return name, slower / faster, f">= {limit}", slower / faster >= limit


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page: machine, bars, every median."""
    facts = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    lines = [
        f"# Measured {report['date']}",
        "",
        f"{facts}; {report['threads']} threads. `python -m benchmarks.run` prints this page.",
        "Llama-3-8B shape: q 32 heads, k 8 heads, head_dim 128, one sequence; medians of one run.",
        "",
        "| bar | measured | limit | |",
        "|---|---|---|---|",
    ]
    for bar in report["bars"]:
        verdict = "met" if bar["met"] else "**missed**"
        lines.append(f"| {bar['bar']} | {bar['measured']:.2f} | {bar['limit']} | {verdict} |")
    lines += ["", "| group | case | ms | x copy |", "|---|---|---|---|"]
    for group, cases in report["milliseconds"].items():
        for case, spent in cases.items():
            ratio = f"{spent / cases['copy']:.2f}" if "copy" in cases else ""
            lines.append(f"| {group} | {case} | {spent:.4g} | {ratio} |")
    return "\n".join(lines) + "\n"


def _console_table(report: dict[str, Any]) -> Table:
    table = Table("bar", "measured", "limit", "", box=None)
    for bar in report["bars"]:
        verdict = "met" if bar["met"] else "[red]missed[/red]"
        table.add_row(bar["bar"], f"{bar['measured']:.2f}", bar["limit"], verdict)
    return table


def _medians(
    cases: dict[str, timing.Case], rounds: int, between: timing.Case | None = None
) -> dict[str, float]:
    measured = timing.measure(cases, rounds=max(rounds, 3), between=between)
    return {name: each.median * 1e3 for name, each in measured.items()}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
