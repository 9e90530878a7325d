"""The plug-in of vLLM on a stand-in for vLLM; `make peers` runs it in vLLM itself."""

import importlib
import logging
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import rotary

torch = pytest.importorskip("torch")
from rotary.integrations import vllm as plugin  # noqa: E402

STAND_IN = Path(__file__).with_name("vllm_stand_in.py")
PACKAGE = "vllm.model_executor.layers.rotary_embedding"
HEAD, ROWS, TOKENS = 16, 64, 5
PLAIN = (HEAD, 8, ROWS, 1e4, True, torch.float32)


@pytest.fixture
def vllm(tmp_path, monkeypatch, log):
    """A function that registers the plug-in and returns the module of the classes."""
    folder = tmp_path / PACKAGE.replace(".", "/")
    folder.mkdir(parents=True)
    shutil.copy(STAND_IN, folder / "ropes.py")
    (folder / "__init__.py").write_text(
        f"from {PACKAGE}.ropes import Phi3LongRoPEScaledRotaryEmbedding\n"
    )
    (tmp_path / "vllm/model_executor/custom_op.py").write_text(
        f"from {PACKAGE}.ropes import op_registry_oot\n"
    )
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugin, "_replaced", {})
    monkeypatch.setattr(plugin, "_logged", set())
    monkeypatch.setattr(plugin, "_waiting", [])
    monkeypatch.setenv("VLLM_PLUGINS", "other,rotary")
    monkeypatch.delenv("ROTARY_EXACT", raising=False)

    def registered(exact="0"):
        monkeypatch.setenv("ROTARY_EXACT", exact)
        ropes = importlib.import_module(f"{PACKAGE}.ropes")
        plugin.register()
        return ropes

    with log.at_level(logging.INFO, "vllm.plugins.rotary"):
        yield registered
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def calls(monkeypatch):
    """The calls that the plug-in answered itself."""
    made, own = [], plugin._rotated

    def counted(*args, **kwargs):
        results = own(*args, **kwargs)
        made.extend([] if results is None else [args])
        return results

    monkeypatch.setattr(plugin, "_rotated", counted)
    return made


def packed(dtype=torch.float32, heads=(3, 2)):
    """q and k as vLLM hands them over: slices of one buffer, (tokens, heads * head_dim)."""
    numbers = torch.linspace(-2, 2, TOKENS * (sum(heads) + 2) * HEAD).sin()
    rows = numbers.to(dtype).view(TOKENS, -1)
    return rows[:, : heads[0] * HEAD], rows[:, heads[0] * HEAD : sum(heads) * HEAD]


@pytest.fixture
def as_vllm(calls):
    """A function that compares an answer of the plug-in with vLLM's own, and returns it."""

    def answer(rope, positions, *given, own="forward_native", **allowed):
        copies = [x.clone() for x in given]
        expected = getattr(own_of(rope), own)(rope, positions, *copies)
        calls.clear()
        results = rope(positions, *given)
        torch.testing.assert_close(results, tuple(expected), **allowed)
        assert len(calls) == 1
        return results

    return answer


def own_of(rope):
    """The class of vLLM that the class of an embedding stands for."""
    return type(rope).__mro__[1]


@pytest.mark.parametrize("named", [None, "", "other", "rotary_of_mine"])
def test_it_does_nothing_unless_it_is_named(vllm, monkeypatch, named):
    if named is None:
        monkeypatch.delenv("VLLM_PLUGINS")
    else:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    ropes = vllm()
    assert ropes.op_registry_oot == {}
    assert type(ropes.RotaryEmbedding(*PLAIN)).__module__ == ropes.__name__


