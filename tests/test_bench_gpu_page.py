"""The GPU benchmark without a GPU: its passes, its clocks, its targets, its page."""

import json
import math
import os
import subprocess
import sys
import time
import types
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from benchmarks import gpu, gpu_cases, gpu_clock, gpu_gate, gpu_page, gpu_peers, gpu_plan
from benchmarks.gpu_plan import COPY, EMPTY, KINDS, ONE_TOKEN, OURS, Line, Work
from test_bench_gpu_peers import flash_attn
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
SMALL = Work(6, 2, 4, 2, 16, 16)


# --- passes ---


def test_two_passes_collect_two_times_of_every_case():
    """A share is of a copy of as many bytes, timed in the same pass."""
    times = iter([5.0, 10.0, 20.0, 6.0, 40.0, 50.0])
    timed = []

    def timer(case, buffers, launches):
        timed.append((len(buffers), launches, case is gpu_cases.copied))
        return next(times)

    line, found = Line("prefill", SMALL, ("out=", "backward"), "later"), {}
    for _ in range(2):
        timers = {"prefill": timer, "do_bench": lambda case, buffers, launches: 7.0}
        gpu.collect(found, line, {}, "cpu", timers)
    assert [who for who, entry in found.items() if "do_bench" in entry] == [OURS]
    assert found[OURS]["do_bench"] == [7, 7]
    assert {who: entry["us"] for who, entry in found.items()} == {
        COPY: [5, 6], OURS: [10, 40], "rotary backward": [20, 50],
    }  # fmt: skip
    assert timed == [(64, 256, True), (64, 256, False), (64, 256, False)] * 2
    assert found[OURS]["share"] == [0.5, 0.15]
    assert found["rotary backward"]["share"] == [0.5, 0.24]  # twice the bytes
    assert found[OURS]["in_cache"]


def test_peers_are_measured_in_parts_of_their_own(monkeypatch):
    peers = [peer._replace(fits=bool) for peer in gpu_peers.PEERS]  # also of a small size
    monkeypatch.setattr(gpu_peers, "PEERS", tuple(peers))
    there = {"flash-attn": flash_attn, "fla": flash_attn}
    for part, name in (("peers", "flash-attn"), ("tuned", "fla")):
        line = next(gpu_plan.lines(part))._replace(work=SMALL)
        found = {}
        timers = {"prefill": lambda *_: 8.0, "do_bench": None}
        gpu.collect(found, line, there, "cpu", timers)
        assert {who.removesuffix(" backward") for who in found} == {COPY, name}
        assert found[name]["us"] == [8]


def test_host_times_have_one_set_and_no_share():
    found = {}
    line = Line("host", SMALL, ("in place",))
    gpu.collect(found, line, {}, "cpu", {"host": lambda case, buffers, _: len(buffers)})
    assert found["rotary in place"]["us"] == [1]
    assert "share" not in found["rotary in place"]


def test_what_is_wrong_or_fails_is_told_and_not_timed():
    def raising(*_, **__):
        raise RuntimeError("out of memory\nand more")

    timed = []
    there = {
        "flash-attn": lambda x, *_, **__: x.clone(),
        "liger": types.SimpleNamespace(apply=raising),
    }
    line, found = Line("prefill", SMALL, (), "plain"), {}
    for _ in range(2):
        timers = {"prefill": lambda *_: timed.append(1) or 1.0}
        gpu.collect(found, line, there, "cpu", timers)
    assert len(timed) == 2  # the copy
    assert found["flash-attn"]["failed"].startswith("wrong by ")
    assert found["liger"]["failed"] == "RuntimeError: out of memory"
    assert gpu.failures({"a": found}) == []
    assert gpu.failures({"a": {OURS: {"failed": "no"}}}) == ["a, rotary out=: no"]
    assert gpu.failures({"ablation a": {"table": {"failed": "no"}}}) == ["ablation a, table: no"]


