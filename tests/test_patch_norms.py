"""`patch` on models that normalize q and k right before they rotate: both in one pass."""

import ast
import contextlib
import copy
import functools
from types import MethodType

import pytest
import torch
from families import FAMILIES, LOCAL, distance, gradients, tiny_model, tokens
from torch import nn
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rotary.integrations import conventions, norms
from rotary.integrations.transformers import patch

pytestmark = pytest.mark.usefixtures("one_thread")

MIN_NUMBERS = norms.MIN_NUMBERS
BOTH = "half, with q_norm and k_norm"


@pytest.fixture
def fused_calls(monkeypatch):
    """(q, k) of each fused call; arrays of any size are fused."""
    calls, original = [], conventions.fused

    def fused(q, k, *args, **kwargs):
        calls.append((q, k))
        return original(q, k, *args, **kwargs)

    monkeypatch.setattr(conventions, "fused", fused)
    monkeypatch.setattr(norms, "MIN_NUMBERS", 1)
    return calls


def new_model(family, auto=AutoModelForCausalLM, **more):
    """A tiny model whose norms have weights of their own."""
    model = tiny_model(auto, family, **{**FAMILIES[family][0], **more})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def hidden(model, **more):
    result = model(tokens(), output_hidden_states=True, **more).hidden_states[-1]
    return result.as_subclass(torch.Tensor)


# --- the families ---


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "family",
    ["qwen3", "gemma3_text", "gemma4_text", "olmo2", "olmo3", "qwen3_moe", "qwen3_vl_text"],
)
def test_a_family_with_norms_gives_the_same_and_says_so(family, exact, fused_calls):
    model = new_model(family, AutoModel)
    before = hidden(model)
    with patch(model, exact=exact) as patched:
        after = hidden(model)
    assert {what for _, what in patched.patched} - {"exact tables"} == {BOTH}
    assert len(fused_calls) == (4 if family == "gemma4_text" else 2)  # it rotates q and k apart
    assert distance(after, before) < 1e-5
    assert torch.equal(hidden(model), before)


@pytest.mark.parametrize("family", ["glm4_moe", "exaone4", "cohere", "llama", "deepseek_v3"])
def test_a_family_without_norms_right_before_is_patched_as_before(family, fused_calls):
    model = new_model(family, AutoModel, **({"use_qk_norm": True} if family == "glm4_moe" else {}))
    before = hidden(model)
    with patch(model) as patched:
        assert not any("with" in what for _, what in patched.patched)
        assert distance(hidden(model), before) < 1e-5
    assert fused_calls == []


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_gradients_are_those_of_the_model(family, checkpointing, fused_calls):
    model = new_model(family).train()
    before = gradients(model)
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
    with patch(model):
        after = gradients(model)
    assert len(fused_calls) == (2 if checkpointing is None else 4)
    assert float(after["model.layers.0.self_attn.k_norm.weight"].abs().max()) > 0
    for name, grad in before.items():
        assert distance(after[name], grad) < 5e-5, name


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_generate_gives_the_same_tokens(family, fused_calls):
    model = new_model(family)
    arguments = {"max_new_tokens": 6, "do_sample": False,
                 "attention_mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 12])}  # fmt: skip
    before = model.generate(tokens(), **arguments)
    with patch(model):
        after = model.generate(tokens(), **arguments)
    assert torch.equal(before, after)
    assert {q.shape[-2] for q, _ in fused_calls} == {12, 1}


def test_torch_compile_sees_the_norms_and_our_operator(fused_calls, graphs):
    model = new_model("qwen3", use_cache=False)
    with torch.no_grad():
        before = model(tokens()).logits
        with patch(model):
            compiled = torch.compile(model, backend=graphs.record, fullgraph=True)
            after = compiled(tokens(), use_cache=False).logits
    assert distance(after, before) < 1e-5
    assert graphs.rotations() == 2
    assert fused_calls == []


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_bfloat16_is_at_least_as_good_as_before(family, fused_calls):
    model = new_model(family, num_hidden_layers=1, **LOCAL | {"layer_types": ["full_attention"]})
    wanted = hidden(model)
    model = model.to(torch.bfloat16)
    before = hidden(model)
    with patch(model):
        after = hidden(model)
    assert {q.dtype for q, _ in fused_calls} == {torch.bfloat16}
    assert after.dtype == torch.bfloat16
    assert (after - wanted).float().norm() <= 1.1 * (before - wanted).float().norm()


def test_few_numbers_are_normalized_by_the_model(fused_calls, monkeypatch):
    model = new_model("qwen3", AutoModel)
    before = hidden(model)
    monkeypatch.setattr(norms, "MIN_NUMBERS", MIN_NUMBERS)
    with patch(model):
        assert torch.equal(hidden(model), before)
    assert fused_calls == []
    monkeypatch.setattr(norms, "MIN_NUMBERS", 2 * 12 * 4 * 16)  # q has so many, k has half
    with patch(model):
        assert distance(hidden(model), before) < 1e-5
    assert len(fused_calls) == 2


def test_all_layers_share_one_function():
    model = new_model("qwen3")
    with patch(model):
        assert len({layer.self_attn.forward.__func__ for layer in model.model.layers}) == 1


# --- norms that are not what they seem ---


def hooked(norm):
    norm.seen = []
    norm.register_forward_hook(lambda module, args, y: module.seen.append(args[0].shape) or 2 * y)


def replaced(norm):
    norm.forward = lambda x: 3 * x


def of_another_dtype(norm):
    norm.weight.data = norm.weight.data.bfloat16()


def of_another_class(norm):
    norm.__class__ = type("Louder", (type(norm),), {"forward": lambda self, x: x * self.weight})


def of_a_class_that_calls_otherwise(norm):
    norm.__class__ = type("Loud", (type(norm),), {"__call__": lambda self, x: -self.forward(x)})


def parametrised(norm):
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())


