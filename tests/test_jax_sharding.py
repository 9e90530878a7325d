"""RoPE on four devices of JAX: the same bits as on one, and nothing sent between them."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("jax_shards.py")
RUNS = (  # the laws of one process on four devices
    ("one_device", "automatic", "given_positions", "given_tables", "lengths"),
    ("shard_map", "shard_map_without_positions", "head_dim", "donated", "normalized"),
    ("explicit", "explicit_head_dim", "eager", "long_sequence", "placed"),
    ("model",),
)  # fmt: skip
SEQ, PAIRS = 64, 16
PARTS = {"batch": 1, "heads": 1, "batch and heads": 1, "no sequence": 1, "sequence twice": 4}


@pytest.fixture
def facts_of(once):
    """`facts_of(law)`: what came of a law."""

    def facts_of(law):
        (run,) = (laws for laws in RUNS if law in laws)
        folder = once(f"jax_shards_{run[0]}", partial(launch, run))
        facts = json.loads((folder / "report.json").read_text())[law]
        assert facts, "a law without a case"
        assert "raised" not in facts, facts["raised"]
        return facts

    return facts_of


def launch(laws, folder):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-W", "error", str(SCRIPT), *laws], capture_output=True,
                          text=True, timeout=900, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "report.json").write_text(done.stdout)


def assert_shared(fact, numbers=None):
    """The bits of one device, the sharding of the arguments, nothing sent, tables made once."""
    assert fact["different"] == 0
    assert fact["is_kept"]
    assert fact["collectives"] == []
    assert fact["largest_constant"] <= 2 * PAIRS, "a table is a constant of the program"
    assert fact["shifts"] == fact["shifts_alone"], "angles are worked out again in the rotation"
    if numbers is not None:
        assert fact["tables"] == [numbers] * 2  # of cos and of sin, on one device


def test_the_reference_equals_complex_numbers(facts_of):
    facts = facts_of("one_device")
    assert len(facts) == 4
    assert max(facts.values()) <= 2e-6


@pytest.mark.parametrize(
    ("law", "count"),
    [("automatic", 15), ("given_positions", 4), ("given_tables", 3), ("lengths", 3),
     ("shard_map", 5)],
)  # fmt: skip
def test_every_shard_has_the_bits_of_one_device_and_sends_nothing(facts_of, law, count):
    facts = facts_of(law)
    for name, fact in facts.items():
        pairs = PAIRS // 2 if name == "slice float32" else PAIRS
        assert_shared(fact, None if law == "given_tables" else SEQ // PARTS.get(name, 2) * pairs)
        assert law != "given_tables" or fact["tables"] == []
    assert len(facts) == count


def test_shard_map_without_positions_counts_from_0_on_every_device(facts_of):
    facts = facts_of("shard_map_without_positions")
    assert facts["different_from_restarted"] == 0
    assert facts["different_from_whole"] > 10_000


def test_a_shared_norm_sends_nothing_but_the_means_of_all_heads(facts_of):
    facts = facts_of("normalized")
    assert facts["a head"]["furthest"] <= 2e-6
    assert facts["a head"]["collectives"] == []
    assert facts["all heads"]["furthest"] <= 5e-6
    assert all("all-reduce" in sent for sent in facts["all heads"]["collectives"])
    assert len(facts["all heads"]["collectives"]) in (1, 2)  # of q and of k, or of both at once


def test_a_sharded_head_is_right_and_sends_half_of_it_unless_pairs_are_neighbours(facts_of):
    facts = facts_of("head_dim")
    assert_shared(facts["interleaved"], SEQ // 2 * PAIRS // 2)
    half = facts["half"]
    assert half["different"] == 0
    assert len([sent for sent in half["collectives"] if "collective-permute" in sent]) == 4


def test_explicit_sharding_gives_the_bits_of_one_device_and_sends_nothing(facts_of):
    facts = facts_of("explicit")
    for fact in facts.values():
        assert_shared(fact)
    assert facts["positions"]["tables"] == [SEQ // 2 * PAIRS] * 2
    assert facts["sequence"]["tables"] == [SEQ * PAIRS] * 2  # no type says who counts


def test_explicit_sharding_refuses_to_part_a_pair(facts_of):
    said = facts_of("explicit_head_dim")
    assert len(said) == 6
    for message in said.values():
        assert message.startswith("head_dim is sharded over mesh axis 'y'")
        assert "jax.reshard" in message


def test_a_donated_array_gives_its_memory_to_the_result(facts_of):
    for fact in facts_of("donated").values():
        assert fact["different"] == 0
        assert fact["is_deleted"]
        assert fact["reused_bytes"] == fact["output_bytes"] > 0


def test_pmap_fractions_and_one_device_of_four(facts_of):
    facts = facts_of("placed")
    assert facts["pmap"] <= 4e-6
    assert facts["fractions"] <= 2e-7
    assert facts["one device"] == [facts["device"]]


def test_no_table_of_one_mesh_is_used_under_another(facts_of):
    for fact in facts_of("eager").values():
        assert fact["furthest"] <= 1e-6
        assert fact["is_kept"]


def test_a_long_sequence_has_no_table_in_its_program_and_its_part_in_memory(facts_of):
    facts = facts_of("long_sequence")
    for name, parts in (("sequence", 2), ("sequence twice", 4)):
        numbers = 131_072 // parts * 32
        assert facts[name]["tables"] == [numbers] * 2
        assert facts[name]["working_bytes"] <= 2 * 4 * numbers + 4096
        assert facts[name]["largest_constant"] <= 32
        assert facts[name]["collectives"] == []


@pytest.mark.parametrize("way", ["automatic", "shard_map"])
def test_a_sharded_llama_equals_one_device_and_its_rotation_sends_nothing(facts_of, way):
    """Attention gathers keys and values, with and without RoPE alike: 2 times in its one layer."""
    facts = facts_of("model")
    rotated, plain = (facts[f"{way}, {name}"] for name in ("rotated", "not rotated"))
    assert rotated["furthest"] <= 2e-6 * facts["largest"]
    assert rotated["collectives"] == plain["collectives"]
    assert len([sent for sent in plain["collectives"] if "all-gather" in sent]) == 2
    # the comparison sees a rotation that is missing, and positions of one device that are one off
    assert plain["furthest"] > 1e-3 * facts["largest"]
    assert rotated["furthest_planted"] > 1e-3 * facts["largest"]
