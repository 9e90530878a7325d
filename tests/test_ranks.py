"""`rotary.ranks`: right ranks pass; one with other positions, tables or frequencies is named."""

import importlib.metadata
import json
import pickle
import socket
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest
import torch
import torch.distributed as dist
from command import assert_refused, environment
from hypothesis import given, settings
from hypothesis import strategies as st
from published import longrope, scaled

from rotary import Rotary, cos_sin, positions, ranks
from rotary.ranks import Report, compare

LLAMA = str(files("rotary") / "configs" / "llama-3.1-8b.json")
SPEC = Rotary(head_dim=64, base=500_000.0)


def compared(*calls, spec=SPEC, prepare=lambda rank, monkeypatch: None, members=range(99)):
    """The report of `compare` on as many ranks, of each its arguments, one after the other.

    members  the numbers of the ranks in the job
    The first time a rank is asked, what it gives to all is kept; the second time all get that.
    """
    told, reports = [], []

    def gathered(mine, group=None):
        if len(told) < len(calls):
            told.append(pickle.dumps(mine))
            return {members[len(told) - 1]: mine}
        return dict(zip(members, map(pickle.loads, told), strict=False))

    for rank, arguments in [*enumerate(calls), *enumerate(calls)]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(ranks, "gathered", gathered)
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: members[rank])
            prepare(rank, monkeypatch)
            reports.append(compare(**{"spec": spec, **arguments}))
    reports = reports[len(calls) :]
    assert reports == [reports[0]] * len(calls), "the same on every rank"
    return reports[0]


def dealt(parts, whole, spec=SPEC):
    """What is wrong with who holds what: (ranks, text), or None."""
    report = compared(
        *({"positions": np.asarray(part, int), "expected": whole} for part in parts),
        spec=spec,
    )
    (finding,) = report.findings or (None,)
    assert finding is None or finding.what == "positions"
    return finding and finding[1:]


# --- who holds what ---

ORDERS = st.sampled_from(["contiguous", "head_tail", "striped"])


