"""What `patch` concludes about a rotation function, and how it reaches the code that calls it."""
# ruff: noqa: E402

import functools
import inspect
import weakref
from types import MethodType, ModuleType

import pytest
import torch
from libraries import of_transformers
from torch import nn

of_transformers("transformers")  # its functions, of many models
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave as deepseek,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb as trailing
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as gpt_neox
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb as llama4
from transformers.models.nanochat.modeling_nanochat import apply_rotary_pos_emb as nanochat
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision as vision

from rotary.integrations import styles
from rotary.integrations.rotations import convention_of, conventions_of, replacement_of
from rotary.integrations.transformers import patch, unpatch

pytestmark = pytest.mark.usefixtures("one_thread")

# function -> style, layout, out_layout, clockwise, where a narrower table turns, new_axis, promotes
CONVENTIONS = {
    cohere: ("repeat", "interleaved", "interleaved", False, None, "unsqueeze_dim", False),
    deepseek: ("first", "interleaved", "half", False, None, "unsqueeze_dim", True),
    glm: ("first", "interleaved", "interleaved", False, "leading", "unsqueeze_dim", True),
    gpt_neox: ("halves", "half", "half", False, "leading", "unsqueeze_dim", True),
    gpt_oss: ("half", "half", "half", False, None, "unsqueeze_dim", True),
    gptj: ("half", "interleaved", "interleaved", False, None, -2, True),
    llama: ("halves", "half", "half", False, None, "unsqueeze_dim", True),
    llama4: ("complex", "interleaved", "interleaved", False, None, -2, False),
    nanochat: ("halves", "half", "half", True, None, "unsqueeze_dim", True),
    olmo2: ("halves", "half", "half", False, None, "unsqueeze_dim", False),
    trailing: ("half", "interleaved", "interleaved", False, "trailing", "unsqueeze_dim", False),
    vision: ("halves", "half", "half", False, None, -2, False),
}


def name_of(function):
    return function.__module__.rpartition("_")[2] if callable(function) else str(function)


@pytest.mark.parametrize("function", CONVENTIONS, ids=name_of)
def test_the_convention_of_a_function_of_transformers(function):
    convention = convention_of(function)
    names = ("style", "layout", "out_layout", "clockwise", "start", "new_axis", "promotes")
    assert tuple(getattr(convention, name) for name in names) == CONVENTIONS[function]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seq", [1, 7])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_call_of_llama_is_the_same_to_the_rounding_of_its_dtype(dtype, seq, rows):
    ours = replacement_of(llama, convention_of(llama))
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, seq, 4, 16, generator=random).to(dtype)
    k = torch.randn(2, seq, 2, 16, generator=random).to(dtype)
    angles = torch.randn(rows, seq, 8, generator=random).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for views in ((q.transpose(1, 2), k.transpose(1, 2), cos, sin), (q, k, cos, sin, 2)):
        wanted = llama(*[x.double() if torch.is_tensor(x) else x for x in views])
        for x, exact in zip(ours(*views), wanted, strict=True):
            assert x.dtype == dtype
            assert (x - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


CONVENTION = convention_of(llama)._replace(
    parameters=("q", "k", "cos", "sin", "unsqueeze_dim", "position_ids"),
    defaults={"unsqueeze_dim": 1, "position_ids": None},
)


@pytest.mark.parametrize(
    "case", ["float64", "queries shorter", "odd width", "keyword", "ranks", "batches"]
)
def test_a_call_that_does_not_fit_goes_to_the_function_itself(case):
    seen = []

    def function(q, k, cos, sin, unsqueeze_dim=1, position_ids=None):
        seen.append((q, k, cos, sin, unsqueeze_dim, position_ids))
        return "its own result"

    ours = replacement_of(
        function, CONVENTION._replace(defaults={"unsqueeze_dim": 1, "position_ids": None})
    )
    q, k, cos = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 3, 16), torch.ones(1, 3, 16)
    extra = {}
    if case == "float64":
        q, k = q.double(), k.double()
    elif case == "queries shorter":
        q = q[:, :, -1:]
    elif case == "odd width":
        cos = cos[..., :15]
    elif case == "keyword":
        extra["position_ids"] = torch.arange(3)
    elif case == "ranks":
        q = q[0]
    elif case == "batches":
        q = q.repeat(2, 1, 1, 1)
    assert ours(q, k, cos, sin=cos, **extra) == "its own result"
    ((*_, seen_cos, unsqueeze_dim, positions),) = seen
    assert seen_cos is cos
    assert (unsqueeze_dim, positions) == (1, extra.get("position_ids"))


