"""E4, the base against retrieval: what is asked, what is seen of it, and the quick run."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from experiments.e4_base import recall
from experiments.e4_base import run as base
from experiments.lab import data, results
from experiments.lab.job import carry_out
from experiments.lab.model import build

from rotary.analysis.bounds import similarity

CONTENT = (torch.arange(2000) % 251).to(torch.uint8)


def test_a_query_asks_for_the_value_of_a_mark_before_it():
    made = recall.recall(CONTENT, 60, 8, 20, 30, np.random.default_rng(0))
    for tokens, targets, distances, before in zip(*made.batch, *made[1:], strict=True):
        where, queries = {}, 0
        for place, (token, target) in enumerate(
            zip(tokens.tolist(), targets.tolist(), strict=True)
        ):
            if recall.FIRST_MARK <= token < recall.FIRST_QUERY:
                key, value = divmod(token - recall.FIRST_MARK, recall.VALUES)
                assert key not in where, "a row has one mark of a key"
                assert value not in {of_other for _, of_other in where.values()}
                where[key] = place, value
                assert target == data.IGNORED
            elif token >= recall.FIRST_QUERY:
                mark, value = where[token - recall.FIRST_QUERY]
                assert token < recall.FIRST_VALUE
                assert target == recall.FIRST_VALUE + value
                assert distances[place] == place - mark > 0
                assert before[place] == len(where)
                queries += 1
            else:
                assert target == (token + 1) % 251, "the next byte, wherever it stands"
                assert distances[place] == before[place] == 0
        assert (len(where), queries) == (8, 20)
        text = tokens[tokens < recall.FIRST_MARK]
        assert (text.diff() % 251 == 1).all()


def test_every_key_and_value_and_every_mark_before_it_is_asked_for_alike():
    """Counts of 40,000 queries, within five standard errors."""
    made = recall.recall(CONTENT, 40, 4, 20, 2000, np.random.default_rng(1))
    asked = made.distances > 0
    values = torch.bincount(made.batch.targets[asked] - recall.FIRST_VALUE, minlength=8)
    keys = torch.bincount(made.batch.tokens[asked] - recall.FIRST_QUERY, minlength=32)
    # 8000 marks are drawn independently, and asked for unequally often: errors 1.5 times as large
    assert (values / 40_000 - 1 / 8).abs().max() < 5 * 1.5 * math.sqrt(1 / 8 / 8000)
    assert (keys / 40_000 - 1 / 32).abs().max() < 5 * 1.5 * math.sqrt(1 / 32 / 8000)
    is_mark = (made.batch.tokens >= recall.FIRST_MARK) & (made.batch.tokens < recall.FIRST_QUERY)
    before = is_mark.cumsum(1)
    for seen in (2, 3, 4):
        here = made.marks_before == seen
        row, place = here.nonzero().unbind(1)
        which = before[row, place - made.distances[row, place]]
        shares = torch.bincount(which, minlength=seen + 1)[1:] / len(which)
        assert (shares - 1 / seen).abs().max() < 5 * math.sqrt(0.25 / len(which))


def test_the_rows_of_a_step_follow_from_seed_and_step_and_the_held_out_ones_from_nothing():
    text = data.text("python")
    sizes = (64, 4, 24, 8)
    first = recall.training(text, *sizes, seed=1, step=7).batch.tokens
    recall.training(text, *sizes, seed=1, step=8)
    assert torch.equal(recall.training(text, *sizes, seed=1, step=7).batch.tokens, first)
    for seed, step in ((2, 7), (1, 8)):
        assert not torch.equal(recall.training(text, *sizes, seed, step).batch.tokens, first)
    rows = [recall.fixed(text.held_out, *sizes).batch.tokens for _ in range(2)]
    assert torch.equal(*rows)
    held_out = bytes(text.held_out.numpy())
    for row in rows[0]:
        assert bytes(row[row < recall.FIRST_MARK].byte().numpy()) in held_out


def test_what_does_not_fit_is_refused():
    chance = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"marks must be in 1 \.\. 8, one for each value"):
        recall.recall(CONTENT, 60, 9, 8, 1, chance)
    with pytest.raises(ValueError, match="4 marks and 6 queries leave no text in 10 tokens"):
        recall.recall(CONTENT, 10, 4, 6, 1, chance)


def test_a_mark_starts_like_its_query_and_its_value_and_like_no_other():
    model = build(base.Config(layers=1, width=128, heads=2, vocabulary=recall.VOCABULARY), seed=0)
    with torch.no_grad():
        recall.make_similar(model.tokens.weight)
        rows = model.tokens.weight / model.tokens.weight.norm(dim=1, keepdim=True)
        marks = rows[recall.FIRST_MARK : recall.FIRST_QUERY].unflatten(0, (32, 8))
        alike = torch.einsum("kvw,qw->kvq", marks, rows[recall.FIRST_QUERY :])
    for key, value in itertools.product(range(32), range(8)):
        of_others = alike[key, value].clone()
        of_others[[key, 32 + value]] = 0
        assert alike[key, value, key] == pytest.approx(0.5**0.5, abs=0.15)
        assert alike[key, value, 32 + value] == pytest.approx(0.5**0.5, abs=0.15)
        assert of_others.abs().max() < 0.45


def test_recall_is_the_share_of_right_values_of_each_distance():
    """A model that knows the text and the values up to some distance, and nothing farther away."""
    made = recall.recall(CONTENT, 256, 8, 64, 40, np.random.default_rng(3))
    targets = made.batch.targets

    class Oracle(torch.nn.Module):
        config = base.MODEL  # base 10 000: no distance of 256 has B_m < 0

        def __init__(self, knows):
            super().__init__()
            self.head = torch.nn.Linear(1, 1)
            self.knows = knows

        def forward(self, tokens):
            knows = (made.distances < self.knows) & (targets != data.IGNORED)
            sure = torch.nn.functional.one_hot(targets.clamp(0), recall.VOCABULARY) * 50.0
            return torch.where(knows[..., None], sure, 0.0)

    found = base.seen(Oracle(16), made)
    assert found["text"] < 1e-6
    assert [found[f"recall {low}"] for low in base.BINS[:-2]] == [1, 1, 1, 0, 0, 0, 0]
    known = made.distances[made.distances > 0] < 16
    assert found["value"] == pytest.approx(
        (~known).double().mean().item() * math.log2(recall.VOCABULARY)
    )
    judged = made.marks_before >= 4
    share = (made.distances[judged] < 16).double().mean().item()
    assert found["recall"] == found["before"] == pytest.approx(share)
    assert share < known.double().mean() - 0.01, "the first queries are near, and left out"
    assert "beyond" not in found
    assert 1 / 8 < found["guess"] < 1 / 5

    short = Oracle(5)
    short.config = base.MODEL.__class__(**{**base.MODEL.__dict__, "base": 10.0})
    assert (similarity(short.config.spec, range(1, 6)) < 0).tolist() == [False] * 4 + [True]
    found = base.seen(short, made)
    assert (found["before"], found["beyond"]) == (1.0, 0.0)


def test_rank_correlation_is_that_of_ranks():
    x = [2.61, 2.60, 2.55, 2.57, 2.58]
    assert base.rank_correlation(x, [0.2, 0.4, 0.9, 0.8, 0.7]) == -1.0
    assert base.rank_correlation(x, [0.2, 0.4, 0.7, 0.8, 0.9]) == pytest.approx(-0.6)
    assert base.rank_correlation([1, 1, 2], [3, 3, 9]) == 1.0
    assert math.isnan(base.rank_correlation(x, [1.0] * 5))


def test_without_training_a_match_is_lost_where_similarity_ends():
    """Before the first failure of a base a match is found far oftener than at its failures."""
    for name in base.BASES[:3]:
        spec = base.Config(base=float(name), width=128, heads=2).spec
        reach = base.first_failure(spec)
        near, far = (base.untrained(spec, m, m + 1, 7) for m in (max(reach // 8, 1), reach))
        assert near > far + 0.3, f"base {name}: {near} at {reach // 8}, {far} at {reach}"
        assert far < 0.25


def test_every_base_is_asked_the_same_and_learns_the_text(tmp_path, monkeypatch, one_thread):
    """The first and the last one; tests/test_experiments.py trains and draws all of them."""
    monkeypatch.setattr(results, "report", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["run", "--quick", "--out", str(tmp_path)])
    carry_out(base.SWEEP._replace(methods=base.BASES[::3]))
    rows = results.rows(tmp_path / "results.jsonl")
    for row in rows:
        model, end = row["run"]["model"], row["looks"][-1]
        assert model["base"] == float(row["run"]["method"])
        if row["run"]["recipe"]["learning_rate"] == base.QUICK.rates[0]:
            assert end["text"] < row["looks"][0]["text"] - 0.1, "it learns the text"
        names = {"recall", *(f"recall {low}" for low in (1, 4, 8, 16, 32))}
        assert names <= {name for name, share in end.items() if 0 <= share <= 1}