def with_another_eps(norm):
    norm.variance_epsilon = 0.3


def with_eps_as_a_tensor(norm):
    norm.variance_epsilon = torch.tensor(0.3)


def of_a_tensor_class(norm):
    class Quantized(torch.Tensor):
        pass

    norm.weight = nn.Parameter(norm.weight.data.as_subclass(Quantized), requires_grad=False)


CHANGES = [
    hooked, replaced, of_another_dtype, of_another_class, of_a_class_that_calls_otherwise,
    parametrised, with_another_eps, with_eps_as_a_tensor, of_a_tensor_class,
]  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
def test_a_norm_that_was_changed_is_called_as_it_is(change, which, when, fused_calls):
    model = new_model("qwen3", AutoModel, num_hidden_layers=1)
    attention = model.layers[0].self_attn
    plain = hidden(model)
    other = copy.deepcopy(model)
    change(getattr(other.layers[0].self_attn, which))
    wanted = hidden(other)
    assert distance(wanted, plain) > 1e-3 or change in (of_a_tensor_class, of_another_dtype)
    if when == "before":
        change(getattr(attention, which))
    with patch(model):
        if when == "after":
            change(getattr(attention, which))
        assert distance(hidden(model), wanted) < 1e-5
        assert distance(hidden(model), wanted) < 1e-5
    if change is hooked:
        assert getattr(attention, which).seen == [(2, 12, 4 if which == "q_norm" else 2, 16)] * 2


def cast(module, q, k, v, mask, **options):
    """Attention that casts q and k to the dtype of v, as that of the flash_attn package does."""
    return sdpa_attention_forward(module, q.to(v.dtype), k.to(v.dtype), v, mask, **options)


def test_a_norm_that_returns_a_wider_dtype_is_computed_once(fused_calls):
    """Fine-tuning keeps norms in float32; their result looks like what could be left to fused."""
    AttentionInterface.register("cast", cast)
    model = new_model("qwen3", AutoModel, num_hidden_layers=1).to(torch.bfloat16)
    model.set_attn_implementation("cast")
    attention = model.layers[0].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        norm.float()
        norm.weight.data = torch.linspace(0.2, 3, 16)
    before = hidden(model)
    with patch(model):
        assert distance(hidden(model), before) < 2e-2
    assert fused_calls == []


