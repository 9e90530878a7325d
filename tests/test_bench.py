"""The timings and the doctor: that what is timed is right, and in turn."""

import importlib.metadata
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from rotary import Rotary, bench, cos_sin, doctor
from rotary.bench import Shape, measure, numpy_cases, table_cases, torch_cases
from rotary.kernels import numpy as reference
from rotary.kernels.cpu import kernel as cpu
from rotary.kernels.geometry import Options

SHAPE = Shape(7, batch=2, q_heads=3, k_heads=1)
LAYOUTS = ("half", "interleaved")
NAMES = ["copy", "formula", "rotary", "rotary out=", "rotary in place"]


# --- measure ---


def test_every_round_runs_every_case_once_in_turn():
    order: list[str] = []
    cases = {name: lambda name=name: order.append(name) for name in "abc"}
    measure(cases, rounds=3, between=lambda: order.append("-"))
    assert order == list("-a-b-c") * 5  # two rounds of warm-up


def test_medians_are_those_of_the_counted_rounds(monkeypatch):
    now = 0.0
    spent = {"a": [900.0, 900.0, 5.0, 1.0, 3.0], "b": [0.0, 0.0, 2.0, 2.0, 8.0]}
    left = {name: iter(values) for name, values in spent.items()}

    def work(name: str) -> None:
        nonlocal now
        now += next(left[name])

    def pause() -> None:
        nonlocal now
        now += 1000.0  # what runs between is not counted

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now)
    found = measure({name: lambda name=name: work(name) for name in spent}, rounds=3, between=pause)
    assert found == {"a": (3.0, 1.0), "b": (2.0, 2.0)}
    assert found["a"].median == 3.0
    assert found["a"].best == 1.0


def test_a_result_is_freed_outside_the_time(monkeypatch):
    now = 0.0

    class Result:
        def __del__(self) -> None:
            nonlocal now
            now += 10.0

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now)
    assert measure({"a": Result}, rounds=4)["a"] == (0.0, 0.0)


# --- what is timed is right ---


def inputs_of(case: Any) -> tuple[Any, Any]:
    """q and k of a case, from its closure."""
    cells = dict(zip(case.__code__.co_freevars, case.__closure__, strict=True))
    return cells["q"].cell_contents, cells["k"].cell_contents


def rotated(spec: Rotary, *xs: np.ndarray) -> tuple[np.ndarray, ...]:
    cos, sin = cos_sin(spec, np.arange(SHAPE.seq))
    options = Options(spec.layout, None, spec.rotary_dim, spec.start, -2)
    return reference.rotate(xs, cos, sin, None, options, None)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_cases_give_the_law(layout, dtype):
    spec = Rotary(head_dim=16, layout=layout)
    cases = numpy_cases(spec, SHAPE, dtype)
    assert list(cases) == NAMES
    q, k = inputs_of(cases["rotary"])
    assert (q.shape, k.shape) == ((2, 3, 7, 16), (2, 1, 7, 16))
    assert q.dtype == k.dtype == dtype
    wanted = rotated(spec, q, k)
    for name in NAMES[1:]:
        for ours, law_says in zip(cases[name](), wanted, strict=True):
            assert ours.dtype == dtype
            np.testing.assert_array_equal(ours, law_says)
    np.testing.assert_array_equal(inputs_of(cases["rotary"])[0], q)
    again = cases["rotary in place"]()  # it turns on, from what it wrote
    for ours, law_says in zip(again, rotated(spec, *wanted), strict=True):
        np.testing.assert_array_equal(ours, law_says)


def test_the_numpy_copy_copies():
    case = numpy_cases(Rotary(head_dim=16), SHAPE)["copy"]
    q, k = inputs_of(case)
    case()
    cells = dict(zip(case.__code__.co_freevars, case.__closure__, strict=True))
    np.testing.assert_array_equal(cells["q_out"].cell_contents, q)
    np.testing.assert_array_equal(cells["k_out"].cell_contents, k)


