"""Tries an installed `rotary` from outside: `ENVIRONMENT/bin/python -I tools/smoke.py`.

It needs what `pip install rotary` brings and nothing else. With `--light` it also holds that Numba,
torch and JAX are absent. `python -m tools.release` runs it in fresh environments.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import rotary

LLAMA = {
    "model_type": "llama",
    "head_dim": 64,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
}


def run(*arguments: str) -> str:
    """What the console script of this environment prints."""
    command = str(Path(sys.prefix) / "bin" / "rotary")
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"rotary {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def check_place(absent: tuple[str, ...]) -> None:
    """The package is the installed one, with its types and data, and `absent` are absent."""
    folder = Path(rotary.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not installed in {sys.prefix}"
    assert (folder / "py.typed").is_file()
    assert rotary.__version__ == importlib.metadata.version("rotary")
    for name in absent:
        assert importlib.util.find_spec(name) is None, f"{name} is installed here"


def check_angles(spec: rotary.Rotary) -> None:
    """cos and sin against float64, which is exact enough at small positions."""
    positions = np.arange(512)
    cos, sin = rotary.cos_sin(spec, positions)
    inv_freq = spec.base ** (-np.arange(0, spec.head_dim, 2) / spec.head_dim)
    angles = positions[:, None] * inv_freq
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=1.5e-7)


def check_rotation(spec: rotary.Rotary) -> None:
    """q and k against complex numbers: channel i and i + head_dim/2 are one."""
    half = spec.head_dim // 2
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 8, 300, spec.head_dim), dtype=np.float32)
    k = rng.standard_normal((2, 2, 300, spec.head_dim), dtype=np.float32)
    angles = np.arange(300)[:, None] * spec.base ** (-np.arange(half) / half)
    for x, y in zip((q, k), rotary.apply(spec, q, k), strict=True):
        turned = (x[..., :half] + 1j * x[..., half:].astype(np.float64)) * np.exp(1j * angles)
        wanted = np.concatenate([turned.real, turned.imag], -1)
        np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-6)


def check_commands() -> None:
    """The console script: its version, the main job as JSON, a config file."""
    assert run("--version") == f"rotary {rotary.__version__}\n"
    report = json.loads(run("demo", "--json"))
    for check in report["checks"]:
        assert check["error"] <= check["limit"], check
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(LLAMA))
        read = json.loads(run("inspect", str(path), "--json"))
        assert read["spec"]["base"] == LLAMA["rope_theta"]
        for command in ("freqs", "diff", "doctor", "reach", "decay"):
            json.loads(run(command, str(path), "--json"))


def main() -> None:
    light = "--light" in sys.argv[1:]
    check_place(("torch", "jax", *(("numba", "llvmlite") if light else ())))
    spec = rotary.from_hf_config(LLAMA)
    assert spec == rotary.Rotary(head_dim=64, base=500_000.0)
    check_angles(spec)
    check_rotation(spec)
    check_commands()
    print(f"rotary {rotary.__version__} on Python {sys.version.split()[0]}, NumPy {np.__version__}")


if __name__ == "__main__":
    main()