def test_a_hook_that_removes_itself_is_called_once(fused_calls):
    model = new_model("qwen3", AutoModel, num_hidden_layers=1)
    norm = model.layers[0].self_attn.q_norm
    before = hidden(model)
    with patch(model):
        hook = norm.register_forward_hook(lambda *_: hook.remove())
        assert distance(hidden(model), before) < 1e-5


def test_a_class_whose_forward_was_replaced_is_tried_again(fused_calls, monkeypatch):
    model = new_model("qwen3", AutoModel, num_hidden_layers=1)
    kind = type(model.layers[0].self_attn.q_norm)
    with patch(model):
        hidden(model)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 3 * forward(self, x))
    before = hidden(model)
    for _ in range(2):
        with patch(model) as patched:
            assert distance(hidden(model), before) < 1e-5
        assert not any("with" in what for _, what in patched.patched)
    assert len(fused_calls) == 1


def test_what_is_no_rms_norm_is_not_taken_for_one():
    assert norms.rms_norm_of(nn.LayerNorm(8)) is None
    assert norms.rms_norm_of(nn.Identity()) is None
    assert norms.rms_norm_of(nn.RMSNorm(8)) is None  # its eps is that of the dtype
    assert norms.rms_norm_of(nn.RMSNorm((4, 8), eps=1e-6)) is None
    assert norms.rms_norm_of(nn.RMSNorm(8, eps=1e-6, elementwise_affine=False)) is None
    assert norms.rms_norm_of(nn.Linear(8, 8, bias=False)) is None
    assert norms.rms_norm_of(nn.RMSNorm(8, eps=1e-6)) == ("eps", False)
    assert norms.rms_norm_of("q_norm") is None


# --- code that is not what it seems ---

HEADS, SEQ, DIM = 4, 6, 16


