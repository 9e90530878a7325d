"""Tuning to longer rows: the same weights at another base, each tuned from the trained ones."""

import json

import pytest
import torch
from experiments.e8_tuning import run as tuning
from experiments.lab import results
from experiments.lab.model import Config, build
from experiments.lab.sweep import best_rate, chosen
from programs import assert_printed

import rotary
from rotary.analysis.bounds import first_failure

pytestmark = pytest.mark.usefixtures("one_thread")


def test_another_base_changes_the_rotation_and_no_weight():
    model = build(Config(layers=1, width=32, heads=1, base=1000.0), seed=0)
    with torch.no_grad():
        model.blocks[0].qkv.weight.mul_(20)
        other = tuning.with_base(model, 100.0, seed=0)
        tokens = torch.arange(40)[None]
        for (name, weight), (same, its) in zip(
            model.named_parameters(), other.named_parameters(), strict=True
        ):
            assert name == same
            assert torch.equal(weight, its)
        assert other.config.spec == rotary.Rotary(head_dim=32, base=100.0)
        assert (model(tokens) - other(tokens)).abs().max() > 1e-3
        assert torch.equal(tuning.with_base(model, 1000.0, seed=0)(tokens), model(tokens))


def test_the_bases_fail_within_the_contexts_and_beyond_them():
    """So that the bound has something to say about every context."""
    spec = tuning.MODEL.spec
    failures = [
        first_failure(rotary.Rotary(head_dim=spec.head_dim, base=float(base)))
        for base in tuning.BASES
    ]
    assert failures == [46, 197, 725]
    assert tuning.FULL.length == 64
    assert [int(name.split()[0]) for name in tuning.methods(tuning.FULL)[:: len(failures)]] == [
        128, 256, 512,
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("light_alone")
def test_every_context_and_base_is_tuned_from_the_trained_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", "--quick", "--out", str(tmp_path)])
    tuning.main()
    assert_printed(capsys.readouterr().out)
    rows = results.rows(tmp_path / "results.jsonl")
    before = (tmp_path / "results.jsonl").read_bytes()
    monkeypatch.setattr(results, "report", lambda *_: None)  # it would draw the same again
    tuning.main()
    assert (tmp_path / "results.jsonl").read_bytes() == before, "what is done is not done again"
    start = best_rate(rows, tuning.TRAINED)
    for method in tuning.methods(tuning.QUICK):
        ((seed, row),) = chosen(rows, method).items()
        assert seed == 0
        assert row["run"]["trained"]["learning_rate"] == start
        assert row["run"]["recipe"]["rows"] * int(method.split()[0]) == tuning.QUICK.tokens
    (untuned,) = [row for row in rows if row["run"]["method"] == tuning.UNTUNED]
    assert set(untuned["found"]) == {"32 1000", *tuning.methods(tuning.QUICK)}
    assert untuned["found"]["256 100"] != untuned["found"]["256 1000"]
    assert json.loads(json.dumps(untuned)) == untuned
    assert not list(tmp_path.glob("checkpoints/*"))
