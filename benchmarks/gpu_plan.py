"""What `benchmarks/gpu.py` measures, and what comes of the numbers: shapes, bytes, targets, page.

Numbers and text alone: no torch, so that all of it is tested without a GPU.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rotary.kernels.launch import Plan
from rotary.kernels.variants import VARIANTS

PARTS = ("prefill", "decode", "host", "ablation")
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
L2_BYTES = 60 * 10**6  # an H200's, where the device does not say
OURS = "rotary out="
Rows = dict[str, dict[str, dict[str, Any]]]  # line -> who -> what was measured
Report = dict[str, Any]


class Work(NamedTuple):
    """One rotation of q and k: sizes, how they lie in memory, and where the tokens are.

    memory     "bshd", "hf view" (its transposed view), "bhsd", "packed qkv" (slices of one tensor),
               "thd" (tokens of all sequences laid end to end; batch 1)
    positions  "from 0", "own rows" (a position for each row), "ragged" (64 sequences in one row),
               "three axes" (M-RoPE)
    """

    seq: int = 8192
    batch: int = 1
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    rotary_dim: int = 128
    layout: str = "half"
    memory: str = "bshd"
    dtype: str = "bfloat16"
    positions: str = "from 0"

    @property
    def name(self) -> str:
        """The line of the table this is, which also tells it from every other."""
        sliced = "" if self.rotary_dim == self.head_dim else f" rotated {self.rotary_dim}"
        placed = "" if self.positions == "from 0" else f" {self.positions}"
        return (
            f"{self.dtype} {self.layout} {self.memory} B={self.batch} S={self.seq} "
            f"{self.q_heads}/{self.k_heads}x{self.head_dim}{sliced}{placed}"
        )

    @property
    def bytes(self) -> int:
        """Bytes of q and k together."""
        heads = self.q_heads + self.k_heads
        return self.batch * self.seq * heads * self.head_dim * ITEMSIZE[self.dtype]

    def moved(self, way: str) -> int:
        """Bytes that must be read and written: tables and positions are left out.

        >>> Work(batch=2).moved("out=")
        335544320
        """
        if way == "in place":
            return 2 * self.bytes * self.rotary_dim // self.head_dim
        return (4 if way == "backward" else 2) * self.bytes


class Line(NamedTuple):
    """A line of the table: one work, the ways we do it, and whether the peers do it too."""

    part: str
    work: Work
    ways: tuple[str, ...]
    has_peers: bool = False

    @property
    def name(self) -> str:
        """The name of the work; host times and ablations of the same work are other lines."""
        return self.work.name if self.part in PARTS[:2] else f"{self.part} {self.work.name}"


def lines(part: str) -> Iterator[Line]:
    """Every line of a part. `ways`: out=, in place, new (outputs), apply, backward (and forward).

    >>> next(lines("prefill")).name
    'bfloat16 half bshd B=2 S=8192 32/8x128'
    """
    if part == "prefill":
        for batch in (2, 4, 1):
            for layout in ("half", "interleaved"):
                work = Work(batch=batch, layout=layout)
                yield Line(part, work, ("out=", "in place", "new", "apply", "backward"), True)
        two = Work(batch=2)
        for work in (*memory_forms(two), two._replace(positions="three axes")):
            yield Line(part, work, ("out=", "in place", "backward"), work.memory != "thd")
        for rotated in (32, 64):
            yield Line(part, two._replace(rotary_dim=rotated), ("out=", "in place"), True)
        for dim in (64, 80, 96, 256):
            yield Line(part, two._replace(head_dim=dim, rotary_dim=dim), ("out=",))
        for q_heads, k_heads in ((28, 4), (64, 8), (16, 2)):
            yield Line(part, two._replace(q_heads=q_heads, k_heads=k_heads), ("out=",), True)
        for dtype in ("float32", "float16"):
            yield Line(part, two._replace(dtype=dtype), ("out=", "in place"), True)
        for seq in (131_072, 1_048_576):
            yield Line(part, Work(seq=seq), ("out=", "in place"))
    elif part == "decode":
        for seq in (1, 16, 128, 1024):
            for batch in (1, 8, 64, 256):
                rows = "own rows" if seq == 1 else "from 0"
                yield Line(part, Work(seq, batch, positions=rows), ("out=", "in place"), True)
    elif part == "host":
        for layout in ("half", "interleaved"):
            ways = ("out=", "in place", "new", "apply", "backward")
            yield Line(part, ONE_TOKEN._replace(layout=layout), ways, True)
    else:
        two = Work(batch=2)
        more = two._replace(layout="interleaved"), two._replace(memory="bhsd")
        for work in (two, *more, ONE_TOKEN._replace(batch=256)):
            yield Line(part, work, ())


ONE_TOKEN = Work(1, positions="own rows")
COUNTED = Work(64, 2)  # launches and allocations are counted here: the size does not matter


def memory_forms(work: Work) -> list[Work]:
    """The same tokens as models and servers hold them."""
    packed = Work(work.seq * work.batch, memory="thd", positions="ragged")
    return [*(work._replace(memory=form) for form in ("hf view", "bhsd", "packed qkv")), packed]


def small(line: Line) -> Line:
    """A line of the same kind that takes a moment: 64 tokens at most, and no peers."""
    return line._replace(work=line.work._replace(seq=min(line.work.seq, 64)), has_peers=False)


def sets_of(work: Work, l2_bytes: int = L2_BYTES) -> int:
    """How many inputs and outputs to rotate among, so that no call finds its data in the cache.

    Together 4 times the cache, at least 4, at most 64; one where it alone is 16 times the cache.
    """
    footprint = 2 * work.bytes
    if footprint >= 16 * l2_bytes:
        return 1
    return min(max(math.ceil(4 * l2_bytes / footprint), 4), 64)


def launches_of(work: Work, sets: int) -> int:
    """Calls in one captured graph: 20, or 200 of small ones, rounded up to whole turns."""
    return sets * math.ceil((200 if work.bytes < 4 * 10**6 else 20) / sets)


def replanned(
    plan: Plan,
    tokens: int | None = None,
    heads: int | None = None,
    groups: int | None = None,
    warps: int | None = None,
    prefetch: bool | None = None,
) -> Plan:
    """The same launch cut otherwise: tokens and heads of a tile, groups of heads a program walks.

    What is not given stays as planned; `warps` and `prefetch` as in `kernels/variants.py`.
    """
    count, q_heads, k_heads, per_program = plan.numbers[-6:-2]
    old_tokens, old_heads = plan.constants["TOKENS"], plan.constants["HEADS"]
    old_groups = -(-q_heads // old_heads) - (-k_heads // old_heads)
    blocks = plan.programs // -(-old_groups // per_program)
    batches = blocks // -(-count // old_tokens)
    tokens, heads = tokens or old_tokens, heads or old_heads
    all_groups = -(-q_heads // heads) - (-k_heads // heads)
    groups = min(groups or per_program, all_groups)
    return plan._replace(
        programs=batches * -(-count // tokens) * -(-all_groups // groups),
        numbers=(*plan.numbers[:-3], groups, *plan.numbers[-2:]),
        constants={
            **plan.constants,
            "TOKENS": tokens,
            "HEADS": heads,
            "PREFETCH": plan.constants["PREFETCH"] if prefetch is None else prefetch,
        },
        warps=warps or plan.warps,
    )


def variants() -> dict[str, dict[str, int]]:
    """The ablations of a launch: arguments of `replanned` by name."""
    kernels = {name: variant._asdict() for name, variant in VARIANTS.items()}
    tiles = {f"tile of {t} tokens x {h} heads": {"tokens": t, "heads": h}
             for t, h in ((4, 8), (8, 4), (16, 2), (32, 1))}  # fmt: skip
    walks = {f"{n} groups a program": {"groups": n} for n in (1, 2, 5)}
    return {**kernels, **tiles, **walks, "2 warps": {"warps": 2}}


# --- targets ---


class Target(NamedTuple):
    """A bar the project set itself; `measured` is None where nothing was."""

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
    """Every bar with what was measured; of two passes the worse one counts."""

    def share(work: Work, way: str, limit: float) -> Target:
        found = _field(rows, work.name, f"rotary {way}", "share")
        return Target(f"share of copy, {way}: {work.name}", limit, min(found, default=None), True)

    def most(what: str, limit: float, line: str, who: str, field: str = "us") -> Target:
        return Target(what, limit, max(_field(rows, line, who, field), default=None))

    def over(what: str, limit: float, slow: tuple[str, str], fast: tuple[str, str]) -> Target:
        pairs = zip(_field(rows, *slow, "us"), _field(rows, *fast, "us"), strict=False)
        return Target(what, limit, max((a / b for a, b in pairs), default=None))

    one, two = Work(), Work(batch=2)
    for layout in ("half", "interleaved"):
        for work in (two, Work(batch=4)):
            for way in ("out=", "backward"):
                yield share(work._replace(layout=layout), way, 0.92)
        name = one._replace(layout=layout).name
        yield most(f"us: {name}", 45, name, OURS)
        yield most(f"us, and backward: {name}", 90, name, "rotary backward")
    turned = two._replace(layout="interleaved")
    for way in ("out=", "in place", "backward"):
        who = f"rotary {way}"
        yield over(f"interleaved over half, {way}", 1.03, (turned.name, who), (two.name, who))
    for work in memory_forms(two):
        yield share(work, "out=", 0.88)
    line = Line("ablation", two, ()).name
    for who in ("exact", "exact, positions given"):
        yield over(f"{who}, over table", 1.03, (line, who), (line, "table"))
    axes = two._replace(positions="three axes").name
    yield over("three axes over one", 1.08, (axes, OURS), (two.name, OURS))
    quarter, own = two._replace(rotary_dim=32).name, "rotary in place"
    yield over("a quarter of the head over all of it, in place", 0.30, (quarter, own),
               (two.name, own))  # fmt: skip
    for batch, limit in ((256, 3.0), (1, 2.0)):
        name = ONE_TOKEN._replace(batch=batch).name
        yield most(f"us, one token of {batch} sequences", limit, name, OURS)
    host = Line("host", ONE_TOKEN, ()).name
    for way in ("out=", "in place", "new"):
        yield most(f"us of the host for a call, {way}", 15, host, f"rotary {way}")
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


def _field(rows: Rows, line: str, who: str, field: str) -> list[float]:
    return rows.get(line, {}).get(who, {}).get(field, [])


# --- the page ---


def merged(reports: Iterable[Report]) -> Report:
    """One report of several: each part of a run may have been measured by a command of its own."""
    whole: Report = {"dates": [], "facts": [], "copies": {}, "rows": {}}
    for report in reports:
        for name in ("dates", "facts"):
            whole[name] += [each for each in report[name] if each not in whole[name]]
        for name in ("copies", "rows"):
            whole[name] |= report[name]
    return whole


def page(report: Report | None) -> str:
    """The Markdown page of a report; of None, what would be measured."""
    rows: Rows = report["rows"] if report else {}
    lines_ = _head(report)
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
            "No GPU was at hand, so no GPU number is claimed anywhere. On a machine with one,",
            "`python -m benchmarks.gpu` fills this table; [how](../README.md).",
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
        "",
        "Microseconds of one call of q and k, medians of two passes in one run. *share* is of the",
        "bytes that must move, at the speed of that copy; *ulp* the largest error in ulps of the",
        "pair, *rounded* how many results are the exact one rounded; *ours* how many times as long",
        "it takes as `rotate(..., out=)`. Of targets, the worse pass counts.",
    ]


def _planned() -> Iterator[str]:
    yield from ("", "| part | line | ours | peers | MB moved |", "|---|---|---|---|---|")
    for part in PARTS:
        for line in lines(part):
            ways, peers = ", ".join(line.ways) or "see below", "yes" if line.has_peers else ""
            moved = line.work.moved("out=") / 1e6
            yield f"| {part} | {line.work.name} | {ways} | {peers} | {moved:.4g} |"
    yield from (
        "",
        "Ablations: from tables, exact, exact with positions given; and each of these with",
    )
    yield ", ".join(variants()) + "."


def _measured(rows: Rows) -> Iterator[str]:
    yield from ("", "| line | who | us | share | ours | ulp | rounded | notes |")
    yield "|---|---|---|---|---|---|---|---|"
    for name, found in rows.items():
        base = min(_field(rows, name, OURS, "us"), default=None)
        for who, entry in found.items():
            times = ", ".join(f"{each:.4g}" for each in entry.get("us", ()))
            share = f"{min(entry['share']):.3f}" if "share" in entry else ""
            ours = f"{min(entry['us']) / base:.2f}" if base and "us" in entry else ""
            ulp = f"{entry['ulp']:.2f}" if "ulp" in entry else ""
            rounded = f"{entry['rounded']:.1%}" if "rounded" in entry else ""
            notes = "; ".join(_notes(entry))
            yield f"| {name} | {who} | {times} | {share} | {ours} | {ulp} | {rounded} | {notes} |"


def _notes(entry: Mapping[str, Any]) -> Iterator[str]:
    for name in ("launches", "allocations", "seconds", "do_bench"):
        if name in entry:
            yield f"{name} {', '.join(f'{each:.4g}' for each in entry[name])}"
    if "failed" in entry:
        yield f"**{entry['failed']}**"
