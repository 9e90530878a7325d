"""`rotary demo`: rotate q and k of Llama 3.1 8B, check the result, time it next to a copy."""

import json
from collections.abc import Callable
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from . import bench
from .angles import Precision, cos_sin, inv_freq
from .configs import from_hf_config
from .kernels import Numbers
from .rotate import apply, rotate
from .spec import Rotary
from .strict_json import JSON

MODEL = "Llama 3.1 8B"
SEQ = 8192
FAR = 1_000_000


class Check(NamedTuple):
    """A property of every RoPE, its error as measured in this run, and the largest one allowed."""

    name: str
    error: float
    limit: float


def config() -> dict[str, JSON]:
    """The published config.json of Llama 3.1 8B, as shipped with the package.

    >>> config()["rope_theta"]
    500000.0
    """
    text = (files("rotary") / "configs" / "llama-3.1-8b.json").read_text("utf-8")
    return json.loads(text)


def run(progress: Callable[[str], None] = lambda _: None) -> dict[str, JSON]:
    """Run the demo and return its report; `progress` is called with the name of each step."""
    data = config()
    spec = from_hf_config(data)
    assert spec is not None  # the shipped config has a rotation
    heads = data["num_attention_heads"], data["num_key_value_heads"]
    progress("rotating q and k of 8,192 tokens")
    checks = check_rotation(spec, heads)
    shape = bench.Shape(SEQ, 1, *heads)
    times = bench.measure_libraries(spec, shape, ("float32", "bfloat16"), 3, progress)
    return {
        "model": MODEL,
        "spec": spec.to_dict(),
        "q": shape.of(heads[0], spec.head_dim),
        "k": shape.of(heads[1], spec.head_dim),
        "checks": [check._asdict() for check in checks],
        "float32_error": score_change(spec, "float32"),
        "exact_error": score_change(spec, "exact"),
        "times_ms": bench.medians_in_ms(times),
        "versions": bench.versions(),
    }


def check_rotation(spec: Rotary, heads: tuple[int, int]) -> list[Check]:
    """Rotate q and k of the real shape, and measure how well the properties of RoPE hold.

    >>> all(each.error <= each.limit for each in check_rotation(Rotary(head_dim=16), (2, 1)))
    True
    """
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, SEQ, spec.head_dim), np.float32) for n in heads)
    rotated, factor = apply(spec, q, k), inv_freq(spec)[1]
    norm_error = 0.0
    for before, after in zip((q, k), rotated, strict=True):
        norms = [np.linalg.norm(x.astype(np.float64), axis=-1) for x in (before, after)]
        norm_error = max(norm_error, float(np.abs(norms[1] / (factor * norms[0]) - 1).max()))
    identity_error = float(np.abs(rotated[0][:, :, 0] / factor - q[:, :, 0]).max())
    return [
        Check("position 0 changes nothing", identity_error, 1e-6),
        Check("the norm stays the same (relative)", norm_error, 1e-6),
        Check(f"a score depends only on distance, to {FAR:,}",
              score_change(spec, "exact"), 1e-6),
    ]  # fmt: skip


def score_change(spec: Rotary, precision: Precision) -> float:
    """Return the largest change of a score q . k / sqrt(head_dim) if both tokens move by FAR."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 256, spec.head_dim), np.float64)

    def scores(offset: int) -> Numbers:
        cos, sin = cos_sin(spec, np.arange(256) + offset, precision)
        rotated_q, rotated_k = rotate((q, k), cos, sin, spec)
        return rotated_q @ rotated_k.T / np.sqrt(spec.head_dim)

    return float(np.abs(scores(FAR) - scores(0)).max())
