"""The GPU benchmark: `python -m benchmarks.gpu [--part PART]`, without it our five parts.

Nothing is timed that does not give the right numbers first: every case on fresh random data, into
outputs full of NaN, against angles in float64. Times on the GPU are replays of a CUDA graph over
several sets of tensors, together larger than its cache, beside a copy of as many bytes replayed in
the same way; times on the host are of eager calls. Every line is measured twice in a run. Each part
has a limit in time of its own, writes its numbers after every line, and names what it had no time
for. Prints a page and writes it to --out; without a GPU the page says what would be measured.
--table makes one page of the numbers of several runs. --quick checks our calls on the CPU where
there is no GPU, and measures one small line of each part where there is one. How to bring peers
along, and how to rehearse all of it without a GPU: benchmarks/README.md.
"""

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from . import command, gpu_cases, gpu_clock, gpu_fused, gpu_page, gpu_peers, gpu_plan
from .gpu_cases import Buffers, Case, buffers_of, flat_buffers, tables_of
from .gpu_clock import Entry, add, attempted
from .gpu_gate import LIMITS, PEER_LIMITS, error_of, poisoned
from .gpu_page import Report, Rows
from .gpu_plan import COPY, EMPTY, KINDS, OURS, PARTS, Line, Work

OURS_TOO = "ablation", "fused"  # lines of our calls under other names
MOST_BYTES = 10**9  # of q and k that several processes may hold at once


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
        if given.compile:
            compile_ahead(given.part or KINDS, given.compile)
            return
        reports = []
        for part in given.part or KINDS:
            lines = list(gpu_plan.lines(part))
            if given.quick:
                lines = [gpu_plan.small(lines[0])]
            seconds = given.seconds or gpu_plan.SECONDS[part]
            reports.append(measured(part, lines, time.monotonic() + seconds, given.out))
    whole = gpu_page.merged(reports)
    publish(whole, given.out)
    if wrong := failures(whole["rows"]):
        sys.exit("wrong or failed, so not timed: " + "; ".join(wrong))


