"""`rotary.from_model`: classes nobody knows, configs that are known, and where both disagree."""

import copy
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as attention  # noqa: E402

import rotary  # noqa: E402
from rotary import positions  # noqa: E402
from rotary.blackbox.forward import watch  # noqa: E402
from rotary.model import rotations  # noqa: E402

DIM, HEADS, WIDTH = 64, 4, 16


def ladder(base, width=WIDTH):
    return base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)


class Mixer(nn.Module):
    """An attention whose `swirl` the classes below write; `places` is (seq,) or (seq, axes)."""

    def __init__(self, places=None):
        super().__init__()
        self.stuff = nn.Linear(DIM, 3 * DIM)
        self.places = places

    def swirl(self, a, places):
        return a

    def forward(self, h):
        b, n, _ = h.shape
        a, c, e = self.stuff(h).view(b, n, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        places = torch.arange(n) if self.places is None else self.places
        a, c = self.swirl(a, places) * 0.25, self.swirl(c, places)
        return h + attention(a, c, e).transpose(1, 2).flatten(2)


class Bundle(nn.Module):
    def __init__(self, *mixers):
        super().__init__()
        self.letters = nn.Embedding(50, DIM)
        self.towers = nn.ModuleList(mixers)

    def forward(self, letters):
        h = self.letters(letters)
        for tower in self.towers:
            h = tower(h)
        return h


class ComplexTail(Mixer):
    """The last 8 channels, by a complex table made once; neighbours are pairs."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(99.0), ladder(3e4, 8))
        self.spinner = torch.polar(torch.ones_like(angles), angles)

    def swirl(self, a, places):
        kept, turned = a[..., :-8], a[..., -8:]
        z = torch.view_as_complex(turned.reshape(*turned.shape[:-1], 4, 2))
        return torch.cat([kept, torch.view_as_real(z * self.spinner[places]).flatten(-2)], -1)


class InPlace(Mixer):
    """Half layout, the first 8 channels, written over."""

    def swirl(self, a, places):
        a, angles = a.clone(), places[:, None] * ladder(1e5, 8)
        left, right = a[..., :4].clone(), a[..., 4:8].clone()
        a[..., :4] = left * angles.cos() - right * angles.sin()
        a[..., 4:8] = right * angles.cos() + left * angles.sin()
        return a


class MixedLayout(Mixer):
    """Reads neighbours, writes halves, and turns the other way."""

    def swirl(self, a, places):
        left, right = a[..., ::2], a[..., 1::2]
        angles = -places[:, None] * ladder(1e4)
        return torch.cat(
            [
                left * angles.cos() - right * angles.sin(),
                right * angles.cos() + left * angles.sin(),
            ],
            -1,
        )


class Matrices(Mixer):
    """Neighbours turned by 2 x 2 matrices and multiplied by 1.2."""

    def swirl(self, a, places):
        angles = places[:, None] * ladder(7e3)
        matrix = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1)
        pairs = a.unflatten(-1, (-1, 1, 2))
        return (1.2 * matrix.unflatten(-1, (2, 2)) * pairs).sum(-1).flatten(-2)


class Odd(Mixer):
    """A module of its own, whose method has an odd name, turns (batch, seq, heads, channels)."""

    def __init__(self):
        super().__init__()
        self.gadget = nn.Module()
        self.gadget.register_buffer("wobble", ladder(1e4) / 3)

    def swirl(self, a, places):
        a = a.transpose(1, 2)
        angles = (places[:, None] * self.gadget.wobble)[:, None]
        left, right = a.chunk(2, -1)
        turned = torch.cat([left * angles.cos() - right * angles.sin(),
                            right * angles.cos() + left * angles.sin()], -1)  # fmt: skip
        return turned.transpose(1, 2)


class Grid(Mixer):
    """Two axes: the first pairs by rows, the others by columns; unequal shares."""

    def swirl(self, a, places):
        rows, columns = places[:, :1] * ladder(1e4, 4), places[:, 1:] * ladder(1e4, 12)
        angles = torch.cat([rows, columns], -1)
        z = torch.view_as_complex(a.reshape(*a.shape[:-1], -1, 2))
        return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


R = rotary.Rotary
UNKNOWN = {
    "complex, trailing": (
        ComplexTail, R(16, rotary_dim=8, start=8, base=3e4, layout="interleaved")),
    "in place, leading": (InPlace, R(16, rotary_dim=8, base=1e5)),
    "mixed, clockwise": (MixedLayout, R(16, layout="interleaved", out_layout="half", sign=-1)),
    "linear, heads last": (Odd, R(16, schedule="linear", params={"factor": 3.0})),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_class_that_nobody_knows(name):
    torch.manual_seed(0)
    kind, spec = UNKNOWN[name]
    (found,) = rotations(Bundle(kind(), kind()))
    assert (found.spec, found.source, found.note) == (spec, "forward", "")
    assert found.modules == ("towers.0", "towers.1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_that_was_not_written_yet_is_not_looked_at(dtype):
    """It may hold what an earlier forward wrote, so that angles of two forwards are compared."""

    class Fills(nn.Module):
        def forward(self, x):
            out = x.new_empty(x.shape)
            old = torch.empty_like(x[..., :8])
            self.found = out.isnan().all() and old.isnan().all()
            out[..., :8] = x[..., :8]
            out[..., 8:] = turn(x[..., 8:])
            return out

    def turn(x):
        angles = torch.arange(6)[:, None, None] * ladder(1e4, 8)
        left, right = x.chunk(2, -1)
        return torch.cat([left * angles.cos() - right * angles.sin(),
                          right * angles.cos() + left * angles.sin()], -1)  # fmt: skip

    model, x = Fills(), torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(0))
    seen, error = watch(model, (x.to(dtype),), {}, 6)
    assert (error, bool(model.found)) == (None, True)
    assert (16, 8, 8, "half", "half") in {each.turned[:5] for each in seen}


def test_a_rotation_in_place_of_double_numbers():
    class Writes(nn.Module):
        def forward(self, x):
            angles = torch.arange(6.0)[:, None, None] * ladder(1e4)
            return torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(torch.exp(1j * angles))

    x = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(0)).double()
    (seen,), error = watch(Writes(), (x.clone(),), {}, 6)
    assert (error, seen.turned[:5]) == (None, (16, 16, 0, "interleaved", "interleaved"))
    np.testing.assert_array_equal(seen.x, x)


def test_matrices_with_an_amplitude_are_measured():
    torch.manual_seed(0)
    spec = rotary.from_model(Bundle(Matrices()))
    inv_freq, factor = rotary.inv_freq(spec)
    np.testing.assert_allclose(inv_freq, ladder(7e3).double(), rtol=3e-5)
    assert (spec.layout, pytest.approx(factor, rel=1e-5)) == ("interleaved", 1.2)


@pytest.mark.parametrize("scale", [0.25, 3**-0.5, 4.0])
def test_queries_that_are_scaled_before_they_are_rotated(scale):
    class Scaled(MixedLayout):
        def forward(self, h):
            a = self.stuff(h).view(*h.shape[:2], 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            places = torch.arange(h.shape[1])
            a, c = self.swirl(a[0] * scale, places), self.swirl(a[1], places)
            return h + attention(a, c, c).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    expected = R(16, layout="interleaved", out_layout="half", sign=-1)
    assert rotary.from_model(Bundle(Scaled())) == expected


def test_a_grid_with_a_class_token_in_front():
    torch.manual_seed(0)
    grid = positions.grid(5, 7)
    places = np.concatenate([np.zeros((1, 2), np.int64), grid])
    model = Bundle(Grid(torch.from_numpy(places)))
    letters = torch.randint(0, 50, (2, len(places)))
    spec = rotary.from_model(model, example=letters, positions=places)
    assert (spec.layout, spec.axes) == ("interleaved", (0, 0, 1, 1, 1, 1, 1, 1))
    expected = torch.cat([ladder(1e4, 4), ladder(1e4, 12)]).double()
    np.testing.assert_allclose(rotary.inv_freq(spec)[0], expected, rtol=1e-4)


def test_two_kinds_of_layers_are_two_rotations():
    torch.manual_seed(0)
    model = Bundle(InPlace(), ComplexTail(), Mixer(), InPlace())
    assert [each.modules for each in rotations(model)] == [("towers.0", "towers.3"), ("towers.1",)]
    with pytest.raises(ValueError, match=r"Bundle has 2 rotations: pass part=.*towers"):
        rotary.from_model(model)
    assert rotary.from_model(model, part="towers.1").start == 8


def test_the_model_is_left_as_it_was():
    model = Bundle(InPlace())
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rotary.from_model(model)
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Remembers(InPlace):
    """Overwrites a table through a view, replaces one and keeps a list of lengths it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 99, 4))
        self.register_buffer("latest", torch.zeros(1))
        self.tables = {}
        self.stuff = nn.LazyLinear(3 * DIM)

    def swirl(self, a, places):
        n = len(places)
        self.table[0, :n] = places[:, None] * ladder(1e5, 8)
        self.tables[n] = self.latest = self.kept = self.table[0, :n].clone()
        return super().swirl(a, places)