@pytest.mark.parametrize("keeps_dtype", [False, True])
def test_wrong_arguments_raise_what_the_function_raises(keeps_dtype):
    ours = replacement_of(llama, convention_of(llama), keeps_dtype=keeps_dtype)
    x = torch.ones(1, 1, 1, 4)
    for args, kwargs in (((x, x), {}), ((x,) * 6, {}), ((x, x, x, x), {"q": x}), ((), {"y": x})):
        with pytest.raises(TypeError) as theirs:
            llama(*args, **kwargs)
        with pytest.raises(TypeError) as mine:
            ours(*args, **kwargs)
        assert str(mine.value) == str(theirs.value)


def test_wider_tables_promote_as_they_did_unless_they_are_ours():
    q, k, cos = (
        torch.ones(1, 4, 3, 16).bfloat16(),
        torch.ones(1, 2, 3, 16).bfloat16(),
        torch.ones(1, 3, 16),
    )
    assert llama(q, k, cos, cos)[0].dtype == torch.float32
    assert replacement_of(llama, convention_of(llama))(q, k, cos, cos)[0].dtype == torch.float32
    exact = replacement_of(llama, convention_of(llama), keeps_dtype=True)
    assert exact(q, k, cos, cos)[0].dtype == torch.bfloat16
    short = exact(q[:, :, :1], k, cos[:, :1].expand(1, 3, 16), sin=cos)  # goes to llama, narrowed
    assert {x.dtype for x in short} == {torch.bfloat16}


@pytest.mark.parametrize("how", ["in place", "in inference mode", "by .data"])
def test_tables_that_are_written_are_read_again(how):
    """Torch counts what is written in place, but not in inference mode, nor by .data."""
    ours = replacement_of(llama, convention_of(llama))
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    with torch.inference_mode(how == "in inference mode"):
        cos, sin = torch.ones(1, 3, 16), torch.zeros(1, 3, 16)
        assert torch.equal(ours(q, k, cos, sin)[0], q)
        if how == "by .data":
            cos.data = 2 * cos
        else:
            cos.mul_(2)
        assert torch.equal(ours(q, k, cos, sin)[0], 2 * q)
        cos = 3 * cos  # another tensor, perhaps at the address of the last one
        assert torch.equal(ours(q, k, cos, sin)[0], 6 * q)


def test_copies_of_tables_are_not_kept_while_a_graph_is_captured(monkeypatch):
    """The graph must make them again: its tables may change from one run to the next."""
    cos, sin = torch.ones(1, 3, 16), torch.zeros(1, 3, 16)
    shape = (1, 4, 3, 16)
    kept = styles.prepared("halves", (cos, sin), 1, shape)
    monkeypatch.setattr(styles, "is_capturing", lambda x: True)
    made = styles.prepared("halves", (cos, sin), 1, shape)
    monkeypatch.undo()
    again = styles.prepared("halves", (cos, sin), 1, shape)
    assert made[0].data_ptr() != kept[0].data_ptr() == again[0].data_ptr()


def test_prepared_tables_die_with_the_tables_of_the_model():
    ours = replacement_of(llama, convention_of(llama))
    q, k, cos = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.ones(1, 3, 16)
    ours(q, k, cos, sin=cos.clone())
    ((_, _, (prepared, _)),) = vars(cos)["_rotary_prepared"].values()
    gone = weakref.ref(prepared)
    del prepared, cos
    assert gone() is None


def test_gradients_flow_into_tables():
    ours = replacement_of(llama, convention_of(llama))
    q, k, angles = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 3, 8)
    grads = []
    for function in (llama, ours):
        leaf = angles.clone().requires_grad_()
        wide = leaf.repeat(1, 1, 2)
        sum(x.square().sum() + x.sum() for x in function(q, k, wide.cos(), wide.sin())).backward()
        grads.append(leaf.grad)
    assert torch.allclose(*grads, atol=1e-4)


def shears(q, k, cos, sin):
    return q * cos + k * sin, k * cos


