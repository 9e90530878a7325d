"""`patch` on small models of every layout: the same numbers, from our kernel, and exact tables."""

import pytest
import torch
from families import (
    FAMILIES,
    MROPES,
    TABLES_OF_THEIR_OWN,
    distance,
    last_hidden,
    tiny_model,
    tokens,
)
from transformers import AutoModel

from rotary.integrations import tables
from rotary.integrations.transformers import patch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, one_thread):
    """(family, its model, what the model gives), made once for all tests of the family."""
    model = tiny_model(AutoModel, request.param, **FAMILIES[request.param][0])
    return request.param, model, last_hidden(model, request.param)


def test_a_patched_model_gives_the_same_and_rotates_by_our_kernel(case, kernel_calls):
    family, model, before = case
    with patch(model) as patched:
        after = last_hidden(model, family)
        assert len(kernel_calls) >= len(patched.patched) >= 2
        layouts = {what.partition(", with")[0] for _, what in patched.patched}
        assert layouts == FAMILIES[family][1]
        assert patched.skipped == []
    assert distance(after, before) < 1e-5
    count = len(kernel_calls)
    assert torch.equal(last_hidden(model, family), before)
    assert len(kernel_calls) == count


FAR = 1_000_003


def test_exact_tables_differ_little_at_small_positions_and_keep_differences_at_far_ones(
    case, kernel_calls
):
    """exp(i w (m + n)) exp(-i w m) = exp(i w n), which the model's own tables break."""
    family, model, before = case
    with patch(model, exact=True) as patched:
        after = last_hidden(model, family)
        assert kernel_calls
        names = [name for name, what in patched.patched if what == "exact tables"]
        modules = [model.get_submodule(name) for name in names]
        makers = [(module, kind) for module in modules for kind in tables.layer_types(module)]
        exact = [turned(*maker, (0, 1, 40, FAR, FAR + 40), family) for maker in makers]
    assert distance(after, before) < 1e-5
    has_own = family in TABLES_OF_THEIR_OWN
    assert bool(exact) != has_own
    reasons = {why.removeprefix("keeps its own tables: ") for _, why in patched.skipped}
    assert reasons == ({"its tables do not follow from inv_freq alone"} if has_own else set())
    for maker, (start, one, forty, far, farther) in zip(makers, exact, strict=True):
        scale = start.abs().max()  # the attention factor, which each of them carries
        assert (farther * far.conj() - forty * scale).abs().max() < 6e-7 * scale**2
        near = turned(*maker, (0, 1, 40), family)
        assert (torch.stack(near) - torch.stack((start, one, forty))).abs().max() < 6e-6
        own_far, own_farther = turned(*maker, (FAR, FAR + 40), family)
        assert (own_farther * own_far.conj() - forty * scale).abs().max() > 1e-4


@torch.no_grad()
def test_all_positions_move_together_without_a_change(case, one_thread):
    """So the tables that layers read are those made exact; queries here have no factor of place."""
    family, model, _ = case
    if family in TABLES_OF_THEIR_OWN:
        pytest.skip("it has rows for few positions")

    def at(start):
        positions = torch.arange(start, start + 12).expand(3 if family in MROPES else 1, 12)
        ids = positions[:, None] if family in MROPES else positions
        return model(tokens(1), position_ids=ids).last_hidden_state

    with patch(model, exact=True):
        assert distance(at(FAR), at(0)) < 1e-5
    assert distance(at(FAR), at(0)) > 1e-4


@pytest.mark.parametrize(
    ("sections", "read"),
    [([1, 1, 0], [0, 1]), ([1, 0, 1], [0, 2]), ([2, 0, 0], [0]), ([0, 2, 0], [1])],
)
@torch.no_grad()
def test_tables_are_exact_if_an_axis_has_no_pair(sections, read, one_thread):
    """As in Qwen 3.5, which rotates a quarter of a head: 16 channels have two pairs."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 16}  # of 4 channels
    model = tiny_model(AutoModel, "qwen2_vl_text", rope_parameters=rope, **sizes)
    ids = torch.randint(0, 30, (3, 1, 12), generator=torch.Generator().manual_seed(2))
    before = model(tokens(1), position_ids=ids).last_hidden_state
    with patch(model, exact=True) as patched:
        assert ("rotary_emb", "exact tables") in patched.patched
        for axes in ([0, 1, 2], read):  # the others may be anywhere
            moved = ids.clone()
            moved[axes] += FAR
            after = model(tokens(1), position_ids=moved).last_hidden_state
            assert distance(after, before) < 1e-5


def turned(module, kind, positions, family):
    """cos + i sin of a module at each position, in complex128."""
    found = []
    for position in positions:
        ids = torch.full((3, 1, 1) if family in MROPES else (1, 1), position)
        result = module(torch.zeros(1), ids, **({"layer_type": kind} if kind else {}))
        cos, sin = (result.real, result.imag) if torch.is_tensor(result) else result
        assert cos.dtype == torch.float32
        found.append(torch.complex(cos.double(), sin.double()).flatten())
    return found
