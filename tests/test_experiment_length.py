"""Length extrapolation: every method is its definition, and the same bytes are asked for."""

import math

import numpy as np
import pytest
import torch
from experiments.e3_length import methods
from experiments.e3_length import run as length
from experiments.lab import data, results
from experiments.lab.model import Config, build
from experiments.lab.sweep import best_rate, chosen, validation
from programs import assert_printed

import rotary

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINED = 16
SPEC = rotary.Rotary(head_dim=8, base=10_000.0)
LADDER = 10_000.0 ** (-np.arange(4) / 4)


def attended(name, target):
    """The attention of a method on random q, k, v of `target` tokens, head_dim 8."""
    q, k, v = torch.randn(3, 1, 1, target, 8, generator=torch.Generator().manual_seed(0)).unbind()
    attend = methods.attention_of(methods.METHODS[name], SPEC, TRAINED, target)
    return attend(q, k, v, None, True)


def by_definition(target, angle_of, scale_of=lambda m: 1.0):
    """Softmax over complex scores q k* e^(i angle), angle_of(m, n) an array of one per pair."""
    q, k, v = torch.randn(3, 1, 1, target, 8, generator=torch.Generator().manual_seed(0)).unbind()
    q, k, v = (part[0, 0].double().numpy() for part in (q, k, v))
    q, k = (part[:, :4] + 1j * part[:, 4:] for part in (q, k))
    found = np.zeros_like(v)
    for m in range(target):
        scores = [
            scale_of(m) * (q[m] * k[n].conj() * np.exp(1j * angle_of(m, n))).real.sum() / 8**0.5
            for n in range(m + 1)
        ]
        weights = np.exp(scores)
        found[m] = weights @ v[: m + 1] / weights.sum()
    return torch.from_numpy(found)[None, None].float()


NTK = LADDER * 4.0 ** (-np.arange(4) / 3)  # the slowest pair divided by 4, the fastest kept
FIXED = LADDER * 4.0 ** (-np.arange(1, 5) / 4)
MIXED = LADDER * np.exp(-math.log(4) * (np.arange(1, 5) / 4) ** 0.625)
DYNAMIC = LADDER * (2 * 4 - 1) ** (-np.arange(4) / 3)


def log_n(m):
    return max(1.0, math.log(m + 1) / math.log(TRAINED))


