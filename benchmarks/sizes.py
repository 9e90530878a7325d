"""A prefill of every size against a copy of the same bytes: `python -m benchmarks.sizes`.

256 to 32768 tokens, three types, both layouts, two head counts: `out=` and in place, beside vLLM's
operator where it can be imported. A timed call comes after an untimed one of its own, so each finds
the caches as it left them; cases take turns, and a ratio is the median of those of every round.
Writes benchmarks/results/DATE-sizes.json, .md and .png, and keeps what the file of the day has of
other sizes: `--tokens` and `--dtype` measure a part. `--table` prints the table of the newest.

The limit is what the memory and the arithmetic allow, measured beside it: a pass over the same
bytes (a copy for `out=`, an inversion of every bit for in place) and those of the tables,
or the rows at the time that a row takes in the second cache, whichever is longer.
"""

import datetime
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rotary import Rotary, cos_sin, rotate
from rotary import bench as timing

from . import command, decode
from .reference import rotated

BASE = 500_000.0
DIM = 128
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("half", "interleaved")
HEADS = ((32, 8), (28, 4))
TOKENS = tuple(2**power for power in range(8, 16))
BARS = {"float32": (1.2, 1.0), "bfloat16": (1.35, 1.2), "float16": (1.35, 1.2)}  # of a copy
NEAR = 1.15  # of the limit, where that is above the bar
COPY, OUT, OWN, INVERT = "copy", "rotate out=", "rotate in place", "invert in place"
VLLM = decode.VLLM

Group = dict[str, float]  # case -> its time over that of the copy; "copy": microseconds


