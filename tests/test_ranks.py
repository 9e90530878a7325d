"""`rotary.ranks`: right ranks pass; one with other positions, tables or frequencies is named."""

import json
import os
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest
import torch
import torch.distributed as dist
from command import SETTINGS, assert_refused, in_process
from hypothesis import given
from hypothesis import strategies as st

from rotary import Rotary, cos_sin, positions
from rotary.ranks.compare import (
    Account,
    Report,
    _is_whole,
    _mixed,
    _total,
    compare,
    disagreements,
    groups,
)
from rotary.ranks.holders import misplaced

LLAMA = str(files("rotary") / "configs" / "llama-3.1-8b.json")
SPEC = Rotary(head_dim=64, base=500_000.0)


def rows(numbers):
    """(rows, seq, axes) of a list of positions."""
    array = np.asarray(numbers, np.int64)
    return array.reshape(1, len(array), array.shape[1] if array.ndim > 1 else 1)


def by_group(parts):
    """What `coverage` takes, from the positions of every rank."""
    held = {}
    for rank, part in enumerate(parts):
        held.setdefault(tuple(np.ravel(part)), []).append(rank)
    return {tuple(ranks): rows(parts[ranks[0]]) for ranks in held.values()}


# --- who holds what ---

ORDERS = st.sampled_from(["contiguous", "head_tail", "striped"])


@given(ORDERS, st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
def test_every_order_of_shard_is_whole_with_any_number_of_replicas(order, world, size, replicas):
    seq = 2 * world * size
    parts = [positions.shard(seq, rank, world, order) for rank in range(world)] * replicas
    assert misplaced(by_group(parts), rows(range(seq))) is None


@given(st.data())
def test_whatever_is_dealt_wrongly_is_counted_as_it_is(data):
    """Against counters of Python: what is missing, and what is outside, is named; else None."""
    numbers = st.lists(st.integers(-2, 9), max_size=6)
    parts = data.draw(st.lists(numbers, min_size=1, max_size=4))
    held = [number for part in parts for number in part]
    times = max(1, round(len(held) / 8))
    found = misplaced(by_group(parts), rows(range(8)))
    assert (found is None) == (sorted(held) == sorted(list(range(8)) * times))
    if found is not None:
        text = found[1]
        assert ("by nobody" in text) == (not set(range(8)) <= set(held))
        assert ("outside" in text) == (not set(held) <= set(range(8)))
        several = any(held.count(number) > times for number in range(8))
        assert several == ("as well" in text or "more than once" in text)
        few = any(0 < held.count(number) < times for number in range(8))
        assert few == (" alone" in text)


@pytest.mark.parametrize("order", ["contiguous", "head_tail", "striped"])
@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_rank_that_counts_from_zero_is_blamed(order, bad):
    parts = [positions.shard(1024, rank, 4, order) for rank in range(4)]
    parts[bad] = np.arange(256)
    blamed, text = misplaced(by_group(parts), rows(range(1024)))
    assert blamed == (bad,)
    assert text.startswith(f"rank {bad} holds ")
    assert text.endswith("held by nobody; it looks like arange(local length)")


def test_the_words_of_the_commonest_fault():
    parts = [np.arange(512), np.arange(512)]
    assert misplaced(by_group(parts), rows(range(1024))) == (
        (1,),
        "rank 1 holds 0..511, which rank 0 holds as well; 512..1023 are held by nobody; "
        "it looks like arange(local length)",
    )


def test_all_ranks_that_count_from_zero_are_blamed_but_the_first():
    blamed, text = misplaced(by_group([np.arange(4)] * 4), rows(range(16)))
    assert blamed == (1, 2, 3)
    assert "4..15 are held by nobody" in text


def test_a_rank_beside_right_replicas_is_blamed():
    good = [positions.shard(1024, rank // 2, 2, "head_tail") for rank in range(4)]
    good[3] = np.arange(512)
    blamed, text = misplaced(by_group(good), rows(range(1024)))
    assert blamed == (3,)
    assert text == (
        "rank 3 holds 0..255, which ranks 0, 1 hold as well; 512..767 are held by rank 2 alone; "
        "it looks like arange(local length)"
    )


def test_a_rank_that_is_like_no_other_is_blamed_before_replicas():
    parts = [np.arange(4), np.arange(2, 6), np.arange(4, 8), np.arange(4, 8)]
    assert misplaced(by_group(parts), rows(range(8))) == (
        (1,),
        "rank 1 holds 4..5, which ranks 2, 3 hold as well; 0..1 are held by rank 0 alone",
    )


def test_a_rank_that_is_like_other_replicas_is_blamed():
    parts = [np.arange(4), np.arange(4), np.arange(4, 8), np.arange(4)]
    assert misplaced(by_group(parts), rows(range(8))) == (
        (3,),
        "rank 3 holds 0..3, which ranks 0, 1 hold as well; 4..7 are held by rank 2 alone; "
        "it looks like arange(local length)",
    )


def test_an_offset_is_outside_of_the_sequence():
    blamed, text = misplaced(by_group([np.arange(4), np.arange(5, 9)]), rows(range(8)))
    assert (blamed, text) == (
        (1,),
        "4 is held by nobody; 8 is outside of the sequence, on rank 1",
    )


def test_a_row_of_a_batch_is_named():
    whole = np.stack([np.arange(4), np.arange(4)])[..., None]
    left, right = whole[:, :2], whole[:, 2:].copy()
    right[1] = [[3], [3]]
    assert misplaced({(0,): left, (1,): whole[:, 2:]}, whole) is None
    assert misplaced({(0,): left, (1,): right}, whole)[1].startswith("row 1: rank 1 holds 3 more")


def test_packed_positions_may_be_held_as_often_as_they_occur():
    whole = positions.packed([0, 4, 8])
    parts = [whole[positions.shard(8, rank, 2, "head_tail")] for rank in range(2)]
    assert misplaced(by_group(parts), rows(whole)) is None
    assert misplaced(by_group(parts), rows(range(8))) is not None
    parts = [whole[positions.shard(8, rank, 2)] for rank in range(2)]  # 0 .. 3 on both
    assert misplaced(by_group(parts), rows(whole)) is None


def test_positions_of_several_axes_are_compared_as_tuples():
    whole = positions.mrope([("text", 2), ("image", 1, 2, 2), ("text", 2)])
    parts = [whole[positions.shard(8, rank, 2, "head_tail")] for rank in range(2)]
    held = {(rank,): part[None] for rank, part in enumerate(parts)}
    assert misplaced(held, whole[None]) is None
    parts[1] = parts[1].copy()
    parts[1][0, 2] = 7
    text = misplaced({(0,): parts[0][None], (1,): parts[1][None]}, whole[None])[1]
    assert "(2, 2, 2) is held by nobody; (2, 2, 7) is outside of the sequence, on rank 1" in text


# --- the sum that is sent instead of positions ---


def test_the_mixing_is_splitmix64():
    """The first outputs of the published generator with seed 1234567."""
    step = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + n * step) % 2**64 for n in range(3)], np.uint64)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert _mixed(states).tolist() == published


