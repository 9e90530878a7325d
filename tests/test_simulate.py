"""Drawn queries and keys: theorem 1, where it fails, and how often a match is found."""

import math
from collections import defaultdict

import numpy as np
import pytest
from published import scaled

import rotary
from rotary import Rotary
from rotary.analysis.bounds import similarity
from rotary.analysis.simulate import retrieval, theorem_1

DISTANCES = np.array([0, 1, 10, 100, 1000, 5000])
YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
SPECS = {
    "whole head": (Rotary(head_dim=128), None),
    "slice": (Rotary(head_dim=24, rotary_dim=12, start=6, layout="interleaved"), None),
    "an odd channel": (Rotary(head_dim=11, rotary_dim=6), None),
    "backwards": (Rotary(head_dim=16, base=500.0, sign=-1), None),
    "amplitude": (Rotary(head_dim=32, rotary_dim=16, schedule="yarn", params=YARN), None),
    "of a length": (
        scaled("dynamic", 16, 2.0, 64),
        300,
    ),
    "three axes": (Rotary(head_dim=12, axes=(0, 1, 2, 0, 1, 2)), None),
}  # fmt: skip
# how often q + 0.5 eps beats 1000 random keys at head_dim 128: base, distance, share of about 400
# trials, counted elsewhere
COUNTED = [
    (1e2, 10, 0.72), (1e2, 100, 0.00), (500.0, 10, 0.99), (500.0, 100, 0.20),
    (1e4, 100, 0.95), (1e4, 500, 0.54), (1e4, 1700, 0.03),
    (5e5, 500, 0.91), (5e5, 1700, 0.62), (5e5, 4096, 0.82), (5e5, 16_384, 0.10),
    (5e6, 4096, 0.60), (5e6, 16_384, 0.80), (5e6, 65_536, 0.27),
]  # fmt: skip

anywhere = pytest.mark.parametrize(("spec", "seq_len"), SPECS.values(), ids=SPECS)


def b_m(spec, distances, seq_len=None):
    """Sum of cosines, and one half for every channel that stands still."""
    theta = rotary.inv_freq(spec, seq_len)[0]
    still = (spec.head_dim - spec.rotary_dim) / 2
    return np.array([sum(math.cos(m * t) for t in theta) + still for m in distances])


def averaged(spec, seeds=30, samples=1000, **options):
    """Mean over the seeds, and its standard error, from how the seeds differ."""
    found = [theorem_1(spec, DISTANCES, samples=samples, seed=s, **options) for s in range(seeds)]
    return np.mean(found, axis=0), np.std(found, axis=0, ddof=1) / math.sqrt(seeds)


# --- theorem 1 ---


@pytest.mark.parametrize(("mean", "sigma", "noise"), [(0.0, 1.0, 0.5), (1.0, 1.0, 0.5),
                                                      (-0.5, 2.0, 0.0), (3, 0.7, 2)])  # fmt: skip
@anywhere
def test_similar_keys_score_higher_by_the_sum_of_cosines(spec, seq_len, mean, sigma, noise):
    found, error = averaged(spec, mean=mean, sigma=sigma, noise=noise, seq_len=seq_len)
    assert (np.abs(found - b_m(spec, DISTANCES, seq_len)) < 5 * error).all()
    assert (np.abs(found - similarity(spec, DISTANCES, seq_len=seq_len)) < 5 * error).all()
    assert (error < 0.06 * spec.head_dim).all()


def test_the_error_of_one_run_is_what_is_said():
    spec, samples = Rotary(head_dim=128), 20_000
    squares = (np.cos(np.outer(DISTANCES, 1e4 ** (-np.arange(64) / 64))) ** 2).sum(axis=1)
    # variances of q R q, of q R 0.5 eps and of q R k, over 2^2
    error = np.sqrt((4 * squares + (0.25 + 1) * 128) / 4 / samples)
    assert error[0].round(2) == 0.07
    assert error[-1].round(2) == 0.06
    found = theorem_1(spec, DISTANCES)
    assert (np.abs(found - b_m(spec, DISTANCES)) < 5 * error).all()


