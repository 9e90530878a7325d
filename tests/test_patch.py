"""How `patch` gets into one model and out again, and what it must leave as it is."""

import copy
import io
import math
import pickle

import pytest
import torch
from families import GPTJ, LOCAL, TINY, distance, gradients, tiny_model, tokens
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.molmo2.modeling_molmo2 import Molmo2TextConfig, Molmo2TextModel

from rotary.integrations.transformers import patch, unpatch

pytestmark = pytest.mark.usefixtures("one_thread")


def new_model(family="llama", **more):
    return tiny_model(AutoModelForCausalLM, family, **more)


@torch.no_grad()
def logits(model, ids=None):
    return model(tokens() if ids is None else ids).logits


# --- one instance, and back ---


def test_another_model_of_the_family_is_not_touched(kernel_calls):
    code, function = modeling_llama.LlamaAttention.forward, modeling_llama.apply_rotary_pos_emb
    model, sibling = new_model(), new_model()
    before = logits(sibling)
    with patch(model):
        assert torch.equal(logits(sibling), before)
        assert kernel_calls == []
        logits(model)
        assert len(kernel_calls) == 2
        for attention in (layer.self_attn for layer in sibling.model.layers):
            assert "forward" not in vars(attention)
            assert attention.forward.__func__ is code
        later = new_model()
        logits(later)
        assert len(kernel_calls) == 2
    assert modeling_llama.LlamaAttention.forward is code
    assert modeling_llama.apply_rotary_pos_emb is function


def test_unpatch_restores_the_very_functions(kernel_calls):
    model = new_model()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    patched = patch(model, exact=True)
    assert "forward" in vars(model.model.layers[0].self_attn)
    assert "forward" in vars(model.model.rotary_emb)
    patched.unpatch()
    patched.unpatch()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    forward = model.model.layers[0].self_attn.forward
    assert forward.__func__ is modeling_llama.LlamaAttention.forward
    logits(model)
    assert kernel_calls == []


def test_an_error_inside_the_context_unpatches():
    model = new_model()

    def fail():
        with patch(model):
            assert "forward" in vars(model.model.layers[0].self_attn)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "forward" not in vars(model.model.layers[0].self_attn)


def test_what_cannot_be_patched_is_an_error_of_one_line():
    model = new_model()
    patch(model.model.layers[0]).unpatch()
    with patch(model):
        with pytest.raises(ValueError, match="patched already; call unpatch first"):
            patch(model)
        with pytest.raises(ValueError, match="patched already"):
            patch(model.model)
    with pytest.raises(ValueError, match="this model is not patched"):
        unpatch(model)
    with pytest.raises(ValueError, match="found no rotation to replace in Linear"):
        patch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model must be a torch module, got dict"):
        patch({})


def test_the_report_is_short_and_counts_layers():
    with patch(new_model(), exact=True) as patched:
        assert str(patched).splitlines() == [
            "patched  model.layers.*.self_attn (2): half",
            "patched  model.rotary_emb (1): exact tables",
        ]
        assert patched.patched[0] == ("model.layers.0.self_attn", "half")


def test_a_part_without_its_tables_checks_them(kernel_calls):
    model = new_model()
    before = logits(model)
    with patch(model.model.layers[0], exact=True) as patched:
        assert str(patched).splitlines() == [
            "patched  self_attn (1): half, checks its tables",
            "skipped  self_attn (1): keeps its tables: rotary does not know what makes them",
        ]
        assert distance(logits(model), before) < 1e-5
        assert len(kernel_calls) == 1


def test_a_deep_copy_of_a_patched_model_is_patched_for_itself(kernel_calls):
    model = new_model()
    before = logits(model)
    patch(model, exact=True)
    other = copy.deepcopy(model)
    assert other.model.layers[0].self_attn.forward.__self__ is other.model.layers[0].self_attn
    unpatch(model)
    assert kernel_calls == []
    assert distance(logits(other), before) < 1e-5
    assert len(kernel_calls) == 2
    unpatch(other)
    assert torch.equal(logits(other), before)


def test_a_pickled_model_comes_back_unpatched_and_can_be_patched(kernel_calls):
    model = new_model()
    before = logits(model)
    with patch(model):
        file = io.BytesIO()
        torch.save(model, file)
        again = [
            pickle.loads(pickle.dumps(model)),
            torch.load(file.seek(0) or file, weights_only=False),
        ]
    for other in again:
        assert torch.equal(logits(other), before)
        assert kernel_calls == []
        with patch(other):
            assert distance(logits(other), before) < 1e-5
        assert len(kernel_calls) == 2
        kernel_calls.clear()
        assert torch.equal(logits(other), before)


