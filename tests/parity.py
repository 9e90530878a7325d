"""One class of transformers against ours: its tables and its rotation, for every layer type."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from rotary import Rotary, cos_sin, from_hf_config, rotate
from rotary.configs import layer_types

SEQ, HEADS = 19, 2
# torch.polar rounds its cosine otherwise than torch.cos: one unit in the last place
COMPLEX, POLAR = ("DeepseekV2RotaryEmbedding", "Llama4TextRotaryEmbedding"), 1.2e-7


class Case(NamedTuple):
    """A class of transformers, a config for it, and the layer type that is compared."""

    module: Any
    rotary: type
    config: Any
    layer_type: str | None


def cases(module: Any, name: str, config: Any) -> Iterator[Case]:
    """The class with one config, once for each layer type that rotates."""
    kinds = layer_types(config) or (None,)
    labels = (
        getattr(config, "_rope_type_labels", None) or getattr(config, "layer_types", None) or ()
    )
    for kind in kinds:
        if kind is not None and kind not in labels and "rope_theta" not in kind:
            continue  # this config has no such layer, so the class makes no table for it
        if kind is None or from_hf_config(config, kind) is not None:
            yield Case(module, getattr(module, name), config, kind)


def compare(case: Case, firsts: tuple[int, ...] = (0, 5000)) -> None:
    """AssertionError where cos and sin, or q and k, differ from what transformers computes."""
    spec = from_hf_config(case.config, case.layer_type)
    takes = list(inspect.signature(case.rotary.forward).parameters)[1]
    if takes == "pixel_values":
        compare_coordinates(case, spec)
        return
    if hasattr(case.config, "q_aggregation_stride"):
        compare_feature_map(case, spec)
        return
    for first in firsts if takes == "x" else (0,):  # others count their tokens themselves
        ids = position_ids(spec, first)
        if takes == "hidden_states" and spec.num_axes == 2:
            ids = patches(case.config)
        theirs = tables(case, spec, ids)
        ours = cos_sin(spec, ours_of(ids, spec), "float32")
        for wide, half, sign in zip(theirs, ours, (1, spec.sign), strict=True):
            loose = POLAR if case.rotary.__name__ in COMPLEX else 0
            torch.testing.assert_close(sign * half_width(wide, half), half, rtol=0, atol=loose)
        rotation(case, spec, ids, theirs)


def compare_coordinates(case: Case, spec: Rotary) -> None:
    """DINOv3: positions are the centres of patches in [-1, 1], times one turn."""
    rows, columns, patch = 5, 7, case.config.patch_size
    centres = case.module.get_patches_center_coordinates(rows, columns, torch.float32, "cpu")
    theirs = case.rotary(case.config).eval()(torch.empty(1, 3, rows * patch, columns * patch))
    ours = cos_sin(spec, 2 * torch.pi * centres.double()[None], allow_negative=True)
    for wide, half in zip(theirs, ours, strict=True):  # their angles are float32, to 2^-22
        torch.testing.assert_close(half_width(wide, half), half, rtol=0, atol=2e-6)
    q, k = torch.randn(1, 4, rows * columns, spec.head_dim), torch.randn(1, 2, 35, spec.head_dim)
    cos, sin = (half_width(table, half) for table, half in zip(theirs, ours, strict=True))
    mine = rotate((q, k), cos, sin, layout=spec.layout)
    for got, want in zip(mine, case.module.apply_rotary_pos_emb(q, k, *theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def compare_feature_map(case: Case, spec: Rotary) -> None:
    """EfficientLoFTR: row and column of a feature map, from 1, turn the whole hidden size."""
    rows, columns, stride = 5, 7, case.config.q_aggregation_stride
    theirs = case.rotary(case.config)(torch.empty(1, 3, rows * stride, columns * stride))
    theirs = [table.flatten(1, 2) for table in theirs]
    ids = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))[None] + 1
    ours = cos_sin(spec, ids, "float32")
    for wide, half in zip(theirs, ours, strict=True):
        torch.testing.assert_close(half_width(wide, half), half, rtol=0, atol=0)
    q, k = torch.randn(2, 1, 1, rows * columns, spec.head_dim)
    mine = rotate((q, k), *ours, layout=spec.layout)
    for got, want in zip(mine, case.module.apply_rotary_pos_emb(q, k, *theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def patches(config: Any) -> torch.Tensor:
    """Llama 4: column + 1 and row + 1 of each patch; the class token, last, does not turn."""
    side = config.image_size // config.patch_size
    number = torch.arange(side * side)
    return torch.cat(
        (torch.stack((number % side, number // side), -1) + 1, torch.zeros(1, 2, dtype=torch.int64))
    )


def position_ids(spec: Rotary, first: int) -> torch.Tensor:
    """Ids in the form the class takes: (batch, seq), (axes, batch, seq), or (seq, axes)."""
    generator = torch.Generator().manual_seed(first)
    if spec.num_axes == 1:
        return torch.arange(first, first + SEQ)[None]
    ids = torch.randint(first, first + 300, (spec.num_axes, 1, SEQ), generator=generator)
    return ids[:, 0].mT if spec.schedule == "axial" else ids


def ours_of(ids: torch.Tensor, spec: Rotary) -> torch.Tensor:
    """The same ids as `cos_sin` takes them: (batch, seq) or (batch, seq, axes)."""
    if spec.num_axes == 1:
        return ids
    return ids[None] if spec.schedule == "axial" else ids.permute(1, 2, 0)


def tables(case: Case, spec: Rotary, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of a new module: `dynamic` keeps what it has seen."""
    made = case.rotary(case.config)
    if "hidden_states" in inspect.signature(made.forward).parameters:
        result = made(torch.empty(1, SEQ, 4))
        if result.is_complex():
            return result.real.squeeze(1), result.imag.squeeze(1)
        if len(result) == 1:  # angles, whose cosine is taken where they are used
            return result.cos(), result.sin()
        return tuple(table[:, 0, 0][None] for table in result)
    arguments = [torch.empty(0), ids]
    if "layer_type" in inspect.signature(made.forward).parameters and case.layer_type:
        arguments.append(case.layer_type)
    result = made(*arguments)
    if isinstance(result, torch.Tensor):
        return result.real, result.imag
    return tuple(table.squeeze(0) if spec.schedule == "axial" and table.ndim == 3 else table
                 for table in result)  # fmt: skip


