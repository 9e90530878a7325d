"""The GPU kernel of `rotary.fused` without a GPU: in Triton's interpreter, and as compiled code."""

import copy
import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)

import triton
from gpu_code import used_by, widths
from grids import pairwise
from interpreter import fused as interpreted
from interpreter import mended
from published import scaled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import rotary
from rotary import KVCache, LatentCache, Norm, Rotary
from rotary.kernels.stages import LARGEST, Stages, fit
from rotary.kernels.torch import fused as torch_fused
from rotary.kernels.torch import fused_gpu as torch_fused_gpu
from rotary.kernels.torch import fused_ready as torch_fused_ready
from rotary.kernels.triton import fused as triton_fused
from rotary.kernels.triton import plan as triton_plan
from rotary.rotate import options_of

SPECS = {
    "half": Rotary(8, base=100.0),
    "interleaved": Rotary(8, base=100.0, layout="interleaved"),
    "mixed": Rotary(8, base=100.0, layout="interleaved", out_layout="half"),
    "slice": Rotary(8, 4, 2, base=100.0),
    "trailing, 3 pairs": Rotary(12, 6, 6, base=100.0, layout="interleaved"),
    "yarn": scaled("yarn", 8, 4.0, 64),
}  # fmt: skip
SLOTS = torch.tensor([3, 4, -1, 7, 8, 0, 11, 12, 13, -1, 15, 14])


@pytest.fixture(autouse=True)
def _mend(monkeypatch):
    mended(monkeypatch)
    monkeypatch.setattr(torch_fused_gpu, "kernel", interpreted.kernel)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads_of(*counts, dim=8, dtype=torch.float32, lead=(2,)):
    return [draw(*lead, count, 6, dim, dtype=dtype, seed=count) for count in counts]


def both(xs, spec, stages, rows=None, seq_dim=-2, out=False):
    """What the formula in torch's operators gives, and the kernel; the caches are in `stages`."""
    options = options_of(spec, seq_dim=seq_dim)
    count = xs[0].shape[seq_dim] if rows is None else 50
    cos, sin = rotary.cos_sin(spec, torch.arange(count))
    caches = copy.deepcopy(stages.cache), copy.deepcopy(stages.cache)
    want = torch_fused.fused(*xs, cos, sin, rows, options, stages._replace(cache=caches[0]), None)
    fitted = fit(xs, cos, rows, options, stages)
    new = [x for x in want if x is not None and x is not xs[2]]  # v may be returned as it is
    outs = [torch.full_like(x, torch.nan) for x in new] if out else None
    got = torch_fused_gpu.fused(*xs, cos, sin, rows, fitted, stages._replace(cache=caches[1]), outs)
    if out:
        assert [id(y) for y in got if y is not None and y is not xs[2]] == [id(y) for y in outs]
    return (want, caches[0]), (got, caches[1])


def assert_equal(one, two, ulps=0):
    """Equal results and caches; `ulps` of the largest number in the type may be between them."""
    (want, cache), (got, other) = one, two
    pairs = list(zip(want, got, strict=True))
    pairs += [
        (value, getattr(other, name))
        for name, value in (vars(cache) if cache is not None else {}).items()
    ]
    for x, y in pairs:
        for a, b in zip(*(z if isinstance(z, tuple) else (z,) for z in (x, y)), strict=True):
            if not isinstance(a, torch.Tensor):
                assert a is b is None or a == b
                continue
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            step = 0.0
            if a.dtype.is_floating_point and a.itemsize > 1:
                # the interpreter cuts bfloat16 off, where a device rounds to nearest even
                more = a.dtype == torch.bfloat16
                most = a[a.isfinite()].abs().max().item()
                step = (ulps + more) * torch.finfo(a.dtype).eps * most
            torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=step, equal_nan=True)