@pytest.mark.parametrize(("other_mean", "times"), [(0.0, 2), (2.0, 0)])
def test_the_theorem_fails_where_the_means_differ(other_mean, times):
    spec = Rotary(head_dim=128)
    found, error = averaged(spec, mean=1.0, other_mean=other_mean)
    assert (np.abs(found - times * b_m(spec, DISTANCES)) < 5 * error).all()


def test_the_difference_of_means_is_that_of_scores_drawn_one_by_one():
    spec, random = Rotary(head_dim=8, rotary_dim=6, start=1), np.random.default_rng(0)
    q = 0.3 + 1.5 * random.standard_normal((40_000, 8))
    similar = q + 0.8 * random.standard_normal(q.shape)
    other = -0.4 + 1.5 * random.standard_normal(q.shape)
    at_q, at_k = np.full(len(q), 17), np.full(len(q), 5)
    q = rotary.apply(spec, q, positions=at_q)
    differences = (q * rotary.apply(spec, similar - other, positions=at_k)).sum(axis=-1) / 4.5
    error = differences.std() / math.sqrt(len(q))
    found = [
        theorem_1(spec, [12], mean=0.3, sigma=1.5, noise=0.8, other_mean=-0.4, seed=s)[0]
        for s in range(8)
    ]
    assert abs(np.mean(found) - differences.mean()) < 5 * error * math.sqrt(1 + 1 / 4)


def test_only_the_axes_that_move_turn():
    spec = Rotary(head_dim=12, axes=(0, 1, 2, 0, 1, 2))
    found, error = averaged(spec, axes=(1,))
    turning = [1e4 ** (-1 / 6), 1e4 ** (-4 / 6)]
    wanted = [4 + sum(math.cos(m * t) for t in turning) for m in DISTANCES]
    assert (np.abs(found - wanted) < 5 * error).all()


# --- retrieval ---


def test_retrieval_has_the_shares_that_were_counted():
    by_base = defaultdict(list)
    for base, distance, share in COUNTED:
        by_base[base].append((distance, share))
    for base, rows in by_base.items():
        distances, shares = np.array(rows).T
        found = retrieval(Rotary(head_dim=128, base=base), distances.astype(int), trials=40_000)
        error = np.sqrt(found * (1 - found) / 400)
        # 0.01: the shares are printed with two digits
        assert (np.abs(found - shares) < 4 * error + 0.01).all(), (base, found, shares)