def main() -> None:
    """Compare with float64, measure, print, write."""
    parser = command.parser(__doc__)
    parser.add_argument(
        "--table", type=Path, nargs="?", const=command.RESULTS, metavar="JSON",
        help="print and draw the table of a file; default: of the newest results",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.set_defaults(seconds=0.6)
    given = command.parsed(parser, {"tokens": (16, 32), "seconds": 0.01}, command.RESULTS)
    if given.table is not None:
        path = given.table
        newest = max(path.glob("????-??-??-sizes.json")) if path.is_dir() else path
        groups = json.loads(newest.read_text())["groups"]
        print(table(groups))
        draw(groups, newest.with_suffix(".png"))
        return
    torch.manual_seed(0)
    command.gate(errors(), "complex numbers in float64")
    groups = dict(measured(given.tokens, given.dtype, given.seconds))
    date = datetime.date.today().isoformat()
    if given.out is not None and (file := given.out / f"{date}-sizes.json").exists():
        groups = {**json.loads(file.read_text())["groups"], **groups}
    report = {
        "date": date,
        "versions": timing.versions(),
        "threads": torch.get_num_threads(),
        "groups": groups,
    }
    text = as_markdown(report)
    print(text)
    files = {".md": text, ".json": json.dumps(report, indent=1) + "\n"}
    command.write(given.out, {f"{date}-sizes{end}": files[end] for end in files})
    if given.out is not None:
        draw(groups, given.out / f"{date}-sizes.png")


def measured(tokens: Any, dtypes: Any, seconds: float) -> Iterator[tuple[str, Group]]:
    """Every group by its name: type, layout, heads and tokens."""
    for dtype in dtypes:
        for layout in LAYOUTS:
            row = row_microseconds(layout, dtype)
            for heads in HEADS:
                for seq in tokens:
                    made = cases(layout, dtype, heads, seq)
                    yield name(dtype, layout, heads, seq), compared(made, seconds, {
                        # x is read and written, a table row serves all heads
                        "bytes": (2 * sum(heads) * DIM * getattr(torch, dtype).itemsize + 4 * DIM)
                        / (2 * sum(heads) * DIM * getattr(torch, dtype).itemsize),
                        "rows": sum(heads) * seq * row / torch.get_num_threads(),
                    })  # fmt: skip


def name(dtype: str, layout: str, heads: tuple[int, int], seq: int) -> str:
    """The name of a group.

    >>> name("float32", "half", (32, 8), 256)
    'float32 half q 32 k 8 seq 256'
    """
    return f"{dtype} {layout} q {heads[0]} k {heads[1]} seq {seq}"


def cases(layout: str, dtype: str, heads: tuple[int, int], seq: int) -> dict[str, timing.Case]:
    """Calls that write to memory that is there, and return what they wrote."""
    spec = Rotary(head_dim=DIM, base=BASE, layout=layout)
    q, k = (torch.randn(1, count, seq, DIM).to(getattr(torch, dtype)) for count in heads)
    outs, own = ((torch.empty_like(q), torch.empty_like(k)) for _ in range(2))
    bits = [x.view(torch.int32) for x in own]
    for x, y in zip(own, (q, k), strict=True):
        x.copy_(y)
    cos, sin = cos_sin(spec, torch.arange(seq))
    made: dict[str, timing.Case] = {
        COPY: lambda: [y.copy_(x) for x, y in zip((q, k), outs, strict=True)],
        OUT: lambda: rotate((q, k), cos, sin, spec, seq_dim=-2, out=outs),
        OWN: lambda: rotate(own, cos, sin, spec, seq_dim=-2, out=own),
        INVERT: lambda: [x.bitwise_not_() for x in bits],
    }
    operator = decode.vllm_operator()
    if operator is not None:
        both = torch.cat((cos, sin), -1).to(q.dtype)
        at = torch.arange(seq)
        # (tokens, heads x head_dim), in place
        flat = [x[0].transpose(0, 1).reshape(seq, -1).clone() for x in (q, k)]
        views = [y.view(seq, -1, DIM).transpose(0, 1)[None] for y in flat]

        def by_vllm() -> Any:
            operator(at, *flat, DIM, both, layout == "half")
            return views

        made[VLLM] = by_vllm
    return made


def errors() -> Iterator[tuple[str, float, float]]:
    """(what, largest error over the largest result, limit) of the first call of every case."""
    for dtype in DTYPES:
        limit = decode.LIMITS[getattr(torch, dtype)]
        for layout in LAYOUTS:
            made = cases(layout, dtype, (4, 2), 515)
            inputs = [x.double().numpy() for x in made[COPY]()]  # type: ignore[attr-defined]
            wanted = [rotated(x, layout, BASE) for x in inputs]
            for case in (OUT, OWN, VLLM):
                if case in made:
                    got = [y.double().numpy() for y in made[case]()]  # type: ignore[attr-defined]
                    error = max(float(np.abs(y - want).max() / np.abs(want).max())
                                for y, want in zip(got, wanted, strict=True))  # fmt: skip
                    factor = decode.PEER_FACTOR if case == VLLM else 1
                    yield f"{case} {dtype} {layout}", error, factor * limit


def compared(made: dict[str, timing.Case], seconds: float, limits: dict[str, float]) -> Group:
    """The median of each case over the copy of its round, for so many seconds."""
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    with torch.no_grad():
        while len(rounds) < 5 or time.perf_counter() < end:
            rounds.append({case: timed(call) for case, call in made.items()})
    copy = statistics.median(each[COPY] for each in rounds) * 1e6
    group = {case: statistics.median(each[case] / each[COPY] for each in rounds) for case in made}
    for case, way in ((OUT, COPY), (OWN, INVERT)):
        group[f"limit of {case}"] = max(limits["bytes"] * group[way], limits["rows"] / copy)
    return {**group, COPY: copy}


def timed(call: timing.Case) -> float:
    """Seconds of a call after another one."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def row_microseconds(layout: str, dtype: str) -> float:
    """What a row takes one thread, everything in the second cache: more rows less fewer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    heads, sizes = (32, 8), (4, 12)
    calls = [cases(layout, dtype, heads, seq)[OWN] for seq in sizes]
    best = [float("inf")] * 2
    with torch.no_grad():
        for _ in range(300):
            best = [min(least, timed(call)) for least, call in zip(best, calls, strict=True)]
    torch.set_num_threads(threads)
    return (best[1] - best[0]) * 1e6 / (sum(heads) * (sizes[1] - sizes[0]))


def verdict(group: Group, dtype: str) -> Iterator[tuple[str, float, float, bool]]:
    """(case, measured, allowed, met): the bar, or near the limit where that is above it."""
    for case, bar in zip((OUT, OWN), BARS[dtype], strict=True):
        allowed = max(bar, NEAR * group[f"limit of {case}"])
        is_slower = case == OWN and group[case] > group.get(VLLM, float("inf"))
        yield case, group[case], allowed, group[case] <= allowed and not is_slower


def table(groups: dict[str, Group]) -> str:
    """A row for each group: times over that of the copy; in bold what is missed."""
    lines = []
    for label, group in groups.items():
        line = [label, f"{group[COPY]:.0f}"]
        for case, ratio, _, met in verdict(group, label.split()[0]):
            line += [f"{ratio:.2f}" if met else f"**{ratio:.2f}**",
                     f"{group[f'limit of {case}']:.2f}"]  # fmt: skip
        lines.append([*line, f"{group[VLLM]:.2f}" if VLLM in group else "-"])
    return command.table(("", "copy, us", OUT, "its limit", OWN, "its limit", VLLM), lines)


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    facts = ", ".join(f"{key} {value}" for key, value in report["versions"].items())
    verdicts = [
        (case, met, ratio <= bar)
        for label, group in report["groups"].items()
        for (case, ratio, _, met), bar in zip(
            verdict(group, label.split()[0]), BARS[label.split()[0]], strict=True)
    ]  # fmt: skip
    counts = [
        f"{case}: {sum(bar for each, _, bar in verdicts if each == case)} of "
        f"{sum(each == case for each, *_ in verdicts)} within the bar, "
        f"{sum(met for each, met, _ in verdicts if each == case)} within it or {NEAR} of the limit"
        for case in (OUT, OWN)
    ]
    return f"""\
# Every size, measured {report["date"]}

{facts}; {report["threads"]} threads. `python -m benchmarks.sizes` prints this page and says how it
measures. head_dim {DIM}, one sequence; times over that of a copy of the same bytes.
Most: {"; ".join(f"{dtype} {out} and in place {own}" for dtype, (out, own) in BARS.items())}.
{". ".join(counts)}, and in place not slower than vLLM's operator.

{table(report["groups"])}
"""


def draw(groups: dict[str, Group], path: Path) -> None:
    """The curves of every type and layout, by tokens."""
    try:
        from matplotlib.figure import Figure
    except ImportError:  # not in every environment of peers: --table draws as well
        return
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(len(LAYOUTS), len(DTYPES), sharex=True, sharey=True)
    for row, layout in zip(axes, LAYOUTS, strict=True):
        for ax, dtype in zip(row, DTYPES, strict=True):
            curves(ax, groups, f"{dtype} {layout} q {HEADS[0][0]} k {HEADS[0][1]} seq ")
            ax.set_title(f"{dtype}, {layout} layout")
        row[0].set_ylabel("time of a copy of the same bytes")
    for ax in axes[-1]:
        ax.set_xlabel("tokens")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def curves(ax: Any, groups: dict[str, Group], label: str) -> None:
    """The copy, ours, what limits them, and vLLM's operator, in one axes."""
    found = {int(each.removeprefix(label)): group for each, group in groups.items()
             if each.startswith(label)}  # fmt: skip
    tokens = sorted(found)
    ax.axhline(1, color="black", linewidth=0.8, label=COPY)
    styles = {OUT: "C0-o", f"limit of {OUT}": "C0:", OWN: "C1-o", f"limit of {OWN}": "C1:",
              VLLM: "C2-o"}  # fmt: skip
    for case, style in styles.items():
        at = [seq for seq in tokens if case in found[seq]]
        ax.plot(at, [found[seq][case] for seq in at], style, markersize=3, label=case)
    ax.set_xscale("log", base=2)
    ax.set_ylim(0, 3)
    ax.grid(alpha=0.3)


if __name__ == "__main__":
    main()
