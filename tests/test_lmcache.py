"""Keys of LMCache moved by rerotate, on small stand-ins of its modules.

tests/peers/in_lmcache.py runs the same on LMCache itself, with the tables of vLLM.
"""

import logging
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import stand_ins
import torch

import rotary
from rotary import Rotary

HEAD, ROWS = 16, 4096
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
SPECS = {
    "default": Rotary(head_dim=HEAD),
    "interleaved": Rotary(head_dim=HEAD, layout="interleaved"),
    "partial": Rotary(head_dim=HEAD, rotary_dim=8),
    "partial interleaved": Rotary(head_dim=HEAD, rotary_dim=4, layout="interleaved"),
    "yarn": Rotary(head_dim=HEAD, schedule="yarn", params=YARN),
    "linear": Rotary(head_dim=HEAD, schedule="linear", params={"factor": 8.0}),
}
OLD, NEW = torch.tensor([3, 900, 17, 0]), torch.tensor([2000, 5, 18, 4095])


class DeviceOps:
    def rotary_embedding_k_fused(self, *arguments):
        raise AssertionError("LMCache's own operator ran")

    rotary_embedding_k_fused_strided = rotary_embedding_k_fused


@pytest.fixture
def host(monkeypatch):
    """Our module, and the stand-ins of LMCache's that it changes."""
    names = ("lmcache.v1", "lmcache.v1.compute", "lmcache.v1.compute.models")
    stock = {"get_fused_rope": lambda *arguments, **options: "LMCache's own"}
    modules = {"lmcache": {"device_ops": DeviceOps()}, **{name: {} for name in names},
               "lmcache.v1.compute.positional_encoding": stock,
               "lmcache.v1.compute.models.base": stock}  # fmt: skip
    ours = stand_ins.install(monkeypatch, modules, "rotary.integrations.lmcache")
    import lmcache

    yield SimpleNamespace(
        ours=ours, ops=lmcache.device_ops, rope=lmcache.v1.compute.positional_encoding,
        models=lmcache.v1.compute.models.base)  # fmt: skip
    ours.uninstall()


def table(spec, dtype=torch.float32):
    return torch.cat(rotary.cos_sin(spec, torch.arange(ROWS)), -1).to(dtype)


def keys_at(spec, keys, positions):
    return rotary.apply(spec, keys[None], positions=positions, seq_dim=-3)[0]


@pytest.mark.parametrize("name", SPECS)
def test_installed_operators_move_keys_in_place(host, name):
    spec, keys = SPECS[name], torch.randn(4, 2, HEAD)
    cached, wanted = keys_at(spec, keys, OLD), keys_at(spec, keys, NEW)
    host.ours.install(spec)
    is_neox = spec.layout == "half"
    moved = cached.clone()
    host.ops.rotary_embedding_k_fused(OLD, NEW, moved, HEAD, table(spec), is_neox)
    torch.testing.assert_close(moved, wanted, atol=2e-6, rtol=0)
    with_values = torch.cat([cached, keys], -1)
    host.ops.rotary_embedding_k_fused_strided(
        OLD, NEW, with_values, HEAD, 2 * HEAD, table(spec), is_neox)  # fmt: skip
    assert torch.equal(with_values, torch.cat([moved, keys], -1))
    mover = host.models.get_fused_rope(
        HEAD, HEAD, ROWS, spec.base, is_neox_style=is_neox, rope_scaling={"any": 1})  # fmt: skip
    assert torch.equal(mover(OLD, NEW, cached.reshape(4, -1)), moved.reshape(4, -1))


@pytest.mark.parametrize("name", SPECS)
def test_the_table_alone_moves_as_far_as_it_is_exact(host, name):
    spec, keys = SPECS[name], torch.randn(4, 2, HEAD)
    moved, wanted = keys_at(spec, keys, OLD), keys_at(spec, keys, NEW)
    host.ours.rotary_embedding_k_fused(OLD, NEW, moved, HEAD, table(spec), spec.layout == "half")
    torch.testing.assert_close(moved, wanted, atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_moves_by_the_table_keep_the_length_of_a_pair(host, dtype):
    spec, rng = SPECS["yarn"], np.random.default_rng(0)
    key = torch.randn(1, 1, HEAD, dtype=torch.float64).float()
    length, positions = key.norm(), [0, *rng.integers(ROWS, size=999).tolist(), 0]
    rows = table(spec, dtype)
    for old, new in pairwise(positions):
        where = torch.tensor([old]), torch.tensor([new])
        host.ours.rotary_embedding_k_fused(*where, key, HEAD, rows, True)
    assert abs(key.norm() / length - 1) < 2e-4  # a product of 1000 roundings of 1.94e-7


def test_only_the_rows_of_the_tokens_are_converted(host):
    rows = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16).expand(2**45, 2)  # of one row's memory
    key = torch.tensor([[[3.0, 4.0]]])
    host.ours.rotary_embedding_k_fused(torch.tensor([0]), torch.tensor([2**44]), key, 2, rows, True)
    assert key.tolist() == [[[3.0, 4.0]]]


