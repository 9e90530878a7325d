"""Large new outputs: memory of torch and NumPy themselves, that asks for huge pages."""

import ast
import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rotary
from rotary.kernels.torch import pages

SPEC = rotary.Rotary(head_dim=64)
SEQ = 4096  # q of 8 heads then takes 8 MiB
MAKE = {"numpy": np.ones, "torch": torch.ones}
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the system has no huge pages")


def rotated(library, shape=(1, 8, SEQ, 64)):
    return rotary.apply(SPEC, MAKE[library](shape))


@pytest.fixture(autouse=True)
def fresh():
    """The system's call is looked up anew in each test."""
    pages._madvise.cache_clear()
    yield
    pages._madvise.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """The (address, size) that huge pages are asked for."""
    asked = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *call: asked.append(call[:2]) or -1)
    return asked


# --- what is asked, and that no answer matters ---


@ON_LINUX
def test_a_large_tensor_asks_for_huge_pages_from_the_page_it_starts_in(asked):
    y = rotated("torch")
    ((address, size),) = asked
    assert address % 4096 == 0
    assert 0 <= y.data_ptr() - address < 4096
    assert address + size == y.data_ptr() + y.nbytes


def test_a_small_tensor_asks_for_nothing(asked):
    rotated("torch", (1, 8, 16, 64))
    assert asked == []


@ON_LINUX
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("wants_grad", [False, True])
def test_the_system_marks_the_memory(transposed, wants_grad):
    """`hg` in /proc/self/smaps: huge pages were asked for."""
    x = torch.ones(1, SEQ, 8, 64).transpose(1, 2) if transposed else torch.ones(1, 8, SEQ, 64)
    y = rotary.apply(SPEC, x.requires_grad_(wants_grad))
    assert y.stride() == x.stride()
    assert "hg" in flags_of(y.data_ptr() + y.nbytes // 2)


def flags_of(address):
    """VmFlags of the mapping that holds an address."""
    is_here = False
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if "-" in first:
                start, stop = (int(end, 16) for end in first.split("-"))
                is_here = start <= address < stop
            elif is_here and first == "VmFlags:":
                return rest
    return pytest.skip("the kernel does not say")


@pytest.mark.parametrize(
    "lost", [OSError("no such library"), AttributeError("no such symbol"), None]
)
def test_a_system_without_the_call_or_the_advice_is_no_error(lost, monkeypatch):
    def library(name):
        raise lost

    if lost is None:
        monkeypatch.setattr(pages, "_ADVICE", None)
    else:
        monkeypatch.setattr(ctypes, "CDLL", library)
    assert torch.equal(rotated("torch")[:, :, 0], torch.ones(1, 8, 64))
    assert pages._madvise() is None


@ON_LINUX
def test_a_refusal_is_no_error(asked):
    assert torch.equal(rotated("torch")[:, :, 0], torch.ones(1, 8, 64))
    assert len(asked) == 1


# --- the memory is that of an ordinary array ---


def test_a_large_tensor_can_be_resized():
    assert rotated("torch").resize_(1, 9, SEQ, 64).shape == (1, 9, SEQ, 64)
    y = rotated("torch")
    y.untyped_storage().resize_(0)
    assert y.untyped_storage().nbytes() == 0


def test_a_large_array_can_be_resized():
    y = rotated("numpy")
    y.resize((1, 9, SEQ, 64), refcheck=False)
    assert y.shape == (1, 9, SEQ, 64)


@pytest.mark.parametrize("library", MAKE)
def test_what_is_released_goes_back_to_the_allocator(library):
    """No memory is kept for the next call: outputs of eight sizes leave nothing behind."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    rotated(library, (1, 40, SEQ, 64))
    before = resident()
    for heads in range(33, 41):
        rotated(library, (1, heads, SEQ, 64))
    assert resident() - before < 1 << 26


def test_nothing_of_ours_runs_while_an_array_dies():
    """An exception there, as by Ctrl-C, would be printed and lost."""
    files = Path(rotary.__file__).parent.rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    assert "__init__" in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert "__del__" not in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    assert not {name for name in called if name.endswith("finalize")}