def rotated(x, angles):
    """Pairs (2i, 2i + 1) of the first channels turned, the others kept."""
    y, n = x.copy(), 2 * angles.shape[-1]
    first, second = x[..., :n:2], x[..., 1:n:2]
    y[..., :n:2] = np.cos(angles) * first - np.sin(angles) * second
    y[..., 1:n:2] = np.sin(angles) * first + np.cos(angles) * second
    return y


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "factor", "noise", "rivals"),
    [(32, 32, 1.0, 0.5, 100), (32, 16, 1.3, 0.5, 60), (17, 8, 0.6, 1.5, 40), (8, 8, 1.0, 0.0, 1)],
)
def test_retrieval_is_what_keys_drawn_one_by_one_give(head_dim, rotary_dim, factor, noise, rivals):
    theta = 100.0 ** (-2 * np.arange(rotary_dim // 2) / rotary_dim)
    spec = Rotary(head_dim=head_dim, rotary_dim=rotary_dim, schedule="custom",
                  params={"inv_freq": theta, "attention_factor": factor})  # fmt: skip
    random, trials, distances = np.random.default_rng(1), 4000, [0, 4, 25]
    weight = np.ones(head_dim)
    weight[:rotary_dim] = factor**2
    q = random.standard_normal((trials, head_dim))
    keys = random.standard_normal((trials, rivals, head_dim))
    where = random.integers(0, 50, (trials, rivals, 1))  # rivals anywhere, not all at one distance
    best = np.einsum("td,trd->tr", q * weight, rotated(keys, where * theta)).max(axis=1)
    similar = q + noise * random.standard_normal(q.shape)
    found = retrieval(spec, distances, noise=noise, rivals=rivals, trials=40_000)
    for distance, share in zip(distances, found, strict=True):
        scores = (q * weight * rotated(similar, -distance * theta)).sum(axis=-1)
        counted = (scores > best).mean()
        error = math.sqrt(max(counted * (1 - counted), 1e-3) / trials)
        assert abs(share - counted) < 5 * error * math.sqrt(1.1), distance


def test_more_rivals_and_more_noise_make_a_match_harder():
    spec = Rotary(head_dim=64)
    by_rivals = [retrieval(spec, [100], rivals=n)[0] for n in (1, 100, 10_000, 2**24)]
    by_noise = [retrieval(spec, [100], noise=n)[0] for n in (0.0, 2.0, 100.0)]
    assert by_rivals == sorted(by_rivals, reverse=True)
    assert by_rivals[0] > 0.99
    assert 0 < by_rivals[-1] < 0.2
    assert by_noise == sorted(by_noise, reverse=True)


def test_where_nothing_turns_distance_does_not_matter():
    spec = Rotary(head_dim=16, axes=(0, 1) * 4)
    found = retrieval(spec, [0, 10, 1000, 2**24], axes=())
    assert len(set(found.tolist())) == 1
    assert retrieval(spec, [1000])[0] < found[0]


# --- both ---


@pytest.mark.parametrize("simulate", [theorem_1, retrieval])
def test_a_seed_repeats_and_another_does_not(simulate):
    spec, distances = Rotary(head_dim=32, rotary_dim=24), range(0, 3000, 2)
    first = simulate(spec, distances)
    assert first.shape == (1500,)
    np.testing.assert_array_equal(simulate(spec, distances, seed=0), first)
    assert (simulate(spec, distances, seed=1) != first).any()
    alone = [simulate(spec, [m])[0] for m in distances[::500]]
    np.testing.assert_allclose(first[::500], alone, atol=1e-12)
    assert simulate(spec, np.arange(0)).shape == (0,)


SPEC = Rotary(head_dim=4)
REFUSED = [
    (lambda: theorem_1(SPEC, [0.5]), "distances must be a list of whole numbers"),
    (lambda: retrieval(SPEC, [10**15]), "distances must be in -16,777,216 .. "),
    (lambda: retrieval(SPEC, 3), "distances must be a list of whole numbers"),
    (lambda: retrieval(SPEC, [3], axes=(4,)), "axes must be in 0 .. 0"),
    (lambda: theorem_1(SPEC, [1], mean=math.nan), "mean must be finite"),
    (lambda: theorem_1(SPEC, [1], other_mean="0"), "other_mean must be a number"),
    (lambda: theorem_1(SPEC, [1], sigma=0), "sigma must be > 0"),
    (lambda: theorem_1(SPEC, [1], noise=-1.0), "noise must be >= 0, got -1.0"),
    (lambda: retrieval(SPEC, [1], noise=math.inf), "noise must be finite"),
    (lambda: theorem_1(SPEC, [1], samples=0), "samples must be in 1 .. 262,144, got 0"),
    (lambda: retrieval(SPEC, [1], rivals=1.5), "rivals must be a whole number, got 1.5"),
    (lambda: retrieval(SPEC, [1], trials=10**9), "trials must be in 1 .. 262,144"),
    (lambda: retrieval(Rotary(head_dim=4096), [1], trials=10**5), "trials must be in 1 .. 65,536"),
    (lambda: retrieval(SPEC, range(2**20)), r"more than 2\^30; ask for fewer"),
    (lambda: retrieval(SPEC, [1], seed=-1), "seed must be in 0 .. "),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_nonsense_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