class Held(TorchDispatchMode):
    """The most bytes of torch's tensors that were held at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                size = x.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(x.untyped_storage(), self.release, size)
        return result

    def release(self, size):
        self.now -= size


def test_a_million_tokens_take_less_than_40_gb(monkeypatch):
    """Twice q and k, a copy of them for the check, and what is worked out in float64 beside it."""
    line = next(line for line in gpu_plan.lines("prefill") if line.work.seq == 2**20)
    short = line.work._replace(seq=2**20 // 512)
    monkeypatch.setattr(gpu_gate, "_TOKENS", gpu_gate._TOKENS // 512)
    monkeypatch.setattr(gpu_plan, "sets_of", lambda *_: 1)
    monkeypatch.setattr(gpu_cases, "ours", lambda *_: lambda b: b[2:4])  # as the kernel: no more
    with Held() as held:
        gpu.collect({}, line._replace(work=short), {}, "cpu", dict.fromkeys(
            ("prefill", "do_bench"), lambda *_: 1.0))  # fmt: skip
    assert 2 < held.most / short.bytes < 40e9 / line.work.bytes
    assert gpu_plan.sets_of(line.work) == 1


# --- the clocks, on a device that only counts ---


class Device:
    """Stands in for `torch.cuda`: every call takes 1 ms of GPU time and 3 us of the host's."""

    def __init__(self, monkeypatch):
        self.now, self.host, self.calls, self.graph_calls = 0.0, 0.0, [], None
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        class Graph:
            def replay(self):
                device.now += device.graph_calls

        class Capture:
            def __init__(self, graph, stream):
                assert isinstance(graph, Graph)

            def __enter__(self):
                device.calls.clear()

            def __exit__(self, *_):
                device.graph_calls = len(device.calls)

        stream = types.SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": Capture,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda _: nullcontext(),
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(gpu_clock.time, "perf_counter", lambda: self.host)

    def case(self, buffers):
        self.calls.append(buffers)
        self.now += 1.0
        self.host += 3e-6


def test_a_replay_is_divided_among_its_calls_over_all_buffers(monkeypatch):
    device = Device(monkeypatch)
    assert gpu_clock.graph_us(device.case, ["a", "b", "c"], 21) == pytest.approx(1000)
    assert device.calls == ["a", "b", "c"] * 7


def test_host_time_is_that_of_a_call(monkeypatch):
    assert gpu_clock.host_us(Device(monkeypatch).case, ["a"], 1) == pytest.approx(3)


def test_the_first_call_is_a_program_that_runs(capsys):
    code = gpu_clock.FIRST_CALL.replace('device="cuda"', 'device="cpu"').replace(".cuda()", "")
    exec(code.replace("torch.cuda.synchronize()", ""), {})
    assert 0 < float(capsys.readouterr().out) < 100


# --- targets ---


def found(targets, what):
    (target,) = [target for target in targets if target.what == what]
    return target


def test_the_worse_pass_counts():
    two = Work(batch=2)
    turned = two._replace(layout="interleaved")
    rows = {
        two.name: {OURS: {"us": [100.0, 80.0], "share": [0.8, 0.95]}},
        turned.name: {OURS: {"us": [100.0, 88.0], "share": [0.99, 0.93]}},
        ONE_TOKEN.name: {OURS: {"us": [1.9, 2.0]}, COPY: {"us": [1.5, 1.9]}},
    }
    targets = list(gpu_page.targets(rows))
    share = found(targets, f"share of copy, out=: {two.name}")
    assert (share.measured, share.verdict) == (0.8, "**missed**")
    assert found(targets, f"share of copy, out=: {turned.name}").verdict == "met"
    over = found(targets, "interleaved over half, out=")
    assert (over.measured, over.verdict) == (pytest.approx(1.1), "**missed**")
    assert found(targets, "over a copy, out=, one token of 1 sequences").verdict == "met"
    others = [t for t in targets if t.measured is None]
    assert len(others) == len(targets) - 4
    assert {t.verdict for t in others} == {"not measured"}