def half_width(wide: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """Each pair once: the class writes it once, side by side, or in two halves."""
    pairs = half.shape[-1]
    if wide.shape[-1] == pairs:
        return wide.reshape(half.shape)
    assert wide.shape[-1] == 2 * pairs, (wide.shape, half.shape)
    blocks, twins = wide.unflatten(-1, (2, pairs)), wide.unflatten(-1, (pairs, 2))
    if torch.equal(blocks[..., 0, :], blocks[..., 1, :]):
        return blocks[..., 0, :].reshape(half.shape)
    assert torch.equal(twins[..., 0], twins[..., 1]), "neither two halves nor twins"
    return twins[..., 0].reshape(half.shape)


def rotation(case: Case, spec: Rotary, ids: torch.Tensor, theirs: Any) -> None:
    """q and k of this model's own function, and of ours, with the same tables."""
    function = apply_function(case, spec)
    cos, sin = cos_sin(spec, ours_of(ids, spec), "float32")
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, heads, SEQ, spec.head_dim, generator=generator) for heads in (4, HEADS))
    ways = {"layout": spec.layout, "out_layout": spec.out_layout}
    count = cos.shape[-2]
    q, k = (x.repeat(1, 1, -(-count // SEQ), 1)[:, :, :count] for x in (q, k))
    mine = rotate((q, k), cos, sin, rotary_dim=spec.rotary_dim, start=spec.start, **ways)
    names = list(inspect.signature(function).parameters)
    if "relative_position_embeddings" in names:  # a method, that turns hidden states
        both = torch.stack([table[0][:, None, None] for table in theirs])
        result = []
        for x in (q, k):
            own = SimpleNamespace(num_heads=x.shape[1], head_size=x.shape[-1])
            turned = function(own, x.transpose(1, 2).flatten(2), both)
            result.append(turned.view(1, SEQ, x.shape[1], -1).transpose(1, 2))
    elif function.__name__ == "vision_apply_rotary_emb":
        turned = function(*(x.transpose(1, 2) for x in (q, k)), torch.complex(*theirs)[:, None])
        result = tuple(x.transpose(1, 2) for x in turned)
    elif "v" in names:  # Clvp turns v as well, and takes rows of a table
        q_, k_, v = (x[..., : spec.rotary_dim] for x in (q, k, k))
        result = function(q_, k_, v, *(table[0] for table in theirs), ids)
        result = [
            torch.cat((x, y[..., spec.rotary_dim :]), -1)
            for x, y in zip(result, (q, k), strict=False)
        ]
    elif "vision" in function.__name__:
        q, k = q[0].mT.permute(2, 0, 1), k[0].mT.permute(2, 0, 1)  # (seq, heads, head_dim)
        result = function(q, k, *theirs)
        result = tuple(x.permute(1, 0, 2)[None] for x in result)
    elif "freqs_cis" in names:
        axis = 1 if case.module.__name__.endswith("llama4") else 2
        swap = (lambda x: x.transpose(1, 2)) if axis == 1 else (lambda x: x)
        result = tuple(map(swap, function(swap(q), swap(k), torch.complex(*theirs))))
    elif names[0] == "x":
        result = tuple(function(x, *theirs) for x in (q, k))
    elif "unsqueeze_dim" in names:
        theirs = [table[None] if table.ndim == 2 else table for table in theirs]
        width = spec.rotary_dim if is_outside(function, theirs[0], spec) else spec.head_dim
        result = function(
            q[..., :width], k[..., :width], cos=theirs[0], sin=theirs[1], unsqueeze_dim=1
        )
        result = [torch.cat((x, y[..., width:]), -1) for x, y in zip(result, (q, k), strict=True)]
    else:
        result = function(q, k, *(table[None, None] for table in theirs))
    for got, want in zip(mine, result, strict=True):
        # products of complex numbers are rounded in another order
        loose = 1e-6 if {"freqs_cis", "freqs_ci"} & set(names) else 0
        torch.testing.assert_close(got, want, rtol=0, atol=loose)


def is_outside(function: Any, table: torch.Tensor, spec: Rotary) -> bool:
    """Whether the model cuts the slice before it calls the function, which then gets no more."""
    return "rotary_dim" not in (source := inspect.getsource(function)) and "rot_dim" not in source


def apply_function(case: Case, spec: Rotary) -> Any:
    """The function of the modelling file that rotates with this class's tables."""
    is_vision = spec.schedule == "axial"
    wanted = ["apply_rotary_pos_emb_vision", "apply_rotary_pos_emb_2d"] if is_vision else []
    if spec.layout != spec.out_layout:
        wanted.append("apply_rotary_pos_emb_interleave")
    if is_vision:
        wanted += ["apply_rotary_pos_emb_2d_self_attn", "vision_apply_rotary_emb"]
    for name in (*wanted, "apply_rotary_pos_emb", "apply_rotary_emb"):
        if hasattr(case.module, name):
            return getattr(case.module, name)
    for kind in vars(case.module).values():
        if hasattr(kind, "_apply_rotary_embedding"):
            return kind._apply_rotary_embedding
    raise LookupError(f"{case.module.__name__} has no function that rotates")
