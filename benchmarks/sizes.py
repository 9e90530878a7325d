"""A prefill of every size against a copy of the same bytes: `python -m benchmarks.sizes`.

256 to 32768 tokens, three types, both layouts, two head counts: `out=` and in place, beside vLLM's
operator where it can be imported, and ggml with `--ggml FOLDER` (`benchmarks/ggml.py`). These two
take tokens before heads, so ours is timed in that memory order as well. Timed calls come after five
untimed ones of their own, when the caches hold what they keep; cases take turns, and a ratio is the
median of those of every round. Writes benchmarks/results/DATE-sizes.json, .md and .png, and keeps
what the file of the day has of other sizes: `--tokens` and `--dtype` measure a part. `--table`
prints the table of the newest.

The roofline is what the bytes take at the bandwidths of `benchmarks/roofline.py`, measured in the
same run, or the rows at the time that a row takes one thread with everything in the second cache,
whichever is longer. It is compared with the quickest call of each case: both are of the moments
when nobody else used the memory.
"""

import datetime
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rotary import Rotary, cos_sin, rotate
from rotary import bench as timing

from . import command, decode, ggml, roofline
from .reference import LIMITS, error, rotated

BASE = 500_000.0
DIM = 128
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("half", "interleaved")
HEADS = ((32, 8), (28, 4))
TOKENS = tuple(2**power for power in range(8, 16))
# times of a copy, with out= and in place
TIME_LIMITS = {"float32": (1.2, 1.0), "bfloat16": (1.35, 1.2), "float16": (1.35, 1.2)}
NEAR = 1.15  # of the roofline, where that limit is missed
COPY, OUT, OWN = "copy", "rotate out=", "rotate in place"
TOKENS_FIRST = "rotate in place, tokens before heads"  # the memory order of the peers
VLLM, GGML = decode.VLLM, "ggml"
WAYS = {OUT: roofline.COPY, OWN: roofline.INVERT}
UNTIMED, TIMED = 5, 3  # calls of a case in a round
GGML_ERROR = 1e-4  # its angles are products in float32

# case -> its time over that of the copy; "copy", "quickest CASE", "roofline of CASE": microseconds
Group = dict[str, float]


def main() -> None:
    """Compare with float64, measure, print, write."""
    parser = command.parser(__doc__)
    command.add_table(parser, "and draw the table of a file")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="where its libraries are")
    parser.set_defaults(seconds=0.6)
    given = command.parsed(
        parser, {"tokens": (16, 32), "seconds": 0.01, "dtype": DTYPES[:1]}, command.RESULTS
    )
    if given.table is not None:
        newest = command.newest(given.table, "sizes")
        groups = json.loads(newest.read_text())["groups"]
        print(table(groups))
        draw(groups, newest.with_suffix(".png"))
        return
    torch.manual_seed(0)
    command.gate(errors(given.ggml), "complex numbers in float64")
    threads = torch.get_num_threads()
    groups, bandwidth = {}, {}
    for dtype in given.dtype:
        speeds = roofline.measured(threads, given.seconds / 12)
        bandwidth[f"{dtype}, {min(given.tokens)} to {max(given.tokens)} tokens"] = speeds
        groups.update(measured(given.tokens, dtype, speeds, given.seconds, given.ggml))
    date = datetime.date.today().isoformat()
    if given.out is not None and (file := given.out / f"{date}-sizes.json").exists():
        before = json.loads(file.read_text())
        groups = {**before["groups"], **groups}
        bandwidth = {**before.get("bandwidth", {}), **bandwidth}
    report = {
        "date": date,
        "versions": {
            **timing.versions(),
            **({"ggml": ggml.version(given.ggml)} if given.ggml else {}),
        },
        "threads": threads,
        "bandwidth": bandwidth,
        "groups": groups,
    }
    command.publish(given.out, f"{date}-sizes", as_markdown(report), report)
    if given.out is not None:
        draw(groups, given.out / f"{date}-sizes.png")


def measured(
    tokens: Any, dtype: str, bandwidth: roofline.Bandwidth, seconds: float, folder: Path | None
) -> Iterator[tuple[str, Group]]:
    """Every group of a type by its name: layout, heads and tokens."""
    threads, size = torch.get_num_threads(), getattr(torch, dtype).itemsize
    for layout in LAYOUTS:
        row = row_microseconds(layout, dtype)
        for heads in HEADS:
            for seq in tokens:
                # a row of cos and of sin is half as wide as a head, and serves all heads
                moved = sum(heads) * seq * DIM * size, seq * DIM * 4
                limits = {
                    f"roofline of {case}": max(
                        roofline.bound(*moved, way, bandwidth, threads) * 1e6,
                        sum(heads) * seq * row / threads,
                    )
                    for case, way in WAYS.items()
                }
                group = compared(cases(layout, dtype, heads, seq, folder), seconds)
                yield name(dtype, layout, heads, seq), {**group, **limits}