NUMBERS = st.lists(st.integers(0, 3), max_size=5)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_the_sum_over_ranks_says_whether_they_hold_the_sequence(one, other, whole):
    total = (_total(rows(one))[1] + _total(rows(other))[1]) % 2**64
    assert (total == _total(rows(whole))[1]) == (sorted(one + other) == sorted(whole))


def test_the_sum_tells_rows_and_axes_apart():
    parts = [[[[0], [1]], [[2], [3]]], [[[2], [3]], [[0], [1]]], [[[0, 1]], [[2, 3]]]]
    parts += [[[[1, 0]], [[2, 3]]], [[[0, 1], [2, 3]]]]
    assert len({_total(np.array(part)) for part in parts}) == len(parts)


# --- what ranks say ---

ONE = Account({"rotary": "1.0"}, SPEC.to_dict(), ("ab", 1e-7), rows=1, digest="x")


def test_ranks_that_say_the_same_agree():
    assert list(disagreements([ONE, ONE, ONE])) == []
    assert groups([ONE, ONE]) == [(0, 1)]


@pytest.mark.parametrize("held", [[[0, 1], [2, 3]], [[3, 0], [1, 2]] * 2, [[0, 1, 2, 3]] * 3])
def test_ranks_that_hold_all_equally_often_need_not_send_positions(held):
    said = [ONE._replace(total=_total(rows(part)), wanted=_total(rows(range(4)))) for part in held]
    assert _is_whole(said)
    said[-1] = said[-1]._replace(total=_total(rows([*held[-1][:-1], 7])))
    assert not _is_whole(said)


@pytest.mark.parametrize(
    ("change", "what", "text"),
    [
        ({"versions": {"rotary": "2.0"}}, "versions", "rank 1 has rotary '2.0', most have '1.0'"),
        ({"spec": {**SPEC.to_dict(), "base": 1e4}}, "spec",
         "rank 1 has base 10000.0, most have 500000.0"),
        ({"kernel": ("cd", 1e-7)}, "spec", "rank 1 has turns 'cd', most have 'ab'"),
        ({"kernel": ("ab", 1e-3)}, "kernel",
         "tables made on rank 1 are off by 1.0e-03; run rotary doctor there"),
        ({"rows": 2}, "positions", "rank 1 has batch 2, most have 1"),
        ({"wanted": (8, 5)}, "positions",
         "rank 1 has (seq_len, checksum) (8, 5), most have (0, 0)"),
        ({"problem": "not numbers"}, "positions", "rank 1: not numbers"),
    ],
)  # fmt: skip
def test_the_rank_that_differs_is_named(change, what, text):
    (finding,) = disagreements([ONE, ONE._replace(**change), ONE])
    assert finding == (what, (1,), text)