class Attention(nn.Module):
    """Normalizes, rotates, and gives q and k."""

    def __init__(self, width=DIM):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.rotary_emb = Tables()
        with torch.no_grad():
            for norm in (self.q_norm, self.k_norm):
                norm.weight.normal_(generator=torch.Generator().manual_seed(3))

    def forward(self, q, k, rotates=True):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        cos, sin = self.rotary_emb(None, torch.arange(SEQ)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class Tables(nn.Module):
    def forward(self, x, position_ids):
        angles = position_ids[..., None] * 10_000.0 ** -(torch.arange(8) / 8)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


class Reads(Attention):
    def forward(self, q, k, rotates=True):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        more = q.square().sum()
        cos, sin = self.rotary_emb(None, torch.arange(SEQ)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q + more, k


class Scales(Attention):
    def forward(self, q, k, rotates=True):
        q = self.q_norm(q).transpose(1, 2) * 2
        k = self.k_norm(k).transpose(1, 2)
        cos, sin = self.rotary_emb(None, torch.arange(SEQ)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class Sometimes(Attention):
    def forward(self, q, k, rotates=True):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        cos, sin = self.rotary_emb(None, torch.arange(SEQ)[None])
        if rotates:
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class OnlyOne(Attention):
    def forward(self, q, k, rotates=True):
        q = self.q_norm(q).transpose(1, 2)
        k = k.transpose(1, 2)
        cos, sin = self.rotary_emb(None, torch.arange(SEQ)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class OtherAxes(Attention):
    def forward(self, q, k, rotates=True):
        q = self.q_norm(q.transpose(1, 2)).transpose(-1, -2).transpose(-1, -2)
        k = self.k_norm(k).transpose(1, 2)
        cos, sin = self.rotary_emb(None, torch.arange(SEQ)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class KeptAsWell(Attention):
    def forward(self, q, k, rotates=True):
        first = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        cos, sin = self.rotary_emb(None, torch.arange(SEQ)[None])
        q, k = apply_rotary_pos_emb(first, k, cos, sin)
        return q + first, k


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def renames(old, new):
    """As transformers from 5.24 on: `past_key_values` of every attention is `cache`."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate


class Renames(Attention):
    @decorated
    @renames("turns", "rotates")
    def forward(self, q, k, rotates=True):
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        cos, sin = self.rotary_emb(None, torch.arange(SEQ)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return (q, k) if rotates else (k, q)


class Hides(Attention):
    forward = decorated(Attention.forward)
    del forward.__wrapped__


FUSED = [Attention, Renames]
NOT_FUSED = [Reads, Scales, Sometimes, OnlyOne, OtherAxes, Hides]


@contextlib.contextmanager
def same_when_patched(module, *args, **kwargs):
    """Patches a module around the block, and then compares what it gives."""
    generator = torch.Generator().manual_seed(4)
    operands = [torch.randn(1, SEQ, heads, DIM, generator=generator) for heads in (HEADS, 2)]
    with torch.no_grad():
        before = module(*operands, *args, **kwargs)
        with patch(module) as patched:
            yield patched
            after = module(*operands, *args, **kwargs)
    for one, other in zip(after, before, strict=True):
        assert distance(one, other) < 1e-5


@pytest.mark.parametrize("kind", [*FUSED, *NOT_FUSED])
@pytest.mark.parametrize("rotates", [True, False])
def test_norms_move_only_where_nothing_else_reads_them(kind, rotates, fused_calls):
    with same_when_patched(kind(), rotates) as patched:
        assert patched.patched == [("", BOTH if kind in FUSED else "half")]
    assert len(fused_calls) == (kind in FUSED)


def test_a_decorator_does_what_it_did(fused_calls):
    module = Renames()
    with same_when_patched(module, turns=False):
        pass
    assert len(fused_calls) == 1
    assert module.forward.__func__ is Renames.forward


def test_what_is_read_after_the_rotation_too_is_right(fused_calls):
    """The name that is rotated is not the name that keeps the result."""
    with same_when_patched(KeptAsWell()):
        pass
    assert fused_calls == []


def test_tables_that_do_not_fit_leave_both_to_the_model(fused_calls):
    """float64 tables: the rotation is the model's, of arrays that its norms have seen."""
    module = Attention()
    make = module.rotary_emb.forward
    with same_when_patched(module):
        module.rotary_emb.forward = MethodType(
            lambda self, *args: [table.double() for table in make(*args)], module.rotary_emb
        )
    assert fused_calls == []


def test_two_norms_that_differ_in_eps_are_both_right(fused_calls):
    module = Attention()
    module.k_norm.eps = 0.5
    with same_when_patched(module):
        pass


def test_a_method_whose_source_has_changed_keeps_its_norms():
    method = Attention.forward
    changed = type(method)(Scales.forward.__code__, method.__globals__, "forward")
    changed.__code__ = changed.__code__.replace(co_firstlineno=method.__code__.co_firstlineno)
    with pytest.raises(ValueError, match="has been changed since its source was read"):
        norms.move_norms(changed, (("apply_rotary_pos_emb", 2),))
    exec("def forward(self, q, k):\n    return q", scope := {})
    with pytest.raises(ValueError, match="has no source that can be read"):
        norms.move_norms(scope["forward"], (("apply_rotary_pos_emb", 2),))


@pytest.mark.parametrize(("calls", "is_moved"), [
    ("view(shape).transpose(1, 2)", True),
    ("transpose(2, 1)", False),
    ("transpose(1, 2).transpose(1, 2)", False),
    ("transpose(1, 2).view(shape)", False),
    ("view(shape)", False),  # heads stay behind the tokens
    ("view(q.shape).transpose(1, 2)", False),
])  # fmt: skip
def test_a_norm_moves_past_known_calls_alone(calls, is_moved):
    site = norms._site(ast.parse(f"q = self.q_norm(q).{calls}").body, "q")
    assert (site is not None) == is_moved