def test_state_dict_does_not_change():
    model = new_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with patch(model, exact=True):
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_later_change_of_the_model_file_is_seen(monkeypatch):
    seen = []

    def attention(module, query, key, value, *args, **kwargs):
        seen.append(module)
        return original(module, query, key, value, *args, **kwargs)

    original = modeling_llama.eager_attention_forward
    model = new_model(attn_implementation="eager")
    with patch(model):
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", attention)
        logits(model)
    assert len(seen) == 2


# --- what people do with models ---


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gptj"])
@pytest.mark.parametrize("exact", [False, True])
def test_generate_gives_the_same_tokens(family, exact, kernel_calls):
    more = {"gemma3_text": LOCAL, "gptj": GPTJ}
    model = new_model(family, **more.get(family, {}))
    arguments = {
        "max_new_tokens": 6,
        "do_sample": False,
        "attention_mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 12]),
    }
    before = model.generate(tokens(), **arguments)
    assert kernel_calls == []
    with patch(model, exact=exact):
        after = model.generate(tokens(), **arguments)
    assert torch.equal(before, after)
    assert len(kernel_calls) >= 2 * 6
    seq = -3 if family == "gptj" else -2
    assert {
        x.shape[seq] for xs in kernel_calls for x in (xs if isinstance(xs, tuple) else [xs])
    } == {
        12,
        1,
    }


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_gradients_are_those_of_the_model(family, checkpointing, kernel_calls):
    model = new_model(family).train()
    before = gradients(model)
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
    with patch(model):
        after = gradients(model)
    assert len(kernel_calls) == (2 if checkpointing is None else 4)
    for name, grad in before.items():
        assert distance(after[name], grad) < 2e-5, name


@pytest.mark.parametrize(
    ("family", "exact", "sizes"),
    [("llama", False, {"num_hidden_layers": 1}), ("gemma3_text", True, LOCAL)],
)
def test_torch_compile_sees_one_graph_with_our_operator(family, exact, sizes, graphs):
    model = new_model(family, **sizes, use_cache=False)
    before = logits(model)
    with patch(model, exact=exact):
        compiled = torch.compile(model, backend=graphs.record, fullgraph=True)
        with torch.no_grad():
            after = compiled(tokens(), use_cache=False).logits
    assert distance(after, before) < 1e-5
    assert graphs.rotations() == model.config.num_hidden_layers


def test_a_compiled_model_that_is_patched_later_uses_the_patch(graphs):
    model = new_model(use_cache=False, num_hidden_layers=1)
    compiled = torch.compile(model, backend=graphs.record)
    with torch.no_grad():
        before = compiled(tokens(), use_cache=False).logits
        assert graphs
        assert graphs.rotations() == 0
        with patch(model):
            after = compiled(tokens(), use_cache=False).logits
        assert graphs.rotations() > 0
    assert distance(after, before) < 1e-5


def test_all_layers_share_one_function_so_that_layers_compile_once(graphs):
    model = new_model(num_hidden_layers=3, use_cache=False)
    before = logits(model)
    with patch(model):
        forwards = {layer.self_attn.forward.__func__ for layer in model.model.layers}
        assert len(forwards) == 1
        for layer in model.model.layers:
            layer.compile(backend=graphs.record, fullgraph=True)
        assert distance(logits(model), before) < 1e-5
        assert len(graphs) == 1


@pytest.mark.slow
def test_inductor_gives_the_same():
    model = new_model(use_cache=False, num_hidden_layers=1)
    before = logits(model)
    torch.compiler.reset()
    with patch(model):
        model.model.layers[0].self_attn.compile()  # all that is ours to change
        assert distance(logits(model), before) < 1e-5


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", ["llama", "cohere", "olmo2", "gpt_neox"])
def test_bfloat16_is_at_least_as_good_as_before(family, exact, kernel_calls):
    model = new_model(family, num_hidden_layers=1)
    wanted = logits(model)
    model = model.to(torch.bfloat16)
    for name, module in model.named_modules():  # as from_pretrained(dtype=...) leaves it
        if name.endswith("rotary_emb"):
            module.inv_freq = new_model(family).get_submodule(name).inv_freq
    before = logits(model)
    with patch(model, exact=exact):
        after = logits(model)
    assert after.dtype == before.dtype == torch.bfloat16
    assert {xs[0].dtype for xs in kernel_calls} == {torch.bfloat16}
    assert (after - wanted).float().norm() <= 1.1 * (before - wanted).float().norm()


