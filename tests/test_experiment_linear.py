"""Linear attention with RoPE as it is trained: its three forms, what is counted, what diverges."""

import json

import numpy as np
import pytest
import torch
from experiments.e2_linear import run as linear
from experiments.lab import data
from experiments.lab.job import Job
from experiments.lab.model import (
    ATTENTIONS,
    Config,
    build,
    linear_attention,
    linear_both,
    linear_normed,
    linear_weights,
)
from experiments.lab.sweep import Run, best_rate
from experiments.lab.train import processes

import rotary
from rotary import attention

SPEC = rotary.Rotary(head_dim=8, base=100.0)


def turn(q, k):
    return rotary.apply(SPEC, q, k)


def keep(q, k):
    return q, k


def qkv(*shape):
    chance = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=chance) for _ in range(3)]


def products(q, k):
    """What equation 19 sums, by complex numbers in float64: rotated and not, (..., seq, seq)."""
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    half, seq = q.shape[-1] // 2, q.shape[-2]
    q, k = (x[..., :half] + 1j * x[..., half:] for x in (q, k))
    turns = np.exp(1j * np.arange(seq)[:, None] * 100.0 ** (-np.arange(half) / half))
    seen = np.tri(seq)
    rotated = np.einsum("...mc,...nc->...mn", q * turns, np.conj(k * turns)).real
    kept = np.einsum("...mc,...nc->...mn", q, np.conj(k)).real
    return rotated * seen, kept * seen


@pytest.mark.parametrize(
    "form",
    [
        attention.linear_attention,
        attention.recurrent_linear_attention,
        lambda *given: attention.chunked_linear_attention(*given, chunk_size=5)[0],
    ],
    ids=["quadratic", "recurrent", "chunked"],
)
@pytest.mark.parametrize("spec", [SPEC, None], ids=["rotated", "not rotated"])
def test_the_trained_attention_is_every_form_of_the_package(form, spec):
    q, k, v = qkv(2, 3, 17, 8)
    ours = linear_attention(q, k, v, turn if spec else keep, causal=True)
    torch.testing.assert_close(ours, form(q, k, v, spec), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [SPEC, None], ids=["rotated", "not rotated"])
def test_the_performer_has_the_features_of_the_package(spec):
    q, k, v = qkv(2, 3, 17, 8)
    features = attention.favor_features(8, 8, seed=0)
    ours = ATTENTIONS["linear favor"](q, k, v, turn if spec else keep, causal=True)
    wanted = attention.recurrent_linear_attention(
        q.double(), k.double(), v.double(), spec, q_features=features, k_features=features
    )
    torch.testing.assert_close(ours, wanted.float(), rtol=1e-4, atol=1e-5)
    plain = linear_attention(q, k, v, turn if spec else keep, causal=True)
    assert (ours - plain).abs().max() > 0.1


def test_every_attention_is_its_definition_in_complex_numbers():
    q, k, v = qkv(2, 3, 17, 8)
    rotated, kept = products(q.double().numpy(), k.double().numpy())
    total = rotated @ v.double().numpy()
    wanted = {
        linear_attention: total / kept.sum(-1, keepdims=True),
        linear_both: total / rotated.sum(-1, keepdims=True),
        linear_normed: total / np.sqrt((total**2).mean(-1, keepdims=True)),
    }
    for attend, output in wanted.items():
        found = attend(q, k, v, turn, causal=True)
        np.testing.assert_allclose(found, output, rtol=2e-4, atol=2e-5, err_msg=attend.__name__)


def test_a_token_without_a_mask_sees_them_all():
    q, k, v = qkv(1, 1, 9, 8)
    back = [x.flip(-2) for x in (q, k, v)]
    for attend in (linear_attention, linear_both, linear_normed):
        whole = attend(q, k, v, keep, causal=False)
        torch.testing.assert_close(attend(*back, keep, causal=False), whole.flip(-2))
        last = attend(q, k, v, turn, causal=True)[..., -1, :]
        torch.testing.assert_close(attend(q, k, v, turn, causal=False)[..., -1, :], last)


def test_weights_sum_to_one_only_where_the_denominator_is_rotated_too():
    q, k, v = qkv(2, 3, 40, 8)
    ones = torch.ones_like(v)
    sums = linear_both(q, k, ones, turn, causal=True)
    torch.testing.assert_close(sums, ones, rtol=1e-4, atol=1e-4)
    sums = linear_attention(q, k, ones, turn, causal=True)
    assert (sums - 1).abs().max() > 0.3


def test_equal_tokens_have_the_sums_of_a_cosine():
    """All features 1 and one pair: the product of tokens j apart is 2 cos j, not rotated 2."""
    seq = 50
    x = torch.zeros(1, 1, seq, 2)
    spec = rotary.Rotary(head_dim=2)
    found = linear.sizes(*linear_weights(x, x, lambda q, k: rotary.apply(spec, q, k), True))
    apart = np.arange(seq)
    means = np.cumsum(np.cos(apart)) / (apart + 1)
    below = ((np.cos(apart) < 0) * (seq - apart)).sum()
    assert found["negative"] == pytest.approx(below / (seq * (seq + 1) / 2))
    assert found["least"] == pytest.approx(means.min(), abs=1e-6)
    assert found["greatest"] == 1.0
    assert found["nearest"] == pytest.approx(np.abs(means).min(), abs=1e-6)