def parsed() -> argparse.Namespace:
    """What to measure, and where to write it."""
    parser = command.parser(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: our five")
    parser.add_argument("--seconds", type=float, help="no line of a part is begun after these")
    parser.add_argument(
        "--compile", type=int, metavar="N", help="only compile all of it, in N processes at once"
    )
    parser.add_argument(
        "--table", type=Path, nargs="+", help="gpu-PART.json or DATE-gpu.json of earlier runs"
    )
    return command.parsed(parser, {}, Path(__file__).parents[1] / "build" / "gpu")


def publish(report: Report | None, out: Path | None) -> None:
    """Print the page; write it and its numbers as DATE-gpu, or as gpu.md if it has none."""
    text = gpu_page.page(report)
    if report is None:
        command.write(out, {"gpu.md": text})
    else:
        name = f"{max(report['dates'])}-gpu"
        numbers = json.dumps(report, indent=1) + "\n"
        command.write(out, {f"{name}.md": text, f"{name}.json": numbers})
    print(text, end="")


def errors(device: str) -> Iterator[tuple[str, float, float]]:
    """(what, ulps of the pair, limit) of all our ways, in all forms of memory, at a small size."""
    small = gpu_plan.COUNTED
    works = [*gpu_plan.memory_forms(small), small._replace(layout="interleaved")]
    works += [small._replace(dtype=dtype) for dtype in LIMITS]
    for work in works:
        tables = tables_of(work, device)
        ways = ("out=", "in place", "new", "apply", "backward")
        for way in (*ways, "rows") if work.positions != "three axes" else ways:
            with poisoned():
                ulp, _ = error_of(
                    gpu_cases.ours(way, work, tables), way == "backward", work, device
                )
            yield f"{way} {work.name}", ulp, LIMITS[work.dtype]


def failures(rows: Rows) -> list[str]:
    """Which of our own calls are wrong or failed; those of peers are theirs to mend."""
    return [
        f"{line}, {who}: {entry['failed']}"
        for line, found in rows.items()
        for who, entry in found.items()
        if "failed" in entry and (f"{who} ".startswith("rotary ") or line.startswith(OURS_TOO))
    ]


# --- a part, twice ---


def compile_ahead(parts: Sequence[str], processes: int) -> None:
    """Call everything that will be measured once, in several processes: Triton keeps its code."""
    jobs = [(part, index) for part in parts for index, line in enumerate(gpu_plan.lines(part))
            if line.work.bytes < MOST_BYTES]  # fmt: skip
    start = time.monotonic()
    one_thread = mock.patch.dict(os.environ, {"TORCHINDUCTOR_COMPILE_THREADS": "1"})
    with one_thread, multiprocessing.get_context("spawn").Pool(processes) as pool:
        told = pool.starmap(compiled, jobs, chunksize=1)
    failed = [text for each in told for text in each]
    print(f"compiled {len(jobs)} lines in {time.monotonic() - start:.0f} s", *failed, sep="\n")


def compiled(part: str, index: int, device: str = "cuda") -> list[str]:
    """Call every case of a line once; what failed."""
    line = list(gpu_plan.lines(part))[index]
    there = gpu_peers.found()[0] if part in ("peers", "tuned") else {}
    cases = cases_of(line, there, device)
    buffers = buffers_for(line, cases, device) if cases else None
    failed = []
    for who, case in cases.items():
        told = attempted(lambda case=case: {"done": case.call(buffers) is not None})
        failed += [f"{part} {line.name} {who}: {told['failed']}"] if "failed" in told else []
    if device == "cuda":
        torch.cuda.synchronize()
    return failed


def measured(part: str, lines: Sequence[Line], deadline: float, out: Path | None) -> Report:
    """Lines of a part, twice, between copies; written to `out` after each of them."""
    there, missing = gpu_peers.found() if part in ("peers", "tuned") else ({}, {})
    rows: Rows = {}
    report: Report = {
        "dates": [datetime.date.today().isoformat()],
        "facts": [*gpu_clock.facts(), *(f"{name}: {why}" for name, why in missing.items())],
        "copies": {part: [gpu_clock.copy_speed()]},
        "rows": rows,
        "skipped": [f"{part}, pass {number}: {line.name}" for number in (1, 2) for line in lines],
    }
    before = gpu_clock.clocks()
    for number in (1, 2):
        for line in lines:
            if time.monotonic() < deadline:
                found = rows.setdefault(line.name, {})
                told = attempted(lambda f=found, each=line: collect(f, each, there))
                if told:
                    found["rotary"] = told
                report["skipped"].remove(f"{part}, pass {number}: {line.name}")
                save(report, part, out)
                print("\n".join(gpu_page.rows_of(line.name, rows[line.name])), flush=True)
        report["copies"][part].append(gpu_clock.copy_speed())
    if part in ("decode", "fused"):
        speed = report["copies"][part][0] * 1e-6
        empty = attempted(lambda: {"us": [gpu_clock.empty_us() for _ in range(2)]})
        rows["a launch"] = {EMPTY: empty | {"copied": [speed]}}
    if part == "host":
        rows |= counted()
        first = attempted(lambda: {"seconds": [gpu_clock.first_call_seconds() for _ in range(2)]})
        rows["first call"] = {"rotary": first}
    clocks = f"{before}; {gpu_clock.clocks()}"
    report["facts"].append(f"{part}, SM and memory clock in MHz: {clocks}")
    save(report, part, out)
    return report


def save(report: Report, part: str, out: Path | None) -> None:
    """Write what a part has measured so far."""
    command.write(out, {f"gpu-{part}.json": json.dumps(report, indent=1) + "\n"})


def collect(
    found: dict[str, Entry],
    line: Line,
    there: Mapping[str, Any],
    device: str = "cuda",
    timers: Mapping[str, gpu_clock.Timer] = gpu_clock.TIMERS,
) -> None:
    """Add one pass over a line to what was found of it.

    `share` is the time of a copy of as many bytes as must be moved over that of the call.
    """
    work, timer = line.work, timers[line.kind]
    cases = cases_of(line, there, device)
    if not cases:
        return
    for who, case in cases.items():  # before there are buffers: each check has its own
        entry = found.setdefault(who, {})
        if "ulp" not in entry and "failed" not in entry:
            entry |= attempted(case.check)
    l2, is_host = gpu_clock.l2_bytes(device), line.kind == "host"
    sets = 1 if is_host else gpu_plan.sets_of(work, l2)
    launches = gpu_plan.launches_of(work, sets)
    copy = None
    if not is_host:
        flat = [flat_buffers(work, device) for _ in range(sets)]
        told = attempted(lambda: {"us": timer(gpu_cases.copied, flat, launches)})
        add(found.setdefault(COPY, {}), told)
        copy = told.get("us")
        del flat
    buffers = [buffers_for(line, cases, device) for _ in range(sets)]
    for who, case in cases.items():
        if "failed" in found[who]:
            continue
        told = attempted(lambda case=case: {"us": timer(case.call, buffers, launches)})
        if copy and "us" in told:
            told["share"] = copy * case.moved / work.moved("out=") / told["us"]
        if line.kind == "prefill" and who == OURS and "us" in told:
            told |= attempted(lambda c=case.call: {"do_bench": timers["do_bench"](c, buffers, 1)})
        if line.kind == "fused" and work.seq == 1:
            told |= attempted(lambda c=case.call: {"host": timers["host"](c, buffers, 1)})
        add(found[who], told)
        found[who]["in_cache"] = not is_host and gpu_plan.is_in_cache(work, sets, l2)


class Timed(NamedTuple):
    """A case of a line: its call, the bytes that this must read and write, and its check."""

    call: Case
    moved: float
    check: Callable[[], Entry]


def cases_of(line: Line, there: Mapping[str, Any], device: str) -> dict[str, Timed]:
    """Ours and the peers that are there, by the names of the table."""
    work, tables = line.work, tables_of(line.work, device)
    if line.kind == "fused":
        return {
            who: Timed(each.call, gpu_fused.moved_bytes(each, work),
                       partial(gpu_fused.checked, each, work, device))
            for who, each in gpu_fused.cases_of(work, tables, device).items()
        }  # fmt: skip
    if line.kind == "ablation":
        kernel = importlib.import_module("rotary.kernels.triton.kernel")
        cases = gpu_cases.ablations(work, tables, kernel)
    elif line.peers in ("plain", "tuned"):
        has_backward, is_tuned = "backward" in line.ways, line.peers == "tuned"
        cases = gpu_peers.peer_cases(work, tables, there, is_tuned, has_backward)
    else:
        cases = {f"rotary {way}": gpu_cases.ours(way, work, tables) for way in line.ways}
    return {
        who: Timed(case, work.moved(_way(who)), partial(checked, who, case, work, device))
        for who, case in cases.items()
    }


def buffers_for(line: Line, cases: Iterable[str], device: str) -> Buffers:
    """The tensors of one call of any of these cases."""
    if line.kind == "fused":
        return gpu_fused.buffers(line.work, device)
    return buffers_of(line.work, device, any(who.endswith("backward") for who in cases))


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
        tables, buffers = tables_of(work, device), buffers_of(work, device, has_grads=True)
        rows[f"calls {work.name}"] = {
            f"rotary {way}": attempted(
                partial(gpu_clock.counts, gpu_cases.ours(way, work, tables), buffers)
            )
            for way in ways
        }
    return rows


def _way(who: str) -> str:
    return next((way for way in ("backward", "in place") if who.endswith(way)), "out=")


if __name__ == "__main__":
    main()
