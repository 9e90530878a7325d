"""The GPU benchmark: `python -m benchmarks.gpu [--part prefill|decode|host|ablation]`.

Nothing is timed that does not give the right numbers first: every case on fresh random data, into
outputs full of NaN, against angles in float64. Times on the GPU are replays of a CUDA graph over
several sets of tensors, together larger than its cache; times on the host are of eager calls. Every
line is measured twice in a run, and everything is compared with a copy of 2 GB. Prints a page and
writes it to --out; without a GPU the page says what would be measured. --table makes one page of
the numbers of several runs. --quick checks our calls on the CPU where there is no GPU, and measures
one small line of each part, without peers, where there is one. How to bring peers along:
benchmarks/README.md.
"""

import argparse
import datetime
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import command, gpu_clock, gpu_peers, gpu_plan
from .gpu_gate import LIMITS, PEER_LIMITS, error_of, poisoned
from .gpu_peers import Case, buffers_of, tables_of
from .gpu_plan import OURS, PARTS, Line, Report, Rows, Work

Entry = dict[str, Any]


def main() -> None:
    """Measure the parts asked for, or put a page together; print it and write it."""
    given = parsed()
    has_gpu = torch.cuda.is_available()
    if given.quick:
        command.gate(errors("cuda" if has_gpu else "cpu"), "angles and products in float64")
    if given.table:
        reports = [json.loads(path.read_text()) for path in given.table]
    elif not has_gpu:
        print("no CUDA device: nothing is measured\n", file=sys.stderr)
        publish(None, given.out)
        return
    else:
        reports, deadline = [], time.monotonic() + given.seconds
        for part in given.part or PARTS:
            lines = list(gpu_plan.lines(part))
            if given.quick:
                lines = [gpu_plan.small(lines[0])]
            reports.append(measured(part, lines, deadline))
            text = json.dumps(reports[-1], indent=1) + "\n"
            command.write(given.out, {f"gpu-{part}.json": text})
    whole = gpu_plan.merged(reports)
    publish(whole, given.out)
    if wrong := failures(whole["rows"]):
        sys.exit("wrong or failed, so not timed: " + "; ".join(wrong))