@pytest.mark.parametrize("form", ["none", "head", "heads", "all heads"])
@pytest.mark.parametrize("name", SPECS)
def test_norm_and_rotation_are_those_of_the_formula(name, form):
    spec = SPECS[name]
    dim = spec.head_dim
    shapes = {"none": (None, None), "head": ((dim,), (dim,)), "heads": ((4, dim), (2, dim)),
              "all heads": ((4 * dim,), (2 * dim,))}[form]  # fmt: skip
    weights = [shape and draw(*shape) for shape in shapes]
    norm = Norm(*weights, 1e-5, add_one=form == "head")
    xs = (*heads_of(4, 2, dim=dim), None)
    assert_equal(*both(xs, spec, Stages(norm)), ulps=0 if form == "none" else 2)


def wide(table):
    return torch.cat((table, table), -1)[:, :4]


TABLES = {  # the same numbers, of other strides
    "wide": lambda cos, sin: (wide(cos), wide(sin)),
    "every second column": lambda cos, sin: [
        table.repeat_interleave(2, -1)[:, ::2] for table in (cos, sin)
    ],
    "every third column": lambda cos, sin: [
        table.repeat_interleave(3, -1)[:, ::3] for table in (cos, sin)
    ],
    "columns first": lambda cos, sin: (cos.T.contiguous().T, sin.T.contiguous().T),
    "different strides": lambda cos, sin: (wide(cos), sin),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize("picks", [False, True])
def test_tables_are_read_by_their_own_strides(form, dtype, picks):
    spec = SPECS["half"]
    q, k = heads_of(4, 2)
    halves = [table.to(dtype) for table in rotary.cos_sin(spec, torch.arange(6))]
    parts = TABLES[form](*halves)
    rows = torch.tensor([5, 0, 0, 3, 2, 4]) if picks else None
    stages = Stages(Norm(draw(8), draw(8, seed=1), 1e-5))
    plain = [half.float() for half in halves]
    fitted = fit((q, k, None), plain[0], rows, options_of(spec, seq_dim=-2), stages)
    want = torch_fused_gpu.fused(q, k, None, *plain, rows, fitted, stages, None)
    got = torch_fused_gpu.fused(q, k, None, *parts, rows, fitted, stages, None)
    assert all(map(torch.equal, got[:2], want[:2]))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("scale", [0.3, "heads", "one tensor, and a view", "token"])
@pytest.mark.parametrize("dtype", [kind for kind in LARGEST if kind != "float64"])
def test_casts_give_the_bits_of_the_formula(dtype, scale):
    if scale == "token" and LARGEST[dtype] is None:
        pytest.skip("scales are computed for types of 8 bits")
    positive = draw(4).abs() + 0.1
    scale = {
        "heads": (positive, draw(2).abs() + 0.1, 0.7),
        "one tensor, and a view": (torch.tensor(0.3), positive[::2], positive[1]),
    }.get(scale, scale)
    q, k, v = heads_of(4, 2, 2)
    q[0, 0, 0, :3] = torch.tensor([1e9, -1e9, 0.0])
    q[1, 1], q[0, 1, :, ::2] = 0, 2.0 ** torch.arange(-16.0, 8.0).view(6, 4)
    scales = scale if isinstance(scale, tuple) else (scale,) * 3
    assert_equal(*both((q, k, v), SPECS["half"], Stages(None, None, dtype, scales)))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_every_number_of_a_float8_is_rounded_as_torch_does(kind):
    """All of them, half way between each two, and one float32 beside these."""
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kind)).float()
    every = every[every.isfinite()].sort().values
    middle = (every[1:] + every[:-1]) / 2
    near = [torch.nextafter(middle, to) for to in (every[1:], every[:-1])]
    x = torch.cat([every, middle, *near, torch.tensor([torch.nan, torch.inf, -torch.inf, 1e9])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(1, -1, 1, 64)
    spec = Rotary(64, 2, base=100.0)  # channels from 2 on are not rotated, position 0 turns nothing
    assert_equal(*both((x, None, None), spec, Stages(None, None, kind)))


@pytest.mark.parametrize(
    ("kind", "block", "norm"),
    list(
        pairwise(
            ("float32", "bfloat16", "float8_e4m3fn", "int8"),
            (None, 4),
            (None, Norm(draw(8), draw(8), 1e-6)),
        )
    ),
)
def test_caches_hold_what_the_formula_writes(kind, block, norm):
    lead = (16,) if block is None else (16 // block, block)
    dtype = getattr(torch, kind)
    for scale in (1.0, torch.tensor([0.1, 0.2]), torch.zeros(*lead, 2)):
        if getattr(scale, "ndim", 0) > 1 and LARGEST[kind] is None:
            continue
        memory = [torch.full((*lead, 2, 8), 9.0).to(dtype) for _ in range(2)]
        cache = KVCache(*memory, SLOTS, scale, 0.5)
        xs = tuple(heads_of(4, 2, 2))
        assert_equal(*both(xs, SPECS["interleaved"], Stages(norm, cache)), ulps=2)


def test_a_block_with_its_heads_first_and_slots_in_two_axes():
    xs = tuple(heads_of(4, 2, 2))
    memory = [torch.zeros(4, 2, 4, 8).transpose(1, 2) for _ in range(2)]
    cache = KVCache(*memory, SLOTS.view(2, 6).int())
    assert_equal(*both(xs, SPECS["half"], Stages(None, cache)))


def test_a_row_of_a_latent_cache():
    spec = Rotary(12, 8, 4, base=100.0, layout="interleaved")
    xs = draw(2, 4, 6, 12), draw(2, 1, 6, 8), draw(2, 6, 20)
    norm = Norm(None, None, 1e-6, v=draw(20))
    for rows, scale in ((torch.zeros(16, 28), 1.0),
                        (torch.zeros(4, 4, 28, dtype=torch.float8_e5m2), 0.25)):  # fmt: skip
        cache = LatentCache(rows, SLOTS, scale)
        assert_equal(*both(xs, spec, Stages(norm, cache)), ulps=2)


@pytest.mark.parametrize("axes_of_grid", [1, 3])
def test_row_numbers_other_axes_and_no_batch(axes_of_grid, monkeypatch):
    if axes_of_grid == 1:  # as if it were too long for three
        monkeypatch.setattr(triton_plan, "_GRID", 0)
    norm = Norm(draw(32), draw(16), 1e-6)
    rows = torch.tensor([[3, 1, 4, 1, 5, 9], [26, 5, 35, 8, 49, 0]])
    xs = (*heads_of(4, 2), None)
    assert_equal(*both(xs, SPECS["half"], Stages(norm), rows), ulps=2)
    turned = (*[x.transpose(1, 2) for x in xs[:2]], None)
    assert_equal(*both(turned, SPECS["half"], Stages(norm), rows, seq_dim=-3), ulps=2)
    flat = (*heads_of(4, 2, lead=()), None)
    assert_equal(*both(flat, SPECS["half"], Stages(norm)), ulps=2)
    deep = (*heads_of(4, 2, lead=(3, 1, 2)), None)
    assert_equal(*both(deep, SPECS["half"], Stages(norm)), ulps=2)
    assert_equal(*both((draw(6, 8), None, None), SPECS["half"], Stages()))


@pytest.mark.parametrize("scale", [1.0, "token"])
@pytest.mark.parametrize("lead", [(6, 2), (6, 2, 3), (2, 6, 3)])
def test_the_tokens_of_a_sequence_may_lie_before_the_batch(lead, scale):
    """As in Megatron; with batch axes on both sides torch's operators compute it."""
    seq, spec = lead.index(6), SPECS["half"]
    xs = [draw(*lead, heads, 8) for heads in (4, 2, 2)]
    stages = Stages(Norm(draw(8), draw(8), 1e-6), dtype=None if scale == 1 else "int8",
                    scales=(scale,) * 3)  # fmt: skip
    if lead == (2, 6, 3):
        cos, sin = rotary.cos_sin(spec, torch.arange(6))
        options = options_of(spec, seq_dim=seq)
        fitted = fit(xs, cos, None, options, stages)
        assert torch_fused_gpu.fused(*xs, cos, sin, None, fitted, stages, None) is None
        return
    assert_equal(*both(tuple(xs), spec, stages, seq_dim=seq), ulps=3)
    slots = torch.randperm(40)[: xs[1].shape[:-2].numel()]
    by_batch = xs[1].movedim(seq, -3).shape[:-2]
    cache = KVCache(torch.zeros(40, 2, 8), torch.zeros(40, 2, 8), slots.view(by_batch))
    assert_equal(*both(tuple(xs), spec, Stages(None, cache), seq_dim=seq))


def test_caches_of_k_and_v_of_two_forms():
    xs, spec = tuple(heads_of(4, 2, 2)), SPECS["half"]
    cos, sin = rotary.cos_sin(spec, torch.arange(6))
    memory = torch.zeros(64, 2, 8)

    def write(k, v):
        stages = Stages(None, KVCache(k, v, SLOTS))
        fitted = fit(xs, cos, None, options_of(spec, seq_dim=-2), stages)
        return torch_fused_gpu.fused(*xs, cos, sin, None, fitted, stages, None)

    with pytest.raises(ValueError, match=r"must have as many slots: got \[16, 8\]"):
        write(memory[:16], memory[16:24])
    assert write(memory[:16], memory[16:32].view(2, 8, 2, 8)) is None
    assert write(memory[:16].view(4, 4, 2, 8), memory[16:32].view(2, 8, 2, 8)) is None
    assert not memory.any()
    assert write(memory[:16], memory[16:32]) is not None
    assert memory[:32].any()
    assert not memory[32:].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_scales_of_rows_with_nan_and_inf_and_of_pairs_that_are_no_power_of_two(kind):
    x = draw(1, 5, 2, 12)
    x[0, 0, 0, 1], x[0, 1, 1, 11] = torch.nan, torch.inf
    stages = Stages(dtype=kind, scales=("token",) * 3)
    assert_equal(*both((x, None, None), Rotary(12, 6, base=100.0), stages, seq_dim=-3))


def test_no_tokens():
    spec = Rotary(8, base=100.0)
    xs, table = (torch.zeros(2, 4, 0, 8), None, None), torch.zeros(0, 4)
    fitted = fit(xs, table, None, options_of(spec, seq_dim=-2), Stages())
    assert torch_fused_gpu.fused(*xs, table, table, None, fitted, Stages(), None) is None


def test_out_is_written_by_the_launch():
    xs = tuple(heads_of(4, 2, 2))
    assert_equal(*both(xs, SPECS["mixed"], Stages(Norm(draw(8), None, 1e-6)), out=True), ulps=2)


def test_nothing_beside_the_slots_is_written_and_a_slot_beyond_the_cache_is_skipped():
    xs = tuple(heads_of(4, 2, 2))
    slots = torch.full((12,), -1)
    slots[:3] = torch.tensor([5, 16, 1000])
    memory = torch.full((2, 20, 2, 8), 9.0)
    cache = KVCache(memory[0, :16], memory[1, :16], slots)
    cos, sin = rotary.cos_sin(SPECS["half"], torch.arange(6))
    options = options_of(SPECS["half"], seq_dim=-2)
    stages = Stages(None, cache)
    fitted = fit(xs, cos, None, options, stages)
    torch_fused_gpu.fused(*xs, cos, sin, None, fitted, stages, None)
    is_kept = torch.ones(20, dtype=torch.bool)
    is_kept[5] = False
    assert (memory[:, is_kept] == 9).all()
    assert (memory[:, 5] != 9).all()


def flat(results):
    """All arrays of what a call returns."""
    each = [result if isinstance(result, tuple) else (result,) for result in results]
    return [array for group in each for array in group if array is not None]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """CPU tensors taken for those of a GPU, of which the interpreter is the kernel."""
    monkeypatch.setattr(torch_fused, "is_for_gpu", lambda tensors: True)
    monkeypatch.setattr(torch_fused, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(torch_fused_ready, "quick", lambda *_: None)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_public_call_takes_the_kernel(monkeypatch):
    launches = []
    original = torch_fused_gpu.fused
    monkeypatch.setattr(
        torch_fused_gpu, "fused", lambda *args: launches.append(args) or original(*args)
    )
    spec, (q, k, v) = SPECS["interleaved"], heads_of(4, 2, 2)
    norm, cache = Norm(draw(8), draw(8), 1e-6), KVCache(*torch.zeros(2, 16, 2, 8), SLOTS)
    want = [x.numpy() for x in (q, k, v)]
    plain = Norm(norm.q.numpy(), norm.k.numpy(), 1e-6)
    kept = KVCache(*torch.zeros(2, 16, 2, 8).numpy(), SLOTS.numpy())
    for given, expected, more in (
        ((norm, None), (plain, None), {}),
        ((norm, cache), (plain, kept), {}),
        ((norm, None), (plain, None), {"dtype": "int8", "scale": "token"}),
        ((None, None), (None, None), {"dtype": "int8", "scale": 0.1}),
    ):
        got = rotary.fused(q, k, v, spec, norm=given[0], cache=given[1], **more)
        result = rotary.fused(*want, spec, norm=expected[0], cache=expected[1], **more)
        assert (got[2] is v) == (not more and given[1] is None)
        for y, z in zip(got, result, strict=True):
            for one, two in zip(
                *(a if isinstance(a, tuple) else (a,) for a in (y, z)), strict=True
            ):
                if one is not None:
                    torch.testing.assert_close(one, torch.from_numpy(two), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache.k, torch.from_numpy(kept.k), rtol=0, atol=1e-6)
    assert len(launches) == 4


@pytest.mark.usefixtures("on_a_gpu")
def test_a_public_call_writes_in_place_and_refuses_what_the_formula_refuses():
    spec, (q, k, v) = SPECS["half"], heads_of(4, 2, 2)
    norm = Norm(draw(8), draw(8), 1e-6)
    want = [y.clone() for y in rotary.fused(q, k, None, spec, norm=norm)[:2]]
    x, y = q.clone(), k.clone()
    assert rotary.fused(x, y, None, spec, norm=norm, out=(x, y))[0] is x
    assert torch.equal(x, want[0])
    assert torch.equal(y, want[1])
    assert (x._version, y._version) == (1, 1), "autograd is told of what was written"
    kept = torch.zeros(2, 16, 2, 8)
    rotary.fused(q, k, v, spec, cache=KVCache(*kept, SLOTS))
    assert kept._version == 2
    wide = torch.empty(2, 4, 6, 16)[..., ::2]
    rotary.fused(q, None, None, spec, norm=norm, out=wide)
    assert torch.equal(wide, want[0])
    memory = torch.zeros(2, 16, 2, 8)
    for more, error, sentence in (
        ({"out": (q, k[:1])}, ValueError, "out must be"),
        ({"out": (q[:, :, :, :].flip(0), k), "dtype": "int8"}, ValueError, "out must be"),
        ({"out": (q, k), "dtype": "int8", "scale": "token"}, ValueError, "scales"),
        ({"cache": KVCache(*memory, SLOTS[:3])}, ValueError, "one per token"),
        ({"cache": KVCache(*memory, SLOTS.float())}, TypeError, "whole numbers"),
        ({"cache": KVCache(*memory[..., :4], SLOTS)}, ValueError, "the cache of k must be"),
        ({"cache": KVCache(memory[0], None, SLOTS)}, ValueError, "the cache has no v"),
        ({"norm": Norm(draw(7), None, 1e-6)}, ValueError, "norm weight of q"),
        ({"scale": "token"}, ValueError, "for int8 and float8"),
    ):
        with pytest.raises(error, match=sentence):
            rotary.fused(q, k, v if "cache" in more else None, spec, **more)
        assert not memory.any()


# --- the code for the device ---

KINDS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
         torch.int64: "*i64", torch.uint8: "*u8", torch.int8: "*i8"}  # fmt: skip


def codes(xs, spec, stages, monkeypatch):
    """(registers, local memory in bytes, widths of stores) for sm_80 and sm_90."""
    found, compiled = [], triton_fused.kernel

    class Launch:
        def __getitem__(self, grid):
            return self.compile_only

        def compile_only(self, *args, num_warps, enable_fp_fusion, **constants):
            names = compiled.arg_names
            signature, values, attributes = {}, dict(constants), {}
            for index, (name, value) in enumerate(zip(names, args, strict=False)):
                if isinstance(value, torch.Tensor):
                    signature[name] = KINDS[value.dtype]
                    attributes[index,] = [["tt.divisibility", 16]]
                elif isinstance(value, float):
                    signature[name] = "fp32"
                elif value == 1 and name not in triton_fused.NUMBERS:
                    signature[name], values[name] = "constexpr", 1
                else:
                    signature[name] = "i32"
                    if value % 16 == 0 and name not in triton_fused.NUMBERS:
                        attributes[index,] = [["tt.divisibility", 16]]
            signature |= dict.fromkeys(constants, "constexpr")
            numbers = {(names.index(name),): value for name, value in values.items()}
            source = ASTSource(compiled, signature, numbers, attributes)
            for arch in (80, 90):
                options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
                result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
                ptx = result.asm["ptx"]
                found.append((*used_by(result.asm["cubin"]), widths("st", ptx), "max.NaN" in ptx))

    monkeypatch.setattr(torch_fused_gpu, "kernel", Launch())
    cos, sin = rotary.cos_sin(spec, torch.arange(xs[0].shape[-3]))
    options = options_of(spec, seq_dim=-3)
    fitted = fit(xs, cos, None, options, stages)
    torch_fused_gpu.fused(*xs, cos, sin, None, fitted, stages, None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["Qwen3", "OLMo 2", "into a float8 cache", "DeepSeek"])
def test_the_compiled_kernel_spills_nothing_and_stores_vectors(form, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    layout = "interleaved" if form == "DeepSeek" else "half"
    q, k, v = (draw(1, 64, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))
    spec, norm, cache = Rotary(128, layout=layout), Norm(draw(128), draw(128), 1e-6), None
    if form == "OLMo 2":
        norm = Norm(draw(32 * 128), draw(8 * 128), 1e-6)
    if form == "into a float8 cache":
        memory = [torch.zeros(16, 16, 8, 128, dtype=torch.float8_e4m3fn) for _ in range(2)]
        cache = KVCache(*memory, torch.arange(64), 0.1, 0.1)
    if form == "DeepSeek":
        spec, norm = Rotary(192, 64, 128, layout=layout), Norm(None, None, 1e-6, v=draw(512))
        q, k = draw(1, 64, 32, 192, dtype=torch.bfloat16), draw(1, 64, 1, 64, dtype=torch.bfloat16)
        v = draw(1, 64, 512, dtype=torch.bfloat16)
        cache = LatentCache(torch.zeros(64, 576, dtype=torch.bfloat16), torch.arange(64))
    for registers, local, stores, _ in codes((q, k, v), spec, Stages(norm, cache), monkeypatch):
        assert local == 0, "registers are spilled"
        assert registers <= 128
        assert set(stores) <= {128, 64, 32}  # 32 where a tile has two rows of 64 channels


def test_the_compiled_kernel_keeps_a_nan_in_the_largest_channel(monkeypatch, tmp_path):
    """As the interpreter does anyway; the plain instruction drops it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stages = Stages(dtype="int8", scales=("token",) * 3)
    xs = draw(1, 64, 32, 128, dtype=torch.bfloat16), None, None
    assert all(keeps for *_, keeps in codes(xs, Rotary(128), stages, monkeypatch))


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_a_row_too_small_for_a_scale_is_zero(kind):
    q, k, v = heads_of(4, 2, 2)
    q[0, 0, 0] = 0
    q[0, 0, 0, 0] = 1e-44
    q[0, 0, 1] *= 1e-37
    want, got = both((q, k, v), SPECS["half"], Stages(dtype=kind, scales=("token",) * 3))
    assert_equal(want, got)
    assert (got[0][0][1][0, 0, :2] == 1).all()
