"""`rotate` takes the channels from the spec, or by hand, and never guesses them."""

import dataclasses
import re

import numpy as np
import pytest
from libraries import Absent, if_installed
from published import longrope, scaled

import rotary
from rotary import attention

jax = if_installed("jax")
jnp = if_installed("jax.numpy")
torch = if_installed("torch")
CompileCounter = if_installed("torch._dynamo.testing").CompileCounter

LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}
# GPT-J 6B: interleaved pairs in the first 64 of 256 channels
GPTJ = rotary.from_hf_config({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64})
SPECS = {
    "half": rotary.Rotary(head_dim=16),
    "interleaved": rotary.Rotary(head_dim=16, layout="interleaved"),
    "interleaved in, half out": rotary.Rotary(head_dim=16, layout="interleaved", out_layout="half"),
    "partial": rotary.Rotary(head_dim=16, rotary_dim=8),
    "partial, not from the first channel": rotary.Rotary(
        head_dim=16, rotary_dim=8, start=4, layout="interleaved"
    ),
    "clockwise": rotary.Rotary(head_dim=16, sign=-1),
    "yarn, which has an attention factor": scaled("yarn", 16, 4.0, 64, layout="interleaved"),
    "two axes": rotary.Rotary(head_dim=16, axes=(0, 1) * 4, layout="interleaved"),
    "GPT-J": GPTJ,
}
BOTH_FORMS = r"rotate\(x, cos, sin, spec\).*layout='half'.*layout='interleaved'"


@pytest.fixture(autouse=True, scope="module")
def _compiled_in_less_time(request):
    if not isinstance(jax, Absent):
        request.getfixturevalue("xla_in_less_time")


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]


def arrays(spec, library=np.asarray, seq=6, heads=(4, 2)):
    random = np.random.default_rng(0)
    xs = [random.standard_normal((2, n, seq, spec.head_dim)).astype(np.float32) for n in heads]
    positions = random.integers(0, 1000, (seq, spec.num_axes)[: 1 + (spec.num_axes > 1)])
    return tuple(map(library, xs)), library(positions)