def test_exact_tables_heal_frequencies_that_were_cast_to_bfloat16():
    model = new_model()
    ids = torch.tensor([[100_000]])
    model.model.rotary_emb.to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    with patch(model, exact=True):
        cos, sin = model.model.rotary_emb(torch.zeros(1), ids)
    for pair in range(8):
        angle = 100_000 * 10_000.0 ** (-pair / 8)
        assert abs(float(cos[0, 0, pair]) - math.cos(angle)) < 2e-7
        assert abs(float(sin[0, 0, pair + 8]) - math.sin(angle)) < 2e-7


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_of_two_rotary_embeddings_in_one_place_all_are_exact_or_none(kind):
    """Molmo 2: one of them is scaled, and each layer gets the tables of one."""
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    config = Molmo2TextConfig(**TINY, head_dim=16, rope_parameters=rope, rope_scaling_layers=[1])
    model = Molmo2TextModel(config).eval()
    names = ["rotary_emb", "rotary_emb_unscaled"]
    model.rotary_emb_unscaled.rope_type = kind
    place = torch.tensor([[1_000_003]])
    hidden = torch.zeros(1, dtype=torch.float32)
    before = [model.get_submodule(name)(hidden, place)[0] for name in names]
    with patch(model, exact=True) as patched:
        after = [model.get_submodule(name)(hidden, place)[0] for name in names]
        if kind == "dynamic":
            assert [name for name, _ in patched.skipped] == names
            assert all(map(torch.equal, before, after))
            return
        assert patched.patched[-2:] == [(name, "exact tables") for name in names]
        for cos, factor in zip(after, (4.0, 1.0), strict=True):
            for pair in range(8):
                angle = 1_000_003 / factor * 1e4 ** (-pair / 8)
                assert abs(float(cos[0, 0, pair]) - math.cos(angle)) < 2e-7


def with_another_in_attention(**changes):
    """As in transformers before 4.48: attention has a rotary embedding that is not used."""
    model = new_model()
    for layer in model.model.layers:
        other = modeling_llama.LlamaRotaryEmbedding(model.config)
        layer.self_attn.rotary_emb = other
    for name, value in changes.items():
        setattr(other, name, value)
    return model


EVERY = [f"model.layers.{n}.self_attn.rotary_emb" for n in (0, 1)] + ["model.rotary_emb"]


@torch.no_grad()
def moved(model):
    """How much logits change with all positions, which are far enough for float32 angles."""
    far, near = (model(tokens(), position_ids=torch.arange(12)[None] + start).logits
                 for start in (1_000_003, 0))  # fmt: skip
    return distance(far, near)


def test_tables_of_the_model_are_exact_if_attention_has_unused_ones():
    model = with_another_in_attention()
    assert moved(model) > 1e-3
    with patch(model, exact=True) as patched:
        assert patched.patched[2:] == [(name, "exact tables") for name in EVERY]
        assert moved(model) < 1e-5


def test_tables_that_may_be_read_together_are_exact_together():
    """Layer 1 has two, of which one is not known; layer 0 may read the other."""
    model = with_another_in_attention(rope_type="dynamic")
    own = moved(model)
    with patch(model, exact=True) as patched:
        assert [name for name, _ in patched.skipped] == EVERY
        reasons = [reason for _, reason in patched.skipped]
        assert "depend on the length" in reasons[1]
        assert reasons[0] == reasons[2] == (
            f"keeps its own tables: so does {EVERY[1]}, which the same modules may read"
        )  # fmt: skip
        assert moved(model) == pytest.approx(own, rel=0.1)