def name(dtype: str, layout: str, heads: tuple[int, int], seq: int) -> str:
    """The name of a group.

    >>> name("float32", "half", (32, 8), 256)
    'float32 half q 32 k 8 seq 256'
    """
    return f"{dtype} {layout} q {heads[0]} k {heads[1]} seq {seq}"


def cases(
    layout: str, dtype: str, heads: tuple[int, int], seq: int, folder: Path | None
) -> dict[str, timing.Case]:
    """Calls that write to memory that is there, and return what they wrote."""
    spec = Rotary(head_dim=DIM, base=BASE, layout=layout)
    q, k = (torch.randn(1, count, seq, DIM).to(getattr(torch, dtype)) for count in heads)
    outs, own = (tuple(x.clone() for x in (q, k)) for _ in range(2))
    flat = [x[0].transpose(0, 1).contiguous() for x in (q, k)]  # (tokens, heads, head_dim)
    first = tuple(x.clone()[None] for x in flat)
    at = torch.arange(seq)
    cos, sin = cos_sin(spec, at)
    views_of_first = [x.transpose(1, 2) for x in first]

    def by_tokens() -> Any:
        rotate(first, cos, sin, spec, seq_dim=-3, out=first)
        return views_of_first

    made: dict[str, timing.Case] = {
        COPY: lambda: [y.copy_(x) for x, y in zip((q, k), outs, strict=True)],
        OUT: lambda: rotate((q, k), cos, sin, spec, seq_dim=-2, out=outs),
        OWN: lambda: rotate(own, cos, sin, spec, seq_dim=-2, out=own),
        TOKENS_FIRST: by_tokens,
    }
    operator = decode.vllm_operator()
    if operator is not None:
        both = torch.cat((cos, sin), -1).to(q.dtype)
        views = [x.transpose(0, 1)[None] for x in flat]

        def by_vllm() -> Any:
            operator(at, *(x.view(seq, -1) for x in flat), DIM, both, layout == "half")
            return views

        made[VLLM] = by_vllm
    rope = None if folder is None else ggml.rope(folder, tuple(flat), layout, BASE)
    if rope is not None:
        rotated_by_ggml = [x.transpose(0, 1)[None] for x in rope.xs]

        def by_ggml() -> Any:
            rope.call()
            return rotated_by_ggml

        made[GGML] = by_ggml
    return made


def errors(folder: Path | None) -> Iterator[tuple[str, float, float]]:
    """(what, largest error over the largest result, limit) of the first call of every case."""
    for dtype in DTYPES:
        limit = LIMITS[dtype]
        allowed = {VLLM: decode.PEER_FACTOR * limit, GGML: max(GGML_ERROR, limit)}
        for layout in LAYOUTS:
            made = cases(layout, dtype, (4, 2), 515, folder)
            inputs = [x.double().numpy() for x in made[COPY]()]  # type: ignore[attr-defined]
            wanted = [rotated(x, layout, BASE) for x in inputs]
            for case in made:
                if case != COPY:
                    found = error(made[case](), wanted)
                    yield f"{case} {dtype} {layout}", found, allowed.get(case, limit)


def compared(made: dict[str, timing.Case], seconds: float) -> Group:
    """The median of each case over the copy of its round, and the quickest, for so many seconds."""
    rounds: list[dict[str, list[float]]] = []
    end = time.perf_counter() + seconds
    with torch.no_grad():
        while len(rounds) < 3 or time.perf_counter() < end:
            rounds.append({case: steady(call) for case, call in made.items()})
    middle = [{case: statistics.median(each[case]) for case in made} for each in rounds]
    ratios = {case: statistics.median(each[case] / each[COPY] for each in middle) for case in made}
    quickest = {f"quickest {case}": min(min(each[case]) for each in rounds) * 1e6 for case in WAYS}
    return {**ratios, **quickest, COPY: statistics.median(each[COPY] for each in middle) * 1e6}


def steady(call: timing.Case) -> list[float]:
    """Seconds of calls that come after others of their own."""
    times = []
    for number in range(UNTIMED + TIMED):
        start = time.perf_counter()
        call()
        if number >= UNTIMED:
            times.append(time.perf_counter() - start)
    return times


