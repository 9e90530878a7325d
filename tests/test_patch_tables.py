"""`patch` where no module says how its tables hold the pairs, as in many models of diffusers."""

import pytest
import torch
from torch import nn

from rotary.integrations.rotations import convention_of
from rotary.integrations.styles import agrees_twice, full_width
from rotary.integrations.transformers import patch

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, SEQ, HEADS, WIDTH = 2, 5, 3, 16


# --- rotation functions in the forms of diffusers ---


def rotate_complex(x, freqs):
    """Lumina 2 and Qwen-Image; the first of them has tables in complex128."""
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * freqs.unsqueeze(1)).flatten(-2).type_as(x)


def rotate_by_matrices(q, k, freqs_cis):
    """HiDream and the first code of Flux."""
    both = (x.float().unflatten(-1, (-1, 1, 2)) for x in (q, k))
    columns = freqs_cis.unsqueeze(1).unbind(-1)
    turned = (columns[0] * x[..., 0] + columns[1] * x[..., 1] for x in both)
    return tuple(x.flatten(-2).type_as(q) for x in turned)


def rotate_pairs(x, rope):
    """Of one row with all heads, as in LTX."""
    cos, sin = rope
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def rotate_halves(x, rotary_emb):
    cos, sin = (table[:, None, :].to(x.dtype) for table in rotary_emb)
    width = cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return torch.cat((x[..., :width] * cos + turned * sin, x[..., width:]), dim=-1)


def rotate_by_choice(x, freqs_cis, use_real=True, use_real_unbind_dim=-1):
    if not use_real:
        return rotate_complex(x, freqs_cis)
    cos, sin = freqs_cis
    if use_real_unbind_dim == -1:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos[:, None] + turned.float() * sin[:, None]).to(x.dtype)


class Attention(nn.Module):
    """Its query is learned, so that there is a gradient."""

    def __init__(self, *shape):
        super().__init__()
        self.query = nn.Parameter(random(*shape))
        self.key = nn.Parameter(random(*shape) + 1)


class ByComplex(Attention):
    def forward(self, freqs):
        return rotate_complex(self.query, freqs), rotate_complex(self.key, freqs)


class ByMatrices(Attention):
    def forward(self, freqs_cis):
        return rotate_by_matrices(self.query, self.key, freqs_cis)


class ByPairs(Attention):
    def forward(self, rope):
        return rotate_pairs(self.query, rope), rotate_pairs(self.key, rope)


class ByHalves(Attention):
    def forward(self, rotary_emb):
        return rotate_halves(self.query, rotary_emb), rotate_halves(self.key, rotary_emb)


class ByChoice(Attention):
    def forward(self, tables, **choice):
        return rotate_by_choice(self.query, tables, **choice), rotate_by_choice(self.key, tables)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tables(style, *shape):
    angles = random(*shape)
    made = full_width(style, angles.cos(), angles.sin())
    return made[0] if len(made) == 1 else made


HEADS_LAST = (BATCH, SEQ, HEADS, WIDTH)
FORMS = {
    "complex": (ByComplex(*HEADS_LAST), tables("complex", SEQ, 8), "interleaved"),
    "complex128": (ByComplex(*HEADS_LAST), tables("complex", SEQ, 8).to(torch.complex128),
                   "interleaved"),
    "matrices": (ByMatrices(BATCH, HEADS, SEQ, WIDTH), tables("matrix", BATCH, SEQ, 8),
                 "interleaved, checks its tables"),
    "pairs": (ByPairs(BATCH, SEQ, WIDTH), tables("repeat", BATCH, SEQ, 8),
              "interleaved, checks its tables"),
    "halves": (ByHalves(*HEADS_LAST), tables("halves", SEQ, 6), "half, checks its tables"),
    "choice": (ByChoice(*HEADS_LAST), tables("repeat", SEQ, 8),
               "half and interleaved, checks its tables"),
}  # fmt: skip


