"""The torch side of `rotary.fused`: compiled loops, formula, gradients, against the reference."""

import itertools
import os
import re

import numpy as np
import pytest
import torch
from libraries import of_transformers
from programs import alone
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import rotary
from rotary import KVCache, Norm, Rotary, fused
from rotary.kernels.torch import fused as torch_fused

pytestmark = pytest.mark.usefixtures("numpy_by_formula")
EPS = 1e-5
SPECS = {
    "half": Rotary(64, base=100.0),
    "interleaved": Rotary(64, base=100.0, layout="interleaved"),
    "mixed": Rotary(64, base=100.0, layout="interleaved", out_layout="half"),
    "to interleaved": Rotary(64, base=100.0, out_layout="interleaved"),
    "slice": Rotary(50, 20, 7, base=100.0),
    "interleaved slice": Rotary(50, 20, 30, base=100.0, layout="interleaved"),
    "odd": Rotary(7, 6, 1, base=100.0),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LIMITS = dict(zip(DTYPES, (2e-6, 2**-7, 2**-10, 4e-7), strict=True))  # of the largest result


def tensors(spec, heads=(4, 2), seq=37, dtype=torch.float32, seq_dim=-2, batch=2):
    torch.manual_seed(0)
    made = [torch.randn(batch, count, seq, spec.head_dim).to(dtype) for count in heads]
    return made if seq_dim == -2 else [x.transpose(1, 2).contiguous() for x in made]


def norm_of(spec, form="head", heads=(4, 2), dtype=torch.float32, add_one=False):
    dim = spec.head_dim
    shapes = {"head": lambda h: (dim,), "heads": lambda h: (h, dim), "full": lambda h: (h * dim,)}
    return Norm(*[torch.randn(shapes[form](h)).to(dtype) for h in heads], EPS, add_one=add_one)


def in_float64(norm):
    weights = [None if w is None else w.detach().double().numpy() for w in (norm.q, norm.k, norm.v)]
    return Norm(*weights[:2], norm.eps, weights[2], norm.add_one)


def numbers(x):
    return x.detach().double().numpy()


def assert_close(y, want, dtype):
    want = np.asarray(want, np.float64)
    assert y.dtype == dtype
    error = np.abs(numbers(y) - want).max()
    assert error <= LIMITS[dtype] * max(1, np.abs(want).max())


@pytest.fixture
def by_formula(monkeypatch):
    monkeypatch.setattr(torch_fused, "loops", None)


def run(**options):
    """A call, and whether the loops did it."""
    pytest.importorskip("numba")
    done = []
    kept, quick = torch_fused.by_loops, torch_fused.ready.quick

    def seen(*args):
        results = kept(*args)
        done.append(results is not None)
        return results

    torch_fused.by_loops, torch_fused.ready.quick = seen, lambda *args: None
    try:
        results = fused(**options)
    finally:
        torch_fused.by_loops, torch_fused.ready.quick = kept, quick
    if options.get("out") is None:  # what is kept of a call gives the same bits
        for y, again in zip(results, fused(**options), strict=True):
            assert (y is None and again is None) or torch.equal(y, again)
    return results, done == [True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["head", "heads", "full"])
@pytest.mark.parametrize("name", SPECS)
def test_the_loops_agree_with_the_reference(name, form, dtype):
    spec = SPECS[name]
    for seq_dim, add_one in itertools.product((-2, -3), (False, True)):
        q, k = tensors(spec, dtype=dtype, seq_dim=seq_dim)
        norm = norm_of(spec, form, dtype=dtype, add_one=add_one)
        (y, z, _), is_compiled = run(q=q, k=k, v=None, spec=spec, norm=norm, seq_dim=seq_dim)
        assert is_compiled
        want = fused(numbers(q), numbers(k), None, spec, norm=in_float64(norm), seq_dim=seq_dim)
        assert_close(y, want[0], dtype)
        assert_close(z, want[1], dtype)


@pytest.mark.parametrize("form", ["head", "heads", "full"])
@pytest.mark.parametrize("name", SPECS)
def test_the_formula_agrees_with_the_reference(name, form, by_formula):
    spec, dtype = SPECS[name], torch.float64
    q, k = tensors(spec, dtype=dtype)
    norm = norm_of(spec, form, dtype=dtype)
    y, z, _ = fused(q, k, None, spec, norm=norm)
    want = fused(numbers(q), numbers(k), None, spec, norm=in_float64(norm))
    np.testing.assert_allclose(y, want[0], rtol=0, atol=1e-14 * np.abs(want[0]).max())
    np.testing.assert_allclose(z, want[1], rtol=0, atol=1e-14 * np.abs(want[1]).max())


def test_large_calls_on_all_threads_are_as_small_ones():
    """Stores past the caches, and parts of several threads."""
    spec = Rotary(128, base=1e6)
    q, k = tensors(spec, (32, 8), 2048, torch.bfloat16, -3, 1)
    norm, slots = norm_of(spec), torch.randperm(2100)[:2048]
    cache = KVCache(*[torch.zeros(2100, 8, 128, dtype=torch.bfloat16) for _ in "kv"], slots)
    tables = rotary.cos_sin(spec, torch.arange(2048))
    y, z, _ = fused(q, k, None, spec, tables=tables, norm=norm, seq_dim=-3)
    again, *_ = fused(q, k, k, spec, tables=tables, norm=norm, seq_dim=-3, cache=cache)
    assert torch.equal(y, again)
    assert torch.equal(cache.k[slots], z[0])
    assert torch.equal(cache.v[slots], k[0])
    for at in (0, 1000, 2047):
        part = slice(at, at + 1)
        some = [x[:, part] for x in (q, k)]
        small = fused(*some, None, spec, tables=[t[part] for t in tables], norm=norm, seq_dim=-3)
        assert torch.equal(small[0], y[:, part])
        assert torch.equal(small[1], z[:, part])


def test_in_place_and_row_numbers():
    spec = SPECS["slice"]
    q, k = tensors(spec)
    norm, ids = norm_of(spec), torch.randint(0, 90, (2, 37))
    tables = rotary.cos_sin(spec, torch.arange(90))
    want = fused(q, k, None, spec, ids, norm=norm, seq_dim=-2)
    version = q._version
    (y, z, _), is_compiled = run(q=q, k=k, v=None, spec=spec, positions=ids, tables=tables,
                                 norm=norm, seq_dim=-2, out=(q, k))  # fmt: skip
    assert is_compiled
    assert y is q
    assert z is k
    assert q._version > version
    assert torch.equal(q, want[0])
    assert torch.equal(k, want[1])


def test_strides_are_read():
    spec = SPECS["half"]
    wide = torch.randn(2, 37, 6 * 64)
    q, k = wide.view(2, 37, 6, 64).transpose(1, 2).split([4, 2], dim=1)
    norm = norm_of(spec)
    want = fused(q.contiguous(), k.contiguous(), None, spec, norm=norm)
    (y, z, _), is_compiled = run(q=q, k=k, v=None, spec=spec, norm=norm)
    assert is_compiled
    assert torch.equal(y, want[0])
    assert torch.equal(z, want[1])


# --- gradients ---


SMALL = {
    "half": Rotary(8, base=100.0),
    "mixed slice": Rotary(10, 4, 3, base=100.0, layout="interleaved", out_layout="half"),
    "interleaved": Rotary(6, 4, base=100.0, layout="interleaved"),
}


@pytest.mark.parametrize("form", ["head", "heads", "full"])
@pytest.mark.parametrize("name", SMALL)
def test_gradients_of_every_operand(name, form):
    spec = SMALL[name]
    for seq_dim, add_one in ((-2, False), (-3, True)):
        q, k = tensors(spec, (3, 2), 3, torch.float64, seq_dim, 1)
        norm = norm_of(spec, form, (3, 2), torch.float64, add_one)
        operands = [x.requires_grad_() for x in (q, k, norm.q, norm.k)]

        def call(q, k, wq, wk, seq_dim=seq_dim, add_one=add_one):
            norm = Norm(wq, wk, EPS, add_one=add_one)
            return fused(q, k, None, spec, norm=norm, seq_dim=seq_dim)[:2]

        assert torch.autograd.gradcheck(call, operands, atol=1e-6)


def test_gradients_of_gradients():
    spec = SPECS["odd"]
    q, k = tensors(spec, (2, 1), 2, torch.float64, batch=1)
    norm = norm_of(spec, "full", (2, 1), torch.float64)
    operands = [x.requires_grad_() for x in (q, k, norm.q, norm.k)]

    def call(q, k, wq, wk):
        return fused(q, k, None, spec, norm=Norm(wq, wk, EPS))[:2]

    assert torch.autograd.gradgradcheck(call, operands, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["head", "heads", "full"])
@pytest.mark.parametrize("name", ["half", "interleaved", "slice"])
def test_gradients_of_the_loops_are_those_of_the_formula(name, form, dtype, monkeypatch):
    spec, found = SPECS[name], []
    for is_compiled in (True, False):
        q, k = tensors(spec, (8, 2), 700, dtype)
        torch.manual_seed(1)
        norm = norm_of(spec, form, (8, 2))
        operands = [x.requires_grad_() for x in (q, k, norm.q, norm.k)]
        if not is_compiled:
            monkeypatch.setattr(torch_fused, "loops", None)
        y, z, _ = fused(q, k, None, spec, norm=norm)
        torch.manual_seed(2)
        weights = [torch.randn(x.shape) for x in (y, z)]
        sum((x * w).sum() for x, w in zip((y, z), weights, strict=True)).backward()
        found.append([x.grad for x in operands])
        monkeypatch.undo()
    limit = 2e-5 if dtype == torch.float32 else 2**-6
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= limit * want.abs().max()


def test_rows_of_a_gradient_live_until_it_is_done():
    """Freed memory of this size goes back to the system: who reads it is ended by a signal."""
    script = """
import torch
from rotary import Norm, Rotary, fused
q, k, weight = torch.randn(1, 100, 2, 4096), torch.randn(1, 100, 2, 4096), torch.ones(4096)
y, *_ = fused(q.requires_grad_(), k, None, Rotary(4096, rotary_dim=64), norm=Norm(weight, None, 0))
y.sum().backward()
"""
    alone(script, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "4096"})


