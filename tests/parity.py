"""One class of transformers against ours: its tables and its rotation, for every layer type."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from rotary import Rotary, cos_sin, from_hf_config, rotate
from rotary.configs import layer_types

SEQ, HEADS = 19, (4, 2)
# classes whose tables are rounded otherwise: torch.polar is one unit in the last place from
# torch.cos; angles of up to one turn are float32 in DINOv3's family, and exact here
TABLES = {
    "DeepseekV2RotaryEmbedding": 2.0**-23,
    "Llama4TextRotaryEmbedding": 2.0**-23,
    "DINOv3ViTRopePositionEmbedding": 2.0**-21,
    "EomtDinov3RotaryEmbedding": 2.0**-21,
    "Sapiens2RopePositionEmbedding": 2.0**-21,
}
# classes that return rows of a table, sin before cos
OF_A_TABLE = {"CodeGenRotaryEmbedding", "GPTJRotaryEmbedding"}
# functions that multiply complex numbers, which a processor may round in another order
PRODUCTS = {"vision_apply_rotary_emb": 1e-6, "apply_rotary_emb": 1e-6}
# they round the table, each product and the sum to 8 bits, we the sum: four times 2^-8, and 2 %
BFLOAT16 = 4 * 2.0**-8 * 1.02
VISION = ("apply_rotary_pos_emb_vision", "apply_rotary_pos_emb_2d",
          "apply_rotary_pos_emb_2d_self_attn", "vision_apply_rotary_emb")  # fmt: skip


class Case(NamedTuple):
    """A class of transformers, a config for it, and the layer type that is compared."""

    rotary: type
    config: Any
    layer_type: str | None

    @property
    def module(self) -> Any:
        """The modelling module of the class."""
        return sys.modules[self.rotary.__module__]


class Tables(NamedTuple):
    """cos and sin of the class, cos and sin of ours, and the ids of both where it takes them."""

    theirs: Sequence[torch.Tensor]
    ours: Sequence[torch.Tensor]
    ids: torch.Tensor | None = None


def cases(rotary: type, config: Any) -> Iterator[Case]:
    """The class with one config, once for each layer type that rotates."""
    kinds = layer_types(config) or (None,)
    labels = [getattr(config, key, None) or () for key in ("_rope_type_labels", "layer_types")]
    for kind in kinds:  # the class makes no table for a kind that no layer of this config has
        is_there = kind is None or kind in (labels[0] or labels[1]) or "rope_theta" in kind
        if is_there and from_hf_config(config, kind) is not None:
            yield Case(rotary, config, kind)


def compare(case: Case, firsts: tuple[int, ...] = (0, 5000), rotates: bool = True) -> None:
    """AssertionError where cos and sin, or q and k, differ from what transformers computes.

    firsts   the first positions of the ids
    rotates  whether q and k are compared as well, and in 16 bits
    """
    spec = from_hf_config(case.config, case.layer_type)
    for tables in ways(case, firsts):
        theirs, ours, ids = tables(case, spec, torch.float32)
        cos, sin = (half_width(wide, half) for wide, half in zip(theirs, ours, strict=True))
        same = Tables(theirs, (cos, spec.sign * sin), ids)
        loose = TABLES.get(case.rotary.__name__, 0)
        torch.testing.assert_close(same.ours, ours, rtol=0, atol=loose)
        if not rotates:
            continue
        compare_rotation(case, spec, same, torch.float32)
        compare_rotation(case, spec, tables(case, spec, torch.bfloat16), torch.bfloat16)


# --- tables ---


def ways(case: Case, firsts: tuple[int, ...]) -> list[Callable[..., Tables]]:
    """How the tables are made, by what the class takes."""
    takes = inspect.signature(case.rotary.forward).parameters
    if "position_ids" in takes:
        has_rows = case.rotary.__name__ in OF_A_TABLE
        last = case.config.max_position_embeddings - SEQ if has_rows else max(firsts)
        return [functools.partial(of_ids, first=min(first, last)) for first in firsts]
    if "hidden_states" in takes:  # it counts the rows, from 0
        return [functools.partial(of_ids, first=0)]
    return [of_pixels if "pixel_values" in takes else of_map]


def of_pixels(case: Case, spec: Rotary, dtype: torch.dtype) -> Tables:
    """DINOv3: positions are the centres of patches in [-1, 1], times one turn."""
    rows, columns, patch = 5, 7, case.config.patch_size
    centres = case.module.get_patches_center_coordinates(rows, columns, torch.float32, "cpu")
    pixels = torch.empty(1, 3, rows * patch, columns * patch, dtype=dtype)
    ours = cos_sin(spec, 2 * torch.pi * centres.double()[None], allow_negative=True)
    return Tables(case.rotary(case.config).eval()(pixels), ours)


def of_map(case: Case, spec: Rotary, dtype: torch.dtype) -> Tables:
    """EfficientLoFTR: row and column of a feature map, from 1, turn the whole hidden size."""
    rows, columns, stride = 5, 7, case.config.q_aggregation_stride
    made = case.rotary(case.config)(torch.empty(1, 3, rows * stride, columns * stride, dtype=dtype))
    ids = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))[None] + 1
    return Tables([table.flatten(1, 2) for table in made], cos_sin(spec, ids, "float32"))


def of_ids(case: Case, spec: Rotary, dtype: torch.dtype, first: int) -> Tables:
    """Position ids from `first`: (batch, seq), (axes, batch, seq), or (seq, axes) of patches."""
    ids = torch.arange(first, first + SEQ)[None]
    if spec.num_axes > 1:
        generator = torch.Generator().manual_seed(first)
        ids = torch.randint(first, first + 300, (spec.num_axes, 1, SEQ), generator=generator)
    ours = ids if spec.num_axes == 1 else ids.permute(1, 2, 0)  # (batch, seq) or (..., axes)
    if spec.schedule == "axial":
        ids = ours[0]
    if case.rotary.__name__ == "Llama4VisionRotaryEmbedding":
        ours = patches(case.config)[None]
    return Tables(made_of(case, spec, ids, dtype), cos_sin(spec, ours, "float32"), ids)


def patches(config: Any) -> torch.Tensor:
    """Llama 4: column + 1 and row + 1 of each patch; the class token, last, does not turn."""
    side = config.image_size // config.patch_size
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1) + 1
    return torch.nn.functional.pad(places, (0, 0, 0, 1))


def made_of(case: Case, spec: Rotary, ids: torch.Tensor, dtype: torch.dtype) -> Any:
    """cos and sin of a new module, as it makes them for such hidden states."""
    made = case.rotary(case.config)  # a new one: `dynamic` keeps what it has seen
    takes = inspect.signature(made.forward).parameters
    if "hidden_states" in takes:
        result = made(torch.empty(1, SEQ, 4, dtype=dtype))
        if result.is_complex():
            return result.real.squeeze(1), result.imag.squeeze(1)
        if len(result) == 1:  # angles, whose cosine is taken where they are used
            return result.cos(), result.sin()
        return tuple(table[:, 0, 0][None] for table in result)
    of_layer = (case.layer_type,) if "layer_type" in takes and case.layer_type else ()
    result = made(torch.empty(0, dtype=dtype), ids, *of_layer)
    if isinstance(result, torch.Tensor):
        return result.real, result.imag
    if case.rotary.__name__ in OF_A_TABLE:
        result = result[::-1]
    has_batch = spec.schedule == "axial" and result[0].ndim == 3
    return tuple(table.squeeze(0) if has_batch else table for table in result)


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


# --- rotations ---


def compare_rotation(case: Case, spec: Rotary, tables: Tables, dtype: torch.dtype) -> None:
    """q and k of this model's own function with its tables, and of ours with ours."""
    function = apply_function(case, spec)
    generator, count = torch.Generator().manual_seed(1), tables.ours[0].shape[-2]
    shapes = [(1, heads, count, spec.head_dim) for heads in HEADS]
    q, k = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    keys = {function.__name__, *inspect.signature(function).parameters}
    call = next(call for key, call in CALLS.items() if key in keys)
    for x, want in zip((q, k), call(function, spec, tables, q, k), strict=True):
        got = turned(spec, x, *tables.ours)
        assert got.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(got, want, rtol=0, atol=PRODUCTS.get(function.__name__, 0))
        else:
            error = (got.float() - want.float()).abs()
            assert bool((error <= BFLOAT16 * size(spec, x, *tables.ours)).all()), case.rotary