def parsed() -> argparse.Namespace:
    """What to measure, and where to write it."""
    parser = command.parser(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all of them")
    parser.add_argument("--seconds", type=float, default=480, help="no line is begun after these")
    parser.add_argument("--table", type=Path, nargs="+", help="gpu-PART.json of earlier runs")
    return command.parsed(parser, {}, Path(__file__).parents[1] / "build" / "gpu")


def publish(report: Report | None, out: Path | None) -> None:
    """Print the page, and write it as DATE-gpu.md, or gpu.md where nothing was measured."""
    text = gpu_plan.page(report)
    command.write(out, {f"{max(report['dates'])}-gpu.md" if report else "gpu.md": text})
    print(text, end="")


def errors(device: str) -> Iterator[tuple[str, float, float]]:
    """(what, ulps of the pair, limit) of all our ways, in all forms of memory, at a small size."""
    small = gpu_plan.COUNTED
    works = [*gpu_plan.memory_forms(small), small._replace(layout="interleaved")]
    works += [small._replace(dtype=dtype) for dtype in LIMITS]
    for work in works:
        tables = tables_of(work, device)
        for way in ("out=", "in place", "new", "apply", "backward"):
            with poisoned():
                ulp, _ = error_of(
                    gpu_peers.ours(way, work, tables), way == "backward", work, device
                )
            yield f"{way} {work.name}", ulp, LIMITS[work.dtype]


def failures(rows: Rows) -> list[str]:
    """Which of our own calls are wrong or failed; those of peers are theirs to mend."""
    return [
        f"{line}, {who}: {entry['failed']}"
        for line, found in rows.items()
        for who, entry in found.items()
        if "failed" in entry and (who.startswith("rotary") or line.startswith("ablation"))
    ]


# --- a part, twice ---


def measured(part: str, lines: Sequence[Line], deadline: float) -> Report:
    """Lines of a part, twice, between copies."""
    there, missing = gpu_peers.found()
    rows: Rows = {}
    copies, clocks = [gpu_clock.copy_speed()], [gpu_clock.clocks()]
    for _ in range(2):
        for line in lines:
            if time.monotonic() < deadline:
                collect(rows.setdefault(line.name, {}), line, there, copies[-1])
        copies.append(gpu_clock.copy_speed())
        clocks.append(gpu_clock.clocks())
    if part == "host":
        rows |= counted()
        first = attempted(lambda: {"seconds": [gpu_clock.first_call_seconds() for _ in range(2)]})
        rows["first call"] = {"rotary": first}
    return {
        "dates": [datetime.date.today().isoformat()],
        "facts": [*gpu_clock.facts(), f"{part}, SM and memory clock in MHz: {'; '.join(clocks)}",
                  *(f"{name}: {why}" for name, why in missing.items())],
        "copies": {part: copies},
        "rows": rows,
    }  # fmt: skip


def collect(
    found: dict[str, Entry],
    line: Line,
    there: Mapping[str, Any],
    copy: float,
    device: str = "cuda",
    timers: Mapping[str, gpu_clock.Timer] = gpu_clock.TIMERS,
) -> None:
    """Add one pass over a line to what was found of it; `copy` is in bytes a second."""
    work = line.work
    sets = 1 if line.part == "host" else gpu_plan.sets_of(work, gpu_clock.l2_bytes(device))
    buffers = [buffers_of(work, device) for _ in range(sets)]
    launches = gpu_plan.launches_of(work, sets)
    timer = timers[line.part]
    for who, case in cases_of(line, there, device).items():
        entry = found.setdefault(who, {})
        if "ulp" not in entry and "failed" not in entry:
            entry |= attempted(partial(checked, who, case, work, device))
        if "failed" in entry:
            continue
        told = attempted(lambda case=case: {"us": timer(case, buffers, launches)})
        if line.part != "host" and "us" in told:
            told["share"] = work.moved(_way(who)) / (told["us"] * 1e-6) / copy
        if line.part == "prefill" and who == OURS and "us" in told:
            told |= attempted(lambda case=case: {"do_bench": timers["do_bench"](case, buffers, 1)})
        for name, value in told.items():
            if name == "failed":
                entry[name] = value
            else:
                entry.setdefault(name, []).append(value)


def attempted(measure: Callable[[], Entry]) -> Entry:
    """What was measured, or why not: one that fails must not cost the others their numbers."""
    try:
        return measure()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def cases_of(line: Line, there: Mapping[str, Any], device: str) -> dict[str, Case]:
    """Ours and the peers that are there, by the names of the table."""
    tables = tables_of(line.work, device)
    if line.part == "ablation":
        kernel = importlib.import_module("rotary.kernels.triton")
        return gpu_peers.ablations(line.work, tables, kernel)
    cases = {f"rotary {way}": gpu_peers.ours(way, line.work, tables) for way in line.ways}
    return cases | (gpu_peers.peer_cases(line.work, tables, there) if line.has_peers else {})


def checked(who: str, case: Case, work: Work, device: str) -> Entry:
    """The entry of a case before it is timed: its error, and whether that is too large."""
    is_peer = who.removesuffix(" backward") in {peer.name for peer in gpu_peers.PEERS}
    limit = (PEER_LIMITS if is_peer else LIMITS)[work.dtype]
    # a compiled peer would be compiled once more for the poison
    with nullcontext() if is_peer else poisoned():
        ulp, rounded = error_of(case, _way(who) == "backward", work, device)
    wrong = {} if ulp <= limit else {"failed": f"wrong by {ulp:.3g} ulp, allowed {limit:g}"}
    return {"ulp": ulp, "rounded": rounded, **wrong}


def counted(device: str = "cuda") -> Rows:
    """Launches and allocations of one call of each way, in each form of memory."""
    rows: Rows = {}
    for work in (gpu_plan.COUNTED, *gpu_plan.memory_forms(gpu_plan.COUNTED)):
        ways = ("out=", "in place", "new", "backward") if work == gpu_plan.COUNTED else ("out=",)
        tables, buffers = tables_of(work, device), buffers_of(work, device)
        rows[f"calls {work.name}"] = {
            f"rotary {way}": attempted(
                partial(gpu_clock.counts, gpu_peers.ours(way, work, tables), buffers)
            )
            for way in ways
        }
    return rows


def _way(who: str) -> str:
    return next((way for way in ("backward", "in place") if who.endswith(way)), "out=")


if __name__ == "__main__":
    main()
