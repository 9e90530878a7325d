"""Moved keys against many-digit arithmetic and keys rotated at the new place; drift; errors."""

import math
import re

import kernel_cases
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import if_installed
from published import scaled

import rotary
from rotary import Rotary, rerotate
from rotary.angles import moved_cos_sin
from rotary.kernels import numpy as reference

jax = if_installed("jax")
jnp = if_installed("jax.numpy")
torch = if_installed("torch")

ONE = 3.25 * 2.0**-24  # of the length of a pair: what one rotation in float32 rounds
TABLE = 2.0**-25 + 2.0**-28
STEP = math.tau * 2.0**-65  # turns are rounded once, per token
TRACED = 3e-7  # two tables of float32, multiplied

YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
DYNAMIC = scaled("dynamic", 8, 2.0, 16)
LONGROPE = Rotary(
    8,
    schedule="longrope",
    params={
        "short_factor": [1.0, 1.1, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 5.0, 9.0],
        "original_max_position_embeddings": 16,
        "short_mscale": 1.1,
        "long_mscale": 1.4,
    },
)
SPEC = Rotary(8, base=100.0)
PAIRS_OF_SPECS = {
    "the same": (SPEC, SPEC),
    "another base": (SPEC, Rotary(8, base=5e5)),
    "another direction": (SPEC, Rotary(8, base=100.0, sign=-1)),
    "another factor": (Rotary(8, base=100.0, schedule="yarn", params=YARN), SPEC),
    "both factors": (
        Rotary(8, schedule="yarn", params=YARN),
        Rotary(8, schedule="yarn", params=YARN | {"factor": 16.0}),
    ),
    "the same with a factor": (Rotary(8, schedule="yarn", params=YARN),) * 2,
    "part of the head": (Rotary(8, 4, 2), Rotary(8, 4, 2, base=100.0)),
    "interleaved": (Rotary(8, layout="interleaved"), Rotary(8, layout="interleaved", base=50.0)),
    "reads interleaved, writes half": (
        Rotary(8, layout="interleaved", out_layout="half"),
        Rotary(8, layout="half", base=500.0),
    ),
    "half to interleaved": (Rotary(8, out_layout="interleaved"),) * 2,
    "backwards": (Rotary(8, sign=-1), Rotary(8, sign=-1)),
    "two axes": (Rotary(8, axes=(0, 1, 0, 1)), Rotary(8, axes=(0, 0, 1, 1), base=50.0)),
    "one axis to two": (SPEC, Rotary(8, base=100.0, axes=(0, 1, 0, 1))),
}
all_specs = pytest.mark.parametrize(
    ("spec", "new_spec"), PAIRS_OF_SPECS.values(), ids=PAIRS_OF_SPECS
)
ENGINES = {"numpy": np.asarray, "torch": torch.as_tensor, "jax": jnp.asarray}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
quick_xla = pytest.mark.usefixtures("xla_in_less_time")
examples = settings(max_examples=60, deadline=None, derandomize=True)


