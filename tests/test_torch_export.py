"""Export in a process that did nothing before: nothing is in a cache, no mode was left behind."""

import json
import os
import subprocess
import sys

import pytest

START = """
import warnings
import numpy as np
import torch
import rotary
from rotary.nn import RotaryEmbedding

warnings.simplefilter("ignore")
LONG = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}
SPECS = [
    rotary.Rotary(head_dim=8, base=5e5, schedule="llama3", params=LONG),
    rotary.Rotary(head_dim=8, rotary_dim=4, start=2, layout="interleaved", out_layout="half"),
    rotary.Rotary(head_dim=8, schedule="dynamic",
                  params={"factor": 2.0, "original_max_position_embeddings": 16}),
]
generator = torch.Generator().manual_seed(0)
q, k = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (2, 1))
ids = torch.tensor([[0, 1, 70_000, 131_071, 5]])
"""


FORKS = """
import json, os, sys, traceback
import torch._dynamo
readers = {}
for name, script in json.load(sys.stdin).items():
    readers[name], writer = os.pipe()
    if not os.fork():
        with open(writer, "w") as report:
            try:
                exec(script)
                report.write("equal")
            except BaseException:
                report.write(traceback.format_exc())
        os._exit(0)
    os.close(writer)
said = {}
for name, reader in readers.items():
    with open(reader) as report:
        said[name] = report.read() or "ended by a signal"
    os.wait()
print(json.dumps(said))
"""


def run(scripts):
    """What each script said in a fork of one process, which has imported the library alone."""
    command = [sys.executable, "-c", START + FORKS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # of two forks that run side by side
    given = json.dumps(scripts)
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


EXPORTS = {  # by Dynamo or without it every spec in each precision; the one of a length in both
    False: [(0, "exact"), (1, "float32"), (2, "float32"), (2, "exact")],
    True: [(0, "float32"), (1, "exact"), (2, "float32")],
}


def exported(strict):
    return f"""
for number, precision in {EXPORTS[strict]}:
    spec = SPECS[number]
    module = RotaryEmbedding(spec, precision=precision)
    options = {{"positions": ids, "seq_len": 20 if spec.depends_on_length else None}}
    program = torch.export.export(module, (q, k), options, strict={strict})
    targets = {{str(n.target) for n in program.graph.nodes if n.op == "call_function"}}
    assert not any("rotary" in target for target in targets), targets
    for got, want in zip(program.module()(q, k, **options), module(q, k, **options)):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
"""


FAKE = """
from torch._subclasses.fake_tensor import FakeTensorMode
for precision in ("float32", "exact"):
    for spec in SPECS:
        seq_len = 20 if spec.depends_on_length else None
        with FakeTensorMode():
            x = torch.empty(1, 2, 5, 8)
            fake = rotary.apply(spec, x, precision=precision, seq_len=seq_len)
            assert fake.shape == x.shape
        real = rotary.apply(spec, q, precision=precision, seq_len=seq_len)
        assert type(real) is torch.Tensor  # nothing fake was kept
        assert (real - rotary.apply(spec, q, seq_len=seq_len)).abs().max() <= 1e-5
"""


# opset, spec, precision, and whether Dynamo traces it
ONNX = [(18, 1, "exact", False), (23, 0, "float32", False), (23, 0, "exact", True)]
BY_TORCH = f"""
import functools
import onnxruntime
from torch.onnx._internal.exporter._registration import ONNXRegistry
# torch compiles 500 functions of its exporter anew for every model
ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
for opset, number, precision, strict in {ONNX}:
    module = RotaryEmbedding(SPECS[number], precision=precision)
    given, kwargs = (module, (q, k)), {{"positions": ids}}
    if strict:
        given, kwargs = (torch.export.export(*given, kwargs, strict=True),), None
    program = torch.onnx.export(*given, kwargs=kwargs, dynamo=True, opset_version=opset,
                                verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [each.name for each in session.get_inputs()]
    feeds = dict(zip(names, (q.numpy(), k.numpy(), ids.numpy())))
    for got, want in zip(session.run(None, feeds), module(q, k, positions=ids)):
        error = abs(got - want.numpy()).max()
        assert error <= (1e-6 if precision == "exact" else 1e-5), (precision, error)
"""


@pytest.fixture
def said(once, request):
    scripts = {f"strict={strict}": exported(strict) for strict in EXPORTS}
    scripts["fake tensors"] = FAKE
    if "test_the_exporter_of_torch_for_onnx" in {item.name for item in request.session.items}:
        scripts["ONNX"] = BY_TORCH

    def fill(folder):
        (folder / "said.json").write_text(json.dumps(run(scripts)))

    return json.loads((once("torch_export", fill) / "said.json").read_text())


@pytest.mark.parametrize("name", ["strict=False", "strict=True", "fake tensors"])
def test_before_anything_else(said, name):
    assert said[name] == "equal"


@pytest.mark.slow
def test_the_exporter_of_torch_for_onnx(said):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert said["ONNX"] == "equal"
