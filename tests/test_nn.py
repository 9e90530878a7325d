"""The torch module: nothing in it can be cast, saved or left empty."""

import copy
import io
import pickle

import pytest
import torch
from published import STEPS, scaled
from torch import Tensor, nn

import rotary
from rotary import Rotary
from rotary.nn import RotaryEmbedding

SPEC = Rotary(head_dim=64, base=5e5)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return draw(2, 4, 33, 64, dtype=dtype), draw(2, 1, 33, 64, seed=1, dtype=dtype)


def assert_equal(ours: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0)


def test_it_holds_nothing():
    module = RotaryEmbedding(SPEC)
    module(*heads())
    assert not list(module.parameters())
    assert not list(module.buffers())
    assert not module.state_dict()
    module.load_state_dict({}, strict=True)


def test_it_says_what_it_is():
    model = nn.Sequential(nn.Linear(2, 2), RotaryEmbedding(SPEC, precision="float32", seq_dim=-3))
    shown = (
        "(1): RotaryEmbedding(Rotary(head_dim=64, base=500000.0), precision='float32', seq_dim=-3)"
    )
    assert shown in str(model)
    assert str(RotaryEmbedding(SPEC)) == "RotaryEmbedding(Rotary(head_dim=64, base=500000.0))"


@pytest.mark.parametrize("spec", [64, None, {"head_dim": 64}])
def test_what_is_no_spec_is_refused_when_a_model_is_built(spec):
    with pytest.raises(TypeError, match="spec, the first argument, must be a Rotary, got"):
        RotaryEmbedding(spec)


def test_an_unknown_precision_is_refused_when_a_model_is_built():
    with pytest.raises(ValueError, match="precision must be 'exact' or 'float32', got 'fp32'"):
        RotaryEmbedding(SPEC, precision="fp32")


@pytest.mark.parametrize("seq_dim", ["a", 2.0, True, -1])
def test_an_axis_that_is_none_is_refused_when_a_model_is_built(seq_dim):
    with pytest.raises(
        ValueError, match=f"seq_dim must be the .* such as -2 or -3, got .?{seq_dim}"
    ):
        RotaryEmbedding(SPEC, seq_dim=seq_dim)