def normal(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


def tokens(*starts):
    """Five positions in a row for every start: (len(starts), 5)."""
    return np.add.outer(starts, np.arange(5))


def members(spec, layout):
    return np.stack(kernel_cases.channels(layout, spec.rotary_dim // 2, spec.start))


def as_complex(x, spec):
    """The pairs of a cached key as complex numbers."""
    return kernel_cases.as_complex(x, spec.out_layout, spec.rotary_dim // 2, spec.start)


def placed(spec, where):
    """The same positions on every axis of a spec, all but the first one token further."""
    if spec.num_axes == 1:
        return where
    return np.stack([where + (axis > 0) for axis in range(spec.num_axes)], axis=-1)


def assert_pairs_close(moved, wanted, spec, bound):
    """Every pair is as close to the wanted complex number as `bound` times its length."""
    error = np.abs(as_complex(moved, spec) - wanted)
    np.testing.assert_array_less(error, bound * np.abs(wanted) + 1e-30)


# --- the law ---

FAR = [(0, 5), (9, 9), (10**6, 3), (3, 10**6), (2**39, 2**39 - 17), (2**53, 1), (1, 2**53)]


@pytest.mark.parametrize(
    ("spec", "new_spec"),
    [
        PAIRS_OF_SPECS[name]
        for name in ("the same", "another base", "another direction", "both factors")
    ],
)
def test_a_moved_key_is_what_fifty_digits_say(spec, new_spec):
    where, target = (np.array(column) for column in zip(*FAR, strict=True))
    cached = normal(len(FAR), 8)
    moved = rerotate(cached, spec, where, target, new_spec)
    (old_freq, old_factor), (new_freq, new_factor) = (rotary.inv_freq(s) for s in (spec, new_spec))
    z = as_complex(cached, spec)
    with mpmath.workdps(50):
        for row, (m, n) in enumerate(FAR):
            for pair in range(4):
                angle = n * mpmath.mpf(float(new_freq[pair])) * new_spec.sign
                angle -= m * mpmath.mpf(float(old_freq[pair])) * spec.sign
                turn = mpmath.expj(angle) * mpmath.mpf(new_factor) / mpmath.mpf(old_factor)
                wanted = turn * mpmath.mpc(z[row, pair])
                error = abs(wanted - mpmath.mpc(as_complex(moved, spec)[row, pair]))
                assert error <= (ONE + (m + n) * STEP) * abs(wanted)


@all_specs
@engines
def test_a_moved_key_is_the_key_rotated_at_the_new_place(spec, new_spec, engine):
    x = normal(2, 3, 5, 8)
    where = placed(spec, np.array([0, 1, 2**30, 77, 2**30 + 8]))
    target = placed(new_spec, np.array([6, 2**30 + 3, 0, 77, 5]))
    in_new = moved_layout(x, spec, new_spec)
    cached = rotary.apply(spec, engine(x), positions=where)
    moved = rerotate(cached, spec, where, target, new_spec)
    wanted = as_complex(rotary.apply(new_spec, in_new, positions=target), new_spec)
    assert type(moved) is type(cached)
    assert_pairs_close(moved, wanted, spec, 3 * ONE)
    rest = np.setdiff1d(np.arange(8), members(spec, "half"))
    np.testing.assert_array_equal(np.asarray(moved)[..., rest], x[..., rest])


def moved_layout(x, spec, new_spec):
    """x, whose pairs are where `spec` reads them, with its pairs where `new_spec` reads them."""
    x = x.copy()
    source, target = members(spec, spec.layout), members(new_spec, new_spec.layout)
    x[..., target] = x[..., source]
    return x


integers = st.integers(0, 2**53)


@examples
@given(
    rows=st.lists(st.tuples(integers, integers), min_size=1, max_size=8),
    name=st.sampled_from(sorted(PAIRS_OF_SPECS)),
    seed=st.integers(0, 99),
)
def test_the_turn_is_a_difference_of_whole_numbers(rows, name, seed):
    spec, new_spec = PAIRS_OF_SPECS[name]
    where, target = (np.array(column) for column in zip(*rows, strict=True))
    old, new = placed(spec, where), placed(new_spec, target)
    old_axes, new_axes = (
        [[(int(m[a]) if s.axes else int(m)) for a in (s.axes or [0] * (s.rotary_dim // 2))]
         for m in p]
        for s, p in ((spec, old), (new_spec, new))
    )  # fmt: skip
    turns = np.array([
        [(n * int(t) * new_spec.sign - m * int(s) * spec.sign) % 2**64 / 2**64
         for m, n, s, t in zip(ms, ns, rotary.turns(spec), rotary.turns(new_spec), strict=True)]
        for ms, ns in zip(old_axes, new_axes, strict=True)
    ])  # fmt: skip
    ratio = rotary.inv_freq(new_spec)[1] / rotary.inv_freq(spec)[1]
    cached = np.random.default_rng(seed).normal(size=(len(rows), 8)).astype(np.float32)
    wanted = as_complex(cached, spec) * np.exp(2j * np.pi * turns) * ratio
    assert_pairs_close(rerotate(cached, spec, old, new, new_spec), wanted, spec, ONE)


@examples
@given(start=st.integers(0, 2**62), distance=st.integers(-(2**39), 2**39))
def test_moving_by_a_distance_takes_the_tables_of_that_distance(start, distance):
    where = np.array([max(start, -distance)])
    ours = moved_cos_sin(SPEC, SPEC, where, where + distance, where)
    wanted = rotary.cos_sin(SPEC, np.array([distance]), allow_negative=True)
    np.testing.assert_array_equal(ours, wanted)


def test_two_ways_to_say_the_same_frequencies_move_alike():
    custom = Rotary(8, schedule="custom", params={"inv_freq": rotary.inv_freq(SPEC)[0]})
    where = np.arange(5) + 2**50
    one, other = (moved_cos_sin(SPEC, new, where, where - 2**49, where) for new in (SPEC, custom))
    np.testing.assert_array_equal(one, other)


# --- the attention factor ---


# --- drift ---


@pytest.mark.parametrize("distances", ["one token", "any distance"])
def test_a_thousand_moves_in_a_row_stay_within_the_bound(distances):
    spec = Rotary(128)
    rng = np.random.default_rng(7)
    steps = [1] * 1000 if distances == "one token" else rng.integers(-(10**6), 10**6, 1000).tolist()
    where = np.arange(16) + 2**40
    original = rng.normal(size=(16, 128)).astype(np.float32)
    k, at = original, where
    worst, direct = [], []
    for step in steps:
        k = rerotate(k, spec, at, at + step)
        at = at + step
        exact = exactly_moved(original, spec, int(at[0] - where[0]))
        once = rerotate(original, spec, where, at)
        worst.append(worst_error(k, exact, spec))
        direct.append(worst_error(once, exact, spec))
    bounds = (1 + ONE) ** np.arange(1, 1001) - 1
    assert (np.array(worst) <= bounds).all()
    assert worst[-1] > 5 * ONE  # moving what was moved does grow
    assert max(direct) <= ONE  # moving the original does not


def exactly_moved(k, spec, distance):
    turns = [distance * int(t) % 2**64 / 2**64 for t in rotary.turns(spec)]
    return as_complex(k, spec) * np.exp(2j * np.pi * np.array(turns))


def worst_error(k, exact, spec):
    return (np.abs(as_complex(k, spec) - exact) / np.abs(exact)).max()


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_sixteen_bit_keys_are_rounded_once_a_move(dtype, eps):
    k = torch.from_numpy(normal(3, 5, 8)).to(dtype)
    moved = rerotate(k, SPEC, range(5), range(2**30, 2**30 + 5))
    wide = rerotate(k.float(), SPEC, range(5), range(2**30, 2**30 + 5))
    assert moved.dtype == dtype
    torch.testing.assert_close(moved, wide.to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(moved.float(), wide, rtol=eps, atol=1e-7)


# --- lengths ---


@pytest.mark.parametrize("spec", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
@engines
def test_keys_follow_frequencies_that_depend_on_the_length(spec, engine):
    x = normal(2, 3, 5, 8)
    where = np.arange(5)
    cached = rotary.apply(spec, engine(x), positions=where, seq_len=12)
    grown = rerotate(cached, spec, where, where, seq_len=12, new_seq_len=64)
    wanted = rotary.apply(spec, x, positions=where, seq_len=64)
    assert_pairs_close(grown, as_complex(wanted, spec), spec, 3 * ONE)
    assert np.abs(np.asarray(grown) - np.asarray(cached)).max() > 0.1


@pytest.mark.parametrize("spec", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_each_row_has_its_own_length(spec):
    x = normal(2, 3, 5, 8)
    where, target = tokens(3, 40), tokens(90, 0)
    cached = rotary.apply(spec, x, positions=where)
    moved = rerotate(cached, spec, where, target)
    wanted = rotary.apply(spec, x, positions=target)
    assert_pairs_close(moved, as_complex(wanted, spec), spec, 3 * ONE)
    given = rerotate(cached, spec, where, target, seq_len=[8, 45], new_seq_len=np.array([95, 5]))
    np.testing.assert_array_equal(given, moved)


def test_length_alone_changes_nothing_where_frequencies_do_not_depend_on_it():
    cached = normal(5, 8)
    moved = rerotate(cached, SPEC, range(5), range(5), seq_len=12, new_seq_len=64)
    np.testing.assert_array_equal(moved, cached)


# --- the arguments ---


@engines
def test_rows_may_go_to_different_places(engine):
    k = engine(normal(2, 3, 5, 8))
    where, target = np.arange(5), tokens(7, 1000)
    for new_spec in (SPEC, Rotary(8)):
        both = np.asarray(rerotate(k, SPEC, where, target, new_spec))
        for row in range(2):
            alone = rerotate(k[row], SPEC, where, target[row], new_spec)
            np.testing.assert_array_equal(both[row], np.asarray(alone))
        back = rerotate(k, SPEC, target, where[None], new_spec)
        one = rerotate(k[1], SPEC, target[1], where, new_spec)
        np.testing.assert_array_equal(np.asarray(back)[1], np.asarray(one))


@engines
def test_tokens_may_come_before_heads(engine):
    k = normal(2, 3, 5, 8)
    where, target = tokens(0, 9), np.arange(5) + 50
    wanted = rerotate(k, SPEC, where, target)
    turned = rerotate(engine(k.swapaxes(1, 2)), SPEC, where, target, seq_dim=-3)
    np.testing.assert_allclose(np.asarray(turned).swapaxes(1, 2), wanted, atol=1e-6)


@pytest.mark.parametrize("engine", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_keys_can_be_moved_in_place_and_layers_together(engine):
    layers = tuple(engine(normal(2, heads, 5, 8)) for heads in (1, 3))
    new_spec = Rotary(8)
    wanted = [rerotate(k, SPEC, range(5), range(3, 8), new_spec) for k in layers]
    moved = rerotate(layers, SPEC, range(5), range(3, 8), new_spec, out=layers)
    for result, k, expected in zip(moved, layers, wanted, strict=True):
        assert result is k
        np.testing.assert_array_equal(np.asarray(k), np.asarray(expected))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint64, np.int64])
@pytest.mark.parametrize("new_spec", [SPEC, Rotary(8)], ids=["shift", "frequencies"])
def test_every_whole_number_type_moves_alike(dtype, new_spec):
    k, where, target = normal(3, 8), np.array([1, 120, 9]), np.array([0, 3, 127])
    wanted = rerotate(k, SPEC, where, target, new_spec)
    moved = rerotate(k, SPEC, where.astype(dtype), target, new_spec)
    np.testing.assert_array_equal(moved, wanted)
    moved = rerotate(k, SPEC, where.astype(dtype), target.astype(dtype), new_spec)
    np.testing.assert_array_equal(moved, wanted)


@pytest.mark.parametrize("name", ["the same", "another base", "both factors"])
def test_fractional_positions_are_moved(name):
    spec, new_spec = PAIRS_OF_SPECS[name]
    x = normal(3, 8)
    where, target = np.array([0.25, 7.5, 2.0**20]), np.array([9, 0, 3])
    cached = rotary.apply(spec, x, positions=where)
    moved = rerotate(cached, spec, where, target, new_spec)
    wanted = as_complex(rotary.apply(new_spec, x, positions=target), spec)
    assert_pairs_close(moved, wanted, spec, 2 * ONE + 3e-7)
    back = rerotate(moved, new_spec, target, where, spec)
    assert_pairs_close(back, as_complex(cached, spec), spec, 2 * ONE + 6e-7)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_a_shift_by_half_a_token_is_a_move_to_positions_with_halves(convert):
    k = convert(normal(2, 3, 8))
    moved = rerotate(k, SPEC, np.zeros(3), np.full(3, 0.5))
    for out in (None, k):
        assert bool((rerotate(k, SPEC, shift=0.5, out=out) == moved).all())


def test_negative_positions_are_moved_when_they_are_meant():
    x = normal(3, 8)
    where, target = np.array([-5, 2, -(2**40)]), np.array([3, -2, 8])
    cached = rotary.apply(SPEC, x, positions=where, allow_negative=True)
    moved = rerotate(cached, SPEC, where, target, allow_negative=True)
    wanted = rotary.apply(SPEC, x, positions=target, allow_negative=True)
    assert_pairs_close(moved, as_complex(wanted, SPEC), SPEC, 3 * ONE)


@engines
def test_an_empty_cache_stays_empty(engine):
    for new_spec in (SPEC, Rotary(8)):
        moved = rerotate(engine(normal(2, 3, 0, 8)), SPEC, range(0), range(0), new_spec)
        assert tuple(moved.shape) == (2, 3, 0, 8)


# --- the libraries ---


@all_specs
def test_the_plain_formula_moves_alike_where_loops_cannot_be_compiled(spec, new_spec, monkeypatch):
    k = normal(2, 3, 5, 8)
    where = placed(spec, np.array([4, 1, 2**50, 77, 3]))
    target = placed(new_spec, np.array([6, 9, 0, 77, 2**50]))
    compiled = rerotate(k, spec, where, target, new_spec)
    monkeypatch.setitem(rotary.kernels.kernels_by_type, np.ndarray, reference.KERNEL)
    plain = rerotate(k, spec, where, target, new_spec)
    assert_pairs_close(plain, as_complex(compiled, spec), spec, 2 * ONE)


@all_specs
def test_torch_has_the_bits_of_numpy_and_jax_their_neighbours(spec, new_spec):
    k = normal(2, 3, 5, 8)
    where = placed(spec, np.array([4, 1, 2**30, 77, 3]))
    target = placed(new_spec, np.array([6, 9, 0, 77, 2**30]))
    wanted = rerotate(k, spec, where, target, new_spec)
    for at in (where, torch.from_numpy(where)):
        ours = rerotate(torch.from_numpy(k), spec, at, target, new_spec)
        np.testing.assert_array_equal(ours, wanted)
    ours = rerotate(jnp.asarray(k), spec, jnp.asarray(where), target, new_spec)
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=2.0**-23 * np.abs(wanted).max())


@quick_xla
@all_specs
def test_jax_moves_keys_under_jit_at_traced_positions(spec, new_spec):
    k = normal(2, 3, 5, 8)
    where = placed(spec, np.array([4, 1, 2**30, 77, 3]))
    target = placed(new_spec, np.array([6, 9, 0, 77, 2**30]))
    move = jax.jit(rerotate, static_argnames=("spec", "new_spec"))
    wanted = as_complex(rerotate(k, spec, where, target, new_spec), spec)
    ours = move(k, spec, where, target, new_spec)
    assert_pairs_close(ours, wanted, spec, 2 * ONE + TRACED)
    mixed = jax.jit(lambda k, at: rerotate(k, spec, where, at, new_spec))(k, target)
    assert_pairs_close(mixed, wanted, spec, 2 * ONE + TRACED)
    known = jax.jit(lambda k: rerotate(k, spec, where, target, new_spec))(k)
    assert_pairs_close(known, wanted, spec, 2 * ONE)


@quick_xla
@pytest.mark.parametrize("new_spec", [SPEC, Rotary(8)], ids=["shift", "frequencies"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int32])
def test_traced_positions_of_narrow_types_do_not_overflow(new_spec, dtype):
    k, where, target = normal(3, 8), np.array([1, 250, 9]), np.array([0, 3, 251])
    wanted = as_complex(rerotate(k, SPEC, where, target, new_spec), SPEC)
    move = jax.jit(rerotate, static_argnames=("spec", "new_spec"))
    ours = move(k, SPEC, where.astype(dtype), target.astype(dtype), new_spec)
    assert_pairs_close(ours, wanted, SPEC, 2 * ONE + TRACED)


@pytest.mark.usefixtures("optimized")
def test_traced_positions_take_the_tables_of_their_distance():
    where = np.array([5, 9, 2**30])
    moves = {
        "jax": (jax.jit, lambda at: jnp.asarray(at, np.int32)),
        "torch": (lambda call: torch.compile(call, fullgraph=True, backend="eager"), torch.tensor),
    }
    for compiled, array in moves.values():
        move = compiled(lambda old, new: moved_cos_sin(SPEC, SPEC, old, new, old))
        wanted = compiled(lambda at: rotary.cos_sin(SPEC, at))(array([7, 7, 7]))
        for one, other in zip(move(array(where), array(where + 7)), wanted, strict=True):
            np.testing.assert_array_equal(one, other)
    ends = jnp.asarray([1 - 2**31], np.int32), jnp.asarray([2**31 - 1], np.int32)
    move = jax.jit(lambda old, new: moved_cos_sin(SPEC, SPEC, old, new, old, allow_negative=True))
    for one, other in zip(move(*ends), rotary.cos_sin(SPEC, [2**32 - 2]), strict=True):
        np.testing.assert_allclose(one, other, atol=TRACED)  # 33 bits: no int32


@quick_xla
def test_traced_and_known_positions_too_far_for_32_bits_are_not_mixed_up():
    k, where, target = normal(3, 8), np.array([2**40, 2**40 + 7, 2**33]), np.array([0, 3, 9])
    wanted = as_complex(rerotate(k, SPEC, where, target), SPEC)
    ours = jax.jit(lambda k, at: rerotate(k, SPEC, where, at))(k, target)
    assert_pairs_close(ours, wanted, SPEC, 2 * ONE + TRACED)


@pytest.mark.parametrize("new_spec", [SPEC, Rotary(8)], ids=["shift", "frequencies"])
def test_torch_compiles_and_maps_a_move(new_spec):
    k = torch.from_numpy(normal(2, 3, 5, 8))
    where, target = torch.arange(5) + 2**40, torch.arange(5) + 3
    wanted = as_complex(rerotate(k, SPEC, where, target, new_spec), SPEC)
    compiled = torch.compile(rerotate, fullgraph=True, backend="eager")
    ours = compiled(k, SPEC, where, target, new_spec)
    assert_pairs_close(ours, wanted, SPEC, 2 * ONE + TRACED)
    mapped = torch.vmap(lambda k, at: rerotate(k, SPEC, at, target, new_spec))
    ours = mapped(k, torch.stack((where, where)))
    assert_pairs_close(ours, wanted, SPEC, 2 * ONE + TRACED)


@quick_xla
@pytest.mark.parametrize("new_spec", [SPEC, LONGROPE], ids=["shift", "frequencies"])
def test_the_gradient_is_the_way_back_times_the_amplitude_squared(new_spec):
    spec = SPEC if new_spec is SPEC else DYNAMIC
    k, g = normal(2, 3, 5, 8), normal(1, 2, 3, 5, 8)[0]
    where, target = np.arange(5), np.arange(5) + 11
    ratio = rotary.inv_freq(new_spec)[1] / rotary.inv_freq(spec)[1]
    back = rerotate(g, new_spec, target, where, spec, seq_len=16, new_seq_len=5)
    wanted = as_complex(back, spec) * ratio**2

    def moved(k):
        return rerotate(k, spec, where, target, new_spec, seq_len=5, new_seq_len=16)

    leaf = torch.tensor(k, requires_grad=True)
    moved(leaf).backward(torch.from_numpy(g))
    assert_pairs_close(leaf.grad, wanted, spec, 3 * ONE)
    grad = jax.grad(lambda k: (moved(k) * g).sum())(jnp.asarray(k))
    assert_pairs_close(grad, wanted, spec, 3 * ONE)
    wide = torch.tensor(k, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(moved, wide)


# --- what is refused ---

WRONG = [
    ({"new_spec": Rotary(16)}, "new_spec must have the head_dim of spec, 8, got 16"),
    ({"new_spec": Rotary(8, 4)}, "new_spec must have the rotary_dim of spec, 8, got 4"),
    ({"spec": Rotary(8, 4), "new_spec": Rotary(8, 4, 4)},
     "new_spec must have the start of spec, 0, got 4"),
    ({"new_spec": Rotary(8, layout="interleaved")},
     "new_spec must have the out_layout of spec, 'half', got 'interleaved'"),
    ({"spec": Rotary(16)}, "axis of k must be head_dim=16 of the spec, got 8"),
    ({"from_positions": range(4)},
     "from_positions must be (5) or, for a 4-D k, (batch, 5); got shape (4,) for k (2, 3, 5, 8)"),
    ({"to_positions": range(6)}, "to_positions must be (5)"),
    ({"to_positions": np.zeros((3, 5), int)}, "to_positions must be (5)"),
    ({"to_positions": np.zeros((2, 3, 5), int)}, "to_positions must be"),
    ({"k": normal(3, 5, 8), "from_positions": np.zeros((3, 5), int)},
     "from_positions must be (5) or, for a 4-D k"),
    ({"new_spec": Rotary(8, axes=(0, 1, 0, 1))},
     "to_positions must be (5, 2) or, for a 4-D k, (batch, 5, 2); got shape (5,)"),
    ({"from_positions": range(-1, 4)}, "positions must be >= 0, got -1; pass allow"),
    ({"to_positions": range(-1, 4)}, "positions must be >= 0, got -1"),
    ({"seq_dim": 3}, "seq_dim=3 is not an axis before the last"),
    ({"spec": DYNAMIC, "seq_len": [1, 2, 3]}, "seq_len must be one number or one per row"),
]  # fmt: skip


def test_arguments_of_another_type_are_named():
    k = normal(2, 3, 5, 8)
    with pytest.raises(TypeError, match="spec, the second argument, must be a Rotary, got None"):
        rerotate(k, None, shift=3)
    with pytest.raises(TypeError, match="new_spec must be a Rotary, got dict"):
        rerotate(k, SPEC, range(5), range(5), {})
    with pytest.raises(TypeError, match="all arrays must be of one library"):
        rerotate([k, torch.from_numpy(k)], SPEC, shift=3)


def test_a_shift_in_the_other_byte_order():
    cache, shifts = normal(6, 4, 2, 8), [3, -2]
    moved = rerotate(cache, SPEC, blocks=[4, 1], shift=np.array(shifts, ">i8"))
    np.testing.assert_array_equal(moved, rerotate(cache, SPEC, blocks=[4, 1], shift=shifts))


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_makes_no_sense_is_refused_in_one_line(arguments, message):
    good = {"k": normal(2, 3, 5, 8), "spec": SPEC, "from_positions": range(5),
            "to_positions": range(3, 8)}  # fmt: skip
    rerotate(**good)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        rerotate(**good | arguments)
    assert "\n" not in str(caught.value)


def test_types_that_cannot_be_moved_are_named():
    with pytest.raises(TypeError, match=r"cannot rotate a builtins\.str; array libraries known"):
        rerotate("keys", SPEC, range(5), range(5))
    with pytest.raises(TypeError, match=r"positions must be whole numbers, or float64"):
        rerotate(normal(5, 8), SPEC, np.zeros(5, np.float16), range(5))
    k = jnp.asarray(normal(5, 8))
    with pytest.raises(TypeError, match="out= cannot be used with JAX arrays"):
        rerotate(k, SPEC, range(5), range(5), out=k)


def test_keys_of_an_open_number_of_tokens_are_exported_by_jax():
    export = pytest.importorskip("jax.export")
    (seq,) = export.symbolic_shape("seq")
    spec, k = rotary.Rotary(head_dim=8), jax.numpy.ones((2, 6, 8))
    exported = export.export(jax.jit(lambda k: rotary.rerotate(k, spec, shift=3)))(
        jax.ShapeDtypeStruct((2, seq, 8), np.float32)
    )
    np.testing.assert_allclose(exported.call(k), rotary.rerotate(k, spec, shift=3), atol=1e-6)