class OldRotaryEmbedding(nn.Module):
    """As in older code: `patch` does not know how to call it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = [inner]

    def forward(self, x, *, places):
        return self.inner[0](x, places)


def test_no_table_is_exact_where_it_may_be_of_a_module_that_is_not_known():
    model = with_another_in_attention()
    kept = model.model.rotary_emb
    model.model.rotary_emb = OldRotaryEmbedding(kept)
    with patch(model, exact=True) as patched:
        assert {what for _, what in patched.patched} == {"half, checks its tables"}
        assert [name for name, _ in patched.skipped] == EVERY


def test_what_makes_and_reads_its_own_tables_hides_no_others():
    """Music Flamingo rotates its audio by such a module; its text has a rotary embedding."""

    class Audio(nn.Module):
        def __init__(self, text):
            super().__init__()
            self.text, self.rotary = text, OldRotaryEmbedding(None)

        def forward(self, x, cos, sin):
            return modeling_llama.apply_rotary_pos_emb(x, x, cos, sin)

    text = new_model()
    with patch(Audio(text), exact=True) as patched:
        assert [path for path, _ in patched.skipped] == ["rotary"]
        assert ("text.model.rotary_emb", "exact tables") in patched.patched
        assert moved(text) < 1e-5


def test_rotary_embeddings_in_a_module_of_their_own_are_found():
    model = new_model()

    class Places(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = nn.ModuleDict({"all": inner})

        def forward(self, x, position_ids=None, **more):
            return self.inner["all"](x, position_ids)

    model.model.rotary_emb = Places(model.model.rotary_emb)
    with patch(model, exact=True) as patched:
        assert patched.patched[2:] == [("model.rotary_emb.inner.all", "exact tables")]
        assert moved(model) < 1e-5


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tables_that_depend_on_the_length_stay_as_they_are(kind, kernel_calls):
    params = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        params.update(factors, original_max_position_embeddings=8)
    model = new_model(rope_parameters=params)
    before = logits(model)
    with patch(model, exact=True) as patched:
        assert distance(logits(model), before) < 1e-5
        ((name, reason),) = patched.skipped
        assert name == "model.rotary_emb"
        assert "depend on the length" in reason
    assert len(kernel_calls) == 2
    assert patched.patched[-1] == ("model.layers.1.self_attn", "half")


def test_tables_that_change_with_the_length_without_saying_so_stay(kernel_calls):
    """As LlamaDynamicNTKScalingRotaryEmbedding of older code, which has no rope_type."""

    class Growing(modeling_llama.LlamaRotaryEmbedding):
        def forward(self, x, position_ids):
            longest = position_ids.max() + 1
            if longest > 64:
                self.inv_freq = self.original_inv_freq / (longest / 64)
            return super().forward(x, position_ids)

    model = new_model()
    model.model.rotary_emb = Growing(model.config)
    with patch(model, exact=True) as patched:
        (skip,) = patched.skipped
        assert skip == (
            "model.rotary_emb",
            "keeps its own tables: its frequencies at position 512 are not inv_freq",
        )


def test_tables_that_ignore_the_number_of_positions_are_kept():
    """OmniGen's module returns the tables of the first row of positions alone."""

    class First(nn.Module):
        def __init__(self, inv_freq):
            super().__init__()
            self.register_buffer("inv_freq", inv_freq)

        def forward(self, x, position_ids):
            angles = torch.outer(position_ids[0].float(), self.inv_freq).repeat(1, 2)
            return angles.cos(), angles.sin()

    model = new_model()
    model.model.rotary_emb = First(model.model.rotary_emb.inv_freq)
    with patch(model, exact=True) as patched:
        assert patched.skipped == [
            ("model.rotary_emb", "keeps its own tables: could not be tried"),
        ]


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = new_model()
    with pytest.raises(ValueError, match=r"model\.rotary_emb is on the meta device"):
        patch(model)


def test_tables_that_are_no_rotation_are_skipped():
    """HunYuan-VL splits four axes over the doubled width, so the two channels of a pair differ."""
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}
    config = AutoConfig.for_model("hunyuan_vl_text", **TINY, head_dim=16, rope_parameters=sections)
    model = AutoModel.from_config(config).eval()
    with patch(model, exact=True) as patched:
        assert patched.patched == []
        assert {reason for _, reason in patched.skipped} == {
            "apply_rotary_pos_emb gets tables that may turn the two channels of a pair differently"
        }


def test_a_method_that_names_what_an_extension_has_is_searched_without_it():
    """Apertus names torch.classes.xielu.XIELU, and asking for it without the extension raises."""
    config = AutoConfig.for_model(
        "apertus", hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=128, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    before = logits(model)
    with patch(model) as patched:
        assert "self_attn (2): half" in str(patched)
        torch.testing.assert_close(logits(model), before)
