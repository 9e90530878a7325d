"""The main job on real input: Llama 3.1 8B's RoPE, its laws checked, its cost beside a copy."""

import importlib.util
import json
from collections.abc import Callable
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from . import bench
from .angles import Precision, cos_sin, inv_freq
from .configs import from_hf_config
from .kernels import Numbers
from .layouts import pair_slices
from .rotate import apply
from .spec import Rotary
from .strict_json import JSON

MODEL = "Llama 3.1 8B"
SEQ = 8192
FAR = 1_000_000


class Law(NamedTuple):
    """One law of RoPE as it was found on this run: the error, and the most it may be."""

    name: str
    error: float
    limit: float


def config() -> dict[str, JSON]:
    """The published config.json of Llama 3.1 8B, as shipped with the package.

    >>> config()["rope_theta"]
    500000.0
    """
    text = (files("rotary") / "configs" / "llama-3.1-8b.json").read_text("utf-8")
    data: dict[str, JSON] = json.loads(text)
    return data


def run(progress: Callable[[str], None] = lambda _: None) -> dict[str, JSON]:
    """The report of the demo: the spec, the laws, the times. `progress` is told each step."""
    data = config()
    spec = from_hf_config(data)
    assert spec is not None  # the shipped config has a rotation
    heads = data["num_attention_heads"], data["num_key_value_heads"]
    progress("rotating q and k of 8,192 tokens")
    laws = check_laws(spec, heads)
    shape = bench.Shape(SEQ, 1, *heads)
    times = {}
    progress("timing NumPy")
    times["NumPy float32"] = _times(bench.numpy_cases(spec, shape))
    if importlib.util.find_spec("torch") is not None:
        import torch

        for dtype in (torch.float32, torch.bfloat16):
            progress(f"timing {dtype}")
            name = str(dtype).removeprefix("torch.")
            cases = bench.torch_cases(spec, shape, dtype)
            times[f"PyTorch {name}"] = _times(cases, between=bench.torch_matmul())
    return {
        "model": MODEL,
        "spec": spec.to_dict(),
        "q": shape.of(heads[0], spec.head_dim),
        "k": shape.of(heads[1], spec.head_dim),
        "laws": [law._asdict() for law in laws],
        "float32_error": relative_error(spec, "float32"),
        "exact_error": relative_error(spec, "exact"),
        "times_ms": times,
        "versions": bench.versions(),
    }


def check_laws(spec: Rotary, heads: tuple[int, int]) -> list[Law]:
    """Rotate q and k of the real shape, and measure how far the laws are from holding.

    >>> all(law.error <= law.limit for law in check_laws(Rotary(head_dim=16), (2, 1)))
    True
    """
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, SEQ, spec.head_dim), np.float32) for n in heads)
    rotated_q, rotated_k = apply(spec, q, k)
    norms = [np.linalg.norm(x.astype(np.float64), axis=-1) for x in (q, rotated_q, k, rotated_k)]
    amplitude = inv_freq(spec)[1]
    norm_error = max(
        float(np.abs(after / (amplitude * before) - 1).max())
        for before, after in (norms[:2], norms[2:])
    )
    identity_error = float(np.abs(rotated_q[:, :, 0] / amplitude - q[:, :, 0]).max())
    return [
        Law("position 0 changes nothing", identity_error, 1e-6),
        Law("the norm is kept (relative)", norm_error, 1e-6),
        Law(f"a score depends on distance alone, to {FAR:,}", relative_error(spec, "exact"), 1e-6),
    ]


def relative_error(spec: Rotary, precision: Precision) -> float:
    """How much a score q . k / sqrt(head_dim) changes when both tokens move by a million."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 256, spec.head_dim), np.float64)
    positions = np.arange(256)
    first, second = pair_slices(spec.rotary_dim, spec.layout, spec.start)

    def scores(offset: int) -> Numbers:
        cos, sin = cos_sin(spec, positions + offset, precision)
        turned = []
        for x in (q, k):
            pairs = x[:, first] + 1j * x[:, second]
            turned.append(pairs * (cos.astype(np.float64) + 1j * sin))
        return (turned[0] @ turned[1].conj().T).real / np.sqrt(spec.head_dim)

    return float(np.abs(scores(FAR) - scores(0)).max())


def _times(cases: dict[str, bench.Case], between: bench.Case | None = None) -> dict[str, float]:
    measured = bench.measure(cases, rounds=3, between=between)
    return {name: timing.median * 1e3 for name, timing in measured.items()}
