"""The page of the GPU benchmark: what was measured, and the limits that it is held against.

Numbers and text alone: no torch, so that all of it is tested without a GPU.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .gpu_plan import (
    COPY,
    COUNTED,
    EMPTY,
    KINDS,
    ONE_TOKEN,
    OURS,
    PARTS,
    Line,
    Work,
    lines,
    memory_forms,
    variants,
)

IN_PLACE = "liger", "FlashInfer kernel", "vLLM kernel"  # peers that write no new outputs
Rows = dict[str, dict[str, dict[str, Any]]]  # line -> who -> what was measured
Report = dict[str, Any]


class Target(NamedTuple):
    """A limit that the project set itself; `measured` is None where nothing was."""

    what: str
    limit: float
    measured: float | None
    is_at_least: bool = False

    @property
    def verdict(self) -> str:
        """What the table says of it.

        >>> Target("share", 0.92, 0.95, is_at_least=True).verdict, Target("us", 2, None).verdict
        ('met', 'not measured')
        """
        if self.measured is None:
            return "not measured"
        beyond = self.measured < self.limit if self.is_at_least else self.measured > self.limit
        return "**missed**" if beyond or math.isnan(self.measured) else "met"


def targets(rows: Rows) -> Iterator[Target]:
    """Every limit with what was measured; of two passes the worse one counts."""

    def share(work: Work, way: str, limit: float) -> Target:
        found = _field(rows, work.name, f"rotary {way}", "share")
        return Target(f"share of copy, {way}: {work.name}", limit, min(found, default=None), True)

    def most(what: str, limit: float, line: str, who: str, field: str = "us") -> Target:
        return Target(what, limit, max(_field(rows, line, who, field), default=None))

    def over(what: str, limit: float, slow: tuple[str, str], fast: tuple[str, str]) -> Target:
        pairs = zip(_field(rows, *slow, "us"), _field(rows, *fast, "us"), strict=False)
        return Target(what, limit, max((a / b for a, b in pairs), default=None))

    def over_empty(what: str, work: Work, way: str) -> Target:
        us = _field(rows, work.name, f"rotary {way}", "us")
        empty, copied = (_field(rows, "a launch", EMPTY, field) for field in ("us", "copied"))
        least = max(empty, default=0.0) + work.moved("out=") / max(copied, default=math.inf)
        return Target(what, 1.1, max((each / least for each in us if empty), default=None))

    two = Work(batch=2)
    for layout in ("half", "interleaved"):
        for work in (Work(), two, Work(batch=4)):
            for way in ("out=", "backward"):
                yield share(work._replace(layout=layout), way, 0.92)
    turned = two._replace(layout="interleaved")
    for way in ("out=", "in place", "backward"):
        who = f"rotary {way}"
        yield over(f"interleaved over half, {way}", 1.03, (turned.name, who), (two.name, who))
    for work in memory_forms(two):
        yield share(work, "out=", 0.88)
    for what, work in SHORT.items():
        if work.memory == "bshd":
            yield over(f"exact angles over tables, {what}", 1.03,
                       (work.name, "rotary apply"), (work.name, OURS))  # fmt: skip
    axes = two._replace(positions="three axes").name
    yield over("three axes over one", 1.08, (axes, OURS), (two.name, OURS))
    quarter, own = two._replace(rotary_dim=32).name, "rotary in place"
    yield over("a quarter of the head over all of it, in place", 0.30, (quarter, own),
               (two.name, own))  # fmt: skip
    for batch in (256, 1):
        name = ONE_TOKEN._replace(batch=batch).name
        for way in ("out=", "rows", "apply"):
            yield over(f"over a copy, {way}, one token of {batch} sequences", 1.5,
                       (name, f"rotary {way}"), (name, COPY))  # fmt: skip
        for way in ("out=", "rows", "apply"):
            work = ONE_TOKEN._replace(batch=batch)
            what = f"over an empty launch and the bytes, {way}, one token of {batch} sequences"
            yield over_empty(what, work, way)
    for part in ("prefill", "decode"):
        name, ratio = over_fastest_peer(rows, part)
        yield Target(f"over the fastest peer, worst line of {part}{name}", 1.02, ratio)
    host = Line("host", ONE_TOKEN, ()).name
    for way in ("out=", "in place", "rows", "new", "apply"):
        yield most(f"us of the host for a call, {way}", 10, host, f"rotary {way}")
    for way, limit in (("out=", 1), ("in place", 1), ("new", 1), ("backward", 2)):
        who = f"rotary {way}"
        yield most(f"launches and copies, {way}", limit, f"calls {COUNTED.name}", who, "launches")
    for work in memory_forms(COUNTED):
        name = f"calls {work.name}"
        yield most(f"launches and copies, {work.memory}", 1, name, OURS, "launches")
    for way in ("out=", "in place"):
        who = f"rotary {way}"
        yield most(f"allocations, {way}", 0, f"calls {COUNTED.name}", who, "allocations")
    yield most("seconds of the first call, nothing cached", 2, "first call", "rotary", "seconds")


def over_fastest_peer(rows: Rows, part: str) -> tuple[str, float | None]:
    """The line on which a peer does best against us, and our time over its.

    A peer that rotates in place is held against us in place, any other against new outputs, as the
    outputs that a graph allocates stay in the cache; either against out= where that was not
    measured. Of two passes the worse ratio counts.
    """
    worst: tuple[str, float | None] = "", None
    for line in lines(part):
        for who in rows.get(line.name, {}):
            is_peer = not who.startswith("rotary ") and who != COPY and "backward" not in who
            theirs = _field(rows, line.name, who, "us") if is_peer else []
            ways = ("in place" if who in IN_PLACE else "new", "out=")
            ours = (_field(rows, line.name, f"rotary {way}", "us") for way in ways)
            best = next((found for found in ours if found), [])
            ratio = max((a / b for a, b in zip(best, theirs, strict=False)), default=0.0)
            if ratio > (worst[1] or 0):
                worst = f", {who}, {line.name}", ratio
    return worst


def _field(rows: Rows, line: str, who: str, field: str) -> list[float]:
    return rows.get(line, {}).get(who, {}).get(field, [])


# --- the page ---

WHO = {
    "rotary": (OURS,),
    "a copy": (COPY,),
    "flash-attn": ("flash-attn",),
    "FlashInfer's kernel": ("FlashInfer kernel",),
    "Liger": ("liger", "liger llama4"),
    "vLLM's kernel": ("vLLM kernel",),
    "transformers": ("transformers eager",),
}
SHORT = {
    "2 x 8192 tokens, half layout": Work(batch=2),
    "2 x 8192 tokens, interleaved layout": Work(batch=2, layout="interleaved"),
    "2 x 8192 tokens, heads before tokens": Work(batch=2, memory="bhsd"),
    "one token of 256 sequences": ONE_TOKEN._replace(batch=256),
    "one token of one sequence": ONE_TOKEN,
}
STEPS = "norm + rotate + cache", "steps, compiled", "steps"


def short_tables(rows: Rows) -> Iterator[str]:
    """Microseconds of a few lines, the worse pass of each; docs/numbers.md shows them."""

    def most(line: str, names: Iterable[str], field: str = "us") -> str:
        found = [max(us) for name in names if (us := _field(rows, line, name, field))]
        best = min(found, default=math.nan)
        return f"{best:.3g}" if best < 1000 else f"{best:.0f}".replace("nan", "")

    yield f"| us, q and k in bfloat16 | {' | '.join(WHO)} |"
    yield "|---" * (len(WHO) + 1) + "|"
    for what, work in SHORT.items():
        yield f"| {what} | {' | '.join(most(work.name, names) for names in WHO.values())} |"
    yield ""
    what = "us, norm of q and k, rotation, k and v to a cache"
    yield f"| {what} | `rotary.fused` | `torch.compile` | steps |"
    yield "|---|---|---|---|"
    for what in ("2 x 8192 tokens, half layout", "one token of 256 sequences"):
        line = Line("fused", SHORT[what], ()).name
        yield f"| {what} | {' | '.join(most(line, (name,)) for name in STEPS)} |"
    line = Line("fused", ONE_TOKEN, ()).name
    cells = " | ".join(most(line, (name,), "host") for name in STEPS)
    yield f"| one token of one sequence, time of the host | {cells} |"


def merged(reports: Iterable[Report]) -> Report:
    """One report of several: each part of a run may have been measured by a command of its own."""
    whole: Report = {"dates": [], "facts": [], "copies": {}, "rows": {}, "skipped": []}
    for report in reports:
        for name in ("dates", "facts", "skipped"):
            whole[name] += [each for each in report[name] if each not in whole[name]]
        whole["copies"] |= report["copies"]
        for line, found in report["rows"].items():
            kept = whole["rows"].setdefault(line, {})
            for who, entry in found.items():
                kept.setdefault(who, entry)
    return whole


def page(report: Report | None) -> str:
    """The Markdown page of a report; of None, what would be measured."""
    rows: Rows = report["rows"] if report else {}
    lines_ = _head(report)
    if report is not None:
        lines_ += ["", *short_tables(rows)]
    lines_ += ["", "| target | measured | limit | |", "|---|---|---|---|"]
    for target in targets(rows):
        measured = "" if target.measured is None else f"{target.measured:.3g}"
        sign = ">=" if target.is_at_least else "<="
        lines_.append(
            f"| {target.what} | {measured} | {sign} {target.limit:g} | {target.verdict} |"
        )
    if report is None:
        return "\n".join([*lines_, *_planned()]) + "\n"
    return "\n".join([*lines_, *_measured(rows)]) + "\n"


def _head(report: Report | None) -> list[str]:
    if report is None:
        return [
            "# GPU: not measured",
            "",
            "There is no CUDA device here. On a machine with one, `python -m benchmarks.gpu` fills",
            "this table; [how](../README.md).",
        ]
    copies = (
        f"{part}: {', '.join(f'{each / 1e12:.3f}' for each in speeds)}"
        for part, speeds in report["copies"].items()
    )
    return [
        f"# GPU, measured {', '.join(report['dates'])}",
        "",
        *(f"- {fact}" for fact in report["facts"]),
        f"- a copy of 2 GB moves, in TB/s read and written, {'; '.join(copies)}",
        *_missing(report),
        "",
        "Microseconds of one call of q and k, medians of two passes in one run. *copy* is one",
        "launch that copies as many bytes as q and k have, replayed in a graph as all else;",
        "*share* how long that would take for the bytes that must move, over the time of the call;",
        "*ulp* the largest error in ulps of the pair, *rounded* how many results are the exact one",
        "rounded; *ours* how many times as long it takes as `rotate(..., out=)`. *rows* are",
        "picked by `positions=` from a table in the call. Of targets, the worse pass counts.",
    ]


def _missing(report: Report) -> Iterator[str]:
    """What there was no time for: whole parts, and the number of lines of others."""
    for part in PARTS:
        lines_ = [line for line in report["skipped"] if line.startswith(f"{part}, ")]
        first = sum(line.startswith(f"{part}, pass 1") for line in lines_)
        if part not in report["copies"]:
            yield f"- **not measured**: {part}"
        elif lines_:
            yield (
                f"- **for want of time** {part} lacks {len(lines_) - first} lines in its second "
                f"pass" + (f", and {first} in its first" if first else "")
            )


def _planned() -> Iterator[str]:
    yield from ("", "| part | line | ours | peers | MB moved |", "|---|---|---|---|---|")
    for part in KINDS:
        for line in lines(part):
            ways = ", ".join(line.ways) or ("see below" if part == "ablation" else "")
            peers = "yes" if line.peers else ""
            moved = line.work.moved("out=") / 1e6
            yield f"| {part} | {line.work.name} | {ways} | {peers} | {moved:.4g} |"
    yield from (
        "",
        "Peers have two parts of their own: `peers`, and `tuned` for those that compile or tune.",
        "",
        "Ablations: from tables, exact, exact with positions given; and each of these with",
    )
    yield ", ".join(variants()) + "."


def _measured(rows: Rows) -> Iterator[str]:
    yield from ("", "| line | who | us | share | ours | ulp | rounded | notes |")
    yield "|---|---|---|---|---|---|---|---|"
    for name, found in rows.items():
        yield from rows_of(name, found)


def rows_of(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """The rows of one line of the table."""
    base = min(found.get(OURS, {}).get("us", ()), default=None)
    for who, entry in found.items():
        times = ", ".join(f"{each:.4g}" for each in entry.get("us", ()))
        share = f"{min(entry['share']):.3f}" if "share" in entry else ""
        ours = f"{min(entry['us']) / base:.2f}" if base and "us" in entry else ""
        ulp = f"{entry['ulp']:.2f}" if "ulp" in entry else ""
        rounded = f"{entry['rounded']:.1%}" if "rounded" in entry else ""
        notes = "; ".join(_notes(entry))
        yield f"| {name} | {who} | {times} | {share} | {ours} | {ulp} | {rounded} | {notes} |"


def _notes(entry: Mapping[str, Any]) -> Iterator[str]:
    for name in ("launches", "allocations", "seconds", "do_bench", "host", "copied"):
        if name in entry:
            yield f"{name} {', '.join(f'{each:.4g}' for each in entry[name])}"
    if entry.get("in_cache"):
        yield "its data stay in the L2"
    if "failed" in entry:
        yield f"**{entry['failed']}**"