@pytest.mark.parametrize("precision", ["exact", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_apply(dtype, precision):
    q, k = heads(dtype)
    module = RotaryEmbedding(SPEC, precision=precision)
    assert_equal(module(q, k), rotary.apply(SPEC, q, k, precision=precision))
    assert_equal((module(q),), (rotary.apply(SPEC, q, precision=precision),))
    positions = torch.randint(0, 10**6, (2, 33), generator=torch.Generator().manual_seed(2))
    wanted = rotary.apply(SPEC, q, k, positions=positions, precision=precision)
    assert_equal(module(q, k, positions=positions), wanted)


def test_a_centred_grid_rotates_backwards_if_asked_to():
    where = torch.from_numpy(rotary.positions.grid(33, origin="center"))[:, 0]
    module, (q, k) = RotaryEmbedding(SPEC, seq_dim=-2), heads()
    wanted = rotary.apply(SPEC, q, k, positions=where, seq_dim=-2, allow_negative=True)
    assert_equal(module(q, k, positions=where, allow_negative=True), wanted)
    with pytest.raises(ValueError, match=r"positions must be >= 0, got -16.0; pass"):
        module(q, k, positions=where)


def test_the_sequence_may_come_before_the_heads():
    q, k = heads()
    wanted = [x.transpose(1, 2) for x in RotaryEmbedding(SPEC)(q, k)]
    ours = RotaryEmbedding(SPEC, seq_dim=-3)(q.transpose(1, 2), k.transpose(1, 2))
    assert_equal(ours, tuple(wanted))


def test_a_length_reaches_a_schedule_that_depends_on_it():
    spec = scaled("dynamic", 64, 4.0, 16)
    q, k = heads()
    module = RotaryEmbedding(spec)
    assert_equal(module(q, k, seq_len=64), rotary.apply(spec, q, k, seq_len=64))
    assert not torch.equal(module(q, seq_len=64), module(q, seq_len=16))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kept", [SPEC, RotaryEmbedding(SPEC, seq_dim=-3)], ids=["spec", "module"])
def test_a_checkpoint_with_it_is_loaded_without_running_code(kept):
    """Its pickle asked for `getattr`, which nobody should allow."""
    file = io.BytesIO()
    torch.save({"kept": kept}, file)
    file.seek(0)
    with torch.serialization.safe_globals([Rotary, RotaryEmbedding]):
        loaded = torch.load(file, weights_only=True)["kept"]
    assert str(loaded) == str(kept)
    assert getattr(loaded, "spec", loaded) == SPEC


def on_meta(module: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return RotaryEmbedding(module.spec).to_empty(device="cpu")


CHANGES = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.float16).to("cpu"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "meta": on_meta,
    "to meta and back": lambda m: m.to("meta").to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved,
    "state_dict": lambda m: m.load_state_dict(m.state_dict()) and m,
    "eval": lambda m: m.eval().requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_its_angles_survive_what_is_done_to_models(change):
    spec = scaled("llama3", 64, 8.0, 8192, STEPS, base=5e5)
    module = RotaryEmbedding(spec)
    q, k = heads()
    wanted = module(q, k)
    changed = CHANGES[change](module)
    assert isinstance(changed, RotaryEmbedding)
    assert changed.spec == spec
    assert_equal(changed(q, k), wanted)


# --- the two classes of the implementation notes, each replaced by one line ---


class RoPEPositionEmbedding(nn.Module):
    """The class of the notes for the paper's layout, as printed."""

    def __init__(self, dim: int, max_len: int = 512, base: int = 10000) -> None:
        super().__init__()
        self.theta = 1 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.theta = self.theta.repeat_interleave(2)
        self.position_ids = torch.arange(0, max_len)

    def forward(self, x: Tensor) -> Tensor:
        position_matrix = torch.outer(self.position_ids, self.theta)
        cos, sin = torch.cos(position_matrix), torch.sin(position_matrix)
        turned = torch.empty_like(x)
        turned[..., 0::2] = -x[..., 1::2]
        turned[..., 1::2] = x[..., 0::2]
        turned = turned * sin
        x = x * cos
        return x + turned


class HFRoPEPositionEmbedding(RoPEPositionEmbedding):
    """The class of the notes for the layout of transformers, as printed."""

    def __init__(self, dim: int, max_len: int = 512, base: int = 10000) -> None:
        super().__init__(dim, max_len, base)
        self.theta = 1 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.theta = torch.cat([self.theta, self.theta], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        position_matrix = torch.outer(self.position_ids, self.theta)
        cos, sin = torch.cos(position_matrix), torch.sin(position_matrix)
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        turned = torch.cat([-second, first], dim=-1)
        return x * cos + turned * sin


@pytest.mark.parametrize(
    ("copied", "layout"),
    [(RoPEPositionEmbedding, "interleaved"), (HFRoPEPositionEmbedding, "half")],
)
def test_one_line_replaces_a_copied_class(copied, layout):
    x = draw(2, 8, 512, 64)
    wanted = copied(64)(x)
    same = RotaryEmbedding(Rotary(head_dim=64, layout=layout), precision="float32")
    assert torch.equal(same(x), wanted)
    exact = RotaryEmbedding(Rotary(head_dim=64, layout=layout))(x)
    # float32 angles: off by half a unit of 511 x 2^-23, in each of two products
    torch.testing.assert_close(
        exact, wanted, rtol=0, atol=2 * 512 * 2.0**-23 * x.abs().max().item()
    )


# --- inside a model ---


class Block(nn.Module):
    """A small transformer block; `turn` is the rotation of its q and k."""

    def __init__(self, turn: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.qkv = nn.Linear(128, 3 * 128)
        self.out = nn.Linear(128, 128)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, seq, 3, 2, 64).permute(2, 0, 3, 1, 4)
        q, k = self.turn(parts[0], parts[1])
        mixed = nn.functional.scaled_dot_product_attention(q, k, parts[2], is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, seq, 128))


def block() -> Block:
    torch.manual_seed(0)
    return Block(RotaryEmbedding(SPEC))


class Recorded(RotaryEmbedding):
    """Keeps what went in and came out."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        result = super().forward(q, k)
        self.seen = (q, k), result
        return result


def test_autocast_leaves_the_angles_in_float32():
    model = Block(Recorded(SPEC))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(draw(2, 300, 128))
        direct = RotaryEmbedding(SPEC)(*heads())
    (q, k), turned = model.turn.seen
    assert q.dtype == torch.bfloat16
    with torch.autocast("cpu", enabled=False):
        single = rotary.apply(SPEC, q.float(), k.float())
    assert_equal(turned, tuple(x.bfloat16() for x in single))
    assert_equal(direct, rotary.apply(SPEC, *heads()))  # float32 stays float32


def test_a_block_learns_through_it():
    model, x = block(), draw(2, 16, 128)
    model(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0


def assert_compiles(backend: str, *lengths: int) -> None:
    torch._dynamo.reset()
    model = block()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seq in lengths:
        x, wanted = draw(2, seq, 128), model(draw(2, seq, 128))
        # fused sums are added in another order: a few units of 128 products
        torch.testing.assert_close(compiled(x), wanted, rtol=0, atol=128 * 2.0**-22)


def test_a_compiled_block_is_one_graph():
    assert_compiles("aot_eager", 16, 24, 40)


@pytest.mark.slow
def test_a_block_compiled_by_inductor():
    assert_compiles("inductor", 40)
