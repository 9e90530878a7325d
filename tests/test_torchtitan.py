"""The overrides for torchtitan, on small stand-ins of its classes.

tests/peers/in_torchtitan.py runs the same on torchtitan itself.
"""

from dataclasses import dataclass, fields
from types import SimpleNamespace

import numpy as np
import pytest
import stand_ins
import torch

import rotary

DIM, ROWS = 16, 64


class RoPE(torch.nn.Module):
    """What `torchtitan.models.common.rope.RoPE` offers to its subclasses."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dim: int
        max_seq_len: int
        theta: float = 10000.0
        scaling: str = "none"
        scaling_factor: float = 8.0
        low_freq_factor: float = 1.0
        high_freq_factor: float = 4.0
        original_max_position_embeddings: int = 8192
        rope_factor: float = 1.0
        beta_fast: float = 32.0
        beta_slow: float = 1.0
        original_seq_len: int = 4096
        truncate: bool = True

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.register_buffer("cache", self._precompute_cache(), persistent=False)

    def angles(self):
        inv_freq = self.config.theta ** -(torch.arange(0, self.config.dim, 2) / self.config.dim)
        return torch.outer(torch.arange(self.config.max_seq_len), inv_freq)

    def forward(self, query, key, positions=None):
        rows = self.cache[: query.shape[1]][None] if positions is None else self.cache[positions]
        return self.apply_rotary_emb(query, key, rows[:, :, None])


class CosSinRoPE(RoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        pass

    def _precompute_cache(self):
        if self.config.scaling == "llama":
            raise NotImplementedError("does not support Llama scaling")
        angles = torch.cat([self.angles()] * 2, -1)
        return torch.cat([angles.cos(), angles.sin()], -1)


class ComplexRoPE(RoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        pass

    def _precompute_cache(self):
        return torch.polar(torch.ones(()), self.angles())


REGISTERED = {}


def override(*, target, exact=False, description=""):
    assert exact  # subclasses have tables of another form
    return lambda factory: REGISTERED.setdefault(
        f"{factory.__module__}.{factory.__name__}", factory
    )


def derive(source, target, **others):
    return target(**{field.name: getattr(source, field.name) for field in fields(source)}, **others)


@pytest.fixture
def ours(monkeypatch):
    REGISTERED.clear()
    modules = {
        "torchtitan": {}, "torchtitan.config": {"override": override, "derive": derive},
        "torchtitan.models": {}, "torchtitan.models.common": {},
        "torchtitan.models.common.rope": {"CosSinRoPE": CosSinRoPE, "ComplexRoPE": ComplexRoPE},
    }  # fmt: skip
    return stand_ins.install(monkeypatch, modules, "rotary.integrations.torchtitan")


CASES = {"cos_sin_rope": (CosSinRoPE, "half"), "complex_rope": (ComplexRoPE, "interleaved")}


def built(name, ours, exact=False, **keys):
    stock, layout = CASES[name]
    config = REGISTERED[f"{ours.__name__}.{name}"](
        stock.Config(dim=DIM, max_seq_len=ROWS, **keys), exact=exact
    )
    module = {"half": ours.RotaryCosSinRoPE, "interleaved": ours.RotaryComplexRoPE}[layout]
    assert type(config) is module.Config
    return module(config), layout


def expected(x, positions, layout, **spec):
    """By complex numbers in float64: an independent formula."""
    inv_freq, factor = rotary.inv_freq(rotary.Rotary(head_dim=DIM, layout=layout, **spec))
    angles = np.asarray(positions)[..., None, None] * inv_freq
    x = np.asarray(x.detach(), np.float64)
    pairs = x.reshape(*x.shape[:-1], -1, 2) if layout == "interleaved" else np.stack(
        np.split(x, 2, -1), -1)  # fmt: skip
    turned = factor * (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    parts = [turned.real, turned.imag]
    return np.stack(parts, -1).reshape(x.shape) if layout == "interleaved" else np.concatenate(
        parts, -1)  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_override_rotates_as_the_formula(ours, name, exact):
    module, layout = built(name, ours, exact)
    q, k = torch.randn(2, 9, 4, DIM), torch.randn(2, 9, 2, DIM)
    positions = torch.tensor([[*range(9)], [*range(4), *range(5)]])
    for where, numbers in ((None, np.arange(9)), (positions, positions), (positions[1:],) * 2):
        for x, turned in zip((q, k), module(q, k, where), strict=True):
            np.testing.assert_allclose(turned, expected(x, numbers, layout), atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_dtypes_are_kept(ours, name):
    module, _ = built(name, ours)
    q, k = (torch.randn(1, 7, 2, DIM, dtype=torch.bfloat16, requires_grad=True) for _ in "qk")
    turned, other = module(q, k)
    assert turned.dtype == other.dtype == torch.bfloat16
    turned.backward(turned.detach())
    np.testing.assert_allclose(q.grad.float(), q.detach().float(), atol=0.05)  # R^T R = 1


SCALINGS = {
    "llama": {"schedule": "llama3", "params": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}},
    "yarn": {"schedule": "yarn", "params": {
        "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False, "attention_factor": 1.0}},
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_exact_table_has_the_scaling_of_the_config(ours, scaling):
    keys = {"rope_factor": 40.0, "truncate": False} if scaling == "yarn" else {}
    module, layout = built("complex_rope", ours, exact=True, scaling=scaling, **keys)
    q = torch.randn(1, ROWS, 1, DIM)
    turned, _ = module(q, q)
    wanted = expected(q, np.arange(ROWS), layout, **SCALINGS[scaling])
    np.testing.assert_allclose(turned, wanted, atol=1e-6)


def test_the_field_of_the_length_may_have_the_name_of_the_main_branch(ours):
    config = SimpleNamespace(dim=DIM, max_context_length=ROWS, theta=1e4, scaling="none")
    cos, sin = ours.exact_rows(config, "half")
    assert cos.shape == sin.shape == (ROWS, DIM // 2)


def test_heads_wider_than_the_table_are_refused(ours):
    module, _ = built("cos_sin_rope", ours)
    q = torch.randn(1, 3, 2, 2 * DIM)
    with pytest.raises(ValueError, match="rotary_dim"):
        module(q, q)


def test_a_scaling_that_is_not_known_is_refused(ours):
    with pytest.raises(ValueError, match="'none', 'llama' or 'yarn', got 'ntk': leave out exact"):
        built("complex_rope", ours, exact=True, scaling="ntk")
    with pytest.raises(NotImplementedError, match="Llama scaling"):  # torchtitan's own words
        built("cos_sin_rope", ours, exact=True, scaling="llama")


@pytest.mark.parametrize("name", CASES)
def test_a_table_on_the_meta_device_has_a_shape_alone(ours, name):
    with torch.device("meta"):
        module, _ = built(name, ours, exact=True)
    assert module.cache.is_meta
    assert module.cache.shape == built(name, ours)[0].cache.shape


def test_without_torchtitan_the_module_has_no_overrides(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plain = stand_ins.install(monkeypatch, {}, "rotary.integrations.torchtitan")
    assert not hasattr(plain, "cos_sin_rope")