@settings(deadline=None, max_examples=40)  # the first call compiles
@given(ORDERS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_every_order_of_shard_is_whole_with_any_number_of_replicas(order, world, size, replicas):
    seq = 2 * world * size
    parts = [positions.shard(seq, rank, world, order) for rank in range(world)] * replicas
    assert dealt(parts, np.arange(seq)) is None


@settings(deadline=None)
@given(st.data())
def test_whatever_is_dealt_wrongly_is_counted_as_it_is(data):
    """Against counters of Python: what is missing, and what is outside, is named; else None."""
    numbers = st.lists(st.integers(-2, 9), max_size=6)
    parts = data.draw(st.lists(numbers, min_size=1, max_size=4))
    held = [number for part in parts for number in part]
    ranks_with = [sum(number in part for part in parts) for number in range(8)]
    times = max(1, round(sum(ranks_with) / 8))
    found = dealt(parts, np.arange(8))
    assert (found is None) == (ranks_with == [times] * 8 and len(held) == 8 * times)
    if found is not None:
        text = found[1]
        assert ("by nobody" in text) == (not set(range(8)) <= set(held))
        assert ("outside" in text) == (not set(held) <= set(range(8)))
        several = any(held.count(number) > min(times, ranks_with[number]) for number in range(8))
        assert several == ("as well" in text or "more than once" in text)
        few = any(0 < ranks < times for ranks in ranks_with)
        assert few == (" alone" in text)


@pytest.mark.parametrize("order", ["contiguous", "head_tail", "striped"])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_a_rank_that_counts_from_zero_is_blamed(order, bad):
    parts = [positions.shard(1024, rank, 4, order) for rank in range(4)]
    parts[bad] = np.arange(256)
    if (order, bad) == ("contiguous", 0):
        assert dealt(parts, np.arange(1024)) is None
        return
    blamed, text = dealt(parts, np.arange(1024))
    assert blamed == (bad,)
    assert text.startswith(f"rank {bad} holds ")
    assert text.endswith("held by nobody; it looks like arange(local length)")


HEAD_TAIL = [positions.shard(1024, rank // 2, 2, "head_tail") for rank in range(4)]
WORDS = {
    "a position again on one of two ranks": (
        [range(4), [0, 1, 2, 2], range(4, 8), range(4, 8)], 8, (1,),
        "rank 1 holds 2, which rank 0 holds as well; 3 is held by rank 0 alone",
    ),
    "the commonest fault": (
        [range(512), range(512)], 1024, (1,),
        "rank 1 holds 0..511, which rank 0 holds as well; 512..1023 are held by nobody; "
        "it looks like arange(local length)",
    ),
    "all count from zero": (
        [range(4)] * 4, 16, (1, 2, 3),
        "ranks 1, 2, 3 hold 0..3, which rank 0 holds as well; 4..15 are held by nobody; "
        "it looks like arange(local length)",
    ),
    "beside right replicas": (
        [*HEAD_TAIL[:3], range(512)], 1024, (3,),
        "rank 3 holds 0..255, which ranks 0, 1 hold as well; 512..767 are held by rank 2 alone; "
        "it looks like arange(local length)",
    ),
    "like no other": (
        [range(4), range(2, 6), range(4, 8), range(4, 8)], 8, (1,),
        "rank 1 holds 4..5, which ranks 2, 3 hold as well; 0..1 are held by rank 0 alone",
    ),
    "like other replicas": (
        [range(4), range(4), range(4, 8), range(4)], 8, (3,),
        "rank 3 holds 0..3, which ranks 0, 1 hold as well; 4..7 are held by rank 2 alone; "
        "it looks like arange(local length)",
    ),
    "two that count from zero, beside right replicas": (
        [*HEAD_TAIL[:2], range(512), range(512)], 1024, (2, 3),
        "ranks 2, 3 hold 0..255, which ranks 0, 1 hold as well; 512..767 are held by nobody; "
        "it looks like arange(local length)",
    ),
    "an offset": (
        [range(4), range(5, 9)], 8, (1,),
        "4 is held by nobody; 8 is outside of the sequence, on rank 1",
    ),
    "every token twice on its rank": (
        [[0, 1, 0, 1], [2, 2, 3, 3]], 4, (0, 1),
        "rank 0 holds 0..1 more than once; rank 1 holds 2..3 more than once",
    ),
    "twice on one rank in place of once on two": (
        [[0, 1, 2, 2], [0, 1, 3, 3]], 4, (0, 1),
        "rank 0 holds 2 more than once; rank 1 holds 3 more than once; "
        "2 is held by rank 0 alone; 3 is held by rank 1 alone",
    ),
    "a rank with no token": ([range(4), ()], 8, (), "4..7 are held by nobody"),
    "many gaps": (
        [range(0, 16, 2)], 16, (),
        "1, 3, 5, 7 and 4 more are held by nobody",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORDS)
def test_the_words_of(name):
    parts, seq_len, ranks_to_blame, text = WORDS[name]
    assert dealt(map(list, parts), np.arange(seq_len)) == (ranks_to_blame, text)


def test_a_row_of_a_batch_is_named():
    whole = np.stack([np.arange(4), np.arange(4)])
    left, right = whole[:, :2], whole[:, 2:].copy()
    right[1] = 3
    assert dealt([left, whole[:, 2:]], whole) is None
    assert dealt([left, right], np.arange(4))[1].startswith("row 1: rank 1 holds 3 more than once;")
    assert dealt([left, right[::-1]], np.arange(4))[1].startswith("row 0: rank 1 holds 3 more")


def test_packed_positions_may_be_held_as_often_as_they_occur():
    whole = positions.packed([0, 4, 8])
    parts = [whole[positions.shard(8, rank, 2, "head_tail")] for rank in range(2)]
    assert dealt(parts, whole) is None
    assert dealt(parts, np.arange(8)) is not None
    parts = [whole[positions.shard(8, rank, 2)] for rank in range(2)]  # 0 .. 3 on both
    assert dealt(parts, whole) is None


def test_positions_of_several_axes_are_compared_as_tuples():
    spec = Rotary(head_dim=12, axes=positions.sections(2, 2, 2))
    whole = positions.mrope([("text", 2), ("image", 1, 2, 2), ("text", 2)])
    parts = [whole[positions.shard(8, rank, 2, "head_tail")] for rank in range(2)]
    assert dealt(parts, whole, spec) is None
    parts[1] = parts[1].copy()
    parts[1][0, 2] = 7
    text = dealt(parts, whole, spec)[1]
    assert "(2, 2, 2) is held by nobody; (2, 2, 7) is outside of the sequence, on rank 1" in text


# --- what ranks say of themselves ---


@pytest.mark.parametrize(
    ("change", "what", "text"),
    [
        ({"spec": Rotary(head_dim=64, base=1e4)}, "spec",
         "rank {} has base 10000.0, most have 500000.0"),
        ({"positions": [[0, 1], [2, 3]]}, "positions", "rank {} has batch 2, most have 1"),
        ({"positions": None}, "positions", "rank {} has batch None, most have 1"),
        ({"seq_len": 16}, "positions", "rank {} has (seq_len, sha256) (16, "),
        ({"expected": [0, 1, 2, 4]}, "positions", "rank {} has (seq_len, sha256) (4, "),
        ({"positions": [0.5, 1.5]}, "positions",
         "rank {}: positions must be whole numbers, got float64"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("odd", [0, 2])
def test_the_rank_that_differs_is_named_also_if_it_is_the_first(odd, change, what, text):
    calls = [{"positions": range(4), "seq_len": 4}] * 3
    calls[odd] = {**calls[odd], **change}
    found = compared(*calls).findings
    assert {each[:2] for each in found} == {(what, (odd,))}
    assert found[0].text.startswith(text.format(odd))


def test_another_version_on_a_rank_is_named():
    def prepare(rank, monkeypatch):
        version = "2.0" if rank == 1 else "1.0"
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    text = "rank 1 has {} '2.0', most have '1.0'"
    assert compared({}, {}, {}, prepare=prepare).findings == tuple(
        ("versions", (1,), text.format(name)) for name in ("rotary", "torch", "numpy")
    )


def test_a_rank_whose_own_tables_are_wrong_is_named():
    def prepare(rank, monkeypatch):
        if rank == 1:
            monkeypatch.setattr(ranks, "cos_sin", lambda *arguments, **options: (
                table + 1e-3 for table in cos_sin(*arguments, **options)))  # fmt: skip

    text = "tables made on rank 1 are off by 1.4e-03; run rotary doctor there"
    assert compared({}, {}, prepare=prepare).findings == (("kernel", (1,), text),)


def test_other_frequencies_under_the_same_spec_are_named():
    def prepare(rank, monkeypatch):
        if rank == 2:
            turns = ranks.turns
            monkeypatch.setattr(ranks, "turns", lambda *arguments: turns(*arguments) + 1)

    (finding,) = compared({}, {}, {}, prepare=prepare).findings
    assert finding[:2] == ("spec", (2,))
    assert finding.text.startswith("rank 2 has turns '")


def test_ranks_of_a_group_are_named_by_their_numbers_in_the_job():
    counts = {"positions": np.arange(4), "seq_len": 8}
    (finding,) = compared(counts, counts, members=(1, 3)).findings
    assert finding.ranks == (3,)
    assert finding.text.startswith("rank 3 holds 0..3, which rank 1 holds as well; 4..7 are held")
    other = {**counts, "positions": np.arange(4, 8), "spec": Rotary(head_dim=64)}
    findings = compared(counts, other, counts, other, counts, members=(1, 3, 5, 7, 9)).findings
    assert {each.ranks for each in findings if each.what == "spec"} == {(3, 7)}


# --- one process, all of it ---


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        Rotary(head_dim=64, rotary_dim=32, sign=-1),
        scaled("dynamic", 64, 4.0, 16),
        scaled("yarn", 64, 4.0, 16),
    ],
    ids=lambda spec: spec.schedule,
)  # fmt: skip
def test_exact_tables_of_any_spec_pass(spec):
    at = torch.randperm(64)
    cos, sin = cos_sin(spec, at, seq_len=64)
    assert compare(spec, at, cos, sin, seq_len=64) == Report(1, ())
    assert compare(spec, at[None].expand(2, -1), cos[None].expand(2, -1, -1),
                   sin[None].expand(2, -1, -1), seq_len=64).ok  # fmt: skip
    assert compare(spec).ok


@pytest.mark.usefixtures("alone")
def test_a_rank_outside_of_the_group_is_told_so():
    with pytest.raises(ValueError, match="rank 0 is not in the group: call it in its ranks only"):
        compare(SPEC, group=dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.usefixtures("alone")
def test_axes_pass_against_the_positions_of_the_whole_sequence():
    spec = Rotary(head_dim=16, axes=positions.sections(2, 3, 3))
    ids = torch.from_numpy(positions.mrope([("text", 2), ("image", 1, 2, 2)]))
    assert compare(spec, ids, *cos_sin(spec, ids), expected=ids).ok
    assert "need expected" in str(compare(spec, ids, seq_len=6))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda cos, sin, at: (cos.bfloat16(), sin),
         "first at position 1: angles or tables of low precision"),
        (lambda cos, sin, at: cos_sin(SPEC, torch.arange(8)),
         "first at position 100: they are those of 0..7, arange(local length)"),
        (lambda cos, sin, at: cos_sin(SPEC, at + 3), "those of other positions or frequencies"),
        (lambda cos, sin, at: (cos_sin(SPEC, torch.arange(8))[0], sin),
         "those of other positions or frequencies"),
        (lambda cos, sin, at: (torch.full_like(cos, float("nan")), sin),
         "are NaN, first at position 100"),
        (lambda cos, sin, at: (cos, sin + torch.tensor([0.0] * 6 + [float("nan")] * 2)[:, None]),
         "are NaN, first at position 106"),
        (lambda cos, sin, at: (cos, sin + float("inf")), "are infinite, first at position 100"),
        (lambda cos, sin, at: (2 * cos, 2 * sin),
         "first at position 100: multiplied by 2, not by the attention factor 1"),
        (lambda cos, sin, at: (torch.cat((cos, sin), -1), sin),
         "tables: rank 0: cos must be (8, 32), got shape (8, 64)"),
        (lambda cos, sin, at: (torch.cat((cos, cos), -1), sin),
         "got shape (8, 64): the full width; pass cos[..., :32]"),
        (lambda cos, sin, at: (cos, sin.repeat_interleave(2, dim=-1)),
         "sin must be (8, 32), got shape (8, 64): the full width; pass sin[..., ::2]"),
    ],
)  # fmt: skip
def test_tables_that_are_not_of_the_positions_are_told_apart(break_it, said):
    at = torch.arange(100, 108)
    at[0] = 0
    at[0] = 100
    cos, sin = cos_sin(SPEC, at)
    if said.startswith("first at position 1:"):
        at = torch.arange(8)
        cos, sin = cos_sin(SPEC, at)
    assert said in str(compare(SPEC, at, *break_it(cos, sin, at), expected=at))


@pytest.mark.usefixtures("alone")
def test_tables_without_the_attention_factor_are_told_from_those_of_other_positions():
    spec = scaled("yarn", 64, 4.0, 16)  # fmt: skip
    at, size = torch.arange(8), 0.1 * np.log(4) + 1

    def said(positions, change=lambda table: table):
        tables = (change(table / size) for table in cos_sin(spec, positions))
        return str(compare(spec, at, *tables, seq_len=8))

    assert said(at).endswith("off by 1.2e-01, first at position 0: "
                             "the attention factor 1.13863 is missing")  # fmt: skip
    rounded = said(at, lambda table: table.bfloat16())
    assert rounded.endswith("is missing; angles or tables of low precision")
    assert said(at + 3).endswith("missing; they are those of other positions or frequencies")


@pytest.mark.usefixtures("alone")
def test_a_sin_of_the_other_sign_is_not_taken_for_local_positions():
    at = torch.arange(8)
    cos, sin = cos_sin(SPEC, at)
    said = str(compare(SPEC, at, cos, -sin, seq_len=8))
    assert said.endswith("first at position 1: they are those of other positions or frequencies")


@pytest.mark.usefixtures("alone")
def test_positions_that_are_no_positions_are_a_finding_and_nobody_waits():
    assert "whole numbers, got float32" in str(compare(SPEC, torch.rand(4), seq_len=4))
    assert "got shape (1, 1, 4)" in str(compare(SPEC, torch.arange(4)[None, None], seq_len=4))
    assert "meta tensor" in str(compare(SPEC, torch.arange(4, device="meta"), seq_len=4))
    assert "expected has 3 rows, positions have 2" in str(
        compare(SPEC, torch.zeros(2, 4, dtype=torch.long), expected=np.zeros((3, 4), np.int64))
    )


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="positions need seq_len, or expected"):
        compare(SPEC, torch.arange(4))
    with pytest.raises(ValueError, match="all three are needed"):
        compare(SPEC, torch.arange(4), torch.ones(4, 32), seq_len=4)
    with pytest.raises(ValueError, match="all three are needed"):
        compare(SPEC, torch.arange(4), sin=torch.ones(4, 32), seq_len=4)
    with pytest.raises(ValueError, match="all three are needed"):
        compare(SPEC, cos=torch.ones(4, 32), sin=torch.ones(4, 32))
    with pytest.raises(TypeError, match="must be a Rotary, got dict"):
        compare({"head_dim": 64}, torch.arange(4), seq_len=4)
    for seq_len in (4.0, "4", True, -4):
        with pytest.raises(ValueError, match="seq_len must be a whole number >= 0, got "):
            compare(SPEC, torch.arange(4), seq_len=seq_len)
    for tolerance in (float("nan"), -1.0, 0.0, "1e-6"):
        with pytest.raises(ValueError, match="tolerance must be a number > 0, got "):
            compare(SPEC, torch.arange(4), seq_len=4, tolerance=tolerance)


# --- a spec that depends on the length of the whole sequence ---

SHORT, LONG = [1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 4.0, 8.0]
LONGROPE = longrope(2.0, 16, SHORT, LONG)


def longrope_tables(at, divisors):
    """cos and sin of LONGROPE, in float64 by its formula; `divisors` one list or one for a row."""
    per_row = np.expand_dims(divisors, -2)
    angles = np.asarray(at)[..., None] / (per_row * 1e4 ** (np.arange(4) / 4))
    return np.sqrt(1 + np.log(2) / np.log(16)) * np.stack((np.cos(angles), np.sin(angles)))


def of_half(rank, whole, divisors):
    """The arguments of one of two ranks, with tables that divide by `divisors`."""
    held = np.asarray(whole)[..., 16 * rank : 16 * (rank + 1)]
    cos, sin = longrope_tables(held, divisors)
    return {"spec": LONGROPE, "positions": held, "cos": cos, "sin": sin, "expected": whole}


def test_expected_positions_say_how_long_the_whole_sequence_is():
    whole = np.arange(32)
    assert compared(of_half(0, whole, LONG), of_half(1, whole, LONG)).ok
    (finding,) = compared(of_half(0, whole, SHORT), of_half(1, whole, LONG)).findings
    assert finding[:2] == ("tables", (0,))


def test_every_row_is_as_long_as_its_largest_expected_position_plus_one():
    whole = np.stack([positions.packed([0, 16, 32]), np.arange(32)])
    right = [SHORT, LONG]
    assert compared(of_half(0, whole, right), of_half(1, whole, right)).ok
    (finding,) = compared(of_half(0, whole, right), of_half(1, whole, LONG)).findings
    assert finding[:2] == ("tables", (1,))
    given = [{**of_half(rank, whole, LONG), "seq_len": 32} for rank in (0, 1)]  # as transformers
    assert compared(*given).ok


def test_a_rank_without_positions_is_not_blamed_for_the_frequencies():
    calls = [of_half(rank % 2, np.arange(32), LONG) for rank in range(4)]
    calls[1]["positions"] = calls[1]["positions"] + 0.5
    (finding,) = compared(*calls).findings
    assert finding[:2] == ("positions", (1,))


# --- the command ---

JOB = """
import torch, torch.distributed as dist
import rotary, rotary.ranks
from rotary import positions

SPEC = rotary.Rotary(head_dim=128, base=5e5)
RANK = dist.get_rank()

def held():
    return torch.from_numpy(positions.shard(1024, RANK, 2, "head_tail"))

def refused():
    cos, sin = rotary.cos_sin(SPEC, held())
    return rotary.ranks.compare(SPEC, held(), cos, sin if RANK == 0 else None, seq_len=1024)

def planted():
    at = torch.arange(512) if RANK == 1 else held()
    return at, *rotary.cos_sin(SPEC, held())
"""


@pytest.fixture
def job(tmp_path):
    """A folder with the job and its config, and the arguments of `rotary doctor` there."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "head_dim": 128, "rope_theta": 5e5}'
    )

    def arguments(function, *more):
        return ["doctor", "--distributed", f"job.py:{function}",
                "--config", "config.json", "--seq-len", "1024", *more]  # fmt: skip

    return tmp_path, arguments


@pytest.fixture
def forked(job, forks):
    """`rotary doctor --distributed` on two forks, as torchrun tells its ranks who they are."""
    folder, arguments = job

    def doctor(*asked):
        command = ["rotary", *arguments(*asked)]
        program = folder / "doctor.py"
        program.write_text(f"import sys; sys.argv = {command}; from rotary.cli import main; main()")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        ranks = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
        return forks(program, folder, ranks)

    return doctor


def test_ranks_that_agree_pass(forked):
    statuses, out, err = forked("held")
    assert (statuses, out) == ([0, 0], "2 ranks agree\n"), err


def test_a_rank_with_other_positions_and_tables_fails_the_job_and_is_named(job):
    folder, arguments = job
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "rotary"
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, *torchrun, *arguments("planted", "--json")],
            cwd=folder, capture_output=True, text=True, timeout=120,
            env={**environment(), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        # torch's gloo may abort a rank at its exit, when all is done, on a busy machine
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["world"], report["ok"]) == (2, False)
    tables, positions = report["findings"]
    assert tables["ranks"] == positions["ranks"] == [1]
    assert tables["text"].startswith("those of rank 1 are off by")
    assert positions["text"] == (
        "rank 1 holds 0..255, which rank 0 holds as well; 512..767 are held by nobody; "
        "it looks like arange(local length)"
    )
    assert "exitcode  : 1" in done.stderr


def test_an_argument_that_one_rank_lacks_is_an_error_on_all_and_nobody_waits(forked):
    statuses, out, _ = forked("refused", "--json")
    assert statuses == [1, 1]
    lacks = "to check tables pass positions, cos and sin: all three are needed"
    assert [finding["text"] for finding in json.loads(out)["findings"]] == [
        f"job.py:refused failed on rank 0: ValueError: rank 1: {lacks}",
        f"job.py:refused failed on rank 1: ValueError: {lacks}",
    ]


@pytest.fixture
def one_rank(monkeypatch):
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("returned", ["(range(8), None, 1.0)", "None", "(1, 2)"])
def test_what_a_function_must_return_is_said(tmp_path, main, returned):
    (tmp_path / "job.py").write_text(f"def mine():\n    return {returned}\n")
    target, given = f"{tmp_path}/job.py:mine", ("--config", LLAMA, "--seq-len", "8", "--json")
    done = main("doctor", target, "--distributed", *given)
    assert (done.code, done.err) == (1, "")
    (finding,) = json.loads(done.out)["findings"]
    assert finding["what"] == "function"
    assert finding["text"].endswith("it must return positions, or (positions, cos, sin)")


@pytest.mark.usefixtures("one_rank")
def test_a_function_that_fails_on_a_rank_is_told_once(tmp_path, monkeypatch, main):
    """On one rank, which hears of a failure on another one."""
    (tmp_path / "job.py").write_text("def failing():\n    raise KeyError('other')\n")
    monkeypatch.setattr(ranks, "gathered", lambda mine: {0: mine, 1: "RuntimeError: no such thing"})
    target, given = f"{tmp_path}/job.py:failing", ("--config", LLAMA, "--seq-len", "8", "--json")
    done = main("doctor", target, "--distributed", *given)
    assert (done.code, done.err) == (1, "")
    findings = json.loads(done.out)["findings"]
    assert [(each["what"], each["ranks"]) for each in findings] == [
        ("function", [0]),
        ("function", [1]),
    ]
    assert "job.py:failing failed on rank 0: " in findings[0]["text"]
    assert "other" in findings[0]["text"]
    assert "job.py:failing failed on rank 1: RuntimeError: no such thing" in findings[1]["text"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--distributed",), "--distributed needs --config"),
        (("x.py:f", "--distributed", "--config", LLAMA), "--seq-len is needed"),
        (("--distributed", "--config", LLAMA), "torchrun --nproc-per-node=4 -m rotary doctor"),
        (("--config", LLAMA), "need --distributed"),
    ],
)
def test_what_is_missing_on_the_command_line_is_said(main, monkeypatch, arguments, said):
    monkeypatch.delenv("RANK", raising=False)
    assert_refused(main("doctor", *arguments), said)