def outputs_and_gradients(model, argument, **choice):
    model.zero_grad()
    outputs = model(argument, **choice)
    sum((x.float() * random(*x.shape)).sum() for x in outputs).backward()
    return [*outputs, *[each.grad for each in model.parameters()]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_and_gradients_are_those_of_the_model(form, dtype, kernel_calls):
    model, argument, report = FORMS[form]
    model = model.to(dtype)
    before = outputs_and_gradients(model, argument)
    with patch(model) as patched:
        assert patched.patched == [("", report)]
        assert patched.skipped == []
        after = outputs_and_gradients(model, argument)
        assert len(kernel_calls) == (1 if form == "matrices" else 2)
    for ours, theirs in zip(after, before, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, rtol=0, atol=32 * torch.finfo(dtype).eps)
    assert all(map(torch.equal, outputs_and_gradients(model, argument), before))
    model.float()


@pytest.mark.parametrize("form", ["matrices", "pairs", "halves", "choice"])
def test_tables_that_are_no_rotation_are_left_to_the_model(form, kernel_calls):
    """The value in another place belongs to the other channel of the pair."""
    model, argument, _ = FORMS[form]
    argument = argument.clone() if form == "matrices" else tuple(x.clone() for x in argument)
    with patch(model), torch.no_grad():
        model(argument)
        is_replaced = len(kernel_calls)
        (argument if form == "matrices" else argument[0])[..., -1] += 0.5  # after it was checked
        ours = model(argument)
        assert is_replaced
        assert len(kernel_calls) == is_replaced
    assert all(map(torch.equal, ours, model(argument)))


def test_the_arguments_of_a_call_choose_the_rotation(kernel_calls):
    model = FORMS["choice"][0]
    for style, unbound in (("repeat", -1), ("halves", -2)):
        argument = tables(style, SEQ, 8)
        before = model(argument, use_real_unbind_dim=unbound)
        with patch(model):
            after = model(argument, use_real_unbind_dim=unbound)
        assert torch.allclose(after[0], before[0], atol=1e-6)
    assert len(kernel_calls) == 3  # the key by pairs of neighbours from halves is no rotation


def test_learned_tables_keep_their_gradients(kernel_calls):
    model = FORMS["pairs"][0]
    leaf = tuple(table.requires_grad_() for table in tables("repeat", BATCH, SEQ, 8))
    gradients = []
    for context in (patch(model), torch.enable_grad()):
        with context:
            gradients.append(torch.autograd.grad(sum(x.sum() for x in model(leaf)), leaf))
    assert all(map(torch.equal, *gradients))
    assert kernel_calls == []


@pytest.mark.parametrize("form", FORMS)
def test_a_compiler_records_the_model_as_it_is_or_our_rotation(form):
    model, argument, _ = FORMS[form]
    before = model(argument)
    with patch(model):
        after = torch.compile(model, backend="eager", fullgraph=True)(argument)
    torch.compiler.reset()
    for ours, theirs in zip(after, before, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_inference_tensors_are_compared_at_each_call(kernel_calls):
    model = FORMS["pairs"][0]
    with torch.inference_mode(), patch(model):
        argument = tuple(x.clone() for x in tables("repeat", BATCH, SEQ, 8))
        model(argument)
        assert len(kernel_calls) == 2
        argument[1][..., 0] += 0.5  # torch counts no writes to these
        model(argument)
        assert len(kernel_calls) == 2


def test_what_is_held_twice_is_compared_in_every_style():
    for style in ("halves", "repeat", "matrix"):
        made = full_width(style, *(random(SEQ, 8).cos(), random(SEQ, 8).sin()))
        assert agrees_twice(style, made)
        assert not agrees_twice(style, [each + random(*each.shape) for each in made])
    cos, sin = full_width("repeat", random(SEQ, 8), random(SEQ, 8) + 1)
    assert agrees_twice("repeat", [torch.cat((sin, cos), -1)])  # as timm joins them
    assert not agrees_twice("halves", [torch.cat((sin, cos), -1)])
    assert not agrees_twice("matrix", [random(SEQ, 8)])


def test_float64_tables_are_read_only_if_the_result_has_the_dtype_of_x():
    assert convention_of(rotate_complex).narrows

    def rotate_widening(x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    assert not convention_of(rotate_widening).narrows