def test_only_one_of_both_has_a_weight_or_a_gradient():
    spec = SPECS["half"]
    q, k = tensors(spec)
    norm = Norm(None, torch.randn(64, requires_grad=True), EPS)
    q.requires_grad_()
    y, z, _ = fused(q, k, None, spec, norm=norm)
    y.sum().backward(retain_graph=True)
    assert q.grad is not None
    assert norm.k.grad is None
    z.sum().backward()
    assert norm.k.grad is not None
    want = rotary.rotate(torch.ones_like(q), *rotary.cos_sin(spec, torch.arange(37)), spec,
                         seq_dim=-2, conjugate=True)  # fmt: skip
    assert torch.equal(q.grad, want)


def test_what_autograd_cannot_follow_is_refused():
    spec = SPECS["half"]
    q, k = tensors(spec)
    norm = Norm(torch.ones(64, requires_grad=True), None, EPS)
    with pytest.raises(RuntimeError, match="do not take part in autograd"):
        fused(q, k, None, spec, norm=norm, out=(q, k))
    with torch.no_grad():
        fused(q, k, None, spec, norm=norm, out=(q, k))


# --- other ways of torch ---


def test_torch_compile_and_vmap():
    spec = SPECS["half"]
    q, k = tensors(spec)
    norm = norm_of(spec)
    want = fused(q, k, None, spec, norm=norm)
    tables = rotary.cos_sin(spec, torch.arange(37))

    def call(q, k):
        return fused(q, k, None, spec, tables=tables, norm=norm, seq_dim=-2)[:2]

    compiled: list[Tensor] = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k)
    mapped = torch.vmap(call)(q, k)
    for got in (compiled, mapped):
        for y, z in zip(got, want, strict=False):
            assert (y - z).abs().max() <= 2e-6


