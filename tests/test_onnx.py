"""ONNX: the right operator with the right inputs, the same numbers, and never an invalid model."""

import subprocess
import sys
import threading
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from published import scaled
from torch import Tensor, nn

import rotary
from rotary import Rotary, kernels
from rotary.integrations.onnx import export
from rotary.nn import RotaryEmbedding

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning"  # torch.export warns of torch, in the name of copyreg
)
BATCH, SEQ = torch.export.Dim("batch"), torch.export.Dim("seq")
YARN = {"factor": 8.0, "original_max_position_embeddings": 4096}
SPECS = {
    "half": Rotary(head_dim=64, base=5e5),
    "interleaved, backwards, with an amplitude": Rotary(
        head_dim=64, layout="interleaved", sign=-1, schedule="yarn", params=YARN
    ),
    "partial": Rotary(head_dim=80, rotary_dim=32),
    "partial, interleaved": Rotary(head_dim=80, rotary_dim=32, layout="interleaved"),
}
HALF = SPECS["half"]
DECOMPOSED = {
    "a slice that starts later": Rotary(head_dim=80, rotary_dim=32, start=16),
    "interleaved in, half out": Rotary(head_dim=64, layout="interleaved", out_layout="half"),
    "an odd head": Rotary(head_dim=33, rotary_dim=32),
}
EVERY = {**SPECS, **DECOMPOSED}


@pytest.fixture(autouse=True, scope="module")
def one_registry():
    """torch compiles 500 functions of its exporter anew for every model: half of the time."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        made = staticmethod(cache(ONNXRegistry.from_torchlib))
        patch.setattr(ONNXRegistry, "from_torchlib", made)
        yield


class Attention(nn.Module):
    """q and k rotated at given positions, as (batch, heads, seq, head_dim)."""

    def __init__(self, spec: Rotary, **options: object) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(spec, **options)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(q, k, positions=positions)


class Call(nn.Module):
    """Any function as a module, with tensors of its own."""

    def __init__(self, function, **tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, *inputs: Tensor):
        return self.function(*inputs, **dict(self.named_buffers()))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(head_dim: int, batch: int = 2, seq: int = 5, highest: int = 2**39):
    generator = torch.Generator().manual_seed(seq)
    positions = torch.randint(0, highest, (batch, seq), generator=generator)
    q, k = draw(batch, 4, seq, head_dim), draw(batch, 2, seq, head_dim, seed=1)
    return q, k, positions


def by_complex_numbers(spec: Rotary, x: Tensor, positions: Tensor) -> Tensor:
    """x (batch, heads, seq, head_dim) turned in float64, by angles in Python's whole numbers."""
    turns = [int(value) for value in rotary.turns(spec)]
    angles = [[[m * t % 2**64 / 2**64 for t in turns] for m in row] for row in positions.tolist()]
    amplitude = rotary.inv_freq(spec)[1]
    angle = spec.sign * 2 * np.pi * np.array(angles)[:, None]
    factor = amplitude * np.exp(1j * angle)
    order = rotary.layouts.pair_indices(spec.rotary_dim, spec.layout, spec.start)
    target = rotary.layouts.pair_indices(spec.rotary_dim, spec.out_layout, spec.start)
    wide, result = x.double().numpy(), x.double().numpy().copy()
    turned = (wide[..., order[:, 0]] + 1j * wide[..., order[:, 1]]) * factor
    result[..., target[:, 0]], result[..., target[:, 1]] = turned.real, turned.imag
    return torch.from_numpy(result)


def checked(path: Path) -> onnx.ModelProto:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    return model


def operators(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "RotaryEmbedding"]


def attributes(node: onnx.NodeProto) -> dict[str, int]:
    """All three, for one that is at its default may be left out."""
    given = {attribute.name: attribute.i for attribute in node.attribute}
    assert set(given) <= {"interleaved", "num_heads", "rotary_embedding_dim"}
    return {"interleaved": 0, "num_heads": 0, "rotary_embedding_dim": 0, **given}