def test_tables_that_a_forward_writes_are_given_back():
    model = Bundle(Remembers())
    tower, table = model.towers[0], model.towers[0].table
    assert rotary.from_model(model) == R(16, rotary_dim=8, base=1e5)
    assert tower.table is table
    assert (tower.table.any(), tower.latest.tolist(), tower.tables) == (False, [0.0], {})
    assert not hasattr(tower, "kept")
    assert model(torch.arange(20)[None]).shape == (1, 20, DIM)  # the lazy layer is not half made


# --- what is refused ---


class Decaying(Mixer):
    """xPos: queries shrink with their position."""

    def swirl(self, a, places):
        angles, scale = places[:, None] * ladder(1e4), 0.98 ** places[:, None]
        z = torch.view_as_complex(a.reshape(*a.shape[:-1], -1, 2))
        return torch.view_as_real(z * torch.polar(scale, angles)).flatten(-2)


class Late(Mixer):
    def swirl(self, a, places):
        return rotary.apply(rotary.Rotary(WIDTH), a, positions=places + 5)


class Swapped(Mixer):
    """The rotation of a known class, but for a table of sines where the cosines belong."""

    def swirl(self, a, places):
        angles = places[:, None] * ladder(1e4)
        left, right = a.chunk(2, -1)
        return torch.cat([left * angles.sin() - right * angles.cos(),
                          right * angles.sin() + left * angles.cos()], -1)  # fmt: skip