@pytest.mark.filterwarnings("ignore")  # of torch.jit.trace: shapes are constants
@pytest.mark.parametrize("add_one", [False, True])
def test_a_traced_norm(add_one):
    spec = SPECS["half"]
    q, k = tensors(spec)
    norm = norm_of(spec, add_one=add_one)

    def call(q, k):
        return fused(q, k, None, spec, norm=norm)[:2]

    traced = torch.jit.trace(call, (q, k))
    other = q + 1, k - 1
    for y, z in zip(traced(*other), call(*other), strict=True):
        assert (y - z).abs().max() <= 2e-6


def by_compile(call):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("transform", [by_compile, torch.vmap])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_outputs_of_compiled_and_mapped_calls(transform, dtype):
    spec = SPECS["half"]
    q, k = tensors(spec)
    norm, kind = norm_of(spec), torch.bfloat16 if dtype else torch.float32
    want = fused(q, k, None, spec, norm=norm, dtype=dtype)
    outs = torch.zeros_like(q, dtype=kind), torch.zeros_like(k, dtype=kind)
    in_place = q.clone(), k.clone()

    def call(q, k, y, z):
        return fused(q, k, None, spec, norm=norm, dtype=dtype, out=(y, z))[:2]

    for given in [(q, k, *outs)] + ([] if dtype else [(*in_place, *in_place)]):
        results = transform(call)(*given)
        for written, y, z in zip(given[2:], results, want, strict=False):
            assert torch.equal(written, y)
            assert (y.float() - z.float()).abs().max() <= LIMITS[kind] * z.abs().max()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_cache_inside_vmap_is_refused(is_compiled):
    memory = CACHE.clone()

    def call(k):
        return fused(k, k, None, SPECS["half"], cache=KVCache(memory, None, torch.arange(5)))[0]

    mapped = torch.vmap(call)
    mapped = by_compile(mapped) if is_compiled else mapped
    is_old = is_compiled and torch.__version__.startswith("2.8")  # its Dynamo leaves the words out
    words = "Observed exception" if is_old else "cache= cannot be used inside vmap"
    with pytest.raises(Exception, match=words):
        mapped(KEY[None])
    assert not memory.any()