def test_every_target_can_be_met_and_missed(monkeypatch):
    """Each looks at a line and a way that the run measures: 1 everywhere gives it a number."""
    rows = {
        line.name: {
            who: {"us": [1.0], "share": [1.0]}
            for who in (*(f"rotary {way}" for way in line.ways), COPY, "table", "exact",
                        "exact, positions given")
        }
        for part in KINDS
        for line in gpu_plan.lines(part)
    }  # fmt: skip
    monkeypatch.setattr(gpu_clock, "counts", lambda *_: {"launches": [1], "allocations": [0]})
    rows |= gpu.counted("cpu")
    rows["first call"] = {"rotary": {"seconds": [1.0]}}
    rows["a launch"] = {EMPTY: {"us": [1.0], "copied": [1e30]}}
    targets = list(gpu_page.targets(rows))
    assert len({target.what for target in targets}) == len(targets) > 35
    missed = [target.what for target in targets if target.verdict != "met"]
    assert missed == ["a quarter of the head over all of it, in place"]  # 1 over 1
    for target in targets:
        for worse in (math.nan, -1.0 if target.is_at_least else 1e9):
            assert target._replace(measured=worse).verdict == "**missed**"
        assert target._replace(measured=target.limit).verdict == "met"


# --- the page ---

REPORT = {
    "dates": ["2030-01-02"],
    "facts": ["a device"],
    "copies": {"decode": [4.3e12, 4.2e12]},
    "rows": {
        "a line": {
            OURS: {"us": [2.0, 1.0], "share": [0.25, 0.5], "ulp": 0.5, "rounded": 0.999},
            "fla": {"us": [3.0, 4.0]},
            "liger": {"failed": "wrong by 9 ulp, allowed 4", "ulp": 9.0, "rounded": 0.5},
        }
    },
    "skipped": ["decode, pass 1: another", "decode, pass 2: another", "decode, pass 2: a line"],
}


def test_a_page_tells_what_was_measured():
    page = gpu_page.page(REPORT)
    assert "| a line | rotary out= | 2, 1 | 0.250 | 1.00 | 0.50 | 99.9% |  |" in page
    assert "| a line | fla | 3, 4 |  | 3.00 |  |  |  |" in page
    assert "| 9.00 | 50.0% | **wrong by 9 ulp, allowed 4** |" in page
    assert "decode: 4.300, 4.200" in page
    assert "- a device" in page
    lacking = "- **for want of time** decode lacks 2 lines in its second pass, and 1 in its first"
    assert lacking in page
    assert "- **not measured**: prefill" in page
    assert "- **not measured**: decode" not in page


def test_parts_measured_apart_make_one_report():
    other = {"dates": ["2030-01-03"], "facts": ["a device", "more"], "copies": {"host": [1.0]},
             "rows": {"a line": {"liger llama4": {}}}, "skipped": []}  # fmt: skip
    whole = gpu_page.merged([REPORT, other])
    assert whole["dates"] == ["2030-01-02", "2030-01-03"]
    assert whole["facts"] == ["a device", "more"]
    assert set(whole["copies"]) == {"decode", "host"}
    assert list(whole["rows"]["a line"]) == [OURS, "fla", "liger", "liger llama4"]


def run(*arguments, folder):
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(folder), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_without_a_gpu_the_page_says_so_and_claims_nothing(tmp_path):
    done = run(folder=tmp_path / "new")
    assert done.returncode == 0
    assert done.stderr == "no CUDA device: nothing is measured\n\n"
    (written,) = (tmp_path / "new").iterdir()
    page = written.read_text()
    assert written.name == "gpu.md"
    assert done.stdout == page
    assert "met" not in {cell.strip(" *") for cell in page.replace("\n", "|").split("|")}
    targets = [row for row in page.splitlines() if row.endswith("| not measured |")]
    assert len(targets) == len(list(gpu_page.targets({})))
    for part in KINDS:
        for line in gpu_plan.lines(part):
            assert f"| {part} | {line.work.name} |" in page


def test_numbers_of_earlier_runs_make_a_dated_page(monkeypatch, tmp_path, capsys):
    numbers, pages = tmp_path / "gpu-decode.json", tmp_path / "pages"
    numbers.write_text(json.dumps(REPORT))
    monkeypatch.setattr(sys, "argv", ["gpu", "--table", str(numbers), "--out", str(pages)])
    gpu.main()
    page = capsys.readouterr().out
    assert (pages / "2030-01-02-gpu.md").read_text() == page
    monkeypatch.setattr(sys, "argv", ["gpu", "--table", str(pages / "2030-01-02-gpu.json")])
    gpu.main()  # the numbers of the page, in one file
    assert capsys.readouterr().out == page
    monkeypatch.setattr(sys, "argv", ["gpu", "--table", str(numbers), "--out", str(pages)])
    fault = {**REPORT, "rows": {"a line": {OURS: {"failed": "wrong by 9 ulp"}}}}
    numbers.write_text(json.dumps(fault))
    with pytest.raises(SystemExit, match="so not timed: a line, rotary out=: wrong by 9 ulp"):
        gpu.main()