def row_microseconds(layout: str, dtype: str) -> float:
    """What a row takes one thread, everything in the second cache: more rows less fewer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    heads, sizes = (32, 8), (4, 12)
    calls = [cases(layout, dtype, heads, seq, None)[OWN] for seq in sizes]
    best = [float("inf")] * 2
    with torch.no_grad():
        for _ in range(100):
            best = [min(least, *steady(call)) for least, call in zip(best, calls, strict=True)]
    torch.set_num_threads(threads)
    return (best[1] - best[0]) * 1e6 / (sum(heads) * (sizes[1] - sizes[0]))


class Verdict(NamedTuple):
    """How a case stands: its times of a copy, the quickest call over the roofline, what is met."""

    case: str
    ratio: float
    of_roofline: float
    is_within: bool  # the limit
    is_met: bool  # that, or near the roofline


def verdicts(group: Group, dtype: str) -> Iterator[Verdict]:
    """Of `out=` and in place."""
    for case, most in zip((OUT, OWN), TIME_LIMITS[dtype], strict=True):
        of_roofline = group[f"quickest {case}"] / group[f"roofline of {case}"]
        is_within = group[case] <= most
        yield Verdict(case, group[case], of_roofline, is_within, is_within or of_roofline <= NEAR)


def is_slower(group: Group, case: str) -> bool:
    """Whether ours, in place, takes more than vLLM's operator or ggml in that run."""
    return any(group[case] > group[peer] for peer in (VLLM, GGML) if peer in group)


def table(groups: dict[str, Group]) -> str:
    """A row for each group: times over that of the copy; in bold what is missed."""

    def marked(value: float, is_met: bool) -> str:
        return f"{value:.2f}" if is_met else f"**{value:.2f}**"

    lines = []
    for label, group in groups.items():
        line = [label, f"{group[COPY]:.0f}"]
        for each in verdicts(group, label.split()[0]):
            line += [marked(each.ratio, each.is_met), f"{group[f'roofline of {each.case}']:.0f}",
                     f"{each.of_roofline:.2f}"]  # fmt: skip
        line.append(marked(group[TOKENS_FIRST], not is_slower(group, TOKENS_FIRST)))
        lines.append([*line, *(f"{group[peer]:.2f}" if peer in group else "-"
                               for peer in (VLLM, GGML))])  # fmt: skip
    over = "roofline, us", "quickest over it"
    return command.table(
        ("", "copy, us", OUT, *over, OWN, *over, TOKENS_FIRST, VLLM, GGML), lines
    )  # fmt: skip


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    machine = command.machine(report)
    groups = report["groups"]
    found = [each for label, group in groups.items()
             for each in verdicts(group, label.split()[0])]  # fmt: skip
    counts = [
        f"{case}: {sum(each.is_within for each in found if each.case == case)} of {len(groups)} "
        f"within the limit, {sum(each.is_met for each in found if each.case == case)} within it or "
        f"{NEAR} of the roofline"
        for case in (OUT, OWN)
    ]
    peers = [
        f"{case}: slower than vLLM's operator or ggml in "
        f"{sum(is_slower(group, case) for group in groups.values())}"
        for case in (TOKENS_FIRST, OWN)
    ]
    ways = list(roofline.WAYS)
    speeds = command.table(
        ("GB/s", *ways),
        ([f"{level}, {run}", *(f"{by_way[way] / 1e9:.0f}" for way in ways)]
         for run, levels in report["bandwidth"].items() for level, by_way in levels.items()),
    )  # fmt: skip
    return f"""\
# Every size, measured {report["date"]}

{machine}. `python -m benchmarks.sizes` prints this page and says how it
measures. head_dim {DIM}, one sequence; times over that of a copy of the same bytes.
Most: {"; ".join(f"{dtype} {out} and in place {own}" for dtype, (out, own) in TIME_LIMITS.items())}.
{". ".join([*counts, *peers])}.

Bandwidth of all threads, of the bytes that a program reads and writes. Other users of the host
change it by up to two times within minutes: less than 1 of the roofline is a quieter moment than
that of its bandwidths, and far more than 1 may be a louder one.

{speeds}

{table(groups)}
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
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def curves(ax: Any, groups: dict[str, Group], label: str) -> None:
    """The copy, ours, the rooflines, and the peers, in one axes."""
    found = {int(each.removeprefix(label)): group for each, group in groups.items()
             if each.startswith(label)}  # fmt: skip
    tokens = sorted(found)
    ax.axhline(1, color="black", linewidth=0.8, label=COPY)
    styles = {OUT: "C0-o", OWN: "C1-o", TOKENS_FIRST: "C3-o", VLLM: "C2-o", GGML: "C4-o"}
    for case, style in styles.items():
        at = [seq for seq in tokens if case in found[seq]]
        if at:  # measured in this run
            ax.plot(at, [found[seq][case] for seq in at], style, markersize=3, label=case)
    for case in WAYS:
        roof = f"roofline of {case}"
        ratios = [found[seq][roof] / found[seq][COPY] for seq in tokens]
        ax.plot(tokens, ratios, styles[case][:2] + ":", label=roof)
    ax.set_xscale("log", base=2)
    ax.set_ylim(0, 3)
    ax.grid(alpha=0.3)


if __name__ == "__main__":
    main()