def cached_step(q, k, keys, values, slots, key_scales=1.0, value_scales=1.0):
    """A step whose cache is written by the formula, as by a compiler."""
    cache = KVCache(keys, values, slots, key_scales, value_scales)
    return fused(q, k, 2 * k, SPECS["half"], cache=cache, seq_dim=0)[0]


@pytest.mark.parametrize("kind", ["float32", "float8_e4m3fn"])
def test_a_recorded_step_writes_the_slots_of_its_call(kind):
    """How many tokens have a slot ended in a size that only the program knows, read from a GPU."""
    q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    scales = [torch.ones(8, 4, 2)] * 2 if kind == "float8_e4m3fn" else []
    memory = [torch.randn(8, 4, 2, 64).to(getattr(torch, kind)) for _ in "kv"]

    def given(slots):
        return q, k, *[x.clone() for x in memory], torch.tensor(slots), *[x.clone() for x in scales]

    class Step(torch.nn.Module):
        def forward(self, *given):
            return cached_step(*given)

    program = torch.export.export(Step(), given([7, -1, 2, 0, 9]), strict=False)
    assert not program.range_constraints
    recorded = program.module()
    for slots in ([7, -1, 2, 0, 9], [-1, 30, -1, 0, -1], [-1] * 5, [3, 3, -1, 4, -1], range(5)):
        ours, wanted = given(list(slots)), given(list(slots))
        torch.testing.assert_close(recorded(*ours), cached_step(*wanted))
        for x, y in zip(ours[2:], wanted[2:], strict=True):
            torch.testing.assert_close(x.float(), y.float())


def test_a_cache_of_tensors_without_values():
    """Which tokens have a slot is in no tensor: torch refused `nonzero`."""
    sizes = (5, 4, 64), (5, 2, 64), (16, 2, 64), (16, 2, 64)
    given = *[torch.ones(size) for size in sizes], torch.arange(5)
    assert cached_step(*[x.to("meta") for x in given]).shape == (5, 4, 64)
    with FakeTensorMode() as mode:
        assert cached_step(*map(mode.from_tensor, given)).shape == (5, 4, 64)