def scales(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(1.0001 * x for x in llama(q, k, cos, sin, unsqueeze_dim))


def ignores_axis(q, k, cos, sin, unsqueeze_dim=1):
    return llama(q, k, cos, sin, 1)


def forgets_key(q, k, cos, sin):
    return llama(q, k, cos, sin)[0]


def in_place(q, k, cos, sin):
    for x, y in zip((q, k), llama(q, k, cos, sin), strict=True):
        x.copy_(y)
    return q, k


def test_a_function_that_writes_to_its_arguments_is_refused():
    """The code that calls it may read q and k afterwards."""
    with pytest.raises(ValueError, match="writes to q or k"):
        convention_of(in_place)


@pytest.mark.parametrize("function", [shears, scales, ignores_axis, forgets_key])
def test_what_is_almost_a_rotation_is_refused(function):
    with pytest.raises(ValueError, match=r"no rotation|does not know"):
        convention_of(function)


@pytest.mark.parametrize(
    "function", [lambda x: x, lambda q, k, v, cos, sin: q, lambda q, k, cos, sin, position_ids: q]
)
def test_other_signatures_are_refused_by_name(function):
    with pytest.raises(ValueError, match=r"takes \(.*\), not x or q, k and then cos, sin"):
        convention_of(function)


# --- the code that calls it ---


def apply_rotary(q, k, cos, sin, unsqueeze_dim=1):
    return gpt_oss(q, k, cos, sin, unsqueeze_dim)


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls_seen.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


calls_seen = []


class Plain(nn.Module):
    def forward(self, q, k, cos, sin, *, twice=False):
        """Rotates, twice if asked."""
        for _ in range(1 + twice):
            q, k = apply_rotary(q, k, cos, sin)
        return q, k


class Wrapped(Plain):
    @logged
    @torch.no_grad()
    def forward(self, q, k, cos, sin, *, twice=False):
        return apply_rotary(q, k, cos, sin)


class Helper(Plain):
    def turn(self, *args):
        return apply_rotary(*args)

    def forward(self, *args):
        return self.turn(*args)


class Inner(Plain):
    def forward(self, q, k, cos, sin):
        return next(apply_rotary(q, k, c, s) for c, s in [(cos, sin)])


class Inherits(Plain):
    def forward(self, *args):
        assert super().forward is not None
        return apply_rotary(*args)


class Super(Plain):
    @torch.no_grad()
    def forward(self, *args):
        return super().forward(*args)


class ByName(Plain):
    def forward(self, *args):
        return Plain.forward(self, *args)


class Static(nn.Module):
    @staticmethod
    def turn(*args):
        return apply_rotary(*args)

    def forward(self, *args):
        return self.turn(*args)


class Stored(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = apply_rotary

    def forward(self, *args):
        return self.turn(*args)


apply_rotary_part = functools.partial(apply_rotary, unsqueeze_dim=1)


class Turn:
    def __call__(self, q, k, cos, sin, unsqueeze_dim=1):
        return apply_rotary(q, k, cos, sin, unsqueeze_dim)


apply_rotary_object = Turn()


class Partial(Plain):
    def forward(self, *args):
        return apply_rotary_part(*args)


class Object(Plain):
    def forward(self, *args):
        return apply_rotary_object(*args)


class Shared(Plain):
    def apply_rotary(self):
        return None

    def forward(self, *args):
        self.apply_rotary()
        return apply_rotary(*args)


def operands():
    random = torch.Generator().manual_seed(0)
    angles = torch.randn(1, 3, 8, generator=random)
    q, k = (torch.randn(1, h, 3, 16, generator=random) for h in (4, 2))
    return q, k, angles.cos(), angles.sin()


L = ModuleType("layers")
L.apply_rotary = apply_rotary
L.deep = ModuleType("layers.deep")
L.deep.apply_rotary = apply_rotary


class ThroughModule(Plain):
    def forward(self, *args):
        return L.apply_rotary(*args)


class ThroughPackage(Plain):
    def forward(self, *args):
        return [L.deep.apply_rotary(*each) for each in (args,)][0]  # noqa: RUF015


class ThroughModuleAndItself(Plain):
    def apply_rotary(self):
        return None

    def forward(self, *args):
        self.apply_rotary()
        return L.apply_rotary(*args)


class Imports(Plain):
    def forward(self, *args):
        from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as turn

        return turn(*args)


class ImportsInside(Plain):
    def forward(self, *args):
        def turn():
            from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb

            return apply_rotary_pos_emb(*args)

        if len(args) < 4:  # neither of these is there
            from nowhere import rotate_all  # noqa: F401

            from ..nowhere import rotate_any  # noqa: F401
        return turn()


def test_a_module_is_given_its_functions_and_a_second_name():
    before = L.apply_rotary
    with patch(ThroughModule()):
        assert L.apply_rotary is before
        assert L._rotary_apply_rotary.__wrapped__ is before


REACHED = [Plain, Wrapped, Helper, Inner, Inherits, ThroughModule, ThroughPackage, Imports,
           ImportsInside, Partial, Object]  # fmt: skip


@pytest.mark.parametrize("kind", REACHED)
def test_the_call_is_reached_wherever_the_class_makes_it(kind, kernel_calls):
    module, sibling = kind(), kind()
    before = module(*operands())
    with patch(module) as patched:
        assert patched.patched == [("", "half")]
        after = module(*operands())
        assert len(kernel_calls) == 1
        sibling(*operands())
        assert len(kernel_calls) == 1
        assert inspect.signature(module.forward) == inspect.signature(sibling.forward)
        assert module.forward.__doc__ == sibling.forward.__doc__
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(after, before, strict=True))
    assert vars(module).keys() == vars(sibling).keys()
    module(*operands())
    assert len(kernel_calls) == 1


def test_keyword_defaults_are_kept(kernel_calls):
    module = Plain()
    with patch(module):
        module(*operands(), twice=True)
        module(*operands())
    assert len(kernel_calls) == 3


def test_decorators_still_run(kernel_calls):
    module = Wrapped()
    with patch(module):
        calls_seen.clear()
        q, k, cos, sin = operands()
        assert not module(q.requires_grad_(), k, cos, sin)[0].requires_grad
    assert calls_seen == ["forward"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Super, "is called by Plain.forward, which Super.forward overrides"),
        (ByName, "is called by Plain.forward, which ByName.forward overrides"),
        (Static, "is called by turn, which takes no module"),
        (Stored, "is kept by Stored.__init__"),
        (Shared, "is also the name of an attribute in the code that calls it"),
        (ThroughModuleAndItself, "is also the name of an attribute in the code that calls it"),
    ],
)
def test_what_cannot_be_replaced_in_one_module_is_skipped(kind, reason, kernel_calls):
    module = kind()
    before = module(*operands())
    with patch(module) as patched:
        assert (patched.patched, patched.skipped) == ([], [("", f"apply_rotary {reason}")])
        assert all(map(torch.equal, module(*operands()), before))
    assert kernel_calls == []