@pytest.fixture
def played(monkeypatch):
    """A GPU that times nothing: one line a part, which a test may replace."""
    for owner, name, value in (
        (torch.cuda, "is_available", lambda: True),
        (gpu_clock, "copy_speed", lambda: 1e9),
        (gpu_clock, "clocks", lambda: "1980, 3201"),
        (gpu_clock, "facts", lambda: ["a device"]),
        (gpu_clock, "empty_us", lambda: 1.5),
        (gpu_plan, "lines", lambda part: iter([Line("decode", SMALL, ("out=",))])),
        (gpu, "collect", lambda found, *_: found.update({OURS: {"us": [1.0], "share": [0.5]}})),
    ):
        monkeypatch.setattr(owner, name, value)


@pytest.mark.usefixtures("played")
def test_a_run_writes_the_numbers_of_each_part_and_prints_the_page_last(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(sys, "argv", ["gpu", "--part", "decode", "--out", str(tmp_path)])
    gpu.main()
    report = json.loads((tmp_path / "gpu-decode.json").read_text())
    assert list(report["rows"]) == [SMALL.name, "a launch"]
    assert report["rows"]["a launch"] == {EMPTY: {"us": [1.5, 1.5], "copied": [1e3]}}
    assert report["copies"] == {"decode": [1e9] * 3}
    assert report["skipped"] == []
    printed = capsys.readouterr().out
    assert printed.endswith(next(tmp_path.glob("*-gpu.md")).read_text())
    assert printed.count(f"| {SMALL.name} | rotary out= | 1 | 0.500 |") == 3
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--seconds", "0.0001"])
    monkeypatch.setattr(gpu_clock, "copy_speed", lambda: time.sleep(0.001) or 1e9)
    gpu.main()
    report = json.loads((tmp_path / "gpu-decode.json").read_text())
    assert list(report["rows"]) == ["a launch"]
    assert report["skipped"] == [f"decode, pass {n}: {SMALL.name}" for n in (1, 2)]


@pytest.mark.usefixtures("played")
def test_a_part_that_is_killed_keeps_its_lines_and_names_the_others(monkeypatch, tmp_path):
    works = [SMALL._replace(seq=seq) for seq in (2, 3, 4)]
    lines = [Line("decode", work, ("out=",)) for work in works]

    def collect(found, line, there):
        if line.work.seq == 4:
            raise KeyboardInterrupt
        if line.work.seq == 3:
            raise torch.cuda.OutOfMemoryError("no memory")
        found[OURS] = {"us": [1.0]}

    monkeypatch.setattr(gpu, "collect", collect)
    with pytest.raises(KeyboardInterrupt):
        gpu.measured("decode", lines, math.inf, tmp_path)
    report = json.loads((tmp_path / "gpu-decode.json").read_text())
    assert report["rows"][works[0].name] == {OURS: {"us": [1.0]}}
    assert gpu.failures(report["rows"]) == [f"{works[1].name}, rotary: OutOfMemoryError: no memory"]
    assert report["skipped"] == [
        f"decode, pass 1: {works[2].name}", *(f"decode, pass 2: {work.name}" for work in works)
    ]  # fmt: skip


@pytest.mark.parametrize(("status", "printed", "told"), [
    (0, "1980, 3201\n1, 2\n", "1980, 3201"),
    (9, "NVIDIA-SMI has failed", "unknown, nvidia-smi ended with status 9"),
    (0, "", "unknown, nvidia-smi ended with status 0"),
])  # fmt: skip
def test_a_failing_nvidia_smi_costs_nothing(status, printed, told, monkeypatch):
    done = types.SimpleNamespace(returncode=status, stdout=printed)
    monkeypatch.setattr(gpu_clock.shutil, "which", lambda name: name)
    monkeypatch.setattr(gpu_clock.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(gpu_clock.torch, "randn", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert gpu_clock.clocks() == told