def test_the_first_rank_is_not_right_because_it_is_the_first():
    (finding,) = disagreements([ONE._replace(versions={"rotary": "0.9"}), ONE, ONE])
    assert finding == ("versions", (0,), "rank 0 has rotary '0.9', most have '1.0'")


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
        Rotary(head_dim=64, schedule="dynamic", params={
            "factor": 4.0, "original_max_position_embeddings": 16}),
        Rotary(head_dim=64, schedule="yarn", params={
            "factor": 4.0, "original_max_position_embeddings": 16}),
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
def test_axes_pass_against_the_positions_of_the_whole_sequence():
    spec = Rotary(head_dim=16, axes=positions.sections(2, 3, 3))
    ids = torch.from_numpy(positions.mrope([("text", 2), ("image", 1, 2, 2)]))
    assert compare(spec, ids, *cos_sin(spec, ids), expected=ids).ok
    assert "need expected" in str(compare(spec, ids, seq_len=6))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda cos, at: cos.bfloat16(), "first at position 1: angles or tables of low precision"),
        (lambda cos, at: cos_sin(SPEC, torch.arange(8))[0],
         "first at position 100: they are those of 0..7, arange(local length)"),
        (lambda cos, at: cos_sin(SPEC, at + 3)[0], "those of other positions or frequencies"),
        (lambda cos, at: torch.full_like(cos, float("nan")), "off by inf"),
        (lambda cos, at: torch.cat((cos, cos), -1), "cos must be (8, 32), got shape (8, 64)"),
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
    assert said in str(compare(SPEC, at, break_it(cos, at), sin, expected=at))


@pytest.mark.usefixtures("alone")
def test_positions_that_are_no_positions_are_a_finding_and_nobody_waits():
    assert "whole numbers, got float32" in str(compare(SPEC, torch.rand(4), seq_len=4))
    assert "got shape (1, 1, 4)" in str(compare(SPEC, torch.arange(4)[None, None], seq_len=4))
    assert "expected has 3 rows, positions have 2" in str(
        compare(SPEC, torch.zeros(2, 4, dtype=torch.long), expected=np.zeros((3, 4), np.int64))
    )


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="positions need seq_len, or expected"):
        compare(SPEC, torch.arange(4))
    with pytest.raises(ValueError, match="all three are needed"):
        compare(SPEC, torch.arange(4), torch.ones(4, 32), seq_len=4)


# --- the command ---

JOB = """
import torch, torch.distributed as dist
import rotary
from rotary import positions

def held():
    return torch.from_numpy(positions.shard(1024, dist.get_rank(), 4, "head_tail"))

def planted():
    return torch.arange(256) if dist.get_rank() == 2 else held()

def tables():
    spec = rotary.Rotary(head_dim=128, base=1e4 if dist.get_rank() == 1 else 5e5)
    return held(), *rotary.cos_sin(spec, held())

def failing():
    raise RuntimeError("no such thing") if dist.get_rank() == 3 else KeyError("other")
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "head_dim": 128, "rope_theta": 5e5}'
    )
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}

    def doctor(*arguments):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
            *("-m", "rotary", "doctor", "--distributed", *arguments),
        ]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120,
            env={**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )  # fmt: skip

    return doctor


def test_four_ranks_that_agree_pass(job):
    done = job("job.py:held", "--config", "config.json", "--seq-len", "1024")
    assert (done.returncode, done.stdout) == (0, "4 ranks agree\n"), done.stderr


def test_a_rank_that_counts_from_zero_fails_the_job_and_is_named(job):
    done = job("job.py:planted", "--config", "config.json", "--seq-len", "1024", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    (finding,) = report["findings"]
    assert (report["world"], report["ok"], finding["ranks"]) == (4, False, [2])
    assert finding["text"].startswith("rank 2 holds 0..127, which rank 0 holds as well; ")
    assert "256..383, 640..767 are held by nobody" in finding["text"]
    assert finding["text"].endswith("it looks like arange(local length)")
    assert "exitcode  : 1" in done.stderr


@pytest.mark.slow
def test_tables_of_another_base_are_named(job):
    done = job("job.py:tables", "--config", "config.json", "--seq-len", "1024")
    assert done.returncode == 1
    assert "those of rank 1 are off by" in done.stdout
    assert "those of rank 0" not in done.stdout


@pytest.mark.slow
def test_a_function_that_fails_on_a_rank_is_told_once(job):
    done = job("job.py:failing", "--config", "config.json", "--seq-len", "1024", "--json")
    texts = [each["text"] for each in json.loads(done.stdout)["findings"]]
    assert len(texts) == 4
    assert "job.py:failing failed on rank 3: " in texts[3]
    assert "no such thing" in texts[3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--distributed",), "--distributed needs --config"),
        (("x.py:f", "--distributed", "--config", LLAMA), "give --seq-len"),
        (("--distributed", "--config", LLAMA), "torchrun --nproc-per-node=4 -m rotary doctor"),
        (("--config", LLAMA), "go with --distributed"),
    ],
)
def test_what_is_missing_on_the_command_line_is_said(monkeypatch, capsys, arguments, said):
    monkeypatch.delenv("RANK", raising=False)
    assert_refused(in_process(monkeypatch, capsys)("doctor", *arguments), said)