def by_complex_numbers(spec, x, positions):
    """The definition: a pair, as a complex number, times amplitude * e^(i position frequency)."""
    frequencies, amplitude = rotary.inv_freq(spec)
    axes = list(spec.axes) if spec.axes else [0] * (spec.rotary_dim // 2)
    angles = positions.reshape(len(positions), -1)[:, axes] * frequencies * spec.sign
    first, second = rotary.layouts.pair_slices(spec.rotary_dim, spec.layout, spec.start)
    turned = (x[..., first] + 1j * x[..., second]) * (amplitude * np.exp(1j * angles))
    y = x.copy()
    first, second = rotary.layouts.pair_slices(spec.rotary_dim, spec.out_layout, spec.start)
    y[..., first], y[..., second] = turned.real, turned.imag
    return y


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_says_which_channels_are_rotated(name, library):
    spec = SPECS[name]
    (q, k), positions = arrays(spec, library)
    rotated = rotary.rotate((q, k), *rotary.cos_sin(spec, positions), spec)
    for x, y in zip((q, k), rotated, strict=True):
        wanted = by_complex_numbers(spec, np.asarray(x), np.asarray(positions))
        np.testing.assert_allclose(np.asarray(y), wanted, rtol=0, atol=2e-6)


def test_without_a_layout(library):
    (q, k), positions = arrays(GPTJ, library)
    cos, sin = rotary.cos_sin(GPTJ, positions)
    for arguments in ({}, {"rotary_dim": 64}, {"out_layout": "half"}, {"positions": positions}):
        with pytest.raises(TypeError, match=BOTH_FORMS) as error:
            rotary.rotate((q, k), cos, sin, **arguments)
        assert "\n" not in str(error.value)
    for other in ("half", positions, {"layout": "half"}):
        with pytest.raises(TypeError, match=f"spec must be a Rotary, got .*{BOTH_FORMS}"):
            rotary.rotate((q, k), cos, sin, other)


@pytest.mark.parametrize("option", ["layout", "out_layout"])
@pytest.mark.parametrize("layout", ["neox", "", "Half", ["half"], 0])
def test_what_is_no_layout(option, layout, library):
    (q, _), positions = arrays(GPTJ, library)
    by_hand = {"layout": "half", "rotary_dim": 64, option: layout}
    message = f"{option} must be 'half' or 'interleaved', got {layout!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        rotary.rotate(q, *rotary.cos_sin(GPTJ, positions), **by_hand)


@pytest.mark.parametrize(
    "by_hand",
    [{"layout": "half"}, {"out_layout": "half"}, {"rotary_dim": 8}, {"start": 0}],
    ids=str,
)
def test_a_spec_and_channels_by_hand(by_hand):
    (q, k), positions = arrays(GPTJ)
    with pytest.raises(TypeError, match=f"the spec has layout.*{BOTH_FORMS}"):
        rotary.rotate((q, k), *rotary.cos_sin(GPTJ, positions), GPTJ, **by_hand)


def test_tables_and_x_that_do_not_fit_the_spec(library):
    (q, _), positions = arrays(GPTJ, library)
    cos, sin = rotary.cos_sin(GPTJ, positions)
    wide = (library(np.concatenate((np.asarray(table),) * 2, axis=-1)) for table in (cos, sin))
    with pytest.raises(ValueError, match="rotary_dim is 64 in the spec, but cos has 64 columns"):
        rotary.rotate(q, *wide, GPTJ)
    narrow = dataclasses.replace(GPTJ, rotary_dim=32)
    with pytest.raises(ValueError, match="rotary_dim is 32 in the spec, but cos has 32 columns"):
        rotary.rotate(q, cos, sin, narrow)
    with pytest.raises(
        ValueError, match="the last axis of x must be head_dim=256 of the spec, got 64"
    ):
        rotary.rotate(q[..., :64], cos, sin, GPTJ)
    # a partial rotation by hand: which channels these are is not known
    with pytest.raises(ValueError, match=r"rotate 64 of the 256 channels.*spec.*start="):
        rotary.rotate(q, cos, sin, layout="interleaved")


# --- a spec as an argument of compiled and transformed calls ---


def rotated(q, k, cos, sin, spec):
    return rotary.rotate((q, k), cos, sin, spec)


def test_compiled_by_torch():
    (q, k), positions = arrays(GPTJ, torch.from_numpy)
    tables = rotary.cos_sin(GPTJ, positions)
    torch._dynamo.reset()
    compiled = torch.compile(rotated, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, *tables, GPTJ), rotated(q, k, *tables, GPTJ))
    other = dataclasses.replace(GPTJ, layout="half")
    torch.testing.assert_close(compiled(q, k, *tables, other), rotated(q, k, *tables, other))


def test_compiled_once_for_all_lengths():
    spec, counter = SPECS["interleaved"], CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(rotated, fullgraph=True, dynamic=True, backend=counter)
    for seq in (5, 7, 4, 9, 4):  # 4 tokens are as many as heads
        (q, k), positions = arrays(spec, torch.from_numpy, seq, heads=(4, 4))
        tables = rotary.cos_sin(spec, positions)
        wanted = rotary.rotate((q, k), *tables, spec, seq_dim=-2)
        torch.testing.assert_close(compiled(q, k, *tables, spec), wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [True, False])