def shape_of(model: onnx.ModelProto, name: str) -> list[int | str]:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    known = [*inferred.value_info, *inferred.input]
    shapes = {each.name: each.type.tensor_type.shape.dim for each in known}
    shapes |= {each.name: [onnx.TensorShapeProto.Dimension(dim_value=size) for size in each.dims]
               for each in inferred.initializer}  # fmt: skip
    return [dim.dim_value or dim.dim_param for dim in shapes[name]]


def run(model: onnx.ModelProto, *arrays: Tensor, engine: str = "onnxruntime") -> list[Tensor]:
    feeds = {each.name: x.numpy() for each, x in zip(model.graph.input, arrays, strict=True)}
    if engine == "onnx":
        results = ReferenceEvaluator(model).run(None, feeds)
    else:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        results = session.run(None, feeds)
    return [torch.from_numpy(np.asarray(result)) for result in results]


def assert_near(ours, wanted, limit: float = 1e-6) -> None:
    for mine, other in zip(ours, wanted, strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine.double(), other.double(), rtol=0, atol=limit)


def exported(tmp_path: Path, module: nn.Module, args, **options) -> onnx.ModelProto:
    export(module, args, tmp_path / "model.onnx", **options)
    return checked(tmp_path / "model.onnx")


class Every(nn.Module):
    """q and k of each spec, all rotated at the same positions."""

    def __init__(self, specs: list[Rotary]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Attention, specs))

    def forward(self, positions: Tensor, *arrays: Tensor) -> list[Tensor]:
        pairs = zip(self.layers, arrays[::2], arrays[1::2], strict=True)
        return [y for layer, q, k in pairs for y in layer(q, k, positions)]


ALL = list(EVERY.values())


def inputs_of(specs: list[Rotary], batch: int = 2, seq: int = 5, highest: int = 2**39):
    made = [inputs(spec.head_dim, batch, seq, highest) for spec in specs]
    return made[0][2], *[x for q, k, _ in made for x in (q, k)]


def open_sizes(specs: list[Rotary], seq: torch.export.Dim) -> dict[str, object]:
    """Batch and sequence of what `Every` takes, left open."""
    return {"positions": {0: BATCH, 1: seq}, "arrays": ({0: BATCH, 2: seq},) * 2 * len(specs)}


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
    """The model of `Every`, exported at one size, with batch and sequence left open."""
    folder = tmp_path_factory.mktemp("dynamic")
    return exported(folder, Every(ALL), inputs_of(ALL), dynamic_shapes=open_sizes(ALL, SEQ))


@pytest.mark.parametrize("engine", ["onnxruntime", "onnx"])
def test_every_batch_and_length_gives_the_numbers_of_the_law(dynamic, engine):
    for batch, seq in [(2, 5), (1, 1), (3, 17)]:
        positions, *arrays = inputs_of(ALL, batch, seq)
        specs = [spec for spec in ALL for _ in "qk"]
        wanted = [by_complex_numbers(*each, positions) for each in zip(specs, arrays, strict=True)]
        assert_near(run(dynamic, positions, *arrays, engine=engine), wanted)


def test_an_open_length_may_be_that_of_a_fixed_batch(tmp_path):
    """Positions without a batch axis were compared with the batch: its length was ruled out."""
    q, k, _ = inputs(64, batch=2)
    shapes = {2: SEQ}, {2: SEQ}
    model = exported(tmp_path, RotaryEmbedding(HALF), (q, k), dynamic_shapes=shapes)
    for seq in (2, 9):
        q, k, _ = inputs(64, batch=2, seq=seq)
        assert_near(run(model, q, k), rotary.apply(HALF, q, k))


def test_the_tables_are_as_exact_as_those_of_torch(tmp_path):
    """Each channel of a pair (1, 0) shows its own cos and sin, so that no sum hides an error."""
    spec = HALF
    q = torch.cat((torch.ones(1, 1, 64, 32), torch.zeros(1, 1, 64, 32)), dim=-1)
    positions = torch.cat((2 ** torch.arange(40), 2 ** torch.arange(16, 40) - 1))[None]
    model = exported(tmp_path, Attention(spec), (q, q, positions))
    wanted = by_complex_numbers(spec, q, positions)
    for engine in ("onnxruntime", "onnx"):
        (ours, _) = run(model, q, q, positions, engine=engine)
        assert_near([ours], [wanted], 6e-8)  # half an ulp of float32 below 1