class Squared(Mixer):
    def swirl(self, a, places):
        return rotary.apply(rotary.Rotary(WIDTH), a, positions=places**2)


class Failing(Mixer):
    def forward(self, h):
        raise RuntimeError("needs a picture\nand more")


REFUSED = {
    "nothing rotates": (Mixer, "no rotation was found in Bundle with 37 tokens"),
    "xPos": (Decaying, "no rotation was found in Bundle with 37 tokens"),
    "positions from 5": (Late, "towers.0 rotates, but a token at position 0 is already rotated"),
    "cos and sin": (Swapped, "towers.0 rotates, but .* as if its cos and sin were swapped"),
    "squares": (Squared, "towers.0 rotates, but its angles do not grow evenly"),
    "raises": (Failing, "forward raised RuntimeError: needs a picture; pass example="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    torch.manual_seed(0)
    kind, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        rotary.from_model(Bundle(kind()))


def test_arguments_that_are_refused():
    with pytest.raises(TypeError, match="model must be a torch module, got function"):
        rotary.from_model(ladder)
    with pytest.raises(ValueError, match="Linear has no embedding of tokens: pass example="):
        rotary.from_model(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="pass positions=, the position of each token"):
        rotary.from_model(nn.Linear(2, 2), example=torch.ones(3, 2))
    with pytest.raises(ValueError, match="positions= needs example="):
        rotary.from_model(nn.Linear(2, 2), positions=range(3))
    with pytest.raises(ValueError, match=r"positions must be \(seq,\) or \(seq, axes\)"):
        rotary.from_model(nn.Linear(2, 2), example=torch.ones(3, 2), positions=[[[1]]])


# --- where the config is known ---

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "head_dim": 16,
}  # fmt: skip


IS_OLD = transformers.__version__.startswith("4.")
DTYPE = "torch_dtype" if IS_OLD else "dtype"


def of_name(name):
    """A class of transformers; skips the test under a release that has none of this name."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def base_of(config):
    """What holds the base of a config; before transformers 5 it is the config itself."""
    return getattr(config, "rope_parameters", None) or vars(config)


def test_a_config_and_its_model_agree():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
            "original_max_position_embeddings": 1024}  # fmt: skip
    config = of_name("Qwen3Config")(**SIZES, rope_parameters=rope)
    (found,) = rotations(transformers.Qwen3ForCausalLM(config))
    assert (found.spec, found.source) == (rotary.from_hf_config(config), "config and forward")


@pytest.mark.parametrize("rotated", ["q", "k"])
def test_a_note_says_where_one_of_q_and_k_is_not_rotated(rotated, monkeypatch):
    llama = transformers.models.llama.modeling_llama
    rotate = llama.apply_rotary_pos_emb
    torch.manual_seed(0)
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    assert [each.note for each in rotations(model)] == [""]

    def one_of(q, k, cos, sin):
        return tuple(rotate(x, x, cos, sin)[0] if name == rotated else x
                     for name, x in (("q", q), ("k", k)))  # fmt: skip

    monkeypatch.setattr(llama, "apply_rotary_pos_emb", one_of)
    (found,) = rotations(model)
    assert found.note == "one array is rotated, not q and k, in layers.*.self_attn"


KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
LAYER_TYPES = {**SIZES, "num_hidden_layers": 3, "layer_types": KINDS}


def test_layer_types_of_a_config():
    config = of_name("Gemma3TextConfig")(**LAYER_TYPES)
    model = transformers.Gemma3TextModel(config)
    for kind in ("sliding_attention", "full_attention"):
        assert rotary.from_model(model, kind) == rotary.from_hf_config(config, kind)
    with pytest.raises(ValueError, match=r"has 2 rotations: .*layer_type='full_attention'"):
        rotary.from_model(model)


def test_layer_types_of_a_model_inside_of_another():
    config = of_name("Gemma3TextConfig")(**LAYER_TYPES)
    model = transformers.Gemma3ForCausalLM(config)
    alone = [(each.layer_type, each.spec, each.source) for each in rotations(model)]
    assert [kind for kind, *_ in alone] == ["sliding_attention", "full_attention"]
    outer = nn.Sequential(nn.ModuleList([nn.Identity(), nn.Sequential(model)]))
    outer.forward = lambda input_ids: model(input_ids)
    found = rotations(outer)
    assert [(each.layer_type, each.spec, each.source) for each in found] == alone
    assert found[0].modules == tuple(f"0.1.0.model.layers.{layer}.self_attn" for layer in (0, 1))
    assert found[1].modules == ("0.1.0.model.layers.2.self_attn",)


def test_what_attention_returns_may_be_rotated_back():
    """DeepSeek V4; its layer types have other names than the entries of its rope parameters."""
    torch.manual_seed(0)
    config = of_name("DeepseekV4Config")(
        vocab_size=99, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, q_lora_rank=16, num_experts_per_tok=2, n_routed_experts=4,
        o_groups=2, o_lora_rank=8, sliding_window=8, max_position_embeddings=256,
        layer_types=["sliding_attention", "heavily_compressed_attention"],
    )  # fmt: skip
    found = rotations(transformers.DeepseekV4ForCausalLM(config))
    assert [each.layer_type for each in found] == ["main", "compress"]
    for index, each in enumerate(found):
        layer = f"model.layers.{index}.self_attn"
        assert each.modules == (layer,)
        assert each.spec == rotary.from_hf_config(config, each.layer_type)
        assert each.note == (
            "another array is rotated back after q and k, in model.layers.*.self_attn"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma", "Olmoe", "NanoChat"])
def test_norms_of_16_bits_are_not_taken_for_rotations(name, dtype):
    """q before its norm, and residuals, are as near to a rotation as rounding may be at most."""
    torch.manual_seed(0)
    config = of_name(f"{name}Config")(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = transformers.AutoModel.from_config(config, **{DTYPE: dtype})
    for layer in model.layers:
        for norm in ("q_norm", "k_norm"):
            if getattr(getattr(layer.self_attn, norm, None), "weight", None) is not None:
                with torch.no_grad():
                    getattr(layer.self_attn, norm).weight.normal_(1, 0.04)
    assert rotary.from_model(model) == rotary.from_hf_config(config)


def test_frequencies_that_are_trained_are_warned_of_and_measured():
    """Mistral Large 4 multiplies its frequencies by exp(alpha), parameters of the model."""
    torch.manual_seed(0)
    sizes = {**INDEXED, "index_head_dim": 16, "index_topk": 4, "n_shared_experts": 1}
    del sizes["head_dim"], sizes["q_lora_rank"]
    config = of_name("MistralLarge4TextConfig")(**sizes)
    model = transformers.AutoModel.from_config(config)
    with pytest.warns(UserWarning, match="multiplies each frequency by a trained number"):
        spec = rotary.from_hf_config(config)
    learned = torch.tensor([0.0, 0.3, -0.2, 0.5])
    with torch.no_grad():
        model.rotary_emb.alpha.copy_(learned)
    found = rotary.from_model(model, part="layers.0.self_attn")
    wanted = rotary.inv_freq(spec)[0] * learned.double().exp().numpy()
    np.testing.assert_allclose(rotary.inv_freq(found)[0], wanted, rtol=2e-3)


def test_a_key_that_alone_is_rotated_back_is_a_fault(monkeypatch):
    llama = transformers.models.llama.modeling_llama
    rotate = llama.apply_rotary_pos_emb
    torch.manual_seed(0)
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))

    def opposed(q, k, cos, sin):
        return rotate(q, q, cos, sin)[0], rotate(k, k, cos, -sin)[0]

    monkeypatch.setattr(llama, "apply_rotary_pos_emb", opposed)
    with pytest.raises(ValueError, match=r"config and model disagree: .* and Rotary\(.*sign=-1\)"):
        rotations(model)


INDEXED = {**SIZES, "head_dim": None, "num_key_value_heads": 4, "kv_lora_rank": 16,
           "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
           "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "n_group": 1, "topk_group": 1, "index_head_dim": 32, "index_n_heads": 2}  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), [
    ("DeepseekV32", "half"), ("GlmMoeDsa", "interleaved"),
])  # fmt: skip
def test_an_indexer_has_a_rotation_of_its_own(name, layout):
    config = of_name(f"{name}Config")(**{key: value for key, value in INDEXED.items() if value})
    model = getattr(transformers, f"{name}Model")(config)
    spec = rotary.from_hf_config(config)
    outer, inner = sorted(rotations(model), key=lambda each: each.source)
    assert (outer.source, outer.spec) == ("config and forward", spec)
    assert outer.modules == ("layers.0.self_attn", "layers.1.self_attn")
    assert inner.source == "forward"
    assert "layers.1.self_attn.indexer" in inner.modules
    inside = inner.spec
    assert (inside.head_dim, inside.rotary_dim, inside.layout) == (32, 8, layout)
    np.testing.assert_allclose(rotary.inv_freq(inside)[0], rotary.inv_freq(spec)[0], rtol=1e-4)
    for rope in (module for module in model.modules() if hasattr(module, "inv_freq")):
        rope.inv_freq = rope.inv_freq / 2
    with pytest.raises(ValueError, match=r"self_attn.*: config and model disagree"):
        rotary.from_model(model)


def test_a_config_and_its_model_disagree():
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    base_of(model.config)["rope_theta"] = 7e4  # after the model was made
    with pytest.raises(ValueError, match=(
        r"layers.0.self_attn: config and model disagree: the config says Rotary\(head_dim=16, "
        r"base=70000.0\), but its forward rotates as Rotary\(head_dim=16\)"
    )):  # fmt: skip
        rotary.from_model(model)


def test_frequencies_that_a_cast_rounded():
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES)).bfloat16()
    with pytest.raises(ValueError, match=r"its frequencies were rounded to bfloat16, as model.to"):
        rotary.from_model(model)


def llama3(factor):
    return {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0,
        "original_max_position_embeddings": 32768}  # fmt: skip
# cos and sin of the model differ from those of its config by 0.098, 0.069 and 0.080
WRONG = {
    "llama3 by 8, not 32": (llama3(32.0), llama3(8.0), None),
    "YaRN without its amplitude": (YARN, YARN, 1.0),
    "an amplitude of 1.08": ({"rope_type": "default", "rope_theta": 1e4}, None, 1.08),
}


def in_16_bits(rope, dtype):
    """A Llama whose weights, and not its frequencies, are rounded to 16 bits."""
    if not hasattr(transformers.LlamaConfig(), "rope_parameters"):
        pytest.skip(f"transformers {transformers.__version__} has rope_scaling")
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 1, "hidden_size": 256, "head_dim": 128}
    model = transformers.LlamaModel(transformers.LlamaConfig(
        **sizes, max_position_embeddings=131072, rope_parameters=rope))  # fmt: skip
    exact = model.rotary_emb.inv_freq.clone()
    model = model.to(dtype)
    model.rotary_emb.inv_freq = exact
    return model


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in WRONG),  # the coarser one
     ("YaRN without its amplitude", torch.float16)],
)  # fmt: skip
def test_differences_of_some_percent_are_seen_in_16_bits(name, dtype):
    stated, real, amplitude = WRONG[name]
    assert rotary.from_model(in_16_bits(stated, dtype)).base == stated["rope_theta"]
    model = in_16_bits(real or stated, dtype)
    model.config.rope_parameters = transformers.LlamaConfig(rope_parameters=stated).rope_parameters
    model.rotary_emb.attention_scaling = amplitude or model.rotary_emb.attention_scaling
    with pytest.raises(ValueError, match="config and model disagree"):
        rotary.from_model(model)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def state_of(module):
    """What a module holds, as text; sets sorted, as a copy may list them in another order."""
    return {name: sorted(value) if isinstance(value, set) else repr(value)
            for name, value in vars(module).items()}  # fmt: skip


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("model_type", ["llama", "tomorrow"])
def test_frequencies_that_follow_the_length_are_left_as_they_were(rope, model_type):
    """The watched forward has positions beyond the length of training, the one after it fewer."""
    if not hasattr(transformers.LlamaConfig(), "rope_parameters"):
        pytest.skip(f"transformers {transformers.__version__} has rope_scaling")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=rope)
    model = transformers.LlamaModel(config).eval()
    ids = torch.randint(0, 99, (1, 100))
    with torch.no_grad():
        expected = copy.deepcopy(model)(ids).last_hidden_state
    config.model_type = model_type
    before = state_of(model.rotary_emb)
    assert rotations(model)[0].source == ("config and forward" if model_type == "llama" else
                                          "forward")  # fmt: skip
    assert state_of(model.rotary_emb) == before
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, expected)


def test_axes_are_measured_and_not_taken_from_the_config():
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    model = of_name("Qwen2VLTextModel")(of_name("Qwen2VLTextConfig")(**sizes, rope_parameters=rope))
    if not hasattr(model.rotary_emb, "mrope_section"):
        pytest.skip(f"transformers {transformers.__version__} has no such attribute")
    (found,) = rotations(model)
    assert (found.spec.axes, found.source) == ((0, 0, 0, 0, 1, 1, 2, 2), "config and forward")
    model.rotary_emb.mrope_section = [2, 2, 4]
    with pytest.raises(ValueError, match=(
        r"disagree: .*\[0, 0, 0, 0, 1, 1, 2, 2\].* rotates as .*=\[0, 0, 1, 1, 2, 2, 2, 2\]"
    )):  # fmt: skip
        rotations(model)
    (of_text,) = rotations(model, example=torch.randint(0, 99, (2, 37)))
    assert of_text.note.startswith("which pairs belong to which axis is not measured")


def test_a_model_type_that_is_not_known_is_measured():
    class TomorrowConfig(transformers.LlamaConfig):
        model_type = "tomorrow"

    config = TomorrowConfig(**SIZES)
    base_of(config)["rope_theta"] = 2e5
    (found,) = rotations(transformers.LlamaModel(config))
    assert (found.spec, found.source) == (rotary.Rotary(16, base=2e5), "forward")
    with pytest.raises(ValueError, match=(
        r"model_type 'tomorrow' is not known; .*rotary.from_model.*as_type='llama'.*rotary.Rotary"
    )):  # fmt: skip
        rotary.from_hf_config(config)
    assert rotary.from_hf_config(config, as_type="llama") == rotary.Rotary(16, base=2e5)


def test_weights_that_are_not_there_leave_the_config():
    with torch.device("meta"):
        model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES))
    (found,) = rotations(model)
    assert (found.spec, found.source) == (rotary.Rotary(16), "config")
    assert found.note == "its parameters are on the meta device"


def test_a_model_of_diffusers_without_weights_or_rotation_is_read_by_its_config():
    class ChromaTransformer2DModel(nn.Module):
        config = {"attention_head_dim": 24, "axes_dims_rope": (4, 8, 12)}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(24, 24)

        def forward(self, x):
            return self.proj(x)

    want = rotary.configs.from_diffusers_config(ChromaTransformer2DModel())
    with torch.device("meta"):
        (found,) = rotations(ChromaTransformer2DModel())
    assert (found.spec, found.source) == (want, "config")
    still = ChromaTransformer2DModel()
    with pytest.raises(ValueError, match=r"no rotation .* its config says Rotary\(head_dim=24, "):
        rotations(still, example=torch.ones(1, 2, 5, 24), positions=range(5))


# model -> arguments of its config; each has another layout, slice or place of the rotation
FAMILIES = {
    "Esm": {"position_embedding_type": "rotary", "mask_token_id": 3, "pad_token_id": 1},
    "DeepseekV3": {"head_dim": None, "kv_lora_rank": 16, "q_lora_rank": 16, "n_group": 1,
                   "n_routed_experts": 4, "topk_group": 1, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 32},
    "GPTNeoX": {},
    "GPTJ": {"n_embd": 64, "n_head": 4, "n_layer": 1, "rotary_dim": 8},
    "Glm4": {"pad_token_id": 1},
    "Phi": {},
    "Cohere": {},
    "Llama4Text": {"num_local_experts": 2, "interleaved_dimension": 1},
    "NanoChat": {},
    "Olmo3": {},
    "Qwen2VLText": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                        "mrope_section": [2, 3, 3]}},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers_agree_with_their_configs(name):
    sizes = {key: value for key, value in {**SIZES, **FAMILIES[name]}.items() if value}
    config = of_name(f"{name}Config")(**sizes)
    if name == "Esm" and IS_OLD:
        pytest.skip(f"the Esm of transformers {transformers.__version__} ignores position_ids")
    model = getattr(transformers, f"{name}Model")(config)
    found = rotations(model.eval())
    assert {each.source for each in found} == {"config and forward"}
    assert math.prod(len(each.modules) for each in found) > 0


def test_a_table_with_more_rows_than_the_vocabulary_is_not_that_of_the_tokens():
    model = transformers.LlamaModel(transformers.LlamaConfig(**SIZES)).eval()
    model.positions = nn.Embedding(1026, 8)
    (found,) = rotations(model)
    assert found.source == "config and forward"


def test_a_vision_model_with_class_and_register_tokens():
    sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers",
                                         "num_attention_heads")}  # fmt: skip
    config = of_name("DINOv3ViTConfig")(**sizes, image_size=32, patch_size=4, num_register_tokens=4)
    model = transformers.DINOv3ViTModel(config).eval()
    turns = 2 * math.pi * 2 / 8, 2 * math.pi * 2 / 12  # its config counts in radians of -1 .. 1
    patches = positions.grid(8, 12, origin="center", spacing=turns)
    where = np.concatenate([np.zeros((5, 2)), patches])
    (found,) = rotations(model, example=torch.randn(2, 3, 32, 48), positions=where)
    assert (found.spec, found.source) == (rotary.from_hf_config(config), "config and forward")


def test_layers_that_share_a_rope_are_one_also_where_their_measured_specs_differ_by_noise():
    """An attention factor that is measured differs in its tenth digit from layer to layer."""
    llama = pytest.importorskip("transformers.models.llama")
    if not hasattr(llama.LlamaConfig(), "rope_parameters"):
        pytest.skip(f"transformers {transformers.__version__} has rope_scaling")
    torch.manual_seed(0)
    scaling = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    config = llama.LlamaConfig(
        num_hidden_layers=3, hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=64, vocab_size=64, max_position_embeddings=256,
        rope_parameters=scaling,
    )  # fmt: skip
    model = llama.LlamaForCausalLM(config).eval()
    expected = rotary.inv_freq(rotary.from_model(model))
    model.config.model_type = "of nobody"
    (found,) = rotations(model)
    assert len(found.modules) == 3
    np.testing.assert_allclose(rotary.inv_freq(found.spec)[0], expected[0], rtol=1e-3)
    assert rotary.inv_freq(found.spec)[1] == pytest.approx(expected[1], rel=1e-6)
    assert rotary.from_model(model) == found.spec
