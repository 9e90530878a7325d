"""Errors about a wrong value are one short line, also where the value is large."""

import numpy as np
import pytest

import rotary
from rotary import Rotary, positions
from rotary.plan import recommend
from rotary.reach import reach
from rotary.words import MOST, brief, nearest

SPEC, X = Rotary(8), np.ones((2, 3, 4, 8), np.float32)
NUMBERS = np.random.default_rng(0).standard_normal((3, 40, 7))
WRONG = {
    "an array": (NUMBERS, "a numpy.ndarray of shape (3, 40, 7)"),
    "arrays": ((NUMBERS, NUMBERS), "a tuple of a numpy.ndarray of shape (3, 40, 7), ..."),
    "a dict of arrays": ({"a": NUMBERS}, "..."),
    "a long list": (list(range(5000)), "..."),
    "a long text": ("x" * 3000, "..."),
}
CALLS = {
    **{name: lambda wrong, name=name: Rotary(**{"head_dim": 8, name: wrong})
       for name in ("head_dim", "rotary_dim", "start", "base", "layout", "schedule", "sign")},
    "precision": lambda wrong: rotary.apply(SPEC, X, precision=wrong),
    "length": lambda wrong: reach(SPEC, wrong),
    "context": lambda wrong: recommend(wrong, SPEC, 4096),
    "dtype": lambda wrong: rotary.fused(X, X, None, SPEC, [0, 1, 2, 3], dtype=wrong),
    "layer_type": lambda wrong: rotary.from_hf_config({"model_type": "llama"}, wrong),
    "part": lambda wrong: rotary.from_hf_config({"model_type": "llama"}, part=wrong),
    "grid": lambda wrong: positions.grid_2d(2, wrong),
    "order": lambda wrong: positions.shard(8, 0, 2, order=wrong),
    "spacing": lambda wrong: positions.tie([("text", 3)], spacing=wrong),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", WRONG)
def test_a_large_value_in_the_wrong_place_is_one_line(call, kind):
    wrong, _ = WRONG[kind]
    with pytest.raises((ValueError, TypeError)) as refusal:
        CALLS[call](wrong)
    assert len(str(refusal.value).splitlines()) == 1
    assert len(str(refusal.value)) < 330


@pytest.mark.parametrize("kind", WRONG)
def test_a_value_is_told_by_what_it_is(kind):
    wrong, words = WRONG[kind]
    assert brief(wrong).endswith(words)
    assert len(brief(wrong)) <= MOST


@pytest.mark.parametrize(
    "value", [None, True, 0, 2.5, "half", np.float32(2), np.array(3), [], (1, 2)]
)
def test_a_short_value_is_its_repr(value):
    assert brief(value) == repr(value)


def test_a_torch_tensor_is_its_shape():
    torch = pytest.importorskip("torch")
    assert brief(torch.ones(2, 64)) == "a torch.Tensor of shape (2, 64)"


def test_what_is_no_name_is_like_none():
    assert nearest("lama", ["llama"]) == "; did you mean 'llama'?"
    assert nearest(NUMBERS, ["llama"]) == nearest("x", ["llama"]) == ""