# the formula in a half type rounds the tables, both products and the sum
ULPS = {torch.float32: 0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ULPS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_cases_give_the_law(layout, dtype, transposed):
    spec = Rotary(head_dim=16, layout=layout)
    cases = torch_cases(spec, SHAPE, dtype, transposed=transposed)
    assert list(cases) == NAMES
    q, k = inputs_of(cases["rotary"])
    assert (tuple(q.shape), tuple(k.shape)) == ((2, 3, 7, 16), (2, 1, 7, 16))
    assert q.is_contiguous() != transposed
    single = rotated(spec, *(x.float().numpy() for x in (q, k)))
    wanted = [torch.from_numpy(x).to(dtype) for x in single]
    for ours, copied in zip(cases["copy"](), (q, k), strict=True):
        assert torch.equal(ours, copied)
    for name in NAMES[2:]:
        for ours, law_says in zip(cases[name](), wanted, strict=True):
            assert ours.dtype == dtype
            assert torch.equal(ours, law_says), name
    for ours, law_says, x in zip(cases["formula"](), wanted, (q, k), strict=True):
        assert ours.dtype == dtype
        bound = 6 * ULPS[dtype] * x.abs().max().item()
        torch.testing.assert_close(ours, law_says, rtol=0, atol=bound)


def test_table_cases_build_the_same_tables():
    cases = table_cases(Rotary(head_dim=16, base=5e5), 100)
    # float32 angles: half a unit of 99, from a frequency that is itself rounded
    for ours, theirs in zip(cases["rotary"](), cases["numpy float32"](), strict=True):
        assert ours.dtype == theirs.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2 * 128 * 2.0**-24)


def test_the_default_shape_is_that_of_llama_3_8b():
    shape = Shape(5)
    assert shape.of(shape.q_heads, 128) == (1, 32, 5, 128)
    assert shape.of(shape.k_heads, 128) == (1, 8, 5, 128)


def test_what_runs_between_is_an_operator_of_torch():
    assert bench.torch_matmul()().shape == (512, 512)


def test_versions_name_the_machine_and_what_is_loaded():
    found = bench.versions()
    assert found["python"] == sys.version.split()[0]
    assert found["numpy"] == np.__version__
    assert found["torch"] == str(torch.__version__)
    assert found["cpu"]


def test_a_package_without_a_version_of_its_own_has_that_of_its_metadata():
    pytest.importorskip("rotary_embedding_torch")
    found = bench.versions()["rotary_embedding_torch"]
    assert found == importlib.metadata.version("rotary-embedding-torch")


# --- the doctor ---


def found() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine()}


def test_the_doctor_finds_equal_kernels():
    findings = found()
    assert findings["kernel"].found == "compiled loops, equal to the reference implementation"
    assert not findings["kernel"].advice
    assert findings["numpy"].found == np.__version__
    assert findings["torch"].found == str(torch.__version__).partition("+")[0] or (
        findings["torch"].found == torch.__version__
    )


def test_the_doctor_sees_a_broken_kernel(monkeypatch):
    def rotate(*arguments: Any) -> tuple[np.ndarray, ...]:
        (x,) = reference.rotate(*arguments)
        x[0, 3, 100, 17] = np.nextafter(x[0, 3, 100, 17], np.float32(9))  # one bit of one element
        return (x,)

    monkeypatch.setattr(cpu, "rotate", rotate)
    kernel = found()["kernel"]
    assert kernel.found == "differs from the reference implementation"
    assert "report this" in kernel.advice


def test_the_doctor_sees_that_numba_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    kernel = found()["kernel"]
    assert "no compiled loops" in kernel.found
    assert "pip install 'numba>=0.60'" in kernel.advice


@pytest.mark.parametrize("layer", ["omp", "tbb", "workqueue"])
def test_the_doctor_advises_on_threads(monkeypatch, layer):
    from rotary.kernels.cpu import threads

    monkeypatch.setattr(threads, "pool", lambda: layer)
    finding = found()["threads"]
    assert finding.found.endswith(f", {layer}")
    assert ("libgomp" in finding.advice) == (layer == "workqueue")


def test_the_doctor_advises_on_the_cache(tmp_path):
    stats = types.SimpleNamespace(cache_path=str(tmp_path))
    finding = doctor._cache(types.SimpleNamespace(stats=stats))
    assert finding == ("compiled cache", str(tmp_path), "")
    for nowhere in (None, str(tmp_path / "gone")):
        stats = types.SimpleNamespace(cache_path=nowhere)
        assert "NUMBA_CACHE_DIR" in doctor._cache(types.SimpleNamespace(stats=stats)).advice


@pytest.mark.parametrize(
    ("content", "mode", "advised"),
    [("always [madvise] never", "madvise", False), ("always madvise [never]", "never", True)],
)
def test_the_doctor_advises_on_huge_pages(monkeypatch, content, mode, advised):
    monkeypatch.setattr(doctor.Path, "read_text", lambda _: content)
    finding = doctor._huge_pages()
    assert finding.found == mode
    assert ("out=" in finding.advice) == advised


def test_the_doctor_says_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert found()["torch"] == ("torch", "not installed", "")