@pytest.mark.parametrize("row", [-1, ROWS])
@pytest.mark.parametrize("is_old", [True, False])
def test_a_position_that_is_no_row_of_the_table_is_refused(host, row, is_old):
    """Of -1 it read the last row."""
    positions = torch.tensor([row]), torch.tensor([2])
    key, spec = torch.ones(1, 2, HEAD), SPECS["default"]
    with pytest.raises(ValueError, match=f"positions run from {row} to {row}.* {ROWS} rows"):
        host.ours.rotary_embedding_k_fused(
            *positions[:: 1 if is_old else -1], key, HEAD, table(spec), True)  # fmt: skip
    assert (key == 1).all()


def test_no_tokens_stay_no_tokens(host):
    none, spec = torch.zeros(0, dtype=torch.long), SPECS["default"]
    assert host.ours.KeyMover(spec)(none, none, torch.zeros(0, 3 * HEAD)).shape == (0, 3 * HEAD)
    key = torch.zeros(0, 3, HEAD)
    host.ours.rotary_embedding_k_fused(none, none, key, HEAD, table(spec), True)


def test_uninstall_gives_everything_back(host):
    stock = dict(vars(host.ops)), host.rope.get_fused_rope, host.models.get_fused_rope
    host.ours.install(SPECS["yarn"])
    host.ours.install(SPECS["linear"])
    assert host.ops.rotary_embedding_k_fused.__self__.spec == SPECS["linear"]
    host.ours.uninstall()
    assert (dict(vars(host.ops)), host.rope.get_fused_rope, host.models.get_fused_rope) == stock


def test_what_does_not_fit_the_spec_is_refused(host):
    ours, key = host.ours, torch.zeros(4, 2, HEAD)
    ours.install(SPECS["default"])
    fused = host.ops.rotary_embedding_k_fused
    with pytest.raises(ValueError, match=r"key must be \(tokens, heads, 16\), got \(4, 32\)"):
        fused(OLD, NEW, key.flatten(1), HEAD, table(SPECS["default"]), True)
    with pytest.raises(ValueError, match="16 channels in interleaved layout, the spec 16 in half"):
        fused(OLD, NEW, key, HEAD, table(SPECS["default"]), False)
    with pytest.raises(ValueError, match="server rotates 8 channels, the spec 16: install the"):
        fused(OLD, NEW, key, HEAD, table(SPECS["partial"]), True)
    with pytest.raises(ValueError, match=r"the server has base 500000.0, the spec 10000.0"):
        host.rope.get_fused_rope(HEAD, HEAD, ROWS, 500_000.0)
    with pytest.raises(ValueError, match="cos_sin_cache has 16 columns, more than head_size 8"):
        ours.rotary_embedding_k_fused(OLD, NEW, key[..., :8], 8, table(SPECS["default"]), True)
    with pytest.raises(TypeError, match="spec must be a Rotary, got dict"):
        ours.install({})
    with pytest.raises(ValueError, match="one position a token, the spec 2 axes"):
        ours.install(Rotary(head_dim=4, axes=(0, 1)))


def test_the_plug_in_acts_only_where_it_is_named(host, monkeypatch, tmp_path, log):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}')
    monkeypatch.setenv("ROTARY_CONFIG", str(config))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    host.ours.register()
    assert "rotary_embedding_k_fused" not in vars(host.ops)
    monkeypatch.setenv("VLLM_PLUGINS", "lora,rotary_lmcache")
    with log.at_level(logging.INFO, "lmcache.rotary"):
        host.ours.register()
    assert "rotary moves the keys of LMCache, by Rotary(head_dim=16" in log.text
    assert host.ops.rotary_embedding_k_fused.__self__.spec.head_dim == 16
    monkeypatch.delenv("ROTARY_CONFIG")
    with pytest.raises(ValueError, match=r"needs ROTARY_CONFIG, the config.json of the model"):
        host.ours.register()