def turning(interleaved):
    def turned(x, cos, sin):
        u, v = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        both = u * cos - v * sin, v * cos + u * sin
        return torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)

    def apply_rotary_either(q, k, cos, sin):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return turned(q, cos, sin), turned(k, cos, sin)

    return apply_rotary_either


apply_rotary_first, apply_rotary_second = turning(False), turning(True)


class First(nn.Module):
    def forward(self, *args):
        return apply_rotary_first(*args)


class Second(nn.Module):
    def forward(self, *args):
        return apply_rotary_second(*args)


def test_two_functions_of_one_name_in_one_file_do_not_replace_each_other(kernel_calls):
    one, other = First(), Second()
    before = one(*operands()), other(*operands())
    with patch(one), patch(other):
        after = one(*operands()), other(*operands())
    assert len(kernel_calls) >= 2
    for x, y in zip(before, after, strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(x, y, strict=True))


def test_a_wrapper_that_keeps_the_method_calls_the_original_after_unpatch(kernel_calls):
    module = Plain()
    patch(module)
    module._profiled = module.forward
    module.forward = lambda *args: module._profiled(*args)
    unpatch(module)
    module(*operands())
    assert kernel_calls == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_default_dtypes_change_no_conclusion(dtype):
    convention_of.cache_clear()
    conventions_of.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), patch(Plain()) as patched:
            assert patched.patched == [("", "half")]
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_forward_that_somebody_replaced_is_left_alone(kernel_calls):
    module = Plain()
    module.forward = MethodType(lambda self, *args: None, module)
    mine = module.forward
    with patch(module) as patched:
        ((_, reason),) = patched.skipped
        assert reason == "apply_rotary is called by a forward that was replaced before"
    assert module.forward is mine


def test_a_forward_under_the_hooks_of_accelerate_is_patched_beneath_them(kernel_calls):
    """accelerate keeps the method in `_old_forward` and calls it from a forward of its own."""
    module = Plain()
    module._old_forward = module.forward
    hooked = module.forward = functools.partial(
        lambda self, *args: self._old_forward(*args), module
    )
    with patch(module):
        module(*operands())
        assert len(kernel_calls) == 1
    assert module.forward is hooked
    assert module._old_forward == MethodType(Plain.forward, module)
    module(*operands())
    assert len(kernel_calls) == 1
    with pytest.raises(ValueError, match="not patched"):
        unpatch(module)