DEFINITIONS = {
    "direct": (lambda m, n: (m - n) * LADDER,),
    "PI": (lambda m, n: (m - n) / 4 * LADDER,),
    "NTK": (lambda m, n: (m - n) * NTK,),
    "NTK-fixed": (lambda m, n: (m - n) * FIXED,),
    "NTK-mixed": (lambda m, n: (m - n) * MIXED,),
    "dynamic NTK": (lambda m, n: (m - n) * DYNAMIC,),
    "ReRoPE, window 1/2": (lambda m, n: min(m - n, 8) * LADDER,),
    "ReRoPE, window 1/4": (lambda m, n: min(m - n, 4) * LADDER,),
    "self-extend, window 1/2": (
        lambda m, n: (m - n if m - n < 8 else m // 8 - n // 8 + 8 - 8 // 8) * LADDER,
    ),
    "direct, log n": (lambda m, n: (m - n) * LADDER, log_n),
    "NTK-mixed, log n": (lambda m, n: (m - n) * MIXED, log_n),
    "ReRoPE, window 1/2, log n": (lambda m, n: min(m - n, 8) * LADDER, log_n),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_method_at_four_times_the_length_is_its_definition(name):
    torch.testing.assert_close(
        attended(name, 4 * TRAINED), by_definition(4 * TRAINED, *DEFINITIONS[name]),
        atol=2e-5, rtol=1e-4,
    )  # fmt: skip


def test_yarn_is_by_parts_with_larger_scores():
    parts, yarn = (
        rotary.inv_freq(methods.stretched(methods.METHODS[name], SPEC, TRAINED, 4 * TRAINED))
        for name in ("NTK-by-parts", "YaRN")
    )
    np.testing.assert_array_equal(parts[0], yarn[0])
    assert parts[1] == 1.0
    assert yarn[1] == pytest.approx(0.1 * math.log(4) + 1)
    assert parts[0][0] == LADDER[0]
    np.testing.assert_allclose(parts[0][-1], LADDER[-1] / 4)


@pytest.mark.parametrize("name", methods.METHODS)
def test_nothing_changes_at_the_trained_length_but_by_a_window(name):
    apart = (attended(name, TRAINED) - attended("direct", TRAINED)).abs().max()
    assert (apart > 1e-3) == name.startswith("ReRoPE"), f"{name}: {apart}"


@pytest.mark.parametrize("multiple", [2, 4, 8])
@pytest.mark.parametrize("share", [2, 4])
@pytest.mark.parametrize("trained", [64, 128, 256])
def test_self_extend_shows_no_distance_that_was_not_trained(trained, share, multiple):
    target, window = multiple * trained, trained // share
    found = methods.smallest_groups(window, trained, target)
    m = torch.arange(target)
    assert found(m[:, None], m).max() < trained
    smaller = rotary.attention.self_extend(window, found.group - 1)
    assert smaller(m[:, None], m).max() >= trained


def test_a_model_reads_directly_as_it_was_trained():
    model = build(Config(length=16, layers=2, width=32), seed=0)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        for block in model.blocks:
            block.qkv.weight *= 20  # or every score is about 0
        before = model(tokens)
        stretched = methods.read_by(model, "PI", 8, 16)(tokens)
        after = methods.read_by(model, "direct", 8, 16)(tokens)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    assert (stretched - before).abs().max() > 1e-2


def test_rows_are_read_causally_or_not_at_all():
    attend = methods.attention_of(methods.METHODS["PI"], SPEC, TRAINED, TRAINED)
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="got causal=False"):
        attend(q, q, q, None, False)


def test_the_same_bytes_are_asked_for_at_every_length():
    pieces = data.spread_windows(torch.arange(200), 65, 3)
    for size in (8, 16, 64):
        tokens, targets = length.ending(pieces, size, 8)
        assert tokens.shape == targets.shape == (3, size)
        assert torch.equal(targets[:, -8:], pieces[:, -8:])
        assert torch.equal(tokens[:, -8:], pieces[:, -9:-1])
        assert (targets[:, :-8] == data.IGNORED).all()


def test_a_line_is_a_method_and_a_difference_is_taken_seed_by_seed():
    direct, other = [{0: 2.0, 1: 4.0}, {0: 3.0, 1: 6.0}], [{0: 2.0, 1: 4.0}, {0: 3.5, 1: 6.6}]
    bits = {"direct": direct, "PI": other}
    assert length.levels(bits, ["1", "2"]).splitlines()[-1] == (
        "| PI | 3.000 ± 1.414 | 5.050 ± 2.192 |"
    )
    found = length.differences(bits, [("PI", "direct")], ["1", "2"], skipped=1)
    assert found.splitlines()[0] == "| difference | 2 |"
    assert found.splitlines()[-1] == "| PI minus direct | +0.550 [-0.085, +1.185], not resolved |"


@pytest.mark.slow
@pytest.mark.usefixtures("light_alone")
def test_one_model_is_read_in_every_way(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", "--quick", "--seeds", "1", "--out", str(tmp_path)])
    length.main()
    assert_printed(capsys.readouterr().out)
    rows = results.rows(tmp_path / "results.jsonl")
    before = (tmp_path / "results.jsonl").read_bytes()
    monkeypatch.setattr(results, "report", lambda *_: None)  # it would draw the same again
    length.main()
    assert (tmp_path / "results.jsonl").read_bytes() == before, "what is done is not done again"
    tuned = [f"tuned {name}" for name in length.TUNED]
    for name in (length.TRAINED, *tuned):
        assert list(chosen(rows, name)) == [0]
        assert len(validation(rows, name)) >= 3
    untuned = [row["run"]["recipe"] for row in rows if row["run"]["method"] == "untuned"]
    assert [recipe["seed"] for recipe in untuned] == [0]
    assert {recipe["learning_rate"] for recipe in untuned} == {best_rate(rows, length.TRAINED)}
    for row in rows:
        if row["run"]["method"] == "untuned":
            assert set(row["bits"]) == set(methods.METHODS)
            assert row["bits"]["PI"][0] == row["bits"]["direct"][0]
            assert row["bits"]["PI"][3] != row["bits"]["direct"][3]
        elif row["run"]["method"] != "trained":
            assert [look["step"] for look in row["looks"]] == [2, 4]
            assert row["run"]["trained"] == untuned[row["run"]["recipe"]["seed"]]
    assert not list(tmp_path.glob("checkpoints/*"))