def test_it_loads_nothing_of_vllm_unless_it_is_named(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    plugin.register()
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("is_half", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_q_and_k_are_rotated_in_place(vllm, as_vllm, is_half, dtype, index):
    rope = vllm().LinearScalingRotaryEmbedding(HEAD, 8, ROWS, 1e4, is_half, dtype)
    q, k = packed(dtype)
    positions = torch.tensor([3, 9, 63, 0, 7], dtype=index)
    results = as_vllm(rope, positions, q, k, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert results[0] is q
    assert results[1] is k


def test_q_alone_and_positions_of_a_batch(vllm, as_vllm):
    rope = vllm().RotaryEmbedding(*PLAIN)
    q = torch.ones(2, 3, 2 * HEAD)
    results = as_vllm(rope, torch.tensor([[0, 1, 2], [5, 6, 7]]), q)
    assert results[0] is q
    assert results[1] is None


def test_each_pair_of_m_rope_follows_its_axis(vllm, as_vllm):
    rope = vllm().MRotaryEmbedding(*PLAIN, mrope_section=[1, 1, 2])
    q, k = packed()
    before = q.clone()
    for positions in (torch.arange(5), torch.tensor([[0, 0, 0, 1, 2], [1, 5, 9, 1, 2], [7] * 5])):
        as_vllm(rope, positions, q, k)
    assert torch.equal(q, before)  # vLLM's class returns new tensors


def test_offsets_and_heads_of_deepseek(vllm, as_vllm):
    rope = vllm().DeepseekScalingRotaryEmbedding(HEAD, HEAD, ROWS, 1e4, False, torch.float32)
    xs = [x.view(TOKENS, -1, HEAD) for x in packed()]
    for offsets in ((), (torch.full((TOKENS,), 20),)):
        as_vllm(rope, torch.arange(TOKENS), *xs, *offsets)


@pytest.mark.parametrize("exact", ["0", "1"])
def test_long_rope_reads_the_rows_of_its_long_list(vllm, as_vllm, exact):
    vllm(exact)
    package = importlib.import_module(PACKAGE)
    for dtype in (torch.float32, torch.bfloat16):
        rope = package.Phi3LongRoPEScaledRotaryEmbedding(HEAD, HEAD, ROWS, dtype)
        close = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}
        as_vllm(rope, torch.arange(TOKENS), *packed(dtype), own="forward", **close)


@pytest.mark.parametrize("position", [-1, ROWS])
def test_a_position_of_m_rope_outside_the_table_is_an_error(vllm, position):
    rope = vllm().MRotaryEmbedding(*PLAIN, mrope_section=[1, 1, 2])
    with pytest.raises(ValueError, match=rf"position.* {position}"):
        rope(torch.tensor([[0, 1, 2, 3, 4], [5, 6, position, 8, 9], [0] * 5]), *packed())


def test_the_short_list_of_long_rope_ends_where_the_long_one_begins(vllm, as_vllm, monkeypatch):
    vllm()
    kind = importlib.import_module(PACKAGE).Phi3LongRoPEScaledRotaryEmbedding
    monkeypatch.setattr(kind, "use_long_rope", False)
    rope = kind(HEAD, HEAD, ROWS, torch.float32)
    q, k = packed()
    as_vllm(rope, torch.arange(TOKENS), q, k, own="forward")
    with pytest.raises(ValueError, match=r"position.* 8"):
        rope(torch.tensor([0, 1, 2, 3, 8]), q, k)


def test_a_prepared_call_takes_other_arrays_and_refuses_other_rows(vllm):
    rope = vllm().RotaryEmbedding(*PLAIN)
    positions = torch.arange(TOKENS)
    for heads in ((3, 2), (3, 2), (3, 5), (3, 2)):  # the same shapes with other strides: (3, 5)
        q, k = packed(heads=heads)
        k = k[:, : 2 * HEAD]
        expected = own_of(rope).forward_native(rope, positions, q.clone(), k.clone())
        torch.testing.assert_close(rope(positions, q, k), expected)
    before = q.clone()
    with pytest.raises(ValueError, match=f"positions run from 60 to 64, the tables have {ROWS}"):
        rope(positions + 60, q, k)
    assert torch.equal(q, before)


def test_registering_again_changes_nothing(vllm):
    ropes = vllm()
    registry = dict(ropes.op_registry_oot)
    plugin.register()
    assert ropes.op_registry_oot == registry


def test_the_class_of_another_plugin_stays(vllm, log):
    ropes = importlib.import_module(f"{PACKAGE}.ropes")
    theirs = type("Theirs", (ropes.RotaryEmbedding,), {"__module__": "theirs"})
    ropes.op_registry_oot["RotaryEmbedding"] = theirs
    vllm()
    assert ropes.op_registry_oot["RotaryEmbedding"] is theirs
    assert "RotaryEmbedding: theirs has replaced it" in log.text


def test_what_is_not_replaced_is_named(vllm, log):
    ropes = vllm()
    assert "LinearScalingRotaryEmbedding" in log.text.split("Not replaced")[0]
    for name, reason in {
        "FourierRotaryEmbedding": "it mixes frequencies",
        "TomorrowsRotaryEmbedding": "rotary does not know the forward of TomorrowsRotaryEmbedding",
        "DeepseekV4Sparse": "rotary does not know the forward of DeepseekV4Sparse",
    }.items():
        assert f"{name}: {reason}" in log.text
        assert name not in ropes.op_registry_oot


def test_the_list_of_classes_is_logged_where_vllm_sets_up_its_log_later(vllm, log):
    """vllm.LLM loads plug-ins before it gives its log a level."""
    with log.at_level(logging.WARNING, "vllm.plugins.rotary"):
        ropes = vllm()
    assert log.text == ""
    ropes.RotaryEmbedding(*PLAIN)
    listed, about = (each.getMessage() for each in log.records)
    assert listed.startswith("rotary replaces ")
    assert about.startswith("rotary rotates for RotaryEmbedding")


def test_a_class_with_another_argument_stays(vllm, monkeypatch, log):
    ropes = importlib.import_module(f"{PACKAGE}.ropes")

    def forward_cpu(self, positions, query, key=None, scale=None):
        return query, key

    monkeypatch.setattr(ropes.RotaryEmbedding, "forward_cpu", forward_cpu)
    vllm()
    assert "rotary does not know the argument scale of its forward_cpu" in log.text
    assert "RotaryEmbedding" not in ropes.op_registry_oot


def test_a_class_with_another_formula_is_left_alone(vllm, calls, log):
    rope = vllm().BailingMRotaryEmbedding(*PLAIN, mrope_section=[2, 1, 1])
    assert "stays: it is off from its own formula by" in log.text
    q, k = packed()
    positions = torch.tensor([[0, 0, 0, 1, 2], [1, 5, 9, 1, 2], [7] * 5])
    expected = own_of(rope).forward_native(rope, positions, q, k)
    calls.clear()
    for x, y in zip(rope(positions, q, k), expected, strict=True):
        assert torch.equal(x, y)
    assert calls == []


def test_a_call_that_is_not_known_is_vllms(vllm, calls, log):
    rope = vllm().MRotaryEmbedding(*PLAIN, mrope_section=[1, 1, 2])
    q, k = packed()
    calls.clear()
    expected = own_of(rope).forward_native(rope, torch.arange(5), q, k)
    for _ in range(2):
        results = rope(torch.arange(5), q, k, offsets=torch.ones(5))
        assert torch.equal(results[0], expected[0])
    rope(torch.arange(5), q.double(), k.double())
    assert calls == []
    assert log.text.count("vLLM's own code answers a call of MRotaryEmbedding") == 2


def test_exact_tables(vllm, log):
    """Right to 1.5e-7 where float32 angles are off by more, and kept in float32 beside bfloat16."""
    ropes, rows = vllm("1"), 70_000
    spec = rotary.Rotary(head_dim=HEAD, base=1e4, schedule="linear", params={"factor": 4.0})
    expected = np.concatenate(rotary.cos_sin(spec, np.arange(rows)), -1)
    for dtype in (torch.float32, torch.bfloat16):
        rope = ropes.LinearScalingRotaryEmbedding(HEAD, HEAD, rows, 1e4, True, dtype)
        table = rope.rotary_tables.whole
        assert table.dtype == torch.float32
        assert np.abs(table.numpy() - expected).max() <= 1.5e-7
        assert torch.equal(rope.cos_sin_cache, table.to(dtype))
        own = own_of(rope)._compute_cos_sin_cache(rope).numpy()
        assert np.abs(own - expected).max() > 2e-4
    assert "rotary rotates for LinearScalingRotaryEmbedding" in log.text
    assert "by exact tables" in log.text


def test_exact_tables_that_are_other_tables_are_not_taken(vllm, monkeypatch, log):
    ropes = importlib.import_module(f"{PACKAGE}.ropes")
    own = ropes.RotaryEmbedding._compute_cos_sin_cache

    def other_in_float64(self):
        table = own(self)
        return table * 1.01 if table.dtype == torch.float64 else table

    monkeypatch.setattr(ropes.RotaryEmbedding, "_compute_cos_sin_cache", other_in_float64)
    vllm("1")
    rope = ropes.RotaryEmbedding(*PLAIN)
    assert torch.equal(rope.cos_sin_cache, own(rope))
    assert "RotaryEmbedding keeps vLLM's tables" in log.text


def test_a_wrong_value_of_rotary_exact(vllm):
    with pytest.raises(ValueError, match=r"ROTARY_EXACT must be 0 .* or 1, got 'yes'"):
        vllm("yes")


def test_tables_follow_the_buffer_of_vllm(vllm, as_vllm):
    """A buffer that is written to, replaced or cast: never rows of the old one."""
    rope = vllm().RotaryEmbedding(*PLAIN[:-1], torch.bfloat16)
    positions = torch.arange(TOKENS)

    def changed(by):
        by()
        as_vllm(rope, positions, *packed(rope.cos_sin_cache.dtype), rtol=0, atol=2**-6)

    changed(lambda: rope.cos_sin_cache.copy_(rope.cos_sin_cache.flip(0)))
    changed(lambda: setattr(rope, "cos_sin_cache", rope.cos_sin_cache.roll(1, 0)))
    changed(lambda: rope.to(torch.float16))
    changed(lambda: rope.to(torch.float32))


def test_where_vllm_compiles_its_own_formula_the_log_says_so(vllm, log):
    ropes = importlib.import_module(f"{PACKAGE}.ropes")
    ropes.calls_native = True
    vllm()
    ropes.RotaryEmbedding(*PLAIN)
    assert "vLLM calls its own forward_native of RotaryEmbedding" in log.text
    assert "+rotary_embedding" in log.text


def test_it_is_traced_whole(vllm):
    rope = vllm().RotaryEmbedding(*PLAIN[:-1], torch.bfloat16)
    q, k = packed(torch.bfloat16)
    positions = torch.arange(TOKENS)
    expected = own_of(rope).forward_native(rope, positions, q.clone(), k.clone())
    compiled = torch.compile(lambda p, q, k: rope(p, q, k), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(positions, q, k), expected, rtol=0, atol=2**-6)


def test_the_entry_point_is_declared():
    text = (STAND_IN.parent.parent / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]' in text
    assert f'rotary = "{plugin.__name__}:{plugin.register.__name__}"' in text