def test_a_cache_without_slots_takes_tokens_without_a_slot():
    """As in the first step of a server, which runs before it has a cache."""
    step = torch.compile(cached_step, backend="eager", fullgraph=True)
    given = torch.ones(5, 4, 64), torch.ones(5, 2, 64), torch.ones(0, 2, 64), torch.ones(0, 2, 64)
    for run in (step, cached_step):
        assert run(*given, torch.full((5,), -1)).shape == (5, 4, 64)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_casts_are_those_of_the_reference(kind):
    spec = SPECS["half"]
    q, k = tensors(spec)
    scale = (torch.tensor([0.1, 0.2, 0.3, 0.4]), 0.5, "token")
    results = fused(q, k, k, spec, dtype=kind, scale=scale)
    values, scales = results[2]
    want = fused(*[x.numpy() for x in (q, k, k)], spec, dtype=kind,
                 scale=(scale[0].numpy(), 0.5, "token"))  # fmt: skip
    for y, z in zip((*results[:2], values), (*want[:2], want[2][0]), strict=True):
        assert str(y.dtype) == f"torch.{kind}"
        difference = np.abs(y.float().numpy() - z.astype(np.float32))
        # where the library rounds the product the other way, the cast may be one step away
        assert (difference != 0).mean() < 0.01
    np.testing.assert_allclose(scales, want[2][1], rtol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_a_row_too_small_for_a_scale_is_zero(kind):
    q = torch.zeros(2, 64)
    q[0, 0], q[1, 0] = 1e-44, 1e-40
    (y, scales), _, _ = fused(q, None, None, SPECS["half"], dtype=kind, scale="token")
    assert (y.float() == 0).all()
    assert (scales == 1).all()


KEY = torch.ones(2, 5, 64)
CACHE = torch.zeros(8, 2, 64)
BITS = torch.zeros(8, 2, 64, dtype=torch.int8)
FLAT = torch.zeros(4, 2, 5, 64)
REFUSED = [
    (lambda f: f(cache=KVCache(CACHE, None, [0.5, 1, 2, 3, 4])),
     TypeError, "slots must be whole numbers, got torch.float32"),
    (lambda f: f(cache=KVCache(CACHE, None, torch.arange(5.0))),
     TypeError, "slots must be whole numbers, got torch.float32"),
    (lambda f: f(cache=KVCache(CACHE, None, torch.ones(5) > 0)),
     TypeError, "slots must be whole numbers, got torch.bool"),
    (lambda f: f(cache=KVCache(CACHE, None, None)),
     TypeError, "slots must be an array of whole numbers, got None"),
    (lambda f: f(cache=KVCache(CACHE, None, np.full(5, 2**63, np.uint64))),
     ValueError, "slots must fit in int64, got 9223372036854775808"),
    (lambda f: f(cache=KVCache(CACHE, None, [[1, 2], [3, 4, 5]])),
     TypeError, "slots must be an array of whole numbers, got [[1, 2], [3, 4, 5]]"),
    (lambda f: f(cache=KVCache(CACHE[:1].expand(8, 2, 64), None, range(5))),
     ValueError, "elements that share memory"),
    (lambda f: f(v=KEY, cache=KVCache(BITS, BITS.clone(), range(5), *[torch.zeros(8, 2)] * 2)),
     ValueError, "out overlaps"),
    (
        lambda f: f(cache=KVCache(FLAT.view(20, 2, 64), None, range(5)), out=(FLAT[0],),
                    scale=(2.0, 1.0, 1.0)),
        ValueError, "out overlaps",
    ),
    (lambda f: f(v=FLAT[0], dtype="float32", out=tuple(FLAT[:3])), ValueError, "out overlaps"),
    (lambda f: f(dtype="int8", scale=None), TypeError, "scale of q is None"),
    (lambda f: f(cache=KVCache(BITS, None, range(5), torch.zeros(8, 2).bfloat16())),
     TypeError, "so it must be float32 or float64, got bfloat16"),
    (lambda f: f(dtype="int8", scale=torch.zeros(2).bfloat16()),
     ValueError, "scale of q must be finite and not 0, got 0.0"),
    (lambda f: f(norm=Norm(np.ones(64), None, EPS)),
     TypeError, "norm weights must be torch tensors like q, got a numpy.ndarr"),
    (lambda f: f(cache=KVCache(CACHE.cfloat(), None, range(5))), TypeError, "dtype must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_what_does_not_fit_is_refused(call, error, text):
    memory = CACHE, BITS, FLAT
    for x in memory:
        x.zero_()

    def f(v=None, **options):
        return fused(KEY, KEY, v, SPECS["half"], **options)

    for _ in range(2):  # a call like one before is refused too
        with pytest.raises(error, match=re.escape(text)) as caught:
            call(f)
        assert "\n" not in str(caught.value)
    assert not any(x.any() for x in memory)  # nothing was written


def test_scales_that_are_not_used_may_be_none():
    y, *_ = fused(KEY, None, None, SPECS["half"], scale=(1.0, None, None))
    assert torch.equal(y, rotary.apply(SPECS["half"], KEY))


def test_the_scale_of_an_array_that_is_not_there_changes_nothing(no_other_way):
    """Not even which code runs: it differs in the last bit, and in time."""
    pytest.importorskip("numba")
    spec = SPECS["half"]
    (q,) = tensors(spec, heads=(4,))
    tables = rotary.cos_sin(spec, torch.arange(37))
    norm = Norm(torch.full((64,), 1.3), None, EPS)
    options = {"norm": norm, "tables": tables}
    want = fused(q, None, None, spec, **options)[0]
    no_other_way()
    for scale in ((1.0, 1.0, 0.5), (1.0, 0.25, 1.0)):
        assert torch.equal(fused(q, None, None, spec, scale=scale, **options)[0], want)


def test_slots_in_a_list_are_beside_q_whatever_the_default_device():
    cache = KVCache(CACHE.clone(), None, [1, 2, 3, 4, 5])
    tables = rotary.cos_sin(SPECS["half"], torch.arange(5))
    with torch.device("meta"):
        fused(KEY, KEY, None, SPECS["half"], tables=tables, cache=cache, seq_dim=-2)
    assert cache.k[1:6].any()
    assert not cache.k[[0, 6, 7]].any()


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_a_cache_of_few_bits(kind):
    spec, dtype = SPECS["half"], getattr(torch, kind)
    q, k = tensors(spec, batch=1)
    slots = torch.randperm(64)[:37]
    slots[5] = -1
    cache = KVCache(*[torch.zeros(8, 8, 2, 64, dtype=dtype) for _ in "kv"], slots,
                    torch.zeros(8, 8, 2), torch.tensor([0.1, 0.2]))  # fmt: skip
    y, *_ = fused(q, k, k, spec, cache=cache)
    assert torch.equal(y, rotary.apply(spec, q))
    keys = cache.k.float() * cache.k_scale[..., None]
    values = cache.v.float() * cache.v_scale[:, None]
    kept = slots >= 0
    for stored, x in ((keys, rotary.apply(spec, k)), (values, k)):
        got = stored.view(64, 2, 64)[slots[kept]]
        want = x[0].transpose(0, 1)[kept]
        step = {"int8": 0.6 / 127 if stored is keys else 0.12, "float8_e4m3fn": 2**-4}
        assert (got - want).abs().max() <= step.get(kind, 2**-3) * want.abs().max()


@pytest.mark.parametrize("shapes", [((0, 4, 5, 64), (0, 2, 5, 64)), ((1, 4, 0, 64), (1, 2, 0, 64))])
def test_nothing_is_rotated_to_nothing(shapes):
    q, k = map(torch.empty, shapes)
    norm = norm_of(SPECS["half"])
    y, z, _ = fused(q, k, None, SPECS["half"], norm=norm)
    assert (y.shape, z.shape) == (q.shape, k.shape)


def tiny(name):
    """A model of transformers, and the module with its apply_rotary_pos_emb."""
    of_transformers("transformers")
    from transformers import Gemma3TextConfig, Olmo2Config, Qwen3Config
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.olmo2 import modeling_olmo2
    from transformers.models.qwen3 import modeling_qwen3

    kind, module, model = {
        "qwen3": (Qwen3Config, modeling_qwen3, "Qwen3ForCausalLM"),
        "gemma3": (Gemma3TextConfig, modeling_gemma3, "Gemma3ForCausalLM"),
        "olmo2": (Olmo2Config, modeling_olmo2, "Olmo2ForCausalLM"),
    }[name]
    torch.manual_seed(0)
    config = kind(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa", pad_token_id=0,
    )  # fmt: skip
    built = getattr(module, model)(config).eval()
    for parameter in built.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return built, module


def norms_of(model):
    return [layer.self_attn.fused_norm for layer in model.model.layers]


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2"])
def test_one_call_in_place_of_norm_and_rotation_of_transformers(name, monkeypatch):
    """Logits of a model whose attention normalizes and rotates by `fused`."""
    model, module = tiny(name)
    ids = torch.randint(1, 50, (2, 23))
    want = model(ids).logits
    spec = Rotary(16)  # the tables are those of the model: only layout and slice are read
    for layer in model.model.layers:
        attention = layer.self_attn
        eps = getattr(attention.q_norm, "variance_epsilon", None) or attention.q_norm.eps
        norm = Norm(attention.q_norm.weight, attention.k_norm.weight, eps,
                    add_one=name == "gemma3")  # fmt: skip
        attention.fused_norm = norm
        attention.q_norm = attention.k_norm = torch.nn.Identity()
    norms = itertools.cycle(norms_of(model))
    calls = []

    def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
        tables = cos[..., :8].contiguous(), sin[..., :8].contiguous()
        calls.append(q.shape)
        return fused(q, k, None, spec, tables=tables, norm=next(norms), seq_dim=-2)[:2]

    monkeypatch.setattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    got = model(ids).logits
    assert len(calls) == 2
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()
    got.square().mean().backward()
    weights = [weight for norm in norms_of(model) for weight in (norm.q, norm.k)]
    assert all(weight.grad.abs().max() > 0 for weight in weights)


def a_server(seq=3, dtype=torch.bfloat16):
    """Operands of one step: q, k, v, a norm, tables, row numbers and a cache of 4 blocks of 8."""
    q, k = tensors(SPECS["half"], seq=seq, dtype=dtype, seq_dim=-3)
    norm = norm_of(SPECS["half"], dtype=dtype)
    tables = rotary.cos_sin(SPECS["half"], torch.arange(50))
    cache = KVCache(*[torch.zeros(4, 8, 2, 64, dtype=dtype) for _ in "kv"], torch.arange(2 * seq))
    return q, k, torch.randn_like(k), norm, tables, torch.arange(2 * seq).reshape(2, seq), cache


@pytest.fixture
def no_other_way(monkeypatch):
    """After `forbid()` a call may only be one like before."""

    def forbid():
        monkeypatch.setattr(torch_fused, "by_loops", None)
        monkeypatch.setattr(torch_fused, "formula_of_both", None)

    return forbid


def test_a_call_like_one_before_reads_everything_again(no_other_way):
    q, k, v, norm, tables, rows, cache = a_server()
    outs = torch.empty_like(q), torch.empty_like(k)
    options = {"spec": SPECS["half"], "tables": tables, "seq_dim": -3}

    def calls():
        stored = fused(q, k, v, norm=norm, cache=cache, positions=rows, **options)
        fused(q, k, None, norm=norm, positions=rows, out=outs, **options)
        return [y.clone() for y in (stored[0], cache.k, cache.v, *outs)]

    found, wanted = [], []
    calls()
    for step in range(2):
        for x in (q, k, v, norm.q, norm.k):
            x.add_(1 + step)
        rows.add_(7)
        cache.slots.add_(1)
        kept = cache.k.clone(), cache.v.clone()
        found.append(calls())
        (cache.k[:], cache.v[:]) = kept
        other = [x.repeat(2, 1, 1, 1)[:2] for x in (q, k, v)]
        wanted.append(run(
            q=other[0], k=other[1], v=other[2], norm=norm, cache=cache, positions=rows, **options
        )[0][0])  # fmt: skip
        wanted[-1] = [wanted[-1], cache.k.clone(), cache.v.clone()]
        assert torch.equal(outs[0], wanted[-1][0])
    for one, other in zip(found, wanted, strict=True):
        for y, z in zip(one, other, strict=False):
            assert torch.equal(y, z)
    no_other_way()
    calls()


def test_a_call_like_one_before_refuses_what_the_first_would():
    q, k, v, norm, tables, rows, cache = a_server()
    options = {"spec": SPECS["half"], "tables": tables, "norm": norm, "seq_dim": -3}
    fused(q, k, v, cache=cache, positions=rows, **options)
    before = cache.k.clone(), cache.v.clone()
    rows[1, 2] = 50
    with pytest.raises(ValueError, match="positions run from 0 to 50, the tables have 50 rows"):
        fused(q, k, v, cache=cache, positions=rows, **options)
    rows[1, 2], cache.slots[3] = 5, 32
    with pytest.raises(ValueError, match="slots run to 32, the cache has 32"):
        fused(q, k, v, cache=cache, positions=rows, **options)
    assert torch.equal(cache.k, before[0])
    assert torch.equal(cache.v, before[1])
    outs = torch.empty_like(q), torch.empty_like(k)
    fused(q, k, None, positions=rows, out=outs, **options)
    buffer = torch.zeros(2 * q.numel(), dtype=q.dtype)
    x, y = buffer[: q.numel()].view_as(q), buffer[64 : q.numel() + 64].view_as(q)
    pytest.importorskip("numba", reason="the formula reads all before it writes")
    with pytest.raises(ValueError, match="out overlaps"):
        fused(x, k, None, positions=rows, out=(y, outs[1]), **options)
    options["norm"] = Norm(norm.q.clone().requires_grad_(), norm.k, EPS)
    with pytest.raises(RuntimeError, match="do not take part in autograd"):
        fused(q, k, None, positions=rows, out=outs, **options)


@pytest.mark.parametrize("is_into", [False, True])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("source", ["q", "k", "v"])
def test_an_input_that_is_a_cache_is_refused(source, name, is_into):
    """A token goes to another row, which is perhaps still to be read."""
    pytest.importorskip("numba", reason="the formula reads all before it writes")
    q, k, v = torch.randn(3, 9, 2, 64)
    slots = torch.arange(9).roll(1)
    options = {"spec": SPECS["half"], "seq_dim": -3, "out": (q.clone(),) if is_into else None}
    memory = {"k": k.clone(), "v": v.clone()}
    fused(q, k, v, cache=KVCache(**memory, slots=slots), **options)
    memory[name] = {"q": q, "k": k, "v": v}[source][:]
    before = torch.stack((q, k, v))
    with pytest.raises(ValueError, match="out overlaps"):
        fused(q, k, v, cache=KVCache(**memory, slots=slots), **options)
    assert torch.equal(torch.stack((q, k, v)), before)


def test_slices_of_one_buffer_are_rotated_in_place_again():
    whole = torch.randn(2, 9, 8, 64).bfloat16()
    norm, tables = norm_of(SPECS["half"]), rotary.cos_sin(SPECS["half"], torch.arange(9))
    for _ in range(3):
        q, k = whole[:, :, :4], whole[:, :, 4:6]
        options = {"spec": SPECS["half"], "tables": tables, "norm": norm, "seq_dim": -3}
        want = fused(q.clone(), k.clone(), None, **options)[:2]
        fused(q, k, None, out=(q, k), **options)
        assert torch.equal(q, want[0])
        assert torch.equal(k, want[1])


def test_autograd_is_told_of_what_is_written_again():
    q, k, v, norm, tables, rows, cache = a_server(dtype=torch.float32)
    for _ in range(2):
        leaf = torch.ones(2, 3, 4, 64, requires_grad=True)
        out, versions = torch.ones_like(q), (cache.k._version, cache.v._version)
        product = leaf * out
        stages = {"norm": norm, "cache": cache, "tables": tables, "seq_dim": -3}
        fused(q, k, v, SPECS["half"], rows, out=(out,), **stages)
        assert (cache.k._version, cache.v._version) == tuple(n + 1 for n in versions)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("what", ["rows", "weight", "slots"])
def test_what_is_read_may_not_lie_in_what_is_written(what):
    """With many tokens other threads read row numbers that were rotated already."""
    spec, tokens = Rotary(head_dim=8), 6
    tables = rotary.cos_sin(spec, torch.arange(tokens))
    memory = torch.randn(2 * tokens * 8)
    x, k = memory.view(2, tokens, 8), torch.randn(2, tokens, 8)
    cache, rows, norm, out = None, None, None, x
    if what == "rows":
        rows = memory[: 2 * tokens].view(torch.int64).copy_(torch.arange(tokens))
    elif what == "weight":
        norm = rotary.Norm(memory[:8], None, eps=1e-6)
    else:
        kept = torch.zeros(2 * tokens, 1, 8)
        slots = kept.view(-1)[: 4 * tokens].view(torch.int64).copy_(torch.arange(2 * tokens))
        cache, out = rotary.KVCache(kept, None, slots.view(2, tokens)), None
        x, k = x[:, None], k[:, None]

    def call(x):
        rotary.fused(x, k if cache else None, None, spec, rows, tables=tables, norm=norm,
                     cache=cache, seq_dim=-2, out=None if out is None else x)  # fmt: skip

    if out is not None:
        call(x.clone())  # this form is kept
    before = memory.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="overlaps"):
            call(x)
    assert torch.equal(memory.view(torch.int32), before.view(torch.int32))