def turned(spec: Rotary, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One tensor, rotated by our kernel."""
    return rotate(x, cos, sin, spec)


def size(spec: Rotary, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """|x1 cos| + |x2 sin| of each channel, of which each rounding is a share."""
    x, cos, sin = x.float().abs(), cos.abs(), sin.abs()
    return torch.maximum(turned(spec, x, cos, sin), turned(spec, x, cos, -sin))


def of_hidden_states(function: Any, spec: Rotary, tables: Tables, q: Any, k: Any) -> Any:
    """A method of Wav2Vec2: hidden states, and one tensor of (2, seq, 1, 1, head_dim)."""
    both = torch.stack([table[0][:, None, None] for table in tables.theirs])
    for x in (q, k):
        own = SimpleNamespace(num_heads=x.shape[1], head_size=x.shape[-1])
        result = function(own, x.transpose(1, 2).flatten(2), both)
        yield result.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


def by_products(function: Any, spec: Rotary, tables: Tables, q: Any, k: Any) -> Any:
    """Complex numbers; Llama 4 has (batch, seq, heads, head_dim)."""
    turns = torch.complex(*tables.theirs)
    if "llama4" not in function.__module__:
        return function(q, k, turns)
    turns = turns[:, None] if function.__name__ == "vision_apply_rotary_emb" else turns
    return [x.transpose(1, 2) for x in function(q.transpose(1, 2), k.transpose(1, 2), turns)]


def sliced(function: Any, spec: Rotary, tables: Tables, q: Any, k: Any) -> Any:
    """Most models: where the function does not cut the slice, the model did."""
    source, takes = inspect.getsource(function), inspect.signature(function).parameters
    cuts = "rotary_dim" in source or "rot_dim" in source
    width = spec.head_dim if cuts else spec.rotary_dim
    xs = [x[..., :width] for x in ((q, k, k) if "v" in takes else (q, k))]
    if "v" in takes:  # Clvp turns v as well, and takes rows of a table
        done = function(*xs, *(table[0] for table in tables.theirs), tables.ids)
    else:
        cos, sin = (table[None] if table.ndim == 2 else table for table in tables.theirs)
        done = function(*xs, cos=cos, sin=sin, unsqueeze_dim=1)
    return [torch.cat((y, x[..., width:]), -1) for y, x in zip(done, (q, k), strict=False)]


def of_sequence(function: Any, spec: Rotary, tables: Tables, q: Any, k: Any) -> Any:
    """Vision towers: (seq, heads, head_dim), without a batch."""
    result = function(q[0].transpose(0, 1), k[0].transpose(0, 1), *tables.theirs)
    return [x.transpose(0, 1)[None] for x in result]


def of_one(function: Any, spec: Rotary, tables: Tables, q: Any, k: Any) -> Any:
    """GPT-J: one tensor, (batch, seq, heads, rotary_dim), and sin before cos."""
    for x in (q, k):
        part = x[..., : spec.rotary_dim].transpose(1, 2)
        done = function(part, *tables.theirs[::-1]).transpose(1, 2)
        yield torch.cat((done, x[..., spec.rotary_dim :]), -1)


# name of the function or of something it takes -> how it is called; the first that is found
CALLS: dict[str, Callable[..., Any]] = {
    "relative_position_embeddings": of_hidden_states,
    "freqs_ci": by_products,
    "freqs_cis": by_products,
    "apply_rotary_pos_emb_vision": of_sequence,
    "tensor": of_one,
    "x": lambda function, _, tables, q, k: [function(x, *tables.theirs) for x in (q, k)],
    "unsqueeze_dim": sliced,
    "q": lambda function, _, tables, q, k: function(q, k, *(x[None, None] for x in tables.theirs)),
}


def apply_function(case: Case, spec: Rotary) -> Any:
    """The function of the modelling file that rotates with this class's tables."""
    names = ["apply_rotary_pos_emb", "apply_rotary_emb"]
    if spec.layout != spec.out_layout:
        names.insert(0, "apply_rotary_pos_emb_interleave")
    for name in (*VISION, *names) if spec.schedule == "axial" else names:
        if hasattr(case.module, name):
            return getattr(case.module, name)
    for kind in vars(case.module).values():
        if hasattr(kind, "_apply_rotary_embedding"):
            return kind._apply_rotary_embedding
    raise LookupError(f"{case.module.__name__} has no function that rotates")