def test_exported_by_torch(strict):
    class Rotation(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return rotated(q, k, cos, sin, GPTJ)

    (q, k), positions = arrays(GPTJ, torch.from_numpy, 5, heads=(4, 4))
    tables = rotary.cos_sin(GPTJ, positions)
    seq = torch.export.Dim("seq")
    shapes = ({2: seq}, {2: seq}, {0: seq}, {0: seq})
    program = torch.export.export(
        Rotation(), (q, k, *tables), dynamic_shapes=shapes, strict=strict
    ).module()
    (q, k), positions = arrays(GPTJ, torch.from_numpy, 4, heads=(4, 4))
    tables = rotary.cos_sin(GPTJ, positions)
    wanted = rotary.rotate((q, k), *tables, GPTJ, seq_dim=-2)
    torch.testing.assert_close(program(q, k, *tables), wanted)


def test_compiled_mapped_and_scanned_by_jax():
    (q, k), positions = arrays(GPTJ, jnp.asarray)
    tables = rotary.cos_sin(GPTJ, positions)
    wanted = rotated(q, k, *tables, GPTJ)
    compiled = jax.jit(rotated, static_argnames="spec")(q, k, *tables, GPTJ)
    mapped = jax.vmap(lambda q, k: rotated(q, k, *tables, GPTJ))(q, k)
    _, scanned = jax.lax.scan(lambda _, qk: (None, rotated(*qk, *tables, GPTJ)), None, (q, k))
    for got in (compiled, mapped, scanned):
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


# --- (batch, seq, heads, head_dim) with as many heads as tokens ---

AMBIGUOUS = "pass seq_dim=-2 .* seq_dim=-3"


def calls(spec, x, seq_dim):
    """Every public call that rotates x at given positions, with this seq_dim, if any."""
    tokens = x.shape[-2]
    ids, zeros = np.arange(tokens), np.zeros(tokens, np.int64)
    if isinstance(x, torch.Tensor):
        ids, zeros = torch.from_numpy(ids), torch.from_numpy(zeros)
    cos, sin = rotary.cos_sin(spec, ids)
    way = {} if seq_dim is None else {"seq_dim": seq_dim}
    rows = {"positions": ids}
    yield lambda: rotary.rotate(x, cos, sin, spec, **way)
    yield lambda: rotary.rotate((x, x), cos, sin, spec, **way)[1]
    yield lambda: rotary.rotate(x, cos, sin, layout="half", **way)
    yield lambda: rotary.rotate(x, cos, sin, spec, **rows, **way)
    yield lambda: rotary.apply(spec, x, **rows, **way)
    yield lambda: rotary.rerotate(x, spec, zeros, ids, **way)
    if isinstance(x, torch.Tensor):
        module = rotary.nn.RotaryEmbedding(spec, **way)
        yield lambda: module(x, positions=ids)


@pytest.mark.parametrize("shape", [(2, 4, 4, 8), (4, 4, 8)], ids=str)
def test_as_many_heads_as_tokens(shape, library):
    spec = rotary.Rotary(head_dim=8)
    x = library(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    for call in calls(spec, x, None):
        with pytest.raises(ValueError, match=AMBIGUOUS):
            call()
    heads_first, heads_last = rotary.apply(spec, x, seq_dim=-2), rotary.apply(spec, x, seq_dim=-3)
    for seq_dim, wanted in ((-2, heads_first), (-3, heads_last)):
        for call in calls(spec, x, seq_dim):
            np.testing.assert_allclose(np.asarray(call()), np.asarray(wanted), rtol=0, atol=1e-6)


def test_what_says_where_the_tokens_are(library):
    spec = rotary.Rotary(head_dim=8)
    cos, sin = rotary.cos_sin(spec, library(np.arange(4)))
    x = library(np.ones((2, 4, 4, 8), np.float32))
    fewer = library(np.ones((2, 2, 4, 8), np.float32))
    rotary.rotate((x, fewer), cos, sin, spec)  # q and k differ in heads
    rotary.rotate(x, cos[None, None], sin[None, None], spec)  # an axis of the table for each of x
    rotary.rotate(x[:, :, :1], cos[:1], sin[:1], spec)  # one token
    rotary.rotate(x[:, :1, :1], cos[:1], sin[:1], spec)  # one token and one head: both are alike
    rotary.rotate(x[0, 0], cos, sin, spec)
    rotary.apply(spec, x)  # no positions: the tokens are those of the axis that is documented
    with pytest.raises(ValueError, match=r"heads only.*seq_dim=-3"):
        rotary.rotate((x, x[:, :, :2]), cos, sin, spec)  # heads differ on axis -2
    with pytest.raises(ValueError, match=r"4 against 3.*seq_dim=-3"):
        rotary.rotate(x[:, :, :3], cos, sin, spec)  # (batch, seq 4, heads 3, head_dim)


def test_systems_say_where_their_tokens_are():
    spec = rotary.Rotary(head_dim=8)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 4, 8)).astype(np.float32)
    ids = np.arange(4)
    attention.softmax_attention(q, k, v, spec, q_positions=ids, k_positions=ids)
    attention.vo_rope_attention(q, k, v, spec, spec, q_positions=ids, k_positions=ids)
    attention.linear_attention(q, k, v, spec, positions=ids)
    attention.xpos(spec, q, k, positions=ids)
    attention.distance_attention(q, k, v, spec, attention.rerope(2), q_positions=ids)


