"""The cost model against arrays: its bytes, its rows, its balance, and the page that shows it."""

import itertools
import json
import re
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import scaling
from benchmarks.scaling import DEEPSEEK, LLAMA, Model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rotary import Rotary, apply, cos_sin, from_hf_config, turns
from rotary.analysis.precision import nearby
from rotary.positions import packed, shard

ROOT = Path(__file__).resolve().parent.parent
ORDERS = ("contiguous", "ring", "ulysses", "head_tail", "striped")
TINY = Model("tiny", 2, 8, 2, 16)
SPEC = Rotary(head_dim=16)
examples = settings(max_examples=50, deadline=None, derandomize=True)


# --- bytes and rows, against arrays ---


def arrays(model, seq):
    """q and k as float16, which has the two bytes of a bfloat16."""
    shape = (seq, model.rotary_dim)
    return [np.ones((n, *shape), np.float16) for n in (model.q_heads, model.k_heads)]


def nbytes(*turned) -> int:
    """What is read and written when these are turned: each array once each way."""
    return 2 * sum(each.nbytes for each in turned)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_bytes_moved_are_those_of_the_arrays_of_one_rank(world):
    seq = 64
    q, k = arrays(TINY, seq)
    assert scaling.rotated(TINY, seq, world, "batch") == nbytes(q, k)
    own = max(2 // world, 1)
    part = nbytes(np.split(q, world)[0], k[:own])
    assert scaling.rotated(TINY, seq, world, "heads") == part
    for order, rank in itertools.product(ORDERS, range(world)):
        held = shard(seq, rank, world, order)
        assert scaling.tokens(seq, world, "sequence") == held.size
        turned = apply(SPEC, q[:, held], k[:, held], positions=held)
        assert scaling.rotated(TINY, seq, world, "sequence") == nbytes(*turned)


def test_heads_are_shared_by_no_more_devices_than_there_are():
    assert scaling.rotated(TINY, 64, 16, "heads") is None
    assert scaling.heads(TINY, 16, "sequence") == (8, 2)
    assert scaling.heads(DEEPSEEK, 128, "heads") == (1, 1)


def test_tables_and_turns_take_what_the_formulas_say():
    for model in (LLAMA, DEEPSEEK):
        spec = Rotary(head_dim=model.rotary_dim)
        assert turns(spec).nbytes == scaling.turns_bytes(model)
        for order in ORDERS:
            own = cos_sin(spec, shard(4096, 1, 4, order))
            assert sum(each.nbytes for each in own) == scaling.table_bytes(model, 4096 // 4)
    assert (scaling.turns_bytes(LLAMA), scaling.table_bytes(LLAMA, 131_072)) == (512, 64 * 2**20)


def test_the_shape_of_llama_is_that_of_its_config():
    config = json.loads(scaling.CONFIG.read_text())
    spec = from_hf_config(scaling.CONFIG)
    assert LLAMA[1:] == (
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        spec.rotary_dim,
    )


def test_a_rank_makes_its_positions_without_those_of_the_others():
    seq, world = 2**22, 64
    for order in ORDERS:
        tracemalloc.start()
        held = shard(seq, 5, world, order)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert held.nbytes == 8 * seq // world
        assert peak < 4 * held.nbytes < 8 * seq / 8


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_where_k_is_turned_moves_what_a_simulation_moves(world):
    seq = 8 * world
    held = [shard(seq, rank, world, "ring") for rank in range(world)]
    q, k = arrays(TINY, seq)
    blocks = [k[:, own] for own in held]
    here = q[:, held[0]]
    heads = [np.split(q, world)[0], k[: max(2 // world, 1)]]
    expected = [
        (nbytes(here, blocks[0]), held[0].size),
        (nbytes(here, *blocks), len({*np.concatenate(held).tolist()})),
        (nbytes(here, np.concatenate(blocks, axis=1)), seq),
        (nbytes(*heads), seq),
    ]
    assert [each[1:] for each in scaling.places(TINY, seq, world)] == expected


def test_ulysses_after_the_exchange_needs_a_head_for_every_device():
    *_, (label, moved, rows) = scaling.places(TINY, 64, 16)
    assert label.startswith("Ulysses")
    assert (moved, rows) == (None, None)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_what_others_would_send_is_the_size_of_the_arrays_they_send(world):
    seq = 8 * world
    held = [shard(seq, rank, world, "ring") for rank in range(world)]
    own = [sum(each.nbytes for each in cos_sin(SPEC, mine)) for mine in held]
    k = arrays(TINY, seq)[1]
    blocks = [2 * k[:, mine].nbytes for mine in held]  # v has the bytes of k
    expected = [held[0].nbytes, own[0], sum(own[1:]), sum(own[1:]), sum(blocks[1:])]
    assert [sent for _, sent in scaling.alternatives(TINY, seq, world)] == expected


# --- many ranks, long sequences ---

LONG = scaling.LENGTHS["10M"]


def pairs_of(held: np.ndarray) -> int:
    """(query, key) pairs of a rank under a causal mask: token n sees n + 1 keys."""
    return int(held.sum()) + held.size


@pytest.mark.parametrize("world", scaling.WORLDS)
@pytest.mark.parametrize("order", ["contiguous", "head_tail", "striped"])
def test_the_maps_of_ten_million_tokens_partition_them_with_the_balance_of_the_page(world, order):
    seen, pairs = np.zeros(LONG, bool), []
    for rank in range(world):
        held = shard(LONG, rank, world, order)
        assert held.shape == (LONG // world,)
        assert not seen[held].any()
        seen[held] = True
        pairs.append(pairs_of(held))
    assert seen.all()
    assert sum(pairs) == LONG * (LONG + 1) // 2
    assert float(Fraction(max(pairs) * world, sum(pairs))) == scaling.balance(order, LONG, world)
    if order == "head_tail":
        assert len(set(pairs)) == 1
    if order == "striped":  # each rank is one key a token ahead of the one before
        assert np.diff(pairs).tolist() == [LONG // world] * (world - 1)


@examples
@given(st.integers(1, 8), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_every_document_is_balanced_by_itself(world, counts):
    starts = np.cumsum([0, *(2 * world * count for count in counts)])
    place = packed(starts)
    held = [shard(starts[-1], rank, world, "head_tail", cu_seqlens=starts) for rank in range(world)]
    assert len({pairs_of(place[own]) for own in held}) == 1


# --- precision ---


def test_errors_of_angles_are_those_of_the_angles_of_transformers():
    spec = from_hf_config(scaling.CONFIG)
    config = LlamaConfig.from_json_file(scaling.CONFIG)
    rates = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    shown = {
        row.split(" | ")[0].strip("| "): row.split(" | ")[1:5]
        for row in scaling.precision_table().splitlines()[2:]
    }
    for column, seq in enumerate(scaling.LENGTHS.values()):
        place = nearby([seq])[0]
        right = cos_sin(spec, place)
        rounded = torch.from_numpy(place).bfloat16().double().numpy()
        for name, held in (("float32 angles", place), ("positions in bfloat16", rounded)):
            angles = np.multiply.outer(held.astype(np.float32), rates).astype(np.float64)
            off = max(
                np.abs(np.cos(angles) - right[0]).max(), np.abs(np.sin(angles) - right[1]).max()
            )
            assert f"{off:.1g}" == shown[name][column]
        assert float(shown["exact, float32 tables"][column]) < 1e-7


# --- times, and the page ---


def test_no_constant_is_taken_from_a_shape_that_is_predicted():
    report = scaling.latest()
    assert all(shape[:4] != (4096, 32, 8, 128) for shape in scaling.HELD_OUT)
    assert len(report["checks"]) == len(scaling.HELD_OUT) + 1
    for shape, check in zip(scaling.HELD_OUT, report["checks"], strict=False):
        assert check["predicted"] == scaling.seconds(report["constants"], *shape)
    assert all(scaling.is_near(check) for check in report["checks"])


def test_seconds_are_a_call_and_the_bytes():
    constants = {"call_us": 100.0, "float32_ns_per_byte": 0.5, "bfloat16_ns_per_byte": 1.0}
    read_and_written = 2 * 4 * 10 * 3 * 16
    said = scaling.seconds(constants, 10, 2, 1, 16, "float32")
    assert said == pytest.approx(1e-4 + 0.5e-9 * read_and_written)
    said = scaling.seconds(constants, 10, 2, 1, 16, "bfloat16")
    assert said == pytest.approx(1e-4 + 1e-9 * read_and_written / 2)


@pytest.mark.parametrize(("measured", "code"), [(1.9, None), (2.1, 1), (0.4, 1)])
def test_a_prediction_that_is_far_off_is_told_and_fails(monkeypatch, capsys, measured, code):
    report = scaling.latest()
    report["checks"][0] |= {"predicted": 1.0, "measured": measured}
    monkeypatch.setattr(scaling, "latest", lambda: report)
    monkeypatch.setattr("sys.argv", ["scaling"])
    if code is None:
        scaling.main()
    else:
        with pytest.raises(
            SystemExit, match="further than a factor of 2 from the prediction: 1024"
        ):
            scaling.main()
    assert f"| {measured:.2f} |" in capsys.readouterr().out


def test_the_page_shows_the_tables_that_the_formulas_give():
    page = (ROOT / "docs" / "scaling.md").read_text()
    tables = scaling.tables(scaling.latest())
    for title, text in tables.items():
        assert text in page, f"{title}: print it by python -m benchmarks.scaling"
    # and no other table of numbers
    rows = set("\n".join(tables.values()).splitlines())
    numbers = {line for line in page.splitlines() if re.match(r"\|.*\d [KMG]?i?B\b", line)}
    assert numbers <= rows


def test_the_page_says_when_its_times_were_measured():
    report = scaling.latest()
    assert report["date"] in (ROOT / "docs" / "scaling.md").read_text()
    assert (scaling.RESULTS / f"{report['date']}.json").is_file()
