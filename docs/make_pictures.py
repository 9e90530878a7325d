"""Draw the pictures of the README: `python docs/make_pictures.py` (needs the extra `plots`)."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from rotary import Rotary, cos_sin

FOLDER = Path(__file__).parent / "pictures"
EXACT, FLOAT32 = "#0072b2", "#d55e00"  # told apart by people who do not see colours alike


def relative_errors(spec: Rotary, precision: str, offsets: np.ndarray) -> np.ndarray:
    """Largest change of a score q . k / sqrt(head_dim) when both tokens move by each offset."""
    rng = np.random.default_rng(0)
    q, k = (
        rng.standard_normal((64, spec.head_dim // 2))
        + 1j * rng.standard_normal((64, spec.head_dim // 2))
        for _ in range(2)
    )
    positions = np.arange(64)

    def scores(offset: int) -> np.ndarray:
        cos, sin = cos_sin(spec, positions + offset, precision)
        turn = cos.astype(np.float64) + 1j * sin
        return ((q * turn) @ (k * turn).conj().T).real / np.sqrt(spec.head_dim)

    start = scores(0)
    return np.array([np.abs(scores(int(offset)) - start).max() for offset in offsets])


def bfloat16_error(spec: Rotary) -> float:
    """Largest change of a score when q and k are rounded to bfloat16, whatever the angles are."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 64, spec.head_dim), np.float32)
    rounded = [
        ((x.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        for x in (q, k)
    ]
    return float(np.abs(rounded[0] @ rounded[1].T - q @ k.T).max() / np.sqrt(spec.head_dim))


def precision_picture() -> None:
    """Error of a score against position: exact angles and float32 angles."""
    spec = Rotary(head_dim=128, base=500_000.0)
    offsets = np.unique(np.logspace(2, 39 * np.log10(2), 73).astype(np.int64))
    figure, axes = plt.subplots(figsize=(8, 4))
    for precision, color in (("float32", FLOAT32), ("exact", EXACT)):
        axes.loglog(offsets, relative_errors(spec, precision, offsets), color=color)
    rounding = bfloat16_error(spec)
    for level, text in ((1, "a typical score"), (rounding, "rounding q and k to bfloat16")):
        axes.axhline(level, color="0.7", linewidth=0.8, linestyle=":")
        axes.text(5e11, level * 1.25, text, color="0.4", ha="right", fontsize=9)
    axes.text(3e4, 1.2e-4, "float32 angles", color=FLOAT32)
    axes.text(3e4, 4e-7, "rotary: 64-bit turns", color=EXACT)
    axes.set_xlabel("position both tokens are moved to, tokens")
    axes.set_ylabel("largest change of a score")
    axes.set_title("A score depends on distance alone (head_dim 128, base 500 000)")
    axes.set_ylim(1e-8, 20)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / "precision.png", dpi=150)


if __name__ == "__main__":
    precision_picture()
