"""Draw the pictures of the README and of docs/pictures: `python tools/make_pictures.py [NAME ...]`.

Needs the extra `plots`. Without names all are drawn, in half a minute, each for light and for dark
pages. A picture carries a summary of what it shows, so that a test can tell whether it is old.
"""

import argparse
import io
import json
from pathlib import Path

import numpy as np
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from PIL import Image, PngImagePlugin

from rotary import Rotary, cos_sin, from_hf_config, plots
from rotary.analysis import alternatives, extension, wanted_reach
from rotary.reach import reaches

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
CONFIGS = FOLDER.parent.parent / "tests" / "configs"
RESULTS = FOLDER.parent.parent / "benchmarks" / "results"
EXACT, FLOAT32 = "#0072b2", "#d55e00"  # told apart by people who do not see colours alike
PLAIN = Rotary(head_dim=128)
NAMED = {"Llama 2 7B: base 10,000, head_dim 128": PLAIN}
SHOWN = ("bfloat16", "tf32", "inv_freq_bfloat16", "float32", "bfloat16_table", "exact")


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


def precision_picture() -> Figure:
    """Error of a score against position: exact angles and float32 angles."""
    spec = Rotary(head_dim=128, base=500_000.0)
    offsets = np.unique(np.logspace(2, 39 * np.log10(2), 73).astype(np.int64))
    figure = Figure(figsize=(8, 4), layout="tight")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
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
    title = (
        "Both tokens are moved by the same distance: the score should stay the same\n"
        "head_dim 128, base 500,000; q, k and the score in float64, cos and sin in float32"
    )
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylim(1e-8, 20)
    return figure


def model(name: str, layer_type: str | None = None) -> Rotary:
    """The spec of a published config in tests/configs."""
    return from_hf_config(CONFIGS / f"{name}.json", layer_type)


def published() -> dict[str, Rotary]:
    """Four models that show a base raised, then a spectrum stretched."""
    return {
        "Llama 2 7B, base 10,000": model("llama-2-7b"),
        "Llama 3 8B, base 500,000": model("llama-3-8b"),
        "Llama 3.1 8B, base 500,000": model("llama-3.1-8b"),
        "Qwen2.5 7B, base 1,000,000": model("qwen2.5-7b"),
    }


def stretched() -> dict[str, Rotary]:
    """Llama 2's spectrum, trained on 4096 tokens, stretched to 32 768 by every method."""
    return extension.methods(PLAIN, 4096, 32_768)


def gallery_picture() -> Figure:
    """Models side by side, each at its length: the numbers of docs/results/models.md."""
    plain = ("llama-2-7b", "llama-3-8b", "llama-3.1-8b", "qwen2.5-7b", "qwen2.5-7b-yarn")
    others = ("qwen2-vl-7b", "mistral-nemo", "deepseek-v3", "gpt-oss-20b", "phi-3-mini-128k")
    older = ("gpt-neox-20b", "gpt-j-6b", "stablelm-2-zephyr-1.6b", "glm-4-9b-0414")
    rows = {name: reaches(CONFIGS / f"{name}.json")[None] for name in (*plain, *others, *older)}
    for kind, layer in reaches(CONFIGS / "gemma-3-27b.json").items():
        rows[f"gemma-3-27b, {kind.removesuffix('_attention')}"] = layer
    specs = {name: layer.head for name, layer in rows.items()}
    return plots.gallery(specs, seq_len={name: layer.length for name, layer in rows.items()})


def table(name: str) -> list[list[str]]:
    """Heads and rows of the first table of a page in docs/results: its searches take minutes."""
    text = (FOLDER.parent / "results" / f"{name}.md").read_text(encoding="utf-8")
    lines = text[text.index("\n| L |") + 1 :].split("\n\n")[0].splitlines()
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [heads, *rows]


def tokens(cell: str) -> int:
    """How many tokens 8k or 1M are."""
    return int(cell[:-1]) * {"k": 2**10, "M": 2**20}[cell[-1]]


def base_bound_picture() -> Figure:
    """Certified smallest bases of three head sizes, and published models."""
    (heads, *rows) = table("heads")
    smallest = {
        int(head.removeprefix("d = ")): {tokens(row[0]): float(row[column]) for row in rows}
        for column, head in enumerate(heads)
        if head in ("d = 64", "d = 128", "d = 256")
    }
    made_for = dict(zip(published(), (4096, 8192, 131_072, 131_072), strict=True))
    return plots.base_bound(smallest, specs=published(), contexts=made_for)


def comb_picture() -> Figure:
    """Which bases pass at 8192 tokens, from below the smallest to above the largest failing one."""
    (heads, *rows) = table("table2")
    row = next(dict(zip(heads, row, strict=True)) for row in rows if row[0] == "8k")
    marks = {"smallest base": float(row["b\\*"].strip("*")), "safe base": float(row["safe base"])}
    return plots.comb(8192, np.geomspace(5e4, 8e5, 1500), marks=marks)


def design_picture() -> Figure:
    """Frequencies that keep base 10,000 up to 1024 tokens and reach 8192, and other ways there."""
    made = json.loads((FOLDER.parent / "results" / "design.json").read_text(encoding="utf-8"))
    others = alternatives(PLAIN, made["length"], 1024)
    shown = ("as it is", "base 83,763.9", "ntk", "yarn", "longrope")
    specs = {"designed": Rotary.from_dict(made["spec"]), **{name: others[name] for name in shown}}
    return plots.design(specs, wanted_reach(PLAIN, 1024, made["length"]))