@pytest.mark.parametrize("layouts", [("half", "half"), ("interleaved", "interleaved"),
                                     ("interleaved", "half"), ("half", "interleaved")])  # fmt: skip
@pytest.mark.parametrize("as_array", [np.asarray, torch.from_numpy, jnp.asarray])
def test_conjugate_is_the_transpose_and_the_way_back(layouts, as_array):
    """Also where pairs are read in one layout and written in the other: DeepSeek's keys came back
    in the wrong order."""
    spec = rotary.Rotary(
        head_dim=12, rotary_dim=8, start=4, layout=layouts[0], out_layout=layouts[1]
    )
    chance = np.random.default_rng(0)
    x, y = (as_array(chance.standard_normal((5, 12)).astype(np.float32)) for _ in range(2))
    cos, sin = rotary.cos_sin(spec, as_array(np.arange(5)))
    there, back = rotary.rotate(x, cos, sin, spec), rotary.rotate(y, cos, sin, spec, conjugate=True)
    np.testing.assert_allclose((there * y).sum(), (x * back).sum(), rtol=1e-5)
    again = rotary.rotate(there, cos, sin, spec, conjugate=True)
    np.testing.assert_allclose(np.asarray(again), np.asarray(x), atol=1e-5)
    applied = rotary.apply(spec, rotary.apply(spec, x), conjugate=True)
    np.testing.assert_allclose(np.asarray(applied), np.asarray(x), atol=1e-5)


BY_LENGTH = {
    "dynamic": scaled("dynamic", 16, 2.0, 4),
    "longrope": longrope(8.0, 4, [1.0] * 8, [2.0] * 8),
}
ARGUMENTS = [
    {},
    {"precision": "float32"},
    {"seq_len": 64},
    {"precision": "float32", "seq_len": 64, "conjugate": True},
    {"conjugate": True},
    {"seq_dim": -2, "seq_len": 64, "conjugate": True},
]


@pytest.mark.parametrize("name", [*SPECS, *BY_LENGTH])
def test_apply_is_cos_sin_and_rotate(name, library):
    """With each argument that they take, at positions that are given or not, also negative ones."""
    spec = (SPECS | BY_LENGTH)[name]
    (q, k), positions = arrays(spec, library)
    counted = library(np.arange(6))
    places = [(positions, False), (positions - 500, True)] + [(None, False)] * (spec.num_axes == 1)
    for where, allow_negative in places:
        for given in ARGUMENTS:
            of_tables = {key: given[key] for key in ("precision", "seq_len") if key in given}
            way = {key: given[key] for key in ("conjugate", "seq_dim") if key in given}
            at = counted if where is None else where
            tables = rotary.cos_sin(spec, at, **of_tables, allow_negative=allow_negative)
            wanted = rotary.rotate((q, k), *tables, spec, **way)
            got = rotary.apply(spec, q, k, positions=where, allow_negative=allow_negative, **given)
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_positions_are_refused_with_as_many_axes_as_they_have(library):
    plain, image = rotary.Rotary(head_dim=16), SPECS["two axes"]
    (q, _), _ = arrays(plain, library)
    for spec, shape, message in (
        (plain, (1, 2, 6), r"q, \(batch, seq\); got .* q \(2, 4, 6, 16\); a 1-D spec has no axes$"),
        (plain, (1, 1, 2, 6), r"q, \(batch, seq\); got .* q \(2, 4, 6, 16\)$"),
        (image, (1, 2, 6, 2), r"\(seq, axes\) or, .* \(batch, seq, axes\); got .* 6, 16\)$"),
        (image, (6,), r"positions must be \(\.\.\., seq, 2\) for 2 axes, got shape \(6,\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            rotary.apply(spec, q, positions=library(np.zeros(shape, np.int64)))
    with pytest.raises(ValueError, match=r"\(batch, seq\); got shape \(2, 6\) for q \(4, 6, 16\)$"):
        rotary.apply(plain, q[0], positions=library(np.zeros((2, 6), np.int64)))