@pytest.mark.parametrize(
    ("first", "step", "spec"),
    [
        (0, 1, Rotary(head_dim=40, rotary_dim=32, layout="interleaved")),
        (7, 8, Rotary(head_dim=40, rotary_dim=32, start=4)),
    ],
)
def test_no_position_up_to_a_million_is_off(tmp_path, first, step, spec):
    """Every position to 131 072 by the operator, every eighth to 2^20 by plain operators, beside
    float64 angles of the formula.
    """
    args = draw(1, 1, 5, spec.head_dim), inputs(64, batch=1)[2]
    shapes = ({2: SEQ}, {1: SEQ})
    module = Call(lambda x, positions: rotary.apply(spec, x, positions=positions))
    model = exported(tmp_path, module, args, dynamic_shapes={"inputs": shapes})
    assert len(operators(model)) == (spec.start == 0)
    row = first + step * np.arange(2**17)
    x = 2 * np.random.default_rng(0).random((1, 1, 2**17, spec.head_dim), np.float32) - 1
    steps = spec.base ** (-2 * np.arange(spec.rotary_dim // 2) / spec.rotary_dim)
    turned = np.exp(1j * row[:, None] * steps)
    one, other = rotary.layouts.pair_slices(spec.rotary_dim, spec.layout, spec.start)
    turned = turned * (x[..., one] + 1j * x[..., other])
    wanted = x.astype(np.float64)
    wanted[..., one], wanted[..., other] = turned.real, turned.imag
    (ours,) = run(model, *map(torch.from_numpy, (x, row[None])))
    assert ours.shape == wanted.shape
    assert abs(ours.numpy() - wanted).max() <= 2e-7  # half an ulp of two products and a sum


def test_packed_sequences_are_rotated_at_their_own_positions(tmp_path):
    """ONNX has no searchsorted, which finds the sequence of a token elsewhere."""

    def rotate(x, bounds):
        positions = rotary.positions.packed(bounds, seq_len=x.shape[-2])
        return rotary.apply(HALF, x, positions=positions)

    args, shapes = (draw(1, 2, 7, 64), torch.tensor([0, 3, 3, 7])), ({2: SEQ}, {0: BATCH})
    model = exported(tmp_path, Call(rotate), args, dynamic_shapes={"inputs": shapes})
    for bounds in ([0, 3, 3, 7], [0, 1, 9], [0, 0, 2, 6, 11, 11]):
        x, bounds = draw(1, 2, bounds[-1], 64, seed=1), torch.tensor(bounds)
        assert_near(run(model, x, bounds), [rotate(x, bounds)])


def test_one_operator_for_each_array_or_none(dynamic):
    _, *arrays = [each.name for each in dynamic.graph.input]
    found = {node.input[0]: node for node in operators(dynamic)}
    assert len(found) == len(operators(dynamic)) == 2 * len(SPECS)
    for (name, spec), *pair in zip(EVERY.items(), arrays[::2], arrays[1::2], strict=True):
        nodes = [found[x] for x in pair if x in found]
        assert len(nodes) == (2 if name in SPECS else 0)
        for node in nodes:
            assert node.domain == ""
            assert len(node.input) == 3  # the tables are per token: no position_ids
            for table in node.input[1:3]:
                batch, seq, width = shape_of(dynamic, table)
                assert (type(batch), type(seq), width) == (str, str, spec.rotary_dim // 2)
            partial = spec.rotary_dim if spec.rotary_dim < spec.head_dim else 0
            assert attributes(node) == {
                "interleaved": spec.layout == "interleaved",
                "num_heads": 0,
                "rotary_embedding_dim": partial,
            }
        assert len({node.input[1] for node in nodes}) <= 1  # one table serves q and k
    assert [each.version for each in dynamic.opset_import] == [23]


def test_tables_of_the_module_become_caches_with_position_ids(tmp_path):
    spec = HALF
    cos, sin = rotary.cos_sin(spec, torch.arange(32))

    def rotate(x, ids, cos, sin):
        return rotary.rotate(x, cos, sin, positions=ids, layout="half")

    args = draw(2, 4, 5, 64), torch.arange(5).expand(2, 5).contiguous()
    model = exported(
        tmp_path, Call(rotate, cos=cos, sin=sin), args,
        dynamic_shapes={"inputs": ({0: BATCH, 2: SEQ}, {0: BATCH, 1: SEQ})},
    )  # fmt: skip
    (node,) = operators(model)
    assert list(node.input)[3] == model.graph.input[1].name
    assert shape_of(model, node.input[1]) == [32, 32]
    x, _, ids = inputs(64, 3, 9, highest=32)
    for engine in ("onnxruntime", "onnx"):
        assert_near(run(model, x, ids, engine=engine), [by_complex_numbers(spec, x, ids)])
    for outside in (32, -1, 10**6):
        ids[1, 4] = outside
        with pytest.raises(Exception, match=f"position_ids value {outside} .* out of range"):
            run(model, x, ids)


FORMS = {  # shape of x, seq_dim, shape of positions, num_heads of the operator
    "(batch, seq, heads, head_dim)": ((2, 5, 4), -3, (2, 5), 4),
    "one row of positions": ((2, 4, 5), -2, (5,), 0),
    "one row, heads last": ((2, 5, 4), -3, (5,), 4),
    "(heads, seq, head_dim)": ((4, 5), -2, (5,), 0),
    "packed, (tokens, heads, head_dim)": ((5, 4), -3, (5,), 4),
    "(seq, head_dim)": ((5,), -2, (5,), 1),
    "five axes, in plain operators": ((2, 3, 4, 5), -2, (5,), None),
}


def test_every_order_of_axes_is_rotated_right(tmp_path):
    spec = SPECS["partial, interleaved"]
    forms = list(FORMS.values())
    generator = torch.Generator().manual_seed(3)
    xs = [draw(*shape, spec.head_dim) for shape, *_ in forms]
    rows = [torch.randint(0, 10**6, row, generator=generator) for *_, row, _ in forms]

    def apply(*inputs):
        pairs = zip(inputs[: len(xs)], inputs[len(xs) :], forms, strict=True)
        return [rotary.apply(spec, x, positions=row, seq_dim=form[1]) for x, row, form in pairs]

    model = exported(tmp_path, Call(apply), (*xs, *rows))
    counts = [attributes(node)["num_heads"] for node in operators(model)]
    assert counts == [count for *_, count in forms if count is not None]
    results = [run(model, *xs, *rows, engine=engine) for engine in ("onnxruntime", "onnx")]
    for index, (_, seq_dim, row_shape, _) in enumerate(forms):
        x, row = xs[index], rows[index]
        x = x if seq_dim == -2 else x.transpose(-2, -3)
        lead = (2, 4) if len(row_shape) == 2 else (1, -1)
        wanted = by_complex_numbers(spec, x.reshape(*lead, 5, spec.head_dim), row.view(-1, 5))
        wanted = wanted.reshape(x.shape)
        wanted = wanted if seq_dim == -2 else wanted.transpose(-2, -3)
        assert_near([ours[index] for ours in results], [wanted, wanted])


def test_tables_with_one_row_for_all_heads_become_the_operator(tmp_path):
    """transformers makes them; a patched model was exported without the operator."""
    q, k, positions = inputs(64)

    def rotate(q, k, positions):
        results = []
        for seq_dim in (-2, -3):
            xs = [x if seq_dim == -2 else x.transpose(1, 2) for x in (q, k)]
            tables = [table.unsqueeze(-1 - seq_dim) for table in rotary.cos_sin(HALF, positions)]
            results += rotary.rotate(xs, *tables, HALF, seq_dim=seq_dim)
        return results

    model = exported(tmp_path, Call(rotate), (q, k, positions))
    assert len(operators(model)) == 4
    wanted = [by_complex_numbers(HALF, x, positions) for x in (q, k)]
    wanted += [x.transpose(1, 2) for x in wanted]
    assert_near(run(model, q, k, positions), wanted)


AXES = Rotary(head_dim=64, axes=rotary.positions.sections(16, 8, 8))
DYNAMIC = scaled("dynamic", 64, 4.0, 16)  # fmt: skip


def per_head(x: Tensor) -> Tensor:
    return rotary.rotate(x, *rotary.cos_sin(HALF, torch.arange(40).view(2, 4, 5)), layout="half")


def fractional(x: Tensor) -> Tensor:
    return rotary.apply(HALF, x, positions=torch.arange(5, dtype=torch.float64) / 8)


def three_axes(x: Tensor) -> Tensor:
    return rotary.apply(AXES, x, positions=torch.arange(5)[:, None] * torch.tensor([1, 3, 1000]))


WAYS = {
    "positions from 0 on": lambda x: rotary.apply(HALF, x),
    "the way back": lambda x: rotary.apply(HALF, x, conjugate=True),
    "float32 angles": lambda x: rotary.apply(HALF, x, precision="float32"),
    "a length that is known": lambda x: rotary.apply(DYNAMIC, x, seq_len=64),
    "fractional positions": fractional,
    "three axes": three_axes,
    "tables per head, in plain operators": per_head,
}


def test_every_way_of_turning_gives_the_numbers_of_torch(tmp_path):
    x = draw(2, 4, 5, 64)

    def all_ways(x):
        return [way(x) for way in WAYS.values()]

    model = exported(tmp_path, Call(all_ways), (x,))
    assert len(operators(model)) == len(WAYS) - 1
    wanted = all_ways(x)
    for engine in ("onnxruntime", "onnx"):
        assert_near(run(model, x, engine=engine), wanted)


@pytest.mark.parametrize("opset", [22, 25])
def test_every_opset_is_written_as_what_it_is(tmp_path, opset):
    """The last, and the one before the operator; 18 and 23, the first ones, are further below."""
    spec = SPECS["partial, interleaved"]
    args = inputs(80)
    model = exported(tmp_path, Attention(spec), args, opset_version=opset)
    assert [(each.domain, each.version) for each in model.opset_import] == [("", opset)]
    assert len(operators(model)) == (2 if opset >= 23 else 0)
    for node in model.graph.node:
        onnx.defs.get_schema(node.op_type, opset, node.domain)
    for engine in ("onnxruntime", "onnx"):
        wanted = [by_complex_numbers(spec, x, args[2]) for x in args[:2]]
        assert_near(run(model, *args, engine=engine), wanted)


@pytest.mark.parametrize(("opset", "message"), [(17, "must be >= 18"), (99, "cannot write opset")])
def test_an_opset_that_cannot_be_written_is_refused_and_leaves_no_file(tmp_path, opset, message):
    with pytest.raises(ValueError, match=message):
        export(Attention(HALF), inputs(64), tmp_path / "m.onnx", opset_version=opset)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "options", "error"),
    [
        (
            "m.onnx",
            {"dynamic_axes": {"q": {2: "seq"}}},
            "export takes no dynamic_axes, but dynamic_s",
        ),
        ("m.onnx", {"external_data": True}, "export takes no external_data; of torch.onnx.export"),
        ("m.onnx", {"f": "n.onnx"}, "export takes no f; of torch.onnx.export it takes input_names"),
        ("m.onnx", {"opset_version": "23"}, "opset_version must be a whole number, got '23'"),
        ("no/m.onnx", {}, "no does not exist: make it first"),
        (".", {}, "is a folder: name a file in it, as"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_traced(tmp_path, path, options, error):
    def forward(q):
        raise AssertionError("traced")

    with pytest.raises((TypeError, OSError), match=error):
        export(Call(forward), (draw(1, 2, 3, 64),), tmp_path / path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_the_checker_refuses_is_not_written(tmp_path, monkeypatch):
    def refuse(path, full_check):
        assert full_check
        raise onnx.checker.ValidationError("refused")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    (tmp_path / "m.onnx").write_text("the model of yesterday")
    with pytest.raises(onnx.checker.ValidationError, match="refused"):
        export(Attention(HALF), inputs(64), tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "the model of yesterday"


@pytest.mark.parametrize("opset", [18, 23])
def test_out_is_refused(tmp_path, opset):
    module = Call(lambda x: rotary.apply(HALF, x, out=x))
    with pytest.raises(ValueError, match="out= cannot be exported"):
        export(module, (draw(1, 2, 3, 64),), tmp_path / "m.onnx", opset_version=opset)
    assert list(tmp_path.iterdir()) == []


def test_a_model_in_another_thread_is_not_disturbed(tmp_path):
    x = draw(1, 2, 3, 64)
    wanted = rotary.apply(HALF, x)
    seen = []

    def elsewhere():
        q, target = x.clone().requires_grad_(), torch.empty_like(x)
        rotated = rotary.apply(HALF, q)
        rotated.sum().backward()
        rotary.apply(HALF, x, out=target)
        seen.extend([rotated.detach(), target, q.grad])

    def forward(x):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return rotary.apply(HALF, x)

    export(Call(forward), (x,), tmp_path / "m.onnx")
    gradient = rotary.apply(HALF, torch.ones_like(x), conjugate=True)
    assert_near(seen, [wanted, wanted, gradient])


def test_after_an_export_and_after_an_error_torch_rotates_as_before(tmp_path):
    x = draw(1, 2, 3, 64)
    before = rotary.apply(HALF, x)
    kernel = kernels.kernel_of(x)
    export(RotaryEmbedding(HALF), (x,), tmp_path / "m.onnx")
    assert kernels.kernel_of(x) is kernel
    with pytest.raises(ValueError, match="head_dim"):
        export(RotaryEmbedding(SPECS["partial"]), (x,), tmp_path / "n.onnx")
    assert kernels.kernel_of(x) is kernel
    assert torch.equal(rotary.apply(HALF, x), before)


def test_half_precision_is_rotated_in_float32_and_rounded_once(tmp_path):
    spec, dtypes = SPECS["partial"], (torch.float16, torch.bfloat16)
    q, _, positions = inputs(80)

    def rotate(q, positions):
        turned = [rotary.apply(spec, q.to(dtype), positions=positions) for dtype in dtypes]
        assert [y.dtype for y in turned] == list(dtypes)
        return [y.float() for y in turned]

    model = exported(tmp_path, Call(rotate), (q, positions))
    assert len(operators(model)) == 2
    for dtype, ours in zip(dtypes, run(model, q, positions), strict=True):
        wanted = by_complex_numbers(spec, q.to(dtype), positions)
        step = torch.finfo(dtype).eps * wanted.abs().clamp(min=2**-14)
        assert bool(((ours - wanted).abs() <= step / 2 + 1e-6).all()), dtype


def test_float64_is_rotated_in_float64_by_plain_operators(tmp_path):
    cos, sin = rotary.cos_sin(HALF, torch.arange(5))
    rotate = Call(partial(rotary.rotate, spec=HALF), cos=cos, sin=sin)
    x = draw(2, 4, 5, 64).double()
    model = exported(tmp_path, rotate, (x,))
    assert operators(model) == []
    assert_near(run(model, x), [rotate(x)], 1e-14)


class Layer(nn.Module):
    """A projection, then a rotation: a model with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return rotary.apply(HALF, self.project(x))


@pytest.mark.parametrize("opset", [18, 23])
def test_positions_that_are_not_given_follow_the_length(tmp_path, opset):
    shapes = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},)
    layer = Layer().eval()
    model = exported(
        tmp_path, layer, (draw(2, 4, 5, 64),), dynamic_shapes=shapes, opset_version=opset
    )
    assert [(each.domain, each.version) for each in model.opset_import] == [("", opset)]
    assert len(operators(model)) == (opset == 23)
    for x in (draw(1, 4, 1, 64), draw(3, 4, 1000, 64)):
        positions = torch.arange(x.shape[2]).expand(x.shape[0], -1)
        wanted = by_complex_numbers(HALF, layer.project(x).detach(), positions)
        for engine in ("onnxruntime", "onnx"):
            assert_near(run(model, x, engine=engine), [wanted], 2e-6)  # a projection before it


def test_weights_too_large_for_one_file_lie_beside_the_model(tmp_path, monkeypatch):
    programs = "torch.onnx._internal.exporter._onnx_program"
    monkeypatch.setattr(f"{programs}._LARGE_MODEL_THRESHOLD", 1024)  # bytes, instead of 1.5 GB
    layer, x = Layer().eval(), draw(2, 4, 5, 64)
    names = {"input_names": ["x"], "output_names": ["y"]}
    model = exported(tmp_path, layer, (x,), **names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert [each.name for each in (*model.graph.input, *model.graph.output)] == ["x", "y"]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (ours,) = session.run(None, {"x": x.numpy()})
    assert_near([torch.from_numpy(ours)], [layer(x)])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"onnxscript: pip install onnx onnxscript$"):
        export(Layer(), (draw(2, 4, 5, 64),), tmp_path / "m.onnx")


WITHOUT_US = """
import sys
from pathlib import Path
sys.modules["rotary"] = None  # any import of it is an error
import torch
for path in sorted(Path(sys.argv[1]).glob("*.pt2")):
    inputs = torch.load(path.with_suffix(".inputs"))
    torch.save(torch.export.load(path).module()(*inputs), path.with_suffix(".outputs"))
assert not any(name.startswith("rotary.") for name in sys.modules)
assert not hasattr(torch.ops.rotary, "rotate")  # nobody has registered our operator
"""


def rows_of_tables(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor):
    return rotary.rotate((q, k), cos, sin, positions=positions, layout="half")


def from_zero(q: Tensor, k: Tensor, positions: Tensor):
    return rotary.apply(HALF, q, k)


def test_exported_programs_run_where_rotary_cannot_be_imported(tmp_path):
    cos, sin = rotary.cos_sin(HALF, torch.arange(64))
    seq = torch.export.Dim(
        "seq", max=4096
    )  # strict mode asks for a bound: tables have one in bytes
    calls = {"inputs": ({0: BATCH, 2: seq}, {0: BATCH, 2: seq}, {0: BATCH, 1: seq})}
    some, last = ALL[1::2], ALL[-1]  # the model of `dynamic` above is of all, traced likewise
    programs = [  # module, the arguments of a size, those whose size is open, strict
        *[(Every(specs), partial(inputs_of, specs), open_sizes(specs, seq), is_strict)
          for specs, is_strict in ((some, False), ([last], True))],
        *[(Call(rows_of_tables, cos=cos, sin=sin), partial(inputs, 64), calls, is_strict)
          for is_strict in (False, True)],
        (Call(from_zero), partial(inputs, 64), calls, False),
    ]  # fmt: skip
    wanted = []
    for number, (module, given, shapes, is_strict) in enumerate(programs):
        with torch.no_grad():
            program = torch.export.export(
                module, given(highest=64), dynamic_shapes=shapes, strict=is_strict
            )
        path = tmp_path / f"{number}.pt2"
        torch.export.save(program, path)
        args = given(batch=3, seq=9, highest=64)
        torch.save(args, path.with_suffix(".inputs"))
        wanted.append(module(*args))
    subprocess.run([sys.executable, "-c", WITHOUT_US, tmp_path], check=True, cwd=tmp_path)
    outputs = [torch.load(path) for path in sorted(tmp_path.glob("*.outputs"))]
    assert len(outputs) == len(wanted)
    for ours, expected in zip(outputs, wanted, strict=True):
        assert_near(ours, expected, 4e-7)