@pytest.mark.parametrize("name", ["linear", "linear both", "linear normed"])
def test_what_is_counted_in_a_model_is_what_its_first_layer_multiplies(name):
    config = Config(layers=2, width=16, heads=2, base=100.0, attention=name)
    model = build(config, seed=0)
    for weight in model.blocks[0].qkv.parameters():
        weight.data *= 50  # so that products differ and some are below zero
    tokens = torch.arange(24).view(2, 12)
    before = model(tokens)
    found = linear.weighed(model, tokens)
    block = model.blocks[0]
    with torch.no_grad():
        inner = block.norms[0](model.tokens(tokens) * 4.0)
        q, k, _ = (block.qkv(inner).view(2, 12, 3, 2, 8)).permute(2, 0, 3, 1, 4).double().numpy()
    rotated, kept = products(q, k)
    ratio = rotated.sum(-1) / kept.sum(-1)
    assert {len(values) for values in found.values()} == {2}
    assert 0 < found["negative"][0] == pytest.approx((rotated < 0).sum() / (4 * 78))
    assert found["least"][0] == pytest.approx(ratio.min(), abs=1e-5)
    assert found["greatest"][0] == pytest.approx(ratio.max(), abs=1e-5)
    assert found["nearest"][0] == pytest.approx(np.abs(ratio).min(), abs=1e-5)
    assert all(block.attention is ATTENTIONS[name] for block in model.blocks)
    assert torch.equal(model(tokens), before), "the model is left as it was"


@pytest.mark.parametrize("encoding", ["none", "sinusoidal"])
def test_without_rotation_no_product_is_negative_and_every_sum_is_one(encoding):
    model = build(Config(layers=1, width=16, heads=2, encoding=encoding, attention="linear"), 0)
    found = linear.weighed(model, torch.arange(40)[None])
    assert found["negative"] == [0.0]
    for name in ("least", "greatest", "nearest"):
        assert found[name] == [1.0]


def test_a_run_that_diverges_is_a_result_and_not_the_end(tmp_path):
    """At a learning rate of 1e30 the first step makes weights whose squares are infinite."""
    plan = linear.Plan(Config(layers=1, width=16, heads=2), 5, 2, 8, 2, 1, (1e30, 1e-3))
    text, rows = data.text("python"), []
    with processes() as these:
        for method in linear.METHODS:
            for rate in plan.rates if method == "rope" else plan.rates[:1]:
                run = Run(method, rate, 0)
                settings = linear.settings_of(plan, text, run)
                rows.append(linear.trained(plan, text, Job(settings, tmp_path, these)))
    ended = [row for row in rows if "diverged" not in row]
    assert [row["run"]["recipe"]["learning_rate"] for row in ended] == [1e-3]
    assert set(ended[0]["weights"]) == {"negative", "least", "greatest", "nearest"}
    for row in rows:
        if "diverged" in row:
            assert (row["diverged"], row["looks"]) == (1, [])
            assert "weights" not in row
    assert best_rate(rows, "rope") == 1e-3
    written = (tmp_path / "results.jsonl").read_text()
    assert [json.loads(line, parse_constant=pytest.fail)["run"] for line in written.splitlines()]
    assert not list(tmp_path.glob("checkpoints/*"))


def told(method, rate, seed, bits=None):
    """A row as `trained` makes it: of a run that ended at these bits, or that diverged."""
    recipe = {"learning_rate": rate, "seed": seed}
    run = {"method": method, "recipe": recipe, "model": {"layers": 2}}
    if bits is None:
        return {"run": run, "looks": [], "diverged": 7}
    sizes = {"negative": [0.1, 0.3], "least": [-0.2, 0.1], "greatest": [1.0, 1.0]}
    weights = {**sizes, "nearest": [0.01, 0.1]}
    return {"run": run, "looks": [{"step": 9, "bits": bits}], "worst": 3.0, "weights": weights}


def test_a_method_that_diverged_has_no_bits_in_the_table():
    rows = []
    for index, method in enumerate(linear.METHODS):
        for rate, seed in ((1e-3, 0), (3e-3, 0), (1e-3, 1), (1e-3, 2)):
            is_lost = method == "rope both" and seed == 2
            is_lost |= method == "sinusoidal" and rate == 3e-3
            bits = None if is_lost else 2.0 + index + seed * (1 + index) + (rate == 3e-3)
            rows.append(told(method, rate, seed, bits))
    shown = linear.table(rows)
    assert (
        "| sinusoidal, added | 0.001 | 5.000 ± 2.000 | 1 of 4, step [7] | 3.00 | 20.0 % "
        "| -0.20 to 1.00 | 1.0e-02 |"
    ) in shown
    assert "| RoPE, denominator rotated too | 0.001 | diverged | 1 of 4, step [7] |" in shown
    assert (
        "| sinusoidal, added minus no positions | +2.000 [-0.484, +4.484], not resolved |" in shown
    )
    apart = "RoPE, denominator rotated too minus RoPE, denominator not rotated"
    assert f"| {apart} | diverged |" in shown
    assert len(linear.figure(rows).axes[0].lines) == 3 * len(linear.METHODS)