def roofline_picture() -> Figure:
    """The newest measured table: q of 32 and k of 8 heads, read once and written once."""
    report = json.loads(max(RESULTS.glob("????-??-??.json")).read_text())
    setting = (
        f"float32, half layout, q of 32 and k of 8 heads of 128 channels, 1 to 32,768 tokens; "
        f"{report['versions']['cpu']}, {report['threads']} threads, {report['date']}"
    )
    cases = ("copy", "rotary out=", "transformers eager", "transformers compiled")
    measured: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    for group, times in report["milliseconds"].items():
        words = group.split()
        if words[:3] == ["float32", "half", "seq"] and len(words) == 4:
            moved = 2 * 40 * int(words[3]) * 128 * 4
            for case in set(cases) & set(times):
                measured[case].append((moved, times[case] / 1e3))
    return plots.roofline(
        {case: found for case, found in measured.items() if found}, setting=setting
    )


PICTURES = {
    "precision": precision_picture,
    "similarity": lambda: plots.similarity(published(), 131_072),
    "frequency-ratio": lambda: plots.frequency_ratio(stretched(), trained=4096, seq_len=32_768),
    "wavelengths": lambda: plots.wavelengths(
        {name: spec for name, spec in published().items() if "Llama 3" in name},
        trained=8192, target=131_072,
    ),
    "decay": lambda: plots.decay(
        {f"base {base:,}, head_dim 128": Rotary(head_dim=128, base=base)
         for base in (100, 10_000, 500_000)},
        16_384,
    ),
    "scores": lambda: plots.scores(
        {"Llama 3 8B: base 500,000, head_dim 128": model("llama-3-8b")}, 16_384
    ),
    "walk": lambda: plots.walk(NAMED),
    "terms": lambda: plots.terms(NAMED, *np.random.default_rng(0).standard_normal((2, 128)), 10),
    "angle-coverage": lambda: plots.angle_coverage(
        {name: stretched()[name] for name in ("none", "ntk", "yarn", "longrope")},
        trained=4096, target=32_768,
    ),
    "cosine-map": lambda: plots.cosine_map(NAMED),
    "unit-circle": lambda: plots.unit_circle(NAMED, 1000, 8),
    "angle-error": lambda: plots.precision(NAMED, 2**24, arithmetics=SHOWN),
    "layout": lambda: plots.layout(
        {"head_dim 16, of which 8 channels are rotated": Rotary(
            head_dim=16, rotary_dim=8, layout="interleaved")}
    ),
    "grid": lambda: plots.grid(
        {"Qwen2-VL 7B: text, a 4 x 6 image, text": model("qwen2-vl-7b")}
    ),
    "base-bound": base_bound_picture,
    "comb": comb_picture,
    "design": design_picture,
    "gallery": gallery_picture,
    "roofline": roofline_picture,
}  # fmt: skip


def summary(figure: Figure) -> list[list[object]]:
    """What a figure shows, in short: its texts, and the size and the spread of its data."""

    def spread(values: object) -> list[float]:
        array = np.ma.masked_invalid(np.asarray(values, np.float64)).compressed()
        return [float(f(array)) for f in (np.min, np.mean, np.max)] if array.size else []

    shown: list[list[object]] = []
    for artist in figure.findobj(lambda artist: artist.get_visible()):
        if isinstance(artist, Text) and artist.get_text():
            shown.append(["text", artist.get_text(), artist.get_fontsize()])
        elif isinstance(artist, Line2D) and len(artist.get_xdata()):
            style = [str(artist.get_color()), artist.get_linestyle(), artist.get_linewidth()]
            shown.append(["line", *style, *map(spread, artist.get_data())])
        elif isinstance(artist, AxesImage | Collection) and artist.get_array() is not None:
            array = artist.get_array()
            shown.append(["map", artist.get_cmap().name, list(array.shape), spread(array)])
        elif isinstance(artist, Patch) and artist.get_alpha() != 0:
            shown.append(["patch", *map(float, artist.get_facecolor())])
    return shown


def written(figure: Figure, path: Path, shown: str = "") -> None:
    """A PNG of 256 colours, a third of the size; what it shows is its text `Summary`."""
    info = PngImagePlugin.PngInfo()
    if shown:
        info.add_text("Summary", shown, zip=True)
    picture = Image.open(io.BytesIO(plots.rendered(figure, ".png"))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(path, pnginfo=info, optimize=True)


def main(names: list[str]) -> None:
    """Draw the named pictures, or all."""
    FOLDER.mkdir(exist_ok=True)
    if unknown := set(names) - set(PICTURES):
        raise SystemExit(f"no picture {sorted(unknown)[0]!r}; there are {', '.join(PICTURES)}")
    for name in names or PICTURES:
        figure = PICTURES[name]()
        written(figure, FOLDER / f"{name}.png", json.dumps(summary(figure)))
        written(plots.dark(figure), FOLDER / f"{name}-dark.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; default: all")
    main(parser.parse_args().names)
